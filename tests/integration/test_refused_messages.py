"""A broker that refuses the messages of one topic repeatedly: the other topics continue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.conftest import Gateway
from tests.transports.mqtt5_answering import answering
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

MakeGateway = Callable[..., Awaitable[Gateway]]
BAD, GOOD = uris.parse("//vehicle1/8001/1/8001"), uris.parse("//vehicle1/8001/1/8002")


@pytest.mark.parametrize(("reason", "is_dead"), [(0x95, True), (0x83, False)])
async def test_a_topic_that_a_broker_refuses_stops_no_other(
    make_gateway: MakeGateway, reason: int, is_dead: bool
) -> None:
    """A permanent refusal makes each message a dead letter. After a temporary one only this topic waits."""
    async with answering() as broker:
        broker.topics[b"8001"] = reason
        place: Any = SimpleNamespace(host="127.0.0.1", port=broker.port)
        subscriptions = {uris.format(topic): ["//cloud/9001/1/0"] for topic in (BAD, GOOD)}
        gateway = await make_gateway(place, "vehicle cloud", subscriptions)
        node = await gateway.zenoh()
        for number in range(20):
            for topic in (BAD, GOOD):
                payload = UPayload(b"%d" % number, 6)
                await node.send(UMessageBuilder.publish(topic).build_from_upayload(payload))
            await asyncio.sleep(0.02)
        name = 'forwarded_total{endpoint="cloud"}'
        found = await gateway.until(lambda found: found[name] == 20)
        assert broker.heard[b"8002"] == 20
        dead = 'dropped_total{endpoint="cloud",reason="undeliverable"}'
        if is_dead:
            await gateway.until(lambda found: found.get(dead) == 20)
        else:
            assert not found.get(dead)
        assert broker.connections == 1
