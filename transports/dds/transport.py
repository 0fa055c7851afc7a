"""DDS, on Cyclone: the part on the event loop. docs/dds-mapping.md describes the mapping.

send_batch -> one hop to the writers' thread: check, encode, write -> DDS: partitions bring it to matching readers only
           <- nobody_listens: a publish or request whose writer no reader has matched; later on_heard([partition, ...])
listener   <- decode <- Arrivals <- the readers' thread            <-
register_listener -> Registrations: a reader that every peer has found
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import structlog

from transports.arrivals import Arrivals
from transports.base import NOT_OPEN, REOPEN_MS, TransportBase, on_loop, on_own_thread, stopped, tell, too_large
from transports.dds import mapping
from transports.dds.acknowledgements import Departures
from transports.dds.config import DdsConfig
from transports.dds.link import Participant, translated
from transports.dds.probe import look_around
from transports.dds.readers import ArrivedSample, Readers, Registrations
from transports.dds.roll_call import RollCall, Seen
from transports.dds.writers import IN_FLIGHT_MESSAGES_MAX, Batch, Outgoing, WriterRoute, Writers
from transports.listeners import Filter, KnownAddresses, all_of
from uprotocol import attributes as attrs
from uprotocol.cache import Cache
from uprotocol.encoded import Carried, EncodedMessage, Stamp, decoded
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.tasks import end
from uprotocol.transport import Capability, LocalUriProvider, ProbeRequest, ProbeResult, UListener
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

LAST_TAKEN_S_MAX: Final = 1.0  # for listeners to take what had arrived when the transport is closed
ADDRESS_LOOK_S: Final = 2.0  # between two checks of the addresses of this host

log = structlog.get_logger()


class _Session:
    """The DDS entities of an open transport. The constructor and `close` block."""

    def __init__(
        self,
        config: DdsConfig,
        arrived: Callable[[list[ArrivedSample]], None],
        registrations: Registrations,
        changed: Callable[[frozenset[bytes], Seen], None],
        heard: Callable[[list[str]], None],
        departures: Departures,
        sample_bytes_max: int,
    ) -> None:
        self.registrations = registrations
        with contextlib.ExitStack() as undo, translated(f"opening DDS domain {config.domain_id}", UCode.UNAVAILABLE):
            self.participant = Participant(config)
            undo.callback(self.participant.close)
            self.writers = Writers(
                self.participant,
                writers_max=config.writers_max,
                timeout_s=config.send_timeout_ms / 1000,
                heard=heard,
                departures=departures,
            )
            undo.callback(self.writers.close)
            self.readers = Readers(self.participant, arrived, sample_bytes_max)
            undo.callback(self.readers.close)
            self.roll_call = RollCall(self.participant, changed, self.writers.have_matched)
            undo.pop_all()

    def close(self) -> None:
        self.writers.close()
        self.readers.close()
        self.roll_call.close()
        self.participant.close()

    def troubles(self) -> list[str]:
        """Participants that hold back what we send, and those whose endpoints can't communicate with ours."""
        found = list(self.writers.troubles)
        for one in self.roll_call.misfits.values():
            ours = self.registrations.partitions() if one.is_writer else self.writers.partitions()
            if mapping.partitions_meet(one.partitions, ours):
                found.append(f"{self.participant.name(one.participant)} and we can't talk: {one.why}")
        return list(dict.fromkeys(found))


class DdsTransport(TransportBase):
    """A DDS participant that carries UMessages.

    `dropped` counts messages that arrived and were thrown away (malformed, spoofed, too_large, invalid, expired), and
    messages that were sent to us and never came (lost, lost_or_expired). `troubles` names participants that hold back
    what we send or can't communicate with us. DDS has no connection to lose, so the transport is connected while it is
    open, except while it joins the domain again because this host has other addresses.

    `on_heard` reports each partition once, within a quarter of a second after DDS has matched a reader; never, if its
    writer was closed meanwhile to make room for another one. None: the domain was joined again.
    """

    capabilities = (
        Capability.PUSH
        | Capability.WILDCARD_SOURCE
        | Capability.PUBLISH_WITHOUT_SINK
        | Capability.ENCODED
        | Capability.ABSENCE
    )
    in_flight_messages = IN_FLIGHT_MESSAGES_MAX

    def __init__(self, config: DdsConfig, local: LocalUriProvider) -> None:
        super().__init__(config, local)
        self._config = config
        self._arrivals: Arrivals[ArrivedSample] = Arrivals(
            self._deliver, messages_max=config.inbox_messages_max, dropped=self.listeners.dropped
        )
        self._partitions: Cache[Any, str] = Cache()  # by (source, sink); used on the writers' thread only
        self._routes: Cache[Stamp, WriterRoute] = Cache()  # likewise
        self._addresses = KnownAddresses(mapping.is_partition_of, self.listeners.dropped)
        self._lost: Counter[str] = Counter()  # in earlier sessions
        self._departures = Departures()
        self._session: _Session | None = None
        self._opening = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None  # checks the addresses of this host

    def __repr__(self) -> str:
        session = self._session
        state = "closed"
        if session is not None:
            peers, readers = len(session.registrations.peers), len(session.readers)
            state = f"peers={peers}, {session.writers!r}, readers={readers}, {self._arrivals!r}"
        return f"DdsTransport({self.authority}, domain={self._config.domain_id}, {state})"

    @property
    def dropped(self) -> Counter[str]:
        lost = self._session.readers.lost if self._session is not None else Counter[str]()
        return self.listeners.dropped + self._lost + lost

    @property
    def troubles(self) -> list[str]:
        return self._session.troubles() if self._session is not None else []

    @property
    def notes(self) -> list[str]:
        return self._departures.notes(time.time())

    @property
    def left_unacknowledged(self) -> int:
        """Times that a receiver left before it had acknowledged what was sent to it, once for each of its topics."""
        return self._departures.count

    @property
    def key(self) -> bytes:
        """GUID of our participant; empty while closed."""
        return self._session.participant.key if self._session is not None else b""

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
        loop, registrations = asyncio.get_running_loop(), Registrations(self.authority)
        changed = partial(on_loop, loop, registrations.note)
        # one turn later: the sender must first get the answer that nobody listened
        heard = partial(on_loop, loop, loop.call_soon, tell, self._on_heard)
        session = await on_own_thread(  # resolving names may take long
            "dds-open",
            lambda: _Session(
                self._config, self._arrived, registrations, changed, heard, self._departures, self._sample_bytes_max
            ),
            _Session.close,
        )
        registrations.open(session.readers)
        try:
            self._session = session
            await asyncio.gather(*map(registrations.reader, self.listeners.filters))
            await registrations.discovered(self._config.discovery_quiet_ms / 1000)
            self.is_open = True
        except BaseException:
            self._end(session)
            raise
        self.set_connected(True)

    async def probe(self, asked: ProbeRequest) -> AsyncGenerator[ProbeResult, None]:
        for one in await on_own_thread("dds-probe", lambda: look_around(self._config), lambda _: None):
            yield one

    async def close(self) -> None:
        await end(self._following)
        self._following = None
        async with self._opening:
            session = self._stop()
            await self._end_arrivals()
            if session is not None:
                await self._finish(session)
            self.set_connected(False)  # clears the reason of an earlier disconnection

    def _stop(self, why: str = "") -> _Session | None:
        """Send and take nothing more. Messages that have arrived stay."""
        session, self._session, self.is_open = self._session, None, False
        self.set_connected(False, why)
        if session is not None:
            session.registrations.stop()
            session.writers.stop()
            session.readers.stop()
        return session

    async def _end_arrivals(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_TAKEN_S_MAX):
                await self._arrivals.drained()
        self._arrivals.close()

    async def _finish(self, session: _Session) -> None:
        await session.registrations.finish()
        await asyncio.wrap_future(self._end(session))
        self._lost += session.readers.lost

    # addresses of this host

    async def _follow_addresses(self) -> None:
        """Join the domain again when the addresses of this host have changed: else nobody would find us any more."""
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
            await self._end_arrivals()  # full ones would block the readers' thread
            await closing  # nobody else would close the session
            raise
        backoff = Backoff(*REOPEN_MS)
        while True:
            try:
                await self._open_session()
                tell(self._on_heard, None)  # the writers that waited for a reader no longer exist
                return
            except UStatusError as error:  # the interface may have no address yet
                self.set_connected(False, f"{why}, and joining again fails: {error}")
            await backoff.wait()

    def _end(self, session: _Session) -> Future[None]:
        """Close `session` after what is being done with it."""
        self._session, self.is_open = None, False
        return session.registrations.close(session.close)

    # sending

    def address_of(self, source: UUri, sink: UUri | None) -> str:
        """The DDS partition of its writer (docs/dds-mapping.md, section 4)."""
        return mapping.writer_partition(source, sink, self.authority)

    async def send_batch(self, messages: Sequence[Carried]) -> list[UStatus]:
        """Answers when all readers have acknowledged.

        A message that a receiver does not take is answered UNAVAILABLE, and so are those after it with the same
        source and sink; others are sent. With `tells_absence` a publish or request without a foreign reader is not
        written."""
        if self._session is None or not self.is_open:
            return stopped([], len(messages), NOT_OPEN)
        if not messages:
            return []
        writers = self._session.writers
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[UStatus]] = loop.create_future()

        def settle(statuses: list[UStatus]) -> None:
            batch.returned()
            if not answer.done():  # else the caller was cancelled
                answer.set_result(statuses)

        batch = Batch(len(messages), partial(on_loop, loop, settle), tells_absence=self.tells_absence)
        writers.submit(lambda: self._send(writers, batch, messages))
        return await answer

    def _send(self, writers: Writers, batch: Batch, messages: Sequence[Carried]) -> None:
        now_ms = self.checks.now_ms()
        for index, message in enumerate(messages):
            try:
                refusal = self._put(writers, batch, index, message, now_ms)
            except Exception as error:  # each message gets its own answer
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
        writers.put(Outgoing(batch, index, route, sample))
        return None

    def _route(self, attributes: UAttributes, stamp: Stamp | None) -> WriterRoute:
        source, sink = attributes.source, attributes.sink if attributes.HasField("sink") else None
        addresses = source.SerializeToString(), sink.SerializeToString() if sink is not None else None
        partition = self._partitions.get(addresses)
        if partition is None:
            partition = self._partitions[addresses] = mapping.writer_partition(source, sink, self.authority)
        priority = mapping.TRANSPORT_PRIORITY.get(attributes.priority, 0)
        asks = attributes.type in (UMessageType.UMESSAGE_TYPE_PUBLISH, UMessageType.UMESSAGE_TYPE_REQUEST)
        route = WriterRoute(partition, priority, mapping.lifespan_ms(attributes.ttl), asks)
        if stamp is not None:
            self._routes[stamp] = route
        return route

    # receiving

    def _arrived(self, samples: list[ArrivedSample]) -> None:
        """On the readers' thread. Blocks while `_arrivals` is full."""
        for item in samples:
            self._arrivals.put(item, len(item[1]))

    def _deliver(self, items: list[ArrivedSample]) -> Awaitable[None] | None:
        """Messages with a payload that is not empty are delivered encoded; others are decoded here, since only a
        UMessage can say whether an empty payload is present."""
        pending: list[Awaitable[None] | None] = []
        encoded: list[tuple[Filter, bytes, bytes]] = []
        partitions: list[str] = []
        for filter, sample, partition in items:
            try:
                attributes, payload = mapping.unpack(sample)
                # "" is unknown: the writer has several partitions, or no longer exists
                if partition and not self._addresses.agree(attributes, partition):
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

    def _deliver_encoded(
        self, encoded: list[tuple[Filter, bytes, bytes]], partitions: list[str]
    ) -> Awaitable[None] | None:
        return self.listeners.deliver_encoded(
            encoded, lambda index, attributes: mapping.complete(attributes, partitions[index])
        )

    # listening

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        """Returns when every peer has found the new reader, SEEN_S at most: what they send from then on arrives."""
        if (session := self._session) is None:
            raise UStatusError.from_status(NOT_OPEN)
        filter = self.listeners.add(source_filter, sink_filter, listener) or Filter.of(
            source_filter, sink_filter, self.authority
        )
        try:
            await session.registrations.register(filter)
        except UStatusError:
            with contextlib.suppress(UStatusError):
                self.listeners.remove(source_filter, sink_filter, listener)
            raise

    def listen_at_open(self, filter: Filter) -> None:
        """`open` makes its reader."""

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        if (session := self._session) is None:
            raise UStatusError.from_status(NOT_OPEN)
        filter = self.listeners.remove(source_filter, sink_filter, listener)
        if filter is not None:
            await session.registrations.release(filter)
