"""The source `http`: a REST history, asked like a Grip-Link.

GET url, Grip-Last: TOPIC; last-id=POSITION -> 200, empty: nothing was missed
    messages: a line of JSON for each message, or UMessages       newest: the body is the newest value, and its id is
    '- Grip-Link: <URL>; rel=next without Grip-Hold: a page more          in Grip-Channel: TOPIC; prev-id=ID
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import quote

from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field

from streamer.config.edge import LinkUrl
from streamer.grip.link import LinkAnswer, Links, resolved
from streamer.recovery.asking import PAGE_MESSAGES_MAX
from streamer.recovery_source import Fetched, RecoveryPlugin, RecoverySource
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

SOURCE_ANSWER_BYTES_MAX: Final = 8 << 20
TOKEN_BYTES_MAX: Final = 8 << 10
LINKS_MAX: Final = 1_000  # topics whose next page is known
PAYLOAD_FORMATS: Final = {
    name.removeprefix("UPAYLOAD_FORMAT_").lower(): UPayloadFormat.Value(name)
    for name in UPayloadFormat.DESCRIPTOR.values_by_name
}


class HttpSourceConfig(BaseModel):
    """Settings of the source `http`."""

    model_config = ConfigDict(extra="forbid")

    url: LinkUrl
    """of the history; `{topic}` in it becomes the topic, quoted"""
    token_file: Path | None = None
    """its text is shown as `Authorization: Bearer`; it is read again for each question"""
    mode: Literal["messages", "newest"] = "messages"
    """messages: the answer has every message that follows; newest: the body is the newest value alone"""
    format: Literal["ndjson", "protobuf"] = "ndjson"
    """of the messages: a line of JSON for each, or UMessages, each behind its length as a varint"""
    payload: str = Field(default="text", pattern=f"^({'|'.join(PAYLOAD_FORMATS)})$")
    """the format of a newest value"""
    timeout_s: float = Field(default=10, gt=0, le=600, allow_inf_nan=False)
    """for a whole answer"""


class HistoryLinks(Links):
    """Shows a token to the history."""

    def __init__(self, config: HttpSourceConfig) -> None:
        super().__init__(timeout_s=config.timeout_s, answer_bytes_max=SOURCE_ANSWER_BYTES_MAX)
        self._token_file = config.token_file

    async def _get(self, url: str, headers: list[tuple[str, str]]) -> LinkAnswer:
        return await super()._get(url, [*headers, *self._token()])

    def _token(self) -> Iterator[tuple[str, str]]:
        """Raises FAILED_PRECONDITION if it can't be read."""
        if self._token_file is None:
            return
        try:
            token = self._token_file.read_bytes()[:TOKEN_BYTES_MAX].decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise _wrong(f"the token file {self._token_file} can't be read: {error}") from None
        if not token or not token.isprintable():
            raise _wrong(f"the token file {self._token_file} must have one line of text")
        yield "Authorization", f"Bearer {token}"


class HttpSource(RecoverySource):
    """See above. The position is the id of a message; where ids of newest values are no UUIDs, their text."""

    def __init__(self, config: HttpSourceConfig) -> None:
        self._config, self._links = config, HistoryLinks(config)
        self._pages: dict[str, tuple[str | None, str]] = {}  # by topic: the position behind a page, and the next link

    async def close(self) -> None:
        await self._links.close()

    async def fetch(self, topic: UUri, after: str | None) -> Fetched:
        name, config = uris.format(topic).removeprefix("up:"), self._config
        page = self._pages.pop(name, None)
        url = page[1] if page is not None and page[0] == after else config.url.replace("{topic}", quote(name, ""))
        began_ms = uuids.now_ms()
        answer = await self._links.ask(url, {} if after is None else {name: after})
        said = answer.instruction
        position = next((one.prev_id for one in said.channels if one.name == name), None)
        if config.mode == "newest":
            return newest_of(topic, answer.body, position, after, PAYLOAD_FORMATS[config.payload], began_ms)
        found = messages_of(answer.body) if config.format == "protobuf" else lines_of(topic, answer.body)
        messages = list(islice(found, PAGE_MESSAGES_MAX))
        if next(found, None) is not None:  # the rest is asked for again, from there
            return Fetched(messages, more=True)
        if said.hold is not None or said.link is None:
            return Fetched(messages, position)
        behind = position or (self.position(messages[-1]) if messages else after)
        if len(self._pages) < LINKS_MAX:
            self._pages[name] = behind, resolved(url, said.link.url)
        return Fetched(messages, behind, more=True)


def newest_of(
    topic: UUri, body: bytes, position: str | None, after: str | None, format: UPayloadFormat.ValueType, began_ms: int
) -> Fetched:
    if not body or (position is not None and position == after):
        return Fetched((), position)
    id = _message_id(position)
    if id is None:  # as old as the question: what came meanwhile is newer
        id = uuids.UUIDGenerator(lambda: began_ms)()
    builder = UMessageBuilder.publish(topic).with_id(id)
    return Fetched([builder.build_from_upayload(UPayload(body, format))], position or uuids.format(id))


def _message_id(text: str | None) -> UUID | None:
    with contextlib.suppress(UStatusError):
        if text is not None and uuids.is_message_id(id := uuids.parse(text)):
            return id
    return None


def lines_of(topic: UUri, body: bytes) -> Iterator[UMessage]:
    """Yields the messages of an application/x-ndjson body. Raises FAILED_PRECONDITION."""
    for number, line in enumerate(body.splitlines(), 1):
        if line.strip():
            try:
                yield _message(topic, json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError, UStatusError) as error:
                raise _wrong(f"line {number} of its answer is no message: {error}") from None


def _message(topic: UUri, line: Any) -> UMessage:
    """Raises ValueError, TypeError, KeyError or UStatusError."""
    if not isinstance(line, dict):
        raise TypeError('expected an object such as {"id": "0190...", "text": "42"}')
    if unknown := line.keys() - {"id", "payload", "text", "json", "format"}:
        raise ValueError(f"unknown keys: {', '.join(sorted(unknown))}")
    match [key for key in ("payload", "text", "json") if key in line]:
        case ["payload"]:
            body, format = base64.b64decode(line["payload"], validate=True), "raw"
        case ["text"]:
            body, format = str(line["text"]).encode(), "text"
        case ["json"]:
            body, format = json.dumps(line["json"], ensure_ascii=False).encode(), "json"
        case _:
            raise ValueError("expected one of payload (base64), text and json")
    builder = UMessageBuilder.publish(topic).with_id(uuids.parse(line["id"]))
    return builder.build_from_upayload(UPayload(body, PAYLOAD_FORMATS[line.get("format", format)]))


def messages_of(body: bytes) -> Iterator[UMessage]:
    """Yields the UMessages of an application/x-protobuf body, each behind its length as a varint. Raises
    FAILED_PRECONDITION."""
    at = 0
    while at < len(body):
        length = shift = 0
        while True:
            if at >= len(body) or shift > 28:
                raise _wrong("its answer ends in the length of a message, or has one that is too long")
            length |= (body[at] & 0x7F) << shift
            shift += 7
            at += 1
            if body[at - 1] < 0x80:
                break
        if at + length > len(body):
            raise _wrong(f"its answer ends within a message of {length} bytes")
        try:
            yield UMessage.FromString(body[at : at + length])
        except DecodeError as error:
            raise _wrong(f"a message of its answer can't be read: {error}") from None
        at += length


def _wrong(why: str) -> UStatusError:
    return UStatusError(UCode.FAILED_PRECONDITION, why)


PLUGIN: Final = RecoveryPlugin("http", HttpSourceConfig, HttpSource)
