"""Which subscriptions of Zenoh bring what the filters of a session want: pure.

few filters   -> a subscription each: only what is wanted crosses the network
too many      -> at most 16 that cover them, as narrow as 16 can be:    of one uEntity   up/A/10AB/0/3/*/{}/{}/{}/{}/{}
                                                                        of one authority up/A/*/*/*/*/{}/{}/{}/{}/{}
                                                                        all publishes    up/*/*/*/*/*/{}/{}/{}/{}/{}
few again     -> a subscription each

Zenoh looks through all subscriptions of a session to declare one more (10,000 take 9 s of CPU, hence 100,000 some 15
minutes), and for each message whose key it does not know by a number. So their number has to be bounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SOURCE: Final = range(1, 6)  # of a key's eleven segments: authority, type, instance, version, resource
SINK: Final = range(6, 11)
NOBODY: Final = "{}"  # each segment of a sink that is none
ANY: Final = "*"
# what is left open, narrowest first: of a publish, and of what has a sink
OF_PUBLISHES: Final = ({5}, {2, 3, 4, 5}, {*SOURCE}, {*SOURCE, *SINK})
OF_OTHERS: Final = ({5, 10}, {2, 3, 4, 5, 7, 8, 9, 10}, {*SOURCE, 7, 8, 9, 10}, {*SOURCE, *SINK})
WIDTHS: Final = range(len(OF_PUBLISHES))
# with a wildcard each: a message whose key Zenoh does not know is compared with all of them, 0.1 us each
COVERS_MAX: Final = 16
FEW: Final = 0.5  # of the limit: so many need no covers, and if no more are left each filter has its own again


def widened(key: str, width: int) -> str:
    """The key expression that covers `key` and its neighbours, itself where it is as wide already."""
    segments = key.split("/")
    for place in (OF_PUBLISHES if _is_publish(key) else OF_OTHERS)[width]:
        segments[place] = ANY
    return "/".join(segments)


class Covers:
    """The filters of a session, by their key expressions, and the subscriptions that shall be declared for them."""

    def __init__(self, subscriptions_max: int) -> None:
        self._max = subscriptions_max
        self._keys: set[str] = set()
        self.subscriptions: dict[str, int] = {}  # key expression -> how many filters it is there for
        self._widths: list[int] = []  # in use

    def __repr__(self) -> str:
        return f"Covers(filters={len(self._keys)}, subscriptions={len(self.subscriptions)}, widths={self._widths})"

    @property
    def are_wide(self) -> bool:
        """True while something comes that no filter may want."""
        return bool(self._widths)

    def add(self, keys: Iterable[str]) -> bool:
        """True if `subscriptions` are others from now on. What is there already counts once."""
        before = len(self.subscriptions)
        for key in keys:
            if key not in self._keys:
                self._keys.add(key)
                owner = self._owner(key) or key
                self.subscriptions[owner] = self.subscriptions.get(owner, 0) + 1
        changed = len(self.subscriptions) != before
        if len(self.subscriptions) > self._max:
            self._widen()
        return changed

    def remove(self, keys: Iterable[str]) -> bool:
        """True if `subscriptions` are others from now on. What was never added changes nothing."""
        changed = False
        for key in keys:
            if key in self._keys:
                self._keys.discard(key)
                owner = self._owner(key)
                assert owner is not None, "each filter has a subscription"
                self.subscriptions[owner] -= 1
                if not self.subscriptions[owner]:
                    del self.subscriptions[owner]
                    changed = True
        if self._widths and len(self._keys) <= self._max * FEW:
            self.subscriptions, self._widths, changed = dict.fromkeys(self._keys, 1), [], True
        return changed

    def _owner(self, key: str) -> str | None:
        """The narrowest subscription that is there for such a filter."""
        if key in self.subscriptions:
            return key
        wider = (widened(key, width) for width in self._widths)
        return next((one for one in wider if one in self.subscriptions), None)

    def _widen(self) -> None:
        """Publishes, or the rest, or both: whichever has many. As narrow as so few can be."""
        publishes = {key: filters for key, filters in self.subscriptions.items() if _is_publish(key)}
        others = {key: filters for key, filters in self.subscriptions.items() if key not in publishes}
        self.subscriptions = {}
        for some in (publishes, others):
            self.subscriptions |= self._covered(some) if len(some) > self._max * FEW else some

    def _covered(self, subscriptions: dict[str, int]) -> dict[str, int]:
        for width in WIDTHS:
            groups: dict[str, list[str]] = {}
            for key in subscriptions:
                groups.setdefault(widened(key, width), []).append(key)
            if len(groups) <= COVERS_MAX:
                break
        self._widths = sorted({*self._widths, width})
        alone = (cover if len(keys) > 1 else keys[0] for cover, keys in groups.items())
        return {one: sum(subscriptions[key] for key in keys) for one, keys in zip(alone, groups.values(), strict=True)}


def _is_publish(key: str) -> bool:
    return key.endswith(f"/{NOBODY}")
