"""How signals and hanging brokers affect the process, and its end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tools.broker import Broker

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

MakeGateway = Callable[..., Awaitable[Any]]
STOP_S_MAX = 9.0  # 5 s are promised, containers are killed after 10; a busy machine needs more

HUNG = """
[[endpoint]]
name = "{name}"
transport = "mqtt5"
authorities = ["{name}"]
usubscription = "none"
settings = {{ host = "127.0.0.1", port = {port}, client_id = "{name}" }}
"""


async def never_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(4_096):
        pass
    writer.close()


async def test_two_hung_brokers_hold_up_neither_the_start_nor_the_end(
    make_gateway: MakeGateway, broker: Broker
) -> None:
    servers = [await asyncio.start_server(never_answers, "127.0.0.1", 0) for _ in range(2)]
    hung = "".join(
        HUNG.format(name=f"hung{n}", port=server.sockets[0].getsockname()[1]) for n, server in enumerate(servers)
    )
    gateway = await make_gateway(broker, "vehicle cloud", {}, extra=hung)
    problems = await gateway.problems()
    assert [problem for problem in problems if "hung0" in problem]
    assert [problem for problem in problems if "hung1" in problem]
    began = time.monotonic()
    await gateway.child.stop()
    assert time.monotonic() - began < STOP_S_MAX
    for server in servers:
        server.close()


async def test_a_hangup_ends_nothing(make_gateway: MakeGateway, broker: Broker) -> None:
    gateway = await make_gateway(broker, "vehicle cloud", {})
    gateway.child.process.send_signal(signal.SIGHUP)
    await gateway.until_ready()
    gateway.child.require_running()
