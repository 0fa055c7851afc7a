"""The owners of consumers' names: only the caller that used a name first may move its cursor.

poll with a consumer -> require: own name | free -> bind (quota) | of another owner: PERMISSION_DENIED
                                 '-- in use by another holder until its lease ends: ABORTED
lease over for a long time -> the name is free again      operator -> release
A holder that leaves makes room for the next one at once; the cursor goes on holding retention for its lease.

Owners are rows beside the cursors, in the log that survives a restart: `owner:AUTHORITY/UE_TYPE/NAME`, and the holder
behind it in a line of its own. They do not hold retention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from history.records.limits import checked_holder
from uprotocol.communication.shares import CALLERS_SHARE, Shares
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

if TYPE_CHECKING:
    from history.log.log import Log

CONSUMERS_MAX: Final = 1_000  # names in all; peers of the streamer have further cursors
OWNERS_SHARE: Final = 2  # one uEntity has at most half of its authority's names, so that others on the host get some
CONSUMER_LENGTH_MAX: Final = 200  # characters
LEAVES_MS: Final = 1  # a lease this short ends the holder's use at once
BOUND_MS: Final = 7 * 24 * 3_600_000  # how long a name keeps its owner after its last use: the longest lease
TOUCH_MS: Final = 3_600_000  # precision of the last use; it is not written with each poll

CURSOR_PREFIX: Final = "consumer:"
OWNER_PREFIX: Final = "owner:"


def cursor_name(consumer: str) -> str:
    return CURSOR_PREFIX + consumer


@dataclass(frozen=True, slots=True)
class Owner:
    """A uEntity of a host. Its instances count as one, because each run of a program may have another instance."""

    authority: str
    ue_type: int

    def __str__(self) -> str:
        return f"//{self.authority}/{self.ue_type:X}"

    @classmethod
    def of(cls, caller: UUri) -> Owner:
        return cls(caller.authority_name, caller.ue_id & 0xFFFF)


class Owned(NamedTuple):
    """A consumer's name, its owner, and who of that owner has used it last; "": anybody."""

    consumer: str
    owner: Owner
    holder: str = ""

    @property
    def row_name(self) -> str:
        name = f"{OWNER_PREFIX}{self.owner.authority}/{self.owner.ue_type:X}/{self.consumer}"
        return f"{name}\n{self.holder}" if self.holder else name


class NameUse(NamedTuple):
    """Who uses a consumer's name until then, in Unix milliseconds."""

    holder: str
    until_ms: int


def owner_of(row_name: str) -> Owned | None:
    """Returns what the row says; None if it is not an owner's."""
    authority, _, rest = row_name.removeprefix(OWNER_PREFIX).partition("/")
    ue_type, _, rest = rest.partition("/")
    consumer, _, holder = rest.partition("\n")
    if not row_name.startswith(OWNER_PREFIX) or not authority or not consumer:
        return None
    try:
        return Owned(consumer, Owner(authority, int(ue_type, 16)), holder)
    except ValueError:  # a damaged row
        return None


class Consumers:
    """The names in use in `logs`. Their owners are stored in the first durable log."""

    def __init__(self, logs: Sequence[Log], now_ms: Callable[[], int], *, share: int = CALLERS_SHARE) -> None:
        self._logs, self._now_ms = logs, now_ms
        self._home = next((log for log in logs if log.durable), logs[0]) if logs else None
        self._owners: dict[str, Owner] = {}
        self._used_ms: dict[str, int] = {}
        self._uses: dict[str, NameUse] = {}  # the last one of each name that has a holder
        self._by_authority = Shares[str](CONSUMERS_MAX, share=share)
        self._by_owner = Shares[Owner](self._by_authority.each_pieces_max, share=OWNERS_SHARE)

    def __len__(self) -> int:
        return len(self._owners)

    def load(self) -> None:
        for log in self._logs:
            for row, cursor in log.cursors.all().items():
                found = owner_of(row)
                if found is not None and found.consumer not in self._owners:
                    self._know(found.consumer, found.owner, cursor.absent_ms)
                    if found.holder:
                        self._uses[found.consumer] = NameUse(found.holder, self._lease_until_ms(found.consumer))

    def require(self, consumer: str, owner: Owner, holder: str = "") -> None:
        """Check that `owner` may use the name, and `holder`, unless it is empty. Raises PERMISSION_DENIED if another
        uEntity owns it, ABORTED while another holder uses it, INVALID_ARGUMENT if it is invalid."""
        if len(consumer) > CONSUMER_LENGTH_MAX or not consumer.isprintable():
            what = f"expected a consumer's name of at most {CONSUMER_LENGTH_MAX} printable characters"
            raise invalid(f"{what}, got {consumer[:50]!r}")
        if self._owners.get(consumer, owner) != owner and not self._is_over(consumer):
            what = f"the consumer {consumer!r} belongs to another uEntity: choose another name"
            raise UStatusError(UCode.PERMISSION_DENIED, what)
        held = self._uses.get(consumer) if checked_holder(holder) else None
        left_ms = 0 if held is None or held.holder == holder else held.until_ms - self._now_ms()
        if held is not None and left_ms > 0:
            what = f"the consumer {consumer!r} is in use by {held.holder!r} ({self._owners[consumer]})"
            what += f" until its lease ends in {math.ceil(left_ms / 1000)} s: a second reader needs a name of its own"
            raise UStatusError(UCode.ABORTED, what)

    def hold(
        self, consumer: str, owner: Owner, log: Log, seq: int, lease_ms: int, holder: str = "", *, leaves: bool = False
    ) -> None:
        """Set the cursor; a free name is bound to `owner`, and used by `holder` until the lease ends, or no more if it
        `leaves`. Raises the errors of `require`, and RESOURCE_EXHAUSTED."""
        self.require(consumer, owner, holder)
        if self._owners.get(consumer) != owner:
            self._bind(consumer, owner)
        elif self._now_ms() - self._used_ms[consumer] >= TOUCH_MS:
            self._save(consumer, owner)
        log.cursors.set(cursor_name(consumer), min(max(seq, log.floor_seq), log.newest_seq), lease_ms=lease_ms)
        if holder:
            is_over = leaves or lease_ms <= LEAVES_MS
            self._use(consumer, owner, NameUse(holder, 0 if is_over else self._now_ms() + lease_ms))

    def release(self, consumer: str) -> Owner:
        """Free the name: the next caller that uses it owns it, and continues at its cursor. Returns the old owner.
        Raises NOT_FOUND."""
        if consumer not in self._owners:
            raise UStatusError(UCode.NOT_FOUND, f"no uEntity owns a consumer named {consumer!r}")
        owner = self._owners[consumer]
        self._forget(consumer)
        return owner

    def _bind(self, consumer: str, owner: Owner) -> None:
        if consumer in self._owners:  # unused for too long
            self._forget(consumer)
        names, of_owner = self._by_authority, self._by_owner
        if of_owner.pieces_of(owner) >= of_owner.each_pieces_max:
            self._evict(lambda other: other == owner, f"{of_owner.each_pieces_max} consumers of {owner}")
        if names.pieces_of(owner.authority) >= names.each_pieces_max:
            which = f"{names.each_pieces_max} consumers of authority {owner.authority!r}"
            self._evict(lambda other: other.authority == owner.authority, which)
        if names.pieces >= names.pieces_max:
            most = names.most()
            self._evict(lambda other: other.authority == most, f"{names.pieces_max} consumers")
        self._know(consumer, owner, self._now_ms())
        self._save(consumer, owner)

    def _evict(self, among: Callable[[Owner], bool], which: str) -> None:
        """Free the name of one of these owners that has no lease and was unused longest. Raises
        RESOURCE_EXHAUSTED."""
        idle = [name for name, owner in self._owners.items() if among(owner) and not self._is_leased(name)]
        if not idle:
            what = f"{which} have a cursor, which is the limit: wait for a lease to end"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        self._forget(min(idle, key=lambda name: self._used_ms[name]))

    def _use(self, consumer: str, owner: Owner, use: NameUse) -> None:
        before = self._row(consumer, owner)
        self._uses[consumer] = use
        if self._row(consumer, owner) != before:
            for log in self._logs:
                log.cursors.drop(before)
            self._save(consumer, owner)

    def _lease_until_ms(self, consumer: str) -> int:
        """Returns when its lease ends, in Unix milliseconds; 0: it has none."""
        rows = (log.cursors.get(cursor_name(consumer)) for log in self._logs)
        return max((row.lease_until_ms or 0 for row in rows if row is not None), default=0)

    def _is_leased(self, consumer: str) -> bool:
        return self._lease_until_ms(consumer) >= self._now_ms()

    def _is_over(self, consumer: str) -> bool:
        return self._now_ms() - self._used_ms[consumer] > BOUND_MS + TOUCH_MS and not self._is_leased(consumer)

    def _know(self, consumer: str, owner: Owner, used_ms: int) -> None:
        self._owners[consumer], self._used_ms[consumer] = owner, used_ms
        self._by_authority.add(owner.authority, 1)
        self._by_owner.add(owner, 1)

    def _row(self, consumer: str, owner: Owner) -> str:
        held = self._uses.get(consumer)
        return Owned(consumer, owner, held.holder if held is not None and held.until_ms else "").row_name

    def _save(self, consumer: str, owner: Owner) -> None:
        assert self._home is not None, "there is a log: it has a cursor"
        self._used_ms[consumer] = self._now_ms()
        self._home.cursors.set(self._row(consumer, owner), 0, absent_ms=self._used_ms[consumer])

    def _forget(self, consumer: str) -> None:
        owner = self._owners.pop(consumer)
        del self._used_ms[consumer]
        self._by_authority.add(owner.authority, -1)
        self._by_owner.add(owner, -1)
        for log in self._logs:
            log.cursors.drop(self._row(consumer, owner))
        self._uses.pop(consumer, None)


def owners(rows: Iterable[str]) -> dict[str, Owner]:
    """Returns the owners by consumer, from these names of rows."""
    return {one.consumer: one.owner for one in map(owner_of, rows) if one is not None}
