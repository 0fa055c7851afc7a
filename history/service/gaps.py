"""Publishes gaps, which are lost records, on a topic of core.ustreamer: up://AUTHORITY/4/1/8002.

Log.damage at the start, on_found later -------------.
retention has deleted records owed to a peer: add ---+-> queue (bounded) -> run: publish
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog

from history.file.damage import LOSSES, OTHERS, Damage
from history.log.log import Log
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, GapNotice
from uprotocol.status import UStatusError
from uprotocol.v1.uri_pb2 import UUri

QUEUED_MAX: Final = 1_000  # not yet published; the log's damage remains known without a notice

log = structlog.get_logger()


class Gaps:
    """`add` queues a gap without waiting; `run` publishes the queue until it is cancelled. `total` counts gaps; `lost`
    counts those that found the queue full."""

    def __init__(
        self,
        authority: str,
        logs: Iterable[Log],
        publish: Callable[[UUri, GapNotice], Awaitable[None]],
        now_ms: Callable[[], int] = uuids.now_ms,
    ) -> None:
        self._topic, self._publish, self._now_ms = ids.at(authority, ids.GAPS), publish, now_ms
        self._queue: deque[GapNotice] = deque()
        self._arrived = asyncio.Event()
        self.total = self.lost = 0
        for one in logs:
            for damage in one.damage:  # reported at each start, until an operator has acknowledged it
                self._damaged(damage)
            one.losses.on_found(self._damaged)

    def __repr__(self) -> str:
        return f"Gaps(total={self.total}, lost={self.lost}, queued={len(self._queue)})"

    def add(self, gap: Gap, endpoint: str = "", detail: str = "") -> None:
        self.total += 1
        if len(self._queue) >= QUEUED_MAX:
            self.lost += 1
            return
        notice = GapNotice(gap=gap, endpoint=endpoint, detail=detail)
        notice.time.FromMilliseconds(self._now_ms())
        self._queue.append(notice)
        self._arrived.set()

    def _damaged(self, damage: Damage) -> None:
        if damage.kind in LOSSES or damage.kind in OTHERS:
            reason = Gap.REASON_UNSPECIFIED if damage.kind in OTHERS else Gap.REASON_CORRUPTION
            gap = Gap(reason=reason, incarnation=damage.incarnation, after_seq=damage.after, before_seq=damage.before)
            self.add(gap, detail=f"{damage.kind}: {damage.detail}" if damage.detail else damage.kind)

    async def run(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._queue:
                notice = self._queue.popleft()
                try:
                    await self._publish(self._topic, notice)
                except UStatusError as error:
                    log.debug("a gap could not be published", error=str(error))
