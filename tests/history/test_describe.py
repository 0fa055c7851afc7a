"""Describe: its description of the logs, topics in pages, and callers and services without pages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from history.log.log import Log
from history.reading.subscriber import HistoryClient
from history.service import service as service_module
from history.service.matches import Match
from history.service.service import Listing, describe
from tests.history.world import LOCAL, SERVICE, HistoryWorld, publishes
from tests.tiers import examples
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1 import ustreamer_pb2
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DescribeRequest, DescribeResponse, LogState, TopicState
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

METHOD = uris.uri("gateway", 4, 1, 1)


def topic(vehicle: int, place: int = 0) -> UUri:
    return uris.uri(f"v{vehicle}", 0x10, 1, 0x8000 + place)


class World(HistoryWorld):
    """A durable log, a volatile one, and a client elsewhere on the network."""

    async def begin(self, path: Path) -> None:
        self.durable = await Log.open(path / "l.db", name="durable", forget_after_s=3_600)
        self.volatile = await Log.open(None, name="volatile", forget_after_s=3_600)
        await self.open(self.durable, self.volatile)
        self.client = HistoryClient(self.rpc, SERVICE)

    async def append(self, *topics: UUri, log: Log | None = None) -> None:
        await self.append_all(log if log is not None else self.durable, publishes(list(topics), b"x"))

    async def ask(self, asked: DescribeRequest) -> DescribeResponse:
        return (await self.rpc.invoke_method(METHOD, UPayload.pack(asked))).unpack(DescribeResponse)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World()
    await made.begin(tmp_path)
    yield made
    await made.close()


# -- the logs


async def test_each_log_has_the_newest_record_that_matches(world: World) -> None:
    await world.append(topic(1), topic(2), topic(1, 1), topic(3))
    await world.append(topic(1), log=world.volatile)
    for patterns, expected in (
        ([], [4, 1]),
        ([topic(1)], [1, 1]),
        ([uris.pattern("v1")], [3, 1]),
        ([topic(2), topic(3)], [4, 0]),
        ([uris.pattern(resource=0x8001)], [3, 0]),
        ([topic(4)], [0, 0]),
    ):
        assert [log.newest_match_seq for log in await world.client.logs(patterns)] == expected
    assert [log.newest_seq for log in await world.client.logs([topic(2)])] == [4, 1]


async def test_a_notification_is_not_the_newest(world: World) -> None:
    await world.append(topic(1))
    notification = UMessageBuilder.notification(topic(1), uris.uri("cloud", 0x20, 1)).build()
    await world.durable.append([world.durable.stream_id(topic(1), notification.attributes.sink)], [notification])
    assert [log.newest_match_seq for log in await world.client.logs()] == [1, 0]


async def test_beyond_the_old_limit_all_logs_are_listed_and_the_answer_stays_small(world: World) -> None:
    topics = [topic(vehicle, place) for vehicle in range(300) for place in range(30)]
    sizes = []
    for part in (topics[:100], topics[100:]):
        await world.append(*part)
        answer = await world.ask(DescribeRequest(listing=DescribeRequest.LISTING_NONE))
        assert [log.newest_match_seq for log in answer.logs] == [world.durable.newest_seq, 0]
        assert (len(answer.topics), answer.next_page) == (0, b"")
        sizes.append(answer.ByteSize())
    assert sizes[1] <= sizes[0] + 8, "numbers of a log have grown, and nothing else"
    with pytest.raises(UStatusError, match="more than 8000 topics match: ask for fewer at once, or for pages") as error:
        await world.client.describe()
    assert error.value.code == UCode.RESOURCE_EXHAUSTED
    assert [one.topic async for one in world.client.topics()] == topics


async def test_what_comes_while_it_is_looked_for_is_not_the_newest_of_the_log(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that finds no match beyond its position goes on from `newest_seq`."""
    await world.append(topic(1), topic(2))
    newest_seq = Match.newest_seq

    async def slow(match: Match) -> int:
        await world.append(topic(2), topic(1))  # seen by this match
        found = await newest_seq(match)
        await world.append(topic(2), topic(1))  # not seen by it
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Match, "newest_seq", slow)
        durable, _ = await world.client.logs([topic(1)])
    assert (durable.newest_match_seq, durable.newest_seq) == (4, 4)
    durable, _ = await world.client.logs([topic(3)])
    assert (durable.newest_match_seq, durable.newest_seq) == (0, 10), "of two logs, four records came for each"


async def test_followed_services_are_named_to_those_who_may_read_their_authority(world: World) -> None:
    """The rules that say so are tested in tests/streamer."""
    services = [uris.uri("v1", 4, 1), uris.uri("v2", 0x8001_0004, 1)]
    await world.service.stop()
    world.service = service_module.HistoryService(world.transport, LOCAL, world.logs, followed=lambda: services)
    await world.service.start()
    assert list((await world.ask(DescribeRequest(followed=True))).followed) == services
    assert not (await world.ask(DescribeRequest())).followed


# -- pages


async def test_pages_are_bounded_in_topics_and_in_bytes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "PAGE_TOPICS_MAX", 40)
    monkeypatch.setattr(service_module, "PAGE_BYTES_MAX", 2_000)
    short = [topic(1, place) for place in range(100)]
    long = [uris.uri("x" * 128, 0x10, 1, 0x8000 + place) for place in range(100)]
    await world.append(*short)
    await world.append(*long, log=world.volatile)
    page, found, most = b"", [], 0
    while True:
        answer = await world.ask(DescribeRequest(listing=DescribeRequest.LISTING_PAGE, page=page))
        states = list(answer.topics)
        most = max(most, len(states))
        assert len(states) <= 40
        assert sum(state.ByteSize() for state in states[:-1]) < 2_000
        assert [log.newest_match_seq for log in answer.logs] == [100, 100]
        found += [state.topic for state in states]
        page = answer.next_page
        if not page:
            break
    assert found == short + long
    assert 20 < most <= 40


async def test_where_few_match_a_page_looks_no_further_than_it_may(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "LISTED_PER_STEP", 10)
    monkeypatch.setattr(service_module, "STREAMS_PER_PAGE", 50)
    await world.append(*(topic(vehicle, int(vehicle == 390)) for vehicle in range(400)))
    rare = uris.pattern(resource=0x8001)
    answer = await world.ask(DescribeRequest(topics=[rare], listing=DescribeRequest.LISTING_PAGE))
    assert not answer.topics
    assert answer.next_page
    assert [state.topic async for state in world.client.topics([rare])] == [topic(390, 1)]
    # of one authority the others are not looked at
    answer = await world.ask(DescribeRequest(topics=[uris.pattern("v390")], listing=DescribeRequest.LISTING_PAGE))
    assert [state.topic for state in answer.topics] == [topic(390, 1)]
    assert not answer.next_page


NO_PAGES = [b"?", bytes(31), bytes(33), bytes(32 * 257)]


@pytest.mark.parametrize("page", NO_PAGES, ids=[f"{len(page)} bytes" for page in NO_PAGES])
async def test_what_is_no_page_is_refused(world: World, page: bytes) -> None:
    with pytest.raises(UStatusError, match="next_page") as error:
        await world.ask(DescribeRequest(listing=DescribeRequest.LISTING_PAGE, page=page))
    assert error.value.code == UCode.INVALID_ARGUMENT


async def test_a_listing_that_there_is_not_is_refused(world: World) -> None:
    with pytest.raises(UStatusError) as error:
        await world.ask(DescribeRequest.FromString(b"\x10\x07"))
    assert error.value.code == UCode.INVALID_ARGUMENT
    assert world.service.counts["refused"] == 1


async def test_any_page_that_can_be_one_is_borne(world: World) -> None:
    await world.append(topic(1), topic(2))
    for place in (bytes(32), b"\xff" * 32, world.durable.incarnation + b"\xff" * 16, b"\xff" * 64):
        answer = await world.ask(DescribeRequest(listing=DescribeRequest.LISTING_PAGE, page=place))
        assert len(answer.topics) <= 2


async def test_a_log_that_is_removed_between_two_pages_duplicates_no_record_of_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "PAGE_TOPICS_MAX", 3)
    await world.append(*(topic(1, place) for place in range(5)))
    await world.append(*(topic(2, place) for place in range(5)), log=world.volatile)
    first = await world.ask(DescribeRequest(listing=DescribeRequest.LISTING_PAGE))
    await world.service.stop()
    await world.volatile.close()
    world.volatile = world.logs[1] = await Log.open(None, name="volatile")
    await world.append(topic(3), log=world.volatile)
    await world.serve()
    found = [state.topic for state in first.topics]
    page = first.next_page
    while page:
        answer = await world.ask(DescribeRequest(listing=DescribeRequest.LISTING_PAGE, page=page))
        found += [state.topic for state in answer.topics]
        page = answer.next_page
    assert found == [*(topic(1, place) for place in range(5)), topic(3)]


async def test_a_service_that_gives_one_page_for_ever_is_found_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def same(*_: object) -> DescribeResponse:
        return DescribeResponse(next_page=b"again")

    monkeypatch.setattr(world.client, "_call", same)
    with pytest.raises(UStatusError) as error:
        async for _ in world.client.topics():
            pass
    assert error.value.code == UCode.DATA_LOSS


@contextlib.contextmanager
def small_pages(topics: int, step: int) -> Iterator[None]:
    before = service_module.PAGE_TOPICS_MAX, service_module.LISTED_PER_STEP, service_module.STREAMS_PER_PAGE
    service_module.PAGE_TOPICS_MAX, service_module.LISTED_PER_STEP = topics, step  # type: ignore[misc]
    service_module.STREAMS_PER_PAGE = 3 * step  # type: ignore[misc]
    try:
        yield
    finally:
        service_module.PAGE_TOPICS_MAX, service_module.LISTED_PER_STEP, service_module.STREAMS_PER_PAGE = before  # type: ignore[misc]


@settings(deadline=None, max_examples=examples(150))
@given(
    st.lists(st.integers(0, 40), max_size=40),
    st.lists(st.lists(st.integers(-1, 60), max_size=12), max_size=30),
    st.sampled_from([[uris.ANY], [uris.pattern(resource=0x8000)], [uris.pattern("v1"), uris.pattern("v2")]]),
    st.integers(1, 7),
    st.integers(1, 5),
)
def test_what_is_there_throughout_is_listed_once_whatever_comes_and_goes(
    begin: list[int], between: list[list[int]], patterns: list[UUri], topics_max: int, step: int
) -> None:
    """Between two pages: records (from 0 on), of topics that are known, new, or come back; -1: what has none goes."""

    async def run() -> None:
        logs = [await Log.open(None, name=name, retention_bytes=20_000, forget_after_s=3_600) for name in "ab"]
        matches = {log: Match(log, patterns) for log in logs}
        for log, match in matches.items():
            log.on_forgotten(match.forget)

        async def does(number: int) -> None:
            log = logs[number % 2]
            if number < 0:
                for one in logs:
                    one.stream_table._forget(at_once=True)
            else:
                (message,) = publishes([topic(number % 5, number % 3)], b"x" * (1 + number * 20))
                await log.append([log.stream_id(message.attributes.source, wanted=True)], [message])

        def known() -> dict[tuple[int, int], bytes]:
            """By log and number: a forgotten topic gets another number when it returns."""
            return {
                (place, stream.id): stream.source_bytes
                for place, log in enumerate(logs)
                for stream in log.streams()
                if not patterns or any(uris.matches(pattern, stream.source) for pattern in patterns)
            }

        for number in begin:
            await does(number)
        throughout, found, page, rounds = known(), list[tuple[int, bytes]](), b"", iter(between)
        places = {log.incarnation: place for place, log in enumerate(logs)}
        while True:
            asked = DescribeRequest(listing=DescribeRequest.LISTING_PAGE, page=page)
            answer = await describe(matches, Listing.of(asked))
            assert len(answer.topics) <= topics_max
            found += [(places[one.incarnation], one.topic.SerializeToString()) for one in answer.topics]
            page = answer.next_page
            if not page:
                break
            for number in next(rounds, ()):
                await does(number)
                throughout = {one: throughout[one] for one in throughout.keys() & known().keys()}
        assert len(found) == len(set(found)), "none is doubled"
        assert {(place, source) for (place, _), source in throughout.items()} <= set(found), "none is missed"
        for log in logs:
            await log.close()

    with small_pages(topics_max, step):
        asyncio.run(run())


# -- callers and services of before there were pages

OLD = {
    "LogState": ["incarnation:12", "durable:8", "oldest_seq:4", "newest_seq:4", "stored_bytes:4", "retention_ms:4"],
    "TopicState": ["topic:12", "incarnation:12", "oldest_seq:4", "newest_seq:4", "newest_id:12"],
    "DescribeResponse": ["logs:LogState", "topics:TopicState"],
}


def old_class(name: str) -> Any:
    """A message as of 0.1.0: name and protobuf type number of each field, in the order of the fields."""
    file = descriptor_pb2.FileDescriptorProto(name=f"old_{name}.proto", package="old", syntax="proto3")
    for message, fields in OLD.items():
        made = file.message_type.add(name=message)
        for number, (field, type) in enumerate((one.split(":") for one in fields), 1):
            added = made.field.add(name=field, number=number, label=1)
            if type.isdigit():
                added.type = int(type)
            else:
                added.type, added.label, added.type_name = 11, 3, f".old.{type}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"old.{name}"))


async def test_a_caller_of_before_is_answered_as_before(world: World) -> None:
    await world.append(topic(1), topic(2), topic(1))
    old_request = b"\x0a" + bytes([topic(1).ByteSize()]) + topic(1).SerializeToString()
    payload = await world.rpc.invoke_method(METHOD, UPayload(old_request, UPayload.pack(DescribeRequest()).format))
    answer = old_class("DescribeResponse").FromString(payload.data)
    assert [(log.durable, log.oldest_seq, log.newest_seq) for log in answer.logs] == [(True, 1, 3), (False, 0, 0)]
    assert [(one.topic, one.oldest_seq, one.newest_seq) for one in answer.topics] == [
        (topic(1).SerializeToString(), 1, 3)
    ]


async def test_none_of_the_new_fields_has_the_number_of_an_old_one() -> None:
    added = {
        DescribeRequest: {"listing": 2, "page": 3, "followed": 4},
        DescribeResponse: {"next_page": 3, "visible": 4, "followed": 5},
        LogState: {"newest_match_seq": 8},
        TopicState: {},
    }
    known = {DescribeRequest: 1, DescribeResponse: 2, LogState: 7, TopicState: 7}
    for message, fields in added.items():
        numbers = {field.name: field.number for field in message.DESCRIPTOR.fields}
        assert {name: number for name, number in numbers.items() if number > known[message]} == fields
        assert sorted(numbers.values()) == list(range(1, known[message] + len(fields) + 1))
    assert ustreamer_pb2.DescribeRequest.LISTING_AT_ONCE == 0, "what who does not say anything asks for"
