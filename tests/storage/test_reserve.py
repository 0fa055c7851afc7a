"""The reserve of a disk: allocated blocks, given up for a writer without space, made again later."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from storage import faults as faults_module
from storage.disk import REAL_DISK, Disk
from storage.faults import DEFAULT_BYTES_MAX, Reserve, disk_bytes, reserve_of
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

MIB = 1 << 20
PLENTY = 1 << 40


@pytest.fixture
def reserve(tmp_path: Path) -> Reserve:
    made = Reserve(tmp_path / "reserve", MIB)
    assert made.restore(PLENTY)
    return made


def cannot_allocate(file: int, offset: int, bytes: int) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_it_has_blocks_until_it_is_given_up(reserve: Reserve) -> None:
    assert reserve.is_whole
    assert disk_bytes(reserve.path) >= MIB
    assert reserve.give_up()
    assert (reserve.held, reserve.is_whole, disk_bytes(reserve.path)) == (0, False, 0)
    assert not reserve.give_up()
    assert reserve.restore(PLENTY)
    assert reserve.is_whole


def test_it_is_written_where_blocks_can_not_be_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", cannot_allocate)
    reserve = Reserve(tmp_path / "reserve", MIB + 5)
    assert reserve.restore(PLENTY)
    assert disk_bytes(reserve.path) >= MIB + 5
    assert any(reserve.path.read_bytes()), "a file system that compresses keeps no blocks of zeros"


def test_a_file_system_that_does_not_count_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults_module, "disk_bytes", lambda path: 0)
    reserve = Reserve(tmp_path / "reserve", MIB)
    assert reserve.restore(PLENTY)
    assert reserve.is_whole
    made = reserve.path.stat().st_mtime_ns
    assert reserve.restore(PLENTY)
    assert reserve.path.stat().st_mtime_ns == made, "it is not made again each time"
    assert reserve.give_up()
    assert not reserve.is_whole


def test_it_is_made_only_where_that_leaves_something(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "reserve", MIB)
    assert not reserve.restore(MIB)
    assert not reserve.held
    assert reserve.restore(3 * MIB)


def test_a_disk_without_room_keeps_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(file: int, offset: int, bytes: int) -> None:
        os.pwrite(file, b"x" * 65_536, 0)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    reserve = Reserve(tmp_path / "reserve", MIB)
    assert not reserve.restore(PLENTY)
    assert disk_bytes(reserve.path) == 0


def test_another_size_is_brought_about(reserve: Reserve) -> None:
    assert Reserve(reserve.path, 2 * MIB).restore(PLENTY)
    assert reserve.path.stat().st_size == 2 * MIB
    smaller = Reserve(reserve.path, MIB // 2)
    assert smaller.restore(PLENTY)
    assert reserve.path.stat().st_size == MIB // 2
    assert Reserve(reserve.path, 0).restore(PLENTY)
    assert not reserve.path.exists()


@pytest.mark.parametrize(
    ("disk_mib", "asked", "expected"),
    [
        (48, None, 6 * MIB),
        (1 << 20, None, DEFAULT_BYTES_MAX),
        (48, 4 * MIB, 4 * MIB),
        (48, 1_000 * MIB, 12 * MIB),
        (48, 0, 0),
    ],
)
def test_it_fits_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_mib: int, asked: int | None, expected: int
) -> None:
    monkeypatch.setattr(faults_module, "_whole_bytes", lambda path: disk_mib * MIB)
    assert reserve_of(tmp_path / "not there yet" / "reserve", asked).bytes == expected


def sqlite_full() -> sqlite3.Error:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


def failing(error: Exception) -> tuple[list[int], Callable[[], int]]:
    """Work that fails once; and how often it was tried."""
    tries: list[int] = []

    def work() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise error
        return 7

    return tries, work


@pytest.mark.parametrize(
    "error", [sqlite_full(), OSError(errno.ENOSPC, "full"), UStatusError(UCode.RESOURCE_EXHAUSTED, "full")]
)
def test_work_on_a_full_disk_is_tried_once_more_without_it(reserve: Reserve, error: Exception) -> None:
    tries, work = failing(error)
    assert REAL_DISK.with_reserve(reserve).retry_with_reserve(reserve.path, work) == 7
    assert (len(tries), reserve.held) == (2, 0)


@pytest.mark.parametrize("error", [sqlite3.OperationalError("locked"), UStatusError(UCode.UNAVAILABLE, "I/O")])
def test_other_errors_leave_it_alone(reserve: Reserve, error: Exception) -> None:
    tries, work = failing(error)
    with pytest.raises(type(error)):
        REAL_DISK.with_reserve(reserve).retry_with_reserve(reserve.path, work)
    assert (len(tries), reserve.is_whole) == (1, True)


def test_without_a_reserve_nothing_is_tried_again(tmp_path: Path) -> None:
    tries, work = failing(sqlite_full())
    with pytest.raises(sqlite3.OperationalError):
        REAL_DISK.retry_with_reserve(tmp_path / "some.db", work)
    assert len(tries) == 1


def test_who_comes_second_finds_the_room_that_the_first_one_made(reserve: Reserve) -> None:
    """Two stores fail at once: the reserve can be given up once only."""
    assert reserve.give_up()
    tries, work = failing(sqlite_full())
    assert REAL_DISK.with_reserve(reserve).retry_with_reserve(reserve.path, work) == 7
    assert len(tries) == 2


def test_a_small_file_has_room_as_well(reserve: Reserve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = REAL_DISK.with_reserve(reserve)
    replace_text, tries = Disk._replace_text, []

    def full_once(self: Disk, path: Path, text: str) -> None:
        tries.append(path)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "full")
        replace_text(self, path, text)

    monkeypatch.setattr(Disk, "_replace_text", full_once)
    disk.replace_text(tmp_path / "paused.json", "new")
    assert (tmp_path / "paused.json").read_text() == "new"
    assert not reserve.held
