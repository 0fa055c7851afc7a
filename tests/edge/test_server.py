"""The HTTP servers of the edge against slow, greedy and hostile clients, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs
from yarl import URL

from streamer.config.edge import GripSection, HttpSection
from streamer.edge import server as servers
from streamer.edge.callers import Callers
from streamer.edge.server import EdgeServer, Handler, PublishServer
from streamer.http import lines
from streamer.http.lines import ACCEPTED_AT_ONCE, break_off
from streamer.http.places import Places
from tests.certificates import TestAuthority
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

WAIT_S = 20
GET = b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def hello(_: web.Request) -> web.StreamResponse:
    return web.Response(text="hello\n")


class Edge:
    """An open edge whose port is known."""

    def __init__(self, server: EdgeServer, places: Places, port: int) -> None:
        self.server, self.places, self.port = server, places, port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        ((_, _, count),) = self.server.samples()
        return int(count)

    async def ask(self, request: bytes) -> bytes:
        """Everything that comes until the connection ends."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            await writer.drain()
            return await asyncio.wait_for(reader.read(), WAIT_S)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def until_refused(self, reason: str, count: int = 1) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.places.refused[reason] < count:  # noqa: ASYNC110 - a counter has no event
                await asyncio.sleep(0.005)


Serve = Callable[..., Awaitable[Edge]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def open_(stream: Handler = hello, proxied: Handler | None = None, **settings: Any) -> Edge:
            section = HttpSection(listen="127.0.0.1:0", **settings)
            places = Places(section.clients_max)
            callers = Callers(section, "vehicle1", places.refused)
            server = EdgeServer(section, stream, proxied, callers=callers, places=places)
            stack.push_async_callback(server.close)
            return Edge(server, places, await server.open())

        yield open_


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Held:
    """A handler that holds its client until it is told to go on."""

    def __init__(self, places: Callable[[], Places]) -> None:
        self._places = places
        self.begun, self.ended, self.go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        with self._places().taken("stream"):
            try:
                await response.prepare(request)
                await response.write(b"first\n")
                self.begun.set()
                await self.go_on.wait()
                return response
            finally:
                self.ended.set()


# Routes


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/stream", 200, "hello"),
        ("GET", "/stream?topic=x", 200, "hello"),
        ("GET", "/%73tream", 200, "hello"),
        ("GET", "/", 404, "/stream"),
        ("GET", "/stream/", 404, "/stream"),
        ("POST", "/", 404, "/stream"),
        ("POST", "/stream", 405, "GET only"),
        ("DELETE", "/stream", 405, "GET only"),
        ("OPTIONS", "/stream", 204, ""),
    ],
)
async def test_what_is_asked_is_answered(
    serve: Serve, http: aiohttp.ClientSession, method: str, path: str, status: int, said: str
) -> None:
    edge = await serve()
    async with http.request(method, f"{edge.url}{path}") as answer:
        assert (answer.status, said in await answer.text()) == (status, True)
        assert answer.headers["Server"] == "up-streamer"
        assert status != 405 or answer.headers["Allow"] == "GET,OPTIONS"


async def test_all_but_streams_goes_to_the_backends_with_its_body_as_it_was_sent(
    serve: Serve, http: aiohttp.ClientSession
) -> None:
    async def proxied(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        return web.Response(body=body, headers={"Method": request.method, "Path": request.path_qs, "Server": "theirs"})

    edge = await serve(proxied=proxied)
    headers, url = {"Content-Encoding": "gzip"}, URL(f"{edge.url}/app?x=%2F", encoded=True)
    async with http.put(url, data=b"no gzip", headers=headers, expect100=True) as answer:
        assert (answer.status, await answer.read()) == (200, b"no gzip")
        found = (answer.headers["Method"], answer.headers["Path"], answer.headers["Server"])
        assert found == ("PUT", "/app?x=%2F", "theirs")


async def test_connections_are_kept_between_requests(serve: Serve) -> None:
    edge = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    for _ in range(50):
        writer.write(GET)
        assert b"hello\n" in await asyncio.wait_for(reader.readuntil(b"hello\n"), WAIT_S)
    writer.write(GET * 50)  # one behind the other
    for _ in range(50):
        await asyncio.wait_for(reader.readuntil(b"hello\n"), WAIT_S)
    assert edge.connections == 1
    writer.close()


async def test_a_connection_without_a_request_is_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "IDLE_S", 0.1)
    edge = await serve()
    assert (await edge.ask(GET)).endswith(b"hello\n")


# Errors


async def test_a_failure_is_logged_once_and_says_nothing_to_strangers(
    serve: Serve, http: aiohttp.ClientSession
) -> None:
    async def fails(_: web.Request) -> web.StreamResponse:
        raise ValueError("a secret")

    edge = await serve(fails)
    with capture_logs() as logs:
        async with http.get(f"{edge.url}/stream") as answer:
            assert (answer.status, "secret" in await answer.text()) == (500, False)
    (line,) = logs
    assert (line["event"], line["path"]) == ("a request at the HTTP edge has failed", "/stream")


@pytest.mark.parametrize(
    ("code", "status"), [(UCode.INVALID_ARGUMENT, 400), (UCode.UNAVAILABLE, 503), (UCode.INTERNAL, 500)]
)
async def test_errors_of_handlers_have_a_status(
    serve: Serve, http: aiohttp.ClientSession, code: UCode.ValueType, status: int
) -> None:
    async def fails(_: web.Request) -> web.StreamResponse:
        raise UStatusError(code, "expected this")

    edge = await serve(fails)
    async with http.get(f"{edge.url}/stream") as answer:
        assert (answer.status, "expected this" in await answer.text()) == (status, status != 500)
        assert ("Retry-After" in answer.headers) == (status == 503)


async def test_an_answer_that_fails_in_its_middle_is_cut_so_that_its_client_notices(
    serve: Serve, http: aiohttp.ClientSession
) -> None:
    async def fails(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        raise ValueError("a secret")

    edge = await serve(fails)
    with capture_logs() as logs, pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)):
        async with http.get(f"{edge.url}/stream") as answer:
            await answer.read()
    assert [line["event"] for line in logs] == ["a request at the HTTP edge has failed"]


async def test_a_port_that_is_taken_is_said_plainly(serve: Serve) -> None:
    edge = await serve()
    section = HttpSection(listen=f"127.0.0.1:{edge.port}")
    second = EdgeServer(section, hello, callers=Callers(section, "vehicle1"), places=Places(1))
    with pytest.raises(UStatusError, match=f"http.listen 127.0.0.1:{edge.port} can't be opened") as raised:
        await second.open()
    assert raised.value.code == UCode.UNAVAILABLE
    await second.close()
    await second.close()


# Limits


async def test_a_head_that_is_slow_or_huge_ends_its_connection(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = await serve()
    assert await edge.ask(b"GET /stream HTTP/1.1\r\n" + b"A: b\r\n" * 6_000) == b""
    assert edge.places.refused["large request"] == 1
    monkeypatch.setattr(servers, "HEAD_S", 0.1)
    edge = await serve()
    assert await edge.ask(b"") == b""
    assert await edge.ask(b"GET /stream HT") == b""
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    writer.write(GET)
    await asyncio.wait_for(reader.readuntil(b"hello\n"), WAIT_S)
    writer.write(b"G")  # of a second request, which never comes
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    writer.close()
    assert edge.places.refused["slow head"] == 3


async def test_a_body_is_bounded_in_bytes_and_time(
    serve: Serve, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def proxied(request: web.Request) -> web.StreamResponse:
        return web.Response(text=str(len(await request.read())))

    edge = await serve(proxied=proxied)
    for size, status in ((servers.BODY_BYTES_MAX, 200), (servers.BODY_BYTES_MAX + 1, 413)):
        async with http.post(edge.url, data=io.BytesIO(b"x" * size)) as answer:
            assert answer.status == status
        post = f"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n".encode()
        whole = await edge.ask(post + b"x" * size)
        assert whole.startswith(f"HTTP/1.1 {status} ".encode()), "with the head in one piece"

    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"x" * 1_000

    assert not edge.places.refused
    async with http.post(edge.url, data=chunks(1_000)) as answer:
        assert (answer.status, await answer.text()) == (200, "1000000")
    async with http.post(edge.url, data=chunks(1_100)) as answer:
        assert answer.status == 413
    with contextlib.suppress(aiohttp.ClientError):
        async with http.post(edge.url, data=chunks(1_000_000)) as answer:
            assert answer.status == 413
    monkeypatch.setattr(servers, "BODY_S", 0.1)
    edge = await serve(proxied=proxied)
    assert await edge.ask(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nabc") == b""
    assert edge.places.refused["slow body"] == 1


async def test_large_answers_that_nobody_takes_are_bounded_all_together(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are closed that wait for longest; who has a usual amount to take is not, nor the last one."""
    monkeypatch.setattr(lines, "UNSENT_BYTES_MAX", 10 << 20)
    sizes = iter([100_000, *[30 << 20] * 4])

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x" * next(sizes))
        return response

    edge, readers = await serve(stream), []
    for closed in (0, 0, 1, 2, 3):
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.port, limit=1_000)
        readers.append((reader, writer))
        writer.write(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await edge.until_refused("slow reader", closed)
        await asyncio.sleep(0.2)
        assert edge.places.refused["slow reader"] == closed
    for _, writer in readers:
        writer.transport.abort()


async def test_bodies_are_bounded_all_together(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "BODIES_BYTES_MAX", 1_500)
    monkeypatch.setattr(servers, "SMALL_BYTES_MAX", 100)
    arrived = asyncio.Event()

    async def proxied(request: web.Request) -> web.StreamResponse:
        arrived.set()
        return web.Response(text=str(len(await request.read())))

    edge = await serve(proxied=proxied)
    post = b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1000\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    writer.write(post)
    await asyncio.wait_for(arrived.wait(), WAIT_S)
    answer = await edge.ask(post + b"x" * 1_000)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1" in answer
    assert (await edge.ask(post.replace(b"1000", b"50") + b"x" * 50)).endswith(b"50"), "a small one has room"
    writer.write(b"x" * 1_000)
    assert (await asyncio.wait_for(reader.read(), WAIT_S)).endswith(b"1000")
    assert (await edge.ask(post + b"x" * 1_000)).endswith(b"1000")
    writer.close()


async def test_one_connection_too_many_takes_the_place_of_an_idle_one_and_of_no_stream(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SPARE", 2)
    held = Held(lambda: edge.places)
    edge = await serve(held, hello, clients_max=1)
    streams = []
    for _ in range(2):
        held.begun.clear()
        streams.append(await asyncio.open_connection("127.0.0.1", edge.port))
        streams[-1][1].write(GET)
        await asyncio.wait_for(held.begun.wait(), WAIT_S)
    idle = await asyncio.open_connection("127.0.0.1", edge.port)
    assert (
        await edge.ask(GET.replace(b"/stream", b"/").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    ).endswith(b"hello\n")
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(idle[0].read(), WAIT_S) == b"", "it has made room"
    held.begun.clear()
    third = await asyncio.open_connection("127.0.0.1", edge.port)
    third[1].write(GET)
    await asyncio.wait_for(held.begun.wait(), WAIT_S)
    assert await edge.ask(GET) == b"", "all are busy"
    assert edge.places.refused["connections"] == 2
    assert edge.connections == 3
    for reader, writer in (*streams, third):
        assert b"first" in await asyncio.wait_for(reader.readuntil(b"first"), WAIT_S)
        writer.close()
    idle[1].close()
    async with asyncio.timeout(WAIT_S):
        while edge.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("why", ["an error", "broken off", "the end of the edge"])
async def test_a_client_of_http_1_0_sees_that_its_answer_is_not_whole(serve: Serve, why: str) -> None:
    """As nginx, whose default it is: the end of the connection is the end of the answer."""

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            response = await held(request)
            if why == "an error":
                raise ValueError
            break_off(request)
        except asyncio.CancelledError:
            break_off(request)
            raise
        return response

    held = Held(lambda: edge.places)
    edge = await serve(handler)
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    writer.write(GET.replace(b"HTTP/1.1", b"HTTP/1.0"))
    await asyncio.wait_for(reader.readuntil(b"first\n"), WAIT_S)
    if why == "the end of the edge":
        await edge.server.close()
    held.go_on.set()
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), WAIT_S)
    writer.close()


async def test_many_at_once_wait_and_take_few_files_in_a_turn_of_the_loop(serve: Serve) -> None:
    """Those beyond the limit have a file until they are closed: a crowd must not take those of the logs."""
    edge = await serve(clients_max=1_000)
    with contextlib.ExitStack() as stack:
        for _ in range(200):  # the loop accepts none meanwhile
            stack.enter_context(socket.create_connection(("127.0.0.1", edge.port), timeout=0.9))
        before, steps = 0, []
        async with asyncio.timeout(WAIT_S):
            while edge.connections < 200:
                await asyncio.sleep(0)
                steps.append(edge.connections - before)
                before = edge.connections
        assert max(steps) <= ACCEPTED_AT_ONCE


async def test_a_handler_ends_when_its_client_goes(serve: Serve) -> None:
    held = Held(lambda: edge.places)
    edge = await serve(held)
    _, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    writer.write(GET)
    await asyncio.wait_for(held.begun.wait(), WAIT_S)
    assert dict(edge.places.count) == {"stream": 1, "poll": 0, "held_stream": 0, "held_response": 0}
    writer.transport.abort()
    await asyncio.wait_for(held.ended.wait(), WAIT_S)
    assert len(edge.places) == 0


@pytest.mark.parametrize("tls", [False, True])
async def test_who_takes_nothing_is_cut_off_and_who_takes_little_is_not(
    serve: Serve, tmp_path: Path, *, tls: bool
) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65_536)

    authority = TestAuthority(tmp_path)
    certificate, key = authority.issue("edge")
    settings = {"cert_file": certificate, "key_file": key} if tls else {}
    trusting = ssl.create_default_context(cafile=authority.ca) if tls else None
    edge = await serve(endless, send_s=0.3, **settings)
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port, ssl=trusting, limit=65_536)
    writer.write(GET)
    for _ in range(20):
        await asyncio.wait_for(reader.readexactly(1 << 20), WAIT_S)
        await asyncio.sleep(0.05)
    assert edge.places.refused["slow reader"] == 0
    await edge.until_refused("slow reader")
    writer.transport.abort()


# TLS


async def test_a_renewed_certificate_is_shown_to_who_connects_next(serve: Serve, tmp_path: Path) -> None:
    first, second = TestAuthority(tmp_path, "first"), TestAuthority(tmp_path, "second")
    certificate, key = first.issue("edge")
    edge = await serve(cert_file=certificate, key_file=key)

    async def status(authority: TestAuthority) -> int:
        trusting = ssl.create_default_context(cafile=authority.ca)
        connector = aiohttp.TCPConnector(ssl=trusting, force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get(f"https://localhost:{edge.port}/stream") as answer,
        ):
            return answer.status

    assert await status(first) == 200
    assert await edge.ask(GET) == b"", "not without TLS"
    second.issue("edge")
    assert await status(second) == 200
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await status(first)
    assert list(edge.server.conditions()) == []
    certificate.write_bytes(b"half of a file")
    assert await status(second) == 200
    (condition,) = edge.server.conditions()
    assert condition.text.startswith(f"http.cert_file {certificate} and http.key_file {key} can't be used: ")


async def test_a_certificate_that_cant_be_used_is_said_at_the_start(serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(UStatusError, match=r"http.cert_file .* and http.key_file .* can't be used"):
        await serve(cert_file=tmp_path / "none", key_file=tmp_path / "none")


async def test_a_handshake_that_never_comes_ends_its_connection(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "HEAD_S", 0.2)
    certificate, key = TestAuthority(tmp_path).issue("edge")
    edge = await serve(cert_file=certificate, key_file=key)
    assert await edge.ask(b"") == b""
    assert edge.connections == 0


# The end


async def test_the_edge_stops_at_once_for_streams_and_lets_short_answers_end(
    serve: Serve, http: aiohttp.ClientSession
) -> None:
    held, asked, may_answer = Held(lambda: edge.places), asyncio.Event(), asyncio.Event()

    async def proxied(_: web.Request) -> web.StreamResponse:
        asked.set()
        await may_answer.wait()
        return web.Response(text="an answer")

    edge = await serve(held, proxied)
    reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    writer.write(GET)
    idle, other = await asyncio.open_connection("127.0.0.1", edge.port)
    short = asyncio.create_task(http.get(edge.url))
    await asyncio.wait_for(asyncio.gather(held.begun.wait(), asked.wait()), WAIT_S)
    closing = asyncio.create_task(edge.server.close())
    streamed = await asyncio.wait_for(reader.read(), WAIT_S)
    assert b"first" in streamed
    assert not streamed.endswith(b"0\r\n\r\n"), "its client comes back"
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(idle.read(), WAIT_S) == b""
    may_answer.set()
    async with await asyncio.wait_for(short, WAIT_S) as answer:
        assert await answer.text() == "an answer"
    await asyncio.wait_for(closing, WAIT_S)
    assert edge.connections == 0
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await asyncio.open_connection("127.0.0.1", edge.port)
    writer.close()
    other.close()


async def test_who_never_ends_is_cut_when_the_edge_stops(serve: Serve) -> None:
    begun = asyncio.Event()

    async def endless(_: web.Request) -> web.StreamResponse:
        begun.set()
        while True:
            with contextlib.suppress(Exception):
                await asyncio.Event().wait()

    edge = await serve(endless)
    asking = asyncio.create_task(edge.ask(GET))
    await asyncio.wait_for(begun.wait(), WAIT_S)
    await asyncio.wait_for(edge.server.close(), WAIT_S)
    assert await asking == b""


# Open files


@pytest.mark.parametrize(
    ("soft", "hard", "allowed", "raised_to"),
    [
        (1_024, 4_096, 1_000, 1_256),
        (65_536, 65_536, 1_000, None),
        (512, 1_024, 768, 1_024),
        (100, 100, 1, 100),
        (-1, -1, 1_000, None),
        (1_024, -1, 1_000, 1_256),
    ],
)
def test_connections_are_as_many_as_files_may_be_open(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, allowed: int, raised_to: int | None
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(servers.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(servers.resource, "setrlimit", lambda _, limits: set_to.append(limits))
    assert servers.allowed_connections(1_000) == allowed
    assert set_to == ([] if raised_to is None else [(raised_to, hard)])


async def test_too_few_open_files_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers.resource, "getrlimit", lambda _: (1_024, 1_024))
    monkeypatch.setattr(servers.resource, "setrlimit", lambda *_: None)
    section = HttpSection(listen="127.0.0.1:0")
    server = EdgeServer(section, hello, callers=Callers(section, "vehicle1"), places=Places(1))
    assert server.note.startswith("http.clients_max is 10000, but the limit of open files (ulimit -n) lets")


# Publishers


@pytest.fixture
async def publishing() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    async with AsyncExitStack() as stack:

        async def open_(handler: Handler, **settings: Any) -> str:
            server = PublishServer(GripSection(publish="127.0.0.1:0", **settings), handler, Places(1))
            stack.push_async_callback(server.close)
            return f"http://127.0.0.1:{await server.open()}"

        yield open_


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/publish/", {}, 200),
        ("POST", "/publish", {}, 200),
        ("GET", "/publish/", {}, 405),
        ("POST", "/", {}, 404),
        ("POST", "/publish/", {"Origin": "http://127.0.0.1"}, 403),
        ("POST", "/publish/", {"Host": "evil.example"}, 403),
        ("POST", "/publish/", {"Host": "localhost:5561"}, 200),
    ],
)
async def test_publishers_post_and_pages_of_a_browser_do_not(
    publishing: Callable[..., Awaitable[str]],
    http: aiohttp.ClientSession,
    method: str,
    path: str,
    headers: dict[str, str],
    status: int,
) -> None:
    url = await publishing(hello)
    async with http.request(method, url + path, headers=headers) as answer:
        assert answer.status == status


async def test_what_a_publisher_has_sent_is_finished_though_it_goes(
    publishing: Callable[..., Awaitable[str]], http: aiohttp.ClientSession
) -> None:
    begun, go_on, committed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def publish(request: web.Request) -> web.StreamResponse:
        await request.read()
        begun.set()
        await go_on.wait()
        committed.set()
        return web.Response(text="Published\n")

    url = await publishing(publish)
    posting = asyncio.create_task(http.post(f"{url}/publish/", data=b"{}"))
    await asyncio.wait_for(begun.wait(), WAIT_S)
    posting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await posting
    await asyncio.sleep(0.05)
    go_on.set()
    await asyncio.wait_for(committed.wait(), WAIT_S)
