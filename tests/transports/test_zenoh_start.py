"""A Zenoh endpoint subscribes before it is linked, so that no first messages are lost."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from tests.transports.test_zenoh_network import DEADLINE_S, end
from transports.conformance import Sink
from transports.conformance.messages import publish, topic
from transports.ports import free_port
from transports.zenoh import ZenohConfig


@pytest.mark.parametrize("mode", ["peer", "router"])
async def test_who_links_while_it_looks_for_somebody_else_is_heard(mode: str) -> None:
    """`open` waits for a peer that accepts a connection and never answers. Messages of a peer that connects to our port
    meanwhile arrive."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        port = free_port()
        connect = [f"tcp/127.0.0.1:{mute.getsockname()[1]}"]
        hub = end("hub", mode=mode, listen=[f"tcp/127.0.0.1:{port}"], connect=connect)
        sink = Sink(DEADLINE_S)
        assert not hub.register_before_open([(topic("alpha"), None)], sink)[0].code
        opening = asyncio.create_task(hub.open())
        try:
            async with end("alpha", mode="client", connect=[f"tcp/127.0.0.1:{port}"]) as alpha:
                await alpha.send_batch([publish(source=topic("alpha"))])
                await sink.expect(1)
                await opening  # somebody is linked
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            await hub.close()


@pytest.mark.parametrize(
    ("settings", "delay_ms"),
    [({"mode": "router"}, 0), ({"mode": "router", "settings": {"scouting/delay": 7}}, 7), ({"mode": "peer"}, None)],
)
def test_a_router_does_not_wait_between_opening_its_port_and_subscribing(
    settings: dict[str, Any], delay_ms: int | None
) -> None:
    """Zenoh's default is to sleep for 500 ms, in which it drops all that linked peers send."""
    made = ZenohConfig.model_validate(settings | {"listen": ["tcp/127.0.0.1:0"]}).to_zenoh()
    assert json.loads(made.get_json("scouting/delay")) == delay_ms
