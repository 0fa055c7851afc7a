"""Room that many callers share: all together have the whole of it, and each at most its part, in pieces and in bytes.

Shares   full(who, bytes) -> None, or the limit that is reached           add(who, 1, bytes), later add(who, -1, -bytes)
Turns    turn(who): wait -- a seat is free, it has one left, room for one more answer --> work
             its room is given back <- ended <- the answer is on its way, or there is none <- its seat is given back <-'

So a caller that asks without end fills its own part: the others have room beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Final, Generic, NamedTuple, TypeVar

from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

CALLERS_SHARE: Final = 4  # one caller has at most a quarter of each limit: three others must be able to work beside it
UNLIMITED: Final = 1 << 62

K = TypeVar("K", bound=Hashable)


class Full(NamedTuple):
    """Which limit leaves no room for one more."""

    limit: int
    is_of_bytes: bool  # else of pieces
    is_of_one: bool  # of each caller; else of all together


class Shares(Generic[K]):
    """How much each caller has of what there is for all. One piece has room wherever there is none yet, whatever its
    size."""

    def __init__(self, pieces_max: int = UNLIMITED, bytes_max: int = UNLIMITED, share: int = CALLERS_SHARE) -> None:
        """A caller has at most one part in `share` of each limit, and at least one piece."""
        self.pieces_max, self.bytes_max = pieces_max, bytes_max
        self.each_pieces_max, self.each_bytes_max = max(1, pieces_max // share), bytes_max // share
        self.pieces = self.bytes = 0
        self._used: dict[K, tuple[int, int]] = {}  # pieces and bytes, of those that have any

    def __repr__(self) -> str:
        return f"Shares({self.pieces} pieces of {self.bytes} bytes, {len(self._used)} callers)"

    def full(self, who: K, bytes: int = 0, promised: int = 0, promised_to_all: int = 0) -> Full | None:
        """None if one more piece of so many bytes has room beside what is there, and the bytes that are promised to
        `who`, and to all."""
        pieces, mine = self._used.get(who, (0, 0))
        if self.pieces >= self.pieces_max:
            return Full(self.pieces_max, is_of_bytes=False, is_of_one=False)
        if (self.pieces or promised_to_all) and self.bytes + promised_to_all + bytes > self.bytes_max:
            return Full(self.bytes_max, is_of_bytes=True, is_of_one=False)
        if pieces >= self.each_pieces_max:
            return Full(self.each_pieces_max, is_of_bytes=False, is_of_one=True)
        if (pieces or promised) and mine + promised + bytes > self.each_bytes_max:
            return Full(self.each_bytes_max, is_of_bytes=True, is_of_one=True)
        return None

    def add(self, who: K, pieces: int, bytes: int = 0) -> None:
        """Below zero: they are gone."""
        has, mine = self._used.get(who, (0, 0))
        self.pieces += pieces
        self.bytes += bytes
        if has + pieces:
            self._used[who] = (has + pieces, mine + bytes)
        else:
            self._used.pop(who, None)

    def pieces_of(self, who: K) -> int:
        return self._used.get(who, (0, 0))[0]

    def most(self) -> K:
        """Who has most pieces; there must be somebody."""
        return max(self._used, key=self.pieces_of)


class Turns:
    """Whose request is worked on next: callers in turn, and none whose answers the network has not taken.

    `has_room(caller, bytes, promised, promised_to_all)`: whether an answer of so many bytes can wait on the way to the
    network beside those that are promised to this caller, and to all.
    """

    def __init__(
        self,
        reply_bytes: int,
        has_room: Callable[[str, int, int, int], bool],
        seats_max: int,
        share: int = CALLERS_SHARE,
    ) -> None:
        self._reply_bytes, self._has_room = reply_bytes, has_room
        self._seats = Shares[str](seats_max, share=share)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller, in the order in which it is their turn
        self._promised = Shares[str]()  # answers that are being made, or are made and not yet on their way

    def __repr__(self) -> str:
        return f"Turns(seated={self._seats.pieces}, waiting={sum(map(len, self._waiting.values()))})"

    async def begin(self, caller: str, seconds: float) -> None:
        """Wait for a seat, and room for an answer. Raises RESOURCE_EXHAUSTED after `seconds`."""
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
                if not self._waiting[caller]:
                    del self._waiting[caller]
            if isinstance(error, TimeoutError):
                why = f"answers to {caller!r} wait for the network, or for their turn, for too long: try again later"
                raise UStatusError(UCode.RESOURCE_EXHAUSTED, why) from None
            raise

    @contextlib.asynccontextmanager
    async def turn(self, caller: str, seconds: float) -> AsyncIterator[None]:
        """As `begin`. The answer is on its way, or there is none, when the step of the loop that ends it is done."""
        await self.begin(caller, seconds)
        try:
            yield
        finally:
            self.end(caller)
            asyncio.get_running_loop().call_soon(self.ended, caller)

    def end(self, caller: str) -> None:
        """Give the seat back; the room for the answer stays promised."""
        self._seats.add(caller, -1)
        self.look()

    def ended(self, caller: str) -> None:
        """There is no answer, or it is on its way and counted there."""
        self._promised.add(caller, -1)
        self.look()

    def look(self) -> None:
        """Let those begin who can. To be called, too, whenever there may be more room."""
        for caller, waiting in list(self._waiting.items()):
            while waiting and self._may_begin(caller):
                seat = waiting.popleft()
                if not seat.done():
                    self._seats.add(caller, 1)
                    self._promised.add(caller, 1)
                    seat.set_result(None)
                    break  # the next one has its turn
            if not waiting:
                del self._waiting[caller]
            elif self._seats.pieces_of(caller):
                self._waiting[caller] = self._waiting.pop(caller)  # behind the others

    def _may_begin(self, caller: str) -> bool:
        if self._seats.full(caller) is not None:
            return False
        promised = self._reply_bytes * self._promised.pieces_of(caller)
        return self._has_room(caller, self._reply_bytes, promised, self._reply_bytes * self._promised.pieces)
