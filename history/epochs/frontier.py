"""Times, and how far a stream has come in them: what is over, what is open, and what has not begun. Pure.

hold (a time may come) -> see (a record of it) -> release -> Passed: completed, or skipped if nothing was seen of it

lower frontier: the minimal of what is held. Nothing comes any more at a time that none of them is less than or equal to
upper frontier: the maximal of what is active. What is neither less than nor equal to any of them has not begun

After Strymon's publish-subscribe protocol and the progress tracking of Timely Dataflow (Murray et al., "Naiad: A Timely
Dataflow System", SOSP 2013). Unlike there, a stream that holds nothing has not ended: it goes on beyond what it passed.
"""

from __future__ import annotations

import bisect
import enum
import itertools
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from operator import le, sub
from typing import Final, NamedTuple

# A logical time: (second,), or (trip, lap, sector). One of them is less than or equal to another one if each of its
# numbers is; so there are pairs of which neither is. All of one stream have the same length.
Time = tuple[int, ...]
Antichain = frozenset[Time]  # none of them is less than another one

NOTHING: Final[Antichain] = frozenset()
NUMBER_MIN: Final = -(1 << 63)  # of a time: what the wire and a file take
NUMBER_MAX: Final = (1 << 63) - 1
GROUP_MAX: Final = 64  # bytes of its name
LENGTH_MAX: Final = 8  # numbers of a time: nobody reasons about more dimensions
ACTIVE_MAX: Final = 256  # open epochs of a group: each record of a frontier names them all
FILTER_MAX: Final = 1_024  # of an antichain of several logs; beyond it they become one that is greater than each
PASSED_MAX: Final = 64  # of a frontier; beyond it they become one that is greater than each of them
ENDED_KEPT_MAX: Final = 1_024  # completed times that are told from skipped ones
SPANS_MAX: Final = 8  # drives that are told apart; a cursor file names them


def precedes(one: Time, other: Time) -> bool:
    """`one` is less than or equal to `other`."""
    assert len(one) == len(other), f"times of one stream have one length, not {one} and {other}"
    return all(map(le, one, other))


def minimal(times: Iterable[Time]) -> Antichain:
    """Those that no other one is less than."""
    kept: list[Time] = []
    for time in sorted(set(times)):  # none is less than one that comes before it here
        if not any(precedes(one, time) for one in kept):
            kept.append(time)
    return frozenset(kept)


def maximal(times: Iterable[Time]) -> Antichain:
    """Those that are less than no other one."""
    kept: list[Time] = []
    for time in sorted(set(times), reverse=True):
        if not any(precedes(time, one) for one in kept):
            kept.append(time)
    return frozenset(kept)


def is_ahead(lower: Collection[Time], time: Time) -> bool:
    """It may still come: something held is less than or equal to it."""
    return any(precedes(one, time) for one in lower)


def is_covered(upper: Collection[Time], time: Time) -> bool:
    """It is less than or equal to one of them."""
    return any(precedes(time, one) for one in upper)


def not_passed(filter: Antichain, lower: Collection[Time]) -> Antichain:
    """What of a filter is still needed: something that it holds back may come."""
    return frozenset(one for one in filter if any(precedes(low, one) for low in lower))


def raised(antichain: Antichain, times: Iterable[Time]) -> Antichain:
    """The maximal of both. Where they are too many, the least that is greater than each of them."""
    for time in times:
        if not is_covered(antichain, time):
            antichain = frozenset(one for one in antichain if not precedes(one, time)) | {time}
    return few(antichain, FILTER_MAX)


def few(times: Antichain, most: int) -> Antichain:
    """As they are, or the least that is greater than each of them, where they are more than `most`."""
    if len(times) <= most:
        return times
    return frozenset({tuple(map(max, zip(*times, strict=True)))})


class Spans:
    """Times that were, in little room: spans from a first to a last one, and what is between these counts, too. Where
    there are too many, the two that are closest become one; so what is years ahead of all others stays apart."""

    def __init__(self, spans: Iterable[tuple[Time, Time]] = ()) -> None:
        self.spans = sorted(spans)

    def __repr__(self) -> str:
        return f"Spans({self.spans})"

    def __contains__(self, time: Time) -> bool:
        return any(precedes(first, time) and precedes(time, last) for first, last in self.spans)

    def add(self, time: Time) -> None:
        if time in self:
            return
        bisect.insort(self.spans, (time, time))
        if len(self.spans) > SPANS_MAX:
            pairs = itertools.pairwise(self.spans)
            gaps = (tuple(map(sub, after[0], before[1])) for before, after in pairs)
            place, _ = min(enumerate(gaps), key=lambda one: one[1])
            (one_first, one_last), (other_first, other_last) = self.spans[place : place + 2]
            first, last = tuple(map(min, one_first, other_first)), tuple(map(max, one_last, other_last))
            self.spans[place : place + 2] = [(first, last)]


class State(enum.Enum):
    """Of a time, as its publisher sees it."""

    LATENT = "latent"  # nothing came so far
    ACTIVE = "active"  # something came, and more may
    COMPLETED = "completed"  # all of it came
    SKIPPED = "skipped"  # nothing came, and nothing will


@dataclass(frozen=True, slots=True)
class Passed:
    """Times that are over since, in an order in which none comes behind one that is greater."""

    completed: list[Time] = field(default_factory=list)
    skipped: list[Time] = field(default_factory=list)  # of those that were held


class Frontier:
    """Of one stream. `held`: times that may come, counted, since several may hold one. `seen`: those of which there
    were records, and may be more. `passed`: nothing comes at a time that is less than or equal to one of these, unless
    something held is less than or equal to it. Where nothing is held, nothing comes that the last lower frontier had
    passed, either."""

    def __init__(
        self,
        held: Iterable[Time] = (),
        seen: Iterable[Time] = (),
        passed: Iterable[Time] = (),
        floor: Iterable[Time] = (),
    ) -> None:
        """As one was; `floor`: its last lower frontier that was not empty."""
        self.held: Counter[Time] = Counter(held)
        self.seen: set[Time] = set(seen)
        self.passed = maximal(passed)
        self.floor = minimal(self.held or floor)
        self._lower: Antichain | None = None
        self._ended: dict[Time, None] = {}  # the newest of those that were completed
        self._forgotten = NOTHING  # the others

    def __repr__(self) -> str:
        return f"Frontier(lower={sorted(self.lower)}, upper={sorted(self.upper)}, passed={sorted(self.passed)})"

    @property
    def lower(self) -> Antichain:
        """Minimal held."""
        if self._lower is None:
            self._lower = minimal(self.held)
        return self._lower

    @property
    def upper(self) -> Antichain:
        """Maximal active, which are those that were seen. What is only held has no record yet: who begins to read now
        misses nothing of it."""
        return maximal(self.seen)

    @property
    def length(self) -> int | None:
        """Of its times; None: there was none so far."""
        return next((len(time) for times in (self.held, self.seen, self.passed) for time in times), None)

    def state(self, time: Time) -> State:
        if time in self.seen:
            return State.ACTIVE
        if self.may_come(time):
            return State.LATENT
        return State.COMPLETED if time in self._ended or is_covered(self._forgotten, time) else State.SKIPPED

    def may_come(self, time: Time) -> bool:
        """It is not over."""
        if self.held:
            return is_ahead(self.lower, time)
        return (not self.floor or is_ahead(self.floor, time)) and not is_covered(self.passed, time)

    def hold(self, *times: Time) -> None:
        """Announce that they, or what is greater, may come; together, as one step."""
        for time in times:
            assert self.may_come(time), f"{time} is over: the lower frontier is {sorted(self.lower)}"
        self.held.update(times)
        self._lower = None
        self.floor = self.lower

    def see(self, time: Time) -> bool:
        """There is a record of it. True: the first one."""
        assert self.may_come(time), f"{time} is over: the lower frontier is {sorted(self.lower)}"
        if time in self.seen:
            return False
        self.seen.add(time)
        return True

    def release(self, *times: Time) -> Passed:
        """They were held, and are not any more; together, as one step."""
        for time in times:
            assert self.held[time] > 0, f"{time} is not held"
            self.held[time] -= 1
            if not self.held[time]:
                del self.held[time]
        self._lower = None
        over = sorted(one for one in self.seen.union(times) if one not in self.held and not is_ahead(self.lower, one))
        completed = [one for one in over if one in self.seen]
        self.seen.difference_update(over)
        self.passed = few(maximal([*self.passed, *over]), PASSED_MAX)
        self.floor = self.lower or self.floor
        self._remember(completed)
        return Passed(completed, [one for one in over if one not in set(completed)])

    def _remember(self, completed: Iterable[Time]) -> None:
        self._ended.update(dict.fromkeys(completed))
        while len(self._ended) > ENDED_KEPT_MAX:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._forgotten = few(maximal([*self._forgotten, oldest]), PASSED_MAX)


class Epoch(NamedTuple):
    """What a record belongs to: a time of a group of topics."""

    group: str
    time: Time
