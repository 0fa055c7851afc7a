"""Requests that a backend holds open: streams of items, and requests that wait for one response.

items of channels -> Succession -> written          a gap, or silence -> its link is asked -> the answer is written, too

A stream asks its link anew after growing pauses while the link fails; its items wait. What can't be recovered for good
cuts the connection, so that the client sees an incomplete answer: raw bytes can't say that something is missing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Final, Self

from streamer.grip.asking import SharedLinks
from streamer.grip.channels import Channels
from streamer.grip.headers import HeldChannel, Instruction
from streamer.grip.items import Item, ResponseFormat
from streamer.grip.link import LinkAnswer, resolved
from streamer.grip.succession import Succession
from uprotocol.callbacks import Remove
from uprotocol.status import UStatusError
from uprotocol.tasks import wait_until
from uprotocol.v1.ucode_pb2 import UCode

LINK_IDLE_S: Final = 120.0  # where a Grip-Link has no timeout; Pushpin's, too
RESPONSE_TIMEOUT_S: Final = 55.0  # where there is no Grip-Timeout; Pushpin's, too
PAGES_MAX: Final = 1_000  # of one recovery, each written before the next is asked: more are endless

Write = Callable[[bytes], Awaitable[None]]


class _Held:
    """Hears the items of the channels of a hold."""

    def __init__(self, channels: Channels, tick: Callable[[], int]) -> None:
        self._channels, self._tick = channels, tick
        self._removes: dict[str, Remove] = {}
        self._succession = Succession()
        self._news = asyncio.Event()

    def _listen(self, held: tuple[HeldChannel, ...]) -> None:
        """Listens to these channels and no others. A new one whose last item is not the one after which the hold
        begins has a gap already."""
        names = {one.name for one in held}
        for name in self._removes.keys() - names:
            self._removes.pop(name)()
        for name, prev_id in held:
            if name not in self._removes:
                self._removes[name] = self._channels.listen(name, self._hear)
                if prev_id is not None and self._channels.last_id(name) not in (None, prev_id):
                    self._succession.must_ask = True

    def _hear(self, item: Item) -> None:
        self._succession.hear(item, self._tick())
        self._news.set()

    async def _wait(self, until: float) -> None:
        """`until`: loop time."""
        await wait_until(self._news, None if math.isinf(until) else until)
        self._news.clear()

    def close(self) -> None:
        for remove in self._removes.values():
            remove()


class HeldStream(_Held):
    """One held stream behind its first answer. `url`: of the request, at the backend; `host`: under which the client
    knows it.

    Its state: the backend's last instruction (`_hold`), a recovery that is asked for (`_asking`, `_sent`, `_pages`),
    and when the stream is idle or needs a sign of life (`_active`, `_idle_at`, `_alive_at`).
    """

    def __init__(self, channels: Channels, links: SharedLinks, write: Write, url: str, host: str = "") -> None:
        super().__init__(channels, links.tick)
        self._links, self._write, self._url, self._host = links, write, url, host
        self._hold: Instruction | None = None
        self._asking: asyncio.Task[tuple[int, LinkAnswer]] | None = None
        self._sent: int | None = None  # when the first page of a recovery was asked
        self._pages = 0
        self._active: set[str] = set()  # channels with an item since the link's timeout began
        self._idle_at = self._alive_at = math.inf  # loop time: when the link is asked, when Grip-Keep-Alive is written
        self._is_over = False

    async def run(self, first: Instruction) -> None:
        """Returns when the stream is to end. Raises RESOURCE_EXHAUSTED if it is to be cut off, and what `write`
        raises. `first`: of the answer whose body was written already."""
        try:
            self._go_on(first, self._links.tick())
            while not self._is_over:
                await self._write_items()
                if self._asking is not None and self._asking.done():
                    await self._take(*self._asking.result())
                elif not self._is_over:
                    self._ask_if_due()
                    await self._keep_alive()
                    await self._wait(min(self._idle_at, self._alive_at))
        finally:
            self.close()
            self._stop_asking()

    async def _write_items(self) -> None:
        while not self._is_over and (item := self._succession.next()) is not None:
            self._stop_asking()  # it was idle, and is not any more
            self._active.add(item.channel)
            if self._active >= self._removes.keys():
                self._begin_idle()
            if item.stream is not None:
                self._is_over = item.stream.closes
                await self._put(item.stream.content)
        if self._succession.is_broken:
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, "too many items wait, and no link can return them")

    async def _put(self, content: bytes) -> None:
        if content:
            await self._write(content)
            if (alive := self._hold and self._hold.keep_alive) and alive.is_idle:
                self._alive_at = _now() + (alive.timeout_s or 1.0)

    async def _keep_alive(self) -> None:
        if self._hold is not None and self._hold.keep_alive is not None and _now() >= self._alive_at:
            self._alive_at = _now() + (self._hold.keep_alive.timeout_s or 1.0)
            await self._write(self._hold.keep_alive.content)

    def _begin_idle(self) -> None:
        self._active.clear()
        link = self._hold and self._hold.link
        self._idle_at = math.inf
        if link:
            self._idle_at = _now() + ((LINK_IDLE_S if link.timeout_s is None else link.timeout_s) or 1.0)

    # Recovery

    def _ask_if_due(self) -> None:
        is_idle = _now() >= self._idle_at
        if self._asking is None and (self._succession.must_ask or is_idle):
            if is_idle and len(self._removes) > 1:  # items of another channel do not prove that nothing is missing
                self._succession.must_ask = True
            self._idle_at = math.inf
            self._asking = asyncio.create_task(self._ask(), name="recovers a held stream")
            self._asking.add_done_callback(self._asked)

    def _asked(self, task: asyncio.Task[tuple[int, LinkAnswer]]) -> None:
        if not task.cancelled():
            task.exception()  # it may be of no interest any more
        self._news.set()

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _ask(self) -> tuple[int, LinkAnswer]:
        """Asks until there is an answer that can be used; a link that fails is not asked again at once. Raises
        RESOURCE_EXHAUSTED."""
        while True:
            try:
                return await self._links.ask(self._url, self._succession.last_ids, self._host)
            except UStatusError as error:
                if error.code == UCode.RESOURCE_EXHAUSTED:
                    raise

    async def _take(self, sent: int, answer: LinkAnswer) -> None:
        self._asking = None
        if self._sent is None:
            self._sent, self._pages = sent, 0
        await self._put(answer.body)
        self._go_on(answer.instruction, self._sent)

    def _go_on(self, said: Instruction, sent: int) -> None:
        """Holds on, asks for the next page, or ends, as an answer says."""
        url, self._hold = self._url, said
        if said.link is not None:
            self._url = resolved(url, said.link.url)
        if said.hold is not None:
            self._succession.answered(said.channels, sent)
            self._listen(said.channels)
            self._sent = None
            self._begin_idle()
            if said.keep_alive is None:
                self._alive_at = math.inf
            elif math.isinf(self._alive_at):
                self._alive_at = _now() + (said.keep_alive.timeout_s or 1.0)
        elif said.link is not None:
            self._pages += 1
            if self._pages > PAGES_MAX:
                raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"the link has more than {PAGES_MAX} pages")
            self._succession.turned(said.channels)
        else:
            self._is_over = True


class HeldRequest(_Held):
    """A request that waits for one response (`Grip-Hold: response`)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hold(self, said: Instruction, sent: int) -> None:
        """`sent`: when the backend was asked, by the count of the links."""
        self._succession.answered(said.channels, sent)
        self._listen(said.channels)

    @property
    def last_ids(self) -> dict[str, str]:
        return self._succession.last_ids

    async def wait(self, until: float) -> ResponseFormat | None:
        """Returns the first response that is published; None at `until` (loop time), or as soon as the backend must
        be asked again, since items are missing: `must_ask`."""
        while True:
            while (item := self._succession.next()) is not None:
                if item.response is not None:
                    return item.response
            if self._succession.must_ask or _now() >= until:
                return None
            await self._wait(until)

    @property
    def must_ask(self) -> bool:
        return self._succession.must_ask


def _now() -> float:
    return asyncio.get_running_loop().time()
