"""What `up-streamer check --connect` finds out in a DDS domain, with a participant that neither writes nor reads."""

from __future__ import annotations

import time
from typing import Final

from cyclonedds.builtin import (
    BuiltinDataReader,
    BuiltinTopicDcpsParticipant,
    BuiltinTopicDcpsPublication,
    BuiltinTopicDcpsSubscription,
)

from transports.dds import mapping
from transports.dds.config import DdsConfig
from transports.dds.link import Participant, addresses_of, binding, delete, translated
from transports.dds.roll_call import found_in, is_alive, name_in, reader_misfit, writer_misfit
from uprotocol.status import UStatusError
from uprotocol.transport import ProbeResult, ProbeVerdict
from uprotocol.v1.ucode_pb2 import UCode

LOOKS_S: Final = 2.0  # discovery takes some tenths of a second
PROBE_LOOK_S: Final = 0.1  # between two looks


def look_around(config: DdsConfig) -> list[ProbeResult]:
    """Blocks."""
    domain = f"DDS domain {config.domain_id}"
    try:
        with translated(f"opening {domain}", UCode.UNAVAILABLE):
            participant = Participant(config)
            try:
                names, misfits = _seen(participant)
            finally:
                participant.close()
    except UStatusError as error:
        return [ProbeResult(ProbeVerdict.FAIL, error.message)]
    at = ", ".join(sorted(addresses_of(config.interface))) or "an unknown address"
    found = [ProbeResult(ProbeVerdict.OK, f"{domain} is joined at {at} (interface {config.interface or 'by rank'})")]
    if names:
        found.append(ProbeResult(ProbeVerdict.OK, f"participants: {', '.join(sorted(names))}"))
    else:
        found.append(ProbeResult(ProbeVerdict.UNKNOWN, "whether we are heard: no other participant is there now"))
    found += [ProbeResult(ProbeVerdict.FAIL, why) for why in sorted(misfits)]
    return [*found, ProbeResult(ProbeVerdict.UNKNOWN, "whether the clocks agree: participants do not say their time")]


def _seen(participant: Participant) -> tuple[set[str], set[str]]:
    """The names of the others, and why endpoints of theirs and ours can't communicate."""
    topics = (BuiltinTopicDcpsParticipant, BuiltinTopicDcpsPublication, BuiltinTopicDcpsSubscription)
    with binding:
        others, writers, readers = [BuiltinDataReader(participant.entity, one) for one in topics]
    names: dict[bytes, str] = {}
    misfits: set[str] = set()
    until = time.monotonic() + LOOKS_S
    while time.monotonic() < until:
        time.sleep(PROBE_LOOK_S)
        for one in found_in(others):
            if is_alive(one) and one.key.bytes != participant.key:
                names[one.key.bytes] = name_in(one.qos) or one.key.bytes.hex()
        for reader, misfit in ((writers, writer_misfit), (readers, reader_misfit)):
            for one in found_in(reader):
                if is_alive(one) and one.topic_name == mapping.TOPIC and (why := misfit(one.qos, one.type_name)):
                    who = names.get(one.participant_key.bytes, one.participant_key.bytes.hex())
                    misfits.add(f"{who} and we can't communicate: {why}")
    delete(others, writers, readers)
    return set(names.values()), misfits
