"""Claims on the logs: how long each endpoint has been away, and which records wait for endpoints not configured.

    away_s(endpoint) --> absent_ms now  --watch, every SAVE_S--> cursors: retention by age waits for them until the
                         '-> conditions: reported before the     limit (plans.py)
                             claim ends

Absence is counted while the streamer runs, by a monotonic clock: a week in the garage ends no claim.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog

from history.file.load import Cursor
from history.log.log import Log
from history.records.chunk import is_publish
from streamer.egress import skipping
from streamer.egress.pump import Pump
from streamer.egress.rows import WAITING, EndpointPositions, endpoints_of, parsed, row
from streamer.reporting import Condition, Reporter, Sample
from streamer.walk.endpoint import Endpoint
from uprotocol.status import UStatusError
from uprotocol.tasks import wait_until

SAVE_S: Final = 600.0  # between two saves of absences
CLAIM_COUNTED_MAX: Final = (
    200_000  # records that `cursors list` looks at for one endpoint; of more, all later ones count
)
WARNING: Final = 0.9  # share of the limit; beyond it readiness says that the claim will end

log = structlog.get_logger()


@dataclass(slots=True)
class Unclaimed:
    """The cursors in one log of an endpoint that is not configured (no longer, or by mistake)."""

    endpoint: str
    log: Log
    names: set[str]  # of its own cursor, its follower's, and those of its holds
    absent_ms: int
    records: int = 0  # that wait for it, as of the last look; those that are not in memory all count until `count`
    _seqs: dict[str, int] = field(default_factory=dict)
    _counted_to: int = 0

    def look(self) -> None:
        """Count what has come, or count again after cursors have moved."""
        source, cursors = self.log, self.log.cursors
        seqs = {name: seq for name in self.names if (seq := cursors.seq(name)) is not None}
        positions, newest = EndpointPositions.of(seqs, self.endpoint), source.newest_seq
        if seqs != self._seqs:
            self._seqs, self.records, self._counted_to = seqs, 0, min(max(positions.first, source.floor_seq), newest)
        chunks = source.tail(self._counted_to)
        if chunks is None:
            chunks = source.tail(source.in_memory_after) or []
            self.records += source.in_memory_after - self._counted_to
        for chunk in chunks:
            after = {stream: max(self._counted_to, positions.after_in(source, stream)) for stream in chunk.stream_set}
            self.records += sum(seq > after[stream] for seq, stream in zip(chunk.seqs, chunk.streams, strict=True))
        self._counted_to = newest

    async def count(self) -> None:
        """Count all again, also those that are not in memory. Raises UStatusError."""
        seqs, records, positions = self._seqs, self.records, EndpointPositions.of(self._seqs, self.endpoint)
        waits_after = partial(positions.after_in, self.log)
        found, _ = await skipping.counted(self.log, positions.first, self._counted_to, waits_after)
        if seqs is self._seqs:
            self.records += found - records

    @property
    def topics(self) -> int:
        """Returns how many topics and addresses are held."""
        return sum(name.startswith(("parked:", "held:")) for name in self.names)


@dataclass(frozen=True, slots=True)
class Listed:
    """The cursor of one endpoint, configured or not."""

    endpoint: str
    seq: int
    records: int  # that wait for it
    holds: bool  # retention by age waits for it
    absent_hours: float  # only time in which the streamer ran
    parked_topics: int  # topics that are undecided or paused
    held_addresses: int  # addresses that are refused by its network, or unheard


def listed(rows: Mapping[str, Cursor], records: Mapping[str, int]) -> list[Listed]:
    """Returns the cursors of endpoints in one log, by name; `records`: how many records wait for each."""
    holds = Counter((named.kind, named.endpoint) for named in map(parsed, rows) if named is not None)
    endpoints = []
    for endpoint, cursor in endpoints_of(rows, "egress").items():
        waits, hours = records.get(endpoint, 0), round(cursor.absent_ms / 3_600_000, 1)
        parked, held = holds["parked", endpoint], holds["held", endpoint]
        endpoints.append(Listed(endpoint, cursor.seq, waits, cursor.holds, hours, parked, held))
    return sorted(endpoints, key=lambda listed: listed.endpoint)


async def count(source: Log, endpoint: str, pump: Pump | None = None) -> int:
    """Returns how many records wait for an endpoint. With its pump, only those that somebody there wants count. Raises
    UStatusError."""
    positions, newest = EndpointPositions.of(source.cursors.seqs(), endpoint), source.newest_seq

    def after(stream: int) -> int | None:
        if pump is not None and not (pump.waits.plans.is_followed and is_publish(source.stream(stream))):
            return pump.waits.waits_after(stream)
        return positions.after_in(source, stream)

    first = min(positions.first, newest)
    to = min(newest, first + CLAIM_COUNTED_MAX)
    records, _ = await skipping.counted(source, first, to, after)
    return records + newest - to


class Claims(Reporter):
    """Owns the cursors of endpoints that are not configured; the pumps own the others."""

    def __init__(
        self, pumps: Sequence[Pump], logs: Sequence[Log], limit_ms: int, away_s: Callable[[Endpoint], float]
    ) -> None:
        """`away_s(endpoint)`: how long its network has been away, while the streamer ran; 0: it is connected."""
        self._pumps, self._logs, self.limit_ms, self._away_s = pumps, logs, limit_ms, away_s
        self._saved_at = asyncio.get_running_loop().time()
        self.unclaimed: list[Unclaimed] = []
        self._found = asyncio.Event()  # they have changed

    def load(self) -> None:
        """Find the records that wait for endpoints that are not configured; drop their cursors if none wait."""
        self.find_unclaimed()
        for waits in self.unclaimed:
            for pump in self._pumps:
                if pump.log is waits.log and pump.waits.owned.is_new:  # the new endpoint may be a renamed one
                    pump.log.cursors.set(row("began", pump.peer.name), pump.cursor)

    def find_unclaimed(self) -> None:
        """Find what waits for endpoints that are not configured; called after an endpoint was added or removed."""
        known = {pump.peer.name for pump in self._pumps}
        before = {(waits.endpoint, waits.log) for waits in self.unclaimed}
        self.unclaimed.clear()
        for one in self._logs:
            found: dict[str, Unclaimed] = {}
            for name, cursor in one.cursors.all().items():
                named = parsed(name)
                if named is not None and named.kind in WAITING and named.endpoint not in known:
                    waits = found.setdefault(named.endpoint, Unclaimed(named.endpoint, one, set(), 0))
                    waits.names.add(name)
                    waits.absent_ms = max(waits.absent_ms, cursor.absent_ms)
            for waits in found.values():
                waits.look()
                if waits.records or waits.topics:
                    self.unclaimed.append(waits)
                    if (waits.endpoint, one) not in before:
                        counts = {"records": waits.records, "parked_topics": waits.topics}
                        what = "records wait for an endpoint that is not configured"
                        log.error(what, endpoint=waits.endpoint, **counts)
                else:
                    self._drop(waits)
        self._found.set()

    def _drop(self, waits: Unclaimed) -> None:
        for name in waits.log.cursors.seqs():
            if name in waits.names or name.startswith(f"follower:{waits.endpoint}:"):
                waits.log.cursors.drop(name)

    def _look(self) -> list[Unclaimed]:
        """Returns for whom something waits."""
        for waits in self.unclaimed:
            waits.look()
        return [waits for waits in self.unclaimed if waits.records or waits.topics]

    async def _count(self) -> None:
        """Count what waits for endpoints that are not configured; drop their cursors if nothing does."""
        self._found.clear()
        for waits in list(self.unclaimed):
            with contextlib.suppress(UStatusError):  # as before
                await waits.count()
            if waits in self.unclaimed and waits not in self._look():
                self.unclaimed.remove(waits)
                self._drop(waits)

    async def watch(self) -> None:
        """Save how long each endpoint has been away, and count what waits for those that are not configured, until
        cancelled."""
        while True:
            await self._count()
            if await wait_until(self._found, self._saved_at + SAVE_S):
                continue
            self.find_unclaimed()
            away_ms = {pump.peer.name: int(self._away_s(pump.peer) * 1000) for pump in self._pumps}
            self.passed(self._unsaved_ms, away_ms)

    @property
    def _unsaved_ms(self) -> int:
        return int((asyncio.get_running_loop().time() - self._saved_at) * 1000)

    def absent_ms(self, pump: Pump) -> int:
        """Returns how long its peer has been away while the streamer ran, also before a restart; 0: it is connected."""
        away_s = self._away_s(pump.peer)
        return pump.waits.owned.absent_after(self._unsaved_ms, away_ms=int(away_s * 1000)) if away_s else 0

    def passed(self, ms: int, away_ms: Mapping[str, int]) -> None:
        """Note that `ms` have passed, and that each endpoint has been away for the last `away_ms` of them."""
        self._saved_at = asyncio.get_running_loop().time()
        for pump in self._pumps:
            pump.waits.passed(ms, away_ms=away_ms.get(pump.peer.name, 0))
        for waits in self.unclaimed:
            waits.absent_ms += ms
            cursors, holds = waits.log.cursors, waits.absent_ms < self.limit_ms
            for name in waits.names:
                if (seq := cursors.seq(name)) is not None:
                    cursors.set(name, seq, holds=holds, absent_ms=waits.absent_ms)

    def samples(self) -> Iterator[Sample]:
        for waits in self._look():
            yield "unclaimed_records", (waits.endpoint, waits.log.name), waits.records

    def conditions(self) -> Iterator[Condition]:
        for pump in self._pumps:
            absent_ms = self.absent_ms(pump)
            if pump.backlog and absent_ms >= self.limit_ms * WARNING:
                what = f"the {pump.backlog} records that it has not had"
                yield Condition(f"it has been away: {self._end(absent_ms)} {what}", pump.peer.name)
            topics = pump.waits.topics
            if topics.waited_ms >= self.limit_ms * WARNING:
                what = f"{len(topics)} topics wait for endpoint {pump.peer.name}, paused or undecided"
                yield Condition(f"{what}: {self._end(topics.waited_ms)} what has come of them", pump.peer.name)
        for waits in self._look():
            held = f", and those of {waits.topics} held topics and addresses," if waits.topics else ""
            yield Condition(
                f"{waits.records} records{held} wait for endpoint {waits.endpoint!r}, which is not configured: give "
                "an endpoint that name, or stop the streamer and adopt or forget them with 'up-streamer cursors'; "
                f"{self._end(waits.absent_ms)} them"
            )

    def _end(self, absent_ms: int) -> str:
        left_ms = self.limit_ms - absent_ms
        return (f"in {left_ms / 3_600_000:.1f} h " if left_ms > 0 else "") + "retention by age may take"
