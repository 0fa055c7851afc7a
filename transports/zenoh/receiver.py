"""What arrives over Zenoh: the subscriptions of one session, and what their messages are wanted for.

filters -> covers.py -> subscriptions
Zenoh's thread: sample -> which filters want its key? -> brought by another subscription just now? -> bytes -> Arrivals
                               '-> nobody: counted, and not copied                              of calls, or of the rest
loop:           Arrivals -> do the attributes say what the key says? -> listeners of those filters

Zenoh calls on the thread that reads the link, in the order of the link, once for each subscription that matches. So
what came is the same message again if it equals the last one of that thread and another subscription brings it.

That is fast only on threads whose state the interpreter keeps: threads.py. A thread of Python's for each subscription,
which Zenoh offers instead (`indirect`), costs 0.4 MiB, and scrambles the order across topics.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterable
from threading import get_ident
from typing import Final

import structlog
import zenoh
from google.protobuf.message import DecodeError
from zenoh.handlers import Callback

from transports.arrivals import Arrivals
from transports.listeners import Filter, ListenerTable
from transports.zenoh import mapping
from transports.zenoh.covers import ANY, Covers
from transports.zenoh.threads import KEPT, keep_state
from uprotocol.cache import Cache
from uprotocol.encoded import is_shared, suffix
from uprotocol.v1.uattributes_pb2 import UAttributes

KEY_KNOWN_CHARS: Final = 512  # longer ones have no two authorities that are valid, and are not remembered
NAMED_BYTES: Final = 512  # of a stream's attributes; those of honest ones are shorter, and others cost no memory
# publishes that wait while listeners hold those before them: a full link would stop requests, too
HELD_MESSAGES_MAX: Final = 32_768
# of either arrivals, together what one has elsewhere: so what is held is small, or less than so many
ARRIVALS_BYTES_MAX: Final = 32 << 20

log = structlog.get_logger()
THREADS_MAX: Final = 64  # whose last message is known, far more than Zenoh reads with; then all is forgotten

ArrivedSample = tuple[
    tuple[Filter, ...], bytes, bytes, str
]  # which filters want it, payload, attachment, under which key

_Last = tuple[bytes | None, bytes, tuple[str, ...]]  # attachment, payload, and the subscriptions that have brought it
_NONE_YET: Final[_Last] = (None, b"", ())


class Wanted:
    """Key expressions -> filters. The loop changes it, any thread asks.

    A thread may ask while it is changed: it finds what was there before or what is there now, and remembers nothing
    that is no longer so.
    """

    def __init__(self) -> None:
        self.exact: dict[str, Filter] = {}
        # places in a key that must be as they are -> what they must be -> the pattern
        self._shapes: tuple[tuple[tuple[int, ...], dict[tuple[str, ...], Filter]], ...] = ()
        self._known: Cache[str, tuple[Filter, ...]] = Cache()  # patterns alone

    def __len__(self) -> int:
        return len(self.exact) + sum(len(patterns) for _places, patterns in self._shapes)

    def add(self, key: str, filter: Filter) -> None:
        if ANY not in key:
            self.exact[key] = filter
            return
        places, parts = _shape(key)
        patterns = dict(self._shapes).get(places)
        if patterns is None:
            self._shapes = (*self._shapes, (places, {parts: filter}))
        else:
            patterns[parts] = filter
        self._known = Cache()  # another one: who works out an old answer just now writes it into the old

    def remove(self, key: str) -> None:
        if ANY not in key:
            self.exact.pop(key, None)
            return
        places, parts = _shape(key)
        dict(self._shapes)[places].pop(parts, None)
        self._shapes = tuple((places, patterns) for places, patterns in self._shapes if patterns)
        self._known = Cache()

    def by(self, key: str) -> tuple[Filter, ...]:
        """Filters that match `key`, which is that of one message."""
        exact = self.exact.get(key)
        if not self._shapes:
            return () if exact is None else (exact,)
        known = self._known
        patterns = known.get(key)
        if patterns is None:
            patterns = self._matching(key)
            if len(key) <= KEY_KNOWN_CHARS:
                known[key] = patterns
        return patterns if exact is None else (exact, *patterns)

    def _matching(self, key: str) -> tuple[Filter, ...]:
        segments = key.split("/")
        if len(segments) != mapping.SEGMENTS:
            return ()
        found = (patterns.get(tuple(segments[place] for place in places)) for places, patterns in self._shapes)
        return tuple(filter for filter in found if filter is not None)


def _shape(key: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    segments = key.split("/")
    places = tuple(place for place, segment in enumerate(segments) if segment != ANY)
    return places, tuple(segments[place] for place in places)


class Receiver:
    """What is wanted outlives the session. Arrivals that are full hold Zenoh's thread: the link then stands.

    `want` and `unwant` belong to the loop; `declare` and `undeclare`, which tell the network, to any other thread.
    """

    def __init__(self, listeners: ListenerTable, subscriptions_max: int) -> None:
        self._listeners, dropped = listeners, listeners.dropped
        self._calls = Arrivals[ArrivedSample](self._deliver, bytes_max=ARRIVALS_BYTES_MAX, dropped=dropped)
        self._publishes = Arrivals[ArrivedSample](
            self._deliver, held_messages_max=HELD_MESSAGES_MAX, bytes_max=ARRIVALS_BYTES_MAX, dropped=dropped
        )
        self.wanted = Wanted()
        self.covers = Covers(subscriptions_max)
        self.unwanted = 0  # messages that a wide subscription brought for nobody
        self._declared: dict[str, zenoh.Subscriber[None]] = {}
        self._declaring = threading.Lock()
        self._lasts: Cache[int, _Last] = Cache(THREADS_MAX)  # what was taken last, by the thread
        self._named: Cache[bytes, str] = Cache()  # the key of encoded attributes without their id

    def __repr__(self) -> str:
        return f"Receiver({self.covers}, declared={len(self._declared)}, unwanted={self.unwanted})"

    def open(self, message_bytes_max: int) -> None:
        """Take what comes from now on."""
        self._publishes.open(message_bytes_max)
        self._calls.open(message_bytes_max)

    async def drained(self) -> None:
        """Completes when listeners have taken all that has come."""
        await self._publishes.drained()
        await self._calls.drained()

    def close(self) -> None:
        """Take nothing more, and let go of what waits."""
        self._publishes.close()
        self._calls.close()

    def want(self, filters: Iterable[tuple[str, Filter]]) -> bool:
        """True if the network has to be told: call `declare`."""
        was_wide, pairs = self.covers.are_wide, list(filters)
        for key, filter in pairs:
            self.wanted.add(key, filter)
        changed = self.covers.add(key for key, _ in pairs)
        if self.covers.are_wide and not was_wide:
            log.info("so many filters that wider subscriptions cover more of them", covers=repr(self.covers))
        return changed

    def unwant(self, keys: list[str]) -> bool:
        """True if the network may be told: call `declare`."""
        for key in keys:
            self.wanted.remove(key)
        return self.covers.remove(keys)

    def declare(self, session: zenoh.Session) -> None:
        """Make the subscriptions of `session` those of `covers`. Blocks. Raises ZError; what is declared by then
        stays."""
        with self._declaring:
            wanted = set(self.covers.subscriptions)
            for key in wanted:
                if key not in self._declared:
                    self._declared[key] = session.declare_subscriber(
                        key, Callback(self._on_sample(key), indirect=False), allowed_origin=zenoh.Locality.REMOTE
                    )
            for key in self._declared.keys() - wanted:
                self._declared.pop(key).undeclare()  # type: ignore[no-untyped-call]

    def undeclare(self) -> None:
        """Blocks until no more comes."""
        with self._declaring:
            for subscriber in self._declared.values():
                with contextlib.suppress(zenoh.ZError):
                    subscriber.undeclare()  # type: ignore[no-untyped-call]
            self._declared.clear()

    def _on_sample(self, subscription: str) -> Callable[[zenoh.Sample], None]:
        by, lasts, brought_by, is_exact = self.wanted.by, self._lasts, (subscription,), ANY not in subscription
        put_publish, put_call = self._publishes.put, self._calls.put
        is_call = mapping.is_call

        def on_sample(sample: zenoh.Sample) -> None:
            """On Zenoh's thread: the bytes, and nothing more. What is malformed is counted on the loop."""
            key = subscription if is_exact else str(sample.key_expr)
            filters = by(key)
            if not filters:
                self.unwanted += 1
                return
            attached = sample.attachment
            attachment, payload = b"" if attached is None else attached.to_bytes(), sample.payload.to_bytes()
            thread = get_ident()
            if thread not in KEPT:
                keep_state()
            last = lasts.get(thread, _NONE_YET)
            if attachment == last[0] and payload == last[1] and subscription not in last[2]:
                lasts[thread] = attachment, payload, last[2] + brought_by
                return
            lasts[thread] = attachment, payload, brought_by
            put = put_call if is_call(attachment) else put_publish
            put((filters, payload, attachment, key), len(payload) + len(attachment))

        return on_sample

    def _deliver(self, arrived: list[ArrivedSample]) -> Awaitable[None] | None:
        version, exact = mapping.VERSION_BYTE, self.wanted.exact
        shares: list[tuple[Filter | None, bytes, bytes]] = []
        keys: list[str] = []  # of the shares
        for filters, payload, attachment, key in arrived:
            if attachment[:1] != version:
                self._listeners.dropped["malformed"] += 1
                continue
            encoded = attachment[1:]
            # a key of one filter without wildcards takes nothing else, so there is nothing to compare
            if (len(filters) == 1 and exact.get(key) is filters[0]) or self._is_named(encoded, key):
                for filter in filters:
                    shares.append((filter, payload, encoded))
                    keys.append(key)

        def complete(place: int, attributes: UAttributes) -> None:
            mapping.complete(attributes, keys[place])

        def unmatched(place: int) -> None:
            """A filter that names one key takes nothing that says another address: it is spoofed, and counts as that.
            Filters with wildcards were compared above."""
            filter, _, encoded = shares[place]
            if filter is not None and exact.get(keys[place]) is filter:
                self._is_named(encoded, keys[place])

        return self._listeners.deliver_encoded(shares, complete, unmatched)

    def _is_named(self, encoded: bytes, key: str) -> bool:
        """False, and counted, for what says that it comes from elsewhere, or goes elsewhere, than its key does.

        What can't be read is the listeners' to count.
        """
        rest = suffix(encoded)
        if rest is not None and self._named.get(rest) == key:
            return True
        try:
            attributes = UAttributes.FromString(encoded)
        except DecodeError:
            return True
        if not mapping.is_key_of(key, attributes):
            self._listeners.dropped["spoofed"] += 1
            return False
        if rest is not None and len(rest) <= NAMED_BYTES and is_shared(attributes):
            self._named[rest] = key
        return True
