"""A log that nobody reads, or that does not fit on its disk, costs lines of the log and nothing else."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from storage.logs import UNWRITTEN_BYTES_MAX, LogOutput

LINE = "x" * 999 + "\n"


def read_until(descriptor: int, end: bytes) -> bytes:
    got = b""
    while not got.endswith(end):
        more = os.read(descriptor, 1 << 16)
        assert more, f"it ended with {got[-100:]!r}"
        got += more
    return got


def test_lines_come_whole_and_in_order() -> None:
    reader, writer = os.pipe()
    output = LogOutput(writer)
    for number in range(1_000):
        output.write(f"line {number}\n")
    got = read_until(reader, b"line 999\n")
    assert got.decode() == "".join(f"line {number}\n" for number in range(1_000))
    assert output.lost_lines == 0


def test_a_reader_that_stands_still_holds_nobody_up_and_learns_how_many_lines_were_lost() -> None:
    reader, writer = os.pipe()
    output, lines = LogOutput(writer), 3 * UNWRITTEN_BYTES_MAX // len(LINE)
    for _ in range(lines):
        output.write(LINE)  # would block after 64 KiB
    assert (
        output.lost_lines > lines // 4
    )  # as much as may wait is being written, as much waits, and 64 KiB are in the pipe
    got = b""
    while got.count(LINE.encode()) < lines - output.lost_lines:
        got += os.read(reader, 1 << 16)
    output.close()
    output.write("the last line\n")
    got += read_until(reader, b"the last line\n")
    said = re.findall(r"^\((\d+) lines of this log were lost: they could not be written\)$", got.decode(), re.MULTILINE)
    assert sum(map(int, said)) == output.lost_lines
    assert len(got.splitlines()) == lines - output.lost_lines + len(said) + 1


def test_a_reader_that_has_ended_costs_lines() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    output = LogOutput(writer)
    output.write("nobody reads this\n")
    output.close()
    assert output.lost_lines == 1


def test_a_descriptor_that_does_not_block_loses_nothing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    output = LogOutput(writer)
    for number in range(500):
        output.write(f"{number:03} {LINE}")
    got = read_until(reader, f"499 {LINE}".encode())
    assert got.decode() == "".join(f"{number:03} {LINE}" for number in range(500))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which answers each write as a full disk")
def test_a_full_disk_costs_lines() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    output = LogOutput(descriptor)
    output.write("1\n2\n")
    output.close()
    output.write("3\n")
    output.close()
    os.close(descriptor)
    assert output.lost_lines == 3


def test_a_line_that_was_written_in_part_is_ended_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    written, allowed, done = bytearray(), [3, 0], threading.Event()

    def write(_: int, data: memoryview) -> int:
        size = allowed.pop(0) if allowed else len(data)
        if not size:
            raise OSError("the disk is full")
        written.extend(data[:size])
        if written.endswith(b"second\n"):
            done.set()
        return size

    monkeypatch.setattr("storage.logs.os.write", write)
    output = LogOutput(-1)
    output.write("first\n")
    output.close()
    output.write("second\n")
    assert done.wait(60)
    assert written.decode() == "fir\n(1 lines of this log were lost: they could not be written)\nsecond\n"


PROGRAM = """
import asyncio, sys, structlog
from storage import logs
logs.configure("info", "json")
async def main():
    for number in range(2_000):
        structlog.get_logger().error("something failed", endpoint=str(number), why="x" * 100)
    print("the loop goes on", flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("reader", ["gone", "still", "full disk"])
def test_a_process_goes_on_whatever_becomes_of_its_log(reader: str) -> None:
    with contextlib.ExitStack() as stack:
        reading, writing = os.pipe()
        if reader == "gone":
            os.close(reading)
        else:
            stack.callback(os.close, reading)
        if reader == "full disk":
            os.close(writing)
            if not Path("/dev/full").exists():
                pytest.skip("needs /dev/full, which answers each write as a full disk")
            writing = os.open("/dev/full", os.O_WRONLY)
        stack.callback(os.close, writing)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=writing, timeout=100, check=False
        )
    assert (done.returncode, done.stdout) == (0, b"the loop goes on\n")
