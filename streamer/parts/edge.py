"""The HTTP edge, as a part: made of what [http], [grip], [[channel]] and [[proxy]] name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from streamer import building
from streamer.assembly import Assembly
from streamer.config import Config
from streamer.edge.edge import Handlers, HttpEdge, check_extra
from streamer.edge.places import Places
from streamer.part import Part, Parts
from streamer.parts.ports import OPEN_WAIT_S, PortOpening, require_free
from streamer.reporting import Reporter

if TYPE_CHECKING:
    from streamer.edge.callers import Callers


class EdgePart(Part):
    name = "HTTP edge"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self.edge = HttpEdge(assembly.config, self._handlers)
        self._opening = PortOpening(assembly.tasks, self.name)

    def _handlers(self, callers: Callers | None, places: Places) -> Handlers:
        """Connects what answers requests. `callers`: None without http.listen."""
        from streamer.edge.handlers import handlers_of  # imports aiohttp (0.1 s, 11 MiB)
        from streamer.grip.channels import Outlet

        assembly = self.assembly
        outlet = Outlet(assembly.dispatch, assembly.entry, assembly.home, assembly.follows.append)
        on_gap, now_ms = assembly.losses.channel_gap, assembly.runtime.now_ms
        return handlers_of(assembly.config, assembly.history, outlet, on_gap, callers, places, now_ms)

    @classmethod
    def require(cls, config: Config) -> None:
        check_extra(config)

    async def start(self) -> None:
        await self.edge.open()

    async def run(self) -> None:
        await self.edge.run()

    async def stop(self) -> None:
        await self.edge.close()

    def reporters(self) -> tuple[Reporter]:
        return (self.edge,)

    async def check(self, old: Config, new: Config) -> None:
        require_free({new.http.listen, new.grip.publish} - building.addresses_of(old))

    async def after_change(self, old: Config, new: Config, checked: Any) -> None:
        """Opens the ports again if what they serve has changed."""
        if _sections(old) != _sections(new):
            opening = await self._opening.begin(self.edge.change(new))
            await asyncio.wait({opening}, timeout=OPEN_WAIT_S)


def _sections(config: Config) -> tuple[Any, ...]:
    return config.http, config.grip, config.channel, config.proxy
