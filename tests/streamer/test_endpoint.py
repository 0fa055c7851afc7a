"""A plugin that raises an unexpected error: only its endpoint is affected; the error is reported, the send retried, and
no other message is delayed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from streamer.walk.endpoint import Endpoint
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.status import OK, UStatusError
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

MakeWorld = Any
Publish = Callable[..., UMessage]
TOPIC = uris.parse("//vehicle1/8001/1/8001")


class Faulty(UTransport):
    """Raises at messages with one of the payloads in `poison`, before anything of the batch has left."""

    capabilities = Capability.PUSH | Capability.PUBLISH_WITHOUT_SINK

    def __init__(self, *poison: bytes) -> None:
        self.poison = set(poison)
        self.taken: list[bytes] = []
        self.answers: list[UStatus] | None = None

    async def open(self) -> None:
        raise ZeroDivisionError("of the plugin")

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        payloads = [message.payload for message in messages]
        if self.poison.intersection(payloads):
            raise KeyError("of the plugin")
        if self.answers is not None:
            return self.answers
        self.taken += payloads
        return [OK] * len(messages)


def messages(*payloads: str) -> list[EncodedMessage]:
    return [EncodedMessage.of(_text(one)) for one in payloads]


def _text(payload: str) -> UMessage:
    message = UMessageBuilder.publish(TOPIC).build()
    message.payload = payload.encode()
    return message


def codes(statuses: Sequence[UStatus]) -> list[int]:
    return [status.code for status in statuses]


async def test_an_error_of_a_plugin_is_unavailable_and_reported_until_it_works() -> None:
    endpoint = Endpoint("cloud", ["cloud"], Faulty())
    with pytest.raises(UStatusError) as caught:
        await endpoint.open()
    assert caught.value.code == UCode.UNAVAILABLE
    assert "ZeroDivisionError" in endpoint.troubles[0]
    assert codes(await endpoint.send_batch(messages("a"))) == [UCode.OK]
    assert endpoint.troubles == []
    assert endpoint.faults == 1


async def test_a_message_that_a_plugin_chokes_on_is_refused_and_the_others_pass_in_order() -> None:
    transport = Faulty(b"bad")
    endpoint = Endpoint("cloud", ["cloud"], transport)
    assert codes(await endpoint.send_batch(messages("a", "bad", "b", "c"))) == [
        UCode.OK,
        UCode.INTERNAL,
        UCode.OK,
        UCode.OK,
    ]
    assert transport.taken == [b"a", b"b", b"c"]


async def test_a_plugin_that_chokes_on_everything_has_refused_nothing_for_good() -> None:
    endpoint = Endpoint("cloud", ["cloud"], Faulty(b"a", b"b"))
    assert codes(await endpoint.send_batch(messages("a", "b"))) == [UCode.UNAVAILABLE, UCode.UNAVAILABLE]
    # alone, nobody can say whose fault it is
    assert codes(await endpoint.send_batch(messages("a"))) == [UCode.UNAVAILABLE]


async def test_too_few_answers_are_a_fault() -> None:
    transport = Faulty()
    transport.answers = []
    endpoint = Endpoint("cloud", ["cloud"], transport)
    assert codes(await endpoint.send_batch(messages("a", "b"))) == [UCode.UNAVAILABLE] * 2
    assert "answered by 0 statuses" in endpoint.fault


async def test_nothing_behind_a_network_that_went_away_is_tried() -> None:
    class Away(Faulty):
        async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
            statuses = await super().send_batch(messages)
            return [
                UStatus(code=UCode.UNAVAILABLE) if message.payload == b"away" else status
                for message, status in zip(messages, statuses, strict=True)
            ]

    endpoint = Endpoint("cloud", ["cloud"], Away(b"bad"))
    assert codes(await endpoint.send_batch(messages("bad", "a", "away", "b"))) == [
        UCode.INTERNAL,
        UCode.OK,
        UCode.UNAVAILABLE,
        UCode.UNAVAILABLE,
    ]


@pytest.mark.parametrize("when", ["open", "send_batch", "register_listeners"])
async def test_a_faulty_endpoint_is_its_own_trouble(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    topic = "//vehicle1/8001/1/8001"
    world = await make_world(subscriptions={topic: ["//cloud/9001/1/0", "//mcu1/9001/1/0"]}, start=False)
    real = await _create(world)
    broken = asyncio.Event()
    broken.set()
    transport = real.assembly.endpoints["mcu"].transport
    works = getattr(transport, when)

    async def fails(*arguments: Any) -> Any:
        if broken.is_set():
            raise RuntimeError("of the plugin")
        return await works(*arguments)

    monkeypatch.setattr(transport, when, fails)
    world.running = asyncio.create_task(real.run())
    await asyncio.wait_for(real.assembly.ready.wait(), 20)
    vehicle = await world.node("vehicle", "vehicle1")
    cloud, mcu = await world.node("cloud", "cloud", 0x9001), await world.node("mcu", "mcu1", 0x9001)
    at_cloud, at_mcu = await world.hear(cloud, uris.parse(topic)), await world.hear(mcu, uris.parse(topic))
    await vehicle.send_batch([publish(topic, str(number)) for number in range(3)])
    assert [message.payload for message in await at_cloud.expect(3)] == [b"0", b"1", b"2"]
    await world.until(lambda: any("of the plugin" in problem for problem in real.parts.problems()))
    broken.clear()
    assert [message.payload for message in await at_mcu.expect(3)] == [b"0", b"1", b"2"]
    await world.until(lambda: not any("of the plugin" in problem for problem in real.parts.problems()))


async def _create(world: Any) -> Any:
    from streamer.app import Streamer

    world.streamer = await Streamer.create(world.config)
    return world.streamer
