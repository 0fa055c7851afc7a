"""The Spark data source `uprotocol`: the history of a streamer as rows, each exactly once.

driver:   latestOffset --Describe--> {log: seq}    partitions: ranges of seqs   commit --Poll(acked)--> may be forgotten
tasks:    read(range)  --Poll(until)--> records --decode--> Arrow batches

Spark writes start and end of a batch to its checkpoint before it reads; a range reads the same records whenever it is
read. So a batch that was cut off is read again as it was, and the sink knows it by its number.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import structlog
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from spark_ingest import offsets
from spark_ingest.client import History, Options
from spark_ingest.decode import DDL, Decoder
from spark_ingest.offsets import LogState, Loss, Offset, Offsets, Range
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

FORMAT: Final = "uprotocol"
IDLE_WAIT_MS: Final = 500  # Spark asks 100 times a second: the answer waits for news, and a stop for the answer

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
    """Make the format known to a `spark` that does not find up-streamer on its path by itself."""
    spark.dataSource.register(UProtocolDataSource)


class _Partition(InputPartition):
    def __init__(self, range: Range) -> None:
        super().__init__(None)
        self.range = range


class _Reader:
    """What both readers do in a task. Travels to the tasks by pickle, so it holds options only."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one range. Logs what was malformed or, without failOnDataLoss, lost."""
        if not isinstance(partition, _Partition):
            return  # what Spark plans where there is nothing to read
        decoder, malformed = Decoder(), Counter[str]()
        with History(self._options) as history:
            for records in history.read(partition.range, self._on_loss):
                decoded = decoder.decode(records.seq, records.time_ms, records.message, records.epochs, records.epoch)
                malformed += decoded.malformed
                yield decoded.batch
        if malformed:
            log.warning(
                "some records could not be decoded; their values are null", range=str(partition.range), **malformed
            )

    def _on_loss(self, loss: Loss) -> None:
        if self._options.fail_on_data_loss:
            why = "the retention passed them, or the streamer lost them"
            what = f"{loss}: {why}. Set failOnDataLoss to false to go on with what there is"
            raise UStatusError(UCode.DATA_LOSS, what)
        log.warning("data loss", loss=str(loss), records_lost=max(0, loss.before - loss.after - 1))

    def _plan(
        self,
        history: History,
        start: Offset,
        logs: Iterable[LogState],
        limit_records: int | None,
        target: Offsets | None = None,
    ) -> Offset:
        """The end of a batch that begins at `start`. Tells of logs that are gone, or not what they were at `start`."""
        for loss in offsets.lost(start, logs):
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
        return offsets.between(start, seqs, known, {name: begin.seqs[name] for name in back})


class BatchReader(_Reader, DataSourceReader):
    """All records from startingOffsets to the newest at the time of planning."""

    def partitions(self) -> Sequence[InputPartition]:
        with History(self._options) as history:
            logs = history.describe()
            start = offsets.starting(offsets.parse(self._options.starting_offsets), logs)
            end = self._plan(history, start, logs, None)
        return [_Partition(range) for range in offsets.split(start, end)]


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches. On the driver it keeps one connection, for Describe and for the consumer's cursor."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._history: History | None = None
        self._target: Offsets | None = None
        self._logs: list[LogState] = []  # as described last
        self._acked: Offset | None = None  # what this run has told the history

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["_options"])  # type: ignore[misc]  # a reader that travelled starts anew

    def initialOffset(self) -> dict[str, Any]:
        start = offsets.starting(offsets.parse(self._options.starting_offsets), self._describe())
        known, _ = self._driver.prove(start.seqs, start.known)
        start.known = start.known or known
        self._hold(start)
        return start.json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_records_per_batch)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = offsets.newest(self._describe())

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        assert isinstance(limit, ReadMaxRows | ReadAllAvailable), f"Spark gives the limit that it was told, got {limit}"
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
            log.warning("the streamer is away; no new batch", authority=self._options.authority, error=str(error))
            time.sleep(IDLE_WAIT_MS / 1000)
            return begin.json()
        return end.json()

    def _end(self, start: Offset, limit_records: int | None) -> Offset:
        end = self._plan(self._driver, start, self._describe(), limit_records, self._target)
        if self._acked is None or (end == start and self._acked != start):
            # All before `start` is in the sink: Spark finishes a batch, a restarted one too, before it asks for the
            # next. But it calls `commit` only when it begins the next, which may be never.
            self._hold(start)
        return end

    def _describe(self) -> list[LogState]:
        self._logs = self._driver.describe()
        return self._logs

    def _hold(self, acked: Offset) -> None:
        seqs = {log.incarnation: acked.seqs.get(log.incarnation, 0) for log in self._logs or self._describe()}
        self._driver.hold(Offset(seqs, acked.known))
        self._acked = acked

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        return [_Partition(range) for range in offsets.split(Offset.of(start), Offset.of(end))]

    def commit(self, end: Mapping[str, Any]) -> None:
        """All up to `end` is in the sink: the history need not keep it for us."""
        try:
            self._hold(Offset.of(end))
        except UStatusError as error:
            if not error.retryable:
                raise
            log.warning(
                "the streamer is away; it keeps what was committed", authority=self._options.authority, error=str(error)
            )

    def stop(self) -> None:
        if self._history is not None:
            self._history.close()
            self._history = None

    @property
    def _driver(self) -> History:
        if self._history is None:
            self._history = History(self._options)
        return self._history
