"""What an ingress asks of the followed histories (streamer/following): whose a topic is, and whether a plain message is
kept."""

from __future__ import annotations

from typing import Final, Protocol

from streamer.walk.endpoint import Endpoint
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.encoded import EncodedMessage
from uprotocol.v1.uri_pb2 import UUri

PUBLISHERS: Final = ids.of_publisher(uris.ANY, ids.ANNOUNCEMENTS)  # announcements of any that has its own history


class FollowedHistory(Protocol):
    """One of them."""

    @property
    def is_gateway(self) -> bool:
        """False for a publisher, which sends plain copies beside its history."""

    def records(self, source: UUri) -> bool:
        """True if this topic is followed whether or not somebody wants it."""

    def on_doorbell(self, message: EncodedMessage) -> bool:
        """A plain message has come. True: it is a copy of what is followed, and is not kept."""


class Doorbells(Protocol):
    """All of them."""

    def of(self, endpoint: Endpoint, source: UUri) -> FollowedHistory | None:
        """The history at `endpoint` that has this topic."""

    def on_announcement(self, message: EncodedMessage) -> bool:
        """A publisher announces its history. False: the announcement is not kept back."""
