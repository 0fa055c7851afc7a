"""Commands to the services of other authorities, repeated until they are answered.

link with a command -> AuthorityCommands -> FreshCalls -> Subscribe, Unsubscribe -> Answered | TimedOut -> store
                         |                                                                                  -> update()
                         | replaced while it runs: wait shortly for its answer, so that the next can't overtake it
                         | no answer: repeated with back-off; after a failure as well, without a limit
notifications to us, audits (audit.py: which of our subscriptions do you have?) -> Notified | Lost | Orphaned

The subscriber in all of them is this service itself (core.usubscription).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import structlog

from storage.runtime import REAL, Runtime
from uprotocol import uri as uris
from uprotocol.core.usubscription.asking import CommandQueue, Services
from uprotocol.core.usubscription.wire import (
    CODECS,
    ENTITY_TYPE,
    SUBSCRIBE,
    UNSUBSCRIBE,
    StoreSaid,
    Subscription,
    to_uri,
)
from uprotocol.pacing import Backoff
from uprotocol.status import FINAL, UStatusError
from uprotocol.tasks import end
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.audit import AuditAnswer, Auditor, Partners
from usubscription.notifier import ChangeNotifier
from usubscription.state import (
    Answered,
    Command,
    Key,
    Notified,
    RemoteLink,
    Status,
    TimedOut,
    TopicEvent,
    retry_delay_ms,
)
from usubscription.store.store import SubscriptionStore

REMOTE_TIMEOUT_MS: Final = 300_000  # of one remote command: req~usubscription-remote-max-timeout~1
# a fleet that is away has some for each of its services; further commands are repeated after a back-off
REMOTE_CALLS_MAX: Final = 40_000
AUDIT_MS: Final = 300_000  # between two audits of the remote services
AUDIT_CALL_MS: Final = 10_000  # timeout of a page of an audit
RECENT_MS: Final = 60_000  # how late a notification about an Unsubscribe may arrive
RECENT_MAX: Final = 10_000  # topics with a recent Unsubscribe

# calls that nobody has answered, to all services together: half of what one caller may have waiting for a network
# (express.messages_max), since audits and others need some, too. Further ones would be refused, one by one
FRESH_MAX: Final = 512
# after this time a call is no longer fresh, so a silent service delays others only for that long ...
FRESH_MS: Final = 1_000
FRESH_SILENT_MS: Final = 10_000  # ... or for this time, while no service answers: the network may be away

# topics in flight before the first answer: some lost requests delay nobody, and a dead service costs little
WINDOW_FIRST: Final = 16
WINDOW_MAX: Final = 256  # topics in flight: fills one group commit of the other service
# calls of one command: the first, which has its whole timeout, and the newest; more would only cost memory
CALLS_KEPT_MAX: Final = 2
# before an unanswered command is repeated, for networks that lose messages without a receiver; doubles ...
REPEAT_FIRST_MS: Final = 10_000
REPEAT_MAX_MS: Final = 60_000  # ... up to this
# how long a replaced command waits for its answer before the next is sent, so that they can't overtake each other
SUPERSEDED_GRACE_MS: Final = 2_000
STORE_RETRY_MS: Final = 1_000  # after the store refused an answer
# at most once in this time a message of a service ends the waiting: a busy service sends thousands a second
RETRY_NOW_MS: Final = 1_000

log = structlog.get_logger()


class FreshCalls(asyncio.Semaphore):
    """Limits how many calls to remote services are fresh; waiting calls start in order. A call is fresh until it is
    answered, or for FRESH_MS, so a silent service delays calls to others only for that long."""

    def __init__(self) -> None:
        super().__init__(FRESH_MAX)
        self.answered_at = -math.inf  # loop time of the last answer of any service

    async def begin(self) -> FreshCall:
        """Wait until one more call may start."""
        await self.acquire()
        return FreshCall(self)


class FreshCall:
    def __init__(self, calls: FreshCalls) -> None:
        self._calls, self._loop = calls, asyncio.get_running_loop()
        self._begun_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(FRESH_MS / 1000, self._on_timer)

    def _on_timer(self) -> None:
        now = self._loop.time()
        others_are_answered = now - self._calls.answered_at < FRESH_MS / 1000
        if others_are_answered or now - self._begun_at >= FRESH_SILENT_MS / 1000:
            self.end()
        else:
            self._timer = self._loop.call_later(FRESH_MS / 1000, self._on_timer)

    def end(self) -> None:
        """The call is no longer fresh. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._calls.release()


class Remote:
    """The commands to all authorities. Call `update` with every changed link."""

    def __init__(
        self,
        transport: UTransport,
        authority: str,
        store: SubscriptionStore,
        notifier: ChangeNotifier,
        *,
        timeout_ms: int = REMOTE_TIMEOUT_MS,
        audit_ms: int = AUDIT_MS,
        neighbours: Collection[str] = (),
        runtime: Runtime = REAL,
    ) -> None:
        """`neighbours`: authorities whose services may have agreed something with an earlier store of ours."""
        self._neighbours = [(authority, major) for authority in neighbours for major in CODECS]
        self._authority, self.store, self.notifier, self._timeout_ms = authority, store, notifier, timeout_ms
        self.random = runtime.rng.random
        self._locals = {major: LocalUriProvider(authority, ENTITY_TYPE, major) for major in CODECS}
        self._services = Services(
            transport, self._locals, "*", self._on_change, strict=True, calls_pending_max=REMOTE_CALLS_MAX
        )
        self.commands: dict[str, AuthorityCommands] = {}
        self.fresh_calls = FreshCalls()
        self._recent: dict[Key, float] = {}
        self._started_at = -math.inf  # loop time
        self.partners = Partners(store.database.path.with_name(store.database.path.name + ".partners"), runtime.disk)
        self.auditor = Auditor(
            store,
            self.partners,
            fetch=self._fetch,
            is_busy=lambda topic: topic[0] in self.commands and self.commands[topic[0]].is_busy(topic),
            interval_ms=audit_ms,
            random=self.random,
            now_ms=runtime.now_ms,
        )
        self._open = False
        transport.on_connection(self._connection_changed)

    async def start(self) -> None:
        """Register listeners, then repeat the commands that were not answered before the restart."""
        self._open = True
        self._started_at = asyncio.get_running_loop().time()
        await self.partners.load()
        await self._services.open()
        last = await self.store.read(lambda reader: reader.outbox_last())
        links = await self.store.read(lambda reader: reader.links())
        for partner in await self.store.read(lambda reader: reader.subscribing()):
            self.subscribed(*partner)
        for topic, link in links:
            self.update(topic, link, last)
        if self.partners.known or any(link.command is None for _, link in links):
            self.auditor.now()
        self.auditor.start()
        for neighbour in self._neighbours:
            self.auditor.notify(neighbour)

    async def stop(self) -> None:
        """Unanswered commands are repeated after the next start."""
        self._open = False
        await self.auditor.stop()
        for commands in list(self.commands.values()):
            await commands.stop()
        await self._services.close()
        await self.partners.close()

    def update(self, topic: Key, link: RemoteLink, after: int) -> None:
        """The link of `topic` is now `link`. Its command, if any, is sent after the changes up to `after`."""
        if not self._open:
            return
        commands = self.commands.get(topic[0])
        if commands is None:
            if link.command is None:
                return
            commands = self.commands[topic[0]] = AuthorityCommands(self, topic[0])
        if link.command is Command.UNSUBSCRIBE:
            self._recent.pop(topic, None)
            self._recent[topic] = asyncio.get_running_loop().time()
            if len(self._recent) > RECENT_MAX:
                del self._recent[next(iter(self._recent))]
        commands.update(topic, link, after)

    def subscribed(self, authority: str, major: int) -> None:
        """A service of another authority has a subscription here."""
        if major in CODECS and not self.store.database.owns(authority):
            self.partners.note((authority, major))
            self.auditor.notify((authority, major))

    def arrived_from(self, authority: str) -> None:
        """A message of another authority has arrived: its service may have to be told of our store."""
        if self._open and not self.store.database.owns(authority):
            self.auditor.arrived_from(authority)

    def heard(self, authority: str, major: int, store: bytes) -> StoreSaid:
        """A service asks for its subscriptions here, and names its store. Returns what to answer, without `links`."""
        is_news = self.partners.learn(authority, store)
        if (commands := self.commands.get(authority)) is not None:
            # it is available; what it was asked may be lost with an earlier store
            commands.retry_now(connected=is_news)
        if is_news:
            self.auditor.has_other_store(authority, major)
        return StoreSaid(self.store.database.id, self.partners.stores[authority].former)

    def forget_all(self) -> None:
        """Drop all commands after a Reset; an audit finds the subscriptions that other services still have."""
        for commands in self.commands.values():
            commands.clear()
        self.auditor.now()

    # -- the calls -----------------------------------------------------------------------------------------------------

    async def call(self, topic: Key, link: RemoteLink) -> Status:
        """Send the command once, and return the status in its answer. Raises UStatusError."""
        authority, major, codec = topic[0], link.major, CODECS[link.major]
        topic_uri, own = to_uri(topic), self._locals[major].get_source()
        if link.command is Command.UNSUBSCRIBE:
            request = codec.unsubscribe(topic_uri, own)
            await self._services.call(authority, major, UNSUBSCRIBE, request, self._timeout_ms)
            return Status.UNSUBSCRIBED
        # without expiry; services of older revisions read the subscriber (C-11)
        request = codec.subscribe(topic_uri, None, link.sample_period_ms, own)
        return codec.read_status(await self._services.call(authority, major, SUBSCRIBE, request, self._timeout_ms))

    # -- notifications and audits --------------------------------------------------------------------------------------

    def _on_change(self, major: int, source: str, change: Subscription) -> None:
        topic = uris.key(change.topic)
        if topic[0] != source or uris.key(change.subscriber)[:3] != (self._authority, ENTITY_TYPE, major):
            return  # not about us, or not about a topic of the sender
        commands = self.commands.get(source)
        if commands is not None:
            commands.retry_now()  # the service is available
            if change.status is Status.SUBSCRIBED and (command := commands.commands.get(topic)) is not None:
                command.confirmed = True
                return  # most services send this after each answer
        elif change.status is not Status.UNSUBSCRIBED and (source, major) not in self.partners.known:
            self.auditor.stranger((source, major))  # it has a subscription that we don't know: our store was lost
        # it may be about an earlier Unsubscribe of ours, or about a later Subscribe: an audit decides
        if change.status is Status.UNSUBSCRIBED:
            # after a start recent commands are not known
            since = max(self._recent.get(topic, -math.inf), self._started_at)
            if asyncio.get_running_loop().time() - since < RECENT_MS / 1000:
                self.auditor.suspect(topic)
                return
            self._recent.pop(topic, None)
        self.auditor.submit(Notified(topic, change.status))

    def _connection_changed(self, connected: bool) -> None:
        if connected and self._open:
            for commands in list(self.commands.values()):
                commands.retry_now(connected=True)
            self.auditor.now()
            self.auditor.hurry(self._neighbours)

    async def _fetch(self, authority: str, major: int, most: int, timeout_ms: int | None) -> AuditAnswer:
        """Our subscriptions in that service. Raises UStatusError; DATA_LOSS for an answer that can't be read or has
        more than `most` entries. Such an answer ends no subscription."""
        found: dict[Key, Status] = {}
        said: list[StoreSaid] = []
        pages = self._services.listed(
            authority,
            major,
            None,
            self._locals[major].get_source(),
            AUDIT_CALL_MS if timeout_ms is None else min(timeout_ms, AUDIT_CALL_MS),
            store=self.store.database.id,
            on_store=said.append,
        )
        async for page in pages:
            if len(found) > most:
                why = f"the uSubscription of {authority} claims to have more than {most} subscriptions of ours"
                raise UStatusError(UCode.DATA_LOSS, why)
            found |= {uris.key(one.topic): one.status for one in page}
        return AuditAnswer(found, said[0] if said else StoreSaid())


@dataclass(slots=True, eq=False)
class _RemoteCommand:
    """The last command for one topic."""

    link: RemoteLink
    after: int  # it is sent after the changes up to this number
    news: asyncio.Event = field(default_factory=asyncio.Event)  # it was replaced, answered, or is to be repeated now
    repeat_now: bool = False
    repeats: int = 0
    confirmed: bool = False  # a notification says SUBSCRIBED, which counts if the answer says SUBSCRIBE_PENDING


class AuthorityCommands(CommandQueue[Key, _RemoteCommand]):
    """The unanswered commands to the service of one authority. Call `update` with every changed link.

    Topics do not wait for each other, so a lost request delays only its own topic. The window grows with the answers: a
    service that is away gets few calls, one that answers gets hundreds at once.
    """

    def __init__(self, remote: Remote, authority: str) -> None:
        super().__init__(self._run_until_answered, WINDOW_FIRST, idle=self._leave)
        self._remote, self.authority = remote, authority
        self._loop = asyncio.get_running_loop()
        self._answered_at = self._retried_at = self._loop.time()
        self._departure = asyncio.Lock()  # keeps the order of the commands

    def _leave(self) -> None:
        if self._remote.commands.get(self.authority) is self:
            del self._remote.commands[self.authority]

    def update(self, topic: Key, link: RemoteLink, after: int) -> None:
        """As Remote.update."""
        known = self.commands.get(topic)
        if link.command is None:
            self.drop(topic)
        else:
            if known is not None and known.link.generation == link.generation:
                after = known.after
            delay_ms = retry_delay_ms(link.attempt, self._remote.random()) if link.attempt else 0
            self.put(topic, _RemoteCommand(link, after), delay_ms)
        if known is not None:
            known.news.set()

    def clear(self) -> None:
        running = self.running()
        super().clear()
        for command in running:
            command.news.set()

    def retry_now(self, *, connected: bool = False) -> None:
        """Retry at once, since the service may be available again. `connected`: requests in flight may be lost."""
        now = self._loop.time()
        if not connected and now - self._retried_at < RETRY_NOW_MS / 1000:
            return
        self._retried_at = now
        for command in self.running():
            if connected or command.repeats > 1:
                command.repeat_now = True
                command.news.set()
        self.hurry()

    async def _run_until_answered(self, topic: Key, command: _RemoteCommand) -> int:
        """The result is stored, and `update` then replaces the command; otherwise it runs again."""
        try:
            async with self._departure:
                if command.link.command is Command.SUBSCRIBE:
                    await self._remote.partners.remember((topic[0], command.link.major))
                # SUBSCRIBE_PENDING is notified before the command: a dispatcher then prepares to forward
                await self._remote.notifier.notified(command.after)
            fresh = await self._remote.fresh_calls.begin()
            try:
                event = await self._answer(topic, command) if self.is_current(topic, command) else None
            finally:
                fresh.end()
            if event is not None:
                await self._remote.store.submit(event)
            if command.confirmed and isinstance(event, Answered) and event.status is Status.SUBSCRIBE_PENDING:
                await self._remote.store.submit(Notified(topic, Status.SUBSCRIBED))
        except UStatusError as error:
            log.warning("the answer of a remote uSubscription could not be stored: trying again", why=error.message)
        except Exception:
            log.exception("a command to a remote uSubscription failed: trying again", authority=self.authority)
        return STORE_RETRY_MS

    async def _answer(self, topic: Key, command: _RemoteCommand) -> TopicEvent | None:
        """Send the command until it is answered. Returns None if a later command replaced it and no answer came in
        time."""
        calls: list[asyncio.Task[Status]] = []
        backoff = Backoff(REPEAT_FIRST_MS, REPEAT_MAX_MS)
        command.repeats = 0
        try:
            while True:
                current, wait_ms = self.is_current(topic, command), SUPERSEDED_GRACE_MS
                if current:
                    wait_ms = backoff.next_ms()
                    command.repeats += 1
                    calls.append(self._call(topic, command))
                    if len(calls) > CALLS_KEPT_MAX:
                        calls.pop(1).cancel()
                await self._wait(topic, command, calls, wait_ms)
                done = next((call for call in calls if call.done()), None)
                if done is not None:
                    return self._event(topic, command.link, done)
                if not current:
                    return None
                if self._loop.time() - self._answered_at > wait_ms / 1000:
                    self.window = 1  # the service does not answer at all
        finally:
            await end(*calls)

    def _call(self, topic: Key, command: _RemoteCommand) -> asyncio.Task[Status]:
        is_first = command.repeats == 1  # counted as fresh by the caller
        call = asyncio.ensure_future(
            self._remote.call(topic, command.link) if is_first else self._repeat(topic, command)
        )
        call.add_done_callback(lambda _: command.news.set())
        return call

    async def _repeat(self, topic: Key, command: _RemoteCommand) -> Status:
        fresh = await self._remote.fresh_calls.begin()
        try:
            return await self._remote.call(topic, command.link)
        finally:
            fresh.end()

    async def _wait(self, topic: Key, command: _RemoteCommand, calls: list[asyncio.Task[Status]], wait_ms: int) -> None:
        """Wait until a call is done, `wait_ms` are over, `repeat_now` is set, or the command is replaced."""
        was_current = self.is_current(topic, command)
        command.repeat_now = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_ms / 1000):
                while not (
                    command.repeat_now
                    or (was_current and not self.is_current(topic, command))
                    or any(call.done() for call in calls)
                ):
                    command.news.clear()
                    await command.news.wait()

    def _event(self, topic: Key, link: RemoteLink, call: asyncio.Task[Status]) -> TopicEvent:
        """Only a permanent refusal ends a subscription; after any other error the command is repeated."""
        try:
            status = call.result()
        except UStatusError as error:
            if error.code not in FINAL:
                return TimedOut(topic, link.generation)
            log.info("a remote uSubscription refused", topic=uris.format(to_uri(topic)), why=str(error))
            status = Status.UNSUBSCRIBED
        except Exception:
            log.exception("calling a remote uSubscription failed", topic=uris.format(to_uri(topic)))
            return TimedOut(topic, link.generation)
        self._answered_at = self._remote.fresh_calls.answered_at = self._loop.time()
        self.window = min(self.window + 1, WINDOW_MAX)
        return Answered(topic, link.generation, status)
