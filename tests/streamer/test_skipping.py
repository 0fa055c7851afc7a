"""A cursor is moved forward to a time: what came before is not sent, wherever it waits, and reported; the rest is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from history.service.gaps import Gaps
from streamer.commands import cursors
from streamer.egress import hold_state
from streamer.egress.rows import parsed
from tests.streamer.conftest import MakeWorld, World
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, GapNotice
from uprotocol.status import UStatusError
from uprotocol.uuid import now_ms
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

Publish = Callable[..., UMessage]

SPEED, DOOR = uris.parse("//vehicle1/1/1/8001"), uris.parse("//vehicle1/1/1/8002")
TO_CLOUD = {uris.format(topic): ["//cloud/9001/1/0"] for topic in (SPEED, DOOR)}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_state, "RETRY_S_MIN", 0.05)
    monkeypatch.setattr(hold_state, "RETRY_S_MAX", 0.1)


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Gap]]:
    """Each gap that is reported, with its endpoint."""
    found: list[tuple[str, Gap]] = []
    monkeypatch.setattr(Gaps, "add", lambda _, gap, endpoint="", detail="": found.append((endpoint, gap)))
    return found


def texts(first: int, end: int) -> list[str]:
    return [str(number) for number in range(first, end)]


def pumps_of(world: World) -> list[Any]:
    return [pump for pump in world.assembly.pumps if pump.peer.name == "cloud"]


async def later(world: World) -> int:
    """A time, in Unix milliseconds, after which something has come."""
    before = now_ms()
    await world.until(lambda: now_ms() > before + 1)
    return before + 1


async def send(world: World, node: Any, publish: Publish, first: int, end: int) -> None:
    """And wait until the log has them."""
    log = world.assembly.logs.durable
    for number in range(first, end):
        await node.send_batch([publish(SPEED, str(number)), publish(DOOR, str(number))])

    def records() -> int:
        return sum(one.records for one in log.streams() if one.source in (SPEED, DOOR))

    await world.until(lambda: records() == 2 * end)


async def skip(world: World, **given: Any) -> dict[str, Any]:
    answer: dict[str, Any] = await world.streamer.operations.answer("skip", {"endpoint": "cloud", **given})
    return answer


async def paused(world: World) -> None:
    await world.assembly.paused.pause(uris.ANY, "cloud")


async def resumed(world: World) -> None:
    await world.assembly.paused.resume(uris.ANY, "cloud")


async def away(world: World) -> None:
    world.assembly.endpoints["cloud"].transport.disconnect()


async def back(world: World) -> None:
    world.assembly.endpoints["cloud"].transport.reconnect()


async def refused(world: World) -> None:
    world.networks["cloud"].refuse(uris.format(SPEED))
    world.networks["cloud"].refuse(uris.format(DOOR))


async def allowed(world: World) -> None:
    world.networks["cloud"].allow()


@pytest.mark.parametrize("end_s_to", [30, 20], ids=["everything", "a part"])
@pytest.mark.parametrize(
    ("begin", "end"), [(paused, resumed), (away, back), (refused, allowed)], ids=["paused", "away", "refused"]
)
async def test_what_waits_up_to_a_time_is_not_sent(
    make_world: MakeWorld, publish: Publish, gaps: list[tuple[str, Gap]], begin: Any, end: Any, end_s_to: int
) -> None:
    world = await make_world(subscriptions=TO_CLOUD)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    speed, door = await world.hear(cloud, SPEED), await world.hear(cloud, DOOR)
    await send(world, vehicle, publish, 0, 10)
    await speed.expect(10)
    await door.expect(10)
    await begin(world)
    await send(world, vehicle, publish, 10, 20)
    to_ms = await later(world)
    await send(world, vehicle, publish, 20, 30)
    if end_s_to == 30:
        to_ms = await later(world)
    durable = next(pump for pump in pumps_of(world) if pump.log.durable)
    await world.until(lambda: durable.read == durable.log.newest_seq or begin is away)

    (tried, _) = (await skip(world, to_ms=to_ms, dry_run=True))["logs"]
    assert (tried["records"], tried["topics"]) == (2 * (end_s_to - 10), 2)
    assert not gaps
    answer = await skip(world, to_ms=to_ms)
    assert answer["logs"][0] == tried
    assert world.assembly.endpoints["cloud"].dropped["skipped"] == tried["records"]
    ((endpoint, gap),) = gaps
    assert (endpoint, gap.reason) == ("cloud", Gap.REASON_SKIPPED)
    assert (gap.after_seq, gap.before_seq) == (tried["after"], tried["to"] + 1)
    again = (await skip(world, to_ms=to_ms))["logs"][0]
    assert (again["records"], len(gaps)) == (0, 1)

    await end(world)
    await send(world, vehicle, publish, 30, 40)
    await speed.until(lambda: "39" in speed.texts, "the last one")
    await door.until(lambda: "39" in door.texts, "the last one")
    assert list(dict.fromkeys(speed.texts)) == list(dict.fromkeys(door.texts)) == texts(0, 10) + texts(end_s_to, 40)
    await world.until(lambda: not durable.backlog and not durable.waits.topics and not durable.waits.addresses)
    assert not world.assembly.dead_letters.total


async def test_a_restart_does_not_bring_back_what_was_skipped(
    make_world: MakeWorld, publish: Publish, gaps: list[tuple[str, Gap]]
) -> None:
    world = await make_world(subscriptions=TO_CLOUD)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    speed = await world.hear(cloud, SPEED)
    await paused(world)
    await send(world, vehicle, publish, 0, 10)
    await skip(world, to_ms=await later(world))
    await world.restart()
    await send(world, vehicle, publish, 10, 20)
    await resumed(world)
    await speed.expect(10)
    assert speed.texts == texts(10, 20)
    assert len(gaps) == 1


async def test_a_stopped_streamer_skips_and_its_next_start_reports_it(
    make_world: MakeWorld, publish: Publish, gaps: list[tuple[str, Gap]]
) -> None:
    world = await make_world(subscriptions=TO_CLOUD)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    speed = await world.hear(cloud, SPEED)
    await paused(world)
    await send(world, vehicle, publish, 0, 10)
    to_ms = await later(world)
    await send(world, vehicle, publish, 10, 20)
    await world.stop()
    path = world.config.streamer.data_dir / "history.db"
    (tried,) = (await cursors._skip(path, "cloud", to_ms, dry_run=True))["logs"]
    assert (tried["records"], tried["topics"]) == (20, 2)
    await cursors._skip(path, "cloud", to_ms, dry_run=False)
    with pytest.raises(UStatusError, match="there is no cursor of endpoint 'clowd'"):
        await cursors._skip(path, "clowd", to_ms, dry_run=False)
    assert not gaps
    await world.start()
    ((endpoint, gap),) = gaps
    assert (endpoint, gap.reason, gap.before_seq) == ("cloud", Gap.REASON_SKIPPED, tried["to"] + 1)
    await resumed(world)
    await speed.expect(10)
    assert speed.texts == texts(10, 20)
    await world.restart()
    assert len(gaps) == 1, "it is reported once"


async def test_the_volatile_log_skips_too(make_world: MakeWorld, publish: Publish) -> None:
    more = '[history]\nvolatile = ["//vehicle1/1/1/8001"]\n'
    world = await make_world(subscriptions=TO_CLOUD, more=more)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    speed = await world.hear(cloud, SPEED)
    await paused(world)
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(10)])
    volatile = next(pump for pump in pumps_of(world) if not pump.log.durable)
    await world.until(lambda: volatile.log.newest_seq == 10)
    answer = await skip(world, to_ms=await later(world))
    assert [one["records"] for one in answer["logs"] if one["log"] == "volatile"] == [10]
    await resumed(world)
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(10, 20)])
    await speed.expect(10)
    assert speed.texts == texts(10, 20)


async def test_subscribers_of_gaps_are_notified(make_world: MakeWorld, publish: Publish) -> None:
    topic = uris.parse("//vehicle1/4/1/8002")
    world = await make_world(subscriptions=TO_CLOUD)
    vehicle = await world.node("vehicle", "vehicle1")
    notices = await world.hear(await world.node("vehicle", "vehicle1", 0x8002), topic)
    await paused(world)
    await send(world, vehicle, publish, 0, 10)
    await skip(world, to_ms=await later(world))
    await notices.expect(1)
    notice = GapNotice.FromString(notices.messages[0].payload)
    assert (notice.endpoint, notice.gap.reason) == ("cloud", Gap.REASON_SKIPPED)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"endpoint": "nowhere", "to_ms": 1}, UCode.NOT_FOUND),
        ({"to_ms": 1 << 45}, UCode.INVALID_ARGUMENT),
        ({"to_ms": "now"}, UCode.INVALID_ARGUMENT),
        ({}, UCode.INVALID_ARGUMENT),
    ],
    ids=str,
)
async def test_what_can_not_be_skipped_is_said(make_world: MakeWorld, given: dict[str, Any], code: int) -> None:
    world = await make_world(subscriptions={})
    with pytest.raises(UStatusError) as error:
        await skip(world, **given)
    assert error.value.code == code


async def test_a_time_before_the_cursor_changes_nothing(
    make_world: MakeWorld, publish: Publish, gaps: list[tuple[str, Gap]]
) -> None:
    world = await make_world(subscriptions=TO_CLOUD)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    speed = await world.hear(cloud, SPEED)
    await send(world, vehicle, publish, 0, 10)
    await speed.expect(10)
    await world.until(lambda: not any(pump.backlog for pump in pumps_of(world)))
    cursor = pumps_of(world)[0].cursor
    assert [one["records"] for one in (await skip(world, to_ms=1))["logs"]] == [0, 0]
    assert (pumps_of(world)[0].cursor, gaps) == (cursor, [])
    await asyncio.gather(send(world, vehicle, publish, 10, 20), skip(world, to_ms=now_ms()))  # while it is used


def test_the_row_of_a_skip_belongs_to_its_endpoint() -> None:
    assert parsed("skipped:cloud:17") == ("skipped", "cloud", "17")
