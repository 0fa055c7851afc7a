"""A durable log keeps its records here: a file, the thread that writes it, threads that read it, and its newest records
in memory. What keeps them in memory alone has the same methods (ring.py).

append, save -> Writer (its thread) -> on the loop: tail -> on_written
run(reader.scan, ...) -> Reader (some threads)
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TypeVar

from history.file.reader import Reader
from history.file.store import Store
from history.file.writer import Append, Retention, Writer, Written
from history.records.chunk import Tail
from storage.faults import is_damage
from storage.runtime import Runtime
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

if TYPE_CHECKING:
    from history.log.log import Log

FLUSH_MS: Final = 200  # what is saved beside records is on disk that soon
READ_THREADS: Final = 2

T = TypeVar("T")


class Disk:
    """Use `open`. All methods belong to the loop, and none blocks it."""

    durable = True
    append: Callable[[Append], None]
    """The future is resolved by `on_written`, also if it fails."""

    def __init__(
        self,
        store: Store,
        executor: ThreadPoolExecutor,
        name: str,
        tail_bytes: int,
        gather_ms: float,
        now_ms: Callable[[], int],
    ) -> None:
        self.loaded, self.tail = store.loaded, Tail(store.extent.newest_seq, tail_bytes)
        self.reader = Reader(store.path, store.runtime.disk)
        self._store, self._executor, self._name, self._now_ms = store, executor, name, now_ms
        self._gather_ms = gather_ms
        self._loop = asyncio.get_running_loop()
        self._flush_due: asyncio.TimerHandle | None = None
        self._closed = False

    @classmethod
    async def open(
        cls,
        path: Path,
        name: str,
        retention_bytes: int,
        tail_bytes: int,
        gather_ms: float,
        now_ms: Callable[[], int],
        runtime: Runtime,
    ) -> Self:
        """Raises UStatusError, as Log.open."""
        executor = ThreadPoolExecutor(READ_THREADS, thread_name_prefix=f"history-{name}-read")
        loop = asyncio.get_running_loop()
        try:
            store = await loop.run_in_executor(executor, Store, path, runtime, now_ms, retention_bytes)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        return cls(store, executor, name, tail_bytes, gather_ms, now_ms)

    @property
    def failures(self) -> int:
        return self.writer.failures_heard

    def start(self, log: Log, on_written: Callable[[Written], None]) -> None:
        """`on_written` is called on the loop, after each transaction and after each step of retention."""
        self._log, self._on_written = log, on_written
        retention = Retention(log.retention_ms, log.keep_after, log.owed_after)
        self.writer = Writer(self._store, retention, self._written, self._now_ms, self._name, self._gather_ms)
        self.append = self.writer.submit

    async def close(self) -> None:
        """Write what is queued, and close the file."""
        self._closed = True
        if self._flush_due is not None:
            self._flush_due.cancel()
        await self.writer.stop()
        await self._loop.run_in_executor(self._executor, self.reader.close)
        self._executor.shutdown(wait=False)

    def _written(self, written: Written) -> None:
        for chunk in written.chunks:
            self.tail.push(chunk, sum(map(len, chunk.data)))
        self._on_written(written)

    def save(self, change: Callable[[Writer], bool | None], *, at_once: bool = True) -> None:
        """Beside records: with the next transaction, or within FLUSH_MS; only with one if not `at_once`, unless
        `change` answers that it has to be."""
        if change(self.writer) or at_once:
            self.flush_soon()

    def flush_soon(self, delay_ms: int = FLUSH_MS) -> None:
        """Write what is saved, try again what has failed, and write something in any case."""
        if self._flush_due is None and not self._closed:
            self._flush_due = self._loop.call_later(delay_ms / 1_000, self._flush)

    async def look(self) -> None:
        """Write something soon if the file is not where it was, so that this shows though nobody appends."""
        if not self._closed and not await self._loop.run_in_executor(self._executor, self._store.file.is_in_place):
            self.flush_soon(0)

    def _flush(self) -> None:
        self._flush_due = None
        self.writer.flush()

    async def run(self, call: Callable[..., T], *arguments: object) -> T:
        """In a thread. Raises UStatusError: UNAVAILABLE, DATA_LOSS."""
        if self._closed:
            raise UStatusError(UCode.UNAVAILABLE, f"the log {self._name} is closed")
        try:
            return await self._loop.run_in_executor(self._executor, call, *arguments)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite quotes what is damaged
            code = UCode.UNAVAILABLE if isinstance(error, sqlite3.Error) and not is_damage(error) else UCode.DATA_LOSS
            raise UStatusError(code, f"the log {self._name} can't be read: {error}") from error
