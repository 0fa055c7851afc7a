"""What operators do with dead letters: list, resend and purge them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import structlog

from streamer.letters.dead_letter import REMOVED_MAX, DeadLetters, LetterStore, Stored
from streamer.letters.selection import LetterFilter
from streamer.operating.resending import ONCE_MAX, Resender
from streamer.operation import Arguments, Operation

LETTERS_LISTED_MAX: Final = 1_000  # in one answer
LISTED_BYTES_MAX: Final = 8 << 20  # of the messages that are read for it

SELECTING: Final = ("numbers", "code", "endpoint", "since_ms", "before_ms", "after", "until")
CHANGING: Final = (*SELECTING, "all", "dry_run")

log = structlog.get_logger()


def letter_operations(letters: DeadLetters, resender: Resender) -> dict[str, Operation]:
    """Returns dead_letters, resend_letters and purge_letters."""

    async def listed(given: Arguments) -> dict[str, Any]:
        """The newest first; `next`: the `before` that gives the next ones, None at the end."""
        which, limit = LetterFilter.of(given, is_change=False), given.number("limit", 100)
        if "before" in given:
            which = replace(which, until=given.number("before") - 1)
        found, left = await letters.ask(lambda store: _page(store, which, max(1, min(limit, LETTERS_LISTED_MAX))))
        following = found[-1].number if left else None
        return {"dead_letters": [one.as_dict() for one in found], "next": following, "stored": letters.stock.letters}

    async def resend(given: Arguments) -> dict[str, Any]:
        which = LetterFilter.of(given)
        limit, to = given.number("limit", ONCE_MAX), given.text("to", "")
        return await resender.resend(which, to=to, count_max=limit, is_trial=given.flag("dry_run"))

    async def purge(given: Arguments) -> dict[str, Any]:
        which = LetterFilter.of(given)
        if given.flag("dry_run"):
            return {"purged": 0, "would_purge": await letters.ask(lambda store: store.count(which))}
        which = await letters.ask(partial(LetterStore.those_until_now, which=which))
        purged, count = 0, REMOVED_MAX
        while count == REMOVED_MAX:
            count = await letters.ask(lambda store: store.remove(which))
            letters.purged += count
            purged += count
        log.info("dead letters were purged", letters=purged)
        return {"purged": purged}

    return {
        "dead_letters": Operation(listed, (*SELECTING, "before", "limit")),
        "purge_letters": Operation(purge, CHANGING, is_change=True),
        "resend_letters": Operation(resend, (*CHANGING, "to", "limit"), is_change=True),
    }


def _page(store: LetterStore, which: LetterFilter, count_max: int) -> tuple[list[Stored], int]:
    """Returns the newest of these letters, and how many older ones there are."""
    found = store.select(which, count_max, LISTED_BYTES_MAX, newest_first=True)
    return found, store.count(replace(which, until=found[-1].number - 1)) if found else 0
