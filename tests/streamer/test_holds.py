"""Messages that a network refuses for their address or that have no listener: they wait, and all others continue."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.log.log import Log
from streamer.egress import address_holds, hold_state, reading_back
from streamer.egress import pump as egress
from streamer.egress.address_holds import AddressHolds
from streamer.egress.reasons import Kind
from tests.streamer.conftest import Hearer, MakeWorld, World
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

Publish = Callable[..., UMessage]

SPEED, DOOR = uris.parse("//vehicle1/1/1/8001"), uris.parse("//vehicle1/1/1/8002")
TO_CLOUD = {uris.format(topic): ["//cloud/9001/1/0"] for topic in (SPEED, DOOR)}


def address(topic: Any) -> str:
    return uris.format(topic)


def pump_of(world: World) -> Any:
    return next(pump for pump in world.assembly.pumps if pump.peer.name == "cloud" and pump.log.durable)


async def held(world: World, units: int = 1, *, records: int = 0) -> Any:
    """Until so many addresses are held, with so many records."""
    pump = pump_of(world)

    def is_so() -> bool:
        return (
            len(pump.waits.addresses) == units and sum(one.records for one in pump.waits.addresses.values()) >= records
        )

    await world.until(is_so)
    return pump


@dataclass
class Stage:
    """A streamer to whose cloud somebody listens, on two topics."""

    world: World
    vehicle: Any
    cloud: Any
    speed: Hearer
    door: Hearer

    @property
    def network(self) -> Any:
        return self.world.networks["cloud"]

    async def refuses(self, publish: Publish, count: int) -> Any:
        """From now on SPEED is held, with so many waiting records."""
        self.network.refuse(address(SPEED))
        await sent(self.vehicle, publish, SPEED, range(count))
        return await held(self.world, records=count)


async def stage(make_world: MakeWorld, **options: Any) -> Stage:
    world = await make_world(subscriptions=TO_CLOUD, **options)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    return Stage(world, vehicle, cloud, await world.hear(cloud, SPEED), await world.hear(cloud, DOOR))


async def saved(world: World) -> None:
    """Until each hold has a row."""
    pump = pump_of(world)
    await world.until(lambda: all(hold.has_row for hold in pump.waits.addresses.values()))


async def sent(node: Any, publish: Publish, topic: Any, numbers: range) -> None:
    await node.send_batch([publish(topic, str(number)) for number in numbers])


def texts(numbers: range) -> list[str]:
    return [str(number) for number in numbers]


async def heard_all(heard: Hearer, numbers: range) -> None:
    """All of them, in order; the same id twice is the same message."""
    await heard.until(lambda: len(set(heard.texts)) >= len(numbers), f"{len(numbers)} different messages")
    assert list(dict.fromkeys(heard.texts)) == texts(numbers)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try is after 50 ms, and the last ones as often."""
    monkeypatch.setattr(hold_state, "RETRY_S_MIN", 0.05)
    monkeypatch.setattr(hold_state, "RETRY_S_MAX", 0.1)


# -- refused


@pytest.mark.spec("local~disp-no-discard")
async def test_what_an_access_rule_refuses_waits_and_arrives_in_order_when_it_is_mended(
    make_world: MakeWorld, publish: Publish
) -> None:
    here = await stage(make_world)
    world, vehicle, speed, door = here.world, here.vehicle, here.speed, here.door
    await here.refuses(publish, 50)
    await sent(vehicle, publish, DOOR, range(50))
    await heard_all(door, range(50))
    assert speed.texts == []
    await sent(vehicle, publish, SPEED, range(50, 60))
    await held(world, records=60)
    assert world.assembly.dead_letters.total == 0
    world.networks["cloud"].allow()
    await heard_all(speed, range(60))
    await held(world, 0)
    assert not [name for name in pump_of(world).log.cursors.seqs() if name.startswith("held:")]
    await sent(vehicle, publish, SPEED, range(60, 70))
    await heard_all(speed, range(70))


async def test_a_refused_notification_waits_too(make_world: MakeWorld) -> None:
    world = await make_world(subscriptions={})
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    sink = uris.parse("//cloud/9001/1/0")
    heard = await world.hear(cloud, SPEED, sink)
    world.networks["cloud"].refuse("*")
    messages = [UMessageBuilder.notification(SPEED, sink).build() for _ in range(20)]
    await vehicle.send_batch(messages)
    await held(world, records=20)
    world.networks["cloud"].allow()
    await heard.until(lambda: len({m.attributes.id.lsb for m in heard.messages}) == 20, "all of them")
    assert [m.attributes.id for m in heard.messages][-19:] == [m.attributes.id for m in messages][-19:]


async def test_one_message_is_tried_at_a_time(make_world: MakeWorld, publish: Publish, monkeypatch: Any) -> None:
    here = await stage(make_world)
    world, heard = here.world, here.speed
    await here.refuses(publish, 100)
    transport = world.assembly.endpoints["cloud"].transport
    send_batch, tried = transport.send_batch, list[list[str]]()

    async def watched(messages: Any) -> Any:
        tried.append([message.payload.decode() for message in messages])
        return await send_batch(messages)

    monkeypatch.setattr(transport, "send_batch", watched)
    await world.until(lambda: len(tried) >= 4)
    assert tried == [["0"]] * len(tried)
    world.networks["cloud"].allow()
    await heard_all(heard, range(100))


@pytest.mark.parametrize("window", [10, 2_000], ids=["while it is read", "when all of it was read"])
async def test_what_is_refused_again_while_it_is_read_back_arrives_in_order(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """The rule is right, wrong, and right again before all that was held has left."""
    monkeypatch.setattr(hold_state, "RETRY_S_MIN", 0.0)
    for limit in ("WINDOW_MESSAGES_MAX", "BATCH_MESSAGES_MAX"):
        monkeypatch.setattr(egress, limit, window)
    monkeypatch.setattr(reading_back, "READ_MESSAGES_MAX", window)
    here = await stage(make_world)
    world, heard = here.world, here.speed
    await here.refuses(publish, 100)
    transport = world.assembly.endpoints["cloud"].transport
    send_batch, refusals = transport.send_batch, list[int]()

    async def wrong_once(messages: Any) -> Any:
        if len(messages) == 1 or refusals:
            return await send_batch(messages)
        half = len(messages) // 2
        refusals.append(len(messages) - half)
        return [*await send_batch(messages[:half]), *[UStatus(code=UCode.PERMISSION_DENIED)] * refusals[0]]

    monkeypatch.setattr(transport, "send_batch", wrong_once)
    world.networks["cloud"].allow()
    await heard_all(heard, range(100))
    assert len(refusals) == 1
    await held(world, 0)
    await sent(here.vehicle, publish, SPEED, range(100, 110))
    await heard_all(heard, range(110))


async def test_a_restart_goes_on_where_each_address_was(make_world: MakeWorld, publish: Publish) -> None:
    """Nothing that had left before leaves again, and of what waits nothing is missing."""
    here = await stage(make_world)
    world, vehicle, speed, door = here.world, here.vehicle, here.speed, here.door
    await here.refuses(publish, 30)
    await sent(vehicle, publish, DOOR, range(30))
    await heard_all(door, range(30))
    await saved(world)
    await world.until(lambda: pump_of(world).backlog == 0)
    await world.restart()
    (listed,) = [
        one for one in (await world.streamer.operations.answer("cursors", {}))["cursors"] if one["endpoint"] == "cloud"
    ]
    assert listed["held_addresses"] == 1
    await sent(vehicle, publish, SPEED, range(30, 40))
    await sent(vehicle, publish, DOOR, range(30, 40))
    await heard_all(door, range(40))
    assert len(door.messages) == 40
    world.networks["cloud"].allow()
    await heard_all(speed, range(40))
    await held(world, 0)


async def test_a_restart_with_a_thousand_held_addresses_sends_nothing_twice(
    make_world: MakeWorld, publish: Publish
) -> None:
    topics = [uris.uri("vehicle1", 1, 1, 0x8100 + number) for number in range(1_000)]
    world = await make_world(subscriptions=TO_CLOUD | {"//vehicle1/1/1/FFFF": ["//cloud/9001/1/0"]})
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, uris.parse("//vehicle1/1/1/FFFF"))
    await vehicle.send_batch([publish(topic, "before") for topic in topics])
    await heard.expect(1_000)
    for prefix in "1234":
        world.networks["cloud"].refuse(f"*/8{prefix}*")
    await vehicle.send_batch([publish(topic, "held") for topic in topics])
    await held(world, 1_000, records=1_000)
    await sent(vehicle, publish, SPEED, range(30))
    await heard.expect(1_030)
    await saved(world)
    await world.until(lambda: pump_of(world).backlog == 0)
    await world.restart()
    assert len(pump_of(world).waits.addresses) == 1_000
    await sent(vehicle, publish, SPEED, range(30, 40))
    await heard.expect(1_040)
    assert not [text for text in heard.texts if text == "held"]
    world.networks["cloud"].allow()
    await heard.expect(2_040)
    await held(world, 0)
    assert (
        len({message.attributes.id.SerializeToString() for message in heard.messages}) == len(heard.messages) == 2_040
    )


async def test_many_refused_addresses_cost_a_healthy_one_nothing(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the limit they are one unit, which a person can read, and which does not take in the healthy one."""
    monkeypatch.setattr(address_holds, "ADDRESSES_MAX", 100)
    topics = [uris.uri("vehicle1", 1, 1, 0x8100 + number) for number in range(500)]
    world = await make_world(subscriptions=TO_CLOUD | {"//vehicle1/1/1/FFFF": ["//cloud/9001/1/0"]})
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    speed, all = await world.hear(cloud, SPEED), Hearer()
    for topic in topics:
        await cloud.register_listener(topic, all)
    world.networks["cloud"].refuse("*/81*")
    world.networks["cloud"].refuse("*/82*")
    for round in range(3):
        await vehicle.send_batch([publish(topic, f"{round}") for topic in topics])
        await sent(vehicle, publish, SPEED, range(10 * round, 10 * round + 10))
    await heard_all(speed, range(30))
    pump = pump_of(world)
    await world.until(lambda: sum(one.records for one in pump.waits.addresses.values()) >= 1_500)
    assert len(pump.waits.addresses) <= 100
    assert "@vehicle1" in pump.waits.addresses
    assert len(speed.messages) == 30
    await saved(world)
    await world.restart()
    await sent(vehicle, publish, SPEED, range(30, 40))
    await heard_all(speed, range(40))
    assert not any(message.payload in (b"0", b"1", b"2") for message in all.messages)
    world.networks["cloud"].allow()
    await all.until(lambda: len({m.attributes.id.lsb for m in all.messages}) == 1_500, "all of them")
    for topic in topics:
        mine = [m.payload for m in all.messages if m.attributes.source == topic]
        assert list(dict.fromkeys(mine)) == [b"0", b"1", b"2"]


async def test_what_has_waited_for_too_long_is_reported_one_by_one_and_then_as_a_range(
    make_world: MakeWorld, publish: Publish
) -> None:
    here = await stage(make_world, egress="refused_hours = 0.0001\n")
    world, vehicle, heard = here.world, here.vehicle, here.speed
    world.networks["cloud"].refuse(address(SPEED))
    await sent(vehicle, publish, SPEED, range(250))
    pump = pump_of(world)
    await world.until(lambda: pump.waits.addresses.ended == 1)
    assert world.assembly.dead_letters.by_code == {"PERMISSION_DENIED": 100}
    assert pump.losses.gaps == 0, "those are of retention and damage"
    assert world.assembly.endpoints["cloud"].dropped["held_too_long"] == 150
    assert world.assembly.gaps.total == 1
    world.networks["cloud"].allow()
    await sent(vehicle, publish, SPEED, range(250, 260))
    await heard.expect(10)
    assert heard.texts == texts(range(250, 260))


async def test_a_no_about_one_message_is_a_dead_letter_also_while_its_address_is_held(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await stage(make_world)
    world, heard = here.world, here.speed
    await here.refuses(publish, 5)
    transport = world.assembly.endpoints["cloud"].transport
    send_batch = transport.send_batch

    async def picky(messages: Any) -> Any:
        statuses = await send_batch(messages)
        bad = UStatus(code=UCode.INVALID_ARGUMENT, message="too large")
        return [bad if one.payload == b"0" else answer for one, answer in zip(messages, statuses, strict=True)]

    monkeypatch.setattr(transport, "send_batch", picky)
    await world.until(lambda: world.assembly.dead_letters.by_code == {"INVALID_ARGUMENT": 1})
    world.networks["cloud"].allow()
    await heard_all(heard, range(1, 5))


async def test_what_expires_while_it_is_held_is_counted(make_world: MakeWorld, publish: Publish) -> None:
    here = await stage(make_world)
    world, vehicle, heard = here.world, here.vehicle, here.speed
    world.networks["cloud"].refuse(address(SPEED))
    await vehicle.send_batch([publish(SPEED, str(number), ttl=200) for number in range(10)])
    await sent(vehicle, publish, SPEED, range(10, 20))
    await held(world, records=20)
    await asyncio.sleep(0.25)  # until their ttl is over
    world.networks["cloud"].allow()
    await heard_all(heard, range(10, 20))
    expired = world.assembly.endpoints["cloud"].dropped["expired_while_held"]
    assert expired + world.assembly.dead_letters.total == 10


@pytest.mark.spec("local~disp-no-discard")
@pytest.mark.parametrize("volatile", [False, True])
async def test_what_the_network_has_no_room_for_is_tried_again(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch, volatile: bool
) -> None:
    more = '[history]\nvolatile = ["//vehicle1/1/1/FFFF"]\n' if volatile else ""
    here = await stage(make_world, more=more)
    world, vehicle, heard = here.world, here.vehicle, here.speed
    transport = world.assembly.endpoints["cloud"].transport
    send_batch, refusals = transport.send_batch, 0

    async def short_of_room(messages: Any) -> Any:
        nonlocal refusals
        if refusals < 3:
            refusals += 1
            return [UStatus(code=UCode.RESOURCE_EXHAUSTED, message="no room")] * len(messages)
        return await send_batch(messages)

    monkeypatch.setattr(transport, "send_batch", short_of_room)
    await sent(vehicle, publish, SPEED, range(20))
    await heard_all(heard, range(20))
    assert refusals == 3
    assert world.assembly.dead_letters.total == 0


# -- nobody listens


@pytest.mark.spec("local~disp-no-discard")
async def test_a_backlog_waits_for_the_subscriber_that_is_slow_to_listen(
    make_world: MakeWorld, publish: Publish
) -> None:
    """The loss on a user's first day: 100 records wait; the subscriber's process connects, and listens later."""
    world = await make_world(subscriptions=TO_CLOUD)
    vehicle = await world.node("vehicle", "vehicle1")
    await sent(vehicle, publish, SPEED, range(100))
    await held(world, records=100)
    cloud = await world.node("cloud", "cloud")
    other = await world.hear(cloud, DOOR)
    await sent(vehicle, publish, DOOR, range(5))
    await heard_all(other, range(5))
    heard = await world.hear(cloud, SPEED)
    await heard_all(heard, range(100))
    await held(world, 0)
    assert len(heard.messages) == 100


async def test_a_subscriber_that_is_restarted_misses_nothing(make_world: MakeWorld, publish: Publish) -> None:
    here = await stage(make_world)
    world, vehicle, heard = here.world, here.vehicle, here.speed
    await sent(vehicle, publish, SPEED, range(10))
    await heard_all(heard, range(10))
    await here.cloud.unregister_listener(SPEED, heard)
    await sent(vehicle, publish, SPEED, range(10, 30))
    pump = await held(world, records=20)
    (state,) = pump.waits.addresses.states()
    assert state.label == "left"
    await here.cloud.register_listener(SPEED, heard)
    await heard_all(heard, range(30))
    assert len(heard.messages) == 30


async def test_with_hold_false_it_is_sent_to_nobody_as_before(make_world: MakeWorld, publish: Publish) -> None:
    toml = (
        '[[endpoint]]\nname = "vehicle"\ntransport = "local"\nauthorities = ["vehicle1"]\n'
        'settings = {{ network = "{n}-vehicle" }}\n'
        '[[endpoint]]\nname = "cloud"\ntransport = "local"\nauthorities = ["cloud"]\nusubscription = "none"\n'
        'hold = false\nsettings = {{ network = "{n}-cloud" }}\n'
    )
    world = await make_world(toml, subscriptions=TO_CLOUD)
    vehicle = await world.node("vehicle", "vehicle1")
    await sent(vehicle, publish, SPEED, range(10))
    pump = pump_of(world)
    await world.until(lambda: pump.log.newest_seq == 10 and pump.backlog == 0)
    assert not pump.waits.addresses
    assert world.assembly.endpoints["cloud"].forwarded == 10


async def test_of_a_volatile_log_nothing_is_held(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=TO_CLOUD, more='[history]\nvolatile = ["//vehicle1/1/1/FFFF"]\n')
    vehicle = await world.node("vehicle", "vehicle1")
    await sent(vehicle, publish, SPEED, range(10))
    endpoint = world.assembly.endpoints["cloud"]
    await world.until(lambda: endpoint.dropped["nobody_listens"] == 10)
    cloud = await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    world.networks["cloud"].refuse(address(DOOR))
    await sent(vehicle, publish, DOOR, range(3))
    await world.until(lambda: world.assembly.dead_letters.by_code == {"PERMISSION_DENIED": 3})
    assert heard.texts == []
    assert not any(pump.waits.addresses for pump in world.assembly.pumps)


# -- what a person sees


async def test_a_refusal_is_a_condition_of_its_endpoint_and_an_address_nobody_has_heard_a_note(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamer.parts.pumps.SHOWN_AFTER_S", 0.1)
    world = await make_world(subscriptions=TO_CLOUD)
    vehicle = await world.node("vehicle", "vehicle1")
    await sent(vehicle, publish, DOOR, range(3))
    await held(world, records=3)
    await world.until(lambda: any("nobody has listened yet" in note for note in world.parts.notes()))
    assert world.parts.problems() == []
    cloud = await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    world.networks["cloud"].refuse(address(SPEED))
    await sent(vehicle, publish, SPEED, range(1_204))
    await held(world, 2, records=1_207)
    await world.until(world.parts.problems)
    (problem,) = world.parts.problems()
    assert problem.startswith("endpoint cloud: ")
    assert "Not authorized" in problem
    assert "1,204 records wait: see its access rules" in problem
    assert address(SPEED) in problem
    world.networks["cloud"].allow()
    await heard_all(heard, range(1_204))
    await world.until(lambda: world.parts.problems() == [])


async def waiting(pump: Any) -> int:
    """Reads the log: the number of records behind the positions of the holds."""
    count = 0
    for hold in pump.waits.addresses.values():
        found = await pump.log.scan(hold.after, max_records=100_000, max_bytes=1 << 30, streams=hold.streams)
        for chunk in found.chunks:
            of_hold = zip(chunk.seqs, chunk.streams, strict=True)
            count += sum(1 for seq, stream in of_hold if seq > hold.after and stream in hold.streams)
    return count


@pytest.mark.parametrize("seed", range(4))
async def test_held_records_are_counted_once_whatever_refusals_and_pauses_come_in_turn(
    make_world: MakeWorld, publish: Publish, seed: int
) -> None:
    here, draw = await stage(make_world), random.Random(seed)
    world, pump, count = here.world, pump_of(here.world), 0

    def is_held() -> bool:
        """Whether everything that was read waits in one hold."""
        is_busy = pump.waits.topics or pump.waits.reading_back.is_under_way or pump.backlog or pump.sender.flights
        return not is_busy and [hold.is_waiting for hold in pump.waits.addresses.values()] == [True]

    async def is_refused() -> None:
        nonlocal count
        here.network.refuse(address(SPEED))
        more = draw.randrange(10, 60)
        await sent(here.vehicle, publish, SPEED, range(count, count + more))
        count += more
        await world.until(is_held)
        (state,) = pump.waits.addresses.states()
        assert state.are_counted
        assert state.records == await waiting(pump)

    for _ in range(6):
        await is_refused()
        match draw.randrange(3):
            case 0:
                await world.assembly.paused.pause(SPEED, "cloud")
                await world.until(lambda: len(pump.waits.topics) == 1)
                await world.assembly.paused.resume(SPEED, "cloud")
            case 1:
                here.network.allow()
                await asyncio.sleep(draw.random() / 3)
            case _:
                here.network.allow()
                await heard_all(here.speed, range(count))
    await is_refused()
    here.network.allow()
    await heard_all(here.speed, range(count))
    await held(world, 0)


async def test_a_refusal_by_an_access_rule_is_a_condition_at_once_and_a_shortage_after_a_minute(
    make_world: MakeWorld, publish: Publish
) -> None:
    here = await stage(make_world)
    pump = await here.refuses(publish, 3)
    (problem,) = here.world.parts.problems()
    assert "Not authorized" in problem
    (hold,) = pump.waits.addresses.values()
    hold.code = UCode.RESOURCE_EXHAUSTED
    assert here.world.parts.problems() == []
    hold.began -= address_holds.SHOWN_AFTER_S
    assert len(here.world.parts.problems()) == 1


# -- beside pauses


async def test_a_pause_takes_over_what_is_held(make_world: MakeWorld, publish: Publish) -> None:
    here = await stage(make_world)
    world, heard, vehicle = here.world, here.speed, here.vehicle
    pump = await here.refuses(publish, 10)
    await world.assembly.paused.pause(SPEED, "cloud")
    await world.until(lambda: len(pump.waits.topics) == 1)
    world.networks["cloud"].allow()
    await sent(vehicle, publish, SPEED, range(10, 20))
    await held(world, 0)
    assert heard.texts == []
    await world.assembly.paused.resume(SPEED, "cloud")
    await heard_all(heard, range(20))
    await world.until(lambda: not pump.waits.topics)


async def test_what_is_paused_and_then_refused_arrives_after_both(make_world: MakeWorld, publish: Publish) -> None:
    here = await stage(make_world)
    world, vehicle, heard = here.world, here.vehicle, here.speed
    await world.assembly.paused.pause(SPEED, "cloud")
    await sent(vehicle, publish, SPEED, range(10))
    pump = pump_of(world)
    await world.until(lambda: len(pump.waits.topics) == 1)
    world.networks["cloud"].refuse(address(SPEED))
    await world.assembly.paused.resume(SPEED, "cloud")
    await held(world, records=10)
    await sent(vehicle, publish, SPEED, range(10, 20))
    await held(world, records=20)
    world.networks["cloud"].allow()
    await heard_all(heard, range(20))
    await held(world, 0)


# -- the table alone


def item(seq: int, stream: int = 1) -> Any:
    return seq, EncodedMessage.of(UMessageBuilder.publish(SPEED).build()), stream


REFUSED = UStatus(code=UCode.PERMISSION_DENIED, message="no")


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(["a", "b", "c"]), st.integers(1, 1_000), st.booleans()),
        min_size=1,
        max_size=120,
    ),
    st.integers(3, 12),
)
def test_no_record_is_before_the_position_of_its_hold_and_rows_say_the_same(
    steps: list[tuple[int, str, int, bool]], most: int
) -> None:
    asyncio.run(_table(steps, most))


async def _table(steps: list[tuple[int, str, int, bool]], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(address_holds, "ADDRESSES_MAX", most)
        log, now = await Log.open(None, name="test"), [100.0]
        log.cursors.set("egress:cloud", 500)
        table = AddressHolds(log, "cloud", lambda: now[0], 3_600, 3_600, lambda _: None)
        lowest: dict[tuple[str, str], int] = {}
        for number, authority, seq, is_unheard in steps:
            name = f"{authority}/{number}"
            known = table.of(name, authority)
            kind: Kind = "unheard" if is_unheard else "refused"
            assert table.hold(name, authority, known, item(seq), REFUSED, kind) is not None
            lowest[name, authority] = min(seq, lowest.get((name, authority), seq))
            assert len(table) <= most
            assert all(hold.has_row or hold.after >= 500 for hold in table.values())
            now[0] += 0.3
            for hold in list(table.take_due(100)):
                table.not_tried(hold)
        now[0] += 2.0
        list(table.take_due(1_000))
        for (name, authority), seq in lowest.items():
            found = table.of(name, authority)
            assert found is not None
            assert found.after < seq
            assert found.held.head is None or found.held.head[0] > found.after
        again = AddressHolds(log, "cloud", lambda: now[0], 3_600, 3_600, lambda _: None)
        again.load()
        assert {unit: hold.after for unit, hold in again.items()} == {unit: hold.after for unit, hold in table.items()}
        assert sum(one.units for one in table.states()) == len(table)
        assert sum(one.records for one in table.states()) == sum(hold.records for hold in table.values())
        for hold in list(table.values()):
            table.drop(hold)
        assert not list(table.states())
        assert not [name for name in log.cursors.seqs() if name.startswith("held:")]
        assert table._budget.heads_bytes == 0


async def test_addresses_beyond_those_that_can_be_held_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a stranger who makes up addresses holds nothing of others; known ones are held all the same."""
    monkeypatch.setattr(address_holds, "ADDRESSES_MAX", 10)
    monkeypatch.setattr(address_holds, "COVERED_MAX", 20)
    log = await Log.open(None, name="test")
    table = AddressHolds(log, "cloud", lambda: 0.0, 3_600.0, 3_600.0, lambda _: None)
    held = list[str]()
    for number in range(100):
        address = f"vehicle1/{number}"
        if table.hold(address, "vehicle1", table.of(address, "vehicle1"), item(number + 1), REFUSED, "unheard"):
            held.append(address)
    assert held == [f"vehicle1/{number}" for number in range(len(held))], "each, until there is no room"
    assert len(table) == 10
    assert 20 <= len(held) <= 30
    assert table.of("vehicle1/99", "vehicle1") is None
    for address in held:
        assert (known := table.of(address, "vehicle1")) is not None
        assert table.hold(address, "vehicle1", known, item(200), REFUSED, "unheard") is known
    await log.close()
