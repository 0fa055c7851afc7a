"""The files of a store are for its owner only, whatever the umask, and also if they were not before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from history.log.log import Log
from storage.disk import REAL_DISK
from storage.saved import SavedFile


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    return {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()}


def test_a_database_and_what_lies_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    with contextlib.closing(REAL_DISK.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE t (n)")
        assert modes(tmp_path) == dict.fromkeys(("log.db", "log.db-wal", "log.db-shm"), "0o600")
        for one in tmp_path.iterdir():  # as an older version made them
            one.chmod(0o644)
        with contextlib.closing(REAL_DISK.connect(path, read_only=True)):
            assert set(modes(tmp_path).values()) == {"0o644"}  # who reads changes nothing
        with contextlib.closing(REAL_DISK.connect(path)):
            assert set(modes(tmp_path).values()) == {"0o600"}


def test_small_files(tmp_path: Path) -> None:
    saved = SavedFile(tmp_path / "saved.json", TypeAdapter(list[int]), 1_000)
    for _ in range(2):
        saved.save([1])
        lock, mark = REAL_DISK.lock(tmp_path / "lock"), REAL_DISK.mark(tmp_path / "mark")
        mark.close()
        lock.release()
        assert modes(tmp_path) == dict.fromkeys(("saved.json", "lock", "mark"), "0o600")
        for one in tmp_path.iterdir():
            one.chmod(0o664)


@pytest.mark.parametrize("exists", [False, True])
async def test_a_log_and_its_folder(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "data"
    if exists:
        folder.mkdir(0o755)
    async with await Log.open(folder / "history.db", name="durable", retention_ms=1 << 40, retention_bytes=1 << 40):
        assert set(modes(folder).values()) == {"0o600"}
    assert set(modes(folder).values()) == {"0o600"}
    assert modes(tmp_path) == {"data": "0o755" if exists else "0o700"}  # one that is there is not ours
