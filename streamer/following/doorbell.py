"""Plain messages that a followed history also has: each is a doorbell, and a copy that we drop once we follow.

message -> on_doorbell: ask the history now -> made after we had a position: a copy, dropped
                        '-- no answer for SILENT_S, or refused: it is not trusted, and plain messages are stored
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

import structlog

from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.pacing import Backoff

# if doorbells have no answer for so long, plain messages are stored until the history answers
SILENT_S: Final = 60.0
ASK_AGAIN_S: Final = 0.25  # after a doorbell without an answer the history is asked again

log = structlog.get_logger()


class Doorbell:
    """The doorbell of one history. It is used on the event loop only."""

    def __init__(self, history: str, ask: Callable[[], None], backoff: Backoff, counts: Counter[str]) -> None:
        """`ask()` asks the history now, if there is a conversation; `backoff` is the wait between two conversations."""
        self._history, self._ask, self._backoff, self._counts = history, ask, backoff, counts
        self.copies_since: bytes | None = None  # plain messages with later ids are copies; None: unknown yet
        self.denied: set[uris.Key] = set()  # topics that we may not read there: their plain messages are stored
        self.has_kept_copies = False  # plain messages were kept since this was last reset
        self._unanswered_since: float | None = None  # loop time of the first doorbell since the last answer
        self._is_trusted = True

    def __repr__(self) -> str:
        return f"Doorbell({self._history}, is_trusted={self._is_trusted})"

    def on_doorbell(self, message: EncodedMessage) -> bool:
        """Ask the history for the record of this plain message. Returns True for a copy, which is dropped."""
        self._counts["doorbells"] += 1
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._unanswered_since is None:
            self._unanswered_since = now
            self._backoff.wake()
            loop.call_later(ASK_AGAIN_S, self._ask_again_if_silent, now)
        elif now - self._unanswered_since > SILENT_S:
            self.stop_trusting_history()
        if self._is_trusted and self._is_copy(message):
            return True
        self.has_kept_copies = True
        return False

    def _is_copy(self, message: EncodedMessage) -> bool:
        if self.copies_since is None or message.id_bytes <= self.copies_since:
            return False
        return not self.denied or uris.key(message.stamp.attributes.source) not in self.denied

    def stop_trusting_history(self) -> None:
        """Store plain messages until the history answers."""
        if self._is_trusted:
            self._is_trusted = False
            what = "a history that is followed does not answer: until it does, plain copies count again"
            log.warning(what, service=self._history)

    def _ask_again_if_silent(self, since: float) -> None:
        """Ask again if no answer came, since the current call may never return."""
        if self._unanswered_since == since:
            self._ask()

    def answered(self) -> None:
        self._unanswered_since, self._is_trusted = None, True
        self._backoff.reset()
