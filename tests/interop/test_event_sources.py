"""EventSource in Node.js (npm), against GET /stream: it goes on after a restart, and gives up where it should."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.edge.test_streams import World
from tests.interop.test_grip_js import HERE, folder
from transports.ports import free_port

__all__ = ["folder"]  # a fixture

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

WAIT_S: Final = 30
QUERY: Final = "/stream?topic=//vehicle/20/1/8001&since=earliest"


class Source:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def said(self, *expected: str) -> None:
        """Wait until it has said these, with any errors and connections between them."""
        assert self._process.stdout is not None
        for one in expected:
            said: Any = ""
            async with asyncio.timeout(WAIT_S):
                while said in ("", "open", "error"):
                    said = json.loads(await self._process.stdout.readline())
                    if said == one:
                        break
            assert said == one


@asynccontextmanager
async def source(folder: Path, url: str) -> AsyncIterator[Source]:
    program = folder / "events.mjs"
    program.write_bytes((HERE / program.name).read_bytes())
    process = await asyncio.create_subprocess_exec("node", program.name, url, cwd=folder, stdout=subprocess.PIPE)
    try:
        yield Source(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_it_goes_on_after_a_restart(folder: Path, tmp_path: Path) -> None:
    port = free_port()

    async def started() -> World:
        world = World()
        world.port = port
        await world.start(tmp_path)
        return world

    async with AsyncExitStack() as stack:
        world = await started()
        stack.push_async_callback(lambda: world.finish())
        await world.publish("1", "2")
        await world.publish("volatile", log=1)
        found = await stack.enter_async_context(source(folder, f"http://127.0.0.1:{port}{QUERY}"))
        await found.said("1", "2", "volatile")
        await world.publish("3")
        await found.said("3")
        await world.finish()
        world = await started()
        await world.publish("4")
        await found.said("gap log_ended", "4")


async def test_it_gives_up_where_the_client_has_to_change_something(folder: Path, tmp_path: Path) -> None:
    world = World()
    await world.start(tmp_path)
    try:
        async with source(folder, f"http://127.0.0.1:{world.port}/stream?topic=nonsense") as found:
            await found.said("closed")
    finally:
        await world.finish()
