"""The index in memory: after any sequence of commits it agrees with the store."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from usubscription.state import Answered, Expire, Key, Lost, Status, Subscribe, Unsubscribe
from usubscription.store import store as stores
from usubscription.store.database import Database, Outcome, Reset, StoreEvent
from usubscription.store.store import Index

TOPICS: list[Key] = [("dev1", 0x20, 1, 0x8001), ("dev2", 0x20, 1, 0x8001)]  # the last one is remote
CLIENTS: list[Key] = [("dev1", number, 1, 0) for number in (0x30, 0x10, 0x20)]
TIMES = [None, 50, 100, 150]

topics, clients = st.sampled_from(TOPICS), st.sampled_from(CLIENTS)
subscribe = st.builds(Subscribe, topics, clients, st.sampled_from([3, 4]), st.sampled_from(TIMES))
events = st.one_of(
    *[subscribe] * 5,
    st.builds(Unsubscribe, topics, clients, st.sampled_from([3, 4])),
    st.builds(Expire, topics, clients),
    st.builds(Answered, st.just(TOPICS[-1]), st.integers(1, 40), st.sampled_from(Status)),
    st.builds(Lost, st.just(TOPICS[-1])),
)
batches = st.lists(events, min_size=1, max_size=6) | st.just([Reset()]) | st.lists(events, min_size=4, max_size=8)


def outcomes(database: Database, batch: list[StoreEvent], now_ms: int) -> list[Outcome]:
    return [outcome for outcome in database.apply(batch, now_ms) if isinstance(outcome, Outcome)]


@pytest.mark.spec("req~usubscription-fetch-subscribers-stable-sorting~1", doc="v3-seed")
@settings(deadline=None)
@given(
    history=st.lists(st.tuples(batches, st.sampled_from([0, 0, 60, 120])), max_size=12),
    asked=st.tuples(st.sampled_from([0, 50, 51, 120, 200]), st.integers(0, 4), st.integers(1, 4)),
)
def test_it_answers_as_the_store_does(history: list[tuple[list[StoreEvent], int]], asked: tuple[int, int, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        database, index, loaded = Database(Path(folder) / "store.db", "dev1"), Index(), Index()
        database.open()
        reader = database.reader()
        for batch, now_ms in history:
            index.apply(outcomes(database, batch, now_ms))
            for topic in TOPICS:
                assert index.subscribers(topic, *asked) == reader.subscribers(topic, *asked)
        loaded.load(reader)
        assert loaded._topics == index._topics
        assert [list(known) for known in loaded._topics.values()] == [
            list(index._topics[topic]) for topic in loaded._topics
        ]
        reader.close()
        database.close()


def test_a_topic_of_many_is_left_to_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "SUBSCRIBERS_MAX", 2)
    database, index = Database(tmp_path / "store.db", "dev1"), Index()
    database.open()
    index.apply(outcomes(database, [Subscribe(TOPICS[0], client, 4) for client in CLIENTS[:2]], 0))
    assert index.subscribers(TOPICS[0], 0, 0, 10) == (CLIENTS[:2], False)
    index.apply(outcomes(database, [Subscribe(TOPICS[0], CLIENTS[2], 4)], 0))
    assert index.subscribers(TOPICS[0], 0, 0, 10) is None
    index.apply(outcomes(database, [Unsubscribe(TOPICS[0], client, 4) for client in CLIENTS], 0))
    assert "0 topics" in repr(index), "nothing stays behind"
    database.close()
