"""A subscriber that misses no record without a report, and optionally delivers each epoch whole or not at all.

Following -> Acceptor: does each record directly follow the last one of its topic? -> queue -> batches() -> application
  ^            | no: drop the rest, go back, poll again                                            |
  '------------+------- positions, acked <--- cursor (file, replaced whole) <--- batch was taken --'

                                                        queue -> Assembler -> epochs() -> application
                                         cursor: before what waits for the end of its epoch <--'
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

import structlog

from history.epochs.assembling import Assembled, Assembler
from history.reading.acceptor import Accepted, Acceptor, ReaderState
from history.reading.client import WAIT_MS_MAX, HistoryClient
from history.reading.following import Following, FollowingOptions, FollowMode
from history.records.limits import PATTERNS_MAX, checked_holder
from history.records.record import Positions, Record
from history.records.visible import NOTHING_VISIBLE
from storage.disk import REAL_DISK
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollRequest
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

# polled while the application still works on the batch before; each has at most the service's limit
BATCHES_AHEAD_MAX: Final = 2
# between two writes of the file; records after the last write come again after a restart
CURSOR_SAVE_MS: Final = 1_000
HOLDER_BYTES: Final = 8  # of a random name

log = structlog.get_logger()


class CursorFile:
    """A ReaderState in a file that is replaced atomically. `load` and `save`
    block. `epochs`: what an Assembler keeps with them, as it was loaded. `holder`: who reads with this file; it is
    saved with them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.epochs: dict[str, Any] | None = None
        self.holder = ""

    def load(self) -> ReaderState:
        """Returns an empty state if there is no file. Raises INVALID_ARGUMENT if the file is not a cursor file."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return ReaderState()
        try:
            state, self.epochs = cursor_of(text)
            self.holder = checked_holder(str(json.loads(text).get("holder", "")))
            return state
        except UStatusError as error:
            what = f"{self._path} is not a cursor file ({error.message}): delete it to start from the beginning"
            raise invalid(what) from None

    def save(self, state: ReaderState, epochs: dict[str, Any] | None = None) -> None:
        """Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        REAL_DISK.replace_text(self._path, cursor_text(state, epochs, self.holder))


def cursor_text(state: ReaderState, epochs: dict[str, Any] | None = None, holder: str = "") -> str:
    """Returns JSON from which `cursor_of` reads the same, without the holder."""
    content = {
        "positions": {incarnation.hex(): seq for incarnation, seq in state.positions.items()},
        "known": {
            incarnation.hex(): [[seq, digest.hex()] for seq, digest in known.items()]
            for incarnation, known in state.known.items()
        },
        "idle": sorted(incarnation.hex() for incarnation in state.idle),
        **({} if epochs is None else {"epochs": epochs}),
        **({"holder": holder} if holder else {}),
    }
    return json.dumps(content)


def cursor_of(text: str) -> tuple[ReaderState, dict[str, Any] | None]:
    """Returns the state, and what an Assembler keeps with it. Raises INVALID_ARGUMENT."""
    try:
        content = json.loads(text)
        state, epochs = _read_state(content), content.get("epochs")
        Assembler().restore(epochs or {"groups": []})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise invalid(str(error)) from None
    return state, epochs


def _read_state(content: dict[str, Any]) -> ReaderState:
    positions = {bytes.fromhex(incarnation): seq for incarnation, seq in content["positions"].items()}
    known = {
        bytes.fromhex(incarnation): {seq: bytes.fromhex(digest) for seq, digest in pairs}
        for incarnation, pairs in content["known"].items()
    }
    idle = set(map(bytes.fromhex, content["idle"]))
    seqs = [*positions.values(), *(seq for pairs in known.values() for seq in pairs)]
    if not all(type(seq) is int and 0 <= seq < 1 << 64 for seq in seqs):
        raise ValueError("a seq is a number from 0")
    if not all(len(incarnation) == 16 for incarnation in (*positions, *known, *idle)):
        raise ValueError("an incarnation has 16 bytes")
    return ReaderState(positions, known, idle)


class GaplessSubscriber:
    """Every record of `topics`, once and in order, within a run; at least once across restarts (with `cursor_path`).

        async with GaplessSubscriber(client, [topic], cursor_path=path, on_gap=report) as subscriber:
            async for record in subscriber: ...

    `cursor`: of another one, instead of the file. Without a cursor it begins after `positions`; in other logs at
    `start`, a PollRequest of which only `start` is read (default: earliest). A log that is created later is read whole.
    `consumer` names a cursor at the service that holds retention while we poll. One reader at a time may use it:
    another one waits for its lease (`lease_ms`, and 30 s), then ends with ABORTED. `holder` is the reader's name there;
    by default a random one, which `cursor_path` keeps. A batch counts as taken when the next one is asked for.
    `on_gap(gap)` is called for records that can never be read, `on_connected(bool)` when the service begins or stops to
    answer; both on the loop. The same is in `gaps` (a count) and `connected`. While the service does not answer it is
    asked again after growing, random pauses; any other error ends the iteration. `next_batch` and `commit` are the
    interface below the iteration.

    `mode`: how records come, see Following. It may be set at any time; no record is lost or repeated by that. Pushes
    need a client with `frames`. With `sample_period_ms` each topic has at most one record in each period.
    `dropped`: see Acceptor. `counts`: see Following.

    With `assembler`, made for the same `topics`, read with `epochs`: all of an epoch, or none of it.

        async with GaplessSubscriber(client, topics, assembler=Assembler(topics)) as subscriber:
            async for epoch in subscriber.epochs(): ...

    `keepers`: authorities of the gateways and publishers that keep the epochs; none: any. Without a cursor in a file it
    drops the epochs that are open when it begins; see Assembler.
    """

    def __init__(
        self,
        client: HistoryClient,
        topics: Sequence[UUri] = (),
        *,
        mode: FollowMode = "auto",
        sample_period_ms: int = 0,
        start: PollRequest | None = None,
        positions: Positions | None = None,
        consumer: str = "",
        holder: str = "",
        lease_ms: int = 0,
        cursor_path: Path | str | None = None,
        cursor: str = "",
        assembler: Assembler | None = None,
        keepers: Sequence[str] = (),
        max_records: int = 0,
        max_bytes: int = 0,
        wait_ms_max: int = WAIT_MS_MAX,
        on_gap: Callable[[Gap], None] | None = None,
        on_connected: Callable[[bool], None] | None = None,
        rng: random.Random | None = None,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        if assembler is not None:
            if sample_period_ms:
                raise invalid(
                    "sampled records are never a whole epoch: read without a sample period, or without epochs"
                )
            frontiers = [one for keeper in keepers or (uris.WILDCARD_AUTHORITY,) for one in ids.frontiers_of(keeper)]
            topics = [*topics, *frontiers] if topics else topics
        self._assembler = assembler
        self._in_hand: deque[Assembled] = deque()  # delivered, or to be delivered next; not taken
        self._read = ReaderState()  # up to where the assembler has all records
        self._has_taken = False  # epochs were taken since the file was written
        self._is_stale = False  # ... or since `_state` was computed
        self._file = CursorFile(Path(cursor_path)) if cursor_path is not None else None
        self._consumer, self._holder, self._random_bytes = consumer, checked_holder(holder), random_bytes
        self._cursor = cursor
        self._on_gap = on_gap
        self._following = Following(
            client,
            FollowingOptions(
                mode=mode,
                start=start,
                consumer=consumer,
                consumer_lease_ms=lease_ms,
                max_records=max_records,
                max_bytes=max_bytes,
                wait_ms_max=wait_ms_max,
                names_topics=not sample_period_ms and len(topics) <= PATTERNS_MAX,
                rng=rng,
                random_bytes=random_bytes,
            ),
            on_connected=on_connected,
            on_denied=self._on_denied,
        )
        self.counts = self._following.counts
        for topic in topics or (uris.ANY,):
            self._following.follow(topic, sample_period_ms)
        self._state = ReaderState(dict(positions or {}))
        self._acceptor = Acceptor(state=self._state)
        self._queue: asyncio.Queue[Accepted | Exception] = asyncio.Queue(BATCHES_AHEAD_MAX)
        self._puller: asyncio.Task[None] | None = None
        self._delivered: Accepted | None = None
        self._rest: deque[Record] = deque()
        self._saved = ReaderState()
        self._denied = 0
        self._next_save = 0.0
        self._saving: asyncio.Task[None] | None = None
        self.gaps = 0

    def __repr__(self) -> str:
        state = "connected" if self.connected else "not connected"
        taken = {key.hex()[:8]: seq for key, seq in self._taken.positions.items()}
        return f"GaplessSubscriber({state}, gaps={self.gaps}, {taken=})"

    @property
    def connected(self) -> bool:
        return self._following.connected

    @property
    def mode(self) -> FollowMode:
        return self._following.mode

    @mode.setter
    def mode(self, mode: FollowMode) -> None:
        self._following.mode = mode

    @property
    def dropped(self) -> Counter[str]:
        return self._acceptor.dropped

    @property
    def positions(self) -> Positions:
        """The position in each log up to which the application has taken all records."""
        return dict(self._taken.positions)

    @property
    def cursor(self) -> str:
        """What was taken, as text: another subscriber of these topics that has it as its `cursor` goes on there."""
        taken = self._taken
        held = self._in_hand
        return cursor_text(taken, None if self._assembler is None else self._assembler.save(taken.positions, held))

    async def __aenter__(self) -> Self:
        epochs = None
        if self._file is not None:
            self._saved, epochs = await asyncio.to_thread(self._file.load), self._file.epochs
        elif self._cursor:
            self._saved, epochs = cursor_of(self._cursor)
        if self._consumer:
            await self._take_holder(epochs)
        if self._saved.positions:
            self._state = self._saved.copy()
            self._acceptor = Acceptor(state=self._state)
            self._following.has_begun = True
        if self._assembler is not None and epochs is not None:
            self._assembler.restore(epochs)
        self._read = self._taken.copy()
        self._following.wants_frontiers = self._assembler is not None
        self._puller = asyncio.create_task(self._pull(), name="gapless subscriber")
        return self

    async def _take_holder(self, epochs: dict[str, Any] | None) -> None:
        file = self._file
        known = self._holder or (file.holder if file is not None else "")
        self._following.holder = holder = known or self._random_bytes(HOLDER_BYTES).hex()
        if file is not None and file.holder != holder:  # before it is used: after a crash we must be the same one
            file.holder = holder
            await self._write(file, self._saved, epochs)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop, and save the cursor. Records that were not taken come again next time. May be called twice."""
        puller, self._puller = self._puller, None
        if puller is None:
            return
        puller.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await puller
        while not self._queue.empty():
            self._queue.get_nowait()
        # for a call that waits for a batch
        self._queue.put_nowait(UStatusError(UCode.CANCELLED, "the subscriber was closed"))
        await self._save()
        await self._following.leave(self._acked)

    # -- for the application

    async def next_batch(self) -> list[Record]:
        """Returns the next records; never an empty list. The batch before counts as taken.

        Raises UStatusError if the service refuses, FAILED_PRECONDITION after `close`.
        """
        assert self._assembler is None, "a subscriber with an assembler is read with `epochs`"
        self._take_delivered()
        while True:
            item = await self._next_item()
            assert item is not None, "it waits without a time limit"
            for gap in item.gaps:
                self._report(gap)
            self._delivered = item
            if item.records:
                return item.records
            self._take_delivered()

    def _report(self, gap: Gap) -> None:
        self.gaps += 1
        if self._on_gap is not None:
            self._on_gap(gap)

    async def epochs(self) -> AsyncIterator[Assembled]:
        """Yields epochs as they end, without end. One counts as taken when the next is asked for. With a cursor file,
        taken epochs do not come again, unless the file could not be written before a crash. Raises as `next_batch`.
        """
        assembler, time = self._assembler, asyncio.get_running_loop().time
        assert assembler is not None, "the subscriber has an assembler"
        while True:
            while self._in_hand:
                yield self._in_hand[0]
                self._in_hand.popleft()
                self._has_taken = self._is_stale = True
            item = await self._next_item(assembler.due)
            if item is not None:
                for gap in item.gaps:
                    self._report(gap)
                if item.gaps:
                    assembler.lose({gap.incarnation for gap in item.gaps if gap.reason == Gap.REASON_CORRUPTION})
                if item.frontiers is not None:
                    assembler.begin(item.frontiers, time())
                self._in_hand += assembler.take(item.records, time())
                self._read = item.state.copy()
            self._in_hand += assembler.overdue(time())
            self._is_stale = True

    @property
    def _taken(self) -> ReaderState:
        """The state up to which all records were taken."""
        if self._is_stale:
            assert self._assembler is not None, "only epochs make it stale"
            self._is_stale, self._state = False, self._read.copy()
            self._state.positions = self._assembler.safe(self._state.positions, self._in_hand)
            self._assembler.forget(self._state.positions)
        return self._state

    async def batches(self) -> AsyncIterator[list[Record]]:
        """Yields `next_batch` without end."""
        while True:
            yield await self.next_batch()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record:
        if not self._rest:
            self._rest.extend(await self.next_batch())
        return self._rest.popleft()

    async def commit(self) -> None:
        """Everything delivered counts as taken. Returns when the cursor is in its file."""
        if self._assembler is not None:
            assert self._in_hand, "called within the loop over `epochs`"
            self._in_hand[0] = Assembled(None, [])
            self._has_taken = self._is_stale = True
        self._take_delivered()
        await self._save()

    def _take_delivered(self) -> None:
        delivered, self._delivered = self._delivered, None
        if delivered is None:
            return
        self._state = delivered.state.copy()
        if self._rest:  # iteration by record is in the middle of this batch
            self._delivered = delivered
            taken = self._state.positions
            for record in self._rest:
                taken[record.incarnation] = min(taken.get(record.incarnation, 0), record.seq - 1)

    async def _next_item(self, until: float | None = None) -> Accepted | None:
        """Wait for the next item, and save the cursor meanwhile when it is due. Returns None if nothing came `until`
        then, loop time."""
        while True:
            if self._puller is None:
                what = "the subscriber is closed, or was never opened: use `async with`"
                raise UStatusError(UCode.FAILED_PRECONDITION, what)
            save_at = self._next_save if self._is_unsaved else None
            try:
                async with asyncio.timeout_at(min((at for at in (save_at, until) if at is not None), default=None)):
                    item = await self._queue.get()
            except TimeoutError:  # a timer may end early by the clock's resolution
                if save_at is not None and (until is None or save_at <= until):
                    await self._save()
                    continue
                return None
            if isinstance(item, Exception):
                self._queue.put_nowait(item)  # the next call raises it again
                raise item
            return item

    @property
    def _is_unsaved(self) -> bool:
        return self._file is not None and (self._has_taken or self._taken != self._saved)

    async def _save(self) -> None:
        """Writes follow one another, even if the caller of one is cancelled: an older state must not replace a
        newer."""
        while self._saving is not None and not self._saving.done():
            await asyncio.wait([self._saving])
        if self._file is None or not self._is_unsaved:
            return
        taken = self._taken.copy()
        epochs = None if self._assembler is None else self._assembler.save(taken.positions, self._in_hand)
        self._has_taken = False
        self._next_save = asyncio.get_running_loop().time() + CURSOR_SAVE_MS / 1000
        self._saving = asyncio.create_task(self._write(self._file, taken, epochs), name="save a cursor")
        await asyncio.shield(self._saving)

    async def _write(self, file: CursorFile, taken: ReaderState, epochs: dict[str, Any] | None) -> None:
        try:
            await asyncio.to_thread(file.save, taken, epochs)
        except OSError as error:
            log.error("the cursor can't be saved; after a restart more records come twice", error=str(error))
            self._has_taken = self._assembler is not None
        else:
            self._saved = taken

    # -- pulling

    @property
    def _acked(self) -> Positions:
        return (self._taken if self._file is None else self._saved).positions

    async def _pull(self) -> None:
        try:
            async with self._following as following:
                while True:
                    response = await following.next(self._acceptor.state, self._acked)
                    if response is None:
                        continue
                    accepted = self._acceptor.accept(response)
                    if accepted.gaps and self._assembler is not None:
                        following.wants_frontiers = True
                    if accepted.records or accepted.gaps or accepted.frontiers is not None:
                        await self._queue.put(accepted)
                    elif not self._queue.full() and accepted.state != self._taken:
                        # no record for us, but the cursor moves on, so that it does not hold retention
                        self._queue.put_nowait(accepted)
        except Exception as error:
            await self._queue.put(error)

    def _on_denied(self, topic: UUri) -> None:
        self._denied += 1
        if self._denied == len(self._following.topics):
            raise UStatusError(UCode.PERMISSION_DENIED, NOTHING_VISIBLE)


__all__ = ["CursorFile", "GaplessSubscriber", "HistoryClient", "Positions", "ReaderState", "Record"]
