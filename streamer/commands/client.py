"""up-streamer subscribe, publish, call, replay: an ordinary uEntity on one network; demo: all networks."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated, Final

import typer

from storage import logs
from streamer.commands import terminal
from streamer.commands.options import AsJson, Data, DemoOptions, Network, Payload, Seed, Where
from streamer.commands.options import uri as uri_of
from streamer.commands.terminal import Misuse
from streamer.operating import known
from streamer.operating.readable import as_dict, payload_value
from streamer.walk.ledger import units_of
from uprotocol import uri as uris
from uprotocol.attributes import PUBLISH
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.pacing import Pace
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UPayloadFormat, UPriority
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

RECEIVED_MAX: Final = 100_000  # messages that wait to be printed; beyond it, receiving waits
PROGRESS_S: Final = 0.5  # between two progress lines
# messages, and KiB of their payload, a second: below what a gateway takes of one vehicle while it is busy
# (limits.authority_messages_per_s); what it drops above that, the network has told us that it took
RATE_PER_S: Final = 4_000
SEND_BATCH_MAX: Final = 256  # messages per send_batch
START_MS_MAX: Final = 4_102_444_800_000  # the year 2100; a larger value is probably in another unit


def subscribe(
    topics: Annotated[
        list[str], typer.Argument(help="Topics, as uProtocol URIs; patterns only with --no-usubscription.")
    ],
    where: Where,
    count: Annotated[int | None, typer.Option(min=1, help="End after this many messages.")] = None,
    no_usubscription: Annotated[
        bool, typer.Option("--no-usubscription", help="Do not subscribe at the network's uSubscription service, too.")
    ] = False,
    usubscription: Annotated[bool, typer.Option("--usubscription", hidden=True)] = True,  # the default
    as_json: AsJson = False,
) -> None:
    """Subscribe to topics and print the messages.

    Example: [bold]up-streamer subscribe up://vehicle1/8001/1/8002 -t mqtt5 -a cloud -s host=127.0.0.1 --json[/]
    """
    logs.configure()
    usubscription = usubscription and not no_usubscription
    network, filters = where.network(), list(map(uri_of, topics))
    heard = [uris.format(topic) for topic in filters]
    listening = json.dumps({"listening": heard}) if as_json else f"listening to {', '.join(topics)}"
    terminal.finish(_listen(network, filters, listening, count=count, subscribe=usubscription, as_json=as_json))


def publish(
    topic: Annotated[
        str, typer.Argument(help="The topic; its authority is ours, unless --authority names another one.")
    ],
    where: Where,
    payload: Payload,
    count: Annotated[int, typer.Option(min=1, max=1_000_000)] = 1,
    ttl_ms: Annotated[int | None, typer.Option(min=0, help="Time to live of the message; 0: no limit.")] = None,
    priority: Annotated[str, typer.Option(help="CS0 to CS6.")] = "CS1",
    rate: Annotated[
        int, typer.Option(min=1, help="Messages per second, at most; one counts once more for each KiB of its payload.")
    ] = RATE_PER_S,
    as_json: AsJson = False,
) -> None:
    """Publish a message.

    Example: [bold]up-streamer publish up://vehicle1/8001/1/8002 --text hello -t zenoh -s
    'connect=["tcp/127.0.0.1:7447"]'[/]
    """
    logs.configure()
    uri = uri_of(topic)
    network, data, level = where.network(uri.authority_name or None), payload.read(), _priority(priority)

    def message() -> UMessage:
        builder = UMessageBuilder(PUBLISH, uri).with_priority(level)
        if ttl_ms is not None:
            builder.with_ttl(ttl_ms)
        return builder.build_from_upayload(data)

    first = message()  # a mistake is reported before the network is opened
    units = units_of(len(first.payload))
    if count * units > rate:
        _tell_rate(f"{rate // units or 1} messages", rate)
    messages = itertools.chain([first], (message() for _ in range(count - 1)))
    terminal.finish(_send(network, messages, Pace(rate, time.monotonic), lambda one: show(one, as_json)))


def _tell_rate(what: str, rate: float) -> None:
    below = ", less than a gateway takes of one sender by default" if rate <= RATE_PER_S else ""
    terminal.err.print(f"sending at most {what} a second{below}; --rate changes it", markup=False)


def _priority(text: str) -> UPriority.ValueType:
    name = f"UPRIORITY_{text.upper()}"
    if name not in set(UPriority.keys()):
        raise Misuse(f"--priority is CS0 to CS6, got {text!r}")
    return UPriority.Value(name)


def call(
    method: Annotated[str, typer.Argument(help="The method, as a uProtocol URI.")],
    where: Where,
    payload: Payload,
    timeout_ms: Annotated[int, typer.Option(min=1)] = 10_000,
    as_json: AsJson = False,
) -> None:
    """Call a method and print its response. For methods of core.usubscription and core.ustreamer, --json-payload is the
    request, and the response is printed as JSON.

    Example: [bold]up-streamer call up://vehicle1/4/1/1 -t zenoh -a vehicle1 -s 'connect=["tcp/127.0.0.1:7447"]'[/]
    """
    logs.configure()
    network, uri = where.network(), uri_of(method)
    method_known = known.method(uri)
    data = payload.read(method_known.request if method_known is not None else None)
    started = time.monotonic()
    answer = terminal.finish(_call(network, uri, data or UPayload(), CallOptions(timeout_ms=timeout_ms)))
    value = payload_value(answer, method_known.answer if method_known is not None else None)
    report = {
        "method": uris.format(uri),
        "payload_format": UPayloadFormat.Name(answer.format)[len("UPAYLOAD_FORMAT_") :],
        "payload": value,
        "milliseconds": round((time.monotonic() - started) * 1000, 1),
    }
    terminal.tell(as_json, report, value if isinstance(value, str) else json.dumps(value))


def replay(
    where: Where,
    data: Data = None,
    seed: Seed = 1,
    seconds: Annotated[
        int, typer.Option(min=1, help="Length of the simulated drive; it has a row of samples per second.")
    ] = 600,
    all_signals: Annotated[
        bool, typer.Option("--all", help="Publish the signals of all authorities, not only our own.")
    ] = False,
    start_ms: Annotated[
        int | None,
        typer.Option(min=0, max=START_MS_MAX, help="Time of the first row in Unix milliseconds; without it, now."),
    ] = None,
    rate: Annotated[
        float,
        typer.Option(min=0.1, help="Samples per second; the default is below what a gateway takes of one sender."),
    ] = RATE_PER_S,
    as_json: AsJson = False,
) -> None:
    """Replay a drive: each sample as one publish.

    Example: [bold]up-streamer replay --data drive.csv -a mcu1 -t dds -s domain_id=7 --rate 1000[/]
    """
    from streamer.commands.demo import drive as drives

    logs.configure()
    network, drive = where.network(), drives.load(data, seed, seconds)
    publishers = sorted({signal.publisher for signal in drive.signals})
    if not all_signals and network.authority not in publishers:
        raise Misuse(
            f"authority {network.authority!r} publishes nothing of a drive, {' and '.join(publishers)} do: be one "
            "of them, or add --all"
        )
    for line in drive.report():
        terminal.err.print(f"{data}: {line}", markup=False)
    begin_ms = int(time.time() * 1000) if start_ms is None else start_ms
    samples = (one for one in drive.samples(begin_ms) if all_signals or one.signal.publisher == network.authority)
    shown = 0.0

    def progress(published: int) -> None:
        nonlocal shown
        if as_json and time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            print(json.dumps({"published": published}), flush=True)

    async def work() -> Counter[str]:
        async with network.open() as opened:
            if len(drive.rows) * len(drive.signals) > rate:
                _tell_rate(f"{rate:g} samples", rate)
            return await drives.replay(opened, samples, rate=rate, on_progress=progress)

    counts = terminal.finish(work())
    report = {"done": True, "published": counts.total(), "problems": drive.problems_total}
    line = f"published {counts.total()} samples on {len(counts)} topics"
    terminal.tell(as_json, {**report, "topics": dict(sorted(counts.items()))}, line)


def demo(options: DemoOptions) -> None:
    """Send a drive across three networks to a subscriber, and store it with Spark.

    Example: [bold]up-streamer demo --data drive.csv[/]
    """
    from streamer.commands.demo import demo as demos
    from streamer.commands.demo.counts import DemoResult

    logs.configure()

    async def perform() -> DemoResult:
        return await demos.Demo(options, terminal.err).run()  # created here, so that Ctrl-C removes its folder

    outcome = terminal.finish(perform())
    outcome.show(terminal.out)
    if not outcome.adds_up:
        terminal.err.print("[bold red]it does not add up[/]")
    print(json.dumps(outcome.as_dict()), flush=True)
    raise typer.Exit(0 if outcome.adds_up else terminal.EXIT_FAILED)


# Messages as text and JSON


def show(message: UMessage, as_json: bool) -> None:
    terminal.tell(as_json, as_dict(message) if as_json else {}, "" if as_json else as_line(message))


def as_line(message: UMessage) -> str:
    data = as_dict(message)
    payload = data.get("payload")
    if isinstance(payload, dict) and "path" in payload:
        value = next((payload[key] for key in ("double_value", "string_value", "bool_value") if key in payload), None)
        payload = f"{payload['path']} = {value}"
    way = f"{data['source']} -> {data['sink']}" if "sink" in data else data["source"]
    return f"{data['type']:<12} {way}  {payload if payload is not None else ''}"


# On the network


class Collector:
    """A listener that puts messages into a queue."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[UMessage] = asyncio.Queue(RECEIVED_MAX)

    def on_receive(self, message: UMessage) -> Awaitable[None] | None:
        if self.queue.full():
            return self.queue.put(message)
        self.queue.put_nowait(message)
        return None


async def _listen(
    network: Network, topics: Sequence[UUri], listening: str, *, count: int | None, subscribe: bool, as_json: bool
) -> None:
    """Prints `listening`, then the messages on `topics`, at most `count`. `subscribe`: subscribe at the uSubscription,
    too."""
    from usubscription_client.client import USubscriptionClient

    collector = Collector()
    async with network.open() as transport:
        for topic in topics:
            await transport.register_listener(topic, collector)
        client = USubscriptionClient(transport, network.local, network.authority) if subscribe else None
        try:
            if client is not None:
                await client.open()
                for topic in topics:
                    await client.subscribe(topic)
            print(listening, file=sys.stderr, flush=True)  # standard output has only messages
            for _ in itertools.count() if count is None else range(count):
                show(await collector.queue.get(), as_json)
        finally:
            if client is not None:
                for topic in topics:
                    await client.unsubscribe(topic)
                await client.close()


async def _send(
    network: Network, messages: Iterator[UMessage], pace: Pace, on_sent: Callable[[UMessage], None]
) -> None:
    """Sends the messages, no faster than `pace` in units. Raises the UStatusError of the first that is refused."""
    async with network.open() as transport:
        while batch := list(itertools.islice(messages, SEND_BATCH_MAX)):
            await pace.spend(sum(units_of(len(one.payload)) for one in batch))
            for message, status in zip(batch, await transport.send_batch(batch), strict=True):
                if status.code:
                    raise UStatusError.from_status(status)
                on_sent(message)


async def _call(network: Network, method: UUri, payload: UPayload, options: CallOptions) -> UPayload:
    async with network.open() as transport, InMemoryRpcClient(transport, network.local) as rpc:
        return await rpc.invoke_method(method, payload, options)
