"""core.ustreamer: where a streamer's own service is, `up://AUTHORITY/4/1/RESOURCE`, and what it has there."""

from __future__ import annotations

from typing import Final

from uprotocol import uri as uris
from uprotocol.v1.uri_pb2 import UUri

ENTITY: Final = 0x0004
VERSION: Final = 1

# methods
DESCRIBE: Final = 1
POLL: Final = 2
PAUSE: Final = 5
RESUME: Final = 6
LIST_PAUSED: Final = 7

# topics
DEAD_LETTERS: Final = 0x8001
GAPS: Final = 0x8002


def at(authority: str, resource: int = 0) -> UUri:
    """The service of the streamer with that authority, or one of its methods or topics."""
    return uris.uri(authority, ENTITY, VERSION, resource)
