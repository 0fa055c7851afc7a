"""The states of a held address, as a table. Pure.

WAITING --due--> TRYING --taken--> TAKEN --reading back begins--> RETURNING --all of it is confirmed--> OVER
   ^                |                |                                |
   '---not taken----'----not taken---'-----------not taken------------'         from any state, at its end -> OVER
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple

RETRY_S_MIN: Final = 1.0  # until the first message of a hold is tried again; doubled each time
RETRY_S_MAX: Final = 60.0


class HoldState(enum.Enum):
    WAITING = enum.auto()  # nothing of it leaves
    TRYING = enum.auto()  # its first message is queued or in flight
    TAKEN = enum.auto()  # that message was taken: the rest is read back soon
    RETURNING = enum.auto()  # the rest is being read back and sent
    OVER = enum.auto()  # not held any more


class HoldEvent(enum.Enum):
    NOT_TAKEN = enum.auto()  # a message of the address
    TRIAL_NOT_TAKEN = enum.auto()  # the first message
    DUE = enum.auto()  # `due_at` has passed
    NEWS = enum.auto()  # the network is back, somebody listens, or a later message was taken
    TRIAL_TAKEN = enum.auto()  # also at the start, for a merged unit
    WITHDRAWN = enum.auto()  # the first message was removed before it left
    READ_BACK = enum.auto()  # reading back begins
    CONFIRMED = enum.auto()  # all that was read back has left
    END = enum.auto()  # nothing waits, the limit, merged, handed over


class NextTry(enum.Enum):
    """What becomes of the time of the next try."""

    KEEP = enum.auto()
    LATER = enum.auto()  # after 1, 2, 4 ... 60 s; at once after a wake
    LATER_IF_DUE = enum.auto()  # the same, if it has passed
    NOW = enum.auto()  # now, if it is later
    AT_ONCE = enum.auto()  # before all others
    WAKE = enum.auto()  # as soon as the message under way is answered
    NO_WAKE = enum.auto()


class HoldRule(NamedTuple):
    state: HoldState
    next_try: NextTry = NextTry.KEEP


WAITING, TRYING, TAKEN, RETURNING, OVER = HoldState
E, N = HoldEvent, NextTry

HOLD_RULES: Final[Mapping[tuple[HoldState, HoldEvent], HoldRule]] = {
    (WAITING, E.NOT_TAKEN): HoldRule(WAITING, N.LATER_IF_DUE),
    (WAITING, E.TRIAL_NOT_TAKEN): HoldRule(WAITING, N.LATER),  # of a unit that was merged into this one
    (WAITING, E.DUE): HoldRule(TRYING),
    (WAITING, E.NEWS): HoldRule(WAITING, N.NOW),
    # of a merged unit: at the start, or after another trial of it has failed
    (WAITING, E.TRIAL_TAKEN): HoldRule(TAKEN),
    (TRYING, E.NOT_TAKEN): HoldRule(TRYING, N.LATER_IF_DUE),
    (TRYING, E.TRIAL_NOT_TAKEN): HoldRule(WAITING, N.LATER),
    (TRYING, E.NEWS): HoldRule(TRYING, N.WAKE),
    (TRYING, E.TRIAL_TAKEN): HoldRule(TAKEN),
    (TRYING, E.WITHDRAWN): HoldRule(WAITING, N.AT_ONCE),
    (TAKEN, E.NOT_TAKEN): HoldRule(WAITING, N.LATER),
    (TAKEN, E.TRIAL_NOT_TAKEN): HoldRule(WAITING, N.LATER),
    (TAKEN, E.NEWS): HoldRule(TAKEN, N.NO_WAKE),
    (TAKEN, E.READ_BACK): HoldRule(RETURNING),
    (RETURNING, E.NOT_TAKEN): HoldRule(WAITING, N.LATER),
    (RETURNING, E.TRIAL_NOT_TAKEN): HoldRule(WAITING, N.LATER),
    (RETURNING, E.NEWS): HoldRule(RETURNING, N.NO_WAKE),
    (RETURNING, E.CONFIRMED): HoldRule(OVER),
    **{(state, E.END): HoldRule(OVER) for state in (WAITING, TRYING, TAKEN, RETURNING)},
}
IGNORED: Final = frozenset(
    {
        *((state, E.DUE) for state in (TRYING, TAKEN, RETURNING)),  # an outdated time
        *((state, E.TRIAL_TAKEN) for state in (TAKEN, RETURNING)),  # another trial of a merged unit
        *((state, E.WITHDRAWN) for state in (WAITING, TAKEN, RETURNING)),
        *((state, E.READ_BACK) for state in (WAITING, TRYING, RETURNING)),  # not taken since
        *((state, E.CONFIRMED) for state in (WAITING, TRYING, TAKEN)),  # not taken while it was read back
        *((OVER, event) for event in HoldEvent),
    }
)


class HoldProgress(NamedTuple):
    """What the table changes of a hold."""

    state: HoldState = WAITING
    tries: int = 0
    due_at: float = 0.0  # loop time of the next try
    is_woken: bool = False  # to be tried as soon as the message under way is answered


NEW: Final = HoldProgress()


def begun(now: float) -> HoldProgress:
    """Returns the progress of a hold whose first message is tried for the first time after a while."""
    return HoldProgress(due_at=now + RETRY_S_MIN)


def step(progress: HoldProgress, event: HoldEvent, now: float) -> tuple[HoldProgress, bool]:
    """Returns the progress after an event at this loop time, and whether its next try has to be scheduled."""
    rule = HOLD_RULES.get((progress.state, event))
    if rule is None:
        return progress, False
    (state, next_try), (_, tries, due_at, is_woken) = rule, progress
    if next_try is N.LATER or (next_try is N.LATER_IF_DUE and due_at <= now):
        wait_s = 0.0 if is_woken else min(RETRY_S_MIN * 2.0 ** min(tries, 10), RETRY_S_MAX)
        return HoldProgress(state, tries + 1, now + wait_s), True
    if next_try is N.AT_ONCE:
        return HoldProgress(state, tries, 0.0, is_woken), True
    if next_try is N.NOW:
        return HoldProgress(state, tries, min(due_at, now)), due_at > now
    if next_try in (N.WAKE, N.NO_WAKE):
        is_woken = next_try is N.WAKE
    return HoldProgress(state, tries, due_at, is_woken), False
