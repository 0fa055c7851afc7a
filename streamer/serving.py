"""Run a streamer for as long as the process lives: `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable

import structlog

from storage.runtime import REAL
from streamer.app import Streamer
from streamer.config import Config
from streamer.embedded import REOPEN_MS_MAX
from streamer.operating.admin import Admin
from streamer.operating.control import ControlSocket
from streamer.operating.states import of_one_that_cant_start
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

log = structlog.get_logger()


async def serve(config: Config, on_ready: Callable[[Streamer], None], stopping: asyncio.Event | None = None) -> None:
    """Run a streamer until `stopping` is set or the task is cancelled. Raises UStatusError for what the world has wrong
    for good."""
    stopping = stopping or asyncio.Event()
    streamer = await _create(config, stopping)
    if streamer is None:
        return

    async def announce() -> None:
        await streamer.ready.wait()
        on_ready(streamer)

    async def stop() -> None:
        await stopping.wait()
        streamer.stop()

    helpers = [asyncio.create_task(announce()), asyncio.create_task(stop())]
    try:
        async with ControlSocket(
            config.streamer.data_dir, streamer.paused, streamer.release, streamer.vehicles, streamer.cursors
        ):
            await streamer.run()
    except BaseExceptionGroup as group:
        ours, others = group.split(UStatusError)
        if ours is None or others is not None:
            raise
        first: BaseException = ours
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    finally:
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)


async def _create(config: Config, stopping: asyncio.Event) -> Streamer | None:
    """The streamer, as soon as the disk lets it be; None if `stopping` comes first. The admin port says meanwhile what
    is wrong."""
    backoff = Backoff(1_000, REOPEN_MS_MAX)
    trouble_logged, since_ms = "", REAL.now_ms()
    while not stopping.is_set():
        try:
            return await Streamer.create(config)
        except UStatusError as error:
            if error.code not in (UCode.UNAVAILABLE, UCode.RESOURCE_EXHAUSTED, UCode.PERMISSION_DENIED):
                raise
            trouble = str(error)
        if trouble != trouble_logged:
            trouble_logged, since_ms = trouble, REAL.now_ms()
            log.error("the streamer can't start; trying again", error=trouble)
        async with contextlib.AsyncExitStack() as stack:
            if config.streamer.admin is not None:
                problems: Callable[[], list[str]] = functools.partial(list, (trouble_logged,))
                states = functools.partial(
                    of_one_that_cant_start, [one.name for one in config.endpoint], trouble_logged, since_ms
                )
                await stack.enter_async_context(
                    Admin(config.streamer.admin, problems, states=states, guard=config.admin)
                )
            waiting = asyncio.ensure_future(stopping.wait())
            await asyncio.wait({waiting}, timeout=backoff.next_ms() / 1000)
            waiting.cancel()
    return None
