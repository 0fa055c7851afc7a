"""Ctrl-C and SIGTERM at any time: no traceback, and an exit code that says so."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import ROOT, full

ON_LOCAL = ["-t", "local", "-a", "vehicle1"]
TOPIC = "//vehicle1/8001/1/8001"
ENDLESS = [
    ["subscribe", TOPIC, *ON_LOCAL, "--no-usubscription"],
    ["call", "//vehicle1/8001/1/1", *ON_LOCAL, "--timeout-ms", "100000"],
    ["replay", *ON_LOCAL, "--all", "--rate", "1"],
    ["history", "vehicle1", *ON_LOCAL],
]
CONFIG = """
[streamer]
data_dir = "data"
[[endpoint]]
name = "v"
transport = "local"
authorities = ["vehicle1"]
"""
# sends itself a signal in the middle of the import of a module
INTERRUPTED = """
import os, signal, sys
number, module = int(sys.argv[1]), sys.argv[2]
del sys.argv[1:3]
class Interrupted:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Interrupted())
import up_streamer
up_streamer.main()
"""
# sends itself Ctrl-C in a finalizer, where Python ignores exceptions, before the import of a module
IGNORED = INTERRUPTED.replace(
    "os.kill(os.getpid(), number)",
    "Finalized()\n            time.sleep(100)",
).replace(
    "class Interrupted:",
    """import time
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), number)
class Interrupted:""",
)


def take_ctrl_c() -> None:
    """Workers of pytest-xdist ignore it, and so would their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


AS_IN_A_SHELL: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": str(ROOT)}, "preexec_fn": take_ctrl_c}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one.toml").write_text(CONFIG)
    return tmp_path


def interrupted(
    folder: Path, number: signal.Signals, module: str, *command: str, code: str = INTERRUPTED
) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", code, str(int(number)), module, *command]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=100, check=False, **AS_IN_A_SHELL)


@pytest.mark.parametrize("module", ["streamer", "pydantic", "streamer.commands.cli", "history.log.log", "structlog"])
def test_ctrl_c_while_modules_are_imported_is_no_traceback(folder: Path, module: str) -> None:
    done = interrupted(folder, signal.SIGINT, module, "check", "-c", "one.toml")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("streamer.app", ["run", "-c", "one.toml"]),
        ("usubscription.inspect", ["subscriptions", "-c", "one.toml"]),
        ("streamer.commands.demo.drive", ["replay", *ON_LOCAL]),
        ("transports.local", ENDLESS[0]),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_ctrl_c_while_a_command_imports_what_it_needs(folder: Path, module: str, command: list[str]) -> None:
    done = interrupted(folder, signal.SIGINT, module, *command)
    assert done.returncode in (130, 0 if command[0] == "run" else 130)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_ctrl_c_in_a_finalizer_is_not_ignored(folder: Path) -> None:
    command = ["subscriptions", "-c", "one.toml"]
    done = interrupted(folder, signal.SIGINT, "usubscription.inspect", *command, code=IGNORED)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_sigterm_while_modules_are_imported_is_the_systems(folder: Path) -> None:
    done = interrupted(folder, signal.SIGTERM, "pydantic", "check", "-c", "one.toml")
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")


def test_who_ignores_ctrl_c_keeps_that(folder: Path) -> None:
    """As `nohup`, and a shell for what it runs in the background, do."""
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + INTERRUPTED
    line = [sys.executable, "-c", code, str(int(signal.SIGINT)), "pydantic", "--version"]
    done = subprocess.run(
        line, cwd=folder, env=AS_IN_A_SHELL["env"], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("up-streamer ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_waits_ends_with_the_number_of_the_signal(
    folder: Path, number: signal.Signals, code: int
) -> None:
    command = [sys.executable, "-m", "up_streamer", *ENDLESS[0]]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, **AS_IN_A_SHELL) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"listening")
        process.send_signal(number)
        assert process.wait(100) == code
        assert process.stderr.read() == b""


@full
@pytest.mark.parametrize("after_ms", [60, 150, 300, 450, 600, 800, 1_000])
@pytest.mark.parametrize("command", [*ENDLESS, ["run", "-c", "one.toml"]], ids=lambda one: one[0])
def test_ctrl_c_in_the_first_second(folder: Path, command: list[str], after_ms: int) -> None:
    """By the clock: at no time is it another way out, once the interpreter itself has started."""
    line = [sys.executable, "-m", "up_streamer", *command]
    with subprocess.Popen(
        line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **AS_IN_A_SHELL
    ) as process:
        try:
            process.wait(after_ms / 1_000)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        shown, reported = process.communicate(timeout=100)
    if process.returncode in (-signal.SIGINT, 1) and not re.search(r'up_streamer\.py", line \d+, in main', reported):
        return  # the machine is slow: the interpreter had not come to our first line
    assert "Traceback" not in shown + reported
    assert process.returncode in (130, 0 if command[0] == "run" else 130)
