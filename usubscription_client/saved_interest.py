"""The last known interest on disk: a streamer that starts while a uSubscription is away forwards as before.

change -> save (a second later, on a thread, atomically) -> FILE -> load at the next start
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
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
            self._due = asyncio.get_running_loop().call_later(self._delay_s, self._start)

    def _start(self) -> None:
        self._due = None
        self._saving = asyncio.ensure_future(self.save())

    async def save(self) -> None:
        entries = [(uris.format(one.topic), uris.format(one.subscriber), one.sample_period_ms) for one in self._known()]
        try:
            await asyncio.to_thread(self._disk.replace_text, self._path, json.dumps(entries))
        except OSError as error:
            log.warning("the interest can't be remembered", path=str(self._path), why=str(error))

    async def close(self) -> None:
        """Save what is due."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
            await self.save()
        if self._saving is not None:
            await self._saving
