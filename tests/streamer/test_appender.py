"""Order within a topic when the disk of the log fails: a real log, appenders and queues of networks on virtual time.

The disk fails during a commit; the loop learns of it some milliseconds later, and the appender one turn of the loop
after that. These tests are about messages that arrive in between."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import pytest

from campaigns.simulation.disk import DiskFaults, SimulatedDisk
from campaigns.simulation.loop import SimulatedWorker, VirtualLoop
from history.log import log as log_module
from history.log.log import Log
from storage.runtime import Runtime
from streamer.walk.flow import Appender, Flow
from streamer.walk.ingress import IdWindow
from tests.history.world import virtually
from transports.arrivals import Arrivals
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder, UPayload

TOPIC: Final = uris.parse("//vehicle1/8001/1/8001")
DISK_FULL: Final = DiskFaults(full=1.0)
SECONDS: Final = 60.0  # of virtual time: long enough for everything that ends


def message(number: int) -> EncodedMessage:
    payload = UPayload(str(number).encode(), 5)
    return EncodedMessage.of(UMessageBuilder.publish(TOPIC).build_from_upayload(payload))


class Gateway:
    """One log on a disk that can fail, and the flow of what enters it."""

    def __init__(self, folder: Path, failures: int, on_fault: Callable[[], None] = lambda: None) -> None:
        """The disk fails so many times, from the first transaction on. `on_fault` is called while it does."""
        self._left, self._on_fault = failures, on_fault
        self._folder = folder
        self.disk = SimulatedDisk(random.Random(1), self._failed)
        self.flow = Flow()

    def _failed(self, _what: str) -> None:
        self._left -= 1
        if not self._left:
            self.disk.faults = DiskFaults()
        self._on_fault()

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        runtime = Runtime(disk=self.disk, worker=SimulatedWorker, monotonic=loop.time)  # type: ignore[arg-type]
        self.log = await Log.open(self._folder / "history.db", name="order", runtime=runtime)
        self.stream = self.log.stream_id(TOPIC)
        await self.log.saved()  # the topic: from here on only records are written
        self.disk.faults = DISK_FULL if self._left else DiskFaults()

    def when_heard(self, call: Callable[[], object]) -> None:
        """`call` in the turn of the loop in which it becomes known that a transaction has failed, and once only: ahead
        of the callbacks of the futures that fail with it."""
        failed = self.log._failed

        def heard(*arguments: Any) -> None:
            self.log._failed = failed  # type: ignore[method-assign]
            asyncio.get_running_loop().call_soon(call)
            failed(*arguments)

        self.log._failed = heard  # type: ignore[method-assign]

    def append(self, appender: Appender, batch: list[EncodedMessage]) -> asyncio.Future[int]:
        return self.flow.append(len(batch), functools.partial(appender.offer, [self.stream] * len(batch), batch))

    async def numbers(self) -> list[int]:
        """The contents of the log."""
        found: list[int] = []
        after = 0
        while chunks := await self.log.read(after):
            after = chunks[-1].last_seq
            found += [int(message.payload) for chunk in chunks for message in chunk.messages]
        return found


class Network:
    """Delivers numbered messages again until they were taken; drops copies, as an ingress does."""

    def __init__(self, gateway: Gateway, refused_max: int = 1 << 62) -> None:
        """After `refused_max` refusals it gives up, so that a test ends."""
        self._gateway, self._refused_max = gateway, refused_max
        self.appender = Appender(gateway.log, self._not_taken, holds=False, redelivers=True)
        self.arrivals: Arrivals[EncodedMessage] = Arrivals(self._deliver, redeliver=True, gathers=False)
        self.arrivals.open()
        self._window = IdWindow()
        self._in_flight: set[asyncio.Future[int]] = set()
        self.refused = 0  # messages

    def bring(self, *numbers: int) -> None:
        self.arrivals.put_now([message(number) for number in numbers])

    def bring_at_once(self, *numbers: int) -> None:
        """In this turn of the loop, as if they had been in the queue."""
        self.bring(*numbers)
        self.arrivals._drain()

    def _not_taken(self, batch: Any) -> None:
        self.refused += len(batch)
        for one in batch:
            self._window.forget(one.id_bytes)

    def _deliver(self, batch: list[EncodedMessage]) -> Coroutine[Any, Any, None] | None:
        if self.refused > self._refused_max:
            return None
        new = [one for one in batch if self._window.take(one.id_bytes)]
        if new:
            future = self._gateway.append(self.appender, new)
            self._in_flight.add(future)
            future.add_done_callback(self._in_flight.discard)
        return self._taken(set(self._in_flight) if len(new) < len(batch) else {future})

    async def _taken(self, pending: set[asyncio.Future[int]]) -> None:
        for error in await asyncio.gather(*pending, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error

    async def settle(self) -> None:
        async with asyncio.timeout(SECONDS):
            await self.arrivals.drained()


class Holding:
    """A network that can't deliver again: the appender holds what the log refuses."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.appender = Appender(gateway.log, self._not_taken, holds=True)
        self._answers: list[asyncio.Future[int]] = []

    def bring(self, *numbers: int) -> None:
        batch = [message(number) for number in numbers]
        self._answers.append(self._gateway.append(self.appender, batch))

    bring_at_once = bring

    def _not_taken(self, batch: Any) -> None:
        raise AssertionError("the disk is full for a moment only")

    async def settle(self) -> None:
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*self._answers)


both = pytest.mark.parametrize("network", [Network, Holding])


@pytest.mark.spec("local~disp-order")
@both
def test_what_arrives_as_a_failure_is_heard_stays_behind_what_failed(tmp_path: Path, network: Any) -> None:
    async def run() -> None:
        gateway = Gateway(tmp_path, failures=1)
        await gateway.open()
        here = network(gateway)
        gateway.when_heard(functools.partial(here.bring_at_once, 4, 5))
        here.bring(1, 2, 3)
        await asyncio.sleep(0)
        await asyncio.sleep(1.0)
        await here.settle()
        assert await gateway.numbers() == [1, 2, 3, 4, 5]
        await gateway.log.close()

    virtually(run())


@pytest.mark.spec("local~disp-order")
@both
@pytest.mark.parametrize("when", ["heard", "a turn later"])
def test_what_another_network_has_under_way_is_not_overtaken(tmp_path: Path, network: Any, when: str) -> None:
    """The transaction of one network fails; what another one has handed over meanwhile will be refused, too, and until
    then more of it comes."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        gateway = Gateway(tmp_path, failures=1, on_fault=lambda: loop.call_soon(other.bring, 1, 2))
        await gateway.open()
        first, other = Network(gateway), network(gateway)
        more = functools.partial(other.bring_at_once, 3, 4)
        gateway.when_heard(more if when == "heard" else lambda: loop.call_soon(more))
        first.bring(100)
        await asyncio.sleep(1.0)
        await first.settle()
        await other.settle()
        found = await gateway.numbers()
        assert [number for number in found if number < 100] == [1, 2, 3, 4]
        assert found.count(100) == 1
        await gateway.log.close()

    virtually(run())


@pytest.mark.spec("local~disp-order")
@both
def test_what_is_refused_at_once_is_not_overtaken(
    tmp_path: Path, network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the backlog is too large already, with a disk that is slow and not full."""
    monkeypatch.setattr(log_module, "APPEND_RECORDS_MAX", 4)

    async def run() -> None:
        gateway = Gateway(tmp_path, failures=0)
        await gateway.open()
        here = network(gateway)
        for numbers in ((1, 2, 3), (4, 5), (6,), (7, 8)):  # the second one is too much, the third one is not
            here.bring_at_once(*numbers)
        await here.settle()
        assert await gateway.numbers() == [1, 2, 3, 4, 5, 6, 7, 8]
        await gateway.log.close()

    virtually(run())


@pytest.mark.parametrize("failures", range(1, 7))
def test_a_failing_disk_costs_few_refusals(tmp_path: Path, failures: int) -> None:
    """Part of the queue is handed over while the first transaction fails, so it is refused after the head of the queue
    has come again, and that fails once more."""
    count, first = 8_500, 5_000

    async def run() -> None:
        loop = asyncio.get_running_loop()
        more: list[Callable[[], None]] = []
        gateway = Gateway(tmp_path, failures, on_fault=lambda: more and loop.call_soon(more.pop()))
        await gateway.open()
        network = Network(gateway, refused_max=100 * count)
        more.append(functools.partial(network.bring, *range(first, count)))
        network.bring(*range(first))
        await network.settle()
        assert network.refused <= (failures + 1) * count
        assert await gateway.numbers() == list(range(count))
        await gateway.log.close()

    virtually(run())
