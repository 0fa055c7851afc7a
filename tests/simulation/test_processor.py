"""Work that takes time in the simulation: what waits for it, what the gateway measures, and what the checker makes of a
flood and of a network that forgets."""

from __future__ import annotations

import asyncio
import contextvars
from types import SimpleNamespace
from typing import Any

import pytest

from campaigns.simulation.checker import NETWORK_LOST, OVER_QUOTA, Checker
from campaigns.simulation.loop import PROCESS, Process, VirtualLoop
from campaigns.simulation.network import Faults, FaultyNetwork
from campaigns.simulation.processor import Processor
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage

TOPIC = uris.parse("//vin1/8001/1/8001")


def message(text: str = "text") -> UMessage:
    return UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(text.encode(), 5))


@pytest.fixture
def loop() -> Any:
    made = VirtualLoop(1)
    yield made
    made.finish([])


def test_callbacks_of_a_busy_process_wait_in_order_and_others_do_not(loop: VirtualLoop) -> None:
    busy, other = Process("busy"), Process("other")
    busy.processor, other.processor = Processor(loop, 0.5), Processor(loop, 0.5)
    seen: list[tuple[float, str]] = []

    def note(text: str, messages: int = 0) -> None:
        seen.append((loop.now, text))
        if messages:
            process = PROCESS.get()
            assert process is not None
            assert process.processor is not None
            process.processor.work(messages)

    for process, at, text, messages in (
        (busy, 1.0, "work", 4),
        (busy, 1.5, "first", 2),
        (busy, 2.0, "second", 0),
        (other, 2.0, "other", 0),
        (busy, 9.0, "free", 0),
    ):
        context = contextvars.copy_context()
        context.run(PROCESS.set, process)
        loop.call_at(at, note, text, messages, context=context)
    loop.run_until_complete(asyncio.sleep(10))
    assert seen == [(1.0, "work"), (2.0, "other"), (3.0, "first"), (4.0, "second"), (9.0, "free")]
    assert busy.processor.used().busy_s == pytest.approx(3.0)
    assert other.processor.used().busy_s == 0.0


def test_what_is_not_worked_yet_is_not_used(loop: VirtualLoop) -> None:
    processor = Processor(loop, 0.1)
    processor.work(20)
    assert processor.used().busy_s == pytest.approx(0.0)
    loop.now = 1.5
    assert processor.used().busy_s == pytest.approx(1.5)
    assert processor.busy_s(1.0) == pytest.approx(1.0)
    loop.now = 6.0
    assert processor.used().busy_s == pytest.approx(2.0)
    assert processor.busy_s(5.0) == pytest.approx(1.0)


def test_callbacks_of_a_killed_process_do_not_run_when_its_thread_is_free(loop: VirtualLoop) -> None:
    process = Process("killed")
    process.processor = Processor(loop, 1.0)
    context = contextvars.copy_context()
    context.run(PROCESS.set, process)
    seen: list[str] = []
    process.processor.work(1)
    loop.call_at(0.5, seen.append, "late", context=context)
    loop.call_at(0.7, process.kill, context=contextvars.Context())
    loop.run_until_complete(asyncio.sleep(3))
    assert seen == []


async def test_a_network_forgets_what_one_member_has_sent_and_another_has_not_got() -> None:
    network = FaultyNetwork("forgets", Faults(delay_ms_max=50))
    members = [LocalTransport.on(network, LocalUriProvider(name, 0x8001, 1)) for name in ("vin1", "mcu1", "hub")]
    for member in members:
        await member.open()
    sender, other, hearer = members
    heard, lost = list[bytes](), list[tuple[str, int]]()
    sender.on_loss(lambda what, messages: lost.append((what, messages or 0)))
    await hearer.register_listener(uris.ANY, SimpleNamespace(on_receive=lambda one: heard.append(one.payload)))  # type: ignore[arg-type]
    late, kept = message("late"), message("kept")
    kept.attributes.source.authority_name = "mcu1"
    await sender.send_batch([late])
    await other.send_batch([kept])
    forgotten = network.forget(sender, lambda _: True)
    assert [one.payload for one in forgotten] == [b"late"]
    sender.report_loss("it has forgotten", len(forgotten))
    assert lost == [("it has forgotten", 1)]
    async with asyncio.timeout(20):
        while network.has_late:  # noqa: ASYNC110 - the network has no event for it
            await asyncio.sleep(0.01)
    await hearer.close()
    assert heard == [b"kept"]
    for member in (sender, other):
        await member.close()


@pytest.fixture
def checker() -> Checker:
    hops = (("V", "mcu", "cloud"),)
    world = SimpleNamespace(
        loop=SimpleNamespace(now=1.0),
        note=lambda *_: None,
        hops=lambda *_: hops,
        passes=lambda _: {("mcu", "cloud")},
        recorded=lambda machine: [],
        excuses=lambda *_: False,
        over_quota=lambda: world.dropped,
        is_busy=lambda _: world.busy,
        dropped=0,
        busy=False,
    )
    made = Checker(world)
    made.ready(SimpleNamespace(name="V"))
    made.want("L", uris.key(TOPIC), hops, confirmed=True)
    world.loop.now = 2.0
    return made


@pytest.mark.parametrize(("counted", "outstanding"), [(2, 0), (1, 2)])
def test_a_flood_may_be_dropped_as_far_as_that_is_counted(checker: Checker, counted: int, outstanding: int) -> None:
    for _ in range(2):
        checker.publishes(message(), is_flood=True).acknowledged()
    checker.world.dropped = counted
    assert checker.outstanding == outstanding
    checker.forgive([])
    checker.finish()
    assert bool(checker.violations) == bool(outstanding)


def test_what_is_no_flood_may_not_be_dropped(checker: Checker) -> None:
    checker.publishes(message()).acknowledged()
    checker.world.dropped = 100
    assert checker.outstanding == 1


@pytest.mark.parametrize("busy", [False, True])
def test_nothing_may_be_dropped_without_overload(checker: Checker, busy: bool) -> None:
    checker.world.busy = busy
    checker.logged("V", {"event": OVER_QUOTA, "authority": "v9.fleet"})
    assert [kind for kind, _ in checker.violations] == ([] if busy else ["dropped without overload"])


def test_losses_that_a_gateway_reports_are_counted(checker: Checker) -> None:
    checker.logged("V", {"event": NETWORK_LOST, "messages_at_most": 3})
    checker.logged("V", {"event": NETWORK_LOST, "messages_at_most": None})
    assert checker.reported_lost["V"] == 3
