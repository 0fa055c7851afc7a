"""The state of the streamer and of each endpoint; rates, lags and clocks, as a part."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from streamer.assembly import Assembly, Attached
from streamer.config import EndpointSection
from streamer.operating.meters import Meters
from streamer.operating.states import LOOK_S, Clocks, States
from streamer.part import Part, Parts
from streamer.reporting import Condition, Sample


class Readiness(Part):
    name = "states"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self.states = States(assembly.attached, parts.conditions, assembly.runtime.now_ms)
        self.meters = Meters(assembly.endpoints, assembly.pumps, assembly.logs, assembly.runtime.now_ms)
        self.clocks = {name: Clocks(attached.endpoint) for name, attached in assembly.attached.items()}
        assembly.on_connection.append(self._connection_changed)

    async def run(self) -> None:
        time = asyncio.get_running_loop().time
        while True:
            for clocks in self.clocks.values():
                clocks.look(time())
            await self.meters.look()
            self.states.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> dict[str, Any]:
        """Returns the current states with reasons: of the endpoints, of the streamer itself, and the worst."""
        self.states.look()
        return self.states.as_dict()

    def _connection_changed(self, *_: object) -> None:
        """Updates the states after all parts know the change, unless the streamer stops."""
        if not self.assembly.stopping.is_set():
            asyncio.get_running_loop().call_soon(self.states.look)

    def conditions(self) -> Iterator[Condition]:
        for name, clocks in self.clocks.items():
            if clocks.trouble:
                yield Condition(clocks.trouble, name)

    def samples(self) -> Iterator[Sample]:
        self.states.look()
        yield from self.states.samples()
        yield from self.meters.samples()

    def endpoint_added(self, attached: Attached, section: EndpointSection) -> None:
        self.states.add_endpoint(section.name)

    def endpoint_removed(self, attached: Attached) -> None:
        self.states.remove_endpoint(attached.endpoint.name)
        self.meters.remove_endpoint(attached.endpoint)

    def pumps_added(self, attached: Attached, section: EndpointSection) -> None:
        self.clocks[section.name] = Clocks(attached.endpoint)

    def pumps_removed(self, attached: Attached) -> None:
        del self.clocks[attached.endpoint.name]
