"""The remote leg: what this service has to tell the services of other authorities, until they have answered.

link with a command -> Commands of its authority -> Places -> Subscribe, Unsubscribe -> Answered | TimedOut -> store
                         |                                                                               -> update()
                         | replaced while under way: waited for a little while, so that the two can't overtake
                         | no answer: said again, with back-off; after a failure again, with back-off, for ever
notifications to us, audits (audit.py: what do you have of ours?) -> Notified | Lost | Orphaned

The subscriber in all of it is this service itself (core.usubscription).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass, field
from typing import Final

import structlog

from storage.runtime import REAL, Runtime
from uprotocol import uri as uris
from uprotocol.core.usubscription.asking import CommandQueue, Services, end
from uprotocol.core.usubscription.wire import CODECS, ENTITY_TYPE, SUBSCRIBE, UNSUBSCRIBE, Subscription, to_uri
from uprotocol.pacing import Backoff
from uprotocol.status import FINAL, UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.audit import Auditor, Partners
from usubscription.notifier import Notifier
from usubscription.places import Places
from usubscription.state import Answered, Command, Event, Key, Link, Notified, Status, TimedOut, retry_delay_ms
from usubscription.store.store import Store

TIMEOUT_MS: Final = 300_000  # of one remote command: req~usubscription-remote-max-timeout~1
# a fleet that is away holds some for each of its services; beyond it commands wait out a back-off
CALLS_PENDING_MAX: Final = 40_000
AUDIT_MS: Final = 300_000  # between questions for what the remote services have of ours
AUDIT_CALL_MS: Final = 10_000  # for the answer to one
RECENT_MS: Final = 60_000  # a late notification about an Unsubscribe may be under way that long
RECENT_MAX: Final = 10_000  # topics for which that is remembered

# topics in flight before there was an answer: a few lost requests hold nobody up, a dead service costs little
WINDOW_FIRST: Final = 16
WINDOW_MAX: Final = 256  # topics in flight: fills one group commit of the other service
# of one command: the first, which has its whole timeout, and the newest; more would only cost memory
CALLS_KEPT_MAX: Final = 2
# without an answer the same command is said again, for networks that lose what nobody hears; doubles ...
REPEAT_FIRST_MS: Final = 10_000
REPEAT_MAX_MS: Final = 60_000  # ... up to this
# a command that a later one replaced may still be answered: so that they can't overtake each other
SUPERSEDED_GRACE_MS: Final = 2_000
STORE_RETRY_MS: Final = 1_000  # after the store refused an answer
# between two times that a sign of life ends the waiting: a busy service gives thousands a second
RETRY_NOW_MS: Final = 1_000

log = structlog.get_logger()


class Remote:
    """The commands to all authorities. `update` gives it every link that changes."""

    def __init__(
        self,
        transport: UTransport,
        authority: str,
        store: Store,
        notifier: Notifier,
        *,
        timeout_ms: int = TIMEOUT_MS,
        audit_ms: int = AUDIT_MS,
        runtime: Runtime = REAL,
    ) -> None:
        self._authority, self.store, self.notifier, self._timeout_ms = authority, store, notifier, timeout_ms
        self.random = runtime.rng.random
        self._locals = {major: LocalUriProvider(authority, ENTITY_TYPE, major) for major in CODECS}
        self._services = Services(
            transport, self._locals, "*", self._on_change, strict=True, calls_pending_max=CALLS_PENDING_MAX
        )
        self._commands: dict[str, Commands] = {}
        self.places = Places()
        self._recent: dict[Key, float] = {}
        self._started_at = -math.inf  # loop time
        self.partners = Partners(store.database.path.with_name(store.database.path.name + ".partners"), runtime.disk)
        self.auditor = Auditor(
            store, self.partners, fetch=self._fetch, is_busy=self._is_busy, interval_ms=audit_ms, random=self.random
        )
        self._open = False
        transport.on_connection(self._connection_changed)

    def __repr__(self) -> str:
        commands = sum(map(len, self._commands.values()))
        return f"Remote({self._authority}, authorities={len(self._commands)}, commands={commands}, {self.auditor!r})"

    async def start(self) -> None:
        """Listen, then go on with what was not answered before the restart."""
        self._open = True
        self._started_at = asyncio.get_running_loop().time()
        await self.partners.load()
        await self._services.open()
        last = await self.store.read(lambda reader: reader.outbox_last())
        links = await self.store.read(lambda reader: reader.links())
        for topic, link in links:
            self.update(topic, link, last)
        if self.partners.all() or any(link.command is None for _, link in links):
            self.auditor.now()
        self.auditor.start()

    async def stop(self) -> None:
        """What was not answered goes on after the restart."""
        self._open = False
        await self.auditor.stop()
        for commands in list(self._commands.values()):
            await commands.stop()
        await self._services.close()
        await self.partners.close()

    def commands_to(self, authority: str) -> int:
        """How many are not answered."""
        return len(self._commands.get(authority, ()))

    def update(self, topic: Key, link: Link, after: int) -> None:
        """`link` of `topic` is as given; its command, if any, leaves once the changes up to `after` were told."""
        if not self._open:
            return
        commands = self._commands.get(topic[0])
        if commands is None:
            if link.command is None:
                return
            commands = self._commands[topic[0]] = Commands(self, topic[0])
        if link.command is Command.UNSUBSCRIBE:
            self._recent.pop(topic, None)
            self._recent[topic] = asyncio.get_running_loop().time()
            if len(self._recent) > RECENT_MAX:
                del self._recent[next(iter(self._recent))]
        commands.update(topic, link, after)

    def forget_all(self) -> None:
        """After a Reset no command is due any more; what others still have of ours is found by asking all of them."""
        for commands in self._commands.values():
            commands.clear()
        self.auditor.now()

    # -- for the commands ----------------------------------------------------------------------------------------------

    def idle(self, commands: Commands) -> None:
        """`commands` has nothing left to do."""
        if self._commands.get(commands.authority) is commands:
            del self._commands[commands.authority]

    def _is_busy(self, topic: Key) -> bool:
        return topic[0] in self._commands and self._commands[topic[0]].is_busy(topic)

    # -- the calls -----------------------------------------------------------------------------------------------------

    async def call(self, topic: Key, link: Link) -> Status:
        """One try. Raises UStatusError."""
        authority, major, codec = topic[0], link.major, CODECS[link.major]
        topic_uri, own = to_uri(topic), self._locals[major].get_source()
        if link.command is Command.UNSUBSCRIBE:
            request = codec.unsubscribe(topic_uri, own)
            await self._services.call(authority, major, UNSUBSCRIBE, request, self._timeout_ms)
            return Status.UNSUBSCRIBED
        # without expiry; older services read who subscribes (C-11)
        request = codec.subscribe(topic_uri, None, link.sample_period_ms, own)
        return codec.read_status(await self._services.call(authority, major, SUBSCRIBE, request, self._timeout_ms))

    # -- what the others say -------------------------------------------------------------------------------------------

    def _on_change(self, major: int, source: str, told: Subscription) -> None:
        topic = uris.key(told.topic)
        if topic[0] != source or uris.key(told.subscriber)[:3] != (self._authority, ENTITY_TYPE, major):
            return  # not about us, or not theirs to say
        commands = self._commands.get(source)
        if commands is not None:
            commands.retry_now()  # it is there
            if told.status is Status.SUBSCRIBED and commands.told_too(topic):
                return  # as most services do after each answer
        elif told.status is not Status.UNSUBSCRIBED and (source, major) not in self.partners:
            self.auditor.stranger((source, major))  # it has what we know nothing of: our store was lost
        # about an earlier Unsubscribe of ours, or about what came after it? Ask.
        if told.status is Status.UNSUBSCRIBED:
            # what was recent before the start is forgotten
            since = max(self._recent.get(topic, -math.inf), self._started_at)
            if asyncio.get_running_loop().time() - since < RECENT_MS / 1000:
                self.auditor.suspect(topic)
                return
            self._recent.pop(topic, None)
        self.auditor.submit(Notified(topic, told.status))

    def _connection_changed(self, connected: bool) -> None:
        if connected and self._open:
            for commands in list(self._commands.values()):
                commands.retry_now(connected=True)
            self.auditor.now()

    async def _fetch(self, authority: str, major: int, most: int) -> dict[Key, Status]:
        """What that service has of ours. Raises UStatusError; DATA_LOSS for what can't be read, or is more than `most`:
        it says nothing about a subscription, so it ends none."""
        found: dict[Key, Status] = {}
        own = self._locals[major].get_source()
        async for page in self._services.listed(authority, major, None, own, AUDIT_CALL_MS):
            if len(found) > most:
                what = f"the uSubscription of {authority} claims to have more than {most} subscriptions of ours"
                raise UStatusError(UCode.DATA_LOSS, what)
            found |= {uris.key(one.topic): one.status for one in page}
        return found


@dataclass(slots=True, eq=False)
class _Command:
    """The last word on one topic."""

    link: Link
    after: int  # changes up to this number are told first
    news: asyncio.Event = field(default_factory=asyncio.Event)  # replaced, or to be said again now
    again: bool = False
    repeats: int = 0
    told: bool = False  # a notification says SUBSCRIBED, which counts where the answer has said PENDING


class Commands(CommandQueue[Key, _Command]):
    """Those to the service of one authority, until each is answered. `update` gives it every link that changes.

    Topics don't wait for each other, so a lost request holds its own topic only. The window grows with the answers: a
    service that is not there gets few calls, one that answers some hundreds at once.
    """

    def __init__(self, remote: Remote, authority: str) -> None:
        super().__init__(self._see_answered, WINDOW_FIRST, idle=lambda: remote.idle(self))
        self._remote, self.authority = remote, authority
        self._loop = asyncio.get_running_loop()
        self._answered_at = self._retried_at = self._loop.time()
        self._departure = asyncio.Lock()  # commands pass in the order in which they began to run

    def __repr__(self) -> str:
        return f"Commands({self.authority}, {super().__repr__()})"

    def update(self, topic: Key, link: Link, after: int) -> None:
        """`link` of `topic` is as given; its command, if any, leaves once the changes up to `after` were told."""
        known = self.get(topic)
        if link.command is None:
            self.drop(topic)
        else:
            if known is not None and known.link.generation == link.generation:
                after = known.after
            delay_ms = retry_delay_ms(link.attempt, self._remote.random()) if link.attempt else 0
            self.put(topic, _Command(link, after), delay_ms)
        if known is not None:
            known.news.set()

    def told_too(self, topic: Key) -> bool:
        """Its service says that `topic` is SUBSCRIBED. True if that is for the command about it to heed."""
        command = self.get(topic)
        if command is not None:
            command.told = True
        return command is not None

    def clear(self) -> None:
        """No command is due any more."""
        under_way = self.under_way()
        super().clear()
        for command in under_way:
            command.news.set()

    def retry_now(self, *, connected: bool = False) -> None:
        """The other service may be there again: don't wait. `connected`: what is under way may have been lost."""
        now = self._loop.time()
        if not connected and now - self._retried_at < RETRY_NOW_MS / 1000:
            return
        self._retried_at = now
        for command in self.under_way():
            if connected or command.repeats > 1:
                command.again = True
                command.news.set()
        self.hurry()

    async def _see_answered(self, topic: Key, command: _Command) -> int:
        """The outcome comes back through `update`, which replaces the command; if it does not, it runs again."""
        try:
            async with self._departure:
                if command.link.command is Command.SUBSCRIBE:
                    await self._remote.partners.remember((topic[0], command.link.major))
                # a dispatcher that is notified of SUBSCRIBE_PENDING prepares to forward: this comes before the command
                await self._remote.notifier.notified(command.after)
            place = await self._remote.places.take()
            try:
                event = await self._answer(topic, command) if self.is_current(topic, command) else None
            finally:
                place.give_back()
            if event is not None:
                await self._remote.store.submit(event)
            if command.told and isinstance(event, Answered) and event.status is Status.SUBSCRIBE_PENDING:
                await self._remote.store.submit(Notified(topic, Status.SUBSCRIBED))
        except UStatusError as error:
            log.warning("the answer of a remote uSubscription could not be stored: asking again", why=error.message)
        except Exception:
            log.exception("a command to a remote uSubscription failed: asking again", authority=self.authority)
        return STORE_RETRY_MS

    async def _answer(self, topic: Key, command: _Command) -> Event | None:
        """What the other service made of the command; None if a later command replaced it and no answer came in
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
                    self.window = 1  # nobody answers at all
        finally:
            await end(*calls)

    def _call(self, topic: Key, command: _Command) -> asyncio.Task[Status]:
        is_first = command.repeats == 1  # that has its place already
        call = asyncio.ensure_future(
            self._remote.call(topic, command.link) if is_first else self._repeat(topic, command)
        )
        call.add_done_callback(lambda _: command.news.set())
        return call

    async def _repeat(self, topic: Key, command: _Command) -> Status:
        place = await self._remote.places.take()
        try:
            return await self._remote.call(topic, command.link)
        finally:
            place.give_back()

    async def _wait(self, topic: Key, command: _Command, calls: list[asyncio.Task[Status]], wait_ms: int) -> None:
        """Until a call is done, it is time to repeat, somebody asks for it, or the command is replaced."""
        was_current = self.is_current(topic, command)
        command.again = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_ms / 1000):
                while not (
                    command.again
                    or (was_current and not self.is_current(topic, command))
                    or any(call.done() for call in calls)
                ):
                    command.news.clear()
                    await command.news.wait()

    def _event(self, topic: Key, link: Link, call: asyncio.Task[Status]) -> Event:
        """Only a "no" for good ends a subscription; whatever else comes back is a shortage, and waited out."""
        try:
            status = call.result()
        except UStatusError as error:
            if error.code not in FINAL:
                return TimedOut(topic, link.generation)
            log.info("a remote uSubscription refused", topic=uris.format(to_uri(topic)), why=str(error))
            status = Status.UNSUBSCRIBED
        except Exception:
            log.exception("asking a remote uSubscription failed", topic=uris.format(to_uri(topic)))
            return TimedOut(topic, link.generation)
        self._answered_at = self._remote.places.answered_at = self._loop.time()
        self.window = min(self.window + 1, WINDOW_MAX)
        return Answered(topic, link.generation, status)
