"""`up-streamer check --connect` beside a gateway that carries messages: nobody notices it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.integration.conftest import Gateway
from tools.broker import Broker
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload

pytestmark = [pytest.mark.timeout(240), pytest.mark.broker]

MakeBroker = Callable[..., Broker]
MakeGateway = Callable[..., Awaitable[Gateway]]
TOPIC = uris.parse("//vehicle1/8001/1/8001")
CHECKS = 20
PAUSE_S = 0.01


async def checked(config: Any) -> list[str]:
    """The lines of one check, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "streamer.commands.cli",
        "check",
        "-c",
        str(config),
        "--connect",
        "--timeout",
        "60",
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return output.decode().splitlines()


@pytest.mark.parametrize("mode", ["in-vehicle", "off-vehicle"])
async def test_a_check_disturbs_nobody(
    make_broker: Callable[..., Broker], make_gateway: MakeGateway, mode: str
) -> None:
    broker, subscribed = make_broker(), {uris.format(TOPIC): ["up://cloud/9001/1/0"]}
    cloud = f'client_id = "gateway", mode = "{mode}"'
    gateway = await make_gateway(broker, "vehicle cloud", subscribed, cloud=cloud)
    node, vehicle = await gateway.mqtt(mode=mode), await gateway.zenoh()
    away: list[bool] = []
    node.on_connection(away.append)
    everything = (uris.ANY, uris.pattern("cloud")) if mode == "off-vehicle" else (TOPIC, None)
    heard = await gateway.hear(node, *everything)
    await gateway.until_ready()
    before = await gateway.metrics()
    sent = 0
    ended = asyncio.Event()

    async def publish() -> None:
        nonlocal sent
        while not ended.is_set():
            await vehicle.send(UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b"%d" % sent, 6)))
            sent += 1
            await asyncio.sleep(PAUSE_S)

    publishing = asyncio.create_task(publish())
    for _ in range(CHECKS // 2):
        for lines in await asyncio.gather(*(checked(gateway.config) for _ in range(2))):
            assert "ok cloud: login without a user name" in lines, lines
            assert "ok cloud: client_id gateway is held by the running streamer" in lines, lines
            assert any(line.startswith("ok cloud: may write vehicle1") for line in lines), lines
            assert any(line.startswith("ok vehicle: 127.0.0.1:") and "in use" in line for line in lines), lines
            assert not [line for line in lines if line.startswith("FAIL")], lines
    ended.set()
    await publishing
    await heard.until(lambda: len(heard.messages) >= sent, f"{sent} messages")
    assert [one.payload for one in heard.messages] == [b"%d" % number for number in range(sent)]
    after = await gateway.metrics()
    dropped = {name: count for name, count in after.items() if "dropped" in name or "dead_letter" in name}
    assert dropped == {name: before.get(name, 0) for name in dropped}
    assert (away, await gateway.problems()) == ([], [])
    assert gateway.child is not None
