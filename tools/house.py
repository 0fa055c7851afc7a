"""The house, counted: lines, what is written more than once, and how far three messages walk.

python -m tools.house [--tree DIR] [--walks] [--names]

tree -> lines of each package (generated code aside), lines over 120 columns, runs of ten lines that stand in two places
     -> a streamer in this process, its clients in another one -> one message of each kind, traced, some times over
        publish    Zenoh -> log -> MQTT, until its subscriber has it
        subscribe  from MQTT to the embedded uSubscription, a new topic, until it is answered and the change is told
        poll       of the history, from MQTT, records at hand, until they are there

Counted are the functions and files of the product, in all threads, that every one of the runs has entered: whatever a
timer does meanwhile falls out. A function is what `def` makes; what it holds (comprehensions, lambdas) is a part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import logging
import sys
import tempfile
import threading
import tokenize
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import structlog

from transports.ports import free_port

PRODUCT: Final = (
    "uprotocol",
    "transports",
    "storage",
    "history",
    "usubscription",
    "usubscription_client",
    "streamer",
    "spark_ingest",
    "pyspark_uprotocol",
)
COLUMNS_MAX: Final = 120
SHARED_LINES: Final = 10
RUNS: Final = 7
SETTLE_S: Final = 0.03  # until a publish is confirmed, and a change told; the timers behind that fall out
WAIT_S: Final = 30.0
LAYOUT: Final = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.COMMENT}


# Lines


def sources(tree: Path) -> Iterator[Path]:
    for package in PRODUCT:
        yield from (path for path in sorted((tree / package).rglob("*.py")) if not path.stem.endswith("_pb2"))


def code_lines(text: str) -> int:
    """Without blank lines, comments, and strings that stand alone (docstrings)."""
    lines: set[int] = set()
    begins = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in LAYOUT:
            begins = begins or token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        elif token.type == tokenize.STRING and begins:
            begins = False  # a docstring, or a string that begins a line; the latter is rare
        elif token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
            begins = False
    return len(lines)


def shared_runs(tree: Path) -> list[str]:
    """Where SHARED_LINES lines of code in a row (blank lines, comments and imports aside) stand word for word twice."""
    places: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in sources(tree):
        numbered = [
            (number, line.strip())
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if line.strip() and not line.strip().startswith(("#", "import ", "from "))
        ]
        for begin in range(len(numbered) - SHARED_LINES + 1):
            run = tuple(line for _, line in numbered[begin : begin + SHARED_LINES])
            places[run].append(f"{path.relative_to(tree)}:{numbered[begin][0]}")
    shown: dict[tuple[str, ...], str] = {}  # by files: a longer run is told once
    for where in places.values():
        if len(where) > 1:
            shown.setdefault(tuple(place.rsplit(":", 1)[0] for place in where), " ~ ".join(where))
    return list(shown.values())


def show_lines(tree: Path) -> None:
    total: Counter[str] = Counter()
    print(f"{'package':<22}{'files':>6}{'lines':>8}{'code':>8}{'over 120':>10}")
    for package in PRODUCT:
        texts = [path.read_text() for path in sources(tree) if path.relative_to(tree).parts[0] == package]
        row = {
            "files": len(texts),
            "lines": sum(text.count("\n") for text in texts),
            "code": sum(map(code_lines, texts)),
            "over 120": sum(len(line) > COLUMNS_MAX for text in texts for line in text.splitlines()),
        }
        total.update(row)
        print(f"{package:<22}{row['files']:>6}{row['lines']:>8}{row['code']:>8}{row['over 120']:>10}")
    print(f"{'all':<22}{total['files']:>6}{total['lines']:>8}{total['code']:>8}{total['over 120']:>10}")
    runs = shared_runs(tree)
    print(f"places that share {SHARED_LINES} lines: {len(runs)}", *runs, sep="\n  ")


# Walks


class Tracer:
    """Which functions of `tree` are entered while it is armed, in all threads that were made after `install`."""

    def __init__(self, tree: Path) -> None:
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

    def take(self) -> Counter[CodeType]:
        self.armed = False
        seen, self._seen = self._seen, Counter()
        return seen


CONFIG: Final = """
[streamer]
authority = "device"
data_dir = "{data_dir}"
log_level = "error"

[[endpoint]]
name = "vehicle"
transport = "zenoh"
authorities = ["device"]
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
"""


async def walks(tree: Path, names: bool) -> None:
    from streamer.app import Streamer
    from streamer.config import loads
    from transports.mqtt5.broker import Broker

    with tempfile.TemporaryDirectory() as folder, Broker() as broker:
        tracer = Tracer(tree)
        tracer.install()
        port = free_port()
        config = loads(CONFIG.format(data_dir=folder, zenoh_port=port, mqtt_port=broker.port))
        streamer = await Streamer.create(config)
        running = asyncio.ensure_future(streamer.run())
        await asyncio.wait_for(streamer.ready.wait(), WAIT_S)
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--tree", str(tree), "--client", str(port), str(broker.port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for walk in ("publish", "subscribe", "poll"):
            await _ask(client, walk)  # warm
            await _ask(client, walk)
            seen = []
            for _ in range(RUNS):
                await asyncio.sleep(0.4)  # until timers of the run before have gone off
                tracer.armed = True
                await _ask(client, walk)
                if walk != "poll":
                    await asyncio.sleep(SETTLE_S)
                seen.append(tracer.take())
            _show_walk(tree, walk, seen, names)
        assert client.stdin is not None
        client.stdin.close()
        await client.wait()
        streamer.stop()
        await running


def _show_walk(tree: Path, walk: str, seen: list[Counter[CodeType]], names: bool) -> None:
    common = set.intersection(*(set(one) for one in seen))
    calls = {code: sorted(one[code] for one in seen)[len(seen) // 2] for code in common}
    files = Counter(str(Path(code.co_filename).relative_to(tree)) for code in common)
    print(f"{walk:<10} {sum(calls.values()):>5} calls {len(common):>5} functions {len(files):>4} files")
    if names:
        for file in sorted(files):
            inside = sorted(
                (code.co_firstlineno, code.co_qualname) for code in common if code.co_filename == str(tree / file)
            )
            print(f"    {file}: {', '.join(name for _, name in inside)}")


async def _ask(client: asyncio.subprocess.Process, walk: str) -> None:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(f"{walk}\n".encode())
    async with asyncio.timeout(WAIT_S):
        answer = json.loads(await client.stdout.readline() or b'"ended"')
    if answer != "done":
        raise SystemExit(f"the client was to {walk}, and says: {answer}")


async def client(zenoh_port: int, mqtt_port: int) -> None:
    """The other process: does what the lines on stdin say, and answers each."""
    from transports import plugin as plugins
    from uprotocol import uri as uris
    from uprotocol.communication import CallOptions, InMemoryRpcClient
    from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest
    from uprotocol.core.usubscription.v3.usubscription_pb2 import SubscriptionRequest
    from uprotocol.message import UMessageBuilder, UPayload
    from uprotocol.status import UStatusError
    from uprotocol.transport import LocalUriProvider
    from uprotocol.v1.uattributes_pb2 import UPayloadFormat

    here, there = LocalUriProvider("device", 0x8001, 1), LocalUriProvider("cloud", 0x8002, 1)
    zenoh = plugins.create("zenoh", {"connect": [f"tcp/127.0.0.1:{zenoh_port}"]}, here)
    mqtt = plugins.create("mqtt5", {"host": "127.0.0.1", "port": mqtt_port}, there)
    heard = asyncio.Event()

    class Hearer:
        def on_receive(self, message: Any) -> None:
            heard.set()

    topic, number = uris.uri("device", 0x8001, 1, 0x8000), 0x8001

    async with zenoh, mqtt:
        rpc = InMemoryRpcClient(mqtt, there)
        await rpc.open()

        async def subscribe(to: Any) -> None:
            request = SubscriptionRequest(topic=to)
            request.subscriber.uri.CopyFrom(there.get_source())
            await rpc.invoke_method(uris.uri("device", 0, 3, 1), UPayload.pack(request), CallOptions(5_000))

        async def publish() -> None:
            heard.clear()
            await zenoh.send(
                UMessageBuilder.publish(topic).build_from_upayload(
                    UPayload(b"x" * 256, UPayloadFormat.UPAYLOAD_FORMAT_RAW)
                )
            )
            await heard.wait()

        async def subscribe_anew() -> None:
            nonlocal number
            number += 1
            await subscribe(uris.uri("device", 0x8001, 1, number))

        async def poll() -> None:
            request = PollRequest(earliest=True)
            request.topics.append(topic)
            await rpc.invoke_method(uris.uri("device", 4, 1, 2), UPayload.pack(request), CallOptions(5_000))

        await mqtt.register_listener(topic, Hearer())
        for _ in range(50):  # the services answer UNAVAILABLE until the gateway listens
            try:
                await subscribe(topic)
                break
            except UStatusError:
                await asyncio.sleep(0.2)
        todo: dict[str, Callable[[], Awaitable[None]]] = {
            "publish": publish,
            "subscribe": subscribe_anew,
            "poll": poll,
        }
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            try:
                async with asyncio.timeout(WAIT_S / 2):
                    await todo[line.decode().strip()]()
                answer = "done"
            except Exception as error:
                answer = repr(error)
            print(json.dumps(answer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="another checkout than this one")
    parser.add_argument("--walks", action="store_true", help="trace the three walks, too (needs mosquitto)")
    parser.add_argument("--names", action="store_true", help="with --walks: name the functions")
    parser.add_argument("--client", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    sys.path.insert(0, str(tree))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if arguments.client:
        asyncio.run(client(*arguments.client))
        return
    show_lines(tree)
    if arguments.walks:
        asyncio.run(walks(tree, arguments.names))


if __name__ == "__main__":
    main()
