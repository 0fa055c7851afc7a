"""up-streamer cursors: what waits in the log of a streamer, for its endpoints and for consumers of its history.

list, consumers    read only; the streamer may run
adopt, forget      the log's owner does that, so the streamer must be stopped
release            by the streamer that runs, else in its log
"""

from __future__ import annotations

import dataclasses
import sqlite3
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from history.consumers import CURSOR_PREFIX as CONSUMER_PREFIX
from history.consumers import owner_of, owners
from history.log import Log
from history.rows import CURSOR
from storage.disk import REAL_DISK
from streamer import control
from streamer.commands import terminal
from streamer.commands.options import AsJson, DataDir
from streamer.egress import CURSOR_PREFIX
from streamer.parked import PARKED_PREFIX
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

FOR_EVER: Final = 1 << 60  # no retention of ours: that is the streamer's


Endpoint = Annotated[str, typer.Argument(help="The endpoint for which records wait.")]


def list_(at: DataDir, as_json: AsJson = False) -> None:
    """How many records wait for each endpoint. Writes nothing; the streamer may run.

    Example: [bold]up-streamer cursors list --config vehicle.toml[/]
    """
    for one in listed(at.log):
        line = f"{one.endpoint}: {one.records} records wait after {one.seq}, away for {one.absent_hours} h"
        line += f", {one.parked_topics} topics parked" if one.parked_topics else ""
        line += "" if one.holds else ", and retention by age does not wait for it"
        terminal.tell(as_json, dataclasses.asdict(one), line)


def adopt(
    old: Endpoint,
    new: Annotated[str, typer.Argument(help="The endpoint that gets them.")],
    at: DataDir,
    as_json: AsJson = False,
) -> None:
    """Give what waits for one endpoint to another one. The streamer must be stopped.

    Example: [bold]up-streamer cursors adopt cloud cloud-eu --config vehicle.toml[/]
    """
    one = terminal.finish(_adopt(at.log, old, new))
    terminal.tell(as_json, dataclasses.asdict(one), f"{one.records} records wait for {new} now")


def forget(endpoint: Endpoint, at: DataDir, as_json: AsJson = False) -> None:
    """Let go what waits for an endpoint. The streamer must be stopped.

    Example: [bold]up-streamer cursors forget old-cloud --config vehicle.toml[/]
    """
    records = terminal.finish(_forget(at.log, endpoint))
    data = {"endpoint": endpoint, "records": records}
    terminal.tell(as_json, data, f"{records} records wait for {endpoint} no more")


def consumers(at: DataDir, as_json: AsJson = False) -> None:
    """Who reads the history under which name. Writes nothing; the streamer may run.

    Example: [bold]up-streamer cursors consumers --config vehicle.toml[/]
    """
    for one in consuming(at.log):
        lease = f"its lease ends in {one.lease_s} s" if one.lease_s else "its lease is over"
        line = f"{one.consumer!r} of {one.owner or 'nobody yet'}: {one.records} records after {one.seq}, {lease}"
        terminal.tell(as_json, dataclasses.asdict(one), line)


def release(
    consumer: Annotated[str, typer.Argument(help="The consumer whose name another uEntity shall use.")],
    at: DataDir,
    as_json: AsJson = False,
) -> None:
    """Take a consumer's name from its owner: the next uEntity that uses it has it, and goes on at its cursor. The
    streamer may run or not.

    Example: [bold]up-streamer cursors release spark-job --config vehicle.toml[/]
    """
    owner = terminal.finish(_release(at.log, consumer))
    terminal.tell(as_json, {"consumer": consumer, "owner": owner}, f"{consumer!r} belongs to {owner} no more")


# In the log


@dataclass(frozen=True, slots=True)
class Listed:
    """The cursor of one endpoint."""

    endpoint: str
    seq: int
    records: int  # that wait behind it
    holds: bool  # retention by age waits for it
    absent_hours: float  # while the streamer ran
    parked_topics: int


@dataclass(frozen=True, slots=True)
class Consumer:
    """The cursor of one consumer in the durable log, and whose its name is ("": the next caller's that uses it)."""

    consumer: str
    owner: str
    seq: int
    records: int  # that come after it
    lease_s: int  # for so long it holds retention by age; 0: its owner has not polled for longer than that


def listed(path: Path) -> list[Listed]:
    """Raises UStatusError: INVALID_ARGUMENT if there is no log, FAILED_PRECONDITION if it can't be read."""
    rows, newest, oldest = _rows(path)
    parked = Counter(name.split(":")[1] for name, *_ in rows if name.startswith(PARKED_PREFIX))
    found = []
    for name, seq, _, holds, absent_ms in rows:
        if name.startswith(CURSOR_PREFIX):
            endpoint = name.removeprefix(CURSOR_PREFIX)
            waits = max(0, newest - max(seq, oldest - 1))
            found.append(Listed(endpoint, seq, waits, bool(holds), round(absent_ms / 3_600_000, 1), parked[endpoint]))
    return sorted(found, key=lambda one: one.endpoint)


def consuming(path: Path) -> list[Consumer]:
    """Raises as `listed`."""
    rows, newest, oldest = _rows(path)
    whose = owners(name for name, *_ in rows)
    cursors = {
        name.removeprefix(CONSUMER_PREFIX): (seq, lease)
        for name, seq, lease, *_ in rows
        if name.startswith(CONSUMER_PREFIX)
    }
    found = []
    for name in sorted(whose.keys() | cursors):
        seq, lease_until_ms = cursors.get(name, (0, None))
        waits = max(0, newest - max(seq, oldest - 1)) if name in cursors else 0
        lease_s = max(0, int((lease_until_ms or 0) / 1000 - time.time()))
        found.append(Consumer(name, str(whose.get(name, "")), seq, waits, lease_s))
    return found


def _rows(path: Path) -> tuple[list[Any], int, int]:
    """Of all cursors, with the seqs of the newest and the oldest record. Raises as `listed`."""
    _require_log(path)
    try:
        db = REAL_DISK.connect(path, read_only=True)
        try:
            rows = CURSOR.read(db).rows
            newest, oldest = db.execute("SELECT max(first_seq + records - 1), min(first_seq) FROM chunk").fetchone()
        finally:
            db.close()
    except sqlite3.Error as error:
        why = f"the cursors in {path} can't be read ({error}): a log of another version, or damaged"
        raise UStatusError(UCode.FAILED_PRECONDITION, why) from None
    return rows, newest or 0, oldest or 1


async def _release(path: Path, consumer: str) -> str:
    """Take the name from its owner, for the next uEntity that uses it, which goes on at its cursor; who had it. Blocks.

    Raises UStatusError: NOT_FOUND (nobody owns the name), or what Log.open says.
    """
    answer = control.call(path.parent, {"do": "release", "consumer": consumer})
    if answer is not None:
        return str(answer["owner"])
    async with await _open(path) as log:
        rows = [name for name in log.cursor_rows() if (found := owner_of(name)) is not None and found[0] == consumer]
        if not rows:
            raise UStatusError(UCode.NOT_FOUND, f"no uEntity owns a consumer named {consumer!r}")
        for name in rows:
            log.drop_cursor(name)
        return str(owners(rows)[consumer])


async def _adopt(path: Path, old: str, new: str) -> Listed:
    """The endpoint `new` gets what waits for `old`; what it has had itself since then may come twice.

    Raises UStatusError: NOT_FOUND (no such cursor), or what Log.open says (ALREADY_EXISTS: the streamer runs).
    """
    async with await _open(path) as log:
        rows = log.cursor_rows()
        _require(rows, old)
        for name, row in rows.items():
            if _is_of(name, old):
                prefix, _, rest = name.partition(":")
                heir = f"{prefix}:{new}{rest.removeprefix(old)}"
                seq = min(row.seq, rows[heir].seq) if heir in rows else row.seq
                log.set_cursor(heir, seq, holds=True)
                log.drop_cursor(name)
    return next(one for one in listed(path) if one.endpoint == new)


async def _forget(path: Path, endpoint: str) -> int:
    """What waits for `endpoint` waits no more; how many records that were. Raises as `_adopt`."""
    records = sum(one.records for one in listed(path) if one.endpoint == endpoint)
    async with await _open(path) as log:
        rows = log.cursor_rows()
        _require(rows, endpoint)
        for name in rows:
            if _is_of(name, endpoint):
                log.drop_cursor(name)
    return records


async def _open(path: Path) -> Log:
    _require_log(path)
    return await Log.open(path, name="durable", retention_ms=FOR_EVER, retention_bytes=FOR_EVER)


def _require_log(path: Path) -> None:
    if not path.exists():
        raise invalid(f"there is no log at {path}: is this the data_dir of a streamer that has run?")


def _is_of(name: str, endpoint: str) -> bool:
    """Its cursor, and those of its topics that are parked."""
    return name == CURSOR_PREFIX + endpoint or name.startswith(f"{PARKED_PREFIX}{endpoint}:")


def _require(rows: Mapping[str, Any], endpoint: str) -> None:
    if CURSOR_PREFIX + endpoint not in rows:
        known = sorted(name.removeprefix(CURSOR_PREFIX) for name in rows if name.startswith(CURSOR_PREFIX))
        why = f"there is no cursor of endpoint {endpoint!r}; there are {', '.join(known) or 'none'}"
        raise UStatusError(UCode.NOT_FOUND, why)
