"""Faults of a log: a kill, a damaged file, a full disk, a second opener, a newer program."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from history.file import reader as reader_module
from history.file.rows import PAGE_BYTES
from history.file.store import Store
from history.log import log as log_module
from history.log.log import Log, RetentionLoss
from history.service.service import HistoryService
from transports.local import LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest, PollResponse, Position
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

TOPICS = [uris.uri("vcu.vin", 0x10, 1, 0x8000 + place) for place in range(4)]


def message(topic: int = 0, size: int = 100) -> UMessage:
    return UMessageBuilder.publish(TOPICS[topic]).build_from_upayload(UPayload(os.urandom(size), 5))


async def append(log: Log, *topics: int, size: int = 100) -> int:
    return await log.append(
        [log.stream_id(TOPICS[topic]) for topic in topics], [message(topic, size) for topic in topics]
    )


async def read_all(log: Log, after: int = 0) -> list[int]:
    seqs: list[int] = []
    while chunks := await log.read(after):
        after = chunks[-1].last_seq
        seqs += [seq for chunk in chunks for seq in chunk.seqs]
    return seqs


APPENDER = """
import asyncio, sys
from history.log.log import Log, RetentionLoss
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload

async def main():
    log = await Log.open(sys.argv[1], name="killed")
    topics = [uris.uri("vcu.vin", 0x10, 1, 0x8000 + place) for place in range(4)]
    ids = [log.stream_id(topic) for topic in topics]
    number = log.newest_seq

    async def one(worker):
        nonlocal number
        while True:
            numbers = range(number + 1, number + 8)
            number += 7
            messages = [
                UMessageBuilder.publish(topics[n % 4]).build_from_upayload(UPayload(str(n).encode(), 4))
                for n in numbers
            ]
            first = await log.append([ids[n % 4] for n in numbers], messages)
            log.cursors.set("peer", first)
            print(first, numbers[0], numbers[-1], flush=True)

    await asyncio.gather(*(one(worker) for worker in range(5)))

asyncio.run(main())
"""


async def test_nothing_acknowledged_is_lost_by_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    acked: dict[int, int] = {}  # seq -> number
    for lines in (40, 150, 90):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", APPENDER, str(path), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            for _ in range(lines):
                _note(acked, await process.stdout.readline())
            process.kill()
            while (line := await process.stdout.readline()).endswith(b"\n"):  # what it had said before it died
                _note(acked, line)
            await process.wait()
        async with await Log.open(path, name="after") as log:
            stored = {}
            newest: dict[int, int] = {}
            for chunk in await _chunks(log):
                for seq, prev, stream, read in zip(
                    chunk.seqs, chunk.prev_seqs, chunk.streams, chunk.messages, strict=True
                ):
                    assert prev == newest.get(stream, 0)
                    newest[stream] = stored_seq = seq
                    stored[stored_seq] = int(read.payload)
            assert {seq: stored.get(seq) for seq in acked} == acked
            assert list(stored) == list(range(1, log.newest_seq + 1))
            assert [stream.newest_seq for stream in log.streams()] == [newest[stream.id] for stream in log.streams()]
            assert log.dropped == {}


def _note(acked: dict[int, int], line: bytes) -> None:
    first, begin, end = map(int, line.split())
    acked.update(zip(range(first, first + end - begin + 1), range(begin, end + 1), strict=True))


async def _chunks(log: Log) -> list[reader_module.Chunk]:
    chunks: list[reader_module.Chunk] = []
    while more := await log.read(chunks[-1].last_seq if chunks else 0):
        chunks += more
    return chunks


# -- damage


async def _made(path: Path, batches: int = 10) -> bytes:
    async with await Log.open(path, name="made") as log:
        for _ in range(batches):
            await append(log, 0, 1, 2, size=30_000)
        log.cursors.set("peer", 7)
        return log.incarnation


def _damage_record(path: Path, first_seq: int) -> None:
    """Turn one byte of a message of the chunk at `first_seq`, in the file itself."""
    db = sqlite3.connect(path)
    (data,) = db.execute("SELECT data FROM chunk WHERE first_seq = ?", (first_seq,)).fetchone()
    db.close()
    content = bytearray(path.read_bytes())
    place = content.find(data[50_000:50_100])
    assert place > 0
    content[place + 10] ^= 0xFF
    path.write_bytes(content)


async def test_damaged_records_are_skipped_and_reported_as_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    incarnation = await _made(path)
    _damage_record(path, 13)
    async with await Log.open(path, name="again") as log:
        assert log.incarnation == incarnation
        assert await read_all(log) == [*range(1, 13), *range(16, 31)]
        found = await log.scan(11, max_records=9, max_bytes=1 << 30, until=15)
        assert (found.covered, found.gaps) == (15, [(12, 16)])
        assert log.dropped["corrupt_chunks"] == 1
        assert await append(log, 0) == 31
        wanted = {log.stream_id(TOPICS[1])}
        assert (await log.scan(0, max_records=99, max_bytes=1 << 30, streams=wanted)).gaps == [(12, 16)]


async def test_a_poll_tells_of_damage(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    await _made(path)
    _damage_record(path, 13)
    async with await Log.open(path, name="again") as log:
        transport = LocalTransport.on(LocalNetwork(), LocalUriProvider("gateway", 4, 1))
        service = HistoryService(transport, LocalUriProvider("gateway", 4, 1), [log])
        request = UMessageBuilder.request(uris.uri("cloud", 1, 1), uris.uri("gateway", 4, 1, 2), 10_000)
        seqs: list[int] = []
        gaps = []
        position = 0
        while position < 30:
            asked = PollRequest(positions=[Position(incarnation=log.incarnation, seq=position)])
            response: PollResponse = await service._poll(request.pack(asked))
            seqs += [seq for batch in response.batches for seq in batch.seq]
            gaps += [(gap.reason, gap.after_seq, gap.before_seq) for gap in response.gaps]
            position = response.next[0].seq
        assert (seqs, gaps) == ([*range(1, 13), *range(16, 31)], [(3, 12, 16)])


async def _is_moved_aside(path: Path, incarnation: bytes) -> None:
    content = path.read_bytes()
    async with await Log.open(path, name="again") as log:
        assert log.incarnation != incarnation
        assert (log.newest_seq, log.cursors.seqs(), log.dropped["damaged_file"]) == (0, {}, 1)
        assert await append(log, 0) == 1
    (kept,) = [file for file in path.parent.glob("l.db.damaged-*") if not file.name.endswith(("-wal", "-shm"))]
    assert kept.read_bytes() == content


async def _is_saved(path: Path, incarnation: bytes, records: list[int]) -> None:
    content = path.read_bytes()
    async with await Log.open(path, name="again") as log:
        assert (log.incarnation, log.cursors.seqs(), log.dropped["damaged_file"]) == (incarnation, {"peer": 7}, 1)
        assert await read_all(log) == records
        lost = {seq for after, before in log.holes for seq in range(after + 1, before)}
        assert lost == set(range(1, 31)) - set(records)
        assert await append(log, 0) == 31
    (kept,) = [file for file in path.parent.glob("l.db.damaged-*") if not file.name.endswith(("-wal", "-shm"))]
    assert kept.read_bytes() == content
    assert not list(path.parent.glob("l.db.salv*"))
    assert not list(path.parent.glob("l.db.copy*"))


async def test_what_is_left_of_a_truncated_file_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    incarnation = await _made(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * 2 // 3)
    await _is_saved(path, incarnation, list(range(1, 19)))


async def test_a_file_of_noise_is_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    path.write_bytes(os.urandom(50_000))
    await _is_moved_aside(path, b"")


@pytest.mark.parametrize("pages", [(0, 1), (0, 100), (2, 6)], ids=["the first one", "its first bytes", "tables"])
async def test_damage_in_the_structure_is_found_on_open_and_the_records_are_saved(
    tmp_path: Path, pages: tuple[int, int]
) -> None:
    path = tmp_path / "l.db"
    incarnation = await _made(path)
    content = bytearray(path.read_bytes())
    if pages == (0, 100):
        content[:100] = os.urandom(100)
    else:
        content[PAGE_BYTES * pages[0] : PAGE_BYTES * pages[1]] = bytes(PAGE_BYTES * (pages[1] - pages[0]))
    path.write_bytes(content)
    if pages == (2, 6):  # the table of cursors is among them
        async with await Log.open(path, name="again") as log:
            assert (log.incarnation, log.cursors.lost, await read_all(log)) == (incarnation, True, list(range(1, 31)))
    else:
        await _is_saved(path, incarnation, list(range(1, 31)))


async def test_a_disk_without_room_for_what_can_be_saved_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "l.db"
    incarnation = await _made(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * 2 // 3)
    content = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", full)
        for _ in range(2):
            with pytest.raises(UStatusError, match="disk is full") as error:
                await Log.open(path, name="full")
            assert error.value.code == UCode.RESOURCE_EXHAUSTED
    assert path.read_bytes() == content
    assert not list(tmp_path.glob("*damaged*"))
    await _is_saved(path, incarnation, list(range(1, 19)))


async def test_a_start_that_ended_between_two_names_goes_on(tmp_path: Path) -> None:
    """What could be saved is whole, the damaged file is moved aside already."""
    path = tmp_path / "l.db"
    incarnation = await _made(path)
    path.rename(f"{path}.salvaged")
    async with await Log.open(path, name="again") as log:
        assert (log.incarnation, await read_all(log)) == (incarnation, list(range(1, 31)))


async def _copy_unclosed(path: Path, to: Path) -> bytes:
    """The files as a crash leaves them, with a write-ahead log."""
    async with await Log.open(path, name="made") as log:
        for _ in range(10):
            await append(log, 0, 1)
        for suffix in ("", "-wal", ".mark"):
            Path(f"{to}{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
        return log.incarnation


async def test_a_crash_leaves_a_log_that_goes_on(tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    incarnation = await _copy_unclosed(tmp_path / "l.db", copy)
    async with await Log.open(copy, name="copy") as log:
        assert (log.incarnation, log.newest_seq) == (incarnation, 20)
        assert await append(log, 1) == 21
        assert (await read_all(log), log.holes) == (list(range(1, 22)), [])


@pytest.mark.parametrize("how", ["truncated", "overwritten"])
async def test_a_damaged_write_ahead_log_is_cut_to_the_last_whole_commit_and_the_rest_is_a_gap(
    tmp_path: Path, how: str
) -> None:
    copy = tmp_path / "copy.db"
    incarnation = await _copy_unclosed(tmp_path / "l.db", copy)
    wal = Path(f"{copy}-wal")
    content = bytearray(wal.read_bytes())
    if how == "truncated":
        del content[len(content) // 2 :]
    else:
        torn = slice(len(content) // 2, len(content) // 2 + 1_000)
        content[torn] = bytes(byte ^ 0xFF for byte in content[torn])
    wal.write_bytes(content)
    async with await Log.open(copy, name="copy") as log:
        left = log.newest_seq
        assert log.incarnation == incarnation
        assert 0 < left < 20
        assert log.holes == [(left, 21)]
        assert await append(log, 0) == 21  # no seq is given out twice
        assert await read_all(log) == [*range(1, left + 1), 21]
        assert (await log.scan(left, max_records=9, max_bytes=9999)).gaps == [(left, 21)]
        assert (await log.scan(20, max_records=9, max_bytes=9999)).gaps == []
    async with await Log.open(copy, name="copy") as log:
        assert log.holes == [(left, 21)]
        gaps = [gap for found in [await log.scan(0, max_records=99, max_bytes=1 << 20)] for gap in found.gaps]
        assert gaps == [(left, 21)]
        assert await append(log, 0) == 22


# -- a disk that is full


async def test_a_full_disk_refuses_and_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await Log.open(tmp_path / "l.db", name="full") as log:
        assert await append(log, 0, 1) == 1
        commit = Store.commit
        pages = 40

        def limited(store: Store, *arguments: Any, **options: Any) -> Any:
            db = store.file.db or store._reconnect()
            db.execute(f"PRAGMA max_page_count = {pages}")
            return commit(store, *arguments, **options)

        monkeypatch.setattr(Store, "commit", limited)
        stored = 2
        code = None
        while code is None:
            try:
                await append(log, 0, 2, size=30_000)
                stored += 2
            except UStatusError as error:
                code = error.code
        assert code == UCode.RESOURCE_EXHAUSTED
        assert not log.healthy
        assert log.newest_seq == stored
        log.cursors.set("peer", 2)
        with pytest.raises(UStatusError):
            await append(log, 3, size=200_000)
        pages = 1_000_000
        assert await append(log, 3, 0) == stored + 1
        assert log.healthy
        assert log.dropped["refused"] == 3
    async with await Log.open(tmp_path / "l.db", name="again") as log:
        assert await read_all(log) == list(range(1, stored + 3))
        assert log.cursors.seq("peer") == 2
        (last,) = await log.read(stored)
        assert list(last.prev_seqs) == [0, stored - 1]


async def test_a_log_that_nobody_appends_to_heals_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "PROBE_MS", 10)
    async with await Log.open(tmp_path / "l.db", name="full") as log:
        await append(log, 0)
        commit = Store.commit

        def fail(*_: object, **__: object) -> None:
            raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(Store, "commit", fail)
        with pytest.raises(UStatusError) as error:
            await append(log, 0)
        assert error.value.code == UCode.UNAVAILABLE
        await asyncio.sleep(0.05)
        assert not log.healthy
        monkeypatch.setattr(Store, "commit", commit)
        async with asyncio.timeout(10):
            while not log.healthy:  # noqa: ASYNC110 - the log tells nobody
                await asyncio.sleep(0.01)


FULL = """
import asyncio, resource, signal, sys
from history.log.log import Log, RetentionLoss
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError

async def main():
    log = await Log.open(sys.argv[1], name="full")
    topic = uris.uri("vcu.vin", 0x10, 1, 0x8000)
    id = log.stream_id(topic)
    message = UMessageBuilder.publish(topic).build_from_upayload(UPayload(bytes(50_000), 5))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    await log.append([id], [message])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, limits[1]))
    acked = failed = 0
    while failed < 3:
        try:
            await log.append([id] * 2, [message] * 2)
            acked += 2
        except UStatusError as error:
            failed += 1
            assert not log.healthy
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    first = await log.append([id] * 2, [message] * 2)
    assert log.healthy and first == acked + 2, (first, acked)
    print(first + 1, flush=True)
    await log.close()

asyncio.run(main())
"""


async def test_a_file_that_may_not_grow_refuses_and_heals(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FULL, str(path), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    async with await Log.open(path, name="again") as log:
        assert await read_all(log) == list(range(1, int(output.splitlines()[-1]) + 1))


# -- who may open


async def test_a_second_opener_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    async with await Log.open(path, name="first") as log:
        with pytest.raises(UStatusError, match=f"in use by process {os.getpid()}") as error:
            await Log.open(path, name="second")
        assert error.value.code == UCode.ALREADY_EXISTS
        assert await append(log, 0) == 1
    async with await Log.open(path, name="third") as log:
        assert log.newest_seq == 1


async def test_another_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    async with await Log.open(path, name="first"):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", APPENDER, str(path), stderr=asyncio.subprocess.PIPE
        )
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode != 0
        assert b"ALREADY_EXISTS" in errors


async def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    await _made(path, 1)
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(UStatusError, match="newer") as error:
        await Log.open(path, name="old")
    assert error.value.code == UCode.FAILED_PRECONDITION
    assert not list(tmp_path.glob("*damaged*"))


async def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE songs (name TEXT)")
    db.close()
    with pytest.raises(UStatusError, match="not a log") as error:
        await Log.open(path, name="old")
    assert error.value.code == UCode.FAILED_PRECONDITION
    assert sqlite3.connect(path).execute("SELECT count(*) FROM songs").fetchone() == (0,)


async def test_a_folder_that_can_t_be_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UStatusError) as error:
        await Log.open(tmp_path / "file" / "l.db", name="x")
    assert error.value.code == UCode.UNAVAILABLE


# -- size


async def test_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    async with await Log.open(path, name="ring", retention_bytes=2_000_000, tail_bytes=1) as log:
        for _ in range(100):
            await append(log, *[0, 1] * 10, size=10_000)
            assert log.durable
            log._storage.writer._next_retention = 0.0
        async with asyncio.timeout(20):
            while log.extent.stored_bytes > 2_000_000:  # noqa: ASYNC110 - retention tells nobody
                await asyncio.sleep(0.02)
        assert log.newest_seq == 2_000
        assert log.oldest_seq > 1_500
        found = await read_all(log, log.floor_seq)  # it may go on deleting
        assert found == list(range(found[0], 2_001))
        assert found[0] <= log.oldest_seq
    assert path.stat().st_size < 6_000_000


# -- a disk that fails after it has done it


class _Fails:
    """A connection whose COMMIT happens, and then reports an I/O error; of transactions with `word` in them."""

    def __init__(self, db: sqlite3.Connection, word: str = "") -> None:
        self.db, self.word, self.fails = db, word, not word

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)

    def execute(self, statement: str, *parameters: Any) -> Any:
        found = self.db.execute(statement, *parameters)
        self.fails = self.fails or statement.startswith(self.word)
        if statement == "COMMIT" and self.fails:
            raise sqlite3.OperationalError("disk I/O error")
        return found


async def test_a_commit_that_happened_though_it_failed_leaves_no_record_and_no_seq_behind(tmp_path: Path) -> None:
    async with await Log.open(tmp_path / "l.db", name="late", tail_bytes=1) as log:
        await append(log, 0, 1)
        store = log._storage.writer._store
        store.file.db = _Fails(store.file.db)  # type: ignore[assignment, arg-type]
        log.cursors.set("peer", 2)
        with pytest.raises(UStatusError) as error:
            await append(log, 2, 3)
        assert error.value.code == UCode.UNAVAILABLE
        kept = message(3)
        assert await log.append([log.stream_id(TOPICS[3])], [kept]) == 3
        assert await read_all(log) == [1, 2, 3]
        assert (await log.read(2))[-1].data == [kept.SerializeToString()]
    async with await Log.open(tmp_path / "l.db", name="again") as log:
        assert await read_all(log) == [1, 2, 3]
        assert (log.cursors.seq("peer"), log.damage) == (2, [])


async def test_records_that_a_failed_retention_removed_are_reported(tmp_path: Path) -> None:
    now = 1_800_000_000_000
    async with await Log.open(tmp_path / "l.db", name="late", retention_ms=60_000, now_ms=lambda: now) as log:
        losses: list[RetentionLoss] = []
        log.on_retention_loss(losses.append)
        for _ in range(5):
            await append(log, 0, 1)
        log.cursors.set("egress:cloud", 3, holder="egress")
        writer = log._storage.writer
        assert writer is not None
        now += 120_000
        await append(log, 0)
        writer._store.file.db = _Fails(writer._store.file.db, "DELETE FROM chunk")  # type: ignore[assignment, arg-type]
        writer._next_retention = 0.0
        writer.flush()
        async with asyncio.timeout(20):
            while not losses:
                writer._next_retention = 0.0
                writer.flush()
                await asyncio.sleep(0.02)
        assert [(one.after, one.before) for one in losses] == [(3, 11)]
        assert [seq for chunk in losses[0].chunks for seq in chunk.seqs] == list(range(4, 11))
        assert (log.floor_seq, log.oldest_seq) == (10, 11)
        stored = log.extent.stored_bytes
    async with await Log.open(tmp_path / "l.db", name="again") as log:
        assert log.extent.stored_bytes == stored


async def test_a_file_that_is_deleted_or_moved_while_it_is_used_takes_nothing_until_it_is_back(tmp_path: Path) -> None:
    """SQLite would continue to write to it, and all acknowledged records would be lost with the process."""
    log = await Log.open(tmp_path / "log.db", name="moved")
    await append(log, 0)
    await log.check_file()
    assert log.healthy
    (tmp_path / "log.db").rename(tmp_path / "elsewhere.db")
    await log.check_file()
    async with asyncio.timeout(60):
        while log.healthy:  # noqa: ASYNC110 - the log tells nobody
            await asyncio.sleep(0.01)
    with pytest.raises(UStatusError, match="deleted, moved or replaced while it was in use"):
        await append(log, 1)
    assert "log.db was deleted, moved or replaced" in log.trouble
    assert not (tmp_path / "log.db").exists(), "nothing is made in its place"
    (tmp_path / "log.db").write_bytes(b"")  # nor is another file taken for it
    with pytest.raises(UStatusError, match="deleted, moved or replaced"):
        await append(log, 1)
    (tmp_path / "elsewhere.db").rename(tmp_path / "log.db")
    async with asyncio.timeout(60):
        while not log.healthy:  # noqa: ASYNC110 - the log tells nobody
            await asyncio.sleep(0.01)
    assert await append(log, 2) == 2
    assert log.trouble == ""
    await log.close()
    again = await Log.open(tmp_path / "log.db", name="moved")
    assert await read_all(again) == [1, 2]
    await again.close()


LOOKER = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute('SELECT count(*) FROM chunk'); db.close()"


async def test_who_looks_into_the_file_of_a_running_log_takes_nothing_from_it(tmp_path: Path) -> None:
    """SQLite's last user of a file deletes its write-ahead log. Another program must see that it is not the last."""
    path = tmp_path / "l.db"
    async with await Log.open(path, name="first") as log:
        await append(log, 0)
    async with await Log.open(path, name="running") as log:
        await append(log, 0)
        for _ in range(2):
            looking = await asyncio.create_subprocess_exec(sys.executable, "-c", LOOKER, str(path))
            assert await looking.wait() == 0
            await append(log, 0)
        power_cut = tmp_path / "power-cut"
        power_cut.mkdir()
        for file in tmp_path.glob("l.db*"):
            if not file.name.endswith(("-shm", ".lock")):
                (power_cut / file.name).write_bytes(file.read_bytes())
    async with await Log.open(power_cut / "l.db", name="after") as log:
        assert await read_all(log) == [1, 2, 3, 4]
        assert log.damage == []


async def test_tables_that_a_backup_tool_makes_beside_ours_are_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    async with await Log.open(path, name="first") as log:
        await append(log, 0)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE _litestream_seq (id INTEGER PRIMARY KEY, seq INTEGER)")
        db.execute("ANALYZE")
    async with await Log.open(path, name="again") as log:
        assert log.damage == []
        assert await read_all(log) == [1]
