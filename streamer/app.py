"""The composition root: makes every part of a streamer; they are started in order, and stopped in the other.

    logs -> interest on disk -> endpoints, each listened to as it is opened -> pumps -> hosted services -> ready
                                '-> each uSubscription is asked as soon as its network is there

A message that comes before the services run waits in the log, or its caller is told to try again.

A network that is away at the start is tried again and again (networks.py). So are a disk that is full and a
uSubscription store that can't be read. What the configuration describes by itself is made in parts.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any, Final, Self

import structlog
from google.protobuf.message import Message

from history.epochs.keeper import Keeper
from history.service.gaps import Gaps
from history.service.service import HistoryService
from storage.runtime import REAL, Runtime
from streamer import parts
from streamer.attaching import AttachedEndpoints
from streamer.changes import Changes
from streamer.config import Config, patterns
from streamer.egress.claims import Claims, listed
from streamer.egress.express import Express
from streamer.egress.paused import FILE, Paused
from streamer.embedded import EmbeddedUSubscription
from streamer.following.follows import Follows
from streamer.following.handover import HandOvers
from streamer.letters.dead_letter import DeadLetters
from streamer.lifecycle import Parts
from streamer.operating import counters, metrics
from streamer.operating.admin import Admin
from streamer.operating.control import Control
from streamer.operating.losses import Losses
from streamer.operating.samples import Sample
from streamer.operating.states import LOOK_S, STARTING, STREAMER, Condition, States
from streamer.order import DRAIN_MS_MAX, parts_in_order
from streamer.quotas.ledger import Ledger, Pressure
from streamer.quotas.limits import CALLERS_SHARE
from streamer.walk.access import Access
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.flow import Flow
from streamer.walk.hosted import HostedTransport
from streamer.walk.ingress import Dispatch, IdWindow, Ingress, Logs
from streamer.walk.networks import Networks
from streamer.walk.rules import Rules
from streamer.walk.view import View
from transports.certificates import Expiries
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.cache import raise_streams_max
from uprotocol.core.ustreamer import ids
from uprotocol.message import UMessageBuilder
from uprotocol.pacing import Backoff
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.interest import Interest
from usubscription_client.table import Topics

# until we say that we are ready, though the rest works: for a network that hangs, and then for what is asked over those
# that are there
OPEN_WAIT_S: Final = 5.0
INTEREST_WAIT_S: Final = 5.0
FOLLOW_MS_MIN: Final = 500  # between tries to follow a history, and ...
FOLLOW_MS_MAX: Final = 60_000
ANNOUNCEMENT_TTL_MS: Final = 5_000  # the next one comes

log = structlog.get_logger()


class Streamer:
    """One running dispatcher: `async with await Streamer.create(config) as streamer: await streamer.run()`."""

    def __init__(
        self,
        config: Config,
        endpoints: Endpoints,
        logs: Logs,
        window: IdWindow,
        keeper: Keeper,
        runtime: Runtime = REAL,
    ) -> None:
        self.config, self.logs, self.keeper, self.runtime = config, logs, keeper, runtime
        self.limits = parts.limits_of(config)
        raise_streams_max(self.limits.streams_cached_max)
        self.endpoints, self.rules = endpoints, Rules()
        self.home = self.endpoints[config.home.name]
        self.local = LocalUriProvider(config.authority, parts.ENTITY, parts.VERSION)
        self.ready, self.stopping = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None  # of `run`
        changes = Changes(self)
        self.add_rule, self.remove_rule = changes.add_rule, changes.remove_rule
        self.add_endpoint, self.remove_endpoint = changes.add_endpoint, changes.remove_endpoint
        self._make_services()
        self._make_walk(window)
        self._make_networks()
        self._make_reports()
        self._parts = Parts(parts_in_order(self))

    def _backoff(self) -> Backoff:
        return Backoff(self.config.egress.retry_min_ms, self.config.egress.retry_max_ms, self.runtime.rng)

    def _make_services(self) -> None:
        """What hosted services and the view need of each other."""
        config, runtime = self.config, self.runtime
        self.gaps = Gaps(config.authority, self.logs, self._publish, now_ms=runtime.now_ms)
        self.losses = Losses(self.gaps, self.logs.durable)
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
        self.usubscription = parts.usubscription_of(config, self.hosted, runtime, DRAIN_MS_MAX)
        self.embedded = (
            EmbeddedUSubscription(self.usubscription, runtime, self.losses.subscriptions_lost)
            if self.usubscription
            else None
        )
        self.interest = Interest(
            parts.interest_sources_of(config, self.hosted, self.endpoints, self.usubscription, runtime),
            lambda: tuple(one.newest_seq for one in self.logs),
        )
        self.paused = Paused(config.streamer.data_dir / FILE, self.endpoints, config.authority, runtime.disk)
        self.paused.load()  # before anybody can change it
        self.view = View(self.endpoints, self.rules, self.interest, self.logs, self.paused)
        self.control = Control(self.hosted, self.local, self.paused, patterns(config.dispatch.control), DRAIN_MS_MAX)

    def _make_walk(self, window: IdWindow) -> None:
        """From an ingress to the pumps."""
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
        )
        self.ledger = Ledger(
            self.limits.authorities_max,
            config.limits.authority_messages_per_s,
            is_named=self._is_named,
            now=asyncio.get_running_loop().time,
            now_ms=runtime.now_ms,
            pressure=Pressure(runtime.busy_s),
        )
        flows = {self.logs.durable: Flow(runtime.used), self.logs.volatile: Flow()}
        self.flows = tuple(flows.values())
        dispatch = Dispatch(
            self.endpoints,
            self.rules,
            self.view,
            self.logs,
            flows,
            self.express,
            self.hosted,
            window,
            self.ledger,
            self.follows,
            config.limits.message_bytes_max,
        )
        self.attached = AttachedEndpoints(self, dispatch, flows, self._backoff)
        self.ingresses, self.pumps, self.clocks = self.attached.ingresses, self.attached.pumps, self.attached.clocks
        for endpoint in self.endpoints:
            self.attached.make(endpoint, config)
        self.entry = Ingress(self.home, dispatch, trusted=True)
        self.hosted.connect(self.entry, self._entities_changed)
        self.follows.attach(dispatch, self.ingresses)

    def _make_networks(self) -> None:
        """What serves all endpoints, and the history."""
        config, keeper, logs = self.config, self.keeper, list(self.logs)
        followed_by = {one.name: uris.parse(one.followed_by) for one in config.endpoint if one.followed_by is not None}
        self.handovers = HandOvers(
            followed_by, self.endpoints, self.pumps, logs, self.paused, self._announce, config.history.absent_ms
        )
        self.networks = Networks(
            self.endpoints,
            self.ingresses,
            self.interest,
            config.streamer.data_dir,
            self._backoff,
            self._connected,
            self.losses.network_lost,
        )
        self.is_connected = self.networks.is_connected
        if self.usubscription is not None:
            self.usubscription.on_change(self.networks.listen_before_answer)
        self.claims = Claims(self.pumps, logs, config.history.absent_ms, self.networks.away_s)
        self.history = HistoryService(
            self.hosted,
            self.local,
            logs,
            access=Access(self.endpoints, self.rules, [parts.entry_of(section) for section in config.access]),
            reply_bytes_max=self.limits.reply_bytes_max,
            replies_bytes_max=self.limits.replies_bytes_max,
            share=CALLERS_SHARE,
            drain_ms_max=DRAIN_MS_MAX,
            followed_max=self.limits.followed_topics_max,
            window_bytes_max=self.limits.window_bytes_max,
            handing_over=self.handovers,
            keeper=keeper,
        )

    def _make_reports(self) -> None:
        """What tells people how it is."""
        config = self.config
        used = (one for one in parts.certificates_of(config) if one[0] or config.streamer.admin is not None)
        self.certificates = Expiries(used, self.runtime.now_ms)
        self.states = States(self.clocks, self.conditions, self.runtime.now_ms)
        self.admin: Admin | None = None
        if config.streamer.admin is not None:
            self.admin = Admin(
                config.streamer.admin,
                self.problems,
                functools.partial(metrics.expose, self.samples),
                self.notes,
                self.all_vehicles,
                states=self.look,
                guard=config.admin,
            )

    @classmethod
    async def create(cls, config: Config, runtime: Runtime = REAL) -> Self:
        """Open the logs and make the parts; no network is touched yet. Raises UStatusError."""
        endpoints = parts.endpoints_of(config)
        runtime = dataclasses.replace(runtime, disk=runtime.disk.with_reserve(parts.reserve_of(config)))
        logs, window = await parts.logs_of(config, runtime)
        try:
            keeper = await parts.keeper_of(config, logs, runtime)
            return cls(config, endpoints, logs, window, keeper, runtime)
        except BaseException:
            await logs.durable.close()
            raise

    def __repr__(self) -> str:
        return f"Streamer({self.config.authority}, {list(self.endpoints)}, problems={self.problems()})"

    # Life

    async def run(self) -> None:
        """Work until `stop` is called or the task is cancelled; then drain and close everything."""
        try:
            if self.admin is not None:
                await self.admin.open()
            async with asyncio.TaskGroup() as self._group:
                self.start_task(self._start(), "start")
                await self.stopping.wait()
                for task in list(self._tasks):
                    task.cancel()
        finally:
            self.stopping.set()
            self.hosted.unserved.is_settled = False
            await self._parts.stop()

    def stop(self) -> None:
        self.stopping.set()
        self.networks.stop_waiting()

    def start_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that is cancelled when the streamer stops, and stops the streamer if it fails."""
        assert self._group is not None, "run has begun"
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(self) -> None:
        await self._parts.start(self.start_task)
        self.ready.set()
        self.states.look()
        for note in self.notes():
            log.warning("a note", note=note)
        log.info("ready", authority=self.config.authority, endpoints=[endpoint.name for endpoint in self.endpoints])

    async def settle_down(self) -> None:
        """Wait until each network is listened to for all that is wanted, OPEN_WAIT_S and INTEREST_WAIT_S at most. All
        else works meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_WAIT_S):
                await self.networks.tried()
        try:
            async with asyncio.timeout(INTEREST_WAIT_S):
                await self.interest.answered()
                await self.networks.listen()
        except TimeoutError:
            what = "not every uSubscription has answered yet; it is asked again while the rest works"
            log.warning(what, usubscriptions=self.interest.unhealthy, problems=self.problems())
        self.networks.services_listen()

    def connection_changed(self, _connected: bool) -> None:
        """Look at the states once every part knows of it, unless the streamer stops."""
        if not self.stopping.is_set():
            asyncio.get_running_loop().call_soon(self.states.look)

    def _connected(self, endpoint: Endpoint) -> None:
        for pump in self.pumps:
            if pump.peer is endpoint:
                pump.reconnected()

    def interest_changed(self, topics: Topics) -> None:
        self.networks.listen_soon()
        for pump in self.pumps:
            pump.look_at(topics)

    async def _entities_changed(self) -> None:
        """A hosted service has started or stopped: messages for it go another way now."""
        for ingress in (*self.ingresses.values(), self.entry):
            ingress.forget_verdicts()
            ingress.filters.services_changed()
        await self.networks.listen()

    def _is_named(self, authority: str, endpoint: str) -> bool:
        """True if the configuration names this authority. The services inside have no endpoint."""
        return not endpoint or (endpoint in self.endpoints and authority in self.endpoints[endpoint].authorities)

    def release(self, consumer: str) -> str:
        """Free a consumer's name for the next uEntity that uses it; returns who had it. Raises NOT_FOUND."""
        owner = str(self.history.consumers.release(consumer))
        log.info("a consumer was released", consumer=consumer, owner=owner)
        return owner

    # Reports

    def conditions(self) -> list[Condition]:
        """What is wrong; empty: ready."""
        found = [*self._parts.conditions()]
        if not self.ready.is_set():
            found.append(Condition(STARTING, is_fatal=True))
        return found

    def interest_conditions(self) -> Iterator[Condition]:
        for authority in self.interest.unhealthy if self.ready.is_set() else ():
            owner, what = self.endpoints.owner(authority), f"uSubscription of {authority} does not answer"
            yield Condition(f"{what}: its last known subscriptions serve", owner.name if owner else STREAMER)

    def problems(self) -> list[str]:
        """What is wrong, in plain sentences; empty: ready."""
        return [one.problem for one in self.conditions()]

    def samples(self) -> Iterator[Sample]:
        self.states.look()
        return self._parts.samples()

    def look(self) -> dict[str, Any]:
        """The states now, each with its reason: of the endpoints, of the streamer itself, and the worst of them."""
        self.states.look()
        return self.states.as_dict()

    async def watch(self) -> None:
        """Look at states, clocks and the log's file, and at losses that were reported for long enough, until
        cancelled."""
        loop, after_ms = asyncio.get_running_loop(), self.config.history.acknowledge_after_ms
        while True:
            for clock in self.clocks.values():
                clock.look(loop.time())
            for loss in self.logs.durable.losses.acknowledge_passing(after_ms) if after_ms else ():
                what = "a loss counts as acknowledged: it was reported for history.acknowledge_after_hours"
                log.info(what, detail=loss.detail)
            await self.logs.durable.check_file()
            self.states.look()
            await asyncio.sleep(LOOK_S)

    def notes(self) -> list[str]:
        """What somebody may want to know though nothing is wrong."""
        return [*self._parts.notes()]

    def configuration_notes(self) -> Iterator[str]:
        yield from self.endpoints.notes()
        yield from parts.too_small_note(self.config, self.logs.durable.disk_limit_bytes)
        yield from parts.given_up_note(self.config, self.runtime.disk.reserve)
        yield from parts.notes_of(self.config, self.endpoints, self.rules)

    def dropped(self, endpoint: Endpoint) -> Counter[str]:
        """Drops by reason, those of the transport included."""
        return counters.dropped(endpoint)

    def topics_of(self, authority: str) -> int:
        """How many topics of it the logs know."""
        return sum(one.topics_of(authority) for one in self.logs)

    def vehicles(self, count: int) -> list[dict[str, Any]]:
        """What the source authorities send, those that send most first."""
        return [account.as_dict(self.topics_of(account.authority)) for account in self.ledger.by_rate(count)]

    def all_vehicles(self) -> Iterator[dict[str, Any]]:
        """The same of all of them, in the order in which they first sent something."""
        return (account.as_dict(self.topics_of(account.authority)) for account in list(self.ledger))

    def cursors(self) -> list[dict[str, Any]]:
        """What waits in the durable log for each endpoint, also for those that are not configured."""
        durable = self.logs.durable
        found = listed(durable.cursors.all(), durable.newest_seq, durable.oldest_seq)
        return [dataclasses.asdict(one) for one in found]

    async def _announce(self, to: UUri, announcement: Message) -> None:
        topic = self.local.get_resource(ids.ANNOUNCEMENTS)
        builder = UMessageBuilder.notification(topic, to).with_ttl(ANNOUNCEMENT_TTL_MS)
        await self.hosted.send(builder.with_id(uuids.new()).pack(announcement))

    async def _publish(self, topic: UUri, payload: Message) -> None:
        """On a topic of core.ustreamer."""
        await self.hosted.send(UMessageBuilder.publish(topic).with_id(uuids.new()).pack(payload))
