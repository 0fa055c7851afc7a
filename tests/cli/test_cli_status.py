"""`up-streamer status`, and tables in a terminal, in a narrow one, and in a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from storage import logs
from storage.disk import REAL_DISK
from streamer.commands import cli, terminal
from streamer.data_dir import LOG_LOCK
from streamer.parts.status import StreamerStatus

TOPICS = [f"up://vehicle1/8001/1/80{number:02d}" for number in range(3)]
ROWS = [[topic, "up://dashboard.of.somebody.far.away/9001/1/0", "subscribed", None] for topic in TOPICS]
NAMES = ("topic", "subscriber", "status", "expires")


def shown(width: int | None) -> str:
    console = Console(width=width or 80, soft_wrap=True, highlight=False, force_terminal=width is not None)
    with console.capture() as captured:
        console.print(terminal.tabled("3 subscriptions", NAMES, ROWS, width), crop=False)
    return captured.get()


def test_in_a_pipe_each_row_is_one_whole_line_for_grep() -> None:
    lines = shown(None).splitlines()
    assert lines[0] == "3 subscriptions"
    assert lines[1].split() == list(NAMES)
    assert [line.split("  ") for line in lines[2:]] == [[*row[:3], "-"] for row in ROWS]


def test_in_a_narrow_terminal_each_row_is_a_card_and_in_a_wide_one_a_row_of_a_table() -> None:
    cards = shown(60)
    assert cards.count("topic: up://vehicle1/8001/1/80") == 3
    assert "status: subscribed" in cards
    assert "expires" not in cards, "an empty cell needs no line"
    assert "│" in shown(120)
    assert "topic:" not in shown(120)


def test_show_prints_whole_lines_where_standard_output_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal.tell_all(False, [dict(zip(NAMES, row, strict=True)) for row in ROWS], "title", NAMES)
    assert [line for line in capsys.readouterr().out.splitlines() if TOPICS[1] in line] == [
        "  ".join([*ROWS[1][:3], "-"])
    ]


# The command

GATEWAY = """
[streamer]
data_dir = "{folder}/data"
[[endpoint]]
name = "vehicle"
transport = "local"
authorities = ["vehicle1"]
[[endpoint]]
name = "cloud"
transport = "local"
authorities = ["cloud"]
usubscription = "none"
"""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_: None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "vehicle.toml"
    path.write_text(GATEWAY.format(folder=tmp_path))
    return path


@pytest.fixture
def running(file: Path) -> Iterator[subprocess.Popen[str]]:
    """`up-streamer run` in a process of its own."""
    command = [sys.executable, "-m", "streamer.commands.cli", "run", "--config", str(file), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["ready"]
        yield process
        process.send_signal(signal.SIGTERM)


def status(file: Path, *options: str) -> Result:
    return CliRunner().invoke(cli.app, ["status", "--config", str(file), *options], prog_name="up-streamer")


@pytest.mark.slow
def test_the_status_is_printed_as_lines_as_json_and_of_one_endpoint(file: Path, running: subprocess.Popen[str]) -> None:
    found = status(file)
    assert found.exit_code == 0, found.output
    first, *_ = found.stdout.splitlines()
    assert first.startswith("vehicle1 is ready since ")
    assert [line.split()[:2] for line in found.stdout.splitlines() if line.startswith("cloud ")] == [["cloud", "ready"]]
    answer = json.loads(status(file, "--json").stdout)
    assert StreamerStatus.model_validate(answer, strict=True).config == str(file)
    assert answer["pid"] == running.pid
    one = status(file, "--endpoint", "cloud").stdout
    assert "transport local, connected, for cloud" in one
    assert not [line for line in one.splitlines() if line.startswith("vehicle ") and "->" not in line]
    wrong = status(file, "--endpoint", "clout")
    assert wrong.exit_code == 1
    assert "known: vehicle, cloud" in wrong.output
    running.send_signal(signal.SIGTERM)
    assert running.wait(20) == 0
    stopped = status(file)
    assert stopped.exit_code == 1
    assert "stopped: no streamer with data_dir" in stopped.stdout
    assert [line.split() for line in stopped.stdout.splitlines() if line.startswith("cloud ")] == [["cloud", *"000"]]
    answer = json.loads(status(file, "--json").stdout)
    assert (answer["state"], [one["endpoint"] for one in answer["cursors"]]) == ("stopped", ["cloud", "vehicle"])


@pytest.mark.slow
def test_watching_tells_each_change_once_also_that_it_has_stopped(file: Path, running: subprocess.Popen[str]) -> None:
    command = [sys.executable, "-m", "streamer.commands.cli", "status", "--watch", "--config", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        lines = [watching.stdout.readline().split("  ")[1].strip() for _ in range(3)]
        assert lines == ["vehicle1 is ready", "endpoint vehicle is ready", "endpoint cloud is ready"]
        running.send_signal(signal.SIGTERM)
        changes = (line.split("  ")[1] for line in watching.stdout)
        assert next(one for one in changes if not one.startswith("note: ")).startswith("stopped")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 0


@pytest.mark.slow
def test_watching_in_json_is_one_object_a_line(file: Path, running: subprocess.Popen[str]) -> None:
    command = [sys.executable, "-m", "streamer.commands.cli", "status", "--watch", "--json", "--config", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        first, second = (json.loads(watching.stdout.readline()) for _ in range(2))
        assert first["state"] == second["state"] == "ready"
        assert first["now"] < second["now"]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 0


@pytest.mark.slow
def test_in_a_narrow_terminal_a_status_has_cards(file: Path, running: subprocess.Popen[str]) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
    command = [sys.executable, "-m", "streamer.commands.cli", "status", "--config", str(file)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=without_columns()) as process:
        os.close(theirs)
        text = _read(ours)
        assert process.wait(20) == 0
    assert "endpoint: cloud\r\nstate: ready\r\n" in text
    assert running.poll() is None


@pytest.mark.slow
def test_what_is_watched_in_a_narrow_terminal_is_folded_and_not_cut(file: Path, running: subprocess.Popen[str]) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 200, 30, 0, 0))
    command = [sys.executable, "-m", "streamer.commands.cli", "status", "--watch", "--config", str(file)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=without_columns()) as process:
        os.close(theirs)
        shown = b""
        try:
            while b"since the start" not in shown:  # the last line of the first look
                shown += os.read(ours, 65_536)
                assert len(shown) < 20000, shown.decode()[:3000]
            process.send_signal(signal.SIGINT)
            _read(ours)
            assert process.wait(20) == 0
        finally:
            process.kill()  # it may wait for a terminal that nobody reads
    assert b"0 stored, 0 \r\nsince the start" in shown
    assert running.poll() is None


def without_columns() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}


def _read(terminal: int) -> str:
    parts = list[bytes]()
    with open(terminal, "rb", buffering=0) as file:
        while True:
            try:
                part = file.read(65_536)
            except OSError:  # the other side is closed
                part = b""
            if not part:
                return b"".join(parts).decode()
            parts.append(part)


def test_one_that_starts_and_does_not_answer_yet_is_not_stopped(file: Path) -> None:
    folder = file.parent / "data"
    folder.mkdir()
    lock: Any = REAL_DISK.lock(folder / LOG_LOCK)
    found = status(file)
    lock.release()
    assert found.exit_code == 1
    assert f"runs as process {os.getpid()}, and does not answer yet" in found.output
