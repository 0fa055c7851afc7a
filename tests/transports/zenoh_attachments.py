"""What other implementations on Zenoh write and read: attachments, for tests without a transport."""

from __future__ import annotations

from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.umessage_pb2 import UMessage


def encode(message: UMessage) -> bytes:
    """The attachment of `message`."""
    return b"\x01" + message.attributes.SerializeToString()


def decode(payload: bytes, attachment: bytes) -> UMessage:
    """Zenoh has no absent payload: a message has one if it has bytes or a payload format (A-19, A-28)."""
    assert attachment[0] == 1
    message = UMessage(attributes=UAttributes.FromString(attachment[1:]))
    if payload or message.attributes.payload_format:
        message.payload = payload
    return message
