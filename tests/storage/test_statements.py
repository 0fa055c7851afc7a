"""Many rows in few statements."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from storage.disk import ROWS_AT_ONCE, delete_rows, insert_rows


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    made = sqlite3.connect(":memory:", isolation_level=None)
    made.execute("CREATE TABLE pair (key INTEGER PRIMARY KEY, value TEXT)")
    yield made
    made.close()


def found(db: sqlite3.Connection) -> list[tuple[int, str]]:
    return db.execute("SELECT * FROM pair ORDER BY key").fetchall()


def test_rows_take_one_statement_for_many(db: sqlite3.Connection) -> None:
    rows = [(key, str(key)) for key in range(2 * ROWS_AT_ONCE + 7)]
    statements = list[str]()
    db.set_trace_callback(statements.append)
    assert insert_rows(db, "INSERT INTO pair", iter(rows)) == len(rows)
    assert len(statements) == 3
    assert delete_rows(db, "DELETE FROM pair WHERE key", range(5, len(rows) + 100)) == len(rows) - 5
    assert len(statements) == 6
    assert found(db) == rows[:5]


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 100])
def test_a_build_of_sqlite_that_takes_few_values(db: sqlite3.Connection, count: int) -> None:
    db.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 20)
    rows = [(key, str(key)) for key in range(count)]
    assert insert_rows(db, "INSERT INTO pair", rows) == count
    assert insert_rows(db, "INSERT OR REPLACE INTO pair", rows) == count
    assert found(db) == rows
    assert delete_rows(db, "DELETE FROM pair WHERE value > ? AND key", range(count), "0") == max(count - 1, 0)
    assert found(db) == rows[:1]


def test_values_that_do_not_fit_change_nothing_of_their_statement(db: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.Error):
        insert_rows(db, "INSERT INTO pair", [(1, "a"), (1, "b")])
    assert found(db) == []
