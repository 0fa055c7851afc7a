"""DDS, on Cyclone. docs/dds-mapping.md is the mapping, dds_mapping.py its code; dds_link.py and dds_roll_call.py may block,
and here is what runs on the loop.

send_batch -> one hop to the sender's thread: check, encode, write -> DDS           partitions bring it to whom it concerns, and to
listener   <- decode <- Inbox <- the readers' thread               <- DDS           nobody else
register_listener -> a reader -> until every peer has announced that it has found it (RollCall), or SEEN_S has passed
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar
from xml.sax.saxutils import escape, quoteattr

import structlog
from pydantic import BaseModel, ConfigDict, Field, model_validator

from transports import dds_mapping as mapping
from transports.dds_link import Participant, Readers, Writers
from transports.dds_roll_call import RollCall, Seen
from transports.inbox import MESSAGES_MAX, Inbox
from transports.listeners import LISTENERS_MAX, LISTENERS_PER_FILTER_MAX, Filter, ListenerTable, all_of
from transports.outbox import ROUTES_CACHED_MAX, Outbox, stopped
from transports.plugin import TransportPlugin
from uprotocol.encoded import Carried, EncodedMessage, Stamp, decoded
from uprotocol.status import OK, UStatusError
from uprotocol.transport import Capability, ConnectionCallback, LocalUriProvider, UListener, UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

T = TypeVar("T")

WRITERS_MAX: Final = 4_096  # of one transport, some 10 KB each; one per (source, sink, priority) in use
SEND_TIMEOUT_MS: Final = 2_000  # a receiver that takes nothing for so long is not slow but stuck
DISCOVERY_QUIET_MS: Final = 100  # discovery that found nothing new for so long is complete: on one host it takes 1 to 40 ms
DISCOVERY_S_MAX: Final = 2.0  # and opening waits no longer than this for it
SEEN_S: Final = 1.0  # for all peers to find a new reader; takes 1 to 30 ms, and a peer that is stuck must not stop us for ever
SEEN_KEPT_MAX: Final = 4_096  # announcements kept for readers that are being made just now
DRAIN_S: Final = 1.0  # for listeners to take what had arrived when the transport is closed

log = structlog.get_logger()


class DdsConfig(BaseModel):
    """Which domain, over which network. Without any option Cyclone decides, from CYCLONEDDS_URI if that is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    domain_id: int = Field(default=0, ge=0, le=230, description="participants of different domains never hear one another")
    interface: str | None = Field(default=None, description="network interface by name, as in `ip link`: lo for this host only")
    multicast: bool | None = Field(default=None, description="false: discovery asks the peers alone, by unicast")
    peers: tuple[str, ...] = Field(default=(), description="hosts that discovery asks directly")
    participants_per_host_max: int = Field(default=32, ge=1, le=119, description="without multicast: participants looked for on each peer")
    tag: str | None = Field(default=None, min_length=1, description="only participants with the same tag find one another")
    cyclone_xml: str | None = Field(default=None, description="a whole Cyclone configuration, instead of the options above")
    cyclone_file: Path | None = Field(default=None, description="a file with a whole Cyclone configuration, instead of the options above")
    discovery_quiet_ms: int = Field(default=DISCOVERY_QUIET_MS, ge=1, description="opening ends when discovery found nothing for so long")
    send_timeout_ms: int = Field(
        default=SEND_TIMEOUT_MS, ge=1, description="how long a slow receiver may hold up a sender: then UNAVAILABLE"
    )
    writers_max: int = Field(default=WRITERS_MAX, ge=1, description="DDS writers kept; the least recently used one gives way")
    inbox_messages_max: int = Field(default=MESSAGES_MAX, ge=1, description="messages between the network and the listeners")
    listeners_max: int = Field(default=LISTENERS_MAX, ge=1, description="listeners overall; beyond it RESOURCE_EXHAUSTED")
    listeners_per_filter_max: int = Field(default=LISTENERS_PER_FILTER_MAX, ge=1, description="listeners of one pair of filters")

    @model_validator(mode="after")
    def _one_configuration(self) -> Self:
        given = [name for name in ("cyclone_xml", "cyclone_file") if getattr(self, name) is not None]
        options = [name for name in ("interface", "multicast", "tag") if getattr(self, name) is not None] + ["peers"] * bool(self.peers)
        if len(given) > 1 or (given and options):
            raise ValueError(f"{given[0]} is a whole configuration and can't be combined with {', '.join((given + options)[1:])}")
        if self.multicast is False and not self.peers:
            raise ValueError("without multicast discovery needs peers: name at least one host, such as 127.0.0.1")
        if not (self.configuration() or "").isascii():
            raise ValueError("a Cyclone configuration is plain ASCII")
        return self

    def configuration(self) -> str | None:
        """Cyclone's XML, or the URI of its file; None leaves it to Cyclone."""
        if self.cyclone_xml is not None:
            return self.cyclone_xml
        if self.cyclone_file is not None:
            return self.cyclone_file.absolute().as_uri()
        general, discovery = "", ""
        if self.interface is not None:
            multicast = "" if self.multicast is None else f' multicast="{str(self.multicast).lower()}"'
            general += f"<Interfaces><NetworkInterface name={quoteattr(self.interface)}{multicast}/></Interfaces>"
        if self.multicast is not None:
            general += f"<AllowMulticast>{str(self.multicast).lower()}</AllowMulticast>"
        if self.tag is not None:
            discovery += f"<Tag>{escape(self.tag)}</Tag>"
        if self.multicast is False:
            discovery += "<ParticipantIndex>auto</ParticipantIndex>"
            discovery += f"<MaxAutoParticipantIndex>{self.participants_per_host_max - 1}</MaxAutoParticipantIndex>"
        if self.peers:
            discovery += f"<Peers>{''.join(f'<Peer address={quoteattr(peer)}/>' for peer in self.peers)}</Peers>"
        if not general and not discovery:
            return None
        return f"<CycloneDDS><Domain><General>{general}</General><Discovery>{discovery}</Discovery></Domain></CycloneDDS>"


class _Session:
    """What exists while the transport is open. The blocking constructors and `close` run on `sender`."""

    def __init__(
        self,
        config: DdsConfig,
        arrived: Callable[[Filter, list[bytes]], None],
        changed: Callable[[frozenset[bytes], Seen], None],
    ) -> None:
        with contextlib.ExitStack() as undo:
            self.participant = Participant(config.domain_id, config.configuration())
            undo.callback(self.participant.close)
            self.writers = Writers(self.participant, writers_max=config.writers_max, timeout_s=config.send_timeout_ms / 1000)
            self.readers = Readers(self.participant, arrived)
            undo.callback(self.readers.close)
            self.roll_call = RollCall(self.participant, changed)
            undo.pop_all()

    def close(self) -> None:
        self.writers.close()
        self.readers.close()
        self.roll_call.close()
        self.participant.close()


class _Lane(NamedTuple):
    """Where and how messages of one stamp are written."""

    partition: str
    priority: int
    lifespan_ms: int | None


class DdsTransport(UTransport):
    """A DDS participant that carries UMessages. `dropped` counts what arrived and was thrown away: malformed, invalid, expired."""

    capabilities = Capability.PUSH | Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK
    takes_encoded = True

    def __init__(self, config: DdsConfig, local: LocalUriProvider) -> None:
        self._config, self._local = config, local
        self._authority = local.get_authority()
        self._table = ListenerTable(
            self._authority, listeners_max=config.listeners_max, listeners_per_filter_max=config.listeners_per_filter_max
        )
        self._outbox = Outbox()
        self._partitions: dict[Any, str] = {}  # by (source, sink); the sender's thread only
        self._lanes: dict[Stamp, _Lane] = {}  # the sender thread's alone
        self._session: _Session | None = None
        self._opening = asyncio.Lock()
        self._readers: dict[Filter, asyncio.Task[int]] = {}
        self._peers: frozenset[bytes] = frozenset()
        self._silent: set[bytes] = set()  # peers that once did not answer in time: not waited for until they do
        self._seen: OrderedDict[bytes, set[bytes]] = OrderedDict()  # own reader -> peers that have found it
        self._awaited: dict[bytes, asyncio.Event] = {}  # own readers that a registration waits for
        self._news = asyncio.Event()  # discovery has found something
        self._connection_callbacks: list[ConnectionCallback] = []

    def __repr__(self) -> str:
        session = self._session
        state = f"writers={len(session.writers)}, readers={len(session.readers)}, {self._inbox!r}" if session is not None else "closed"
        return f"DdsTransport({self._authority}, domain={self._config.domain_id}, peers={len(self._peers)}, {state})"

    @property
    def dropped(self) -> Counter[str]:
        return self._table.dropped

    @property
    def connected(self) -> bool:
        """True while open: DDS has no connection to lose; participants come and go, and nobody may be there at all."""
        return self._session is not None

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._connection_callbacks.append(callback)

    async def open(self) -> None:
        async with self._opening:
            if self._session is not None:
                return
            loop = asyncio.get_running_loop()
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="dds-sender")
            self._registrar = ThreadPoolExecutor(1, thread_name_prefix="dds-registrar")
            self._inbox: Inbox[tuple[Filter, bytes]] = Inbox(self._deliver, messages_max=self._config.inbox_messages_max)

            def changed(peers: frozenset[bytes], seen: Seen) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended without close
                    loop.call_soon_threadsafe(self._note, peers, seen)

            making = self._sender.submit(_Session, self._config, self._arrived, changed)
            try:
                session = await asyncio.wrap_future(making)
                await self._discovered()
            except BaseException:
                self._sender.submit(_discard, making)
                self._sender.shutdown(wait=False)
                self._registrar.shutdown(wait=False)
                raise
            self._session = session
            await asyncio.gather(*(self._reader(filter) for filter in self._table.filters))  # of an earlier life
            self._tell_connection(True)

    async def _discovered(self) -> None:
        """Until nothing new has been found for a while: then what we write reaches every reader that was there before us."""
        loop = asyncio.get_running_loop()
        end = loop.time() + DISCOVERY_S_MAX
        while loop.time() < end:
            self._news.clear()
            try:
                async with asyncio.timeout(self._config.discovery_quiet_ms / 1000):
                    await self._news.wait()
            except TimeoutError:
                return

    async def close(self) -> None:
        async with self._opening:
            session = self._session
            if session is None:
                return
            self._session = None
            session.writers.stopping.set()
            session.readers.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._inbox.drained()
            self._inbox.close()
            self._wake(self._awaited)  # nobody need wait for peers any more
            await asyncio.gather(*self._readers.values(), return_exceptions=True)
            self._readers.clear()
            await self._run(int)  # behind it no reader is being removed
            await asyncio.get_running_loop().run_in_executor(self._sender, session.close)
            self._sender.shutdown(wait=False)
            self._registrar.shutdown(wait=False)
            self._peers = frozenset()
            self._seen.clear()
            self._tell_connection(False)

    def _tell_connection(self, connected: bool) -> None:
        for callback in self._connection_callbacks:
            try:
                callback(connected)
            except Exception:
                log.exception("a connection callback failed", callback=repr(callback))

    def _require_session(self) -> _Session:
        if self._session is None:
            raise UStatusError(UCode.UNAVAILABLE, "the transport is not open: call open first")
        return self._session

    # sending

    async def send_batch(self, messages: Sequence[Carried]) -> list[UStatus]:
        try:
            session = self._require_session()
        except UStatusError as error:
            return stopped([], len(messages), error.status)
        return await asyncio.get_running_loop().run_in_executor(self._sender, self._send, session.writers, messages)

    def _send(self, writers: Writers, messages: Sequence[Carried]) -> list[UStatus]:
        statuses: list[UStatus] = []
        now_ms = self._outbox.now_ms()
        for message in messages:
            stamp = message.stamp if type(message) is EncodedMessage else None
            lane = self._lanes.get(stamp) if stamp is not None else None
            if lane is None or stamp is None or stamp.ttl:
                refusal = self._outbox.refusal(decoded(message), now_ms)
                if refusal is not None:
                    statuses.append(refusal)
                    continue
                lane = lane or self._lane(decoded(message).attributes, stamp)
            if stamp is not None:
                sample = mapping.pack(message.encoded, message.payload, has_payload=message.HasField("payload"))  # type: ignore[union-attr]
            else:
                sample = mapping.encode(decoded(message))
            try:
                writers.write(*lane, sample)
            except UStatusError as error:
                return stopped(statuses, len(messages), error.status)
            statuses.append(OK)
        return statuses

    def _lane(self, attributes: UAttributes, stamp: Stamp | None) -> _Lane:
        lane = _Lane(
            self._partition(attributes), mapping.TRANSPORT_PRIORITY.get(attributes.priority, 0), mapping.lifespan_ms(attributes.ttl)
        )
        if stamp is not None:
            if len(self._lanes) >= ROUTES_CACHED_MAX:
                self._lanes.clear()
            self._lanes[stamp] = lane
        return lane

    def _partition(self, attributes: UAttributes) -> str:
        addresses = (attributes.source.SerializeToString(), attributes.sink.SerializeToString() if attributes.HasField("sink") else None)
        partition = self._partitions.get(addresses)
        if partition is None:
            if len(self._partitions) >= ROUTES_CACHED_MAX:
                self._partitions.clear()
            partition = self._partitions[addresses] = mapping.partition_of(attributes, self._authority)
        return partition

    # receiving

    def _arrived(self, filter: Filter, samples: list[bytes]) -> None:
        """On the readers' thread; waits while the inbox is full."""
        for sample in samples:
            self._inbox.put((filter, sample))

    def _deliver(self, items: list[tuple[Filter, bytes]]) -> Awaitable[None] | None:
        """A payload with bytes needs no parsing of the rest; whether an empty one is there must be said in a UMessage."""
        pending: list[Awaitable[None] | None] = []
        encoded: list[tuple[Filter, bytes, bytes]] = []
        for filter, sample in items:
            try:
                attributes, payload = mapping.unpack(sample)
                if payload and attributes:
                    encoded.append((filter, payload, attributes))
                    continue
                message = mapping.decode(sample)
            except UStatusError:
                self.dropped["malformed"] += 1
                continue
            pending.append(self._table.deliver_encoded(encoded))
            encoded = []
            pending.append(self._table.deliver([message], only=filter))
        pending.append(self._table.deliver_encoded(encoded))
        waiting = [one for one in pending if one is not None]
        if not waiting:
            return None
        return waiting[0] if len(waiting) == 1 else all_of(waiting)

    # listening

    async def register_listener(self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None) -> None:
        """Returns when every peer has found the new reader: what they send from then on arrives. A peer is waited for SEEN_S at most."""
        self._require_session()
        filter = self._table.add(source_filter, sink_filter, listener) or Filter.of(source_filter, sink_filter, self._authority)
        try:
            await asyncio.shield(self._reader(filter))
        except UStatusError:
            with contextlib.suppress(UStatusError):
                self._table.remove(source_filter, sink_filter, listener)
            self._readers.pop(filter, None)
            raise

    def _reader(self, filter: Filter) -> asyncio.Task[int]:
        """The token of the reader of `filter`, which is made if there is none; done when the peers know it."""
        if filter not in self._readers:
            self._readers[filter] = asyncio.ensure_future(self._make_reader(filter))
        return self._readers[filter]

    async def _make_reader(self, filter: Filter) -> int:
        session = self._require_session()
        partition = mapping.reader_partition(filter.source, filter.sink, self._authority)
        token, key = await self._run(session.readers.add, filter, partition)
        await self._found(key)
        return token

    async def unregister_listener(self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None) -> None:
        session = self._require_session()
        filter = self._table.remove(source_filter, sink_filter, listener)
        reader = self._readers.pop(filter, None) if filter is not None else None
        if reader is not None:
            token = await asyncio.shield(reader)
            if self._session is session:  # else close has removed it
                await self._run(session.readers.remove, token)

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._registrar, function, *arguments)

    async def _found(self, key: bytes) -> None:
        """Until every peer has announced that it found the reader `key`, or SEEN_S."""
        changed = self._awaited[key] = asyncio.Event()
        missing = self._missing(key)
        try:
            async with asyncio.timeout(SEEN_S):
                while missing and self._session is not None:
                    changed.clear()
                    await changed.wait()
                    missing = self._missing(key)
        except TimeoutError:
            self._silent |= missing
            log.warning("DDS participants do not answer; a new listener may miss their next messages", participants=len(missing))
        finally:
            del self._awaited[key]
            self._seen.pop(key, None)

    def _missing(self, key: bytes) -> frozenset[bytes]:
        return self._peers - self._seen.get(key, set()) - self._silent

    def _note(self, peers: frozenset[bytes], seen: Seen) -> None:
        """Discovery has found something."""
        self._news.set()
        awaited = set() if peers == self._peers else set(self._awaited)
        self._peers = peers
        self._silent &= peers
        for peer, keys in seen:
            self._silent.discard(peer)
            awaited.update(keys)
            for key in keys:
                self._seen.setdefault(key, set()).add(peer)
        while len(self._seen) > SEEN_KEPT_MAX:
            self._seen.popitem(last=False)
        self._wake(awaited)

    def _wake(self, keys: Iterable[bytes]) -> None:
        """Those who wait for just these readers: a thousand may wait at once."""
        for key in keys:
            if key in self._awaited:
                self._awaited[key].set()


def _discard(making: Future[_Session]) -> None:
    """What an open that was given up has made. Runs behind it on the same thread, so it is done."""
    if not making.cancelled() and making.exception() is None:
        making.result().close()


PLUGIN: Final = TransportPlugin("dds", DdsConfig, DdsTransport, DdsTransport.capabilities)
