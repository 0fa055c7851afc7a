"""What follows from rules, interest and pauses is updated change by change: the result is the same as after building
all of it again, and the cost of a change depends only on what it affects."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.app import Streamer
from streamer.config import loads
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.ingress import PUBLISHERS, Ingress
from streamer.walk.networks import ASKED_AT_ONCE, EndpointFilters
from streamer.walk.paused import Pause, Paused
from streamer.walk.view import Rule, Rules, View
from tests.streamer.conftest import THREE, endpoints, publication
from tests.tiers import examples
from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import Status, Subscription
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, LocalUriProvider, UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client import USubscriptionClient
from usubscription_client import interest as interests
from usubscription_client.interest import Interest, InterestSource

RECORD = '[history]\nrecord = ["//mcu1/8002/FF/FFFF"]\n'
HOMES = {"vehicle1": "vehicle", "mcu1": "mcu", "cloud": "cloud"}
TOPICS = [
    *(uris.uri("vehicle1", ue, 1, 0x8001) for ue in (0x8001, 0x1_8001)),
    *(uris.uri("mcu1", ue, 1, 0x8001) for ue in (0x8001, 0x8002)),
]
PATTERNS = [uris.uri("vehicle1", 0xFFFF_8001, 1, 0x8001), uris.uri("mcu1", 0x8001, 0xFF, 0x8001)]
SINK = uris.uri("cloud", 0x9001, 1, 0)

topics = st.sampled_from(TOPICS)
wanting = st.sampled_from([*TOPICS, *TOPICS, *TOPICS, *PATTERNS])  # a lookup takes all patterns
names = st.sampled_from(["vehicle", "mcu", "cloud"])
subscriptions = st.builds(
    Subscription,
    wanting,
    st.builds(uris.uri, st.sampled_from([*HOMES]), st.sampled_from([1, 2]), st.just(1), st.just(0)),
    st.sampled_from([Status.SUBSCRIBED, Status.UNSUBSCRIBED]),
    st.none(),
    st.sampled_from([None, 100]),
)
changes = st.one_of(
    *[st.tuples(st.just("subscribe"), st.lists(subscriptions, min_size=1, max_size=2))] * 4,
    st.tuples(st.just("rule"), st.tuples(names, names)),
    st.tuples(st.just("pause"), st.tuples(wanting, names)),
    st.tuples(st.just("answer"), topics),
)
steps = st.one_of(
    changes,
    changes,
    st.tuples(st.just("publish"), st.lists(topics, min_size=1, max_size=6)),
    st.tuples(st.just("look"), st.none()),
    st.tuples(st.just("listen"), st.none()),
)


class Slow(InterestSource):
    """Knows a topic once it has an answer about it."""

    def __init__(self) -> None:
        super().__init__("cloud")
        self._answered: set[uris.Key] = set()

    def decided(self, topic: UUri) -> bool:
        return uris.key(topic) in self._answered

    def answer(self, topic: UUri) -> None:
        if not self.decided(topic):
            self._answered.add(uris.key(topic))
            self.changed(frozenset([uris.key(topic)]))


class Driven:
    """A streamer on networks without listeners; the test makes every change."""

    def __init__(self, streamer: Streamer) -> None:
        self.streamer, self.slow = streamer, Slow()
        self.slow.on_change(streamer.assembly.interest._changed)
        streamer.assembly.interest.sources += (self.slow,)

    async def do(self, what: str, subject: Any) -> None:
        streamer = self.streamer
        match what:
            case "subscribe":
                streamer.assembly.interest.sources[0]._take(subject)
            case "publish":
                for topic in subject:
                    ingress = streamer.assembly.ingresses[HOMES[topic.authority_name]]
                    for message in (publication(topic), UMessageBuilder.notification(topic, SINK).build()):
                        if (taken := ingress.on_receive_encoded([EncodedMessage.of(message)])) is not None:
                            await taken
                await self.settles()
            case "rule":
                if subject[0] != subject[1]:
                    rules = streamer.assembly.rules
                    if rules.between(*subject) is not None:
                        rules.replace([rule for rule in rules if (rule.ingress, rule.egress) != tuple(subject)])
                    else:
                        rules.add(Rule(*subject))
                    await self.listens()
            case "pause":
                topic, peer = subject
                known = Pause(uris.format(topic), peer) in streamer.assembly.paused
                await (streamer.assembly.paused.resume if known else streamer.assembly.paused.pause)(topic, peer)
            case "answer":
                self.slow.answer(subject)
            case "look":
                self.holds()
            case "listen":
                await self.listens()

    async def listens(self) -> None:
        assert not await self.streamer.assembly.networks.listen(retry=False)
        for ingress in self.streamer.assembly.ingresses.values():
            filters = self.streamer.assembly.networks[ingress.endpoint.name].filters
            assert registered(filters) == expected_filters(self.streamer, ingress)

    async def settles(self) -> None:
        async with asyncio.timeout(20):
            while any(  # noqa: ASYNC110
                (pump.backlog and not pump.waits.plans.lacks_capacity)
                or pump.waits.reading_back.wanted
                or pump.waits.reading_back.is_under_way
                for pump in self.streamer.assembly.pumps
            ):
                await asyncio.sleep(0)
            for _ in range(20):  # for what is parked to be looked at
                await asyncio.sleep(0)

    def holds(self) -> None:
        """Each remembered decision equals a new one."""
        for ingress in self.streamer.assembly.ingresses.values():
            assert ingress.on_receive_encoded([]) is None  # decides again about what has changed
            for address, verdict in ingress._verdicts.items():
                assert decided(ingress, address) == (verdict.log, verdict.stream, verdict.peer, verdict.reason)
            assert all(address in ingress._verdicts for known in ingress._published.values() for address in known)
        for pump in self.streamer.assembly.pumps:
            pump.refresh_plans()
            for stream, plan in pump.waits.plans._by_stream.items():
                assert planned(plan) == planned(pump.waits.plans.plan(stream))
            for stream, parked in pump.waits.topics.items():
                targets, is_open = pump.waits.plans.wanted(stream)
                if (
                    stream in pump.waits.reading_back.recheck
                    or stream in pump.waits.reading_back.wanted
                    or stream in pump.waits.reading_back.topics
                ):
                    continue  # it is looked at again, or read back
                assert is_open
                assert not pump.waits.plans.missing(parked, targets)


def decided(ingress: Ingress, address: bytes) -> tuple[Any, ...]:
    attributes = UAttributes.FromString(address)
    sink = attributes.sink if attributes.HasField("sink") else None
    verdict = ingress._verdict_on(attributes, attributes.source, sink)
    return verdict.log, verdict.stream, verdict.peer, verdict.reason


def planned(plan: Any) -> Any:
    """The part of it that can be compared."""
    held = [(hold.unit, since) for hold, since in plan.held]
    return plan.targets, plan.since, plan.as_is, len(plan.copies), plan.whole is None, plan.park, held


def registered(filters: EndpointFilters) -> set[Any]:
    return filters._registered.keys() - filters._unsure


def expected_filters(streamer: Streamer, ingress: Ingress) -> set[Any]:
    """By the rule for each topic, with every cover held against it."""
    filters = streamer.assembly.networks[ingress.endpoint.name].filters
    fixed = filters.make_fixed(all_publishes=not streamer.assembly.interest.can_list)
    covers = [source for source, sink in fixed.values() if sink is None and uris.has_wildcard(source)]
    wanted = [
        topic
        for topic in streamer.assembly.interest.topics()
        if streamer.assembly.view.leaves(ingress.endpoint, topic)
        and not any(uris.matches(cover, topic) for cover in covers)
    ]
    return {*fixed, *((uris.key(topic), None) for topic in wanted)}


@pytest.mark.spec("local~disp-at-least-once")
@settings(max_examples=examples(60))
@given(st.lists(steps, min_size=10, max_size=30), st.sampled_from([1, 1_000]))
def test_updates_change_by_change_give_the_same_as_building_all_again(steps: list[Any], journal: int) -> None:
    asyncio.run(_driven(steps, journal))


async def _driven(steps: list[Any], journal: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(interests, "JOURNAL_TOPICS_MAX", journal)
        config = loads(f'[streamer]\ndata_dir = "{folder}"\n' + RECORD + endpoints(THREE).format(n=folder))
        streamer = await Streamer.create(config)
        running = asyncio.create_task(streamer.run())
        await asyncio.wait_for(streamer.assembly.ready.wait(), 20)
        driven = Driven(streamer)
        try:
            for what, subject in steps:
                await driven.do(what, subject)
            driven.holds()
            await driven.settles()
            driven.holds()
            await driven.listens()
        finally:
            streamer.stop()
            await running


# -- what a change costs

Publish = Callable[..., UMessage]
MakeWorld = Any


def many(count: int) -> list[UUri]:
    return [uris.uri("vehicle1", 0x8001, 1, 0x8000 + number) for number in range(count)]


async def test_one_subscription_more_costs_a_look_at_its_topic(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2,000 topics of which all have verdicts and plans, and a peer that is away."""
    known, one_more = many(2_000), uris.uri("vehicle1", 0x8002, 1, 0x8000)
    wanted = {uris.format(topic): ["//cloud/9001/1/0", "//mcu1/9001/1/0"] for topic in known}
    world = await make_world(subscriptions=wanted)
    streamer, vehicle = world.streamer, await world.node("vehicle", "vehicle1")
    for network, authority in (("cloud", "cloud"), ("mcu", "mcu1")):
        await world.hear(await world.node(network, authority, 0x9002), uris.uri("vehicle1", 0x8001, 1, 0xFFFF))
    await vehicle.send_batch([publish(topic) for topic in known])
    log = streamer.assembly.logs.durable
    pumps = {pump.peer.name: pump for pump in streamer.assembly.pumps if pump.log is log}
    await world.until(lambda: pumps["cloud"].cursor == pumps["mcu"].cursor == 2_000)
    streamer.assembly.endpoints["mcu"].transport.disconnect()
    await vehicle.send(publish(known[0]))
    await world.until(lambda: pumps["mcu"].retries > 3 and pumps["cloud"].cursor == 2_001)
    ingress, filters = streamer.assembly.ingresses["vehicle"], streamer.assembly.networks["vehicle"].filters
    verdicts, plans = dict(ingress._verdicts), dict(pumps["cloud"].waits.plans._by_stream)
    assert len(verdicts) == len(plans) == 2_000
    looks, routes = filters.looks, streamer.assembly.home.transport.listeners._routes
    route_looks, attempts = routes.looks, pumps["mcu"]._backoff._attempts
    woken: list[str] = []
    for pump in pumps.values():
        monkeypatch.setattr(pump._backoff, "wake", lambda name=pump.peer.name: woken.append(name))
    client = USubscriptionClient(await world.node("cloud", "cloud"), LocalUriProvider("cloud", 0x9001, 1), "vehicle1")
    await client.open()
    route_looks = routes.looks
    await client.subscribe(one_more)
    assert (uris.key(one_more), None) in registered(filters)
    assert filters.looks == looks + 1
    assert routes.looks <= route_looks + 10, "its topic is unknown, and some answers passed"
    heard = await world.hear(await world.node("cloud", "cloud", 0x9001), one_more)
    await vehicle.send(publish(one_more))
    await heard.expect(1)
    assert {address: ingress._verdicts.get(address) for address in verdicts} == verdicts
    assert all(pumps["cloud"].waits.plans._by_stream[stream] is plan for stream, plan in plans.items())
    assert not woken
    assert pumps["mcu"]._backoff._attempts >= attempts
    await client.close()


class Refusing(UTransport):
    """A network that refuses, or answers nothing, as the test says; it counts what it was asked."""

    capabilities = Capability.PUBLISH_WITHOUT_SINK

    def __init__(self) -> None:
        self.code: UCode.ValueType = UCode.OK
        self.refused: set[uris.Key] = set()  # of these only; none: of all
        self.asked: list[uris.Key] = []
        self.listening: set[uris.Key] = set()

    async def register_listener(self, source: UUri, listener: Any, sink: UUri | None = None) -> None:
        self.asked.append(uris.key(source))
        if self.code and (not self.refused or uris.key(source) in self.refused):
            raise UStatusError(self.code, "no")
        self.listening.add(uris.key(source))

    async def unregister_listener(self, source: UUri, listener: Any, sink: UUri | None = None) -> None:
        self.listening.remove(uris.key(source))

    async def send_batch(self, messages: Any) -> Any:
        raise AssertionError("nothing is sent here")


def refusing() -> tuple[Refusing, EndpointFilters, Interest, InterestSource]:
    network: Any = Refusing()
    here, there = Endpoint("here", ["vehicle1"], network), Endpoint("there", ["cloud"], network)
    known, rules, source = Endpoints([here, there]), Rules(), InterestSource("test")
    rules.add(Rule("here", "there"))
    interest = Interest([source])
    paused = Paused(Path(), known, "")
    view, hosted = View(known, rules, interest, [], paused), SimpleNamespace(sinks=list)
    return network, EndpointFilters(here, view, hosted, (), None), interest, source  # type: ignore[arg-type]


def wants(source: InterestSource, topics: list[UUri], status: Status = Status.SUBSCRIBED) -> None:
    source._take(Subscription(topic, uris.uri("cloud", 1, 1, 0), status) for topic in topics)


async def test_what_a_network_refuses_is_tried_again_when_it_is_time_and_not_with_every_subscription() -> None:
    network, filters, interest, source = refusing()
    network.code, network.refused = UCode.PERMISSION_DENIED, {uris.key(topic) for topic in many(50)}
    wants(source, many(60))
    with pytest.raises(UStatusError, match="no"):
        await filters.sync(interest)
    assert len(registered(filters)) == len(network.listening) == 12, "peer, announcements, and what it takes"
    network.asked.clear()
    wants(source, many(62))
    with pytest.raises(UStatusError, match="no"):  # it still is so
        await filters.sync(interest, retry=False)
    assert network.asked == [uris.key(topic) for topic in many(62)[60:]]
    wants(source, many(1), Status.UNSUBSCRIBED)
    network.code = UCode.OK
    await filters.sync(interest)
    topics = {source for source, sink in registered(filters) if sink is None and source[1:] != uris.key(PUBLISHERS)[1:]}
    assert topics == {uris.key(topic) for topic in many(62)[1:]}


async def test_a_network_that_answers_nothing_is_not_asked_for_all_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    network, filters, interest, source = refusing()
    await filters.sync(interest)
    network.code = UCode.UNAVAILABLE
    wants(source, many(4_000))
    network.asked.clear()
    with pytest.raises(UStatusError, match="no"):
        await filters.sync(interest)
    assert len(network.asked) == ASKED_AT_ONCE
    network.code = UCode.OK
    await filters.sync(interest)
    assert len(registered(filters)) == 4_002


async def test_an_interrupted_lookup_continues() -> None:
    network, filters, interest, source = refusing()
    wants(source, many(2_000))
    cut = asyncio.ensure_future(filters.sync(interest))
    while not len(registered(filters)) > 300:  # noqa: ASYNC110 - it goes on by itself
        await asyncio.sleep(0)
    cut.cancel()
    await asyncio.gather(cut, return_exceptions=True)
    assert len(registered(filters)) < 2_000
    await filters.sync(interest, retry=False)
    assert len(registered(filters)) == len(network.listening) == 2_002


async def test_a_cover_that_comes_or_goes_is_never_missed() -> None:
    network, filters, interest, source = refusing()
    wants(source, many(600))
    await filters.sync(interest)
    least: list[int] = []
    leave = network.unregister_listener

    async def watched(source: UUri, listener: Any, sink: UUri | None = None) -> None:
        covered = uris.key(uris.pattern("vehicle1")) in network.listening
        least.append(600 if covered else sum(key[0] == "vehicle1" for key in network.listening))
        await leave(source, listener, sink)

    network.unregister_listener = watched  # type: ignore[method-assign]
    source.can_list = False  # every publish is listened to
    await filters.sync(interest)
    assert len(registered(filters)) == 2
    source.can_list = True
    await filters.sync(interest)
    assert len(registered(filters)) == 602
    assert min(least) == 600
