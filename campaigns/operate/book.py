"""The ledger of chaos for a load that goes on: it is judged up to a moment, once for each step.

turn(until): what was sent up to then -> lost, doubled, reordered ... since the last turn; forgotten at the next one
A request counts in the turn in which it was asked, too, not in the one in which its caller gives up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from campaigns.chaos.ledger import EXAMPLES_MAX, Entry, Ledger


@dataclass
class Turn:
    """The counts of one step."""

    owed: int = 0
    delivered: int = 0
    lost: int = 0
    doubled: int = 0
    reordered: int = 0
    wrong: int = 0
    excluded: int = 0
    answered: int = 0  # requests
    failed: int = 0  # answered with an error
    unanswered: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Request:
    """One request of a raw client."""

    name: str
    asked_at: float
    is_over: bool = False  # it is answered, or its caller has given up
    code: int | None = None  # UCode of the answer; None: no answer has come

    def over(self, code: int | None) -> None:
        self.code = code
        self.is_over = True

    def __str__(self) -> str:
        return f"{self.name}, asked {self.asked_at:.2f}"


class Book(Ledger):
    def __init__(self) -> None:
        super().__init__()
        self._judged: set[bytes] = set()  # by the last turn: a copy may still come
        self._forgotten_ms = 0  # ids up to this time may be forgotten
        self._late_copies = 0  # of forgotten messages
        self._wrong_seen = 0
        self._requests: list[Request] = []  # not judged yet

    def asked(self, name: str) -> Request:
        """A request leaves its client now, which calls its `over`."""
        with self._lock:
            self._requests.append(request := Request(name, self.now()))
        return request

    def asking(self, until: float) -> int:
        """Requests that were asked up to `until` and are not over."""
        with self._lock:
            return sum(not request.is_over for request in self._requests if request.asked_at <= until)

    def arrived(self, channel: str, id: bytes, flow: str, payload: bytes) -> None:
        """A history is read again from its beginning when it was restored: what it shows then counts once."""
        with self._lock:
            entry = self._entries.get(id)
            is_old = entry is None and int.from_bytes(id[:6], "big") <= self._forgotten_ms
            if is_old and channel == "push":
                self._late_copies += 1
                self.example("doubled", f"{id.hex()} of {flow}, of an earlier step")
        if not is_old and not (channel == "poll" and entry is not None and entry.arrived_at):
            super().arrived(channel, id, flow, payload)

    def waiting(self, until: float) -> list[Entry]:
        """Owed messages that were sent up to `until` and have not arrived."""
        return [entry for entry in self.missing() if entry.sent_at <= until]

    def excuse(self, since: float, flows: Callable[[str], bool] = lambda _: True) -> None:
        """Messages that were sent since then and have not arrived do not count: what is done to them loses them, and
        that is reported."""
        with self._lock:
            for entry in self._entries.values():
                if entry.sent_at >= since and not entry.arrived_at and flows(entry.flow):
                    entry.excluded = True

    def turn(self, until: float) -> Turn:
        """Judge what was sent up to `until`. A request that is not over is not answered."""
        lost, found = self.waiting(until), Turn()
        with self._lock:
            self._judge_requests(until, found)
            due = [entry for entry in self._entries.values() if entry.sent_at <= until and entry.id not in self._judged]
            found.owed = sum(bool(e.acked_at or e.shown_at) and not e.excluded for e in due)
            found.delivered = sum(bool(e.arrived_at) for e in due)
            found.excluded = sum(e.excluded and not e.arrived_at for e in due)
            found.lost, found.reordered = len(lost), len(self._reordered)
            found.doubled = len(self._copies) + self._late_copies
            found.wrong = self._wrong - self._wrong_seen
            found.examples += [f"lost: {one}" for one in lost[:EXAMPLES_MAX]]
            found.examples += [
                f"doubled: {one}, heard at {first:.2f} and at {again:.2f}"
                for one, first, again in self._copies[:EXAMPLES_MAX]
            ]
            found.examples += [text for shown in self._examples.values() for text in shown]
            for id in self._judged:
                del self._entries[id]
                self._forgotten_ms = max(self._forgotten_ms, int.from_bytes(id[:6], "big"))
            self._judged = {entry.id for entry in due}
            for entry in due:
                entry.excluded = True
            self._copies.clear()
            self._reordered.clear()
            self._examples.clear()
            self._late_copies, self._wrong_seen = 0, self._wrong
        return found

    def _judge_requests(self, until: float, found: Turn) -> None:
        due = [request for request in self._requests if request.asked_at <= until]
        self._requests = [request for request in self._requests if request.asked_at > until]
        failed = [request for request in due if request.code]
        unanswered = [request for request in due if request.code is None]
        found.answered = len(due) - len(failed) - len(unanswered)
        found.failed, found.unanswered = len(failed), len(unanswered)
        found.examples += [f"failed with code {request.code}: {request}" for request in failed[:EXAMPLES_MAX]]
        found.examples += [f"not answered: {request}" for request in unanswered[:EXAMPLES_MAX]]
