"""Runs the console blocks of a page, in order, as a reader would.

block of `$ command` and the lines that it prints:   `...` in a line: anything; a line `...`: any lines
comment before a block: not run       skip it
                        until         run it again until it prints these lines
                        stays: NAME   it goes on in a terminal of this name
                        ctrl-c: NAME  end that one first
                        shows: NAME   no command: that terminal prints these lines
<!-- in: FOLDER --> the page takes place in a copy of this folder of the project
a block in another language whose first line is a comment with a file name (`# gateway.toml`) is that file

Ports of the page are replaced by free ones.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from transports.ports import free_port

ROOT: Final = Path(__file__).resolve().parents[2]
DEADLINE_S: Final = 240.0  # of a command; the machine may be loaded
END_S: Final = 20.0  # from SIGINT to SIGKILL
AGAIN_S: Final = 0.5  # between two runs of a command that is to be repeated
PORTS: Final = re.compile(r"\b(1883|1884|7447|7448|7449|9464|9465|9466)\b")
PART: Final = re.compile(
    r"^<!-- (?P<directive>in|not run|until|stays|ctrl-c|shows)(?:: (?P<value>[^>]*?))? -->$"
    r"|^```(?P<language>\w+)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FILE: Final = re.compile(r"^(?:#|//) ([\w./-]+\.\w+)\n")


class Mismatch(AssertionError):
    """A command of a page does not do what the page says."""


@dataclass
class Terminal:
    """A process and what it has printed."""

    command: str
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    read: int = 0  # lines that the page has shown
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.streams = (self.process.stdout, self.process.stderr)
        self.readers = [threading.Thread(target=self._read, args=(one,), daemon=True) for one in self.streams]
        for reader in self.readers:
            reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with self.changed:
                self.lines.append(line.rstrip())
                self.changed.notify_all()

    def expect(self, wanted: list[str]) -> None:
        """Waits until it has printed these lines, after those that were expected before."""
        with self.changed:
            self.changed.wait_for(lambda: found(wanted, self.lines[self.read :]) is not None, DEADLINE_S)
            at = found(wanted, self.lines[self.read :])
        if at is None:
            raise mismatch(self.command, wanted, self.lines)
        self.read += at

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for reader, stream in zip(self.readers, self.streams, strict=True):
            reader.join(END_S)
            stream.close()


class Page:
    """A page that is run in `folder`."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._text, self._folder = path.read_text(encoding="utf-8"), folder
        self._ports: dict[str, str] = {}
        self._terminals: dict[str, Terminal] = {}
        shims = folder / ".bin"
        shims.mkdir()
        for name, code in (("up-streamer", "-m up_streamer"), ("python", ""), ("pytest", "-m pytest")):
            (shims / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {code} "$@"\n')
            (shims / name).chmod(0o755)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = os.environ | {
            "PATH": f"{shims}:{os.environ['PATH']}:/usr/sbin",
            "PYTHONPATH": ":".join(paths),
            "PYTHONUNBUFFERED": "1",
        }

    def run(self) -> None:
        """Raises Mismatch."""
        pending: list[tuple[str, str]] = []
        try:
            for part in PART.finditer(self._text):
                if part["directive"] == "in":
                    self._copy(ROOT / part["value"])
                elif part["directive"]:
                    pending.append((part["directive"], part["value"] or ""))
                else:
                    self._block(part["language"], self._moved(part["body"]), dict(pending))
                    pending = []
        finally:
            for terminal in reversed(self._terminals.values()):
                terminal.end()

    def _copy(self, folder: Path) -> None:
        for path in folder.iterdir():
            if path.suffix in (".toml", ".conf"):
                (self._folder / path.name).write_text(self._moved(path.read_text(encoding="utf-8")))

    def _moved(self, text: str) -> str:
        return PORTS.sub(lambda port: self._ports.setdefault(port[0], str(free_port())), text)

    def _block(self, language: str, body: str, directives: dict[str, str]) -> None:
        if "not run" in directives:
            return
        if name := directives.get("ctrl-c"):
            self._terminals.pop(name).end()
        if language != "console":
            if file := FILE.match(body):
                (self._folder / file[1]).write_text(body)
        elif name := directives.get("shows"):
            self._terminals[name].expect(body.splitlines())
        else:
            for command, wanted in commands(body):
                self._command(command, wanted, directives)

    def _command(self, command: str, wanted: list[str], directives: dict[str, str]) -> None:
        if name := directives.get("stays"):
            terminal = self._terminals[name] = self._start(command)
            terminal.expect(wanted)
            return
        deadline = time.monotonic() + DEADLINE_S
        while True:
            done = self._start(command)
            try:
                code: int | None = done.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                code = None
            done.end()
            if code == 0 and found([*wanted, ""], [*done.lines, ""]) is not None:
                return
            if "until" not in directives or time.monotonic() > deadline:
                raise mismatch(f"{command} (exit code {code})", wanted, done.lines)
            threading.Event().wait(AGAIN_S)

    def _start(self, command: str) -> Terminal:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return Terminal(command, process)


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Each command of a block, and the lines that it prints."""
    parts: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            parts.append((line[2:], []))
        elif parts and parts[-1][0].endswith("\\") and not parts[-1][1]:
            parts[-1] = (parts[-1][0][:-1] + line, [])
        else:
            parts[-1][1].append(line)
    return parts


def found(wanted: list[str], lines: list[str]) -> int | None:
    """How many lines it takes until all that are wanted have come, in order; None: they have not."""
    at = 0
    may_skip = False
    for want in wanted:
        if want == "...":
            may_skip = True
            continue
        pattern = re.compile(
            r"\s*".join(".*".join(map(re.escape, word.split("..."))) for word in want.split()) + r"\s*"
        )
        while at < len(lines) and not pattern.fullmatch(lines[at].strip()):
            if not may_skip:
                return None
            at += 1
        if at == len(lines):
            return None
        at, may_skip = at + 1, False
    return at


def mismatch(command: str, wanted: list[str], lines: list[str]) -> Mismatch:
    return Mismatch("\n".join([f"$ {command}", "should have printed:", *wanted, "has printed:", *lines]))


def has_mosquitto() -> bool:
    return shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin") is not None
