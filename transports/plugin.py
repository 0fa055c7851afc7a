"""How a transport is found: an entry point of the group `up_streamer.transports`, imported only when it is named. Other
kinds of plugins are found in the same way, in groups of their own (`PluginKind`).

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


@dataclass(frozen=True)
class PluginKind:
    """A kind of plugins. `mistake(plugin)` is what is wrong with the object that an entry point names, "" if nothing;
    the plugin has `name`, `config` and `create`, which makes an object of the type `makes`, whose path is `named`."""

    what: str
    group: str
    mistake: Callable[[Any], str]
    makes: type
    named: str
    rules: str  # the page that has the rules for authors


class Unusable(UStatusError):
    """An installed plugin does not work here: FAILED_PRECONDITION, with one line that names it, its package and what to
    do."""

    @classmethod
    def of(cls, kind: PluginKind, point: EntryPoint, why: str) -> Self:
        package = _package(point)
        return cls(
            UCode.FAILED_PRECONDITION,
            f"{kind.what} {point.name!r}{f' of the package {package}' if package else ''} {why}",
        )


class NotMade(Unusable):
    """Its constructor has raised something else than a UStatusError: this affects what is made of it only."""


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


def names(group: str = GROUP) -> dict[str, EntryPoint]:
    """All installed plugins of a group, by name."""
    return {point.name: point for point in entry_points(group=group)}


def load(name: str) -> TransportPlugin:
    """Import the transport `name`. Raises as `load_of`."""
    plugin = load_of(TRANSPORTS, name)
    assert isinstance(plugin, TransportPlugin)
    return plugin


def load_of(kind: PluginKind, name: str) -> Any:
    """Import the plugin `name` of this kind.

    Raises NOT_FOUND for an unknown name, and FAILED_PRECONDITION for one that can't be used: a module that it needs is
    missing, its import fails, or its entry point does not name a complete plugin.
    """
    known = names(kind.group)
    point = known.get(name)
    if point is None:
        raise UStatusError(
            UCode.NOT_FOUND, f"unknown {kind.what} {name!r}; installed: {', '.join(sorted(known)) or 'none'}"
        )
    try:
        plugin = point.load()
    except ModuleNotFoundError as error:
        why = f"needs a module that is not installed ({error}): {_remedy(point, error)}"
        raise Unusable.of(kind, point, why) from error
    except Exception as error:  # the plugin's import may raise anything
        why = f"can't be imported from {point.value!r}: {_said(error)}; {_ask(kind, point)}"
        raise Unusable.of(kind, point, why) from error
    if mistake := kind.mistake(plugin):
        raise Unusable.of(kind, point, f"is wrong: {mistake}; {_ask(kind, point)}")
    return plugin


def configure(name: str, settings: Mapping[str, Any]) -> tuple[TransportPlugin, BaseModel]:
    """The transport `name` and its configuration. Raises as `configure_of`."""
    plugin, config = configure_of(TRANSPORTS, name, settings)
    assert isinstance(plugin, TransportPlugin)
    return plugin, config


def configure_of(kind: PluginKind, name: str, settings: Mapping[str, Any]) -> tuple[Any, BaseModel]:
    """The plugin `name` and its configuration. Raises as `load_of`, and pydantic's ValidationError for invalid
    settings."""
    plugin = load_of(kind, name)
    try:
        config: BaseModel = plugin.config.model_validate(dict(settings))
        return plugin, config
    except (ValidationError, UStatusError):
        raise
    except Exception as error:  # from a validator of the plugin
        point = names(kind.group)[name]
        why = f"fails to check its settings: {_said(error)}; change them, or {_ask(kind, point)}"
        raise Unusable.of(kind, point, why) from error


def create(name: str, settings: Mapping[str, Any], local: LocalUriProvider) -> UTransport:
    """Make a closed transport from its name and its settings. Raises as `create_of`."""
    transport: UTransport = create_of(TRANSPORTS, name, settings, local)
    return transport


def create_of(kind: PluginKind, name: str, settings: Mapping[str, Any], *arguments: Any) -> Any:
    """Make what the plugin `name` makes from its settings and these further arguments.

    Raises as `load_of`, INVALID_ARGUMENT for invalid settings, the UStatusError that the plugin's constructor raises,
    and NotMade for any other exception or result of it.
    """
    try:
        plugin, config = configure_of(kind, name, settings)
    except ValidationError as error:
        raise invalid(f"{kind.what} {name!r}: {explain(error, load_of(kind, name).config)}") from None
    try:
        made = plugin.create(config, *arguments)  # foreign code may return anything
    except UStatusError:
        raise
    except Exception as error:
        point = names(kind.group)[name]
        why = f"can't be made from its settings: {_said(error)}; change them, or {_ask(kind, point)}"
        raise NotMade.of(kind, point, why) from error
    if not isinstance(made, kind.makes):
        point = names(kind.group)[name]
        what = f"its create must return a {kind.named}, and returns {shown(made)}"
        raise NotMade.of(kind, point, f"is wrong: {what}; {_ask(kind, point)}")
    return made


def _mistake(plugin: Any) -> str:
    """What is wrong with the object that an entry point of a transport names; "" if nothing."""
    if not isinstance(plugin, TransportPlugin):
        what = f"a transports.plugin.TransportPlugin, such as {_SHAPE}"
        return f"its entry point must name {what}, and names {shown(plugin)}"
    if mistake := mistake_of(plugin.config, plugin.create, "create(config, local)"):
        return mistake
    capabilities = cast(Any, plugin.capabilities)
    if not isinstance(capabilities, Capability):
        return f"capabilities must be a uprotocol.transport.Capability, and is {shown(capabilities)}"
    return ""


def mistake_of(config: Any, create: Any, call: str) -> str:
    """What is wrong with these two attributes of a plugin; "" if nothing."""
    if not (isinstance(config, type) and issubclass(config, BaseModel)):
        what = "a pydantic model (a subclass of pydantic.BaseModel, not an instance)"
        return f"config must be {what}, and is {shown(config)}"
    if not callable(create):
        return f"create must be callable as {call}, and is {shown(create)}"
    return ""


TRANSPORTS: Final = PluginKind(
    "transport", GROUP, _mistake, UTransport, "uprotocol.transport.UTransport", "docs/writing-a-transport.md"
)


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


def _ask(kind: PluginKind, point: EntryPoint) -> str:
    return f"ask the maker of {_package(point) or point.value}; the rules are in {kind.rules}"


def _said(error: Exception) -> str:
    """The exception in one line of bounded length."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= ERROR_CHARACTERS_MAX else words[: ERROR_CHARACTERS_MAX - 3] + "..."


def shown(value: Any) -> str:
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
