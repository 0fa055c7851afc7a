"""The DDS type of docs/dds-mapping.md with its own CDR code: that of cyclonedds takes 20 us for a sequence of octets,
and returns lists.

This module has no `from __future__ import annotations`: cyclonedds reads the annotations themselves.
"""

from dataclasses import dataclass
from typing import Any, Self

from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import sequence, uint8

_HEAD = b"\x00\x01\x00\x00\x01\x01\x00\x00"  # little-endian XCDR1; version 1, with payload, two octets of padding


@dataclass(init=False)
class UMessage(IdlStruct, typename="uprotocol.v1.UMessage"):
    """The fields declare the type and are never set; `parts` are the octets of attributes and payload."""

    version: uint8
    has_payload: bool
    attributes: sequence[uint8]  # type: ignore[type-arg]
    payload: sequence[uint8]  # type: ignore[type-arg]

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts

    def serialize(self, buffer: Any = None, endianness: Any = None, use_version_2: Any = None) -> bytes:
        attributes, payload = self.parts
        padding = bytes(-len(attributes) & 3)
        return b"".join(
            (
                _HEAD,
                len(attributes).to_bytes(4, "little"),
                attributes,
                padding,
                len(payload).to_bytes(4, "little"),
                payload,
            )
        )

    @classmethod
    def deserialize(cls, data: bytes, has_header: bool = True, use_version_2: Any = None) -> Self:
        cut = 12 + int.from_bytes(data[8:12], "little")
        start = cut + (-cut & 3)
        return cls(data[12:cut], data[start + 4 : start + 4 + int.from_bytes(data[start : start + 4], "little")])

    @classmethod
    def deserialize_key(cls, data: bytes, has_header: bool = True, use_version_2: Any = None) -> Self:
        return cls()  # the type has no key; this is called when a writer has ended
