"""One step: an operation, what reports it, its mend, and the judgement of all messages that were sent meanwhile.

@step("name") def it(stage): do; stage.reported(what, probe); mend; stage.ended(what, probe)      Step.run -> Row
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Final

from campaigns.chaos.processes import ChaosError
from campaigns.operate.book import Turn
from campaigns.operate.fleet import CLOUD, VINS, Fleet, flow_name
from campaigns.operate.sites import CLI, Site

REPORTED_S_MAX: Final = 5.0  # for a reason to be reported, on a quiet machine
READY_S_MAX: Final = 30.0  # for a mend to work
QUIET_S: Final = 20.0  # without an arrival: what has not arrived by then is lost

Probe = Callable[[], Any]


@dataclass
class Row:
    """The result of a step. What must be 0: lost, reordered, wrong; doubled, unless `may_double`."""

    step: str
    seconds: float = 0.0
    reported_after_s: float = 0.0  # the latest of its reports
    reported: list[str] = field(default_factory=list)
    turn: Turn = field(default_factory=Turn)
    may_double: bool = False
    problems: list[str] = field(default_factory=list)
    skipped: str = ""  # why

    @property
    def good(self) -> bool:
        turn = self.turn
        bad = turn.lost or turn.reordered or turn.wrong or (turn.doubled and not self.may_double)
        return not (bad or self.problems)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"good": self.good}


class Stage:
    """What a step works with."""

    def __init__(self, fleet: Fleet, row: Row, patience: float) -> None:
        self.fleet, self.row, self._patience = fleet, row, patience
        self.vin1, self.vin2, self.cloud = (fleet.sites[name] for name in (*VINS, CLOUD))
        self.sites = list(fleet.sites.values())
        self.since = fleet.book.now()

    def reported(self, what: str, probe: Probe, since: float | None = None, within_s: float = REPORTED_S_MAX) -> str:
        """Wait until `probe` returns something, and note it with the seconds since `since` (time.monotonic()). Too late
        or never is a problem."""
        began = time.monotonic() if since is None else since
        while not (said := probe()):
            if time.monotonic() - began > max(READY_S_MAX, 2 * within_s) * self._patience:
                self.row.problems.append(f"{what}: never reported")
                return ""
            time.sleep(0.05)
        self.note(what, time.monotonic() - began, "" if said is True else str(said), within_s)
        return str(said)

    def note(self, what: str, took_s: float, said: str = "", within_s: float = REPORTED_S_MAX) -> None:
        """Something was reported after so many seconds."""
        line = said.strip().splitlines()[0] if said.strip() else ""
        self.row.reported.append(f"{what}: {line}" if line else what)
        self.row.reported_after_s = max(self.row.reported_after_s, took_s)
        if took_s > within_s * self._patience:
            self.row.problems.append(f"{what}: reported after {took_s:.1f} s only")

    def ended(self, what: str, probe: Probe) -> None:
        """Wait until `probe` returns nothing more: the mend has worked, and that is to be seen."""
        self.until(f"{what} is still reported", lambda: not probe())

    def until(self, why_not: str, probe: Probe) -> Any:
        deadline = time.monotonic() + READY_S_MAX * self._patience
        while not (found := probe()):
            if time.monotonic() > deadline:
                raise ChaosError(why_not)
            time.sleep(0.1)
        return found

    def command(self, site: Site, *arguments: str, fails: bool = False) -> str:
        """A command, whose output reports. One that does not end as expected is a problem."""
        began = time.monotonic()
        done = site.command(*arguments)
        said = f"{done.stdout}\n{done.stderr}".strip()
        self.note(f"up-streamer {arguments[0]}", time.monotonic() - began, said)
        if (done.returncode != 0) != fails:
            self.row.problems.append(f"up-streamer {' '.join(arguments)}: exit code {done.returncode}: {said[-300:]}")
        return said

    def calm(self) -> None:
        """Wait until every gateway is ready, and nothing is wrong any more."""

        def troubles() -> list[str]:
            return [
                f"{site.name}: {line}"
                for site in self.sites
                for line in (site.ready() or {"problems": ["it does not answer"]})["problems"]
            ]

        deadline = time.monotonic() + READY_S_MAX * self._patience
        while found := troubles():
            if time.monotonic() > deadline:
                raise ChaosError(f"not calm again: {found}")
            time.sleep(0.2)

    def flowing(self, flows: Callable[[str], bool] = lambda _: True) -> None:
        """Wait until all that was sent up to now in these flows has arrived, or no more of it comes."""
        self.settle(self.fleet.book.now(), flows)

    def linked(self, site: Site, since: float) -> None:
        """Wait until the raw clients of a gateway that was started again since then (of the book) are linked to it.
        Zenoh drops notifications that the gateway sends before that; publishes wait until somebody listens."""
        dropped = {flow_name(one) for one in self.fleet.flows if one.vin == site.name and one.sink and not one.goes_up}
        self.flowing(lambda flow: flow not in dropped)
        self.fleet.book.excuse(since, lambda flow: flow in dropped)

    def settle(self, until: float, flows: Callable[[str], bool] = lambda _: True) -> None:
        """The same of what was sent up to `until` (of the book)."""
        fleet, waiting, since = self.fleet, -1, time.monotonic()
        asked = time.monotonic()
        while time.monotonic() - since < QUIET_S * self._patience:
            left = sum(flows(entry.flow) for entry in fleet.book.waiting(until))
            if not left and all(poller.caught_up_at >= asked for poller in fleet.pollers.values()):
                return
            if left != waiting:
                waiting, since = left, time.monotonic()
            time.sleep(0.1)

    def answered(self, until: float) -> None:
        """Wait until each request that was asked up to `until` (of the book) is answered, or its caller has given up,
        which may be seconds after the step's work is done."""
        deadline = time.monotonic() + QUIET_S * self._patience
        while self.fleet.book.asking(until) and time.monotonic() < deadline:
            time.sleep(0.1)


Work = Callable[[Stage], None]


@dataclass(frozen=True)
class Step:
    name: str
    work: Work
    why_not: Callable[[Fleet], str]  # this machine, or this version, can't; empty: it can
    may_double: bool  # a process is killed in it
    is_calm: bool  # nothing stops in it: each request is answered

    def run(self, fleet: Fleet, patience: float) -> Row:
        """Do it, and judge what was sent since the last step."""
        row, began = Row(self.name, may_double=self.may_double), time.monotonic()
        if why := self.why_not(fleet):
            row.skipped = why
            return row
        stage = Stage(fleet, row, patience)
        try:
            self.work(stage)
            stage.calm()
        except (ChaosError, AssertionError, OSError, KeyError, ValueError) as error:
            row.problems.append(f"{type(error).__name__}: {error}")
            _revive(stage)
        until = fleet.book.now()
        stage.settle(until)
        stage.answered(until)
        turn = row.turn = fleet.book.turn(until)
        if self.is_calm and (turn.failed or turn.unanswered):
            row.problems.append(f"of the requests {turn.failed} failed and {turn.unanswered} were not answered")
        row.seconds = time.monotonic() - began
        return row


def _revive(stage: Stage) -> None:
    """After a failure: what has ended runs again, for the steps that follow."""
    try:
        for process in (stage.fleet.broker, stage.fleet.inner, *(site.gateway for site in stage.sites)):
            process.restart_if_ended()
            process.wait_ready()
        stage.calm()
    except ChaosError as error:
        stage.row.problems.append(f"and not well afterwards: {error}")


STEPS: Final[dict[str, Step]] = {}


def step(
    name: str,
    why_not: Callable[[Fleet], str] = lambda _: "",
    *,
    may_double: bool = False,
    is_calm: bool = False,
) -> Callable[[Work], Work]:
    """Adds a step; they run in the order of their definition."""

    def add(work: Work) -> Work:
        STEPS[name] = Step(name, work, why_not, may_double, is_calm)
        return work

    return add


def has_command(*words: str) -> Callable[[Fleet], str]:
    """Skips a step whose command this version does not have."""
    return lambda _: _no_command(words)


@cache
def _no_command(words: tuple[str, ...]) -> str:
    *command, option = words if words[-1].startswith("--") else (*words, "")
    environment = os.environ | {"NO_COLOR": "1", "TERMINAL_WIDTH": "200"}
    done = subprocess.run([*CLI, *command, "--help"], capture_output=True, text=True, check=False, env=environment)
    lacks = done.returncode != 0 or option not in done.stdout
    return f"this version has no 'up-streamer {' '.join(words)}'" if lacks else ""
