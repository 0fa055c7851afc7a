"""A process of the DDS network tests: publishes 0, 1, 2 ... as alpha, in order, each again until it is acknowledged.

A line of input asks for the number of acknowledged messages; the end of input ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys

import structlog

from transports.dds import DdsTransport
from transports.dds.config import DdsConfig
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.umessage_pb2 import UMessage

PERIOD_S = 0.01
BATCH = 16
RAW = UPayloadFormat.UPAYLOAD_FORMAT_RAW


async def main(settings: str, resource: str) -> None:
    loop = asyncio.get_running_loop()
    builder = UMessageBuilder.publish(uris.uri("alpha", 0x10AB, 3, int(resource)))
    acknowledged, waiting = 0, list[UMessage]()

    async def publish(transport: DdsTransport) -> None:
        nonlocal acknowledged, waiting
        while True:
            made = acknowledged + len(waiting)
            waiting += [builder.build_from_upayload(UPayload(b"%d" % (made + n), RAW)) for n in range(BATCH)][
                : BATCH - len(waiting)
            ]
            statuses = await transport.send_batch(waiting)
            refused = [index for index, status in enumerate(statuses) if status.code]
            accepted = refused[0] if refused else len(waiting)
            assert len(refused) == len(waiting) - accepted, "a later message of the same topic was accepted"
            acknowledged, waiting = acknowledged + accepted, waiting[accepted:]
            await asyncio.sleep(PERIOD_S)

    async with DdsTransport(DdsConfig(**json.loads(settings)), LocalUriProvider("alpha", 0x10AB, 3)) as transport:
        transport.tells_absence = True
        publishing = asyncio.create_task(publish(transport))
        print("ready", flush=True)
        while await loop.run_in_executor(None, sys.stdin.readline):
            if publishing.done():
                publishing.result()
            print(json.dumps(acknowledged), flush=True)
        publishing.cancel()


structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for the answers
asyncio.run(main(*sys.argv[1:]))
