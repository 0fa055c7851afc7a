"""A publisher that keeps its own history, as an application would write it. It is killed at any moment.

python -m campaigns.chaos.publishing '{"settings": ..., "authority": ..., "entity": ..., "log": ..., "port": ...}'

Lines at the TCP port say what to publish: "RESOURCE PAYLOAD", both in hexadecimal. When `publish` has
returned, the first 16 bytes of the payload go back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from typing import Any

from history.publisher import HistoryPublisher
from transports import plugin as plugins
from uprotocol.message import UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat

ANNOUNCE_S = 1.0
TEXT = UPayloadFormat.UPAYLOAD_FORMAT_TEXT


async def publish(options: dict[str, Any]) -> None:
    """Until it is cancelled, or nobody asks any more."""
    local = LocalUriProvider(options["authority"], options["entity"], 1)
    transport = plugins.create("zenoh", options["settings"], local)
    async with transport, HistoryPublisher(transport, local, options["log"], announce_s=ANNOUNCE_S) as publisher:
        asked, answers = await asyncio.open_connection("127.0.0.1", options["port"])
        print(json.dumps({"ready": True}), flush=True)

        async def one(resource: int, payload: bytes) -> None:
            await publisher.publish(resource, UPayload(payload, TEXT))
            answers.write(payload[:16].hex().encode() + b"\n")

        async with asyncio.TaskGroup() as group:  # each is in the log in the order in which it was asked for
            async for line in asked:
                resource, payload = line.split()
                group.create_task(one(int(resource, 16), bytes.fromhex(payload.decode())))


def main() -> None:
    async def until_stopped() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await publish(json.loads(sys.argv[1]))

    asyncio.run(until_stopped())


if __name__ == "__main__":
    main()
