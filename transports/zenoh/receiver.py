"""Receives over Zenoh: the subscriptions of one session, and the filters that their messages match.

filters -> covers.py -> subscriptions
Zenoh's thread: sample -> filters that match its key -> already brought by another subscription? -> bytes -> Arrivals
                               '-> none: counted, not copied                                of calls, or of publishes
loop:           Arrivals -> do the attributes agree with the key? -> listeners of those filters

Zenoh calls us on the thread that reads the link, in the order of the link, once for each matching subscription. So a
sample that equals the last one of that thread and comes by another subscription is the same message.

This is fast only on threads whose interpreter state is kept: threads.py. Zenoh's alternative (`indirect`), one Python
thread for each subscription, costs 0.4 MiB each and loses the order across topics.
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

KEY_KNOWN_CHARS: Final = 512  # longer keys have no valid authorities and are not cached
KNOWN_BYTES_MAX: Final = 512  # of the attributes of a known stream; those of an honest one are shorter
# publishes that wait behind publishes that listeners hold: a full link would stop requests, too
HELD_MESSAGES_MAX: Final = 32_768
# of each of the two Arrivals; other transports have one Arrivals with twice that
ARRIVALS_BYTES_MAX: Final = 32 << 20

log = structlog.get_logger()
THREADS_MAX: Final = 64  # whose last message is cached; Zenoh has far fewer

ZenohSample = tuple[tuple[Filter, ...], bytes, bytes, str]  # filters that match it, payload, attachment, key

_Last = tuple[bytes | None, bytes, tuple[str, ...]]  # attachment, payload, and the subscriptions that brought it
_NONE_YET: Final[_Last] = (None, b"", ())


class Wanted:
    """Key expressions -> filters. Changed on the loop, read by any thread.

    A thread that reads during a change gets the old or the new filters, and caches no old ones.
    """

    def __init__(self) -> None:
        self.exact: dict[str, Filter] = {}
        # indices of the segments that are not wildcards -> those segments -> the filter of that pattern
        self._shapes: tuple[tuple[tuple[int, ...], dict[tuple[str, ...], Filter]], ...] = ()
        self._known: Cache[str, tuple[Filter, ...]] = Cache()  # filters with a pattern, by the key of a message

    def __len__(self) -> int:
        return len(self.exact) + sum(len(patterns) for _indices, patterns in self._shapes)

    def add(self, key: str, filter: Filter) -> None:
        if ANY not in key:
            self.exact[key] = filter
            return
        indices, parts = _shape(key)
        patterns = dict(self._shapes).get(indices)
        if patterns is None:
            self._shapes = (*self._shapes, (indices, {parts: filter}))
        else:
            patterns[parts] = filter
        self._known = Cache()  # a new object: a thread that computes an old answer writes it into the old one

    def remove(self, key: str) -> None:
        if ANY not in key:
            self.exact.pop(key, None)
            return
        indices, parts = _shape(key)
        dict(self._shapes)[indices].pop(parts, None)
        self._shapes = tuple((indices, patterns) for indices, patterns in self._shapes if patterns)
        self._known = Cache()

    def by(self, key: str) -> tuple[Filter, ...]:
        """Filters that match `key`, the key of one message."""
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
        found = (patterns.get(tuple(segments[index] for index in indices)) for indices, patterns in self._shapes)
        return tuple(filter for filter in found if filter is not None)


def _shape(key: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    segments = key.split("/")
    indices = tuple(index for index, segment in enumerate(segments) if segment != ANY)
    return indices, tuple(segments[index] for index in indices)


class Receiver:
    """The filters outlive the session. Full Arrivals block Zenoh's thread, and so the link.

    Call `want` and `unwant` on the loop; `declare` and `undeclare`, which change the subscriptions, on another thread.
    """

    def __init__(self, listeners: ListenerTable, subscriptions_max: int) -> None:
        self._listeners, dropped = listeners, listeners.dropped
        self._calls = Arrivals[ZenohSample](self._deliver, bytes_max=ARRIVALS_BYTES_MAX, dropped=dropped)
        self._publishes = Arrivals[ZenohSample](
            self._deliver, held_messages_max=HELD_MESSAGES_MAX, bytes_max=ARRIVALS_BYTES_MAX, dropped=dropped
        )
        self.wanted = Wanted()
        self.covers = Covers(subscriptions_max)
        self.unwanted = 0  # messages of wide subscriptions that match no filter
        self._declared: dict[str, zenoh.Subscriber[None]] = {}
        self._declaring = threading.Lock()
        self._lasts: Cache[int, _Last] = Cache(THREADS_MAX)  # the last sample, by thread
        self._known_keys: Cache[bytes, str] = Cache()  # encoded attributes without their id -> their key

    def __repr__(self) -> str:
        return f"Receiver({self.covers}, declared={len(self._declared)}, unwanted={self.unwanted})"

    def open(self, message_bytes_max: int) -> None:
        """Accept samples from now on."""
        self._publishes.open(message_bytes_max)
        self._calls.open(message_bytes_max)

    async def drained(self) -> None:
        """Completes when listeners have taken all messages that have arrived."""
        await self._publishes.drained()
        await self._calls.drained()

    def close(self) -> None:
        """Accept no more samples, and drop those that wait."""
        self._publishes.close()
        self._calls.close()

    def want(self, filters: Iterable[tuple[str, Filter]]) -> bool:
        """True if subscriptions must be added: call `declare`."""
        was_wide, pairs = self.covers.are_wide, list(filters)
        for key, filter in pairs:
            self.wanted.add(key, filter)
        changed = self.covers.add(key for key, _ in pairs)
        if self.covers.are_wide and not was_wide:
            log.info("many filters: wider subscriptions cover further ones", covers=repr(self.covers))
        return changed

    def unwant(self, keys: list[str]) -> bool:
        """True if subscriptions can be removed: call `declare`."""
        for key in keys:
            self.wanted.remove(key)
        return self.covers.remove(keys)

    def declare(self, session: zenoh.Session) -> None:
        """Make the subscriptions of `session` those of `covers`. Blocks. Raises ZError; those declared before the error
        stay."""
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
        """End all subscriptions. Blocks until no more samples come."""
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
            """On Zenoh's thread: takes only the bytes. Malformed samples are counted on the loop."""
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

    def _deliver(self, arrived: list[ZenohSample]) -> Awaitable[None] | None:
        version, exact = mapping.VERSION_BYTE, self.wanted.exact
        shares: list[tuple[Filter | None, bytes, bytes]] = []
        keys: list[str] = []  # of the shares
        for filters, payload, attachment, key in arrived:
            if attachment[:1] != version:
                self._listeners.dropped["malformed"] += 1
                continue
            encoded = attachment[1:]
            # if the only filter is one without wildcards, `unmatched` checks the address instead
            if (len(filters) == 1 and exact.get(key) is filters[0]) or self._agrees(encoded, key):
                for filter in filters:
                    shares.append((filter, payload, encoded))
                    keys.append(key)

        def complete(index: int, attributes: UAttributes) -> None:
            mapping.complete(attributes, keys[index])

        def unmatched(index: int) -> None:
            """If a filter without wildcards does not match, the attributes differ from the key: the message is spoofed.
            Those of filters with wildcards were checked above."""
            filter, _, encoded = shares[index]
            if filter is not None and exact.get(keys[index]) is filter:
                self._agrees(encoded, keys[index])

        return self._listeners.deliver_encoded(shares, complete, unmatched)

    def _agrees(self, encoded: bytes, key: str) -> bool:
        """False, and counted as spoofed, if the attributes name another source or sink than `key`. True if they can't
        be parsed: the listeners count that."""
        rest = suffix(encoded)
        if rest is not None and self._known_keys.get(rest) == key:
            return True
        try:
            attributes = UAttributes.FromString(encoded)
        except DecodeError:
            return True
        if not mapping.is_key_of(key, attributes):
            self._listeners.dropped["spoofed"] += 1
            return False
        if rest is not None and len(rest) <= KNOWN_BYTES_MAX and is_shared(attributes):
            self._known_keys[rest] = key
        return True
