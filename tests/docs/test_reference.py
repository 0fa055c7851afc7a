"""The generated pages are current, and the commands and configurations in the documentation are real."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from streamer import config as configs
from streamer.commands.cli import app
from tests.test_docs import pages
from tools import reference

ROOT: Final = Path(__file__).resolve().parents[2]
ROOT_COMMAND: Final[Any] = typer.main.get_command(app)
PARTS: Final = {"endpoint", "streamer"}  # of a whole configuration
NAMES: Final = [path.relative_to(ROOT).as_posix() for path in pages()]


def test_the_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--check"]) == 0, capsys.readouterr().err


def test_events_of_a_module() -> None:
    code = """
TEXT: Final = "a constant"
def f(self, what):
    log.warning(what, endpoint=self.name, **more)
    log.info("not of interest")
    self.f("given by a caller")
    method = log.error if bad else log.info
    method(f"made of {bad}")
    log.error(TEXT, exc_info=error)
"""
    assert set(reference.events_of(ast.parse(code), "m")) == {
        reference.Event("given by a caller", "warning", ("endpoint", "..."), "m"),
        reference.Event("made of ...", "error", (), "m"),
        reference.Event("a constant", "error", (), "m"),
    }


def test_an_event_whose_text_is_unknown_is_named() -> None:
    with pytest.raises(reference.Unknown, match="m, line 1: the text of the event is no constant"):
        list(reference.events_of(ast.parse("log.error(where())"), "m"))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of each `up-streamer ...` that is code: in a block, or in a line."""
    indented = re.findall(r"^(?:    (?:\$ )?|\$ )(up-streamer [^\n]*(?:\\\n[^\n]*)*)$", text, re.MULTILINE)
    for found in (*indented, *re.findall(r"`(up-streamer [^`\n]+)`", text)):
        line = re.sub(r"\\\n", " ", re.sub(r"(?<=\s)#.*", "", found))
        try:
            words = shlex.split(line)
        except ValueError:
            continue  # prose
        yield words[1:]


def mistake_in(words: list[str]) -> str:
    """What is wrong with a command line: an unknown command or option. Empty: nothing."""
    command, names = ROOT_COMMAND, "up-streamer"
    while words and getattr(command, "commands", None) and words[0] in command.commands:
        command, names, words = command.commands[words[0]], f"{names} {words[0]}", words[1:]
    is_group = command is ROOT_COMMAND
    if is_group and words and re.fullmatch(r"[a-z][a-z-]+", words[0]):
        return f"{names} has no command {words[0]}"
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    wrong = [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]
    return f"{names} has no option {wrong[0]}" if wrong else ""


@pytest.mark.parametrize("name", NAMES)
def test_each_command_line_is_possible(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not [found for words in command_lines(text) if (found := mistake_in(words))]


@pytest.mark.parametrize("name", NAMES)
def test_each_toml_block_is_one(name: str, tmp_path: Path) -> None:
    """A whole configuration is loaded; a part of one has to be TOML, with sections that exist."""
    for block in blocks((ROOT / name).read_text(encoding="utf-8"), "toml"):
        found = tomllib.loads(block)
        if set(found) >= PARTS:
            configs.loads(block)
        elif name in ("README.md", "docs/configuration.md", "docs/operating.md", "docs/security.md"):
            assert set(found) <= set(configs.Config.model_fields)


@pytest.mark.parametrize("name", NAMES)
def test_each_python_block_compiles(name: str) -> None:
    for block in blocks((ROOT / name).read_text(encoding="utf-8"), "python"):
        compile(block, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
