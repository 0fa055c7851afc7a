"""send_batch: messages are encoded in order, written many at a time, and each is answered by its PUBACK.

batch -> (one batch after the other) encode as many as fit -> one write -> in flight
in flight -> PUBACKs of one read -> statuses                               ^- Reach
          -> refused for now     -> UNAVAILABLE, and nothing behind it of its stream is tried; if the broker may refuse
                                    everything, nothing at all is tried
          -> address forbidden   -> PERMISSION_DENIED, and nothing behind it of its stream is sent
          -> nobody listens      -> nobody_listens, and no publish of its topic behind it is sent
          -> connection lost     -> alone in flight: Suspects
                                 -> UNAVAILABLE, and nothing behind it is tried, nor batches that came meanwhile

One round trip is timed at a time. As long as the last one, though more were in flight: the path takes the time, twice
as many next. Much longer: they wait in front of the broker, as few as before.

Suspects are streams over whose messages the broker hangs up. They are skipped for a while, so that others get through:

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

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

import structlog

from transports.base import NOT_OPEN, NOT_TRIED, OK, stopped
from transports.mqtt5 import reasons
from transports.mqtt5.connection import Connection, Disconnected
from transports.mqtt5.reasons import TOPIC_NAME_INVALID
from uprotocol import uri as uris
from uprotocol.attributes import REQUEST
from uprotocol.encoded import Carried, EncodedMessage
from uprotocol.pacing import Pace
from uprotocol.status import UStatusError, nobody_listens
from uprotocol.transport import UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

# encoded and written in one go, half a millisecond. Fewer cost more in the kernel (a tenth of everything from 64 to
# 256); more only make the broker, and other tasks, wait
WRITE_MESSAGES_MAX: Final = 256
# up to this size the number of messages bounds the bytes, and counting would cost each message
UNCOUNTED_BYTES_MAX: Final = 4_096
WRITE_BYTES_MAX: Final = 1 << 20  # of larger ones; the message that exceeds it is still written
# of larger ones, not acknowledged: what a broker does not read is kept here. 100 ms of a link of 1.3 Gbit/s
IN_FLIGHT_BYTES_MAX = 16 << 20
# without the PUBACK that is due next, and without the broker taking bytes: the connection is dropped, since nothing
# else shows that a broker hangs
PUBACK_MS_MAX = 20_000

# streams of one batch that the broker refuses for now; with more the broker itself is the cause, and nothing is tried
REFUSED_STREAMS_MAX: Final = 16

# a broker on the same machine is busy with so many for some 10 ms. More would only wait in front of it, and urgent
# messages behind them
NEAR_MESSAGES: Final = 512
# of the round trip with few in flight: up to this the time is spent on the path, not in the broker
EASY: Final = 1.5
LATE: Final = 1.75  # from here on messages wait in front of the broker
LATE_IN_A_ROW: Final = 3  # a single late one has many causes: we, or the broker, had something else to do
TRIALS_APART_MAX: Final = 16  # round trips between two trials of more messages; doubles with each trial that fails

LOSSES_MIN: Final = 2  # the first one may be chance
# each try costs the connection, and 0.5 s without one
SKIPPED_S_MIN: Final = 5.0  # a broker that is killed twice costs its stream no more
SKIPPED_S_MAX: Final = 300.0
SUSPECTS_MAX = 1_024  # streams; of more than that the oldest is forgotten
TOPICS_MIN: Final = 3  # streams whose topics are invalid: with fewer, the slashes may not be the cause

StreamKey = tuple[bytes, bytes, int]
"""Messages that must keep their order: source, sink, priority; for an EncodedMessage source and sink are one value."""

log = structlog.get_logger()

_PACKET_ID: Final = tuple(number.to_bytes(2, "big") for number in range(65_536))


class Reach:
    """`messages` may be in flight now, and never more than `messages_max`.

    It begins with one, and doubles with every read that brings PUBACKs, up to NEAR_MESSAGES. Some brokers answer a
    message that they refuse and then hang up (mosquitto 2.0.11, where an access rule forbids the topic), so the
    answers to the others in flight are lost. With many in flight they would all be sent and lost again and again; with
    few, the refused message gets its answer.
    """

    def __init__(self, messages_max: int) -> None:
        self.messages_max = messages_max
        self._near = min(NEAR_MESSAGES, messages_max)
        self.messages = min(1, messages_max)
        self._base_s = 0.0  # a round trip with few in flight
        self._until_trial, self._apart = 0, 1  # round trips
        self._late = 0  # in a row

    def __repr__(self) -> str:
        return f"Reach({self.messages} of {self.messages_max}, base={self._base_s * 1000:.1f} ms)"

    def on_pubacks(self, round_trip_s: float | None, *, was_full: bool) -> None:
        """One read has brought PUBACKs. `round_trip_s` of the timed message, if that is answered now; `was_full`: since
        it was sent, as many were in flight as may be."""
        if self.messages < self._near:
            self.messages = min(2 * self.messages, self._near)
        if round_trip_s is None:
            return
        if self.messages <= self._near:
            self._base_s = round_trip_s  # the path may have changed
        else:
            self._base_s = min(self._base_s, round_trip_s)
        self._late = self._late + 1 if round_trip_s > LATE * self._base_s else 0
        if self._late == LATE_IN_A_ROW:
            self._late = 0
            self.messages = max(self.messages // 2, self._near)
            self._apart = self._until_trial = min(2 * self._apart, TRIALS_APART_MAX)
        elif self._until_trial:
            self._until_trial -= 1
        elif was_full and self.messages >= self._near and round_trip_s <= EASY * self._base_s:
            if self.messages > self._near:
                self._apart = 1  # the last trial went well
            self.messages = min(2 * self.messages, self.messages_max)


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
                log.error("a broker ends the connection on topics of some depth", why=self._invalid_topics)

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


@dataclass(slots=True, eq=False)
class _Sending:
    """One call of `send`."""

    messages: Sequence[Carried]
    statuses: list[UStatus | None] = field(default_factory=list)
    due: int = 0  # PUBACKs
    done: asyncio.Future[None] | None = None  # made when everything is written and some PUBACKs are due
    why: UStatus | None = None  # the failure of the network that ended it
    # streams of which the broker has refused a message for now: nothing behind it in its stream is tried
    refused: set[StreamKey] = field(default_factory=set)
    # topics with a publish that nobody listens to: no later publish may overtake it
    unheard: set[str] = field(default_factory=set)
    # streams with a message whose address is forbidden: no later message may overtake it, even if the broker's rules
    # change in between
    forbidden: dict[StreamKey, UStatus] = field(default_factory=dict)


class Window:
    """Messages that were sent and are not acknowledged. Lives on the event loop; bounded in messages and in bytes.

    A message that is in flight when the connection is lost is answered UNAVAILABLE and forgotten: the caller sends it
    again if it matters. (MQTT asks us to repeat it on a resumed session; for QoS 1 the broker keeps nothing that needs
    this.)

    It keeps `owner.in_flight_messages` up to date. `topic_of_absence` returns the topic of a publish whose owner wants
    to know that nobody listens, and None for any other message; `topic` that of any message. `pace`, if given, bounds
    the messages sent in a second.
    """

    def __init__(
        self,
        owner: UTransport,
        encode: Callable[[Carried], tuple[bytes, bytes]],
        next_packet_id: Callable[[], int],
        topic_of_absence: Callable[[Carried], str | None],
        topic: Callable[[Carried], str],
        pace: Pace | None = None,
    ) -> None:
        self._owner, self._encode, self._next_packet_id = owner, encode, next_packet_id
        self._topic_of_absence, self._topic, self._pace = topic_of_absence, topic, pace
        self._at_once = pace.at_once if pace is not None else sys.maxsize
        # packet id -> its index in the call, and its bytes if they are more than UNCOUNTED_BYTES_MAX
        self._in_flight: dict[int, tuple[_Sending, int, int]] = {}
        self._large_bytes = 0  # the sum of those
        self.suspects = Suspects()
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._reach = Reach(0)
        self._timed: tuple[int, float] | None = None  # the message that is timed: packet id, and when it was sent
        self._was_full = False  # since then
        self._unanswered: set[_Sending] = set()
        self._connection: Connection | None = None
        self._lost = NOT_OPEN  # why there is, or was, no connection

    def __repr__(self) -> str:
        reach = self._reach
        return f"Window(in_flight={len(self._in_flight)} of {reach.messages}, at most {reach.messages_max})"

    def open(self, connection: Connection, size: int) -> None:
        """There is a connection, on which up to `size` messages may be in flight."""
        self._connection, self._reach, self._timed = connection, Reach(size), None
        self._owner.in_flight_messages = min(self._reach.messages, self._at_once)

    def shut(self, why: UStatus) -> None:
        """The connection is lost: every message that is not acknowledged is answered `why`."""
        connection, is_closed = self._connection, why == NOT_OPEN
        refusal = None
        if connection is not None and not is_closed and len(self._in_flight) == 1 and (how := connection.hung_up):
            refusal = self._suspect(how)
        self._connection, self._lost = None, why
        for sending, index, _ in self._in_flight.values():
            sending.statuses[index], sending.why = refusal or why, why
            sending.due = 0
            if sending.done is not None and not sending.done.done():
                sending.done.set_result(None)
        self._in_flight.clear()
        self._large_bytes = 0
        self._freed.set()

    def _suspect(self, how: OSError) -> UStatus | None:
        """Note that the broker has ended the connection while one message was in flight. Returns what it said of that
        message, if anything."""
        ((sending, index, _),) = self._in_flight.values()
        message, refusal, slashes = sending.messages[index], None, None
        if isinstance(how, Disconnected) and how.reason in reasons.OF_A_MESSAGE:
            refusal = UStatus(
                code=reasons.code_of(how.reason), message=f"the broker ends the connection over it: {how}"
            )
            if refusal.code != UCode.PERMISSION_DENIED:  # the next message of its stream may be taken
                return refusal
            slashes = self._slashes(message) if how.reason == TOPIC_NAME_INVALID else None
        now_s = asyncio.get_running_loop().time()
        self.suspects.lost_with(_stream(message), message, now_s, refusal, slashes)
        return refusal

    @property
    def stalled(self) -> bool:
        """True if the next PUBACK is overdue and the broker has not even taken bytes of its message."""
        if self._connection is None or not self._in_flight:
            return False
        return asyncio.get_running_loop().time() - self._connection.delivered_s > PUBACK_MS_MAX / 1000

    async def drained(self) -> None:
        while self._in_flight:
            self._freed.clear()
            await self._freed.wait()

    async def send(self, messages: Sequence[Carried]) -> list[UStatus]:
        """Returns one status for each message, in order, when all are answered or the network has failed. If `encode`
        raises UStatusError, that is the status of its message, and the rest is sent."""
        connection, count = self._connection, len(messages)
        if connection is None:
            return stopped([], count, self._lost)
        if any(other.why is not None or other.refused for other in self._unanswered):
            return stopped([], count, _BEHIND)  # the sender of that one does not know yet: these would overtake it
        sending = _Sending(messages)
        self._unanswered.add(sending)
        try:
            async with self._turn:
                while len(sending.statuses) < count and sending.why is None and self._connection is connection:
                    free = min(self._reach.messages - len(self._in_flight), WRITE_MESSAGES_MAX)
                    on_trial = self._in_flight and self.suspects.by_stream and self._is_on_trial(sending)
                    if free <= 0 or self._large_bytes >= IN_FLIGHT_BYTES_MAX or on_trial:
                        self._freed.clear()
                        await self._freed.wait()
                        continue
                    if self._pace is not None and not (free := min(free, self._pace.available())):
                        await asyncio.sleep(self._pace.wait_s)
                        continue
                    self._write_some(sending, len(sending.statuses) + free, connection)
                    await asyncio.sleep(0)  # let it leave, and let PUBACKs in
            if sending.due:
                sending.done = asyncio.get_running_loop().create_future()
                await sending.done
        finally:
            self._unanswered.discard(sending)
        sent = [status for status in sending.statuses if status is not None]
        assert len(sent) == len(sending.statuses), "every message that was tried has a status when its call is done"
        return sent if len(sent) == count else stopped(sent, count, sending.why or self._lost)

    def _slashes(self, message: Carried) -> int:
        return self._topic(message).count("/")

    def _is_on_trial(self, sending: _Sending) -> bool:
        """True if a suspect is in flight or is next: it must be alone."""
        first, index, _ = next(iter(self._in_flight.values()))
        both = first.messages[index], sending.messages[len(sending.statuses)]
        return any(self.suspects.is_suspect(_stream(message), self._slashes(message)) for message in both)

    def _held_back(self, stream: StreamKey, message: Carried, sending: _Sending) -> UStatus | None:
        """Returns why nothing of this stream may be sent now; None if it may."""
        if stream in sending.refused:
            return _BEHIND
        status = self.suspects.skip_reason(stream, asyncio.get_running_loop().time(), self._slashes(message))
        if status is not None and status.code == UCode.UNAVAILABLE:
            sending.refused.add(stream)
        return status

    def _write_some(self, sending: _Sending, end: int, connection: Connection) -> None:
        """Write the messages before `end`, as many as one write may have."""
        packets: list[bytes] = []
        in_flight, octets = self._in_flight, 0
        unheard = {topic for other in self._unanswered for topic in other.unheard}
        forbidden = {stream: status for other in self._unanswered for stream, status in other.forbidden.items()}
        for message in sending.messages[len(sending.statuses) : end]:
            # 1: messages of a stream that the broker has refused, or may refuse
            is_suspect = False
            if sending.refused or self.suspects.by_stream:
                stream = _stream(message)
                if (held_back := self._held_back(stream, message, sending)) is not None:
                    sending.statuses.append(held_back)
                    continue
                is_suspect = self.suspects.is_suspect(stream, self._slashes(message))
                if is_suspect and in_flight:
                    break
            # 2: messages that would overtake an earlier one of theirs, which is forbidden or has no subscriber
            if forbidden and (stream := _stream(message)) in forbidden:
                sending.forbidden[stream] = forbidden[stream]
                sending.statuses.append(forbidden[stream])
                continue
            if unheard and (topic := self._topic_of_absence(message)) in unheard:
                assert topic is not None
                sending.unheard.add(topic)
                sending.statuses.append(_UNHEARD)
                continue
            try:  # 3: messages that MQTT can't carry
                head, tail = self._encode(message)
            except UStatusError as error:
                sending.statuses.append(error.status)
                continue
            except Exception as error:
                log.exception("a message could not be encoded: unexpected error")
                why = f"the message could not be encoded: {error!r}"
                sending.statuses.append(UStatus(code=UCode.INTERNAL, message=why))
                continue
            packet_id = self._next_packet_id()  # 4: all others
            while packet_id in in_flight:
                packet_id = self._next_packet_id()
            size = len(tail) if len(tail) > UNCOUNTED_BYTES_MAX else 0
            in_flight[packet_id] = (sending, len(sending.statuses), size)
            sending.statuses.append(None)
            packets += (head, _PACKET_ID[packet_id], tail)
            octets += size
            if octets >= WRITE_BYTES_MAX or is_suspect:
                break
        if packets:
            count = len(packets) // 3
            if self._timed is None:
                self._timed, self._was_full = (packet_id, asyncio.get_running_loop().time()), False
            if len(in_flight) >= self._reach.messages:
                self._was_full = True
            sending.due += count
            self._large_bytes += octets
            if self._pace is not None:
                self._pace.take(count)
            connection.write(b"".join(packets), watch=len(in_flight) == count)  # no PUBACK was due before

    def on_pubacks(self, pubacks: list[tuple[int, int]], whys: Mapping[int, str]) -> None:
        """`pubacks`: [(packet id, reason code)] of one read. `whys`: reason strings by packet id."""
        in_flight, octets = self._in_flight, 0
        oldest = next(iter(in_flight), None)
        for packet_id, reason in pubacks:
            entry = in_flight.get(packet_id)
            if entry is None:
                continue
            sending, index, size = entry
            if self.suspects.by_stream:
                message = sending.messages[index]
                self.suspects.answered(_stream(message), self._slashes(message))
            status = _ANSWERS[reason]
            if status is not OK and packet_id in whys:
                status = _answer(reason, {"ReasonString": whys[packet_id]})
            if reason == reasons.NO_MATCHING_SUBSCRIBERS:
                status = self._unheard(sending, index)
            elif status is not OK and status.code == UCode.UNAVAILABLE:
                self._refused(sending, index, reason, status)
            elif status is not OK and status.code == UCode.PERMISSION_DENIED:
                sending.forbidden[_stream(sending.messages[index])] = status
            sending.statuses[index] = status
            del in_flight[packet_id]  # after its status is set: a failure of the network sets that of all in flight
            octets += size
            sending.due -= 1
            if not sending.due and sending.done is not None and not sending.done.done():
                sending.done.set_result(None)
        self._large_bytes -= octets
        if in_flight and oldest not in in_flight and self._connection is not None:
            # brokers answer in order, so the next PUBACK is due now: one that was left out does not come later
            self._connection.watch_delivery()
        round_trip_s = None
        if self._timed is not None and self._timed[0] not in in_flight:
            round_trip_s, self._timed = asyncio.get_running_loop().time() - self._timed[1], None
        self._reach.on_pubacks(round_trip_s, was_full=self._was_full)
        self._owner.in_flight_messages = min(self._reach.messages, self._at_once)
        self._freed.set()

    def _unheard(self, sending: _Sending, index: int) -> UStatus:
        """The broker has thrown the message away. Messages that were in flight with it have their own PUBACKs: a
        subscriber may have come in between and got them."""
        message = sending.messages[index]
        if (message.stamp.type if type(message) is EncodedMessage else message.attributes.type) == REQUEST:
            return _NOBODY
        topic = self._topic_of_absence(message)
        if topic is None:
            return OK
        sending.unheard.add(topic)
        return _UNHEARD

    def _refused(self, sending: _Sending, index: int, reason: int, status: UStatus) -> None:
        """The broker does not take the message now. Nothing behind it is tried, except what was sent already, and
        other streams of its batch if the broker may refuse this one alone."""
        for other in self._unanswered:
            if other is not sending:
                other.why = _BEHIND
        if reason in reasons.OF_ALL or len(sending.refused) >= REFUSED_STREAMS_MAX:
            sending.why = status
        else:
            sending.refused.add(_stream(sending.messages[index]))


_BEHIND: Final = UStatus(code=UCode.UNAVAILABLE, message=NOT_TRIED)
_NOBODY: Final = nobody_listens(
    "the broker has no subscriber for this request: its service is not there now, try again later"
)
_UNHEARD: Final = nobody_listens(
    "the broker has no subscriber for this topic, and has thrown the message away: send it again when there is one"
)


def _wait_s(tries: int) -> float:
    """Returns how long to wait for the next try after so many that failed."""
    return min(SKIPPED_S_MIN * (1 << min(tries, 8)), SKIPPED_S_MAX)


def _stream(message: Carried) -> StreamKey:
    if type(message) is EncodedMessage:
        return message.stamp.address, b"", message.stamp.priority
    attributes = message.attributes
    return attributes.source.SerializeToString(), attributes.sink.SerializeToString(), attributes.priority


def _answer(reason: int, properties: Mapping[str, str] = MappingProxyType({})) -> UStatus:
    return OK if reason < reasons.FAILURE_MIN else reasons.refused("the message", reason, properties).status


_ANSWERS: Final = tuple(map(_answer, reasons.CODES))  # to a message, by the reason code of its PUBACK
