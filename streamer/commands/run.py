"""up-streamer run, usubscription: run a streamer, or only a uSubscription service, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import structlog
import typer

from storage import logs
from streamer import config as configs
from streamer.commands import terminal
from streamer.commands.options import AsJson, ConfigFile, Settings, parse_settings
from streamer.operating.notify import ServiceManager

if TYPE_CHECKING:
    from streamer.app import Streamer

GC_THRESHOLDS: Final = (50_000, 20, 50)  # messages have no cycles; the default of 700 objects costs 10 %


def run(config: ConfigFile, as_json: AsJson = False) -> None:
    """Run a streamer until Ctrl-C or SIGTERM. Ends with exit code 78 if its file is wrong.

    Example: [bold]up-streamer run --config vehicle.toml[/]
    """
    with terminal.errors(terminal.EXIT_CONFIG):
        loaded = configs.load(config)
    logs.configure(loaded.streamer.log_level, loaded.streamer.log_format)
    sys.setswitchinterval(terminal.SWITCH_INTERVAL_S)
    with terminal.errors(log_format=loaded.streamer.log_format):
        asyncio.run(_serve(loaded, as_json))


async def _serve(config: configs.Config, as_json: bool) -> None:
    from streamer.app import serve  # imported here: slow, and no other command needs it

    gc.set_threshold(*GC_THRESHOLDS)
    manager, stopping = ServiceManager(), asyncio.Event()

    def on_ready(streamer: Streamer) -> None:
        port = streamer.admin.port if streamer.admin else None
        names = ", ".join(endpoint.name for endpoint in streamer.endpoints)
        data = {"ready": True, "authority": config.authority, "admin_port": port}
        with contextlib.suppress(OSError):  # a closed standard output is no reason to stop
            terminal.tell(as_json, data, f"ready: {config.authority} joins {names}")
        manager.ready(lambda: _status(streamer))

    def stop() -> None:
        manager.stopping()
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, _note_hangup)
    async with manager:
        await serve(config, on_ready, stopping)


def _status(streamer: Streamer) -> str:
    problems = [one.problem for one in streamer.states.look()]
    return f"{streamer.states.worst}: {'; '.join(problems)}" if problems else streamer.states.worst


def _note_hangup() -> None:
    structlog.get_logger().warning(
        "SIGHUP changes nothing: the configuration is read at the start, so restart to have it read again"
    )


def usubscription(
    authority: Annotated[str, typer.Option("--authority", "-a", help="Whose subscriptions and topics it keeps.")],
    transport: Annotated[str, typer.Option("--transport", "-t", help="Transport: zenoh, mqtt5, dds, ...")],
    store: Annotated[Path, typer.Option(help="The SQLite file; made if there is none.")],
    settings: Settings = None,
    log_format: Annotated[logs.Format, typer.Option(help="Of the log, on standard error.")] = "text",
    as_json: AsJson = False,
) -> None:
    """Run a uSubscription service of its own, versions 3 and 4, until Ctrl-C or SIGTERM.

    Example: [bold]up-streamer usubscription -a cloud -t mqtt5 -s port=1883 --store cloud.db[/]
    """
    from usubscription import __main__ as service

    logs.configure("info", log_format)
    given = {"authority": authority, "transport": transport, "store": store}
    config = service.validate({**given, "settings": parse_settings(settings or [])}, "options")

    def tell(state: dict[str, Any]) -> None:
        ready = f"ready: core.usubscription of {authority} on {transport}"
        line = ready if state["ready"] else f"every request is answered UNAVAILABLE: {state['trouble']}"
        with contextlib.suppress(OSError):
            terminal.tell(as_json, state, line)

    raise typer.Exit(service.run(config, tell))
