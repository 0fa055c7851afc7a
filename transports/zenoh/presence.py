"""Who listens, as far as Zenoh knows: whether a publish would go to nobody.

publish of a key -> it has a publisher: its Watch    heard -> put              not heard -> nobody
                 -> it has none: the Area of its     silent -> nobody          else -> declare a publisher with a Watch,
                    source authority                                           or put it unprobed where there is no room

Watch -> starts to be heard, after an answer "nobody" -> HeardNews -> the owner, on the event loop

A publisher's matching listener (Watch) says when subscriptions of other sessions begin and cease to match its key. An
Area is a publisher with a wildcard that nothing is put with. It has three uses:

- As long as nobody listens to anything of an authority, it answers for any number of topics.
- Behind a router Zenoh knows subscriptions only where a publisher has asked for them, and the answer takes a round
  trip. What the Area has brought is known when a publisher of one topic is declared, so its Watch is right at once.
- When a publisher ends, a router tells no more of what it had asked for, and a peer keeps what it was told last: the
  next publisher of that key would take a subscriber that is gone for one that listens. What an Area has asked for is
  told all the time. Hence an Area is never undeclared.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import zenoh
from zenoh.handlers import Callback

from transports.zenoh import mapping
from uprotocol.status import nobody_listens

AREAS_MAX: Final = 64  # source authorities with an Area of their own; one that covers all authorities serves the others
# Zenoh compares each subscription in an Area with all others in it: 5 ms for 1,000 of them, 63 ms for 4,000. So an Area
# in which somebody listens is asked at most so often, and never for more than 1 % of the time
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
        return not self.heard

    def end(self) -> None:
        self._listener.undeclare()

    def _on_status(self, status: zenoh.MatchingStatus) -> None:
        self.heard = status.matching
        if self.heard:
            answered, self._answered = self._answered, False
            self._heard(answered)


class Area:
    """All publishes of one source authority, or of all authorities. On the sender thread."""

    heard: Final = False  # it never says of one key that somebody listens

    def __init__(
        self, session: zenoh.Session, authority: str, on_heard: Callable[[], None], later: Callable[..., object]
    ) -> None:
        """`authority`: a segment of a key, or `*`. `on_heard` on Zenoh's thread, when somebody begins to listen after
        `is_silent`. `later(call)` runs `call()` on the sender thread. Raises ZError."""
        self._on_heard, self._later = on_heard, later
        key = f"up/{authority}/*/*/*/*/{mapping.NO_SINK}"
        self._publisher: Any = session.declare_publisher(key, allowed_destination=zenoh.Locality.REMOTE)
        # None: somebody listens. Zenoh would look at the whole Area for each subscription that ends
        self._watch: Watch | None = Watch(self._publisher, self._begins)
        self._ask_at = 0.0  # time.monotonic(); not before, while somebody listens

    def is_silent(self) -> bool:
        """True: nobody listens to anything in it, as far as Zenoh knows."""
        if self._watch is None:
            now = time.monotonic()
            if now < self._ask_at:
                return False
            matching: bool = self._publisher.matching_status.matching
            asked = time.monotonic()
            self._ask_at = asked + max(ASK_AGAIN_S, ASK_AGAIN_FACTOR * (asked - now))
            if matching:
                return False
            self._watch = Watch(self._publisher, self._begins)
        if self._watch.is_nobody():
            return True
        self._settle()
        return False

    def _begins(self, answered: bool) -> None:
        """On Zenoh's thread."""
        if answered:
            self._on_heard()
        self._later(self._settle)

    def _settle(self) -> None:
        watch = self._watch
        if watch is not None and watch.heard:
            self._watch = None
            self._ask_at = max(self._ask_at, time.monotonic() + ASK_AGAIN_S)
            watch.end()


class Presence:
    """Of one session. On the sender thread."""

    def __init__(
        self, session: zenoh.Session, on_heard: Callable[[str | None], None], later: Callable[..., object]
    ) -> None:
        """`on_heard(key)` on Zenoh's thread when somebody begins to listen to a key of which `is_nobody` was True;
        None: to something in an Area. `later(call)` runs `call()` on the sender thread."""
        self._session, self._on_heard, self._later = session, on_heard, later
        self._areas: dict[str, Area] = {}  # by authority

    def __repr__(self) -> str:
        return f"Presence(areas={len(self._areas)})"

    @property
    def areas(self) -> int:
        return len(self._areas)

    def area(self, key: str) -> Area:
        """The one that covers the publishes on `key`. Raises ZError."""
        authority = mapping.source_authority(key)
        area = self._areas.get(authority)
        if area is None:
            if len(self._areas) >= AREAS_MAX:
                authority = "*"
            area = self._areas.get(authority)
            if area is None:
                area = self._areas[authority] = Area(self._session, authority, self._area_heard, self._later)
        return area

    def watch(self, publisher: zenoh.Publisher, key: str) -> Watch:
        """Raises ZError."""

        def heard(answered: bool) -> None:
            if answered:
                self._on_heard(key)

        return Watch(publisher, heard)

    def _area_heard(self) -> None:
        self._on_heard(None)


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
