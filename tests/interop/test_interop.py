"""Eclipse's Rust clients (up-rust, up-transport-zenoh, up-transport-mqtt5) and ours, with and without a gateway between
them.

Run by `make interop` alone. Each test is a cell of the table that is printed at the end, and of docs/interop.md. What
the other side can't do is shown to be so: a cell that is a limit fails when that changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.comparing import TRACEPARENT, TYPES, differences, profiles
from tests.interop.conftest import Cell
from tests.interop.parties import WAIT_S, Ear, Fields, Party, Refused, RustParty
from tests.interop.stage import (
    ECHO,
    FAILS,
    PROBE_S,
    PYTHON_ENTITY,
    TOPIC,
    Direct,
    Hall,
    Stage,
    addressed,
    arriving_sink,
    least,
)
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.message import UMessageBuilder
from uprotocol.v1.ucode_pb2 import UCode
from usubscription_client import Status

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.broker, pytest.mark.timeout(300, func_only=True)]

MakeCell = Callable[[str, str], Cell]

ROOT = Path(__file__).parents[2]
NETWORKS = ("zenoh", "mqtt-in", "mqtt-off")
CROSSINGS = tuple(itertools.permutations(NETWORKS, 2))
ROLES = (("rust", "python"), ("python", "rust"), ("rust", "rust"), ("nameless", "python"))
DIRECT_ROLES = (("rust", "python"), ("python", "rust"), ("nameless", "together"), ("together", "nameless"))
WORDS = {"rust": "rust", "python": "python", "nameless": "rust (no authority)", "together": "python (no authority)"}
CALL_MS = 30_000

REFUSES_SINK = (
    "up-rust 0.9 refuses every publish with a sink, as a streamer sets it off-vehicle "
    "(dsn~up-attributes-publish-sink~2)"
)


def through(crossing: tuple[str, str], roles: tuple[str, str]) -> str:
    return f"{crossing[0]} -> gateway -> {crossing[1]}, {WORDS[roles[0]]} -> {WORDS[roles[1]]}"


# -- messages: each of four types, each field
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("roles", ROLES, ids="-".join)
@pytest.mark.parametrize("crossing", CROSSINGS, ids="-".join)
async def test_message_over_gateway(
    stage: Stage, cell: MakeCell, crossing: tuple[str, str], roles: tuple[str, str], type: str
) -> None:
    noted = cell(through(crossing, roles), type)
    sender, receiver = stage.party(roles[0], crossing[0]), stage.party(roles[1], crossing[1])
    await crosses(stage, sender, receiver, type, noted, witness=stage.party("python", crossing[1]))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(
    "roles", [("rust", "python"), ("python", "rust"), ("nameless", "together"), ("together", "nameless")], ids="-".join
)
@pytest.mark.parametrize("network", NETWORKS)
async def test_message_without_gateway(
    direct: dict[str, Direct], cell: MakeCell, network: str, roles: tuple[str, str], type: str
) -> None:
    noted = cell(f"{network}, no gateway, {WORDS[roles[0]]} -> {WORDS[roles[1]]}", type)
    hall = direct[network]
    await crosses(hall, hall.parties[roles[0]], hall.parties[roles[1]], type, noted)


async def crosses(
    hall: Hall, sender: Party, receiver: Party, type: str, noted: Cell, witness: Party | None = None
) -> None:
    """Each profile arrives, field by field; or what up-rust refuses is shown to be refused."""
    if type == "publish" and sender.make == "rust" and sender.network.off_vehicle:
        noted.limit = REFUSES_SINK
        await refuses_to_publish(sender, receiver)
    elif type == "publish" and receiver.make == "rust" and receiver.network.off_vehicle:
        noted.limit = REFUSES_SINK
        await does_not_hear_publish(hall, sender, receiver, witness)
    else:
        ear = await hall.ear(type, sender, receiver)
        found = [
            one
            for name, fields in profiles(*addressed(type, sender, receiver))
            for one in await compared(ear, sender, receiver, name, fields)
        ]
        assert found == []


async def compared(ear: Ear, sender: Party, receiver: Party, name: str, fields: Fields) -> list[str]:
    """Send one message; what of it arrived otherwise. An address without authority arrives with that of its sender's
    host."""
    sent = await sender.send(fields)
    received = await ear.expect(sent.attributes.id)
    if receiver.make == "python":
        for address in (sent.attributes.source, sent.attributes.sink):
            if address.ByteSize() and not address.authority_name:
                address.authority_name = sender.host
    shows = receiver.make == "python"  # whether there was a payload at all
    wrong = differences(sent, received, sink=arriving_sink(fields.type, receiver), absent_payload_shows=shows)
    return [f"{name}: {one}" for one in wrong]


async def refuses_to_publish(sender: Party, receiver: Party) -> None:
    """Without a sink there is no topic off-vehicle, and with one up-rust finds the message invalid."""
    with pytest.raises(Refused, match="requires sink URI") as refused:
        await sender.send(Fields("publish", sender.uri(TOPIC)))
    assert refused.value.code == UCode.INVALID_ARGUMENT
    built = UMessageBuilder(attrs.PUBLISH, uris.parse(sender.uri(TOPIC)), attrs.streamer_sink(receiver.host)).build()
    with pytest.raises(Refused, match="must not contain a sink") as refused:
        await sender.send_built(built)
    assert refused.value.code == UCode.INVALID_ARGUMENT


async def does_not_hear_publish(hall: Hall, sender: Party, receiver: Party, witness: Party | None) -> None:
    """It is sent, and heard by our own `witness` there; of its MQTT topic the Rust party hears only what is sent behind
    it."""
    ear = await receiver.ear(uris.format(uris.ANY), uris.format(attrs.streamer_sink(receiver.host)))
    await hall.ear("notification", sender, receiver)
    witnessed = await hall.ear("publish", sender, witness) if witness is not None else None
    sent = await sender.send(Fields(*addressed("publish", sender, receiver)))
    if witnessed is not None:
        await witnessed.expect(sent.attributes.id)
    behind = await sender.send(Fields("notification", sender.uri(TOPIC), receiver.uri(0)))
    await ear.expect(behind.attributes.id)
    assert not ear.has(sent.attributes.id)


# -- calls, with each side's communication layer
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize("roles", [*ROLES, ("python", "nameless")], ids="-".join)
@pytest.mark.parametrize("crossing", CROSSINGS, ids="-".join)
async def test_call_over_gateway(
    stage: Stage, cell: MakeCell, crossing: tuple[str, str], roles: tuple[str, str]
) -> None:
    cell(through(crossing, roles), "call")
    caller, server = stage.party(roles[0], crossing[0]), stage.party(roles[1], crossing[1])
    async with stage.server(server, ECHO) as served:
        await stage.ear("response", served, caller)
        assert await caller.call(served.uri(ECHO), "hello", CALL_MS, "a token") == "HELLO"
    async with stage.server(server, FAILS) as served:
        await stage.ear("response", served, caller)
        with pytest.raises(Refused, match="as it was told to") as refused:
            await caller.call(served.uri(FAILS), "hello", CALL_MS)
        assert refused.value.code == UCode.RESOURCE_EXHAUSTED


async def test_server_of_two_methods_off_vehicle(stage: Stage, cell: MakeCell) -> None:
    """Both methods' listeners have the MQTT filter `+/cloud`, and up-transport-mqtt5 asks no more than that."""
    noted = cell("mqtt-in -> gateway -> mqtt-off, python -> rust, a server of two methods", "call")
    noted.limit = (
        "up-transport-mqtt5 0.4 off-vehicle gives every message for the authority to every listener: a server answers "
        "a request once "
        "for each of its methods, whichever was called"
    )
    caller = stage.party("python", "mqtt-in")
    async with stage.server(stage.party("rust", "mqtt-off"), ECHO, FAILS) as served:
        heard = await stage.ear("response", served, caller)
        sent = await caller.send(Fields("request", caller.uri(0), served.uri(ECHO), ttl_ms=CALL_MS))
        answers = await heard.until(
            lambda: [one for one in heard.messages if one.attributes.reqid == sent.attributes.id], 2
        )
    assert sorted(one.attributes.commstatus for one in answers) == [UCode.OK, UCode.RESOURCE_EXHAUSTED]


# -- up-rust's own ways of sending
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "type"), [("SimplePublisher", "publish"), ("SimpleNotifier", "notification")])
@pytest.mark.parametrize("crossing", CROSSINGS, ids="-".join)
async def test_simple_senders(stage: Stage, cell: MakeCell, crossing: tuple[str, str], way: str, type: str) -> None:
    """They set a ttl of 0, which is none."""
    noted = cell(f"{' -> gateway -> '.join(crossing)}, rust's SimplePublisher, SimpleNotifier -> python", type)
    sender, receiver = stage.party("rust", crossing[0]), stage.party("python", crossing[1])
    assert isinstance(sender, RustParty)
    if type == "publish" and sender.network.off_vehicle:
        noted.limit = REFUSES_SINK
        with pytest.raises(Refused, match="requires sink URI"):
            await sender.do("publish", resource=TOPIC, payload="")
        return
    ear, payload = await stage.ear(type, sender, receiver), f"simple {type}"
    if type == "publish":
        await sender.do("publish", resource=TOPIC, payload=payload)
    else:
        await sender.do("notify", resource=TOPIC, sink=receiver.uri(0), payload=payload)
    source = uris.parse(sender.uri(TOPIC))
    found = await ear.until(
        lambda: [one for one in ear.messages if one.payload == payload.encode() and one.attributes.source == source], 1
    )
    assert not found[0].attributes.ttl


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("crossing", [("zenoh", "mqtt-in"), ("mqtt-in", "zenoh")], ids="-".join)
async def test_traceparent_that_is_none(stage: Stage, cell: MakeCell, crossing: tuple[str, str], type: str) -> None:
    """up-rust sends any text; it costs the traceparent, not the message."""
    cell(f"{' -> gateway -> '.join(crossing)}, rust -> python, an invalid traceparent", type)
    sender, receiver = stage.party("rust", crossing[0]), stage.party("python", crossing[1])
    ear = await stage.ear(type, sender, receiver)
    sent = await sender.send(Fields(*addressed(type, sender, receiver), traceparent="the traceparent", **least(type)))
    arrived = await ear.expect(sent.attributes.id)
    assert not arrived.attributes.traceparent
    sent.attributes.ClearField("traceparent")
    assert differences(sent, arrived) == []


async def test_response_without_ttl(stage: Stage, cell: MakeCell) -> None:
    noted = cell("zenoh -> gateway -> mqtt-in, rust -> python, without the request's ttl", "response")
    noted.limit = (
        "a response has the ttl of its request (dsn~up-attributes-response-ttl~1); UMessageBuilder::response sets "
        "none, and without one "
        "we drop it as invalid: use response_for_request"
    )
    sender, receiver = stage.party("rust", "zenoh"), stage.party("python", "mqtt-in")
    ear = await stage.ear("response", sender, receiver)
    fields = addressed("response", sender, receiver)
    sent = await sender.send(Fields(*fields, reqid=uuids.format(uuids.new())))
    behind = await sender.send(Fields(*fields, **least("response")))
    await ear.expect(behind.attributes.id)
    assert not ear.has(sent.attributes.id)


# -- uSubscription
# ----------------------------------------------------------------------------------------------------------------------

SUBSCRIBERS = {
    "rust": "rust, service without authority",
    "addressing": "rust, service with authority",
    "python": "python",
}


@pytest.mark.parametrize("role", SUBSCRIBERS)
@pytest.mark.parametrize("crossing", CROSSINGS, ids="-".join)
async def test_subscription(stage: Stage, cell: MakeCell, crossing: tuple[str, str], role: str) -> None:
    """Subscribe, be told, hear, unsubscribe: by the service of the own network, to a topic of another."""
    subscriber = stage.party(role, crossing[1])
    publisher = stage.party("python" if subscriber.make == "rust" else "rust", crossing[0])
    row = f"{crossing[0]} ({publisher.make} publishes) -> gateway -> {crossing[1]} ({SUBSCRIBERS[role]})"
    subscribed, notified, heard, unsubscribed = (
        cell(row, column) for column in ("subscribe", "update", "published", "unsubscribe")
    )
    resource = next(stage.topics)
    topic = publisher.uri(resource)
    ear = await subscribes(subscriber, topic, subscribed)
    subscribed.settle()
    await subscriber.until_notified(topic, Status.SUBSCRIBED)
    notified.settle()
    await hears(stage, publisher, subscriber, ear, resource, heard)
    heard.settle()
    await subscriber.unsubscribe(topic)
    # there the publisher is the streamer, and says itself for whom a publish is
    if not (heard.limit or publisher.network.off_vehicle):
        await until_silent(stage, publisher, subscriber, ear, resource)
    if subscriber.make == "rust":  # version 3 tells the last subscriber once more
        await subscriber.until_update(topic, Status.UNSUBSCRIBED)
    for host in (subscriber.host, publisher.host):
        await stage.until_no_subscribers(host, topic)
    unsubscribed.settle()


async def subscribes(subscriber: Party, topic: str, noted: Cell) -> Ear:
    if subscriber.make == "rust" and subscriber.network.off_vehicle:
        noted.limit = (
            "off-vehicle, InMemorySubscriber subscribes, but can't listen: it registers no sink filter, which "
            "up-transport-mqtt5 needs"
        )
        with pytest.raises(Refused, match="requires sink URI"):
            await subscriber.subscribe(topic)
        return await subscriber.ear(uris.format(uris.ANY), uris.format(attrs.streamer_sink(subscriber.host)))
    return await subscriber.subscribe(topic)


async def hears(stage: Stage, publisher: Party, subscriber: Party, ear: Ear, resource: int, noted: Cell) -> None:
    """What is published arrives, field by field; or up-rust is shown to refuse it, on either side."""
    if publisher.make == "rust" and publisher.network.off_vehicle:
        noted.limit = REFUSES_SINK
        await refuses_to_publish(publisher, subscriber)
    elif subscriber.make == "rust" and subscriber.network.off_vehicle:
        noted.limit = REFUSES_SINK
        witness = stage.party("python", subscriber.network.name)
        witnessed = await witness.ear(uris.format(uris.ANY), uris.format(attrs.streamer_sink(subscriber.host)))
        assert await published(publisher, witness, witnessed, resource) == []
        behind = await publisher.send(Fields("notification", publisher.uri(resource), subscriber.uri(0)))
        await ear.expect(behind.attributes.id)
        assert not any(message.attributes.type == attrs.PUBLISH for message in ear.messages)
    else:
        assert await published(publisher, subscriber, ear, resource) == []


def publication(publisher: Party, subscriber: Party, resource: int) -> Fields:
    sink = uris.format(attrs.streamer_sink(subscriber.host)) if publisher.network.off_vehicle else None
    return Fields(
        "publish",
        publisher.uri(resource),
        sink,
        ttl_ms=CALL_MS,
        traceparent=TRACEPARENT,
        payload="00ff",
        payload_format=5,
    )


async def published(publisher: Party, subscriber: Party, ear: Ear, resource: int) -> list[str]:
    """Publish until one arrives; what of it arrived otherwise."""
    async with asyncio.timeout(WAIT_S):
        while True:
            sent = await publisher.send(publication(publisher, subscriber, resource))
            with contextlib.suppress(TimeoutError):
                received = await ear.expect(sent.attributes.id, PROBE_S)
                shows = subscriber.make == "python"
                return differences(
                    sent, received, sink=arriving_sink("publish", subscriber), absent_payload_shows=shows
                )


async def until_silent(stage: Stage, publisher: Party, subscriber: Party, ear: Ear, resource: int) -> None:
    """Publish until one does not arrive before the notification that is sent behind it."""
    behind = await stage.ear("notification", publisher, subscriber)
    async with asyncio.timeout(WAIT_S):
        while True:
            sent = await publisher.send(publication(publisher, subscriber, resource))
            last = await publisher.send(Fields("notification", publisher.uri(resource), subscriber.uri(0)))
            await behind.expect(last.attributes.id)
            if not ear.has(sent.attributes.id):
                return


@pytest.mark.parametrize("network", NETWORKS)
async def test_topic_without_authority(stage: Stage, cell: MakeCell, network: str) -> None:
    """A topic of the own host: what InMemorySubscriber has passed comes back, and finds its handler."""
    noted = cell(f"{network}, a topic without authority, rust", "update")
    subscriber = stage.party("rust", network)
    topic = f"up:/{PYTHON_ENTITY:X}/1/{next(stage.topics):X}"
    if subscriber.network.off_vehicle:
        with pytest.raises(Refused, match="requires sink URI"):
            await subscriber.subscribe(topic)
    else:
        await subscriber.subscribe(topic)
    await subscriber.unsubscribe(topic)
    await subscriber.until_update(topic, Status.UNSUBSCRIBED)
    noted.settle()


async def test_in_memory_subscriber_unsubscribes(stage: Stage, cell: MakeCell) -> None:
    noted = cell("zenoh, rust's InMemorySubscriber.unsubscribe", "unsubscribe")
    noted.limit = "InMemorySubscriber.unsubscribe of up-rust 0.9 names no topic, which is INVALID_ARGUMENT: "
    noted.limit += "use RpcClientUSubscription"
    subscriber, publisher = stage.party("rust", "zenoh"), stage.party("python", "mqtt-in")
    assert isinstance(subscriber, RustParty)
    topic = publisher.uri(next(stage.topics))
    await subscriber.subscribe(topic)
    with pytest.raises(Refused, match="failed to invoke USubscription service"):
        await subscriber.do("unsubscribe", topic=topic)
    assert subscriber.uri(0) in await stage.subscribers("vehicle1", topic)


# -- behind a Zenoh router
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("roles", ROLES[:2], ids="-".join)
async def test_clients_behind_router(stage: Stage, cell: MakeCell, roles: tuple[str, str], type: str) -> None:
    noted = cell(f"zenoh, both behind the gateway's router, mode client, {roles[0]} -> {roles[1]}", type)
    await crosses(stage, stage.party(roles[0], "zenoh"), stage.party(roles[1], "zenoh"), type, noted)


@pytest.mark.parametrize("makes", ROLES[:3], ids="-".join)
async def test_peers_behind_router(stage: Stage, cell: MakeCell, makes: tuple[str, str]) -> None:
    """What one sends through the router behind it, to a client, arrives; what it sends to a peer does not."""
    noted = cell(f"zenoh, both behind the gateway's router, mode peer, {makes[0]} -> {makes[1]}", "notification")
    noted.limit = 'a Zenoh router does not carry messages between peers: mode = "client" for who only connects to it'
    network = stage.networks["zenoh"]
    as_peer = network._replace(settings=network.settings | {"mode": "peer"})
    async with contextlib.AsyncExitStack() as stack:
        sender = await stage.open(makes[0], as_peer, 0xD001, stack)
        receiver = await stage.open(makes[1], as_peer, 0xD002, stack)
        client = await stage.open(makes[1], network, 0xD003, stack)
        ear = await receiver.ear(uris.format(uris.ANY), receiver.uri(0))
        arriving = await stage.ear("notification", sender, client)
        for _ in range(3):
            lost = await sender.send(Fields(*addressed("notification", sender, receiver)))
            behind = await sender.send(Fields(*addressed("notification", sender, client)))
            await arriving.expect(behind.attributes.id)
            assert not ear.has(lost.attributes.id)


async def test_snippets_of_the_page(binary: Path) -> None:
    """docs/interop.md has them as they are in examples/snippets.rs, which has been built."""
    page, code = ((ROOT / path).read_text() for path in ("docs/interop.md", "tests/interop/examples/snippets.rs"))
    snippets = re.findall(r"```rust\n(.*?)```", page, re.DOTALL)
    assert len(snippets) == 2
    assert all(snippet in code for snippet in snippets)
