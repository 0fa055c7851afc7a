"""Pause and Resume: paused messages wait in the log, all others continue, none is lost, and the caller's right is
checked first."""

from __future__ import annotations

import asyncio
import json
import os
import random
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.log.log import Log, RetentionLoss
from streamer.data_dir import CONTROL_SOCKET, PAUSES_FILE
from streamer.egress import losses, reading_back
from streamer.egress import pump as egress
from streamer.egress.pump import Pump
from streamer.operating.control import ControlSocket, ask, pause_operations
from streamer.operation import Operations
from streamer.walk import paused as pauses
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.flow import Flow
from streamer.walk.paused import PAUSES_MAX, Pause, Paused
from streamer.walk.view import Rule, Rules, View
from transports.base import stopped
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1 import ustreamer_pb2 as wire
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.pacing import Backoff
from uprotocol.status import OK, UStatusError
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.uattributes_pb2 import UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription_client.client import USubscriptionClient
from usubscription_client.interest import Want

MakeWorld = Any
Publish = Callable[..., UMessage]
spec = pytest.mark.spec

SPEED, DOOR = uris.parse("//vehicle1/8001/1/8001"), uris.parse("//vehicle1/8001/1/8002")
ALL = uris.parse("//vehicle1/8001/1/FFFF")
PRIORITIES = [UPriority.UPRIORITY_CS1, UPriority.UPRIORITY_CS5]
APP, PHONE = uris.parse("//cloud/9001/1/0"), uris.parse("//phone/9001/1/0")
SUBSCRIBED = {
    "//vehicle1/8001/1/8001": ["//cloud/9001/1/0", "//mcu1/9001/1/0"],
    "//vehicle1/8001/1/8002": ["//cloud/9001/1/0"],
}
TWO_BEHIND = """
[[endpoint]]
name = "vehicle"
transport = "local"
authorities = ["vehicle1"]
settings = {{ network = "{n}-vehicle" }}
[[endpoint]]
name = "fleet"
transport = "local"
authorities = ["*", "cloud"]
usubscription = "none"
settings = {{ network = "{n}-fleet" }}
"""


def texts(first: int, end: int) -> list[str]:
    return [str(number) for number in range(first, end)]


def kept(world: Any) -> int:
    """Records of SPEED that the log has taken; notifications of subscriptions are in it, too."""
    return sum(stream.records for stream in world.assembly.logs.durable.streams() if stream.source == SPEED)


def notes(world: Any) -> list[str]:
    """Returns the notes, without that of a first start."""
    return [note for note in world.parts.notes() if " new since " not in note]


async def quiet(world: Any) -> None:
    """Waits until each pump has processed its whole backlog."""
    await world.until(lambda: all(not pump.backlog and not pump.sender.queue for pump in world.assembly.pumps))


async def code_of(work: Any) -> int:
    with pytest.raises(UStatusError) as error:
        await work
    return error.value.code


@spec("local~disp-start-stop")
async def test_what_is_paused_waits_in_order_while_all_else_goes_on_and_comes_before_what_is_live(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud, mcu = (
        await world.node("vehicle", "vehicle1"),
        await world.node("cloud", "cloud"),
        await world.node("mcu", "mcu1"),
    )
    speed, door, there = await world.hear(cloud, SPEED), await world.hear(cloud, DOOR), await world.hear(mcu, SPEED)
    await vehicle.send(publish(SPEED, "0"))
    await speed.expect(1)
    paused = world.assembly.paused
    await paused.pause(SPEED, "cloud")
    await paused.pause(SPEED, "cloud")
    assert list(paused) == [Pause(uris.format(SPEED), "cloud")]
    for number in range(1, 21):
        await vehicle.send_batch([publish(SPEED, str(number)), publish(DOOR, str(number))])
    await there.expect(21)
    await door.expect(20)
    await quiet(world)
    assert (speed.texts, door.texts, there.texts) == (["0"], texts(1, 21), texts(0, 21))
    assert world.parts.problems() == []
    assert notes(world) == [f"paused: {uris.format(SPEED)} to cloud; what comes waits in the log"]
    sending = asyncio.ensure_future(vehicle.send_batch([publish(SPEED, str(number)) for number in range(21, 40)]))
    assert await paused.resume(SPEED, "cloud") == 1
    await sending
    await speed.expect(40)
    await there.expect(40)
    assert speed.texts == there.texts == texts(0, 40)
    await world.until(lambda: not any(len(pump.waits.topics) for pump in world.assembly.pumps))
    assert notes(world) == []


@spec("local~disp-start-stop")
async def test_a_rule_is_paused_for_what_comes_from_one_endpoint(make_world: MakeWorld, publish: Publish) -> None:
    of_mcu = uris.parse("//mcu1/8001/1/8001")
    world = await make_world(subscriptions=SUBSCRIBED | {uris.format(of_mcu): ["//cloud/9001/1/0"]})
    vehicle, cloud, mcu = (
        await world.node("vehicle", "vehicle1"),
        await world.node("cloud", "cloud"),
        await world.node("mcu", "mcu1"),
    )
    speed, load, there = await world.hear(cloud, SPEED), await world.hear(cloud, of_mcu), await world.hear(mcu, SPEED)
    answer = world.streamer.operations.answer
    rule = {"rule_from": "vehicle", "rule_to": "cloud"}
    everything = uris.format(uris.ANY)
    assert await answer("pause", rule) == {"paused": [Pause(everything, "cloud", "vehicle")]}
    for number in range(20):
        await vehicle.send(publish(SPEED, str(number)))
        await mcu.send(publish(of_mcu, str(number)))
    await there.expect(20)
    await load.expect(20)
    await quiet(world)
    assert speed.texts == []
    assert notes(world) == ["paused: everything from vehicle to cloud; what comes waits in the log"]
    data = world.config.streamer.data_dir
    assert json.loads((data / PAUSES_FILE).read_text()) == [[everything, "cloud", "vehicle"]]
    assert list(made(data / PAUSES_FILE)) == [Pause(everything, "cloud", "vehicle")], "as a restart finds it"
    with pytest.raises(UStatusError, match="see what is paused"):
        await answer("resume", {"endpoint": "cloud"})
    assert await answer("resume", rule) == {"paused": []}
    await speed.expect(20)
    assert speed.texts == texts(0, 20)


@spec("local~disp-start-stop")
async def test_an_endpoint_is_paused_for_everything_that_goes_there(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud, mcu = (
        await world.node("vehicle", "vehicle1"),
        await world.node("cloud", "cloud"),
        await world.node("mcu", "mcu1"),
    )
    speed, door, there = await world.hear(cloud, SPEED), await world.hear(cloud, DOOR), await world.hear(mcu, SPEED)
    answer = world.streamer.operations.answer
    assert await answer("pause", {"endpoint": "cloud"}) == {"paused": [Pause(uris.format(uris.ANY), "cloud")]}
    for number in range(20):
        await vehicle.send_batch([publish(SPEED, str(number)), publish(DOOR, str(number))])
    await there.expect(20)
    await quiet(world)
    assert speed.texts == door.texts == []
    assert notes(world) == ["paused: everything to cloud; what comes waits in the log"]
    assert await answer("resume", {"endpoint": "cloud"}) == {"paused": []}
    await speed.expect(20)
    await door.expect(20)
    assert speed.texts == door.texts == texts(0, 20)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"endpoint": "nowhere"}, UCode.NOT_FOUND),
        ({"rule_from": "nowhere", "rule_to": "cloud"}, UCode.NOT_FOUND),
        ({"rule_from": "vehicle", "rule_to": "nowhere"}, UCode.NOT_FOUND),
        ({"rule_from": "vehicle", "rule_to": "vehicle"}, UCode.NOT_FOUND),
        ({"rule_from": "vehicle"}, UCode.INVALID_ARGUMENT),
        ({"rule_to": "cloud"}, UCode.INVALID_ARGUMENT),
        ({"endpoint": "cloud", "peer": "cloud"}, UCode.INVALID_ARGUMENT),
        ({"endpoint": 1}, UCode.INVALID_ARGUMENT),
        ({"topic": "//vehicle1/8001/1/8001"}, UCode.INVALID_ARGUMENT),
        ({}, UCode.INVALID_ARGUMENT),
    ],
)
async def test_what_can_not_be_paused_is_said(make_world: MakeWorld, given: dict[str, Any], code: int) -> None:
    world = await make_world(subscriptions={})
    assert await code_of(world.streamer.operations.answer("pause", given)) == code
    assert not len(world.assembly.paused)


async def test_a_pause_of_a_rule_follows_a_renamed_endpoint_and_is_idle_without_one(tmp_path: Path) -> None:
    paused = made(tmp_path / "paused.json")
    await paused.pause(uris.ANY, "net", "vehicle")
    await paused.pause(SPEED, "net")
    await paused.rename("vehicle", "inside")
    assert Pause(uris.format(uris.ANY), "net", "inside") in list(paused)
    notes = "paused: everything from inside to net; and 'inside' is no known endpoint, so nothing waits"
    assert notes in list(paused.notes())
    assert json.loads((tmp_path / "paused.json").read_text())[-1] == [uris.format(SPEED), "net"], (
        "as older ones read it"
    )
    assert await paused.resume(uris.ANY, "net") == 1
    assert await paused.resume(uris.ANY, "net", "inside") == 1


@spec("local~disp-start-stop")
async def test_a_topic_that_is_paused_while_it_is_read_back_is_not_held_once_nobody_wants_it(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window is so small that the peer, which is away, leaves most of it to be read back."""
    monkeypatch.setattr(egress, "WINDOW_MESSAGES_MAX", 4)
    monkeypatch.setattr(reading_back, "READ_MESSAGES_MAX", 4)
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, streamer = await world.node("vehicle", "vehicle1"), world.streamer
    transport = streamer.assembly.endpoints["cloud"].transport
    (pump,) = [pump for pump in streamer.assembly.pumps if pump.peer.name == "cloud" and pump.log.durable]
    await streamer.assembly.paused.pause(SPEED, "cloud")
    for number in range(20):
        await vehicle.send(publish(SPEED, str(number)))
    await world.until(lambda: len(pump.waits.topics) == 1 and not pump.backlog)
    transport.disconnect()
    await streamer.assembly.paused.resume(SPEED, "cloud")
    await world.until(lambda: pump.waits.reading_back.is_under_way and pump.retries)
    await streamer.assembly.paused.pause(SPEED, "cloud")
    await world.change_rule("vehicle", "cloud", None)
    await world.until(lambda: not len(pump.waits.topics))
    assert not pump.waits.reading_back.is_under_way


@spec("local~disp-start-stop")
async def test_what_was_read_ahead_of_a_peer_that_is_away_waits_too(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    speed, door = await world.hear(cloud, SPEED), await world.hear(cloud, DOOR)
    transport = world.assembly.endpoints["cloud"].transport
    transport.disconnect()
    for number in range(50):
        await vehicle.send_batch([publish(SPEED, str(number)), publish(DOOR, str(number))])
    (pump,) = [pump for pump in world.assembly.pumps if pump.peer.name == "cloud" and pump.log.durable]
    await world.until(lambda: len(pump.sender.queue) == 100)
    await world.assembly.paused.pause(SPEED, "cloud")
    transport.reconnect()
    await door.expect(50)
    await quiet(world)
    assert (speed.texts, door.texts) == ([], texts(0, 50))
    await world.assembly.paused.resume(ALL, "cloud")
    await speed.expect(50)
    assert speed.texts == texts(0, 50)


@spec("local~disp-start-stop")
async def test_a_pause_outlives_restarts_and_so_does_what_waits(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    speed, door = await world.hear(cloud, SPEED), await world.hear(cloud, DOOR)
    await world.assembly.paused.pause(SPEED, "cloud")
    for life in range(3):
        await vehicle.send_batch([publish(SPEED, str(life)), publish(DOOR, str(life))])
        await door.expect(life + 1)
        await quiet(world)
        await world.restart()
    assert speed.texts == []
    await world.assembly.paused.resume(SPEED, "cloud")
    await speed.expect(3)
    assert (speed.texts, door.texts) == (texts(0, 3), texts(0, 3))


async def test_a_pause_toward_a_removed_peer_holds_nothing_and_is_reported(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(subscriptions=SUBSCRIBED, start=False)
    data = world.config.streamer.data_dir
    data.mkdir(parents=True)
    pauses.file_of(data / PAUSES_FILE).save([Pause(uris.format(SPEED), "old-cloud")])
    await world.start()
    assert "no known peer" in notes(world)[0]
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    speed = await world.hear(cloud, SPEED)
    await vehicle.send(publish(SPEED, "goes"))
    await speed.expect(1)
    await world.assembly.paused.resume(SPEED, "old-cloud")
    assert notes(world) == []


async def test_what_nobody_wants_any_more_does_not_come_when_it_is_resumed(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(subscriptions={})
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    speed = await world.hear(cloud, SPEED)
    async with USubscriptionClient(cloud, cloud.local, "vehicle1") as client:
        await client.subscribe(SPEED)
        await world.assembly.paused.pause(SPEED, "cloud")
        await vehicle.send(publish(SPEED, "unwanted"))
        await world.until(lambda: kept(world) == 1)
        await quiet(world)
        await client.unsubscribe(SPEED)
        await client.subscribe(SPEED)
        await vehicle.send(publish(SPEED, "wanted"))
        await world.until(lambda: kept(world) == 2)
        await world.assembly.paused.resume(SPEED, "cloud")
        await speed.expect(1)
        assert speed.texts == ["wanted"]


async def test_one_authority_behind_an_endpoint_is_paused_and_the_others_are_not(make_world: MakeWorld) -> None:
    world = await make_world(TWO_BEHIND, subscriptions={})
    vehicle, fleet = await world.node("vehicle", "vehicle1"), await world.node("fleet", "cloud")
    cloud, phone = await world.hear(fleet, SPEED, APP), await world.hear(fleet, SPEED, PHONE)
    await world.assembly.paused.pause(ALL, "phone")

    def messages(number: int) -> list[UMessage]:
        return [
            UMessageBuilder.notification(SPEED, sink).build_from_upayload(UPayload(b"%d" % number, 4))
            for sink in (APP, PHONE)
        ]

    for number in range(5):
        await vehicle.send_batch(messages(number))
    await cloud.expect(5)
    await quiet(world)
    assert phone.texts == []
    await world.assembly.paused.resume(ALL, "phone")
    await phone.expect(5)
    assert cloud.texts == phone.texts == texts(0, 5)


async def test_requests_and_responses_are_never_paused(make_world: MakeWorld) -> None:
    world = await make_world(subscriptions={})
    for topic in (uris.parse("//vehicle1/8001/1/1"), uris.parse("//vehicle1/8001/1/0")):
        assert await code_of(world.assembly.paused.pause(topic, "cloud")) == UCode.INVALID_ARGUMENT
    await world.assembly.paused.pause(uris.ANY, "cloud")
    await world.assembly.paused.pause(uris.ANY, "vehicle")
    cloud = await world.node("cloud", "cloud", 0x9001)
    async with InMemoryRpcClient(cloud, cloud.local) as client:
        answer = await client.invoke_method(uris.uri("vehicle1", 4, 1, 1), UPayload.pack(wire.DescribeRequest()))
    assert len(answer.unpack(wire.DescribeResponse).logs) == 2


async def test_messages_that_expire_while_paused_are_reported(make_world: MakeWorld) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle = await world.node("vehicle", "vehicle1")
    await world.assembly.paused.pause(SPEED, "cloud")
    await vehicle.send(UMessageBuilder.publish(SPEED).with_ttl(150).build())
    await world.until(lambda: kept(world) >= 1)
    await asyncio.sleep(0.3)
    await world.assembly.paused.resume(SPEED, "cloud")
    await world.until(lambda: world.assembly.dead_letters.by_code.get("DEADLINE_EXCEEDED") == 1)


async def test_records_that_retention_will_remove_are_reported_before_and_when_it_does(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(subscriptions=SUBSCRIBED, more="[history]\nabsent_hours = 10\n")
    vehicle, mcu = await world.node("vehicle", "vehicle1"), await world.node("mcu", "mcu1")
    there = await world.hear(mcu, SPEED)
    await world.assembly.paused.pause(SPEED, "cloud")
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(2)])
    await there.expect(2)
    chunks = list(world.assembly.logs.durable.tail(0))
    await vehicle.send(publish(SPEED, "2"))
    await there.expect(3)
    await quiet(world)
    hour, claims = 3_600_000, world.assembly.claims
    claims.passed(8 * hour, {})
    assert world.parts.problems() == []
    claims.passed(hour, {})
    (problem,) = world.parts.problems()
    assert "1 topics wait for endpoint cloud, paused or undecided: in 1.0 h" in problem
    (pump,) = [pump for pump in world.assembly.pumps if pump.peer.name == "cloud" and pump.log.durable]
    pump._passed(RetentionLoss(0, 3, chunks))  # as the log says it
    await world.until(lambda: world.assembly.dead_letters.by_code.get("RESOURCE_EXHAUSTED") == 2)
    cloud = await world.node("cloud", "cloud")
    speed = await world.hear(cloud, SPEED)
    await world.assembly.paused.resume(SPEED, "cloud")
    await speed.expect(1)
    assert speed.texts == ["2"]


@pytest.mark.parametrize(
    ("is_handed_over", "letters", "expected"),
    [(True, 2, (2, 5)), (True, 3, (3, 5)), (True, 4, None), (False, 4, (0, 7)), (False, 0, (0, 7))],
)
async def test_held_records_that_retention_deletes_are_reported_as_a_range_if_not_as_dead_letters(
    make_world: MakeWorld,
    publish: Publish,
    monkeypatch: pytest.MonkeyPatch,
    is_handed_over: bool,
    letters: int,
    expected: tuple[int, int] | None,
) -> None:
    """Others were sent meanwhile, so what waits is far behind the cursor. Retention hands over what it deletes only as
    far as an allowance reaches."""
    monkeypatch.setattr(losses, "PASSED_LETTERS_MAX", letters)
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    doors = await world.hear(cloud, DOOR)
    await world.assembly.paused.pause(SPEED, "cloud")
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(4)])
    await vehicle.send_batch([publish(DOOR, str(number)) for number in range(2)])
    await doors.expect(2)
    await quiet(world)
    (pump,) = [pump for pump in world.assembly.pumps if pump.peer.name == "cloud" and pump.log.durable]
    chunks = list(world.assembly.logs.durable.tail(0)) if is_handed_over else []
    gaps = list[tuple[int, int]]()
    pump.losses.on_gap = lambda after, before, _: gaps.append((after, before))
    pump._passed(RetentionLoss(0, 7, chunks))  # as the log says it
    assert gaps == ([] if expected is None else [expected])
    await world.until(lambda: pump.peer.dropped["undeliverable"] == (letters if is_handed_over else 0))


# -- who may


CONTROL = '[dispatch]\ncontrol = ["//cloud/9001/1/FFFF"]\n'


async def call(node: Any, method: int, request: Any) -> UPayload:
    async with InMemoryRpcClient(node, node.local) as client:
        return await client.invoke_method(uris.uri("vehicle1", 4, 1, method), UPayload.pack(request))


@spec("local~disp-start-stop")
async def test_whom_the_operator_names_may_pause_resume_and_list(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED, more=CONTROL)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    stranger, neighbour = await world.node("cloud", "cloud", 0x9002), await world.node("vehicle", "vehicle1", 0x9001)
    speed = await world.hear(cloud, SPEED)
    requests = (
        (ids.PAUSE, wire.PauseRequest(topic=SPEED, peer="cloud")),
        (ids.RESUME, wire.ResumeRequest(topic=SPEED, peer="cloud")),
        (ids.LIST_PAUSED, wire.ListPausedRequest()),
    )
    for node in (stranger, neighbour):
        for method, request in requests:
            assert await code_of(call(node, method, request)) == UCode.PERMISSION_DENIED
    await call(cloud, *requests[0])
    listed = (await call(cloud, *requests[2])).unpack(wire.ListPausedResponse)
    assert [(one.topic, one.peer) for one in listed.paused] == [(SPEED, "cloud")]
    await vehicle.send(publish(SPEED, "waits"))
    await world.until(lambda: kept(world) == 1)
    await quiet(world)
    assert speed.texts == []
    assert (await call(cloud, *requests[1])).unpack(wire.ResumeResponse).ended == 1
    await speed.expect(1)
    assert await code_of(call(cloud, *requests[1])) == UCode.NOT_FOUND
    assert await code_of(call(cloud, ids.PAUSE, wire.PauseRequest(topic=SPEED, peer="nowhere"))) == UCode.NOT_FOUND
    assert await code_of(call(cloud, ids.PAUSE, wire.PauseRequest(peer="cloud"))) == UCode.INVALID_ARGUMENT


async def test_nobody_may_unless_the_operator_says_so(make_world: MakeWorld) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    for network, authority in (("vehicle", "vehicle1"), ("cloud", "cloud")):
        node = await world.node(network, authority, 0x9001)
        assert (
            await code_of(call(node, ids.PAUSE, wire.PauseRequest(topic=SPEED, peer="cloud")))
            == UCode.PERMISSION_DENIED
        )
    assert list(world.assembly.paused) == []


# -- what is kept of it


def made(path: Path) -> Paused:
    transport = Network(random.Random(), 0, needs_sink=False)
    found = Paused(
        path,
        Endpoints([Endpoint("vehicle", ["vehicle1"], transport), Endpoint("net", ["cloud", "phone"], transport)]),
        "vehicle1",
    )
    found.load()
    return found


async def test_patterns_are_resumed_by_what_covers_them_and_errors_say_what_to_do(tmp_path: Path) -> None:
    paused = made(tmp_path / "paused.json")
    await paused.pause(uris.parse("/8001/1/8001"), "net")
    await paused.pause(DOOR, "net")
    await paused.pause(ALL, "phone")
    assert sorted(paused) == sorted(made(tmp_path / "paused.json")), "as a restart finds it"
    with pytest.raises(UStatusError, match="FFFF: resume that"):
        await paused.resume(SPEED, "phone")
    assert await paused.resume(ALL, "net") == 2
    with pytest.raises(UStatusError, match="see what is paused"):
        await paused.resume(ALL, "net")
    assert await paused.resume(uris.parse("//*/FFFFFFFF/FF/FFFF"), "phone") == 1
    assert list(made(tmp_path / "paused.json")) == []
    for peer in ("elsewhere", "", "x" * 200):
        assert await code_of(paused.pause(SPEED, peer)) == UCode.NOT_FOUND


async def test_pauses_are_bounded(tmp_path: Path) -> None:
    paused = made(tmp_path / "paused.json")
    pauses.file_of(tmp_path / "paused.json").save(
        [Pause(f"//vehicle1/{one + 1:X}/1/8001", "net") for one in range(PAUSES_MAX)]
    )
    paused.load()
    assert await code_of(paused.pause(SPEED, "net")) == UCode.RESOURCE_EXHAUSTED
    assert len(paused) == PAUSES_MAX


async def test_a_pause_that_can_not_be_stored_is_none(tmp_path: Path) -> None:
    paused = made(tmp_path / "gone" / "paused.json")
    assert await code_of(paused.pause(SPEED, "net")) == UCode.UNAVAILABLE
    assert list(paused) == []


async def test_an_unreadable_file_is_reported_until_the_next_pause(make_world: MakeWorld) -> None:
    world = await make_world(subscriptions={}, start=False)
    data = world.config.streamer.data_dir
    data.mkdir(parents=True)
    (data / PAUSES_FILE).write_text('[["not a topic", 5]')
    await world.start()
    (problem,) = world.parts.problems()
    assert "pause again" in problem
    await world.assembly.paused.pause(SPEED, "cloud")
    assert world.parts.problems() == []
    assert json.loads((data / PAUSES_FILE).read_text()) == [[uris.format(SPEED), "cloud"]]


# -- the command line's way


async def asked(*arguments: Any) -> list[Pause]:
    return await asyncio.to_thread(ask, *arguments)


async def test_the_command_line_reaches_a_streamer_that_runs_and_one_that_is_stopped(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 30)  # deeper than the path of a socket may be
    folder.mkdir()
    topic = uris.format(SPEED)
    assert await asked(folder, "paused") == []
    assert await asked(folder, "pause", "/8001/1/8001", "net", "vehicle1") == [Pause(topic, "net")]
    assert await code_of(asked(folder, "pause", "/8001/1/8001", "net")) == UCode.INVALID_ARGUMENT
    paused = made(folder / PAUSES_FILE)
    (folder / CONTROL_SOCKET).touch()  # left by a kill
    async with ControlSocket(folder, Operations(pause_operations(paused))):
        assert stat.S_IMODE(os.stat(folder / CONTROL_SOCKET).st_mode) == 0o600
        assert await asked(folder, "paused") == [Pause(topic, "net")]
        assert len(await asked(folder, "pause", "/8001/1/8002", "phone")) == len(paused) == 2
        assert await asked(folder, "resume", "//vehicle1/8001/1/FFFF", "net") == [Pause(uris.format(DOOR), "phone")]
        assert await code_of(asked(folder, "resume", topic, "net")) == UCode.NOT_FOUND
        assert await code_of(asked(folder, "dance")) == UCode.NOT_FOUND
        assert await code_of(asked(folder, "pause", "nonsense", "net")) == UCode.INVALID_ARGUMENT
    assert not (folder / CONTROL_SOCKET).exists()
    assert await asked(folder, "resume", uris.format(DOOR), "phone") == []
    assert await code_of(asked(folder / "nowhere", "paused")) == UCode.INVALID_ARGUMENT


async def test_a_streamer_that_runs_without_its_socket_is_not_worked_around(make_world: MakeWorld) -> None:
    world = await make_world(subscriptions={})
    folder = world.config.streamer.data_dir
    assert await code_of(asked(folder, "pause", uris.format(SPEED), "cloud")) == UCode.UNAVAILABLE
    assert list(world.assembly.paused) == []


# -- a pump, whatever comes between


class Network(UTransport):
    """Accepts or is away, as drawn; reports a paused message at the start of a batch."""

    connected = True

    def __init__(self, draw: random.Random, away: float, *, needs_sink: bool) -> None:
        self.capabilities = Capability(0) if needs_sink else Capability.PUBLISH_WITHOUT_SINK
        self._draw, self._away = draw, away
        self.taken: list[UMessage] = []
        self.may: Callable[[UMessage], bool] = lambda _: True
        self.complaints: list[UMessage] = []

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        self.complaints += [message for message in messages if not self.may(message)]
        await asyncio.sleep(0)
        statuses: list[UStatus] = []
        for message in messages:
            if self._draw.random() < self._away:
                break
            self.taken.append(message)
            statuses.append(OK)
        if len(statuses) < len(messages):
            stopped(statuses, len(messages), UStatus(code=UCode.UNAVAILABLE, message="away"))
        return statuses


class Interest:
    version = 0
    undecided = staticmethod(lambda topic: ())
    on_change = staticmethod(lambda callback: None)

    def wants(self, topic: UUri) -> dict[str, Want]:
        wants = {"cloud": Want((), None)}
        return {**wants, "phone": Want((), None)} if topic.resource_id == 0x8001 else wants


@spec("local~disp-start-stop")
@spec("local~disp-order")
@given(
    seed=st.integers(0, 1 << 30),
    away=st.sampled_from([0.0, 0.05, 0.2]),
    needs_sink=st.booleans(),
    one_authority=st.booleans(),
)
def test_nothing_is_lost_or_out_of_order_and_nothing_that_is_paused_leaves(
    tmp_path_factory: pytest.TempPathFactory, seed: int, away: float, needs_sink: bool, one_authority: bool
) -> None:
    """Messages that may arrive twice: a topic whose authorities or priority classes have different positions."""
    asyncio.run(_pump(tmp_path_factory.mktemp("paused"), random.Random(seed), away, needs_sink, one_authority))


async def _pump(folder: Path, draw: random.Random, away: float, needs_sink: bool, one_authority: bool) -> None:
    log, network, inside = (
        await Log.open(None, name="test"),
        Network(draw, away, needs_sink=needs_sink),
        Network(draw, 0, needs_sink=False),
    )
    peer = Endpoint("net", ["cloud", "phone"], network)  # type: ignore[arg-type]
    endpoints, rules, interest = Endpoints([Endpoint("vehicle", ["vehicle1"], inside), peer]), Rules(), Interest()  # type: ignore[arg-type]
    rules.add(Rule("vehicle", "net"))
    unsynced: Any = SimpleNamespace(replace_text=lambda path, text: path.write_text(text))
    paused = Paused(folder / "paused.json", endpoints, "vehicle1", unsynced)
    view = View(endpoints, rules, interest, [log], paused)  # type: ignore[arg-type]
    letters: Any = SimpleNamespace(add=lambda *_: pytest.fail("nothing is undeliverable here"))
    pump = Pump(peer, log, view, letters, Backoff(1, 1), Flow(), paused)
    paused.on_change(pump.wake)
    network.may = lambda message: any(
        not paused.holds(peer, authority, message.attributes.source)
        for authority in receivers(message, interest, needs_sink)
    )
    pump.begin()
    running = asyncio.create_task(pump.run())
    sent: list[UMessage] = []
    mixed = draw.random() < 0.3
    for _ in range(draw.randrange(5, 25)):
        match draw.randrange(5):
            case 0:
                await paused.pause(
                    draw.choice((SPEED, DOOR, ALL)), draw.choice(("cloud", "phone", "net")) if one_authority else "net"
                )
            case 1 if len(paused):
                pause = draw.choice(sorted(paused))
                await paused.resume(uris.parse(pause.topic), pause.peer)
            case 2:
                for _ in range(draw.randrange(20)):
                    await asyncio.sleep(0)
            case _:
                batch = [drawn(draw, len(sent) + one, mixed) for one in range(draw.randrange(1, 25))]
                streams = [
                    log.stream_id(m.attributes.source, m.attributes.sink if m.attributes.HasField("sink") else None)
                    for m in batch
                ]
                sent += batch
                await log.append(streams, [EncodedMessage.of(m) for m in batch])
    for pause in list(paused):
        await paused.resume(uris.parse(pause.topic), pause.peer)
    async with asyncio.timeout(60):
        while pump.backlog or len(pump.sender.queue) or pump.aside or len(pump.waits.topics):  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await log.close()
    assert not network.complaints
    for authority in ("cloud", "phone") if needs_sink else ("",):
        check(authority, sent, network.taken, interest, may_repeat=one_authority or mixed or needs_sink)


def receivers(message: UMessage, interest: Interest, needs_sink: bool) -> list[str]:
    attributes = message.attributes
    return [attributes.sink.authority_name] if attributes.HasField("sink") else list(interest.wants(attributes.source))


def drawn(draw: random.Random, number: int, mixed: bool) -> UMessage:
    topic = draw.choice((SPEED, DOOR))
    builder = (
        UMessageBuilder.publish(topic)
        if draw.random() < 0.7
        else UMessageBuilder.notification(topic, draw.choice((APP, PHONE)))
    )
    builder.with_priority(draw.choice(PRIORITIES) if mixed else PRIORITIES[topic is SPEED])
    return builder.build_from_upayload(UPayload(b"%d" % number, 4))


def check(authority: str, sent: list[UMessage], taken: list[UMessage], interest: Interest, *, may_repeat: bool) -> None:
    """Each stream and class whole and in order, of all that is for `authority` ("": for the network)."""

    def mine(messages: list[UMessage]) -> dict[Any, list[bytes]]:
        found: dict[Any, list[bytes]] = {}
        for message in messages:
            a = message.attributes
            if not authority or authority in receivers(message, interest, needs_sink=True):
                key = (uris.key(a.source), a.sink.ue_id == 0x9001 and a.sink.authority_name, a.priority)
                found.setdefault(key, []).append(message.payload)
        return found

    heard = mine(taken)
    for key, payloads in mine(sent).items():
        assert list(dict.fromkeys(heard.get(key, []))) == payloads, key
        assert may_repeat or len(heard[key]) == len(payloads), key
