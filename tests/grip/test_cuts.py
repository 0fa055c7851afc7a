"""Many clients of one backend of deltas, under losses, cuts and failing links: each number comes once, in order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from aiohttp import web

from tests.grip.held_parties import CHANNEL, WAIT_S, Curl, Edge, serve, stream_item
from tests.tiers import seeds

CLIENTS, NUMBERS = 20, 60


class Deltas:
    """Answers the numbers after the one that it is asked for; its link fails sometimes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.newest = 0
        self.failed = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        last = request.headers.get("Grip-Last")
        if last is None:
            after = int(request.query["after"])
        else:
            after = int(last.partition("last-id=")[2])
            if self._rng.random() < 0.3:
                self.failed += 1
                return web.Response(status=503)
        newest = self.newest
        await asyncio.sleep(self._rng.random() / 200)  # read then, answered now
        headers = {"Grip-Hold": "stream", "Grip-Channel": f"{CHANNEL}; prev-id={newest}"}
        headers["Grip-Link"] = "</link>; rel=next; timeout=1"
        return web.Response(text="".join(f"{one}\n" for one in range(after + 1, newest + 1)), headers=headers)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(12, 2))
async def test_each_client_gets_each_number_once(seed: int) -> None:
    rng = random.Random(seed)
    backend = Deltas(rng)
    runner, port = await serve(backend.answer)
    edge = await Edge.open(port)
    counts = Counter[str]()

    async def client() -> list[int]:
        """Reconnects behind what it has, until it has all."""
        got: list[int] = []
        while len(got) < NUMBERS:
            curl: Curl = await edge.curl(f"/numbers?after={len(got)}")
            lasts_s = rng.choice([0.05, 0.3, WAIT_S])
            try:
                async with asyncio.timeout(lasts_s):
                    while len(got) + curl.body.count(b"\n") < NUMBERS and await curl._more():
                        pass
            except TimeoutError:
                counts["cuts"] += 1
            curl.cut()
            got += [int(line) for line in curl.body.decode().rpartition("\n")[0].splitlines()]
        return got

    async def publish() -> None:
        for number in range(1, NUMBERS + 1):
            backend.newest = number
            await asyncio.sleep(rng.choice([0, 0, 0.01, 0.03]))
            if rng.random() < 0.3:
                counts["lost"] += 1
            else:
                edge.channels.publish(stream_item(f"{number}\n".encode(), str(number), str(number - 1)))

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    await publish()
    async with asyncio.timeout(60):
        for got in await asyncio.gather(*clients):
            assert got == list(range(1, NUMBERS + 1)), counts
    await edge.held(0)
    await edge.close()
    await runner.cleanup()
    print(f"{CLIENTS} clients, {NUMBERS} numbers, {dict(counts)}, {backend.failed} failed recoveries")
