"""Reads what publishers send: the items of a POST to /publish/.

{"items": [{"channel": "fruit", "id": "4", "prev-id": "3", "formats": {"http-stream": {"content": "apple\\n"}}}]}

The formats may also be keys of the item itself, as pubcontrol sends them. Formats and keys that are not known are
ignored; an item has at least one format that is known.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from uprotocol.status import UStatusError, invalid
from uprotocol.transport import MESSAGE_BYTES_MAX

ITEMS_MAX: Final = 1_000  # of a request; pubcontrol sends 10 at most
ID_BYTES_MAX: Final = 1_024  # an id goes into a header of a request to a backend
CHANNEL_BYTES_MAX: Final = 1_024
RESPONSE_HEADERS_MAX: Final = 100
RESPONSE_HEADER_BYTES_MAX: Final = 8_190  # more than most clients accept
HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# line ends of a text would end a header line; half of a surrogate pair can't be sent as UTF-8
NO_TEXT: Final = re.compile("[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """What an item writes into held streams; `closes`: it ends them instead."""

    content: bytes = b""
    closes: bool = False


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The response that an item gives to held requests."""

    code: int = 200
    reason: str = ""  # "": the usual one of the code
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Item:
    """What was published to a channel. It has a stream format, a response format, or both.

    `id`, `prev_id`: its own, and that of the item before it in its channel; None if the publisher keeps no order.
    `no_seq`: it does not wait for the item before it.
    """

    channel: str
    id: str | None
    prev_id: str | None
    no_seq: bool
    stream: StreamFormat | None
    response: ResponseFormat | None

    @property
    def content(self) -> bytes:
        """The bytes that it carries: of the stream format, else of the response."""
        if self.stream is not None and not self.stream.closes:
            return self.stream.content
        return self.response.body if self.response is not None else b""

    @property
    def has_content(self) -> bool:
        """False: it only closes streams."""
        return self.response is not None or (self.stream is not None and not self.stream.closes)

    @property
    def size(self) -> int:
        """Bytes of its contents and ids."""
        sizes = [len(text) for text in (self.channel, self.id, self.prev_id) if text is not None]
        if self.stream is not None:
            sizes.append(len(self.stream.content))
        if self.response is not None:
            sizes += [len(self.response.body), *(len(name) + len(value) for name, value in self.response.headers)]
        return sum(sizes)


def read_items(body: bytes, content_bytes_max: int = MESSAGE_BYTES_MAX) -> list[Item]:
    """Returns the items of a request. Raises INVALID_ARGUMENT, with the index of the item and what was expected."""
    try:
        found = json.loads(body)
    except RecursionError:
        raise invalid("expected JSON, got values nested too deep") from None
    except ValueError as error:  # also if it is no UTF-8
        raise invalid(f"expected JSON, got {error}") from None
    items = found.get("items") if isinstance(found, dict) else None
    if not isinstance(items, list):
        raise invalid('expected {"items": [...]}, a list of items')
    if len(items) > ITEMS_MAX:
        raise invalid(f"expected {ITEMS_MAX} items at most, got {len(items)}: send them in several requests")
    return [_within(f"items[{index}]", _item, item, content_bytes_max) for index, item in enumerate(items)]


def _within(name: str, read: Callable[[Mapping[str, Any], int], T], value: object, bytes_max: int) -> T:
    """Returns what `read` makes of an object; its errors name the object."""
    try:
        return read(_checked(value, dict, "an object"), bytes_max)
    except UStatusError as error:
        raise invalid(f"{name}: {error.message}") from None


def _item(item: Mapping[str, Any], bytes_max: int) -> Item:
    channel = _text(item, "channel", CHANNEL_BYTES_MAX)
    if channel is None:
        raise invalid("expected a channel, got none")
    formats = item if item.get("formats") is None else _value(item, "formats", dict, "an object")
    assert formats is not None
    stream, response = formats.get("http-stream"), formats.get("http-response")
    if stream is None and response is None:
        others = f", but {', '.join(formats)[:80]!r}" if formats and formats is not item else ""
        raise invalid(f"expected a format http-stream or http-response, got neither{others}")
    return Item(
        channel,
        _text(item, "id", ID_BYTES_MAX),
        _text(item, "prev-id", ID_BYTES_MAX),
        _value(item, "no-seq", bool, "true or false") or False,
        None if stream is None else _within("http-stream", _stream, stream, bytes_max),
        None if response is None else _within("http-response", _response, response, bytes_max),
    )


def _stream(found: Mapping[str, Any], bytes_max: int) -> StreamFormat:
    action = _text(found, "action", ID_BYTES_MAX) or "send"
    if action == "close":
        return StreamFormat(closes=True)
    if action != "send":
        raise invalid(f"expected the action send or close, got {action!r}")
    return StreamFormat(_content(found, "content", bytes_max))


def _response(found: Mapping[str, Any], bytes_max: int) -> ResponseFormat:
    action = _text(found, "action", ID_BYTES_MAX) or "send"
    if action != "send":
        raise invalid(f"expected the action send, got {action!r}")
    code = found.get("code", 200)
    if isinstance(code, bool) or not isinstance(code, int) or not 200 <= code <= 599:
        raise invalid(f"expected a code from 200 to 599, got {_shown(code)}")
    reason = _text(found, "reason", ID_BYTES_MAX) or ""
    return ResponseFormat(code, reason, _headers(found.get("headers")), _content(found, "body", bytes_max))


def _headers(found: object) -> tuple[tuple[str, str], ...]:
    """Returns headers that were given as an object, or as a list of pairs."""
    if found is None:
        return ()
    pairs = list(found.items()) if isinstance(found, dict) else found
    if not isinstance(pairs, list) or len(pairs) > RESPONSE_HEADERS_MAX:
        what = f"expected headers as an object or as a list of pairs, {RESPONSE_HEADERS_MAX} at most"
        raise invalid(f"{what}, got {_shown(found)}")
    headers = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(one, str) for one in pair):
            raise invalid(f"expected a header as a name and a value, got {_shown(pair)}")
        name, value = pair
        if not HEADER_NAME.fullmatch(name) or NO_TEXT.search(value):
            raise invalid(f"expected a header name and a value of one line, got {_shown(f'{name}: {value}')}")
        if len(name) + len(value.encode()) > RESPONSE_HEADER_BYTES_MAX:
            raise invalid(f"expected {RESPONSE_HEADER_BYTES_MAX} bytes of a header at most, got more in {_shown(name)}")
        headers.append((name, value.strip()))
    return tuple(headers)


def _content(found: Mapping[str, Any], key: str, bytes_max: int) -> bytes:
    """Returns the bytes of `key` (a text) or `key`-bin (base64)."""
    encoded = _value(found, f"{key}-bin", str, "base64")
    text = _value(found, key, str, "a text")
    if encoded is not None:
        try:
            content = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise invalid(f"{key}-bin: expected base64, got {_shown(encoded)}") from None
    elif text is not None:
        try:
            content = text.encode()
        except UnicodeEncodeError:
            raise invalid(f"{key}: expected a text, got one with half of a surrogate pair") from None
    else:
        raise invalid(f"expected {key} or {key}-bin, got neither")
    if len(content) > bytes_max:
        raise invalid(f"{key}: expected {bytes_max} bytes at most (limits.message_bytes_max), got {len(content)}")
    return content


def _text(found: Mapping[str, Any], key: str, bytes_max: int) -> str | None:
    """Returns a text of one line; None if it is not there, or empty."""
    text = _value(found, key, str, "a text")
    if not text:
        return None
    if NO_TEXT.search(text):
        raise invalid(f"{key}: expected a text of one line, got {_shown(text)}")
    if len(text.encode()) > bytes_max:
        raise invalid(f"{key}: expected {bytes_max} bytes at most, got {len(text.encode())}")
    return text


def _value(found: Mapping[str, Any], key: str, kind: type[T], what: str) -> T | None:
    value = found.get(key)
    try:
        return None if value is None else _checked(value, kind, what)
    except UStatusError as error:
        raise invalid(f"{key}: {error.message}") from None


def _checked(value: object, kind: type[T], what: str) -> T:
    if not isinstance(value, kind):
        raise invalid(f"expected {what}, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    shown = ascii(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return shown if len(shown) <= 80 else shown[:80] + "..."
