"""Small disks: a mounted one where the machine permits mounting, and a simulated one, which needs no rights."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any, Self

import pytest

from storage.disk import Disk
from storage.faults import disk_bytes


class SmallDisk(Disk):
    """What is in `folder` may take so many bytes: a COMMIT beyond them fails, as the real one's."""

    def __init__(self, folder: Path, bytes: int) -> None:
        self._folder, self._bytes = folder, bytes

    def free_bytes(self, path: Path) -> int:
        return max(0, self._bytes - sum(disk_bytes(one) for one in self._folder.iterdir()))

    def connect(self, path: Path, *, read_only: bool = False) -> sqlite3.Connection:
        disk = self

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:  # type: ignore[override]
                if sql == "COMMIT" and not disk.free_bytes(path):
                    error = sqlite3.OperationalError("database or disk is full")
                    error.sqlite_errorcode = sqlite3.SQLITE_FULL
                    raise error
                return super().execute(sql, parameters)

        mode = "ro" if read_only else "rwc"
        return sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            factory=Connection,
        )

    def fill(self) -> Filler:
        return Filler(self, self._folder / "filler")


class RealSmallDisk(Disk):
    """A file system of that size, mounted at `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fill(self) -> Filler:
        return Filler(self, self._folder / "filler")


class Filler:
    """Another program, which takes what is free whenever it is asked to."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk, self._path = disk, path
        self.again()

    def again(self) -> Self:
        with self._path.open("ab", buffering=0) as file:
            while free := self._disk.free_bytes(self._path):
                file.write(bytes(min(free, 1 << 20)))
        return self

    def end(self) -> None:
        self._path.unlink()


def mount(folder: Path, bytes: int) -> None:
    """Skips the test where that is not possible."""
    if shutil.which("mount") is None or os.geteuid():
        pytest.skip("only root can make a small file system")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={bytes}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no small file system can be made here: {made.stderr.strip()}")


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)  # also where a test that failed has files open
