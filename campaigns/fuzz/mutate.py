"""Random changes to inputs, for machines without atheris: without feedback, but fast."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

CHANGES_MAX: Final = 6  # to one input; with more, nothing of the input is left
_ODD: Final = (0, 1, 0x0A, 0x12, 0x1A, 0x20, 0x22, 0x2F, 0x3F, 0x40, 0x7F, 0x80, 0xC0, 0xFE, 0xFF)
_PIECES: Final = (
    b"\xff" * 8,
    b"\x80" * 10,
    b"[" * 3_000,
    b'{"a":' * 1_000,
    b"9" * 5_000,
    b"\xed\xa0\x80",
    b"1e999",
    b"NaN",
    b"\0" * 16,
    b"'\"",
)


def mutated(rng: random.Random, inputs: Sequence[bytes], bytes_max: int) -> bytes:
    """Returns a changed input from `inputs`, or a random new one."""
    data = bytearray(rng.choice(inputs) if inputs and rng.random() < 0.9 else rng.randbytes(rng.randrange(1, 64)))
    for _ in range(rng.randint(1, CHANGES_MAX)):
        _change(rng, data, inputs)
    return bytes(data[:bytes_max])


def _change(rng: random.Random, data: bytearray, inputs: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.randint(1, 8))
    match rng.randrange(8):
        case 0 if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        case 1 if at < len(data):
            data[at] = rng.choice(_ODD)
        case 2 if at < len(data):
            data[at] = (data[at] + rng.choice((-1, 1))) % 256
        case 3:
            del data[at:end]
        case 4:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        case 5:
            data[at:at] = data[at:end] * rng.choice((1, 2, 16))
        case 6 if inputs:
            other = rng.choice(inputs)
            begin = rng.randrange(len(other) + 1)
            data[at:end] = other[begin : begin + rng.randint(1, 64)]
        case 7 if rng.random() < 0.1:
            data[at:at] = rng.choice(_PIECES)
