"""A foreign uSubscription service, version 3, without list calls: it is asked topic by topic, and messages wait for its
answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from streamer.egress import hold_state, topic_holds
from streamer.parts import reloading
from tests.streamer.test_reloading import changed, reload
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcServer
from uprotocol.core.usubscription.v3.usubscription_pb2 import (
    FetchSubscribersRequest,
    FetchSubscribersResponse,
    NotificationsRequest,
    NotificationsResponse,
    SubscriberInfo,
    SubscriptionStatus,
    Update,
)
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

MakeWorld = Any
Publish = Callable[..., UMessage]

SPEED = uris.parse("//vehicle1/8001/1/8001")
DOOR = uris.parse("//vehicle1/8001/1/8002")
CLOUD_APP = uris.parse("//cloud/9001/1/0")
EVERYTHING = (uris.key(uris.pattern("vehicle1")), None)  # the filter while a service can't list its topics

FOREIGN = {"vehicle": "none", "cloud": "remote"}


class ForeignV3:
    """FetchSubscribers and RegisterForNotifications of version 3, and nothing else."""

    def __init__(self, node: LocalTransport) -> None:
        self._node = node
        self._server = InMemoryRpcServer(node, LocalUriProvider("cloud", 0, 3))
        self.subscribers: dict[tuple[str, int, int, int], list[UUri]] = {}
        self.asked: Counter[str] = Counter()
        self.registered: dict[tuple[str, int, int, int], UUri] = {}
        self.answering = asyncio.Event()
        self.answering.set()

    async def start(self) -> None:
        await self._server.register_request_handler(6, self._register)
        await self._server.register_request_handler(8, self._fetch)

    async def stop(self) -> None:
        await self._server.close()

    async def _register(self, request: UMessage) -> NotificationsResponse:
        topic = UPayload.of(request).unpack(NotificationsRequest).topic
        self.registered[uris.key(topic)] = request.attributes.source
        return NotificationsResponse()

    async def _fetch(self, request: UMessage) -> FetchSubscribersResponse:
        await self.answering.wait()
        topic = UPayload.of(request).unpack(FetchSubscribersRequest).topic
        if topic.authority_name == "vehicle1":  # not the question by which a client finds out the version
            self.asked[uris.format(topic)] += 1
        return FetchSubscribersResponse(
            subscribers=[SubscriberInfo(uri=one) for one in self.subscribers.get(uris.key(topic), [])]
        )

    async def change(self, topic: UUri, subscriber: UUri, state: SubscriptionStatus.State.ValueType) -> None:
        """A client subscribes or unsubscribes, and those registered for the topic are notified."""
        self.subscribers[uris.key(topic)] = [subscriber] if state == SubscriptionStatus.SUBSCRIBED else []
        update = Update(topic=topic, subscriber=SubscriberInfo(uri=subscriber), status=SubscriptionStatus(state=state))
        sink = self.registered[uris.key(topic)]
        await self._node.send(UMessageBuilder.notification(uris.uri("cloud", 0, 3, 0x8000), sink).pack(update))


async def beside_a_foreign_service(make_world: MakeWorld) -> tuple[Any, ForeignV3, LocalTransport, Any]:
    """A streamer, the cloud's service, where CLOUD_APP wants SPEED, a uEntity of the vehicle, and who hears in the
    cloud."""
    world = await make_world(FOREIGN, start=False)
    service = ForeignV3(await world.node("cloud", "cloud", 0))
    service.subscribers[uris.key(SPEED)] = [CLOUD_APP]
    await service.start()
    await world.start()
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, uris.pattern("vehicle1"))
    return world, service, vehicle, heard


async def test_topics_are_found_one_by_one_and_messages_wait_for_the_answer(
    make_world: MakeWorld, publish: Publish
) -> None:
    world, service, vehicle, heard = await beside_a_foreign_service(make_world)
    assert world.parts.problems() == []
    service.answering.clear()
    for number in range(5):
        await vehicle.send_batch([publish(SPEED, f"speed {number}"), publish(DOOR, f"door {number}")])
    await world.until(lambda: uris.key(SPEED) in service.registered)
    assert heard.messages == []
    service.answering.set()
    await heard.expect(5)
    assert heard.texts == [f"speed {number}" for number in range(5)]
    await vehicle.send_batch([publish(SPEED, "speed 5"), publish(DOOR, "door 5")])
    await heard.expect(6)
    await world.until(lambda: uris.key(DOOR) in service.registered and service.asked[uris.format(DOOR)])
    assert service.asked == {uris.format(SPEED): 1, uris.format(DOOR): 1}  # once per topic, and then it tells by itself

    await service.change(DOOR, CLOUD_APP, SubscriptionStatus.SUBSCRIBED)
    await world.until(lambda: world.assembly.interest.wants(DOOR))
    await service.change(SPEED, CLOUD_APP, SubscriptionStatus.UNSUBSCRIBED)
    await world.until(lambda: not world.assembly.interest.wants(SPEED))
    await vehicle.send_batch([publish(SPEED, "nobody"), publish(DOOR, "door 6")])
    await heard.expect(7)
    assert heard.texts[-1] == "door 6"
    assert service.asked.total() == 2
    await service.stop()


def parked(world: Any) -> int:
    return sum(len(pump.waits.topics) for pump in world.assembly.pumps)


@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
async def test_a_topic_without_answer_is_parked_and_goes_out_in_order_when_somebody_wants_it(
    make_world: MakeWorld, publish: Publish, restarted: bool
) -> None:
    world, service, vehicle, heard = await beside_a_foreign_service(make_world)
    service.subscribers[uris.key(DOOR)] = [CLOUD_APP]
    await vehicle.send(publish(SPEED, "known"))
    await heard.expect(1)
    service.answering.clear()
    for number in range(3):
        await vehicle.send_batch([publish(DOOR, f"door {number}"), publish(SPEED, f"speed {number}")])
    await heard.expect(4)
    assert heard.texts == ["known", "speed 0", "speed 1", "speed 2"]
    await world.until(lambda: parked(world) == 1)
    if restarted:
        await world.restart()
        assert parked(world) == 1
    service.answering.set()
    # known to be version 3 again, so everything is listened to
    await world.until(lambda: EVERYTHING in world.assembly.networks["vehicle"].filters._registered)
    await vehicle.send(publish(DOOR, "door 3"))
    await vehicle.send(publish(DOOR, "door 4"))
    await heard.expect(9)
    assert heard.texts[4:] == [f"door {number}" for number in range(5)]
    await world.until(lambda: parked(world) == 0)
    await service.stop()


async def test_a_topic_that_nobody_wants_is_forgotten_when_that_is_known(
    make_world: MakeWorld, publish: Publish
) -> None:
    world, service, vehicle, heard = await beside_a_foreign_service(make_world)
    service.answering.clear()
    await vehicle.send(publish(DOOR, "nobody"))
    await world.until(lambda: parked(world) == 1)
    service.answering.set()
    await world.until(lambda: parked(world) == 0)
    await vehicle.send(publish(SPEED, "known"))
    await heard.expect(1)
    assert heard.texts == ["known"]
    cursors = world.assembly.logs.durable.cursors.seqs
    await world.until(lambda: not any(name.startswith("parked:") for name in cursors()))
    await service.stop()


async def test_with_too_many_parked_topics_the_peer_waits_and_loses_nothing(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_holds, "PARKED_MAX", 3)
    world, service, vehicle, heard = await beside_a_foreign_service(make_world)
    topics = [uris.uri("vehicle1", 0x8001, 1, 0x9000 + number) for number in range(10)]
    for topic in topics:
        service.subscribers[uris.key(topic)] = [CLOUD_APP]
    service.answering.clear()
    await vehicle.send_batch([publish(topic, str(number)) for number, topic in enumerate(topics)])
    await world.until(lambda: len(world.assembly.logs.durable.streams()) == 10)
    await asyncio.sleep(0)
    assert parked(world) <= 3
    assert heard.messages == []
    service.answering.set()
    await heard.expect(10)
    assert sorted(heard.texts) == sorted(map(str, range(10)))
    await world.until(lambda: parked(world) == 0)
    await service.stop()


async def test_a_topic_that_was_undecided_and_then_unheard_waits_over_a_restart_at_once(
    make_world: MakeWorld, publish: Publish
) -> None:
    """Its records are behind the cursor of the pump, so the cursor can't keep them."""
    world = await make_world(FOREIGN, start=False)
    service = ForeignV3(await world.node("cloud", "cloud", 0))
    service.subscribers = {uris.key(SPEED): [CLOUD_APP], uris.key(DOOR): [CLOUD_APP]}
    await service.start()
    await world.start()
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    speed = await world.hear(cloud, SPEED)
    await vehicle.send(publish(SPEED, "known"))
    await speed.expect(1)
    service.answering.clear()
    await vehicle.send(publish(DOOR, "door"))
    await world.until(lambda: parked(world) == 1)
    await vehicle.send(publish(SPEED, "later"))
    await speed.expect(2)
    (pump,) = [pump for pump in world.assembly.pumps if pump.peer.name == "cloud" and pump.log.durable]
    await world.until(lambda: pump.cursor == 3)
    service.answering.set()
    await world.until(lambda: pump.waits.addresses and not pump.waits.topics)
    await world.restart()
    door = await world.hear(cloud, DOOR)
    await door.expect(1)
    assert door.texts == ["door"]
    await service.stop()


async def test_what_is_held_at_an_address_waits_although_it_is_not_known_any_more_who_wants_it(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved interest is lost, and the service is slow to answer: the record waits as one of an undecided topic."""
    monkeypatch.setattr(hold_state, "RETRY_S_MIN", 0.05)
    world, service, vehicle, heard = await beside_a_foreign_service(make_world)
    world.networks["cloud"].refuse(uris.format(SPEED))
    await vehicle.send(publish(SPEED, "held"))
    (pump,) = [pump for pump in world.assembly.pumps if pump.peer.name == "cloud" and pump.log.durable]
    await world.until(lambda: len(pump.waits.addresses) == 1 and pump.cursor == 1)
    service.answering.clear()
    await world.stop()
    (world.config.streamer.data_dir / "interest-cloud.json").unlink()
    await world.start()
    await world.until(lambda: parked(world) == 1)
    world.networks["cloud"].allow()
    service.answering.set()
    await heard.expect(1)
    assert heard.texts == ["held"]
    await service.stop()


async def without_the_cloud(world: Any) -> None:
    """A reload removes the endpoint, and with it all that is known of its service."""
    endpoints = [one for one in world.config.endpoint if one.name != "cloud"]
    await reload(world, changed(world.config, endpoint=endpoints))
    await world.until(lambda: EVERYTHING not in world.assembly.networks["vehicle"].filters._registered)


async def test_a_reload_answers_once_a_new_service_has_said_what_is_wanted(
    make_world: MakeWorld, publish: Publish
) -> None:
    """Nothing that is published after the answer is missed, as after `ready`."""
    world, service, vehicle, heard = await beside_a_foreign_service(make_world)
    await without_the_cloud(world)
    await reload(world, world.config)
    await vehicle.send(publish(SPEED, "after the answer"))
    await heard.expect(1)
    assert heard.texts == ["after the answer"]
    await service.stop()


async def test_a_reload_does_not_wait_long_for_a_new_service_that_is_silent(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "OPEN_WAIT_S", 0.2)
    world, service, vehicle, heard = await beside_a_foreign_service(make_world)
    await without_the_cloud(world)
    service.answering.clear()
    await reload(world, world.config)
    (asked,) = [one for one in world.assembly.interest.sources if one.name == "cloud"]
    assert not asked.healthy
    service.answering.set()
    await world.until(lambda: EVERYTHING in world.assembly.networks["vehicle"].filters._registered)
    await vehicle.send(publish(SPEED, "once it has answered"))
    await heard.expect(1)
    assert heard.texts == ["once it has answered"]
    await service.stop()
