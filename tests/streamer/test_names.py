"""Names: addresses without authority, vehicles that all have an `ecu1`, and families of authorities."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import message_factory
from hypothesis import given
from hypothesis import strategies as st

from streamer.building import endpoints_of
from streamer.config import Config, loads
from streamer.walk.names import CARRIED, Names
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.core.ustreamer.v1 import ustreamer_pb2
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.encoded import EncodedMessage, Readdressed
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

MakeWorld = Any
Publish = Callable[..., UMessage]

APP = uris.parse("//cloud/9001/1/0")
ECU_APP = uris.parse("//ecu1/8001/1/0")
CALLERS = uris.uri(uris.WILDCARD_AUTHORITY, 0xFFFFFFFF, 0xFF, 0)
OPTIONS = CallOptions(timeout_ms=15_000)
_numbers = itertools.count()


@pytest.fixture
def fleet() -> str:
    """The name of a network that several vehicles are on."""
    return f"fleet-{next(_numbers)}"


def vehicle(vin: str, fleet: str, more: str = "") -> str:
    """A vehicle with two networks inside, whose gateway is on the fleet's."""
    return f"""{more}
[[endpoint]]
name = "vehicle"
transport = "local"
authorities = ["ecu1"]
settings = {{{{ network = "{{n}}-vehicle" }}}}
[[endpoint]]
name = "mcu"
transport = "local"
authorities = ["mcu1"]
usubscription = "none"
settings = {{{{ network = "{{n}}-mcu" }}}}
[[endpoint]]
name = "fleet"
transport = "local"
authorities = ["*"]
suffix = "{vin}"
settings = {{{{ network = "{fleet}" }}}}
"""


class Doors:
    """Serves a method, and answers."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self.requests: list[UMessage] = []

    async def on_receive(self, message: UMessage) -> None:
        self.requests.append(message)
        await self._node.send(UMessageBuilder.response_for_request(message.attributes).build())


async def doors(world: Any) -> Doors:
    node = await world.node("vehicle", "ecu1", 0x9000)
    served = Doors(node)
    await node.register_listener(CALLERS, served, uris.parse("//ecu1/9000/1/1"))
    return served


def client(node: Any, authority: str, entity: int = 0x9001) -> InMemoryRpcClient:
    return InMemoryRpcClient(node, LocalUriProvider(authority, entity, 1))


async def call(node: Any, method: str, message: Any, answer: Any, authority: str = "cloud") -> Any:
    caller = client(node, authority)
    await caller.open()
    try:
        return (await caller.invoke_method(uris.parse(method), UPayload.pack(message), OPTIONS)).unpack(answer)
    finally:
        await caller.close()


# Which ECU of which vehicle


async def test_a_request_reaches_the_ecu_of_the_vehicle_that_it_names(make_world: MakeWorld, fleet: str) -> None:
    one, two = await make_world(vehicle("vin1", fleet)), await make_world(vehicle("vin2", fleet))
    served = [await doors(one), await doors(two)]
    app = await one.node("fleet", "cloud", 0x9001)
    caller = client(app, "cloud")
    await caller.open()
    heard = await one.hear(app, uris.ANY, APP)
    for _ in range(3):
        await caller.invoke_method(uris.parse("//ecu1.vin1/9000/1/1"), UPayload(b""), OPTIONS)
    assert [len(one.requests) for one in served] == [3, 0]
    request, answer = served[0].requests[0].attributes, heard.messages[0].attributes
    assert (request.source.authority_name, request.sink.authority_name) == ("cloud", "ecu1"), (
        "inside, it goes by the inside name"
    )
    assert answer.source == uris.parse("//ecu1.vin1/9000/1/1")
    await app.send(UMessageBuilder.request(APP, uris.parse("//ecu1/9000/1/1"), 60_000).build())
    await caller.invoke_method(uris.parse("//ecu1.vin2/9000/1/1"), UPayload(b""), OPTIONS)
    assert [len(one.requests) for one in served] == [3, 1], "ecu1 alone is nobody's: it could be any vehicle's"
    await caller.close()


async def test_all_types_leave_and_come_under_the_vehicles_name(make_world: MakeWorld, fleet: str) -> None:
    world = await make_world(
        vehicle("vin1", fleet), {"//ecu1/8001/1/8001": ["//cloud/9001/1/0"], "//cloud/9001/1/8002": ["//ecu1/8001/1/0"]}
    )
    ecu, app = await world.node("vehicle", "ecu1"), await world.node("fleet", "cloud", 0x9001)
    published = await world.hear(app, uris.parse("//ecu1.vin1/8001/1/8001"))
    out = await world.hear(app, uris.ANY, APP)
    into = await world.hear(ecu, uris.ANY, ECU_APP)
    method = await world.hear(app, CALLERS, uris.parse("//cloud/9001/1/7"))
    from_cloud = await world.hear(ecu, uris.parse("//cloud/9001/1/8002"))
    await ecu.send(UMessageBuilder.publish(uris.parse("//ecu1/8001/1/8001")).build_from_upayload(UPayload(b"p")))
    await ecu.send(
        UMessageBuilder.notification(uris.parse("//ecu1/8001/1/8001"), APP).build_from_upayload(UPayload(b"n"))
    )
    request = UMessageBuilder.request(ECU_APP, uris.parse("//cloud/9001/1/7"), 60_000).build()
    await ecu.send(request)
    await published.expect_payload(b"p")
    await out.expect_payload(b"n")
    await world.until(lambda: method.messages)
    assert published.messages[0].attributes.source == uris.parse("//ecu1.vin1/8001/1/8001")
    assert out.messages[0].attributes.source == uris.parse("//ecu1.vin1/8001/1/8001")
    asked = method.messages[0].attributes
    assert asked.source == uris.parse("//ecu1.vin1/8001/1/0")
    assert asked.id == request.attributes.id
    await app.send(UMessageBuilder.response_for_request(asked).build())
    await app.send(UMessageBuilder.notification(uris.parse("//cloud/9001/1/8003"), asked.source).build())
    await app.send(UMessageBuilder.publish(uris.parse("//cloud/9001/1/8002")).build_from_upayload(UPayload(b"c")))
    await world.until(lambda: len(into.messages) == 2 and from_cloud.messages)
    assert {message.attributes.sink.authority_name for message in into.messages} == {"ecu1"}
    assert [message.attributes.reqid for message in into.messages if message.attributes.HasField("reqid")] == [
        request.attributes.id
    ]


async def test_nobody_outside_passes_for_one_inside(make_world: MakeWorld, fleet: str, publish: Publish) -> None:
    everything = {"//ecu1/8001/1/8001": ["//mcu1/9001/1/0"]}
    world = await make_world(vehicle("vin1", fleet), everything, more="")
    mcu, app = await world.node("mcu", "mcu1", 0x9001), await world.node("fleet", "cloud", 0x9001)
    heard = await world.hear(mcu, uris.ANY, uris.parse("//mcu1/9001/1/0"))
    for source in ("//ecu1/8001/1/8001", "//ecu1.vin1/8001/1/8001"):
        await app.send(UMessageBuilder.notification(uris.parse(source), uris.parse("//mcu1.vin1/9001/1/0")).build())
    await app.send(
        UMessageBuilder.notification(uris.parse("//ecu1.vin2/8001/1/8001"), uris.parse("//mcu1.vin1/9001/1/0")).build()
    )
    await world.until(lambda: heard.messages)
    assert [message.attributes.source.authority_name for message in heard.messages] == ["ecu1.vin2"], (
        "another vehicle is another one"
    )
    assert world.assembly.endpoints["fleet"].dropped["spoofed"] == 2


@pytest.mark.parametrize("major", [3, 4])
async def test_a_subscription_from_outside_goes_by_the_outside_name(
    make_world: MakeWorld, fleet: str, publish: Publish, major: int
) -> None:
    world = await make_world(vehicle("vin1", fleet))
    ecu, app = await world.node("vehicle", "ecu1"), await world.node("fleet", "cloud", 0x9001)
    heard = await world.hear(app, uris.parse("//ecu1.vin1/8001/1/8001"))
    updates = await world.hear(app, uris.uri("*", 0, major, 0x8000), uris.parse("//cloud/9001/1/0"))
    topic = uris.parse("//ecu1.vin1/8001/1/8001")
    if major == 3:
        answer = await call(app, "//ecu1.vin1/0/3/1", v3.SubscriptionRequest(topic=topic), v3.SubscriptionResponse)
        assert answer.status.state == v3.SubscriptionStatus.SUBSCRIBED
    else:
        answer = await call(app, "//ecu1.vin1/0/4/1", v4.SubscribeRequest(topic=topic), v4.SubscribeResponse)
        assert answer.status == v4.SubscriptionStatus.STATUS_SUBSCRIBED
    assert answer.topic == topic
    await ecu.send(publish("//ecu1/8001/1/8001", "12 km/h"))
    await heard.expect_payload(b"12 km/h")
    await world.until(lambda: updates.messages)
    notification = updates.messages[0]
    update = UPayload.of(notification).unpack(v3.Update if major == 3 else v4.Subscription)
    assert notification.attributes.source == uris.uri("ecu1.vin1", 0, major, 0x8000)
    assert update.topic == topic
    inside = await world.assembly.usubscription.subscriptions()
    assert [row.topic[0] for row in inside] == ["ecu1"], "one topic has one name inside"


async def test_history_from_outside_goes_by_the_outside_name(
    make_world: MakeWorld, fleet: str, publish: Publish
) -> None:
    world = await make_world(vehicle("vin1", fleet, '[history]\nrecord = ["//ecu1/FFFFFFFF/FF/FFFF"]\n'))
    ecu, app = await world.node("vehicle", "ecu1"), await world.node("fleet", "cloud", 0x9001)
    await ecu.send_batch([publish("//ecu1/8001/1/8001", f"{number}") for number in range(5)])
    await world.until(lambda: world.assembly.logs.durable.newest_seq >= 5)
    method, topic = "//ecu1.vin1/4/1/2", uris.parse("//ecu1.vin1/8001/1/8001")
    answer = await call(
        app, method, ustreamer_pb2.PollRequest(topics=[topic], earliest=True), ustreamer_pb2.PollResponse
    )
    records = [UMessage.FromString(record) for batch in answer.batches for record in batch.message]
    assert [(record.attributes.source, record.payload) for record in records] == [
        (topic, b"%d" % number) for number in range(5)
    ]
    none = ustreamer_pb2.PollRequest(topics=[uris.parse("//ecu1.vin2/8001/1/8001")], earliest=True)
    assert not (await call(app, method, none, ustreamer_pb2.PollResponse)).batches
    own = ustreamer_pb2.PollRequest(topics=[UUri(ue_id=0x8001, ue_version_major=1, resource_id=0x8001)], earliest=True)
    assert not (await call(app, method, own, ustreamer_pb2.PollResponse)).batches, (
        "its own host's topic, which is not here"
    )
    assert (await call(ecu, "/4/1/2", own, ustreamer_pb2.PollResponse, "ecu1")).batches
    described = await call(app, "//ecu1.vin1/4/1/1", ustreamer_pb2.DescribeRequest(), ustreamer_pb2.DescribeResponse)
    assert topic in [state.topic for state in described.topics]


async def test_two_vehicles_that_use_one_name_are_reported(make_world: MakeWorld, fleet: str) -> None:
    unnamed = vehicle("", fleet)
    worlds = [await make_world(unnamed), await make_world(unnamed)]
    served = [await doors(world) for world in worlds]
    cloud = await make_world(CLOUD.replace("FLEET", fleet))
    app = await cloud.node("cloud", "cloud", 0x9001)
    caller = client(app, "cloud")
    await caller.open()
    await caller.invoke_method(uris.parse("//ecu1/9000/1/1"), UPayload(b""), OPTIONS)

    def notes() -> list[str]:
        return [note for note in cloud.parts.notes() if " new since " not in note]  # without that of a first start

    await cloud.until(notes)
    assert [len(one.requests) for one in served] == [1, 1], "nobody can help that without a name for each"
    (note,) = notes()
    assert note.startswith("endpoint fleet: two hosts go by the name 'ecu1'")
    assert cloud.parts.problems() == []
    await caller.close()


CLOUD = """
[[endpoint]]
name = "cloud"
transport = "local"
authorities = ["cloud"]
settings = {{ network = "{n}-cloud" }}
[[endpoint]]
name = "fleet"
transport = "local"
authorities = ["*"]
settings = {{ network = "FLEET" }}
"""

OFF_VEHICLE = """
[[endpoint]]
name = "in"
transport = "local"
authorities = {authorities}
[[endpoint]]
name = "out"
transport = "mqtt5"
authorities = ["cloud"]
{suffix}
settings = {{ mode = "off-vehicle", client_id = "x" }}
"""


@pytest.mark.parametrize(
    ("authorities", "suffix", "named"),
    [
        ('["ecu1", "mcu1"]', "", ["ecu1, mcu1"]),
        ('["ecu1.vin1"]', "", []),
        ('["vin1"]', 'suffix = ""', []),
        ('["ecu1"]', 'suffix = "vin1"', []),
    ],
)
def test_names_that_any_vehicle_may_have_are_reported(authorities: str, suffix: str, named: list[str]) -> None:
    notes = endpoints_of(loads(OFF_VEHICLE.format(authorities=authorities, suffix=suffix))).notes()
    assert [f"may have our {names};" in note for names, note in zip(named, notes, strict=True)] == [True] * len(named)


# For whom uSubscription answers


async def test_the_service_answers_for_an_authority_that_has_none(
    make_world: MakeWorld, fleet: str, publish: Publish
) -> None:
    world = await make_world(vehicle("vin1", fleet, '[usubscription]\nanswers_for = ["mcu1"]\n'))
    mcu, app = await world.node("mcu", "mcu1"), await world.node("fleet", "cloud", 0x9001)
    topic = uris.parse("//mcu1.vin1/8001/1/8001")
    heard = await world.hear(app, topic)
    answer = await call(app, "//mcu1.vin1/0/3/1", v3.SubscriptionRequest(topic=topic), v3.SubscriptionResponse)
    assert answer.status.state == v3.SubscriptionStatus.SUBSCRIBED, "it hung in SUBSCRIBE_PENDING before"
    await mcu.send(publish("//mcu1/8001/1/8001", "warm"))
    await heard.expect_payload(b"warm")


async def test_a_subscription_that_hung_stands_once_somebody_answers_for_its_topic(
    make_world: MakeWorld, fleet: str, publish: Publish
) -> None:
    world = await make_world(vehicle("vin1", fleet))
    ecu, mcu = await world.node("vehicle", "ecu1"), await world.node("mcu", "mcu1")
    asked = v3.SubscriptionRequest(topic=uris.parse("//mcu1/8001/1/8001"))
    answer = await call(ecu, "//ecu1/0/3/1", asked, v3.SubscriptionResponse, "ecu1")
    assert answer.status.state == v3.SubscriptionStatus.SUBSCRIBE_PENDING
    heard = await world.hear(ecu, uris.parse("//mcu1/8001/1/8001"))
    updates = await world.hear(ecu, uris.uri("ecu1", 0, 3, 0x8000), uris.parse("//ecu1/9001/1/0"))
    before = world.config
    world.config = before.model_copy(
        update={"usubscription": before.usubscription.model_copy(update={"answers_for": ["mcu1"]})}
    )
    await world.restart()
    await world.until(lambda: updates.messages)
    update = UPayload.of(updates.messages[-1]).unpack(v3.Update)
    assert update.status.state == v3.SubscriptionStatus.SUBSCRIBED
    world.config = before
    await world.restart()
    await world.until(
        lambda: (
            UPayload.of(updates.messages[-1]).unpack(v3.Update).status.state == v3.SubscriptionStatus.SUBSCRIBE_PENDING
        )
    )
    await mcu.send(publish("//mcu1/8001/1/8001", "warm"))
    await heard.expect_payload(b"warm")


FAMILY = """
[[endpoint]]
name = "depot"
transport = "local"
authorities = ["gate", "*.depot"]
settings = {{ network = "{n}-depot" }}
[[endpoint]]
name = "yard"
transport = "local"
authorities = ["*.yard.depot"]
settings = {{ network = "{n}-yard" }}
[[endpoint]]
name = "cloud"
transport = "local"
authorities = ["cloud"]
usubscription = "none"
settings = {{ network = "{n}-cloud" }}
"""


async def test_a_family_of_authorities_has_a_network_and_a_service(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(FAMILY)
    crane, truck = await world.node("depot", "crane.depot"), await world.node("yard", "truck.yard.depot")
    app = await world.node("cloud", "cloud", 0x9001)
    for topic in ("//crane.depot/8001/1/8001", "//lift.depot/8001/1/8001"):
        answer = await call(
            app, "//gate/0/3/1", v3.SubscriptionRequest(topic=uris.parse(topic)), v3.SubscriptionResponse
        )
        assert answer.status.state == v3.SubscriptionStatus.SUBSCRIBED
    heard = await world.hear(app, uris.parse("//crane.depot/8001/1/8001"))
    await crane.send(publish("//crane.depot/8001/1/8001", "lifting"))
    await heard.expect_payload(b"lifting")
    reached = await world.hear(truck, uris.ANY, uris.parse("//truck.yard.depot/9001/1/0"))
    await app.send(
        UMessageBuilder.notification(
            uris.parse("//cloud/9001/1/8001"), uris.parse("//truck.yard.depot/9001/1/0")
        ).build()
    )
    await world.until(lambda: reached.messages)
    assert world.assembly.endpoints.owner("truck.yard.depot").name == "yard", "the longest suffix"
    assert world.assembly.endpoints.owner("cloud2") is None


# No authority


async def test_a_client_that_leaves_out_its_authority_is_served(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world()
    app = await world.node("vehicle", "vehicle1", 0x9001)
    asked = v3.SubscriptionRequest(topic=UUri(ue_id=0x8001, ue_version_major=1, resource_id=0x8001))
    answer = await call(app, "/0/3/1", asked, v3.SubscriptionResponse, "vehicle1")
    assert answer.status.state == v3.SubscriptionStatus.SUBSCRIBED
    assert [row.topic[0] for row in await world.assembly.usubscription.subscriptions()] == ["vehicle1"]


async def test_what_comes_without_authority_is_of_the_only_host_there(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions={"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"]})
    cloud = await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, uris.parse("//vehicle1/8001/1/8001"))
    nameless = publish("//vehicle1/8001/1/8001", "12 km/h")
    nameless.attributes.source.authority_name = ""
    await world.until(lambda: len(world.networks["vehicle"].members[0].listeners.filters) > 2)
    world.networks["vehicle"].inject(nameless)  # by a network that does not know the sender
    await heard.expect_payload(b"12 km/h")
    assert heard.messages[0].attributes.source == uris.parse("//vehicle1/8001/1/8001")


async def test_what_nobody_can_complete_is_counted(make_world: MakeWorld, fleet: str, publish: Publish) -> None:
    world = await make_world(vehicle("vin1", fleet))
    nameless = UMessageBuilder.notification(
        uris.parse("//cloud/9001/1/8001"), uris.parse("//ecu1.vin1/8001/1/0")
    ).build()
    nameless.attributes.source.authority_name = ""
    world.networks["fleet"].inject(nameless)
    fleet_endpoint = world.assembly.endpoints["fleet"]
    await world.until(lambda: fleet_endpoint.received)
    assert fleet_endpoint.dropped["no_authority"] == 1


# Names themselves


@given(st.from_regex(r"[a-z0-9\-_~]{1,8}(\.[a-z0-9]{1,4}){0,2}", fullmatch=True))
def test_an_inside_name_comes_back_as_it_went(name: str) -> None:
    names = Names("vin1", lambda authority: authority in ("ecu1", "mcu1", name))
    outside = names.outward(name)
    assert outside == f"{name}.vin1"
    assert names.inward(outside) == name
    assert names.inward(name) == name, "which no message from outside is taken under"
    stranger = f"{name}.vin2"
    assert names.inward(stranger) == stranger == names.outward(stranger)


BASE = """
[[endpoint]]
name = "in"
transport = "local"
authorities = [{inside}]
[[endpoint]]
name = "out"
transport = "local"
authorities = [{outside}]
suffix = "vin1"
"""


@pytest.mark.parametrize(
    ("inside", "outside", "says"),
    [
        ('"ecu1.vin1"', '"*"', "ends in .vin1 already"),
        ('"ecu1"', '"ecu1.vin1"', "somebody else's name"),
        ('"ecu1"', '"*.vin1"', "our own names end in .vin1"),
        (f'"{"e" * 126}"', '"*"', "longer than 128"),
        ('"[::1]"', '"*"', "takes no suffix"),
        ('"*"', '"cloud"', "the streamer's own authority"),
    ],
)
def test_collisions_are_errors_at_the_start(inside: str, outside: str, says: str) -> None:
    with pytest.raises(UStatusError, match=says.replace("*", r"\*")):
        loads(BASE.format(inside=inside, outside=outside))


@pytest.mark.parametrize("authority", ["*.", "*.*", "*vin1", "a.*", "*.*.b"])
def test_a_family_is_a_star_and_a_name(authority: str) -> None:
    with pytest.raises(UStatusError):
        loads(BASE.format(inside=f'"ecu1", "{authority}"', outside='"cloud"'))


def test_what_is_configured_is_what_is_answered_for() -> None:
    def config(more: str) -> Config:
        return loads(more + BASE.format(inside='"gate", "*.depot"', outside='"cloud"'))

    assert config("").answers_for == {"*.depot"}
    assert config('[usubscription]\nanswers_for = ["mcu1"]\n').answers_for == {"mcu1"}
    assert config("[usubscription]\nanswers_for = []\n").answers_for == set()


HOSTS = st.sampled_from(["ecu1", "mcu1", "cloud", "ecu1.vin2", "", "*"])
ADDRESSES = st.builds(
    lambda host: UUri(authority_name=host, ue_id=0x8001, ue_version_major=1, resource_id=0x8001), HOSTS
)
INSIDE = Names("vin1", lambda authority: authority in ("ecu1", "mcu1"))


def about(kind: Any, address: UUri, depth: int = 0) -> Any:
    """A message of that kind with this address in all its fields."""
    made = kind()
    for field in kind.DESCRIPTOR.fields:
        type_, value = field.message_type, getattr(made, field.name)
        if type_ is not None and type_.GetOptions().map_entry:
            continue
        if type_ is None:
            if kind is ustreamer_pb2.RecordBatch and field.name == "message":
                value.extend(_record(address).SerializeToString() for _ in range(2))
        elif type_.full_name == "uprotocol.v1.UUri":
            (value.extend([address] * 2) if field.is_repeated else value.CopyFrom(address))
        elif type_.full_name == "uprotocol.v1.UMessage":
            value.CopyFrom(_record(address))
        elif type_.full_name.startswith(("uprotocol", "upstreamer")) and depth < 3:
            inner = about(message_factory.GetMessageClass(type_), address, depth + 1)
            (value.append(inner) if field.is_repeated else value.CopyFrom(inner))
    return made


def _record(source: UUri) -> UMessage:
    message = UMessageBuilder.notification(uris.parse("//ecu1/8001/1/8001"), APP).build_from_upayload(UPayload(b"x"))
    message.attributes.source.CopyFrom(source)
    return message


@given(st.sampled_from(sorted(CARRIED)), ADDRESSES, st.booleans())
def test_whatever_the_platform_services_carry_comes_back_as_it_went(key: Any, address: UUri, wrapped: bool) -> None:
    entity, major, resource, is_response = key
    service, peer = uris.uri("ecu1", entity, major, resource), uris.parse("//cloud/9001/1/0")
    carried = about(CARRIED[key], address)
    payload = UPayload.pack(carried) if wrapped else UPayload(carried.SerializeToString(), 2)
    if is_response:
        builder = UMessageBuilder.response(service, peer, uuids.new()).with_ttl(1000)
    elif uris.is_topic(service):
        builder = UMessageBuilder.notification(service, peer)
    else:
        builder = UMessageBuilder.request(
            uris.parse("//ecu1/8001/1/0"), uris.uri("cloud", entity, major, resource), 1000
        )
    message = EncodedMessage.of(builder.build_from_upayload(payload))
    sent = INSIDE.leave(message)
    assert sent.attributes.source.authority_name == "ecu1.vin1"
    if address.authority_name == "mcu1":
        assert sent.payload.count(b".vin1") == carried.SerializeToString().count(address.authority_name.encode())
    back = INSIDE.arrived(Readdressed(message.attributes.source, message.attributes.sink), sent)
    assert back.attributes == message.attributes
    assert UPayload.of(back.decoded()).unpack(CARRIED[key]) == carried


def test_what_a_caller_may_read_has_the_names_of_its_network() -> None:
    names = Names("vin1", lambda authority: authority == "ecu1" or authority.endswith(".sub"))

    def visible(*authorities: str) -> ustreamer_pb2.VisibleTopics:
        topics = [UUri(authority_name=one, ue_id=1, ue_version_major=1, resource_id=0x8000) for one in authorities]
        patterns = [ustreamer_pb2.TopicPattern(topic=topic) for topic in topics]
        origin = ustreamer_pb2.VisibleTopics.Origin(authorities=authorities, allow=patterns, deny=patterns)
        return ustreamer_pb2.VisibleTopics(allow=patterns, deny=patterns, origins=[origin])

    carried = ustreamer_pb2.DescribeResponse(visible=visible("ecu1", "*.sub", "cloud", "*"))
    response = UMessageBuilder.response(uris.parse("//ecu1/4/1/1"), APP, uuids.new()).with_ttl(1000)
    message = EncodedMessage.of(response.build_from_upayload(UPayload.pack(carried)))
    sent = names.leave(message)
    outside = UPayload.of(sent.decoded()).unpack(ustreamer_pb2.DescribeResponse)
    assert outside.visible == visible("ecu1.vin1", "*.sub.vin1", "cloud", "*")
    back = names.arrived(Readdressed(message.attributes.source, message.attributes.sink), sent)
    assert UPayload.of(back.decoded()).unpack(ustreamer_pb2.DescribeResponse) == carried


@pytest.mark.parametrize("payload", [b"", b"\xff\xff\xff", b"\x0a\x7fshort"])
def test_a_payload_that_is_no_such_thing_passes_as_it_is(payload: bytes) -> None:
    message = UMessageBuilder.request(
        uris.parse("//ecu1/8001/1/0"), uris.parse("//cloud/0/3/1"), 1000
    ).build_from_upayload(UPayload(payload, 2))
    assert INSIDE.leave(EncodedMessage.of(message)).payload == payload


def test_a_page_with_a_record_that_is_no_message_passes_as_it_is() -> None:
    page = ustreamer_pb2.PollResponse(batches=[ustreamer_pb2.RecordBatch(message=[b"\xff\xff\xff"])])
    response = UMessageBuilder.response(uris.parse("//ecu1/4/1/2"), APP, uuids.new()).with_ttl(1000)
    message = EncodedMessage.of(response.build_from_upayload(UPayload(page.SerializeToString(), 2)))
    sent = INSIDE.leave(message)
    assert (sent.attributes.source.authority_name, sent.payload) == ("ecu1.vin1", message.payload)
