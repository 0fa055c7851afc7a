"""The log, step by step: the same tests for the log on disk and the log in memory."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from history.log import log as log_module
from history.log.log import Log, find_ids
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

TOPICS = [uris.uri("vcu.vin", 0x10, 1, 0x8000 + place) for place in range(4)]


def message(topic: int = 0, data: bytes = b"x") -> UMessage:
    return UMessageBuilder.publish(TOPICS[topic]).build_from_upayload(UPayload(data, 5))


@pytest.fixture(params=["durable", "volatile"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "history.db" if request.param == "durable" else None


@pytest.fixture
async def log(path: Path | None) -> AsyncIterator[Log]:
    async with await Log.open(path, name="test") as made:
        yield made


def append(log: Log, *topics: int, data: bytes = b"x") -> asyncio.Future[int]:
    return log.append([log.stream_id(TOPICS[topic]) for topic in topics], [message(topic, data) for topic in topics])


async def test_seqs_start_with_one_and_rise_by_one(log: Log) -> None:
    assert (log.oldest_seq, log.newest_seq) == (0, 0)
    assert await append(log, 0, 1, 0) == 1
    assert await append(log, 1) == 4
    assert (log.oldest_seq, log.newest_seq) == (1, 4)


async def test_each_record_names_the_one_before_it_on_its_stream(log: Log) -> None:
    await append(log, 0, 1, 0, 0)
    await append(log, 1, 2)
    chunks = await log.read(0)
    assert [prev for chunk in chunks for prev in chunk.prev_seqs] == [0, 0, 1, 3, 2, 0]


async def test_the_very_objects_come_back_while_they_are_in_memory(log: Log) -> None:
    sent = [message(0), message(1)]
    await log.append([log.stream_id(TOPICS[0]), log.stream_id(TOPICS[1])], sent)
    (chunk,) = log.tail(0) or []
    assert [read is given for read, given in zip(chunk.messages, sent, strict=True)] == [True, True]
    assert chunk.data == [given.SerializeToString() for given in sent]


async def test_appends_at_once_share_a_transaction_and_keep_their_order(log: Log) -> None:
    firsts = await asyncio.gather(*(append(log, 0, 1) for _ in range(50)))
    assert firsts == list(range(1, 101, 2))


async def test_a_great_batch_is_cut_into_chunks_without_a_hole(log: Log) -> None:
    await append(log, *([0, 1, 2] * 500))
    chunks = log.tail(0) or []
    assert [chunk.first_seq for chunk in chunks] == [1, 513, 1025]
    assert chunks[-1].last_seq == log.newest_seq == 1500


async def test_read_keeps_its_limits_but_gives_one_record_in_any_case(log: Log) -> None:
    await append(log, 0, 0, 0, data=b"x" * 1000)
    assert sum(map(len, await log.read(0, max_records=2))) == 2
    assert sum(map(len, await log.read(0, max_bytes=1))) == 1
    assert sum(map(len, await log.read(1, until=2))) == 1
    assert await log.read(3) == []


async def test_read_of_some_streams_only(log: Log) -> None:
    await append(log, 0, 1, 0, 2)
    await append(log, 1)
    wanted = {log.stream_id(TOPICS[1]), log.stream_id(TOPICS[2])}
    assert [seq for chunk in await log.read(0, streams=wanted) for seq in chunk.seqs] == [2, 4, 5]
    assert (await log.scan(0, max_records=9, max_bytes=9999, streams={99})).covered == 5


async def test_streams_are_distinguished_by_their_sink(log: Log) -> None:
    one, other = log.stream_id(TOPICS[0]), log.stream_id(TOPICS[0], uris.uri("cloud", 1, 1, 0))
    assert one != other
    assert log.stream(other).sink == uris.uri("cloud", 1, 1, 0)
    assert log.stream_id(TOPICS[0]) == one
    assert [stream.id for stream in log.streams()] == [one, other]


async def test_too_much_waiting_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "APPEND_RECORDS_MAX", 4)
    async with await Log.open(tmp_path / "l.db", name="test") as log:
        first = append(log, 0, 0, 0)
        with pytest.raises(UStatusError) as error:
            await append(log, 0, 0)
        assert error.value.code == UCode.RESOURCE_EXHAUSTED
        assert await first == 1
        assert await append(log, 0, 0) == 4


async def test_waiting_ends_with_the_record(log: Log) -> None:
    appended = asyncio.Event()
    end = log.on_append(appended.set)
    waiting = asyncio.ensure_future(log.wait(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    await append(log, 0)
    await asyncio.wait_for(waiting, 5)
    assert appended.is_set()
    end()
    appended.clear()
    await append(log, 0)
    assert not appended.is_set()


async def test_a_closed_log_refuses_and_wakes_who_waits(log: Log) -> None:
    waiting = asyncio.ensure_future(log.wait(0))
    await asyncio.sleep(0)
    await log.close()
    with pytest.raises(UStatusError):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(UStatusError) as error:
        await append(log, 0)
    assert error.value.code == UCode.UNAVAILABLE


async def test_ids_are_found_and_the_newest_are_returned(log: Log) -> None:
    sent = [message(place % 4) for place in range(20)]
    for batch in (sent[:7], sent[7:]):
        await log.append([log.stream_id(m.attributes.source) for m in batch], batch)
    ids = [uuids.to_bytes(m.attributes.id) for m in sent]
    known = [(log.stream_id(m.attributes.source), id) for m, id in zip(sent, ids, strict=True)]
    assert await log.recent_ids(5) == known[-5:]
    assert await log.recent_ids(100) == known
    assert [await log.seq_of_id(id) for id in ids] == list(range(1, 21))
    assert await log.seq_of_id(bytes(16)) is None


async def test_ids_are_found_beyond_a_seq_in_bounded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("history.file.reader.FIND_CHUNKS_MAX", 3)
    path, sent = tmp_path / "history.db", [message(place % 4) for place in range(20)]
    async with await Log.open(path, name="ids") as log:
        for one in sent:
            await log.append([log.stream_id(one.attributes.source)], [one])
        keys = [(log.stream_id(one.attributes.source), uuids.to_bytes(one.attributes.id)) for one in sent]
        wanted = {id for _, id in (keys[2], keys[8], keys[15])} | {bytes(16)}
        found, steps, at = dict[tuple[int, bytes], int](), 0, 5
        while at < 20:
            here, at = await find_ids(log, wanted, at, 20)
            found |= here
            steps += 1
        assert found == {keys[8]: 9, keys[15]: 16}
        assert steps > 3
        assert (await find_ids(log, wanted, 8, 9))[0] == {keys[8]: 9}
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE chunk SET ids = 5 WHERE first_seq = 9")
    async with await Log.open(path, name="ids") as log:
        assert (await find_ids(log, wanted, 8, 10))[0] == {}, "a damaged chunk says nothing, and fails nobody"


async def test_cursors(log: Log) -> None:
    assert log.cursors.seq("peer") is None
    log.cursors.set("peer", 7)
    log.cursors.set("peer", 9)
    assert (log.cursors.seq("peer"), log.cursors.seqs()) == (9, {"peer": 9})
    log.cursors.drop("peer")
    log.cursors.drop("peer")
    assert log.cursors.seqs() == {}


async def test_a_restart_keeps_records_streams_cursors_and_chains(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.db"
    async with await Log.open(path, name="test") as log:
        await append(log, 0, 1, 0)
        log.cursors.set("peer", 2)
        incarnation = log.incarnation
        assert len(incarnation) == 16
    async with await Log.open(path, name="test") as log:
        assert (log.incarnation, log.oldest_seq, log.newest_seq, log.cursors.seq("peer")) == (incarnation, 1, 3, 2)
        assert await append(log, 1, 0) == 4
        chunks = await log.read(0)
        assert [prev for chunk in chunks for prev in chunk.prev_seqs] == [0, 0, 1, 2, 3]
        assert [log.stream(id).source for chunk in chunks for id in chunk.streams] == [
            TOPICS[place] for place in (0, 1, 0, 1, 0)
        ]
        assert [stream.records for stream in log.streams()] == [3, 2]
        assert log.tail(0) is None
        assert log.tail(3) is not None


async def test_a_volatile_log_is_another_one_each_time() -> None:
    async with await Log.open(None, name="a") as one, await Log.open(None, name="b") as other:
        assert one.incarnation != other.incarnation
        assert not one.durable


async def test_a_volatile_log_forgets_the_oldest_when_its_memory_is_full() -> None:
    async with await Log.open(None, name="a", retention_bytes=50_000) as log:
        for _ in range(100):
            await append(log, 0, data=b"x" * 1000)
        assert log.extent.stored_bytes <= 50_000
        assert log.oldest_seq > 50
        assert log.floor_seq == log.oldest_seq - 1
        assert log.newest_seq == 100
        assert [seq for chunk in await log.read(0) for seq in chunk.seqs] == list(range(log.oldest_seq, 101))
