"""Endpoints in a running streamer: what each needs is made and registered here, and removed here again.

section -> Endpoint -> ingress, a pump for each log, clocks -> registered with every part that serves all endpoints
                       '-> tasks: network, express queue, pumps        (express, networks, states, follows, ...)
detach: tasks end -> the network is closed -> out of every part; its cursors stay in the logs, as over a restart
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from history.log.log import Log
from streamer import parts
from streamer.config import Config, EndpointSection, FollowSection
from streamer.egress.holds import SHOWN_AFTER_S, Label
from streamer.egress.pump import Pump
from streamer.lifecycle import NETWORKS_CLOSE_S, within
from streamer.operating import counters
from streamer.operating.clocks import Clocks
from streamer.operating.samples import Sample
from streamer.operating.states import Condition
from streamer.walk.endpoint import Endpoint
from streamer.walk.flow import Flow
from streamer.walk.ingress import Dispatch, Ingress
from uprotocol import uri as uris
from uprotocol.pacing import Backoff, Pace
from usubscription_client import InterestSource, ServiceInterest

if TYPE_CHECKING:
    from streamer.app import Streamer

# messages to a network off the vehicle: below what is taken there of one authority (UNITS_PER_S)
PACE_OUTSIDE_PER_S: Final = 4_000

StartTask = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


@dataclass
class Attached:
    """What one endpoint has."""

    endpoint: Endpoint
    ingress: Ingress
    pumps: list[Pump]
    clocks: Clocks
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class AttachedEndpoints:
    """All of them, by name. `make` is called for those of the configuration before the parts that serve all endpoints
    are made from what they have; `attach` for one that comes later."""

    def __init__(
        self,
        streamer: Streamer,
        dispatch: Dispatch,
        flows: Mapping[Log, Flow],
        backoff: Callable[[], Backoff],
    ) -> None:
        self._streamer, self._dispatch, self._flows, self._backoff = streamer, dispatch, flows, backoff
        self._attached: dict[str, Attached] = {}
        # the same objects as those that follow from `_attached`: the parts that serve all endpoints look into them
        self.ingresses: dict[str, Ingress] = {}
        self.pumps: list[Pump] = []
        self.clocks: dict[str, Clocks] = {}

    def __repr__(self) -> str:
        return f"AttachedEndpoints({list(self._attached)})"

    def __iter__(self) -> Iterator[Attached]:
        return iter(self._attached.values())

    @property
    def names(self) -> Iterable[str]:
        return self._attached.keys()

    def make(self, endpoint: Endpoint, config: Config) -> Attached:
        streamer, pace = self._streamer, _pace(config, endpoint)
        pumps = [
            Pump(
                endpoint,
                log,
                streamer.view,
                streamer.dead_letters,
                self._backoff(),
                flow,
                streamer.paused,
                absent_ms_max=config.history.absent_ms,
                refused_hours=config.egress.refused_hours,
                unheard_hours=config.egress.unheard_hours,
                on_gap=streamer.losses.records_lost,
                pace=pace,
            )
            for log, flow in self._flows.items()
        ]
        made = Attached(endpoint, Ingress(endpoint, self._dispatch), pumps, Clocks(endpoint))
        self._attached[endpoint.name] = made
        self.ingresses[endpoint.name], self.clocks[endpoint.name] = made.ingress, made.clocks
        self.pumps += pumps
        return made

    # Life

    async def start(self, start_task: StartTask) -> None:
        for attached in self:
            self._start(attached, start_task)

    def _start(self, attached: Attached, start_task: StartTask) -> None:
        endpoint, streamer = attached.endpoint, self._streamer
        endpoint.transport.on_connection(streamer.connection_changed)
        attached.tasks = [
            start_task(streamer.express.queues[endpoint.name].run(), f"express {endpoint.name}"),
            start_task(streamer.networks.run(endpoint), f"network {endpoint.name}"),
            *(start_task(pump.run(), f"pump {endpoint.name}") for pump in attached.pumps),
        ]

    async def close(self) -> None:
        """Close all networks, side by side."""
        closing = [within(NETWORKS_CLOSE_S, one.endpoint.name, one.endpoint.close()) for one in self]
        results = await asyncio.gather(*closing, return_exceptions=True)
        for one in self:
            one.ingress.close()
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise errors[0]

    # While the streamer runs

    async def attach(
        self, section: EndpointSection, config: Config, follow: Iterable[FollowSection], start_task: StartTask
    ) -> None:
        """`config` has this endpoint, too. Raises UStatusError for a file that can't be used; then nothing has
        changed."""
        streamer = self._streamer
        endpoint = parts.endpoint_of(config, section)
        streamer.endpoints.add(endpoint)
        made = self.make(endpoint, config)
        streamer.express.add_endpoint(endpoint)
        streamer.networks.add_endpoint(endpoint)
        streamer.states.add_endpoint(endpoint.name)
        followed_by = uris.parse(section.followed_by) if section.followed_by is not None else None
        streamer.handovers.add_endpoint(endpoint, made.pumps, followed_by)
        streamer.certificates.add(endpoint.name, parts.certificates_of_endpoint(section))
        for pump in made.pumps:
            pump.begin()  # before anything is listened to: what comes from now on is for this endpoint, too
        streamer.handovers.load_endpoint(endpoint.name)
        streamer.claims.find_unclaimed()
        streamer.hosted.endpoint_added(endpoint)
        streamer.follows.add_endpoint(endpoint, [parts.follow_of(one, streamer.endpoints) for one in follow])
        streamer.rules.endpoints_changed()
        try:
            await self._ask_services(made, section, config, start_task)
        except BaseException:
            await self.detach(endpoint.name)
            raise
        self._start(made, start_task)

    async def _ask_services(
        self, made: Attached, section: EndpointSection, config: Config, start_task: StartTask
    ) -> None:
        streamer = self._streamer
        for source in parts.remote_sources_of(config, section, streamer.hosted, streamer.endpoints, streamer.runtime):
            await streamer.interest.add_source(source)
            made.tasks.append(start_task(source.start(), f"learn the interest {made.endpoint.name}"))

    async def detach(self, name: str) -> None:
        """Remove an endpoint from everything; its network is closed, for NETWORKS_CLOSE_S at most."""
        streamer, attached = self._streamer, self._attached[name]
        endpoint = attached.endpoint
        for task in attached.tasks:
            task.cancel()
        await asyncio.gather(*attached.tasks, return_exceptions=True)
        await streamer.follows.remove_endpoint(endpoint)
        for source in self._sources_of(attached):
            await streamer.interest.remove_source(source)
        await within(NETWORKS_CLOSE_S, name, endpoint.close())
        # from here on in one step: no part may find it in another one
        del self._attached[name], self.ingresses[name], self.clocks[name]
        attached.ingress.close()
        endpoint.sends.close()
        for pump in attached.pumps:
            pump.close()
            self.pumps.remove(pump)
        streamer.endpoints.remove(endpoint)
        streamer.rules.endpoints_changed()
        streamer.express.remove_endpoint(name)
        streamer.networks.remove_endpoint(name)
        streamer.handovers.remove_endpoint(name)
        streamer.certificates.remove(name)
        streamer.states.remove_endpoint(name)
        streamer.ledger.remove_endpoint(name)
        streamer.claims.find_unclaimed()

    def _sources_of(self, attached: Attached) -> list[InterestSource]:
        """The services on its network, whether they were asked from the start on or later."""
        authorities = attached.endpoint.authorities
        sources = self._streamer.interest.sources
        return [one for one in sources if isinstance(one, ServiceInterest) and one.name in authorities]

    # Reports

    def conditions(self) -> Iterator[Condition]:
        for pump in self.pumps:
            if pump.trouble:
                yield Condition(pump.trouble, pump.peer.name, is_fatal=True)
        for name, clocks in self.clocks.items():
            if clocks.trouble:
                yield Condition(clocks.trouble, name)
        yield from self._held("refused", "left")

    def _held(self, *labels: Label) -> Iterator[Condition]:
        """What has been held for long enough that a person should know, of these labels."""
        now_ms = self._streamer.runtime.now_ms()
        for pump in self.pumps:
            for held in pump.address_holds.states():
                if held.label in labels and held.waited_s >= SHOWN_AFTER_S:
                    yield Condition(held.sentence(now_ms), pump.peer.name)

    def samples(self) -> Iterator[Sample]:
        streamer = self._streamer
        for one in self:
            endpoint = one.endpoint
            yield from counters.of_endpoint(endpoint, is_connected=streamer.is_connected(endpoint))
            yield "express_waiting", (endpoint.name,), len(streamer.express.queues[endpoint.name])
            for pump in one.pumps:
                yield from counters.of_pump(pump, streamer.claims.absent_ms(pump))

    def notes(self) -> Iterator[str]:
        return (one.problem for one in self._held("unheard"))


def _pace(config: Config, endpoint: Endpoint) -> Pace | None:
    """One for all that goes to that endpoint's network."""
    per_s = config.egress.messages_per_s or (PACE_OUTSIDE_PER_S if endpoint.suffix else None)
    return None if per_s is None else Pace(per_s, asyncio.get_running_loop().time)
