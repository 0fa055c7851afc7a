"""Disk access: SQLite files, each with one owner, their locks and marks, and small files that are replaced completely.

Disk        connect(path) -> sqlite3.Connection    lock(path) -> Lock    mark(path) -> Mark    replace_text(path, text)
SqliteFile  take -> look (changes nothing): ours? newer? whole? -> make | update -> writable -> transaction ... -> close
                      '-- damaged: its owner moves it aside, or leaves it unchanged     an error -> reset -> writable
FileKind    what files of one kind have in common, and what their errors mean to a caller

The mark names the last committed seq, and is overwritten after each commit: SQLite truncates a damaged write-ahead log
to its last whole commit without an error, and a missing file has no error either.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Self, TypeVar

from storage import faults, looking
from storage.faults import NO_RESERVE, Reserve
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

T = TypeVar("T")

BUSY_TIMEOUT_S: Final = 5.0  # a file that this process owns is still shared with its readers, and with a backup
STATEMENTS_CACHED: Final = 256
UNLIMITED: Final = 1 << 62  # bytes
ROWS_AT_ONCE: Final = 500  # in one statement, if the build of SQLite accepts that many values

PRIVATE: Final = 0o600  # of all our files: they hold what others have sent
PRIVATE_FOLDER: Final = 0o700  # of those that we make

_MAGIC: Final = b"upm1"
_MARK: Final = struct.Struct("<4s16sQ")  # magic, incarnation, newest seq; followed by their checksum
_CRC: Final = struct.Struct("<I")


def private(path: str | Path, flags: int) -> int:
    """Opens a file as `os.open` does, for its owner only, also if others could open it before. Raises OSError."""
    file = os.open(path, flags | os.O_CLOEXEC, PRIVATE)
    with contextlib.suppress(OSError):  # another user's, or a file system without permissions
        if os.fstat(file).st_mode & ~PRIVATE & 0o777:
            os.fchmod(file, PRIVATE)
    return file


def _private_itself(path: str | Path, flags: int) -> int:
    return private(path, flags | os.O_NOFOLLOW)


def _keep_private(path: Path) -> None:
    """Creates the file if it is missing, and takes permissions from all but its owner. SQLite gives its other files the
    permissions of this one. It is not opened if it exists: closing it would end locks that SQLite has on it."""
    for suffix in ("", "-wal", "-shm"):
        name = f"{path}{suffix}"
        with contextlib.suppress(OSError):  # missing, another user's, or a file system without permissions
            if os.stat(name).st_mode & ~PRIVATE & 0o777:
                os.chmod(name, PRIVATE)
    with contextlib.suppress(OSError):  # SQLite reports it
        os.close(private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))


def _connect(uri: str, factory: type[sqlite3.Connection]) -> sqlite3.Connection:
    return sqlite3.connect(
        uri,
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=BUSY_TIMEOUT_S,
        cached_statements=STATEMENTS_CACHED,
        factory=factory,
    )


IS_FOLDER: Final = "it is a folder, not a file"


class InUseError(Exception):
    """Another process holds the lock; the argument is its process id, if known."""


class Lock:
    """A lock of one process. It is a flock, so it ends with the process in any case."""

    def __init__(self, path: Path) -> None:
        # through no link: root may lock a folder that another user writes
        self._file: IO[str] | None = open(path, "a+", opener=_private_itself)  # noqa: SIM115 - open until `release`
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self.release()
            raise InUseError(owner) from None
        except BaseException:
            self.release()
            raise
        # a full disk must not prevent reading; the process id is only for the message
        with contextlib.suppress(OSError):
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n")
            self._file.flush()

    def release(self) -> None:
        """May be called twice."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


class Marked(NamedTuple):
    incarnation: bytes
    seq: int


class BadMarkError(Exception):
    """The mark is damaged."""


def read_mark(path: Path) -> Marked | None:
    """Returns the mark beside the file `path`, or None if no mark was ever written. Raises OSError, BadMarkError."""
    try:
        data = Path(f"{path}.mark").read_bytes()
    except FileNotFoundError:
        return None
    if not any(data):  # the file was created, and then the disk was full
        return None
    if len(data) != _MARK.size + _CRC.size or not data.startswith(_MAGIC):
        raise BadMarkError("it is not a mark")
    if _CRC.pack(zlib.crc32(data[: _MARK.size])) != data[_MARK.size :]:
        raise BadMarkError("its checksum is wrong")
    return Marked(*_MARK.unpack_from(data)[1:])


class Mark:
    """A few bytes that are overwritten in place, without waiting for the disk. All methods raise OSError."""

    def __init__(self, path: Path) -> None:
        """Created if it does not exist."""
        self._file = private(path, os.O_RDWR | os.O_CREAT)

    def write(self, incarnation: bytes, seq: int) -> None:
        body = _MARK.pack(_MAGIC, incarnation, seq)
        os.pwrite(self._file, body + _CRC.pack(zlib.crc32(body)), 0)

    def begin(self, incarnation: bytes, seq: int) -> None:
        """Replace whatever is there. It is on disk when this returns."""
        os.ftruncate(self._file, _MARK.size + _CRC.size)
        self.write(incarnation, seq)
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


class Disk:
    """The real disk. All methods block and raise OSError; `connect` and its connections raise sqlite3.Error."""

    reserve: Reserve = NO_RESERVE
    """The space that stores on this disk may release when it is full."""

    def with_reserve(self, reserve: Reserve) -> Self:
        """Returns the same disk with another reserve."""
        found = copy.copy(self)
        found.reserve = reserve
        return found

    def retry_with_reserve(self, path: Path, work: Callable[[], T]) -> T:
        """Run `work`, which uses the file `path`. If the disk is full, release the reserve, and run it once more.
        Raises what the last run raises."""
        try:
            return work()
        except UStatusError as error:
            if error.code != UCode.RESOURCE_EXHAUSTED or not self.reserve.make_room(path):
                raise
        except (sqlite3.Error, OSError) as error:
            if not faults.is_full(error, path) or not self.reserve.make_room(path):
                raise
        return work()

    def free_bytes(self, path: Path) -> int:
        return faults.free_bytes(path)

    def connect(self, path: Path, *, read_only: bool = False) -> sqlite3.Connection:
        """Returns a connection in autocommit mode that may be used from any thread. `read_only`: of a file that this
        process owns; its write-ahead log stays unchanged, but SQLite may make a missing one, and its index."""
        if not read_only:
            _keep_private(path)
        return _connect(f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}", sqlite3.Connection)

    def look(self, path: Path) -> sqlite3.Connection:
        """Returns such a connection to a file that this process does not own. Nothing is written, not even beside the
        file, so that its folder need not be writable."""
        return looking.connect(path, _connect)

    def lock(self, path: Path) -> Lock:
        """Returns a lock that ends when it is released, or with the process. Raises InUseError."""
        return Lock(path)

    def require_not_in_use(self, path: Path) -> None:
        """Raises InUseError if a process has the lock file `path`. Writes nothing."""
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InUseError(file.read().strip() or "unknown") from None

    def mark(self, path: Path) -> Mark:
        return Mark(path)

    def replace_text(self, path: Path, text: str) -> None:
        """Replace the file. After a crash it holds the old text or the new one; after this returns, the new one."""
        self.retry_with_reserve(path, lambda: self._replace_text(path, text))

    def _replace_text(self, path: Path, text: str) -> None:
        fresh = path.with_name(path.name + ".new")
        try:
            with open(fresh, "w", opener=private) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError:
            with contextlib.suppress(OSError):  # on a full disk it would occupy space
                fresh.unlink()
            raise
        self.sync(path.parent)

    def sync(self, path: Path) -> None:
        """Make durable: the content of this file, or everything that was created, renamed or removed in this folder."""
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


REAL_DISK: Final = Disk()


# -- a SQLite file with an owner

Step = Callable[[sqlite3.Connection], object]


@dataclass(frozen=True, slots=True)
class FileKind:
    """The properties of all files of one kind."""

    what: str  # its name in errors
    application_id: int  # distinguishes it from files of other programs
    version: int
    migrations: Mapping[int, Step]  # by version n: the step to version n + 1
    # whether a file with another application id is ours: bits of the id may have flipped
    is_ours: Callable[[sqlite3.Connection], bool] = lambda db: False
    layout: Sequence[str] = ()  # pragmas that can be set only for a new file
    quick_bytes_max: int = UNLIMITED  # up to this size its pages are checked when it is opened
    whole_bytes_max: int = 0  # ... and up to this size each row is compared with its indexes
    # returns what else is wrong with it, or ""
    check: Callable[[sqlite3.Connection], str] = lambda db: ""
    advice: str = ""  # what to do about a damaged one
    damaged: UCode.ValueType = UCode.DATA_LOSS

    def refusal(self, path: Path, why: str) -> UStatusError:
        """FAILED_PRECONDITION: a retry does not help before a person has done something."""
        return _refused(f"the {self.what} {path} can't be opened: {why}")

    def not_opened(self, error: Exception, path: Path) -> UStatusError:
        """Returns the status of an error of opening: as `fault`, or what a person has to fix: PERMISSION_DENIED,
        FAILED_PRECONDITION (no such folder)."""
        if not faults.is_full(error, path):
            if faults.is_denied(error, path):
                why = f"the {self.what} {path} can't be opened for writing ({error}): check its permissions"
                return UStatusError(UCode.PERMISSION_DENIED, why)
            if isinstance(error, FileNotFoundError):
                return self.refusal(path, "its folder does not exist: make it first")
        return self.fault(error, path, "opened")

    def fault(self, error: Exception, path: Path, doing: str) -> UStatusError:
        """Returns the status of an error of the file: `damaged` (by default DATA_LOSS), RESOURCE_EXHAUSTED (the disk is
        full), UNAVAILABLE (a retry may help, also if a disk became read-only)."""
        name = f"the {self.what} {path}"
        if faults.is_damage(error):
            return UStatusError(self.damaged, f"{name} is damaged ({error}){self.advice}")
        if faults.is_full(error, path):
            why = f"because its disk is full ({error}); nothing of it was changed: make room, and try again"
            return UStatusError(UCode.RESOURCE_EXHAUSTED, f"{name} can't be {doing}, {why}")
        return UStatusError(UCode.UNAVAILABLE, f"{name} can't be {doing} ({error}); nothing of it was changed")

    def version_of(self, db: sqlite3.Connection, path: Path) -> int | None:
        """Returns None for an empty file. Raises FAILED_PRECONDITION if it is of another program, or newer."""
        application, version = pragma(db, "application_id"), pragma(db, "user_version")
        if application in (0, self.application_id) and not tables_of(db):
            return None
        if application != self.application_id and not self.is_ours(db):
            raise _refused(f"{path} is a SQLite file, but not a {self.what}: configure another path")
        if version > self.version:
            known = f"format {version}, and this program knows up to {self.version}"
            raise _refused(f"the {self.what} {path} has {known}: use a newer program, or configure another path")
        return version

    def require_migrations(self, version: int, path: Path) -> None:
        """Raises FAILED_PRECONDITION if a file of `version` is too old to be migrated to the current one."""
        for step in range(version, self.version):
            if step not in self.migrations:
                raise self.refusal(path, f"it has format {step}, which is too old to migrate")

    def examine(self, db: sqlite3.Connection, path: Path, *, whole: bool = True) -> int | None:
        """Returns the version; None for an empty file. `whole`: look for damage. Raises sqlite3.Error,
        FAILED_PRECONDITION (not ours, newer), DamagedError."""
        db.text_factory = any_text
        version = self.version_of(db, path)
        if version is None:
            return None
        wrong, size = self.check(db), path.stat().st_size
        if whole and not wrong and size <= self.quick_bytes_max:
            check = "integrity_check" if size <= self.whole_bytes_max else "quick_check"
            (wrong,) = db.execute(f"PRAGMA {check}(1)").fetchone()
        if wrong not in ("", "ok"):
            raise faults.DamagedError(str(wrong))
        return version

    def in_use(self, path: Path, process: InUseError) -> UStatusError:
        """ALREADY_EXISTS: another process has the file."""
        why = f"is in use by process {process}: stop that one, or configure another path"
        return UStatusError(UCode.ALREADY_EXISTS, f"the {self.what} {path} {why}")

    def require_usable(self, path: Path, disk: Disk = REAL_DISK, *, whole: bool = True) -> None:
        """Raises what opening the file for writing would raise, and writes nothing: FAILED_PRECONDITION (a folder,
        another program's, newer, too old), DamagedError, and as `not_opened`. A missing file is no mistake."""
        if path.is_dir():
            raise self.refusal(path, IS_FOLDER)
        try:
            if not path.exists() or not path.stat().st_size:
                return
            with contextlib.closing(disk.look(path)) as db:
                version = self.examine(db, path, whole=whole)
        except (sqlite3.Error, OSError, faults.DamagedError) as error:
            if faults.is_damage(error):
                raise faults.DamagedError(str(error)) from None
            raise self.not_opened(error, path) from None
        if version:
            self.require_migrations(version, path)

    def require_there(self, path: Path) -> None:
        """Raises INVALID_ARGUMENT if no file is at `path`."""
        if not path.exists():
            raise invalid(f"there is no {self.what} at {path}: is this the data_dir of a streamer that has run?")

    def stamp(self, db: sqlite3.Connection) -> None:
        """Write kind and current version into the header, in the caller's transaction."""
        db.execute(f"PRAGMA application_id = {self.application_id}")
        db.execute(f"PRAGMA user_version = {self.version}")


def _refused(why: str) -> UStatusError:
    return UStatusError(UCode.FAILED_PRECONDITION, why)


class SqliteFile:
    """One file that this process owns from `take` to `close`. One thread at a time.

    Unless stated otherwise, a method raises sqlite3.Error, OSError, or UStatusError where a retry does not help.
    `kind.not_opened` and `kind.fault` turn the others into a status.
    """

    def __init__(self, kind: FileKind, path: Path, disk: Disk = REAL_DISK, pragmas: Sequence[str] = ()) -> None:
        """`pragmas`: of the connection that writes, besides those of every file."""
        self.kind, self.path, self.disk = kind, path, disk
        self.db: sqlite3.Connection | None = None  # that writes; None before `connect`, and after `reset`
        self.version = 0  # of the file when `look` has read it; 0: unknown
        self._pragmas = pragmas
        self._lock: Lock | None = None
        self._mark: Mark | None = None
        self._marked = b""  # the incarnation in the mark
        self._identity: tuple[int, int] | None = None  # of the file that `connect` has opened: device and inode

    # -- who may open it

    def take(self) -> None:
        """Lock the file until `close`. Raises ALREADY_EXISTS if another process has it."""
        try:
            self._lock = self.disk.lock(self.beside(".lock"))
        except InUseError as owner:
            raise self.kind.in_use(self.path, owner) from None

    def close(self) -> None:
        """May be called twice."""
        self.reset()
        if self._mark is not None:
            self._mark.close()
            self._mark = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- the existing file

    def beside(self, suffix: str) -> Path:
        return Path(f"{self.path}{suffix}")

    @property
    def wal_bytes(self) -> int:
        """The size of the write-ahead log; 0 if it does not exist."""
        return faults.file_bytes(self.beside("-wal"))

    def look(self) -> bool:
        """Returns False if the file is empty or missing.

        Uses a read-only connection: a file that is not ours or is damaged stays unchanged, and so does its write-ahead
        log. Raises FAILED_PRECONDITION (not ours, newer), DamagedError.
        """
        kind, path, self.version, self._identity = self.kind, self.path, 0, None
        if path.is_dir():
            raise kind.refusal(path, IS_FOLDER)
        if not path.exists() or not path.stat().st_size:
            return False
        with contextlib.closing(self.disk.connect(path, read_only=True)) as db:
            version = kind.examine(db, path)
        self.version = version or 0
        return version is not None

    def make(self, fill: Step) -> None:
        """Replace the file by a new one with the content that `fill` writes. It is written under another name first, so
        that a file of this name is always whole."""
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
            with contextlib.suppress(OSError):  # on a full disk it would occupy space
                faults.remove(fresh)
            raise
        self.disk.sync(self.path.parent)
        self.version = self.kind.version

    def update(self, version: int) -> bool:
        """Migrate the file from `version` to the current version, in one transaction: if it is interrupted, the old
        file is unchanged. Returns True if there was a migration."""
        db, kind = self.connect(), self.kind
        stamped = (pragma(db, "application_id"), pragma(db, "user_version")) == (kind.application_id, kind.version)
        if stamped and version == kind.version:
            return False
        with transaction(db):
            kind.require_migrations(version, self.path)
            for step in range(version, kind.version):
                kind.migrations[step](db)
            kind.stamp(db)
        return version != kind.version

    # -- connections

    def connect(self) -> sqlite3.Connection:
        """Returns the connection that writes; opens it if necessary. Raises as `require_in_place`, because SQLite
        would create an empty file."""
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
                found = self.path.stat()
                self._identity = found.st_dev, found.st_ino
        return self.db

    def writable(self, wal_bytes_max: int) -> sqlite3.Connection:
        """Returns the connection for the next commit. A reader prevents that the write-ahead log is emptied, and it
        would grow for as long as the reader reads. Raises as `require_in_place`; sqlite3.OperationalError beyond
        `wal_bytes_max`."""
        db = self.connect()
        self.require_in_place()
        if self.wal_bytes > wal_bytes_max and not empty_wal(db, wait_ms=0):
            why = f"somebody has been reading {self.path} for so long that its write-ahead log is full: end that reader"
            raise sqlite3.OperationalError(why)
        return db

    def require_in_place(self) -> None:
        """From any thread. SQLite continues to write to a file that was deleted, renamed or replaced, and everything
        written is lost when this process ends. Raises sqlite3.OperationalError if that has happened."""
        found = None
        with contextlib.suppress(OSError):
            found = os.stat(self.path)
        if self._identity is not None and (found is None or (found.st_dev, found.st_ino) != self._identity):
            what = f"{self.path} was deleted, moved or replaced while it was in use"
            raise sqlite3.OperationalError(f"{what}: put it back, or restart to begin anew")

    def reset(self) -> None:
        """Close the connection: after an error its state is unknown. The next `connect` opens a new one."""
        if self.db is not None:
            with contextlib.suppress(sqlite3.Error):
                self.db.close()
            self.db = None

    # -- the mark beside it

    def begin_mark(self, incarnation: bytes, seq: int) -> None:
        """Write the mark. It is on disk when this returns."""
        if self._mark is None:
            self._mark = self.disk.mark(self.beside(".mark"))
        self._mark.begin(incarnation, seq)
        self._marked = incarnation

    def move_mark(self, seq: int) -> None:
        """Overwrite the mark without waiting for the disk."""
        if self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.write(self._marked, seq)


# -- for any connection


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit everything, or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk may have ended the transaction already
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
        raise


def pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


def empty_wal(db: sqlite3.Connection, wait_ms: int) -> bool:
    """Move the content of the write-ahead log into the file. Returns False if a reader prevented it for `wait_ms`."""
    db.execute(f"PRAGMA busy_timeout = {wait_ms}")
    try:
        is_busy, *_ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        db.execute(f"PRAGMA busy_timeout = {round(BUSY_TIMEOUT_S * 1_000)}")
    return not is_busy


def tables_of(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def any_text(data: bytes) -> str:
    """A `text_factory` for text that may be damaged, and then may not be UTF-8."""
    return data.decode(errors="surrogateescape")


# -- many rows in few statements
#
# Python releases its interpreter lock at each step of a SQLite statement, and `executemany` takes a step for each row.
# While the event loop is busy, each step waits for the lock, up to a switch interval: 5,000 rows took 0.4 to 1.4 s, and
# take 15 ms in statements of ROWS_AT_ONCE rows.


def insert_rows(db: sqlite3.Connection, insert: str, rows: Iterable[Sequence[Any]]) -> int:
    """`insert`: such as "INSERT OR REPLACE INTO cursor". Returns how many rows there were. Raises sqlite3.Error."""
    count, rest = 0, iter(rows)
    for first in rest:
        part = [first, *islice(rest, _rows_at_once(db, len(first)) - 1)]
        row = f"({', '.join('?' * len(first))})"
        db.execute(f"{insert} VALUES {', '.join([row] * len(part))}", list(chain.from_iterable(part)))
        count += len(part)
    return count


def delete_rows(db: sqlite3.Connection, delete: str, keys: Sequence[Any], *values: Any) -> int:
    """`delete`: up to the column of the keys, such as "DELETE FROM cursor WHERE name"; `values`: of the parameters
    before that. Returns how many rows there were. Raises sqlite3.Error."""
    count, step = 0, _rows_at_once(db, 1) - len(values)
    for start in range(0, len(keys), step):
        part = keys[start : start + step]
        count += db.execute(f"{delete} IN ({', '.join('?' * len(part))})", (*values, *part)).rowcount
    return count


def _rows_at_once(db: sqlite3.Connection, width: int) -> int:
    return min(ROWS_AT_ONCE, db.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER) // width)
