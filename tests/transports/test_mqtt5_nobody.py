"""The broker's answer to a message without subscriber, and what the transport does with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.transports.mqtt5_answering import answering
from tools.broker import Broker
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport
from transports.mqtt5.reasons import NO_MATCHING_SUBSCRIBERS
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.encoded import Carried, EncodedMessage, Stamp, suffix
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError, is_nobody_listening
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

pytestmark = pytest.mark.broker

DEADLINE_S = 20
CLIENT = uris.parse("up://caller/10AB/3/0")
METHOD = uris.parse("up://vehicle9/8001/1/7")
CALLERS = uris.parse("up://*/FFFFFFFF/FF/0")
TOPIC = uris.parse("up://caller/10AB/3/80CD")
OTHER = uris.parse("up://caller/10AB/3/80CE")


def end(broker: Broker, authority: str, mode: str, **settings: Any) -> Mqtt5Transport:
    return Mqtt5Transport(Mqtt5Config(port=broker.port, mode=mode, **settings), LocalUriProvider(authority, 0x10AB, 3))


def request() -> UMessage:
    return UMessageBuilder.request(CLIENT, METHOD, 60_000).build()


class Heard:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[UMessage] = asyncio.Queue()

    def on_receive(self, message: UMessage) -> None:
        self.messages.put_nowait(message)


@pytest.mark.parametrize("mode", ["in-vehicle", "off-vehicle"])
async def test_a_request_that_nobody_can_take_is_unavailable_at_once(make_broker: Any, mode: str) -> None:
    """Only requests: a publish, a notification or a late response without listener is no error. Later messages are
    sent."""
    broker = make_broker()
    async with end(broker, "caller", mode) as caller:
        there = UMessageBuilder.notification(TOPIC, uris.parse("up://vehicle9/8001/1/0")).build()
        late = (
            UMessageBuilder.response(uris.parse("up://caller/8001/1/7"), uris.parse("up://vehicle9/1/1/0"), uuids.new())
            .with_ttl(60_000)
            .build()
        )
        one, two = request(), request()
        data = two.attributes.SerializeToString()
        assert suffix(data) is not None
        encoded = EncodedMessage(data, b"", Stamp(two.attributes))
        statuses = await asyncio.wait_for(caller.send_batch([one, there, encoded, late]), DEADLINE_S)
        assert [status.code for status in statuses] == [UCode.UNAVAILABLE, UCode.OK, UCode.UNAVAILABLE, UCode.OK]
        assert [is_nobody_listening(status) for status in statuses] == [True, False, True, False]
        assert caller.connected


@pytest.mark.parametrize("mode", ["in-vehicle", "off-vehicle"])
async def test_a_service_that_comes_later_or_is_away_for_a_while(make_broker: Any, mode: str) -> None:
    """A session counts, though its client be away: the broker keeps the request for it, until its ttl."""
    broker = make_broker()
    heard = Heard()
    async with end(broker, "caller", mode) as caller:
        with pytest.raises(UStatusError) as caught:
            await caller.send(request())
        assert is_nobody_listening(caught.value.status)
        vehicle = end(broker, "vehicle9", mode, client_id="vehicle9", session_expiry_s=3_600)
        async with vehicle:
            await vehicle.register_listener(CALLERS, heard, METHOD)
            await caller.send(request())
            await asyncio.wait_for(heard.messages.get(), DEADLINE_S)
        kept = request()
        await caller.send(kept)  # it is away, and its session is not
        async with vehicle:
            assert (await asyncio.wait_for(heard.messages.get(), DEADLINE_S)).attributes.id == kept.attributes.id
            await vehicle.unregister_listener(CALLERS, heard, METHOD)
            with pytest.raises(UStatusError) as caught:
                await caller.send(request())
            assert is_nobody_listening(caught.value.status)


async def test_a_caller_gets_the_error_at_once(make_broker: Any) -> None:
    broker = make_broker()
    async with (
        end(broker, "caller", "in-vehicle") as caller,
        InMemoryRpcClient(caller, LocalUriProvider("caller", 0x10AB, 3)) as client,
    ):
        with pytest.raises(UStatusError) as caught:
            await asyncio.wait_for(client.invoke_method(METHOD, None, CallOptions(timeout_ms=60_000)), DEADLINE_S)
        assert caught.value.code == UCode.UNAVAILABLE


# Publishes, where their owner has asked.


def publish(source: UUri = TOPIC, sink: UUri | None = None) -> UMessage:
    return UMessageBuilder(attrs.PUBLISH, source, sink).build()


async def unheard(sender: Mqtt5Transport, *messages: Carried) -> list[bool]:
    statuses = await asyncio.wait_for(sender.send_batch(messages), DEADLINE_S)
    assert {status.code for status in statuses} <= {UCode.OK, UCode.UNAVAILABLE}
    assert sender.connected
    return [is_nobody_listening(status) for status in statuses]


async def test_a_subscription_counts_though_its_client_be_away_and_even_our_own(make_broker: Any) -> None:
    """mosquitto counts ours, though it never sends us what we have sent ourselves (No Local)."""
    broker = make_broker()
    heard, ours = Heard(), Heard()
    async with end(broker, "caller", "in-vehicle") as caller:
        caller.tells_absence = True
        assert await unheard(caller, publish(), publish(OTHER)) == [True, True]
        await caller.register_listener(OTHER, ours)
        assert await unheard(caller, publish(), publish(OTHER)) == [True, False]
        await caller.unregister_listener(OTHER, ours)
        vehicle = end(broker, "vehicle9", "in-vehicle", client_id="vehicle9", session_expiry_s=3_600)
        async with vehicle:
            await vehicle.register_listener(TOPIC, heard)
            assert await unheard(caller, publish(), publish(OTHER)) == [False, True]
        kept = publish()
        assert await unheard(caller, kept) == [False], "the broker keeps it for a client that is away"
        async with vehicle:
            ids = [(await asyncio.wait_for(heard.messages.get(), DEADLINE_S)).attributes.id for _ in range(2)]
            assert ids[1] == kept.attributes.id


async def test_off_vehicle_a_topic_is_of_two_authorities_and_only_its_publishes_wait(make_broker: Any) -> None:
    broker, sink = make_broker(), attrs.streamer_sink("vehicle9")
    async with end(broker, "caller", "off-vehicle") as caller:
        caller.tells_absence = True
        there = UMessageBuilder.notification(TOPIC, uris.parse("up://vehicle9/8001/1/0")).build()
        assert await unheard(caller, publish(TOPIC, sink), there, publish(OTHER, sink)) == [True, False, True]
        assert caller.address_of(TOPIC, sink) == caller.address_of(OTHER, sink) == "caller/vehicle9"


def test_an_address_is_the_topic_that_a_message_leaves_on() -> None:
    one = Mqtt5Transport(Mqtt5Config(mode="in-vehicle"), LocalUriProvider("caller", 0x10AB, 3))
    here = uris.parse("/10AB/3/80CD")
    for source in (TOPIC, here):
        for sink in (None, attrs.streamer_sink("vehicle9")):
            assert one.address_of(source, sink) == "caller/10AB/0/3/80CD"
        assert one.address_of(source, uris.parse("up://vehicle9/1/1/0")) == "caller/10AB/0/3/80CD/vehicle9/1/0/1/0"


@pytest.mark.parametrize("encoded", [False, True])
async def test_what_is_behind_an_unheard_publish_of_its_topic_is_not_sent(encoded: bool) -> None:
    """A subscriber that connects just then would get it first. Messages on other topics are sent."""
    async with answering() as broker:
        settings = Mqtt5Config(port=broker.port, in_flight_max=1)
        async with Mqtt5Transport(settings, LocalUriProvider("caller", 0x10AB, 3)) as caller:
            caller.tells_absence = True
            broker.topics[b"80CD"] = NO_MATCHING_SUBSCRIBERS
            batch: list[Carried] = [publish(topic) for topic in (TOPIC, OTHER) * 3]
            if encoded:
                batch = [EncodedMessage.of(one) for one in batch]
            for call in (1, 2):
                assert await unheard(caller, *batch) == [True, False] * 3
                assert broker.heard == {b"80CD": call, b"80CE": 3 * call}
            broker.topics.clear()
            assert await unheard(caller, *batch) == [False] * 6


async def test_a_later_call_does_not_overtake_messages_whose_result_is_not_reported_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transports.mqtt5.transport.CLOSE_DRAIN_MS_MAX", 0)
    async with answering() as broker:
        settings = Mqtt5Config(port=broker.port)
        async with Mqtt5Transport(settings, LocalUriProvider("caller", 0x10AB, 3)) as caller:
            caller.tells_absence = True
            assert await unheard(caller, *[publish()] * 8) == [False] * 8  # so that several may be in flight
            broker.topics[b"80CD"] = NO_MATCHING_SUBSCRIBERS
            broker.silent_about = b"80CE"
            first = asyncio.create_task(caller.send_batch([publish(), publish(OTHER)]))
            await asyncio.wait_for(broker.asked_in_vain.wait(), DEADLINE_S)
            assert await unheard(caller, publish()) == [True]
            assert broker.heard[b"80CD"] == 9
            assert not first.done()
        first_statuses = await asyncio.wait_for(first, DEADLINE_S)
        assert [is_nobody_listening(status) for status in first_statuses] == [True, False]


async def test_what_is_in_flight_is_answered_by_its_own_puback() -> None:
    """A request without listener is no failure of the network: nothing else waits."""
    async with answering() as broker:
        settings = Mqtt5Config(port=broker.port)
        async with Mqtt5Transport(settings, LocalUriProvider("caller", 0x10AB, 3)) as caller:
            broker.topics[b"80CD"] = NO_MATCHING_SUBSCRIBERS
            many = [publish(topic) for topic in (OTHER, TOPIC) * 50]
            assert await unheard(caller, *many) == [False] * 100, "nobody has asked"
            assert broker.heard[b"80CD"] == 50
            caller.tells_absence = True
            assert await unheard(caller, *many) == [False, True] * 50
            assert broker.heard[b"80CE"] == 100
            assert broker.connections == 1
