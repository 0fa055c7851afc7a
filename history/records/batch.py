"""Records as columns of a reply.

chunks -> add_records -> RecordBatch -> acceptor.decode -> records
"""

from __future__ import annotations

from history.epochs.frontier import Epoch
from history.records.chunk import Chunk, numbered
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import RecordBatch


def add_records(batch: RecordBatch, chunk: Chunk) -> None:
    """Append the records of `chunk` to `batch`."""
    if chunk.origins is not None or batch.origin:
        _add_origins(batch, chunk)
    if chunk.epochs is not None or batch.epoch:
        _add_epochs(batch, chunk)
    batch.seq.extend(chunk.seqs)
    batch.prev_seq.extend(chunk.prev_seqs)
    batch.time_ms.extend([chunk.time_ms] * len(chunk))
    batch.message.extend(chunk.data)


def _add_origins(batch: RecordBatch, chunk: Chunk) -> None:
    before = [0] * (len(batch.seq) - len(batch.origin))  # these records were not followed
    origins = [None] * len(chunk) if chunk.origins is None else chunk.origins
    logs = {incarnation: index for index, incarnation in enumerate(batch.origin_incarnation, 1)}
    known = len(logs)
    batch.origin.extend(before + numbered(origins, logs))
    batch.origin_seq.extend(before + [0 if origin is None else origin.seq for origin in origins])
    batch.origin_incarnation.extend(list(logs)[known:])


def _add_epochs(batch: RecordBatch, chunk: Chunk) -> None:
    indexes = [0] * (len(batch.seq) - len(batch.epoch))  # these records have no epoch
    known = {Epoch(one.group, tuple(one.time.numbers)): index for index, one in enumerate(batch.epochs, 1)}
    for epoch in [None] * len(chunk) if chunk.epochs is None else chunk.epochs:
        if epoch is not None and epoch not in known:
            known[epoch] = len(known) + 1
            added = batch.epochs.add(group=epoch.group)
            added.time.numbers.extend(epoch.time)
        indexes.append(0 if epoch is None else known[epoch])
    batch.epoch.extend(indexes)
