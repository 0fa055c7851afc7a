"""Queries whose transport needs secrets, some of which fail; all that Spark shows of them goes into files.

python secret_job.py PORT FOLDER PASSWORD KEY BROKEN
    PASSWORD   of the user `spark` at the history
    KEY        a private key in transportSecrets, beside settings that never name a password
    BROKEN     a password in settings that are not JSON
    FOLDER/shown/PLACE/...: plan, progress, errors, ui, api, temporary, commands
    FOLDER/events, FOLDER/checkpoint: as Spark writes them; stderr: its log
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import traceback
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spark_ingest import pipeline
from tests.spark import killing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PAGES_MAX: Final = 300  # of the UI; it has some 50 after these queries
DEADLINE_S: Final = 60


class Job:
    def __init__(self, port: int, folder: Path, secret: str, key: str, broken: str) -> None:
        self._folder, self._secret, self._key, self._broken = folder, secret, key, broken
        self._shown = folder / "shown"
        self._shown.mkdir()
        settings = {"mode": "client", "connect": [f"tcp/127.0.0.1:{port}"], "user": "spark", "password": secret}
        self._options = {
            "transport": "zenoh",
            "transportConfig": json.dumps(settings),
            "authority": "gateway",
            "localAuthority": "spark1",
            "maxRecordsPerBatch": "1000",
            "pollTimeoutMs": "5000",
            "startTimeout": "2",
        }

    def run(self) -> None:
        conf = {
            "spark.ui.enabled": "true",
            "spark.ui.port": "0",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": (self._folder / "events").as_uri(),
            "spark.local.dir": str(self._folder / "local"),
            "spark.sql.streaming.metricsEnabled": "true",
        }
        (self._folder / "events").mkdir()
        spark = pipeline.session(pipeline.Spark(conf=conf))
        spark.sparkContext.setLogLevel("INFO")
        self._stream(spark)
        self._batch(spark)
        self._fail(spark)
        for page, text in pages(str(spark.sparkContext.uiWebUrl)):
            self._show("api" if "/api/" in page else "ui", text, page)
        shutil.copytree(self._folder / "local", self._shown / "temporary", dirs_exist_ok=True)
        own = killing.descendants(os.getpid())
        self._show("commands", "\n".join(killing.command(pid) for pid in own[1:]))
        spark.stop()

    def _stream(self, spark: SparkSession) -> None:
        rows = self._reader(spark.readStream).load()
        self._show("plan", explained(rows))
        query = (
            rows.writeStream.format("parquet")
            .option("checkpointLocation", str(self._folder / "checkpoint"))
            .option("path", str(self._folder / "rows"))
            .queryName("secret")
            .start()
        )
        query.processAllAvailable()
        self._show("plan", str(query._jsq.explainInternal(True)))
        self._show("progress", json.dumps([one.json for one in query.recentProgress]), str(query.status), str(query))
        self._show("progress", str(query.lastProgress))
        query.stop()

    def _batch(self, spark: SparkSession) -> None:
        rows = self._reader(spark.read).load()
        assert rows.count() > 0
        self._show("plan", explained(rows))
        rows.createOrReplaceTempView("rows")
        self._show("plan", explained(spark.sql("select topic, count(*) from rows group by topic")), repr(rows))

    def _fail(self, spark: SparkSession) -> None:
        from pyspark.sql.functions import udf

        def wrong(text: str) -> str:
            raise ValueError(text)

        def settings(**more: Any) -> dict[str, str]:
            return {"transportConfig": json.dumps(json.loads(self._options["transportConfig"]) | more)}

        def streamed(given: dict[str, str]) -> None:
            rows = self._reader(spark.readStream, **given).load()
            query = rows.writeStream.format("noop").option("checkpointLocation", self._checkpoint()).start()
            try:
                query.processAllAvailable()
            finally:
                query.stop()

        def computed() -> None:
            rows = self._reader(spark.readStream).load().select(udf(wrong)("topic"))
            query = rows.writeStream.format("noop").option("checkpointLocation", self._checkpoint()).start()
            try:
                query.processAllAvailable()
            finally:
                query.stop()

        elsewhere = {"connect": ["tcp/127.0.0.1:1"], "connect_timeout_ms": 200}
        more = {"transport/link/tls/connect_private_key_base64": self._key}
        keyed = {
            "transportConfig": json.dumps({"mode": "client", **elsewhere}),
            "transportSecrets": json.dumps({"settings": more}),
        }
        for reader in (spark.read, spark.readStream):
            self._show("plan", explained(self._reader(reader, **keyed).load()))
        failures: dict[str, Callable[[], object]] = {
            "a task": computed,
            "a column": lambda: self._reader(spark.read).load().select("nothing"),
            "an option": lambda: streamed({"topic": "x"}),
            "offsets": lambda: streamed({"startingOffsets": "now"}),
            "not JSON": lambda: streamed({"transportConfig": f'{{"user": "spark", "password": "{self._broken}"'}),
            "no connection with a key": lambda: streamed(keyed),
            "no table": lambda: streamed({"transportConfig": json.dumps([self._secret])}),
            "an unknown setting": lambda: streamed(settings(passwort=self._secret)),
            "a wrong type": lambda: streamed(settings(password=[self._secret])),
            "a setting": lambda: streamed(settings(mode="wrong")),
            "no user": lambda: streamed(settings(user=None)),
            "no connection": lambda: streamed(settings(**elsewhere)),
            "no broker": lambda: streamed(
                {
                    "transport": "mqtt5",
                    "transportConfig": json.dumps({"port": 1, "username": "spark", "password": self._secret}),
                }
            ),
            "no connection of a batch": lambda: self._reader(spark.read, **settings(**elsewhere)).load().count(),
        }
        for name, fails in failures.items():
            print(name, flush=True)
            try:
                fails()
            except Exception as error:
                self._show("errors", name, str(error), repr(error), traceback.format_exc())
            else:
                raise AssertionError(f"{name}: expected a failure")

    def _reader(self, reader: Any, **more: str) -> Any:
        reader = reader.format("uprotocol")
        for name, value in (self._options | more).items():
            reader = reader.option(name, value)
        return reader

    def _checkpoint(self) -> str:
        return str(self._folder / "checkpoint" / f"failed{len(list((self._folder / 'checkpoint').iterdir()))}")

    def _show(self, place: str, *texts: str) -> None:
        file = self._shown / place / f"{len(list((self._shown / place).glob('*')))}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(texts))


def explained(rows: DataFrame) -> str:
    """What `rows.explain(True)` prints, and the forms of the UI."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        rows.explain(True)
        for mode in ("formatted", "cost", "codegen"):
            with contextlib.suppress(Exception):  # not of a stream
                rows.explain(mode=mode)
    return f"{out.getvalue()}\n{rows._jdf.queryExecution().toString()}"  # type: ignore[operator]


def pages(root: str) -> Iterator[tuple[str, str]]:
    """All pages of the UI and of its API that lead on from the first ones, each once, with their text."""
    api = "/api/v1/applications"
    (application,) = json.loads(fetched(f"{root}{api}"))
    base = f"{root}{api}/{application['id']}"
    names = ["jobs", "stages", "executors", "environment", "storage/rdd", "sql?details=true&planDescription=true"]
    waiting, seen = [root, f"{root}/StreamingQuery/", f"{root}/SQL/", *(f"{base}/{name}" for name in names)], set[str]()
    while waiting and len(seen) < PAGES_MAX:
        page = waiting.pop(0)
        if page in seen:
            continue
        seen.add(page)
        with contextlib.suppress(OSError):
            text = fetched(page)
            yield page, text
            for link in re.findall(r'href="([^"#]+)"', text):
                target = urllib.parse.urljoin(page, link.replace("&amp;", "&"))
                if target.startswith(root) and "kill" not in target and "/static/" not in target:
                    waiting.append(target)


def fetched(page: str) -> str:
    with urllib.request.urlopen(page, timeout=DEADLINE_S) as answer:
        return str(answer.read(), "utf-8", "replace")


if __name__ == "__main__":
    Job(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]).run()
