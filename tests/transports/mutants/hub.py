"""The network of the good plugin: a TCP hub that keeps messages for each end until the end has taken them.

SEND from an end -> room in every other end's queue? -> MESSAGE to those whose filters match -> TAKEN: forgotten
                    no: the sender gets no DONE         no match: kept for PULL                 AGAIN: from the oldest
                        (or FULL, if `waits` is False)
IF_HEARD: the same, but where no filter matches it is given to nobody, and the sender gets UNHEARD

Frame: 4 octets length, 1 octet kind, 8 octets number, body. The body of SEND, IF_HEARD and MESSAGE is the message, and
before it the authority that it is from (`keyed`). An end that is cut off, or leaves without BYE, keeps its queue (a
session); the answer to HELLO says whether there was one.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Iterator
from typing import Final

from google.protobuf.message import DecodeError

from transports.listeners import Filter
from uprotocol import uri as uris
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

HELLO, BYE, LISTEN, UNLISTEN, SEND, PULL, TAKEN, AGAIN, IF_HEARD = range(9)  # from an end
DONE, REFUSED, NOTHING, MESSAGE, RESENT, UNHEARD, FULL = range(9, 16)  # from the hub
KNOWN: Final = b"known"  # the body of the answer to HELLO, if there is a session
HEAD: Final = struct.Struct("!IBQ")
READ_BYTES: Final = 1 << 16
MESSAGE_BYTES_MAX: Final = 1 << 19
QUEUE_MESSAGES_MAX: Final = 512  # of one end: beyond it senders wait
QUEUE_BYTES_MAX: Final = 16 << 20
SESSION_MESSAGES_MAX: Final = 10_000  # of an end that is away
PULL_MESSAGES_MAX: Final = 256

RESUMES: Final = 1  # the number of a HELLO: the filters of the session stay, since their listeners are yet to come

Frame = tuple[int, int, bytes]


def frame(kind: int, number: int = 0, body: bytes = b"") -> bytes:
    return HEAD.pack(HEAD.size + len(body), kind, number) + body


def split(buffer: bytearray) -> Iterator[Frame]:
    """The whole frames at the start of `buffer`, which keeps the rest."""
    at = 0
    while len(buffer) - at >= HEAD.size:
        length, kind, number = HEAD.unpack_from(buffer, at)
        if len(buffer) - at < length:
            break
        yield kind, number, bytes(buffer[at + HEAD.size : at + length])
        at += length
    del buffer[:at]


def keyed(authority: str, message: bytes) -> bytes:
    """`message` after the authority of its source, at most 255 octets, like a topic or key of other networks."""
    key = authority.encode()
    return bytes((len(key),)) + key + message


def unkeyed(body: bytes) -> tuple[str, bytes]:
    """(authority, message). Raises ValueError if `body` is malformed."""
    if not body or len(body) <= body[0]:
        raise ValueError(f"a body begins with its key's length, got {body[:1]!r} and {len(body)} octets in all")
    return body[1 : 1 + body[0]].decode(), body[1 + body[0] :]


def _address(body: bytes) -> UAttributes:
    """The attributes in a body that an end has sent."""
    return UMessage.FromString(unkeyed(body)[1]).attributes


def pack(filter: Filter) -> bytes:
    """A pair of filters, as the addresses of attributes."""
    return pack_address(filter.source, filter.sink)


def pack_address(source: UUri, sink: UUri | None) -> bytes:
    return UAttributes(source=source, sink=sink).SerializeToString()


def unpack(body: bytes) -> Filter:
    attributes = UAttributes.FromString(body)
    return Filter.of(attributes.source, attributes.sink if attributes.HasField("sink") else None)


class Session:
    """The state of one end at the hub. `number` counts the messages that it was given."""

    def __init__(self) -> None:
        self.filters: dict[bytes, Filter] = {}
        self.queue: deque[tuple[int, bytes]] = deque()  # not taken yet
        self.for_pull: deque[tuple[Filter, bytes]] = deque(maxlen=PULL_MESSAGES_MAX)
        self.number = self.queued_bytes = 0
        self.writer: asyncio.StreamWriter | None = None

    def hears(self, address: UAttributes) -> bool:
        return any(filter.matches(address.source, _sink(address)) for filter in self.filters.values())

    def give(self, address: UAttributes | None, body: bytes) -> None:
        if address is None or self.hears(address):
            if self.writer is not None or len(self.queue) < SESSION_MESSAGES_MAX:
                self.number += 1
                self.queue.append((self.number, body))
                self.queued_bytes += len(body)
                self.write(frame(MESSAGE, self.number, body))
        else:
            self.for_pull.append((Filter((uris.key(address.source), None), address.source, _sink(address)), body))

    def write(self, data: bytes) -> None:
        if self.writer is not None:
            self.writer.write(data)

    def pull(self, wanted: Filter) -> bytes | None:
        for entry in self.for_pull:
            if wanted.matches(entry[0].source, entry[0].sink):
                self.for_pull.remove(entry)
                return entry[1]
        return None


def _sink(address: UAttributes) -> UUri | None:
    return address.sink if address.HasField("sink") else None


class Hub:
    """The network. `cut`, `mend` and `forget` affect one authority. Authorities in `refused` may not join, those in
    `may_not_listen` not listen, those in `refused_filters` not use these filters, those in `refused_addresses` not send
    there. Those in `full_for` get the answer FULL; if `waits` is False, so does everybody at a full queue."""

    waits = True
    queue_messages_max = QUEUE_MESSAGES_MAX

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.away: set[str] = set()
        self.refused: set[str] = set()
        self.may_not_listen: set[str] = set()
        self.refused_filters: set[tuple[str, bytes]] = set()  # authority, packed
        self.refused_addresses: set[tuple[str, bytes]] = set()  # authority, packed
        self.full_for: set[str] = set()
        self.port = 0
        self._has_capacity = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self, authority: str) -> None:
        self.away.add(authority)
        session = self.sessions.get(authority)
        if session is not None and session.writer is not None:
            session.writer.transport.abort()

    def mend(self, authority: str) -> None:
        self.away.discard(authority)

    def forget(self, authority: str) -> None:
        """Delete the session: its filters, and the messages that wait."""
        self.sessions.pop(authority, None)

    def inject(self, body: bytes) -> None:
        """Give `body` to all ends with a matching filter; without a readable address, to all ends."""
        try:
            address = _address(body)
        except (ValueError, DecodeError):
            address = None
        for session in self.sessions.values():
            session.give(address, body)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        connection = _Connection(self, reader, writer)
        try:
            await connection.run()
        except (OSError, asyncio.CancelledError):
            pass  # the end has disconnected, or the test ends
        finally:
            connection.end()
            self._has_capacity.set()

    async def carry(self, sender: str, body: bytes) -> None:
        """Put `body` into the queues of all other ends when none of them is full."""
        address = _address(body)
        others = [name for name in self.sessions if name != sender]
        while any(self._is_full(name) for name in others):
            self._has_capacity.clear()
            await self._has_capacity.wait()
        for name in others:
            if name in self.sessions:
                self.sessions[name].give(address, body)

    def is_full_for(self, sender: str) -> bool:
        if sender in self.full_for:
            return True
        return not self.waits and any(self._is_full(name) for name in self.sessions if name != sender)

    def is_heard(self, sender: str, body: bytes) -> bool:
        address = _address(body)
        return any(session.hears(address) for name, session in self.sessions.items() if name != sender)

    def refuses(self, sender: str, body: bytes) -> bool:
        if not self.refused_addresses:
            return False
        address = _address(body)
        return (sender, pack_address(address.source, _sink(address))) in self.refused_addresses

    def _is_full(self, name: str) -> bool:
        session = self.sessions.get(name)
        if session is None or session.writer is None:
            return False
        return len(session.queue) >= self.queue_messages_max or session.queued_bytes >= QUEUE_BYTES_MAX

    def taken(self, session: Session, number: int) -> None:
        while session.queue and session.queue[0][0] <= number:
            session.queued_bytes -= len(session.queue.popleft()[1])
        self._has_capacity.set()


class _Connection:
    """One end at the hub. SENDs wait for capacity in a task, so that a TAKEN behind them is read; the WINDOW of the end
    limits them."""

    def __init__(self, hub: Hub, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._hub, self._reader, self._writer = hub, reader, writer
        self._name = ""
        self._session: Session | None = None
        self._sends: asyncio.Queue[Frame] = asyncio.Queue()
        self._carrying: asyncio.Task[None] | None = None

    async def run(self) -> None:
        buffer = bytearray()
        while data := await self._reader.read(READ_BYTES):
            buffer += data
            for kind, number, body in split(buffer):
                if kind == HELLO:
                    if not self._welcome(number, body):
                        return
                elif kind in (SEND, IF_HEARD, BYE):
                    self._sends.put_nowait((kind, number, body))
                else:
                    self._answer(kind, number, body)
            await self._writer.drain()

    def _welcome(self, number: int, body: bytes) -> bool:
        self._name, hub = body.decode(), self._hub
        if self._name in hub.away:
            return False
        if self._name in hub.refused:
            self._writer.write(frame(REFUSED, number, b"who are you?"))
            return True
        known = self._name in hub.sessions
        self._session = session = hub.sessions.setdefault(self._name, Session())
        if session.writer is not None:
            session.writer.transport.abort()
        session.writer = self._writer
        if number != RESUMES:
            session.filters.clear()  # the end sends them again; the messages in the queue stay
        self._writer.write(frame(DONE, number, KNOWN if known else b""))
        self._resend(0)
        self._carrying = asyncio.ensure_future(self._carry())
        return True

    def _resend(self, number: int) -> None:
        assert self._session is not None
        self._session.write(frame(RESENT, number) + b"".join(frame(MESSAGE, *entry) for entry in self._session.queue))

    def _answer(self, kind: int, number: int, body: bytes) -> None:
        session = self._session
        assert session is not None
        if kind == TAKEN:
            self._hub.taken(session, number)
        elif kind == AGAIN:
            self._resend(number)
        elif kind == PULL:
            found = session.pull(unpack(body))
            session.write(frame(NOTHING, number) if found is None else frame(DONE, number, found))
        elif kind == LISTEN and (
            self._name in self._hub.may_not_listen or (self._name, body) in self._hub.refused_filters
        ):
            session.write(frame(REFUSED, number, b"not for your ears"))
        elif kind == LISTEN:
            session.filters[body] = unpack(body)
            session.write(frame(DONE, number))
        else:
            session.filters.pop(body, None)
            session.write(frame(DONE, number))

    async def _carry(self) -> None:
        while True:
            kind, number, body = await self._sends.get()
            if kind == BYE:
                self._hub.sessions.pop(self._name, None)
            elif len(body) > MESSAGE_BYTES_MAX:
                self._writer.transport.abort()  # as brokers do
                return
            elif self._hub.is_full_for(self._name):
                self._writer.write(frame(FULL, number))
                continue
            elif self._hub.refuses(self._name, body):
                self._writer.write(frame(REFUSED, number, b"not for you to say"))
                continue
            elif kind == IF_HEARD and not self._hub.is_heard(self._name, body):
                self._writer.write(frame(UNHEARD, number))
                continue
            else:
                await self._hub.carry(self._name, body)
            self._writer.write(frame(DONE, number))

    def end(self) -> None:
        if self._carrying is not None:
            self._carrying.cancel()
        if self._session is not None and self._session.writer is self._writer:
            self._session.writer = None
        self._writer.transport.abort()
