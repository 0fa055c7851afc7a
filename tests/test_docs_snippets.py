"""The programs of docs/history.md, docs/following.md and docs/usubscription.md run as they stand, against the services
that they speak to."""

from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from history.log.log import Log
from history.reading.client import Frames
from history.reading.feed import HistoryFeed
from history.reading.subscriber import GaplessSubscriber, HistoryClient
from history.service.service import HistoryService
from transports.local import LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage
from usubscription.service import USubscriptionService
from usubscription_client import Status, USubscriptionClient

DOCS = Path(__file__).resolve().parent.parent / "docs"
TOPIC = uris.uri("vehicle1", 0x10, 1, 0x8000)
LOCAL = LocalUriProvider("vehicle1", 0x20, 1)


class Heard(Exception):
    """A snippet that goes on for ever is left by this."""


class Listener:
    def __init__(self) -> None:
        self.heard: asyncio.Queue[UMessage] = asyncio.Queue()

    def on_receive(self, message: UMessage) -> None:
        self.heard.put_nowait(message)


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


async def run(snippet: str, **names: Any) -> dict[str, Any]:
    """Its own variables, after it has run."""
    code = "async def snippet():\n" + textwrap.indent(snippet, "    ") + "    return locals()\n"
    exec(compile(code, "snippet", "exec"), names)
    found: dict[str, Any] = await names["snippet"]()
    return found


@pytest.fixture
async def transport(tmp_path: Path) -> AsyncIterator[LocalTransport]:
    """Of an app of vehicle1, beside a history that has one record, and a uSubscription."""
    network, service = LocalNetwork(), LocalUriProvider("vehicle1", 4, 1)
    home = LocalTransport.on(network, service)
    log, ring = await Log.open(tmp_path / "history.db", name="durable"), await Log.open(None, name="volatile")
    async with home, LocalTransport.on(network, LOCAL) as app:
        history = HistoryService(home, service, [log, ring])
        await history.start()
        subscriptions = USubscriptionService(home, "vehicle1", tmp_path / "usubscription.db")
        await subscriptions.start()
        message = UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b"kept", 6))
        await log.append([log.stream_id(TOPIC)], [message])
        yield app
        await subscriptions.stop()
        await history.stop()
    await log.close()
    await ring.close()


async def test_a_gapless_subscriber(transport: LocalTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the snippet has a file beside it
    (snippet,) = snippets("history.md")
    heard: list[bytes] = []

    def handle(message: UMessage) -> None:
        heard.append(message.payload)
        raise Heard

    names = {
        "GaplessSubscriber": GaplessSubscriber,
        "HistoryClient": HistoryClient,
        "uri": uris.uri,
        "topic": TOPIC,
        "handle": handle,
    }
    async with InMemoryRpcClient(transport, LOCAL) as client:
        with pytest.raises(Heard):
            await run(snippet.replace('"gateway"', '"vehicle1"'), rpc_client=client, report=print, **names)
    assert heard == [b"kept"]


async def test_one_that_is_pushed_to(
    transport: LocalTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    snippet = next(one for one in snippets("following.md") if "GaplessSubscriber" in one)
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    names = {
        "InMemoryRpcClient": InMemoryRpcClient,
        "GaplessSubscriber": GaplessSubscriber,
        "HistoryClient": HistoryClient,
        "Frames": Frames,
        "uri": uris.uri,
        "transport": transport,
        "local": LOCAL,
        "topic": TOPIC,
        "report": print,
        "handle": lambda message: heard.put_nowait(message.payload),
    }
    running = asyncio.create_task(run(snippet.replace('"gateway"', '"vehicle1"'), **names))
    try:
        assert await heard.get() == b"kept"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_subscription_and_one_with_a_past(
    transport: LocalTransport, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, since = snippets("usubscription.md")
    pattern, listener = uris.parse("//vehicle1/FFFFFFFF/FF/FFFF"), Listener()
    names = {
        "USubscriptionClient": USubscriptionClient,
        "transport": transport,
        "local": LOCAL,
        "topic": TOPIC,
        "listener": listener,
    }
    assert (await run(calls, pattern=pattern, **names))["status"] is Status.SUBSCRIBED
    more = {
        "InMemoryRpcClient": InMemoryRpcClient,
        "HistoryFeed": HistoryFeed,
        "HistoryClient": HistoryClient,
        "uris": uris,
    }
    waits = "        " + "message = await listener.heard.get()\n"
    assert (await run(since + waits, **names, **more))["message"].payload == b"kept"
