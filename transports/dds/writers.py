"""The writers of the DDS transport and the messages that wait for them, on one thread that never blocks on a writer.

Batch -> put(route, sample)
         -> no writer yet           -> WRITERS_AT_ONCE are made a turn; messages for existing writers pass meanwhile
         -> its writer has capacity -> DDS, numbered -> acknowledged by all its readers -> OK
                                       a reader leaves before -> UNAVAILABLE: sent again
         -> it is full: its queue   -> tried again, each writer separately, in order -> written, as above
                                       no progress for timeout_s -> UNAVAILABLE for the queue and for what is not
                                       acknowledged; the writer is *held*
         -> its writer is held      -> UNAVAILABLE at once, until all it wrote is acknowledged
         -> a publish or request, its writer has no reader, and the owner wants to know -> nobody_listens, not written;
                                       checked until the writer has one -> heard([partition, ...])

A writer is full while one of its readers does not acknowledge. DDS tells only which participants have readers, so the
culprits are the participants with readers of a held writer, except those that have acknowledged all samples of another
writer (docs/dds-mapping.md, section 5).
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, NamedTuple

import structlog
from cyclonedds.core import DDSException
from cyclonedds.internal import dds_c_t
from cyclonedds.pub import DataWriter, Publisher
from cyclonedds.qos import Policy, Qos

from transports.dds import mapping
from transports.dds.acknowledgements import AckState, Departures, Matched, ReaderWatch, digest_of, judge
from transports.dds.link import (
    FAILED_TURN_S,
    INFINITE_NS,
    Frame,
    Participant,
    Remembered,
    binding,
    delete,
    look_for_acks,
    read_matched_readers,
    read_matched_status,
    reliable,
    translate,
)
from uprotocol.status import OK, UStatusError, nobody_listens
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

WRITE_RETRY_S_MIN: Final = 0.000_3  # a full writer has capacity again within a round trip, on loopback some 100 us
# of a sender: a tenth of a second of the fastest one measured, while the acknowledgements come
IN_FLIGHT_MESSAGES_MAX: Final = 2_048
# between writing and the first look whether it is acknowledged, if nothing else is looked for: a round trip on loopback
ACK_LOOK_S_MIN: Final = 0.000_1
# between two looks: the readers are asked every HEARTBEAT_US (config.py), and most answer within 1 ms
ACK_LOOK_S_MAX: Final = 0.002_5
ACK_LOOKS_MAX: Final = 1_024  # writers that are looked at in one turn, some 3 us each; the others in the next one
# Acknowledgements come in the order of writing. So a turn ends after so many writers that are not acknowledged yet, ...
PENDING_LOOKS_MIN: Final = 16
# ... or this part of all, so that none waits for more turns while a stuck receiver holds those before it
PENDING_LOOKS_PART: Final = 8
# A writer that always writes is never drained. After so long it writes nothing until it is: a round trip
ACK_ROUND_S: Final = 0.05
# samples that were acknowledged too late and will be sent again, in all writers: some 100 octets of memory each. Those
# that are forgotten come twice
LATE_SAMPLES_MAX: Final = 65_536
RELIABILITIES_MAX: Final = 65_536  # readers of which is kept whether they are reliable
WRITE_RETRY_S_MAX: Final = 0.02  # while nobody acknowledges; 50 tries a second cost nothing
LAST_ACKS_S_MAX: Final = 1.0  # for the last acknowledgements of all writers together, when the transport is closed
GIVE_WAY_S: Final = 0.05  # for those of a writer that is to be replaced: a round trip, even on a busy computer
CROWDED_S: Final = 1.0  # if no writer can be replaced, new ones are refused at once for so long
# between two checks of held writers: shorter than the pause of a sender that tries again
HELD_LOOK_S: Final = 0.25
# a receiver that makes slow progress may hold a batch for so many time-outs; then it counts as stuck
TIMEOUTS_MAX: Final = 2
# in all queues, a second of the fastest sender measured; one writer has at most half of it
WRITES_WAITING_MAX: Final = 32_768
WRITES_WAITING_BYTES_MAX: Final = 32 << 20  # in all queues: what a small computer can spare
CULPRITS_NAMED_MAX: Final = 32  # culprits that are named; with more of them the network is at fault
# new writers in one turn, and ...
WRITERS_AT_ONCE: Final = 16
# ... the time limit of that, and of the jobs of one turn: with thousands of readers a writer takes 1 ms
TURN_S_MAX: Final = 0.005
# between two turns while more writers are to be made: the other end takes as long to find a writer, and messages for
# its known ones would wait behind its discovery
PAUSE_S: Final = 0.000_5
# writers without a reader that are checked in one turn each HELD_LOOK_S, some 1.6 us each; the others at the next one
UNHEARD_LOOKS_MAX: Final = 1_024
WRITERS_ASKED_MAX: Final = 64  # writers that are asked whether all they have written was acknowledged, some 1 us each

HANDLES_MIN: Final = 8  # readers whose handles are read in one call

CLOSING: Final = "the transport closes"
LEFT: Final = "a receiver has left before it acknowledged this: it is sent again"
NOT_ACKNOWLEDGED: Final = "a receiver has not acknowledged this in time: try again when it does"

log = structlog.get_logger()


class WriterRoute(NamedTuple):
    """Where and how messages of one (source, sink, priority) are written."""

    partition: str
    priority: int
    lifespan_ms: int | None
    asks: bool = False  # a publish or request: the owner may want to know that nobody reads it


class Batch:
    """The statuses of the messages of one call. `done(statuses)` is called on the writers' thread when all are known.

    `tells_absence`: a publish or request to a partition that nobody reads is not written and answers `nobody_listens`.
    """

    __slots__ = ("_done", "_last_with_it", "_left", "number", "statuses", "tells_absence", "unheard")
    _newest = 0  # number of the newest batch; used on the event loop only

    def __init__(self, messages: int, done: Callable[[list[UStatus]], None], *, tells_absence: bool = False) -> None:
        Batch._newest += 1
        self.number = Batch._newest
        self._last_with_it = 0  # number of the newest batch when the sender got the answers; 0 before
        self.statuses = [OK] * messages
        self.tells_absence = tells_absence
        self.unheard: dict[str, UStatus] = {}  # partition -> the answer for its publishes
        self._left, self._done = messages, done

    def returned(self) -> None:
        """The sender gets the answers now. Called on the event loop."""
        self._last_with_it = Batch._newest

    def was_known_to_sender_of(self, later: Batch) -> bool:
        """True if `later` was sent after the answers to this batch had arrived."""
        return bool(self._last_with_it) and later.number > self._last_with_it

    @property
    def is_settled(self) -> bool:
        return not self._left

    def settle(self, index: int, status: UStatus) -> None:
        self.statuses[index] = status
        self._left -= 1
        if not self._left:
            self._done(self.statuses)


UNMATCHED: Final = Matched(0, 0)

WriterKey = tuple[str, int]  # partition and priority


class Outgoing(NamedTuple):
    """A message of a batch, until its status is settled."""

    batch: Batch
    place: int  # in `batch`
    route: WriterRoute
    data: bytes

    @property
    def tells_absence(self) -> bool:
        return self.batch.tells_absence and self.route.asks

    def settle(self, status: UStatus) -> None:
        self.batch.settle(self.place, status)


@dataclass(slots=True)
class _Writer:
    partition: str
    publisher: Publisher
    entity: DataWriter[Frame]
    lifespan_ms: int | None
    written: int = 0  # number of samples, and the number in the last one
    waiting: deque[tuple[Outgoing, float]] = field(default_factory=deque)  # each since when; time.monotonic()
    progress_at: float = 0.0  # when it last took a waiting message; time.monotonic()
    unacknowledged: list[Outgoing] = field(default_factory=list)  # written; not answered
    # when the first of these was written, and when the last look found a new one; time.monotonic()
    unacknowledged_since: float = 0.0
    written_at: float = 0.0
    written_then: int = 0  # `written` at that look
    readers: ReaderWatch = field(default_factory=ReaderWatch)
    late: list[bytes] = field(default_factory=list)  # while it is held: digests of what was not acknowledged in time
    held: bool = False
    culprits: frozenset[bytes] = frozenset()  # participants; while it is held
    # batches with a refused message: what was sent before their answers arrived must not overtake it
    refusals: list[Batch] = field(default_factory=list)
    unheard_batch: Batch | None = None  # the last batch with a publish that nobody read: likewise
    asked_batch: int = 0  # the last batch for which `has_reader` was called
    matched: Matched = UNMATCHED  # at the last call of `read_matched`
    # what the C functions fill, instead of a new object for each call
    _status: Any = field(default_factory=dds_c_t.publication_matched_status)
    _handles: Any = field(default_factory=dds_c_t.instance_handle * HANDLES_MIN)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.held and not self.unacknowledged

    def must_refuse(self, batch: Batch) -> bool:
        """True if an earlier message was refused and the sender of `batch` could not know it yet."""
        self.refusals = [refused for refused in self.refusals if not refused.was_known_to_sender_of(batch)]
        return bool(self.refusals)

    def note_refusal(self, batch: Batch) -> None:
        if not self.refusals or self.refusals[-1] is not batch:
            self.refusals.append(batch)

    def write(self, data: bytes, lifespan_ms: int | None) -> bool:
        """False if the writer is full. Raises DDSException."""
        if self.lifespan_ms is not None and (lifespan_ms is None or lifespan_ms > self.lifespan_ms):
            # It never shrinks: a writer for each ttl of a topic would lose the order.
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
        """True if all readers have acknowledged all samples. Costs some 1 us without a time-out."""
        if not timeout_s:
            return bool(look_for_acks(self.entity._ref, 0) == 0)
        try:
            return self.entity.wait_for_acks(int(timeout_s * 1e9))
        except (AttributeError, DDSException):  # the former is an error in the binding at a time-out
            return False

    def read_matched(self) -> Matched:
        """Read PUBLICATION_MATCHED into `matched`, and return it. Costs some 1 us. Raises DDSException."""
        status = self._status
        code = read_matched_status(self.entity._ref, status)
        if code < 0:
            raise DDSException(code, f"while asking for the readers of {self.partition}")
        matched = self.matched
        if matched.total != status.total_count or matched.now != status.current_count:
            self.matched = matched = Matched(status.total_count, status.current_count)
        return matched

    def handles(self) -> list[int]:
        """The handles of the matched readers. Costs some 1 us. Raises DDSException."""
        while True:
            count = read_matched_readers(self.entity._ref, self._handles, len(self._handles))
            if count < 0:
                raise DDSException(count, f"while asking for the readers of {self.partition}")
            if count <= len(self._handles):
                return list(self._handles[:count])
            self._handles = (dds_c_t.instance_handle * (2 * count))()

    def has_reader(self) -> bool:
        """True if DDS knows a matching reader of another participant (IgnoreLocal); also if DDS fails to answer, as
        writing then reports the error. Updates `matched`."""
        try:
            return bool(self.read_matched().now)
        except DDSException:
            return True

    def receivers(self) -> frozenset[bytes]:
        """The participants that have readers of this writer."""
        with binding:
            found = [
                self.entity.get_matched_subscription_data(handle) for handle in self.entity.get_matched_subscriptions()
            ]
        return frozenset(reader.participant_key.bytes for reader in found if reader is not None)

    def close(self) -> None:
        delete(self.entity, self.publisher)


class _HeldWriters:
    """Writers that a receiver holds back, and the participants that do so: in `troubles` meanwhile, in the log once."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._writers: dict[int, _Writer] = {}  # by identity
        self.culprits: dict[frozenset[bytes], str] = {}  # of each writer -> their names, as logged
        self.troubles: tuple[str, ...] = ()  # replaced at each change, so any thread may read it

    def __len__(self) -> int:
        return len(self._writers)

    def add(self, writer: _Writer, culprits: frozenset[bytes]) -> None:
        writer.held, writer.culprits = True, culprits
        self._writers[id(writer)] = writer
        self._report()

    def release(self) -> list[_Writer]:
        released = [writer for writer in self._writers.values() if writer.drained()]
        for writer in released:
            writer.held = False
            del self._writers[id(writer)]
        if released:
            self._report()
        return released

    def clear(self) -> None:
        self._writers.clear()
        self.troubles = ()

    def _report(self) -> None:
        held: dict[frozenset[bytes], list[str]] = {}
        for writer in self._writers.values():
            held.setdefault(writer.culprits, []).append(writer.partition)
        logged: dict[frozenset[bytes], str] = {}
        troubles: list[str] = []
        for culprits, partitions in held.items():
            names = " or ".join(sorted(map(self._participant.name, culprits))) or "a receiver that no longer exists"
            logged[culprits] = self.culprits.get(culprits, names)
            if culprits not in self.culprits:
                log.warning(
                    "a DDS receiver does not take what is sent to it; other topics go on",
                    culprit=names,
                    partition=partitions[0],
                    _kind="DDS receiver",
                )
            troubles.append(
                f"{names} does not take what is sent to it: {len(partitions)} topic(s) held back, such as "
                f"{partitions[0]}"
            )
        for culprits in self.culprits.keys() - logged.keys():
            what = "a DDS receiver takes what is sent to it again, or has ended"
            log.info(what, culprit=self.culprits[culprits], _kind="DDS receiver")
        self.culprits = logged
        self.troubles = tuple(troubles[:CULPRITS_NAMED_MAX])


class Writers:
    """Writers by (partition, priority). A new one beyond the limit replaces the least recently used one.

    `submit`, `stop`, `partitions` and `have_matched` may be called from any thread; `put` only from a submitted job.
    `heard(partitions)` is called on the thread of this object when partitions whose publishes were answered
    `nobody_listens` have a reader: within HELD_LOOK_S for each UNHEARD_LOOKS_MAX writers without one.
    """

    def __init__(
        self,
        participant: Participant,
        *,
        writers_max: int,
        timeout_s: float,
        heard: Callable[[list[str]], None] = lambda partitions: None,
        departures: Departures | None = None,
    ) -> None:
        self._participant, self._writers_max, self._timeout_s = participant, writers_max, timeout_s
        self._heard = heard
        self._writers: OrderedDict[WriterKey, _Writer] = OrderedDict()
        # messages for writers that are made next; bounded by the batches that callers wait for
        self._without_writer: dict[WriterKey, list[Outgoing]] = {}
        self._full: dict[int, _Writer] = {}  # by identity: writers with a queue
        self._held = _HeldWriters(participant)
        self._unacknowledged: OrderedDict[int, _Writer] = OrderedDict()  # by identity
        self._ack_pause_s = WRITE_RETRY_S_MIN
        # digests of samples that were acknowledged after their sender had been told to send them again -> True. So a
        # receiver that is slower than the time-out gets each once, and its sender makes progress
        self._late: Remembered[bytes, bool] = Remembered(LATE_SAMPLES_MAX)
        self._reliabilities: Remembered[int, bool] = Remembered(RELIABILITIES_MAX)  # by handle of a reader
        # writers that had no reader, each in `_writers`, too -> the last batch that was answered so; None
        # once all its messages are answered
        self._unheard: dict[WriterKey, Batch | None] = {}
        self._look_at = 0.0  # when they are checked next; time.monotonic()
        self._waiting_messages = self._waiting_bytes = 0
        self._pause_s = WRITE_RETRY_S_MIN
        self._crowded_until = 0.0  # until then no writer is replaced; time.monotonic()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = False
        self._departures = departures or Departures()
        self.refused = 0  # messages answered UNAVAILABLE because a receiver does not take them
        self._thread = threading.Thread(target=self._run, name="dds-writers", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._writers)

    def __repr__(self) -> str:
        return f"writers={len(self)}, waiting={self._waiting_messages}, held={len(self._held)}, refused={self.refused}"

    @property
    def troubles(self) -> tuple[str, ...]:
        """Which participants hold back which writers. From any thread."""
        return self._held.troubles

    def have_matched(self, readers: Mapping[int, Sequence[str]]) -> bool:
        """True if each writer has matched those of the foreign `readers` that it writes to: handle -> partitions. From
        any thread."""
        names: dict[str, set[int]] = {}
        patterns: list[tuple[str, int]] = []
        for handle, partitions in readers.items():
            for partition in partitions:
                if mapping.is_pattern(partition):
                    patterns.append((partition, handle))
                else:
                    names.setdefault(partition, set()).add(handle)
        for (partition, _), writer in list(self._writers.items()):
            handles = names.get(partition, set()).union(
                [handle for pattern, handle in patterns if fnmatchcase(partition, pattern)]
            )
            with contextlib.suppress(DDSException):  # it is closed meanwhile
                if handles and not handles.issubset(writer.entity.get_matched_subscriptions()):
                    return False
        return True

    def partitions(self) -> list[str]:
        return [partition for partition, _ in list(self._writers)]

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """Answer UNAVAILABLE to all waiting messages, and let no message wait from now on."""
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
        """Run submitted jobs for up to TURN_S_MAX. Returns False after the last job. Raises queue.Empty if no job came
        before the next turn is due, and exceptions of jobs."""
        timeout_s, until = self._pause(), 0.0
        while True:
            job = self._jobs.get(timeout=timeout_s)
            if job is None:
                return False
            job()
            until = until or time.monotonic() + TURN_S_MAX
            if time.monotonic() >= until:
                return True
            timeout_s = 0.0

    def _pause(self) -> float | None:
        """Seconds until the next turn if no job comes; None: without limit."""
        if self._without_writer:
            return PAUSE_S
        pauses = [self._pause_s] if self._full else []
        if self._unacknowledged:
            pauses.append(self._ack_pause_s)
        if self._held or self._unheard:
            pauses.append(HELD_LOOK_S)
        return min(pauses, default=None)

    # one message

    def put(self, message: Outgoing) -> None:
        """Write the sample or let it wait. Its status is settled then or later."""
        batch, route = message.batch, message.route
        try:
            key = (route.partition, route.priority)
            writer = self._writers.get(key)
            if writer is None:
                self._without_writer.setdefault(key, []).append(message)
                return
            self._writers.move_to_end(key)
            if batch.tells_absence and route.asks and self._is_unheard(key, writer, batch):
                message.settle(batch.unheard[route.partition])
            elif writer.held or self._stopping or (writer.refusals and writer.must_refuse(batch)):
                self._refuse(writer, message)
            elif self._late and self._late.pop(digest_of(writer.partition, message.data), False):
                message.settle(OK)
            elif writer.waiting or self._must_drain(writer, batch):
                self._wait(writer, message)
            elif self._write(writer, message):
                return
            elif self._hold_if_suspect(writer):
                self._refuse(writer, message)
            else:
                self._wait(writer, message)
        except DDSException as error:  # not `translated`: a context manager costs as much as the rest of this function
            message.settle(translate(error, f"writing to {route.partition}").status)

    def _write(self, writer: _Writer, message: Outgoing) -> bool:
        """False if the writer is full. Otherwise the message is answered when it is acknowledged. Raises
        DDSException."""
        is_first = not writer.unacknowledged
        if is_first:
            if writer.asked_batch != message.batch.number:  # else `has_reader` has read it
                writer.read_matched()
            writer.readers.begin(writer.matched, partial(self._readers_of, writer))
        if not writer.write(message.data, message.route.lifespan_ms):
            return False
        writer.unacknowledged.append(message)
        if is_first:
            writer.unacknowledged_since = writer.written_at = time.monotonic()
            writer.written_then = writer.written
            self._ack_pause_s = WRITE_RETRY_S_MIN if self._unacknowledged else ACK_LOOK_S_MIN
            self._unacknowledged[id(writer)] = writer
        return True

    def _readers_of(self, writer: _Writer, may_ask: bool) -> dict[int, bool | None]:
        """See ReadReaders. A reader that DDS no longer knows counts as reliable."""
        readers: dict[int, bool | None] = {}
        for handle in writer.handles():
            if may_ask and handle not in self._reliabilities:
                with binding:
                    reader = writer.entity.get_matched_subscription_data(handle)
                self._reliabilities[handle] = reader is None or Policy.Reliability.BestEffort not in reader.qos
            readers[handle] = self._reliabilities.get(handle)
        return readers

    def _must_drain(self, writer: _Writer, batch: Batch) -> bool:
        """True if `writer` has to be drained before it writes messages of another batch."""
        return (
            writer.written_at - writer.unacknowledged_since >= ACK_ROUND_S  # as of the last look
            and bool(writer.unacknowledged)
            and writer.unacknowledged[0].batch is not batch
        )

    def _is_unheard(self, key: WriterKey, writer: _Writer, batch: Batch) -> bool:
        """True if a publish or request of `batch` must not be written because `writer` has no reader. DDS is asked
        once for each batch and writer; once one writer of a partition has no reader, the answer is the same for the
        others."""
        if writer.asked_batch != batch.number:
            writer.asked_batch = batch.number
            unheard = writer.unheard_batch
            if unheard is not None and unheard.was_known_to_sender_of(batch):
                unheard = writer.unheard_batch = None
            if unheard is not None or not writer.has_reader():
                self._note_unheard(key, batch)
                writer.unheard_batch = batch
        return writer.partition in batch.unheard

    def _note_unheard(self, key: WriterKey, batch: Batch) -> None:
        partition = key[0]
        if partition not in batch.unheard:
            batch.unheard[partition] = nobody_listens(f"no DDS reader listens to {partition}: nobody has got it")
        if not self._unheard:
            self._look_at = time.monotonic() + HELD_LOOK_S
        self._unheard[key] = batch

    def _make_some(self) -> None:
        """Make the next writers, and put the messages that wait for them in order."""
        until = time.monotonic() + TURN_S_MAX
        for key in list(itertools.islice(self._without_writer, WRITERS_AT_ONCE)):
            messages = self._without_writer.pop(key)
            try:
                self._make(key, messages[0].route.lifespan_ms)
            except Exception as error:  # each message gets an answer
                if isinstance(error, DDSException):
                    error = translate(error, f"making a writer for {key[0]}")
                elif not isinstance(error, UStatusError):
                    log.exception("a DDS writer could not be made", partition=key[0])
                    error = UStatusError(UCode.INTERNAL, f"no DDS writer could be made for {key[0]}: {error!r}")
                status = error.status
                for message in messages:
                    message.settle(status)
            else:
                for message in messages:
                    self.put(message)
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
        """Close the least recently used writer that waits for nothing. Raises UStatusError(UNAVAILABLE) if all wait."""
        if time.monotonic() >= self._crowded_until:
            replaced = self._find_replaceable()
            if replaced is not None:
                self._unheard.pop(replaced, None)  # its senders try again after a time
                self._writers.pop(replaced).close()
                return
            self._crowded_until = time.monotonic() + CROWDED_S
        raise UStatusError(
            UCode.UNAVAILABLE, f"all {self._writers_max} DDS writers wait for their receivers: try again later"
        )

    def _find_replaceable(self) -> WriterKey | None:
        """The least recently used writer that is idle, or else one whose samples are acknowledged within GIVE_WAY_S:
        with more routes than writers each writer may have written something just now."""
        for key, writer in self._writers.items():
            if writer.is_idle and writer.drained():
                return key
        for key, writer in self._writers.items():
            if not writer.waiting and not writer.held:
                if not writer.drained(GIVE_WAY_S):
                    return None
                return key if writer.is_idle or self._settle(writer) is AckState.ACKNOWLEDGED else None
        return None

    def _wait(self, writer: _Writer, message: Outgoing) -> None:
        if self._stopping or not self._has_capacity(writer, len(message.data)):
            self._refuse(writer, message)
            return
        now = time.monotonic()
        if not writer.waiting:
            writer.progress_at, self._pause_s = now, WRITE_RETRY_S_MIN
            self._full[id(writer)] = writer
        writer.waiting.append((message, now))
        self._waiting_messages += 1
        self._waiting_bytes += len(message.data)

    def _has_capacity(self, writer: _Writer, octets: int) -> bool:
        return (
            len(writer.waiting) < WRITES_WAITING_MAX // 2
            and self._waiting_messages < WRITES_WAITING_MAX
            and (self._waiting_bytes + octets <= WRITES_WAITING_BYTES_MAX or not self._waiting_messages)
        )

    def _refuse(self, writer: _Writer, message: Outgoing) -> None:
        """Answer UNAVAILABLE, as to all later messages of that batch for that writer: so the order survives a retry."""
        writer.note_refusal(message.batch)
        self.refused += 1
        why = CLOSING if self._stopping else "a receiver has not taken what was sent before: try again when it keeps up"
        message.settle(UStatus(code=UCode.UNAVAILABLE, message=f"{writer.partition}: {why}"))

    # waiting messages

    def _serve(self) -> None:
        if self._without_writer:
            self._make_some()
        progressed = False
        for writer in list(self._full.values()):
            progressed |= self._push(writer)
        if self._full:
            self._pause_s = WRITE_RETRY_S_MIN if progressed else min(self._pause_s * 1.5, WRITE_RETRY_S_MAX)
        if self._unacknowledged:
            self._look_for_acknowledgements()
        for writer in self._held.release():
            self._released(writer)
        if self._unheard and time.monotonic() >= self._look_at:
            self._look_for_readers()

    def _look_for_acknowledgements(self) -> None:
        pending_max = max(PENDING_LOOKS_MIN, len(self._unacknowledged) // PENDING_LOOKS_PART)
        progressed, pending = False, 0
        for identity in list(itertools.islice(self._unacknowledged, ACK_LOOKS_MAX)):
            writer = self._unacknowledged[identity]
            state = self._settle(writer)
            progressed |= state is AckState.ACKNOWLEDGED
            if state is AckState.PENDING:
                self._unacknowledged.move_to_end(identity)
                pending += 1
                if pending >= pending_max:
                    break
        self._ack_pause_s = WRITE_RETRY_S_MIN if progressed else min(self._ack_pause_s * 1.5, ACK_LOOK_S_MAX)

    def _settle(self, writer: _Writer) -> AckState:
        """Answer what is not acknowledged yet, if its state is known now."""
        state = self._judge(writer)
        if state is AckState.ACKNOWLEDGED:
            self._answer(writer, OK)
        elif state is AckState.LOST:
            self._lose(writer)
        elif state is AckState.OVERDUE:
            self._hold(writer)
        return state

    def _judge(self, writer: _Writer) -> AckState:
        now = time.monotonic()
        if writer.written != writer.written_then:
            writer.written_then, writer.written_at = writer.written, now
        is_drained, waited_s = writer.drained(), now - writer.written_at
        try:
            if not is_drained and waited_s >= ACK_ROUND_S:
                writer.readers.complete(partial(self._readers_of, writer))
            has_lost_reader = (is_drained or waited_s >= self._timeout_s) and self._has_lost_reader(writer)
        except DDSException as error:
            log.warning("a DDS writer does not say what was acknowledged", why=str(error))
            return AckState.LOST
        return judge(
            is_drained=is_drained, has_lost_reader=has_lost_reader, waited_s=waited_s, timeout_s=self._timeout_s
        )

    def _has_lost_reader(self, writer: _Writer) -> bool:
        """See ReaderWatch. Raises DDSException."""
        present = writer.handles()
        return writer.readers.has_lost_reader(writer.read_matched(), present, partial(self._readers_of, writer))

    def _answer(self, writer: _Writer, status: UStatus) -> None:
        answered, writer.unacknowledged = writer.unacknowledged, []
        self._unacknowledged.pop(id(writer), None)
        for one in answered:
            one.settle(status)

    def _give_up(self, writer: _Writer, why: str) -> None:
        """Answer UNAVAILABLE to what was written and is not acknowledged, and to all that waits behind it."""
        self.refused += len(writer.unacknowledged)
        for one in writer.unacknowledged:
            writer.note_refusal(one.batch)
        self._answer(writer, UStatus(code=UCode.UNAVAILABLE, message=f"{writer.partition}: {why}"))
        self._fail(writer)

    def _lose(self, writer: _Writer) -> None:
        self._departures.add(writer.partition, time.time())
        log.warning(
            "a DDS receiver has left before it acknowledged what was sent to it: it is sent again",
            partition=writer.partition,
            messages=len(writer.unacknowledged),
        )
        self._give_up(writer, LEFT)

    def _released(self, writer: _Writer) -> None:
        """What a held writer had written is acknowledged now, unless a reader has left meanwhile. Then it is sent
        again."""
        late, writer.late = writer.late, []
        with contextlib.suppress(DDSException):  # not known: it is sent again
            if late and not self._has_lost_reader(writer):
                self._late.update(dict.fromkeys(late, True))

    def _look_for_readers(self) -> None:
        """Report the partitions that have a reader now. A writer whose batch is not answered yet waits for that: its
        sender must first know that nobody listened."""
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
        """Write as many waiting messages as the writer takes; refuse them all after too long without progress. True if
        some were written."""
        waiting, now, progressed = writer.waiting, time.monotonic(), False
        has_reader: bool | None = None  # None: not asked yet
        try:
            while waiting:
                first, _ = waiting[0]
                if self._must_drain(writer, first.batch):
                    break
                if first.tells_absence and has_reader is None:
                    has_reader = writer.has_reader()
                if first.tells_absence and not has_reader:  # its readers ended while it waited
                    self._note_unheard((first.route.partition, first.route.priority), first.batch)
                    writer.unheard_batch = first.batch
                    self._take_first(writer).settle(first.batch.unheard[first.route.partition])
                elif self._write(writer, first):
                    self._take_first(writer)
                else:
                    break
                progressed = True
        except DDSException as error:
            self._take_first(writer).settle(translate(error, f"writing to {writer.partition}").status)
        if progressed:
            writer.progress_at = now
        if not waiting:
            self._full.pop(id(writer), None)
        elif now - writer.progress_at >= self._timeout_s or now - waiting[0][1] >= TIMEOUTS_MAX * self._timeout_s:
            self._hold(writer)
        return progressed

    def _take_first(self, writer: _Writer) -> Outgoing:
        first, _ = writer.waiting.popleft()
        self._waiting_messages -= 1
        self._waiting_bytes -= len(first.data)
        return first

    def _fail(self, writer: _Writer) -> None:
        while writer.waiting:
            self._refuse(writer, self._take_first(writer))
        self._full.pop(id(writer), None)

    def _fail_all(self) -> None:
        for messages in self._without_writer.values():
            for message in messages:
                message.settle(UStatus(code=UCode.UNAVAILABLE, message=f"{message.route.partition}: {CLOSING}"))
        self._without_writer.clear()
        for writer in list(self._full.values()):
            self._fail(writer)

    def _hold(self, writer: _Writer) -> None:
        self._held.add(writer, self._culprits_of(writer))  # first: a sender may read `troubles` when it is answered
        writer.late = [digest_of(writer.partition, one.data) for one in writer.unacknowledged]
        self._give_up(writer, NOT_ACKNOWLEDGED)

    def _hold_if_suspect(self, writer: _Writer) -> bool:
        """True if a receiver of this full writer holds others back already: then there is no need to wait for it."""
        if not self._held.culprits or writer.receivers().isdisjoint(frozenset().union(*self._held.culprits)):
            return False
        self._hold(writer)
        return True

    def _culprits_of(self, writer: _Writer) -> frozenset[bytes]:
        suspects = writer.receivers()
        if len(suspects) > 1:
            newest = reversed(self._writers.values())
            others = [other for other in newest if other.written and not other.held and not other.waiting]
            for other in others[:WRITERS_ASKED_MAX]:
                left = suspects - other.receivers() if other.drained() else suspects
                suspects = left or suspects
        return suspects

    def close(self) -> None:
        """Wait for the last acknowledgements, LAST_ACKS_S_MAX in all, and delete everything. Not on this object's
        thread."""
        self.stop()
        self._jobs.put(None)
        self._thread.join()
        deadline = time.monotonic() + LAST_ACKS_S_MAX
        for writer in self._writers.values():
            is_drained = writer.drained(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(DDSException):  # not known: it is sent again
                if is_drained and not self._has_lost_reader(writer):
                    self._answer(writer, OK)
            self._give_up(writer, CLOSING)
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        self._full.clear()
        self._late.clear()
        self._held.clear()
        self._unheard.clear()


def _lifespan(lifespan_ms: int | None) -> Policy.Lifespan:
    return Policy.Lifespan(lifespan_ms * 1_000_000 if lifespan_ms is not None else INFINITE_NS)
