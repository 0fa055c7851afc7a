"""Asking a Grip-Link: what is asked, and what the edge makes of every answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from streamer.grip import link
from streamer.grip.headers import HeldChannel, NextLink
from streamer.grip.link import Links, resolved
from tests.serving import serving
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

Serve = Callable[[Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves all paths by one handler; returns the address."""
    async with AsyncExitStack() as stack:

        async def start(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> str:
            application = web.Application()
            application.router.add_route("*", "/{path:.*}", handler)
            return await stack.enter_async_context(serving(application))

        yield start


@pytest.fixture
async def links(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Links]:
    monkeypatch.setattr(link, "LINK_PAGES_MAX", 5)
    monkeypatch.setattr(link, "PAGES_BYTES_MAX", 2_500)
    made = Links(timeout_s=1, answer_bytes_max=1_000)
    yield made
    await made.close()


async def code_of(links: Links, url: str) -> UCode.ValueType:
    with pytest.raises(UStatusError) as error:
        await links.ask(url, {"a": "1"})
    assert url in error.value.message
    return error.value.code


async def all_pages(links: Links, url: str) -> list[bytes]:
    return [page.body async for page in links.pages(url, {"a": "1"})]


async def test_a_request_has_the_last_id_of_each_channel_and_a_signature(serve: Serve) -> None:
    asked: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request)
        headers = {"Grip-Hold": "stream", "Grip-Channel": "a; prev-id=2", "Set-Cookie": "a=b"}
        return web.Response(text="x", headers={**headers, "Grip-Link": "</r>; rel=next; timeout=9"})

    async def sign() -> str | None:
        return "signed" if asked else None

    links, url = Links(sign), await serve(answer)
    found = await links.ask(url + "/r?x=%2F&y=a+b", {"a": "1", "ü": "e t"})
    assert (found.status, found.body, found.instruction.hold) == (200, b"x", "stream")
    assert found.instruction.channels == (HeldChannel("a", "2"),)
    assert found.instruction.link == NextLink("/r", 9)
    await links.ask(url + "/r", {})
    await links.close()
    first, second = asked
    assert first.raw_path == "/r?x=%2F&y=a+b"
    assert first.headers.getall("Grip-Last") == ["a; last-id=1", "ü; last-id=e t"]
    assert "Grip-Sig" not in first.headers
    assert second.headers["Grip-Sig"] == "signed"
    assert "Grip-Last" not in second.headers
    assert "Cookie" not in second.headers


async def test_an_empty_answer_is_an_answer(serve: Serve, links: Links) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=204)

    assert (await links.ask(await serve(answer), {}))[:2] == (204, b"")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (500, UCode.UNAVAILABLE),
        (503, UCode.UNAVAILABLE),
        (429, UCode.UNAVAILABLE),
        (400, UCode.FAILED_PRECONDITION),
        (404, UCode.FAILED_PRECONDITION),
        (302, UCode.FAILED_PRECONDITION),
    ],
)
async def test_statuses(serve: Serve, links: Links, status: int, code: UCode.ValueType) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/"})

    assert await code_of(links, await serve(answer) + "/x") == code


async def test_a_backend_that_is_away_or_slow_or_breaks_off(serve: Serve, links: Links) -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x")
        if request.path == "/broken":
            assert request.transport is not None
            request.transport.abort()
        await asyncio.sleep(60)
        return response

    url = await serve(slow)
    assert await code_of(links, url + "/slow") == UCode.UNAVAILABLE
    assert await code_of(links, url + "/broken") == UCode.UNAVAILABLE
    assert await code_of(links, "http://127.0.0.1:1/") == UCode.UNAVAILABLE


async def test_garbage_is_no_answer(links: Links) -> None:
    async def garbage(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0garbage\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(garbage, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        assert await code_of(links, f"http://{host}:{port}/") == UCode.UNAVAILABLE


async def test_headers_that_cant_be_read(serve: Serve, links: Links) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(headers={"Grip-Hold": "forever"})

    assert await code_of(links, await serve(answer) + "/x") == UCode.FAILED_PRECONDITION


@pytest.mark.parametrize("url", ["http://[", "ftp://a/", "http://a b/", "nonsense", "http://a:99999/"])
async def test_an_address_that_cant_be_asked(links: Links, url: str) -> None:
    assert await code_of(links, url) in (UCode.FAILED_PRECONDITION, UCode.UNAVAILABLE)


@pytest.mark.parametrize("place", ["", "http://[", "http://127.0.0.1:1/", "http://a b/"])
async def test_an_error_does_not_show_the_query_of_a_link(serve: Serve, links: Links, place: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(headers={"Grip-Hold": "forever"})

    with pytest.raises(UStatusError) as raised:
        await links.ask((place or await serve(answer) + "/x") + "?key=secret", {})
    assert "secret" not in str(raised.value)


async def test_an_answer_without_end_is_cut(serve: Serve, links: Links) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 100)

    assert await code_of(links, await serve(answer) + "/x") == UCode.RESOURCE_EXHAUSTED


async def test_pages_are_followed_at_once_with_the_newest_ids(serve: Serve, links: Links) -> None:
    asked: list[tuple[str, list[str]]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.raw_path, request.headers.getall("Grip-Last")))
        after = int(request.query["after"]) + 1
        headers = {"Grip-Channel": f"a; prev-id={after}, b; prev-id=9"}
        headers |= {"Grip-Link": f"<https://public.example/r?after={after}>; rel=next"}
        return web.Response(text=f"{after}\n", headers=headers | ({"Grip-Hold": "stream"} if after == 3 else {}))

    assert await all_pages(links, await serve(answer) + "/r?after=0") == [b"1\n", b"2\n", b"3\n"]
    ids = [["a; last-id=1"], ["a; last-id=1"], ["a; last-id=2"]]
    assert asked == list(zip(["/r?after=0", "/r?after=1", "/r?after=2"], ids, strict=True))


@pytest.mark.parametrize(("size", "count"), [(0, 5), (900, 3)])
async def test_pages_are_bounded(serve: Serve, links: Links, size: int, count: int) -> None:
    asked: list[str] = []

    async def endless(request: web.Request) -> web.Response:
        asked.append(request.raw_path)
        return web.Response(body=b"x" * size, headers={"Grip-Link": "</next>; rel=next"})

    with pytest.raises(UStatusError, match="RESOURCE_EXHAUSTED"):
        await all_pages(links, await serve(endless) + "/next")
    assert len(asked) == count


@pytest.mark.parametrize(
    ("link", "url"),
    [
        ("/a?b=c", "http://back:8000/a?b=c"),
        ("?b=c", "http://back:8000/fruit/?b=c"),
        ("next", "http://back:8000/fruit/next"),
        ("https://public.example/a?b#c", "http://back:8000/a?b"),
        ("//elsewhere", "http://back:8000/"),
    ],
)
def test_a_link_is_at_the_backend_that_gave_it(link: str, url: str) -> None:
    assert resolved("http://back:8000/fruit/?after=3", link) == url


def test_a_link_that_is_no_address() -> None:
    with pytest.raises(UStatusError) as error:
        resolved("http://back/", "http://[x/")
    assert error.value.code == UCode.FAILED_PRECONDITION
