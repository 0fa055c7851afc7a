"""The admin port, as a part."""

from __future__ import annotations

from functools import partial
from typing import Any

import structlog

from streamer import building
from streamer.assembly import Assembly
from streamer.config import Config
from streamer.operating import metrics
from streamer.operating.admin import Admin
from streamer.operation import Operations
from streamer.part import Part, Parts
from streamer.parts.ports import PortOpening, require_free
from streamer.parts.readiness import Readiness
from streamer.parts.senders import SenderPart
from streamer.parts.status import StatusPart
from streamer.reporting import Reporter

log = structlog.get_logger()


class AdminPort(Part):
    name = "admin port"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        config, status = assembly.config, parts.of(StatusPart)
        self._opening = PortOpening(assembly.tasks, self.name, _not_opened, is_fatal=False)
        self.offered = Operations(parts.operations())  # by the parts before this one; also at the control socket
        self.admin = Admin(
            config.streamer.admin,
            parts.problems,
            partial(metrics.expose, parts.samples),
            parts.notes,
            parts.of(SenderPart).vehicles,
            states=parts.of(Readiness).look,
            status=lambda: status.status().model_dump_json().encode(),
            guard=config.admin,
            operations=self.offered,
        )

    async def stop(self) -> None:
        """The streamer opens it before all parts start: `open` of `admin`."""
        await self.admin.close()

    def reporters(self) -> tuple[Reporter]:
        return (self._opening,)

    async def check(self, old: Config, new: Config) -> None:
        require_free({new.streamer.admin} - building.addresses_of(old))

    async def after_change(self, old: Config, new: Config, checked: Any) -> None:
        """Nobody waits for it: the change may have been asked for at this port."""
        if (old.streamer.admin, old.admin) != (new.streamer.admin, new.admin):
            await self._opening.begin(partial(self.admin.change, new.streamer.admin, new.admin))


def _not_opened(error: str, attempt: int) -> str:
    log.error("the admin port can't be opened; trying again", error=error, attempt=attempt)
    return f"the admin port can't be opened: {error}"
