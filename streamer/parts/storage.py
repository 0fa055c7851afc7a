"""The logs and the disk, as a part."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, Final

import structlog

from streamer import building
from streamer.config import Config
from streamer.operating import metrics
from streamer.operating.states import conditions_of_log
from streamer.part import Part
from streamer.reporting import Condition, Sample, build
from uprotocol.status import UStatusError

CHECK_S: Final = 1.0  # between looks at the log's file

log = structlog.get_logger()


class StoragePart(Part):
    name = "logs"

    async def run(self) -> None:
        durable = self.assembly.logs.durable
        while True:
            after_ms = self.assembly.config.history.acknowledge_after_ms
            for loss in durable.losses.acknowledge_passing(after_ms) if after_ms else ():
                what = "a loss counts as acknowledged: it was reported for history.acknowledge_after_hours"
                log.info(what, detail=loss.detail)
            await durable.check_file()
            await asyncio.sleep(CHECK_S)

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in self.assembly.logs))

    def conditions(self) -> Iterator[Condition]:
        hours = self.assembly.config.history.acknowledge_after_hours
        for source in self.assembly.logs:
            yield from conditions_of_log(source, hours)

    def notes(self) -> Iterator[str]:
        config, assembly = self.assembly.config, self.assembly
        yield from assembly.endpoints.notes()
        yield from building.too_small_note(config, assembly.logs.durable.disk_limit_bytes)
        yield from building.given_up_note(config, assembly.runtime.disk.reserve)
        yield from building.notes_of(config, assembly.endpoints, assembly.rules)

    def samples(self) -> Iterator[Sample]:
        reserve = self.assembly.runtime.disk.reserve
        yield "build_info", build(), 1
        yield "disk_reserve_missing_bytes", (), max(0, reserve.bytes - reserve.held)
        for source in self.assembly.logs:
            yield from metrics.of_log(source)

    def change(self, old: Config, new: Config, checked: Any) -> None:
        assembly = self.assembly
        building.retain(new, assembly.logs)
        with contextlib.suppress(UStatusError):  # then it keeps its size
            assembly.runtime.disk.reserve.bytes = building.reserve_of(new).bytes
        assembly.logs.record = tuple(building.recorded_of(new))
        assembly.networks.record(assembly.logs.record)
