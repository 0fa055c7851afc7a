"""POST /publish/: a request of a publisher, as Pushpin takes it.

request -> JWT (401) -> JSON? (415) -> items (400) -> Channels -> 200 "Published", once all items are committed
                                                            '-> too many (429), the log can't be written (503)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog
from aiohttp import web

from streamer.grip.items import Item, read_items
from streamer.grip.signatures import PublisherKey
from streamer.http.lines import SeldomLog
from streamer.http.statuses import RETRY_LATER, STATUSES
from uprotocol.status import UStatusError
from uprotocol.transport import MESSAGE_BYTES_MAX
from uprotocol.v1.ucode_pb2 import UCode

BODY_BYTES_AT_ONCE: Final = 1 << 16  # a larger body is read beside the loop

# What the log says in place of a reason that quotes the request
_UNQUOTED: Final = {
    400: "not the JSON that is expected, or an unknown channel; the answer says which",
    415: "expected Content-Type: application/json; the answer says which came",
}

log = structlog.get_logger()

TakeItems = Callable[[Sequence[Item]], Awaitable[None]]


class PublishHandler:
    """`publish`: takes the items, and returns once they are committed. `key`: None, if publishers need no JWT."""

    def __init__(
        self,
        publish: TakeItems,
        key: PublisherKey | None,
        content_bytes_max: int = MESSAGE_BYTES_MAX,
        refused: Counter[str] | None = None,
    ) -> None:
        """`refused` counts by reason."""
        self._publish, self._key, self._content_bytes_max = publish, key, content_bytes_max
        self._refused = Counter[str]() if refused is None else refused
        self._log = SeldomLog()

    async def post(self, request: web.Request) -> web.StreamResponse:
        """Returns the answer. The server limits the body."""
        try:
            if self._key is not None:
                await self._key.check(request.headers.get("Authorization"))
            if request.content_type != "application/json":
                return self._refuse(415, f"expected Content-Type: application/json, got {request.content_type}")
            items = await self._read(await request.read())
            await self._publish(items)
        except UStatusError as error:
            return self._refuse(400 if error.code == UCode.NOT_FOUND else STATUSES.get(error.code, 500), error.message)
        return _answer(200, "Published")

    def _refuse(self, status: int, why: str) -> web.Response:
        """Many publishers do not look at the answer: somebody else has to see it. What a publisher without a JWT has
        sent does not enter the log, since anybody may have sent it."""
        self._refused["publisher"] += 1
        if self._log.is_due(status):
            logged = why if self._key is not None else _UNQUOTED.get(status, why)
            log.warning(
                "a publisher is refused: its items are lost if it does not repeat them", status=status, why=logged
            )
        return _answer(status, why)

    async def _read(self, body: bytes) -> list[Item]:
        if len(body) <= BODY_BYTES_AT_ONCE:
            return read_items(body, self._content_bytes_max)
        return await asyncio.to_thread(read_items, body, self._content_bytes_max)


def _answer(status: int, text: str) -> web.Response:
    response = web.Response(status=status, text=f"{text}\n")
    if status in (429, 503):
        response.headers.update(RETRY_LATER)
    elif status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
