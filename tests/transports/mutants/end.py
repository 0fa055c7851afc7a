"""The good plugin, into which the faults are put: an end of the hub.

send_batch -> checks -> SEND, up to WINDOW at once -> hub -> MESSAGE -> ListenerTable -> listeners
                        or IF_HEARD
                        DONE: in all the queues                        TAKEN when their awaitables completed

Each fault replaces a method, whose docstring describes the correct behaviour.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog
from google.protobuf.message import DecodeError

from tests.transports.mutants.hub import (
    AGAIN,
    BYE,
    FULL,
    HEAD,
    HELLO,
    IF_HEARD,
    KNOWN,
    LISTEN,
    MESSAGE,
    MESSAGE_BYTES_MAX,
    NOTHING,
    PULL,
    READ_BYTES,
    REFUSED,
    RESENT,
    RESUMES,
    SEND,
    TAKEN,
    UNHEARD,
    UNLISTEN,
    frame,
    keyed,
    pack,
    split,
    unkeyed,
)
from transports.base import OK, SendChecks, TransportSettings, stopped, too_large
from transports.listeners import Filter, ListenerTable, all_of
from transports.plugin import TransportPlugin
from uprotocol import attributes as attrs
from uprotocol.status import UStatusError, is_nobody_listening, nobody_listens
from uprotocol.transport import Capability, ConnectionCallback, LocalUriProvider, UListener, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

WINDOW: Final = 128  # messages of one send_batch without an answer
RETRY_S: Final = (
    0.02  # an attempt takes some 0.6 ms of a processor, and a network that is away must cost almost nothing
)
DRAIN_S: Final = 2.0

log = structlog.get_logger()


class HubConfig(TransportSettings):
    port: int
    session: bool = False
    """`close` leaves the session at the hub, for the next end of our authority"""


CLOSED: Final = UStatus(code=UCode.UNAVAILABLE, message="the transport is not open: call open first")
NOBODY: Final = nobody_listens("nobody at the hub listens to this: send it again when somebody does")
NO_ROOM: Final = UStatus(code=UCode.UNAVAILABLE, message="the hub is full: try again when its ends have taken more")
AWAY: Final = UStatus(code=UCode.UNAVAILABLE, message="the hub is away: try again when it is back")


class HubTransport(UTransport):
    """An end. Everything happens on the loop; one task reads, and connects again."""

    capabilities = (
        Capability.PUSH
        | Capability.PULL
        | Capability.ACK
        | Capability.PERSISTENT_SESSION
        | Capability.WILDCARD_SOURCE
        | Capability.PUBLISH_WITHOUT_SINK
        | Capability.ABSENCE
    )

    retry_s = RETRY_S
    window = WINDOW

    def __init__(self, config: HubConfig, local: LocalUriProvider) -> None:
        self._port, self._authority = config.port, local.get_authority()
        self._keeps_session = self._resumes = config.session
        self._table = ListenerTable(
            self._authority,
            listeners_max=config.listeners_max,
            listeners_per_filter_max=config.listeners_per_filter_max,
        )
        self._checks = SendChecks()
        self._open = self._connected = False
        self._callbacks: list[ConnectionCallback] = []
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._asked_again: dict[int, Filter] = {}  # filters sent after a reconnect, by the number of the frame
        self._refused: dict[Filter, str] = {}
        self._number = 0
        self._taking: deque[tuple[int, asyncio.Future[None]]] = (
            deque()
        )  # (last number of a batch, completion of its listeners)
        # of an earlier end's session, until their listeners are registered
        self._early: list[tuple[UMessage, asyncio.Future[None]]] = []
        self._again = 0  # number of the RESENT before which messages are ignored; 0: none
        self._writer: asyncio.StreamWriter | None = None
        self._running: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._sending = asyncio.Lock()  # a batch must not come between two windows of another

    def __repr__(self) -> str:
        state = "connected" if self._connected else "open" if self._open else "closed"
        return f"{type(self).__name__}({self._authority}, {state})"

    @property
    def dropped(self) -> Counter[str]:
        return self._table.dropped

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def troubles(self) -> list[str]:
        return [f"nothing from {filter.source} arrives: {why}" for filter, why in self._refused.items()]

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._callbacks.append(callback)

    # The connection.

    async def open(self) -> None:
        async with self._opening:
            if self._open:
                return
            reader = await self._connect()
            self._open = True
            self._running = asyncio.ensure_future(self._run(reader))
            self.change(True)

    async def _connect(self) -> asyncio.StreamReader:
        """Raises UStatusError; then nothing is left behind."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError as error:
            raise UStatusError(UCode.UNAVAILABLE, f"no hub at port {self._port}: {error}") from None
        try:
            buffer = bytearray()
            writer.write(frame(HELLO, RESUMES if self._resumes else 0, self._authority.encode()))
            while not (answer := next(split(buffer), None)):
                data = await reader.read(HEAD.size + 100 if not buffer else 1)
                if not data:
                    raise UStatusError(UCode.UNAVAILABLE, "the hub hung up: try again later")
                buffer += data
            if answer[0] == REFUSED:
                raise UStatusError(UCode.UNAUTHENTICATED, f"the hub refuses {self._authority}: {answer[2].decode()}")
        except OSError as error:
            writer.transport.abort()
            raise UStatusError(UCode.UNAVAILABLE, f"the hub hung up: {error}") from None
        except BaseException:
            writer.transport.abort()
            raise
        self._writer, self._buffer, self._again = writer, buffer, 0
        self._asked_again.clear()
        self._refused.clear()
        for filter in self.filters_to_register(answer[2] == KNOWN):
            self._number += 1
            self._asked_again[self._number] = filter
            writer.write(frame(LISTEN, self._number, pack(filter)))
        return reader

    def filters_to_register(self, session_is_known: bool) -> list[Filter]:
        """After a connect: all filters, even if the hub knows them."""
        return self._table.filters

    async def _run(self, reader: asyncio.StreamReader) -> None:
        while True:
            with contextlib.suppress(OSError):
                await self._read(reader)
            self.lost()
            while True:
                await asyncio.sleep(self.retry_s)
                with contextlib.suppress(UStatusError):
                    reader = await self._connect()
                    break
            self.change(True)

    def lost(self) -> None:
        """Messages without an answer count as not sent; those that were not taken come again."""
        self.change(False)
        assert self._writer is not None
        self._writer.transport.abort()
        self._taking.clear()
        self._give_up_early()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(UStatusError.from_status(AWAY))

    def change(self, connected: bool) -> None:
        if self._connected is not connected:
            self._connected = connected
            self.tell(connected)

    def tell(self, connected: bool) -> None:
        for callback in self._callbacks:
            try:
                callback(connected)
            except Exception:
                log.exception("a connection callback failed")

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._give_up_early()
        await self.drain()
        if self._connected and not self._keeps_session:
            with contextlib.suppress(UStatusError, TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._ask(BYE, b"")
        await self.end()
        self.change(False)

    async def drain(self) -> None:
        """Wait for listeners and for answers to `send_batch`."""
        begun = [future for _, future in self._taking] + list(self._answers.values())
        if begun:
            await asyncio.wait(begun, timeout=DRAIN_S)

    async def end(self) -> None:
        assert self._running is not None
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        if self._writer is not None:
            self._writer.transport.abort()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(UStatusError.from_status(CLOSED))

    # Sending.

    def encode(self, message: UMessage) -> bytes:
        source = message.attributes.source.authority_name or self._authority
        return keyed(source, self.serialise(message))

    def serialise(self, message: UMessage) -> bytes:
        return attrs.completed(message, self._authority).SerializeToString()

    def refusal(self, message: UMessage, now_ms: int) -> UStatus | None:
        return self._checks.refusal(message, now_ms)

    def _post(self, kind: int, body: bytes) -> asyncio.Future[bytes]:
        """Sends nothing if there is no connection."""
        self._number += 1
        number = self._number
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: (self._answers.pop(number), done.cancelled() or done.exception()))
        if self._connected and self._writer is not None:
            self._writer.write(frame(kind, number, body))
        else:
            answer.set_exception(UStatusError.from_status(AWAY if self._open else CLOSED))
        return answer

    async def _ask(self, kind: int, body: bytes) -> bytes:
        return await self._post(kind, body)

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        if not self._open:
            return stopped([], len(messages), CLOSED)
        statuses: list[UStatus] = []
        async with self._sending:
            for start in range(0, len(messages), self.window):
                statuses += await self.send_window(messages[start : start + self.window])
                if failed := [one for one in statuses[-self.window :] if is_of_the_network(one)]:
                    return stopped(statuses, len(messages), failed[0])
        return statuses

    async def send_window(self, messages: Sequence[UMessage]) -> list[UStatus]:
        """Post all, then wait for all. After the first one without an answer none has one: the connection is lost."""
        now_ms = self._checks.now_ms()
        posted = [self.post(message, now_ms) for message in messages]
        return [await self.answer(one) for one in posted]

    def post(self, message: UMessage, now_ms: int) -> UStatus | asyncio.Future[bytes]:
        refusal = self.refusal(message, now_ms)
        if refusal is not None:
            return refusal
        body = self.encode(message)
        bytes_max = self.bytes_max()
        kind = IF_HEARD if self.tells_absence and message.attributes.type in (attrs.PUBLISH, attrs.REQUEST) else SEND
        return too_large(len(body), bytes_max) if len(body) > bytes_max else self._post(kind, body)

    def bytes_max(self) -> int:
        """The smaller of the limits of our owner and of the hub."""
        return min(self.wire_bytes_max, MESSAGE_BYTES_MAX)

    async def answer(self, posted: UStatus | asyncio.Future[bytes]) -> UStatus:
        if isinstance(posted, UStatus):
            return posted
        try:
            await posted
        except UStatusError as error:
            return error.status
        return OK

    # Receiving.

    async def _read(self, reader: asyncio.StreamReader) -> None:
        buffer = self._buffer
        while True:
            arrived: list[tuple[int, bytes]] = []
            for kind, number, body in split(buffer):
                if kind == MESSAGE and not self._again:
                    arrived.append((number, body))
                elif kind == RESENT and number == self._again:
                    self._again = 0
                elif number in self._answers:
                    self._answered(kind, number, body)
                elif kind == REFUSED and number in self._asked_again:
                    self.refused_again(self._asked_again[number], body.decode())
            if arrived:
                self.arrived(arrived)
            data = await reader.read(READ_BYTES)
            if not data:
                return
            buffer += data

    def refused_again(self, filter: Filter, why: str) -> None:
        """The hub refuses a filter that it accepted before the reconnect."""
        self._refused[filter] = why

    def _answered(self, kind: int, number: int, body: bytes) -> None:
        answer = self._answers[number]
        if answer.done():
            return
        if kind == REFUSED:
            answer.set_exception(UStatusError(UCode.PERMISSION_DENIED, f"the hub refuses it: {body.decode()}"))
        elif kind == FULL:
            answer.set_exception(UStatusError.from_status(NO_ROOM))
        elif kind == UNHEARD:
            answer.set_exception(UStatusError.from_status(NOBODY))
        elif kind == NOTHING:
            answer.set_exception(UStatusError(UCode.NOT_FOUND, "nothing has arrived that matches: try again later"))
        else:
            answer.set_result(body)

    def arrived(self, numbered: list[tuple[int, bytes]]) -> None:
        """Deliver one batch; the next one does not wait for it."""
        messages = [message for _, body in numbered if self.takes(body) and (message := self.decode(body)) is not None]
        taken = asyncio.ensure_future(_completed(self.deliver(messages)))
        self._taking.append((numbered[-1][0], taken))
        taken.add_done_callback(self._settle)

    def takes(self, body: bytes) -> bool:
        """A message that is too large is acknowledged with the others, and counted."""
        is_too_large = len(body) > self.wire_bytes_max
        self.dropped["too_large"] += is_too_large
        return not is_too_large

    def decode(self, body: bytes) -> UMessage | None:
        try:
            key, serialised = unkeyed(body)
            message = UMessage.FromString(serialised)
        except (ValueError, DecodeError):
            self.dropped["malformed"] += 1
            return None
        if not self.belongs(key, message):
            self.dropped["spoofed"] += 1
            return None
        return message

    def belongs(self, key: str, message: UMessage) -> bool:
        """True if the source agrees with the key: access lists apply to keys."""
        return message.attributes.source.authority_name == key

    def deliver(self, messages: list[UMessage]) -> Awaitable[None] | None:
        """Messages of a session whose listener is not registered yet wait for it, unacknowledged."""
        early = [message for message in messages if not self._table.wants(message)] if self._resumes else []
        if not early:
            return self._table.deliver(messages)
        waiting = [asyncio.get_running_loop().create_future() for _ in early]
        self._early += zip(early, waiting, strict=True)
        taking = self._table.deliver([message for message in messages if self._table.wants(message)])
        return all_of([*waiting, *([] if taking is None else [taking])])

    def _deliver_early(self) -> None:
        """Deliver the messages of listeners that have just been registered."""
        held, self._early = self._early, []
        for message, waiting in held:
            if self._table.wants(message) or not self._resumes:
                self._table.deliver([message])
                waiting.set_result(None)
            else:
                self._early.append((message, waiting))

    def _give_up_early(self) -> None:
        """They come again with the next connection."""
        for _, waiting in self._early:
            waiting.cancel()
        self._early.clear()

    def all_registered(self) -> None:
        self._resumes = False
        self._deliver_early()

    def _settle(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled():
            done.exception()  # one after a failure comes again in any case
        while self._taking and self._taking[0][1].done():
            number, future = self._taking[0]
            if future.cancelled() or future.exception() is not None:
                self.not_taken()
                return
            self._taking.popleft()
            self._write(frame(TAKEN, number))

    def not_taken(self) -> None:
        """All messages from there on come again, in order; those on their way are ignored."""
        self._taking.clear()
        self._number += 1
        self._again = self._number
        asyncio.get_running_loop().call_later(RETRY_S, self._write, frame(AGAIN, self._again))

    def _write(self, data: bytes) -> None:
        if self._connected and self._writer is not None:
            self._writer.write(data)

    async def receive(self, source_filter: UUri, sink_filter: UUri | None = None) -> UMessage:
        self._check_open()
        wanted = Filter.of(source_filter, sink_filter, self._authority)
        while True:
            message = self.decode(await self._ask(PULL, pack(wanted)))
            if message is not None and not self.is_expired(message):
                return message

    def is_expired(self, message: UMessage) -> bool:
        return attrs.is_expired(message.attributes, self._checks.now_ms())

    # Listeners.

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        self._check_open()
        added = self._table.add(source_filter, sink_filter, listener)
        try:
            if added is not None:
                await self.announce(LISTEN, added)
        except BaseException:
            self._table.remove(source_filter, sink_filter, listener)
            raise
        self._deliver_early()

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        self._check_open()
        removed = self._table.remove(source_filter, sink_filter, listener)
        if removed is not None:
            self._refused.pop(removed, None)
            await self.announce(UNLISTEN, removed)

    async def announce(self, kind: int, filter: Filter) -> None:
        """Raises the error answer of the hub. While the hub is away, do nothing: `_connect` sends all filters."""
        try:
            await self._ask(kind, pack(filter))
        except UStatusError as error:
            if error.code != UCode.UNAVAILABLE:
                raise

    def _check_open(self) -> None:
        if not self._open:
            raise UStatusError.from_status(CLOSED)


def is_of_the_network(status: UStatus) -> bool:
    """False, too, if only the receiver of this message is missing."""
    return status.code == UCode.UNAVAILABLE and not is_nobody_listening(status)


async def _completed(result: Awaitable[None] | None) -> None:
    if result is not None:
        await result


Make = Callable[[HubConfig, LocalUriProvider], HubTransport]
PLUGIN: Final = TransportPlugin("hub", HubConfig, HubTransport, HubTransport.capabilities)
