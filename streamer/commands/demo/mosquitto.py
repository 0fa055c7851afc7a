"""A private mosquitto on a free loopback port.

the binary on PATH, else a container        async with Broker(directory) as broker:  broker.port
                                            installs nothing; in a checkout, use tools/mosquitto.py
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

from streamer.commands.demo.processes import die_with_parent
from transports.ports import free_port
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

# distributions install daemons here, often outside a user's PATH
PATHS: Final = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin")
PORT_TRIES_MAX: Final = 5  # another process may take the port before mosquitto binds it
BROKER_START_MS_MAX: Final = 20_000  # enough for a container on a busy machine
STOP_MS_MAX: Final = 10_000  # mosquitto writes its store within milliseconds; beyond this it hangs
PORT_PROBE_MS: Final = 10
IMAGE: Final = "eclipse-mosquitto:2"
NO_BROKER: Final = (
    "no MQTT broker: install the package mosquitto of your system, "
    "or start docker and install the Python package testcontainers, so that it can run in a container"
)


def find() -> str | None:
    return shutil.which("mosquitto") or shutil.which("mosquitto", path=os.pathsep.join(PATHS))


def runner() -> Callable[[Path], ServerProcess | _Container]:
    """Returns a function that runs mosquitto with a configuration file: the binary, else a container. Raises
    FAILED_PRECONDITION if both are missing."""
    binary = find()
    if binary is not None:
        return lambda config: ServerProcess([binary, "-c", str(config)], config.parent / "log")
    has_containers = shutil.which("docker") is not None and importlib.util.find_spec("testcontainers") is not None
    if not has_containers or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        raise UStatusError(UCode.FAILED_PRECONDITION, NO_BROKER)
    return _Container


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

    @property
    def pid(self) -> int:
        return self._popen.pid

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


class Broker:
    """One mosquitto with its files in `directory`. It never outlives our process, and keeps its port when it is started
    again. `settings`: further lines of mosquitto.conf, which override ours."""

    host: Final = "127.0.0.1"

    def __init__(self, directory: Path, settings: Sequence[str] = ()) -> None:
        self._directory, self._settings = directory, settings
        self.port = 0  # until it has been started
        self.process: ServerProcess | _Container | None = None

    async def __aenter__(self) -> Self:
        """Raises as `starting`."""
        for delay_s in self.starting():
            await asyncio.sleep(delay_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end(signal.SIGTERM)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.alive()

    @property
    def log(self) -> str:
        """The output of mosquitto since it was started."""
        return (self._directory / "log").read_text(errors="replace")

    def starting(self) -> Iterator[float]:
        """Starts it; yields the seconds to sleep before each check until it accepts clients. Raises UStatusError:
        FAILED_PRECONDITION (no mosquitto), UNAVAILABLE (it did not start; with its output)."""
        run = runner()
        for _ in range(PORT_TRIES_MAX):
            port = self.port or free_port()
            self.process = run(self._write_config(port))
            deadline = time.monotonic() + BROKER_START_MS_MAX / 1000
            while self.process.alive() and time.monotonic() < deadline:
                with (
                    contextlib.suppress(OSError),  # it does not listen yet
                    socket.create_connection((self.host, port), timeout=PORT_PROBE_MS / 1000),
                ):
                    self.port = port
                    return
                yield PORT_PROBE_MS / 1000
            self.end(signal.SIGKILL)
            if "Address already in use" not in self.log:
                break
            yield PORT_PROBE_MS / 1000
        said = self.log.strip()[-500:] or "nothing"
        raise UStatusError(UCode.UNAVAILABLE, f"mosquitto did not start; it said: {said}")

    def end(self, number: signal.Signals) -> None:
        """Ends it with this signal. Idempotent."""
        process, self.process = self.process, None
        if process is not None:
            process.end(number)

    def _write_config(self, port: int) -> Path:
        (self._directory / "log").write_bytes(b"")
        lines = [
            f"listener {port} {self.host}",
            "log_dest stderr",
            "log_type error\nlog_type warning\nlog_type notice",
            "max_inflight_messages 0",  # else 20: a round trip for every 20 messages
            # else 1000, and further ones are lost; with 0 (no limit), mosquitto 2.0 disconnects after each publish that
            # the access rules refuse
            "max_queued_messages 100000000",
            "allow_anonymous true",
        ]
        if os.geteuid() == 0:
            lines.append("user root")  # otherwise it can't read its files
        overridden = {line.split()[0] for line in self._settings}
        lines = [line for line in lines if line.split()[0] not in overridden]
        config = self._directory / "mosquitto.conf"
        config.write_text("\n".join([*lines, *self._settings, ""]))
        return config
