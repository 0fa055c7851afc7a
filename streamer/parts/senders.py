"""The traffic of each source authority, and the clocks of the senders, as a part."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, Final

from streamer.assembly import Assembly
from streamer.config import Config
from streamer.operating.states import LOOK_S, FastSenders
from streamer.operation import Arguments, Operation
from streamer.part import Part, Parts
from streamer.reporting import Condition, Sample

VEHICLES_MAX: Final = 400  # in one answer; the admin port lists all


class SenderPart(Part):
    name = "senders"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self._fast = FastSenders()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.assembly.ledger.run(), name="ledger")
            tasks.create_task(self._look_at_clocks(), name="clocks of senders")

    async def _look_at_clocks(self) -> None:
        time, now_ms = asyncio.get_running_loop().time, self.assembly.runtime.now_ms
        while True:
            for source in self.assembly.logs:
                self._fast.look(source, now_ms(), time())
            await asyncio.sleep(LOOK_S)

    def vehicles(self) -> Iterator[dict[str, Any]]:
        """Returns the traffic of all source authorities in the order of their first messages."""
        topics_of = self.assembly.topics_of
        return (account.as_dict(topics_of(account.authority)) for account in list(self.assembly.ledger))

    def conditions(self) -> Iterator[Condition]:
        return self._fast.conditions(self.assembly.endpoints.owner)

    def notes(self) -> Iterator[str]:
        yield from self.assembly.ledger.notes()

    def samples(self) -> Iterator[Sample]:
        yield from self.assembly.ledger.samples(self.assembly.topics_of)
        yield from self._fast.samples(self.assembly.endpoints.owner)

    def operations(self) -> Mapping[str, Operation]:
        return {"vehicles": Operation(self._vehicles, ("count",))}

    async def _vehicles(self, given: Arguments) -> dict[str, Any]:
        """Returns the traffic of some authorities, highest rates first."""
        count = max(0, min(given.number("count", VEHICLES_MAX), VEHICLES_MAX))
        accounts = self.assembly.ledger.by_rate(count)
        return {"vehicles": [account.as_dict(self.assembly.topics_of(account.authority)) for account in accounts]}

    def change(self, old: Config, new: Config, checked: Any) -> None:
        self.assembly.ledger.units_per_s = new.limits.authority_messages_per_s
