"""Describe and Poll over the local transport: the guarantees for a consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from history.log.log import Log
from history.reading.subscriber import HistoryClient
from tests.history.world import SERVICE, HistoryWorld, publishes, retention_runs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import CallOptions
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollRequest, PollResponse, Position, Witness
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

TOPICS = [uris.uri("vcu.vin", 0x10, 1, 0x8000 + place) for place in range(4)]


class World(HistoryWorld):
    """A durable log (small retention), a volatile one, the service, and a client elsewhere on the network."""

    def __init__(self) -> None:
        self.now = 1_800_000_000_000

    async def begin(self, path: Path) -> None:
        self.durable = await Log.open(
            path / "l.db", name="durable", retention_ms=60_000, tail_bytes=1, now_ms=lambda: self.now
        )
        self.volatile = await Log.open(None, name="volatile", now_ms=lambda: self.now)
        await self.open(self.durable, self.volatile, share=1)
        self.client = HistoryClient(self.rpc, SERVICE)

    async def append(self, *topics: int, log: Log | None = None, size: int = 1) -> list[UMessage]:
        messages = publishes([TOPICS[topic] for topic in topics], b"x" * size)
        await self.append_all(log if log is not None else self.durable, messages)
        return messages

    def at(self, durable: int, volatile: int = 0) -> list[Position]:
        return [
            Position(incarnation=self.durable.incarnation, seq=durable),
            Position(incarnation=self.volatile.incarnation, seq=volatile),
        ]

    async def retention(self) -> None:
        """Waits until retention has run at the current time."""
        await retention_runs(self.durable)


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("history.service.service.POLLS_WAITING_MAX", 2)
    made = World()
    await made.begin(tmp_path)
    yield made
    await made.close()


def seqs(response: PollResponse, log: Log) -> list[int]:
    return [seq for batch in response.batches if batch.incarnation == log.incarnation for seq in batch.seq]


def places(response: PollResponse) -> dict[bytes, int]:
    return {position.incarnation: position.seq for position in response.next}


async def test_a_poll_brings_everything_of_both_logs_and_where_to_go_on(world: World) -> None:
    sent = await world.append(0, 1, 0)
    kept = await world.append(2, log=world.volatile)
    response = await world.client.poll()
    assert seqs(response, world.durable) == [1, 2, 3]
    assert seqs(response, world.volatile) == [1]
    assert [message for batch in response.batches for message in batch.message] == [
        m.SerializeToString() for m in sent + kept
    ]
    assert list(response.batches[0].prev_seq) == [0, 0, 1]
    assert list(response.batches[0].time_ms) == [world.now] * 3
    assert places(response) == {world.durable.incarnation: 3, world.volatile.incarnation: 1}
    assert (response.more, list(response.gaps)) == (False, [])


async def test_topics_are_patterns_and_next_covers_what_does_not_match(world: World) -> None:
    await world.append(0, 1, 0, 1, 2)
    response = await world.client.poll(PollRequest(topics=[TOPICS[1], uris.pattern(resource=0x8000)]))
    assert seqs(response, world.durable) == [1, 2, 3, 4]
    assert places(response)[world.durable.incarnation] == 5
    nothing = await world.client.poll(PollRequest(topics=[TOPICS[3]]))
    assert (len(nothing.batches), places(nothing)[world.durable.incarnation]) == (0, 5)


async def test_notifications_are_not_seen_but_publishes_with_the_streamers_sink_are(world: World) -> None:
    log = world.durable
    notification = UMessageBuilder.notification(TOPICS[0], uris.uri("cloud", 0x20, 1)).build()
    publish = UMessageBuilder.publish(TOPICS[0]).build()
    publish.attributes.sink.CopyFrom(uris.pattern("cloud"))
    for message in (notification, publish):
        await log.append([log.stream_id(message.attributes.source, message.attributes.sink)], [message])
    assert seqs(await world.client.poll(), log) == [2]


async def test_limits_of_records_and_bytes_and_more(world: World) -> None:
    await world.append(*[0] * 20, size=1000)
    first = await world.client.poll(PollRequest(max_records=5))
    assert (seqs(first, world.durable), first.more) == ([1, 2, 3, 4, 5], True)
    second = await world.client.poll(PollRequest(max_bytes=3500, positions=first.next))
    assert (seqs(second, world.durable), second.more) == ([6, 7, 8], True)
    rest = await world.client.poll(PollRequest(positions=second.next))
    assert (seqs(rest, world.durable), rest.more) == (list(range(9, 21)), False)


async def test_many_small_commits_come_in_one_reply(world: World) -> None:
    for topic in range(300):
        await world.append(topic % 3)
    response = await world.client.poll()
    assert seqs(response, world.durable) == list(range(1, 301))
    rare = await world.client.poll(PollRequest(topics=[TOPICS[1]], max_records=70))
    assert (seqs(rare, world.durable), rare.more) == (list(range(2, 2 + 70 * 3, 3)), True)


async def test_a_reply_fits_a_transport(world: World) -> None:
    await world.append(*[0] * 300, size=5000)
    response = await world.client.poll(PollRequest(max_bytes=2**31))
    assert 500_000 < response.ByteSize() < 1 << 20
    assert response.more


async def test_until_is_inclusive(world: World) -> None:
    await world.append(0, 0, 0, 0)
    until = [Position(incarnation=world.durable.incarnation, seq=3)]
    response = await world.client.poll(PollRequest(until=until))
    assert (seqs(response, world.durable), response.more) == ([1, 2, 3], False)


async def test_a_poll_whose_end_is_reached_does_not_wait(world: World) -> None:
    await world.append(0)
    request = PollRequest(positions=world.at(1, 0), until=world.at(1, 0), wait_ms=30_000)
    assert not (await asyncio.wait_for(world.client.poll(request), 5)).batches


async def test_a_long_poll_ends_with_the_first_record_that_matches(world: World) -> None:
    waiting = asyncio.ensure_future(world.client.poll(PollRequest(topics=[TOPICS[1]], wait_ms=30_000)))
    await until_waiting(world, 1)
    await world.append(0)
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await world.append(1, log=world.volatile)
    response = await asyncio.wait_for(waiting, 5)
    assert seqs(response, world.volatile) == [1]
    assert places(response)[world.durable.incarnation] == 1


async def test_a_long_poll_ends_with_its_time_and_covers_what_was_not_for_it(world: World) -> None:
    waiting = asyncio.ensure_future(world.client.poll(PollRequest(topics=[TOPICS[1]], wait_ms=200)))
    await until_waiting(world, 1)
    await world.append(0)
    response = await asyncio.wait_for(waiting, 5)
    assert (len(response.batches), places(response)[world.durable.incarnation]) == (0, 1)


async def test_the_wait_ends_before_the_ttl_does(world: World) -> None:
    payload = UPayload.pack(PollRequest(wait_ms=30_000))
    options = CallOptions(timeout_ms=1_000)
    answer = await world.rpc.invoke_method(uris.uri("gateway", 4, 1, 2), payload, options)
    assert not answer.unpack(PollResponse).batches


async def test_too_many_waiting_polls_are_refused_and_stop_answers_the_others(world: World) -> None:
    waiting = [asyncio.ensure_future(world.client.poll(PollRequest(wait_ms=30_000))) for _ in range(2)]
    await until_waiting(world, 2)
    with pytest.raises(UStatusError) as error:
        await world.client.poll(PollRequest(wait_ms=30_000))
    assert error.value.code == UCode.RESOURCE_EXHAUSTED
    assert not (await world.client.poll()).batches
    await world.service.stop()
    assert [len(response.batches) for response in await asyncio.wait_for(asyncio.gather(*waiting), 5)] == [0, 0]


async def until_waiting(world: World, polls: int) -> None:
    async with asyncio.timeout(5):
        while len(world.service._waiting) < polls:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_where_to_start(world: World) -> None:
    old = await world.append(0, 1)
    world.now += 10
    await world.append(2)
    assert not (await world.client.poll(PollRequest(latest=True))).batches
    after_time = PollRequest()
    after_time.after_time.FromMilliseconds(world.now - 10)
    assert seqs(await world.client.poll(after_time), world.durable) == [3]
    after_id = PollRequest(after_message_id=uuids.to_bytes(old[0].attributes.id))
    assert seqs(await world.client.poll(after_id), world.durable) == [2, 3]
    assert seqs(await world.client.poll(PollRequest(earliest=True)), world.durable) == [1, 2, 3]


async def test_who_has_read_what_this_log_does_not_have_begins_after_its_time(world: World) -> None:
    """The answer of a call, say: nothing is missed between that and the subscription."""
    await world.append(0)
    read_at = world.now + 5
    world.now += 10
    await world.append(0, 1)
    after_id = PollRequest(after_message_id=read_at.to_bytes(6, "big") + b"\x70\x00\x80" + bytes(7))
    assert seqs(await world.client.poll(after_id), world.durable) == [2, 3]


async def test_retention_is_a_gap_with_bounds_unless_the_start_was_left_open(world: World) -> None:
    await world.append(0)
    await world.append(0)
    world.now += 120_000
    await world.append(0)
    await world.retention()
    response = await world.client.poll(PollRequest(positions=world.at(1)))
    assert list(response.gaps) == [
        Gap(reason=Gap.REASON_RETENTION, incarnation=world.durable.incarnation, after_seq=1, before_seq=3)
    ]
    assert seqs(response, world.durable) == [3]
    assert not (await world.client.poll(PollRequest(earliest=True))).gaps
    assert not (await world.client.poll(PollRequest(positions=world.at(1), topics=[TOPICS[1]]))).gaps
    since = PollRequest()
    since.after_time.FromMilliseconds(1)
    assert [gap.before_seq for gap in (await world.client.poll(since)).gaps] == [3]


async def test_another_incarnation_is_a_gap(world: World) -> None:
    await world.append(0)
    response = await world.client.poll(PollRequest(positions=[Position(incarnation=bytes(16), seq=7)]))
    assert list(response.gaps) == [Gap(reason=Gap.REASON_INCARNATION, incarnation=bytes(16), after_seq=7)]
    assert seqs(response, world.durable) == [1]
    assert bytes(16) not in places(response)


async def test_a_position_beyond_the_end_is_a_gap(world: World) -> None:
    await world.append(0)
    response = await world.client.poll(PollRequest(positions=world.at(9)))
    assert [(gap.reason, gap.after_seq, gap.before_seq) for gap in response.gaps] == [(Gap.REASON_CORRUPTION, 9, 2)]
    assert places(response)[world.durable.incarnation] == 1


async def test_a_position_that_proves_where_it_was_finds_out_a_log_that_went_back(world: World) -> None:
    sent = await world.append(*[0] * 5)
    first = await world.client.poll(PollRequest(max_records=3))
    assert seqs(first, world.durable) == [1, 2, 3]
    assert not (await world.client.poll(PollRequest(positions=first.next))).gaps
    (mine,) = [position for position in first.next if position.incarnation == world.durable.incarnation]
    (witness,) = mine.witnesses
    assert witness.seq == mine.seq == 3
    assert uuids.to_bytes(sent[2].attributes.id) not in mine.SerializeToString(), (
        "of a message that one may not see nothing is told"
    )
    other = Position(
        incarnation=mine.incarnation,
        seq=4,
        witnesses=[witness, Witness(seq=4, digest=b"?"), Witness(seq=2, digest=b"?")],
    )
    response = await world.client.poll(PollRequest(positions=[other], consumer="c", acked=[other]))
    assert [(gap.reason, gap.after_seq, gap.before_seq) for gap in response.gaps] == [(Gap.REASON_CORRUPTION, 4, 4)]
    assert seqs(response, world.durable) == [4, 5]
    assert world.durable.cursors.seq("consumer:c") == 3, "what is read again is held"
    unknown = Position(
        incarnation=mine.incarnation, seq=4, witnesses=[Witness(seq=4, digest=b"?"), Witness(seq=2, digest=b"?")]
    )
    response = await world.client.poll(PollRequest(positions=[unknown]))
    assert [(gap.after_seq, gap.before_seq) for gap in response.gaps] == [(4, 1)]
    assert seqs(response, world.durable) == [1, 2, 3, 4, 5]
    beyond = Position(incarnation=mine.incarnation, seq=9, witnesses=[Witness(seq=9, digest=b"?"), witness])
    response = await world.client.poll(PollRequest(positions=[beyond]))
    assert [(gap.after_seq, gap.before_seq) for gap in response.gaps] == [(9, 4)]


async def test_a_witness_that_is_no_longer_there_proves_nothing(world: World) -> None:
    await world.append(0)
    first = await world.client.poll()
    await world.append(0)
    world.now += 120_000
    await world.append(0)
    await world.retention()
    response = await world.client.poll(PollRequest(positions=first.next))
    assert [gap.reason for gap in response.gaps] == [Gap.REASON_RETENTION]


async def test_of_a_log_from_which_nothing_was_read_nothing_is_lost(world: World) -> None:
    assert not (await world.client.poll(PollRequest(positions=[Position(incarnation=bytes(16))]))).gaps


async def test_a_consumer_holds_retention_until_its_lease_ends(world: World) -> None:
    for _ in range(4):
        await world.append(0)
    response = await world.client.poll(
        PollRequest(consumer="spark", acked=world.at(2), lease_ms=600_000, max_records=1)
    )
    assert response.lease_ms == 600_000
    world.now += 120_000
    await world.append(0)
    await world.retention()
    assert world.durable.oldest_seq == 3
    world.now += 600_001
    await world.append(0)
    await world.retention()
    async with asyncio.timeout(5):
        while world.durable.cursors.seq("consumer:spark") is not None:
            world.durable.cursors.set("other", world.now)
            world.durable.cursors.drop("other")
            await asyncio.sleep(0.05)
    assert world.durable.oldest_seq == 6


async def test_a_poll_renews_the_lease_and_leaves_the_cursor_where_it_was(world: World) -> None:
    await world.append(0, 0)
    first = await world.client.poll(PollRequest(consumer="c", acked=world.at(1)))
    assert (first.lease_ms, world.durable.cursors.seq("consumer:c")) == (60_000, 1)
    await world.client.poll(PollRequest(consumer="c", positions=first.next))
    assert world.durable.cursors.seq("consumer:c") == 1
    await world.client.poll(PollRequest(consumer="c", acked=world.at(99)))
    assert world.durable.cursors.seq("consumer:c") == 2


async def test_describe(world: World) -> None:
    sent = await world.append(0, 1, 0)
    described = await world.client.describe([TOPICS[0]])
    assert [(log.incarnation, log.durable, log.oldest_seq, log.newest_seq) for log in described.logs] == [
        (world.durable.incarnation, True, 1, 3),
        (world.volatile.incarnation, False, 0, 0),
    ]
    assert described.logs[0].retention_ms == 60_000
    (topic,) = described.topics
    assert (topic.topic, topic.oldest_seq, topic.newest_seq, topic.records) == (TOPICS[0], 1, 3, 2)
    assert topic.newest_id == uuids.to_bytes(sent[2].attributes.id)
    assert topic.newest_time.ToMilliseconds() == world.now
    assert len((await world.client.describe()).topics) == 2


BAD = {
    "a topic that is a method": PollRequest(topics=[uris.uri("a", 1, 1, 5)]),
    "a version of 9 bits": PollRequest(
        topics=[uris.UUri(authority_name="a", ue_id=1, ue_version_major=0x100, resource_id=0x8000)]
    ),
    "an authority in capitals": PollRequest(
        topics=[uris.UUri(authority_name="A", ue_id=1, ue_version_major=1, resource_id=0x8000)]
    ),
    "an incarnation of 3 bytes": PollRequest(positions=[Position(incarnation=b"abc", seq=1)]),
    "an until of no bytes": PollRequest(until=[Position(seq=1)]),
    "an acked of 17 bytes": PollRequest(consumer="c", acked=[Position(incarnation=bytes(17))]),
    "an id of 15 bytes": PollRequest(after_message_id=bytes(15)),
    "a position with 41 witnesses": PollRequest(
        positions=[Position(incarnation=bytes(16), witnesses=[Witness()] * 41)]
    ),
    "a name without end": PollRequest(consumer="c" * 201),
}


@pytest.mark.parametrize("request_", BAD.values(), ids=BAD.keys())
async def test_a_bad_request_is_refused_and_the_next_is_served(world: World, request_: PollRequest) -> None:
    with pytest.raises(UStatusError) as error:
        await world.client.poll(request_)
    assert error.value.code == UCode.INVALID_ARGUMENT
    assert error.value.message
    await world.append(0)
    assert seqs(await world.client.poll(), world.durable) == [1]


@pytest.mark.parametrize("method", [1, 2])
async def test_a_truncated_request_is_refused(world: World, method: int) -> None:
    payload = UPayload(PollRequest(topics=TOPICS).SerializeToString()[:-3], UPayload.pack(PollRequest()).format)
    with pytest.raises(UStatusError) as error:
        await world.rpc.invoke_method(uris.uri("gateway", 4, 1, method), payload)
    assert error.value.code == UCode.INVALID_ARGUMENT


async def test_too_many_wildcards_are_refused(world: World) -> None:
    with pytest.raises(UStatusError) as error:
        await world.client.poll(PollRequest(topics=[uris.pattern(resource=0x8000 + place) for place in range(65)]))
    assert error.value.code == UCode.RESOURCE_EXHAUSTED
