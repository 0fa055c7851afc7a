"""The history service and the epochs that it serves, as parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import structlog

from streamer import building
from streamer.config import Config
from streamer.operating import metrics
from streamer.operating.reading import reading_operations
from streamer.operation import Arguments, Operation
from streamer.part import Part
from streamer.reporting import STREAMER, Condition, Sample

log = structlog.get_logger()


class HistoryPart(Part):
    name = "history"

    async def start(self) -> None:
        await self.assembly.history.start()

    async def stop(self) -> None:
        await self.assembly.history.stop()

    def samples(self) -> Iterator[Sample]:
        return metrics.of_history(self.assembly.history)

    def operations(self) -> Mapping[str, Operation]:
        reading = reading_operations(self.assembly.interest, self.assembly.logs)
        return {**reading, "release": Operation(self._release, ("consumer",), is_change=True)}

    async def _release(self, given: Arguments) -> dict[str, Any]:
        """Frees a consumer's name for the next uEntity that uses it; returns its owner. Raises NOT_FOUND."""
        consumer = given.text("consumer")
        owner = str(self.assembly.history.consumers.release(consumer))
        log.info("a consumer was released", consumer=consumer, owner=owner)
        return {"owner": owner}

    def change(self, old: Config, new: Config, checked: Any) -> None:
        self.assembly.access.change(building.access_of(new))


class EpochPart(Part):
    name = "epochs"

    async def disconnect(self) -> None:
        self.assembly.keeper.close()

    def conditions(self) -> Iterator[Condition]:
        for group, (authority, ue_id), ahead_ms in self.assembly.keeper.clocks_ahead():
            what = f"the clock of {authority}/{ue_id:X} is {ahead_ms / 1_000:.1f} s ahead of ours, or ours is behind"
            owner = self.assembly.endpoints.owner(authority)
            yield Condition(f"{what}: its messages are in later epochs of {group!r}", owner.name if owner else STREAMER)

    def samples(self) -> Iterator[Sample]:
        return metrics.of_epochs(self.assembly.keeper)
