"""Patches that bring back faults that were fixed: the proof that the simulation would
find them again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Break:
    what: str
    # module, attribute, replacement; imported only if the break is applied
    patches: Callable[[], list[tuple[Any, str, Any]]]
    needs: str = ""  # the name in plan.py of a fault that must happen
    kinds: tuple[str, ...] = ("chain", "foreign", "static")  # of worlds to search

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        patches = self.patches()
        before = [(target, name, getattr(target, name)) for target, name, _ in patches]
        for target, name, value in patches:
            setattr(target, name, value)
        try:
            yield
        finally:
            for target, name, value in before:
                setattr(target, name, value)


Patches = list[tuple[Any, str, Any]]


def _restart_that_records() -> Patches:
    from usubscription_client.interest import InterestSource

    # so what is known counts from the newest seq, independent of when it became known
    return [(InterestSource, "decided", lambda self, topic: True)]


def _renamed_endpoint() -> Patches:
    from streamer.egress.claims import Claims

    def load(self: Claims) -> None:
        known = {pump.waits.owned.name for pump in self._pumps}
        for one in self._logs:
            for name in list(one.cursors.all()):
                if name.startswith("egress:") and name not in known:
                    one.cursors.drop(name)

    return [(Claims, "load", load)]


def _retention_by_age() -> Patches:
    from history.log.cursors import Cursors
    from history.records.chunk import NOBODY

    def keep_after(self: Cursors) -> int:
        now, rows = self._now_ms(), self.all().values()
        leased = (row.seq for row in rows if row.lease_until_ms is not None and row.lease_until_ms >= now)
        return min(leased, default=NOBODY)

    return [(Cursors, "keep_after", keep_after), (Cursors, "owed_after", lambda self: NOBODY)]


def _passing_shortage() -> Patches:
    from uprotocol.status import RETRYABLE
    from uprotocol.v1.ucode_pb2 import UCode
    from usubscription import remote

    return [(remote, "FINAL", frozenset(code for code in UCode.values() if code not in RETRYABLE))]


def _silent_service() -> Patches:
    from streamer.egress.plans import Plans

    plan = Plans.plan

    def passed_over(self: Plans, stream_id: int) -> Any:
        return plan(self, stream_id)._replace(park=False)

    return [(Plans, "plan", passed_over)]


def _order_of_commands() -> Patches:
    from usubscription.service import CommandEntry

    take = CommandEntry.on_receive_batch

    def by_method(self: CommandEntry, messages: Any) -> None:
        for method in (1, 2):
            take(self, [message for message in messages if message.attributes.sink.resource_id == method])

    return [(CommandEntry, "on_receive_batch", by_method)]


def _held_back() -> Patches:
    from streamer.egress.topic_holds import TopicHolds

    def hold(self: TopicHolds, stream: int, after: int) -> None:
        self.park(stream, self._log.newest_seq, ())

    return [(TopicHolds, "hold", hold)]


def _holds_forgotten() -> Patches:
    from streamer.egress.address_holds import AddressHolds

    return [(AddressHolds, "load", lambda self: None)]


def _taken_from_here_on() -> Patches:
    from streamer.egress.address_holds import AddressHold, AddressHolds

    def taken(self: AddressHolds, hold: AddressHold) -> None:
        before(self, hold)
        self.move(hold, self._log.newest_seq)

    before = AddressHolds.taken
    return [(AddressHolds, "taken", taken)]


def _held_not_handed_over() -> Patches:
    from streamer.following import handover

    return [(handover, "_held_topics", lambda pump: [])]


def _place_ahead() -> Patches:
    from streamer.following.followed import Followed, Pending

    store = Followed._store

    async def place_first(self: Followed, pending: Pending) -> None:
        self._log.followed.keep(self.key, self._stored(pending.reader_state))
        await self._log.saved()
        await store(self, pending)

    return [(Followed, "_store", place_first)]


def _frames_with_holes() -> Patches:
    from history.reading import following as follow

    return [(follow, "follows", lambda begin, positions: True)]


def _new_log_from_its_end() -> Patches:
    from streamer.following import followed
    from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest

    return [(followed, "PollRequest", lambda **_: PollRequest(latest=True))]


def _copies_before_a_place() -> Patches:
    from streamer.following.sorting import Doorbell

    return [(Doorbell, "_is_copy", lambda self, message: True)]


def _handed_over_where_it_was_read() -> Patches:
    from streamer.egress.backlog import Backlog

    hand_over = Backlog.hand_over

    def hand_over_here(self: Backlog) -> int:
        hand_over(self)
        return self._log.newest_seq

    return [(Backlog, "hand_over", hand_over_here)]


def _pushed_again_from_the_end() -> Patches:
    from streamer.egress.backlog import Backlog

    take_back = Backlog.take_back
    return [(Backlog, "take_back", lambda self, seq, had: take_back(self, self._log.newest_seq, had))]


def _never_pushed_again() -> Patches:
    from streamer.following.follows import Follows

    async def end(self: Follows, *_: Any) -> None:
        pass

    return [(Follows, "_end", end)]


def _a_follower_holds_nothing() -> Patches:
    from streamer.egress.rows import row
    from streamer.following.handover import HandOvers

    def hold(self: HandOvers, name: str, source: Any, seq: int) -> None:
        source.cursors.set(row("followed", name), seq, holds=False, absent_ms=0)

    return [(HandOvers, "_hold", hold)]


def _end_reported_too_early() -> Patches:
    from history.service import keeper

    insert = keeper._insert

    def before_the_last(append: Any, stream: int, message: Any, *, is_ahead: bool) -> None:
        insert(append, stream, message, is_ahead=is_ahead)
        if not is_ahead:
            for column in (append.streams, append.messages, append.epochs):
                column[-2:] = reversed(column[-2:])

    return [(keeper, "_insert", before_the_last)]


def _no_filter() -> Patches:
    from history.epochs.assembling import Assembler
    from history.epochs.frontier import NOTHING

    begin = Assembler.begin

    def begin_with_all(self: Assembler, snapshot: Any, now: float) -> None:
        begin(self, snapshot, now)
        for group in self._groups.values():
            group.filter = NOTHING

    return [(Assembler, "begin", begin_with_all)]


def _handed_lost() -> Patches:
    from history.epochs.assembling import Assembler

    restore = Assembler.restore

    def forget(self: Assembler, saved: Any) -> None:
        restore(self, {"groups": [one | {"delivered": []} for one in saved["groups"]]})

    return [(Assembler, "restore", forget)]


def _closed_at_once() -> Patches:
    from history.epochs.groups import UNCLOSED, OpenEpoch

    return [(OpenEpoch, "missing", lambda self: "" if self.is_closing else UNCLOSED)]


def _missed_untold() -> Patches:
    from history.epochs.groups import Buckets

    def keep_quiet(self: Buckets, *_: Any) -> None:
        pass

    return [(Buckets, "away", keep_quiet), (Buckets, "back", keep_quiet)]


def _quiet_holds_nothing() -> Patches:
    from history.epochs.groups import Buckets

    tick, back = Buckets.tick, Buckets.back

    def start(self: Buckets, now_ms: int, now: float) -> None:
        self._now_ms = now_ms

    def release_all(self: Buckets, now_ms: int, now: float) -> None:
        if self.frontier.held:
            tick(self, now_ms, now)
            if not self.frontier.seen:
                self._release(*self.frontier.lower)
                self._idle_at = self._clock_at = None

    def hold_and_report(self: Buckets, cause: str, now_ms: int) -> None:
        if not self.frontier.held:
            self._hold(self._bucket(now_ms - self.group.timeout_ms))
        back(self, cause, now_ms)

    return [(Buckets, "start", start), (Buckets, "tick", release_all), (Buckets, "back", hold_and_report)]


def _joins_anywhere() -> Patches:
    from history.epochs import merging
    from history.epochs.merging import GroupState

    passed_unread = merging.passed_unread

    def of_one_keeper(report: Any, length: int, *, others: bool = False) -> Any:
        return passed_unread(report, length)

    return [
        (GroupState, "joined", lambda self, keeper, time: False),
        (merging, "passed_unread", of_one_keeper),
    ]


def _late_untold() -> Patches:
    from history.epochs.groups import Buckets

    def settle(self: Buckets, now_ms: int, now: float) -> None:
        self._quiet_since = now
        self._advance(self._bucket(self._newest_ms - self.group.lateness_ms))
        self._plan(now_ms, now)

    return [(Buckets, "settle", settle), (Buckets, "_note_stranger", lambda self, *_: None)]


def _begun_untold() -> Patches:
    from streamer.following.followed import Followed

    def keep_quiet(self: Followed) -> None:
        self._begun.clear()

    return [(Followed, "_report_begun", keep_quiet)]


def _wait_without_limit() -> Patches:
    from streamer.walk.endpoint import Sends

    return [(Sends, "_look", lambda self: None)]


def _failure_heard_late() -> Patches:
    from streamer.walk.flow import Appender

    return [(Appender, "_is_failing", lambda self, offered: False)]


def _nothing_missed() -> Patches:
    from streamer.recovery.gates import Gate

    return [(Gate, "doubt", lambda self, cause: None)]


def _gaps_untold() -> Patches:
    from streamer.recovery.gates import Gate

    return [(Gate, "_report", lambda self, *_: None)]


def _removed_too_early() -> Patches:
    from streamer.operating.resending import Resender

    send = Resender._try

    async def remove_and_send(self: Resender, peer: Any, part: Any, *others: Any) -> Any:
        await self._settle([way.letter.number for way in part], [])
        return await send(self, peer, part, *others)

    return [(Resender, "_try", remove_and_send)]


def _quota_at_all_times() -> Patches:
    from streamer.walk.ledger import Pressure

    return [(Pressure, "is_on", lambda self, now: True)]


def _dropped_and_not_counted() -> Patches:
    from streamer.walk.ledger import AuthorityLedger

    return [(AuthorityLedger, "drop", lambda self, account, messages=1: None)]


def _senders_are_not_held() -> Patches:
    from streamer.walk.flow import Flow

    append = Flow.append

    def append_or_drop(self: Flow, records: int, offer: Any) -> Any:
        if not self._queue and self.is_open:
            return append(self, records, offer)
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(0)
        return answer

    return [(Flow, "append", append_or_drop)]


def _network_loss_untold() -> Patches:
    from streamer.operating.states import LossReports

    return [(LossReports, "network_lost", lambda self, endpoint, what, messages: None)]


def _unserved_unnoted() -> Patches:
    from streamer.walk.without_rule import WithoutRule

    return [(WithoutRule, "_has_changed", lambda self, topics=None: None)]


def _new_store_ignored() -> Patches:
    from usubscription.audit import Auditor

    return [(Auditor, "has_other_store", lambda self, authority, major: None)]


def _all_was_pushed() -> Patches:
    from streamer.following.pushed import PushedBefore

    async def had(self: PushedBefore, sorted: Any) -> frozenset[Any]:
        return frozenset((one.stream, one.message.id_bytes) for one in sorted)

    return [(PushedBefore, "had", had)]


def _adopted_as_if_pushed() -> Patches:
    from streamer.commands import cursors
    from streamer.following.followed import Followed
    from uprotocol.core.ustreamer.v1.ustreamer_pb2 import HandOver

    take, adopt, adopted = Followed._take_over, cursors._adopt, set[str]()

    async def adopt_and_forget(path: Any, old: str, new: str, **options: Any) -> Any:
        found = await adopt(path, old, new, **options)
        adopted.add(str(path.parent.parent))
        return found

    async def take_over(self: Followed, following: Any, reader_state: Any) -> None:
        await take(self, following, reader_state)
        if any(str(self._log._storage._store.path).startswith(one) for one in adopted):  # type: ignore[union-attr]
            for position in await following.commands.hand_over(HandOver(take=True, takes_held=True)):
                known = reader_state.positions.get(position.incarnation, 0)
                reader_state.positions[position.incarnation] = max(known, position.seq)

    return [(cursors, "_adopt", adopt_and_forget), (Followed, "_take_over", take_over)]


def _emptied_and_not_asked() -> Patches:
    from streamer.following import handover

    return [(handover, "_rows_of", lambda source, whose: {})]


LOADED: Final = ("load", "static", "chain", "foreign")
FOLLOWED: Final = ("follow", "keeper")
IN_EPOCHS: Final = ("epochs", "static")

BREAKS: Final[dict[str, Break]] = {
    "new store ignored": Break(
        "a service that is asked by one with a new store waits for its next audit",
        _new_store_ignored,
        "emptied",
        ("chain",),
    ),
    "restart that records": Break(
        "messages that arrived during an outage of a recording gateway count as older than the subscriptions",
        _restart_that_records,
    ),
    "renamed endpoint": Break("the cursor of an endpoint that is not configured is dropped", _renamed_endpoint),
    "retention by age": Break(
        "retention by age deletes records that an endpoint has not had, without a report", _retention_by_age
    ),
    "passing shortage": Break(
        "any error of a remote service except UNAVAILABLE and DEADLINE_EXCEEDED ends a subscription",
        _passing_shortage,
        "shortage",
    ),
    "silent service": Break("a topic is skipped while a foreign service does not answer about it", _silent_service),
    "order of commands": Break(
        "each method has a queue of its own, so an Unsubscribe overtakes an earlier Subscribe",
        _order_of_commands,
        "hurry",
    ),
    "quota at all times": Break(
        "an authority is limited to its quota though the gateway is not overloaded", _quota_at_all_times, kinds=LOADED
    ),
    "dropped and not counted": Break(
        "messages beyond a quota are dropped, and no counter shows them", _dropped_and_not_counted, kinds=LOADED
    ),
    "senders are not held": Break(
        "what comes while no peer keeps up is acknowledged and dropped",
        _senders_are_not_held,
        kinds=LOADED,
    ),
    "network loss untold": Break(
        "what a network has taken and then lost is not reported", _network_loss_untold, "forget"
    ),
    "unserved and not noted": Break(
        "subscriptions are compared with the rules at the start only, not when either changes", _unserved_unnoted
    ),
    "removed too early": Break(
        "a dead letter leaves the store before the network has taken it again", _removed_too_early
    ),
    "hang": Break(
        "the wait for a transport that does not return from sending has no limit", _wait_without_limit, "hang"
    ),
    "failure heard late": Break(
        "new messages are appended between a failed transaction and its repetition",
        _failure_heard_late,
    ),
    "held back at a pause": Break(
        "records that were read ahead for a peer are lost when their topic is paused", _held_back, "pause"
    ),
    "holds forgotten": Break(
        "refused records wait only in memory, and are lost at a restart", _holds_forgotten, "access_rule"
    ),
    "taken from here on": Break(
        "an address that accepts messages again gets new ones, not those that have waited",
        _taken_from_here_on,
        "access_rule",
    ),
    "held and not handed over": Break(
        "records held when a follower took over are neither pushed nor followed",
        _held_not_handed_over,
        "access_rule",
        FOLLOWED,
    ),
    "place ahead of its records": Break(
        "the position in a followed log is on disk before the followed records", _place_ahead, kinds=FOLLOWED
    ),
    "frames with holes": Break(
        "a frame is accepted though an earlier one was lost", _frames_with_holes, kinds=FOLLOWED
    ),
    "new log from its end": Break(
        "a new log of a followed history is read from its end, not from its begin",
        _new_log_from_its_end,
        kinds=FOLLOWED,
    ),
    "copies before a place": Break(
        "plain messages are not stored though their originals are not followed yet",
        _copies_before_a_place,
        kinds=FOLLOWED,
    ),
    "handed over where it was read": Break(
        "following begins at the newest record, though earlier ones were not sent",
        _handed_over_where_it_was_read,
        kinds=FOLLOWED,
    ),
    "pushed again from the end": Break(
        "after the end of following only new records are pushed, not those that were not followed",
        _pushed_again_from_the_end,
        kinds=FOLLOWED,
    ),
    "never pushed again": Break(
        "a gateway that follows no more does not report that", _never_pushed_again, kinds=FOLLOWED
    ),
    "a follower holds nothing": Break(
        "retention by age deletes records that a follower has not had", _a_follower_holds_nothing, kinds=FOLLOWED
    ),
    "all between was pushed": Break(
        "a follower that takes over goes on where pushing ended, as if the network had got everything up to there",
        _all_was_pushed,
        kinds=FOLLOWED,
    ),
    "adopted as if pushed": Break(
        "what a follower has not had under its endpoint's former name is adopted, and never sent",
        _adopted_as_if_pushed,
        "another_name",
        FOLLOWED,
    ),
    "emptied and not asked": Break(
        "a follower with an emptied log goes on at what the earlier one had acknowledged, without a report",
        _emptied_and_not_asked,
        "emptied",
        FOLLOWED,
    ),
    "end of an epoch ahead": Break(
        "the end of an epoch is published before its last record", _end_reported_too_early, kinds=IN_EPOCHS
    ),
    "begun in the middle": Break(
        "a hole before the first followed record is not reported",
        _begun_untold,
        kinds=("epochs", *FOLLOWED),
    ),
    "missed buckets untold": Break(
        "buckets in which the gateway did not run are whole, or unknown", _missed_untold, kinds=IN_EPOCHS
    ),
    "a quiet group holds nothing": Break(
        "epochs are over though a gateway in which nothing comes may still bring records of them",
        _quiet_holds_nothing,
        kinds=("epochs", *FOLLOWED),
    ),
    "joins anywhere": Break(
        "a gateway that is followed later brings the rest of epochs that were whole",
        _joins_anywhere,
        kinds=("epochs", *FOLLOWED),
    ),
    "late and whole": Break(
        "a publisher whose clock is ahead makes others late, and their epochs are whole",
        _late_untold,
        kinds=IN_EPOCHS,
    ),
    "no filter": Break("a new reader gets the rest of a begun epoch as a whole one", _no_filter, kinds=IN_EPOCHS),
    "handed over again": Break(
        "a reader's cursor loses the epochs that were delivered beyond it", _handed_lost, kinds=IN_EPOCHS
    ),
    "nothing missed": Break(
        "a source is not asked about what was published while its network was away",
        _nothing_missed,
        kinds=("recovery",),
    ),
    "recovery gaps untold": Break(
        "what a source has not brought in time is missing without a report", _gaps_untold, kinds=("recovery",)
    ),
    "closed at once": Break(
        "an epoch ends when its publisher announces it, before its last records", _closed_at_once, kinds=IN_EPOCHS
    ),
}
