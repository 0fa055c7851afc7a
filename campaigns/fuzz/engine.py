"""Runs targets: each input within limits of time and memory, many inputs one after the other.

replay: every input of the corpus          hunt: nursery (imports once) --fork--> a process for each target -> Report
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from campaigns.fuzz import registry
from campaigns.fuzz.mutate import mutated
from campaigns.fuzz.registry import INPUT_BYTES_MAX, Target, file_name

# CPU time, so that a busy machine causes no finds; a decoder takes milliseconds for INPUT_BYTES_MAX
INPUT_CPU_S: Final = 5.0
MEMORY_MIB_MAX: Final = 2_048  # in addition to the memory of the process at its start
OUT: Final = Path("out/fuzz")
ROOT: Final = Path(__file__).parents[2]
SIDE_BY_SIDE: Final = 2
INSTRUMENTED: Final = [
    "transports",
    "uprotocol",
    "history",
    "storage",
    "streamer",
    "usubscription",
    "usubscription_client",
    "spark_ingest",
]
_RUNS: Final = re.compile(rb"stat::number_of_executed_units:\s*(\d+)")
_KEPT: Final = re.compile(r"Test unit written to (\S+)")


class TooSlow(BaseException):
    """An input took longer than INPUT_CPU_S. It is no Exception, so that no handler of Exception catches it."""


@dataclass
class Report:
    """The results of a hunt."""

    target: str
    engine: str
    executions: int
    seconds: float
    finds: list[str]  # files

    @property
    def failed(self) -> bool:
        return bool(self.finds)


def has_atheris() -> bool:
    return importlib.util.find_spec("atheris") is not None


@contextlib.contextmanager
def deadline(cpu_s: float = INPUT_CPU_S) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlow(f"more than {cpu_s} s of processor time for one input")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def replay(target: Target) -> int:
    """Runs every input of the corpus and returns their number. Raises what the target raises, or TooSlow, with a note
    that names the input."""
    paths = sorted(target.corpus.glob("*"))
    for path in paths:
        try:
            with deadline():
                target.run(path.read_bytes())
        except BaseException as error:
            error.add_note(f"with the input {path}")
            raise
    return len(paths)


def quiet() -> None:
    """Turns logging off, which would write lines for each input."""
    import structlog

    def dropped(*_: Any) -> Any:
        raise structlog.DropEvent

    structlog.configure(processors=[dropped])


# Each target runs in its own process


def hunt(
    names: Sequence[str], seconds_each: float, out: Path, *, seed: int = 1, with_atheris: bool | None = None
) -> Iterator[Report]:
    """Hunts with each target for `seconds_each`, and yields a report as soon as a target is done. The output of the
    processes goes to `out`/NAME.log.

    One process imports everything, which takes some seconds, and forks one more for each target.
    """
    engine = "atheris" if (has_atheris() if with_atheris is None else with_atheris) else "random"
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "campaigns.fuzz",
        "--nursery",
        engine,
        "--seconds",
        str(seconds_each),
        "--seed",
        str(seed),
        "--out",
        str(out),
    ]
    command += [part for name in names for part in ("--target", name)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    }
    said = (out / "nursery.log").open("wb")
    with said, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, cwd=ROOT, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"{"):
                yield Report(**json.loads(line))
    if process.returncode:
        raise RuntimeError(f"the process that hunts ended with {process.returncode}: see {out / 'nursery.log'}")


def nursery(engine: str, names: Sequence[str], seconds_each: float, out: Path, seed: int) -> None:
    """Forks a process for each of `names`, SIDE_BY_SIDE at once, and prints a line of JSON when one has ended."""
    quiet()
    if engine == "atheris":
        import atheris

        with atheris.instrument_imports(include=INSTRUMENTED):
            targets = registry.load()
    else:
        targets = registry.load()
    waiting, running = list(reversed(names)), dict[int, tuple[str, float]]()
    while waiting or running:
        while waiting and len(running) < SIDE_BY_SIDE:
            name = waiting.pop()
            running[_fork(engine, targets[name], seconds_each, out, seed)] = (name, time.monotonic())
        pid, status = os.wait()
        name, begun = running.pop(pid)
        report = _report(engine, name, time.monotonic() - begun, os.waitstatus_to_exitcode(status), out)
        print(json.dumps(asdict(report)), flush=True)


def _fork(engine: str, target: Target, seconds: float, out: Path, seed: int) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        said = os.open(out / f"{target.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        (_hunt_with_atheris if engine == "atheris" else _hunt_at_random)(target, seconds, out, seed)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _report(engine: str, name: str, seconds: float, code: int, out: Path) -> Report:
    """Parses the last lines, which libFuzzer and our engine write alike. A process that failed is a find even without a
    kept input."""
    log = out / f"{name}.log"
    said = log.read_bytes()
    runs = _RUNS.findall(said)
    finds = sorted(set(_KEPT.findall(said.decode(errors="replace")))) or ([str(log)] if code else [])
    return Report(name, engine, int(runs[-1]) if runs else 0, seconds, finds)


class Trying:
    """Runs a target, and keeps the input with which it fails."""

    def __init__(self, target: Target, out: Path) -> None:
        self._target, self._out, self._executions = target, out, 0

    def __call__(self, data: bytes) -> None:
        self._executions += 1
        try:
            with deadline():
                self._target.run(data)
        except BaseException:
            path = self._out / f"{self._target.name}-crash-{file_name(data)}"
            path.write_bytes(data)
            print(f"Test unit written to {path}")
            self.tell()
            raise

    def tell(self) -> None:
        print(f"stat::number_of_executed_units: {self._executions}", flush=True)


def _hunt_at_random(target: Target, seconds: float, out: Path, seed: int) -> None:
    """Hunts without feedback until the first find."""
    inputs, rng = target.inputs() or [b""], random.Random(f"{target.name} {seed}")
    _bound_memory()
    trying, begun = Trying(target, out), time.monotonic()
    while time.monotonic() - begun < seconds:
        trying(mutated(rng, inputs, INPUT_BYTES_MAX))
    trying.tell()


def _hunt_with_atheris(target: Target, seconds: float, out: Path, seed: int) -> None:
    """Hunts, and ends this process with libFuzzer's exit code. New inputs go into `out`/corpus/NAME."""
    import atheris

    learnt = out / "corpus" / target.name
    learnt.mkdir(parents=True, exist_ok=True)
    target.corpus.mkdir(parents=True, exist_ok=True)
    options = [
        *(
            f"-max_total_time={max(1, round(seconds))}",
            f"-max_len={INPUT_BYTES_MAX}",
            f"-timeout={round(INPUT_CPU_S * 12)}",
        ),
        *(
            f"-rss_limit_mb={MEMORY_MIB_MAX}",
            f"-artifact_prefix={out}/{target.name}-",
            f"-seed={seed}",
            "-print_final_stats=1",
        ),
    ]

    atheris.Setup(["fuzz", *options, str(learnt), str(target.corpus)], Trying(target, out))
    atheris.Fuzz()


def _bound_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + (MEMORY_MIB_MAX << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


__all__ = ["Report", "TooSlow", "deadline", "has_atheris", "hunt", "nursery", "replay"]
