"""send_batch: encoded in order, written many at a time, each answered by its PUBACK.

batch -> (one batch after the other) encode what there is room for -> one write -> in flight
in flight -> PUBACKs of one read -> statuses                       ^- reach.py
          -> refused for now     -> UNAVAILABLE, and nothing behind it of its stream is tried; where all may be refused,
                                    nothing at all
          -> its address is forbidden -> PERMISSION_DENIED, and nothing behind it of its stream is sent
          -> nobody listens  -> nobody_listens, and nothing behind it that is a publish of its topic is sent
          -> connection lost -> suspects.py
                             -> UNAVAILABLE, and nothing behind is tried, also of batches that came meanwhile
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import structlog

from transports.base import NOT_OPEN, NOT_TRIED, OK, stopped
from transports.mqtt5 import reasons
from transports.mqtt5.connection import Connection, Disconnected
from transports.mqtt5.rate import Rate
from transports.mqtt5.reach import Reach
from transports.mqtt5.reasons import TOPIC_NAME_INVALID
from transports.mqtt5.suspects import Stream, Suspects
from uprotocol.encoded import Carried, EncodedMessage
from uprotocol.status import UStatusError, nobody_listens
from uprotocol.v1.uattributes_pb2 import UMessageType
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

# encoded and written in one go, half a millisecond: fewer cost more of the kernel (a tenth of all from 64 to 256), more
# only make the broker wait for us, and other tasks, too
WRITE_MESSAGES_MAX: Final = 256
# up to this size the number of messages bounds the bytes, and counting would cost each message
SMALL_BYTES: Final = 4_096
WRITE_BYTES_MAX: Final = 1 << 20  # of larger ones; the one that passes it is still written
# of larger ones, not acknowledged: what a broker does not read waits here. 100 ms of a link of 1.3 Gbit/s
IN_FLIGHT_BYTES_MAX = 16 << 20
# without the PUBACK that is due next, and without taking what we write: the connection is dropped, since nothing
# else tells a hung broker
PUBACK_MS_MAX = 20_000

# streams of one batch that the broker refuses for now; with more of them it is the broker, and the rest is not tried
REFUSED_STREAMS_MAX: Final = 16

log = structlog.get_logger()

_PACKET_ID: Final = tuple(number.to_bytes(2, "big") for number in range(65_536))


@dataclass(slots=True, eq=False)
class _Batch:
    messages: Sequence[Carried]
    statuses: list[UStatus | None] = field(default_factory=list)
    due: int = 0  # PUBACKs
    done: asyncio.Future[None] | None = None  # made when all is written and some PUBACKs are due
    why: UStatus | None = None  # the failure of the network that ended it
    # streams of which the broker has refused a message for now: nothing behind it in its stream is tried
    refused: set[Stream] = field(default_factory=set)
    # topics of which a publish was answered that nobody listens: what is behind it must not overtake it
    unheard: set[str] = field(default_factory=set)
    # streams of which a message was answered that its address is forbidden: nor must what is behind that, should the
    # broker's rules change in between
    forbidden: dict[Stream, UStatus] = field(default_factory=dict)


class Window:
    """What has been sent and not been acknowledged. Lives on the event loop; messages in flight are bounded, and so are
    their bytes.

    A message in flight when the connection is lost is answered UNAVAILABLE, and forgotten: the caller sends it again if
    it matters. (MQTT would have us repeat it on a resumed session; of QoS 1 the broker keeps nothing that would miss
    it.)

    `topic_if_told` answers the topic of a publish whose owner wants to know that nobody listens; None for all others.
    `slashes` answers how many the topic of a message has. `rate`, if given, bounds what leaves in a second.
    """

    def __init__(
        self,
        encode: Callable[[Carried], tuple[bytes, bytes]],
        next_packet_id: Callable[[], int],
        topic_if_told: Callable[[Carried], str | None],
        slashes: Callable[[Carried], int],
        rate: Rate | None = None,
    ) -> None:
        self._encode, self._next_packet_id, self._topic_if_told = encode, next_packet_id, topic_if_told
        self._slashes, self._rate = slashes, rate
        # packet id -> its place, and its bytes if they are more than SMALL_BYTES
        self._in_flight: dict[int, tuple[_Batch, int, int]] = {}
        self._large_bytes = 0  # the sum of those
        self._suspects = Suspects()
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._reach = Reach(0)
        self._timed: tuple[int, float] | None = None  # a message: packet id, and when it left
        self._was_full = False  # since then
        self._under_way: set[_Batch] = set()  # not answered yet
        self._connection: Connection | None = None
        self._lost = NOT_OPEN  # why there is, or was, no connection
        self._progress_s = 0.0

    def __repr__(self) -> str:
        reach = self._reach
        return f"Window(in_flight={len(self._in_flight)} of {reach.messages}, at most {reach.messages_max})"

    @property
    def messages(self) -> int:
        """So many may be in flight now."""
        return self._reach.messages if self._rate is None else min(self._reach.messages, self._rate.at_once)

    @property
    def troubles(self) -> list[str]:
        """Of messages that the connection does not survive."""
        return self._suspects.troubles

    def open(self, connection: Connection, size: int) -> None:
        """A connection is there, on which up to `size` messages may be in flight."""
        self._connection, self._reach, self._timed = connection, Reach(size), None

    def shut(self, why: UStatus) -> None:
        """It is gone: everything that is not acknowledged gets `why`."""
        connection, is_closed = self._connection, why == NOT_OPEN
        refusal = None
        if connection is not None and not is_closed and len(self._in_flight) == 1 and (how := connection.hung_up):
            refusal = self._suspect(how)
        self._connection, self._lost = None, why
        for batch, index, _ in self._in_flight.values():
            batch.statuses[index], batch.why = refusal or why, why
            batch.due = 0
            if batch.done is not None and not batch.done.done():
                batch.done.set_result(None)
        self._in_flight.clear()
        self._large_bytes = 0
        self._freed.set()

    def _suspect(self, how: OSError) -> UStatus | None:
        """The connection has ended so over the one message that is in flight. What the broker says of that message, if
        it says anything."""
        ((batch, index, _),) = self._in_flight.values()
        message, refusal, slashes = batch.messages[index], None, None
        if isinstance(how, Disconnected) and reasons.is_of_a_message(how.reason):
            refusal = UStatus(
                code=reasons.code_of(how.reason), message=f"the broker ends the connection over it: {how}"
            )
            if refusal.code != UCode.PERMISSION_DENIED:  # the next one of its stream may be taken
                return refusal
            slashes = self._slashes(message) if how.reason == TOPIC_NAME_INVALID else None
        now_s = asyncio.get_running_loop().time()
        self._suspects.lost_with(_stream(message), message, now_s, refusal, slashes)
        return refusal

    def _progressed(self, connection: Connection) -> None:
        """Another PUBACK is due next. Brokers answer in order: a message that is left out is not answered later."""
        self._progress_s = asyncio.get_running_loop().time()
        connection.watch_delivery()

    @property
    def stalled(self) -> bool:
        """True if the broker owes the PUBACK that is due next for too long, and has not even taken bytes of its
        message."""
        progress_s = (
            self._progress_s if self._connection is None else max(self._progress_s, self._connection.delivered_s)
        )
        late_s = asyncio.get_running_loop().time() - progress_s
        return bool(self._in_flight) and late_s > PUBACK_MS_MAX / 1000

    async def drained(self) -> None:
        """Completes when nothing is in flight."""
        while self._in_flight:
            self._freed.clear()
            await self._freed.wait()

    async def send(self, messages: Sequence[Carried]) -> list[UStatus]:
        """One status for each message, in order. `encode` raises UStatusError for what may not be sent, which does not
        stop the rest."""
        connection, count = self._connection, len(messages)
        if connection is None:
            return stopped([], count, self._lost)
        if any(other.why is not None or other.refused for other in self._under_way):
            return stopped([], count, _BEHIND)  # the sender of that one does not know yet: these would overtake it
        batch = _Batch(messages)
        self._under_way.add(batch)
        try:
            await self._send(batch, connection)
        finally:
            self._under_way.discard(batch)
        sent = [status for status in batch.statuses if status is not None]
        assert len(sent) == len(batch.statuses), "every message that was tried has a status when its batch is done"
        return sent if len(sent) == count else stopped(sent, count, batch.why or self._lost)

    async def _send(self, batch: _Batch, connection: Connection) -> None:
        """All of it, until it is answered; or until the network fails."""
        count = len(batch.messages)
        async with self._turn:
            while len(batch.statuses) < count and batch.why is None and self._connection is connection:
                room = min(self._reach.messages - len(self._in_flight), WRITE_MESSAGES_MAX)
                if room <= 0 or self._large_bytes >= IN_FLIGHT_BYTES_MAX or self._is_on_trial(batch):
                    self._freed.clear()
                    await self._freed.wait()
                    continue
                if self._rate is not None:
                    room = min(room, self._rate.room(asyncio.get_running_loop().time()))
                    if not room:
                        await asyncio.sleep(self._rate.wait_s)
                        continue
                due = batch.due
                self._write_some(batch, len(batch.statuses) + room, connection)
                if self._rate is not None:
                    self._rate.leave(batch.due - due)
                await asyncio.sleep(0)  # let it leave, and let PUBACKs in
        if batch.due:
            batch.done = asyncio.get_running_loop().create_future()
            await batch.done

    def _is_on_trial(self, batch: _Batch) -> bool:
        """A suspect is in flight, or is next: it has to be alone."""
        if not self._suspects or not self._in_flight:
            return False
        first, index, _ = next(iter(self._in_flight.values()))
        both = first.messages[index], batch.messages[len(batch.statuses)]
        return any(self._suspects.is_suspect(_stream(message), self._slashes(message)) for message in both)

    def _held_back(self, stream: Stream, message: Carried, batch: _Batch) -> UStatus | None:
        """Why nothing of this stream is to be sent now; None if it is."""
        if stream in batch.refused:
            return _BEHIND
        status = self._suspects.pass_over(stream, asyncio.get_running_loop().time(), self._slashes(message))
        if status is not None and status.code == UCode.UNAVAILABLE:
            batch.refused.add(stream)
        return status

    def _write_some(self, batch: _Batch, end: int, connection: Connection) -> None:
        """As many messages in front of `end` as one write may have."""
        packets: list[bytes] = []
        in_flight, octets = self._in_flight, 0
        unheard = {topic for other in self._under_way for topic in other.unheard}
        forbidden = {stream: status for other in self._under_way for stream, status in other.forbidden.items()}
        for message in batch.messages[len(batch.statuses) : end]:
            is_suspect = False
            if batch.refused or self._suspects:
                stream = _stream(message)
                if (held_back := self._held_back(stream, message, batch)) is not None:
                    batch.statuses.append(held_back)
                    continue
                is_suspect = self._suspects.is_suspect(stream, self._slashes(message))
                if is_suspect and in_flight:
                    break
            if forbidden and (stream := _stream(message)) in forbidden:
                batch.forbidden[stream] = forbidden[stream]
                batch.statuses.append(forbidden[stream])
                continue
            if unheard and (topic := self._topic_if_told(message)) in unheard:
                assert topic is not None
                batch.unheard.add(topic)
                batch.statuses.append(_UNHEARD)
                continue
            try:
                head, tail = self._encode(message)
            except UStatusError as error:
                batch.statuses.append(error.status)
                continue
            except Exception as error:
                log.exception("a message could not be encoded, and nobody foresaw why")
                why = f"the message could not be encoded: {error!r}"
                batch.statuses.append(UStatus(code=UCode.INTERNAL, message=why))
                continue
            packet_id = self._next_packet_id()
            while packet_id in in_flight:
                packet_id = self._next_packet_id()
            size = len(tail) if len(tail) > SMALL_BYTES else 0
            in_flight[packet_id] = (batch, len(batch.statuses), size)
            batch.statuses.append(None)
            packets += (head, _PACKET_ID[packet_id], tail)
            octets += size
            if octets >= WRITE_BYTES_MAX or is_suspect:
                break
        if packets:
            is_first = len(in_flight) == len(packets) // 3  # none was due before
            if self._timed is None:
                self._timed, self._was_full = (packet_id, asyncio.get_running_loop().time()), False
            if len(in_flight) >= self._reach.messages:
                self._was_full = True
            batch.due += len(packets) // 3
            self._large_bytes += octets
            connection.write(b"".join(packets))
            if is_first:
                self._progressed(connection)

    def on_pubacks(self, pubacks: list[tuple[int, int]], whys: Mapping[int, str]) -> None:
        """[(packet id, reason code)] of one read; reason strings by packet id, of those that have one."""
        in_flight, octets = self._in_flight, 0
        oldest = next(iter(in_flight), None)
        for packet_id, reason in pubacks:
            entry = in_flight.get(packet_id)
            if entry is None:
                continue
            batch, index, size = entry
            if self._suspects:
                message = batch.messages[index]
                self._suspects.answered(_stream(message), self._slashes(message))
            status = _ANSWERS[reason]
            if status is not OK and packet_id in whys:
                status = _answer(reason, {"ReasonString": whys[packet_id]})
            if reason == reasons.NO_MATCHING_SUBSCRIBERS:
                status = self._unheard(batch, index)
            elif status is not OK and status.code == UCode.UNAVAILABLE:
                self._refused(batch, index, reason, status)
            elif status is not OK and status.code == UCode.PERMISSION_DENIED:
                batch.forbidden[_stream(batch.messages[index])] = status
            batch.statuses[index] = status
            del in_flight[packet_id]  # not before it has its status: what is in flight gets one when the network fails
            octets += size
            batch.due -= 1
            if not batch.due and batch.done is not None and not batch.done.done():
                batch.done.set_result(None)
        self._large_bytes -= octets
        now_s = asyncio.get_running_loop().time()
        if oldest not in in_flight and self._connection is not None:
            self._progressed(self._connection)
        self._reach.answered()
        if self._timed is not None and self._timed[0] not in self._in_flight:
            self._reach.timed(now_s - self._timed[1], was_full=self._was_full)
            self._timed = None
        self._freed.set()

    def _unheard(self, batch: _Batch, index: int) -> UStatus:
        """The broker has thrown it away. What was in flight with it has its own PUBACK: a subscriber may have come in
        between, and has got it then."""
        message = batch.messages[index]
        if _is_request(message):
            return _NOBODY
        topic = self._topic_if_told(message)
        if topic is None:
            return OK
        batch.unheard.add(topic)
        return _UNHEARD

    def _refused(self, batch: _Batch, index: int, reason: int, status: UStatus) -> None:
        """For now. Nothing behind it is tried, but for what has been sent already, and for other streams of its batch
        where it may be this one alone that the broker does not take."""
        for other in self._under_way:
            if other is not batch:
                other.why = _BEHIND
        if reasons.is_of_all(reason) or len(batch.refused) >= REFUSED_STREAMS_MAX:
            batch.why = status
        else:
            batch.refused.add(_stream(batch.messages[index]))


_BEHIND: Final = UStatus(code=UCode.UNAVAILABLE, message=NOT_TRIED)
_NOBODY: Final = nobody_listens(
    "the broker has no subscriber for this request: its service is not there now, try again later"
)
_UNHEARD: Final = nobody_listens(
    "the broker has no subscriber for this topic, and has thrown the message away: send it again when there is one"
)


def _stream(message: Carried) -> Stream:
    if type(message) is EncodedMessage:
        return message.stamp.address, b"", message.stamp.priority
    attributes = message.attributes
    return attributes.source.SerializeToString(), attributes.sink.SerializeToString(), attributes.priority


def _is_request(message: Carried) -> bool:
    kind = message.stamp.type if type(message) is EncodedMessage else message.attributes.type
    return kind == UMessageType.UMESSAGE_TYPE_REQUEST


def _answer(reason: int, properties: Mapping[str, str] = MappingProxyType({})) -> UStatus:
    return OK if reason < reasons.FAILURE_MIN else reasons.refused("the message", reason, properties).status


_ANSWERS: Final = tuple(map(_answer, reasons.CODES))  # to a message, by the reason code of its PUBACK
