"""The number of messages in flight: many on a long path, few to a near broker; and what happens to those behind a
refused one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transports.base import NOT_TRIED
from transports.mqtt5.window import IN_FLIGHT_BYTES_MAX, NEAR_MESSAGES, Reach, Window
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder
from uprotocol.status import OK
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

TOPIC = uris.parse("//vehicle1/8001/1/8001")
BROKER_PER_S = 30_000
MAX = 8_192


def in_flight(reach: Reach) -> int:
    """While the window is small, it has doubled by the time that the timed message is answered."""
    return max(reach.messages, min(2 * reach.messages, NEAR_MESSAGES))


def round_trips(way_s: float, count: int, *, late: float = 0.0, seed: int = 0) -> list[int]:
    """The size before each, with always as many in flight as may be. `late`: so many take a second longer."""
    dice, reach, sizes = random.Random(seed), Reach(MAX), []
    for _ in range(count):
        sizes.append(reach.messages)
        stall_s = 1.0 if dice.random() < late else 0.0
        reach.on_pubacks(way_s + in_flight(reach) / BROKER_PER_S + stall_s, was_full=True)
    return sizes


def test_a_long_way_is_filled() -> None:
    sizes = round_trips(0.1, 30)
    assert sizes[:10] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 1_024]
    assert min(sizes[12:]) >= 2_048, "20,000 messages/s"


def test_a_broker_that_is_near_has_few_in_front_of_it() -> None:
    sizes = round_trips(0.0003, 200)
    assert max(sizes) <= 2 * NEAR_MESSAGES
    assert sum(sizes[10:]) / len(sizes[10:]) < 1.25 * NEAR_MESSAGES


@given(seed=st.integers(0, 1 << 30))
def test_what_is_late_for_other_reasons_does_not_keep_it_small(seed: int) -> None:
    sizes = round_trips(0.1, 120, late=0.2, seed=seed)
    assert sum(sizes[40:]) / len(sizes[40:]) >= 2_048


def test_a_way_that_becomes_longer_is_filled_again() -> None:
    reach = Reach(MAX)
    for way_s in (0.001, 0.2):
        for _ in range(80):
            reach.on_pubacks(way_s + in_flight(reach) / BROKER_PER_S, was_full=True)
    assert reach.messages >= 4_096


@pytest.mark.parametrize("size", [1, 20, NEAR_MESSAGES, MAX])
def test_no_more_than_the_broker_allows(size: int) -> None:
    reach = Reach(size)
    for _ in range(40):
        reach.on_pubacks(1.0, was_full=True)
    assert reach.messages == size


def test_what_is_never_full_does_not_grow() -> None:
    reach = Reach(MAX)
    for _ in range(40):
        reach.on_pubacks(1.0, was_full=False)
    assert reach.messages == NEAR_MESSAGES


class Broker:
    """A fake Connection: takes packets, and answers when the test says so."""

    def __init__(self, size: int) -> None:
        self._ids = iter(range(1, 65_536))
        self.writes: list[int] = []  # packets in each
        self.taken: list[tuple[int, UMessage]] = []  # by packet id, not answered
        self.window = Window(SimpleNamespace(), self._encode, self._next_id, lambda _: None, lambda _: 4)
        self._encoded: list[UMessage] = []
        self.window.open(self, size)  # type: ignore[arg-type]

    def _next_id(self) -> int:
        self._id = next(self._ids)
        self.taken.append((self._id, self._encoded[-1]))
        return self._id

    def _encode(self, message: Any) -> tuple[bytes, bytes]:
        self._encoded.append(message)
        return b"", message.payload

    def write(self, data: bytes, *, watch: bool = False) -> None:
        self.writes.append(len(data))

    def watch_delivery(self) -> None: ...

    def answer(self, count: int, reason: int = 0) -> None:
        """One read with `count` PUBACKs."""
        answered, self.taken = self.taken[:count], self.taken[count:]
        self.window.on_pubacks([(packet_id, reason) for packet_id, _ in answered], {})


def messages(count: int, size: int = 1) -> list[UMessage]:
    made = [UMessageBuilder.publish(TOPIC).build() for _ in range(count)]
    for message in made:
        message.payload = bytes(size)
    return made


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def grown(broker: Broker) -> None:
    """The window is as large as it becomes at a broker that is near."""
    for _ in range(12):
        sending = asyncio.create_task(broker.window.send(messages(1)))
        await settled()
        broker.answer(1)
        assert await sending == [OK]


def outcomes(statuses: Sequence[UStatus]) -> list[str]:
    return ["OK" if not one.code else "behind" if one.message == NOT_TRIED else "failed" for one in statuses]


async def test_batches_leave_behind_one_another_before_the_first_is_answered() -> None:
    broker = Broker(MAX)
    await grown(broker)
    sending = [asyncio.create_task(broker.window.send(messages(100))) for _ in range(3)]
    await settled()
    assert len(broker.taken) == 300
    broker.answer(250)
    assert await sending[0] == await sending[1] == [OK] * 100
    assert not sending[2].done()
    broker.answer(50)
    assert await sending[2] == [OK] * 100


async def test_nothing_is_begun_behind_one_that_is_not_taken_until_its_sender_knows() -> None:
    quota_exceeded = 0x97
    broker = Broker(64)
    await grown(broker)
    first = asyncio.create_task(broker.window.send(messages(100)))
    second = asyncio.create_task(broker.window.send(messages(10)))
    await settled()
    assert len(broker.taken) == 64
    broker.answer(1, quota_exceeded)
    await settled()
    assert len(broker.taken) == 63, "nothing more leaves, of neither"
    assert outcomes(await broker.window.send(messages(3))) == ["behind"] * 3
    assert outcomes(await second) == ["behind"] * 10
    broker.answer(63)
    assert outcomes(await first) == ["failed"] + ["OK"] * 63 + ["failed"] + ["behind"] * 35
    again = asyncio.create_task(broker.window.send(messages(3)))
    await settled()
    broker.answer(3)
    assert await again == [OK] * 3


async def test_batches_that_are_under_way_fail_with_the_connection() -> None:
    broker = Broker(64)
    await grown(broker)
    sending = [asyncio.create_task(broker.window.send(messages(50))) for _ in range(3)]
    await settled()
    broker.answer(20)
    broker.window.shut(UStatus(code=UCode.UNAVAILABLE, message="lost"))
    later: list[bytes] = []
    connection: Any = SimpleNamespace(write=lambda data, watch: later.append(data))
    broker.window.open(connection, 64)  # at once
    assert outcomes(await sending[0]) == ["OK"] * 20 + ["failed"] * 30
    for one in sending[1:]:
        assert "OK" not in outcomes(await one)
    assert later == [], "none of them leaves on the new one"


async def test_large_messages_are_bounded_over_all_batches() -> None:
    broker = Broker(MAX)
    await grown(broker)
    size = 1 << 20
    sending = [asyncio.create_task(broker.window.send(messages(20, size))) for _ in range(3)]
    await settled()
    assert len(broker.taken) * size <= IN_FLIGHT_BYTES_MAX + size
    while not all(one.done() for one in sending):
        broker.answer(1)
        await settled()
    assert [await one for one in sending] == [[OK] * 20] * 3
