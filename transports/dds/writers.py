"""What is sent: the writers of the DDS transport, and what waits for them. All on one thread, which none of them holds
up.

Batch -> put(route, sample)
         -> it has no writer yet    -> made, WRITERS_AT_ONCE a turn: what has one does not wait for those, as all that
                                       has come is put before the next turn
         -> room in its writer      -> DDS, numbered -> OK
         -> none: its queue         -> tried again, each writer by itself, in order -> OK
                                       nothing moved for timeout_s -> UNAVAILABLE for all of it; the writer is *held*
         -> its writer is held      -> one try a batch -> UNAVAILABLE at once, until all it wrote is acknowledged
         -> a publish, and its writer has no reader, and the owner wants to know -> nobody_listens, and not written;
                                       looked at until it has one -> heard([partition, ...])

A writer is full while one of its readers does not acknowledge. Only who that reader belongs to can be seen, so the
culprits are those who have readers of a held writer, less those who have acknowledged all of another one
(docs/dds-mapping.md, section 5).
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog
from cyclonedds.core import DDSException
from cyclonedds.pub import DataWriter, Publisher
from cyclonedds.qos import Policy, Qos

from transports.dds import mapping
from transports.dds.link import FAILED_TURN_S, INFINITE_NS, Frame, Participant, binding, delete, reliable, translate
from uprotocol.status import OK, UStatusError, nobody_listens
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

RETRY_S_MIN: Final = 0.000_3  # a full writer has room again within a round trip, on loopback some 100 us
RETRY_S_MAX: Final = 0.02  # while nobody acknowledges, 50 tries a second cost nothing
DRAIN_S: Final = 1.0  # what a writer may wait for its last acknowledgements when the transport is closed, all together
GIVE_WAY_S: Final = 0.05  # and when it makes room for another one: a round trip, even on a busy computer
CROWDED_S: Final = 1.0  # if none could: how long new ones are refused at once, so that the others go on
# how often held writers are looked at: to see one free again must not take longer than a sender's pause
HELD_LOOK_S: Final = 0.25
# a receiver that moves, but slowly, may hold a batch for so many time-outs: then it counts as one that is stuck
TIMEOUTS_MAX: Final = 2
# in all queues, a second of the fastest sender measured; one writer has at most half of it
WAITING_MESSAGES_MAX: Final = 32_768
WAITING_BYTES_MAX: Final = 32 << 20  # the same in bytes: what a small computer can spare
TROUBLES_MAX: Final = 32  # culprits that are named; more than that is the network's trouble, not theirs
# made in one turn, and ...
WRITERS_AT_ONCE: Final = 16
# ... for how long, as jobs are done, before the others have their turn: with thousands of readers a writer takes a ms
TURN_S_MAX: Final = 0.005
# between two turns while more are to be made: the other end takes as long to find a writer, and what comes to it for
# known ones would wait behind its discovery
PAUSE_S: Final = 0.000_5
# writers without a reader that are looked at in one turn each HELD_LOOK_S, some 1.6 us each; the others at the next one
UNHEARD_LOOKS_MAX: Final = 1_024
WITNESSES_MAX: Final = 64  # writers that are asked whether all they have written was acknowledged, some 1 us each

CLOSING: Final = "the transport closes"

log = structlog.get_logger()


class WriterRoute(NamedTuple):
    """Where and how messages of one (source, sink, priority) are written."""

    partition: str
    priority: int
    lifespan_ms: int | None
    is_publish: bool = False


class Batch:
    """What one call sends: a status for each message. `done(statuses)` is called, on the writers' thread, when the last
    one is known.

    `tells_absence`: a publish to a partition that nobody reads is not written, and answers `nobody_listens`.
    """

    __slots__ = ("_done", "_left", "number", "statuses", "tells_absence", "unheard")
    _numbers: Final = itertools.count(1)

    def __init__(self, messages: int, done: Callable[[list[UStatus]], None], *, tells_absence: bool = False) -> None:
        self.number = next(self._numbers)
        self.statuses = [OK] * messages
        self.tells_absence = tells_absence
        self.unheard: dict[str, UStatus] = {}  # by partition: the answer that its publishes get from now on
        self._left, self._done = messages, done

    @property
    def is_settled(self) -> bool:
        return not self._left

    def settle(self, index: int, status: UStatus) -> None:
        self.statuses[index] = status
        self._left -= 1
        if not self._left:
            self._done(self.statuses)


WriterKey = tuple[str, int]  # of a writer: partition and priority
Coming = tuple[Batch, int, WriterRoute, bytes]  # a message for a writer that is not there yet: what `put` was given


class _Waiting(NamedTuple):
    batch: Batch
    place: int
    data: bytes
    route: WriterRoute
    since: float

    @property
    def tells_absence(self) -> bool:
        return self.batch.tells_absence and self.route.is_publish


@dataclass(slots=True)
class _Writer:
    partition: str
    publisher: Publisher
    entity: DataWriter[Frame]
    lifespan_ms: int | None
    written: int = 0  # samples; the number of the last one
    waiting: deque[_Waiting] = field(default_factory=deque)
    moved_at: float = 0.0  # when it last took something of what waits
    held: bool = False
    culprits: frozenset[bytes] = frozenset()  # participants; while it is held
    refused_batch: int = 0  # the last batch of which a message was refused: what follows it there must not pass it
    asked_batch: int = 0  # the last batch for which it was asked whether it has a reader

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.held

    def write(self, data: bytes, lifespan_ms: int | None) -> bool:
        """False if there is no room. Raises DDSException."""
        if self.lifespan_ms is not None and (lifespan_ms is None or lifespan_ms > self.lifespan_ms):
            # It only ever grows: several ttls on one topic must not mean several writers, or order would be lost.
            self.entity.set_qos(Qos(_lifespan(lifespan_ms)))
            self.lifespan_ms = lifespan_ms
        try:
            self.entity.write(Frame(data), mapping.numbered_ns(time.time_ns(), self.written + 1))
        except DDSException as error:
            if error.code != DDSException.DDS_RETCODE_TIMEOUT:
                raise
            return False
        self.written += 1
        return True

    def drained(self, timeout_s: float = 0.0) -> bool:
        """True if all that was written has been acknowledged by everybody."""
        try:
            return self.entity.wait_for_acks(int(timeout_s * 1e9))
        except (AttributeError, DDSException):  # the former is the binding's own mistake: it trips over a time-out
            return False

    def has_reader(self) -> bool:
        """True if DDS knows a reader of another participant (IgnoreLocal) that gets what is written; also if DDS does
        not say, as then writing will tell what is wrong. Costs some 1 us."""
        # the binding's own function asks twice, and makes a list: nothing but the number is wanted
        return bool(self.entity._get_matched_subscriptions(self.entity._ref, None, 0))

    def receivers(self) -> frozenset[bytes]:
        """The participants that have readers of this writer."""
        with binding:
            found = [
                self.entity.get_matched_subscription_data(handle) for handle in self.entity.get_matched_subscriptions()
            ]
        return frozenset(reader.participant_key.bytes for reader in found if reader is not None)

    def close(self) -> None:
        delete(self.entity, self.publisher)


class Writers:
    """Writers by (partition, priority), the least recently used one giving way.

    `submit` and `stop` may be called from anywhere; `put` on this object's thread only, from a submitted job.
    `heard(partitions)` is called on that thread when partitions have a reader whose publishes were answered
    `nobody_listens`, and the batches of those have been answered: within HELD_LOOK_S for each UNHEARD_LOOKS_MAX writers
    that have none.
    """

    def __init__(
        self,
        participant: Participant,
        *,
        writers_max: int,
        timeout_s: float,
        heard: Callable[[list[str]], None] = lambda partitions: None,
    ) -> None:
        self._participant, self._writers_max, self._timeout_s = participant, writers_max, timeout_s
        self._heard = heard
        self._writers: OrderedDict[WriterKey, _Writer] = OrderedDict()
        # for writers that are made next; bounded by the batches that callers wait for
        self._coming: dict[WriterKey, list[Coming]] = {}
        self._full: dict[int, _Writer] = {}  # by identity: those with a queue
        self._held: dict[int, _Writer] = {}  # by identity: those that refuse
        # writers that had no reader for a publish, each in `_writers`, too; and the last batch that was answered so,
        # None once it is settled
        self._unheard: dict[WriterKey, Batch | None] = {}
        self._look_at = 0.0  # when they are looked at again
        self._culprits: dict[frozenset[bytes], str] = {}  # their names; told in the log already
        self._waiting_messages = self._waiting_bytes = 0
        self._pause_s = RETRY_S_MIN
        self._crowded_until = 0.0  # until then nobody is asked again to give way
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = False
        self.troubles: tuple[str, ...] = ()  # who holds what back; whole and new at each change, so anybody may read it
        self.refused = 0  # messages that were answered UNAVAILABLE because a receiver does not take them
        self._thread = threading.Thread(target=self._run, name="dds-writers", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._writers)

    def __repr__(self) -> str:
        return f"writers={len(self)}, waiting={self._waiting_messages}, held={len(self._held)}, refused={self.refused}"

    def partitions(self) -> list[str]:
        """Of all writers. From any thread."""
        return [partition for partition, _ in list(self._writers)]

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """Answer UNAVAILABLE to whatever waits for room, and wait for nobody any more."""
        self._stopping = True
        self._jobs.put(self._fail_all)

    def _run(self) -> None:
        while True:
            try:
                if not self._work():
                    return
            except queue.Empty:
                pass
            except Exception:
                log.exception("a job of the DDS writers failed, and they go on")
                time.sleep(FAILED_TURN_S)
            try:
                self._serve()
            except Exception:
                log.exception("a turn of the DDS writers failed, and they go on")
                time.sleep(FAILED_TURN_S)

    def _work(self) -> bool:
        """The jobs that are there, for a while; False if the last one is done. Raises queue.Empty where no more came in
        time, and what a job raises."""
        timeout_s, until = self._patience(), 0.0
        while True:
            job = self._jobs.get(timeout=timeout_s)
            if job is None:
                return False
            job()
            until = until or time.monotonic() + TURN_S_MAX
            if time.monotonic() >= until:
                return True
            timeout_s = 0.0

    def _patience(self) -> float | None:
        """Seconds until the next turn without a job; None: there is nothing to do."""
        if self._coming:
            return PAUSE_S
        return self._pause_s if self._full else HELD_LOOK_S if self._held or self._unheard else None

    # one message

    def put(self, batch: Batch, index: int, route: WriterRoute, data: bytes) -> None:
        """Write it, or let it wait; its status is settled sooner or later."""
        try:
            key = (route.partition, route.priority)
            writer = self._writers.get(key)
            if writer is None:
                self._coming.setdefault(key, []).append((batch, index, route, data))
                return
            self._writers.move_to_end(key)
            if batch.tells_absence and route.is_publish and self._is_unheard(key, writer, batch):
                batch.settle(index, batch.unheard[route.partition])
            elif writer.waiting:
                self._wait(writer, batch, index, route, data)
            elif writer.refused_batch != batch.number and writer.write(data, route.lifespan_ms):
                batch.settle(index, OK)
            elif writer.held or self._is_suspect(writer):
                self._refuse(writer, batch, index)
            else:
                self._wait(writer, batch, index, route, data)
        except DDSException as error:  # not `translated`: a context manager costs as much as the rest of this function
            batch.settle(index, translate(error, f"writing to {route.partition}").status)

    def _is_unheard(self, key: WriterKey, writer: _Writer, batch: Batch) -> bool:
        """True if a publish of `batch` is not to be written, as nobody reads what that writer writes. DDS is asked once
        for each batch and writer; all writers of the partition answer the same from the first one on that nobody
        reads."""
        if writer.asked_batch != batch.number:
            writer.asked_batch = batch.number
            if not writer.has_reader():
                self._note_unheard(key, batch)
        return writer.partition in batch.unheard

    def _note_unheard(self, key: WriterKey, batch: Batch) -> None:
        partition = key[0]
        if partition not in batch.unheard:
            batch.unheard[partition] = nobody_listens(f"no DDS reader listens to {partition}: nobody has got it")
        if not self._unheard:
            self._look_at = time.monotonic() + HELD_LOOK_S
        self._unheard[key] = batch

    def _make_some(self) -> None:
        """The next writers, and what has come for them in its order."""
        until = time.monotonic() + TURN_S_MAX
        for key in list(itertools.islice(self._coming, WRITERS_AT_ONCE)):
            messages = self._coming.pop(key)
            try:
                self._make(key, messages[0][2].lifespan_ms)
            except Exception as error:  # whatever it is: each has its answer
                if isinstance(error, DDSException):
                    error = translate(error, f"making a writer for {key[0]}")
                status = error.status if isinstance(error, UStatusError) else _failed(key, error)
                for batch, index, _, _ in messages:
                    batch.settle(index, status)
            else:
                for message in messages:
                    self.put(*message)
            if time.monotonic() >= until:
                break

    def _make(self, key: WriterKey, lifespan_ms: int | None) -> None:
        while len(self._writers) >= self._writers_max:
            self._give_way()
        partition, priority = key
        numbered = Policy.Userdata(mapping.NUMBERED)
        qos = reliable(Policy.History.KeepAll, Policy.TransportPriority(priority), _lifespan(lifespan_ms), numbered)
        with binding:
            publisher = Publisher(self._participant.entity, Qos(Policy.Partition([partition])))
            writer = _Writer(partition, publisher, DataWriter(publisher, self._participant.topic, qos), lifespan_ms)
        self._writers[key] = writer

    def _give_way(self) -> None:
        """The least recently used one goes that keeps nothing back. Raises UStatusError(UNAVAILABLE) if there is
        none."""
        now = time.monotonic()
        if now >= self._crowded_until:
            # mostly the first one is it, so that nobody looks through all
            gone = next((key for key, one in self._writers.items() if one.is_idle and one.drained()), None)
            if gone is None:
                oldest = next((key for key, one in self._writers.items() if one.is_idle), None)
                if oldest is not None and self._writers[oldest].drained(GIVE_WAY_S):
                    gone = oldest
            if gone is not None:
                self._unheard.pop(gone, None)  # whoever holds something for it tries again by himself
                self._writers.pop(gone).close()
                return
            self._crowded_until = time.monotonic() + CROWDED_S
        raise UStatusError(
            UCode.UNAVAILABLE, f"all {self._writers_max} DDS writers wait for their receivers: try again later"
        )

    def _wait(self, writer: _Writer, batch: Batch, index: int, route: WriterRoute, data: bytes) -> None:
        if writer.refused_batch == batch.number or self._stopping or not self._has_room(writer, len(data)):
            self._refuse(writer, batch, index)
            return
        now = time.monotonic()
        if not writer.waiting:
            writer.moved_at, self._pause_s = now, RETRY_S_MIN
            self._full[id(writer)] = writer
        writer.waiting.append(_Waiting(batch, index, data, route, now))
        self._waiting_messages += 1
        self._waiting_bytes += len(data)

    def _has_room(self, writer: _Writer, octets: int) -> bool:
        return (
            len(writer.waiting) < WAITING_MESSAGES_MAX // 2
            and self._waiting_messages < WAITING_MESSAGES_MAX
            and (self._waiting_bytes + octets <= WAITING_BYTES_MAX or not self._waiting_messages)
        )

    def _refuse(self, writer: _Writer, batch: Batch, index: int) -> None:
        """Answers UNAVAILABLE, and so to all that follows it in that batch on that writer: a later try keeps the
        order."""
        writer.refused_batch = batch.number
        self.refused += 1
        why = CLOSING if self._stopping else "a receiver has not taken what was sent before: try again when it keeps up"
        batch.settle(index, UStatus(code=UCode.UNAVAILABLE, message=f"{writer.partition}: {why}"))

    # what waits

    def _serve(self) -> None:
        if self._coming:
            self._make_some()
        moved = False
        for writer in list(self._full.values()):
            moved |= self._push(writer)
        if self._full:
            self._pause_s = RETRY_S_MIN if moved else min(self._pause_s * 1.5, RETRY_S_MAX)
        if self._held:
            free = [writer for writer in self._held.values() if writer.drained()]
            for writer in free:
                writer.held = False
                del self._held[id(writer)]
            if free:
                self._tell()
        if self._unheard and time.monotonic() >= self._look_at:
            self._look_for_readers()

    def _look_for_readers(self) -> None:
        """Tell of the partitions that have a reader now. Whose batch is not answered yet waits for that: its sender
        could make nothing of it."""
        heard: dict[str, None] = {}
        for key in list(itertools.islice(self._unheard, UNHEARD_LOOKS_MAX)):
            batch = self._unheard.pop(key)
            if batch is not None and not batch.is_settled:
                self._unheard[key] = batch  # behind the others
            elif self._writers[key].has_reader():
                heard[key[0]] = None
            else:
                self._unheard[key] = None
        self._look_at = time.monotonic() + HELD_LOOK_S
        if heard:
            self._heard(list(heard))

    def _push(self, writer: _Writer) -> bool:
        """Write what fits of what waits; fail it all if that has stood still for too long. True if something fitted."""
        waiting, now, moved = writer.waiting, time.monotonic(), False
        has_reader: bool | None = None  # not asked yet
        try:
            while waiting:
                first = waiting[0]
                if first.tells_absence and has_reader is None:
                    has_reader = writer.has_reader()
                if first.tells_absence and not has_reader:  # its readers have gone while it waited for them
                    self._note_unheard((first.route.partition, first.route.priority), first.batch)
                    self._take_out(writer, first.batch.unheard[first.route.partition])
                elif writer.write(first.data, first.route.lifespan_ms):
                    self._take_out(writer, OK)
                else:
                    break
                moved = True
        except DDSException as error:
            self._take_out(writer, translate(error, f"writing to {writer.partition}").status)
        if moved:
            writer.moved_at = now
        if not waiting:
            self._full.pop(id(writer), None)
        elif now - writer.moved_at >= self._timeout_s or now - waiting[0].since >= TIMEOUTS_MAX * self._timeout_s:
            self._hold(writer)
        return moved

    def _take_out(self, writer: _Writer, status: UStatus | None = None) -> None:
        """The first that waits: answer it, or (None) refuse it."""
        one = writer.waiting.popleft()
        self._waiting_messages -= 1
        self._waiting_bytes -= len(one.data)
        if status is not None:
            one.batch.settle(one.place, status)
        else:
            self._refuse(writer, one.batch, one.place)

    def _fail(self, writer: _Writer) -> None:
        while writer.waiting:
            self._take_out(writer)
        self._full.pop(id(writer), None)

    def _fail_all(self) -> None:
        for messages in self._coming.values():
            for batch, index, route, _ in messages:
                batch.settle(index, UStatus(code=UCode.UNAVAILABLE, message=f"{route.partition}: {CLOSING}"))
        self._coming.clear()
        for writer in list(self._full.values()):
            self._fail(writer)

    # who holds it back

    def _hold(self, writer: _Writer) -> None:
        writer.held, writer.culprits = True, self._culprits_of(writer)
        self._held[id(writer)] = writer
        self._tell()  # first: whoever gets the answer may ask why
        self._fail(writer)

    def _is_suspect(self, writer: _Writer) -> bool:
        """True if it is full because of somebody who holds others back already: that need not be waited for again."""
        if not self._culprits or writer.receivers().isdisjoint(frozenset().union(*self._culprits)):
            return False
        self._hold(writer)
        return True

    def _tell(self) -> None:
        """Name those who hold writers back: in `troubles` while they do, in the log once."""
        held: dict[frozenset[bytes], list[str]] = {}
        for writer in self._held.values():
            held.setdefault(writer.culprits, []).append(writer.partition)
        told: dict[frozenset[bytes], str] = {}
        troubles: list[str] = []
        for culprits, partitions in held.items():
            names = " or ".join(sorted(map(self._participant.name, culprits))) or "a receiver that is gone"
            told[culprits] = self._culprits.get(culprits, names)
            if culprits not in self._culprits:
                log.warning(
                    "a DDS receiver does not take what is sent to it; other topics go on",
                    culprit=names,
                    partition=partitions[0],
                )
            troubles.append(
                f"{names} does not take what is sent to it: {len(partitions)} topic(s) held back, such as "
                f"{partitions[0]}"
            )
        for culprits in self._culprits.keys() - told.keys():
            log.info("a DDS receiver takes what is sent to it again, or has gone", culprit=self._culprits[culprits])
        self._culprits = told
        self.troubles = tuple(troubles[:TROUBLES_MAX])

    def _culprits_of(self, writer: _Writer) -> frozenset[bytes]:
        suspects = writer.receivers()
        if len(suspects) > 1:
            newest = reversed(self._writers.values())
            others = [other for other in newest if other.written and not other.held and not other.waiting]
            for other in others[:WITNESSES_MAX]:
                left = suspects - other.receivers() if other.drained() else suspects
                suspects = left or suspects
        return suspects

    def close(self) -> None:
        """Wait for the last acknowledgements, DRAIN_S at most for all together, and delete everything. Not on this
        object's thread."""
        self.stop()
        self._jobs.put(None)
        self._thread.join()
        deadline = time.monotonic() + DRAIN_S
        for writer in self._writers.values():
            writer.drained(max(0.0, deadline - time.monotonic()))
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        self._full.clear()
        self._held.clear()
        self._unheard.clear()
        self.troubles = ()


def _lifespan(lifespan_ms: int | None) -> Policy.Lifespan:
    return Policy.Lifespan(lifespan_ms * 1_000_000 if lifespan_ms is not None else INFINITE_NS)


def _failed(key: WriterKey, error: Exception) -> UStatus:
    log.exception("a DDS writer could not be made", partition=key[0])
    return UStatus(code=UCode.INTERNAL, message=f"no DDS writer could be made for {key[0]}: {error!r}")
