"""What `run` would find in the data_dir. Asks the parts that open these files, and writes nothing.

restore that waits, locks, log, mark, epochs, subscriptions, dead letters, pauses -> StoredFinding: a start fails, or
                                                                                     works in part, until a person acts
damage that a start repairs, saved states, reserve ---------------------------------> StoredFinding: a note
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from history.epochs.groups import Buckets, Progress
from history.file.rows import LOG as LOG_KIND
from history.service import keeper
from storage.disk import REAL_DISK, BadMarkError, FileKind, InUseError, read_mark
from storage.faults import DamagedError
from streamer import building
from streamer.config import Config
from streamer.data_dir import (
    LETTERS_FILE,
    LOG_FILE,
    PARTNERS_FILE,
    PAUSES_FILE,
    RESERVE_FILE,
    SUBSCRIPTIONS_FILE,
    interest_file,
)
from streamer.letters.dead_letter import LETTERS as LETTERS_KIND
from streamer.operating.backup import folder_after_restore
from streamer.walk import paused as pauses
from uprotocol.core.ustreamer import ids
from uprotocol.status import UStatusError
from usubscription.audit import Partners
from usubscription.store import tables
from usubscription_client.sources import SavedInterest

REPAIRED: Final = "a start saves what can be read, moves the file aside, and reports the loss"


class StoredFinding(NamedTuple):
    """`is_fatal`: a start does not get over it, a person has to act."""

    what: str
    is_fatal: bool = True


def findings_of_stores(config: Config) -> Iterator[StoredFinding]:
    """Yields what a start would stumble over in the data_dir."""
    folder = config.streamer.data_dir
    if not folder.is_dir():  # created by the first start
        return
    user = _user(folder / LOG_FILE)
    if user is not None:
        yield StoredFinding(f"a streamer with this data_dir runs as process {user}", is_fatal=False)
    restored = None
    try:
        restored = folder_after_restore(folder)
    except UStatusError as error:
        yield StoredFinding(error.message)
    if restored is not None:
        yield StoredFinding(f"a restore waits in {restored}: the next start completes it", is_fatal=False)

    def path_of(name: str) -> Path:
        """Returns where the file is now that the start will open."""
        return restored / name if restored is not None and (restored / name).exists() else folder / name

    yield from _log(config, path_of(LOG_FILE), user)
    yield from _store(LETTERS_KIND, path_of(LETTERS_FILE), user)
    if config.usubscription_of(config.home) == "embedded":
        yield from _subscriptions(config, path_of(SUBSCRIPTIONS_FILE), user)
    yield from _states(config, path_of)


def _user(path: Path) -> str | None:
    """Returns the id of the process that has the file; None: no process."""
    try:
        REAL_DISK.require_not_in_use(Path(f"{path}.lock"))
    except InUseError as process:
        return str(process)
    except OSError:
        return None
    return None


def _lock(kind: FileKind, path: Path, user: str | None) -> Iterator[StoredFinding]:
    """Yields why the file can't be locked. `user`: the process of the streamer that runs, which has all files."""
    lock = Path(f"{path}.lock")
    process = _user(path)
    if process not in (None, user):
        yield StoredFinding(kind.in_use(path, InUseError(process)).message)
    elif lock.is_symlink() or (lock.exists() and not lock.is_file()):
        yield StoredFinding(f"the {kind.what} {path} can't be locked: {lock} is no file")


def _store(kind: FileKind, path: Path, user: str | None) -> Iterator[StoredFinding]:
    """Yields why a store can't be opened; a note if a start repairs it. `user`: has looked for damage already."""
    yield from _lock(kind, path, user)
    try:
        kind.require_usable(path, whole=user is None)
    except UStatusError as error:
        yield StoredFinding(error.message)
    except DamagedError as error:
        yield StoredFinding(f"the {kind.what} {path} is damaged ({error}): {REPAIRED}", is_fatal=False)


def _log(config: Config, path: Path, user: str | None) -> Iterator[StoredFinding]:
    yield from _store(LOG_KIND, path, user)
    mark = Path(f"{path}.mark")
    if mark.is_symlink() or (mark.exists() and not mark.is_file()):
        yield StoredFinding(f"the log {path} can't be opened: {mark} is no file")
    else:
        yield from _mark(path)
    kinds = {one.name: (Buckets if one.by == "bucket" else Progress).kind for one in config.epochs}
    if kinds and path.is_file():
        try:
            keeper.require_same_kinds(path, ids.at(config.authority, ids.FRONTIERS), kinds)
        except UStatusError as error:
            yield StoredFinding(error.message)


def _mark(path: Path) -> Iterator[StoredFinding]:
    try:
        marked = read_mark(path)
    except (OSError, BadMarkError) as error:
        what = (
            f"the mark {path}.mark can't be used ({error}): the next start can't detect lost records, and reports that"
        )
        yield StoredFinding(what, is_fatal=False)
    else:
        if marked is not None and marked.seq and not path.exists():
            what = f"there was a log with {marked.seq} records here, and {path} is missing: a start reports the loss"
            yield StoredFinding(what, is_fatal=False)


def _subscriptions(config: Config, path: Path, user: str | None) -> Iterator[StoredFinding]:
    yield from _lock(tables.STORE, path, user)
    try:
        tables.require_usable(path, config.authority, whole=user is None)
    except UStatusError as error:
        yield StoredFinding(error.message)
    except DamagedError as error:
        yield StoredFinding(tables.STORE.fault(error, path, "opened").message)


def _states(config: Config, path_of: Callable[[str], Path]) -> Iterator[StoredFinding]:
    """Yields which small files can't be read."""
    try:
        pauses.read(pauses.file_of(path_of(PAUSES_FILE)))
    except UStatusError as error:
        yield StoredFinding(error.message)
    saved = {config.authority} if config.usubscription_of(config.home) == "embedded" else set()
    for section in config.endpoint:
        saved.update(building.remote_authorities_of(config, section))
    for authority in sorted(saved):
        path = path_of(interest_file(authority))
        yield from _saved(SavedInterest(path, list).require_readable, "the service is asked for its subscriptions")
    partners = Partners(path_of(PARTNERS_FILE))
    yield from _saved(partners.require_readable, "the partners are known from the subscriptions")
    reserve = config.streamer.data_dir / RESERVE_FILE
    if reserve.exists() and not (reserve.is_file() and os.access(reserve, os.W_OK)):
        yield StoredFinding(f"the reserve of the disk can't be made: {reserve} can't be written", is_fatal=False)


def _saved(require_readable: Callable[[], None], instead: str) -> Iterator[StoredFinding]:
    try:
        require_readable()
    except UStatusError as error:
        what = f"{error.message}: {instead}, and the file is renamed to NAME.refused-TIME when it is written next"
        yield StoredFinding(what, is_fatal=False)
