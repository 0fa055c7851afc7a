"""The last known interest on disk: a streamer that starts while a uSubscription is away forwards as before.

change -> save (delayed, on a thread) -> FILE -> load at the next start

The file is always written as a whole. So a larger file is written less often, and its text is made in steps.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import structlog
from pydantic import Field, TypeAdapter

from storage.disk import REAL_DISK, Disk
from storage.saved import SavedFile
from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import Status, Subscription
from uprotocol.status import UStatusError
from usubscription_client.table import Topics

SAVE_DELAY_S: Final = 1.0  # changes come in bursts; after a power failure the service is asked again
ENTRIES_PER_S: Final = 1_000  # average writing rate, some 100 KB/s: a flash endures it for years
STEP_ENTRIES: Final = 256  # in one turn of the event loop, a millisecond
FILE_BYTES_MAX: Final = 1 << 30  # 5 million entries of 200 bytes
# topic, subscriber, sample period in milliseconds (32 bits)
_ENTRIES: Final = TypeAdapter(list[tuple[str, str, Annotated[int, Field(ge=0, lt=1 << 32)] | None]])

log = structlog.get_logger()


class SavedInterest:
    """One file for one source. If it can't be read or written, that is logged: the service is asked anyway."""

    def __init__(
        self,
        path: Path,
        known: Callable[[], Iterable[Subscription]],
        disk: Disk = REAL_DISK,
        delay_s: float = SAVE_DELAY_S,
    ) -> None:
        """`known()` returns the subscriptions to save."""
        self._file = SavedFile(path, _ENTRIES, FILE_BYTES_MAX, disk)
        self._known, self._delay_s = known, delay_s
        self._entries = 0  # in the file
        self._due: asyncio.TimerHandle | None = None
        self._saving: asyncio.Task[None] | None = None

    def load(self) -> list[Subscription]:
        """Returns the subscriptions in the file; none if there is no file, or it can't be read."""
        try:
            return [
                Subscription(uris.parse(topic), uris.parse(subscriber), Status.SUBSCRIBED, None, period_ms)
                for topic, subscriber, period_ms in self._file.load() or ()
            ]
        except UStatusError as error:
            log.warning("the saved interest can't be used: the service is asked", why=error.message)
            return []

    def changed(self, _: Topics = None) -> None:
        """Save soon."""
        if self._due is None:
            delay_s = max(self._delay_s, self._entries / ENTRIES_PER_S)
            self._due = asyncio.get_running_loop().call_later(delay_s, self._start)

    def _start(self) -> None:
        self._due = None
        if self._saving is not None and not self._saving.done():
            self.changed()  # again after the running one
            return
        self._saving = asyncio.ensure_future(self.save())

    async def save(self) -> None:
        """Save now. Changes during the save may be missing: they cause another save."""
        known, pieces, count = iter(self._known()), list[str](), 0
        while step := [_entry(one) for one in islice(known, STEP_ENTRIES)]:
            pieces.append(json.dumps(step)[1:-1])
            count += len(step)
            await asyncio.sleep(0)
        self._entries = count
        try:
            await asyncio.to_thread(self._file.write, f"[{', '.join(pieces)}]")
        except UStatusError as error:
            log.warning("the interest can't be saved", why=error.message)

    async def close(self) -> None:
        """Save unsaved changes."""
        due, self._due = self._due, None
        if due is not None:
            due.cancel()
        if self._saving is not None:
            await self._saving
        if due is not None:
            await self.save()


def _entry(one: Subscription) -> tuple[str, str, int | None]:
    return uris.format(one.topic), uris.format(one.subscriber), one.sample_period_ms
