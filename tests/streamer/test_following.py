"""A gateway follows a gateway: each record of one log gets into the other exactly once, despite disconnects and
restarts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from campaigns.simulation.network import Faults
from history.publisher import HistoryPublisher
from streamer.config import FollowSection
from streamer.following import follows
from streamer.following.followed import Followed
from streamer.operating.metrics import expose
from streamer.parts.reloading import Reloader
from tests.streamer.conftest import Hearer, MakeWorld, World, endpoints, text
from tests.tiers import seeds
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import (
    Announcement,
    DescribeRequest,
    DescribeResponse,
    FollowedPlaces,
    HandOver,
)
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.client import USubscriptionClient

SPEED = uris.parse("//vehicle1/8001/1/8001")
DOOR = uris.parse("//vehicle1/8001/1/8002")
SUBSCRIBED = {uris.format(topic).removeprefix("up:"): ["//tablet/9001/1/0"] for topic in (SPEED, DOOR)}
ECU_SUBSCRIBED = {suffix: {f"//ecu1{suffix}/8001/1/8001": ["//tablet/9001/1/0"]} for suffix in ("", ".vin1")}
_links = itertools.count()

Publish = Callable[..., UMessage]


def gateway(
    inside: str, inside_authorities: list[str], outside_authorities: list[str], link: str, more: str = ""
) -> str:
    """TOML of a gateway at home on a network of its own, and on the `link`."""
    return f"""
[[endpoint]]
name = "{inside}"
transport = "local"
authorities = {inside_authorities}
settings = {{{{ network = "{link}-{inside}" }}}}
[[endpoint]]
name = "link"
transport = "local"
authorities = {outside_authorities}
usubscription = "none"
settings = {{{{ network = "{link}" }}}}
{more}
"""


class Pair:
    """vehicle1 publishes behind one gateway; a tablet receives behind the other one, which follows."""

    def __init__(self, make_world: MakeWorld, publish: Publish) -> None:
        self._make, self.publication = make_world, publish
        self.link = f"link{next(_links)}"
        self.sent = 0

    async def begin(
        self,
        *,
        followed_by: bool = True,
        mode: str = "auto",
        topics: str = "",
        follow: bool = True,
        vehicle_more: str = "",
        hub_more: str = "",
    ) -> None:
        by = 'followed_by = "//hub/4/1/0"' if followed_by else ""
        vehicle = gateway("car", ["vehicle1"], ["hub", "tablet"], self.link, f"{by}\n{vehicle_more}")
        self.vehicle: World = await self._make(vehicle, SUBSCRIBED)
        following = f'\n[[follow]]\nendpoint = "link"\nservice = "//vehicle1/4/1/0"\nmode = "{mode}"\n{topics}'
        hub = gateway("office", ["hub", "tablet"], ["vehicle1"], self.link) + (following if follow else "") + hub_more
        self.hub: World = await self._make(hub, SUBSCRIBED)
        self.car = await self.vehicle.node("car", "vehicle1")
        self.tablet = await self.hub.node("office", "tablet", 0x9001)
        self.heard: Hearer = await self.hub.hear(self.tablet, uris.pattern("vehicle1"))

    @property
    def followed(self) -> Any:
        (one,) = self.hub.assembly.follows
        return one

    async def handed_over(self) -> None:
        await self.hub.until(lambda: self.followed.is_handed_over and self.followed.connected)

    async def publish(self, count: int, topic: UUri = SPEED) -> None:
        for _ in range(count):
            await self.car.send(self.publication(topic, f"{self.sent}"))
            self.sent += 1

    async def expect_all(self) -> None:
        """Each once and in order."""
        await self.heard.expect(self.sent)
        assert [int(text) for text in self.heard.texts] == list(range(self.sent))


def followed_by_hub(vehicle: World) -> Any:
    endpoints = [
        one.model_copy(update={"followed_by": "//hub/4/1/0"}) if one.name == "link" else one
        for one in vehicle.config.endpoint
    ]
    return vehicle.config.model_copy(update={"endpoint": endpoints})


def has_ended(hub: World) -> bool:
    """It follows nobody, and was told that publishes are pushed again. The positions are kept."""
    kept = hub.assembly.logs.durable.followed.positions()
    return all(FollowedPlaces.FromString(one).ended for key, one in kept.items() if key.startswith("link:"))


@pytest.fixture
async def pair(make_world: MakeWorld, publish: Publish) -> Pair:
    return Pair(make_world, publish)


@pytest.mark.parametrize("mode", ["auto", "poll", "push"])
async def test_what_is_followed_is_heard_once_and_in_order(pair: Pair, mode: str) -> None:
    await pair.begin(mode=mode)
    await pair.handed_over()
    await pair.publish(300)
    await pair.expect_all()
    await pair.publish(50, DOOR)
    await pair.expect_all()
    link = [pump for pump in pair.vehicle.assembly.pumps if pump.peer.name == "link"]
    assert all(pump.waits.plans.is_followed and not pump.retries for pump in link)
    assert pair.followed.counts["stored"] == 350
    assert pair.followed.counts["duplicate"] == 0
    assert pair.followed.counts["doorbells"] == 0


async def test_each_record_tells_its_origin(pair: Pair) -> None:
    await pair.begin()
    await pair.handed_over()
    await pair.publish(20)
    await pair.expect_all()
    vehicle, hub = pair.vehicle.assembly.logs.durable, pair.hub.assembly.logs.durable
    chunks = await hub.read(0)
    origins = [origin for chunk in chunks for origin in chunk.origins or []]
    assert [origin.seq for origin in origins] == list(range(vehicle.newest_seq - 19, vehicle.newest_seq + 1))
    assert {origin.incarnation for origin in origins} == {vehicle.incarnation}


@pytest.mark.parametrize("seed", seeds(4, quick=1))
async def test_over_cuts_and_restarts_on_both_sides_nothing_is_lost_or_doubled(pair: Pair, seed: int) -> None:
    """The seed is in the test's name."""
    rng = random.Random(seed)
    await pair.begin()
    await pair.handed_over()
    network = pair.hub.networks["link"]
    for _ in range(40):
        await pair.publish(rng.randrange(1, 8), rng.choice([SPEED, DOOR]))
        match rng.randrange(8):
            case 0 | 1 | 2:
                network.cut("vehicle1")
                await pair.publish(rng.randrange(1, 8))
                await asyncio.sleep(rng.random() * 0.05)
                network.mend("vehicle1")
            case 3:
                await pair.hub.restart()
            case 4:
                await pair.vehicle.restart()
            case _:
                await asyncio.sleep(rng.random() * 0.02)
    await pair.publish(1, SPEED)
    await pair.publish(1, DOOR)
    await pair.heard.expect(pair.sent)
    assert sorted(map(int, pair.heard.texts)) == list(range(pair.sent))
    for topic in (SPEED, DOOR):
        numbers = [int(one.payload) for one in pair.heard.messages if one.attributes.source == topic]
        assert numbers == sorted(numbers)


async def test_what_is_followed_is_named_to_those_who_may_read_it(pair: Pair) -> None:
    denied = '\n[[access]]\ncallers = ["//tablet/9002/FF/0"]\ndeny = ["//vehicle1/FFFFFFFF/FF/FFFF"]\n'
    await pair.begin(hub_more=denied)
    await pair.handed_over()
    for entity, services in ((0x9001, ["up://vehicle1/4/1/0"]), (0x9002, [])):
        app = pair.tablet if entity == 0x9001 else await pair.hub.node("office", "tablet", entity)
        async with InMemoryRpcClient(app, app.local) as rpc:
            answer = await rpc.invoke_method(
                uris.parse("//hub/4/1/1"), UPayload.pack(DescribeRequest(followed=True)), CallOptions(timeout_ms=5_000)
            )
        assert [uris.format(one) for one in answer.unpack(DescribeResponse).followed] == services


async def test_without_a_hand_over_nothing_is_followed_and_what_is_pushed_counts(pair: Pair) -> None:
    await pair.begin(followed_by=False)
    await pair.hub.until(lambda: "names it as followed_by" in pair.followed.trouble)
    await pair.publish(50)
    await pair.expect_all()
    assert pair.followed.counts["stored"] == 0
    assert any("can't be followed" in problem for problem in pair.hub.parts.problems())
    await pair.vehicle.stop()
    pair.vehicle.config = followed_by_hub(pair.vehicle)
    await pair.vehicle.start()
    await pair.handed_over()
    await pair.publish(50)
    await pair.expect_all()
    assert pair.followed.counts["stored"] == 50


async def test_what_was_pushed_before_a_hand_over_comes_before_what_is_followed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower's log refused it, and the network delivers it again."""
    await pair.begin(followed_by=False)
    await pair.hub.until(lambda: pair.followed.trouble)
    durable, refusals, refuses = pair.hub.assembly.logs.durable, 0, True
    append = durable.append

    def refusing(streams: list[int], messages: list[Any], notes: Any = None) -> asyncio.Future[int]:
        nonlocal refusals
        if notes is not None or not refuses:
            return append(streams, messages, notes)
        refusals += 1
        refused = asyncio.get_running_loop().create_future()
        refused.set_exception(UStatusError(UCode.UNAVAILABLE, "this disk is full"))
        return refused

    monkeypatch.setattr(durable, "append", refusing)
    await pair.publish(1)
    await pair.hub.until(lambda: refusals)
    await pair.vehicle.stop()
    pair.vehicle.config = followed_by_hub(pair.vehicle)
    await pair.vehicle.start()
    await pair.vehicle.until(lambda: pair.vehicle.assembly.handovers.followed)
    await pair.publish(1)
    before = refusals
    await pair.hub.until(lambda: refusals >= before + 5)
    refuses = False
    await pair.expect_all()


@pytest.mark.parametrize("had", [30, 0])
async def test_what_is_not_followed_any_more_is_pushed_again_from_where_we_were(pair: Pair, had: int) -> None:
    await pair.begin()
    await pair.handed_over()
    await pair.publish(had)
    await pair.expect_all()
    await pair.hub.stop()
    await pair.publish(30)  # nobody follows, and nothing is pushed
    link = pair.hub.config.model_copy(update={"follow": []})
    pair.hub.config = link
    await pair.hub.start()
    await pair.publish(30)
    await pair.expect_all()
    assert pair.vehicle.assembly.handovers.followed == frozenset()
    await pair.hub.until(lambda: has_ended(pair.hub))


async def test_an_end_is_answered_when_it_is_on_disk(pair: Pair) -> None:
    """Otherwise a streamer killed then starts as if it were still followed, while the follower has forgotten it."""
    await pair.begin()
    await pair.handed_over()
    await pair.hub.stop()
    pair.hub.config = pair.hub.config.model_copy(update={"follow": []})
    await pair.hub.start()
    await pair.hub.until(lambda: has_ended(pair.hub))
    with contextlib.closing(sqlite3.connect(pair.vehicle.config.streamer.data_dir / "history.db")) as db:
        assert db.execute("SELECT name FROM cursor WHERE name = 'followed:link'").fetchall() == []


async def test_who_names_no_follower_any_more_pushes_again(pair: Pair) -> None:
    await pair.begin()
    await pair.handed_over()
    await pair.publish(30)
    await pair.expect_all()
    await pair.vehicle.stop()
    endpoints = [one.model_copy(update={"followed_by": None}) for one in pair.vehicle.config.endpoint]
    pair.vehicle.config = pair.vehicle.config.model_copy(update={"endpoint": endpoints})
    await pair.vehicle.start()
    await pair.publish(30)
    await pair.expect_all()
    assert not any(name.startswith("followed:") for one in pair.vehicle.assembly.logs for name in one.cursors.seqs())


async def test_a_hand_over_holds_what_the_follower_has_not_had_over_a_restart(pair: Pair) -> None:
    await pair.begin()
    await pair.handed_over()
    await pair.publish(10)
    await pair.expect_all()
    await pair.hub.stop()
    await pair.publish(20)
    await pair.vehicle.restart()
    await pair.publish(20)
    await pair.vehicle.until(lambda: pair.vehicle.assembly.logs.durable.newest_seq >= 50)
    row = pair.vehicle.assembly.logs.durable.cursors.get("followed:link")
    assert row is not None
    assert row.holds
    assert pair.vehicle.assembly.logs.durable.newest_seq - row.seq >= 40
    await pair.hub.start()
    await pair.expect_all()


async def test_who_is_not_named_takes_nothing_over(pair: Pair) -> None:
    await pair.begin(follow=False)
    other = await pair.hub.node("link", "tablet", 0x9002)
    del other
    await pair.publish(10)
    await pair.expect_all()
    assert pair.vehicle.assembly.handovers.followed == frozenset()


async def test_what_is_followed_can_not_be_paused_and_what_is_paused_not_handed_over(pair: Pair) -> None:
    await pair.begin(follow=False)
    paused = pair.vehicle.assembly.paused
    await paused.pause(DOOR, "tablet")
    await pair.hub.stop()
    follow = FollowSection(endpoint="link", service="//vehicle1/4/1/0")
    pair.hub.config = pair.hub.config.model_copy(update={"follow": [follow]})
    await pair.hub.start()
    await pair.vehicle.until(lambda: any(pair.vehicle.assembly.handovers.refusals))
    assert pair.vehicle.assembly.handovers.followed == frozenset()
    await pair.publish(10)
    await pair.expect_all()
    await paused.resume(DOOR, "tablet")
    await pair.handed_over()
    for peer in ("link", "tablet"):
        with pytest.raises(UStatusError, match="follows, so nothing is pushed there") as refused:
            await paused.pause(DOOR, peer)
        assert refused.value.code == UCode.FAILED_PRECONDITION
    await paused.pause(DOOR, "car")
    await pair.publish(10, DOOR)
    await pair.expect_all()


@pytest.mark.parametrize("restarts", [False, True])
async def test_what_was_held_when_a_follower_takes_over_is_read_from_the_history(pair: Pair, restarts: bool) -> None:
    """Records pushed before are not accepted again, and none waits for the network's access rules any more."""
    await pair.begin(follow=False)
    await pair.publish(5)
    await pair.expect_all()
    pair.vehicle.networks["link"].refuse(uris.format(SPEED))
    await pair.publish(20)
    (pump,) = (one for one in pair.vehicle.assembly.pumps if one.peer.name == "link" and one.log.durable)
    await pair.vehicle.until(lambda: sum(hold.records for hold in pump.waits.addresses.values()) >= 20)
    await pair.publish(10, DOOR)
    await pair.heard.expect(15)
    await pair.hub.stop()
    if restarts:
        await pair.vehicle.restart()
    follow = FollowSection(endpoint="link", service="//vehicle1/4/1/0")
    pair.hub.config = pair.hub.config.model_copy(update={"follow": [follow]})
    await pair.hub.start()
    await pair.handed_over()
    await pair.publish(5)
    await pair.heard.expect(40)
    speed = [int(message.payload) for message in pair.heard.messages if message.attributes.source == SPEED]
    assert speed == [*range(25), *range(35, 40)]
    assert pair.followed.counts["pushed_before"] == 10
    assert pair.followed.counts["stored"] == 25
    await pair.vehicle.until(
        lambda: not any(pump.waits.owed or pump.waits.addresses for pump in pair.vehicle.assembly.pumps)
    )
    assert not any(name.startswith(("held:", "owed:")) for name in pair.vehicle.assembly.logs.durable.cursors.seqs())


async def test_a_follower_that_reads_nothing_held_is_asked_to_poll_again(pair: Pair) -> None:
    """A service from before such positions were answered: the follower would never get the waiting records."""
    await pair.begin(follow=False)
    pair.vehicle.networks["link"].refuse(uris.format(SPEED))
    await pair.publish(3)
    (pump,) = (one for one in pair.vehicle.assembly.pumps if one.peer.name == "link" and one.log.durable)
    await pair.vehicle.until(lambda: sum(hold.records for hold in pump.waits.addresses.values()) >= 3)
    hand_overs, caller = pair.vehicle.assembly.handovers, uris.parse("//hub/4/1/0")
    with pytest.raises(UStatusError, match="nothing can be handed over") as refused:
        await hand_overs.asked(caller, HandOver(take=True))
    assert refused.value.code == UCode.UNAVAILABLE
    (durable,) = (one for one in await hand_overs.asked(caller, HandOver(take=True, takes_held=True)) if one.held)
    assert [(one.topic, one.after_seq) for one in durable.held] == [(SPEED, 0)]
    again = await hand_overs.asked(caller, HandOver(take=True, takes_held=True))
    assert durable in again
    await hand_overs.asked(caller, HandOver(end=True))
    pair.vehicle.networks["link"].allow()
    await pair.expect_all()


async def test_what_the_rules_keep_inside_is_not_followed_either(pair: Pair) -> None:
    """The follower is notified."""
    rule = '[[rule]]\nfrom = "car"\nto = "link"\ndeny = ["//vehicle1/8001/1/8002"]\n[[rule]]\nfrom = "link"\nto = "car"'
    await pair.begin(vehicle_more=rule)
    await pair.handed_over()
    await pair.hub.until(lambda: pair.followed.counts["denied"] == 1)
    await pair.publish(10)
    sent, pair.sent = pair.sent, 100
    await pair.publish(10, DOOR)
    pair.sent = sent
    await pair.publish(10)
    await pair.expect_all()


@pytest.mark.parametrize("mode", ["push", "poll"])
async def test_what_the_rules_let_go_from_now_on_is_followed(pair: Pair, mode: str) -> None:
    """A reload: nobody pushes it, since the gateway follows."""
    rule = '[[rule]]\nfrom = "car"\nto = "link"\ndeny = ["//vehicle1/8001/1/8002"]\n[[rule]]\nfrom = "link"\nto = "car"'
    await pair.begin(vehicle_more=rule, mode=mode)
    await pair.handed_over()
    await pair.hub.until(lambda: pair.followed.counts["denied"] == 1)
    await pair.publish(10)
    streamer, config = pair.vehicle.streamer, pair.vehicle.config
    streamer.parts.of(Reloader).read = lambda: config.model_copy(update={"rule": []})
    await streamer.parts.of(Reloader).reload()
    await pair.publish(10, DOOR)
    await pair.publish(10)
    await pair.expect_all()


async def test_following_begins_and_ends_by_reloads(pair: Pair) -> None:
    """Publishes are pushed before and after it, and followed meanwhile: each once and in order."""

    async def reload(world: World, config: Any) -> None:
        world.parts.of(Reloader).read = lambda: config
        assert await world.parts.of(Reloader).reload()

    await pair.begin(followed_by=False, follow=False)
    alone, apart = pair.vehicle.config, pair.hub.config
    section = FollowSection.model_validate({"endpoint": "link", "service": "//vehicle1/4/1/0"})
    for _ in range(3):
        await pair.publish(20)
        await reload(pair.vehicle, followed_by_hub(pair.vehicle))
        await pair.publish(20)
        await reload(pair.hub, apart.model_copy(update={"follow": [section]}))
        await pair.publish(20)
        await pair.handed_over()
        await pair.publish(20)
        await reload(pair.hub, apart)
        await pair.publish(20)
        await reload(pair.vehicle, alone)
        await pair.publish(20)
        await pair.expect_all()


async def test_an_access_entry_hides_from_who_follows(pair: Pair) -> None:
    """A pattern is followed, but only its topics that the follower may read."""
    entry = '[[access]]\ncallers = ["//hub/4/1/0"]\ndeny = ["//vehicle1/8001/1/8002"]'
    await pair.begin(topics='topics = ["//vehicle1/8001/1/FFFF"]', vehicle_more=entry)
    await pair.handed_over()
    await pair.publish(10)
    sent, pair.sent = pair.sent, 100
    await pair.publish(10, DOOR)
    pair.sent = sent
    await pair.publish(10)
    await pair.expect_all()
    assert pair.followed.counts["records"] == 20


async def test_metrics_tell_who_follows_and_how_far_it_is(pair: Pair) -> None:
    await pair.begin(mode="push")
    await pair.handed_over()
    await pair.publish(10)
    await pair.expect_all()
    here, there = expose(pair.hub.parts.samples).decode(), pair.vehicle.streamer
    assert 'up_streamer_followed{endpoint="link",state="handed_over"} 1.0' in here
    assert 'up_streamer_followed_records_total{endpoint="link",what="stored"} 10.0' in here
    await pair.vehicle.until(lambda: not any(records for *_, records in there.assembly.handovers.backlog()))
    metrics = expose(there.parts.samples).decode()
    for line in ("followers 1.0", "followers_topics 4.0", "pushes 1.0"):
        assert f"up_streamer_{line}" in metrics
    await pair.hub.stop()
    await pair.publish(10)
    log = there.assembly.logs.durable
    await pair.vehicle.until(lambda: log.newest_seq >= 20)
    assert 'up_streamer_follower_backlog{endpoint="link",log="durable"} 10.0' in expose(there.parts.samples).decode()


async def test_two_that_follow_each_other_make_no_loop(make_world: MakeWorld, publish: Publish) -> None:
    link = f"link{next(_links)}"
    subscribed = {
        "//vehicle1/8001/1/8001": ["//tablet/9001/1/0"],
        "//tablet/8001/1/8001": ["//vehicle1/9001/1/0"],
    }
    follow = '\n[[follow]]\nendpoint = "link"\nservice = "//{}/4/1/0"\n'
    car = gateway("car", ["vehicle1"], ["hub", "tablet"], link, 'followed_by = "//hub/4/1/0"') + follow.format("hub")
    office = gateway("office", ["hub", "tablet"], ["vehicle1"], link, 'followed_by = "//vehicle1/4/1/0"')
    vehicle = await make_world(car, subscribed)
    hub = await make_world(office + follow.format("vehicle1"), subscribed)
    for world in (vehicle, hub):
        await world.until(lambda world=world: all(one.is_handed_over for one in world.assembly.follows))
    in_car, tablet = await vehicle.node("car", "vehicle1"), await hub.node("office", "tablet")
    in_office = await hub.hear(tablet, uris.pattern("vehicle1"))
    heard = await vehicle.hear(in_car, uris.pattern("tablet"))
    for number in range(50):
        await in_car.send(publish("//vehicle1/8001/1/8001", f"{number}"))
        await tablet.send(publish("//tablet/8001/1/8001", f"{number}"))
    await in_office.expect(50)
    await heard.expect(50)
    for world, hearer in ((vehicle, heard), (hub, in_office)):
        assert [int(text) for text in hearer.texts] == list(range(50))
        assert world.assembly.logs.durable.newest_seq == 100


def tells_copies(world: World) -> bool:
    """The follower recognises plain messages that are copies of followed records."""
    places = world.assembly.logs.durable.followed.positions().values()
    return any(FollowedPlaces.FromString(place).HasField("since") for place in places)


async def test_a_plain_copy_does_not_overtake_what_a_pattern_brings(
    make_world: MakeWorld, publish: Publish, tmp_path: Path
) -> None:
    """A topic that is recorded anyway becomes wanted: it was followed from its first record on."""
    wanted = {"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"]}
    recorded = '\n[history]\nrecord = ["//vehicle1/FFFFFFFF/FF/FFFF"]'
    world: World = await make_world(endpoints({"vehicle": "none", "cloud": "none"}) + recorded, wanted)
    cloud = await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, uris.pattern("vehicle1"))
    node = await world.node("vehicle", "vehicle1", 0x8001)
    async with HistoryPublisher(node, node.local, tmp_path / "own.db", announce_s=0.05) as publisher:
        await world.until(lambda: [one for one in world.assembly.follows if one.connected])
        await publisher.publish(0x8002, text("other"))
        await world.until(lambda: tells_copies(world))
        await world.restart()  # it goes on from a place
        await world.until(lambda: [one for one in world.assembly.follows if one.connected])
        (followed,) = world.assembly.follows
        followed.listen_for(SPEED)
        await node.send(publish(SPEED, "of the same type, and not in the history"))
        await publisher.publish(0x8001, text("0"))
        await heard.expect(1)
    assert heard.texts == ["0"]


async def test_nothing_is_missed_or_doubled_while_a_publisher_is_found(
    make_world: MakeWorld, publish: Publish, tmp_path: Path
) -> None:
    """Its messages are taken as they come until they are followed."""
    subscribed = {uris.format(SPEED).removeprefix("up:"): ["//cloud/9001/1/0"]}
    world: World = await make_world(subscriptions=subscribed)
    cloud = await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, uris.pattern("vehicle1"))
    node = await world.node("vehicle", "vehicle1", 0x8001)
    sent = 0

    async def publish_until(publisher: HistoryPublisher, condition: Callable[[Followed], bool], more: int = 50) -> None:
        nonlocal sent
        while more:
            more -= any(map(condition, world.assembly.follows))
            await publisher.publish(0x8001, text(str(sent)))
            sent += 1

    async with HistoryPublisher(node, node.local, tmp_path / "own.db", announce_s=0.05) as publisher:
        await publish_until(publisher, lambda one: one.counts["stored"] > 20)
        await heard.expect(sent)
    assert [int(one) for one in heard.texts] == list(range(sent))
    (followed,) = world.assembly.follows
    assert followed.counts["doorbells"] > followed.counts["duplicate"]


async def test_what_was_published_before_it_was_followed_counts_whenever_it_comes(
    make_world: MakeWorld, publish: Publish, tmp_path: Path
) -> None:
    """A broker may keep it for long, while the gateway and the publisher are restarted."""
    world: World = await make_world(subscriptions={"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"]})
    heard = await world.hear(await world.node("cloud", "cloud", 0x9001), uris.pattern("vehicle1"))
    node = await world.node("vehicle", "vehicle1", 0x8001)
    early = [publish(SPEED, f"early {number}") for number in range(3)]
    for life, message in enumerate(early):
        async with HistoryPublisher(node, node.local, tmp_path / "own.db", announce_s=0.05) as publisher:
            await world.until(lambda: [one for one in world.assembly.follows if one.connected])
            await publisher.publish(0x8001, text(f"followed {life}"))
            await world.until(lambda: [one for one in world.assembly.follows if one.counts["records"]])
            await node.send(message)
            await heard.expect(2 * (life + 1))
        await world.restart()
    assert sorted(heard.texts) == [f"early {n}" for n in range(3)] + [f"followed {n}" for n in range(3)]


async def test_a_clock_that_stands_still_makes_no_copy_a_message(make_world: MakeWorld, tmp_path: Path) -> None:
    """As it appears to a streamer whose clock was set back: ids only rise."""
    world: World = await make_world(subscriptions={"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"]})
    heard = await world.hear(await world.node("cloud", "cloud", 0x9001), uris.pattern("vehicle1"))
    node = await world.node("vehicle", "vehicle1", 0x8001)
    stopped_ms = uuids.now_ms()
    ids = uuids.UUIDGenerator(lambda: stopped_ms)
    with uuids.simulated(lambda: stopped_ms * 1_000_000, ids):
        async with HistoryPublisher(node, node.local, tmp_path / "own.db", announce_s=0.05) as publisher:
            await world.until(lambda: [one for one in world.assembly.follows if one.connected])
            await publisher.publish(0x8001, text("0"))
            await world.until(lambda: tells_copies(world) and next(iter(world.assembly.follows)).counts["records"])
            for number in range(1, 20):
                await publisher.publish(0x8001, text(str(number)))
            await heard.expect(20)
    (followed,) = world.assembly.follows
    assert followed.counts["stored"] >= 19
    assert followed.counts["duplicate"] <= 1


async def test_a_publisher_with_a_history_is_found_and_followed(
    make_world: MakeWorld, publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its network refuses some messages and is cut; both gateways are restarted."""
    monkeypatch.setattr(
        "history.reading.client.PATIENCE_MS_MIN", 500
    )  # it doubles with each answer that is lost in a row
    world: World = await make_world(subscriptions={"//vehicle1/8001/1/8001": ["//cloud/9001/1/0"]})
    cloud = await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, uris.pattern("vehicle1"))
    node = await world.node("vehicle", "vehicle1", 0x8001)
    network = world.networks["vehicle"]
    sent = itertools.count()

    async def publish_some(publisher: HistoryPublisher, count: int) -> None:
        for _ in range(count):
            await publisher.publish(0x8001, UPayload(str(next(sent)).encode(), 4))

    async with HistoryPublisher(node, node.local, tmp_path / "own.db", announce_s=0.05) as publisher:
        await world.until(lambda: [one for one in world.assembly.follows if one.connected])
        await publish_some(publisher, 1)
        await world.until(lambda: [one for one in world.assembly.follows if one.counts["records"]])
        network.set_faults(Faults(seed=7, fail_send=0.2, duplicate=0.2))
        await publish_some(publisher, 99)
        await world.restart()
        await publish_some(publisher, 100)
        node.disconnect()
        await publish_some(publisher, 100)
        node.reconnect()
        await publish_some(publisher, 100)
    async with HistoryPublisher(node, node.local, tmp_path / "own.db", announce_s=0.05) as publisher:
        await publish_some(publisher, 100)
        await heard.expect(500)
    assert [int(text) for text in heard.texts] == list(range(500))
    (followed,) = world.assembly.follows
    assert followed.counts["doorbells"] > 0
    assert followed.counts["gaps"] == 0


def announcement(entity: int) -> UMessage:
    """A publisher with a history announces itself, which is all that it does."""
    topic = ids.of_publisher(uris.uri("vehicle1", entity, 1), ids.ANNOUNCEMENTS)
    return UMessageBuilder.publish(topic).pack(Announcement())


EMBEDDED = {"vehicle": "embedded", "cloud": "none"}


@pytest.mark.parametrize("ends", ["the plain messages", "the gateway"])
async def test_what_is_published_after_a_subscription_is_answered_is_followed(
    make_world: MakeWorld, tmp_path: Path, ends: str
) -> None:
    """The publisher was announced before anybody needed it. Right after the answer the network refuses its plain
    messages, or the gateway is away."""
    world: World = await make_world(EMBEDDED)
    cloud = await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, uris.pattern("vehicle1"))
    node = await world.node("vehicle", "vehicle1", 0x8001)
    async with (
        HistoryPublisher(node, node.local, tmp_path / "own.db", announce_s=3_600) as publisher,
        USubscriptionClient(cloud, cloud.local, "vehicle1") as client,
    ):
        await world.until(lambda: publisher.counts["announced"])
        await world.taken("vehicle")
        assert not list(world.assembly.follows), "nobody wants anything of it"
        await publisher.publish(0x8001, text("before"))
        await client.subscribe(SPEED)
        if ends == "the gateway":
            await world.stop()
        else:
            world.networks["vehicle"].refuse(node.address_of(SPEED, None))
        for number in range(5):
            await publisher.publish(0x8001, text(str(number)))
        if ends == "the gateway":
            await world.start()
        await heard.expect(5)
    assert heard.texts == [str(number) for number in range(5)]


@pytest.mark.parametrize("topic", ["//vehicle1/8001/1/8001", "//vehicle1/18001/1/8002", "//vehicle1/FFFF8001/1/8001"])
async def test_a_publisher_that_is_not_needed_is_followed_once_it_is(
    make_world: MakeWorld, tmp_path: Path, topic: str
) -> None:
    world: World = await make_world(endpoints({"vehicle": "none", "cloud": "none"}), {})
    node = await world.node("vehicle", "vehicle1", 0x8001)
    other = await world.node("vehicle", "vehicle1", 0x8002)
    async with (
        HistoryPublisher(node, node.local, tmp_path / "own.db", announce_s=3_600) as publisher,
        HistoryPublisher(other, other.local, tmp_path / "other.db", announce_s=3_600) as not_needed,
    ):
        await world.until(lambda: publisher.counts["announced"] and not_needed.counts["announced"])
        await world.taken("vehicle")
        assert not list(world.assembly.follows)
        static_file = world.config.usubscription.static_file
        assert static_file is not None
        static_file.write_text(json.dumps({topic: ["//cloud/9001/1/0"]}))
        await world.assembly.interest.refresh()
        await world.until(lambda: [one for one in world.assembly.follows if one.connected])
        assert [one.service for one in world.assembly.follows] == [publisher.service]


async def test_a_subscription_waits_a_little_for_a_history_that_does_not_answer(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then no Subscribe waits for some time, whatever is announced."""
    monkeypatch.setattr(follows, "BEGIN_S_MAX", 0.4)
    world: World = await make_world(EMBEDDED)
    cloud = await world.node("cloud", "cloud", 0x9001)
    node = await world.node("vehicle", "vehicle1", 0x8001)
    for entity in (0x8001, 0x8002):
        await node.send(announcement(entity))
    await world.taken("vehicle")
    time = asyncio.get_running_loop().time
    async with USubscriptionClient(cloud, cloud.local, "vehicle1") as client:
        began = time()
        await client.subscribe(SPEED)
        assert time() - began >= 0.4
        began = time()
        await client.subscribe(DOOR)
        await client.subscribe(uris.parse("//vehicle1/8002/1/8001"))
        assert time() - began < 0.4
    assert {one.kind for one in world.assembly.follows} == {0x8001, 0x8002}


async def test_as_many_publishers_are_remembered_as_the_limit_allows(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was silent for longest is forgotten."""
    monkeypatch.setattr(follows, "IDLE_MAX", 2)
    world: World = await make_world(endpoints({"vehicle": "none", "cloud": "none"}), {})
    node = await world.node("vehicle", "vehicle1", 0x8001)
    for entity in (0x8001, 0x8002, 0x8001, 0x8003):
        await node.send(announcement(entity))
        await world.taken("vehicle")
    static_file = world.config.usubscription.static_file
    assert static_file is not None
    static_file.write_text(json.dumps({f"//vehicle1/{one}/1/8001": ["//cloud/9001/1/0"] for one in (8001, 8002, 8003)}))
    await world.assembly.interest.refresh()
    assert {one.kind for one in world.assembly.follows} == {0x8001, 0x8003}


# -- other names, other logs


def forget_all(world: World) -> None:
    """As after a new disk; the streamer is stopped."""
    shutil.rmtree(world.config.streamer.data_dir)


async def test_who_follows_from_outside_goes_by_the_outside_names(make_world: MakeWorld, publish: Publish) -> None:
    link = f"link{next(_links)}"
    by = 'suffix = "vin1"\nfollowed_by = "//hub/4/1/0"'
    follow = '\n[[follow]]\nendpoint = "link"\nservice = "//*/4/1/0"\n'
    office = gateway("office", ["hub", "tablet"], ["*.vin1"], link) + follow
    vehicle = await make_world(gateway("car", ["vehicle1", "ecu1"], ["hub", "tablet"], link, by), ECU_SUBSCRIBED[""])
    hub = await make_world(office, ECU_SUBSCRIBED[".vin1"])
    tablet, ecu = await hub.node("office", "tablet"), await vehicle.node("car", "ecu1")
    heard = await hub.hear(tablet, uris.pattern("ecu1.vin1"))
    await hub.until(lambda: any(one.is_handed_over and one.connected for one in hub.assembly.follows))
    for number in range(30):
        await ecu.send(publish("//ecu1/8001/1/8001", f"{number}"))
    await heard.expect(30)
    assert [int(text) for text in heard.texts] == list(range(30))
    (followed,) = hub.assembly.follows
    assert list(map(uris.format, hub.assembly.follows.services())) == ["up://vehicle1.vin1/4/1/0"]
    assert followed.counts["stored"] == 30


@pytest.mark.parametrize("volatile", [False, True])
@pytest.mark.parametrize("mode", ["poll", "push"])
async def test_a_new_log_at_the_origin_is_followed_from_its_beginning(pair: Pair, mode: str, volatile: bool) -> None:
    await pair.begin(mode=mode, vehicle_more='[history]\nvolatile = ["//*/8001/1/FFFF"]' if volatile else "")
    await pair.handed_over()
    await pair.publish(30)
    await pair.expect_all()
    await pair.vehicle.stop()
    if not volatile:
        forget_all(pair.vehicle)
    await pair.vehicle.start()
    await pair.publish(30)
    await pair.expect_all()
    await pair.vehicle.until(lambda: pair.vehicle.assembly.handovers.followed == {"link"})
    await pair.publish(30)
    await pair.expect_all()


async def test_what_the_log_does_not_take_is_followed_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    await pair.begin()
    await pair.handed_over()
    follows = pair.hub.assembly.follows
    append, refused = follows.append, iter(range(3))

    async def full(*append_what: Any) -> None:
        if next(refused, None) is not None:
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, "the disk is full")
        await append(*append_what)

    monkeypatch.setattr(follows, "append", full)
    await pair.publish(30)
    await pair.hub.until(lambda: "the disk is full" in pair.followed.trouble)
    assert any("the disk is full" in problem for problem in pair.hub.parts.problems())
    await pair.publish(30)
    await pair.expect_all()
    assert pair.followed.counts["refused"] == 3
    assert pair.hub.parts.problems() == []


async def test_a_conversation_ends_only_when_it_is_known_what_is_in_the_log(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower that began another one before would be notified of it a second time."""
    await pair.begin()
    await pair.handed_over()
    follows, handed, gate = pair.hub.assembly.follows, asyncio.Event(), asyncio.Event()
    append = follows.append

    async def slow(*append_what: Any) -> None:
        handed.set()
        await gate.wait()
        await append(*append_what)

    monkeypatch.setattr(follows, "append", slow)
    await pair.publish(5)
    await handed.wait()
    stopping = asyncio.create_task(follows.stop())
    await asyncio.wait({stopping}, timeout=0.1)
    assert not stopping.done()
    gate.set()
    await stopping
    assert pair.followed.counts["stored"] == 5
    await pair.expect_all()


async def test_what_is_recorded_here_is_followed_though_nobody_wants_it(pair: Pair) -> None:
    """Also the topics named under [[follow]]."""
    other = uris.parse("//vehicle1/8001/1/8003")
    await pair.begin(
        topics='topics = ["//vehicle1/8001/1/8003"]\n[history]\nrecord = ["//*/8001/1/8004"]',
        vehicle_more='[history]\nrecord = ["//vehicle1/8001/1/FFFF"]',
    )
    await pair.handed_over()
    for topic in (other, uris.parse("//vehicle1/8001/1/8004"), uris.parse("//vehicle1/8001/1/8005"), SPEED):
        await pair.car.send(pair.publication(topic, "0"))
    await pair.hub.until(lambda: pair.followed.counts["stored"] >= 3)
    log = pair.hub.assembly.logs.durable
    there = {log.stream(stream).source.resource_id for chunk in await log.read(0) for stream in chunk.streams}
    assert there == {0x8001, 0x8003, 0x8004}


async def test_a_publisher_is_followed_once_a_rule_lets_its_messages_go_on(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    """The rules say what is wanted elsewhere; a reload changes them while the gateway runs."""
    subscribed = {uris.format(SPEED).removeprefix("up:"): ["//cloud/9001/1/0"]}
    only_in = '[[rule]]\nfrom = "cloud"\nto = "vehicle"\n'
    world: World = await make_world({"vehicle": "", "cloud": "none"}, subscribed, more=only_in)
    streamer, config = world.streamer, world.config
    heard = await world.hear(await world.node("cloud", "cloud", 0x9001), uris.pattern("vehicle1"))
    node = await world.node("vehicle", "vehicle1", 0x8001)
    async with HistoryPublisher(node, node.local, tmp_path / "own.db", announce_s=3_600) as publisher:
        await world.until(lambda: publisher.counts["announced"])
        await world.taken("vehicle")
        assert not list(streamer.assembly.follows)
        streamer.parts.of(Reloader).read = lambda: config.model_copy(update={"rule": []})
        await streamer.parts.of(Reloader).reload()
        await world.until(lambda: [one for one in streamer.assembly.follows if one.connected])
        for number in range(20):
            await publisher.publish(0x8001, text(str(number)))
        await heard.expect(20)
    assert heard.texts == [str(number) for number in range(20)]
