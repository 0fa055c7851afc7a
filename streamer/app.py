"""The composition root: makes every part, starts them in order, stops them in the other.

    logs -> endpoints -> hosted services -> interest -> ingress -> pumps -> ready

An endpoint whose network is away at the start is tried again and again; the others don't notice. So are a disk that is
full and a uSubscription store that can't be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, Self

import structlog
from google.protobuf.message import Message

from history import damage as damages
from history.damage import Damage
from history.gaps import Gaps
from history.log import Log
from history.service import HistoryService
from storage.runtime import REAL, Runtime
from streamer import hosted as hosting
from streamer import metrics
from streamer.access import Access, Entry, Pattern
from streamer.admin import Admin
from streamer.claims import Claims
from streamer.config import AccessSection, Config, EndpointSection, RuleSection, patterns
from streamer.control import Control, ControlSocket
from streamer.dead_letter import DeadLetters
from streamer.egress import Pump
from streamer.endpoint import Endpoint, Endpoints
from streamer.express import Express
from streamer.flow import DURABLE_PATIENCE_S, Flow
from streamer.hosted import HostedTransport
from streamer.ingress import IdWindow, Ingress, Logs
from streamer.ledger import Ledger, Pressure
from streamer.limits import CALLERS_SHARE, Limits
from streamer.paused import FILE, Paused
from streamer.rules import Rule, Rules
from streamer.view import View
from transports import plugin as plugins
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.ids import ENTITY, VERSION
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.message import UMessageBuilder
from uprotocol.pacing import Backoff, Pace
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.service import USubscriptionService
from usubscription_client.interest import EmbeddedInterest, Interest, InterestSource, ServiceInterest
from usubscription_client.static_file import StaticFile

RECENT_IDS: Final = 65_536  # read back from the log at start, so that what a network delivers again is known
INTEREST_WAIT_S: Final = 5.0  # at start: services that have not answered by then are asked on while the rest goes on
JUST_GONE_S: Final = 5.0  # a network that went away within that may be back any moment: a broker restarts, say, so ...
BACK_SOON_S: Final = 2.0  # ... who subscribes is answered only when it is, or after so long; callers are more patient
OPEN_WAIT_S: Final = 5.0  # at start: a network that hangs is waited for no longer
DRAIN_MS_MAX: Final = 200  # for each service inside to answer what it has begun, and the network to take it
SERVICES_CLOSE_S: Final = 1.0  # for all of them together, and then ...
# ... for the networks to take it, side by side. 5 s in all: containers are killed after 10
ENDPOINTS_CLOSE_S: Final = 3.0
FILES_CLOSE_S: Final = 0.5  # for one file to be closed cleanly; the next start recovers one that was not
# messages to a network off the vehicle: below what is taken there of one authority (UNITS_PER_S)
PACE_OUTSIDE_PER_S: Final = 4_000
REOPEN_MS_MAX: Final = 30_000  # between tries to open a log on a disk that is full

log = structlog.get_logger()


def _backoff(config: Config, runtime: Runtime) -> Backoff:
    return Backoff(config.egress.retry_min_ms, config.egress.retry_max_ms, runtime.rng)


def transports_of(config: Config) -> dict[str, UTransport]:
    """One for each endpoint by name; nothing is opened."""
    return {one.name: _transport(config, one) for one in config.endpoint}


def endpoints_of(config: Config, transports: dict[str, UTransport] | None = None) -> Endpoints:
    made = transports if transports is not None else transports_of(config)
    return Endpoints(Endpoint(one.name, one.authorities, made[one.name], one.suffix) for one in config.endpoint)


def make_transport(config: Config, section: EndpointSection) -> UTransport:
    """The transport of an endpoint, closed. Raises UStatusError as `transports.plugin.create`."""
    named = [authority for authority in section.authorities if not uris.is_pattern(authority)]
    authority = config.authority if config.authority in named or not named else named[0]
    return plugins.create(section.transport, section.settings, LocalUriProvider(authority, ENTITY, VERSION))


def _transport(config: Config, section: EndpointSection) -> UTransport:
    try:
        transport = make_transport(config, section)
        transport.message_bytes_max, transport.refused = config.limits.message_bytes_max, {}
        return transport
    except plugins.NotMade as error:  # that endpoint's trouble alone
        log.error("a transport can't be made", endpoint=section.name, why=error.message)
        return _Unmade(error.message)


class Streamer:
    """One running dispatcher: `async with await Streamer.create(config) as streamer: await streamer.run()`."""

    def __init__(
        self, config: Config, transports: dict[str, UTransport], logs: Logs, window: IdWindow, runtime: Runtime = REAL
    ) -> None:
        self.config, self.logs, self._runtime = config, logs, runtime
        self.limits = _limits(config)
        self.endpoints = endpoints_of(config, transports)
        self.rules = Rules()
        self.home = self.endpoints[config.home.name]
        self.local = LocalUriProvider(config.authority, ENTITY, VERSION)
        self.hosted = HostedTransport(self.home, self.endpoints, config.authority, config.answers_for)
        self.dead_letters = DeadLetters(
            config.streamer.data_dir / "dead-letters.db",
            config.authority,
            self._publish,
            runtime=runtime,
            bytes_max=self.limits.dead_letter_bytes_max,
            message_bytes_max=self.limits.message_bytes_max,
        )
        self.usubscription = self._embedded_service()
        self.interest = Interest(self._interest_sources(), lambda: tuple(one.newest_seq for one in logs))
        self.paused = Paused(config.streamer.data_dir / FILE, self.endpoints, config.authority, runtime.disk)
        self.paused.load()  # before anybody can change it
        self.paused.on_change(self._wake_pumps)
        self.view = View(self.endpoints, self.rules, self.interest, logs, self.paused)
        self.express = Express(
            self.endpoints,
            self.hosted,
            self.dead_letters,
            messages_max=config.express.messages_max,
            bytes_max=self.limits.express_bytes_max,
            backoff=lambda: _backoff(config, runtime),
        )

        self.ledger = Ledger(
            self.limits.authorities_max,
            config.limits.authority_messages_per_s,
            is_named=self._is_named,
            now=asyncio.get_running_loop().time,
            now_ms=runtime.now_ms,
            pressure=Pressure(runtime.busy_s),
        )
        self.ledger.on_evicted = self._forget_routes
        flows = {logs.durable: Flow(DURABLE_PATIENCE_S), logs.volatile: Flow()}

        def ingress(endpoint: Endpoint, *, trusted: bool = False) -> Ingress:
            return Ingress(
                endpoint,
                self.endpoints,
                self.rules,
                self.view,
                logs,
                self.express,
                self.hosted,
                window,
                flows,
                self.ledger,
                trusted=trusted,
                message_bytes_max=config.limits.message_bytes_max,
            )

        self.ingresses = {endpoint.name: ingress(endpoint) for endpoint in self.endpoints}
        self.ledger.on_turn = self._gather_refused
        self.hosted.walk = self._entry = ingress(self.home, trusted=True)
        for one in logs:
            one.on_forgotten(functools.partial(self._forget_streams, one))
        self.hosted.entities_changed = self._entities_changed
        paces = {endpoint.name: self._pace(endpoint) for endpoint in self.endpoints}
        self.pumps = [
            Pump(
                endpoint,
                one,
                self.view,
                self.dead_letters,
                _backoff(config, runtime),
                flows[one],
                paused=self.paused,
                absent_ms_max=config.history.absent_ms,
                on_gap=self._lost,
                pace=paces[endpoint.name],
            )
            for endpoint in self.endpoints
            for one in logs
        ]
        for one, flow in flows.items():
            flow.followers = [pump for pump in self.pumps if pump.log is one]
        self.gaps = Gaps(config.authority, logs, self._publish, now_ms=runtime.now_ms)
        self.claims = Claims(self.pumps, list(logs), config.history.absent_ms, self.is_connected)
        self.history = HistoryService(
            self.hosted,
            self.local,
            list(logs),
            access=Access(
                self.endpoints, self.rules, [_entry(section) for section in config.access], hosting.is_inside
            ),
            reply_bytes_max=self.limits.reply_bytes_max,
            replies_bytes_max=self.limits.replies_bytes_max,
            share=CALLERS_SHARE,
            drain_ms_max=DRAIN_MS_MAX,
        )
        self.control = Control(self.hosted, self.local, self.paused, patterns(config.dispatch.control), DRAIN_MS_MAX)
        self.admin = self._make_admin()
        self.ready = asyncio.Event()
        self._open: set[str] = set()  # endpoints whose transport has been opened
        # endpoints that have had a connection: who only listens may be alone for a while
        self._linked: set[str] = set()
        self._troubles: dict[str, str] = {}  # endpoint -> why it is not open, or not listening
        self._changed = asyncio.Event()
        self._gone_at: dict[str, float] = {}  # endpoints whose network went away, and when (loop time)
        self._back = asyncio.Event()  # one of them is back
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []  # what `_start` has started

    @classmethod
    async def create(cls, config: Config, runtime: Runtime = REAL) -> Self:
        """Open the logs and make the parts; no network is touched yet. Raises UStatusError."""
        data_dir = config.streamer.data_dir
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UStatusError(
                UCode.FAILED_PRECONDITION,
                f"streamer.data_dir {data_dir} can't be made ({error.strerror}): choose a folder that can",
            ) from None
        transports = transports_of(config)
        history = config.history
        retention_ms = int(history.retention_hours * 3_600_000)
        limits = _limits(config)
        volatile_topics = limits.volatile_topics_max if history.volatile else 1  # none is used without a pattern
        durable = await Log.open(
            data_dir / "history.db",
            name="durable",
            retention_ms=retention_ms,
            retention_bytes=history.retention_mib << 20,
            streams_max=max(1, limits.topics_max - volatile_topics),
            authority_streams_max=limits.authority_topics_max,
            runtime=runtime,
        )
        try:
            volatile = await Log.open(
                None,
                name="volatile",
                retention_ms=retention_ms,
                retention_bytes=history.volatile_mib << 20,
                streams_max=volatile_topics,
                authority_streams_max=limits.authority_topics_max,
                runtime=runtime,
            )
            window = IdWindow()
            for stream, id in await durable.recent_ids(RECENT_IDS):
                if not durable.knows_stream(stream):
                    continue  # of records that are damaged; whoever reads them learns of it
                window.take(
                    uuids.from_bytes(id).SerializeToString() + durable.stream(stream).source.SerializeToString()
                )
            return cls(
                config,
                transports,
                Logs(durable, volatile, patterns(history.volatile), patterns(history.record)),
                window,
                runtime,
            )
        except BaseException:
            await durable.close()
            raise

    def _pace(self, endpoint: Endpoint) -> Pace | None:
        """One for all that goes to that endpoint's network."""
        per_s = self.config.egress.messages_per_s or (PACE_OUTSIDE_PER_S if endpoint.suffix else None)
        return None if per_s is None else Pace(per_s, asyncio.get_running_loop().time)

    def _embedded_service(self) -> USubscriptionService | None:
        if self.config.usubscription_of(self.config.home) != "embedded":
            return None
        return USubscriptionService(
            self.hosted,
            self.config.authority,
            self.config.streamer.data_dir / "usubscription.db",
            also=self.config.answers_for,
            runtime=self._runtime,
            drain_ms_max=DRAIN_MS_MAX,
            reset=self.config.usubscription.reset,
            subscriptions_max=self.limits.subscriptions_max,
            message_bytes_max=self.limits.message_bytes_max,
        )

    def _interest_sources(self) -> list[InterestSource]:
        config = self.config
        sources: list[InterestSource] = []
        for section in config.endpoint:
            match config.usubscription_of(section):
                case "embedded":
                    assert self.usubscription is not None
                    memory = config.streamer.data_dir / f"interest-{config.authority}.json"
                    sources.append(EmbeddedInterest(self.usubscription, memory, self._runtime))
                    self.usubscription.on_change(self._subscription_changed)
                case "remote":
                    sources += [
                        ServiceInterest(
                            self.hosted.toward(self.endpoints[section.name]),
                            self.local,
                            authority,
                            refresh_ms=int(config.usubscription.refresh_s * 1000),
                            memory=config.streamer.data_dir / f"interest-{authority}.json",
                            runtime=self._runtime,
                            lives_there=functools.partial(self._lives_at, self.endpoints[section.name]),
                            subscriptions_max=self.limits.subscriptions_max,
                        )
                        for authority in section.authorities
                        if not uris.is_pattern(authority) and not uris.is_one_of(authority, config.answers_for)
                    ]
        if config.usubscription.static_file is not None:
            sources.append(StaticFile(config.usubscription.static_file))
        return sources

    def _lives_at(self, endpoint: Endpoint, authority: str) -> bool:
        return self.endpoints.owner(authority) is endpoint

    def _make_admin(self) -> Admin | None:
        if self.config.streamer.admin is None:
            return None
        return Admin(
            self.config.streamer.admin,
            self.problems,
            lambda: metrics.expose(self),
            self.notes,
            self.all_vehicles,
            guard=self.config.admin,
        )

    def _forget_streams(self, one: Log, streams: frozenset[int]) -> None:
        for ingress in (*self.ingresses.values(), self._entry):
            ingress.forget_streams(one, streams)

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
                ]
                await self._stopping.wait()
                for task in (*running, *self._tasks):
                    task.cancel()
        finally:
            await self._close()

    def stop(self) -> None:
        self._stopping.set()
        self._back.set()  # nobody waits any more for a network to be back

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        def start(work: Any, name: str) -> None:
            self._tasks.append(tasks.create_task(work, name=name))

        for section in self.config.rules:
            self.rules.add(_rule(section))
        for pump in self.pumps:
            pump.begin()  # before anything is listened to: what comes from now on is theirs
        self.claims.load()
        opened = {endpoint.name: asyncio.Event() for endpoint in self.endpoints}
        for endpoint in self.endpoints:
            start(self._keep_open(endpoint, opened[endpoint.name]), f"open {endpoint.name}")
            start(self.express.lanes[endpoint.name].run(), f"express {endpoint.name}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_WAIT_S):
                await asyncio.gather(*(event.wait() for event in opened.values()))
        await self.history.start()
        await self.control.start()
        if self.usubscription is None or await self._start_usubscription(self.usubscription):
            self.hosted.unserved.is_settled = True
        else:
            start(self._retry_usubscription(self.usubscription), "usubscription")
        self.interest.on_change(self._interest_changed)
        start(self._follow_interest(), "interest")
        learning = tasks.create_task(self.interest.start(), name="learn the interest")
        self._tasks.append(learning)
        await asyncio.wait({learning}, timeout=INTEREST_WAIT_S)
        if not learning.done():
            log.warning("some uSubscription has not answered yet; asking on", waiting=self.interest.unhealthy)
        await self._listen()
        for pump in self.pumps:
            start(pump.run(), f"pump {pump.peer.name}")
        start(self.claims.watch(), "claims")
        start(self.ledger.run(), "ledger")
        self.ready.set()
        for note in self.notes():
            log.warning("a note", note=note)
        log.info("ready", authority=self.config.authority, endpoints=[endpoint.name for endpoint in self.endpoints])

    async def _keep_open(self, endpoint: Endpoint, tried: asyncio.Event) -> None:
        """Open the transport; try again while its network is away."""
        backoff = _backoff(self.config, self._runtime)
        endpoint.transport.on_connection(lambda connected: self._connection(endpoint, connected))
        endpoint.transport.on_loss(lambda what, messages: self._network_lost(endpoint, what, messages))
        endpoint.transport.remember_in(str(self.config.streamer.data_dir / f"endpoint-{endpoint.name}.json"))
        while True:
            try:
                await endpoint.open()
            except UStatusError as error:
                self._troubles[endpoint.name] = str(error)
                log.error(
                    "an endpoint can't be opened; trying again",
                    endpoint=endpoint.name,
                    error=str(error),
                    attempt=backoff,
                )
                tried.set()
                await backoff.wait()
            else:
                break
        self._open.add(endpoint.name)
        self._troubles.pop(endpoint.name, None)
        tried.set()
        self._changed.set()

    def _connection(self, endpoint: Endpoint, connected: bool) -> None:
        log.info("connected" if connected else "connection lost", endpoint=endpoint.name)
        if not connected:
            self._gone_at[endpoint.name] = asyncio.get_running_loop().time()
        else:
            self._gone_at.pop(endpoint.name, None)
            self._linked.add(endpoint.name)
            self._changed.set()
            self._back.set()
            for pump in self.pumps:
                if pump.peer is endpoint:
                    pump.wake()

    async def _close(self) -> None:
        async def step(name: str, close: Callable[[], Awaitable[Any]]) -> None:
            try:
                await close()
            except Exception:
                log.exception("closing failed; going on", part=name)

        async def services() -> None:
            if self.admin is not None:
                await step("admin", self.admin.close)
            await step("interest", self.interest.stop)
            if self.usubscription is not None:
                await step("usubscription", self.usubscription.stop)
            await step("history", self.history.stop)
            await step("control", self.control.stop)
            await self.hosted.unserved.drain(DRAIN_MS_MAX)

        self.hosted.unserved.is_settled = False
        await _within(SERVICES_CLOSE_S, "services", services())
        await asyncio.gather(
            *(
                _within(ENDPOINTS_CLOSE_S, endpoint.name, step(endpoint.name, endpoint.close))
                for endpoint in self.endpoints
            )
        )
        files = {"dead letters": self.dead_letters.close, **{f"{one.name} log": one.close for one in self.logs}}
        await asyncio.gather(*(_within(FILES_CLOSE_S, name, step(name, close)) for name, close in files.items()))

    async def _start_usubscription(self, service: USubscriptionService) -> bool:
        """False if the disk does not let it start just now. Raises FAILED_PRECONDITION (see usubscription.schema)."""
        try:
            await service.start()
        except UStatusError as error:
            if error.code == UCode.FAILED_PRECONDITION:
                raise
            self._troubles["usubscription"] = f"its service can't start: {error}"
            log.error("uSubscription can't start; trying again", error=str(error))
            return False
        self._troubles.pop("usubscription", None)
        if service.lost_changes:
            what = f"{service.lost_changes} changes of subscriptions are lost: who subscribed or unsubscribed lately has to do so again"
            self.logs.durable.note_loss(damages.SUBSCRIPTIONS, what)
        return True

    async def _retry_usubscription(self, service: USubscriptionService) -> None:
        backoff = Backoff(1_000, REOPEN_MS_MAX, self._runtime.rng)
        while True:
            await backoff.wait()
            if await self._start_usubscription(service):
                self.hosted.unserved.is_settled = True
                await self.interest.refresh()
                return

    def _lost(self, peer: Endpoint, source: Log, after: int, before: int) -> None:
        """An endpoint will never get what is between these seqs."""
        reason = Gap.REASON_RETENTION if before - 1 <= source.floor_seq else Gap.REASON_CORRUPTION
        gap = Gap(reason=reason, incarnation=source.incarnation, after_seq=after, before_seq=before)
        self.gaps.add(gap, peer.name, f"endpoint {peer.name} will not get these records of the {source.name} log")

    def _network_lost(self, endpoint: Endpoint, what: str, messages: int | None) -> None:
        """What was lost never came here, so nobody can say what it was."""
        endpoint.dropped["lost_by_network"] += messages or 1
        log.error("a network has lost messages for us", endpoint=endpoint.name, what=what, messages_at_most=messages)
        self.logs.durable.note_loss(damages.NETWORK, f"endpoint {endpoint.name}: {what}")

    # What is listened to

    async def sync(self) -> None:
        """Make every ingress listen to what is needed now. Raises the first UStatusError, after all were tried."""
        topics = list(self.interest.topics())
        names = [endpoint.name for endpoint in self.endpoints if endpoint.name in self._open]
        # one that hangs holds up no other
        results = await asyncio.gather(*(self._sync_one(name, topics) for name in names))
        errors = [error for error in results if error is not None]
        if errors:
            raise errors[0]

    async def _sync_one(self, name: str, topics: Sequence[UUri]) -> UStatusError | None:
        try:
            await self.ingresses[name].sync(topics, all_publishes=not self.interest.can_list)
        except UStatusError as error:
            self._troubles[name] = f"listening failed: {error}"
            return error
        self._troubles.pop(name, None)
        return None

    def _interest_changed(self) -> None:
        self._changed.set()
        self._wake_pumps()

    def _wake_pumps(self) -> None:
        for pump in self.pumps:
            pump.wake()

    async def _subscription_changed(self, _: Any) -> None:
        """The embedded service is about to answer: listen first, so that nothing published after the answer is missed.

        A network that has just gone is waited for a little: what is published there before we are back reaches nobody.
        """
        await self._listen()
        loop = asyncio.get_running_loop()
        until = loop.time() + BACK_SOON_S
        while (
            (just_gone := any(until - BACK_SOON_S - at < JUST_GONE_S for at in self._gone_at.values()))
            and loop.time() < until
            and not self._stopping.is_set()
        ):
            self._back.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._back.wait()
            await self._listen()
        if just_gone:
            log.info("a subscription is answered though a network is away: it counts there from when that is back")

    async def _entities_changed(self) -> None:
        """A service inside has come or gone: what is for it goes another way now."""
        self._forget_routes()
        await self._listen()

    def _forget_routes(self) -> None:
        for one in (*self.ingresses.values(), self._entry):
            one.forget_routes()

    def _gather_refused(self) -> None:
        for one in self.ingresses.values():
            one.gather_refused()

    def _is_named(self, authority: str, endpoint: str) -> bool:
        """The services inside have no endpoint."""
        return not endpoint or authority in self.endpoints[endpoint].authorities

    async def _listen(self) -> None:
        """Listen to what can be listened to now, and leave the rest to `_follow_interest`: one network that refuses
        stops nothing."""
        try:
            await self.sync()
        except UStatusError as error:
            log.warning("could not listen to everything; trying again", error=str(error))
            self._changed.set()

    async def _follow_interest(self) -> None:
        backoff = _backoff(self.config, self._runtime)
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.sync()
            except UStatusError as error:
                log.warning("could not listen to everything; trying again", error=str(error))
                await backoff.wait()
                self._changed.set()
            else:
                backoff.reset()

    # Rules at run time

    async def add_rule(self, rule: Rule) -> None:
        """Let messages pass. Raises ALREADY_EXISTS, NOT_FOUND (no such endpoint) or what a network answers; then
        nothing has changed."""
        for name in (rule.ingress, rule.egress):
            if name not in self.ingresses:
                raise UStatusError(
                    UCode.NOT_FOUND, f"there is no endpoint {name!r}; there are {', '.join(self.ingresses)}"
                )
        self.rules.add(rule)
        try:
            await self.sync()
        except UStatusError:
            self.rules.remove(rule.ingress, rule.egress)
            await self._listen()
            raise

    def release(self, consumer: str) -> str:
        """Take a consumer's name from its owner, for the next uEntity that uses it; who had it. Raises NOT_FOUND."""
        owner = str(self.history.consumers.release(consumer))
        log.info("a consumer was released", consumer=consumer, owner=owner)
        return owner

    async def remove_rule(self, ingress: str, egress: str) -> None:
        """Stop passing messages. Raises NOT_FOUND."""
        self.rules.remove(ingress, egress)
        await self.sync()

    # How it is

    def is_connected(self, endpoint: Endpoint) -> bool:
        connected = endpoint.name in self._open and endpoint.connected
        if connected:
            self._linked.add(endpoint.name)  # also of a transport that tells of reconnections only
        return connected

    def dropped(self, endpoint: Endpoint) -> Counter[str]:
        """Drops by reason, those of the transport included."""
        return endpoint.dropped + Counter(getattr(endpoint.transport, "dropped", {}))

    def problems(self) -> list[str]:
        """What is wrong; empty: ready."""
        problems = [
            f"{'endpoint ' * (name in self.ingresses)}{name}: {trouble}" for name, trouble in self._troubles.items()
        ]
        for endpoint in self.endpoints:
            if (
                not self.is_connected(endpoint)
                and endpoint.name in self._linked
                and not endpoint.transport.only_listens
            ):
                problems.append(f"endpoint {endpoint.name}: its network is away")
            problems += [f"endpoint {endpoint.name}: {trouble}" for trouble in endpoint.troubles]
        problems += [f"endpoint {pump.peer.name}: {pump.trouble}" for pump in self.pumps if pump.trouble]
        problems += self.claims.problems()
        problems += [
            f"uSubscription of {name} does not answer: its last known subscriptions serve"
            for name in self.interest.unhealthy
        ]
        problems += [
            f"the {'durable' if one.durable else 'volatile'} log refuses messages"
            for one in self.logs
            if not one.healthy
        ]
        problems += [_damage_problem(one) for one in self.logs if one.damage]
        if self.paused.trouble:
            problems.append(self.paused.trouble)
        if self.dead_letters.trouble:
            problems.append(f"dead letters: {self.dead_letters.trouble}")
        if self.usubscription is not None and self.usubscription.trouble is not None:
            problems.append(
                f"uSubscription answers nobody, and the last known subscriptions serve: {self.usubscription.trouble}"
            )
        elif (
            self.usubscription is not None and not self.usubscription.healthy and "usubscription" not in self._troubles
        ):
            problems.append("the subscriptions can't be stored")
        if not self.ready.is_set():
            problems.append("starting")
        return problems

    def notes(self) -> list[str]:
        """What somebody may want to know though nothing is wrong."""
        held, idle = "what comes waits in the log", "which there is not (any more), so nothing waits"
        paused = [
            f"paused: {one.topic} to {one.peer}; {held if self.paused.is_peer(one.peer) else idle}"
            for one in sorted(self.paused)
        ]
        return [*self.endpoints.notes(), *self.ledger.notes(), *paused]

    def topics_of(self, authority: str) -> int:
        """How many topics of it the logs know."""
        return sum(one.topics_of(authority) for one in self.logs)

    def vehicles(self, count: int) -> list[dict[str, Any]]:
        """What the source authorities send, those that send most first."""
        return [account.as_dict(self.topics_of(account.authority)) for account in self.ledger.by_rate(count)]

    def all_vehicles(self) -> Iterator[dict[str, Any]]:
        """The same of all of them, in the order in which they were first heard."""
        return (account.as_dict(self.topics_of(account.authority)) for account in list(self.ledger))

    def stats(self) -> dict[str, Any]:
        """Counters as plain data."""
        return {
            "endpoints": {
                e.name: {
                    "received": e.received,
                    "forwarded": e.forwarded,
                    "dropped": dict(self.dropped(e)),
                    "connected": self.is_connected(e),
                }
                for e in self.endpoints
            },
            "logs": {
                "durable" if one.durable else "volatile": {"newest_seq": one.newest_seq, "bytes": one.stored_bytes}
                for one in self.logs
            },
            "dead_letters": self.dead_letters.total,
            "problems": self.problems(),
        }

    async def _publish(self, topic: UUri, told: Message) -> None:
        """On a topic of core.ustreamer."""
        await self.hosted.send(UMessageBuilder.publish(topic).with_id(uuids.new()).pack(told))


class _Unmade(UTransport):
    """Stands for a transport whose constructor failed."""

    def __init__(self, why: str) -> None:
        self._why = why

    connected = False

    async def open(self) -> None:
        raise UStatusError(UCode.UNAVAILABLE, self._why)

    async def send_batch(self, messages: Sequence[Any]) -> list[UStatus]:
        return [UStatus(code=UCode.UNAVAILABLE, message=self._why)] * len(messages)


def _damage_problem(one: Log) -> str:
    newest: Damage = one.damage[-1]
    return (
        f"the {one.name} log has {len(one.damage)} damages that nobody has acknowledged, at the last {newest.kind}"
        f"{f' ({newest.detail})' if newest.detail else ''}; see 'up-streamer history verify', then 'up-streamer "
        "history acknowledge'"
    )


async def _within(seconds: float, what: str, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, but not for longer: the process has to end."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        log.warning("closing took too long; going on without", part=what, seconds=seconds)


def _rule(section: RuleSection) -> Rule:
    return Rule(section.from_, section.to, patterns(section.allow), patterns(section.deny))


def _limits(config: Config) -> Limits:
    return Limits(config.limits.memory_mib << 20, config.limits.message_bytes_max)


def _entry(section: AccessSection) -> Entry:
    callers, allow, deny = (
        [Pattern.parse(text) for text in texts] for texts in (section.callers, section.allow, section.deny)
    )
    return Entry(section.endpoint or "", callers, allow, deny)


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
        async with ControlSocket(config.streamer.data_dir, streamer.paused, streamer.release, streamer.vehicles):
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
    told = ""
    while not stopping.is_set():
        try:
            return await Streamer.create(config)
        except UStatusError as error:
            if error.code not in (UCode.UNAVAILABLE, UCode.RESOURCE_EXHAUSTED):
                raise
            trouble = str(error)
        if trouble != told:
            told = trouble
            log.error("the streamer can't start; trying again", error=trouble)
        async with contextlib.AsyncExitStack() as stack:
            if config.streamer.admin is not None:
                problems: Callable[[], list[str]] = functools.partial(list, (told,))
                await stack.enter_async_context(Admin(config.streamer.admin, problems, guard=config.admin))
            waiting = asyncio.ensure_future(stopping.wait())
            await asyncio.wait({waiting}, timeout=backoff.next_ms() / 1000)
            waiting.cancel()
    return None
