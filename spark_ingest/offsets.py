"""Offsets: how far Spark has read each log of a streamer. Pure.

start {log: seq} --advance(logs, limit)--> end {log: seq} --split--> [Range(log, after, until), ...]   one per task
                          |
                          +-- lost(start, logs): logs that are no longer there; what retention took is told when it is read

A log is named by its incarnation in hex, a seq of 0 (before the first record) is left out: so a log that never held anything leaves
no trace in a checkpoint, and may vanish without that being a loss. JSON of such a map is what Spark keeps in its checkpoint.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from uprotocol.core.ustreamer.v1.ustreamer_pb2 import DescribeResponse
from uprotocol.status import invalid

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
PARTITION_RECORDS_MIN: Final = 20_000  # fewer are read sooner by one task than a second one starts
PARTITIONS_MAX: Final = 16  # of one log and batch; each opens a connection to the streamer
_INCARNATION = re.compile(r"[0-9a-f]{32}")

Offsets = dict[str, int]


@dataclass(frozen=True, slots=True)
class LogState:
    """One log as its streamer describes it. `wanted_seq` is the newest record of the topics that were asked for, 0 if there is none."""

    incarnation: str
    oldest_seq: int
    newest_seq: int
    wanted_seq: int


@dataclass(frozen=True, slots=True)
class Range:
    """Records (after, until] of one log."""

    incarnation: str
    after: int
    until: int


@dataclass(frozen=True, slots=True)
class Loss:
    """Records (after, before) of one log are gone; `before` 0: the whole log is."""

    incarnation: str
    after: int
    before: int

    def __str__(self) -> str:
        if not self.before:
            return f"the log {self.incarnation} is gone, and with it what came after seq {self.after}"
        return f"records {self.after + 1} to {self.before - 1} of log {self.incarnation} are gone"


def logs_of(described: DescribeResponse) -> list[LogState]:
    wanted: dict[bytes, int] = {}
    for topic in described.topics:
        wanted[topic.incarnation] = max(topic.newest_seq, wanted.get(topic.incarnation, 0))
    return [LogState(log.incarnation.hex(), log.oldest_seq, log.newest_seq, wanted.get(log.incarnation, 0)) for log in described.logs]


def parse(text: str) -> str | Offsets:
    """`earliest`, `latest`, or offsets in JSON. Raises UStatusError(INVALID_ARGUMENT)."""
    if text.lower() in (EARLIEST, LATEST):
        return text.lower()
    try:
        given = json.loads(text)
    except ValueError:
        raise invalid(f"expected earliest, latest or a JSON object of log and seq, got {text!r}") from None
    return checked(given)


def checked(given: object) -> Offsets:
    """`given` if it is a map of incarnation to seq. Raises UStatusError(INVALID_ARGUMENT)."""
    if not isinstance(given, dict):
        raise invalid(f"expected a JSON object of log and seq, got {given!r}")
    for incarnation, seq in given.items():
        if not _INCARNATION.fullmatch(str(incarnation)):
            raise invalid(f"a log is named by its incarnation, 32 lower-case hex digits, got {incarnation!r}")
        if type(seq) is not int or not 0 <= seq < 1 << 63:
            raise invalid(f"a seq is a number of 0 or more, got {seq!r} for log {incarnation}")
    return _compact(given)


def starting(where: str | Offsets, logs: Iterable[LogState]) -> Offsets:
    """The place to begin at, for logs as they are now."""
    if where == EARLIEST:
        return _compact({log.incarnation: log.oldest_seq - 1 for log in logs if log.oldest_seq})
    if where == LATEST:
        return _compact({log.incarnation: log.newest_seq for log in logs})
    assert isinstance(where, dict), "parse makes nothing else"
    return _compact(where)


def newest(logs: Iterable[LogState]) -> Offsets:
    """The place where nothing is left to read."""
    return _compact({log.incarnation: log.newest_seq for log in logs})


def lost(start: Mapping[str, int], logs: Iterable[LogState]) -> list[Loss]:
    """Logs that were read from and are gone, with whatever came after `start`.

    What retention has passed is known to the reply of Poll alone, which can tell it from records of other topics.
    """
    present = {log.incarnation for log in logs}
    return [Loss(incarnation, seq, 0) for incarnation, seq in sorted(start.items()) if incarnation not in present]


def advance(
    start: Mapping[str, int], logs: Iterable[LogState], limit_records: int | None, target: Mapping[str, int] | None = None
) -> Offsets:
    """The end of a batch that begins at `start`: at most `limit_records` further, at most up to `target`. Never behind `start`.

    The limit counts seqs, so topics that aren't read count too; it is shared fairly among the logs. A log in which only other topics grew
    stays where it is, so that it makes no empty batches. A log that is gone is left out.
    """
    ends: Offsets = {}
    room: dict[str, int] = {}
    for log in logs:
        after = start.get(log.incarnation, 0)
        newest = log.newest_seq if target is None else min(log.newest_seq, target.get(log.incarnation, 0))
        ends[log.incarnation] = after
        if log.wanted_seq > after and newest > after:
            room[log.incarnation] = newest - max(after, log.oldest_seq - 1)
    left = sum(room.values()) if limit_records is None else limit_records
    by_name = {log.incarnation: log for log in logs}
    for place, (incarnation, records) in enumerate(sorted(room.items(), key=lambda item: (item[1], item[0]))):
        share = min(records, max(1, left // (len(room) - place)))
        left -= share
        ends[incarnation] = max(ends[incarnation], by_name[incarnation].oldest_seq - 1) + share
    return _compact(ends)


def split(start: Mapping[str, int], end: Mapping[str, int]) -> list[Range]:
    """The records between two offsets in pieces of some size, the same ones for the same offsets."""
    ranges = []
    for incarnation, until in sorted(end.items()):
        after = start.get(incarnation, 0)
        records = until - after
        if records <= 0:
            continue
        pieces = min(PARTITIONS_MAX, -(-records // PARTITION_RECORDS_MIN))
        cuts = [after + records * piece // pieces for piece in range(pieces + 1)]
        ranges += [Range(incarnation, low, high) for low, high in itertools.pairwise(cuts)]
    return ranges


def _compact(offsets: Mapping[str, int]) -> Offsets:
    return {incarnation: seq for incarnation, seq in sorted(offsets.items()) if seq > 0}
