"""What an EventSource of a real browser does with each of the edge's answers: go on, come back, or give up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from streamer.config.edge import HttpSection
from tests.edge.chromium import Chromium
from tests.edge.test_streams import World, becomes
from tests.tiers import full
from uprotocol.v1.uri_pb2 import UUri

pytestmark = full

TOPIC = "topic=//vehicle/20/1/8001"
OPEN = """
    window.found = []; window.errors = 0;
    window.source = new EventSource('/stream?%s');
    source.onmessage = event => found.push(JSON.parse(event.data).text);
    source.addEventListener('gap', event => found.push('gap ' + JSON.parse(event.data).reason));
    source.onerror = () => errors++;
"""
CLOSED = "source.readyState === EventSource.CLOSED"


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Chromium]:
    async with Chromium(tmp_path / "browser") as browser:
        yield browser


async def opened(world: World, browser: Chromium, query: str) -> None:
    await browser.open(world.url("/nothing"))  # a page of the same origin
    await browser.evaluate(OPEN % query + "true")


async def has_found(browser: Chromium, *texts: str) -> None:
    await browser.until(f"JSON.stringify(found) === {json.dumps(json.dumps(texts, separators=(',', ':')))}")


async def test_it_goes_on_by_itself_with_its_last_id(tmp_path: Path, browser: Chromium) -> None:
    world = World()
    await world.start(tmp_path / "log")
    try:
        await world.publish("1")
        await opened(world, browser, TOPIC + "&since=earliest")
        await has_found(browser, "1")
        for number in range(2, 5):
            world.cut()
            await world.publish(str(number))
            await has_found(browser, *map(str, range(1, number + 1)))
        assert await browser.evaluate("errors") >= 3
    finally:
        await world.finish()


async def test_a_gap_is_an_event_and_the_stream_goes_on(tmp_path: Path, browser: Chromium) -> None:
    world = World()
    await world.start(None, retention_bytes=60_000)
    try:
        await world.publish("0")
        _, page = await world.get(f"{TOPIC}&since=earliest&mode=poll")
        for number in range(1, 150):
            await world.publish(f"{number} " + "x" * 1_000)
        await becomes(lambda: world.logs[0].floor_seq > 5)
        await opened(world, browser, f"{TOPIC}&since={page['next']}")
        await browser.until("found[0] === 'gap retention' && found.length > 1")
        assert await browser.evaluate("source.readyState") == 1
    finally:
        await world.finish()


async def test_overload_makes_it_come_back(tmp_path: Path, browser: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamer.edge.streams.RETRY_MS", 100)
    world = World()
    await world.start(tmp_path / "log", HttpSection(clients_max=1))
    try:
        await world.publish("1")
        async with world.reader() as first:
            await first.until_id()
            await opened(world, browser, TOPIC + "&since=earliest")
            await browser.until("errors >= 2")
            assert not await browser.evaluate(CLOSED)
        await has_found(browser, "1")
    finally:
        await world.finish()


@pytest.mark.parametrize("status", [400, 401, 403, 404])
async def test_what_the_client_has_to_change_ends_it(tmp_path: Path, browser: Chromium, status: int) -> None:
    world = World()
    await world.start(tmp_path / "log")

    async def refuse(request: web.Request) -> UUri:
        raise {401: web.HTTPUnauthorized, 403: web.HTTPForbidden, 404: web.HTTPNotFound}[status]

    try:
        if status != 400:
            world.callers.of = refuse  # type: ignore[method-assign]
        await opened(world, browser, "topic=nonsense" if status == 400 else TOPIC)
        await browser.until(CLOSED)
        assert await browser.evaluate("errors") == 1
    finally:
        await world.finish()


async def test_the_end_of_the_edge_makes_it_come_back(tmp_path: Path, browser: Chromium) -> None:
    world = World()
    await world.start(tmp_path / "log")
    try:
        await opened(world, browser, TOPIC + "&since=earliest")
        await browser.until("source.readyState === 1")
        world.streams.close()
        await browser.until("errors >= 1")
        await world.publish("1")
        await has_found(browser, "1")
    finally:
        await world.finish()
