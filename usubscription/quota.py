"""How much of something one caller, and one authority, may have of what there is for all. Pure.

room(who, more) -> None, or whose share is full
add(who, more) -> counted     begin(), rollback(): what was not stored does not count
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final, TypeVar

from uprotocol import uri as uris

# a caller (authority and uEntity) has at most a quarter: three others must find room beside it
CALLERS_SHARE: Final = 4
# another authority has an eighth with all its uEntities, whose ids it makes up as it likes
AUTHORITIES_SHARE: Final = 8
# ... of which one client has a half; its service asks for all of them, so that has no less than its authority
CLIENTS_SHARE: Final = 2
SERVICE: Final = 0  # ue_id of core.usubscription
UNIT_BYTES: Final = 512  # of what somebody sends to be kept count as one more

K = TypeVar("K")
Caller = tuple[str, int]
"""Authority and ue_id: a version is no other caller."""


class Quota:
    """Counts `what` by caller and authority. The `own` authorities together leave the last share of a caller to the
    others."""

    def __init__(self, what: str, whole: int, own: Collection[str]) -> None:
        self._what, self._own, self.whole = what, own, whole
        self.caller_max = max(1, whole // CALLERS_SHARE)
        self.authority_max = max(1, whole // AUTHORITIES_SHARE)
        self.own_max = whole - whole // CALLERS_SHARE
        self.used = 0
        self._callers: Counter[Caller] = Counter()
        self._authorities: Counter[str] = Counter()
        self._batch: list[tuple[Caller, int]] | None = None

    def __repr__(self) -> str:
        return f"Quota({self._what}, {self.used} of {self.whole}, {len(self._callers)} callers)"

    def room(self, who: Caller, more: int = 1) -> str | None:
        """None if there is room for `more`; else why not, in words for the caller."""
        authority = who[0]
        if self.used + more > self.whole:
            return f"{self.used} {self._what} are there, which is the limit"
        is_own = uris.is_one_of(authority, self._own)
        its_max, has = self.own_max if is_own else self.authority_max, self._authorities[authority]
        if has + more > its_max:
            return f"the uEntities of {authority} have {has} {self._what}, and may have {its_max}"
        one_max = self.caller_max if is_own or who[1] == SERVICE else max(1, self.authority_max // CLIENTS_SHARE)
        if (has := self._callers[who]) + more > one_max:
            return f"uEntity {who[1]:X} of {authority} has {has} {self._what}, and may have {one_max}"
        return None

    def add(self, who: Caller, more: int) -> None:
        """`more` below zero: they are gone."""
        if more:
            self._count(who, more)
            if self._batch is not None:
                self._batch.append((who, more))

    def begin(self) -> None:
        """What is added from here on may be taken back."""
        self._batch = []

    def rollback(self) -> None:
        """Nothing that was added since `begin` counts."""
        batch, self._batch = self._batch or (), None
        for who, more in batch:
            self._count(who, -more)

    def clear(self) -> None:
        """Everything is gone."""
        for who, has in list(self._callers.items()):
            self.add(who, -has)

    def _count(self, who: Caller, more: int) -> None:
        self.used += more
        _count(self._callers, who, more)
        _count(self._authorities, who[0], more)


def _count(counts: Counter[K], key: K, more: int) -> None:
    counts[key] += more
    if not counts[key]:
        del counts[key]


def caller(key: tuple[str, int, int, int]) -> Caller:
    return key[0], key[1]


def weight(bytes: int) -> int:
    """What something counts that takes `bytes` beside its addresses."""
    return 1 + bytes // UNIT_BYTES
