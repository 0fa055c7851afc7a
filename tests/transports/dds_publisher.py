"""The other process of the DDS tests. Reads lines "RESOURCE COUNT" and sends that many messages, numbered on, on that
topic of `alpha`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter

from transports.dds import DdsTransport
from transports.dds.config import DdsConfig
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat


async def main(settings: str) -> None:
    loop = asyncio.get_running_loop()
    sent: Counter[int] = Counter()
    async with DdsTransport(DdsConfig(**json.loads(settings)), LocalUriProvider("alpha", 0x10AB, 3)) as transport:
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            resource, count = map(int, line.split())
            builders = [UMessageBuilder.publish(uris.uri("alpha", 0x10AB, 3, resource)) for _ in range(count)]
            payloads = (
                UPayload(b"%d" % (sent[resource] + n), UPayloadFormat.UPAYLOAD_FORMAT_RAW) for n in range(count)
            )
            messages = [
                builder.build_from_upayload(payload) for builder, payload in zip(builders, payloads, strict=True)
            ]
            statuses = await transport.send_batch(messages)
            sent[resource] += count
            refused = [status for status in statuses if status.code]
            print(refused[0] if refused else "ready", flush=True)


asyncio.run(main(sys.argv[1]))
