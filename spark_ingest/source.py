"""The Spark data source `uprotocol`: the histories of streamers as rows, each row exactly once.

planner process: latestOffset --Planner--> end offset     partitions: ranges of seqs     commit: may be deleted
tasks:           read(ranges) --Poll(until)--> records --decode--> Arrow batches

Spark writes start and end of a batch to its checkpoint before it reads the batch, and a range has the same records at
each reading. So an interrupted batch is read again with the same rows, and the sink recognises it by its number. With
whole epochs the offsets also contain which records wait.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import structlog
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from spark_ingest import offsets
from spark_ingest.client import HistorySession, read, shared
from spark_ingest.decode import COLUMNS, DDL, Decoder, RecordColumns
from spark_ingest.epochs import Choice
from spark_ingest.members import new_query
from spark_ingest.offsets import Counted, HistoryOffset, LogLoss, Offset, Range
from spark_ingest.options import TIME_MS_MAX, Options, as_utc
from spark_ingest.planner import Planner
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

SPARK_FORMAT: Final = "uprotocol"
# Spark asks 100 times a second, so the answer waits for new records; a stop waits for the answer
IDLE_WAIT_S: Final = 0.5
PUSHED_TOPICS_MAX: Final = 64  # more topics in a condition are not worth their comparisons
# runs where, and only where, the session has spark.sql.python.filterPushdown.enabled
_PUSHDOWN_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"

log = structlog.get_logger()


class UProtocolDataSource(DataSource):
    """`spark.readStream.format("uprotocol")` and `spark.read.format("uprotocol")`; the options are those of
    `options.Options`. A schema of some of the columns reads only those."""

    @classmethod
    def name(cls) -> str:
        return SPARK_FORMAT

    def schema(self) -> str:
        return DDL

    def reader(self, schema: StructType) -> DataSourceReader:
        options = Options.of(self.options)
        # pyspark refuses every read of a reader with `pushFilters` where the session's setting is off
        kind = FilteringReader if options.push_filters and _PUSHDOWN_WORKER in sys.modules else BatchReader
        return kind(options, _columns(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(Options.of(self.options), _columns(schema))


def register(spark: SparkSession) -> None:
    """Register the format with a `spark` that does not find it by itself."""
    spark.dataSource.register(UProtocolDataSource)


def _columns(schema: StructType) -> tuple[str, ...] | None:
    """The columns of a schema; None: all. Raises INVALID_ARGUMENT for unknown columns and other types."""
    if not schema:
        return None
    known = dict(COLUMNS)
    for field in schema:
        if field.name not in known:
            raise invalid(f"format uprotocol: unknown column {field.name!r}; known: {', '.join(known)}")
        expected, got = known[field.name].replace("long", "bigint"), field.dataType.simpleString()
        if got != expected:
            raise invalid(f"format uprotocol: column {field.name!r}: expected the type {expected}, got {got}")
    return tuple(schema.names) if schema.names != list(known) else None


@dataclass
class _Partition(InputPartition):
    ranges: list[tuple[Range, Choice | None]]


class _SourceReader:
    """What all readers do in a task. It is pickled for the tasks, so it has only options."""

    def __init__(self, options: Options, columns: tuple[str, ...] | None = None) -> None:
        self._options, self._columns = options, columns

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition. Logs malformed records and, without failOnDataLoss, losses."""
        if not isinstance(partition, _Partition):
            return  # Spark plans an empty partition if there is nothing to read
        ahead = self._options.max_clock_ahead
        decoder = Decoder(self._columns, None if ahead is None else round(ahead * 1_000))
        malformed, choices = Counter[str](), dict(partition.ranges)
        with shared(self._options) as session:
            for range, records in read(session, choices, self._on_range_loss):
                choice = choices[range]
                decoded = decoder.decode(
                    RecordColumns.of(records) if choice is None else choice.of(records), range.incarnation
                )
                malformed += decoded.malformed
                if decoded.batch.num_rows:
                    yield decoded.batch
        if malformed:
            log.warning("some records could not be decoded; their values are null", **malformed)

    def _on_loss(self, loss: LogLoss, authority: str) -> None:
        if self._options.fail_on_data_loss:
            what = f"{authority}: {loss}. Set failOnDataLoss to false to continue without them"
            raise UStatusError(UCode.DATA_LOSS, what)
        lost = max(0, loss.before - loss.after - 1)
        log.warning("data loss", authority=authority, loss=str(loss), records_lost=lost)

    def _on_range_loss(self, loss: LogLoss, range: Range) -> None:
        if range.is_backfill and loss.reason == Gap.REASON_RETENTION:
            what = "records of an added topic were deleted by retention before the query asked for them"
            log.warning(what, authority=range.authority, loss=str(loss))
        else:
            self._on_loss(loss, range.authority)

    def _partitions(self, start: Offset, end: Offset, counted: Counted) -> Sequence[InputPartition]:
        options = self._options
        ranges = offsets.ranges(start, end, options.coverage_topics)
        parts = offsets.divide(ranges, counted, options.max_records_per_partition, options.min_partitions)
        return [_Partition([(one, _choice(one, start, end)) for one in part]) for part in parts]


def _choice(range: Range, start: Offset, end: Offset) -> Choice | None:
    begun = end.begin(start).get(range.authority, HistoryOffset()).gates
    ended = end.histories[range.authority].gates
    if (begun is None and ended is None) or range.is_backfill:
        return None
    return Choice(begun or {}, ended or {}, range.incarnation, range.seq)


class BatchReader(_SourceReader, DataSourceReader):
    """All records from the start to the end that the options name; without any, of the present."""

    def partitions(self) -> Sequence[InputPartition]:
        with closing(HistorySession(self._options)) as session:
            planner = Planner(session, self._on_loss)
            try:
                start, end = session.run(planner.whole())
                return self._partitions(start, end, planner.counted)
            finally:
                session.run(planner.fleet.close())


class FilteringReader(BatchReader):
    """Asks only for the records that conditions on `authority`, `topic`, `path` and `append_time` select. Spark still
    compares each row."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for one in filters:
            self._options = narrowed(self._options, one)
            yield one


def narrowed(options: Options, filter: Filter) -> Options:
    """Returns options that ask for fewer records, among them all that match `filter`; or `options` itself."""
    values = filter.value if isinstance(filter, In) else (filter.value,) if isinstance(filter, EqualTo) else ()
    column = getattr(filter, "attribute", ())
    if column == ("append_time",):
        return _narrowed_time(options, filter)
    if not values or not all(isinstance(value, str) for value in values):
        return options
    patterns = options.coverage_topics or (uris.format(uris.ANY),)
    if column == ("authority",):
        topics = [
            uris.format(uris.of_authority(pattern, value))
            for pattern in map(uris.parse, patterns)
            for value in values
            if pattern.authority_name in (uris.WILDCARD_AUTHORITY, value)
        ]
    elif column == ("topic",):
        topics = _selected(patterns, values)
    elif column == ("path",) and all(value in options.path_topics for value in values):
        topics = _selected(patterns, [options.path_topics[value] for value in values])
    else:
        return options
    if not topics or len(topics) > PUSHED_TOPICS_MAX:
        return options
    return options.model_copy(update={"topics": tuple(topics)})


def _selected(patterns: Sequence[str], topics: Iterable[str]) -> list[str]:
    """The part of `topics` that the patterns meet; [] if one is no topic."""
    selected = list[str]()
    for text in topics:
        try:
            topic = uris.parse(text)
        except UStatusError:
            return []
        if any(uris.meets(uris.parse(pattern), topic) for pattern in patterns):
            selected.append(text)
    return selected


def _narrowed_time(options: Options, filter: Filter) -> Options:
    time = getattr(filter, "value", None)
    if not isinstance(time, datetime):
        return options
    time_ms = math.floor(as_utc(time).timestamp() * 1_000)
    earliest, latest = options.starting_timestamp, options.ending_timestamp
    may_start = earliest is not None or options.starting_offsets == offsets.EARLIEST
    may_start = may_start and not options.starting_offsets_by_timestamp
    may_end = latest is not None or options.ending_offsets == offsets.LATEST
    if may_start and isinstance(filter, EqualTo | GreaterThan | GreaterThanOrEqual):
        earliest = max(earliest or 0, time_ms)
    if may_end and isinstance(filter, EqualTo | LessThan | LessThanOrEqual):
        latest = min(TIME_MS_MAX if latest is None else latest, time_ms + 1)
    return options.model_copy(update={"starting_timestamp": earliest, "ending_timestamp": latest})


class StreamReader(_SourceReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches. The planner process keeps one session, for plans and for the cursors."""

    def __init__(self, options: Options, columns: tuple[str, ...] | None = None) -> None:
        super().__init__(options, columns)
        if (options.ending_offsets, options.ending_timestamp) != (offsets.LATEST, None):
            raise invalid("format uprotocol: endingOffsets and endingTimestamp are for spark.read, not for a stream")
        self._session = HistorySession(options)
        self._planner = Planner(self._session, self._on_loss)

    def __reduce__(self) -> tuple[Any, ...]:
        return _SourceReader, (self._options, self._columns)  # in a task

    def initialOffset(self) -> dict[str, Any]:
        return self._session.run(self._planner.begin(new_query())).json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_records_per_batch)

    def prepareForTriggerAvailableNow(self) -> None:
        self._session.run(self._planner.fleet.end_at_present())

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        assert isinstance(limit, ReadMaxRows | ReadAllAvailable), (
            f"expected ReadMaxRows or ReadAllAvailable, got {limit}"
        )
        begin = Offset.of(start, self._options.authority)
        if isinstance(limit, ReadMaxRows):
            end = self._session.run(self._planner.latest(begin, limit.max_rows, IDLE_WAIT_S))
        else:  # Trigger.Once
            end = self._session.run(self._planner.present(begin))
        return dict(start) if end == begin else end.json()

    def reportLatestOffset(self) -> dict[str, Any]:
        """By authority, how far the query is behind; Spark shows it as `latestOffset` of the source's progress."""
        return self._planner.fleet.lag()

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        begun, ended = (Offset.of(one, self._options.authority) for one in (start, end))
        self._session.run(self._planner.reread(begun, ended))
        return self._partitions(begun, ended, self._planner.counted)

    def commit(self, end: Mapping[str, Any]) -> None:
        """All records up to `end` are in the sink, so the histories need not keep them for this query."""
        self._session.run(self._planner.commit(Offset.of(end, self._options.authority)))

    def stop(self) -> None:
        self._session.run(self._planner.fleet.close())
        self._session.close()
