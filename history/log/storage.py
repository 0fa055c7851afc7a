"""Where a log keeps its records: on disk (durable.py) or in memory (volatile.py).

Log -> append, save, save_lazily -> Storage -> on_written(Written): records committed, refused, or deleted by retention
Log -> scan, find_id, ...        -> Storage -> records that are no longer in `tail`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

from history.file.load import Cursor, Loaded
from history.file.reader import ScanLimits
from history.file.store import LogChanges
from history.file.writer import Append, Retention, Written
from history.records.chunk import Scan, Tail

T = TypeVar("T")

FLUSH_MS = 200  # what is saved beside records is on disk that soon


class Storage(ABC):
    """All methods belong to the event loop, and none blocks it. Queries raise UStatusError: UNAVAILABLE, DATA_LOSS."""

    durable: bool
    loaded: Loaded
    """The log as it was opened. The streams in it belong to the log, which applies what `on_written` reports."""
    tail: Tail
    """The newest records."""
    failures: int
    """Failed transactions that were reported so far."""

    @abstractmethod
    def start(self, retention: Retention, on_written: Callable[[Written], None]) -> None:
        """`on_written` is called on the loop after each transaction and after each step of retention. `retention` may
        be called from any thread."""

    @abstractmethod
    async def close(self) -> None:
        """Write everything that is queued, and release the file."""

    @abstractmethod
    def append(self, append: Append) -> None:
        """Store the messages; `on_written` reports it, also if it fails."""

    @abstractmethod
    def save(self, changes: LogChanges, *, soon: bool = True) -> None:
        """Save `changes` with the next transaction; `soon`: within FLUSH_MS even if nothing is appended."""

    @abstractmethod
    def save_lazily(self, cursors: Mapping[str, Cursor], meta: Mapping[str, Any], records: int) -> None:
        """Save cursors and rows of META that have only moved, the cursors by `records`: within
        history.file.writer.CURSORS_IDLE_S, or earlier with records that are appended."""

    @abstractmethod
    def flush_soon(self, delay_ms: int = FLUSH_MS, *, with_lazy: bool = False) -> None:
        """Run a transaction after `delay_ms`, even if nothing is to be written: it repeats what has failed.
        `with_lazy`: it includes everything that was saved lazily."""

    @abstractmethod
    async def check_file(self) -> None:
        """Run a transaction soon if the file was moved or deleted, so that this is noticed although nothing is
        appended."""

    @abstractmethod
    async def run(self, call: Callable[..., T], *arguments: object) -> T:
        """Run `call` beside the loop."""

    @abstractmethod
    async def scan(
        self,
        limits: ScanLimits,
        streams: Set[int] | None,
        newest: Mapping[int, int] | None,
        holes: Sequence[tuple[int, int]],
    ) -> Scan:
        """Same as Reader.scan."""

    @abstractmethod
    async def find_id(self, id: bytes) -> int | None:
        """Returns the seq of the newest record with this message id (16 bytes, big endian)."""

    @abstractmethod
    async def first_after_time(self, time_ms: int) -> int | None:
        """Returns the first seq that was appended after `time_ms` (Unix milliseconds)."""

    @abstractmethod
    async def recent_ids(self, count: int) -> list[tuple[int, bytes]]:
        """Returns the stream and the id of the newest `count` records, oldest first."""
