"""Which other participants exist, and which of our readers they have found (docs/dds-mapping.md, section 8).

a foreign reader appears -> all our writers have matched it (Writers.have_matched)
                         -> announce its key     -> topic uprotocol/v1/seen -> its owner knows: our messages reach it
a participant that makes announcements appears or ends -> changed(peers, seen) -> registrations that wait for all
a participant appears -> its name, for logs and troubles
              ends and comes back -> logged: messages sent meanwhile may be missing
an endpoint appears whose QoS is incompatible -> logged once, and in `misfits` while it exists
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import structlog
from cyclonedds.builtin import (
    BuiltinDataReader,
    BuiltinTopicDcpsParticipant,
    BuiltinTopicDcpsPublication,
    BuiltinTopicDcpsSubscription,
)
from cyclonedds.core import DDSException, InstanceState
from cyclonedds.pub import DataWriter
from cyclonedds.qos import Policy, Qos

from transports.dds import mapping
from transports.dds.link import (
    INFINITE_NS,
    READER_SAMPLES_MAX,
    TAKE_SAMPLES_MAX,
    Frame,
    Participant,
    Remembered,
    ServingThread,
    binding,
    delete,
    make_reader,
    reliable,
)
from uprotocol.status import UStatusError

SEEN_DEPTH: Final = 64  # announcements kept for later participants; each names all readers found in one turn
ENDPOINTS_TAKE_MAX: Final = 64  # discovery samples per turn: some ms in which no message can be taken
UNANNOUNCED_MAX: Final = 65_536  # readers found and not announced yet, 1 MB; for others the peer waits for its time-out
# for our writers to match the readers of one turn: microseconds, unless Cyclone's thread does not run. Longer for a
# reader that never matches, or has ended
MATCH_S_MAX: Final = 0.25
MATCH_LOOK_S: Final = 0.000_5  # between two checks

# participants whose lease ended: one that comes back with the same key was only silent
LOST_REMEMBERED_MAX: Final = 1_024
MISFITS_MAX: Final = 256  # incompatible endpoints that are kept
NAME_CHARS_MAX: Final = 200  # of the name of a participant

Seen = list[tuple[bytes, list[bytes]]]  # (participant, keys of our readers that it has found)

log = structlog.get_logger()


class Misfit(NamedTuple):
    """A foreign endpoint that is incompatible with ours."""

    is_writer: bool
    partitions: tuple[str, ...]
    participant: bytes
    why: str


class RollCall(ServingThread):
    """Announces, on a topic of its own, which readers this participant has found: all that it writes from then on
    reaches them.

    `changed(peers, seen)` is called when discovery has found something. `peers`: the participants that make such
    announcements; `seen`: their new announcements of our readers.

    DDS tells about a foreign reader just before its own thread matches our writers with it. An announcement in between
    would come too early: the reader would miss what is written then. So each waits for `have_matched(readers)`, where
    `readers` maps the handles of new readers to their partitions.
    """

    _PUBLICATIONS, _SUBSCRIPTIONS, _SEEN, _PARTICIPANTS = 1, 2, 3, 4

    def __init__(
        self,
        participant: Participant,
        changed: Callable[[frozenset[bytes], Seen], None],
        have_matched: Callable[[Mapping[int, Sequence[str]]], bool],
    ) -> None:
        super().__init__(participant, "dds-roll-call")
        self._own, self._changed, self._have_matched = participant.key, changed, have_matched
        # participants whose lease has ended -> when; time.monotonic()
        self._lost: Remembered[bytes, float] = Remembered(LOST_REMEMBERED_MAX)
        self.returned = 0  # number of participants that came back after the end of their lease
        self.misfits: dict[bytes, Misfit] = {}  # by endpoint; replaced at each change, so any thread may read it
        self.misfits_found = 0
        self._peers: dict[bytes, bytes] = {}  # endpoint -> participant
        entity, topic, kept = participant.entity, participant.seen_topic, Policy.Durability.TransientLocal
        with binding:
            self._writer = DataWriter(entity, topic, reliable(Policy.History.KeepLast(SEEN_DEPTH), durability=kept))
            self._seen = make_reader(entity, topic, READER_SAMPLES_MAX, durability=kept)
            self._participants = BuiltinDataReader(entity, BuiltinTopicDcpsParticipant)
            self._publications = BuiltinDataReader(entity, BuiltinTopicDcpsPublication)
            self._subscriptions = BuiltinDataReader(entity, BuiltinTopicDcpsSubscription)
        self._unannounced: list[bytes] = []
        self._conditions = [
            self._watch(self._publications, self._PUBLICATIONS),
            self._watch(self._subscriptions, self._SUBSCRIPTIONS),
            self._watch(self._seen, self._SEEN),
            self._watch(self._participants, self._PARTICIPANTS),
        ]
        self._thread.start()

    def _serve(self, tokens: list[int]) -> None:
        if self._PARTICIPANTS in tokens:
            self._find_participants()
        if self._SUBSCRIPTIONS in tokens:
            self._find_readers()
        if self._unannounced:
            self._announce()
        if self._PUBLICATIONS in tokens:
            self._find_peers()
        seen = self._take_announcements() if self._SEEN in tokens else []
        if tokens:
            self._changed(frozenset(self._peers.values()), seen)

    def _find_participants(self) -> None:
        for found in found_in(self._participants):
            key = found.key.bytes
            if not is_alive(found):
                if self._participant.names.pop(key, None) is not None:
                    self._lost[key] = time.monotonic()
                continue
            self._participant.names[key] = name_in(found.qos)
            lost_at = self._lost.pop(key, None)
            if lost_at is not None:
                self.returned += 1
                log.warning(
                    "a DDS participant was silent for longer than its lease and is back: messages sent between it and "
                    "us meanwhile, or not acknowledged before, may be missing",
                    participant=self._participant.name(key),
                    seconds_after_lease=round(time.monotonic() - lost_at, 1),
                )

    def _find_readers(self) -> None:
        new: dict[int, Sequence[str]] = {}
        for found in found_in(self._subscriptions):
            if not is_alive(found):
                self._forget(found.key.bytes)
            elif found.topic_name == mapping.TOPIC and found.participant_key.bytes != self._own:
                self._unannounced.append(found.key.bytes)
                if self._judge(found, reader_misfit):
                    new[found.sample_info.instance_handle] = _partitions(found.qos)
        del self._unannounced[UNANNOUNCED_MAX:]
        until = time.monotonic() + MATCH_S_MAX
        while new and not self._have_matched(new) and time.monotonic() < until and not self._ending:
            time.sleep(MATCH_LOOK_S)

    def _find_peers(self) -> None:
        for found in found_in(self._publications):
            if not is_alive(found):
                self._peers.pop(found.key.bytes, None)
                self._forget(found.key.bytes)
            elif found.topic_name == mapping.SEEN_TOPIC and found.participant_key.bytes != self._own:
                self._peers[found.key.bytes] = found.participant_key.bytes
            elif found.topic_name == mapping.TOPIC and found.participant_key.bytes != self._own:
                self._judge(found, writer_misfit)

    def _judge(self, found: Any, misfit: Callable[[Qos, str], str]) -> bool:
        """True if the QoS of a foreign endpoint is compatible with ours. Else log and keep it: DDS does not report
        that."""
        key, why = found.key.bytes, misfit(found.qos, found.type_name)
        if not why:
            self._forget(key)  # QoS may change
        elif key not in self.misfits and len(self.misfits) < MISFITS_MAX:
            partitions = _partitions(found.qos)
            one = Misfit(misfit is writer_misfit, partitions, found.participant_key.bytes, why)
            self.misfits = {**self.misfits, key: one}
            self.misfits_found += 1
            log.warning(
                "a DDS endpoint and ours can't talk",
                who=self._participant.name(one.participant),
                why=why,
                partitions=partitions[:4],
            )
        return not why

    def _forget(self, endpoint: bytes) -> None:
        if endpoint in self.misfits:
            self.misfits = {other: one for other, one in self.misfits.items() if other != endpoint}

    def _announce(self) -> None:
        try:
            self._writer.write(Frame(mapping.pack(self._own, b"".join(self._unannounced), has_payload=True)))
        except DDSException as error:
            if error.code != DDSException.DDS_RETCODE_TIMEOUT:
                raise
            return  # announced at the next turn, within a second
        self._unannounced.clear()

    def _take_announcements(self) -> Seen:
        seen: Seen = []
        for sample in self._seen.take(TAKE_SAMPLES_MAX):
            if type(sample) is not Frame:
                continue
            with contextlib.suppress(UStatusError):  # a malformed announcement: it only makes us wait a little longer
                participant, keys = mapping.unpack(sample.data)
                found = [(keys or b"")[at : at + 16] for at in range(0, len(keys or b""), 16)]
                # the entities of a participant share its prefix
                own = [key for key in found if key[:12] == self._own[:12]]
                seen.append((participant, own))
        return seen

    def close(self) -> None:
        self._end()
        delete(*self._conditions, self._seen, self._writer, self._publications, self._subscriptions, self._participants)


def found_in(reader: BuiltinDataReader) -> list[Any]:
    with binding:
        return list(reader.take(ENDPOINTS_TAKE_MAX))


def _partitions(qos: Qos) -> tuple[str, ...]:
    partition = qos[Policy.Partition]
    return tuple(partition.partitions) if partition is not None else ("",)


def is_alive(found: Any) -> bool:
    return bool(found.sample_info.valid_data and found.sample_info.instance_state == InstanceState.Alive)


def name_in(qos: Qos) -> str:
    """The name that a participant gives itself, such as "python3 4711 on host7, udp/10.0.0.7:7411"; "" without one."""
    properties = {policy.key: str(policy.value) for policy in qos if isinstance(policy, Policy.Property)}
    process = " ".join(filter(None, (properties.get("__ProcessName"), properties.get("__Pid"))))
    host = ", ".join(filter(None, (properties.get("__Hostname"), properties.get("__NetworkAddresses"))))
    return " on ".join(filter(None, (process, host)))[:NAME_CHARS_MAX]


def writer_misfit(qos: Qos, type_name: str) -> str:
    """Why our readers do not match such a writer; "" if they do."""
    wrong = _type_misfit(qos, type_name)
    if Policy.Reliability.BestEffort in qos:
        wrong.append("its writer is BEST_EFFORT, and our readers ask for RELIABLE")
    return "; ".join(wrong)


def reader_misfit(qos: Qos, type_name: str) -> str:
    """Why such a reader does not match our writers; "" if it does."""
    wrong = _type_misfit(qos, type_name)
    if Policy.Durability in qos and Policy.Durability.Volatile not in qos:
        wrong.append("its reader asks for the past (DURABILITY), and our writers are VOLATILE")
    if Policy.DestinationOrder.BySourceTimestamp in qos:
        wrong.append("its reader asks for BY_SOURCE_TIMESTAMP, and our writers have BY_RECEPTION_TIMESTAMP")
    representation = qos[Policy.DataRepresentation]
    if representation is not None and not representation.use_cdrv0_representation:
        wrong.append("its reader takes XCDR2 alone (DATA_REPRESENTATION), and our writers write XCDR1")
    deadline, liveliness = qos[Policy.Deadline], qos[Policy.Liveliness]
    if deadline is not None and deadline.deadline < INFINITE_NS:
        wrong.append("its reader asks for a DEADLINE, and our writers have none")
    if liveliness is not None and (
        not isinstance(liveliness, Policy.Liveliness.Automatic) or liveliness.lease_duration < INFINITE_NS
    ):
        wrong.append("its reader asks for LIVELINESS that our writers do not assert")
    presentation = qos[Policy.PresentationAccessScope]
    if presentation is not None and (
        presentation.coherent_access
        or presentation.ordered_access
        or not isinstance(presentation, Policy.PresentationAccessScope.Instance)
    ):
        wrong.append("its reader asks for a PRESENTATION across instances, and our writers have none")
    return "; ".join(wrong)


def _type_misfit(qos: Qos, type_name: str) -> list[str]:
    wrong = [f"its type is {type_name}, and ours {mapping.TYPE_NAME}"] if type_name != mapping.TYPE_NAME else []
    if Policy.Ownership.Exclusive in qos:
        wrong.append("its OWNERSHIP is EXCLUSIVE, and ours SHARED")
    return wrong
