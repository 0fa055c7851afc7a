"""up-streamer history: reads a history over the network, and finds damage in the files of a data_dir."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from history.epochs.frontier import maximal
from history.epochs.groups import Buckets
from history.file.damage import Damage
from history.reading.subscriber import HistoryClient
from history.records.epoch import Time
from history.records.record import Record, decode
from storage import logs
from streamer.commands import client, terminal
from streamer.commands.options import AsJson, DataDir, Network, Where
from streamer.commands.options import uri as uri_of
from streamer.commands.terminal import Misuse
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Frontier, GroupFrontier, LogState, PollRequest, TopicState
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

BUCKET: Final = Buckets.kind
SHORT: Final = 8  # characters of an incarnation that are shown
TABLE_ROWS_MAX: Final = 1_000  # per table: it is printed when it is complete


def history_(
    service: Annotated[
        str,
        typer.Argument(help="The authority of the streamer; or verify, or acknowledge, which read its data_dir."),
    ],
    where: Where,
    topics: Annotated[list[str] | None, typer.Argument(help="Topic patterns; none means all.")] = None,
    poll: Annotated[bool, typer.Option(help="Print the records instead of the overview.")] = False,
    epochs: Annotated[bool, typer.Option(help="Show how far the epochs of groups of topics have advanced.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Records to print with --poll.")] = 100,
    data_dir: Annotated[
        Path | None, typer.Option(help="The streamer's data_dir, for verify and acknowledge; or use --config.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a streamer's history over the network: an overview of its topics, the records, or the frontiers of epochs.

    --config takes the network from the file of the streamer on this machine, or of one that follows it; elsewhere say
    --transport zenoh --authority vehicle1 --set 'connect=["tcp/HOST:7447"]'.

    verify reads everything in its data_dir and reports damage (exit code 1); acknowledge marks damage as seen.

    Example: [bold]up-streamer history vehicle1 --config vehicle.toml --poll --limit 10[/]
    """
    if service in ("verify", "acknowledge"):
        (_verify if service == "verify" else _acknowledge)(DataDir(data_dir, where.config).log, as_json)
        return
    if epochs and (poll or topics):
        raise Misuse("--epochs shows how far groups have come: say it without --poll, and without topics")
    logs.configure()
    network, patterns = where.network(to=service), list(map(uri_of, topics or []))
    streamer = ids.at(service)
    if epochs:
        _show_epochs(terminal.finish(_frontiers(network, streamer)), as_json)
        return
    if not poll:
        terminal.finish(_describe(network, streamer, patterns, as_json))
        return
    for message in terminal.finish(_poll(network, streamer, patterns, limit)):
        client.show(message, as_json)


async def _describe(network: Network, streamer: UUri, patterns: list[UUri], as_json: bool) -> None:
    """Print topics while they arrive: a fleet may have too many to hold in memory."""
    async with network.open() as opened, InMemoryRpcClient(opened, network.local) as rpc:
        history = HistoryClient(rpc, streamer)
        await (_print_json if as_json else _print_tables)(await history.logs(patterns), history.topics(patterns))


async def _print_json(logs: list[LogState], topics: AsyncIterator[TopicState]) -> None:
    print(f'{{"logs": {json.dumps(list(map(_log_row, logs)))}, "topics": [', end="")
    before = ""
    async for one in topics:
        print(before, json.dumps(_topic_row(one)), sep="", end="")
        before = ", "
    print("]}")


async def _print_tables(logs: list[LogState], topics: AsyncIterator[TopicState]) -> None:
    _show("logs", list(map(_log_row, logs)))
    rows: list[dict[str, Any]] = []
    shown = 0
    async for one in topics:
        if len(rows) == TABLE_ROWS_MAX:
            shown += len(rows)
            _show(f"topics, up to number {shown}", rows)
            rows.clear()
        rows.append(_topic_row(one))
    _show(f"topics, up to number {shown + len(rows)}" if shown else "topics", rows)


def _show(title: str, rows: list[dict[str, Any]]) -> None:
    terminal.show(title, list(rows[0]) if rows else [], [list(row.values()) for row in rows])


async def _poll(network: Network, streamer: UUri, patterns: list[UUri], limit: int) -> list[UMessage]:
    found: list[UMessage] = []
    request = PollRequest(topics=patterns)
    async with network.open() as opened, InMemoryRpcClient(opened, network.local) as rpc:
        while len(found) < limit:
            request.max_records = limit - len(found)
            reply = await HistoryClient(rpc, streamer).poll(request)
            found += [UMessage.FromString(data) for batch in reply.batches for data in batch.message]
            if not reply.more:
                break
            del request.positions[:]
            request.positions.extend(reply.next)
    return found


async def _frontiers(network: Network, streamer: UUri) -> list[dict[str, Any]]:
    """Returns a row for each group and each log with its frontiers."""
    request = PollRequest(topics=ids.frontiers_of(uris.WILDCARD_AUTHORITY), latest=True)
    async with network.open() as opened, InMemoryRpcClient(opened, network.local) as rpc:
        frontiers = await HistoryClient(rpc, streamer).frontiers(request)
    records = [one for batch in frontiers for one in decode(batch) or () if isinstance(one, Record)]
    return [
        _group_row(record, group)
        for record in records
        for group in Frontier.FromString(record.message.payload).groups
        if group.lower or group.active
    ]


def _group_row(record: Record, frontiers: GroupFrontier) -> dict[str, Any]:
    active = [tuple(one.numbers) for one in frontiers.active]
    source = record.message.attributes.source
    return {
        "group": frontiers.group,
        "kept by": f"//{source.authority_name}/{source.ue_id:X}/1/0",
        "by": frontiers.kept.kind,
        "log": (record.origin.incarnation if record.origin is not None else record.incarnation).hex(),
        "lower": sorted(tuple(one.numbers) for one in frontiers.lower),
        "upper": sorted(maximal(active)),
        "open": sorted(active),
        "incomplete": sorted(tuple(one.time.numbers) for one in frontiers.kept.incomplete),
    }


def _show_epochs(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"groups": rows}))
    elif not rows:
        what = "none of its topics has had a record, it has no [[epochs]], or none that you may read"
        terminal.out.print(f"no group of topics has epochs here: {what}", markup=False)
    else:
        _show("epochs", list(map(_shown, rows)))


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row, short enough for a terminal."""
    short = {"kept by": row["kept by"].removesuffix("/4/1/0"), "log": row["log"][:SHORT]}
    times = {key: _times(row["by"], row[key]) for key in ("lower", "upper")}
    return row | short | times | {key: len(row[key]) for key in ("open", "incomplete")}


def _times(kind: str, times: list[Time]) -> str:
    """Returns times as text; a bucket as its start in UTC."""
    if kind != BUCKET:
        return " ".join(map(str, times))
    return " ".join(_readable(ms) for (ms,) in times)


def _readable(ms: int) -> str:
    try:
        return f"{datetime.fromtimestamp(ms / 1_000, UTC):%Y-%m-%d %H:%M:%S}.{ms % 1_000:03}"
    except (ValueError, OverflowError, OSError):  # not a year of four digits
        return str(ms)


def _log_row(one: LogState) -> dict[str, Any]:
    return {
        "incarnation": one.incarnation.hex(),
        "durable": one.durable,
        "oldest_seq": one.oldest_seq,
        "newest_seq": one.newest_seq,
        "newest_match_seq": one.newest_match_seq,
        "stored_bytes": one.stored_bytes,
    }


def _topic_row(one: TopicState) -> dict[str, Any]:
    return {
        "topic": uris.format(one.topic),
        "oldest_seq": one.oldest_seq,
        "newest_seq": one.newest_seq,
        "records": one.records,
        "newest_time": one.newest_time.ToJsonString(),
    }


def _verify(log: Path, as_json: bool) -> None:
    """Read the whole log and print what is damaged. Writes nothing; the streamer may run."""
    from history.file.verify import verify

    report = verify(log)
    found, earlier = ([_as_dict(one) for one in those] for those in (report.found, report.reported))
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
            "not_acknowledged": earlier,
        }
        print(json.dumps(data))
    else:
        seqs = f"{report.oldest_seq} to {report.newest_seq}"
        head = f"{report.path}: {report.records} records, {seqs}, format {report.version}"
        lines = [head, *(f"damaged: {_as_line(row)}" for row in found)]
        lines += [f"reported earlier, not acknowledged: {_as_line(row)}" for row in earlier]
        if report.found_total > len(found):
            lines.append(f"and {report.found_total - len(found)} more")
        for line in lines:
            terminal.out.print(terminal.plain(line), markup=False)
        terminal.out.print("sound" if report.is_sound else "[bold red]damaged[/]")
    raise typer.Exit(0 if report.is_sound else terminal.EXIT_FAILED)


def _acknowledge(log: Path, as_json: bool) -> None:
    """Mark the losses of the log as seen; a running streamer notices within some seconds."""
    from history.file.damage import acknowledge

    seen = acknowledge(log)
    for row in map(_as_dict, seen):
        terminal.tell(as_json, row, _as_line(row))
    if not as_json:
        terminal.out.print(f"{len(seen)} acknowledged")


def _as_dict(damage: Damage) -> dict[str, Any]:
    return {
        "time_ms": damage.when_ms,
        "kind": damage.kind,
        "after_seq": damage.after,
        "before_seq": damage.before,
        "records_at_most": damage.records,
        "incarnation": damage.incarnation.hex(),
        "moved_to": damage.moved_to,
        "detail": damage.detail,
    }


def _as_line(row: dict[str, Any]) -> str:
    where = f" the records between {row['after_seq']} and {row['before_seq']}" if row["before_seq"] else ""
    kept = f" (kept as {row['moved_to']})" if row["moved_to"] else ""
    return f"{row['kind']}:{where}{kept} {row['detail']}".rstrip()
