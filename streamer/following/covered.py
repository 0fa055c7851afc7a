"""The topics of a followed history that are followed without a hole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain

from uprotocol import uri as uris
from uprotocol.v1.uri_pb2 import UUri

Digest = bytes  # see Covered


class Covered:
    """Topics and patterns that are followed from here on without a hole."""

    def __init__(self, topics: Iterable[UUri] = ()) -> None:
        self._exact: dict[uris.Key, UUri] = {}
        self._wide: dict[uris.Key, UUri] = {}
        self._sum = 0
        for topic in topics:
            self.add(topic)

    def __iter__(self) -> Iterator[UUri]:
        return chain(self._exact.values(), self._wide.values())

    def __contains__(self, topic: UUri) -> bool:
        """Returns whether the topic itself or a pattern that covers it is in the set."""
        key = uris.key(topic)
        return key in self._exact or key in self._wide or any(uris.matches(one, topic) for one in self._wide.values())

    def _holds(self, topic: UUri) -> dict[uris.Key, UUri]:
        return self._wide if uris.has_wildcard(topic) else self._exact

    def add(self, topic: UUri) -> None:
        key = uris.key(topic)
        if key not in self._holds(topic):
            self._holds(topic)[key] = topic
            self._sum += _digest(key)

    def discard(self, topic: UUri) -> bool:
        """Returns False if it was not in the set."""
        key = uris.key(topic)
        if self._holds(topic).pop(key, None) is None:
            return False
        self._sum -= _digest(key)
        return True

    def clear(self) -> None:
        self._exact.clear()
        self._wide.clear()
        self._sum = 0

    def meeting(self, topic: UUri) -> list[UUri]:
        """Returns the members that have a topic in common with `topic`."""
        if uris.has_wildcard(topic):
            return [one for one in self if uris.meets(one, topic)]
        exact = self._exact.get(uris.key(topic))
        wide = [one for one in self._wide.values() if uris.matches(one, topic)]
        return wide if exact is None else [exact, *wide]

    @property
    def digest(self) -> Digest:
        """Returns 16 bytes that no other set of topics has."""
        return (self._sum % (1 << 128)).to_bytes(16, "big")


def _digest(key: uris.Key) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=16).digest(), "big")
