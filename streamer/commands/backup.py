"""up-streamer backup, restore: copies of a data_dir, and back.

backup: asks the running streamer over its control socket, else copies under the lock of the log
restore: only while the streamer is stopped
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from streamer import config as configs
from streamer.commands import terminal
from streamer.commands.options import AsJson, DataDir
from streamer.operating import backup as backups
from streamer.operating import control


def backup(
    directory: Annotated[Path, typer.Argument(help="A new folder, or an empty one, best on another disk.")],
    at: DataDir,
    as_json: AsJson = False,
) -> None:
    """Copy everything that a streamer has stored, while it runs or not: its log, subscriptions, dead letters, pauses.

    Example: [bold]up-streamer backup /mnt/usb/monday --config vehicle.toml[/]
    """
    data_dir, directory = at.path, directory.absolute()
    made = control.call(data_dir, "backup", {"directory": str(directory)}, answer_s=None)
    if made is None:
        made = backups.back_up_stopped(data_dir, directory, _authority(at))
    terminal.tell(as_json, made, f"backed up {_contents(made)} to {directory} in {made['seconds']} s")


def restore(
    directory: Annotated[Path, typer.Argument(help="A folder that `backup` has made.")],
    at: DataDir,
    replace: Annotated[
        bool, typer.Option("--replace", help="Move the files in data_dir aside, into its folder replaced-TIME.")
    ] = False,
    same_incarnation: Annotated[
        bool,
        typer.Option(
            "--same-incarnation",
            help="Nothing was appended after the backup, as on a move to other hardware: readers go on without a gap.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring back what a backup contains. The streamer must be stopped. Readers of its log get a gap.

    Example: [bold]up-streamer restore /mnt/usb/monday --config vehicle.toml --replace[/]
    """
    made = backups.restore(
        directory.absolute(), at.path, _authority(at), same_incarnation=same_incarnation, replace=replace
    )
    aside = f"; the files before are in {made['moved_to']}" if made["moved_to"] else ""
    what = f"restored {_contents(made)} of {made['time']} to {made['data_dir']}{aside}: start the streamer"
    terminal.tell(as_json, made, what)


def _authority(at: DataDir) -> str:
    return configs.load(at.config).authority if at.config is not None else ""


def _contents(made: dict[str, Any]) -> str:
    return f"records {made['oldest_seq']} to {made['newest_seq']}, {made['bytes'] / (1 << 20):.1f} MiB"
