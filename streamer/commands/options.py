"""What several commands ask for, each written once.

A command's parameter of a Group type stands for all of its fields: `add` spells them out, the command gets the group.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from streamer import config as configs
from streamer.commands import network as networks
from streamer.commands import terminal
from streamer.commands.network import Network
from uprotocol.message import UPayload
from uprotocol.status import invalid
from uprotocol.v1.uattributes_pb2 import UPayloadFormat

LOG_NAME: Final = "history.db"  # in a data_dir

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="The streamer's TOML file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="A setting of the transport, KEY=VALUE (JSON values; repeatable)."),
]


class Group:
    """Options that belong together: a dataclass with a default for each field."""


@dataclass(frozen=True)
class Where(Group):
    """Which network, and who we are on it."""

    transport: Annotated[str | None, typer.Option("--transport", "-t", help="Transport: zenoh, mqtt5, dds, ...")] = None
    settings: Settings = None
    authority: Annotated[str | None, typer.Option("--authority", "-a", help="Who we are: our authority.")] = None
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Take the network from a streamer's TOML file ...")
    ] = None
    endpoint: Annotated[str | None, typer.Option("--endpoint", "-e", help="... and this endpoint of it.")] = None
    entity: Annotated[str, typer.Option("--entity", help="Our uEntity id, hexadecimal.")] = f"{networks.ENTITY:X}"

    def network(self, authority: str | None = None) -> Network:
        """`authority`: who we are where nothing else says it. Raises UStatusError(INVALID_ARGUMENT)."""
        authority = self.authority or authority
        try:
            ue_id = int(self.entity, 16)
        except ValueError:
            raise invalid(f"--entity is a hexadecimal number, got {self.entity!r}") from None
        given = networks.parse_settings(self.settings or [])
        if self.config is not None:
            if self.endpoint is None or self.transport is not None:
                raise invalid("say --config FILE with --endpoint NAME and without --transport")
            found = networks.network_of(self.config, self.endpoint, authority, ue_id)
            return dataclasses.replace(found, settings={**found.settings, **given})
        if self.transport is None or authority is None:
            raise invalid(
                "say which network: --transport NAME --authority WHO [--set KEY=VALUE ...], or --config FILE "
                "--endpoint NAME"
            )
        return Network(self.transport, authority, given, ue_id)


@dataclass(frozen=True)
class Payload(Group):
    """A payload, said in one of four ways, or not at all."""

    text: Annotated[str | None, typer.Option(help="Payload: text.")] = None
    json_payload: Annotated[str | None, typer.Option(help="Payload: JSON.")] = None
    hex: Annotated[str | None, typer.Option(help="Payload: bytes in hexadecimal.")] = None
    file: Annotated[Path | None, typer.Option(help="Payload: the bytes of a file.")] = None

    def read(self) -> UPayload | None:
        """Raises UStatusError(INVALID_ARGUMENT)."""
        if sum(one is not None for one in (self.text, self.json_payload, self.hex, self.file)) > 1:
            raise invalid("say the payload once: one of --text, --json-payload, --hex and --file")
        if self.text is not None:
            return UPayload(self.text.encode(), UPayloadFormat.UPAYLOAD_FORMAT_TEXT)
        try:
            if self.json_payload is not None:
                json.loads(self.json_payload)
                return UPayload(self.json_payload.encode(), UPayloadFormat.UPAYLOAD_FORMAT_JSON)
            if self.hex is not None:
                return UPayload(bytes.fromhex(self.hex), UPayloadFormat.UPAYLOAD_FORMAT_RAW)
            if self.file is not None:
                return UPayload(self.file.read_bytes(), UPayloadFormat.UPAYLOAD_FORMAT_RAW)
        except OSError as error:
            raise invalid(f"can't read {self.file}: {error.strerror}") from None
        except ValueError as error:
            wrong = "--hex is not hexadecimal" if self.json_payload is None else "--json-payload is not JSON"
            raise invalid(f"{wrong}: {error}") from None
        return None


@dataclass(frozen=True)
class DataDir(Group):
    """Where a streamer keeps what it knows."""

    data_dir: Annotated[Path | None, typer.Option(help="The streamer's data_dir ...")] = None
    config: Annotated[Path | None, typer.Option("--config", "-c", help="... or its TOML file.")] = None

    @property
    def path(self) -> Path:
        """Raises UStatusError(INVALID_ARGUMENT)."""
        if (self.data_dir is None) == (self.config is None):
            raise invalid("say either --data-dir DIR or --config FILE")
        return self.data_dir if self.data_dir is not None else configs.load(self.config or Path()).streamer.data_dir

    @property
    def log(self) -> Path:
        """Of its history."""
        return self.path / LOG_NAME


def add(app: typer.Typer, name: str, function: Callable[..., None]) -> None:
    """Makes it a command of `app`. A UStatusError that it raises is told, and ends the process with EXIT_FAILED."""
    app.command(name)(_spelled_out(function))


def _spelled_out(function: Callable[..., None]) -> Callable[..., None]:
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {
        name: hint for name, hint in hints.items() if inspect.isclass(hint) and issubclass(hint, Group)
    }
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        parameters += _fields(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])]

    @functools.wraps(function)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        with terminal.errors():
            function(**given)

    order = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    run.__signature__ = inspect.Signature(order)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _fields(group: Any) -> list[inspect.Parameter]:
    kinds = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=kinds[one.name])
        for one in dataclasses.fields(group)
    ]
