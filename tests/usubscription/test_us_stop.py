"""Stopping works in any turn of the event loop, together with any answer."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import Any

import pytest

from uprotocol import uri as uris
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.transport import LocalUriProvider
from usubscription_client import ServiceInterest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "uprotocol",
    "transports",
    "history",
    "usubscription",
    "usubscription_client",
    "streamer",
    "spark_ingest",
    "pyspark_uprotocol",
)
STOP_S = 20  # only a failure takes that long
FAR = uris.parse("//b/20/1/8001")


async def settled(turns: int = 50) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


@pytest.mark.parametrize("part", ["expirer", "auditor", "troubles", "pump", "interest"])
async def test_a_cancellation_that_meets_the_news_ends_the_task(world: Any, part: str) -> None:
    """In the same turn of the event loop, which asyncio.wait_for of Python 3.11 takes for a result."""
    service = await world.service("a")
    await settled()
    async with asyncio.timeout(STOP_S):
        match part:
            case "expirer":
                service._expiry_news.set()
                await service.halt()
            case "auditor":
                service.remote.auditor._wake.set()
                await service.remote.auditor.stop()
            case "troubles":
                service.notifier.troubles.begin("b")
                service.notifier.troubles.retry_now()
                await service.notifier.troubles.stop()
            case "pump":
                service.notifier._news.set()
                await service.notifier.stop()
            case "interest":
                interest = ServiceInterest(await world.transport("a", 0x77), LocalUriProvider("a", 0x77, 1), "a")
                await interest.start()
                await settled()
                interest._news.set()
                await interest.stop()
        await world.stop("a")


@pytest.mark.parametrize("turns", range(0, 120, 3))
async def test_it_stops_at_any_turn_of_an_answer(world: Any, turns: int) -> None:
    await world.service("b")
    await world.service("a")
    raw = await world.raw("a")
    call = asyncio.ensure_future(raw.call(4, 1, v4.SubscribeRequest(topic=FAR)))
    await settled(turns)
    async with asyncio.timeout(STOP_S):
        await world.stop("a")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    service = await world.service("a")
    rows = await service.subscriptions()
    assert len(rows) <= 1
    async with asyncio.timeout(STOP_S):
        while rows and rows[0].status.name != "SUBSCRIBED":
            await asyncio.sleep(0.01)
            rows = await service.subscriptions()


def test_nothing_waits_with_wait_for() -> None:
    """In Python 3.11 it loses a cancellation in the same turn as the result; asyncio.timeout does not."""
    files = [
        path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "conformance" not in path.parts
    ]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "wait_for" and getattr(node.value, "id", "") == "asyncio"
    ]
    assert not found, found
