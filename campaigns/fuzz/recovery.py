"""A target for recovery sources: what a REST history answers.

an answer -> messages, or refused -> what may be recorded of them
"""

from __future__ import annotations

from itertools import islice

from campaigns.fuzz.registry import refusing, target
from streamer.config.edge import RecoverySection
from streamer.recovery.asking import AskedSource
from streamer.recovery.http_source import lines_of, messages_of
from streamer.recovery.source import RecoverySource
from streamer.recovery.waiting import after_position, anchored, chained
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.v1.ucode_pb2 import UCode

MESSAGES_MAX = 50


@target
def recovery_answer(data: bytes) -> None:
    """The first octet chooses the format."""
    topic = uris.parse("//vin1/8001/1/8001")
    section = RecoverySection(topics=["//vin1/8001/1/8001"])
    with refusing(UCode.FAILED_PRECONDITION):
        found = messages_of(data[1:]) if data[:1] > b"\x80" else lines_of(topic, data[1:])
        messages = list(islice(found, MESSAGES_MAX))
        asked = AskedSource(section, RecoverySource(), 1_000, lambda: 0)
        entries = asked.entries(topic, messages, lambda name: name, 0.0)
        for entry in entries:
            attrs.validate(entry.message.attributes)
            assert uris.key(entry.message.attributes.source) == uris.key(topic)
        assert len(entries) + asked.counts["invalid"] == len(messages)
        for position in (None, *(entry.position for entry in entries)):
            chain, rest = chained(after_position(entries, position), position)
            assert len(chain) + len(rest) <= len(entries)
            assert len(anchored(entries, position)) <= len(entries)
