"""The event loop: nothing blocks it, listeners and callbacks run on it, and `close` leaves no thread and no task.

A Heartbeat measures several rounds, one of which must be quiet: a slow machine is slow by chance, a plugin that blocks
does so each time.

loop:   beat, beat, beat ............ beat      longest gap, and ...
thread:            late? -> the loop's stack    ... its stack: waiting for events means a slow machine,
                                                               anything else is a call that blocks
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from transports.conformance.base import Ends, Pair, TransportHarness
from transports.conformance.messages import ALPHA, BETA, notification, reply, topic
from transports.conformance.sinks import BatchSink, Changes, Sink
from uprotocol.transport import Capability, UTransport

BEAT_S: Final = 0.001
STACK_LINES_MAX: Final = 6  # the innermost ones: the blocking call and its callers
_WAITING: Final = ("selectors.py", "select", "proactor")  # files of an idle loop


class Heartbeat:
    """`async with Heartbeat(0.1) as heart: ...` and then `heart.blocked_s` and `heart.where`."""

    def __init__(self, bound_s: float) -> None:
        self.blocked_s = 0.0  # the longest time that the loop was late, except while it waited for events
        self.where = ""  # the stack of its thread meanwhile; "" if the call also held the GIL
        self._bound_s = bound_s
        self._at = 0.0
        self._stack: str | None = None
        self._idle = False
        self._ended = threading.Event()

    async def __aenter__(self) -> Self:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._at = time.monotonic()
        self._beating = self._loop.call_later(BEAT_S, self._beat)
        self._watcher = threading.Thread(target=self._watch, name="conformance-heartbeat", daemon=True)
        self._watcher.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(BEAT_S)  # one more beat, for the last blocking call
        self._beat()
        self._beating.cancel()
        self._ended.set()
        self._watcher.join()

    def _beat(self) -> None:
        now = time.monotonic()
        late_s = now - self._at - BEAT_S
        if late_s > self.blocked_s and not self._idle:
            self.blocked_s, self.where = late_s, self._stack or ""
        self._stack, self._idle = None, False
        self._at = now
        self._beating.cancel()
        self._beating = self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        while not self._ended.wait(BEAT_S):
            if self._stack is None and time.monotonic() - self._at > self._bound_s:
                frame = sys._current_frames().get(self._thread)
                file = Path(frame.f_code.co_filename).name if frame is not None else ""
                self._idle = any(word in file for word in _WAITING)
                self._stack = "" if frame is None else "".join(traceback.format_stack(frame)[-STACK_LINES_MAX:])


@dataclass(frozen=True)
class Alive:
    """The present threads and tasks, without threads of the loop's own executor and those that Python did not start."""

    threads: frozenset[threading.Thread]
    tasks: frozenset[asyncio.Task[Any]]

    @classmethod
    def now(cls) -> Alive:
        threads = [one for one in threading.enumerate() if not one.name.startswith(("asyncio_", "Dummy-"))]
        return cls(frozenset(threads), frozenset(asyncio.all_tasks()))

    def more(self, before: Alive, count: int) -> dict[str, int]:
        """Kinds with at least `count` more than before: threads by name, without numbers, and tasks by coroutine."""
        grown = Counter(self._kinds())
        grown.subtract(before._kinds())
        return {kind: number for kind, number in grown.items() if number >= count}

    def _kinds(self) -> Iterator[str]:
        for thread in self.threads:
            yield "thread " + re.sub(r"\d+", "", thread.name)
        for task in self.tasks:
            yield "task " + getattr(task.get_coro(), "__qualname__", "?")

    def since(self, before: Alive) -> list[str]:
        """New threads and tasks, by repr."""
        return [repr(one) for one in [*(self.threads - before.threads), *(self.tasks - before.tasks)]]


Round = Callable[[], Awaitable[Heartbeat]]

# enough to read a certificate or start threads; a blocking wait for a network takes longer
OPENING_S_MAX: Final = 0.15
# one small message costs some 0.1 ms; a blocking round trip or a flush to disk takes longer
BATCH_S_MAX: Final = 0.010
LARGE_S_MAX: Final = 0.05  # half a MiB is copied in 0.1 ms, and serialised in 1 ms
AWAY_S_MAX: Final = 0.5  # without a network, a blocking name lookup or connect takes seconds
AWAY_S: Final = 0.3  # time for some attempts to connect
ROUNDS: Final = 5
BATCH_ROUNDS: Final = 30
LARGE_ROUNDS: Final = 10
AWAY_ROUNDS: Final = 2
RESTING_S: Final = 0.1
RESTING_SHARE_MAX: Final = 0.2  # of one processor, for the whole process; polling takes all of one
RECONNECTS: Final = 2  # a transport may wait longer before each
LIFETIMES: Final = 3  # distinguishes leaks from what a library makes once


class LoopConformance(TransportHarness):
    async def stays_quiet(self, what: str, rounds: int, bound_s: float, play: Round) -> None:
        """Fails if the loop is blocked for longer than `bound_s` in each of `rounds`."""
        hearts: list[Heartbeat] = []
        for _ in range(rounds):
            hearts.append(await play())
            if hearts[-1].blocked_s <= bound_s:
                return
        best = min(hearts, key=lambda heart: heart.blocked_s)
        where = best.where or "a call that kept all other threads from running"
        raise AssertionError(
            f"{what} blocked the event loop for {best.blocked_s:.3f} s or more in each of {rounds} rounds; "
            f"at most {bound_s} s are allowed; it was in\n{where}"
        )

    async def test_open_does_not_block_the_loop(self, ends: Ends, pair: Pair) -> None:
        await pair[1].close()
        await self.stays_quiet("open", ROUNDS, OPENING_S_MAX, lambda: self._watched_lifetime(ends, 0))

    async def test_close_does_not_block_the_loop(self, ends: Ends, pair: Pair) -> None:
        await pair[1].close()
        await self.stays_quiet("close", ROUNDS, OPENING_S_MAX, lambda: self._watched_lifetime(ends, 1))

    async def _watched_lifetime(self, ends: Ends, which: int) -> Heartbeat:
        """The Heartbeat of `open` (which=0) or `close` (1)."""
        end = await ends(BETA)
        hearts = Heartbeat(OPENING_S_MAX), Heartbeat(OPENING_S_MAX)
        for heart, call in zip(hearts, (end.open, end.close), strict=True):
            async with heart:
                await call()
        return hearts[which]

    async def test_an_open_in_vain_does_not_block_the_loop(self, ends: Ends) -> None:
        end = ends.keep(await self.make_unreachable(ALPHA))

        async def play() -> Heartbeat:
            async with Heartbeat(OPENING_S_MAX) as heart:
                await self.refusal_of(end.open())
            return heart

        await self.stays_quiet("an open in vain", ROUNDS, OPENING_S_MAX, play)

    async def test_a_batch_does_not_block_the_loop(self, pair: Pair) -> None:
        """Neither at its sender nor at its receiver."""
        heard = await self.listen(pair, topic(), reply())

        async def play() -> Heartbeat:
            async with Heartbeat(BATCH_S_MAX) as heart:
                await self.send_all(pair[0], [notification(b"one")])
                await heard.expect(1)
            heard.messages.clear()
            return heart

        await self.stays_quiet("a batch of one message", BATCH_ROUNDS, BATCH_S_MAX, play)

    async def test_a_large_payload_does_not_block_the_loop(self, pair: Pair) -> None:
        """Neither at its sender nor at its receiver: long work with many octets belongs on a thread."""
        heard = await self.listen(pair, topic(), reply())
        size = self.payload_bytes_max // 2

        async def play() -> Heartbeat:
            message = notification(bytes(size))
            async with Heartbeat(LARGE_S_MAX) as heart:
                await self.send_all(pair[0], [message])
                await heard.expect(1)
            heard.messages.clear()
            return heart

        await self.stays_quiet(f"a payload of {size} bytes", LARGE_ROUNDS, LARGE_S_MAX, play)

    async def test_a_network_that_is_away_does_not_block_the_loop(self, pair: Pair) -> None:
        async def play() -> Heartbeat:
            async with Heartbeat(AWAY_S_MAX) as heart, self.away(pair[1]):
                await pair[1].send_batch([notification()])
                await asyncio.sleep(AWAY_S)
            return heart

        await self.stays_quiet("a network that is away", AWAY_ROUNDS, AWAY_S_MAX, play)

    async def test_waiting_costs_no_processor(self, pair: Pair) -> None:
        """No thread may poll."""
        await self.rests("two ends that have nothing to do")

    async def test_a_network_that_is_away_costs_no_processor(self, pair: Pair) -> None:
        async with self.away(pair[1]):
            await self.rests("an end whose network is away")

    async def rests(self, who: str) -> None:
        shares = []
        for _ in range(ROUNDS):
            began, used_s = time.monotonic(), time.process_time()
            await asyncio.sleep(RESTING_S)
            shares.append((time.process_time() - used_s) / (time.monotonic() - began))
            if shares[-1] <= RESTING_SHARE_MAX:
                return
        raise AssertionError(
            f"{who} took {min(shares):.0%} of a processor, at most {RESTING_SHARE_MAX:.0%} are allowed"
        )

    async def test_listeners_and_callbacks_run_on_the_loop(self, ends: Ends, pair: Pair) -> None:
        """Every other test checks the thread of its listeners, too."""
        self.needs(Capability.PUSH)
        await pair[1].close()
        end = await ends(BETA)
        here, on_loop = threading.get_ident(), []
        end.on_connection(lambda _: on_loop.append(threading.get_ident() == here))
        changes = Changes(end)
        await end.open()
        await changes.until(True, self.deadline_s)
        heard = await self.listen((pair[0], end), topic(), reply(), BatchSink(self.deadline_s))
        await self.send_all(pair[0], self.traffic(10))
        await heard.expect(10)
        await end.close()
        await changes.until(False, self.deadline_s)
        assert all(on_loop), "connection callbacks run on the event loop's thread only"

    async def test_close_leaves_no_thread_and_no_task(self, ends: Ends, pair: Pair) -> None:
        await pair[1].close()
        await self.leaves_nothing("close", lambda: self._lifetime(ends, pair[0]))

    async def _lifetime(self, ends: Ends, other: UTransport) -> None:
        """Open, send in both directions, and close with a registered listener."""
        end = await ends(BETA)
        await end.open()
        if Capability.PUSH in self.capabilities:
            heard = await self.listen((other, end), topic(), reply())
            await self.send_all(other, [notification(b"there")])
            await heard.expect(1)
        await self.send_all(end, [notification(b"back", topic(BETA), reply(ALPHA))])
        await end.close()

    async def test_a_reconnect_leaves_no_thread_and_no_task(self, pair: Pair) -> None:
        """Each connection has its own. So no kind may grow by one at each reconnect."""
        self.needs_hook("break_network")
        if Capability.PUSH in self.capabilities:
            await self.listen(pair, topic(), reply())
        for round in range(RECONNECTS + 1):
            async with self.away(pair[1]):
                pass
            if not round:
                before = Alive.now()
        with contextlib.suppress(AssertionError):
            await self.eventually(lambda: not Alive.now().more(before, RECONNECTS), "")
        more = Alive.now().more(before, RECONNECTS)
        assert not more, f"after {RECONNECTS} reconnects there are more threads or tasks: {more}"

    async def test_an_open_in_vain_leaves_no_thread_and_no_task(self, ends: Ends) -> None:
        """Even without a call of `close`."""
        end = ends.keep(await self.make_unreachable(ALPHA))
        await self.leaves_nothing("an open that failed", lambda: self.refusal_of(end.open()))

    async def leaves_nothing(self, what: str, live: Callable[[], Awaitable[object]]) -> None:
        """Fails if threads or tasks stay; some need a moment to end."""
        await live()
        before = Alive.now()
        for _ in range(LIFETIMES):
            await live()
        with contextlib.suppress(AssertionError):
            await self.eventually(lambda: not Alive.now().since(before), "")
        left = Alive.now().since(before)
        assert not left, f"after {what} these are left: {', '.join(left)}"

    async def test_open_twice_is_open_once(self, pair: Pair) -> None:
        self.needs(Capability.PUSH)
        changes = Changes(pair[1])
        await pair[1].open()
        heard = await self.listen(pair, topic(), reply())
        await self.send_all(pair[0], self.traffic(3))
        assert await self.settle(pair[0], heard) == [b"0", b"1", b"2"]
        assert changes.seen == [], "a second open changes nothing"
        await pair[1].close()
        assert not pair[1].connected
        await pair[0].send_batch([notification(b"after close")])
        await asyncio.sleep(self.settle_s)
        assert b"after close" not in heard.payloads
        assert changes.seen == [False]

    async def test_open_at_once_is_open_once(self, ends: Ends, pair: Pair) -> None:
        """Two owners that do not know about each other."""
        self.needs(Capability.PUSH)
        await pair[1].close()
        end = await ends(BETA)
        changes = Changes(end)
        await asyncio.gather(end.open(), end.open())
        await changes.until(True, self.deadline_s)
        heard = await self.listen((pair[0], end), topic(), reply(), Sink(self.deadline_s))
        await self.send_all(pair[0], self.traffic(3))
        assert await self.settle(pair[0], heard) == [b"0", b"1", b"2"]
        await end.close()
        assert changes.seen == [True, False]
