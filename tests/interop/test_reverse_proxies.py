"""nginx and HAProxy between clients and the edge, with the configuration of docs/edge.md."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio

from tests.edge.chromium import Chromium
from tests.edge.test_streams import World
from transports.ports import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

WAIT_S: Final = 30
DOCS: Final = Path(__file__).parents[2] / "docs" / "edge.md"
STREAM: Final = "/stream?topic=//vehicle/20/1/8001&since=earliest"
NGINX: Final = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors;
events {{ }}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{ listen 127.0.0.1:{port}; {server} }}
}}
"""
HAPROXY: Final = """
defaults
  mode http
  timeout connect 5s
  timeout client 20s
  timeout server 20s
  errorfile 503 {folder}/later.http
frontend clients
  bind 127.0.0.1:{port}
  default_backend edge
backend edge
  server gateway 127.0.0.1:{edge}
"""
LATER: Final = "HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n\r\nretry: 5000\n\n"


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if found is None:
        outcome: Callable[[str], Any] = (
            pytest.fail if os.environ.get("CI", "").lower() in ("true", "1") else pytest.skip
        )
        outcome(f"no {name}: apt-get install {name}")
    assert found is not None
    return found


class Front:
    """A proxy before an edge that can be restarted at its port."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.world = folder, port, World()
        self.world.port = free_port()
        self.url = f"http://127.0.0.1:{port}"

    async def start(self) -> None:
        port, self.world = self.world.port, World()
        self.world.port = port
        await self.world.start(self.folder)

    def command(self, kind: str) -> list[str]:
        file, values = self.folder / "conf", {"folder": self.folder, "port": self.port, "edge": self.world.port}
        if kind == "haproxy":
            (self.folder / "later.http").write_text(LATER, newline="")
            file.write_text(HAPROXY.format(**values))
            return [program("haproxy"), "-db", "-f", str(file)]
        found = re.search(r"```nginx\n(.*?)```", DOCS.read_text(), re.DOTALL)
        assert found is not None
        server = found[1].replace("127.0.0.1:7999", f"127.0.0.1:{self.world.port}").replace("5000", "100")
        file.write_text(NGINX.format(server=server, **values))
        return [program("nginx"), "-p", str(self.folder), "-c", str(file)]


@pytest_asyncio.fixture(loop_scope="session", params=["nginx", "haproxy"])
async def front(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Front]:
    async with AsyncExitStack() as stack:
        made = Front(tmp_path, free_port())
        await made.start()
        stack.push_async_callback(lambda: made.world.finish())
        process = await asyncio.create_subprocess_exec(*made.command(request.param))
        stack.push_async_callback(process.wait)
        stack.callback(process.kill)
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", made.port)
                except OSError:
                    await asyncio.sleep(0.05)
                    continue
                writer.close()
                break
        yield made


async def test_events_come_at_once(front: Front) -> None:
    await front.world.publish("1")
    async with aiohttp.ClientSession() as session, session.get(front.url + STREAM) as answer:
        for number in range(2, 5):
            async with asyncio.timeout(5):
                while not (await answer.content.readline()).endswith(f'"text":"{number - 1}"}}\n'.encode()):
                    pass
            await front.world.publish(str(number))


async def test_a_page_goes_on_when_the_gateway_was_away(front: Front, tmp_path: Path) -> None:
    async with Chromium(tmp_path / "browser") as browser:
        await front.world.publish("1")
        await browser.open(front.url + "/nothing")
        await browser.evaluate(
            f"window.found = []; window.source = new EventSource('{STREAM}');"
            "source.onmessage = event => found.push(JSON.parse(event.data).text); true"
        )
        await browser.until("found.length === 1")
        await front.world.finish()
        await asyncio.sleep(3)  # a browser waits for 3 s before its first try
        await browser.until("source.readyState === EventSource.CONNECTING")
        await front.start()
        await front.world.publish("2")
        await browser.until(f"JSON.stringify(found) === {json.dumps(json.dumps(['1', '2'], separators=(',', ':')))}")


async def test_while_the_gateway_is_away_it_is_200_and_a_time(front: Front) -> None:
    await front.world.finish()
    async with aiohttp.ClientSession() as session, session.get(front.url + STREAM) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        assert (await answer.text()).startswith("retry: ")
    await front.start()
