"""Creates what depends only on the configuration; assembly.py connects it.

Config -> endpoints_of -> usubscription_of -> interest_sources_of
       -> logs_of: opens the files, and reads the ids of recent messages
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
from pydantic import ValidationError

from history.epochs.groups import Group
from history.log.log import Log
from history.service.keeper import Keeper
from storage import faults
from storage.disk import PRIVATE_FOLDER
from storage.faults import Reserve
from storage.runtime import Runtime
from streamer.config import AccessSection, Config, EndpointSection, FollowSection, RuleSection, patterns
from streamer.config.sections import MEMORY_MIB
from streamer.data_dir import LOG_FILE, RESERVE_FILE, SUBSCRIPTIONS_FILE, interest_file
from streamer.following.followed import Follow
from streamer.operating.backup import finish_restore
from streamer.walk.access import AccessEntry, AccessPattern
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.hosted import USUBSCRIPTION, HostedTransport
from streamer.walk.ingress import IdWindow, Logs
from streamer.walk.sender import SENDERS_SHARE
from streamer.walk.view import Rule, Rules
from transports import certificates
from transports import plugin as plugins
from transports.base import TransportSettings
from transports.certificates import CertificateFile
from uprotocol import uri as uris
from uprotocol.cache import STREAMS_CACHED_MAX
from uprotocol.core.ustreamer import ids
from uprotocol.status import UStatusError
from uprotocol.transport import MESSAGE_BYTES_MAX, Capability, LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.service import USubscriptionService
from usubscription_client import EmbeddedInterest, InterestSource, ServiceInterest, StaticFile

# messages a second to a network outside the vehicle. 20 vehicles that come back together send as much as one core
# forwards, and each is far below its quota there (UNITS_PER_S)
PACE_OUTSIDE_PER_S: Final = 1_000
RECENT_IDS: Final = 65_536  # read from the log at start, to recognise messages that a network delivers twice

# memory_mib is divided among topics, queues and caches: every share stands here
TOPIC_BYTES: Final = 1_024  # memory of a topic with its caches; measured, see docs/security.md
VOLATILE_SHARE: Final = 4  # ... the volatile log, a quarter of the topics: it is for few topics with high rates
SUBSCRIPTION_BYTES: Final = 2_048  # memory of a subscription to its own topic, with interest and index; measured
AUTHORITIES_SHARE: Final = 8  # ... one authority, an eighth of the topics
CACHED_SHARE: Final = 10  # the caches hold a tenth of the topics; some 3 KB each

log = structlog.get_logger()


@dataclass(frozen=True)
class MemoryLimits:
    """Limits in messages and bytes. Half of `memory_bytes` is for topics; each queue has a fixed share of the rest."""

    memory_bytes: int = MEMORY_MIB << 20
    message_bytes_max: int = MESSAGE_BYTES_MAX

    @property
    def topics_max(self) -> int:
        """Maximum of topics in all logs together."""
        return self.memory_bytes // 2 // TOPIC_BYTES

    @property
    def authority_topics_max(self) -> int:
        return max(1, self.topics_max // AUTHORITIES_SHARE)

    @property
    def streams_cached_max(self) -> int:
        """Maximum of streams in each cache (uprotocol.cache.raise_streams_max)."""
        return max(STREAMS_CACHED_MAX, self.topics_max // CACHED_SHARE)

    @property
    def authorities_max(self) -> int:
        """Maximum of source authorities with an account, some 500 bytes each."""
        return self.memory_bytes // 16 // 512

    @property
    def volatile_topics_max(self) -> int:
        """Share of the volatile log in `topics_max`, if topics are configured for it; the others are durable."""
        return max(1, self.topics_max // VOLATILE_SHARE)

    @property
    def subscriptions_max(self) -> int:
        """Maximum in the embedded uSubscription, and from each remote one; its quotas are shares of it."""
        return self.memory_bytes // 4 // SUBSCRIPTION_BYTES

    @property
    def followed_topics_max(self) -> int:
        """Maximum of topics that followers of the history have named, some 500 bytes each."""
        return self.memory_bytes // 16 // 512

    @property
    def express_bytes_max(self) -> int:
        """Maximum of requests, responses and history frames that wait for one endpoint."""
        return max(2 * self.message_bytes_max, self.memory_bytes // 32)

    @property
    def window_bytes_max(self) -> int:
        """Maximum that is pushed to one follower and unconfirmed: all of it may wait for its endpoint."""
        return self.express_bytes_max // SENDERS_SHARE

    @property
    def dead_letter_bytes_max(self) -> int:
        """Maximum of dead letters that are not stored yet."""
        return max(2 * self.message_bytes_max, self.memory_bytes // 64)

    @property
    def replies_bytes_max(self) -> int:
        """Maximum of responses of the hosted services that the network has not accepted yet."""
        return max(2 * self.message_bytes_max, self.memory_bytes // 16)

    @property
    def reply_bytes_max(self) -> int:
        """Reserved for one response of the history: one longest message, or some thousands of short ones."""
        return max(self.message_bytes_max, 1 << 20) + (256 << 10)


def endpoints_of(config: Config, transports: dict[str, UTransport] | None = None) -> Endpoints:
    """Returns the endpoints, with `transports` or new ones; opens nothing."""
    given = transports or {}
    return Endpoints(endpoint_of(config, section, given.get(section.name)) for section in config.endpoint)


def endpoint_of(config: Config, section: EndpointSection, transport: UTransport | None = None) -> Endpoint:
    """Returns the endpoint, with `transport` or the one of its section; opens nothing."""
    endpoint = Endpoint(section.name, section.authorities, transport or transport_of(config, section), section.suffix)
    adjust(endpoint, config, section)
    return endpoint


def adjust(endpoint: Endpoint, config: Config, section: EndpointSection) -> None:
    """Has an endpoint with a new transport do what its section says."""
    endpoint.sends.ms_max = config.egress.send_ms_max
    endpoint.transport.tells_absence = section.hold
    endpoint.tells_absence = section.hold and Capability.ABSENCE in endpoint.transport.capabilities


def messages_per_s_of(config: Config, name: str) -> int | None:
    """Returns how many publishes and notifications a second leave for an endpoint. None: as fast as it goes."""
    section = next(each for each in config.endpoint if each.name == name)
    return section.messages_per_s or config.egress.messages_per_s or (PACE_OUTSIDE_PER_S if section.suffix else None)


def make_transport(config: Config, section: EndpointSection) -> UTransport:
    """Returns the transport of an endpoint, not open. Raises UStatusError as `transports.plugin.create`."""
    named = [authority for authority in section.authorities if not uris.is_pattern(authority)]
    authority = config.authority if config.authority in named or not named else named[0]
    local = LocalUriProvider(authority, ids.ENTITY, ids.VERSION)
    transport = plugins.create(section.transport, section.settings, local)
    transport.message_bytes_max, transport.refused = config.limits.message_bytes_max, {}
    return transport


def transport_of(config: Config, section: EndpointSection) -> UTransport:
    """Returns the transport of an endpoint, not open; one that only reports why, if its constructor fails."""
    try:
        return make_transport(config, section)
    except plugins.NotMade as error:  # affects only this endpoint
        log.error("a transport can't be made", endpoint=section.name, why=error.message)
        return _Unmade(error.message)


def bare_endpoints_of(config: Config) -> Endpoints:
    """Returns the endpoints without their transports, to see what goes where."""
    nothing = _Unmade("it has no transport")
    return Endpoints(Endpoint(peer.name, peer.authorities, nothing, peer.suffix) for peer in config.endpoint)


class _Unmade(UTransport):
    """Replaces a transport whose constructor failed, or that nobody needs."""

    def __init__(self, why: str) -> None:
        self._why = why

    connected = False

    async def open(self) -> None:
        raise UStatusError(UCode.UNAVAILABLE, self._why)

    async def send_batch(self, messages: Sequence[Any]) -> list[UStatus]:
        return [UStatus(code=UCode.UNAVAILABLE, message=self._why)] * len(messages)


def usubscription_of(
    config: Config, hosted: HostedTransport, runtime: Runtime, drain_ms_max: int
) -> USubscriptionService | None:
    """Returns the embedded service; None if it is not configured."""
    if config.usubscription_of(config.home) != "embedded":
        return None
    limits = limits_of(config)
    return USubscriptionService(
        hosted,
        config.authority,
        config.streamer.data_dir / SUBSCRIPTIONS_FILE,
        also=config.answers_for,
        runtime=runtime,
        drain_ms_max=drain_ms_max,
        reset=config.usubscription.reset,
        subscriptions_max=limits.subscriptions_max,
        message_bytes_max=limits.message_bytes_max,
        neighbours=neighbours_of(config),
    )


def neighbours_of(config: Config) -> list[str]:
    """Returns the authorities that an endpoint names, and that may have a uSubscription of their own."""
    ours = {config.authority, *config.answers_for}
    named = (name for section in config.endpoint for name in section.authorities if not uris.is_pattern(name))
    return [name for name in named if not uris.is_one_of(name, ours)]


def entities_of(config: Config) -> list[int]:
    """Returns the ids of the hosted uEntities with methods."""
    return [ids.ENTITY, *([USUBSCRIPTION] if config.usubscription_of(config.home) == "embedded" else [])]


def interest_sources_of(
    config: Config,
    hosted: HostedTransport,
    endpoints: Endpoints,
    embedded: USubscriptionService | None,
    runtime: Runtime,
) -> list[InterestSource]:
    """Returns the sources of subscriptions; each uSubscription's answer is saved in its own file."""
    sources: list[InterestSource] = []
    for section in config.endpoint:
        if config.usubscription_of(section) == "embedded":
            assert embedded is not None
            sources.append(EmbeddedInterest(embedded, saved_interest_of(config, config.authority), runtime))
        sources += remote_sources_of(config, section, hosted, endpoints, runtime)
    if config.usubscription.static_file is not None:
        sources.append(StaticFile(config.usubscription.static_file))
    return sources


def saved_interest_of(config: Config, authority: str) -> Path:
    return config.streamer.data_dir / interest_file(authority)


def remote_authorities_of(config: Config, section: EndpointSection) -> list[str]:
    """Returns the authorities whose uSubscription services are asked at an endpoint; empty if its mode is not
    remote."""
    if config.usubscription_of(section) != "remote":
        return []
    named = (authority for authority in section.authorities if not uris.is_pattern(authority))
    return [authority for authority in named if not uris.is_one_of(authority, config.answers_for)]


def remote_sources_of(
    config: Config,
    section: EndpointSection,
    hosted: HostedTransport,
    endpoints: Endpoints,
    runtime: Runtime,
    wanted: Callable[[str], bool] = lambda authority: True,
) -> list[ServiceInterest]:
    """Returns the uSubscription services on the network of an endpoint, of the authorities that are `wanted`."""
    endpoint = endpoints[section.name]
    return [
        ServiceInterest(
            hosted.toward(endpoint),
            LocalUriProvider(config.authority, ids.ENTITY, ids.VERSION),
            authority,
            refresh_ms=int(config.usubscription.refresh_s * 1000),
            saved=saved_interest_of(config, authority),
            runtime=runtime,
            lives_there=lambda authority: endpoints.owner(authority) is endpoint,
            subscriptions_max=limits_of(config).subscriptions_max,
        )
        for authority in remote_authorities_of(config, section)
        if wanted(authority)
    ]


def reserve_of(config: Config) -> Reserve:
    """Returns the reserve on the disk of `data_dir`. Raises FAILED_PRECONDITION if it can't be used."""
    asked = config.history.reserve_mib
    try:
        return faults.reserve_of(config.streamer.data_dir / RESERVE_FILE, None if asked is None else asked << 20)
    except OSError as error:
        why = f"streamer.data_dir {config.streamer.data_dir} can't be used ({error.strerror}): choose a folder that can"
        raise UStatusError(UCode.FAILED_PRECONDITION, why) from None


def given_up_note(config: Config, reserve: Reserve) -> Iterator[str]:
    """Yields a note while a store uses the reserve."""
    if not reserve.is_whole and config.streamer.data_dir.exists():
        yield (
            f"the disk of {config.streamer.data_dir} is full: its reserve of {reserve.bytes >> 20} MiB was given up. "
            "Old records of the log make room, and then it is made again"
        )


def too_small_note(config: Config, limit_bytes: int) -> Iterator[str]:
    """Yields a note if the disk limits the log to less than its configured size."""
    if limit_bytes < config.history.retention_mib << 20:
        yield (
            f"history.retention_mib: {config.history.retention_mib} MiB do not fit the disk of "
            f"{config.streamer.data_dir}: what is free there and what the log has are {limit_bytes >> 20} MiB without "
            "the reserve (history.reserve_mib), so the oldest records go at that size: "
            "make room, or lower retention_mib"
        )


async def logs_of(config: Config, runtime: Runtime) -> tuple[Logs, IdWindow]:
    """Returns both logs, open, and the ids of recent records of the durable one. Raises UStatusError."""
    data_dir, history, limits = config.streamer.data_dir, config.history, limits_of(config)
    try:
        data_dir.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    except OSError as error:
        why = f"streamer.data_dir {data_dir} can't be made ({error.strerror}): choose a folder that can"
        raise UStatusError(UCode.FAILED_PRECONDITION, why) from None
    volatile_topics = limits.volatile_topics_max if history.volatile else 1  # without a pattern none is used
    shared: dict[str, Any] = {
        "retention_ms": _retention_ms(config),
        "authority_streams_max": limits.authority_topics_max,
        "runtime": runtime,
    }
    finish_restore(data_dir, runtime.disk)
    durable = await Log.open(
        data_dir / LOG_FILE,
        name="durable",
        retention_bytes=history.retention_mib << 20,
        streams_max=max(1, limits.topics_max - volatile_topics),
        gather_ms=history.gather_ms,
        **shared,
    )
    try:
        volatile = await Log.open(
            None, name="volatile", retention_bytes=history.volatile_mib << 20, streams_max=volatile_topics, **shared
        )
        window = IdWindow()
        for stream, id in await durable.recent_ids(RECENT_IDS):
            if durable.knows_stream(stream):  # else its records are damaged, which is reported when they are read
                source = durable.stream(stream).source.SerializeToString()
                window.take(id + source)
        return Logs(durable, volatile, patterns(history.volatile), recorded_of(config)), window
    except BaseException:
        await durable.close()
        raise


def recorded_of(config: Config) -> list[UUri]:
    """Returns the patterns of topics that are kept whether or not somebody has subscribed."""
    kept = [topic for section in config.epochs for topic in section.topics]
    kept += [section.topic for section in config.channel]
    kept += [topic for section in config.recovery for topic in section.topics]
    return patterns([*config.history.record, *kept])


def retain(config: Config, logs: Logs) -> None:
    """Has open logs keep what the configuration says."""
    history = config.history
    age_ms = _retention_ms(config)
    logs.durable.limit(age_ms, history.retention_mib << 20, history.gather_ms)
    logs.volatile.limit(age_ms, history.volatile_mib << 20)


def _retention_ms(config: Config) -> int:
    return int(config.history.retention_hours * 3_600_000)


async def keeper_of(config: Config, logs: Logs, runtime: Runtime) -> Keeper:
    """Returns the keeper of the epochs. Raises FAILED_PRECONDITION if a group was kept differently before."""
    groups = [
        Group(
            section.name,
            patterns(section.topics),
            section.width_ms if section.by == "bucket" else None,
            section.lateness_ms,
            section.ahead_ms,
            section.timeout_ms,
        )
        for section in config.epochs
    ]
    reporting = [logs.durable, *([logs.volatile] if config.history.volatile else [])]
    keeper = Keeper(ids.at(config.authority, ids.FRONTIERS), groups, reporting, runtime.now_ms)
    await keeper.open()
    return keeper


def addresses_of(config: Config) -> set[str | None]:
    """Returns the addresses (HOST:PORT) of the HTTP ports."""
    return {config.streamer.admin, config.http.listen, config.grip.publish}


def limits_of(config: Config) -> MemoryLimits:
    return MemoryLimits(config.limits.memory_mib << 20, config.limits.message_bytes_max)


def rules_of(config: Config) -> Rules:
    rules = Rules()
    rules.replace(map(rule_of, config.rules))
    return rules


def rule_of(section: RuleSection) -> Rule:
    return Rule(section.from_, section.to, patterns(section.allow), patterns(section.deny))


def certificates_of(config: Config) -> Iterator[tuple[str, CertificateFile]]:
    """Yields each configured certificate with its endpoint's name; "" for the admin port, open or not, EDGE for the
    HTTP edge."""
    yield from (("", file) for file in config.admin.certificate_files)
    yield from ((certificates.EDGE, file) for file in config.http.certificate_files)
    for section in config.endpoint:
        yield from ((section.name, file) for file in certificates_of_endpoint(section))


def certificates_of_endpoint(section: EndpointSection) -> Iterable[CertificateFile]:
    with contextlib.suppress(UStatusError, ValidationError):  # reported when the transport is created
        _, settings = plugins.configure(section.transport, section.settings)
        if isinstance(settings, TransportSettings):
            return settings.certificate_files
    return ()


def follow_of(section: FollowSection, endpoints: Endpoints) -> Follow:
    service = AccessPattern.parse(section.service)
    return Follow(endpoints[section.endpoint], service, tuple(patterns(section.topics)), section.mode)


def notes_of(config: Config, endpoints: Endpoints, rules: Iterable[Rule]) -> Iterator[str]:
    """Yields a sentence for each configured following that can transfer nothing."""
    ways = list(rules)
    asks = [mode for section in config.endpoint if (mode := config.usubscription_of(section)) != "none"]
    keeps_nothing = ""
    if not config.history.record and not asks and config.usubscription.static_file is None:
        keeps_nothing = "no uSubscription says what is wanted, and [history] record names nothing"
    for section in config.follow:
        what = f"endpoint {section.endpoint}: of {section.service} nothing is taken"
        if not config.history.record and not section.topics:
            if keeps_nothing:
                yield f"{what}: {keeps_nothing}"
            elif not any(rule.ingress == section.endpoint for rule in ways):
                yield f"{what}: no rule lets anything from there go on, and no topics or [history] record are set"
        service = AccessPattern.parse(section.service)
        if (
            service.address.ue_id >> 16
            and uris.is_pattern(service.authority)
            and endpoints[section.endpoint].needs_sink
        ):
            yield f"{what}: no announcement is heard there; name each publisher, as //vehicle1/80010004/1/0"
    for endpoint in config.endpoint:
        if endpoint.followed_by is None:
            continue
        what = f"endpoint {endpoint.name}: {endpoint.followed_by} has nothing to follow"
        may_read = any(entry.allow and entry.endpoint in (None, endpoint.name) for entry in config.access)
        if keeps_nothing:
            yield f"{what}: {keeps_nothing}"
        elif not may_read and not any(rule.egress == endpoint.name for rule in ways):
            yield f"{what}: no rule lets anything go there, and no [[access]] allows it"
        if endpoint.name == config.home.name:
            what = f"once {endpoint.followed_by} has taken over, who has subscribed on our own network gets no publish"
            yield f"endpoint {endpoint.name}: {what} of other networks from us"


def access_of(config: Config) -> list[AccessEntry]:
    return [_entry_of(section) for section in config.access]


def _entry_of(section: AccessSection) -> AccessEntry:
    parsed = ([*map(AccessPattern.parse, texts)] for texts in (section.callers, section.allow, section.deny))
    return AccessEntry(section.endpoint or "", *parsed)
