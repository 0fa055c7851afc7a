"""The HTTP edge is opened again by reloads: its clients and publishers come back, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from tests.streamer.conftest import make_world as make_world  # a fixture
from tests.streamer.test_reloading import DOOR, changed, publishing, reload
from transports.ports import free_port

RELOADS = 5


class Source:
    """As a browser: it connects again with the last id that it has seen."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url, self._last = http, url, ""
        self.texts: list[str] = []
        self.connections = 0

    async def run(self) -> None:
        while True:
            headers = {"Last-Event-ID": self._last} if self._last else {}
            try:
                async with self._http.get(self._url, headers=headers) as answer:
                    if answer.status == 200:
                        self.connections += 1
                        await self._read(answer)
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.02)

    async def _read(self, answer: aiohttp.ClientResponse) -> None:
        id = data = ""
        async for line in answer.content:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                id = value
            elif name == "data":
                data += value
            elif not name:
                self._last = id or self._last
                if data and "text" in (found := json.loads(data)):
                    self.texts.append(found["text"])
                id = data = ""


async def test_event_sources_go_on_where_they_were(make_world: Any) -> None:
    world = await make_world({"vehicle": "", "cloud": "none"}, {}, f'[history]\nrecord = ["{DOOR}"]\n')
    listen = f"127.0.0.1:{free_port()}"
    config = changed(world.config, http={"listen": listen, "keep_alive_s": 1})
    await reload(world, config)
    async with aiohttp.ClientSession() as http:
        source = Source(http, f"http://{listen}/stream?topic=up:{DOOR}&since=earliest")
        reading = asyncio.create_task(source.run())
        async with publishing(world) as accepted:
            for number in range(RELOADS):
                await world.until(lambda: source.connections > number)  # noqa: B023 - awaited here
                await reload(world, changed(config, http={"listen": listen, "keep_alive_s": 2 + number}))
        await world.until(lambda: source.texts[-1:] == accepted[-1:])
        reading.cancel()
        await asyncio.wait({reading})
    assert source.texts == accepted
    assert source.connections == RELOADS + 1


async def test_a_grip_publisher_that_repeats_what_was_not_answered_loses_nothing(make_world: Any) -> None:
    world = await make_world({"vehicle": "", "cloud": "none"}, {})
    listen, publish = (f"127.0.0.1:{free_port()}" for _ in range(2))
    topic = "//vehicle1/8001/1/8009"
    sections: dict[str, Any] = {
        "http": {"listen": listen},
        "channel": [{"name": "door", "topic": topic}],
    }
    config = changed(world.config, grip={"publish": publish}, **sections)
    await reload(world, config)
    done: list[str] = []

    async def run(http: aiohttp.ClientSession) -> None:
        for number in range(100_000):
            formats = {"http-stream": {"content": f"{number}\n"}}
            item = {"channel": "door", "id": str(number + 1), "prev-id": str(number), "formats": formats}
            while True:
                try:
                    async with http.post(f"http://{publish}/publish/", json={"items": [item]}) as answer:
                        if answer.status == 200:
                            break
                        assert answer.status == 503, await answer.text()
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.01)
            done.append(str(number))

    async with aiohttp.ClientSession() as http:
        publishing = asyncio.create_task(run(http))
        for number in range(RELOADS):
            count = len(done)
            await world.until(lambda: len(done) > count + 3)  # noqa: B023 - awaited here
            grip = {"publish": publish, "sequence_wait_s": 6 + number}
            assert await reload(world, changed(config, grip=grip, **sections))
        await world.until(lambda: len(done) > count + 10)
        publishing.cancel()
        await asyncio.wait({publishing})
    log = world.assembly.logs.durable
    await world.until(lambda: log.newest_seq >= len(done))
    chunks = await log.read(0)
    found = [message.payload.decode().strip() for chunk in chunks for message in chunk.messages]
    assert found[: len(done)] == done
