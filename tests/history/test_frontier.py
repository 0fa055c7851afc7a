"""Times, antichains, and the progress of a stream in them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.epochs.frontier import (
    PASSED_MAX,
    SPANS_MAX,
    Antichain,
    Frontier,
    Spans,
    is_ahead,
    is_covered,
    maximal,
    minimal,
    not_passed,
    precedes,
)
from history.records.epoch import Time

LATENT, ACTIVE, COMPLETED, SKIPPED = "latent", "active", "completed", "skipped"
ORDER = {LATENT: 0, ACTIVE: 1, COMPLETED: 2, SKIPPED: 2}
TIMES = st.tuples(st.integers(0, 4), st.integers(0, 4))
SETS = st.frozensets(TIMES, max_size=10)


def one(*numbers: int) -> list[Time]:
    """Times of one number."""
    return [(number,) for number in numbers]


# -- the document's examples


def state(frontier: Frontier, time: Time, completed: Sequence[Time] = ()) -> str:
    """`completed`: what `release` has returned as such so far."""
    if time in frontier.seen:
        return ACTIVE
    if frontier.may_come(time):
        return LATENT
    return COMPLETED if time in completed else SKIPPED


def after_its_example() -> Frontier:
    """completed: 0, 1, 2; active: 3, 5; latent: 4, 6, 7, 8 ..."""
    frontier = Frontier()
    frontier.hold((0,))
    for time in one(0, 1, 2, 3, 5):
        frontier.see(time)
    frontier.hold((3,))
    passed = frontier.release((0,))
    assert (passed.completed, passed.skipped) == (one(0, 1, 2), [])
    return frontier


def test_the_states_of_its_example() -> None:
    frontier = after_its_example()
    states = {number: state(frontier, (number,), one(0, 1, 2)) for number in range(9)}
    assert states == {0: COMPLETED, 1: COMPLETED, 2: COMPLETED, 3: ACTIVE, 4: LATENT, 5: ACTIVE} | dict.fromkeys(
        (6, 7, 8), LATENT
    )
    assert (frontier.lower, frontier.upper) == ({(3,)}, {(5,)})


def test_what_a_subscriber_of_its_example_sees_has_no_hole() -> None:
    """The reader gets 6, 7, 8 and so on, and not 4."""
    snapshot = after_its_example().upper
    assert [number for number in range(9) if not is_covered(snapshot, (number,))] == [6, 7, 8]


def test_an_epoch_may_be_skipped() -> None:
    frontier = after_its_example()
    frontier.hold((6,))
    passed = frontier.release((3,))
    assert (passed.completed, passed.skipped) == (one(3, 5), [])
    states = [state(frontier, (number,), passed.completed) for number in (3, 4, 5, 6)]
    assert states == [COMPLETED, SKIPPED, COMPLETED, LATENT]
    passed = frontier.release((6,))
    assert (passed.completed, passed.skipped) == ([], one(6))
    assert state(frontier, (6,)) == SKIPPED


def test_among_partially_ordered_times() -> None:
    frontier = Frontier()
    frontier.hold((0, 0))
    frontier.hold((0, 2), (1, 0))
    frontier.see((1, 1))
    frontier.see((0, 2))
    assert (frontier.lower, frontier.upper) == ({(0, 0)}, {(0, 2), (1, 1)})
    assert frontier.release((0, 0)).skipped == [(0, 0)]
    assert frontier.lower == {(0, 2), (1, 0)}
    assert state(frontier, (0, 1)) == SKIPPED, "nothing that is held is less than or equal to it"
    assert state(frontier, (0, 3)) == state(frontier, (2, 0)) == LATENT
    assert [time for time in ((0, 1), (1, 1), (2, 0), (0, 3), (2, 2)) if not is_covered(frontier.upper, time)] == [
        (2, 0),
        (0, 3),
        (2, 2),
    ], "times that can't be compared stay"
    assert frontier.release((1, 0)).completed == [(1, 1)], "(0, 2) does not precede it"
    assert frontier.lower == {(0, 2)}


def test_several_may_hold_a_time() -> None:
    frontier = Frontier()
    frontier.hold((1,))
    frontier.hold((1,))
    frontier.see((1,))
    assert frontier.release((1,)).completed == []
    assert frontier.release((1,)).completed == [(1,)]
    assert (frontier.lower, frontier.upper) == (frozenset(), frozenset())
    assert (frontier.may_come((1,)), frontier.may_come((2,))) == (False, True), "it goes on beyond what it passed"


def test_what_is_passed_stays_small() -> None:
    frontier = Frontier()
    many = [(number, -number) for number in range(2 * PASSED_MAX)]
    frontier.hold(*many)
    frontier.release(*many)
    assert len(frontier.passed) <= PASSED_MAX
    assert not any(map(frontier.may_come, many))
    assert frontier.may_come((2 * PASSED_MAX, 1))


def test_times_of_different_lengths_are_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="one length"):
        precedes((1,), (1, 2))


# -- antichains


@given(TIMES, TIMES, TIMES)
def test_it_is_a_partial_order(a: Time, b: Time, c: Time) -> None:
    assert precedes(a, a)
    assert not (precedes(a, b) and precedes(b, a)) or a == b
    assert not (precedes(a, b) and precedes(b, c)) or precedes(a, c)


def is_antichain(times: Antichain) -> bool:
    return not any(precedes(a, b) for a in times for b in times if a != b)


@given(SETS)
def test_the_least_and_the_greatest_are_antichains_that_bound_all(times: Antichain) -> None:
    least, greatest = minimal(times), maximal(times)
    assert is_antichain(least)
    assert is_antichain(greatest)
    assert least | greatest <= times
    assert all(is_ahead(least, time) and is_covered(greatest, time) for time in times)


@given(SETS, SETS)
def test_a_filter_falls_away_when_nothing_that_it_holds_back_may_come(times: Antichain, lower: Antichain) -> None:
    filter = maximal(times)
    rest = not_passed(filter, minimal(lower))
    for time in EVERY:
        if is_ahead(lower, time):  # of what may come, the same is held back
            assert is_covered(filter, time) == is_covered(rest, time)
    for covered in filter - rest:
        assert not any(is_ahead(lower, time) and precedes(time, covered) for time in EVERY)


# -- any history


EVERY: Final = [(a, b) for a in range(5) for b in range(5)]


class History:
    """Publishers that hold, see and release in any order, as far as the frontier lets them."""

    def __init__(self) -> None:
        self.frontier = Frontier()
        self.seen: set[Time] = set()
        self.states: dict[Time, str] = {}
        self.over: list[Time] = []

    def step(self, kind: int, time: Time) -> None:
        frontier = self.frontier
        before = {time: frontier.may_come(time) for time in EVERY}
        lower = frontier.lower
        if kind == 0 and frontier.may_come(time):
            frontier.hold(time)
        elif kind == 1 and frontier.held and frontier.may_come(time):
            frontier.see(time)
            self.seen.add(time)
        elif kind == 2 and frontier.held:
            held = sorted(frontier.held)
            passed = frontier.release(held[(time[0] + time[1]) % len(held)])
            self.check_passed(passed.completed, passed.skipped)
        self.check(before, lower)

    def check_passed(self, completed: Sequence[Time], skipped: Sequence[Time]) -> None:
        assert set(completed) <= self.seen
        assert not set(skipped) & self.seen
        for time in completed:
            assert not is_ahead(self.frontier.lower, time)
            assert not any(precedes(time, other) and time != other for other in self.over)
            self.over.append(time)

    def check(self, before: dict[Time, bool], lower: Antichain) -> None:
        frontier = self.frontier
        assert is_antichain(frontier.lower)
        assert is_antichain(frontier.upper)
        assert all(is_covered(frontier.upper, time) for time in frontier.seen)
        assert not lower or not frontier.lower or all(is_ahead(lower, time) for time in frontier.lower), "never back"
        for time in EVERY:
            assert before[time] or not frontier.may_come(time), f"{time} was over, and may come"
            now, known = state(frontier, time, self.over), self.states.get(time, LATENT)
            assert ORDER[now] >= ORDER[known], f"{time} was {known}, and is {now}"
            assert ORDER[known] < 2 or now == known, f"{time} was {known}, and is {now}"
            assert time not in self.over or now == COMPLETED
            self.states[time] = now


STEPS = st.lists(st.tuples(st.integers(0, 2), TIMES), max_size=40)


@given(STEPS)
def test_whatever_happens_times_only_go_on(steps: Sequence[tuple[int, Time]]) -> None:
    history = History()
    for kind, time in steps:
        history.step(kind, time)


@given(STEPS, STEPS)
def test_the_filter_of_any_moment_lets_through_what_was_latent_then(
    first: Sequence[tuple[int, Time]], then: Sequence[tuple[int, Time]]
) -> None:
    history = History()
    for kind, time in first:
        history.step(kind, time)
    filter, seen_before = history.frontier.upper, set(history.seen)
    over_before = set(history.over)
    for kind, time in then:
        history.step(kind, time)
    for time in history.seen - over_before:
        if not is_covered(filter, time):
            assert time not in seen_before, "some of it was missed, and it was let through"


@given(st.lists(TIMES, max_size=60))
def test_spans_have_all_that_was_in_little_room(added: list[Time]) -> None:
    spans = Spans()
    for place, time in enumerate(added):
        spans.add(time)
        assert all(one in spans for one in added[: place + 1])
        assert len(spans.spans) <= SPANS_MAX


def test_what_is_far_ahead_of_all_others_stays_apart() -> None:
    spans, night, years = Spans(), 30_000, 1 << 32
    for drive in range(4):
        for second in range(100):
            spans.add((drive * night + second,))
            spans.add((drive * night + second + years,))
    assert (years - 1,) not in spans
    assert (night - 1,) not in spans
    assert (night + 5,) in spans
    assert (3 * night + years,) in spans
