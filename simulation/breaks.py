"""Faults that were found and mended, each as a small patch that puts it back in: the proof that the simulation would
find it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Break:
    what: str
    # of what, which attribute, by what; imported only when it is asked for
    patches: Callable[[], list[tuple[Any, str, Any]]]
    needs: str = ""  # the name in plan.py of what must happen

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        patches = self.patches()
        before = [(target, name, getattr(target, name)) for target, name, _ in patches]
        for target, name, value in patches:
            setattr(target, name, value)
        try:
            yield
        finally:
            for target, name, value in before:
                setattr(target, name, value)


Patches = list[tuple[Any, str, Any]]


def _restart_that_records() -> Patches:
    from usubscription_client.table import InterestSource

    # so what is known counts from the newest seq, whenever it came to be known
    return [(InterestSource, "decided", lambda self, topic: True)]


def _renamed_endpoint() -> Patches:
    from streamer.claims import Claims
    from streamer.egress import CURSOR_PREFIX

    def load(self: Claims) -> None:
        known = {pump.name for pump in self._pumps}
        for one in self._logs:
            for name in list(one.cursor_rows()):
                if name.startswith(CURSOR_PREFIX) and name not in known:
                    one.drop_cursor(name)

    return [(Claims, "load", load)]


def _retention_by_age() -> Patches:
    from history.chunk import NOBODY
    from history.log import Log

    def keep_after(self: Log) -> int:
        now, rows = self._now_ms(), self.cursor_rows().values()
        leased = (row.seq for row in rows if row.lease_until_ms is not None and row.lease_until_ms >= now)
        return min(leased, default=NOBODY)

    return [(Log, "keep_after", keep_after), (Log, "owed_after", lambda self: NOBODY)]


def _passing_shortage() -> Patches:
    from uprotocol.status import RETRYABLE
    from uprotocol.v1.ucode_pb2 import UCode
    from usubscription import remote

    return [(remote, "FINAL", frozenset(code for code in UCode.values() if code not in RETRYABLE))]


def _silent_service() -> Patches:
    from streamer.egress import Pump

    plan = Pump._plan

    def passed_over(self: Pump, stream_id: int) -> Any:
        return plan(self, stream_id)._replace(park=False)

    return [(Pump, "_plan", passed_over)]


def _order_of_commands() -> Patches:
    from usubscription.requests import CommandEntry

    take = CommandEntry.on_receive_batch

    def by_method(self: CommandEntry, messages: Any) -> None:
        for method in (1, 2):
            take(self, [message for message in messages if message.attributes.sink.resource_id == method])

    return [(CommandEntry, "on_receive_batch", by_method)]


def _held_back() -> Patches:
    from streamer.parked import Parking

    def hold(self: Parking, stream: int, after: int) -> None:
        self.park(stream, self._log.newest_seq, ())

    return [(Parking, "hold", hold)]


BREAKS: Final[dict[str, Break]] = {
    "restart that records": Break(
        "what came while a gateway that records was away counts as from before the subscriptions", _restart_that_records
    ),
    "renamed endpoint": Break("the cursor of an endpoint that is not configured is dropped", _renamed_endpoint),
    "retention by age": Break("age takes what an endpoint has not had, and nobody is told", _retention_by_age),
    "passing shortage": Break(
        "any answer of a remote service but UNAVAILABLE and DEADLINE_EXCEEDED ends a subscription",
        _passing_shortage,
        "shortage",
    ),
    "silent service": Break("a topic is passed over while a foreign service is silent about it", _silent_service),
    "order of commands": Break(
        "each method is its own queue, so an Unsubscribe overtakes the Subscribe behind it", _order_of_commands, "hurry"
    ),
    "held back at a pause": Break(
        "what was read ahead of a peer is forgotten when its topic is paused", _held_back, "pause"
    ),
}
