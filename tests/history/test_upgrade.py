"""Logs of the version before open with everything in them, or are refused unharmed; and the versions understand each
other on the wire."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from history.file import rows
from history.file.store import Store
from history.log.log import Cursor, Log
from history.service.service import HistoryService
from transports.local import LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DescribeRequest, DescribeResponse, PollRequest, PollResponse
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode

OldData = Callable[[str], Path]
WIRE = Path(__file__).parent.parent / "fixtures" / "data-0.1.0" / "wire.json"
DAY_MS = 24 * 3_600_000


async def open_log(folder: Path, now_ms: int) -> Log:
    return await Log.open(folder / "history.db", name="upgraded", now_ms=lambda: now_ms)


async def content(log: Log) -> list[dict[str, Any]]:
    """Every record, as expected.json has it."""
    found = []
    after = 0
    while chunks := await log.read(after):
        after = chunks[-1].last_seq
        for chunk in chunks:
            for seq, id, data in zip(chunk.seqs, chunk.streams, chunk.data, strict=True):
                stream = log.stream(id)
                sink = None if stream.sink is None else uris.format(stream.sink)
                found.append(
                    {
                        "seq": seq,
                        "stream": id,
                        "source": uris.format(stream.source),
                        "sink": sink,
                        "message": data.hex(),
                    }
                )
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if not path.name.endswith((".lock", "-shm")) and path.stat().st_size
    }


@pytest.mark.parametrize("name", ["stopped", "killed"])
async def test_a_log_of_0_1_0_keeps_records_positions_and_cursors(
    old_data: OldData, old_content: Any, name: str
) -> None:
    folder, expected = old_data(name), old_content["history"]
    now_ms, cursors = old_content["now_ms"], expected[name]["cursors"]
    records = expected["records"][: expected[name]["newest_seq"]]
    for _ in range(2):  # as the version before left it, and as we do
        async with await open_log(folder, now_ms) as log:
            assert log.incarnation.hex() == expected["incarnation"]
            assert await content(log) == records
            assert log.cursors() == cursors
            assert log.cursor_rows()["egress:cloud"] == Cursor(cursors["egress:cloud"], holds=True)
            assert log.cursor_rows()["consumer:app"].lease_until_ms == now_ms + 3_600_000
            assert (log.damage, log.holes, log.dropped) == ([], [], {})
            newest: dict[int, int] = {}
            for record in records:
                newest[record["stream"]] = record["seq"]
            assert {stream.id: stream.newest_seq for stream in log.streams()} == newest
            rare = records[-1]["stream"]
            found = [seq for chunk in await log.read(0, streams={rare}) for seq in chunk.seqs]
            assert found == [record["seq"] for record in records if record["stream"] == rare]


async def test_the_first_append_after_an_upgrade_goes_on_where_the_version_before_stopped(
    old_data: OldData, old_content: Any
) -> None:
    folder = old_data("killed")
    async with await open_log(folder, old_content["now_ms"]) as log:
        last = old_content["history"]["records"][-1]
        message = UMessageBuilder.publish(uris.parse(last["source"])).build_from_upayload(UPayload(b"new", 5))
        assert await log.append([last["stream"]], [message]) == last["seq"] + 1
        ((prev_seq,),) = [chunk.prev_seqs for chunk in await log.read(last["seq"])]
        assert prev_seq == last["seq"]


async def test_what_an_endpoint_waited_for_is_not_aged_by_the_upgrade(old_data: OldData, old_content: Any) -> None:
    """The version before could not say that its cursors hold what is old."""
    folder = old_data("stopped")
    async with await open_log(folder, old_content["now_ms"] + 30 * DAY_MS) as log:
        assert log.durable
        log._storage.writer._next_retention = 0.0
        log.set_cursor("egress:mcu", 32, holds=True)  # rouses the writer
        oldest = old_content["history"]["stopped"]["cursors"]["egress:cloud"]
        message = UMessageBuilder.publish(uris.parse("//vehicle1/8001/1/8000")).build_from_upayload(UPayload(b"new", 5))
        await log.append([log.stream_id(uris.parse("//vehicle1/8001/1/8000"))], [message])
        assert log.floor_seq <= oldest
        assert oldest + 1 in {record["seq"] for record in await content(log)}


class Interrupted(Exception):
    pass


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


async def test_an_upgrade_that_is_interrupted_at_any_statement_leaves_the_old_log(
    old_data: OldData, old_content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade = rows.upgrade
    expected, now_ms = old_content["history"], old_content["now_ms"]
    for statements in range(100):
        folder = old_data("killed")
        left = [statements]
        monkeypatch.setattr(rows, "upgrade", lambda db, left=left: upgrade(_Fragile(db, left)))  # type: ignore[misc, arg-type]
        refused: UStatusError | None = None
        try:
            Store(folder / "history.db").close()
        except UStatusError as error:
            refused = error
        if refused is None:
            assert left[0] == 0, "no statement was left out"
            assert statements > 15
            return
        assert refused.code == UCode.UNAVAILABLE
        db = sqlite3.connect(folder / "history.db")
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        assert db.execute("SELECT max(first_seq + records) - 1 FROM chunk").fetchone() == (
            expected["killed"]["newest_seq"],
        )
        assert db.execute("SELECT seq FROM cursor WHERE name = 'egress:cloud'").fetchone() == (97,)
        db.close()
        monkeypatch.setattr(rows, "upgrade", upgrade)
        if statements % 5 == 0:
            async with await open_log(folder, now_ms) as log:
                assert await content(log) == expected["records"]
        for path in folder.iterdir():
            path.unlink()
    raise AssertionError("it never ends")


@pytest.mark.parametrize("name", ["stopped", "killed"])
async def test_a_newer_log_is_refused_and_no_byte_of_it_changes(old_data: OldData, name: str) -> None:
    folder = old_data(name)
    db = sqlite3.connect(folder / "history.db")
    db.execute(f"PRAGMA user_version = {rows.SCHEMA_VERSION + 1}")
    if name == "killed":  # the newer version's write-ahead log stays where it is, too
        for suffix in ("", "-wal"):
            (folder / f"kept{suffix}").write_bytes((folder / f"history.db{suffix}").read_bytes())
    db.close()
    if name == "killed":
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
