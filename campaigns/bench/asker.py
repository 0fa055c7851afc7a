"""`python -m campaigns.bench.asker zenoh:PORT`: an application that calls and times the services of the streamer.

bench -> {"do": NAME, ...} per line on stdin -> asker -> one JSON answer per line on stdout

It uses the product's own clients and makes one call after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from campaigns.bench import wire
from campaigns.bench.load import answer
from campaigns.bench.networks import Address
from history.reading.subscriber import HistoryClient
from transports.plugin import create
from uprotocol import uri as uris
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DescribeRequest, DescribeResponse
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

TIMEOUT_MS: Final = 60_000
BESIDE_S: Final = 0.02  # between the questions that run beside a longer one
OPTIONS: Final = CallOptions(timeout_ms=TIMEOUT_MS)
SUBSCRIBE, REGISTER, RESET = 1, 4, 6  # methods of core.usubscription, version 4
DESCRIBE: Final = ids.at(wire.INGRESS_AUTHORITY, ids.DESCRIBE)
SERVICE: Final = uris.uri(wire.EGRESS_AUTHORITY, 0, 4, 0)  # only a uSubscription service may call Reset


class Asker:
    def __init__(self, transport: UTransport, rpc: InMemoryRpcClient, local: LocalUriProvider) -> None:
        self._transport, self._rpc, self._local = transport, rpc, local
        self._notified, self._first, self._last = 0, 0.0, 0.0
        self._history = HistoryClient(rpc, DESCRIBE, timeout_ms=TIMEOUT_MS)
        self._quiet, self._stopping = asyncio.Event(), asyncio.Event()
        self._expected = 0

    async def subscribe(self, first: int, count: int) -> dict[str, Any]:
        """Subscribes to topics `first`, `first` + 1, ... and returns how long each answer took."""
        ms, statuses = [], Counter[int]()
        for number in range(first, first + count):
            asked = UPayload.pack(v4.SubscribeRequest(topic=wire.topic(number)))
            began = time.perf_counter()
            given = await self._rpc.invoke_method(_method(SUBSCRIBE), asked, OPTIONS)
            ms.append((time.perf_counter() - began) * 1_000)
            statuses[given.unpack(v4.SubscribeResponse).status] += 1
        return {"ms": ms, "statuses": statuses}

    async def register(self) -> dict[str, Any]:
        """Registers for all changes, which arrive at this uEntity as notifications."""
        source = uris.uri(wire.INGRESS_AUTHORITY, 0, 4, 0x8000)
        await self._transport.register_listener(source, self, self._local.get_source())
        await self._rpc.invoke_method(_method(REGISTER), UPayload.pack(v4.NotificationsRequest()), OPTIONS)
        return {}

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._notified += len(messages)
        if self._notified >= self._expected:
            self._quiet.set()

    def on_receive(self, message: UMessage) -> None:
        self.on_receive_batch([message])

    async def reset(self, count: int) -> dict[str, Any]:
        """Resets this authority. Returns the time until the last of `count` notifications has arrived, and the time
        from the first to the last."""
        self._notified, self._expected, self._first = 0, count, 0.0
        self._quiet.clear()
        # in the name and from the address of this authority's service: no other sender may call Reset
        request = UMessageBuilder.request(SERVICE, _method(RESET), TIMEOUT_MS).pack(v4.ResetRequest())
        began = time.perf_counter()
        status = (await self._transport.send_batch([request]))[0]
        if status.code != UCode.OK:
            raise UStatusError(status.code, status.message)
        async with asyncio.timeout(TIMEOUT_MS / 1_000):
            await self._quiet.wait()
        return {
            "told": self._notified,
            "ms": (self._last - self._first) * 1_000,
            "whole_ms": (self._last - began) * 1_000,
        }

    async def logs(self) -> dict[str, Any]:
        """Asks, as Spark does with each batch, for the newest record of all topics of the bench."""
        began = time.perf_counter()
        logs = await self._history.logs([wire.EVERY_TOPIC])
        return {
            "ms": (time.perf_counter() - began) * 1_000,
            "newest_match_seq": max(one.newest_match_seq for one in logs),
        }

    async def topics(self) -> dict[str, Any]:
        """Lists all topics of the bench page by page. Returns the ms of each page, the number of topics, and the
        longest time that a question for one topic took meanwhile."""
        await self._history.logs([wire.TOPIC])  # a first question, so that the caller is known
        beside = asyncio.ensure_future(self._beside())
        ms, number, began = [], 0, time.perf_counter()
        asked = DescribeRequest(topics=[wire.EVERY_TOPIC], listing=DescribeRequest.LISTING_PAGE)
        while True:
            page_began = time.perf_counter()
            given = await self._rpc.invoke_method(DESCRIBE, UPayload.pack(asked), OPTIONS)
            described = given.unpack(DescribeResponse)
            ms.append((time.perf_counter() - page_began) * 1_000)
            number += len(described.topics)
            asked.page = described.next_page
            if not asked.page:
                break
        figures = {"s": time.perf_counter() - began, "page_ms": ms, "topics": number}
        self._stopping.set()
        return figures | {"beside_most_ms": await beside}

    async def _beside(self) -> float:
        most = 0.0
        while not self._stopping.is_set():
            began = time.perf_counter()
            await self._history.logs([wire.TOPIC])
            most = max(most, time.perf_counter() - began)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), BESIDE_S)
        return most * 1_000


def _method(number: int) -> Any:
    return uris.uri(wire.INGRESS_AUTHORITY, 0, 4, number)


async def serve(address: Address) -> None:
    local = LocalUriProvider(wire.EGRESS_AUTHORITY, 0xF001, 1)
    settings = {"connect": [f"tcp/127.0.0.1:{address.number}"]}
    async with create("zenoh", settings, local) as transport, InMemoryRpcClient(transport, local) as rpc:
        asker = Asker(transport, rpc, local)
        commands: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "subscribe": asker.subscribe,
            "register": asker.register,
            "reset": asker.reset,
            "logs": asker.logs,
            "topics": asker.topics,
        }
        answer(ready=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            try:
                answer(**await commands[command.pop("do")](**command))
            except (UStatusError, TimeoutError) as error:
                answer(error=str(error) or "it took too long")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench ends this process
    asyncio.run(serve(Address.parse(sys.argv[1])))
