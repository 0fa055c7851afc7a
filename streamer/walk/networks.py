"""Networks: opens every endpoint, keeps it open, and has its ingress listen to exactly what is needed.

run, separately for each endpoint:
    announce what is needed -> open -- away? retried --> connected / lost -> callbacks of the owner
            ^---- close, HUNG_S_MAX at most, if its transport does not return from sending (Sends)
    -> sync: its ingress listens to what rules, interest and services need  <-- one of these has changed
                       ^---- the network refuses: retried after a while

EndpointFilters of one endpoint:
    rules, services inside, recording --------> fixed filters --+-> wanted, and not registered: register
    Interest.changed_since --> those topics --> wanted? covered? +-> registered, and not wanted: unregister
                               all of them at the start, and when      '- refused: again with the next `retry`
                               rules or covers change

The cost follows the change: one more subscription costs one check of its topic, for any number of topics. An endpoint
whose network hangs, or is away at the start, is retried; the others are not affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from streamer.data_dir import transport_file
from streamer.reporting import OPENING, Condition, Reporter
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.hosted import HostedTransport
from streamer.walk.ingress import PUBLISHERS, Ingress
from streamer.walk.view import View
from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import to_uri
from uprotocol.pacing import Backoff
from uprotocol.status import RETRYABLE, UStatusError
from uprotocol.tasks import wait_until
from uprotocol.transport import Capability, UListener
from uprotocol.uri import Key
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.interest import Interest, Topics

JUST_GONE_S: Final = 5.0  # a network that went away more recently may be back soon (a broker restarts), so ...
BACK_SOON_S: Final = 2.0  # ... a Subscribe is answered once it is back, or after this time; callers wait longer
OPEN_MS_MIN: Final = 500  # between attempts to open a network, so that a broker that refuses us is not flooded
HUNG_S_MAX: Final = 10.0  # for closing a transport that hangs; ours take 4 s at most
TOPICS_STEP_MAX: Final = 256  # topics in one step of the loop, some 3 ms
ASKED_AT_ONCE: Final = 1_024  # filters that are registered together, plus those that one step finds

FilterKey = tuple[Key, Key | None]
EndpointFilter = tuple[UUri, UUri | None]
"""Source filter and sink filter."""

log = structlog.get_logger()


class EndpointNetwork:
    """What is known of the network of one endpoint. Times are of the loop."""

    def __init__(self, endpoint: Endpoint, filters: EndpointFilters) -> None:
        self.endpoint, self.filters = endpoint, filters
        self.is_open = False  # the transport has been opened
        self.knows_all_registered = False  # `all_registered` was called since the transport was opened
        self.was_connected = False  # else, if it only listens, it may have no partner yet
        self.trouble = ""  # why it is not open or not listening
        self.away_since: float | None = asyncio.get_running_loop().time()
        self.back_soon_since: float | None = None  # when it was first opened, or went away and may be back soon
        self.tried = asyncio.Event()  # set once it listens or has failed to
        self.changed = asyncio.Event()  # set when other filters are needed
        self.may_accept = False  # a network is new or back, and this one may now accept what it refused
        self.is_back = False  # it is new or back itself, and `on_listens` was not called since

    @property
    def is_connected(self) -> bool:
        connected = self.is_open and self.endpoint.connected
        self.was_connected = self.was_connected or connected  # some transports report reconnections only
        return connected

    def expect_soon(self) -> None:
        """Note that the network is away and may be back soon. Ignored if publishes carry the streamer's sink, since no
        topic then has a filter of its own that could be missing."""
        if not self.endpoint.needs_sink:
            self.back_soon_since = asyncio.get_running_loop().time()

    def conditions(self) -> Iterator[Condition]:
        """Yields conditions: one that is not open is not ready; one that refuses a filter is degraded."""
        endpoint, name, hangs = self.endpoint, self.endpoint.name, self.endpoint.sends.hung.is_set()
        if self.trouble:
            yield Condition(self.trouble, name, is_fatal=not self.is_open)
        elif not self.is_open and not hangs:
            yield Condition(OPENING, name, is_fatal=True)
        if endpoint.sends.trouble:
            yield Condition(endpoint.sends.trouble, name, is_fatal=True)
        is_away = self.is_open and not self.is_connected and self.was_connected and not hangs
        if is_away and not endpoint.transport.only_listens:
            why = endpoint.transport.away_because
            yield Condition("its network is away" + (f": {why}" if why else ""), name, is_fatal=True)
        if endpoint.fault:
            yield Condition(endpoint.fault, name, is_fatal=True)
        for trouble in endpoint.transport.troubles:
            yield Condition(trouble, name)


class Networks(Reporter):
    """The networks of all endpoints, by the name of the endpoint."""

    def __init__(
        self,
        endpoints: Endpoints,
        ingresses: Mapping[str, Ingress],
        view: View,
        interest: Interest,
        hosted: HostedTransport,
        record: Iterable[UUri],
        folder: Path,
        backoff: Callable[[], Backoff],
        on_connected: Callable[[Endpoint], None],
        on_loss: Callable[[Endpoint, str, int | None], None],
        on_listens: Callable[[Endpoint], None] = lambda _: None,
    ) -> None:
        """`record`: the topics that are kept even if nobody has subscribed. `folder`: where transports keep state for
        the next process. `on_listens`: called when a network that is new or back is listened to."""
        self._ingresses, self._view, self._interest = ingresses, view, interest
        self._hosted, self._record = hosted, tuple(record)
        self._folder, self._backoff, self._on_connected, self._on_loss = folder, backoff, on_connected, on_loss
        self._on_listens = on_listens
        self._networks: dict[str, EndpointNetwork] = {}
        self._back = asyncio.Event()  # set when a network is back or waiting has ended
        self._stopping = False
        self._services_listen = False  # all services inside have started
        for endpoint in endpoints:
            self.add_endpoint(endpoint)
        interest.on_change(self.listen_soon)

    def __getitem__(self, name: str) -> EndpointNetwork:
        return self._networks[name]

    def add_endpoint(self, endpoint: Endpoint) -> None:
        """Add an endpoint, which `run` opens."""
        ingress = self._ingresses[endpoint.name]
        filters = EndpointFilters(endpoint, self._view, self._hosted, self._record, ingress)
        self._networks[endpoint.name] = EndpointNetwork(endpoint, filters)

    def remove_endpoint(self, name: str) -> None:
        """Remove an endpoint, once its `run` was cancelled and its transport is closed."""
        del self._networks[name]
        self._back.set()

    def record(self, record: Iterable[UUri]) -> None:
        """Change the topics that are kept even if nobody has subscribed."""
        self._record = tuple(record)
        for network in self._networks.values():
            network.filters.record(self._record)
        self.listen_soon()

    async def run(self, endpoint: Endpoint) -> None:
        """Open the transport, listen to what is needed, and reopen it when it hangs, until cancelled."""
        network = self._networks[endpoint.name]
        endpoint.transport.on_connection(lambda connected: self._connection(network, connected))
        endpoint.transport.on_loss(lambda what, messages: self._on_loss(endpoint, what, messages))
        endpoint.transport.remember_in(str(self._folder / transport_file(endpoint.name)))
        await self._open(network)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(network), name=f"listen {endpoint.name}")
            tasks.create_task(self._reopen_what_hangs(network), name=f"reopen {endpoint.name}")

    async def tried(self) -> None:
        """Wait until each endpoint listens, or the first attempt to open it has failed."""
        await asyncio.gather(*(network.tried.wait() for network in self._networks.values()))

    async def _open(self, network: EndpointNetwork) -> None:
        """Open the transport, with retries while the network is away."""
        endpoint, backoff = network.endpoint, self._backoff()
        network.expect_soon()
        while True:
            await network.filters.announce(self._interest)
            try:
                await endpoint.open()
                break
            except UStatusError as error:
                why = network.trouble = str(error)
            log.error(
                "an endpoint can't be opened; trying again", endpoint=endpoint.name, error=why, attempt=backoff.attempt
            )
            self._has_tried(network)
            await asyncio.sleep(max(backoff.next_ms(), OPEN_MS_MIN) / 1000)
        network.is_open, network.is_back, network.knows_all_registered, network.trouble = True, True, False, ""
        self.listen_soon(is_back=True)

    async def _reopen_what_hangs(self, network: EndpointNetwork) -> None:
        """Close a transport that hangs, open it again, and register all filters again, since it may have forgotten
        them. Nothing is sent meanwhile. If the close hangs as well, it is cancelled after HUNG_S_MAX."""
        endpoint = network.endpoint
        while True:
            await endpoint.sends.hung.wait()
            network.is_open = False
            closing = asyncio.ensure_future(endpoint.close())
            try:
                closed, _ = await asyncio.wait({closing}, timeout=HUNG_S_MAX)
            finally:
                closing.cancel()
            if not closed:
                log.error("a transport that hangs does not close either", endpoint=endpoint.name, waited_s=HUNG_S_MAX)
            elif (error := closing.exception()) is not None:
                log.error("a transport that hung failed to close", endpoint=endpoint.name, error=str(error))
            network.filters.register_again()
            await self._open(network)
            log.warning("a transport that hung was opened again", endpoint=endpoint.name)
            endpoint.sends.resume()
            self._on_connected(endpoint)

    def _has_tried(self, network: EndpointNetwork) -> None:
        if not network.tried.is_set():
            network.tried.set()
            network.back_soon_since = None
            self._back.set()

    def _connection(self, network: EndpointNetwork, connected: bool) -> None:
        log.info("connected" if connected else "connection lost", endpoint=network.endpoint.name, _kind="connection")
        if not connected:
            network.away_since = asyncio.get_running_loop().time()
            if not network.endpoint.transport.only_listens:  # a partner that connects to us gets all filters at once
                network.expect_soon()
        else:
            if network.tried.is_set():  # else it does not listen yet
                network.back_soon_since = None
            network.away_since, network.was_connected, network.is_back = None, True, True
            self.listen_soon(is_back=True)
            self._back.set()
            self._on_connected(network.endpoint)

    def is_connected(self, endpoint: Endpoint) -> bool:
        return self._networks[endpoint.name].is_connected

    def away_s(self, endpoint: Endpoint) -> float:
        """Returns how long its network has been away while the streamer ran; 0: it is connected."""
        now, network = asyncio.get_running_loop().time(), self._networks[endpoint.name]
        if network.is_connected:
            network.away_since = None
            return 0.0
        if network.away_since is None:
            network.away_since = now
        return now - network.away_since

    def conditions(self) -> Iterator[Condition]:
        for network in self._networks.values():
            yield from network.conditions()

    # Listening

    async def listen(self, *, retry: bool = True) -> list[UStatusError]:
        """Have every ingress that can listen to what is needed now; `retry`: also to filters that its network refused.

        Returns the first error of each network that refuses a filter or does not answer; `run` tries these again.
        """
        found = list[UStatusError]()
        opened = [network for network in self._networks.values() if network.is_open]
        errors = await asyncio.gather(*(self._listen(network, retry) for network in opened))
        for network, error in zip(opened, errors, strict=True):
            if error is not None:
                network.changed.set()
                found.append(error)
        return found

    async def _listen(self, network: EndpointNetwork, retry: bool) -> UStatusError | None:
        """Returns the error of a network that refuses a filter."""
        name = network.endpoint.name
        try:
            await network.filters.sync(self._interest, retry=retry)
        except UStatusError as error:
            network.trouble = f"listening failed: {error}"
            log.warning("could not listen to everything; trying again", endpoint=name, error=str(error))
            return error
        network.trouble = ""
        if self._services_listen and self._interest.complete and not network.knows_all_registered:
            network.knows_all_registered = True
            network.endpoint.all_registered()
        return None

    def services_listen(self) -> None:
        """Note that all services inside have started. Once the interest is complete, all filters are registered."""
        self._services_listen = True
        self.listen_soon()

    async def services_changed(self) -> None:
        for network in self._networks.values():
            network.filters.services_changed()
        await self.listen()

    def listen_soon(self, _: Topics = None, *, is_back: bool = False) -> None:
        """Listen soon to what is needed, which has changed. `is_back`: a network is new or back, and all networks may
        now accept what they refused."""
        for network in self._networks.values():
            network.may_accept = network.may_accept or is_back
            network.changed.set()

    async def _follow(self, network: EndpointNetwork) -> None:
        """Listen to what is needed whenever that changes, until cancelled. Refused filters are retried after a while,
        and at once when a network is back."""
        loop, backoff = asyncio.get_running_loop(), self._backoff()
        retry_at: float | None = None
        while True:
            await wait_until(network.changed, retry_at)
            network.changed.clear()
            retry = network.may_accept or (retry_at is not None and loop.time() >= retry_at)
            network.may_accept = False
            if await self._listen(network, retry) is not None:
                if retry or retry_at is None:
                    retry_at = loop.time() + backoff.next_ms() / 1000
            elif retry_at is not None:
                backoff = self._backoff()  # with the limits that are configured now
                retry_at = None
            self._has_tried(network)
            if network.is_back and network.is_connected:
                network.is_back = False
                self._on_listens(network.endpoint)

    async def listen_before_answer(self, _: Any) -> None:
        """Listen before the embedded service answers, so that nothing published after the answer is missed.

        Wait a little for a network that is being opened or has just gone away: messages that are published there
        before we are back are lost.
        """
        await self.listen(retry=False)
        loop = asyncio.get_running_loop()
        began = loop.time()
        while is_awaited := any(
            network.back_soon_since is not None and began - network.back_soon_since < JUST_GONE_S
            for network in self._networks.values()
        ):
            if loop.time() >= began + BACK_SOON_S or self._stopping:
                break
            self._back.clear()
            await wait_until(self._back, began + BACK_SOON_S)
            await self.listen()
        if is_awaited:
            log.info("a subscription is answered though a network is away: it counts there from when that is back")

    def stop_waiting(self) -> None:
        self._stopping = True
        self._back.set()


class EndpointFilters:
    """The filters with which `listener` is registered at one endpoint. Lives on the loop.

    Its state: the filters that are registered (`_registered`, of which `_unsure` may have been forgotten) or refused
    (`_refused`); those that are needed whatever the interest is (`_fixed`, with `_covers` and `_shapes`), as of
    `_made_for`; the version of the interest that was checked (`_seen`), and what is still to be checked (`_due`).
    """

    def __init__(
        self, endpoint: Endpoint, view: View, hosted: HostedTransport, record: Iterable[UUri], listener: UListener
    ) -> None:
        """`record`: the topics that are kept even if nobody has subscribed."""
        self._endpoint, self._view, self._hosted = endpoint, view, hosted
        self._record, self._listener = record, listener
        # if publishes carry the streamer's sink, no topic needs a filter of its own
        self._takes_topics = Capability.PUBLISH_WITHOUT_SINK in endpoint.transport.capabilities
        self._registered: dict[FilterKey, EndpointFilter] = {}
        # registered before the network was opened, or the transport may have forgotten it
        self._unsure: set[FilterKey] = set()
        self._fixed: dict[FilterKey, EndpointFilter] = {}  # needed whatever the interest is
        self._covers: dict[Key, None] = {}  # sources of fixed filters with wildcards and no sink
        self._shapes: set[uris.Shape] = set()  # of the covers
        self._made_for: tuple[int, bool] | None = None  # version of the rules, and whether the interest can list topics
        self._seen: int | None = None  # version of the interest that was last checked; None: none yet
        self._due: dict[FilterKey, None] = {}  # to be checked; stays if a sync is cancelled
        self._refused: dict[FilterKey, UStatusError] = {}
        self._turn = asyncio.Lock()
        self.looks = 0  # checks of a filter

    def services_changed(self) -> None:
        """Have the next `sync` make the fixed filters again: the hosted services have changed."""
        self._made_for = None

    def record(self, record: Iterable[UUri]) -> None:
        """Have the next `sync` make the fixed filters again, for other topics that are kept."""
        self._record, self._made_for = record, None

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
            for error in self._refused.values():
                raise error

    async def announce(self, interest: Interest) -> None:
        """Before the network is opened, register what is needed with the transport, if it supports that, so that no
        message is missed. The `sync` after the opening gets the network's answers.
        """
        async with self._turn:
            self._find_due(interest)
            due = list(self._due)
            for start in range(0, len(due), TOPICS_STEP_MAX):
                if start:
                    await asyncio.sleep(0)
                found = {key: wanted for key in due[start : start + TOPICS_STEP_MAX] if (wanted := self._wanted(key))}
                statuses = self._endpoint.register_before_open(list(found.values()), self._listener)
                for (key, filter), status in zip(found.items(), statuses, strict=True):
                    if not status.code:
                        self._registered[key] = filter
                        self._unsure.add(key)

    # What to check

    def _find_due(self, interest: Interest) -> None:
        """Find the filters to check: new fixed ones first, superfluous ones last, so that no topic is missed."""
        rules, can_list = self._view.rules.version, interest.can_list
        topics = interest.changed_since(self._seen) if self._seen is not None else None
        old = self._fixed
        if self._made_for != (rules, can_list):
            covers = self._covers
            self._fixed = self.make_fixed(all_publishes=not can_list)
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

    def make_fixed(self, *, all_publishes: bool) -> dict[FilterKey, EndpointFilter]:
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
        for key, source in sources.items():
            if not any(key != cover and uris.matches(sources[cover], source) for cover in self._covers):
                fixed[key, None] = source, None
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

    # Wanted filters

    def _wanted(self, key: FilterKey) -> EndpointFilter | None:
        fixed = self._fixed.get(key)
        if fixed is not None:
            return fixed
        source, sink = key
        if sink is not None or not self._takes_topics:
            return None
        if any(uris.masked(source, shape) in self._covers for shape in self._shapes):
            return None  # another filter covers it
        topic = to_uri(source)
        return (topic, None) if self._view.leaves(self._endpoint, topic) else None

    async def _check_due(self) -> None:
        due, missing = list(self._due), dict[FilterKey, EndpointFilter]()
        for start in range(0, len(due), TOPICS_STEP_MAX):
            if start:
                await asyncio.sleep(0)
            superfluous: dict[FilterKey, EndpointFilter] = {}
            for key in due[start : start + TOPICS_STEP_MAX]:
                self.looks += 1
                wanted, known = self._wanted(key), self._registered.get(key)
                if wanted is not None and (known is None or key in self._unsure):
                    missing[key] = wanted
                elif wanted is None and known is not None:
                    superfluous[key] = known
                else:
                    del self._due[key]
            is_last = start + TOPICS_STEP_MAX >= len(due)
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
