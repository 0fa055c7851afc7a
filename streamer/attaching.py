"""Adds and removes endpoints and rules of a running streamer; starts and closes the endpoints.

section -> Endpoint -> ingress, a pump for each log, clocks -> registered with every part that serves all endpoints
                       '-> tasks: network, express queue, pumps        (express, networks, states, follows, ...)
remove: tasks end -> network is closed -> removed from every part; its cursors stay in the logs, as after a restart
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

import structlog

from streamer import parts
from streamer.assembly import Assembly, Attached
from streamer.config import EndpointSection, FollowSection, RuleSection
from streamer.egress.holds import SHOWN_AFTER_S, Label
from streamer.lifecycle import NETWORKS_CLOSE_S, within
from streamer.operating import metrics
from streamer.operating.states import Condition, Sample
from streamer.walk.view import Rule
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription_client import ServiceInterest

StartTask = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]

log = structlog.get_logger()


class RunningEndpoints:
    """`start_task(work, name)` starts a task that ends with the streamer."""

    def __init__(self, streamer: Assembly, start_task: StartTask) -> None:
        self._streamer, self._start_task = streamer, start_task
        self._turn = asyncio.Lock()  # serialises changes of the endpoints

    async def start(self) -> None:
        for attached in self._streamer.attached.values():
            self._start(attached)

    def _start(self, attached: Attached) -> None:
        endpoint, streamer, start_task = attached.endpoint, self._streamer, self._start_task
        endpoint.transport.on_connection(streamer.connection_changed)
        attached.tasks = [
            start_task(streamer.express.queues[endpoint.name].run(), f"express {endpoint.name}"),
            start_task(streamer.networks.run(endpoint), f"network {endpoint.name}"),
            *(start_task(pump.run(), f"pump {endpoint.name}") for pump in attached.pumps),
        ]

    async def close(self) -> None:
        """Closes all networks concurrently."""
        attached = self._streamer.attached.values()
        closing = [within(NETWORKS_CLOSE_S, one.endpoint.name, one.endpoint.close()) for one in attached]
        results = await asyncio.gather(*closing, return_exceptions=True)
        for one in attached:
            one.ingress.close()
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise errors[0]

    # Changes of rules and endpoints

    async def add_rule(self, rule: Rule) -> None:
        """Adds a rule. Raises ALREADY_EXISTS, NOT_FOUND (unknown endpoint) or a network's error; then nothing has
        changed."""
        streamer = self._streamer
        for name in (rule.ingress, rule.egress):
            self._check_known(name)
        streamer.rules.add(rule)
        for error in await streamer.networks.listen():
            streamer.rules.remove(rule.ingress, rule.egress)
            await streamer.networks.listen()
            raise error

    async def remove_rule(self, ingress: str, egress: str) -> None:
        """Removes a rule. Raises NOT_FOUND."""
        self._streamer.rules.remove(ingress, egress)
        for error in await self._streamer.networks.listen():
            raise error

    async def add_endpoint(
        self, section: EndpointSection, rules: Iterable[RuleSection] = (), follow: Iterable[FollowSection] = ()
    ) -> None:
        """Adds an endpoint, the rules that name it, and the histories to follow there. Its network is opened in the
        background; `states` has the result. Raises INVALID_ARGUMENT if it does not fit the configuration,
        FAILED_PRECONDITION before the streamer is ready; then nothing has changed."""
        streamer = self._streamer
        async with self._turn:
            if not streamer.ready.is_set() or streamer.stopping.is_set():
                raise UStatusError(UCode.FAILED_PRECONDITION, "endpoints are added while the streamer runs: try again")
            config, follow = streamer.config, list(follow)
            streamer.config = config.with_endpoint(section, rules := list(rules), follow)
            try:
                await self._attach(section, follow)
            except BaseException:
                streamer.config = config
                raise
            for rule in rules:
                streamer.rules.add(parts.rule_of(rule))
            streamer.networks.listen_soon()
            log.info("an endpoint was added", endpoint=section.name)

    async def remove_endpoint(self, name: str) -> None:
        """Removes an endpoint with its rules. Its backlog in the logs is kept for an endpoint of the same name. Raises
        NOT_FOUND; FAILED_PRECONDITION for the endpoint of our own authority; INVALID_ARGUMENT if something else in
        the configuration needs it."""
        streamer = self._streamer
        async with self._turn:
            self._check_known(name)
            if streamer.endpoints[name] is streamer.home:
                what = f"endpoint {name!r} can't be removed: it has our own authority {streamer.config.authority!r}"
                raise UStatusError(UCode.FAILED_PRECONDITION, what)
            config = streamer.config.without_endpoint(name)
            await self._detach(name)
            for rule in [one for one in streamer.rules if name in (one.ingress, one.egress)]:
                streamer.rules.remove(rule.ingress, rule.egress)
            streamer.config = config
            streamer.networks.listen_soon()
            streamer.states.look()
            log.info("an endpoint was removed", endpoint=name)

    def _check_known(self, name: str) -> None:
        endpoints = self._streamer.endpoints
        if name not in endpoints:
            known = ", ".join(endpoint.name for endpoint in endpoints)
            raise UStatusError(UCode.NOT_FOUND, f"unknown endpoint {name!r}; known: {known}")

    async def _attach(self, section: EndpointSection, follow: Iterable[FollowSection]) -> None:
        """Creates and starts an endpoint that is in the configuration. Raises UStatusError for an unusable file; then
        nothing has changed."""
        streamer = self._streamer
        config = streamer.config
        endpoint = parts.endpoint_of(config, section)
        streamer.endpoints.add(endpoint)
        made = streamer.make_endpoint(endpoint, config)
        streamer.express.add_endpoint(endpoint)
        streamer.networks.add_endpoint(endpoint)
        streamer.states.add_endpoint(endpoint.name)
        followed_by = uris.parse(section.followed_by) if section.followed_by is not None else None
        streamer.handovers.add_endpoint(endpoint, made.pumps, followed_by)
        streamer.certificates.add(endpoint.name, parts.certificates_of_endpoint(section))
        for pump in made.pumps:
            pump.begin()  # before its network listens: records from now on are for this endpoint, too
        streamer.handovers.load_endpoint(endpoint.name)
        streamer.claims.find_unclaimed()
        streamer.hosted.endpoint_added(endpoint)
        streamer.follows.add_endpoint(endpoint, [parts.follow_of(one, streamer.endpoints) for one in follow])
        streamer.rules.changed()
        try:
            await self._ask_services(made, section)
        except BaseException:
            await self._detach(endpoint.name)
            raise
        self._start(made)

    async def _ask_services(self, made: Attached, section: EndpointSection) -> None:
        streamer = self._streamer
        sources = parts.remote_sources_of(
            streamer.config, section, streamer.hosted, streamer.endpoints, streamer.runtime
        )
        for source in sources:
            await streamer.interest.add_source(source)
            made.tasks.append(self._start_task(source.start(), f"learn the interest {made.endpoint.name}"))

    async def _detach(self, name: str) -> None:
        """Removes an endpoint from all parts. Closes its network within NETWORKS_CLOSE_S."""
        streamer, attached = self._streamer, self._streamer.attached[name]
        endpoint = attached.endpoint
        for task in attached.tasks:
            task.cancel()
        await asyncio.gather(*attached.tasks, return_exceptions=True)
        await streamer.follows.remove_endpoint(endpoint)
        for source in [one for one in streamer.interest.sources if isinstance(one, ServiceInterest)]:
            if source.name in endpoint.authorities:
                await streamer.interest.remove_source(source)
        await within(NETWORKS_CLOSE_S, name, endpoint.close())
        # no `await` from here on: all parts must remove it in one step
        del streamer.attached[name], streamer.ingresses[name], streamer.clocks[name]
        attached.ingress.close()
        endpoint.sends.close()
        for pump in attached.pumps:
            pump.close()
            streamer.pumps.remove(pump)
        streamer.endpoints.remove(endpoint)
        streamer.rules.changed()
        streamer.express.remove_endpoint(name)
        streamer.networks.remove_endpoint(name)
        streamer.handovers.remove_endpoint(name)
        streamer.certificates.remove(name)
        streamer.states.remove_endpoint(name)
        streamer.ledger.remove_endpoint(name)
        streamer.claims.find_unclaimed()

    # Reports

    def conditions(self) -> Iterator[Condition]:
        for pump in self._streamer.pumps:
            if pump.trouble:
                yield Condition(pump.trouble, pump.peer.name, is_fatal=True)
        for name, clocks in self._streamer.clocks.items():
            if clocks.trouble:
                yield Condition(clocks.trouble, name)
        yield from self._held("refused", "left")

    def _held(self, *labels: Label) -> Iterator[Condition]:
        """Yields holds with these labels that have lasted long enough to be reported."""
        now_ms = self._streamer.runtime.now_ms()
        for pump in self._streamer.pumps:
            for held in pump.address_holds.states():
                if held.label in labels and held.waited_s >= SHOWN_AFTER_S:
                    yield Condition(held.sentence(now_ms), pump.peer.name)

    def samples(self) -> Iterator[Sample]:
        streamer = self._streamer
        for one in streamer.attached.values():
            endpoint = one.endpoint
            yield from metrics.of_endpoint(endpoint, is_connected=streamer.is_connected(endpoint))
            yield "express_waiting", (endpoint.name,), len(streamer.express.queues[endpoint.name])
            for pump in one.pumps:
                yield from metrics.of_pump(pump, streamer.claims.absent_ms(pump))

    def notes(self) -> Iterator[str]:
        return (one.problem for one in self._held("unheard"))
