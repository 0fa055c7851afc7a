"""Rates, times of the last message, and lags, from counters that the parts keep anyway: a message costs nothing here.

counts of endpoints --look, every second--> Meter: the mean of RATE_WINDOW_S, and when the count last rose
cursor of a pump ------------------------> Lags: when the oldest record that it has not delivered was appended
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from history.log.log import Log
from streamer.durations import Durations
from streamer.egress.pump import Pump
from streamer.reporting import Sample
from streamer.walk.endpoint import Endpoint
from uprotocol.status import UStatusError

RATE_WINDOW_S: Final = 10.0  # of a rate
STEP_S: Final = 1.0  # between two counts that are kept
SHORTEST_S: Final = 1.0  # a rate is the mean of at least that


class Meter:
    """The rate at which a count rises."""

    def __init__(self, now_s: float) -> None:
        """`now_s`: loop time at which the count was 0."""
        self._seen: deque[tuple[float, int]] = deque([(now_s, 0)], maxlen=int(RATE_WINDOW_S / STEP_S) + 1)
        self._count = 0
        self.rose_ms = 0  # Unix milliseconds of the look that found the count risen; 0: never

    def look(self, count: int, now_s: float, now_ms: int) -> None:
        if count != self._count:
            self._count, self.rose_ms = count, now_ms
        if now_s - self._seen[-1][0] >= STEP_S:
            self._seen.append((now_s, count))

    def per_s(self, now_s: float) -> float:
        """Returns the mean since the oldest count that is kept."""
        began, count = self._seen[0]
        return (self._count - count) / max(now_s - began, SHORTEST_S)


class Lags:
    """When the first records behind some positions were appended. Those in memory are looked up at once; the others are
    read from disk by `look`, so what is known of them may be a second old."""

    def __init__(self) -> None:
        self._on_disk: dict[Pump | Log, tuple[int, int]] = {}  # of whom: the position, and its time

    async def look(self, positions: Iterable[tuple[Pump | Log, Log, int]]) -> None:
        """Reads what is not in memory. `positions`: whose they are, in which log, and after which seq."""
        fresh = dict[Pump | Log, tuple[int, int]]()
        for owner, log, after in positions:
            if log.tail(after) is not None:
                continue
            found = self._on_disk.get(owner, (-1, 0))
            if found[0] != after:
                try:
                    (appended_ms,) = await log.times_of([max(after + 1, log.oldest_seq)])
                except UStatusError:  # the pump can't read it either, and says so
                    continue
                found = after, appended_ms
            fresh[owner] = found
        self._on_disk = fresh

    def appended_ms(self, owner: Pump | Log, log: Log, after: int) -> int:
        """Returns Unix milliseconds; 0: there is no record behind `after`, or its time is not known yet."""
        if after >= log.newest_seq:
            return 0
        chunks = log.tail(after)
        if chunks is None:
            return self._on_disk.get(owner, (0, 0))[1]
        return chunks[0].time_ms if chunks else 0


class Meters:
    def __init__(
        self, endpoints: Iterable[Endpoint], pumps: Sequence[Pump], logs: Iterable[Log], now_ms: Callable[[], int]
    ) -> None:
        """`endpoints`, `pumps`: those of now, whenever they are asked. `now_ms`: Unix milliseconds."""
        self._endpoints, self._pumps, self._logs = endpoints, pumps, logs
        self.now_s, self._now_ms = asyncio.get_running_loop().time, now_ms
        self._meters: dict[tuple[Endpoint, str, str], Meter] = {}  # by endpoint, what, and origin of a flow
        self._lags = Lags()
        self._commits: dict[Log, tuple[Durations, Durations]] = {}  # all of a transaction, and the COMMIT at its end

    async def look(self) -> None:
        """Counts, and reads from disk what the lags need."""
        self.count()
        positions: list[tuple[Pump | Log, Log, int]] = [
            (pump, pump.log, pump.cursor) for pump in self._pumps if pump.backlog
        ]
        positions += [(log, log, log.oldest_seq - 1) for log in self._logs if log.oldest_seq]
        await self._lags.look(positions)

    def count(self) -> None:
        """Brings all meters up to date."""
        now_s, now_ms = self.now_s(), self._now_ms()
        for endpoint in self._endpoints:
            counts = {("received", ""): endpoint.received, ("forwarded", ""): endpoint.forwarded}
            counts |= {("flow", origin): count for origin, count in endpoint.forwarded_from.items()}
            for (what, origin), count in counts.items():
                key = endpoint, what, origin
                if key not in self._meters:
                    self._meters[key] = Meter(now_s)
                self._meters[key].look(count, now_s, now_ms)
        for log in self._logs:
            self._count_commits(log)

    def remove_endpoint(self, endpoint: Endpoint) -> None:
        self._meters = {key: meter for key, meter in self._meters.items() if key[0] is not endpoint}

    def _count_commits(self, log: Log) -> None:
        while log.durations:  # the writer's thread appends meanwhile
            commit_s, fsync_s = log.durations.popleft()
            commits, fsyncs = self._commits.setdefault(log, (Durations(), Durations()))
            commits.add(commit_s)
            fsyncs.add(fsync_s)

    def received(self, endpoint: Endpoint) -> tuple[float, int]:
        """Returns messages per second, and when the last one came (Unix milliseconds; 0: none has)."""
        return self._rate_and_time(endpoint, "received")

    def forwarded(self, endpoint: Endpoint) -> tuple[float, int]:
        """Returns messages per second, and when the last one left."""
        return self._rate_and_time(endpoint, "forwarded")

    def flow_per_s(self, origin: str, to: Endpoint) -> float:
        return self._rate_and_time(to, "flow", origin)[0]

    def _rate_and_time(self, endpoint: Endpoint, what: str, origin: str = "") -> tuple[float, int]:
        meter = self._meters.get((endpoint, what, origin))
        return (0.0, 0) if meter is None else (meter.per_s(self.now_s()), meter.rose_ms)

    def lag_s(self, pump: Pump) -> float:
        """Returns the age of the oldest record that the pump has not delivered, by when the log took it; 0: there is
        none. Records that are held have passed the pump's cursor and do not count."""
        appended_ms = self._lags.appended_ms(pump, pump.log, pump.cursor)
        return max(0.0, (self._now_ms() - appended_ms) / 1000) if appended_ms else 0.0

    def oldest_ms(self, log: Log) -> int:
        """Returns when the oldest record of a log was appended, in Unix milliseconds; 0: it has none."""
        return self._lags.appended_ms(log, log, log.oldest_seq - 1) if log.oldest_seq else 0

    def samples(self) -> Iterator[Sample]:
        self.count()
        for (endpoint, what, _), meter in self._meters.items():
            if what != "flow" and meter.rose_ms:
                yield f"last_{what}_seconds", (endpoint.name,), meter.rose_ms / 1000
        for log, (commits, fsyncs) in self._commits.items():
            yield "log_commit_seconds", (log.name,), commits
            yield "log_fsync_seconds", (log.name,), fsyncs
        for pump in self._pumps:
            yield "lag_seconds", (pump.peer.name, pump.log.name), self.lag_s(pump)
