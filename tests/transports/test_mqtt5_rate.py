"""The number of messages sent per second."""

from __future__ import annotations

import asyncio
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transports.mqtt5_answering import answering
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport
from transports.plugin import create
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.pacing import Pace
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage

DEADLINE_S = 20
TOPIC = uris.parse("//vehicle1/8001/1/8001")
NEARLY = 1 - 1e-9  # of a second: what stands on its edge counts once


def message(number: int) -> UMessage:
    return UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b"%d" % number, 6))


@given(
    st.integers(10, 500),
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 300)), min_size=1, max_size=60),
)
def test_no_second_has_more(per_s: int, steps: list[tuple[float, int]]) -> None:
    """From any start, and after any idle time."""
    now_s, left = 1_000.0, list[float]()
    pace = Pace(per_s, lambda: now_s, per_s // 10)
    for pause_s, wanted in steps:
        now_s += pause_s
        for _ in range(wanted):
            if not pace.available():
                now_s += pace.wait_s
            if pace.available():  # else it is early by what a float can't say
                pace.take(1)
                left.append(now_s)
    for place, start_s in enumerate(left):
        assert bisect_left(left, start_s + NEARLY) - place <= per_s


def test_who_always_has_something_gets_nearly_all() -> None:
    now_s, sent = 0.0, 0
    pace = Pace(100, lambda: now_s, 10)
    while now_s < 60:
        free = pace.available()
        pace.take(free)
        sent += free
        now_s += pace.wait_s + 1e-6
    assert 89 * 60 < sent < 91 * 60


async def test_a_transport_keeps_to_it() -> None:
    """Also with calls side by side, and messages that are answered at once."""
    async with answering() as broker:
        config = Mqtt5Config(port=broker.port, messages_per_s=10)
        async with Mqtt5Transport(config, LocalUriProvider("vehicle1", 0x8001, 1)) as one:
            loop = asyncio.get_running_loop()
            started_s = loop.time()
            batches = [one.send_batch([message(number) for number in range(3)]) for _ in range(2)]
            for statuses in await asyncio.wait_for(asyncio.gather(*batches), DEADLINE_S):
                assert [status.code for status in statuses] == [0] * 3
            assert loop.time() - started_s > 5 / 9 - 0.05, "one at once, and then nine a second"
            assert one.in_flight_messages == 1


async def test_closing_does_not_wait_for_what_may_not_leave_yet() -> None:
    async with answering() as broker:
        one = Mqtt5Transport(Mqtt5Config(port=broker.port, messages_per_s=10), LocalUriProvider("vehicle1", 0x8001, 1))
        await one.open()
        sending = asyncio.create_task(one.send_batch([message(number) for number in range(1_000)]))
        await asyncio.sleep(0)
        await asyncio.wait_for(one.close(), DEADLINE_S)
        statuses = await asyncio.wait_for(sending, DEADLINE_S)
        assert len(statuses) == 1_000
        assert statuses[-1].code


def test_less_than_ten_is_no_rate() -> None:
    with pytest.raises(UStatusError, match="messages_per_s"):
        create("mqtt5", {"messages_per_s": 9}, LocalUriProvider("somebody", 1, 1))
