"""A streamer's history in a process of its own, on Zenoh loopback. A test writes one JSON object per line as a
command; each answer is one line, too.

python history_host.py PORT LOG_FILE RETENTION_MS     a file `credentials` beside the log: lines `user:password`, of
                                                      those that may connect; without it, everybody may
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

import structlog

from history.epochs.groups import Group
from history.log.log import Log
from history.service.keeper import Keeper
from history.service.service import HistoryService
from transports import plugin
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage

AUTHORITY = "gateway"
EPOCHS_MS = 1_700_000_000_000  # the time of the first epoch
SECOND = Group("second", [uris.parse("//epochs/1/1/FFFF")], 1_000, timeout_ms=600_000)


async def main(port: int, path: str, retention_ms: int) -> None:
    local = LocalUriProvider(AUTHORITY, 0x4, 1)
    log = await Log.open(path, name="durable", retention_ms=retention_ms)
    ring = await Log.open(None, name="volatile")
    settings: dict[str, Any] = {"listen": [f"tcp/127.0.0.1:{port}"]}
    if (credentials := Path(path).with_name("credentials")).exists():
        settings["credentials_file"] = str(credentials)
    async with log, ring, plugin.create("zenoh", settings, local) as transport:
        groups = [SECOND] if Path(path).with_name("epochs").exists() else []
        keeper = Keeper(ids.at(AUTHORITY, ids.FRONTIERS), groups, [log, ring], lambda: EPOCHS_MS + 600_000)
        await keeper.open()
        keeper.listening()
        service = HistoryService(transport, local, [log, ring], keeper=keeper)
        await service.start()
        print(json.dumps({"incarnation": log.incarnation.hex(), "ring": ring.incarnation.hex()}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await answer(log, ring, service, json.loads(line))), flush=True)
        await service.stop()
        keeper.close()


async def answer(log: Log, ring: Log, service: HistoryService, command: dict[str, Any]) -> dict[str, Any]:
    first = await append(log, command.get("append", []))
    await append(ring, command.get("volatile", []))
    return {
        "first": first,
        "oldest": log.oldest_seq,
        "newest": log.newest_seq,
        "cursors": {name: seq for name, seq in log.cursors.seqs().items() if name.startswith("consumer:")},
        "polls": service.counts["polls"],
    }


async def append(log: Log, texts: list[str]) -> int | None:
    """Returns the first seq."""
    messages = [UMessage.FromString(base64.b64decode(text)) for text in texts]
    first = None
    for begin in range(0, len(messages), 500):
        part = messages[begin : begin + 500]
        seq = await log.append([log.stream_id(message.attributes.source) for message in part], part)
        first = seq if first is None else first
    return first


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for answers
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
