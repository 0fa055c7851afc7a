"""Reloads of a gateway under load, on real networks: nothing is lost or doubled, and what has not changed goes on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from streamer.operating.control import call
from tests.integration.conftest import Gateway, Hearer
from tools.broker import Broker
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import UTransport
from uprotocol.v1.uri_pb2 import UUri

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

MakeGateway = Callable[..., Awaitable[Gateway]]
SPEED, DOOR, ORDER = map(uris.parse, ("//vehicle1/8001/1/8001", "//vehicle1/8001/1/8002", "//cloud/9001/1/8001"))
RELOADS = 20
MQTT = 'mode = "in-vehicle", client_id = "reloaded", keep_alive_s = 10'
SUBSCRIBED = {
    uris.format(SPEED): ["//cloud/9001/1/0", "//mcu1/9001/1/0"],
    uris.format(ORDER): ["//vehicle1/8001/1/0"],
}


async def reload(gateway: Gateway, **replacements: str) -> list[str]:
    """Replaces text in the file, and has the gateway read it again."""
    text = gateway.config.read_text()
    for old, new in replacements.items():
        assert old in text
        text = text.replace(old, new)
    gateway.config.write_text(text)
    answer: Any = await asyncio.to_thread(call, gateway.config.parent / "data", "reload")
    assert answer["applied"]
    return list(answer["changes"])


def replace(old: str, new: str) -> dict[str, str]:
    return {old: new}


@contextlib.asynccontextmanager
async def publishing(node: UTransport, topic: UUri) -> AsyncIterator[list[bytes]]:
    """Publishes "0", "1", ... all the time; what is refused for now is sent again. Yields what was accepted; in the
    end, that is all that was sent, unless the last message was refused."""
    accepted: list[bytes] = []
    ends = asyncio.Event()

    async def run() -> None:
        for number in itertools.count():
            message = UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"%d" % number, 6))
            while not ends.is_set():
                try:
                    await node.send(message)
                    break
                except UStatusError:
                    await asyncio.sleep(0.05)
            else:
                return
            accepted.append(message.payload)
            await asyncio.sleep(0.002)

    task = asyncio.create_task(run())
    try:
        yield accepted
    finally:
        ends.set()
        await task


async def came(heard: Hearer, accepted: list[bytes]) -> None:
    await heard.until(lambda: len(heard.unique) >= len(accepted), f"{len(accepted)} messages")


def payloads(heard: Hearer) -> list[bytes]:
    return [one.payload for one in heard.messages]


async def test_an_mqtt_network_that_is_opened_again_under_load_loses_and_doubles_nothing(
    make_gateway: MakeGateway, make_broker: Callable[..., Broker]
) -> None:
    gateway = await make_gateway(make_broker(), "vehicle cloud", SUBSCRIBED, cloud=MQTT)
    vehicle, cloud = await gateway.zenoh(), await gateway.mqtt(mode="in-vehicle")
    speed, order = await gateway.hear(cloud, SPEED), await gateway.hear(vehicle, ORDER)
    await gateway.until_ready()
    async with publishing(vehicle, SPEED) as sent, publishing(cloud, ORDER) as ordered:
        await speed.until(lambda: len(speed.messages) > 20, "messages")
        await order.until(lambda: len(order.messages) > 20, "messages")
        for number in range(RELOADS):
            (shown,) = await reload(
                gateway, **replace(f"keep_alive_s = {10 + number}", f"keep_alive_s = {11 + number}")
            )
            assert shown == f"~ endpoint cloud: settings.keep_alive_s {10 + number} -> {11 + number}"
        await gateway.until_ready()
    await came(speed, sent)
    await came(order, ordered)
    assert payloads(speed)[: len(sent)] == sent  # the last one may have been refused
    assert payloads(order)[: len(ordered)] == ordered  # the last one may have been refused


async def test_what_waits_goes_to_the_broker_of_the_changed_file(
    make_gateway: MakeGateway, make_broker: Callable[..., Broker]
) -> None:
    """Another broker, with another password, while the first one is stopped."""
    first, second = make_broker(), make_broker(users={"gateway": "g", "cloud": "c"})
    gateway = await make_gateway(first, "vehicle cloud", SUBSCRIBED, cloud=MQTT)
    vehicle, at_first = await gateway.zenoh(), await gateway.mqtt(mode="in-vehicle")
    before = await gateway.hear(at_first, SPEED)
    gateway.broker = second
    after = await gateway.hear(await gateway.mqtt(mode="in-vehicle", username="cloud", password="c"), SPEED)
    await gateway.until_ready()
    async with publishing(vehicle, SPEED) as sent:
        await before.until(lambda: len(before.messages) > 20, "messages")
        first.stop()
        count = len(sent) + 1  # with the one that is being sent: the first broker may have taken it
        while len(sent) < count + 100:  # noqa: ASYNC110 - another task sends
            await asyncio.sleep(0.01)
        (shown,) = await reload(
            gateway,
            **replace(f"port = {first.port}", f'port = {second.port}, username = "gateway", password = "wrong"'),
        )
        assert "settings.password has changed" in shown
        await gateway.until_problems(lambda problems: [one for one in problems if "authori" in one.lower()])
        await reload(gateway, **replace('"wrong"', '"g"'))
        # what the first broker has for our session does not come
        await gateway.until_problems(
            lambda problems: ["has not resumed the session" in one for one in problems] == [True]
        )
    # what the first broker had taken when it was stopped is its own
    await after.until(lambda: set(after.unique) >= set(sent[count:]), "everything from then on")
    assert {int(one) for one in sent} - {int(one) for one in (*before.unique, *after.unique)} <= set(range(count))
    assert len(payloads(after)) == len(after.unique)
    assert after.unique == sorted(after.unique, key=int)


async def test_zenoh_and_dds_are_opened_again_and_the_others_go_on(
    make_gateway: MakeGateway, make_broker: Callable[..., Broker]
) -> None:
    gateway = await make_gateway(
        make_broker(), "vehicle cloud mcu", SUBSCRIBED, cloud=MQTT, vehicle="connect_timeout_ms = 20_000"
    )
    vehicle, cloud, mcu = await gateway.zenoh(), await gateway.mqtt(mode="in-vehicle"), await gateway.dds()
    at_cloud, at_mcu = await gateway.hear(cloud, SPEED), await gateway.hear(mcu, SPEED)
    order = await gateway.hear(vehicle, ORDER)
    await gateway.until_ready()
    async with publishing(vehicle, SPEED) as sent:
        await at_mcu.until(lambda: len(at_mcu.messages) > 20, "messages")
        for number in range(3):
            old, new = f'tag = "{gateway.dds_tag}"', f'tag = "{gateway.dds_tag}", lease_ms = {5_000 + number}'
            text = gateway.config.read_text()
            (shown,) = await reload(gateway, **replace(old, new))
            assert shown.startswith("~ endpoint mcu: settings.lease_ms")
            gateway.config.write_text(text)
            newest = sent[-1]
            await at_mcu.until(lambda: newest in at_mcu.unique, "the newest")  # noqa: B023 - awaited here
        await came(at_cloud, sent[:-1])
    await came(at_mcu, sent)
    await came(at_cloud, sent)
    assert payloads(at_cloud)[: len(sent)] == sent, "its network was not touched"
    assert payloads(at_mcu)[: len(sent)] == sent  # the last one may have been refused
    async with publishing(cloud, ORDER) as ordered:
        await order.until(lambda: len(order.messages) > 20, "messages")
        for number in range(3):
            await reload(
                gateway,
                **replace(f"connect_timeout_ms = 20_00{number}", f"connect_timeout_ms = 20_00{number + 1}"),
            )
        await gateway.until_ready()
        newest = ordered[-1]
        await order.until(lambda: int(order.messages[-1].payload) > int(newest), "newer messages")
    await came(order, ordered)
    assert payloads(order)[: len(ordered)] == ordered  # the last one may have been refused
