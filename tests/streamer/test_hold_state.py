"""The states of a held address: every state x event has a rule or is ignored, and what the rules do."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.egress import hold_state
from streamer.egress.hold_state import (
    HOLD_RULES,
    IGNORED,
    OVER,
    RETURNING,
    TAKEN,
    TRYING,
    WAITING,
    HoldState,
    begun,
    step,
)
from streamer.egress.hold_state import HoldEvent as E
from streamer.egress.hold_state import HoldProgress as P
from streamer.egress.hold_state import NextTry as N

NOW = 100.0
PROGRESS = st.builds(
    P,
    st.sampled_from(HoldState),
    st.integers(0, 20),
    st.sampled_from([0.0, NOW - 1, NOW, NOW + 5]),
    st.booleans(),
)


def test_every_state_and_event_has_a_rule_or_is_ignored() -> None:
    assert not IGNORED & HOLD_RULES.keys()
    assert IGNORED | HOLD_RULES.keys() == set(itertools.product(HoldState, E))


@pytest.mark.parametrize(
    ("before", "event", "after", "is_scheduled"),
    [
        (P(due_at=NOW), E.NOT_TAKEN, P(WAITING, 1, NOW + 1), True),
        (P(WAITING, 3, NOW + 1), E.NOT_TAKEN, P(WAITING, 3, NOW + 1), False),
        (P(WAITING, 2, NOW + 1), E.TRIAL_NOT_TAKEN, P(WAITING, 3, NOW + 4), True),
        (P(WAITING, 2, NOW), E.DUE, P(TRYING, 2, NOW), False),
        (P(WAITING, 2, NOW + 1), E.NEWS, P(WAITING, 2, NOW), True),
        (P(WAITING, 2, NOW - 1), E.NEWS, P(WAITING, 2, NOW - 1), False),
        (P(WAITING, 2, NOW), E.TRIAL_TAKEN, P(TAKEN, 2, NOW), False),
        (P(TRYING, 2, NOW), E.NOT_TAKEN, P(TRYING, 3, NOW + 4), True),
        (P(TRYING, 20, NOW), E.TRIAL_NOT_TAKEN, P(WAITING, 21, NOW + 60), True),
        (P(TRYING, 20, NOW, True), E.TRIAL_NOT_TAKEN, P(WAITING, 21, NOW), True),
        (P(TRYING, 2, NOW), E.NEWS, P(TRYING, 2, NOW, True), False),
        (P(TRYING, 2, NOW), E.TRIAL_TAKEN, P(TAKEN, 2, NOW), False),
        (P(TRYING, 2, NOW), E.WITHDRAWN, P(WAITING, 2, 0.0), True),
        (P(TAKEN, 0, NOW + 9), E.NOT_TAKEN, P(WAITING, 1, NOW + 1), True),
        (P(TAKEN, 1, NOW), E.TRIAL_NOT_TAKEN, P(WAITING, 2, NOW + 2), True),
        (P(TAKEN, 1, NOW, True), E.NEWS, P(TAKEN, 1, NOW), False),
        (P(TAKEN, 1, NOW), E.READ_BACK, P(RETURNING, 1, NOW), False),
        (P(RETURNING, 0, NOW + 9), E.NOT_TAKEN, P(WAITING, 1, NOW + 1), True),
        (P(RETURNING, 1, NOW), E.TRIAL_NOT_TAKEN, P(WAITING, 2, NOW + 2), True),
        (P(RETURNING, 1, NOW, True), E.NEWS, P(RETURNING, 1, NOW), False),
        (P(RETURNING, 1, NOW), E.CONFIRMED, P(OVER, 1, NOW), False),
        *((P(state, 1, NOW), E.END, P(OVER, 1, NOW), False) for state in HoldState if state is not OVER),
    ],
)
def test_a_rule_by_example(before: P, event: E, after: P, is_scheduled: bool) -> None:
    assert (before.state, event) in HOLD_RULES
    assert step(before, event, NOW) == (after, is_scheduled)


@given(progress=PROGRESS, event=st.sampled_from(E))
def test_tries_never_fall_and_what_is_over_stays_so(progress: P, event: E) -> None:
    after, is_scheduled = step(progress, event, NOW)
    assert after.tries >= progress.tries
    if (progress.state, event) in IGNORED:
        assert (after, is_scheduled) == (progress, False)
    else:
        rule = HOLD_RULES[progress.state, event]
        assert after.state is rule.state
        if rule.next_try is N.LATER and not progress.is_woken:
            assert hold_state.RETRY_S_MIN <= after.due_at - NOW <= hold_state.RETRY_S_MAX
        if is_scheduled:
            assert after.due_at != progress.due_at or rule.next_try in (N.LATER, N.LATER_IF_DUE, N.AT_ONCE)


def test_the_first_try_is_after_a_while() -> None:
    assert begun(NOW) == P(due_at=NOW + hold_state.RETRY_S_MIN)
