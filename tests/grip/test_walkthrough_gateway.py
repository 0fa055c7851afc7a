"""The walkthrough with a whole gateway: curl at http.listen, a publisher at grip.publish, the record in the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from streamer.parts.edge import EdgePart
from tests.grip.held_parties import CHANNEL, HOST, WAIT_S, Backend, Curl, last, until
from uprotocol import uri as uris
from uprotocol.v1.umessage_pb2 import UMessage

TOPIC = uris.parse("//cloud/8001/1/8001")
HELLO = '{"text": "hello"}\n'
SETTINGS = """[http]
listen = "127.0.0.1:0"
[grip]
publish = "127.0.0.1:0"
sequence_wait_s = {wait_s}
[[channel]]
name = "reliable-stream"
topic = "//cloud/8001/1/8001"
[[proxy]]
prefix = "/reliable-stream"
backend = "http://127.0.0.1:{port}"
timeout_s = 5
"""

World = Any


class Party:
    """The backend, the gateway before it, the publisher, and who holds connections."""

    def __init__(self, world: World, backend: Backend, session: aiohttp.ClientSession) -> None:
        self.world, self.backend, self._session = world, backend, session
        self._curls: list[Curl] = []

    async def curl(self) -> Curl:
        self._curls.append(await Curl.get(self.world.parts.of(EdgePart).port))
        return self._curls[-1]

    async def held(self, count: int) -> None:
        await until(lambda: self.world.parts.of(EdgePart).places.count["held_stream"] == count)

    def write(self, text: str) -> dict[str, object]:
        """Returns the item of the new value, to be published."""
        prev_id = self.backend.id
        self.backend.write(text)
        ids = {"id": self.backend.id, "prev-id": prev_id}
        return {"channel": CHANNEL, **ids, "formats": {"http-stream": {"content": text}}}

    async def publish(self, *items: dict[str, object]) -> None:
        url = f"http://{HOST}:{self.world.parts.of(EdgePart).publish_port}/publish/"
        async with self._session.post(url, json={"items": list(items)}) as answer:
            assert (answer.status, await answer.text()) == (200, "Published\n")

    async def recorded(self) -> list[str]:
        log = self.world.assembly.logs.of(TOPIC)
        messages = [UMessage.FromString(data) for chunk in await log.read(0) for data in chunk.data]
        return [one.payload.decode() for one in messages if one.attributes.source == TOPIC]

    def close(self) -> None:
        for curl in self._curls:
            curl.cut()


@pytest.fixture
async def party(make_world: Any, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Party]:
    backend = Backend(tmp_path / "data.json")
    backend.write(HELLO)
    await backend.open()
    settings = SETTINGS.format(port=backend.port, wait_s=getattr(request, "param", 0.1))
    world = await make_world({"cloud": "none"}, more=settings)
    async with aiohttp.ClientSession() as session:
        made = Party(world, backend, session)
        yield made
        made.close()
    await world.stop()
    await backend.close()


async def test_a_stream_its_gap_and_its_record(party: Party) -> None:
    """The record has what was published; the client has what was lost as well."""
    curl = await party.curl()
    await curl.until(HELLO)
    await party.held(1)
    await party.publish(party.write("1\n"))
    await curl.until("1\n")
    known = party.backend.id
    party.write("lost\n")
    item = party.write("3\n")
    await party.publish(item)
    await curl.until("3\n")
    async with asyncio.timeout(WAIT_S):
        assert await party.backend.links.get() == last(known)
    await party.publish(item)
    await party.publish(party.write("1\n"))
    await curl.until("1\n")
    assert curl.body.decode() == HELLO + "1\n3\n1\n"
    assert await party.recorded() == ["1\n", "3\n", "1\n"]
    assert "grip" not in curl.head.lower()


@pytest.mark.parametrize("party", [60], indirect=True, ids=["wait=60"])
async def test_items_in_another_order_need_no_link(party: Party) -> None:
    curl = await party.curl()
    await curl.until(HELLO)
    await party.held(1)
    first, second, third = (party.write(f"{number}\n") for number in (1, 2, 3))
    await party.publish(first)
    later = asyncio.create_task(party.publish(third))
    await asyncio.sleep(0.05)
    await party.publish(second)
    await later
    await curl.until("3\n")
    assert curl.body.decode() == HELLO + "1\n2\n3\n"
    assert party.backend.links.empty()


async def test_cuts_of_the_gateway(party: Party) -> None:
    """Its clients come back; what was published or lost meanwhile, they have. The last id is that of before."""
    got: list[str] = []
    for cut in range(3):
        curl = await party.curl()
        await curl.until("\n")
        await party.held(1)
        await party.publish(party.write(f"value {cut}\n"))
        await curl.until(f"value {cut}\n")
        got += curl.lines
        await party.world.stop()
        await curl.until_end()
        assert not curl.is_whole
        party.write(f"missed {cut}\n")
        await party.world.start()
    curl = await party.curl()
    await curl.until("missed 2\n")
    values = [HELLO.strip(), *(f"{what} {cut}" for cut in range(3) for what in ("value", "missed"))]
    assert [*got, *curl.lines] == values
    assert await party.recorded() == [f"value {cut}\n" for cut in range(3)]
    assert not party.world.parts.problems()
