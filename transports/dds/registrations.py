"""Filters -> DDS readers, and the wait until the other participants have found those readers. On the event loop.

filter -> a pattern:    a reader of its own       -> Readers.add, on one thread -> wait until every peer has announced
          a plain name: joins the next new reader                                  the reader (RollCall), SEEN_S at most
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import structlog

from transports.base import NOT_OPEN
from transports.dds import mapping
from transports.dds.link import Remembered
from transports.dds.readers import NAMES_BYTES_MAX, NAMES_MAX, Readers
from transports.dds.roll_call import Seen
from transports.listeners import Filter
from uprotocol.status import UStatusError

DISCOVERY_S_MAX: Final = 2.0  # the longest wait of `discovered`
# for all peers to find a new reader; takes 1 to 30 ms. A peer that is stuck must not block us for longer
SEEN_S: Final = 1.0
SEEN_KEPT_MAX: Final = 4_096  # announcements kept for readers that are just being made

log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class _NewReader:
    """Filters that get one reader."""

    owners: dict[str, Filter]  # by partition
    made: asyncio.Task[int] | None = None
    octets: int = 0  # of the partitions' names

    def can_take(self, partition: str) -> bool:
        is_full = len(self.owners) >= NAMES_MAX or self.octets + len(partition) > NAMES_BYTES_MAX
        return self.made is not None and not is_full and partition not in self.owners


class Registrations:
    """The readers of one session's filters, and the peers that must find them."""

    def __init__(self, authority: str) -> None:
        self._authority = authority
        self._is_open = False
        self._tokens: dict[Filter, asyncio.Task[int]] = {}  # of readers; done when the peers know the reader
        self._next = _NewReader({})  # the reader that is made next
        self._making = asyncio.Lock()
        self.peers: frozenset[bytes] = frozenset()
        self._silent: set[bytes] = set()  # peers that did not answer in time: not waited for until they do
        self._seen: Remembered[bytes, set[bytes]] = Remembered(SEEN_KEPT_MAX)  # own reader -> peers that have found it
        self._awaited: dict[bytes, asyncio.Event] = {}  # own readers that a registration waits for
        self._found_something = asyncio.Event()  # set by discovery

    def open(self, readers: Readers) -> None:
        self._readers, self._is_open = readers, True
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="dds-registrar")

    async def discovered(self, quiet_s: float) -> None:
        """Wait until discovery has found nothing new for `quiet_s`. What we then write reaches every reader that
        existed before us."""
        loop = asyncio.get_running_loop()
        end = loop.time() + DISCOVERY_S_MAX
        while loop.time() < end:
            self._found_something.clear()
            try:
                async with asyncio.timeout(quiet_s):
                    await self._found_something.wait()
            except TimeoutError:
                return

    def stop(self) -> None:
        """Make no more readers."""
        self._is_open = False

    async def finish(self) -> None:
        """After `stop`: completes when no reader is being made."""
        self._wake(self._awaited)
        await asyncio.gather(*self._tokens.values(), return_exceptions=True)

    def close(self, close_session: Callable[[], None]) -> Future[None]:
        """Call `close_session` on the thread that makes readers, after what it is doing."""
        self._is_open = False
        ended = self._executor.submit(close_session)
        self._executor.shutdown(wait=False)
        return ended

    def partitions(self) -> list[str]:
        """Of all readers, also of those that are being made."""
        return [self._partition(filter) for filter in self._tokens]

    def _partition(self, filter: Filter) -> str:
        return mapping.reader_partition(filter.source, filter.sink, self._authority)

    async def register(self, filter: Filter) -> None:
        """Returns when the peers know the reader of `filter`. Raises UStatusError."""
        try:
            await asyncio.shield(self._reader(filter))
        except UStatusError:
            self._tokens.pop(filter, None)
            raise

    async def register_all(self, filters: Iterable[Filter]) -> None:
        """As `register`, for a session that is closed if one of them fails."""
        await asyncio.gather(*(self._reader(filter) for filter in filters))

    async def release(self, filter: Filter) -> None:
        reader = self._tokens.pop(filter, None)
        if reader is not None:
            token = await asyncio.shield(reader)
            if self._is_open:  # else `close` removes it
                await asyncio.wrap_future(self._executor.submit(self._readers.leave, token, self._partition(filter)))

    def _reader(self, filter: Filter) -> asyncio.Task[int]:
        """Make the reader of `filter` unless it exists. Filters without wildcards that come while another reader is
        being made share the next one."""
        if filter not in self._tokens:
            partition = self._partition(filter)
            if mapping.is_pattern(partition):
                self._tokens[filter] = asyncio.ensure_future(self._make(_NewReader({partition: filter})))
            else:
                self._tokens[filter] = self._join(partition, filter)
        return self._tokens[filter]

    def _join(self, partition: str, filter: Filter) -> asyncio.Task[int]:
        new = self._next
        if not new.can_take(partition):
            new = self._next = _NewReader({})
        new.owners[partition] = filter
        new.octets += len(partition)
        if new.made is None:
            new.made = asyncio.ensure_future(self._make(new))
        return new.made

    async def _make(self, new: _NewReader) -> int:
        async with self._making:
            if self._next is new:
                self._next = _NewReader({})  # later filters are too late for this one
            if not self._is_open:
                raise UStatusError.from_status(NOT_OPEN)
            token, key = await asyncio.wrap_future(self._executor.submit(self._readers.add, new.owners))
        await self._await_peers(key)
        return token

    async def _await_peers(self, key: bytes) -> None:
        """Wait until every peer has announced that it found the reader `key`, SEEN_S at most."""
        changed = self._awaited[key] = asyncio.Event()
        missing = self._missing(key)
        try:
            async with asyncio.timeout(SEEN_S):
                while missing and self._is_open:
                    changed.clear()
                    await changed.wait()
                    missing = self._missing(key)
        except TimeoutError:
            self._silent |= missing
            log.warning(
                "DDS participants do not answer; a new listener may miss their next messages", participants=len(missing)
            )
        finally:
            del self._awaited[key]
            self._seen.pop(key, None)

    def _missing(self, key: bytes) -> frozenset[bytes]:
        return self.peers - self._seen.get(key, set()) - self._silent

    def note(self, peers: frozenset[bytes], seen: Seen) -> None:
        """Discovery has found something: see RollCall."""
        self._found_something.set()
        awaited = set() if peers == self.peers else set(self._awaited)
        self.peers = peers
        self._silent &= peers
        for peer, keys in seen:
            self._silent.discard(peer)
            awaited.update(keys)
            for key in keys:
                self._seen[key] = {*self._seen.get(key, ()), peer}
        self._wake(awaited)

    def _wake(self, keys: Iterable[bytes]) -> None:
        """Wake the registrations of these readers alone: a thousand may wait at once."""
        for key in keys:
            if key in self._awaited:
                self._awaited[key].set()
