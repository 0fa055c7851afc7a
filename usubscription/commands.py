"""The commands to the uSubscription service of one other authority, until each is answered.

update(topic, link) -> CommandQueue -> Subscribe, Unsubscribe -> Answered | TimedOut -> store
                         ^    | replaced while under way: waited for a little while, so that the two can't overtake
                         |    | no answer: said again, with back-off
                         '--- update() again

Topics don't wait for each other, so a lost request holds its own topic only. The window grows with the answers: a
service that is not there gets few calls, one that answers some hundreds at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import structlog

from uprotocol import uri as uris
from uprotocol.core.usubscription.asking import CommandQueue
from uprotocol.core.usubscription.wire import to_uri
from uprotocol.pacing import Backoff
from uprotocol.status import FINAL, UStatusError
from usubscription.state import Answered, Event, Key, Link, Status, TimedOut, retry_delay_ms

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


class Owner(Protocol):
    """What the commands need of usubscription.remote.Remote."""

    repeat_first_ms: int
    random: Callable[[], float]

    async def prepare(self, topic: Key, link: Link, after: int) -> None:
        """Completes when a command may leave: what it changes was told up to `after`, and its service is remembered."""

    async def call(self, topic: Key, link: Link) -> Status:
        """One try. Raises UStatusError."""
        ...

    async def store_event(self, event: Event) -> None:
        """Raises UStatusError."""

    def idle(self, commands: Commands) -> None: ...


@dataclass(slots=True, eq=False)
class _Command:
    """The last word on one topic."""

    link: Link
    after: int  # changes up to this number are told first
    news: asyncio.Event = field(default_factory=asyncio.Event)  # replaced, or to be said again now
    again: bool = False
    repeats: int = 0


class Commands:
    """Lives on the loop. `update` gives it every link that changes."""

    def __init__(self, owner: Owner, authority: str) -> None:
        self._owner, self.authority = owner, authority
        self._loop = asyncio.get_running_loop()
        self._queue = CommandQueue(self._run, WINDOW_FIRST, lambda: owner.idle(self))
        self._answered_at = self._retried_at = self._loop.time()

    def __repr__(self) -> str:
        return f"Commands({self.authority}, {self._queue!r})"

    def __len__(self) -> int:
        return len(self._queue)

    def is_busy(self, topic: Key) -> bool:
        """True while a command about `topic` waits or may be under way."""
        return self._queue.is_busy(topic)

    def update(self, topic: Key, link: Link, after: int) -> None:
        """`link` of `topic` is as given; its command, if any, leaves once the changes up to `after` were told."""
        known = self._queue.get(topic)
        if link.command is None:
            self._queue.drop(topic)
        else:
            if known is not None and known.link.generation == link.generation:
                after = known.after
            delay_ms = retry_delay_ms(link.attempt, self._owner.random()) if link.attempt else 0
            self._queue.put(topic, _Command(link, after), delay_ms)
        if known is not None:
            known.news.set()

    def clear(self) -> None:
        """No command is due any more."""
        under_way = self._queue.under_way()
        self._queue.clear()
        for command in under_way:
            command.news.set()

    def retry_now(self, *, connected: bool = False) -> None:
        """The other service may be there again: don't wait. `connected`: what is under way may have been lost."""
        now = self._loop.time()
        if not connected and now - self._retried_at < RETRY_NOW_MS / 1000:
            return
        self._retried_at = now
        for command in self._queue.under_way():
            if connected or command.repeats > 1:
                command.again = True
                command.news.set()
        self._queue.hurry()

    async def stop(self) -> None:
        """What was not answered goes on after the restart."""
        await self._queue.stop()

    async def _run(self, topic: Key, command: _Command) -> int:
        """The outcome comes back through `update`, which replaces the command; if it does not, it runs again."""
        try:
            await self._owner.prepare(topic, command.link, command.after)
            event = await self._answer(topic, command) if self._queue.is_current(topic, command) else None
            if event is not None:
                await self._owner.store_event(event)
        except UStatusError as error:
            log.warning("the answer of a remote uSubscription could not be stored: asking again", why=error.message)
        except Exception:
            log.exception("a command to a remote uSubscription failed: asking again", authority=self.authority)
        return STORE_RETRY_MS

    async def _answer(self, topic: Key, command: _Command) -> Event | None:
        """What the other service made of the command; None if a later command replaced it and no answer came in
        time."""
        calls: list[asyncio.Future[Status]] = []
        backoff = Backoff(self._owner.repeat_first_ms, REPEAT_MAX_MS)
        command.repeats = 0
        try:
            while True:
                current, wait_ms = self._queue.is_current(topic, command), SUPERSEDED_GRACE_MS
                if current:
                    wait_ms = backoff.next_ms()
                    command.repeats += 1
                    calls.append(asyncio.ensure_future(self._owner.call(topic, command.link)))
                    if len(calls) > CALLS_KEPT_MAX:
                        calls.pop(1).cancel()
                await self._wait(topic, command, calls, wait_ms)
                done = next((call for call in calls if call.done()), None)
                if done is not None:
                    return self._event(topic, command.link, done)
                if not current:
                    return None
                if self._loop.time() - self._answered_at > wait_ms / 1000:
                    self._queue.window = 1  # nobody answers at all
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _wait(self, topic: Key, command: _Command, calls: list[asyncio.Future[Status]], wait_ms: int) -> None:
        """Until a call is done, it is time to repeat, somebody asks for it, or the command is replaced."""
        end = self._loop.time() + wait_ms / 1000
        was_current = self._queue.is_current(topic, command)
        command.again = False
        while (left_s := end - self._loop.time()) > 0:
            command.news.clear()
            news = asyncio.ensure_future(command.news.wait())
            waiters: set[asyncio.Future[Any]] = {*calls, news}
            try:
                await asyncio.wait(waiters, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
            replaced = was_current and not self._queue.is_current(topic, command)
            if command.again or replaced or any(call.done() for call in calls):
                return

    def _event(self, topic: Key, link: Link, call: asyncio.Future[Status]) -> Event:
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
        self._answered_at = self._loop.time()
        self._queue.window = min(self._queue.window + 1, WINDOW_MAX)
        return Answered(topic, link.generation, status)
