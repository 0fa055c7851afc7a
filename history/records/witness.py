"""Proof of where a reader has been: a log that was restored from a copy gives its seqs out again, and can't know it.
Its readers can.

service: record at seq -> digest -> `next` -> reader keeps some of them (learn) -> positions of its next poll
            agreed: the log still has the newest one, all is well                      |
                    or another record: here is the newest that both have  <------------'

A reader keeps the newest witness, and older ones ever further apart. So they agree on a place not many times further
back than where log and reader part, and what lies between is all that is read twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from history.records.chunk import message_id
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, Position, Witness

if TYPE_CHECKING:
    from history.log.log import Log

# says nothing about a message that its caller may not see; two records agree by chance once in 10^19
DIGEST_BYTES: Final = 8
WITNESSES_MAX: Final = 40  # of one position; a reader keeps at most KNOWN_MAX
KNOWN_MAX: Final = 33  # distances of 0, 1, 2, 4, ... 2^31 records

Known = dict[int, bytes]
"""Records of one log: seq and digest."""


def gap_of(reason: Gap.Reason.ValueType, incarnation: bytes, after: int, before: int = 0) -> Gap:
    """The records in (after, before) of that log can't be read."""
    return Gap(reason=reason, incarnation=incarnation, after_seq=after, before_seq=before)


# -- reader


def learn(known: Mapping[int, bytes], *positions: Position) -> Known:
    """`known` with what the service told, thinned: of each power of two of distance from the newest the oldest."""
    merged = dict(known)
    for position in positions:
        merged.update((witness.seq, witness.digest) for witness in position.witnesses)
    newest = max(merged, default=0)
    kept: dict[int, int] = {}
    for seq in sorted(merged):
        kept.setdefault((newest - seq).bit_length(), seq)
    return {seq: merged[seq] for seq in sorted(kept.values())[-KNOWN_MAX:]}


def up_to(known: Mapping[int, bytes], seq: int) -> Known:
    """What is left of `known` in a log that went back to `seq`."""
    return {one: digest for one, digest in known.items() if one <= seq}


def position(incarnation: bytes, seq: int, known: Mapping[int, bytes]) -> Position:
    """As a request has it."""
    return Position(
        incarnation=incarnation, seq=seq, witnesses=[Witness(seq=one, digest=digest) for one, digest in known.items()]
    )


# -- service


async def at(log: Log, seq: int) -> list[Witness]:
    """Of the record at `seq`; none if it isn't there: deleted by retention, damaged, lost, or not yet given out."""
    if not log.floor_seq < seq <= log.newest_seq:
        return []
    found = await log.scan(seq - 1, max_records=1, max_bytes=1, until=seq)
    return [
        Witness(seq=seq, digest=hashlib.blake2b(message_id(chunk.messages[0]), digest_size=DIGEST_BYTES).digest())
        for chunk in found.chunks
    ]


async def went_back(log: Log, seq: int, known: Known) -> tuple[int, int] | None:
    """If the log went back behind a caller at `seq`: up to where it is not what the caller knows, and up to where it
    surely is.

    None if it did not, as far as can be told. Looks at the newest record that is known and still there, and only if
    that is another one now, at those before.
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
    """Nobody can have been given this by the log as it is."""
    return seq > max(log.newest_seq, *(before - 1 for _, before in log.holes), 0)
