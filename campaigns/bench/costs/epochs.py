"""The cost of epochs for an append: none without epochs, little where other topics have them.

Appends batches to three logs in memory, in turn, so that the load of the machine is the same for all:
no groups -- a group of other topics -- a group of these topics, in buckets of a second, ten of which pass per round
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Final

from campaigns.bench.costs.common import Figures, Setting
from campaigns.bench.wire import PAYLOAD_BYTES
from history.epochs.groups import Group
from history.log.log import Log
from history.service.keeper import Keeper
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer import ids
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.uattributes_pb2 import UPayloadFormat

TOPIC: Final = uris.uri("vehicle1", 0x8001, 1, 0x8001)
GROUPS: Final = {
    "none": [],
    "of_others": [Group("second", [uris.uri("vehicle1", 0x8002, 1, 0xFFFF)], 1_000)],
    "of_these": [Group("second", [uris.uri("vehicle1", 0x8001, 1, 0xFFFF)], 1_000, ahead_ms=1 << 40)],
}
BATCH: Final = 100  # messages that arrive at once at a rate of some thousands per second
BATCHES: Final = 100  # batches per turn
SECONDS_PASS: Final = 10  # that the ids of one turn span
ROUNDS: Final = 40
RING_BYTES: Final = 32 << 20


def measure(setting: Setting) -> Figures:
    """Returns microseconds of CPU per message, and the median of the ratios of the rounds."""
    return asyncio.run(_measure(setting))


async def _measure(setting: Setting) -> Figures:
    logs: dict[str, Log] = {}
    for name, groups in GROUPS.items():
        logs[name] = await Log.open(None, name=name, retention_bytes=RING_BYTES)
        keeper = Keeper(ids.at("vehicle1", ids.FRONTIERS), groups, [logs[name]], uuids.now_ms)
        await keeper.open()
    spent: dict[str, list[float]] = {name: [] for name in GROUPS}
    for number in range(ROUNDS + 1):
        batches = _batches(number)
        for name in sorted(GROUPS, key=lambda name: (number + list(GROUPS).index(name)) % len(GROUPS)):
            spent[name].append(await _append(logs[name], batches))
    frontiers = logs["of_these"].newest_seq - logs["none"].newest_seq
    for log in logs.values():
        await log.close()
    messages = BATCH * BATCHES
    us = {name: [s / messages * 1e6 for s in all[1:]] for name, all in spent.items()}  # the first round warms up
    figures: Figures = {f"us_{name}": round(statistics.median(all), 2) for name, all in us.items()}
    for name in ("of_others", "of_these"):
        pairs = zip(us[name], us["none"], strict=True)
        figures[f"{name}_over_none"] = round(statistics.median(one / other for one, other in pairs), 3)
    figures["frontiers_per_message"] = round(frontiers / (messages * (ROUNDS + 1)), 4)
    setting.say(", ".join(f"{key} {value}" for key, value in figures.items()))
    return figures


def _batches(number: int) -> list[list[EncodedMessage]]:
    """Creates new batches for each round, as appended messages must not change. This time is not measured."""
    begin_ms = 1_700_000_000_000 + number * SECONDS_PASS * 1_000
    payload = UPayload(bytes(PAYLOAD_BYTES), UPayloadFormat.UPAYLOAD_FORMAT_RAW)
    made = []
    for batch in range(BATCHES):
        created_ms = begin_ms + batch * SECONDS_PASS * 1_000 // BATCHES
        made.append([_message(created_ms, batch * BATCH + place, payload) for place in range(BATCH)])
    return made


def _message(created_ms: int, number: int, payload: UPayload) -> EncodedMessage:
    id = uuids.from_bytes((created_ms << 80 | 7 << 76 | 1 << 63 | number).to_bytes(16, "big"))
    return EncodedMessage.of(UMessageBuilder.publish(TOPIC).with_id(id).build_from_upayload(payload))


async def _append(log: Log, batches: list[list[EncodedMessage]]) -> float:
    """Appends the batches and returns the seconds of CPU."""
    stream = log.stream_id(TOPIC)
    began = time.process_time()
    for batch in batches:
        await log.append([stream] * len(batch), batch)
    return time.process_time() - began
