"""The express lane: bounded, by priority, gone at its ttl, and every request that can't be dispatched is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.endpoint import Endpoint, Endpoints
from streamer.express import Express
from streamer.retry import Backoff
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.message import UMessageBuilder
from uprotocol.status import nobody_listens
from uprotocol.transport import Capability
from uprotocol.v1.uattributes_pb2 import UMessageType, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

CALLER = uris.parse("//cloud/9001/1/0")
METHOD = uris.parse("//vehicle1/8001/1/7")
CLASSES = [UPriority.UPRIORITY_CS4, UPriority.UPRIORITY_CS5, UPriority.UPRIORITY_CS6]


class Network:
    """Takes what comes while `there`."""

    capabilities = Capability.PUBLISH_WITHOUT_SINK
    takes_encoded = False

    def __init__(self) -> None:
        self.there = False
        self.taken: list[UMessage] = []

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        if self.there:
            self.taken += messages
        return [UStatus(code=UCode.OK if self.there else UCode.UNAVAILABLE) for _ in messages]


class Inside:
    """core.ustreamer of vehicle1."""

    def __init__(self) -> None:
        self.told: list[UMessage] = []

    def owns(self, uri: UUri) -> bool:
        return uris.matches(uris.parse("//vehicle1/4/FF/FFFF"), uri)

    def deliver(self, messages: Sequence[UMessage]) -> None:
        self.told += messages


def express(limit: int) -> tuple[Express, Endpoints, dict[str, Network], list[tuple[UMessage, int]]]:
    networks = {"cloud": Network(), "vehicle1": Network()}
    endpoints = Endpoints([Endpoint(name, [name], network) for name, network in networks.items()])  # type: ignore[arg-type]
    letters: list[tuple[UMessage, int]] = []
    dead_letters: Any = SimpleNamespace(add=lambda message, code, reason, endpoint: letters.append((message, code)))
    hosted: Any = Inside()
    return Express(endpoints, hosted, dead_letters, messages_max=limit, backoff=lambda: Backoff(1, 2)), endpoints, networks, letters


def request(priority: UPriority.ValueType, ttl_ms: int = 60_000) -> UMessage:
    return UMessageBuilder.request(CALLER, METHOD, ttl_ms).with_priority(priority).build()


@pytest.mark.spec("local~disp-rpc-error")
@pytest.mark.spec("local~disp-priority")
@given(
    limit=st.integers(1, 20),
    expired=st.lists(st.booleans(), max_size=40),
    priorities=st.lists(st.sampled_from(CLASSES), min_size=40, max_size=40),
)
def test_every_request_leaves_in_its_class_or_is_answered(limit: int, expired: list[bool], priorities: list[UPriority.ValueType]) -> None:
    asyncio.run(_run(limit, expired, priorities))


async def _run(limit: int, expired: list[bool], priorities: list[UPriority.ValueType]) -> None:
    lanes, endpoints, networks, letters = express(limit)
    requests = []
    for is_expired, priority in zip(expired, priorities, strict=False):
        message = request(priority, 1_000)
        if is_expired:
            message.attributes.id.msb -= 5_000 << 16
        requests.append(message)
        lanes.put(endpoints["vehicle1"], message, endpoints["cloud"])
        assert len(lanes.lanes["vehicle1"]) <= limit
        assert len(lanes.lanes["cloud"]) <= limit  # answers are bounded, too
    accepted, refused = requests[:limit], requests[limit:]
    for network in networks.values():
        network.there = True
    running = [asyncio.create_task(lane.run()) for lane in lanes.lanes.values()]
    async with asyncio.timeout(30):
        while any(len(lane) for lane in lanes.lanes.values()):  # noqa: ASYNC110 - the lanes tell nobody
            await asyncio.sleep(0)
        await asyncio.sleep(0)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    alive = [message for message, is_expired in zip(accepted, expired, strict=False) if not is_expired]
    assert networks["vehicle1"].taken == sorted(alive, key=lambda message: -message.attributes.priority)
    codes = {uuids.format(message.attributes.id): code for message, code in letters}
    assert {code for id, code in codes.items() if id in {uuids.format(one.attributes.id) for one in refused}} <= {UCode.RESOURCE_EXHAUSTED}
    assert len(codes) == len(requests) - len(alive)
    for answer in networks["cloud"].taken:
        attributes = answer.attributes
        assert attributes.type == UMessageType.UMESSAGE_TYPE_RESPONSE
        assert attributes.commstatus == codes[uuids.format(attributes.reqid)]
        assert UStatus.FromString(answer.payload).code == attributes.commstatus


@pytest.mark.spec("local~disp-rpc-error")
async def test_what_waits_is_told_when_its_time_is_up_not_later() -> None:
    lanes, endpoints, networks, letters = express(10)
    networks["cloud"].there = True
    running = [asyncio.create_task(lane.run()) for lane in lanes.lanes.values()]
    lanes.put(endpoints["vehicle1"], request(UPriority.UPRIORITY_CS4, 100), endpoints["cloud"])
    async with asyncio.timeout(20):
        while not networks["cloud"].taken:  # noqa: ASYNC110 - the lanes tell nobody
            await asyncio.sleep(0.005)
    (answer,) = networks["cloud"].taken
    assert answer.attributes.commstatus == UCode.DEADLINE_EXCEEDED
    assert len(letters) == 1
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_a_response_that_cannot_be_dispatched_is_a_dead_letter_and_answers_nobody() -> None:
    lanes, endpoints, _, letters = express(1)
    for _ in range(3):
        asked = request(UPriority.UPRIORITY_CS4).attributes
        lanes.put(endpoints["cloud"], UMessageBuilder.response_for_request(asked).build(), endpoints["vehicle1"])
    assert len(lanes.lanes["cloud"]) == 1
    assert len(lanes.lanes["vehicle1"]) == 0
    assert [code for _, code in letters] == [UCode.RESOURCE_EXHAUSTED] * 2


async def test_a_request_from_inside_is_answered_and_is_no_dead_letter() -> None:
    """While a network is away for a day, what the streamer itself asks there must not push out the letters of others."""
    lanes, endpoints, _, letters = express(1)
    for _ in range(3):
        asked = UMessageBuilder.request(uris.parse("//vehicle1/4/1/0"), uris.parse("//cloud/0/3/8"), 1_000).build()
        lanes.put(endpoints["cloud"], asked, None)
    inside: Any = lanes._hosted
    assert [message.attributes.commstatus for message in inside.told] == [UCode.RESOURCE_EXHAUSTED] * 2
    assert inside.told[-1].attributes.reqid == asked.attributes.id
    assert letters == []


@pytest.mark.spec("local~disp-rpc-error")
async def test_a_request_that_nobody_takes_is_told_at_once_and_one_whose_network_is_away_is_tried_again() -> None:
    lanes, endpoints, networks, letters = express(10)
    vehicle, cloud = networks["vehicle1"], networks["cloud"]
    asked: list[int] = []
    answered = asyncio.Event()

    async def answer(messages: Sequence[UMessage]) -> list[UStatus]:
        cloud.taken += messages
        answered.set()
        return [UStatus(code=UCode.OK)] * len(messages)

    async def send_batch(messages: Sequence[UMessage]) -> list[UStatus]:
        asked.append(len(messages))
        if len(asked) == 1:
            return [UStatus(code=UCode.UNAVAILABLE)] * len(messages)
        return [nobody_listens("no subscriber")] * len(messages)

    vehicle.send_batch, cloud.send_batch = send_batch, answer  # type: ignore[method-assign]
    tasks = [asyncio.create_task(lane.run()) for lane in lanes.lanes.values()]
    one = request(UPriority.UPRIORITY_CS4)
    lanes.put(endpoints["vehicle1"], one, endpoints["cloud"])
    await asyncio.wait_for(answered.wait(), 20)  # of a ttl of 60
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert asked == [1, 1]
    (response,) = cloud.taken
    assert response.attributes.reqid == one.attributes.id
    assert response.attributes.commstatus == UCode.UNAVAILABLE
    assert UStatus.FromString(response.payload).code == UCode.UNAVAILABLE
    assert [code for _, code in letters] == [UCode.UNAVAILABLE]
