"""A SQLite file with an owner: who may open it, whether it is ours and whole, and what its errors mean to who asked.

take -> look (changes nothing): ours? newer? whole? -> make | update -> connect -> transaction ... -> close
          '-- damaged: its owner moves it aside, or leaves it as it is     an error -> reset -> connect anew
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from storage import faults
from storage.disk import BUSY_TIMEOUT_S, REAL_DISK, Disk, InUseError, Lock, Mark, pack_mark
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

UNLIMITED: Final = 1 << 62  # bytes

Step = Callable[[sqlite3.Connection], object]


@dataclass(frozen=True, slots=True)
class FileKind:
    """What holds for all files of a kind."""

    what: str  # as errors call it
    application_id: int  # so that another program's file is not taken for ours
    version: int
    migrations: Mapping[int, Step]  # from version n to n + 1
    # whether a file with another id is ours all the same: an older program gave it none, or bits of it have turned
    is_ours: Callable[[sqlite3.Connection], bool] = lambda db: False
    layout: Sequence[str] = ()  # pragmas that only a new file can be given
    quick_bytes_max: int = UNLIMITED  # up to this size its pages are checked before it is used
    whole_bytes_max: int = 0  # ... and up to this one each row is held against its indexes
    # what else is wrong with it; "" if nothing is
    check: Callable[[sqlite3.Connection], str] = lambda db: ""
    advice: str = ""  # what to do about a damaged one
    damaged: UCode.ValueType = UCode.DATA_LOSS

    def refusal(self, path: Path, why: str) -> UStatusError:
        """FAILED_PRECONDITION: no other try helps before somebody has done something."""
        return _refused(f"the {self.what} {path} can't be opened: {why}")

    def not_opened(self, error: Exception, path: Path) -> UStatusError:
        """What an error means while the file is opened: as `fault`, and what a person has to mend: PERMISSION_DENIED,
        FAILED_PRECONDITION (no such folder)."""
        if not faults.is_full(error, path):
            if faults.is_denied(error, path):
                why = f"the {self.what} {path} can't be opened for writing ({error}): check its permissions"
                return UStatusError(UCode.PERMISSION_DENIED, why)
            if isinstance(error, FileNotFoundError):
                return self.refusal(path, "its folder does not exist: make it first")
        return self.fault(error, path, "opened")

    def fault(self, error: Exception, path: Path, doing: str) -> UStatusError:
        """What an error of the file means to who asked: `damaged` (by default DATA_LOSS), RESOURCE_EXHAUSTED (the disk
        is full), UNAVAILABLE (it failed, trying again may help: also where a disk became read-only)."""
        name = f"the {self.what} {path}"
        if faults.is_damage(error):
            return UStatusError(self.damaged, f"{name} is damaged ({error}){self.advice}")
        if faults.is_full(error, path):
            why = f"because its disk is full ({error}); nothing of it was changed: make room, and try again"
            return UStatusError(UCode.RESOURCE_EXHAUSTED, f"{name} can't be {doing}, {why}")
        return UStatusError(UCode.UNAVAILABLE, f"{name} can't be {doing} ({error}); nothing of it was changed")

    def version_of(self, db: sqlite3.Connection, path: Path) -> int | None:
        """None: nothing is in it yet. Raises FAILED_PRECONDITION if it is another program's, or a newer one's."""
        application, version = pragma(db, "application_id"), pragma(db, "user_version")
        if application in (0, self.application_id) and not tables_of(db):
            return None
        if application != self.application_id and not self.is_ours(db):
            raise _refused(f"{path} is a SQLite file, but not a {self.what}: configure another path")
        if version > self.version:
            known = f"format {version}, and this program knows up to {self.version}"
            raise _refused(f"the {self.what} {path} has {known}: use a newer program, or configure another path")
        return version

    def require_there(self, path: Path) -> None:
        """Raises INVALID_ARGUMENT if there is none at `path`."""
        if not path.exists():
            raise invalid(f"there is no {self.what} at {path}: is this the data_dir of a streamer that has run?")

    def stamp(self, db: sqlite3.Connection) -> None:
        """In the caller's transaction: it is of this kind, and of today's version."""
        db.execute(f"PRAGMA application_id = {self.application_id}")
        db.execute(f"PRAGMA user_version = {self.version}")


def _refused(why: str) -> UStatusError:
    return UStatusError(UCode.FAILED_PRECONDITION, why)


class SqliteFile:
    """One file that this process owns from `take` to `close`. One thread at a time.

    Where nothing else is said, a method raises sqlite3.Error, OSError, or UStatusError for what another try won't
    mend; `kind.not_opened` and `kind.fault` say what an error means.
    """

    def __init__(self, kind: FileKind, path: Path, disk: Disk = REAL_DISK, pragmas: Sequence[str] = ()) -> None:
        """`pragmas`: of the connection that writes, beside those that hold for every file."""
        self.kind, self.path, self.disk = kind, path, disk
        self.db: sqlite3.Connection | None = None  # that writes; None before `connect`, and after `reset`
        self.version = 0  # of the file as `look` has found it; 0: not known
        self._pragmas = pragmas
        self._lock: Lock | None = None
        self._mark: Mark | None = None
        self._marked = b""  # the incarnation there
        self._identity: tuple[int, int] | None = None  # of the file that `connect` has opened: device and inode

    def __repr__(self) -> str:
        return f"SqliteFile({self.kind.what}, {self.path}, {'open' if self.db is not None else 'not open'})"

    # -- who may open it

    def take(self) -> None:
        """Until `close` no other process has it. Raises ALREADY_EXISTS if one has."""
        try:
            self._lock = self.disk.lock(self.beside(".lock"))
        except InUseError as owner:
            why = f"is in use by process {owner}: stop that one, or configure another path"
            raise UStatusError(UCode.ALREADY_EXISTS, f"the {self.kind.what} {self.path} {why}") from None

    def close(self) -> None:
        """May be called twice."""
        self.reset()
        if self._mark is not None:
            self._mark.close()
            self._mark = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- what is there

    def beside(self, suffix: str) -> Path:
        return Path(f"{self.path}{suffix}")

    @property
    def wal_bytes(self) -> int:
        """Of the write-ahead log; 0 if there is none."""
        try:
            return self.beside("-wal").stat().st_size
        except OSError:
            return 0

    def require_wal_below(self, bytes_max: int) -> None:
        """Before a commit: whoever reads the file for long keeps its write-ahead log from being emptied, and it would
        grow for as long. Raises sqlite3.OperationalError beyond `bytes_max`."""
        if self.wal_bytes > bytes_max and not empty_wal(self.connect(), wait_ms=0):
            why = f"somebody has been reading {self.path} for so long that its write-ahead log is full: end that reader"
            raise sqlite3.OperationalError(why)

    def is_in_place(self) -> bool:
        """False if the file that is open here has another name by now, or none. From any thread."""
        return self._identity is None or _identity(self.path) == self._identity

    def require_in_place(self) -> None:
        """Before a commit: SQLite goes on writing to a file that was deleted, renamed or replaced, and all of it is
        lost when this process ends. Raises sqlite3.OperationalError if that has happened."""
        if not self.is_in_place():
            why = (
                f"{self.path} was deleted, moved or replaced while it was in use: put it back, or restart to begin anew"
            )
            raise sqlite3.OperationalError(why)

    def look(self) -> bool:
        """False: nothing is in it yet.

        Through a connection that can't write: what is not ours or not whole is not touched, nor is its write-ahead log
        moved into it. Raises FAILED_PRECONDITION (not ours, newer), DamagedError.
        """
        kind, path, self.version, self._identity = self.kind, self.path, 0, None
        if path.is_dir():
            raise kind.refusal(path, "it is a folder, not a file")
        size = path.stat().st_size if path.exists() else 0
        if not size:
            return False
        with contextlib.closing(self.disk.connect(path, read_only=True)) as db:
            db.text_factory = any_text
            version = kind.version_of(db, path)
            if version is None:
                return False
            self.version = version
            wrong = kind.check(db)
            if not wrong and size <= kind.quick_bytes_max:
                check = "integrity_check" if size <= kind.whole_bytes_max else "quick_check"
                (wrong,) = db.execute(f"PRAGMA {check}(1)").fetchone()
        if wrong not in ("", "ok"):
            raise faults.DamagedError(str(wrong))
        return True

    def make(self, fill: Step) -> None:
        """A new file with what `fill` writes, in the place of what is there. Under another name first, so that a file
        of this name is always a whole one."""
        fresh = self.beside(".new")
        faults.remove(fresh)
        try:
            with contextlib.closing(self.disk.connect(fresh)) as db:
                for setting in (*self.kind.layout, "synchronous = FULL"):
                    db.execute(f"PRAGMA {setting}")
                with transaction(db):
                    fill(db)
                    self.kind.stamp(db)
            fresh.replace(self.path)
        except BaseException:
            with contextlib.suppress(OSError):  # on a full disk it would keep its room
                faults.remove(fresh)
            raise
        self.disk.sync_folder(self.path.parent)
        self.version = self.kind.version

    def update(self, version: int) -> bool:
        """Bring it from `version` to today's, in one transaction: whatever interrupts it, the old file is still there.
        True if there was something to do."""
        db, kind = self.connect(), self.kind
        stamped = (pragma(db, "application_id"), pragma(db, "user_version")) == (kind.application_id, kind.version)
        if stamped and version == kind.version:
            return False
        with transaction(db):
            for step in range(version, kind.version):
                if step not in kind.migrations:
                    raise kind.refusal(self.path, f"it has format {step}, which is too old to migrate")
                kind.migrations[step](db)
            kind.stamp(db)
        return version != kind.version

    # -- connections

    def connect(self) -> sqlite3.Connection:
        """The connection that writes, made anew if there is none. Raises as `require_in_place` does, since SQLite would
        make an empty file."""
        if self.db is None:
            self.require_in_place()
            db = self.disk.connect(self.path)
            try:
                (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
                if mode != "wal":
                    raise sqlite3.OperationalError(f"the file system does not allow a write-ahead log (mode {mode})")
                for setting in ("synchronous = FULL", *self._pragmas):
                    db.execute(f"PRAGMA {setting}")
            except BaseException:
                db.close()
                raise
            self.db = db
            if self._identity is None:
                self._identity = _identity(self.path)
        return self.db

    def reset(self) -> None:
        """After an error nobody knows what SQLite makes of this connection: the next `connect` starts a new one."""
        if self.db is not None:
            with contextlib.suppress(sqlite3.Error):
                self.db.close()
            self.db = None

    # -- the mark beside it

    def begin_mark(self, incarnation: bytes, seq: int) -> None:
        """On disk when this returns."""
        if self._mark is None:
            self._mark = self.disk.mark(self.beside(".mark"))
        self._mark.begin(pack_mark(incarnation, seq))
        self._marked = incarnation

    def move_mark(self, seq: int) -> None:
        """In place, without waiting for the disk: it need not survive more than SQLite's own file does."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.write(pack_mark(self._marked, seq))


def _identity(path: Path) -> tuple[int, int] | None:
    """None: there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


# -- what is done with any connection


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of it is committed, or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk may have ended it already
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
        raise


def pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


def empty_wal(db: sqlite3.Connection, wait_ms: int) -> bool:
    """Move what the write-ahead log holds into the file; False if a reader was in the way for so long."""
    db.execute(f"PRAGMA busy_timeout = {wait_ms}")
    try:
        is_busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        db.execute(f"PRAGMA busy_timeout = {round(BUSY_TIMEOUT_S * 1_000)}")
    return not is_busy


def tables_of(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def any_text(data: bytes) -> str:
    """A `text_factory` for text that may be damaged: it need not be UTF-8 any more."""
    return data.decode(errors="surrogateescape")
