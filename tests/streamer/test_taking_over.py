"""A follower takes over: its own log says what was pushed to it; everything else is read from its position."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest

from history.file import writer
from streamer.commands import cursors
from streamer.config import FollowSection
from streamer.following.pushed import PushedBefore, Sorted
from streamer.operating.metrics import expose
from streamer.parts.reloading import Reloader
from tests.streamer.conftest import MakeWorld, World
from tests.streamer.test_following import DOOR, SPEED, Pair, Publish, has_ended
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import FollowedPlaces, Gap, HandOver
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

NAMED = uris.parse("//vehicle1/8001/1/8003")  # nobody has subscribed to it
TOPICS = 'topics = ["//vehicle1/8001/1/8003"]'
RECORDED = '[history]\nrecord = ["//vehicle1/8001/1/FFFF"]'


@pytest.fixture
async def pair(make_world: MakeWorld, publish: Publish) -> Pair:
    return Pair(make_world, publish)


async def logged(world: World, topic: UUri) -> list[int]:
    """The texts of this topic in a gateway's log, as numbers."""
    log = world.assembly.logs.durable
    return [
        int(message.decoded().payload if hasattr(message, "decoded") else message.payload)
        for chunk in await log.read(0)
        for stream, message in zip(chunk.streams, chunk.messages, strict=True)
        if log.stream(stream).source == topic
    ]


def records_of(world: World, topic: UUri) -> int:
    log = world.assembly.logs.durable
    stream = log.known_id(topic)
    return 0 if stream is None else log.stream(stream).records


async def have_both(pair: Pair, *topics: UUri) -> None:
    """Until the hub's log has every record of the vehicle's log: each once, and in order."""
    await pair.vehicle.until(lambda: pair.vehicle.assembly.logs.durable.newest_seq >= pair.sent)
    for topic in topics:
        there = await logged(pair.vehicle, topic)
        await pair.hub.until(lambda topic=topic, there=there: records_of(pair.hub, topic) >= len(there))
        assert await logged(pair.hub, topic) == there


def with_link(world: World, **changes: Any) -> Any:
    endpoints = [one.model_copy(update=changes) if one.name == "link" else one for one in world.config.endpoint]
    return world.config.model_copy(update={"endpoint": endpoints})


async def configured(world: World, config: Any) -> None:
    await world.stop()
    world.config = config
    await world.start()


async def not_followed(pair: Pair, who: str) -> None:
    """The origin names no follower any more, or the follower does not follow."""
    if who == "origin":
        await configured(pair.vehicle, with_link(pair.vehicle, followed_by=None))
        return
    await configured(pair.hub, pair.hub.config.model_copy(update={"follow": []}))
    await pair.hub.until(lambda: has_ended(pair.hub))
    assert not pair.vehicle.assembly.handovers.followed


@pytest.mark.parametrize("who", ["origin", "follower"])
async def test_what_nobody_pushed_meanwhile_is_read_when_it_is_followed_again(pair: Pair, who: str) -> None:
    """The origin named no follower, or the follower did not follow."""
    await pair.begin(topics=TOPICS, vehicle_more=RECORDED)
    await pair.handed_over()
    await pair.publish(20, NAMED)
    world = pair.vehicle if who == "origin" else pair.hub
    before = world.config
    await have_both(pair, NAMED)
    await not_followed(pair, who)
    for _ in range(5):
        await pair.publish(10, NAMED)
        await pair.publish(10, SPEED)
    await pair.heard.expect(50)
    await configured(world, before)
    await pair.handed_over()
    await pair.publish(10, NAMED)
    await pair.publish(10, SPEED)
    await have_both(pair, NAMED, SPEED)
    await pair.heard.expect(60)
    assert len(set(pair.heard.texts)) == len(pair.heard.texts) == 60
    assert pair.followed.counts["pushed_before"] >= 50


@pytest.mark.parametrize("who", ["origin", "follower"])
async def test_pushed_copies_are_recognised_after_a_restart_with_a_small_window(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Only the log knows them then, beyond the seq that is stored with the position."""
    monkeypatch.setattr("streamer.following.pushed.SLACK", 0)
    await pair.begin(topics=TOPICS, vehicle_more=RECORDED)
    await pair.handed_over()
    await pair.publish(5)
    await have_both(pair, SPEED)
    world = pair.vehicle if who == "origin" else pair.hub
    before = world.config
    await not_followed(pair, who)
    for _ in range(10):
        await pair.publish(5, SPEED)
        await pair.publish(3, NAMED)
        await pair.publish(5, DOOR)
    await pair.heard.expect(105)
    monkeypatch.setattr("streamer.building.RECENT_IDS", 2)
    await pair.hub.restart()
    await configured(world, before)
    await pair.handed_over()
    await have_both(pair, NAMED, SPEED, DOOR)
    assert len(pair.heard.texts) == 105
    assert pair.followed.counts["pushed_before"] == 100


async def test_what_is_read_while_our_log_cannot_say_what_was_pushed_comes_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also records of the same answer that came after the hand-over."""
    await pair.begin(topics=TOPICS, vehicle_more=RECORDED)
    await pair.handed_over()
    before = pair.hub.config
    await not_followed(pair, "follower")
    await pair.publish(10, SPEED)
    await pair.heard.expect(10)
    had, failures, is_full = PushedBefore.had, list[int](), [True]

    async def full(self: PushedBefore, sorted: Sequence[Sorted]) -> frozenset[tuple[int, bytes]]:
        if is_full[0]:
            failures.append(len(sorted))
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, "the disk is full")
        return await had(self, sorted)

    monkeypatch.setattr(PushedBefore, "had", full)
    await configured(pair.hub, before)
    await pair.hub.until(lambda: bool(failures))
    await pair.publish(10, NAMED)
    await pair.publish(10, SPEED)
    read = len(failures)
    await pair.hub.until(lambda: len(failures) >= read + 2)
    is_full[0] = False
    await have_both(pair, NAMED, SPEED)
    await pair.heard.expect(20)


async def test_a_push_that_the_network_has_lost_is_read(pair: Pair) -> None:
    await pair.begin(topics=TOPICS, vehicle_more=RECORDED)
    await pair.handed_over()
    before = pair.vehicle.config
    await configured(pair.vehicle, with_link(pair.vehicle, followed_by=None))
    await pair.publish(10)
    await pair.heard.expect(10)
    listener = pair.hub.assembly.ingresses["link"]
    receive = listener.on_receive_encoded
    listener.on_receive_encoded = lambda messages: None  # type: ignore[method-assign]
    await pair.publish(10)
    (pump,) = (one for one in pair.vehicle.assembly.pumps if one.peer.name == "link" and one.log.durable)
    await pair.vehicle.until(lambda: pump.cursor >= 20)
    listener.on_receive_encoded = receive  # type: ignore[method-assign]
    await pair.publish(10, DOOR)
    await pair.heard.expect(20)
    await configured(pair.vehicle, before)
    await pair.handed_over()
    await have_both(pair, SPEED, DOOR)
    assert sorted(map(int, pair.heard.texts)) == list(range(30))


async def test_a_follower_with_an_emptied_log_says_so_and_reads_everything_again(pair: Pair) -> None:
    await pair.begin()
    await pair.handed_over()
    await pair.publish(30)
    await pair.expect_all()
    await pair.vehicle.until(lambda: not any(records for *_, records in pair.vehicle.assembly.handovers.backlog()))
    await pair.hub.stop()
    shutil.rmtree(pair.hub.config.streamer.data_dir)
    await pair.publish(30)
    await pair.hub.start()
    await have_both(pair, SPEED)
    said = [one for one in pair.hub.parts.problems() if "an earlier one has had records of" in one]
    assert len(said) == 1
    assert "//vehicle1/4/1/0 up to seq 30: they are read again" in said[0]
    assert 'up_streamer_log_damage{kind="emptied",log="durable"} 1.0' in expose(pair.hub.parts.samples).decode()
    assert pair.vehicle.parts.problems() == []
    await pair.hub.restart()
    await pair.handed_over()
    assert [one for one in pair.hub.parts.problems() if "an earlier one has had records of" in one] == said
    pair.hub.assembly.logs.durable.losses.acknowledge()
    await pair.hub.restart()
    await pair.handed_over()
    await pair.publish(10)
    await have_both(pair, SPEED)
    assert pair.hub.parts.problems() == []


@pytest.mark.parametrize("by", ["emptied", "ended"])
async def test_what_retention_has_deleted_before_it_could_be_read_is_a_gap(
    pair: Pair, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.begin(topics=TOPICS, vehicle_more=RECORDED)
    await pair.handed_over()
    await pair.publish(30, NAMED)
    await have_both(pair, NAMED)
    durable, before = pair.vehicle.assembly.logs.durable, pair.hub.config
    await pair.vehicle.until(lambda: not any(records for *_, records in pair.vehicle.assembly.handovers.backlog()))
    if by == "emptied":
        await pair.hub.stop()
        shutil.rmtree(pair.hub.config.streamer.data_dir)
    else:
        await configured(pair.hub, before.model_copy(update={"follow": []}))
        await pair.vehicle.until(lambda: not pair.vehicle.assembly.handovers.followed)
        await pair.publish(30, NAMED)
        await pair.hub.stop()
    await pair.vehicle.until(lambda: durable.newest_seq == pair.sent)
    most = pair.sent
    monkeypatch.setattr(writer, "RETENTION_PERIOD_MS", 1)
    durable.limit(1, 1 << 40)
    while durable.floor_seq < most:
        await pair.publish(1, NAMED)
        await pair.vehicle.until(lambda: durable.newest_seq == pair.sent)
    durable.limit(1 << 40, 1 << 40)
    await pair.publish(10, NAMED)
    await pair.vehicle.until(lambda: durable.newest_seq == pair.sent)
    floor = durable.floor_seq
    gaps = list[Gap]()
    monkeypatch.setattr(
        "streamer.operating.states.LossReports.followed_gap", lambda self, service, gap: gaps.append(gap)
    )
    await configured(pair.hub, before)
    await pair.handed_over()
    await pair.hub.until(lambda: pair.followed.counts["stored"] == pair.sent - floor)
    after = 0 if by == "emptied" else 30
    assert [(one.reason, one.after_seq, one.before_seq) for one in gaps] == [(Gap.REASON_RETENTION, after, floor + 1)]


async def test_a_follower_that_has_read_nothing_yet_is_not_emptied(pair: Pair) -> None:
    """It begins where it took over, also if it was killed before it had a position."""
    await pair.begin(follow=False)
    await pair.publish(10)
    await pair.expect_all()
    hand_overs, caller = pair.vehicle.assembly.handovers, uris.parse("//hub/4/1/0")
    for _ in range(2):
        places = await hand_overs.asked(caller, HandOver(take=True, takes_held=True))
        assert [(one.seq, one.acknowledged) for one in places] == [(10, False), (0, False)]
    hand_overs.acknowledged(caller, {one.incarnation: one.seq for one in places})
    again = await hand_overs.asked(caller, HandOver(take=True, takes_held=True))
    assert [one.acknowledged for one in again] == [True, True]
    await hand_overs.asked(caller, HandOver(end=True))
    places = await hand_overs.asked(caller, HandOver(take=True, takes_held=True))
    assert [one.acknowledged for one in places] == [False, False]


def renamed(world: World, **more: Any) -> Any:
    """Configuration in which the endpoint to the hub has another name."""
    return with_link(world, name="tolink", **more)


def of_link(world: World) -> list[str]:
    return [one for one in world.parts.problems() if "wait for endpoint 'link'" in one]


async def all_acknowledged(pair: Pair) -> None:
    await pair.vehicle.until(lambda: not any(records for *_, records in pair.vehicle.assembly.handovers.backlog()))


async def twenty_wait(pair: Pair) -> None:
    """Of 50 records the hub has acknowledged 30; now it is away."""
    await pair.begin()
    await pair.handed_over()
    await pair.publish(30)
    await pair.expect_all()
    await all_acknowledged(pair)
    await pair.hub.stop()
    await pair.publish(20)
    await pair.vehicle.until(lambda: pair.vehicle.assembly.logs.durable.newest_seq == 50)


@pytest.mark.parametrize("how", ["left alone", "adopted", "back in time"])
async def test_what_waits_for_a_follower_is_not_lost_when_its_endpoint_gets_another_name(pair: Pair, how: str) -> None:
    """What counts is who follows. The finding says how many records it has not acknowledged, until it has."""
    await twenty_wait(pair)
    await configured(pair.vehicle, renamed(pair.vehicle))
    (problem,) = of_link(pair.vehicle)
    assert problem.startswith("20 records wait for endpoint 'link'")
    path = pair.vehicle.config.streamer.data_dir / "history.db"
    if how != "back in time":
        await pair.vehicle.stop()
        assert {one.endpoint: one.records for one in cursors.listed(path)}["link"] == 20
    if how == "adopted":
        adopted = await cursors._adopt(path, "link", "tolink", out_of_order=True)
        assert adopted.records == 20
    if how != "back in time":
        await pair.vehicle.start()
    await pair.hub.start()
    await pair.handed_over()
    await pair.publish(10)
    await have_both(pair, SPEED)
    await all_acknowledged(pair)
    await pair.vehicle.until(lambda: not of_link(pair.vehicle))
    await pair.vehicle.restart()
    rows = pair.vehicle.assembly.logs.durable.cursors.seqs
    await pair.vehicle.until(lambda: not [one for one in rows() if one.split(":")[1] == "link"])
    await pair.expect_all()


async def test_a_follower_that_had_read_nothing_before_its_endpoint_got_another_name_reads_all_of_it(
    pair: Pair,
) -> None:
    """It has taken over, and was killed before it had a position."""
    await pair.begin(follow=False)
    await pair.publish(10)
    await pair.expect_all()
    take, caller = HandOver(take=True, takes_held=True), uris.parse("//hub/4/1/0")
    assert [one.seq for one in await pair.vehicle.assembly.handovers.asked(caller, take)] == [10, 0]
    await pair.publish(20)
    await pair.vehicle.until(lambda: pair.vehicle.assembly.logs.durable.newest_seq == 30)
    await configured(pair.vehicle, renamed(pair.vehicle))
    await pair.publish(10)
    await pair.vehicle.until(lambda: pair.vehicle.assembly.logs.durable.newest_seq == 40)
    section = FollowSection(endpoint="link", service="//vehicle1/4/1/0")
    await configured(pair.hub, pair.hub.config.model_copy(update={"follow": [section]}))
    await pair.handed_over()
    await pair.heard.expect(40)
    texts = [int(text) for text in pair.heard.texts]
    assert texts == [*range(10), *range(30, 40), *range(10, 30)], "the last ten were pushed under the new name"
    await all_acknowledged(pair)
    await pair.vehicle.until(lambda: not of_link(pair.vehicle))


@pytest.mark.parametrize("why", ["away", "refused"])
async def test_publishes_that_wait_for_one_endpoint_are_not_given_to_who_reads_by_itself(pair: Pair, why: str) -> None:
    """Neither what waits for the whole endpoint, nor what waits for an address that its network refuses."""
    await pair.begin(followed_by=False, follow=False)
    await pair.publish(10)
    await pair.expect_all()
    link = pair.vehicle.assembly.endpoints["link"].transport
    if why == "away":
        link.disconnect()
    else:
        link.network.refuse(link.address_of(SPEED, None))
    await pair.publish(10)
    await pair.vehicle.until(lambda: pair.vehicle.assembly.logs.durable.newest_seq == 20)
    if why == "refused":
        (pump,) = [one for one in pair.vehicle.assembly.pumps if one.peer.name == "link" and one.log.durable]
        await pair.vehicle.until(lambda: bool(pump.waits.addresses) and pump.cursor == 20)
    await configured(pair.vehicle, renamed(pair.vehicle, followed_by="//hub/4/1/0"))
    caller = uris.parse("//hub/4/1/0")
    await pair.vehicle.assembly.handovers.asked(caller, HandOver(take=True, takes_held=True))
    await pair.vehicle.stop()
    path = pair.vehicle.config.streamer.data_dir / "history.db"
    before = cursors.listed(path)
    with pytest.raises(
        UStatusError, match="10 publishes wait for 'link', and who is behind 'tolink' follows"
    ) as refused:
        await cursors._adopt(path, "link", "tolink", out_of_order=True)
    assert refused.value.code == UCode.FAILED_PRECONDITION
    assert "take followed_by from 'tolink'" in refused.value.message
    assert cursors.listed(path) == before, "nothing has changed"
    await configured(pair.vehicle, with_name(pair.vehicle, "tolink", followed_by=None))
    await pair.vehicle.stop()
    await cursors._adopt(path, "link", "tolink")
    link.network.allow()
    await pair.vehicle.start()
    await pair.heard.expect(20)


@pytest.mark.parametrize("adopts", [False, True])
async def test_what_waits_for_an_endpoint_leaves_before_a_follower_that_has_read_past_it_takes_over(
    pair: Pair, adopts: bool
) -> None:
    """Records wait for `link`; under another name the same gateway follows, from later ones on. It gets `link` back."""
    await pair.begin(followed_by=False, follow=False)
    await pair.publish(10)
    await pair.expect_all()
    pair.vehicle.assembly.endpoints["link"].transport.disconnect()
    await pair.publish(10)
    await pair.vehicle.until(lambda: pair.vehicle.assembly.logs.durable.newest_seq == 20)
    before = pair.vehicle.config
    section = FollowSection(endpoint="link", service="//vehicle1/4/1/0")
    await configured(pair.hub, pair.hub.config.model_copy(update={"follow": [section]}))
    await configured(pair.vehicle, renamed(pair.vehicle, followed_by="//hub/4/1/0"))
    await pair.handed_over()
    await pair.publish(10)
    await pair.heard.expect(20)
    await all_acknowledged(pair)
    if adopts:
        await pair.vehicle.stop()
        path = before.streamer.data_dir / "history.db"
        with pytest.raises(UStatusError, match="20 publishes wait for 'link', and who is behind 'tolink' follows"):
            await cursors._adopt(path, "tolink", "link", out_of_order=True)
    pair.vehicle.config = before
    tolink = pair.vehicle.assembly.endpoints["tolink"].transport
    tolink.network.refuse(tolink.address_of(SPEED, None))
    await configured(pair.vehicle, with_name(pair.vehicle, "link", followed_by="//hub/4/1/0"))
    await pair.vehicle.until(lambda: "before the position" in pair.vehicle.assembly.handovers.refusals.get("link", ""))
    tolink.network.allow()
    await pair.handed_over()
    await pair.heard.expect(30)
    texts = [int(text) for text in pair.heard.texts]
    assert texts == [*range(10), *range(20, 30), *range(10, 20)], "ten waited for `link`"


def with_name(world: World, name: str, **changes: Any) -> Any:
    endpoints = [one.model_copy(update=changes) if one.name == name else one for one in world.config.endpoint]
    return world.config.model_copy(update={"endpoint": endpoints})


@pytest.mark.parametrize("meanwhile", ["another name", "another name, names nobody", "names another one"])
async def test_who_has_ended_is_not_waited_for_when_its_endpoint_is_as_before(pair: Pair, meanwhile: str) -> None:
    """It ends while that endpoint has another name, or does not name it."""
    await twenty_wait(pair)
    before, follows = pair.vehicle.config, pair.hub.config
    changed = {
        "another name": renamed(pair.vehicle),
        "another name, names nobody": renamed(pair.vehicle, followed_by=None),
        "names another one": with_link(pair.vehicle, followed_by="//tablet/4/1/0"),
    }
    await configured(pair.vehicle, changed[meanwhile])
    if meanwhile == "another name":
        await pair.hub.start()
        await pair.handed_over()
        await pair.expect_all()
    await configured(pair.hub, follows.model_copy(update={"follow": []}))
    await pair.hub.until(lambda: has_ended(pair.hub))
    await configured(pair.vehicle, before)
    assert not pair.vehicle.assembly.handovers.followed
    await pair.publish(10)
    await pair.hub.until(lambda: set(map(int, pair.heard.texts)) == set(range(60)))
    assert list(map(int, pair.heard.texts))[-30:] == list(range(30, 60))
    await configured(pair.hub, follows)
    await pair.handed_over()
    await pair.publish(10)
    await pair.hub.until(lambda: list(map(int, pair.heard.texts))[-10:] == list(range(60, 70)))


async def test_a_follower_that_ends_when_its_own_endpoint_gets_another_name_is_pushed_to(pair: Pair) -> None:
    await pair.begin()
    await pair.handed_over()
    await pair.publish(30)
    await pair.expect_all()
    await configured(pair.hub, renamed(pair.hub).model_copy(update={"follow": []}))
    await pair.publish(10)
    await pair.expect_all()
    assert not pair.vehicle.assembly.handovers.followed


@pytest.mark.parametrize("by", ["restart", "reload"])
async def test_a_follower_whose_endpoint_has_another_name_continues_where_it_was(pair: Pair, by: str) -> None:
    """What counts is whose history it follows."""
    await pair.begin(topics=TOPICS, vehicle_more=RECORDED)
    await pair.handed_over()
    await pair.publish(20, NAMED)
    await have_both(pair, NAMED)
    await all_acknowledged(pair)
    (section,) = pair.hub.config.follow
    config = renamed(pair.hub).model_copy(update={"follow": [section.model_copy(update={"endpoint": "tolink"})]})
    if by == "restart":
        await configured(pair.hub, config)
    else:
        pair.hub.parts.of(Reloader).read = lambda: config
        assert await pair.hub.parts.of(Reloader).reload()
    await pair.handed_over()
    await pair.publish(10, NAMED)
    await have_both(pair, NAMED)
    assert pair.followed.counts["records"] == 10
    assert pair.hub.parts.problems() == []
    keys = list(pair.hub.assembly.logs.durable.followed.positions())
    assert keys == ["tolink:up://vehicle1/4/1/0"]


async def test_positions_of_as_many_ended_histories_as_the_limit_allows_are_kept(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamer.following.follows.ENDED_MAX", 2)
    await pair.begin()
    await pair.handed_over()
    followed = pair.hub.assembly.logs.durable.followed
    for number in range(3):
        followed.keep(f"link:up://gone{number}/4/1/0", FollowedPlaces(ended=True).SerializeToString(), at_once=True)
    await configured(pair.hub, pair.hub.config.model_copy(update={"follow": []}))
    followed = pair.hub.assembly.logs.durable.followed
    await pair.vehicle.until(lambda: not pair.vehicle.assembly.handovers.followed)
    await pair.hub.until(lambda: FollowedPlaces.FromString(followed.position("link:up://vehicle1/4/1/0") or b"").ended)
    assert sorted(followed.positions()) == ["link:up://gone2/4/1/0", "link:up://vehicle1/4/1/0"]
    shown = expose(pair.hub.parts.samples).decode()
    assert 'up_streamer_followed{endpoint="link",state="ended"} 2.0' in shown


async def test_another_follower_behind_an_endpoint_has_acknowledged_nothing(pair: Pair) -> None:
    await pair.begin(follow=False)
    first, second = uris.parse("//hub/4/1/0"), uris.parse("//tablet/4/1/0")
    hand_overs = pair.vehicle.assembly.handovers
    places = await hand_overs.asked(first, HandOver(take=True, takes_held=True))
    hand_overs.acknowledged(first, {one.incarnation: one.seq for one in places})
    await configured(pair.vehicle, with_link(pair.vehicle, followed_by="//tablet/4/1/0"))
    hand_overs = pair.vehicle.assembly.handovers
    places = await hand_overs.asked(second, HandOver(take=True, takes_held=True))
    assert not any(one.acknowledged for one in places)
    rows = [one for one in pair.vehicle.assembly.logs.durable.cursors.seqs() if one.startswith("follower:")]
    assert rows == ["follower:link:up://tablet/4/1/0"]
