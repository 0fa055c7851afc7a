"""PUBLISH packets that arrive: read, matched with our subscriptions, delivered, and acknowledged last.

on_publishes -> PublishCodec -> Copies -> Arrivals -> listeners -> PUBACK
                                  '-> of a resumed session, no listener yet: kept until one is registered

INBOX_MESSAGES_MAX or INBOX_BYTES_MAX have arrived and are not taken
              -> pressed: the socket is not read, which holds the broker      -> half of it taken: read again
   and no batch was taken for PRESSED_S_MAX
              -> shedding: it is read, since what a listener waits for        -> half of it taken: a new connection,
                 may be behind; messages are neither kept nor acknowledged       on which they come again

A message that is too large: CONNECT names a Maximum Packet Size, and the broker throws larger packets away. One that it
sends all the same ends the connection.

Answers is a second connection, for the answers to calls that a listener makes while it takes a message:

a listener calls, and waits -> listen(topic of the answer) -> the request leaves on the main connection
broker -> the answer, on both connections -> listeners take the first copy        the other has no effect (Copies)

We acknowledge a message after its listener has taken it. Some brokers (HiveMQ) send nothing more on a connection until
everything that they sent there is acknowledged. Then the listener, the broker and we would wait for each other until
the call's time is over. Nothing else needs this connection, so it is made for the first such call.

Its session ends with it, so messages are acknowledged at once. Without this connection, calls go on all the same.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import structlog

from transports.arrivals import Arrivals
from transports.base import UNCLAIMED_MS_MAX, TransportBase
from transports.mqtt5 import wire
from transports.mqtt5.config import Mqtt5Config
from transports.mqtt5.connection import Connection
from transports.mqtt5.link import Link
from transports.mqtt5.losses import DROPPED_TOPIC, Losses
from transports.mqtt5.mapping import REQUEST_TYPE, RESPONSE_TYPE
from transports.mqtt5.packets import Welcome
from transports.mqtt5.session import Session, topic_matches
from transports.mqtt5.wire import PublishCodec
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

# of one read, so many messages are small: their number bounds their bytes, and counting would cost each of them
MANY: Final = 64
# of QoS 0, which Receive Maximum does not hold back: beyond it they are dropped
UNACKNOWLEDGED_MESSAGES_MAX: Final = 8_192
# waiting or being taken: 2,048 messages of 16 KiB. Receive Maximum can't count bytes
INBOX_BYTES_MAX: Final = 32 << 20
# waiting or being taken; some 1.5 KB each if small. A broker may exceed Receive Maximum: mosquitto with
# `max_inflight_messages 0` does
INBOX_MESSAGES_MAX: Final = 8_192
# how long the socket is not read while listeners take nothing; far less than a keep-alive, or than a PUBACK may take
PRESSED_S_MAX: Final = 5.0
ANSWER_TOPICS_MAX: Final = 256  # of answers, one for each method that listeners call; others use the main connection
ANSWERS_RETRY_S: Final = 60.0  # after a failed attempt, calls don't wait for another one for so long
_DROPPED_TOPIC: Final = DROPPED_TOPIC.encode()

log = structlog.get_logger()


class ArrivedPublish(NamedTuple):
    # (None: for all filters, payload, serialised UAttributes), as ListenerTable.deliver_encoded takes it; None: nothing
    # to deliver, only to acknowledge in its turn
    message: tuple[None, bytes, bytes] | None
    connection: Connection | None  # that brought it: on another one the PUBACK would be for another message
    packet_id: int  # 0: QoS 0
    size: int = 0  # bytes of its message; 0 if it is one of many that are small


class PublishReceiver:
    """The receiving side of an Mqtt5Transport (`owner`). Lives on the event loop."""

    def __init__(
        self,
        owner: TransportBase,
        config: Mqtt5Config,
        link: Link,
        session: Session,
        codec: PublishCodec,
        losses: Losses,
    ) -> None:
        self._owner, self._link, self._session, self._codec, self._losses = owner, link, session, codec, losses
        self._dropped = owner.dropped
        self.arrivals = Arrivals[ArrivedPublish](
            lambda arrived: owner.listeners.deliver_encoded([one.message for one in arrived if one.message]),
            self._acknowledge,
            messages_max=INBOX_MESSAGES_MAX,
            bytes_max=INBOX_BYTES_MAX,
            redeliver=True,
            gathers=False,
            pressed=self._on_pressed,
        )
        self.answers = Answers(config, owner.local, self._take_answers)
        self._paused_at_s: float | None = None  # since then the socket is not read
        self._taken_at_s = 0.0  # loop time at which a listener has last taken a batch
        self._shedding = self._has_shed = False  # messages are not kept, and some were not
        # unacknowledged: with those that are on the way the broker may have to queue
        self._lag_messages = -(-config.receive_maximum // 2)
        self.unclaimed: list[tuple[str, ArrivedPublish]] = []  # of a resumed session, with their topic
        self._keeps_unclaimed, self._unclaimed_until_s = False, 0.0
        self.has_all_listeners = False  # as their owner says

    # Events of the connection, reported by the transport.

    def resumed_foreign_session(self, now_s: float) -> None:
        if not self.has_all_listeners:
            self._keeps_unclaimed, self._unclaimed_until_s = True, now_s + UNCLAIMED_MS_MAX / 1000

    def down(self) -> None:
        self._take_unclaimed()  # the broker sends them again
        self._paused_at_s, self._has_shed = None, False
        self._shedding = self.arrivals.is_pressed  # the next connection must be read, or it would never be up

    def tick(self, now_s: float) -> None:
        if self._keeps_unclaimed and now_s >= self._unclaimed_until_s:
            self.end_claims()
        if self._paused_at_s is not None and now_s - max(self._paused_at_s, self._taken_at_s) >= PRESSED_S_MAX:
            log.warning(
                "listeners don't take what has arrived: messages that come now are left to the broker",
                arrivals=repr(self.arrivals),
            )
            self._shedding, self._paused_at_s = True, None
            self._link.pause(False)

    def _on_pressed(self, pressed: bool) -> None:
        """Stop reading, go on, or get again what was not kept."""
        if pressed:
            self._losses.behind = True
        if not self._shedding:
            self._paused_at_s = asyncio.get_running_loop().time() if pressed else None
            self._link.pause(pressed)
        elif not pressed:
            self._shedding = False
            if self._has_shed:
                asyncio.get_running_loop().call_soon(self._link.drop, "it is to send again what was not kept")

    # Messages.

    def on_publishes(self, publishes: list[wire.Publish]) -> None:
        # this keeps the order: after the first message that was shed, none is kept on this connection
        if self._shedding or self._has_shed:
            self._has_shed = True  # what is not acknowledged comes again on the next one, if there is a session
            lost = sum(not (one.packet_id and self._link.session_expiry_s) for one in publishes)
            self._dropped["overflow"] += lost
            return
        taken: list[ArrivedPublish] = []
        weigh = len(publishes) < MANY
        for publish in publishes:
            if not publish.packet_id and self.arrivals.undelivered >= UNACKNOWLEDGED_MESSAGES_MAX:
                self._dropped["overflow"] += 1
                continue
            arrived = self._read(publish, weigh)
            if arrived is not None:
                taken.append(arrived)
        not_taken = self.arrivals.put_now(taken, [one.size for one in taken] if weigh else ())
        if not_taken + len(self.unclaimed) >= self._lag_messages:
            self._losses.behind = True

    def _read(self, publish: wire.Publish, weigh: bool) -> ArrivedPublish | None:
        """A message that can't be read, and a copy for another subscription, is only acknowledged, in its turn. None:
        it is kept until a listener claims it."""
        if (refused := self._owner.refused) and self._is_refused(publish, refused):
            return None
        if publish.topic == _DROPPED_TOPIC:
            self._losses.counted(publish.payload, retained=publish.retained, now_s=asyncio.get_running_loop().time())
            return self._nothing(publish)
        try:
            topic, encoded = self._codec.decode(publish)
        except UStatusError as error:
            self._dropped["spoofed" if error.code == UCode.PERMISSION_DENIED else "malformed"] += 1
            log.debug("dropped a message that is not uProtocol", topic=publish.topic, error=str(error))
            return self._nothing(publish)
        except Exception:
            self._dropped["malformed"] += 1
            log.exception("a message that arrived could not be read: unexpected error", topic=publish.topic)
            return self._nothing(publish)
        size = len(publish.payload) + len(encoded) if weigh else 0
        if size > self._link.wire_bytes_max:  # CONNECT allowed a little more, since the broker may add to a message
            self._dropped["too_large"] += 1
            return self._nothing(publish)
        session = self._session
        times = session.copies[topic]
        waits = self._keeps_unclaimed and self._is_unclaimed(publish, times, encoded)
        if not times and not waits:
            self._dropped["unwanted"] += 1
            session.unwanted(topic)
            return self._nothing(publish)
        if (times != 1 or topic in self.answers.topics) and session.copies.is_copy(encoded):
            arrived = self._nothing(publish)
        else:
            arrived = ArrivedPublish((None, publish.payload, encoded), self._link.connection, publish.packet_id, size)
        if not waits:
            return arrived
        self.unclaimed.append((topic, arrived))  # bounded by Receive Maximum, and by the bytes that may wait
        self.arrivals.count(arrived.size)
        return None

    def _is_refused(self, publish: wire.Publish, refused: dict[str, int]) -> bool:
        """Its source's authority is refused. All the same the owner decides on a request, so that its caller gets an
        answer, and on what was acknowledged to its sender (QoS 1)."""
        authority = publish.topic.partition(b"/")[0].decode(errors="replace")
        if publish.packet_id or authority not in refused or REQUEST_TYPE in publish.properties:
            return False
        refused[authority] += 1
        return True

    def _nothing(self, publish: wire.Publish) -> ArrivedPublish:
        """To be acknowledged only."""
        return ArrivedPublish(None, self._link.connection, publish.packet_id)

    def _take_answers(self, publishes: list[wire.Publish]) -> None:
        """From the answers' own connection, which acknowledges them. What is no answer, or comes while Arrivals is
        full, comes on the main connection, too."""
        for publish in publishes:
            if RESPONSE_TYPE in publish.properties and not self.arrivals.is_pressed:
                arrived = self._read(publish._replace(packet_id=0), weigh=True)
                if arrived is not None and arrived.message is not None:
                    self.arrivals.put_now([arrived], [arrived.size])

    def _acknowledge(self, taken: Sequence[ArrivedPublish], _error: BaseException | None = None) -> None:
        """Only on the connection that brought them: on a later one the broker sends them again."""
        self._taken_at_s = asyncio.get_running_loop().time()
        connection = self._link.connection
        packet_ids = [one.packet_id for one in taken if one.packet_id and one.connection is connection]
        if packet_ids and connection is not None:
            connection.write(wire.pubacks(packet_ids))

    # Messages of a resumed session whose listeners are not registered yet.

    def _is_unclaimed(self, publish: wire.Publish, times: int, encoded: bytes) -> bool:
        """A listener that wants it may yet be registered, and none that is."""
        if publish.packet_id == 0 or asyncio.get_running_loop().time() >= self._unclaimed_until_s:
            return False
        return not (times and self._wants(encoded))

    def _wants(self, encoded: bytes) -> bool:
        """A listener wants it. Off-vehicle, several pairs of filters have the same topic filter."""
        return self._owner.listeners.wants(UMessage(attributes=UAttributes.FromString(encoded)))

    def claim(self, topic_filter: str) -> None:
        """Deliver what a resumed session has brought for a listener that has just been registered."""
        claimed: list[ArrivedPublish] = []
        left: list[tuple[str, ArrivedPublish]] = []
        for topic, arrived in self.unclaimed:
            message = arrived.message
            if topic_matches(topic_filter, topic) and (message is None or self._wants(message[2])):
                claimed.append(arrived)
            else:
                left.append((topic, arrived))
        self.unclaimed = left
        sizes = [one.size for one in claimed]
        self.arrivals.put_now(claimed, sizes)
        self.arrivals.count(-sum(sizes))

    def all_registered(self) -> None:
        self.has_all_listeners = True
        self._unclaimed_until_s = min(self._unclaimed_until_s, asyncio.get_running_loop().time())
        self.end_claims()

    def end_claims(self) -> None:
        """If listeners had their time: acknowledge what nobody has claimed, and unsubscribe its filters."""
        if not self._owner.connected or asyncio.get_running_loop().time() < self._unclaimed_until_s:
            return
        self._keeps_unclaimed = False
        if self.unclaimed:
            self._dropped["unwanted"] += sum(arrived.message is not None for _, arrived in self.unclaimed)
            for topic, _ in self.unclaimed:
                self._session.unwanted(topic)
            self._acknowledge(self._take_unclaimed())
        self._session.leave_stale()

    def _take_unclaimed(self) -> list[ArrivedPublish]:
        taken = [arrived for _, arrived in self.unclaimed]
        self.unclaimed.clear()
        self.arrivals.count(-sum([one.size for one in taken]))
        return taken


class Answers:
    """Lives on the event loop. `take` gets all messages and must ignore those that are no answers: off-vehicle other
    messages have the same topics."""

    def __init__(
        self, config: Mqtt5Config, local: LocalUriProvider, take: Callable[[list[wire.Publish]], None]
    ) -> None:
        client_id = f"{config.client_id[:180]}-answers-{secrets.token_hex(4)}" if config.client_id else None
        own = {"client_id": client_id, "session_expiry_s": 0, "clean_start": True}
        self._config, self._local, self._take = config.model_copy(update=own), local, take
        self._link: Link | None = None
        # of answers, which may come on both connections; True: the broker has a subscription to it on this one
        self.topics: dict[str, bool] = {}
        self._turn = asyncio.Lock()
        self._retry_at_s = 0.0
        self._why_not = ""

    @property
    def notes(self) -> list[str]:
        if not self._why_not:
            return []
        what = "calls that listeners make while they take a message have no connection of their own for the answer"
        return [
            f"{what} ({self._why_not}): a broker that waits for acknowledgements, as HiveMQ does, brings it too late"
        ]

    async def listen(self, topics: Iterable[str], wire_bytes_max: int) -> None:
        """Returns when the broker has a subscription to each of `topics`, or none is possible now. Raises nothing."""
        for topic in topics:
            if len(self.topics) < ANSWER_TOPICS_MAX:
                self.topics.setdefault(topic, False)
        loop = asyncio.get_running_loop()
        if loop.time() < self._retry_at_s:
            return
        async with self._turn:
            if all(self.topics.values()):
                return
            try:
                async with asyncio.timeout(self._config.connect_timeout_ms / 1000):
                    if self._link is None:
                        link = Link(self._config, self._local, self)
                        await link.open(wire_bytes_max)  # from now on a lost connection is made again
                        self._link = link
                    await self._subscribe()
            except (UStatusError, TimeoutError) as error:
                self._why_not = str(error) or "the broker does not answer in time"
                self._retry_at_s = loop.time() + ANSWERS_RETRY_S
                log.warning("no second connection for the answers to listeners' calls", error=self._why_not)

    async def _subscribe(self) -> None:
        assert self._link is not None
        for topic in [topic for topic, is_subscribed in self.topics.items() if not is_subscribed]:
            await self._link.subscribe(topic)
            self.topics[topic] = True
        self._why_not = ""

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()
            self._link = None

    # Callbacks of the link.

    def welcomed(self, welcome: Welcome) -> None: ...

    async def up(self, connection: Connection, welcome: Welcome) -> None:
        if self._link is not None:  # connected again
            await self._subscribe()

    def down(self, why: str) -> None:
        for topic in self.topics:
            self.topics[topic] = False

    def tick(self, now_s: float) -> None: ...

    def on_pubacks(self, pubacks: list[tuple[int, int]], whys: Mapping[int, str]) -> None: ...

    def on_publishes(self, publishes: list[wire.Publish]) -> None:
        self._take(publishes)
        if self._link is not None and self._link.connection is not None:
            packet_ids = [one.packet_id for one in publishes if one.packet_id]
            self._link.connection.write(wire.pubacks(packet_ids))
