"""Logs, the history service on them, and callers on one network within the process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, Final

from campaigns.simulation.loop import VirtualLoop
from history.log.log import Log
from history.service.service import HistoryService
from transports.local import LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

LOCAL: Final = LocalUriProvider("gateway", 4, 1)
SERVICE: Final = uris.uri("gateway", 4, 1)


class HistoryWorld:
    """`rpc` calls from authority `cloud`. Subclasses add what their tests need."""

    async def open(self, *logs: Log, **service: Any) -> None:
        """`logs` are closed with this; `service` are arguments of HistoryService."""
        self.network = LocalNetwork()
        self.logs, self._arguments = list(logs), service
        self._stack = AsyncExitStack()
        self.transport = LocalTransport.on(self.network, LOCAL)
        await self.transport.open()
        await self.serve()
        self.rpc = await self.caller("cloud")

    async def serve(self) -> None:
        """Start a service over the logs as they are now."""
        self.service = HistoryService(self.transport, LOCAL, self.logs, **self._arguments)
        await self.service.start()

    async def caller(self, authority: str, entity: int = 0x20) -> InMemoryRpcClient:
        local = LocalUriProvider(authority, entity, 1)
        transport = await self._stack.enter_async_context(LocalTransport.on(self.network, local))
        return await self._stack.enter_async_context(InMemoryRpcClient(transport, local))

    async def append_all(self, log: Log, messages: list[UMessage]) -> None:
        await log.append([log.stream_id(message.attributes.source) for message in messages], messages)

    async def close(self) -> None:
        await self.service.stop()
        await self._stack.aclose()
        await self.transport.close()
        for log in self.logs:
            await log.close()


def publishes(topics: list[UUri], payload: bytes, format: int = 5) -> list[UMessage]:
    """One message for each topic."""
    return [UMessageBuilder.publish(topic).build_from_upayload(UPayload(payload, format)) for topic in topics]


def virtually(test: Coroutine[Any, Any, None], seed: int = 0) -> None:
    """Run it on virtual time; nothing in it may use a thread."""
    loop = VirtualLoop(seed)
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(test)
    finally:
        asyncio.set_event_loop(None)
        loop.finish([])


async def retention_runs(log: Log) -> None:
    """Wait until retention has deleted records."""
    floor = log.floor_seq
    async with asyncio.timeout(10):
        while log.floor_seq == floor:  # noqa: ASYNC110 - the log sends no event for it
            await asyncio.sleep(0.02)
