"""Places: the clients that hold a connection for longer than an answer takes, and what the edge refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import structlog

from streamer.reporting import Reporter, Sample, each

CLIENT_KINDS: Final = ("stream", "poll", "held_stream", "held_response")  # of clients

log = structlog.get_logger()


class Places(Reporter):
    """There are `clients_max`, for all kinds of clients together. `refused` counts, by reason, what was turned away or
    cut off, `events` what was written to clients."""

    def __init__(self, clients_max: int, each_max: int | None = None) -> None:
        """`each_max`: of one uEntity, which a token stands for; None: there are no tokens."""
        self._clients_max, self._each_max = clients_max, each_max
        self._of_each = Counter[str]()
        self._taken: dict[asyncio.Task[object], Callable[[], bool]] = {}  # is it still allowed?
        self.count = Counter[str](dict.fromkeys(CLIENT_KINDS, 0))
        self.refused = Counter[str]()
        self.events = Counter[str]()  # by kind of client

    def __len__(self) -> int:
        """Returns how many are taken."""
        return sum(self.count.values())

    @property
    def are_full(self) -> bool:
        """One more has to come back later: whoever asks says so."""
        return len(self) >= self._clients_max

    def are_full_for(self, client: str) -> bool:
        """One more of this uEntity has to come back later."""
        return self.are_full or (self._each_max is not None and self._of_each[client] >= self._each_max)

    def turned_away(self, reason: str, why: str) -> None:
        """A client was told to come back later."""
        self.refused[reason] += 1
        log.warning("clients of the HTTP edge are told to come back later", why=why)

    @contextlib.contextmanager
    def taken(self, kind: str, is_allowed: Callable[[], bool] = lambda: True, client: str = "") -> Iterator[None]:
        """The current task serves a client of this kind; `client`: its uEntity, if it has one. It is cancelled when
        the edge stops, and when `is_allowed` returns False after the tokens have changed (Callers.still_allowed)."""
        task = asyncio.current_task()
        assert task is not None
        self._taken[task] = is_allowed
        self.count[kind] += 1
        self._of_each[client] += 1
        try:
            yield
        finally:
            self.count[kind] -= 1
            self._of_each[client] -= 1
            if not self._of_each[client]:
                del self._of_each[client]
            self._taken.pop(task, None)

    def end(self) -> None:
        for task in list(self._taken):
            task.cancel()

    def look(self) -> None:
        """Ends those that are not allowed any more."""
        for task, is_allowed in list(self._taken.items()):
            if not is_allowed():
                self.refused["token"] += 1
                task.cancel()

    def samples(self) -> Iterator[Sample]:
        yield from each("edge_clients", (), self.count)
        yield from each("edge_refused", (), self.refused)
        yield from each("edge_events", (), self.events)
