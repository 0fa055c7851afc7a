"""The command line. Only this module prints and exits.

run  check                           the streamer
usubscription                        a uSubscription service of its own
subscribe  publish  call  replay     an ordinary uEntity on one network
history  cursors  dead-letters       what a streamer keeps, and for whom
pause  resume  paused                stop and start dispatching a topic to a peer
vehicles  subscriptions              who sends how much, who wants what
demo                                 all of it at once
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import structlog
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from storage import logs
from streamer import config as configs
from streamer import control, dead_letter
from streamer import paused as pauses
from streamer.app import Streamer, serve
from streamer.commands import client, cursors, files
from streamer.notify import ServiceManager
from streamer.parts import endpoints_of, make_transport
from uprotocol import uri as uris
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.message import UPayload
from uprotocol.status import UStatusError, code_name, invalid
from uprotocol.transport import UTransport
from uprotocol.v1.uattributes_pb2 import UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

SWITCH_INTERVAL_S: Final = 0.001  # threads of the transports wait at most this long for the loop, and it for them
PROGRESS_S: Final = 0.5  # between two lines about progress
START_MS_MAX: Final = 4_102_444_800_000  # the year 2100; more is most likely a time in another unit
# messages hold no cycles: looking for them after every 700 new objects costs a tenth of the speed
GC_THRESHOLDS: Final = (50_000, 20, 50)
EXIT_FAILED: Final = 1
# of `run`: the file is wrong, and to start again would change nothing; systemd's unit knows it
EXIT_CONFIG: Final = os.EX_CONFIG
LOG_NAME: Final = "history.db"  # in a data_dir

app = typer.Typer(
    name="up-streamer",
    help="The uProtocol dispatcher: joins MQTT 5, Zenoh and DDS, forwards what is subscribed to, and loses nothing on "
    "the way.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)

cursors_app = typer.Typer(
    name="cursors",
    help="What waits for whom in a streamer's log: list, adopt, forget, consumers, release.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(cursors_app)
out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="The streamer's TOML file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Transport = Annotated[str | None, typer.Option("--transport", "-t", help="Transport: zenoh, mqtt5, dds, ...")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="A setting of the transport, KEY=VALUE (JSON values; repeatable)."),
]
AuthorityOption = Annotated[str | None, typer.Option("--authority", "-a", help="Who we are: our authority.")]
FromConfig = Annotated[
    Path | None, typer.Option("--config", "-c", help="Take the network from a streamer's TOML file ...")
]
FromEndpoint = Annotated[str | None, typer.Option("--endpoint", "-e", help="... and this endpoint of it.")]
EntityOption = Annotated[str, typer.Option("--entity", help="Our uEntity id, hexadecimal.")]
DataDir = Annotated[Path | None, typer.Option(help="The streamer's data_dir ...")]
OrConfig = Annotated[Path | None, typer.Option("--config", "-c", help="... or its TOML file.")]


class LogFormat(enum.Enum):
    TEXT = "text"
    JSON = "json"


DEFAULT_ENTITY = f"{client.ENTITY:X}"


@contextlib.contextmanager
def _errors(exit_code: int = EXIT_FAILED, log_format: logs.Format = "text") -> Iterator[None]:
    """The world's errors, as a line and an exit code."""
    try:
        yield
    except UStatusError as error:
        if log_format == "json":  # standard error is the log, and whoever reads it takes no other lines
            structlog.get_logger().error("the process ends", code=code_name(error.code), error=error.message)
            raise typer.Exit(exit_code) from None
        err.print(f"[bold red]error[/] {code_name(error.code)}:", end=" ")
        err.print(error.message, markup=False)
        raise typer.Exit(exit_code) from None


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work` to its end, or to Ctrl-C or SIGTERM."""

    async def until_signalled() -> Any:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        return await task

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with _errors():
        try:
            return asyncio.run(until_signalled())
        except asyncio.CancelledError:
            raise typer.Exit(130) from None


def _note_hangup() -> None:
    structlog.get_logger().warning(
        "SIGHUP changes nothing: the configuration is read at the start, so restart to have it read again"
    )


def _log_to_stderr(level: str = "warning", format: logs.Format = "text") -> None:
    logs.configure(level, format)


def _network(
    transport: str | None,
    settings: list[str] | None,
    authority: str | None,
    config: Path | None,
    endpoint: str | None,
    entity: str,
) -> client.Network:
    try:
        ue_id = int(entity, 16)
    except ValueError:
        raise invalid(f"--entity is a hexadecimal number, got {entity!r}") from None
    given = client.parse_settings(settings or [])
    if config is not None:
        if endpoint is None or transport is not None:
            raise invalid("say --config FILE with --endpoint NAME and without --transport")
        network = client.network_of(config, endpoint, authority, ue_id)
        return client.Network(network.transport, network.authority, {**network.settings, **given}, ue_id)
    if transport is None or authority is None:
        raise invalid(
            "say which network: --transport NAME --authority WHO [--set KEY=VALUE ...], or --config FILE "
            "--endpoint NAME"
        )
    return client.Network(transport, authority, given, ue_id)


def _data_dir(data_dir: Path | None, config: Path | None) -> Path:
    if (data_dir is None) == (config is None):
        raise invalid("say either --data-dir DIR or --config FILE")
    return data_dir if data_dir is not None else configs.load(config or Path()).streamer.data_dir


def _row(table: Table, *cells: object) -> None:
    table.add_row(*(Text(_plain(str(cell))) for cell in cells))


def _plain(text: str) -> str:
    """What strangers have written is shown as it is: neither markup nor a terminal's commands."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _print(as_json: bool, data: dict[str, Any], line: str) -> None:
    if as_json:
        print(json.dumps(data), flush=True)
    else:
        out.print(_plain(line), markup=False)


def _show(message: UMessage, as_json: bool) -> None:
    _print(as_json, client.as_dict(message) if as_json else {}, "" if as_json else client.as_line(message))


# The streamer


@app.command()
def run(config: ConfigFile, as_json: AsJson = False) -> None:
    """Run a streamer until Ctrl-C or SIGTERM. Ends with exit code 78 if its file is wrong.

    Example: [bold]up-streamer run --config vehicle.toml[/]
    """
    with _errors(EXIT_CONFIG):
        loaded = configs.load(config)
    _log_to_stderr(loaded.streamer.log_level, loaded.streamer.log_format)

    def on_ready(streamer: Streamer) -> None:
        data = {
            "ready": True,
            "authority": loaded.authority,
            "admin_port": streamer.admin.port if streamer.admin else None,
        }
        _print(as_json, data, f"ready: {loaded.authority} joins {', '.join(e.name for e in streamer.endpoints)}")
        manager.ready(lambda: "; ".join(streamer.problems()) or "ready")

    async def work() -> None:
        gc.set_threshold(*GC_THRESHOLDS)
        stopping = asyncio.Event()

        def stop() -> None:
            manager.stopping()
            stopping.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        loop.add_signal_handler(signal.SIGHUP, _note_hangup)
        async with manager:
            await serve(loaded, on_ready, stopping)

    manager = ServiceManager()

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with _errors(log_format=loaded.streamer.log_format):
        asyncio.run(work())


@app.command()
def check(config: ConfigFile, as_json: AsJson = False) -> None:
    """Check a streamer's TOML file: every mistake, with its line, and every file that it names and that can't be used
    here.

    Example: [bold]up-streamer check --config vehicle.toml[/]
    """
    with _errors(EXIT_CONFIG):
        loaded = configs.load(config)
    with _errors():
        found_files = files.findings(loaded, config.read_text(encoding="utf-8"))
        if wrong := [f"{config}:{one.line}: {one.what}" for one in found_files if one.fatal]:
            raise UStatusError(UCode.FAILED_PRECONDITION, "\n".join(wrong))
        made = asyncio.run(_make_transports(loaded))
    endpoints = [
        {
            "name": one.name,
            "transport": one.transport,
            "authorities": one.authorities,
            "usubscription": loaded.usubscription_of(one),
            "home": one.name == loaded.home.name,
        }
        for one in loaded.endpoint
    ]
    rules = [{"from": rule.from_, "to": rule.to, "allow": rule.allow, "deny": rule.deny} for rule in loaded.rules]
    unclaimed = _unclaimed(loaded)
    notes = [
        *(f"{config}:{one.line}: {one.what}" for one in found_files if not one.fatal),
        *endpoints_of(loaded, made).notes(),
    ]
    with _errors():
        paused = pauses.read(loaded.streamer.data_dir / pauses.FILE)
    if as_json:
        told = {waits.endpoint: waits.records for waits in unclaimed}
        found = {
            "ok": True,
            "authority": loaded.authority,
            "endpoints": endpoints,
            "rules": rules,
            "unclaimed": told,
            "notes": notes,
        }
        print(json.dumps({**found, "paused": [one._asdict() for one in paused]}))
        return
    table = Table(title=f"{config}: authority {loaded.authority}")
    for column in ("endpoint", "transport", "authorities", "uSubscription"):
        table.add_column(column, overflow="fold")
    for one in loaded.endpoint:
        home = " (home)" if one.name == loaded.home.name else ""
        table.add_row(one.name + home, one.transport, ", ".join(one.authorities), loaded.usubscription_of(one))
    out.print(table)
    for rule in loaded.rules:
        limits = "".join(f"  {word} {those}" for word, those in (("allow", rule.allow), ("deny", rule.deny)) if those)
        out.print(f"{rule.from_} -> {rule.to}{limits}", markup=False)
    for note in notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True)
    for waits in unclaimed:
        out.print(
            f"[bold red]{waits.records} records wait for endpoint {waits.endpoint!r}[/], which this file does not have"
        )
    for pause in paused:
        out.print(f"paused: {pause.topic} to {pause.peer}", markup=False)


async def _make_transports(config: configs.Config) -> dict[str, UTransport]:
    """Each endpoint's transport, which does no I/O, and none is opened: a constructor may refuse what its settings'
    model lets through."""
    return {section.name: make_transport(config, section) for section in config.endpoint}


def _unclaimed(config: configs.Config) -> list[cursors.Listed]:
    """What waits in the streamer's log for endpoints that its file does not have; nothing where the log can't be read
    now."""
    names = {endpoint.name for endpoint in config.endpoint}
    try:
        found = cursors.listed(config.streamer.data_dir / LOG_NAME)
    except UStatusError:
        return []
    return [one for one in found if one.records and one.endpoint not in names]


@app.command()
def usubscription(
    authority: Annotated[str, typer.Option("--authority", "-a", help="Whose subscriptions and topics it keeps.")],
    transport: Annotated[str, typer.Option("--transport", "-t", help="Transport: zenoh, mqtt5, dds, ...")],
    store: Annotated[Path, typer.Option(help="The SQLite file; made if there is none.")],
    settings: Settings = None,
    log_format: Annotated[LogFormat, typer.Option(help="Of the log, on standard error.")] = LogFormat.TEXT,
    as_json: AsJson = False,
) -> None:
    """Run a uSubscription service of its own, versions 3 and 4, until Ctrl-C or SIGTERM.

    Example: [bold]up-streamer usubscription -a cloud -t mqtt5 -s port=1883 --store cloud.db[/]
    """
    from usubscription import __main__ as service

    _log_to_stderr("info", log_format.value)
    with _errors():
        given = {
            "authority": authority,
            "transport": transport,
            "store": store,
            "settings": client.parse_settings(settings or []),
        }
        loaded = service.validate(given, "options")

    def tell(state: dict[str, Any]) -> None:
        ready = f"ready: core.usubscription of {authority} on {transport}"
        _print(
            as_json, state, ready if state["ready"] else f"every request is answered UNAVAILABLE: {state['trouble']}"
        )

    raise typer.Exit(service.run(loaded, tell))


# An ordinary uEntity


@app.command()
def subscribe(
    topics: Annotated[
        list[str], typer.Argument(help="Topics, as uProtocol URIs; patterns only with --no-usubscription.")
    ],
    transport: Transport = None,
    settings: Settings = None,
    authority: AuthorityOption = None,
    config: FromConfig = None,
    endpoint: FromEndpoint = None,
    entity: EntityOption = DEFAULT_ENTITY,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many messages.")] = None,
    usubscription: Annotated[bool, typer.Option(help="Tell the network's uSubscription service.")] = True,
    as_json: AsJson = False,
) -> None:
    """Subscribe to topics and print what comes.

    Example: [bold]up-streamer subscribe up://vehicle1/8001/1/8002 -t mqtt5 -a cloud -s host=127.0.0.1 --json[/]
    """
    _log_to_stderr()
    with _errors():
        network = _network(transport, settings, authority, config, endpoint, entity)
        filters = [uris.parse(topic) for topic in topics]

    def on_listening() -> None:  # on standard error, so that standard output holds messages only
        said = (
            json.dumps({"listening": [uris.format(topic) for topic in filters]})
            if as_json
            else f"listening to {', '.join(topics)}"
        )
        print(said, file=sys.stderr, flush=True)

    def each(message: UMessage) -> None:
        _show(message, as_json)

    _run(client.listen(network, filters, each, count=count, subscribe=usubscription, on_listening=on_listening))


@app.command()
def publish(
    topic: Annotated[
        str, typer.Argument(help="The topic; its authority is who we are, unless --authority says otherwise.")
    ],
    transport: Transport = None,
    settings: Settings = None,
    authority: AuthorityOption = None,
    config: FromConfig = None,
    endpoint: FromEndpoint = None,
    entity: EntityOption = DEFAULT_ENTITY,
    text: Annotated[str | None, typer.Option(help="Payload: text.")] = None,
    json_payload: Annotated[str | None, typer.Option(help="Payload: JSON.")] = None,
    hex: Annotated[str | None, typer.Option(help="Payload: bytes in hexadecimal.")] = None,
    file: Annotated[Path | None, typer.Option(help="Payload: the bytes of a file.")] = None,
    count: Annotated[int, typer.Option(min=1, max=1_000_000)] = 1,
    ttl_ms: Annotated[int | None, typer.Option(min=0, help="Life of the message; 0: for ever.")] = None,
    priority: Annotated[str, typer.Option(help="CS0 to CS6.")] = "CS1",
    as_json: AsJson = False,
) -> None:
    """Publish a message.

    Example: [bold]up-streamer publish up://vehicle1/8001/1/8002 --text hello -t zenoh -s
    'connect=["tcp/127.0.0.1:7447"]'[/]
    """
    _log_to_stderr()
    with _errors():
        uri = uris.parse(topic)
        network = _network(transport, settings, authority or uri.authority_name or None, config, endpoint, entity)
        payload = client.payload_of(text, json_payload, hex, file)
        level = _priority(priority)
    for message in _run(client.publish(network, uri, payload, count=count, ttl_ms=ttl_ms, priority=level)):
        _show(message, as_json)


def _priority(text: str) -> UPriority.ValueType:
    name = f"UPRIORITY_{text.upper()}"
    if name not in set(UPriority.keys()):
        raise invalid(f"--priority is CS0 to CS6, got {text!r}")
    return UPriority.Value(name)


@app.command()
def call(
    method: Annotated[str, typer.Argument(help="The method, as a uProtocol URI.")],
    transport: Transport = None,
    settings: Settings = None,
    authority: AuthorityOption = None,
    config: FromConfig = None,
    endpoint: FromEndpoint = None,
    entity: EntityOption = DEFAULT_ENTITY,
    text: Annotated[str | None, typer.Option(help="Payload: text.")] = None,
    json_payload: Annotated[str | None, typer.Option(help="Payload: JSON.")] = None,
    hex: Annotated[str | None, typer.Option(help="Payload: bytes in hexadecimal.")] = None,
    file: Annotated[Path | None, typer.Option(help="Payload: the bytes of a file.")] = None,
    timeout_ms: Annotated[int, typer.Option(min=1)] = 10_000,
    as_json: AsJson = False,
) -> None:
    """Call a method and print its answer.

    Example: [bold]up-streamer call up://vehicle1/4/1/1 -t zenoh -a vehicle1 -s 'connect=["tcp/127.0.0.1:7447"]'[/]
    """
    _log_to_stderr()
    with _errors():
        network = _network(transport, settings, authority, config, endpoint, entity)
        uri = uris.parse(method)
        payload = client.payload_of(text, json_payload, hex, file)
    started = time.monotonic()
    answer: UPayload = _run(client.call(network, uri, payload, CallOptions(timeout_ms=timeout_ms)))
    shown = UMessage(payload=answer.data)
    shown.attributes.payload_format = answer.format
    value = client.payload_value(shown)
    data = {
        "method": uris.format(uri),
        "payload_format": UPayloadFormat.Name(answer.format)[len("UPAYLOAD_FORMAT_") :],
        "payload": value,
        "milliseconds": round((time.monotonic() - started) * 1000, 1),
    }
    _print(as_json, data, str(value))


@app.command()
def replay(
    data: Annotated[Path | None, typer.Option(help="A recorded drive (CSV); without it, a simulated one.")] = None,
    seed: Annotated[int, typer.Option(help="Of the simulated drive.")] = 1,
    seconds: Annotated[
        int, typer.Option(min=1, help="Length of the simulated drive; a row of samples per second.")
    ] = 600,
    all_signals: Annotated[
        bool, typer.Option("--all", help="Publish the signals of all authorities, not only our own.")
    ] = False,
    start_ms: Annotated[
        int | None,
        typer.Option(min=0, max=START_MS_MAX, help="Time of the first row in Unix milliseconds; without it, now."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.1, help="Samples per second; as fast as the network takes them.")
    ] = None,
    transport: Transport = None,
    settings: Settings = None,
    authority: AuthorityOption = None,
    config: FromConfig = None,
    endpoint: FromEndpoint = None,
    entity: EntityOption = DEFAULT_ENTITY,
    as_json: AsJson = False,
) -> None:
    """Replay a drive: each sample as one publish.

    Example: [bold]up-streamer replay --data drive.csv -a mcu1 -t dds -s domain_id=7 --rate 1000[/]
    """
    from streamer.demo import replay as replays

    _log_to_stderr()
    with _errors():
        network = _network(transport, settings, authority, config, endpoint, entity)
        drive = replays.load(data, seed, seconds)
        publishers = sorted({signal.publisher for signal in drive.signals})
        if not all_signals and network.authority not in publishers:
            raise invalid(
                f"authority {network.authority!r} publishes nothing of a drive, {' and '.join(publishers)} do: be one "
                "of them, or add --all"
            )
    for problem in drive.problems:
        err.print(f"{data}: {problem}", markup=False)
    if drive.problems_total > len(drive.problems):
        err.print(f"{data}: and {drive.problems_total - len(drive.problems)} more")
    samples = replays.samples_of(
        drive, None if all_signals else network.authority, int(time.time() * 1000) if start_ms is None else start_ms
    )
    shown = 0.0

    def progress(published: int) -> None:
        nonlocal shown
        if as_json and time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            print(json.dumps({"published": published}), flush=True)

    async def work() -> Counter[str]:
        async with network.open() as opened:
            return await replays.replay(opened, samples, rate=rate, on_progress=progress)

    counts: Counter[str] = _run(work())
    data_ = {
        "done": True,
        "published": counts.total(),
        "problems": drive.problems_total,
        "topics": dict(sorted(counts.items())),
    }
    _print(as_json, data_, f"published {counts.total()} samples on {len(counts)} topics")


@app.command(name="history")
def history_(
    service: Annotated[
        str,
        typer.Argument(help="The authority of the streamer; or verify, or acknowledge, which look into its data_dir."),
    ],
    topics: Annotated[list[str] | None, typer.Argument(help="Topic patterns; none means all.")] = None,
    transport: Transport = None,
    settings: Settings = None,
    authority: AuthorityOption = None,
    config: FromConfig = None,
    endpoint: FromEndpoint = None,
    entity: EntityOption = DEFAULT_ENTITY,
    poll: Annotated[bool, typer.Option(help="Print the records instead of the overview.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Records to print with --poll.")] = 100,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the log is, for verify and acknowledge; or say --config.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look into a streamer's history, over the network: an overview per topic, or the records themselves.

    verify reads everything in its data_dir and says what is damaged (exit code 1); acknowledge says that a person has
    seen it.

    Example: [bold]up-streamer history vehicle1 -t zenoh -a vehicle1 -s 'connect=["tcp/127.0.0.1:7447"]' --poll --limit
    10[/]
    """
    from history.subscriber import HistoryClient
    from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DescribeResponse, PollRequest

    if service in ("verify", "acknowledge"):
        (_verify if service == "verify" else _acknowledge)(data_dir, config, as_json)
        return
    _log_to_stderr()
    with _errors():
        network = _network(transport, settings, authority, config, endpoint, entity)
        patterns = [uris.parse(topic) for topic in topics or []]
        streamer = uris.uri(service, 0x0004, 1, 0)

    async def work() -> tuple[DescribeResponse | None, list[UMessage]]:
        async with network.open() as opened, InMemoryRpcClient(opened, network.local) as rpc:
            histories = HistoryClient(rpc, streamer)
            if not poll:
                return await histories.describe(patterns), []
            messages: list[UMessage] = []
            request = PollRequest(topics=patterns)
            while len(messages) < limit:
                request.max_records = limit - len(messages)
                reply = await histories.poll(request)
                messages += [UMessage.FromString(data) for batch in reply.batches for data in batch.message]
                if not reply.more:
                    break
                del request.positions[:]
                request.positions.extend(reply.next)
            return None, messages

    description, messages = _run(work())
    for message in messages:
        _show(message, as_json)
    if description is not None:
        _show_description(description, as_json)


def _show_description(description: Any, as_json: bool) -> None:
    logs = [
        {
            "incarnation": one.incarnation.hex(),
            "durable": one.durable,
            "oldest_seq": one.oldest_seq,
            "newest_seq": one.newest_seq,
            "stored_bytes": one.stored_bytes,
        }
        for one in description.logs
    ]
    topics = [
        {
            "topic": uris.format(one.topic),
            "oldest_seq": one.oldest_seq,
            "newest_seq": one.newest_seq,
            "records": one.records,
            "newest_time": one.newest_time.ToJsonString(),
        }
        for one in description.topics
    ]
    if as_json:
        print(json.dumps({"logs": logs, "topics": topics}))
        return
    for title, rows in (("logs", logs), ("topics", topics)):
        table = Table(title=title)
        for column in rows[0] if rows else []:
            table.add_column(column, overflow="fold")
        for row in rows:
            _row(table, *row.values())
        out.print(table)


def _verify(data_dir: Path | None, config: Path | None, as_json: bool) -> None:
    """Read everything that the log holds, and say what of it is damaged. Writes nothing; the streamer may run."""
    from history.verify import verify

    with _errors():
        report = verify(_data_dir(data_dir, config) / LOG_NAME)
    found, told = ([client.damage_as_dict(one) for one in those] for those in (report.found, report.told))
    if as_json:
        data = {
            "log": str(report.path),
            "sound": report.is_sound,
            "format": report.version,
            "incarnation": report.incarnation.hex(),
            "records": report.records,
            "oldest_seq": report.oldest_seq,
            "newest_seq": report.newest_seq,
            "found": found,
            "found_total": report.found_total,
            "not_acknowledged": told,
        }
        print(json.dumps(data))
    else:
        out.print(
            f"{report.path}: {report.records} records, {report.oldest_seq} to {report.newest_seq}, format "
            f"{report.version}",
            markup=False,
        )
        for word, rows in (("damaged", found), ("told earlier, not acknowledged", told)):
            for row in rows:
                out.print(f"{word}: {client.damage_as_line(row)}", markup=False)
        if report.found_total > len(found):
            out.print(f"and {report.found_total - len(found)} more")
        out.print("sound" if report.is_sound else "[bold red]damaged[/]")
    raise typer.Exit(0 if report.is_sound else EXIT_FAILED)


def _acknowledge(data_dir: Path | None, config: Path | None, as_json: bool) -> None:
    """A person has seen what the log has lost; a streamer that runs notices within some seconds."""
    from history.damage import acknowledge

    with _errors():
        seen = acknowledge(_data_dir(data_dir, config) / LOG_NAME)
    for one in seen:
        row = client.damage_as_dict(one)
        _print(as_json, row, client.damage_as_line(row))
    if not as_json:
        out.print(f"{len(seen)} acknowledged")


@cursors_app.command(name="list")
def cursors_list(data_dir: DataDir = None, config: OrConfig = None, as_json: AsJson = False) -> None:
    """How many records wait for each endpoint. Writes nothing; the streamer may run.

    Example: [bold]up-streamer cursors list --config vehicle.toml[/]
    """
    with _errors():
        found = cursors.listed(_data_dir(data_dir, config) / LOG_NAME)
    for one in found:
        line = f"{one.endpoint}: {one.records} records wait after {one.seq}, away for {one.absent_hours} h"
        extra = f", {one.parked_topics} topics parked" if one.parked_topics else ""
        _print(
            as_json,
            dataclasses.asdict(one),
            line + extra + ("" if one.holds else ", and retention by age does not wait for it"),
        )


@cursors_app.command(name="adopt")
def cursors_adopt(
    old: Annotated[str, typer.Argument(help="The endpoint for which records wait.")],
    new: Annotated[str, typer.Argument(help="The endpoint that gets them.")],
    data_dir: DataDir = None,
    config: OrConfig = None,
    as_json: AsJson = False,
) -> None:
    """Give what waits for one endpoint to another one. The streamer must be stopped.

    Example: [bold]up-streamer cursors adopt cloud cloud-eu --config vehicle.toml[/]
    """
    with _errors():
        path = _data_dir(data_dir, config) / LOG_NAME
    one: cursors.Listed = _run(cursors.adopt(path, old, new))
    _print(as_json, dataclasses.asdict(one), f"{one.records} records wait for {new} now")


@cursors_app.command(name="forget")
def cursors_forget(
    endpoint: Annotated[str, typer.Argument(help="The endpoint for which records wait.")],
    data_dir: DataDir = None,
    config: OrConfig = None,
    as_json: AsJson = False,
) -> None:
    """Let go what waits for an endpoint. The streamer must be stopped.

    Example: [bold]up-streamer cursors forget old-cloud --config vehicle.toml[/]
    """
    with _errors():
        path = _data_dir(data_dir, config) / LOG_NAME
    records = _run(cursors.forget(path, endpoint))
    _print(as_json, {"endpoint": endpoint, "records": records}, f"{records} records wait for {endpoint} no more")


@cursors_app.command(name="consumers")
def cursors_consumers(data_dir: DataDir = None, config: OrConfig = None, as_json: AsJson = False) -> None:
    """Who reads the history under which name. Writes nothing; the streamer may run.

    Example: [bold]up-streamer cursors consumers --config vehicle.toml[/]
    """
    with _errors():
        found = cursors.consumers(_data_dir(data_dir, config) / LOG_NAME)
    for one in found:
        lease = f"its lease ends in {one.lease_s} s" if one.lease_s else "its lease is over"
        line = f"{one.consumer!r} of {one.owner or 'nobody yet'}: {one.records} records after {one.seq}, {lease}"
        _print(as_json, dataclasses.asdict(one), line)


@cursors_app.command(name="release")
def cursors_release(
    consumer: Annotated[str, typer.Argument(help="The consumer whose name another uEntity shall use.")],
    data_dir: DataDir = None,
    config: OrConfig = None,
    as_json: AsJson = False,
) -> None:
    """Take a consumer's name from its owner: the next uEntity that uses it has it, and goes on at its cursor. The
    streamer may run or not.

    Example: [bold]up-streamer cursors release spark-job --config vehicle.toml[/]
    """
    with _errors():
        path = _data_dir(data_dir, config) / LOG_NAME
    owner = _run(cursors.release(path, consumer))
    _print(as_json, {"consumer": consumer, "owner": owner}, f"{consumer!r} belongs to {owner} no more")


# Stop and start dispatching

Topic = Annotated[
    str, typer.Argument(help="A pattern of topics: FFFF as resource for all of an entity, * as authority for all.")
]
Peer = Annotated[str, typer.Argument(help="The endpoint that gets them no more, or an authority behind one.")]


@app.command()
def pause(topic: Topic, peer: Peer, data_dir: DataDir = None, config: OrConfig = None, as_json: AsJson = False) -> None:
    """Stop dispatching a topic to a peer: it waits in the log, over restarts, until it is resumed. The streamer may run
    or not.

    Example: [bold]up-streamer pause //vehicle1/8001/1/8001 cloud --config vehicle.toml[/]
    """
    _control("pause", topic, peer, data_dir, config, as_json)


@app.command()
def resume(
    topic: Topic, peer: Peer, data_dir: DataDir = None, config: OrConfig = None, as_json: AsJson = False
) -> None:
    """Dispatch again, what has waited first. The pattern ends each pause that it covers.

    Example: [bold]up-streamer resume //vehicle1/8001/1/FFFF cloud --config vehicle.toml[/]
    """
    _control("resume", topic, peer, data_dir, config, as_json)


@app.command()
def paused(data_dir: DataDir = None, config: OrConfig = None, as_json: AsJson = False) -> None:
    """What is not dispatched now, and to whom.

    Example: [bold]up-streamer paused --config vehicle.toml[/]
    """
    _control("paused", "", "", data_dir, config, as_json)


def _control(do: str, topic: str, peer: str, data_dir: Path | None, config: Path | None, as_json: bool) -> None:
    with _errors():
        folder = _data_dir(data_dir, config)
        own = configs.load(config).authority if config is not None else ""
        found = control.ask(folder, do, topic, peer, own)
    for one in found:
        _print(as_json, one._asdict(), f"paused: {one.topic} to {one.peer}")
    if not found and not as_json:
        out.print("nothing is paused")


@app.command()
def vehicles(
    top: Annotated[int, typer.Option(min=1, max=control.VEHICLES_MAX, help="So many of those that send most.")] = 20,
    data_dir: DataDir = None,
    config: OrConfig = None,
    as_json: AsJson = False,
) -> None:
    """What each source authority sends: messages, bytes, topics, drops. While the streamer runs; the admin port has all
    of it.

    Example: [bold]up-streamer vehicles --top 10 --config cloud.toml[/]
    """
    with _errors():
        found = control.vehicles(_data_dir(data_dir, config), top)
    if as_json:
        for one in found:
            print(json.dumps(one))
        return
    table = Table(title=f"the {len(found)} source authorities that send most")
    for column in ("authority", "endpoint", "per_s", "messages", "bytes", "topics", "dropped", "last seen"):
        table.add_column(column, overflow="fold")
    for one in found:
        seen = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one["seen_ms"] / 1000))
        columns = ("authority", "endpoint", "per_s", "messages", "bytes", "topics", "dropped")
        _row(table, *(one[column] for column in columns), seen)
    out.print(table)


@app.command()
def subscriptions(
    store: Annotated[Path | None, typer.Option(help="The file of a uSubscription service ...")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="... or the TOML file of a streamer that has one inside.")
    ] = None,
    topic: Annotated[str | None, typer.Option(help="Only topics that match this pattern.")] = None,
    subscriber: Annotated[str | None, typer.Option(help="Only subscribers that match this pattern.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, and print each change as it happens.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show who is subscribed to what, from the store of a uSubscription service, while it runs or not.

    Example: [bold]up-streamer subscriptions --config vehicle.toml --topic //vehicle1/FFFFFFFF/FF/FFFF --watch[/]
    """
    from usubscription.inspect import StoreView

    _log_to_stderr()
    with _errors():
        if (store is None) == (config is None):
            raise invalid("say either --store FILE or --config FILE")
        path = store if store is not None else configs.load(config or Path()).streamer.data_dir / "usubscription.db"
        filters = [uris.parse(text) if text is not None else None for text in (topic, subscriber)]
        with StoreView(path) as view, contextlib.suppress(KeyboardInterrupt):
            if watch:
                for entry in view.watch(*filters):
                    _print(
                        as_json,
                        entry,
                        f"{entry['event']:<8} {entry['status']:<17} {entry['topic']}  {entry['subscriber']}",
                    )
                return
            entries, summary = view.subscriptions(*filters), view.summary()
    if as_json:
        for entry in entries:
            print(json.dumps(entry))
        return
    table = Table(
        title=f"{summary['subscriptions']} subscriptions at {summary['authority']}, "
        f"{summary['remote_commands_pending']} commands pending"
    )
    columns = ("topic", "subscriber", "status", "expires", "sample_period_ms", "waiting_for")
    for column in columns:
        table.add_column(column, overflow="fold")
    for entry in entries:
        _row(table, *(entry.get(column) or "" for column in columns))
    out.print(table)


@app.command(name="dead-letters")
def dead_letters(
    data_dir: DataDir = None,
    config: OrConfig = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Show what could not be delivered, and why.

    Example: [bold]up-streamer dead-letters --config vehicle.toml --limit 20[/]
    """
    with _errors():
        letters = dead_letter.open_read_only(_data_dir(data_dir, config) / "dead-letters.db").read(limit)
    if as_json:
        for letter in letters:
            print(json.dumps(letter.as_dict()))
        return
    table = Table(title=f"{len(letters)} dead letters")
    for column in ("time", "code", "endpoint", "source", "sink", "reason"):
        table.add_column(column, overflow="fold")
    for letter in letters:
        row = letter.as_dict()
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(letter.time_ms / 1000))
        _row(table, moment, row["code"], letter.endpoint, row["source"], row["sink"] or "", letter.reason)
    out.print(table)


@app.command()
def demo(
    data: Annotated[Path | None, typer.Option(help="A recorded drive (CSV); without it, a simulated one.")] = None,
    seed: Annotated[int, typer.Option(help="Of the simulated drive.")] = 1,
    seconds: Annotated[int, typer.Option(min=10, help="Length of the simulated drive.")] = 600,
    rate: Annotated[float, typer.Option(min=1, help="Samples per second.")] = 5_000,
    out_dir: Annotated[Path, typer.Option("--out", help="Where the plot goes.")] = Path("out"),
    without_mqtt: Annotated[
        bool, typer.Option("--without-mqtt", help="No MQTT broker: the cloud is on Zenoh, too.")
    ] = False,
    keep: Annotated[bool, typer.Option(help="Keep data and configurations.")] = False,
) -> None:
    """A drive crosses three networks because somebody subscribed, and Spark writes it down.

    Example: [bold]up-streamer demo --data drive.csv[/]
    """
    from streamer.demo import demo as demos

    _log_to_stderr()
    options = demos.Options(data, seed, seconds, rate, out_dir, not without_mqtt, keep)
    outcome: demos.Outcome = _run(demos.perform(options, err))
    demos.show(outcome, out)
    if not outcome.adds_up:
        err.print("[bold red]it does not add up[/]")
    print(json.dumps(outcome.as_dict()), flush=True)
    raise typer.Exit(0 if outcome.adds_up else EXIT_FAILED)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
