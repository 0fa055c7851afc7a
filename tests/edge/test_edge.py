"""The HTTP edge as a part of a whole streamer."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client.parser import text_string_to_metric_families

from streamer.commands.check import findings
from streamer.config import loads
from streamer.edge import callers as modules
from streamer.edge.callers import Callers
from streamer.edge.edge import Handlers
from streamer.http.places import Places
from streamer.parts.edge import EdgePart
from streamer.parts.readiness import Readiness
from streamer.reporting import Reporter, Sample
from tests.certificates import DAY, TestAuthority
from tests.streamer.conftest import make_world as make_world  # a fixture
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

MakeWorld = Any
WAIT_S = 20
LISTEN = '[http]\nlisten = "127.0.0.1:0"\n'
PUBLISH = '[grip]\npublish = "127.0.0.1:0"\n'


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class ThreeEvents(Reporter):
    def samples(self) -> list[Sample]:
        return [("edge_events", ("stream",), 3)]


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """/stream says who asks, and holds who asks for `?hold`."""

    def make(_: EdgePart, callers: Callers | None, places: Places) -> Handlers:
        async def stream(request: web.Request) -> web.StreamResponse:
            assert callers is not None
            caller = await callers.of(request)
            response = web.StreamResponse()
            with places.taken("stream", lambda: callers.still_allowed(request, caller)):
                await response.prepare(request)
                await response.write(f"{caller.authority_name} {caller.ue_id:X}\n".encode())
                while request.query_string == "hold":
                    await asyncio.Event().wait()
            return response

        async def publish(_: web.Request) -> web.StreamResponse:
            return web.Response(text="Published\n")

        return Handlers(None, stream, None, publish, reporters=[ThreeEvents()])

    monkeypatch.setattr(EdgePart, "_handlers", make)


@pytest.mark.usefixtures("handlers")
async def test_a_streamer_serves_its_edge_and_stops_it(make_world: MakeWorld, http: aiohttp.ClientSession) -> None:
    world = await make_world(more=LISTEN + PUBLISH)
    edge = world.parts.of(EdgePart)
    async with http.get(f"http://127.0.0.1:{edge.port}/stream") as answer:
        assert (answer.status, await answer.text()) == (200, "vehicle1 8000\n")
    async with http.post(f"http://127.0.0.1:{edge.publish_port}/publish/", json={}) as answer:
        assert (answer.status, await answer.text()) == (200, "Published\n")
    held = await http.get(f"http://127.0.0.1:{edge.port}/stream?hold")
    samples = set(world.parts.samples())
    assert {("edge_connections", ("http",), 1), ("edge_connections", ("publish",), 1)} <= samples
    assert {("edge_clients", ("stream",), 1), ("edge_events", ("stream",), 3)} <= samples
    stopping = asyncio.create_task(world.stop())
    with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)):
        await asyncio.wait_for(held.read(), WAIT_S)
    await asyncio.wait_for(stopping, WAIT_S)
    with pytest.raises(aiohttp.ClientConnectorError):
        await http.get(f"http://127.0.0.1:{edge.port}/stream")


async def test_who_configures_no_edge_pays_nothing(make_world: MakeWorld) -> None:
    world = await make_world()
    assert (world.parts.of(EdgePart).port, world.parts.of(EdgePart).publish_port) == (0, 0)
    assert not [name for name, _, _ in world.parts.samples() if name.startswith("edge")]


def test_without_an_edge_nothing_of_it_is_imported() -> None:
    wanted = {"aiohttp", "aiohttp_sse", "jwt", "streamer.edge.server", "streamer.edge.callers"}
    code = f"import sys, streamer.app; print(*{wanted} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "\n"


RUNNING = """
import asyncio, os, sys
from pathlib import Path
from streamer.app import Streamer
from streamer.config import load

def ports():
    names = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")]
    own = {os.readlink(name) for name in names if os.path.lexists(name)}
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    found = [line.split() for table in tables for line in table]
    return [one[1] for one in found if one[3] == "0A" and f"socket:[{one[9]}]" in own]

async def main():
    streamer = await Streamer.create(load(Path(sys.argv[1])))
    running = asyncio.create_task(streamer.run())
    await streamer.assembly.ready.wait()
    print(sorted({"aiohttp", "aiohttp_sse", "jwt"} & set(sys.modules)), len(ports()))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

asyncio.run(main())
"""
ENDPOINT = '[[endpoint]]\nname = "cloud"\ntransport = "local"\nauthorities = ["cloud"]\n'


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("more", "expected"), [("", "[] 0\n"), (LISTEN + PUBLISH, "['aiohttp', 'aiohttp_sse', 'jwt'] 2\n")]
)
def test_a_gateway_without_an_edge_imports_nothing_of_it_and_opens_no_port(
    tmp_path: Path, more: str, expected: str
) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(f'[streamer]\ndata_dir = "{tmp_path}"\n{more}{ENDPOINT}')
    command = [sys.executable, "-c", RUNNING, str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert expected in done.stdout.splitlines(keepends=True), done.stdout + done.stderr


async def test_a_port_that_is_taken_ends_the_start(make_world: MakeWorld) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    world = await make_world(start=False, more=f'[http]\nlisten = "127.0.0.1:{port}"\n')
    with pytest.raises(BaseExceptionGroup) as raised:
        await world.start()
    found, _ = raised.value.split(UStatusError)
    assert f"http.listen 127.0.0.1:{port} can't be opened" in str(found and found.exceptions)
    taken.close()


async def test_a_missing_extra_is_said_with_what_to_install(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(start=False, more=LISTEN)
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jwt" else find(name))
    with pytest.raises(UStatusError, match=r"the HTTP edge needs pyjwt: try pip install pyjwt \(the extra") as raised:
        await world.start()
    assert raised.value.code == UCode.FAILED_PRECONDITION


@pytest.mark.usefixtures("handlers")
async def test_readyz_and_metrics_say_what_is_wrong_with_the_files_of_the_edge(
    make_world: MakeWorld, http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "TOKENS_LOOK_S", 0.01)
    authority, file = TestAuthority(tmp_path), tmp_path / "tokens"
    certificate, key = authority.issue("edge", 5 * DAY)
    file.write_text("//cloud/8001/1/0 secret\n")
    files = f'cert_file = "{certificate}"\nkey_file = "{key}"\ntokens_file = "{file}"\n'
    world = await make_world(start=False, more=LISTEN + files)
    section = world.config.streamer.model_copy(update={"admin": "127.0.0.1:0"})
    world.config = world.config.model_copy(update={"streamer": section})
    await world.start()
    at = f"http://127.0.0.1:{world.streamer.admin.port}"

    async def ready() -> dict[str, Any]:
        async with http.get(f"{at}/readyz") as answer:
            found: dict[str, Any] = json.loads(await answer.text())
            return found

    assert [
        one
        for one in (await ready())["notes"]
        if one.startswith(f"the HTTP edge: cert_file {certificate} expires in 5")
    ]
    async with http.get(f"{at}/metrics") as answer:
        families = {one.name: one.samples for one in text_string_to_metric_families(await answer.text())}
    (sample,) = families["up_streamer_certificate_expires_seconds"]
    assert sample.labels == {"endpoint": "[http]", "setting": "cert_file"}
    assert [one.value for one in families["up_streamer_edge_connections"]] == [0]
    file.write_text("secret\n")
    await world.until(lambda: world.parts.problems())
    world.parts.of(Readiness).states.look()
    (problem,) = world.parts.problems()
    assert problem.startswith(f"http.tokens_file {file} can't be used: line 1: expected a uEntity and its token")
    report = world.parts.of(Readiness).look()["streamer"]
    assert (report["state"], report["reason"], bool(report["reason_since"])) == ("degraded", problem, True)


def test_check_names_a_certificate_of_the_edge_that_cant_be_used(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    (certificate, _), (_, other) = authority.issue("one"), authority.issue("two")
    toml = '[[endpoint]]\nname = "vehicle"\ntransport = "local"\nauthorities = ["vehicle1"]\n'
    toml += f'[http]\nlisten = "127.0.0.1:0"\ncert_file = "{certificate}"\nkey_file = "{other}"\n'
    (found,) = findings(loads(toml), toml)
    assert found.what.startswith(f"http.cert_file: {certificate} belongs to another key")
    assert found.line == 7


CHANNEL = '[[channel]]\nname = "{}"\ntopic = "//vehicle1/8001/1/{}"\n'


@pytest.mark.parametrize(
    ("sections", "line", "expected"),
    [
        ('[http]\nlisten = "0.0.0.0:1"\n', 6, "can be reached from other machines: give cert_file, key_file and"),
        ('[http]\nlisten = "127.0.0.1:1"\ncert_file = "c"\n', 5, "cert_file and key_file go together"),
        ('[http]\nlisten = "127.0.0.1:1"\ntoken_file = "t"\n', 7, "did you mean 'tokens_file'?"),
        ('[http]\nlisten = "127.0.0.1:1"\nhosts = ["http://a"]\n', 7, "expected a host such as app.example.com"),
        ('[http]\nlisten = "127.0.0.1:1"\norigins = ["a.example"]\n', 7, "expected an origin such as https://"),
        ('[http]\nlisten = "127.0.0.1:1"\n[grip]\npublish = "127.0.0.1:1"\n', 8, "http.listen has the address"),
        ('[grip]\npublish = "0.0.0.0:1"\n', 6, "can be reached from other machines: give publish_key_file"),
        (CHANNEL.format("x", 8001), 6, "items of channel 'x' come in at grip.publish, which is not set"),
        (CHANNEL.format("x, y", 8001), 6, "expected a name that the header Grip-Channel can give: without , and ;"),
        (CHANNEL.format("x", "FFFF"), 7, "expected one topic such as //cloud/8001/1/8001"),
        ('[[proxy]]\nprefix = "/"\nbackend = "http://a"\n', 5, "come in at http.listen, which is not set"),
        ('[[proxy]]\nprefix = "x"\nbackend = "http://a"\n', 6, "expected the beginning of a path such as /app"),
        ('[[proxy]]\nprefix = "/"\nbackend = "a:80"\n', 7, "expected an address such as http://127.0.0.1:8000"),
    ],
)
def test_a_wrong_section_is_refused_with_its_line(sections: str, line: int, expected: str) -> None:
    toml = '[[endpoint]]\nname = "vehicle"\ntransport = "local"\nauthorities = ["vehicle1"]\n' + sections
    with pytest.raises(UStatusError) as raised:
        loads(toml, "x.toml")
    assert f"x.toml:{line}: " in raised.value.message
    assert expected in raised.value.message


@pytest.mark.parametrize("name", ["publish_key_file", "sig_key_file"])
def test_check_reads_the_keys(tmp_path: Path, name: str) -> None:
    file = tmp_path / "key"
    file.write_text("short")
    file.chmod(0o600)
    toml = '[[endpoint]]\nname = "vehicle"\ntransport = "local"\nauthorities = ["vehicle1"]\n'
    toml += f'[grip]\npublish = "127.0.0.1:0"\n{name} = "{file}"\n'
    (found,) = findings(loads(toml), toml)
    assert (found.line, found.fatal) == (7, True)
    assert found.what.startswith(f"grip.{name}: the key file {file} can't be used: expected 32 bytes or more")


def test_check_names_the_mistakes_of_the_file_of_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("//cloud/8001/1/0\n")
    file.chmod(0o600)
    toml = '[[endpoint]]\nname = "vehicle"\ntransport = "local"\nauthorities = ["vehicle1"]\n'
    toml += f'[http]\nlisten = "127.0.0.1:0"\ntokens_file = "{file}"\n'
    (found,) = findings(loads(toml), toml)
    assert (found.line, found.fatal) == (7, True)
    assert found.what == f"http.tokens_file {file} can't be used: line 1: expected a uEntity and its token, got 1 words"
    file.unlink()
    (found,) = findings(loads(toml), toml)
    assert found.what == f"http.tokens_file: {file} can't be read: No such file or directory"


async def test_an_item_of_a_publisher_reaches_a_stream_until_its_token_is_withdrawn(
    make_world: MakeWorld, http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "TOKENS_LOOK_S", 0.01)
    file, key = tmp_path / "tokens", tmp_path / "publishers.key"
    file.write_text("//vehicle1/8001/1/0 secret\n")
    key.write_text("k" * 32)
    channel = '[[channel]]\nname = "trip"\ntopic = "//vehicle1/8001/1/8001"\n'
    more = f'{LISTEN}tokens_file = "{file}"\n{PUBLISH}publish_key_file = "{key}"\n{channel}'
    world = await make_world(more=more)
    edge = world.parts.of(EdgePart)
    stream_url = f"http://127.0.0.1:{edge.port}/stream?topic=up://vehicle1/8001/1/8001&since=earliest"
    async with http.get(stream_url) as answer:
        assert answer.status == 401
    item = {"channel": "trip", "id": "1", "formats": {"http-stream": {"content": "100 m"}}}
    signed = jwt.encode({"exp": int(time.time()) + 60}, "k" * 32, "HS256")
    publish_url = f"http://127.0.0.1:{edge.publish_port}/publish/"
    for token, status in ((signed, 200), ("forged", 401)):
        async with http.post(
            publish_url, json={"items": [item]}, headers={"Authorization": f"Bearer {token}"}
        ) as answer:
            assert answer.status == status
    async with http.get(stream_url, headers={"Authorization": "Bearer secret"}) as answer:
        assert answer.status == 200
        while b'"text":"100 m"' not in await asyncio.wait_for(answer.content.readline(), WAIT_S):
            pass
        file.write_text("//vehicle1/8001/1/0 another\n")
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)):
            await asyncio.wait_for(answer.read(), WAIT_S)
    samples = set(world.parts.samples())
    assert {("edge_events", ("stream",), 1), ("edge_refused", ("token",), 2)} <= samples


async def test_a_key_of_publishers_that_cant_be_used_ends_the_start(make_world: MakeWorld, tmp_path: Path) -> None:
    world = await make_world(start=False, more=f'{PUBLISH}publish_key_file = "{tmp_path}/none"\n')
    with pytest.raises(BaseExceptionGroup) as raised:
        await world.start()
    found, _ = raised.value.split(UStatusError)
    assert f"the key file {tmp_path}/none can't be used" in str(found and found.exceptions)


async def test_a_request_that_its_backend_holds_has_the_items_that_are_published(
    make_world: MakeWorld, http: aiohttp.ClientSession
) -> None:
    async def trip(_: web.Request) -> web.Response:
        return web.Response(text="0 m\n", headers={"Grip-Hold": "stream", "Grip-Channel": "trip"})

    application = web.Application()
    application.router.add_get("/app/trip", trip)
    async with TestServer(application) as backend:
        proxy = f'[[proxy]]\nprefix = "/app"\nbackend = "http://127.0.0.1:{backend.port}"\n'
        channel = '[[channel]]\nname = "trip"\ntopic = "//vehicle1/8001/1/8001"\n'
        world = await make_world(more=LISTEN + PUBLISH + channel + proxy)
        edge = world.parts.of(EdgePart)
        async with http.get(f"http://127.0.0.1:{edge.port}/app/trip", headers={"Host": "evil.example"}) as answer:
            assert answer.status == 403
        async with http.get(f"http://127.0.0.1:{edge.port}/app/trip") as answer:
            assert await asyncio.wait_for(answer.content.readline(), WAIT_S) == b"0 m\n"
            item = {"channel": "trip", "id": "1", "formats": {"http-stream": {"content": "100 m\n"}}}
            async with http.post(f"http://127.0.0.1:{edge.publish_port}/publish/", json={"items": [item]}) as published:
                assert published.status == 200
            assert await asyncio.wait_for(answer.content.readline(), WAIT_S) == b"100 m\n"
            samples = set(world.parts.samples())
            assert {("edge_clients", ("held_stream",), 1), ("edge_events", ("held_stream",), 1)} <= samples
            await world.stop()


@pytest.mark.parametrize(
    "more", [LISTEN, PUBLISH, LISTEN + PUBLISH, LISTEN + '[[proxy]]\nprefix = "/"\nbackend = "http://127.0.0.1:9"\n']
)
async def test_each_metric_of_the_edge_stands_once(make_world: MakeWorld, more: str) -> None:
    world = await make_world(more=more)
    labels = [(name, values) for name, values, _ in world.parts.samples()]
    assert len(labels) == len(set(labels))
    assert not world.parts.problems()
