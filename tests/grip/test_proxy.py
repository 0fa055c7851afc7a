"""The proxy: what passes between client and backend, what holds a request, and how an answer ends."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from streamer.grip.items import Item, StreamFormat
from tests.grip.held_parties import CHANNEL, HOST, WAIT_S, Edge, Handler, response_item, serve, stream_item, until

Start = Callable[..., Awaitable[Edge]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a backend with one handler, and an edge before it."""
    made: list[Any] = []

    async def edge_of(handler: Handler, **options: Any) -> Edge:
        runner, port = await serve(handler, cancels=True)
        edge = await Edge.open(port, **options)
        made.extend([edge.close, runner.cleanup])
        return edge

    yield edge_of
    for close in made:
        await close()


def held(kind: str = "stream", *channels: str, **headers: str) -> dict[str, str]:
    others = {name.replace("_", "-"): value for name, value in headers.items()}
    return {"Grip-Hold": kind, "Grip-Channel": ", ".join(channels or (CHANNEL,)), **others}


async def test_a_request_passes_without_what_is_of_one_connection_or_forged(start: Start) -> None:
    seen: list[tuple[str, str, list[tuple[str, str]], bytes]] = []

    async def backend(request: web.Request) -> web.Response:
        seen.append((request.method, request.raw_path, list(request.headers.items()), await request.read()))
        return web.Response(text="ok")

    edge = await start(backend)
    curl = await edge.curl(
        "/a%20b/?x=%2F&y",
        *("Connection: X-Mine, keep-alive", "X-Mine: 1", "Keep-Alive: 5", "TE: trailers", "Upgrade: websocket"),
        *("Grip-Sig: forged", "grip-last: reliable-stream; last-id=1", "X-Other: kept", "Cookie: a=b"),
        *("X-Forwarded-For: 10.0.0.1", "X-Forwarded-Proto: https", "Content-Length: 4"),
        method="PUT",
        body=b"body",
    )
    await curl.until("ok")
    ((method, path, headers, body),) = seen
    assert (method, path, body) == ("PUT", "/a%20b/?x=%2F&y", b"body")
    assert dict(headers) == {
        "Host": f"{HOST}:{edge.port}",
        "X-Other": "kept",
        "Cookie": "a=b",
        "Content-Length": "4",
        "X-Forwarded-For": f"10.0.0.1, {HOST}",
        "X-Forwarded-Proto": "http",
        "X-Forwarded-Host": f"{HOST}:{edge.port}",
    }


async def test_an_answer_passes_as_it_comes(start: Start) -> None:
    """Not decompressed, no redirect followed, all cookies, no header of GRIP."""
    packed = gzip.compress(b"packed")

    async def backend(_: web.Request) -> web.Response:
        headers = {"Location": "http://elsewhere/", "Content-Encoding": "gzip", "Grip-Channel": "x", "Keep-Alive": "5"}
        answer = web.Response(status=302, reason="Over There", body=packed, headers=headers)
        answer.set_cookie("one", "1")
        answer.set_cookie("two", "2")
        return answer

    edge = await start(backend)
    curl = await edge.curl()
    await until_ended(curl, packed)
    assert curl.head.startswith("HTTP/1.1 302 Over There\r\n")
    assert curl.head.count("Set-Cookie: ") == 2
    assert "Location: http://elsewhere/" in curl.head
    assert f"Content-Length: {len(packed)}" in curl.head
    assert "Content-Encoding: gzip" in curl.head
    assert "grip" not in curl.head.lower()
    assert "Keep-Alive" not in curl.head


async def until_ended(curl: Any, end: bytes) -> None:
    async with asyncio.timeout(WAIT_S):
        while not curl.raw.endswith(end):
            assert await curl._more()


async def test_bodies_stream_both_ways_unbuffered(start: Start) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def backend(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for part in request.content.iter_any():
            await response.write(part)
            begun.set()
        await go_on.wait()
        await response.write(b"end")
        return response

    edge = await start(backend)
    curl = await edge.curl("/", "Transfer-Encoding: chunked", method="POST", body=b"5\r\nfirst\r\n")
    await begun.wait()
    await curl.until("first")
    curl._writer.write(b"6\r\nsecond\r\n0\r\n\r\n")
    await curl.until("second")
    go_on.set()
    await curl.until_end()
    assert curl.body == b"firstsecondend"
    assert curl.is_whole


async def test_a_head_request_is_never_held(start: Start) -> None:
    async def backend(_: web.Request) -> web.Response:
        return web.Response(text="12345", headers=held())

    edge = await start(backend)
    curl = await edge.curl(method="HEAD")
    await until_ended(curl, b"\r\n\r\n")
    assert "Content-Length: 5" in curl.head
    assert "grip" not in curl.head.lower()


@pytest.mark.parametrize(
    "path",
    ["/../x", "/a/./b", "/a/%2e%2E/b", "/a/..", "/a/..%2fb", "/a%2F%2e%2e%2Fb", "/a/..;x/b", "/a\\..\\b", "/a/..%5Cb"],
)
async def test_a_path_that_a_backend_would_read_otherwise(start: Start, path: str) -> None:
    async def backend(_: web.Request) -> web.Response:
        raise AssertionError("it was asked")

    edge = await start(backend)
    curl = await edge.curl(path)
    await curl.until("expected a path without . and .. in it\n")
    assert curl.head.startswith("HTTP/1.1 400 ")


async def test_a_method_whose_answer_is_not_for_clients(start: Start) -> None:
    async def backend(_: web.Request) -> web.Response:
        raise AssertionError("it was asked")

    edge = await start(backend)
    curl = await edge.curl(method="TRACE")
    await curl.until("TRACE does not pass\n")
    assert curl.head.startswith("HTTP/1.1 405 ")


@pytest.mark.parametrize("line", [b"X: a\x0bb", b"X: a\x7fb", b"X: a\x00b", b"X: a\rb"])
async def test_headers_with_control_characters(line: bytes) -> None:
    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n%b\r\nContent-Length: 2\r\n\r\nok" % line)
        writer.close()

    async with await asyncio.start_server(garbage, HOST, 0) as server:
        edge = await Edge.open(server.sockets[0].getsockname()[1])
        curl = await edge.curl()
        await until_ended(curl, b"\n")
        await edge.close()
    assert curl.head.startswith("HTTP/1.1 502 ")


async def test_the_log_has_no_secrets_of_a_request_and_no_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nSet-Cookie: secret\rX: y\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(garbage, HOST, 0) as server:
        edge = await Edge.open(server.sockets[0].getsockname()[1])
        for _ in range(3):
            curl = await edge.curl("/a?token=secret", "Cookie: secret")
            await curl.until("the backend is unreachable\n")
        await edge.close()
    said = capsys.readouterr().out
    assert "secret" not in said
    assert said.count("a backend has not answered as it should") == 1


async def test_a_backend_that_is_slow(start: Start) -> None:
    async def backend(_: web.Request) -> web.Response:
        await asyncio.sleep(WAIT_S)
        return web.Response()

    edge = await start(backend, timeout_s=0.05)
    curl = await edge.curl()
    await curl.until("the backend is slow\n")
    assert curl.head.startswith("HTTP/1.1 504 ")


async def test_a_client_that_goes_ends_the_request_to_the_backend(start: Start) -> None:
    came, ended = asyncio.Event(), asyncio.Event()

    async def backend(_: web.Request) -> web.Response:
        came.set()
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            ended.set()
        return web.Response()

    edge = await start(backend, timeout_s=60)
    curl = await edge.curl()
    await came.wait()
    curl.cut()
    async with asyncio.timeout(WAIT_S):
        await ended.wait()


async def test_an_answer_that_breaks_off_is_not_whole(start: Start) -> None:
    async def backend(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begin")
        assert request.transport is not None
        request.transport.abort()
        return response

    edge = await start(backend)
    curl = await edge.curl()
    await curl.until_end()
    assert not curl.is_whole
    assert ("grip_cuts", ("backend",), 1) in list(edge.proxy.samples())


MALFORMED = {
    "Grip-Hold": {"Grip-Hold": "perhaps"},
    "no channel": {"Grip-Hold": "stream"},
    "unknown channel": held("stream", "nowhere"),
    "prev-id without link": held("stream", f"{CHANNEL}; prev-id=1"),
    "compressed": held(Content_Encoding="gzip"),
    "no body": held(Grip_Status="204"),
    "timeout": held("response", Grip_Timeout="soon"),
}


@pytest.mark.parametrize("headers", MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_hold(start: Start, headers: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    async def backend(_: web.Request) -> web.Response:
        return web.Response(body=b"secret", headers=headers)

    edge = await start(backend)
    curl = await edge.curl()
    await curl.until("the answer is malformed\n")
    assert curl.head.startswith("HTTP/1.1 502 ")
    assert "grip" not in curl.head.lower()
    assert edge.clients.count.total() == 0


async def test_a_status_of_grip_replaces_that_of_the_answer(start: Start) -> None:
    async def backend(_: web.Request) -> web.Response:
        return web.Response(text="x", headers=held(Grip_Status="202 Come In"))

    edge = await start(backend)
    curl = await edge.curl()
    await curl.until("x")
    assert curl.head.startswith("HTTP/1.1 202 Come In\r\n")


async def test_items_without_ids_and_an_action_that_closes(start: Start) -> None:
    async def backend(_: web.Request) -> web.Response:
        return web.Response(text="first\n", headers=held("stream", CHANNEL, "other"))

    edge = await start(backend)
    curl = await edge.curl()
    await edge.held(1)
    edge.channels.publish(stream_item(b"a\n"))
    edge.channels.publish(stream_item(b"\x00\xff\n", "1", "0", "other"))
    edge.channels.publish(response_item(b"not for streams"))
    edge.channels.publish(stream_item(b"a\n"))
    edge.channels.publish(Item(CHANNEL, None, None, False, StreamFormat(closes=True), None))
    await curl.until_end()
    assert curl.is_whole
    assert curl.body == b"first\na\n\x00\xff\na\n"
    await edge.held(0)
    assert edge.clients.count.total() == 0


@pytest.mark.parametrize("mode", ["idle", "interval"])
async def test_a_stream_is_kept_alive(start: Start, mode: str) -> None:
    async def backend(_: web.Request) -> web.Response:
        return web.Response(
            text="first\n", headers=held(Grip_Keep_Alive=f"\\n; format=cstring; timeout=1; mode={mode}")
        )

    edge = await start(backend)
    curl = await edge.curl()
    await curl.until("first\n\n")


async def test_a_slow_client_is_cut_off(start: Start) -> None:
    async def backend(_: web.Request) -> web.Response:
        return web.Response(text="first\n", headers=held())

    edge = await start(backend, send_s=0.05)
    curl = await edge.curl()
    await curl.until("first\n")
    for _ in range(100):
        edge.channels.publish(stream_item(b"x" * 1_000_000))
        await asyncio.sleep(0)
        if not edge.channels.listeners[CHANNEL]:
            break
    await edge.held(0)
    await until(lambda: edge.clients.count.total() == 0)
    cuts = {labels[0]: count for name, labels, count in edge.proxy.samples() if name == "grip_cuts"}
    assert cuts in ({"slow client": 1}, {"unrecoverable": 1})
    assert not curl.is_whole


async def test_too_many_held_requests(start: Start) -> None:
    async def backend(_: web.Request) -> web.Response:
        return web.Response(text="first\n", headers=held())

    edge = await start(backend, clients_max=1)
    curl = await edge.curl()
    await curl.until("first\n")
    other = await edge.curl()
    await other.until("too many requests are held\n")
    assert other.head.startswith("HTTP/1.1 503 ")
    assert "Retry-After: " in other.head
    assert edge.clients.refused["clients"] == 1


async def test_a_websocket_handshake_is_refused(start: Start) -> None:
    async def backend(_: web.Request) -> web.Response:
        return web.Response(text="no\n")

    edge = await start(backend)
    curl = await edge.curl("/", "Connection: Upgrade", "Upgrade: WebSocket")
    await curl.until("which the edge does not pass on\n")
    assert curl.head.startswith("HTTP/1.1 501 ")


# Grip-Hold: response


async def test_the_first_response_answers_a_held_request(start: Start) -> None:
    async def backend(_: web.Request) -> web.Response:
        return web.Response(text="nothing new\n", headers=held("response", X_Kept="1", X_Other="old"))

    edge = await start(backend)
    curl = await edge.curl()
    await edge.held(1)
    edge.channels.publish(stream_item(b"not for responses"))
    edge.channels.publish(
        response_item(b"news\n", code=201, reason="Here", headers=(("X-Other", "new"), ("Grip-Secret", "x")))
    )
    await curl.until("news\n")
    assert curl.head.startswith("HTTP/1.1 201 Here\r\n")
    assert "X-Kept: 1" in curl.head
    assert "X-Other: new" in curl.head
    assert "old" not in curl.head
    assert "grip" not in curl.head.lower()
    await edge.held(0)


async def test_the_backends_own_answer_ends_a_held_request(start: Start) -> None:
    async def backend(_: web.Request) -> web.Response:
        return web.Response(text="nothing new\n", headers=held("response", Grip_Timeout="1"))

    edge = await start(backend)
    curl = await edge.curl()
    await edge.held(1)
    await curl.until("nothing new\n")
    assert "Content-Length: 12" in curl.head
    await edge.held(0)


async def test_a_held_request_whose_id_does_not_fit_asks_the_backend_again(start: Start) -> None:
    """At once, if the channel's last item is another one; and if an item follows another id."""
    answers, asked = iter("12345"), list[list[str]]()

    async def backend(request: web.Request) -> web.Response:
        asked.append(request.headers.getall("Grip-Last", []))
        return web.Response(text="nothing new\n", headers=held("response", f"{CHANNEL}; prev-id={next(answers)}"))

    edge = await start(backend)
    edge.channels.publish(response_item(b"2\n", "2", "1"))
    curl = await edge.curl()
    await until(lambda: len(asked) == 2)
    edge.channels.publish(response_item(b"8\n", "8", "7"))
    await until(lambda: len(asked) == 3)
    await until(lambda: edge.channels.listeners[CHANNEL])
    edge.channels.publish(response_item(b"4\n", "4", "3"))
    await curl.until("4\n")
    assert asked == [[], [f"{CHANNEL}; last-id=1"], [f"{CHANNEL}; last-id=2"]]


async def test_ids_that_never_fit_end_with_the_backends_answer(start: Start) -> None:
    asked = 0

    async def backend(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        edge.channels.publish(response_item(b"x\n", f"x{asked}", "unknown"))
        return web.Response(text="nothing new\n", headers=held("response", f"{CHANNEL}; prev-id=1"))

    edge = await start(backend)
    curl = await edge.curl()
    while not curl.raw.endswith(b"nothing new\n"):
        edge.channels.publish(response_item(b"x\n", f"y{len(edge.channels.listeners)}{asked}", "unknown"))
        try:
            async with asyncio.timeout(0.05):
                await curl._more()
        except TimeoutError:
            continue
    assert 2 <= asked <= 6


async def test_an_answer_after_a_gap_may_be_no_hold(start: Start) -> None:
    answers = iter([("nothing new\n", held("response", f"{CHANNEL}; prev-id=1")), ("2\n", {})])

    async def backend(_: web.Request) -> web.Response:
        text, headers = next(answers)
        return web.Response(text=text, headers=headers)

    edge = await start(backend)
    edge.channels.publish(response_item(b"2\n", "2", "1"))
    curl = await edge.curl()
    await curl.until("2\n")
