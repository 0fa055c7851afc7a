"""up-streamer run, usubscription: run a streamer, or only a uSubscription service, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import structlog
import typer

from storage import logs
from streamer import config as configs
from streamer.commands import terminal
from streamer.commands.check import usable
from streamer.commands.options import AsJson, ConfigFile, Settings, parse_settings
from uprotocol.status import UStatusError
from uprotocol.tasks import end, wait_within

if TYPE_CHECKING:
    from streamer.app import Streamer

GC_THRESHOLDS: Final = (50_000, 20, 50)  # messages have no cycles; the default of 700 objects costs 10 %
START_BEAT_S: Final = 10.0  # each beat extends the start timeout by three: a start may wait for a full disk
BEATS_TO_BE_LATE: Final = 3
STATUS_CHARACTERS_MAX: Final = 400
MORE_TIME: Final = f"EXTEND_TIMEOUT_USEC={int(START_BEAT_S * BEATS_TO_BE_LATE * 1_000_000)}"

log = structlog.get_logger()


def run(config: ConfigFile, as_json: AsJson = False) -> None:
    """Run a streamer until Ctrl-C or SIGTERM. Ends with exit code 78 if its file is wrong.

    Example: [bold]up-streamer run --config vehicle.toml[/]
    """
    with terminal.errors(terminal.EXIT_CONFIG):
        loaded = configs.load(config)
    logs.configure(loaded.streamer.log_level, loaded.streamer.log_format)
    sys.setswitchinterval(terminal.SWITCH_INTERVAL_S)
    with terminal.errors(log_format=loaded.streamer.log_format):
        asyncio.run(_serve(loaded, config, as_json))


async def _serve(config: configs.Config, path: Path, as_json: bool) -> None:
    from streamer.app import serve  # imported here: slow, and no other command needs it

    gc.set_threshold(*GC_THRESHOLDS)
    manager, stopping = ServiceManager(), asyncio.Event()
    running: list[Streamer] = []  # once it is ready
    reloads: set[asyncio.Task[None]] = set()

    def on_ready(streamer: Streamer) -> None:
        port = streamer.admin.port or None
        names = ", ".join(endpoint.name for endpoint in streamer.assembly.endpoints)
        data = {"ready": True, "authority": config.authority, "admin_port": port}
        with contextlib.suppress(OSError):  # a closed standard output is no reason to stop
            terminal.tell(as_json, data, f"ready: {config.authority} joins {names}")
        manager.ready(lambda: _status(streamer))

        running.append(streamer)

    def stop(number: signal.Signals) -> None:
        log.info("the streamer stops", why=number.name)
        manager.stopping()
        stopping.set()

    def reload() -> None:
        if running and len(reloads) < 2:  # one that runs, and one that will read every change until then
            reloads.add(task := asyncio.ensure_future(_reload(running[0])))
            task.add_done_callback(reloads.discard)
        elif not running:
            log.warning("not reloaded: the streamer is not ready; it has just read its file")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGHUP, reload)
    async with manager:
        await serve(config, on_ready, stopping, partial(usable, path), path)
    log.info("the streamer has stopped")


async def _reload(streamer: Streamer) -> None:
    """Reloads at a signal: the log and /readyz have the result."""
    with contextlib.suppress(UStatusError):
        from streamer.parts.reloading import Reloader  # slow, as `serve`

        await streamer.parts.of(Reloader).reload()


def _status(streamer: Streamer) -> str:
    from streamer.parts.readiness import Readiness  # slow, as `serve`

    states = streamer.parts.of(Readiness).states
    problems = [condition.problem for condition in states.look()]
    return f"{states.worst}: {'; '.join(problems)}" if problems else states.worst


def usubscription(
    authority: Annotated[
        str, typer.Option("--authority", "-a", help="The authority whose subscriptions and topics it keeps.")
    ],
    transport: Annotated[str, typer.Option("--transport", "-t", help="Transport: zenoh, mqtt5, dds, ...")],
    store: Annotated[Path, typer.Option(help="The SQLite file; created if it does not exist.")],
    settings: Settings = None,
    log_format: Annotated[logs.Format, typer.Option(help="Format of the log on standard error.")] = "text",
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
        if "note" in state:
            line += f"\nnote: {state['note']}"
        with contextlib.suppress(OSError):
            terminal.tell(as_json, state, line)

    with terminal.errors(log_format=log_format):
        service.serve_until_signalled(config, tell)


class ServiceManager:
    """Notifies the service manager (systemd's Type=notify), if one started us: ready, status, watchdog. Use with `async
    with`; it sends beats until the exit. Removes its variables from `environment`, so that no child process uses them.

    NOTIFY_SOCKET -> a datagram for each change
    WATCHDOG_USEC -> regular beats from the event loop; without them the manager restarts the process

    Source: sd_notify(3). The manager sends no answer, so nothing here waits; errors of the socket are ignored.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        interval = environment.pop("WATCHDOG_USEC", "")
        interval_us = int(interval) if interval.isascii() and interval.isdecimal() else 0
        watched = environment.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._interval_s = interval_us / 1_000_000 / BEATS_TO_BE_LATE if watched and interval_us else 0.0
        self._beats: asyncio.Task[None] | None = None
        self._state = MORE_TIME
        self._hurry = asyncio.Event()  # set to send the next beat at once
        self._status: Callable[[], str] = lambda: "starting"

    async def __aenter__(self) -> Self:
        if self._address.startswith(("/", "\0")):  # others (vsock) are not for services on the same machine
            self._beats = asyncio.create_task(self._beat(), name="service manager")
        return self

    async def __aexit__(self, *_: object) -> None:
        await end(self._beats)

    def ready(self, status: Callable[[], str]) -> None:
        """Reports that the service is ready; each beat sends the current `status()`."""
        self._state, self._status = "READY=1", status
        self._hurry.set()

    def stopping(self) -> None:
        self._state = "STOPPING=1"
        self._hurry.set()

    async def _beat(self) -> None:
        """Sends everything in each beat, so that one lost to a full queue does not matter."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.setblocking(False)
            while True:
                self._hurry.clear()
                status = " ".join(self._status().split())[:STATUS_CHARACTERS_MAX]
                lines = [self._state, f"STATUS={status}", *(["WATCHDOG=1"] if self._interval_s else [])]
                with contextlib.suppress(OSError):  # the manager is not there, or its queue is full
                    manager.sendto("\n".join(lines).encode(), self._address)
                pause_s = START_BEAT_S if self._state == MORE_TIME or not self._interval_s else self._interval_s
                await wait_within(self._hurry, pause_s)
