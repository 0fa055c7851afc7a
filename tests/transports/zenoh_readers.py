"""Zenoh clients in processes of their own, which can be stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from typing import Any, Final, Self

from tests.stopping import stop_child
from uprotocol import uri as uris
from uprotocol.v1.uri_pb2 import UUri

DEADLINE_S: Final = 60.0

READER: Final = """
import asyncio, json, sys
from transports.zenoh import ZenohConfig, ZenohTransport
from uprotocol import uri as uris
from uprotocol.transport import LocalUriProvider

class Counter:
    seen = set()
    def on_receive(self, message):
        self.seen.add(int(message.payload[:8]))
        if len(self.seen) == int(sys.argv[3]):
            print(json.dumps({"event": "all"}), flush=True)

async def main():
    config = ZenohConfig.model_validate(json.loads(sys.argv[1]))
    async with ZenohTransport(config, LocalUriProvider("reader", 0x10AB, 3)) as transport:
        await transport.register_listener(uris.parse(sys.argv[2]), Counter())
        print(json.dumps({"event": "listening"}), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Reader:
    """A client that listens to one topic; messages have their number in the first 8 octets of the payload."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(
        cls, stack: AsyncExitStack, where: str, topic: UUri, messages: int, settings: dict[str, Any]
    ) -> Self:
        """`says("all")` when it has had so many different messages. It ends with `stack`."""
        config = json.dumps({"mode": "client", "connect": [where], "connect_timeout_ms": 20_000} | settings)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", READER, config, uris.format(topic), str(messages),
            stdout=asyncio.subprocess.PIPE, env=environment,
        )  # fmt: skip
        stack.push_async_callback(process.wait)
        stack.callback(process.kill)
        return cls(process)

    async def says(self, event: str) -> None:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), DEADLINE_S)
        assert json.loads(line) == {"event": event}

    def stop(self) -> None:
        stop_child(self.process.pid)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)
