"""What follows from rules, interest and pauses is kept up change by change: it is what making it anew would give, and a
change costs what it concerns."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.app import Streamer
from streamer.config import loads
from streamer.ingress import Ingress
from streamer.paused import Pause
from streamer.rules import Rule
from tests.streamer.conftest import THREE, endpoints, publication
from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import Status, Subscription
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client import interest as interests
from usubscription_client.table import InterestSource

RECORD = '[history]\nrecord = ["//mcu1/8002/FF/FFFF"]\n'
HOMES = {"vehicle1": "vehicle", "mcu1": "mcu", "cloud": "cloud"}
TOPICS = [
    *(uris.uri("vehicle1", ue, 1, 0x8001) for ue in (0x8001, 0x1_8001)),
    *(uris.uri("mcu1", ue, 1, 0x8001) for ue in (0x8001, 0x8002)),
]
PATTERNS = [uris.uri("vehicle1", 0xFFFF_8001, 1, 0x8001), uris.uri("mcu1", 0x8001, 0xFF, 0x8001)]
SINK = uris.uri("cloud", 0x9001, 1, 0)

topics = st.sampled_from(TOPICS)
wanting = st.sampled_from([*TOPICS, *TOPICS, *TOPICS, *PATTERNS])  # of patterns whoever looks takes all
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
    """Knows of a topic when it has been answered about."""

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
    """A streamer on networks where nobody listens, whose every change is the test's."""

    def __init__(self, streamer: Streamer) -> None:
        self.streamer, self.slow = streamer, Slow()
        self.slow.on_change(streamer.interest._changed)
        streamer.interest.sources += (self.slow,)

    async def do(self, what: str, subject: Any) -> None:
        streamer = self.streamer
        match what:
            case "subscribe":
                streamer.interest.sources[0]._take(subject)
            case "publish":
                for topic in subject:
                    ingress = streamer.ingresses[HOMES[topic.authority_name]]
                    for message in (publication(topic), UMessageBuilder.notification(topic, SINK).build()):
                        if (taken := ingress.on_receive_encoded([EncodedMessage.of(message)])) is not None:
                            await taken
                await self.settles()
            case "rule":
                if subject[0] != subject[1]:
                    known = streamer.rules.between(*subject) is not None
                    await (streamer.remove_rule(*subject) if known else streamer.add_rule(Rule(*subject)))
            case "pause":
                topic, peer = subject
                known = Pause(uris.format(topic), peer) in streamer.paused
                await (streamer.paused.resume if known else streamer.paused.pause)(topic, peer)
            case "answer":
                self.slow.answer(subject)
            case "look":
                self.holds()
            case "listen":
                await self.listens()

    async def listens(self) -> None:
        assert await self.streamer._networks.listen(retry=False)
        for ingress in self.streamer.ingresses.values():
            assert {*ingress.filters} == expected_filters(self.streamer, ingress)

    async def settles(self) -> None:
        async with asyncio.timeout(20):
            while any(pump.backlog and not pump._lacks_room for pump in self.streamer.pumps):  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(20):  # for what is parked to be looked at
                await asyncio.sleep(0)

    def holds(self) -> None:
        """Whatever is remembered is what would be decided now."""
        for ingress in self.streamer.ingresses.values():
            assert ingress.on_receive_encoded([]) is None  # heeds what has changed
            for address, verdict in ingress._verdicts.items():
                assert decided(ingress, address) == (verdict.log, verdict.stream, verdict.peer, verdict.reason)
            assert all(address in ingress._verdicts for known in ingress._published.values() for address in known)
        for pump in self.streamer.pumps:
            pump._heed()
            for stream, plan in pump._plans.items():
                assert planned(plan) == planned(pump._plan(stream))
            for stream, parked in pump.parking.items():
                targets, is_open = pump._wanted(stream)
                assert stream in pump._recheck or (is_open and not pump._missing(parked, targets))


def decided(ingress: Ingress, address: bytes) -> tuple[Any, ...]:
    attributes = UAttributes.FromString(address)
    sink = attributes.sink if attributes.HasField("sink") else None
    verdict = ingress._decide(attributes, attributes.source, sink)
    return verdict.log, verdict.stream, verdict.peer, verdict.reason


def planned(plan: Any) -> Any:
    """What of it can be compared."""
    return plan.targets, plan.since, plan.as_is, len(plan.copies), plan.whole is None, plan.park


def expected_filters(streamer: Streamer, ingress: Ingress) -> set[Any]:
    """By the rule for each topic, with every cover held against it."""
    fixed = ingress.filters._make_fixed(all_publishes=not streamer.interest.can_list)
    covers = [source for source, sink in fixed.values() if sink is None and uris.has_wildcard(source)]
    wanted = [
        topic
        for topic in streamer.interest.topics()
        if streamer.view.leaves(ingress.endpoint, topic) and not any(uris.matches(cover, topic) for cover in covers)
    ]
    return {*fixed, *((uris.key(topic), None) for topic in wanted)}


@pytest.mark.spec("local~disp-view")
@settings(max_examples=60)
@given(st.lists(steps, min_size=10, max_size=30), st.sampled_from([1, 1_000]))
def test_what_is_kept_up_change_by_change_is_what_making_it_anew_gives(steps: list[Any], journal: int) -> None:
    asyncio.run(_driven(steps, journal))


async def _driven(steps: list[Any], journal: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(interests, "JOURNAL_TOPICS_MAX", journal)
        config = loads(f'[streamer]\ndata_dir = "{folder}"\n' + RECORD + endpoints(THREE).format(n=folder))
        streamer = await Streamer.create(config)
        running = asyncio.create_task(streamer.run())
        await asyncio.wait_for(streamer.ready.wait(), 20)
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
