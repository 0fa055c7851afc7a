"""Every message by its id, sent and arrived; judged at the end.

sent -> acked (by a party that outlived the fault) or shown (by Poll) -> owed -> delivered, reported, or lost
                                     '-- excluded: a killed broker has lost it; or the
                                                   broker did not know yet that it is wanted
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

EXAMPLES_MAX: Final = 5  # of each kind of failure, for a person to begin with


@dataclass(slots=True)
class Entry:
    """One message that a raw client has sent."""

    id: bytes
    flow: str
    index: int  # in the order of its flow
    payload: bytes
    sent_at: float
    acked_at: float = 0.0  # 0: never
    shown_at: float = 0.0  # in the history, by Poll
    arrived_at: float = 0.0
    heard_at: float = 0.0  # by the hearer that gets pushes
    copies: int = 0
    unheard: bool = False  # acknowledged without a subscriber
    excluded: bool = False
    reported: bool = False

    def __str__(self) -> str:
        times = f"sent {self.sent_at:.2f}, acked {self.acked_at:.2f}, shown {self.shown_at:.2f}"
        return f"{self.flow} #{self.index} ({self.id.hex()}, {times})"


@dataclass
class Verdict:
    """Counts of one campaign. `lost`, `doubled`, `reordered`, `wrong` and `unreported` must be 0."""

    kills: int = 0
    acked: int = 0
    delivered: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    reported: int = 0
    excluded: int = 0
    wrong: int = 0  # never sent, or with another payload or source than sent
    unreported: int = 0  # damage that was not reported
    doubled: int = 0  # a followed message: twice in the follower's log, or twice at the hearer without a kill
    skipped: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    examples: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # for a person, though nothing was lost
    # failures beside messages: a process that ended by itself, or was never ready
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.lost or self.doubled or self.reordered or self.wrong or self.unreported or self.problems)


class Ledger:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._entries: dict[bytes, Entry] = {}
        self._counts: Counter[str] = Counter()  # of each flow
        # (channel, flow) -> the latest in the order of sending that arrived first
        self._highest: dict[tuple[str, str], Entry] = {}
        self._reordered: set[bytes] = set()
        self._examples: dict[str, list[str]] = {}
        self._wrong = 0
        self._logged: set[bytes] = set()  # by the follower
        self._doubled: set[bytes] = set()
        self._copies: list[
            tuple[Entry, float, float]
        ] = []  # of followed messages: times of the first arrival and of a repeated one
        self._settled = 0  # entries from before the count began
        self._unknown_until: dict[str, float] = {}  # by flow: until then the broker may not have known its subscription
        self.arrivals = 0
        self.gap_records = 0  # reported in gaps

    def begin(self) -> None:
        """Start counting: forget the messages that were sent to see that everything works."""
        with self._lock:
            for entry in self._entries.values():
                entry.excluded = True
                entry.copies = min(entry.copies, 1)
            self._copies.clear()
            self._settled = len(self._entries)
            self._examples.clear()

    def silent_flows(self) -> list[str]:
        """Flows of which nothing has arrived."""
        with self._lock:
            return sorted(set(self._counts) - {e.flow for e in self._entries.values() if e.copies})

    def shown_ids(self, flows: set[str]) -> set[bytes]:
        with self._lock:
            return {e.id for e in self._entries.values() if e.shown_at and e.flow in flows}

    def now(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def example(self, kind: str, text: str) -> None:
        shown = self._examples.setdefault(kind, [])
        if len(shown) < EXAMPLES_MAX:
            shown.append(f"{kind} at {self.now():.2f}: {text}")

    def sent(self, id: bytes, flow: str, payload: bytes) -> None:
        with self._lock:
            self._entries[id] = Entry(id, flow, self._counts[flow], payload, self.now())
            self._counts[flow] += 1

    def acked(self, id: bytes, *, unheard: bool = False) -> None:
        with self._lock:
            entry = self._entries[id]
            entry.acked_at, entry.unheard = self.now(), unheard
            self._excuse(entry)

    def shown(self, id: bytes) -> None:
        """Poll has shown it. Messages of others do not count (dead letters are published, too)."""
        with self._lock:
            if (entry := self._entries.get(id)) is not None:
                entry.shown_at = entry.shown_at or self.now()

    def arrived(self, channel: str, id: bytes, flow: str, payload: bytes) -> None:
        with self._lock:
            self.arrivals += 1
            entry = self._entries.get(id)
            if entry is None:
                self._wrong += 1
                self.example("wrong", f"{channel}: {id.hex()} of {flow} was never sent")
                return
            if entry.payload != payload or entry.flow != flow:
                self._wrong += 1
                self.example("wrong", f"{channel}: {entry} came as {flow} with {payload[:40]!r}")
                return
            if channel == "push":
                entry.copies += 1
                if entry.copies > 1:
                    self._copies.append((entry, entry.heard_at, self.now()))
                    return
                entry.heard_at = self.now()
            if channel != "log":
                entry.arrived_at = entry.arrived_at or self.now()
            highest = self._highest.get((channel, flow))
            if highest is not None and entry.index < highest.index:
                if id not in self._reordered:
                    self._reordered.add(id)
                    self.example("reordered", f"{channel}: {entry} came after #{highest.index}")
            else:
                self._highest[channel, flow] = entry

    def exclude(
        self, flows: Callable[[str], bool], *, acked_only: bool, but_for: Callable[[Entry], bool] = lambda _: False
    ) -> int:
        """Messages in flight do not count any more: the broker that was killed may have lost them. `but_for`: except
        those that it never had."""
        with self._lock:
            under_way = [e for e in self._entries.values() if not e.arrived_at and not e.excluded and flows(e.flow)]
            if acked_only:
                under_way = [e for e in under_way if e.acked_at]
            under_way = [e for e in under_way if not but_for(e)]
            for entry in under_way:
                entry.excluded = True
            return len(under_way)

    def not_known_yet(self, flows: Iterable[str]) -> None:
        """Their broker may not have known until now that they are wanted. Messages that have not arrived do not count,
        even if the broker's PUBACK is still in flight."""
        with self._lock:
            self._unknown_until |= dict.fromkeys(flows, self.now())
            for entry in self._entries.values():
                self._excuse(entry)

    def _excuse(self, entry: Entry) -> None:
        if entry.unheard and entry.sent_at <= self._unknown_until.get(entry.flow, 0.0):
            entry.excluded = True

    def logged(self, id: bytes, flow: str, payload: bytes) -> None:
        """It is in the follower's log, where each message is once and in order."""
        self.arrived("log", id, flow, payload)
        with self._lock:
            if id in self._logged and id not in self._doubled:
                self._doubled.add(id)
                self.example("doubled", f"in the log of who follows: {self._entries.get(id)}")
            self._logged.add(id)

    def unlogged(self, flows: Callable[[str], bool]) -> list[Entry]:
        """Owed messages of `flows` that are not in the follower's log."""
        with self._lock:
            return [e for e in self._entries.values() if _owed(e) and e.id not in self._logged and flows(e.flow)]

    def judge_copies(self, flows: Callable[[str], bool], deaths: Iterable[float]) -> None:
        """A follower sends each message once, unless it died (time.monotonic()) before its cursor was saved."""
        died = [death - self._began for death in deaths]
        with self._lock:
            for entry, heard_at, again_at in self._copies:
                # a message of a killed process may arrive late, on a busy machine
                excused = any(entry.sent_at <= death <= again_at for death in died)
                if flows(entry.flow) and not entry.excluded and not excused and entry.id not in self._doubled:
                    self._doubled.add(entry.id)
                    self.example("doubled", f"heard at {heard_at:.2f} and again at {again_at:.2f}: {entry}")

    def tell(self, ids: Iterable[bytes]) -> None:
        with self._lock:
            for id in ids:
                if (entry := self._entries.get(id)) is not None:
                    entry.reported = True

    def missing(self) -> list[Entry]:
        """Owed messages that have not arrived."""
        with self._lock:
            return [e for e in self._entries.values() if _owed(e) and not e.arrived_at]

    def unacked(self) -> int:
        with self._lock:
            return sum(not e.acked_at for e in self._entries.values())

    def unshown(self, flows: Callable[[str], bool]) -> list[Entry]:
        """Owed messages of `flows` that are not in the history."""
        with self._lock:
            return [e for e in self._entries.values() if _owed(e) and not e.shown_at and flows(e.flow)]

    def judge(self, verdict: Verdict) -> None:
        missing = self.missing()
        with self._lock:
            entries = list(self._entries.values())
        lost = [e for e in missing if not e.reported]
        reported_by_gap = min(len(lost), self.gap_records)
        verdict.acked += sum(1 for e in entries if _owed(e))
        verdict.delivered += sum(1 for e in entries[self._settled :] if e.arrived_at)
        verdict.reported += len(missing) - len(lost) + reported_by_gap
        verdict.lost += len(lost) - reported_by_gap
        verdict.duplicated += sum(max(0, e.copies - 1) for e in entries[self._settled :])
        verdict.reordered += len(self._reordered)
        verdict.excluded += sum(1 for e in entries[self._settled :] if e.excluded and not e.arrived_at)
        verdict.wrong += self._wrong
        verdict.doubled += len(self._doubled)
        for entry in lost[reported_by_gap:][:EXAMPLES_MAX]:
            self.example("lost", str(entry))
        for examples in self._examples.values():
            verdict.examples += examples


def _owed(entry: Entry) -> bool:
    return bool(entry.acked_at or entry.shown_at) and not entry.excluded
