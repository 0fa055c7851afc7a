"""What the command line does with the cursors of endpoints, in the log of a streamer: list them, give one to another endpoint, forget one.

listed(path) -> one row an endpoint          reads only; the streamer may run
adopt(path, old, new), forget(path, name)    the log's owner does that, so the streamer must be stopped
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from history.log import Log
from history.rows import CURSOR
from storage.disk import REAL_DISK
from streamer.egress import CURSOR_PREFIX
from streamer.parked import PARKED_PREFIX
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

FOR_EVER: Final = 1 << 60  # no retention of ours: that is the streamer's


@dataclass(frozen=True, slots=True)
class Listed:
    """The cursor of one endpoint."""

    endpoint: str
    seq: int
    records: int  # that wait behind it
    holds: bool  # retention by age waits for it
    absent_hours: float  # while the streamer ran
    parked_topics: int


def listed(path: Path) -> list[Listed]:
    """Raises UStatusError: INVALID_ARGUMENT if there is no log, FAILED_PRECONDITION if it can't be read."""
    if not path.exists():
        raise invalid(f"there is no log at {path}: is this the data_dir of a streamer that has run?")
    try:
        db = REAL_DISK.connect(path, read_only=True)
        try:
            rows = CURSOR.read(db).rows
            newest, oldest = db.execute("SELECT max(first_seq + records - 1), min(first_seq) FROM chunk").fetchone()
        finally:
            db.close()
    except sqlite3.Error as error:
        raise UStatusError(
            UCode.FAILED_PRECONDITION, f"the cursors in {path} can't be read ({error}): a log of another version, or damaged"
        ) from None
    parked = Counter(name.split(":")[1] for name, *_ in rows if name.startswith(PARKED_PREFIX))
    found = []
    for name, seq, _, holds, absent_ms in rows:
        if name.startswith(CURSOR_PREFIX):
            endpoint = name.removeprefix(CURSOR_PREFIX)
            waits = max(0, (newest or 0) - max(seq, (oldest or 1) - 1))
            found.append(Listed(endpoint, seq, waits, bool(holds), round(absent_ms / 3_600_000, 1), parked[endpoint]))
    return sorted(found, key=lambda one: one.endpoint)


async def adopt(path: Path, old: str, new: str) -> Listed:
    """The endpoint `new` gets what waits for `old`; what it has had itself since then may come twice.

    Raises UStatusError: NOT_FOUND (no such cursor), or what Log.open says (ALREADY_EXISTS: the streamer runs).
    """
    async with await _open(path) as log:
        rows = log.cursor_rows()
        _require(rows, old)
        for name, row in rows.items():
            if name == CURSOR_PREFIX + old or name.startswith(f"{PARKED_PREFIX}{old}:"):
                prefix, _, rest = name.partition(":")
                heir = f"{prefix}:{new}{rest.removeprefix(old)}"
                seq = min(row.seq, rows[heir].seq) if heir in rows else row.seq
                log.set_cursor(heir, seq, holds=True)
                log.drop_cursor(name)
    return next(one for one in listed(path) if one.endpoint == new)


async def forget(path: Path, endpoint: str) -> int:
    """What waits for `endpoint` waits no more; how many records that were. Raises as `adopt`."""
    records = sum(one.records for one in listed(path) if one.endpoint == endpoint)
    async with await _open(path) as log:
        rows = log.cursor_rows()
        _require(rows, endpoint)
        for name in rows:
            if name == CURSOR_PREFIX + endpoint or name.startswith(f"{PARKED_PREFIX}{endpoint}:"):
                log.drop_cursor(name)
    return records


async def _open(path: Path) -> Log:
    if not path.exists():
        raise invalid(f"there is no log at {path}: is this the data_dir of a streamer that has run?")
    return await Log.open(path, name="durable", retention_ms=FOR_EVER, retention_bytes=FOR_EVER)


def _require(rows: Mapping[str, Any], endpoint: str) -> None:
    if CURSOR_PREFIX + endpoint not in rows:
        known = sorted(name.removeprefix(CURSOR_PREFIX) for name in rows if name.startswith(CURSOR_PREFIX))
        raise UStatusError(UCode.NOT_FOUND, f"there is no cursor of endpoint {endpoint!r}; there are {', '.join(known) or 'none'}")
