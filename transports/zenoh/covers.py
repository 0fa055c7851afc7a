"""Which subscriptions of Zenoh bring what the filters of a session want: pure.

the first filters -> a subscription each: only what is wanted crosses the network
beyond            -> one that covers them, as narrow as there is room for: a uEntity's    up/A/10AB/0/3/*/{}/{}/{}/{}/{}
                                                                           an authority's up/A/*/*/*/*/{}/{}/{}/{}/{}
                                                                           all publishes  up/*/*/*/*/*/{}/{}/{}/{}/{}
the last filter of a subscription goes -> it goes, too; no other end: messages on their way by one that ends may be lost
                                          in Zenoh, though another one covers them (seen in one of 50 such changes)

Zenoh looks through all subscriptions of a session to declare one more (10,000 take 9 s of CPU, hence 100,000 some 15
minutes), and for each message whose key it does not know by a number, as that of one that is covered: some 50 ns each.
So their number has to be bounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SOURCE: Final = range(1, 6)  # of a key's eleven segments: authority, type, instance, version, resource
SINK: Final = range(6, 11)
NOBODY: Final = "{}"  # each segment of a sink that is none
ANY: Final = "*"
# what is left open, narrowest first: of a publish, and of what has a sink
OF_PUBLISHES: Final = ({5}, {2, 3, 4, 5}, {*SOURCE}, {*SOURCE})
OF_OTHERS: Final = ({5, 10}, {2, 3, 4, 5, 7, 8, 9, 10}, {*SOURCE, 7, 8, 9, 10}, {*SOURCE, *SINK})
WIDTHS: Final = range(len(OF_PUBLISHES))
# of each width, publishes and the rest apart; of the widest there is one. What several of them match is called for each
COVERS_MAX: Final = 4


def widened(key: str, width: int) -> str:
    """The key expression that covers `key` and its neighbours, itself where it is as wide already."""
    segments = key.split("/")
    for place in (OF_PUBLISHES if _is_publish(key) else OF_OTHERS)[width]:
        segments[place] = ANY
    return "/".join(segments)


class Covers:
    """The filters of a session, by their key expressions, and the subscriptions that shall be declared for them."""

    def __init__(self, subscriptions_max: int) -> None:
        """So many have their own."""
        self._max = subscriptions_max
        self._keys: set[str] = set()
        self.subscriptions: dict[str, int] = {}  # key expression -> how many filters it is there for
        self._wide: tuple[set[str], ...] = tuple(set() for _ in WIDTHS)  # those that cover filters

    def __repr__(self) -> str:
        wide = [len(covers) for covers in self._wide]
        return f"Covers(filters={len(self._keys)}, subscriptions={len(self.subscriptions)}, wide={wide})"

    @property
    def are_wide(self) -> bool:
        """True while something may come that no filter wants."""
        return any(self._wide)

    def add(self, keys: Iterable[str]) -> bool:
        """True if there are more `subscriptions` from now on. What is there already counts once."""
        before = len(self.subscriptions)
        for key in keys:
            if key not in self._keys:
                self._keys.add(key)
                owner = self._owner(key) or self._new(key)
                self.subscriptions[owner] = self.subscriptions.get(owner, 0) + 1
        return len(self.subscriptions) > before

    def remove(self, keys: Iterable[str]) -> bool:
        """True if there are fewer `subscriptions` from now on. What was never added changes nothing."""
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
        """The narrowest subscription that covers `key`; always the same while that filter is there.

        A narrower one is made only for what none covers, and each stays as long as it has filters.
        """
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
    return key.endswith(NOBODY)
