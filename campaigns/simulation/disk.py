"""A disk that can refuse, fail after the fact, lose power and tear: real SQLite on a folder in memory, behind
storage.disk.Disk.

connect -> FaultyConnection: each BEGIN, write and COMMIT may fail by chance    power_lost: only committed data stays
                                                                           tear: the write-ahead log ends at a random
                                                                           byte
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from storage.disk import Disk, InUseError, Lock, Mark
from storage.faults import Reserve

FREE_BYTES: Final = 1 << 40
WRITES: Final = ("BEGIN", "INSERT", "UPDATE", "DELETE", "COMMIT")


@dataclass
class DiskFaults:
    """Chances from 0 to 1, per statement that begins, writes or commits."""

    full: float = 0.0  # SQLITE_FULL, and nothing happened
    fail: float = 0.0  # SQLITE_IOERR, and nothing happened
    fail_after_commit: float = 0.0  # SQLITE_IOERR from a COMMIT that was executed

    def __bool__(self) -> bool:
        return bool(self.full or self.fail or self.fail_after_commit)


def _error(text: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


class FaultyConnection(sqlite3.Connection):
    disk: SimulatedDisk
    path: Path

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:  # type: ignore[override]
        word = sql.lstrip()[:6].upper()
        if word.startswith(WRITES):
            self.disk.before(self, word)
        elif not self.disk.alive:
            raise _error("the process is dead", sqlite3.SQLITE_IOERR)
        found = super().execute(sql, parameters)
        if word == "COMMIT":
            self.disk.after_commit(self)
        return found

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        self.disk.before(self, sql.lstrip()[:6].upper())
        return super().executemany(sql, parameters)


class _Lock(Lock):
    def __init__(self, disk: SimulatedDisk, path: Path) -> None:
        self._disk, self._path = disk, path

    def release(self) -> None:
        if self._disk.alive:
            self._disk.locked.discard(self._path)


class _Mark(Mark):
    """Opened for each write: a process that is killed closes nothing."""

    def __init__(self, disk: SimulatedDisk, path: Path) -> None:
        self._disk, self._path = disk, path

    def write(self, incarnation: bytes, seq: int) -> None:
        if self._disk.alive:
            with contextlib.closing(Mark(self._path)) as mark:
                mark.write(incarnation, seq)

    def begin(self, incarnation: bytes, seq: int) -> None:
        self.write(incarnation, seq)

    def close(self) -> None:
        pass


class SimulatedDisk(Disk):
    """The disk of one process. `faults` may be changed at any time; they affect only files with `victim` in their
    name."""

    def __init__(self, random: random.Random, on_fault: Callable[[str], None]) -> None:
        self.alive = True
        self.faults = DiskFaults()
        self.victim = ""
        self.locked: set[Path] = set()
        self.paths: set[Path] = set()
        self._connections: list[FaultyConnection] = []
        self._random, self._on_fault = random, on_fault
        # called instead of returning from the next COMMIT, after it was executed
        self.power_cut: Callable[[], None] | None = None

    # -- storage.disk.Disk

    def with_reserve(self, reserve: Reserve) -> Self:
        """The lock belongs to one process, so it is always free."""
        self.reserve = reserve
        return self

    def free_bytes(self, path: Path) -> int:
        """Only `faults` fill this disk: a run must not depend on the real disk."""
        return FREE_BYTES

    def connect(self, path: Path, *, read_only: bool = False) -> sqlite3.Connection:
        if not self.alive:
            raise _error("the process is dead", sqlite3.SQLITE_IOERR)
        db = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, cached_statements=256, factory=FaultyConnection
        )
        db.disk, db.path = self, path
        if read_only:
            db.execute("PRAGMA query_only = 1")
        self._connections = [one for one in self._connections if _is_open(one)]
        self._connections.append(db)
        self.paths.add(path)
        return db

    def lock(self, path: Path) -> Lock:
        if path in self.locked:
            raise InUseError("itself")
        self.locked.add(path)
        return _Lock(self, path)

    def mark(self, path: Path) -> Mark:
        return _Mark(self, path)

    def replace_text(self, path: Path, text: str) -> None:
        if not self.alive:
            raise OSError("the process is dead")
        path.write_text(text)

    def sync(self, path: Path) -> None:
        pass

    # -- faults

    def before(self, db: FaultyConnection, word: str) -> None:
        if not self.alive:
            raise _error("the process is dead", sqlite3.SQLITE_IOERR)
        faults = self.faults
        if not faults or self.victim not in db.path.name:
            return
        draw = self._random.random()
        if draw < faults.full:
            self._on_fault(f"full at {word}")
            raise _error("database or disk is full", sqlite3.SQLITE_FULL)
        if draw < faults.full + faults.fail:
            self._on_fault(f"I/O error at {word}")
            raise _error("disk I/O error", sqlite3.SQLITE_IOERR)

    def after_commit(self, db: FaultyConnection) -> None:
        if self.victim not in db.path.name:
            return
        if self.power_cut is not None:
            cut, self.power_cut = self.power_cut, None
            cut()
            raise _error("the process is dead", sqlite3.SQLITE_IOERR)
        if self.faults.fail_after_commit and self._random.random() < self.faults.fail_after_commit:
            self._on_fault("I/O error after a COMMIT that has happened")
            raise _error("disk I/O error", sqlite3.SQLITE_IOERR)

    def power_lost(self, *, tear: str = "") -> bool:
        """Nothing is closed: the next process finds only committed data. `tear`: in the name of a file whose
        write-ahead log is cut at a random byte. Returns True if a file was cut."""
        if not self.alive:
            return False
        kept = {}
        for path in self.paths:
            for suffix in ("", "-wal"):
                file = Path(f"{path}{suffix}")
                if file.exists():
                    kept[file] = file.read_bytes()
        self.alive = False
        for db in self._connections:
            with contextlib.suppress(sqlite3.Error):
                db.close()
        torn = False
        for path in self.paths:
            for suffix in ("", "-wal", "-shm"):
                file = Path(f"{path}{suffix}")
                file.unlink(missing_ok=True)
                data = kept.get(file)
                if data is None:
                    continue
                if tear and tear in path.name and suffix == "-wal" and len(data) > 32:
                    data = data[: self._random.randrange(32, len(data))]
                    torn = True
                file.write_bytes(data)
        return torn


def _is_open(db: sqlite3.Connection) -> bool:
    try:
        db.total_changes  # noqa: B018 - raises once it is closed
    except sqlite3.ProgrammingError:
        return False
    return True
