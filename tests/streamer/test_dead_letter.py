"""Dead letters: kept, bounded, published to subscribers, never about themselves, harmless when the disk fails."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from storage.runtime import REAL, Runtime
from streamer.letters import dead_letter
from streamer.letters.dead_letter import DeadLetters, LetterStore
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DeadLetter
from uprotocol.encoded import EncodedMessage, Stamp
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

TOPIC = uris.parse("//vehicle1/8001/1/8001")
DISK_BYTES_MAX = 128 << 20  # of all files of the store: its bounds and the overhead of SQLite
TOLD = "a message became a dead letter"


def publication(text: str = "x") -> UMessage:
    return UMessageBuilder.publish(TOPIC).build_from_upayload(
        UPayload(text.encode(), UPayloadFormat.UPAYLOAD_FORMAT_TEXT)
    )


class Desk:
    """Dead letters with a store, and what they publish."""

    def __init__(self, path: Path, runtime: Runtime = REAL, **limits: Any) -> None:
        self.published: list[tuple[str, DeadLetter]] = []
        self.refuse = False
        runtime = dataclasses.replace(runtime, now_ms=lambda: 1_700_000_000_000)
        self.letters = DeadLetters(path, "vehicle1", self._publish, runtime, **limits)

    async def _publish(self, topic: UUri, letter: DeadLetter) -> None:
        if self.refuse:
            raise UStatusError(UCode.UNAVAILABLE, "the network is away")
        self.published.append((uris.format(topic), letter))


@pytest.mark.spec("local~disp-dlt-reason")
@pytest.mark.spec("local~disp-dlt-full")
async def test_a_letter_is_stored_and_published_with_all_that_is_known(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "letters.db")
    message = publication("lost")
    desk.letters.add(message, UCode.NOT_FOUND, "not this one", "cloud")
    await desk.letters.close()
    ((topic, letter),) = desk.published
    assert topic == "up://vehicle1/4/1/8001"
    assert (letter.message, letter.code, letter.reason, letter.endpoint) == (
        message,
        UCode.NOT_FOUND,
        "not this one",
        "cloud",
    )
    assert letter.time.ToMilliseconds() == 1_700_000_000_000
    (stored,) = dead_letter.open_read_only(tmp_path / "letters.db").read()
    assert stored.message == message
    shown = stored.as_dict()
    assert (shown["code"], shown["reason"], shown["source"]) == (
        "NOT_FOUND",
        "not this one",
        "up://vehicle1/8001/1/8001",
    )


async def test_what_the_rules_deny_does_not_leave_as_a_dead_letter_either(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "letters.db")
    message = publication("secret")
    desk.letters.add(message, UCode.PERMISSION_DENIED, "no rule", "cloud", is_withheld=True)
    await desk.letters.close()
    ((_, letter),) = desk.published
    assert letter.message.attributes == message.attributes
    assert not letter.message.HasField("payload")
    assert "denied" in letter.reason
    (stored,) = dead_letter.open_read_only(tmp_path / "letters.db").read()
    assert stored.message == message


async def test_there_is_no_dead_letter_of_a_dead_letter(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "letters.db")
    letter = UMessageBuilder.publish(ids.at("vehicle1", ids.DEAD_LETTERS)).build()
    desk.letters.add(letter, UCode.UNAVAILABLE, "away", "cloud")
    assert (desk.letters.total, desk.letters.lost) == (1, 1)
    await desk.letters.close()
    assert desk.published == []


async def test_a_flood_costs_no_memory_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter, "STORED_PER_MINUTE", 1 << 30)
    desk = Desk(tmp_path / "letters.db")
    message = publication()
    for _ in range(dead_letter.LETTERS_QUEUED_MAX + 100):
        desk.letters.add(message, UCode.UNAVAILABLE, "away", "cloud")
    assert (desk.letters.total, desk.letters.lost) == (dead_letter.LETTERS_QUEUED_MAX + 100, 100)
    assert desk.letters.by_code == {"UNAVAILABLE": dead_letter.LETTERS_QUEUED_MAX + 100}
    await desk.letters.close()
    assert len(desk.published) == dead_letter.LETTERS_QUEUED_MAX


async def test_the_oldest_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter, "STORED_MAX", 5)
    desk = Desk(tmp_path / "letters.db")
    for number in range(8):
        desk.letters.add(publication(str(number)), UCode.UNAVAILABLE, "away", "cloud")
    await desk.letters.close()
    store = dead_letter.open_read_only(tmp_path / "letters.db")
    assert [one.message.payload for one in store.read()] == [b"3", b"4", b"5", b"6", b"7"]
    assert [one.message.payload for one in store.read(2)] == [b"6", b"7"]


async def test_a_disk_or_a_network_that_refuses_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path / "letters.db")
    running = asyncio.create_task(desk.letters.run())
    with monkeypatch.context() as patch:

        def full(self: LetterStore, rows: Any) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        patch.setattr(LetterStore, "write", full)
        desk.letters.add(publication("not stored"), UCode.UNAVAILABLE, "away", "cloud")
        async with asyncio.timeout(10):
            while not desk.published:  # noqa: ASYNC110 - nothing tells when
                await asyncio.sleep(0.005)
    assert desk.letters.lost == 1
    desk.refuse = True
    desk.letters.add(publication("not published"), UCode.UNAVAILABLE, "away", "cloud")
    await asyncio.sleep(0)  # it is being stored when the streamer ends
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await desk.letters.close()
    stored = dead_letter.open_read_only(tmp_path / "letters.db").read()
    assert [one.message.payload for one in stored] == [b"not published"]


def test_a_write_that_failed_does_not_stop_the_next_one(tmp_path: Path) -> None:
    store = LetterStore(tmp_path / "letters.db")
    good = (1, 14, "away", "cloud", publication().SerializeToString())
    with pytest.raises(sqlite3.Error):
        store.write([good, (1, 14, "away", object(), b"")])  # type: ignore[list-item]
    store.write([good])
    assert len(store.read()) == 1
    store.close()


def test_what_is_no_store_is_said(tmp_path: Path) -> None:
    (tmp_path / "letters.db").write_bytes(b"something else entirely" * 100)
    with pytest.raises(UStatusError, match="check it, or move it away"):
        dead_letter.open_read_only(tmp_path / "letters.db")
    with pytest.raises(UStatusError, match="has run"):
        dead_letter.open_read_only(tmp_path / "nowhere.db")


def payloads(path: Path) -> list[bytes]:
    store = dead_letter.open_read_only(path)
    try:
        return [one.message.payload for one in store.read()]
    finally:
        store.close()


async def test_a_damaged_store_is_moved_aside_and_a_new_one_starts(tmp_path: Path) -> None:
    path = tmp_path / "letters.db"
    noise = b"something else entirely" * 100
    path.write_bytes(noise)
    desk = Desk(path)
    assert (desk.letters.trouble, desk.letters.damaged) == (None, 1)
    desk.letters.add(publication("kept"), UCode.UNAVAILABLE, "away", "cloud")
    await desk.letters.close()
    assert payloads(path) == [b"kept"]
    assert [one.read_bytes() for one in tmp_path.glob("letters.db.damaged-*")] == [noise]
    assert desk.letters.lost == 0


async def test_a_store_that_is_damaged_while_it_is_used_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "letters.db"
    desk = Desk(path)
    for number in range(50):
        desk.letters.add(publication(f"{number}" * 1_000), UCode.UNAVAILABLE, "away", "cloud")
        await desk.letters._flush()
    assert desk.letters._store is not None
    desk.letters._store._file.connect().execute("pragma wal_checkpoint(truncate)")
    desk.letters._store._file.connect().execute("pragma cache_size=0")
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(range(256)) * 300)
    for number in range(3):
        desk.letters.add(publication(f"later {number}"), UCode.UNAVAILABLE, "away", "cloud")
        await desk.letters._flush()
    await desk.letters.close()
    assert (desk.letters.trouble, desk.letters.damaged, desk.letters.lost) == (None, 1, 0)
    assert payloads(path) == [b"later 0", b"later 1", b"later 2"]


async def test_a_newer_store_is_left_as_it_is_and_letters_are_published_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "letters.db"
    LetterStore(path).close()
    db = sqlite3.connect(path)
    db.execute("pragma user_version = 99")
    db.close()
    before = path.read_bytes()
    desk = Desk(path)
    assert "newer program" in (desk.letters.trouble or "")
    desk.letters.add(publication(), UCode.UNAVAILABLE, "away", "cloud")
    await desk.letters.close()
    assert (path.read_bytes(), len(desk.published), desk.letters.lost, desk.letters.damaged) == (before, 1, 1, 0)
    assert not list(tmp_path.glob("*damaged*"))


@pytest.mark.parametrize(
    "statements",
    [
        ("pragma application_id = 7",),
        ("pragma application_id = 0", "drop table letter", "create table letter(id, sender, text)"),
    ],
)
def test_letters_of_another_program_are_refused_and_not_changed(tmp_path: Path, statements: tuple[str, ...]) -> None:
    path = tmp_path / "letters.db"
    LetterStore(path).close()
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.close()
    before = path.read_bytes()
    with pytest.raises(UStatusError, match="but not a dead letter store") as error:
        LetterStore(path)
    assert error.value.code == UCode.FAILED_PRECONDITION
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*damaged*"))


async def test_two_streamers_do_not_share_a_store(tmp_path: Path) -> None:
    first, second = Desk(tmp_path / "letters.db"), Desk(tmp_path / "letters.db")
    assert "in use by process" in (second.letters.trouble or "")
    await second.letters.close()
    assert first.letters.trouble is None
    await first.letters.close()


async def test_a_disk_that_is_full_at_the_start_harms_nothing_and_letters_are_stored_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter, "OPEN_AGAIN_S", 0.0)
    path = tmp_path / "letters.db"
    store = LetterStore(path)
    store.write([(1, 14, "away", "cloud", publication("old").SerializeToString())])
    store.close()
    with monkeypatch.context() as patch:

        def full(self: LetterStore) -> None:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

        patch.setattr(LetterStore, "_check", full)
        desk = Desk(path)
        assert "disk is full" in (desk.letters.trouble or "")
        desk.letters.add(publication("not stored"), UCode.UNAVAILABLE, "away", "cloud")
        await desk.letters._flush()
        assert (desk.letters.lost, desk.letters.damaged) == (1, 0)
    desk.letters.add(publication("new"), UCode.UNAVAILABLE, "away", "cloud")
    await desk.letters.close()
    assert (desk.letters.trouble, desk.letters.lost) == (None, 1)
    assert payloads(path) == [b"old", b"new"]


async def test_letters_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter, "STORED_BYTES_MAX", 5_000)
    desk = Desk(tmp_path / "letters.db", bytes_max=3_000)
    for number in range(10):
        for _ in range(5):
            desk.letters.add(publication(f"{number}" * 1_000), UCode.UNAVAILABLE, "away", "cloud")
        while desk.letters._queue:
            await desk.letters._flush()
    await desk.letters.close()
    stored = payloads(tmp_path / "letters.db")
    assert [one[:1] for one in stored] == [b"8", b"8", b"9", b"9"]
    assert desk.letters.lost == 30


def of(authority: str, payload: bytes = b"x") -> UMessage:
    topic = uris.uri(authority, 0x8001, 1, 0x8001)
    return UMessageBuilder.publish(topic).build_from_upayload(UPayload(payload, UPayloadFormat.UPAYLOAD_FORMAT_RAW))


async def test_the_flood_of_one_pushes_out_its_own_and_leaves_what_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter, "STORED_MAX", 20)
    monkeypatch.setattr(dead_letter, "LETTERS_QUEUED_MAX", 10)
    desk = Desk(tmp_path / "letters.db")
    for number in range(4):
        desk.letters.add(of("honest", b"%d" % number), UCode.UNAVAILABLE, "away", "cloud")
    for round in range(30):
        for number in range(10):
            desk.letters.add(of("loud", b"%d %d" % (round, number)), UCode.UNAVAILABLE, "away", "cloud")
        await desk.letters._flush()
    await desk.letters.close()
    stored = payloads(tmp_path / "letters.db")
    assert [one for one in stored if b" " not in one] == [b"0", b"1", b"2", b"3"]
    assert len(stored) == 20
    assert stored[-1] == b"29 9"
    assert desk.letters.lost == 4  # of the flood, in the first round
    assert {letter.message.payload for _, letter in desk.published} >= {b"0", b"1", b"2", b"3"}


async def test_large_letters_of_one_leave_room_in_bytes_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter, "STORED_BYTES_MAX", 40_000)
    desk = Desk(tmp_path / "letters.db", bytes_max=20_000)
    desk.letters.add(of("honest", b"h" * 3_000), UCode.UNAVAILABLE, "away", "cloud")
    for _ in range(50):
        desk.letters.add(of("loud", b"l" * 9_000), UCode.UNAVAILABLE, "away", "cloud")
    assert desk.letters._queue.used.bytes <= 20_000
    for _ in range(10):
        desk.letters.add(of("loud", b"l" * 9_000), UCode.UNAVAILABLE, "away", "cloud")
        await desk.letters._flush()
    await desk.letters.close()
    stored = payloads(tmp_path / "letters.db")
    assert stored[0] == b"h" * 3_000
    assert sum(map(len, stored)) <= 40_000


async def test_dead_letters_of_one_kind_are_limited_per_minute_and_the_others_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter, "STORED_PER_MINUTE", 10)
    now = 0.0
    desk = Desk(tmp_path / "letters.db", runtime=Runtime(monotonic=lambda: now))
    with capture_logs() as lines:
        for number in range(50):
            desk.letters.add(of("loud"), UCode.RESOURCE_EXHAUSTED, f"{number} wait for endpoint 'e{number}'", "cloud")
    assert [line["authority"] for line in lines if line["event"].startswith("too many")] == ["loud"]
    assert [line["reason"] for line in lines if line["event"] == TOLD] == ["0 wait for endpoint 'e0'"]
    desk.letters.add(of("loud"), UCode.RESOURCE_EXHAUSTED, "another reason", "cloud")
    desk.letters.add(of("honest"), UCode.RESOURCE_EXHAUSTED, "1 wait for endpoint 'e1'", "cloud")
    assert (desk.letters.total, desk.letters.limited, desk.letters.lost) == (52, 40, 0)
    assert desk.letters.by_code == {"RESOURCE_EXHAUSTED": 52}
    now = 61.0
    with capture_logs() as lines:
        desk.letters.add(of("loud"), UCode.RESOURCE_EXHAUSTED, "51 wait for endpoint 'e51'", "cloud")
    assert [line["minute_before"] for line in lines] == [51]
    assert desk.letters.limited == 40
    await desk.letters.close()
    assert len(payloads(tmp_path / "letters.db")) == 13


async def test_beyond_so_many_bytes_of_one_kind_a_letter_has_no_payload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter, "WHOLE_BYTES_PER_MINUTE", 25_000)
    desk = Desk(tmp_path / "letters.db")
    sent = [of("loud", b"%d" % number * 10_000) for number in range(4)]
    for message in sent:
        desk.letters.add(message, UCode.UNAVAILABLE, "away", "cloud")
    await desk.letters.close()
    stored = dead_letter.open_read_only(tmp_path / "letters.db").read()
    assert [len(one.message.payload) for one in stored] == [10_000, 10_000, 0, 0]
    assert [one.message.attributes for one in stored] == [message.attributes for message in sent]
    assert [("without its payload of 10" in one.reason) for one in stored] == [False, False, True, True]


@pytest.mark.spec("local~disp-dlt-header")
async def test_what_no_network_takes_is_stored_whole_and_published_with_its_attributes(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "letters.db", message_bytes_max=100_000)
    large, small = of("vehicle1", b"x" * 99_000), of("vehicle1", b"y" * 90_000)
    for message in (large, small):
        desk.letters.add(message, UCode.UNAVAILABLE, "away" * 1_000, "cloud")
    await desk.letters.close()
    assert payloads(tmp_path / "letters.db") == [large.payload, small.payload]
    (first, second) = [letter for _, letter in desk.published]
    assert (first.message.attributes, first.message.payload) == (large.attributes, b"")
    assert "too large to be published" in first.reason
    assert second.message == small
    assert max(first.ByteSize(), second.ByteSize()) <= 100_000


async def test_an_encoded_message_is_a_letter_as_it_is(tmp_path: Path) -> None:
    message = of("vehicle1", b"as it came")
    encoded = message.attributes.SerializeToString()
    carried = EncodedMessage(encoded, message.payload, Stamp(message.attributes))
    desk = Desk(tmp_path / "letters.db")
    desk.letters.add(carried, UCode.UNAVAILABLE, "away", "cloud")
    assert carried._decoded is None, "nothing is parsed for what may be counted only"
    await desk.letters.close()
    assert [letter.message for _, letter in desk.published] == [message]
    assert payloads(tmp_path / "letters.db") == [b"as it came"]


def disk_bytes(path: Path) -> int:
    return sum(one.stat().st_size for one in path.parent.glob(path.name + "*"))


def large_row(number: int) -> dead_letter.LetterRow:
    return (
        number,
        14,
        "away",
        "cloud",
        of(f"vehicle{number % 7}", bytes([number % 251]) * (4 << 20)).SerializeToString(),
    )


def test_the_files_of_the_store_are_bounded_also_while_somebody_reads_them(tmp_path: Path) -> None:
    """A reader keeps the write-ahead log from being emptied: 100 messages of 4 MB made it 400 MiB."""
    path = tmp_path / "letters.db"
    store = LetterStore(path)
    store.write([large_row(1)])
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("begin")
    reader.execute("select count(*) from letter").fetchone()
    refused = 0
    for number in range(30):
        try:
            store.write([large_row(number)])
        except sqlite3.OperationalError as error:
            refused += "has been reading" in str(error)
        assert disk_bytes(path) <= DISK_BYTES_MAX
    assert refused > 10
    reader.execute("commit")
    reader.close()
    for number in range(30):
        store.write([large_row(number)] * 2)
        assert disk_bytes(path) <= DISK_BYTES_MAX
    assert len(store.read()) == dead_letter.STORED_BYTES_MAX // (4 << 20) - 1
    store.close()


def test_a_file_that_was_large_once_gives_back_its_room(tmp_path: Path) -> None:
    path = tmp_path / "letters.db"
    store = LetterStore(path)
    store.write([large_row(number) for number in range(8)])
    store._file.connect().execute("delete from letter where number < 8")
    store.close()
    assert path.stat().st_size > 32 << 20
    store = LetterStore(path)
    (kept,) = store.read()
    store.close()
    assert len(kept.message.payload) == 4 << 20
    assert disk_bytes(path) < 6 << 20
