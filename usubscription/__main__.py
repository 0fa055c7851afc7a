"""A uSubscription service as a process: `python -m usubscription --authority cloud --store cloud.db --transport zenoh`.

options, file -> ServiceConfig -> transport -> service -> one line on stdout: ready -> SIGTERM, SIGINT: clean stop
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import signal
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from storage import logs
from storage.runtime import leave
from transports.plugin import create, explain
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.usubscription.wire import ENTITY_TYPE
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import LocalUriProvider
from usubscription.remote import AUDIT_MS, REMOTE_TIMEOUT_MS
from usubscription.service import MayReset, USubscriptionService

SERVICE_SWITCH_INTERVAL_S: Final = 0.0002  # with Python's default of 5 ms the event loop waits for the writer
GC_THRESHOLDS: Final = (50_000, 20, 50)  # requests create no cycles, and a collection delays them noticeably

Ready = Callable[[dict[str, Any]], None]


class ServiceConfig(BaseModel):
    """One uSubscription service. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")

    authority: str
    """whose topics and clients it keeps"""
    store: Path
    """the SQLite file; made if it isn't there"""
    transport: str
    """name of the transport plugin"""
    settings: dict[str, Any] = {}
    """the transport's own settings"""
    remote_majors: dict[str, int] = {}
    """version to speak to a remote authority, such as `{ vehicle1 = 3 }`; else that of the client that opened the
    link"""
    remote_timeout_ms: int = Field(default=REMOTE_TIMEOUT_MS, ge=1)
    """of one remote command; 5 minutes in the specification"""
    reset: MayReset = "linked"
    """what a Reset ends. `linked`: a uSubscription service of another authority ends what it shares with this one.
    `all`: any uSubscription service ends everything. `off`: nothing. What is not allowed is PERMISSION_DENIED"""
    log_format: logs.Format = "text"
    """of the log, on standard error: `text` or `json`"""
    audit_ms: int = Field(default=AUDIT_MS, ge=1)
    """between two audits of the remote services"""


def load(path: Path) -> ServiceConfig:
    """Raises UStatusError(INVALID_ARGUMENT) naming what is wrong."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise invalid(f"the configuration {path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise invalid(f"{path} is not TOML: {error}") from None
    return validate(content, str(path))


def validate(content: dict[str, Any], where: str) -> ServiceConfig:
    try:
        config = ServiceConfig.model_validate(content)
    except ValidationError as error:
        raise invalid(f"{where}: {explain(error, ServiceConfig)}") from None
    uris.validate_authority(config.authority)
    return config


async def serve(config: ServiceConfig, stop: asyncio.Event, ready: Ready) -> None:
    """Serve until `stop` is set. Raises UStatusError if the store or the transport can't be opened.

    With a damaged store it answers everything UNAVAILABLE, and passes `ready` {"ready": false, "trouble": what to do}.
    """
    local = LocalUriProvider(config.authority, ENTITY_TYPE, 4)
    transport = create(config.transport, config.settings, local)
    async with transport:
        service = USubscriptionService(
            transport,
            config.authority,
            config.store,
            remote_majors=config.remote_majors,
            remote_timeout_ms=config.remote_timeout_ms,
            audit_ms=config.audit_ms,
            reset=config.reset,
        )
        await service.start()
        gc.collect()
        gc.freeze()  # a full collection would examine the loaded objects again, which takes 30 ms
        try:
            state = {"ready": service.store.trouble is None, "service": "core.usubscription"}
            trouble = {"trouble": service.store.trouble} if service.store.trouble is not None else {}
            ready(
                {**state, "authority": config.authority, "transport": config.transport, **trouble, **note_of(service)}
            )
            await stop.wait()
        finally:
            await service.stop()


def note_of(service: USubscriptionService) -> dict[str, str]:
    """Returns {"note": that the store is new}, as long as other services may have to be told; else nothing."""
    database = service.store.database
    if database.new_since_ms is None:
        return {}
    what = "are those of an older copy" if database.is_copy else "are new"
    return {"note": f"the subscriptions {what} since {uuids.moment(database.new_since_ms)}"}


def serve_until_signalled(config: ServiceConfig, ready: Ready) -> None:
    """Serve until SIGTERM or SIGINT. Raises as `serve`."""
    sys.setswitchinterval(SERVICE_SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await serve(config, stop, ready)

    asyncio.run(main())


def parse(arguments: Sequence[str] | None = None) -> ServiceConfig:
    """Options override the file. Raises UStatusError, or SystemExit as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m usubscription",
        description="A uSubscription service (versions 3 and 4).",
        argument_default=argparse.SUPPRESS,
        epilog="Example: python -m usubscription --authority cloud --store cloud.db --transport mqtt5 --setting "
        "port=1883",
    )
    parser.add_argument("--config", type=Path, help="a TOML file with the keys authority, store, transport, [settings]")
    parser.add_argument("--authority")
    parser.add_argument("--store", help="SQLite file")
    parser.add_argument("--transport", help="zenoh, mqtt5, dds, local, or another that is installed")
    parser.add_argument(
        "--setting", action="append", metavar="KEY=VALUE", help="of the transport; VALUE as JSON, or as text"
    )
    parser.add_argument("--log-format", choices=get_args(logs.Format), help="of the log, on standard error")
    options = vars(parser.parse_args(arguments))
    content = load(options.pop("config")).model_dump(exclude_unset=True) if "config" in options else {}
    settings = dict(content.get("settings", {}))
    for setting in options.pop("setting", ()):
        key, equals, value = setting.partition("=")
        if not equals:
            raise invalid(f"--setting takes KEY=VALUE, got {setting!r}")
        settings[key] = value
        with contextlib.suppress(ValueError):
            settings[key] = json.loads(value)
    return validate({**content, **options, "settings": settings}, "options")


def main(arguments: Sequence[str] | None = None, prepare: Callable[[ServiceConfig], None] = lambda _: None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code. Prints to stdout when it is ready, and errors to stderr."""
    try:
        config = parse(arguments)
    except UStatusError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    prepare(config)
    try:
        serve_until_signalled(config, lambda state: print(json.dumps(state), flush=True))
    except UStatusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    leave(main(prepare=lambda config: logs.configure("info", config.log_format)))  # to stderr; stdout is for "ready"
