"""What a caller may read of a history, as rules: what a service says, and what a reader keeps of that.

VisibleTopics <-> Visible <-> text (JSON, for a checkpoint)
                    |-- sees(source)
                    |-- is_nothing: whatever is asked for, nothing may be read
                    |-- beyond(other): patterns of what may be read that `other` did not show
                    '-- equal: the same rules, in whichever order they came

Of the authorities the most specific one decides: a name before a family (`*.a.b` before `*.b`), and that before `*`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, Final, NamedTuple, Self

from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import TopicPattern, VisibleTopics
from uprotocol.status import invalid
from uprotocol.v1.uri_pb2 import UUri

Patterns = tuple[uris.Key, ...]  # sorted; an authority may be a family
_ANY: Final = uris.key(uris.ANY)


class Road(NamedTuple):
    """Visible are the topics that no pattern of `deny` matches and, if `allow` is not empty, one of `allow` does."""

    allow: Patterns = ()
    deny: Patterns = ()
    is_hidden: bool = False  # no topic is visible

    def shows(self, source: UUri) -> bool:
        if self.is_hidden or _is_one_of(source, self.deny):
            return False
        return not self.allow or _is_one_of(source, self.allow)


HIDDEN_ROAD: Final = Road(is_hidden=True)


class Visible(NamedTuple):
    """Use `made`, `of` or `parse`. `roads`, by authority, count only without `allow`."""

    allow: Patterns
    deny: Patterns
    roads: Mapping[str, Road]  # the most specific authority first

    @classmethod
    def made(cls, allow: Iterable[uris.Key], deny: Iterable[uris.Key], roads: Iterable[tuple[str, Road]]) -> Self:
        """Returns the shortest form of these rules. Of `roads` the first one that matches an authority counts."""
        allowed, denied = _sorted(allow), _sorted(deny)
        first: dict[str, Road] = {}
        for authority, road in () if allowed else roads:
            if authority and not any(wider in first for wider in _wider(authority)):
                hides = road.is_hidden or any(_covers(pattern, _ANY) for pattern in road.deny)
                first[authority] = HIDDEN_ROAD if hides else Road(_sorted(road.allow), _sorted(road.deny))
        kept: dict[str, Road] = {}
        for authority in sorted(first, key=precedence, reverse=True):
            if first[authority] != _widest(kept, authority):
                kept[authority] = first[authority]
        return cls(allowed, denied, dict(reversed(kept.items())))

    @classmethod
    def of(cls, message: VisibleTopics) -> Self:
        roads = [
            (authority, Road(_keys(one.allow), _keys(one.deny), one.hidden))
            for one in message.origins
            for authority in one.authorities
        ]
        return cls.made(_keys(message.allow), _keys(message.deny), roads)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises INVALID_ARGUMENT if it is not a `text`."""
        try:
            known = json.loads(text)
            roads = [
                (str(authority), Road(_parsed(one["allow"]), _parsed(one["deny"]), bool(one["hidden"])))
                for one in known["origins"]
                for authority in one["authorities"]
            ]
            return cls.made(_parsed(known["allow"]), _parsed(known["deny"]), roads)
        except (ValueError, TypeError, KeyError) as error:
            raise invalid(f"expected visible topics as JSON, got {text[:80]!r}: {error}") from None

    @property
    def text(self) -> str:
        """The same for the same rules."""
        origins = [
            {
                "authorities": authorities,
                "allow": list(map(_text, road.allow)),
                "deny": list(map(_text, road.deny)),
                "hidden": road.is_hidden,
            }
            for authorities, road in self._origins()
        ]
        known = {"allow": list(map(_text, self.allow)), "deny": list(map(_text, self.deny)), "origins": origins}
        return json.dumps(known, separators=(",", ":"))

    @property
    def message(self) -> VisibleTopics:
        made = VisibleTopics(allow=map(_pattern, self.allow), deny=map(_pattern, self.deny))
        for authorities, road in self._origins():
            allow, deny = map(_pattern, road.allow), map(_pattern, road.deny)
            made.origins.add(authorities=authorities, allow=allow, deny=deny, hidden=road.is_hidden)
        return made

    def sees(self, source: UUri) -> bool:
        """Returns whether a publish of this topic may be read, if it is not for somebody else."""
        if _is_one_of(source, self.deny):
            return False
        if self.allow:
            return _is_one_of(source, self.allow)
        return _widest(self.roads, source.authority_name).shows(source)

    @property
    def is_nothing(self) -> bool:
        """True if surely no topic is visible."""
        return not any(self._shows_some(authority, road) for authority, road in self._by_authority.items())

    def sees_some_of(self, authority: str) -> bool:
        """Returns False if surely no topic of this authority is visible."""
        return self._shows_some(authority, Road(self.allow) if self.allow else _widest(self.roads, authority))

    def beyond(self, other: Visible) -> Iterator[uris.Key]:
        """Yields patterns of all topics that are visible here and not by `other`, and perhaps of some more; none if
        surely everything is visible by `other`, too."""
        mine, theirs = (one._by_authority for one in (self, other))
        for authority in {*mine, *theirs}:
            road, known = (_widest(roads, authority) for roads in (mine, theirs))
            denied = (*self.deny, *road.deny)
            is_open = not known.is_hidden and all(_is_covered(one, denied) for one in (*other.deny, *known.deny))
            for pattern in () if road.is_hidden else _narrowed(road.allow or (_ANY,), authority):
                is_known = is_open and (not known.allow or _is_covered(pattern, known.allow))
                if not is_known and not _is_covered(pattern, denied):
                    yield pattern

    @property
    def _by_authority(self) -> Mapping[str, Road]:
        return {uris.WILDCARD_AUTHORITY: Road(self.allow)} if self.allow else self.roads

    def _shows_some(self, authority: str, road: Road) -> bool:
        deny = (*self.deny, *road.deny)
        some = _narrowed(road.allow or (_ANY,), authority)
        return not road.is_hidden and any(not _is_covered(pattern, deny) for pattern in some)

    def _origins(self) -> Iterator[tuple[list[str], Road]]:
        for _, alike in groupby(self.roads, lambda authority: precedence(authority)[:-1]):
            by_road: dict[Road, list[str]] = {}
            for authority in alike:
                by_road.setdefault(self.roads[authority], []).append(authority)
            yield from ((authorities, road) for road, authorities in by_road.items())


# -- authorities


def precedence(authority: str) -> tuple[bool, bool, int, str]:
    """Returns a key that sorts authorities: the most specific one first."""
    is_family = uris.is_family(authority)
    return authority == uris.WILDCARD_AUTHORITY, is_family, -authority.count(".") if is_family else 0, authority


def _wider(authority: str) -> Iterator[str]:
    """Yields `authority`, and all that cover it, the most specific one first."""
    if not uris.is_pattern(authority):
        return uris.owners(authority)
    if authority == uris.WILDCARD_AUTHORITY:
        return iter((authority,))
    return islice(uris.owners(f"x{authority[1:]}"), 1, None)


def _widest(roads: Mapping[str, Road], authority: str) -> Road:
    """The road of all of `authority`, which may be a pattern, but for more specific ones."""
    return next((roads[wider] for wider in _wider(authority) if wider in roads), HIDDEN_ROAD)


def _is_in(authority: str, pattern: str) -> bool:
    return pattern in (uris.WILDCARD_AUTHORITY, authority) or (
        uris.is_family(pattern) and authority.endswith(pattern[1:])
    )


# -- patterns


def _is_one_of(source: UUri, patterns: Patterns) -> bool:
    return any(_matches(pattern, source) for pattern in patterns)


def _matches(pattern: uris.Key, candidate: UUri) -> bool:
    return _is_in(candidate.authority_name, pattern[0]) and uris.matches(_of_any(*pattern[1:]), candidate)


@functools.lru_cache(maxsize=4_096)
def _of_any(ue_id: int, version: int, resource: int) -> UUri:
    return UUri(authority_name=uris.WILDCARD_AUTHORITY, ue_id=ue_id, ue_version_major=version, resource_id=resource)


def _covers(pattern: uris.Key, other: uris.Key) -> bool:
    return _is_in(other[0], pattern[0]) and uris.matches(_of_any(*pattern[1:]), _of_any(*other[1:]))


def _is_covered(pattern: uris.Key, by: Patterns) -> bool:
    return any(_covers(one, pattern) for one in by)


def _narrowed(patterns: Patterns, authority: str) -> Iterator[uris.Key]:
    """Yields what is left of patterns where only `authority`, which may be a pattern itself, can be matched."""
    for name, ue_id, version, resource in patterns:
        if _is_in(authority, name) or _is_in(name, authority):
            yield (authority if _is_in(authority, name) else name), ue_id, version, resource


def _sorted(patterns: Iterable[uris.Key]) -> Patterns:
    return tuple(sorted(set(patterns)))


def _keys(patterns: Sequence[TopicPattern]) -> Patterns:
    return tuple(uris.key(one.topic) for one in patterns)


def _pattern(key: uris.Key) -> TopicPattern:
    authority, ue_id, version, resource = key
    topic = UUri(authority_name=authority, ue_id=ue_id, ue_version_major=version, resource_id=resource)
    return TopicPattern(topic=topic)


def _text(key: uris.Key) -> str:
    return uris.format(_pattern(key).topic)


def _parsed(texts: list[Any]) -> Patterns:
    """Raises ValueError, TypeError."""
    found = []
    for text in texts:
        authority, *numbers = str(text).removeprefix("up:").removeprefix("//").rsplit("/", 3)
        ue_id, version, resource = (int(number, 16) for number in numbers)
        found.append(uris.key(_pattern((authority, ue_id, version, resource)).topic))
    return tuple(found)


EVERYTHING_VISIBLE: Final = Visible.made((), (), [(uris.WILDCARD_AUTHORITY, Road())])
# an error for callers to whom nothing of what they ask for is visible
NOTHING_VISIBLE: Final = "the rules, or [[access]], of this streamer let you read none of these topics"
