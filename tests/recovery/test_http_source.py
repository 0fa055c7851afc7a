"""The source `http`: what a REST history is asked, and what is made of its answers."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from streamer.recovery.asking import PAGE_MESSAGES_MAX
from streamer.recovery.http_source import HttpSource, HttpSourceConfig, lines_of, messages_of
from streamer.recovery.source import Fetched
from tests.recovery.model import TOPIC, publication
from tests.serving import serving
from uprotocol import uuid as uuids
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode

NAME = "//vehicle1/8001/1/8001"
Ask = Callable[..., Awaitable[Fetched]]


class Rest:
    """Answers each request with what `answers` has for its path; keeps the requests."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, Any]] = {}  # arguments of web.Response
        self.asked: list[web.Request] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request)
        return web.Response(**self.answers[request.path])


@pytest.fixture
async def rest() -> AsyncIterator[Rest]:
    made, application = Rest(), web.Application()
    application.router.add_get("/{path:.*}", made.answer)
    async with serving(application) as made.url:
        yield made


async def ask(rest: Rest, after: str | None = None, **settings: Any) -> Fetched:
    source = HttpSource(HttpSourceConfig(url=f"{rest.url}/drive", **settings))
    try:
        return await source.fetch(TOPIC, after)
    finally:
        await source.close()


def line(number: int, **content: Any) -> str:
    return json.dumps({"id": uuids.format(uuids.new())} | (content or {"text": str(number)}))


async def test_messages_are_lines_of_json(rest: Rest, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    lines = [line(1), line(2, json={"speed": 3}), line(3, payload=base64.b64encode(b"\x00").decode()), ""]
    rest.answers["/drive"] = {"text": "\n".join(lines)}
    fetched = await ask(rest, "before", token_file=tmp_path / "token")
    assert [one.payload for one in fetched.messages] == [b"1", b'{"speed": 3}', b"\x00"]
    assert [one.attributes.payload_format for one in fetched.messages] == [
        UPayloadFormat.UPAYLOAD_FORMAT_TEXT,
        UPayloadFormat.UPAYLOAD_FORMAT_JSON,
        UPayloadFormat.UPAYLOAD_FORMAT_RAW,
    ]
    assert {one.attributes.source.resource_id for one in fetched.messages} == {0x8001}
    (asked,) = rest.asked
    assert asked.headers["Grip-Last"] == f"{NAME}; last-id=before"
    assert asked.headers["Authorization"] == "Bearer secret"
    assert not fetched.more


async def test_messages_are_umessages(rest: Rest) -> None:
    sent = [publication(number) for number in (1, 200)]
    body = b"".join(bytes([one.ByteSize()]) + one.SerializeToString() for one in sent)
    rest.answers["/drive"] = {"body": body}
    assert list((await ask(rest, format="protobuf")).messages) == sent
    assert "Grip-Last" not in rest.asked[0].headers, "nothing is known"


async def test_an_empty_answer_says_that_nothing_was_missed(rest: Rest) -> None:
    rest.answers["/drive"] = {}
    assert await ask(rest, "before") == Fetched([])


async def test_the_next_page_is_where_the_link_says_at_the_same_backend(rest: Rest) -> None:
    first, second = line(1), line(2)
    link = {"Grip-Link": "<http://elsewhere.example/more?page=2>; rel=next"}
    rest.answers["/drive"] = {"text": first, "headers": link}
    rest.answers["/more"] = {"text": second}
    source = HttpSource(HttpSourceConfig(url=f"{rest.url}/drive"))
    page = await source.fetch(TOPIC, None)
    assert page.more
    assert page.next == json.loads(first)["id"]
    last = await source.fetch(TOPIC, page.next)
    assert [one.payload for one in last.messages] == [b"2"]
    assert not last.more
    assert [one.path_qs for one in rest.asked] == ["/drive", "/more?page=2"]
    await source.close()


async def test_a_link_is_forgotten_if_something_else_is_asked(rest: Rest) -> None:
    rest.answers["/drive"] = {"text": line(1), "headers": {"Grip-Link": "</more>; rel=next"}}
    source = HttpSource(HttpSourceConfig(url=f"{rest.url}/drive"))
    await source.fetch(TOPIC, None)
    await source.fetch(TOPIC, "another")
    assert [one.path for one in rest.asked] == ["/drive", "/drive"]
    await source.close()


async def test_a_long_answer_is_taken_in_parts(rest: Rest) -> None:
    rest.answers["/drive"] = {"text": "\n".join(line(number) for number in range(PAGE_MESSAGES_MAX + 1))}
    fetched = await ask(rest)
    assert len(fetched.messages) == PAGE_MESSAGES_MAX
    assert fetched.more
    assert fetched.next is None, "the id of the last one"


async def test_the_newest_value_has_its_id_or_a_position(rest: Rest) -> None:
    id = uuids.format(uuids.new())
    for known in (id, "ea405059015cd95c7fac18b4aaeea653"):
        rest.answers["/drive"] = {
            "text": "100",
            "headers": {"Grip-Channel": f"{NAME}; prev-id={known}", "Grip-Hold": "stream"},
        }
        fetched = await ask(rest, "before", mode="newest")
        (message,) = fetched.messages
        assert message.payload == b"100"
        assert fetched.next == known
        assert (uuids.format(message.attributes.id) == known) == (known == id)
        assert not (await ask(rest, known, mode="newest")).messages, "it is the one that we have"


async def test_the_topic_is_quoted_in_the_address(rest: Rest) -> None:
    rest.answers[f"/{NAME}"] = {}
    source = HttpSource(HttpSourceConfig(url=rest.url + "/{topic}"))
    await source.fetch(TOPIC, None)
    assert rest.asked[0].raw_path == "/%2F%2Fvehicle1%2F8001%2F1%2F8001"
    await source.close()


@pytest.mark.parametrize(
    "text",
    [
        *("nonsense", "[]", "{}", '{"id": "x", "text": "1"}', '{"id": 1, "text": "1"}', '{"text": "1", "json": 1}'),
        *('{"id": "x", "payload": "%"}', '{"id": "x", "text": "1", "more": 1}', "[" * 100_000),
    ],
)
async def test_lines_that_are_no_messages_are_refused(rest: Rest, text: str) -> None:
    rest.answers["/drive"] = {"text": text}
    with pytest.raises(UStatusError, match="line 1 of its answer is no message") as error:
        await ask(rest)
    assert error.value.code == UCode.FAILED_PRECONDITION


@pytest.mark.parametrize("body", [b"\x05ab", b"\xff", b"\xff" * 9, b"\x02\xff\xff"])
async def test_bytes_that_are_no_messages_are_refused(rest: Rest, body: bytes) -> None:
    rest.answers["/drive"] = {"body": body}
    with pytest.raises(UStatusError) as error:
        await ask(rest, format="protobuf")
    assert error.value.code == UCode.FAILED_PRECONDITION


@given(st.binary(max_size=80))
def test_whatever_comes_is_messages_or_refused(body: bytes) -> None:
    for read in (lambda: list(messages_of(body)), lambda: list(lines_of(TOPIC, body))):
        try:
            read()
        except UStatusError as error:
            assert error.code == UCode.FAILED_PRECONDITION  # noqa: PT017 - either is right


async def test_a_token_that_can_not_be_read_is_said(rest: Rest, tmp_path: Path) -> None:
    with pytest.raises(UStatusError, match="token file"):
        await ask(rest, token_file=tmp_path / "none")
    (tmp_path / "two").write_text("a\nb")
    with pytest.raises(UStatusError, match="one line of text"):
        await ask(rest, token_file=tmp_path / "two")


async def test_a_history_that_is_away_or_refuses_is_said(rest: Rest) -> None:
    for status, code in ((500, UCode.UNAVAILABLE), (404, UCode.FAILED_PRECONDITION)):
        rest.answers["/drive"] = {"status": status}
        with pytest.raises(UStatusError) as error:
            await ask(rest)
        assert error.value.code == code
