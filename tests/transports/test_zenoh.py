"""Zenoh: the conformance suite over TCP on loopback, the mapping against the specification's own examples, and the
connection."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import zenoh
from hypothesis import given
from hypothesis import strategies as st

from tests.transports import zenoh_attachments
from transports import plugin
from transports.conformance import ALPHA, BETA, Sink, TcpProxy, TransportConformance
from transports.conformance.messages import (
    GAMMA,
    PROBE,
    notification,
    publish,
    reply,
    request,
    response,
    streamed,
    topic,
)
from transports.ports import free_port
from transports.zenoh import PLUGIN, ZenohConfig, ZenohTransport, mapping
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, LocalUriProvider, UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

BEFORE = {ALPHA: [], BETA: [ALPHA], GAMMA: [ALPHA, BETA]}  # to whom an end connects


class TestZenoh(TransportConformance):
    """beta connects to alpha, and gamma to both, through proxies that can be cut. Messages that our transport would not
    send come from a plain Zenoh session."""

    capabilities = (
        Capability.PUSH
        | Capability.WILDCARD_SOURCE
        | Capability.PUBLISH_WITHOUT_SINK
        | Capability.ENCODED
        | Capability.ABSENCE
    )
    discovery = True
    routes_streamed_publish = False
    # a receiver holds 32,768, and the sockets of two hops up to 20 MiB each (tcp_rmem, tcp_wmem)
    flood_messages = 90_000

    @pytest_asyncio.fixture(autouse=True)
    async def _network(self) -> AsyncIterator[None]:
        self.ports = {authority: free_port() for authority in (ALPHA, BETA, GAMMA)}
        self.raw: zenoh.Session | None = None
        self.proxies = {authority: TcpProxy("127.0.0.1", self.ports[authority]) for authority in (ALPHA, BETA)}
        for proxy in self.proxies.values():
            await proxy.start()
        yield
        for proxy in self.proxies.values():
            await proxy.stop()
        if self.raw is not None:
            self.raw.close()

    async def make_end(self, authority: str, **limits: int) -> UTransport:
        where: dict[str, list[str]] = {"listen": [f"tcp/127.0.0.1:{self.ports[authority]}"]}
        if not limits:  # those with limits are alone
            where["connect"] = [f"tcp/127.0.0.1:{self.proxies[other].port}" for other in BEFORE[authority]]
        no_gossip = {"scouting/gossip/enabled": False}  # or alpha would find beta's port, and pass the proxy by
        return ZenohTransport(
            ZenohConfig(**where, **limits, settings=no_gossip, connect_timeout_ms=20_000),
            LocalUriProvider(authority, 0x10AB, 3),
        )

    async def break_network(self, authority: str) -> None:
        for proxy in self.proxies.values():
            proxy.cut()

    async def heal_network(self, authority: str) -> None:
        for proxy in self.proxies.values():
            proxy.mend()

    async def forget_network(self, authority: str) -> None:
        """The network keeps nothing of an end that is away."""

    async def make_unreachable(self, authority: str) -> UTransport:
        where = {"connect": ["tcp/127.0.0.1:1"], "connect_timeout_ms": 200}
        return ZenohTransport(ZenohConfig.model_validate(where), LocalUriProvider(authority, 0x10AB, 3))

    def peer_process(self, authority: str) -> tuple[str, dict[str, Any]]:
        return "transports.zenoh:PLUGIN", {"connect": [f"tcp/127.0.0.1:{self.ports[ALPHA]}"]}

    async def inject(self, message: UMessage) -> None:
        await self.put(mapping.message_key(message, ALPHA), message.payload, zenoh_attachments.encode(message))

    async def inject_malformed(self, source: UUri, sink: UUri) -> int:
        key = mapping.filter_key(source, sink, ALPHA)
        attachments = [
            None,
            b"",
            b"\x01",
            b"\x02" + bytes(20),
            b"\x01\xff\xff\xff",
            b"\x01" + bytes(3),
            bytes(range(256)),
        ]
        for attachment in attachments:
            await self.put(key, b"malformed", attachment)
        return len(attachments)

    async def inject_misplaced(self, message: UMessage, authority: str) -> None:
        elsewhere = UMessage()
        elsewhere.CopyFrom(message)
        elsewhere.attributes.source.authority_name = authority
        await self.put(mapping.message_key(elsewhere, ALPHA), message.payload, zenoh_attachments.encode(message))

    async def put(self, key: str, payload: bytes, attachment: bytes | None) -> None:
        """When beta's subscription is known."""
        if self.raw is None:
            self.raw = await asyncio.to_thread(
                zenoh.open, ZenohConfig(connect=[f"tcp/127.0.0.1:{self.ports[BETA]}"]).to_zenoh()
            )
        publisher = self.raw.declare_publisher(key)
        await self.eventually(lambda: publisher.matching_status, f"a subscriber for {key}")
        publisher.put(payload, attachment=attachment)


# The mapping, against the examples of the specification (zenoh.adoc); the local authority is device1.

KEYS = [
    ("up:/10AB/3/80CD", None, "up/device1/10AB/0/3/80CD/{}/{}/{}/{}/{}"),
    ("up://device1/10AB/3/80CD", "up://device2/300EF/4/0", "up/device1/10AB/0/3/80CD/device2/EF/3/4/0"),
    ("up:/403AB/3/0", "up://device2/CD/4/B", "up/device1/3AB/4/3/0/device2/CD/0/4/B"),
    ("up://device2/10AB/3/80CD", None, "up/device2/10AB/0/3/80CD/{}/{}/{}/{}/{}"),
    ("up://*/FFFFFFFF/FF/FFFF", "up:/300EF/4/0", "up/*/*/*/*/*/device1/EF/3/4/0"),
    ("up://*/FFFF05A1/2/FFFF", "up://device1/300EF/4/B18", "up/*/5A1/*/2/*/device1/EF/3/4/B18"),
    ("up://*/FFFF05A1/2/0", "up://device1/300EF/4/B18", "up/*/5A1/*/2/0/device1/EF/3/4/B18"),
    ("up://*/FFFFFFFF/FF/FFFF", "up://device1/FFFFFFFF/FF/FFFF", "up/*/*/*/*/*/device1/*/*/*/*"),
]


@pytest.mark.parametrize(("source", "sink", "key"), KEYS)
@pytest.mark.spec("local~l1-normalise")
@pytest.mark.spec("dsn~up-transport-zenoh-key-expr~1")
def test_key_expressions(source: str, sink: str | None, key: str) -> None:
    assert mapping.filter_key(uris.parse(source), uris.parse(sink) if sink else None, "device1") == key
    zenoh.KeyExpr(key)


@given(st.from_regex(r"\[v[0-9a-f]{1,2}\.[a-z0-9\-._~!$&'()*+,;=:]{1,20}\]", fullmatch=True))
def test_an_address_of_a_later_ip_version_is_a_plain_segment_or_refused(authority: str) -> None:
    address = uris.uri(authority, 1, 1, 0x8000)
    try:
        key = mapping.filter_key(address, None, "device1")
    except UStatusError as error:
        refused = error
    else:
        assert not zenoh.KeyExpr(key).intersects(mapping.filter_key(uris.uri("a", 1, 1, 0x8000), None, "device1"))
        assert key.split("/")[1] == authority
        return
    assert refused.code == UCode.INVALID_ARGUMENT
    assert set(authority) & set("*$")


@pytest.mark.spec("dsn~up-transport-zenoh-key-expr~1")
def test_a_publish_has_no_sink_in_its_key_not_even_a_streamers() -> None:
    expected = "up/alpha/10AB/3/4/9A01/{}/{}/{}/{}/{}"
    assert mapping.message_key(publish(), "x") == mapping.message_key(streamed(), "x") == expected


@pytest.mark.spec("dsn~up-transport-zenoh-protocol-version~1")
def test_zenoh_is_of_major_version_1() -> None:
    assert version("eclipse-zenoh").startswith("1.")


@pytest.mark.spec("dsn~up-transport-zenoh-message-priority-mapping~1")
@pytest.mark.spec("dsn~up-attributes-priority~1")
def test_priorities() -> None:
    names = ["BACKGROUND", "DATA_LOW", "DATA", "DATA_HIGH", "INTERACTIVE_LOW", "INTERACTIVE_HIGH", "REAL_TIME"]
    assert [mapping.PRIORITIES[number] for number in range(1, 8)] == names
    assert mapping.PRIORITIES[0] == "DATA_LOW"


numbers = st.integers(0, 2**32 - 1)
addresses = st.builds(
    UUri, authority_name=st.text(max_size=130), ue_id=numbers, ue_version_major=numbers, resource_id=numbers
)
ids = st.builds(UUID, msb=st.integers(0, 2**64 - 1), lsb=st.integers(0, 2**64 - 1))
attributes = st.builds(
    UAttributes,
    id=ids,
    type=st.integers(0, 4),
    source=addresses,
    sink=st.none() | addresses,
    priority=st.integers(0, 7),
    ttl=st.none() | numbers,
    permission_level=st.none() | numbers,
    commstatus=st.none() | st.integers(0, 16),
    reqid=st.none() | ids,
    token=st.none() | st.text(),
    traceparent=st.none() | st.text(),
    payload_format=st.integers(0, 8),
)


# The connection.


def end(**settings: Any) -> UTransport:
    return PLUGIN.create(ZenohConfig.model_validate(settings), LocalUriProvider("one", 0x10AB, 3))


async def failure(transport: UTransport) -> UStatusError:
    with pytest.raises(UStatusError) as raised:
        await transport.open()
    assert ".rs:" not in raised.value.message
    await transport.close()
    return raised.value


async def test_a_port_in_use_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        error = await failure(end(listen=[f"tcp/127.0.0.1:{taken.getsockname()[1]}"]))
    assert error.code == UCode.FAILED_PRECONDITION
    assert "in use" in error.message


async def test_nobody_there_is_unavailable() -> None:
    error = await failure(end(connect=["tcp/127.0.0.1:1"], connect_timeout_ms=200))
    assert error.code == UCode.UNAVAILABLE
    assert "127.0.0.1:1" in error.message


@pytest.mark.parametrize(
    "settings", [{"listen": ["nonsense"]}, {"listen": ["tcp/127.0.0.1:0"], "settings": {"no/such": 1}}]
)
async def test_what_zenoh_does_not_take_is_an_invalid_argument(settings: dict[str, Any]) -> None:
    assert (await failure(end(**settings))).code == UCode.INVALID_ARGUMENT


async def test_a_configuration_file_that_is_none(tmp_path: Path) -> None:
    broken = tmp_path / "zenoh.json5"
    broken.write_text("{ mode: ")
    assert (await failure(end(config_file=broken))).code == UCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "settings", [{}, {"connect": ["tcp/localhost:1"], "user": "me"}, {"listen": ["tcp/[::]:1"], "colour": "red"}]
)
def test_settings_that_do_not_go_together(settings: dict[str, Any]) -> None:
    with pytest.raises(UStatusError) as raised:
        plugin.create("zenoh", settings, LocalUriProvider("one", 1, 1))
    assert raised.value.code == UCode.INVALID_ARGUMENT


LEASE, BLOCK = "transport/link/tx/lease", "transport/link/tx/queue/congestion_control/block/wait_before_close"


@pytest.mark.parametrize(
    ("settings", "limit_ms"),
    [
        ({"stall_ms_max": 7_500}, 7_500),
        ({"stall_ms_max": 60_000}, 7_500),
        ({"settings": {LEASE: 4_000}}, 3_000),
        ({"settings": {LEASE: 4_000, "transport/link/tx/keep_alive": 2}, "stall_ms_max": 2_000}, 2_000),
        ({"settings": {BLOCK: 8_000_000}}, 7_500),
        ({"settings": {"transport/link/tx": {"lease": 4_000}}}, 3_000),
    ],
)
def test_a_wait_that_outlasts_the_lease_is_refused(settings: dict[str, Any], limit_ms: int) -> None:
    with pytest.raises(UStatusError, match=f"must be below {limit_ms}.*Lower stall_ms_max, or raise {LEASE}") as raised:
        plugin.create("zenoh", {"connect": ["tcp/localhost:1"]} | settings, LocalUriProvider("one", 1, 1))
    assert raised.value.code == UCode.INVALID_ARGUMENT


def test_a_wait_that_the_lease_allows() -> None:
    for settings in ({"stall_ms_max": 7_499}, {"stall_ms_max": 60_000, "settings": {LEASE: 90_000}}):
        plugin.create("zenoh", {"connect": ["tcp/localhost:1"]} | settings, LocalUriProvider("one", 1, 1))


def test_the_lease_of_a_configuration_file_counts(tmp_path: Path) -> None:
    base = tmp_path / "zenoh.json5"
    base.write_text("{ transport: { link: { tx: { lease: 20000 } } } }")
    config = ZenohConfig(config_file=base, stall_ms_max=14_000)
    config.to_zenoh()
    base.write_text("{ transport: { link: { tx: { lease: 10000 } } } }")  # since it was checked
    with pytest.raises(UStatusError, match="must be below 7500"):
        config.to_zenoh()
    with pytest.raises(ValueError, match="must be below 7500"):
        ZenohConfig(config_file=base, stall_ms_max=14_000)


def test_the_settings_reach_zenoh(tmp_path: Path) -> None:
    base = tmp_path / "zenoh.json5"
    base.write_text("{ transport: { link: { tx: { lease: 7000 } } } }")
    config = ZenohConfig.model_validate(
        {
            "connect": ["tls/127.0.0.1:7447"], "config_file": base, "user": "me", "password": "secret",
            "stall_ms_max": 5,
            "tls": {"root_ca": "ca.pem", "certificate": "me.pem", "private_key": "me.key", "mutual": True},
            "settings": {"transport/link/tx/keep_alive": 9},
        }
    )  # fmt: skip
    assert "secret" not in repr(config)
    made = config.to_zenoh()
    assert json.loads(made.get_json("transport/link/tx/lease")) == 7000
    assert json.loads(made.get_json("transport/link/tx/keep_alive")) == 9
    assert json.loads(made.get_json("transport/link/tx/queue/congestion_control/block/wait_before_close")) == 5_000
    assert json.loads(made.get_json("transport/link/tls/enable_mtls")) is True
    assert json.loads(made.get_json("transport/auth/usrpwd/user")) == "me"


@pytest_asyncio.fixture
async def two(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ZenohTransport, ZenohTransport]]:
    port = free_port()
    alpha = ZenohTransport(ZenohConfig(listen=(f"tcp/127.0.0.1:{port}",)), LocalUriProvider("alpha", 0x10AB, 3))
    beta = ZenohTransport(ZenohConfig(connect=(f"tcp/127.0.0.1:{port}",)), LocalUriProvider("beta", 0x10AB, 3))
    async with alpha, beta:
        yield alpha, beta


@given(attributes)
def test_a_call_is_known_by_its_bytes(attributes: UAttributes) -> None:
    """For messages with a valid id: others are invalid, and dropped with those."""
    attributes.id.CopyFrom(uuids.new())
    attachment = zenoh_attachments.encode(UMessage(attributes=attributes))
    assert mapping.is_call(attachment) is (attributes.type in (2, 3))


@pytest.mark.spec("dsn~up-transport-zenoh-message-type-mapping~1")
@pytest.mark.spec("dsn~up-transport-zenoh-message-priority-mapping~1")
@pytest.mark.spec("dsn~up-transport-zenoh-attributes-mapping~1")
@pytest.mark.spec("dsn~up-transport-zenoh-payload-mapping~1")
@pytest.mark.spec("dsn~up-transport-zenoh-key-expr~1")
async def test_what_anybody_else_on_zenoh_sees(two: tuple[ZenohTransport, ZenohTransport]) -> None:
    """All message types are publications, as a session without our transport receives them."""
    alpha, _ = two
    samples: list[zenoh.Sample] = []
    raw = await asyncio.to_thread(zenoh.open, ZenohConfig(connect=alpha._config.listen).to_zenoh())
    subscriber = raw.declare_subscriber("up/**", samples.append)
    while not samples:
        await alpha.send(notification(b"probe"))
        await asyncio.sleep(0.01)
    samples.clear()
    sent = [publish(b"p"), notification(b"n"), request(b"q"), response(b"r")]
    for message in sent:
        await alpha.send(message)
    while {b"p", b"n", b"q", b"r"} - {sample.payload.to_bytes() for sample in samples}:  # noqa: ASYNC110 - appended on a foreign thread
        await asyncio.sleep(0.01)
    seen = {sample.payload.to_bytes(): sample for sample in samples}
    for message in sent:
        sample = seen[message.payload]
        assert str(sample.key_expr) == mapping.message_key(message, "alpha")
        assert sample.attachment is not None
        assert sample.attachment.to_bytes() == b"\x01" + message.attributes.SerializeToString()
        assert sample.priority == (
            zenoh.Priority.INTERACTIVE_LOW if message.attributes.ttl else zenoh.Priority.DATA_LOW
        )
        assert sample.congestion_control == zenoh.CongestionControl.BLOCK
    subscriber.undeclare()
    raw.close()


async def test_an_authority_that_no_key_holds_costs_its_own_message_only(
    two: tuple[ZenohTransport, ZenohTransport],
) -> None:
    """Zenoh would refuse the put, and the batch would wait for it without end."""
    alpha, beta = two
    heard = Sink(20)
    await beta.register_listener(topic(), heard)
    starred = uris.parse("//[v1.a*]/10AB/4/9A01")
    with pytest.raises(UStatusError) as refused:
        await beta.register_listener(starred, heard)
    assert refused.value.code == UCode.INVALID_ARGUMENT
    with pytest.raises(UStatusError) as unknown:
        await beta.unregister_listener(starred, heard)
    assert unknown.value.code == UCode.NOT_FOUND, "what was refused is not registered"
    while not heard.probes:  # until alpha knows of beta's subscription
        await alpha.send(publish(PROBE))
        await asyncio.sleep(0.01)
    statuses = await alpha.send_batch([publish(b"1"), publish(b"2", starred), publish(b"3")])
    assert [status.code for status in statuses] == [UCode.OK, UCode.INVALID_ARGUMENT, UCode.OK]
    assert "[v1.a*]" in statuses[1].message
    await heard.expect_payload(b"3")
    assert b"2" not in heard.payloads


async def test_a_message_sent_twice_arrives_twice(two: tuple[ZenohTransport, ZenohTransport]) -> None:
    alpha, beta = two
    heard = Sink(10)
    await alpha.register_listener(topic("beta"), heard, reply("alpha"))
    while not heard.messages:
        await beta.send(notification(b"probe", topic("beta"), reply("alpha")))
        await asyncio.sleep(0.01)
    message = notification(b"again", topic("beta"), reply("alpha"))
    await beta.send_batch([message, message, notification(b"end", topic("beta"), reply("alpha"))])
    await heard.expect_payload(b"end")
    assert heard.payloads.count(b"again") == 2


async def test_a_login_that_is_refused(tmp_path: Path) -> None:
    credentials = tmp_path / "users"
    credentials.write_text("me:secret\n")
    port = free_port()
    async with end(listen=[f"tcp/127.0.0.1:{port}"], credentials_file=str(credentials), user="hub", password="x"):
        where = {"connect": [f"tcp/127.0.0.1:{port}"], "connect_timeout_ms": 500}
        assert (await failure(end(**where, user="me", password="wrong"))).code == UCode.UNAVAILABLE
        async with end(**{**where, "connect_timeout_ms": 10_000}, user="me", password="secret") as welcome:
            assert welcome.connected


async def test_what_nobody_wants_holds_up_nothing_for_long_after_the_first_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transports.zenoh.sender.SETTLE_S_MAX", 600.0)
    port = free_port()
    settings = ZenohConfig(connect=[f"tcp/127.0.0.1:{port}"], connect_timeout_ms=20_000)
    async with (
        ZenohTransport(ZenohConfig(listen=[f"tcp/127.0.0.1:{port}"]), LocalUriProvider("alpha", 0x10AB, 3)) as alpha,
        ZenohTransport(settings, LocalUriProvider("beta", 0x10AB, 3)) as beta,
    ):
        heard = Sink(30)
        await beta.register_listener(topic("alpha"), heard)
        wanted, unwanted = publish(source=topic("alpha")), publish(source=topic("alpha", 0x9A02))
        async with asyncio.timeout(60):
            assert not any(status.code for status in await alpha.send_batch([wanted, unwanted]))
        await heard.expect(1)
