"""Finds the peer that blocks sending: it reads nothing, and Zenoh's put waits for it.

send_batch -> every LOOK_S, on the loop: has the sender progressed? -> no: ask each peer, on a thread
                                                                       '-> peers that do not answer: trouble, log
Zenoh cuts that peer off (stall_ms_max) -> the sender progresses -> a peer that still does not answer is lost until it
                                                                    answers

Zenoh does not report for whom a put waits. It reports the end of a link only after its pending write there, which may
take for ever if the other process was stopped. A peer that reads answers a query of the highest priority, which has its
own queue on each link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

import structlog

from transports.base import on_own_thread
from transports.zenoh.sender import Unread, ZenohSender
from uprotocol import uuid as uuids

LOOK_S: Final = 0.5  # between two checks of the sender
REPORTED_AFTER_S: Final = 1.0  # without progress: the first batch after a link may wait for SETTLE_S_MAX
ANSWER_S_MAX: Final = 1.0  # for a peer to answer that it reads
ASK_AGAIN_S: Final = 5.0  # between two queries to a peer that counts as lost while Zenoh still has a link to it

log = structlog.get_logger()


class StallWatch:
    """Watches one sender. Lives on the event loop."""

    def __init__(
        self,
        sender: ZenohSender,
        authority: str,
        stall_s: float,
        peers: Mapping[str, bool],
        sends: Collection[object],
        on_cut: Callable[[str], None],
        on_back: Callable[[str], None],
    ) -> None:
        """`stall_s`: how long Zenoh waits for a peer before it cuts it off. `peers`: the linked ones, by Zenoh id.
        `sends`: calls of `put` that have not returned. `on_cut(peer)`: the peer is cut off. `on_back(peer)`: it answers
        again."""
        self._sender, self._authority, self._stall_s, self._peers = sender, authority, stall_s, peers
        self._sends, self._on_cut, self._on_back = sends, on_cut, on_back
        self._timer: asyncio.TimerHandle | None = None
        self._position: tuple[int, int] | None = None  # of the sender, at the last check
        self._stalled_since = 0.0  # loop time of the first check that found it there
        self._unseen_s = LOOK_S  # the longest time it may have been there before that check
        self._watched_at = 0.0  # loop time of the last check, or of the call of `watch`
        self._cut_at = 0.0  # loop time at which a put continued that had waited for stall_s
        self._asking: asyncio.Task[None] | None = None
        self._cutting: asyncio.Task[None] | None = None
        self._unread: dict[str, str] = {}  # address of each peer that did not answer in this stall
        self.trouble = ""

    def watch(self) -> None:
        """Call it when `sends` has a new one."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._watched_at = loop.time()
            self._timer = loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._position = None
        self._on_progress()
        if self._cutting is not None:
            self._cutting.cancel()

    def has_cut(self, since: float) -> bool:
        """True if a put that was under way after `since` (loop time) took so long that Zenoh has cut off a peer."""
        return self._may_have_cut or self._cut_at > since

    @property
    def _may_have_cut(self) -> bool:
        """True if the put of the last check may have waited for stall_s."""
        return self._stalled_s + self._unseen_s >= self._stall_s

    @property
    def _stalled_s(self) -> float:
        """Seconds since the put of the last check was first seen; it may have begun up to `_unseen_s` earlier."""
        return 0.0 if self._position is None else asyncio.get_running_loop().time() - self._stalled_since

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer, looked_at = None, self._watched_at
        position = self._sender.position
        if position is None or position != self._position:
            self._on_progress()
        if self._sends or position is not None:
            self.watch()
        if position is None:  # nothing is being sent, or the thread has not begun with it
            return
        if self._position is None:
            self._position, self._stalled_since = position, loop.time()
            self._unseen_s = max(LOOK_S, self._stalled_since - looked_at)
        elif not self.trouble and self._stalled_s >= REPORTED_AFTER_S:
            self._report(list(self._peers))
            self._asking = loop.create_task(self._ask())

    def _on_progress(self) -> None:
        loop = asyncio.get_running_loop()
        if self._may_have_cut:
            self._cut_at = loop.time()
            if self._cutting is None or self._cutting.done():
                self._cutting = loop.create_task(self._cut(self._unread))
        self._unread = {}
        self._position, self._unseen_s = None, LOOK_S
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        if self.trouble:
            log.info("sending goes on", authority=self._authority)
            self.trouble = ""

    async def _ask(self) -> None:
        unread, addresses = await self._silent(self._peers), self._sender.addresses()
        self._unread = {peer: addresses.get(peer, "no link") for peer in unread.late}
        silent = unread.late or unread.mute
        self._report([f"{peer} ({addresses.get(peer, 'no link')})" for peer in silent] or list(self._peers))
        log.warning("sending waits for a peer that reads nothing", authority=self._authority, trouble=self.trouble)

    async def _cut(self, unread: dict[str, str]) -> None:
        """Find the peer that Zenoh has cut off: one of `unread`, if there are any. For a peer that can't answer queries
        Zenoh's own report decides."""
        answer = await self._silent(unread or self._peers)
        # a peer without a link gets no query, so it is mute
        lost = [*answer.late, *(peer for peer in answer.mute if peer in unread)]
        what = "a peer that read nothing is cut off: what was sent to it last is lost"
        for peer in lost:
            log.warning(what, authority=self._authority, peer=peer, address=unread.get(peer, "no link"))
            self._on_cut(peer)
        while lost := [peer for peer in lost if peer not in self._peers and peer in self._sender.addresses()]:
            await asyncio.sleep(ASK_AGAIN_S)
            answer = await self._silent(lost)
            for peer in set(lost).difference(answer.late, answer.mute):
                self._on_back(peer)

    async def _silent(self, peers: Iterable[str]) -> Unread:
        asked = list(peers)
        return await on_own_thread(
            f"zenoh-ask-{self._authority}", lambda: self._sender.silent(asked, ANSWER_S_MAX), lambda _: None
        )

    def _report(self, names: list[str]) -> None:
        since = datetime.fromtimestamp(uuids.now_ms() / 1_000 - self._stalled_s, UTC).isoformat(timespec="seconds")
        who = f"the peer {names[0]}" if len(names) == 1 else f"one of the peers {', '.join(names)}"
        self.trouble = (
            f"since {since} sending waits for {who}, which reads nothing; after {self._stall_s * 1_000:.0f} ms "
            "(stall_ms_max) it is cut off"
        )
