"""A history does not keep what is followed of it: its follower says so, until the history keeps it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from streamer.following import not_kept
from streamer.following.kept import TopicsKept
from streamer.operating.metrics import expose
from tests.streamer.conftest import MakeWorld
from tests.streamer.test_following import DOOR, SPEED, Pair, Publish
from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import Status, Subscription
from uprotocol.v1.uri_pb2 import UUri

LOCK = "//vehicle1/8001/1/8009"
SEATS = "//vehicle1/8002/1/FFFF"
TOPICS = f'topics = ["{LOCK}", "{SEATS}", "//vehicle1/8001/1/FFFF"]'  # the last one matches SPEED, which is kept
EVENT = "topics that are followed are not kept there: none of their messages comes"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("history.reading.following.LOOKS_AGAIN_S", 0.02)
    monkeypatch.setattr("history.reading.following.ALIVE_SHARE", 2_400)  # of a lease of 120 s: 0.05 s
    monkeypatch.setattr("history.service.followers.KEPT_S", 0.0)
    monkeypatch.setattr(not_kept, "CONFIRMED_MS", 30)


@pytest.fixture
async def pair(make_world: MakeWorld, publish: Publish) -> Pair:
    return Pair(make_world, publish)


def notes(pair: Pair) -> list[str]:
    return [note for note in pair.hub.parts.notes() if "does not keep " in note]


async def answers(pair: Pair, count: int) -> None:
    """Until the vehicle's gateway has answered so many more commands."""
    commands = pair.vehicle.assembly.history.counts
    wanted = commands["commands"] + count
    await pair.hub.until(lambda: commands["commands"] >= wanted)


async def test_what_is_followed_and_not_kept_there_is_said_with_its_remedy(pair: Pair) -> None:
    with capture_logs() as logged:
        await pair.begin(topics=TOPICS)
        await pair.handed_over()
        await pair.hub.until(lambda: notes(pair))
    (note,) = notes(pair)
    topics = f"up:{LOCK}, up:{SEATS}"
    assert note.startswith(f"up://vehicle1/4/1/0 does not keep {topics} (since ")
    remedy = f"add {topics} to `record` of [history] of vehicle1, or subscribe to it there"
    assert note.endswith(f", which is followed here: no message of it comes: {remedy}")
    (line,) = [one for one in logged if one["event"] == EVENT]
    assert (line["log_level"], line["topics"], line["remedy"]) == ("warning", topics, remedy)
    assert 'up_streamer_followed_not_kept{endpoint="link"} 2.0' in expose(pair.hub.parts.samples).decode()
    assert not [note for note in pair.vehicle.parts.notes() if "does not keep " in note]


async def test_it_ends_as_soon_as_the_topic_is_kept(pair: Pair) -> None:
    await pair.begin(topics=TOPICS)
    await pair.handed_over()
    await pair.hub.until(lambda: notes(pair))
    with capture_logs() as logged:
        pair.vehicle.assembly.logs.record = (uris.parse(LOCK),)
        await pair.hub.until(lambda: f"does not keep up:{SEATS} (" in notes(pair)[0])
        pair.vehicle.assembly.logs.record = (uris.parse(LOCK), uris.parse("//vehicle1/8002/1/8001"))
        await pair.hub.until(lambda: not notes(pair))
    assert [one["event"] for one in logged if "kept there" in one["event"]] == [
        "all topics that are followed are kept there"
    ]
    assert 'up_streamer_followed_not_kept{endpoint="link"} 0.0' in expose(pair.hub.parts.samples).decode()
    pair.vehicle.assembly.logs.record = ()
    await pair.hub.until(lambda: notes(pair))


async def test_a_subscription_there_keeps_a_topic_and_a_pattern(pair: Pair) -> None:
    await pair.begin(topics=TOPICS)
    await pair.handed_over()
    await pair.hub.until(lambda: notes(pair))
    source = pair.vehicle.assembly.interest.sources[0]
    tablet = uris.parse("//tablet/9001/1/0")
    more = [Subscription(uris.parse(one), tablet, Status.SUBSCRIBED) for one in (LOCK, "//vehicle1/8002/1/8001")]
    source.changed(source.put(*more))
    await pair.hub.until(lambda: not notes(pair))


async def test_a_subscription_here_that_the_origin_does_not_know_is_found(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No link between the uSubscriptions: the vehicle keeps nothing of what the hub's tablet wants."""
    monkeypatch.setattr("tests.streamer.test_following.SUBSCRIBED", {})
    pair = Pair(make_world, publish)
    await pair.begin(topics=f'topics = ["{SEATS}"]')
    pair.hub.assembly.logs.record = (SPEED,)
    pair.hub.assembly.follows.rules_changed()
    await pair.handed_over()
    await pair.hub.until(lambda: notes(pair) and uris.format(SPEED) in notes(pair)[0])


async def test_what_is_kept_is_no_finding(pair: Pair) -> None:
    await pair.begin(topics='topics = ["//vehicle1/8001/1/FFFF"]')
    await pair.handed_over()
    await answers(pair, 5)
    assert not notes(pair)


async def test_of_a_gateway_that_does_not_say_it_nothing_is_known(pair: Pair) -> None:
    await pair.begin(topics=TOPICS)
    pair.vehicle.assembly.history._keeping = None  # as before 0.3
    await pair.handed_over()
    await answers(pair, 5)
    assert not notes(pair)


async def test_a_topic_that_comes_and_goes_within_the_time_to_confirm_is_no_finding(pair: Pair) -> None:
    now_ms = 0
    found = not_kept.NotKept(uris.parse("//vehicle1/4/1/0"), lambda: now_ms)
    found.answered([SPEED])
    now_ms = not_kept.CONFIRMED_MS - 1
    found.answered([SPEED, DOOR])
    assert not found.topics
    found.answered([DOOR])
    now_ms += not_kept.CONFIRMED_MS
    found.answered([SPEED, DOOR])
    assert found.topics == [DOOR]
    assert len(list(found.notes())) == 1
    found.answered([SPEED])
    assert not found.topics


def asked(pair: Pair, topic: str, *, hides: tuple[str, ...] = ()) -> bool:
    hidden = [uris.parse(one) for one in hides]

    def sees(one: UUri) -> bool:
        return one not in hidden

    made: Any = TopicsKept(pair.vehicle.assembly.view, pair.vehicle.assembly.logs, pair.vehicle.assembly.follows)
    return bool(made.keeps(uris.parse(topic), sees))


async def test_what_a_gateway_keeps(pair: Pair) -> None:
    await pair.begin(vehicle_more="[history]\nrecord = " + json.dumps(["//vehicle1/8003/1/FFFF"]))
    await pair.handed_over()
    speed = uris.format(SPEED)
    for topic in (speed, "//vehicle1/8001/FF/FFFF", "//*/8001/1/8001", "//vehicle1/8003/1/8001", "//*/8003/1/8001"):
        assert asked(pair, topic), topic
    for topic in ("//elsewhere/FFFFFFFF/FF/FFFF", "//*/FFFFFFFF/FF/FFFF"):  # whatever there is
        assert asked(pair, topic), topic
    for topic in ("//*/FFFF0004/1/8005", "//vehicle1/4/1/8006"):  # frontiers and beginnings
        assert asked(pair, topic), topic
    for topic in (LOCK, SEATS, "//*/8002/1/8001", "//elsewhere/8001/1/8001", "//elsewhere/8001/1/FFFF"):
        assert not asked(pair, topic), topic
    assert not asked(pair, "//vehicle1/8001/1/FFFF", hides=(speed, uris.format(DOOR))), (
        "hidden subscriptions say nothing"
    )
    pair.vehicle.assembly.follows.wants_all = True
    assert asked(pair, SEATS), "a uSubscription has not answered yet"
