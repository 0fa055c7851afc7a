"""Generates the tables of settings in the documentation, and the schema of the status, from their models.

fields of Config and of each transport's model, with their docstrings or Field(description=...)
    --> <!-- settings: MODULE:MODEL --> ... <!-- end --> in docs
StreamerStatus --> docs/status.schema.json

python tools/config_reference.py            write
python tools/config_reference.py --check    exit 1 if something is stale or missing, or a field has no description

A table is written at its marker; a model within a transport's model (`tls`) is part of that one's table.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import re
import sys
import textwrap
import tomllib
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT: Final = Path(__file__).resolve().parent.parent
DOCS: Final = ROOT / "docs"
CONFIG: Final = "streamer.config:Config"
STATUS: Final = "streamer.parts.status:StreamerStatus"
SCHEMA: Final = "status.schema.json"  # in docs
# models that are not part of Config
SERVICES: Final = (
    "usubscription.__main__:ServiceConfig",
    "spark_ingest.options:Options",
    "spark_ingest.pipeline:Trigger",
)
TABLE: Final = re.compile(r"<!-- settings: (?P<name>[\w.]+:\w+) -->\n(?P<table>.*?)<!-- end -->", re.DOTALL)
HEADER: Final = "| key | value | default | what |\n|---|---|---|---|\n"

_TYPES: Final[dict[Any, str]] = {
    str: "text",
    SecretStr: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Path: "path",
    Any: "anything",
}


class Undocumented(Exception):
    """A table cannot be generated; the argument says what to write where."""


def model(name: str) -> type[BaseModel]:
    """The model that a marker names. Raises Undocumented."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise Undocumented(f"a marker names {name}, but it cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, BaseModel)):
        raise Undocumented(f"a marker names {name}, which is not a pydantic model")
    return found


def name_of(of: type[BaseModel]) -> str:
    return f"{of.__module__}:{of.__qualname__}"


def wanted() -> Iterator[str]:
    """The models that need a table: each section of the configuration, each service, and each transport and
    recovery source of the product."""
    yield from SERVICES
    for name, field in model(CONFIG).model_fields.items():
        sections = models_in(field.annotation)
        if not sections:
            raise Undocumented(f"{CONFIG}: the key {name!r} is in no section, so no table has it: put it into one")
        yield from map(name_of, sections)
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    points = [*groups["up_streamer.transports"].values(), *groups["up_streamer.recovery"].values()]
    for point in points:
        module, _, attribute = point.partition(":")
        yield name_of(getattr(importlib.import_module(module), attribute).config)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """`list[Section]` or `Tls | None` -> [Section], [Tls]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in models_in(part)]


def table(of: type[BaseModel], prefix: str = "") -> str:
    """A row for each field. Raises Undocumented for a field without description."""
    lines = ""
    descriptions = docstrings(of)
    inherited = [name for base in of.__bases__ for name in getattr(base, "model_fields", ())]  # shown last
    for name, field in sorted(of.model_fields.items(), key=lambda one: one[0] in inherited):
        key = prefix + (field.alias or name)
        description = field.description or descriptions.get(name)
        if not description:
            raise Undocumented(
                f"{name_of(of)}: the field {name!r} needs a description: Field(description=..., ...), or a docstring "
                "below it; short, with its unit"
            )
        within = models_in(field.annotation)
        value = "table" if within else values(field)
        cells = (f"`{key}`", value, default(field, within=bool(within)), description)
        lines += "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
        for inner in within:
            lines += table(inner, f"{key}.")
    return lines


def docstrings(of: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field. Parsed here, not by pydantic (use_attribute_docstrings), which would parse it at
    each start of a process."""
    found: dict[str, str] = {}
    for model in reversed([one for one in of.__mro__ if one is not BaseModel and issubclass(one, BaseModel)]):
        try:
            source = inspect.getsource(model)
        except (OSError, TypeError):
            continue  # generated by code
        [definition] = ast.parse(textwrap.dedent(source)).body
        assert isinstance(definition, ast.ClassDef), "a model is a class"
        for field, text in itertools.pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def values(field: FieldInfo) -> str:
    """The allowed values: a type, or the values, with their bounds."""
    bounds = {
        name: getattr(one, name) for one in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(one, name)
    }
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    said = [kind(field.annotation)]
    if "ge" in bounds and high is not None:
        said.append(f"{number(low)} to {number(high)}")
    elif low is not None:
        said.append(f"{number(low)} or more" if "ge" in bounds else f"more than {number(low)}")
    if high is not None and "ge" not in bounds:
        said.append(f"{number(high)} at most" if "le" in bounds else f"less than {number(high)}")
    return ", ".join(said)


def number(value: Any) -> str:
    """The value in TOML notation; long numbers with underscores."""
    return f"{value:_}" if abs(value) >= 10_000 else str(value)


def kind(annotation: Any) -> str:
    if annotation in _TYPES:
        return _TYPES[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(kind(one) for one in arguments if one is not type(None))
    if origin in (list, tuple, set, frozenset):
        of = kind(arguments[0])
        return f"list of {of}" if of.startswith("`") else f"list of {of}s"
    if origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{one.value}`" for one in annotation)
    raise Undocumented(f"tools/config_reference.py cannot describe the type {annotation}: add them to _TYPES")


def default(field: FieldInfo, *, within: bool) -> str:
    value = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
    if value is PydanticUndefined:
        return "required"
    if value is None or within:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, str | Path) and str(value):
        return f"`{value}`"
    return f"`{json.dumps(value)}`" if value else "empty"


def filled(text: str) -> str:
    """The page with current tables."""
    return TABLE.sub(
        lambda found: f"<!-- settings: {found['name']} -->\n{HEADER}{table(model(found['name']))}<!-- end -->", text
    )


def schema() -> str:
    """The JSON schema of the status, as `up-streamer status --json` prints it."""
    return json.dumps(model(STATUS).model_json_schema(mode="serialization"), indent=1) + "\n"


def main(arguments: list[str]) -> int:
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    try:
        new = {path: filled(text) for path, text in pages.items()}
        shown = {found["name"] for text in pages.values() for found in TABLE.finditer(text)}
        for name in wanted():
            if name not in shown:
                raise Undocumented(
                    f"no page has a table of {name}: write <!-- settings: {name} --> and <!-- end --> "
                    "in one of docs/*.md"
                )
    except Undocumented as why:
        print(why, file=sys.stderr)
        return 1
    path = DOCS / SCHEMA
    pages[path], new[path] = path.read_text(encoding="utf-8") if path.exists() else "", schema()
    stale = [path for path, text in pages.items() if new[path] != text]
    if "--check" in arguments:
        for path in stale:
            print(f"docs/{path.name} is stale: run `make config-reference`", file=sys.stderr)
        return bool(stale)
    for path in stale:
        path.write_text(new[path], encoding="utf-8")
        print(f"wrote docs/{path.name}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
