"""The backlog of a peer is kept: over restarts, renamed endpoints, absences, services that have not answered and full
disks."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from history.log.log import Log
from streamer.commands import cursors
from streamer.walk import flow as flows
from streamer.walk.flow import Appender, Flow
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.client import USubscriptionClient

MakeWorld = Any
Publish = Callable[..., UMessage]

SPEED = uris.parse("//vehicle1/8001/1/8001")
RECORD = '[history]\nrecord = ["//vehicle1/8001/FF/FFFF"]\n'
SUBSCRIBED = {"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"]}


def kept(world: Any, topic: UUri) -> int:
    """Records of a topic that the log has taken."""
    return sum(
        stream.records for stream in world.assembly.logs.durable.streams() if uris.key(stream.source) == uris.key(topic)
    )


@pytest.mark.spec("local~disp-at-least-once")
async def test_what_comes_before_the_interest_is_known_after_a_restart_goes_out(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker kept it meanwhile, say, and delivers it the moment that the recorded topics are listened to."""
    world = await make_world(subscriptions={}, more=RECORD)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, SPEED)
    async with USubscriptionClient(cloud, cloud.local, "vehicle1") as client:
        await client.subscribe(SPEED)
    await vehicle.send(publish(SPEED, "before"))
    await heard.expect(1)
    await world.stop()
    started, go_on = asyncio.Event(), asyncio.Event()
    from usubscription_client.sources import EmbeddedInterest

    load = EmbeddedInterest.load

    async def nothing(self: EmbeddedInterest) -> None:
        """Neither the store nor the file can be read yet."""

    async def late(self: EmbeddedInterest) -> None:
        started.set()
        await go_on.wait()
        await load(self)

    monkeypatch.setattr(EmbeddedInterest, "load", nothing)
    monkeypatch.setattr(EmbeddedInterest, "start", late)
    starting = asyncio.ensure_future(world.start())
    await started.wait()
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(3)])
    await world.until(lambda: kept(world, SPEED) == 4)
    go_on.set()
    await starting
    await vehicle.send(publish(SPEED, "after"))
    await heard.expect(5)
    assert heard.texts == ["before", "0", "1", "2", "after"]


async def test_a_subscription_made_while_running_counts_from_there(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions={}, more=RECORD)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, SPEED)
    world.networks["cloud"].break_()  # the cursor of the cloud stays where it is
    await vehicle.send_batch([publish(SPEED, "too early") for _ in range(3)])
    await world.until(lambda: kept(world, SPEED) == 3)
    world.networks["cloud"].heal()
    async with USubscriptionClient(cloud, cloud.local, "vehicle1") as client:
        await client.subscribe(SPEED)
        await vehicle.send(publish(SPEED, "first"))
        await heard.expect(1)
        await client.unsubscribe(SPEED)
        await vehicle.send(publish(SPEED, "between"))
        await world.until(lambda: kept(world, SPEED) == 5)
        await client.subscribe(SPEED)
        await vehicle.send(publish(SPEED, "second"))
        await heard.expect(2)
    assert heard.texts == ["first", "second"]


def renamed(world: Any, old: str, new: str) -> None:
    """The endpoint `old` has another name from the next start on."""
    endpoints = [one.model_copy(update={"name": new}) if one.name == old else one for one in world.config.endpoint]
    world.config = world.config.model_copy(update={"endpoint": endpoints})


async def test_the_backlog_of_a_renamed_endpoint_is_kept_and_reported(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, SPEED)
    world.assembly.endpoints["cloud"].transport.disconnect()
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(50)])
    await world.until(lambda: world.assembly.logs.durable.newest_seq == 50)
    await world.stop()
    renamed(world, "cloud", "clowd")
    await world.start()
    (problem,) = [problem for problem in world.parts.problems() if "not configured" in problem]
    assert "50 records wait for endpoint 'cloud'" in problem
    await vehicle.send(publish(SPEED, "meanwhile"))
    await heard.expect(1)
    await world.stop()
    renamed(world, "clowd", "cloud")
    await world.start()
    await heard.expect(51)
    await world.until(lambda: world.assembly.pumps[-2].backlog == 0)
    assert heard.texts[1:51] == [str(number) for number in range(50)]
    assert not [problem for problem in world.parts.problems() if "not configured" in problem]


@pytest.mark.parametrize("other_topic", [True, False])
async def test_what_waits_is_adopted_in_order_or_not_at_all(
    make_world: MakeWorld, publish: Publish, other_topic: bool
) -> None:
    """The endpoint runs under its new name before a person notices: what it sends then is newer than its backlog."""
    meanwhile = uris.parse("//vehicle1/8001/1/8002") if other_topic else SPEED
    world = await make_world(subscriptions={"//vehicle1/8001/1/FFFF": ["//cloud/9001/1/0"]})
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, uris.parse("//vehicle1/8001/1/FFFF"))
    world.assembly.endpoints["cloud"].transport.disconnect()
    await vehicle.send_batch([publish(SPEED, f"waits {number}") for number in range(30)])
    await world.until(lambda: world.assembly.logs.durable.newest_seq == 30)
    await world.stop()
    renamed(world, "cloud", "clowd")
    await world.start()
    await vehicle.send_batch([publish(meanwhile, f"meanwhile {number}") for number in range(30)])
    await heard.expect(30)
    await world.stop()
    log = world.config.streamer.data_dir / "history.db"
    if not other_topic:
        with pytest.raises(UStatusError, match="1 topics of which older ones wait for 'cloud', such as up://vehicle1"):
            await cursors._adopt(log, "cloud", "clowd")
        assert {one.endpoint: one.records for one in cursors.listed(log)}["cloud"] == 60, "nothing has changed"
        await cursors._adopt(log, "cloud", "clowd", out_of_order=True)
    else:
        await cursors._adopt(log, "cloud", "clowd")
    await world.start()
    await vehicle.send(publish(SPEED, "after"))
    await heard.expect(91)
    waited = [text for text in heard.texts if not text.startswith("meanwhile")]
    assert waited == [*(f"waits {number}" for number in range(30)), "after"]


async def test_an_absence_is_reported_before_it_ends_and_counts_only_while_we_run(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(subscriptions=SUBSCRIBED, more="[history]\nabsent_hours = 10\n")
    vehicle = await world.node("vehicle", "vehicle1")
    world.assembly.endpoints["cloud"].transport.disconnect()
    await vehicle.send(publish(SPEED, "waits"))
    await world.until(lambda: world.assembly.logs.durable.newest_seq == 1)
    hour, claims = 3_600_000, world.assembly.claims

    def held() -> dict[str, bool]:
        return {name: row.holds for name, row in world.assembly.logs.durable.cursors.all().items()}

    for _ in range(8):
        claims.passed(hour, {"cloud": hour})
    assert not [problem for problem in world.parts.problems() if "has been away" in problem]
    claims.passed(hour, {"cloud": hour})
    (problem,) = [problem for problem in world.parts.problems() if "has been away" in problem]
    assert "in 1.0 h retention by age may take the 1 records" in problem
    await world.restart()
    claims = world.assembly.claims
    assert held()["egress:cloud"]
    world.assembly.endpoints["cloud"].transport.disconnect()
    claims.passed(hour, {"cloud": hour})
    assert held() == {"egress:vehicle": True, "egress:mcu": True, "egress:cloud": False}
    claims.passed(hour, {"cloud": 0})
    assert held()["egress:cloud"]


# -- a log that refuses for a moment


class Refusing:
    """A log that refuses while `error` is set. `taken` is what it took, in order."""

    name = "test"

    def __init__(self) -> None:
        self.error: UStatusError | None = None
        self.healthy = True
        self.failures = 0
        self.taken: list[str] = []

    def append(self, streams: list[int], messages: Sequence[Any]) -> asyncio.Future[int]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()
        if self.error is not None:
            loop.call_soon(future.set_exception, self.error)
        else:
            self.taken += messages
            loop.call_soon(future.set_result, len(self.taken))
        return future


FULL = UStatusError(UCode.RESOURCE_EXHAUSTED, "the disk is full")


class Holding:
    """The way of a network that can't send again into a log."""

    def __init__(self, log: Any, flow: Flow) -> None:
        self.flow, self.appender = flow, Appender(log, lambda batch: None, holds=True)

    def append(self, streams: list[int], batch: Sequence[Any]) -> asyncio.Future[int]:
        return self.flow.append(len(batch), functools.partial(self.appender.offer, streams, batch))


async def test_what_a_network_cant_send_again_is_held_in_order_until_the_log_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flows, "STORE_RETRY_S", 0.001)
    log: Any = Refusing()
    log.error = FULL
    held = Holding(log, Flow())
    first = held.append([1], ["a"])
    await asyncio.sleep(0.01)
    second, third = held.append([1], ["b"]), held.append([1], ["c"])
    await asyncio.sleep(0.01)
    assert not first.done()
    log.error = None
    assert await asyncio.gather(first, second, third) == [1, 2, 3]
    assert log.taken == ["a", "b", "c"]
    assert await held.append([1], ["d"]) == 4


async def test_what_is_held_is_refused_in_the_end_and_nothing_more_is_held_until_the_log_has_recovered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flows, "STORE_RETRY_S", 0.001)
    monkeypatch.setattr(flows, "HOLD_S", 0.02)
    log: Any = Refusing()
    log.error = FULL
    held = Holding(log, Flow())
    answers = await asyncio.gather(held.append([1], ["a"]), held.append([1], ["b"]), return_exceptions=True)
    assert answers == [FULL, FULL]
    monkeypatch.setattr(flows, "HOLD_S", 3_600)
    held.appender._refusing_since = asyncio.get_running_loop().time() - 3_601
    with pytest.raises(UStatusError):
        await held.append([1], ["c"])
    log.error = None
    assert await held.append([1], ["d"]) == 1
    assert held.appender._refusing_since is None


async def test_what_is_wrong_for_good_is_not_held() -> None:
    log: Any = Refusing()
    log.error = UStatusError(UCode.INTERNAL, "a fault")
    with pytest.raises(UStatusError, match="a fault"):
        await Holding(log, Flow()).append([1], ["a"])


async def test_who_waits_no_more_holds_up_nobody_behind_him() -> None:
    log = await Log.open(None, name="test")
    flow, lag = Flow(), [2.0]
    flow.follow(SimpleNamespace(lag=lambda: lag[0], read=0))
    held = Holding(log, flow)
    topic = log.stream_id(SPEED)
    batch = [EncodedMessage.of(UMessageBuilder.publish(SPEED).build())]
    first, second = held.append([topic], batch), held.append([topic], batch)
    await asyncio.sleep(0)
    first.cancel()
    lag[0] = 0.0
    flow.moved()
    assert await asyncio.wait_for(second, 5) == 2
    await log.close()


async def test_zenoh_like_networks_wait_for_a_disk_that_is_full_for_a_moment(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transports.local import LocalTransport
    from uprotocol.transport import Capability

    monkeypatch.setattr(LocalTransport, "capabilities", LocalTransport.capabilities & ~Capability.ACK)
    world = await make_world(subscriptions=SUBSCRIBED)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, SPEED)
    append, failures = Log.append, 0

    def full(self: Log, streams: list[int], messages: Sequence[Any]) -> asyncio.Future[int]:
        nonlocal failures
        if failures < 3:
            failures += 1
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            future.set_exception(FULL)
            return future
        return append(self, streams, messages)

    monkeypatch.setattr(Log, "append", full)
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(5)])
    await heard.expect(5)
    assert failures == 3
    assert heard.texts == [str(number) for number in range(5)]
    assert world.assembly.endpoints["vehicle"].dropped == {}


async def test_a_foreign_id_keeps_nobody_out(make_world: MakeWorld, publish: Publish) -> None:
    topics = {"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"], "//mcu1/8001/1/8001": ["//cloud/9001/1/0"]}
    world = await make_world(subscriptions=topics)
    vehicle, mcu = await world.node("vehicle", "vehicle1"), await world.node("mcu", "mcu1")
    cloud = await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, uris.pattern("*"))
    real = publish(SPEED, "real")
    forged = publish("//mcu1/8001/1/8001", "forged")
    forged.attributes.id.CopyFrom(real.attributes.id)
    await mcu.send(forged)
    await heard.expect(1)
    await vehicle.send(real)
    await vehicle.send(real)
    await heard.expect(2)
    await world.until(lambda: world.assembly.endpoints["vehicle"].dropped["duplicate"] == 1)
    assert heard.texts == ["forged", "real"]


# -- damage and shortage of the subscriptions


async def test_a_store_that_cant_be_opened_leaves_the_last_known_interest(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    from usubscription.service import USubscriptionService

    world = await make_world(subscriptions={})
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, SPEED)
    async with USubscriptionClient(cloud, cloud.local, "vehicle1") as client:
        await client.subscribe(SPEED)
    await world.stop()
    begin = USubscriptionService.open
    refused = asyncio.Event()

    async def refuses(self: USubscriptionService) -> None:
        if not refused.is_set():
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, "the disk is full")
        await begin(self)

    monkeypatch.setattr(USubscriptionService, "open", refuses)
    await world.start()
    assert any("its service can't start" in problem for problem in world.parts.problems())
    await vehicle.send(publish(SPEED, "still forwarded"))
    await heard.expect(1)
    refused.set()
    await world.until(lambda: not world.assembly.interest.unhealthy)
    await vehicle.send(publish(SPEED, "and again"))
    await heard.expect(2)
    assert not [problem for problem in world.parts.problems() if "usubscription" in problem.lower()]


async def test_interest_is_remembered_once_for_each_authority(tmp_path: Path) -> None:
    from usubscription_client import Status, Subscription
    from usubscription_client.interest import InterestSource

    table = InterestSource("test")
    for entity, period in ((1, 100), (2, 50), (3, None)):
        table.put(Subscription(SPEED, uris.uri("cloud", entity, 1, 0), Status.SUBSCRIBED, None, period))
    table.put(Subscription(SPEED, uris.uri("other", 1, 1, 0), Status.SUBSCRIBED, None, 7))
    again = InterestSource("test")
    assert again.replace(list(table.one_of_each_authority()))
    assert len(list(again.subscriptions())) == 2
    assert again.wants(SPEED) == table.wants(SPEED)
    assert json.dumps(sorted(again.wants(SPEED))) == '["cloud", "other"]'


async def test_a_store_that_may_not_be_opened_stops_nothing_else(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED, start=False)
    store = world.config.streamer.data_dir / "usubscription.db"
    store.mkdir(parents=True)
    await world.start()
    assert any("its service can't start" in problem and str(store) in problem for problem in world.parts.problems())
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, SPEED)
    await vehicle.send(publish(SPEED, "forwarded all the same"))
    await heard.expect(1)


@pytest.mark.parametrize("adopt", [True, False])
async def test_what_a_follower_has_not_had_is_adopted_or_forgotten_too(tmp_path: Path, *, adopt: bool) -> None:
    path = tmp_path / "history.db"
    async with await Log.open(path, name="durable") as log:
        await log.append([log.stream_id(SPEED)] * 6, [UMessageBuilder.publish(SPEED).build() for _ in range(6)])
        rows = {"egress:old": 5, "followed:old": 2, "owed:old:3": 1, "parked:old:4": 4, "began:old": 1}
        rows |= {"follower:old:up://hub/4/1/0": 1}
        for name, seq in rows.items():
            log.cursors.set(name, seq, holds=True)
    if adopt:
        await cursors._adopt(path, "old", "new")
    else:
        await cursors._forget(path, "old")
    async with await Log.open(path, name="durable") as log:
        expected = {"egress:new": 5, "followed:new": 2, "owed:new:3": 1, "parked:new:4": 4} if adopt else {}
        expected |= {"follower:new:up://hub/4/1/0": 1} if adopt else {}
        assert log.cursors.seqs() == expected
