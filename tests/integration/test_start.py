"""The start of a real gateway while one of its networks never answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.tiers import full
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.umessage_pb2 import UMessage

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

SPEED = "//vehicle1/8001/1/8001"
SUBSCRIBED = {SPEED: ["//cloud/9001/1/0"]}
HUNG = """
[[endpoint]]
name = "hung"
transport = "mqtt5"
usubscription = "none"
authorities = ["mcu1"]
settings = {{ host = "127.0.0.1", port = {port} }}
"""
PERIOD_S = 1 / 17
MESSAGES = 17

MakeGateway = Callable[..., Awaitable[Any]]


def numbered(number: int) -> UMessage:
    return UMessageBuilder.publish(uris.parse(SPEED)).build_from_upayload(UPayload(b"%d" % number, 4))


@full
@pytest.mark.spec("local~disp-start-stop")
async def test_a_broker_that_never_answers_costs_the_other_networks_nothing_at_the_start(
    make_gateway: MakeGateway, make_broker: Any
) -> None:
    """A Zenoh publisher waits for the gateway, and publishes as soon as it is linked."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()  # connections are never accepted
        extra = HUNG.format(port=mute.getsockname()[1])
        gateway = await make_gateway(make_broker(), "vehicle cloud", SUBSCRIBED, extra=extra, start=False)
        heard = await gateway.hear(await gateway.mqtt(), uris.parse(SPEED))
        starting = asyncio.create_task(gateway.start())
        try:
            publisher = await gateway.zenoh()  # returns when linked
            for number in range(MESSAGES):
                await publisher.send(numbered(number))
                await asyncio.sleep(PERIOD_S)
            await heard.expect(MESSAGES)
            assert heard.payloads == [b"%d" % number for number in range(MESSAGES)]
        finally:
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting


async def test_a_healthy_start_and_stop_have_only_info_lines(make_gateway: MakeGateway, make_broker: Any) -> None:
    gateway = await make_gateway(make_broker(), "vehicle cloud", SUBSCRIBED, start=False)
    text = gateway.config.read_text().replace('log_level = "warning"', 'log_level = "info"\nlog_format = "json"')
    gateway.config.write_text(text)
    await gateway.start()
    await gateway.until_ready()
    assert await gateway.child.stop() == 0
    lines = [json.loads(line) for line in gateway.child.lines]
    events = [line for line in lines if "event" in line]
    assert [line for line in events if line["level"] != "info"] == [], gateway.child.lines
    first = events[0]
    assert first["event"] == "the streamer starts"
    assert first["core"] in ("compiled", "interpreted")
    assert (first["config"], first["admin"]) == (str(gateway.config), "127.0.0.1:0")
    assert first["data_dir"] == str(gateway.config.parent / "data")
    assert first["endpoints"] == ["vehicle", "cloud"]
    (ready,) = [line for line in events if line["event"] == "ready"]
    assert ready["admin_port"] == gateway.admin_port
    (stop,) = [line for line in events if line["event"] == "the streamer stops"]
    assert stop["why"] == "SIGTERM"
    assert events[-1]["event"] == "the streamer has stopped"
