"""Copies of files that are in use."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from storage import copies
from storage.copies import CopyPace, copy_store
from storage.disk import REAL_DISK
from uprotocol.status import UStatusError


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    with contextlib.closing(REAL_DISK.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE one(number INTEGER PRIMARY KEY, text TEXT)")
        db.executemany("INSERT INTO one(text) VALUES(?)", [("x" * 1_000,)] * 3_000)
    return path


class Between(CopyPace):
    """Does something after each step."""

    def __init__(self, target: Path, do: Any) -> None:
        super().__init__(target, 0.5)
        self._do, self.steps, self.shares = do, 0, set[float]()

    def rest(self) -> None:
        self.steps += 1
        self.shares.add(self.share)
        self._do()


def test_a_store_that_is_written_meanwhile_is_copied_as_it_was(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "COPIED_WAL_BYTES_MAX", 100_000)
    target = tmp_path / "copy.db"
    with contextlib.closing(REAL_DISK.connect(store)) as db:
        pace = Between(target, lambda: db.execute("UPDATE one SET text = text || 'y' WHERE number % 50 = 0"))
        copy_store(store, target, pace)
    assert pace.steps > 2, "it begins only once, whatever is written"
    assert pace.shares == {0.5, 1.0}, "a long write-ahead log waits for it: it hurries"
    assert pace.share == 0.5
    assert {one.name for one in tmp_path.glob("copy*")} == {"copy.db"}
    assert target.stat().st_mode & 0o777 == 0o600
    with contextlib.closing(sqlite3.connect(target)) as copy:
        assert copy.execute("SELECT DISTINCT text FROM one").fetchall() == [("x" * 1_000,)]
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_what_ends_a_step_ends_the_copy(store: Path, tmp_path: Path) -> None:
    with pytest.raises(UStatusError, match="stopping"):
        copy_store(store, tmp_path / "copy.db", CopyPace(tmp_path / "copy.db", is_stopping=lambda: True))


def test_pauses_are_as_long_as_the_share_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    times = iter([0.0, 1.0, 5.0, 5.1, 5.6])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    monkeypatch.setattr(time, "sleep", slept.append)
    pace = CopyPace(tmp_path / "copy.db", 0.2)
    pace.rest()
    pace.rest()
    assert slept == [copies.PAUSE_S_MAX, pytest.approx(0.4)]
