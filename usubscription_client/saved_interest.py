"""The last known interest on disk: a streamer that starts while a uSubscription is away forwards as before.

change -> save (a while later, on a thread, atomically) -> FILE -> load at the next start

The file is written whole. So the more it has, the later it follows a change, and the loop works it out step by step.
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

from storage.disk import REAL_DISK, Disk, read_json
from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import Status, Subscription
from uprotocol.status import UStatusError
from usubscription_client.table import Topics

SAVE_DELAY_S: Final = 1.0  # changes come in bursts; what is lost with the power is asked again
ENTRIES_PER_S: Final = 1_000  # written in the mean while changes go on, some 100 KB: what a flash bears for years
STEP_ENTRIES: Final = 256  # in one step on the loop, a millisecond
# topic, subscriber, sample period in milliseconds as the wire has it
_ENTRIES: Final = TypeAdapter(list[tuple[str, str, Annotated[int, Field(ge=0, lt=1 << 32)] | None]])

log = structlog.get_logger()


class SavedInterest:
    """One file for one source. A file that can't be read or written is told and does no harm: the service is asked
    anyway."""

    def __init__(
        self,
        path: Path,
        known: Callable[[], Iterable[Subscription]],
        disk: Disk = REAL_DISK,
        delay_s: float = SAVE_DELAY_S,
    ) -> None:
        self._path, self._known, self._disk, self._delay_s = path, known, disk, delay_s
        self._entries = 0  # in the file
        self._due: asyncio.TimerHandle | None = None
        self._saving: asyncio.Task[None] | None = None

    def load(self) -> list[Subscription]:
        """What was known when the file was written; empty if there is none."""
        try:
            return [
                Subscription(uris.parse(topic), uris.parse(subscriber), Status.SUBSCRIBED, None, period_ms)
                for topic, subscriber, period_ms in read_json(self._path, _ENTRIES)
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, UStatusError) as error:
            what = "the remembered interest can't be read, and is asked anew"
            log.warning(what, path=str(self._path), why=str(error))
            return []

    def changed(self, _: Topics = None) -> None:
        """Save soon."""
        if self._due is None:
            delay_s = max(self._delay_s, self._entries / ENTRIES_PER_S)
            self._due = asyncio.get_running_loop().call_later(delay_s, self._start)

    def _start(self) -> None:
        self._due = None
        if self._saving is not None and not self._saving.done():
            self.changed()  # after the one that is under way
            return
        self._saving = asyncio.ensure_future(self.save())

    async def save(self) -> None:
        """Now. What changes meanwhile may be in it or not: another one is due then."""
        known, pieces, count = iter(self._known()), list[str](), 0
        while step := [_entry(one) for one in islice(known, STEP_ENTRIES)]:
            pieces.append(json.dumps(step)[1:-1])
            count += len(step)
            await asyncio.sleep(0)
        self._entries = count
        try:
            await asyncio.to_thread(self._disk.replace_text, self._path, f"[{', '.join(pieces)}]")
        except OSError as error:
            log.warning("the interest can't be remembered", path=str(self._path), why=str(error))

    async def close(self) -> None:
        """Save what is due."""
        due, self._due = self._due, None
        if due is not None:
            due.cancel()
        if self._saving is not None:
            await self._saving
        if due is not None:
            await self.save()


def _entry(one: Subscription) -> tuple[str, str, int | None]:
    return uris.format(one.topic), uris.format(one.subscriber), one.sample_period_ms
