"""A record as readers get it, and the records of a batch from the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from history.records.chunk import INCARNATION_BYTES, SEQ_MAX, Origin
from history.records.epoch import GROUP_MAX, LENGTH_MAX, Epoch, time_of
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import RecordBatch
from uprotocol.encoded import EncodedMessage
from uprotocol.v1.umessage_pb2 import UMessage

Positions = dict[bytes, int]  # of a reader: log -> the last seq that it has read


@dataclass(frozen=True, slots=True)
class Record:
    """One message of a history. `time_ms`: when it was appended, Unix milliseconds. `origin`: the log and seq at which
    it was first appended, if that is another log. `epoch`: of the record, if its topic is in a group with epochs."""

    incarnation: bytes
    seq: int
    prev_seq: int
    time_ms: int
    message: Any  # a UMessage, or what reads like one
    origin: Origin | None = None
    epoch: Epoch | None = None

    @property
    def topic(self) -> tuple[bytes, bytes, bytes]:
        """Log, source and sink. `prev_seq` names the record before it of the same topic."""
        if type(self.message) is EncodedMessage:  # it has its address in serialized form
            return self.incarnation, self.message.stamp.address, b""
        attributes = self.message.attributes
        return self.incarnation, attributes.source.SerializeToString(), attributes.sink.SerializeToString()


def decode(batch: RecordBatch, read: Callable[[bytes], Any] = UMessage.FromString) -> list[Record | int] | None:
    """Returns the records; for one that is not a UMessage only its seq. None if the columns have different lengths, or
    a seq, an origin or an epoch is invalid."""
    columns = (batch.seq, batch.prev_seq, batch.time_ms, batch.message)
    if len({len(column) for column in columns}) != 1:
        return None
    if batch.seq and not (min(batch.seq) > 0 and max(*batch.seq, *batch.prev_seq) <= SEQ_MAX):
        return None
    none = [None] * len(batch.seq)
    origins = _origins(batch) if batch.origin_incarnation or batch.origin or batch.origin_seq else none
    epochs = _epochs(batch) if batch.epochs or batch.epoch else none
    if origins is None or epochs is None:
        return None
    records: list[Record | int] = []
    for seq, prev_seq, time_ms, data, origin, epoch in zip(*columns, origins, epochs, strict=True):
        try:
            records.append(Record(batch.incarnation, seq, prev_seq, time_ms, read(data), origin, epoch))
        except DecodeError:
            records.append(seq)
    return records


def _origins(batch: RecordBatch) -> Sequence[Origin | None] | None:
    """Returns one for each record; None if the columns are invalid."""
    logs, numbers, seqs = batch.origin_incarnation, batch.origin, batch.origin_seq
    if not len(numbers) == len(seqs) == len(batch.seq) or {len(log) for log in logs} - {INCARNATION_BYTES}:
        return None
    if max(numbers, default=0) > len(logs) or max(seqs, default=0) > SEQ_MAX:
        return None
    pairs = list(zip(numbers, seqs, strict=True))
    if any(number and not seq for number, seq in pairs):
        return None
    return [Origin(logs[number - 1], seq) if number else None for number, seq in pairs]


def _epochs(batch: RecordBatch) -> Sequence[Epoch | None] | None:
    """Returns one for each record; None if the columns are invalid."""
    epochs = [Epoch(epoch.group, time_of(epoch.time)) for epoch in batch.epochs]
    if len(batch.epoch) != len(batch.seq) or max(batch.epoch, default=0) > len(epochs):
        return None
    if not all(0 < len(group.encode()) <= GROUP_MAX and 0 < len(time) <= LENGTH_MAX for group, time in epochs):
        return None
    return [epochs[number - 1] if number else None for number in batch.epoch]
