"""The composition root: makes every part, starts them in order, stops them in the other.

    logs -> interest on disk -> endpoints, each listened to as it is opened -> pumps -> hosted services -> ready
                                '-> each uSubscription is asked as soon as its network is there

What comes before the services run waits in the log, or its caller is told to try again.

A network that is away at the start is tried again and again (networks.py). So are a disk that is full and a
uSubscription store that can't be read. What the configuration describes by itself is made in parts.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, Self

import structlog
from google.protobuf.message import Message

from history.epochs.keeper import Keeper
from history.file import damage as damages
from history.file.damage import Damage
from history.log.log import Log
from history.service.gaps import Gaps
from history.service.service import HistoryService
from storage.runtime import REAL, Runtime
from streamer import parts
from streamer.config import Config, patterns
from streamer.egress.claims import Claims, listed
from streamer.egress.express import Express
from streamer.egress.holds import SHOWN_AFTER_S, Label
from streamer.egress.paused import FILE, Paused
from streamer.egress.pump import Pump
from streamer.following.followed import Followed
from streamer.following.follows import Follows
from streamer.following.handover import HandOvers
from streamer.letters.dead_letter import DeadLetters
from streamer.operating import metrics
from streamer.operating.admin import Admin
from streamer.operating.clocks import Clocks
from streamer.operating.control import Control, ControlSocket
from streamer.operating.states import LOOK_S, STARTING, STREAMER, Condition, States, of_one_that_cant_start
from streamer.quotas.ledger import Ledger, Pressure
from streamer.quotas.limits import CALLERS_SHARE
from streamer.walk.access import Access
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.flow import Flow
from streamer.walk.hosted import HostedTransport
from streamer.walk.ingress import Dispatch, IdWindow, Ingress, Logs
from streamer.walk.networks import Networks
from streamer.walk.rules import Rule, Rules
from streamer.walk.view import View
from transports.certificates import Expiries
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.cache import raise_streams_max
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.message import UMessageBuilder
from uprotocol.pacing import Backoff, Pace
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from usubscription.service import USubscriptionService
from usubscription_client.interest import Interest
from usubscription_client.table import Topics

# until we say that we are ready, though the rest works: for a network that hangs, and then for what is asked over those
# that are there
OPEN_WAIT_S: Final = 5.0
INTEREST_WAIT_S: Final = 5.0
DRAIN_MS_MAX: Final = 200  # for each service inside to answer what it has begun, and the network to take it
SERVICES_CLOSE_S: Final = 1.0  # for all of them together, and then ...
# ... for the networks to take it, side by side. 5 s in all: containers are killed after 10
ENDPOINTS_CLOSE_S: Final = 3.0
FILES_CLOSE_S: Final = 0.5  # for one file to be closed cleanly; the next start recovers one that was not
# messages to a network off the vehicle: below what is taken there of one authority (UNITS_PER_S)
PACE_OUTSIDE_PER_S: Final = 4_000
FOLLOW_MS_MIN: Final = 500  # between tries to follow a history, and ...
FOLLOW_MS_MAX: Final = 60_000
ANNOUNCEMENT_TTL_MS: Final = 5_000  # the next one comes
REOPEN_MS_MAX: Final = 30_000  # between tries to open a log on a disk that is full

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
        def backoff() -> Backoff:
            return Backoff(config.egress.retry_min_ms, config.egress.retry_max_ms, runtime.rng)

        self.config, self.logs, self.keeper, self._runtime = config, logs, keeper, runtime
        self.limits = parts.limits_of(config)
        raise_streams_max(self.limits.streams_cached_max)
        self.endpoints = endpoints
        self.rules = Rules()
        self.home = self.endpoints[config.home.name]
        self.local = LocalUriProvider(config.authority, parts.ENTITY, parts.VERSION)
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
        self.interest = Interest(
            parts.interest_sources_of(config, self.hosted, self.endpoints, self.usubscription, runtime),
            lambda: tuple(one.newest_seq for one in logs),
        )
        self.paused = Paused(config.streamer.data_dir / FILE, self.endpoints, config.authority, runtime.disk)
        self.paused.load()  # before anybody can change it
        self.view = View(self.endpoints, self.rules, self.interest, logs, self.paused)
        self.express = Express(
            self.endpoints,
            self.hosted,
            self.dead_letters,
            messages_max=config.express.messages_max,
            bytes_max=self.limits.express_bytes_max,
            backoff=backoff,
        )
        self.follows = Follows(
            [parts.follow_of(section, self.endpoints) for section in config.follow],
            self.endpoints,
            self.hosted,
            self.local,
            self.interest,
            runtime,
            self._followed_gap,
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
        flows = {logs.durable: Flow(runtime.used), logs.volatile: Flow()}
        self._flows = tuple(flows.values())
        dispatch = Dispatch(
            self.endpoints,
            self.rules,
            self.view,
            logs,
            flows,
            self.express,
            self.hosted,
            window,
            self.ledger,
            self.follows,
            config.limits.message_bytes_max,
        )
        self.ingresses = {endpoint.name: Ingress(endpoint, dispatch) for endpoint in self.endpoints}
        self._entry = Ingress(self.home, dispatch, trusted=True)
        self.hosted.lead_to(self._entry, self._entities_changed)
        self.follows.attach(dispatch, self.ingresses)
        paces = {endpoint.name: self._pace(endpoint) for endpoint in self.endpoints}
        self.pumps = [
            Pump(
                endpoint,
                one,
                self.view,
                self.dead_letters,
                backoff(),
                flows[one],
                self.paused,
                absent_ms_max=config.history.absent_ms,
                refused_hours=config.egress.refused_hours,
                unheard_hours=config.egress.unheard_hours,
                on_gap=self._lost,
                pace=paces[endpoint.name],
            )
            for endpoint in self.endpoints
            for one in logs
        ]
        followed_by = {one.name: uris.parse(one.followed_by) for one in config.endpoint if one.followed_by is not None}
        self.handovers = HandOvers(
            followed_by, self.endpoints, self.pumps, list(logs), self.paused, self._announce, config.history.absent_ms
        )
        self.gaps = Gaps(config.authority, logs, self._publish, now_ms=runtime.now_ms)
        self._networks = Networks(
            self.endpoints,
            self.ingresses,
            self.interest,
            config.streamer.data_dir,
            backoff,
            self._connected,
            self._network_lost,
        )
        self.is_connected = self._networks.is_connected
        if self.usubscription is not None:
            self.usubscription.on_change(self._networks.listen_before_answer)
        self.claims = Claims(self.pumps, list(logs), config.history.absent_ms, self._networks.away_s)
        self.history = HistoryService(
            self.hosted,
            self.local,
            list(logs),
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
        used = (one for one in parts.certificates_of(config) if one[0] or config.streamer.admin is not None)
        self.certificates = Expiries(used, runtime.now_ms)
        self.control = Control(self.hosted, self.local, self.paused, patterns(config.dispatch.control), DRAIN_MS_MAX)
        self.admin: Admin | None = None
        if config.streamer.admin is not None:
            expose = functools.partial(metrics.expose, self)
            self.admin = Admin(
                config.streamer.admin,
                self.problems,
                expose,
                self.notes,
                self.all_vehicles,
                states=self.look,
                guard=config.admin,
            )
        self.ready = asyncio.Event()
        self.clocks = {endpoint.name: Clocks(endpoint) for endpoint in self.endpoints}
        self.states = States(self.clocks, self.conditions, runtime.now_ms)
        self._service_trouble = ""  # why the embedded uSubscription does not start
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []  # what `_start` has started

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

    def _pace(self, endpoint: Endpoint) -> Pace | None:
        """One for all that goes to that endpoint's network."""
        per_s = self.config.egress.messages_per_s or (PACE_OUTSIDE_PER_S if endpoint.suffix else None)
        return None if per_s is None else Pace(per_s, asyncio.get_running_loop().time)

    def __repr__(self) -> str:
        return f"Streamer({self.config.authority}, {list(self.endpoints)}, problems={self.problems()})"

    # Life

    async def run(self) -> None:
        """Work until `stop` is called or the task is cancelled; then drain and close everything."""
        try:
            if self.admin is not None:
                await self.admin.open()
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._start(tasks), name="start"),
                    tasks.create_task(self.dead_letters.run(), name="dead letters"),
                    tasks.create_task(self.gaps.run(), name="gaps"),
                    tasks.create_task(self._watch(), name="states"),
                ]
                await self._stopping.wait()
                for task in (*running, *self._tasks):
                    task.cancel()
        finally:
            await self._close()

    def stop(self) -> None:
        self._stopping.set()
        self._networks.stop_waiting()

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        def start(work: Any, name: str) -> None:
            self._tasks.append(tasks.create_task(work, name=name))

        for section in self.config.rules:
            self.rules.add(parts.rule_of(section))
        for pump in self.pumps:
            pump.begin()  # before anything is listened to: what comes from now on is theirs
        self.handovers.load()
        self.follows.load()
        self.claims.load()
        is_readable = self.usubscription is None or await self._attempt(self.usubscription.open)
        await self.interest.load()
        self.interest.on_change(self._interest_changed)
        start(self.ledger.run(), "ledger")
        for endpoint in self.endpoints:
            endpoint.transport.on_connection(self._look_soon)
        for endpoint in self.endpoints:
            start(self.express.queues[endpoint.name].run(), f"express {endpoint.name}")
            start(self._networks.run(endpoint), f"network {endpoint.name}")
        for pump in self.pumps:
            start(pump.run(), f"pump {pump.peer.name}")
        start(self.interest.start(), "learn the interest")
        await self.history.start()
        await self.control.start()
        if self.usubscription is None or (is_readable and await self._start_usubscription(self.usubscription)):
            self.hosted.unserved.is_settled = True
        else:
            start(self._retry_usubscription(self.usubscription), "usubscription")
        start(self.claims.watch(), "claims")
        start(self.handovers.run(), "hand-overs")
        await self.follows.start()
        await self._settle_down()
        self._networks.services_listen()
        if self.certificates:
            await self.certificates.look()  # the notes tell of it
            start(self.certificates.run(), "certificates")
        self.ready.set()
        self.states.look()
        for note in self.notes():
            log.warning("a note", note=note)
        log.info("ready", authority=self.config.authority, endpoints=[endpoint.name for endpoint in self.endpoints])

    def _look_soon(self, _connected: bool) -> None:
        """As soon as everybody knows of the change, unless it is we who end it."""
        if not self._stopping.is_set():
            asyncio.get_running_loop().call_soon(self.states.look)

    async def _settle_down(self) -> None:
        """Until each network is listened to, for all that is wanted: a while at most. All else works meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_WAIT_S):
                await self._networks.tried()
        try:
            async with asyncio.timeout(INTEREST_WAIT_S):
                await self.interest.answered()
                await self._networks.listen()
        except TimeoutError:
            what = "not everybody has answered yet; asking on while the rest works"
            log.warning(what, usubscriptions=self.interest.unhealthy, problems=self.problems())

    def _connected(self, endpoint: Endpoint) -> None:
        for pump in self.pumps:
            if pump.peer is endpoint:
                pump.reconnected()

    async def _close(self) -> None:
        self._stopping.set()

        async def step(name: str, close: Callable[[], Awaitable[Any]]) -> None:
            try:
                await close()
            except Exception:
                log.exception("closing failed; going on", part=name)

        async def services() -> None:
            if self.admin is not None:
                await step("admin", self.admin.close)
            await step("follows", self.follows.stop)
            await step("interest", self.interest.stop)
            if self.usubscription is not None:
                await step("usubscription", self.usubscription.stop)
            await step("history", self.history.stop)
            await step("control", self.control.stop)
            await self.hosted.unserved.drain(DRAIN_MS_MAX)

        self.hosted.unserved.is_settled = False
        await _within(SERVICES_CLOSE_S, "services", services())
        closing = [_within(ENDPOINTS_CLOSE_S, one.name, step(one.name, one.close)) for one in self.endpoints]
        await asyncio.gather(*closing)
        for ingress in (*self.ingresses.values(), self._entry):
            ingress.close()
        for flow in self._flows:
            flow.close()
        self.keeper.close()
        files = {"dead letters": self.dead_letters.close, **{f"{one.name} log": one.close for one in self.logs}}
        await asyncio.gather(*(_within(FILES_CLOSE_S, name, step(name, close)) for name, close in files.items()))

    async def _start_usubscription(self, service: USubscriptionService) -> bool:
        """As `_attempt`."""
        if not await self._attempt(service.start):
            return False
        if lost := service.lost_changes:
            what = f"{lost} changes of subscriptions are lost: who subscribed or unsubscribed lately has to do so again"
            self.logs.durable.losses.report(damages.SUBSCRIPTIONS, what)
        return True

    async def _attempt(self, begin: Callable[[], Awaitable[None]]) -> bool:
        """False if the disk does not let the embedded uSubscription `begin` just now. Raises FAILED_PRECONDITION,
        ALREADY_EXISTS (see usubscription.schema)."""
        try:
            await begin()
        except UStatusError as error:
            if error.code in (UCode.FAILED_PRECONDITION, UCode.ALREADY_EXISTS):
                raise
            self._service_trouble = f"its service can't start: {error}"
            log.error("uSubscription can't start; trying again", error=str(error))
            return False
        self._service_trouble = ""
        return True

    async def _retry_usubscription(self, service: USubscriptionService) -> None:
        backoff = Backoff(1_000, REOPEN_MS_MAX, self._runtime.rng)
        while True:
            await backoff.wait()
            if await self._start_usubscription(service):
                self.hosted.unserved.is_settled = True
                await self.interest.refresh()
                return

    def _lost(self, peer: Endpoint, source: Log, after: int, before: int, reason: Gap.Reason.ValueType) -> None:
        """An endpoint will never get what is between these seqs, or some of it."""
        gap = Gap(reason=reason, incarnation=source.incarnation, after_seq=after, before_seq=before)
        self.gaps.add(gap, peer.name, f"endpoint {peer.name} will not get these records of the {source.name} log")

    def _followed_gap(self, followed: Followed, gap: Gap) -> None:
        """Of a history that we follow, and that can't be had."""
        what = f"of the history of {uris.format(followed.service)}, which is followed"
        log.error("records that were followed are lost", service=followed.key, gap=str(gap).replace("\n", " "))
        self.gaps.add(gap, "", what)

    async def _announce(self, to: UUri, announcement: Message) -> None:
        topic = self.local.get_resource(ids.ANNOUNCEMENTS)
        builder = UMessageBuilder.notification(topic, to).with_ttl(ANNOUNCEMENT_TTL_MS)
        await self.hosted.send(builder.with_id(uuids.new()).pack(announcement))

    def _network_lost(self, endpoint: Endpoint, what: str, messages: int | None) -> None:
        """What was lost never came here, so nobody can say what it was."""
        endpoint.dropped["lost_by_network"] += messages or 1
        log.error("a network has lost messages for us", endpoint=endpoint.name, what=what, messages_at_most=messages)
        self.logs.durable.losses.report(damages.NETWORK, _loss_detail(endpoint, what))

    # What has changed

    def _interest_changed(self, topics: Topics) -> None:
        self._networks.listen_soon()
        for pump in self.pumps:
            pump.look_at(topics)

    async def _entities_changed(self) -> None:
        """A service inside has come or gone: what is for it goes another way now."""
        for ingress in (*self.ingresses.values(), self._entry):
            ingress.forget_verdicts()
            ingress.filters.services_changed()
        await self._networks.listen()

    def _is_named(self, authority: str, endpoint: str) -> bool:
        """The services inside have no endpoint."""
        return not endpoint or authority in self.endpoints[endpoint].authorities

    # Rules at run time

    async def add_rule(self, rule: Rule) -> None:
        """Let messages pass. Raises ALREADY_EXISTS, NOT_FOUND (no such endpoint) or what a network answers; then
        nothing has changed."""
        for name in (rule.ingress, rule.egress):
            if name not in self.ingresses:
                what = f"there is no endpoint {name!r}; there are {', '.join(self.ingresses)}"
                raise UStatusError(UCode.NOT_FOUND, what)
        self.rules.add(rule)
        try:
            await self._networks.sync()
        except UStatusError:
            self.rules.remove(rule.ingress, rule.egress)
            await self._networks.listen()
            raise

    def release(self, consumer: str) -> str:
        """Take a consumer's name from its owner, for the next uEntity that uses it; who had it. Raises NOT_FOUND."""
        owner = str(self.history.consumers.release(consumer))
        log.info("a consumer was released", consumer=consumer, owner=owner)
        return owner

    async def remove_rule(self, ingress: str, egress: str) -> None:
        """Stop passing messages. Raises NOT_FOUND."""
        self.rules.remove(ingress, egress)
        await self._networks.sync()

    # How it is

    def dropped(self, endpoint: Endpoint) -> Counter[str]:
        """Drops by reason, those of the transport included."""
        return endpoint.dropped + Counter(getattr(endpoint.transport, "dropped", {}))

    def conditions(self) -> list[Condition]:
        """What is wrong; empty: ready."""
        found = [*self._networks.conditions()]
        found += [Condition(pump.trouble, pump.peer.name, is_fatal=True) for pump in self.pumps if pump.trouble]
        found += [Condition(one.trouble, name) for name, one in self.clocks.items() if one.trouble]
        found += [*self._held("refused", "left")]
        found += [*self.claims.conditions(), *self.handovers.conditions(), *self.follows.conditions()]
        for authority in self.interest.unhealthy if self.ready.is_set() else ():
            owner, what = self.endpoints.owner(authority), f"uSubscription of {authority} does not answer"
            found.append(Condition(f"{what}: its last known subscriptions serve", owner.name if owner else STREAMER))
        found += [*self._conditions_of_logs(), *self._conditions_of_services()]
        if not self.ready.is_set():
            found.append(Condition(STARTING, is_fatal=True))
        return found

    def _held(self, *labels: Label) -> Iterator[Condition]:
        """What has been held for long enough that a person should know, of these labels."""
        now_ms = self._runtime.now_ms()
        for pump in self.pumps:
            for held in pump.address_holds.states():
                if held.label in labels and held.waited_s >= SHOWN_AFTER_S:
                    yield Condition(held.sentence(now_ms), pump.peer.name)

    def _conditions_of_logs(self) -> Iterator[Condition]:
        for one in self.logs:
            if not one.healthy:
                yield Condition(f"the {one.name} log refuses messages: {one.trouble}", is_fatal=True)
            losses: dict[str, list[Damage]] = {}  # by endpoint
            damage: list[Damage] = []
            for found in one.damage:
                (losses.setdefault(_endpoint_of(found), []) if found.kind == damages.NETWORK else damage).append(found)
            if damage:
                yield Condition(_damage_problem(one.name, damage))
            for endpoint, lost in losses.items():
                yield Condition(_loss_problem(lost, self.config.history.acknowledge_after_hours), endpoint)

    def _conditions_of_services(self) -> Iterator[Condition]:
        if self.paused.trouble:
            yield Condition(self.paused.trouble)
        if self.dead_letters.trouble:
            yield Condition(f"dead letters: {self.dead_letters.trouble}")
        if self._service_trouble:
            yield Condition(f"usubscription: {self._service_trouble}", is_fatal=True)
        elif self.usubscription is not None and self.usubscription.trouble is not None:
            what = "uSubscription answers nobody, and the last known subscriptions serve"
            yield Condition(f"{what}: {self.usubscription.trouble}", is_fatal=True)
        elif self.usubscription is not None and not self.usubscription.healthy:
            yield Condition("the subscriptions can't be stored", is_fatal=True)

    def problems(self) -> list[str]:
        """What is wrong, in plain sentences; empty: ready."""
        return [one.problem for one in self.conditions()]

    def look(self) -> dict[str, Any]:
        """The states now, each with its reason: of the endpoints, of the streamer itself, and the worst of them."""
        self.states.look()
        return self.states.as_dict()

    async def _watch(self) -> None:
        """Look at states, clocks and the log's file, and at losses that were told for long enough, until cancelled."""
        loop, after_ms = asyncio.get_running_loop(), self.config.history.acknowledge_after_ms
        while True:
            for clock in self.clocks.values():
                clock.look(loop.time())
            for loss in self.logs.durable.losses.acknowledge_passing(after_ms) if after_ms else ():
                what = "a loss counts as acknowledged: it was told for history.acknowledge_after_hours"
                log.info(what, detail=loss.detail)
            await self.logs.durable.check_file()
            self.states.look()
            await asyncio.sleep(LOOK_S)

    def notes(self) -> list[str]:
        """What somebody may want to know though nothing is wrong."""
        held, idle = "what comes waits in the log", "which there is not (any more), so nothing waits"
        paused = [
            f"paused: {one.topic} to {one.peer}; {held if self.paused.is_peer(one.peer) else idle}"
            for one in sorted(self.paused)
        ]
        following = parts.notes_of(self.config, self.endpoints, self.rules)
        disk = [
            *parts.too_small_note(self.config, self.logs.durable.disk_limit_bytes),
            *parts.given_up_note(self.config, self._runtime.disk.reserve),
        ]
        told = [*disk, *following, *self.certificates.notes(), *self.ledger.notes()]
        return [*self.endpoints.notes(), *told, *paused, *(one.problem for one in self._held("unheard"))]

    def topics_of(self, authority: str) -> int:
        """How many topics of it the logs know."""
        return sum(one.topics_of(authority) for one in self.logs)

    def vehicles(self, count: int) -> list[dict[str, Any]]:
        """What the source authorities send, those that send most first."""
        return [account.as_dict(self.topics_of(account.authority)) for account in self.ledger.by_rate(count)]

    def cursors(self) -> list[dict[str, Any]]:
        """What waits in the durable log for each endpoint, also for those that are not configured."""
        durable = self.logs.durable
        found = listed(durable.cursors.all(), durable.newest_seq, durable.oldest_seq)
        return [dataclasses.asdict(one) for one in found]

    def all_vehicles(self) -> Iterator[dict[str, Any]]:
        """The same of all of them, in the order in which they were first heard."""
        return (account.as_dict(self.topics_of(account.authority)) for account in list(self.ledger))

    async def _publish(self, topic: UUri, told: Message) -> None:
        """On a topic of core.ustreamer."""
        await self.hosted.send(UMessageBuilder.publish(topic).with_id(uuids.new()).pack(told))


def _damage_problem(name: str, damage: Sequence[Damage]) -> str:
    newest = damage[-1]
    return (
        f"the {name} log has {len(damage)} damages that nobody has acknowledged, at the last {newest.kind}"
        f"{f' ({newest.detail})' if newest.detail else ''}; see 'up-streamer history verify', then 'up-streamer "
        "history acknowledge'"
    )


def _loss_detail(endpoint: Endpoint, what: str) -> str:
    return f"endpoint {endpoint.name}: {what}"


def _endpoint_of(loss: Damage) -> str:
    """Whose it is, from what `_loss_detail` has made."""
    return loss.detail.removeprefix("endpoint ").partition(": ")[0]


def _loss_problem(losses: Sequence[Damage], hours: float) -> str:
    newest = losses[-1]
    times = f" (and {len(losses) - 1} other losses)" if len(losses) > 1 else ""
    ends = f"it ends {hours:g} h after it was found, or" if hours else "it ends"
    what = newest.detail.partition(": ")[2] or newest.detail
    return f"{what}{times}; nobody has acknowledged that: {ends} with 'up-streamer history acknowledge'"


async def _within(seconds: float, what: str, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, but not for longer: the process has to end."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        log.warning("closing took too long; going on without", part=what, seconds=seconds)


async def serve(config: Config, on_ready: Callable[[Streamer], None], stopping: asyncio.Event | None = None) -> None:
    """Run a streamer until `stopping` is set or the task is cancelled. Raises UStatusError for what the world has wrong
    for good."""
    stopping = stopping or asyncio.Event()
    streamer = await _create(config, stopping)
    if streamer is None:
        return

    async def announce() -> None:
        await streamer.ready.wait()
        on_ready(streamer)

    async def stop() -> None:
        await stopping.wait()
        streamer.stop()

    helpers = [asyncio.create_task(announce()), asyncio.create_task(stop())]
    try:
        async with ControlSocket(
            config.streamer.data_dir, streamer.paused, streamer.release, streamer.vehicles, streamer.cursors
        ):
            await streamer.run()
    except BaseExceptionGroup as group:
        ours, others = group.split(UStatusError)
        if ours is None or others is not None:
            raise
        first: BaseException = ours
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    finally:
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)


async def _create(config: Config, stopping: asyncio.Event) -> Streamer | None:
    """The streamer, as soon as the disk lets it be; None if `stopping` comes first. The admin port says meanwhile what
    is wrong."""
    backoff = Backoff(1_000, REOPEN_MS_MAX)
    told, since_ms = "", REAL.now_ms()
    while not stopping.is_set():
        try:
            return await Streamer.create(config)
        except UStatusError as error:
            if error.code not in (UCode.UNAVAILABLE, UCode.RESOURCE_EXHAUSTED, UCode.PERMISSION_DENIED):
                raise
            trouble = str(error)
        if trouble != told:
            told, since_ms = trouble, REAL.now_ms()
            log.error("the streamer can't start; trying again", error=trouble)
        async with contextlib.AsyncExitStack() as stack:
            if config.streamer.admin is not None:
                problems: Callable[[], list[str]] = functools.partial(list, (told,))
                states = functools.partial(
                    of_one_that_cant_start, [one.name for one in config.endpoint], told, since_ms
                )
                await stack.enter_async_context(
                    Admin(config.streamer.admin, problems, states=states, guard=config.admin)
                )
            waiting = asyncio.ensure_future(stopping.wait())
            await asyncio.wait({waiting}, timeout=backoff.next_ms() / 1000)
            waiting.cancel()
    return None
