"""Fastly's library for web backends, @fanoutio/grip (npm), unchanged: it publishes to us with its JWT, checks our
Grip-Sig, and writes the headers that hold a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from streamer.grip.items import Item
from streamer.grip.publish import PublishHandler
from streamer.grip.signatures import PublisherKey, Signer
from tests.grip.held_parties import CHANNEL, HOST, WAIT_S, Edge, serve

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

HERE: Final = Path(__file__).parent / "js"
PUBLISH_KEY: Final = "the key of publishers, 32 bytes or more"
SIG_KEY: Final = "the key of the edge, which has 32 bytes or more"


class JsBackend:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.port = 0

    @classmethod
    async def start(cls, folder: Path, publish_port: int, publish_key: str = PUBLISH_KEY) -> JsBackend:
        publish = f"http://{HOST}:{publish_port}/"
        settings = {"publish": publish, "publishKey": publish_key, "sigKey": SIG_KEY, "channel": CHANNEL}
        process = await asyncio.create_subprocess_exec(
            *("node", "backend.mjs"),
            cwd=folder,
            env={**os.environ, "INTEROP": json.dumps(settings)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        made = cls(process)
        made.port = (await made.said())["port"]
        return made

    async def said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            found: dict[str, Any] = json.loads(await self._process.stdout.readline())
        return found

    async def publish(self, what: str, text: str = "", **ids: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, "text": text, **ids}).encode() + b"\n")
        return await self.said()

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The backend and what it needs, as npm installs it from the lock file."""
    outcome: Callable[[str], Any] = pytest.fail if os.environ.get("CI", "").lower() in ("true", "1") else pytest.skip
    if shutil.which("node") is None or shutil.which("npm") is None:
        outcome("no node and npm: apt-get install nodejs npm")
    made = tmp_path_factory.mktemp("js")
    for name in ("package.json", "package-lock.json", "backend.mjs"):
        shutil.copy(HERE / name, made)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(command, cwd=made, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        outcome(f"npm can't install @fanoutio/grip: {done.stderr[-300:]}")
    return made


class Stage:
    """Publishers' port, node's backend, and the proxy before it."""

    def __init__(self) -> None:
        self.edge: Edge | None = None

    async def take(self, items: Sequence[Item]) -> None:
        for item in items:
            self.edge.channels.publish(item)


@pytest_asyncio.fixture(loop_scope="session")
async def stage(folder: Path, tmp_path: Path) -> AsyncIterator[tuple[JsBackend, Edge, int]]:
    (tmp_path / "publish.key").write_text(PUBLISH_KEY)
    (tmp_path / "sig.key").write_text(SIG_KEY)
    made = Stage()
    handler = PublishHandler(made.take, PublisherKey(tmp_path / "publish.key"))
    runner, publish_port = await serve(handler.post)
    backend = await JsBackend.start(folder, publish_port)
    made.edge = await Edge.open(backend.port, sign=Signer(tmp_path / "sig.key", "up-streamer").sign)
    yield backend, made.edge, publish_port
    await made.edge.close()
    await backend.close()
    await runner.cleanup()


async def test_the_library_holds_a_stream_and_publishes_into_it(stage: tuple[JsBackend, Edge, int]) -> None:
    """With a lost publish, which its link returns."""
    backend, edge, _ = stage
    curl = await edge.curl("/stream-it")
    await curl.until("1\n")
    await edge.held(1)
    assert await backend.publish("stream", "2\n", id="2", prevId="1") == {"published": "2"}
    await curl.until("2\n")
    assert await backend.publish("bytes", "4", id="4", prevId="3") == {"published": "4"}
    assert await backend.said() == {"link": f"{CHANNEL}; last-id=2"}
    await curl.until("3\n")
    assert await backend.publish("close") == {"published": ""}
    await curl.until_end()
    assert curl.is_whole
    assert curl.body == b"1\n2\n3\n"
    assert "grip" not in curl.head.lower()


async def test_the_library_answers_a_held_request(stage: tuple[JsBackend, Edge, int]) -> None:
    backend, edge, _ = stage
    curl = await edge.curl("/poll")
    await edge.held(1)
    assert await backend.publish("response", "news\n") == {"published": ""}
    await curl.until("news\n")
    assert curl.head.startswith("HTTP/1.1 201 ")
    assert "X-One: 1" in curl.head


async def test_the_library_refuses_who_is_not_our_edge(stage: tuple[JsBackend, Edge, int]) -> None:
    backend, edge, _ = stage
    curl = await edge.curl("/stream-it", port=backend.port)
    await curl.until("\n")
    assert curl.head.startswith("HTTP/1.1 501 ")


async def test_we_refuse_a_publisher_with_another_key(folder: Path, stage: tuple[JsBackend, Edge, int]) -> None:
    _, edge, publish_port = stage
    other = await JsBackend.start(folder, publish_port, "another key, which has 32 bytes or more, too")
    try:
        assert "failed" in await other.publish("stream", "x\n")
        assert edge.channels.last_id(CHANNEL) is None
    finally:
        await other.close()
