"""Carries what waits for an endpoint over to its new name (`renamed_from`).

cursors of both logs, positions of the histories that it follows, its pauses, what its transport remembers: OLD -> NEW
Nothing is carried if the new name has a cursor already: then that was done before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import structlog

from history.log.log import Log
from streamer.data_dir import transport_file
from streamer.egress.rows import parsed, row
from streamer.following.followed import COVERED

log = structlog.get_logger()


def rename(old: str, new: str, logs: Iterable[Log], folder: Path) -> bool:
    """Carries the backlog of endpoint `old`, which is not in use, over to `new`, which has not begun. Returns False if
    there is none, or if `new` has a backlog of its own."""
    logs = list(logs)
    if any(source.cursors.seq(row("egress", new)) is not None for source in logs):
        return False
    is_carried = False
    for source in logs:
        rows = {name: named for name in source.cursors.seqs() if (named := parsed(name)) is not None}
        names = {name: row(named.kind, new, named.unit) for name, named in rows.items() if named.endpoint == old}
        source.cursors.rename(names)
        is_carried = is_carried or bool(names)
        for key in source.followed.positions():
            if (to := _followed_at(key, old, new)) is not None:
                source.followed.rename(key, to)
    with contextlib.suppress(FileNotFoundError):
        os.replace(folder / transport_file(old), folder / transport_file(new))
    if is_carried:
        log.info("the backlog of an endpoint was carried over to its new name", old=old, new=new)
    return is_carried


def _followed_at(key: str, old: str, new: str) -> str | None:
    """Returns the key of a followed history at the endpoint's new name; None if it is of another endpoint."""
    prefix = COVERED if key.startswith(COVERED) else ""
    endpoint, colon, service = key.removeprefix(prefix).partition(":")
    return f"{prefix}{new}:{service}" if colon and endpoint == old else None
