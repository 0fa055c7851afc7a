"""Adds and removes endpoints and rules of a running streamer; starts and closes the endpoints.

section -> Endpoint -> ingress, a pump for each log, clocks -> registered with every part that serves all endpoints
                       '-> tasks: network, express queue, pumps        (express, networks, states, follows, ...)
remove: tasks end -> network is closed -> removed from every part; its cursors stay in the logs, as after a restart
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

import structlog

from streamer import parts
from streamer.assembly import Attached
from streamer.config import EndpointSection, FollowSection, RuleSection
from streamer.egress.pump import pass_unwanted
from streamer.lifecycle import NETWORKS_CLOSE_S, within
from streamer.reports import ReportingAssembly
from streamer.walk.endpoint import Endpoint
from streamer.walk.view import Rule
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription_client import InterestSource, ServiceInterest

log = structlog.get_logger()


class ChangeableAssembly(ReportingAssembly):
    """An assembly whose endpoints and rules change while it runs."""

    def start_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts a task that is cancelled when the streamer stops. If it fails, the streamer stops."""
        task = self.group.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def start_endpoints(self) -> None:
        for attached in self.attached.values():
            self.start_endpoint(attached)

    def start_endpoint(self, attached: Attached) -> None:
        endpoint = attached.endpoint
        attached.express_task = self.start_task(self.express.queues[endpoint.name].run(), f"express {endpoint.name}")
        self._start_network(attached)
        self._start_pumps(attached)

    def _start_network(self, attached: Attached) -> None:
        endpoint = attached.endpoint
        endpoint.transport.on_connection(self.connection_changed)
        endpoint.transport.on_connection(partial(self._connection_changed, endpoint))
        attached.network_task = self.start_task(self.networks.run(endpoint), f"network {endpoint.name}")

    def _start_pumps(self, attached: Attached) -> None:
        name = attached.endpoint.name
        attached.pump_tasks = [self.start_task(pump.run(), f"pump {name}") for pump in attached.pumps]

    async def close_endpoints(self) -> None:
        """Closes all networks concurrently."""
        attached = self.attached.values()
        closing = [within(NETWORKS_CLOSE_S, one.endpoint.name, one.endpoint.close()) for one in attached]
        results = await asyncio.gather(*closing, return_exceptions=True)
        for one in attached:
            one.ingress.close()
        for error in filter(None, results):
            raise error

    async def pause_endpoint(self, attached: Attached, *, close: bool) -> None:
        """Stops the pumps of an endpoint, and closes its network within NETWORKS_CLOSE_S if `close`. `renew` goes on
        in a later step."""
        network = [attached.network_task] if close and attached.network_task is not None else []
        await end([*attached.pump_tasks, *network])
        if close:
            await within(NETWORKS_CLOSE_S, attached.endpoint.name, attached.endpoint.close())

    def renew(self, attached: Attached, section: EndpointSection, *, is_closed: bool) -> None:
        """Makes the pumps of an endpoint anew, and its ingress and network if it was closed. The endpoint and the
        configuration are changed already. Its parts run again with `resume`."""
        endpoint, name = attached.endpoint, attached.endpoint.name
        self._remove_pumps(attached)
        if is_closed:
            attached.ingress.close()
            self.networks.remove_endpoint(name)
            made = self.make_endpoint(endpoint)
            attached.ingress, attached.clocks = made.ingress, made.clocks
            attached.pumps, attached.registrations = made.pumps, made.registrations
            self.attached[name] = attached
            self.networks.add_endpoint(endpoint)
        else:
            attached.pumps = self.make_pumps(endpoint)
            attached.registrations = [self.interest.on_change(pump.interest_changed) for pump in attached.pumps]
        self._begin(attached, section)

    def resume(self, attached: Attached, *, is_closed: bool) -> None:
        """Starts what `renew` has made."""
        if is_closed:
            self._start_network(attached)
        self._start_pumps(attached)

    # Changes of rules and endpoints

    async def add_rule(self, rule: Rule) -> None:
        """Adds a rule. Raises ALREADY_EXISTS, NOT_FOUND (unknown endpoint) or a network's error; then nothing has
        changed."""
        for name in (rule.ingress, rule.egress):
            self._check_known(name)
        self.rules.add(rule)
        for error in await self.networks.listen():
            self.rules.remove(rule.ingress, rule.egress)
            await self.networks.listen()
            raise error

    async def remove_rule(self, ingress: str, egress: str) -> None:
        """Removes a rule. Raises NOT_FOUND."""
        self.rules.remove(ingress, egress)
        for error in await self.networks.listen():
            raise error

    async def add_endpoint(
        self, section: EndpointSection, rules: Iterable[RuleSection] = (), follow: Iterable[FollowSection] = ()
    ) -> None:
        """Adds an endpoint, the rules that name it, and the histories to follow there. Its network is opened in the
        background; `states` has the result. Raises INVALID_ARGUMENT if it does not fit the configuration,
        FAILED_PRECONDITION before the streamer is ready; then nothing has changed."""
        async with self.turn:
            if not self.ready.is_set() or self.stopping.is_set():
                raise UStatusError(UCode.FAILED_PRECONDITION, "endpoints are added while the streamer runs: try again")
            config, follow = self.config, list(follow)
            self.config = config.with_endpoint(section, rules := list(rules), follow)
            try:
                await self._attach(section, follow)
            except BaseException:
                self.config = config
                raise
            for rule in rules:
                self.rules.add(parts.rule_of(rule))
            self.networks.listen_soon()
            log.info("an endpoint was added", endpoint=section.name)

    async def remove_endpoint(self, name: str) -> None:
        """Removes an endpoint with its rules. Its backlog in the logs is kept for an endpoint of the same name. Raises
        NOT_FOUND; FAILED_PRECONDITION for the endpoint of our own authority; INVALID_ARGUMENT if something else in
        the configuration needs it."""
        async with self.turn:
            self._check_known(name)
            if self.endpoints[name] is self.home:
                what = f"endpoint {name!r} can't be removed: it has our own authority {self.config.authority!r}"
                raise UStatusError(UCode.FAILED_PRECONDITION, what)
            config = self.config.without_endpoint(name)
            await self._detach(name)
            for rule in [one for one in self.rules if name in (one.ingress, one.egress)]:
                self.rules.remove(rule.ingress, rule.egress)
            self.config = config
            self.networks.listen_soon()
            self.states.look()
            log.info("an endpoint was removed", endpoint=name)

    def _check_known(self, name: str) -> None:
        if name not in self.endpoints:
            known = ", ".join(endpoint.name for endpoint in self.endpoints)
            raise UStatusError(UCode.NOT_FOUND, f"unknown endpoint {name!r}; known: {known}")

    async def _attach(self, section: EndpointSection, follow: Iterable[FollowSection]) -> None:
        """Creates and starts an endpoint that is in the configuration. Raises UStatusError for an unusable file; then
        nothing has changed."""
        made = self.add_stopped(parts.endpoint_of(self.config, section), section, follow)
        self.rules.changed()
        try:
            await self.ask_usubscriptions(section, self._remote_authorities(section))
        except BaseException:
            await self.stop_endpoint(made)
            await self._forget_usubscriptions(section.authorities)
            self.remove_stopped(made)
            raise
        self.start_endpoint(made)

    def add_stopped(self, endpoint: Endpoint, section: EndpointSection, follow: Iterable[FollowSection]) -> Attached:
        """Adds an endpoint to all parts, in one step."""
        self.endpoints.add(endpoint)
        made = self.make_endpoint(endpoint)
        self.express.add_endpoint(endpoint)
        self.networks.add_endpoint(endpoint)
        self.states.add_endpoint(endpoint.name)
        self._begin(made, section)
        self.claims.find_unclaimed()
        self.hosted.endpoint_added(endpoint)
        self.follows.add_endpoint(endpoint, [parts.follow_of(one, self.endpoints) for one in follow])
        return made

    def _begin(self, made: Attached, section: EndpointSection) -> None:
        """Has new pumps continue at their cursors."""
        followed_by = uris.parse(section.followed_by) if section.followed_by is not None else None
        self.handovers.add_endpoint(made.endpoint, made.pumps, followed_by)
        self.certificates.add(section.name, parts.certificates_of_endpoint(section))
        for pump in made.pumps:
            pump.begin()  # before its network listens: records from now on are for this endpoint, too
        self.handovers.load_endpoint(section.name)

    async def _detach(self, name: str) -> None:
        """Removes an endpoint from all parts. Closes its network within NETWORKS_CLOSE_S."""
        attached = self.attached[name]
        await self.stop_endpoint(attached)
        await self.follows.remove_endpoint(attached.endpoint)
        await self._forget_usubscriptions(attached.endpoint.authorities)
        self.remove_stopped(attached)
        self.claims.find_unclaimed()

    async def stop_endpoint(self, attached: Attached) -> None:
        """Ends the tasks of an endpoint, and closes its network within NETWORKS_CLOSE_S."""
        await end(attached.tasks)
        await within(NETWORKS_CLOSE_S, attached.endpoint.name, attached.endpoint.close())

    def remove_stopped(self, attached: Attached) -> None:
        """Removes a stopped endpoint from all parts, in one step."""
        endpoint, name = attached.endpoint, attached.endpoint.name
        for pump in attached.pumps:
            pass_unwanted(pump)
        self._remove_pumps(attached)
        attached.ingress.close()
        endpoint.sends.close()
        del self.attached[name], self.ingresses[name]
        self.endpoints.remove(endpoint)
        self.rules.changed()
        self.express.remove_endpoint(name)
        self.networks.remove_endpoint(name)
        self.states.remove_endpoint(name)
        self.meters.remove_endpoint(endpoint)
        self.ledger.remove_endpoint(name)
        self.keeper.back(name)

    def _remove_pumps(self, attached: Attached) -> None:
        """Removes the stopped pumps of an endpoint. Their cursors stay."""
        for remove in attached.registrations:
            remove()
        for pump in attached.pumps:
            pump.close()
            self.pumps.remove(pump)
            self.meters.remove_pump(pump)
        self.handovers.remove_endpoint(attached.endpoint.name)
        self.certificates.remove(attached.endpoint.name)

    # What the uSubscription services on an endpoint's network say

    def _remote_authorities(self, section: EndpointSection) -> set[str]:
        """Returns the authorities whose uSubscription is asked at this endpoint."""
        return set(parts.remote_authorities_of(self.config, section))

    async def ask_usubscriptions(
        self, section: EndpointSection, authorities: Collection[str], before: Mapping[str, InterestSource] | None = None
    ) -> None:
        """Asks the uSubscription services of these authorities at an endpoint. `before`: sources that they replace,
        whose subscriptions serve until they answer. Raises UStatusError for an unusable file."""
        made = parts.remote_sources_of(
            self.config, section, self.hosted, self.endpoints, self.runtime, lambda authority: authority in authorities
        )
        for source in made:
            await source.load()
            if before is not None and source.name in before:
                source.continue_from(before[source.name])
            await self.interest.add_source(source)
            task = self.start_task(source.start(), f"learn the interest {section.name}")
            self.attached[section.name].asking[source.name] = task

    async def _forget_usubscriptions(self, authorities: Collection[str]) -> None:
        """Asks the uSubscription services of these authorities no more."""
        for source in [one for one in self.interest.sources if isinstance(one, ServiceInterest)]:
            if source.name in authorities:
                await self.stop_asking(source)
                await self.interest.remove_source(source)

    async def stop_asking(self, source: ServiceInterest) -> None:
        """Asks a uSubscription service no more, and saves what it has said, which still serves."""
        await end([task for one in self.attached.values() if (task := one.asking.pop(source.name, None))])
        await source.stop()
        await source.transport.close()


async def end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancels tasks, and returns once they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
