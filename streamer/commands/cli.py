"""All commands in one application. up_streamer.py runs it, for `up-streamer` and `python -m up_streamer`."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

import uprotocol
from storage.runtime import leave
from streamer.commands import backup, check, client, cursors, history, letters, operating, options, run, status

app = typer.Typer(
    name="up-streamer",
    help="The uProtocol dispatcher: joins MQTT 5, Zenoh and DDS, forwards what is subscribed to, and loses nothing on "
    "the way.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)
cursors_app = typer.Typer(
    name="cursors",
    help="Show and change for whom records wait in a streamer's log: list, adopt, forget, skip, consumers, release.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(cursors_app)
letters_app = typer.Typer(name="dead-letters", rich_markup_mode="rich")
letters_app.callback(invoke_without_command=True)(options.as_command(letters.dead_letters))
app.add_typer(letters_app)

for command in (
    # serving
    run.run,
    check.check,
    run.usubscription,
    # on a network
    client.subscribe,
    client.publish,
    client.call,
    client.replay,
    history.history_,
    # on a streamer that runs
    status.status,
    operating.reload,
    operating.pause,
    operating.resume,
    operating.paused,
    operating.vehicles,
    operating.log_level,
    # on its files
    operating.subscriptions,
    backup.backup,
    backup.restore,
    client.demo,
):
    options.add(app, command)
for on_cursors in (cursors.list_, cursors.adopt, cursors.forget, cursors.skip, cursors.consumers, cursors.release):
    options.add(cursors_app, on_cursors)
for on_letters in (letters.list_, letters.show, letters.resend, letters.purge):
    options.add(letters_app, on_letters)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"up-streamer {metadata.version('up-streamer')}, {uprotocol.CORE}")
        raise typer.Exit


@app.callback()
def before_any_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_tell_version,
            is_eager=True,
            help="Show the version, and whether its core is compiled.",
        ),
    ] = False,
) -> None:
    """Options that stand before a command."""


def main() -> None:
    try:
        app(prog_name="up-streamer")
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        leave(end.code or 0)


if __name__ == "__main__":
    main()
