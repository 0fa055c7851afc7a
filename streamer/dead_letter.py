"""Dead letters: what could not be delivered, with its UCode and the reason. Stored, and published on the dead letter topic.

add -> queue (bounded) -> writer: one transaction per batch -> SQLite -> publish up://AUTHORITY/4/1/8001
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from storage.disk import REAL_DISK, Disk
from storage.runtime import REAL, Runtime
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DeadLetter
from uprotocol.status import UStatusError, code_name, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

RESOURCE: Final = 0x8001  # of core.ustreamer
STORED_MAX: Final = 10_000  # letters kept; the oldest go first: they are for a person to look at, the counters go on
QUEUED_MAX: Final = 2_000  # letters not yet stored; beyond it they are counted as lost, so that a flood costs no memory
BATCH_MAX: Final = 256  # letters per transaction

log = structlog.get_logger()


def topic(authority: str) -> UUri:
    """Where dead letters are published."""
    return uris.uri(authority, 0x0004, 1, RESOURCE)


@dataclass(frozen=True)
class Stored:
    """A dead letter as read from the store."""

    number: int
    time_ms: int
    code: int
    reason: str
    endpoint: str
    message: UMessage

    def as_dict(self) -> dict[str, object]:
        attributes = self.message.attributes
        return {
            "number": self.number,
            "time_ms": self.time_ms,
            "code": code_name(self.code),
            "reason": self.reason,
            "endpoint": self.endpoint,
            "id": uuids.format(attributes.id),
            "source": uris.format(attributes.source),
            "sink": uris.format(attributes.sink) if attributes.HasField("sink") else None,
            "payload_bytes": len(self.message.payload),
        }


class Store:
    """The SQLite file; every call blocks. Raises UStatusError(FAILED_PRECONDITION) if it can't be opened, or is no such file."""

    def __init__(self, path: Path, *, read_only: bool = False, disk: Disk = REAL_DISK) -> None:
        try:
            if read_only:  # not even a journal is made: it may be another user's
                self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
                self._db.execute("select count(*) from letter")
                return
            self._db = disk.connect(path)
            self._db.execute("pragma journal_mode=wal")
            self._db.execute(
                "create table if not exists letter(number integer primary key autoincrement, time_ms integer, code integer, reason text,"
                " endpoint text, message blob)"
            )
        except sqlite3.Error as error:
            raise UStatusError(
                UCode.FAILED_PRECONDITION, f"the dead letter store {path} can't be opened ({error}): check it, or move it away"
            ) from None

    def write(self, letters: Sequence[tuple[int, int, str, str, bytes]]) -> None:
        self._db.execute("begin")
        try:
            self._db.executemany("insert into letter(time_ms, code, reason, endpoint, message) values(?,?,?,?,?)", letters)
            self._db.execute("delete from letter where number <= (select max(number) from letter) - ?", (STORED_MAX,))
            self._db.execute("commit")
        except sqlite3.Error:
            if self._db.in_transaction:  # a full disk may have ended it already
                self._db.execute("rollback")
            raise

    def read(self, newest: int = STORED_MAX) -> list[Stored]:
        """The newest letters, oldest first."""
        rows = self._db.execute(
            "select number, time_ms, code, reason, endpoint, message from letter order by number desc limit ?", (newest,)
        ).fetchall()
        return [
            Stored(number, time_ms, code, reason, endpoint, UMessage.FromString(data))
            for number, time_ms, code, reason, endpoint, data in reversed(rows)
        ]

    def close(self) -> None:
        self._db.close()


def open_read_only(path: Path) -> Store:
    """For the command line. Raises INVALID_ARGUMENT if there is no such store."""
    if not path.exists():
        raise invalid(f"there is no dead letter store at {path}: is this the data_dir of a streamer that has run?")
    return Store(path, read_only=True)


class DeadLetters:
    """The owner of dead letters. `add` never waits; `run` stores and publishes."""

    def __init__(
        self,
        path: Path,
        authority: str,
        publish: Callable[[UUri, DeadLetter], Awaitable[None]],
        now_ms: Callable[[], int] | None = None,
        runtime: Runtime = REAL,
    ) -> None:
        self._store = Store(path, disk=runtime.disk)
        self._topic, self._publish, self._now_ms = topic(authority), publish, now_ms or runtime.now_ms
        self._queue: deque[DeadLetter] = deque()
        self._arrived = asyncio.Event()
        self._executor = ThreadPoolExecutor(1, "dead-letters")
        self._flushing: asyncio.Future[None] | None = None
        self.total = 0
        self.lost = 0  # not stored: queue full, disk refused, or a dead letter of a dead letter
        self.by_code: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"DeadLetters(total={self.total}, lost={self.lost}, queued={len(self._queue)})"

    def add(self, message: UMessage, code: UCode.ValueType, reason: str, endpoint: str) -> None:
        self.total += 1
        self.by_code[code_name(code)] = self.by_code.get(code_name(code), 0) + 1
        if message.attributes.source == self._topic or len(self._queue) >= QUEUED_MAX:
            self.lost += 1  # never a dead letter of a dead letter
            return
        letter = DeadLetter(message=message, code=code, reason=reason, endpoint=endpoint)
        letter.time.FromMilliseconds(self._now_ms())
        self._queue.append(letter)
        self._arrived.set()

    async def run(self) -> None:
        """Store and publish until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._queue:
                self._flushing = asyncio.ensure_future(self._flush())
                await asyncio.shield(self._flushing)  # what has left the queue is stored, though we are cancelled

    async def _flush(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_MAX))]
        rows = [
            (letter.time.ToMilliseconds(), letter.code, letter.reason, letter.endpoint, letter.message.SerializeToString())
            for letter in batch
        ]
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._store.write, rows)
        except sqlite3.Error as error:
            self.lost += len(batch)
            log.error("dead letters could not be stored", letters=len(batch), error=str(error))
        for letter in batch:
            try:
                await self._publish(self._topic, letter)
            except UStatusError as error:
                log.debug("a dead letter could not be published; it is stored", error=str(error))

    async def close(self) -> None:
        if self._flushing is not None:
            await self._flushing
        while self._queue:
            await self._flush()
        self._executor.shutdown()
        self._store.close()
