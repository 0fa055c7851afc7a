"""A private mosquitto on a free loopback port: for tests, the demo and benchmarks.

the binary on PATH, else a container        with Broker() as broker:  broker.port
                                            installs nothing; in a checkout, use tools/mosquitto.py
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from streamer.demo.processes import die_with_parent
from transports.ports import free_port
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

# distributions install daemons here, often outside a user's PATH
PATHS: Final = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin")
PORT_TRIES_MAX: Final = 5  # another process may take the port before mosquitto binds it
START_MS_MAX: Final = 20_000  # enough for a container on a busy machine
STOP_MS_MAX: Final = 10_000  # mosquitto writes its store within milliseconds; beyond this it hangs
PROBE_MS: Final = 10
DIRECTORY_PREFIX: Final = "up-streamer-broker-"
IMAGE: Final = "eclipse-mosquitto:2"
MISSING: Final = (
    "no MQTT broker: install the package mosquitto of your system, "
    "or start docker and install the Python package testcontainers, so that it can run in a container"
)


def find() -> str | None:
    """Returns the path of mosquitto, or None."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path=os.pathsep.join(PATHS))


def runner() -> Callable[[Path], ServerProcess | _Container]:
    """Returns a function that runs mosquitto with a configuration file: the binary, else a container. Raises
    FAILED_PRECONDITION if both are missing."""
    binary = find()
    if binary is not None:
        return lambda config: ServerProcess([binary, "-c", str(config)], config.parent / "log")
    has_containers = shutil.which("docker") is not None and importlib.util.find_spec("testcontainers") is not None
    if not has_containers or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        raise UStatusError(UCode.FAILED_PRECONDITION, MISSING)
    return _Container


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


class ServerProcess:
    """A command that runs until `end`, or until this process ends. Linux also kills it when the thread that started it
    ends, so start it on the main thread."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                command,
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=functools.partial(die_with_parent, signal.SIGKILL, os.getpid()),
                # Ctrl-C must not end the server while its clients still send
                start_new_session=True,
            )

    def alive(self) -> bool:
        return self._popen.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)  # no-op if it has ended

    def end(self, number: signal.Signals, stop_s_max: float = STOP_MS_MAX / 1000) -> None:
        """Send the signal and wait; after `stop_s_max`, kill it."""
        self.send_signal(number)
        try:
            self._popen.wait(stop_s_max)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


class _Container:
    """mosquitto in a container on the host's network, so that configuration and ports are the same as for the
    binary."""

    def __init__(self, config: Path) -> None:
        from testcontainers.core.container import DockerContainer

        container: Any = DockerContainer(IMAGE).with_volume_mapping(str(config.parent), str(config.parent), "rw")
        container = container.with_kwargs(network_mode="host", user=f"{os.geteuid()}:{os.getegid()}")
        self._container: Any = container.with_command(f"mosquitto -c {config}").start()

    def alive(self) -> bool:
        inner = self._container.get_wrapped_container()
        inner.reload()
        return bool(inner.status in ("created", "running"))

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(Exception):  # it may have ended already
            self._container.get_wrapped_container().kill(number.name)

    def end(self, number: signal.Signals) -> None:
        inner = self._container.get_wrapped_container()
        self.send_signal(number)
        with contextlib.suppress(Exception):
            inner.wait(timeout=STOP_MS_MAX / 1000)
        self._container.stop()


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
        self._port = 0
        self._directory: Path | None = None
        self._lock = -1  # of the directory, if it exists
        self._running: ServerProcess | _Container | None = None

    def __repr__(self) -> str:
        return f"Broker(port={self._port or None}, {'running' if self.running else 'stopped'})"

    @property
    def port(self) -> int:
        assert self._port, "the broker has not been started"
        return self._port

    @property
    def running(self) -> bool:
        return self._running is not None and self._running.alive()

    @property
    def log(self) -> str:
        """The output of mosquitto so far."""
        return (self._directory / "log").read_text(errors="replace") if self._directory is not None else ""

    def _starting(self) -> Iterator[float]:
        """Raises UStatusError: FAILED_PRECONDITION (no mosquitto), UNAVAILABLE (it did not start; with its output)."""
        if self.running:
            return
        run = runner()
        atexit.register(self.close)
        for _ in range(PORT_TRIES_MAX):
            port = self._port or free_port()
            self._running = run(self._write_config(port))
            deadline = time.monotonic() + START_MS_MAX / 1000
            while self._running.alive() and time.monotonic() < deadline:
                with (
                    contextlib.suppress(OSError),  # it does not listen yet
                    socket.create_connection((self.host, port), timeout=PROBE_MS / 1000),
                ):
                    self._port = port
                    return
                yield PROBE_MS / 1000
            self._end(signal.SIGKILL)
            if "Address already in use" not in self.log:
                break
            yield PROBE_MS / 1000
        said = self.log.strip()[-500:] or "nothing"
        raise UStatusError(UCode.UNAVAILABLE, f"mosquitto did not start; it said: {said}")

    def change_acl(self, text: str) -> None:
        """Change the access rules, soon also for connected clients. `acl` must have been set at the start."""
        assert self.acl is not None, "mosquitto reloads only files that it was started with"
        self.acl = text
        if self._directory is not None and self._running is not None:
            _private(self._directory / "acl", text)
            self._running.send_signal(signal.SIGHUP)

    def close(self) -> None:
        """Stop it and remove its files. Idempotent."""
        self.stop()
        atexit.unregister(self.close)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._lock)
            self._directory = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await self.start_async()

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _end(self, number: signal.Signals) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.end(number)

    def _write_config(self, port: int) -> Path:
        if self._directory is None:
            _remove_leftovers()
            self._directory, self._lock = _make_directory()
        directory = self._directory
        (directory / "log").write_bytes(b"")
        lines = [
            f"listener {port} {self.host}",
            "log_dest stderr",
            "log_type error\nlog_type warning\nlog_type notice",
            "max_inflight_messages 0",  # else 20: a round trip for every 20 messages
            # else 1000, and further ones are lost; with 0 (no limit), mosquitto 2.0 disconnects after each publish that
            # the access rules refuse
            "max_queued_messages 100000000",
            f"allow_anonymous {'false' if self.users is not None else 'true'}",
            f"persistence {'true' if self.persistent else 'false'}",
            f"persistence_location {directory}/",
        ]
        if os.geteuid() == 0:
            lines.append("user root")  # otherwise it can't read its files
        if self.users is not None:
            passwords = "".join(_password_line(name, password) for name, password in self.users.items())
            lines.append(f"password_file {_private(directory / 'passwords', passwords)}")
        if self.acl is not None:
            lines.append(f"acl_file {_private(directory / 'acl', self.acl)}")
        if self.certificates is not None:
            ca, certificate, key = self.certificates
            lines += [f"cafile {ca}", f"certfile {certificate}", f"keyfile {key}"]
            lines.append(f"require_certificate {'true' if self.require_client_certificate else 'false'}")
        overridden = {line.split()[0] for line in self.settings}
        lines = [line for line in lines if line.split()[0] not in overridden]
        return _private(directory / "mosquitto.conf", "\n".join([*lines, *self.settings, ""]))


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


def _password_line(name: str, password: str) -> str:
    """Returns a line of mosquitto_passwd ($7$: PBKDF2 with SHA-512), which may not be installed."""
    salt, rounds = os.urandom(12), 101
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, rounds)
    return f"{name}:$7${rounds}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}\n"
