"""Which streams a log forgets, what has capacity then, and that forgetting hides no gap."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from history.file.damage import STREAM_ROW
from history.file.rows import META
from history.file.verify import verify
from history.log import streams
from history.log import streams as streams_module
from history.log.log import Log, TopicsFullError
from history.reading.acceptor import Acceptor
from history.reading.subscriber import HistoryClient
from history.service.service import HistoryService
from transports.local import LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollRequest, Position
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

AGE_MS = 60_000


def topic(place: int, authority: str = "vcu.vin") -> UUri:
    return uris.uri(authority, 0x10, 1, 0x8000 + place)


TOPICS = [topic(place) for place in range(8)]
LAST = topic(99)


def message(of: UUri) -> UMessage:
    return UMessageBuilder.publish(of).build_from_upayload(UPayload(b"x", 5))


class Bench:
    """A log with a clock and deadlines of the test."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.now = path, 1_800_000_000_000
        self.log: Log

    async def open(self, *, streams_max: int = 100, authority: int | None = None, forget_after_s: float = 0.01) -> Log:
        self.log = await Log.open(
            self.path,
            name="test",
            retention_ms=AGE_MS,
            tail_bytes=1,
            streams_max=streams_max,
            authority_streams_max=authority,
            forget_after_s=forget_after_s,
            now_ms=lambda: self.now,
        )
        return self.log

    async def append(self, *topics: UUri) -> int:
        return await self.log.append(
            [self.log.stream_id(one, wanted=True) for one in topics], [message(one) for one in topics]
        )

    async def pass_all(self) -> None:
        """Retention removes all records except one more of the topic LAST."""
        self.now += 2 * AGE_MS
        await self.append(LAST)
        newest = self.log.newest_seq
        await self.until(lambda: self.log.floor_seq >= newest - 1)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                if not self.log.durable:
                    self.log._storage.age()
                else:
                    self.log._storage.writer._next_retention = 0.0
                    self.log._storage.writer.flush()
                await asyncio.sleep(0.01)

    def known(self) -> list[int]:
        return [one.source.resource_id - 0x8000 for one in self.log.streams()]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SEARCH_AGAIN_S", 0.0)


@pytest.fixture(params=["durable", "volatile"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "l.db" if request.param == "durable" else None)
    yield made
    await made.log.close()


@pytest.fixture
async def durable(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "l.db")
    yield made
    await made.log.close()


# -- what is forgotten


async def test_streams_without_records_are_forgotten_and_all_are_reported(bench: Bench) -> None:
    log = await bench.open()
    forgotten: list[frozenset[int]] = []
    log.on_forgotten(forgotten.append)
    await bench.append(*TOPICS)
    ids = {log.stream_id(one) for one in TOPICS}
    await bench.pass_all()
    await bench.until(lambda: bench.known() == [99])
    assert frozenset().union(*forgotten) == ids
    assert (log.stream_count, log.stream_table.forgotten_count) == (1, len(TOPICS))
    assert not any(map(log.knows_stream, ids))
    assert [one.source.resource_id for one in log.stream_table.after(0, 10)] == [LAST.resource_id]


async def test_a_stream_that_never_had_a_record_is_forgotten(bench: Bench) -> None:
    log = await bench.open()
    log.stream_id(TOPICS[0])
    await bench.until(lambda: not log.stream_count)


async def test_streams_with_records_are_kept_however_long(bench: Bench) -> None:
    log = await bench.open()
    await bench.append(*TOPICS)
    for _ in range(5):
        log.stream_table._sweep()
        await asyncio.sleep(0.02)
    assert log.stream_count == len(TOPICS)


async def test_a_topic_at_the_edge_of_retention_keeps_its_number(bench: Bench) -> None:
    log = await bench.open(forget_after_s=3_600)
    await bench.append(TOPICS[0])
    id = log.stream_id(TOPICS[0])
    for _ in range(3):
        await bench.pass_all()
        log.stream_table._sweep()
        await bench.append(TOPICS[0])
    assert log.stream_id(TOPICS[0]) == id
    assert not log.stream_table.forgotten_count


async def test_what_somebody_has_in_hand_is_kept(bench: Bench) -> None:
    log = await bench.open()
    await bench.append(TOPICS[0], TOPICS[1])
    held = {log.stream_id(TOPICS[0])}
    log.keep_streams(lambda: held)
    await bench.pass_all()
    await bench.until(lambda: bench.known() == [0, 99])
    held.clear()
    await bench.until(lambda: bench.known() == [99])


async def test_what_is_queued_is_not_forgotten(durable: Bench) -> None:
    log = await durable.open(streams_max=8)
    await durable.append(TOPICS[0])
    await durable.pass_all()
    id = log.stream_id(TOPICS[0])
    queued = log.append([id], [message(TOPICS[0])])
    log.stream_table._forget(at_once=True)
    assert log.knows_stream(id)
    await queued
    assert log.stream_id(TOPICS[0]) == id


async def test_who_appends_with_a_forgotten_number_gets_the_new_one(bench: Bench) -> None:
    log = await bench.open()
    sink = uris.uri("cloud", 1, 1, 0)
    notification = UMessageBuilder.notification(TOPICS[1], sink).build()
    await bench.append(TOPICS[0])
    old = [log.stream_id(TOPICS[0]), log.stream_id(TOPICS[1], sink)]
    await bench.pass_all()
    await bench.until(lambda: bench.known() == [99])
    seq = await log.append([old[0], old[1], old[0]], [message(TOPICS[0]), notification, message(TOPICS[0])])
    (chunk,) = await log.read(seq - 1)
    new = [log.stream_id(TOPICS[0]), log.stream_id(TOPICS[1], sink)]
    assert chunk.streams == [new[0], new[1], new[0]]
    assert chunk.prev_seqs == [0, 0, seq]
    assert not set(new) & set(old)


async def test_nothing_is_forgotten_while_the_log_can_not_be_written(durable: Bench) -> None:
    log = await durable.open()
    await durable.append(TOPICS[0])
    await durable.pass_all()
    log.healthy = False
    log.stream_table._forget(at_once=True)
    assert log.knows_stream(log.stream_id(TOPICS[0]))


# -- numbers


async def test_numbers_are_never_used_again_also_not_after_a_restart(durable: Bench) -> None:
    log = await durable.open()
    await durable.append(*TOPICS[:4], LAST, *TOPICS[4:])
    highest = max(one.id for one in log.streams())
    await durable.pass_all()
    await durable.until(lambda: durable.known() == [99])
    await log.close()
    log = await durable.open()
    assert not log.damage
    assert (durable.known(), log.stream_id(TOPICS[3])) == ([99], highest + 1)
    await log.close()
    assert verify(durable.path).is_sound  # type: ignore[arg-type]


async def test_what_the_last_run_left_is_forgotten_after_a_restart(durable: Bench) -> None:
    log = await durable.open(forget_after_s=3_600)
    await durable.append(*TOPICS)
    await durable.pass_all()
    await log.close()
    await durable.open()
    await durable.until(lambda: durable.known() == [99])


async def test_the_number_that_is_next_is_damaged(durable: Bench) -> None:
    log = await durable.open()
    await durable.append(LAST, *TOPICS)
    highest = max(one.id for one in log.streams())
    await durable.pass_all()
    await durable.until(lambda: durable.known() == [99])
    await log.close()
    with sqlite3.connect(durable.path) as db:  # type: ignore[arg-type]
        db.execute("UPDATE meta SET value = x'00112233' WHERE key = 'next_stream'")
    for _ in range(2):
        log = await durable.open()
        assert log.stream_id(TOPICS[3]) > highest
        await log.close()


async def test_a_vanished_row_is_reported_though_others_are_forgotten(durable: Bench) -> None:
    log = await durable.open()
    await durable.append(*TOPICS)
    await durable.pass_all()
    await durable.until(lambda: durable.known() == [99])
    for place in (1, 2):
        log.stream_id(TOPICS[place], wanted=True)
    await durable.append(TOPICS[1])
    await log.close()
    with sqlite3.connect(durable.path) as db:  # type: ignore[arg-type]
        db.execute("DELETE FROM stream WHERE id IN (SELECT id FROM stream ORDER BY id DESC LIMIT 2)")
    log = await durable.open(forget_after_s=3_600)
    assert {damage.kind for damage in log.damage} == {STREAM_ROW}
    assert durable.known() == [99, 1]  # one stream is found again in its record; the other has no record
    await log.close()
    log = await durable.open(forget_after_s=3_600)
    assert durable.known() == [99, 1]
    with sqlite3.connect(durable.path) as db:  # type: ignore[arg-type]
        assert dict(META.read(db, []))["streams"] == 2


# -- room


async def test_a_flood_of_one_authority_is_that_authoritys_trouble(bench: Bench) -> None:
    log = await bench.open(streams_max=32, authority=4)
    for place in range(4):
        log.stream_id(topic(place, "flood"))
    with pytest.raises(TopicsFullError) as error:
        log.stream_id(topic(4, "flood"))
    assert (error.value.code, error.value.reason) == (UCode.RESOURCE_EXHAUSTED, "authority_topics_full")
    assert log.stream_id(topic(0, "honest"))
    assert log.stream_id(topic(0, "flood"))  # it is known
    assert log.stream_id(topic(4, "flood"), wanted=True)


async def test_what_is_wanted_has_room_where_others_have_none(bench: Bench) -> None:
    log = await bench.open(streams_max=16)
    await bench.append(*(topic(place) for place in range(14)))
    with pytest.raises(TopicsFullError) as error:
        log.stream_id(topic(14))
    assert (error.value.code, error.value.reason) == (UCode.RESOURCE_EXHAUSTED, "topics_full")
    for place in (14, 15):
        log.stream_id(topic(place), wanted=True)
    with pytest.raises(TopicsFullError):
        log.stream_id(topic(16), wanted=True)
    assert log.stream_id(topic(3))


async def test_what_was_written_longest_ago_makes_room_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "FORGOTTEN_AT_ONCE", 2)
    log = await bench.open(streams_max=8, forget_after_s=3_600)
    for place in (3, 0, 1, 2, 3):
        await bench.append(topic(place))
    await bench.pass_all()
    await bench.append(topic(0))
    for place in (5, 6):
        log.stream_id(topic(place))
    assert log.stream_count == 7  # only the reserve is left
    log.stream_id(topic(7))
    assert bench.known() == [3, 0, 99, 5, 6, 7]  # 1 and 2 were written before 3, and 0 has a record


# -- what readers conclude


def answers(world: tuple[Bench, HistoryClient]) -> Callable[..., object]:
    async def poll(positions: int, *topics: UUri) -> tuple[list[int], list[tuple[int, int]]]:
        bench, client = world
        given = [Position(incarnation=bench.log.incarnation, seq=positions)]
        response = await client.poll(PollRequest(topics=topics, positions=given))
        acceptor = Acceptor({bench.log.incarnation: positions})
        accepted = acceptor.accept(response)
        assert not acceptor.dropped
        assert all(gap.reason == Gap.REASON_RETENTION for gap in accepted.gaps)
        return [one.seq for one in accepted.records], [(gap.after_seq, gap.before_seq) for gap in accepted.gaps]

    return poll


@pytest.fixture
async def world(bench: Bench) -> AsyncIterator[tuple[Bench, HistoryClient]]:
    await bench.open()
    network, local, far = LocalNetwork(), LocalUriProvider("gateway", 4, 1), LocalUriProvider("cloud", 0x20, 1)
    async with LocalTransport.on(network, local) as transport, LocalTransport.on(network, far) as client_transport:
        service = HistoryService(transport, local, [bench.log])
        await service.start()
        rpc = InMemoryRpcClient(client_transport, far)
        await rpc.open()
        yield bench, HistoryClient(rpc, uris.uri("gateway", 4, 1))
        await rpc.close()
        await service.stop()


async def test_the_gap_of_a_topic_that_was_forgotten_and_came_back_is_reported(
    world: tuple[Bench, HistoryClient],
) -> None:
    bench, poll = world[0], answers(world)
    await bench.append(TOPICS[0], TOPICS[0], TOPICS[0])  # the reader has had the first one
    assert await poll(0, TOPICS[0]) == ([1, 2, 3], [])  # type: ignore[misc]
    await bench.pass_all()
    await bench.until(lambda: bench.known() == [99])
    assert await poll(1, TOPICS[0]) == ([], [(1, 4)])  # type: ignore[misc]
    await bench.append(TOPICS[0])
    assert await poll(1, TOPICS[0]) == ([5], [(1, 4)])  # type: ignore[misc]
    assert await poll(1, uris.pattern(resource=0x8000)) == ([5], [(1, 4)])  # type: ignore[misc]
    assert await poll(3, TOPICS[0]) == ([5], [])  # type: ignore[misc]


async def test_no_gap_is_reported_to_a_reader_of_another_authority(world: tuple[Bench, HistoryClient]) -> None:
    bench, poll = world[0], answers(world)
    await bench.append(topic(0, "other"), TOPICS[0])
    await bench.pass_all()
    await bench.until(lambda: bench.known() == [99])
    await bench.append(topic(0, "third"))
    assert await poll(0, topic(0, "third")) == ([4], [])  # type: ignore[misc]
    assert await poll(0, topic(5, "other")) == ([], [(0, 3)])  # type: ignore[misc]


async def test_the_gap_is_reported_also_after_a_restart_and_where_very_many_authorities_are_forgotten(
    durable: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "FORGOTTEN_AUTHORITIES_MAX", 4)
    log = await durable.open()
    await durable.append(*(topic(0, f"v{place}") for place in range(6)))
    await durable.pass_all()
    await durable.until(lambda: durable.known() == [99])
    for _ in range(2):
        assert [log.stream_table.forgotten_seq({f"v{place}"}) for place in range(6)] == [2, 2, 3, 4, 5, 6]
        assert (log.stream_table.forgotten_seq({"never"}), log.stream_table.forgotten_seq(None)) == (2, 6)
        await log.close()
        log = await durable.open()
