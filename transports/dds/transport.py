"""DDS, on Cyclone. docs/dds-mapping.md is the mapping, mapping.py its code, config.py what it can be told; link.py,
writers.py, readers.py and roll_call.py may block, and here is what runs on the loop.

send_batch -> one hop to the writers' thread: check, encode, write -> DDS: partitions bring it to whom it concerns,
           <- nobody_listens: a publish whose writer no reader has matched; later on_heard([partition, ...])
listener   <- decode <- Arrivals <- the readers' thread            <-      and to nobody else
register_listener -> a reader, one for many filters -> until every peer has announced that it has found it (RollCall),
                                                       or SEEN_S has passed
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import structlog
from google.protobuf.message import DecodeError

from transports.arrivals import Arrivals
from transports.base import NOT_OPEN, TransportBase, on_own_thread, stopped, tell, too_large
from transports.dds import mapping
from transports.dds.config import DdsConfig
from transports.dds.link import Participant, Remembered, translated
from transports.dds.readers import NAMES_BYTES_MAX, NAMES_MAX, Arrived, Readers
from transports.dds.roll_call import RollCall, Seen
from transports.dds.writers import Batch, WriterRoute, Writers
from transports.listeners import Filter, all_of
from uprotocol import attributes as attrs
from uprotocol.cache import Cache
from uprotocol.encoded import Carried, EncodedMessage, Stamp, decoded, is_shared, suffix
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, HeardCallback, LocalUriProvider, UListener
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

T = TypeVar("T")

DISCOVERY_S_MAX: Final = 2.0  # and opening waits no longer than this for it
# for all peers to find a new reader; takes 1 to 30 ms, and a peer that is stuck must not stop us for ever
SEEN_S: Final = 1.0
SEEN_KEPT_MAX: Final = 4_096  # announcements kept for readers that are being made just now
PLACED_BYTES: Final = 512  # of a stream's attributes; those of honest ones are shorter, and others cost no memory
DRAIN_S: Final = 1.0  # for listeners to take what had arrived when the transport is closed
ADDRESS_LOOK_S: Final = 2.0  # between two looks whether the host is reached at the same addresses
REOPEN_MS_MIN: Final = 200  # between tries to join the domain again, and ...
REOPEN_MS_MAX: Final = 10_000

log = structlog.get_logger()


class _Session:
    """What exists while the transport is open. Constructor and `close` block."""

    def __init__(
        self,
        config: DdsConfig,
        arrived: Callable[[list[Arrived]], None],
        changed: Callable[[frozenset[bytes], Seen], None],
        heard: Callable[[list[str]], None],
        sample_bytes_max: int,
    ) -> None:
        with contextlib.ExitStack() as undo, translated(f"opening DDS domain {config.domain_id}", UCode.UNAVAILABLE):
            self.participant = Participant(config)
            undo.callback(self.participant.close)
            self.writers = Writers(
                self.participant,
                writers_max=config.writers_max,
                timeout_s=config.send_timeout_ms / 1000,
                heard=heard,
            )
            undo.callback(self.writers.close)
            self.readers = Readers(self.participant, arrived, sample_bytes_max)
            undo.callback(self.readers.close)
            self.roll_call = RollCall(self.participant, changed)
            undo.pop_all()

    def close(self) -> None:
        self.writers.close()
        self.readers.close()
        self.roll_call.close()
        self.participant.close()

    def troubles(self, listening: list[str]) -> list[str]:
        """Who holds back what is sent, and who can't talk with us though the partitions meet (`listening`: those of our
        readers)."""
        found = list(self.writers.troubles)
        for one in self.roll_call.misfits.values():
            ours = listening if one.is_writer else self.writers.partitions()
            if mapping.partitions_meet(one.partitions, ours):
                found.append(f"{self.participant.name(one.participant)} and we can't talk: {one.why}")
        return list(dict.fromkeys(found))


@dataclass(eq=False, slots=True)
class Together:
    """Filters that share a reader."""

    owners: dict[str, Filter]  # by partition
    made: asyncio.Task[int] | None = None
    octets: int = 0  # of the partitions' names

    def has_room(self, partition: str) -> bool:
        is_full = len(self.owners) >= NAMES_MAX or self.octets + len(partition) > NAMES_BYTES_MAX
        return self.made is not None and not is_full and partition not in self.owners


class DdsTransport(TransportBase):
    """A DDS participant that carries UMessages.

    `dropped` counts what arrived and was thrown away (malformed, spoofed, too_large, invalid, expired), and what was
    sent to us and never came (lost, lost_or_expired). `troubles` names those who hold back what we send, and those who
    can't talk with us, while they do. Connected while open: DDS has no connection to lose, and nobody may be there at
    all; but it is away, and joined again, when the host is reached at another address.
    """

    capabilities = (
        Capability.PUSH
        | Capability.WILDCARD_SOURCE
        | Capability.PUBLISH_WITHOUT_SINK
        | Capability.ENCODED
        | Capability.ABSENCE
    )

    def __init__(self, config: DdsConfig, local: LocalUriProvider) -> None:
        super().__init__(config, local)
        self._config = config
        self._arrivals: Arrivals[Arrived] = Arrivals(
            self._deliver, messages_max=config.inbox_messages_max, dropped=self.listeners.dropped
        )
        self._partitions: Cache[Any, str] = Cache()  # by (source, sink); the writers' thread only
        self._routes: Cache[Stamp, WriterRoute] = Cache()  # the same
        self._placed: Cache[bytes, str] = Cache()  # the writer's partition of encoded attributes without their id
        self._lost: Counter[str] = Counter()  # in sessions that have ended
        self._session: _Session | None = None
        self._opening = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None  # of the addresses of the host
        self._readers: dict[Filter, asyncio.Task[int]] = {}  # the token of its reader, once the peers know that
        self._together = Together({})  # those whose reader is made next
        self._making = asyncio.Lock()
        self._peers: frozenset[bytes] = frozenset()
        self._silent: set[bytes] = set()  # peers that once did not answer in time: not waited for until they do
        self._seen: Remembered[bytes, set[bytes]] = Remembered(SEEN_KEPT_MAX)  # own reader -> peers that have found it
        self._awaited: dict[bytes, asyncio.Event] = {}  # own readers that a registration waits for
        self._news = asyncio.Event()  # discovery has found something
        self._on_heard: list[HeardCallback] = []

    def __repr__(self) -> str:
        session = self._session
        state = (
            f"{session.writers!r}, readers={len(session.readers)}, {self._arrivals!r}"
            if session is not None
            else "closed"
        )
        return f"DdsTransport({self.authority}, domain={self._config.domain_id}, peers={len(self._peers)}, {state})"

    @property
    def dropped(self) -> Counter[str]:
        lost = self._session.readers.lost if self._session is not None else Counter[str]()
        return self.listeners.dropped + self._lost + lost

    @property
    def troubles(self) -> list[str]:
        listening = [mapping.reader_partition(one.source, one.sink, self.authority) for one in self._readers]
        return self._session.troubles(listening) if self._session is not None else []

    @property
    def key(self) -> bytes:
        """GUID of our participant; empty while closed."""
        return self._session.participant.key if self._session is not None else b""

    @property
    def returned(self) -> int:
        """Participants that were not heard for longer than their lease and came back: what was sent meanwhile may be
        missing there."""
        return self._session.roll_call.returned if self._session is not None else 0

    @property
    def misfits_found(self) -> int:
        """Endpoints elsewhere whose QoS or type keeps them and ours apart, since open."""
        return self._session.roll_call.misfits_found if self._session is not None else 0

    async def open(self) -> None:
        async with self._opening:
            if self._session is not None or self._following is not None:
                return
            self._sample_bytes_max = self.wire_bytes_max + mapping.FRAME_BYTES
            self._arrivals.open(self._sample_bytes_max)
            try:
                await self._open_session()
            except BaseException:
                self._arrivals.close()
                raise
            self._following = asyncio.create_task(self._follow_addresses())

    async def _open_session(self) -> None:
        loop = asyncio.get_running_loop()

        def changed(peers: frozenset[bytes], seen: Seen) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended without close
                loop.call_soon_threadsafe(self._note, peers, seen)

        def heard(partitions: list[str]) -> None:
            with contextlib.suppress(RuntimeError):  # the same
                # one turn later: whoever sent has the answer by then that nobody listened
                loop.call_soon_threadsafe(loop.call_soon, tell, self._on_heard, partitions)

        session = await on_own_thread(  # names may take long to resolve
            "dds-open",
            lambda: _Session(self._config, self._arrived, changed, heard, self._sample_bytes_max),
            _Session.close,
        )
        self._registrar = ThreadPoolExecutor(1, thread_name_prefix="dds-registrar")
        try:
            self._session = session
            await asyncio.gather(*(self._reader(filter) for filter in self.listeners.filters))  # registered before
            await self._discovered()
            self.is_open = True
        except BaseException:
            self._end(session)
            raise
        self.set_connected(True)

    async def _discovered(self) -> None:
        """Until nothing new has been found for a while: then what we write reaches every reader that was there before
        us."""
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
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
            self._following = None
        async with self._opening:
            session = self._stop()
            await self._end_arrivals()
            if session is not None:
                await self._finish(session)
            self.set_connected(False)  # and for no other reason any more

    def _stop(self, why: str = "") -> _Session | None:
        """Send and take nothing more. What has arrived stays."""
        session, self._session, self.is_open = self._session, None, False
        self.set_connected(False, why)
        if session is not None:
            session.writers.stop()
            session.readers.stop()
        return session

    async def _end_arrivals(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self._arrivals.drained()
        self._arrivals.close()

    async def _finish(self, session: _Session) -> None:
        self._wake(self._awaited)  # nobody need wait for peers any more
        await asyncio.gather(*self._readers.values(), return_exceptions=True)
        await asyncio.wrap_future(self._end(session))
        self._lost += session.readers.lost

    # how the host is reached

    async def _follow_addresses(self) -> None:
        """Join the domain again when the host is reached differently, until cancelled. Nobody would find us any
        more."""
        while True:
            await asyncio.sleep(ADDRESS_LOOK_S)
            session = self._session
            if session is not None and (why := session.participant.moved()):
                async with self._opening:
                    await self._reopen(session, why)

    async def _reopen(self, session: _Session, why: str) -> None:
        log.warning("the DDS domain is joined again", authority=self.authority, why=why)
        session.participant.abandon()
        self._stop(why)
        closing = asyncio.ensure_future(self._finish(session))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await self._end_arrivals()  # they hold up the readers' thread while they are full
            await closing  # nobody else knows the session any more
            raise
        backoff = Backoff(REOPEN_MS_MIN, REOPEN_MS_MAX)
        while True:
            try:
                await self._open_session()
                tell(self._on_heard, None)  # the writers that were looked at have gone
                return
            except UStatusError as error:  # the interface may have no address yet
                self.set_connected(False, f"{why}, and joining again fails: {error}")
            await backoff.wait()

    def _end(self, session: _Session) -> Future[None]:
        """Close `session` behind whatever is being done with it, and forget what belongs to it."""
        self._session, self.is_open = None, False
        self._readers.clear()
        self._together = Together({})
        self._peers = frozenset()
        self._seen.clear()
        ended = self._registrar.submit(session.close)
        self._registrar.shutdown(wait=False)
        return ended

    def _require_session(self) -> _Session:
        if self._session is None:
            raise UStatusError.from_status(NOT_OPEN)
        return self._session

    # sending

    def address_of(self, source: UUri, sink: UUri | None) -> str:
        """The DDS partition of its writer (docs/dds-mapping.md, section 4)."""
        return mapping.writer_partition(source, sink, self.authority)

    def on_heard(self, callback: HeardCallback) -> None:
        """A partition is told of once, within a quarter of a second after DDS has matched a reader; not at all if its
        writer has given way to another one meanwhile. None when the domain was joined again."""
        self._on_heard.append(callback)

    async def send_batch(self, messages: Sequence[Carried]) -> list[UStatus]:
        """What a receiver does not take answers UNAVAILABLE, and so does what follows it between the same source and
        sink; others pass. With `tells_absence` a publish whose writer has no reader elsewhere is not written."""
        if self._session is None or not self.is_open:
            return stopped([], len(messages), NOT_OPEN)
        if not messages:
            return []
        writers = self._session.writers
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[UStatus]] = loop.create_future()

        def done(statuses: list[UStatus]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_answer, answer, statuses)

        batch = Batch(len(messages), done, tells_absence=self.tells_absence)
        writers.submit(lambda: self._send(writers, batch, messages))
        return await answer

    def _send(self, writers: Writers, batch: Batch, messages: Sequence[Carried]) -> None:
        now_ms = self.checks.now_ms()
        for index, message in enumerate(messages):
            try:
                refusal = self._put(writers, batch, index, message, now_ms)
            except Exception as error:  # whatever it is: each has its answer, and none keeps the others from theirs
                log.exception("a message could not be sent over DDS")
                refusal = UStatus(code=UCode.INTERNAL, message=f"the message could not be sent over DDS: {error!r}")
            if refusal is not None:
                batch.settle(index, refusal)

    def _put(self, writers: Writers, batch: Batch, index: int, message: Carried, now_ms: int) -> UStatus | None:
        stamp = message.stamp if type(message) is EncodedMessage else None
        route = self._routes.get(stamp) if stamp is not None else None
        if route is None or stamp is None or stamp.ttl:
            refusal = self.checks.refusal(decoded(message), now_ms)
            if refusal is not None:
                return refusal
            if stamp is None:
                message = attrs.completed(decoded(message), self.authority)
            route = route or self._route(decoded(message).attributes, stamp)
        if stamp is not None:
            sample = mapping.pack(message.encoded, message.payload, has_payload=message.HasField("payload"))  # type: ignore[union-attr]
        else:
            sample = mapping.encode(decoded(message))
        if len(sample) > self._sample_bytes_max:
            return too_large(len(sample), self._sample_bytes_max)
        writers.put(batch, index, route, sample)
        return None

    def _route(self, attributes: UAttributes, stamp: Stamp | None) -> WriterRoute:
        source, sink = attributes.source, attributes.sink if attributes.HasField("sink") else None
        addresses = source.SerializeToString(), sink.SerializeToString() if sink is not None else None
        partition = self._partitions.get(addresses)
        if partition is None:
            partition = self._partitions[addresses] = mapping.writer_partition(source, sink, self.authority)
        priority = mapping.TRANSPORT_PRIORITY.get(attributes.priority, 0)
        is_publish = attributes.type == UMessageType.UMESSAGE_TYPE_PUBLISH
        route = WriterRoute(partition, priority, mapping.lifespan_ms(attributes.ttl), is_publish)
        if stamp is not None:
            self._routes[stamp] = route
        return route

    # receiving

    def _arrived(self, samples: list[Arrived]) -> None:
        """On the readers' thread; waits while it is full."""
        for item in samples:
            self._arrivals.put(item, len(item[1]))

    def _deliver(self, items: list[Arrived]) -> Awaitable[None] | None:
        """A payload with bytes needs no parsing of the rest; whether an empty one is there must be said in a
        UMessage."""
        pending: list[Awaitable[None] | None] = []
        encoded: list[tuple[Filter, bytes, bytes]] = []
        partitions: list[str] = []
        for filter, sample, partition in items:
            try:
                attributes, payload = mapping.unpack(sample)
                if not self._is_from(partition, attributes):
                    self.listeners.dropped["spoofed"] += 1
                    continue
                if payload and attributes:
                    encoded.append((filter, payload, attributes))
                    partitions.append(partition)
                    continue
                message = mapping.decode(sample)
            except UStatusError:
                self.listeners.dropped["malformed"] += 1
                continue
            mapping.complete(message.attributes, partition)
            pending.append(self._deliver_encoded(encoded, partitions))
            encoded, partitions = [], []
            pending.append(self.listeners.deliver([message], only=filter))
        pending.append(self._deliver_encoded(encoded, partitions))
        waiting = [one for one in pending if one is not None]
        if not waiting:
            return None
        return waiting[0] if len(waiting) == 1 else all_of(waiting)

    def _is_from(self, partition: str, encoded: bytes) -> bool:
        """False for what says that it comes from elsewhere, or goes elsewhere, than its writer does. Of a writer of
        many partitions, or one that has gone, only the message says; what can't be read is the listeners' to count."""
        rest = suffix(encoded)
        if not partition or (rest is not None and self._placed.get(rest) == partition):
            return True
        try:
            attributes = UAttributes.FromString(encoded)
        except DecodeError:
            return True
        if not mapping.is_partition_of(partition, attributes):
            return False
        if rest is not None and len(rest) <= PLACED_BYTES and is_shared(attributes):
            self._placed[rest] = partition
        return True

    def _deliver_encoded(
        self, encoded: list[tuple[Filter, bytes, bytes]], partitions: list[str]
    ) -> Awaitable[None] | None:
        return self.listeners.deliver_encoded(
            encoded, lambda place, attributes: mapping.complete(attributes, partitions[place])
        )

    # listening

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        """Returns when every peer has found the new reader: what they send from then on arrives. A peer is waited for
        SEEN_S at most."""
        self._require_session()
        filter = self.listeners.add(source_filter, sink_filter, listener) or Filter.of(
            source_filter, sink_filter, self.authority
        )
        try:
            await asyncio.shield(self._reader(filter))
        except UStatusError:
            with contextlib.suppress(UStatusError):
                self.listeners.remove(source_filter, sink_filter, listener)
            self._readers.pop(filter, None)
            raise

    def listen_at_open(self, filter: Filter) -> None:
        """Its reader is made by `open`."""

    def _reader(self, filter: Filter) -> asyncio.Task[int]:
        """The token of the reader of `filter`, which is made if there is none; done when the peers know it.

        Whoever asks while another reader is made shares the next one, unless it asks for a pattern.
        """
        if filter not in self._readers:
            partition = mapping.reader_partition(filter.source, filter.sink, self.authority)
            if mapping.is_pattern(partition):
                self._readers[filter] = asyncio.ensure_future(self._make_reader(Together({partition: filter})))
            else:
                self._readers[filter] = self._join(partition, filter)
        return self._readers[filter]

    def _join(self, partition: str, filter: Filter) -> asyncio.Task[int]:
        together = self._together
        if not together.has_room(partition):
            together = self._together = Together({})
        together.owners[partition] = filter
        together.octets += len(partition)
        if together.made is None:
            together.made = asyncio.ensure_future(self._make_reader(together))
        return together.made

    async def _make_reader(self, together: Together) -> int:
        async with self._making:
            if self._together is together:
                self._together = Together({})  # who comes from now on is too late for this one
            session = self._require_session()
            token, key = await self._run(session.readers.add, together.owners)
        await self._found(key)
        return token

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        session = self._require_session()
        filter = self.listeners.remove(source_filter, sink_filter, listener)
        reader = self._readers.pop(filter, None) if filter is not None else None
        if filter is not None and reader is not None:
            token = await asyncio.shield(reader)
            if self._session is session:  # else close has removed it
                partition = mapping.reader_partition(filter.source, filter.sink, self.authority)
                await self._run(session.readers.leave, token, partition)

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
            log.warning(
                "DDS participants do not answer; a new listener may miss their next messages", participants=len(missing)
            )
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
                self._seen[key] = {*self._seen.get(key, ()), peer}
        self._wake(awaited)

    def _wake(self, keys: Iterable[bytes]) -> None:
        """Those who wait for just these readers: a thousand may wait at once."""
        for key in keys:
            if key in self._awaited:
                self._awaited[key].set()


def _answer(answer: asyncio.Future[list[UStatus]], statuses: list[UStatus]) -> None:
    if not answer.done():  # else the caller has given up
        answer.set_result(statuses)
