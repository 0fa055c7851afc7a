"""The admin port against clients that don't know HTTP, or don't mean well."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from streamer import admin as admins

MakeWorld = Any


@pytest.fixture
async def port(make_world: MakeWorld) -> int:
    world = await make_world(start=False)
    section = world.config.streamer.model_copy(update={"admin": "127.0.0.1:0"})
    world.config = world.config.model_copy(update={"streamer": section})
    await world.start()
    opened: int = world.streamer.admin.port
    return opened


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", b"200"),
        (b"HEAD /readyz?verbose HTTP/1.0\r\nHost: x\r\n\r\n", b"200"),
        (b"GET /nowhere HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405"),
        (b"\r\n\r\n", b"405"),
        (b"\xff\xfe\x00 \x80\r\n\r\n", b"405"),
        (b"GET\r\n\r\n", b"404"),
    ],
)
async def test_every_request_has_an_answer(port: int, request_: bytes, status: bytes) -> None:
    answer = await ask(port, request_)
    assert answer.split()[1] == status
    assert b"Connection: close" in answer


async def test_who_sends_too_much_or_nothing_is_let_go_and_the_next_one_served(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await ask(port, b"GET /" + b"x" * (2 * admins.REQUEST_BYTES_MAX) + b" HTTP/1.1\r\n\r\n") == b""
    monkeypatch.setattr(admins, "REQUEST_TIMEOUT_S", 0.05)
    assert await ask(port, b"GET /healthz HT") == b""
    assert await ask(port, b"") == b""
    assert b"alive" in await ask(port, b"GET /healthz HTTP/1.1\r\n\r\n")


async def test_metrics_are_what_prometheus_reads(port: int) -> None:
    answer = (await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")).decode()
    body = answer.partition("\r\n\r\n")[2]
    families = {family.name: family for family in text_string_to_metric_families(body)}
    assert all(name.startswith("up_streamer_") for name in families)
    assert all(family.documentation for family in families.values())
    assert {"endpoint": "vehicle"} in [sample.labels for sample in families["up_streamer_received"].samples]
    assert re.search(r"^up_streamer_ready 1\.0$", body, re.MULTILINE)
