"""up-streamer status: what a streamer does, and why; once, or as it changes.

data_dir -> control socket -> StreamerStatus -> tables, cards, lines, JSON
      '---> stopped: the cursors in its files, and exit code 1
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live

from storage.disk import REAL_DISK, InUseError
from streamer.commands import cursors, terminal
from streamer.commands.options import AsJson, DataDir
from streamer.data_dir import LOG_FILE, LOG_LOCK
from streamer.operating import control
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

WATCH_S: Final = 1.0  # between two looks
STOPPED: Final = "stopped"
STATUS_COLUMNS: Final = (
    *("endpoint", "state", "for", "in/s", "out/s", "waiting", "lag"),
    *("retries", "held", "lost", "last in", "last out"),
)
MIB: Final = 1 << 20
_NUMBERS: Final = re.compile(r"\d+")  # a line that differs only in these is the same


def status(
    at: DataDir,
    endpoint: Annotated[str | None, typer.Option(help="Only this endpoint, with everything about it.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it each second, until interrupted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a streamer does, and why: states, rates, what waits, and what is wrong. If it is stopped, show what
    waits in its files; the exit code is 1 then.

    Example: [bold]up-streamer status --config vehicle.toml --watch[/]
    """
    folder = at.path
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(folder, endpoint, as_json)
        return
    found = _asked(folder, endpoint)
    if as_json:
        print(json.dumps(found))
    else:
        terminal.out.print(_drawn(found, endpoint, terminal.width()), crop=False)
    if found["state"] == STOPPED:
        raise typer.Exit(terminal.EXIT_FAILED)


def _asked(folder: Path, endpoint: str | None) -> dict[str, Any]:
    """Returns the status, of one endpoint if asked for; of a stopped streamer {"state", "data_dir", "cursors"}."""
    found = control.call(folder, "status")
    if found is None:
        return _stopped(folder)
    if endpoint is not None:
        known = [one["name"] for one in found["endpoints"]]
        if endpoint not in known:
            raise UStatusError(UCode.NOT_FOUND, f"unknown endpoint {endpoint!r}; known: {', '.join(known)}")
        found["endpoints"] = [one for one in found["endpoints"] if one["name"] == endpoint]
        found["flows"] = [one for one in found["flows"] if endpoint in (one["from"], one["to"])]
    return found


def _stopped(folder: Path) -> dict[str, Any]:
    try:
        if (folder / LOG_LOCK).exists():
            REAL_DISK.require_not_in_use(folder / LOG_LOCK)
    except InUseError as error:
        why = f"the streamer with data_dir {folder} runs as process {error}, and does not answer yet: try again, or "
        raise UStatusError(UCode.UNAVAILABLE, why + "see its log") from None
    except OSError as error:
        raise invalid(f"can't look into {folder}: {error.strerror}") from None
    log = folder / LOG_FILE
    waiting = [dataclasses.asdict(one) for one in cursors.listed(log)] if log.exists() else []
    return {"state": STOPPED, "data_dir": str(folder.absolute()), "cursors": waiting}


# Once


def _drawn(found: dict[str, Any], endpoint: str | None, width: int | None) -> RenderableType:
    if found["state"] == STOPPED:
        rows = [
            [one["endpoint"], one["records"], one["parked_topics"], one["held_addresses"]] for one in found["cursors"]
        ]
        head = terminal.lined([f"stopped: no streamer with data_dir {found['data_dir']} runs"])
        columns = ("endpoint", "records", "topics parked", "addresses held")
        return Group(head, *([terminal.tabled("what waits", columns, rows, width)] if rows else []))
    parts: list[RenderableType] = [terminal.lined(_head(found))]
    rows = [_row(one, found["now"]) for one in found["endpoints"]]
    parts.append(terminal.tabled("", STATUS_COLUMNS, rows, width))
    if endpoint is not None:
        parts += _details(found["endpoints"][0], width)
    return Group(*parts, terminal.lined(_below(found)))


def _head(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['authority']} is {found['state']} since {_time(found['since'])}"
    yield f"version {found['version']} ({found['core']}), process {found['pid']}, started {_time(found['started'])}"


def _row(one: dict[str, Any], now: str) -> list[object]:
    lag = f"{one['lag_records']} / {one['lag_s']:.1f} s" if one["lag_records"] else "0"
    return [
        one["name"],
        f"{one['state']}{', paused' if one['paused'] else ''}",
        _age(one["since"], now),
        f"{one['in_per_s']:.1f}",
        f"{one['out_per_s']:.1f}",
        _waiting(one),
        lag,
        one["retries"],
        one["held_count"],
        one["lost"],
        _age(one["last_in"], now),
        _age(one["last_out"], now),
    ]


def _details(one: dict[str, Any], width: int | None) -> Iterator[RenderableType]:
    lines = [
        f"transport {one['transport']}, {'connected' if one['connected'] else 'not connected'}, for "
        f"{', '.join(one['authorities'])}",
        f"{one['state']} since {_time(one['since'])}{': ' if one['reason'] else ''}{one['reason']}",
        f"received {one['received']}, the last at {_time(one['last_in']) or '-'}",
        f"forwarded {one['forwarded']}, the last at {_time(one['last_out']) or '-'}",
        *(f"dropped, {reason}: {count}" for reason, count in sorted(one["dropped"].items())),
    ]
    yield terminal.lined(lines)
    if one["held"]:
        rows = [
            [held["address"], held["reason"], _time(held["since"]), held["records"], held["text"]]
            for held in one["held"]
        ]
        title = f"{one['held_count']} addresses held"
        yield terminal.tabled(title, ("address", "reason", "since", "records", "text"), rows, width)


def _below(found: dict[str, Any]) -> Iterator[str]:
    for flow in found["flows"]:
        if flow["forwarded"]:
            denied = "" if flow["allowed"] else ", without a rule now"
            counts = f"{flow['per_s']:.1f}/s, {flow['forwarded']} messages"
            yield f"{flow['from'] or 'unknown'} -> {flow['to']}: {counts}{denied}"
    disk, letters = found["disk"], found["dead_letters"]
    for log in found["logs"]:
        oldest = f", oldest from {_time(log['oldest'])}" if log["oldest"] else ""
        records = log["newest_seq"] - log["oldest_seq"] + 1 if log["oldest_seq"] else 0
        size = f"{log['bytes'] / MIB:.1f} of {log['limit_bytes'] / MIB:.0f} MiB"
        yield f"{log['name']} log: {records} records, {size}{oldest}"
    if disk["log_limit_bytes"]:
        yield f"disk: {disk['free_bytes'] / MIB:.0f} MiB free, {disk['reserve_bytes'] / MIB:.0f} MiB in reserve"
    codes = "".join(f", {code} {count}" for code, count in sorted(letters["by_code"].items()))
    yield f"dead letters: {letters['stored']} stored, {letters['total']} since the start{codes}"
    for one in found["follows"]:
        trouble = f": {one['trouble']}" if one["trouble"] else ""
        yield f"follows {one['service']} at {one['endpoint']}: {one['state'].replace('_', ' ')}{trouble}"
    for one in found["epochs"]:
        ended = f"{one['ended']} ended, {one['incomplete']} of them incomplete"
        yield f"epochs of {one['group']}: {one['open']} open, {ended}"
    for one in found["certificates"]:
        yield f"certificate: {one['endpoint'] or 'admin'} {one['setting']} until {_time(one['expires'])}"
    yield from (f"problem: {one}" for one in found["problems"])
    yield from (f"note: {one}" for one in found["notes"])


def _waiting(one: dict[str, Any]) -> str:
    topics = one["waiting_topics"]
    return f"{one['waiting']} and {topics} topic{'s' if topics > 1 else ''}" if topics else str(one["waiting"])


def _time(moment: str | None) -> str:
    """Returns RFC 3339 in UTC as the other commands print a time."""
    return "" if moment is None else moment[:19].replace("T", " ")


def _age(moment: str | None, now: str) -> str:
    if moment is None:
        return ""
    seconds = max(0.0, (datetime.fromisoformat(now) - datetime.fromisoformat(moment)).total_seconds())
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


# As it changes


def _watch(folder: Path, endpoint: str | None, as_json: bool) -> None:
    width = terminal.width()
    if as_json:
        for found in _looks(folder, endpoint):
            print(json.dumps(found), flush=True)
    elif width is None:
        before = set[str]()
        for found in _looks(folder, endpoint):
            lines = _lines(found)
            for line in [one for one in lines if _NUMBERS.sub("#", one) not in before]:
                print(f"{terminal.moment(round(time.time() * 1000))}  {line}", flush=True)
            before = {_NUMBERS.sub("#", one) for one in lines}
    else:
        with Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="crop") as live:
            for found in _looks(folder, endpoint):
                live.update(_drawn(found, endpoint, terminal.width()), refresh=True)


def _looks(folder: Path, endpoint: str | None) -> Iterator[dict[str, Any]]:
    """Yields the status each second, also over restarts of the streamer. It does not end."""
    while True:
        try:
            found = _asked(folder, endpoint)
        except UStatusError as error:
            if error.code != UCode.UNAVAILABLE:
                raise
            found = {"state": STOPPED, "data_dir": str(folder.absolute()), "cursors": [], "reason": error.message}
        yield found
        time.sleep(WATCH_S)


def _lines(found: dict[str, Any]) -> list[str]:
    """Returns what a person wants to see when it changes: states and problems, without counts that always change."""
    why = f": {found['reason']}" if found.get("reason") else ""
    if found["state"] == STOPPED:
        return [terminal.plain(f"{STOPPED}{why}")]
    lines = [f"{found['authority']} is {found['state']}{why}"]
    for one in found["endpoints"]:
        reason = f": {one['reason']}" if one["reason"] else ""
        lines.append(f"endpoint {one['name']} is {one['state']}{', paused' if one['paused'] else ''}{reason}")
    lines += [f"note: {one}" for one in found["notes"]]
    return [terminal.plain(line) for line in lines]
