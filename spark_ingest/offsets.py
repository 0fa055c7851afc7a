"""Offsets: how far Spark has read each log of a streamer. Pure.

start {log: seq} --advance(logs, limit)--> end {log: seq} --split--> [Range(log, after, until), ...]   one per task
                          |
                          +-- lost(start, logs): logs that no longer exist
                              (losses by retention are reported when the range is read)

A log is named by its incarnation in hex. A seq of 0 (before the first record) is left out, as are logs without wanted
topics. So a log without wanted records is not in a checkpoint, and its end is no loss.

Spark stores Offset in its checkpoint, as JSON: the seqs, digests of records that identify a log, and with whole epochs
the gates.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from history.records.witness import Known, up_to
from spark_ingest import epochs
from spark_ingest.epochs import Gates
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import LogState
from uprotocol.status import invalid

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
PARTITION_RECORDS_MIN: Final = 20_000  # one task reads fewer before a second one has started
PARTITIONS_MAX: Final = 16  # of one log and batch; each opens a connection to the streamer
EPOCHS: Final = "epochs"  # key in the JSON, beside the logs
_INCARNATION = re.compile(r"[0-9a-f]{32}")

Offsets = dict[str, int]


@dataclass(slots=True)
class Offset:
    """A position in each log. JSON of a log: its seq, or {"seq": ..., and more}."""

    seqs: Offsets = field(default_factory=dict)
    known: dict[str, Known] = field(default_factory=dict)  # digests of records that identify a log
    after: Offsets = field(default_factory=dict)  # of a log that went back: the begin of the batch that ends here
    unread: frozenset[str] = frozenset()  # logs in memory of which the query has read nothing yet
    gates: Gates | None = None  # None: without whole epochs

    @classmethod
    def of(cls, given: object) -> Offset:
        """From JSON. Raises UStatusError(INVALID_ARGUMENT)."""
        if not isinstance(given, dict):
            raise invalid(f"expected a JSON object of log and seq, got {given!r}")
        made = cls()
        for incarnation, value in given.items():
            if incarnation == EPOCHS:
                try:
                    made.gates = epochs.from_json(value)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    raise invalid(
                        f"{EPOCHS!r}: expected waiting epochs as a checkpoint has them, got {error}"
                    ) from None
                continue
            if not _INCARNATION.fullmatch(str(incarnation)):
                raise invalid(f"a log: expected its incarnation, 32 lower-case hex digits, got {incarnation!r}")
            entry = value if isinstance(value, dict) else {"seq": value}
            seq = _seq(incarnation, entry.get("seq"))
            if not seq:
                continue
            made.seqs[incarnation] = seq
            try:
                known = {_seq(incarnation, one): bytes.fromhex(digest) for one, digest in entry.get("known", ())}
            except (TypeError, ValueError):
                raise invalid(
                    f"'known' of log {incarnation}: expected a list of [seq, digest in hex], got {entry['known']!r}"
                ) from None
            if known:
                made.known[incarnation] = known
            if "after" in entry:
                made.after[incarnation] = _seq(incarnation, entry["after"])
            if entry.get("unread") is True:
                made.unread |= {incarnation}
        return made

    def json(self) -> dict[str, Any]:
        made = {incarnation: self.entry(incarnation) for incarnation in sorted(self.seqs)}
        return made if self.gates is None else made | {EPOCHS: epochs.to_json(self.gates)}

    def entry(self, incarnation: str) -> Any:
        """The JSON of one log."""
        made: dict[str, Any] = {"seq": self.seqs.get(incarnation, 0)}
        if known := self.known.get(incarnation):
            made["known"] = [[seq, digest.hex()] for seq, digest in sorted(known.items())]
        if incarnation in self.after:
            made["after"] = self.after[incarnation]
        if incarnation in self.unread:
            made["unread"] = True
        return made if len(made) > 1 else made["seq"]

    def back_to(self, losses: Mapping[str, LogLoss]) -> Offset:
        """Returns the offset with the logs of `losses` at the seq up to which they still agree."""
        agreed = {incarnation: loss.before - 1 for incarnation, loss in losses.items()}
        known = {one: up_to(known, agreed[one]) if one in agreed else known for one, known in self.known.items()}
        return Offset(self.seqs | agreed, known, dict(self.after), self.unread - agreed.keys(), self.gates)


@dataclass(frozen=True, slots=True)
class Range:
    """Records (after, until] of one log, and digests that identify the log. An earlier batch has read those up to
    `seq`, but they waited."""

    incarnation: str
    after: int
    until: int
    known: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)
    seq: int = field(default=0, repr=False)


@dataclass(frozen=True, slots=True)
class LogLoss:
    """Records (after, before) of one log are lost. `before` 0: the whole log is lost; `before` <= `after` + 1: the log
    went back to there."""

    incarnation: str
    after: int
    before: int

    @property
    def went_back(self) -> bool:
        return 0 < self.before <= self.after + 1

    def __str__(self) -> str:
        if not self.before:
            return f"the log {self.incarnation} and its records after seq {self.after} are lost"
        if self.went_back:
            return (
                f"the log {self.incarnation} went back (restored from a copy?): it agrees with the records read up to "
                f"seq {self.before - 1}; records {self.before} to {self.after} may be lost or replaced"
            )
        return f"records {self.after + 1} to {self.before - 1} of log {self.incarnation} are lost"


def parse(text: str) -> str | Offset:
    """`earliest`, `latest`, or offsets in JSON. Raises UStatusError(INVALID_ARGUMENT)."""
    if text.lower() in (EARLIEST, LATEST):
        return text.lower()
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise invalid(f"expected earliest, latest or a JSON object of log and seq, got {text!r}") from None
    return Offset.of(given)


def _seq(incarnation: str, seq: object) -> int:
    if type(seq) is not int or not 0 <= seq < 1 << 63:
        raise invalid(f"seq of log {incarnation}: expected a whole number from 0 to 2^63 - 1, got {seq!r}")
    return seq


def starting(where: str | Offset, logs: Iterable[LogState]) -> Offset:
    """The offset to begin at, for the present logs. Logs without wanted records are left out."""
    if isinstance(where, Offset):
        return where
    wanted = [log for log in logs if log.newest_match_seq]
    if where == EARLIEST:
        return Offset(_compact({log.incarnation.hex(): log.oldest_seq - 1 for log in wanted if log.oldest_seq}))
    assert where == LATEST, "parse returns nothing else"
    return Offset(newest(wanted), unread=frozenset(log.incarnation.hex() for log in wanted if not log.durable))


def newest(logs: Iterable[LogState]) -> Offsets:
    """The offsets at which nothing is left to read."""
    return _compact({log.incarnation.hex(): log.newest_seq for log in logs})


def lost(start: Offset, logs: Iterable[LogState]) -> list[LogLoss]:
    """The logs of `start` that no longer exist, with their records after `start`.

    Only the answer of Poll shows what retention has deleted: it distinguishes that from records of other topics.
    """
    present = {log.incarnation.hex() for log in logs}
    return [
        LogLoss(incarnation, seq, 0)
        for incarnation, seq in sorted(start.seqs.items())
        if incarnation not in present | start.unread
    ]


def advance(
    start: Mapping[str, int],
    logs: Iterable[LogState],
    limit_records: int | None,
    target: Mapping[str, int] | None = None,
) -> Offsets:
    """The end of a batch that begins at `start`: at most `limit_records` further, never beyond `target`.

    The limit counts seqs, so topics that are not read count too; the logs share it equally. A log that has only new
    records of other topics stays at its seq, to avoid empty batches. A log that no longer exists is left out.
    """
    ends: Offsets = {}
    unread: list[tuple[int, str, int]] = []  # number of records, log, seq before the first
    for log in logs:
        name = log.incarnation.hex()
        after = ends[name] = start.get(name, 0)
        newest = log.newest_seq if target is None else min(log.newest_seq, target.get(name, 0))
        if log.newest_match_seq > after and newest > after:
            begin = max(after, log.oldest_seq - 1)
            unread.append((newest - begin, name, begin))
    left = sum(records for records, _, _ in unread) if limit_records is None else limit_records
    for index, (records, name, begin) in enumerate(sorted(unread)):
        share = min(records, max(1, left // (len(unread) - index)))
        left -= share
        ends[name] = begin + share
    return _compact(ends)


def between(start: Offset, seqs: Offsets, known: Mapping[str, Known], agreed: Mapping[str, int]) -> Offset:
    """The end of a batch at `seqs`. `known`: digests of the records there; `agreed`: begin of logs that went back.

    A log without new records has the same entry as in `start`, so that Spark sees that nothing is new.
    """
    end = Offset(_compact(seqs))
    for incarnation, seq in end.seqs.items():
        stays = incarnation not in agreed and seq == start.seqs.get(incarnation)
        proof = (start.known if stays else known).get(incarnation)
        if proof:
            end.known[incarnation] = proof
        if incarnation in agreed:
            end.after[incarnation] = agreed[incarnation]
        elif stays and incarnation in start.after:
            end.after[incarnation] = start.after[incarnation]
        if stays and incarnation in start.unread:
            end.unread |= {incarnation}
    return end


def split(start: Offset, end: Offset) -> list[Range]:
    """Splits the records between two offsets into ranges; the same offsets give the same ranges."""
    ranges = []
    for incarnation, until in sorted(end.seqs.items()):
        seq = until
        if end.entry(incarnation) != start.entry(incarnation):
            seq = end.after.get(incarnation, start.seqs.get(incarnation, 0))
        after = epochs.read_from(start.gates or {}, end.gates or {}, incarnation, seq)
        known = tuple(end.known.get(incarnation, {}).items())
        records = until - after
        if records <= 0:
            continue
        pieces = min(PARTITIONS_MAX, -(-records // PARTITION_RECORDS_MIN))
        cuts = [after + records * piece // pieces for piece in range(pieces + 1)]
        waited = seq if after < seq else 0
        ranges += [Range(incarnation, low, high, known, waited) for low, high in itertools.pairwise(cuts)]
    return ranges


def needed(acked: Offset) -> Offset:
    """The positions up to which a query that has all batches up to `acked` reads nothing again."""
    if not acked.gates:
        return Offset(acked.seqs, acked.known)
    seqs = epochs.needed(acked.gates, acked.seqs)
    return Offset(seqs, {incarnation: up_to(known, seqs[incarnation]) for incarnation, known in acked.known.items()})


def _compact(offsets: Mapping[str, int]) -> Offsets:
    return {incarnation: seq for incarnation, seq in sorted(offsets.items()) if seq > 0}
