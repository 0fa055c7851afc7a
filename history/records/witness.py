"""Witnesses: digests of records that a reader was given. A log that was restored from a copy gives out its seqs again,
and cannot know that; with the witnesses of its readers it finds out.

service: record at seq -> digest -> `next` -> the reader keeps some of them (learn) -> positions of its next poll
         service/poll.py: is the record of the newest witness still the same? else: which is the newest that is

A reader keeps the newest witness, and older ones at growing distances. So the newest common one is at most about twice
as far back as where log and reader differ, and only the records from there on are read twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, Position, Witness

# it reveals nothing about a message that its reader may not see. Two records have the same one by chance once in 10^19
DIGEST_BYTES: Final = 8
WITNESSES_MAX: Final = 40  # of one position; a reader keeps at most KNOWN_MAX
KNOWN_MAX: Final = 33  # distances of 0, 1, 2, 4, ... 2^31 records

Known = dict[int, bytes]
"""Of one log: digests by seq."""


def digest_of(id: bytes) -> bytes:
    """Returns the witness of a record: of the id of its message, 16 bytes."""
    return hashlib.blake2b(id, digest_size=DIGEST_BYTES).digest()


def gap_of(reason: Gap.Reason.ValueType, incarnation: bytes, after: int, before: int = 0) -> Gap:
    """Reports that the records in (after, before) of that log cannot be read."""
    return Gap(reason=reason, incarnation=incarnation, after_seq=after, before_seq=before)


def learn(known: Mapping[int, bytes], *positions: Position) -> Known:
    """Returns `known` with the witnesses of `positions`. Of those whose distance from the newest lies between two
    powers of two, only the oldest is kept."""
    merged = dict(known)
    for position in positions:
        merged.update((witness.seq, witness.digest) for witness in position.witnesses)
    newest = max(merged, default=0)
    kept: dict[int, int] = {}
    for seq in sorted(merged):
        kept.setdefault((newest - seq).bit_length(), seq)
    return {seq: merged[seq] for seq in sorted(kept.values())[-KNOWN_MAX:]}


def up_to(known: Mapping[int, bytes], seq: int) -> Known:
    """Returns the part of `known` that still holds in a log that went back to `seq`."""
    return {one: digest for one, digest in known.items() if one <= seq}


def seqs_of(positions: Iterable[Position]) -> dict[bytes, int]:
    """Returns the seq of each log, by incarnation."""
    return {one.incarnation: one.seq for one in positions}


def position(incarnation: bytes, seq: int, known: Mapping[int, bytes]) -> Position:
    """Returns the position for a request."""
    return Position(
        incarnation=incarnation, seq=seq, witnesses=[Witness(seq=one, digest=digest) for one, digest in known.items()]
    )
