"""A network, and who the command line is on it: Network(transport, authority, settings) -> opened transport."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from streamer import config as configs
from transports import plugin as plugins
from uprotocol import uri as uris
from uprotocol.status import invalid
from uprotocol.transport import LocalUriProvider, UTransport

ENTITY: Final = 0x1_C11  # of the command line itself; instances keep several of them apart
VERSION: Final = 1


@dataclass(frozen=True)
class Network:
    """A network and who we are on it."""

    transport: str
    authority: str
    settings: dict[str, Any] = field(default_factory=dict)
    entity: int = ENTITY

    @property
    def local(self) -> LocalUriProvider:
        return LocalUriProvider(self.authority, self.entity, VERSION)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[UTransport]:
        transport = plugins.create(self.transport, self.settings, self.local)
        async with transport:
            yield transport


def network_of(path: Path, endpoint: str, authority: str | None, entity: int) -> Network:
    """The network of an endpoint of a streamer's configuration. What the streamer listens on, we connect to."""
    config = configs.load(path)
    section = next((one for one in config.endpoint if one.name == endpoint), None)
    if section is None:
        raise invalid(
            f"{path} has no endpoint {endpoint!r}; there are {', '.join(one.name for one in config.endpoint)}"
        )
    settings = dict(section.settings)
    if section.transport == "zenoh" and settings.get("listen"):
        settings["connect"] = [*settings.get("connect", []), *settings.pop("listen")]
        if settings.get("mode") == "router":  # it is the streamer that brings its guests together; we are one
            settings["mode"] = "client"
    for own in ("client_id", "clean_start", "session_expiry_s"):
        settings.pop(own, None)
    named = [one for one in section.authorities if not uris.is_pattern(one)]
    if authority is None and not named:
        raise invalid(f"endpoint {endpoint!r} names no authority: say who you are with --authority")
    return Network(section.transport, authority or named[0], settings, entity)


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """`key=value` with JSON values where they parse, text otherwise; `a.b=1` nests."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise invalid(f"expected KEY=VALUE, got {text!r}")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        *path, last = key.split(".")
        table = settings
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise invalid(f"{part!r} in {text!r} has been given a value already: it can't have keys, too")
        if isinstance(table.get(last), dict) and not isinstance(parsed, dict):
            raise invalid(f"{key!r} in {text!r} has been given keys already: it can't be a value, too")
        table[last] = parsed
    return settings
