"""A reader of the history, as an application would write it: GaplessSubscriber with a cursor file. It is killed at any
moment.

python -m campaigns.chaos.reader '{"transport": ..., "settings": ..., "authority": ..., "service": ..., "cursor":
..., "out": ...,
"topics": [...]}'

Each record's id is a line of `out`, written before the cursor moves; a gap is a line, too. With
`epochs` a line is an epoch, as JSON: its time, why it may not be whole, and the ids of its records.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from history.epochs.assembling import Assembler
from history.reading.subscriber import GaplessSubscriber, HistoryClient
from history.records.record import Record
from transports import plugin as plugins
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.transport import LocalUriProvider

ENTITY = 0x9202


async def read(options: dict[str, Any]) -> None:
    local = LocalUriProvider(options["authority"], ENTITY, 1)
    topics = [uris.parse(topic) for topic in options["topics"]]
    out = open(options["out"], "a", buffering=1)  # noqa: SIM115, ASYNC230 - a line per record, at the page cache's speed
    print(file=out)  # a line that a kill has cut off ends here
    transport = plugins.create(options["transport"], options["settings"], local)
    async with transport, InMemoryRpcClient(transport, local) as rpc:
        client = HistoryClient(rpc, uris.uri(options["service"], 4, 1), timeout_ms=2_000)

        def on_gap(gap: Gap) -> None:
            print("gap", str(gap).replace("\n", " "), file=out)

        assembler = Assembler(topics) if options.get("epochs") else None
        async with GaplessSubscriber(
            client, topics, cursor_path=options["cursor"], on_gap=on_gap, assembler=assembler
        ) as subscriber:
            print(json.dumps({"ready": True}), flush=True)
            if assembler is not None:
                async for one in subscriber.epochs():
                    has = [_id(record) for record in one.records]
                    time = None if one.epoch is None else one.epoch.time[0]
                    print(json.dumps({"time": time, "incomplete": one.incomplete, "ids": has}), file=out)
            async for record in subscriber:
                print(_id(record), file=out)


def _id(record: Record) -> str:
    return uuids.to_bytes(record.message.attributes.id).hex()


def main() -> None:
    asyncio.run(read(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
