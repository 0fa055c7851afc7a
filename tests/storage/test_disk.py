"""The real disk: locks between processes, marks in place, files that are replaced whole."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from storage.disk import REAL_DISK, BadMarkError, InUseError, read_mark


def test_a_lock_holds_others_off_and_says_who_has_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = REAL_DISK.lock(path)
    with pytest.raises(InUseError) as error:
        REAL_DISK.lock(path)
    assert str(error.value).isdecimal()
    lock.release()
    lock.release()
    REAL_DISK.lock(path).release()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from storage.disk import REAL_DISK; "
    code += "REAL_DISK.lock(Path(sys.argv[1])); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "lock")], check=True, timeout=60)
    REAL_DISK.lock(tmp_path / "lock").release()


def test_a_mark_is_overwritten_in_place(tmp_path: Path) -> None:
    mark = REAL_DISK.mark(tmp_path / "log.mark")
    assert (tmp_path / "log.mark").read_bytes() == b""
    assert read_mark(tmp_path / "log") is None
    mark.begin(b"i" * 16, 1)
    mark.write(b"i" * 16, 2)
    assert read_mark(tmp_path / "log") == (b"i" * 16, 2)
    (tmp_path / "log.mark").write_bytes(b"longer than a mark" * 9)
    mark.write(b"j" * 16, 3)
    with pytest.raises(BadMarkError):
        read_mark(tmp_path / "log")
    mark.begin(b"j" * 16, 4)
    assert read_mark(tmp_path / "log") == (b"j" * 16, 4)
    mark.close()


def test_a_text_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    REAL_DISK.replace_text(path, "long text")
    REAL_DISK.replace_text(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_read_only_connection_writes_nothing(tmp_path: Path) -> None:
    db = REAL_DISK.connect(tmp_path / "some.db")
    db.execute("CREATE TABLE t(x)")
    reader = REAL_DISK.connect(tmp_path / "some.db", read_only=True)
    with pytest.raises(sqlite3.OperationalError):
        reader.execute("INSERT INTO t VALUES (1)")
    reader.close()
    db.close()
