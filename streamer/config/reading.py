"""Read the TOML file: every mistake is reported with its line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from storage import logs
from streamer.config.model import Config
from streamer.config.sections import Location
from transports import plugin as plugins
from uprotocol.status import UStatusError, invalid

Mistake = tuple[int, str]  # line, description


def load(path: Path) -> Config:
    """Read and check `path` and transports' settings. Raises UStatusError(INVALID_ARGUMENT), a line per mistake."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 ({error})"
        raise invalid(f"can't read {path}: {why}") from None
    return loads(text, str(path))


def loads(text: str, name: str = "config") -> Config:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise invalid(_not_toml(text, name, str(error))) from None
    except RecursionError:
        raise invalid(f"{name}:1: this is not a configuration: its values are nested too deeply to be read") from None
    mistakes = list(_settings_mistakes(text, raw))
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        mistakes += _explain(text, error, Config)
    if mistakes:
        raise invalid("\n".join(f"{name}:{line}: {what}" for line, what in sorted(set(mistakes))))
    return config


def _not_toml(text: str, name: str, said: str) -> str:
    """Returns the error; tomllib appends "(at line 3, column 7)" or "(at end of document)"."""
    at = re.search(r" ?\(at (?:line (\d+), column \d+|end of document)\)$", said)
    line = int(at[1]) if at and at[1] else text.count("\n") + 1
    return f"{name}:{line}: this is not valid TOML: {said}"


def _settings_mistakes(text: str, raw: dict[str, Any]) -> Iterator[Mistake]:
    """Yields mistakes in transports' settings; malformed sections are reported elsewhere."""
    endpoints = raw.get("endpoint")
    for index, endpoint in enumerate(endpoints if isinstance(endpoints, list) else []):
        match endpoint:
            case {"transport": str(transport)} if isinstance(settings := endpoint.get("settings", {}), dict):
                try:
                    plugins.configure(transport, settings)
                except UStatusError as error:
                    line = line_of(text, ("endpoint", index, "transport"))
                    yield line, f"endpoint {endpoint.get('name')!r}: {error.message}"
                except ValidationError as error:
                    model = plugins.load(transport).config
                    yield from _explain(text, error, model, ("endpoint", index, "settings"))


def _explain(text: str, mistakes: ValidationError, model: type[BaseModel], within: Location = ()) -> Iterator[Mistake]:
    """Yields line and `key: mistake` for each mistake that `model` found in the table `within`."""
    for error in mistakes.errors(include_url=False):
        location = (*within, *error["loc"])
        where = ".".join(str(part) for part in location)
        if error["type"] == "incoherent":
            yield from ((line_of(text, at), what) for what, at in error["ctx"]["mistakes"])
            continue
        if error["type"] == "extra_forbidden":
            what = f"unknown key {location[-1]!r}{plugins.did_you_mean(model, error['loc'])}"
        else:
            what = error["msg"].removeprefix("Value error, ")
            if isinstance(error["input"], str | int | float | bool) and not logs.is_secret(where):
                what += f" (got {error['input']!r})"
        yield line_of(text, location), f"{where + ': ' if where else ''}{what}"


def line_of(text: str, location: Location) -> int:
    """Returns the line of `location`, or of the nearest table around it. tomllib provides no lines."""
    best, best_depth = 1, 0
    table: Location = ()
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]", line):
            parts = [part.strip().strip("\"'") for part in header[2].split(".")]
            if header[1] == "[[":
                counts[header[2]] = counts.get(header[2], -1) + 1
                table = (*parts, counts[header[2]])
            else:
                table = tuple(p for part in parts for p in ((part, counts[part]) if part in counts else (part,)))
            here = table
        elif entry := re.match(r"\s*([A-Za-z0-9_\-\"'.]+)\s*=", line):
            here = (*table, *(part.strip("\"'") for part in entry[1].split(".")))
        else:
            continue
        depth = min(len(here), len(location))  # the first [[rule]] matches ("rule",)
        if here[:depth] == location[:depth] and depth > best_depth:
            best, best_depth = number, depth
    return best
