"""The composition root: creates and connects all parts of a streamer, and starts none.

    Config -> parts.py: parts that depend only on it -> Assembly: services, walk, networks
                                                        '-> for each endpoint: ingress, pumps, clocks
reports.py reports, attaching.py changes endpoints and rules at run time, app.py has the order of the parts and runs
them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
from google.protobuf.message import Message

from history.epochs.keeper import Keeper
from history.service.gaps import Gaps
from history.service.service import HistoryService
from storage.runtime import Runtime
from streamer import parts
from streamer.config import Config, patterns
from streamer.edge.edge import Handlers, HttpEdge
from streamer.edge.places import Places
from streamer.egress.claims import Claims
from streamer.egress.pump import Pump
from streamer.following.follows import Follows
from streamer.following.handover import HandOvers
from streamer.following.kept import TopicsKept
from streamer.letters.dead_letter import DeadLetters
from streamer.lifecycle import EmbeddedUSubscription
from streamer.operating.control import Control
from streamer.operating.drops import Drops
from streamer.operating.log_level import LogLevel
from streamer.operating.new_stores import NewStores
from streamer.operating.states import (
    Clocks,
    FastSenders,
    LossReports,
)
from streamer.operating.tracing import Tracing
from streamer.walk.access import Access
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.flow import Flow
from streamer.walk.hosted import HostedTransport
from streamer.walk.ingress import Dispatch, IdWindow, Ingress, Logs
from streamer.walk.ledger import AuthorityLedger, Pressure
from streamer.walk.networks import Networks
from streamer.walk.paused import FILE, Paused
from streamer.walk.sender import Express
from streamer.walk.view import Rules, View
from streamer.walk.without_rule import WithoutRule
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.cache import raise_streams_max
from uprotocol.callbacks import Remove
from uprotocol.communication.shares import CALLERS_SHARE
from uprotocol.core.ustreamer import ids
from uprotocol.message import UMessageBuilder
from uprotocol.pacing import Backoff, Pace
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.interest import Interest

if TYPE_CHECKING:
    from streamer.edge.callers import Callers

FOLLOW_MS_MIN: Final = 500  # shortest and ...
FOLLOW_MS_MAX: Final = 60_000  # ... longest pause between attempts to follow a history
ANNOUNCEMENT_TTL_MS: Final = 5_000  # announcements are repeated
DRAIN_MS_MAX: Final = 200  # for each hosted service to answer pending requests


log = structlog.get_logger()


@dataclass
class Attached:
    """The parts of one endpoint."""

    endpoint: Endpoint
    ingress: Ingress
    pumps: list[Pump]
    clocks: Clocks
    registrations: list[Remove]
    express_task: asyncio.Task[None] | None = None
    network_task: asyncio.Task[None] | None = None
    pump_tasks: list[asyncio.Task[None]] = field(default_factory=list)
    asking: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # first questions to uSubscription services

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Returns all that are running."""
        return [
            one
            for one in (self.express_task, self.network_task, *self.pump_tasks, *self.asking.values())
            if one is not None
        ]


class Assembly:
    """All parts of one streamer."""

    def __init__(
        self, config: Config, endpoints: Endpoints, logs: Logs, window: IdWindow, keeper: Keeper, runtime: Runtime
    ) -> None:
        self.config, self.logs, self.keeper, self.runtime = config, logs, keeper, runtime
        self.config_file: Path | None = None  # for reports
        self.started_ms = runtime.now_ms()
        self.limits = parts.limits_of(config)
        raise_streams_max(self.limits.streams_cached_max)
        self.endpoints, self.rules = endpoints, Rules()
        self.home = self.endpoints[config.home.name]
        self.local = LocalUriProvider(config.authority, parts.ENTITY, parts.VERSION)
        self.ready, self.stopping = asyncio.Event(), asyncio.Event()
        self.attached: dict[str, Attached] = {}  # by name of the endpoint
        # those of `attached`, for parts that serve all endpoints
        self.ingresses: dict[str, Ingress] = {}
        self.pumps: list[Pump] = []
        # of `run`: its tasks, and changes of endpoints one after the other
        self.group, self.tasks = asyncio.TaskGroup(), set[asyncio.Task[None]]()
        self.turn = asyncio.Lock()
        self._make_services()
        self._make_walk(window)
        self._make_networks()

    def _backoff(self) -> Backoff:
        return Backoff(self.config.egress.retry_min_ms, self.config.egress.retry_max_ms, self.runtime.rng)

    def _make_services(self) -> None:
        """Creates the hosted services, the view, and what both need."""
        config, runtime = self.config, self.runtime
        self.gaps = Gaps(config.authority, self.logs, self._publish, now_ms=runtime.now_ms)
        self.losses = LossReports(self.gaps, self.logs.durable)
        self.drops = Drops(self.logs.durable, runtime.now_ms, asyncio.get_running_loop().time)
        entities = parts.entities_of(config)
        self.hosted = HostedTransport(self.home, self.endpoints, config.authority, config.answers_for, entities)
        self.dead_letters = DeadLetters(
            config.streamer.data_dir / "dead-letters.db",
            config.authority,
            self._publish,
            runtime=runtime,
            bytes_max=self.limits.dead_letter_bytes_max,
            message_bytes_max=self.limits.message_bytes_max,
        )
        self.tracing = Tracing(config.authority, self.endpoints, self.dead_letters)
        self.usubscription = parts.usubscription_of(config, self.hosted, runtime, DRAIN_MS_MAX)
        self.embedded: EmbeddedUSubscription | None = None
        if self.usubscription is not None:
            self.embedded = EmbeddedUSubscription(self.usubscription, runtime, self.losses.subscriptions_lost)
        names = [endpoint.name for endpoint in self.endpoints]
        now = asyncio.get_running_loop().time
        self.new_stores = NewStores(self.logs.durable, names, self.usubscription, runtime.now_ms, now)
        logs = tuple(self.logs)
        self.interest = Interest(
            parts.interest_sources_of(config, self.hosted, self.endpoints, self.usubscription, runtime),
            lambda: tuple([one.newest_seq for one in logs]),
        )
        self.log_level = LogLevel(lambda: self.config.streamer.log_level)
        self.paused = Paused(config.streamer.data_dir / FILE, self.endpoints, config.authority, runtime.disk)
        self.paused.load()  # before a command can change it
        self.view = View(self.endpoints, self.rules, self.interest, self.logs, self.paused)
        self.without_rule = WithoutRule(self.endpoints, self.rules, self.interest)
        self.control = Control(self.hosted, self.local, self.paused, patterns(config.dispatch.control), DRAIN_MS_MAX)

    def _make_walk(self, window: IdWindow) -> None:
        """Creates the parts from ingress to pumps."""
        config, runtime = self.config, self.runtime
        self.express = Express(
            self.endpoints,
            self.hosted,
            self.dead_letters,
            messages_max=config.express.messages_max,
            bytes_max=self.limits.express_bytes_max,
            backoff=self._backoff,
        )
        self.follows = Follows(
            [parts.follow_of(section, self.endpoints) for section in config.follow],
            self.endpoints,
            self.hosted,
            self.local,
            self.interest,
            runtime,
            self.losses.followed_gap,
            lambda: Backoff(FOLLOW_MS_MIN, FOLLOW_MS_MAX, runtime.rng),
            self.new_stores.followed_before,
        )
        self.fast_senders = FastSenders()
        self.ledger = AuthorityLedger(
            self.limits.authorities_max,
            config.limits.authority_messages_per_s,
            is_named=self._is_named,
            now=asyncio.get_running_loop().time,
            now_ms=runtime.now_ms,
            pressure=Pressure(lambda: runtime.used().busy_s),
        )
        self.ledger.on_turn(self.drops.turn)
        self.ledger.on_turn(self.new_stores.turn)
        self.ledger.on_new = self._arrived_from
        flows = {self.logs.durable: Flow(runtime.used), self.logs.volatile: Flow()}
        self.recoveries = parts.recoveries_of(
            config, self.endpoints, self.logs, flows, window, runtime, self.losses.not_recovered
        )
        self.dispatch = Dispatch(
            self.view,
            self.logs,
            flows,
            self.express,
            self.hosted,
            window,
            self.ledger,
            self.follows.of_topic,
            self.recoveries.of_topic,
            self.drops.add,
            config.limits.message_bytes_max,
        )
        for endpoint in self.endpoints:
            self.make_endpoint(endpoint)
        self.entry = Ingress(self.home, self.dispatch, trusted=True)
        self.hosted.connect(self.entry, self._entities_changed)
        self.follows.attach(self.dispatch, self.ingresses)

    def make_endpoint(self, endpoint: Endpoint) -> Attached:
        """Creates the parts of one endpoint of the configuration."""
        endpoint.spans = self.tracing.spans
        pumps = self.make_pumps(endpoint)
        looking = [self.interest.on_change(pump.interest_changed) for pump in pumps]
        made = Attached(endpoint, Ingress(endpoint, self.dispatch), pumps, Clocks(endpoint), looking)
        self.attached[endpoint.name] = made
        self.ingresses[endpoint.name] = made.ingress
        return made

    def make_pumps(self, endpoint: Endpoint) -> list[Pump]:
        """Creates the pumps of one endpoint, one for each log."""
        config = self.config
        per_s = parts.messages_per_s_of(config, endpoint.name)
        pace = None if per_s is None else Pace(per_s, asyncio.get_running_loop().time)  # of the pumps together
        pumps = [
            Pump(
                endpoint,
                log,
                self.view,
                self.dead_letters,
                self._backoff(),
                flow,
                self.paused,
                absent_ms_max=config.history.absent_ms,
                refused_hours=config.egress.refused_hours,
                unheard_hours=config.egress.unheard_hours,
                on_gap=self.losses.records_lost,
                pace=pace,
            )
            for log, flow in self.dispatch.flows.items()
        ]
        self.pumps += pumps
        return pumps

    def _make_networks(self) -> None:
        """Creates the parts that serve all endpoints, and the history."""
        config, keeper, logs = self.config, self.keeper, list(self.logs)
        followed_by = {one.name: uris.parse(one.followed_by) for one in config.endpoint if one.followed_by is not None}
        self.handovers = HandOvers(
            followed_by,
            self.endpoints,
            self.pumps,
            logs,
            self.paused,
            self._announce,
            config.history.absent_ms,
            self.new_stores.follower_knows,
        )
        self.networks = Networks(
            self.endpoints,
            self.ingresses,
            self.view,
            self.interest,
            self.hosted,
            self.logs.record,
            config.streamer.data_dir,
            self._backoff,
            self._connected,
            self.losses.network_lost,
            self._listens,
        )
        if self.usubscription is not None:
            self.usubscription.on_change(self.networks.listen_before_answer)
            self.usubscription.on_change(self.follows.follow_before_answer)
        self.claims = Claims(self.pumps, logs, config.history.absent_ms, self.networks.away_s)
        self.access = Access(self.endpoints, self.rules, parts.access_of(config))
        self.history = HistoryService(
            self.hosted,
            self.local,
            logs,
            access=self.access,
            reply_bytes_max=self.limits.reply_bytes_max,
            replies_bytes_max=self.limits.replies_bytes_max,
            share=CALLERS_SHARE,
            drain_ms_max=DRAIN_MS_MAX,
            followed_max=self.limits.followed_topics_max,
            window_bytes_max=self.limits.window_bytes_max,
            handing_over=self.handovers,
            keeper=keeper,
            followed=self.follows.services,
            keeping=TopicsKept(self.view, self.logs, self.follows),
        )
        self.rules.on_change += [self.history.followers.sights_changed, self.follows.rules_changed]
        self.edge = HttpEdge(config, self._edge_handlers)

    def _edge_handlers(self, callers: Callers | None, places: Places) -> Handlers:
        """Connects what answers requests at the HTTP edge. `callers`: None without http.listen."""
        from streamer.edge.handlers import handlers_of  # imports aiohttp (0.1 s, 11 MiB)
        from streamer.grip.channels import Outlet

        outlet = Outlet(self.dispatch, self.entry, self.home, self.follows.append)
        on_gap = self.losses.channel_gap
        return handlers_of(self.config, self.history, outlet, on_gap, callers, places, self.runtime.now_ms)

    def _arrived_from(self, authority: str, endpoint: str) -> None:
        """The first message of an authority has arrived: its uSubscription may know an earlier store of ours."""
        owner = self.endpoints.owner(authority)
        if self.usubscription is not None and owner is not None and owner.name == endpoint:
            self.usubscription.remote.arrived_from(authority)

    def _connection_changed(self, endpoint: Endpoint, connected: bool) -> None:
        """Messages are missed from now on if the network is away."""
        self.recoveries.connection_changed(endpoint, connected)
        if not connected and self.ready.is_set() and not self.stopping.is_set():
            why = f"the network of endpoint {endpoint.name!r} was away"
            self.keeper.away(endpoint.name, why, lambda authority: self.endpoints.owner(authority) is endpoint)

    def _listens(self, endpoint: Endpoint) -> None:
        """Messages are missed no more: the network is listened to again."""
        self.recoveries.listens(endpoint)
        self.keeper.back(endpoint.name)

    def _connected(self, endpoint: Endpoint) -> None:
        self.new_stores.session_resumed(endpoint)
        for pump in self.pumps:
            if pump.peer is endpoint:
                pump.address_holds.try_all()  # the network may take now what it has refused
                pump.wake()

    async def _entities_changed(self) -> None:
        """A hosted service has started or stopped: routes its messages again."""
        for ingress in (*self.ingresses.values(), self.entry):
            ingress.forget_verdicts()
        await self.networks.services_changed()

    def _is_named(self, authority: str, endpoint: str) -> bool:
        """Returns True if the configuration names this authority. Hosted services have no endpoint."""
        return not endpoint or (endpoint in self.endpoints and authority in self.endpoints[endpoint].authorities)

    async def _announce(self, to: UUri, announcement: Message) -> None:
        topic = self.local.get_resource(ids.ANNOUNCEMENTS)
        builder = UMessageBuilder.notification(topic, to).with_ttl(ANNOUNCEMENT_TTL_MS)
        await self.hosted.send(builder.with_id(uuids.new()).pack(announcement))

    async def _publish(self, topic: UUri, payload: Message) -> None:
        """Publishes on a topic of core.ustreamer."""
        await self.hosted.send(UMessageBuilder.publish(topic).with_id(uuids.new()).pack(payload))
