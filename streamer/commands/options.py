"""Options that several commands share, and the network that they describe.

If the type of a command's parameter is a dataclass, `add` makes an option of each of its fields.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import tomllib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer
from google.protobuf.message import Message

from streamer import config as configs
from streamer.commands import terminal
from streamer.commands.terminal import Misuse
from streamer.data_dir import LOG_FILE
from streamer.operating import known
from transports import plugin as plugins
from uprotocol import uri as uris
from uprotocol.message import UPayload
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

CLIENT_ENTITY: Final = 0x1_C11  # of the command line; the instance id distinguishes several of them
CLIENT_VERSION: Final = 1


def endpoints(context: typer.Context, incomplete: str) -> list[str]:
    """Completes the name of an endpoint from the file of --config, unchecked; nothing without one."""
    try:
        found = tomllib.loads(Path(context.params["config"]).read_text(encoding="utf-8-sig"))["endpoint"]
        return [name for one in found if (name := str(one["name"])).startswith(incomplete)]
    except (KeyError, TypeError, OSError, ValueError):
        return []


ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="The streamer's TOML file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="A setting of the transport, KEY=VALUE (JSON values; repeatable)."),
]
Data = Annotated[Path | None, typer.Option(help="A recorded drive (CSV); without it, a drive is simulated.")]
Seed = Annotated[int, typer.Option(help="Seed of the simulated drive.")]


@dataclass(frozen=True)
class Where:
    """A network, and our address on it."""

    transport: Annotated[str | None, typer.Option("--transport", "-t", help="Transport: zenoh, mqtt5, dds, ...")] = None
    settings: Settings = None
    authority: Annotated[str | None, typer.Option("--authority", "-a", help="Our authority.")] = None
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Take the network from a streamer's TOML file ...")
    ] = None
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", "-e", help="... and this endpoint, if it has several.", autocompletion=endpoints),
    ] = None
    entity: Annotated[str, typer.Option("--entity", help="Our uEntity id, hexadecimal.")] = f"{CLIENT_ENTITY:X}"

    def network(self, authority: str | None = None, *, to: str = "") -> Network:
        """Returns the network. `authority`: default of --authority. `to`: an authority that is there; it says which of
        several endpoints is meant without --endpoint. Raises Misuse, and what `network_of` raises."""
        authority = self.authority or authority
        try:
            ue_id = int(self.entity, 16)
        except ValueError:
            raise Misuse(f"--entity is a hexadecimal number, got {self.entity!r}") from None
        given = parse_settings(self.settings or [])
        if self.config is not None:
            if self.transport is not None:
                raise Misuse("say either --config FILE or --transport NAME: both name a network")
            found = network_of(self.config, self.endpoint, authority, ue_id, to=to)
            return dataclasses.replace(found, settings={**found.settings, **given})
        if self.transport is None or authority is None:
            raise Misuse(
                "say which network: --config FILE of a streamer there [--endpoint NAME], or --transport NAME "
                "--authority WHO [--set KEY=VALUE ...]"
            )
        return Network(self.transport, authority, given, ue_id)


@dataclass(frozen=True)
class Payload:
    """A payload, given by one of four options, or none."""

    text: Annotated[str | None, typer.Option(help="Payload: text.")] = None
    json_payload: Annotated[str | None, typer.Option(help="Payload: JSON.")] = None
    hex: Annotated[str | None, typer.Option(help="Payload: bytes in hexadecimal.")] = None
    file: Annotated[Path | None, typer.Option(help="Payload: the bytes of a file.")] = None

    def read(self, type: type[Message] | None = None) -> UPayload | None:
        """Returns the payload, or None. `type`: what JSON is encoded as.

        Raises Misuse; INVALID_ARGUMENT for a file that can't be read, or JSON that is no `type`.
        """
        if sum(one is not None for one in (self.text, self.json_payload, self.hex, self.file)) > 1:
            raise Misuse("say the payload once: one of --text, --json-payload, --hex and --file")
        if self.text is not None:
            return UPayload(self.text.encode(), UPayloadFormat.UPAYLOAD_FORMAT_TEXT)
        try:
            if self.json_payload is not None:
                json.loads(self.json_payload)
                if type is not None:
                    return known.encode(self.json_payload, type)
                return UPayload(self.json_payload.encode(), UPayloadFormat.UPAYLOAD_FORMAT_JSON)
            if self.hex is not None:
                return UPayload(bytes.fromhex(self.hex), UPayloadFormat.UPAYLOAD_FORMAT_RAW)
            if self.file is not None:
                return UPayload(self.file.read_bytes(), UPayloadFormat.UPAYLOAD_FORMAT_RAW)
        except OSError as error:
            raise invalid(f"can't read {self.file}: {error.strerror}") from None
        except ValueError as error:
            wrong = "--hex is not hexadecimal" if self.json_payload is None else "--json-payload is not JSON"
            raise Misuse(f"{wrong}: {error}") from None
        return None


@dataclass(frozen=True)
class DataDir:
    """The folder in which a streamer keeps its files."""

    data_dir: Annotated[Path | None, typer.Option(help="The streamer's data_dir ...")] = None
    config: Annotated[Path | None, typer.Option("--config", "-c", help="... or its TOML file.")] = None

    @property
    def path(self) -> Path:
        """The folder. Raises Misuse."""
        if (self.data_dir is None) == (self.config is None):
            raise Misuse("say either --data-dir DIR or --config FILE")
        return self.data_dir if self.data_dir is not None else load(self.config or Path()).streamer.data_dir

    @property
    def log(self) -> Path:
        return self.path / LOG_FILE


@dataclass(frozen=True)
class DemoOptions:
    data: Annotated[
        Path | None,
        typer.Option(
            help="A recorded drive (CSV), or a folder with one for each vehicle; without it, four simulated ones."
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of the first simulated drive.")] = 1
    seconds: Annotated[
        int | None, typer.Option(min=10, help="Length of the drives, at most; without it, 600 of simulated ones.")
    ] = None
    rate: Annotated[float, typer.Option(min=1, help="Samples per second, of all vehicles together.")] = 20_000
    out: Annotated[Path, typer.Option("--out", help="Folder for the plot.")] = Path("out")
    without_mqtt: Annotated[
        bool, typer.Option("--without-mqtt", help="Use no MQTT broker: the cloud is on Zenoh, too.")
    ] = False
    keep: Annotated[bool, typer.Option(help="Keep data and configurations.")] = False


def add(app: typer.Typer, function: Callable[..., None]) -> None:
    """Make `function` a command of `app`."""
    app.command(function.__name__.rstrip("_").replace("_", "-"))(as_command(function))


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """Returns `function` as typer takes it. A UStatusError is printed and ends the process with EXIT_FAILED."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            kinds = get_type_hints(groups[name], include_extras=True)
            fields = dataclasses.fields(groups[name])
            parameters += [
                parameter.replace(name=one.name, default=one.default, annotation=kinds[one.name]) for one in fields
            ]
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    @functools.wraps(function)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{one.name: given.pop(one.name) for one in dataclasses.fields(group)})
        with terminal.errors():
            function(**given)

    order = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    run.__doc__ = _paragraphs(function.__doc__ or "")
    run.__signature__ = inspect.Signature(order)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _paragraphs(text: str) -> str:
    """Returns a docstring with one line for each paragraph: the terminal breaks lines where it ends."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def load(path: Path) -> configs.Config:
    """Returns a streamer's configuration. A mistake in the file ends any command with EXIT_CONFIG."""
    with terminal.errors(terminal.EXIT_CONFIG):
        return configs.load(path)


def uri(text: str) -> UUri:
    """Returns the URI of an argument. Raises Misuse."""
    try:
        return uris.parse(text)
    except UStatusError as error:
        raise Misuse(error.message) from None


# Networks


@dataclass(frozen=True)
class Network:
    """A network, and our address on it."""

    transport: str
    authority: str
    settings: dict[str, Any] = field(default_factory=dict)
    entity: int = CLIENT_ENTITY

    @property
    def local(self) -> LocalUriProvider:
        return LocalUriProvider(self.authority, self.entity, CLIENT_VERSION)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[UTransport]:
        transport = plugins.create(self.transport, self.settings, self.local)
        async with transport:
            yield transport


def network_of(path: Path, endpoint: str | None, authority: str | None, entity: int, *, to: str = "") -> Network:
    """Returns the network of an endpoint in a streamer's configuration; without `endpoint`, of the only one, or of that
    where the authority `to` is. We connect where the streamer listens.

    Raises Misuse; NOT_FOUND for an unknown endpoint.
    """
    config = load(path)
    names = ", ".join(one.name for one in config.endpoint)
    if endpoint is None:
        section = _endpoint_to(config, to)
        if section is None:
            raise Misuse(f"{path} has several endpoints: say which one with --endpoint NAME: {names}")
        if section is not config.home:  # as the streamer itself, which the others there know
            authority = authority or config.authority
    else:
        section = next((one for one in config.endpoint if one.name == endpoint), None)
        if section is None:
            raise UStatusError(UCode.NOT_FOUND, f"{path} has no endpoint {endpoint!r}; there are {names}")
    settings = dict(section.settings)
    if section.transport == "zenoh" and settings.get("listen"):
        settings["connect"] = [*settings.get("connect", []), *settings.pop("listen")]
        if settings.get("mode") == "router":  # the streamer is the router; we are its client
            settings["mode"] = "client"
    for own in ("client_id", "clean_start", "session_expiry_s"):
        settings.pop(own, None)
    named = [one for one in section.authorities if not uris.is_pattern(one)]
    if authority is None and not named:
        raise Misuse(f"endpoint {section.name!r} names no authority: say who you are with --authority")
    return Network(section.transport, authority or named[0], settings, entity)


def _endpoint_to(config: configs.Config, authority: str) -> configs.EndpointSection | None:
    if len(config.endpoint) == 1:
        return config.endpoint[0]
    there = [one for one in config.endpoint if authority and uris.is_one_of(authority, set(one.authorities))]
    return min(there, key=lambda one: authority not in one.authorities, default=None)


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Parses `key=value`; a value that is not JSON is text. `a.b=1` nests."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise Misuse(f"expected KEY=VALUE, got {text!r}")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        *path, last = key.split(".")
        table = settings
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise Misuse(f"{part!r} in {text!r} has been given a value already: it can't have keys, too")
        if isinstance(table.get(last), dict) and not isinstance(parsed, dict):
            raise Misuse(f"{key!r} in {text!r} has been given keys already: it can't be a value, too")
        table[last] = parsed
    return settings
