"""One flipped bit, or a truncated file, anywhere in the files of a log: every change is reported.

made(log) -> flip one bit -> open -> read everything, filtered too -> each record as appended, or reported as lost
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from history.file import damage as kinds
from history.file.rows import CURSOR, PAGE_BYTES
from history.file.verify import verify
from history.file.writer import FollowedFrom
from history.log.log import Cursor, Log
from history.records.chunk import Origin
from tests.tiers import full
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.umessage_pb2 import UMessage

NOW_MS = 1_800_000_000_000
TOPICS = [uris.uri("vin", 0x10, 1, 0x8000 + place) for place in range(4)]
SINK = uris.uri("cloud", 0x20, 1, 0)  # of what is on the last topic
CURSORS = {
    "egress:cloud": Cursor(17, holds=True, holder="egress"),
    "egress:mcu": Cursor(42, holds=True, absent_ms=77, holder="egress"),
    "consumer:app": Cursor(29, NOW_MS + 9**9),
}
OTHER = b"o" * 16  # a log from which every other batch of three was followed
FOLLOWED = {seq: Origin(OTHER, 100 + seq) for seq in range(1, 61) if (seq - 1) // 3 % 2}
PLACES = {"other": b"at 160", "another": b"at 159"}


@dataclass
class Made:
    """A closed log and its contents."""

    folder: Path
    incarnation: bytes
    records: dict[int, tuple[int, bytes]]  # seq -> place of the topic, message

    @property
    def path(self) -> Path:
        return self.folder / "l.db"


def message(place: int, number: int) -> UMessage:
    builder = (
        UMessageBuilder.notification(TOPICS[place], SINK) if place == 3 else UMessageBuilder.publish(TOPICS[place])
    )
    return builder.build_from_upayload(UPayload(f"record {number} ".encode() * 8, 5))


def stream(log: Log, place: int) -> int:
    return log.stream_id(TOPICS[place], SINK if place == 3 else None)


async def open_log(path: Path) -> Log:
    return await Log.open(path, name="flips", now_ms=lambda: NOW_MS)


async def make(folder: Path, *, killed: bool) -> Made:
    log = await open_log(folder / "l.db")
    records: dict[int, tuple[int, bytes]] = {}
    for name, cursor in CURSORS.items():
        lease_ms = None if cursor.lease_until_ms is None else cursor.lease_until_ms - NOW_MS
        kept = {"holds": cursor.holds, "absent_ms": cursor.absent_ms, "holder": cursor.holder}
        log.cursors.set(name, cursor.seq, lease_ms=lease_ms, **kept)  # type: ignore[arg-type]
    for batch in range(20):
        places = [(batch + one) % 4 for one in range(3)]
        messages = [message(place, len(records) + one) for one, place in enumerate(places)]
        seqs = range(batch * 3 + 1, batch * 3 + 4)
        key, place_there = list(PLACES.items())[batch // 2 % 2]
        followed = FollowedFrom([FOLLOWED[seq] for seq in seqs], key, place_there) if seqs[0] in FOLLOWED else None
        first = await log.append([stream(log, place) for place in places], messages, followed)
        for seq, place, one in zip(range(first, first + 3), places, messages, strict=True):
            records[seq] = (place, one.SerializeToString())
    made = Made(folder, log.incarnation, records)
    if killed:
        made = Made(folder.with_name("killed"), log.incarnation, records)
        made.folder.mkdir()
        for path in folder.iterdir():
            if not path.name.endswith((".lock", "-shm")):
                shutil.copy(path, made.folder / path.name)
    await log.close()
    return made


@pytest.fixture(scope="module", params=[False, True], ids=["closed", "killed"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return asyncio.run(make(tmp_path_factory.mktemp("made") / "log", killed=request.param))


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return asyncio.run(make(tmp_path_factory.mktemp("closed") / "log", killed=False))


async def read(log: Log, streams: set[int] | None = None) -> tuple[dict[int, tuple[int, bytes]], list[tuple[int, int]]]:
    """Every record with its stream, and the records reported as lost."""
    found: dict[int, tuple[int, bytes]] = {}
    gaps = list(log.holes)
    after = log.floor_seq
    while after < log.newest_seq:
        scan = await log.scan(after, max_records=100, max_bytes=1 << 20, streams=streams)
        for chunk in scan.chunks:
            found.update({seq: (id, data) for seq, id, data in zip(chunk.seqs, chunk.streams, chunk.data, strict=True)})
            assert (chunk.origins or [None] * len(chunk)) == [FOLLOWED.get(seq) for seq in chunk.seqs]
        gaps += scan.gaps
        assert scan.covered > after, "it goes on"
        after = scan.covered
    return found, gaps


async def count(log: Log, streams: set[int]) -> tuple[set[int], list[tuple[int, int]]]:
    """The records as a plan counts them, without their messages, and those that it reports as lost."""
    found: set[int] = set()
    gaps = list(log.holes)
    after = log.floor_seq
    while after < log.newest_seq:
        scan = await log.scan(after, max_records=100, max_bytes=1, streams=streams, bare=True)
        found.update(seq for chunk in scan.chunks for seq in chunk.seqs)
        gaps += scan.gaps
        assert scan.covered > after, "it goes on"
        after = scan.covered
    return found, gaps


async def check(log: Log, made: Made) -> bool:
    """Every damage is reported. Returns False if the log refuses appends and reports the damage as the reason."""
    if log.incarnation != made.incarnation:
        assert log.damage, "a replaced log is reported"
        assert await log.append([stream(log, 0)], [message(0, 99)])
        return True
    found, gaps = await read(log)
    _check_records(log, made, found)
    lost = made.records.keys() - found.keys()
    assert all(any(after < seq < before for after, before in gaps) for seq in lost), (
        f"lost without a gap: {sorted(lost)}"
    )
    assert log.damage or not lost
    for place in range(4):
        ids = {one.id for one in log.streams() if uris.key(one.source) == uris.key(TOPICS[place])}
        if ids:
            counted, gaps = await count(log, ids)
            missing = {seq for seq in found if made.records[seq][0] == place} - counted
            assert all(any(after < seq < before for after, before in gaps) for seq in missing), (
                f"not counted: {sorted(missing)}"
            )
            filtered, gaps = await read(log, ids)
            missing = {seq for seq in found if made.records[seq][0] == place} - filtered.keys()
            assert all(any(after < seq < before for after, before in gaps) for seq in missing), (
                f"filtered out: {sorted(missing)}"
            )
            _check_records(log, made, filtered)
    _check_cursors(log)
    assert log.followed.positions() == PLACES or (log.damage and log.followed.positions().items() <= PLACES.items())
    appending = log.append([stream(log, 0)], [message(0, 99)])
    await asyncio.wait([appending])
    if isinstance(appending.exception(), UStatusError):  # a page that only a writer comes to
        assert kinds.STRUCTURE in {one.kind for one in log.damage}, "an append refused for damage is reported as damage"
        return False
    assert await appending > max(made.records), "no seq names two records"
    return True


def _check_records(log: Log, made: Made, found: dict[int, tuple[int, bytes]]) -> None:
    for seq, (id, data) in found.items():
        place, sent = made.records[seq]
        known = log.stream(id)
        assert data == sent
        assert (uris.key(known.source), known.sink is None) == (uris.key(TOPICS[place]), place != 3)


def _check_cursors(log: Log) -> None:
    rows = log.cursors.all()
    for name, cursor in CURSORS.items():
        row = rows.get(name)
        if row is None:
            assert log.damage
            assert log.cursors.lost
        elif row != cursor:
            assert log.damage
            assert row.seq <= cursor.seq
    assert rows.keys() <= CURSORS.keys() or log.damage


async def try_with(made: Made, folder: Path, file: str, change: Callable[[bytearray], bytes | bytearray]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made.folder, folder, ignore=shutil.ignore_patterns("*.lock"))
    path = folder / file
    path.write_bytes(change(bytearray(path.read_bytes())))
    async with await open_log(folder / "l.db") as log:
        takes = await check(log, made)
    if not takes:  # the next start creates the log again from the readable records
        async with await open_log(folder / "l.db") as log:
            assert await check(log, made), "the log is as damaged as before"


VERSION = range(60, 64)  # in the header of an SQLite file
FILES = ["l.db", "l.db-wal", "l.db.mark", "l.db.head"]


@pytest.mark.parametrize("bits", [25, pytest.param(60, marks=full)])
@pytest.mark.parametrize("file", FILES)
async def test_a_bit_that_turns_anywhere_moves_nothing_in_silence(
    made: Made, tmp_path: Path, file: str, bits: int
) -> None:
    if not (made.folder / file).exists():
        return
    dice = random.Random(file)
    content = (made.folder / file).read_bytes()
    places = [place for place, byte in enumerate(content) if byte]
    heads = [place for place in range(len(content)) if place % PAGE_BYTES < 12]  # the header of a page in SQLite
    for number in range(bits):
        place, bit = dice.choice(heads if number % 4 == 0 else places), dice.randrange(8)

        def turn(content: bytearray, place: int = place, bit: int = bit) -> bytearray:
            if place not in VERSION:  # what is newer is refused
                content[place] ^= 1 << bit
            return content

        await try_with(made, tmp_path / "turned", file, turn)


@pytest.mark.parametrize("file", FILES)
async def test_a_truncated_file_is_reported(made: Made, tmp_path: Path, file: str) -> None:
    if not (made.folder / file).exists():
        return
    dice = random.Random(file)
    size = (made.folder / file).stat().st_size
    for length in [0, 1, size - 1, *(dice.randrange(size) for _ in range(25))]:
        await try_with(made, tmp_path / "torn", file, lambda content, length=length: content[:length])  # type: ignore[misc]


# -- rows, aimed at

AIMED = {
    "a cursor ahead": "UPDATE cursor SET seq = seq + 32 WHERE name = 'egress:cloud'",
    "a cursor far ahead": "UPDATE cursor SET seq = seq + (1 << 40) WHERE name = 'egress:cloud'",
    "a cursor of another name": "UPDATE cursor SET name = 'egress:clouf' WHERE name = 'egress:cloud'",
    "a cursor that holds nothing": "UPDATE cursor SET holds = 0 WHERE name = 'egress:cloud'",
    "a lease for ever": "UPDATE cursor SET lease_until_ms = lease_until_ms + (1 << 50) WHERE name = 'consumer:app'",
    "a topic that is another": "UPDATE stream SET source = (SELECT source FROM stream WHERE id = 2) WHERE id = 1",
    "a topic that is none": "UPDATE stream SET source = x'ffffff' WHERE id = 1",
    "a stream of another number": "UPDATE stream SET id = 9 WHERE id = 1",
    "a stream without its sink": "UPDATE stream SET sink = NULL WHERE sink IS NOT NULL",
    "a stream that is gone": "DELETE FROM stream WHERE id = 2",
    "the floor": "UPDATE meta SET value = value + 16 WHERE key = 'floor_seq'",
    "the newest": "UPDATE meta SET value = value + (1 << 33) WHERE key = 'newest_seq'",
    "the index's end": "UPDATE meta SET value = value - 16 WHERE key = 'indexed_seq'",
    "the identity": "UPDATE meta SET value = x'00000000000000000000000000000000' WHERE key = 'incarnation'",
    "a place in another log": "UPDATE meta SET value = x'617420313539' WHERE key = 'followed:other'",
    "a place in a log that was never followed": "UPDATE meta SET key = 'followed:othep' WHERE key = 'followed:other'",
    "origins": "UPDATE chunk SET data = substr(data, 1, length(data) - 30) WHERE first_seq = 10",
    "a key": "UPDATE meta SET key = 'incarnatioo' WHERE key = 'incarnation'",
    "no meta": "DELETE FROM meta",
    "an index entry of another stream": "UPDATE chunk_stream SET stream = 3 WHERE first_seq = 10 AND stream = 4",
    "an index entry of another place": "UPDATE chunk_stream SET first_seq = 11 WHERE first_seq = 10 AND stream = 4",
    "no index": "DELETE FROM chunk_stream",
    "what a chunk says of its streams": "UPDATE chunk SET streams = x'01000000' WHERE first_seq = 10",
    "the length of a chunk": "UPDATE chunk SET records = records + 16 WHERE first_seq = 10",
    "the length of the last chunk": "UPDATE chunk SET records = records + 16 WHERE first_seq = 58",
    "the place of a chunk": "UPDATE chunk SET first_seq = first_seq + (1 << 20) WHERE first_seq = 58",
    "a chunk that is gone": "DELETE FROM chunk WHERE first_seq = 10",
    "the last chunk is gone": "DELETE FROM chunk WHERE first_seq = 58",
}


@pytest.mark.parametrize("statement", AIMED.values(), ids=AIMED.keys())
async def test_an_altered_row_is_reported_and_repaired(closed: Made, tmp_path: Path, statement: str) -> None:
    folder = tmp_path / "aimed"
    shutil.copytree(closed.folder, folder, ignore=shutil.ignore_patterns("*.lock"))
    db = sqlite3.connect(folder / "l.db")
    assert db.execute(statement).rowcount
    db.commit()
    db.close()
    assert not verify(folder / "l.db").is_sound
    async with await open_log(folder / "l.db") as log:
        assert log.incarnation == closed.incarnation
        assert await check(log, closed)
        damage = log.damage
        assert damage
        log.losses.acknowledge()
    async with await open_log(folder / "l.db") as log:  # put right for good
        assert (log.damage, log.cursors.lost) == ([], False)
        found, _ = await read(log)
    report = verify(folder / "l.db")
    assert {one.kind for one in report.found} <= {"records"}, "what is lost stays lost, all else is right"
    assert report.records == len(found)


@pytest.mark.parametrize("statement", ["seq = seq + 32", "holds = 0", "absent_ms = 1", "holder = 'efress'"])
async def test_a_flipped_bit_of_a_cursor_costs_only_its_position(closed: Made, tmp_path: Path, statement: str) -> None:
    """It starts at the oldest record and keeps the later ones: a duplicate is better than a loss."""
    folder = tmp_path / "log"
    shutil.copytree(closed.folder, folder, ignore=shutil.ignore_patterns("*.lock"))
    db = sqlite3.connect(folder / "l.db")
    db.execute(f"UPDATE cursor SET {statement} WHERE name = 'egress:cloud'")
    db.commit()
    db.close()
    async with await open_log(folder / "l.db") as log:
        found = log.cursors.all()
        restarted = found.pop("egress:cloud")
        assert (restarted.seq, restarted.holds, bool(restarted.holder)) == (0, True, True)
        assert found == {name: cursor for name, cursor in CURSORS.items() if name != "egress:cloud"}
        assert [one.kind for one in log.damage] == ["cursor"]


async def test_a_cursor_beyond_the_newest_record_begins_again(closed: Made, tmp_path: Path) -> None:
    """Its checksum is right: it was written so."""
    shutil.copytree(closed.folder, tmp_path / "log", ignore=shutil.ignore_patterns("*.lock"))
    db = sqlite3.connect(tmp_path / "log" / "l.db")
    CURSOR.insert(db, [("egress:cloud", 4_000, None, 1, 5, "egress")])
    db.commit()
    db.close()
    async with await open_log(tmp_path / "log" / "l.db") as log:
        assert log.cursors.all()["egress:cloud"] == Cursor(0, holds=True, absent_ms=5, holder="egress")
        assert [one.kind for one in log.damage] == ["cursor"]


@pytest.mark.parametrize("mark", [b"", b"x", bytes(24), bytes(32), b"\xff" * 24, b"\xff" * 32, b"\xff" * 4_000])
async def test_a_bad_mark_is_reported_and_raises_nothing(closed: Made, tmp_path: Path, mark: bytes) -> None:
    await try_with(closed, tmp_path / "log", "l.db.mark", lambda _: mark)
    async with await open_log(tmp_path / "log" / "l.db") as log:
        assert [one.kind for one in log.damage] in (["mark"], ["missing"])


async def test_a_log_that_nothing_happened_to_is_sound(made: Made, tmp_path: Path) -> None:
    await try_with(made, tmp_path / "log", "l.db", lambda content: content)
    report = verify(tmp_path / "log" / "l.db")
    assert (report.found, report.reported, report.is_sound) == ([], [], True)
    assert (report.records, report.oldest_seq, report.newest_seq) == (61, 1, 61)


async def test_a_log_is_verified_while_it_is_written(tmp_path: Path) -> None:
    async with await open_log(tmp_path / "l.db") as log:

        async def write() -> None:
            for number in range(200):
                await log.append([stream(log, number % 4)], [message(number % 4, number)])

        writing = asyncio.create_task(write())
        for _ in range(5):
            report = await asyncio.to_thread(verify, tmp_path / "l.db")
            assert report.is_sound, report.found
        await writing


async def test_verify_changes_nothing(made: Made) -> None:
    def files() -> dict[str, Any]:
        kept = [path for path in made.folder.iterdir() if not path.name.endswith((".lock", "-shm"))]
        return {path.name: path.read_bytes() for path in kept if path.stat().st_size}

    before = files()
    assert verify(made.path).is_sound
    assert files() == before
