"""A subscriber that never misses a record in silence, and has all of an epoch or none, if it wants epochs.

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
from history.reading.acceptor import Accepted, Acceptor, Places, Positions, Record
from history.reading.client import WAIT_MS_MAX, HistoryClient, Poller
from history.reading.following import Following, Mode
from history.service.matches import HIDDEN
from history.service.request import PATTERNS_MAX
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollRequest
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

# polled while the application still works on the one before; each at most the service's limit
BATCHES_AHEAD_MAX: Final = 2
# between two writes of the file while batches pass; what is lost of it comes twice after a restart
CURSOR_SAVE_MS: Final = 1_000

log = structlog.get_logger()


class CursorFile:
    """Places in a file that is replaced whole: after a crash it holds the old ones or the new ones. `load` and `save`
    block. `epochs`: what an Assembler keeps with them, as it was loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.epochs: dict[str, Any] | None = None

    def load(self) -> Places:
        """Empty if there is none. Raises UStatusError(INVALID_ARGUMENT) for what isn't a cursor: its owner decides what
        then."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return Places()
        try:
            content = json.loads(text)
            places, self.epochs = _places(content), content.get("epochs")
            Assembler().restore(self.epochs or {"groups": []})
            return places
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"{self._path} is not a cursor file ({error}): delete it to start from the beginning"
            raise invalid(what) from None

    def save(self, places: Places, epochs: dict[str, Any] | None = None) -> None:
        """Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(f"{self._path.name}.new")
        content = {
            "positions": {incarnation.hex(): seq for incarnation, seq in places.positions.items()},
            "known": {
                incarnation.hex(): [[seq, digest.hex()] for seq, digest in known.items()]
                for incarnation, known in places.known.items()
            },
            "idle": sorted(incarnation.hex() for incarnation in places.idle),
            **({} if epochs is None else {"epochs": epochs}),
        }
        with beside.open("w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _places(content: dict[str, Any]) -> Places:
    """Files of the first version have positions only."""
    positions = {bytes.fromhex(incarnation): seq for incarnation, seq in content["positions"].items()}
    known = {
        bytes.fromhex(incarnation): {seq: bytes.fromhex(digest) for seq, digest in pairs}
        for incarnation, pairs in content.get("known", {}).items()
    }
    unread = (one.hex() for one, seq in positions.items() if not seq)
    idle = set(map(bytes.fromhex, content.get("idle", unread)))
    seqs = [*positions.values(), *(seq for pairs in known.values() for seq in pairs)]
    if not all(type(seq) is int and 0 <= seq < 1 << 64 for seq in seqs):
        raise ValueError("a seq is a number from 0")
    if not all(len(incarnation) == 16 for incarnation in (*positions, *known, *idle)):
        raise ValueError("an incarnation has 16 bytes")
    return Places(positions, known, idle)


class GaplessSubscriber:
    """Every record of `topics`, once and in order, within a run; at least once across restarts (with `cursor_path`).

        async with GaplessSubscriber(client, [topic], cursor_path=path, on_gap=report) as subscriber:
            async for record in subscriber: ...

    Without a cursor it begins after `positions`, in other logs that there are where `start` says: a PollRequest of
    which only `start` is read (default: earliest); a log that comes later is read whole. `consumer` names a cursor with
    the service that holds retention while we poll. A batch counts as taken when the next one is asked for.
    `on_gap(gap)` is told what can never be read; `on_connected(bool)` whether the service answers. Both are called on
    the loop, and kept as `gaps` (counted) and `connected`. While the service is away it is asked again, with growing,
    random pauses; any other error ends the iteration. `next_batch` and `commit` are the plain interface below.

    `mode`: how records come, see Following; it may be set at any time, and nothing is lost or doubled by that. Only a
    client that can be pushed to is. With `sample_period_ms` each topic has one record at most in each period.
    `dropped`: see Acceptor. `counts`: see Following.

    With `assembler`, made for the same `topics`, `epochs` is the way to read: all of an epoch, or none.

        async with GaplessSubscriber(client, topics, assembler=Assembler(topics)) as subscriber:
            async for epoch in subscriber.epochs(): ...

    `keepers`: authorities of the gateways and publishers that keep the epochs; none: whoever does. Without a cursor in
    a file it begins in the middle of what goes on, and drops that; see Assembler.
    """

    def __init__(
        self,
        client: HistoryClient,
        topics: Sequence[UUri] = (),
        *,
        mode: Mode = "auto",
        sample_period_ms: int = 0,
        start: PollRequest | None = None,
        positions: Positions | None = None,
        consumer: str = "",
        lease_ms: int = 0,
        cursor_path: Path | str | None = None,
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
                    "what is sampled is never all of an epoch: read without a sample period, or without epochs"
                )
            told = [one for keeper in keepers or (uris.WILDCARD_AUTHORITY,) for one in ids.frontiers_of(keeper)]
            topics = [*topics, *told] if topics else topics
        self._assembler = assembler
        self._in_hand: deque[Assembled] = deque()  # handed over or about to be; not taken
        self._read = Places()  # up to where the assembler has everything
        self._has_taken = False  # epochs, since the file was written,
        self._is_stale = False  # or since it was looked up to where they bring us
        self._file = CursorFile(Path(cursor_path)) if cursor_path is not None else None
        self._on_gap = on_gap
        self._following = Following(
            client,
            mode=mode,
            start=start,
            consumer=consumer,
            consumer_lease_ms=lease_ms,
            max_records=max_records,
            max_bytes=max_bytes,
            wait_ms_max=wait_ms_max,
            plain=not sample_period_ms and len(topics) <= PATTERNS_MAX,
            on_connected=on_connected,
            on_denied=self._on_denied,
            rng=rng,
            random_bytes=random_bytes,
        )
        for topic in topics or (uris.ANY,):
            self._following.follow(topic, sample_period_ms)
        self._places = Places(dict(positions or {}))
        self._acceptor = Acceptor(places=self._places)
        self._queue: asyncio.Queue[Accepted | Exception] = asyncio.Queue(BATCHES_AHEAD_MAX)
        self._puller: asyncio.Task[None] | None = None
        self._handed: Accepted | None = None
        self._rest: deque[Record] = deque()
        self._saved = Places()
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
    def mode(self) -> Mode:
        return self._following.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._following.mode = mode

    @property
    def counts(self) -> Counter[str]:
        return self._following.counts

    @property
    def dropped(self) -> Counter[str]:
        return self._acceptor.dropped

    @property
    def positions(self) -> Positions:
        """Up to where, in each log, the application has taken everything."""
        return dict(self._taken.positions)

    async def __aenter__(self) -> Self:
        if self._file is not None:
            self._saved = await asyncio.to_thread(self._file.load)
            if self._saved.positions:
                self._places = self._saved.copy()
                self._acceptor = Acceptor(places=self._places)
                self._following.has_begun = True
            if self._assembler is not None and self._file.epochs is not None:
                self._assembler.restore(self._file.epochs)
        self._read = self._taken.copy()
        self._following.wants_frontiers = self._assembler is not None
        self._puller = asyncio.create_task(self._pull(), name="gapless subscriber")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop, and keep the cursor. What was not taken comes again next time. May be called twice."""
        puller, self._puller = self._puller, None
        if puller is None:
            return
        puller.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await puller
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(UStatusError(UCode.CANCELLED, "the subscriber was closed"))  # for who waits for a batch
        await self._save()

    # -- what the application sees

    async def next_batch(self) -> list[Record]:
        """Records as they come, some at once; never an empty list. The batch before counts as taken.

        Raises UStatusError if the service refuses, FAILED_PRECONDITION after `close`.
        """
        assert self._assembler is None, "who reads epochs reads nothing else"
        self._take_handed()
        while True:
            item = await self._next_item()
            assert item is not None, "there was no end to the waiting"
            self._tell_gaps(item)
            self._handed = item
            if item.records:
                return item.records
            self._take_handed()

    def _tell_gaps(self, item: Accepted) -> None:
        for gap in item.gaps:
            self.gaps += 1
            if self._on_gap is not None:
                self._on_gap(gap)

    async def epochs(self) -> AsyncIterator[Assembled]:
        """Epochs as they end, for ever. One counts as taken when the next is asked for; with a cursor in a file those
        that were taken don't come again, unless the file could not be written before a crash. Raises as `next_batch`.
        """
        assembler, time = self._assembler, asyncio.get_running_loop().time
        assert assembler is not None, "made with an assembler"
        while True:
            while self._in_hand:
                yield self._in_hand[0]
                self._in_hand.popleft()
                self._take_epochs()
            item = await self._next_item(assembler.due)
            if item is not None:
                self._tell_gaps(item)
                if item.gaps:
                    assembler.lose({gap.incarnation for gap in item.gaps if gap.reason == Gap.REASON_CORRUPTION})
                if item.frontiers is not None:
                    assembler.begin(item.frontiers, time())
                self._in_hand += assembler.take(item.records, time())
                self._read = item.places.copy()
            self._in_hand += assembler.overdue(time())
            self._take_epochs(is_news=False)

    def _take_epochs(self, *, is_news: bool = True) -> None:
        self._has_taken = self._has_taken or is_news
        self._is_stale = True

    @property
    def _taken(self) -> Places:
        """Up to where everything was taken."""
        if self._is_stale:
            assert self._assembler is not None, "only epochs are"
            self._is_stale, self._places = False, self._read.copy()
            self._places.positions = self._assembler.safe(self._places.positions, self._in_hand)
            self._assembler.forget(self._places.positions)
        return self._places

    async def batches(self) -> AsyncIterator[list[Record]]:
        """`next_batch` for ever."""
        while True:
            yield await self.next_batch()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record:
        if not self._rest:
            self._rest.extend(await self.next_batch())
        return self._rest.popleft()

    async def commit(self) -> None:
        """All that was handed over is taken; the cursor is in its file when this returns."""
        if self._assembler is not None:
            assert self._in_hand, "within the loop over `epochs`"
            self._in_hand[0] = Assembled(None, [])
            self._take_epochs()
        self._take_handed()
        await self._save()

    def _take_handed(self) -> None:
        handed, self._handed = self._handed, None
        if handed is None:
            return
        self._places = handed.places.copy()
        if self._rest:  # iteration by record stands in the middle of this batch
            self._handed = handed
            taken = self._places.positions
            for record in self._rest:
                taken[record.incarnation] = min(taken.get(record.incarnation, 0), record.seq - 1)

    async def _next_item(self, until: float | None = None) -> Accepted | None:
        """Waits, and saves the cursor meanwhile when its time has come. None: nothing came `until` then, loop time."""
        while True:
            if self._puller is None:
                what = "the subscriber is closed, or was never opened: use `async with`"
                raise UStatusError(UCode.FAILED_PRECONDITION, what)
            save_at = self._next_save if self._is_unsaved else None
            try:
                async with asyncio.timeout_at(min((at for at in (save_at, until) if at is not None), default=None)):
                    item = await self._queue.get()
            except TimeoutError:  # a timer may end before its time, by as much as the clock's resolution
                if save_at is not None and (until is None or save_at <= until):
                    await self._save()
                    continue
                return None
            if isinstance(item, Exception):
                self._queue.put_nowait(item)  # whoever asks again hears it again
                raise item
            return item

    @property
    def _is_unsaved(self) -> bool:
        return self._file is not None and (self._has_taken or self._taken != self._saved)

    async def _save(self) -> None:
        """One after the other, also where who has begun one is cancelled: an older place must not replace a newer."""
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

    async def _write(self, file: CursorFile, taken: Places, epochs: dict[str, Any] | None) -> None:
        try:
            await asyncio.to_thread(file.save, taken, epochs)
        except OSError as error:
            log.error("the cursor can't be saved; after a restart more comes twice", error=str(error))
            self._has_taken = self._assembler is not None
        else:
            self._saved = taken

    # -- pulling

    async def _pull(self) -> None:
        try:
            async with self._following as following:
                while True:
                    acked = (self._taken if self._file is None else self._saved).positions
                    response = await following.next(self._acceptor.places, acked)
                    if response is None:
                        continue
                    accepted = self._acceptor.accept(response)
                    if accepted.gaps and self._assembler is not None:
                        following.wants_frontiers = True
                    if accepted.records or accepted.gaps or accepted.frontiers is not None:
                        await self._queue.put(accepted)
                    elif not self._queue.full() and accepted.places != self._taken:
                        # nothing for us, but the cursor moves on, so that retention is not held
                        self._queue.put_nowait(accepted)
        except Exception as error:
            await self._queue.put(error)

    def _on_denied(self, topic: UUri) -> None:
        self._denied += 1
        if self._denied == len(self._following.topics):
            raise UStatusError(UCode.PERMISSION_DENIED, HIDDEN)


__all__ = ["CursorFile", "GaplessSubscriber", "HistoryClient", "Places", "Poller", "Positions", "Record"]
