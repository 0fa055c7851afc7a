"""What a gateway no longer records is no longer sent to it, and holds up nothing of what it does record."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.integration.conftest import Gateway
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import UTransport
from uprotocol.v1.uri_pb2 import UUri

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

MakeGateway = Callable[..., Awaitable[Gateway]]
SESSION = 'client_id = "gateway", session_expiry_s = 3600'
KEPT, GIVEN_UP = uris.parse("//cloud/8001/1/8001"), uris.parse("//cloud/8001/1/8002")
STALE = 3_000  # more than Receive Maximum: while they wait, the broker sends nothing else
SOON_S = 15  # far less than the 30 s that messages wait for a listener who may come


async def publish(node: UTransport, topic: UUri, count: int) -> None:
    for status in await node.send_batch(
        [UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"%d" % number, 6)) for number in range(count)]
    ):
        assert not status.code, status


def received(metrics: dict[str, float]) -> float:
    return metrics['received_total{endpoint="cloud"}']


def unwanted(metrics: dict[str, float]) -> float:
    return metrics.get('dropped_total{endpoint="cloud",reason="unwanted"}', 0)


async def test_what_is_taken_out_of_the_record_is_unsubscribed_at_the_next_start(
    make_gateway: MakeGateway, make_broker: Any
) -> None:
    broker = make_broker(persistent=True)
    more = f'[history]\nrecord = ["{uris.format(KEPT)}", "{uris.format(GIVEN_UP)}"]\n'
    gateway = await make_gateway(broker, "cloud", more=more, cloud=SESSION)
    await gateway.until_ready()
    cloud = await gateway.mqtt()
    await publish(cloud, GIVEN_UP, 10)
    await gateway.until(lambda found: received(found) == 10)
    assert gateway.child is not None
    await gateway.child.stop()
    text = gateway.config.read_text()
    gateway.config.write_text(text.replace(f', "{uris.format(GIVEN_UP)}"', ""))
    await publish(cloud, GIVEN_UP, STALE)
    await publish(cloud, KEPT, 5)
    await gateway.start()
    async with asyncio.timeout(SOON_S):
        await gateway.until(lambda found: received(found) == 5)
    await gateway.until(lambda found: unwanted(found) == STALE)
    await publish(cloud, GIVEN_UP, 50)
    await publish(cloud, KEPT, 5)
    found = await gateway.until(lambda found: received(found) == 10)
    assert unwanted(found) == STALE, "the broker sends it no longer"
