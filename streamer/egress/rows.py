"""Names of the cursors that belong to endpoints, as they stand in a log's file. Made and taken apart here alone.

    egress:ENDPOINT               its pump has sent the records up to here (pump.py)
    followed:ENDPOINT             its follower has acknowledged the publishes up to here (following/handover.py)
    follower:ENDPOINT:SERVICE     who follows behind it; 1 once that service has acknowledged something
    parked:ENDPOINT:STREAM        the topic is undecided or paused: its later records wait (holds.py)
    owed:ENDPOINT:STREAM          the follower reads this topic from here (holds.py)
    held:ENDPOINT:KIND UNIT       the address is refused or unheard: its later records wait (holds.py)
    began:ENDPOINT                a new endpoint began here, while records waited for one not configured (claims.py)
    skipped:ENDPOINT:AFTER        all after AFTER up to here was skipped while the streamer was stopped (skipping.py)

Cursors of consumers are `history/service/consumers.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, TypeVar, cast, get_args

RowKind = Literal["egress", "followed", "follower", "parked", "owed", "held", "began", "skipped"]
KINDS: Final[frozenset[str]] = frozenset(get_args(RowKind))
WAITING: Final[frozenset[RowKind]] = frozenset(("egress", "followed", "parked", "owed", "held"))
"""Kinds behind which records may wait for an endpoint."""
HOLDER: Final = "egress"
"""Holder of the cursors of an endpoint that is owed every record."""

T = TypeVar("T")


class RowName(NamedTuple):
    """The parts of a cursor's name."""

    kind: RowKind
    endpoint: str
    unit: str | None = None  # a stream, a service, an address or a seq, by kind; None: this kind has none


def row(kind: RowKind, endpoint: str, unit: str | int | None = None) -> str:
    """Returns the name of a cursor."""
    return f"{kind}:{endpoint}" if unit is None else f"{kind}:{endpoint}:{unit}"


def parsed(name: str) -> RowName | None:
    """Returns the parts of a cursor's name; None if it is not a cursor of an endpoint."""
    kind, colon, rest = name.partition(":")
    if not colon or kind not in KINDS:
        return None
    endpoint, colon, unit = rest.partition(":")
    return RowName(cast("RowKind", kind), endpoint, unit if colon else None)


def endpoints_of(cursors: Mapping[str, T], kind: RowKind) -> dict[str, T]:
    """Returns what `cursors` has for the rows of one kind that have no unit, by endpoint."""
    prefix = f"{kind}:"
    return {name.removeprefix(prefix): value for name, value in cursors.items() if name.startswith(prefix)}


def units_of(cursors: Mapping[str, T], kind: RowKind, endpoint: str) -> dict[str, T]:
    """Returns what `cursors` has for the rows of one kind and endpoint, by unit."""
    prefix = f"{kind}:{endpoint}:"
    return {name.removeprefix(prefix): value for name, value in cursors.items() if name.startswith(prefix)}
