"""Streams over whose messages the broker hangs up: they are skipped for a while, so that others get through. Pure.

a message is alone in flight when the connection ends -> its stream is suspect: its next message is sent alone, too
LOSSES_MIN times, or the broker has said that it does not take the message
                                -> skipped for 5, 10, 20, ... 300, 300 s, and then tried again
a message of it is answered     -> not suspect any more

A broker that does not take a message may hang up instead of refusing it: VerneMQ and RabbitMQ where a topic is
forbidden, AWS IoT where a topic has more than 7 slashes. Sent first on every new connection, that message would end
each of them, and nothing behind it would ever get through.

If the broker finds topics invalid (DISCONNECT 0x90), TOPICS_MIN of them with as many slashes, and none accepted, stand
for all such topics: one is tried again for all.
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
SKIPPED_S_MIN: Final = 5.0  # a broker that is killed twice costs its stream no more
SKIPPED_S_MAX: Final = 300.0
SUSPECTS_MAX: Final = 1_024  # streams; of more than that the oldest is forgotten
TOPICS_MIN: Final = 3  # streams whose topics are invalid: with fewer, the slashes may not be the cause

StreamKey = tuple[bytes, bytes, int]
"""Messages that must keep their order: source, sink, priority; for an EncodedMessage source and sink are one value."""

log = structlog.get_logger()


class _Suspect(NamedTuple):
    losses: int  # connections in a row that ended while a message of it was alone in flight
    try_at_s: float  # it is skipped until then
    refusal: UStatus | None  # what the broker has said of its address


class Suspects:
    """Times are those of the loop, in seconds. `slashes` is their number in a topic name."""

    def __init__(self) -> None:
        self.by_stream: dict[StreamKey, _Suspect] = {}
        self._slashes_refused = 0  # topics with so many or more are invalid to the broker; 0: none is known
        self._invalid: set[StreamKey] = set()  # streams with such topics; TOPICS_MIN at most
        self._invalid_try_at_s, self._invalid_losses = 0.0, 0

    def is_suspect(self, stream: StreamKey, slashes: int) -> bool:
        """True if its next message must be alone in flight."""
        return stream in self.by_stream or self._is_invalid(slashes)

    def _is_invalid(self, slashes: int) -> bool:
        return len(self._invalid) >= TOPICS_MIN and slashes >= self._slashes_refused

    @property
    def troubles(self) -> list[str]:
        count = sum(one.losses >= LOSSES_MIN or one.refusal is not None for one in self.by_stream.values())
        what = f"the connection to the broker ends when messages of {count} streams are sent"
        found = [f"{what}, which wait (the log names them)"] if count else []
        if len(self._invalid) >= TOPICS_MIN:
            found.append(self._invalid_topics)
        return found

    @property
    def _invalid_topics(self) -> str:
        return (
            f"the broker ends the connection over topics with {self._slashes_refused} slashes (DISCONNECT 0x90, Topic "
            'name invalid): does it limit them? mode = "off-vehicle" needs 1, "in-vehicle" up to 9'
        )

    def lost_with(
        self,
        stream: StreamKey,
        message: Carried,
        now_s: float,
        refusal: UStatus | None = None,
        slashes: int | None = None,
    ) -> None:
        """The connection has ended while `message` was alone in flight. `refusal`: what the broker has said of its
        address; `slashes` in its topic, if the broker has called that invalid."""
        known = self.by_stream.pop(stream, None)
        losses, wait_s = (known.losses if known is not None else 0) + 1, 0.0
        enough = 1 if refusal is not None else LOSSES_MIN
        if losses >= enough:
            wait_s = _wait_s(losses - enough)
            source = uris.format(message.attributes.source)
            sink = uris.format(message.attributes.sink) if message.attributes.HasField("sink") else None
            why = "the connection to the broker ends when this message is sent: its stream waits, and others go on"
            said = refusal.message if refusal is not None else None
            log.error(why, source=source, sink=sink, bytes=len(message.payload), times=losses, wait_s=wait_s, said=said)
        self.by_stream[stream] = _Suspect(losses, now_s + wait_s, refusal)
        if len(self.by_stream) > SUSPECTS_MAX:
            del self.by_stream[next(iter(self.by_stream))]
        if slashes is not None:
            self._found_invalid(stream, slashes, now_s)

    def _found_invalid(self, stream: StreamKey, slashes: int, now_s: float) -> None:
        if self._slashes_refused and slashes > self._slashes_refused:
            slashes = self._slashes_refused
        if slashes != self._slashes_refused:
            self._invalid.clear()
            self._invalid_losses = 0
        self._slashes_refused = slashes
        is_known = len(self._invalid) >= TOPICS_MIN
        if not is_known:
            self._invalid.add(stream)
        if len(self._invalid) >= TOPICS_MIN:
            self._invalid_try_at_s = now_s + _wait_s(self._invalid_losses)
            self._invalid_losses += 1
            if not is_known:
                log.error(self._invalid_topics)

    def answered(self, stream: StreamKey, slashes: int) -> None:
        """The broker has taken or refused a message of this stream, and has not hung up."""
        self.by_stream.pop(stream, None)
        if self._slashes_refused and slashes >= self._slashes_refused:
            self._slashes_refused = self._invalid_losses = 0
            self._invalid.clear()

    def skip_reason(self, stream: StreamKey, now_s: float, slashes: int) -> UStatus | None:
        """Returns why nothing of this stream may be sent now (UNAVAILABLE, or what the broker has said); None if it
        may."""
        if self._is_invalid(slashes):
            if now_s < self._invalid_try_at_s:
                return UStatus(code=UCode.PERMISSION_DENIED, message=self._invalid_topics)
            return None
        found = self.by_stream.get(stream)
        if found is None or now_s >= found.try_at_s:
            return None
        if found.refusal is not None:
            return found.refusal
        what = f"the connection to the broker has ended {found.losses} times over the first message of this stream"
        why = f"{what}: it is tried again in {found.try_at_s - now_s:.0f} s. Does the broker take it?"
        return UStatus(code=UCode.UNAVAILABLE, message=why)


def _wait_s(tries: int) -> float:
    """Returns how long to wait for the next try after so many that failed."""
    return min(SKIPPED_S_MIN * (1 << min(tries, 8)), SKIPPED_S_MAX)
