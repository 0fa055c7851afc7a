"""Notifications to a service manager over a real datagram socket: by a path and by an abstract name."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamer.commands.run import ServiceManager

DEADLINE_S = 60
CONFIG = """
[streamer]
data_dir = "{data_dir}"
[[endpoint]]
name = "home"
transport = "local"
authorities = ["vehicle1"]
"""


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A receiving socket, and its name in NOTIFY_SOCKET."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@up-streamer-{os.getpid()}-{os.urandom(4).hex()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(name.replace("@", "\0", 1))
        heard.settimeout(DEADLINE_S)
        yield heard, name


def fields(datagram: bytes) -> dict[str, str]:
    return dict(line.split("=", 1) for line in datagram.decode().splitlines())


async def hear(heard: socket.socket) -> dict[str, str]:
    return fields(await asyncio.to_thread(heard.recv, 65_536))


async def until(heard: socket.socket, key: str) -> dict[str, str]:
    while key not in (sent := await hear(heard)):
        pass
    return sent


async def test_it_hears_of_start_readiness_beats_and_end(manager: tuple[socket.socket, str]) -> None:
    heard, name = manager
    status = "endpoint cloud: its\nnetwork is away"
    async with ServiceManager(
        {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000", "WATCHDOG_PID": str(os.getpid())}
    ) as service:
        first = await hear(heard)
        assert int(first["EXTEND_TIMEOUT_USEC"]) > 0
        assert "READY" not in first
        service.ready(lambda: status)
        ready = await until(heard, "READY")
        assert ready["STATUS"] == "endpoint cloud: its network is away"
        assert ready["WATCHDOG"] == "1"
        status = "ready"
        while (await until(heard, "WATCHDOG"))["STATUS"] != "ready":
            pass
        service.stopping()
        assert (await until(heard, "STOPPING"))["STOPPING"] == "1"


async def test_a_stalled_loop_stops_notifying_the_watchdog(manager: tuple[socket.socket, str]) -> None:
    heard, name = manager
    async with ServiceManager({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000"}) as service:
        service.ready(lambda: "ready")
        await until(heard, "WATCHDOG")
        heard.setblocking(False)
        with pytest.raises(BlockingIOError):  # noqa: PT012
            while True:
                heard.recv(65_536)
        heard.settimeout(0.3)  # ten beats' time, in which the loop, here, does nothing else
        with pytest.raises(TimeoutError):
            heard.recv(65_536)


async def test_no_manager_no_beats(tmp_path: Path) -> None:
    async with (
        ServiceManager({}) as nobody,
        ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "1000"}) as no_socket,
    ):
        for service in (nobody, no_socket):
            service.ready(lambda: "ready")
            service.stopping()
        await asyncio.sleep(0)
    assert nobody._beats is None


async def test_the_watchdog_of_another_process_is_not_ours(manager: tuple[socket.socket, str]) -> None:
    heard, name = manager
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000", "WATCHDOG_PID": "1"}
    async with ServiceManager(environment) as service:
        service.ready(lambda: "ready")
        assert "WATCHDOG" not in await until(heard, "READY")
    assert environment == {}, "a child must not speak for us"


async def test_the_command_line_tells_it(manager: tuple[socket.socket, str], tmp_path: Path) -> None:
    heard, name = manager
    config = tmp_path / "gateway.toml"
    config.write_text(CONFIG.format(data_dir=tmp_path / "data"))
    environment = os.environ | {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "3000000"}
    command = [sys.executable, "-m", "streamer.commands.cli", "run", "--config", str(config)]
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert (await until(heard, "READY"))["WATCHDOG"] == "1"
        process.send_signal(signal.SIGTERM)
        await until(heard, "STOPPING")
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("text", ["[streamer]\nauthority = 7\n", "no TOML", None])
def test_a_wrong_file_ends_it_with_a_code_of_its_own(tmp_path: Path, text: str | None) -> None:
    """deploy/systemd/up-streamer.service does not start it again after that one."""
    config = tmp_path / "gateway.toml"
    if text is not None:
        config.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "streamer.commands.cli", "run", "-c", str(config)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == os.EX_CONFIG == 78, done.stderr
