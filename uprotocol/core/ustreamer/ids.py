"""core.ustreamer: where a streamer's own service is, `up://AUTHORITY/4/1/RESOURCE`, and what it has there.

A publisher that keeps its own history serves it beside that, as the instance whose number is its own uEntity type:
publisher `up://AUTHORITY/8001/1/...` -> service `up://AUTHORITY/80010004/1/RESOURCE`
"""

from __future__ import annotations

from typing import Final

from uprotocol import uri as uris
from uprotocol.status import invalid
from uprotocol.v1.uri_pb2 import UUri

ENTITY: Final = 0x0004
VERSION: Final = 1

# methods
DESCRIBE: Final = 1
POLL: Final = 2
COMMAND: Final = 3
PROGRESS: Final = 4
PAUSE: Final = 5
RESUME: Final = 6
LIST_PAUSED: Final = 7

# topics
DEAD_LETTERS: Final = 0x8001
GAPS: Final = 0x8002
FRAMES: Final = 0x8003
ANNOUNCEMENTS: Final = 0x8004
FRONTIERS: Final = 0x8005
BEGINNINGS: Final = 0x8006


def at(authority: str, resource: int = 0) -> UUri:
    """The service of the streamer with that authority, or one of its methods or topics."""
    return uris.uri(authority, ENTITY, VERSION, resource)


def of_publisher(publisher: UUri, resource: int = 0) -> UUri:
    """The service of the uEntity `publisher`, if it keeps its own history, or one of its methods or topics.

    It is that of the uEntity type: neither the publisher's version nor its instance is part of it. Of a wildcard it is
    the pattern of all such services there. Raises INVALID_ARGUMENT for type 0 (uSubscription): its place is the
    streamer's own.
    """
    kind = publisher.ue_id & 0xFFFF
    if not kind:
        raise invalid(f"a history of its own has a uEntity of type 1 to FFFE, not {uris.format(publisher)}")
    return uris.uri(publisher.authority_name, kind << 16 | ENTITY, VERSION, resource)


def is_frontiers(topic: UUri) -> bool:
    """Whether it is told there how far epochs have come: in the history of a streamer, or of a publisher."""
    return (topic.ue_id & 0xFFFF, topic.ue_version_major, topic.resource_id) == (ENTITY, VERSION, FRONTIERS)


def tells_of_epochs(topic: UUri) -> bool:
    """Whether it is said there what who reads epochs has to know."""
    return is_frontiers(topic) or (topic.ue_id, topic.ue_version_major, topic.resource_id) == (
        ENTITY,
        VERSION,
        BEGINNINGS,
    )


def frontiers_of(authority: str) -> list[UUri]:
    """The patterns of all topics there on which it is said what who reads epochs has to know."""
    of_any = uris.uri(authority, 0xFFFF_0000 | ENTITY, VERSION, FRONTIERS)
    return [of_any, uris.uri(authority, ENTITY, VERSION, BEGINNINGS)]


def covers(service: UUri, topic: UUri) -> bool:
    """Whether the history at `service` may have records of `topic`: a publisher's own has those of its uEntity type on
    its host alone, a streamer's those of anybody. What is no service of core.ustreamer has none."""
    if (service.ue_id & 0xFFFF, service.ue_version_major) != (ENTITY, VERSION):
        return False
    kind = service.ue_id >> 16
    if kind and is_frontiers(topic):
        return (service.authority_name, service.ue_id) == (topic.authority_name, topic.ue_id)
    return not kind or (service.authority_name, kind) == (topic.authority_name, topic.ue_id & 0xFFFF)


def narrowed(service: UUri, pattern: UUri) -> UUri | None:
    """The part of a pattern of topics that a publisher's own history may have; None: nothing of it."""
    kind, of = service.ue_id >> 16, pattern.ue_id & 0xFFFF
    is_there = pattern.authority_name in (uris.WILDCARD_AUTHORITY, service.authority_name)
    if is_there and is_frontiers(pattern) and pattern.ue_id >> 16 in (kind, uris.WILDCARD_ENTITY_INSTANCE):
        return uris.uri(service.authority_name, service.ue_id, VERSION, FRONTIERS)
    if not is_there or of not in (kind, uris.WILDCARD_ENTITY_TYPE):
        return None
    instances = pattern.ue_id & 0xFFFF_0000
    return uris.uri(service.authority_name, instances | kind, pattern.ue_version_major, pattern.resource_id)
