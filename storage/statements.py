"""Many rows in few statements.

Python releases its interpreter lock at each step of a SQLite statement, and `executemany` takes a step a row. Beside a
busy event loop each step then waits for the lock, up to a switch interval: 5,000 rows took 0.4 to 1.4 s in this way,
and take 15 ms in statements of ROWS_AT_ONCE rows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any, Final

ROWS_AT_ONCE: Final = 500  # in one statement, where the build of SQLite takes as many values


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
