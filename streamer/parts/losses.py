"""What is missing, as parts: gaps, messages that were dropped although they were taken, stores that are new."""

from __future__ import annotations

from collections.abc import Iterator

from streamer.part import Part
from streamer.reporting import Reporter, Sample


class GapPart(Part):
    name = "gaps"

    async def run(self) -> None:
        await self.assembly.gaps.run()

    def samples(self) -> Iterator[Sample]:
        yield "gaps", (), self.assembly.gaps.total


class DropPart(Part):
    name = "dropped messages"

    async def disconnect(self) -> None:
        await self.assembly.drops.close()

    def reporters(self) -> tuple[Reporter]:
        return (self.assembly.drops,)


class NewStorePart(Part):
    name = "new stores"

    async def disconnect(self) -> None:
        await self.assembly.new_stores.close()

    def reporters(self) -> tuple[Reporter]:
        return (self.assembly.new_stores,)
