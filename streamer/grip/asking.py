"""Asks links for many held streams at once: streams that ask the same share one request.

held streams -> url, last ids: in flight already? -> Links -> one answer for all of them
                                          fails: counted, logged once, a condition until it answers again
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

import structlog

from streamer.grip.channels import Channels
from streamer.grip.headers import Instruction
from streamer.grip.link import LinkAnswer, Links, place_of, resolved
from streamer.reporting import Condition
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError, invalid
from uprotocol.tasks import end
from uprotocol.v1.ucode_pb2 import UCode

ASK_PAUSE_S: Final = 0.1  # after an answer of a link: a backend whose ids never fit is not asked all the time
FAILING_MAX: Final = 100  # links whose failures are remembered; a condition names the first of them

log = structlog.get_logger()


_Key = tuple[str, str, tuple[tuple[str, str], ...]]  # url, host, last ids


def check_hold(instruction: Instruction, channels: Channels) -> None:
    """Raises INVALID_ARGUMENT, which names the header, if a request can't be held so."""
    if not instruction.channels:
        raise invalid("Grip-Channel: expected the channels of the hold, got none")
    for name, prev_id in instruction.channels:
        try:
            channels.last_id(name)
        except UStatusError as error:
            raise invalid(f"Grip-Channel: {error.message}") from None
        if instruction.hold == "stream" and prev_id is not None and instruction.link is None:
            raise invalid(f"Grip-Link: expected one for recovery, since channel {name!r} has a prev-id, got none")


class _Request:
    """A request to a link, which streams that ask the same share. `sent`: 0 until it is sent."""

    def __init__(self, ask: Callable[[_Request], Coroutine[None, None, LinkAnswer]]) -> None:
        self.sent = self.waiters = 0
        self.task = asyncio.create_task(ask(self), name="asks a Grip-Link")


class SharedLinks:
    """All links of the held streams. Its count says what was first: an item, or a request. `backoff`: the pauses of a
    link that fails; whoever asks it meanwhile waits for their end, and shares the next request."""

    def __init__(self, links: Links, channels: Channels, backoff: Backoff) -> None:
        self._links, self._channels, self._backoff = links, channels, backoff
        self._count = itertools.count(1)
        self._flying: dict[_Key, _Request] = {}
        self._wanted: Counter[str] = Counter()  # url -> requests in flight
        self._resting: dict[str, asyncio.TimerHandle] = {}  # url -> when it may be asked again
        self._pauses: dict[str, Backoff] = {}  # of links that fail
        self._failing: dict[str, tuple[float, str]] = {}  # address without query -> since (Unix seconds), why
        self.asked: Counter[str] = Counter()  # by outcome

    def tick(self) -> int:
        return next(self._count)

    async def ask(self, url: str, last_ids: Mapping[str, str], host: str = "") -> tuple[int, LinkAnswer]:
        """Returns when the request was sent, by `tick`, and its answer. Raises as `Links.ask`, and
        FAILED_PRECONDITION for an answer that can't be held on with."""
        key = (url, host, tuple(sorted(last_ids.items())))
        request = self._flying.get(key)
        if request is not None and request.task.done():
            # `_landed` runs later in this turn of the loop. Awaiting it would not let the loop go on, so a caller that
            # asks again until there is an answer would never end
            self._forget(key, request)
            request = None
        if request is None:
            request = self._flying[key] = _Request(lambda made: self._ask(made, url, dict(last_ids), host))
            self._wanted[url] += 1
            request.task.add_done_callback(lambda _: self._landed(key, request))
        request.waiters += 1
        try:
            answer = await asyncio.shield(request.task)
        finally:
            request.waiters -= 1
            if not request.waiters:
                self._forget(key, request)
                request.task.cancel()
        return request.sent, answer

    async def _ask(self, request: _Request, url: str, last_ids: Mapping[str, str], host: str) -> LinkAnswer:
        if (resting := self._resting.get(url)) is not None:
            await asyncio.sleep(resting.when() - asyncio.get_running_loop().time())
        request.sent = self.tick()
        answer = await self._links.ask(url, last_ids, host)
        said = answer.instruction
        try:
            if said.hold == "response":
                raise invalid("Grip-Hold: expected stream, got response")
            if said.hold is not None:
                check_hold(said, self._channels)
            if said.link is not None:
                resolved(url, said.link.url)
        except UStatusError as error:
            why = f"the answer of the link {place_of(url)}: {error.message}"
            raise UStatusError(UCode.FAILED_PRECONDITION, why) from None
        return answer

    def _forget(self, key: _Key, request: _Request) -> None:
        if self._flying.get(key) is request:
            del self._flying[key]
            self._wanted[key[0]] -= 1
            if not self._wanted[key[0]]:
                del self._wanted[key[0]]

    def _landed(self, key: _Key, request: _Request) -> None:
        self._forget(key, request)
        if request.task.cancelled():
            return
        error, url = request.task.exception(), key[0]
        self.asked["answered" if error is None else "failed"] += 1
        place = place_of(url)
        if error is not None:
            if place not in self._failing and len(self._failing) < FAILING_MAX:
                log.warning(
                    "a Grip-Link does not answer as it must; held streams wait for it", link=place, why=str(error)
                )
                self._failing[place] = time.time(), str(error)
            self._rest(url, self._pauses.setdefault(url, self._backoff.sibling()).next_ms() / 1_000)
            return
        self._pauses.pop(url, None)
        if self._failing.pop(place, None) is not None:
            log.info("a Grip-Link answers again", link=place)
        if request.task.result().instruction.hold is not None:  # else the next page is asked at once
            self._rest(url, ASK_PAUSE_S)

    def _rest(self, url: str, pause_s: float) -> None:
        if url not in self._resting:
            self._resting[url] = asyncio.get_running_loop().call_later(pause_s, self._rested, url)

    def _rested(self, url: str) -> None:
        del self._resting[url]
        if url not in self._wanted:  # who asked it has gone
            self._pauses.pop(url, None)
            self._failing.pop(place_of(url), None)

    def conditions(self) -> Iterator[Condition]:
        if self._failing:
            place, (since, why) = next(iter(self._failing.items()))
            others = f" and {len(self._failing) - 1} other links" if len(self._failing) > 1 else ""
            moment = datetime.fromtimestamp(since, UTC).isoformat(timespec="seconds")
            yield Condition(f"held streams can't recover from {place}{others} since {moment}: {why}")

    async def close(self) -> None:
        for pause in self._resting.values():
            pause.cancel()
        await end(*(request.task for request in self._flying.values()))
        await self._links.close()
