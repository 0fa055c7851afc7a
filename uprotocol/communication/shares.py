"""Capacity that many owners share: a limit for all together, and a smaller one for each, in pieces and in bytes.

Shares      full(who, bytes) -> None, or the limit that is reached       add(who, 1, bytes), later add(who, -1, -bytes)
FairQueue   add(owner, item, size) -> is_over? -> drop: the oldest item of the largest owner     take: owners in turn
Turns       turn(who): wait -- a seat is free, who has one left, capacity for one more answer --> work
            the capacity is free again <- ended <- the answer is queued, or there is none <- the seat is free <-'
Quota       refusal(uEntity) -> None, or the reason: limits for each authority, and for each of its uEntities

So an owner that sends without end fills only its own share.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Hashable
from typing import Final, Generic, NamedTuple, TypeVar

from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

CALLERS_SHARE: Final = 4  # one caller has at most a quarter of each limit: three others must be able to work beside it
# another authority has an eighth with all its uEntities, whose ids it can invent
AUTHORITIES_SHARE: Final = 8
# one client of it has half of that; its uSubscription service makes requests for all of them, so it has all of that
CLIENTS_SHARE: Final = 2
USUBSCRIPTION: Final = 0  # ue_id of core.usubscription
UNIT_BYTES: Final = 512  # every 512 bytes of details, or of a waiting request, count as one more
UNLIMITED: Final = 1 << 62
STALE_MAX: Final = 1_024  # outdated entries of the heap of a FairQueue, beside two for each owner

UEntity = tuple[str, int]
"""Authority and ue_id; the version does not matter."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Full(NamedTuple):
    """The limit that is reached."""

    limit: int
    is_of_bytes: bool  # else of pieces
    is_of_one: bool  # of each owner; else of all together


class Shares(Generic[K]):
    """How much of a common capacity each owner uses. If there is no piece yet, one piece of any size fits."""

    def __init__(self, pieces_max: int = UNLIMITED, bytes_max: int = UNLIMITED, share: int = CALLERS_SHARE) -> None:
        """An owner may use 1/`share` of each limit, and at least one piece."""
        self.bytes_max, self._share = bytes_max, share
        self.each_bytes_max = bytes_max // share
        self.limit(pieces_max)
        self.pieces = self.bytes = 0
        self.used: dict[K, tuple[int, int]] = {}  # pieces and bytes by owner, without owners that have none

    def limit(self, pieces_max: int) -> None:
        """Change the limit of pieces; what is used stays."""
        self.pieces_max, self.each_pieces_max = pieces_max, max(1, pieces_max // self._share)

    def __repr__(self) -> str:
        return f"Shares({self.pieces} pieces of {self.bytes} bytes, {len(self.used)} owners)"

    def full(self, who: K, bytes: int = 0, promised: int = 0, promised_to_all: int = 0) -> Full | None:
        """None if one more piece of `bytes` fits beside what is used, and beside the bytes that are promised to `who`
        and to all."""
        pieces, own_bytes = self.used.get(who, (0, 0))
        if self.pieces >= self.pieces_max:
            return Full(self.pieces_max, is_of_bytes=False, is_of_one=False)
        if (self.pieces or promised_to_all) and self.bytes + promised_to_all + bytes > self.bytes_max:
            return Full(self.bytes_max, is_of_bytes=True, is_of_one=False)
        if pieces >= self.each_pieces_max:
            return Full(self.each_pieces_max, is_of_bytes=False, is_of_one=True)
        if (pieces or promised) and own_bytes + promised + bytes > self.each_bytes_max:
            return Full(self.each_bytes_max, is_of_bytes=True, is_of_one=True)
        return None

    def add(self, who: K, pieces: int, bytes: int = 0) -> None:
        """Count what `who` uses more; negative numbers: less."""
        own_pieces, own_bytes = self.used.get(who, (0, 0))
        self.pieces += pieces
        self.bytes += bytes
        if own_pieces + pieces:
            self.used[who] = (own_pieces + pieces, own_bytes + bytes)
        else:
            self.used.pop(who, None)

    def pieces_of(self, who: K) -> int:
        return self.used.get(who, (0, 0))[0]

    def most(self) -> K:
        """Returns the owner with the most pieces; there must be one."""
        return max(self.used, key=self.pieces_of)


class FairQueue(Generic[T]):
    """Items of many owners, bounded in number and in bytes: while `is_over`, the caller has to `drop` items.

    One owner alone may use the whole capacity; if it sends too much, only its own items are dropped.
    """

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self.used = Shares[str](count_max, bytes_max, share=1)
        self._items: OrderedDict[str, deque[tuple[T, int]]] = OrderedDict()  # by owner, in the order of their turns
        # a heap with at least one entry for each owner that is not less than its weight
        self._heaviest: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return self.used.pieces

    @property
    def is_over(self) -> bool:
        return self.used.pieces > self.used.pieces_max or self.used.bytes > self.used.bytes_max

    def add(self, owner: str, item: T, size: int) -> None:
        self._items.setdefault(owner, deque()).append((item, size))
        self.used.add(owner, 1, size)
        heapq.heappush(self._heaviest, (-self._weight(owner), owner))
        if len(self._heaviest) > 2 * len(self._items) + STALE_MAX:
            self._heaviest = [(-self._weight(name), name) for name in self._items]
            heapq.heapify(self._heaviest)

    def drop(self) -> T:
        """Remove and return the oldest item of the owner that uses the largest part of a limit."""
        while True:
            weight, owner = self._heaviest[0]
            if owner not in self._items:
                heapq.heappop(self._heaviest)
            elif -self._weight(owner) == weight:
                return self._pop(owner)[0]
            else:
                heapq.heapreplace(self._heaviest, (-self._weight(owner), owner))

    def take(self) -> tuple[T, int]:
        """Remove and return the oldest item of the next owner, and its size."""
        owner = next(iter(self._items))
        self._items.move_to_end(owner)
        return self._pop(owner)

    def _pop(self, owner: str) -> tuple[T, int]:
        item, size = self._items[owner].popleft()
        self.used.add(owner, -1, -size)
        if not self._items[owner]:
            del self._items[owner]
        return item, size

    def _weight(self, owner: str) -> float:
        count, bytes = self.used.used[owner]
        return max(bytes / self.used.bytes_max, count / self.used.pieces_max)


class Turns:
    """Which request is handled next: callers take turns, and a caller waits while the network does not accept its
    answers.

    `full(caller, bytes, promised, promised_to_all)`: as Shares.full, of the queue of answers.
    """

    def __init__(
        self,
        reply_bytes: int,
        full: Callable[[str, int, int, int], Full | None],
        seats_max: int,
        share: int = CALLERS_SHARE,
    ) -> None:
        self._reply_bytes, self._full = reply_bytes, full
        self._seats = Shares[str](seats_max, share=share)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller, in the order of their turns
        self._promised = Shares[str]()  # answers that are not queued yet

    def __repr__(self) -> str:
        return f"Turns(seated={self._seats.pieces}, waiting={sum(map(len, self._waiting.values()))})"

    @contextlib.asynccontextmanager
    async def turn(self, caller: str, seconds: float) -> AsyncIterator[None]:
        """Wait for a seat, and capacity for an answer. Raises RESOURCE_EXHAUSTED after `seconds`. If there is an
        answer, queue it in the same turn of the event loop in which the context ends."""
        seat: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(seat)
        self.look()
        begun = False
        try:
            async with asyncio.timeout(seconds):
                await seat
            begun = True
            yield
        except TimeoutError:
            if begun:
                raise  # of the work
            why = f"requests of {caller!r} waited too long for their turn, or for the network: try again later"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, why) from None
        finally:
            if seat.done() and not seat.cancelled():
                self._free(self._seats, caller)
                asyncio.get_running_loop().call_soon(self._free, self._promised, caller)
            elif seat in self._waiting.get(caller, ()):
                self._waiting[caller].remove(seat)
                if not self._waiting[caller]:
                    del self._waiting[caller]

    def _free(self, shares: Shares[str], caller: str) -> None:
        """Free the seat, or the capacity that is promised to the answer: it is queued now, or there is none."""
        shares.add(caller, -1)
        self.look()

    def look(self) -> None:
        """Start the requests that can begin. To be called also when capacity may have become free."""
        reply_bytes, promised = self._reply_bytes, self._promised
        for caller, waiting in list(self._waiting.items()):
            while waiting and self._seats.full(caller) is None:
                of_caller, of_all = reply_bytes * promised.pieces_of(caller), reply_bytes * promised.pieces
                if self._full(caller, reply_bytes, of_caller, of_all) is not None:
                    break
                seat = waiting.popleft()
                if not seat.done():
                    self._seats.add(caller, 1)
                    promised.add(caller, 1)
                    seat.set_result(None)
                    break  # then the next caller has its turn
            if not waiting:
                del self._waiting[caller]
            elif self._seats.pieces_of(caller):
                self._waiting[caller] = self._waiting.pop(caller)  # behind the others


class Quota:
    """Counts `what` by uEntity and by authority, in units. The `own` authorities together leave a quarter to others;
    one of their uEntities has at most a quarter."""

    def __init__(self, what: str, whole: int, own: Collection[str]) -> None:
        self._what, self._own, self.whole = what, own, whole
        self._clients = Shares[UEntity](whole, share=CALLERS_SHARE)
        self._authorities = Shares[str](whole, share=AUTHORITIES_SHARE)
        self.own_max, self.caller_max = whole - whole // CALLERS_SHARE, self._clients.each_pieces_max
        self.authority_max = self._authorities.each_pieces_max
        self.used = 0

    def refusal(self, who: UEntity, more: int = 1) -> str | None:
        """None if `more` units fit; else the reason, for the caller."""
        authority, what = who[0], self._what
        if self.used + more > self.whole:
            return f"{self.used} {what} are there, which is the limit"
        is_own = uris.is_one_of(authority, self._own)
        limit, has = self.own_max if is_own else self.authority_max, self._authorities.pieces_of(authority)
        if has + more > limit:
            return f"the uEntities of {authority} have {has} {what}, and may have {limit}"
        is_whole = is_own or who[1] == USUBSCRIPTION
        limit = self.caller_max if is_whole else max(1, self.authority_max // CLIENTS_SHARE)
        if (has := self._clients.pieces_of(who)) + more > limit:
            return f"uEntity {who[1]:X} of {authority} has {has} {what}, and may have {limit}"
        return None

    def add(self, who: UEntity, more: int) -> None:
        """Count `more` units of `who`; negative: less."""
        if more:
            self.used += more
            self._clients.add(who, more)
            self._authorities.add(who[0], more)

    def all(self) -> list[tuple[UEntity, int]]:
        """The units by uEntity."""
        return [(who, has) for who, (has, _) in self._clients.used.items()]


def weight(bytes: int) -> int:
    """The units of something with `bytes` of details beside its addresses."""
    return 1 + bytes // UNIT_BYTES
