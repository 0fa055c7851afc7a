"""A standalone cluster of Spark on loopback: a master and workers, each a process of pyspark's own scripts.

with Cluster(folder) as cluster:  cluster.url, cluster.conf, cluster.workers[0].pid, cluster.executors()
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, Self

import pyspark

from spark_ingest import java
from streamer.commands.demo.processes import die_with_parent
from tests.spark import killing
from tests.tiers import ROOT

HOME: Final = Path(pyspark.__file__).parent
LOOPBACK: Final = "127.0.0.1"
EXECUTOR_MIB: Final = 512  # the least is 450
START_S_MAX: Final = 60


class Daemon:
    """A master or a worker, with its log in a file."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        java.use()
        environ = os.environ | {
            "SPARK_HOME": str(HOME),
            "SPARK_LOCAL_IP": LOOPBACK,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "PYSPARK_PYTHON": sys.executable,
        }
        with log.open("wb") as out:
            # the script becomes the JVM, so this process is the daemon
            self.process = subprocess.Popen(
                [HOME / "bin" / "spark-class", *arguments],
                env=environ,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, signal.SIGKILL, os.getpid()),
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def says(self, pattern: str) -> str:
        """The first group of `pattern` in its log, once it is there. Fails with the log if the process has ended."""
        end = time.monotonic() + START_S_MAX
        while (found := re.search(pattern, self._log.read_text(errors="replace"))) is None:
            assert self.process.poll() is None, f"it ended:\n{self._log.read_text(errors='replace')}"
            assert time.monotonic() < end, f"no {pattern!r} within {START_S_MAX} s"
            time.sleep(0.05)
        return found[1]

    def end(self) -> None:
        """Kills it and all that it has started. Idempotent."""
        if self.process.poll() is None:
            killing.kill(*killing.descendants(self.pid))
            self.process.wait()


class Cluster:
    """A master, and workers with one core and one executor each. `url` is the master's, `conf` what a session needs."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self._folder, self._count = folder, workers
        self._daemons = contextlib.ExitStack()
        self.workers: list[Daemon] = []
        self.url = ""

    def __enter__(self) -> Self:
        self._folder.mkdir()
        with contextlib.ExitStack() as starting:
            ports = ["--host", LOOPBACK, "--port", "0", "--webui-port", "0"]
            master = Daemon(self._folder / "master.log", "org.apache.spark.deploy.master.Master", *ports)
            starting.callback(master.end)
            self.url = master.says(rf"Starting Spark master at (spark://{re.escape(LOOPBACK)}:\d+)")
            for number in range(self._count):
                name, size = f"worker{number}", ["--cores", "1", "--memory", f"{2 * EXECUTOR_MIB}m"]
                place = ["--work-dir", str(self._folder / name)]
                worker = Daemon(
                    self._folder / f"{name}.log",
                    "org.apache.spark.deploy.worker.Worker",
                    *ports,
                    *size,
                    *place,
                    self.url,
                )
                starting.callback(worker.end)
                self.workers.append(worker)
            for worker in self.workers:
                worker.says("(Successfully registered with master)")
            self._daemons = starting.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._daemons.close()

    @property
    def conf(self) -> dict[str, str]:
        """Settings of a session: one executor for each worker, whose Python finds this checkout."""
        return {
            "spark.executor.cores": "1",
            "spark.executor.memory": f"{EXECUTOR_MIB}m",
            "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.executorEnv.PYTHONPATH": str(ROOT),
            "spark.pyspark.python": sys.executable,
        }

    def executors(self) -> list[int]:
        """The executors that run now, those of the first worker first."""
        return [pid for worker in self.workers for pid in killing.executors(worker.pid)]
