"""The conformance suite against a real nats-server, and what is NATS's own: each test has a stream, and each end a link
that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

nats = pytest.importorskip("nats", reason="needs the client of NATS: pip install nats-py")

from nats.js.errors import NotFoundError  # noqa: E402
from up_transport_nats import mapping  # noqa: E402
from up_transport_nats.transport import PLUGIN, NatsConfig, NatsTransport  # noqa: E402

from transports.conformance import ALPHA, BETA, Sink, TcpProxy, TransportConformance  # noqa: E402
from transports.conformance.addresses import AddressConformance  # noqa: E402
from transports.conformance.messages import GAMMA  # noqa: E402
from transports.conformance.sinks import Changes  # noqa: E402
from uprotocol import uri as uris  # noqa: E402
from uprotocol.message import UMessageBuilder, UPayload  # noqa: E402
from uprotocol.status import UStatusError  # noqa: E402
from uprotocol.transport import LocalUriProvider, UTransport  # noqa: E402
from uprotocol.v1.uattributes_pb2 import UPayloadFormat  # noqa: E402
from uprotocol.v1.ucode_pb2 import UCode  # noqa: E402
from uprotocol.v1.umessage_pb2 import UMessage  # noqa: E402
from uprotocol.v1.uri_pb2 import UUri  # noqa: E402

SERVER = shutil.which("nats-server")
pytestmark = pytest.mark.skipif(SERVER is None, reason="needs a nats-server on the PATH: apt-get install nats-server")

START_S_MAX = 30
SOURCE, SINK = uris.uri(ALPHA, 0x8001, 1, 0x8001), uris.uri(BETA, 1, 1, 0)

networks = itertools.count()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def serve(folder: Path, *lines: str, jetstream: bool = True) -> Iterator[int]:
    """A server on a port of its own; `lines` are added to its configuration."""
    assert SERVER is not None
    port, log = free_port(), folder / "nats.log"
    config = [f"listen: 127.0.0.1:{port}", f'log_file: "{log}"', f'pid_file: "{folder}/nats.pid"', *lines]
    config += [f'jetstream {{ store_dir: "{folder}/js" }}'] if jetstream else []
    (folder / "nats.conf").write_text("\n".join(config))
    process = subprocess.Popen([SERVER, "-c", str(folder / "nats.conf")])
    try:
        give_up_at = time.monotonic() + START_S_MAX
        while not log.exists() or "Server is ready" not in log.read_text():
            assert process.poll() is None, log.read_text() if log.exists() else "it ended at once"
            assert time.monotonic() < give_up_at, "the server does not get ready"
            time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="session")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with serve(tmp_path_factory.mktemp("nats")) as port:
        yield port


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server that asks who we are; `deaf` may make no consumer."""
    may = 'publish: { deny: ["$JS.API.CONSUMER.>"] }'
    users = f'{{ user: "good", password: "right" }}, {{ user: "deaf", password: "right", permissions: {{ {may} }} }}'
    with serve(tmp_path_factory.mktemp("guarded"), f"authorization {{ users: [ {users} ] }}") as port:
        yield port


class OnNats:
    """The ends of a test: on a stream of its own, each with a link of its own."""

    @pytest_asyncio.fixture(autouse=True)
    async def _network(self, port: int) -> AsyncIterator[None]:
        self.port, self.network = port, f"test{next(networks)}"
        self.proxies = {authority: TcpProxy("127.0.0.1", port) for authority in (ALPHA, BETA, "gamma")}
        for proxy in self.proxies.values():
            await proxy.start()
        self.client = await nats.connect(f"nats://127.0.0.1:{port}")
        yield
        with contextlib.suppress(NotFoundError):
            await self.client.jetstream().delete_stream(self.network)
        await self.client.close()
        for proxy in self.proxies.values():
            await proxy.stop()

    def settings(self, authority: str, **more: Any) -> dict[str, Any]:
        port = self.proxies[authority].port if authority in self.proxies else self.port
        return {
            "servers": [f"nats://127.0.0.1:{port}"],
            "network": self.network,
            "stream_in_memory": True,
            "ack_wait_s": 3,
        } | more

    def end(self, authority: str, **more: Any) -> NatsTransport:
        return NatsTransport(NatsConfig(**self.settings(authority, **more)), LocalUriProvider(authority, 0x10AB, 3))


class TestNats(OnNats, TransportConformance):
    capabilities = PLUGIN.capabilities
    payload_bytes_max = 1 << 19
    slows_senders = False  # the stream keeps what a slow end has not taken, up to stream_mib_max

    async def make_end(self, authority: str, **limits: int) -> UTransport:
        return self.end(authority, **limits)

    async def make_unreachable(self, authority: str) -> UTransport:
        return self.end(authority, servers=[f"nats://127.0.0.1:{free_port()}"])

    async def make_refused(self, authority: str) -> UTransport:
        guarded = self.guarded
        return self.end(authority, servers=[f"nats://127.0.0.1:{guarded}"], user="good", password="wrong")

    async def make_deaf(self, authority: str) -> UTransport:  # prose: ok
        return self.end(authority, servers=[f"nats://127.0.0.1:{self.guarded}"], user="deaf", password="right")

    @pytest.fixture(autouse=True)
    def _guarded(self, guarded: int) -> None:
        self.guarded = guarded

    def normalise(self, message: UMessage) -> UMessage:
        return message  # whole messages travel, so nothing is lost

    async def inject(self, message: UMessage) -> None:
        await self.put(
            message.attributes.source, message.attributes.sink, mapping.pack(message), mapping.route(message, ALPHA)
        )

    async def inject_malformed(self, source: UUri, sink: UUri) -> int:
        whole = mapping.pack(UMessage())
        bad = [b"", b"\xff" * 20, b"\x05\x0a", b"\x02\xff\xff", whole]
        for payload in bad:
            await self.put(source, sink, payload)
        return len(bad)

    async def inject_misplaced(self, message: UMessage, authority: str) -> None:
        source = UUri()
        source.CopyFrom(message.attributes.source)
        source.authority_name = authority
        await self.put(source, message.attributes.sink, mapping.pack(message))

    async def make_returning(self, authority: str) -> UTransport:
        return self.end(authority, session=authority)

    async def forget_network(self, authority: str) -> None:
        """The server ends the session of an end that was away for too long."""
        stream = self.client.jetstream()
        for consumer in await stream.consumers_info(self.network):
            await stream.delete_consumer(self.network, consumer.name)

    async def put(self, source: UUri, sink: UUri, payload: bytes, route: str = "") -> None:
        route = route or mapping.filter_route(source, sink, ALPHA)
        await self.client.jetstream().publish(f"{self.network}.{route}.stranger", payload)

    async def break_network(self, authority: str) -> None:
        self.proxies[authority].cut()

    async def heal_network(self, authority: str) -> None:
        self.proxies[authority].mend()

    def peer_process(self, authority: str) -> tuple[str, dict[str, Any]]:
        return "up_transport_nats.transport:PLUGIN", self.settings(authority)


def may(denied: dict[str, list[str]]) -> str:
    """All users may publish to all subjects, except these users to these subjects. The default user is admin."""
    users = ['{ user: admin, password: "right" }']
    for user in (ALPHA, BETA, GAMMA):
        subjects = ", ".join(f'"{subject}"' for subject in ["nowhere", *denied[user]])
        rule = f"permissions: {{ publish: {{ deny: [{subjects}] }} }}"
        users.append(f'{{ user: {user}, password: "right", {rule} }}')
    return f"authorization {{ users: [ {', '.join(users)} ] }}"


@pytest.fixture(scope="session")
def ruled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A server, and its folder, whose permissions are changed while it runs."""
    folder = tmp_path_factory.mktemp("ruled")
    with serve(folder, "no_auth_user: admin", may(defaultdict(list))) as port:
        yield folder, port


class TestAddressesOnNats(OnNats, AddressConformance):
    """Each end is a user of its own."""

    capabilities = PLUGIN.capabilities

    @pytest.fixture
    def port(self, ruled: tuple[Path, int]) -> int:
        self.folder, port = ruled
        self.denied: dict[str, list[str]] = defaultdict(list)
        return port

    async def make_end(self, authority: str, **limits: int) -> UTransport:
        return self.end(authority, user=authority, password="right", **limits)

    async def refuse_address(self, authority: str, source: UUri, sink: UUri | None) -> None:
        self.denied[authority].append(f"{self.network}.{mapping.address_route(source, sink, authority)}.*")
        await self.apply()

    async def allow_addresses(self, authority: str) -> None:
        del self.denied[authority]
        await self.apply()

    async def apply(self) -> None:
        """The server reads its configuration again; its connections stay."""
        config, log = self.folder / "nats.conf", self.folder / "nats.log"
        lines = config.read_text().splitlines()
        config.write_text("\n".join(may(self.denied) if one.startswith("authorization") else one for one in lines))
        before = log.read_text().count("Reloaded server configuration")
        os.kill(int((self.folder / "nats.pid").read_text()), signal.SIGHUP)
        await self.eventually(
            lambda: log.read_text().count("Reloaded server configuration") > before, "a server with other permissions"
        )


def notification(payload: bytes, source: UUri = SOURCE, sink: UUri = SINK) -> UMessage:
    return UMessageBuilder.notification(source, sink).build_from_upayload(
        UPayload(payload, UPayloadFormat.UPAYLOAD_FORMAT_RAW)
    )


def numbers(count: int, start: int = 0, size: int = 0) -> list[UMessage]:
    return [notification(b"%d" % number + bytes(size)) for number in range(start, start + count)]


async def sent(end: NatsTransport, messages: list[UMessage]) -> None:
    assert {status.code for status in await end.send_batch(messages)} <= {UCode.OK}


class TestOfNatsAlone(OnNats):
    pytestmark = pytest.mark.asyncio

    @pytest_asyncio.fixture
    async def alpha(self) -> AsyncIterator[NatsTransport]:
        async with self.end(ALPHA) as end:
            yield end

    async def test_what_came_while_no_process_of_ours_ran_waits_for_the_next_one(self, alpha: NatsTransport) -> None:
        async with self.end(BETA, session="beta") as beta:
            await beta.register_listener(SOURCE, Sink(10), SINK)
        await sent(alpha, numbers(500))
        heard = Sink(10)
        async with self.end(BETA, session="beta") as beta:
            await beta.register_listener(SOURCE, heard, SINK)
            await heard.expect(500)
        assert heard.payloads == [b"%d" % number for number in range(500)]

    async def test_what_was_not_acknowledged_in_time_for_a_crash_comes_again_and_first(
        self, alpha: NatsTransport
    ) -> None:
        held = Held(10)
        beta = self.end(BETA, session="beta")
        await beta.open()
        await beta.register_listener(SOURCE, held, SINK)
        await sent(alpha, numbers(10))
        await held.expect(10)
        self.proxies[BETA].cut()  # as a crash: no acknowledgement passes
        closing = asyncio.ensure_future(beta.close())
        await sent(alpha, numbers(10, 10))
        await closing
        self.proxies[BETA].mend()
        heard = Sink(10)
        async with self.end(BETA, session="beta") as again:
            await again.register_listener(SOURCE, heard, SINK)
            await heard.expect(20)
        assert heard.payloads == [b"%d" % number for number in range(20)]

    async def test_a_full_stream_slows_the_sender_is_reported_and_recovers(self) -> None:
        held = Held(10)
        settings: dict[str, Any] = {"stream_mib_max": 1, "full_wait_s": 0.3}
        async with self.end(ALPHA, **settings) as alpha, self.end(BETA, **settings) as beta:
            await beta.register_listener(SOURCE, held, SINK)
            statuses = await alpha.send_batch(numbers(30, size=60_000))
            codes = [status.code for status in statuses]
            taken = codes.count(UCode.OK)
            assert codes == [UCode.OK] * taken + [UCode.UNAVAILABLE] * (30 - taken)
            assert 10 < taken < 20
            assert "too slow" in statuses[taken].message
            (trouble,) = alpha.troubles
            assert self.network in trouble
            held.gate.set()
            await sent(alpha, numbers(30 - taken, taken, size=60_000))
            assert alpha.troubles == []
            await held.expect(30)
            assert [int(payload.rstrip(b"\0")) for payload in held.payloads] == list(range(30))

    async def test_a_session_that_the_server_has_ended_is_a_loss(self, alpha: NatsTransport) -> None:
        losses: list[tuple[str, int | None]] = []
        heard = Sink(10)
        beta = self.end(BETA)
        beta.on_loss(lambda text, messages: losses.append((text, messages)))
        changes = Changes(beta)
        async with beta:
            await beta.register_listener(SOURCE, heard, SINK)
            self.proxies[BETA].cut()
            await changes.until(False, 10)
            stream = self.client.jetstream()
            for consumer in await stream.consumers_info(self.network):
                await stream.delete_consumer(self.network, consumer.name)
            await sent(alpha, numbers(1))
            self.proxies[BETA].mend()
            await changes.until(True, 10)  # it has asked the server for its listeners before
            await sent(alpha, numbers(1, 7))
            await heard.expect_payload(b"7")
        ((text, messages),) = losses
        assert "has ended our session" in text
        assert messages is None

    async def test_an_authority_that_was_left_out_is_the_senders(self, alpha: NatsTransport) -> None:
        heard = Sink(10)
        async with self.end(BETA) as beta:
            await beta.register_listener(uris.ANY, heard, uris.ANY)
            nobody = uris.uri("", 0x8001, 1, 0x8001)
            await sent(
                alpha,
                [
                    notification(b"to us", nobody, uris.uri(BETA, 1, 1, 0)),
                    notification(b"at home", nobody, uris.uri("", 1, 1, 0)),
                ],
            )
            first, second = await heard.expect(2)
        assert first.attributes.source.authority_name == second.attributes.source.authority_name == ALPHA
        assert first.attributes.sink.authority_name == BETA
        assert second.attributes.sink.authority_name == ALPHA

    async def test_what_is_on_a_subject_of_somebody_else_is_dropped(self, alpha: NatsTransport) -> None:
        heard = Sink(10)
        async with self.end(BETA) as beta:
            await beta.register_listener(uris.ANY, heard, uris.ANY)
            there = mapping.route(notification(b"", uris.uri("mallory", 0x8001, 1, 0x8001)), "")
            await self.client.jetstream().publish(
                f"{self.network}.{there}.mallory", mapping.pack(notification(b"spoofed"))
            )
            await sent(alpha, numbers(1))
            await heard.expect_payload(b"0")
            assert heard.payloads == [b"0"]
            assert beta.dropped == {"spoofed": 1}

    async def test_small_messages_travel_together_and_none_is_too_large_for_a_packet(
        self, alpha: NatsTransport
    ) -> None:
        heard = Sink(10)
        async with self.end(BETA) as beta:
            await beta.register_listener(SOURCE, heard, SINK)
            await sent(alpha, numbers(2_000))
            await heard.expect(2_000)
            assert (await self.client.jetstream().stream_info(self.network)).state.last_seq < 20
            largest = notification(bytes(self.client.max_payload - 400))
            await sent(alpha, [largest])
            (status,) = await alpha.send_batch([notification(bytes(self.client.max_payload))])
        assert status.code == UCode.INVALID_ARGUMENT
        assert "max_payload" in status.message

    async def test_no_consumer_is_left_for_a_filter_that_nobody_needs(self) -> None:
        async with self.end(BETA) as beta:
            heard = Sink(10)
            for resource in range(0x8000, 0x8010):
                await beta.register_listener(uris.uri(ALPHA, 1, 1, resource), heard, SINK)
            assert len(await self.client.jetstream().consumers_info(self.network)) == 16
            for resource in range(0x8000, 0x8010):
                await beta.unregister_listener(uris.uri(ALPHA, 1, 1, resource), heard, SINK)
            assert await self.client.jetstream().consumers_info(self.network) == []

    async def test_no_consumer_is_left_by_an_end_without_a_session(self) -> None:
        stream = self.client.jetstream()
        for more, left in (({}, 0), ({"session": "beta"}, 1)):
            async with self.end(BETA, **more) as beta:
                await beta.register_listener(SOURCE, Sink(10), SINK)
                assert len(await stream.consumers_info(self.network)) == 1
            assert len(await stream.consumers_info(self.network)) == left

    async def test_the_permissions_of_the_readme_are_enough_and_not_more(self, tmp_path: Path) -> None:
        readme = (Path(__file__).parents[1] / "README.md").read_text()
        (block,) = re.findall(r"^    authorization.*?^$", readme, re.MULTILINE | re.DOTALL)
        with_admin = block.replace("users: [", 'users: [ { user: admin, password: "..." },')
        with serve(tmp_path, with_admin) as port:
            common: dict[str, Any] = {"servers": [f"nats://127.0.0.1:{port}"], "network": "up", "password": "..."}
            async with (
                self.end(ALPHA, **common, user="admin") as admin,
                self.end("vehicle1", **common, user="vehicle1") as vehicle,
            ):
                there, back = Sink(10), Sink(10)
                topic, home = uris.uri("vehicle1", 0x8001, 1, 0x8001), uris.uri("vehicle1", 1, 1, 0)
                await admin.register_listener(topic, there)
                await vehicle.register_listener(SOURCE, back, home)
                publish = UMessageBuilder.publish(topic).build()
                await sent(vehicle, [publish])
                await there.expect(1)
                await sent(admin, [notification(b"back", SOURCE, home)])
                await back.expect_payload(b"back")
                statuses = await vehicle.send_batch([publish, notification(b"as somebody else", SOURCE, SINK), publish])
                assert [status.code for status in statuses] == [UCode.OK, UCode.PERMISSION_DENIED, UCode.OK]
                await there.expect(3)
                await vehicle.unregister_listener(SOURCE, back, home)

    async def test_a_server_without_jetstream_says_what_to_do(self, tmp_path: Path) -> None:
        with serve(tmp_path, jetstream=False) as port:
            end = self.end(ALPHA, servers=[f"nats://127.0.0.1:{port}"])
            with pytest.raises(UStatusError) as raised:
                await end.open()
        assert raised.value.code == UCode.UNAVAILABLE
        assert "start it with -js" in raised.value.message

    @pytest.mark.parametrize(
        "server", ["nats://no such host:1", "nats://[::", "nats://a..b:1", "nats://127.0.0.1:port", "nats://"]
    )
    async def test_a_server_that_can_not_be_is_an_error_of_ours(self, server: str) -> None:
        end = self.end(ALPHA, servers=[server], connect_timeout_s=2)
        with pytest.raises(UStatusError) as raised:
            await end.open()
        assert raised.value.code in (UCode.INVALID_ARGUMENT, UCode.UNAVAILABLE)


class Held(Sink):
    """Takes nothing until its gate opens."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self.gate = asyncio.Event()

    def on_receive(self, message: UMessage) -> Awaitable[None]:
        super().on_receive(message)
        return self._take()

    async def _take(self) -> None:
        await self.gate.wait()
