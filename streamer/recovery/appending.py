"""Appends the messages of one topic in order, each batch with the position behind it in one transaction.

append -> flow -> log -> committed: on_committed
                      '-> failed: so do all that were appended behind it -> on_failed, with the committed position
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from history.file.writer import FollowedFrom
from history.log.log import Log
from streamer.recovery.waiting import GateEntry
from streamer.walk.flow import Flow
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

PREFIX: Final = "@recovery:"  # of the key of a position in the log

log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class TopicBatch:
    """Entries of one append. `failures`: of the log when it got them; -1: it has not got them."""

    entries: list[GateEntry]
    position: str | None
    round: int
    failures: int = -1


class TopicAppender:
    """`position`: behind what was given to `append`; None: nothing was. `round` rises with each failure."""

    def __init__(
        self,
        topic: UUri,
        target: Log,
        flow: Flow,
        on_committed: Callable[[Sequence[GateEntry], int], None],
        on_failed: Callable[[Sequence[GateEntry], UStatusError], None],
    ) -> None:
        """`on_committed(entries, first seq)`. `on_failed(entries, error)`: of all batches that have failed, when none
        is under way any more and `position` is the committed one again."""
        self._topic, self._log, self._flow = topic, target, flow
        self._on_committed, self._on_failed = on_committed, on_failed
        self._key = PREFIX + uris.format(topic)
        self._appending: dict[TopicBatch, asyncio.Future[int]] = {}  # not settled yet, in order
        self._failed: list[GateEntry] = []
        self.round = 0  # batches of an earlier one must not be appended any more
        self.refusal: UStatusError | None = None  # the log's last answer, if it was one
        self.position = self._committed()

    @property
    def is_failing(self) -> bool:
        """Returns whether nothing may be appended, since not all that was appended behind a failure has failed yet."""
        return bool(self._failed)

    def append(self, entries: list[GateEntry]) -> None:
        """Append entries, and `position`, when it is their turn."""
        if entries:
            batch = TopicBatch(entries, self.position, self.round)
            answer = self._flow.append(len(entries), functools.partial(self._offer, batch))
            self._appending[batch] = answer
            answer.add_done_callback(functools.partial(self._settled, batch))

    async def settled(self) -> None:
        """Wait for the log's answer to what was appended."""
        if self._appending:
            await asyncio.wait([next(reversed(self._appending.values()))])
            await asyncio.sleep(0)  # its callbacks have run

    def keep(self) -> None:
        """Keep `position`, which no message brings."""
        followed = self._log.followed
        if self.position is None or self._key in followed.under_way or self._appending:
            return  # a later one is kept with the next message
        try:
            followed.keep(self._key, self.position.encode())
        except UStatusError as error:
            log.warning("a position could not be kept", topic=uris.format(self._topic), error=str(error))

    def _committed(self) -> str | None:
        stored = self._log.followed.position(self._key)
        return stored.decode() if stored else None

    def _offer(self, batch: TopicBatch, answer: asyncio.Future[int]) -> None:
        first = next((one for one in self._appending if one.failures >= 0), None)
        if batch.round != self.round or (first is not None and first.failures != self._log.failures):
            answer.set_exception(UStatusError(UCode.UNAVAILABLE, "what the log has refused before this comes first"))
            return
        batch.failures = self._log.failures
        try:
            stream = self._log.stream_id(self._topic, None, wanted=True)
        except UStatusError as error:
            answer.set_exception(error)
            return
        position = b"" if batch.position is None else batch.position.encode()
        notes = FollowedFrom([None] * len(batch.entries), self._key, position)
        taken = self._log.append([stream] * len(batch.entries), [one.message for one in batch.entries], notes)
        taken.add_done_callback(functools.partial(_forward, answer))

    def _settled(self, batch: TopicBatch, answer: asyncio.Future[int]) -> None:
        del self._appending[batch]
        error = UStatusError(UCode.CANCELLED, "it was cancelled") if answer.cancelled() else answer.exception()
        if error is None:
            self.refusal = None
            self._on_committed(batch.entries, answer.result())
            return
        refusal = error if isinstance(error, UStatusError) else UStatusError(UCode.INTERNAL, f"the log: {error!r}")
        self.refusal = refusal
        if batch.round == self.round:
            self.round += 1
        self._failed += batch.entries
        if not self._appending:
            failed, self._failed = self._failed, []
            self.position = self._committed()
            self._on_failed(failed, refusal)


def _forward(answer: asyncio.Future[int], taken: asyncio.Future[int]) -> None:
    if answer.done() or taken.cancelled():
        answer.cancel()
    elif (error := taken.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(taken.result())
