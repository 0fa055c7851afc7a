"""The remote leg: what this service has to tell the services of other authorities, until they have answered.

link with a command -> lane of its authority: in order, one in flight, the last one wins -> Subscribe, Unsubscribe -> Answered | TimedOut
                          | repeated while no answer comes; after a timeout again, with back-off, for ever
notifications to us, audits (what do you have of ours?) -> Notified | Lost | Orphaned

The subscriber in all of it is this service itself (core.usubscription).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog
from google.protobuf.message import Message

from uprotocol import uri as uris
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UPayload
from uprotocol.status import RETRYABLE, UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription.codec import CHANGE_RESOURCE, CODECS, ENTITY_TYPE, V4_CODEC, Row, read_subscription, to_uri
from usubscription.outbox import Pump
from usubscription.state import Answered, Command, Event, Key, Link, Lost, Notified, Orphaned, Status, TimedOut, retry_delay_ms
from usubscription.store import Store

TIMEOUT_MS: Final = 300_000  # of one remote command: req~usubscription-remote-max-timeout~1
REPEAT_FIRST_MS: Final = 10_000  # without an answer the same command is said again, for networks that lose what nobody hears; doubles ...
REPEAT_MAX_MS: Final = 60_000  # ... up to this
SUPERSEDED_GRACE_MS: Final = 2_000  # a command that a later one replaced may still be answered: so that they can't overtake each other
AUDIT_MS: Final = 300_000  # between questions for what the remote services have of ours
AUDIT_CALL_MS: Final = 10_000  # for the answer to one
AUDITS_AT_ONCE: Final = 16
PAGES_MAX: Final = 10_000  # of one version 3 listing
RECENT_MS: Final = 60_000  # a late notification about an Unsubscribe may be under way that long
RECENT_MAX: Final = 10_000  # topics for which that is remembered
STORE_RETRY_MS: Final = 1_000  # after the store refused an answer

log = structlog.get_logger()


@dataclass(slots=True)
class _Due:
    """A command that waits in its lane."""

    link: Link
    after: int  # changes up to this number are told first
    at: float  # loop time before which it isn't tried


class Remote:
    """All lanes. `update` gives it every link that changes."""

    def __init__(
        self,
        transport: UTransport,
        authority: str,
        store: Store,
        pump: Pump,
        *,
        timeout_ms: int = TIMEOUT_MS,
        repeat_first_ms: int = REPEAT_FIRST_MS,
        audit_ms: int = AUDIT_MS,
        audit_call_ms: int = AUDIT_CALL_MS,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._transport, self._authority = transport, authority
        self.store, self.pump, self.random = store, pump, random
        self.timeout_ms, self.repeat_first_ms = timeout_ms, repeat_first_ms
        self._audit_ms, self._audit_call_ms = audit_ms, audit_call_ms
        self._locals = {major: LocalUriProvider(authority, ENTITY_TYPE, major) for major in CODECS}
        self._clients = {major: InMemoryRpcClient(transport, local) for major, local in self._locals.items()}
        self._ears = {major: _Ear(major, self._hear) for major in CODECS}
        self._lanes: dict[str, _Lane] = {}
        self._recent: dict[Key, float] = {}
        self._suspects: set[Key] = set()
        self._audit_now = asyncio.Event()
        self._auditor: asyncio.Task[None] | None = None
        self._open = False
        transport.on_connection(self._connection_changed)

    def __repr__(self) -> str:
        waiting = sum(len(lane.waiting) for lane in self._lanes.values())
        return f"Remote({self._authority}, lanes={len(self._lanes)}, commands={waiting})"

    async def start(self) -> None:
        """Listen, then go on with what was not answered before the restart."""
        self._open = True
        for client in self._clients.values():
            await client.open()
        for major, ear in self._ears.items():
            await self._transport.register_listener(
                uris.pattern("*", ENTITY_TYPE, major, CHANGE_RESOURCE), ear, self._locals[major].get_source()
            )
        last = await self.store.read(lambda reader: reader.outbox_last())
        links = await self.store.read(lambda reader: reader.links())
        for topic, link in links:
            self.update(topic, link, last)
        if any(link.command is None for _, link in links):
            self._audit_now.set()
        self._auditor = asyncio.ensure_future(self._audit_for_ever())

    async def stop(self) -> None:
        """What was not answered goes on after the restart."""
        self._open = False
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        if self._auditor is not None:
            tasks.append(self._auditor)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for major, ear in self._ears.items():
            with contextlib.suppress(UStatusError):
                source = uris.pattern("*", ENTITY_TYPE, major, CHANGE_RESOURCE)
                await self._transport.unregister_listener(source, ear, self._locals[major].get_source())
        for client in self._clients.values():
            await client.close()

    def update(self, topic: Key, link: Link, after: int) -> None:
        """`link` of `topic` is as given; its command, if any, leaves once the changes up to `after` were told."""
        lane = self._lanes.get(topic[0])
        if lane is None:
            if link.command is None:
                return
            lane = self._lanes[topic[0]] = _Lane(self, topic[0])
        if link.command is Command.UNSUBSCRIBE:
            self._recent.pop(topic, None)
            self._recent[topic] = asyncio.get_running_loop().time()
            if len(self._recent) > RECENT_MAX:
                del self._recent[next(iter(self._recent))]
        lane.update(topic, link, after)

    def forget_all(self) -> None:
        """After a Reset no command is due any more."""
        for lane in self._lanes.values():
            lane.clear()

    def idle(self, lane: _Lane) -> None:
        """`lane` has nothing left to do."""
        if self._lanes.get(lane.authority) is lane and not lane.locked:
            del self._lanes[lane.authority]

    # -- the calls --------------------------------------------------------------------------------------------------------------------

    async def call(self, topic: Key, link: Link) -> Status:
        """One try. Raises UStatusError."""
        command = link.command
        assert command is not None
        sink = uris.uri(topic[0], ENTITY_TYPE, link.major, int(command))
        request = _request(topic, link, self._locals[link.major].get_source())
        answer = await self._clients[link.major].invoke_method(sink, UPayload.pack(request), CallOptions(timeout_ms=self.timeout_ms))
        if command is Command.UNSUBSCRIBE:
            return Status.UNSUBSCRIBED
        if link.major == 4:
            return Status(answer.unpack(v4.SubscribeResponse).status - 1)
        return Status(answer.unpack(v3.SubscriptionResponse).status.state)

    # -- what the others say --------------------------------------------------------------------------------------------------------------

    def _hear(self, major: int, message: UMessage) -> None:
        source = message.attributes.source.authority_name
        try:
            told = CODECS[major].read_change(UPayload.of(message))
        except UStatusError as error:
            log.warning("a change notification can't be read", source=source, why=error.message)
            return
        if told.topic[0] != source or told.subscriber[:3] != (self._authority, ENTITY_TYPE, major):
            return  # not about us, or not theirs to say
        lane = self._lanes.get(source)
        if lane is not None:
            lane.kick()  # it is there
        if told.status is Status.UNSUBSCRIBED and told.topic in self._recent:
            now = asyncio.get_running_loop().time()
            if now - self._recent[told.topic] < RECENT_MS / 1000:  # about the Unsubscribe, or about what came after it? Ask.
                self._suspects.add(told.topic)
                self._audit_now.set()
                return
            del self._recent[told.topic]
        self._submit(Notified(told.topic, told.status))

    def _connection_changed(self, connected: bool) -> None:
        if connected and self._open:
            for lane in self._lanes.values():
                lane.kick()
            self._audit_now.set()

    def _submit(self, event: Event) -> None:
        with contextlib.suppress(UStatusError):  # full or stopping: the next audit will see it
            self.store.submit(event)

    # -- audits -----------------------------------------------------------------------------------------------------------------------

    async def _audit_for_ever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._audit_now.wait(), self._audit_ms / 1000 * (0.75 + self.random() / 2))
            self._audit_now.clear()
            try:
                links = await self.store.read(lambda reader: reader.links())
                authorities = sorted({topic[0] for topic, link in links if link.command is None})
                for start in range(0, len(authorities), AUDITS_AT_ONCE):
                    await asyncio.gather(*(self._audit(authority) for authority in authorities[start : start + AUDITS_AT_ONCE]))
            except UStatusError as error:
                log.warning("no audit of the remote subscriptions", why=error.message)
            except Exception:
                log.exception("auditing the remote subscriptions failed")

    async def _audit(self, authority: str) -> None:
        """Compare what the service of `authority` has of ours with what we believe."""
        lane = self._lanes.get(authority)
        if lane is None:
            lane = self._lanes[authority] = _Lane(self, authority)
        async with lane.lock:  # no command is in flight meanwhile, so that neither list is stale
            links = await self.store.read(lambda reader: reader.links(authority))
            for major in CODECS:
                ours = {topic: link for topic, link in links if link.major == major}
                if not ours:
                    continue
                try:
                    theirs = {row.topic: row.status for row in await self._fetch(authority, major)}
                except UStatusError as error:
                    log.info("a remote uSubscription does not say what it has of ours", authority=authority, why=str(error))
                    theirs = None
                self._compare(authority, major, ours, theirs, known={topic for topic, _ in links})
        if lane.task is None:
            self.idle(lane)

    def _compare(self, authority: str, major: int, ours: dict[Key, Link], theirs: dict[Key, Status] | None, known: set[Key]) -> None:
        for topic, link in ours.items():
            suspect = topic in self._suspects
            self._suspects.discard(topic)
            if theirs is None:
                if suspect:
                    self._submit(Notified(topic, Status.UNSUBSCRIBED))  # it said so, and nothing speaks against it
            elif topic not in theirs:
                self._submit(Notified(topic, Status.UNSUBSCRIBED) if suspect else Lost(topic))
            elif theirs[topic] is not link.state:
                self._submit(Notified(topic, theirs[topic]))
        for topic in theirs or ():
            if topic not in known and topic[0] == authority:
                self._submit(Orphaned(topic, major))

    async def _fetch(self, authority: str, major: int) -> list[Row]:
        own = self._locals[major].get_source()
        method = uris.uri(authority, ENTITY_TYPE, major, V4_CODEC.methods["fetch_subscriptions"])
        options = CallOptions(timeout_ms=self._audit_call_ms)
        client = self._clients[major]
        if major == 4:
            payload = await client.invoke_method(method, UPayload.pack(v4.FetchSubscriptionsRequest(subscriber_filter=own)), options)
            return [read_subscription(one) for one in payload.unpack(v4.FetchSubscriptionsResponse).subscriptions]
        rows: list[Row] = []
        for _ in range(PAGES_MAX):
            request = v3.FetchSubscriptionsRequest(subscriber=v3.SubscriberInfo(uri=own), offset=len(rows) or None)
            page = (await client.invoke_method(method, UPayload.pack(request), options)).unpack(v3.FetchSubscriptionsResponse)
            rows.extend(Row(uris.key(one.topic), uris.key(one.subscriber.uri), Status(one.status.state)) for one in page.subscriptions)
            if not page.has_more_records or not page.subscriptions:
                break
        return rows


class _Lane:
    """The commands to one authority."""

    def __init__(self, remote: Remote, authority: str) -> None:
        self._remote, self.authority = remote, authority
        self.waiting: dict[Key, _Due] = {}  # in the order in which they leave
        self.lock = asyncio.Lock()
        self.task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._kicked = asyncio.Event()

    def __repr__(self) -> str:
        return f"_Lane({self.authority}, waiting={len(self.waiting)})"

    @property
    def locked(self) -> bool:
        return self.lock.locked() or bool(self.waiting)

    def update(self, topic: Key, link: Link, after: int) -> None:
        known = self.waiting.pop(topic, None)  # a new command goes to the end
        if link.command is not None:
            again = known is not None and known.link.generation == link.generation
            delay_ms = retry_delay_ms(link.attempt, self._remote.random()) if link.attempt else 0
            at = asyncio.get_running_loop().time() + delay_ms / 1000
            self.waiting[topic] = _Due(link, known.after if again and known is not None else after, at)
        self._news.set()
        if self.task is None and self.waiting:
            self.task = asyncio.ensure_future(self._run())

    def clear(self) -> None:
        self.waiting.clear()
        self._news.set()

    def kick(self) -> None:
        """The remote may be there again: don't wait."""
        for due in self.waiting.values():
            due.at = 0.0
        self._kicked.set()
        self._news.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self.waiting:
                self._news.clear()
                topic = next((topic for topic, due in self.waiting.items() if due.at <= loop.time()), None)
                if topic is None:
                    wait_s = min(due.at for due in self.waiting.values()) - loop.time()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._news.wait(), max(wait_s, 0.001))
                    continue
                async with self.lock:
                    await self._command(topic)
        finally:
            self.task = None
            self._remote.idle(self)

    async def _command(self, topic: Key) -> None:
        due = self.waiting.get(topic)
        if due is None:
            return
        await self._remote.pump.told(due.after)  # the dispatcher prepares on the pending change
        if self.waiting.get(topic) is not due:
            return
        event = await self._answer(topic, due)
        if event is None:
            return
        try:
            await self._remote.store.submit(event)  # the outcome comes back through update()
        except UStatusError as error:
            log.warning("the answer of a remote uSubscription could not be stored: asking again", why=error.message)
            due.at = asyncio.get_running_loop().time() + STORE_RETRY_MS / 1000

    async def _answer(self, topic: Key, due: _Due) -> Event | None:
        """What the remote made of the command; None if a later command replaced it and no answer came in time."""
        link = due.link
        calls: set[asyncio.Future[Status]] = set()
        repeat_ms = self._remote.repeat_first_ms
        try:
            while True:
                current = self.waiting.get(topic) is due
                if current:
                    calls.add(asyncio.ensure_future(self._remote.call(topic, link)))
                done = await self._wait(topic, due, calls, repeat_ms if current else SUPERSEDED_GRACE_MS)
                for call in done:
                    return self._event(topic, link, call)
                if not current:
                    return None
                repeat_ms = min(repeat_ms * 2, REPEAT_MAX_MS)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _wait(self, topic: Key, due: _Due, calls: set[asyncio.Future[Status]], wait_ms: int) -> set[asyncio.Future[Status]]:
        """Until a call is done, it is time to repeat, somebody kicks, or the command is replaced."""
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_ms / 1000
        was_current = self.waiting.get(topic) is due
        self._kicked.clear()
        while loop.time() < end:
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            waiters: set[asyncio.Future[Any]] = {*calls, news}
            try:
                await asyncio.wait(waiters, timeout=end - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
            found = {call for call in calls if call.done()}
            if found or self._kicked.is_set() or (was_current and self.waiting.get(topic) is not due):
                return found
        return set()

    def _event(self, topic: Key, link: Link, call: asyncio.Future[Status]) -> Event:
        try:
            return Answered(topic, link.generation, call.result())
        except UStatusError as error:
            if error.code in RETRYABLE:
                return TimedOut(topic, link.generation)
            log.info("a remote uSubscription refused", topic=uris.format(to_uri(topic)), why=str(error))
        except ValueError:  # a status of a later specification
            log.info("a remote uSubscription answered with an unknown status", topic=uris.format(to_uri(topic)))
        return Answered(topic, link.generation, Status.UNSUBSCRIBED)


def _request(topic: Key, link: Link, own: UUri) -> Message:
    """Spec-facts 10.6: no expiry; version 3 names itself as subscriber, for services that still read that field."""
    uri, subscribing = to_uri(topic), link.command is Command.SUBSCRIBE
    if link.major == 4:
        return v4.SubscribeRequest(topic=uri, sample_period=link.sample_period_ms) if subscribing else v4.UnsubscribeRequest(topic=uri)
    subscriber = v3.SubscriberInfo(uri=own)
    if not subscribing:
        return v3.UnsubscribeRequest(topic=uri, subscriber=subscriber)
    request = v3.SubscriptionRequest(topic=uri, subscriber=subscriber)
    if link.sample_period_ms is not None:
        request.attributes.sample_period_ms = link.sample_period_ms
    return request


class _Ear:
    """Listens to what remote services tell us in one version."""

    def __init__(self, major: int, hear: Callable[[int, UMessage], None]) -> None:
        self._major, self._hear = major, hear

    def on_receive(self, message: UMessage) -> None:
        self._hear(self._major, message)
