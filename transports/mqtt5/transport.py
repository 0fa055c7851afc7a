"""The MQTT 5 transport, on the event loop alone: no thread, so nothing has to cross one.

send_batch -> Window -> PUBLISH (QoS 1) -> broker -> PUBLISH -> Codec -> Subscriptions -> Arrivals -> listeners
                 ^------ PUBACK ----------'    ^----------------- PUBACK (last) -----------------'
Link: connects, and connects again; when the broker has lost our session, everything is subscribed to again
Session: the topic filters that the broker has for us, and those that it refuses
Losses: tells of what the broker has lost
Answers: a second connection, once a listener calls somebody and waits

BYTES_MAX or MESSAGES_MAX have arrived, and are not taken
              -> pressed: the socket is not read, which holds the broker      -> half of it taken: read again
   for PRESSED_S_MAX
              -> shedding: it is read, since what a listener waits for        -> half of it taken: a new connection,
                 may be behind; messages are neither kept nor acknowledged       they come again

Too large: CONNECT names a Maximum Packet Size, and the broker throws away what has more. What it sends nevertheless
ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from transports.arrivals import Arrivals
from transports.base import TransportBase
from transports.listeners import Filter
from transports.mqtt5 import reasons, wire
from transports.mqtt5.answers import Answers
from transports.mqtt5.config import Mqtt5Config
from transports.mqtt5.connection import Connection, Disconnected
from transports.mqtt5.link import HANGS_UP, Link
from transports.mqtt5.losses import DROPPED_TOPIC, Losses
from transports.mqtt5.mapping import REQUEST_TYPE, RESPONSE_TYPE, Mapping, Mode
from transports.mqtt5.packets import Welcome
from transports.mqtt5.reasons import RefusedError
from transports.mqtt5.session import Session
from transports.mqtt5.subscriptions import topic_matches
from transports.mqtt5.window import Window
from transports.mqtt5.wire import Codec
from uprotocol import attributes as attrs
from uprotocol.encoded import Carried
from uprotocol.pacing import Pace
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, LocalUriProvider, LossCallback, UListener
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

# how long `close` waits for what is under way, both ways together: with a hung broker it takes no longer
DRAIN_MS_MAX: Final = 1_500
# how long what a resumed session brings waits for the listener that wants it to be registered, unless the owner says
# that all are
UNCLAIMED_MS_MAX: Final = 30_000

# so many messages of one read are small: their number bounds their bytes, and to count those would cost each of them
MANY: Final = 64
# of QoS 0, which Receive Maximum does not hold back: beyond it they are dropped
UNACKNOWLEDGED_MESSAGES_MAX: Final = 8_192
# waiting or being taken: 2,048 messages of 16 KiB. Receive Maximum can't count bytes
BYTES_MAX: Final = 32 << 20
# the same; some 1.5 KB each if small. A broker may not keep to Receive Maximum: mosquitto with
# `max_inflight_messages 0` does not
MESSAGES_MAX: Final = 8_192
PRESSED_S_MAX: Final = 5.0  # how long the socket stands; far less than a keep-alive, or than a PUBACK may take
AT_ONCE_SHARE: Final = 10  # with `messages_per_s`, a tenth of a second's messages may leave at once
_DROPPED_TOPIC: Final = DROPPED_TOPIC.encode()
# the transport whose listener is being called; tasks that a listener starts have it, too
_DELIVERS: contextvars.ContextVar[Mqtt5Transport | None] = contextvars.ContextVar("delivers", default=None)

log = structlog.get_logger()


class Arrived(NamedTuple):
    # as ListenerTable.deliver_encoded takes it: for all filters; payload; serialised UAttributes. None: nothing to
    # deliver, only to acknowledge in its turn
    message: tuple[None, bytes, bytes] | None
    connection: Connection | None  # that brought it: on another one our answer would be taken for another message's
    packet_id: int  # 0: QoS 0
    size: int = 0  # bytes of its message; 0 if it is one of many that are small


class Mqtt5Transport(TransportBase):
    """A client of one broker. Everything runs on the event loop that called `open`.

    Reasons in `dropped`: malformed, spoofed, invalid, expired, unwanted, overflow, too_large; those that are too large
    the broker mostly keeps from us, and counts nowhere. `broker_dropped` are those that it threw away for want of room,
    at most; `session_lost` counts sessions, and what was lost with one nobody knows.
    """

    def __init__(self, config: Mqtt5Config, local: LocalUriProvider) -> None:
        super().__init__(config, local)
        self._config = config
        # off-vehicle there are no topics of a single resource, and without a session nothing is kept
        self.capabilities = Capability.PUSH | Capability.ENCODED | Capability.ABSENCE
        if config.mode is Mode.IN_VEHICLE:
            self.capabilities |= Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK
        if config.session_expiry_s:
            self.capabilities |= Capability.ACK | Capability.PERSISTENT_SESSION
        self._mapping = Mapping(config.mode, self.authority, ttl_reading=config.ttl_reading)
        self._codec = Codec(self._mapping, self.checks)
        self._link = link = Link(config, local, self)
        self._session = Session(link, self._start)
        per_s = config.messages_per_s
        pace = Pace(per_s, lambda: asyncio.get_running_loop().time(), per_s // AT_ONCE_SHARE) if per_s else None
        self._window = Window(self._codec.encode, link.next_packet_id, self._topic_of_absence, self._slashes, pace)
        self.on_pubacks = self._window.on_pubacks  # for the connection
        self._arrivals = Arrivals[Arrived](
            lambda arrived: self.listeners.deliver_encoded([one.message for one in arrived if one.message is not None]),
            self._acknowledge,
            messages_max=MESSAGES_MAX,
            bytes_max=BYTES_MAX,
            redeliver=True,
            gathers=False,
            pressed=self._on_pressed,
        )
        self._answers = Answers(config, local, self._take_answers)
        self._paused_at_s: float | None = None  # since then the socket is not read
        self._shedding = self._has_shed = False  # what comes is not kept, and something did
        is_resumed = config.client_id is not None and config.session_expiry_s > 0
        self._losses = Losses(
            link.address, f"{config.client_id} at {link.address}" if is_resumed else None, self.dropped
        )
        # unacknowledged: with those that are on the way the broker may have to queue
        self._lag_messages = -(-config.receive_maximum // 2)
        self._has_session = False  # the broker keeps one for us, as far as we know
        self._was_welcomed = False  # by the broker, since we were made
        self._tasks: set[asyncio.Task[None]] = set()  # until `close`: subscriptions are left, and losses asked for
        self._unclaimed: list[tuple[str, Arrived]] = []  # from a resumed session, with its topic
        self._is_claiming, self._unclaimed_until_s = False, 0.0
        self._has_all_listeners = False  # as their owner says

    def __repr__(self) -> str:
        state = "connected" if self.connected else "reconnecting" if self.is_open else "closed"
        return (
            f"Mqtt5Transport({self.authority}, {self._config.mode}, {self._link.address}, {state}, "
            f"{self._session}, {self._window}, {self._arrivals})"
        )

    def on_loss(self, callback: LossCallback) -> None:
        self._losses.callbacks.append(callback)

    def remember_in(self, file: str) -> None:
        self._losses.remember_in(Path(file))
        self._session.restore(self._losses.filters_left)

    def all_registered(self) -> None:
        if self._has_all_listeners:
            return
        self._has_all_listeners = True
        self._unclaimed_until_s = min(self._unclaimed_until_s, asyncio.get_running_loop().time())
        self._end_claims()

    @property
    def troubles(self) -> list[str]:
        return [*self._window.troubles, *self._link.troubles, *self._session.troubles]

    @property
    def notes(self) -> list[str]:
        return [*self._link.notes, *self._answers.notes]

    async def open(self) -> None:
        """Connect, and stay connected: a connection that is lost later comes back by itself.

        Raises UNAVAILABLE if the broker can't be reached, what it says if it refuses us (UNAUTHENTICATED,
        PERMISSION_DENIED, ...), and FAILED_PRECONDITION if a file of the settings can't be used.
        """
        if self.is_open:
            return
        self.is_open = True
        token = _DELIVERS.set(self)
        self._arrivals.open()  # keeps this context
        _DELIVERS.reset(token)
        try:
            await self._link.open(self.wire_bytes_max)
        except BaseException:
            self.is_open = False
            raise

    async def close(self) -> None:
        """Finish what is under way, in DRAIN_MS_MAX at most, and disconnect; while it is connecting, give that up."""
        if not self.is_open:
            return
        self.is_open = False
        drain_ms = DRAIN_MS_MAX if self.connected else 0
        drained = asyncio.ensure_future(self._window.drained())
        await asyncio.gather(asyncio.wait([drained], timeout=drain_ms / 1000), self._arrivals.finish(drain_ms / 1000))
        drained.cancel()
        await asyncio.gather(self._link.close(), self._answers.close())
        # one with a made-up name has ended with this
        self._has_session = self._has_session and self._config.client_id is not None
        await asyncio.gather(*self._tasks, self._session.close(), return_exceptions=True)
        await self._losses.close(self._session.filters)
        self._take_unclaimed()

    # What the link tells.

    def welcomed(self, welcome: Welcome) -> None:
        now_s = asyncio.get_running_loop().time()
        # an earlier process has left it
        if welcome.session_present and not self._was_welcomed and not self._has_all_listeners:
            self._is_claiming, self._unclaimed_until_s = True, now_s + UNCLAIMED_MS_MAX / 1000
        self._losses.connected(
            resumed=welcome.session_present,
            had_session=self._has_session and self._session.listens,
            forgets=self._config.clean_start,
            now_s=now_s,
        )
        self._has_session, self._was_welcomed = self._link.granted_s(welcome) > 0, True
        self._session.welcomed(is_present=welcome.session_present)

    async def up(self, connection: Connection, welcome: Welcome) -> None:
        """Bring the broker's subscriptions in line with ours, then tell everybody."""
        brokers_max = welcome.told("MaximumPacketSize", wire.PACKET_BYTES_MAX)
        self._codec.packet_bytes_max = min(brokers_max, self.wire_bytes_max)
        asked = await self._session.ask_for_all(wildcards=bool(welcome.told("WildcardSubscriptionAvailable", 1)))
        self._window.open(connection, min(self._config.in_flight_max, welcome.told("ReceiveMaximum", 65_535)))
        log.info(
            "connected",
            broker=self._link.address,
            session_present=welcome.session_present,
            subscribed_again=asked,
            announced=welcome.properties,
        )
        self._session.up()
        self.set_connected(True)
        self._end_claims()
        self._start(self._ask_for_count())

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _ask_for_count(self) -> None:
        """mosquitto counts what it drops. Other brokers don't tell; some hang up on whoever asks (rumqttd)."""
        if self._config.sys_topics and self._losses.may_ask:
            await self._ask_once_for_count()
        self._session.try_suspects()

    async def _ask_once_for_count(self) -> None:
        connection = self._link.connection
        try:
            await self._link.subscribe(DROPPED_TOPIC, retained=True)
        except UStatusError as error:
            how = connection.hung_up if connection is not None else None
            says_why = isinstance(how, Disconnected) and not reasons.is_of_all(how.reason)
            hung_up = says_why or isinstance(how, HANGS_UP)
            if isinstance(error, RefusedError) or hung_up:
                self._losses.not_told(hung_up=hung_up)
            log.info("the broker does not tell how many messages it drops", broker=self._link.address, error=str(error))

    def down(self, why: str) -> None:
        self._session.down()
        self._window.shut(UStatus(code=UCode.UNAVAILABLE, message=why))
        self._take_unclaimed()  # the broker sends them again
        self._paused_at_s, self._has_shed = None, False
        self._shedding = self._arrivals.is_pressed  # the next connection must be read, or it would never be one
        self.set_connected(False, why)

    def tick(self, now_s: float) -> None:
        if self._window.stalled:
            log.error(
                "the broker owes acknowledgements for too long: dropping the connection", window=repr(self._window)
            )
            self._link.drop("it owes acknowledgements for too long")
        if self._is_claiming and now_s >= self._unclaimed_until_s:
            self._end_claims()
        self._session.tick(now_s)
        if self._paused_at_s is not None and now_s - self._paused_at_s >= PRESSED_S_MAX:
            log.warning(
                "listeners don't take what has arrived: what comes now is left to the broker",
                arrivals=repr(self._arrivals),
            )
            self._shedding, self._paused_at_s = True, None
            self._link.pause(False)
        if self.connected:
            self._losses.tick(now_s, self._session.filters)

    # Send.

    @property
    def in_flight_messages(self) -> int:  # type: ignore[override]  # read only
        return self._window.messages

    def address_of(self, source: UUri, sink: UUri | None) -> str:
        """The topic name; off-vehicle there is none without a sink, and nothing can be sent there."""
        if sink is None and self._config.mode is Mode.OFF_VEHICLE:
            return super().address_of(source, sink)
        is_publish = sink is None or attrs.is_streamer_sink(sink)
        return self._mapping.topic(attrs.PUBLISH if is_publish else attrs.NOTIFICATION, source, sink)

    def _topic_of_absence(self, message: Carried) -> str | None:
        """Of a publish, if the owner wants to know that nobody listens there: a broker that knows it says so in PUBACK,
        and never that somebody has come, so nothing calls what `on_heard` is given."""
        if not self.tells_absence or message.attributes.type != attrs.PUBLISH:
            return None
        attributes = message.attributes
        return self.address_of(attributes.source, attributes.sink if attributes.HasField("sink") else None)

    def _slashes(self, message: Carried) -> int:
        attributes = message.attributes
        return self.address_of(attributes.source, attributes.sink if attributes.HasField("sink") else None).count("/")

    async def send_batch(self, messages: Sequence[Carried]) -> list[UStatus]:
        if _DELIVERS.get() is self:
            await self._await_answers(messages)
        return await self._window.send(messages)

    async def _await_answers(self, messages: Sequence[Carried]) -> None:
        """A listener sends these, perhaps while we wait for it: what is acknowledged on the main connection is up to
        it, so the answers to its calls must not wait for that."""
        topics = []
        for message in messages:
            attributes = message.attributes
            if attributes.type == attrs.REQUEST:
                with contextlib.suppress(UStatusError):  # it is not valid, and sending says so
                    topics.append(self.address_of(attributes.sink, attributes.source))
        if topics:
            await self._answers.listen(topics, self.wire_bytes_max)

    def _take_answers(self, publishes: list[wire.Publish]) -> None:
        """From the answers' own connection, which acknowledges them. What is no answer, or comes while there is no
        room, comes on the main one, too."""
        for publish in publishes:
            if RESPONSE_TYPE in publish.properties and not self._arrivals.is_pressed:
                arrived = self._read(publish._replace(packet_id=0), weigh=True)
                if arrived is not None and arrived.message is not None:
                    self._arrivals.put_now([arrived], [arrived.size])

    # Receive.

    def _on_pressed(self, pressed: bool) -> None:
        """As Arrivals says: hold the broker back, go on, or have come again what was not kept."""
        if pressed:
            self._losses.behind = True
        if not self._shedding:
            self._paused_at_s = asyncio.get_running_loop().time() if pressed else None
            self._link.pause(pressed)
        elif not pressed:
            self._shedding = False
            if self._has_shed:
                asyncio.get_running_loop().call_soon(self._link.drop, "it is to send again what was not kept")

    def on_publishes(self, publishes: list[wire.Publish]) -> None:
        # the order holds: nothing that is behind what was shed is kept on this connection
        if self._shedding or self._has_shed:
            self._has_shed = True  # what has no acknowledgement comes again with the next one, if there is a session
            self.dropped["overflow"] += sum(not (one.packet_id and self._link.session_expiry_s) for one in publishes)
            return
        taken: list[Arrived] = []
        weigh = len(publishes) < MANY
        for publish in publishes:
            if not publish.packet_id and self._arrivals.undelivered >= UNACKNOWLEDGED_MESSAGES_MAX:
                self.dropped["overflow"] += 1
                continue
            arrived = self._read(publish, weigh)
            if arrived is not None:
                taken.append(arrived)
        self._arrivals.put_now(taken, [one.size for one in taken] if weigh else ())
        if self._arrivals.waiting + len(self._unclaimed) >= self._lag_messages:
            self._losses.behind = True

    def _read(self, publish: wire.Publish, weigh: bool) -> Arrived | None:
        """What can't be read, and the copies of other subscriptions, are only acknowledged, in their turn."""
        if (
            self.refused
            and (authority := publish.topic.partition(b"/")[0].decode(errors="replace")) in self.refused
            and REQUEST_TYPE not in publish.properties  # its caller is told, so it is read
        ):
            self.refused[authority] += 1
            return self._nothing(publish) if publish.packet_id else None
        if publish.topic == _DROPPED_TOPIC:
            self._losses.counted(publish.payload, retained=publish.retained, now_s=asyncio.get_running_loop().time())
            return self._nothing(publish)
        try:
            topic, encoded = self._codec.decode(publish)
        except UStatusError as error:
            self.dropped["spoofed" if error.code == UCode.PERMISSION_DENIED else "malformed"] += 1
            log.debug("dropped what is no uProtocol message", topic=publish.topic, error=str(error))
            return self._nothing(publish)
        except Exception:
            self.dropped["malformed"] += 1
            log.exception("a message that arrived could not be read, and nobody foresaw why", topic=publish.topic)
            return self._nothing(publish)
        matches = self._session.subscriptions.matches(topic)
        size = 0
        if weigh:
            size = len(publish.payload) + len(encoded)
            if size > self._link.wire_bytes_max:  # the broker may add to a message, so it was told a little more
                self.dropped["too_large"] += 1
                return self._nothing(publish)
        waits = self._may_be_claimed(publish) and not (matches and self._wants(encoded))
        if not matches and not waits:
            self.dropped["unwanted"] += 1
            self._session.unwanted(topic)
            return self._nothing(publish)
        may_be_copy = self._session.copies.may_come(topic, matches) or topic in self._answers.topics
        if may_be_copy and self._session.copies.is_copy(encoded):
            arrived = self._nothing(publish)
        else:
            arrived = Arrived((None, publish.payload, encoded), self._link.connection, publish.packet_id, size)
        if not waits:
            return arrived
        self._unclaimed.append((topic, arrived))  # as many as Receive Maximum, and as large as what waits may be
        self._arrivals.count(arrived.size)
        return None

    def _may_be_claimed(self, publish: wire.Publish) -> bool:
        """A listener that wants it may yet be registered."""
        return (
            self._is_claiming and publish.packet_id != 0 and asyncio.get_running_loop().time() < self._unclaimed_until_s
        )

    def _wants(self, encoded: bytes) -> bool:
        """A listener does; off-vehicle more than one pair of filters has the topic filter."""
        return self.listeners.wants(UMessage(attributes=UAttributes.FromString(encoded)))

    def _nothing(self, publish: wire.Publish) -> Arrived:
        """To be acknowledged only."""
        return Arrived(None, self._link.connection, publish.packet_id)

    def _claim(self, topic_filter: str) -> None:
        """A resumed session may have brought what belongs to a listener before the listener came."""
        claimed: list[Arrived] = []
        left: list[tuple[str, Arrived]] = []
        for topic, arrived in self._unclaimed:
            message = arrived.message
            if topic_matches(topic_filter, topic) and (message is None or self._wants(message[2])):
                claimed.append(arrived)
            else:
                left.append((topic, arrived))
        self._unclaimed = left
        sizes = [one.size for one in claimed]
        self._arrivals.put_now(claimed, sizes)
        self._arrivals.count(-sum(sizes))

    def _end_claims(self) -> None:
        """Unless listeners have time yet: what nobody has claimed is acknowledged, and its filters are left."""
        if not self.connected or asyncio.get_running_loop().time() < self._unclaimed_until_s:
            return
        self._is_claiming = False
        if self._unclaimed:
            self.dropped["unwanted"] += sum(arrived.message is not None for _, arrived in self._unclaimed)
            for topic, _ in self._unclaimed:
                self._session.unwanted(topic)
            self._acknowledge(self._take_unclaimed())
        self._session.leave_stale()

    def _take_unclaimed(self) -> list[Arrived]:
        taken = [arrived for _, arrived in self._unclaimed]
        self._unclaimed.clear()
        self._arrivals.count(-sum([one.size for one in taken]))
        return taken

    def _acknowledge(self, taken: Sequence[Arrived], _error: BaseException | None = None) -> None:
        """On the connection that brought them only: on a later one the broker sends them again."""
        connection = self._link.connection
        packet_ids = [one.packet_id for one in taken if one.packet_id and one.connection is connection]
        if packet_ids and connection is not None:
            connection.write(wire.pubacks(packet_ids))

    # Listen.

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        """While the broker is away it is noted, and subscribed to when it is back. Raises PERMISSION_DENIED,
        INVALID_ARGUMENT, ... if the broker refuses it for good. What it refuses for now (quota exceeded, say) is noted,
        too, and asked for again; `troubles` names it until then."""
        topic_filter = self._topic_filter(source_filter, sink_filter)
        is_new = self.listeners.add(source_filter, sink_filter, listener) is not None
        if is_new:
            self._session.use(topic_filter)
            self._claim(topic_filter)
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
