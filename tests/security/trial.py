"""One attack, with phases of normal traffic before and after it: its costs, its damage, and which bounds it broke.

settle -> peace -> attack -> drain -> after -> a new subscriber, a new consumer -> restart -> the same again -> Verdict
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from campaigns.chaos.processes import ChaosError
from streamer.commands.demo.processes import die_with_parent
from tests.security.attacks import Attack
from tests.security.gauges import Gauges, memory_mib
from tests.security.honest import Honest, percentile
from tests.security.hostile import MARK
from tests.security.stage import RETENTION_MIB, Stage

RSS_MIB_MAX: Final = 200  # above idle, at any time
# above idle, after the attack: caches stay full, and Python returns memory late and in part
RSS_AFTER_MIB_MAX: Final = 200
DISK_MIB_MAX: Final = RETENTION_MIB + 192  # the log with its write-ahead part, dead letters, subscriptions
LOG_LINES_MAX: Final = 100  # each kind of line at most once a minute, and there are few kinds
P99_RATIO_MAX: Final = 10.0  # of honest traffic: under attack divided by before it
P99_FLOOR_S: Final = 0.05  # below this nothing is judged, else a quiet machine would be stricter than a busy one
DRAIN_S_MAX: Final = 60.0
GRACE_S: Final = 60.0  # additional time for an attacker to end


@dataclass
class Figures:
    """The measured values, in milliseconds and MiB."""

    idle_mib: float = 0.0
    peak_mib: float = 0.0
    after_mib: float = 0.0
    restarted_mib: float = 0.0
    disk_mib: float = 0.0
    log_lines: int = 0
    sent: int = 0
    lost: int = 0
    calls: int = 0
    calls_failed: int = 0
    drain_s: float = 0.0
    late_lost: int = 0
    ms: dict[str, tuple[float, float]] = field(default_factory=dict)  # phase: p50, p99
    reported: dict[str, Any] = field(default_factory=dict)


@dataclass
class Verdict:
    attack: str
    figures: Figures
    broken: list[str] = field(default_factory=list)  # bounds, as texts

    @property
    def good(self) -> bool:
        return not self.broken


class Attacking:
    """The attacker's process."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.security.attackers", name, json.dumps(options)],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=partial(die_with_parent, signal.SIGKILL),
        )
        assert self._process.stdout is not None
        self._said = self._process.stdout
        if "attacking" not in (line := self._said.readline()):
            raise ChaosError(f"the attacker did not begin: {line or self._process.poll()}")

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Returns the attacker's result; empty if it had to be ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            lines = self._said.read().splitlines()
            found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
            return found
        return {}

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._said.close()


@dataclass
class Trial:
    stage: Stage
    honest: Honest
    attack: Attack
    options: dict[str, Any]
    peace_s: float
    by_latency: bool  # also judge latency, on a machine without other load

    def run(self, *, restart: bool) -> Verdict:
        """Runs the trial. Raises ChaosError if something fails before the attack."""
        figures = Figures()
        verdict = Verdict(self.attack.name, figures)
        self.honest.settle()
        gauges = Gauges(self.stage.gateway)
        gauges.begin()
        self._stretch("peace", self.peace_s)
        figures.idle_mib = gauges.median_mib()
        try:
            self._under_attack(figures)
            verdict.broken += self._aftermath("after", figures)
            figures.after_mib = memory_mib(self.stage.gateway.pid)
        finally:
            gauges.end()
        figures.peak_mib, figures.disk_mib, figures.log_lines = gauges.peak_mib(), gauges.disk_mib, gauges.log_lines
        leaked = MARK.decode() in self.stage.gateway.said()
        if restart and self.stage.gateway.running:
            verdict.broken += self._restarted(figures)
        self._count(figures)
        verdict.broken += self._judge(figures, leaked=leaked)
        return verdict

    def _stretch(self, phase: str, seconds: float) -> None:
        self.honest.phase = phase
        self.honest.talk()
        time.sleep(seconds)
        self.honest.hush()

    def _under_attack(self, figures: Figures) -> None:
        honest = self.honest
        attacking = Attacking(self.attack.attacker, self.stage.places() | self.options)
        honest.phase = "attack"
        honest.talk()
        try:
            if self.attack.hanging_broker:
                self.stage.hang(self.attack.hanging_broker, hung=True)
            seconds = self.options.get("seconds", 5.0)
            figures.reported = attacking.wait(seconds if self.attack.endless else seconds + GRACE_S)
        finally:
            attacking.end()
            if self.attack.hanging_broker:
                self.stage.hang(self.attack.hanging_broker, hung=False)
            honest.hush()
        figures.drain_s = honest.drained("attack", DRAIN_S_MAX)

    def _aftermath(self, phase: str, figures: Figures) -> list[str]:
        """Checks that all is as before: honest traffic, a new subscriber, a new consumer, no problems reported."""
        broken = []
        if not self.stage.gateway.running:
            return [
                f"{phase}: the gateway has ended, code {self.stage.gateway.ended_code}: "
                f"{self.stage.gateway.tail()[-300:]}"
            ]
        try:
            self.honest.settle(DRAIN_S_MAX)
        except ChaosError as error:
            return [f"{phase}: {error}"]
        self._stretch(phase, self.peace_s)
        self.honest.drained(phase, DRAIN_S_MAX)
        if lost := self.honest.lost(phase):
            broken.append(f"{phase}: {lost} of {self.honest.sent(phase)} honest messages were lost")
        if failed := self.honest.failed_calls(phase):
            broken.append(f"{phase}: {len(failed)} honest calls failed, such as {failed[0]}")
        if late := self.honest.late_subscriber():
            figures.late_lost += late
            broken.append(f"{phase}: a new subscriber missed {late} messages")
        if code := self.honest.consumer(f"honest-{phase}"):
            broken.append(f"{phase}: a new consumer was answered {code}")
        if problems := self.stage.gateway.problems():
            broken.append(f"{phase}: not ready: {problems}")
        return broken

    def _restarted(self, figures: Figures) -> list[str]:
        self.stage.gateway.stop()
        self.stage.gateway.start()
        try:
            self.stage.gateway.wait_ready()
        except ChaosError as error:
            return [f"restarted: {error}"]
        broken = self._aftermath("restarted", figures)
        figures.restarted_mib = memory_mib(self.stage.gateway.pid)
        return broken

    def _count(self, figures: Figures) -> None:
        honest = self.honest
        figures.sent, figures.lost = honest.sent("attack"), honest.lost("attack")
        figures.calls = sum(one.phase == "attack" for one in honest.calls)
        figures.calls_failed = len(honest.failed_calls("attack"))
        for phase in ("peace", "attack", "after", "restarted"):
            found = honest.latencies(phase)
            figures.ms[phase] = (1000 * percentile(found, 0.5), 1000 * percentile(found, 0.99))

    def _judge(self, found: Figures, *, leaked: bool) -> list[str]:
        """Checks the bounds that hold under every attack."""
        p99_max = max(1000 * P99_FLOOR_S, P99_RATIO_MAX * found.ms["peace"][1])
        bounds = [
            (
                "rss",
                found.peak_mib - found.idle_mib > RSS_MIB_MAX,
                f"{found.peak_mib - found.idle_mib:.0f} MiB above idle",
            ),
            (
                "rss after",
                found.after_mib - found.idle_mib > RSS_AFTER_MIB_MAX,
                f"{found.after_mib - found.idle_mib:.0f} MiB above idle",
            ),
            (
                "rss restarted",
                found.restarted_mib - found.idle_mib > RSS_AFTER_MIB_MAX,
                f"{found.restarted_mib:.0f} MiB",
            ),
            ("lost", found.lost > 0, f"{found.lost} of {found.sent} honest messages"),
            (
                "calls",
                found.calls_failed > 0,
                f"{found.calls_failed} of {found.calls} honest calls, {self._failures()}",
            ),
            (
                "p99",
                self.by_latency and not found.ms["attack"][1] <= p99_max,
                f"{found.ms['attack'][1]:.0f} ms, at most {p99_max:.0f}",
            ),
            (
                "p99 after",
                self.by_latency and not found.ms["after"][1] <= p99_max,
                f"{found.ms['after'][1]:.0f} ms, at most {p99_max:.0f}",
            ),
            ("disk", found.disk_mib > DISK_MIB_MAX, f"{found.disk_mib:.0f} MiB, at most {DISK_MIB_MAX}"),
            ("log lines", found.log_lines > LOG_LINES_MAX, f"{found.log_lines}, at most {LOG_LINES_MAX}"),
            ("log", leaked, "a payload is in the log"),
        ]
        broken = [
            f"{name}: {detail}" for name, is_broken, detail in bounds if is_broken and name not in self.attack.excused
        ]
        return broken + [problem for check in self.attack.checks for problem in check(found.reported)]

    def _failures(self) -> str:
        found = {(one.method, one.code) for one in self.honest.failed_calls("attack")}
        return ", ".join(
            f"{method}: {'no answer' if code is None else f'code {code}'}" for method, code in sorted(found, key=str)
        )
