"""A query and its processes as a test sees them from outside, to kill one of them at a known moment of a batch.

the job (Python) -> JVM -> pyspark.daemon -> Python workers: one for each running task; they read from the history
                      +--> Python workers of the driver, which plan batches

    offsets/7 -----------------> part files --------> _spark_metadata/7 --------> commits/7
      planned     READING                    WRITING                     LISTED
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from spark_ingest import parquet

PROC: Final = Path("/proc")
ESTABLISHED: Final = "01"  # the state of a socket in /proc/net/tcp
DAEMON: Final = "pyspark.daemon"
PLANNER: Final = "python_streaming_source_runner"
EXECUTOR: Final = "CoarseGrainedExecutorBackend"
DEADLINE_S: Final = 110  # of a wait for an event; only a broken test gets there
LOOK_S: Final = 0.005  # shorter than any moment of a batch
ANSWERING_S: Final = 0.03  # a task is still reading then, or has begun to write


class Moment(Enum):
    """Of one batch, in this order."""

    READING = "a task is connected to the history"
    WRITING = "files are there that no batch lists"
    LISTED = "the sink has listed the files, Spark has not committed the batch"


class TooLateError(AssertionError):
    """The batch was committed before the caller could kill anything: on a busy machine the last moments are short."""


class Batches:
    """The batches of the query that writes to `directory`/rows, by its files."""

    def __init__(self, directory: Path) -> None:
        self._rows, self._checkpoint = directory / "rows", directory / "checkpoint"

    def is_planned(self, batch: int) -> bool:
        return (self._checkpoint / "offsets" / str(batch)).exists()

    def is_listed(self, batch: int) -> bool:
        log = self._rows / "_spark_metadata"
        return (log / str(batch)).exists() or (log / f"{batch}.compact").exists()

    def is_committed(self, batch: int) -> bool:
        return (self._checkpoint / "commits" / str(batch)).exists()

    def files(self) -> set[Path]:
        return set(self._rows.rglob("*.parquet"))


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for a state of another process that sends no event for it."""
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        time.sleep(LOOK_S)


@contextlib.contextmanager
def caught(batches: Batches, batch: int, moment: Moment, history: History, *parents: int) -> Iterator[list[int]]:
    """Waits until `batch` is at `moment`, and gives the workers below `parents` that read then. Raises
    TooLateError if the moment has been missed, or if the batch is committed in spite of what the caller does.

    While workers read, the history stands still until the caller is done, so that none of them can end too soon. In odd
    batches it has answered for a while before.
    """
    until(lambda: batches.is_planned(batch), f"batch {batch} is planned")
    before, found = batches.files(), list[int]()
    with contextlib.ExitStack() as stack:
        if moment is Moment.READING:
            stack.callback(history.resume)
            found = _stopped_with_readers(history, parents, lambda: batches.is_committed(batch))
            if found and batch % 2:
                history.resume()
                time.sleep(ANSWERING_S)
                history.stop()
        elif moment is Moment.WRITING:
            until(lambda: batches.files() > before or batches.is_committed(batch), f"batch {batch}: {moment.value}")
        else:
            until(lambda: batches.is_listed(batch), f"batch {batch}: {moment.value}")
        if batches.is_committed(batch):
            raise TooLateError(f"batch {batch} was too short for a look at it: {moment.value}")
        yield found
        if batches.is_committed(batch):
            raise TooLateError(f"batch {batch} was committed, so this was no cut in it")


class History(NamedTuple):
    """The process that tasks read from."""

    pid: int
    port: int

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # the caller may have killed it
            os.kill(self.pid, signal.SIGCONT)


def _stopped_with_readers(history: History, parents: Iterable[int], is_over: Callable[[], bool]) -> list[int]:
    """Stops the history when a worker below `parents` is connected to it. A new connection is seen at once, and only
    then the workers are looked through, which takes longer than a short read. Returns no worker if all `is_over`."""
    others, found = set[str](), list[int]()

    def holds() -> bool:
        nonlocal found
        connected = _connected_to(history.port)
        if not connected <= others:
            history.stop()
            found = [pid for parent in parents for pid in reading(parent, history.port)]
            if not found:
                history.resume()
                others.update(connected)
        return bool(found) or is_over()

    until(holds, Moment.READING.value)
    return found


def assert_each_once(directory: Path, records: int) -> None:
    """The sink has the records 1 to `records`, each once."""
    seqs = parquet.read(directory / "rows", ["seq"])["seq"].to_pylist()
    assert len(seqs) == records, "no row is missing, none comes twice"
    assert sorted(seqs) == list(range(1, records + 1))


def descendants(pid: int) -> list[int]:
    """The process and all that it has started, directly or not; parents before children."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # "pid (name) state parent ..."; the name may contain blanks and brackets
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def executors(pid: int) -> list[int]:
    """The JVMs below `pid` that run tasks for a driver elsewhere."""
    return [one for one in descendants(pid) if EXECUTOR in command(one)]


def planners(pid: int) -> list[int]:
    """The Python workers of drivers below `pid` that plan the batches of a stream."""
    return [one for one in descendants(pid) if PLANNER in command(one)]


def reading(pid: int, port: int) -> list[int]:
    """The Python workers of tasks below `pid` that are connected to `port` of this machine."""
    sockets = _connected_to(port)
    workers = [one for one in descendants(pid) if DAEMON in command(one)] if sockets else []
    return [one for one in workers if not sockets.isdisjoint(_sockets(one))]


def kill(*pids: int) -> None:
    """SIGKILL, also to those that have ended. Fails if none is named: the test would prove nothing."""
    assert pids, "nothing to kill"
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def command(pid: int) -> str:
    """Its command line; empty if it has ended."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _connected_to(port: int) -> set[str]:
    """The client ends of connections to `port`, as /proc/PID/fd names them."""
    remote = f":{port:04X}"
    lines = (line.split() for line in (PROC / "net/tcp").read_text().splitlines()[1:])
    return {f"socket:[{line[9]}]" for line in lines if line[2].endswith(remote) and line[3] == ESTABLISHED}


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for link in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(link.readlink())
