"""All of a message's attributes but its id, as bytes: messages of one stream share it, so what is known of one is known of all.

encoded UAttributes = 0A 12 09 msb 11 lsb | stamp        dict[stamp] saves parsing addresses and validating them, message by message
"""

from __future__ import annotations

from typing import Final

from uprotocol.v1.uattributes_pb2 import UAttributes

_BEGIN: Final = b"\x0a\x12\x09"  # field 1, 18 bytes: a UUID of two fixed64, msb first
_SIZE: Final = 20


def stamp(encoded: bytes) -> bytes | None:
    """What follows the id in serialised UAttributes; None if they don't begin with an id that is a UUID of version 7.

    A second id in what follows would be part of the stamp: a verdict on the first message of a stamp holds for the others too.
    """
    if len(encoded) < _SIZE or not encoded.startswith(_BEGIN) or encoded[11] != 0x11 or encoded[4] >> 4 != 7 or encoded[19] >> 6 != 2:
        return None
    return encoded[_SIZE:]


def is_shared(attributes: UAttributes) -> bool:
    """False if something else than the id is of this message alone: its stamp is not worth remembering."""
    return not (attributes.traceparent or attributes.token or attributes.HasField("reqid"))
