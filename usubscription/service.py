"""The uSubscription service over any UTransport: version 3 at up://AUTHORITY/0/3/..., version 4 at
up://AUTHORITY/0/4/..., one store.

network -> //AUTHORITY/0/FF/FFFF -> ServiceTransport -> by version and resource -> CommandEntry, other methods,
                                      |                  responses to own calls, change notifications of other services
                                      '-> unknown method: UNIMPLEMENTED
CommandEntry: batch of requests -> codec -> store (committed) -> hooks -> response -> notifier: notifications, publishes
                                     |                           |                    -> remote commands
                                     |   on_change: a dispatcher in this process is ready before the subscriber gets
                                     |   its answer
                                     '-> refused at once: commstatus and UStatus

Networks keep the order within one filter, but not between filters: Zenoh's Python binding has a thread for each. So
there is a single filter, and Subscribe and Unsubscribe of both versions use one queue to the store: the last command of
a client for a topic wins. They are handled in batches, without a task for each, since a fleet that reconnects sends
thousands a second. InMemoryRpcServer serves the other methods.

The transport has validated the messages, and checked that they have not expired.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import structlog
from google.protobuf.message import Message

from storage.runtime import REAL, WAITING_MAX, WORK_BATCH_MAX, Runtime
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import InMemoryRpcServer, RequestCheck, Responses
from uprotocol.communication.rpc_server import Unserved
from uprotocol.communication.shares import Quota, UEntity, weight
from uprotocol.core.usubscription.wire import (
    CODECS,
    ENTITY_TYPE,
    FETCH_SUBSCRIBERS,
    FETCH_SUBSCRIPTIONS,
    REGISTER,
    RESET,
    SUBSCRIBE,
    UNREGISTER,
    UNSUBSCRIBE,
    V3,
    V3_CODEC,
    V4,
    WANTING,
    PageLimits,
    StoreSaid,
    Subscribe,
    Unsubscribe,
    service,
)
from uprotocol.status import UStatusError
from uprotocol.tasks import end, wait_within
from uprotocol.transport import (
    MESSAGE_BYTES_MAX,
    ConnectionCallback,
    LocalUriProvider,
    UBatchListener,
    UListener,
    UTransport,
)
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.notifier import ChangeNotifier, ResponseTracker
from usubscription.remote import AUDIT_MS, REMOTE_TIMEOUT_MS, Remote
from usubscription.state import Change, Expire, Row
from usubscription.store.database import (
    SUBSCRIPTIONS_MAX,
    Commanded,
    Database,
    Outcome,
    Probe,
    Register,
    Reset,
    Settle,
    Unregister,
)
from usubscription.store.reader import StoreReader
from usubscription.store.store import LONG, SubscriptionStore

COMMANDS: Final = (SUBSCRIBE, UNSUBSCRIBE)
RESPONSES_WAITING_MAX: Final = 20_000  # as many as requests may wait for the store
RESPONSES_BATCH_MAX: Final = 128  # a larger batch would delay other messages noticeably
DRAIN_MS_MAX: Final = 5_000  # how long stop() waits until the network has accepted the responses
PAGE_ENTRIES_MAX: Final = 20_000  # of a list; also at most three quarters of a message
REQUESTS_RUNNING_MAX: Final = 10_000  # of one version; each waits for its commit, which includes hundreds
EXPIRY_CHECK_MS: Final = 1_000  # at most between two checks: the clock may jump
EXPIRED_BATCH_MAX: Final = 1_000  # ended in one transaction
HOOK_MS_MAX: Final = 5_000  # timeout of a hook; then the answers are sent

_CALLERS: Final = uris.pattern(resource=uris.RESOURCE_REPLY)

MayReset = Literal["linked", "all", "off"]
MethodHandler = Callable[[Any, UMessage], Message | Awaitable[Message]]
Hook = Callable[[Sequence[Change]], "Awaitable[None] | None"]

log = structlog.get_logger()


class ServiceTransport(UTransport):
    """The transport for the parts of the service, with a single filter for all messages to the service. Their listeners
    accept batches, have sinks of the service, and return no awaitable."""

    def __init__(self, inner: UTransport, authority: str, also: Collection[str] = ()) -> None:
        """`also`: other authorities of the service, or families of them."""
        self._inner, self._own = inner, frozenset((authority, *also))
        self._sink = uris.pattern(uris.WILDCARD_AUTHORITY if also else authority, ENTITY_TYPE)
        self.capabilities = inner.capabilities
        self._listeners: dict[tuple[int, int], list[tuple[UUri, UBatchListener]]] = {}
        self.unserved = Unserved(inner)
        self.responses = ResponseTracker()

    @property
    def connected(self) -> bool:
        return self._inner.connected

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._inner.on_connection(callback)

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        try:
            return await self._inner.send_batch(messages)
        finally:
            self.responses.sent(messages)

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        assert sink_filter is not None, "expected a sink of the service"
        assert isinstance(listener, UBatchListener)
        if not self._listeners:
            await self._inner.register_listener(uris.ANY, self, self._sink)
        self.unserved.served(sink_filter)
        known = self._listeners.setdefault((sink_filter.ue_version_major, sink_filter.resource_id), [])
        if not any(one is listener for _, one in known):
            known.append((source_filter, listener))

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        assert sink_filter is not None
        assert isinstance(listener, UBatchListener)
        key = (sink_filter.ue_version_major, sink_filter.resource_id)
        known = self._listeners.get(key, [])
        rest = [(source, one) for source, one in known if one is not listener]
        if len(rest) == len(known):
            raise UStatusError(UCode.NOT_FOUND, "no such listener: it was never registered, or is unregistered already")
        if rest:
            self._listeners[key] = rest
            return
        del self._listeners[key]
        if not self._listeners:
            await self._inner.unregister_listener(uris.ANY, self, self._sink)

    def on_receive(self, message: UMessage) -> None:
        self.on_receive_batch([message])

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        """Deliver to each listener its messages in the order of arrival."""
        batches: dict[int, tuple[UBatchListener, list[UMessage]]] = {}
        for message in messages:
            attributes, sink = message.attributes, message.attributes.sink
            if len(self._own) > 1 and not uris.is_one_of(sink.authority_name, self._own):
                continue  # for another service
            listeners = self._listeners.get((sink.ue_version_major, sink.resource_id))
            if listeners is None:
                self.unserved.answer(attributes)
                continue
            for source, listener in listeners:
                if uris.matches(source, attributes.source):
                    batches.setdefault(id(listener), (listener, []))[1].append(message)
        for listener, batch in batches.values():
            try:
                listener.on_receive_batch(batch)
            except Exception:
                what = "a part of the service failed; its messages count as received"
                log.exception(what, listener=repr(listener), messages=len(batch))


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One command that waits for its answer."""

    entry: CommandEntry
    codec: V3 | V4
    request: UAttributes
    topic: UUri | None  # of Subscribe, exactly as it was passed
    who: UEntity
    weight: int
    waits: bool = True

    def answered(self, answer: Outcome | BaseException) -> None:
        if not self.waits:
            return
        self.waits = False
        self.entry.is_waiting(self.who, -self.weight)
        if isinstance(answer, BaseException):
            self.entry.responses.refuse(self.request, answer)
            return
        codec, topic = self.codec, self.topic
        payload = codec.subscribed(topic, answer.answer) if topic is not None else codec.done(UNSUBSCRIBE)
        self.entry.responses.respond(self.request, payload)


class CommandEntry:
    """Subscribe and Unsubscribe of all versions. `requests` counts by method and version, as `subscribe_v4`."""

    def __init__(
        self,
        gate: ServiceTransport,
        store: SubscriptionStore,
        authority: str,
        check: RequestCheck | None,
        also: Collection[str] = (),
    ) -> None:
        """`also`: the other authorities of the service; its own clients may have more waiting requests."""
        self._gate, self._store, self._authority, self._check = gate, store, authority, check
        self.waiting = Quota("requests waiting", WAITING_MAX, {authority, *also})
        self.refused: Counter[str] = Counter()
        self._sinks = [
            service(authority, major, codec.methods[name].resource)
            for major, codec in CODECS.items()
            for name in COMMANDS
        ]
        self.responses = Responses(gate, waiting_max=RESPONSES_WAITING_MAX, batch_max=RESPONSES_BATCH_MAX)
        self.dropped = self.responses.dropped
        self.requests = Counter({f"{name}_v{major}": 0 for major in CODECS for name in COMMANDS})

    async def open(self) -> None:
        for sink in self._sinks:
            await self._gate.register_listener(_CALLERS, self, sink)

    async def close(self) -> None:
        """Accept no more requests."""
        for sink in self._sinks:
            try:
                await self._gate.unregister_listener(_CALLERS, self, sink)
            except UStatusError as error:  # the transport is closed already, or was never opened
                if error.code not in (UCode.NOT_FOUND, UCode.UNAVAILABLE):
                    raise

    def on_receive(self, message: UMessage) -> None:
        self.on_receive_batch([message])

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        for request in messages:
            try:
                self._take(request)
            except Exception as error:
                self.responses.refuse(request.attributes, error)

    def _take(self, request: UMessage) -> None:
        """Raises UStatusError; RESOURCE_EXHAUSTED for a caller that has too many waiting requests."""
        attributes = request.attributes
        source, codec = attributes.source, CODECS[attributes.sink.ue_version_major]
        subscribes = attributes.sink.resource_id == codec.methods[SUBSCRIBE].resource
        self.requests[f"{SUBSCRIBE if subscribes else UNSUBSCRIBE}_v{codec.major}"] += 1
        if self._check is not None:
            self._check(request)
        who, size = (source.authority_name, source.ue_id), weight(len(request.payload))
        if (why := self.waiting.refusal(who, size)) is not None:
            self.refused["waiting"] += 1
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"{why}: wait for the answers")
        event: Subscribe | Unsubscribe
        topic, host = None, source.authority_name or self._authority
        if subscribes:
            event, topic = codec.read_subscribe(request, host)
        else:
            event = codec.read_unsubscribe(request, host)
        pending = PendingRequest(self, codec, attributes, topic, who, size)
        self._store.writer().put(Commanded(event, uuids.to_bytes(attributes.id)), pending.answered)
        self.is_waiting(who, size)

    def is_waiting(self, who: UEntity, more: int) -> None:
        """Count `more` waiting requests of `who`; negative: they are answered."""
        self.waiting.add(who, more)
        lull = self._gate.responses.lull
        if self.waiting.used > WORK_BATCH_MAX:
            lull.clear()
        elif not self.waiting.used:
            lull.set()


class USubscriptionService:
    """The service for the topics and clients of `authority`; its state is in the SQLite file at `path`."""

    def __init__(
        self,
        transport: UTransport,
        authority: str,
        path: str | Path,
        *,
        check: RequestCheck | None = None,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        subscriptions_max: int = SUBSCRIPTIONS_MAX,
        remote_majors: dict[str, int] | None = None,
        remote_timeout_ms: int = REMOTE_TIMEOUT_MS,
        audit_ms: int = AUDIT_MS,
        runtime: Runtime = REAL,
        drain_ms_max: int = DRAIN_MS_MAX,
        also: Iterable[str] = (),
        reset: MayReset = "linked",
        neighbours: Iterable[str] = (),
    ) -> None:
        """`neighbours`: authorities with a uSubscription of their own, which may know an earlier store of this one. If
        the store is new, they are asked; so are those in `remote_majors`, and those from which something arrives.

        `also`: other authorities, or families like `*.vin123`, that have no uSubscription of their own: this one
        serves them.

        `reset`: what a Reset by another uSubscription service ends: what it shares with this one ("linked"), everything
        ("all", as in the specification), or nothing ("off"). `subscriptions_max`: of all clients together, see
        uprotocol.communication.shares.Quota; stored subscriptions stay.
        """
        self.authority, self.also, self._drain_ms_max = authority, frozenset(also), drain_ms_max
        self._now_ms, self._message_bytes_max = runtime.now_ms, message_bytes_max
        self._page = PageLimits(PAGE_ENTRIES_MAX, message_bytes_max * 3 // 4)
        gate = self._gate = ServiceTransport(transport, authority, self.also)
        most, disk = subscriptions_max, runtime.disk
        database = Database(path, authority, also=self.also, majors=remote_majors, disk=disk, subscriptions_max=most)
        self.store = SubscriptionStore(database, self._committed, self._answered, self._in_trouble, runtime=runtime)
        self.notifier = ChangeNotifier(transport, authority, self.store, gate.responses, self.also)
        self.remote = Remote(
            gate,
            authority,
            self.store,
            self.notifier,
            timeout_ms=remote_timeout_ms,
            audit_ms=audit_ms,
            neighbours=sorted({*neighbours, *(remote_majors or ())} - {authority}),
            runtime=runtime,
        )
        self._servers = {
            major: InMemoryRpcServer(
                gate,
                LocalUriProvider(authority, ENTITY_TYPE, major),
                check=check,
                requests_running_max=REQUESTS_RUNNING_MAX,
                drain_ms_max=drain_ms_max,
            )
            for major in CODECS
        }
        self.entry = CommandEntry(gate, self.store, authority, check, self.also)
        self._handlers: dict[str, MethodHandler] = {
            FETCH_SUBSCRIPTIONS: self._fetch_subscriptions,
            FETCH_SUBSCRIBERS: self._fetch_subscribers,
            REGISTER: functools.partial(self._registration, Register),
            UNREGISTER: functools.partial(self._registration, Unregister),
            RESET: self._reset,
        }
        self._halting: asyncio.Task[None] | None = None
        self._hooks: list[Hook] = []
        self._expirer: asyncio.Task[None] | None = None
        self._next_expiry_ms: int | None = None
        self._expiry_news = asyncio.Event()
        self._is_open = self._started = False
        self._calls: Counter[str] = Counter()
        self.may_reset: MayReset = reset
        self._refused: Counter[str] = Counter()

    @property
    def requests(self) -> Counter[str]:
        """Requests by method and version, for example `subscribe_v4`."""
        return self._calls + self.entry.requests

    @property
    def refused(self) -> Counter[str]:
        """Refused requests by reason."""
        return self._refused + self.store.database.refused + self.entry.refused

    @property
    def dropped(self) -> Counter[str]:
        """Messages that were not sent or not accepted, by reason."""
        total = Counter(outbox_full=self.store.database.tables.dropped)
        servers = (server.dropped for server in self._servers.values())
        for dropped in (self.notifier.dropped, self.entry.dropped, *servers):
            total.update(dropped)
        return total

    async def open(self) -> None:
        """Open the store, so that `subscriptions` works. The transport is not used yet.

        Raises UStatusError: ALREADY_EXISTS, FAILED_PRECONDITION, PERMISSION_DENIED, UNAVAILABLE (see
        tables.open_store).
        """
        if not self._is_open:
            await self.store.start()
            self._is_open = True

    async def start(self) -> None:
        """Open the store, continue where the last process stopped, and serve. The transport must be open or being
        opened. It also serves with a damaged store: see SubscriptionStore.trouble.

        Raises UStatusError as `open`, or the error of the transport.
        """
        await self.open()
        try:
            if self.store.trouble is None:
                await self._resume()
            for major, server in self._servers.items():
                for name, handle in self._handlers.items():
                    if (method := CODECS[major].methods.get(name)) is not None:
                        handler = functools.partial(self._handle, f"{name}_v{major}", handle, CODECS[major])
                        await server.register_request_handler(method.resource, handler)
            await self.entry.open()
            self._gate.unserved.is_settled = True
        except BaseException:
            await self.stop()
            raise
        if self.store.trouble is None:
            self._expirer = asyncio.ensure_future(self._expire_loop())
        self._started = True

    async def _resume(self) -> None:
        try:
            if await self.store.read(lambda reader: reader.answers_for()) != self.also | {self.authority}:
                await self.store.submit(Settle())
            self.notifier.start()
            await self.remote.start()
        except UStatusError:
            if self.store.trouble is None:
                raise
            await self.halt()  # the store is damaged

    async def stop(self) -> None:
        """Answer the running requests, then close the store. May be called twice."""
        self._gate.unserved.is_settled = False
        await asyncio.gather(*(server.close() for server in self._servers.values()))
        await self.entry.close()
        if self._halting is not None:
            await self._halting
        await self.halt()
        await self.store.stop()
        self._is_open = False
        await self.entry.responses.drain(self._drain_ms_max)
        await self._gate.unserved.drain(self._drain_ms_max)
        self._started = False

    async def halt(self) -> None:
        """Stop everything that is not caused by a request. May be called twice."""
        await asyncio.gather(end(self._expirer), self.remote.stop(), self.notifier.stop())

    def _in_trouble(self) -> None:
        if self._started:
            self._halting = asyncio.ensure_future(self.halt())

    def on_change(self, hook: Hook) -> None:
        """Call `hook(changes)` after every commit that changed something, before the answers are sent. If it returns an
        awaitable, that is awaited."""
        self._hooks.append(hook)

    async def subscriptions(self) -> list[Row]:
        """All subscriptions, in their order. Raises UNAVAILABLE if the service does not run."""
        now_ms = self._now_ms()
        return await self.store.read(lambda reader: [row for _, row in reader.each(None, None, now_ms)], lane=LONG)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _handle(
        self, name: str, handle: MethodHandler, codec: V3 | V4, request: UMessage
    ) -> Message | Awaitable[Message]:
        self._calls[name] += 1
        return handle(codec, request)

    def _host(self, request: UMessage) -> str:
        """The authority of the caller, which an address without authority in its request refers to."""
        return request.attributes.source.authority_name or self.authority

    async def _registration(self, event: type[Register | Unregister], codec: V3 | V4, request: UMessage) -> Message:
        """A registration survives restarts (A-46). Unregister answers OK even without a registration (A-48)."""
        client, topic = codec.read_registration(request, self._host(request))
        await self.store.submit(event(client, codec.major, topic))
        return codec.done(REGISTER)

    async def _reset(self, codec: V3 | V4, request: UMessage) -> Message:
        caller = uris.format(request.attributes.source)
        host = None if self.may_reset == "all" else self._host(request)
        try:
            codec.check_reset(request)
            if self.may_reset == "off":
                raise UStatusError(UCode.PERMISSION_DENIED, 'Reset is turned off (usubscription.reset = "off")')
            await self.store.submit(Reset(host, uuids.to_bytes(request.attributes.id)))
        except UStatusError as error:
            if error.code == UCode.PERMISSION_DENIED:
                self._refused["reset"] += 1
                log.warning("a Reset was refused", caller=caller, why=error.message)
            raise
        self.remote.auditor.now()  # which of our subscriptions do other services still have?
        of = "all" if host is None else "its own authority"
        log.warning("a Reset has ended subscriptions", caller=caller, of=of)
        return codec.done(RESET)

    async def _fetch_subscriptions(self, codec: V3 | V4, request: UMessage) -> Message:
        asked, now_ms = codec.read_fetch(request, self._host(request)), self._now_ms()

        page = self._page
        if codec.major == 4 and asked.after is None:  # as in the specification: everything at once
            page = PageLimits(SUBSCRIPTIONS_MAX, self._message_bytes_max, asked=False)
        said = self._heard(codec.major, request, asked.store)

        def fetch(reader: StoreReader) -> Message:
            named = said
            if named is not None and named.former:
                named = named._replace(links=reader.link_count(self._host(request)))
            rows = reader.each(asked.topic, asked.subscriber, now_ms, after=asked.after or 0, offset=asked.offset)
            with contextlib.closing(rows):  # it may have more rows than were read
                return codec.fetched(rows, page, named)

        return await self.store.read(fetch, lane=LONG)

    def _heard(self, major: int, request: UMessage, store: bytes) -> StoreSaid | None:
        """Returns what to say about stores to a service that has named its own; None to others."""
        host, source = self._host(request), request.attributes.source
        if not store or source.ue_id & 0xFFFF != ENTITY_TYPE or self.store.database.owns(host):
            return None
        return self.remote.heard(host, major, store)

    def _fetch_subscribers(self, _: V3, request: UMessage) -> Message | Awaitable[Message]:
        topic, offset = V3_CODEC.read_fetch_subscribers(request, self._host(request))
        now_ms, page = self._now_ms(), self._page
        self.store.writer()
        found = self.store.index.subscribers(topic, now_ms, offset, page.entries_max)
        if found is not None:
            return V3_CODEC.subscribers(*found, page)

        def fetch(reader: StoreReader) -> Message:
            return V3_CODEC.subscribers(*reader.subscribers(topic, now_ms, offset, page.entries_max), page)

        return self.store.read(fetch)

    # -- after a commit ------------------------------------------------------------------------------------------------

    async def _committed(self, outcomes: list[Outcome]) -> None:
        """Call the hooks, before the answers are sent."""
        if not self._hooks:
            return
        changes = [stored.change for outcome in outcomes for stored in outcome.changes]
        for outcome in outcomes:
            if outcome.many_changes:
                stored = await self.store.read(lambda reader: reader.outbox(self.notifier.sent, -1))
                changes += [one.change for one in stored]
        if not changes:
            return
        for hook in self._hooks:
            try:
                result = hook(changes)
                if inspect.isawaitable(result):
                    async with asyncio.timeout(HOOK_MS_MAX / 1000):
                        await result
            except TimeoutError:
                what = "subscriptions are answered before a hook on their changes has ended"
                log.warning(what, hook=repr(hook), waited_s=HOOK_MS_MAX / 1000)
            except Exception:
                log.exception("a hook on subscription changes failed", hook=repr(hook))

    def _answered(self, outcomes: list[Outcome]) -> None:
        """The responses are queued: notify others, send remote commands, note expiries."""
        for outcome in outcomes:
            if outcome.many_changes:
                self.remote.forget_all()
                self.notifier.look()
            if outcome.request is not None:
                self._gate.responses.expect(outcome.request)
            if outcome.changes:
                self.notifier.add(outcome.changes, outcome.request)
            for stored in outcome.changes:
                authority, ue_id, version, _ = stored.change.subscriber
                if ue_id & 0xFFFF == ENTITY_TYPE and stored.change.status in WANTING:
                    self.remote.subscribed(authority, version)
                expires_ms = stored.change.expires_ms
                if expires_ms is not None and (self._next_expiry_ms is None or expires_ms < self._next_expiry_ms):
                    self._next_expiry_ms = expires_ms
                    self._expiry_news.set()
            number = outcome.changes[-1].number if outcome.changes else 0
            for topic, link in outcome.links:
                self.remote.update(topic, link, number)

    # -- expiry --------------------------------------------------------------------------------------------------------

    async def _expire_loop(self) -> None:
        """Check at the start (for what expired while we were down), when the next one expires, and once a second."""
        while True:
            try:
                if await self._expire():
                    continue
            except UStatusError as error:
                log.warning("expired subscriptions can't be ended now", why=error.message)
            except Exception:
                log.exception("ending expired subscriptions failed")
            self._expiry_news.clear()
            wait_ms = EXPIRY_CHECK_MS
            if self._next_expiry_ms is not None:
                wait_ms = min(max(self._next_expiry_ms + 1 - self._now_ms(), 1), wait_ms)
            await wait_within(self._expiry_news, wait_ms / 1000)

    async def _expire(self) -> bool:
        """End expired subscriptions. Returns True if there may be more."""
        if not self.store.healthy:
            await self.store.submit(Probe())
        now_ms = self._now_ms()
        due, self._next_expiry_ms = await self.store.read(lambda reader: reader.expired(now_ms, EXPIRED_BATCH_MAX))
        if due:
            await asyncio.gather(*(self.store.submit(Expire(topic, subscriber)) for topic, subscriber in due))
        return len(due) == EXPIRED_BATCH_MAX
