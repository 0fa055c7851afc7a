"""Receives over Zenoh: the subscriptions of one session, and the filters that their messages match.

filters -> Covers -> subscriptions
Zenoh's thread: sample -> filters that match its key -> already brought by another subscription? -> bytes -> Arrivals
                               '-> none: counted, not copied                                of calls, or of publishes
loop:           Arrivals -> do the attributes agree with the key? -> listeners of those filters

Zenoh calls us on the thread that reads the link, in the order of the link, once for each matching subscription. So a
sample that equals the last one of that thread and comes by another subscription is the same message.

This is fast only on threads whose interpreter state is kept: threads.py. Zenoh's alternative (`indirect`), one Python
thread for each subscription, costs 0.4 MiB each and loses the order across topics.

Covers: the first filters -> a subscription each: only wanted messages cross the network
        more              -> one that covers them, as narrow as the limit allows:
                             a uEntity's     up/A/10AB/0/3/*/{}/{}/{}/{}/{}
                             an authority's  up/A/*/*/*/*/{}/{}/{}/{}/{}
                             all publishes   up/*/*/*/*/*/{}/{}/{}/{}/{}
        the last filter of a subscription ends -> it ends, too. It never ends earlier: messages on their way through it
                             may be lost in Zenoh although another one covers them (seen in one of 50 changes)

Zenoh goes through all subscriptions of a session to declare one more (10,000 take 9 s of CPU, so 100,000 take some 15
minutes), and also for each message whose key has no number yet, as below a cover: some 50 ns each. So they are limited.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterable
from threading import get_ident
from typing import Final

import structlog
import zenoh
from zenoh.handlers import Callback

from transports.arrivals import Arrivals
from transports.listeners import Filter, KnownAddresses, ListenerTable
from transports.zenoh import mapping
from transports.zenoh.threads import KEPT, keep_state
from uprotocol.cache import Cache
from uprotocol.v1.uattributes_pb2 import UAttributes

KEY_KNOWN_CHARS: Final = 512  # longer keys have no valid authorities and are not cached
# publishes that wait behind publishes that listeners hold: a full link would stop requests, too
HELD_MESSAGES_MAX: Final = 32_768
# of each of the two Arrivals; other transports have one Arrivals with twice that
ARRIVALS_BYTES_MAX: Final = 32 << 20
THREADS_MAX: Final = 64  # whose last message is cached; Zenoh has far fewer

SOURCE: Final = range(1, 6)  # of a key's eleven segments: authority, type, instance, version, resource
SINK: Final = range(6, 11)
NO_VALUE: Final = "{}"  # each segment of an absent sink
ANY_SEGMENT: Final = "*"
# segments that become wildcards, narrowest first: for publishes, and for messages with a sink
OF_PUBLISHES: Final = ({5}, {2, 3, 4, 5}, {*SOURCE}, {*SOURCE})
OF_OTHERS: Final = ({5, 10}, {2, 3, 4, 5, 7, 8, 9, 10}, {*SOURCE, 7, 8, 9, 10}, {*SOURCE, *SINK})
WIDTHS: Final = range(len(OF_PUBLISHES))
# of each width, for publishes and others separately; one of the widest. Zenoh calls us once for each that matches
COVERS_MAX: Final = 4

log = structlog.get_logger()

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
        if ANY_SEGMENT not in key:
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
        if ANY_SEGMENT not in key:
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
    indices = tuple(index for index, segment in enumerate(segments) if segment != ANY_SEGMENT)
    return indices, tuple(segments[index] for index in indices)


def widened(key: str, width: int) -> str:
    """The key expression of that width that covers `key`; `key` itself if it is as wide."""
    segments = key.split("/")
    for at in (OF_PUBLISHES if _is_publish(key) else OF_OTHERS)[width]:
        segments[at] = ANY_SEGMENT
    return "/".join(segments)


class Covers:
    """The filters of a session, by key expression, and the subscriptions to declare for them. Pure."""

    def __init__(self, subscriptions_max: int) -> None:
        """`subscriptions_max`: filters with a subscription of their own."""
        self._max = subscriptions_max
        self._owners: dict[str, str] = {}  # key expression of each filter -> that of its subscription
        self.subscriptions: dict[str, int] = {}  # key expression -> its number of filters
        self.wide: tuple[set[str], ...] = tuple(set() for _ in WIDTHS)  # of `subscriptions`, by width

    def __repr__(self) -> str:
        wide = [len(covers) for covers in self.wide]
        return f"Covers(filters={len(self._owners)}, subscriptions={len(self.subscriptions)}, wide={wide})"

    def add(self, keys: Iterable[str]) -> bool:
        """True if `subscriptions` has grown. A key that is known already changes nothing."""
        before = len(self.subscriptions)
        for key in keys:
            if key not in self._owners:
                owner = self._owners[key] = self._owner(key)
                self.subscriptions[owner] = self.subscriptions.get(owner, 0) + 1
        return len(self.subscriptions) > before

    def remove(self, keys: Iterable[str]) -> bool:
        """True if `subscriptions` has shrunk. An unknown key changes nothing."""
        before = len(self.subscriptions)
        for key in keys:
            owner = self._owners.pop(key, None)
            if owner is not None:
                self.subscriptions[owner] -= 1
                if not self.subscriptions[owner]:
                    del self.subscriptions[owner]
                    for covers in self.wide:
                        covers.discard(owner)
        return len(self.subscriptions) < before

    def _owner(self, key: str) -> str:
        """The narrowest subscription that covers `key`, or a new one."""
        if key in self.subscriptions:
            return key
        for width in WIDTHS:
            if self.wide[width] and (cover := widened(key, width)) in self.subscriptions:
                return cover
        if len(self.subscriptions) - sum(map(len, self.wide)) < self._max:
            return key
        same = _is_publish(key)
        for width in WIDTHS[:-1]:
            if sum(_is_publish(cover) == same for cover in self.wide[width]) < COVERS_MAX:
                break
        else:
            width = WIDTHS[-1]
        if not any(self.wide):
            log.info("many filters: wider subscriptions cover further ones", subscriptions=len(self.subscriptions))
        cover = widened(key, width)
        self.wide[width].add(cover)
        return cover


def _is_publish(key: str) -> bool:
    return key.endswith(NO_VALUE)


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
        self._addresses = KnownAddresses(mapping.is_key_of, dropped)

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
        pairs = list(filters)
        for key, filter in pairs:
            self.wanted.add(key, filter)
        return self.covers.add(key for key, _ in pairs)

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
        by, lasts, brought_by, is_exact = self.wanted.by, self._lasts, (subscription,), ANY_SEGMENT not in subscription
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
            if (len(filters) == 1 and exact.get(key) is filters[0]) or self._addresses.agree(encoded, key):
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
                self._addresses.agree(encoded, keys[index])

        return self._listeners.deliver_encoded(shares, complete, unmatched)
