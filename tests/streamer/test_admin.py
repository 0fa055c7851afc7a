"""The admin port against clients that don't know HTTP, or don't mean well."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
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


async def test_who_sends_too_much_or_nothing_is_let_go_and_the_next_one_served(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_who_asks_without_end_takes_a_tenth_of_the_loop_and_gets_no_list_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that only making an answer moves."""
    now, made = 1_000.0, []
    monkeypatch.setattr(admins, "time", SimpleNamespace(perf_counter=lambda: now))

    def metrics() -> bytes:
        nonlocal now
        now += 0.05
        made.append(now)
        return b"metrics"

    def vehicles() -> Iterator[dict[str, int]]:
        nonlocal now
        for number in range(2 * admins.VEHICLES_AT_ONCE):
            now += 0.001
            yield {"vehicle": number}

    admin = admins.Admin("127.0.0.1:0", lambda: ["wrong " * 1_000] * 1_000, metrics, lambda: ["a note"], vehicles)
    for _ in range(4):
        assert b"".join(admin._answer("GET /metrics HTTP/1.1")).endswith(b"metrics")
    assert len(made) == 4, "who asks now and then gets what is so now"
    for _ in range(10_000):
        assert b"".join(admin._answer("GET /metrics HTTP/1.1")).endswith(b"metrics")
        now += 0.001
    assert len(made) * 0.05 <= admins.LOOP_SHARE * (now - 1_000.0) + admins.LOOP_S_MAX + 0.05
    assert len(made) > 10
    now += 60
    first = b"".join(admin._answer("GET /vehicles HTTP/1.1"))
    assert first.count(b"\n{") == 2 * admins.VEHICLES_AT_ONCE
    assert b"503" in b"".join(admin._answer("GET /vehicles HTTP/1.1"))
    assert b"".join(admin._answer("GET /metrics HTTP/1.1")).endswith(b"metrics")
    now += 20
    assert b"200 OK" in next(admin._answer("GET /vehicles HTTP/1.1"))
    told = json.loads(b"".join(admin._answer("GET /readyz HTTP/1.1")).partition(b"\r\n\r\n")[2])
    assert len(told["problems"]) == admins.LINES_TOLD_MAX + 1
    assert told["problems"][-1] == f"and {1_000 - admins.LINES_TOLD_MAX} more"
    assert max(map(len, told["problems"])) == admins.LINE_CHARACTERS_MAX + 3
    assert told["notes"] == ["a note"]


async def test_connections_beyond_the_limit_are_closed_and_then_there_is_room_again(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admins, "CONNECTIONS_MAX", 3)
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    assert await ask(port, b"GET /healthz HTTP/1.1\r\n\r\n") == b""
    for _, writer in idle:
        writer.close()
    async with asyncio.timeout(20):
        while b"alive" not in await ask(port, b"GET /healthz HTTP/1.1\r\n\r\n"):
            pass
