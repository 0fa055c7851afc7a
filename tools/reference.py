"""Generates docs/commands.md from the command line, and docs/log-events.md from the calls of the log.

streamer.commands.cli  --> docs/commands.md     each command: what it does, examples, arguments, options
calls of log.warning, log.error, log.exception in the product --> docs/log-events.md

python tools/reference.py            write
python tools/reference.py --check    exit 1 if a page is stale, or the text of an event can't be found out
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, NamedTuple, get_args, get_origin

ROOT: Final = Path(__file__).resolve().parent.parent
COMMANDS: Final = ROOT / "docs" / "commands.md"
EVENTS: Final = ROOT / "docs" / "log-events.md"
GENERATED: Final = "`make config-reference` generates this page: do not edit it."
LEVELS: Final = {"warning": "warning", "error": "error", "exception": "error", "critical": "error"}
SKIPPED: Final = re.compile(r"_pb2|^transports/conformance/|/_compiled/|^streamer/commands/demo/|^transports/new\.py$")
KINDS: Final[dict[Any, str]] = {bool: "", str: "text", int: "whole number", float: "number", Path: "path"}


class Unknown(Exception):
    """A page cannot be generated; the argument says what to change where."""


# Commands


def commands_page() -> str:
    """Returns docs/commands.md."""
    import typer

    from streamer.commands.cli import app

    command: Any = typer.main.get_command(app)
    lines = [
        "# Commands",
        "",
        GENERATED,
        "",
        "`up-streamer COMMAND --help` shows the same. Exit codes: [README.md](../README.md#on-the-command-line).",
        "",
    ]
    found = list(commands(command, "up-streamer"))
    lines += ["| command | what |", "|---|---|"]
    for name, one in found:
        first = paragraphs(one)[0].partition(". ")[0].rstrip(".")
        lines.append(f"| [`{name}`](#{name.replace(' ', '-')}) | {escaped(first)} |")
    for name, one in found:
        lines += ["", f"## {name}", "", *described(name, one)]
    return "\n".join(lines) + "\n"


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields each command that does something by itself, with its whole name."""
    inner = getattr(command, "commands", None)
    if inner is None or (command.invoke_without_command and name != "up-streamer"):
        yield name, command
    for key, one in sorted((inner or {}).items()):
        yield from commands(one, f"{name} {key}")


def paragraphs(command: Any) -> list[str]:
    if not command.help:
        raise Unknown(f"the command {command.name} has no docstring")
    return [re.sub(r"\[/?(bold)?\]", "", part) for part in command.help.split("\n\n")]


def described(name: str, command: Any) -> Iterator[str]:
    examples = [part for part in paragraphs(command) if part.startswith("Example: ")]
    if not examples:
        raise Unknown(f"{name} has no example in its docstring: `Example: [bold]{name} ...[/]`")
    yield from (f"{escaped(part)}\n" for part in paragraphs(command) if part not in examples)
    yield from (f"    {example.removeprefix('Example: ')}" for example in examples)
    yield from ("", "| argument, option | value | default | what |", "|---|---|---|---|")
    for one in command.params:
        if not one.hidden and one.name != "help":
            value = kind(one.type_descriptor.annotation)
            yield f"| {names(one)} | {value} | {default(one)} | {escaped(one.help or '')} |"


def names(parameter: Any) -> str:
    if not parameter.opts[0].startswith("-"):
        return f"`{parameter.name.upper()}`" + (" ..." if parameter.nargs == -1 else "")
    return ", ".join(f"`{one}`" for one in [*parameter.opts, *parameter.secondary_opts])


def kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in KINDS:
        return KINDS[annotation]
    if origin is UnionType:
        return " or ".join(kind(one) for one in arguments if one is not NoneType)
    if origin is list:
        return f"{kind(arguments[0])}, repeatable"
    if arguments:
        return ", ".join(f"`{one}`" for one in arguments)  # of a Literal
    return ", ".join(f"`{one.value}`" for one in annotation)  # of an Enum


def default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or value is False or value in ([], ()):
        return ""
    return f"`{getattr(value, 'value', value)}`" if value is not True else "on"


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


# Events


class Event(NamedTuple):
    text: str
    level: str
    keys: tuple[str, ...]
    module: str


def events_page() -> str:
    """Returns docs/log-events.md."""
    lines = [
        "# Log events",
        "",
        GENERATED,
        "",
        "Every event of level warning or error; `...` stands for a changing part. `exception` is added where code "
        "failed. What the lines look like, and how repeats are merged: [configuration.md](configuration.md#the-log).",
    ]
    found = sorted(set(events()), key=lambda one: (one.module.split(".")[0], one.text.lower(), one))
    for package in sorted({one.module.split(".")[0] for one in found}):
        lines += ["", f"## {package}", "", "| event | level | details | module |", "|---|---|---|---|"]
        lines += [
            f"| {escaped(one.text)} | {one.level} | {', '.join(f'`{key}`' for key in one.keys)} | `{one.module}` |"
            for one in found
            if one.module.split(".")[0] == package
        ]
    return "\n".join(lines) + "\n"


def events() -> Iterator[Event]:
    from tools.house import PRODUCT

    for path in sorted(path for name in PRODUCT for path in (ROOT / name).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if not SKIPPED.search(file):
            module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            yield from events_of(ast.parse(path.read_text(encoding="utf-8")), module)


def events_of(tree: ast.AST, module: str) -> Iterator[Event]:
    """Yields the events of a module. Raises Unknown."""
    constants = {
        ast.unparse(one.target): one.value for one in getattr(tree, "body", ()) if isinstance(one, ast.AnnAssign)
    }
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    owner = {id(inner): function for function in functions for inner in ast.walk(function)}  # the innermost one
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        function = owner.get(id(call))
        for level in levels(call.func, function):
            said = call.args[0]
            said = constants.get(said.id) or said if isinstance(said, ast.Name) else said
            found = list(texts(said, function, functions))
            if not found:
                raise Unknown(f"{module}, line {call.lineno}: the text of the event is no constant")
            keys = tuple(one.arg or "..." for one in call.keywords if one.arg not in ("exc_info", "_kind"))
            yield from (Event(text, level, keys, module) for text in found)


def levels(called: ast.expr, function: ast.AST | None) -> set[str]:
    """Returns the levels with which `called` writes to the log."""
    if isinstance(called, ast.Attribute):
        is_log = ast.unparse(called.value).rpartition(".")[2] in ("log", "_log", "logger")
        return {LEVELS[called.attr]} if is_log and called.attr in LEVELS else set()
    if isinstance(called, ast.Name) and function is not None:  # method = log.warning if ... else log.error
        attributes = (one for value in assigned(called.id, function) for one in ast.walk(value))
        return {level for one in attributes if isinstance(one, ast.Attribute) for level in levels(one, None)}
    return set()


def assigned(name: str, function: ast.AST) -> Iterator[ast.expr]:
    for one in ast.walk(function):
        if isinstance(one, ast.Assign):
            for target in one.targets:
                if ast.unparse(target) == name:
                    yield one.value
                elif isinstance(target, ast.Tuple) and isinstance(one.value, ast.Tuple):
                    pairs = zip(target.elts, one.value.elts, strict=True)
                    yield from (value for to, value in pairs if ast.unparse(to) == name)


def texts(value: ast.expr, function: Any, functions: list[Any], depth: int = 0) -> Iterator[str]:
    """Yields what an expression may be, as far as it is constant."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.JoinedStr):
        yield "".join(str(one.value) if isinstance(one, ast.Constant) else "..." for one in value.values)
    elif isinstance(value, ast.IfExp):
        yield from texts(value.body, function, functions, depth)
        yield from texts(value.orelse, function, functions, depth)
    elif isinstance(value, ast.BinOp):
        for left in texts(value.left, function, functions, depth) or ("...",):
            yield from (left + right for right in texts(value.right, function, functions, depth) or ("...",))
    elif isinstance(value, ast.Name) and function is not None and depth < 3:
        for one in assigned(value.id, function):
            yield from texts(one, function, functions, depth + 1)
        yield from passed(value.id, function, functions, depth)
    elif isinstance(value, ast.Attribute) and depth < 3:
        for one in (found for setter in functions for found in assigned(ast.unparse(value), setter)):
            yield from (text for text in texts(one, function, functions, depth + 1) if text)
        for getter in (one for one in functions if one.name == value.attr):  # a property
            for returned in (one for one in ast.walk(getter) if isinstance(one, ast.Return) and one.value is not None):
                yield from texts(returned.value, getter, functions, depth + 1)


def passed(name: str, function: Any, functions: list[Any], depth: int) -> Iterator[str]:
    """Yields what the functions of the module pass to `function` for its parameter `name`."""
    parameters = [one.arg for one in function.args.args]
    if name not in parameters:
        return
    place = parameters.index(name) - (parameters[0] == "self")
    for caller in functions:
        for call in ast.walk(caller):
            if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == function.name:
                given = [*call.args[place : place + 1], *(one.value for one in call.keywords if one.arg == name)]
                for one in given:
                    yield from texts(one, caller, functions, depth + 1)


def main(arguments: list[str]) -> int:
    try:
        new = {COMMANDS: commands_page(), EVENTS: events_page()}
    except Unknown as why:
        print(why, file=sys.stderr)
        return 1
    stale = [path for path, text in new.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if "--check" in arguments:
            print(f"docs/{path.name} is stale: run `make config-reference`", file=sys.stderr)
        else:
            path.write_text(new[path], encoding="utf-8")
            print(f"wrote docs/{path.name}")
    return bool(stale) and "--check" in arguments


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
