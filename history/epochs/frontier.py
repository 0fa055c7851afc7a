"""The frontiers of a stream: which logical times are over, which are open, which have not begun. Pure.

hold (a time may come) -> see (a record of it) -> release -> PassedTimes: completed, or skipped if it had no record

lower frontier: the minimal of the held times. A time is over if none of them is less than or equal to it
upper frontier: the maximal of the active times. A time has not begun if it is not less than or equal to any of them

After Strymon's publish-subscribe protocol and the progress tracking of Timely Dataflow (Murray et al., "Naiad: A Timely
Dataflow System", SOSP 2013). Unlike there, a stream that holds nothing has not ended: it continues after the times that
are over.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Collection, Iterable
from operator import le, sub
from typing import Final, NamedTuple

from history.records.epoch import Time

Antichain = frozenset[Time]  # no element is less than another one

NOTHING: Final[Antichain] = frozenset()
ACTIVE_MAX: Final = 256  # open epochs of a group: each frontier names all of them
FILTER_MAX: Final = 1_024  # of an antichain of several logs; more become one time greater than each
PASSED_MAX: Final = 64  # of a frontier; more become one time that is greater than each
SPANS_MAX: Final = 8  # spans of times that are distinguished; a cursor file contains them


def precedes(one: Time, other: Time) -> bool:
    """Returns whether `one` is less than or equal to `other`."""
    assert len(one) == len(other), f"times of one stream have one length, not {one} and {other}"
    return all(map(le, one, other))


def minimal(times: Iterable[Time]) -> Antichain:
    """Returns the times for which no other one is less."""
    kept: list[Time] = []
    for time in sorted(set(times)):  # in this order no time is less than an earlier one
        if not any(precedes(one, time) for one in kept):
            kept.append(time)
    return frozenset(kept)


def maximal(times: Iterable[Time]) -> Antichain:
    """Returns the times that are not less than another one."""
    kept: list[Time] = []
    for time in sorted(set(times), reverse=True):
        if not any(precedes(time, one) for one in kept):
            kept.append(time)
    return frozenset(kept)


def is_ahead(lower: Collection[Time], time: Time) -> bool:
    """Returns whether the time may still come: one in `lower` is less than or equal to it."""
    return any(precedes(one, time) for one in lower)


def is_covered(upper: Collection[Time], time: Time) -> bool:
    """Returns whether the time is less than or equal to one of `upper`."""
    return any(precedes(time, one) for one in upper)


def not_passed(filter: Antichain, lower: Collection[Time]) -> Antichain:
    """Returns the part of a filter that is still needed: times that it covers may come."""
    return frozenset(one for one in filter if any(precedes(low, one) for low in lower))


def raised(antichain: Antichain, times: Iterable[Time]) -> Antichain:
    """Returns the maximal times of both; if they are too many, the least time that is greater than each."""
    for time in times:
        if not is_covered(antichain, time):
            antichain = frozenset(one for one in antichain if not precedes(one, time)) | {time}
    return few(antichain, FILTER_MAX)


def few(times: Antichain, most: int) -> Antichain:
    """Returns `times`; if they are more than `most`, the least time that is greater than or equal to each."""
    if len(times) <= most:
        return times
    return frozenset({tuple(map(max, zip(*times, strict=True)))})


class Spans:
    """A set of times in little memory: spans from a first to a last time, which include all times between. Of too many
    spans the two closest become one, so times that are years ahead of all others stay separate."""

    def __init__(self, spans: Iterable[tuple[Time, Time]] = ()) -> None:
        self.spans = sorted(spans)

    def __contains__(self, time: Time) -> bool:
        return any(precedes(first, time) and precedes(time, last) for first, last in self.spans)

    def add(self, time: Time) -> None:
        if time in self:
            return
        bisect.insort(self.spans, (time, time))
        if len(self.spans) > SPANS_MAX:
            pairs = itertools.pairwise(self.spans)
            gaps = (tuple(map(sub, after[0], before[1])) for before, after in pairs)
            index, _ = min(enumerate(gaps), key=lambda one: one[1])
            (one_first, one_last), (other_first, other_last) = self.spans[index : index + 2]
            first, last = tuple(map(min, one_first, other_first)), tuple(map(max, one_last, other_last))
            self.spans[index : index + 2] = [(first, last)]


class PassedTimes(NamedTuple):
    """Times that a step has ended, in an order in which no time follows a greater one."""

    completed: list[Time]
    skipped: list[Time]  # held, without a record


class Frontier:
    """The frontiers of one stream. `held`: times that may come, counted, because several may hold the same. `seen`:
    times with records, of which more may come. `passed`: a time that is less than or equal to one of these is over,
    unless a held time is less than or equal to it. If nothing is held, times that the last lower frontier had passed
    are over, too."""

    def __init__(
        self,
        held: Iterable[Time] = (),
        seen: Iterable[Time] = (),
        passed: Iterable[Time] = (),
        floor: Iterable[Time] = (),
    ) -> None:
        """Restore a frontier. `floor`: its last lower frontier that was not empty."""
        self.held: Counter[Time] = Counter(held)
        self.seen: set[Time] = set(seen)
        self.passed = maximal(passed)
        self.floor = minimal(self.held or floor)
        self._lower: Antichain | None = None

    def __repr__(self) -> str:
        return f"Frontier(lower={sorted(self.lower)}, upper={sorted(self.upper)}, passed={sorted(self.passed)})"

    @property
    def lower(self) -> Antichain:
        if self._lower is None:
            self._lower = minimal(self.held)
        return self._lower

    @property
    def upper(self) -> Antichain:
        """Returns the maximal active times, which are those with records. A reader that begins now misses no record of
        a time that is only held."""
        return maximal(self.seen)

    @property
    def length(self) -> int | None:
        """Returns the length of its times; None: there was none so far."""
        return next((len(time) for times in (self.held, self.seen, self.passed) for time in times), None)

    def may_come(self, time: Time) -> bool:
        """Returns whether the time is not over."""
        if self.held:
            return is_ahead(self.lower, time)
        return (not self.floor or is_ahead(self.floor, time)) and not is_covered(self.passed, time)

    def hold(self, *times: Time) -> None:
        """Announce, as one step, that these times, or greater ones, may come."""
        for time in times:
            assert self.may_come(time), f"{time} is over: the lower frontier is {sorted(self.lower)}"
        self.held.update(times)
        self._lower = None
        self.floor = self.lower

    def see(self, time: Time) -> bool:
        """Note a record of the time. Returns whether it is the first one."""
        assert self.may_come(time), f"{time} is over: the lower frontier is {sorted(self.lower)}"
        if time in self.seen:
            return False
        self.seen.add(time)
        return True

    def release(self, *times: Time) -> PassedTimes:
        """Stop holding these times, as one step."""
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
        return PassedTimes(completed, [one for one in over if one not in set(completed)])
