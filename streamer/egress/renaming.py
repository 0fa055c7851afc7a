"""Carries what waits for an endpoint over to its new name (`renamed_from`).

cursors of both logs, positions of the histories that it follows, its pauses, what its transport remembers: OLD -> NEW
Nothing is carried if the new name has a cursor already: then that was done before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import structlog

from history.log.log import Log
from streamer.egress.claims import endpoint_of
from streamer.egress.holds import CURSOR_PREFIX
from streamer.following.followed import COVERED

TRANSPORT_FILE: Final = "endpoint-{}.json"  # in a data_dir: see UTransport.remember_in

log = structlog.get_logger()


def rename(old: str, new: str, logs: Iterable[Log], folder: Path) -> bool:
    """Carries the backlog of endpoint `old`, which is not in use, over to `new`, which has not begun. Returns False if
    there is none, or if `new` has a backlog of its own."""
    logs = list(logs)
    if any(one.cursors.seq(CURSOR_PREFIX + new) is not None for one in logs):
        return False
    found = False
    for one in logs:
        names = {name: _renamed(name, old, new) for name in one.cursors.seqs() if endpoint_of(name) == old}
        one.cursors.rename(names)
        found = found or bool(names)
        for key in one.followed.positions():
            if (to := _followed_at(key, old, new)) is not None:
                one.followed.rename(key, to)
    with contextlib.suppress(FileNotFoundError):
        os.replace(folder / TRANSPORT_FILE.format(old), folder / TRANSPORT_FILE.format(new))
    if found:
        log.info("the backlog of an endpoint was carried over to its new name", old=old, new=new)
    return found


def _renamed(name: str, old: str, new: str) -> str:
    """Returns the name of a cursor: PREFIX:ENDPOINT or PREFIX:ENDPOINT:..."""
    prefix, _, rest = name.partition(":")
    assert rest == old or rest.startswith(f"{old}:"), "it is a cursor of this endpoint"
    return f"{prefix}:{new}{rest.removeprefix(old)}"


def _followed_at(key: str, old: str, new: str) -> str | None:
    """Returns the key of a followed history at the endpoint's new name; None if it is of another endpoint."""
    prefix = COVERED if key.startswith(COVERED) else ""
    endpoint, colon, service = key.removeprefix(prefix).partition(":")
    return f"{prefix}{new}:{service}" if colon and endpoint == old else None
