"""Dead letters: undeliverable messages with their UCode and the reason. They are stored, and published on a topic.

add -> how many of this kind in this minute? -> queue -> one transaction a batch -> SQLite -> up://AUTHORITY/4/1/8001
         few: whole  more: without payload                '-- damaged: moved aside
         a flood: counted only                            '-- newer, in use, disk full: logged, published, not stored

read, settle, remove <- ask <- operators (operations.py, resending.py): in the thread of the store, between batches

Queue and store are bounded in letters and bytes. If one is full, letters of the source authority with the most in it
are removed. So the flood of one authority does not displace the letters of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import structlog
from google.protobuf.message import DecodeError

from storage.disk import REAL_DISK, Disk, FileKind, SqliteFile, delete_rows, insert_rows, pragma, transaction
from storage.faults import DamagedError, is_damage, move_aside
from storage.runtime import REAL, Answerer, Runtime
from streamer.letters.selection import LetterFilter
from streamer.reporting import Condition, Reporter, Sample, each
from streamer.spans import MessageSpans
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication.shares import FairQueue
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DeadLetter
from uprotocol.encoded import Carried, EncodedMessage, decoded
from uprotocol.status import UStatusError, code_name
from uprotocol.transport import MESSAGE_BYTES_MAX
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

STORED_MAX: Final = 10_000  # letters in the store
STORED_BYTES_MAX: Final = 64 << 20  # of their messages
FREE_BYTES_MAX: Final = 16 << 20  # of unused pages in the file; with more of them the next start runs `vacuum`
LETTERS_WAL_BYTES_MAX: Final = 4 << 20  # size of the write-ahead log after a checkpoint
# ... and while a reader prevents the checkpoint: above it nothing is stored
WAL_HELD_BYTES_MAX: Final = 32 << 20
LETTERS_QUEUED_MAX: Final = 2_000  # letters not yet stored
QUEUED_BYTES_MAX: Final = 8 << 20  # of their messages
# stored letters of one authority, code and kind of reason; any more are only counted
STORED_PER_MINUTE: Final = 1_000
# ... of these letters with payload; more would wear out the disk and fill the network
WHOLE_BYTES_PER_MINUTE: Final = 16 << 20
LETTER_KINDS_MAX: Final = 4_096  # within one minute; all further kinds count as one
MINUTE_S: Final = 60.0
ALL_KINDS: Final = 8  # all kinds together have 8 times the limits of one: an attacker can invent any number of kinds
REASON_CHARACTERS_MAX: Final = 1_000  # a reason may quote a network, or an address that a sender made up
LETTER_ENVELOPE_BYTES: Final = 4_096  # of a published letter without the message: reason, endpoint, time
OPEN_AGAIN_S: Final = 5.0  # between two attempts to open the store, while letters arrive
SCHEMA_VERSION: Final = 1
APPLICATION_ID: Final = 0x7570_646C  # "updl": distinguishes dead letters from other SQLite files
LETTERS_BATCH_MAX: Final = 256  # letters per transaction
# ... and a quarter of the queue's bytes: storing and publishing copies each letter several times
BATCH_SHARE: Final = 4

CUT: Final = "more than is kept of one kind in a minute)"  # end of the reason of a letter without its payload
TYPE_NAMES: Final = {one: name.removeprefix("UMESSAGE_TYPE_").lower() for name, one in UMessageType.items()}
REMOVED_MAX: Final = 1_000  # letters per transaction that removes them

# names and numbers: reasons that differ only in these are of one kind
_VARIABLE: Final = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")

T = TypeVar("T")
# all are in the metrics at 0 from the start, so that the first letter is an increase
CODE_NAMES: Final = [code_name(code) for code in UCode.values() if code]

log = structlog.get_logger()


@dataclass(frozen=True)
class Stored:
    """A dead letter as read from the store."""

    number: int
    time_ms: int
    code: int
    reason: str
    endpoint: str
    message: UMessage

    @property
    def is_cut(self) -> bool:
        """True if only the attributes of the message were stored."""
        return not self.message.payload and self.reason.endswith(CUT)

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


LetterRow = tuple[int, int, str, str, bytes]  # time, code, reason, endpoint, message
Refusal = tuple[int, int, str]
"""Number of a letter that was refused again, code, reason."""


class Stock(NamedTuple):
    letters: int = 0
    newest: int = 0  # number
    oldest_ms: int | None = None  # time of the letter with the least number


_TABLE: Final = (
    "create table letter(number integer primary key autoincrement, time_ms integer, code integer, reason text,"
    " endpoint text, message blob)"
)


LETTERS: Final = FileKind(
    "dead letter store",
    APPLICATION_ID,
    SCHEMA_VERSION,
    migrations={},
    advice=": check it, or move it away",
)


class LetterStore:
    """The SQLite file. Every call blocks; only one thread at a time may call."""

    def __init__(self, path: Path, *, read_only: bool = False, disk: Disk = REAL_DISK) -> None:
        """Opens the file. A damaged file is moved to `moved_to`, and a new one is created.

        Raises UStatusError and changes nothing: the codes of FileKind.not_opened, ALREADY_EXISTS (in use),
        FAILED_PRECONDITION (another program's, or newer).
        """
        self.path, self.moved_to = path, Path()
        self._file = SqliteFile(LETTERS, path, disk, (f"journal_size_limit = {LETTERS_WAL_BYTES_MAX}",))
        self._letters: FairQueue[int] | None = None  # their numbers by source authority; None: not counted yet
        disk.retry_with_reserve(path, lambda: self._open_or_close(read_only=read_only))

    def _open_or_close(self, *, read_only: bool) -> None:
        try:
            self._open(read_only=read_only)
        except BaseException as error:
            self.close()
            if isinstance(error, sqlite3.Error | OSError | DamagedError):
                raise LETTERS.not_opened(error, self.path) from None
            raise

    def _open(self, *, read_only: bool) -> None:
        if read_only:  # creates no journal: the file may belong to another user
            db = self._file.db = self._file.disk.look(self.path)
            if LETTERS.version_of(db, self.path) is None:
                raise LETTERS.refusal(self.path, "nothing is in it")
            return
        self._file.take()
        try:
            self._check()
        except (sqlite3.Error, DamagedError) as error:
            if not is_damage(error):
                raise
            self._file.reset()
            self.moved_to = move_aside(self.path)
            what = "the dead letters are damaged: they were moved aside"
            log.error(what, moved_to=str(self.moved_to), reason=str(error))
            self._check()

    def _check(self) -> None:
        if not self._file.look():
            self._file.make(lambda db: db.execute(_TABLE))
        db = self._file.connect()
        self._file.update(self._file.version)
        self._letters = _counted(db)
        if pragma(db, "freelist_count") * pragma(db, "page_size") > FREE_BYTES_MAX:  # it was larger before
            # fails if the disk has no space for the copy, or during a read: the next start tries again
            with contextlib.suppress(sqlite3.OperationalError):
                db.execute("vacuum")

    def write(self, letters: Sequence[LetterRow]) -> None:
        """Stores all, or raises sqlite3.Error and stores none. If full, removes the oldest of the largest authority."""
        self._change(lambda db: self._write(db, letters))

    def _write(self, db: sqlite3.Connection, letters: Sequence[LetterRow]) -> None:
        known = self._letters = _counted(db) if self._letters is None else self._letters
        (number,) = db.execute("select coalesce(max(seq), 0) from sqlite_sequence where name = 'letter'").fetchone()
        fresh = {number + place: letter for place, letter in enumerate(letters, 1)}
        for number, letter in fresh.items():
            known.add(_authority_of(letter[-1]), number, len(letter[-1]))
        removed = set()
        while known.is_over:
            removed.add(known.drop())
        # first, so that the insert reuses its pages
        delete_rows(db, "delete from letter where number", list(removed))
        rows = [(number, *letter) for number, letter in fresh.items() if number not in removed]
        insert_rows(db, "insert into letter(number, time_ms, code, reason, endpoint, message)", rows)

    def read(self, newest: int = STORED_MAX) -> list[Stored]:
        """Returns the newest letters, oldest first. Raises UStatusError(DATA_LOSS) if they are damaged."""
        return self.select(LetterFilter(), newest, newest_first=True)[::-1]

    def select(
        self, which: LetterFilter, count_max: int, bytes_max: int = STORED_BYTES_MAX, *, newest_first: bool = False
    ) -> list[Stored]:
        """Returns letters in the order of their numbers; the last one may exceed `bytes_max`. Raises as `read`."""
        where, values = which.sql()
        query = f"select number, time_ms, code, reason, endpoint, message from letter where {where}"
        query += f" order by number {'desc' if newest_first else 'asc'} limit ?"
        found: list[Stored] = []
        try:
            with contextlib.closing(self._file.connect().execute(query, (*values, count_max))) as rows:
                for number, time_ms, code, reason, endpoint, data in rows:
                    found.append(Stored(number, time_ms, code, reason, endpoint, UMessage.FromString(data)))
                    bytes_max -= len(data)
                    if bytes_max <= 0:
                        break
        except (sqlite3.Error, DecodeError, TypeError) as error:
            raise LETTERS.fault(DamagedError(str(error)), self.path, "read") from None
        return found

    def those_until_now(self, which: LetterFilter) -> LetterFilter:
        """Returns `which` without the letters that come later. Raises sqlite3.Error."""
        return which if which.until is not None else replace(which, until=self.stock().newest)

    def count(self, which: LetterFilter) -> int:
        """Raises sqlite3.Error."""
        where, values = which.sql()
        (count,) = self._file.connect().execute(f"select count(*) from letter where {where}", values).fetchone()
        return int(count)

    def remove(self, which: LetterFilter, count_max: int = REMOVED_MAX) -> int:
        """Removes the oldest of these letters in one transaction; returns how many. Raises sqlite3.Error."""
        self._letters = None  # counted again when the next letter comes
        where, values = which.sql()
        oldest = f"select number from letter where {where} order by number limit ?"
        delete = f"delete from letter where number in ({oldest})"
        return self._change(lambda db: db.execute(delete, (*values, count_max)).rowcount)

    def settle(self, arrived: Sequence[int], refused: Sequence[Refusal], now_ms: int) -> int:
        """Removes letters that have arrived, and notes with the others why they were refused again. All or nothing;
        returns how many were removed. Raises sqlite3.Error."""

        def change(db: sqlite3.Connection) -> int:
            update = "update letter set time_ms = ?, code = ?, reason = ? where number = ?"
            db.executemany(update, [(now_ms, code, reason, number) for number, code, reason in refused])
            return delete_rows(db, "delete from letter where number", list(arrived))

        self._letters = None
        return self._change(change)

    def _change(self, change: Callable[[sqlite3.Connection], T]) -> T:
        return self._file.disk.retry_with_reserve(self.path, lambda: self._try(change))

    def _try(self, change: Callable[[sqlite3.Connection], T]) -> T:
        try:
            db = self._file.writable(WAL_HELD_BYTES_MAX)
            with transaction(db):
                return change(db)
        except BaseException:
            self._letters = None
            self._file.reset()
            raise

    def stock(self) -> Stock:
        """Raises sqlite3.Error."""
        db = self._file.connect()
        count = self.count(LetterFilter()) if self._letters is None else len(self._letters)
        (newest,) = db.execute("select coalesce(max(number), 0) from letter").fetchone()
        oldest = db.execute("select time_ms from letter order by number limit 1").fetchone()
        return Stock(count, int(newest), None if oldest is None else int(oldest[0]))

    def close(self) -> None:
        """Closes the file. May be called twice."""
        self._file.close()


def _counted(db: sqlite3.Connection) -> FairQueue[int]:
    """Returns the stored letters by source authority. Raises sqlite3.Error."""
    letters: FairQueue[int] = FairQueue(STORED_MAX, STORED_BYTES_MAX)
    for number, data in db.execute("select number, coalesce(cast(message as blob), x'') from letter order by number"):
        letters.add(_authority_of(data), number, len(data))
    return letters


def _authority_of(data: bytes) -> str:
    """Returns the source authority of an encoded message; "" if it can't be read."""
    try:
        return UMessage.FromString(data).attributes.source.authority_name
    except DecodeError:
        return ""


def open_read_only(path: Path) -> LetterStore:
    """Opens the store for the command line. Raises INVALID_ARGUMENT if the file is missing."""
    LETTERS.require_there(path)
    return LetterStore(path, read_only=True)


class Letter(NamedTuple):
    """A dead letter that is not stored yet. The message is copied only when it is stored."""

    time_ms: int
    code: UCode.ValueType
    reason: str
    endpoint: str
    message: Carried
    is_withheld: bool = False  # the rules deny it: its payload is not published

    def row(self) -> LetterRow:
        return self.time_ms, self.code, self.reason, self.endpoint, self.message.SerializeToString()

    def published(self, *, whole: bool) -> DeadLetter:
        is_whole, reason = whole and not self.is_withheld, self.reason
        message = decoded(self.message) if is_whole else UMessage(attributes=self.message.attributes)
        if self.is_withheld:
            reason += " (its payload is denied, too, and is in the store only)"
        elif not whole:
            reason += " (its payload is too large to be published with it, and is kept in the store)"
        letter = DeadLetter(message=message, code=self.code, reason=reason, endpoint=self.endpoint)
        letter.time.FromMilliseconds(self.time_ms)
        return letter


def attributes_of(message: Carried) -> UAttributes:
    """Returns the attributes without parsing an encoded message; its id may be that of another message."""
    return message.stamp.attributes if type(message) is EncodedMessage else message.attributes


def size_of(message: Carried) -> int:
    """Returns roughly the encoded size of the message; `ByteSize` of protobuf would encode all of it."""
    if type(message) is EncodedMessage:
        return message.ByteSize()
    return len(message.payload) + message.attributes.ByteSize()


class Granted(NamedTuple):
    stored: bool  # False: only counted
    whole: bool  # with payload


class PerMinute:
    """Grants `count_max` letters of one kind per minute, `bytes_max` bytes of them with payload. All kinds together get
    ALL_KINDS times as much."""

    def __init__(self, count_max: int, bytes_max: int, monotonic: Callable[[], float]) -> None:
        self._count_max, self._bytes_max, self._monotonic = count_max, bytes_max, monotonic
        self._kinds: dict[Hashable, tuple[int, int]] = {}
        self._count = self._bytes = 0  # of all kinds
        self._until = 0.0

    def happened(self, kind: Hashable, size: int) -> Granted:
        now = self._monotonic()
        if now >= self._until:
            self._kinds.clear()
            self._count = self._bytes = 0
            self._until = now + MINUTE_S
        if kind not in self._kinds and len(self._kinds) >= LETTER_KINDS_MAX:
            kind = None
        count, bytes = self._kinds.get(kind, (0, 0))
        stored = count < self._count_max and self._count < ALL_KINDS * self._count_max
        fits = not bytes or bytes + size <= self._bytes_max
        whole = stored and fits and self._bytes + size <= ALL_KINDS * self._bytes_max
        self._kinds[kind] = count + stored, bytes + size * whole
        self._count += stored
        self._bytes += size * whole
        return Granted(stored, whole)


class DeadLetters(Reporter):
    """Queues, stores and publishes dead letters. `add` never waits; `run` stores and publishes.

    Its state: the letters that wait (`_queue`), the store while it can be used (`_store`, `trouble`, `_open_again_at`),
    what the limits of a minute have let through (`_rate`, `_limited`, `_logged`), and the counts of all letters.
    """

    def __init__(
        self,
        path: Path,
        authority: str,
        publish: Callable[[UUri, DeadLetter], Awaitable[None]],
        runtime: Runtime = REAL,
        *,
        bytes_max: int = QUEUED_BYTES_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        """`bytes_max`: limit of the queue; `message_bytes_max`: longest payload that networks accept."""
        if path.is_dir():
            raise LETTERS.refusal(path, "it is a folder, not a file")
        self._path, self._disk, self._monotonic = path, runtime.disk, runtime.monotonic
        self._topic, self._publish, self.now_ms = ids.at(authority, ids.DEAD_LETTERS), publish, runtime.now_ms
        self._bytes_max, self._published_bytes_max = bytes_max, message_bytes_max - LETTER_ENVELOPE_BYTES
        self._queue: FairQueue[Letter] = FairQueue(LETTERS_QUEUED_MAX, bytes_max)
        self._rate = PerMinute(STORED_PER_MINUTE, WHOLE_BYTES_PER_MINUTE, runtime.monotonic)
        self._limits_reported_at = -MINUTE_S
        self._limited: dict[str, str] = {}  # fields of the last line about a limit
        self._logged: Counter[Hashable] = Counter()  # letters by kind in this minute, and in the last one with letters
        self._logged_before: Counter[Hashable] = Counter()
        self._logged_until = 0.0
        self._arrived = asyncio.Event()
        self._worker: Answerer[Callable[[], Any], Any] = Answerer("dead-letters", _answers, worker=runtime.worker)
        self._flushing: asyncio.Future[None] | None = None
        self.trouble: str | None = None  # why nothing is stored now; None: letters are stored
        self.total = 0
        self.lost = 0  # not stored: queue full, no store, disk error, or a dead letter of a dead letter
        self.limited = 0  # counted only: too many of one kind within a minute
        self.damaged = 0  # stores that were moved aside
        self.by_code: Counter[str] = Counter()
        self.spans: MessageSpans | None = None  # set by the owner: what traces messages
        self.resent = 0  # stored letters that have arrived after all
        self.purged = 0  # ... that an operator has removed
        self.stock = Stock()  # of the store after its last change
        self._store: LetterStore | None = None
        self._open_again_at = 0.0
        self._open()

    def __repr__(self) -> str:
        counts = f"total={self.total}, lost={self.lost}, limited={self.limited}, queued={len(self._queue)}"
        return f"DeadLetters({counts}, trouble={self.trouble})"

    def add(
        self, message: Carried, code: UCode.ValueType, reason: str, endpoint: str, *, is_withheld: bool = False
    ) -> None:
        """Queues `message`, or counts it unparsed if its authority has too many letters of that kind.

        `is_withheld`: the rules deny it, so its payload is not published.
        """
        self.total += 1
        self.by_code[code_name(code)] += 1
        if self.spans is not None:
            self.spans.dead(endpoint, message, code, reason)
        source = attributes_of(message).source
        if source == self._topic:
            self.lost += 1  # never a dead letter of a dead letter
            return
        size, kind = size_of(message), _VARIABLE.sub("#", reason[:REASON_CHARACTERS_MAX])
        granted = self._rate.happened((source.authority_name, code, kind), size)
        self._log_first((endpoint, code, kind), message, reason)
        if not granted.stored:
            self.limited += 1
            report = {"authority": source.authority_name, "code": code_name(code), "reason": kind}
            if report != self._limited or self._limits_reported_at + MINUTE_S <= self._monotonic():
                self._limits_reported_at, self._limited = self._monotonic(), report
                what = "too many dead letters within a minute: for the rest of it they are counted only"
                log.warning(what, **report, counted_only=self.limited)
            return
        reason = reason[:REASON_CHARACTERS_MAX]
        if not granted.whole or size > self._bytes_max:
            bytes = size - attributes_of(message).ByteSize()
            reason += f" (without its payload of {bytes} bytes: {CUT}"
            message = UMessage(attributes=message.attributes)
            size = size_of(message)
        letter = Letter(self.now_ms(), code, reason, endpoint, message, is_withheld)
        self._queue.add(source.authority_name, letter, size)
        while self._queue.is_over and len(self._queue) > 1:
            self._queue.drop()
            self.lost += 1
        self._arrived.set()

    def _log_first(self, kind: tuple[str, UCode.ValueType, str], message: Carried, reason: str) -> None:
        """Logs the first letter of a kind (endpoint, code, kind of reason) in a minute; counts the others."""
        now = self._monotonic()
        if now >= self._logged_until:
            self._logged_before, self._logged, self._logged_until = self._logged, Counter(), now + MINUTE_S
        if kind not in self._logged and len(self._logged) >= LETTER_KINDS_MAX:
            return
        self._logged[kind] += 1
        if self._logged[kind] > 1:
            return
        attributes = attributes_of(message)
        log.warning(
            "a message became a dead letter",
            endpoint=kind[0],
            type=TYPE_NAMES.get(attributes.type, attributes.type),
            source=uris.format(attributes.source),
            sink=uris.format(attributes.sink) if attributes.HasField("sink") else None,
            code=code_name(kind[1]),
            reason=reason[:REASON_CHARACTERS_MAX],
            minute_before=self._logged_before[kind],
        )

    def conditions(self) -> Iterator[Condition]:
        if self.trouble:
            yield Condition(f"dead letters: {self.trouble}")

    def samples(self) -> Iterator[Sample]:
        yield "queued_bytes", ("", "dead letters"), self._queue.used.bytes
        yield from each("dead_letters", (), dict.fromkeys(CODE_NAMES, 0) | self.by_code)
        yield "dead_letters_lost", (), self.lost
        yield "dead_letters_limited", (), self.limited
        yield "dead_letters_damaged", (), self.damaged
        yield "dead_letters_stored", (), self.stock.letters
        yield "dead_letters_resent", (), self.resent
        yield "dead_letters_purged", (), self.purged

    def notes(self) -> Iterator[str]:
        letters, _, oldest_ms = self.stock
        if oldest_ms is not None:
            since = datetime.fromtimestamp(oldest_ms / 1_000, UTC).isoformat(timespec="seconds")
            yield (
                f"{letters} dead letters are stored, the oldest since {since}: see what they are (up-streamer "
                "dead-letters), then resend or purge them"
            )

    async def ask(self, work: Callable[[LetterStore], T]) -> T:
        """Returns what `work` returns, which uses the store in its thread. Raises UStatusError, also if the store can't
        be opened or used."""
        result: T = await self._worker.ask(partial(self._use, work))
        return result

    async def run(self) -> None:
        """Stores and publishes letters until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._queue:
                self._flushing = asyncio.ensure_future(self._flush())
                await asyncio.shield(self._flushing)  # a batch is stored even if `run` is cancelled

    async def _flush(self) -> None:
        batch: list[tuple[Letter, int]] = []
        left = self._bytes_max // BATCH_SHARE
        while self._queue and len(batch) < LETTERS_BATCH_MAX and left > 0:
            batch.append(self._queue.take())
            left -= batch[-1][1]
        if not await self._worker.ask(partial(self._keep, [letter.row() for letter, _ in batch])):
            self.lost += len(batch)
        for letter, size in batch:
            try:
                await self._publish(self._topic, letter.published(whole=size <= self._published_bytes_max))
            except UStatusError as error:
                log.debug("a dead letter could not be published; it is stored", error=str(error))

    # On the worker's thread

    def _keep(self, rows: Sequence[LetterRow]) -> bool:
        """Returns True if the rows were stored; else `trouble` has the reason."""
        for _ in range(2):  # if the store is damaged, a new one replaces it and gets the rows
            if self._store is None and not self._open():
                return False
            assert self._store is not None
            try:
                self._store.write(rows)
            except sqlite3.Error as error:
                self._note(LETTERS.fault(error, self._path, "written").message)
                if not is_damage(error):
                    return False
                self._store.close()
                self._store, self._open_again_at = None, 0.0
            else:
                self._note(None)
                self._take_stock()
                return True
        return False

    def _use(self, work: Callable[[LetterStore], T]) -> T:
        if self._store is None and not self._open():
            raise UStatusError(UCode.UNAVAILABLE, f"dead letters: {self.trouble or 'their store is closed'}")
        assert self._store is not None
        try:
            result = work(self._store)
        except (sqlite3.Error, OSError) as error:
            raise LETTERS.fault(error, self._path, "used") from None
        self._take_stock()
        return result

    def _take_stock(self) -> None:
        if self._store is not None:
            with contextlib.suppress(sqlite3.Error):  # reported by the next use
                self.stock = self._store.stock()

    def _open(self) -> bool:
        """Returns False if the store can't be opened: letters are then only published and counted."""
        if self._monotonic() < self._open_again_at:
            return False
        self._open_again_at = self._monotonic() + OPEN_AGAIN_S
        try:
            self._store = LetterStore(self._path, disk=self._disk)
        except UStatusError as error:
            self._note(error.message)
            return False
        if self._store.moved_to != Path():
            self.damaged += 1
        self._note(None)
        self._take_stock()
        return True

    def _note(self, trouble: str | None) -> None:
        if trouble != self.trouble and trouble is not None:
            log.error("dead letters are not stored", why=trouble, _kind="dead letters")
        elif trouble is None and self.trouble is not None:
            log.info("dead letters are stored again", _kind="dead letters")
        self.trouble = trouble

    async def close(self) -> None:
        if self._flushing is not None:
            await self._flushing
        while self._queue:
            await self._flush()
        await self._worker.close()
        if self._store is not None:
            self._store.close()


def _answers(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns the result or the exception of each job, in the thread of the store."""
    answers: list[Any] = []
    for job in jobs:
        try:
            answers.append(job())
        except Exception as error:
            answers.append(error)
    return answers
