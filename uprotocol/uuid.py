"""UUID version 7 (RFC 9562, spec basics/uuid.adoc): create, parse, format, read the time.

The ids of one process are unique and always increase, even if the clock goes back.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final

from uprotocol.status import invalid
from uprotocol.v1.uuid_pb2 import UUID

RANDOM_BLOCK_BYTES: Final = 2_048  # for 256 ids
# version 7, variant 10
_TEXT = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-7[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}")
_LOW = 0xFFFF_FFFF_FFFF_FFFF
_VERSION = 0x7000
_VARIANT, _VARIANT_MASK = 0x8000_0000_0000_0000, 0xC000_0000_0000_0000
TIME_MS_MAX: Final = 253_402_300_799_999  # the end of the year 9999, the limit of calendars and of protobuf Timestamps
MSB_MAX: Final = TIME_MS_MAX << 16 | 0xFFFF


_time_ns: Callable[[], int] = time.time_ns


def now_ms() -> int:
    """Unix milliseconds; the clock of ids, ttl and append times."""
    return _time_ns() // 1_000_000


def moment(unix_ms: int) -> str:
    """Returns the time in RFC 3339, UTC, to the millisecond."""
    return datetime.fromtimestamp(unix_ms / 1_000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class UUIDGenerator:
    """Increasing ids: 48 bits of time, a 12-bit counter, 62 random bits (RFC 9562 section 6.2, method 1).

    After 4,096 ids in a millisecond it uses the next millisecond, as the RFC allows. Random bytes are read in blocks: a
    system call for each id would cost more than everything else.
    """

    def __init__(self, clock_ms: Callable[[], int] = now_ms, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        self._clock_ms, self._random_bytes = clock_ms, random_bytes
        self._last = 0  # time << 12 | counter
        self._block_bytes = RANDOM_BLOCK_BYTES if random_bytes is os.urandom else 8
        self._block, self._next = b"", 0
        self._lock = threading.Lock()

    def __call__(self) -> UUID:
        with self._lock:
            if self._next >= len(self._block):
                self._block, self._next = self._random_bytes(self._block_bytes), 0
            random = int.from_bytes(self._block[self._next : self._next + 8], "big")
            self._next += 8
            self._last = max(self._clock_ms() << 12, self._last + 1)
            last = self._last
        lsb = _VARIANT | random & ~_VARIANT_MASK
        return UUID(msb=(last >> 12) << 16 | _VERSION | last & 0xFFF, lsb=lsb)

    def renew(self) -> None:
        """Called in a forked child: it must not use the parent's random bytes, or wait for a thread of the parent."""
        self._block, self._next = b"", 0
        self._lock = threading.Lock()


_of_this_process: Final = UUIDGenerator()
os.register_at_fork(after_in_child=_of_this_process.renew)
new: Callable[[], UUID] = _of_this_process
"""Returns a new id. Not to be imported by its name, since a simulation replaces it."""


@contextlib.contextmanager
def simulated(time_ns: Callable[[], int], generate: Callable[[], UUID]) -> Iterator[None]:
    """Replace the clock and the generator of this process while the context is active, so that a simulation can repeat
    a run from its seed."""
    global _time_ns, new
    before = _time_ns, new
    _time_ns, new = time_ns, generate
    try:
        yield
    finally:
        _time_ns, new = before


def is_v7(id: UUID) -> bool:
    return id.msb & 0xF000 == 0x7000 and id.lsb >> 62 == 0b10


def is_message_id(id: UUID) -> bool:
    """True for a UUID of version 7 whose time is not later than the year 9999. 48 bits would allow times until the year
    10889, which never expire (A-54)."""
    msb = id.msb
    return msb & 0xF000 == 0x7000 and msb <= MSB_MAX and id.lsb >> 62 == 0b10


def time_ms(id: UUID) -> int:
    """Creation time in Unix milliseconds."""
    return id.msb >> 16


def format(id: UUID) -> str:
    """Returns the id as 8-4-4-4-12 hexadecimal digits, in lower case."""
    text = f"{id.msb:016x}{id.lsb:016x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def parse(text: str) -> UUID:
    """Parse a UUID in upper or lower case. Raises UStatusError(INVALID_ARGUMENT) if it is not of version 7."""
    if not _TEXT.fullmatch(text):
        raise invalid(f"expected a UUID of version 7 like 01234567-89ab-7cde-8f01-23456789abcd, got {text!r}")
    number = int(text.replace("-", ""), 16)
    return UUID(msb=number >> 64, lsb=number & _LOW)


def to_bytes(id: UUID) -> bytes:
    """16 bytes, big endian."""
    return id.msb.to_bytes(8, "big") + id.lsb.to_bytes(8, "big")


def from_bytes(data: bytes) -> UUID:
    """Raises UStatusError(INVALID_ARGUMENT) if `data` is not a UUID of version 7 with 16 bytes."""
    if len(data) != 16:
        raise invalid(f"a UUID has 16 bytes, got {len(data)}")
    id = UUID(msb=int.from_bytes(data[:8], "big"), lsb=int.from_bytes(data[8:], "big"))
    if not is_v7(id):
        raise invalid(f"expected a UUID of version 7 and variant 10, got {data.hex()}")
    return id
