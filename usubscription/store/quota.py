"""How much of a limit one client, and one authority, may use. Pure.

refusal(who, more) -> None, or which limit is reached         add(who, more), later add(who, -more)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from uprotocol import uri as uris
from uprotocol.communication.shares import CALLERS_SHARE, Shares

# another authority has an eighth with all its uEntities, whose ids it can invent
AUTHORITIES_SHARE: Final = 8
# one client of it has half of that; its uSubscription service makes requests for all of them, so it has all of that
CLIENTS_SHARE: Final = 2
SERVICE: Final = 0  # ue_id of core.usubscription
UNIT_BYTES: Final = 512  # every 512 bytes of details, or of a waiting request, count as one more

UEntity = tuple[str, int]
"""Authority and ue_id; the version does not matter."""


class Quota:
    """Counts `what` by uEntity and by authority, in units. The `own` authorities together leave a quarter to others;
    one of their uEntities has at most a quarter."""

    def __init__(self, what: str, whole: int, own: Collection[str]) -> None:
        self._what, self._own, self.whole = what, own, whole
        self._clients = Shares[UEntity](whole, share=CALLERS_SHARE)
        self._authorities = Shares[str](whole, share=AUTHORITIES_SHARE)
        self.own_max = whole - whole // CALLERS_SHARE
        self.used = 0

    def __repr__(self) -> str:
        return f"Quota({self._what}, {self.used} of {self.whole}, {len(self._clients.used)} clients)"

    @property
    def caller_max(self) -> int:
        return self._clients.each_pieces_max

    @property
    def authority_max(self) -> int:
        return self._authorities.each_pieces_max

    def refusal(self, who: UEntity, more: int = 1) -> str | None:
        """None if `more` units fit; else the reason, for the caller."""
        authority, what = who[0], self._what
        if self.used + more > self.whole:
            return f"{self.used} {what} are there, which is the limit"
        is_own, authority_max = uris.is_one_of(authority, self._own), self._authorities.each_pieces_max
        limit, has = self.own_max if is_own else authority_max, self._authorities.pieces_of(authority)
        if has + more > limit:
            return f"the uEntities of {authority} have {has} {what}, and may have {limit}"
        is_whole = is_own or who[1] == SERVICE
        limit = self._clients.each_pieces_max if is_whole else max(1, authority_max // CLIENTS_SHARE)
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
