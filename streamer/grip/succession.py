"""What a held stream writes next, and when its link must be asked. Pure: without clock and I/O.

items of its channels -> hear -> wait -> next: those that follow the last id, to be written
                                  '-> a gap: must_ask -> answer of the link -> answered: goes on behind it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from streamer.grip.headers import HeldChannel
from streamer.grip.items import Item

WAITING_ITEMS_MAX: Final = 1_000  # of a stream whose client is slow, or whose link is away
WAITING_BYTES_MAX: Final = 4 << 20  # streams share the items themselves


class Succession:
    """The order of one stream. Ids are hashes of contents, maybe, and repeat: A, B, A. They are compared with the
    channel's last id alone. `at`, `sent`: numbers of one count, which say what was first.

    - An item of the last id is what the client has as the newest: skipped. One that names another predecessor than the
      last id proves a gap: the link is asked. One without a predecessor is written as it comes.
    - A backend has an item before it publishes it, so an answer contains what was heard before its request was sent:
      dropped. A request that another stream has sent earlier does not contain what came since: kept.
    - What was heard since then may or may not be contained. The stream goes on at the first item that follows the
      answer's id, or behind the item of that id, whichever is first; items before it precede that id. In A, B, A
      behind an answer A, that may write B and A again, and loses nothing. If none fits, the link is asked again.
    - Too many items: all are dropped, and an answer counts as complete only if its request was sent after that.
    """

    def __init__(
        self,
        channels: Iterable[HeldChannel] = (),
        items_max: int = WAITING_ITEMS_MAX,
        bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        self._last = dict(channels)  # name -> id of the last item; None: the backend keeps no order
        self._items_max, self._bytes_max = items_max, bytes_max
        self._waiting: deque[tuple[int, Item]] = deque()
        self._bytes = 0
        self._dropped_at = -1
        self.must_ask = False
        self.is_broken = False  # items were dropped that no link can return

    @property
    def last_ids(self) -> dict[str, str]:
        """The id of the last item of each channel whose backend keeps an order."""
        return {name: id for name, id in self._last.items() if id is not None}

    def hear(self, item: Item, at: int) -> None:
        self._waiting.append((at, item))
        self._bytes += item.size
        if len(self._waiting) > self._items_max or (self._bytes > self._bytes_max and len(self._waiting) > 1):
            self.is_broken |= any(self._last.get(one.channel) is None for _, one in self._waiting)
            self._waiting.clear()
            self._bytes, self._dropped_at, self.must_ask = 0, at, True

    def next(self) -> Item | None:
        """Returns the item to be written now. None: nothing waits, or the link must be asked."""
        while self._waiting and not self.must_ask:
            _, item = self._waiting[0]
            last = self._last.get(item.channel)
            if last is not None and item.id != last and item.prev_id not in (None, last):
                self.must_ask = True
                break
            self._waiting.popleft()
            self._bytes -= item.size
            if item.channel not in self._last or (last is not None and item.id == last):
                continue
            if last is not None and item.id is not None:
                self._last[item.channel] = item.id
            return item
        return None

    def turned(self, channels: Iterable[HeldChannel]) -> None:
        """A page of an answer was written, which is not the last one."""
        self.must_ask = True
        self._last.update((name, id) for name, id in channels if self._last.get(name) is not None and id is not None)

    def answered(self, channels: Iterable[HeldChannel], sent: int) -> None:
        """An answer was written that holds on with `channels`; its request was sent at `sent`."""
        self._last = dict(channels)
        self.must_ask = sent < self._dropped_at
        left = [
            (at, item)
            for at, item in self._waiting
            if item.channel in self._last and (at > sent or self._last[item.channel] is None)
        ]
        begins: dict[str, int] = {}  # channel -> place of the first item that fits
        for place, (_, item) in enumerate(left):
            if self._last[item.channel] in (item.id, item.prev_id):
                begins.setdefault(item.channel, place)
        self._waiting = deque(one for place, one in enumerate(left) if place >= begins.get(one[1].channel, 0))
        self._bytes = sum(item.size for _, item in self._waiting)
