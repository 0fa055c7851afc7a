"""Backs up a data_dir, also while its streamer runs, and restores a backup.

back_up: uSubscription, saved files -> the log -> dead letters -> checksums -> manifest.json, which makes it complete
restore: manifest -> data_dir/restoring: copies, compared with their checksums -> another incarnation of the log
             -> renamed to data_dir/restored: from here on it is done, also by the next start after a crash
             -> old files into data_dir/replaced-TIME, the new ones into data_dir

Order: a subscription that is restored is never newer than the log. A cursor in the log that has passed a message which
became a dead letter finds it among the dead letters.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from history.file.copying import Copied, copy_log, make_another
from history.file.retention import own_bytes
from history.log.log import Log
from storage.copies import SHARE, CopyPace, copy_store, copy_whole, sha256, write_private
from storage.disk import REAL_DISK, BadMarkError, Disk, InUseError, Lock, Marked, read_mark
from storage.faults import FULL_BYTES, DamagedError, is_damage, is_denied, is_full
from storage.runtime import REAL
from streamer.data_dir import (
    LETTERS_FILE,
    LOG_FILE,
    LOG_LOCK,
    LOG_MARK,
    PARTNERS_FILE,
    REPLACED,
    RESTORED,
    RESTORING,
    SUBSCRIPTIONS_FILE,
)
from streamer.operation import NUMBER_MAX, Arguments, Operation
from uprotocol.status import UStatusError, invalid
from uprotocol.uuid import moment
from uprotocol.v1.ucode_pb2 import UCode

FORMAT: Final = 1  # of the manifest
MANIFEST_FILE: Final = "manifest.json"
MANIFEST_BYTES_MAX: Final = 4 << 20
NAME_BYTES_MAX: Final = 255  # of a file
PLAN: Final = "plan"  # of a restore, in its folder

log = structlog.get_logger()


Seq = Annotated[int, Field(ge=0, le=NUMBER_MAX)]


class FileEntry(BaseModel):
    model_config = ConfigDict(strict=True)
    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Manifest(BaseModel):
    """What a backup contains. Times are RFC 3339, UTC; `authority`: "" if it is unknown."""

    model_config = ConfigDict(strict=True)
    format: int
    program: str
    authority: str
    began: str
    time: Annotated[str, Field(pattern=r"^[-0-9T:.]{19,32}Z$")]  # of the last snapshot
    incarnation: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]  # of the log, in hex
    oldest_seq: Seq
    newest_seq: Seq
    files: dict[str, FileEntry]

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.files.values())

    def summary(self, directory: Path, seconds: float) -> dict[str, Any]:
        """Returns what a command prints."""
        return {
            "directory": str(directory),
            "authority": self.authority,
            "time": self.time,
            "incarnation": self.incarnation,
            "oldest_seq": self.oldest_seq,
            "newest_seq": self.newest_seq,
            "files": len(self.files),
            "bytes": self.bytes,
            "seconds": round(seconds, 1),
        }


# Backup


class Backups:
    """The backups of a running streamer, one at a time."""

    def __init__(self, data_dir: Path, authority: str, durable: Log, is_stopping: Callable[[], bool]) -> None:
        self._data_dir, self._authority, self._log, self._is_stopping = data_dir, authority, durable, is_stopping
        self._turn = asyncio.Lock()

    def operation(self) -> Operation:
        return Operation(self._run, ("directory",), is_change=True)

    async def _run(self, given: Arguments) -> dict[str, Any]:
        directory = Path(given.text("directory"))
        if not directory.is_absolute() or not str(directory).isprintable():
            raise invalid(f"directory: expected an absolute path of printable characters, got {str(directory)[:256]!r}")
        if self._turn.locked():
            raise UStatusError(UCode.ALREADY_EXISTS, "a backup is being made already: wait until it is complete")
        async with self._turn:
            return await asyncio.to_thread(self._make, directory)

    def _make(self, directory: Path) -> dict[str, Any]:
        source = self._log
        log.info("a backup begins", directory=str(directory))
        try:
            made = back_up(
                self._data_dir,
                directory,
                self._authority,
                newest=lambda: source.newest_seq,
                log_bytes_max=max(source.retention_bytes, source.disk_limit_bytes),
                is_stopping=self._is_stopping,
            )
        except UStatusError as error:
            log.error("the backup has failed", directory=str(directory), why=error.message)
            raise
        log.info("the backup is complete", **made)
        return made


def back_up(
    data_dir: Path,
    directory: Path,
    authority: str,
    *,
    newest: Callable[[], int] | None = None,
    log_bytes_max: int = 0,
    is_stopping: Callable[[], bool] = lambda: False,
    disk: Disk = REAL_DISK,
) -> dict[str, Any]:
    """Copy the files of a data_dir into `directory`, which is empty or does not exist. Blocks.

    `newest()`: the newest committed seq of a log that is written meanwhile, which is then copied in steps with pauses;
    None: the caller has the lock of the log. `log_bytes_max`: up to here the log may grow on its disk: so much stays
    free there.

    Raises INVALID_ARGUMENT (nothing to copy), FAILED_PRECONDITION (not empty), PERMISSION_DENIED, RESOURCE_EXHAUSTED
    (the disk of `directory`), DATA_LOSS (damaged), UNAVAILABLE (I/O error, or stopping); then no file is left there.
    """
    if not (data_dir / LOG_FILE).exists():
        log_file = data_dir / LOG_FILE
        raise invalid(f"there is no log at {log_file}: is {data_dir} the data_dir of a streamer that has run?")
    if directory.parent.resolve() == data_dir.resolve() and _is_reserved(directory.name):
        raise UStatusError(UCode.FAILED_PRECONDITION, f"{directory} has a name of our own files: choose another one")
    began, started = moment(REAL.now_ms()), time.monotonic()
    with _errors("the backup", directory), _new_folder(directory, disk):

        def kept_bytes() -> int:
            is_same_disk = directory.stat().st_dev == data_dir.stat().st_dev
            return FULL_BYTES + (max(0, log_bytes_max - own_bytes(data_dir / LOG_FILE)) if is_same_disk else 0)

        share = 1.0 if newest is None else SHARE
        pace = CopyPace(directory / MANIFEST_FILE, share, kept_bytes=kept_bytes, is_stopping=is_stopping, disk=disk)
        stores = [one for one in (SUBSCRIPTIONS_FILE, LETTERS_FILE) if (data_dir / one).exists()]
        pace.require(sum((data_dir / one).stat().st_size for one in (*stores, LOG_FILE)))
        if SUBSCRIPTIONS_FILE in stores:
            copy_store(data_dir / SUBSCRIPTIONS_FILE, directory / SUBSCRIPTIONS_FILE, pace, disk)
        saved_files = [one for one in data_dir.glob("*.json") if one.name != MANIFEST_FILE]
        for saved in (*sorted(saved_files), data_dir / PARTNERS_FILE):
            with contextlib.suppress(FileNotFoundError):  # each is replaced as a whole, or was removed
                write_private(directory / saved.name, saved.read_bytes(), disk)
        copied = copy_log(data_dir / LOG_FILE, directory / LOG_FILE, pace, newest, disk)
        if LETTERS_FILE in stores:
            copy_store(data_dir / LETTERS_FILE, directory / LETTERS_FILE, pace, disk)
        made = _manifest(directory, authority, began, copied, pace)
        write_private(directory / f"{MANIFEST_FILE}.new", made.model_dump_json(indent=1).encode(), disk)
        (directory / f"{MANIFEST_FILE}.new").rename(directory / MANIFEST_FILE)
        disk.sync(directory)
    return made.summary(directory, time.monotonic() - started)


def _is_reserved(name: str) -> bool:
    """Returns True for a name in data_dir that a restore, or the next backup, would take for one of ours."""
    return name in (RESTORING, RESTORED) or name.endswith(".json")


def _manifest(directory: Path, authority: str, began: str, copied: Copied, pace: CopyPace) -> Manifest:
    return Manifest(
        format=FORMAT,
        program=metadata.version("up-streamer"),
        authority=authority,
        began=began,
        time=moment(REAL.now_ms()),
        incarnation=copied.incarnation.hex(),
        oldest_seq=copied.oldest_seq,
        newest_seq=copied.newest_seq,
        files={
            one.name: FileEntry(bytes=one.stat().st_size, sha256=sha256(one, pace))
            for one in sorted(directory.iterdir())
        },
    )


@contextlib.contextmanager
def _new_folder(directory: Path, disk: Disk) -> Iterator[None]:
    """Make the folder, or take an empty one. If the body fails, everything in it is removed."""
    is_made = not directory.exists()
    directory.mkdir(mode=0o700, exist_ok=True)
    if any(one.name != "lost+found" for one in directory.iterdir()):
        why = f"{directory} is not empty: choose a new folder (an unfinished backup has no {MANIFEST_FILE}: remove it)"
        raise UStatusError(UCode.FAILED_PRECONDITION, why)
    with contextlib.suppress(OSError):  # of a mounted disk
        directory.chmod(0o700)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for one in directory.iterdir():
                if one.is_file():
                    one.unlink()
            if is_made:
                directory.rmdir()
        raise
    disk.sync(directory.parent)


@contextlib.contextmanager
def _errors(what: str, target: Path) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise UStatusError(UCode.DATA_LOSS, f"{what} was given up: a file is damaged: {error}") from error
    except (sqlite3.Error, OSError, BadMarkError) as error:
        code, why = UCode.UNAVAILABLE, f"{error}: try again"
        if is_full(error, target / MANIFEST_FILE):
            code, why = UCode.RESOURCE_EXHAUSTED, f"the disk of {target} is full ({error}): choose another one"
        elif is_denied(error, target / MANIFEST_FILE) or getattr(error, "errno", 0) == errno.EROFS:
            code, why = (
                UCode.PERMISSION_DENIED,
                f"{target} can't be written ({error}): the streamer's user must be allowed to",
            )
        elif isinstance(error, FileNotFoundError):
            code, why = UCode.FAILED_PRECONDITION, f"{error}: make that folder first"
        elif isinstance(error, (FileExistsError, NotADirectoryError)):
            code, why = UCode.FAILED_PRECONDITION, f"{error}: choose a new folder"
        elif is_damage(error) or isinstance(error, BadMarkError):
            code, why = UCode.DATA_LOSS, f"a store is damaged ({error}): see 'up-streamer history verify'"
        raise UStatusError(code, f"{what} was given up: {why}") from error


# Restore


def read_manifest(directory: Path) -> Manifest:
    """Returns the manifest of a backup whose files are all there. Raises FAILED_PRECONDITION (no complete backup, or of
    a newer program), DATA_LOSS (files are missing, or have another size)."""
    path = directory / MANIFEST_FILE
    try:
        if path.stat().st_size > MANIFEST_BYTES_MAX:
            raise ValueError(f"it has more than {MANIFEST_BYTES_MAX} bytes")
        data = path.read_bytes()
        if (format := json.loads(data)["format"]) != FORMAT:
            raise ValueError(f"it has format {format}, and this program knows {FORMAT}: use the program that made it")
        made = Manifest.model_validate_json(data)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        what = f"{directory} is no complete backup: its {MANIFEST_FILE} can't be read: {why}"
        raise UStatusError(UCode.FAILED_PRECONDITION, what) from None
    if LOG_FILE not in made.files or not all(_is_saved(name) for name in made.files):
        raise UStatusError(UCode.FAILED_PRECONDITION, f"{path} is not the manifest of a backup: it names other files")
    for name, entry in made.files.items():
        saved = (directory / name).lstat() if (directory / name).exists() else None
        found = saved.st_size if saved is not None and stat.S_ISREG(saved.st_mode) else None  # a link leads elsewhere
        if found != entry.bytes:
            what = f"{directory / name} is not what was saved: expected {entry.bytes} bytes, got {found}"
            raise UStatusError(UCode.DATA_LOSS, f"{what}: take another backup")
    return made


def _is_saved(name: str) -> bool:
    stores = (LOG_FILE, LOG_MARK, SUBSCRIPTIONS_FILE, PARTNERS_FILE, LETTERS_FILE)
    is_name = Path(name).name == name.strip() and name.isprintable() and len(name.encode()) <= NAME_BYTES_MAX
    return name in stores or (name.endswith(".json") and is_name and name != MANIFEST_FILE)


def restore(
    directory: Path,
    data_dir: Path,
    authority: str = "",
    *,
    same_incarnation: bool = False,
    replace: bool = False,
    disk: Disk = REAL_DISK,
) -> dict[str, Any]:
    """Make `data_dir` what it was when the backup in `directory` was made. Blocks.

    The log gets another incarnation, unless `same_incarnation`: then its readers go on as if nothing had happened,
    which is right only if nothing was appended after the backup. `replace`: files in the way are moved to
    data_dir/replaced-TIME. `authority`: of the streamer that will use it; "": any.

    Raises as read_manifest; FAILED_PRECONDITION (the streamer runs, or data_dir is in use, or of another authority),
    PERMISSION_DENIED, RESOURCE_EXHAUSTED, UNAVAILABLE; then nothing has changed.
    """
    started, manifest = time.monotonic(), read_manifest(directory)
    if authority and manifest.authority and authority != manifest.authority:
        why = f"it is of {manifest.authority}, and the configuration is of {authority}: take the backup of {authority}"
        raise UStatusError(UCode.FAILED_PRECONDITION, f"{directory} can't be restored: {why}")
    with _errors("the restore", data_dir):
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.closing(_Locked(data_dir, disk)):
            _finish(data_dir, disk)
            old = _old_files(data_dir)
            if old and not replace:
                why = f"{data_dir} has files already ({old[0]}, ...): say --replace, and they are moved aside"
                raise UStatusError(UCode.FAILED_PRECONDITION, why)
            pace = CopyPace(data_dir / LOG_FILE, disk=disk)
            pace.require(manifest.bytes)
            incarnation = _prepare(directory, data_dir, manifest, old, pace, same_incarnation, disk)
            aside = _finish(data_dir, disk)
    summary = {**manifest.summary(directory, time.monotonic() - started), "data_dir": str(data_dir)}
    return {**summary, "incarnation": incarnation.hex(), "moved_to": aside}


def finish_restore(data_dir: Path, disk: Disk = REAL_DISK) -> None:
    """Complete a restore that was interrupted after everything was copied; remove what an earlier interruption left.
    Does nothing while another process has the log. Raises UStatusError as `restore`."""
    if not any((data_dir / one).exists() for one in (RESTORED, RESTORING)):
        return
    with contextlib.suppress(InUseError), _errors("the restore", data_dir):
        lock = disk.lock(data_dir / LOG_LOCK)
        try:
            _finish(data_dir, disk)
        finally:
            lock.release()


class _Locked:
    """The lock of a stopped streamer. Raises FAILED_PRECONDITION if it runs."""

    def __init__(self, data_dir: Path, disk: Disk) -> None:
        try:
            self._lock: Lock = disk.lock(data_dir / LOG_LOCK)
        except InUseError as owner:
            why = f"process {owner} uses {data_dir}: stop the streamer first"
            raise UStatusError(UCode.FAILED_PRECONDITION, why) from None
        except OSError as error:
            raise UStatusError(UCode.FAILED_PRECONDITION, f"{data_dir} can't be locked: {error}") from None
        self.close = self._lock.release
        _give_to_owner(data_dir, [data_dir / LOG_LOCK])


def back_up_stopped(data_dir: Path, directory: Path, authority: str) -> dict[str, Any]:
    """Same as `back_up`, for a streamer that is stopped. Raises FAILED_PRECONDITION if it runs."""
    with contextlib.closing(_Locked(data_dir, REAL_DISK)):
        finish_restore(data_dir)
        return back_up(data_dir, directory, authority)


def _old_files(data_dir: Path) -> list[str]:
    """Returns the names of the files of a streamer in its data_dir, without its locks and its reserve."""
    patterns = (f"{LOG_FILE}*", f"{SUBSCRIPTIONS_FILE}*", f"{LETTERS_FILE}*", "*.json")
    found = {one.name for pattern in patterns for one in data_dir.glob(pattern) if one.is_file()}
    return sorted(name for name in found if not name.endswith(".lock"))


def _prepare(
    directory: Path,
    data_dir: Path,
    manifest: Manifest,
    old: list[str],
    pace: CopyPace,
    same_incarnation: bool,
    disk: Disk,
) -> bytes:
    """Copy everything into a folder that the next `_finish` puts in place. Returns the incarnation."""
    incarnation, newest = bytes.fromhex(manifest.incarnation), manifest.newest_seq
    later = _later(data_dir, incarnation)
    if same_incarnation and later > newest:
        why = f"{later - newest} records were appended after the backup, and readers may have them"
        raise UStatusError(UCode.FAILED_PRECONDITION, f"{why}: restore without --same-incarnation")
    copies = data_dir / RESTORING
    copies.mkdir(mode=0o700)
    try:
        for name, entry in manifest.files.items():
            if copy_whole(directory / name, copies / name, pace, disk) != entry.sha256:
                what = f"{directory / name} is not what was saved: its checksum is wrong: take another backup"
                raise UStatusError(UCode.DATA_LOSS, what)
        if not same_incarnation:
            why = f"restored from a backup of {manifest.time}: what was appended, subscribed or confirmed later is lost"
            incarnation = REAL.random_bytes(16)
            make_another(copies / LOG_FILE, incarnation, REAL.now_ms(), why, later, disk)
            disk.sync(copies / LOG_FILE)
        aside = f"{REPLACED}{datetime.now(UTC):%Y%m%dT%H%M%S.%f}" if old else None
        plan = {"old": old, "aside": aside, "new": sorted(manifest.files, key=lambda name: name == LOG_FILE)}
        write_private(copies / PLAN, json.dumps(plan).encode(), disk)
        _give_to_owner(data_dir, [copies, *copies.iterdir()])
        disk.sync(copies)
        copies.rename(data_dir / RESTORED)
    except BaseException:
        shutil.rmtree(copies, ignore_errors=True)
        raise
    disk.sync(data_dir)
    return incarnation


def _give_to_owner(data_dir: Path, paths: list[Path]) -> None:
    """Let root restore for the user of a service, who owns data_dir."""
    owner = data_dir.stat()
    for path in paths if os.geteuid() == 0 else ():
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _require_inside(data_dir: Path, names: list[str], aside: Path | None) -> None:
    """Raises ValueError if a plan leads out of data_dir: root completes it in a folder that another user writes."""
    is_ours = aside is None or (aside.parent == data_dir and aside.name.startswith(REPLACED) and not aside.is_symlink())
    if not is_ours or any(Path(name).name != name for name in names):
        raise ValueError("its plan leads to another folder")


def _later(data_dir: Path, incarnation: bytes) -> int:
    """Returns the newest seq of the log that is replaced, if it is that one; 0: unknown."""
    marked: Marked | None = None
    with contextlib.suppress(OSError, BadMarkError):
        marked = read_mark(data_dir / LOG_FILE)
    return marked.seq if marked is not None and marked.incarnation == incarnation else 0


def folder_after_restore(data_dir: Path) -> Path | None:
    """Returns the folder with the files of a restore that the next start completes; None if none waits. Raises
    FAILED_PRECONDITION if it can't be completed. Writes nothing."""
    if not (data_dir / RESTORED).exists():
        return None
    _read_plan(data_dir)
    return data_dir / RESTORED


def _read_plan(data_dir: Path) -> tuple[dict[str, list[str]], Path | None]:
    """Returns the names of "old" and "new" files, and the folder for the old ones. Raises FAILED_PRECONDITION."""
    ready = data_dir / RESTORED
    try:
        plan = json.loads((ready / PLAN).read_bytes())
        aside = None if plan["aside"] is None else data_dir / plan["aside"]
        _require_inside(data_dir, [*plan["old"], *plan["new"]], aside)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"a restore was interrupted, and {ready} can't be completed ({error}): remove that folder, restore again"
        raise UStatusError(UCode.FAILED_PRECONDITION, why) from None
    return plan, aside


def _finish(data_dir: Path, disk: Disk) -> str | None:
    """Put the files of a prepared restore in place. It may be interrupted and repeated at any step. Returns the
    folder of the replaced files; None if nothing was replaced."""
    ready, left = data_dir / RESTORED, data_dir / RESTORING
    shutil.rmtree(left, ignore_errors=True)
    if not ready.exists():
        return None
    plan, aside = _read_plan(data_dir)
    if aside is not None:
        aside.mkdir(mode=0o700, exist_ok=True)
        _give_to_owner(data_dir, [aside])
        for name in plan["old"]:
            if (data_dir / name).exists() and not (aside / name).exists():  # else it was moved before
                (data_dir / name).rename(aside / name)
        disk.sync(aside)
        disk.sync(data_dir)
    for name in plan["new"]:
        with contextlib.suppress(FileNotFoundError):  # it was moved before
            (ready / name).rename(data_dir / name)
    disk.sync(data_dir)
    os.rename(ready, left)
    shutil.rmtree(left, ignore_errors=True)
    log.info("a backup was restored", data_dir=str(data_dir), moved_to=None if aside is None else str(aside))
    return None if aside is None else str(aside)
