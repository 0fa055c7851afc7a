"""up-streamer check: a summary of a configuration, its mistakes, and the files that this machine can't use."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic import BaseModel

from history.file.retention import disk_limit
from streamer import config as configs
from streamer.commands import cursors, terminal
from streamer.commands.options import AsJson, ConfigFile
from streamer.config import Config, Location, line_of
from streamer.data_dir import LOG_FILE, PAUSES_FILE
from streamer.edge import tokens
from streamer.recovery_source import SOURCES
from streamer.walk import paused as pauses
from transports import certificates
from transports import plugin as plugins
from transports.certificates import CertificateFile
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import UTransport
from uprotocol.v1.ucode_pb2 import UCode

# matches the name of a secret setting, or of its table
SECRET: Final = re.compile(r"key|password|credential|secret|token")


def check(
    config: ConfigFile,
    connect: Annotated[
        bool,
        typer.Option(
            "--connect", help="Try its networks: a line for each finding. Does not disturb a streamer that runs."
        ),
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="With --connect: log in with the streamer's own client_id, unless it runs."),
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="With --connect: seconds for each endpoint.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Check a streamer's TOML file: print every mistake with its line, and every file named there that can't be used.
    With --connect, check its networks as well: ok, FAIL, or ? for what can't be known. Exit code 1 if one says FAIL.

    Example: [bold]up-streamer check --config vehicle.toml[/]

    Example: [bold]up-streamer check --config vehicle.toml --connect[/]
    """
    from streamer.building import endpoints_of, notes_of, reserve_of, rule_of, too_small_note
    from streamer.commands.stored_interest import notes_of_subscriptions
    from streamer.parts.order import require
    from streamer.parts.unmatched import unknown_authorities

    # 1: the file, and what it names
    if take_over and not connect:
        raise invalid("--take-over says how --connect goes about it: give both")
    with terminal.errors(terminal.EXIT_CONFIG):
        loaded = configs.load(config)
        require(loaded)
    found = _usable_files_and_stores(loaded, config)
    made = asyncio.run(_make_transports(loaded))
    if connect:  # 2: its networks
        from streamer.commands.connect import check_connections

        if not check_connections(loaded, made, take_over=take_over, timeout_s=timeout, as_json=as_json):
            raise typer.Exit(terminal.EXIT_FAILED)
        return
    # 3: notes: what it accepts, and might surprise
    endpoints = endpoints_of(loaded, made)
    following = notes_of(loaded, endpoints, map(rule_of, loaded.rules))
    disk = too_small_note(loaded, disk_limit(loaded.streamer.data_dir / LOG_FILE, reserve_of(loaded)))
    notes = [*_lines(config, found), *endpoints.notes(), *disk, *following]
    notes += [*unknown_authorities(loaded, endpoints), *notes_of_subscriptions(loaded, endpoints)]
    paused = pauses.read(pauses.file_of(loaded.streamer.data_dir / PAUSES_FILE))
    if as_json:  # 4: print
        print(json.dumps(_as_dict(loaded, notes, paused)))
        return
    for title, columns, rows in _tables(loaded, config):
        terminal.show(title, columns, rows)
    for line in [*_summary(loaded), *(f"note: {note}" for note in notes)]:
        terminal.out.print(terminal.plain_lines(line), markup=False)
    for name, records in _unclaimed(loaded).items():
        waits = f"[bold red]{records} records wait for endpoint {name!r}[/]"
        terminal.out.print(f"{waits}, which this file does not have")
    for pause in paused:
        terminal.out.print(f"paused: {pause}", markup=False)
    terminal.out.print(f"{config} has no mistakes", markup=False)


def usable(path: Path) -> Config:
    """Returns the configuration in a file. Raises UStatusError for its mistakes, and for files named there that can't
    be used."""
    config = configs.load(path)
    found = findings(config, path.read_text(encoding="utf-8-sig"))
    if wrong := _lines(path, [one for one in found if one.fatal]):
        raise UStatusError(UCode.FAILED_PRECONDITION, "\n".join(wrong))
    return config


def _lines(path: Path, found: Iterable[Finding]) -> list[str]:
    return [f"{path}:{one.line}: {one.what}" for one in found]


def _usable_files_and_stores(config: Config, path: Path) -> list[Finding]:
    """Returns what is notable about the files that a configuration names, and those in its data_dir. Raises
    FAILED_PRECONDITION with everything that was found if a start does not get over some of it."""
    from streamer.building import bare_endpoints_of
    from streamer.commands.stored_files import findings_of_stores
    from streamer.commands.stored_interest import notes_of_subscriptions

    text = path.read_text(encoding="utf-8-sig")
    line = line_of(text, ("streamer", "data_dir"))
    stored = [Finding(line, f"streamer.data_dir: {one.what}", one.is_fatal) for one in findings_of_stores(config)]
    found = [*findings(config, text), *stored]
    wrong = _lines(path, [one for one in found if one.fatal])
    if wrong:
        notes = _lines(path, [one for one in found if not one.fatal])
        notes += notes_of_subscriptions(config, bare_endpoints_of(config))
        raise UStatusError(UCode.FAILED_PRECONDITION, "\n".join([*wrong, *(f"note: {note}" for note in notes)]))
    return found


def _tables(config: Config, file: Path) -> Iterator[tuple[str, Sequence[str], Iterable[Sequence[object]]]]:
    """Yields title, columns and rows: endpoints, whom we follow and who follows us, epochs."""
    named = [one.name + (" (home)" if one is config.home else "") for one in config.endpoint]
    lives = [
        (name, one.transport, ", ".join(one.authorities), config.usubscription_of(one))
        for name, one in zip(named, config.endpoint, strict=True)
    ]
    yield f"{file}: authority {config.authority}", ("endpoint", "transport", "authorities", "uSubscription"), lives
    if config.follow:
        taken = [", ".join(["what is wanted here", *one.topics]) for one in config.follow]
        rows = [(one.endpoint, one.service, one.mode, topics) for one, topics in zip(config.follow, taken, strict=True)]
        yield "followed here", ("endpoint", "service", "mode", "topics"), rows
    if by := [one for one in config.endpoint if one.followed_by]:
        ends = "any more, once it has taken over"
        report = [(one.name, one.followed_by, f"not to {', '.join(one.authorities)} {ends}") for one in by]
        yield "followed by", ("endpoint", "service", "publishes are pushed"), report
    if config.epochs:
        groups = [(one.name, ", ".join(one.topics), one.by, one.ends) for one in config.epochs]
        yield "epochs", ("group", "topics", "by", "one ends"), groups


def _summary(config: Config) -> Iterator[str]:
    """Yields lines on what goes where, what is stored, and who has access."""
    history, admin = config.history, config.admin
    for rule in config.rules:
        limits = "".join(f"  {word} {those}" for word, those in (("allow", rule.allow), ("deny", rule.deny)) if those)
        yield f"{rule.from_} -> {rule.to}{limits}"
    yield f"data_dir: {config.streamer.data_dir.absolute()}"
    yield f"recorded: {', '.join(history.record) or 'nothing but what somebody has subscribed to'}"
    yield f"in memory only: {', '.join(history.volatile) or 'nothing'}"
    yield f"kept: {history.retention_hours:g} h, and at most {history.retention_mib} MiB on disk"
    if config.usubscription.static_file is not None:
        yield f"subscriptions also from {config.usubscription.static_file}"
    guards = [word for word, file in (("TLS", admin.cert_file), ("a token", admin.token_file)) if file is not None]
    port = config.streamer.admin
    yield f"admin port: {port}{', with ' + ' and '.join(guards) if guards else ''}" if port else "admin port: none"
    yield from _edge(config)
    if config.access:
        yield f"access to the history: {len(config.access)} entries beside the rules"
    for location, file in _certificate_files(config):
        ends = datetime.fromtimestamp(certificates.expires_s(file), UTC)
        yield f"certificate: {'.'.join(map(str, location))} {file.path} until {ends:%Y-%m-%d}"


def _edge(config: Config) -> Iterator[str]:
    http, grip = config.http, config.grip
    if http.listen is not None:
        guards = [word for word, file in (("TLS", http.cert_file), ("tokens", http.tokens_file)) if file is not None]
        yield f"HTTP edge: {http.listen}{', with ' + ' and '.join(guards) if guards else ''}"
    if grip.publish is not None:
        guard = "" if grip.publish_key_file is None else ", with a signature"
        yield f"GRIP publishers: {grip.publish}{guard}; {len(config.channel)} channels, {len(config.proxy)} backends"


def _as_dict(config: Config, notes: list[str], paused: list[pauses.Pause]) -> dict[str, object]:
    endpoints = [
        {
            **one.model_dump(include={"name", "transport", "authorities", "followed_by"}),
            "usubscription": config.usubscription_of(one),
            "home": one.name == config.home.name,
        }
        for one in config.endpoint
    ]
    return {
        "ok": True,
        "authority": config.authority,
        "data_dir": str(config.streamer.data_dir.absolute()),
        "record": config.history.record,
        "volatile": config.history.volatile,
        "admin": config.streamer.admin,
        "endpoints": endpoints,
        "rules": [rule.model_dump(by_alias=True) for rule in config.rules],
        "follow": [one.model_dump() for one in config.follow],
        "epochs": [one.model_dump() for one in config.epochs],
        "unclaimed": _unclaimed(config),
        "notes": notes,
        "paused": [one.as_dict() for one in paused],
    }


async def _make_transports(config: Config) -> dict[str, UTransport]:
    """Returns each endpoint's transport, not opened: a constructor may refuse settings that their model accepts."""
    from streamer.building import make_transport

    return {section.name: make_transport(config, section) for section in config.endpoint}


def _unclaimed(config: Config) -> dict[str, int]:
    """Returns how many records wait for each endpoint that the file lacks; empty if the log can't be read."""
    names = {endpoint.name for endpoint in config.endpoint}
    try:
        found = cursors.listed(config.streamer.data_dir / LOG_FILE)
    except UStatusError:
        return {}
    return {one.endpoint: one.records for one in found if one.records and one.endpoint not in names}


# Files that the configuration names: every Path in the models, including those of the transports


@dataclass(frozen=True)
class Finding:
    """A problem of a file, and the configuration's line that names it. `fatal`: the streamer could not work."""

    line: int
    what: str
    fatal: bool = True


def findings(config: Config, text: str) -> list[Finding]:
    """Returns the problems of the files that `config` names, by line. `text`: its TOML source."""
    found = []
    unusable = set()
    for location, path in _named(config):
        where = ".".join(map(str, location))
        is_data_dir = location == ("streamer", "data_dir")
        what = _folder(path) if is_data_dir else _file(path)
        if what:
            unusable.add(path)
            found.append(Finding(line_of(text, location), f"{where}: {path} {what}"))
        elif any(SECRET.search(str(part)) for part in location) and path.stat().st_mode & stat.S_IROTH:
            what = f"everybody on this machine can read it: chmod o-r {path}"
            found.append(Finding(line_of(text, location), f"{where}: {what}", fatal=False))
        elif is_data_dir and path.exists() and path.stat().st_mode & stat.S_IROTH:
            what = f"everybody on this machine can list it (its files are the streamer's alone): chmod o-rwx {path}"
            found.append(Finding(line_of(text, location), f"{where}: {what}", fatal=False))
    found += _mistakes_of_tokens(config, text, unusable)
    found += _mistakes_of_keys(config, text, unusable)
    for location, file in _certificate_files(config):
        if not {file.path, file.key} & unusable and (what := certificates.mistake(file, time.time())):
            found.append(Finding(line_of(text, location), f"{'.'.join(map(str, location))}: {file.path} {what}"))
    return sorted(found, key=lambda one: one.line)


def _mistakes_of_tokens(config: Config, text: str, unusable: set[Path]) -> Iterator[Finding]:
    if config.http.tokens_file is None or config.http.tokens_file in unusable:
        return
    try:
        tokens.read_file(config.http.tokens_file)
    except UStatusError as error:
        yield Finding(line_of(text, ("http", "tokens_file")), error.message)


def _mistakes_of_keys(config: Config, text: str, unusable: set[Path]) -> Iterator[Finding]:
    for name in ("publish_key_file", "sig_key_file"):
        path = getattr(config.grip, name)
        if path is None or path in unusable:
            continue
        from streamer.grip.signatures import read_key  # imports jwt, of the extra `http`

        try:
            read_key(path)
        except UStatusError as error:
            yield Finding(line_of(text, ("grip", name)), f"grip.{name}: {error.message}")


def _certificate_files(config: Config) -> Iterator[tuple[Location, CertificateFile]]:
    from streamer.building import certificates_of

    places: dict[str, Location] = {one.name: ("endpoint", at, "settings") for at, one in enumerate(config.endpoint)}
    places[""], places[certificates.EDGE] = ("admin",), ("http",)
    for owner, file in certificates_of(config):
        yield (*places[owner], *file.setting.split(".")), file


def _named(config: Config) -> Iterator[tuple[Location, Path]]:
    """Yields every path and its key. In the models of transports, plugins too, the type Path marks paths."""
    yield from _paths(config, ())
    for index, endpoint in enumerate(config.endpoint):
        _, settings = plugins.configure(endpoint.transport, endpoint.settings)
        yield from _paths(settings, ("endpoint", index, "settings"))
    for index, recovery in enumerate(config.recovery):
        _, settings = plugins.configure_of(SOURCES, recovery.source, recovery.settings)
        yield from _paths(settings, ("recovery", index, "settings"))


def _paths(value: Any, location: Location) -> Iterator[tuple[Location, Path]]:
    if isinstance(value, Path):
        yield location, value
    elif isinstance(value, BaseModel | dict):
        for key, one in dict(value).items():
            yield from _paths(one, (*location, key))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _paths(one, (*location, index))


def _file(path: Path) -> str:
    """Returns why the file can't be read; empty if it can."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "is no file"
    except OSError as error:
        return f"can't be read: {error.strerror}"
    return "" if os.access(path, os.R_OK) else f"can't be read by {_me()}"


def _folder(path: Path) -> str:
    """Returns why the folder can't be created or written to; empty if it can."""
    try:
        there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    except OSError as error:
        return f"can't be used: {error.strerror}"
    if not there.is_dir():
        return f"can't be a folder: {there} is a file"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"can't be written to by {_me()} ({there})"


def _me() -> str:
    return f"the user with the id {os.geteuid()}"
