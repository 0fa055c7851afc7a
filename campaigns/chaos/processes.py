"""The processes of a campaign: started, killed at any moment, started again. All end with the campaign's process.

Process -> start, wait_ready, kill (-9), stop (SIGTERM), pause, resume      Broker(Process): mosquitto  Gateway(Process)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from campaigns.chaos.nursery import Child, Nursery
from streamer.commands.demo.processes import die_with_parent
from transports.ports import free_port

READY_S_MAX: Final = 90.0  # for a process to say that it is ready, on a busy machine
START_S_MAX: Final = 4.0  # of a usual start; a longer one waited for other processes
STOP_S_MAX: Final = 30.0  # for a process to end after SIGTERM
STOP_S_PROMISED: Final = 5.0  # promised limit; a container is killed after 10
LOG_TAIL_BYTES: Final = 1_500
RELOADING: Final = "Reloading config."  # mosquitto does it before it reads the next packet
TELLS: Final = "nobody has acknowledged"
MOSQUITTO: Final = shutil.which("mosquitto") or shutil.which(
    "mosquitto", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin"
)


class ChaosError(Exception):
    """The campaign cannot continue: something failed without a fault."""


class Process:
    """A command that is started repeatedly; the output of all starts is in one file."""

    def __init__(
        self, name: str, argv: list[str], folder: Path, tally: Counter[str], environment: dict[str, str] | None = None
    ) -> None:
        self.name, self._argv, self.log = name, argv, folder / f"{name}.log"
        self._tally, self._environment = tally, environment or {}
        self._process: subprocess.Popen[bytes] | Child | None = None
        self._nursery: Nursery | None = None
        self._said_from = 0  # offset of this start's output
        self._started_at = 0.0
        self.start_s = 0.7  # duration of a recent start: early kills come within that
        self._is_usual = False  # false for the first start, which also loads everything
        self.notes: list[str] = []
        self.is_loaded_once = True  # later starts are forks of one loaded process
        self.exits = 0  # starts that ended by themselves
        self.deaths: list[float] = []  # time.monotonic() of each kill

    def start(self) -> None:
        assert self._process is None, f"{self.name} runs already"
        self.log.touch()
        self._said_from = self.log.stat().st_size
        self._started_at = time.monotonic()
        if self._nursery is not None:
            module, *arguments = self._argv[2:]
            self._process = self._nursery.start(module, arguments, str(self.log))
            self._is_usual = True
            return
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self._environment,
                preexec_fn=partial(die_with_parent, signal.SIGKILL),
            )
        if self._argv[0] == sys.executable and self.is_loaded_once:
            self._nursery = Nursery(self._environment)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def said(self) -> str:
        """The output of this start."""
        with self.log.open("rb") as log:
            log.seek(self._said_from)
            return log.read().decode(errors="replace")

    def is_ready(self) -> bool:
        return '"ready": true' in self.said()

    def wait_ready(self, timeout_s: float = READY_S_MAX) -> None:
        """Raises ChaosError if it ends, or is not ready in time."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if not self.running:
                raise ChaosError(f"{self.name} ended by itself, code {self.ended_code}: {self.tail()}")
            if time.monotonic() > deadline:
                raise ChaosError(f"{self.name} was not ready after {timeout_s:.0f} s: {self.tail()}")
            time.sleep(0.02)
        if self._is_usual:
            self.start_s = 0.5 * self.start_s + 0.5 * min(START_S_MAX, time.monotonic() - self._started_at)

    @property
    def ended_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def tail(self) -> str:
        return self.said()[-LOG_TAIL_BYTES:].strip() or "(it said nothing)"

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, as a power cut would."""
        assert self._process is not None
        alive = self._process.poll() is None
        self._process.kill()
        self._process.wait()
        self._process = None
        if alive:
            self._tally[f"kill {self.name}"] += 1
            self.deaths.append(time.monotonic())

    def stop(self) -> None:
        """SIGTERM; a process that does not end is killed, and noted."""
        assert self._process is not None
        began = time.monotonic()
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        took = time.monotonic() - began
        if took > STOP_S_PROMISED:
            self.notes.append(f"{self.name} took {took:.1f} s to end after SIGTERM")
        self._process = None
        self._tally[f"stop {self.name}"] += 1

    def forget(self) -> None:
        """It has ended by itself or by a fault: prepare the next start."""
        assert self._process is not None
        assert self._process.poll() is not None
        if self._process.returncode == -signal.SIGKILL:
            self._tally[f"kill {self.name}"] += 1
        else:
            self.exits += 1
        self._process = None

    def restart_if_ended(self) -> None:
        """Restart it if it has ended, like a supervisor."""
        if self._process is not None and not self.running:
            self.forget()
        if self._process is None:
            self.start()

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)
        self._tally[f"pause {self.name}"] += 1

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def close(self) -> None:
        """End it without a check."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None


class Broker(Process):
    """A real mosquitto. `persistent`: it saves its sessions when it is stopped; a kill loses those since the last
    save."""

    def __init__(
        self, name: str, folder: Path, tally: Counter[str], access: str | None = None, settings: Sequence[str] = ()
    ) -> None:
        """`access`: the text of an access file, which `change_access` changes. `settings`: further lines of
        mosquitto.conf, which override ours."""
        assert MOSQUITTO is not None, "checked before a campaign begins"
        self.port = free_port()
        place = folder / name
        place.mkdir()
        lines = [
            f"listener {self.port} 127.0.0.1",
            "allow_anonymous true",
            "max_inflight_messages 0",  # else a round trip for every 20 messages
            "max_queued_messages 100000000",  # else what exceeds 1000 is lost; with 0 a refusal ends the connection
            "set_tcp_nodelay true",
            "persistence true",
            f"persistence_location {place}/",
            "log_type error\nlog_type warning",
            *(["user root"] if os.geteuid() == 0 else []),
        ]
        self._access = place / "access"
        if access is not None:
            self._access.write_text(access)
            lines += [f"acl_file {self._access}", "log_type information"]  # it says when it reads that anew
        self._config, self._lines = place / "mosquitto.conf", lines
        self.set(settings)
        super().__init__(name, [MOSQUITTO, "-c", str(self._config)], folder, tally)
        self.start_s = 0.1

    def is_ready(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=0.5).close()
        except OSError:
            return False
        return True

    def set(self, settings: Sequence[str]) -> None:
        """Write these further lines of mosquitto.conf, which count from its next start on."""
        overridden = {line.split()[0] for line in settings}
        lines = [*(line for line in self._lines if line.split()[0] not in overridden), *settings]
        self._config.write_text("\n".join(lines) + "\n")

    def change_access(self, text: str) -> None:
        """Replace the access rules. When this returns they apply to connected clients, too; if the broker is down, from
        its next start on."""
        fresh = self._access.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self._access)
        if self.running:
            self.reload()

    def reload(self) -> None:
        """Let it read its files again: access rules and passwords. Only with access rules it says when it has."""
        before, deadline = self.said().count(RELOADING), time.monotonic() + STOP_S_MAX
        self.signal(signal.SIGHUP)
        while self.said().count(RELOADING) == before:
            if time.monotonic() > deadline:
                raise ChaosError(f"{self.name} did not read its files again")
            time.sleep(0.005)


class Gateway(Process):
    """`up-streamer run`; its admin port is known before it is ready."""

    def __init__(
        self,
        name: str,
        folder: Path,
        config: Path,
        data_dir: Path,
        admin_port: int,
        tally: Counter[str],
        environment: dict[str, str],
    ) -> None:
        argv = [sys.executable, "-m", "streamer.commands.cli", "run", "--config", str(config), "--json"]
        super().__init__(name, argv, folder, tally, environment)
        self.data_dir, self.admin_port = data_dir, admin_port
        self._gaps_seen = 0.0  # of this start
        self.gap_records = 0.0
        self.reported: set[str] = set()  # damage reported in /readyz

    def start(self) -> None:
        super().start()
        self._gaps_seen = 0.0

    def get(self, path: str) -> str | None:
        """The page of the admin port; None if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=3) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return error.read().decode()
        except OSError:
            return None

    def problems(self) -> list[str]:
        """The problems in /readyz, except damage that is reported until a person acknowledges it: that is stored in
        `told`."""
        text = self.get("/readyz")
        found: list[str] = ["it does not answer"] if text is None else json.loads(text)["problems"]
        self.reported |= {problem for problem in found if TELLS in problem}
        return [problem for problem in found if TELLS not in problem]

    def metrics(self) -> dict[str, float]:
        """`name{labels}` without the prefix; empty while it does not answer. Gaps told are gathered over all starts."""
        found = {
            name: float(value)
            for name, value in re.findall(r"^up_streamer_(\S+) (\S+)$", self.get("/metrics") or "", re.MULTILINE)
        }
        gaps = sum(value for name, value in found.items() if name.startswith("gap_records_total"))
        self.gap_records += max(0.0, gaps - self._gaps_seen)
        self._gaps_seen = max(gaps, self._gaps_seen)
        return found

    def held(self, what: str = "addresses") -> float:
        """The number of held addresses; `what` "records": of held records, as far as known since the start."""
        metrics = self.metrics().items()
        return sum(value for name, value in metrics if name.startswith(f"held_{what}") and 'reason="refused"' in name)

    def backlog(self) -> float:
        return sum(value for name, value in self.metrics().items() if name.startswith("backlog"))


def service(folder: Path, authority: str, port: int, tally: Counter[str]) -> Process:
    """`up-streamer usubscription` on a broker."""
    settings = {
        "port": port,
        "mode": "off-vehicle",
        "client_id": f"{authority}-usubscription",
        "session_expiry_s": 86_400,
    }
    argv = [
        sys.executable,
        "-m",
        "streamer.commands.cli",
        "usubscription",
        "--authority",
        authority,
        "--transport",
        "mqtt5",
    ]
    for key, value in settings.items():
        argv += ["--set", f"{key}={value}"]
    return Process("usubscription", [*argv, "--store", str(folder / "usubscription.db"), "--json"], folder, tally)


def reader(folder: Path, options: dict[str, Any], tally: Counter[str]) -> Process:
    """campaigns.chaos.reader: follows a history with a cursor in a file."""
    return Process("reader", [sys.executable, "-m", "campaigns.chaos.reader", json.dumps(options)], folder, tally)


def publisher(folder: Path, options: dict[str, Any], tally: Counter[str]) -> Process:
    """campaigns.chaos.publishing: a publisher with a history of its own in a file."""
    return Process(
        "publisher", [sys.executable, "-m", "campaigns.chaos.publishing", json.dumps(options)], folder, tally
    )
