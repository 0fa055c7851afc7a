"""core.ustreamer: the addresses of a streamer's own service, `up://AUTHORITY/4/1/RESOURCE`, its methods and topics.

The history of a publisher is a separate instance of this service; its instance number is the publisher's uEntity type:
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
    """The service of the streamer of `authority`, or one of its methods or topics."""
    return uris.uri(authority, ENTITY, VERSION, resource)


def of_publisher(publisher: UUri, resource: int = 0) -> UUri:
    """The history service of the uEntity `publisher`, or one of its methods or topics.

    It depends on the uEntity type, not on the publisher's version or instance. A wildcard type gives the pattern of all
    such services of the authority. Raises INVALID_ARGUMENT for type 0 (uSubscription): that instance is the streamer.
    """
    kind = publisher.ue_id & 0xFFFF
    if not kind:
        raise invalid(f"a publisher with a history has a uEntity type of 1 to FFFE, got {uris.format(publisher)}")
    return uris.uri(publisher.authority_name, kind << 16 | ENTITY, VERSION, resource)


def is_frontiers(topic: UUri) -> bool:
    """True for the topic of frontiers of epochs, in the history of a streamer or of a publisher."""
    return (topic.ue_id & 0xFFFF, topic.ue_version_major, topic.resource_id) == (ENTITY, VERSION, FRONTIERS)


def is_about_epochs(topic: UUri) -> bool:
    """True for a topic with information for readers of epochs: frontiers, or beginnings."""
    return is_frontiers(topic) or (topic.ue_id, topic.ue_version_major, topic.resource_id) == (
        ENTITY,
        VERSION,
        BEGINNINGS,
    )


def frontiers_of(authority: str) -> list[UUri]:
    """The patterns of all topics of `authority` with information for readers of epochs."""
    of_any = uris.uri(authority, 0xFFFF_0000 | ENTITY, VERSION, FRONTIERS)
    return [of_any, uris.uri(authority, ENTITY, VERSION, BEGINNINGS)]


def covers(service: UUri, topic: UUri) -> bool:
    """True if the history at `service` may have records of `topic`: the history of a publisher has only records of its
    uEntity type and authority, that of a streamer has records of any topic."""
    if (service.ue_id & 0xFFFF, service.ue_version_major) != (ENTITY, VERSION):
        return False
    kind = service.ue_id >> 16
    if kind and is_frontiers(topic):
        return (service.authority_name, service.ue_id) == (topic.authority_name, topic.ue_id)
    return not kind or (service.authority_name, kind) == (topic.authority_name, topic.ue_id & 0xFFFF)


def narrowed(service: UUri, pattern: UUri) -> UUri | None:
    """The part of a pattern of topics that the history of a publisher may have; None: no part of it."""
    kind, of = service.ue_id >> 16, pattern.ue_id & 0xFFFF
    is_there = pattern.authority_name in (uris.WILDCARD_AUTHORITY, service.authority_name)
    if is_there and is_frontiers(pattern) and pattern.ue_id >> 16 in (kind, uris.WILDCARD_ENTITY_INSTANCE):
        return uris.uri(service.authority_name, service.ue_id, VERSION, FRONTIERS)
    if not is_there or of not in (kind, uris.WILDCARD_ENTITY_TYPE):
        return None
    instances = pattern.ue_id & 0xFFFF_0000
    return uris.uri(service.authority_name, instances | kind, pattern.ue_version_major, pattern.resource_id)
