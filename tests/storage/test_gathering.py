"""Waiting for others: it has to bring something, and who waits for each answer must not be slowed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from storage.runtime import LOOK_MAX, LOOK_MIN, Gathering

WINDOW_MS = 4.0
ENOUGH = 16
COMMIT_S = 0.0007
REPLY_S = 0.0002  # until a sender that was answered sends on


@dataclass
class Model:
    """A worker and its senders in virtual time. A sender has a number, and sends again when it is answered; None sends
    once."""

    gathering: Gathering | None
    now: float = 0.0
    turns: list[int] = field(default_factory=list)  # how many jobs each had
    waits: list[float] = field(default_factory=list)  # of each job, until it was committed
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _jobs: list[tuple[float, int | None]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _busy: bool = False
    _goal: int = 0  # jobs that are waited for

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), call))

    def send(self, sender: int | None = None) -> None:
        self._jobs.append((self.now, sender))
        if not self._busy and (not self._goal or self._is_enough()):
            self._begin(is_first=len(self._jobs) == 1)

    def run(self, seconds: float) -> None:
        while self._events and self._events[0][0] <= seconds:
            self.now, _, call = heapq.heappop(self._events)
            call()

    def _is_enough(self) -> bool:
        return len(self._jobs) >= min(self._goal, ENOUGH)

    def _begin(self, *, is_first: bool) -> None:
        if self.gathering is None:
            self._turn()
        elif self._goal:
            self._took(waited=True, in_vain=False)
        else:
            self._goal = self.gathering.wanted(is_first=is_first)
            if self._is_enough():
                self._took(waited=False, in_vain=False)
            else:
                due = len(self.turns)
                self.at(self._jobs[0][0] + self.gathering.window_s, lambda: self._late(due))

    def _late(self, turn: int) -> None:
        if self._goal and len(self.turns) == turn:
            self._took(waited=True, in_vain=True)

    def _took(self, *, waited: bool, in_vain: bool) -> None:
        assert self.gathering is not None
        self.gathering.took(len(self._jobs), waited=waited, in_vain=in_vain)
        self._goal = 0
        self._turn()

    def _turn(self) -> None:
        batch, self._jobs, self._busy = self._jobs, [], True
        self.turns.append(len(batch))
        self.at(self.now + COMMIT_S, lambda: self._done(batch))

    def _done(self, batch: list[tuple[float, int | None]]) -> None:
        self._busy = False
        for since, sender in batch:
            self.waits.append(self.now - since)
            if sender is not None:
                later = REPLY_S * (1 + sender % 7 / 10)
                self.at(self.now + later, lambda one=sender: self.send(one))  # type: ignore[misc]
        if self._jobs:
            self._begin(is_first=False)


def model(*, gathers: bool = True) -> Model:
    return Model(Gathering(WINDOW_MS, ENOUGH) if gathers else None)


def waiting_senders(count: int, *, gathers: bool) -> Model:
    made = model(gathers=gathers)
    for sender in range(count):
        made.at(0.0001 * sender, lambda one=sender: made.send(one))  # type: ignore[misc]
    made.run(10)
    return made


@pytest.mark.parametrize("senders", [1, 2, 4, 10, 20, 50])
def test_senders_that_wait_for_each_answer_are_not_slowed(senders: int) -> None:
    with_it, without = (sum(waiting_senders(senders, gathers=gathers).turns) for gathers in (True, False))
    assert with_it > 0.99 * without


def test_messages_that_come_evenly_share_commits_and_wait_for_a_window_at_most() -> None:
    made = model()
    for number in range(10_000):
        made.at(number / 1_000, made.send)
    made.run(20)
    assert sum(made.turns) / len(made.turns) > 3.8
    assert max(made.waits) <= WINDOW_MS / 1_000 + 2 * COMMIT_S


@pytest.mark.parametrize("rate", [10, 100, 200])
def test_messages_too_far_apart_are_not_held(rate: int) -> None:
    made = model()
    for number in range(5_000):
        made.at(number / rate, made.send)
    made.run(5_000 / rate + 1)
    assert set(made.turns) == {1}
    held = [wait for wait in made.waits if wait > 1.5 * COMMIT_S]
    assert len(held) <= 2 + 5_000 // LOOK_MAX + LOOK_MAX.bit_length() - LOOK_MIN.bit_length()


def test_a_burst_is_one_commit_and_is_not_held_when_it_is_whole() -> None:
    made = model()
    for burst in range(300):
        for number in range(10):
            made.at(burst * 0.1 + number * 0.0001, made.send)
    made.run(40)
    assert len(made.turns) < 330
    assert sorted(made.waits)[len(made.waits) // 2] < 0.002


def test_no_more_than_enough_is_waited_for() -> None:
    made = model()
    for number in range(20_000):
        made.at(number / 20_000, made.send)
    made.run(2)
    assert max(made.waits[:-ENOUGH]) < 0.002  # those at the end wait for what would follow


def test_what_comes_no_longer_is_soon_not_waited_for() -> None:
    gathering = Gathering(WINDOW_MS, 1_000)
    for _ in range(LOOK_MIN):
        gathering.took(1, waited=False, in_vain=False)
    assert gathering.wanted(is_first=True) > 1_000
    gathering.took(64, waited=True, in_vain=True)
    lost = 0
    while gathering.wanted(is_first=True) > 1:
        gathering.took(1, waited=True, in_vain=True)
        lost += 1
    assert lost <= 6
