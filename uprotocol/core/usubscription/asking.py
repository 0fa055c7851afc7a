"""What every client of a uSubscription needs: commands in order, calls, and change notifications.

put(topic, command) -> commands -> (a delay) -> ready -> a window of topics -> run(topic, command) -> done, or repeated
                         '-> replaced by a later command for its topic: the last one wins
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import structlog
from google.protobuf.message import Message

from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.communication.rpc_client import CALLS_PENDING_MAX
from uprotocol.core.usubscription.wire import CODECS, FETCH_SUBSCRIPTIONS, StoreSaid, Subscription, service
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.tasks import end
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

K = TypeVar("K", bound=Hashable)
C = TypeVar("C")

log = structlog.get_logger()


class CommandQueue(Generic[K, C]):
    """At most one command for each topic runs, and a later command replaces an earlier one; topics do not wait for each
    other. Commands start in the order of `put`, at most `window` at once. A topic may be any key.

    `commands`: the last command for each topic that has one. Read only."""

    def __init__(
        self,
        run: Callable[[K, C], Awaitable[int | None]],
        window: int,
        *,
        idle: Callable[[], None] = lambda: None,
        in_batches: bool = False,
    ) -> None:
        """`run(topic, command)` executes one command. It returns None when the command is done, or the milliseconds
        after which it runs again (unless it was replaced meanwhile). `idle()` is called whenever nothing is left.
        `in_batches`: the next commands start when all running ones are done, so that the receiver gets many at once."""
        self._run, self.window, self._idle, self._in_batches = run, window, idle, in_batches
        self.commands: dict[K, C] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._ready: dict[K, None] = {}  # topics whose command is due, and that run nothing
        self._running: dict[K, asyncio.Task[None]] = {}
        self._started: dict[K, C] = {}  # running commands

    def __len__(self) -> int:
        return len(self.commands)

    def is_current(self, topic: K, command: C) -> bool:
        """False after `command` was replaced or dropped."""
        return self.commands.get(topic) is command

    def is_running(self, topic: K, command: C) -> bool:
        return self._started.get(topic) is command

    def is_busy(self, topic: K) -> bool:
        """True while a command for `topic` waits or may be running."""
        return topic in self.commands or topic in self._running

    def running(self) -> list[C]:
        """The running commands that were not replaced."""
        return [command for topic, command in self._started.items() if self.is_current(topic, command)]

    def put(self, topic: K, command: C, delay_ms: int = 0) -> None:
        """Append `command`, in place of an earlier one for `topic`."""
        self._forget(topic)
        self.commands[topic] = command
        self._schedule(topic, delay_ms)
        if self._in_batches:  # together with all that are put in this turn of the event loop
            asyncio.get_running_loop().call_soon(self._start_ready)
        else:
            self._start_ready()

    def drop(self, topic: K) -> None:
        self._forget(topic)
        self._start_ready()

    def clear(self) -> None:
        """Drop all commands; running ones continue."""
        for topic in list(self.commands):
            self._forget(topic)

    def hurry(self, *topics: K) -> None:
        """End the delay of these topics, or of all."""
        for topic in topics or list(self._timers):
            self._schedule(topic, 0)
        self._start_ready()

    async def stop(self) -> list[C]:
        """Cancel what runs. Returns the commands that were not running."""
        rest = [command for topic, command in self.commands.items() if not self.is_running(topic, command)]
        self.clear()
        await end(*self._running.values())
        return rest

    def _forget(self, topic: K) -> None:
        self.commands.pop(topic, None)
        self._ready.pop(topic, None)
        timer = self._timers.pop(topic, None)
        if timer is not None:
            timer.cancel()

    def _schedule(self, topic: K, delay_ms: int) -> None:
        timer = self._timers.pop(topic, None)
        if timer is not None:
            timer.cancel()
        if delay_ms:
            self._timers[topic] = asyncio.get_running_loop().call_later(delay_ms / 1000, self.hurry, topic)
        elif topic not in self._running:
            self._ready[topic] = None

    def _start_ready(self) -> None:
        may_start = not self._in_batches or not self._running
        while may_start and self._ready and len(self._running) < self.window:
            topic = next(iter(self._ready))
            del self._ready[topic]
            self._running[topic] = task = asyncio.ensure_future(self._execute(topic))
            task.add_done_callback(lambda _, topic=topic: self._ended(topic))  # type: ignore[misc]
        if not self.commands and not self._running:
            self._idle()

    async def _execute(self, topic: K) -> None:
        command = self.commands.get(topic)
        if command is None or topic in self._timers:
            return  # it was dropped, or replaced by one that is not due
        self._started[topic] = command
        repeat_ms = None
        try:
            repeat_ms = await self._run(topic, command)
        except Exception:
            log.exception("a command failed and is dropped", topic=topic)
        finally:
            del self._started[topic]
        if self.is_current(topic, command):
            if repeat_ms is None:
                self._forget(topic)
            else:
                self._schedule(topic, repeat_ms)

    def _ended(self, topic: K) -> None:
        del self._running[topic]
        if topic in self.commands and topic not in self._timers:
            self._ready[topic] = None
        self._start_ready()


class Services:
    """Calls to the uSubscription services of one authority or of all, and their change notifications, in each
    version."""

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
        """`own`: the own address for each version. `on_change(version, authority of the sender, change)`; `strict` as
        in Codec.read_change."""
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
            with contextlib.suppress(UStatusError):  # a transport that was closed earlier has no listeners
                await self._transport.unregister_listener(service(self._authority, version), self, own.get_source())
        for rpc in self._rpc.values():
            await rpc.close()

    def call(self, authority: str, version: int, method: str, request: Message, timeout_ms: int) -> Awaitable[UPayload]:
        sink = service(authority, version, CODECS[version].methods[method].resource)
        rpc = self._rpc[self._own[version]]
        return rpc.invoke_method(sink, UPayload.pack(request), CallOptions(timeout_ms=timeout_ms))

    async def listed(
        self,
        authority: str,
        version: int,
        topic: UUri | None,
        subscriber: UUri | None,
        timeout_ms: int,
        *,
        store: bytes = b"",
        on_store: Callable[[StoreSaid], None] = lambda _: None,
    ) -> AsyncIterator[Sequence[Subscription]]:
        """The answer of FetchSubscriptions, page by page; `timeout_ms` is for one page. `store`: of the calling
        service; `on_store` is called with what the first page says about stores."""
        codec = CODECS[version]
        after: int | None = 0
        while after is not None:
            request = codec.fetch_subscriptions(topic, subscriber, after, b"" if after else store)
            answer = await self.call(authority, version, FETCH_SUBSCRIPTIONS, request, timeout_ms)
            if store and not after:
                on_store(codec.read_store(answer))
            page, after = codec.read_subscriptions(answer, after, strict=self._strict)
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
