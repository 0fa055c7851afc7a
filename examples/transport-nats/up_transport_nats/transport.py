"""uProtocol over NATS JetStream: one stream is the network, and each filter has a consumer in it.

send_batch -> packets, a run of messages of one (source, sink) each
           -> publish, one at a time per (source, sink) -> stream: PubAck = OK
stream     -> consumer of a filter -> fetch, task of that filter -> Arrivals
           -> unpack, ListenerTable -> listeners -> taken: ack, or nak

The library runs on the event loop, so there is no thread. Limits: a task fetches again only when the arrivals have
taken its last packets; the stream refuses more than `stream_mib_max`, and then senders wait.

Order: the next packet of a (source, sink) leaves when the stream has the last one. After a lost connection the server
would first deliver new packets, and those that were on their way only after `ack_wait_s`. So a consumer with such
packets is not read for that long.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import secrets
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, Final

import structlog
from nats import errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import NotFoundError

from transports.arrivals import Arrivals
from transports.base import NOT_OPEN, OK, TransportBase, stopped, tell
from transports.listeners import Filter, all_of
from transports.plugin import TransportPlugin
from up_transport_nats import mapping
from up_transport_nats.config import NatsConfig
from up_transport_nats.link import AWAY, Link
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, LocalUriProvider, LossCallback
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

PACKET_BYTES: Final = 65_536  # small messages are packed together up to this size; larger packets save nothing
ENVELOPE_BYTES: Final = 64  # the length before a message, and some reserve
FETCH_MAX: Final = 64  # packets at once ...
FETCH_BYTES_MAX: Final = 8 << 20  # ... and about so many bytes
FETCH_S: Final = 5.0  # an idle fetch is repeated after so long
WAITING_PACKETS: Final = 512  # waiting or being taken, of all filters together ...
WAITING_BYTES: Final = 16 << 20  # ... and these bytes at most
RETRY_S: Final = 0.2  # pause before another attempt
CLOSE_S_MAX: Final = 3.0  # for listeners and acknowledgements, when it is closed

log = structlog.get_logger()
Packet = tuple[bytearray, list[int]]  # messages, and their indices in the batch
ArrivedPacket = tuple[Filter, str, Msg]  # its filter, its consumer, and the packet


class NatsTransport(TransportBase):
    """One connection. All priorities are equal: a stream delivers in the order in which it received.

    No Capability.ABSENCE: a stream acknowledges and drops a message that no consumer wants. NATS reports missing
    receivers only for its own requests, without JetStream.
    """

    capabilities = (
        Capability.PUSH
        | Capability.ACK
        | Capability.PERSISTENT_SESSION
        | Capability.WILDCARD_SOURCE
        | Capability.PUBLISH_WITHOUT_SINK
    )

    def __init__(self, config: NatsConfig, local: LocalUriProvider) -> None:
        super().__init__(config, local)
        self._config = config
        self._session = config.session or f"{mapping.escape(self.authority)}-{secrets.token_hex(6)}"
        self._arrivals: Arrivals[ArrivedPacket] = Arrivals(
            self._deliver, self._taken, messages_max=WAITING_PACKETS, bytes_max=WAITING_BYTES, dropped=self.dropped
        )
        self._link = Link(config, self._session, self._on_change)
        self._is_connected = asyncio.Event()  # like `connected`, to be awaited
        self._coming_back: asyncio.Task[None] | None = None
        self._followers: dict[Filter, asyncio.Task[None] | None] = {}  # None: the server does not know it yet
        self._consumers: set[str] = set()  # at the server
        self._leftover: set[str] = set()  # consumers that the server still has to delete
        # (consumer, sequence) of packets that have arrived and are not acknowledged: copies are ignored
        self._held: set[tuple[str, int]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._loss_callbacks: list[LossCallback] = []

    def __repr__(self) -> str:
        state = "closed" if not self.is_open else "connected" if self.connected else "away"
        return f"NatsTransport({self.authority}, {state}, filters={len(self._followers)})"

    @property
    def troubles(self) -> list[str]:
        return [self._link.full] if self._link.full else []

    def on_loss(self, callback: LossCallback) -> None:
        self._loss_callbacks.append(callback)

    # The connection.

    async def open(self) -> None:
        if self.is_open:
            return
        self._arrivals.open(self.wire_bytes_max)  # a packet has one message, or less than PACKET_BYTES
        self.is_open = True
        try:
            await self._link.open()
            if self._coming_back is not None:  # it registers the filters of an earlier `open`
                await asyncio.wait({self._coming_back}, timeout=self._config.connect_timeout_s)
        except BaseException:
            self.is_open = False
            await self._link.close()
            raise
        if not self.is_open:  # closed meanwhile
            await self._link.close()

    async def close(self) -> None:
        """Messages that were answered OK are in the stream. Those that wait for us stay there for `session_expiry_s` if
        the session has a name."""
        if not self.is_open:
            return
        self.is_open = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                async with self._sending, self.registering:
                    await asyncio.gather(*self._stop_following(), return_exceptions=True)
                await self._arrivals.drained()
                await asyncio.gather(*self._tasks)  # acknowledgements
                if not self._config.session:
                    await self._forget_all()
        self._arrivals.close()
        await self._link.close()
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, *self._stop_following(), return_exceptions=True)
        self._held.clear()

    def _on_change(self, up: bool) -> None:
        """`connected` becomes True when the server also knows all filters, so that no message is missed from then
        on."""
        if up:
            self._coming_back = self._spawn(self._come_back())
        else:
            self._stop_following()
            self.set_connected(False, "the connection to the NATS server is lost")

    def set_connected(self, connected: bool, why: str = "") -> None:
        (self._is_connected.set if connected else self._is_connected.clear)()
        super().set_connected(connected, why)

    def _stop_following(self) -> list[asyncio.Task[None]]:
        following = [task for task in self._followers.values() if task is not None]
        self._followers = dict.fromkeys(self._followers)
        for task in following:
            task.cancel()
        return following

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _come_back(self) -> None:
        """After a connect, send changed filters to the server, until all have been sent."""
        while self.is_open and self._link.is_up():
            try:
                await self._link.request("looking for the stream", self._link.ensure_stream())
                async with self.registering:
                    for name in list(self._leftover):
                        await self._forget(name)
                    waiting = [filter for filter, task in self._followers.items() if task is None]
                    for filter in waiting if self.is_open else []:
                        await self._follow(filter)
                self.set_connected(self.is_open and self._link.is_up())
                return
            except UStatusError as error:
                log.warning(
                    "the NATS server does not let us listen yet; trying again",
                    authority=self.authority,
                    why=error.message,
                )
                await asyncio.sleep(RETRY_S)

    # Sending.

    def address_of(self, source: UUri, sink: UUri | None) -> str:
        """The subject without its last token, which is the name of our session. The server's permissions apply to
        subjects. It reports a violation with the subject; only messages to that one are PERMISSION_DENIED."""
        return f"{self._config.network}.{mapping.address_route(source, sink, self.authority)}"

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        if not self.is_open:
            return stopped([], len(messages), NOT_OPEN)
        if not self.connected:
            return stopped([], len(messages), AWAY)
        statuses: list[UStatus] = []
        lanes: dict[str, list[Packet]] = {}
        now_ms, bytes_max = self.checks.now_ms(), min(self._link.max_payload, self.wire_bytes_max) - ENVELOPE_BYTES
        for index, message in enumerate(messages):
            statuses.append(self.checks.refusal(message, now_ms) or self._pack(message, index, lanes, bytes_max))
        async with self._sending:  # batches that are sent at once keep their order
            await asyncio.gather(*(self._send_lane(route, packets, statuses) for route, packets in lanes.items()))
        return statuses

    def _pack(self, message: UMessage, place: int, lanes: dict[str, list[Packet]], bytes_max: int) -> UStatus:
        """Into the last packet of its lane, or a new one. Too large is the message's own fault: INVALID_ARGUMENT, and
        never tried again."""
        data = mapping.pack(message)
        if len(data) > bytes_max:
            why = (
                f"a message has at most {bytes_max} bytes here, got {len(data)}: send less, or raise message_bytes_max"
            )
            return UStatus(code=UCode.INVALID_ARGUMENT, message=f"{why} and the server's max_payload")
        lane = lanes.setdefault(mapping.route(message, self.authority), [])
        if lane and len(lane[-1][0]) + len(data) <= PACKET_BYTES:
            lane[-1][0].extend(data)
            lane[-1][1].append(place)
        else:
            lane.append((bytearray(data), [place]))
        return OK

    async def _send_lane(self, route: str, packets: list[Packet], statuses: list[UStatus]) -> None:
        """Publish in order. After a failure none is tried, so that a later attempt keeps the order."""
        answers: list[UStatus] = []
        for data, _indices in packets:
            answers.append(await self._link.publish(f"{self._config.network}.{route}.{self._session}", bytes(data)))
            if answers[-1].code:
                break
        indices = [index for _data, those in packets for index in those]
        known = [answer for answer, (_data, those) in zip(answers, packets, strict=False) for _index in those]
        if answers[-1].code:
            known = stopped(known[: -len(packets[len(answers) - 1][1])], len(indices), answers[-1])
        for index, status in zip(indices, known, strict=True):
            statuses[index] = status

    # Listening.

    async def listen(self, filter: Filter) -> None:
        """While the server is away, the filter is only noted; the server gets it later."""
        self._followers[filter] = None
        if self._link.is_up():
            try:
                await self._follow(filter)
            except UStatusError:
                if self._link.is_up():  # else the server has just gone away, and gets it later
                    self._leave(filter)
                    raise

    async def unlisten(self, filter: Filter) -> None:
        name = self._leave(filter)
        if self._link.is_up():
            # if this fails, it is deleted later, or by the server after session_expiry_s
            with contextlib.suppress(UStatusError):
                await self._forget(name)

    def _leave(self, filter: Filter) -> str:
        """Stop following. Returns the name of the consumer, which the server still has to delete."""
        task = self._followers.pop(filter, None)
        if task is not None:
            task.cancel()
        name, _subject = self._consumer(filter)
        self._consumers.discard(name)
        self._leftover.add(name)
        return name

    async def _forget(self, name: str) -> None:
        with contextlib.suppress(NotFoundError):
            await self._link.request("ending a consumer", self._link.js.delete_consumer(self._config.network, name))
        self._leftover.discard(name)
        self._consumers.discard(name)

    async def _forget_all(self) -> None:
        """Delete all consumers: the session has no name, so it ends."""
        with contextlib.suppress(UStatusError):
            for name in [*self._consumers, *self._leftover] if self._link.is_up() else []:
                await self._forget(name)

    def _consumer(self, filter: Filter) -> tuple[str, str]:
        """Its name, the same in each process of this session, and its subject."""
        subject = f"{self._config.network}.{mapping.filter_route(filter.source, filter.sink, self.authority)}.*"
        return hashlib.sha256(f"{self._session} {subject}".encode()).hexdigest()[:32], subject

    async def _follow(self, filter: Filter) -> None:
        """Returns when the server keeps matching messages for us. Call it while holding `registering`."""
        network, (name, subject) = self._config.network, self._consumer(filter)
        if name in self._leftover:
            await self._forget(name)
        try:
            info = await self._link.request(
                f"looking for the consumer of {subject}", self._link.js.consumer_info(network, name)
            )
        except NotFoundError:
            if name in self._consumers:
                text = f"the NATS server has ended our session for {subject}: messages sent meanwhile are lost"
                log.warning(text, authority=self.authority)
                tell(self._loss_callbacks, text, None)
            made = api.ConsumerConfig(
                durable_name=name,
                description=f"{self._session}: {subject}",
                filter_subject=subject,
                deliver_policy=api.DeliverPolicy.NEW,
                ack_policy=api.AckPolicy.EXPLICIT,
                ack_wait=self._config.ack_wait_s,
                max_ack_pending=WAITING_PACKETS + FETCH_MAX,
                inactive_threshold=self._config.session_expiry_s,
            )
            info = await self._link.request(f"subscribing to {subject}", self._link.js.add_consumer(network, made))
        self._consumers.add(name)
        fetching = await self._link.request("subscribing", self._link.js.pull_subscribe_bind(name, stream=network))
        under_way = bool(info.num_ack_pending)
        self._followers[filter] = asyncio.ensure_future(
            self._fetch(filter, name, fetching, self._config.ack_wait_s if under_way else 0)
        )

    async def _fetch(
        self, filter: Filter, name: str, fetching: JetStreamContext.PullSubscription, wait_s: float
    ) -> None:
        """The task of one filter. It fetches no more while the arrivals are full, and fewer at once after large
        packets."""
        at_once = FETCH_MAX
        try:
            await self._is_connected.wait()  # a listener may send
            await asyncio.sleep(wait_s)  # packets that were on their way come again first, in order
            while self._followers.get(filter) is asyncio.current_task():  # the library may swallow a cancellation
                with contextlib.suppress(TimeoutError):  # nothing has come
                    packets = await fetching.fetch(at_once, timeout=FETCH_S)
                    for packet in packets:
                        await self._take_in((filter, name, packet))
                    large = max(len(packet.data) for packet in packets)
                    at_once = max(1, min(2 * at_once, FETCH_MAX, FETCH_BYTES_MAX // max(1, large)))
        except errors.Error as error:
            log.warning("a NATS consumer can't be read; asking for it again", authority=self.authority, why=repr(error))
            if self._followers.get(filter) is asyncio.current_task():
                self._followers[filter] = None
                self._spawn(self._come_back())
        finally:
            with contextlib.suppress(Exception):
                await fetching.unsubscribe()

    async def _take_in(self, arrived: ArrivedPacket) -> None:
        _filter, name, packet = arrived
        held = (name, packet.metadata.sequence.stream)
        if packet.subject.rpartition(".")[2] == self._session:  # our own
            await packet.ack()
        elif held not in self._held:
            self._held.add(held)
            try:
                is_taken = await self._arrivals.put_on_loop(arrived, len(packet.data))
            except asyncio.CancelledError:
                self._held.discard(held)
                raise
            if not is_taken:  # too large: it would come again without end
                self._held.discard(held)
                await packet.ack()

    def _deliver(self, arrived: list[ArrivedPacket]) -> Awaitable[None] | None:
        pending = []
        for _, those in itertools.groupby(arrived, key=lambda one: id(one[0])):
            group = list(those)
            messages = [message for _filter, _name, packet in group for message in self._unpack(packet)]
            taking = self.listeners.deliver(messages, only=group[0][0])
            if taking is not None:
                pending.append(taking)
        return all_of(pending) if pending else None

    def _unpack(self, packet: Msg) -> list[UMessage]:
        try:
            messages = mapping.unpack(packet.data)
        except UStatusError:
            self.dropped["malformed"] += 1
            return []
        route = packet.subject.removeprefix(f"{self._config.network}.").rpartition(".")[0]
        belonging = mapping.complete(messages, route)
        if len(belonging) < len(messages):
            self.dropped["spoofed"] += len(messages) - len(belonging)
        return belonging

    def _taken(self, arrived: list[ArrivedPacket], error: BaseException | None) -> None:
        self._spawn(self._acknowledge(arrived, error))

    async def _acknowledge(self, arrived: list[ArrivedPacket], error: BaseException | None) -> None:
        """Packets that were not taken come again, and so do those whose acknowledgement fails."""
        for _filter, name, packet in arrived:
            self._held.discard((name, packet.metadata.sequence.stream))
            with contextlib.suppress(errors.Error):
                await (packet.ack() if error is None else packet.nak(delay=RETRY_S))


PLUGIN: Final = TransportPlugin("nats", NatsConfig, NatsTransport, NatsTransport.capabilities)
