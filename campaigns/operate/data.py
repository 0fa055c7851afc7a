"""Steps about what is stored, and about the clock: backup and restore, a full disk."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import Final

from campaigns.chaos import machine
from campaigns.operate.fleet import Fleet, flow_is_of
from campaigns.operate.sites import Site
from campaigns.operate.stage import Stage, has_command, step

STARTED_S_MAX: Final = 10.0  # a start and what it says
HOUR_S: Final = 3600
CLOCK_S_MAX: Final = 10.0  # for so many requests
ASKED: Final = 20  # requests between two looks
FULL: Final = ("do not fit the disk", "refuses messages", "full")  # what /readyz says


@step("backup and restore", has_command("backup"), may_double=True)
def backup(stage: Stage) -> None:
    """A copy under load; then the disk is lost, and the copy is restored. The gap is reported."""
    site, fleet = stage.vin2, stage.fleet
    copy = fleet.folder / f"backup-{time.monotonic_ns()}"
    stage.command(site, "backup", str(copy))
    stage.flowing()
    site.gateway.stop()
    stage.command(site, "restore", str(copy), "--replace")
    site.gateway.start()
    site.gateway.wait_ready()
    stage.reported("/readyz", lambda: site.line("restored from a backup"))
    stage.reported("readers of the log", lambda: _gap(stage))
    stage.command(site, "history", "acknowledge")
    stage.ended("the restoration", lambda: site.line("restored from a backup"))
    fleet.book.excuse(stage.since, lambda flow: flow_is_of("vin2", flow))  # what the lost disk had, and nobody else


def _gap(stage: Stage) -> str:
    gaps = stage.fleet.pollers["vin2"].gaps
    return next((gap for gap in gaps if gap.startswith("incarnation")), "")


@step("data of a newer version")
def newer_format(stage: Stage) -> None:
    """As after a downgrade over a change of format: the streamer does not touch the data, and says why."""
    site, stopped_at = stage.vin2, stage.fleet.book.now()
    site.gateway.stop()
    path = site.data_dir / "history.db"
    version = _version(path)
    _version(path, version + 1)
    began = time.monotonic()
    site.gateway.start()
    try:
        stage.reported("refused", lambda: site.line("newer") or _last(site, "newer"), began, STARTED_S_MAX)
    finally:
        if site.gateway.running:
            site.gateway.stop()
        else:
            site.gateway.forget()
        _version(path, version)
        site.gateway.start()
        site.gateway.wait_ready()
    stage.linked(site, stopped_at)


def _version(path: Path, new: int | None = None) -> int:
    """The version of the file's format; `new`: is written."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        if new is not None:
            db.execute(f"PRAGMA user_version = {new}")
            db.commit()
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def _last(site: Site, part: str) -> str:
    """The last line of this start's output that has `part` in it."""
    return next((line for line in reversed(site.gateway.said().splitlines()) if part in line), "")


def _no_disk(_: Fleet) -> str:
    return machine.no_tmpfs()


@step("a full disk", _no_disk)
def full_disk(stage: Stage) -> None:
    """Zenoh keeps nothing for a gateway that can't store: what it has not taken is not owed. The broker keeps all."""
    site = stage.vin1
    filler = site.data_dir / "filler"
    began = time.monotonic()
    try:
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue
        stage.reported("the disk is full", lambda: site.line(*FULL), began)
    finally:
        filler.unlink(missing_ok=True)
    stage.ended("the disk is full", lambda: site.line(*FULL))


def _no_clock(fleet: Fleet) -> str:
    return machine.no_faketime() if fleet.clock is None else ""


@step("a clock that is an hour fast", _no_clock)
def clock(stage: Stage) -> None:
    """Requests of the vehicle's applications have a ttl, and have expired on arrival: reported once that is so for more
    than half of the last minute's, which takes many of them. Publishes without a ttl go on, and so do requests over
    MQTT, whose broker says how old they are."""
    fleet, site = stage.fleet, stage.vin1
    assert fleet.clock is not None

    def asked() -> str:
        fleet.ask(site.name, ASKED)
        return site.line("had expired on arrival")

    began = time.monotonic()
    fleet.clock.set(HOUR_S)
    try:
        stage.reported("the clock", asked, began, CLOCK_S_MAX)
    finally:
        fleet.clock.set(0)
    stage.ended("the clock", lambda: site.line("had expired on arrival"))
