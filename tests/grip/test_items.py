"""The items of a POST to /publish/: what is read, and what is refused with a reason."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.grip.items import (
    ID_BYTES_MAX,
    ITEMS_MAX,
    NO_TEXT,
    RESPONSE_HEADERS_MAX,
    Item,
    ResponseFormat,
    StreamFormat,
    read_items,
)
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

LINES = st.text(min_size=1, max_size=40).filter(lambda text: not NO_TEXT.search(text))
IDS = st.none() | LINES
HEADERS = st.lists(st.tuples(st.from_regex("[A-Za-z-]{1,20}", fullmatch=True), LINES.map(str.strip)), max_size=4)
STREAMS = st.builds(StreamFormat, st.binary()) | st.just(StreamFormat(closes=True))
RESPONSES = st.builds(ResponseFormat, st.integers(200, 599), st.just("") | LINES, HEADERS.map(tuple), st.binary())
ITEMS = st.builds(Item, LINES, IDS, IDS, st.booleans(), st.none() | STREAMS, st.none() | RESPONSES).filter(
    lambda item: item.stream is not None or item.response is not None
)


def of(items: list[Any]) -> list[Item]:
    return read_items(json.dumps({"items": items}).encode())


def content_of(key: str, content: bytes, is_text: bool) -> dict[str, str]:
    try:
        return {key: content.decode()} if is_text else {f"{key}-bin": base64.b64encode(content).decode()}
    except UnicodeDecodeError:
        return content_of(key, content, is_text=False)


def written(item: Item, is_text: bool, is_nested: bool) -> dict[str, Any]:
    formats: dict[str, Any] = {}
    if item.stream is not None:
        content = {"action": "close"} if item.stream.closes else content_of("content", item.stream.content, is_text)
        formats["http-stream"] = content
    if (response := item.response) is not None:
        headers: Any = [list(pair) for pair in response.headers]
        formats["http-response"] = {"code": response.code, "headers": headers, "reason": response.reason}
        formats["http-response"] |= content_of("body", response.body, is_text)
    made: dict[str, Any] = {"channel": item.channel, "no-seq": item.no_seq, "unknown": [1]}
    made |= {key: id for key, id in (("id", item.id), ("prev-id", item.prev_id)) if id is not None}
    return made | ({"formats": formats} if is_nested else formats)


@given(st.lists(ITEMS, max_size=3), st.booleans(), st.booleans())
def test_items_are_read_as_they_were_written(items: list[Item], is_text: bool, is_nested: bool) -> None:
    assert of([written(item, is_text, is_nested) for item in items]) == items


def test_headers_may_be_an_object_and_what_is_not_there_has_its_default() -> None:
    assert of([{"channel": "a", "http-response": {"headers": {"X-A": " 1 "}, "body": "b"}}]) == [
        Item("a", None, None, False, None, ResponseFormat(200, "", (("X-A", "1"),), b"b"))
    ]
    (item,) = of([{"channel": "a", "id": "", "formats": {"http-stream": {"content": ""}, "ws-message": 1}}])
    assert item == Item("a", None, None, False, StreamFormat(), None)
    assert item.content == b""


def test_the_stream_s_content_counts_first() -> None:
    formats = {"http-stream": {"content": "s"}, "http-response": {"body": "r"}}
    assert [item.content for item in of([{"channel": "a", **formats}])] == [b"s"]
    assert [item.content for item in of([{"channel": "a", "http-response": {"body": "r"}}])] == [b"r"]


STREAM = {"http-stream": {"content": "x"}}


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (1, "items[0]: expected an object, got 1"),
        ({**STREAM}, "items[0]: expected a channel, got none"),
        ({"channel": 5, **STREAM}, "items[0]: channel: expected a text, got 5"),
        ({"channel": "a"}, "items[0]: expected a format http-stream or http-response, got neither"),
        ({"channel": "a", "formats": []}, "items[0]: formats: expected an object, got a list"),
        ({"channel": "a", "formats": {}, **STREAM}, "expected a format http-stream or http-response, got neither"),
        ({"channel": "a", "formats": {"ws-message": {"content": "x"}}}, "got neither, but 'ws-message'"),
        ({"channel": "a\nb", **STREAM}, "items[0]: channel: expected a text of one line, got 'a\\nb'"),
        ({"channel": "a", "id": "\r\nX: 1", **STREAM}, "items[0]: id: expected a text of one line"),
        ({"channel": "a", "id": "\ud800", **STREAM}, "items[0]: id: expected a text of one line"),
        ({"channel": "a", "id": 4, **STREAM}, "items[0]: id: expected a text, got 4"),
        ({"channel": "a", "id": "é" * 513, **STREAM}, f"id: expected {ID_BYTES_MAX} bytes at most, got 1026"),
        ({"channel": "a", "no-seq": 1, **STREAM}, "items[0]: no-seq: expected true or false, got 1"),
        ({"channel": "a", "http-stream": "x"}, "items[0]: http-stream: expected an object, got 'x'"),
        ({"channel": "a", "http-stream": {}}, "http-stream: expected content or content-bin, got neither"),
        ({"channel": "a", "http-stream": {"content": "\ud800"}}, "content: expected a text, got one with half"),
        ({"channel": "a", "http-stream": {"content-bin": "%"}}, "content-bin: expected base64, got '%'"),
        ({"channel": "a", "http-stream": {"content-bin": "é"}}, "content-bin: expected base64"),
        ({"channel": "a", "http-stream": {"action": "hint"}}, "expected the action send or close, got 'hint'"),
        ({"channel": "a", "http-stream": {"content": "x" * 2**20 + "x"}}, "expected 1048576 bytes at most"),
        ({"channel": "a", "http-response": {"action": "close"}}, "expected the action send, got 'close'"),
        ({"channel": "a", "http-response": {"code": 100, "body": ""}}, "expected a code from 200 to 599, got 100"),
        ({"channel": "a", "http-response": {"code": True, "body": ""}}, "expected a code from 200 to 599, got True"),
        ({"channel": "a", "http-response": {"code": 204}}, "http-response: expected body or body-bin, got neither"),
        ({"channel": "a", "http-response": {"reason": "a\rb", "body": ""}}, "reason: expected a text of one line"),
        ({"channel": "a", "http-response": {"headers": 1, "body": ""}}, "expected headers as an object or as a list"),
        ({"channel": "a", "http-response": {"headers": ["ab"], "body": ""}}, "expected a header as a name and a value"),
        ({"channel": "a", "http-response": {"headers": {"a b": "c"}, "body": ""}}, "a value of one line, got 'a b: c'"),
        ({"channel": "a", "http-response": {"headers": {"a": "b\r\nc: d"}, "body": ""}}, "a value of one line"),
        ({"channel": "a", "http-response": {"headers": {"a": "b" * 9_000}, "body": ""}}, "bytes of a header at most"),
        (
            {"channel": "a", "http-response": {"headers": [["a", "b"]] * (RESPONSE_HEADERS_MAX + 1), "body": ""}},
            "100 at most, got a list",
        ),
    ],
)
def test_a_wrong_item_is_refused_with_its_index_and_what_was_expected(item: Any, why: str) -> None:
    with pytest.raises(UStatusError) as error:
        of([item])
    assert error.value.code == UCode.INVALID_ARGUMENT
    assert why in error.value.message
    with pytest.raises(UStatusError, match=r"items\[1\]"):
        of([{"channel": "a", **STREAM}, item])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "expected JSON"),
        (b"\xff", "expected JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b"9" * 10_000, "expected JSON"),
        (b"[]", "a list of items"),
        (b"{}", "a list of items"),
        (b'{"items": {}}', "a list of items"),
        (json.dumps({"items": [{}] * (ITEMS_MAX + 1)}).encode(), "expected 1000 items at most, got 1001"),
    ],
)
def test_a_wrong_body_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(UStatusError, match=why) as error:
        read_items(body)
    assert error.value.code == UCode.INVALID_ARGUMENT


def test_no_items_are_no_mistake() -> None:
    assert read_items(b'{"items": []}') == []
