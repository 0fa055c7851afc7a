"""A whole data_dir of version 0.1.0: each store opens with everything in it; a newer one is refused and no byte of it
changes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamer.letters import dead_letter
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.state import Subscribe
from usubscription.store.database import Database, Reset
from usubscription.store.reader import Reader
from usubscription_client.saved_interest import SavedInterest

OldData = Callable[[str], Path]
NAMES = pytest.mark.parametrize("name", ["stopped", "killed"])


def keys(content: Any) -> dict[int, tuple[Any, ...]]:
    return {id: (authority, *rest) for id, authority, *rest in content["uri"]}


@NAMES
def test_subscriptions_links_registrations_and_what_is_to_be_told(
    old_data: OldData, old_content: Any, name: str
) -> None:
    path = old_data(name) / "usubscription.db"
    expected, uri = old_content["usubscription"], keys(old_content["usubscription"])
    database = Database(path, "vehicle1")
    database.open()
    reader = Reader(path)
    try:
        rows, more = reader.subscriptions(None, None, old_content["now_ms"])
        found = [
            (row.topic, row.subscriber, int(row.status), row.expires_ms, row.sample_period_ms, row.details.hex())
            for row in rows
        ]
        assert found == [
            (uri[topic], uri[subscriber], status, expires_ms, period, details or "")
            for _, topic, subscriber, status, _, expires_ms, period, details in expected["subscription"]
        ]
        assert not more
        assert {topic: tuple(link) for topic, link in reader.links()} == {
            uri[topic]: tuple(link) for topic, *link in expected["link"]
        }
        registered = sorted(
            (client, major, topic) for client, major, topic in reader.registrations() if topic is not None
        )
        assert registered == sorted(
            (uri[client], major, uri[topic]) for topic, client, major in expected["registration"] if topic
        )
        assert [client for client, _, topic in reader.registrations() if topic is None] == [
            uri[client] for topic, client, _ in expected["registration"] if not topic
        ]
        waiting = reader.outbox(0, 100)
        assert [change.number for change in waiting] == [number for number, _ in expected["outbox"]]
        assert not any(stored.change.bare for stored in waiting), "what that version did not note is the whole topic"
    finally:
        reader.close()
        database.close()


@NAMES
def test_an_old_store_keeps_from_now_on_how_subscribers_write_their_topics(old_data: OldData, name: str) -> None:
    path = old_data(name) / "usubscription.db"
    topic, known, fresh = ("vehicle1", 0x8001, 1, 0x8001), ("vehicle1", 0x100, 1, 0), ("vehicle1", 0x200, 1, 0)
    for events in ([Subscribe(topic, known, 3, bare=True), Subscribe(topic, fresh, 3, bare=True)], [Reset()]):
        database = Database(path, "vehicle1")
        database.open()
        database.apply(events, 0)
        database.close()
    reader = Reader(path)
    ended = {
        stored.change.subscriber: stored.change.bare for stored in reader.outbox(0, 100) if stored.change.status == 0
    }
    reader.close()
    assert ended[known]
    assert ended[fresh]
    assert not ended["vehicle1", 0x101, 1, 0]


@NAMES
def test_dead_letters(old_data: OldData, old_content: Any, name: str) -> None:
    path = old_data(name) / "dead-letters.db"
    store = dead_letter.Store(path)
    store.write([(1, UCode.INTERNAL, "new", "cloud", b"")])
    letters = store.read()
    store.close()
    found = [
        [one.number, one.time_ms, one.code, one.reason, one.endpoint, one.message.SerializeToString().hex()]
        for one in letters
    ]
    assert found[:-1] == old_content["dead_letters"]
    assert found[-1][0] == len(found)


@NAMES
def test_the_remembered_interest(old_data: OldData, old_content: Any, name: str) -> None:
    known = SavedInterest(old_data(name) / "interest-cloud.json", list).load()
    found = [[uris.format(one.topic), uris.format(one.subscriber), one.sample_period_ms] for one in known]
    assert [
        [topic.removeprefix("up:"), subscriber.removeprefix("up:"), period] for topic, subscriber, period in found
    ] == old_content["interest"]


@NAMES
def test_a_newer_store_of_subscriptions_is_refused_and_left_as_it_is(old_data: OldData, name: str) -> None:
    folder = old_data(name)
    path = folder / "usubscription.db"
    before = newer(path)
    with pytest.raises(UStatusError, match="newer") as error:
        Database(path, "vehicle1").open()
    assert error.value.code == UCode.FAILED_PRECONDITION
    assert {suffix: Path(f"{path}{suffix}").read_bytes() for suffix in before} == before


def newer(path: Path) -> dict[str, bytes]:
    """Make it a file of a newer program, as that would leave it after a kill; the bytes of its files by suffix."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA user_version=99")
    files = {suffix: Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal")}
    db.close()
    for suffix, data in files.items():
        Path(f"{path}{suffix}").write_bytes(data)
    assert files["-wal"]
    return files
