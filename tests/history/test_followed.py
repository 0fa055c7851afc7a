"""A log that follows another one: the records from there and the position in it are one commit."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from history.file import rows
from history.file.load import NEXT_STREAM
from history.file.store import Store
from history.file.verify import verify
from history.file.writer import CURSORS_IDLE_S, FollowedFrom
from history.log import cursors as cursors_module
from history.log.log import Log
from history.log.storage import DurableStorage
from history.reading.subscriber import HistoryClient
from history.records.chunk import Origin
from storage.runtime import REAL
from tests.history.world import SERVICE, HistoryWorld
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

OTHER = b"o" * 16
TOPICS = [uris.uri("vcu.vin", 0x10, 1, 0x8000 + place) for place in range(3)]


def message(number: int) -> EncodedMessage:
    payload = UPayload(b"%d" % number, 5)
    return EncodedMessage.of(UMessageBuilder.publish(TOPICS[number % 3]).build_from_upayload(payload))


def from_there(*seqs: int, key: str = "other", place: bytes | None = None) -> FollowedFrom:
    return FollowedFrom([Origin(OTHER, seq) for seq in seqs], key, b"at %d" % seqs[-1] if place is None else place)


def append(log: Log, *numbers: int, followed: FollowedFrom | None = None) -> asyncio.Future[int]:
    streams = [log.stream_id(TOPICS[number % 3]) for number in numbers]
    return log.append(streams, [message(number) for number in numbers], followed)


def follow(log: Log, *seqs: int, key: str = "other") -> asyncio.Future[int]:
    """The records there say which they are."""
    return append(log, *seqs, followed=from_there(*seqs, key=key))


async def taken(log: Log) -> list[tuple[int, Origin | None]]:
    """The content and the origin of each record."""
    found: list[tuple[int, Origin | None]] = []
    after = log.floor_seq
    while chunks := await log.read(after, max_records=7):
        after = chunks[-1].last_seq
        for chunk in chunks:
            numbers = [int(one.payload) for one in chunk.messages]
            found += zip(numbers, chunk.origins or [None] * len(chunk), strict=True)
    return found


def of_there(*seqs: int) -> list[tuple[int, Origin | None]]:
    return [(seq, Origin(OTHER, seq)) for seq in seqs]


def cursors_on_disk(path: Path) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return dict(db.execute("SELECT name, seq FROM cursor").fetchall())


def on_disk(path: Path) -> dict[str, bytes]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return dict(db.execute("SELECT substr(key, 10), value FROM meta WHERE key LIKE 'followed:%'"))


class Clock:
    """The seconds that workers count."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


async def open_log(path: Path | None, clock: Clock | None = None) -> Log:
    runtime = REAL if clock is None else replace(REAL, monotonic=clock)
    return await Log.open(path, name="follower", tail_bytes=1, runtime=runtime)


@pytest.fixture(params=["durable", "volatile"])
async def log(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Log]:
    async with await open_log(tmp_path / "l.db" if request.param == "durable" else None) as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "l.db"


# -- both kinds


async def test_records_tell_where_they_come_from_and_the_place_is_known_with_them(log: Log) -> None:
    seen: list[bytes | None] = []
    log.on_append(lambda: seen.append(log.followed.position("other")))
    assert (log.followed.positions(), log.followed.position("other")) == ({}, None)
    first = follow(log, 4, 7)
    first.add_done_callback(lambda _: seen.append(log.followed.position("other")))
    assert await first == 1
    assert await append(log, 5) == 3
    assert seen[:2] == [b"at 7", b"at 7"]
    assert await taken(log) == [*of_there(4, 7), (5, None)]
    assert log.followed.positions() == {"other": b"at 7"}


async def test_appends_of_one_transaction_each_keep_theirs_and_the_last_of_a_key_holds(log: Log) -> None:
    appends = [follow(log, 1), append(log, 8, 9), follow(log, 2, 3), follow(log, 5, key="another")]
    assert await asyncio.gather(*appends) == [1, 2, 4, 6]
    assert await taken(log) == [*of_there(1), (8, None), (9, None), *of_there(2, 3), *of_there(5)]
    assert log.followed.positions() == {"other": b"at 3", "another": b"at 5"}
    wanted = {log.stream_id(TOPICS[2])}
    picked = [chunk for chunk in await log.read(0, streams=wanted) if chunk.origins]
    assert [origin for chunk in picked for origin in chunk.origins or () if origin] == [
        Origin(OTHER, n) for n in (2, 5)
    ]


async def test_a_place_moves_and_is_forgotten_without_records(log: Log) -> None:
    log.followed.keep("other", b"at 9")
    assert log.followed.position("other") == b"at 9"
    await follow(log, 12)
    log.followed.keep("other", b"at 30")
    log.followed.keep("never", None)
    assert log.followed.positions() == {"other": b"at 30"}
    log.followed.keep("other", None)
    assert log.followed.positions() == {}


async def test_only_so_many_logs_are_followed(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursors_module, "FOLLOWED_MAX", 3)
    log.followed.keep("a", b"1")
    appends = [follow(log, 1, key=key) for key in "abcd"]
    with pytest.raises(UStatusError, match="3 logs are followed") as error:
        await appends.pop()
    assert error.value.code == UCode.RESOURCE_EXHAUSTED
    await asyncio.gather(*appends)
    with pytest.raises(UStatusError) as error:
        log.followed.keep("d", b"1")
    assert error.value.code == UCode.RESOURCE_EXHAUSTED
    log.followed.keep("a", b"2")
    log.followed.keep("b", None)
    await follow(log, 2, key="d")
    assert log.followed.positions() == {"a": b"2", "c": b"at 1", "d": b"at 2"}


async def test_what_would_be_wrong_for_ever_is_a_mistake_of_the_program(path: Path) -> None:
    async with await open_log(path) as log:
        under_way = follow(log, 1)
        with pytest.raises(AssertionError, match="before the records"):
            log.followed.keep("other", b"at 2")
        for wrong in (
            from_there(1, 2),
            from_there(0),
            from_there(1 << 63),
            FollowedFrom([Origin(b"short", 1)], "other", b""),
            from_there(1, place=bytes(cursors_module.POSITION_BYTES_MAX + 1)),
        ):
            with pytest.raises(AssertionError):
                append(log, 1, followed=wrong)
        await under_way
        log.followed.keep("other", bytes(cursors_module.POSITION_BYTES_MAX))
        assert await taken(log) == of_there(1)


# -- what is on disk


async def test_a_restart_finds_all_of_it(path: Path) -> None:
    async with await open_log(path) as log:
        await asyncio.gather(follow(log, 1, 2), append(log, 7), follow(log, 3, key="another"))
        log.followed.keep("another", b"at 40")
        log.followed.keep("third", b"\0")
        log.followed.keep("gone", b"1")
    async with await open_log(path) as log:
        assert log.followed.positions() == {"other": b"at 2", "another": b"at 40", "third": b"\0", "gone": b"1"}
        assert await taken(log) == [*of_there(1, 2), (7, None), *of_there(3)]
        assert (log.damage, await log.seq_of_id(message(0).id_bytes)) == ([], None)
        assert len(await log.recent_ids(10)) == 4
        log.followed.keep("gone", None)
    assert verify(path).is_sound
    assert on_disk(path).keys() == {"other", "another", "third"}


async def test_a_fleet_s_places_are_there_after_a_restart(path: Path) -> None:
    fleet = {f"vehicle{number}": b"%d" % number * 40 for number in range(cursors_module.FOLLOWED_MAX)}
    async with await open_log(path) as log:
        for key in list(fleet)[::2]:
            log.followed.keep(key, fleet[key])
        rest = list(fleet)[1::2]
        await asyncio.gather(*(append(log, 1, followed=from_there(1, key=key, place=fleet[key])) for key in rest))
        with pytest.raises(UStatusError, match="limit"):
            log.followed.keep("one more", b"")
    async with await open_log(path) as log:
        assert log.followed.positions() == fleet


CHILD = """
import asyncio, sys
from pathlib import Path
from tests.history.test_followed import follow, open_log

async def main():
    log = await open_log(Path(sys.argv[1]))

    async def one(key):
        seq = int((log.followed.position(key) or b"at 0")[3:])
        while True:
            if seq % 4 == 3:  # the next one is not for us
                seq += 1
                log.followed.keep(key, b"at %d" % seq)
            else:
                await follow(log, *range(seq + 1, seq + 4), key=key)
                seq += 3
            print(key, seq, flush=True)

    await asyncio.gather(*(one(key) for key in "abcde"))

asyncio.run(main())
"""


async def test_after_kill_9_records_and_places_agree(path: Path) -> None:
    kept: dict[str, int] = {}
    for lines in (30, 100, 60):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, str(path), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            for _ in range(lines):
                key, seq = (await process.stdout.readline()).split()
                kept[key.decode()] = int(seq)
            process.kill()
            await process.wait()
        async with await open_log(path) as log:
            stored = [number for number, _ in await taken(log)]
            at = {key: int(place[3:]) for key, place in log.followed.positions().items()}
            assert at.keys() == kept.keys()
            assert all(seq - 1 <= at[key] for key, seq in kept.items()), "only what was passed may be passed again"
            took = sorted(number for key in at for number in range(1, at[key] + 1) if number % 4)
            assert sorted(stored) == took, "each record once, up to the place"
            assert log.damage == []


# -- a place that only moved


async def test_the_first_one_is_on_disk_soon_though_nothing_came_with_it(path: Path) -> None:
    """A follower killed before its position is stored starts again, and misses the records appended meanwhile."""
    async with await open_log(path, Clock()) as log:
        for place in (b"at 4", None, b"at 5"):
            log.followed.keep("other", place)
        async with asyncio.timeout(30):
            while on_disk(path) != {"other": b"at 5"}:  # noqa: ASYNC110 - the writer says nothing of it
                await asyncio.sleep(0.02)


async def test_it_rides_with_a_commit_or_is_written_after_a_while(path: Path) -> None:
    clock = Clock()
    async with await open_log(path, clock) as log:
        for number in (3, 4, 5):
            log.followed.keep("other", b"at %d" % number)
            await append(log, number)
        assert on_disk(path) == {"other": b"at 4"}, "a second has not passed"
        clock.seconds += 1
        await append(log, 3)
        assert on_disk(path) == {"other": b"at 5"}
        log.followed.keep("other", b"at 6")
        clock.seconds += CURSORS_IDLE_S
        async with asyncio.timeout(30):
            while on_disk(path) != {"other": b"at 6"}:  # noqa: ASYNC110 - the writer looks every second
                await asyncio.sleep(0.02)
        log.followed.keep("other", b"at 7")
    assert on_disk(path) == {"other": b"at 7"}


async def test_all_that_has_moved_is_on_disk_when_that_is_asked_for(path: Path) -> None:
    async with await open_log(path, Clock()) as log:
        for number in (1, 2, 3):
            log.followed.keep("other", b"at %d" % number)
            log.cursors.set("egress", number)
            await log.saved()
            assert on_disk(path) == {"other": b"at %d" % number}
            assert cursors_on_disk(path) == {"egress": number}


async def test_a_cursor_that_goes_back_does_so_with_the_next_commit(path: Path) -> None:
    """Later would be too late: a follower killed before would skip the records in between."""
    async with await open_log(path, Clock()) as log:
        for seq in (1, 9, 4):
            await append(log, *range(5))
            log.cursors.set("egress", seq)
            await append(log, seq)
            assert cursors_on_disk(path) == {"egress": seq}


async def test_it_never_takes_back_what_came_with_records_after_it(path: Path) -> None:
    clock = Clock()
    async with await open_log(path, clock) as log:
        for number in (0, 1, 2):
            log.followed.keep("other", b"at %d" % (number + 3))
            log.followed.keep("another", b"at %d" % number)
            if number < 2:
                await append(log, 1)
        await follow(log, 6)
        assert on_disk(path) == {"other": b"at 6", "another": b"at 1"}, "a second has not passed"
        clock.seconds += 2
        await append(log, 2)
        assert on_disk(path) == {"other": b"at 6", "another": b"at 2"}
        assert log.followed.positions() == on_disk(path)


# -- commits that fail


def fail(*_: Any, **__: Any) -> Any:
    raise sqlite3.OperationalError("disk I/O error")


@pytest.mark.parametrize("known", [False, True], ids=["first", "later"])
async def test_a_commit_that_fails_leaves_neither_records_nor_place(
    path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    clock = Clock()
    async with await open_log(path, clock) as log:
        if known:
            await follow(log, 1)
        before = log.followed.positions()
        monkeypatch.setattr(Store, "commit", fail)
        failed = [follow(log, 2, 3), append(log, 8), follow(log, 4)]
        assert [type(one) for one in await asyncio.gather(*failed, return_exceptions=True)] == [UStatusError] * 3
        monkeypatch.undo()
        assert log.followed.positions() == before
        clock.seconds += 2
        await append(log, 9)
        assert on_disk(path) == before, "what another commit brings is not what failed"
        log.followed.keep("other", b"at 1.5")
        await follow(log, 2, 3)
    async with await open_log(path) as log:
        assert log.followed.position("other") == b"at 3"
        assert await taken(log) == [*of_there(*([1] if known else [])), (9, None), *of_there(2, 3)]


async def test_a_place_that_only_moved_outlives_a_commit_that_fails(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    async with await open_log(path, clock) as log:
        log.followed.keep("other", b"at 0")
        await follow(log, 1)
        log.followed.keep("other", b"at 5")
        monkeypatch.setattr(Store, "commit", fail)
        with pytest.raises(UStatusError):
            await follow(log, 6)
        monkeypatch.undo()
        assert log.followed.position("other") == b"at 5"
        clock.seconds += 2
        await append(log, 9)
        assert on_disk(path) == {"other": b"at 5"}


class Fails:
    """A connection that reports an I/O error of a COMMIT that happened all the same."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)

    def execute(self, statement: str, *parameters: Any) -> Any:
        found = self.db.execute(statement, *parameters)
        return fail() if statement == "COMMIT" else found


def spoil(log: Log) -> None:
    """The next commit."""
    assert isinstance(log._storage, DurableStorage)
    writer = log._storage.writer
    writer._next_retention = float("inf")  # it would make a new connection, which undoes what happened
    writer._store.file.db = Fails(writer._store.file.connect())  # type: ignore[assignment]


@contextlib.asynccontextmanager
async def one_commit(log: Log) -> AsyncIterator[None]:
    """What is appended in the block shares a transaction: the writer waits for its end."""
    assert isinstance(log._storage, DurableStorage)
    worker = log._storage.writer.worker
    work, waiting, may_go_on = worker._work, threading.Event(), threading.Event()

    def wait(_: object) -> None:
        worker._work = work
        waiting.set()
        may_go_on.wait()

    worker._work = wait
    log._storage.writer.flush()
    await asyncio.to_thread(waiting.wait)
    try:
        yield
    finally:
        may_go_on.set()


@pytest.mark.parametrize("known", [False, True], ids=["first", "later"])
async def test_a_commit_that_happened_though_it_failed_leaves_no_place_behind(path: Path, known: bool) -> None:
    async with await open_log(path) as log:
        await append(log, 7)
        if known:
            await follow(log, 1)
        before = log.followed.positions()
        spoil(log)
        async with one_commit(log):
            appends = [follow(log, 2), follow(log, 3, key="another")]
        with pytest.raises(UStatusError):
            await asyncio.gather(*appends)
        assert on_disk(path).keys() == {"other", "another"}, "it happened"
        assert log.followed.positions() == before
        await append(log, 8)
        assert on_disk(path) == before
        await follow(log, 2)
    async with await open_log(path) as log:
        assert await taken(log) == [(7, None), *of_there(*([1] if known else [])), (8, None), *of_there(2)]
        assert log.followed.positions() == {"other": b"at 2"}


async def test_who_is_killed_before_that_is_undone_has_records_and_place(path: Path, tmp_path: Path) -> None:
    async with await open_log(path) as log:
        spoil(log)
        with pytest.raises(UStatusError):
            await follow(log, 1, 2)
        copy = left_by_kill(path, tmp_path / "copy")
    async with await open_log(copy) as log:
        assert (await taken(log), log.followed.positions()) == (of_there(1, 2), {"other": b"at 2"})


def left_by_kill(path: Path, folder: Path) -> Path:
    """A copy of the files, as they are while they are written."""
    folder.mkdir()
    for suffix in ("", "-wal", ".mark"):
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(f"{path}{suffix}", folder / f"{path.name}{suffix}")
    return folder / path.name


STEPS = st.lists(st.sampled_from(["take", "take", "take two", "pass", "fail", "happen", "kill", "stop"]), max_size=25)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_from_log_to_log_each_record_comes_once_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    asyncio.run(_follow_through(tmp_path_factory.mktemp("once"), steps))


async def _follow_through(folder: Path, steps: list[str]) -> None:
    """There, every fourth record is not for us."""
    path = folder / "l.db"
    log = await open_log(path)

    def here() -> int:
        return int((log.followed.position("other") or b"at 0")[3:])

    async def take(count: int = 1) -> None:
        at, under_way = here(), []
        for _ in range(count):  # at once
            wanted = [seq for seq in range(at + 1, at + 4) if seq % 4]
            at += 3
            under_way.append(append(log, *wanted, followed=from_there(*wanted, place=b"at %d" % at)))
        await asyncio.gather(*under_way, return_exceptions=True)

    for number, step in enumerate([*steps, "take", "kill"]):
        if step.startswith("take"):
            await take(2 if step == "take two" else 1)
        elif step == "pass" and (here() + 1) % 4 == 0:
            log.followed.keep("other", b"at %d" % (here() + 1))
        elif step == "fail":
            commit, Store.commit = Store.commit, fail  # type: ignore[method-assign]
            await take(2)
            Store.commit = commit  # type: ignore[method-assign]
        elif step == "happen":
            spoil(log)
            await take()
        elif step in ("kill", "stop"):
            copy = left_by_kill(path, folder / f"{number}")
            await log.close()
            path = copy if step == "kill" else path
            log = await open_log(path)
        assert on_disk(path).keys() <= {"other"}
    async with log:
        assert await taken(log) == of_there(*(seq for seq in range(1, here() + 1) if seq % 4))
        assert log.damage == []


# -- damage


async def with_places(path: Path) -> None:
    async with await open_log(path) as log:
        await follow(log, 1, 2)
        log.followed.keep("small", b"at 5")
        log.followed.keep("great", bytes(1_025))


def change(path: Path, statement: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert db.execute(statement, values).rowcount == 1


@pytest.mark.parametrize(
    ("key", "value"), [("small", b"at 99"), ("great", bytes(1_024) + b"\1")], ids=["small", "great"]
)
async def test_an_unreadable_position_is_reported_and_all_others_continue(path: Path, key: str, value: bytes) -> None:
    await with_places(path)
    change(path, "UPDATE meta SET value = ? WHERE key = ?", value, f"followed:{key}")
    assert [one.kind for one in verify(path).found] == ["meta"]
    with contextlib.closing(sqlite3.connect(path)) as db:
        next_stream = db.execute("SELECT value FROM meta WHERE key = ?", (NEXT_STREAM,)).fetchone()
    for _ in range(2):
        async with await open_log(path) as log:
            assert log.followed.positions().keys() == {"other", "small", "great"} - {key}
            assert [one.kind for one in log.damage] == ["meta"]
            assert key in log.damage[0].detail
            assert (log.stream_table.newest_id + 1, log.stream_table.forgotten_seq(None)) == (*next_stream, 0), (
                "nothing else is in doubt"
            )
            assert await taken(log) == of_there(1, 2)
    assert verify(path).found == []
    async with await open_log(path) as log:
        log.losses.acknowledge()
        await follow(log, 3, key=key)
    assert verify(path).is_sound


async def test_a_damaged_file_that_is_saved_has_them(path: Path) -> None:
    await with_places(path)
    content = bytearray(path.read_bytes())
    content[: rows.PAGE_BYTES] = bytes(rows.PAGE_BYTES)
    path.write_bytes(content)
    async with await open_log(path) as log:
        assert log.dropped["damaged_file"] == 1
        assert log.followed.positions().keys() == {"other", "small", "great"}
        assert (log.followed.position("other"), await taken(log)) == (b"at 2", of_there(1, 2))


async def test_origins_that_are_damaged_are_a_gap(path: Path) -> None:
    async with await open_log(path) as log:
        for number in range(1, 4):
            await follow(log, number)
    with contextlib.closing(sqlite3.connect(path)) as db:
        (data,) = db.execute("SELECT data FROM chunk WHERE first_seq = 2").fetchone()
    change(path, "UPDATE chunk SET data = ? WHERE first_seq = 2", data.replace(OTHER, b"x" * 16))
    async with await open_log(path) as log:
        found = await log.scan(0, max_records=9, max_bytes=999)
        assert ([seq for chunk in found.chunks for seq in chunk.seqs], found.gaps) == ([1, 3], [(1, 3)])
        assert [one.kind for one in log.damage] == ["records"]


# -- on the wire


@pytest.mark.parametrize("kind", ["disk", "memory"])
async def test_a_poll_tells_where_records_come_from(path: Path, kind: str) -> None:
    log = await open_log(path if kind == "disk" else None)
    for number in (1, 2, 3):
        await append(log, 10 + number)
    world = HistoryWorld()
    await world.open(log)

    client = HistoryClient(world.rpc, SERVICE)
    (batch,) = (await client.poll()).batches
    assert (len(batch.seq), len(batch.origin), len(batch.origin_seq), len(batch.origin_incarnation)) == (3, 0, 0, 0)
    await follow(log, 4, 6)
    await append(log, 20)
    (batch,) = (await client.poll()).batches
    assert list(batch.seq) == [1, 2, 3, 4, 5, 6]
    assert (list(batch.origin_incarnation), list(batch.origin)) == ([OTHER], [0, 0, 0, 1, 1, 0])
    assert list(batch.origin_seq) == [0, 0, 0, 4, 6, 0]
    await world.close()


async def test_a_reply_with_the_origins_of_a_fleet_fits_a_transport() -> None:
    log = await open_log(None)
    for first in range(1, 10_001, 500):
        seqs = range(first, first + 500)
        fleet = [Origin(b"%016d" % seq, (1 << 63) - seq) for seq in seqs]
        await append(log, *seqs, followed=FollowedFrom(fleet, "fleet", b""))
    world = HistoryWorld()
    await world.open(log)
    response = await HistoryClient(world.rpc, SERVICE).poll()
    assert 900_000 < response.ByteSize() < 1 << 20
    assert (len(response.batches[0].origin_incarnation), response.more) == (len(response.batches[0].seq), True)
    await world.close()
