"""up-streamer dead-letters: messages that could not be delivered.

list, show   read the file; the streamer may run or be stopped
resend       asks the running streamer
purge        asks the running streamer, else changes the file under its lock
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from storage import logs
from streamer.commands import terminal
from streamer.commands.options import AsJson, DataDir
from streamer.commands.terminal import Misuse
from streamer.data_dir import LETTERS_FILE
from streamer.letters.dead_letter import LETTERS, REMOVED_MAX, LetterStore, open_read_only
from streamer.letters.selection import LetterFilter
from streamer.operating import control
from streamer.operating.readable import as_dict
from streamer.operation import Arguments
from uprotocol import uuid as uuids
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
NOT_RESENT: Final = ("waiting", "refused", "denied", "unknown")  # results with which `resend` has failed

Numbers = Annotated[list[int] | None, typer.Argument(help="Numbers of letters, as `list` shows them ...")]
Limit = Annotated[int, typer.Option(min=1, help="How many: the newest.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]


@dataclass(frozen=True)
class Selected:
    """Which letters: those that fit everything that is given."""

    code: Annotated[str | None, typer.Option(help="... or letters with this code, as PERMISSION_DENIED ...")] = None
    endpoint: Annotated[str | None, typer.Option("--endpoint", "-e", help="... of this endpoint ...")] = None
    everything: Annotated[bool, typer.Option("--all", help="... or all.")] = False

    def arguments(self, numbers: list[int] | None, **times: int | None) -> dict[str, Any]:
        """Returns the arguments of an operation. Raises Misuse."""
        given = {"numbers": numbers or None, "code": self.code, "endpoint": self.endpoint, **times}
        found: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        found |= {"all": True} if self.everything else {}
        try:
            LetterFilter.of(Arguments(found))
        except UStatusError as error:
            raise Misuse(error.message) from None
        return found


def span_ms(text: str) -> int | None:
    """Returns the milliseconds of a duration (30s, 10m, 2h, 7d); None for anything else."""
    found = re.fullmatch(r"(\d{1,9})([smhd])", text)
    return None if found is None else int(found[1]) * UNITS_MS[found[2]]


def moment_ms(option: str, text: str | None) -> int | None:
    """Returns the Unix milliseconds of an RFC 3339 time, or of a duration before now (30s, 10m, 2h, 7d). Raises
    Misuse."""
    if text is None:
        return None
    if (span := span_ms(text)) is not None:
        return uuids.now_ms() - span
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        why = f"{option}: expected a time as 2026-11-27T12:00:00Z, or a duration as 30s, 10m, 2h, 7d; got {text!r}"
        raise Misuse(why) from None
    return int((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp() * 1_000)


def dead_letters(ctx: typer.Context, at: DataDir, limit: Limit = 100, as_json: AsJson = False) -> None:
    """Messages that could not be delivered: list them with the reasons, show, resend or purge them.

    Example: [bold]up-streamer dead-letters --config vehicle.toml --limit 20[/]
    """
    if ctx.invoked_subcommand is None:
        list_(at, limit, as_json)


def list_(at: DataDir, limit: Limit = 100, as_json: AsJson = False) -> None:
    """Show which messages could not be delivered, and why.

    Example: [bold]up-streamer dead-letters list --config vehicle.toml --limit 20[/]
    """
    with closing(open_read_only(at.path / LETTERS_FILE)) as store:
        letters = store.read(limit)
    rows = [letter.as_dict() for letter in letters]
    if not as_json:
        rows = [{**row, "time": terminal.moment(one.time_ms)} for row, one in zip(rows, letters, strict=True)]
    columns = ("number", "time", "code", "endpoint", "source", "sink", "reason")
    terminal.tell_all(as_json, rows, f"{len(letters)} dead letters", columns)


def show(
    number: Annotated[int, typer.Argument(help="The number of the letter.")], at: DataDir, as_json: AsJson = False
) -> None:
    """Show one whole dead letter, with its payload as `subscribe` prints it.

    Example: [bold]up-streamer dead-letters show 17 --config vehicle.toml[/]
    """
    with closing(open_read_only(at.path / LETTERS_FILE)) as store:
        found = store.select(LetterFilter(numbers=(number,)), 1)
    if not found:
        why = f"no dead letter has the number {number}: it was resent, purged, or made room for others"
        raise UStatusError(UCode.NOT_FOUND, why)
    (letter,) = found
    whole = {**letter.as_dict(), "message": as_dict(letter.message)}
    if as_json:
        terminal.tell(True, whole, "")
        return
    about = {key: value for key, value in whole.items() if key not in ("message", "time_ms", "id", "source", "sink")}
    for key, value in {**about, "time": terminal.moment(letter.time_ms), **as_dict(letter.message)}.items():
        terminal.tell(False, {}, f"{key}: {value if isinstance(value, str) else json.dumps(value)}")


def resend(
    at: DataDir,
    selected: Selected,
    numbers: Numbers = None,
    since: Annotated[str | None, typer.Option(help="... since a time (RFC 3339), or for a duration (2h) ...")] = None,
    to: Annotated[
        str | None, typer.Option(help="The endpoint for letters whose own one is not configured any more.")
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Send dead letters again, each to the endpoint where it has failed. A letter leaves the store once the network has
    taken it; expired ones are skipped. Only while the streamer runs.

    Example: [bold]up-streamer dead-letters resend --code PERMISSION_DENIED --endpoint cloud --config vehicle.toml[/]
    """
    arguments = selected.arguments(numbers, since_ms=moment_ms("--since", since))
    arguments |= {"dry_run": dry_run, **({} if to is None else {"to": to})}
    counts, reasons = Counter[str](), Counter[tuple[str, str]]()
    after: int | None = 0
    while after is not None:
        answer = control.require(at.path, "resend_letters", {**arguments, "after": after}, answer_s=None)
        arguments["until"], after = answer["until"], answer["next"]
        counts.update(answer["counts"])
        for one in answer["letters"]:
            if as_json:
                print(json.dumps(one))
            elif one["reason"]:
                reasons[one["result"], one["reason"]] += 1
    for (result, reason), count in reasons.items():
        terminal.tell(False, {}, f"{result}: {count} letters: {reason}")
    line = ", ".join(f"{count} {result}" for result, count in counts.items()) or "no letter fits"
    terminal.tell(as_json, {"counts": dict(counts)}, line)
    if any(counts[result] for result in NOT_RESENT):
        raise typer.Exit(terminal.EXIT_FAILED)


def purge(
    at: DataDir,
    selected: Selected,
    numbers: Numbers = None,
    before: Annotated[
        str | None, typer.Option(help="... from before a time (RFC 3339), or older than a duration (30d) ...")
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove dead letters for good. The streamer may run or be stopped.

    Example: [bold]up-streamer dead-letters purge --before 30d --config vehicle.toml[/]
    """
    arguments = selected.arguments(numbers, before_ms=moment_ms("--before", before))
    answer = control.call(at.path, "purge_letters", {**arguments, "dry_run": dry_run}, answer_s=None)
    if answer is None:
        answer = _purge_file(at.path / LETTERS_FILE, LetterFilter.of(Arguments(arguments)), is_trial=dry_run)
    line = f"{answer['would_purge']} letters would be removed" if dry_run else f"{answer['purged']} letters removed"
    terminal.tell(as_json, answer, line)


def _purge_file(path: Path, which: LetterFilter, *, is_trial: bool) -> dict[str, int]:
    """Raises UStatusError, also if a streamer that does not answer has the file."""
    logs.configure()
    try:
        with closing(open_read_only(path)) as store:  # so that a damaged file stays where it is
            if is_trial:
                return {"purged": 0, "would_purge": store.count(which)}
        purged, count = 0, REMOVED_MAX
        with closing(LetterStore(path)) as store:
            while count == REMOVED_MAX:
                count = store.remove(which)
                purged += count
    except sqlite3.Error as error:
        raise LETTERS.fault(error, path, "used") from None
    return {"purged": purged}
