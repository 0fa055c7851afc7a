"""Polls a history over a network that loses calls: waits as long as answers take there, and pauses while nothing
answers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final

import structlog

from history.reading.client import HistoryClient, is_sound
from history.records.witness import seqs_of
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import CommandRequest, CommandResponse, PollRequest, PollResponse
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

WAIT_MS_MIN: Final = 500  # of a long poll, on a network that loses or cuts long calls
WAIT_MS_MAX: Final = 30_000  # on a quiet and reliable network: two calls a minute show that both sides are alive
# for an answer that may be lost; over a satellite it takes a second
PATIENCE_MS_MIN: Final = 2_000
PATIENCE_MS_MAX: Final = 60_000
PATIENCE_TIMES: Final = 8
BACKOFF_MS_MIN: Final = 100
BACKOFF_MS_MAX: Final = 10_000  # within this time a service that is back is found
PAUSE_MS: Final = 100  # between polls, if a service answers at once with nothing though it was asked to wait
STUCK_MAX: Final = 8  # an answer without progress counts 2, one with progress -1; a pause begins above half of this
AGAIN: Final = frozenset({UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED, UCode.RESOURCE_EXHAUSTED})

log = structlog.get_logger()


class AnswerTimeout:
    """How long to wait for an answer that may be lost: a few times as long as answers take, and twice as long after
    each one that did not come. Milliseconds."""

    def __init__(self) -> None:
        self.ms = PATIENCE_MS_MIN
        self.usual_ms = 0.0  # what answers take

    def answered(self, ms: float) -> None:
        """An answer took so long."""
        self.usual_ms += (ms - self.usual_ms) / 4
        self.ms = max(PATIENCE_MS_MIN, self.ms // 2 if ms * PATIENCE_TIMES < self.ms else self.ms)

    def lost(self) -> None:
        self.ms = min(2 * self.ms, PATIENCE_MS_MAX)


class NoProgressPause:
    """Pauses one reader whose polls are answered at once and bring it no further."""

    def __init__(self) -> None:
        self._before: dict[bytes, int] = {}  # its positions at the poll before, and ...
        self._asked_at, self._stuck = 0.0, 0  # ... when that was; see STUCK_MAX

    async def before_poll(self, positions: dict[bytes, int]) -> None:
        """Called before each poll, with the positions from which it asks."""
        loop = asyncio.get_running_loop()
        before, self._before = self._before, positions
        steps = [seq - before[one] for one, seq in positions.items() if one in before]
        if max(steps, default=0) > 0 and min(steps) >= 0:
            self._stuck = max(0, self._stuck - 1)
        elif loop.time() - self._asked_at > 2 * PAUSE_MS / 1000:
            self._stuck = 0
        else:
            self._stuck = min(self._stuck + 2, STUCK_MAX)
        if self._stuck > STUCK_MAX // 2:
            await asyncio.sleep(PAUSE_MS / 1000)
        self._asked_at = loop.time()


class Poller:
    """Makes long polls as long as the network allows. While the service does not answer, it is asked again after
    growing, random pauses."""

    def __init__(
        self,
        client: HistoryClient,
        *,
        wait_ms_max: int = WAIT_MS_MAX,
        on_connected: Callable[[bool], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._client, self._on_connected = client, on_connected
        self._wait_ms_max = wait_ms_max
        self._backoff = Backoff(BACKOFF_MS_MIN, BACKOFF_MS_MAX, rng if rng is not None else random.Random())
        self.wait_ms = min(wait_ms_max, max(WAIT_MS_MIN, wait_ms_max // 8))
        self.connected = False
        self.timeout = AnswerTimeout()
        self._no_progress = NoProgressPause()

    async def command(self, request: CommandRequest) -> CommandResponse:
        """As HistoryClient.command, but waits for the answer as long as other answers take."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            answer = await self._client.command(request, patience_ms=self.timeout.ms)
        except UStatusError as error:
            if error.code == UCode.DEADLINE_EXCEEDED:
                self.timeout.lost()
            raise
        self.timeout.answered((loop.time() - began) * 1000)
        return answer

    async def poll(
        self, request: PollRequest, *, at_once: bool = False, no_progress: NoProgressPause | None = None
    ) -> PollResponse | None:
        """Returns the answer, or None after a pause if there was none. `at_once`: the service does not wait for
        records. `no_progress`: of the reader, where several share this. Raises UStatusError if the service refuses."""
        loop = asyncio.get_running_loop()
        await (no_progress or self._no_progress).before_poll(seqs_of(request.positions))
        began = loop.time()
        request.wait_ms = 0 if at_once else self.wait_ms
        try:
            response = await self._client.poll(request, patience_ms=self.timeout.ms)
        except UStatusError as error:
            if error.code not in AGAIN:
                raise
            if error.code == UCode.DEADLINE_EXCEEDED:
                self.timeout.lost()
            self.wait_ms = max(min(WAIT_MS_MIN, self._wait_ms_max), self.wait_ms // 2)
            self._set_connected(False, error)
            await self.pause()
            return None
        if at_once:
            self.timeout.answered((loop.time() - began) * 1000)
        if not is_sound(response):
            log.warning("the history gave an invalid answer; asking again")
            await self.pause()
            return None
        self._backoff.reset()
        self._set_connected(True)
        if not response.batches and not response.gaps and not response.more and request.wait_ms:
            if (loop.time() - began) * 1000 < request.wait_ms / 4:
                await asyncio.sleep(PAUSE_MS / 1000)
            self.wait_ms = min(request.wait_ms * 2, self._wait_ms_max)
        return response

    def wake(self) -> None:
        """End the current pause."""
        self._backoff.wake()

    async def pause(self) -> None:
        """Pauses grow until there is an answer."""
        await self._backoff.wait()

    def _set_connected(self, connected: bool, error: UStatusError | None = None) -> None:
        if connected == self.connected:
            return
        self.connected = connected
        if error is not None:
            log.warning("the history does not answer; asking again", error=str(error))
        if self._on_connected is not None:
            self._on_connected(connected)
