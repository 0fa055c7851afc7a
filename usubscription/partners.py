"""The services that may hold copies of our subscriptions, in a file of its own beside the store: it outlives a Reset
and the store's loss.

first command to a service -> remember -> FILE -> the command leaves          an audit says that it has nothing of ours -> forget
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Final

import structlog

from storage.disk import REAL_DISK, Disk

# services, each of a version: twice the largest fleet measured, 1 MB; then the oldest are forgotten
PARTNERS_MAX: Final = 20_000

Partner = tuple[str, int]
"""Authority, and the major version in which we subscribed there."""

log = structlog.get_logger()


class Partners:
    """Lives on the loop; the disk is written on a thread, once for all that came meanwhile."""

    def __init__(self, path: Path, disk: Disk = REAL_DISK) -> None:
        self.path, self._disk = path, disk
        self._known: dict[Partner, int] = {}  # and with which change it came
        self._changes = self._saved = 0
        self._saving: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Partners({len(self._known)})"

    def __contains__(self, partner: Partner) -> bool:
        return partner in self._known

    def all(self) -> list[Partner]:
        return list(self._known)

    async def load(self) -> None:
        """A file that can't be read is told and replaced: the links in the store name those that count most."""
        try:
            text = await asyncio.to_thread(self.path.read_text)
            self._known = {(str(authority), int(major)): 0 for authority, major in json.loads(text)}
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, RecursionError) as error:
            log.warning(
                "the file of services that may have subscriptions of ours can't be read",
                path=str(self.path),
                why=str(error),
            )

    async def remember(self, partner: Partner) -> None:
        """Completes when it is on disk, or can't be: that is told, and holds no command."""
        mine = self._known.get(partner)
        if mine is None:
            self._changes += 1
            mine = self._known[partner] = self._changes
            if len(self._known) > PARTNERS_MAX:
                del self._known[next(iter(self._known))]
        while self._saved < mine:
            await asyncio.shield(self._save())

    def forget(self, partner: Partner) -> None:
        """On disk with the next save: until then it is asked once more after a restart."""
        if self._known.pop(partner, None) is not None:
            self._changes += 1

    async def close(self) -> None:
        while self._saved < self._changes:
            await self._save()

    def _save(self) -> asyncio.Task[None]:
        if self._saving is None:
            self._saving = asyncio.ensure_future(self._write())
        return self._saving

    async def _write(self) -> None:
        changes = self._changes
        try:
            await asyncio.to_thread(self._disk.replace_text, self.path, json.dumps(list(self._known)))
        except OSError as error:
            log.warning(
                "the services that may have subscriptions of ours can't be noted", path=str(self.path), why=str(error)
            )
        finally:
            self._saved, self._saving = changes, None
