"""A gateway with an HTTP edge, a backend, and a page that draws a drive as it comes; its connection can be cut.

vehicle -- gateway: history -- HTTP edge == a proxy that cuts == page: EventSource on /stream
                                   |                              '--- GET /trip, held open by GRIP
                                   '-- backend: the page, /trip, POST /cut; publishes to the edge

    python -m examples.edge --port 8088
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web

from storage import logs
from streamer.app import Streamer
from streamer.commands.demo import drive
from streamer.config import loads
from transports.conformance.proxy import TcpProxy
from transports.local import LocalConfig, LocalTransport
from transports.ports import free_port
from uprotocol import uri as uris
from uprotocol.transport import LocalUriProvider

HERE: Final = Path(__file__).parent
SHOWN: Final = ("Vehicle.OBD.Speed", "Vehicle.OBD.EngineSpeed")
CUT_S: Final = 3.0
METRES_PER_ITEM: Final = 100


class Backend:
    """Serves the page, and holds /trip open through the edge: one line for each 100 m."""

    def __init__(self, link: TcpProxy, publish_port: int) -> None:
        self._link, self._publish_url = link, f"http://127.0.0.1:{publish_port}/publish/"
        self.metres = 0.0
        self._shown = 0  # the last item

    @property
    def _line(self) -> str:
        return json.dumps({"metres": self._shown * METRES_PER_ITEM}) + "\n"

    async def page(self, _: web.Request) -> web.Response:
        return web.Response(text=(HERE / "page.html").read_text(), content_type="text/html")

    async def topics(self, _: web.Request) -> web.Response:
        return web.json_response({path: uris.format(drive.SIGNALS[path].topic) for path in SHOWN})

    async def trip(self, request: web.Request) -> web.Response:
        """The state now, and a hold; asked with Grip-Last, only what was missed."""
        last = request.headers.get("Grip-Last", "").partition("last-id=")[2]
        headers = {
            "Grip-Hold": "stream",
            "Grip-Channel": f"trip; prev-id={self._shown}",
            "Grip-Link": "</trip?recover=true>; rel=next; timeout=10",
        }
        return web.Response(text="" if last == str(self._shown) else self._line, headers=headers)

    async def cut(self, _: web.Request) -> web.Response:
        """Cut the connection of the page for CUT_S, after the answer."""
        asyncio.get_running_loop().call_later(0.1, self._link.cut)
        asyncio.get_running_loop().call_later(0.1 + CUT_S, self._link.mend)
        return web.json_response({"seconds": CUT_S})

    async def drove(self, session: aiohttp.ClientSession, kmh: float) -> None:
        """Take one second of the drive, and publish each whole METRES_PER_ITEM."""
        self.metres += kmh / 3.6
        if (items := int(self.metres // METRES_PER_ITEM)) <= self._shown:
            return
        before, self._shown = self._shown, items
        item = {"channel": "trip", "id": str(items), "prev-id": str(before)}
        body = {"items": [item | {"formats": {"http-stream": {"content": self._line}}}]}
        with contextlib.suppress(aiohttp.ClientError):  # it is lost: the link has it
            async with session.post(self._publish_url, json=body):
                pass


@contextlib.asynccontextmanager
async def served(backend: Backend, port: int) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_get("/", backend.page)
    app.router.add_get("/topics", backend.topics)
    app.router.add_get("/trip", backend.trip)
    app.router.add_post("/cut", backend.cut)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def running(streamer: Streamer) -> AsyncIterator[None]:
    ready = asyncio.Event()
    task = asyncio.create_task(streamer.run(ready.set))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task  # raises why it could not start
    try:
        yield
    finally:
        waiting.cancel()
        streamer.stop()
        await task


async def go(backend: Backend, asked: argparse.Namespace) -> None:
    """Drive: one row of the recording every 1 / `speed` seconds."""
    found = drive.load(asked.data, asked.seed, asked.seconds)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        publishers = {}
        for authority in (drive.VEHICLE, drive.MCU):
            local = LocalUriProvider(authority, drive.PUBLISHER_UE_ID, drive.PUBLISHER_VERSION)
            transport = LocalTransport(LocalConfig(network="edge-vehicles"), local)
            publishers[authority] = await stack.enter_async_context(transport)
        for _, row in itertools.groupby(found.samples(int(time.time() * 1_000)), lambda sample: sample.time_ms):
            samples = {sample.signal.path: sample for sample in row if sample.signal.path in SHOWN}
            for sample in samples.values():
                await drive.send_all(publishers[sample.signal.publisher], [drive.message(sample)])
            await backend.drove(session, float(samples[SHOWN[0]].value) if SHOWN[0] in samples else 0.0)
            await asyncio.sleep(1 / asked.speed)
    print("the drive has ended", flush=True)


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.edge", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="of the page; 0: any free one")
    parser.add_argument("--data", type=Path, help="a recorded drive, a CSV file; without it, a simulated one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=3_600, help="of a simulated drive")
    parser.add_argument("--speed", type=float, default=10, help="seconds of the drive in one second")
    asked = parser.parse_args()
    logs.configure("warning", "text")
    ports = {"8080": free_port(), "5561": free_port(), "8000": free_port()}
    with tempfile.TemporaryDirectory() as folder:
        text = (HERE / "gateway.toml").read_text().replace('"edge-data"', f'"{folder}"')
        for port, instead in ports.items():
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{instead}")
        streamer = await Streamer.create(loads(text))
        link = TcpProxy("127.0.0.1", ports["8080"])
        backend = Backend(link, ports["5561"])
        async with running(streamer), served(backend, ports["8000"]):
            await link.start(asked.port)
            print(f"open http://127.0.0.1:{link.port}/ (Ctrl-C ends it)", flush=True)
            await go(backend, asked)
            await asyncio.Event().wait()
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(asyncio.run(main()))
