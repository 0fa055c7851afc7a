"""The commands to the uSubscription service of one other authority, until each is answered.

update(topic, link) -> waiting -> ready -> running, a window of topics -> Subscribe, Unsubscribe -> Answered | TimedOut -> store
                         | after a try that failed: a timer          |                                        '-> update() again
                         '-> replaced by a later command: it is only waited for a little while, so that the two can't overtake each other

One command of a topic is in flight, and the last one wins; topics don't wait for each other, so a lost request holds
its own topic only. The window grows with the answers: a service that is not there gets few calls, one that answers some
hundreds at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import structlog

from uprotocol import uri as uris
from uprotocol.status import FINAL, UStatusError
from usubscription.codec import to_uri
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
KICK_MS: Final = 1_000

log = structlog.get_logger()


class Owner(Protocol):
    """What a lane needs of usubscription.remote.Remote."""

    repeat_first_ms: int
    random: Callable[[], float]

    async def prepare(self, topic: Key, link: Link, after: int) -> None:
        """Completes when a command may leave: what it changes was told up to `after`, and its service is remembered."""

    async def call(self, topic: Key, link: Link) -> Status:
        """One try. Raises UStatusError."""
        ...

    async def store_event(self, event: Event) -> None:
        """Raises UStatusError."""

    def idle(self, lane: Lane) -> None: ...


@dataclass(slots=True, eq=False)
class _Due:
    """The command of one topic that was given last."""

    link: Link
    after: int  # changes up to this number are told first
    timer: asyncio.TimerHandle | None = None  # until it is due
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # replaced, or kicked
    kicked: bool = False
    repeats: int = 0


class Lane:
    """Lives on the loop. `update` gives it every link that changes."""

    def __init__(self, owner: Owner, authority: str) -> None:
        self._owner, self.authority = owner, authority
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Key, _Due] = {}
        self._ready: dict[Key, None] = {}  # due, and nothing of that topic is running; in the order in which they leave
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._window = WINDOW_FIRST
        self._answered_at = self._kicked_at = self._loop.time()

    def __repr__(self) -> str:
        return (
            f"Lane({self.authority}, waiting={len(self._waiting)}, running={len(self._running)}, window={self._window})"
        )

    def __len__(self) -> int:
        return len(self._waiting)

    def busy(self, topic: Key) -> bool:
        """True while a command about `topic` waits or may be under way."""
        return topic in self._waiting or topic in self._running

    def update(self, topic: Key, link: Link, after: int) -> None:
        """`link` of `topic` is as given; its command, if any, leaves once the changes up to `after` were told."""
        known = self._forget(topic)  # a new command goes to the end
        if link.command is not None:
            if known is not None and known.link.generation == link.generation:
                after = known.after
            self._waiting[topic] = _Due(link, after)
            self._at(topic, retry_delay_ms(link.attempt, self._owner.random()) if link.attempt else 0)
        self._go_on()

    def clear(self) -> None:
        """No command is due any more."""
        for topic in list(self._waiting):
            self._forget(topic)

    def kick(self, *, connected: bool = False) -> None:
        """The other service may be there again: don't wait. `connected`: what is under way may have been lost."""
        now = self._loop.time()
        if not connected and now - self._kicked_at < KICK_MS / 1000:
            return
        self._kicked_at = now
        for topic, due in list(self._waiting.items()):
            if due.timer is not None:
                self._at(topic, 0)
            elif topic in self._running and (connected or due.repeats > 1):
                due.kicked = True
                due.changed.set()
        self._go_on()

    async def stop(self) -> None:
        """What was not answered goes on after the restart."""
        self.clear()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- when
    # ------------------------------------------------------------------------------------------------------------------

    def _forget(self, topic: Key) -> _Due | None:
        due = self._waiting.pop(topic, None)
        self._ready.pop(topic, None)
        if due is not None:
            if due.timer is not None:
                due.timer.cancel()
            due.changed.set()
        return due

    def _at(self, topic: Key, delay_ms: int) -> None:
        due = self._waiting[topic]
        if due.timer is not None:
            due.timer.cancel()
            due.timer = None
        if delay_ms:
            due.timer = self._loop.call_later(delay_ms / 1000, self._come_due, topic, due)
        elif topic not in self._running:
            self._ready[topic] = None

    def _come_due(self, topic: Key, due: _Due) -> None:
        due.timer = None
        if topic not in self._running:
            self._ready[topic] = None
        self._go_on()

    def _go_on(self) -> None:
        while self._ready and len(self._running) < self._window:
            topic = next(iter(self._ready))
            del self._ready[topic]
            self._running[topic] = task = asyncio.ensure_future(self._command(topic, self._waiting[topic]))
            task.add_done_callback(lambda _, topic=topic: self._ended(topic))  # type: ignore[misc]
        if not self._waiting and not self._running:
            self._owner.idle(self)

    def _ended(self, topic: Key) -> None:
        del self._running[topic]
        due = self._waiting.get(topic)
        if due is not None and due.timer is None:
            self._ready[topic] = None
        self._go_on()

    # -- one command
    # ------------------------------------------------------------------------------------------------------------------

    async def _command(self, topic: Key, due: _Due) -> None:
        try:
            await self._owner.prepare(topic, due.link, due.after)
            event = await self._answer(topic, due) if self._waiting.get(topic) is due else None
            if event is not None:
                await self._owner.store_event(event)  # the outcome comes back through update()
        except UStatusError as error:
            log.warning("the answer of a remote uSubscription could not be stored: asking again", why=error.message)
        except Exception:
            log.exception("a command to a remote uSubscription failed: asking again", authority=self.authority)
        if self._waiting.get(topic) is due:
            self._at(topic, STORE_RETRY_MS)

    async def _answer(self, topic: Key, due: _Due) -> Event | None:
        """What the other service made of the command; None if a later command replaced it and no answer came in
        time."""
        calls: list[asyncio.Future[Status]] = []
        repeat_ms = self._owner.repeat_first_ms
        due.repeats = 0
        try:
            while True:
                current = self._waiting.get(topic) is due
                if current:
                    due.repeats += 1
                    calls.append(asyncio.ensure_future(self._owner.call(topic, due.link)))
                    if len(calls) > CALLS_KEPT_MAX:
                        calls.pop(1).cancel()
                await self._wait(topic, due, calls, repeat_ms if current else SUPERSEDED_GRACE_MS)
                done = next((call for call in calls if call.done()), None)
                if done is not None:
                    return self._event(topic, due.link, done)
                if not current:
                    return None
                if self._loop.time() - self._answered_at > repeat_ms / 1000:
                    self._window = 1  # nobody answers at all
                repeat_ms = min(repeat_ms * 2, REPEAT_MAX_MS)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _wait(self, topic: Key, due: _Due, calls: list[asyncio.Future[Status]], wait_ms: int) -> None:
        """Until a call is done, it is time to repeat, somebody kicks, or the command is replaced."""
        end = self._loop.time() + wait_ms / 1000
        was_current = self._waiting.get(topic) is due
        due.kicked = False
        while (left_s := end - self._loop.time()) > 0:
            due.changed.clear()
            news = asyncio.ensure_future(due.changed.wait())
            waiters: set[asyncio.Future[Any]] = {*calls, news}
            try:
                await asyncio.wait(waiters, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
            if (
                due.kicked
                or any(call.done() for call in calls)
                or (was_current and self._waiting.get(topic) is not due)
            ):
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
        self._window = min(self._window + 1, WINDOW_MAX)
        return Answered(topic, link.generation, status)
