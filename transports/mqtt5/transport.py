"""The MQTT 5 transport, on the event loop alone: no threads.

send_batch -> Window -> PUBLISH (QoS 1) -> broker -> PUBLISH -> PublishReceiver -> listeners
                 ^------ PUBACK ----------'    ^------------ PUBACK (last) ----------'
Link: connects, and connects again; when the broker has lost our session, everything is subscribed to again
Session: the topic filters that the broker has for us, and those that it refuses
Losses: reports what the broker has lost
Answers: a second connection, made when a listener calls somebody and waits
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from transports.base import TransportBase
from transports.listeners import Filter
from transports.mqtt5 import reasons, wire
from transports.mqtt5.config import Mqtt5Config
from transports.mqtt5.connection import Connection, Disconnected
from transports.mqtt5.link import HANGS_UP, Link
from transports.mqtt5.losses import ADDRESS, DROPPED_TOPIC, Losses
from transports.mqtt5.mapping import Mapping, Mode
from transports.mqtt5.packets import Welcome
from transports.mqtt5.probe import BrokerProbe
from transports.mqtt5.reasons import RefusedError
from transports.mqtt5.receiving import PublishReceiver
from transports.mqtt5.session import Session
from transports.mqtt5.window import PUBACK_MS_MAX, Window
from transports.mqtt5.wire import PublishCodec
from uprotocol import attributes as attrs
from uprotocol.encoded import Carried
from uprotocol.pacing import Pace
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, LocalUriProvider, ProbeRequest, ProbeResult, UListener
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

# how long `close` waits for messages that are being sent or taken, both together; with a hung broker it takes no longer
CLOSE_DRAIN_MS_MAX: Final = 1_500
AT_ONCE_SHARE: Final = 10  # with `messages_per_s`, a tenth of a second's messages may leave at once
# the transport whose listener is being called; tasks that a listener starts have it, too
_DELIVERS: contextvars.ContextVar[Mqtt5Transport | None] = contextvars.ContextVar("delivers", default=None)

log = structlog.get_logger()


class Mqtt5Transport(TransportBase):
    """A client of one broker. Everything runs on the event loop that called `open`.

    Reasons in `dropped`: malformed, spoofed, invalid, expired, unwanted, overflow, too_large (most of those the broker
    drops itself, uncounted). `broker_dropped`: at most so many the broker has dropped because its queue was full.
    `session_lost` counts sessions; how many messages were lost with one is unknown.
    """

    def __init__(self, config: Mqtt5Config, local: LocalUriProvider) -> None:
        super().__init__(config, local)
        self._config = config
        # off-vehicle, no topic belongs to a single resource; without a session, nothing is kept
        self.capabilities = Capability.PUSH | Capability.ENCODED | Capability.ABSENCE
        if config.mode is Mode.IN_VEHICLE:
            self.capabilities |= Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK
        if config.session_expiry_s:
            self.capabilities |= Capability.ACK | Capability.PERSISTENT_SESSION
        self._mapping = Mapping(config.mode, self.authority, ttl_reading=config.ttl_reading)
        self._codec = PublishCodec(self._mapping, self.checks)
        self._link = link = Link(config, local, self)
        self._session = Session(link, self._start)
        per_s = config.messages_per_s
        pace = Pace(per_s, lambda: asyncio.get_running_loop().time(), per_s // AT_ONCE_SHARE) if per_s else None
        self._window = Window(self, self._codec.encode, link.next_packet_id, self._topic_of_absence, self._topic, pace)
        self.on_pubacks = self._window.on_pubacks  # for the connection
        is_resumed = config.client_id is not None and config.session_expiry_s > 0
        self._losses = Losses(
            link.address,
            f"{config.client_id}{ADDRESS}{link.address}" if is_resumed else None,
            self.dropped,
            self._on_loss,
        )
        self._has_session = False  # the broker keeps one for us, as far as is known
        self._resumed_session = False
        self._was_welcomed = False  # the broker has accepted a login of this object
        self._tasks: set[asyncio.Task[None]] = set()  # until `close`
        self._receiver = PublishReceiver(self, config, link, self._session, self._codec, self._losses)
        self.on_publishes = self._receiver.on_publishes  # for the connection

    def __repr__(self) -> str:
        state = "connected" if self.connected else "reconnecting" if self.is_open else "closed"
        return (
            f"Mqtt5Transport({self.authority}, {self._config.mode}, {self._link.address}, {state}, "
            f"{self._session}, {self._window}, {self._receiver.arrivals})"
        )

    def remember_in(self, file: str) -> None:
        self._losses.remember_in(Path(file))
        self._session.restore(self._losses.filters_left)

    @property
    def resumed_session(self) -> bool:
        return self._resumed_session

    def all_registered(self) -> None:
        if not self._receiver.has_all_listeners:
            self._receiver.all_registered()

    @property
    def troubles(self) -> list[str]:
        return [*self._window.suspects.troubles, *self._link.troubles, *self._session.troubles]

    @property
    def notes(self) -> list[str]:
        return [*self._link.notes, *self._receiver.answers.notes]

    async def open(self) -> None:
        """Connect, and stay connected: a connection that is lost later is made again.

        Raises UNAVAILABLE if the broker can't be reached, its reason if it refuses the login (UNAUTHENTICATED,
        PERMISSION_DENIED, ...), and FAILED_PRECONDITION if a file of the settings can't be used.
        """
        if self.is_open:
            return
        self.is_open = True
        token = _DELIVERS.set(self)
        self._receiver.arrivals.open()  # keeps this context
        _DELIVERS.reset(token)
        try:
            await self._link.open(self.wire_bytes_max)
        except BaseException:
            self.is_open = False
            raise

    async def close(self) -> None:
        """Finish sending and taking, within CLOSE_DRAIN_MS_MAX, and disconnect. An attempt to connect is cancelled."""
        if not self.is_open:
            return
        self.is_open = False
        drain_s = CLOSE_DRAIN_MS_MAX / 1000 if self.connected else 0
        drained = asyncio.ensure_future(self._window.drained())
        await asyncio.gather(asyncio.wait([drained], timeout=drain_s), self._receiver.arrivals.finish(drain_s))
        drained.cancel()
        await asyncio.gather(self._link.close(), self._receiver.answers.close())
        # a session with a generated name ends with the connection
        self._has_session = self._has_session and self._config.client_id is not None
        await asyncio.gather(*self._tasks, self._session.close(), return_exceptions=True)
        await self._losses.close(self._session.filters)

    # Events of the link.

    def welcomed(self, welcome: Welcome) -> None:
        """Called by the link: the broker has accepted a connection."""
        now_s = asyncio.get_running_loop().time()
        if welcome.session_present and not self._was_welcomed:
            self._resumed_session = True
            self._receiver.resumed_foreign_session(now_s)
        self._losses.connected(
            resumed=welcome.session_present,
            had_session=self._has_session and self._session.listens,
            forgets=self._config.clean_start,
            now_s=now_s,
        )
        self._has_session, self._was_welcomed = self._link.granted_s(welcome) > 0, True
        self._session.welcomed(is_present=welcome.session_present)

    async def up(self, connection: Connection, welcome: Welcome) -> None:
        """Subscribe to all that is wanted, then report that the network is connected."""
        brokers_max = welcome.number("MaximumPacketSize", wire.PACKET_BYTES_MAX)
        self._codec.packet_bytes_max = min(brokers_max, self.wire_bytes_max)
        asked = await self._session.ask_for_all(wildcards=bool(welcome.number("WildcardSubscriptionAvailable", 1)))
        self._window.open(connection, min(self._config.in_flight_max, welcome.number("ReceiveMaximum", 65_535)))
        log.info(
            "connected",
            broker=self._link.address,
            session_present=welcome.session_present,
            subscribed_again=asked,
            announced=welcome.properties,
            _kind="broker",
        )
        self._session.up()
        self.set_connected(True)
        self._receiver.end_claims()
        self._start(self._ask_for_count())

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _ask_for_count(self) -> None:
        """mosquitto publishes how many messages it drops. Other brokers don't; some hang up over the question
        (rumqttd)."""
        if self._config.sys_topics and self._losses.may_ask:
            connection = self._link.connection
            try:
                await self._link.subscribe(DROPPED_TOPIC, retained=True)
            except UStatusError as error:
                how = connection.hung_up if connection is not None else None
                says_why = isinstance(how, Disconnected) and how.reason not in reasons.OF_ALL
                hung_up = says_why or isinstance(how, HANGS_UP)
                if isinstance(error, RefusedError) or hung_up:
                    self._losses.not_published(hung_up=hung_up)
                what = "the broker does not publish how many messages it drops"
                log.info(what, broker=self._link.address, error=str(error))
        self._session.try_suspects()

    def down(self, why: str) -> None:
        """Called by the link: the connection is lost."""
        self._session.down()
        self._window.shut(UStatus(code=UCode.UNAVAILABLE, message=why))
        self._receiver.down()
        self.set_connected(False, why)

    def tick(self, now_s: float) -> None:
        """Called by the link about once a second."""
        if self._window.stalled and not self._link.may_be_behind(PUBACK_MS_MAX / 1000):
            log.error("acknowledgements of the broker are overdue: dropping the connection", window=repr(self._window))
            self._link.drop("its acknowledgements are overdue")
        self._receiver.tick(now_s)
        self._session.tick(now_s)
        if self.connected:
            self._losses.tick(now_s, self._session.filters)

    # Send.

    def address_of(self, source: UUri, sink: UUri | None) -> str:
        """The topic name. Off-vehicle there is none without a sink, and nothing can be sent there."""
        if sink is None and self._config.mode is Mode.OFF_VEHICLE:
            return super().address_of(source, sink)
        is_publish = sink is None or attrs.is_streamer_sink(sink)
        return self._mapping.topic(attrs.PUBLISH if is_publish else attrs.NOTIFICATION, source, sink)

    def _topic_of_absence(self, message: Carried) -> str | None:
        """The topic of a publish, if the owner wants to know that nobody listens there; else None. A broker that knows
        it says so in PUBACK. It never says that somebody listens now, so callbacks of `on_heard` are never called."""
        return self._topic(message) if self.tells_absence and message.attributes.type == attrs.PUBLISH else None

    def _topic(self, message: Carried) -> str:
        attributes = message.attributes
        return self.address_of(attributes.source, attributes.sink if attributes.HasField("sink") else None)

    async def send_batch(self, messages: Sequence[Carried]) -> list[UStatus]:
        if _DELIVERS.get() is self:
            await self._await_answers(messages)
        return await self._window.send(messages)

    async def _await_answers(self, messages: Sequence[Carried]) -> None:
        """A listener sends these, perhaps before it has taken its message. Messages on the main connection are
        acknowledged only after that, so the answers to its calls must not wait behind them."""
        topics = []
        for message in messages:
            attributes = message.attributes
            if attributes.type == attrs.REQUEST:
                with contextlib.suppress(UStatusError):  # not valid; sending it reports that
                    topics.append(self.address_of(attributes.sink, attributes.source))
        if topics:
            await self._receiver.answers.listen(topics, self.wire_bytes_max)

    async def probe(self, asked: ProbeRequest) -> AsyncGenerator[ProbeResult, None]:
        filters = [self._mapping.topic_filter(*one) for one in asked.filters]
        sends = [self.address_of(*one) for one in asked.sends]
        probe = BrokerProbe(
            self._config, self._link, self.wire_bytes_max, asked, [*dict.fromkeys(filters)], [*dict.fromkeys(sends)]
        )
        async for one in probe.results():
            yield one

    # Listen.

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        """Without a connection the filter is noted, and subscribed to on the next one. Raises PERMISSION_DENIED,
        INVALID_ARGUMENT, ... if the broker refuses it for good. If the broker refuses it for now (quota exceeded, say),
        it is asked for again later; `troubles` names it until then."""
        topic_filter = self._topic_filter(source_filter, sink_filter)
        is_new = self.listeners.add(source_filter, sink_filter, listener) is not None
        if is_new:
            self._session.use(topic_filter)
            self._receiver.claim(topic_filter)
        granted = self._session.answer_of(topic_filter)
        if granted is None:
            return
        try:
            await asyncio.shield(granted)
        except UStatusError:
            with contextlib.suppress(UStatusError):  # it may have been unregistered meanwhile
                if self.listeners.remove(source_filter, sink_filter, listener) is not None:
                    await self._session.release(topic_filter)
            raise

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        topic_filter = self._topic_filter(source_filter, sink_filter)
        if self.listeners.remove(source_filter, sink_filter, listener) is not None:
            await self._session.release(topic_filter)

    def listen_at_open(self, filter: Filter) -> None:
        self._session.use(self._mapping.topic_filter(filter.source, filter.sink))

    def _topic_filter(self, source_filter: UUri, sink_filter: UUri | None) -> str:
        filter = Filter.of(source_filter, sink_filter, self.authority)
        topic_filter = self._mapping.topic_filter(filter.source, filter.sink)
        self.check_open()
        return topic_filter
