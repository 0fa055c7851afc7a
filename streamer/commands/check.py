"""up-streamer check: what a configuration says, every mistake in it, and what can't be used on this machine."""

from __future__ import annotations

import asyncio
import json

from streamer import config as configs
from streamer import paused as pauses
from streamer.commands import cursors, files, terminal
from streamer.commands.options import LOG_NAME, AsJson, ConfigFile
from uprotocol.status import UStatusError
from uprotocol.transport import UTransport
from uprotocol.v1.ucode_pb2 import UCode


def check(config: ConfigFile, as_json: AsJson = False) -> None:
    """Check a streamer's TOML file: every mistake, with its line, and every file that it names and that can't be used
    here.

    Example: [bold]up-streamer check --config vehicle.toml[/]
    """
    from streamer.app import endpoints_of

    with terminal.errors(terminal.EXIT_CONFIG):
        loaded = configs.load(config)
    found = files.findings(loaded, config.read_text(encoding="utf-8"))
    if wrong := [f"{config}:{one.line}: {one.what}" for one in found if one.fatal]:
        raise UStatusError(UCode.FAILED_PRECONDITION, "\n".join(wrong))
    made = asyncio.run(_make_transports(loaded))
    notes = [*(f"{config}:{one.line}: {one.what}" for one in found), *endpoints_of(loaded, made).notes()]
    paused = pauses.read(loaded.streamer.data_dir / pauses.FILE)
    if as_json:
        print(json.dumps(_as_dict(loaded, notes, paused)))
        return
    homes = {loaded.home.name: " (home)"}
    rows = [
        (one.name + homes.get(one.name, ""), one.transport, ", ".join(one.authorities), loaded.usubscription_of(one))
        for one in loaded.endpoint
    ]
    columns = ("endpoint", "transport", "authorities", "uSubscription")
    terminal.show(f"{config}: authority {loaded.authority}", columns, rows)
    for rule in loaded.rules:
        limits = "".join(f"  {word} {those}" for word, those in (("allow", rule.allow), ("deny", rule.deny)) if those)
        terminal.out.print(f"{rule.from_} -> {rule.to}{limits}", markup=False)
    for note in notes:
        terminal.out.print(f"note: {note}", markup=False)
    for name, records in _unclaimed(loaded).items():
        waits = f"[bold red]{records} records wait for endpoint {name!r}[/]"
        terminal.out.print(f"{waits}, which this file does not have")
    for pause in paused:
        terminal.out.print(f"paused: {pause.topic} to {pause.peer}", markup=False)


def _as_dict(config: configs.Config, notes: list[str], paused: list[pauses.Pause]) -> dict[str, object]:
    endpoints = [
        {
            "name": one.name,
            "transport": one.transport,
            "authorities": one.authorities,
            "usubscription": config.usubscription_of(one),
            "home": one.name == config.home.name,
        }
        for one in config.endpoint
    ]
    rules = [{"from": rule.from_, "to": rule.to, "allow": rule.allow, "deny": rule.deny} for rule in config.rules]
    return {
        "ok": True,
        "authority": config.authority,
        "endpoints": endpoints,
        "rules": rules,
        "unclaimed": _unclaimed(config),
        "notes": notes,
        "paused": [one._asdict() for one in paused],
    }


async def _make_transports(config: configs.Config) -> dict[str, UTransport]:
    """Each endpoint's transport, which does no I/O, and none is opened: a constructor may refuse what its settings'
    model lets through."""
    from streamer.app import make_transport

    return {section.name: make_transport(config, section) for section in config.endpoint}


def _unclaimed(config: configs.Config) -> dict[str, int]:
    """How many records wait in the streamer's log for endpoints that its file does not have; nothing where the log
    can't be read now."""
    names = {endpoint.name for endpoint in config.endpoint}
    try:
        found = cursors.listed(config.streamer.data_dir / LOG_NAME)
    except UStatusError:
        return {}
    return {one.endpoint: one.records for one in found if one.records and one.endpoint not in names}
