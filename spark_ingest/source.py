"""The Spark data source `uprotocol`: the history of a streamer as rows, each row exactly once.

driver:   latestOffset --Describe--> {log: seq}    partitions: ranges of seqs   commit --Poll(acked)--> may be deleted
tasks:    read(range)  --Poll(until)--> records --decode--> Arrow batches

Spark writes start and end of a batch to its checkpoint before it reads the batch, and a range has the same records at
each reading. So an interrupted batch is read again with the same rows, and the sink recognises it by its number. With
whole epochs the offsets also contain which records wait.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from spark_ingest import epochs, offsets
from spark_ingest.client import History, Options
from spark_ingest.decode import DDL, Decoder, RecordColumns
from spark_ingest.epochs import BatchFrontiers, Choice, FrontierRecord, Gates
from spark_ingest.offsets import LogLoss, Offset, Offsets, Range
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import LogState
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

FORMAT: Final = "uprotocol"
# Spark asks 100 times a second, so the answer waits for new records; a stop waits for the answer
IDLE_WAIT_MS: Final = 500

log = structlog.get_logger()


class UProtocolDataSource(DataSource):
    """`spark.readStream.format("uprotocol")` and `spark.read.format("uprotocol")`; the options are those of
    `client.Options`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return DDL

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(Options.of(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(Options.of(self.options))


def register(spark: SparkSession) -> None:
    """Register the format with a `spark` that does not find it by itself."""
    spark.dataSource.register(UProtocolDataSource)


@dataclass
class _Partition(InputPartition):
    range: Range
    choice: Choice | None


class _SourceReader:
    """What both readers do in a task. It is pickled for the tasks, so it has only options."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one range. Logs malformed records and, without failOnDataLoss, losses."""
        if not isinstance(partition, _Partition):
            return  # Spark plans an empty partition if there is nothing to read
        decoder, malformed = Decoder(), Counter[str]()
        with closing(History(self._options)) as history:
            for records in history.read(partition.range, self._on_loss):
                columns = partition.choice.of(records) if partition.choice else RecordColumns.of(records)
                decoded = decoder.decode(columns, records.incarnation.hex())
                malformed += decoded.malformed
                if decoded.batch.num_rows:
                    yield decoded.batch
        if malformed:
            log.warning(
                "some records could not be decoded; their values are null", range=str(partition.range), **malformed
            )

    def _on_loss(self, loss: LogLoss) -> None:
        if self._options.fail_on_data_loss:
            why = "retention deleted them, or the streamer lost them"
            what = f"{loss}: {why}. Set failOnDataLoss to false to continue without them"
            raise UStatusError(UCode.DATA_LOSS, what)
        log.warning("data loss", loss=str(loss), records_lost=max(0, loss.before - loss.after - 1))

    def _plan(
        self,
        history: History,
        start: Offset,
        logs: Sequence[LogState],
        limit_records: int | None,
        target: Offsets | None = None,
    ) -> Offset:
        """Returns the end of a batch that begins at `start`. Reports logs that no longer exist or went back."""
        missing = offsets.lost(start, logs)
        for loss in missing:
            self._on_loss(loss)
        seqs = offsets.advance(start.seqs, logs, limit_records, target)
        known, back = history.prove(seqs, start.known)
        begin = start
        if back:
            for loss in back.values():
                self._on_loss(loss)
            begin = start.back_to(back)
            seqs = offsets.advance(begin.seqs, logs, limit_records, target)
            known, _ = history.prove(seqs, begin.known)
        end = offsets.between(start, seqs, known, {name: begin.seqs[name] for name in back})
        if self._options.epochs == "complete":
            lost = frozenset(loss.incarnation for loss in missing)
            end.gates = self._gates(history, start, begin, end, frozenset(back), lost)
        return end

    def _gates(
        self, history: History, start: Offset, begin: Offset, end: Offset, back: frozenset[str], missing: frozenset[str]
    ) -> Gates | None:
        if not back | missing and start.seqs == end.seqs:
            return start.gates
        gates = start.gates
        if gates is None:
            snapshot = history.snapshot({name: start.seqs.get(name, 0) for name in end.seqs})
            gates = epochs.begin(snapshot, is_new=False)
        frontiers, lossy = list[FrontierRecord](), set[str]()
        for name, until in end.seqs.items():
            after = begin.seqs.get(name, 0)
            if until > after:
                found, is_lossy = history.frontiers(Range(name, after, until, tuple(begin.known.get(name, {}).items())))
                frontiers += found
                lossy |= {name} if is_lossy and after else set()
        topics = [uris.parse(topic) for topic in self._options.topics]
        batch = BatchFrontiers(begin.seqs, end.seqs, frontiers, topics, frozenset(lossy), back, missing)
        return epochs.advance(gates, batch, _now_ms())

    def _first_gates(self, history: History, start: Offset) -> Gates:
        return epochs.begin(history.snapshot(start.seqs) if start.seqs else (), is_new=True)

    def _partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        ranges = offsets.split(start, end)
        if start.gates is None and end.gates is None:
            return [_Partition(range, None) for range in ranges]
        begun, ended = start.gates or {}, end.gates or {}
        return [_Partition(range, Choice(begun, ended, range.incarnation, range.seq)) for range in ranges]


class BatchReader(_SourceReader, DataSourceReader):
    """All records from startingOffsets to the newest at the time of planning."""

    def partitions(self) -> Sequence[InputPartition]:
        with closing(History(self._options)) as history:
            logs = history.describe()
            start = offsets.starting(offsets.parse(self._options.starting_offsets), logs)
            if self._options.epochs == "complete" and start.gates is None:
                start.gates = self._first_gates(history, start)
            end = self._plan(history, start, logs, None)
        return self._partitions(start, end)


class StreamReader(_SourceReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches. The driver keeps one connection, for Describe and for the consumer's cursor."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._driver = History(options)
        self._target: Offsets | None = None
        self._logs: list[LogState] = []  # the latest description
        self._acked: Offset | None = None  # the offset that this run has confirmed to the history
        self._heard_ms = 0  # since then the streamer has answered without a failure, Unix ms; 0: the last call failed

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._options,)  # in a task it is a new one

    def initialOffset(self) -> dict[str, Any]:
        self._logs = self._driver.describe()
        start = offsets.starting(offsets.parse(self._options.starting_offsets), self._logs)
        known, _ = self._driver.prove(start.seqs, start.known)
        start.known = start.known or known
        if self._options.epochs == "complete" and start.gates is None:
            start.gates = self._first_gates(self._driver, start)
        self._hold(start)
        return start.json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_records_per_batch)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = offsets.newest(self._driver.describe())

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        assert isinstance(limit, ReadMaxRows | ReadAllAvailable), (
            f"expected ReadMaxRows or ReadAllAvailable, got {limit}"
        )
        begin = Offset.of(start)
        limit_records = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        try:
            end = self._end(begin, limit_records)
            if end == begin and self._target is None:
                self._driver.wait(begin, min(IDLE_WAIT_MS, self._options.poll_timeout_ms))
                end = self._end(begin, limit_records)
        except UStatusError as error:
            if not error.retryable or self._target is not None:
                raise
            self._heard_ms = 0
            log.warning("the streamer is away; no new batch", authority=self._options.authority, error=str(error))
            time.sleep(IDLE_WAIT_MS / 1000)
            return begin.json()
        return end.json()

    def _end(self, start: Offset, limit_records: int | None) -> Offset:
        self._logs = self._driver.describe()
        end = self._plan(self._driver, start, self._logs, limit_records, self._target)
        self._heard_ms = self._heard_ms or _now_ms()
        if end.gates:
            self._give_up(end, end.gates)
        if self._acked is None or (end == start and self._acked != start):
            # All records before `start` are in the sink: Spark finishes a batch, also after a restart, before it asks
            # for the next one. But it calls `commit` only when the next one begins, which may never happen.
            self._hold(start)
        return end

    def _give_up(self, end: Offset, gates: Gates) -> None:
        """Deliver epochs whose keeper has sent no frontier for too long, if no wanted records are left to read."""
        wanted = {log.incarnation.hex(): log.newest_match_seq for log in self._logs}
        if self._target is not None:
            wanted = {name: min(seq, self._target.get(name, 0)) for name, seq in wanted.items()}
        if any(seq > end.seqs.get(name, 0) for name, seq in wanted.items()):
            return
        now_ms, timeout_ms = _now_ms(), round(self._options.epoch_timeout * 1000)
        # a run with available_now does not wait; another one waits until the streamer has been back for the time-out
        if self._target is not None or now_ms - self._heard_ms > timeout_ms:
            end.gates = epochs.given_up(gates, now_ms, timeout_ms)

    def _hold(self, acked: Offset) -> None:
        needed, logs = offsets.needed(acked), self._logs or self._driver.describe()
        seqs = {name: needed.seqs.get(name, 0) for name in (log.incarnation.hex() for log in logs)}
        self._driver.hold(Offset(seqs, needed.known))
        self._acked = acked

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        return self._partitions(Offset.of(start), Offset.of(end))

    def commit(self, end: Mapping[str, Any]) -> None:
        """All records up to `end` are in the sink, so the history need not keep them for this query."""
        try:
            self._hold(Offset.of(end))
        except UStatusError as error:
            if not error.retryable:
                raise
            log.warning(
                "the streamer is away; it still keeps records that were committed",
                authority=self._options.authority,
                error=str(error),
            )

    def stop(self) -> None:
        self._driver.close()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
