"""Discovery, made visible: who else is here, and who has found our readers (docs/dds-mapping.md, section 8).

a reader appears elsewhere -> announce its key  -> topic uprotocol/v1/seen -> its owner knows: what I write reaches it
a participant that announces appears, or goes   -> changed(peers, seen)    -> register_listener, which waits for them all
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

from cyclonedds.builtin import BuiltinDataReader, BuiltinTopicDcpsPublication, BuiltinTopicDcpsSubscription
from cyclonedds.core import DDSException, InstanceState, ReadCondition
from cyclonedds.pub import DataWriter
from cyclonedds.qos import Policy
from cyclonedds.sub import DataReader

from transports import dds_mapping as mapping
from transports.dds_link import ANYTHING, READER_SAMPLES_MAX, TAKE_SAMPLES_MAX, Frame, Participant, ServingThread, delete, reliable
from uprotocol.status import UStatusError

SEEN_DEPTH: Final = 64  # announcements kept for participants that come later; each names all readers found at one time
ENDPOINTS_TAKE_MAX: Final = 1_024  # discovery samples per turn
UNSAID_MAX: Final = 65_536  # readers found and not announced yet, 1 MB; what is beyond it is found late, by time-out

Seen = list[tuple[bytes, list[bytes]]]


class RollCall(ServingThread):
    """Announces, on a topic of its own, which readers this participant has found: whatever it writes from then on reaches them.

    `changed(peers, seen)` is called whenever something was found: the participants that make such announcements, and what they have just
    said about our readers, as (participant, reader keys).
    """

    _PUBLICATIONS, _SUBSCRIPTIONS, _SEEN = 1, 2, 3

    def __init__(self, participant: Participant, changed: Callable[[frozenset[bytes], Seen], None]) -> None:
        super().__init__(participant, "dds-roll-call")
        self._own, self._changed = participant.key, changed
        self._peers: dict[bytes, bytes] = {}  # endpoint -> participant
        entity, topic, kept = participant.entity, participant.seen_topic, Policy.Durability.TransientLocal
        self._writer = DataWriter(entity, topic, reliable(Policy.History.KeepLast(SEEN_DEPTH), durability=kept))
        limits = Policy.ResourceLimits(max_samples=READER_SAMPLES_MAX, max_instances=-1, max_samples_per_instance=-1)
        self._seen = DataReader(entity, topic, reliable(Policy.History.KeepAll, limits, durability=kept))
        self._publications = BuiltinDataReader(participant.entity, BuiltinTopicDcpsPublication)
        self._subscriptions = BuiltinDataReader(participant.entity, BuiltinTopicDcpsSubscription)
        self._unsaid: list[bytes] = []
        self._conditions = []
        readers = ((self._publications, self._PUBLICATIONS), (self._subscriptions, self._SUBSCRIPTIONS), (self._seen, self._SEEN))
        for reader, token in readers:
            condition = ReadCondition(reader, ANYTHING)
            self._conditions.append(condition)
            self._triggers.attach_as(condition, token)
        self._thread.start()

    def _serve(self, tokens: list[int]) -> None:
        if self._SUBSCRIPTIONS in tokens:
            self._find_readers()
        if self._unsaid:
            self._announce()
        if self._PUBLICATIONS in tokens:
            self._find_peers()
        seen = self._hear() if self._SEEN in tokens else []
        if tokens:
            self._changed(frozenset(self._peers.values()), seen)

    def _find_readers(self) -> None:
        for found in self._subscriptions.take(ENDPOINTS_TAKE_MAX):
            if _alive(found) and found.topic_name == mapping.TOPIC and found.participant_key.bytes != self._own:
                self._unsaid.append(found.key.bytes)
        del self._unsaid[UNSAID_MAX:]

    def _find_peers(self) -> None:
        for found in self._publications.take(ENDPOINTS_TAKE_MAX):
            if not _alive(found):
                self._peers.pop(found.key.bytes, None)
            elif found.topic_name == mapping.SEEN_TOPIC and found.participant_key.bytes != self._own:
                self._peers[found.key.bytes] = found.participant_key.bytes

    def _announce(self) -> None:
        try:
            self._writer.write(Frame(mapping.pack(self._own, b"".join(self._unsaid), has_payload=True)))
        except DDSException as error:
            if error.code != DDSException.DDS_RETCODE_TIMEOUT:
                raise
            return  # said at the next turn, within a second
        self._unsaid.clear()

    def _hear(self) -> Seen:
        heard: Seen = []
        for sample in self._seen.take(TAKE_SAMPLES_MAX):
            if type(sample) is not Frame:
                continue
            with contextlib.suppress(UStatusError):  # not one of ours: it can only make us wait a little longer
                participant, keys = mapping.unpack(sample.data)
                found = [(keys or b"")[at : at + 16] for at in range(0, len(keys or b""), 16)]
                own = [key for key in found if key[:12] == self._own[:12]]  # the entities of a participant share its prefix
                heard.append((participant, own))
        return heard

    def close(self) -> None:
        self._end()
        delete(*self._conditions, self._seen, self._writer, self._publications, self._subscriptions)


def _alive(found: Any) -> bool:
    return bool(found.sample_info.valid_data and found.sample_info.instance_state == InstanceState.Alive)
