"""One history that is followed into ours: each of its records gets into our log exactly once, and in order.

answer -> Acceptor -> wanted records: the verdicts of the ingress, ids -> one append: records, origins, position
             |            '- of an authority that it does not speak for: dropped, "spoofed"
             '- gaps: reported                        '- refused by the log: back to the committed position

The position in the other log and the records up to it are stored in one transaction. So nothing is lost or doubled when
either side is killed, or the link is cut, at any moment. A gateway is followed only after it has handed over; then it
pushes no publishes. What it has pushed since our position is read as well, and dropped if it is here (pushed.py).
A publisher goes on sending plain copies. Each copy is a doorbell: we ask the history at once, and
do not store the copy if it was made after we had a position. Earlier publishes are stored as they come.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Literal

import structlog

from history.file.writer import FollowedFrom as Notes
from history.log.cursors import POSITION_BYTES_MAX
from history.log.log import Log
from history.reading.acceptor import Accepted, Acceptor, ReaderState
from history.reading.following import Following, FollowingOptions, FollowMode
from history.records.record import Record
from streamer.following.covered import Covered, Digest
from streamer.following.not_kept import NotKept
from streamer.following.pushed import PushedBefore, Sorted
from streamer.following.sorting import Doorbell, Intake, Sorting
from streamer.walk.access import AccessPattern
from streamer.walk.endpoint import Endpoint
from streamer.walk.view import match
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Beginning, FollowedPlaces, Gap, HandOver, PollRequest
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

UNCOMMITTED_BYTES_MAX: Final = 4 << 20  # accepted and not committed, of one service, plus one answer
CAUGHT_UP_S: Final = 30.0  # longest wait for messages from before we followed that the log has refused
# such a history can't be followed for some time; until then plain copies are stored
REFUSALS: Final = (UCode.PERMISSION_DENIED, UCode.UNIMPLEMENTED, UCode.INVALID_ARGUMENT)
COVERED: Final = "topics of "  # prefix of the key of topics that were followed up to the position without a hole
PATTERNS_NAMED_MAX: Final = 1_000  # patterns of a Beginning; with more, readers see fewer complete epochs
DENIED_LOGGED_MAX: Final = 100  # log lines about topics that we may not read

log = structlog.get_logger()


@dataclass(frozen=True)
class Follow:
    """One [[follow]] section. Without `topics`, all topics that are wanted here are followed."""

    endpoint: Endpoint
    service: AccessPattern
    topics: Sequence[UUri] = ()
    mode: FollowMode = "auto"

    @property
    def is_wide(self) -> bool:
        return uris.is_pattern(self.service.authority)

    def names(self, service: UUri, endpoint: Endpoint) -> bool:
        is_there = endpoint is self.endpoint and uris.is_one_of(service.authority_name, {self.service.authority})
        return is_there and (service.ue_id, service.ue_version_major) == (
            self.service.address.ue_id,
            self.service.address.ue_version_major,
        )


def speaks_for(service: UUri, topic: UUri, *, is_named: bool) -> bool:
    """Returns whether a history may have records of this topic. A publisher's has records of its type on its host.
    A gateway's has those of its host and the host's family, and those of its whole network if our
    configuration names it (`is_named`)."""
    if service.ue_id >> 16:
        return ids.covers(service, topic)
    authority, family = topic.authority_name, uris.family_of(service.authority_name)
    return is_named or authority == service.authority_name or (bool(family) and uris.family_of(authority) == family)


@dataclass
class Pending:
    """Records that are accepted, and not yet in a log."""

    records: list[Record | Beginning] = field(default_factory=list)
    bytes: int = 0
    reader_state: ReaderState = field(default_factory=ReaderState)
    covered: Digest = b""  # digest of the topics that are followed there without a hole
    has_moved: bool = False


class _RestartedError(UStatusError):
    """The other side was restarted and no longer knows us."""


class Followed:
    """One history that is followed. `counts`: records (that came), stored, duplicate, pushed_before, unwanted, loop,
    spoofed, unreadable, refused (appends), doorbells, gaps, denied (topics that we may not read there).

    Its state: the conversation (`_following` and `_acceptor`, while it runs, and `trouble`); what is on its way into
    the log (`_appending`, `_begun`, `_unreported`); how far it has come (`_covered`, `_confirmed_since`, `_pushed`, and
    what of them is on disk); and topics that are treated apart (`_fixed`, `_withheld`, `_missing`, `not_kept`).
    """

    def __init__(self, follows: Intake, service: UUri, endpoint: Endpoint, follow: Follow | None) -> None:
        self.service, self.endpoint, self.follow = service, endpoint, follow
        self.key = f"{endpoint.name}:{uris.format(service)}"
        self._follows, self._log = follows, follows.logs.durable
        self.is_named = follow is not None and not follow.is_wide  # so it may have the records of its whole network
        self.kind = service.ue_id >> 16  # the uEntity type of a publisher that keeps its own history
        self.is_gateway = not self.kind
        self.counts: Counter[str] = Counter()
        self._backoff = follows.backoff()
        self.doorbell = Doorbell(self.key, self._ask_now, self._backoff, self.counts)
        self._pending = Pending()
        self._capacity_freed = asyncio.Event()
        self._came = asyncio.Event()
        kept = self._kept
        self._was_ended, self._pushed = kept.ended, PushedBefore(self._log, kept.pushed_after)
        self.announced_at = asyncio.get_running_loop().time()  # or found otherwise
        self.has_position = asyncio.Event()  # the position is on disk
        if self._log.followed.position(self.key) is not None:
            self.has_position.set()
        # plain messages with later ids are copies; None: unknown yet. As the history reports it, and as it is on disk
        self._confirmed_since = uuids.to_bytes(kept.since) if kept.HasField("since") else None
        self.doorbell.copies_since = self._confirmed_since
        self._withheld: set[uris.Key] = set()  # denied topics of which no record has come since
        self._fixed: dict[uris.Key, UUri] = {}  # topics that are followed whether or not somebody wants them
        # the topics that were followed up to here without a hole, and those that begin or end with the next answer
        self._covered = self._covered_before(kept.topics)
        self._covered_kept = self._covered.digest  # on disk, or about to be
        self._missing: list[UUri] = []  # topics that we may not read from here on
        self._unreported = 0  # Beginnings that are not in the log yet
        self._begun: list[UUri] = []
        self._following: Following | None = None
        self._acceptor: Acceptor | None = None  # set while the history is followed
        self._appending: set[asyncio.Task[bool]] = set()
        self._sorting = Sorting(follows, endpoint, self.speaks_for, self.counts)
        self.is_handed_over = False
        self.trouble = ""
        self.not_kept = NotKept(service, follows.now_ms)

    def __repr__(self) -> str:
        return f"Followed({self.key}, {self._following}, {dict(self.counts)})"

    @property
    def connected(self) -> bool:
        return self._following is not None and self._following.connected

    @property
    def state(self) -> Literal["handed_over", "beside_copies", "away"]:
        if not self.connected:
            return "away"
        return "handed_over" if self.is_handed_over else "beside_copies"

    # -- topics that are followed

    def speaks_for(self, source: UUri) -> bool:
        return speaks_for(self.service, source, is_named=self.is_named)

    def records(self, source: UUri) -> bool:
        """Returns whether this topic is followed even if nobody wants it."""
        return self.follow is not None and match(self.follow.topics, source, self._follows.matched)

    def _end_here(self, topic: UUri) -> None:
        """Stop following a topic. A Beginning shows readers of epochs that our log has only a part of the open ones."""
        if self._covered.discard(topic):
            self._begun.append(topic)

    def _begin(self, following: Following, topic: UUri) -> None:
        """Follow a topic from here on. A Beginning shows readers of epochs that our log lacks its earlier records."""
        following.follow(topic)
        if topic not in self._covered:
            self._begun.append(topic)
        self._covered.add(topic)

    def listen_for(self, topic: UUri) -> None:
        """Follow or unfollow a topic after the interest in it has changed."""
        following = self._following
        if following is None:
            return
        is_wanted = self._follows.is_wanted(self.endpoint, topic)
        for narrowed in self._narrowed(topic):
            if is_wanted:
                self._follow_more(following, narrowed)
            elif uris.key(narrowed) not in self._fixed:
                following.unfollow(narrowed)
                self._end_here(narrowed)
                self._report_begun()

    def listen_again(self) -> None:
        """Follow and unfollow after the interest in any topic may have changed."""
        following = self._following
        if following is None:
            return
        named = self.follow.topics if self.follow is not None else ()
        always = [*self._follows.always_wanted(), *ids.frontiers_of(uris.WILDCARD_AUTHORITY)]
        fixed = [*named, *chain.from_iterable(map(self._narrowed, always))]
        self._fixed = {uris.key(topic): topic for topic in fixed}
        there = self._follows.wanted_of(self.service, self.endpoint, is_named=self.is_named)
        wanted = chain.from_iterable(map(self._narrowed, there))
        all = self._fixed | {uris.key(topic): topic for topic in wanted}
        followed = {uris.key(topic): topic for topic in following.topics}
        for key in all.keys() - followed.keys():  # before others end, so that a replaced pattern leaves no hole
            self._follow_more(following, all[key])
        for key in followed.keys() - all.keys():
            following.unfollow(followed[key])
        for topic in [one for one in self._covered if uris.key(one) not in all]:
            self._end_here(topic)
        self._report_begun()

    def _follow_more(self, following: Following, topic: UUri) -> None:
        self._begin(following, topic)
        if self._acceptor is not None:
            self._acceptor.begin_here()
            self._report_begun()

    def _report_begun(self) -> None:
        """Write Beginnings of new and missing topics into the log before the records of the next answer. Logs without
        epochs need none."""
        if self._acceptor is None:
            return  # they are written once the history is followed
        begun, self._begun = self._begun, []
        missing, self._missing = self._missing, []
        pending = self._pending
        pending.covered = self._covered_digest
        if not self._log.frontier_ids or not (begun or missing):
            return
        if begun:
            newly = set(map(uris.key, begun))
            others = {uris.key(one): one for topic in begun for one in self._covered.meeting(topic)}
            pending.records.append(
                self._beginning(begun, [one for key, one in sorted(others.items()) if key not in newly])
            )
        if missing:
            pending.records.append(self._beginning(missing))
        pending.has_moved = True
        self._came.set()

    @property
    def _covered_digest(self) -> Digest:
        """Returns the digest for a restart. It is empty if topics are withheld, since a restart does not know which:
        then all topics begin again."""
        return b"" if self._withheld else self._covered.digest

    def _beginning(self, topics: Sequence[UUri], but: Sequence[UUri] = ()) -> Beginning:
        if len(topics) > PATTERNS_NAMED_MAX:
            topics, but = [uris.ANY], []
        self._unreported += 1
        return Beginning(topics=topics, service=self.service, but=but[:PATTERNS_NAMED_MAX])

    def _narrowed(self, pattern: UUri) -> list[UUri]:
        """Returns `pattern`, limited to what this history may have."""
        if not self.is_gateway:
            narrowed = ids.narrowed(self.service, pattern)
            return [] if narrowed is None else [narrowed]
        if pattern.authority_name != uris.WILDCARD_AUTHORITY:
            return [pattern] if self.speaks_for(pattern) else []
        there = self.endpoint.authorities if self.is_named else [self.service.authority_name]
        if any(map(uris.is_pattern, there)):
            return [pattern]
        return [uris.of_authority(pattern, one) for one in sorted(there)]

    def announced(self) -> None:
        """Ask again at once: the history, which may hand over now, was announced. The current call may wait in vain."""
        self.announced_at = asyncio.get_running_loop().time()
        self._backoff.wake()
        self._ask_now()

    def _ask_now(self) -> None:
        if self._following is not None:
            self._following.check_now()

    # -- the conversation

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                await self._converse()
            except _RestartedError:
                pass
            except UStatusError as error:
                if self.trouble != str(error):
                    log.warning("a history can't be followed; trying again", service=self.key, why=str(error))
                self.trouble = str(error)
                if error.code in REFUSALS:
                    self.doorbell.stop_trusting_history()
            except Exception as error:  # a fault of ours must not end it without a report
                log.exception("a history can't be followed; trying again", service=self.key)
                self.trouble = f"a fault of this program: {error!r}"
            await self._backoff.wait()

    async def _converse(self) -> None:
        reader_state = self._committed()
        if self._begun or self._missing or self._unreported:  # these were not stored, so they are reported again
            self._covered.clear()
            self._begun, self._missing, self._unreported = [], [], 0
        client = self._follows.client(self.service)
        try:
            async with Following(
                client,
                FollowingOptions(
                    mode=self.follow.mode if self.follow is not None else "auto",
                    start=PollRequest(latest=True),
                    acknowledges=True,
                    window_bytes=self._follows.window_bytes,
                    rng=self._follows.rng,
                    random_bytes=self._follows.random_bytes,
                ),
                on_denied=self._denied,
                on_forgotten=self._forgotten,
                on_confirmed=lambda _, done: self._confirmed(done),
                on_not_kept=self.not_kept.answered,
            ) as following:
                self._following, self._fixed = following, {}
                following.has_begun = bool(reader_state.positions)
                if self.is_gateway:
                    await self._take_over(following, reader_state)
                if not reader_state.positions:
                    reader_state = await self._find_position(following)
                self.listen_again()
                # messages that were pushed before that position are stored before followed records
                await self._follows.ingress(self.endpoint).caught_up(CAUGHT_UP_S)
                await self._pull(following, reader_state)
        finally:
            self._following, self._acceptor, self.is_handed_over = None, None, False
            self.doorbell.denied.clear()
            await client.close()

    def _forgotten(self) -> None:
        """End the conversation: the history was restarted, may have another log, and may push again."""
        raise _RestartedError(UCode.ABORTED, f"{self.key} was restarted")

    def _denied(self, topic: UUri) -> None:
        self.counts["denied"] += 1
        self.doorbell.denied.add(uris.key(topic))
        if uris.key(topic) not in self._withheld:
            self._withheld.add(uris.key(topic))
            self._missing.append(topic)
        if self.counts["denied"] <= DENIED_LOGGED_MAX:
            what = "a topic can't be followed: we may not read it there"
            log.warning(what, service=self.key, topic=uris.format(topic))

    async def _take_over(self, following: Following, reader_state: ReaderState) -> None:
        """Ask the gateway to stop pushing publishes. Raises its refusal; then it pushes all of them, and nothing is
        followed."""
        if not self.has_position.is_set() or self._was_ended:  # saved before, so that a later run knows whom to ask to
            await self._keep_first(reader_state)  # push again
            self._was_ended = False
        was_followed = bool(reader_state.positions)
        self._pushed = PushedBefore(self._log, self._kept.pushed_after)
        asked = HandOver(take=True, takes_held=True, positions=reader_state.request())
        for position in await following.commands.hand_over(asked):
            known = reader_state.positions.get(position.incarnation)
            if known is None:  # we begin; but of a new log of a history that we follow, all is new
                known = min([position.seq, *(one.after_seq for one in position.held)])
                if was_followed or position.acknowledged:
                    known = 0
                if position.acknowledged and not was_followed:
                    self._follows.on_emptied(self.service, self.endpoint.name, position.seq)
            reader_state.positions[position.incarnation] = known
            if known < position.seq:  # what lies between was pushed, or was not: our log says which
                what = "reading on from our position: what was pushed since then is not stored again"
                log.info(what, service=self.key, after=known, pushed_to=position.seq)
                self._pushed.up_to[position.incarnation] = position.seq
            if position.in_memory:
                reader_state.idle.add(position.incarnation)
        if not was_followed:  # acknowledged only once it is safe: else a kill would look as if our log had been lost
            await self._keep_first(reader_state)
        self.is_handed_over = True

    async def _find_position(self, following: Following) -> ReaderState:
        """Save the ends of its logs as our position, to follow from there. The answer also says which ids are later."""
        acceptor = Acceptor(read=self._follows.read)
        while not acceptor.state.positions:
            answer = await following.next(acceptor.state)
            if answer is not None:
                acceptor.accept(answer)
                self._confirmed_since = uuids.to_bytes(answer.made) if uuids.is_v7(answer.made) else None
        await self._keep_first(acceptor.state)
        return acceptor.state

    async def _keep_first(self, reader_state: ReaderState) -> None:
        since = self._confirmed_since
        self._log.followed.keep(self.key, self._stored(reader_state))
        await self._log.saved()
        self.doorbell.copies_since = since
        self.has_position.set()

    def _confirmed(self, done: UUID) -> None:
        if not self.has_position.is_set() or not uuids.is_v7(done):
            return
        id = uuids.to_bytes(done)
        if self._confirmed_since is None:
            self._confirmed_since = id
        elif id < self._confirmed_since:  # the publisher's clock went back
            self._confirmed_since = self.doorbell.copies_since = id
        else:
            return
        self._pending.has_moved = True
        self._came.set()

    async def _pull(self, following: Following, reader_state: ReaderState) -> None:
        """Accept answers while earlier records are being committed."""
        acceptor = self._acceptor = Acceptor(state=reader_state, read=self._follows.read)
        self._pending = Pending(
            reader_state=acceptor.state.copy(), has_moved=self._confirmed_since != self.doorbell.copies_since
        )
        if not self._begun:  # else it is set with the first answer, which says what we may not read
            self._pending.covered = self._covered_digest
        self._came.set()
        acked = dict(reader_state.positions)
        storing = asyncio.create_task(self._store_on(acked), name=f"store {self.key}")
        storing.add_done_callback(lambda _: following.check_now())
        try:
            while True:
                while self._pending.bytes > UNCOMMITTED_BYTES_MAX and not storing.done():
                    self._capacity_freed.clear()
                    await self._capacity_freed.wait()
                if storing.done():
                    storing.result()
                answer = await following.next(acceptor.state, acked)
                if self._begun or self._missing:
                    self._report_begun()
                if answer is None:
                    continue
                self.doorbell.answered()
                self.trouble = ""
                self._take(acceptor.accept(answer), sum(batch.ByteSize() for batch in answer.batches))
        finally:
            storing.cancel()
            # wait until the log has committed or refused everything: otherwise records would come twice
            await asyncio.gather(storing, *self._appending, return_exceptions=True)

    def _take(self, accepted: Accepted, bytes: int) -> None:
        for gap in accepted.gaps:
            self.counts["gaps"] += 1
            self._follows.on_gap(self.service, gap)
        records: list[Record | Beginning] = [*accepted.records]
        for index, topics in reversed(self._holes(accepted)):
            records.insert(index, self._beginning(topics))
        pending = self._pending
        pending.has_moved = pending.has_moved or pending.reader_state != accepted.state
        pending.reader_state = accepted.state
        pending.records += records
        pending.bytes += bytes
        if pending.has_moved:
            self._came.set()

    def _holes(self, accepted: Accepted) -> list[tuple[int, list[UUri]]]:
        """Returns the indexes of records that follow a hole, and the topics of each hole."""
        if not self._log.frontier_ids:
            return []
        gaps = [gap for gap in accepted.gaps if gap.before_seq]
        found = [(_first_behind(gap, accepted.records), [*self._covered]) for gap in gaps]
        for index, record in enumerate(accepted.records) if self._withheld else ():
            source = record.message.attributes.source
            if uris.key(source) in self._withheld:
                self._withheld.discard(uris.key(source))
                found.append((index, [source]))
        return sorted(found, key=lambda one: one[0])

    # -- into the log

    async def _store_on(self, acked: dict[bytes, int]) -> None:
        """Store pending records whenever there are any, and keep `acked` up to date. Raises the error of the log."""
        while True:
            await self._came.wait()
            self._came.clear()
            pending = self._pending
            self._pending = Pending(reader_state=pending.reader_state, covered=pending.covered)
            if not pending.has_moved:
                continue
            try:
                await self._store(pending)
            except BaseException:
                self.counts["refused"] += 1
                raise
            finally:
                self._capacity_freed.set()
            acked.clear()
            acked.update(pending.reader_state.positions)

    async def _store(self, pending: Pending) -> None:
        """Store records and position in one transaction."""
        if self.doorbell.has_kept_copies:  # one may be the twin of a record here, and its append may fail
            self.doorbell.has_kept_copies = False
            await self._follows.ingress(self.endpoint).settled()
        appending = asyncio.create_task(self._append(pending), name=f"append {self.key}")
        self._appending.add(appending)
        appending.add_done_callback(self._appending.discard)
        since = self._confirmed_since
        is_kept = await asyncio.shield(appending)
        if since != self.doorbell.copies_since:  # saved before copies are dropped, so that a restart recognizes them
            if not is_kept:
                await self._log.saved()
            self.doorbell.copies_since = since

    async def _append(self, pending: Pending) -> bool:
        """Append records and position. Returns whether the position is on disk."""
        stored = self._stored(pending.reader_state, pending.covered)
        shares, is_kept = await self._shares(pending.records), False
        beginnings = sum(one.key is None for share in shares.values() for one in share)
        # the log in memory first, since the position covers both
        for target in sorted(shares, key=lambda one: one.durable):
            share = shares.pop(target)
            epochs = [one.epoch for one in share]
            notes = Notes([one.origin for one in share], self.key, stored, epochs if any(epochs) else None)
            try:
                streams, messages = [one.stream for one in share], [one.message for one in share]
                await self._follows.append(target, streams, messages, notes)
            except BaseException:
                self._sorting.forget((*share, *chain.from_iterable(shares.values())))
                raise
            self.counts["stored"] += sum(one.key is not None for one in share)
            is_kept = target is self._log
        if not is_kept:
            self._log.followed.keep(self.key, stored)
        self._unreported -= beginnings
        if self._log.frontier_ids and self._covered_kept != pending.covered == self._covered_digest:
            self._keep_covered(pending.covered)
        return is_kept

    async def _shares(self, records: Sequence[Record | Beginning]) -> dict[Log, list[Sorted]]:
        """Returns what is to be stored, by log: not what is here already. Raises UStatusError."""
        pushed, had = self._pushed, frozenset[tuple[int, bytes]]()
        doubtful = {id(one) for one in records if isinstance(one, Record) and pushed.concerns(one)}
        if doubtful:  # a pushed copy may be under way into our log, and its append may fail
            await self._follows.ingress(self.endpoint).settled()
        found = [
            (one, self._beginning_here(one) if isinstance(one, Beginning) else self._sorting.sort(one))
            for one in records
        ]
        if doubtful:
            here = [to for one, to in found if isinstance(to, Sorted) and id(one) in doubtful]
            try:
                had = await pushed.had(here)
            except BaseException:
                self._sorting.forget(to for _, to in found if isinstance(to, Sorted))
                raise
        shares: dict[Log, list[Sorted]] = {}
        parts: dict[uris.Key, UUri] = {}  # topics of which our log has a record outside of its epoch

        def end_parts() -> None:
            if parts:
                shares.setdefault(self._log, []).append(self._beginning_here(self._beginning([*parts.values()])))
                parts.clear()

        for record, to in found:
            if isinstance(record, Record):
                self.counts["records"] += 1
                if isinstance(to, Sorted) and id(record) in doubtful and (to.stream, to.message.id_bytes) in had:
                    to = "here"
                if to == "here":
                    self.counts["pushed_before" if id(record) in doubtful else "duplicate"] += 1
                    if record.epoch is not None:
                        source = record.message.attributes.source
                        parts[uris.key(source)] = source
            if isinstance(to, Sorted):
                end_parts()
                shares.setdefault(to.target, []).append(to)
        end_parts()
        return shares

    def _keep_covered(self, digest: Digest) -> None:
        """Save the covered topics, which are long and rarely change. The position has only their digest."""
        topics = Beginning(topics=self._covered).SerializeToString()
        self._log.followed.keep(COVERED + self.key, topics if len(topics) <= POSITION_BYTES_MAX else None, at_once=True)
        self._covered_kept = digest

    def _covered_before(self, digest: Digest) -> Covered:
        """Returns the topics of the last run; none if they do not belong to the position, which has this digest."""
        covered = Covered(Beginning.FromString(self._log.followed.position(COVERED + self.key) or b"").topics)
        return covered if covered.digest == digest else Covered()

    def _beginning_here(self, said: Beginning) -> Sorted:
        """Returns a Beginning as a record of our own."""
        topic = self._follows.local.get_resource(ids.BEGINNINGS)
        message = EncodedMessage.of(UMessageBuilder.publish(topic).with_id(uuids.new()).pack(said))
        return Sorted(self._log, self._log.stream_id(topic, wanted=True), message, None, None, None)

    @property
    def _kept(self) -> FollowedPlaces:
        """Returns what our log has about this history; empty if it has nothing."""
        return FollowedPlaces.FromString(self._log.followed.position(self.key) or b"")

    def _committed(self) -> ReaderState:
        """Returns the positions in our log."""
        reader_state = ReaderState()
        for position in self._kept.positions:
            reader_state.positions[position.incarnation] = position.seq
            if position.in_memory:
                reader_state.idle.add(position.incarnation)
            reader_state.learn([position])
        return reader_state

    def _stored(self, reader_state: ReaderState, covered: bytes = b"") -> bytes:
        positions = reader_state.request()
        for position in positions:
            position.in_memory = position.incarnation in reader_state.idle
        here = self._pushed.after  # while it pushes, as it was
        if self.is_handed_over:
            here = self._pushed.seq_here(reader_state.positions.items())
        stored = FollowedPlaces(positions=positions, topics=covered, pushed_after=here)
        if self._confirmed_since is not None:
            stored.since.CopyFrom(uuids.from_bytes(self._confirmed_since))
        return stored.SerializeToString()

    async def end(self) -> None:
        """Ask the other side to push again, from our position on. Raises UStatusError."""
        client = self._follows.client(self.service)
        rng, random_bytes = self._follows.rng, self._follows.random_bytes
        options = FollowingOptions(mode="poll", rng=rng, random_bytes=random_bytes)
        async with Following(client, options) as following:
            await following.commands.hand_over(HandOver(end=True, positions=self._committed().request()))


def _first_behind(gap: Gap, records: Sequence[Record]) -> int:
    behind = (
        index
        for index, record in enumerate(records)
        if record.incarnation == gap.incarnation and record.seq > gap.after_seq
    )
    return next(behind, len(records))
