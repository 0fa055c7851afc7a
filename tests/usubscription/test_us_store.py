"""The store: what it refuses to open, what it survives, what its readers return."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage import runtime as runtime_module
from storage.runtime import Answerer, Runtime
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.state import Key, Status, Subscribe
from usubscription.store import database, tables
from usubscription.store.database import Database, Hold, Outcome, Register, Unregister
from usubscription.store.store import SubscriptionStore
from usubscription.store.tables import Tables

TOPIC: Key = ("dev1", 0x20, 1, 0x8001)
FAR: Key = ("dev2", 0x20, 1, 0x8001)
APP: Key = ("dev1", 0x10, 1, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with one subscription."""
    made = tmp_path / "store.db"
    db = Database(made, "dev1")
    db.open()
    db.apply([Subscribe(TOPIC, APP, 4)], 0)
    db.close()
    return made


def executing(statements: list[str]) -> Callable[[sqlite3.Connection], None]:
    """A step of a migration."""

    def execute(db: sqlite3.Connection) -> None:
        for statement in statements:
            db.execute(statement)

    return execute


def refused(path: Path, authority: str = "dev1") -> UStatusError:
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(UStatusError) as error:
        Database(path, authority).open()
    assert (path.read_bytes() if path.is_file() else None) == before, "what can't be opened is left as it is"
    return error.value


def execute(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(statement)
    db.close()


def test_a_corrupt_store_is_refused_and_never_replaced_by_an_empty_one(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for start in range(4096, len(content), 4096):
        content[start : start + 100] = b"\xa5" * 100
    path.write_bytes(bytes(content))
    error = refused(path)
    assert error.code == UCode.DATA_LOSS
    assert str(path) in error.message


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 100])
def test_something_else_in_its_place_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert refused(path).code == UCode.DATA_LOSS


def test_a_reader_that_never_ends_does_not_let_the_write_ahead_log_grow_without_bound(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def subscribe(store: Database) -> None:
        for place in range(1_000):
            store.apply([Subscribe(TOPIC, ("dev1", place, 1, 0), 4)], 0)

    monkeypatch.setattr(database, "WAL_HELD_BYTES_MAX", 200_000)
    with contextlib.closing(Database(path, "dev1")) as store, contextlib.closing(sqlite3.connect(path)) as reader:
        store.open()
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM uri").fetchone()
        with pytest.raises(UStatusError, match=r"UNAVAILABLE.*somebody has been reading .* end that reader"):
            subscribe(store)
        assert Path(f"{path}-wal").stat().st_size < 400_000
        reader.rollback()
        store.apply([Subscribe(TOPIC, APP, 4)], 0)


def test_a_truncated_store_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])
    assert refused(path).code == UCode.DATA_LOSS


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    execute(other, "CREATE TABLE t(x)")
    error = refused(other)
    assert error.code == UCode.FAILED_PRECONDITION
    assert "not a uSubscription store" in error.message


def test_another_programs_database_is_refused_also_where_it_has_tables_of_these_names(path: Path) -> None:
    execute(path, "PRAGMA application_id=7")
    before = path.read_bytes()
    error = refused(path)
    assert (error.code, "not a uSubscription store" in error.message) == (UCode.FAILED_PRECONDITION, True)
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused(path: Path) -> None:
    execute(path, f"PRAGMA user_version={tables.SCHEMA_VERSION + 1}")
    error = refused(path)
    assert error.code == UCode.FAILED_PRECONDITION
    assert "use a newer program" in error.message


@pytest.mark.parametrize(
    "change", ["DROP TABLE outbox", "ALTER TABLE link ADD COLUMN more", "DROP INDEX subscription_expiry"]
)
def test_a_store_of_a_development_version_is_refused_unharmed(path: Path, change: str) -> None:
    execute(path, change)
    error = refused(path)
    assert error.code == UCode.FAILED_PRECONDITION
    assert "a development version wrote it; move it away" in error.message
    assert str(path) in error.message
    assert not path.with_name("store.db.new").exists()


def test_an_older_schema_is_migrated_and_one_too_old_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tables.SCHEMA_VERSION
    monkeypatch.setattr(database, "STORE", replace(tables.STORE, version=old + 2))
    assert "too old to migrate" in refused(path).message
    steps = {old: ["ALTER TABLE link ADD COLUMN one"], old + 1: ["CREATE TABLE two(x)"]}
    migrations = {version: executing(statements) for version, statements in steps.items()}
    monkeypatch.setattr(database, "STORE", replace(database.STORE, migrations=migrations))
    db = Database(path, "dev1")
    db.open()
    assert db._file.connect().execute("PRAGMA user_version").fetchone() == (old + 2,)
    assert db.reader().count() == 1
    db.close()


def test_a_migration_that_fails_leaves_the_store_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tables.SCHEMA_VERSION
    migrations = {old: executing(["CREATE TABLE one(x)", "no SQL"])}
    monkeypatch.setattr(database, "STORE", replace(tables.STORE, version=old + 1, migrations=migrations))
    with pytest.raises(UStatusError):
        Database(path, "dev1").open()
    monkeypatch.undo()
    db = Database(path, "dev1")
    db.open()
    assert db.reader().count() == 1
    db.close()


def test_the_store_of_another_authority_is_refused(path: Path) -> None:
    error = refused(path, "dev2")
    assert error.code == UCode.FAILED_PRECONDITION
    assert "'dev1'" in error.message


def test_a_store_in_use_is_refused(path: Path) -> None:
    db = Database(path, "dev1")
    db.open()
    error = refused(path)
    assert error.code == UCode.ALREADY_EXISTS
    assert f"in use by process {os.getpid()}" in error.message
    db.close()
    again = Database(path, "dev1")
    again.open()
    again.close()
    again.close()


def test_a_directory_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none" / "store.db").message


READ_ONLY = """
import os, sys
from uprotocol.status import UStatusError
from usubscription.store.database import Database
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    Database(sys.argv[1], "dev1").open()
except UStatusError as error:
    print(error)
"""


def test_a_read_only_store_is_a_clear_error(path: Path) -> None:
    """In a separate process, since root may write everything."""
    path.chmod(0o444)
    for directory in (path.parent, *path.parent.parents):
        if directory.stat().st_uid == os.getuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o055)
    path.parent.chmod(0o555)
    try:
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, str(path)], capture_output=True, text=True, timeout=60, check=True
        )
    finally:
        path.parent.chmod(0o755)
    assert done.stdout.startswith("PERMISSION_DENIED: "), done.stdout + done.stderr
    assert "check its permissions" in done.stdout


def test_limits_answer_resource_exhausted_and_what_is_there_goes_on(tmp_path: Path) -> None:
    db = Database(tmp_path / "store.db", "dev1", subscriptions_max=8)
    db.open()
    events = [Subscribe(("dev1", number, 1, 0x8000), APP, 4) for number in range(1, 4)]
    first, second, third = db.apply(events, 0)
    assert isinstance(first, Outcome)
    assert isinstance(second, Outcome)
    assert isinstance(third, UStatusError)
    assert third.code == UCode.RESOURCE_EXHAUSTED
    db.close()


def test_registrations_have_a_limit_and_are_counted_across_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("usubscription.store.database.REGISTRATIONS_MAX", 2)
    monkeypatch.setattr("usubscription.store.database.REGISTERED_FOR_ALL_MAX", 1)
    clients: list[Key] = [("dev1", number, 1, 0) for number in range(1, 4)]
    db = Database(tmp_path / "store.db", "dev1")
    for expected in ([True, True, False], [True, True, False]):
        db.open()
        results = db.apply([Register(client, 3, TOPIC) for client in clients], 0)
        assert [isinstance(result, Outcome) for result in results] == expected
        results = db.apply([Register(client, 4, None) for client in clients[:2]], 0)
        assert isinstance(results[1], UStatusError)
        db.apply([Unregister(client, 4, None) for client in clients], 0)
        db.apply([Unregister(clients[0], 3, TOPIC), Register(clients[0], 3, TOPIC)], 0)
        db.close()


def test_a_registration_more_does_not_read_all_of_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A streamer of version 3 registers for each topic, and is then notified of its changes."""
    reads: list[int] = []
    whole = Tables._registrations

    def counted(self: Tables) -> Any:
        reads.append(1)
        return whole(self)

    monkeypatch.setattr(Tables, "_registrations", counted)
    topics: list[Key] = [("dev1", 0x20, 1, 0x8001 + number) for number in range(20)]
    clients: list[Key] = [("dev1", 0x30 + number, 1, 0) for number in range(3)]
    db = Database(path, "dev1")
    db.open()

    def remaining(db: Database, expires_ms: int) -> dict[Key, set[tuple[Key, int]]]:
        outcomes = db.apply([Subscribe(topic, APP, 4, expires_ms=expires_ms) for topic in topics], 0)
        assert all(isinstance(outcome, Outcome) for outcome in outcomes)
        stored = [one for outcome in outcomes if isinstance(outcome, Outcome) for one in outcome.changes]
        return {one.change.topic: set(one.recipients) for one in stored}

    assert set(map(len, remaining(db, 1_000).values())) == {1}
    for topic in topics:
        for client in clients:
            db.apply([Register(client, 4, topic), Register(client, 4, topic)], 0)
        db.apply([Unregister(clients[1], 4, topic), Unregister(clients[1], 4, topic)], 0)
    db.apply([Register(clients[1], 4, None), Register(clients[2], 4, None), Unregister(clients[2], 4, None)], 0)
    now = remaining(db, 2_000)
    assert now == {topic: {(APP, 4), *((client, 4) for client in clients)} for topic in topics}
    assert len(reads) == 1
    db.close()
    db.open()
    assert remaining(db, 3_000) == now
    db.close()


def test_the_oldest_changes_leave_a_full_outbox_and_are_counted(tmp_path: Path) -> None:
    db = Database(tmp_path / "store.db", "dev1", outbox_changes_max=100)
    db.open()
    for number in range(1100):
        db.apply([Subscribe(("dev1", number + 1, 1, 0x8000), APP, 4)], 0)
    reader = db.reader()
    kept = reader.outbox(0, -1)
    assert len(kept) < 1100
    assert kept[-1].number == 1100
    assert db.tables.dropped == 1100 - len(kept)
    reader.close()
    db.close()


# -- the threads
# ------------------------------------------------------------------------------------------------------------------


def _no_trouble() -> None:
    raise AssertionError("the store is in trouble")


async def test_many_requests_share_a_transaction(path: Path) -> None:
    batches: list[int] = []
    database = Database(path, "dev1")
    store = SubscriptionStore(
        database, lambda outcomes: batches.append(len(outcomes)), lambda outcomes: None, _no_trouble
    )
    await store.start()
    events = [Subscribe(("dev1", number + 1, 1, 0x8000), APP, 4) for number in range(1000)]
    outcomes = await asyncio.gather(*(store.submit(event) for event in events))
    assert all(outcome.answer is Status.SUBSCRIBED for outcome in outcomes)
    assert len(batches) <= 100
    assert await store.read(lambda reader: reader.count()) == 1001
    await store.stop()


async def test_answers_come_after_the_commit_and_after_the_hook(path: Path) -> None:
    order: list[str] = []

    async def committed(outcomes: Any) -> None:
        count = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        order.append(f"hook sees {count.execute('SELECT count(*) FROM subscription').fetchone()[0]}")
        count.close()
        await asyncio.sleep(0)

    store = SubscriptionStore(
        Database(path, "dev1"), committed, lambda outcomes: order.append("consequences"), _no_trouble
    )
    await store.start()
    future = store.submit(Subscribe(FAR, APP, 4))
    future.add_done_callback(lambda _: order.append("answer"))
    await future
    await asyncio.sleep(0)
    assert order[0] == "hook sees 2"
    assert sorted(order[1:]) == ["answer", "consequences"]
    await store.stop()


async def test_a_stop_that_is_cancelled_goes_on_and_the_next_one_waits_for_it(path: Path) -> None:
    hook_may_end = asyncio.Event()

    async def committed(outcomes: Any) -> None:
        await hook_may_end.wait()

    store = SubscriptionStore(Database(path, "dev1"), committed, lambda outcomes: None, _no_trouble)
    await store.start()
    future = store.submit(Subscribe(FAR, APP, 4))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(store.stop(), 0.05)
    again = asyncio.ensure_future(store.stop())
    await asyncio.sleep(0)
    assert not again.done()
    hook_may_end.set()
    await again
    assert (await future).answer is Status.SUBSCRIBE_PENDING
    await store.start()
    assert await store.read(lambda reader: reader.count()) == 2
    await store.stop()


async def test_a_question_that_fails_is_an_error_of_its_asker_alone(path: Path) -> None:
    store = SubscriptionStore(Database(path, "dev1"), lambda outcomes: None, lambda outcomes: None, _no_trouble)
    await store.start()
    results = await asyncio.gather(
        store.read(lambda reader: 1 // 0), store.read(lambda reader: reader.count()), return_exceptions=True
    )
    assert isinstance(results[0], ZeroDivisionError)
    assert results[1] == 1
    await store.stop()
    await store.stop()
    with pytest.raises(UStatusError):
        store.submit(Subscribe(FAR, APP, 4))


async def test_a_lane_takes_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "WAITING_MAX", 3)
    gate = threading.Event()

    def work(questions: list[int]) -> list[int]:
        gate.wait(20)
        return questions

    def answered(batch: Any, answers: Any) -> None:
        for (_, receive), answer in zip(batch, answers, strict=True):
            receive(answer)

    lane: Answerer[int, int] = Answerer("test", work, answered, batch_max=2)
    futures = [lane.ask(0)]
    await asyncio.sleep(0.05)  # running, and blocked
    futures += [lane.ask(number) for number in range(1, 4)]
    with pytest.raises(UStatusError) as error:
        lane.ask(9)
    assert error.value.code == UCode.RESOURCE_EXHAUSTED
    gate.set()
    assert await asyncio.gather(*futures) == [0, 1, 2, 3]
    await lane.close()
    with pytest.raises(UStatusError):
        lane.ask(1)


async def test_a_disk_that_fails_refuses_and_recovers_alone(world: Any, troubled_disk: Any) -> None:
    """Every acknowledged change is stored, and the service continues when the disk works again."""
    disk = troubled_disk
    service = await world.service(runtime=Runtime(disk=disk))
    client = await world.client(version=4)
    topic = uris.parse("//dev1/20/1/8001")
    disk.trouble = "query_only=ON"
    service.store.database._file.connect().execute(f"PRAGMA {disk.trouble}")
    with pytest.raises(UStatusError) as error:
        await client.subscribe(topic)
    assert error.value.code == UCode.UNAVAILABLE
    assert not service.store.healthy
    disk.trouble = ""
    await client.subscribe(topic)
    assert service.store.healthy
    assert len(await service.subscriptions()) == 1


def test_changes_that_a_cut_write_ahead_log_has_lost_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    database = Database(path, "vehicle1")
    database.open()
    topic = ("vehicle1", 0x8001, 1, 0x8001)
    for entity in range(1, 6):
        database.apply([Subscribe(topic, ("vehicle1", entity, 1, 0), 4)], 1)
    wal = Path(f"{path}-wal")
    whole = wal.read_bytes()
    copy = {name: Path(f"{path}{name}").read_bytes() for name in ("", ".mark")}
    database.close()
    for name, data in copy.items():
        Path(f"{path}{name}").write_bytes(data)
    wal.write_bytes(whole[: len(whole) * 3 // 5])  # as after a kill, and then the disk lost the end of the log
    again = Database(path, "vehicle1")
    again.open()
    assert 0 < again.lost_changes <= 5
    assert again.subscriptions.used + again.lost_changes == 5
    (outcome,) = again.apply([Subscribe(topic, ("vehicle1", 9, 1, 0), 4)], 1)
    assert outcome.changes[0].number == 6  # numbers are never used twice
    again.close()
    third = Database(path, "vehicle1")
    third.open()
    assert third.lost_changes == 0  # reported once
    third.close()


def test_a_write_ahead_log_that_is_lost_whole_is_reported_too(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    database = Database(path, "vehicle1")
    database.open()
    database.apply([Subscribe(("vehicle1", 0x8001, 1, 0x8001), ("vehicle1", 1, 1, 0), 4)], 1)
    copy = {name: Path(f"{path}{name}").read_bytes() for name in ("", ".mark")}
    database.close()
    for name, data in copy.items():
        Path(f"{path}{name}").write_bytes(data)
    again = Database(path, "vehicle1")
    again.open()
    assert again.lost_changes == 1
    again.close()
    for name in ("", "-wal", "-shm"):  # a new store: nothing is lost then
        Path(f"{path}{name}").unlink(missing_ok=True)
    reopened = Database(path, "vehicle1")
    reopened.open()
    assert reopened.lost_changes == 0
    reopened.close()


def test_what_is_held_keeps_how_its_subscriber_writes_the_topic(path: Path) -> None:
    db = Database(path, "dev1")
    db.open()
    (outcome,) = db.apply([Subscribe(TOPIC, APP, 3, sample_period_ms=5, bare=True)], 0)
    assert isinstance(outcome, Outcome)
    (stored,) = outcome.changes
    assert stored.change.bare
    db.apply([Hold((("dev1", stored.number, stored.change, stored.recipients),))], 0)
    assert [(one.number, one.change.bare, one.recipients) for one in db.reader().held("dev1", 9)] == [
        (stored.number, True, stored.recipients)
    ]
    db.close()
