"""up-streamer usubscription: a uSubscription service of its own."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from storage import logs
from streamer.commands import network, terminal
from streamer.commands.options import AsJson, Settings


class LogFormat(enum.Enum):
    TEXT = "text"
    JSON = "json"


def usubscription(
    authority: Annotated[str, typer.Option("--authority", "-a", help="Whose subscriptions and topics it keeps.")],
    transport: Annotated[str, typer.Option("--transport", "-t", help="Transport: zenoh, mqtt5, dds, ...")],
    store: Annotated[Path, typer.Option(help="The SQLite file; made if there is none.")],
    settings: Settings = None,
    log_format: Annotated[LogFormat, typer.Option(help="Of the log, on standard error.")] = LogFormat.TEXT,
    as_json: AsJson = False,
) -> None:
    """Run a uSubscription service of its own, versions 3 and 4, until Ctrl-C or SIGTERM.

    Example: [bold]up-streamer usubscription -a cloud -t mqtt5 -s port=1883 --store cloud.db[/]
    """
    from usubscription import __main__ as service

    logs.configure("info", log_format.value)
    given = {"authority": authority, "transport": transport, "store": store}
    config = service.validate({**given, "settings": network.parse_settings(settings or [])}, "options")

    def tell(state: dict[str, Any]) -> None:
        ready = f"ready: core.usubscription of {authority} on {transport}"
        line = ready if state["ready"] else f"every request is answered UNAVAILABLE: {state['trouble']}"
        terminal.tell(as_json, state, line)

    raise typer.Exit(service.run(config, tell))
