"""Who keeps the epochs of groups of topics, in the logs of one process: how far they have come is in the log itself.

append -> mark: whose topics? -> assign -> frontier (what it opens), the messages with their epochs, frontier (what it
                                           ends): one append, so it is stored whole or not at all
Progress -> change -> frontier -> answered when it is stored            a timer -> tick -> frontier

A frontier is a record like any other: retention, following, push and poll, gaps and restarts treat it as one. What it
says holds where it stands in the log; each names all groups, so the newest one up to a place is a snapshot. A
group that has records in several logs is told in each of them: an epoch is over when it is in all.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog
from google.protobuf.message import DecodeError

from history.epochs.frontier import ACTIVE_MAX, Epoch, Time
from history.epochs.groups import ENDED, REFUSED, Arrived, Buckets, Group, Kept, Progress, Publisher, time_of
from history.file.writer import Append
from history.log.log import Log
from history.records.stream import is_publish
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Frontier, GroupFrontier, ProgressRequest, ProgressResponse
from uprotocol.encoded import Carried, EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

GROUPS_MAX: Final = 16  # each frontier names them all
AGAIN_S: Final = 1.0  # after a log has refused a frontier

log = structlog.get_logger()


@dataclass(eq=False)
class _InLog:
    """What is known of one log."""

    plain: set[int] = field(default_factory=set)  # streams of no group
    of: dict[int, tuple[Kept, Publisher, bytes]] = field(default_factory=dict)  # streams of a group: who, which topic
    numbers: Counter[str] = field(default_factory=Counter)  # frontiers so far, by group; 0: it has nothing here
    # by group: what was opened and ended with frontiers that failed; and what ended before it could be told at all
    unsaid: dict[str, GroupFrontier] = field(default_factory=dict)
    unheard: dict[str, dict[Time, None]] = field(default_factory=dict)
    stream: int = 0  # of the frontiers
    told_after: int = 0  # the newest frontier has a greater seq


class Keeper:
    """Of `groups`, in `logs`: the first one tells of every group, the others of those that have records there.

    `topic`: where frontiers are published. Times are `now_ms`, Unix milliseconds, and of the running loop.
    """

    def __init__(self, topic: UUri, groups: Iterable[Group], logs: Sequence[Log], now_ms: Callable[[], int]) -> None:
        self.topic, self._logs, self._now_ms = topic, list(logs), now_ms
        self._loop = asyncio.get_running_loop()
        self._kept: dict[str, Kept] = {}
        for group in groups:
            kept = Progress(group, self._places) if group.width_ms is None else Buckets(group)
            assert self._kept.setdefault(group.name, kept) is kept, "names of groups are given once"
        assert len(self._kept) <= GROUPS_MAX, "each frontier names them all"
        self._in = {one: _InLog() for one in logs}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"Keeper({list(self._kept.values())})"

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._kept.values())

    async def open(self) -> None:
        """Go on where the newest frontiers say. Before anything is appended. Raises FAILED_PRECONDITION if one of
        these groups was kept in another way."""
        for one, state in self._in.items():
            newest = await self._newest(one)
            for told in newest.groups if newest is not None else ():
                state.numbers[told.group] = told.number
                kept = self._kept.get(told.group)
                if one is self._logs[0] and kept is not None and told.kept.kind:
                    kept.resume(told, self._loop.time())
            await self._end_others(one, newest)
        for kept in self._kept.values():
            # beyond what it was, if it was kept before and that is not known any more: nothing changes every
            # millisecond for years
            kept.version = kept.version or self._now_ms()
            if isinstance(kept, Progress) and kept.publishers:
                await self._count_again(kept)
        if self._kept:
            for one, state in self._in.items():
                state.stream = one.stream_id(self.topic, wanted=True)
                state.plain.add(state.stream)
                one.keep_epochs(self)
                one.keep_streams(lambda state=state: (state.stream,))  # type: ignore[misc]
                one.on_forgotten(lambda gone, one=one: self._forgotten(one, gone))  # type: ignore[misc]
            self._look()

    def close(self) -> None:
        """Before the logs are. May be called twice."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    # -- after a restart

    async def _newest(self, one: Log) -> Frontier | None:
        stream = one.known_id(self.topic)
        seq = one.stream(stream).newest_seq if stream is not None else 0
        for chunk in await one.read(seq - 1, until=seq, streams={stream}) if stream is not None and seq else ():
            try:
                return Frontier.FromString(chunk.messages[-1].payload)
            except DecodeError:
                break
        if seq:
            # it is damaged, or retention has it: what was open is not known, and its readers must not believe that
            # nothing was
            log.warning("how far the epochs had come is lost: they begin anew", log=one.name)
            self._in[one].numbers.update(dict.fromkeys(self._kept, 1))
        return None

    async def _end_others(self, one: Log, newest: Frontier | None) -> None:
        """Groups that are not configured any more: their readers must not wait."""
        over = Frontier()
        for told in newest.groups if newest is not None else ():
            if told.group not in self._kept and (told.lower or told.active):
                ended = over.groups.add(group=told.group, number=told.number + 1, version=told.version + 1)
                ended.logs.append(one.incarnation)
                ended.ended.extend(GroupFrontier.Ended(time=time, incomplete=ENDED) for time in told.active)
                ended.updates.extend(GroupFrontier.Update(time=time, change=-1) for time in told.lower)
        if over.groups:
            await one.append([one.stream_id(self.topic, wanted=True)], [self._message(over)])

    async def _count_again(self, kept: Progress) -> None:
        """What has come of the epochs that are open."""
        for one in self._logs:
            held = (held for all in kept.publishers.values() for held in all.values())
            place = min((held.after.get(one.incarnation, one.newest_seq) for held in held), default=one.newest_seq)
            streams = {stream.id: stream for stream in one.streams() if kept.group.has(stream.source)}
            while place < one.newest_seq:
                chunks = await one.read(place, streams=streams.keys())
                for chunk in chunks:
                    for id, epoch, message in zip(chunk.streams, chunk.epochs or (), chunk.messages, strict=False):
                        if epoch is not None and epoch.group == kept.group.name:
                            source = streams[id].source
                            whose = (source.authority_name, source.ue_id)
                            kept.had(whose, streams[id].source_bytes, _id(message), epoch.time)
                place = chunks[-1].last_seq if chunks else one.newest_seq
        kept.settle(self._loop.time())

    # -- appends

    def mark(self, one: Log, append: Append) -> None:
        state = self._in[one]
        if state.plain.issuperset(append.streams):
            return
        shares: dict[Kept, list[int]] = {}
        epochs: list[Epoch | None] = append.epochs or [None] * len(append.streams)
        for place, id in enumerate(append.streams):
            if id in state.plain or epochs[place] is not None:
                continue
            known = state.of.get(id) or self._learn(one, id)
            if known is not None:
                shares.setdefault(known[0], []).append(place)
        if not shares:
            return
        now_ms, now = self._now_ms(), self._loop.time()
        for kept, places in shares.items():
            records = [Arrived(*state.of[append.streams[place]][1:], append.messages[place]) for place in places]
            for place, epoch in zip(places, kept.assign(records, now_ms, now), strict=True):
                epochs[place] = epoch
            self._involve(one, kept)
        if one.floor_seq > state.told_after:  # so that a restart finds it, whatever retention takes
            state.unsaid.update({name: GroupFrontier(group=name) for name in self._kept if name not in state.unsaid})
        append.epochs = epochs
        self._tell(one, append, is_ahead=True)
        for kept in shares:
            kept.settle(now)
        self._tell(one, append, is_ahead=False)
        self._schedule()

    def _learn(self, one: Log, id: int) -> tuple[Kept, Publisher, bytes] | None:
        """Which group a stream is of: the first one that has it."""
        stream, state = one.stream(id), self._in[one]
        source = stream.source
        if is_publish(stream):
            for kept in self._kept.values():
                if kept.group.has(source):
                    found = (kept, (source.authority_name, source.ue_id), stream.source_bytes)
                    state.of[id] = found
                    return found
        state.plain.add(id)
        return None

    def _involve(self, one: Log, kept: Kept) -> None:
        """From now on it is told there, and everywhere else that it is."""
        name = kept.group.name
        if name not in self._in[one].numbers:
            self._in[one].numbers[name] = 0
            for other in self._logs_of(name):
                self._in[other].unsaid.setdefault(name, GroupFrontier(group=name))

    def _logs_of(self, name: str) -> list[Log]:
        return [one for one in self._logs if one is self._logs[0] or name in self._in[one].numbers]

    def _places(self) -> dict[bytes, int]:
        return {one.incarnation: one.newest_seq for one in self._logs}

    def _forgotten(self, one: Log, gone: frozenset[int]) -> None:
        state = self._in[one]
        state.plain -= gone
        for id in gone & state.of.keys():
            del state.of[id]

    # -- telling

    def _tell(
        self, here: Log | None = None, append: Append | None = None, *, is_ahead: bool = False
    ) -> list[asyncio.Future[int]]:
        """What is new, in each log that it concerns: `here` with what is being appended."""
        news = {name: kept.tell() for name, kept in self._kept.items() if kept.has_news}
        concerned = [
            one for one, state in self._in.items() if state.unsaid or any(one in self._logs_of(name) for name in news)
        ]
        waiting: list[asyncio.Future[int]] = []
        for one in concerned:
            state, message = self._in[one], self._message(self._frontier(one, news))
            state.told_after = one.newest_seq
            if one is here and append is not None:
                _insert(append, state.stream, message, is_ahead=is_ahead)
                continue
            done = one.append([state.stream], [message])
            if done.done() and done.exception() is not None:  # it was refused before it was tried
                self._say_again(one, [message])
            done.add_done_callback(_heard)
            waiting.append(done)
        return waiting

    def _frontier(self, one: Log, news: dict[str, GroupFrontier]) -> Frontier:
        state, frontier = self._in[one], Frontier()
        for name, kept in self._kept.items():
            if one not in self._logs_of(name):
                continue
            told = frontier.groups.add()
            told.CopyFrom(news[name] if name in news else kept.retell())
            if (unsaid := state.unsaid.pop(name, None)) is not None:
                _say(told, unsaid, state.unheard.setdefault(name, {}))
            state.numbers[name] += 1
            told.number = state.numbers[name]
            told.logs.extend(log.incarnation for log in self._logs_of(name))
        return frontier

    def _message(self, told: Frontier) -> EncodedMessage:
        return EncodedMessage.of(UMessageBuilder.publish(self.topic).with_id(uuids.new()).pack(told))

    def failed(self, one: Log, appends: Sequence[Append]) -> None:
        """What was told with them is told again, and what they counted does not count."""
        state = self._in[one]
        for append in appends:
            for id, epoch in zip(append.streams, append.epochs or (), strict=False):
                known = state.of.get(id)
                if epoch is not None and known is not None and known[0].group.name == epoch.group:
                    known[0].refused(*known[1:], epoch.time)
        pairs = [pair for append in appends for pair in zip(append.streams, append.messages, strict=True)]
        self._say_again(one, [message for id, message in pairs if id == state.stream])

    def _say_again(self, one: Log, messages: Iterable[Carried]) -> None:
        state = self._in[one]
        for message in messages:
            for told in Frontier.FromString(message.payload).groups:
                unsaid = state.unsaid.setdefault(told.group, GroupFrontier(group=told.group))
                unsaid.opened.extend(told.opened)
                kept = self._kept.get(told.group)
                for ended in told.ended:
                    if kept is not None and time_of(ended.time) in kept.spoiled:
                        ended.incomplete = ended.incomplete or REFUSED
                    unsaid.ended.append(ended)
        if state.unsaid:
            self._schedule(AGAIN_S)

    # -- time

    def _schedule(self, after_s: float | None = None) -> None:
        due = [kept.due for kept in self._kept.values()]
        at = min((one for one in due if one is not None), default=None)
        if after_s is not None:
            at = self._loop.time() + after_s
        if at is None or self._closed:
            return
        if self._timer is not None:
            if self._timer.when() <= at and not self._timer.cancelled():
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._closed:
            return
        now = self._loop.time()
        for kept in self._kept.values():
            kept.tick(now)
        self._tell()
        self._schedule(AGAIN_S if any(state.unsaid for state in self._in.values()) else None)

    # -- Progress

    async def progress(self, caller: UUri, asked: ProgressRequest) -> ProgressResponse:
        """Of a publisher. Raises NOT_FOUND, FAILED_PRECONDITION, PERMISSION_DENIED, INVALID_ARGUMENT,
        RESOURCE_EXHAUSTED, or what the log answers; of the latter what was asked for is done as soon as it can be."""
        kept = self._kept.get(asked.group)
        if kept is None:
            names = ", ".join(sorted(self._kept)) or "none"
            raise UStatusError(UCode.NOT_FOUND, f"no group {asked.group!r} has epochs here; there are: {names}")
        if not isinstance(kept, Progress):
            what = f"the epochs of {asked.group!r} are those of the ids of its messages: nobody opens or closes them"
            raise UStatusError(UCode.FAILED_PRECONDITION, what)
        if not kept.group.is_publisher(caller):
            what = f"{uris.format(caller)} publishes nothing of {asked.group!r}"
            raise UStatusError(UCode.PERMISSION_DENIED, what)
        if not asked.changes:
            raise invalid("a Progress has changes: +1 for an epoch that opens, -1 for one that is over")
        now = self._loop.time()
        kept.change(caller, asked.changes, now)
        waiting = self._tell()
        kept.settle(now)
        waiting += self._tell()
        self._schedule()
        response = ProgressResponse(lower=kept.told.lower, active=kept.told.active)
        for done in waiting:
            await done
        return response


def _say(told: GroupFrontier, unsaid: GroupFrontier, unheard: dict[Time, None]) -> None:
    """Add what the log could not take. Of what it never heard of it has no record, so nobody has to hear that it ended,
    however many did; only that some of it was refused, if another log has the rest. `unheard`: what is left of it."""
    unheard.update(dict.fromkeys(map(time_of, unsaid.opened)))
    said = set(map(time_of, told.opened))
    for time in told.active:
        if time_of(time) in unheard:
            del unheard[time_of(time)]
            if time_of(time) not in said:
                told.opened.append(time)
    ended = [*unsaid.ended, *told.ended]
    refused = [one for one in ended if time_of(one.time) in unheard and one.incomplete == REFUSED][-ACTIVE_MAX:]
    del told.ended[:]
    told.ended.extend([one for one in ended if time_of(one.time) not in unheard] + refused)
    unheard.clear()
    unheard.update(dict.fromkeys(time_of(one.time) for one in refused))


def _insert(append: Append, stream: int, message: Carried, *, is_ahead: bool) -> None:
    assert append.epochs is not None, "it has messages of a group"
    place = 0 if is_ahead else len(append.messages)
    append.streams.insert(place, stream)
    append.messages.insert(place, message)
    append.epochs.insert(place, None)
    if is_ahead:
        append.lead += 1
    else:
        append.trail += 1


def _heard(done: asyncio.Future[int]) -> None:
    """Whoever waits hears of an error; nobody has to."""
    if not done.cancelled():
        done.exception()


def _id(message: Carried) -> bytes:
    return EncodedMessage.of(message).id_bytes if not isinstance(message, EncodedMessage) else message.id_bytes
