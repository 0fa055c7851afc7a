"""Which peer holds up what is sent: it reads nothing, and Zenoh's put waits for it.

send_batch -> every LOOK_S, on the loop: has the sender moved? -> no: ask each peer, on a thread -> who does not answer
                                                                                                    |-> trouble, log
Zenoh cuts that peer off (stall_ms_max) -> the sender moves on -> who still does not answer is lost, until it answers

Zenoh itself does not say whom a put waits for, and that a link is down it says only when what it was writing there has
left: for a process that was stopped that may take for ever. A peer that reads answers a query of the highest priority,
which has a queue of its own on each link.
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

LOOK_S: Final = 0.5  # between two looks at the sender
TOLD_AFTER_S: Final = 1.0  # without a message put: the first batch after a link may wait for SETTLE_S_MAX
ANSWER_S_MAX: Final = 1.0  # for a peer to answer that it reads
ASK_AGAIN_S: Final = 5.0  # a peer that was taken for lost, while Zenoh still has a link to it

log = structlog.get_logger()


class StallWatch:
    """Of one sender. Lives on the event loop."""

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
        """`stall_s`: so long Zenoh waits for a peer before it cuts it off. `peers`: those linked now, by Zenoh id.
        `sends`: the calls of `put` that have not returned. `on_cut`: that one is cut off. `on_back`: it was not, since
        it answers."""
        self._sender, self._authority, self._stall_s, self._peers = sender, authority, stall_s, peers
        self._sends, self._on_cut, self._on_back = sends, on_cut, on_back
        self._timer: asyncio.TimerHandle | None = None
        self._position: tuple[int, int] | None = None  # of the sender, at the last look
        self._stands_since = 0.0  # loop time of the first look that found it there
        self._unseen_s = LOOK_S  # it may have been there for so long before that look; more where the loop was late
        self._watched_at = 0.0  # loop time of the last look, or of the call that began the watch
        self._cut_at = 0.0  # loop time at which a put went on that had waited for so long
        self._asking: asyncio.Task[None] | None = None
        self._cutting: asyncio.Task[None] | None = None
        self._unread: dict[str, str] = {}  # of who did not answer in this stall though it could, the address
        self.trouble = ""

    def __repr__(self) -> str:
        return f"StallWatch({self.trouble or 'none'})"

    def watch(self) -> None:
        """`sends` has one more."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._watched_at = loop.time()
            self._timer = loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._position = None
        self._end()
        if self._cutting is not None:
            self._cutting.cancel()

    def has_cut(self, since: float) -> bool:
        """A put that was under way after `since` (loop time) took so long that Zenoh has cut off the peer that it
        waited for."""
        return self._may_have_cut or self._cut_at > since

    @property
    def _may_have_cut(self) -> bool:
        """The put that was under way at the last look may have waited for as long as Zenoh waits for a peer."""
        return self._stood_s + self._unseen_s >= self._stall_s

    @property
    def _stood_s(self) -> float:
        """How long the put that was under way at the last look has waited since it was first seen; up to `_unseen_s`
        less than it really has."""
        return 0.0 if self._position is None else asyncio.get_running_loop().time() - self._stands_since

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer, looked_at = None, self._watched_at
        position = self._sender.position
        if position is None or position != self._position:
            self._end()
        if self._sends or position is not None:
            self.watch()
        if position is None:  # nothing is being sent, or the thread has not begun what it was handed
            return
        if self._position is None:
            self._position, self._stands_since = position, loop.time()
            self._unseen_s = max(LOOK_S, self._stands_since - looked_at)
        elif not self.trouble and self._stood_s >= TOLD_AFTER_S:
            self._tell(list(self._peers))
            self._asking = loop.create_task(self._ask())

    def _end(self) -> None:
        """The sender has moved."""
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
        self._tell([f"{peer} ({addresses.get(peer, 'no link')})" for peer in silent] or list(self._peers))
        log.warning("sending waits for a peer that reads nothing", authority=self._authority, trouble=self.trouble)

    async def _cut(self, unread: dict[str, str]) -> None:
        """Zenoh has cut off a peer that reads nothing: one of `unread`, if there are any. One that can't answer is left
        to what Zenoh says."""
        answer = await self._silent(unread or self._peers)
        lost = [
            *answer.late,
            *(peer for peer in answer.mute if peer in unread),
        ]  # one whose link is down is asked no more
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

    def _tell(self, names: list[str]) -> None:
        since = datetime.fromtimestamp(uuids.now_ms() / 1_000 - self._stood_s, UTC).isoformat(timespec="seconds")
        who = f"the peer {names[0]}" if len(names) == 1 else f"one of the peers {', '.join(names)}"
        self.trouble = (
            f"since {since} sending waits for {who}, which reads nothing; after {self._stall_s * 1_000:.0f} ms "
            "(stall_ms_max) it is cut off"
        )
