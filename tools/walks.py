"""Walks: counts the functions and files of the product that one message enters, by a tracer.

a gateway in this process, an application and a reader in other processes -> one message of each kind, seven times

    publish      a topic that is subscribed to: Zenoh -> log -> MQTT, until its subscriber has it
    subscribe    from MQTT to the embedded uSubscription: a new topic, until the call is answered
    poll         of the history, from MQTT: the records exist already; until the call is answered
    followed     a publisher that keeps its own history: until a subscriber on MQTT has the message
    epoch        one epoch of one record, at its reader (traced there, not at the gateway)
    micro-batch  one record through the Spark data source: latestOffset, partitions, read (traced there, without Spark)

A function counts if every run has entered it, in any thread; so functions of timers do not count. A function is
what `def` defines; comprehensions and lambdas belong to the function around them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import structlog

from tools.house import PRODUCT
from transports.ports import free_port

RUNS: Final = 7
SETTLE_S: Final = 0.03  # until a publish is confirmed and a change is notified; later timers do not count
QUIET_S: Final = 0.4  # between two runs: until the timers of the previous run have fired
WAIT_S: Final = 30.0
LOCAL: Final = ("publish", "subscribe", "poll", "followed")  # traced in the gateway
REMOTE: Final = ("epoch", "micro-batch")  # traced in the reader


class Function(NamedTuple):
    file: str
    """path below the tree"""
    line: int
    name: str


Calls = Counter[Function]


class Tracer:
    """The functions of `tree` that are entered while it is armed, in all threads started after `install`."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._prefixes = tuple(f"{tree / package}/" for package in PRODUCT)
        self._ours: dict[CodeType, bool] = {}
        self._seen: Counter[CodeType] = Counter()
        self.armed = False

    def install(self) -> None:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _argument: Any) -> None:
        if not self.armed or event != "call":
            return
        code = frame.f_code
        ours = self._ours.get(code)
        if ours is None:
            named = not code.co_name.startswith("<")
            ours = self._ours[code] = named and code.co_filename.startswith(self._prefixes)
        if ours:
            self._seen[code] += 1

    def take(self) -> Calls:
        self.armed = False
        seen, self._seen = self._seen, Counter()
        calls = Calls()
        for code, count in seen.items():
            file = str(Path(code.co_filename).relative_to(self._tree))
            calls[Function(file, code.co_firstlineno, code.co_qualname)] += count
        return calls


CONFIG: Final = """
[streamer]
authority = "device"
data_dir = "{data_dir}"
log_level = "error"

[[endpoint]]
name = "vehicle"
transport = "zenoh"
authorities = ["device", "reader"]
settings = {{ listen = ["tcp/127.0.0.1:{zenoh_port}"] }}

[[endpoint]]
name = "cloud"
transport = "mqtt5"
authorities = ["cloud"]
usubscription = "none"
settings = {{ host = "127.0.0.1", port = {mqtt_port} }}

[[rule]]
from = "vehicle"
to = "cloud"

[[rule]]
from = "cloud"
to = "vehicle"

[history]
record = ["//device/8001/1/9000"]

[[follow]]
endpoint = "vehicle"
service = "//device/80030004/1/0"

[[epochs]]
name = "lap"
by = "progress"
topics = ["//device/8001/1/9000"]
"""


class Other:
    """Another process of this module. It executes the command on each line of stdin and answers with a line of JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, tree: Path, role: str, zenoh_port: int, mqtt_port: int) -> Other:
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tools.walks", "--tree", str(tree), role, str(zenoh_port), str(mqtt_port)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=Path(__file__).parents[1],
            )
        )

    async def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n".encode())
        async with asyncio.timeout(WAIT_S):
            answer = json.loads(await self._process.stdout.readline() or b'{"error": "the process has ended"}')
        if "error" in answer:
            raise SystemExit(f"{what}: {answer['error']}")
        return answer["done"]

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def walks(tree: Path) -> dict[str, Calls]:
    """Walk -> the functions that all runs have entered, with the median number of calls.

    `micro-batch` is left out if pyspark or pyarrow is missing. Raises SystemExit if a process fails.
    """
    from streamer.app import Streamer
    from streamer.config import loads
    from tools.broker import Broker

    found: dict[str, Calls] = {}
    with tempfile.TemporaryDirectory() as folder, Broker() as broker:
        tracer = Tracer(tree)
        tracer.install()
        port = free_port()
        config = loads(CONFIG.format(data_dir=folder, zenoh_port=port, mqtt_port=broker.port))
        streamer = await Streamer.create(config)
        running = asyncio.ensure_future(streamer.run())
        await asyncio.wait_for(streamer.assembly.ready.wait(), WAIT_S)
        application = await Other.start(tree, "application", port, broker.port)
        for walk in LOCAL:
            for _ in range(2):  # the first runs create state that later ones find
                await application.ask(walk)
            seen = []
            for _ in range(RUNS):
                await asyncio.sleep(QUIET_S)
                tracer.armed = True
                await application.ask(walk)
                if walk != "poll":
                    await asyncio.sleep(SETTLE_S)
                seen.append(tracer.take())
            found[walk] = _common(seen)
        reader = await Other.start(tree, "reader", port, broker.port)  # its polls would belong to the walks above
        for walk in REMOTE:
            seen = []
            for _ in range(RUNS + 2):
                await asyncio.sleep(QUIET_S)
                asked = asyncio.ensure_future(reader.ask(walk))
                await application.ask("epoch")
                rows = await asked
                seen.append(Calls({Function(*row[:3]): row[3] for row in rows}))
            if all(seen):
                found[walk] = _common(seen[2:])
        await application.close()
        await reader.close()
        streamer.stop()
        await running
    return found


def _common(seen: list[Calls]) -> Calls:
    common = set.intersection(*(set(one) for one in seen))
    return Calls({function: sorted(one[function] for one in seen)[len(seen) // 2] for function in common})


def files(calls: Calls) -> list[str]:
    return sorted({function.file for function in calls})


def show_walks(found: Mapping[str, Calls], names: bool) -> None:
    for walk, calls in found.items():
        print(f"{walk:<12} {calls.total():>5} calls {len(calls):>5} functions {len(files(calls)):>4} files")
        for file in files(calls) if names else ():
            inside = sorted((function.line, function.name) for function in calls if function.file == file)
            print(f"    {file}: {', '.join(name for _, name in inside)}")


# The other processes

Step = Callable[[], Awaitable[Any]]


async def _obey(steps: Mapping[str, Step]) -> None:
    """Execute the command on each line of stdin, and answer it, until stdin ends."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        try:
            async with asyncio.timeout(WAIT_S / 2):
                answer = {"done": await steps[line.decode().strip()]()}
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


async def application(zenoh_port: int, mqtt_port: int) -> None:
    """Publishes on Zenoh; subscribes and polls from MQTT."""
    from history.publisher import HistoryPublisher
    from transports import plugin as plugins
    from uprotocol import uri as uris
    from uprotocol import uuid as uuids
    from uprotocol.communication import CallOptions, InMemoryRpcClient
    from uprotocol.core.ustreamer.v1.ustreamer_pb2 import LogicalTime, PollRequest, ProgressRequest
    from uprotocol.core.usubscription.v3.usubscription_pb2 import SubscriptionRequest
    from uprotocol.message import UMessageBuilder, UPayload
    from uprotocol.status import UStatusError
    from uprotocol.transport import LocalUriProvider
    from uprotocol.v1.uattributes_pb2 import UPayloadFormat

    here, there = LocalUriProvider("device", 0x8001, 1), LocalUriProvider("cloud", 0x8002, 1)
    keeper = LocalUriProvider("device", 0x8003, 1)
    link = {"connect": [f"tcp/127.0.0.1:{zenoh_port}"]}
    zenoh, keeping = plugins.create("zenoh", link, here), plugins.create("zenoh", link, keeper)
    mqtt = plugins.create("mqtt5", {"host": "127.0.0.1", "port": mqtt_port}, there)
    payload = UPayload(b"x" * 256, UPayloadFormat.UPAYLOAD_FORMAT_RAW)
    topic, kept = uris.uri("device", 0x8001, 1, 0x8000), uris.uri("device", 0x8003, 1, 0x8000)
    lap, progress = uris.uri("device", 0x8001, 1, 0x9000), uris.uri("device", 4, 1, 4)
    topic_number, lap_number = 0x8001, 0
    arrived = asyncio.Event()
    options = CallOptions(5_000)

    class Subscriber:
        def on_receive(self, message: Any) -> None:
            arrived.set()

    async with contextlib.AsyncExitStack() as stack:
        for transport in (zenoh, keeping, mqtt):
            await stack.enter_async_context(transport)
        rpc = await stack.enter_async_context(InMemoryRpcClient(mqtt, there))
        local_rpc = await stack.enter_async_context(InMemoryRpcClient(zenoh, here))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        publisher = await stack.enter_async_context(HistoryPublisher(keeping, keeper, Path(folder) / "own.db"))

        async def subscribe(to: Any) -> None:
            request = SubscriptionRequest(topic=to)
            request.subscriber.uri.CopyFrom(there.get_source())
            await rpc.invoke_method(uris.uri("device", 0, 3, 1), UPayload.pack(request), options)

        async def subscribe_until_served(to: Any) -> None:
            for _ in range(50):  # the services answer UNAVAILABLE until the gateway listens
                try:
                    return await subscribe(to)
                except UStatusError:
                    await asyncio.sleep(0.2)

        async def publish() -> None:
            arrived.clear()
            await zenoh.send(UMessageBuilder.publish(topic).build_from_upayload(payload))
            await arrived.wait()

        async def subscribe_new_topic() -> None:
            nonlocal topic_number
            topic_number += 1
            await subscribe(uris.uri("device", 0x8001, 1, topic_number))

        async def poll() -> None:
            request = PollRequest(earliest=True)
            request.topics.append(topic)
            await rpc.invoke_method(uris.uri("device", 4, 1, 2), UPayload.pack(request), options)

        async def publish_kept() -> None:
            arrived.clear()
            await publisher.publish(0x8000, payload)
            await arrived.wait()

        async def epoch() -> None:
            nonlocal lap_number
            lap_number += 1
            begin = ProgressRequest(group="lap")
            begin.changes.add(time=LogicalTime(numbers=[lap_number]), change=1)
            await local_rpc.invoke_method(progress, UPayload.pack(begin), options)
            message = UMessageBuilder.publish(lap).build_from_upayload(payload)
            await zenoh.send(message)
            end = ProgressRequest(group="lap")
            closed = end.changes.add(time=LogicalTime(numbers=[lap_number]), change=-1)
            closed.last.add(topic=lap, id=uuids.to_bytes(message.attributes.id), count=1)
            await local_rpc.invoke_method(progress, UPayload.pack(end), options)

        for one in (topic, kept):
            await mqtt.register_listener(one, Subscriber())
            await subscribe_until_served(one)
        await _obey(
            {
                "publish": publish,
                "subscribe": subscribe_new_topic,
                "poll": poll,
                "followed": publish_kept,
                "epoch": epoch,
            }
        )


async def reader(tree: Path, zenoh_port: int) -> None:
    """Reads epochs and what the Spark data source reads, and traces itself."""
    from history.epochs.assembling import Assembler
    from history.reading.client import HistoryClient
    from history.reading.subscriber import GaplessSubscriber
    from transports import plugin as plugins
    from uprotocol import uri as uris
    from uprotocol.communication import InMemoryRpcClient
    from uprotocol.transport import LocalUriProvider

    tracer = Tracer(tree)
    tracer.install()
    local = LocalUriProvider("reader", 0x9001, 1)
    settings = {"connect": [f"tcp/127.0.0.1:{zenoh_port}"]}
    topics = [uris.parse("//device/8001/1/9000")]
    async with contextlib.AsyncExitStack() as stack:
        zenoh = await stack.enter_async_context(plugins.create("zenoh", settings, local))
        rpc = await stack.enter_async_context(InMemoryRpcClient(zenoh, local))
        client = HistoryClient(rpc, uris.uri("device", 4, 1))
        subscriber = await stack.enter_async_context(GaplessSubscriber(client, topics, assembler=Assembler(topics)))
        epochs = subscriber.epochs()

        async def epoch() -> list[list[Any]]:
            tracer.armed = True
            await anext(epochs)
            return _rows(tracer.take())

        batches = _Batches(settings, tracer)
        await _obey({"epoch": epoch, "micro-batch": lambda: asyncio.to_thread(batches.next)})


class _Batches:
    """Calls the Spark data source for a micro-batch, in Spark's order."""

    def __init__(self, settings: Mapping[str, Any], tracer: Tracer) -> None:
        self._settings, self._tracer = settings, tracer
        self._stream: Any = None
        self._end: Any = None

    def next(self) -> list[list[Any]]:
        """Waits for new records and reads them. Does nothing if pyspark or pyarrow is missing."""
        try:
            from pyspark.sql.streaming.datasource import ReadAllAvailable

            from spark_ingest.source import UProtocolDataSource
        except ImportError:
            return []
        if self._stream is None:
            options = {
                "transport": "zenoh",
                "transportConfig": json.dumps(self._settings),
                "authority": "device",
                "localAuthority": "reader",
                "topics": "//device/8001/1/9000",
            }
            source = UProtocolDataSource(options)
            self._stream = source.streamReader(None)  # type: ignore[arg-type]
            self._end = self._stream.initialOffset()
        self._tracer.armed = True
        start, rows = self._end, 0
        deadline = time.monotonic() + WAIT_S / 2
        while not rows and time.monotonic() < deadline:
            self._end = self._stream.latestOffset(start, ReadAllAvailable())
            for partition in self._stream.partitions(start, self._end):
                rows += sum(batch.num_rows for batch in self._stream.read(partition))
        self._stream.commit(self._end)
        return _rows(self._tracer.take())


def _rows(calls: Calls) -> list[list[Any]]:
    return [[*function, count] for function, count in calls.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("role", choices=("application", "reader"))
    parser.add_argument("zenoh_port", type=int)
    parser.add_argument("mqtt_port", type=int)
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    sys.path.insert(0, str(tree))
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for answers
    if arguments.role == "application":
        asyncio.run(application(arguments.zenoh_port, arguments.mqtt_port))
    else:
        asyncio.run(reader(tree, arguments.zenoh_port))


if __name__ == "__main__":
    main()
