"""The storage of a durable log: a file, the thread that writes it, threads that read it, and the newest records in
memory.

append, save -> Writer (its thread) -> on the loop: tail -> on_written
scan, ... -> Reader (some threads)
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from history.file.load import Cursor
from history.file.reader import Reader, ScanLimits
from history.file.store import LogChanges, Store
from history.file.writer import Append, Retention, Writer, Written
from history.log.storage import FLUSH_MS, Storage
from history.records.chunk import Scan, Tail
from storage.faults import is_damage
from storage.runtime import Runtime
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

READ_THREADS: Final = 2

T = TypeVar("T")


class DurableStorage(Storage):
    """See Storage. Use `open`."""

    def __init__(
        self,
        store: Store,
        executor: ThreadPoolExecutor,
        name: str,
        tail_bytes: int,
        gather_ms: float,
        now_ms: Callable[[], int],
    ) -> None:
        self.durable, self.failures = True, 0
        self.loaded, self.tail = store.loaded, Tail(store.extent.newest_seq, tail_bytes)
        self._reader = Reader(store.path, store.runtime.disk)
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

    def start(self, retention: Retention, on_written: Callable[[Written], None]) -> None:
        self._on_written = on_written
        self.writer = Writer(self._store, retention, self._written, self._now_ms, self._name, self._gather_ms)

    async def close(self) -> None:
        self._closed = True
        if self._flush_due is not None:
            self._flush_due.cancel()
        await self.writer.stop()
        await self._loop.run_in_executor(self._executor, self._reader.close)
        self._executor.shutdown(wait=False)

    def append(self, append: Append) -> None:
        append.failures_known = self.failures
        self.writer.worker.put(append)

    def _written(self, written: Written) -> None:
        self.failures += written.is_new_failure
        for chunk in written.chunks:
            self.tail.push(chunk, sum(map(len, chunk.data)))
        self._on_written(written)
        self._store.heard_seq = max(self._store.heard_seq, written.extent.newest_seq)

    # -- beside records

    def save(self, changes: LogChanges, *, soon: bool = True) -> None:
        self.writer.save(changes)
        if soon:
            self.flush_soon()

    def save_lazily(self, cursors: Mapping[str, Cursor], meta: Mapping[str, Any], records: int) -> None:
        if self.writer.save_lazily(cursors, meta, records):
            self.flush_soon()

    def flush_soon(self, delay_ms: int = FLUSH_MS, *, with_lazy: bool = False) -> None:
        if with_lazy:
            self.writer.include_lazy()
        if self._flush_due is None and not self._closed:
            self._flush_due = self._loop.call_later(delay_ms / 1_000, self._flush)

    def _flush(self) -> None:
        self._flush_due = None
        self.writer.flush()

    async def check_file(self) -> None:
        if not self._closed:
            try:
                await self._loop.run_in_executor(self._executor, self._store.file.require_in_place)
            except sqlite3.OperationalError:
                self.flush_soon(0)

    # -- queries

    async def run(self, call: Callable[..., T], *arguments: object) -> T:
        if self._closed:
            raise UStatusError(UCode.UNAVAILABLE, f"the log {self._name} is closed")
        try:
            return await self._loop.run_in_executor(self._executor, call, *arguments)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where SQLite quotes damaged text
            code = UCode.UNAVAILABLE if isinstance(error, sqlite3.Error) and not is_damage(error) else UCode.DATA_LOSS
            raise UStatusError(code, f"the log {self._name} can't be read: {error}") from error

    async def scan(
        self,
        limits: ScanLimits,
        streams: Set[int] | None,
        newest: Mapping[int, int] | None,
        holes: Sequence[tuple[int, int]],
    ) -> Scan:
        return await self.run(self._reader.scan, limits, streams, newest, holes)

    async def find_id(self, id: bytes) -> int | None:
        return await self.run(self._reader.find_id, id)

    async def first_after_time(self, time_ms: int) -> int | None:
        return await self.run(self._reader.first_after_time, time_ms)

    async def recent_ids(self, count: int) -> list[tuple[int, bytes]]:
        return await self.run(self._reader.recent_ids, count)
