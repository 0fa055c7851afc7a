"""Pause and Resume on a real gateway: from the command line, across a kill, between two brokers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from streamer.commands.demo.drive import send_all
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

SPEED, DOOR = "//vehicle1/8001/1/8001", "//vehicle1/8001/1/8002"
SUBSCRIBED = {SPEED: ["//cloud/9001/1/0"], DOOR: ["//cloud/9001/1/0"]}
SESSION = 'client_id = "gateway", session_expiry_s = 3600'
INSIDE = """
[[endpoint]]
name = "inside"
transport = "mqtt5"
authorities = ["vehicle1"]
settings = {{ host = "127.0.0.1", port = {port}, {session} }}
"""

MakeGateway = Callable[..., Awaitable[Any]]


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def numbered(topic: UUri, first: int, end: int) -> list[UMessage]:
    return [UMessageBuilder.publish(topic).build_from_upayload(UPayload(text, 4)) for text in numbers(first, end)]


async def said(gateway: Any, *arguments: str) -> list[dict[str, str]]:
    """Returns what the command line prints in its own process."""
    command = [sys.executable, "-m", "streamer.commands.cli", *arguments, "--config", str(gateway.config), "--json"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.spec("local~disp-start-stop")
async def test_a_paused_topic_waits_over_a_kill_and_comes_in_order(make_gateway: MakeGateway, make_broker: Any) -> None:
    inside, outside = make_broker(persistent=True), make_broker(persistent=True)
    gateway = await make_gateway(outside, "cloud", SUBSCRIBED, extra=INSIDE.format(port=inside.port, session=SESSION))
    app = await gateway.mqtt()
    speed, door = await gateway.hear(app, uris.parse(SPEED)), await gateway.hear(app, uris.parse(DOOR))
    publisher = await gateway.node("mqtt5", "vehicle1", {"host": inside.host, "port": inside.port}, 0x8001)

    async def publish(first: int, end: int) -> None:
        for topic in (SPEED, DOOR):
            await send_all(publisher, numbered(uris.parse(topic), first, end))

    async def door_heard(end: int) -> None:
        await gateway.until(lambda _: door.unique == numbers(0, end))

    held = [{"topic": f"up:{SPEED}", "peer": "cloud"}]
    await publish(0, 50)
    await door_heard(50)
    await speed.expect(50)
    assert await said(gateway, "pause", SPEED, "cloud") == held
    await publish(50, 100)
    await door_heard(100)
    readiness = json.loads(await asyncio.to_thread(gateway._get, "/readyz"))
    notes = [note for note in readiness["notes"] if "is new since" not in note]
    assert notes == [f"paused: up:{SPEED} to cloud; what comes waits in the log"]
    assert not [problem for problem in readiness["problems"] if "paused" in problem]
    assert (await gateway.metrics())['paused{peer="cloud"}'] == 1
    await gateway.child.kill()
    await publish(100, 150)
    assert await said(gateway, "paused") == (await said(gateway, "check"))[0]["paused"] == held, "the streamer is down"
    await gateway.start()
    await door_heard(150)
    assert speed.unique == numbers(0, 50)
    sending = asyncio.create_task(publish(150, 200))
    assert await said(gateway, "resume", "//vehicle1/8001/1/FFFF", "cloud") == []
    await sending
    await door_heard(200)
    await gateway.until(lambda _: len(speed.unique) >= 200)
    assert speed.unique == numbers(0, 200)
