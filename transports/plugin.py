"""How a transport is found: an entry point of the group `up_streamer.transports`, imported only when it is named.

[project.entry-points."up_streamer.transports"]
mynet = "my_package.mynet:PLUGIN"   # PLUGIN = TransportPlugin("mynet", MyConfig, MyTransport, MyTransport.capabilities)

name -> entry point -> import -> a TransportPlugin?      settings -> config -> create -> a UTransport?
        NOT_FOUND      FAILED_PRECONDITION               INVALID_ARGUMENT      FAILED_PRECONDITION

An error of a foreign plugin is reported in one sentence that names it and its package, without a traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Self, cast, get_args

from pydantic import BaseModel, ValidationError

from uprotocol.status import UStatusError, invalid
from uprotocol.transport import Capability, LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode

GROUP: Final = "up_streamer.transports"
ERROR_CHARACTERS_MAX: Final = 300  # of a plugin's exception that we quote

_SHAPE: Final = 'PLUGIN = TransportPlugin("mynet", MyConfig, MyTransport, MyTransport.capabilities)'


class Unusable(UStatusError):
    """An installed plugin does not work here: FAILED_PRECONDITION, with one line that names it, its package and what to
    do."""

    @classmethod
    def of(cls, point: EntryPoint, why: str) -> Self:
        package = _package(point)
        return cls(
            UCode.FAILED_PRECONDITION,
            f"transport {point.name!r}{f' of the package {package}' if package else ''} {why}",
        )


class NotMade(Unusable):
    """Its constructor has raised something else than a UStatusError: this affects one endpoint only."""


@dataclass(frozen=True)
class TransportPlugin:
    """A transport that can be configured by name.

    `config` is a pydantic model with extra="forbid"; `create(config, local)` makes a closed transport and does no I/O:
    `open` does.
    """

    name: str
    config: type[BaseModel]
    create: Callable[[Any, LocalUriProvider], UTransport]
    capabilities: Capability


def names() -> dict[str, EntryPoint]:
    """All installed transports, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def load(name: str) -> TransportPlugin:
    """Import the plugin `name`.

    Raises NOT_FOUND for an unknown name, and FAILED_PRECONDITION for one that can't be used: a module that it needs is
    missing, its import fails, or its entry point does not name a complete TransportPlugin.
    """
    point = names().get(name)
    if point is None:
        raise UStatusError(
            UCode.NOT_FOUND, f"unknown transport {name!r}; installed: {', '.join(sorted(names())) or 'none'}"
        )
    try:
        plugin = point.load()
    except ModuleNotFoundError as error:
        raise Unusable.of(point, f"needs a module that is not installed ({error}): {_remedy(point, error)}") from error
    except Exception as error:  # the plugin's import may raise anything
        raise Unusable.of(point, f"can't be imported from {point.value!r}: {_said(error)}; {_ask(point)}") from error
    if mistake := _mistake(plugin):
        raise Unusable.of(point, f"is wrong: {mistake}; {_ask(point)}")
    assert isinstance(plugin, TransportPlugin)
    return plugin


def configure(name: str, settings: Mapping[str, Any]) -> tuple[TransportPlugin, BaseModel]:
    """The plugin `name` and its configuration. Raises as `load`, and pydantic's ValidationError for invalid
    settings."""
    plugin = load(name)
    try:
        return plugin, plugin.config.model_validate(dict(settings))
    except (ValidationError, UStatusError):
        raise
    except Exception as error:  # from a validator of the plugin
        point = names()[name]
        raise Unusable.of(
            point, f"fails to check its settings: {_said(error)}; change them, or {_ask(point)}"
        ) from error


def create(name: str, settings: Mapping[str, Any], local: LocalUriProvider) -> UTransport:
    """Make a closed transport from its name and its settings.

    Raises as `load`, INVALID_ARGUMENT for invalid settings, the UStatusError that the plugin's constructor raises, and
    NotMade for any other exception or result of it.
    """
    try:
        plugin, config = configure(name, settings)
    except ValidationError as error:
        raise invalid(f"transport {name!r}: {explain(error, load(name).config)}") from None
    try:
        transport: Any = plugin.create(config, local)  # foreign code may return anything
    except UStatusError:
        raise
    except Exception as error:
        point = names()[name]
        raise NotMade.of(
            point, f"can't be made from its settings: {_said(error)}; change them, or {_ask(point)}"
        ) from error
    if not isinstance(transport, UTransport):
        point = names()[name]
        what = f"its create must return a uprotocol.transport.UTransport, and returns {_shown(transport)}"
        raise NotMade.of(point, f"is wrong: {what}; {_ask(point)}")
    return transport


def _mistake(plugin: Any) -> str:
    """What is wrong with the object that an entry point names; "" if nothing."""
    if not isinstance(plugin, TransportPlugin):
        what = f"a transports.plugin.TransportPlugin, such as {_SHAPE}"
        return f"its entry point must name {what}, and names {_shown(plugin)}"
    config, create, capabilities = cast(tuple[Any, Any, Any], (plugin.config, plugin.create, plugin.capabilities))
    if not (isinstance(config, type) and issubclass(config, BaseModel)):
        what = "a pydantic model (a subclass of pydantic.BaseModel, not an instance)"
        return f"config must be {what}, and is {_shown(config)}"
    if not callable(create):
        return f"create must be callable as create(config, local), and is {_shown(create)}"
    if not isinstance(capabilities, Capability):
        return f"capabilities must be a uprotocol.transport.Capability, and is {_shown(capabilities)}"
    return ""


def _package(point: EntryPoint) -> str:
    return str(point.dist.name) if point.dist is not None else ""


def _remedy(point: EntryPoint, error: ModuleNotFoundError) -> str:
    """What to install: the requirements of the extra with the plugin's name. Not the extra itself: its package may be
    on no index."""
    package = _package(point)
    needed: list[str] = []
    if point.dist is not None:
        with contextlib.suppress(Exception):  # unreadable metadata: give the general advice
            needed = _of_extra(point.name, point.dist.requires or [])
    if needed:
        return f"try pip install {' '.join(needed)} (its extra {point.name!r})"
    top = (error.name or point.module).partition(".")[0]
    if top == point.module.partition(".")[0]:
        return f"its own module is missing, so the package is incomplete: install {package or 'it'} again"
    return f"install what provides {top!r}, as the documentation of {package or 'that plugin'} says"


def _of_extra(extra: str, requirements: Sequence[str]) -> list[str]:
    """The requirements of one extra of a package, quoted for a shell, without their conditions."""
    condition = re.compile(rf"""\bextra\s*==\s*['"]{re.escape(extra)}['"]""")
    parts = [requirement.partition(";") for requirement in requirements]
    return [f"'{what.strip()}'" for what, _, condition_of in parts if condition.search(condition_of)]


def _ask(point: EntryPoint) -> str:
    return f"ask the maker of {_package(point) or point.value}; the rules are in docs/writing-a-transport.md"


def _said(error: Exception) -> str:
    """The exception in one line of bounded length."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= ERROR_CHARACTERS_MAX else words[: ERROR_CHARACTERS_MAX - 3] + "..."


def _shown(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"an instance of {type(value).__name__}"


def explain(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """All mistakes in one line: where, what came, what was expected. `model`: the one that raised `error`."""

    def what(one: Any) -> str:
        if one["type"] == "extra_forbidden":
            return "unknown key" + ("" if model is None else did_you_mean(model, one["loc"]))
        return str(one["msg"]).removeprefix("Value error, ")

    return "; ".join(
        f"{'.'.join(map(str, one['loc'])) or 'settings'}: {what(one)}" for one in error.errors(include_url=False)
    )


def did_you_mean(model: type[BaseModel], location: Sequence[int | str]) -> str:
    """A suggestion for the unknown key at `location` in a configuration of `model`; "" if no key is similar."""
    *outer, key = location
    table: type[BaseModel] | None = model
    for part in outer:
        if isinstance(part, str):
            table = None if table is None else _table_of(table, part)
    if table is None:
        return ""
    names = [field.alias or name for name, field in table.model_fields.items()]
    found = difflib.get_close_matches(str(key), names, n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _table_of(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The model of the table, or of the list of tables, under `key`."""
    field = next((field for name, field in model.model_fields.items() if key in (name, field.alias)), None)
    waiting: list[Any] = [] if field is None else [field.annotation]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        waiting += get_args(kind)
    return None
