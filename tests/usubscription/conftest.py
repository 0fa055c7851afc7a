"""A small world for uSubscription tests: one network per authority, joined by a forwarder, services and clients on
them."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from campaigns.simulation.network import FaultyNetwork
from storage.disk import Disk
from storage.runtime import REAL
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription.service import USubscriptionService
from usubscription_client import USubscriptionClient

WAIT_S = 20  # only a failure waits that long


class Ear:
    """Keeps received messages; `next` waits for one that matches."""

    def __init__(self) -> None:
        self.heard: list[UMessage] = []
        self._news = asyncio.Event()

    def on_receive(self, message: UMessage) -> None:
        self.heard.append(message)
        self._news.set()

    async def until(self, condition: Callable[[list[UMessage]], bool]) -> list[UMessage]:
        async with asyncio.timeout(WAIT_S):
            while not condition(self.heard):
                self._news.clear()
                await self._news.wait()
        return self.heard

    async def count(self, number: int) -> list[UMessage]:
        return await self.until(lambda heard: len(heard) >= number)


class Forwarder:
    """Forwards messages between two networks, by the authority of their sink."""

    def __init__(self, into: LocalTransport) -> None:
        self._into = into
        self.log: list[UMessage] = []
        self.lose: Callable[[UMessage], bool] = lambda message: False

    async def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        kept = [message for message in messages if not self.lose(message)]
        self.log.extend(kept)
        await self._into.send_batch(kept)

    def on_receive(self, message: UMessage) -> Any:
        return self.on_receive_batch([message])


class Raw:
    """A uEntity that builds its requests itself."""

    def __init__(self, transport: LocalTransport, local: LocalUriProvider) -> None:
        self.transport, self.local = transport, local
        self.rpc = InMemoryRpcClient(transport, local)
        self.notified = {3: Ear(), 4: Ear()}
        self.published = {3: Ear(), 4: Ear()}

    async def open(self) -> None:
        await self.rpc.open()
        authority = self.local.get_authority()
        for major in (3, 4):
            topic = uris.uri(authority, 0, major, 0x8000)
            await self.transport.register_listener(topic, self.notified[major], self.local.get_source())
            await self.transport.register_listener(topic, self.published[major])

    async def call(self, major: int, method: int, request: Any = None, *, authority: str | None = None) -> UPayload:
        payload = request if isinstance(request, UPayload) or request is None else UPayload.pack(request)
        sink = uris.uri(authority or self.local.get_authority(), 0, major, method)
        return await self.rpc.invoke_method(sink, payload, CallOptions(timeout_ms=WAIT_S * 1000))

    async def notify(self, topic: UUri, sink: UUri, payload: UPayload) -> None:
        await self.transport.send(UMessageBuilder.notification(topic, sink).build_from_upayload(payload))


CONSTANTS = {
    "remote_repeat_ms": "usubscription.remote.REPEAT_FIRST_MS",
    "audit_call_ms": "usubscription.remote.AUDIT_CALL_MS",
    "page_entries_max": "usubscription.service.PAGE_ENTRIES_MAX",
}


class Shortest(random.Random):
    """The possible values of a pause."""

    def random(self) -> float:
        return 0.0


class World:
    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path, self.patch = path, patch
        patch.setattr(CONSTANTS["remote_repeat_ms"], 200)
        self.networks: dict[str, FaultyNetwork] = {}
        self.forwarders: dict[tuple[str, str], Forwarder] = {}
        self._closing: list[Any] = []
        self.services: dict[str, USubscriptionService] = {}
        self.transports: dict[str, LocalTransport] = {}

    async def network(self, authority: str) -> FaultyNetwork:
        if authority not in self.networks:
            self.networks[authority] = FaultyNetwork()
            for other in list(self.networks):
                if other != authority:
                    await self._join(authority, other)
        return self.networks[authority]

    async def _join(self, one: str, other: str) -> None:
        ends = []
        for authority in (one, other):
            end = LocalTransport.on(self.networks[authority], LocalUriProvider("bridge", 0xFFF0, 1))
            await end.open()
            self._closing.append(end.close)
            ends.append(end)
        for here, there, name, to in ((ends[0], ends[1], one, other), (ends[1], ends[0], other, one)):
            forwarder = self.forwarders[name, to] = Forwarder(there)
            await here.register_listener(uris.ANY, forwarder, uris.pattern(to))

    async def transport(self, authority: str, ue_id: int, version: int = 1) -> LocalTransport:
        made = LocalTransport.on(await self.network(authority), LocalUriProvider(authority, ue_id, version))
        await made.open()
        self._closing.append(made.close)
        return made

    async def service(self, authority: str = "dev1", **options: Any) -> USubscriptionService:
        """Start the service, or restart it with the same store."""
        transport = await self.transport(authority, 0, 4)
        for name, constant in CONSTANTS.items():
            if name in options:
                self.patch.setattr(constant, options.pop(name))
        now_ms = options.pop("now_ms", uuids.now_ms)
        options["runtime"] = replace(options.get("runtime", REAL), now_ms=now_ms, rng=Shortest())
        made = USubscriptionService(transport, authority, self.path / f"{authority}.db", **options)
        await made.start()
        self.services[authority], self.transports[authority] = made, transport
        return made

    async def stop(self, authority: str = "dev1") -> None:
        await self.services.pop(authority).stop()
        await self.transports.pop(authority).close()

    async def client(
        self, authority: str = "dev1", ue_id: int = 0x10, version: int | None = None, **options: Any
    ) -> USubscriptionClient:
        transport = await self.transport(authority, ue_id)
        made = USubscriptionClient(transport, LocalUriProvider(authority, ue_id, 1), version=version, **options)
        await made.open()
        self._closing.append(made.close)
        return made

    async def raw(self, authority: str = "dev1", ue_id: int = 0x10, version: int = 1) -> Raw:
        made = Raw(await self.transport(authority, ue_id, version), LocalUriProvider(authority, ue_id, version))
        await made.open()
        self._closing.append(made.rpc.close)
        return made

    async def close(self) -> None:
        for close in reversed(self._closing):
            await close()
        for service in self.services.values():
            await service.stop()


class TroubledDisk(Disk):
    """Every new connection gets this pragma, which causes an error of SQLite."""

    trouble = ""

    def connect(self, path: Path, *, read_only: bool = False) -> sqlite3.Connection:
        db = super().connect(path, read_only=read_only)
        if self.trouble:
            db.execute(f"PRAGMA {self.trouble}")
        return db


@pytest.fixture
def troubled_disk() -> TroubledDisk:
    return TroubledDisk()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    made = World(tmp_path, monkeypatch)
    yield made
    await made.close()
