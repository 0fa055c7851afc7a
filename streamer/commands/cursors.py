"""up-streamer cursors: records in a streamer's log that wait for its endpoints and for consumers of its history.

list               asks the running streamer, else reads its log; read only
consumers          reads the log; read only; the streamer may run
adopt, forget      write to the log, so the streamer must be stopped
release, skip      ask the running streamer, else write to its log
"""

from __future__ import annotations

import dataclasses
import sqlite3
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from history.file.load import Cursor
from history.file.rows import CURSOR
from history.log.log import Log
from history.records.chunk import Stream, is_publish, unpack_streams
from history.service.consumers import CURSOR_PREFIX as CONSUMER_PREFIX
from history.service.consumers import owner_of, owners
from storage.disk import REAL_DISK
from storage.runtime import REAL, Runtime
from streamer.commands import terminal
from streamer.commands.letters import moment_ms
from streamer.commands.options import AsJson, DataDir, endpoints
from streamer.egress import claims, skipping
from streamer.egress.claims import Listed
from streamer.egress.rows import HOLDER, EndpointPositions, endpoints_of, parsed, row, units_of
from streamer.operating import control
from uprotocol import uri as uris
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

FOR_EVER: Final = 1 << 60  # no retention here: the streamer does it


EndpointName = Annotated[str, typer.Argument(help="The endpoint for which records wait.", autocompletion=endpoints)]


def list_(at: DataDir, as_json: AsJson = False) -> None:
    """Show how many records wait for each endpoint, as the running streamer reports it, else its log. Writes nothing.

    Example: [bold]up-streamer cursors list --config vehicle.toml[/]
    """
    for one in asked(at.log):
        line = f"{one.endpoint}: {one.records} records wait after {one.seq}, away for {one.absent_hours} h"
        line += f", {one.parked_topics} topics parked" if one.parked_topics else ""
        line += f", {one.held_addresses} addresses held" if one.held_addresses else ""
        line += "" if one.holds else ", and retention by age does not wait for it"
        terminal.tell(as_json, dataclasses.asdict(one), line)


def adopt(
    old: EndpointName,
    new: Annotated[str, typer.Argument(help="The endpoint that receives them.", autocompletion=endpoints)],
    at: DataDir,
    out_of_order: Annotated[
        bool, typer.Option("--out-of-order", help="Also records that would arrive after newer messages of their topic.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Move the records that wait for one endpoint to another one. The streamer must be stopped.

    Refused if the other endpoint has already been sent newer messages of these topics: the order could not be kept.

    Example: [bold]up-streamer cursors adopt cloud cloud-eu --config vehicle.toml[/]
    """
    one = terminal.finish(_adopt(at.log, old, new, out_of_order=out_of_order))
    terminal.tell(as_json, dataclasses.asdict(one), f"{one.records} records wait for {new} now")


def forget(endpoint: EndpointName, at: DataDir, as_json: AsJson = False) -> None:
    """Discard the records that wait for an endpoint. The streamer must be stopped.

    Example: [bold]up-streamer cursors forget old-cloud --config vehicle.toml[/]
    """
    records = terminal.finish(_forget(at.log, endpoint))
    data = {"endpoint": endpoint, "records": records}
    terminal.tell(as_json, data, f"{records} records wait for {endpoint} no more")


def skip(
    endpoint: EndpointName,
    at: DataDir,
    to: Annotated[str, typer.Option(help="Up to this time: RFC 3339, or how long ago (30s, 10m, 2h, 7d).")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be skipped.")] = False,
    as_json: AsJson = False,
) -> None:
    """Move an endpoint's cursor forward to a time: it does not get what came before, nor what of that is held for it.
    The streamer may run or be stopped. What is skipped stays in the history, and is reported as a gap.

    Example: [bold]up-streamer cursors skip cloud --to 2026-11-27T10:00:00Z --config vehicle.toml[/]
    """
    to_ms = moment_ms("--to", to)
    assert to_ms is not None
    given = {"endpoint": endpoint, "to_ms": to_ms, "dry_run": dry_run}
    answer = control.call(at.path, "skip", given, answer_s=None)
    if answer is None:
        answer = terminal.finish(_skip(at.log, endpoint, to_ms, dry_run=dry_run))
    for one in answer["logs"]:
        verb = "would be skipped" if dry_run else "are skipped"
        line = f"{one['log']} log: {one['records']} records of {one['topics']} topics {verb}, up to {one['to']}"
        terminal.tell(as_json, {"endpoint": endpoint, **one}, line)


def consumers(at: DataDir, as_json: AsJson = False) -> None:
    """Show the consumers of the history, and who owns their names. Writes nothing; the streamer may run.

    Example: [bold]up-streamer cursors consumers --config vehicle.toml[/]
    """
    for one in consuming(at.log):
        lease = f"its lease ends in {one.lease_s} s" if one.lease_s else "its lease is over"
        lease += f", in use by {one.holder!r}" if one.holder else ""
        line = f"{one.consumer!r} of {one.owner or 'nobody yet'}: {one.records} records after {one.seq}, {lease}"
        terminal.tell(as_json, dataclasses.asdict(one), line)


def release(
    consumer: Annotated[str, typer.Argument(help="The consumer whose name another uEntity is to use.")],
    at: DataDir,
    as_json: AsJson = False,
) -> None:
    """Release a consumer's name from its owner: the next uEntity that uses it owns it, and continues at its cursor. The
    streamer may run or be stopped.

    Example: [bold]up-streamer cursors release spark-job --config vehicle.toml[/]
    """
    owner = terminal.finish(_release(at.log, consumer))
    terminal.tell(as_json, {"consumer": consumer, "owner": owner}, f"{consumer!r} belongs to {owner} no more")


# Reading and changing the log


@dataclass(frozen=True, slots=True)
class Consumer:
    """The cursor of one consumer in the durable log, and the owner of its name ("": the next caller gets it). `holder`:
    who of the owner uses it ("": anybody)."""

    consumer: str
    owner: str
    holder: str
    seq: int
    records: int  # after the cursor
    lease_s: int  # how long it still delays retention by age; 0: the lease has ended


def asked(path: Path) -> list[Listed]:
    """Returns the list of a running streamer, whose file lags some seconds; else that of `listed`. Blocks. Raises as
    `listed`, and UNAVAILABLE if the streamer does not answer."""
    answer = control.call(path.parent, "cursors")
    return listed(path) if answer is None else [Listed(**one) for one in answer["cursors"]]


def listed(path: Path) -> list[Listed]:
    """Returns the list in the file. Raises UStatusError (INVALID_ARGUMENT: no log; FAILED_PRECONDITION: unreadable)."""
    rows, newest, oldest = _rows(path)
    seqs = {name: one.seq for name, one in rows.items()}
    waiting = {
        name: _waiting(path, EndpointPositions.of(seqs, name), newest, oldest) for name in endpoints_of(seqs, "egress")
    }
    return claims.listed(rows, waiting)


def _waiting(path: Path, positions: EndpointPositions, newest: int, oldest: int) -> int:
    """Returns how many records wait for an endpoint. Raises as `listed`."""
    first = min(max(positions.first, oldest - 1), newest)
    to, records, kinds = min(newest, first + claims.CLAIM_COUNTED_MAX), 0, dict[int, bool]()
    query = "SELECT first_seq, substr(data, 1, 4 * records) FROM chunk WHERE first_seq BETWEEN ? AND ?"
    with _looked_into(path) as db:
        start = db.execute("SELECT max(first_seq) FROM chunk WHERE first_seq <= ?", (first + 1,)).fetchone()[0] or 0
        for id, sink in db.execute("SELECT id, sink FROM stream"):
            kinds[id] = is_publish(Stream(id, b"", sink))
        for first_seq, packed in db.execute(query, (start, to)):
            for seq, stream in enumerate(unpack_streams(packed), first_seq):
                after = positions.after(stream, is_publish=kinds.get(stream, True))
                records += first < seq <= to and seq > after
    return records + newest - to


def consuming(path: Path) -> list[Consumer]:
    """Returns all consumers in the file. Raises as `listed`."""
    rows, newest, oldest = _rows(path)
    whose = {one.consumer: one for one in map(owner_of, rows) if one is not None}
    cursors = {
        name.removeprefix(CONSUMER_PREFIX): one for name, one in rows.items() if name.startswith(CONSUMER_PREFIX)
    }
    found = []
    for name in sorted(whose.keys() | cursors):
        cursor = cursors.get(name, Cursor(0))
        waits = max(0, newest - max(cursor.seq, oldest - 1)) if name in cursors else 0
        lease_s = max(0, int((cursor.lease_until_ms or 0) / 1000 - time.time()))
        owner, holder = (str(whose[name].owner), whose[name].holder) if name in whose else ("", "")
        found.append(Consumer(name, owner, holder if lease_s else "", cursor.seq, waits, lease_s))
    return found


def _rows(path: Path) -> tuple[dict[str, Cursor], int, int]:
    """Returns all cursors and the seqs of the newest and the oldest record. Raises as `listed`."""
    _require_log(path)
    with _looked_into(path) as db:
        rows = {name: Cursor(seq, lease, bool(holds), *rest) for name, seq, lease, holds, *rest in CURSOR.read(db, [])}
        newest, oldest = db.execute("SELECT max(first_seq + records - 1), min(first_seq) FROM chunk").fetchone()
    return rows, newest or 0, oldest or 1


@contextmanager
def _looked_into(path: Path) -> Iterator[sqlite3.Connection]:
    """Raises UStatusError (FAILED_PRECONDITION) if it can't be read."""
    try:
        with closing(REAL_DISK.look(path)) as db:
            yield db
    except (sqlite3.Error, struct.error, TypeError) as error:
        why = f"the cursors in {path} can't be read ({error}): a log of another version, or damaged"
        raise UStatusError(UCode.FAILED_PRECONDITION, why) from None


async def _release(path: Path, consumer: str) -> str:
    """Remove the owner of a name; the next uEntity that uses it continues at its cursor. Returns the owner. Blocks.

    Raises UStatusError: NOT_FOUND (nobody owns the name), or the error of Log.open.
    """
    answer = control.call(path.parent, "release", {"consumer": consumer})
    if answer is not None:
        return str(answer["owner"])
    async with await _open(path) as log:
        rows = [one for one in log.cursors.all() if (found := owner_of(one)) is not None and found.consumer == consumer]
        if not rows:
            raise UStatusError(UCode.NOT_FOUND, f"no uEntity owns a consumer named {consumer!r}")
        for name in rows:
            log.cursors.drop(name)
        return str(owners(rows)[consumer])


async def _adopt(path: Path, old: str, new: str, *, out_of_order: bool = False, runtime: Runtime = REAL) -> Listed:
    """Move the records that wait for `old` to `new`. With `out_of_order`, `new` may get records twice.

    Raises UStatusError: NOT_FOUND (no such cursor), FAILED_PRECONDITION (`new` has been sent newer messages of these
    topics), or the error of Log.open (ALREADY_EXISTS: the streamer runs).
    """
    async with await _open(path, runtime) as log:
        rows = log.cursors.all()
        _require(rows, old)
        seqs = log.cursors.seqs()
        both = leaves = EndpointPositions.of(seqs, old)
        if row("egress", new) in rows:
            heir = EndpointPositions.of(seqs, new)
            if not out_of_order:
                began = seqs.get(row("began", new), leaves.overall)
                await _require_order(log, old, leaves, new, began, heir.overall)
            both = leaves.earliest(heir)
        followers = endpoints_of(rows, "followed")
        acknowledged = [followers[name].seq for name in (old, new) if name in followers]
        for pushed, followed in ((old, new), (new, old)):
            if followed in followers and pushed not in followers:
                await _require_no_publishes(log, pushed, followed, new)
        own = [rows[cursor].seq for cursor in (row("egress", old), row("egress", new)) if cursor in rows]
        for name in rows:
            named = parsed(name)
            if named is not None and named.endpoint in (old, new) and named.kind != "skipped":
                log.cursors.drop(name)
        if acknowledged:  # who follows reads from its own position. If nobody does any more, publishes are pushed
            log.cursors.set(row("followed", new), min(acknowledged), holds=True)
        for name in (new, old):
            for service, cursor in units_of(rows, "follower", name).items():
                log.cursors.set(row("follower", new, service), cursor.seq)
        log.cursors.set(row("egress", new), min(own), holds=True, holder=HOLDER)
        owed = units_of(rows, "owed", old) | units_of(rows, "owed", new)
        for stream, seq in both.streams.items():
            kind: Literal["owed", "parked"] = "owed" if acknowledged and str(stream) in owed else "parked"
            log.cursors.set(row(kind, new, stream), seq, holds=True, holder=HOLDER)
        for unit, seq in both.addresses.items():
            log.cursors.set(row("held", new, unit), seq, holder=HOLDER)
    return next(one for one in listed(path) if one.endpoint == new)


async def _require_no_publishes(log: Log, pushed: str, followed: str, new: str) -> None:
    """Raises FAILED_PRECONDITION if publishes wait for endpoint `pushed`, since who follows behind `followed` would
    never read them. `new` is the one of both that is configured."""
    positions, newest = EndpointPositions.of(log.cursors.seqs(), pushed), log.newest_seq

    def after(stream: int) -> int | None:  # any publish may wait for a held address
        return min(positions.after_in(log, stream), positions.first_held) if is_publish(log.stream(stream)) else None

    first = min(positions.first_of_all, newest)
    records, _ = await skipping.counted(log, first, newest, after)
    if records:
        count = f"{records} publishes wait" if not positions.addresses else f"up to {records} publishes wait"
        what = f"{count} for {pushed!r}, and who is behind {followed!r} follows our history: it reads by itself"
        how = f"take followed_by from {new!r}, start and stop the streamer, adopt them, and give followed_by back once"
        if pushed == new:
            how = (
                f"take followed_by from {new!r}, start the streamer, and stop it, adopt and give followed_by back once"
            )
        raise UStatusError(UCode.FAILED_PRECONDITION, f"{what}, and from where it is. {how} they have left")


async def _require_order(log: Log, old: str, leaves: EndpointPositions, new: str, began: int, read: int) -> None:
    """Raises FAILED_PRECONDITION if `new`, which got the seqs after `began` up to `read`, has newer records of a topic
    of which records wait for `old`."""
    if read <= began:
        return
    # records of any topic may wait for a held address
    _, behind = await skipping.counted(log, min(leaves.overall, leaves.first_held), began)
    _, newer = await skipping.counted(log, max(began, leaves.overall), read)
    waits = behind.union(leaves.streams)
    if overtaken := sorted(uris.format(log.stream(one).source) for one in waits & newer if log.knows_stream(one)):
        raise UStatusError(
            UCode.FAILED_PRECONDITION,
            f"endpoint {new!r} has been sent newer messages already of {len(overtaken)} topics of which older ones "
            f"wait for {old!r}, such as {overtaken[0]}: those would come behind them. Nothing is changed; adopt them "
            f"all the same with --out-of-order (what {new!r} has had comes twice), or let them go with "
            f"'up-streamer cursors forget {old}'",
        )


async def _forget(path: Path, endpoint: str) -> int:
    """Remove all cursors of `endpoint`. Returns how many records waited for it. Raises as `_adopt`."""
    async with await _open(path) as log:
        rows = log.cursors.all()
        _require(rows, endpoint)
        records = await claims.count(log, endpoint)
        for name in rows:
            named = parsed(name)
            if named is not None and named.endpoint == endpoint:
                log.cursors.drop(name)
    return records


async def _skip(path: Path, endpoint: str, to_ms: int, *, dry_run: bool) -> dict[str, Any]:
    """Move the cursors of `endpoint` forward. Who wants what is not known now: all records count. Raises as `_adopt`,
    and FAILED_PRECONDITION if it follows our history."""
    async with await _open(path) as log:
        rows = log.cursors.all()
        _require(rows, endpoint)
        if row("followed", endpoint) in rows:
            what = f"endpoint {endpoint!r} follows our history, and reads publishes by itself: have it skip there"
            raise UStatusError(UCode.FAILED_PRECONDITION, what)
        positions = EndpointPositions.of(log.cursors.seqs(), endpoint)
        to, after = await log.seq_before_time(to_ms), positions.first_of_all
        first = min(positions.overall, positions.first_held)  # records of any topic may wait for a held address
        streams = positions.streams
        found = await skipping.count(log, after, to, lambda stream: min(first, streams.get(stream, first)))
        if not dry_run and to > after:
            for name, cursor in rows.items():
                named = parsed(name)
                if named is None or named.endpoint != endpoint or named.kind in ("began", "skipped"):
                    continue
                if cursor.seq < to:
                    log.cursors.set(name, to, holds=cursor.holds, absent_ms=cursor.absent_ms, holder=HOLDER)
            log.cursors.set(row("skipped", endpoint, after), to)
    return skipping.as_dict(endpoint, to_ms, [found], dry_run=dry_run)


async def _open(path: Path, runtime: Runtime = REAL) -> Log:
    _require_log(path)
    return await Log.open(path, name="durable", retention_ms=FOR_EVER, retention_bytes=FOR_EVER, runtime=runtime)


def _require_log(path: Path) -> None:
    if not path.exists():
        raise invalid(f"there is no log at {path}: is this the data_dir of a streamer that has run?")


def _require(rows: Mapping[str, Any], endpoint: str) -> None:
    if row("egress", endpoint) not in rows:
        known = sorted(endpoints_of(rows, "egress"))
        why = f"there is no cursor of endpoint {endpoint!r}; there are {', '.join(known) or 'none'}"
        raise UStatusError(UCode.NOT_FOUND, why)
