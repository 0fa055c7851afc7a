"""Messages that were dropped although their network was told that they were taken: nobody sends them again.

ingress -> add, per message    turn, each 0.25 s -> a line in the log for each endpoint, at once, then each REPORT_S
                               '-> a DroppedEntry of each authority -> the log's losses, until a person acknowledges it
                                                               -> /readyz, status, metrics

Counted are messages that somebody wants: `over_quota`, `too_large`, `topics_full`, `authority_topics_full`;
`refused` by the log if their network can't send them again; `overflow` of a transport. Not counted are those that
nobody wants or that may not pass, repeated, expired and malformed ones, and requests: their callers get an answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import structlog

from history.file import damage as damages
from history.log.log import Log
from streamer.reporting import Condition, Reporter, Sample
from uprotocol.uuid import moment

REPORT_S: Final = 10.0  # between two log lines of an endpoint, and two writes: a flood must not wear out the flash
# open entries with a name; further authorities share one entry for each endpoint, so that false names fill nothing
ENTRIES_MAX: Final = 100
PENDING_MAX: Final = 1_000  # authorities of an endpoint between two reports; the others count as unnamed
UNNAMED: Final = "other authorities"
NAMED_MAX: Final = 3  # authorities in one sentence: those that lost most
_TEXT: Final = re.compile(
    r"endpoint (?P<endpoint>[^ :]*): (?:authority (?P<authority>.+)|other authorities): (?P<messages>\d+) messages "
    r"dropped from (?P<from>\S+) to (?P<to>\S+): (?P<reasons>[a-z0-9_, ]+)",
    re.DOTALL,
)

log = structlog.get_logger()

DroppedKey = tuple[str, str]  # endpoint and authority; an authority of "": unknown, or one of too many


@dataclass(slots=True)
class DroppedEntry:
    """What one authority has lost at one endpoint. Times are Unix milliseconds."""

    from_ms: int
    to_ms: int
    reasons: Counter[str] = field(default_factory=Counter)  # number of messages

    @property
    def messages(self) -> int:
        return self.reasons.total()

    def extend(self, other: DroppedEntry) -> None:
        self.from_ms, self.to_ms = min(self.from_ms, other.from_ms), max(self.to_ms, other.to_ms)
        self.reasons.update(other.reasons)

    def text(self, key: DroppedKey) -> str:
        """Returns what the log keeps, and `up-streamer history acknowledge` prints."""
        endpoint, authority = key
        whose = f"authority {authority}" if authority else UNNAMED
        times = f"from {moment(self.from_ms)} to {moment(self.to_ms)}"
        return f"endpoint {endpoint}: {whose}: {self.messages} messages dropped {times}: {_listed(self.reasons)}"


def parse(text: str, found_ms: int) -> tuple[DroppedKey, DroppedEntry]:
    """Returns the entry of a kept text; one without messages, found at `found_ms`, if it can't be read."""
    match = _TEXT.fullmatch(text)
    if match is None:
        return ("", ""), DroppedEntry(found_ms, found_ms)
    begin, end = (round(datetime.fromisoformat(match[name]).timestamp() * 1000) for name in ("from", "to"))
    counts = (one.rpartition(" ") for one in match["reasons"].split(", "))
    reasons = Counter({reason: int(count) for reason, _, count in counts})
    return (match["endpoint"], match["authority"] or ""), DroppedEntry(begin, end, reasons)


def _listed(counts: Counter[str], at_most: int | None = None) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common(at_most))


class Drops(Reporter):
    """`add` counts; `turn` reports. `kept`: the log that keeps the entries. `now`: loop time, seconds."""

    def __init__(self, kept: Log, now_ms: Callable[[], int], now: Callable[[], float]) -> None:
        self._kept, self._now_ms, self._now = kept, now_ms, now
        self._pending: dict[str, dict[str, DroppedEntry]] = {}  # not yet reported, by endpoint and authority
        self._report_at: dict[str, float] = {}  # by endpoint: loop time; not earlier
        self.counts: Counter[tuple[str, str]] = Counter()  # since the start, by endpoint and reason
        self._entries: dict[DroppedKey, tuple[int, DroppedEntry]] = {}  # with the number of their rows
        for number, damage in kept.losses.ledger.open_rows.items():
            if damage.kind == damages.DROPPED:
                key, entry = parse(damage.detail, damage.when_ms)
                self._entries[key] = number, entry

    def add(self, endpoint: str, authority: str, reason: str, messages: int = 1) -> None:
        """Count messages that were dropped. `authority`: "" if it is unknown."""
        self.counts[endpoint, reason] += messages
        pending = self._pending.setdefault(endpoint, {})
        entry = pending.get(authority)
        if entry is None:
            now_ms = self._now_ms()
            entry = pending.setdefault(authority if len(pending) < PENDING_MAX else "", DroppedEntry(now_ms, now_ms))
        entry.reasons[reason] += messages

    def turn(self) -> None:
        """Report what was added at endpoints whose last report is long enough ago."""
        now = self._now()
        for endpoint in [one for one in self._pending if now >= self._report_at.get(one, now)]:
            self._report_at[endpoint] = now + REPORT_S
            self._report(endpoint)

    async def close(self) -> None:
        """Report the rest."""
        for endpoint in list(self._pending):
            self._report(endpoint)

    def _report(self, endpoint: str) -> None:
        pending = self._pending.pop(endpoint)
        now_ms = self._now_ms()
        reasons, authorities = Counter[str](), Counter[str]()
        for authority, entry in pending.items():
            entry.to_ms = max(now_ms, entry.from_ms)
            reasons.update(entry.reasons)
            authorities[authority or UNNAMED] += entry.messages
        log.error(
            "messages that were taken have been dropped",
            endpoint=endpoint,
            messages=reasons.total(),
            reasons=_listed(reasons),
            authorities=len(authorities),
            most_of=_listed(authorities, NAMED_MAX),
        )
        self._keep(endpoint, pending)

    def _keep(self, endpoint: str, pending: dict[str, DroppedEntry]) -> None:
        """Extend the entries of the endpoint, and save them."""
        entries = self._entries = dict(self._open())
        left = ENTRIES_MAX - sum(bool(authority) for _, authority in entries)
        changed: dict[DroppedKey, DroppedEntry] = {}
        for authority, entry in pending.items():
            key = endpoint, authority
            if authority and key not in entries:
                left -= 1
                if left < 0:
                    key = endpoint, ""
            if key in changed:
                changed[key].extend(entry)
            else:
                changed[key] = entry
        for key, entry in changed.items():
            number = None
            if key in entries:
                number, before = entries[key]
                entry.extend(before)
            entries[key] = self._kept.losses.put(damages.DROPPED, entry.text(key), number), entry

    def _open(self) -> Iterator[tuple[DroppedKey, tuple[int, DroppedEntry]]]:
        """Yields the entries that nobody has acknowledged."""
        is_open = self._kept.losses.ledger.is_open
        return ((key, kept) for key, kept in self._entries.items() if is_open(kept[0]))

    def lost(self, endpoint: str) -> int:
        """Returns the number of messages that were dropped and reported, and that nobody has acknowledged."""
        return sum(entry.messages for key, (_, entry) in self._open() if key[0] == endpoint)

    def conditions(self) -> Iterator[Condition]:
        totals: dict[str, DroppedEntry] = {}
        authorities: dict[str, Counter[str]] = {}
        for (endpoint, authority), (_, entry) in self._open():
            totals.setdefault(endpoint, DroppedEntry(entry.from_ms, entry.to_ms)).extend(entry)
            authorities.setdefault(endpoint, Counter())[authority or UNNAMED] = entry.messages
        for endpoint, total in totals.items():
            times = f"from {moment(total.from_ms)} to {moment(total.to_ms)}"
            yield Condition(
                f"{total.messages} messages that were taken have been dropped {times} ({_listed(total.reasons)}), most "
                f"of {_listed(authorities[endpoint], NAMED_MAX)}; nobody has acknowledged that: it ends with "
                "'up-streamer history acknowledge'",
                endpoint,
            )

    def samples(self) -> Iterator[Sample]:
        for (endpoint, reason), count in self.counts.items():
            yield "lost", (endpoint, reason), count
