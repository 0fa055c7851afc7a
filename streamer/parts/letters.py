"""Dead letters, as a part: stored, reported; operators list, resend and purge them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import structlog

from streamer.assembly import Assembly
from streamer.letters.dead_letter import REMOVED_MAX, LetterStore, Stored
from streamer.letters.selection import LetterFilter
from streamer.operating.resending import ONCE_MAX, Resender
from streamer.operation import Arguments, Operation
from streamer.part import Part, Parts
from streamer.reporting import Reporter
from uprotocol.pacing import Pace

LETTERS_LISTED_MAX: Final = 1_000  # in one answer
LISTED_BYTES_MAX: Final = 8 << 20  # of the messages that are read for it

SELECTING: Final = ("numbers", "code", "endpoint", "since_ms", "before_ms", "after", "until")
CHANGING: Final = (*SELECTING, "all", "dry_run")

log = structlog.get_logger()


class LetterPart(Part):
    name = "dead letters"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self._letters = assembly.dead_letters
        walk = assembly.view, assembly.paused, assembly.hosted, assembly.ingresses
        self._resender = Resender(self._letters, *walk, self._pace_of, self._renamed)

    async def run(self) -> None:
        await self._letters.run()

    async def close(self) -> None:
        await self._letters.close()

    def reporters(self) -> tuple[Reporter]:
        return (self._letters,)

    def operations(self) -> Mapping[str, Operation]:
        return {
            "dead_letters": Operation(self._list, (*SELECTING, "before", "limit")),
            "purge_letters": Operation(self._purge, CHANGING, is_change=True),
            "resend_letters": Operation(self._resend, (*CHANGING, "to", "limit"), is_change=True),
        }

    async def _list(self, given: Arguments) -> dict[str, Any]:
        """The newest first; `next`: the `before` that gives the next ones, None at the end."""
        which, limit = LetterFilter.of(given, is_change=False), given.number("limit", 100)
        if "before" in given:
            which = replace(which, until=given.number("before") - 1)
        found, left = await self._letters.ask(lambda store: _page(store, which, max(1, min(limit, LETTERS_LISTED_MAX))))
        following, stored = found[-1].number if left else None, self._letters.stock.letters
        return {"dead_letters": [one.as_dict() for one in found], "next": following, "stored": stored}

    async def _resend(self, given: Arguments) -> dict[str, Any]:
        which = LetterFilter.of(given)
        limit, to = given.number("limit", ONCE_MAX), given.text("to", "")
        return await self._resender.resend(which, to=to, count_max=limit, is_trial=given.flag("dry_run"))

    def _pace_of(self, endpoint: str) -> Pace | None:
        attached = self.assembly.attached.get(endpoint)
        return None if attached is None else attached.pumps[0].sender.pace

    def _renamed(self) -> dict[str, str]:
        return {
            section.renamed_from: section.name
            for section in self.assembly.config.endpoint
            if section.renamed_from is not None
        }

    async def _purge(self, given: Arguments) -> dict[str, Any]:
        which = LetterFilter.of(given)
        if given.flag("dry_run"):
            return {"purged": 0, "would_purge": await self._letters.ask(lambda store: store.count(which))}
        which = await self._letters.ask(partial(LetterStore.those_until_now, which=which))
        purged, count = 0, REMOVED_MAX
        while count == REMOVED_MAX:
            count = await self._letters.ask(lambda store: store.remove(which))
            self._letters.purged += count
            purged += count
        log.info("dead letters were purged", letters=purged)
        return {"purged": purged}


def _page(store: LetterStore, which: LetterFilter, count_max: int) -> tuple[list[Stored], int]:
    """Returns the newest of these letters, and how many older ones there are."""
    found = store.select(which, count_max, LISTED_BYTES_MAX, newest_first=True)
    return found, store.count(replace(which, until=found[-1].number - 1)) if found else 0
