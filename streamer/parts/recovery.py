"""Recovery sources, as a part: what takes the messages of their topics in place of the flow."""

from __future__ import annotations

from typing import Any

from streamer.assembly import Assembly
from streamer.config import Config
from streamer.part import Part, Parts
from streamer.recovery.asking import AskedSource
from streamer.recovery.recoveries import Recoveries
from streamer.reporting import Reporter


class RecoveryPart(Part):
    name = "recovery"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        """Raises UStatusError for a plugin or settings that can't be used."""
        super().__init__(assembly, parts)
        self.recoveries = Recoveries(
            assembly.config.recovery,
            assembly.endpoints,
            assembly.logs,
            assembly.dispatch.flows,
            assembly.window,
            assembly.config.limits.message_bytes_max,
            assembly.runtime,
            assembly.losses.not_recovered,
        )
        self._replaced: list[AskedSource] = []  # by a change; to be closed
        assembly.recovered = self.recoveries.of_topic
        assembly.on_connection.append(self.recoveries.connection_changed)
        assembly.on_listens.append(self.recoveries.listens)

    async def load(self) -> None:
        self.recoveries.load()

    async def start(self) -> None:
        await self.recoveries.start()

    async def run(self) -> None:
        await self.recoveries.run()

    async def stop(self) -> None:
        await self.recoveries.stop()

    def reporters(self) -> tuple[Reporter]:
        return (self.recoveries,)

    async def check(self, old: Config, new: Config) -> list[AskedSource] | None:
        return self.recoveries.sources_of(new.recovery) if new.recovery != old.recovery else None

    def change(self, old: Config, new: Config, checked: Any) -> None:
        self._replaced = [] if checked is None else self.recoveries.replace(checked)

    async def after_change(self, old: Config, new: Config, checked: Any) -> None:
        for source in self._replaced:
            await source.close()
