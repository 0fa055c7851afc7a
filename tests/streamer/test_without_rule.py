"""Subscriptions that no rule serves: notes, the gauge, a line in the log, and the messages that are dropped."""

from __future__ import annotations

import asyncio
import json

import pytest
from structlog.testing import capture_logs

from streamer import building
from streamer.commands.stored_interest import add_causes, notes_of_subscriptions
from streamer.config import loads
from streamer.data_dir import SUBSCRIPTIONS_FILE
from streamer.parts.interest import WithoutRulePart
from streamer.parts.status import StatusPart
from streamer.parts.unmatched import UNMATCHED_S, UnmatchedPart
from streamer.walk.endpoint import Endpoints
from streamer.walk.view import Rule, Rules
from streamer.walk.without_rule import CAUSES_LOGGED_MAX, Causes, WithoutRule
from tests.streamer.conftest import THREE, MakeWorld, World, endpoints, publication
from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import Status, Subscription
from uprotocol.transport import LocalUriProvider
from usubscription.inspect import StoreView
from usubscription_client import USubscriptionClient
from usubscription_client.interest import Interest, InterestSource

ALLOWED, WANTED = "up://vehicle1/8001/1/800E", "up://vehicle1/8001/1/8002"
SUBSCRIBER = "up://cloud/9001/1/0"
RULE = f'[[rule]]\nfrom = "vehicle"\nto = "cloud"\nallow = ["{ALLOWED}"]\n'
ANY = uris.format(uris.ANY)
SENTENCE = (
    f"subscribed, but not forwarded: no rule allows it: {SUBSCRIBER} has subscribed to {WANTED}, and the rule from "
    f'vehicle to cloud allows only {ALLOWED}: add "{WANTED}" to its `allow`'
)


def bare_endpoints() -> Endpoints:
    head = '[streamer]\ndata_dir = "unused"\n'
    return building.bare_endpoints_of(loads(head + endpoints(THREE).format(n=0)))


def subscription(topic: str, subscriber: str, status: Status = Status.SUBSCRIBED) -> Subscription:
    return Subscription(uris.parse(topic), uris.parse(subscriber), status)


def gauge(world: World) -> dict[tuple[str, ...], object]:
    return {labels: value for name, labels, value in world.parts.samples() if name == "subscriptions_without_rule"}


def unserved(world: World) -> int:
    return sum(count for *_, count in world.parts.of(WithoutRulePart).without_rule.samples())


@pytest.mark.parametrize(
    ("topic", "subscriber", "rules", "why"),
    [
        (ALLOWED, "cloud", [Rule("vehicle", "cloud", [uris.parse(ALLOWED)])], None),
        (WANTED, "vehicle1", [], None),  # on one network
        (WANTED, "cloud", [], "there is no rule from vehicle to cloud"),
        (WANTED, "cloud", [Rule("vehicle", "cloud", [uris.parse(ALLOWED)])], "allows only up://vehicle1/8001/1/800E"),
        (WANTED, "cloud", [Rule("vehicle", "cloud", (), [uris.parse(WANTED)])], "denies up://vehicle1/8001/1/8002"),
        ("//vehicle1/8001/1/FFFF", "cloud", [Rule("vehicle", "cloud", [uris.parse(ALLOWED)])], None),  # a part of it
        ("//vehicel1/8001/1/8002", "cloud", [], "no endpoint has the authority vehicel1 of the topic"),
        (WANTED, "clowd", [], "no endpoint has the authority clowd of the subscriber"),
        ("//*/8001/1/8002", "cloud", [Rule("vehicle", "cloud", [uris.parse(ALLOWED)])], "no rule to endpoint cloud"),
    ],
)
def test_why_a_subscription_is_not_served(topic: str, subscriber: str, rules: list[Rule], why: str | None) -> None:
    known = Rules()
    known.replace(rules)
    cause = Causes(bare_endpoints(), known).of(uris.parse(topic), subscriber, is_ours=True)
    assert (cause is None) if why is None else (cause is not None and why in cause.why)


def test_an_unknown_authority_may_be_behind_another_gateway() -> None:
    causes = Causes(bare_endpoints(), Rules())
    assert causes.of(uris.parse("//vehicle2/8001/1/8002"), "cloud", is_ours=False) is None
    assert causes.of(uris.parse(WANTED), "vehicle2", is_ours=False) is None


def test_the_cost_follows_the_change_and_ends_with_the_subscription() -> None:
    source, rules = InterestSource("all"), Rules()
    rules.replace([Rule("vehicle", "cloud", [uris.parse(ALLOWED)])])
    interest = Interest([source])
    topics = [f"//vehicle1/8001/1/{number:X}" for number in range(0x9000, 0x9400)]
    source.changed(source.put(*(subscription(topic, SUBSCRIBER) for topic in topics)))
    without = WithoutRule(bare_endpoints(), rules, interest)
    assert [len(step) for step in without.steps()] == [256, 256, 256, 256]
    looks = without.looks
    source.changed(source.put(subscription(topics[5], SUBSCRIBER, Status.UNSUBSCRIBED)))
    assert [step for step in without.steps() if step] == []
    assert (without.looks - looks, [count for *_, count in without.samples()]) == (1, [len(topics) - 1])
    assert len(list(without.notes())) == 1  # one cause
    assert "(and 1,022 more)" in next(without.notes())
    rules.replace([Rule("vehicle", "cloud")])
    list(without.steps())
    assert (list(without.notes()), list(without.samples())) == ([], [])


async def test_a_subscription_that_no_rule_allows_is_shown(make_world: MakeWorld) -> None:
    world = await make_world({**THREE, "vehicle": "none"}, {WANTED: [SUBSCRIBER], ALLOWED: [SUBSCRIBER]}, RULE)
    await world.until(lambda: unserved(world))
    assert SENTENCE in world.parts.notes()
    assert SENTENCE in world.parts.of(StatusPart).status().notes
    assert world.parts.problems() == []
    assert gauge(world) == {("vehicle", "cloud"): 1}
    sender, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, uris.ANY)
    await sender.send(publication(WANTED, "not allowed"))
    await sender.send(publication(ALLOWED, "allowed"))
    await world.until(lambda: heard.messages)
    assert heard.texts == ["allowed"]
    world.assembly.rules.replace([Rule("vehicle", "cloud")])
    await world.until(lambda: not unserved(world))
    assert gauge(world) == {}


async def test_a_subscription_that_no_rule_allows_is_logged_when_it_arrives(make_world: MakeWorld) -> None:
    world = await make_world(THREE, None, RULE + '[[rule]]\nfrom = "cloud"\nto = "vehicle"\n')
    cloud = await world.node("cloud", "cloud", 0x9001)
    client = USubscriptionClient(cloud, LocalUriProvider("cloud", 0x9001, 1), "vehicle1")
    event = "a subscription is not served: no rule allows it"
    with capture_logs() as lines:
        await client.open()
        await asyncio.wait_for(client.subscribe(uris.parse(WANTED)), 20)
        await world.until(lambda: [line for line in lines if line["event"] == event])
    line = next(line for line in lines if line["event"] == event)
    assert (line["topic"], line["subscriber"].startswith("up://cloud/9001")) == (WANTED, True)
    assert SENTENCE in world.parts.notes()
    await client.close()


@pytest.mark.parametrize("recorded", [False, True])
async def test_what_is_heard_and_not_allowed_is_counted(make_world: MakeWorld, recorded: bool) -> None:
    """It is heard since it is recorded, or since a pattern of which a rule allows a part is listened to."""
    more = RULE + (f'[history]\nrecord = ["{WANTED}"]\n' if recorded else "")
    topic = WANTED if recorded else "//vehicle1/8001/1/FFFF"
    world = await make_world({**THREE, "vehicle": "none"}, {topic: [SUBSCRIBER]}, more)
    sender = await world.node("vehicle", "vehicle1")
    for number in range(3):
        await sender.send(publication(WANTED, str(number)))
    await world.taken("vehicle")
    dropped = world.assembly.endpoints["vehicle"].dropped
    await world.until(lambda: dropped["no_rule"] == 3)
    assert world.assembly.logs.durable.newest_seq == (3 if recorded else 0)
    assert dict(dropped) == {"no_rule": 3}


async def test_a_pattern_of_which_a_rule_allows_a_part_is_listened_to(make_world: MakeWorld) -> None:
    world = await make_world({**THREE, "vehicle": "none"}, {"//vehicle1/8001/1/FFFF": [SUBSCRIBER]}, RULE)
    sender, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    heard = await world.hear(cloud, uris.ANY)
    await sender.send(publication(WANTED, "not allowed"))
    await sender.send(publication(ALLOWED, "allowed"))
    await world.until(lambda: heard.messages)
    assert heard.texts == ["allowed"]
    assert not unserved(world)


async def test_what_nobody_elsewhere_wants_is_not_counted(make_world: MakeWorld) -> None:
    more = RULE + f'[history]\nrecord = ["{WANTED}"]\n'
    world = await make_world({**THREE, "vehicle": "none"}, {WANTED: ["//vehicle1/9001/1/0"]}, more)
    sender = await world.node("vehicle", "vehicle1")
    await sender.send(publication(WANTED, "of our own network"))
    await world.until(lambda: world.assembly.logs.durable.newest_seq)
    assert dict(world.assembly.endpoints["vehicle"].dropped) == {}
    assert not unserved(world)


async def test_the_lines_of_the_log_are_limited(make_world: MakeWorld) -> None:
    topics = {f"//vehicle1/8001/1/{number:X}": [SUBSCRIBER] for number in range(0x9000, 0x9000 + 5 * CAUSES_LOGGED_MAX)}
    with capture_logs() as lines:
        world = await make_world({**THREE, "vehicle": "none"}, topics, RULE)
        await world.until(lambda: unserved(world) == len(topics))
        await world.until(lambda: any("not served" in line["event"] for line in lines))
    assert len([line for line in lines if "not served" in line["event"]]) == CAUSES_LOGGED_MAX


async def test_patterns_that_match_nothing_are_named(make_world: MakeWorld) -> None:
    more = (
        f'[[rule]]\nfrom = "vehicle"\nto = "cloud"\nallow = ["{ALLOWED}", "{WANTED}", "//vehicel1/8001/1/8003"]\n'
        '[history]\nrecord = ["//vehicle1/8001/1/8004", "//vehicle1/8001/1/8005", "//nobody/8001/1/8005"]\n'
        '[[access]]\nendpoint = "cloud"\ncallers = ["//clowd/9001/1/0"]\n'
    )
    world = await make_world({**THREE, "vehicle": "none"}, {ALLOWED: [SUBSCRIBER]}, more)
    streamer = world.streamer
    notes = streamer.parts.notes()
    for note in (
        "[[rule]] from vehicle to cloud, allow: //vehicel1/8001/1/8003 can't match anything: no endpoint has the "
        "authority vehicel1",
        "history.record: //nobody/8001/1/8005 can't match anything: no endpoint has the authority nobody",
        "[[access]] entry 1, callers: //clowd/9001/1/0 can't match anything: no endpoint has the authority clowd",
    ):
        assert note in notes
    assert not [note for note in notes if "matched nothing" in note]  # it has just started
    sender = await world.node("vehicle", "vehicle1")
    await sender.send(publication("//vehicle1/8001/1/8004", "recorded"))
    await world.until(lambda: streamer.assembly.logs.durable.newest_seq)
    began = streamer.assembly.runtime.now_ms()
    object.__setattr__(streamer.assembly.runtime, "now_ms", lambda: began + 2 * UNMATCHED_S * 1_000)
    assert [note for note in streamer.parts.of(UnmatchedPart).unmatched() if "[[access]]" not in note] == [
        f"[[rule]] from vehicle to cloud, allow: {WANTED} matched nothing in the last 2 h",
        "history.record: up://vehicle1/8001/1/8005 matched nothing in the last 2 h",
    ]


@pytest.mark.parametrize("running", [False, True])
async def test_check_and_subscriptions_name_what_no_rule_serves(make_world: MakeWorld, running: bool) -> None:
    world = await make_world(THREE, None, RULE + '[[rule]]\nfrom = "cloud"\nto = "vehicle"\n')
    cloud = await world.node("cloud", "cloud", 0x9001)
    client = USubscriptionClient(cloud, LocalUriProvider("cloud", 0x9001, 1), "vehicle1")
    await client.open()
    await client.subscribe(uris.parse(WANTED))
    await client.subscribe(uris.parse(ALLOWED))
    await client.close()
    if not running:
        await world.stop()
    found = notes_of_subscriptions(world.config, building.bare_endpoints_of(world.config))
    assert found == [SENTENCE]
    with StoreView(world.config.streamer.data_dir / SUBSCRIPTIONS_FILE) as view:
        entries = view.subscriptions()
    add_causes(world.config, entries)
    assert {entry["topic"]: entry["not_forwarded"] for entry in entries} == {
        WANTED: f'the rule from vehicle to cloud allows only {ALLOWED}: add "{WANTED}" to its `allow`',
        ALLOWED: None,
    }


async def test_check_reads_the_static_file_and_the_saved_interest(make_world: MakeWorld) -> None:
    networks = {**THREE, "cloud": "remote"}
    world = await make_world(networks, {"//vehicel1/8001/1/8002": [SUBSCRIBER]}, RULE, start=False)
    world.config.streamer.data_dir.mkdir(parents=True)
    saved = building.saved_interest_of(world.config, "cloud")
    saved.write_text(json.dumps([[WANTED, SUBSCRIBER, None]]))
    found = notes_of_subscriptions(world.config, building.bare_endpoints_of(world.config))
    assert len(found) == 2
    assert "no endpoint has the authority vehicel1 of the topic" in found[0]
    assert found[1] == SENTENCE
    assert [path.name for path in world.config.streamer.data_dir.iterdir()] == [saved.name]
