"""Proof of the position of a reader. A log that was restored from a copy gives out its seqs again, and can't know it;
its readers can.

service: record at seq -> digest -> `next` -> reader keeps some of them (learn) -> positions of its next poll
            same digest: the log still has the newest of these records               |
                  or another record: here is the newest that both have  <------------'

A reader keeps the newest witness, and older ones at growing distances. So reader and log agree on a position that is
not many times further back than the point where they differ. Only the records between are read twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from history.records.chunk import message_id
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, Position, Witness

if TYPE_CHECKING:
    from history.log.log import Log

# does not reveal a message that the caller may not see; two records have the same digest once in 10^19
DIGEST_BYTES: Final = 8
WITNESSES_MAX: Final = 40  # of one position; a reader keeps at most KNOWN_MAX
KNOWN_MAX: Final = 33  # distances of 0, 1, 2, 4, ... 2^31 records

Known = dict[int, bytes]
"""Records of one log: seq and digest."""


def gap_of(reason: Gap.Reason.ValueType, incarnation: bytes, after: int, before: int = 0) -> Gap:
    """Returns a gap: the records in (after, before) of that log can't be read."""
    return Gap(reason=reason, incarnation=incarnation, after_seq=after, before_seq=before)


# -- reader


def learn(known: Mapping[int, bytes], *positions: Position) -> Known:
    """Returns `known` with the witnesses of `positions`, thinned: for each power of two of distance from the newest,
    the oldest one."""
    merged = dict(known)
    for position in positions:
        merged.update((witness.seq, witness.digest) for witness in position.witnesses)
    newest = max(merged, default=0)
    kept: dict[int, int] = {}
    for seq in sorted(merged):
        kept.setdefault((newest - seq).bit_length(), seq)
    return {seq: merged[seq] for seq in sorted(kept.values())[-KNOWN_MAX:]}


def up_to(known: Mapping[int, bytes], seq: int) -> Known:
    """Returns the part of `known` that is valid in a log that went back to `seq`."""
    return {one: digest for one, digest in known.items() if one <= seq}


def position(incarnation: bytes, seq: int, known: Mapping[int, bytes]) -> Position:
    """Returns the position for a request."""
    return Position(
        incarnation=incarnation, seq=seq, witnesses=[Witness(seq=one, digest=digest) for one, digest in known.items()]
    )


# -- service


async def at(log: Log, seq: int) -> list[Witness]:
    """Returns the witness of the record at `seq`; none if it is deleted, damaged, lost, or not given out yet."""
    if not log.floor_seq < seq <= log.newest_seq:
        return []
    found = await log.scan(seq - 1, max_records=1, max_bytes=1, until=seq)
    return [
        Witness(seq=seq, digest=hashlib.blake2b(message_id(chunk.messages[0]), digest_size=DIGEST_BYTES).digest())
        for chunk in found.chunks
    ]


async def went_back(log: Log, seq: int, known: Known) -> tuple[int, int] | None:
    """If the log went back behind a caller at `seq`, returns up to where it differs from what the caller knows, and up
    to where it certainly does not.

    Returns None if the log did not go back, as far as this can be known. Compares the newest known record that still
    exists, and the older ones only if that one differs.
    """
    differs = False
    for one in sorted(known, reverse=True):
        here = await at(log, one)
        if here and here[0].digest == known[one]:
            if differs:
                return max(known), min(seq, one)
            break
        differs = differs or bool(here) or _is_beyond(log, one)
    if differs:
        return max(known), min(seq, log.floor_seq)
    return (seq, log.newest_seq) if _is_beyond(log, seq) else None


def _is_beyond(log: Log, seq: int) -> bool:
    """Returns True if the log in its current state can't have given out this seq."""
    return seq > max(log.newest_seq, *(before - 1 for _, before in log.holes), 0)
