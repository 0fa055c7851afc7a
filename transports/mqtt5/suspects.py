"""Streams over whose messages the broker hangs up: passed over for a while, so that others get through. Pure.

a message is alone in flight when the connection ends -> its stream is suspect: its next message is alone in flight, too
LOSSES_MIN times      -> passed over for 5, 10, 20, ... 300, 300 s, and then tried again
one of it is answered -> no suspect any more

A broker that does not take a message may hang up instead of refusing it: VerneMQ and RabbitMQ where a topic is
forbidden, AWS IoT where a topic has more than 8 levels. Sent first with every new connection, it would be the end of
each, and nothing would ever get past it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import structlog

from uprotocol import uri as uris
from uprotocol.encoded import Carried
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

LOSSES_MIN: Final = 2  # the first one may be chance
# each try costs the connection, and 0.5 s without one
PASSED_OVER_S_MIN: Final = 5.0  # a broker that is killed twice costs its stream no more
PASSED_OVER_S_MAX: Final = 300.0
SUSPECTS_MAX: Final = 1_024  # streams; of more than that the oldest is forgotten

Stream = tuple[bytes, bytes, int]
"""What must keep its order: source, sink, priority; of an EncodedMessage the first two as one."""

log = structlog.get_logger()


class _Suspect(NamedTuple):
    losses: int  # connections in a row that have ended while a message of it was alone in flight
    try_at_s: float  # it is passed over until then


class Suspects:
    """Times are the loop's, in seconds."""

    def __init__(self) -> None:
        self._suspects: dict[Stream, _Suspect] = {}

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def __contains__(self, stream: Stream) -> bool:
        return stream in self._suspects

    @property
    def troubles(self) -> list[str]:
        """Of those that the connection does not survive."""
        count = sum(one.losses >= LOSSES_MIN for one in self._suspects.values())
        what = f"the connection to the broker ends when messages of {count} streams are sent"
        return [f"{what}, which wait (the log names them)"] if count else []

    def lost_with(self, stream: Stream, message: Carried, now_s: float) -> None:
        """The connection has ended while this message was alone in flight."""
        known = self._suspects.pop(stream, None)
        losses, wait_s = (known.losses if known is not None else 0) + 1, 0.0
        if losses >= LOSSES_MIN:
            wait_s = min(PASSED_OVER_S_MIN * 2 ** min(losses - LOSSES_MIN, 8), PASSED_OVER_S_MAX)
            source = uris.format(message.attributes.source)
            sink = uris.format(message.attributes.sink) if message.attributes.HasField("sink") else None
            why = "the connection to the broker ends when this message is sent: its stream waits, and others go on"
            log.error(why, source=source, sink=sink, bytes=len(message.payload), times=losses, wait_s=wait_s)
        self._suspects[stream] = _Suspect(losses, now_s + wait_s)
        if len(self._suspects) > SUSPECTS_MAX:
            del self._suspects[next(iter(self._suspects))]

    def answered(self, stream: Stream) -> None:
        """The broker has taken or refused one of its messages, and not hung up."""
        self._suspects.pop(stream, None)

    def pass_over(self, stream: Stream, now_s: float) -> UStatus | None:
        """UNAVAILABLE if nothing of this stream is to be sent now; None if it is."""
        found = self._suspects.get(stream)
        if found is None or now_s >= found.try_at_s:
            return None
        what = f"the connection to the broker has ended {found.losses} times over the first message of this stream"
        why = f"{what}: it is tried again in {found.try_at_s - now_s:.0f} s. Does the broker take it?"
        return UStatus(code=UCode.UNAVAILABLE, message=why)
