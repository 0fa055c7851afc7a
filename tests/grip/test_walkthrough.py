"""The walkthrough of Pushpin's document ("Pushing data reliably"), in Python in place of PHP.

A JSON blob in a file, its MD5 as id, `curl -i` held open: then publishes, losses, cuts, and a backend in every trouble.
What the client sees is compared with what was written into the file: nothing is lost or doubled, and all is reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from tests.grip.held_parties import CHANNEL, PATH, WAIT_S, Backend, Curl, Edge, last, serve, stream_item, until

HELLO = '{"text": "hello"}\n'
NEW = '{"text": "new data"}\n'


class Walk:
    """The document's publisher, and all who take part."""

    def __init__(self, backend: Backend, edge: Edge) -> None:
        self.backend, self.edge = backend, edge

    def update(self, text: str, *, is_lost: bool = False) -> None:
        """What the shell commands of the document do; `is_lost`: without the last one."""
        prev_id = self.backend.id
        self.backend.write(text)
        if not is_lost:
            self.edge.channels.publish(stream_item(text.encode(), self.backend.id, prev_id))

    async def asked(self) -> list[str]:
        async with asyncio.timeout(WAIT_S):
            return await self.backend.links.get()

    async def curl(self, listeners: int = 1) -> Curl:
        made = await self.edge.curl()
        await self.edge.held(listeners)
        return made


@pytest_asyncio.fixture
async def walk(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Walk]:
    backend = Backend(tmp_path / "data.json", getattr(request, "param", 120))
    backend.write(HELLO)
    await backend.open()
    edge = await Edge.open(backend.port)
    yield Walk(backend, edge)
    await edge.close()
    await backend.close()


soon = pytest.mark.parametrize("walk", [1], indirect=True, ids=["timeout=1"])


async def test_the_first_answer_is_followed_by_what_is_published(walk: Walk) -> None:
    curl = await walk.curl()
    await curl.until(HELLO)
    assert curl.head.startswith("HTTP/1.1 200 OK\r\n")
    assert "Content-Type: text/plain" in curl.head
    assert "Transfer-Encoding: chunked" in curl.head
    assert "grip" not in curl.head.lower()
    assert "Content-Length" not in curl.head
    walk.update(NEW)
    await curl.until(NEW)
    assert curl.body.decode() == HELLO + NEW
    assert walk.backend.links.empty()


async def test_the_backend_itself_answers_as_in_the_document(walk: Walk) -> None:
    id = walk.backend.id
    first = await walk.edge.curl(port=walk.backend.port)
    await first.until(HELLO)
    assert f"Grip-Channel: {CHANNEL}; prev-id={id}" in first.head
    again = await walk.edge.curl(f"{PATH}?recover=true", f"Grip-Last: {CHANNEL}; last-id={id}", port=walk.backend.port)
    await again.until("")
    assert "Content-Length: 0" in again.head


async def test_a_publish_that_was_lost_is_recovered_with_the_next(walk: Walk) -> None:
    curl = await walk.curl()
    await curl.until(HELLO)
    known = walk.backend.id
    walk.update('{"text": "lost"}\n', is_lost=True)
    walk.update(NEW)
    await curl.until(NEW)
    assert await walk.asked() == last(known)
    assert walk.backend.links.empty()
    walk.update('{"text": "newer"}\n')
    await curl.until('{"text": "newer"}\n')
    assert curl.body.decode() == HELLO + NEW + '{"text": "newer"}\n'


@soon
async def test_the_link_is_asked_after_silence(walk: Walk) -> None:
    """First the answer is empty, then it has what was lost."""
    curl = await walk.curl()
    await curl.until(HELLO)
    known = walk.backend.id
    assert await walk.asked() == last(known)
    assert await walk.asked() == last(known)
    walk.update(NEW, is_lost=True)
    await curl.until(NEW)
    assert await walk.asked() == last(known)
    assert await walk.asked() == last(walk.backend.id)
    assert curl.body.decode() == HELLO + NEW


async def test_a_publish_before_the_hold_began_is_recovered_at_once(walk: Walk) -> None:
    """The backend has answered, and then the item was published, before the stream could hear it."""
    known = walk.backend.id
    walk.backend.before_first = lambda: walk.update(NEW)
    curl = await walk.curl()
    await curl.until(HELLO + NEW)
    assert await walk.asked() == last(known)
    walk.update(HELLO)
    await curl.until(HELLO)
    assert curl.body.decode() == HELLO + NEW + HELLO


async def test_a_value_that_returns_is_written_again(walk: Walk) -> None:
    """A, B, A: content hashes repeat."""
    curl = await walk.curl()
    await curl.until(HELLO)
    for text in (NEW, HELLO, NEW, HELLO):
        walk.update(text)
        await curl.until(text)
    assert curl.body.decode() == HELLO + NEW + HELLO + NEW + HELLO
    walk.update(NEW, is_lost=True)
    walk.update(HELLO, is_lost=True)
    walk.update('{"text": "C"}\n')  # follows HELLO, which is what the client has: nothing shows that NEW was lost
    await curl.until('{"text": "C"}\n')
    walk.update(NEW, is_lost=True)
    walk.update(HELLO)
    await curl.until(HELLO)
    assert curl.lines == [*(one.strip() for one in (HELLO, NEW) * 2), HELLO.strip(), '{"text": "C"}', HELLO.strip()]


async def test_ten_cuts_of_the_client(walk: Walk) -> None:
    """It reconnects each time, and gets the value of then, and all later ones."""
    got: list[str] = []
    for cut in range(10):
        curl = await walk.curl()
        await curl.until("\n")
        walk.update(f"value {cut}\n")
        await curl.until(f"value {cut}\n")
        got += curl.lines[not curl.lines[0].startswith("{") and curl.lines[0] in got[-1:] :]
        curl.cut()
        await walk.edge.held(0)
        walk.update(f"missed {cut}\n")
    curl = await walk.curl()
    await curl.until("missed 9\n")
    values = [HELLO.strip(), *(f"{what} {cut}" for cut in range(10) for what in ("value", "missed"))]
    assert [*got, *curl.lines] == values
    assert walk.backend.links.empty(), "each began where the backend was"


async def test_ten_cuts_of_the_backend(walk: Walk) -> None:
    """It breaks off its answers to the link; each value is written once, as soon as an answer was whole."""

    async def broken(request: web.Request) -> web.StreamResponse:
        whole = walk.backend.answer(request)
        response = web.StreamResponse(headers={**whole.headers, "Content-Length": str(len(bytes(whole.body)) + 1)})  # type: ignore[arg-type]
        await response.prepare(request)
        await response.write(bytes(whole.body))  # type: ignore[arg-type]
        assert request.transport is not None
        request.transport.abort()
        return response

    curl = await walk.curl()
    await curl.until(HELLO)
    for cut in range(10):
        walk.backend.answer_link = broken
        walk.update(f"lost {cut}\n", is_lost=True)
        walk.update(f"value {cut}\n")
        await walk.asked()
        await walk.asked()
        walk.backend.answer_link = None
        await curl.until(f"value {cut}\n")
    assert curl.lines == [HELLO.strip(), *(f"value {cut}" for cut in range(10))]


async def _status_500(_: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="oops\n")


async def _status_404(_: web.Request) -> web.StreamResponse:
    return web.Response(status=404, text="not here\n")


async def _wrong_headers(_: web.Request) -> web.StreamResponse:
    return web.Response(text="no\n", headers={"Grip-Hold": "perhaps"})


async def _unknown_channel(_: web.Request) -> web.StreamResponse:
    return web.Response(text="no\n", headers={"Grip-Hold": "stream", "Grip-Channel": "unknown"})


async def _held_response(_: web.Request) -> web.StreamResponse:
    return web.Response(text="no\n", headers={"Grip-Hold": "response", "Grip-Channel": CHANNEL})


async def _silent(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(WAIT_S)
    return web.Response()


async def _no_http(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"\x00\xffgarbage\r\n\r\n")  # type: ignore[attr-defined]
    request.transport.abort()
    return web.Response()


TROUBLES = [_status_500, _status_404, _wrong_headers, _unknown_channel, _held_response, _silent, _no_http]


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_the_link_is_asked_until_it_answers(walk: Walk, trouble: object) -> None:
    """Meanwhile the stream stays open, and items wait."""
    curl = await walk.curl()
    await curl.until(HELLO)
    walk.backend.answer_link = trouble  # type: ignore[assignment]
    walk.update("lost\n", is_lost=True)
    walk.update("b\n")
    await walk.asked()
    await walk.asked()
    walk.update("c\n")
    (condition,) = walk.edge.proxy.conditions()
    assert PATH in condition.text
    assert "recover=true>" not in condition.text
    walk.backend.answer_link = None
    await curl.until("c\n")
    walk.update("d\n")
    await curl.until("d\n")
    assert curl.lines == [HELLO.strip(), "c", "d"]
    assert not list(walk.edge.proxy.conditions())


async def test_a_backend_that_is_away(walk: Walk) -> None:
    curl = await walk.curl()
    await curl.until(HELLO)
    await walk.backend.close()
    walk.update("lost\n", is_lost=True)
    walk.update("b\n")
    await until(lambda: list(walk.edge.proxy.conditions()))
    other = await walk.edge.curl()
    await other.until("the backend is unreachable\n")
    assert other.head.startswith("HTTP/1.1 502 ")
    walk.update("c\n")
    await walk.backend.open()
    await curl.until("c\n")
    assert curl.lines == [HELLO.strip(), "c"]


@soon
async def test_items_that_follow_are_written_although_the_link_is_away(walk: Walk) -> None:
    """It is asked because of silence, and does not answer: an item that follows proves that nothing is missing."""
    curl = await walk.curl()
    await curl.until(HELLO)
    walk.backend.answer_link = _silent
    await walk.asked()
    walk.update(NEW)
    await curl.until(NEW)
    assert curl.body.decode() == HELLO + NEW


async def _endless_answer(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"x" * 65_536)


async def _endless_pages(_: web.Request) -> web.StreamResponse:
    return web.Response(text="x", headers={"Grip-Link": f"<{PATH}?recover=true>; rel=next"})


@pytest.mark.parametrize("answer", [_endless_answer, _endless_pages])
async def test_a_link_without_end_cuts_the_connection(walk: Walk, answer: object) -> None:
    """The client sees an incomplete answer, and comes back."""
    curl = await walk.curl()
    await curl.until(HELLO)
    walk.backend.answer_link = answer  # type: ignore[assignment]
    walk.update("lost\n", is_lost=True)
    walk.update(NEW)
    await curl.until_end()
    assert not curl.is_whole
    assert ("grip_cuts", ("unrecoverable",), 1) in list(walk.edge.proxy.samples())
    again = await walk.curl()
    await again.until(NEW)
    assert again.body.decode() == NEW


async def test_many_streams_share_one_request(walk: Walk) -> None:
    """All of them have the same gap at the same time."""
    curls = [await walk.curl(count) for count in range(1, 21)]
    for curl in curls:
        await curl.until(HELLO)
    walk.update("lost\n", is_lost=True)
    walk.update(NEW)
    for curl in curls:
        await curl.until(NEW)
        assert curl.body.decode() == HELLO + NEW
    await walk.asked()
    assert walk.backend.links.empty()


async def test_links_that_the_document_shows(tmp_path: Path) -> None:
    """A page of a link without Grip-Hold is followed at once; the last one holds."""

    async def pages(request: web.Request) -> web.StreamResponse:
        after = int(request.query.get("after", "0"))
        if after == 3:
            headers = {"Grip-Hold": "stream", "Grip-Channel": f"{CHANNEL}; prev-id=3"}
            headers["Grip-Link"] = "<?after=3>; rel=next; timeout=120"
            return web.Response(headers=headers)
        return web.Response(text=f"{after + 1}\n", headers={"Grip-Link": f"</fruit?after={after + 1}>; rel=next"})

    runner, port = await serve(pages)
    edge = await Edge.open(port)
    curl = await edge.curl("/fruit")
    await curl.until("1\n2\n3\n")
    await edge.held(1)
    edge.channels.publish(stream_item(b"4\n", "4", "3"))
    await curl.until("4\n")
    assert curl.body == b"1\n2\n3\n4\n"
    await edge.close()
    await runner.cleanup()


async def test_what_is_kept_of_links_ends_with_them(walk: Walk) -> None:
    """Of a link that fails, whose streams have gone; and many ask as one while it fails."""
    curls = [await walk.curl(count) for count in range(1, 6)]
    for curl in curls:
        await curl.until(HELLO)
    walk.backend.answer_link = _status_500
    walk.update("lost\n", is_lost=True)
    walk.update(NEW)
    for _ in range(3):
        await walk.asked()
    asked = sum(count for name, labels, count in walk.edge.proxy.samples() if labels == ("failed",))
    assert asked <= 3, "all of them wait for the same pause"
    for curl in curls:
        curl.cut()
    await walk.edge.held(0)
    links = walk.edge.proxy._links
    await until(lambda: not (links._resting or links._pauses or links._flying or links._wanted))
    assert not list(links.conditions())
