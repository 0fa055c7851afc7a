"""The job: from a streamer's history to Parquet, without loss or duplicates, whatever is killed on the way.

config (TOML) --> session (quiet, local, small) --> readStream uprotocol --> date column --> writeStream parquet
                                                                                                  | and checkpoint
                                          SIGTERM, SIGINT --> the query stops after what it is at --> Report
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spark_ingest import java
from spark_ingest.client import Options
from transports.plugin import explain
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

STOP_CHECK_S: Final = 1  # how late a SIGTERM is seen
STOP_TIMEOUT_MS: Final = 30_000  # a batch that is cut off is read again, so there is no reason to wait for long
PROGRESS_KEPT: Final = 1_000  # batches between two looks at the counts, one a second
PARTITION_COLUMNS: Final = ("authority", "date")  # what a reader asks for first; few enough for files of some size

log = structlog.get_logger()


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Options):
    """[source]: the options of the format, in snake_case."""

    model_config = ConfigDict(alias_generator=None)


class Sink(_Section):
    """[sink]: where the Parquet goes. The checkpoint belongs to it: they are kept or deleted together."""

    path: Path
    """Parquet in directories `authority=A/date=D`"""
    checkpoint: Path
    """how far the query is; belongs to `path`: keep or delete both"""


class Trigger(_Section):
    """[trigger]: read all there is and end, or a batch every so often."""

    available_now: bool = False
    """read all there is and end"""
    processing_time_ms: int | None = Field(default=None, ge=0)
    """from one batch to the next. Without either, as soon as one is done"""

    @model_validator(mode="after")
    def _one_of_them(self) -> Trigger:
        if self.available_now and self.processing_time_ms is not None:
            raise ValueError("available_now and processing_time_ms exclude each other")
        return self


class Spark(_Section):
    """[spark]"""

    master: str = "local[2]"
    """where Spark runs"""
    memory_mib: int = Field(default=768, ge=512)  # below 450 MiB Spark refuses to start
    """of the JVM"""
    conf: dict[str, str] = {}
    """any setting of Spark"""


class Config(_Section):
    source: Source
    sink: Sink
    trigger: Trigger = Trigger()
    spark: Spark = Spark()


class Report(NamedTuple):
    """What one run did: rows and micro-batches written."""

    rows: int
    batches: int


def load(path: Path) -> Config:
    """The configuration in `path`. Raises UStatusError: NOT_FOUND, or INVALID_ARGUMENT with every wrong key."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UStatusError(UCode.NOT_FOUND, f"the configuration can't be read: {error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise invalid(f"{path} is not TOML: {error}") from None
    try:
        return Config.model_validate(given)
    except (ValidationError, UStatusError) as error:
        why = error.message if isinstance(error, UStatusError) else explain(error, Config)
        raise invalid(f"{path}: {why}") from None


def session(config: Spark | None = None, name: str = "up-streamer") -> SparkSession:
    """A quiet local session: loopback only, no UI, UTC, Arrow. Finds a Java first; raises as `java.find`."""
    config = config or Spark()
    java.use()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    from pyspark.sql import SparkSession  # after JAVA_HOME: the import is what takes its time

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
    builder = SparkSession.builder.master(config.master).appName(name)
    for key, value in conf.items():
        builder = builder.config(key, value)
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        return builder.getOrCreate()
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)  # Spark puts its own there, which cancels jobs but stops nothing


def stream(spark: SparkSession, config: Config) -> DataFrame:
    """The rows of the source, with the column `date` for the sink's directories."""
    from pyspark.sql.functions import col, to_date

    source = config.source
    if not source.consumer:  # the checkpoint is what makes a query this query
        digest = hashlib.sha256(str(config.sink.checkpoint.resolve()).encode()).hexdigest()[:16]
        source = source.model_copy(update={"consumer": f"spark-{digest}"})
    reader = spark.readStream.format("uprotocol")
    for name, value in options(source).items():
        reader = reader.option(name, value)
    return reader.load().withColumn("date", to_date(col("ts")))


def options(source: Options) -> dict[str, str]:
    """`source` as options of the format."""
    import json

    given: dict[str, Any] = Options.model_validate(source.model_dump()).model_dump(by_alias=True)
    given["topics"] = ",".join(source.topics)
    given["transportConfig"] = json.dumps(source.transport_config)
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}


def start(spark: SparkSession, config: Config) -> StreamingQuery:
    """Begin, or go on from the checkpoint."""
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


def run(config: Config, stopping: threading.Event | None = None) -> Report:
    """Run until `stopping`, or until all is read with available_now. Raises UStatusError: why the query failed."""
    stopping = stopping or threading.Event()
    spark = session(config.spark)
    try:
        query = start(spark, config)
        log.info("ingesting", source=config.source.authority, sink=str(config.sink.path), query=str(query.id))
        return _follow(query, stopping)
    finally:
        with contextlib.suppress(Exception):  # the JVM may be gone already, by the same signal
            spark.stop()


def _follow(query: StreamingQuery, stopping: threading.Event) -> Report:
    from pyspark.errors import StreamingQueryException

    rows: dict[int, int] = {}
    try:
        ended = False
        while not ended:
            ended = bool(query.awaitTermination(STOP_CHECK_S))
            rows |= {progress.batchId: progress.numInputRows for progress in query.recentProgress}
            if stopping.is_set() and not ended:
                query.stop()
                ended = True
    except StreamingQueryException as error:
        raise UStatusError(UCode.ABORTED, _reason(str(error))) from error
    except Exception:
        if not stopping.is_set():
            raise
        log.warning("Spark went away while it was being stopped; the next run goes on from the checkpoint")
    return Report(sum(rows.values()), sum(count > 0 for count in rows.values()))


def _reason(text: str) -> str:
    """The UStatusError of a task or of the planner within Spark's many lines, else their first one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line.partition("UStatusError: ")[2] for line in lines if "UStatusError: " in line]
    return ours[0] if ours else lines[0] if lines else "the query failed and didn't say why"


@contextlib.contextmanager
def stop_on_signals(signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)) -> Iterator[threading.Event]:
    """An event that is set by the first of `signals`. Main thread only; the former handlers come back at the end."""
    stopping = threading.Event()
    former: dict[signal.Signals, Callable[..., Any] | int | None] = {}
    for number in signals:
        former[number] = signal.signal(number, lambda *_: stopping.set())
    try:
        yield stopping
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
