"""Read access to the history: what the rules keep from a network can't be polled from there either."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history.log.log import Log
from history.reading.subscriber import GaplessSubscriber, HistoryClient
from history.records.visible import Visible
from history.service.matches import Match
from streamer.config import loads
from streamer.walk.access import Access, AccessEntry, AccessPattern
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.view import Rule, Rules
from tests.tiers import examples
from transports.local import LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest, PollResponse
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

MakeWorld = Any
Publish = Callable[..., UMessage]

OPEN = uris.parse("//vehicle1/8001/1/8001")
SECRET = uris.parse("//vehicle1/8001/1/8002")
OF_CLOUD = uris.parse("//cloud/8001/1/8001")
ALL = "//*/FFFFFFFF/FF/FFFF"
RECORD = f'[history]\nrecord = ["{ALL}"]\n'
RULES = """
[[rule]]
from = "vehicle"
to = "cloud"
deny = ["//vehicle1/8001/1/8002"]
[[rule]]
from = "cloud"
to = "vehicle"
[[rule]]
from = "vehicle"
to = "mcu"
"""


class Caller:
    """A uEntity that reads the history."""

    def __init__(self, world: Any, network: str, authority: str, entity: int = 0x9001) -> None:
        self.world, self.network, self.authority, self.entity = world, network, authority, entity

    async def __aenter__(self) -> HistoryClient:
        node = await self.world.node(self.network, self.authority, self.entity)
        self.rpc = InMemoryRpcClient(node, node.local)
        await self.rpc.open()
        return HistoryClient(self.rpc, uris.uri("vehicle1", 4, 1))

    async def __aexit__(self, *_: object) -> None:
        await self.rpc.close()


def texts(response: PollResponse) -> list[str]:
    records = [UMessage.FromString(data) for batch in response.batches for data in batch.message]
    return [record.payload.decode() for record in records if record.attributes.source.ue_id == 0x8001]


def topics(found: Any) -> list[UUri]:
    return [state.topic for state in found.topics if state.topic.ue_id == 0x8001]


async def recorded(world: Any, publish: Publish) -> None:
    """Two records of each topic."""
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    for number in range(2):
        await vehicle.send(publish(OPEN, f"open{number}"))
        await vehicle.send(publish(SECRET, f"secret{number}"))
        await cloud.send(publish(OF_CLOUD, f"cloud{number}"))
    log = world.assembly.logs.durable
    await world.until(lambda: sum(stream.records for stream in log.streams() if stream.source.ue_id == 0x8001) == 6)


async def test_a_caller_reads_what_the_rules_let_go_there_and_what_came_from_there(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(more=RECORD + RULES)
    await recorded(world, publish)
    async with (
        Caller(world, "cloud", "cloud") as cloud,
        Caller(world, "vehicle", "vehicle1") as vehicle,
        Caller(world, "mcu", "mcu1") as mcu,
    ):
        assert sorted(texts(await cloud.poll())) == ["cloud0", "cloud1", "open0", "open1"]
        assert sorted(texts(await vehicle.poll())) == ["cloud0", "cloud1", "open0", "open1", "secret0", "secret1"]
        assert sorted(texts(await mcu.poll())) == ["open0", "open1", "secret0", "secret1"]
        assert topics(await cloud.describe()) == [OPEN, OF_CLOUD] or topics(await cloud.describe()) == [OF_CLOUD, OPEN]
        paged = [state.topic async for state in cloud.topics() if state.topic.ue_id == 0x8001]
        assert sorted(map(uris.key, paged)) == sorted(map(uris.key, [OPEN, OF_CLOUD]))
        seen = [log.newest_match_seq for log in await cloud.logs([uris.pattern(ue_id=0x8001, resource=0x8002)])]
        assert not any(seen), "nothing is reported about topics without read access"
        mixed = await cloud.poll(PollRequest(topics=[SECRET, OPEN]))
        assert texts(mixed) == ["open0", "open1"]
        assert texts(await cloud.poll(PollRequest(topics=[uris.pattern("vehicle1", resource=0x8002)]))) == []
    counts = world.assembly.history.counts
    assert counts["withheld"] >= 4
    assert counts["denied"] == 0


async def test_a_denied_topic_is_refused_alike_whether_or_not_it_is_there(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(more=RECORD + RULES.replace("8002", "FFFF"))
    async with Caller(world, "cloud", "cloud") as cloud:

        async def refusals() -> list[str]:
            said = []
            for topic in (SECRET, uris.parse("//vehicle1/8001/1/8077"), uris.parse("//nobody/8001/1/8001")):
                for call in (cloud.describe([topic]), cloud.poll(PollRequest(topics=[topic], consumer="mine"))):
                    with pytest.raises(UStatusError) as caught:
                        await call
                    assert caught.value.code == UCode.PERMISSION_DENIED
                    said.append(caught.value.message)
            return said

        before = await refusals()
        await recorded(world, publish)
        assert await refusals() == before
        assert len(set(before)) == 1
    assert world.assembly.history.counts["denied"] == world.assembly.history.counts["refused"] == 12
    assert len(world.assembly.history.consumers) == 0


async def test_a_message_that_may_not_be_read_is_not_found_by_its_id(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(more=RECORD + RULES)
    await recorded(world, publish)
    log = world.assembly.logs.durable
    secret = next(stream for stream in log.streams() if stream.source == SECRET)
    async with Caller(world, "cloud", "cloud") as cloud, Caller(world, "vehicle", "vehicle1") as vehicle:
        asked = PollRequest(after_message_id=secret.newest_id)
        ours, theirs = await vehicle.poll(asked), await cloud.poll(asked)
        assert next(place.seq for place in ours.begin if place.incarnation == log.incarnation) == secret.newest_seq
        made_up = PollRequest(
            after_message_id=secret.newest_id[:8] + bytes([secret.newest_id[8] ^ 1]) + secret.newest_id[9:]
        )
        assert theirs.begin == (await cloud.poll(made_up)).begin


async def test_the_rules_of_today_hold_also_for_old_records_and_for_polls_that_wait(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(more=RECORD + RULES)
    await recorded(world, publish)
    vehicle = await world.node("vehicle", "vehicle1")
    async with Caller(world, "cloud", "cloud") as cloud:
        first = await cloud.poll()
        waiting = asyncio.create_task(cloud.poll(PollRequest(positions=first.next, wait_ms=60_000)))
        await world.until(lambda: world.assembly.history._waiting)
        await vehicle.send(publish(SECRET, "secret2"))  # wakes nobody
        await world.until(
            lambda: next(s.records for s in world.assembly.logs.durable.streams() if s.source == SECRET) == 3
        )
        assert not waiting.done()
        await world.change_rule("vehicle", "cloud", {"deny": [uris.format(OPEN)]})
        await vehicle.send(publish(OPEN, "open2"))
        await vehicle.send(publish(SECRET, "secret3"))
        assert "open2" not in texts(await asyncio.wait_for(waiting, 20))
        assert texts(await waiting)[-1].startswith("secret")
        assert sorted(texts(await cloud.poll())) == ["cloud0", "cloud1", *(f"secret{number}" for number in range(4))]
        with pytest.raises(UStatusError) as caught:
            await cloud.poll(PollRequest(topics=[OPEN]))
        assert caught.value.code == UCode.PERMISSION_DENIED


async def test_a_poll_that_waits_for_what_is_denied_meanwhile_is_refused(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(more=RECORD + RULES)
    vehicle = await world.node("vehicle", "vehicle1")
    async with Caller(world, "cloud", "cloud") as cloud:
        waiting = asyncio.create_task(cloud.poll(PollRequest(topics=[OPEN], latest=True, wait_ms=60_000)))
        await world.until(lambda: world.assembly.history._waiting)
        await world.change_rule("vehicle", "cloud", None)
        await vehicle.send(publish(OPEN, "open"))
        with pytest.raises(UStatusError) as caught:
            await asyncio.wait_for(waiting, 20)
        assert caught.value.code == UCode.PERMISSION_DENIED


async def test_a_publish_for_one_authority_is_shown_where_that_lives(make_world: MakeWorld, publish: Publish) -> None:
    """As messages are forwarded: to the sink's network only."""
    world = await make_world(more=RECORD)
    cloud = await world.node("cloud", "cloud")
    message = publish(OF_CLOUD, "for the vehicle")
    message.attributes.sink.CopyFrom(uris.pattern("vehicle1"))
    await cloud.send(message)
    await cloud.send(
        UMessageBuilder.notification(OF_CLOUD, uris.parse("//vehicle1/9001/1/0")).build_from_upayload(
            UPayload(b"note", 5)
        )
    )
    await world.until(
        lambda: sum(s.records for s in world.assembly.logs.durable.streams() if s.source == OF_CLOUD) == 2
    )
    async with (
        Caller(world, "cloud", "cloud") as own,
        Caller(world, "vehicle", "vehicle1") as there,
        Caller(world, "mcu", "mcu1") as mcu,
    ):
        assert texts(await own.poll()) == texts(await there.poll()) == ["for the vehicle"]
        assert texts(await mcu.poll()) == []


async def test_access_widens_and_narrows_by_caller(make_world: MakeWorld, publish: Publish) -> None:
    access = f"""
[[access]]
callers = ["//cloud/9002/FF/0"]
allow = ["{ALL}"]
deny = ["//cloud/FFFFFFFF/FF/FFFF"]
[[access]]
endpoint = "cloud"
callers = ["//*/9003/FF/0"]
deny = ["//vehicle1/FFFFFFFF/FF/FFFF"]
[[access]]
callers = ["//cloud/9002/FF/0"]
deny = ["{ALL}"]
"""
    world = await make_world(more=RECORD + RULES + access)
    await recorded(world, publish)
    expected = {
        0x9001: ["cloud0", "cloud1", "open0", "open1"],
        0x9002: ["open0", "open1", "secret0", "secret1"],
        0x9003: ["cloud0", "cloud1"],
    }
    for entity, wanted in expected.items():
        async with Caller(world, "cloud", "cloud", entity) as client:
            assert sorted(texts(await client.poll())) == wanted
    async with Caller(world, "vehicle", "vehicle1", 0x9003) as client:
        assert len(texts(await client.poll())) == 6


FLEET = """
[[endpoint]]
name = "cloud"
transport = "local"
authorities = ["cloud"]
settings = {{ network = "{n}-cloud" }}
[[endpoint]]
name = "fleet"
transport = "local"
authorities = ["*"]
settings = {{ network = "{n}-fleet" }}
"""


async def test_one_entry_lets_each_vehicle_of_a_fleet_read_its_own_only(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(FLEET, more=RECORD + '[[access]]\nendpoint = "fleet"\nallow = ["/FFFFFFFF/FF/FFFF"]\n')
    vins = ["vin1", "vin2"]
    for vin in vins:
        node = await world.node("fleet", vin)
        await node.send(publish(uris.uri(vin, 0x8001, 1, 0x8001), vin))
    log = world.assembly.logs.durable
    await world.until(lambda: sum(stream.records for stream in log.streams() if stream.source.ue_id == 0x8001) == 2)
    rpcs = []
    for vin in vins:
        node = await world.node("fleet", vin, 0x9001)
        rpc = InMemoryRpcClient(node, node.local)
        await rpc.open()
        rpcs.append(rpc)
        client = HistoryClient(rpc, uris.uri("cloud", 4, 1))
        assert texts(await client.poll()) == [vin]
        assert texts(await client.poll(PollRequest(topics=[uris.parse("/8001/1/8001")]))) == [vin]
    with pytest.raises(UStatusError) as caught:
        await HistoryClient(rpcs[0], uris.uri("cloud", 4, 1)).poll(
            PollRequest(topics=[uris.uri("vin2", 0x8001, 1, 0x8001)])
        )
    assert caught.value.code == UCode.PERMISSION_DENIED
    node = await world.node("cloud", "cloud", 0x9001)
    rpcs.append(InMemoryRpcClient(node, node.local))
    await rpcs[-1].open()
    assert sorted(texts(await HistoryClient(rpcs[-1], uris.uri("cloud", 4, 1)).poll())) == vins
    for rpc in rpcs:
        await rpc.close()


async def test_a_service_inside_sees_all_and_nobody_outside_can_claim_to_be_one(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(more=RECORD + RULES + f'[[access]]\ndeny = ["{ALL}"]\n')
    await recorded(world, publish)
    async with InMemoryRpcClient(world.assembly.hosted, world.assembly.local) as inside:
        assert len(texts(await HistoryClient(inside, uris.uri("vehicle1", 4, 1)).poll())) == 6
    async with Caller(world, "vehicle", "vehicle1", 5) as claimed:
        with pytest.raises(UStatusError) as caught:
            await claimed.poll()
        assert caught.value.code == UCode.PERMISSION_DENIED


async def test_a_subscriber_without_access_gets_the_error_and_stops_asking(make_world: MakeWorld) -> None:
    world = await make_world(more=RECORD + RULES)
    async with Caller(world, "cloud", "cloud") as cloud:
        async with GaplessSubscriber(cloud, [SECRET]) as subscriber:
            with pytest.raises(UStatusError) as caught:
                await anext(aiter(subscriber))
        assert caught.value.code == UCode.PERMISSION_DENIED
        assert "let you read none" in caught.value.message
    assert world.assembly.history.counts["denied"] == 1


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('endpoint = "nowhere"', "nowhere"),
        ('allow = ["//*.a.*/1/1/8000"]', "authority"),
        ('callers = ["what"]', "access.0.callers.0"),
        ("who = 1", "unknown key 'who'"),
    ],
)
def test_mistakes_in_access_are_reported_with_their_line(entry: str, words: str) -> None:
    text = f'[[endpoint]]\nname = "a"\ntransport = "local"\nauthorities = ["a"]\n[[access]]\n{entry}\n'
    with pytest.raises(UStatusError) as caught:
        loads(text)
    assert "config:6:" in caught.value.message
    assert words in caught.value.message


async def test_where_nothing_may_be_read_every_question_is_refused_alike(
    make_world: MakeWorld, publish: Publish
) -> None:
    """By an entry, by rules that lead nowhere, or since the caller is of no network that is known."""
    world = await make_world(more=RECORD + RULES + f'[[access]]\ncallers = ["//cloud/9002/FF/0"]\ndeny = ["{ALL}"]\n')
    await recorded(world, publish)
    async with Caller(world, "cloud", "cloud", 0x9002) as denied:
        for call in (
            denied.poll(),
            denied.poll(PollRequest(plan_records=1)),
            denied.poll(PollRequest(topics=[uris.ANY, OPEN], latest=True, wait_ms=60_000)),
            denied.describe(),
            denied.logs([uris.pattern("vehicle1")]),
        ):
            with pytest.raises(UStatusError, match="let you read none of these topics") as caught:
                await call
            assert caught.value.code == UCode.PERMISSION_DENIED
    async with Caller(world, "mcu", "mcu1") as mcu:
        assert len(texts(await mcu.poll())) == 4
        await world.change_rule("vehicle", "mcu", None)
        assert texts(await mcu.poll()) == [], "what comes from its own network it may read"


async def test_a_caller_learns_what_it_may_read(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(more=RECORD + RULES)
    await recorded(world, publish)
    async with Caller(world, "cloud", "cloud") as cloud, Caller(world, "mcu", "mcu1") as mcu:
        described, planned = await cloud.describe(), await cloud.poll(PollRequest(plan_records=10))
        assert described.visible == planned.visible
        seen = Visible.of(described.visible)
        assert [seen.sees(topic) for topic in (OPEN, SECRET, OF_CLOUD)] == [True, False, True]
        assert not (await cloud.poll()).HasField("visible")
        other = Visible.of((await mcu.describe()).visible)
        assert [other.sees(topic) for topic in (OPEN, SECRET, OF_CLOUD)] == [True, True, False]
        waiting = asyncio.create_task(
            cloud.poll(PollRequest(plan_records=10, positions=planned.next, topics=[uris.ANY], wait_ms=60_000))
        )
        await world.until(lambda: world.assembly.history._waiting)
        await world.change_rule("vehicle", "cloud", {})
        vehicle = await world.node("vehicle", "vehicle1")
        await vehicle.send(publish(SECRET, "now to be read"))
        assert Visible.of((await waiting).visible).sees(SECRET), "as of the rules by which it was answered"


AUTHORITIES = ["vehicle1", "ecu1.vin1", "ecu2.vin1", "vehicle2", "cloud", "stranger"]
NAMED = ["//*/FFFFFFFF/FF/FFFF", "//*/8001/1/8002", "//vehicle1/FFFFFFFF/FF/FFFF", "//ecu1.vin1/8001/1/8001"]
FAMILIES = ["//*.vin1/8001/1/FFFF", "/8001/1/8002"]  # and that of the caller
SOURCES = [
    UUri(authority_name=authority, ue_id=0x8001, ue_version_major=1, resource_id=resource)
    for authority in AUTHORITIES
    for resource in (0x8001, 0x8002)
]


@settings(deadline=None, max_examples=examples(200))
@given(
    st.lists(st.sampled_from(NAMED), max_size=2),
    st.lists(st.sampled_from(NAMED), max_size=2),
    st.none() | st.lists(st.sampled_from(NAMED + FAMILIES), max_size=2),
    st.lists(st.sampled_from(NAMED + FAMILIES), max_size=2),
    st.sampled_from(AUTHORITIES),
    st.permutations([(source, names_a_sink) for source in SOURCES for names_a_sink in (False, True)]),
)
def test_what_is_seen_of_topics_that_are_alike_is_what_is_seen_of_each(
    rule_allow: list[str],
    rule_deny: list[str],
    allow: list[str] | None,
    deny: list[str],
    caller: str,
    streams: list[tuple[UUri, bool]],
) -> None:
    async def run() -> None:
        network = LocalNetwork()
        patterns = {"vehicle": ["vehicle1", "*.vin1"], "other": ["vehicle2"], "cloud": ["cloud"]}
        endpoints = Endpoints(
            Endpoint(name, names, LocalTransport.on(network, LocalUriProvider(name, 1, 1)))
            for name, names in patterns.items()
        )
        rules = Rules()
        lists = [[uris.parse(text) for text in texts] for texts in (rule_allow, rule_deny)]
        rules.add(Rule("vehicle", "cloud", *lists))
        rules.add(Rule("cloud", "vehicle"))
        entry = AccessEntry(
            allow=list(map(AccessPattern.parse, allow or [])), deny=list(map(AccessPattern.parse, deny))
        )
        access = Access(endpoints, rules, [] if allow is None else [entry])
        sight = access.of(uris.uri(caller, 0x9001, 1))
        async with await Log.open(None, name="ring") as log:
            for source, names_a_sink in streams:
                log.stream_id(source, uris.pattern("cloud") if names_a_sink else None)
            match = Match(log, [uris.ANY], sight)
            await match.complete()
            assert match.ids == {one.id for one in log.streams() if sight.sees(one.source, one.sink)}
            assert match.withheld == log.stream_count - len(match.ids)
            whole = {source.authority_name for source in SOURCES if sight.sees_all(source.authority_name)}
            assert all(sight.sees(source, None) for source in SOURCES if source.authority_name in whole)

    asyncio.run(run())


WIDE = [
    ("vehicle", ["vehicle1", "*.vin1"]),
    ("other", ["vehicle2", "*.sub.vin1", "a.sub.vin1"]),
    ("cloud", ["cloud", "ecu9.vin1"]),
    ("rest", ["*"]),
]
SEEN = [
    UUri(authority_name=authority, ue_id=ue_id, ue_version_major=1, resource_id=resource)
    for authority in (*AUTHORITIES, "a.sub.vin1", "b.sub.vin1", "ecu9.vin1", "")
    for ue_id in (0x8001, 0x1_8001)
    for resource in (0x8001, 0x8002)
]
RULE_PATTERNS = [*NAMED, "//ecu2.vin1/FFFF8001/FF/FFFF", "//a.sub.vin1/FFFFFFFF/FF/FFFF"]
ENTRY_PATTERNS = [*RULE_PATTERNS, *FAMILIES, "//*.sub.vin1/FFFFFFFF/FF/FFFF", "//*.vin1/FFFFFFFF/FF/FFFF"]
rule_lists = st.none() | st.tuples(*[st.lists(st.sampled_from(RULE_PATTERNS), max_size=2)] * 2)
entry_lists = st.none() | st.tuples(*[st.lists(st.sampled_from(ENTRY_PATTERNS), max_size=3)] * 2)


@settings(deadline=None, max_examples=examples(300))
@given(
    st.permutations(WIDE),
    st.integers(1, 4),
    st.dictionaries(st.tuples(*[st.sampled_from([name for name, _ in WIDE])] * 2), rule_lists, max_size=8),
    entry_lists,
    st.sampled_from([*AUTHORITIES, ""]),
)
def test_visible_is_exactly_what_a_caller_sees(
    endpoints: list[tuple[str, list[str]]],
    count: int,
    into: dict[tuple[str, str], tuple[list[str], list[str]] | None],
    entry: tuple[list[str], list[str]] | None,
    caller: str,
) -> None:
    async def run() -> None:
        network = LocalNetwork()
        known = Endpoints(
            Endpoint(name, names, LocalTransport.on(network, LocalUriProvider(name, 1, 1)))
            for name, names in endpoints[:count]
        )
        rules = Rules()
        for (ingress, egress), lists in into.items():
            if lists is not None:
                rules.add(Rule(ingress, egress, *([uris.parse(text) for text in texts] for texts in lists)))
        entries = []
        if entry is not None:
            allow, deny = (list(map(AccessPattern.parse, texts)) for texts in entry)
            entries = [AccessEntry(allow=allow, deny=deny)]
        sight = Access(known, rules, entries).of(UUri(authority_name=caller, ue_id=0x9001, ue_version_major=1))
        visible = Visible.of(sight.visible.message)
        assert [visible.sees(source) for source in SEEN] == [sight.sees(source, None) for source in SEEN]
        assert visible == sight.visible == Visible.parse(visible.text)
        assert visible.text == Visible.parse(visible.text).text == sight.visible.text
        if visible.is_nothing:
            assert not any(sight.sees(source, None) for source in SEEN)
        for origin in visible.message.origins:  # as the proto says it: the first one that matches decides
            assert origin.authorities

    asyncio.run(run())
