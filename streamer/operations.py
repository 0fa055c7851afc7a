"""All operations of a running streamer: which part of it does what an operator asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from streamer.letters.operations import letter_operations
from streamer.letters.resending import Resender
from streamer.operating.backup import Backups
from streamer.operating.control import pause_operations
from streamer.operating.operations import Arguments, Operation, Operations
from streamer.operating.reading import reading_operations
from streamer.operating.status import status_operation
from uprotocol.pacing import Pace

if TYPE_CHECKING:
    from streamer.attaching import ChangeableAssembly
    from streamer.reloading import Reloader

VEHICLES_MAX: Final = 400  # in one answer; the admin port lists all
CURSORS_MAX: Final = 400  # present and former endpoints


def operations_of(streamer: ChangeableAssembly, reloader: Reloader) -> Operations:
    """Returns the operations of `streamer`, for the control socket and the admin port."""

    async def release(given: Arguments) -> dict[str, Any]:
        return {"owner": streamer.release(given.text("consumer"))}

    async def vehicles(given: Arguments) -> dict[str, Any]:
        return {"vehicles": streamer.vehicles(max(0, min(given.number("count", VEHICLES_MAX), VEHICLES_MAX)))}

    async def cursors(_: Arguments) -> dict[str, Any]:
        return {"cursors": streamer.cursors()[:CURSORS_MAX]}

    def pace_of(endpoint: str) -> Pace | None:
        attached = streamer.attached.get(endpoint)
        return None if attached is None else attached.pumps[0].sender.pace

    def renamed() -> dict[str, str]:
        return {one.renamed_from: one.name for one in streamer.config.endpoint if one.renamed_from is not None}

    parts = streamer.view, streamer.paused, streamer.hosted, streamer.ingresses
    resender = Resender(streamer.dead_letters, *parts, pace_of, renamed)
    data_dir, durable = streamer.config.streamer.data_dir, streamer.logs.durable
    backups = Backups(data_dir, streamer.config.authority, durable, lambda: streamer.stopping.is_set())
    return Operations(
        {
            **letter_operations(streamer.dead_letters, resender),
            **pause_operations(streamer.paused, lambda *way: streamer.rules.between(*way) is not None),
            **reloader.operations(),
            **reading_operations(streamer.interest, streamer.logs),
            "backup": backups.operation(),
            "cursors": Operation(cursors),
            "log_level": streamer.log_level.operation(),
            "release": Operation(release, ("consumer",), is_change=True),
            "status": status_operation(streamer),
            "vehicles": Operation(vehicles, ("count",)),
        }
    )
