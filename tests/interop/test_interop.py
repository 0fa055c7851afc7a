"""Eclipse's Rust clients (up-rust, up-transport-zenoh, up-transport-mqtt5) and ours, with and without a gateway between them.

Run by `make interop` alone. Each test is a cell of the table that is printed at the end, and of docs/interop.md. What the other
side can't do is shown to be so: a cell that is a limit fails when that changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.interop.comparing import TYPES, differences, profiles
from tests.interop.conftest import Cell
from tests.interop.parties import Ear, Fields, Party, Refused, RustParty
from tests.interop.stage import ECHO, FAILS, TOPIC, Direct, Hall, Stage, addressed, arriving_sink, least
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.message import UMessageBuilder
from uprotocol.v1.ucode_pb2 import UCode

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.broker, pytest.mark.timeout(300)]

MakeCell = Callable[[str, str], Cell]

NETWORKS = ("zenoh", "mqtt-in", "mqtt-off")
CROSSINGS = tuple(itertools.permutations(NETWORKS, 2))
ROLES = (("rust", "python"), ("python", "rust"), ("rust", "rust"), ("nameless", "python"))
DIRECT_ROLES = (("rust", "python"), ("python", "rust"), ("nameless", "together"), ("together", "nameless"))
WORDS = {"rust": "rust", "python": "python", "nameless": "rust (no authority)", "together": "python (no authority)"}
CALL_MS = 30_000
SOON_S = 20.0  # for what is known to come within milliseconds where it comes at all

REFUSES_SINK = "up-rust 0.9 refuses every publish with a sink, as a streamer sets it off-vehicle (dsn~up-attributes-publish-sink~2)"


def through(crossing: tuple[str, str], roles: tuple[str, str]) -> str:
    return f"{crossing[0]} -> gateway -> {crossing[1]}, {WORDS[roles[0]]} -> {WORDS[roles[1]]}"


# -- messages: each of four types, each field ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("roles", ROLES, ids="-".join)
@pytest.mark.parametrize("crossing", CROSSINGS, ids="-".join)
async def test_message_over_gateway(stage: Stage, cell: MakeCell, crossing: tuple[str, str], roles: tuple[str, str], type: str) -> None:
    noted = cell(through(crossing, roles), type)
    sender, receiver = stage.party(roles[0], crossing[0]), stage.party(roles[1], crossing[1])
    await crosses(stage, sender, receiver, type, noted, witness=stage.party("python", crossing[1]))


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(
    "roles", [("rust", "python"), ("python", "rust"), ("nameless", "together"), ("together", "nameless")], ids="-".join
)
@pytest.mark.parametrize("network", NETWORKS)
async def test_message_without_gateway(direct: dict[str, Direct], cell: MakeCell, network: str, roles: tuple[str, str], type: str) -> None:
    noted = cell(f"{network}, no gateway, {WORDS[roles[0]]} -> {WORDS[roles[1]]}", type)
    hall = direct[network]
    await crosses(hall, hall.parties[roles[0]], hall.parties[roles[1]], type, noted)


async def crosses(hall: Hall, sender: Party, receiver: Party, type: str, noted: Cell, witness: Party | None = None) -> None:
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
    """Send one message; what of it arrived otherwise. An address without authority arrives with that of its sender's host."""
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
    """It is sent, and heard by our own `witness` there; of its MQTT topic the Rust party hears only what is sent behind it."""
    ear = await receiver.ear(uris.format(uris.ANY), uris.format(attrs.streamer_sink(receiver.host)))
    await hall.ear("notification", sender, receiver)
    witnessed = await hall.ear("publish", sender, witness) if witness is not None else None
    sent = await sender.send(Fields(*addressed("publish", sender, receiver)))
    if witnessed is not None:
        await witnessed.expect(sent.attributes.id)
    behind = await sender.send(Fields("notification", sender.uri(TOPIC), receiver.uri(0)))
    await ear.expect(behind.attributes.id)
    assert not ear.has(sent.attributes.id)


# -- calls, with each side's communication layer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("roles", [*ROLES, ("python", "nameless")], ids="-".join)
@pytest.mark.parametrize("crossing", CROSSINGS, ids="-".join)
async def test_call_over_gateway(stage: Stage, cell: MakeCell, crossing: tuple[str, str], roles: tuple[str, str]) -> None:
    cell(through(crossing, roles), "call")
    caller, server = stage.party(roles[0], crossing[0]), stage.party(roles[1], crossing[1])
    async with stage.server(server, ECHO) as served:
        await stage.ear("response", served, caller)
        assert await caller.call(served.uri(ECHO), "hello", CALL_MS, "a token") == "HELLO"
    async with stage.server(server, FAILS) as served:
        with pytest.raises(Refused, match="as it was told to") as refused:
            await caller.call(served.uri(FAILS), "hello", CALL_MS)
        assert refused.value.code == UCode.RESOURCE_EXHAUSTED


async def test_server_of_two_methods_off_vehicle(stage: Stage, cell: MakeCell) -> None:
    """Both methods' listeners have the MQTT filter `+/cloud`, and up-transport-mqtt5 asks no more than that."""
    noted = cell("mqtt-in -> gateway -> mqtt-off, python -> rust, a server of two methods", "call")
    noted.limit = (
        "up-transport-mqtt5 0.4 off-vehicle gives every message for the authority to every listener: a server answers a request once "
        "for each of its methods, whichever was called"
    )
    caller = stage.party("python", "mqtt-in")
    async with stage.server(stage.party("rust", "mqtt-off"), ECHO, FAILS) as served:
        heard = await stage.ear("response", served, caller)
        sent = await caller.send(Fields("request", caller.uri(0), served.uri(ECHO), ttl_ms=CALL_MS))
        answers = await heard.until(lambda: [one for one in heard.messages if one.attributes.reqid == sent.attributes.id], 2)
    assert sorted(one.attributes.commstatus for one in answers) == [UCode.OK, UCode.RESOURCE_EXHAUSTED]


# -- up-rust's own ways of sending ------------------------------------------------------------------------------------------------------


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
            await sender.do("publish", resource=TOPIC, payload="simple")
        return
    ear = await stage.ear(type, sender, receiver)
    if type == "publish":
        await sender.do("publish", resource=TOPIC, payload="simple")
    else:
        await sender.do("notify", resource=TOPIC, sink=receiver.uri(0), payload="simple")
    (arrived,) = await ear.until(lambda: [one for one in ear.messages if one.payload == b"simple"], 1)
    assert arrived.attributes.source == uris.parse(sender.uri(TOPIC))
    assert not arrived.attributes.ttl


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("crossing", [("zenoh", "mqtt-in"), ("mqtt-in", "zenoh")], ids="-".join)
async def test_traceparent_that_is_none(stage: Stage, cell: MakeCell, crossing: tuple[str, str], type: str) -> None:
    """up-rust sends any text; it costs the traceparent, not the message."""
    cell(f"{' -> gateway -> '.join(crossing)}, rust -> python, a traceparent that is none", type)
    sender, receiver = stage.party("rust", crossing[0]), stage.party("python", crossing[1])
    ear = await stage.ear(type, sender, receiver)
    sent = await sender.send(Fields(*addressed(type, sender, receiver), traceparent="the traceparent", **least(type)))
    arrived = await ear.expect(sent.attributes.id, SOON_S)
    assert not arrived.attributes.traceparent
    sent.attributes.ClearField("traceparent")
    assert differences(sent, arrived) == []


async def test_response_without_ttl(stage: Stage, cell: MakeCell) -> None:
    noted = cell("zenoh -> gateway -> mqtt-in, rust -> python, without the request's ttl", "response")
    noted.limit = (
        "a response has the ttl of its request (dsn~up-attributes-response-ttl~1); UMessageBuilder::response sets none, and without one "
        "we drop it as invalid: use response_for_request"
    )
    sender, receiver = stage.party("rust", "zenoh"), stage.party("python", "mqtt-in")
    ear = await stage.ear("response", sender, receiver)
    fields = addressed("response", sender, receiver)
    sent = await sender.send(Fields(*fields, reqid=uuids.format(uuids.new())))
    behind = await sender.send(Fields(*fields, **least("response")))
    await ear.expect(behind.attributes.id)
    assert not ear.has(sent.attributes.id)
