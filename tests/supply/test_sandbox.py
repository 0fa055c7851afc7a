"""A gateway works under what its systemd unit forbids: Zenoh with scouting, DDS, MQTT, the log, the admin port, the
manager's socket."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.known_store import make_known_store
from tests.supply import sandbox
from tests.tiers import dds_domain
from tools.broker import Broker
from transports import plugin
from transports.ports import free_port
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.umessage_pb2 import UMessage

HERE: Final = Path(__file__).resolve().parent
UNIT: Final = HERE.parents[1] / "deploy/systemd/up-streamer.service"
DEADLINE_S: Final = 60
CONFIG: Final = """
[streamer]
authority = "vehicle1"
data_dir = "{folder}/data"
admin = "127.0.0.1:0"
[[endpoint]]
name = "vehicle"
transport = "zenoh"
authorities = ["vehicle1", "ecu1"]
settings = {{ mode = "router", listen = ["tcp/127.0.0.1:{zenoh}"], multicast_scouting = true }}
[[endpoint]]
name = "mcu"
transport = "dds"
authorities = ["mcu1"]
usubscription = "none"
settings = {dds}
[[endpoint]]
name = "cloud"
transport = "mqtt5"
authorities = ["cloud"]
usubscription = "none"
settings = {{ host = "127.0.0.1", port = {mqtt} }}
"""

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not sandbox.HEADER.exists() or shutil.which("systemd-analyze") is None,
    reason="needs Linux on x86-64 with its headers, and systemd-analyze, which knows the groups of system calls",
)


def sandboxed(*program: str) -> list[str]:
    return [sys.executable, str(HERE / "sandbox.py"), str(UNIT), *program]


FORBIDDEN: Final = {
    "a raw socket": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "memory that is written and run": "import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | "
    "mmap.PROT_EXEC)",
    "another root": "import os; os.chroot('/')",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_the_sandbox_forbids(what: str) -> None:
    """Else the test below would show nothing."""
    done = subprocess.run(
        sandboxed(sys.executable, "-c", FORBIDDEN[what]),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    assert "OSError: [Errno 97]" in done.stderr or "PermissionError: [Errno 1]" in done.stderr, done.stderr


class Heard:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[UMessage] = asyncio.Queue()

    def on_receive(self, message: UMessage) -> None:
        self.messages.put_nowait(message)


async def crosses(sender: UTransport, receiver: UTransport, source: str, sink: str) -> None:
    """A notification, sent until it has come: a network may need a moment to know who listens."""
    heard = Heard()
    await receiver.register_listener(uris.ANY, heard, uris.pattern(sink))
    async with asyncio.timeout(DEADLINE_S):
        while True:
            message = UMessageBuilder.notification(
                uris.parse(f"//{source}/8001/1/8001"), uris.parse(f"//{sink}/8001/1/0")
            ).build()
            await sender.send(message)
            try:
                came = await asyncio.wait_for(heard.messages.get(), 1)
            except TimeoutError:
                continue
            assert came.attributes.source.authority_name == source
            return


@pytest.mark.broker
async def test_a_gateway_works_in_it(tmp_path: Path, make_broker: Callable[..., Broker]) -> None:
    broker = make_broker()
    zenoh_port, domain = free_port(), dds_domain()
    dds = {"domain_id": domain, "interface": "lo", "multicast": False, "peers": ["127.0.0.1"]}
    config = tmp_path / "gateway.toml"
    toml = "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in dds.items()) + " }"
    make_known_store(tmp_path / "data", "vehicle1")
    config.write_text(CONFIG.format(folder=tmp_path, zenoh=zenoh_port, mqtt=broker.port, dds=toml))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(DEADLINE_S)
        command = sandboxed(sys.executable, "-m", "streamer.commands.cli", "run", "--config", str(config), "--json")
        environment = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            ready = json.loads(await asyncio.wait_for(process.stdout.readline(), DEADLINE_S))
            while b"READY=1" not in await asyncio.to_thread(manager.recv, 65_536):
                pass
            local = {name: LocalUriProvider(name, 0x8001, 1) for name in ("ecu1", "mcu1", "cloud")}
            ecu = plugin.create("zenoh", {"mode": "client", "connect": [f"tcp/127.0.0.1:{zenoh_port}"]}, local["ecu1"])
            mcu = plugin.create("dds", dds, local["mcu1"])
            cloud = plugin.create("mqtt5", {"host": "127.0.0.1", "port": broker.port}, local["cloud"])
            async with ecu, mcu, cloud:
                await crosses(ecu, mcu, "ecu1", "mcu1")
                await crosses(mcu, cloud, "mcu1", "cloud")
                await crosses(cloud, ecu, "cloud", "ecu1")
            answer = await asyncio.to_thread(
                urllib.request.urlopen, f"http://127.0.0.1:{ready['admin_port']}/healthz", None, DEADLINE_S
            )
            with answer:
                assert answer.status == 200
            process.terminate()
            assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
