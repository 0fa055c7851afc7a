"""Requests to links that held streams share."""

from __future__ import annotations

import asyncio

import pytest

from streamer.grip.asking import SharedLinks
from streamer.grip.link import LinkAnswer, Links
from uprotocol.callbacks import Remove
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

ATTEMPTS = 3


class NoChannels:
    def last_id(self, name: str) -> str | None:
        raise AssertionError(name)

    def listen(self, name: str, on_item: object) -> Remove:
        raise AssertionError(name)


class Failing(Links):
    """A link that never answers. A second caller asks in the same turn of the event loop in which the first request
    fails."""

    def __init__(self) -> None:
        self.requests = 0
        self.shared: SharedLinks
        self.second: asyncio.Task[None] | None = None

    async def ask(self, url: str, last_ids: object, host: str = "") -> LinkAnswer:
        self.requests += 1
        if self.second is None:
            self.second = asyncio.create_task(ask_again(self.shared))
        raise UStatusError(UCode.UNAVAILABLE, "no answer")

    async def close(self) -> None:
        """Nothing to do."""


async def ask_again(shared: SharedLinks) -> None:
    for _ in range(ATTEMPTS):
        with pytest.raises(UStatusError, match="no answer"):
            await shared.ask("http://backend/", {})


async def test_a_caller_that_asks_again_gets_an_answer_of_its_own() -> None:
    """Else it would get the same failure again and again, without an end, and stop the event loop."""
    links = Failing()
    links.shared = SharedLinks(links, NoChannels(), Backoff(1, 2))
    await ask_again(links.shared)
    assert links.second is not None
    await links.second
    assert links.requests >= 1 + ATTEMPTS
    await links.shared.close()
