"""Filters of a session -> the Zenoh subscriptions that bring their messages: pure.

the first filters -> a subscription each: only wanted messages cross the network
more              -> one that covers them, as narrow as the limit allows: a uEntity's     up/A/10AB/0/3/*/{}/{}/{}/{}/{}
                                                                          an authority's  up/A/*/*/*/*/{}/{}/{}/{}/{}
                                                                          all publishes   up/*/*/*/*/*/{}/{}/{}/{}/{}
the last filter of a subscription ends -> it ends, too. It never ends earlier: messages on their way through it may be
                                          lost in Zenoh although another one covers them (seen in one of 50 changes)

Zenoh goes through all subscriptions of a session to declare one more (10,000 take 9 s of CPU, so 100,000 take some 15
minutes), and also for each message whose key has no number yet, as below a cover: some 50 ns each. So they are limited.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SOURCE: Final = range(1, 6)  # of a key's eleven segments: authority, type, instance, version, resource
SINK: Final = range(6, 11)
NO_VALUE: Final = "{}"  # each segment of an absent sink
ANY: Final = "*"
# segments that become wildcards, narrowest first: for publishes, and for messages with a sink
OF_PUBLISHES: Final = ({5}, {2, 3, 4, 5}, {*SOURCE}, {*SOURCE})
OF_OTHERS: Final = ({5, 10}, {2, 3, 4, 5, 7, 8, 9, 10}, {*SOURCE, 7, 8, 9, 10}, {*SOURCE, *SINK})
WIDTHS: Final = range(len(OF_PUBLISHES))
# of each width, for publishes and others separately; one of the widest. Zenoh calls us once for each that matches
COVERS_MAX: Final = 4


def widened(key: str, width: int) -> str:
    """The key expression of that width that covers `key`; `key` itself if it is as wide."""
    segments = key.split("/")
    for at in (OF_PUBLISHES if _is_publish(key) else OF_OTHERS)[width]:
        segments[at] = ANY
    return "/".join(segments)


class Covers:
    """The filters of a session, by key expression, and the subscriptions to declare for them."""

    def __init__(self, subscriptions_max: int) -> None:
        """`subscriptions_max`: filters with a subscription of their own."""
        self._max = subscriptions_max
        self._keys: set[str] = set()
        self.subscriptions: dict[str, int] = {}  # key expression -> its number of filters
        self._wide: tuple[set[str], ...] = tuple(set() for _ in WIDTHS)  # wide subscriptions, by width

    def __repr__(self) -> str:
        wide = [len(covers) for covers in self._wide]
        return f"Covers(filters={len(self._keys)}, subscriptions={len(self.subscriptions)}, wide={wide})"

    @property
    def are_wide(self) -> bool:
        """True while a message may come that matches no filter."""
        return any(self._wide)

    def add(self, keys: Iterable[str]) -> bool:
        """True if `subscriptions` has grown. A key that is known already changes nothing."""
        before = len(self.subscriptions)
        for key in keys:
            if key not in self._keys:
                self._keys.add(key)
                owner = self._owner(key) or self._new(key)
                self.subscriptions[owner] = self.subscriptions.get(owner, 0) + 1
        return len(self.subscriptions) > before

    def remove(self, keys: Iterable[str]) -> bool:
        """True if `subscriptions` has shrunk. An unknown key changes nothing."""
        before = len(self.subscriptions)
        for key in keys:
            if key in self._keys:
                self._keys.discard(key)
                owner = self._owner(key)
                assert owner is not None, "each filter has a subscription"
                self.subscriptions[owner] -= 1
                if not self.subscriptions[owner]:
                    del self.subscriptions[owner]
                    for covers in self._wide:
                        covers.discard(owner)
        return len(self.subscriptions) < before

    def _owner(self, key: str) -> str | None:
        """The narrowest subscription that covers `key`. It stays the same while the filter exists: a new one is made
        only for a key that none covers, and each stays as long as it has filters."""
        if key in self.subscriptions:
            return key
        wider = (widened(key, width) for width in WIDTHS if self._wide[width])
        return next((one for one in wider if one in self.subscriptions), None)

    def _new(self, key: str) -> str:
        if len(self.subscriptions) - sum(map(len, self._wide)) < self._max:
            return key
        same = _is_publish(key)
        for width in WIDTHS[:-1]:
            if sum(_is_publish(cover) == same for cover in self._wide[width]) < COVERS_MAX:
                break
        else:
            width = WIDTHS[-1]
        cover = widened(key, width)
        self._wide[width].add(cover)
        return cover


def _is_publish(key: str) -> bool:
    return key.endswith(NO_VALUE)
