"""Debian's pushpin beside our proxy: the same requests to both, the same backend behind, the same bytes of the body.

Each scenario runs before both; what curl sees and what the backend was asked must be the same. Where the two differ on
purpose, a test shows it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from streamer.grip.items import read_items
from tests.grip.held_parties import HOST, WAIT_S, Curl, Edge, serve, until
from transports.ports import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

CONFIG: Final = Path("/etc/pushpin/pushpin.conf")
INTERNAL: Final = Path("/usr/lib/pushpin/internal.conf")
START_S: Final = 15.0
SUBSCRIBE_S: Final = 0.3  # Pushpin writes the first answer before it hears items
MESSAGE_WAIT_MS: Final = 100

Publish = Callable[[list[dict[str, Any]]], Awaitable[None]]


Handler = Callable[["Front", web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Front:
    """One of the two proxies, before one backend."""

    name: str
    port: int
    publish: Publish
    handler: Handler
    channel: str
    newest: int = 1  # of the numbers that the backend has
    asked: list[tuple[str, list[str]]] = field(default_factory=list)  # path, Grip-Last
    curls: list[Curl] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.raw_path, request.headers.getall("Grip-Last", [])))
        return await self.handler(self, request)

    def named(self, count: int | None = None) -> list[tuple[str, list[str]]]:
        """What was asked first."""
        return [(path, [one.replace(self.channel, "channel") for one in last]) for path, last in self.asked[:count]]

    async def curl(self, path: str = "/", *headers: str, method: str = "GET", body: bytes = b"") -> Curl:
        self.curls.append(await Curl.get(self.port, path, *headers, method=method, body=body))
        return self.curls[-1]

    async def stream(self, content: str, id: str = "", prev_id: str = "", **item: Any) -> None:
        ids = {"id": id, "prev-id": prev_id}
        await self.publish(
            [
                {
                    "channel": self.channel,
                    "formats": {"http-stream": {"content": content}},
                    **{key: value for key, value in ids.items() if value},
                    **item,
                }
            ]
        )


Scenario = Callable[[Front], Awaitable[object]]
Both = Callable[[Handler, Scenario], Awaitable[tuple[object, object]]]


class Pushpin:
    """A pushpin of its own: all files in one folder, all ports free ones."""

    def __init__(self, folder: Path, backend_port: int) -> None:
        self.port, self.publish_port, *others = (free_port() for _ in range(5))
        settings = {
            "rundir": folder / "run",
            "logdir": folder / "log",
            "services": "condure,zurl,pushpin-proxy,pushpin-handler",
            "http_port": self.port,
            "include": folder / "internal.conf",
            "push_in_spec": f"tcp://{HOST}:{others[0]}",
            "push_in_sub_specs": f"tcp://{HOST}:{others[1]}",
            "command_spec": f"tcp://{HOST}:{others[2]}",
            "push_in_http_port": self.publish_port,
            "message_wait": MESSAGE_WAIT_MS,
        }
        lines = []
        for line in CONFIG.read_text().splitlines():
            key = line.partition("=")[0]
            lines.append(f"{key}={settings[key]}" if key in settings else line)
        (folder / "pushpin.conf").write_text("\n".join(lines) + "\n")
        # the runner starts a zurl of its own, in `rundir`; Debian's file names that of the system
        internal = INTERNAL.read_text().replace("ipc:///var/run/zurl/zurl-", "ipc://{rundir}/{ipc_prefix}zurl-")
        (folder / "internal.conf").write_text(internal)
        (folder / "routes").write_text(f"* {HOST}:{backend_port}\n")
        for name in ("run", "log"):
            (folder / name).mkdir()
        self._out = (folder / "out").open("w+")
        command = ["pushpin", f"--config={folder / 'pushpin.conf'}"]
        self._process = subprocess.Popen(command, stdout=self._out, stderr=subprocess.STDOUT)

    async def until_open(self) -> None:
        """Skips the test if it can't run here."""
        async with asyncio.timeout(START_S):
            while True:
                if self._process.poll() is not None:
                    self._out.seek(0)
                    pytest.skip(f"pushpin does not run here: {self._out.read()[-300:]}")
                try:
                    for port in (self.port, self.publish_port):
                        _, writer = await asyncio.open_connection(HOST, port)
                        writer.close()
                        await writer.wait_closed()
                    return
                except OSError:
                    await asyncio.sleep(0.05)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Of a short name: the path of a socket has 107 bytes at most."""
    made = Path(tempfile.mkdtemp(prefix="pp-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def both(folder: Path) -> AsyncIterator[Both]:
    """Runs a scenario before pushpin and before ours; returns what it returned."""
    if shutil.which("pushpin") is None or not CONFIG.exists() or not INTERNAL.exists():
        pytest.skip("no pushpin: apt-get install pushpin zurl (Debian)")
    if os.access(CONFIG, os.R_OK) is False:
        pytest.skip(f"{CONFIG} can't be read")
    front: list[Front] = []
    numbers = itertools.count()

    async def handler(request: web.Request) -> web.StreamResponse:
        return await front[0].answer(request)

    runner, backend_port = await serve(handler)
    pushpin = Pushpin(folder, backend_port)
    edge = await Edge.open(backend_port)
    session = aiohttp.ClientSession()

    async def publish_there(items: list[dict[str, Any]]) -> None:
        url = f"http://{HOST}:{pushpin.publish_port}/publish/"
        async with session.post(url, json={"items": items}) as response:
            assert response.status == 200, await response.text()

    async def publish_here(items: list[dict[str, Any]]) -> None:
        for item in read_items(json.dumps({"items": items}).encode()):
            edge.channels.publish(item)

    async def run(handler: Handler, scenario: Scenario) -> tuple[object, object]:
        outcomes = []
        for name, port, publish in (("pushpin", pushpin.port, publish_there), ("ours", edge.port, publish_here)):
            one = Front(name, port, publish, handler, f"channel-{next(numbers)}")
            edge.channels.add(one.channel)
            front[:] = [one]
            try:
                outcomes.append(await scenario(one))
            finally:
                for curl in one.curls:
                    curl.cut()
                listeners = edge.channels.listeners[one.channel]
                await until(lambda heard=listeners: not heard)  # type: ignore[misc]
        return outcomes[0], outcomes[1]

    try:
        await pushpin.until_open()
        yield run
    finally:
        await session.close()
        pushpin.close()
        await edge.close()
        await runner.cleanup()


def status(curl: Curl) -> str:
    return curl.head.partition("\r\n")[0]


def headers(curl: Curl) -> list[str]:
    """Of the answer, without those that each server makes itself."""
    own = ("date", "server", "connection", "transfer-encoding", "content-length", "keep-alive")
    lines = curl.head.split("\r\n")[1:]
    return sorted(line for line in lines if line.partition(":")[0].lower() not in own)


def hold(front: Front, prev_id: str = "", *, link: str = "", kind: str = "stream", **others: str) -> dict[str, str]:
    made = {"Grip-Hold": kind, "Grip-Channel": front.channel + (f"; prev-id={prev_id}" if prev_id else "")}
    if link:
        made["Grip-Link"] = link
    return {**made, **{name.replace("_", "-"): value for name, value in others.items()}}


async def test_answers_without_grip_headers(both: Both) -> None:
    """Not compared: a compressed answer, which pushpin's zurl unpacks."""

    async def backend(front: Front, request: web.Request) -> web.Response:
        match request.path:
            case "/moved":
                return web.Response(status=302, headers={"Location": "/elsewhere"}, text="moved")
            case "/echo":
                return web.Response(body=await request.read(), content_type="application/octet-stream")
        return web.Response(status=404, reason="Nothing Here", text="no such page\n", headers={"X-One": "1"})

    async def scenario(front: Front) -> object:
        seen = []
        for path, end in (("/moved", b"moved"), ("/none?a=%2F&b", b"no such page\n")):
            curl = await front.curl(path)
            async with asyncio.timeout(WAIT_S):
                while not curl.body.endswith(end):
                    assert await curl._more(), curl.raw
            seen.append((status(curl), headers(curl), curl.body))
        curl = await front.curl("/echo", "Content-Length: 5", method="POST", body=b"12345")
        await curl.until("12345")
        return [*seen, status(curl), curl.body], front.asked

    there, here = await both(backend, scenario)
    assert there == here


async def test_a_held_stream_and_its_items(both: Both) -> None:
    async def backend(front: Front, _: web.Request) -> web.Response:
        return web.Response(text="first\n", headers=hold(front))

    async def scenario(front: Front) -> object:
        curl = await front.curl()
        await curl.until("first\n")
        await asyncio.sleep(SUBSCRIBE_S)
        await front.stream("a\n")
        await front.stream("b\n", "1")
        binary = {"formats": {"http-stream": {"content-bin": "AP8K"}}}
        await front.publish([{"channel": front.channel, **binary}, {"channel": "other", **binary}])
        await front.publish([{"channel": front.channel, "formats": {"http-stream": {"content": "c\n"}}}])
        await curl.until("c\n")
        await front.publish([{"channel": front.channel, "formats": {"http-stream": {"action": "close"}}}])
        await curl.until_end()
        return status(curl), headers(curl), curl.body, curl.is_whole

    there, here = await both(backend, scenario)
    assert there == here


async def test_a_gap_is_recovered(both: Both) -> None:
    """Number 3 is never published. The backend has all numbers."""

    async def backend(front: Front, request: web.Request) -> web.Response:
        last = int(request.headers.get("Grip-Last", "last-id=0").partition("last-id=")[2])
        numbers = range(last + 1, front.newest + 1)
        link = "</?recover=true>; rel=next; timeout=120"
        return web.Response(
            text="".join(f"{one}\n" for one in numbers), headers=hold(front, str(front.newest), link=link)
        )

    async def scenario(front: Front) -> object:
        curl = await front.curl()
        await curl.until("1\n")
        await asyncio.sleep(SUBSCRIBE_S)
        for front.newest in (2, 3, 4, 5):
            if front.newest != 3:
                await front.stream(f"{front.newest}\n", str(front.newest), str(front.newest - 1))
                await curl.until(f"{front.newest}\n")
        return status(curl), headers(curl), curl.body, front.named(2)

    there, here = await both(backend, scenario)
    assert there == here
    assert here[2:] == (b"1\n2\n3\n4\n5\n", [("/", []), ("/?recover=true", ["channel; last-id=2"])])  # type: ignore[index]


async def test_silence_asks_the_link(both: Both) -> None:
    async def backend(front: Front, request: web.Request) -> web.Response:
        after = request.query.get("after", "1")
        value = "1" if after == "1" and len(request.headers.getall("Grip-Last", [])) == 0 else "2"
        text = "" if after == "2" else f"{value}\n"
        link = f"</?after={value}>; rel=next; timeout=1"
        return web.Response(text=text, headers=hold(front, value, link=link))

    async def scenario(front: Front) -> object:
        curl = await front.curl()
        await curl.until("1\n2\n")
        await until(lambda: len(front.asked) >= 3)
        return curl.body, front.named(3)

    there, here = await both(backend, scenario)
    assert there == here


async def test_pages(both: Both) -> None:
    async def backend(front: Front, request: web.Request) -> web.Response:
        page = int(request.query.get("page", "1"))
        if page == 3:
            return web.Response(text="page 3\n", headers=hold(front, "9", link="</?page=3>; rel=next; timeout=120"))
        return web.Response(text=f"page {page}\n", headers={"Grip-Link": f"</?page={page + 1}>; rel=next"})

    async def scenario(front: Front) -> object:
        curl = await front.curl()
        await curl.until("page 3\n")
        await asyncio.sleep(SUBSCRIBE_S)
        await front.stream("item\n", "10", "9")
        await curl.until("item\n")
        return curl.body, front.named()

    there, here = await both(backend, scenario)
    assert there == here


async def test_a_stream_is_kept_alive(both: Both) -> None:
    async def backend(front: Front, _: web.Request) -> web.Response:
        return web.Response(text="first\n", headers=hold(front, Grip_Keep_Alive="\\x41\\n; format=cstring; timeout=2"))

    async def scenario(front: Front) -> object:
        curl = await front.curl()
        await curl.until("first\nA\n")
        return curl.body

    there, here = await both(backend, scenario)
    assert there == here


async def test_a_held_response(both: Both) -> None:
    async def backend(front: Front, _: web.Request) -> web.Response:
        return web.Response(text="nothing\n", headers=hold(front, kind="response", X_Kept="1", X_Changed="old"))

    async def scenario(front: Front) -> object:
        curl = await front.curl()
        await asyncio.sleep(SUBSCRIBE_S)
        response = {"code": 201, "reason": "Made", "headers": {"X-Changed": "new"}, "body": "news\n"}
        await front.publish([{"channel": front.channel, "formats": {"http-response": response}}])
        await curl.until("news\n")
        return status(curl), headers(curl), curl.body

    there, here = await both(backend, scenario)
    assert there == here


async def test_a_held_response_that_times_out(both: Both) -> None:
    async def backend(front: Front, _: web.Request) -> web.Response:
        return web.Response(
            text="nothing\n", headers=hold(front, kind="response", Grip_Timeout="1", Grip_Status="202 Waited")
        )

    async def scenario(front: Front) -> object:
        curl = await front.curl()
        await curl.until("nothing\n")
        return status(curl), headers(curl), curl.body

    there, here = await both(backend, scenario)
    assert there == here


async def test_an_unreadable_hold(both: Both) -> None:
    async def backend(front: Front, _: web.Request) -> web.Response:
        return web.Response(text="secret", headers={"Grip-Hold": "perhaps"})

    async def scenario(front: Front) -> object:
        curl = await front.curl()
        await curl.until("\n")
        return status(curl)

    there, here = await both(backend, scenario)
    assert there == here == "HTTP/1.1 502 Bad Gateway"


async def test_a_hash_that_returns_is_an_item_of_its_own_for_us_only(both: Both) -> None:
    """A, B, A: Pushpin remembers all ids of a minute and drops the second A; the client keeps B until it recovers."""

    async def backend(front: Front, _: web.Request) -> web.Response:
        return web.Response(text="A\n", headers=hold(front, "A", link="</>; rel=next; timeout=120"))

    async def scenario(front: Front) -> object:
        curl = await front.curl()
        await curl.until("A\n")
        await asyncio.sleep(SUBSCRIBE_S)
        for id, prev_id in (("B", "A"), ("A", "B"), ("B", "A"), ("A", "B")):
            await front.stream(f"{id}\n", id, prev_id)
        await asyncio.sleep(SUBSCRIBE_S)
        async with asyncio.timeout(SUBSCRIBE_S):
            await curl._more()
        return curl.body

    there, here = await both(backend, scenario)
    assert here == b"A\nB\nA\nB\nA\n"
    assert there != here
