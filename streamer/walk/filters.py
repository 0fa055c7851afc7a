"""Filters: the listener of one endpoint is registered for exactly what is needed.

rules, services inside, recording --------> fixed filters --+-> wanted, and not registered: register
Interest.changed_since --> those topics --> wanted? covered? +-> registered, and not wanted: unregister
                           all of them at the start, and when      '- refused: again with the next `retry`
                           rules or covers change

before the network is opened: announced to its transport, which registers them within `open`

The cost follows the change: one more subscription costs one check of its topic, for any number of topics.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from typing import Final

from streamer.walk.endpoint import Endpoint
from streamer.walk.hosted import HostedTransport
from streamer.walk.view import View
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.usubscription.wire import to_uri
from uprotocol.status import RETRYABLE, UStatusError
from uprotocol.transport import Capability, UListener
from uprotocol.uri import Key
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.interest import Interest

CHECKED_MAX: Final = 256  # topics in one step of the loop, some 3 ms
ASKED_AT_ONCE: Final = 1_024  # filters that are registered together, plus those that one step finds
PUBLISHERS: Final = ids.of_publisher(uris.ANY, ids.ANNOUNCEMENTS)  # announcements of publishers with their own history

FilterKey = tuple[Key, Key | None]
EndpointFilter = tuple[UUri, UUri | None]
"""Source filter and sink filter."""


class EndpointFilters:
    """The filters with which `listener` is registered at one endpoint. Lives on the loop."""

    def __init__(
        self, endpoint: Endpoint, view: View, hosted: HostedTransport, record: Iterable[UUri], listener: UListener
    ) -> None:
        """`record`: the topics that are kept even if nobody has subscribed."""
        self._endpoint, self._view, self._hosted = endpoint, view, hosted
        self._record, self._listener = tuple(record), listener
        # if publishes carry the streamer's sink, no topic needs a filter of its own
        self._takes_topics = Capability.PUBLISH_WITHOUT_SINK in endpoint.transport.capabilities
        self._registered: dict[FilterKey, EndpointFilter] = {}
        self._unsure: set[FilterKey] = set()  # registered, but the transport may have forgotten it
        self._fixed: dict[FilterKey, EndpointFilter] = {}  # needed whatever the interest is
        self._covers: dict[Key, None] = {}  # sources of fixed filters with wildcards and no sink
        self._shapes: set[uris.Shape] = set()  # of the covers
        self._made_for: tuple[int, bool] | None = None  # version of the rules, and whether the interest can list topics
        self._seen: int | None = None  # version of the interest that was last checked; None: none yet
        self._due: dict[FilterKey, None] = {}  # to be checked; stays if a sync is cancelled
        self._refused: dict[FilterKey, UStatusError] = {}
        self._announced: dict[FilterKey, EndpointFilter] = {}  # registered before the network was opened
        self._turn = asyncio.Lock()
        self.looks = 0  # checks of a filter

    def __len__(self) -> int:
        return len(self._registered)

    def __iter__(self) -> Iterator[FilterKey]:
        return iter(self._registered)

    def services_changed(self) -> None:
        """Have the next `sync` make the fixed filters again: the hosted services have changed."""
        self._made_for = None

    def register_again(self) -> None:
        """Have the next `sync` register all filters again: the transport was closed and is opened again."""
        self._unsure.update(self._registered)
        self._due.update(dict.fromkeys(self._registered))

    async def sync(self, interest: Interest, *, retry: bool = True) -> None:
        """Register what is needed now. `retry`: also try refused filters again.

        Raises the first UStatusError of a refused filter, after everything else was tried. If the network
        does not answer at all, the rest is left for the next try.
        """
        async with self._turn:
            self._find_due(interest)
            if retry:
                self._due.update(dict.fromkeys(self._refused))
                self._refused.clear()
            await self._check_due()
            if self._announced:
                await self._withdraw()
            for error in self._refused.values():
                raise error

    async def announce(self, interest: Interest) -> None:
        """Before the network is opened, register what is needed with the transport, if it supports that, so that no
        message is missed. The `sync` after the opening gets the network's answers.
        """
        async with self._turn:
            self._find_due(interest)
            due = list(self._due)
            for start in range(0, len(due), CHECKED_MAX):
                if start:
                    await asyncio.sleep(0)
                found = {key: wanted for key in due[start : start + CHECKED_MAX] if (wanted := self._wanted(key))}
                statuses = self._endpoint.register_before_open(list(found.values()), self._listener)
                for (key, filter), status in zip(found.items(), statuses, strict=True):
                    if not status.code:
                        self._announced[key] = filter

    async def _withdraw(self) -> None:
        """Unregister announced filters that are no longer needed."""
        announced, self._announced = self._announced, {}
        for key, (source, sink) in announced.items():
            if key not in self._registered and key not in self._refused:
                with contextlib.suppress(UStatusError):
                    await self._endpoint.unregister_listener(source, self._listener, sink)

    # What to check

    def _find_due(self, interest: Interest) -> None:
        """Find the filters to check: new fixed ones first, superfluous ones last, so that no topic is missed."""
        rules, can_list = self._view.rules.version, interest.can_list
        topics = interest.changed_since(self._seen) if self._seen is not None else None
        old = self._fixed
        if self._made_for != (rules, can_list):
            covers = self._covers
            self._fixed = self._make_fixed(all_publishes=not can_list)
            if self._made_for is None or self._made_for[0] != rules or self._covers != covers:
                topics = None
            self._made_for = rules, can_list
            self._due.update(dict.fromkeys(self._fixed))
        self._seen = interest.version
        if self._takes_topics:
            if topics is None:
                self._due.update({(uris.key(topic), None): None for topic in interest.topics()})
                self._due.update({key: None for key in self._registered if key[1] is None})
            else:  # in a fixed order, so that a run can be replayed
                self._due.update({(topic, None): None for topic in sorted(topics)})
        for key in old:
            if key not in self._fixed:
                self._due.pop(key, None)
                self._due[key] = None

    def _make_fixed(self, *, all_publishes: bool) -> dict[FilterKey, EndpointFilter]:
        """Returns the fixed filters, without those that another one covers, since a network may deliver once for each
        filter. `all_publishes`: a uSubscription can't list topics, so listen to every publish."""
        peers = [self._view.endpoints[name] for name in self._view.rules.egresses(self._endpoint.name)]
        known = {authority for peer in peers for authority in peer.authorities}
        if any(map(uris.is_pattern, known)):
            known = {uris.WILDCARD_AUTHORITY}
        sinks = [uris.pattern(authority) for authority in sorted(known)]
        if uris.WILDCARD_AUTHORITY not in known:
            sinks += [filter for filter in self._hosted.sinks() if filter.authority_name not in known]
        fixed: dict[FilterKey, EndpointFilter] = {
            (uris.key(uris.ANY), uris.key(sink)): (uris.ANY, sink) for sink in sinks
        }
        if not self._takes_topics:
            return fixed
        sources = {
            uris.key(source): source
            for pattern in ([uris.ANY] if all_publishes else [*self._record, PUBLISHERS])
            for source in self._at_home(pattern)
        }
        self._covers = {key: None for key in sources if uris.shape(key) != uris.EXACT}
        self._shapes = {uris.shape(key) for key in self._covers}
        fixed |= {(key, None): (source, None) for key, source in sources.items() if not self._is_covered(key)}
        return fixed

    def _at_home(self, pattern: UUri) -> list[UUri]:
        """Returns `pattern`, limited to the authorities of this endpoint."""
        endpoints, authorities = self._view.endpoints, self._endpoint.authorities
        if pattern.authority_name != uris.WILDCARD_AUTHORITY:
            authorities = frozenset([pattern.authority_name])
        elif any(map(uris.is_pattern, authorities)):
            return [pattern]
        owned = (authority for authority in sorted(authorities) if endpoints.owner(authority) is self._endpoint)
        return [uris.of_authority(pattern, authority) for authority in owned]

    def _is_covered(self, source: Key) -> bool:
        masks = (uris.masked(source, shape) for shape in self._shapes)
        return any(mask != source and mask in self._covers for mask in masks)

    # Wanted filters

    def _wanted(self, key: FilterKey) -> EndpointFilter | None:
        fixed = self._fixed.get(key)
        if fixed is not None:
            return fixed
        source, sink = key
        if sink is not None or not self._takes_topics or self._is_covered(source):
            return None
        topic = to_uri(source)
        return (topic, None) if self._view.leaves(self._endpoint, topic) else None

    async def _check_due(self) -> None:
        due, missing = list(self._due), dict[FilterKey, EndpointFilter]()
        for start in range(0, len(due), CHECKED_MAX):
            if start:
                await asyncio.sleep(0)
            superfluous: dict[FilterKey, EndpointFilter] = {}
            for key in due[start : start + CHECKED_MAX]:
                self.looks += 1
                wanted, known = self._wanted(key), self._registered.get(key)
                if wanted is not None and (known is None or key in self._unsure):
                    missing[key] = wanted
                elif wanted is None and known is not None:
                    superfluous[key] = known
                else:
                    del self._due[key]
            is_last = start + CHECKED_MAX >= len(due)
            if missing and (superfluous or is_last or len(missing) >= ASKED_AT_ONCE):
                if not await self._register(missing):
                    return
                missing.clear()
            if superfluous:
                await self._unregister(superfluous)

    async def _register(self, filters: dict[FilterKey, EndpointFilter]) -> bool:
        """Returns False if the network does not answer now, so that the rest is left for later."""
        statuses = await self._endpoint.register_listeners(list(filters.values()), self._listener)
        silent = 0
        for (key, filter), status in zip(filters.items(), statuses, strict=True):
            del self._due[key]
            if not status.code:
                self._registered[key] = filter
                self._unsure.discard(key)
            else:
                self._refused[key] = UStatusError.from_status(status)
                silent += status.code in RETRYABLE
        if silent == len(filters):
            self._refused.update(dict.fromkeys(self._due, UStatusError.from_status(statuses[0])))
            self._due.clear()
        return silent < len(filters)

    async def _unregister(self, filters: dict[FilterKey, EndpointFilter]) -> None:
        """Unregister filters. One that fails counts as unregistered, and is registered when it is wanted again."""
        for key, (source, sink) in filters.items():
            try:
                await self._endpoint.unregister_listener(source, self._listener, sink)
            except UStatusError as error:
                if error.code != UCode.NOT_FOUND:
                    self._refused[key] = error
            del self._due[key]
            del self._registered[key]
            self._unsure.discard(key)
