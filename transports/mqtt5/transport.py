"""The MQTT 5 transport, on the event loop alone: no thread, so nothing has to cross one.

send_batch -> Window -> PUBLISH (QoS 1) -> broker -> PUBLISH -> Subscriptions -> mapping -> Intake -> listeners
                 ^------ PUBACK ----------'    ^----------------- PUBACK (last) -------------'
Link: connects, and connects again; when the broker has lost our session, everything is subscribed to again
Losses: tells of what the broker has lost

Too large: CONNECT names a Maximum Packet Size, and the broker throws away what has more. What it sends nevertheless
ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog

from transports.base import NOT_OPEN, TransportBase
from transports.listeners import Filter
from transports.mqtt5 import wire
from transports.mqtt5.codec import Codec
from transports.mqtt5.config import Mqtt5Config
from transports.mqtt5.intake import PRESSED_S_MAX, Arrived, Intake
from transports.mqtt5.link import Link, Welcome
from transports.mqtt5.losses import DROPPED_TOPIC, Losses
from transports.mqtt5.mapping import Mapping, Mode
from transports.mqtt5.subscriptions import Subscription, Subscriptions, topic_matches
from transports.mqtt5.window import Window
from uprotocol.encoded import Carried
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, LocalUriProvider, LossCallback, UListener
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

SUBSCRIBES_MAX: Final = 256  # without answer: some brokers hang up on more
# how long `close` waits for what is under way, both ways together: with a hung broker it takes no longer
DRAIN_MS_MAX: Final = 1_500
# how long `unregister_listener` waits for the broker's answer, so that not too many are due at once
LEAVE_MS_MAX: Final = 500
# how long what a resumed session brings waits for the listener that wants it to be registered
UNCLAIMED_MS_MAX: Final = 30_000

# so many messages of one read are small: their number bounds their bytes, and to count those would cost each of them
MANY: Final = 64
COUNT_REFUSALS_MAX: Final = 2  # connections that a broker may end over our asking for its count; then we ask no more
_DROPPED_TOPIC: Final = DROPPED_TOPIC.encode()

log = structlog.get_logger()


def capabilities(config: Mqtt5Config) -> Capability:
    """They depend on the settings: off-vehicle there are no topics of a single resource, and without a session nothing
    is kept."""
    found = Capability.PUSH | Capability.ENCODED
    if config.mode is Mode.IN_VEHICLE:
        found |= Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK
    if config.session_expiry_s:
        found |= Capability.ACK | Capability.PERSISTENT_SESSION
    return found


class Mqtt5Transport(TransportBase):
    """A client of one broker. Everything runs on the event loop that called `open`.

    Reasons in `dropped`: malformed, spoofed, invalid, expired, unwanted, overflow, too_large; those that are too large
    the broker mostly keeps from us, and counts nowhere. `broker_dropped` are those that it threw away for want of room,
    at most; `session_lost` counts sessions, and what was lost with one nobody knows.
    """

    def __init__(
        self, config: Mqtt5Config, local: LocalUriProvider, *, chance: Callable[[], float] = random.random
    ) -> None:
        super().__init__(config, local)
        self._config = config
        self.capabilities = capabilities(config)
        self._mapping = Mapping(config.mode, self.authority, restore_ttl=config.restore_ttl)
        self._codec = Codec(self._mapping, self.checks, same_for_all_ids=not config.restore_ttl)
        self._subscriptions = Subscriptions()
        self._link = link = Link(config, local, self, chance)
        self._window = Window(self._codec.encode, link.write, link.next_packet_id)
        self._intake = Intake(self.listeners.deliver_encoded, self._acknowledge, self._on_pressed)
        self._paused_at_s: float | None = None  # since then the socket is not read
        self._shedding = self._has_shed = False  # what comes is not kept, and something did
        named = config.client_id if config.session_expiry_s else None
        session = f"{named} at {link.address}" if named is not None else None
        self._losses = Losses(link.address, session, self.dropped)
        self._counting: asyncio.Task[None] | None = None
        self._count_refusals = 0
        # unacknowledged: with those that are on the way the broker may have to queue
        self._lag_messages = -(-config.receive_maximum // 2)
        self._refused: dict[str, str] = {}  # topic filter -> why the broker no longer lets us subscribe
        self._open = False
        self._has_session = False  # the broker keeps one for us, as far as we know
        self._connection = 0  # counts the connections
        self._identifiers = True  # the broker knows subscription identifiers
        self._left: set[str] = set()  # topic filters that the session at the broker still has, though nobody listens
        self._leaving: set[asyncio.Task[None]] = set()
        self._bytes_max = self.wire_bytes_max  # since `open`
        self._hangs = False  # the broker has not answered an UNSUBSCRIBE in time
        self._unclaimed: list[tuple[str, Arrived]] = []  # from a resumed session, with its topic
        self._unclaimed_until_s = 0.0

    def __repr__(self) -> str:
        state = "connected" if self.connected else "reconnecting" if self._open else "closed"
        return (
            f"Mqtt5Transport({self.authority}, {self._config.mode}, {self._link.address}, {state}, "
            f"subscriptions={len(self._subscriptions)}, {self._window}, {self._intake})"
        )

    def on_loss(self, callback: LossCallback) -> None:
        self._losses.callbacks.append(callback)

    def remember_in(self, file: str) -> None:
        self._losses.remember_in(Path(file))

    @property
    def troubles(self) -> list[str]:
        if not self._refused:
            return []
        first, why = next(iter(self._refused.items()))
        return [
            f"the broker no longer lets us subscribe to {len(self._refused)} topic filters, one of them {first}: {why}"
        ]

    async def open(self) -> None:
        """Connect, and stay connected: a connection that is lost later comes back by itself.

        Raises UNAVAILABLE if the broker can't be reached, what it says if it refuses us (UNAUTHENTICATED,
        PERMISSION_DENIED, ...), and FAILED_PRECONDITION if a file of the settings can't be used.
        """
        if self._open:
            return
        self._open = True
        self._link.wire_bytes_max = self._bytes_max = self.wire_bytes_max
        self._intake.open()
        try:
            await self._link.open()
        except BaseException:
            self._open = False
            raise

    async def close(self) -> None:
        """Finish what is under way, in DRAIN_MS_MAX at most, and disconnect; while it is connecting, give that up."""
        if not self._open:
            return
        self._open = False
        drain_ms = DRAIN_MS_MAX if self.connected else 0
        drained = asyncio.ensure_future(self._window.drained())
        await asyncio.gather(asyncio.wait([drained], timeout=drain_ms / 1000), self._intake.finish(drain_ms / 1000))
        drained.cancel()
        await self._link.close()
        # one with a made-up name has ended with this
        self._has_session = self._has_session and self._config.client_id is not None
        await asyncio.gather(
            *self._leaving, *([self._counting] if self._counting is not None else []), return_exceptions=True
        )
        await self._losses.close()
        self._take_unclaimed()

    # What the link tells.

    def welcomed(self, welcome: Welcome) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._connection == 0 and welcome.session_present:
            self._unclaimed_until_s = now_s + UNCLAIMED_MS_MAX / 1000
        self._losses.connected(
            resumed=welcome.session_present,
            had_session=self._has_session and self._listens,
            forgets=self._config.clean_start,
            now_s=now_s,
        )
        self._has_session = self._config.session_expiry_s > 0
        self._connection += 1
        # also of a session that is there: a broker that was killed has brought back an older one
        self._subscriptions.forget_all()
        if not welcome.session_present:
            self._left.clear()

    @property
    def _listens(self) -> bool:
        """The session at the broker has subscriptions."""
        return any(one.known for one in self._subscriptions)

    async def up(self, welcome: Welcome) -> None:
        """Bring the broker's subscriptions in line with ours, then tell everybody."""
        self._codec.packet_bytes_max = min(
            welcome.told("MaximumPacketSize", wire.PACKET_BYTES_MAX), self.wire_bytes_max
        )
        self._identifiers = bool(welcome.told("SubscriptionIdentifierAvailable", 1))
        for topic_filter in list(self._left):
            await self._link.unsubscribe(topic_filter)
            self._left.discard(topic_filter)
        self._refused.clear()
        tried: set[int] = set()
        while missing := [one for one in self._subscriptions if not one.known and one.users and id(one) not in tried][
            :SUBSCRIBES_MAX
        ]:
            tried.update(map(id, missing))
            await asyncio.gather(*map(self._subscribe_again, missing))
        self._window.open(min(self._config.in_flight_max, welcome.told("ReceiveMaximum", 65_535)))
        log.info(
            "connected", broker=self._link.address, session_present=welcome.session_present, subscribed_again=len(tried)
        )
        self.set_connected(True)
        if self._count_refusals < COUNT_REFUSALS_MAX:
            self._counting = asyncio.ensure_future(self._ask_for_count())

    async def _ask_for_count(self) -> None:
        """mosquitto counts what it drops. Other brokers don't, or don't tell; some may hang up on whoever asks."""
        try:
            await self._link.subscribe(DROPPED_TOPIC, None, retained=True)
        except UStatusError as error:
            self._count_refusals += 1 if error.code == UCode.UNAVAILABLE else COUNT_REFUSALS_MAX
            log.info("the broker does not tell how many messages it drops", broker=self._link.address, error=str(error))
        else:
            self._count_refusals = 0

    async def _subscribe_again(self, subscription: Subscription) -> None:
        try:
            await self._subscribe(subscription)
        except UStatusError as error:
            if error.code == UCode.UNAVAILABLE:
                raise
            self._refused[subscription.topic_filter] = str(error)
            log.error(
                "the broker no longer lets us subscribe", topic_filter=subscription.topic_filter, error=str(error)
            )

    def down(self, why: str) -> None:
        self._window.shut(UStatus(code=UCode.UNAVAILABLE, message=why))
        self._take_unclaimed()  # the broker sends them again
        self._paused_at_s, self._has_shed = None, False
        self._shedding = self._intake.is_pressed  # the next connection must be read, or it would never be one
        self.set_connected(False)

    def tick(self, now_s: float) -> None:
        if self._window.stalled:
            log.error(
                "the broker owes acknowledgements for too long: dropping the connection", window=repr(self._window)
            )
            self._link.drop("it owes acknowledgements for too long")
        if self._unclaimed and now_s >= self._unclaimed_until_s:
            self.dropped["unwanted"] += len(self._unclaimed)
            self._acknowledge(self._take_unclaimed())
        if self._paused_at_s is not None and now_s - self._paused_at_s >= PRESSED_S_MAX:
            log.warning(
                "listeners don't take what has arrived: what comes now is left to the broker", intake=repr(self._intake)
            )
            self._shedding, self._paused_at_s = True, None
            self._link.pause(False)
        self._losses.tick(now_s, listens=self.connected and self._listens)

    # Send.

    async def send_batch(self, messages: Sequence[Carried]) -> list[UStatus]:
        return await self._window.send(messages)

    def on_pubacks(self, pubacks: list[tuple[int, int]]) -> None:
        self._window.on_pubacks(pubacks)

    # Receive.

    def _on_pressed(self, pressed: bool) -> None:
        """As Intake says: hold the broker back, go on, or have come again what was not kept."""
        if pressed:
            self._losses.lagged()
        if not self._shedding:
            self._paused_at_s = asyncio.get_running_loop().time() if pressed else None
            self._link.pause(pressed)
        elif not pressed:
            self._shedding = False
            if self._has_shed:
                asyncio.get_running_loop().call_soon(self._link.drop, "it is to send again what was not kept")

    def _shed(self, publishes: list[wire.Publish]) -> None:
        """What has no acknowledgement comes again with the next connection, if there is a session."""
        self._has_shed = True
        self.dropped["overflow"] += sum(not (one.packet_id and self._config.session_expiry_s) for one in publishes)

    def on_publishes(self, publishes: list[wire.Publish]) -> None:
        # the order holds: nothing that is behind what was shed is kept on this connection
        if self._shedding or self._has_shed:
            self._shed(publishes)
            return
        taken: list[Arrived] = []
        weigh = len(publishes) < MANY
        for publish in publishes:
            if not publish.packet_id and self._intake.full:
                self.dropped["overflow"] += 1
                continue
            arrived = self._read(publish, weigh)
            if arrived is not None:
                taken.append(arrived)
        self._intake.arrive(taken, sum([one.size for one in taken]) if weigh else 0)
        if self._intake.waiting + len(self._unclaimed) >= self._lag_messages:
            self._losses.lagged()

    def _read(self, publish: wire.Publish, weigh: bool) -> Arrived | None:
        """What can't be read, and the copies of other subscriptions, are only acknowledged, in their turn."""
        nothing = Arrived(None, self._connection, publish.packet_id)
        if self.refused and (authority := publish.topic.partition(b"/")[0].decode(errors="replace")) in self.refused:
            self.refused[authority] += 1
            return nothing if publish.packet_id else None
        if publish.topic == _DROPPED_TOPIC:
            self._losses.counted(publish.payload, retained=publish.retained, now_s=asyncio.get_running_loop().time())
            return nothing
        try:
            topic, identifiers, encoded = self._codec.decode(publish)
        except UStatusError as error:
            self.dropped["spoofed" if error.code == UCode.PERMISSION_DENIED else "malformed"] += 1
            log.debug("dropped what is no uProtocol message", topic=publish.topic, error=str(error))
            return nothing
        except Exception:
            self.dropped["malformed"] += 1
            log.exception("a message that arrived could not be read, and nobody foresaw why", topic=publish.topic)
            return nothing
        wanted = self._subscriptions.match(topic, identifiers)
        if wanted is False:
            return nothing
        size = 0
        if weigh:
            size = len(publish.payload) + len(encoded)
            if size > self._bytes_max:  # the broker may add to a message, so it was told a little more
                self.dropped["too_large"] += 1
                return nothing
        arrived = Arrived((None, publish.payload, encoded), self._connection, publish.packet_id, size)
        if wanted:
            return arrived
        if publish.packet_id and asyncio.get_running_loop().time() < self._unclaimed_until_s:
            self._unclaimed.append((topic, arrived))  # as many as Receive Maximum, and as large as what waits may be
            self._intake.count(arrived.size)
            return None
        self.dropped["unwanted"] += 1
        return nothing

    def _claim(self, topic_filter: str) -> None:
        """A resumed session may have brought what belongs to a listener before the listener came."""
        claimed = [arrived for topic, arrived in self._unclaimed if topic_matches(topic_filter, topic)]
        self._unclaimed = [one for one in self._unclaimed if not topic_matches(topic_filter, one[0])]
        octets = sum([one.size for one in claimed])
        self._intake.arrive(claimed, octets)
        self._intake.count(-octets)

    def _take_unclaimed(self) -> list[Arrived]:
        taken = [arrived for _, arrived in self._unclaimed]
        self._unclaimed.clear()
        self._intake.count(-sum([one.size for one in taken]))
        return taken

    def _acknowledge(self, taken: Sequence[Arrived]) -> None:
        """On the connection that brought them only: on a later one the broker sends them again."""
        packet_ids = [one.packet_id for one in taken if one.packet_id and one.connection == self._connection]
        if packet_ids and self._link.up:
            self._link.write(wire.pubacks(packet_ids))

    # Listen.

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        """While the broker is away it is noted, and subscribed to when it is back. Raises PERMISSION_DENIED if the
        broker refuses it."""
        topic_filter = self._topic_filter(source_filter, sink_filter)
        if self.listeners.add(source_filter, sink_filter, listener) is not None:
            self._use(topic_filter)
        subscription = self._subscriptions.get(topic_filter)
        assert subscription is not None, "every filter in the table has a subscription"
        if subscription.granted is None:
            return
        try:
            await asyncio.shield(subscription.granted)
        except UStatusError:
            with contextlib.suppress(UStatusError):  # it may have been unregistered meanwhile
                if self.listeners.remove(source_filter, sink_filter, listener) is not None:
                    await self._release(topic_filter)
            raise

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        topic_filter = self._topic_filter(source_filter, sink_filter)
        if self.listeners.remove(source_filter, sink_filter, listener) is not None:
            await self._release(topic_filter)

    def _topic_filter(self, source_filter: UUri, sink_filter: UUri | None) -> str:
        filter = Filter.of(source_filter, sink_filter, self.authority)
        topic_filter = self._mapping.topic_filter(filter.source, filter.sink)
        if not self._open:
            raise UStatusError.from_status(NOT_OPEN)
        return topic_filter

    def _use(self, topic_filter: str) -> None:
        subscription = self._subscriptions.get(topic_filter)
        if subscription is not None and subscription.users:
            subscription.users += 1
            return
        if subscription is not None:  # it is being left
            self._subscriptions.remove(subscription)
        subscription = self._subscriptions.add(topic_filter)
        self._left.discard(topic_filter)
        self._claim(topic_filter)
        if self.connected:
            subscription.granted = asyncio.ensure_future(self._subscribe_first(subscription))

    async def _release(self, topic_filter: str) -> None:
        """Leave what nobody needs any more. A broker that hangs is waited for only once: deliveries to the listener
        have ended anyway."""
        subscription = self._subscriptions.get(topic_filter)
        assert subscription is not None, "every filter in the table has a subscription"
        subscription.users -= 1
        if subscription.users:
            return
        self._refused.pop(topic_filter, None)
        self._left.add(topic_filter)
        leaving = asyncio.ensure_future(self._leave(subscription))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        if not self._hangs:
            self._hangs = not (await asyncio.wait({leaving}, timeout=LEAVE_MS_MAX / 1000))[0]

    async def _leave(self, subscription: Subscription) -> None:
        try:
            if self.connected:
                await self._link.unsubscribe(subscription.topic_filter)
                self._left.discard(subscription.topic_filter)
        except UStatusError as error:  # lost meanwhile: it is left as soon as the connection is back
            log.debug("not unsubscribed yet", topic_filter=subscription.topic_filter, error=str(error))
        finally:
            self._hangs = False
            self._subscriptions.remove(subscription)

    async def _subscribe(self, subscription: Subscription) -> None:
        await self._link.subscribe(subscription.topic_filter, subscription.identifier if self._identifiers else None)
        self._subscriptions.mark_known(subscription)

    async def _subscribe_first(self, subscription: Subscription) -> None:
        try:
            await self._subscribe(subscription)
        except UStatusError as error:
            if error.code != UCode.UNAVAILABLE:  # lost meanwhile: it is subscribed to when the connection is back
                raise
