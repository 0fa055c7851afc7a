"""Faults of the machine for a process: a small disk, failing writes, another clock. Impossible ones are skipped with a
reason.

small_disk(): a tmpfs    IoFault: campaigns/chaos/faultio.c, compiled here and preloaded    Clock: libfaketime, moved
meanwhile
"""

from __future__ import annotations

import contextlib
import glob
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

FAKETIME_PATHS: Final = (
    "/usr/lib/*/faketime/libfaketimeMT.so.1",
    "/usr/lib/faketime/libfaketimeMT.so.1",
    "/usr/local/lib/faketime/libfaketimeMT.so.1",
)
_CONTROL: Final = struct.Struct("<iiii")  # error, skip, times, hits: struct control of faultio.c
# before a command: gives it a network of its own, which is a loopback interface
NAMESPACE: Final = ("unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
DIE: Final = -1  # as an error: write half, then die


def mount(folder: Path, bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={bytes}", "tmpfs", str(folder)], check=True, capture_output=True
    )


def remount(folder: Path, *, read_only: bool) -> bool:
    """Returns False if the kernel refuses, as while a file is open for writing."""
    mode = "ro" if read_only else "rw"
    return (
        subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=False, capture_output=True).returncode
        == 0
    )


def unmount_below(folder: Path) -> None:
    """Unmount everything in `folder`, whether or not its campaign ended normally."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            place = line.split()[1]
            if Path(place).is_relative_to(folder):
                subprocess.run(["umount", "-l", place], check=False, capture_output=True)


@cache
def no_tmpfs() -> str:
    """The reason why a small disk is not possible; empty if it is."""
    if os.name != "posix" or shutil.which("mount") is None:
        return "there is no mount command"
    if os.geteuid() != 0:
        return "mounting a tmpfs needs root"
    with tempfile.TemporaryDirectory(prefix="up-streamer-chaos-") as folder:
        try:
            mount(Path(folder), 1 << 20)
        except subprocess.CalledProcessError as error:
            return f"a tmpfs can't be mounted: {error.stderr.decode(errors='replace').strip()}"
        unmount_below(Path(folder))
    return ""


@cache
def no_namespace() -> str:
    """The reason why a campaign cannot have a network of its own, to drop datagrams; empty if it can."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "there is no unshare or no ip command"
    rule = ("ip", "rule", "add", "ipproto", "udp", "blackhole", "pref", "50")
    done = subprocess.run([*NAMESPACE, *rule], check=False, capture_output=True)
    said = done.stderr.decode(errors="replace").strip()
    return f"a network of its own is not to be had: {said}" if done.returncode else ""


@cache
def no_preload() -> str:
    """The reason why writes cannot fail on demand; empty if they can."""
    return "" if shutil.which("cc") is not None else "there is no C compiler (cc)"


@cache
def faketime() -> str | None:
    return next((path for pattern in FAKETIME_PATHS for path in glob.glob(pattern)), None)


@cache
def no_faketime() -> str:
    return "" if faketime() is not None else "there is no libfaketime (apt-get install libfaketime)"


class IoFault:
    """Makes the writes of a process below one folder fail, from the next call on."""

    def __init__(self, folder: Path, root: Path) -> None:
        """Raises CalledProcessError if it cannot be compiled."""
        self._library = folder / "faultio.so"
        source = Path(__file__).with_name("faultio.c")
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(self._library), str(source), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
        self._control_path, self._root = folder / "faultio.control", root
        self._control_path.write_bytes(bytes(_CONTROL.size))
        with self._control_path.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), _CONTROL.size)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self._library),
            "CHAOS_IO_CONTROL": str(self._control_path),
            "CHAOS_IO_ROOT": str(self._root.resolve()),
        }

    def arm(self, error: int, skip: int = 0, times: int = -1) -> None:
        """After `skip` calls, `times` of them fail with `error` (an errno, or DIE); negative: all until `disarm`."""
        hits = self.hits
        self._control[:] = _CONTROL.pack(0, skip, times, hits)
        self._control[:4] = struct.pack("<i", error)

    def disarm(self) -> None:
        self._control[:4] = struct.pack("<i", 0)

    @property
    def hits(self) -> int:
        return int(_CONTROL.unpack(self._control[:])[3])


class Clock:
    """The wall clock of a process, ahead or behind; its monotonic clock does not change, as with a real jump."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self.set(0)

    @property
    def environment(self) -> dict[str, str]:
        library = faketime()
        assert library is not None
        return {
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            # seconds; otherwise the file is read at each reading of the time
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, ahead_s: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead_s:+d}\n")
        new.rename(self._file)
