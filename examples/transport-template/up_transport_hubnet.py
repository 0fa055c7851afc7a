"""uProtocol over a hub: each frame names its sender's host, and the hub passes it on to the ends that want that host.

send_batch -> frames, SYNC -> hub: passed on -> SYNC comes back = OK
hub -> frames -> Arrivals -> UMessage, completed -> ListenerTable -> listeners
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections import Counter, deque
from collections.abc import Awaitable, Sequence
from typing import Final

from google.protobuf.message import DecodeError
from pydantic import Field

from transports.arrivals import Arrivals
from transports.base import NOT_OPEN, OK, TransportBase, TransportSettings, stopped, too_large
from transports.listeners import Filter
from transports.plugin import TransportPlugin
from uprotocol import attributes as attrs
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import Capability, LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

HEADER: Final = struct.Struct(">BHI")  # kind, bytes of the key, bytes of the body
MESSAGE, SUBSCRIBE, UNSUBSCRIBE, SYNC = range(4)
BODY_BYTES_MAX: Final = 4 << 20  # a frame is held whole in memory, at the hub and here
STALL_S_MAX: Final = 30.0  # limit of one batch's wait for the hub, which waits for slow ends
RECONNECT_S: Final = 0.2
CLOSE_S_MAX: Final = 2.0


def frame(kind: int, key: bytes = b"", body: bytes = b"") -> bytes:
    return HEADER.pack(kind, len(key), len(body)) + key + body


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Raises asyncio.IncompleteReadError at the end, and ValueError for a malformed frame."""
    kind, key_bytes, body_bytes = HEADER.unpack(await reader.readexactly(HEADER.size))
    if kind > SYNC or body_bytes > BODY_BYTES_MAX:
        raise ValueError(
            f"expected a kind up to {SYNC} and {BODY_BYTES_MAX} bytes at most, got kind {kind} and {body_bytes} bytes"
        )
    return kind, await reader.readexactly(key_bytes), await reader.readexactly(body_bytes)


class HubConfig(TransportSettings):
    """What a user writes under [endpoint.settings]; TransportSettings has the limits of listeners."""

    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65_535)
    connect_timeout_s: float = Field(
        default=5, gt=0, description="of `open`; a hub that is lost later is tried again without limit"
    )


def translate(error: Exception, doing: str) -> UStatusError:
    """UNAVAILABLE may be tried again, so an error that a retry can't fix needs another code."""
    if isinstance(error, UStatusError):
        return error
    # an invalid host name (UnicodeError), a setting of the wrong kind
    if isinstance(error, (ValueError, TypeError, OverflowError)):
        return invalid(f"{doing}: {error}: is the setting right?")
    return UStatusError(UCode.UNAVAILABLE, f"{doing}: {error or type(error).__name__}")  # OSError, TimeoutError, ...


_AWAY: Final = UStatus(code=UCode.UNAVAILABLE, message="the hub is away: try again when the connection is back")


class Link:
    """One connection, and the calls that wait for a SYNC on it, in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.waiting: deque[asyncio.Future[bool]] = deque()
        self.known: set[bytes] = set()  # keys that the hub got when the connection began

    async def sync(self) -> bool:
        """True when the hub has passed on what was written so far; False if the connection was lost before."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.waiting.append(done)
        with contextlib.suppress(OSError, TimeoutError):
            self.writer.write(frame(SYNC))
            await self.writer.drain()
            async with asyncio.timeout(STALL_S_MAX):
                return await done
        self.end()
        return False

    def end(self) -> None:
        self.writer.transport.abort()
        while self.waiting:
            done = self.waiting.popleft()
            if not done.done():
                done.set_result(False)


class HubTransport(TransportBase):
    """All priorities are equal: the hub passes messages on in their order of arrival. It has no access control: any end
    may send as any host."""

    capabilities = Capability.PUSH | Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK

    def __init__(self, config: HubConfig, local: LocalUriProvider) -> None:
        super().__init__(config, local)
        self._config = config
        self._arrivals: Arrivals[tuple[bytes, bytes]] = Arrivals(self._deliver, dropped=self.dropped)
        self._keys: Counter[bytes] = Counter()  # keys for the hub -> number of filters with that key
        self._link: Link | None = None  # None: away, or closed
        self._sending = asyncio.Lock()

    def __repr__(self) -> str:
        state = "closed" if not self.is_open else "connected" if self._link is not None else "away"
        return f"HubTransport({self.authority}, {state}, {self._config.host}:{self._config.port})"

    def _set_link(self, link: Link | None, away_because: str = "") -> None:
        self._link = link
        # reports each change once; a callback that raises does no harm
        self.set_connected(link is not None, away_because)

    async def open(self) -> None:
        if self.is_open:
            return
        # the limit of our owner, which is already set, and that of the hub
        self._bytes_max = min(self.wire_bytes_max, BODY_BYTES_MAX)
        self._arrivals.open(self._bytes_max)
        link = await self._connect()  # nothing is left behind if it raises or is cancelled
        if self.is_open:  # a second call of `open` was faster
            link.end()
            return
        self.is_open = True
        self._running = asyncio.ensure_future(self._run(link))
        self._begin(link)

    async def _connect(self) -> Link:
        """Returns when the hub has answered and knows our keys: an open port is not yet a network."""
        config, link = self._config, None
        try:
            async with asyncio.timeout(config.connect_timeout_s):
                link = Link(*await asyncio.open_connection(config.host, config.port))
                # detect a dead hub
                link.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                link.known = set(self._keys)
                link.writer.writelines([frame(SUBSCRIBE, key) for key in link.known] + [frame(SYNC)])
                while (arrived := await read_frame(link.reader))[0] != SYNC:
                    await self._arrivals.put_on_loop(arrived[1:], len(arrived[2]))
        except BaseException as error:
            if link is not None:
                link.end()
            if not isinstance(error, Exception):
                raise  # a cancellation
            raise translate(error, f"connecting to the hub {config.host}:{config.port}") from None
        return link

    def _begin(self, link: Link) -> None:
        """Send the keys that were added or removed meanwhile. Without an await, so that none changes in between."""
        wanted = set(self._keys)
        link.writer.writelines([frame(SUBSCRIBE, key) for key in wanted - link.known])
        link.writer.writelines([frame(UNSUBSCRIBE, key) for key in link.known - wanted])
        self._set_link(link)

    async def _run(self, link: Link) -> None:
        """The task that reads, and connects again. It also checks `is_open`, since a library may swallow the
        cancellation by which `close` ends it."""
        while True:
            try:
                await self._read(link)
            except (OSError, EOFError, ValueError) as error:  # EOFError: IncompleteReadError is one
                why = f"the connection to the hub is lost: {error}"
                logging.getLogger(__name__).info(why)
            link.end()
            if self.is_open:
                self._set_link(None, why)
                link = await self._connect_again()
            if not self.is_open:
                link.end()
                return
            self._begin(link)

    async def _connect_again(self) -> Link:
        while True:
            await asyncio.sleep(RECONNECT_S)
            with contextlib.suppress(UStatusError):
                return await self._connect()

    async def close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        link = self._link
        self._set_link(None)
        if link is not None:
            link.end()
        self._running.cancel()
        # not `await self._running`, which could wait without limit
        await asyncio.wait({self._running}, timeout=CLOSE_S_MAX)
        # listeners take what has arrived; messages that were answered OK have left already
        await self._arrivals.finish(CLOSE_S_MAX)

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        """One status for each; OK when the hub has passed it on."""
        async with self._sending:  # batches that are sent at once keep each their order
            if not self.is_open:
                return stopped([], len(messages), NOT_OPEN)
            link = self._link
            if link is None:
                return stopped([], len(messages), _AWAY)
            statuses: list[UStatus] = []
            frames: list[bytes] = []
            now_ms = self.checks.now_ms()
            for message in messages:
                status = self.checks.refusal(message, now_ms) or self._encode(message, frames)
                statuses.append(status)  # a refused message does not stop the others
            if frames:
                link.writer.writelines(frames)
                if not await link.sync():  # lost: how much was passed on is unknown, so all may be sent again
                    return [_AWAY if status is OK else status for status in statuses]
            return statuses

    def _encode(self, message: UMessage, frames: list[bytes]) -> UStatus:
        body = message.SerializeToString()
        if len(body) > self._bytes_max:
            return too_large(len(body), self._bytes_max)
        frames.append(frame(MESSAGE, (message.attributes.source.authority_name or self.authority).encode(), body))
        return OK

    async def listen(self, filter: Filter) -> None:
        key = self._key(filter)
        self._keys[key] += 1
        if self._keys[key] == 1 and self._link is not None:
            self._link.writer.write(frame(SUBSCRIBE, key))
        if self._link is not None:
            # no message is missed from now on; if the link is lost meanwhile, the next one begins with all keys
            await self._link.sync()

    async def unlisten(self, filter: Filter) -> None:
        key = self._key(filter)
        self._keys[key] -= 1
        if not self._keys[key]:
            del self._keys[key]
            if self._link is not None:
                self._link.writer.write(frame(UNSUBSCRIBE, key))

    @staticmethod
    def _key(filter: Filter) -> bytes:
        """The part that the hub can match: one authority, or `*` for all. It may match too much, but never too
        little."""
        return filter.source.authority_name.encode()

    async def _read(self, link: Link) -> None:
        """Reads no faster than listeners take: while the arrivals are full, this waits, then the hub, then the
        sender."""
        while True:
            kind, key, body = await read_frame(link.reader)
            if kind == MESSAGE:
                await self._arrivals.put_on_loop((key, body), len(body))
            elif kind == SYNC and link.waiting:
                done = link.waiting.popleft()
                if not done.done():
                    done.set_result(True)

    def _deliver(self, arrived: list[tuple[bytes, bytes]]) -> Awaitable[None] | None:
        """Called with frames that arrived together. Must not raise, whatever they contain."""
        messages = []
        for key, body in arrived:
            try:
                message, host = UMessage.FromString(body), key.decode("ascii")
            except (DecodeError, UnicodeError):
                self.dropped["malformed"] += 1
                continue
            attrs.complete(message.attributes, host)
            if message.attributes.source.authority_name == host:
                messages.append(message)
            else:  # access lists apply to keys, so the message must agree with its key
                self.dropped["spoofed"] += 1
        return self.listeners.deliver(messages)


PLUGIN: Final = TransportPlugin("hubnet", HubConfig, HubTransport, HubTransport.capabilities)
