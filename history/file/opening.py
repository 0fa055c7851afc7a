"""Opens a log's file: creates, checks, migrates or salvages it.

take, look -> mark -> (make) -> check -> migrate -> load -> head, mark -> Opened
                                  |
                               damaged: everything that can be read goes into a new file; the damaged one is moved aside
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import structlog
from google.protobuf.message import DecodeError

from history.file import damage as kinds
from history.file import rows
from history.file.damage import Damage, Ledger
from history.file.load import Loaded, Loading
from history.file.retention import WAL_WAIT_MS, Sizes
from history.file.rows import DAMAGE, LOG
from history.file.salvage import keep_head, salvage
from storage.disk import BadMarkError, Marked, read_mark
from storage.faults import DamagedError, is_damage, move_aside, primary_code
from storage.file import SqliteFile, any_text, empty_wal
from storage.runtime import Runtime

HEADER_BYTES: Final = 100  # of an SQLite file
# the versions of SQLite's format for writing and reading; with any other version a file is read-only
FORMATS: Final = (b"\1\1", b"\2\2")

log = structlog.get_logger()


class Opening:
    """One attempt to open the file."""

    def __init__(self, path: Path, runtime: Runtime, now_ms: Callable[[], int], sizes: Sizes) -> None:
        self.path, self._runtime, self._now_ms = path, runtime, now_ms
        # secure_delete: many builds of SQLite overwrite deleted content with zeros by default
        pragmas = "cell_size_check = 1", "secure_delete = FAST", f"journal_size_limit = {sizes.wal}"
        self.file = SqliteFile(LOG, path, runtime.disk, pragmas)
        self.loaded = Loaded()

    def run(self) -> None:
        """Raises UStatusError as FileKind.not_opened, ALREADY_EXISTS (in use), FAILED_PRECONDITION (newer, or not a
        log); then nothing was changed. Only a damaged file is moved aside."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file.take()
            self._adopt_salvaged()
            try:
                self._open([])
            except (DamagedError, DecodeError, TypeError, ValueError, sqlite3.DatabaseError) as error:
                # SQLite reports an SQL error if the descriptions of the tables in the file are damaged
                is_sql = isinstance(error, sqlite3.Error) and primary_code(error) == sqlite3.SQLITE_ERROR
                if isinstance(error, sqlite3.Error) and not (is_sql or is_damage(error)):
                    raise
                self._open(self._start_over(error))
        except BaseException as error:
            self.file.close()
            if isinstance(error, sqlite3.Error | OSError | DamagedError):
                raise LOG.not_opened(error, self.path) from error
            raise

    def _open(self, damage: Sequence[Damage]) -> None:
        """`damage`: what a new log has to remember of the previous one."""
        file = self.file
        is_new = not file.look()
        marked, mark_trouble = self._read_mark()
        if is_new:
            damage = damage or self._predecessor(marked)
            self._make(damage)
        self._check()
        db = file.connect()
        db.text_factory = any_text
        if file.update(
            file.version or LOG.version
        ):  # 0: a bit of the header has flipped, since every log has a version
            log.info("the log was migrated to the current format", path=str(self.path), version=LOG.version)
        self.loaded = Loading(db, marked, mark_trouble, self._now_ms(), self._runtime.random_bytes).run()
        if is_new or damage:
            self.loaded.found = self.loaded.ledger.open
        # the head helps after later damage; a full disk must not prevent reading
        with contextlib.suppress(OSError, sqlite3.Error):
            if empty_wal(db, WAL_WAIT_MS):
                # Closing a file releases all locks that this process has on it. The next program that reads the log
                # would then believe that it is the last one, and delete the write-ahead log that we write.
                file.reset()
                keep_head(self.path)
        file.begin_mark(self.loaded.incarnation, self.loaded.start_seq)

    # -- existing files

    def _read_mark(self) -> tuple[Marked | None, str]:
        """Returns the mark, or why it can't be used."""
        try:
            return read_mark(self.path), ""
        except (OSError, BadMarkError) as error:
            return None, f"the mark can't be used ({error})"

    def _predecessor(self, marked: Marked | None) -> list[Damage]:
        """Returns what is known of a previous log: by its mark, its write-ahead log, or a damaged file that was moved
        aside by a start that did not get any further."""
        if self.file.wal_bytes:
            move_aside(self.path)  # SQLite would delete it
        found = self.path.parent.glob(f"{self.path.name}.damaged-*")
        aside = max((str(path) for path in found if not path.name.endswith("-shm")), default="").removesuffix("-wal")
        if marked is not None and marked.seq:
            detail = "there was a log here, and its file is missing"
            return [Damage(self._now_ms(), kinds.MISSING, 0, marked.seq + 1, marked.incarnation, aside, detail)]
        detail = "a damaged log was moved aside earlier"
        return [Damage(self._now_ms(), kinds.FILE, moved_to=aside, detail=detail)] if aside else []

    def _make(self, damage: Sequence[Damage]) -> None:
        meta: dict[str, Any] = dict.fromkeys(rows.META_KEYS, 0) | {"incarnation": self._runtime.random_bytes(16)}
        ledger = Ledger()
        for one in damage:
            ledger.add(one)
        self.file.make(lambda db: rows.create(db, meta, ledger.rows))

    def _check(self) -> None:
        with self.path.open("rb") as file:
            header = file.read(HEADER_BYTES)
        if header and header[18:20] not in FORMATS:
            raise DamagedError("its header is damaged")
        if suspect_path(self.path).exists():
            raise DamagedError("it could not be written, because it is damaged")

    # -- damage

    def _adopt_salvaged(self) -> None:
        """Complete a start that did not get further than moving the damaged file aside."""
        whole = self.file.beside(".salvaged")
        if whole.exists() and not self.path.exists():
            whole.rename(self.path)

    def _start_over(self, reason: Exception) -> list[Damage]:
        """Save everything that can be read, and move the damaged file aside. Returns what the next log has to remember.
        Raises OSError and sqlite3.Error if the disk has no space for both: then the damaged file stays for the next
        attempt."""
        self.file.reset()
        marked, _ = self._read_mark()
        incarnation, seq = (b"", 0) if marked is None else marked
        aside = self.file.beside(f".damaged-{time.time_ns()}")

        def damage(before: int, detail: str) -> Damage:
            return Damage(self._now_ms(), kinds.FILE, 0, before, incarnation, str(aside), detail)

        salvaged = damage(0, f"{reason}; what could be read was saved")
        whole = salvage(self.path, marked, self._runtime.disk, self._runtime.random_bytes, salvaged)
        move_aside(self.path, aside)
        suspect_path(self.path).unlink(missing_ok=True)
        what = "the log is damaged, and was moved aside"
        log.error(what, moved_to=str(aside), saved=whole is not None, reason=str(reason))
        if whole is not None:
            whole.rename(self.path)
            return [salvaged]
        return [*self._open_damage_of(aside), damage(seq + 1 if seq else 0, str(reason))]

    def _open_damage_of(self, path: Path) -> list[Damage]:
        """Returns the damage in a damaged file that nobody has acknowledged, as far as it can be read."""
        try:
            with contextlib.closing(self._runtime.disk.connect(path, read_only=True)) as db:
                return Ledger(DAMAGE.read(db).rows).open
        except (sqlite3.Error, TypeError, ValueError):
            return []


def suspect_path(path: Path) -> Path:
    """Returns the path of a file that requests: rebuild the log at the next open."""
    return Path(f"{path}.suspect")
