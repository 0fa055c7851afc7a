"""Plans decide which records of a log go to one peer, as which copies, and which have to wait. They send and read
nothing.

    record -> its stream's plan -> nobody there wants it: skipped
              made once, until     its address is held: waits in the hold
              rules, interest,     nobody can say yet who wants it: the topic is held from here on
              pauses or holds      else: sent unchanged, or one copy per target and sample period
              change
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, cast

from history.log.log import Log
from history.records.chunk import Chunk, authority_of, is_publish
from streamer.egress.address_holds import AddressHold, AddressHolds
from streamer.egress.hold_state import RETURNING
from streamer.egress.topic_holds import TopicHold, TopicHolds
from streamer.walk.endpoint import Endpoint
from streamer.walk.sender import QueuedRecord
from streamer.walk.view import Decision, Target, View
from uprotocol import attributes as attrs
from uprotocol import cache as caches
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage, Readdressed
from uprotocol.v1.uri_pb2 import UUri


class Plan(NamedTuple):
    """How the records of one stream go to one peer."""

    targets: tuple[Target, ...]
    since: int  # no target wants a record up to this seq
    as_is: bool  # every message goes to all targets unchanged: the fast path
    copies: tuple[Readdressed, ...]  # one per target, with the streamer's sink; empty: one message for all targets
    whole: Readdressed | None  # removes the streamer's sink, which is no longer needed
    park: bool  # it is still undecided who else wants it
    held: tuple[tuple[AddressHold, int], ...] = ()  # the hold of each held target, and the seq that it begins after


SKIP: Final = Plan((), 0, False, (), None, False)


class Plans:
    """The plans of one peer for one log, by the log's id of the stream, and the holds that decide them."""

    def __init__(
        self, peer: Endpoint, source: Log, view: View, topic_holds: TopicHolds, address_holds: AddressHolds
    ) -> None:
        self.peer, self.log, self._view = peer, source, view
        self.topic_holds, self.address_holds = topic_holds, address_holds
        self._by_stream: dict[int, Plan] = {}
        self._origins: dict[int, str] = {}
        # by stream and authority: when the next message of a thinned topic is due, Unix milliseconds
        self.due_ms: dict[int, dict[str, int]] = {}
        self.read = 0  # the last seq that was planned
        self.pushed_to = 0  # up to here publishes are sent again; all other messages up to here have left
        self.is_followed = False  # the peer reads the publishes from our history (handover.py)
        self.lacks_capacity = False  # True if no more topics can be held

    def origin(self, stream_id: int) -> str:
        """Returns the name of the endpoint that the messages of this stream come from; "" if it is unknown."""
        found = self._origins.get(stream_id)
        if found is None:
            known = self.log.knows_stream(stream_id)
            authority = authority_of(self.log.stream(stream_id).source_bytes) if known else ""
            owner = self._view.endpoints.owner(authority)
            found = self._origins[stream_id] = "" if owner is None else owner.name
        return found

    def forget_all(self) -> None:
        """Make each plan again, since rules or endpoints may have changed."""
        self._by_stream.clear()
        self._origins.clear()

    def forget_plans(self, streams: Iterable[int] | None) -> None:
        """Make the plans of these streams again, since holds or interest have changed; None: all plans."""
        if streams is None:
            self._by_stream.clear()
        else:
            for stream in streams:
                self._by_stream.pop(stream, None)

    # Targets of a stream

    def wanted(self, stream_id: int) -> tuple[tuple[Target, ...], bool]:
        """Returns the known targets at the peer that want this stream, and whether more may become known."""
        if not self.log.knows_stream(stream_id):  # retention has deleted it since it was read
            return (), False
        stream = self.log.stream(stream_id)
        if self._view.comes_from(self.peer, stream.source) or (self.is_followed and is_publish(stream)):
            return (), False
        return self._of_peer(self._view.decide(stream.source, stream.sink, self.log))

    def wanted_if_not_paused(self, stream_id: int) -> tuple[tuple[Target, ...], bool]:
        stream = self.log.stream(stream_id)
        return self._of_peer(self._view.wanted(stream.source, stream.sink, self.log))

    def _of_peer(self, decision: Decision) -> tuple[tuple[Target, ...], bool]:
        leg = next((leg for leg in decision.legs if leg.peer is self.peer), None)
        return () if leg is None else leg.targets, self.peer in decision.open

    def missing(self, held: TopicHold, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        """Returns the targets that want the records of a hold and have not had them."""
        if held.whole and not self.peer.needs_sink:
            return ()
        served, read = held.served, self.read
        return tuple(target for target in targets if target.authority not in served and target.since < read)

    # Holds of a stream

    def hold_of(self, stream_id: int, target: Target) -> AddressHold | None:
        """Returns the hold of the address to which messages of this stream go for `target`."""
        stream = self.log.stream(stream_id)
        source, sink = stream.source, stream.sink
        if self.peer.needs_sink and sink is None:
            sink = attrs.streamer_sink(target.authority)
        elif sink is not None and attrs.is_streamer_sink(sink) and not self.peer.needs_sink:
            sink = None
        return self.address_holds.of(self.peer.address_of(source, sink), source.authority_name)

    def holds_of(self, stream_id: int) -> list[AddressHold]:
        """Returns the address holds of this stream, whether it is paused or not."""
        if not self.address_holds or not self.log.knows_stream(stream_id):
            return []
        targets, _ = self.wanted_if_not_paused(stream_id)
        return [hold for target in targets if (hold := self.hold_of(stream_id, target)) is not None]

    def undecided_after(self, stream_id: int) -> int | None:
        """Returns the position of the holds from before the start that may have records of this stream, although no
        target is known; None: there are none, or nobody wants it."""
        targets, is_open = self.wanted_if_not_paused(stream_id)
        if targets or not is_open:
            return None
        source = self.log.stream(stream_id).source
        sinks: list[UUri | None] = [None]
        if self.peer.needs_sink:
            sinks = [attrs.streamer_sink(one) for one in self.peer.authorities if not uris.is_pattern(one)]
        holds = [self.address_holds.of(self.peer.address_of(source, sink), source.authority_name) for sink in sinks]
        return min([hold.after for hold in holds if hold is not None and hold.is_loaded], default=None)

    def targets_of(self, hold: AddressHold, stream_id: int) -> tuple[Target, ...]:
        """Returns the targets that wait in `hold` for this stream, with the seq after which each waits."""
        targets, _ = self.wanted(stream_id)
        return tuple(
            target._replace(since=max(target.since, hold.after))
            for target in targets
            if self.hold_of(stream_id, target) is hold
        )

    # Plans

    def plan(self, stream_id: int) -> Plan:
        targets, is_open = self.wanted(stream_id)
        held = self.topic_holds.get(stream_id)
        if held is None and (due := self.due_ms.get(stream_id)):  # forget targets that no longer want it
            self.due_ms[stream_id] = {
                target.authority: due[target.authority] for target in targets if target.authority in due
            }
        if held is not None:
            targets = tuple(target for target in targets if target.authority in held.served)
        elif not self.peer.needs_sink and any(target.period_ms is None and not target.since for target in targets):
            is_open = False  # the peer's network gets each message anyway
        return self.plan_for(stream_id, targets, park=is_open and held is None)

    def plan_for(self, stream_id: int, targets: tuple[Target, ...], *, park: bool = False) -> Plan:
        """Returns the plan for these targets; those whose address is held wait."""
        held: dict[AddressHold, int] = {}
        if self.address_holds and targets:
            going = list[Target]()
            for target in targets:
                hold = self.hold_of(stream_id, target)
                if hold is None or hold.progress.state is RETURNING:
                    going.append(target)
                else:
                    hold.streams.add(stream_id)
                    held[hold] = min(target.since, held.get(hold, target.since))
            targets = tuple(going)
        return self.unheld_plan(stream_id, targets, park=park, held=tuple(held.items()))

    def unheld_plan(
        self,
        stream_id: int,
        targets: tuple[Target, ...],
        *,
        park: bool = False,
        held: tuple[tuple[AddressHold, int], ...] = (),
    ) -> Plan:
        """Returns the plan for these targets, even if their address is held."""
        if not targets:
            return SKIP._replace(park=park, held=held) if park or held else SKIP
        stream = self.log.stream(stream_id)
        copies: tuple[Readdressed, ...] = ()
        whole = None
        if self.peer.needs_sink and stream.sink is None:
            copies = tuple(Readdressed(stream.source, attrs.streamer_sink(target.authority)) for target in targets)
        elif stream.sink is not None and attrs.is_streamer_sink(stream.sink) and not self.peer.needs_sink:
            whole = Readdressed(stream.source, None)
        thinned = all(target.period_ms for target in targets)
        since = min(target.since for target in targets)
        if not is_publish(stream):
            since = max(since, self.pushed_to)
        as_is = not (copies or whole or thinned or park or held)
        return Plan(targets, since, as_is, copies, whole, park, held)

    # Messages

    def messages_of(self, chunk: Chunk) -> list[QueuedRecord] | None:
        """Returns the messages to send for the new records in `chunk`, and holds undecided topics from here on. None:
        too many topics would have to be held."""
        by_stream = self._by_stream
        if len(by_stream) > caches.streams_max:
            self.forget_all()  # before those of this chunk are made, since all of them are needed at once
        for stream in chunk.stream_set.difference(by_stream):
            by_stream[stream] = self.plan(stream)
        wanted = [plan for stream in chunk.stream_set if (plan := by_stream[stream]) is not SKIP]
        parks = sum([plan.park for plan in wanted])
        self.lacks_capacity = bool(parks) and parks > self.topic_holds.free_capacity
        if self.lacks_capacity:
            return None
        fresh = chunk.after(self.read)
        items = list[QueuedRecord]()
        if len(wanted) == len(chunk.stream_set) and all(plan.as_is and plan.since < fresh.first_seq for plan in wanted):
            items = list(zip(fresh.seqs, cast(Sequence[EncodedMessage], fresh.messages), fresh.streams, strict=True))
        elif wanted:
            items = [copy for item in items_of(fresh) for copy in self.messages_for(item)]
        self.read = chunk.last_seq
        return items

    def messages_for(self, item: QueuedRecord) -> list[QueuedRecord]:
        """Returns the messages to send for `item` by its stream's plan; first holds its topic if it is undecided."""
        seq, _, stream = item
        plan = self._by_stream[stream]
        if plan.park:
            self.topic_holds.park(stream, seq - 1, plan.targets)
            plan = self._by_stream[stream] = self.plan(stream)
        self.count_held(plan, seq, stream)
        if seq <= plan.since or not plan.targets:
            return []
        return [item] if plan.as_is else self.copies(plan, item)

    def count_held(self, plan: Plan, seq: int, stream: int) -> None:
        """Count the record `seq` of `stream` in the holds of its plan, where it waits."""
        for hold, since in plan.held:
            if seq > since:
                self.address_holds.passed(hold, seq, stream)

    def copies(self, plan: Plan, item: QueuedRecord) -> list[QueuedRecord]:
        """Returns the message as the peer gets it, once or once per authority, thinned by the sample periods."""
        seq, message, stream = item
        created = message.created_ms
        due = [
            index
            for index, target in enumerate(plan.targets)
            if seq > target.since and self._is_due(stream, target, created)
        ]
        if plan.copies:
            return [(seq, plan.copies[index].of(message), stream) for index in due]
        return [(seq, message if plan.whole is None else plan.whole.of(message), stream)] if due else []

    def _is_due(self, stream: int, target: Target, created_ms: int) -> bool:
        """Returns whether a target gets this message: at most one per sample_period, by the publisher's clock."""
        if target.period_ms is None:
            return True
        due = self.due_ms.setdefault(stream, {})
        # a due time further ahead than one period shows that the publisher's clock jumped back: begin again
        if 0 < due.get(target.authority, 0) - created_ms <= target.period_ms:
            return False
        due[target.authority] = created_ms + target.period_ms
        return True

    def forget(self, streams: frozenset[int]) -> None:
        """Forget streams that the log has forgotten."""
        for stream in streams.intersection(self._by_stream):
            del self._by_stream[stream]
        for stream in streams.intersection(self.due_ms):
            del self.due_ms[stream]
        for stream in streams.intersection(self._origins):
            del self._origins[stream]


def items_of(chunk: Chunk) -> Iterator[QueuedRecord]:
    """Yields the records of a chunk as items. All are EncodedMessages, both from the ingress and from disk."""
    return zip(chunk.seqs, cast(Sequence[EncodedMessage], chunk.messages), chunk.streams, strict=True)
