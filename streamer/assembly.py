"""The composition root: creates and connects what every message passes, and starts none of it.

Config -> building.py: what depends only on it -> Assembly: services, walk, networks
                                                  '-> for each endpoint: ingress, pumps
parts/ runs and reports it; what the configuration loads (the HTTP edge, recovery, tracing) is a part alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog
from google.protobuf.message import Message

from history.service.gaps import Gaps
from history.service.keeper import Keeper
from history.service.service import HistoryService
from storage.runtime import Runtime
from streamer import building
from streamer.config import Config
from streamer.data_dir import LETTERS_FILE, PAUSES_FILE
from streamer.egress.claims import Claims
from streamer.egress.pump import Pump
from streamer.following.follows import Follows
from streamer.following.handover import HandOvers
from streamer.following.kept import TopicsKept
from streamer.letters.dead_letter import DeadLetters
from streamer.operating.drops import Drops
from streamer.operating.new_stores import NewStores
from streamer.operating.states import LossReports
from streamer.walk.access import Access
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.flow import Flow
from streamer.walk.hosted import HostedTransport
from streamer.walk.ingress import Dispatch, IdWindow, Ingress, Logs, Pass
from streamer.walk.ledger import AuthorityLedger, Pressure
from streamer.walk.networks import Networks
from streamer.walk.paused import Paused
from streamer.walk.sender import Express
from streamer.walk.view import Rules, View
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

FOLLOW_MS_MIN: Final = 500  # shortest and ...
FOLLOW_MS_MAX: Final = 60_000  # ... longest pause between attempts to follow a history
GATEWAY_ANNOUNCEMENT_TTL_MS: Final = 5_000  # announcements are repeated
HOSTED_DRAIN_MS_MAX: Final = 200  # for each hosted service to answer pending requests

log = structlog.get_logger()


@dataclass
class Attached:
    """The parts of one endpoint."""

    endpoint: Endpoint
    ingress: Ingress
    pumps: list[Pump] = field(default_factory=list)
    registrations: list[Remove] = field(default_factory=list)  # of the pumps
    express_task: asyncio.Task[None] | None = None
    network_task: asyncio.Task[None] | None = None
    pump_tasks: list[asyncio.Task[None]] = field(default_factory=list)
    asking: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # first questions to uSubscription services

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Returns all that are running."""
        tasks = self.express_task, self.network_task, *self.pump_tasks, *self.asking.values()
        return [task for task in tasks if task is not None]


class Tasks:
    """The tasks of a running streamer: if one fails, the streamer stops."""

    def __init__(self) -> None:
        self.group = asyncio.TaskGroup()  # entered by the streamer
        self._running = set[asyncio.Task[None]]()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts a task that is cancelled when the streamer stops."""
        task = self.group.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        for task in list(self._running):
            task.cancel()


class Assembly:
    """What every message passes, of one streamer.

    Mutable: `config` (a reload), the parts of each endpoint (`attached`, `ingresses`, `pumps`), and who is called when
    a network changes.
    """

    def __init__(
        self, config: Config, endpoints: Endpoints, logs: Logs, window: IdWindow, keeper: Keeper, runtime: Runtime
    ) -> None:
        self.config, self.logs, self.keeper, self.runtime, self.window = config, logs, keeper, runtime, window
        self.config_file: Path | None = None  # for reports
        self.started_ms = runtime.now_ms()
        self.limits = building.limits_of(config)
        raise_streams_max(self.limits.streams_cached_max)
        self.endpoints, self.rules = endpoints, Rules()
        self.home = self.endpoints[config.home.name]
        self.local = LocalUriProvider(config.authority, ids.ENTITY, ids.VERSION)
        self.ready, self.stopping = asyncio.Event(), asyncio.Event()
        self.attached: dict[str, Attached] = {}  # by name of the endpoint
        # those of `attached`, for parts that serve all endpoints
        self.ingresses: dict[str, Ingress] = {}
        self.pumps: list[Pump] = []
        self.tasks = Tasks()
        # set by parts: what takes the messages of a topic that has a recovery source; who hears of networks
        self.recovered: Callable[[UUri], Pass | None] = lambda topic: None
        self.on_connection: list[Callable[[Endpoint, bool], None]] = [self._connection_changed]
        self.on_listens: list[Callable[[Endpoint], None]] = [lambda endpoint: keeper.back(endpoint.name)]
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
        entities = building.entities_of(config)
        self.hosted = HostedTransport(self.home, self.endpoints, config.authority, config.answers_for, entities)
        self.dead_letters = DeadLetters(
            config.streamer.data_dir / LETTERS_FILE,
            config.authority,
            self._publish,
            runtime=runtime,
            bytes_max=self.limits.dead_letter_bytes_max,
            message_bytes_max=self.limits.message_bytes_max,
        )
        self.usubscription = building.usubscription_of(config, self.hosted, runtime, HOSTED_DRAIN_MS_MAX)
        names = [endpoint.name for endpoint in self.endpoints]
        now = asyncio.get_running_loop().time
        self.new_stores = NewStores(self.logs.durable, names, self.usubscription, runtime.now_ms, now)
        logs = tuple(self.logs)
        self.interest = Interest(
            building.interest_sources_of(config, self.hosted, self.endpoints, self.usubscription, runtime),
            lambda: tuple([source.newest_seq for source in logs]),
        )
        self.paused = Paused(config.streamer.data_dir / PAUSES_FILE, self.endpoints, config.authority, runtime.disk)
        self.paused.load()  # before a command can change it
        self.view = View(self.endpoints, self.rules, self.interest, self.logs, self.paused)

    def _make_walk(self, window: IdWindow) -> None:
        """Creates express, follows, ledger and dispatch, then the pumps and the ingress of each endpoint."""
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
            [building.follow_of(section, self.endpoints) for section in config.follow],
            self.endpoints,
            self.hosted,
            self.local,
            self.interest,
            runtime,
            self.losses.followed_gap,
            lambda: Backoff(FOLLOW_MS_MIN, FOLLOW_MS_MAX, runtime.rng),
            self.new_stores.followed_before,
        )
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
        self.dispatch = Dispatch(
            self.view,
            self.logs,
            flows,
            self.express,
            self.hosted,
            window,
            self.ledger,
            self.follows.of_topic,
            lambda topic: self.recovered(topic),
            self.drops.add,
            config.limits.message_bytes_max,
        )
        for endpoint in self.endpoints:
            self.make_endpoint(endpoint)
        self.entry = Ingress(self.home, self.dispatch, trusted=True)
        self.hosted.connect(self.entry, self._entities_changed)
        self.follows.attach(self.dispatch, self.ingresses)

    def make_endpoint(self, endpoint: Endpoint) -> Attached:
        attached = self.attached[endpoint.name] = Attached(endpoint, Ingress(endpoint, self.dispatch))
        self.ingresses[endpoint.name] = attached.ingress
        self.make_pumps(attached)
        return attached

    def make_pumps(self, attached: Attached) -> None:
        """Creates the pumps of one endpoint, one for each log."""
        config, endpoint = self.config, attached.endpoint
        per_s = building.messages_per_s_of(config, endpoint.name)
        pace = None if per_s is None else Pace(per_s, asyncio.get_running_loop().time)  # of the pumps together
        attached.pumps = [
            Pump(
                endpoint,
                target,
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
            for target, flow in self.dispatch.flows.items()
        ]
        attached.registrations = [self.interest.on_change(pump.interest_changed) for pump in attached.pumps]
        self.pumps += attached.pumps

    def _make_networks(self) -> None:
        """Creates the parts that serve all endpoints, and the history."""
        config, keeper, logs = self.config, self.keeper, list(self.logs)
        followers = {section.name: section.followed_by for section in config.endpoint}
        followed_by = {name: uris.parse(service) for name, service in followers.items() if service is not None}
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
        self.access = Access(self.endpoints, self.rules, building.access_of(config))
        self.history = HistoryService(
            self.hosted,
            self.local,
            logs,
            access=self.access,
            reply_bytes_max=self.limits.reply_bytes_max,
            replies_bytes_max=self.limits.replies_bytes_max,
            share=CALLERS_SHARE,
            drain_ms_max=HOSTED_DRAIN_MS_MAX,
            followed_max=self.limits.followed_topics_max,
            window_bytes_max=self.limits.window_bytes_max,
            handing_over=self.handovers,
            keeper=keeper,
            followed=self.follows.services,
            keeping=TopicsKept(self.view, self.logs, self.follows),
        )
        self.rules.on_change += [self.history.followers.sights_changed, self.follows.rules_changed]

    def add_endpoint(self, endpoint: Endpoint) -> Attached:
        """Adds an endpoint that is in the configuration by now."""
        self.endpoints.add(endpoint)
        attached = self.make_endpoint(endpoint)
        self.express.add_endpoint(endpoint)
        self.networks.add_endpoint(endpoint)
        self.hosted.endpoint_added(endpoint)
        return attached

    def remove_pumps(self, attached: Attached) -> None:
        """Removes the stopped pumps of an endpoint. Their cursors stay."""
        for remove in attached.registrations:
            remove()
        for pump in attached.pumps:
            pump.close()
            self.pumps.remove(pump)

    def remove_endpoint(self, attached: Attached) -> None:
        """Removes a stopped endpoint without pumps."""
        endpoint, name = attached.endpoint, attached.endpoint.name
        attached.ingress.close()
        endpoint.sends.close()
        del self.attached[name], self.ingresses[name]
        self.endpoints.remove(endpoint)
        self.rules.changed()
        self.express.remove_endpoint(name)
        self.networks.remove_endpoint(name)
        self.ledger.remove_endpoint(name)
        self.keeper.back(name)

    def topics_of(self, authority: str) -> int:
        """Returns the number of its topics in the logs."""
        return sum(source.topics_of(authority) for source in self.logs)

    def _arrived_from(self, authority: str, endpoint: str) -> None:
        """The first message of an authority has arrived: its uSubscription may know an earlier store of ours."""
        owner = self.endpoints.owner(authority)
        if self.usubscription is not None and owner is not None and owner.name == endpoint:
            self.usubscription.remote.arrived_from(authority)

    def _connection_changed(self, endpoint: Endpoint, connected: bool) -> None:
        """Messages are missed from now on if the network is away."""
        if not connected and self.ready.is_set() and not self.stopping.is_set():
            why = f"the network of endpoint {endpoint.name!r} was away"
            self.keeper.away(endpoint.name, why, lambda authority: self.endpoints.owner(authority) is endpoint)

    def _listens(self, endpoint: Endpoint) -> None:
        """Messages are missed no more: the network is listened to again."""
        for on_listens in self.on_listens:
            on_listens(endpoint)

    def _connected(self, endpoint: Endpoint) -> None:
        self.new_stores.session_resumed(endpoint)
        for pump in self.pumps:
            if pump.peer is endpoint:
                pump.waits.try_all()  # the network may take now what it has refused
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
        builder = UMessageBuilder.notification(topic, to).with_ttl(GATEWAY_ANNOUNCEMENT_TTL_MS)
        await self.hosted.send(builder.with_id(uuids.new()).pack(announcement))

    async def _publish(self, topic: UUri, payload: Message) -> None:
        """Publishes on a topic of core.ustreamer."""
        await self.hosted.send(UMessageBuilder.publish(topic).with_id(uuids.new()).pack(payload))
