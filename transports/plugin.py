"""How a transport is found: an entry point of the group `up_streamer.transports`, imported only when it is named.

[project.entry-points."up_streamer.transports"]
mynet = "my_package.mynet:PLUGIN"                    # PLUGIN = TransportPlugin("mynet", MyConfig, MyTransport, MyTransport.capabilities)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from uprotocol.status import UStatusError, invalid
from uprotocol.transport import Capability, LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode

GROUP: Final = "up_streamer.transports"


@dataclass(frozen=True)
class TransportPlugin:
    """A transport that can be configured by name.

    `config` is a pydantic model with extra="forbid"; `create(config, local)` makes a closed transport and does no I/O: `open` does.
    """

    name: str
    config: type[BaseModel]
    create: Callable[[Any, LocalUriProvider], UTransport]
    capabilities: Capability


def names() -> dict[str, EntryPoint]:
    """Every transport that is installed, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def load(name: str) -> TransportPlugin:
    """Import the plugin `name`. Raises NOT_FOUND for an unknown name, FAILED_PRECONDITION if a package that it needs is missing."""
    point = names().get(name)
    if point is None:
        raise UStatusError(UCode.NOT_FOUND, f"there is no transport {name!r}; installed are {', '.join(sorted(names())) or 'none'}")
    try:
        plugin = point.load()
    except ImportError as error:
        raise UStatusError(
            UCode.FAILED_PRECONDITION,
            f"transport {name!r} needs a package that is not installed ({error}): try pip install 'up-streamer[{name}]'",
        ) from error
    assert isinstance(plugin, TransportPlugin), f"{point.value} is not a TransportPlugin"
    return plugin


def create(name: str, settings: Mapping[str, Any], local: LocalUriProvider) -> UTransport:
    """A closed transport from its name and its settings. Raises as `load`, and INVALID_ARGUMENT for settings that don't fit."""
    plugin = load(name)
    try:
        config = plugin.config.model_validate(dict(settings))
    except ValidationError as error:
        raise invalid(f"transport {name!r}: {explain(error)}") from None
    return plugin.create(config, local)


def explain(error: ValidationError) -> str:
    """One line for each thing that is wrong: where, what came, what was expected."""

    def what(one: Any) -> str:
        return "unknown key" if one["type"] == "extra_forbidden" else str(one["msg"]).removeprefix("Value error, ")

    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'settings'}: {what(one)}" for one in error.errors(include_url=False))
