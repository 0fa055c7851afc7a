"""Zenoh: publications both ways, one subscriber for each filter.

send_batch -> one hop -> sender thread: Outbox, encode, put by a declared publisher     BLOCK: a slow peer is felt here
Zenoh's thread: bytes -> Inbox -> loop: decode, UUri matching for that filter -> listeners

Zenoh delivers a message once to each subscriber that matches, hence `deliver` for one filter only. It acknowledges nothing: what is on
its way when a link breaks is lost, so there is no Capability.ACK. How priorities map: zenoh_mapping.PRIORITIES. Who may publish and
subscribe what is the business of Zenoh's access_control (`settings`), with TLS or user and password to tell who is who.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar

import structlog
import zenoh
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from transports import zenoh_mapping as mapping
from transports.inbox import Inbox
from transports.listeners import LISTENERS_MAX, LISTENERS_PER_FILTER_MAX, Filter, ListenerTable
from transports.outbox import OK, Outbox, stopped
from transports.plugin import TransportPlugin
from uprotocol.encoded import Carried, EncodedMessage, decoded, is_shared, suffix
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import Capability, ConnectionCallback, LocalUriProvider, UListener, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

PUBLISHERS_MAX: Final = 4_096  # declared at once, some 2 KB each; beyond it the one unused for longest is undeclared
SETTLE_POLL_S: Final = 0.005
SETTLE_S_MAX: Final = 1.0  # after the first link: subscriptions are declared within milliseconds of it, and what is put before is lost
SETTLE_MORE_S: Final = 0.1  # after the first subscription that we see: the others come with it, and what nobody wants must hold up nothing
LANES_MAX: Final = 16_384  # stamps whose publisher is known; the cache starts anew when it is full
DRAIN_S_MAX: Final = 2.0  # how long `close` waits for listeners to take what has arrived
SOURCE_PLACE: Final = re.compile(r" at /\S+\.rs:\d+\.?")  # where in Zenoh's source an error arose: no help to who reads it

log = structlog.get_logger()
T = TypeVar("T")
Arrived = tuple[Filter, bytes, bytes]  # of which subscriber, payload, attachment


class TlsConfig(BaseModel):
    """Files in PEM form. `certificate` and `private_key` are our own, for either side of a connection."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    root_ca: Path | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    mutual: bool = Field(default=False, description="demand a certificate of who connects to us")
    verify_name: bool = Field(default=True, description="hold the other side's certificate to its host name")


class ZenohConfig(BaseModel):
    """How to join a Zenoh network. Endpoints are Zenoh's: tcp/HOST:PORT, tls/HOST:PORT, ..."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["peer", "client", "router"] = "peer"
    listen: tuple[str, ...] = ()
    connect: tuple[str, ...] = ()
    multicast_scouting: bool = Field(default=False, description="find others by UDP multicast")
    connect_timeout_ms: int = Field(default=5_000, ge=1, description="of `open`; a link that is lost later is looked for without end")
    stall_ms_max: int = Field(default=60_000, ge=1, description="a peer that reads nothing for so long is cut off")
    user: str | None = None
    password: SecretStr | None = None
    credentials_file: Path | None = Field(default=None, description="lines of user:password that may connect to us")
    tls: TlsConfig | None = None
    config_file: Path | None = Field(default=None, description="a Zenoh configuration (JSON5); what is set here goes over it")
    settings: dict[str, Any] = Field(default_factory=dict, description="Zenoh settings by path, e.g. transport/link/tx/lease; set last")
    listeners_max: int = Field(default=LISTENERS_MAX, ge=1, description="listeners overall; beyond it RESOURCE_EXHAUSTED")
    listeners_per_filter_max: int = Field(default=LISTENERS_PER_FILTER_MAX, ge=1, description="listeners of one pair of filters")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not (self.listen or self.connect or self.multicast_scouting or self.config_file):
            raise ValueError("a Zenoh endpoint needs listen, connect, multicast_scouting or config_file: it would never meet anybody")
        if (self.user is None) != (self.password is None):
            raise ValueError("user and password come together")
        return self

    def to_zenoh(self) -> zenoh.Config:
        """Reads config_file. Raises UStatusError(INVALID_ARGUMENT)."""
        try:
            config = zenoh.Config.from_file(str(self.config_file)) if self.config_file else zenoh.Config()
        except zenoh.ZError as error:
            raise invalid(f"{self.config_file} is not a Zenoh configuration: {words(error)}") from None
        for path, value in {**self._settings(), **self.settings}.items():
            try:
                config.insert_json5(path, json.dumps(value))
            except zenoh.ZError as error:
                raise invalid(f"Zenoh does not take {path} = {value!r}: {words(error)}") from None
        return config

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "mode": self.mode,
            "scouting/multicast/enabled": self.multicast_scouting,
            "connect/timeout_ms": self.connect_timeout_ms,
            "connect/exit_on_failure": True,
            "transport/link/tx/queue/congestion_control/block/wait_before_close": self.stall_ms_max * 1_000,
            "transport/shared_memory/enabled": False,  # a process that is killed would leave its segments behind
        }
        if not self.config_file or self.listen:
            settings["listen/endpoints"] = self.listen  # also if empty: Zenoh's default is to listen on all interfaces
        if self.connect:
            settings["connect/endpoints"] = self.connect
        if self.user is not None and self.password is not None:
            settings |= {"transport/auth/usrpwd/user": self.user, "transport/auth/usrpwd/password": self.password.get_secret_value()}
        if self.credentials_file is not None:
            settings["transport/auth/usrpwd/dictionary_file"] = str(self.credentials_file)
        if self.tls is not None:
            files = {"root_ca_certificate": self.tls.root_ca}
            for side in ("connect", "listen"):
                files |= {f"{side}_certificate": self.tls.certificate, f"{side}_private_key": self.tls.private_key}
            settings |= {f"transport/link/tls/{name}": str(path) for name, path in files.items() if path is not None}
            settings["transport/link/tls/enable_mtls"] = self.tls.mutual
            settings["transport/link/tls/verify_name_on_connect"] = self.tls.verify_name
        return settings


def words(error: Exception) -> str:
    """What Zenoh says, without the places in its source."""
    return SOURCE_PLACE.sub("", str(error)).strip()


def translate(error: Exception, doing: str) -> UStatusError:
    """The one place where Zenoh's errors become ours. Zenoh has one exception only, so the words decide."""
    said = words(error)
    if "already in use" in said:
        return UStatusError(UCode.FAILED_PRECONDITION, f"{doing}: the port is in use; free it, or listen on another one ({said})")
    if "Invalid Key Expr" in said or "Endpoints must be" in said or "onfig" in said:
        return invalid(f"{doing}: {said}")
    return UStatusError(UCode.UNAVAILABLE, f"{doing}: {said}")


class _Lane(NamedTuple):
    """Where messages of one stamp go, and what has to be looked at in each of them."""

    publisher: zenoh.Publisher
    ttl: int
    format: int


class ZenohTransport(UTransport):
    """One Zenoh session."""

    capabilities = Capability.PUSH | Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK
    takes_encoded = True

    def __init__(self, config: ZenohConfig, local: LocalUriProvider) -> None:
        self._config, self._authority = config, local.get_authority()
        self._outbox = Outbox()  # the sender thread's alone
        self._table = ListenerTable(
            self._authority, listeners_max=config.listeners_max, listeners_per_filter_max=config.listeners_per_filter_max
        )
        self._session: zenoh.Session | None = None
        self._sender: ThreadPoolExecutor | None = None
        self._publishers: OrderedDict[tuple[str, int], zenoh.Publisher] = OrderedDict()  # by key, priority; the sender thread's alone
        self._lanes: dict[Any, _Lane] = {}  # by Stamp, or by the encoded attributes without the id; the sender thread's alone
        self._subscribers: dict[Filter, zenoh.Subscriber[None]] = {}
        self._registering = asyncio.Lock()  # a filter is declared or undeclared, never both at once
        self._peers: set[str] = set()
        self._settled_at = 0.0  # by then who has just linked us has declared its subscriptions; time.monotonic()
        self._connection_callbacks: list[ConnectionCallback] = []

    def __repr__(self) -> str:
        state = f"{len(self._peers)} peers" if self._session is not None else "closed"
        return f"ZenohTransport({self._authority}, {state}, filters={len(self._subscribers)}, publishers={len(self._publishers)})"

    @property
    def dropped(self) -> Counter[str]:
        """Messages thrown away on arrival, by reason: malformed, invalid, expired."""
        return self._table.dropped

    @property
    def connected(self) -> bool:
        """True while at least one peer or router is linked; without one, nobody would take what we send."""
        return bool(self._peers)

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._connection_callbacks.append(callback)

    async def open(self) -> None:
        """Raises UNAVAILABLE if nothing in `connect` answers, FAILED_PRECONDITION for a port in use, INVALID_ARGUMENT for settings."""
        if self._session is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._inbox: Inbox[Arrived] = Inbox(self._deliver)
        self._session = await self._call("opening the Zenoh session", lambda: zenoh.open(self._config.to_zenoh()))
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"zenoh-send-{self._authority}")
        loop = self._loop

        def on_event(event: zenoh.TransportEvent) -> None:
            opened, peer = event.kind == zenoh.SampleKind.PUT, str(event.transport.zid)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._on_peer, peer, opened)

        self._events = self._session.info.declare_transport_events_listener(on_event, history=True)
        for transport in self._session.info.transports():
            self._on_peer(str(transport.zid), True)

    async def close(self) -> None:
        """Stop listening, let the listeners take what has arrived, send what is queued, and leave."""
        session, self._session = self._session, None
        if session is None or self._sender is None:
            return
        async with self._registering:
            subscribers = list(self._subscribers.values())
            self._subscribers.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S_MAX):
                await asyncio.to_thread(_undeclare, subscribers)
                await self._inbox.drained()
        self._inbox.close()
        await asyncio.to_thread(_close, session, self._sender)
        self._publishers.clear()
        self._lanes.clear()
        for peer in list(self._peers):
            self._on_peer(peer, False)

    def _on_peer(self, peer: str, linked: bool) -> None:
        before = bool(self._peers)
        if linked and self._session is not None:
            self._peers.add(peer)
        else:
            self._peers.discard(peer)
        if bool(self._peers) == before:
            return
        if not before:
            self._settled_at = time.monotonic() + SETTLE_S_MAX
        for callback in self._connection_callbacks:
            try:
                callback(not before)
            except Exception:
                log.exception("a connection callback failed", callback=repr(callback))

    async def _call(self, doing: str, call: Callable[[], T]) -> T:
        """A control call of Zenoh, off the loop."""
        try:
            return await asyncio.to_thread(call)
        except zenoh.ZError as error:
            raise translate(error, doing) from None

    async def send_batch(self, messages: Sequence[Carried]) -> list[UStatus]:
        session, sender = self._session, self._sender
        if session is None or sender is None:
            return stopped([], len(messages), _NOT_OPEN)
        if not messages:
            return []
        statuses = await self._loop.run_in_executor(sender, self._put, session, messages)
        if not self._peers:  # lost meanwhile: what was put may have gone nowhere
            return [_NO_PEER if status is OK else status for status in statuses]
        return statuses

    def _put(self, session: zenoh.Session, messages: Sequence[Carried]) -> list[UStatus]:
        """On the sender thread. Messages of a stream that is known need no validation: what may differ is the payload and the age."""
        statuses: list[UStatus] = []
        now_ms, lanes, peers, version = self._outbox.now_ms(), self._lanes, self._peers, mapping.VERSION_BYTE
        settling = time.monotonic() < self._settled_at
        for message in messages:
            mark: Any
            if type(message) is EncodedMessage:
                encoded, mark = message.encoded, message.stamp
            else:
                encoded = message.attributes.SerializeToString()
                mark = suffix(encoded)
            lane = lanes.get(mark)
            try:
                if lane is None or lane.ttl or (lane.format and not message.HasField("payload")):
                    refusal = self._outbox.refusal(decoded(message), now_ms)
                    if refusal is not None:
                        statuses.append(refusal)
                        continue
                    lane = lane or self._lane(session, decoded(message), mark)
                if not peers:
                    return stopped(statuses, len(messages), _NO_PEER)
                if settling:
                    settling = self._await_match(lane.publisher)
                lane.publisher.put(message.payload, attachment=version + encoded)
            except zenoh.ZError as error:
                return stopped(statuses, len(messages), translate(error, "sending").status)
            statuses.append(OK)
        return statuses

    def _await_match(self, publisher: zenoh.Publisher) -> bool:
        """On the sender thread, just after the first link: wait until somebody listens, or the time is over. True while it is not."""
        while (now := time.monotonic()) < self._settled_at:
            if _matches(publisher):
                self._settled_at = min(self._settled_at, now + SETTLE_MORE_S)
                return True
            time.sleep(SETTLE_POLL_S)
        return False

    def _lane(self, session: zenoh.Session, message: UMessage, mark: Any) -> _Lane:
        """The declared publisher for a message that is valid, remembered by its stamp."""
        attributes = message.attributes
        key = mapping.message_key(message, self._authority), attributes.priority
        publisher = self._publishers.get(key)
        if publisher is None:
            if len(self._publishers) >= PUBLISHERS_MAX:
                self._publishers.popitem(last=False)[1].undeclare()  # type: ignore[no-untyped-call]
                self._lanes.clear()  # one of them may have led to it
            publisher = self._publishers[key] = session.declare_publisher(
                key[0],
                congestion_control=zenoh.CongestionControl.BLOCK,
                priority=_PRIORITIES.get(attributes.priority, zenoh.Priority.DATA_LOW),
                reliability=zenoh.Reliability.RELIABLE,
                allowed_destination=zenoh.Locality.REMOTE,
            )
        self._publishers.move_to_end(key)
        lane = _Lane(publisher, attributes.ttl, attributes.payload_format)
        if mark is not None and is_shared(attributes):
            if len(self._lanes) >= LANES_MAX:
                self._lanes.clear()
            self._lanes[mark] = lane
        return lane

    async def register_listener(self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None) -> None:
        """As UTransport. Other sessions learn of a new filter a moment later; until then their messages don't come."""
        async with self._registering:
            session = self._opened()
            filter = self._table.add(source_filter, sink_filter, listener)
            if filter is None:
                return
            key = mapping.filter_key(filter.source, filter.sink, self._authority)
            try:
                self._subscribers[filter] = await self._call(f"subscribing to {key}", lambda: self._subscribe(session, key, filter))
            except UStatusError:
                self._table.remove(source_filter, sink_filter, listener)
                raise

    async def unregister_listener(self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None) -> None:
        async with self._registering:
            self._opened()
            filter = self._table.remove(source_filter, sink_filter, listener)
            if filter is not None:
                subscriber = self._subscribers.pop(filter)
                await self._call("ending a subscription", subscriber.undeclare)

    def _opened(self) -> zenoh.Session:
        if self._session is None:
            raise UStatusError.from_status(_NOT_OPEN)
        return self._session

    def _subscribe(self, session: zenoh.Session, key: str, filter: Filter) -> zenoh.Subscriber[None]:
        put, dropped = self._inbox.put, self.dropped

        def on_sample(sample: zenoh.Sample) -> None:
            """On Zenoh's thread: the bytes, and nothing more."""
            attachment = sample.attachment
            if attachment is None:
                dropped["malformed"] += 1
            else:
                put((filter, sample.payload.to_bytes(), attachment.to_bytes()))

        return session.declare_subscriber(key, on_sample, allowed_origin=zenoh.Locality.REMOTE)

    def _deliver(self, arrived: list[Arrived]) -> Awaitable[None] | None:
        version = mapping.VERSION_BYTE
        ours = [(filter, payload, attachment[1:]) for filter, payload, attachment in arrived if attachment[:1] == version]
        self.dropped["malformed"] += len(arrived) - len(ours)
        return self._table.deliver_encoded(ours)


_NOT_OPEN: Final = UStatus(code=UCode.UNAVAILABLE, message="the transport is not open: call open first")
_NO_PEER: Final = UStatus(code=UCode.UNAVAILABLE, message="no Zenoh peer or router is linked: try again when one is")
_PRIORITIES: Final = {number: getattr(zenoh.Priority, name) for number, name in mapping.PRIORITIES.items()}


def _matches(publisher: zenoh.Publisher) -> bool:
    status: Any = publisher.matching_status  # the stub says bool
    return bool(status.matching)


def _undeclare(subscribers: list[zenoh.Subscriber[None]]) -> None:
    for subscriber in subscribers:
        with contextlib.suppress(zenoh.ZError):
            subscriber.undeclare()  # type: ignore[no-untyped-call]


def _close(session: zenoh.Session, sender: ThreadPoolExecutor) -> None:
    sender.shutdown(wait=True)
    with contextlib.suppress(zenoh.ZError):
        session.close()  # type: ignore[no-untyped-call]


PLUGIN: Final = TransportPlugin("zenoh", ZenohConfig, ZenohTransport, ZenohTransport.capabilities)
