"""A file with an owner: one process, one kind, one version, whole; and one answer for each trouble."""

from __future__ import annotations

import errno
import os
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from storage.disk import FileKind, SqliteFile, empty_wal, tables_of, transaction
from storage.faults import DamagedError, move_aside
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

NOTES: Final = FileKind(
    "note store",
    0x6E6F7465,
    2,
    is_ours=lambda db: "note" in tables_of(db),
    migrations={1: lambda db: db.execute("ALTER TABLE note ADD COLUMN author TEXT") and None},
    advice=": call somebody",
)


def fill(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE note(text TEXT, author TEXT)")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A whole one, closed."""
    file = SqliteFile(NOTES, tmp_path / "notes.db")
    file.take()
    assert not file.look()
    file.make(fill)
    with transaction(file.connect()) as _:
        file.connect().execute("INSERT INTO note VALUES('first', 'me')")
    file.close()
    file.close()
    return tmp_path / "notes.db"


def execute(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


def texts(db: sqlite3.Connection) -> list[str]:
    return [text for (text,) in db.execute("SELECT text FROM note")]


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("as SQLite says it")
    error.sqlite_errorcode = code
    return error


def test_it_belongs_to_one_owner_at_a_time(path: Path) -> None:
    first, second = SqliteFile(NOTES, path), SqliteFile(NOTES, path)
    first.take()
    with pytest.raises(UStatusError, match=f"note store .* is in use by process {os.getpid()}") as error:
        second.take()
    assert error.value.code == UCode.ALREADY_EXISTS
    first.close()
    second.take()
    second.close()


def test_looking_changes_no_byte_of_the_file_and_knows_the_version(path: Path) -> None:
    before = path.read_bytes()
    file = SqliteFile(NOTES, path)
    assert file.look()
    assert file.version == 2
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("statements", "match"),
    [
        (["PRAGMA user_version = 3"], "format 3, and this program knows up to 2: use a newer program"),
        (["PRAGMA application_id = 7", "DROP TABLE note", "CREATE TABLE song(x)"], "but not a note store"),
    ],
)
def test_what_is_not_ours_or_newer_is_refused(path: Path, statements: list[str], match: str) -> None:
    execute(path, *statements)
    before = path.read_bytes()
    with pytest.raises(UStatusError, match=match) as error:
        SqliteFile(NOTES, path).look()
    assert error.value.code == UCode.FAILED_PRECONDITION
    assert path.read_bytes() == before


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UStatusError, match="a folder, not a file"):
        SqliteFile(NOTES, tmp_path).look()


def test_an_id_whose_bits_have_turned_is_put_right(path: Path) -> None:
    execute(path, "PRAGMA application_id = 1")
    file = SqliteFile(NOTES, path)
    assert file.look()
    file.connect()
    assert not file.update(file.version), "the tables are today's"
    assert file.connect().execute("PRAGMA application_id").fetchone() == (NOTES.application_id,)
    file.close()


def test_an_older_version_is_brought_to_todays_whole_or_not_at_all(path: Path) -> None:
    execute(path, "ALTER TABLE note DROP COLUMN author", "PRAGMA user_version = 1")

    def half(db: sqlite3.Connection) -> None:
        db.execute("ALTER TABLE note ADD COLUMN author TEXT")
        db.execute("this is no SQL")

    for kind, raised in (
        (replace(NOTES, migrations={1: half}), sqlite3.Error),
        (replace(NOTES, migrations={}), UStatusError),
    ):
        file = SqliteFile(kind, path)
        assert file.look()
        file.connect()
        with pytest.raises(raised):
            file.update(file.version)
        file.close()
    file = SqliteFile(NOTES, path)
    assert file.look()
    assert file.version == 1
    file.connect()
    assert file.update(file.version)
    assert file.connect().execute("SELECT text, author FROM note").fetchall() == [("first", None)]
    file.close()


def test_damage_is_found_before_the_file_is_used_and_moved_aside_by_its_owner(path: Path) -> None:
    with path.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"\xa5" * 3000)
    file = SqliteFile(NOTES, path)
    with pytest.raises((DamagedError, sqlite3.DatabaseError)) as error:
        file.look()
    reported = NOTES.fault(error.value, path, "opened")
    assert (reported.code, "call somebody" in reported.message) == (UCode.DATA_LOSS, True)
    moved_to = move_aside(path)
    assert not path.exists()
    assert moved_to.name.startswith("notes.db.damaged-")
    assert not file.look()
    file.make(fill)
    assert texts(file.connect()) == []
    file.close()


def test_a_file_that_can_not_be_made_whole_is_not_there(tmp_path: Path) -> None:
    def half(db: sqlite3.Connection) -> None:
        fill(db)
        raise sqlite_error(sqlite3.SQLITE_FULL)

    file = SqliteFile(NOTES, tmp_path / "notes.db")
    with pytest.raises(sqlite3.OperationalError):
        file.make(half)
    assert list(tmp_path.iterdir()) == []


def test_after_an_error_the_next_connection_is_a_new_one(path: Path) -> None:
    file = SqliteFile(NOTES, path)
    db = file.connect()
    assert file.connect() is db

    def fail() -> None:
        with transaction(db):
            db.execute("INSERT INTO note VALUES('second', 'me')")
            db.execute("this is no SQL")

    with pytest.raises(sqlite3.Error):
        fail()
    file.reset()
    assert file.db is None
    assert file.connect() is not db
    assert texts(file.connect()) == ["first"]
    file.close()


def test_a_reader_is_waited_for_no_longer_than_asked(path: Path) -> None:
    file = SqliteFile(NOTES, path)
    db = file.connect()
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    assert texts(reader) == ["first"]
    db.execute("INSERT INTO note VALUES('second', 'me')")
    assert file.wal_bytes > 0
    assert not empty_wal(db, wait_ms=0)
    reader.execute("COMMIT")
    reader.close()
    assert empty_wal(db, wait_ms=0)
    assert file.wal_bytes == 0
    file.close()


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (sqlite_error(sqlite3.SQLITE_FULL), UCode.RESOURCE_EXHAUSTED, "disk is full"),
        (OSError(errno.ENOSPC, "no room"), UCode.RESOURCE_EXHAUSTED, "disk is full"),
        (sqlite_error(sqlite3.SQLITE_CORRUPT), UCode.DATA_LOSS, "is damaged"),
        (sqlite_error(sqlite3.SQLITE_NOTADB), UCode.DATA_LOSS, "is damaged"),
        (DamagedError("a row is missing"), UCode.DATA_LOSS, "a row is missing"),
        (PermissionError(errno.EACCES, "not yours"), UCode.PERMISSION_DENIED, "check its permissions"),
        (FileNotFoundError(errno.ENOENT, "no such"), UCode.FAILED_PRECONDITION, "make it first"),
        (OSError(errno.EROFS, "read-only"), UCode.UNAVAILABLE, "can't be opened"),
        (sqlite_error(sqlite3.SQLITE_IOERR), UCode.UNAVAILABLE, "can't be opened"),
        (sqlite_error(sqlite3.SQLITE_BUSY), UCode.UNAVAILABLE, "can't be opened"),
    ],
)
def test_each_trouble_has_one_answer_that_names_the_file(
    path: Path, error: Exception, code: UCode.ValueType, words: str
) -> None:
    reported = NOTES.not_opened(error, path)
    assert reported.code == code
    assert words in reported.message
    assert str(path) in reported.message


def test_what_may_not_be_written_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everything
    assert NOTES.not_opened(sqlite_error(sqlite3.SQLITE_READONLY), path).code == UCode.PERMISSION_DENIED
    while_used = NOTES.fault(sqlite_error(sqlite3.SQLITE_READONLY), path, "written")
    assert while_used.code == UCode.UNAVAILABLE, "who sends tries again: the disk may come back"
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert NOTES.not_opened(sqlite_error(sqlite3.SQLITE_READONLY), path).code == UCode.UNAVAILABLE


def test_a_removed_or_replaced_file_is_not_written_to(path: Path) -> None:
    file = SqliteFile(NOTES, path)
    file.take()
    assert file.look()
    file.connect()
    file.require_in_place()
    path.rename(path.with_name("elsewhere.db"))
    with pytest.raises(sqlite3.OperationalError, match="was deleted, moved or replaced while it was in use"):
        file.require_in_place()
    file.reset()  # as after an error
    with pytest.raises(sqlite3.OperationalError, match="was deleted, moved or replaced while it was in use"):
        file.connect()
    assert not path.exists()
    path.with_name("elsewhere.db").rename(path)
    assert texts(file.connect()) == ["first"]
    file.close()
