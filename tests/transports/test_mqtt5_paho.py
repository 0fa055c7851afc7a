"""The MQTT 5 transport against a real mosquitto that disconnects, loses sessions, refuses, and uses TLS."""

from __future__ import annotations

import asyncio
import codecs
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt.enums import MQTTProtocolVersion
from paho.mqtt.publish import multiple
from pydantic import ValidationError

from tests.stopping import stop_child
from tools.broker import Broker
from transports.conformance import TcpProxy
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport
from transports.mqtt5.link import RECONNECT_MS, reconnect_wait_ms
from transports.mqtt5.reasons import code_of
from transports.plugin import create
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UMessageType
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

pytestmark = pytest.mark.broker
spec = pytest.mark.spec
MakeBroker = Callable[..., Broker]

DEADLINE_S = 20
TOPIC = uris.parse("up://sender/10AB/3/80CD")


def publish(number: int, **more: Any) -> UMessage:
    builder = UMessageBuilder.publish(TOPIC)
    if "ttl_ms" in more:
        builder.with_ttl(more["ttl_ms"])
    return builder.build_from_upayload(UPayload(b"%d" % number, 6))


def end(broker: Broker, authority: str, **settings: Any) -> Mqtt5Transport:
    settings = {"port": broker.port, **settings}
    return Mqtt5Transport(Mqtt5Config(**settings), LocalUriProvider(authority, 0x10AB, 3))


class Heard:
    """Collects numbers; `take` may hold back or refuse."""

    def __init__(self, take: Callable[[], Awaitable[None]] | None = None) -> None:
        self.numbers: list[int] = []
        self._take = take
        self._more = asyncio.Event()

    def on_receive(self, message: UMessage) -> Awaitable[None] | None:
        self.numbers.append(int(message.payload))
        self._more.set()
        return self._take() if self._take is not None else None

    async def until(self, holds: Callable[[list[int]], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds(self.numbers):
                self._more.clear()
                await self._more.wait()


class Connection:
    def __init__(self, transport: Mqtt5Transport) -> None:
        self.changes: asyncio.Queue[bool] = asyncio.Queue()
        transport.on_connection(self.changes.put_nowait)

    async def until(self, connected: bool) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self.changes.get() is not connected:
                pass


async def send_until_taken(
    transport: Mqtt5Transport, connection: Connection, messages: Sequence[UMessage]
) -> list[int]:
    """As the streamer does: what was not taken is sent again, in order. Returns the codes of failures."""
    failures: list[int] = []
    rest = list(messages)
    while rest:
        statuses = await transport.send_batch(rest[:100])
        first = next((n for n, status in enumerate(statuses) if status.code), len(statuses))
        failures += [status.code for status in statuses if status.code]
        if first < len(statuses) and statuses[first].code == UCode.PERMISSION_DENIED:
            first += 1
        rest = rest[first:]
        if first < len(statuses) and not transport.connected:
            await connection.until(True)
    return failures


def firsts(numbers: list[int]) -> list[int]:
    return list(dict.fromkeys(numbers))


@spec("req~up-transport-mqtt5-reconnection~1")
@pytest.mark.spec("local~l1-send-complete")
async def test_a_broker_that_restarts_mid_stream_loses_nothing_that_it_acknowledged(own_broker: Broker) -> None:
    heard = Heard()
    async with end(own_broker, "sender") as sender, end(own_broker, "receiver") as receiver:
        connection = Connection(sender)
        await receiver.register_listener(TOPIC, heard)
        sending = asyncio.create_task(send_until_taken(sender, connection, [publish(n) for n in range(4_000)]))
        await heard.until(lambda numbers: len(numbers) >= 500)
        own_broker.stop()
        await own_broker.start_async()
        failures = await asyncio.wait_for(sending, DEADLINE_S)
        await heard.until(lambda numbers: len(set(numbers)) == 4_000)
        assert set(failures) <= {UCode.UNAVAILABLE}
        assert firsts(heard.numbers) == list(range(4_000))


@spec("req~up-transport-mqtt5-reconnection~1")
async def test_a_broker_that_crashes_is_subscribed_to_again(own_broker: Broker) -> None:
    """After a kill it has lost every session and subscription."""
    heard, silent = Heard(), Heard()
    async with end(own_broker, "sender") as sender, end(own_broker, "receiver") as receiver:
        lost, back = Connection(sender), Connection(receiver)
        await receiver.register_listener(TOPIC, heard)
        await receiver.register_listener(uris.pattern("sender"), heard, uris.pattern("receiver"))
        unregistered = uris.parse("up://sender/1/1/8001")
        await receiver.register_listener(unregistered, silent)
        own_broker.kill()
        await lost.until(False)
        await back.until(False)
        assert {status.code for status in await sender.send_batch([publish(0), publish(1)])} == {UCode.UNAVAILABLE}
        await receiver.unregister_listener(unregistered, silent)
        late = Heard()
        await receiver.register_listener(uris.parse("up://*/10AB/3/80CD"), late)  # noted, though the broker is away
        await own_broker.start_async()
        await lost.until(True)
        await back.until(True)
        notification = UMessageBuilder.notification(TOPIC, uris.parse("up://receiver/1/1/0")).build_from_upayload(
            UPayload(b"3", 6)
        )
        statuses = await sender.send_batch([publish(2), notification, UMessageBuilder.publish(unregistered).build()])
        assert [status.code for status in statuses] == [UCode.OK] * 3
        await heard.until(lambda numbers: len(numbers) == 2)
        await late.until(lambda numbers: len(numbers) == 1)
        assert (heard.numbers, late.numbers, silent.numbers) == ([2, 3], [2], [])


async def test_what_is_in_flight_when_the_connection_is_lost_is_unavailable(own_broker: Broker) -> None:
    """The broker process is stopped (SIGSTOP): it accepts bytes, and answers nothing."""
    async with end(own_broker, "sender", in_flight_max=10) as sender:
        for number in range(3):  # the window opens: 1, 2, 4, 8, 10
            await sender.send(publish(number))
        stop_child(own_broker.pid)
        sending = [asyncio.create_task(sender.send_batch([publish(n) for n in range(30)])) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert "in_flight=8 of 8, at most 10" in repr(sender)
        own_broker.kill()
        for statuses in await asyncio.wait_for(asyncio.gather(*sending), DEADLINE_S):
            assert [status.code for status in statuses] == [UCode.UNAVAILABLE] * 30
        assert "in_flight=0" in repr(sender)


@spec("req~up-transport-mqtt5-session-config~1")
async def test_a_named_session_keeps_what_comes_while_we_are_away(own_broker: Broker) -> None:
    settings = {"client_id": "the receiver", "session_expiry_s": 3_600}
    first = end(own_broker, "receiver", **settings)
    assert Capability.PERSISTENT_SESSION in first.capabilities
    heard = Heard()
    async with first:
        await first.register_listener(TOPIC, heard)
    async with end(own_broker, "sender") as sender:
        for status in await sender.send_batch([publish(n) for n in range(100)]):
            assert status.code == UCode.OK
        own_broker.restart()
        async with end(own_broker, "receiver", **settings) as again:
            await again.register_listener(TOPIC, heard)  # comes after what the session has brought already
            await heard.until(lambda numbers: len(numbers) >= 100)
            assert heard.numbers == list(range(100))
            assert not again.dropped


@spec("req~up-transport-mqtt5-session-config~1")
async def test_a_clean_start_forgets_the_session(own_broker: Broker) -> None:
    settings = {"client_id": "the receiver", "session_expiry_s": 3_600}
    heard = Heard()
    async with end(own_broker, "receiver", **settings) as first:
        await first.register_listener(TOPIC, heard)
    async with end(own_broker, "sender") as sender:
        await sender.send(publish(1))
        async with end(own_broker, "receiver", **settings, clean_start=True) as again:
            await again.register_listener(TOPIC, heard)
            await sender.send(publish(2))
            await heard.until(lambda numbers: bool(numbers))
            assert heard.numbers == [2]


@spec("req~up-transport-mqtt5-session-config~1")
async def test_without_session_nothing_is_kept(broker: Broker) -> None:
    one = end(broker, "receiver", session_expiry_s=0)
    assert not one.capabilities & (Capability.ACK | Capability.PERSISTENT_SESSION)


async def test_what_was_not_taken_when_we_went_away_comes_again(own_broker: Broker) -> None:
    """Ack last: the broker keeps a message until its awaitable has completed."""
    settings = {"client_id": "the receiver", "session_expiry_s": 3_600}
    never = asyncio.Event()
    held, heard = Heard(lambda: _wait(never)), Heard()
    async with end(own_broker, "sender") as sender:
        first = end(own_broker, "receiver", **settings)
        await first.open()
        await first.register_listener(TOPIC, held)
        await sender.send_batch([publish(n) for n in range(10)])
        await held.until(lambda numbers: len(numbers) == 10)
        await first._link.close()  # without drain, as a crash would
        async with end(own_broker, "receiver", **settings) as again:
            await again.register_listener(TOPIC, heard)
            await heard.until(lambda numbers: len(numbers) == 10)
        never.set()
        await first.close()
    assert heard.numbers == list(range(10))


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def test_receive_maximum_holds_the_broker_back(broker: Broker) -> None:
    gate = asyncio.Event()
    heard = Heard(lambda: _wait(gate))
    async with end(broker, "sender") as sender, end(broker, "receiver", receive_maximum=7) as receiver:
        await receiver.register_listener(TOPIC, heard)
        await sender.send_batch([publish(n) for n in range(50)])
        await heard.until(lambda numbers: len(numbers) == 7)
        await asyncio.sleep(0.05)
        assert len(heard.numbers) == 7
        gate.set()
        await heard.until(lambda numbers: len(numbers) == 50)
        assert heard.numbers == list(range(50))


@spec("dsn~utransport-registerlistener-listener-reuse~1")
async def test_overlapping_filters_bring_each_message_once(broker: Broker) -> None:
    """mosquitto sends one copy for each subscription."""
    wide, narrow, both = Heard(), Heard(), Heard()
    async with end(broker, "sender") as sender, end(broker, "receiver") as receiver:
        await receiver.register_listener(uris.pattern("sender"), wide)
        await receiver.register_listener(TOPIC, narrow)
        for source in (TOPIC, uris.pattern("sender"), uris.parse("up://*/10AB/3/80CD")):
            await receiver.register_listener(source, both)
        await sender.send_batch([publish(n) for n in range(20)])
        await wide.until(lambda numbers: 19 in numbers)  # the broker has taken them; they are on their way to us
        await receiver.unregister_listener(uris.pattern("sender"), wide)
        await receiver.unregister_listener(uris.pattern("sender"), both)
        await sender.send_batch([publish(n) for n in range(20, 40)])
        await both.until(lambda numbers: 39 in numbers)
        await narrow.until(lambda numbers: 39 in numbers)
        assert narrow.numbers == both.numbers == list(range(40))
        assert wide.numbers == list(range(20))


@pytest.mark.parametrize(
    ("login", "code"),
    [
        ({}, UCode.PERMISSION_DENIED),
        ({"username": "up", "password": "wrong"}, UCode.PERMISSION_DENIED),
        ({"username": "nobody", "password": "secret"}, UCode.PERMISSION_DENIED),
    ],
)
async def test_a_refused_login(make_broker: MakeBroker, login: dict[str, str], code: int) -> None:
    broker = make_broker(users={"up": "secret"})
    with pytest.raises(UStatusError, match="refuses the login: Not authorized") as refused:
        await end(broker, "somebody", **login).open()
    assert refused.value.code == code


async def test_a_login_from_a_file(make_broker: MakeBroker, tmp_path: Path) -> None:
    broker = make_broker(users={"up": "sëcret"})
    file = tmp_path / "password"
    file.write_text("sëcret\nnot this\n")
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())  # as editors on Windows do
    async with end(broker, "somebody", username="up", password_file=file) as one:
        assert one.connected
    file.unlink()
    with pytest.raises(UStatusError, match="password_file") as refused:
        await end(broker, "somebody", username="up", password_file=file).open()
    assert refused.value.code == UCode.FAILED_PRECONDITION


@spec("req~utransport-send-prevent-address-spoofing~1")
@spec("req~utransport-registerlistener-prevent-unauthorized-access~1")
async def test_access_rules_of_the_broker_guard_addresses(make_broker: MakeBroker) -> None:
    """The rules in docs/mqtt5.md: each device writes under its own authority, and reads what is for it."""
    acl = "pattern write %u/#\npattern read +/+/+/+/+/%u/#\nuser receiver\ntopic read sender/10AB/#\n"
    broker = make_broker(users={"sender": "s", "receiver": "r"}, acl=acl)
    heard = Heard()
    async with (
        end(broker, "sender", username="sender", password="s") as sender,
        end(broker, "receiver", username="receiver", password="r") as receiver,
    ):
        await receiver.register_listener(uris.ANY, heard)
        await receiver.register_listener(uris.ANY, heard, uris.pattern("receiver"))
        spoofed = UMessageBuilder.publish(uris.parse("up://receiver/10AB/3/80CD")).build()
        hidden = UMessageBuilder.publish(uris.parse("up://sender/10AC/3/80CD")).build_from_upayload(UPayload(b"9", 6))
        connection = Connection(sender)
        codes = await send_until_taken(sender, connection, [publish(1), hidden, spoofed, publish(2)])
        assert UCode.PERMISSION_DENIED in codes  # mosquitto 2.0.11 says so, and disconnects
        notification = UMessageBuilder.notification(TOPIC, uris.parse("up://receiver/1/1/0")).build_from_upayload(
            UPayload(b"3", 6)
        )
        await sender.send(notification)
        await heard.until(lambda numbers: 3 in numbers)
        assert firsts(heard.numbers) == [1, 2, 3]


async def test_an_unreachable_broker() -> None:
    proxy = TcpProxy("127.0.0.1", 1)
    await proxy.start()
    proxy.cut()
    for port in (1, proxy.port):  # no listener; a peer that disconnects
        one = Mqtt5Transport(Mqtt5Config(port=port), LocalUriProvider("somebody", 1, 1))
        with pytest.raises(UStatusError, match=f"127.0.0.1:{port}") as refused:
            await one.open()
        assert refused.value.code == UCode.UNAVAILABLE
        assert not one.connected
        await one.close()
    await proxy.stop()


async def test_a_broker_that_says_nothing() -> None:
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    one = Mqtt5Transport(Mqtt5Config(port=port, connect_timeout_ms=200), LocalUriProvider("somebody", 1, 1))
    with pytest.raises(UStatusError, match="does not answer in time") as refused:
        await one.open()
    assert refused.value.code == UCode.UNAVAILABLE
    server.close()
    for writer in writers:
        writer.close()
        await writer.wait_closed()


async def test_a_message_larger_than_the_broker_takes(make_broker: MakeBroker) -> None:
    """A broker disconnects on one message: sent again and again, it would block everything behind it."""
    broker = make_broker(settings=["max_packet_size 2000"])
    async with end(broker, "sender") as sender:
        large = UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(bytes(2_000), 6))
        statuses = await sender.send_batch([publish(1), large, publish(2)])
        assert [status.code for status in statuses] == [UCode.OK, UCode.INVALID_ARGUMENT, UCode.OK]
        assert "2000" in statuses[1].message


async def test_a_broker_with_a_small_window(make_broker: MakeBroker) -> None:
    broker = make_broker(settings=["max_inflight_messages 3"])
    heard = Heard()
    async with end(broker, "sender") as sender, end(broker, "receiver") as receiver:
        assert "at most 3" in repr(sender)
        await receiver.register_listener(TOPIC, heard)
        await asyncio.gather(*(sender.send(publish(n)) for n in range(100)))
        await heard.until(lambda numbers: len(numbers) == 100)
        assert heard.numbers == list(range(100))


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="only Linux lets us acknowledge at once")
async def test_no_batch_waits_for_a_delayed_acknowledgement(broker: Broker) -> None:
    """mosquitto has Nagle's algorithm on: without our doing the second PUBACK of every batch comes after 40 ms, never
    earlier."""
    async with end(broker, "sender") as sender:
        took_s = []
        for number in range(20):
            started = time.monotonic()
            statuses = await sender.send_batch([publish(number), publish(number), publish(number)])
            took_s.append(time.monotonic() - started)
            assert not any(status.code for status in statuses)
    assert min(took_s) < 0.03


async def test_expiry_travels(broker: Broker) -> None:
    got: asyncio.Queue[UMessage] = asyncio.Queue()

    class Taker:
        def on_receive(self, message: UMessage) -> None:
            got.put_nowait(message)

    async with end(broker, "sender") as sender, end(broker, "receiver") as receiver:
        await receiver.register_listener(TOPIC, Taker())
        await sender.send(publish(1, ttl_ms=4_500))
        message = await asyncio.wait_for(got.get(), DEADLINE_S)
        assert message.attributes.ttl == 4_500


async def test_of_an_authority_that_is_refused_requests_and_what_was_acknowledged_are_read(
    make_broker: MakeBroker,
) -> None:
    """The callers of the requests get the error; what is lost of QoS 1 the owner has to decide."""
    broker, method = make_broker(), uris.parse("up://receiver/10AB/3/1")
    got: asyncio.Queue[UMessage] = asyncio.Queue()

    class Taker:
        def on_receive(self, message: UMessage) -> None:
            got.put_nowait(message)

    async with end(broker, "sender") as sender, end(broker, "receiver") as receiver:
        await receiver.register_listener(uris.parse("//*/FFFFFFFF/FF/0"), Taker(), method)
        await receiver.register_listener(TOPIC, Taker())
        receiver.refused = {"sender": 0}
        fleeting = [("sender/10AB/0/3/80CD", b"", 0, False)] * 2
        await asyncio.to_thread(multiple, fleeting, broker.host, broker.port, protocol=MQTTProtocolVersion.MQTTv5)
        await sender.send(publish(1))
        await sender.send(UMessageBuilder.request(uris.parse("up://sender/10AB/3/0"), method, 10_000).build())
        types = [(await asyncio.wait_for(got.get(), DEADLINE_S)).attributes.type for _ in range(2)]
        assert types == [UMessageType.UMESSAGE_TYPE_PUBLISH, UMessageType.UMESSAGE_TYPE_REQUEST]
        assert receiver.refused == {"sender": 2}


def openssl(*arguments: str, directory: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a CA, a broker's certificate for localhost, a client's, and a stranger's CA."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, and it makes the certificates of this test")
    directory = tmp_path_factory.mktemp("tls")
    for name in ("ca", "stranger"):
        new = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        openssl(*new, "-keyout", f"{name}.key", "-out", f"{name}.pem", directory=directory)
    (directory / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("broker", "client"):
        new = ["req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"]
        openssl(*new, "-keyout", f"{name}.key", "-out", f"{name}.csr", directory=directory)
        sign = [
            "x509",
            "-req",
            "-days",
            "2",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-extfile",
            "names",
        ]
        openssl(*sign, "-in", f"{name}.csr", "-out", f"{name}.pem", directory=directory)
    return directory


async def test_mutual_tls(make_broker: MakeBroker, authority: Path) -> None:
    certificates = (authority / "ca.pem", authority / "broker.pem", authority / "broker.key")
    broker = make_broker(certificates=certificates, require_client_certificate=True)
    ours = {"cert_file": authority / "client.pem", "key_file": authority / "client.key"}
    good = {"ca_file": authority / "ca.pem", **ours}
    heard = Heard()
    async with (
        end(broker, "sender", tls=good) as sender,
        end(broker, "receiver", tls=good, host="localhost") as receiver,
    ):
        await receiver.register_listener(TOPIC, heard)
        large = UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b" " * 100_000 + b"7", 6))
        for status in await sender.send_batch([*(publish(n) for n in range(1_000)), large]):
            assert status.code == UCode.OK
        await heard.until(lambda numbers: len(numbers) == 1_001)
        assert heard.numbers == [*range(1_000), 7]
    for settings, words in (
        ({"ca_file": authority / "stranger.pem", **ours}, "ca_file"),
        ({"ca_file": authority / "ca.pem"}, "cert_file"),
        (
            {
                "ca_file": authority / "ca.pem",
                "cert_file": authority / "stranger.pem",
                "key_file": authority / "stranger.key",
            },
            "cert_file",
        ),
    ):
        with pytest.raises(UStatusError, match=words) as refused:
            await end(broker, "sender", tls=settings).open()
        assert refused.value.code == UCode.UNAUTHENTICATED
    with pytest.raises(UStatusError, match=r"missing\.pem") as refused:
        await end(broker, "sender", tls={"ca_file": authority / "missing.pem"}).open()
    assert refused.value.code == UCode.FAILED_PRECONDITION


async def test_tls_without_checking(make_broker: MakeBroker, authority: Path) -> None:
    broker = make_broker(certificates=(authority / "ca.pem", authority / "broker.pem", authority / "broker.key"))
    async with end(broker, "sender", tls={"insecure": True}) as sender:
        await sender.send(publish(1))
    with pytest.raises(UStatusError) as refused:  # a broker that speaks TLS, and a client that doesn't
        await end(broker, "sender", connect_timeout_ms=500).open()
    assert refused.value.code == UCode.UNAVAILABLE


@spec("req~up-transport-mqtt5-reconnection~1")
def test_the_waits_before_reconnecting() -> None:
    assert RECONNECT_MS == (500, 1_000, 2_000, 4_000, 10_000)
    assert [reconnect_wait_ms(attempt, 0.0) for attempt in range(1, 8)] == [
        500,
        1_000,
        2_000,
        4_000,
        10_000,
        10_000,
        10_000,
    ]
    assert all(0 < reconnect_wait_ms(attempt, 1.0) < reconnect_wait_ms(attempt, 0.0) for attempt in range(1, 8))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hots": "x"}, "hots"),
        ({"mode": "d2d"}, "mode"),
        ({"port": 0}, "port"),
        ({"password": "x"}, "username"),
        ({"username": "u", "password": "x", "password_file": "y"}, "exclude"),
        ({"tls": {"cert_file": "x"}}, "key_file"),
        ({"receive_maximum": 0}, "receive_maximum"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UStatusError, match=words) as refused:
        create("mqtt5", settings, LocalUriProvider("somebody", 1, 1))
    assert refused.value.code == UCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (0x00, UCode.OK),
        (0x10, UCode.OK),
        (0x80, UCode.UNAVAILABLE),
        (0x86, UCode.UNAUTHENTICATED),
        (0x87, UCode.PERMISSION_DENIED),
        (0x90, UCode.PERMISSION_DENIED),
        (0x95, UCode.INVALID_ARGUMENT),
        (0x97, UCode.UNAVAILABLE),
        (0xFF, UCode.UNAVAILABLE),
    ],
)
def test_reason_codes(reason: int, code: int) -> None:
    assert code_of(reason) == code


async def test_it_can_be_opened_again(broker: Broker) -> None:
    heard = Heard()
    one = end(broker, "receiver", client_id="opened twice", clean_start=True)
    async with end(broker, "sender") as sender:
        for number in range(2):
            await one.open()
            await one.open()
            if not number:
                await one.register_listener(TOPIC, heard)
            await sender.send(publish(number))
            await heard.until(lambda numbers, last=number: numbers[-1:] == [last])
            await one.close()
            assert not one.connected
    assert heard.numbers == [0, 1]


def test_the_password_is_not_shown() -> None:
    config = Mqtt5Config(username="u", password="secret")
    assert "secret" not in repr(config)
    with pytest.raises(ValidationError):
        config.port = 1


async def test_a_broker_helper_restarts_on_its_port(make_broker: MakeBroker) -> None:
    broker = make_broker()
    port = broker.port
    broker.kill()
    assert not broker.running
    assert broker.restart().port == port
    assert broker.running
    assert "127.0.0.1" in broker.host


def test_no_broker_outlives_its_process(tmp_path: Path) -> None:
    """Neither an exit without close, nor a kill; and the directory that a kill leaves goes with the next start."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    for last_words in ("", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", ""):
        program = "from tools.broker import Broker; b = Broker().start(); "
        program += "print(b.pid, b.port, flush=True)"
        command = [sys.executable, "-c", f"{program}\n{last_words}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        pid = int(done.stdout.split()[0])
        for _ in range(500):
            state = Path(f"/proc/{pid}/stat")
            if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
                break
            subprocess.run(["sleep", "0.01"], check=True)
        else:
            pytest.fail(f"mosquitto {pid} still runs")
        assert bool(list(tmp_path.iterdir())) is bool(last_words)


def test_the_directory_of_a_living_broker_is_not_touched(make_broker: MakeBroker) -> None:
    one = make_broker(persistent=True)
    one.stop()
    make_broker()
    assert one.restart().log
