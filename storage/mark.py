"""The mark: a small file beside the log that says up to where was committed, overwritten in place after each commit.

SQLite cuts a damaged write-ahead log to its last whole commit, in silence; and a file that is gone says nothing. This
is how we know.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Final, NamedTuple

_MAGIC: Final = b"upm2"
_V1: Final = struct.Struct("<16sQ")  # incarnation, newest seq
_V2: Final = struct.Struct("<4s16sQI")  # magic, incarnation, newest seq, checksum of those
SIZE: Final = _V2.size
V1_LEAP_MAX: Final = 1 << 32  # version 1 has no checksum: more than that beyond the newest record was never committed
_SEQ_MAX: Final = 1 << 62


class Marked(NamedTuple):
    incarnation: bytes
    seq: int


class BadMarkError(Exception):
    """The bytes of the mark are not those that were written."""


def pack(incarnation: bytes, seq: int) -> bytes:
    body = _V2.pack(_MAGIC, incarnation, seq, 0)[:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def read(path: Path, *, may_be_v1: bool = True) -> Marked | None:
    """The mark beside the file `path`; None if there is none. Raises OSError, BadMarkError."""
    try:
        return unpack(Path(f"{path}.mark").read_bytes(), may_be_v1=may_be_v1)
    except FileNotFoundError:
        return None


def unpack(data: bytes, *, may_be_v1: bool = True) -> Marked | None:
    """None if nothing was ever written. Raises BadMarkError."""
    if not any(data):  # a file that was made, and then its disk was full
        return None
    if len(data) == _V1.size and may_be_v1:
        incarnation, seq = _V1.unpack(data)
        if seq > _SEQ_MAX:
            raise BadMarkError("it names a record that can't have been")
        return Marked(incarnation, seq)
    if len(data) != SIZE or data[:4] != _MAGIC:
        raise BadMarkError("it is no mark")
    _, incarnation, seq, crc = _V2.unpack(data)
    if zlib.crc32(data[:-4]) != crc:
        raise BadMarkError("its checksum is wrong")
    return Marked(incarnation, seq)
