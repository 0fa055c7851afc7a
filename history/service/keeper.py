"""Keeps the epochs of groups of topics in the logs of one process. Their frontiers are records of the log itself.

append -> mark: topics of a group? -> assign -> frontier (epochs that it opens), the messages with their epochs,
                                       frontier (epochs that it ends): one append, stored whole or not at all
Progress -> change -> frontier -> answered when it is stored            a timer -> tick -> frontier

away, back: messages may be missed while the process does not run, or a network is away -> frontier: missed buckets

Retention, following, push and poll, gaps and restarts treat a frontier like any other record. It is valid at its
position in the log. Each names all groups, so the newest one up to a position is a snapshot. A group that has records
in several logs is reported in each of them: an epoch is over when it is over in all.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog
from google.protobuf.message import DecodeError

from history.epochs.frontier import ACTIVE_MAX
from history.epochs.groups import (
    ENDED,
    LATE_REPORTED_MAX,
    MISSED_MAX,
    NOT_RUNNING,
    REFUSED,
    Buckets,
    Group,
    GroupEpochs,
    IncomingRecord,
    Progress,
    PublisherAddress,
    require_kind,
)
from history.file.reader import whole_at
from history.file.writer import Append
from history.log.log import Log, position_before
from history.records.chunk import CorruptChunkError, is_publish, message_id
from history.records.epoch import Epoch, Time, time_of
from storage.disk import REAL_DISK, Disk
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Frontier, GroupFrontier, ProgressRequest, ProgressResponse
from uprotocol.encoded import Carried, EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

GROUPS_MAX: Final = 16  # each frontier names all groups
GROUP_AUTHORITIES_MAX: Final = 4_096  # known of one group; with more, each network that is away may concern it
RESTART: Final = ""  # the cause of what is missed until the process listens again after a restart
RETRY_S: Final = 1.0  # after a log has refused a frontier

log = structlog.get_logger()


def require_same_kinds(path: Path, topic: UUri, groups: Mapping[str, str], disk: Disk = REAL_DISK) -> None:
    """Raises what `Keeper.open` would raise for the log at `path`: FAILED_PRECONDITION if one of the `groups`, with
    their kinds, had epochs of another kind. What can't be read counts as no epochs. Writes nothing, and blocks."""
    with contextlib.suppress(OSError, sqlite3.Error, CorruptChunkError, DecodeError, ValueError):
        with contextlib.closing(disk.look(path)) as db:
            source = topic.SerializeToString()
            newest = "SELECT max(newest_seq) FROM stream WHERE source = ? AND sink IS NULL"
            (seq,) = db.execute(newest, (source,)).fetchone()
            (first,) = db.execute("SELECT max(first_seq) FROM chunk WHERE first_seq <= ?", (seq,)).fetchone()
            chunk = whole_at(db, first)
        report = Frontier.FromString(chunk.messages[chunk.seqs.index(seq)].payload)
        for reported in report.groups:
            if reported.group in groups and reported.kept.kind:
                require_kind(reported.group, reported.kept.kind, groups[reported.group])


@dataclass(eq=False)
class _InLog:
    """The state of one log. `plain`: streams of no group; `of`: streams of a group, with the publisher and the topic.
    `numbers`: of the last frontier, by group; a group without records here has none. `unreported`: by group, epochs
    that were opened and ended by frontiers that failed; `unopened`: ended epochs that the log never knew.
    `reported_after`: the newest frontier has a greater seq."""

    plain: set[int] = field(default_factory=set)
    of: dict[int, tuple[GroupEpochs, PublisherAddress, bytes]] = field(default_factory=dict)
    numbers: Counter[str] = field(default_factory=Counter)
    unreported: dict[str, GroupFrontier] = field(default_factory=dict)
    unopened: dict[str, dict[Time, None]] = field(default_factory=dict)
    stream: int = 0  # of the frontiers
    reported_after: int = 0


class Keeper:
    """Keeps the epochs of `groups` in `logs`. The first log reports every group, the others those with records there.

    `topic`: of the frontiers. Times are Unix milliseconds of `now_ms`, and seconds of the running loop.
    """

    def __init__(
        self,
        topic: UUri,
        groups: Iterable[Group],
        logs: Sequence[Log],
        now_ms: Callable[[], int],
        *,
        receives: bool = True,
    ) -> None:
        """`receives`: messages come from networks, so those from before `listening` may be missed. False: the process
        publishes them itself."""
        self.topic, self._logs, self._now_ms, self._receives = topic, list(logs), now_ms, receives
        self._loop = asyncio.get_running_loop()
        self._kept: dict[str, GroupEpochs] = {}
        for group in groups:
            kept = Progress(group, self._positions) if group.width_ms is None else Buckets(group)
            assert self._kept.setdefault(group.name, kept) is kept, "each group has a name of its own"
        assert len(self._kept) <= GROUPS_MAX, "each frontier names them all"
        self._authorities = {kept: set[str]() for kept in self._kept.values()}  # that have published, by group
        self._in = {target: _InLog() for target in logs}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"Keeper({list(self._kept.values())})"

    def __iter__(self) -> Iterator[GroupEpochs]:
        return iter(self._kept.values())

    async def open(self) -> None:
        """Continue from the newest frontiers. Called before anything is appended. Raises FAILED_PRECONDITION if one of
        the groups had epochs of another kind."""
        for target, state in self._in.items():
            newest = await self._newest(target)
            for report in newest.groups if newest is not None else ():
                state.numbers[report.group] = report.number
                kept = self._kept.get(report.group)
                if target is self._logs[0] and kept is not None and report.kept.kind:
                    kept.resume(report, self._loop.time())
            await self._end_others(target, newest)
        now_ms, now = self._now_ms(), self._loop.time()
        for kept in self._kept.values():
            kept.start(now_ms, now)
            before = kept.reported.kept
            if self._receives and (until_ms := before.complete_until_ms or before.newest_ms):
                kept.away(RESTART, until_ms, NOT_RUNNING)
            # A time in milliseconds is greater than any version that was used before and is not known any more: no
            # group changes every millisecond for years.
            kept.version = kept.version or now_ms
            if isinstance(kept, Progress) and kept.publishers:
                await self._count_again(kept)
        if self._kept:
            for source in [stream.source for target in self._logs for stream in target.streams()]:
                for kept in (kept for kept in self._kept.values() if kept.group.has(source)):
                    self._note_publisher(kept, source)
            for target, state in self._in.items():
                state.stream = target.stream_id(self.topic, wanted=True)
                state.plain.add(state.stream)
                target.keep_epochs(self, state.plain)
                target.keep_streams(lambda state=state: (state.stream,))  # type: ignore[misc]
                target.on_forgotten(lambda ids, target=target: self._forgotten(target, ids))  # type: ignore[misc]
            self._look()

    def close(self) -> None:
        """Called before the logs are closed. May be called twice."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    # -- messages that may be missed

    def listening(self) -> None:
        """Note that all networks are listened to after a restart: messages are missed no more."""
        self.back(RESTART)

    def away(self, cause: str, why: str, owns: Callable[[str], bool]) -> None:
        """Note that messages of the authorities that `owns` names may be missed from now on, until `back(cause)`."""
        now_ms = self._now_ms()
        for kept in self._kept.values():
            authorities = self._authorities[kept]
            if len(authorities) >= GROUP_AUTHORITIES_MAX or any(map(owns, authorities)):
                kept.away(cause, now_ms, why)
        self._report()

    def back(self, cause: str) -> None:
        """Note that messages are not missed any more for this cause. Without effect if they were not."""
        now_ms = self._now_ms()
        for kept in self._kept.values():
            kept.back(cause, now_ms)
        self._report()

    def clocks_ahead(self) -> Iterator[tuple[str, PublisherAddress, int]]:
        """Yields, for each group, the publisher whose clock is furthest ahead of ours, and how far in milliseconds: its
        messages are in later epochs. Nothing if it is less than a bucket and CLOCK_AHEAD_MS_MIN."""
        for kept in self._kept.values():
            if isinstance(kept, Buckets) and kept.clocks_ahead:
                publisher, (ahead_ms, _) = max(kept.clocks_ahead.items(), key=lambda item: item[1][0])
                yield kept.group.name, publisher, ahead_ms

    # -- after a restart

    async def _newest(self, target: Log) -> Frontier | None:
        stream = target.known_id(self.topic)
        seq = target.stream(stream).newest_seq if stream is not None else 0
        for chunk in await target.read(seq - 1, until=seq, streams={stream}) if stream is not None and seq else ():
            try:
                return Frontier.FromString(chunk.messages[-1].payload)
            except DecodeError:
                break
        if seq:
            # It is damaged, or deleted by retention. Readers must not conclude that no epoch was open.
            log.warning("the newest frontier is lost: the epochs begin again", log=target.name)
            self._in[target].numbers.update(dict.fromkeys(self._kept, 1))
        return None

    async def _end_others(self, target: Log, newest: Frontier | None) -> None:
        """End the epochs of groups that are no longer configured, so that readers do not wait for them."""
        over = Frontier()
        for report in newest.groups if newest is not None else ():
            if report.group not in self._kept and (report.lower or report.active):
                ended = over.groups.add(group=report.group, number=report.number + 1, version=report.version + 1)
                ended.logs.append(target.incarnation)
                ended.ended.extend(GroupFrontier.Ended(time=time, incomplete=ENDED) for time in report.active)
                ended.updates.extend(GroupFrontier.Update(time=time, change=-1) for time in report.lower)
        if over.groups:
            await target.append([target.stream_id(self.topic, wanted=True)], [self._message(over)])

    async def _count_again(self, kept: Progress) -> None:
        """Count the stored records of the open epochs."""
        for target in self._logs:
            held = (held for of_publisher in kept.publishers.values() for held in of_publisher.values())
            seq = min((_begun(target, held.after) for held in held), default=target.newest_seq)
            streams = {stream.id: stream for stream in target.streams() if kept.group.has(stream.source)}
            while seq < target.newest_seq:
                chunks = await target.read(seq, streams=streams.keys())
                for chunk in chunks:
                    for id, epoch, message in zip(chunk.streams, chunk.epochs or (), chunk.messages, strict=False):
                        if epoch is not None and epoch.group == kept.group.name:
                            source = streams[id].source
                            whose = (source.authority_name, source.ue_id)
                            kept.count_stored(whose, streams[id].source_bytes, message_id(message), epoch.time)
                seq = chunks[-1].last_seq if chunks else target.newest_seq
        kept.settle(self._now_ms(), self._loop.time())

    # -- appends

    def mark(self, target: Log, append: Append) -> None:
        state = self._in[target]
        shares: dict[GroupEpochs, list[int]] = {}
        epochs: list[Epoch | None] = append.epochs or [None] * len(append.streams)
        for index, id in enumerate(append.streams):
            if id in state.plain or epochs[index] is not None:
                continue
            owner = state.of.get(id) or self._learn(target, id)
            if owner is not None:
                shares.setdefault(owner[0], []).append(index)
        if not shares:
            return
        now_ms, now = self._now_ms(), self._loop.time()
        for kept, indices in shares.items():
            records = [IncomingRecord(*state.of[append.streams[at]][1:], append.messages[at]) for at in indices]
            for index, epoch in zip(indices, kept.assign(records, now_ms, now), strict=True):
                epochs[index] = epoch
            self._involve(target, kept)
        if target.floor_seq > state.reported_after:  # so that a restart finds a frontier, whatever retention deletes
            state.unreported.update(
                {name: GroupFrontier(group=name) for name in self._kept if name not in state.unreported}
            )
        append.epochs = epochs
        self._report(target, append, is_ahead=True)
        for kept in shares:
            kept.settle(now_ms, now)
        self._report(target, append, is_ahead=False)
        self._schedule()

    def _learn(self, target: Log, id: int) -> tuple[GroupEpochs, PublisherAddress, bytes] | None:
        """Find the group of a stream: the first one with its topic."""
        stream, state = target.stream(id), self._in[target]
        source = stream.source
        if is_publish(stream):
            for kept in self._kept.values():
                if kept.group.has(source):
                    state.of[id] = owner = (kept, (source.authority_name, source.ue_id), stream.source_bytes)
                    self._note_publisher(kept, source)
                    return owner
        state.plain.add(id)
        return None

    def _note_publisher(self, kept: GroupEpochs, source: UUri) -> None:
        if len(self._authorities[kept]) < GROUP_AUTHORITIES_MAX:
            self._authorities[kept].add(source.authority_name)

    def _involve(self, target: Log, kept: GroupEpochs) -> None:
        """Report the group in that log from now on, and name the log in the reports of the others."""
        name = kept.group.name
        if name not in self._in[target].numbers:
            self._in[target].numbers[name] = 0
            for other in self._logs_of(name):
                self._in[other].unreported.setdefault(name, GroupFrontier(group=name))

    def _logs_of(self, name: str) -> list[Log]:
        return [target for target in self._logs if target is self._logs[0] or name in self._in[target].numbers]

    def _positions(self) -> dict[bytes, int]:
        return {target.incarnation: target.newest_seq for target in self._logs}

    def _forgotten(self, target: Log, ids: frozenset[int]) -> None:
        state = self._in[target]
        state.plain.difference_update(ids)
        for id in ids & state.of.keys():
            del state.of[id]

    # -- reports

    def _report(
        self, here: Log | None = None, append: Append | None = None, *, is_ahead: bool = False
    ) -> list[asyncio.Future[int]]:
        """Append the changes to each log that they concern; to `here` together with `append`."""
        news = {name: kept.report() for name, kept in self._kept.items() if kept.has_changes}
        concerned = [
            target
            for target, state in self._in.items()
            if state.unreported or any(target in self._logs_of(name) for name in news)
        ]
        waiting: list[asyncio.Future[int]] = []
        for target in concerned:
            state, message = self._in[target], self._message(self._frontier(target, news))
            state.reported_after = target.newest_seq
            if target is here and append is not None:
                _insert(append, state.stream, message, is_ahead=is_ahead)
                continue
            done = target.append([state.stream], [message])
            if done.done() and done.exception() is not None:  # it was refused at once
                self._report_later(target, [message])
            done.add_done_callback(_ignore_error)
            waiting.append(done)
        return waiting

    def _frontier(self, target: Log, news: dict[str, GroupFrontier]) -> Frontier:
        state, frontier = self._in[target], Frontier()
        for name, kept in self._kept.items():
            if target not in self._logs_of(name):
                continue
            report = frontier.groups.add()
            report.CopyFrom(news[name] if name in news else kept.report_again())
            if (unreported := state.unreported.pop(name, None)) is not None:
                _add_unreported(report, unreported, state.unopened.setdefault(name, {}))
            state.numbers[name] += 1
            report.number = state.numbers[name]
            report.logs.extend(involved.incarnation for involved in self._logs_of(name))
        return frontier

    def _message(self, frontier: Frontier) -> EncodedMessage:
        return EncodedMessage.of(UMessageBuilder.publish(self.topic).with_id(uuids.new()).pack(frontier))

    def failed(self, target: Log, appends: Sequence[Append]) -> None:
        """Report the changes of failed appends again, and do not count their records."""
        state = self._in[target]
        for append in appends:
            for id, epoch in zip(append.streams, append.epochs or (), strict=False):
                owner = state.of.get(id)
                if epoch is not None and owner is not None and owner[0].group.name == epoch.group:
                    owner[0].refused(*owner[1:], epoch.time)
        pairs = [pair for append in appends for pair in zip(append.streams, append.messages, strict=True)]
        self._report_later(target, [message for id, message in pairs if id == state.stream])

    def _report_later(self, target: Log, messages: Iterable[Carried]) -> None:
        state = self._in[target]
        for message in messages:
            for report in Frontier.FromString(message.payload).groups:
                unreported = state.unreported.setdefault(report.group, GroupFrontier(group=report.group))
                unreported.opened.extend(report.opened)
                unreported.late.extend(report.late)
                unreported.missed.extend(report.missed)
                kept = self._kept.get(report.group)
                for ended in report.ended:
                    if kept is not None and time_of(ended.time) in kept.spoiled:
                        ended.incomplete = ended.incomplete or REFUSED
                    unreported.ended.append(ended)
        if state.unreported:
            self._schedule(RETRY_S)

    # -- time

    def _schedule(self, after_s: float | None = None) -> None:
        due = [kept.due for kept in self._kept.values()]
        at = min((time_s for time_s in due if time_s is not None), default=None)
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
        now_ms, now = self._now_ms(), self._loop.time()
        for kept in self._kept.values():
            kept.tick(now_ms, now)
        self._report()
        self._schedule(RETRY_S if any(state.unreported for state in self._in.values()) else None)

    # -- Progress

    async def progress(self, caller: UUri, asked: ProgressRequest) -> ProgressResponse:
        """Apply the changes of a publisher. Raises NOT_FOUND, FAILED_PRECONDITION, PERMISSION_DENIED, INVALID_ARGUMENT
        or RESOURCE_EXHAUSTED. An error of the log is raised, too; the changes are then appended as soon as possible."""
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
        waiting = self._report()
        kept.settle(self._now_ms(), now)
        waiting += self._report()
        self._schedule()
        response = ProgressResponse(lower=kept.reported.lower, active=kept.reported.active)
        for done in waiting:
            await done
        return response


def _add_unreported(report: GroupFrontier, unreported: GroupFrontier, unopened: dict[Time, None]) -> None:
    """Add the changes that the log could not store. The log has no record of an epoch that it never knew, so the end of
    that epoch is not reported, unless records of it were refused: another log may have the rest. `unopened` is left
    with these."""
    unopened.update(dict.fromkeys(map(time_of, unreported.opened)))
    opened = set(map(time_of, report.opened))
    for time in report.active:
        if time_of(time) in unopened:
            del unopened[time_of(time)]
            if time_of(time) not in opened:
                report.opened.append(time)
    ended = [*unreported.ended, *report.ended]
    refused = [end for end in ended if time_of(end.time) in unopened and end.incomplete == REFUSED][-ACTIVE_MAX:]
    for now, before, most in (
        (report.late, unreported.late, LATE_REPORTED_MAX),
        (report.missed, unreported.missed, MISSED_MAX),
    ):
        both = [*before, *now]
        del now[:]
        now.extend(both[-most:])
    del report.ended[:]
    report.ended.extend([end for end in ended if time_of(end.time) not in unopened] + refused)
    unopened.clear()
    unopened.update(dict.fromkeys(time_of(end.time) for end in refused))


def _insert(append: Append, stream: int, message: Carried, *, is_ahead: bool) -> None:
    assert append.epochs is not None, "it has messages of a group"
    index = 0 if is_ahead else len(append.messages)
    append.streams.insert(index, stream)
    append.messages.insert(index, message)
    append.epochs.insert(index, None)
    if is_ahead:
        append.lead += 1
    else:
        append.trail += 1


def _ignore_error(done: asyncio.Future[int]) -> None:
    """Mark an error as retrieved, since nobody may wait for it."""
    if not done.cancelled():
        done.exception()


def _begun(target: Log, after: dict[bytes, int]) -> int:
    """Returns the position in `target` when an epoch was opened."""
    if target.incarnation in after:
        return after[target.incarnation]
    seq, other = position_before(target, after)
    return seq if other else target.newest_seq
