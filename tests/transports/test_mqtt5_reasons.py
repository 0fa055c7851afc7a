"""Reason codes and properties that a broker sends: all 256 codes in every packet that has one, and none of them raises,
loses a message's status or costs the connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transports.mqtt5_answering import answering, packet
from tools.broker import Broker
from transports.base import NOT_TRIED
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, packets, reasons, wire
from transports.mqtt5.window import REFUSED_STREAMS_MAX
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

MakeBroker = Callable[..., Broker]
DEADLINE_S = 20
TOPIC, OTHER = uris.parse("up://sender/10AB/3/80CD"), uris.parse("up://sender/10AB/3/80CE")
OF_ONE_MESSAGE = (0x81, 0x82, 0x87, 0x8A, 0x90, 0x94, 0x95, 0x99, 0x9A, 0x9B)  # a "no" for good


def message(number: int, size: int = 0, topic: UUri = TOPIC) -> UMessage:
    return UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"%d" % number + bytes(size), 6))


def end(port: int, authority: str = "sender", **settings: Any) -> Mqtt5Transport:
    return Mqtt5Transport(Mqtt5Config(port=port, **settings), LocalUriProvider(authority, 0x10AB, 3))


class Heard:
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._more = asyncio.Event()

    def on_receive(self, message: UMessage) -> None:
        self.numbers.append(int(message.payload.rstrip(b"\0")))
        self._more.set()

    async def until(self, last: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while last not in self.numbers:
                self._more.clear()
                await self._more.wait()


async def test_each_puback_answers_its_message_and_the_next_one_leaves() -> None:
    async with answering() as broker, end(broker.port) as one:
        for reason in reasons.CODES:
            broker.reason = reason
            (status,) = await asyncio.wait_for(one.send_batch([message(reason)]), DEADLINE_S)
            assert status.code == reasons.code_of(reason), hex(reason)
            if reason >= reasons.FAILURE_MIN:
                assert status.message == f"the broker refuses the message: {reasons.name_of(reason)}"
            assert one.connected
        assert "in_flight=0" in repr(one)
        assert broker.connections == 1


async def test_a_no_to_one_message_is_its_own_and_the_rest_of_the_batch_leaves() -> None:
    async with answering() as broker, end(broker.port) as one:
        for reason in OF_ONE_MESSAGE:
            broker.reason = reason
            statuses = await asyncio.wait_for(one.send_batch([message(n) for n in range(3)]), DEADLINE_S)
            assert {status.code for status in statuses} == {reasons.code_of(reason)}
            assert statuses[0].code not in (UCode.OK, UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED)


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize(
    ("reason", "goes_on"), [(0x80, True), (0x83, True), (0xC3, True), (0x89, False), (0x97, False)]
)
async def test_a_message_that_is_refused_for_now_stops_its_topic_and_where_it_may_be_its_own_fault_no_other(
    reason: int, goes_on: bool, encoded: bool
) -> None:
    async with answering() as broker, end(broker.port, in_flight_max=1) as one:
        broker.topics[b"80CE"] = reason
        batch: list[Any] = [message(n, topic=topic) for n in range(3) for topic in (OTHER, TOPIC)]
        if encoded:
            batch = [EncodedMessage.of(one) for one in batch]
        statuses = await asyncio.wait_for(one.send_batch(batch), DEADLINE_S)
        assert statuses[0].message.startswith("the broker refuses the message")
        others = [UCode.OK if goes_on else UCode.UNAVAILABLE] * 3
        assert [status.code for status in statuses[0::2]] == [UCode.UNAVAILABLE] * 3
        assert [status.code for status in statuses[1::2]] == others
        assert {status.message for status in statuses[2::2]} == {NOT_TRIED}
        assert broker.heard.total() == (4 if goes_on else 1)


async def test_a_broker_that_refuses_many_topics_for_now_is_not_asked_for_all_of_them() -> None:
    async with answering() as broker, end(broker.port, in_flight_max=1) as one:
        broker.reason = 0x80
        topics = [uris.parse(f"up://sender/10AB/3/{0x8001 + number:X}") for number in range(100)]
        statuses = await asyncio.wait_for(one.send_batch([message(1, topic=topic) for topic in topics]), DEADLINE_S)
        assert {status.code for status in statuses} == {UCode.UNAVAILABLE}
        assert broker.heard.total() == REFUSED_STREAMS_MAX + 1


async def test_each_suback_and_unsuback_is_an_answer() -> None:
    async with answering() as broker, end(broker.port) as one:
        for reason in reasons.CODES:
            broker.reason = reason
            for ask in (lambda: one._link.subscribe("a/b"), lambda: one._link.unsubscribe("a/b")):
                if reason < reasons.FAILURE_MIN:
                    await ask()
                    continue
                with pytest.raises(reasons.RefusedError) as no:
                    await ask()
                assert no.value.code == reasons.code_of(reason)
                assert reasons.name_of(reason) in no.value.message
        assert broker.connections == 1


@pytest.mark.parametrize("properties", [b"", b"\x00", b"\x08\x1f\x00\x05sorry", b"\x03\x7f\x01\x02"])
def test_each_connack_and_disconnect_is_read(properties: bytes) -> None:
    """Also with a property that no specification knows, and without any."""
    for reason in reasons.CODES:
        if properties:
            welcome = packets.read_connack(bytes((0, reason)) + properties)
            assert welcome.reason == (reason if reason != 1 else reasons.UNSUPPORTED_VERSION)
        said = packets.read_disconnect(bytes((reason,)) + properties)
        assert said.reason == reason
        assert ("sorry" in reasons.ended(*said)) is (b"sorry" in properties and reason not in (0, 4))


def test_each_code_has_a_name_and_a_ucode() -> None:
    for reason in reasons.CODES:
        assert reasons.name_of(reason)
        assert (reasons.code_of(reason) == UCode.OK) is (reason < reasons.FAILURE_MIN)
    assert reasons.name_of(0xC3) == "reason code 0xc3"


# Properties.


def test_the_table_of_properties_is_that_of_the_specification() -> None:
    """Section 2.2.2.2, as far as it is about CONNACK, SUBACK, UNSUBACK and DISCONNECT. paho-mqtt has it for us."""
    numbers = {17: 4, 19: 2, 33: 2, 34: 2, 36: 1, 37: 1, 39: 4, 40: 1, 41: 1, 42: 1}  # id -> bytes
    assert {id: kind for id, (_, kind) in packets._PROPERTIES.items() if kind > 0} == numbers
    assert {id for id, (_, kind) in packets._PROPERTIES.items() if kind < 0} == {18, 21, 22, 26, 28, 31, 38}
    assert packets._PROPERTIES[36][0] == "MaximumQoS"
    assert packets._PROPERTIES[40][0] == "WildcardSubscriptionAvailable"


def test_what_stands_in_front_of_a_property_that_is_not_known_counts() -> None:
    known = b"\x21\x00\x09\x26\x00\x01k\x00\x01v\x27\x00\x00\x10\x00\x29\x00"
    body = known + b"\x7b\x01\x02"
    welcome = packets.read_connack(b"\x01\x00" + wire.varint(len(body)) + body)
    assert welcome.session_present
    assert welcome.properties == {
        "ReceiveMaximum": 9,
        "MaximumPacketSize": 4_096,
        "SubscriptionIdentifierAvailable": 0,
    }


@pytest.mark.parametrize("property", [b"\x21\x00\x00", b"\x27\x00\x00\x00\x00"])
def test_a_maximum_of_0_is_not_meant(property: bytes) -> None:
    """Receive Maximum and Maximum Packet Size: nothing could ever be sent."""
    assert packets.read_connack(b"\x00\x00" + wire.varint(len(property)) + property).properties == {}


def test_the_answer_behind_properties_that_can_not_be_read_is_found() -> None:
    for kind in (packets.SUBACK, packets.UNSUBACK):
        assert packets.read_answer(kind, b"\x00\x07\x04\x7b\x01\x02\x03\x97") == (7, (0x97, {}))
        # a length beyond the end
        assert packets.read_answer(kind, b"\x00\x07\x03\x1f\xff\xff\x97") == (7, (0x97, {}))
        # no UTF-8
        why = {"ReasonString": "\ufffd"}
        assert packets.read_answer(kind, b"\x00\x07\x04\x1f\x00\x01\xff\x97") == (7, (0x97, why))


@given(st.binary(max_size=40))
def test_readers_raise_nothing_but_a_value_error(body: bytes) -> None:
    for read in (
        packets.read_connack,
        packets.read_disconnect,
        lambda body: packets.read_answer(packets.SUBACK, body),
        lambda body: packets.read_answer(packets.UNSUBACK, body),
        packets.why_refused,
    ):
        with contextlib.suppress(ValueError):
            read(body)


# A broker that does it.


@pytest.mark.broker
async def test_a_message_beyond_the_brokers_limit_stops_no_other(make_broker: MakeBroker) -> None:
    """mosquitto's message_size_limit: PUBACK 0x95, which is not specified for PUBACK. 2.0.11 hangs up, too."""
    broker, heard = make_broker(settings=["message_size_limit 20000"]), Heard()
    async with end(broker.port, "receiver") as receiver, end(broker.port, client_id="one") as sender:
        await receiver.register_listener(TOPIC, heard)
        for first in (1, 4):
            batch = [message(first), message(first + 1, 60_000), message(first + 2)]
            refused = await send_all(sender, batch)
            assert [code for code, _ in refused] == [UCode.INVALID_ARGUMENT]
            assert "Packet too large" in refused[0][1]
            await heard.until(first + 2)
            sender._link.drop("a network that fails")
        assert list(dict.fromkeys(heard.numbers)) == [1, 3, 4, 6]


async def send_all(sender: Mqtt5Transport, messages: list[UMessage]) -> list[tuple[int, str]]:
    """As the streamer does: what may be tried again is, once there is a connection. Answers the refusals."""
    back = asyncio.Event()
    sender.on_connection(lambda connected: back.set() if connected else back.clear())
    if sender.connected:
        back.set()
    refused: list[tuple[int, str]] = []
    async with asyncio.timeout(DEADLINE_S):
        while messages:
            await back.wait()
            statuses = await sender.send_batch(messages)
            refused += [(one.code, one.message) for one in statuses if one.code not in (UCode.OK, UCode.UNAVAILABLE)]
            messages = [one for one, status in zip(messages, statuses, strict=True) if status.code == UCode.UNAVAILABLE]
            await asyncio.sleep(0)
    return refused


async def test_a_login_that_is_refused_with_any_code_says_so() -> None:
    for reason in (0x81, 0x95, 0xC3, 0xFF):

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reason: int = reason) -> None:
            await reader.read(10)
            writer.write(packet(0x20, bytes((0, reason, 0))))
            with contextlib.suppress(OSError):
                await reader.read(-1)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            with pytest.raises(UStatusError, match="refuses the login") as no:
                await end(server.sockets[0].getsockname()[1]).open()
            assert no.value.code == reasons.code_of(reason)
