"""Publishes: a pump stops sending them while a follower reads them from our history, and resumes afterwards.

stop   -> the follower reads what has not left (from a seq on) and what is held (per topic)
resume -> the pump sends what comes after a seq, and what is still owed of the held topics

Other messages are not affected. Both happen while no batch is in flight.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from history.records.stream import is_publish
from streamer.egress.blocked import Outbox
from streamer.egress.catch_up import CatchUp
from streamer.egress.deliveries import Deliveries
from streamer.egress.holds import OwedTopics
from streamer.egress.plans import OwnedCursor, Plans
from uprotocol.status import UStatusError


class Publishes:
    """Stops and resumes the publishes of one pump, whose outbox, plans and holds it shares."""

    def __init__(
        self,
        plans: Plans,
        owned: OwnedCursor,
        owed: OwedTopics,
        outbox: Outbox,
        catch_up: CatchUp,
        deliveries: Deliveries,
        wake: Callable[[], None],
    ) -> None:
        self._plans, self._log, self._owed, self._outbox = plans, plans.log, owed, outbox
        self._owned, self._wake = owned, wake
        self._topic_holds, self._address_holds = plans.topic_holds, plans.address_holds
        self._catch_up, self._deliveries = catch_up, deliveries
        # changes that wait until nothing is in flight
        self.changes: deque[tuple[Callable[[], int], asyncio.Future[int]]] = deque()

    def _is_publish(self, stream: int) -> bool:
        return self._log.knows_stream(stream) and is_publish(self._log.stream(stream))

    @property
    def are_held(self) -> bool:
        """True if some publishes wait at a position of their own."""
        return bool(self._owed) or any(map(self._is_publish, self._topic_holds)) or bool(self._address_holds)

    async def _when_nothing_is_in_flight(self, change: Callable[[], int]) -> int:
        """Have the pump make this change, and return its result."""
        self._wake()
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.changes.append((change, done))
        return await done

    def make_changes(self) -> None:
        """Make all changes that wait. Called when nothing is in flight."""
        while self.changes:
            change, done = self.changes.popleft()
            try:
                result = change()
            except UStatusError as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

    async def stop(self) -> int:
        """Stop sending publishes. Returns the same as `stop_now`."""
        return await self._when_nothing_is_in_flight(self.stop_now)

    async def resume(self, seq: int, had: int) -> None:
        """Do the same as `resume_now` while the pump runs."""
        await self._when_nothing_is_in_flight(lambda: self.resume_now(seq, had))

    def stop_now(self) -> int:
        """Stop sending publishes. Returns the seq up to which all have left, except those that are now `owed`."""
        publishes = set(filter(self._is_publish, self._outbox.streams))
        unsent = self._outbox.take_out(lambda item: item[2] in publishes)
        for item in unsent:
            self._catch_up.withdraw_trial(item)
        # for records of a hold that are tried or read back, the hold's position counts
        is_reading_back, hold_of = self._catch_up.is_under_way, self._deliveries.hold_of
        first = () if is_reading_back else [item[0] for item in unsent if hold_of(item) is None]
        self._owe()
        self._plans.is_followed = True
        self._plans.by_stream.clear()
        return min([self._plans.read, *(seq - 1 for seq in first)])

    def _owe(self) -> None:
        """End the holds of publishes: the follower reads their records from our history, after the hold's position."""
        owed: dict[int, int] = {}
        for stream in list(filter(self._is_publish, self._topic_holds)):
            owed[stream] = self._topic_holds[stream].after
            self._topic_holds.forget(stream)
            self._catch_up.found.pop(stream, None)
            self._catch_up.recheck.pop(stream, None)
        for hold in list(self._address_holds.values()):
            publishes = [one for one in hold.streams if self._is_publish(one) and self._plans.targets_of(hold, one)]
            for stream in publishes:
                owed[stream] = min(hold.after, owed.get(stream, hold.after))
            hold.streams.difference_update(publishes)
            self._address_holds.forget_head(hold)
            if not hold.streams:
                self._address_holds.drop(hold)
        for stream in list(filter(self._is_publish, self._catch_up.targets)):
            self._catch_up.withdraw_topic(stream)
        self._owed.add(owed)

    def resume_now(self, seq: int, had: int = 0) -> int:
        """Send the publishes with a greater seq, and those that are owed beyond `had`. Returns the seq after which
        the log is read now."""
        plans = self._plans
        plans.is_followed = False
        for stream, after in self._owed.items():
            if self._log.knows_stream(stream) and max(after, had) < seq:
                self._topic_holds.hold(stream, max(after, had))
                self._catch_up.recheck[stream] = None
        self._owed.clear_all()
        plans.by_stream.clear()
        if seq < plans.read:
            plans.pushed_to, plans.read = plans.read, max(seq, self._log.floor_seq)
        if plans.read < self._owned.seq:
            self._owned.seq = plans.read
            self._owned.save()
        return plans.read
