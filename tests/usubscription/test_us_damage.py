"""A store that is damaged, at the start or later, and a full disk: the service continues, and reports the problem."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from storage.runtime import Runtime
from uprotocol import uri as uris
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.core.usubscription.wire import CODECS
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.state import Subscribe
from usubscription.store.database import Database

TOPIC = uris.parse("//dev1/20/1/8001")
FAR = uris.parse("//dev2/20/1/8001")


def requests(major: int) -> dict[str, Any]:
    if major == 4:
        return {"subscribe": v4.SubscribeRequest(topic=TOPIC), "unsubscribe": v4.UnsubscribeRequest(topic=TOPIC)}
    return {
        "subscribe": v3.SubscriptionRequest(topic=TOPIC),
        "unsubscribe": v3.UnsubscribeRequest(topic=TOPIC),
        "fetch_subscriptions": v3.FetchSubscriptionsRequest(topic=TOPIC),
        "fetch_subscribers": v3.FetchSubscribersRequest(topic=TOPIC),
        "register": v3.NotificationsRequest(topic=TOPIC),
        "unregister": v3.NotificationsRequest(topic=TOPIC),
    }


async def all_unavailable(world: Any, service: Any) -> None:
    caller = await world.raw(ue_id=0, version=9)
    for major, codec in CODECS.items():
        asked = requests(major)
        for name, method in codec.methods.items():
            with pytest.raises(UStatusError) as error:
                await caller.call(major, method.resource, asked.get(name))
            assert error.value.code == UCode.UNAVAILABLE, (major, name)
            assert error.value.message == service.store.trouble
    with pytest.raises(UStatusError) as error:
        await service.subscriptions()
    assert error.value.code == UCode.UNAVAILABLE


def a_store(path: Path, rows: int = 500) -> None:
    db = Database(path, "dev1")
    db.open()
    db.apply([Subscribe(("dev1", 0x20, 1, 0x8000 + number), ("dev1", 0x10, 1, 0), 4) for number in range(rows)], 0)
    db.close()


def overwrite(path: Path, start: int = 4096) -> None:
    with path.open("r+b") as file:
        for at in range(start, path.stat().st_size, 4096):
            file.seek(at)
            file.write(b"\xa5" * 200)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    os.truncate(path, 9_000)


def text(path: Path) -> None:
    path.write_bytes(b"not a database" * 1_000)


def without_meta(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM meta")
    db.close()


def without_an_authority(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE subscription SET topic = 99999 WHERE seq = 7")
    db.close()


@pytest.mark.parametrize("damage", [overwrite, empty, truncated, text, without_meta, without_an_authority])
async def test_with_a_damaged_store_it_starts_touches_nothing_and_answers_why(world: Any, damage: Any) -> None:
    path = world.path / "dev1.db"
    a_store(path)
    damage(path)
    before = path.read_bytes()
    service = await world.service()
    assert not service.store.healthy
    assert service.store.trouble is not None
    assert str(path) in service.store.trouble
    assert "backup" in service.store.trouble
    await all_unavailable(world, service)
    await world.stop()
    assert path.read_bytes() == before
    assert not path.with_name("dev1.db.new").exists()


async def test_a_write_ahead_log_is_not_moved_into_a_damaged_store(world: Any) -> None:
    path = world.path / "dev1.db"
    a_store(path)
    with sqlite3.connect(path, isolation_level=None) as held:
        held.execute("INSERT INTO meta VALUES('more', 'x')")  # stays in the log while this connection is open
        overwrite(path)
        before = path.read_bytes()
        service = await world.service()
        assert service.store.trouble is not None
        await world.stop()
        assert path.read_bytes() == before
    held.close()


async def test_after_the_repair_it_starts_as_before(world: Any) -> None:
    path = world.path / "dev1.db"
    a_store(path)
    good = path.read_bytes()
    overwrite(path)
    await world.service()
    await world.stop()
    path.write_bytes(good)
    service = await world.service()
    assert service.store.trouble is None
    assert service.store.healthy
    assert len(await service.subscriptions()) == 500


async def test_another_store_in_its_place_still_refuses_the_start(world: Any) -> None:
    db = Database(world.path / "dev1.db", "somebody")
    db.open()
    db.close()
    with pytest.raises(UStatusError) as error:
        await world.service()
    assert error.value.code == UCode.FAILED_PRECONDITION


async def subscribe_until_refused(raw: Any) -> int:
    """Returns the code of the answer."""
    for number in range(1_000):
        try:
            await raw.call(4, 1, v4.SubscribeRequest(topic=uris.uri("dev1", 0x30, 1, 0x8000 + number)))
        except UStatusError as error:
            return error.code
    return UCode.OK


def is_in_one_file(writer: sqlite3.Connection) -> bool:
    """False while the service uses its connection itself."""
    try:
        writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.OperationalError:
        return False
    return True


@pytest.mark.parametrize("shown_by", ["write", "read"])
async def test_damage_that_shows_while_it_runs_is_the_same_state_without_a_storm(world: Any, shown_by: str) -> None:
    path = world.path / "dev1.db"
    a_store(path, rows=20_000)
    service = await world.service()
    raw = await world.raw()
    await raw.call(4, 1, v4.SubscribeRequest(topic=FAR))  # so that there is a remote command, too
    writer = service.store.database._file.connect()
    async with asyncio.timeout(20):
        while not is_in_one_file(writer):  # noqa: ASYNC110 - SQLite has no event for it
            await asyncio.sleep(0.01)
    for db in (writer, *(reader._db for reader in service.store._reading.values())):
        db.execute("PRAGMA cache_size=0")
    overwrite(path)
    with capture_logs() as lines:
        if shown_by == "read":
            with pytest.raises(UStatusError) as error:
                await raw.call(4, 3)
            assert error.value.code == UCode.UNAVAILABLE
        else:
            assert await subscribe_until_refused(raw) == UCode.UNAVAILABLE
        assert service.store.trouble is not None
        assert not service.store.healthy
        await service._halting
        await all_unavailable(world, service)
        await world.stop()
    assert [line["log_level"] for line in lines if line["log_level"] != "info"].count("error") == 1, lines
    assert not any("exc_info" in line for line in lines), lines
    assert len(lines) <= 8, lines


async def test_a_disk_that_was_full_is_used_again_without_anybody_asking(world: Any, troubled_disk: Any) -> None:
    disk = troubled_disk
    service = await world.service(runtime=Runtime(disk=disk))
    raw = await world.raw()
    db = service.store.database._file.connect()
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    disk.trouble = f"max_page_count={pages}"  # SQLite reports a full disk
    db.execute(f"PRAGMA {disk.trouble}")
    assert await subscribe_until_refused(raw) == UCode.RESOURCE_EXHAUSTED
    assert not service.store.healthy
    assert service.store.trouble is None
    disk.trouble = ""
    async with asyncio.timeout(20):
        while not service.store.healthy:  # noqa: ASYNC110 - a property, which has no event
            await asyncio.sleep(0.02)
    await raw.call(4, 1, v4.SubscribeRequest(topic=TOPIC))


def test_a_change_in_the_outbox_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    a_store(path, rows=3)
    db = Database(path, "dev1")
    db.open()
    db._file.connect().execute("UPDATE outbox SET change = '[1' WHERE id = 2")
    with pytest.raises(UStatusError) as error:
        db.reader().outbox(0, 10)
    assert error.value.code == UCode.DATA_LOSS
    db.close()
