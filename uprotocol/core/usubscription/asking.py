"""What every client of a uSubscription does: commands in order, calls, and hearing of changes.

put(topic, command) -> known -> (a delay) -> ready -> a window of topics -> run(topic, command) -> done, or again later
                         '-> replaced by a later command of its topic: the last one wins
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import structlog
from google.protobuf.message import Message

from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.communication.rpc_client import CALLS_PENDING_MAX
from uprotocol.core.usubscription.wire import CODECS, FETCH_SUBSCRIPTIONS, Subscription, service
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

K = TypeVar("K", bound=Hashable)
C = TypeVar("C")

log = structlog.get_logger()


async def end(*tasks: asyncio.Future[Any] | None) -> None:
    """They are cancelled, and have ended."""
    known = [task for task in tasks if task is not None]
    for task in known:
        task.cancel()
    await asyncio.gather(*known, return_exceptions=True)


class CommandQueue(Generic[K, C]):
    """One command of a topic is in flight, and the last one wins; topics don't wait for each other. Commands leave in
    the order in which they were last given, at most `window` at once. A topic is whatever has its turn in order."""

    def __init__(
        self,
        run: Callable[[K, C], Awaitable[int | None]],
        window: int,
        *,
        idle: Callable[[], None] = lambda: None,
        in_batches: bool = False,
    ) -> None:
        """`run(topic, command)` sees one command through: None when it is done, or after how many milliseconds it is to
        run again, unless it was replaced meanwhile. `idle()` is called whenever nothing is left.
        `in_batches`: the next ones leave when all before them are done, so that whoever gets them has many at once."""
        self._run, self.window, self._idle, self._in_batches = run, window, idle, in_batches
        self._known: dict[K, C] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._ready: dict[K, None] = {}  # due, and nothing of that topic is running
        self._running: dict[K, asyncio.Task[None]] = {}
        self._left: dict[K, C] = {}  # what is under way

    def __repr__(self) -> str:
        return f"CommandQueue(known={len(self)}, running={len(self._running)}, window={self.window})"

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, topic: K) -> bool:
        return topic in self._known

    def get(self, topic: K) -> C | None:
        """The last command of `topic`."""
        return self._known.get(topic)

    def is_current(self, topic: K, command: C) -> bool:
        """False once it was replaced."""
        return self._known.get(topic) is command

    def has_left(self, topic: K, command: C) -> bool:
        """True while it is under way."""
        return self._left.get(topic) is command

    def is_busy(self, topic: K) -> bool:
        """True while a command about `topic` waits or may be under way."""
        return topic in self._known or topic in self._running

    def all(self) -> list[C]:
        return list(self._known.values())

    def under_way(self) -> list[C]:
        """Those that nothing has replaced."""
        return [command for topic, command in self._left.items() if self.is_current(topic, command)]

    def put(self, topic: K, command: C, delay_ms: int = 0) -> None:
        """The last word on `topic`; it goes to the end."""
        self._forget(topic)
        self._known[topic] = command
        self._at(topic, delay_ms)
        if self._in_batches:  # with all that is put on this turn of the loop
            asyncio.get_running_loop().call_soon(self._go_on)
        else:
            self._go_on()

    def drop(self, topic: K) -> None:
        self._forget(topic)
        self._go_on()

    def clear(self) -> None:
        """No command is due any more; those that run go on."""
        for topic in list(self._known):
            self._forget(topic)

    def hurry(self, *topics: K) -> None:
        """What waits for its time need not: of these topics, or of all."""
        for topic in topics or list(self._timers):
            self._at(topic, 0)
        self._go_on()

    async def stop(self) -> list[C]:
        """End what is under way; returns what had not left."""
        rest = [command for topic, command in self._known.items() if not self.has_left(topic, command)]
        self.clear()
        await end(*self._running.values())
        return rest

    def _forget(self, topic: K) -> None:
        self._known.pop(topic, None)
        self._ready.pop(topic, None)
        timer = self._timers.pop(topic, None)
        if timer is not None:
            timer.cancel()

    def _at(self, topic: K, delay_ms: int) -> None:
        timer = self._timers.pop(topic, None)
        if timer is not None:
            timer.cancel()
        if delay_ms:
            self._timers[topic] = asyncio.get_running_loop().call_later(delay_ms / 1000, self.hurry, topic)
        elif topic not in self._running:
            self._ready[topic] = None

    def _go_on(self) -> None:
        may_leave = not self._in_batches or not self._running
        while may_leave and self._ready and len(self._running) < self.window:
            topic = next(iter(self._ready))
            del self._ready[topic]
            self._running[topic] = task = asyncio.ensure_future(self._see_through(topic))
            task.add_done_callback(lambda _, topic=topic: self._ended(topic))  # type: ignore[misc]
        if not self._known and not self._running:
            self._idle()

    async def _see_through(self, topic: K) -> None:
        command = self._known.get(topic)
        if command is None or topic in self._timers:
            return  # it was taken back, or replaced by one that is not due
        self._left[topic] = command
        again_ms = None
        try:
            again_ms = await self._run(topic, command)
        except Exception:
            log.exception("a command failed, and is given up", topic=topic)
        finally:
            del self._left[topic]
        if self.is_current(topic, command):
            if again_ms is None:
                self._forget(topic)
            else:
                self._at(topic, again_ms)

    def _ended(self, topic: K) -> None:
        del self._running[topic]
        if topic in self._known and topic not in self._timers:
            self._ready[topic] = None
        self._go_on()


class Services:
    """The uSubscription services of an authority, or of all: asking them, hearing what they tell, in each version."""

    def __init__(
        self,
        transport: UTransport,
        own: Mapping[int, LocalUriProvider],
        authority: str,
        on_change: Callable[[int, str, Subscription], None],
        *,
        strict: bool = False,
        calls_pending_max: int = CALLS_PENDING_MAX,
    ) -> None:
        """`own`: who we are to each version. `on_change(version, the authority that tells, the change)`; `strict` as in
        Codec.read_change."""
        self._transport, self._own, self._authority = transport, own, authority
        self._on_change, self._strict = on_change, strict
        self._rpc = {
            local: InMemoryRpcClient(transport, local, calls_pending_max=calls_pending_max)
            for local in dict.fromkeys(own.values())
        }

    async def open(self) -> None:
        for rpc in self._rpc.values():
            await rpc.open()
        for version, own in self._own.items():
            await self._transport.register_listener(service(self._authority, version), self, own.get_source())

    async def close(self) -> None:
        for version, own in self._own.items():
            with contextlib.suppress(UStatusError):  # the transport may have been closed before us
                await self._transport.unregister_listener(service(self._authority, version), self, own.get_source())
        for rpc in self._rpc.values():
            await rpc.close()

    def call(self, authority: str, version: int, method: str, request: Message, timeout_ms: int) -> Awaitable[UPayload]:
        sink = service(authority, version, CODECS[version].methods[method].resource)
        rpc = self._rpc[self._own[version]]
        return rpc.invoke_method(sink, UPayload.pack(request), CallOptions(timeout_ms=timeout_ms))

    async def listed(
        self, authority: str, version: int, topic: UUri | None, subscriber: UUri | None, timeout_ms: int
    ) -> AsyncIterator[Sequence[Subscription]]:
        """What FetchSubscriptions says, page by page; `timeout_ms` is of one page."""
        codec = CODECS[version]
        place: int | None = 0
        while place is not None:
            request = codec.fetch_subscriptions(topic, subscriber, place)
            answer = await self.call(authority, version, FETCH_SUBSCRIPTIONS, request, timeout_ms)
            page, place = codec.read_subscriptions(answer, place, strict=self._strict)
            yield page

    def on_receive(self, message: UMessage) -> None:
        source = message.attributes.source
        try:
            codec = CODECS[source.ue_version_major]
            change = codec.read_change(UPayload.of(message), strict=self._strict)
        except UStatusError as error:
            log.warning("a change notification can't be read", source=source.authority_name, why=error.message)
            return
        self._on_change(codec.major, source.authority_name, change)

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        for message in messages:
            self.on_receive(message)
