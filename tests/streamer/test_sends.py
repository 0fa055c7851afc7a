"""A transport whose send does not return: it is reported, closed and opened again, and its messages are sent again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from streamer.walk import networks
from streamer.walk.endpoint import Endpoint
from streamer.walk.sender import QueuedRecord, Sender
from tests.streamer.conftest import Hearer, MakeWorld, World, text
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.status import OK
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

TOPIC = uris.parse("//vehicle1/8001/1/8001")
METHOD = uris.parse("//cloud/9001/1/1")
SEND_MS_MAX = 50
SHORT = f"send_ms_max = {SEND_MS_MAX}\n"
SUBSCRIBED = {str(uris.format(TOPIC)): ["//cloud/9001/1/0"]}


class Hanging(UTransport):
    """Its send does not return while `stalls`; a waiting send can be released later with success."""

    capabilities = Capability.PUBLISH_WITHOUT_SINK | Capability.ENCODED
    in_flight_messages = 100

    def __init__(self, *, keeps_on: bool) -> None:
        """`keeps_on`: a send goes on when it is cancelled."""
        self.stalls, self._keeps_on = True, keeps_on
        self.go = asyncio.Event()
        self.begun: list[bytes] = []
        self.returned = 0

    async def send_batch(self, messages: Sequence[Any]) -> list[UStatus]:
        self.begun += [message.payload for message in messages]
        if self.stalls:
            while not self.go.is_set():
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    if not self._keeps_on:
                        raise
        self.returned += 1
        return [OK] * len(messages)


def batch(*payloads: bytes) -> list[EncodedMessage]:
    found = []
    for payload in payloads:
        message = UMessageBuilder.publish(TOPIC).build()
        message.payload = payload
        found.append(EncodedMessage.of(message))
    return found


def codes(statuses: Sequence[UStatus]) -> set[int]:
    return {status.code for status in statuses}


def hanging(transport: UTransport, ms_max: int = SEND_MS_MAX) -> Endpoint:
    endpoint = Endpoint("cloud", ["cloud"], transport)
    endpoint.sends.ms_max = ms_max
    return endpoint


@pytest.mark.parametrize("keeps_on", [False, True])
async def test_all_that_is_under_way_is_answered_unavailable_in_time(keeps_on: bool) -> None:
    transport = Hanging(keeps_on=keeps_on)
    endpoint = hanging(transport)
    first, second = endpoint.sends.begin(batch(b"1", b"2")), endpoint.sends.begin(batch(b"3"))
    assert codes(await first) == codes(await second) == {UCode.UNAVAILABLE}
    assert endpoint.sends.hung.is_set()
    (trouble,) = endpoint.troubles
    assert trouble.startswith("since 20")
    assert f"does not return from sending within {SEND_MS_MAX} ms (egress.send_ms_max)" in trouble
    transport.go.set()  # what was given up confirms nothing, and says nothing of what works
    for _ in range(5):
        await asyncio.sleep(0)
    assert transport.returned == (2 if keeps_on else 0)
    assert endpoint.troubles == [trouble]


async def test_nothing_is_sent_until_the_transport_was_opened_again() -> None:
    transport = Hanging(keeps_on=False)
    endpoint = hanging(transport)
    await endpoint.send_batch(batch(b"1"))
    transport.stalls = False
    assert codes(await endpoint.send_batch(batch(b"1"))) == {UCode.UNAVAILABLE}
    endpoint.sends.resume()
    assert codes(await endpoint.send_batch(batch(b"1"))) == {UCode.OK}
    assert transport.begun == [b"1", b"1"]
    assert endpoint.troubles == []


async def test_a_slow_link_is_not_a_stall() -> None:
    """It has a second more for each 8 KiB."""
    transport = Hanging(keeps_on=False)
    endpoint = hanging(transport)
    answer = endpoint.sends.begin(batch(bytes(8 << 10)))
    await asyncio.wait({answer}, timeout=0.2)
    assert not answer.done()
    transport.go.set()
    assert codes(await answer) == {UCode.OK}
    assert endpoint.troubles == []


async def test_who_stops_waiting_ends_the_call() -> None:
    transport = Hanging(keeps_on=False)
    endpoint = hanging(transport, 60_000)
    waiting = asyncio.ensure_future(endpoint.send_batch(batch(b"1")))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.sleep(0)
    assert "under_way=0" in repr(endpoint.sends)


class FailsOnce(UTransport):
    """Fails with its first batch, in the step in which the second one may leave."""

    in_flight_messages = 100
    capabilities = Capability.PUBLISH_WITHOUT_SINK | Capability.ENCODED

    def __init__(self) -> None:
        self.fail = asyncio.Event()
        self.begun: list[bytes] = []

    async def send_batch(self, messages: Sequence[Any]) -> list[UStatus]:
        self.begun += [message.payload for message in messages]
        await self.fail.wait()
        return [UStatus(code=UCode.UNAVAILABLE)] * len(messages)


async def test_what_has_not_left_when_a_batch_fails_stays_behind_it() -> None:
    transport = FailsOnce()
    sender = Sender[QueuedRecord](hanging(transport, 60_000), 1, 1)
    one, two = ((seq, message, 1) for seq, message in enumerate(batch(b"1", b"2")))
    await sender.send([one])
    await asyncio.sleep(0)
    transport.fail.set()  # the first one is answered before the task of the second has begun
    await sender.send([two])
    await sender.answered()
    landed = sender.landed()
    assert landed is not None
    assert [(item, status.code) for item, status in landed.again] == [
        (one, UCode.UNAVAILABLE),
        (two, UCode.UNAVAILABLE),
    ]
    assert transport.begun == [b"1"]


# A whole streamer


async def _world(make_world: MakeWorld) -> tuple[World, Hearer, Callable[..., Any]]:
    world = await make_world(subscriptions=SUBSCRIBED, egress=SHORT)
    cloud = await world.node("cloud", "cloud", 0x9001)
    hearer = await world.hear(cloud, TOPIC)
    vehicle = await world.node("vehicle", "vehicle1")

    async def publish(*texts: str) -> None:
        for one in texts:
            await vehicle.send(UMessageBuilder.publish(TOPIC).build_from_upayload(text(one)))

    return world, hearer, publish


def transport_of(world: World, endpoint: str = "cloud") -> LocalTransport:
    transport = world.assembly.endpoints[endpoint].transport
    assert isinstance(transport, LocalTransport)
    return transport


def hang(world: World, when: Any) -> None:
    """The cloud's transport does not return from sending until it is opened again."""
    world.networks["cloud"].hangs[transport_of(world)] = when


def is_stalled(world: World) -> bool:
    return any("does not return from sending" in problem for problem in world.parts.problems())


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_stalled_transport_is_reopened_and_nothing_is_lost(make_world: MakeWorld, when: Any) -> None:
    world, hearer, publish = await _world(make_world)
    hang(world, when)
    await publish("1", "2", "3")
    await world.until(lambda: world.assembly.endpoints["cloud"].sends.hangs)
    await publish("4")
    await world.until(lambda: "4" in hearer.texts)
    heard = list(dict.fromkeys(hearer.texts))  # what hung after it was sent is sent twice
    assert heard == ["1", "2", "3", "4"]
    await world.until(lambda: not world.parts.problems())
    assert world.assembly.endpoints["cloud"].sends.hangs == 1


async def test_a_transport_is_notified_once_per_opening_that_all_is_registered(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    notified = list[LocalTransport]()
    monkeypatch.setattr(LocalTransport, "all_registered", lambda self: notified.append(self))
    world, hearer, publish = await _world(make_world)
    cloud = transport_of(world)
    await world.until(lambda: notified.count(cloud) == 1)
    await world.assembly.networks.listen()
    assert notified.count(cloud) == 1
    hang(world, "before")
    await publish("1")
    await world.until(lambda: "1" in hearer.texts)
    await world.until(lambda: notified.count(cloud) == 2)


async def test_its_listeners_hear_again(make_world: MakeWorld) -> None:
    """Also where the transport has forgotten them."""
    world, hearer, publish = await _world(make_world)
    cloud, mcu = transport_of(world), await world.node("mcu", "mcu1")
    heard = await world.hear(mcu, uris.parse("//cloud/9001/1/8001"), uris.parse("//mcu1/8001/1/0"))
    speaker = await world.node("cloud", "cloud", 0x9001)
    close = cloud.close

    async def forget() -> None:
        await close()
        cloud.listeners = LocalTransport.on(cloud.network, cloud.local).listeners

    cloud.close = forget  # type: ignore[method-assign]
    hang(world, "before")
    await publish("1")
    await world.until(lambda: "1" in hearer.texts and not world.parts.problems())
    notice = UMessageBuilder.notification(uris.parse("//cloud/9001/1/8001"), uris.parse("//mcu1/8001/1/0")).build()
    assert heard.messages == []
    await speaker.send(notice)
    await world.until(lambda: heard.messages)


async def test_a_transport_that_stalls_for_ever_is_always_reported_and_delays_no_other(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `close` does not return either."""
    monkeypatch.setattr(networks, "HUNG_S_MAX", 0.05)
    topics = {uris.format(TOPIC): ["//cloud/9001/1/0", "//mcu1/9001/1/0"]}
    world = await make_world(subscriptions=topics, egress=SHORT)
    mcu, vehicle = await world.node("mcu", "mcu1"), await world.node("vehicle", "vehicle1")
    hearer = await world.hear(mcu, TOPIC)
    cloud = transport_of(world)
    sent: list[str] = []

    async def never(*_: Any) -> Any:
        sent.append("")
        await asyncio.Event().wait()

    monkeypatch.setattr(cloud, "send_batch", never)
    monkeypatch.setattr(cloud, "close", never)
    sends = world.assembly.endpoints["cloud"].sends
    for number in range(20):
        await vehicle.send(UMessageBuilder.publish(TOPIC).build_from_upayload(text(str(number))))
    await world.until(lambda: len(hearer.texts) == 20)
    await world.until(lambda: is_stalled(world))
    trouble = sends.trouble
    await world.until(lambda: sends.hangs == 3)
    assert sends.trouble == trouble, "since the first time"
    assert is_stalled(world)
    assert hearer.texts == [str(number) for number in range(20)]
    monkeypatch.undo()


async def test_a_request_that_hung_is_sent_again(make_world: MakeWorld) -> None:
    world, _, _ = await _world(make_world)
    service = Hearer()
    cloud = await world.node("cloud", "cloud", 0x9001)
    await cloud.register_listener(uris.parse("//vehicle1/8001/1/0"), service, METHOD)
    vehicle = await world.node("vehicle", "vehicle1")
    hang(world, "before")
    await vehicle.send(
        UMessageBuilder.request(uris.parse("//vehicle1/8001/1/0"), METHOD, 20_000).build_from_upayload(text("?"))
    )
    await world.until(lambda: service.messages)
    assert [message.payload for message in service.messages] == [b"?"]


async def test_a_request_that_expires_while_its_transport_stalls_is_answered(make_world: MakeWorld) -> None:
    world, _, _ = await _world(make_world)
    answers = Hearer()
    vehicle = await world.node("vehicle", "vehicle1")
    await vehicle.register_listener(METHOD, answers, uris.parse("//vehicle1/8001/1/0"))
    cloud = transport_of(world)

    async def never(_: Sequence[UMessage]) -> list[UStatus]:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    cloud.send_batch = never  # type: ignore[method-assign, assignment]
    await vehicle.send(
        UMessageBuilder.request(uris.parse("//vehicle1/8001/1/0"), METHOD, 300).build_from_upayload(text("?"))
    )
    await world.until(lambda: answers.messages)
    assert answers.messages[0].attributes.commstatus == UCode.DEADLINE_EXCEEDED
