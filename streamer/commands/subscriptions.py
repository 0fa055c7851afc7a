"""up-streamer subscriptions: who wants what, from the file of a uSubscription service."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from storage import logs
from streamer import config as configs
from streamer.commands import terminal
from streamer.commands.options import AsJson
from uprotocol import uri as uris
from uprotocol.status import invalid


def subscriptions(
    store: Annotated[Path | None, typer.Option(help="The file of a uSubscription service ...")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="... or the TOML file of a streamer that has one inside.")
    ] = None,
    topic: Annotated[str | None, typer.Option(help="Only topics that match this pattern.")] = None,
    subscriber: Annotated[str | None, typer.Option(help="Only subscribers that match this pattern.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, and print each change as it happens.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show who is subscribed to what, from the store of a uSubscription service, while it runs or not.

    Example: [bold]up-streamer subscriptions --config vehicle.toml --topic //vehicle1/FFFFFFFF/FF/FFFF --watch[/]
    """
    from usubscription.view import StoreView

    logs.configure()
    if (store is None) == (config is None):
        raise invalid("say either --store FILE or --config FILE")
    path = store if store is not None else configs.load(config or Path()).streamer.data_dir / "usubscription.db"
    filters = [uris.parse(text) if text is not None else None for text in (topic, subscriber)]
    with StoreView(path) as view, contextlib.suppress(KeyboardInterrupt):
        for entry in view.watch(*filters) if watch else ():
            line = f"{entry['event']:<8} {entry['status']:<17} {entry['topic']}  {entry['subscriber']}"
            terminal.tell(as_json, entry, line)
        if watch:
            return
        entries, summary = view.subscriptions(*filters), view.summary()
    counts = f"{summary['subscriptions']} subscriptions at {summary['authority']}"
    title = f"{counts}, {summary['remote_commands_pending']} commands pending"
    columns = ("topic", "subscriber", "status", "expires", "sample_period_ms", "waiting_for")
    terminal.tell_all(as_json, entries, title, columns)
