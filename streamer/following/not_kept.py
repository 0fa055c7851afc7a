"""What is followed of a history that does not keep it: said until it is kept there, or not followed any more.

not_kept of its answers (kept.py), for CONFIRMED_MS -> NotKept: a line in the log, notes, metric
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import structlog

from uprotocol import uri as uris
from uprotocol.uuid import moment
from uprotocol.v1.uri_pb2 import UUri

CONFIRMED_MS: Final = 5_000  # a new subscription reaches both gateways within that time, one before the other
SHOWN_MAX: Final = 3  # topics that are named
HISTORIES_SHOWN_MAX: Final = 20  # in the notes; the metric counts all

log = structlog.get_logger()


class NotKept:
    """What one history has said that it does not keep. `topics`: for CONFIRMED_MS, so that it is known to be so."""

    def __init__(self, service: UUri, now_ms: Callable[[], int]) -> None:
        self._service, self._now_ms = service, now_ms
        self._since_ms: dict[uris.Key, tuple[UUri, int]] = {}
        self.topics: list[UUri] = []

    def answered(self, topics: Sequence[UUri]) -> None:
        """Of what is followed, the history keeps all but `topics`."""
        now_ms = self._now_ms()
        keyed = sorted(((uris.key(one), one) for one in topics), key=lambda one: one[0])  # the same text each time
        self._since_ms = {key: self._since_ms.get(key, (one, now_ms)) for key, one in keyed}
        before = set(map(uris.key, self.topics))
        self.topics = [one for one, since_ms in self._since_ms.values() if now_ms - since_ms >= CONFIRMED_MS]
        service = uris.format(self._service)
        if new := [one for one in self.topics if uris.key(one) not in before]:
            what = "topics that are followed are not kept there: none of their messages comes"
            log.warning(what, service=service, topics=_listed(new), remedy=self._remedy(new))
        elif before and not self.topics:
            log.info("all topics that are followed are kept there", service=service)

    def notes(self) -> Iterator[str]:
        if self.topics:
            since = moment(min(self._since_ms[uris.key(one)][1] for one in self.topics))
            what = f"{uris.format(self._service)} does not keep {_listed(self.topics)} (since {since})"
            yield f"{what}, which is followed here: no message of it comes: {self._remedy(self.topics)}"

    def _remedy(self, topics: Sequence[UUri]) -> str:
        where = f"`record` of [history] of {self._service.authority_name}"
        return f"add {_listed(topics)} to {where}, or subscribe to it there"


def _listed(topics: Sequence[UUri]) -> str:
    more = f" and {len(topics) - SHOWN_MAX} more" if len(topics) > SHOWN_MAX else ""
    return ", ".join(map(uris.format, topics[:SHOWN_MAX])) + more
