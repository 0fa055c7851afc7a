"""Who listens, as far as Zenoh knows: whether a publish would go to nobody.

publish of a key -> Regions that it is in, of its source authority and of its source uEntity
                    silent: nobody listens to anything in it                 -> nobody
                    covered: somebody listens to everything in it            -> put
                 -> neither: a publisher of its own with a Watch             -> heard: put, else nobody
                 -> as many publishers as there may be                       -> put, and counted as unprobed

Watch -> somebody begins to listen after an answer "nobody" -> HeardNews -> the owner, on the event loop

A publisher's matching listener says when subscriptions of other sessions begin and cease to match its key. One for each
key costs: a subscription with a wildcard is told anew for each publisher, and compared with each listener (4,096
publishers, 10 s). The Regions spare most of them. They have two more uses:

- Behind a router Zenoh knows the subscriptions only that a publisher has asked for, and the answer takes a round trip.
  What the Region has brought is known when a publisher of one topic is declared, so its Watch is right at once.
- When a publisher ends, a router tells no more of what it had asked for, and a peer keeps what it was told last: the
  next publisher of that key would take a subscriber that is gone for one that listens. What a Region has asked for is
  told all the time. Hence a Region is never undeclared.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import zenoh
from zenoh.handlers import Callback

from transports.zenoh import mapping
from uprotocol.status import nobody_listens

AUTHORITIES_MAX: Final = 64  # source authorities with a Region of their own; one of all authorities serves the others
ENTITIES_MAX: Final = 256  # source uEntities with a Region; the others have that of their authority alone
# a segment that no uProtocol address has: only a wildcard matches it
NO_SUCH: Final = "-"
# Zenoh compares each subscription in a Region with all others in it: 5 ms for 1,000 of them, 63 ms for 4,000. So one in
# which somebody listens is asked whether it is silent at most so often, and all of them for 1 % of the time at most
ASK_AGAIN_S: Final = 1.0
ASK_AGAIN_FACTOR: Final = 100
GATHER_S: Final = 0.005  # keys that are heard within this time are told in one call

NOBODY: Final = nobody_listens(
    "no Zenoh session that we know of subscribes to this topic: send it again when one does, or later"
)


class Watch:
    """Whether anybody else listens to the key of one publisher. It ends with the publisher."""

    __slots__ = ("_answered", "_heard", "_listener", "heard")

    def __init__(self, publisher: zenoh.Publisher, heard: Callable[[bool], None]) -> None:
        """`heard(answered)` on Zenoh's thread whenever somebody begins to listen; `answered`: `is_nobody` was True
        before. Raises ZError."""
        self.heard = False
        """Somebody listens. Set on Zenoh's threads."""
        self._answered = False
        self._heard = heard
        self._listener: Any = publisher.declare_matching_listener(Callback(self._on_status, indirect=False))

    def is_nobody(self) -> bool:
        """True: nobody listens, and `heard(True)` is called when somebody does. On the sender thread."""
        self._answered = True  # before the look: whoever begins to listen meanwhile sees it
        if self.heard:
            self._answered = False
            return False
        return True

    def end(self) -> None:
        self._listener.undeclare()

    def _on_status(self, status: zenoh.MatchingStatus) -> None:
        self.heard = status.matching
        if self.heard:
            answered, self._answered = self._answered, False
            self._heard(answered)


class Unasked:
    """In place of a Watch: whether anybody listens has to be asked for each message."""

    __slots__ = ("heard",)

    def __init__(self) -> None:
        self.heard = False  # always


UNASKED: Final = Unasked()


class Shared:
    """What the Regions of one session have together."""

    def __init__(self) -> None:
        self.publishers = 0  # declared
        self.ask_at = 0.0  # time.monotonic(); before, none of them is asked again whether it is silent


class Region:
    """All publishes of one source authority, of all authorities, or of one uEntity. On the sender thread."""

    def __init__(
        self,
        session: zenoh.Session,
        prefix: str,
        shared: Shared,
        on_heard: Callable[[], None],
        later: Callable[..., object],
    ) -> None:
        """`prefix`: the first segments of its keys. `on_heard` on Zenoh's thread, when somebody begins to listen after
        `is_silent`. `later(call)` runs `call()` on the sender thread. Raises ZError."""
        self._session, self._prefix, self._shared = session, prefix, shared
        self._on_heard, self._later = on_heard, later
        self._all = self._declare("*")
        # None: somebody listens. Zenoh would look at the whole Region for each subscription that ends
        self._silence: Watch | None = Watch(self._all, self._begins)
        self._ask_at = 0.0  # time.monotonic(); not before, while somebody listens
        self._nothing: Any = None  # the publisher of a key in it that has no topic
        self.cover: Watch | None = None
        """Of somebody who listens to everything in it, with a wildcard; None: nobody has asked yet."""

    def _declare(self, segment: str) -> Any:
        key = mapping.publish_key(self._prefix, segment)
        publisher = self._session.declare_publisher(key, allowed_destination=zenoh.Locality.REMOTE)
        self._shared.publishers += 1
        return publisher

    def is_silent(self) -> bool:
        """True: nobody listens to anything in it, as far as Zenoh knows."""
        if self._silence is None:
            now = time.monotonic()
            if now < self._ask_at or now < self._shared.ask_at:
                return False
            matching: bool = self._all.matching_status.matching
            asked = time.monotonic()
            self._ask_at = asked + ASK_AGAIN_S
            self._shared.ask_at = asked + ASK_AGAIN_FACTOR * (asked - now)
            if matching:
                return False
            self._silence = Watch(self._all, self._begins)
        if self._silence.is_nobody():
            return True
        self._settle()
        return False

    def ask_for_cover(self) -> bool:
        """Whether `cover` is heard; it is there from the first call on."""
        if self.cover is None:
            self._nothing = self._declare(NO_SUCH)
            self.cover = Watch(self._nothing, lambda answered: None)
        return self.cover.heard

    def _begins(self, answered: bool) -> None:
        """On Zenoh's thread."""
        if answered:
            self._on_heard()
        self._later(self._settle)

    def _settle(self) -> None:
        watch = self._silence
        if watch is not None and watch.heard:
            self._silence = None
            self._ask_at = time.monotonic() + ASK_AGAIN_S
            watch.end()


class Presence:
    """Of one session. On the sender thread."""

    def __init__(
        self, session: zenoh.Session, on_heard: Callable[[str | None], None], later: Callable[..., object]
    ) -> None:
        """`on_heard(key)` on Zenoh's thread when somebody begins to listen to a key that was answered "nobody"; None:
        to something in a Region that was silent. `later(call)` runs `call()` on the sender thread."""
        self._session, self._on_heard, self._later = session, on_heard, later
        self._shared = Shared()
        self._authorities: dict[str, Region] = {}  # by the first segments of their keys
        self._entities: dict[str, Region] = {}

    def __repr__(self) -> str:
        return f"Presence(authorities={len(self._authorities)}, entities={len(self._entities)})"

    @property
    def publishers(self) -> int:
        """How many are declared for Regions."""
        return self._shared.publishers

    def around(self, key: str) -> tuple[bool, Watch | None]:
        """What the Regions of `key` say of a publish: whether nobody listens to anything in one of them; else the Watch
        of somebody who listens to everything in one of them, if there is one. Raises ZError."""
        for region in self._regions(key):
            if region.cover is not None and region.cover.heard:
                return False, region.cover
            if region.is_silent():
                return True, None
            if region.ask_for_cover():
                return False, region.cover
        return False, None

    def _regions(self, key: str) -> Iterator[Region]:
        """The widest first, and the next one only if it is asked for: each is declared by that."""
        authority = mapping.authority_prefix(key)
        if authority not in self._authorities and len(self._authorities) >= AUTHORITIES_MAX:
            authority = mapping.ALL_SOURCES
        yield self._authorities.get(authority) or self._new(self._authorities, authority)
        entity = mapping.entity_prefix(key)
        if entity in self._entities or len(self._entities) < ENTITIES_MAX:
            yield self._entities.get(entity) or self._new(self._entities, entity)

    def _new(self, regions: dict[str, Region], prefix: str) -> Region:
        region = regions[prefix] = Region(
            self._session, prefix, self._shared, lambda: self._on_heard(None), self._later
        )
        return region

    def watch(self, publisher: zenoh.Publisher, key: str) -> Watch:
        """Of the publisher of one topic. Raises ZError."""

        def heard(answered: bool) -> None:
            if answered:
                self._on_heard(key)

        return Watch(publisher, heard)


class HeardNews:
    """Keys that somebody has begun to listen to, on their way to the owner of the transport."""

    def __init__(self, sends: Collection[asyncio.Future[Any]], tell: Callable[[Sequence[str] | None], None]) -> None:
        """`tell(keys)` on the event loop, None: any of those that were answered "nobody". `sends`: under way on the
        sender thread."""
        self._sends, self._tell = sends, tell
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: deque[str | None] = deque()
        self._on_its_way = False

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._on_its_way = loop, False

    def add(self, key: str | None) -> None:
        """From any thread."""
        self._news.append(key)
        if not self._on_its_way and self._loop is not None:
            self._on_its_way = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._gather)

    def _gather(self) -> None:
        """The answers "nobody" of calls that are under way must reach the owner first."""
        assert self._loop is not None, "this runs on it"
        self._loop.call_later(GATHER_S, self._await, list(self._sends))

    def _await(self, sends: list[asyncio.Future[Any]]) -> None:
        assert self._loop is not None, "this runs on it"
        for send in sends:
            if not send.done():
                send.add_done_callback(lambda _: self._await(sends))
                return
        self._loop.call_soon(self._tell_all)

    def _tell_all(self) -> None:
        self._on_its_way = False  # before the look: what is added from here on is told by another call
        keys = set[str | None]()
        while self._news:
            keys.add(self._news.popleft())
        if keys:
            self._tell(None if None in keys else [key for key in keys if key is not None])
