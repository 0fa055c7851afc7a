"""The time to live of a waiting message: before it is sent, at a broker that counts its interval down, or both.

The first half uses brokers that are functions; the second half a real mosquitto and real time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tools.broker import Broker
from transports.base import SendChecks
from transports.listeners import ListenerTable
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, wire
from transports.mqtt5.mapping import FRESH_TTL, LATE_TTL, Mapping, Mode, Packet, TtlReading
from transports.mqtt5.wire import PublishCodec
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import EncodedListener, LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

spec = pytest.mark.spec
TOPIC = uris.parse("up://sender/10AB/3/80CD")
RECEIVER = uris.parse("up://receiver/1/1/0")
METHOD = uris.parse("up://receiver/1/1/7")
CALLER = uris.parse("up://sender/10AB/3/0")
PUBLISHED_MS: Final = 0x0192_A7B0_0000  # the true time at which messages are made
OURS: Final = (LATE_TTL, FRESH_TTL)


def notification(ttl_ms: int) -> UMessage:
    return _made(UMessageBuilder.notification(TOPIC, RECEIVER).with_ttl(ttl_ms))


def request(ttl_ms: int) -> UMessage:
    return _made(UMessageBuilder.request(CALLER, METHOD, ttl_ms))


def _made(builder: UMessageBuilder) -> UMessage:
    made = builder.build_from_upayload(UPayload(b"x", 6))
    made.attributes.id.msb = PUBLISHED_MS << 16 | 0x7000
    return made


# Brokers that are a function: how many whole seconds they count off, and what they make of an interval of 0.

Counting = Callable[[int, int], int]  # (came at, leaves at), true times in ms -> whole seconds

COUNTING: dict[str, Counting] = {
    "whole seconds of its clock": lambda came_ms, leaves_ms: leaves_ms // 1000 - came_ms // 1000,  # mosquitto
    "whole seconds that passed": lambda came_ms, leaves_ms: (leaves_ms - came_ms) // 1000,
    "seconds that have begun": lambda came_ms, leaves_ms: -(-(leaves_ms - came_ms) // 1000),
}
AT_ZERO: dict[str, int | None] = {"left out": None, "as it is": 0, "at least 1": 1}  # mosquitto, others, mochi


def kept(packet: Packet, came_ms: int, leaves_ms: int, counting: str, at_zero: str) -> Packet | None:
    """What a broker delivers of `packet`; None: it has deleted it."""
    if packet.expiry_s is None:
        return packet
    left_s = packet.expiry_s - COUNTING[counting](came_ms, leaves_ms)
    return packet._replace(expiry_s=left_s or AT_ZERO[at_zero]) if left_s >= 0 else None


@dataclass
class End:
    """A client of a broker, whose clock is `ahead_ms` ahead of the true time. What arrives goes through the codec and
    the listener table, as in the transport."""

    ahead_ms: int = 0
    reading: TtlReading = TtlReading.RESTORED
    now_ms: int = PUBLISHED_MS  # the true time

    def __post_init__(self) -> None:
        self.codec = PublishCodec(
            Mapping(Mode.IN_VEHICLE, "gateway", ttl_reading=self.reading), SendChecks(now_ms=lambda: self.clock_ms)
        )
        self.heard = _Heard()
        self.listeners = ListenerTable("gateway", now_ms=lambda: self.clock_ms)
        self.listeners.add(uris.ANY, uris.ANY, self.heard)

    @property
    def clock_ms(self) -> int:
        return self.now_ms + self.ahead_ms

    def send(self, message: UMessage | EncodedMessage) -> Packet:
        """Raises DEADLINE_EXCEEDED if it has expired."""
        head, tail = self.codec.encode(message)
        [(first, body)], _ = wire.split(head + b"\0\7" + tail)
        return wire.read_packet(wire.read_publish(first, body))

    def receive(self, packet: Packet) -> EncodedMessage | None:
        """What the listener gets; None: nothing, since it is dropped."""
        head, tail = wire.publish_frame(packet)
        [(first, body)], _ = wire.split(head + b"\0\7" + tail)
        publish = wire.read_publish(first, body)
        before = len(self.heard.messages)
        self.listeners.deliver_encoded([(None, publish.payload, self.codec.decode(publish)[1])])
        return self.heard.messages[-1] if len(self.heard.messages) > before else None


@dataclass
class _Heard(EncodedListener):
    messages: list[EncodedMessage] = field(default_factory=list)

    def on_receive_encoded(self, messages: Sequence[EncodedMessage]) -> None:
        self.messages += messages


def hop(
    message: UMessage | EncodedMessage,
    sender: End,
    receiver: End,
    *,
    leaves_ms: int,
    waits_ms: int,
    counting: str = "whole seconds of its clock",
    at_zero: str = "left out",
    is_foreign: bool = False,
) -> EncodedMessage | None:
    """`message` leaves `leaves_ms` after it was made, and waits so long at the broker. None: the broker has deleted it,
    or the receiver dropped it."""
    sender.now_ms = PUBLISHED_MS + leaves_ms
    receiver.now_ms = sender.now_ms + waits_ms
    packet = sender.send(message)
    if is_foreign:
        packet = packet._replace(user_properties=[pair for pair in packet.user_properties if pair[0] not in OURS])
    left = kept(packet, sender.now_ms, receiver.now_ms, counting, at_zero)
    return receiver.receive(left) if left is not None else None


def ttl(message: EncodedMessage | None) -> int | None:
    return message.stamp.ttl if message is not None else None


every_broker = pytest.mark.parametrize(("counting", "at_zero"), [(one, two) for one in COUNTING for two in AT_ZERO])


@every_broker
@pytest.mark.parametrize("is_foreign", [False, True], ids=["ours", "foreign"])
def test_a_message_that_waits_at_the_broker_for_more_than_half_its_ttl_arrives(
    counting: str, at_zero: str, is_foreign: bool
) -> None:
    found = hop(
        notification(8_000), End(), End(), leaves_ms=20, waits_ms=5_000, counting=counting, at_zero=at_zero,
        is_foreign=is_foreign,
    )  # fmt: skip
    assert ttl(found) == 8_000


@pytest.mark.parametrize("senders", TtlReading)
def test_by_the_specifications_reading_it_has_expired(senders: TtlReading) -> None:
    receiver = End(reading=TtlReading.SPECIFICATION)
    assert hop(notification(8_000), End(reading=senders), receiver, leaves_ms=20, waits_ms=5_000) is None
    assert receiver.listeners.dropped == {"expired": 1}


@every_broker
@pytest.mark.parametrize("make", [notification, request])
@pytest.mark.parametrize("reading", TtlReading)
def test_an_interval_that_was_counted_down_to_0_is_no_ttl_of_0(
    counting: str, at_zero: str, make: Callable[[int], UMessage], reading: TtlReading
) -> None:
    """A timeout of 1 s, and a second of the broker's clock that ends on the way."""
    receiver = End(reading=reading)
    to_next_second_ms = 1000 - PUBLISHED_MS % 1000
    found = hop(
        make(1_000), End(), receiver, leaves_ms=to_next_second_ms - 1, waits_ms=30, counting=counting, at_zero=at_zero
    )
    if reading is TtlReading.SPECIFICATION and at_zero == "left out" and counting != "whole seconds that passed":
        assert ttl(found) == (0 if make is notification else None)  # nothing says that there was one
    else:
        assert ttl(found) == 1_000
        assert not receiver.listeners.dropped


@pytest.mark.parametrize("at_zero", AT_ZERO)
def test_a_message_that_arrives_in_its_last_second_expires_soon(at_zero: str) -> None:
    found = hop(notification(8_000), End(), End(), leaves_ms=900, waits_ms=8_050, at_zero=at_zero)
    assert ttl(found) == 9_000  # 950 ms too old; and it expires


def test_a_message_that_waited_before_it_left_expires_when_its_sender_meant() -> None:
    """2 h to live, of which it spent 1 h in a log, and 10 minutes at the broker."""
    hour_ms = 3_600_000
    sender, receiver = End(), End()
    found = hop(notification(2 * hour_ms), sender, receiver, leaves_ms=hour_ms, waits_ms=600_000)
    assert ttl(found) == 2 * hour_ms
    foreign = hop(notification(2 * hour_ms), sender, receiver, leaves_ms=hour_ms, waits_ms=600_000, is_foreign=True)
    assert ttl(foreign) == 3 * hour_ms  # the interval says no more


@pytest.mark.parametrize("reading", TtlReading)
@pytest.mark.parametrize("ttl_ms", [1, 999, 1_001, 7_999])
def test_a_ttl_that_is_no_whole_second_is_exact_in_any_case(ttl_ms: int, reading: TtlReading) -> None:
    """The specification has it in property 6, whatever the interval says."""
    for at_zero in AT_ZERO:
        receiver = End(reading=reading)
        half_ms = ttl_ms // 2
        found = hop(
            notification(ttl_ms), End(), receiver, leaves_ms=half_ms, waits_ms=ttl_ms - half_ms, at_zero=at_zero
        )
        assert ttl(found) == ttl_ms


@pytest.mark.parametrize(
    ("ahead_ms", "ttl_ms"),
    [
        (10_000, 18_000),  # by this clock the message is 10 s older than it is, and may live on as long as it should
        (-10_000, 8_000),  # it is yet to be made
    ],
)
@pytest.mark.parametrize("waits_ms", [0, 5_000])
def test_a_receiver_whose_clock_is_10_s_off_gets_the_message(ahead_ms: int, ttl_ms: int, waits_ms: int) -> None:
    for is_foreign in (False, True):
        receiver = End(ahead_ms)
        found = hop(notification(8_000), End(), receiver, leaves_ms=0, waits_ms=waits_ms, is_foreign=is_foreign)
        expected = 8_000 - waits_ms if is_foreign and ahead_ms < 0 else ttl_ms
        assert ttl(found) == expected
        assert not receiver.listeners.dropped


@pytest.mark.parametrize("ahead_ms", [-10_000, 0, 10_000])
def test_two_hops_over_mqtt_and_a_log_between_them(ahead_ms: int) -> None:
    """A gateway, whose clock may be off, keeps it for 20 s. Each broker keeps it for 15 s."""
    gateway, receiver = End(ahead_ms), End()
    first = hop(notification(60_000), End(), gateway, leaves_ms=0, waits_ms=15_000)
    assert first is not None
    second = hop(first, gateway, receiver, leaves_ms=35_000, waits_ms=15_000)
    assert ttl(second) == 60_000 + max(ahead_ms, 0)  # never longer than by what its clock is off
    assert not gateway.listeners.dropped + receiver.listeners.dropped
    late = hop(first, gateway, receiver, leaves_ms=35_000, waits_ms=25_500)
    assert ttl(late) == (None if ahead_ms <= 0 else 70_000)


def test_what_has_expired_in_the_log_does_not_leave() -> None:
    first = hop(notification(8_000), End(), End(), leaves_ms=0, waits_ms=5_000)
    assert first is not None
    with pytest.raises(UStatusError) as refused:
        hop(first, End(), End(), leaves_ms=8_001, waits_ms=0)
    assert refused.value.code == UCode.DEADLINE_EXCEEDED


seconds = st.integers(1, 60)
waits = st.integers(0, 61_000)
brokers = st.tuples(st.sampled_from([*COUNTING]), st.sampled_from([*AT_ZERO]))


def _alive_for(found: EncodedMessage) -> int:
    assert found.stamp.ttl, "a ttl became none"
    return found.stamp.ttl


@spec("dsn~up-attributes-ttl-timeout~1")
@given(seconds, waits, waits, brokers)
@example(8, 20, 5_000, ("whole seconds of its clock", "left out"))
@example(1, 999, 1_001, ("whole seconds that passed", "as it is"))
def test_what_we_send_never_lives_shorter_nor_2_s_longer(
    ttl_s: int, leaves_ms: int, waits_ms: int, broker: tuple[str, str]
) -> None:
    """Longer only where it left within a second; whatever left later lives exactly as long as its sender meant."""
    ttl_ms, age_ms = ttl_s * 1000, leaves_ms + waits_ms
    if leaves_ms > ttl_ms:
        return  # it does not leave
    receiver = End()
    found = hop(
        notification(ttl_ms), End(), receiver, leaves_ms=leaves_ms, waits_ms=waits_ms, counting=broker[0],
        at_zero=broker[1],
    )  # fmt: skip
    if found is None:
        assert age_ms > ttl_ms - 1000, "one that has a second left is neither deleted nor dropped"
        assert age_ms > ttl_ms or not receiver.listeners.dropped
    else:
        excess_ms = _alive_for(found) - ttl_ms
        assert excess_ms == 0 if leaves_ms > 1_000 else excess_ms in (0, 1_000, 2_000)


@given(seconds, waits, waits, brokers)
def test_what_others_send_is_never_dropped_for_what_the_broker_counted_off(
    ttl_s: int, leaves_ms: int, waits_ms: int, broker: tuple[str, str]
) -> None:
    """Without our properties: too long by what passed before it left and 2 s at most, too short by 1 s at most."""
    ttl_ms = ttl_s * 1000
    if leaves_ms > ttl_ms:
        return
    receiver = End()
    found = hop(
        notification(ttl_ms), End(), receiver, leaves_ms=leaves_ms, waits_ms=waits_ms, counting=broker[0],
        at_zero=broker[1], is_foreign=True,
    )  # fmt: skip
    assert not receiver.listeners.dropped
    if found is not None and found.stamp.ttl:  # none: mosquitto left the interval out, and nothing else says it
        assert ttl_ms - 1000 <= found.stamp.ttl <= ttl_ms + leaves_ms + 2_000
    elif found is not None:
        assert broker[1] == "left out"
        assert leaves_ms + waits_ms > ttl_ms - 1000


# A real mosquitto.

DEADLINE_S = 20
TRIES_MAX = 5
SESSION: Final[dict[str, Any]] = {"client_id": "receiver", "session_expiry_s": 300}


def end(broker: Broker, authority: str, **settings: Any) -> Mqtt5Transport:
    return Mqtt5Transport(Mqtt5Config(port=broker.port, **settings), LocalUriProvider(authority, 1, 1))


class Arrived:
    """Collects what arrives until the last message, which has no ttl."""

    def __init__(self) -> None:
        self.messages: list[UMessage] = []
        self.last = asyncio.Event()

    def on_receive(self, message: UMessage) -> None:
        if message.payload == b"last":
            self.last.set()
        else:
            self.messages.append(message)


async def kept_by_mosquitto(
    broker: Broker, messages: Callable[[], list[UMessage]], until: Callable[[float], float]
) -> tuple[list[UMessage], dict[str, int]]:
    """What arrives, and what is dropped, of messages that wait for a client that is away: from the Unix time at which
    they left until what `until` says of that. Tried again where a busy machine is so late that the broker has deleted
    them."""
    for _ in range(TRIES_MAX):
        arrived = Arrived()
        last = UMessageBuilder.notification(TOPIC, RECEIVER).build_from_upayload(UPayload(b"last", 6))
        async with end(broker, "receiver", **SESSION) as receiver:
            await receiver.register_listener(uris.ANY, arrived, uris.pattern("receiver"))
        async with end(broker, "sender") as sender:
            left_s = time.time()
            for status in await sender.send_batch([*messages(), last]):
                assert not status.code
        await asyncio.sleep(until(left_s) - time.time())
        receiver = end(broker, "receiver", **SESSION)
        async with receiver:
            await receiver.register_listener(uris.ANY, arrived, uris.pattern("receiver"))
            await asyncio.wait_for(arrived.last.wait(), DEADLINE_S)
        if arrived.messages or receiver.dropped:
            break
    return arrived.messages, dict(receiver.dropped)


def fresh(ttl_ms: int) -> UMessage:
    return UMessageBuilder.notification(TOPIC, RECEIVER).with_ttl(ttl_ms).build_from_upayload(UPayload(b"x", 6))


@pytest.mark.broker
@pytest.mark.parametrize(("ttl_ms", "waits_s"), [(4_000, 2.1), pytest.param(8_000, 5.0, marks=pytest.mark.full)])
async def test_100_of_100_notifications_arrive_that_waited_for_more_than_half_their_ttl(
    own_broker: Broker, ttl_ms: int, waits_s: float
) -> None:
    messages, dropped = await kept_by_mosquitto(
        own_broker, lambda: [fresh(ttl_ms) for _ in range(100)], lambda left_s: left_s + waits_s
    )
    assert (len(messages), dropped) == (100, {})
    assert {message.attributes.ttl for message in messages} <= {ttl_ms, ttl_ms + 1_000}


@pytest.mark.broker
async def test_an_interval_that_mosquitto_has_counted_down_to_0_is_no_ttl_of_0(own_broker: Broker) -> None:
    """It leaves the interval out. 20 calls with a timeout of 1 s, 20 notifications, over the end of a second."""

    def messages() -> list[UMessage]:
        calls = [UMessageBuilder.request(CALLER, METHOD, 1_000).build() for _ in range(20)]
        return [*calls, *(fresh(1_000) for _ in range(20))]

    found, dropped = await kept_by_mosquitto(own_broker, messages, lambda left_s: int(left_s) + 1.05)
    assert (len(found), dropped) == (40, {})
    assert {message.attributes.ttl for message in found} <= {1_000, 2_000}
