"""Whose poll reads next: callers in turn, and none whose answers the network has not taken.

poll -> begin -> waiting, by caller -- a seat is free, it has one left, room for one more answer --> reads
  its room is given back <- ended <- the answer is on its way, or there is none <- its seat is given back <- end
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from uprotocol.communication.shares import CALLERS_SHARE, Shares
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

SEATS_MAX: Final = 8  # answers being made at once: more are not made faster, and each takes some MiB

HasRoom = Callable[[str, int, int, int], bool]


class Turns:
    """A caller is an authority.

    `has_room(caller, bytes, promised, promised_to_all)`: whether an answer of so many bytes can wait on the way to the
    network beside those that are promised to this caller, and to all.
    """

    def __init__(
        self, reply_bytes: int, has_room: HasRoom, *, seats_max: int = SEATS_MAX, share: int = CALLERS_SHARE
    ) -> None:
        self._reply_bytes, self._has_room = reply_bytes, has_room
        self._seats = Shares[str](seats_max, share=share)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller, in the order in which it is their turn
        self._promised = Shares[str]()  # answers that are being made, or are made and not yet on their way

    def __repr__(self) -> str:
        return f"Turns(seated={self._seats.pieces}, waiting={sum(map(len, self._waiting.values()))})"

    async def begin(self, caller: str, seconds: float) -> None:
        """Wait for a seat, and room for an answer. Raises RESOURCE_EXHAUSTED after `seconds`."""
        if caller not in self._waiting and self._may_begin(caller):
            self._seat(caller)
            return
        seat: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(seat)
        self.look()
        try:
            async with asyncio.timeout(seconds):
                await seat
        except BaseException as error:
            if seat.done() and not seat.cancelled():
                self.end(caller)
                self.ended(caller)
            elif seat in self._waiting.get(caller, ()):
                self._waiting[caller].remove(seat)
                self._drop_empty(caller)
            if isinstance(error, TimeoutError):
                why = f"answers to {caller!r} wait for the network, or for their turn, for too long: try again later"
                raise UStatusError(UCode.RESOURCE_EXHAUSTED, why) from None
            raise

    def end(self, caller: str) -> None:
        """Give the seat back; the room for the answer stays promised."""
        self._seats.add(caller, -1)
        self.look()

    def end_with_the_step(self, caller: str) -> None:
        """The same, and the answer is on its way, or there is none, when the step of the loop that is under way is
        done."""
        self.end(caller)
        asyncio.get_running_loop().call_soon(self.ended, caller)

    def ended(self, caller: str) -> None:
        """There is no answer, or it is on its way and counted there."""
        self._promised.add(caller, -1)
        self.look()

    def look(self) -> None:
        """Let those begin who can. To be called, too, whenever there may be more room."""
        for caller in list(self._waiting):
            while caller in self._waiting and self._may_begin(caller):
                seat = self._waiting[caller].popleft()
                self._drop_empty(caller)
                if not seat.done():
                    self._seat(caller)
                    seat.set_result(None)
                    break  # the next one has its turn
            if caller in self._waiting and self._seats.pieces_of(caller):
                self._waiting[caller] = self._waiting.pop(caller)  # behind the others

    def _may_begin(self, caller: str) -> bool:
        if self._seats.full(caller) is not None:
            return False
        promised = self._reply_bytes * self._promised.pieces_of(caller)
        return self._has_room(caller, self._reply_bytes, promised, self._reply_bytes * self._promised.pieces)

    def _seat(self, caller: str) -> None:
        self._seats.add(caller, 1)
        self._promised.add(caller, 1)

    def _drop_empty(self, caller: str) -> None:
        if not self._waiting[caller]:
            del self._waiting[caller]
