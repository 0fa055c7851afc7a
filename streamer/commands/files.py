"""Which files a configuration names, and what is wrong with them here and now: for `up-streamer check`.

Config, with the models of the transports -> every Path in it -> there? readable? a secret that everybody can read?
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from streamer.config import Config, Location, line_of
from transports import plugin as plugins

SECRET: Final = re.compile(r"key|password|credential|secret|token")  # in the name of a setting


@dataclass(frozen=True)
class Finding:
    """Something about a file, and the line of the configuration that names it. `fatal`: the streamer could not work
    with it."""

    line: int
    what: str
    fatal: bool = True


def findings(config: Config, text: str) -> list[Finding]:
    """What is wrong with the files that `config`, which is what `text` says, names; in the order of the lines."""
    found = []
    for location, path in _named(config):
        where = ".".join(map(str, location))
        what = _folder(path) if location == ("streamer", "data_dir") else _file(path)
        if what:
            found.append(Finding(line_of(text, location), f"{where}: {path} {what}"))
        elif SECRET.search(str(location[-1])) and path.stat().st_mode & stat.S_IROTH:
            what = f"everybody on this machine can read it: chmod o-r {path}"
            found.append(Finding(line_of(text, location), f"{where}: {what}", fatal=False))
    return sorted(found, key=lambda one: one.line)


def _named(config: Config) -> Iterator[tuple[Location, Path]]:
    """Every path, and where it stands. The models of the transports, foreign ones too, say by their types what is a
    path."""
    yield ("streamer", "data_dir"), config.streamer.data_dir
    yield from _paths(config.admin, ("admin",))
    if config.usubscription.static_file is not None:
        yield ("usubscription", "static_file"), config.usubscription.static_file
    for index, endpoint in enumerate(config.endpoint):
        _, settings = plugins.configure(endpoint.transport, endpoint.settings)
        yield from _paths(settings, ("endpoint", index, "settings"))


def _paths(value: Any, location: Location) -> Iterator[tuple[Location, Path]]:
    if isinstance(value, Path):
        yield location, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _paths(getattr(value, name), (*location, name))
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from _paths(one, (*location, index))


def _file(path: Path) -> str:
    """What is wrong with a file that is to be read; empty if nothing."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return "is no file"
    except OSError as error:
        return f"can't be read: {error.strerror}"
    return "" if os.access(path, os.R_OK) else f"can't be read by {_me()}"


def _folder(path: Path) -> str:
    """What is wrong with a folder that is to be written to, and made if there is none; empty if nothing."""
    try:
        there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    except OSError as error:
        return f"can't be used: {error.strerror}"
    if not there.is_dir():
        return f"can't be a folder: {there} is a file"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"can't be written to by {_me()} ({there})"


def _me() -> str:
    return f"the user with the id {os.geteuid()}"
