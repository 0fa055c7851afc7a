"""How a log's file becomes a log that can be used: made, checked, brought to today's format, or saved from.

lock -> mark -> ours? newer? -> (make) -> check -> upgrade -> load -> head, mark -> Opened
                                            |
                                         damaged: what can be read goes into a new file, the damaged one is moved aside
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog
from google.protobuf.message import DecodeError

from history import damage as kinds
from history import rows
from history.connection import PAGE_BYTES, empty_wal, pragma, settle, transaction
from history.damage import Damage, Ledger
from history.load import Loaded, load
from history.rows import APPLICATION_ID, DAMAGE, SCHEMA_VERSION
from history.salvage import has_known_schema, keep_head, salvage
from storage import mark as marks
from storage.disk import InUseError, Lock, Mark
from storage.faults import is_damage, is_full, move_aside, primary_code
from storage.runtime import Runtime
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

# a file up to this size is checked whole on open (a second per GB); a greater one where it is read
CHECK_BYTES_MAX: Final = 256 << 20

HEADER_BYTES: Final = 100  # of an SQLite file

log = structlog.get_logger()


class DamagedError(Exception):
    """The file is a log, or was, and can't be used as one any more."""


@dataclass(slots=True)
class Opening:
    """One try. What it has opened is its caller's."""

    path: Path
    runtime: Runtime
    now_ms: Callable[[], int]
    bytes_max: int
    db: sqlite3.Connection | None = None
    lock: Lock | None = None
    mark: Mark | None = None
    loaded: Loaded = field(default_factory=Loaded)
    _version: int = 0  # of the file that is there; 0: not known

    def run(self) -> None:
        """Raises UStatusError: ALREADY_EXISTS (in use), FAILED_PRECONDITION (newer, or no log), RESOURCE_EXHAUSTED (the
        disk is full), UNAVAILABLE (I/O); then nothing was changed. Only a file that is damaged is moved aside."""
        self._take_lock()
        try:
            self._adopt_salvaged()
            try:
                self._open([])
            except (DamagedError, DecodeError, TypeError, ValueError, sqlite3.DatabaseError) as error:
                if isinstance(error, sqlite3.Error) and not _is_damage(error):
                    raise
                self._open(self._begin_again(error))
        except BaseException as error:
            self.release()
            if isinstance(error, sqlite3.Error | OSError):
                raise self._cant_open(error) from error
            raise

    def release(self) -> None:
        """May be called twice."""
        self._end_connection()
        if self.mark is not None:
            self.mark.close()
            self.mark = None
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def _end_connection(self) -> None:
        if self.db is not None:
            with contextlib.suppress(sqlite3.Error):
                self.db.close()
            self.db = None

    def _cant_open(self, error: Exception) -> UStatusError:
        if is_full(error, self.path):
            return UStatusError(
                UCode.RESOURCE_EXHAUSTED,
                f"the log {self.path} can't be opened, because its disk is full ({error}); nothing was changed",
            )
        return UStatusError(UCode.UNAVAILABLE, f"the log {self.path} can't be opened: {error}")

    def _take_lock(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.lock = self.runtime.disk.lock(Path(f"{self.path}.lock"))  # held as long as the log is open
        except InUseError as owner:
            raise UStatusError(
                UCode.ALREADY_EXISTS,
                f"the log {self.path} is in use by process {owner}: stop that one, or configure another path",
            ) from None
        except OSError as error:
            raise self._cant_open(error) from error

    def _open(self, damage: Sequence[Damage]) -> None:
        """`damage` is what a new log has to remember of the one that was here."""
        is_new = self._is_new()
        marked, mark_trouble = self._read_mark()
        if is_new:
            damage = damage or self._predecessor(marked)
        db = self.db = self.runtime.disk.connect(self.path)
        db.text_factory = rows.any_text
        if is_new:
            self._create(db, damage)
        self._check(db)
        settle(db, self.bytes_max)
        self._upgrade(db)
        self.loaded = load(db, marked, mark_trouble, self.now_ms(), self.runtime.random_bytes)
        if is_new or damage:
            self.loaded.found = self.loaded.ledger.open
        # it is for the day of damage; a full disk must not keep us from reading
        with contextlib.suppress(OSError, sqlite3.Error):
            if empty_wal(db):
                keep_head(self.path)
        self.mark = self.runtime.disk.mark(Path(f"{self.path}.mark"))
        self.mark.begin(marks.pack(self.loaded.incarnation, self.loaded.start_seq))

    # -- what is there

    def _read_mark(self) -> tuple[marks.Marked | None, str]:
        """What the mark says, and else why it can't be used."""
        try:
            return marks.unpack(Path(f"{self.path}.mark").read_bytes(), may_be_v1=self._version < SCHEMA_VERSION), ""
        except FileNotFoundError:
            return None, ""
        except (OSError, marks.BadMarkError) as error:
            return None, f"the mark can't be used ({error})"

    def _is_new(self) -> bool:
        """Is there nothing in it yet? Changes nothing, not even a write-ahead log beside it. Raises FAILED_PRECONDITION
        if it is not ours, or of a newer program."""
        path = self.path
        if path.is_dir():
            raise UStatusError(UCode.FAILED_PRECONDITION, f"the log {path} can't be opened: it is a folder, not a file")
        if not path.exists() or not path.stat().st_size:
            return True
        with contextlib.closing(self.runtime.disk.connect(path, read_only=True)) as db:
            db.text_factory = rows.any_text
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            application, version = pragma(db, "application_id"), pragma(db, "user_version")
        if not tables and application in (0, APPLICATION_ID):
            return True
        self._version = version
        if application != APPLICATION_ID and not {"chunk", "chunk_stream", "meta"} <= tables:
            raise UStatusError(
                UCode.FAILED_PRECONDITION, f"{path} is a SQLite file, but not a log: configure another path"
            )
        if version > SCHEMA_VERSION:
            raise UStatusError(
                UCode.FAILED_PRECONDITION,
                f"the log {path} has format {version}, and this program knows up to {SCHEMA_VERSION}: "
                "run the newer program, or configure another path",
            )
        return False

    def _predecessor(self, marked: marks.Marked | None) -> list[Damage]:
        """What is left of a log that was here: its mark, its write-ahead log, or a damaged file that somebody moved
        aside, and then came no further."""
        wal = Path(f"{self.path}-wal")
        if wal.exists() and wal.stat().st_size:
            move_aside(self.path)  # SQLite would delete it
        aside = [
            path for path in self.path.parent.glob(f"{self.path.name}.damaged-*") if not path.name.endswith("-shm")
        ]
        moved_to = str(max(aside)).removesuffix("-wal") if aside else ""
        if marked is not None and marked.seq:
            detail = "there was a log here, and its file is gone"
            return [Damage(self.now_ms(), kinds.MISSING, 0, marked.seq + 1, marked.incarnation, moved_to, detail)]
        if aside:
            return [Damage(self.now_ms(), kinds.FILE, 0, 0, b"", moved_to, "a damaged log was moved aside earlier")]
        return []

    def _create(self, db: sqlite3.Connection, damage: Sequence[Damage]) -> None:
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        settle(db, self.bytes_max)
        meta = {
            "incarnation": self.runtime.random_bytes(16),
            "indexed_seq": 0,
            "newest_seq": 0,
            "floor_seq": 0,
            "stored_bytes": 0,
        }
        ledger = Ledger()
        for one in damage:
            ledger.add(one)
        with transaction(db):
            rows.create(db, meta, ledger.rows)

    def _check(self, db: sqlite3.Connection) -> None:
        if not has_known_schema(db):
            raise DamagedError("it does not name its tables as it did")
        with self.path.open("rb") as file:
            header = file.read(HEADER_BYTES)
        if header and header[18:20] not in (
            b"\1\1",
            b"\2\2",
        ):  # the versions of SQLite's format for writing and reading: else it is read-only
            raise DamagedError("its header is damaged")
        if suspect_path(self.path).exists():
            raise DamagedError("it could not be written, because it is damaged")
        if self.path.stat().st_size <= CHECK_BYTES_MAX:
            answer = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if answer != "ok":
                raise DamagedError(str(answer))

    def _upgrade(self, db: sqlite3.Connection) -> None:
        """From an older version, in one transaction: whatever interrupts it, the old file is still there."""
        is_today_s = any(name == "crc" for _, name, *_ in db.execute("PRAGMA table_info(meta)"))
        version, application = pragma(db, "user_version"), pragma(db, "application_id")
        if is_today_s and version == SCHEMA_VERSION and application == APPLICATION_ID:
            return
        with transaction(db):
            if not is_today_s:
                rows.upgrade(db, 1)
                log.info("the log was brought to a newer format", path=str(self.path), version=SCHEMA_VERSION)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")  # bits that turned there
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    # -- damage

    def _adopt_salvaged(self) -> None:
        """A start that came no further than moving the damaged file aside."""
        whole = Path(f"{self.path}.salvaged")
        if whole.exists() and not self.path.exists():
            whole.rename(self.path)

    def _begin_again(self, reason: Exception) -> list[Damage]:
        """Save what can be read, and move the damaged file aside; what the next log has to remember. Raises OSError and
        sqlite3.Error where the disk has no room for both: then the damaged file stays where it is, for the next try."""
        self._end_connection()
        marked, _ = self._read_mark()
        aside = Path(f"{self.path}.damaged-{time.time_ns()}")
        incarnation = marked.incarnation if marked is not None else b""
        told = Damage(
            self.now_ms(), kinds.FILE, 0, 0, incarnation, str(aside), f"{reason}; what could be read was saved"
        )
        disk, random_bytes = self.runtime.disk, self.runtime.random_bytes
        whole = salvage(self.path, marked, disk, random_bytes, told)
        move_aside(self.path, aside)
        suspect_path(self.path).unlink(missing_ok=True)
        log.error(
            "the log is damaged, and was moved aside", moved_to=str(aside), saved=whole is not None, reason=str(reason)
        )
        if whole is not None:
            whole.rename(self.path)
            return [told]
        seq = marked.seq if marked is not None else 0
        whole_log = Damage(self.now_ms(), kinds.FILE, 0, seq + 1 if seq else 0, incarnation, str(aside), str(reason))
        return [*self._told_by(aside), whole_log]

    def _told_by(self, path: Path) -> list[Damage]:
        """What a damaged file had to tell already, and nobody has acknowledged; as far as it can be read."""
        try:
            with contextlib.closing(self.runtime.disk.connect(path, read_only=True)) as db:
                return Ledger(DAMAGE.read(db).rows).open
        except (sqlite3.Error, TypeError, ValueError):
            return []


def suspect_path(path: Path) -> Path:
    """A file that says: make it anew when it is opened next, from what can be read."""
    return Path(f"{path}.suspect")


def _is_damage(error: sqlite3.Error) -> bool:
    """While it is opened, what SQLite does not understand is not our SQL: it is what the file says of its tables."""
    return is_damage(error) or primary_code(error) == sqlite3.SQLITE_ERROR


__all__ = ["CHECK_BYTES_MAX", "DamagedError", "Opening", "suspect_path"]
