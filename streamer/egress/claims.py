"""Claims on the logs: how long each endpoint has been away, and which records wait for endpoints not configured.

    away_s(endpoint) --> absent_ms now  --watch, every SAVE_S--> cursors: retention by age waits for them until the
                         '-> conditions: reported before the     limit (plans.py)
                             claim ends

Absence is counted while the streamer runs, by a monotonic clock: a week in the garage ends no claim.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from history.file.load import Cursor
from history.log.log import Log
from streamer.egress.holds import CURSOR_PREFIX, HELD_PREFIX, OWED_PREFIX, PARKED_PREFIX
from streamer.egress.pump import BEGAN_PREFIX, SKIPPED_PREFIX, Pump
from streamer.following.handover import FOLLOWED_PREFIX
from streamer.operating.states import Condition, Sample
from streamer.walk.endpoint import Endpoint

SAVE_S: Final = 600.0  # between two saves of absences
WARNING: Final = 0.9  # share of the limit; beyond it readiness says that the claim will end

log = structlog.get_logger()


@dataclass(slots=True)
class Unclaimed:
    """The cursors in one log of an endpoint that is not configured (no longer, or by mistake)."""

    endpoint: str
    log: Log
    cursors: dict[str, int]  # the endpoint's own, and those of its holds
    absent_ms: int

    @property
    def records(self) -> int:
        """Returns how many records wait after its own cursor."""
        names = (CURSOR_PREFIX + self.endpoint, FOLLOWED_PREFIX + self.endpoint)
        seq = min(self.cursors.get(name, self.log.newest_seq) for name in names)
        return self.log.newest_seq - max(seq, min(self.log.floor_seq, self.log.newest_seq))

    @property
    def topics(self) -> int:
        """Returns how many topics and addresses are held."""
        return sum(name.startswith((PARKED_PREFIX, HELD_PREFIX)) for name in self.cursors)


@dataclass(frozen=True, slots=True)
class Listed:
    """The cursor of one endpoint, configured or not."""

    endpoint: str
    seq: int
    records: int  # after it
    holds: bool  # retention by age waits for it
    absent_hours: float  # only time in which the streamer ran
    parked_topics: int  # topics that are undecided or paused
    held_addresses: int  # addresses that are refused by its network, or unheard


def listed(rows: Mapping[str, Cursor], newest: int, oldest: int) -> list[Listed]:
    """Returns the cursors of endpoints in one log, by name; `newest`, `oldest`: seqs of the log's records."""
    parked = Counter(name.split(":")[1] for name in rows if name.startswith(PARKED_PREFIX))
    held = Counter(name.split(":")[1] for name in rows if name.startswith(HELD_PREFIX))
    found = []
    for name, row in rows.items():
        if name.startswith(CURSOR_PREFIX):
            endpoint, waits = name.removeprefix(CURSOR_PREFIX), max(0, newest - max(row.seq, oldest - 1))
            hours = round(row.absent_ms / 3_600_000, 1)
            found.append(Listed(endpoint, row.seq, waits, row.holds, hours, parked[endpoint], held[endpoint]))
    return sorted(found, key=lambda one: one.endpoint)


class Claims:
    """Owns the cursors of endpoints that are not configured; the pumps own the others."""

    def __init__(
        self, pumps: Sequence[Pump], logs: Sequence[Log], limit_ms: int, away_s: Callable[[Endpoint], float]
    ) -> None:
        """`away_s(endpoint)`: how long its network has been away, while the streamer ran; 0: it is connected."""
        self._pumps, self._logs, self.limit_ms, self._away_s = pumps, logs, limit_ms, away_s
        self._saved_at = asyncio.get_running_loop().time()
        self.unclaimed: list[Unclaimed] = []

    def load(self) -> None:
        """Find the records that wait for endpoints that are not configured; drop their cursors if none wait."""
        self.find_unclaimed()
        for waits in self.unclaimed:
            for pump in self._pumps:
                if pump.log is waits.log and pump.owned.is_new:  # the new endpoint may be a renamed one
                    pump.log.cursors.set(BEGAN_PREFIX + pump.peer.name, pump.cursor)

    def find_unclaimed(self) -> None:
        """Find what waits for endpoints that are not configured; called after an endpoint was added or removed."""
        known = {pump.peer.name for pump in self._pumps}
        before = {(waits.endpoint, waits.log) for waits in self.unclaimed}
        self.unclaimed.clear()
        for one in self._logs:
            found: dict[str, Unclaimed] = {}
            for name, cursor in one.cursors.all().items():
                endpoint = _owner(name)
                if endpoint and endpoint not in known:
                    waits = found.setdefault(endpoint, Unclaimed(endpoint, one, {}, 0))
                    waits.cursors[name] = cursor.seq
                    waits.absent_ms = max(waits.absent_ms, cursor.absent_ms)
            for waits in found.values():
                if waits.records or waits.topics:
                    self.unclaimed.append(waits)
                    if (waits.endpoint, one) not in before:
                        counts = {"records": waits.records, "parked_topics": waits.topics}
                        what = "records wait for an endpoint that is not configured"
                        log.error(what, endpoint=waits.endpoint, **counts)
                else:
                    for name in waits.cursors:
                        one.cursors.drop(name)

    async def watch(self) -> None:
        """Save how long each endpoint has been away, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            away_ms = {pump.peer.name: int(self._away_s(pump.peer) * 1000) for pump in self._pumps}
            self.passed(self._unsaved_ms, away_ms)

    @property
    def _unsaved_ms(self) -> int:
        return int((asyncio.get_running_loop().time() - self._saved_at) * 1000)

    def absent_ms(self, pump: Pump) -> int:
        """Returns how long its peer has been away while the streamer ran, also before a restart; 0: it is connected."""
        away_s = self._away_s(pump.peer)
        return pump.owned.absent_after(self._unsaved_ms, away_ms=int(away_s * 1000)) if away_s else 0

    def passed(self, ms: int, away_ms: Mapping[str, int]) -> None:
        """Note that `ms` have passed, and that each endpoint has been away for the last `away_ms` of them."""
        self._saved_at = asyncio.get_running_loop().time()
        for pump in self._pumps:
            pump.owned.waited(ms, away_ms=away_ms.get(pump.peer.name, 0))
            pump.topic_holds.wait(ms)
        for waits in self.unclaimed:
            waits.absent_ms += ms
            for name, seq in waits.cursors.items():
                waits.log.cursors.set(name, seq, holds=waits.absent_ms < self.limit_ms, absent_ms=waits.absent_ms)

    def samples(self) -> Iterator[Sample]:
        for waits in self.unclaimed:
            yield "unclaimed_records", (waits.endpoint, waits.log.name), waits.records

    def conditions(self) -> Iterator[Condition]:
        for pump in self._pumps:
            absent_ms = self.absent_ms(pump)
            if pump.backlog and absent_ms >= self.limit_ms * WARNING:
                what = f"the {pump.backlog} records that it has not had"
                yield Condition(f"it has been away: {self._end(absent_ms)} {what}", pump.peer.name)
            if pump.topic_holds.waited_ms >= self.limit_ms * WARNING:
                what = f"{len(pump.topic_holds)} topics wait for endpoint {pump.peer.name}, paused or undecided"
                yield Condition(
                    f"{what}: {self._end(pump.topic_holds.waited_ms)} what has come of them", pump.peer.name
                )
        for waits in self.unclaimed:
            parked = f" and {waits.topics} parked topics" if waits.topics else ""
            yield Condition(
                f"{waits.records} records{parked} wait for endpoint {waits.endpoint!r}, which is not configured: give "
                "an endpoint that name, or stop the streamer and adopt or forget them with 'up-streamer cursors'; "
                f"{self._end(waits.absent_ms)} them"
            )

    def _end(self, absent_ms: int) -> str:
        left_ms = self.limit_ms - absent_ms
        return (f"in {left_ms / 3_600_000:.1f} h " if left_ms > 0 else "") + "retention by age may take"


def endpoint_of(name: str) -> str:
    """Returns the endpoint that a cursor belongs to, in whichever way; "" if it is none of an endpoint."""
    return name.split(":")[1] if name.startswith((BEGAN_PREFIX, SKIPPED_PREFIX)) else _owner(name)


def _owner(name: str) -> str:
    """Returns the endpoint that this cursor belongs to, or ""."""
    if name.startswith((PARKED_PREFIX, HELD_PREFIX, OWED_PREFIX)):
        return name.split(":")[1]
    prefix = next((one for one in (CURSOR_PREFIX, FOLLOWED_PREFIX) if name.startswith(one)), None)
    return "" if prefix is None else name.removeprefix(prefix)
