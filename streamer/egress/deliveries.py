"""Deliveries: the messages that leave for one peer, and their results.

outbox -> next_batch -> send -> taken: delivered
              |              -> UNAVAILABLE: sent again, in order, after a pause; put aside if others got through
              |              -> address refused, or nobody listens: held
              '-> expired    -> message refused: dead letter
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence, Set
from itertools import chain
from typing import Final

from history.log.log import RetentionLoss
from streamer.egress.blocked import Item, OrderKey, Outbox, key_of
from streamer.egress.catch_up import CatchUp
from streamer.egress.holds import AddressHold, Kind
from streamer.egress.plans import Plans, items_of
from streamer.egress.sender import Sender
from transports.base import NOT_TRIED
from uprotocol import attributes as attrs
from uprotocol import uuid as uuids
from uprotocol.pacing import Backoff
from uprotocol.status import Settled, code_name, is_nobody_listening, settle
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

# dead letters of records that retention deleted before the peer was back; of more only the range is reported
PASSED_LETTERS_MAX: Final = 100
# refusals that concern more than one message, and that a person or time can end
HELD_CODES: Final = frozenset(
    {
        UCode.PERMISSION_DENIED,
        UCode.UNAUTHENTICATED,
        UCode.RESOURCE_EXHAUSTED,
        UCode.FAILED_PRECONDITION,
        UCode.NOT_FOUND,
        UCode.ABORTED,
        UCode.CANCELLED,
    }
)

Refused = tuple[Item, UStatus, Kind]
"""A message that is to be held, the answer of the network, and the kind of the hold."""


class Deliveries:
    """The deliveries of one pump, whose outbox, plans and holds it shares."""

    def __init__(
        self,
        plans: Plans,
        sender: Sender[Item],
        outbox: Outbox,
        catch_up: CatchUp,
        backoff: Backoff,
    ) -> None:
        self._plans, self._peer, self._log, self._address_holds = plans, plans.peer, plans.log, plans.address_holds
        self._sender, self._outbox, self._aside, self._catch_up = sender, outbox, outbox.aside, catch_up
        self._dead, self._backoff = catch_up.reading.dead, backoff
        # new holds, until `_held_lately_until` batches are answered: messages that were under way beside theirs may
        # still be taken, which shows that the network takes such messages now
        self._held_lately: set[AddressHold] = set()
        self._held_lately_until = 0
        self._heard: set[int] = set()  # streams of which the network has taken a message since the start
        self.letters_left = PASSED_LETTERS_MAX
        # loop time at which the peer last took a message, or was sent one after that
        self.active_at = -math.inf
        self.retries = 0

    # Sending

    async def send(self, bytes_max: int) -> None:
        """Send the next batch, highest class first; an expired message becomes a dead letter instead."""
        now, sender, queue, aside = uuids.now_ms(), self._sender, self._outbox.queue, self._aside
        batch: list[Item] = []
        items = aside.due() if aside else []
        while True:
            batch += [item for item in items if not (item[1].stamp.ttl and self._ends_expired(item, now))]
            items = queue.take(sender.messages_max - len(batch), bytes_max)
            if not items:
                break
            if aside:
                items = [item for item in items if not aside.takes(item)]
        if not batch:
            if aside:
                self._outbox.put_back([])
            return
        if not sender.is_failing:
            self.active_at = asyncio.get_running_loop().time()
        if not await sender.send(batch, min([seq for seq, _, _ in batch]), is_trial=bool(aside)):
            self._outbox.put_back(batch)

    def _ends_expired(self, item: Item, now_ms: int) -> bool:
        """Returns whether `item` has expired; then it becomes a dead letter."""
        expired = item[1].is_expired(now_ms)
        if expired:
            self._catch_up.skip_trial(item)
            self._dead(item, UCode.DEADLINE_EXCEEDED, "its ttl ran out before the peer took it")
        return expired

    # Answers of the network

    def settle(self, batch: list[Item], statuses: list[UStatus]) -> None:
        """Note messages that were taken as delivered. Send the others again, hold them, or make them dead letters."""
        if not batch:
            return
        settled = settle(batch, statuses)
        if settled.again or settled.refused or self._catch_up.trying or self._held_lately:
            settled = self._sort_out_held(settled)
            if settled.sent and settled.again and self._catch_up.is_under_way:
                settled = self._hold_what_is_stuck(settled)
        if self._peer.tells_absence:
            self._heard.update([item[2] for item in settled.sent])
        self._peer.forwarded += len(settled.sent)
        for item, status in settled.refused:
            self._dead(item, status.code, status.message or code_name(status.code))
        again = [item for item, _ in settled.again]
        stuck = set[OrderKey]()  # the streams that failed while others got through
        if settled.sent:
            stuck = {key_of(item[1]) for item, status in settled.again if status.message != NOT_TRIED}
        if again or self._aside:
            self._outbox.put_back(again, stuck)
        was_failing, self._sender.is_failing = self._sender.is_failing, bool(again) and not stuck
        if again:
            self.retries += 1
        if not self._sender.is_failing:
            self.active_at = asyncio.get_running_loop().time()
            self.letters_left = PASSED_LETTERS_MAX
            if was_failing:
                self._backoff.reset()

    def _sort_out_held(self, settled: Settled[Item]) -> Settled[Item]:
        """Hold the messages whose address is refused or unheard, and note the trials that were taken. Returns the
        others: sent, to be sent again, or dead letters."""
        again, dead = list[tuple[Item, UStatus]](), list[tuple[Item, UStatus]]()
        held = list[Refused]()
        for item, status in settled.again:
            if not is_nobody_listening(status):
                again.append((item, status))
            elif self._log.durable and item[1].stamp.type == attrs.PUBLISH:
                held.append((item, status, "unheard"))
            else:
                self._peer.dropped["nobody_listens"] += 1
        for item, status in settled.refused:
            if status.code not in HELD_CODES:
                dead.append((item, status))
            elif self._log.durable:
                held.append((item, status, "refused"))
            elif status.code == UCode.RESOURCE_EXHAUSTED:
                again.append((item, status))
            else:
                dead.append((item, status))
        catch_up = self._catch_up
        if catch_up.trying:
            tried = {seq for seq, _ in catch_up.trying}
            for item in settled.sent:
                if item[0] in tried and (hold := catch_up.trial_of(item)) is not None and not hold.is_over:
                    catch_up.was_taken(hold, item)
            for item, _ in dead:
                catch_up.skip_trial(item)
        for item, status, kind in self._hold(held):
            if kind == "refused":
                dead.append((item, status))
            else:
                self._peer.dropped["nobody_listens"] += 1
        if self._held_lately:
            self._try_held_lately(settled.sent)
        return Settled(settled.sent, again, dead)

    def _hold_what_is_stuck(self, settled: Settled[Item]) -> Settled[Item]:
        """While something is read back, hold streams that fail although others get through, as if they were refused.
        The reading back can then end, and the positions of these streams are on disk."""
        is_stuck = {key_of(item[1]) for item, status in settled.again if status.message != NOT_TRIED}
        held, again = list[Refused](), list[tuple[Item, UStatus]]()
        for item, status in settled.again:
            if item[0] <= self._catch_up.until and key_of(item[1]) in is_stuck and self._log.durable:
                held.append((item, status, "refused"))
            else:
                again.append((item, status))
        again += [(item, status) for item, status, _ in self._hold(held)]
        return settled._replace(again=again)

    def _hold(self, held: Sequence[Refused]) -> list[Refused]:
        """Hold these, and behind them the messages in the outbox for their addresses. Returns those that can't be held
        because too many addresses are."""
        beyond = list[Refused]()
        if not held:
            return beyond
        streams, holds, first = set[int](), set[AddressHold](), dict[AddressHold, int]()
        merges = self._address_holds.merges
        for one in held:
            item, status, kind = one
            address, authority = self._peer.addressed(item[1])
            known = self._address_holds.of(address, authority)
            if known is not None and not known.is_waiting:
                streams |= known.streams
                if known.is_returning:
                    first[known] = self._plans.read
            was_tried, was_heard = self._catch_up.trial_of(item) is not None, item[2] in self._heard
            hold = self._address_holds.hold(
                address, authority, known, item, status, kind, was_heard=was_heard, was_tried=was_tried
            )
            if hold is None:
                beyond.append(one)
                continue
            streams.add(item[2])
            holds.add(hold)
        if merges != self._address_holds.merges:
            self._plans.by_stream.clear()
        for stream in streams:
            self._plans.by_stream.pop(stream, None)
        self._wait_behind(streams)
        if first:
            self._move_returning(first, [item for item, *_ in held])
        self._held_lately |= holds
        self._held_lately_until = self._sender.begun
        return beyond

    def _wait_behind(self, streams: Set[int]) -> None:
        """Move messages in the outbox whose address is now held into its hold."""
        for item in self._outbox.take_out(lambda item: item[2] in streams and self.hold_of(item) is not None):
            if (hold := self.hold_of(item)) is not None:
                self._address_holds.wait_behind(hold, item)

    def _move_returning(self, first: dict[AddressHold, int], held: Sequence[Item]) -> None:
        """Move holds that were refused again while they were read back. Everything before the first message that waits
        was taken; nothing after the position of the reading back was read."""
        for item in (*held, *self._sender.in_flight):
            hold = self._address_holds.of(*self._peer.addressed(item[1]))
            if hold in first:
                first[hold] = min(first[hold], item[0])
        for hold, seq in first.items():
            head = hold.head[0] if hold.head is not None else seq
            self._address_holds.move(hold, min(seq, head, self._catch_up.position + 1) - 1)

    def hold_of(self, item: Item) -> AddressHold | None:
        """Returns the hold in which this message must wait; None: it may leave."""
        if (item[0], item[1].stamp.address) in self._catch_up.trying:
            return None
        hold = self._address_holds.of(*self._peer.addressed(item[1]))
        return hold if hold is not None and hold.is_waiting else None

    def _try_held_lately(self, sent: Sequence[Item]) -> None:
        """Try new holds again if a message that left after theirs was taken: the network takes such messages now."""
        for item in sent:
            hold = self._address_holds.of(*self._peer.addressed(item[1]))
            if hold in self._held_lately and item[0] > hold.after:
                self._held_lately.discard(hold)
                self._address_holds.try_now(hold)
        if self._sender.ended >= self._held_lately_until:
            self._held_lately.clear()

    # Losses of the log

    def passed(self, passed: RetentionLoss, cursor: int) -> None:
        """Report records that retention deleted and this peer may lack: the first few as dead letters, and the rest as
        one range."""
        plans, catch_up = self._plans, self._catch_up
        items = chain.from_iterable(map(items_of, passed.chunks))
        lost = [item for item in items if self._still_wants(item[2], item[0])]
        reported = lost[: self.letters_left]
        self.letters_left -= len(reported)
        for item in reported:
            self._dead(item, UCode.RESOURCE_EXHAUSTED, "the log had to delete it before the peer was back")
        last = passed.before - 1
        seen = max((chunk.last_seq for chunk in passed.chunks), default=passed.after)
        if len(lost) > len(reported) or last > max(seen, plans.read):
            catch_up.reading.lost(max(passed.after, min(cursor, last)), passed.before)
        for stream, held in plans.topic_holds.items():
            if held.after < last:
                plans.topic_holds.move(stream, last)
        for hold in self._address_holds.values():
            self._address_holds.move(hold, last)
        catch_up.position = max(catch_up.position, min(last, catch_up.until))
        plans.read = max(plans.read, last)

    def _still_wants(self, stream: int, seq: int) -> bool:
        held, catch_up = self._plans.topic_holds.get(stream), self._catch_up
        if held is not None:
            return seq > (max(held.after, catch_up.position) if stream in catch_up.targets else held.after)
        for hold in self._plans.holds_of(stream):
            if seq > (max(hold.after, catch_up.position) if hold.is_returning else hold.after):
                return True
        if seq <= self._plans.read:
            return False  # it waits in memory, or has left
        targets, is_open = self._plans.wanted(stream)
        return is_open or any(seq > target.since for target in targets)

    def forget(self, streams: frozenset[int]) -> None:
        """Forget streams that the log has forgotten."""
        self._heard.difference_update(streams)
