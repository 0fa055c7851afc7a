"""Dead letters, as a part: stored, reported, sent again."""

from __future__ import annotations

from collections.abc import Mapping

from streamer.operating.letters import letter_operations
from streamer.operating.resending import Resender
from streamer.operation import Operation
from streamer.part import Part
from streamer.reporting import Reporter
from uprotocol.pacing import Pace


class LetterPart(Part):
    name = "dead letters"

    async def run(self) -> None:
        await self.assembly.dead_letters.run()

    async def close(self) -> None:
        await self.assembly.dead_letters.close()

    def reporters(self) -> tuple[Reporter]:
        return (self.assembly.dead_letters,)

    def operations(self) -> Mapping[str, Operation]:
        assembly = self.assembly

        def pace_of(endpoint: str) -> Pace | None:
            attached = assembly.attached.get(endpoint)
            return None if attached is None else attached.pumps[0].sender.pace

        def renamed() -> dict[str, str]:
            return {
                section.renamed_from: section.name
                for section in assembly.config.endpoint
                if section.renamed_from is not None
            }

        walk = assembly.view, assembly.paused, assembly.hosted, assembly.ingresses
        return letter_operations(assembly.dead_letters, Resender(assembly.dead_letters, *walk, pace_of, renamed))
