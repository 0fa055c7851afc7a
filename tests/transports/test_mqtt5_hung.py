"""Brokers that stall, and settings that no broker can have: how long open and close take then, and what they leave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import ValidationError

from tests.stopping import stop_child
from tests.transports.mqtt5_answering import serving
from tools.broker import Broker
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, connection, link
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

CLOSE_S_MAX = 2.0
DEADLINE_S = 20
TOPIC = uris.parse("up://sender/10AB/3/80CD")


class Silent:
    def on_receive(self, message: UMessage) -> None: ...


def end(port: int, **settings: Any) -> Mqtt5Transport:
    return Mqtt5Transport(Mqtt5Config(port=port, **settings), LocalUriProvider("sender", 0x10AB, 3))


def message(number: int) -> UMessage:
    return UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b"%d" % number, 6))


class Mute:
    """A TCP peer that accepts, reads, and never answers."""

    def __init__(self) -> None:
        self.accepted = asyncio.Event()
        self.ended = asyncio.Event()  # its last client has closed the connection
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted.set()
        with contextlib.suppress(OSError):
            await reader.read(-1)
        self.ended.set()
        writer.close()


@asynccontextmanager
async def mute_peer() -> AsyncIterator[Mute]:
    async with serving(Mute()) as mute:
        yield mute


@contextlib.contextmanager
def nothing_left() -> Any:
    """No task, no thread and no descriptor more than before."""
    tasks, threads, descriptors = asyncio.all_tasks(), threading.active_count(), len(os.listdir("/dev/fd"))
    yield
    assert asyncio.all_tasks() <= tasks
    assert threading.active_count() <= threads
    assert len(os.listdir("/dev/fd")) <= descriptors


@asynccontextmanager
async def stopped(broker: Broker) -> AsyncIterator[None]:
    """Within the block the broker process is stopped (SIGSTOP): it exists, and answers nothing."""
    pid = broker.pid
    stop_child(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def closes_in_time(transport: Mqtt5Transport) -> None:
    started = time.monotonic()
    await asyncio.wait_for(transport.close(), DEADLINE_S)
    assert time.monotonic() - started < CLOSE_S_MAX + 1  # the machine may be busy; without a bound it is 20 s


TLS = {"insecure": True}
WAYS: dict[str, dict[str, Any]] = {
    "TCP": {},
    "TLS": {"tls": TLS},
    "ws": {"websocket": {}},
    "wss": {"websocket": {}, "tls": TLS},
}


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
async def test_opening_can_be_cancelled_and_leaves_nothing(settings: dict[str, Any]) -> None:
    # a pool starts one more thread while its first is about to be idle: TLS files are read before each connect
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with mute_peer() as mute:
        one = end(mute.port, **settings)
        await cancelled(one, mute)  # pools and caches that live on are there now
        with nothing_left():
            await cancelled(one, mute)


async def cancelled(one: Mqtt5Transport, mute: Mute) -> None:
    mute.accepted.clear()
    mute.ended.clear()
    opening = asyncio.create_task(one.open())
    await asyncio.wait_for(mute.accepted.wait(), DEADLINE_S)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await asyncio.wait_for(mute.ended.wait(), DEADLINE_S)
    for _ in range(3):  # the peer's own end
        await asyncio.sleep(0)
    await one.close()


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
async def test_closing_while_it_is_connecting(settings: dict[str, Any]) -> None:
    """`open` raises; `close` does not wait for the broker."""
    async with mute_peer() as mute:
        one = end(mute.port, connect_timeout_ms=DEADLINE_S * 1000, **settings)
        opening = asyncio.create_task(one.open())
        await asyncio.wait_for(mute.accepted.wait(), DEADLINE_S)
        await closes_in_time(one)
        with pytest.raises(UStatusError) as caught:
            await opening
        assert caught.value.code == UCode.CANCELLED
        await asyncio.wait_for(mute.ended.wait(), DEADLINE_S)


@pytest.mark.broker
async def test_closing_while_it_reconnects_to_a_peer_that_is_mute(
    make_broker: Callable[..., Broker], monkeypatch: Any
) -> None:
    monkeypatch.setattr(link, "RECONNECT_MS", (10,))
    broker = make_broker()
    one = end(broker.port, connect_timeout_ms=DEADLINE_S * 1000)
    await one.open()
    broker.kill()
    mute = Mute()
    async with await asyncio.start_server(mute.serve, "127.0.0.1", broker.port, reuse_address=True):
        await asyncio.wait_for(mute.accepted.wait(), DEADLINE_S)
        await closes_in_time(one)
        await asyncio.wait_for(mute.ended.wait(), DEADLINE_S)


@pytest.mark.broker
async def test_closing_with_a_stopped_broker(make_broker: Callable[..., Broker]) -> None:
    """With messages in flight, a listener that holds on, and a registration that waits for its answer."""
    broker = make_broker()
    one = end(broker.port, client_id="one")
    await one.open()
    await one.register_listener(TOPIC, Silent())
    async with stopped(broker):
        sending = asyncio.create_task(one.send_batch([message(n) for n in range(2_000)]))
        registering = asyncio.create_task(one.register_listener(uris.parse("up://sender/1/1/8001"), Silent()))
        await asyncio.sleep(0.05)
        assert not sending.done()
        await closes_in_time(one)
        assert {status.code for status in await sending} == {UCode.UNAVAILABLE}
        await registering


@pytest.mark.broker
async def test_a_stopped_broker_is_given_up_though_its_kernel_takes_our_pings(
    make_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "TICK_MS", 50)
    broker, lost = make_broker(), asyncio.Event()
    async with end(broker.port, keep_alive_s=1) as one:
        one.on_connection(lambda connected: None if connected else lost.set())
        async with stopped(broker):
            await asyncio.wait_for(lost.wait(), DEADLINE_S)


@pytest.mark.broker
async def test_unregistering_with_a_stopped_broker(make_broker: Callable[..., Broker]) -> None:
    """A stopping service unregisters its listeners one after the other: a stalled broker must not delay each one."""
    broker = make_broker()
    one, listener = end(broker.port), Silent()
    topics = [uris.parse(f"up://sender/10AB/3/{resource:X}") for resource in range(0x8001, 0x8021)]
    await one.open()
    for topic in topics:
        await one.register_listener(topic, listener)
    async with stopped(broker):
        started = time.monotonic()
        for topic in topics:
            await one.unregister_listener(topic, listener)
        assert time.monotonic() - started < 3  # 20 s for the first one alone, if it is waited for
        await closes_in_time(one)
    await one.open()
    async with asyncio.timeout(DEADLINE_S):  # the broker gets the UNSUBSCRIBE, though late
        while one._session.filters:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await one.close()


@pytest.mark.parametrize("settings", [{}, {"websocket": {}}], ids=["TCP", "ws"])
async def test_a_name_that_takes_for_ever_to_look_up(monkeypatch: Any, settings: dict[str, Any]) -> None:
    """A resolver can't be cancelled: it costs one thread, which nobody waits for, however often it is asked."""
    forever, asked = threading.Event(), []

    def look_up(host: str, port: int, flags: int = 0) -> Any:
        if flags:
            raise socket.gaierror("no literal")
        asked.append(host)
        forever.wait()
        return []

    monkeypatch.setattr(connection, "look_up", look_up)
    one = end(1883, host="broker.example", connect_timeout_ms=20, **settings)
    try:
        for _ in range(3):
            with pytest.raises(UStatusError, match="in time") as caught:
                await one.open()
            assert caught.value.code == UCode.UNAVAILABLE
        assert len(asked) == 1
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "look up a broker")
    finally:
        forever.set()


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"host": "a..b"}, UCode.INVALID_ARGUMENT),  # UnicodeError
        ({"host": "a" * 64 + ".example"}, UCode.INVALID_ARGUMENT),
        ({"host": "no.such.host.invalid"}, UCode.UNAVAILABLE),  # gaierror
        ({"host": ".example", "tls": TLS}, UCode.INVALID_ARGUMENT),
        ({"host": "a..b", "websocket": {}}, UCode.INVALID_ARGUMENT),
        ({"host": "a" * 64 + ".example", "websocket": {}}, UCode.INVALID_ARGUMENT),
        ({"host": "no.such.host.invalid", "websocket": {}}, UCode.UNAVAILABLE),
        ({"host": "a%b:1", "websocket": {}}, UCode.INVALID_ARGUMENT),
        ({"websocket": {}}, UCode.UNAVAILABLE),  # nobody listens
        ({"username": "u", "password_file": "/dev/null"}, UCode.FAILED_PRECONDITION),
        ({"tls": {"ca_file": "/no/such/file"}}, UCode.FAILED_PRECONDITION),
    ],
)
async def test_only_a_status_escapes_from_open(settings: dict[str, Any], code: int) -> None:
    one = end(1, **settings)
    with pytest.raises(UStatusError) as caught:
        await one.open()
    assert caught.value.code == code, caught.value


@pytest.mark.parametrize("host", ["mqtt://broker.example", "broker.example/path", "me@broker.example", " ", "a b"])
def test_a_host_is_no_url(host: str) -> None:
    """Otherwise the name would be looked up for ever."""
    with pytest.raises(ValidationError, match="without scheme, user, port and path"):
        Mqtt5Config(host=host)


@pytest.mark.parametrize("host", ["[::1]", "::1", "fe80::1%eth0", "127.0.0.1", "broker.example"])
def test_an_address_may_have_its_brackets(host: str) -> None:
    assert Mqtt5Config(host=host).host == host.strip("[]")


async def test_what_nobody_foresaw_is_a_status_too(monkeypatch: Any) -> None:
    for error, code in (
        (RuntimeError("x"), UCode.INTERNAL),
        (ssl.SSLError("x"), UCode.UNAUTHENTICATED),
        (KeyError("x"), UCode.INTERNAL),
    ):

        async def fail(*_: Any, error: BaseException = error) -> Any:
            raise error

        monkeypatch.setattr(connection.Dialler, "dial", fail)
        with pytest.raises(UStatusError) as caught:
            await end(1).open()
        assert caught.value.code == code


@pytest.mark.parametrize(
    "answer",
    [b"\x20\x00", b"\x20\x02\x00", b"\x20\x03\x00\xfe\x00", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 9, b""],
)
async def test_a_peer_that_speaks_no_mqtt(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        with pytest.raises(UStatusError) as caught:
            await asyncio.wait_for(end(server.sockets[0].getsockname()[1]).open(), DEADLINE_S)
        assert caught.value.code == UCode.UNAVAILABLE, caught.value


CONNACK = b"\x20\x03\x00\x00\x00"
GARBAGE = [
    b"\x90\x00",  # SUBACK without packet id
    b"\x90\x03\x00\x01\x05",  # whose properties end too early
    b"\xb0\x01\x00",  # UNSUBACK
    b"\xe0\x01\xfd",  # DISCONNECT with a reason that there is not
    b"\xe0\x03\x00\x05\x01",  # with properties that end too early
    b"\xf0\x01\x18",  # AUTH
    b"\x00\x00",  # no packet at all
    b"\x30\x01\x00",  # PUBLISH without topic
    b"\x34\x05\x00\x01a\x00\x01",  # of QoS 2, without properties
    b"\x62\x01\x00",  # PUBREL
    b"\x20\x03\x00\x00\x00",  # a second CONNACK
    b"\x40\x02\xff\xff",  # PUBACK for what was never sent
    b"\xff" * 20,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=[garbage.hex() for garbage in GARBAGE])
async def test_what_a_broken_broker_sends_raises_nothing(garbage: bytes) -> None:
    unforeseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unforeseen.append(context))
    sent = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(CONNACK)
        await writer.drain()
        await asyncio.sleep(0.05)  # it is open by then
        writer.write(garbage)
        with contextlib.suppress(OSError):
            await writer.drain()
            writer.write_eof()
            await reader.read(-1)
        sent.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        one = end(server.sockets[0].getsockname()[1])
        await one.open()
        await asyncio.wait_for(sent.wait(), DEADLINE_S)
        statuses = await asyncio.wait_for(one.send_batch([message(1)]), DEADLINE_S)
        assert [status.code for status in statuses] == [UCode.UNAVAILABLE]
        await closes_in_time(one)
    assert not unforeseen


@pytest.mark.broker
async def test_a_message_that_can_not_be_encoded_stops_no_other(broker: Broker, monkeypatch: Any) -> None:
    async with end(broker.port) as one:
        encode = one._codec.encode

        def fail(carried: Any) -> Any:
            if carried.payload == b"2":
                raise KeyError("nobody foresaw this")
            return encode(carried)

        monkeypatch.setattr(one._window, "_encode", fail)
        statuses = await asyncio.wait_for(one.send_batch([message(n) for n in (1, 2, 3)]), DEADLINE_S)
        assert [status.code for status in statuses] == [UCode.OK, UCode.INTERNAL, UCode.OK]
        assert "in_flight=0" in repr(one)
