"""The bytes that a client sends, and the possible answers of a broker: seen from the broker's side, with paho's public
classes for decoding."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

import transports.mqtt5
from tests.transports.mqtt5_answering import packet, serving
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, link, packets, window, wire
from transports.mqtt5.connection import Connection, Dialler
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

DEADLINE_S = 20
TOPIC = uris.parse("up://sender/10AB/3/80CD")
CONNECT, SUBSCRIBE, UNSUBSCRIBE, PINGREQ, DISCONNECT = 0x10, 0x82, 0xA2, 0xC0, 0xE0
CONNACK = b"\x20\x03\x00\x00\x00"


class Silent:
    def on_receive(self, message: UMessage) -> None: ...


def message(number: int) -> UMessage:
    return UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b"%d" % number, 6))


def text(data: bytes) -> tuple[str, bytes]:
    """The string at the beginning, and what follows it."""
    (length,) = struct.unpack_from("!H", data)
    return data[2 : 2 + length].decode(), data[2 + length :]


def properties(packet_type: int, data: bytes) -> tuple[dict[str, Any], bytes]:
    found = Properties(packet_type)
    _, length = found.unpack(data)
    return found.json(), data[length:]


class FakeBroker:
    """Keeps each packet as (first byte, body), and answers what a client waits for, unless the test says otherwise."""

    def __init__(self) -> None:
        self.port = 0
        self.got: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        self.connack = CONNACK
        self.answers = {CONNECT, SUBSCRIBE, UNSUBSCRIBE, PINGREQ}
        self._writer: asyncio.StreamWriter | None = None
        self.ended = asyncio.Event()  # the client has closed its last connection

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer, data = writer, b""
        self.ended.clear()
        with contextlib.suppress(OSError):
            while more := await reader.read(65_536):
                found, used = wire.split(data + more)
                data = (data + more)[used:]
                for first, body in found:
                    self.got.put_nowait((first, body))
                    if first in self.answers:
                        self.say(self._answer(first, body))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self.ended.set()

    def _answer(self, first: int, body: bytes) -> bytes:
        if first == CONNECT:
            return self.connack
        return b"\xd0\x00" if first == PINGREQ else packet(first & 0xF0 | 0x10, body[:2] + b"\x00\x00")

    def say(self, data: bytes) -> None:
        assert self._writer is not None, "somebody has connected"
        self._writer.write(data)

    async def expect(self, wanted: int) -> bytes:
        """The body of the next packet of that kind."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                first, body = await self.got.get()
                if first & 0xF0 == wanted & 0xF0:
                    return body


@asynccontextmanager
async def fake_broker() -> AsyncIterator[FakeBroker]:
    async with serving(FakeBroker()) as broker:
        yield broker
        await asyncio.wait_for(broker.ended.wait(), DEADLINE_S)


def end(broker: FakeBroker, **settings: Any) -> Mqtt5Transport:
    config = Mqtt5Config(port=broker.port, **settings)
    return Mqtt5Transport(config, LocalUriProvider("sender", 0x10AB, 3))


async def why_down(one: Mqtt5Transport) -> str:
    """The result that a sender gets after the connection was lost."""
    async with asyncio.timeout(DEADLINE_S):
        while one.connected:  # noqa: ASYNC110  # a callback could come too late to be registered here
            await asyncio.sleep(0.01)
    (status,) = await one.send_batch([message(1)])
    assert status.code == UCode.UNAVAILABLE
    return status.message


async def test_what_connect_says() -> None:
    settings = {"client_id": "the vehicle", "clean_start": True, "session_expiry_s": 77, "keep_alive_s": 5}
    async with (
        fake_broker() as broker,
        end(broker, **settings, receive_maximum=9, username="üser", password="sëcret") as one,
    ):
        body = await broker.expect(CONNECT)
        assert body[:10] == b"\x00\x04MQTT\x05" + bytes((0x80 | 0x40 | 0x02,)) + b"\x00\x05"
        found, rest = properties(PacketTypes.CONNECT, body[10:])
        assert found == {
            "SessionExpiryInterval": 77,
            "ReceiveMaximum": 9,
            "MaximumPacketSize": one.wire_bytes_max + link.BROKER_ADDS_BYTES,
        }
        (name, rest), words = text(rest), []
        while rest:
            word, rest = text(rest)
            words.append(word)
        assert (name, words) == ("the vehicle", ["üser", "sëcret"])
        broker.say(b"\xe0\x00")
        assert not (await broker.expect(CONNECT))[7] & 0x02, "a session that is ours already is not thrown away"


async def test_without_a_login_there_is_none_and_names_that_are_made_up_differ() -> None:
    names = set()
    for _ in range(2):
        async with fake_broker() as broker, end(broker):
            body = await broker.expect(CONNECT)
            assert body[7] == 0
            name, rest = text(properties(PacketTypes.CONNECT, body[10:])[1])
            assert name.startswith("up-sender-10AB-")
            assert not rest
            names.add(name)
    assert len(names) == 2


@pytest.mark.parametrize(("client_id", "farewell"), [(None, b"\x00\x05\x11\x00\x00\x00\x00"), ("named", b"\x00\x00")])
async def test_a_farewell_ends_the_session_that_nobody_could_resume(client_id: str | None, farewell: bytes) -> None:
    async with fake_broker() as broker:
        async with end(broker, client_id=client_id):
            pass
        assert await broker.expect(DISCONNECT) == farewell
        await asyncio.wait_for(broker.ended.wait(), DEADLINE_S)


async def test_what_subscribe_and_unsubscribe_say() -> None:
    async with fake_broker() as broker, end(broker) as one:
        count = await broker.expect(SUBSCRIBE)  # of what the broker drops
        assert count[2:] == b"\x00\x00\x24$SYS/broker/publish/messages/dropped\x05"
        listener = Silent()
        await one.register_listener(TOPIC, listener)
        body = await broker.expect(SUBSCRIBE)
        found, rest = properties(PacketTypes.SUBSCRIBE, body[2:])
        assert not found  # copies are distinguished by the message
        topic_filter, rest = text(rest)
        assert topic_filter == "sender/10AB/0/3/80CD"
        options = SubscribeOptions()
        options.unpack(rest)
        assert (options.QoS, options.noLocal, options.retainHandling) == (1, True, SubscribeOptions.RETAIN_DO_NOT_SEND)
        await one.unregister_listener(TOPIC, listener)
        unsubscribe = await broker.expect(UNSUBSCRIBE)
        assert unsubscribe[2:] == b"\x00\x00\x14sender/10AB/0/3/80CD"
        assert len({count[:2], body[:2], unsubscribe[:2]}) == 3, "each has a packet id of its own"
        assert b"\x00\x00" not in (count[:2], body[:2], unsubscribe[:2])


async def test_a_subscription_that_is_refused() -> None:
    async with fake_broker() as broker, end(broker) as one:
        await broker.expect(SUBSCRIBE)
        broker.answers.remove(SUBSCRIBE)
        registering = asyncio.create_task(one.register_listener(TOPIC, Silent()))
        body = await broker.expect(SUBSCRIBE)
        broker.say(packet(0x90, b"\xff\xff\x00\x00") + packet(0x90, body[:2] + b"\x00\x87"))
        with pytest.raises(
            UStatusError, match="refuses the subscription to sender/10AB/0/3/80CD: Not authorized"
        ) as no:
            await registering
        assert no.value.code == UCode.PERMISSION_DENIED


async def test_a_broker_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection.ask, "__defaults__", (0.05,))
    async with fake_broker() as broker, end(broker) as one:
        broker.answers.remove(SUBSCRIBE)
        await one.register_listener(TOPIC, Silent())  # it is noted, and asked for again
        assert "it does not answer in time" in await why_down(one)


async def test_a_broker_that_knows_version_3_only() -> None:
    async with fake_broker() as broker:
        broker.connack = b"\x20\x02\x00\x01"
        with pytest.raises(UStatusError, match="refuses the login: Unsupported protocol version") as no:
            await end(broker).open()
        assert no.value.code == UCode.UNIMPLEMENTED


async def test_a_broker_that_takes_qos_0_only_is_refused_and_not_hung_up_on_by_each_message() -> None:
    async with fake_broker() as broker:
        broker.connack = packet(0x20, b"\x00\x00\x02\x24\x00")
        with pytest.raises(UStatusError, match="QoS 0 only") as no:
            await end(broker).open()
        assert no.value.code == UCode.UNIMPLEMENTED


@pytest.mark.parametrize(("granted_s", "is_reported"), [(0, True), (76, True), (77, False)])
async def test_a_session_expiry_below_the_requested_one_is_reported(granted_s: int, is_reported: bool) -> None:
    async with fake_broker() as broker:
        broker.connack = packet(0x20, b"\x00\x00\x05\x11" + granted_s.to_bytes(4, "big"))
        with structlog.testing.capture_logs() as lines:
            async with end(broker, session_expiry_s=77):
                pass
    reports = [line for line in lines if "keeps our session for less" in line["event"]]
    assert [(line["asked_s"], line["granted_s"]) for line in reports] == [(77, granted_s)] * is_reported


async def test_a_subscription_of_qos_0_is_reported() -> None:
    async with fake_broker() as broker, end(broker) as one:
        with structlog.testing.capture_logs() as lines:
            await one.register_listener(TOPIC, Silent())  # SUBACK says 0
    (line,) = [line for line in lines if "QoS 0 only" in line["event"]]
    assert line["topic_filter"] == "sender/10AB/0/3/80CD"


async def test_a_login_that_is_refused_with_a_reason() -> None:
    async with fake_broker() as broker:
        why = b"\x1f\x00\x07too bad"
        broker.connack = packet(0x20, b"\x00\x8a" + wire.varint(len(why)) + why)
        with pytest.raises(UStatusError, match=r"refuses the login: Banned \(too bad\)") as no:
            await end(broker).open()
        assert no.value.code == UCode.PERMISSION_DENIED
        await asyncio.wait_for(broker.ended.wait(), DEADLINE_S)


async def test_a_peer_that_disconnects_before_its_answer_gives_the_reason_if_known() -> None:
    async with fake_broker() as broker:
        broker.connack = packet(0xE0, b"\x89")
        with pytest.raises(UStatusError, match="it said: Server busy") as no:
            await end(broker).open()
        assert no.value.code == UCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"\xe0\x00", "it said: Normal disconnection"),
        (b"\xe0\x01\x8e", "it said: Session taken over"),
        (packet(0xE0, b"\x8b\x0b\x1f\x00\x08bye then"), r"it said: Server shutting down (bye then)"),
        (b"\x90\x00", "SUBACK"),
        (b"\x90\x04\x00\x00\x00\x00", "expected a packet id of 1 to 65535, got 0"),
        (b"\xe0\x01\xfd", "it said: reason code 0xfd"),
        (b"\xe0\x03\x8e\x05\x1f", "DISCONNECT"),  # cut short
        (b"\xf0\x01\x18", "not MQTT 5: a packet of kind 15"),
        (b"\x36\x06\x00\x01a\x00\x01\x00", "not MQTT 5: a packet of kind 3"),  # a QoS that there is not
        (b"\x30\x01\x00", "ends before its properties"),
        (b"\x62\x01\x00", "PUBREL"),
        (b"\xff" * 9, "4 bytes"),
        (packet(0x90, bytes(70_000)), "70000 bytes"),
        (b"\x30\xff\xff\xff\x7f", "got one of 268435455"),
    ],
    ids=lambda value: value[:12].hex() if isinstance(value, bytes) else None,
)
async def test_the_reason_why_a_connection_ended_is_reported(sent: bytes, why: str) -> None:
    unforeseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unforeseen.append(context))
    async with fake_broker() as broker, end(broker) as one:
        await broker.expect(SUBSCRIBE)
        broker.say(sent)
        assert why in await why_down(one)
    assert not unforeseen


async def test_a_message_of_qos_2_is_refused_and_the_connection_stays() -> None:
    """Another client of this session may have asked for it."""
    async with fake_broker() as broker, end(broker) as one:
        broker.say(b"\x34\x06\x00\x01a\x01\x02\x00")
        assert await broker.expect(0x50) == b"\x01\x02\x83"
        broker.say(b"\x62\x02\x01\x02")
        assert await broker.expect(0x70) == b"\x01\x02\x92"
        assert one.connected


class Nobody:
    """Whose connection is only looked at."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def welcomed(self, welcome: packets.Welcome) -> None:
        self.heard.append(welcome)

    def on_publishes(self, publishes: list[wire.Publish]) -> None:
        self.heard += publishes

    def on_pubacks(self, pubacks: list[tuple[int, int]], whys: Mapping[int, str]) -> None:
        self.heard += pubacks


class Pipe(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None: ...


def connection(user: Nobody, packet_bytes_max: int = 1_000, keep_alive_s: int = 10) -> tuple[Connection, Pipe]:
    made, pipe = Connection(user, packet_bytes_max, keep_alive_s), Pipe()
    made.connection_made(pipe)
    return made, pipe


def feed(one: Connection, data: bytes) -> None:
    while data and not one.lost.done():
        buffer = one.get_buffer(-1)
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        data = data[count:]
        one.buffer_updated(count)


@given(st.lists(st.binary(max_size=30) | st.binary(max_size=20).map(lambda body: packet(body[0] if body else 0, body))))
def test_nothing_that_comes_raises(pieces: list[bytes]) -> None:
    async def run() -> None:
        one, pipe = connection(Nobody())
        for piece in pieces:
            feed(one, piece)
        assert one.lost.done() is pipe.aborted

    asyncio.run(run())


async def test_a_suback_comes_between_the_messages_that_it_parts() -> None:
    order: list[str] = []

    class User(Nobody):
        def on_publishes(self, publishes: list[wire.Publish]) -> None:
            order.append(b"".join(one.topic for one in publishes).decode())

        def on_pubacks(self, pubacks: list[tuple[int, int]], whys: Mapping[int, str]) -> None:
            order.append(repr(pubacks))

    one, pipe = connection(User())
    asking = asyncio.create_task(one.ask(5, b"..."))
    await asyncio.sleep(0)
    publishes = [packet(0x32, b"\x00\x01" + name + b"\x00\x01\x00") for name in (b"a", b"b", b"c")]
    acks = wire.pubacks([1]) + packet(0x40, b"\x00\x02\x87\x00")
    feed(one, publishes[0] + acks + publishes[1] + packet(0x90, b"\x00\x05\x00\x01") + publishes[2])
    assert order == ["ab", "c", "[(1, 0), (2, 135)]"]
    assert await asking == packets.Answer(1, {})
    assert pipe.written == [b"..."]


async def test_pings_keep_a_connection_alive_and_a_silent_broker_is_given_up() -> None:
    one, pipe = connection(Nobody())
    now_s = asyncio.get_running_loop().time()
    one.keep_alive(now_s + 9)
    assert not pipe.written
    one.keep_alive(now_s + 11)
    one.keep_alive(now_s + 12)
    assert pipe.written == [b"\xc0\x00"], "once"
    feed(one, b"\xd0\x00")
    one.keep_alive(now_s + 19)
    assert not one.lost.done()
    one.keep_alive(now_s + 21)
    assert one.lost.done()
    assert "silent for 20 s" in str(one.lost.result())


async def test_a_connection_that_is_not_read_is_pinged_and_not_given_up() -> None:
    one, pipe = connection(Nobody())
    pipe.pause_reading = pipe.resume_reading = lambda: None  # type: ignore[method-assign]
    one.pause(True)
    now_s = asyncio.get_running_loop().time()
    for second in range(45):
        one.keep_alive(now_s + second)
    assert not one.lost.done()
    assert len(pipe.written) == 4
    one.pause(False)
    one.keep_alive(now_s + 46)
    assert not one.lost.done()


@pytest.mark.parametrize(("brokers_s", "keep_alive_s"), [(3, 3), (0, 10), (1_200, 10)])
async def test_the_shorter_keep_alive_counts_and_a_brokers_zero_is_none(brokers_s: int, keep_alive_s: int) -> None:
    """A broker may ask for none, or for one of many minutes (AWS IoT): when it is lost nothing else would tell."""
    user = Nobody()
    one, pipe = connection(user, keep_alive_s=10)
    feed(one, packet(0x20, b"\x00\x00\x03\x13" + brokers_s.to_bytes(2, "big")))
    assert one.up
    now_s = asyncio.get_running_loop().time()
    one.keep_alive(now_s + keep_alive_s - 0.5)
    assert not pipe.written
    one.keep_alive(now_s + keep_alive_s + 0.5)
    assert pipe.written == [b"\xc0\x00"]
    one.keep_alive(now_s + 2 * keep_alive_s + 0.5)
    assert one.lost.done()


async def test_a_broker_that_answers_pings_and_no_message_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "PUBACK_MS_MAX", 1_500)
    monkeypatch.setattr(link, "TICK_MS", 50)
    async with fake_broker() as broker, end(broker, keep_alive_s=1) as one:
        async with asyncio.timeout(DEADLINE_S):
            (status,) = await one.send_batch([message(1)])
        assert "its acknowledgements are overdue" in status.message


@pytest.mark.parametrize("what", ["tick", "down"])
async def test_what_fails_unforeseen_does_not_end_reconnecting(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick may find that no thread can be started; then a silent broker must be noticed all the same."""
    monkeypatch.setattr(link, "TICK_MS", 50)
    monkeypatch.setattr(link, "reconnect_wait_ms", lambda *_: 1)

    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    async with fake_broker() as broker, end(broker, keep_alive_s=1) as one:
        monkeypatch.setattr(one, what, fail)
        await broker.expect(CONNECT)
        broker.answers.remove(PINGREQ)
        await broker.expect(CONNECT)
        monkeypatch.undo()


async def test_an_answer_behind_what_the_broker_has_queued_for_us_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While messages come, or we don't read, the broker is alive; not for ever, and not when it stops answering."""
    one, pipe = connection(Nobody())
    monkeypatch.setattr("transports.mqtt5.connection.ANSWER_BEHIND_S_MAX", 1_000.0)
    now = asyncio.get_running_loop().time()
    assert not one.may_be_behind(now, 20)
    feed(one, b"\x30\x05\x00\x01a\x00x")  # a message
    assert one.may_be_behind(now, 20)
    assert not one.may_be_behind(now, 0), "it is silent since"
    assert not one.may_be_behind(now - 1_001, 20), "for too long"
    one.pause(True)
    assert one.may_be_behind(now, 0)
    asking = asyncio.create_task(one.ask(1, b"", timeout_s=0.01))
    await asyncio.sleep(0.1)
    assert not asking.done()
    assert not pipe.aborted
    asking.cancel()


async def test_requests_that_wait_for_an_answer_fail_with_the_connection() -> None:
    one, _ = connection(Nobody())
    asking = [asyncio.create_task(one.ask(number, b"")) for number in (1, 2)]
    await asyncio.sleep(0)
    one.connection_lost(None)
    for task in asking:
        with pytest.raises(OSError, match="it hung up"):
            await task
    with pytest.raises(OSError):
        await one.ask(3, b"")
    one.write(b"")
    one.pause(True)
    one.drop(OSError("again"))
    assert str(one.lost.result()) == "it hung up"


@pytest.mark.parametrize(
    ("exc", "why"), [(OSError("broken"), "broken"), (KeyError("x"), r"unexpected error KeyError\('x'\)")]
)
async def test_a_connection_says_what_ended_it(exc: Exception, why: str) -> None:
    one, _ = connection(Nobody())
    one.connection_lost(exc)
    with pytest.raises(OSError, match=why):
        raise one.lost.result()


def test_of_paho_only_what_is_public() -> None:
    """Its classes for properties and options that we write: neither its client, nor a private member."""
    allowed = {f"paho.mqtt.{name}" for name in ("packettypes", "properties", "subscribeoptions")}
    for file in Path(transports.mqtt5.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paho"):
                assert node.module in allowed, f"{file.name}: {node.module}"
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith("paho") for name in node.names), file.name


async def test_what_is_written_behind_something_small_leaves_at_once() -> None:
    """Nagle's algorithm would keep a request behind a PUBACK until the broker's kernel has acknowledged that: 40 ms."""

    class User(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.set_result(transport)

    made: asyncio.Future[asyncio.BaseTransport] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        dialler = Dialler("127.0.0.1", server.sockets[0].getsockname()[1])
        await dialler.dial(User(), None, DEADLINE_S)  # type: ignore[arg-type]
        transport = await made
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        transport.close()


class Refusing(FakeBroker):
    """Refuses the first subscription to each topic filter of a uProtocol authority."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def _answer(self, first: int, body: bytes) -> bytes:
        if first != SUBSCRIBE or b"$SYS" in body:
            return super()._answer(first, body)
        _, rest = properties(PacketTypes.SUBSCRIBE, body[2:])
        topic_filter, _ = text(rest)
        self.asked.append(topic_filter)
        code = b"\x87" if self.asked.count(topic_filter) == 1 else b"\x01"
        return packet(first & 0xF0 | 0x10, body[:2] + b"\x00" + code)


async def test_what_is_registered_before_open_is_subscribed_to_with_the_connection() -> None:
    """A new registration asks the broker again for the refused filter, and gets its answer."""
    listener = Silent()
    async with serving(Refusing()) as broker:
        one = end(broker)
        assert [status.code for status in one.register_before_open([(TOPIC, None)], listener)] == [UCode.OK]
        async with one:
            assert len(broker.asked) == 1
            assert f"topic filter {broker.asked[0]} arrives" in one.troubles[0]
            await one.register_listener(TOPIC, listener)
            assert broker.asked == [broker.asked[0]] * 2
            assert one.troubles == []
            await one.register_listener(TOPIC, listener)
            assert len(broker.asked) == 2
        await asyncio.wait_for(broker.ended.wait(), DEADLINE_S)
