"""RPC client of a uSubscription service of version 3 or 4.

subscribe, unsubscribe -> CommandQueue: one per topic, the last one wins -> a batch in flight, in order -> answers
fetch, register        -> at once
(re)connected          -> subscriptions and registrations are repeated until the service accepts or refuses them
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self

import structlog
from google.protobuf.message import Message

from storage.runtime import settle
from uprotocol import uri as uris
from uprotocol.core.usubscription import wire
from uprotocol.core.usubscription.asking import CommandQueue, Services
from uprotocol.core.usubscription.wire import (
    CODECS,
    SUBSCRIBE,
    UNSUBSCRIBE,
    V3_CODEC,
    V4_CODEC,
    WANTING,
    Status,
    Subscription,
)
from uprotocol.message import UPayload
from uprotocol.pacing import Backoff
from uprotocol.status import FINAL, UStatusError, invalid
from uprotocol.tasks import end
from uprotocol.transport import LocalUriProvider, UListener, UTransport
from uprotocol.uri import Key
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

CALL_MS: Final = 10_000  # timeout of a call; a service that commits to disk under load needs less than a second
# the timeout of a page of a list is that many times longer: a million subscriptions are 40 MB and some seconds
LIST_FACTOR: Final = 6
PROBE_MS: Final = 1_000  # timeout of the calls that find out the version
COMMANDS_WAITING_MAX: Final = 100_000  # topics with a command that is not answered
RESTORED_AT_ONCE_MAX: Final = 1_000  # topics and registrations that are repeated at once after a reconnect
COMMANDS_BATCH_MAX: Final = 64  # commands in flight: enough to fill a group commit of the service
RESTORE_FIRST_MS: Final = 500  # before the repetition after a reconnect is tried again; doubles up to ...
RESTORE_MAX_MS: Final = 30_000  # ... while the service does not accept it
# entries of one list, as many as our own service stores; a service that sends more is broken
LISTED_MAX: Final = 5_000_000
UNSUPPORTED: Final = frozenset(
    {UCode.UNIMPLEMENTED, UCode.NOT_FOUND, UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED, UCode.CANCELLED}
)

log = structlog.get_logger()

ChangeCallback = Callable[[Subscription], None]


class HistorySource(Protocol):
    """The interface that `subscribe(since=...)` needs. history.reading.feed.HistoryFeed implements it."""

    async def subscribe_since(self, topic: UUri, since: Any, listener: UListener) -> Any: ...

    async def unsubscribe(self, topic: UUri, listener: UListener) -> Any: ...


@dataclass(slots=True, eq=False)
class _ClientCommand:
    """The last command for one topic, and the callers that wait for its answer."""

    method: str
    topic: UUri
    options: dict[str, Any] = field(default_factory=dict)
    waiting: list[asyncio.Future[Status]] = field(default_factory=list)


class USubscriptionClient:
    """A client of the service of `authority` (None: the local one), over `transport`.

    `version` 3 or 4; None: the first call finds it out. Failures are UStatusError; UNAVAILABLE if no service answers.
    """

    def __init__(
        self,
        transport: UTransport,
        local: LocalUriProvider,
        authority: str | None = None,
        version: int | None = None,
        *,
        call_ms: int = CALL_MS,
        listed_max: int = LISTED_MAX,
        probe_ms: int = PROBE_MS,
        history: HistorySource | None = None,
    ) -> None:
        if version is not None and version not in CODECS:
            raise invalid(f"expected version 3 or 4 of uSubscription, got {version}")
        self.transport, self._local = transport, local
        self.authority = authority or local.get_authority()
        self.version = version
        self._call_ms, self._probe_ms, self._history, self._listed_max = call_ms, probe_ms, history, listed_max
        self._services = Services(transport, dict.fromkeys(CODECS, local), self.authority, self._on_change)
        self._probing: asyncio.Task[int] | None = None
        self._commands = CommandQueue(self._send_command, COMMANDS_BATCH_MAX, in_batches=True)
        self._subscribed: dict[Key, _ClientCommand] = {}
        self._listeners: dict[Key, list[tuple[UListener, bool]]] = {}  # True: the history delivers to it
        self._registered: dict[Key | None, UUri | None] = {}
        self._changes: list[ChangeCallback] = []
        # method and topic of what has to be repeated, since the service may have lost it
        self.restoring: CommandQueue[tuple[str, Key | None], Backoff] = CommandQueue(
            self._restore, RESTORED_AT_ONCE_MAX
        )
        self._is_failure_logged = False
        self._open = False
        transport.on_connection(self._connection_changed)

    def __repr__(self) -> str:
        return f"USubscriptionClient({self.authority}, version={self.version}, subscribed={len(self._subscribed)})"

    async def open(self) -> None:
        """Start to receive answers and change notifications. May be called twice."""
        if self._open:
            return
        await self._services.open()
        self._open = True

    async def close(self) -> None:
        """Stop. Subscriptions stay in the service. May be called twice."""
        self._open = False
        for command in await self._commands.stop():
            _settle(command, UStatusError(UCode.CANCELLED, "the client was closed before this command was sent"))
        await self.restoring.stop()
        await end(self._probing)
        await self._services.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- commands: in order, the last one wins -------------------------------------------------------------------------

    async def subscribe(
        self,
        topic: UUri,
        listener: UListener | None = None,
        *,
        expires_ms: int | None = None,
        sample_period_ms: int | None = None,
        since: Any = None,
    ) -> Status:
        """Subscribe to `topic`, until `expires_ms` (Unix ms) if given, and register `listener`.

        `since` (a sequence number, time or message id; history.reading.feed.Since) also delivers what was published
        after it; then the history delivers all messages to the listener. Raises UStatusError: the error of the service
        or the history, UNIMPLEMENTED for `since` without a history, ABORTED if an unsubscribe replaced this command.
        """
        topic = uris.with_authority(topic, self._local.get_authority())
        if since is not None and (self._history is None or listener is None):
            why = "subscribe(since=...) needs a listener, and a client that was created with history=..."
            raise UStatusError(UCode.UNIMPLEMENTED, why)
        if listener is not None:
            await self._listen(topic, listener, since)  # before the request, so that no message is missed
        try:
            return await self._command(
                _ClientCommand(SUBSCRIBE, topic, {"expires_ms": expires_ms, "sample_period_ms": sample_period_ms})
            )
        except BaseException:
            if listener is not None:
                await self._unlisten(topic, listener)
            raise

    async def unsubscribe(self, topic: UUri, listener: UListener | None = None) -> None:
        """End the subscription and remove all its listeners. If `listener` is given and there are others, only remove
        that one."""
        topic = uris.with_authority(topic, self._local.get_authority())
        listeners = [one for one, _ in self._listeners.get(uris.key(topic), [])]
        if listener is not None and any(one is not listener for one in listeners):
            await self._unlisten(topic, listener)
            return
        self._subscribed.pop(uris.key(topic), None)
        await self._command(_ClientCommand(UNSUBSCRIBE, topic))
        for one in listeners:
            await self._unlisten(topic, one)

    async def _command(self, command: _ClientCommand) -> Status:
        self._require_open()
        key = uris.key(command.topic)
        before = self._commands.commands.get(key)
        if before is None and len(self._commands) >= COMMANDS_WAITING_MAX:
            why = f"{COMMANDS_WAITING_MAX} commands wait for the service, which is the limit: wait for answers"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, why)
        if before is not None and not self._commands.is_running(key, before):
            if before.method == command.method:
                command.waiting.extend(before.waiting)
            else:
                why = "a later command for the same topic replaced this one before it was sent"
                _settle(before, UStatusError(UCode.ABORTED, why))
        future: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        command.waiting.append(future)
        self._commands.put(key, command)
        return await future

    async def _send_command(self, key: Key, command: _ClientCommand) -> None:
        try:
            codec = CODECS[await self.find_version()]
            status = Status.UNSUBSCRIBED
            if command.method == SUBSCRIBE:
                answer = await self._call(SUBSCRIBE, codec.subscribe(command.topic, **command.options))
                status = codec.read_status(answer)
            else:
                await self._call(UNSUBSCRIBE, codec.unsubscribe(command.topic))
        except UStatusError as error:
            _settle(command, error)
        except asyncio.CancelledError:
            _settle(command, UStatusError(UCode.CANCELLED, "the client was closed before the answer came"))
            raise
        except Exception as error:
            log.exception("a command could not be sent", command=repr(command))
            _settle(command, UStatusError(UCode.INTERNAL, repr(error)))
        else:
            # in the order of the answers, before any caller continues
            if command.method == SUBSCRIBE and self._commands.is_current(key, command):
                self._subscribed.pop(key, None)
                if status in WANTING:  # to be repeated after a reconnect
                    self._subscribed[key] = command
            _settle(command, status)

    # -- requests for information --------------------------------------------------------------------------------------

    async def fetch_subscriptions(
        self, topic: UUri | None = None, subscriber: UUri | None = None
    ) -> list[Subscription]:
        """Returns all subscriptions that match. In version 4 both arguments are patterns; in version 3 exactly one of
        them must be given, without wildcards.

        Raises UNIMPLEMENTED if the version of the service can't do this.
        """
        version = await self.find_version()
        if version == 3 and (topic is None) == (subscriber is None):
            why = "a version 3 service lists only the subscriptions of one topic or of one subscriber"
            raise UStatusError(UCode.UNIMPLEMENTED, why)
        self._require_open()
        found: list[Subscription] = []
        timeout_ms = self._call_ms * LIST_FACTOR
        async for page in self._services.listed(self.authority, version, topic, subscriber, timeout_ms):
            found.extend(page)
            self._require_bounded(found)
        return found

    def _require_bounded(self, listed: Sized) -> None:
        if len(listed) > self._listed_max:
            why = f"the uSubscription of {self.authority} lists more than {self._listed_max} entries, the limit"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, why)

    async def fetch_subscribers(self, topic: UUri) -> list[UUri]:
        """Returns who is subscribed to a topic. Raises what the service answers."""
        if await self.find_version() == 4:
            return [one.subscriber for one in await self.fetch_subscriptions(topic)]
        found: list[UUri] = []
        more = True
        while more:
            self._require_bounded(found)
            request = V3_CODEC.fetch_subscribers(topic, len(found))
            page, more = V3_CODEC.read_subscribers(await self._call(wire.FETCH_SUBSCRIBERS, request))
            found.extend(page)
        return found

    async def register_for_notifications(self, topic: UUri | None = None) -> None:
        """Register for changes of `topic` (version 3, which requires it) or of everything (version 4). The callbacks of
        `on_change` get them."""
        await self._register(wire.REGISTER, topic)
        self._registered[uris.key(topic) if topic is not None else None] = topic

    async def unregister_for_notifications(self, topic: UUri | None = None) -> None:
        """Ends the notifications for a topic; None: those for all topics."""
        self._registered.pop(uris.key(topic) if topic is not None else None, None)
        await self._register(wire.UNREGISTER, topic)

    async def _register(self, method: str, topic: UUri | None) -> None:
        version = await self.find_version()
        if version == 3 and topic is None:
            raise UStatusError(UCode.UNIMPLEMENTED, "a version 3 service registers for one topic: name one")
        await self._call(method, CODECS[version].registration(topic))

    async def reset(self) -> None:
        """Reset the service. It accepts this only from uSubscription services (else PERMISSION_DENIED)."""
        await self._call(wire.RESET, CODECS[await self.find_version()].reset())

    def on_change(self, callback: ChangeCallback) -> None:
        """Call `callback(subscription)` for every change notification, about own subscriptions and registered
        topics."""
        self._changes.append(callback)

    # -- the service ---------------------------------------------------------------------------------------------------

    async def find_version(self) -> int:
        """Returns the version that the service answers, 3 or 4. Raises UNAVAILABLE if it answers none."""
        if self.version is not None:
            return self.version
        self._require_open()
        if self._probing is None:
            self._probing = asyncio.ensure_future(self._probe())
            self._probing.add_done_callback(self._probed)
        return await asyncio.shield(self._probing)

    def _probed(self, task: asyncio.Task[int]) -> None:
        self._probing = None
        if not task.cancelled() and task.exception() is None:
            self.version = task.result()

    async def _probe(self) -> int:
        """Call both versions at once with a cheap request, so that an old service costs at most PROBE_MS.

        Version 4 is called twice: a single lost message must not make the client use version 3.
        """
        four, three = wire.service(self.authority, 4), wire.service(self.authority, 3)
        request = V4_CODEC.fetch_subscriptions(four, None)
        first = asyncio.ensure_future(self._answers(4, wire.FETCH_SUBSCRIPTIONS, request))
        second = asyncio.ensure_future(self._answers(4, wire.FETCH_SUBSCRIPTIONS, request, self._probe_ms // 2))
        old = asyncio.ensure_future(self._answers(3, wire.FETCH_SUBSCRIBERS, V3_CODEC.fetch_subscribers(three)))
        try:
            for call in asyncio.as_completed((first, second)):
                if await call:
                    return 4
            if await old:
                return 3
        finally:
            await end(first, second, old)
        why = f"no uSubscription service answers at {self.authority}: is it running and reachable?"
        raise UStatusError(UCode.UNAVAILABLE, why)

    async def _answers(self, version: int, method: str, request: Message, after_ms: int = 0) -> bool:
        await asyncio.sleep(after_ms / 1000)
        try:
            await self._services.call(self.authority, version, method, request, max(self._probe_ms - after_ms, 1))
        except UStatusError as error:
            return error.code not in UNSUPPORTED
        return True

    async def _call(self, method: str, request: Message) -> UPayload:
        self._require_open()
        return await self._services.call(self.authority, await self.find_version(), method, request, self._call_ms)

    def _require_open(self) -> None:
        if not self._open:
            raise UStatusError(UCode.FAILED_PRECONDITION, "the uSubscription client is not open: await open() first")

    # -- listeners and reconnects --------------------------------------------------------------------------------------

    async def _listen(self, topic: UUri, listener: UListener, since: Any) -> None:
        listeners = self._listeners.setdefault(uris.key(topic), [])
        if any(one is listener for one, _ in listeners):
            return
        if since is not None:
            assert self._history is not None
            await self._history.subscribe_since(topic, since, listener)
        else:
            await self.transport.register_listener(topic, listener)
        listeners.append((listener, since is not None))

    async def _unlisten(self, topic: UUri, listener: UListener) -> None:
        key = uris.key(topic)
        known = self._listeners.pop(key, [])
        if rest := [entry for entry in known if entry[0] is not listener]:
            self._listeners[key] = rest
        if any(from_history for one, from_history in known if one is listener):
            assert self._history is not None
            await self._history.unsubscribe(topic, listener)
            return
        with contextlib.suppress(UStatusError):  # a transport that was closed has lost it
            await self.transport.unregister_listener(topic, listener)

    def _on_change(self, version: int, source: str, change: Subscription) -> None:
        for callback in self._changes:
            callback(change)

    def _connection_changed(self, connected: bool) -> None:
        if not connected or not self._open:
            return
        self._is_failure_logged = False
        for method, known in ((SUBSCRIBE, self._subscribed), (wire.REGISTER, self._registered)):
            for key in known:
                self.restoring.put((method, key), Backoff(RESTORE_FIRST_MS, RESTORE_MAX_MS))

    async def _restore(self, what: tuple[str, Key | None], backoff: Backoff) -> int | None:
        """Repeat a subscription or registration: the service may have lost it while we were away; otherwise this
        changes nothing. After a permanent refusal it is no longer wanted."""
        method, key = what
        wanted: dict[Any, Any] = self._subscribed if method == SUBSCRIBE else self._registered
        if key not in wanted:
            return None  # ended meanwhile
        try:
            if method == wire.REGISTER:
                await self._register(wire.REGISTER, wanted[key])
            elif key is not None and not self._commands.is_busy(key):  # else there is a newer command
                await self._command(_ClientCommand(SUBSCRIBE, wanted[key].topic, wanted[key].options))
        except UStatusError as error:
            if error.code in FINAL:
                log.warning("the service refuses what it accepted before", method=method, topic=key, why=str(error))
                wanted.pop(key, None)
            elif key in wanted:
                if not self._is_failure_logged:
                    self._is_failure_logged = True
                    log.warning("not everything could be restored after the reconnect: trying again", why=str(error))
                return backoff.next_ms()
        return None


def _settle(command: _ClientCommand, answer: Status | UStatusError) -> None:
    for future in command.waiting:
        settle(future, answer)
