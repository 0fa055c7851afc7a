"""What is missing, as a part: gaps, messages that were dropped although they were taken, stores that are new."""

from __future__ import annotations

from collections.abc import Iterator

from streamer.part import Part
from streamer.reporting import Reporter, Sample


class LossPart(Part):
    name = "losses"

    async def run(self) -> None:
        await self.assembly.gaps.run()

    async def disconnect(self) -> None:
        await self.assembly.drops.close()
        await self.assembly.new_stores.close()

    def reporters(self) -> tuple[Reporter, ...]:
        return self.assembly.drops, self.assembly.new_stores

    def samples(self) -> Iterator[Sample]:
        yield "gaps", (), self.assembly.gaps.total
        yield from super().samples()
