"""The order of a channel's items by their ids. Pure: the caller has the clock.

item -> repeat of the last one?    -> done
     -> follows the last one?      -> goes on, and then what has waited for it
     -> else it waits for the item before it -> that comes: goes on
                                             -> too long: goes on behind a gap
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from streamer.grip.items import Item

ITEMS_WAITING_MAX: Final = 100  # items of a channel, as in Pushpin; beyond it the oldest goes on
WAITING_BYTES_MAX: Final = 4 << 20

T = TypeVar("T")
# next: follows the last item; gap: items before it are missing; repeat: it went on before; recovered: it is among what
# was had from elsewhere
TurnKind = Literal["next", "gap", "repeat", "recovered"]


class Turn(NamedTuple, Generic[T]):
    """An item that waits no longer. `tags`: of each offer of it."""

    item: Item
    tags: list[T]
    kind: TurnKind


class LastIds(NamedTuple):
    """Ids of the last items that went on; None: unknown. `unordered`: of items with `no_seq`, which do not count for
    the order of the others."""

    ordered: str | None = None
    unordered: str | None = None

    def after(self, item: Item) -> LastIds:
        return self._replace(unordered=item.id) if item.no_seq else self._replace(ordered=item.id)


@dataclass(eq=False, slots=True)
class _WaitingItem(Generic[T]):
    item: Item
    until: float
    size: int
    tags: list[T] = field(default_factory=list)


class Sequencer(Generic[T]):
    """An item's id is compared with the last id alone: ids may come again later (A, B, A are three items)."""

    def __init__(
        self,
        last: LastIds,
        wait_s: float,
        *,
        waiting_max: int = ITEMS_WAITING_MAX,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        self.last, self._wait_s = last, wait_s
        self._waiting_max, self._waiting_bytes_max = waiting_max, waiting_bytes_max
        self._waiting: dict[_WaitingItem[T], None] = {}  # in the order of arrival
        self._bytes = 0  # of those

    def __repr__(self) -> str:
        return f"Sequencer({self.last}, waiting={len(self._waiting)})"

    def __len__(self) -> int:
        """Returns the number of items that wait."""
        return len(self._waiting)

    @property
    def due(self) -> float | None:
        """The time at which `expire` has something to return; None: nothing waits."""
        return min((one.until for one in self._waiting), default=None)

    def offer(self, item: Item, tag: T, now: float) -> list[Turn[T]]:
        """Returns what goes on now, in order; nothing if the item waits."""
        kind = self._kind_of(item)
        if kind != "gap":
            return self._go(item, [tag], kind)
        for one in self._waiting:
            if one.item == item and item.id is not None:  # the same request once more
                one.tags.append(tag)
                return []
        waiting = _WaitingItem(item, now + self._wait_s, item.size, [tag])
        self._waiting[waiting] = None
        self._bytes += waiting.size
        self._let_go_beyond_limits(now)
        return []

    def repeated(self, items: Sequence[Item]) -> int:
        """Returns how many of the first of `items`, which came together, went on before: each names the one before it,
        and one of them is the last."""
        if not items or self._kind_of(items[0]) != "gap":
            return 0
        last = self.last.ordered
        chain = [items[0]]
        for item in items[1:]:
            if item.no_seq or item.prev_id is None or item.prev_id != chain[-1].id:
                break
            chain.append(item)
        return next((index + 1 for index in reversed(range(len(chain))) if chain[index].id == last), 0)

    def expire(self, now: float) -> list[Turn[T]]:
        """Returns the first item whose wait is over, and what has waited for it; call again until there is none."""
        for one in self._waiting:
            if one.until <= now:
                self._remove(one)
                return self._go(one.item, one.tags, self._kind_of(one.item))
        return []

    def overdue(self, now: float) -> Item | None:
        """Returns the first item of the next `expire`, which goes on behind a gap."""
        return next((one.item for one in self._waiting if one.until <= now), None)

    def recover(self, last_id: str, now: float) -> list[Turn[T]]:
        """The items up to `last_id` were had from elsewhere. Returns what follows them. Of the others, the first item
        whose wait is over is among them."""
        first = next((one for one in self._waiting if one.until <= now), None)
        self.last = self.last._replace(ordered=last_id)
        turns = self._followers()
        if first in self._waiting:
            self._remove(first)
            turns.append(Turn(first.item, first.tags, "recovered"))
        return turns

    def abandon(self) -> list[T]:
        """Returns the tags of all that wait, and forgets them."""
        tags = [tag for one in self._waiting for tag in one.tags]
        self._waiting.clear()
        self._bytes = 0
        return tags

    def _kind_of(self, item: Item) -> TurnKind:
        last = self.last.unordered if item.no_seq else self.last.ordered
        if item.id is not None and item.id == last:
            return "repeat"
        follows = item.no_seq or item.prev_id is None or last is None or item.prev_id == last
        return "next" if follows else "gap"

    def _go(self, item: Item, tags: list[T], kind: TurnKind) -> list[Turn[T]]:
        turn = Turn(item, tags, kind)
        if kind == "repeat":
            return [turn]
        self.last = self.last.after(item)
        return [turn] if item.no_seq else [turn, *self._followers()]

    def _followers(self) -> list[Turn[T]]:
        """Returns the items that have waited for the last one, and for those in turn."""
        turns: list[Turn[T]] = []
        while (one := next((one for one in self._waiting if self._kind_of(one.item) == "next"), None)) is not None:
            self._remove(one)
            self.last = self.last.after(one.item)
            turns.append(Turn(one.item, one.tags, "next"))
        return turns

    def _remove(self, one: _WaitingItem[T]) -> None:
        del self._waiting[one]
        self._bytes -= one.size

    def _let_go_beyond_limits(self, now: float) -> None:
        """Ends the wait of the oldest items beyond the limits."""
        count, size = len(self._waiting), self._bytes
        for one in self._waiting:
            if count <= self._waiting_max and size <= self._waiting_bytes_max:
                break
            one.until = min(one.until, now)
            count, size = count - 1, size - one.size
