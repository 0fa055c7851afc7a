"""The endpoints, as parts: their tasks, the uSubscription services on their networks, and how they come and go.

section -> Endpoint -> ingress, a pump for each log -> Part.endpoint_added, pumps_added
                       '-> tasks: network, express queue, pumps
remove: tasks end -> network is closed -> Part.pumps_removed, endpoint_removed; its cursors stay in the logs
change: pumps end (and the network is closed) -> pumps_removed -> new pumps (and ingress) -> pumps_added -> tasks
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Final

import structlog

from streamer import building
from streamer.assembly import Attached
from streamer.config import Config, EndpointSection
from streamer.operating import metrics
from streamer.part import Part, within
from streamer.reporting import Condition, Sample
from streamer.walk.endpoint import Endpoint
from streamer.walk.ingress import Ingress
from uprotocol.tasks import end
from usubscription_client import InterestSource, ServiceInterest

NETWORKS_CLOSE_S: Final = 3.0  # for each, concurrently
# longest delay of `ready`: for networks to open, then for uSubscriptions to answer over the connected ones
NETWORKS_WAIT_S: Final = 5.0
INTEREST_WAIT_S: Final = 5.0

log = structlog.get_logger()


class EndpointPart(Part):
    name = "endpoints"

    async def start(self) -> None:
        for attached in self.assembly.attached.values():
            self.start_endpoint(attached)

    async def disconnect(self) -> None:
        """Closes all networks concurrently, then the way from them into the logs."""
        assembly = self.assembly
        closing = [within(NETWORKS_CLOSE_S, endpoint.name, endpoint.close()) for endpoint in assembly.endpoints]
        results = await asyncio.gather(*closing, return_exceptions=True)
        for ingress in (*assembly.ingresses.values(), assembly.entry):
            ingress.close()
        for flow in assembly.dispatch.flows.values():
            flow.close()
        for error in filter(None, results):
            raise error

    def conditions(self) -> Iterator[Condition]:
        return self.assembly.networks.conditions()

    def samples(self) -> Iterator[Sample]:
        for attached in self.assembly.attached.values():
            endpoint, queue = attached.endpoint, self.assembly.express.queues[attached.endpoint.name]
            is_connected = self.assembly.networks.is_connected(endpoint)
            yield from metrics.of_endpoint(endpoint, queue, is_connected=is_connected)

    # Tasks

    def start_endpoint(self, attached: Attached) -> None:
        name = attached.endpoint.name
        attached.express_task = self.assembly.tasks.start(self.assembly.express.queues[name].run(), f"express {name}")
        self._start_network(attached)
        self._start_pumps(attached)

    def _start_network(self, attached: Attached) -> None:
        endpoint = attached.endpoint
        for on_connection in self.assembly.on_connection:
            endpoint.transport.on_connection(partial(on_connection, endpoint))
        attached.network_task = self.assembly.tasks.start(
            self.assembly.networks.run(endpoint), f"network {endpoint.name}"
        )

    def _start_pumps(self, attached: Attached) -> None:
        name = attached.endpoint.name
        attached.pump_tasks = [self.assembly.tasks.start(pump.run(), f"pump {name}") for pump in attached.pumps]

    async def stop_endpoint(self, attached: Attached) -> None:
        """Ends the tasks of an endpoint, and closes its network within NETWORKS_CLOSE_S."""
        await end(*attached.tasks)
        await within(NETWORKS_CLOSE_S, attached.endpoint.name, attached.endpoint.close())

    async def pause_endpoint(self, attached: Attached, *, close: bool) -> None:
        """Stops the pumps of an endpoint, and closes its network within NETWORKS_CLOSE_S if `close`. `renew` goes on
        in a later step."""
        network = [attached.network_task] if close and attached.network_task is not None else []
        await end(*attached.pump_tasks, *network)
        if close:
            await within(NETWORKS_CLOSE_S, attached.endpoint.name, attached.endpoint.close())

    # Steps of a change, without `await`

    def add(self, endpoint: Endpoint, section: EndpointSection) -> Attached:
        """Adds an endpoint to all parts. It runs with `start_endpoint`."""
        attached = self.assembly.add_endpoint(endpoint)
        self.parts.add_endpoint(attached, section)
        self.parts.add_pumps(attached, section)
        return attached

    def remove(self, attached: Attached) -> None:
        """Removes a stopped endpoint from all parts."""
        for pump in attached.pumps:
            pump.waits.pass_unwanted()
        self.parts.remove_pumps(attached)
        self.assembly.remove_pumps(attached)
        self.parts.remove_endpoint(attached)
        self.assembly.remove_endpoint(attached)

    def renew(self, attached: Attached, section: EndpointSection, *, is_closed: bool) -> None:
        """Makes the pumps of an endpoint anew, and its ingress and network if it was closed. The endpoint and the
        configuration are changed already. Its parts run again with `resume`."""
        assembly, endpoint = self.assembly, attached.endpoint
        self.parts.remove_pumps(attached)
        assembly.remove_pumps(attached)
        assembly.make_pumps(attached)
        if is_closed:
            attached.ingress.close()
            assembly.networks.remove_endpoint(endpoint.name)
            attached.ingress = assembly.ingresses[endpoint.name] = Ingress(endpoint, assembly.dispatch)
            assembly.networks.add_endpoint(endpoint)
        self.parts.add_pumps(attached, section)

    def resume(self, attached: Attached, *, is_closed: bool) -> None:
        """Starts what `renew` has made."""
        if is_closed:
            self._start_network(attached)
        self._start_pumps(attached)

    # What the uSubscription services on an endpoint's network say

    async def ask_usubscriptions(
        self, section: EndpointSection, authorities: Collection[str], before: Mapping[str, InterestSource]
    ) -> None:
        """Asks the uSubscription services of these authorities at an endpoint. `before`: sources that they replace,
        whose subscriptions serve until they answer. Raises UStatusError for an unusable file."""
        assembly = self.assembly
        sources = building.remote_sources_of(
            assembly.config,
            section,
            assembly.hosted,
            assembly.endpoints,
            assembly.runtime,
            lambda authority: authority in authorities,
        )
        for source in sources:
            await source.load()
            if source.name in before:
                source.continue_from(before[source.name])
            await assembly.interest.add_source(source)
            task = assembly.tasks.start(source.start(), f"learn the interest {section.name}")
            assembly.attached[section.name].asking[source.name] = task

    async def stop_asking(self, source: ServiceInterest) -> None:
        """Asks a uSubscription service no more, and saves what it has said, which still serves."""
        attached = self.assembly.attached.values()
        await end(*(parts.asking.pop(source.name, None) for parts in attached))
        await source.stop()
        await source.transport.close()

    async def ask_changed_usubscriptions(self, old: Config, new: Config) -> None:
        """Asks the uSubscription services that are new or elsewhere now. What one that has moved said before serves
        until it answers."""
        asked_before, asked = _asked(old), _asked(new)
        moved = {name for name, endpoint in asked_before.items() if asked.get(name) != endpoint}
        interest = self.assembly.interest
        stale = [source for source in interest.sources if isinstance(source, ServiceInterest) and source.name in moved]
        for source in stale:
            await self.stop_asking(source)
        before = {source.name: source for source in stale}
        for section in new.endpoint:
            fresh = [name for name, at in asked.items() if at == section.name and asked_before.get(name) != at]
            if fresh:
                await self.ask_usubscriptions(section, fresh, before)
        for source in stale:
            await interest.remove_source(source)


def _asked(config: Config) -> dict[str, str]:
    """Returns the endpoint at which each authority's uSubscription is asked."""
    return {
        authority: section.name
        for section in config.endpoint
        for authority in building.remote_authorities_of(config, section)
    }


class ListeningPart(Part):
    """Waits until the networks listen for all subscribed topics, for NETWORKS_WAIT_S and INTEREST_WAIT_S at most.
    Everything else works meanwhile."""

    name = "networks that listen"

    async def start(self) -> None:
        assembly = self.assembly
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NETWORKS_WAIT_S):
                await assembly.networks.tried()
        try:
            async with asyncio.timeout(INTEREST_WAIT_S):
                await assembly.interest.answered()
                await assembly.networks.listen()
        except TimeoutError:
            what = "not every uSubscription has answered yet; it is asked again while the rest works"
            log.warning(what, usubscriptions=assembly.interest.unhealthy, problems=self.parts.problems())
        assembly.networks.services_listen()
        assembly.keeper.listening()
