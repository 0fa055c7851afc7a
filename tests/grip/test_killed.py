"""A gateway that is killed while publishers publish: each item is one record, in order."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from pathlib import Path

import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout

from history.log.log import Log
from streamer.grip.channels import KEY
from tests.tiers import full
from transports.ports import free_port
from uprotocol.v1.umessage_pb2 import UMessage

ITEMS, KILLS = 400, 6
TOML = """[streamer]
data_dir = "{folder}/data"
log_level = "warning"
[grip]
publish = "127.0.0.1:{port}"
[[channel]]
name = "fruit"
topic = "//cloud/8001/1/8001"
[[endpoint]]
name = "cloud"
transport = "local"
authorities = ["cloud"]
usubscription = "none"
"""


async def publish(port: int, answered: list[int]) -> None:
    """Publishes each item until it is answered."""
    url, timeout = f"http://127.0.0.1:{port}/publish/", ClientTimeout(total=10)
    async with ClientSession(timeout=timeout) as session:
        for number in range(1, ITEMS + 1):
            item = {"channel": "fruit", "id": str(number), "prev-id": str(number - 1)}
            body = {"items": [item | {"http-stream": {"content": str(number)}}]}
            while True:
                try:
                    async with session.post(url, json=body) as response:
                        if response.status == 200:
                            break
                except (ClientError, TimeoutError, OSError):
                    pass
                await asyncio.sleep(0.02)
            answered.append(number)


@full
@pytest.mark.slow
async def test_each_item_is_one_record_over_kills(tmp_path: Path) -> None:
    port, answered, dice = free_port(), list[int](), random.Random(1)
    config = tmp_path / "gateway.toml"
    config.write_text(TOML.format(folder=tmp_path, port=port))
    publishing = asyncio.create_task(publish(port, answered))
    for kill in range(KILLS):
        command = (sys.executable, "-m", "streamer.commands.cli", "run", "--config", str(config))
        gateway = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        until = ITEMS if kill == KILLS - 1 else len(answered) + dice.randrange(20, 60)
        async with asyncio.timeout(60):
            while len(answered) < until and not publishing.done():  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.001)
        gateway.send_signal(signal.SIGKILL)
        await gateway.wait()
    await publishing
    async with await Log.open(tmp_path / "data" / "history.db", name="durable") as log:
        found: list[UMessage] = []
        while chunks := await log.read(len(found)):
            found += [UMessage.FromString(data) for chunk in chunks for data in chunk.data]
        assert log.followed.position(KEY + "fruit") == f"{ITEMS}\n".encode()
    assert [json.loads(message.payload) for message in found] == list(range(1, ITEMS + 1))
