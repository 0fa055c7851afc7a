"""A mosquitto for tests, campaigns and benchmarks: with users, access rules and TLS, and a store that outlives it.

with Broker(persistent=True) as broker:  broker.port, broker.kill(), broker.restart()
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from streamer.commands.demo import mosquitto

DIRECTORY_PREFIX: Final = "up-streamer-broker-"


class Server:
    """A server on 127.0.0.1 with methods to start, stop, kill and restart it."""

    host = "127.0.0.1"

    def start(self) -> Self:
        """Start it and wait until it accepts clients. Raises an error with its last output."""
        for delay_s in self._starting():
            time.sleep(delay_s)
        return self

    async def start_async(self) -> Self:
        """As `start`, without blocking the event loop."""
        for delay_s in self._starting():
            await asyncio.sleep(delay_s)
        return self

    def _starting(self) -> Iterator[float]:
        """Start it; yields the seconds to sleep before each check until it is up."""
        raise NotImplementedError

    def stop(self) -> None:
        """End it with SIGTERM; a persistent server saves its store. Idempotent."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(signal.SIGKILL)

    def restart(self) -> Self:
        self.stop()
        return self.start()

    def _end(self, number: signal.Signals) -> None:
        raise NotImplementedError


@dataclass(kw_only=True, eq=False, repr=False)
class Broker(Server):
    """One mosquitto; `restart` keeps its port.

    `users` (name -> password) turns anonymous access off; `acl` is an access file's text; `certificates` is (ca,
    certificate, key) and turns TLS on; `settings` are further lines of mosquitto.conf, which override ours. A
    persistent broker keeps sessions and messages over a stop. `close` removes its directory; if we are killed, the next
    start does. The broker never outlives our process.
    """

    users: Mapping[str, str] | None = None
    acl: str | None = None
    persistent: bool = False
    certificates: tuple[Path, Path, Path] | None = None
    require_client_certificate: bool = False
    settings: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._directory: Path | None = None
        self._lock = -1  # of the directory, if it exists
        self._broker: mosquitto.Broker | None = None

    def __repr__(self) -> str:
        return f"Broker(port={self._broker and self._broker.port}, {'running' if self.running else 'stopped'})"

    @property
    def port(self) -> int:
        assert self._broker is not None, "the broker has not been started"
        return self._broker.port

    @property
    def pid(self) -> int:
        """Of the process; a container has none."""
        assert self._broker is not None
        assert isinstance(self._broker.process, mosquitto.ServerProcess)
        return self._broker.process.pid

    @property
    def running(self) -> bool:
        return self._broker is not None and self._broker.running

    @property
    def log(self) -> str:
        """The output of mosquitto so far."""
        return self._broker.log if self._broker is not None else ""

    def _starting(self) -> Iterator[float]:
        """Raises as mosquitto.Broker.starting."""
        if self.running:
            return
        atexit.register(self.close)
        if self._directory is None:
            _remove_leftovers()
            self._directory, self._lock = _make_directory()
        if self._broker is None:
            self._broker = mosquitto.Broker(self._directory, self._lines(self._directory))
        yield from self._broker.starting()

    def change_acl(self, text: str) -> None:
        """Change the access rules, soon also for connected clients. `acl` must have been set at the start."""
        assert self.acl is not None, "mosquitto reloads only files that it was started with"
        self.acl = text
        if self._directory is not None and self._broker is not None and self._broker.process is not None:
            _private(self._directory / "acl", text)
            self._broker.process.send_signal(signal.SIGHUP)

    def close(self) -> None:
        """Stop it and remove its files. Idempotent."""
        self.stop()
        atexit.unregister(self.close)
        self._broker = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._lock)
            self._directory = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, number: signal.Signals) -> None:
        if self._broker is not None:
            self._broker.end(number)

    def _lines(self, directory: Path) -> list[str]:
        """Returns what the fields mean in mosquitto.conf."""
        lines = [f"persistence {'true' if self.persistent else 'false'}", f"persistence_location {directory}/"]
        if self.users is not None:
            passwords = "".join(password_line(name, password) for name, password in self.users.items())
            lines += ["allow_anonymous false", f"password_file {_private(directory / 'passwords', passwords)}"]
        if self.acl is not None:
            lines.append(f"acl_file {_private(directory / 'acl', self.acl)}")
        if self.certificates is not None:
            ca, certificate, key = self.certificates
            lines += [f"cafile {ca}", f"certfile {certificate}", f"keyfile {key}"]
            lines.append(f"require_certificate {'true' if self.require_client_certificate else 'false'}")
        overridden = {line.split()[0] for line in self.settings}
        return [*(line for line in lines if line.split()[0] not in overridden), *self.settings]


def _make_directory() -> tuple[Path, int]:
    """Returns a new directory and the descriptor of its lock, which the kernel releases when we end."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(directory, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if directory.exists():  # otherwise another process has removed it
                return directory, lock
            os.close(lock)


def _remove_leftovers() -> None:
    """Remove the directories of killed processes."""
    for directory in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or in use
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


def _private(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def password_line(name: str, password: str) -> str:
    """Returns a line of mosquitto_passwd ($7$: PBKDF2 with SHA-512), which may not be installed."""
    salt, rounds = os.urandom(12), 101
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, rounds)
    return f"{name}:$7${rounds}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}\n"
