"""Spans of messages whose senders want them traced (traceparent of the W3C Trace Context, with the flag `sampled`).

    ingress --receive--> flow --append--> log      pump, express queue --send--> network
                                                   '- events: attempts that failed, held, dead letter

Each span is a child of the span that the message names. The message is forwarded as it is: its traceparent is of the
sender, and a broker, log or follower that changed it would break the identity of records. Nothing is computed for
other messages: one with a traceparent has a stamp of its own (Stamp.is_shared is False).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from transports.base import NOT_TRIED
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.encoded import Carried, EncodedMessage
from uprotocol.status import RETRYABLE, UStatusError, code_name, is_nobody_listening
from uprotocol.v1.uattributes_pb2 import UMessageType
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

INTERNAL, PRODUCER, CONSUMER = 1, 4, 5  # kinds of spans in OTLP
SAMPLED: Final = 1  # flag of a traceparent
SENDING_MAX: Final = 4_096  # messages whose `send` is open; beyond, that of the oldest ends
EVENTS_MAX: Final = 16  # of one span; a network that is away is tried for days
TEXT_CHARACTERS_MAX: Final = 200

Value = str | int
SpanEvent = tuple[int, str, dict[str, Value]]  # Unix nanoseconds, name, attributes


class TraceSpan(NamedTuple):
    """One span, as OTLP has it."""

    name: str
    kind: int
    trace_id: bytes
    parent_id: bytes
    begin_ns: int  # Unix nanoseconds, as `end_ns`
    end_ns: int
    attributes: dict[str, Value]
    events: Sequence[SpanEvent] = ()
    error: str = ""  # empty: it went well


class Traced(NamedTuple):
    """What all spans of one message have in common."""

    trace_id: bytes
    parent_id: bytes
    attributes: dict[str, Value]


@dataclass(slots=True)
class Sending:
    """A `send` that has not ended."""

    traced: Traced
    begin_ns: int
    attempts: int = 0
    code: str = ""
    error: str = ""
    events: list[SpanEvent] = field(default_factory=list)


class MessageSpans:
    """Makes spans and gives each to `put`. `share`: of the sampled traces, by their ids, so that all gateways with the
    same share take the same traces. Lives on the loop."""

    def __init__(self, put: Callable[[TraceSpan], None], share: float) -> None:
        self._put, self._below = put, int(share * (1 << 56))
        self._sending: dict[tuple[str, bytes], Sending] = {}  # by endpoint, and the attributes as sent there

    def _traced(self, message: EncodedMessage) -> Traced | None:
        """Returns None for a message that is not sampled."""
        if message.stamp.is_shared:
            return None
        attributes = message.stamp.attributes
        if not attributes.traceparent:
            return None
        _, trace, parent, flags = attributes.traceparent.split("-")[:4]  # the transport has validated it
        if not int(flags, 16) & SAMPLED or int(trace[-14:], 16) >= self._below:
            return None
        found: dict[str, Value] = {
            "messaging.system": "uprotocol",
            "messaging.message.id": uuids.format(uuids.from_bytes(message.id_bytes)),
            "messaging.message.body.size": len(message.payload),
            "uprotocol.type": UMessageType.Name(attributes.type).removeprefix("UMESSAGE_TYPE_").lower(),
            "uprotocol.source": uris.format(attributes.source),
        }
        if attributes.HasField("sink"):
            found["uprotocol.sink"] = uris.format(attributes.sink)
        return Traced(bytes.fromhex(trace), bytes.fromhex(parent), found)

    # Into the streamer

    def received(self, endpoint: str, message: EncodedMessage) -> None:
        """A request, response or frame has come, and is taken at once."""
        if (traced := self._traced(message)) is not None:
            now = time.time_ns()
            self._end("receive", CONSUMER, traced, now, now, {"uprotocol.endpoint": endpoint})

    def appended(
        self, endpoint: str, log: str, batch: Sequence[EncodedMessage], offer: Callable[[asyncio.Future[int]], None]
    ) -> Callable[[asyncio.Future[int]], None]:
        """A batch has come that is about to be offered to the log. Returns `offer`, which notes when."""
        sampled = [(at, traced) for at, one in enumerate(batch) if (traced := self._traced(one)) is not None]
        return functools.partial(self._offer, endpoint, log, sampled, time.time_ns(), offer) if sampled else offer

    def _offer(
        self,
        endpoint: str,
        log: str,
        sampled: list[tuple[int, Traced]],
        came_ns: int,
        offer: Callable[[asyncio.Future[int]], None],
        answer: asyncio.Future[int],
    ) -> None:
        taken_ns = time.time_ns()
        for _, traced in sampled:
            self._end("receive", CONSUMER, traced, came_ns, taken_ns, {"uprotocol.endpoint": endpoint})
        answer.add_done_callback(functools.partial(self._committed, log, sampled, taken_ns))
        offer(answer)

    def _committed(
        self, log: str, sampled: list[tuple[int, Traced]], taken_ns: int, answer: asyncio.Future[int]
    ) -> None:
        if answer.cancelled():
            return
        now, error = time.time_ns(), answer.exception()
        for at, traced in sampled:
            found: dict[str, Value] = {"uprotocol.log": log}
            if error is None:
                found["uprotocol.seq"] = answer.result() + at
            elif isinstance(error, UStatusError):
                found["uprotocol.code"] = code_name(error.code)
            self._end("append", INTERNAL, traced, taken_ns, now, found, error=str(error or ""))

    # Out of the streamer

    def ready(self, endpoint: str, messages: Sequence[EncodedMessage]) -> None:
        """These are the next to leave: once the pace of the endpoint allows it."""
        for message in messages:
            if (traced := self._traced(message)) is not None and (endpoint, message.encoded) not in self._sending:
                if len(self._sending) >= SENDING_MAX:
                    self._finish(next(iter(self._sending)))
                self._sending[endpoint, message.encoded] = Sending(traced, time.time_ns())

    def _open(self, endpoint: str, messages: Iterator[EncodedMessage]) -> Iterator[Sending | None]:
        for message in messages:
            yield None if message.stamp.is_shared else self._sending.get((endpoint, message.encoded))

    def answered(self, endpoint: str, messages: Sequence[EncodedMessage], statuses: Sequence[UStatus]) -> None:
        """The network has answered. What it has not taken may still become held or a dead letter in this step."""
        for message, status, open in zip(messages, statuses, self._open(endpoint, iter(messages)), strict=True):
            if open is None or status.message == NOT_TRIED:
                continue
            open.attempts += 1
            open.code, open.error = code_name(status.code), ""
            if status.code == UCode.OK:
                self._finish((endpoint, message.encoded))
                continue
            open.error = status.message[:TEXT_CHARACTERS_MAX] or open.code
            self._note(open, "not taken", open.code, open.error)
            if status.code not in RETRYABLE or is_nobody_listening(status):
                asyncio.get_running_loop().call_soon(self._finish, (endpoint, message.encoded))

    def held(self, endpoint: str, message: EncodedMessage, why: str, status: UStatus) -> None:
        """A message waits until its address takes messages again; then another `send` begins. `why`: as in Hold."""
        (open,) = self._open(endpoint, iter((message,)))
        if open is not None:
            self._note(open, f"held: {why}", code_name(status.code), status.message)
            self._finish((endpoint, message.encoded))

    def dead(self, endpoint: str, carried: Carried, code: int, reason: str) -> None:
        """A message has become a dead letter, perhaps without being sent."""
        message = carried if isinstance(carried, EncodedMessage) else EncodedMessage.of(carried)
        key, now = (endpoint, message.encoded), time.time_ns()
        open = self._sending.get(key)
        if open is None:
            if (traced := self._traced(message)) is None:
                return
            open = self._sending[key] = Sending(traced, now)
        open.code, open.error = code_name(code), reason[:TEXT_CHARACTERS_MAX]
        self._note(open, "dead letter", open.code, reason)
        self._finish(key)

    def _note(self, open: Sending, name: str, code: str, reason: str) -> None:
        found: dict[str, Value] = {"uprotocol.code": code, "uprotocol.reason": reason[:TEXT_CHARACTERS_MAX]}
        if len(open.events) >= EVENTS_MAX:
            del open.events[-1]  # the first ones and the last one say most
        open.events.append((time.time_ns(), name, found))

    def _finish(self, key: tuple[str, bytes]) -> None:
        open = self._sending.pop(key, None)
        if open is not None:
            found: dict[str, Value] = {"uprotocol.endpoint": key[0], "uprotocol.attempts": open.attempts}
            if open.code:
                found["uprotocol.code"] = open.code
            self._end("send", PRODUCER, open.traced, open.begin_ns, time.time_ns(), found, open.events, open.error)

    def _end(
        self,
        name: str,
        kind: int,
        traced: Traced,
        begin_ns: int,
        end_ns: int,
        found: dict[str, Value],
        events: Sequence[SpanEvent] = (),
        error: str = "",
    ) -> None:
        attributes = {**traced.attributes, **found}
        self._put(TraceSpan(name, kind, *traced[:2], begin_ns, max(begin_ns, end_ns), attributes, events, error))
