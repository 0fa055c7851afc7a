"""The operator's view of a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.inspect import StoreView
from usubscription.state import Key, Subscribe, TimedOut, Unsubscribe
from usubscription.store.database import Database, Register

LOCAL: Key = ("dev1", 0x20, 1, 0x8001)
FAR: Key = ("dev2", 0x20, 1, 0x8001)
APPS: list[Key] = [("dev1", 0x10, 1, 0), ("dev1", 0x11, 1, 0)]


@pytest.fixture
def database(tmp_path: Path) -> Database:
    made = Database(tmp_path / "store.db", "dev1")
    made.open()
    made.apply(
        [Subscribe(LOCAL, APPS[0], 3, 4_102_444_800_000, 50), Subscribe(FAR, APPS[1], 4), Register(APPS[0], 4, None)], 0
    )
    return made


def test_it_lists_and_filters_while_the_service_has_the_store(database: Database) -> None:
    with StoreView(database.path) as view:
        first, second = view.subscriptions()
        assert first == {
            "topic": "up://dev1/20/1/8001",
            "subscriber": "up://dev1/10/1/0",
            "status": "SUBSCRIBED",
            "expires": "2100-01-01T00:00:00.000Z",
            "sample_period_ms": 50,
        }
        assert (second["status"], second["waiting_for"]) == ("SUBSCRIBE_PENDING", "dev2 (attempt 1)")
        assert view.subscriptions(topic=uris.parse("//dev2/FFFFFFFF/FF/FFFF")) == [second]
        assert view.subscriptions(topic=uris.parse("/20/1/8001")) == [first]
        assert view.subscriptions(subscriber=uris.parse("//dev1/10/1/0")) == [first]
        (link,) = view.links()
        assert (link["topic"], link["state"], link["command"]) == (
            "up://dev2/20/1/8001",
            "SUBSCRIBE_PENDING",
            "SUBSCRIBE",
        )
        database.apply([TimedOut(FAR, 2)], 0)
        assert view.registrations() == [{"client": "up://dev1/10/1/0", "version": 4, "topic": None}]
        assert view.summary() == {
            "authority": "dev1",
            "subscriptions": 2,
            "remote_topics": 1,
            "remote_commands_pending": 1,
            "registrations": 1,
            "changes_not_told": 2,
        }
    database.close()


def test_it_watches(database: Database) -> None:
    steps = iter(
        [
            [Unsubscribe(FAR, APPS[1], 4)],
            [],
            [Subscribe(LOCAL, APPS[1], 4), Subscribe(LOCAL, APPS[0], 4)],
        ]
    )

    def sleep(_: float) -> None:
        events = next(steps)
        if events:
            database.apply(events, 0)

    with StoreView(database.path) as view:
        rounds = iter([False, False, False, True])
        watched = view.watch(stop=lambda: next(rounds), sleep=sleep)
        seen = [(entry["event"], entry["topic"][5:], entry["subscriber"][5:], entry["status"]) for entry in watched]
    assert seen == [
        ("known", "dev1/20/1/8001", "dev1/10/1/0", "SUBSCRIBED"),
        ("known", "dev2/20/1/8001", "dev1/11/1/0", "SUBSCRIBE_PENDING"),
        ("removed", "dev2/20/1/8001", "dev1/11/1/0", "UNSUBSCRIBED"),
        ("changed", "dev1/20/1/8001", "dev1/10/1/0", "SUBSCRIBED"),
        ("added", "dev1/20/1/8001", "dev1/11/1/0", "SUBSCRIBED"),
    ]
    database.close()


def test_what_is_no_store_is_said(tmp_path: Path) -> None:
    with pytest.raises(UStatusError) as error:
        StoreView(tmp_path / "none.db")
    assert error.value.code == UCode.NOT_FOUND
    (tmp_path / "text.db").write_text("not a database" * 100)
    with pytest.raises(UStatusError) as error:
        StoreView(tmp_path / "text.db")
    assert error.value.code == UCode.DATA_LOSS
