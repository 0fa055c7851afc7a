"""MQTT over WebSocket (MQTT 5, section 6), and the names that TLS offers (ALPN).

A mosquitto behind a bridge (Debian's has no WebSocket of its own), and HTTP servers that answer as a test wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.certificates import TestAuthority
from tests.transports.mqtt5_answering import Answering, serving
from tests.transports.mqtt5_websocket import WebSocketBridge
from tools.broker import Broker
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, link, packets, websocket, wire
from transports.mqtt5.connection import Connection
from transports.plugin import create
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

DEADLINE_S = 20
TOPIC = uris.parse("up://sender/10AB/3/80CD")
CONNACK = b"\x20\x03\x00\x00\x00"
PINGREQ = b"\xc0\x00"

Serve = Callable[[web.Request], Awaitable[web.StreamResponse]]
Talk = Callable[[web.WebSocketResponse], Awaitable[None]]


def end(port: int, authority: str = "sender", **settings: Any) -> Mqtt5Transport:
    config = Mqtt5Config(**{"port": port, "websocket": {}, **settings})
    return Mqtt5Transport(config, LocalUriProvider(authority, 0x10AB, 3))


def publish(number: int, size: int = 0) -> UMessage:
    return UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b" " * size + b"%d" % number, 6))


class Heard:
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._more = asyncio.Event()

    def on_receive(self, message: UMessage) -> None:
        self.numbers.append(int(message.payload))
        self._more.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.numbers) < count:
                self._more.clear()
                await self._more.wait()


@asynccontextmanager
async def website(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Its port; every path is served by `serve`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def upgrading(talk: Talk, protocols: tuple[str, ...] = ("mqtt",)) -> Serve:
    """It opens the WebSocket, and goes on with `talk`."""

    async def serve(request: web.Request) -> web.StreamResponse:
        there = web.WebSocketResponse(protocols=protocols, compress=False, timeout=0.1)
        await there.prepare(request)
        with contextlib.suppress(ConnectionError):
            await talk(there)
        return there

    return serve


async def until_closed(there: web.WebSocketResponse) -> list[bytes]:
    """What comes."""
    return [message.data async for message in there]


@asynccontextmanager
async def bridge_to(broker: Broker, tls: ssl.SSLContext | None = None) -> AsyncIterator[WebSocketBridge]:
    bridge = WebSocketBridge(broker.host, broker.port, tls)
    await bridge.start()
    try:
        yield bridge
    finally:
        await bridge.stop()


async def refusal(one: Mqtt5Transport) -> UStatusError:
    with pytest.raises(UStatusError) as refused:
        await asyncio.wait_for(one.open(), DEADLINE_S)
    return refused.value


class Down:
    """Why the connection was lost."""

    def __init__(self, one: Mqtt5Transport) -> None:
        self._one, self._lost = one, asyncio.Event()
        one.on_connection(lambda connected: None if connected else self._lost.set())

    async def why(self) -> str:
        await asyncio.wait_for(self._lost.wait(), DEADLINE_S)
        return self._one.away_because


# What passes.


@pytest.mark.broker
@pytest.mark.parametrize("frame_bytes", [0, 1 << 12, 3], ids=["packets", "parts", "three bytes"])
async def test_messages_pass_wherever_frames_begin_and_end(broker: Broker, frame_bytes: int) -> None:
    """MQTT-6.0.0-2: a frame has several packets, or a part of one."""
    heard = Heard()
    async with bridge_to(broker) as bridge, end(bridge.port) as sender, end(bridge.port, "receiver") as receiver:
        await receiver.register_listener(TOPIC, heard)
        bridge.frame_bytes = frame_bytes
        count, size = (20, 0) if frame_bytes == 3 else (500, 0)
        messages = [*(publish(number, size) for number in range(count)), publish(count, 300_000 if count > 20 else 900)]
        for status in await sender.send_batch(messages):
            assert status.code == UCode.OK
        await heard.until(count + 1)
        assert heard.numbers == list(range(count + 1))
        assert all(request.headers["Sec-WebSocket-Protocol"] == "mqtt" for request in bridge.requests)
        assert "Sec-WebSocket-Extensions" not in bridge.requests[0].headers, "nothing is compressed"


async def test_a_batch_is_one_frame() -> None:
    frames: asyncio.Queue[bytes] = asyncio.Queue()

    async def talk(there: web.WebSocketResponse) -> None:
        await there.send_bytes(CONNACK)
        async for message in there:
            frames.put_nowait(message.data)
            acks = [body for first, body in wire.split(message.data)[0] if first == 0x32]
            if acks:
                ids = [int.from_bytes(body[2 + body[1] + (body[0] << 8) :][:2], "big") for body in acks]
                await there.send_bytes(wire.pubacks(ids))

    async with website(upgrading(talk)) as port, end(port) as one:
        assert {status.code for status in await one.send_batch([publish(number) for number in range(64)])} == {0}
        await one.close()
        sizes = [len(wire.split(frames.get_nowait())[0]) for _ in range(frames.qsize())]
        assert max(sizes) > 8, sizes


async def test_a_farewell_leaves_before_the_connection_ends() -> None:
    said: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

    async def talk(there: web.WebSocketResponse) -> None:
        await there.send_bytes(CONNACK)
        said.set_result(await until_closed(there))

    async with website(upgrading(talk)) as port:
        async with end(port, client_id="named"):
            pass
        assert (await asyncio.wait_for(said, DEADLINE_S))[-1] == packets.disconnect({})


@pytest.mark.broker
async def test_mutual_tls_with_files_that_are_read_again(
    make_broker: Callable[..., Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "RECONNECT_MS", (10,))
    authority = TestAuthority(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.ca))
    tls.load_cert_chain(*authority.issue("broker"))
    tls.verify_mode = ssl.CERT_REQUIRED
    cert, key = authority.issue("first")
    files = {"ca_file": authority.ca, "cert_file": cert, "key_file": key}

    async with bridge_to(make_broker(), tls) as bridge:
        async with end(bridge.port, host="localhost", tls=files) as one:
            await one.send(publish(1))
            for old, new in zip((cert, key), authority.issue("second"), strict=True):
                new.replace(old)
            one._link.drop("the test says so")
            async with asyncio.timeout(DEADLINE_S):
                while len(bridge.requests) < 2 or not one.connected:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert bridge.names == ["first", "second"]
        why = await refusal(end(bridge.port, tls={"ca_file": authority.ca}))
        assert "wants another certificate from us" in why.message, "asyncio's servers disconnect without an alert"
        stranger = TestAuthority(tmp_path, "stranger")
        why = await refusal(end(bridge.port, tls=files | {"ca_file": stranger.ca}))
        assert why.code == UCode.UNAUTHENTICATED
        assert "is ca_file right?" in why.message


async def test_a_server_that_refuses_our_certificate(tmp_path: Path) -> None:
    """It does so after our side of the handshake: the next read tells."""
    authority = TestAuthority(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.ca))
    tls.load_cert_chain(*authority.issue("broker"))
    tls.verify_mode = ssl.CERT_REQUIRED

    def accept(listening: socket.socket) -> None:
        with listening.accept()[0] as sock, contextlib.suppress(ssl.SSLError):
            tls.wrap_socket(sock, server_side=True)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(asyncio.to_thread(accept, listening))
        why = await refusal(end(listening.getsockname()[1], tls={"ca_file": authority.ca}))
        await serving
    assert why.code == UCode.UNAUTHENTICATED, why
    assert "are cert_file, key_file right?" in why.message


# The HTTP request.


async def test_headers_are_sent_and_those_in_files_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "RECONNECT_MS", (10,))
    token, came = tmp_path / "token", asyncio.Queue[web.Request]()
    token.write_text("Bearer one\nnot this\n")

    async def talk(there: web.WebSocketResponse) -> None:
        await there.send_bytes(CONNACK)
        await until_closed(there)

    async def serve(request: web.Request) -> web.StreamResponse:
        came.put_nowait(request)
        return await upgrading(talk)(request)

    opening = {
        "path": "/a%2Fb/c",
        "headers": {"x-amz-customauthorizer-name": "mine"},
        "secret_headers": {"Authorization": token},
    }
    async with website(serve) as port, end(port, websocket=opening) as one:
        first = await asyncio.wait_for(came.get(), DEADLINE_S)
        assert first.raw_path == opening["path"]
        assert first.headers["Host"] == f"127.0.0.1:{port}"
        assert first.headers["x-amz-customauthorizer-name"] == "mine"
        assert first.headers["Authorization"] == "Bearer one"
        token.write_text("Bearer two")
        one._link.drop("the test says so")
        assert (await asyncio.wait_for(came.get(), DEADLINE_S)).headers["Authorization"] == "Bearer two"


@pytest.mark.parametrize(("text", "words"), [(None, "No such file"), ("", "list index"), ("a\x07b", "control")])
async def test_a_header_whose_file_can_not_be_used(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
    why = await refusal(end(1, websocket={"secret_headers": {"Authorization": file}}))
    assert why.code == UCode.FAILED_PRECONDITION
    assert f"websocket.secret_headers.Authorization {file} can't be" in why.message
    assert words in why.message


@pytest.mark.parametrize(
    ("status", "headers", "code", "words"),
    [
        (401, {}, UCode.UNAUTHENTICATED, "HTTP 401 Unauthorized: are websocket.headers"),
        (403, {"Server": "awselb/2.0"}, UCode.PERMISSION_DENIED, "HTTP 403 Forbidden, server awselb/2.0: let this"),
        (404, {}, UCode.FAILED_PRECONDITION, "is websocket.path right?"),
        (407, {}, UCode.UNAUTHENTICATED, "407"),
        (426, {}, UCode.FAILED_PRECONDITION, "HTTP 426 Upgrade Required"),
        (429, {}, UCode.UNAVAILABLE, "it is tried again"),
        (503, {}, UCode.UNAVAILABLE, "it is tried again"),
        (299, {}, UCode.FAILED_PRECONDITION, "HTTP 299"),
        (200, {}, UCode.FAILED_PRECONDITION, "a proxy in between answers by itself"),
        (302, {"Location": "https://login.example/"}, UCode.FAILED_PRECONDITION, "redirects to https://login.example/"),
    ],
)
async def test_an_upgrade_that_is_refused(status: int, headers: dict[str, str], code: int, words: str) -> None:
    async def serve(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers={"Server": "s", **headers}, text="<html>no</html>")

    async with website(serve) as port:
        why = await refusal(end(port))
    assert why.code == code, why
    assert words.replace(" Unauthorized:", " Unauthorized, server s:") in why.message
    assert f"ws://127.0.0.1:{port}/mqtt" in why.message


@pytest.mark.parametrize("named", [(), ("mqttv3.1", "chat")])
async def test_a_websocket_without_the_subprotocol(named: tuple[str, ...]) -> None:
    """MQTT-6.0.0-4"""
    ended = asyncio.Event()

    async def serve(request: web.Request) -> web.StreamResponse:
        there = web.WebSocketResponse()
        if named:
            there.headers["Sec-WebSocket-Protocol"] = ", ".join(named)
        await there.prepare(request)
        await until_closed(there)
        ended.set()
        return there

    async with website(serve) as port:
        why = await refusal(end(port))
        await asyncio.wait_for(ended.wait(), DEADLINE_S)
    assert why.code == UCode.FAILED_PRECONDITION
    assert f"it names {', '.join(named) or 'none'}" in why.message
    assert "websocket.path" in why.message


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "it hung up on the upgrade"),
        (CONNACK, "data that is not HTTP"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            "but not as a valid upgrade",
        ),
    ],
)
async def test_a_peer_that_is_no_web_server(answer: bytes, words: str) -> None:
    class Peer(Answering):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

    async with serving(Peer()) as peer:
        assert words in (await refusal(end(peer.port))).message


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "WS_PROXY", "ws_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def talk(there: web.WebSocketResponse) -> None:
        await there.send_bytes(CONNACK)
        await until_closed(there)

    async with website(upgrading(talk)) as port, end(port) as one:
        assert one.connected


# What ends the connection.


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("text", "it sent a text frame"),
        ("close", "it closed the WebSocket with code 1008 (go away)"),
        ("abort", "hung up"),
        ("too large", "longer than our Maximum Packet Size"),
        ("disconnect", "it said: Server shutting down"),
    ],
)
async def test_what_ends_a_connection_is_reported(what: str, words: str) -> None:
    async def talk(there: web.WebSocketResponse) -> None:
        await there.receive()
        await there.send_bytes(CONNACK)
        await there.receive()  # a SUBSCRIBE
        if what == "text":
            await there.send_str("hello")
        elif what == "close":
            await there.close(code=1008, message=b"go away")
        elif what == "disconnect":
            await there.send_bytes(b"\xe0\x01\x8b")
            await there.close()
        elif what == "too large":
            await there.send_bytes(bytes(websocket.FRAME_EXTRA_BYTES + (3 << 20)))
        else:
            there.get_extra_info("socket").shutdown(socket.SHUT_WR)
        await until_closed(there)

    async with website(upgrading(talk)) as port:
        one = end(port)
        down = Down(one)
        async with one:
            assert words in await down.why()


async def test_a_peer_that_breaks_the_protocol_is_left() -> None:
    """Though it answers no close frame."""
    over = asyncio.Event()

    async def serve(request: web.Request) -> web.StreamResponse:
        there = web.WebSocketResponse(protocols=("mqtt",), compress=False, timeout=0.1)
        await there.prepare(request)
        await there.send_bytes(CONNACK)
        await there.receive()
        assert request.transport is not None
        request.transport.write(b"\x83\x00")  # a kind of frame that is reserved
        await over.wait()
        return there

    async with website(serve) as port:
        one = end(port)
        down = Down(one)
        async with one:
            assert "it sent data that is not WebSocket" in await down.why()
        over.set()


class User:
    """Whose connection is only looked at."""

    def __init__(self) -> None:
        self.publishes = 0
        self.some = asyncio.Event()

    def welcomed(self, welcome: packets.Welcome) -> None: ...

    def on_publishes(self, publishes: list[wire.Publish]) -> None:
        self.publishes += len(publishes)
        self.some.set()

    def on_pubacks(self, *_: Any) -> None: ...


async def dialled(port: int, user: User, packet_bytes_max: int = 1 << 16) -> Connection:
    config = Mqtt5Config(port=port, websocket={})
    assert config.websocket is not None
    connection = Connection(user, packet_bytes_max, keep_alive_s=60)
    await websocket.WebSocketDialler(config.host, port, config.websocket).dial(connection, None, DEADLINE_S)
    return connection


async def test_a_connection_that_is_not_read_holds_the_broker_back() -> None:
    """And what has come is handed over when it is read again, all of it, in order."""
    message = b"\x30\x80\x20" + b"\x00\x01t\x00" + bytes(4_092)  # 4,099 bytes
    total, sent, held = 8_000, 0, asyncio.Event()

    async def talk(there: web.WebSocketResponse) -> None:
        nonlocal sent
        for _ in range(total):
            sending = asyncio.ensure_future(there.send_bytes(message))
            if not (await asyncio.wait({sending}, timeout=0.3))[0]:
                held.set()
            await sending
            sent += 1
        await until_closed(there)

    user = User()
    async with website(upgrading(talk)) as port:
        connection = await dialled(port, user)
        connection.pause(True)
        await asyncio.wait_for(held.wait(), DEADLINE_S)
        assert user.publishes == 0
        assert sent < total, "32 MB are more than all buffers on the way hold"
        connection.pause(False)
        async with asyncio.timeout(DEADLINE_S):
            while user.publishes < total:
                user.some.clear()
                await user.some.wait()
        connection.drop(OSError("the test is over"))


async def test_what_the_broker_does_not_take_counts_as_unsent() -> None:
    go_on = asyncio.Event()

    async def talk(there: web.WebSocketResponse) -> None:
        await go_on.wait()
        assert sum(map(len, await until_closed(there))) == 64 << 20

    async with website(upgrading(talk)) as port:
        connection = await dialled(port, User())
        transport = connection._transport
        assert transport is not None
        for _ in range(64):
            connection.write(bytes(1 << 20))
        assert transport.get_write_buffer_size() > 16 << 20
        assert transport.get_extra_info("socket").fileno() > 0
        go_on.set()
        async with asyncio.timeout(DEADLINE_S):
            while transport.get_write_buffer_size():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        connection.drop(OSError("the test is over"))
        connection.write(b"late")
        transport.write(b"late, too")


async def test_parts_of_a_large_frame_are_a_sign_of_life_and_pings_of_a_proxy_are_not() -> None:
    times: list[str] = []

    class Below(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            times.append("passed on")

    class Watched(Connection):
        def received(self) -> None:
            times.append("heard")

    hearing = websocket._Hearing(Below(), Watched(User(), 100, 10))
    hearing.data_received(bytes(127))
    hearing.data_received(bytes(128))
    assert times == ["passed on", "heard", "passed on"]


# ALPN.


class Named:
    """Answers as a broker does behind TLS, and keeps the name that TLS has agreed on."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self.tls, self.is_web = tls, False
        self.agreed: list[str | None] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.agreed.append(writer.get_extra_info("ssl_object").selected_alpn_protocol())
        if self.is_web:
            writer.close()
            return
        await Answering().serve(reader, writer)


@asynccontextmanager
async def named(authority: TestAuthority, names: list[str]) -> AsyncIterator[tuple[Named, int]]:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*authority.issue("broker"))
    tls.set_alpn_protocols(names)
    one = Named(tls)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield one, server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("settings", "agreed"),
    [
        ({"alpn": ["x-amzn-mqtt-ca"]}, "x-amzn-mqtt-ca"),
        ({"alpn": ["other", "mqtt"]}, "mqtt"),
        ({"alpn": ["other"]}, None),
        ({}, None),
    ],
)
async def test_the_names_that_tls_offers(tmp_path: Path, settings: dict[str, Any], agreed: str | None) -> None:
    authority = TestAuthority(tmp_path)
    tls = {"ca_file": authority.ca, **settings}
    async with named(authority, ["x-amzn-mqtt-ca", "mqtt", "http/1.1"]) as (broker, port):
        async with end(port, websocket=None, tls=tls) as one:
            assert one.connected
        assert broker.agreed == [agreed]


async def test_a_websocket_offers_http(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    async with named(authority, ["h2", "http/1.1"]) as (broker, port):
        broker.is_web = True
        await refusal(end(port, tls={"ca_file": authority.ca}))
        assert broker.agreed == ["http/1.1"], "and it asks once"


def test_a_broker_that_knows_none_of_the_names() -> None:
    """OpenSSL's own servers go on then; those of AWS send this alert."""
    error = ssl.SSLError(1, "[SSL: TLSV1_ALERT_NO_APPLICATION_PROTOCOL] tlsv1 alert no application protocol")
    error.reason = "TLSV1_ALERT_NO_APPLICATION_PROTOCOL"
    from transports.mqtt5 import reasons

    assert "is tls.alpn right?" in reasons.unreachable("broker:443", error).message


# Settings.


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "/mqtt"}, "unknown key"),
        ({"alpn": ["mqtt"]}, "unknown key"),
        ({"websocket": {"path": "mqtt"}}, r"websocket\.path: expected a path that begins with /"),
        ({"websocket": {"path": "/a b"}}, "percent-encoded"),
        ({"websocket": {"path": "/a#b"}}, "percent-encoded"),
        ({"websocket": {"path": "/a?b=c"}}, "without query"),
        ({"websocket": {"headers": {"a b": "x"}}}, "the name of an HTTP header, got 'a b'"),
        ({"websocket": {"headers": {"Upgrade": "x"}}}, "set by the WebSocket itself"),
        ({"websocket": {"headers": {"Sec-WebSocket-Protocol": "x"}}}, "set by the WebSocket itself"),
        ({"websocket": {"headers": {"a": "x"}, "secret_headers": {"A": "f"}}}, "set twice"),
        ({"websocket": {"headers": {"a": "x\r\nb: y"}}}, "value of the header 'a' has a line break"),
        ({"websocket": {}, "tls": {"alpn": ["mqtt"]}}, "exclude each other"),
        ({"tls": {"alpn": [""]}}, r"tls\.alpn: expected names of 1 to 255 ASCII characters"),
        ({"tls": {"alpn": ["ü"]}}, "ASCII"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UStatusError, match=words) as refused:
        create("mqtt5", settings, LocalUriProvider("somebody", 1, 1))
    assert refused.value.code == UCode.INVALID_ARGUMENT


def test_a_header_is_not_shown() -> None:
    assert "hidden" not in repr(Mqtt5Config(websocket={"headers": {"Authorization": "hidden"}}))


def test_a_broker_over_tcp_costs_no_aiohttp() -> None:
    """0.1 s and 11 MiB."""
    code = (
        "import asyncio, sys\n"
        "from transports.mqtt5 import Mqtt5Config, Mqtt5Transport\n"
        "from uprotocol.transport import LocalUriProvider\n"
        "Mqtt5Transport(Mqtt5Config(), LocalUriProvider('a', 1, 1))\n"
        "sys.exit('aiohttp' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
