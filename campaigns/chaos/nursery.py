"""Processes that start quickly: Python and the product are loaded once, and every start is a fork of that process.

Nursery: "start" -> the loaded process forks -> the child runs `up-streamer ARGUMENTS`, output in a file -> "ended CODE"

Loading takes most of a start's time, and a kill during it loses nothing. So forks allow
more kills at relevant moments. The command itself runs; the first start of each process is an
ordinary one all the same.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from streamer.commands.demo.processes import die_with_parent

LOADED: Final = (
    "zenoh",
    "paho.mqtt.client",
    "transports.zenoh",
    "transports.mqtt5",
    "usubscription.__main__",
    "history.reading.subscriber",
    "history.publisher",
    "streamer.commands.cli",
)

CHILDREN_S_MAX: Final = 5.0  # for the pipe to end, which a fresh fork holds, too


class Child:
    """The part of subprocess.Popen that a Process needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("up-streamer", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Nursery:
    """One loaded process, from which any number are forked."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._loaded = subprocess.Popen(
            [sys.executable, "-m", "campaigns.chaos.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
            preexec_fn=partial(die_with_parent, signal.SIGKILL),
            text=True,
        )
        self._started = threading.Semaphore(0)
        self._child: Child | None = None
        self._children: dict[int, Child] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, module: str, arguments: list[str], log: str) -> Child:
        assert self._loaded.stdin is not None
        self._loaded.stdin.write(json.dumps({"module": module, "arguments": arguments, "log": log}) + "\n")
        self._loaded.stdin.flush()
        self._started.acquire()
        assert self._child is not None
        return self._child

    def _read(self) -> None:
        assert self._loaded.stdout is not None
        for line in self._loaded.stdout:
            said = json.loads(line)
            if "code" in said:
                self._children.pop(said["pid"]).end(said["code"])
            else:
                self._child = self._children[said["pid"]] = Child(said["pid"])
                self._started.release()

    def close(self) -> None:
        """Its children end by themselves, or are ended before."""
        assert self._loaded.stdin is not None
        assert self._loaded.stdout is not None
        self._loaded.kill()
        self._loaded.wait()
        self._loaded.stdin.close()
        self._reader.join(CHILDREN_S_MAX)
        if not self._reader.is_alive():
            self._loaded.stdout.close()


def _become(module: str, arguments: list[str], log: str) -> None:
    """In the forked child: run `python -m module arguments`. Never returns."""
    die_with_parent(signal.SIGKILL)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for target in (1, 2):
        os.dup2(out, target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, 256)
    sys.argv = [module, *arguments]
    code = 1
    try:
        main: Callable[[], Any] = importlib.import_module(module).main
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Fork for each line of stdin; report each start and each end."""
    for name in LOADED:
        importlib.import_module(name)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    def tell(**what: int) -> None:
        os.write(1, json.dumps(what).encode() + b"\n")

    waiting = b""
    while True:
        readable, _, _ = select.select([0, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if pid == 0:
                    break
                tell(pid=pid, code=os.waitstatus_to_exitcode(status))
        if 0 in readable:
            data = os.read(0, 65_536)
            if not data:
                return
            *lines, waiting = (waiting + data).split(b"\n")
            for line in lines:
                asked = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _become(**asked)
                tell(pid=pid)


if __name__ == "__main__":
    serve()
