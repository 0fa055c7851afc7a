"""How many messages may be in flight: enough to fill a long path to the broker, few in front of a near one. Pure.

one round trip is timed at a time
  as long as the last one, though more were in flight -> the path takes the time: twice as many next
  much longer                                         -> they wait in front of the broker: as few as before
"""

from __future__ import annotations

from typing import Final

# a broker on the same machine is busy with so many for some 10 ms. More would only wait in front of it, and urgent
# messages behind them
NEAR_MESSAGES: Final = 512
# of the round trip with few in flight: up to this the time is spent on the path, not in the broker
EASY: Final = 1.5
LATE: Final = 1.75  # from here on messages wait in front of the broker
LATE_IN_A_ROW: Final = 3  # a single late one has many causes: we, or the broker, had something else to do
TRIALS_APART_MAX: Final = 16  # round trips between two trials of more messages; doubles with each trial that fails


class Reach:
    """`messages` may be in flight now, and never more than `messages_max`.

    It begins with one, and doubles with every read that brings PUBACKs, up to NEAR_MESSAGES. Some brokers answer a
    message that they refuse and then hang up (mosquitto 2.0.11, where an access rule forbids the topic), so the
    answers to the others in flight are lost. With many in flight they would all be sent and lost again and again; with
    few, the refused message gets its answer.
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

    def on_pubacks(self, round_trip_s: float | None, *, was_full: bool) -> None:
        """One read has brought PUBACKs. `round_trip_s` of the timed message, if that is answered now; `was_full`: since
        it was sent, as many were in flight as may be."""
        if self.messages < self._near:
            self.messages = min(2 * self.messages, self._near)
        if round_trip_s is None:
            return
        if self.messages <= self._near:
            self._base_s = round_trip_s  # the path may have changed
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
