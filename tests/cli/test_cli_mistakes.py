"""One mistake has one exit code and one code, whatever the command; help fits a terminal; shells complete names."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from storage import logs
from streamer.commands import cli
from tests.tiers import ROOT

TOPIC = "//vehicle1/8001/1/8001"
METHOD = "//vehicle1/8001/1/1"
CONFIG = """
[streamer]
data_dir = "data"
[[endpoint]]
name = "v"
transport = "local"
authorities = ["vehicle1"]
[[endpoint]]
name = "volvo"
transport = "local"
authorities = ["*.fleet"]
"""
ON_A_NETWORK = [["subscribe", TOPIC], ["publish", TOPIC], ["call", METHOD], ["replay"], ["history", "vehicle1"]]
IN_A_FILE = [
    ["dead-letters"],
    ["history", "verify"],
    ["history", "acknowledge"],
    ["cursors", "list"],
    ["cursors", "consumers"],
    ["cursors", "adopt", "v", "w"],
    ["cursors", "forget", "v"],
    ["cursors", "skip", "v", "--to", "1h"],
    ["cursors", "release", "job"],
]
WITH_A_STREAMER = [["vehicles"]]
EITHER = [["pause", TOPIC, "v"], ["resume", TOPIC, "v"], ["paused"]]
IN_A_FOLDER = [*IN_A_FILE, *WITH_A_STREAMER, *EITHER]


CHOICES = {  # of commands that take one of several things
    "pause": ["--endpoint", "v"],
    "resume": ["--endpoint", "v"],
    "cursors skip": ["--to", "1h"],
    "dead-letters resend": ["--all"],
    "dead-letters purge": ["--all"],
}


def each(commands: list[list[str]], *options: str) -> list[list[str]]:
    return [[*command, *options] for command in commands]


# mistake -> commands, exit code, code
MISTAKES: dict[str, tuple[list[list[str]], int, str]] = {
    "an unknown endpoint": (
        [*each(ON_A_NETWORK, "-c", "one.toml", "-e", "w"), ["pause", TOPIC, "w", "-c", "one.toml"]],
        1,
        "NOT_FOUND",
    ),
    "what is no URI": (
        [
            *([name, "x", "-t", "local", "-a", "vehicle1"] for name in ("subscribe", "publish", "call")),
            ["history", "vehicle1", "x", "-t", "local", "-a", "vehicle1"],
            *([name, "x", "v", "-c", "one.toml"] for name in ("pause", "resume")),
            ["subscriptions", "-c", "one.toml", "--topic", "x"],
        ],
        2,
        "INVALID_ARGUMENT",
    ),
    "a method in place of a topic": (
        [
            *([name, METHOD, "-t", "local", "-a", "vehicle1"] for name in ("subscribe", "publish")),
            *([name, METHOD, "v", "-c", "one.toml"] for name in ("pause", "resume")),
        ],
        1,
        "INVALID_ARGUMENT",
    ),
    "a streamer that does not run": (each(WITH_A_STREAMER, "-c", "one.toml"), 1, "UNAVAILABLE"),
    "a streamer that has never run": (
        each([["subscriptions"], *IN_A_FILE], "-c", "one.toml"),
        1,
        "INVALID_ARGUMENT",
    ),
    "no such data_dir": (
        [*each(IN_A_FOLDER, "--data-dir", "nowhere"), ["subscriptions", "--store", "nowhere/u.db"]],
        1,
        "INVALID_ARGUMENT",
    ),
    "a streamer that is not named": ([["subscriptions"], *IN_A_FOLDER], 2, "INVALID_ARGUMENT"),
    "a streamer that is named twice": (
        [
            *each(IN_A_FOLDER, "--data-dir", "data", "-c", "one.toml"),
            ["subscriptions", "--store", "x", "-c", "one.toml"],
        ],
        2,
        "INVALID_ARGUMENT",
    ),
    "a network that is not named": (ON_A_NETWORK, 2, "INVALID_ARGUMENT"),
    "a network that is named twice": (
        each(ON_A_NETWORK, "-c", "one.toml", "-t", "local", "-a", "vehicle1"),
        2,
        "INVALID_ARGUMENT",
    ),
    "a file with several networks": (
        [*each(ON_A_NETWORK[:-1], "-c", "one.toml"), ["history", "other", "-c", "one.toml"]],
        2,
        "INVALID_ARGUMENT",
    ),
    "a file that is not there": (
        [
            *(
                [name, uri, "-t", "local", "-a", "v", "--file", "no"]
                for name, uri in (("publish", TOPIC), ("call", METHOD))
            ),
            ["replay", "-t", "local", "-a", "v", "--data", "no"],
            ["demo", "--data", "no"],
        ],
        1,
        "INVALID_ARGUMENT",
    ),
    "a setting without a value": (
        [
            *each(ON_A_NETWORK, "-t", "local", "-a", "vehicle1", "-s", "x"),
            ["usubscription", "-t", "local", "-a", "vehicle1", "--store", "u.db", "-s", "x"],
        ],
        2,
        "INVALID_ARGUMENT",
    ),
    "an unknown transport": (
        [
            *each(ON_A_NETWORK, "-t", "pigeon", "-a", "vehicle1"),
            ["usubscription", "-t", "pigeon", "-a", "vehicle1", "--store", "u.db"],
        ],
        1,
        "NOT_FOUND",
    ),
}


def paths() -> list[list[str]]:
    """Every command of the application."""
    group = typer.main.get_command(cli.app)
    return [
        [name, inner] if inner else [name]
        for name, command in group.commands.items()  # type: ignore[attr-defined]
        for inner in (command.commands if hasattr(command, "commands") else [""])
    ]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    (tmp_path / "one.toml").write_text(CONFIG)
    (tmp_path / "bad.toml").write_text("[streamer]\ncolour = 1\n")
    (tmp_path / "data").mkdir()
    return tmp_path


def invoke(*arguments: str, columns: int = 200) -> Result:
    return CliRunner(env={"COLUMNS": str(columns), "TERM": "dumb"}).invoke(cli.app, arguments, prog_name="up-streamer")


@pytest.mark.parametrize(
    ("command", "exit_code", "code"),
    [
        pytest.param(command, exit_code, code, id=f"{mistake}: {' '.join(command)}")
        for mistake, (commands, exit_code, code) in MISTAKES.items()
        for command in commands
    ],
)
def test_one_mistake_has_one_code(folder: Path, command: list[str], exit_code: int, code: str) -> None:
    done = invoke(*command)
    assert done.stderr.startswith(f"error {code}: "), done.output
    assert done.exit_code == exit_code
    assert not done.stdout


@pytest.mark.parametrize("command", paths(), ids=" ".join)
def test_what_no_command_knows_is_a_usage_error(folder: Path, command: list[str]) -> None:
    assert invoke(*command, "--nonsense").exit_code == 2


def with_a_file() -> list[list[str]]:
    """Every command that reads a configuration, with all that it requires."""
    found = []
    for path in paths():
        command = typer.main.get_command(cli.app)
        for name in path:
            command = command.commands[name]  # type: ignore[attr-defined]
        if "config" in {one.name for one in command.params}:
            values = {"topic": TOPIC, "topics": TOPIC, "method": METHOD, "number": "1", "numbers": "1"}
            required = [one for one in command.params if one.param_type_name == "argument" and one.required]
            given = [values.get(one.name or "", "v") for one in required]
            given += CHOICES.get(" ".join(path), [])
            found.append([*path, *given, *(["-e", "v"] if "transport" in {one.name for one in command.params} else [])])
    return found


@pytest.mark.parametrize("file", ["none.toml", "bad.toml"])
@pytest.mark.parametrize("command", with_a_file(), ids=" ".join)
def test_every_command_ends_alike_for_a_wrong_configuration(folder: Path, command: list[str], file: str) -> None:
    done = invoke(*command, "-c", file)
    assert done.stderr.startswith("error INVALID_ARGUMENT: "), done.output
    assert done.exit_code == 78


# Help


@pytest.mark.parametrize("command", [[], ["cursors"], *paths()], ids=lambda one: " ".join(one) or "all")
def test_help_fits_a_terminal_of_80_columns(command: list[str]) -> None:
    shown = invoke(*command, "--help", columns=80)
    assert shown.exit_code == 0
    assert "…" not in shown.stdout, "a word is cut"
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    if command and command != ["cursors"]:
        at = next(number for number, line in enumerate(lines) if line.startswith(" Example: "))
        text = [line.strip() for line in lines[1:at] if line.strip()]
        for line, following in itertools.pairwise(text):  # lines end because the next word did not fit
            is_end = line[-1] in ".)]" or line.startswith("Usage")
            assert is_end or len(line) + 1 + len(following.split()[0]) > 78, line


def test_the_table_of_the_readme_has_every_command() -> None:
    text = (ROOT / "README.md").read_text().partition("## On the command line")[2].partition("\n## ")[0]
    named = set()
    for row in re.findall(r"^\| `up-streamer ([^|]*)\|", text, re.MULTILINE):
        first, *others = [one.strip(" `") for one in row.split(",")]
        group = first.split()[:-1]
        named |= {first, *(" ".join([*group, one]) for one in others)}
    assert named == {" ".join(path) for path in paths()}


# Completion


def completed(folder: Path, shell: str, *words: str) -> list[str]:
    """What `shell` offers for the last of `words`."""
    line = " ".join(["up-streamer", *words])
    asked = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words))},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    done = subprocess.run(
        [sys.executable, "-m", "up_streamer"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "_UP_STREAMER_COMPLETE": f"complete_{shell}"} | asked,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert not done.stderr
    return (
        re.findall(r"[\w-]+", done.stdout)
        if shell == "zsh"
        else [one.split("\t")[0] for one in done.stdout.split("\n")]
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_and_endpoints_are_completed(folder: Path, shell: str) -> None:
    assert {"subscribe", "subscriptions"} <= set(completed(folder, shell, "su"))
    assert "check" not in completed(folder, shell, "su")
    assert "volvo" in completed(folder, shell, "subscribe", TOPIC, "-c", "one.toml", "-e", "vo")
    assert {"v", "volvo"} <= set(completed(folder, shell, "cursors", "forget", "-c", "one.toml", "v"))


@pytest.mark.parametrize("config", [[], ["-c", "none.toml"], ["-c", "bad.toml"], ["-c", "data"]], ids=str)
def test_without_a_file_no_endpoint_is_completed(folder: Path, config: list[str]) -> None:
    assert completed(folder, "bash", "subscribe", TOPIC, *config, "-e", "v") in ([""], ["", ""])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_shown(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # tests may run without a shell
    shown = invoke("--show-completion", shell)
    assert shown.exit_code == 0
    assert "_UP_STREAMER_COMPLETE" in shown.stdout
