"""GaplessSubscriber: every record once and in order, whatever happens on the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.log.log import Log
from history.reading import acceptor as acceptor_module
from history.reading import client as client_module
from history.reading import subscriber as subscriber_module
from history.reading.acceptor import Acceptor, ReaderState
from history.reading.subscriber import CursorFile, GaplessSubscriber, HistoryClient
from history.records import witness
from history.records.record import Record
from tests.history.world import SERVICE, HistoryWorld
from tests.tiers import seeds
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollRequest, PollResponse, Position, RecordBatch, Witness
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

TOPICS = [uris.uri("vcu.vin", 0x10, 1, 0x8000 + place) for place in range(5)]
LOG = b"L" * 16


def serialised(topic: int, number: int = 0) -> bytes:
    return (
        UMessageBuilder.publish(TOPICS[topic])
        .build_from_upayload(UPayload(str(number).encode(), 4))
        .SerializeToString()
    )


class World(HistoryWorld):
    """One log, on disk or in memory."""

    async def begin(self, path: Path | None) -> None:
        await self.open(await Log.open(path, name="test"))
        self.client = HistoryClient(self.rpc, SERVICE, timeout_ms=2_000)

    @property
    def log(self) -> Log:
        return self.logs[0]

    async def append(self, first: int, count: int, log: Log | None = None) -> None:
        """Messages numbered from `first`, over the topics in turn."""
        numbers = range(first, first + count)
        messages = [
            UMessageBuilder.publish(TOPICS[number % 5]).build_from_upayload(UPayload(str(number).encode(), 4))
            for number in numbers
        ]
        await self.append_all(log or self.log, messages)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World()
    await made.begin(tmp_path / "l.db")
    yield made
    await made.close()


def number(record: Record) -> int:
    return int(record.message.payload)


async def take(subscriber: GaplessSubscriber, count: int) -> list[int]:
    async with asyncio.timeout(30):
        return [number(await anext(subscriber)) for _ in range(count)]


async def test_what_was_there_and_what_comes(world: World) -> None:
    await world.append(0, 10)
    async with GaplessSubscriber(world.client, TOPICS) as subscriber:
        assert await take(subscriber, 10) == list(range(10))
        assert subscriber.connected
        await world.append(10, 1_200)
        assert await take(subscriber, 1_200) == list(range(10, 1_210))
        assert (subscriber.gaps, dict(subscriber.dropped)) == (0, {})


async def at_the_end(world: World, subscriber: GaplessSubscriber) -> None:
    """Until it has begun there."""
    async with asyncio.timeout(5):
        while not subscriber.connected and not world.service._waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_start_at_the_end(world: World) -> None:
    await world.append(0, 10)
    async with GaplessSubscriber(world.client, start=PollRequest(latest=True)) as subscriber:
        await at_the_end(world, subscriber)
        await world.append(10, 3)
        assert await take(subscriber, 3) == [10, 11, 12]


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_log_that_is_new_is_read_from_its_beginning(world: World, tmp_path: Path, restarts: bool) -> None:
    """The gateway was restarted and has another log in memory. A reader that started at the end has been there
    since."""
    await world.append(0, 10)
    path, start = tmp_path / "cursor", PollRequest(latest=True)
    memory = await Log.open(None, name="memory")
    async with contextlib.AsyncExitStack() as stack:
        subscriber = GaplessSubscriber(world.client, start=start, cursor_path=path)
        await stack.enter_async_context(subscriber)
        await at_the_end(world, subscriber)
        await world.append(10, 1)
        assert await take(subscriber, 1) == [10]
        await subscriber.commit()
        if restarts:
            await stack.aclose()
        await world.service.stop()
        world.logs.append(memory)
        await world.append(20, 5, memory)
        await world.serve()
        if restarts:
            subscriber = GaplessSubscriber(world.client, start=start, cursor_path=path)
            await stack.enter_async_context(subscriber)
        assert await take(subscriber, 5) == [20, 21, 22, 23, 24]


async def test_the_cursor_file_makes_it_at_least_once_across_restarts(world: World, tmp_path: Path) -> None:
    await world.append(0, 100)
    path = tmp_path / "deep" / "cursor.json"
    async with GaplessSubscriber(world.client, cursor_path=path, max_records=10) as subscriber:
        assert await take(subscriber, 35) == list(range(35))
        await subscriber.commit()
        assert subscriber.positions == {world.log.incarnation: 35}
    async with GaplessSubscriber(world.client, cursor_path=path, max_records=10) as subscriber:
        assert await take(subscriber, 10) == list(range(35, 45))  # not committed: they come again
    async with GaplessSubscriber(world.client, cursor_path=path, max_records=10) as subscriber:
        again = await take(subscriber, 65)
        assert again == list(range(35, 100))


async def test_the_cursor_is_saved_while_nothing_comes(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the timer of the event loop ends a little before its time, as asyncio allows."""
    real, path = asyncio.timeout_at, tmp_path / "cursor"
    monkeypatch.setattr(subscriber_module, "CURSOR_SAVE_MS", 50)
    monkeypatch.setattr(asyncio, "timeout_at", lambda at: real(None if at is None else at - 0.02))
    async with GaplessSubscriber(world.client, cursor_path=path) as subscriber:
        for taken in (10, 20):
            await world.append(taken - 10, 10)
            await take(subscriber, 10)
            waiting = asyncio.ensure_future(subscriber.next_batch())
            async with asyncio.timeout(30):
                while not path.exists() or json.loads(path.read_text())["positions"] != {
                    world.log.incarnation.hex(): taken
                }:
                    assert not waiting.done()
                    await asyncio.sleep(0.01)
            waiting.cancel()


async def test_a_save_that_was_given_up_does_not_replace_a_newer_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that commits is cancelled while the disk is slow; then the subscriber is closed."""
    await world.append(0, 20)
    path, loop, begun, goes_on = tmp_path / "cursor", asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    save, saved = CursorFile.save, list[int]()

    def slow(self: CursorFile, places: ReaderState, epochs: dict[str, object] | None = None) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert goes_on.wait(30)
        save(self, places, epochs)
        saved.extend(places.positions.values())

    monkeypatch.setattr(CursorFile, "save", slow)
    async with GaplessSubscriber(world.client, cursor_path=path, max_records=10) as subscriber:
        await take(subscriber, 7)
        committing = asyncio.create_task(subscriber.commit())
        await begun.wait()
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        await take(subscriber, 8)
        closing = asyncio.create_task(subscriber.close())
        await asyncio.sleep(0)
        goes_on.set()
        await closing
    assert saved == sorted(saved)
    assert len(saved) == 2
    assert CursorFile(path).load().positions == {world.log.incarnation: saved[-1]}


async def test_breaking_off_the_iteration_loses_nothing(world: World) -> None:
    await world.append(0, 20)
    async with GaplessSubscriber(world.client) as subscriber:
        seen = []
        async for record in subscriber:
            seen.append(number(record))
            if len(seen) == 7:
                break
        assert seen + await take(subscriber, 13) == list(range(20))


async def test_the_consumers_cursor_follows(world: World) -> None:
    await world.append(0, 5)
    async with GaplessSubscriber(world.client, consumer="app", lease_ms=60_000) as subscriber:
        await take(subscriber, 5)
        await subscriber.commit()
        await world.append(5, 1)
        await take(subscriber, 1)
        await world.append(6, 1)
        await take(subscriber, 1)
        assert (world.log.cursors.seq("consumer:app") or 0) >= 5


async def test_an_absent_service_is_asked_again_and_its_absence_reported(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_MS_MIN", 1)
    connected: asyncio.Queue[bool] = asyncio.Queue()
    await world.append(0, 3)
    client = HistoryClient(world.rpc, SERVICE, timeout_ms=200)
    async with GaplessSubscriber(client, on_connected=connected.put_nowait, wait_ms_max=300) as subscriber:
        assert await take(subscriber, 3) == [0, 1, 2]
        assert await asyncio.wait_for(connected.get(), 5)
        await world.service.stop()
        assert not await asyncio.wait_for(connected.get(), 10)
        assert not subscriber.connected
        await world.append(3, 3)
        await world.serve()
        assert await take(subscriber, 3) == [3, 4, 5]
        assert await asyncio.wait_for(connected.get(), 5)


async def test_a_refusal_ends_the_iteration(world: World) -> None:
    async with GaplessSubscriber(world.client, [uris.uri("a", 1, 1, 5)]) as subscriber:
        for _ in range(2):
            with pytest.raises(UStatusError) as error:
                await asyncio.wait_for(anext(subscriber), 5)
            assert error.value.code == UCode.INVALID_ARGUMENT


async def test_close_ends_who_waits(world: World) -> None:
    subscriber = GaplessSubscriber(world.client)
    async with subscriber:
        waiting = asyncio.ensure_future(subscriber.next_batch())
        await asyncio.sleep(0)
    with pytest.raises(UStatusError):
        await asyncio.wait_for(waiting, 5)


async def test_a_replaced_log_is_one_gap_followed_by_all_its_records() -> None:
    world = World()
    await world.begin(None)
    gaps: list[Gap] = []
    await world.append(0, 5)
    async with GaplessSubscriber(world.client, on_gap=gaps.append) as subscriber:
        await take(subscriber, 5)
        lost = world.log.incarnation
        await world.service.stop()
        await world.log.close()
        world.logs = [await Log.open(None, name="anew")]
        await world.append(5, 5)
        await world.serve()
        assert await take(subscriber, 5) == [5, 6, 7, 8, 9]
        assert [(gap.reason, gap.incarnation, gap.after_seq) for gap in gaps] == [(Gap.REASON_INCARNATION, lost, 5)]
        assert subscriber.gaps == 1
    await world.close()


# -- a log that went back


async def restored(world: World, path: Path, copy: Path) -> None:
    """The streamer starts again with `path` as it was when `copy` was made."""
    await world.service.stop()
    await world.log.close()
    shutil.rmtree(path.parent)
    shutil.copytree(copy, path.parent)
    await served(world, await Log.open(path, name="restored"))


async def served(world: World, *logs: Log) -> None:
    world.logs = list(logs)
    await world.serve()


@pytest.fixture
async def copied(tmp_path: Path) -> AsyncIterator[tuple[World, Path, Path]]:
    """A log of 100 records, the path of its file, and a copy of its folder."""
    world, path, copy = World(), tmp_path / "data" / "l.db", tmp_path / "copy"
    await world.begin(path)
    await world.append(0, 100)
    await world.service.stop()
    await world.log.close()
    shutil.copytree(path.parent, copy)
    await served(world, await Log.open(path, name="test"))
    yield world, path, copy
    await world.close()


@pytest.mark.parametrize("grown", [0, 50, 100, 150])
@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_log_that_went_back_is_noticed_whatever_came_since(
    copied: tuple[World, Path, Path], tmp_path: Path, grown: int, is_restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, path, copy = copied
    monkeypatch.setattr(client_module, "BACKOFF_MS_MIN", 1)
    gaps: list[Gap] = []

    def reading() -> GaplessSubscriber:
        return GaplessSubscriber(
            world.client, cursor_path=tmp_path / "cursor", max_records=10, on_gap=gaps.append, wait_ms_max=300
        )

    subscriber = reading()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(subscriber)
        await world.append(100, 100)
        assert await take(subscriber, 200) == list(range(200))
        await subscriber.commit()
        if is_restarted:
            await subscriber.close()
            subscriber = reading()
        await restored(world, path, copy)
        if grown:
            await world.append(1_000, grown)
        if is_restarted:
            await stack.enter_async_context(subscriber)
        last = 1_000 + grown - 1 if grown else 99
        seen = await take(subscriber, 1)
        while seen[-1] != last:
            seen += await take(subscriber, 1)
    assert [(gap.reason, gap.incarnation, gap.after_seq) for gap in gaps] == [
        (Gap.REASON_CORRUPTION, world.log.incarnation, 200)
    ]
    agreed = gaps[0].before_seq - 1
    assert 0 < agreed <= 100, "some of what was read is known to be there still"
    assert seen == [*range(agreed, 100), *range(1_000, 1_000 + grown)]


async def test_a_sound_log_is_no_gap_after_a_restart(copied: tuple[World, Path, Path], tmp_path: Path) -> None:
    world, path, _ = copied
    for _ in range(3):
        async with GaplessSubscriber(world.client, cursor_path=tmp_path / "cursor") as subscriber:
            await world.append(0, 10)
            await take(subscriber, 10)
            await subscriber.commit()
            assert subscriber.gaps == 0
        await world.service.stop()
        await world.log.close()
        await served(world, await Log.open(path, name="again"))


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=300))
def test_what_is_known_is_little_and_reaches_far_back(steps: list[int]) -> None:
    known: witness.Known = {}
    newest, answered = 0, []
    for step in steps:
        newest += step
        answered.append(newest)
        known = witness.learn(known, Position(seq=newest, witnesses=[Witness(seq=newest, digest=b"%d" % newest)]))
    assert newest in known
    assert len(known) <= witness.KNOWN_MAX < witness.WITNESSES_MAX
    assert known.items() <= {seq: b"%d" % seq for seq in answered}.items()
    assert min(known) == answered[0] or newest - min(known) > 1 << 31


# -- a ring in memory


async def test_a_volatile_log_that_gave_nothing_may_vanish_and_one_that_was_read_is_a_gap(world: World) -> None:
    gaps: list[Gap] = []
    ring = await Log.open(None, name="ring")
    await world.service.stop()
    await served(world, world.log, ring)
    async with GaplessSubscriber(world.client, [TOPICS[0]], on_gap=gaps.append, wait_ms_max=100) as subscriber:
        for has_records in (False, True):
            # of another topic: the position moves, but nothing is had
            message = UMessageBuilder.publish(TOPICS[3]).build()
            await ring.append([ring.stream_id(TOPICS[3])], [message])
            if has_records:
                message = UMessageBuilder.publish(TOPICS[0]).build_from_upayload(UPayload(b"7", 4))
                await ring.append([ring.stream_id(TOPICS[0])], [message])
                assert await take(subscriber, 1) == [7]
            async with asyncio.timeout(10):
                while subscriber._acceptor.state.positions.get(ring.incarnation) != ring.newest_seq:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await world.service.stop()
            lost, ring = ring, await Log.open(None, name="ring")
            await served(world, world.log, ring)
            await world.append(0, 1)
            assert await take(subscriber, 1) == [0]
            assert [(gap.reason, gap.incarnation) for gap in gaps] == [
                (Gap.REASON_INCARNATION, lost.incarnation)
            ] * has_records
            await lost.close()
    await ring.close()


class Faulty(HistoryClient):
    """Loses calls, and answers: late ones again, records left out, doubled or out of order, cut columns. All from one
    seed."""

    def __init__(self, client: HistoryClient, seed: int) -> None:
        vars(self).update(vars(client))
        self._client, self._rng = client, random.Random(seed)
        self._old: list[PollResponse] = []
        self.faults = 0

    async def poll(self, request: PollRequest | None = None, *, patience_ms: int | None = None) -> PollResponse:
        rng = self._rng
        if rng.random() < 0.1:
            self.faults += 1
            raise UStatusError(rng.choice([UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED]), "lost on the way")
        response = await self._client.poll(request)
        self._old.append(response)
        if rng.random() < 0.15:
            self.faults += 1
            return rng.choice(self._old)
        changed = PollResponse()
        changed.CopyFrom(response)
        for batch in changed.batches:
            if rng.random() < 0.4:
                self.faults += 1
                self._spoil(batch)
        return changed

    def _spoil(self, batch: RecordBatch) -> None:
        records = list(zip(batch.seq, batch.prev_seq, batch.time_ms, batch.message, strict=True))
        place = self._rng.randrange(len(records))
        kind = self._rng.randrange(4)
        if kind == 0:
            del records[place]
        elif kind == 1:
            records.insert(place, records[place])
        elif kind == 2:
            self._rng.shuffle(records)
        for name, column in zip(("seq", "prev_seq", "time_ms", "message"), zip(*records, strict=True), strict=False):
            batch.ClearField(name)  # type: ignore[arg-type]
            getattr(batch, name).extend(column)
        if kind == 3:
            del batch.message[-1]


@pytest.mark.parametrize("seed", seeds(8, quick=2))
async def test_under_faults_every_record_comes_once_and_in_order(
    world: World, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_MS_MIN", 1)
    monkeypatch.setattr(client_module, "PAUSE_MS", 1)
    monkeypatch.setattr(acceptor_module, "REFUSED_MAX", 1_000)
    client = Faulty(world.client, seed)
    async with GaplessSubscriber(client, max_records=23, wait_ms_max=50, rng=random.Random(seed)) as subscriber:

        async def feed() -> None:
            for first in range(0, 600, 40):
                await world.append(first, 40)
                await asyncio.sleep(0.002)
            # One more of each topic: what is lost at the very end shows only when something follows.
            for _ in range(100):
                await world.append(600, 5)
                await asyncio.sleep(0.02)

        feeding = asyncio.create_task(feed())
        seen: dict[int, list[int]] = {topic: [] for topic in range(5)}
        async with asyncio.timeout(30):
            while any(not numbers or numbers[-1] < 600 for numbers in seen.values()):
                record = await anext(subscriber)
                value = number(record)
                if not seen[value % 5] or seen[value % 5][-1] < 600:
                    seen[value % 5].append(value)
        feeding.cancel()
        assert client.faults > 5
        for topic, numbers in seen.items():
            assert numbers == list(range(topic, 605, 5))
        assert subscriber.gaps == 0


# -- Acceptor


MESSAGES = [serialised(topic) for topic in range(5)]


def answer(records: list[tuple[int, int, int]], next_: int, gaps: list[Gap] | None = None) -> PollResponse:
    """Records are (seq, prev_seq, topic)."""
    batch = RecordBatch(
        incarnation=LOG,
        seq=[seq for seq, _, _ in records],
        prev_seq=[prev for _, prev, _ in records],
        time_ms=[1] * len(records),
        message=[MESSAGES[topic] for _, _, topic in records],
    )
    return PollResponse(batches=[batch], next=[Position(incarnation=LOG, seq=next_)], gaps=gaps or [])


def test_a_missing_record_is_noticed_even_across_answers() -> None:
    acceptor = Acceptor({LOG: 0})
    acceptor.accept(answer([(1, 0, 0), (2, 0, 1)], 9))  # 5 of topic 0 was lost from this answer
    refused = acceptor.accept(answer([(10, 5, 0)], 10))
    assert (refused.records, refused.state.positions) == ([], {LOG: 1})
    accepted = acceptor.accept(answer([(2, 0, 1), (5, 1, 0), (10, 5, 0)], 10))
    assert [record.seq for record in accepted.records] == [5, 10]
    assert acceptor.dropped == {"refused": 1, "behind_refused": 0, "duplicate": 1}


def test_a_gap_lets_the_chain_go_on() -> None:
    acceptor = Acceptor({LOG: 1})
    gap = Gap(reason=Gap.REASON_RETENTION, incarnation=LOG, after_seq=1, before_seq=100)
    accepted = acceptor.accept(answer([(100, 60, 0)], 100, [gap]))
    assert ([record.seq for record in accepted.records], accepted.gaps) == ([100], [gap])


@pytest.mark.parametrize("reason", [Gap.REASON_RETENTION, Gap.REASON_CORRUPTION])
def test_a_gap_behind_the_position_is_none(reason: Gap.Reason.ValueType) -> None:
    """A push that waits at the position of its follower before the poll."""
    acceptor = Acceptor({LOG: 1})
    acceptor.accept(answer([(4, 0, 0)], 9))
    behind, beyond = (Gap(reason=reason, incarnation=LOG, after_seq=1, before_seq=seq) for seq in (10, 11))
    accepted = acceptor.accept(answer([(12, 4, 0)], 12, [behind]))
    assert ([record.seq for record in accepted.records], accepted.gaps) == ([12], [])
    acceptor = Acceptor({LOG: 9})
    assert acceptor.accept(answer([(12, 4, 0)], 12, [beyond])).gaps == [beyond]


def test_a_gap_before_the_start_of_an_answer_is_reported_to_a_reader_without_position() -> None:
    acceptor = Acceptor()
    gap = Gap(reason=Gap.REASON_RETENTION, incarnation=LOG, after_seq=0, before_seq=10)
    response = answer([(12, 4, 0)], 12, [gap])
    response.begin.append(Position(incarnation=LOG, seq=9))
    assert acceptor.accept(response).gaps == [gap]


def test_what_never_follows_becomes_a_gap() -> None:
    acceptor = Acceptor({LOG: 1})
    gaps = [gap for _ in range(acceptor_module.REFUSED_MAX + 1) for gap in acceptor.accept(answer([(9, 5, 0)], 9)).gaps]
    assert [(gap.after_seq, gap.before_seq) for gap in gaps] == [(1, 6)]
    assert acceptor.state.positions == {LOG: 9}


def test_a_message_that_is_none_is_a_gap() -> None:
    acceptor = Acceptor()
    response = answer([(1, 0, 0), (2, 1, 0), (3, 2, 0)], 3)
    response.batches[0].message[1] = b"\xff\xff"
    accepted = acceptor.accept(response)
    assert [record.seq for record in accepted.records] == [1, 3]
    assert [(gap.reason, gap.after_seq, gap.before_seq) for gap in accepted.gaps] == [(Gap.REASON_CORRUPTION, 1, 3)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_whatever_answers_leave_out_nothing_is_skipped_within_a_topic(topics: list[int], rng: random.Random) -> None:
    newest: dict[int, int] = {}
    whole = []
    for seq, topic in enumerate(topics, 1):
        whole.append((seq, newest.get(topic, 0), topic))
        newest[topic] = seq
    acceptor = Acceptor({LOG: 0})
    seen: list[int] = []
    for _ in range(20):
        after = acceptor.state.positions[LOG]
        records = [record for record in whole if record[0] > after and rng.random() < 0.7]
        accepted = acceptor.accept(answer(records, rng.randint(after, len(whole))))
        assert not accepted.gaps or acceptor.dropped["refused"] >= acceptor_module.REFUSED_MAX
        if accepted.gaps:
            return
        seen += [record.seq for record in accepted.records]
    assert len(set(seen)) == len(seen)
    for topic in set(topics):
        mine = [seq for seq, _, of in whole if of == topic]
        taken = [seq for seq in seen if topics[seq - 1] == topic]
        assert taken == mine[: len(taken)]


# -- CursorFile


def test_a_cursor_file_comes_back_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    file = CursorFile(tmp_path / "c.json")
    assert file.load() == ReaderState()
    file.save(ReaderState({LOG: 7}))
    places = ReaderState({LOG: 8}, {LOG: {3: b"three", 8: b"eight"}}, {LOG})
    file.save(places)
    assert file.load() == places
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.parametrize(
    "text", ["", "7", "[]", "{}", '{"positions": 1}', '{"positions": {"zz": 1}}', '{"positions": {"00": 1}}']
)
def test_a_broken_cursor_file_is_a_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(UStatusError, match="cursor file"):
        CursorFile(tmp_path / "c.json").load()
