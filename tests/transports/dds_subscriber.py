"""The other process of the DDS fault tests: listens to the publishes of `alpha` with one resource id, and answers each
line of input with what it has seen so far, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

import structlog

from transports.dds import DdsTransport
from transports.dds.config import DdsConfig
from uprotocol import uri as uris
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage


class Payloads:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_receive(self, message: UMessage) -> None:
        self.seen.append(int(message.payload))


async def main(settings: str, authority: str, resource: str) -> None:
    loop = asyncio.get_running_loop()
    heard = Payloads()
    async with DdsTransport(DdsConfig(**json.loads(settings)), LocalUriProvider(authority, 0x10AB, 3)) as transport:
        await transport.register_listener(uris.uri("alpha", 0x10AB, 3, int(resource)), heard)
        print("ready", flush=True)
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(
                json.dumps({"seen": heard.seen, "dropped": transport.dropped, "troubles": transport.troubles}),
                flush=True,
            )


structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for the answers
asyncio.run(main(*sys.argv[1:]))
