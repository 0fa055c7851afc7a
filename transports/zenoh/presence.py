"""Whether anybody listens to a publish or a request, as far as Zenoh knows.

publish of a key -> its Regions: of its source authority, and of its source uEntity
                    silent: nobody listens to anything in the Region         -> nobody
                    covered: somebody listens to everything in it            -> put
                 -> otherwise: a publisher of its own with a Watch           -> somebody listens: put, else nobody
                 -> at the limit of publishers                               -> put, and counted as unprobed

request -> the Watch of its method, whoever calls                               -> somebody listens: put, else nobody
        -> beyond METHODS_MAX                                                   -> put, and counted as unprobed

Watch -> somebody begins to listen after an answer "nobody" -> HeardNews -> the owner, on the event loop

A publisher's matching listener reports when subscriptions of other sessions begin and cease to match its key. One for
each key would be slow: Zenoh compares a subscription with a wildcard with each of them (4,096 publishers: 10 s). The
Regions make most of them unnecessary. They have two more uses:

- Behind a router, Zenoh knows only the subscriptions that match its publishers, and asking takes a round trip. The
  Region has already asked when a publisher of one topic is declared, so the Watch of that is right at once.
- After the end of a publisher, a router no longer reports changes of what it asked for, and a peer keeps the last
  report: the next publisher of that key would see a subscriber that no longer exists. A Region keeps asking, so it is
  never undeclared.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import zenoh
from zenoh.handlers import Callback

from transports.base import on_loop
from transports.zenoh import mapping
from uprotocol.status import nobody_listens

REGION_AUTHORITIES_MAX: Final = 64  # source authorities with a Region of their own; one of all serves the others
ENTITIES_MAX: Final = 256  # source uEntities with a Region; the others have that of their authority alone
# methods that are called, each with a publisher that is never undeclared; every wildcard that somebody subscribes to is
# compared with all of them
METHODS_MAX: Final = 1_024
# a segment that no uProtocol address has: only a wildcard matches it
IMPOSSIBLE: Final = "-"
# limits of the checks whether a Region has become silent: each compares every subscription in it with all others, 5 ms
# for 1,000 of them, 63 ms for 4,000
CHECK_REGION_S: Final = 1.0  # between two checks of one Region
ASK_AGAIN_FACTOR: Final = 100  # all checks together take at most 1 % of the time
GATHER_HEARD_S: Final = 0.005  # keys that somebody begins to listen to within this time are reported in one call

NO_SUBSCRIBER: Final = nobody_listens(
    "no known Zenoh session subscribes to this topic: send it again when one does, or later"
)
NO_SERVICE: Final = nobody_listens(
    "no known Zenoh session listens for requests to this method: its service is not there"
)


class Watch:
    """Whether anybody else listens to the key of one publisher. It ends with the publisher."""

    __slots__ = ("_answered", "_heard", "_listener", "heard")

    def __init__(self, publisher: zenoh.Publisher, heard: Callable[[bool], None]) -> None:
        """`heard(answered)` is called on Zenoh's thread when somebody begins to listen; `answered`: `is_nobody`
        returned True before. Raises ZError."""
        self.heard = False
        """Somebody listens. Set on Zenoh's threads."""
        self._answered = False
        self._heard = heard
        self._listener: Any = publisher.declare_matching_listener(Callback(self._on_status, indirect=False))

    def is_nobody(self) -> bool:
        """True if nobody listens. Then `heard(True)` is called when somebody does. On the sender thread."""
        self._answered = True  # before the check, for a listener that begins meanwhile
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


class Region:
    """All publishes of one source authority, of all authorities, or of one uEntity. On the sender thread."""

    def __init__(self, presence: Presence, prefix: str) -> None:
        """`prefix`: the first segments of its keys. Raises ZError."""
        self._presence, self._prefix = presence, prefix
        self._all = self._declare("*")
        # None while somebody listens: Zenoh would check the whole Region at the end of each subscription
        self._silence: Watch | None = Watch(self._all, self._begins)
        self._ask_at = 0.0  # not checked for silence earlier; time.monotonic()
        self._nothing: Any = None  # the publisher of a key that only wildcards match
        self.cover: Watch | None = None
        """Watches for a listener to everything in it, with a wildcard; None until `ask_for_cover`."""

    def _declare(self, segment: str) -> Any:
        key = mapping.publish_key(self._prefix, segment)
        publisher = self._presence.session.declare_publisher(key, allowed_destination=zenoh.Locality.REMOTE)
        self._presence.publishers += 1
        return publisher

    def is_silent(self) -> bool:
        """True if nobody listens to anything in it, as far as Zenoh knows."""
        if self._silence is None:
            now = time.monotonic()
            if now < self._ask_at or now < self._presence.ask_at:
                return False
            matching: bool = self._all.matching_status.matching
            asked = time.monotonic()
            self._ask_at = asked + CHECK_REGION_S
            self._presence.ask_at = asked + ASK_AGAIN_FACTOR * (asked - now)
            if matching:
                return False
            self._silence = Watch(self._all, self._begins)
        if self._silence.is_nobody():
            return True
        self._end_silence()
        return False

    def ask_for_cover(self) -> bool:
        """True if somebody listens to everything in it. Makes `cover` if it does not exist."""
        if self.cover is None:
            self._nothing = self._declare(IMPOSSIBLE)
            self.cover = Watch(self._nothing, lambda answered: None)
        return self.cover.heard

    def _begins(self, answered: bool) -> None:
        """On Zenoh's thread."""
        if answered:
            self._presence.on_heard(None)
        self._presence.later(self._end_silence)

    def _end_silence(self) -> None:
        watch = self._silence
        if watch is not None and watch.heard:
            self._silence = None
            self._ask_at = time.monotonic() + CHECK_REGION_S
            watch.end()


class Presence:
    """The Regions of one session. On the sender thread."""

    def __init__(
        self, session: zenoh.Session, on_heard: Callable[[str | None], None], later: Callable[..., object]
    ) -> None:
        """`on_heard(key)` is called on Zenoh's thread when somebody begins to listen to a key that was answered
        "nobody"; None: to something in a silent Region. `later(call)` runs `call()` on the sender thread."""
        self.session, self.on_heard, self.later = session, on_heard, later
        self.publishers = 0  # that are declared for Regions
        self.ask_at = 0.0  # no Region is checked for silence earlier; time.monotonic()
        self._authorities: dict[str, Region] = {}  # by the first segments of their keys
        self._entities: dict[str, Region] = {}
        self._methods: dict[str, tuple[zenoh.Publisher, Watch]] = {}  # by the key expression of their requests

    def around(self, key: str) -> tuple[bool, Watch | None]:
        """(True, None) if nobody listens to anything in one of the Regions of `key`; (False, Watch) if somebody listens
        to everything in one of them; else (False, None). Raises ZError."""
        for region in self._regions(key):
            if region.cover is not None and region.cover.heard:
                return False, region.cover
            if region.is_silent():
                return True, None
            if region.ask_for_cover():
                return False, region.cover
        return False, None

    def _regions(self, key: str) -> Iterator[Region]:
        """The Regions of `key`, the widest first. Each is declared when it is first reached."""
        authority = mapping.authority_prefix(key)
        if authority not in self._authorities and len(self._authorities) >= REGION_AUTHORITIES_MAX:
            authority = mapping.ALL_SOURCES
        if authority not in self._authorities:
            self._authorities[authority] = Region(self, authority)
        yield self._authorities[authority]
        entity = mapping.entity_prefix(key)
        if entity not in self._entities and len(self._entities) < ENTITIES_MAX:
            self._entities[entity] = Region(self, entity)
        if entity in self._entities:
            yield self._entities[entity]

    def method(self, key: str) -> Watch | None:
        """The Watch of the method that the request with this key calls; None beyond METHODS_MAX. Raises ZError."""
        requests = mapping.sink_key(key)
        if requests not in self._methods:
            if len(self._methods) >= METHODS_MAX:
                return None
            publisher = self.session.declare_publisher(requests, allowed_destination=zenoh.Locality.REMOTE)
            self.publishers += 1
            self._methods[requests] = publisher, Watch(publisher, lambda answered: None)
        return self._methods[requests][1]

    def watch(self, publisher: zenoh.Publisher, key: str) -> Watch:
        """A Watch of the publisher of one topic. Raises ZError."""
        return Watch(publisher, lambda answered: self.on_heard(key) if answered else None)


class HeardNews:
    """Reports to the owner of the transport the keys that somebody has begun to listen to."""

    def __init__(self, sends: Collection[asyncio.Future[Any]], report: Callable[[Sequence[str] | None], None]) -> None:
        """`report(keys)` is called on the event loop; None: any of the keys that were answered "nobody". `sends`: calls
        that are under way on the sender thread."""
        self._sends, self._report = sends, report
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: deque[str | None] = deque()
        self._is_scheduled = False
        self._reporting: asyncio.Task[None] | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._is_scheduled = loop, False

    def add(self, key: str | None) -> None:
        """From any thread."""
        self._news.append(key)
        if not self._is_scheduled and self._loop is not None:
            self._is_scheduled = True
            on_loop(self._loop, self._begin)

    def _begin(self) -> None:
        self._reporting = asyncio.ensure_future(self._gather(list(self._sends)))

    async def _gather(self, sends: list[asyncio.Future[Any]]) -> None:
        """Wait for the calls that are under way: their answers "nobody" must reach the owner first."""
        await asyncio.sleep(GATHER_HEARD_S)
        if sends:
            await asyncio.wait(sends)
        self._is_scheduled = False  # first: a key that is added from now on schedules another call
        keys = {self._news.popleft() for _ in range(len(self._news))}
        if keys:
            self._report(None if None in keys else [key for key in keys if key is not None])
