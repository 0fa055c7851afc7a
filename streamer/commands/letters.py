"""up-streamer dead-letters: what could not be delivered."""

from __future__ import annotations

from typing import Annotated

import typer

from streamer.commands import terminal
from streamer.commands.options import AsJson, DataDir


def dead_letters(
    at: DataDir,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Show what could not be delivered, and why.

    Example: [bold]up-streamer dead-letters --config vehicle.toml --limit 20[/]
    """
    from streamer import dead_letter

    letters = dead_letter.open_read_only(at.path / "dead-letters.db").read(limit)
    rows = [letter.as_dict() for letter in letters]
    if not as_json:
        rows = [{**row, "time": terminal.moment(one.time_ms)} for row, one in zip(rows, letters, strict=True)]
    columns = ("time", "code", "endpoint", "source", "sink", "reason")
    terminal.tell_all(as_json, rows, f"{len(letters)} dead letters", columns)
