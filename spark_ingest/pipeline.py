"""The job: writes a streamer's history to Parquet, without loss or duplicates even if processes are killed.

config (TOML) --> session (quiet, local, small) --> readStream uprotocol --> date column --> writeStream parquet
                                                                                                  | and checkpoint
                                          SIGTERM, SIGINT --> the query stops --> IngestReport
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spark_ingest import java, parquet
from spark_ingest.decode import MALFORMED
from spark_ingest.options import Options
from transports.plugin import explain
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

STOP_CHECK_S: Final = 1  # a SIGTERM is noticed within this time
STOP_TIMEOUT_MS: Final = 30_000  # short, since an interrupted batch is read again
PROGRESS_KEPT: Final = 1_000  # batches between two readings of the counts, one per second
METRICS: Final = "uprotocol"  # name of the observed metrics: malformed rows of a batch by kind
PARTITION_COLUMNS: Final = ("authority", "date")  # readers filter by these; few enough that files do not get too small

log = structlog.get_logger()


class _IngestSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Options):
    """[source]: the options of the format, in snake_case."""

    model_config = ConfigDict(alias_generator=None)


class ParquetSink(_IngestSection):
    """[sink]: where the Parquet is written. Keep or delete it and the checkpoint together."""

    path: Path
    """Parquet in directories `authority=A/date=D`"""
    checkpoint: Path
    """progress of the query; keep or delete it together with `path`"""


class Trigger(_IngestSection):
    """[trigger]: read all present records and end, or make a batch at intervals."""

    available_now: bool = False
    """read all present records and end"""
    processing_time_ms: int | None = Field(default=None, ge=0)
    """interval of batches. Default: each batch begins when the previous one is done"""

    @model_validator(mode="after")
    def _one_of_them(self) -> Trigger:
        if self.available_now and self.processing_time_ms is not None:
            raise ValueError("available_now and processing_time_ms exclude each other")
        return self


class Spark(_IngestSection):
    """[spark]"""

    master: str = "local[2,4]"
    """URL of the Spark master; `local[2,4]`: two tasks at a time, each of which may fail three times"""
    memory_mib: int = Field(default=768, ge=512)  # below 450 MiB Spark refuses to start
    """heap of the JVM"""
    conf: dict[str, str] = {}
    """settings of Spark"""


class IngestConfig(_IngestSection):
    source: Source
    sink: ParquetSink
    trigger: Trigger = Trigger()
    spark: Spark = Spark()


class IngestReport(NamedTuple):
    """Rows and micro-batches that one run has written. `malformed`: how many of the rows have unreadable parts, by
    kind, one of decode.MALFORMED."""

    rows: int
    batches: int
    malformed: dict[str, int]


def load(path: Path) -> IngestConfig:
    """The configuration in `path`. Raises UStatusError: NOT_FOUND, or INVALID_ARGUMENT with every wrong key."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UStatusError(UCode.NOT_FOUND, f"cannot read the configuration: {error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise invalid(f"{path} is not TOML: {error}") from None
    try:
        return IngestConfig.model_validate(given)
    except (ValidationError, UStatusError) as error:
        why = error.message if isinstance(error, UStatusError) else explain(error, IngestConfig)
        raise invalid(f"{path}: {why}") from None


def session(config: Spark | None = None) -> SparkSession:
    """A quiet local session: loopback only, no UI, UTC, Arrow. Finds a Java first; raises as `java.find`."""
    config = config or Spark()
    java.use()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    from pyspark.sql import SparkSession  # slow, and needs JAVA_HOME

    log4j = resources.files("spark_ingest") / "log4j2.properties"
    conf = {
        "spark.driver.memory": f"{config.memory_mib}m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{log4j} -XX:+UseSerialGC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.stopTimeout": str(STOP_TIMEOUT_MS),
        "spark.sql.streaming.numRecentProgressUpdates": str(PROGRESS_KEPT),
        "spark.sql.streaming.metricsEnabled": "false",
        **config.conf,
    }
    builder = SparkSession.builder.master(config.master).appName("up-streamer")
    for key, value in conf.items():
        builder = builder.config(key, value)
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        return builder.getOrCreate()
    finally:
        if threading.current_thread() is threading.main_thread():
            # Spark replaces it by a handler that cancels jobs but does not stop the query
            signal.signal(signal.SIGINT, interrupt)


def stream(spark: SparkSession, config: IngestConfig) -> DataFrame:
    """The rows of the source, with the column `date` for the sink's directories. The progress of a query has how many
    of them are malformed, as the observed metrics `uprotocol`."""
    from pyspark.sql.functions import col, count_if, lit, to_date

    reader = spark.readStream.format("uprotocol")
    for name, value in options(config.source).items():
        reader = reader.option(name, value)
    rows = reader.load().withColumn("date", to_date(col("ts")))
    counts = [count_if(col("malformed") == lit(kind)).alias(kind) for kind in MALFORMED]
    return rows.observe(METRICS, *counts)


def options(source: Options) -> dict[str, str]:
    """`source` as options of the format."""
    given = Options.model_validate(source.model_dump()).model_dump(by_alias=True, exclude_defaults=True)
    return {name: _text(value) for name, value in given.items()}


def _text(value: Any) -> str:
    """The text of an option."""
    if isinstance(value, tuple):
        return ",".join(value)
    return json.dumps(value) if isinstance(value, dict | bool) else str(value)


def check_sink(path: Path, checkpoint: Path) -> None:
    """Check that a Parquet sink and a checkpoint belong together, before the query is started; for own programs, too.

    Spark skips batches that the sink lists as committed. So a new or older checkpoint beside a sink would lose the next
    batches of the query, and a checkpoint beside a new sink has lost all rows before it. Raises FAILED_PRECONDITION.
    """
    written, planned = _newest_batch(path / parquet.METADATA), _newest_batch(checkpoint / "offsets")
    if written is not None and planned is None:
        why = f"has rows of an earlier query, but {checkpoint} has no batch of it"
    elif written is not None and planned is not None and written > planned:
        why = f"has rows of batch {written}, but {checkpoint} is an older copy, with batches up to {planned} only"
    elif written is None and _newest_batch(checkpoint / "commits") is not None:
        raise UStatusError(
            UCode.FAILED_PRECONDITION,
            f"{checkpoint} has committed batches, but {path} has none of their rows: delete both, or restore {path}",
        )
    else:
        return
    what = f"{path} {why}. Spark would skip the next batches of the query: delete both, or restore {checkpoint}"
    raise UStatusError(UCode.FAILED_PRECONDITION, what)


def _newest_batch(folder: Path) -> int | None:
    """The highest batch number among the files of a folder that Spark writes; None if it has no batch."""
    names = (file.name.removesuffix(".compact") for file in folder.glob("[0-9]*"))
    return max((int(name) for name in names if name.isdigit()), default=None)


def start(spark: SparkSession, config: IngestConfig) -> StreamingQuery:
    """Start the query, from its checkpoint if there is one. Raises as `check_sink`."""
    check_sink(config.sink.path, config.sink.checkpoint)
    writer: DataStreamWriter = (
        stream(spark, config)
        .writeStream.format("parquet")
        .partitionBy(*PARTITION_COLUMNS)
        .option("checkpointLocation", str(config.sink.checkpoint))
        .option("path", str(config.sink.path))
    )
    if config.trigger.available_now:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{config.trigger.processing_time_ms or 0} milliseconds").start()


def run(config: IngestConfig, stopping: threading.Event) -> IngestReport:
    """Run until `stopping`, or with available_now until all is read. Raises UStatusError if the query fails."""
    spark = session(config.spark)
    try:
        query = start(spark, config)
        log.info("ingesting", source=config.source.authority, sink=str(config.sink.path), query=str(query.id))
        return _follow(query, stopping)
    finally:
        with contextlib.suppress(Exception):  # the same signal may have ended the JVM already
            spark.stop()


def _follow(query: StreamingQuery, stopping: threading.Event) -> IngestReport:
    from pyspark.errors import StreamingQueryException

    rows, malformed = dict[int, int](), dict[int, dict[str, int]]()
    try:
        ended = False
        while not ended:
            ended = bool(query.awaitTermination(STOP_CHECK_S))
            for progress in query.recentProgress:
                rows[progress.batchId] = progress.numInputRows
                if (observed := progress.observedMetrics.get(METRICS)) is not None:
                    malformed[progress.batchId] = observed.asDict()
            if stopping.is_set() and not ended:
                query.stop()
                ended = True
    except StreamingQueryException as error:
        raise failure(str(error)) from error
    except Exception:
        if not stopping.is_set():
            raise
        log.warning("Spark ended while it was being stopped; the next run continues from the checkpoint")
    total = {kind: sum(counts[kind] for counts in malformed.values()) for kind in MALFORMED}
    return IngestReport(sum(rows.values()), sum(count > 0 for count in rows.values()), total)


def failure(text: str) -> UStatusError:
    """The UStatusError of a task or of the planner in Spark's error text; else ABORTED with the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line.partition("UStatusError: ")[2] for line in lines if "UStatusError: " in line]
    name, _, message = ours[0].partition(": ") if ours else ("", "", "")
    if code := dict(UCode.items()).get(name):
        return UStatusError(code, message)
    return UStatusError(UCode.ABORTED, lines[0] if lines else "the query failed without a reason")


@contextlib.contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM or SIGINT sets. Main thread only; the former handlers are restored at the end."""
    stopping = threading.Event()
    former = {one: signal.signal(one, lambda *_: stopping.set()) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopping
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
