"""Turns bytes into protobuf messages of any shape, which mutated octets of a real message would hardly ever reach.

bytes --Dice--> choices --fill--> message      the same bytes make the same message; missing bytes make empty fields
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from uprotocol import uri as uris
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

M = TypeVar("M", bound=Message)

DEPTH_MAX: Final = 5
REPEATED_MAX: Final = 4

_NUMBERS: Final = (
    0,
    1,
    2,
    3,
    5,
    127,
    128,
    255,
    256,
    300,
    0x7FFF,
    0x8000,
    0xFFFE,
    0xFFFF,
    0x10000,
    2**31 - 1,
    2**31,
    2**32 - 1,
)
_LONG: Final = (*_NUMBERS, 253_402_300_799, 253_402_300_800, 2**47, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_TEXTS: Final = (
    "",
    "*",
    "a",
    "vin",
    "ecu1",
    "ecu1.vin",
    "cloud",
    "A",
    "a" * 128,
    "a" * 129,
    "[2001::7]",
    "[v1.a+*]",
    "a/b",
    "\0",
    "ü",
    "+",
)
_TRACES: Final = ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "00-12-34-01", "7 or so")
_ADDRESSES: Final = tuple(
    uris.parse(text)
    for text in (
        *(
            "//vin/10/1/8000",
            "//ecu1/10/1/8001",
            "//ecu1.vin/2/3/FFFE",
            "//cloud/20/1/0",
            "//ecu1/10/1/0",
            "/10/1/8000",
            "//vin/4/1/2",
        ),
        *(
            "//vin/0/3/1",
            "//vin/0/4/1",
            "//vin/0/3/8000",
            "//vin/4/1/1",
            "//*/FFFFFFFF/FF/FFFF",
            "//cloud/FFFFFFFF/FF/FFFF",
            "//vin/10/1/7FFF",
        ),
    )
)
_IDS: Final = (
    UUID(msb=0x0192A7B0_0000_7000, lsb=0x8000_0000_0000_0001),
    UUID(msb=0xE677_D21F_DBFF_7FFF, lsb=0xBFFF_FFFF_FFFF_FFFF),
    UUID(msb=0xE677_D21F_DC00_7000, lsb=1 << 63),
    UUID(msb=0x7000, lsb=1 << 63),
    UUID(msb=0x4000, lsb=1 << 63),
)
_SPECIAL: Final[dict[str, tuple[Message, ...]]] = {
    UUri.DESCRIPTOR.full_name: _ADDRESSES,
    UUID.DESCRIPTOR.full_name: _IDS,
}

_WIDTHS: Final = {  # the range of each integer type
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class Dice:
    """Choices of one octet each; after the last octet it is always the first choice."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return max(0, len(self._data) - self._at)

    def octet(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def some(self) -> bytes:
        """Returns as many octets as the next octet says."""
        return self.take(self.octet())

    def rest(self) -> bytes:
        return self.take(self.left)

    def one_of(self, choices: Any) -> Any:
        return choices[self.octet() % len(choices)]


def made(type: type[M], dice: Dice) -> M:
    """Returns a message of `type`."""
    message = type()
    fill(message, dice)
    return message


def fill(message: Message, dice: Dice, depth: int = 0) -> None:
    known = _SPECIAL.get(message.DESCRIPTOR.full_name)
    if known is not None and dice.octet() & 3:  # mostly a valid value
        message.CopyFrom(dice.one_of(known))
        return
    for field in message.DESCRIPTOR.fields:
        choice = dice.octet()
        if (
            choice & 1 == 0
            or depth > DEPTH_MAX
            or (field.message_type is not None and field.message_type.GetOptions().map_entry)
        ):
            continue
        _fill_field(message, field, choice >> 1, dice, depth)


def _fill_field(message: Message, field: FieldDescriptor, choice: int, dice: Dice, depth: int) -> None:
    if field.is_repeated:
        parts = getattr(message, field.name)
        for _ in range(1 + choice % REPEATED_MAX):
            if field.message_type is not None:
                fill(parts.add(), dice, depth + 1)
            else:
                parts.append(_scalar(field, dice))
    elif field.message_type is not None:
        part = getattr(message, field.name)
        part.SetInParent()
        fill(part, dice, depth + 1)
    else:
        setattr(message, field.name, _scalar(field, dice))


def _scalar(field: FieldDescriptor, dice: Dice) -> Any:
    kind = field.cpp_type
    if kind in _WIDTHS:
        return _number(kind, dice)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return bool(dice.octet() & 1)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return dice.one_of((0.0, -1.5, 1e300, float("inf"), float("nan")))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return dice.take(16) if dice.octet() & 1 else dice.some()
    return _text(field, dice)


def _number(kind: int, dice: Dice) -> int:
    low, high = _WIDTHS[kind]
    if dice.octet() & 3 == 0:
        number = int.from_bytes(dice.take(4), "little")
    else:
        number = dice.one_of(_LONG)
        number = -number if dice.octet() & 3 == 1 else number
    return min(max(number, low), high)


def _text(field: FieldDescriptor, dice: Dice) -> str:
    if field.name == "traceparent":
        return str(dice.one_of(_TRACES))
    choice = dice.octet()
    return dice.some().decode(errors="replace") if choice & 7 == 7 else str(_TEXTS[choice % len(_TEXTS)])
