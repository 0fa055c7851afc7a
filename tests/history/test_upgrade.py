"""A log of another format is migrated completely or refused unharmed; and the versions interoperate on the wire."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from history.file import opening, rows
from history.file.store import Store
from history.log.log import Log
from history.service.service import HistoryService
from storage.disk import Step, pragma
from transports.local import LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DescribeRequest, DescribeResponse, PollRequest, PollResponse
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode

WIRE = Path(__file__).parent.parent / "fixtures" / "data-0.1.0" / "wire.json"
TOPIC = uris.uri("vehicle1", 0x8001, 1, 0x8000)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.endswith((".lock", "-shm")) and path.stat().st_size
    }


async def made(path: Path, *, killed: bool = False) -> Path:
    """The folder of a log with three records and a cursor, closed or as a killed process leaves it."""
    async with await Log.open(path, name="made") as log:
        await append(log, 3)
        log.cursors.set("egress:cloud", 2, holds=True)
        await log.saved()
        left = path.parent
        if killed:
            left = path.parent / "killed"
            left.mkdir()
            for file in path.parent.glob("history.db*"):
                shutil.copy(file, left)
    return left


async def append(log: Log, count: int) -> None:
    message = UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b"x", 5))
    await log.append([log.stream_id(TOPIC)] * count, [message] * count)


class _Fragile:
    """A connection that fails at its n-th statement."""

    def __init__(self, db: sqlite3.Connection, left: list[int]) -> None:
        self._db, self._left = db, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def _count(self) -> None:
        self._left[0] -= 1
        if self._left[0] < 0:
            raise sqlite3.OperationalError("disk I/O error")

    def execute(self, *arguments: Any) -> Any:
        self._count()
        return self._db.execute(*arguments)

    def executemany(self, *arguments: Any) -> Any:
        self._count()
        return self._db.executemany(*arguments)


def add_column(db: sqlite3.Connection) -> None:
    """A made-up step from version 1 to version 2."""
    db.execute("CREATE TABLE note (text TEXT)")
    db.execute("INSERT INTO note VALUES ('new')")


async def test_a_migration_that_fails_at_any_statement_leaves_the_old_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history.db"
    await made(path)

    def version() -> int:
        with contextlib.closing(sqlite3.connect(path)) as db:
            return pragma(db, "user_version")

    def new_program(step: Step) -> None:
        monkeypatch.setattr(opening, "LOG", replace(rows.LOG, version=2, migrations={1: step}))

    for statements in range(2):
        new_program(lambda db, left=[statements]: add_column(_Fragile(db, left)))  # type: ignore[arg-type, misc]
        with pytest.raises(UStatusError) as error:
            Store(path).close()
        assert error.value.code == UCode.UNAVAILABLE
        assert version() == 1
        monkeypatch.undo()
        async with await Log.open(path, name="old program") as log:
            assert (log.newest_seq, log.cursors.seqs(), log.damage) == (3, {"egress:cloud": 2}, [])
    new_program(add_column)
    for _ in range(2):
        async with await Log.open(path, name="new program") as log:
            assert (log.newest_seq, log.cursors.seqs(), log.damage) == (3, {"egress:cloud": 2}, [])
        assert version() == 2
    monkeypatch.undo()
    with pytest.raises(UStatusError, match="newer"):
        await Log.open(path, name="old program")


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
async def test_a_newer_log_is_refused_and_no_byte_of_it_changes(tmp_path: Path, *, killed: bool) -> None:
    folder = await made(tmp_path / "history.db", killed=killed)
    db = sqlite3.connect(folder / "history.db")
    db.execute(f"PRAGMA user_version = {rows.SCHEMA_VERSION + 1}")
    if killed:  # the write-ahead log of the newer version must not change either
        for suffix in ("", "-wal"):
            (folder / f"kept{suffix}").write_bytes((folder / f"history.db{suffix}").read_bytes())
    db.close()
    if killed:
        for suffix in ("", "-wal"):
            (folder / f"kept{suffix}").replace(folder / f"history.db{suffix}")
        assert (folder / "history.db-wal").stat().st_size > 0
    before = files(folder)
    for _ in range(2):
        with pytest.raises(UStatusError, match="newer") as error:
            await Log.open(folder / "history.db", name="old")
        assert error.value.code == UCode.FAILED_PRECONDITION
    assert files(folder) == before


# -- the wire


async def test_what_0_1_0_asks_is_answered_and_what_it_answers_is_understood(tmp_path: Path) -> None:
    wire = json.loads(WIRE.read_text())
    log = await Log.open(None, name="wire")
    topics = [uris.uri("vehicle1", 0x8001, 1, 0x8000 + place) for place in range(4)]
    for topic in topics:
        await log.append(
            [log.stream_id(topic)], [UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"x", 5))]
        )
    local = LocalUriProvider("vehicle1", 4, 1)
    service = HistoryService(LocalTransport.on(LocalNetwork(), local), local, [log])
    for name, kept in wire.items():
        request = UMessageBuilder.request(
            uris.parse("//cloud/9001/1/0"), uris.uri("vehicle1", 4, 1, kept["method"]), 10_000
        )
        data = bytes.fromhex(kept["request"])
        asked = DescribeRequest.FromString(data) if kept["method"] == 1 else PollRequest.FromString(data)
        assert asked.SerializeToString() == data, "nothing of it is unknown here"
        answer: DescribeResponse | PollResponse
        if isinstance(asked, DescribeRequest):
            answer = await service._describe(request.pack(asked))
            assert len(answer.topics) == 4
        else:
            answer = await service._poll(request.pack(asked))
            assert [position.incarnation for position in answer.next] == [log.incarnation]
            assert {gap.reason for gap in answer.gaps} == ({2} if name in ("positions", "consumer", "gone") else set())
        old = type(answer).FromString(bytes.fromhex(kept["response"]))
        assert old.SerializeToString() == bytes.fromhex(kept["response"])
    await log.close()


async def test_what_a_newer_version_adds_is_passed_over() -> None:
    """Unknown fields, of every wire type, behind what is known."""
    added = b"\xf8\x7f\x01" + b"\xf2\x7f\x03abc" + b"\xf5\x7f\x01\x02\x03\x04" + b"\xf1\x7f" + bytes(8)
    log = await Log.open(None, name="wire")
    local = LocalUriProvider("vehicle1", 4, 1)
    service = HistoryService(LocalTransport.on(LocalNetwork(), local), local, [log])
    for kept in json.loads(WIRE.read_text()).values():
        request = UMessageBuilder.request(
            uris.parse("//cloud/9001/1/0"), uris.uri("vehicle1", 4, 1, kept["method"]), 10_000
        )
        answer = service._describe if kept["method"] == 1 else service._poll
        payload = UPayload(bytes.fromhex(kept["request"]) + added, 2)
        await answer(request.build_from_upayload(payload))
        response = bytes.fromhex(kept["response"]) + added
        if kept["method"] == 1:
            assert DescribeResponse.FromString(response).logs
        else:
            assert PollResponse.FromString(response).next
    await log.close()
