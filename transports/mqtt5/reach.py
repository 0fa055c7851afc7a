"""How many messages to have in flight: as many as the way to the broker takes, and no more than its turn takes. Pure.

one round trip is timed at a time
  as long as the last one, though more were in flight -> the way takes the time: twice as many next
  much longer                                         -> they wait in front of the broker: as few as before
"""

from __future__ import annotations

from typing import Final

# a broker beside us is busy with so many for some 10 ms, and more would only wait in front of it: an urgent message
# behind them
NEAR_MESSAGES: Final = 512
# of the time with few in flight: while a round trip takes no longer, its time is the way's and not the broker's
EASY: Final = 1.5
LATE: Final = 1.75  # from here on they wait
LATE_IN_A_ROW: Final = 3  # one may be late for many reasons: we, or the broker, had something else to do
TRIALS_APART_MAX: Final = 16  # round trips from one trial of more to the next, while trials fail: double each time


class Reach:
    """`messages` may be in flight now, and never more than `messages_max`.

    It begins with one, and doubles with every read that brings PUBACKs, up to NEAR_MESSAGES. Some brokers answer a
    message that they refuse and hang up (mosquitto 2.0.11 does where an access rule forbids the topic), which takes
    away the answers of those in flight with it: sent again and again, all of them would be lost together. In a small
    window the culprit gets its answer.
    """

    def __init__(self, messages_max: int) -> None:
        self.messages_max = messages_max
        self._near = min(NEAR_MESSAGES, messages_max)
        self.messages = min(1, messages_max)
        self._base_s = 0.0  # a round trip with few in flight
        self._until_trial, self._apart = 0, 1  # round trips
        self._late = 0  # in a row

    def __repr__(self) -> str:
        return f"Reach({self.messages} of {self.messages_max}, base={self._base_s * 1000:.1f} ms)"

    def answered(self) -> None:
        """One read has brought PUBACKs."""
        if self.messages < self._near:
            self.messages = min(2 * self.messages, self._near)

    def timed(self, round_trip_s: float, *, was_full: bool) -> None:
        """A message has been answered after so long. `was_full`: meanwhile so many were in flight as may be."""
        if self.messages <= self._near:
            self._base_s = round_trip_s  # the way may have become another one
        else:
            self._base_s = min(self._base_s, round_trip_s)
        self._late = self._late + 1 if round_trip_s > LATE * self._base_s else 0
        if self._late == LATE_IN_A_ROW:
            self._late = 0
            self.messages = max(self.messages // 2, self._near)
            self._apart = self._until_trial = min(2 * self._apart, TRIALS_APART_MAX)
        elif self._until_trial:
            self._until_trial -= 1
        elif was_full and self.messages >= self._near and round_trip_s <= EASY * self._base_s:
            if self.messages > self._near:
                self._apart = 1  # the last trial went well
            self.messages = min(2 * self.messages, self.messages_max)
