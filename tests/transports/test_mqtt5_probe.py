"""What a probe says of a broker, and that nobody notices it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.transports.mqtt5_answering import serving
from tests.transports.mqtt5_scripted import Knobs, Overlap, ScriptedBroker
from tools.broker import Broker
from transports.conformance import Sink
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, packets
from transports.mqtt5.connection import Connection
from transports.mqtt5.link import Link
from transports.mqtt5.probe import ProbeSession
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider, ProbeRequest

TO_US = (uris.ANY, uris.pattern("vin1"))
TO_BACKEND = (uris.parse("//vin1/4/1/8001"), attrs.streamer_sink("backend"))
NEEDED = ProbeRequest([TO_US], [TO_BACKEND])
ACL = "pattern write %u/+\npattern read +/%u\nuser all\ntopic readwrite #\n"
USERS = {"vin1": "secret", "all": "secret"}


def transport(port: int, **settings: object) -> Mqtt5Transport:
    given = {"port": port, "mode": "off-vehicle", "connect_timeout_ms": 1_000, **settings}
    return Mqtt5Transport(Mqtt5Config.model_validate(given), LocalUriProvider("vin1", 4, 1))


async def probed(made: Mqtt5Transport, asked: ProbeRequest = NEEDED) -> list[str]:
    return [f"{one.verdict} {one.what}" async for one in made.probe(asked)]


def has(lines: Sequence[str], beginning: str) -> str:
    """The line that begins so; it must be there."""
    found = [line for line in lines if line.startswith(beginning)]
    assert found, lines
    return found[0]


async def monitor(port: int, *filters: str, **settings: object) -> ProbeSession:
    """A client that keeps all payloads that arrive."""
    config = Mqtt5Config.model_validate({"port": port, **settings})
    link = Link(config, LocalUriProvider("monitor", 4, 1), _Nothing())
    session = ProbeSession(1 << 20, 30)
    await link.dial(session, None)
    password = config.password.get_secret_value() if config.password is not None else None
    await link.log_in(session, packets.connect(config, "monitor", password, clean_start=True, packet_bytes_max=1 << 20))
    for one in filters:
        await session.subscribe(one)
    return session


class _Nothing:
    def welcomed(self, _: object) -> None: ...
    def on_publishes(self, _: object) -> None: ...
    def on_pubacks(self, *_: object) -> None: ...
    async def up(self, connection: Connection, _: object) -> None: ...
    def down(self, _: str) -> None: ...
    def tick(self, _: float) -> None: ...


async def test_an_open_broker_allows_everything(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker()
    seen = await monitor(broker.port, "+/backend", "backend/+")
    lines = await probed(transport(broker.port))
    assert has(lines, "ok login without a user name")
    assert has(lines, "ok the broker announces receive maximum 65535, maximum packet size none")
    assert has(lines, "ok a message that two of our filters match comes once for each")
    assert lines[-3:] == ["ok may subscribe to +/vin1", "ok may read +/vin1", "ok may write vin1/backend"]
    assert not [line for line in lines if not line.startswith("ok")]
    assert seen.payloads == []
    seen.leave(keeps_session=False)


async def test_rules_of_a_broker_are_found_without_a_message(make_broker: Callable[..., Broker]) -> None:
    acl = "user vin1\ntopic write vin1/elsewhere\ntopic write other/+\nuser all\ntopic readwrite #\n"
    broker = make_broker(users=USERS, acl=acl)
    seen = await monitor(broker.port, "#", username="all", password="secret")
    others = [(uris.parse(f"//{name}/4/1/8001"), attrs.streamer_sink("backend")) for name in ("other", "vin1")]
    lines = await probed(transport(broker.port, username="vin1", password="secret"), ProbeRequest([TO_US], others))
    # who listens to everything prevents the proof that a message of QoS 2 waits
    assert has(lines, "? whether we may write other/backend, vin1/backend: a message would arrive there")
    assert set(seen.payloads) == {b"passed"}
    seen.leave(keeps_session=False)
    lines = await probed(transport(broker.port, username="vin1", password="secret"), ProbeRequest([TO_US], others))
    assert "FAIL may not write vin1/backend (Not authorized)" in lines
    assert "ok may write other/backend" in lines


async def test_a_filter_that_is_granted_and_not_delivered(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker(users=USERS, acl="user vin1\ntopic write vin1/+\n")
    lines = await probed(transport(broker.port, username="vin1", password="secret"))
    assert "ok may subscribe to +/vin1" in lines
    assert "ok may write vin1/backend" in lines
    assert has(lines, "FAIL may not read +/vin1: the broker grants the filter, and does not deliver")


async def test_a_running_streamer_is_not_disturbed(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker(users=USERS, acl=ACL)
    gateway, heard = transport(broker.port, username="vin1", password="secret", client_id="vin1"), Sink(20)
    changes: list[bool] = []
    async with gateway:
        await gateway.register_listener(*TO_US[:1], heard, TO_US[1])
        gateway.on_connection(changes.append)
        seen = await monitor(broker.port, "+/vin1", "+/backend", username="all", password="secret")
        asked = ProbeRequest([TO_US], [TO_BACKEND], is_running=True, is_connected=True, take_over=True)
        for _ in range(5):
            lines = await probed(transport(broker.port, username="vin1", password="secret", client_id="vin1"), asked)
        assert lines[-1] == "ok client_id vin1 is held by the running streamer"
        assert has(lines, "? whether the broker delivers +/vin1")
        assert "ok may write vin1/backend" in lines
        assert (seen.payloads, heard.messages, changes, dict(gateway.dropped)) == ([], [], [], {})
        seen.leave(keeps_session=False)


async def test_our_client_id_is_tried_only_if_asked(make_broker: Callable[..., Broker]) -> None:
    broker, named = make_broker(), {"client_id": "vin1-gateway", "session_expiry_s": 300}
    first = transport(broker.port, **named)
    assert has(await probed(first), "? whether client_id vin1-gateway is in use")
    asked = ProbeRequest(take_over=True)
    lines = await probed(transport(broker.port, **named), asked)
    assert "ok client_id vin1-gateway is free, and the broker has no session for it yet" in lines
    async with first:
        lines = await probed(transport(broker.port, **named), asked)
    assert has(lines, "FAIL client_id vin1-gateway seems to be in use (it hung up): ")


async def test_what_waits_in_our_session_stays_there(make_broker: Callable[..., Broker]) -> None:
    broker, named = make_broker(persistent=True), {"client_id": "vin1-gateway", "session_expiry_s": 300}
    first, heard = transport(broker.port, **named), Sink(20)
    async with first:
        await first.register_listener(uris.ANY, heard, uris.pattern("vin1"))
    backend = Mqtt5Transport(
        Mqtt5Config.model_validate({"port": broker.port, "mode": "off-vehicle"}), LocalUriProvider("backend", 4, 1)
    )
    async with backend:
        for number in range(50):
            topic, sink = uris.parse("//backend/8001/1/8001"), attrs.streamer_sink("vin1")
            message = UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"%d" % number, 6))
            message.attributes.sink.CopyFrom(sink)
            await backend.send(message)
    lines = await probed(transport(broker.port, **named), ProbeRequest([TO_US], [TO_BACKEND], take_over=True))
    assert "ok client_id vin1-gateway is free, and the broker has a session for it" in lines
    again = transport(broker.port, **named)
    again.register_before_open([(uris.ANY, uris.pattern("vin1"))], heard)
    async with again:
        await heard.until(lambda: len(heard.messages) >= 50, "what was sent meanwhile")
    assert [one.payload for one in heard.messages] == [b"%d" % number for number in range(50)]


# What no real broker here does


async def probed_at(knobs: Knobs, asked: ProbeRequest = NEEDED, **settings: object) -> tuple[ScriptedBroker, list[str]]:
    async with serving(ScriptedBroker(knobs)) as broker:
        return broker, await probed(transport(broker.port, **settings), asked)


async def test_a_broker_that_passes_on_at_once_gets_no_message_at_the_real_topic() -> None:
    broker, lines = await probed_at(Knobs(waits_for_release=False))
    assert has(lines, "? whether we may write vin1/backend: a message would arrive there")
    assert not broker.heard["vin1/backend"]


async def test_a_broker_without_qos_2_is_sent_none() -> None:
    broker, lines = await probed_at(Knobs(announces={"MaximumQoS": 1}))
    assert has(lines, "? whether we may write vin1/backend").endswith("the broker takes no QoS 2")
    assert b"held" not in broker.heard_payloads


async def test_copies_of_overlapping_filters() -> None:
    _, lines = await probed_at(Knobs(overlap=Overlap.EACH_NO_ID))
    assert "ok a message that two of our filters match comes once for each" in lines
    assert "ok may write vin1/backend" in lines


async def test_a_filter_that_is_refused() -> None:
    _, lines = await probed_at(Knobs(suback=lambda one: (0x87, "ask Ann") if one == "+/vin1" else (0, "")))
    assert "FAIL may not subscribe to +/vin1 (Not authorized (ask Ann))" in lines


async def test_a_broker_that_hangs_up_at_a_filter() -> None:
    _, lines = await probed_at(Knobs(disconnects_on="+/vin1"))
    assert has(lines, "FAIL may not subscribe to +/vin1: the broker ends the connection")
    assert "ok may write vin1/backend" in lines


async def test_a_broker_that_lets_us_have_one_session() -> None:
    class OneLogin(ScriptedBroker):
        def _on_connect(self, connection: Any, body: bytes) -> None:
            super()._on_connect(connection, body)
            self.knobs.connack = (0x97, "")

    async with serving(OneLogin()) as broker:
        lines = await probed(transport(broker.port))
    assert has(lines, "? what we may do: the broker does not let our login have two sessions").endswith("exceeded)")


async def test_a_broker_that_names_all_sessions_of_a_user_alike(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker(users=USERS, settings=["use_username_as_clientid true"])
    lines = await probed(transport(broker.port, username="vin1", password="secret"))
    assert has(lines, "? what we may do: the broker does not let our login have two sessions")
    assert not [line for line in lines if line.startswith("FAIL")]


async def test_a_broker_that_hangs_up_at_a_topic_of_the_check() -> None:
    broker, lines = await probed_at(Knobs(topic_bytes_max=15))
    assert has(lines, "? how often a message comes that two of our filters match: the connection ends")
    assert "ok may subscribe to +/vin1" in lines
    assert "ok may write vin1/backend" in lines
    assert broker.heard_payloads[b"+/vin1"] == 1  # which has shown that one of QoS 2 waits
    _, lines = await probed_at(Knobs(topic_bytes_max=8))
    assert has(lines, "? whether the broker delivers what it grants: the connection ends")
    assert has(lines, "? whether we may write vin1/backend")


async def test_a_broker_that_hangs_up_at_a_topic() -> None:
    topics = [(uris.parse(f"//{name}/4/1/8001"), attrs.streamer_sink("backend")) for name in ("vin1", "v" * 60)]
    _, lines = await probed_at(Knobs(topic_bytes_max=40), ProbeRequest([], topics))
    assert has(lines, "FAIL may not write vvvv").endswith("Topic name invalid)")
    assert "ok may write vin1/backend" in lines


async def test_many_topics_take_several_sessions() -> None:
    topics = [(uris.parse(f"//v{number}/4/1/8001"), attrs.streamer_sink("backend")) for number in range(25)]
    broker, lines = await probed_at(Knobs(), ProbeRequest([], topics))
    assert lines[-1] == f"ok may write {', '.join(f'v{number}/backend' for number in range(25))}"
    assert broker.connections == 5  # the first, the reader, three writers


@pytest.mark.parametrize(
    ("announced", "settings", "said"),
    [
        ({"MaximumQoS": 0}, {}, "FAIL the broker takes QoS 0 only"),
        ({"MaximumPacketSize": 131_072}, {}, "FAIL the broker takes packets of 131072 bytes at most"),
        ({"SessionExpiryInterval": 0}, {}, "FAIL the broker keeps no session"),
        ({"SessionExpiryInterval": 60}, {"session_expiry_s": 300}, "ok the broker announces"),
    ],
)
async def test_what_is_announced(announced: dict[str, int], settings: dict[str, int], said: str) -> None:
    _, lines = await probed_at(Knobs(announces=announced), **settings)
    assert has(lines, said)
    if announced.get("SessionExpiryInterval"):
        assert "a session of 60 s" in has(lines, said)


async def test_a_login_that_may_be_refused_for_its_client_id() -> None:
    refusal = Knobs(connack=(0x87, ""))
    _, lines = await probed_at(refusal, username="vin1", password="secret")
    assert has(lines, "FAIL login as vin1: Not authorized; the check has the client_id up-streamer-check-")
    _, lines = await probed_at(refusal, ProbeRequest(is_running=True, is_connected=True), username="vin1")
    assert has(lines, "? what we may do: login as vin1: Not authorized").endswith("The running streamer is connected")
    _, lines = await probed_at(Knobs(connack=(0x86, "")), username="vin1", password="secret")
    assert "FAIL login as vin1: Bad user name or password" in lines


async def test_a_probe_leaves_no_session() -> None:
    broker, _ = await probed_at(Knobs(), client_id="gateway", session_expiry_s=4_294_967_295)
    assert broker.connections == 3
    assert not any(session.filters for session in broker.sessions.values() if session.expiry_s)


async def test_a_broker_that_says_who_has_taken_our_session() -> None:
    async with serving(ScriptedBroker()) as broker, transport(broker.port, client_id="vin1"):
        lines = await probed(transport(broker.port, client_id="vin1"), ProbeRequest(take_over=True))
    assert "FAIL client_id vin1 is in use: does another gateway log in with it?" in lines


async def test_a_probe_that_is_ended_closes_its_connections() -> None:
    async with serving(ScriptedBroker(Knobs(answers_connect=False))) as broker:
        made = transport(broker.port, connect_timeout_ms=60_000)
        task = asyncio.create_task(probed(made))
        await broker.until(lambda: broker.connections == 1)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
