"""Topic filters of a gateway at its broker: filters that are no longer wanted, and one that the broker forbids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.conftest import Gateway
from tests.transports.mqtt5_proxy import RefusingProxy
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import UTransport
from uprotocol.v1.uri_pb2 import UUri

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

MakeGateway = Callable[..., Awaitable[Gateway]]
SESSION = 'client_id = "gateway", session_expiry_s = 3600'
KEPT, GIVEN_UP = uris.parse("//cloud/8001/1/8001"), uris.parse("//cloud/8001/1/8002")
FORBIDDEN = uris.parse("//cloud/8001/1/8003")
STALE = 3_000  # more than Receive Maximum: while they are unacknowledged, the broker sends nothing else
SOON_S = 15  # far less than the 30 s that messages wait for a late listener


async def publish(node: UTransport, topic: UUri, count: int) -> None:
    for status in await node.send_batch(
        [UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"%d" % number, 6)) for number in range(count)]
    ):
        assert not status.code, status


def received(metrics: dict[str, float]) -> float:
    return metrics['received_total{endpoint="cloud"}']


def unwanted(metrics: dict[str, float]) -> float:
    return metrics.get('dropped_total{endpoint="cloud",reason="unwanted"}', 0)


async def until_left(gateway: Gateway, topic_filter: str) -> None:
    """Waits until the broker has confirmed that it removed this filter."""
    file = gateway.config.with_name("data") / "endpoint-cloud.json"
    async with asyncio.timeout(SOON_S):
        while topic_filter in json.loads(file.read_text())["filters"]:  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.1)


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
    await until_left(gateway, "cloud/8001/0/1/8002")
    await publish(cloud, GIVEN_UP, 50)
    await publish(cloud, KEPT, 5)
    found = await gateway.until(lambda found: received(found) == 10)
    assert unwanted(found) == STALE, "the broker sends it no longer"


@pytest.mark.full
@pytest.mark.parametrize("hangs_up", [False, True])
async def test_a_subscription_that_the_broker_forbids_costs_no_other(
    make_gateway: MakeGateway, make_broker: Any, hangs_up: bool
) -> None:
    """A client that may subscribe can name such a topic."""
    broker, subscriber = make_broker(), "//vehicle1/9001/1/0"
    proxy = RefusingProxy(broker.host, broker.port)
    await proxy.start()
    if hangs_up:
        proxy.disconnects_on.add("cloud/8001/0/1/8003")
    else:
        proxy.refused["cloud/8001/0/1/8003"] = 0x97
    subscriptions = {uris.format(topic): [subscriber] for topic in (FORBIDDEN, KEPT)}
    gateway = await make_gateway(SimpleNamespace(host=broker.host, port=proxy.port), "vehicle cloud", subscriptions)
    await gateway.until_problems(lambda found: [one for one in found if "cloud/8001/0/1/8003" in one])
    connections = 3 if hangs_up else 1
    await gateway.until(lambda found: found['connected{endpoint="cloud"}'] and proxy.connections() == connections)
    heard = await gateway.hear(await gateway.zenoh(), KEPT)
    cloud = await gateway.node("mqtt5", "cloud", {"port": broker.port}, 0x8001)
    async with asyncio.timeout(SOON_S):
        while not heard.messages:  # filters are requested one by one, so it may arrive shortly after the error
            await publish(cloud, KEPT, 1)
            await asyncio.sleep(0.1)
    for _ in range(2):
        proxy.cut()
        await gateway.until(lambda found: not found['connected{endpoint="cloud"}'])
        proxy.mend()
        await gateway.until(lambda found: found['connected{endpoint="cloud"}'])
        await gateway.until_problems(lambda found: any("8003" in one for one in found))
    connections = proxy.connections()
    before = len(heard.messages)
    await publish(cloud, KEPT, 5)
    await heard.expect(before + 5)
    assert proxy.connections() == connections
    await proxy.stop()
