"""What a broker says of a message that it has no subscriber for, and what becomes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from transports.mqtt5 import Mqtt5Config, Mqtt5Transport
from transports.mqtt5.broker import Broker
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.encoded import EncodedMessage, Stamp, suffix
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError, is_nobody_listening
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

pytestmark = pytest.mark.broker

DEADLINE_S = 20
CLIENT = uris.parse("up://caller/10AB/3/0")
METHOD = uris.parse("up://vehicle9/8001/1/7")
CALLERS = uris.parse("up://*/FFFFFFFF/FF/0")
TOPIC = uris.parse("up://caller/10AB/3/80CD")


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
    """Only requests: that nobody hears a publish, a notification or a late response is no error. What is behind it is
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
        with pytest.raises(UStatusError) as told:
            await caller.send(request())
        assert is_nobody_listening(told.value.status)
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
            with pytest.raises(UStatusError) as told:
                await caller.send(request())
            assert is_nobody_listening(told.value.status)


async def test_a_caller_is_told_at_once(make_broker: Any) -> None:
    broker = make_broker()
    async with (
        end(broker, "caller", "in-vehicle") as caller,
        InMemoryRpcClient(caller, LocalUriProvider("caller", 0x10AB, 3)) as client,
    ):
        with pytest.raises(UStatusError) as told:
            await asyncio.wait_for(client.invoke_method(METHOD, None, CallOptions(timeout_ms=60_000)), DEADLINE_S)
        assert told.value.code == UCode.UNAVAILABLE
