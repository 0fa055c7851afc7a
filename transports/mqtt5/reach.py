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
LATE: Final = 2.0  # from here on they wait
TRIALS_APART_MAX: Final = 64  # round trips from one trial of more to the next, while trials fail: double each time


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

    def __repr__(self) -> str:
        return f"Reach({self.messages} of {self.messages_max}, base={self._base_s * 1000:.1f} ms)"

    def answered(self) -> None:
        """One read has brought PUBACKs."""
        if self.messages < self._near:
            self.messages = min(2 * self.messages, self._near)

    def timed(self, round_trip_s: float, in_flight: int) -> None:
        """A message has been answered after so long, behind which, when it left, so many were in flight."""
        if in_flight <= self._near and self.messages <= self._near:
            self._base_s = round_trip_s  # the way may have become another one
        else:
            self._base_s = min(self._base_s, round_trip_s)
        if round_trip_s > LATE * self._base_s:
            self.messages = max(self.messages // 2, self._near)
            self._apart = self._until_trial = min(2 * self._apart, TRIALS_APART_MAX)
        elif self._until_trial:
            self._until_trial -= 1
        elif self.messages >= self._near and 2 * in_flight > self.messages and round_trip_s <= EASY * self._base_s:
            if self.messages > self._near:
                self._apart = 1  # the last trial went well
            self.messages = min(2 * self.messages, self.messages_max)
