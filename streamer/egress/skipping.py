"""Moves the cursors of an endpoint forward to a time, because an operator wants the rest and not the backlog.

running: time -> seq of each log -> count -> Backlog.skip: held and read records up to it, too -> gaps, counters
stopped: the same in the log's rows (commands/cursors.py), with a row `skipped:` -> the next start reports the gap
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import structlog

from history.log.log import Log
from streamer.egress.pump import Pump
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

COUNTED_AT_ONCE: Final = 10_000  # records in one step
COUNTED_BYTES: Final = 16 << 20

log = structlog.get_logger()


class Skipped(NamedTuple):
    """What an endpoint does not get from one log. It is counted before the cursor is moved, so it is a bit more than
    what waits then."""

    log: str
    after: int  # the seq of the first one, less one
    to: int  # the seq of the last one
    records: int
    topics: int


async def counted(
    source: Log, after: int, to: int, waits_after: Callable[[int], int | None] = lambda _: 0
) -> tuple[int, set[int]]:
    """Returns the number of records after `after` up to `to`, and their streams. `waits_after(stream)`: the seq after
    which the endpoint has nothing of it; None: it gets nothing of it."""
    waiting: dict[int, int] = {}
    records, streams, position = 0, set[int](), max(after, source.floor_seq)
    while position < to:
        found = await source.scan(position, max_records=COUNTED_AT_ONCE, max_bytes=COUNTED_BYTES, until=to, bare=True)
        for chunk in found.chunks:
            for stream in chunk.stream_set.difference(waiting):
                known = waits_after(stream)
                waiting[stream] = to if known is None else known
            for seq, stream in zip(chunk.seqs, chunk.streams, strict=True):
                if position < seq <= to and seq > waiting[stream]:
                    records += 1
                    streams.add(stream)
        if found.covered <= position:
            break
        position = found.covered
    return records, streams


async def count(source: Log, after: int, to: int, waits_after: Callable[[int], int | None]) -> Skipped:
    """Returns what waits of the records after `after` up to `to`. `waits_after`: see `counted`."""
    start = max(after, source.floor_seq)
    records, streams = await counted(source, start, to, waits_after)
    return Skipped(source.name, start, to, records, len(streams))


async def skip(pumps: Sequence[Pump], to_ms: int, *, dry_run: bool) -> list[Skipped]:
    """Have the peer of `pumps` not get what came up to `to_ms` (Unix milliseconds). `dry_run`: only count.

    Raises FAILED_PRECONDITION if it reads our history itself, and the errors of the log.
    """
    followed = next((pump.peer.name for pump in pumps if pump.waits.plans.is_followed), None)
    if followed is not None:
        what = f"endpoint {followed!r} follows our history, and reads publishes by itself: nothing waits for it here"
        raise UStatusError(UCode.FAILED_PRECONDITION, f"{what}; have it skip there")
    found = []
    for pump in pumps:
        to = await pump.log.seq_before_time(to_ms)
        after = pump.waits.positions().first_of_all
        one = await count(pump.log, after, to, pump.waits.waits_after)
        if not dry_run and to > after:
            await pump.between_batches(partial(pump.waits.skip, to))
            pump.peer.dropped["skipped"] += one.records
            pump.losses.on_gap(one.after, to + 1, Gap.REASON_SKIPPED)
            pump.wake()
            log.warning("records were skipped", endpoint=pump.peer.name, to_ms=to_ms, **one._asdict())
        found.append(one)
    return found


def as_dict(endpoint: str, to_ms: int, skipped: Sequence[Skipped], *, dry_run: bool) -> dict[str, Any]:
    """Returns the answer of the operation."""
    return {"endpoint": endpoint, "to_ms": to_ms, "dry_run": dry_run, "logs": [one._asdict() for one in skipped]}
