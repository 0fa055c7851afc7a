"""All operations of a running streamer: which part of it does what an operator asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from streamer.egress import skipping
from streamer.operating.backup import Backups
from streamer.operating.control import pause_operations
from streamer.operating.letters import letter_operations
from streamer.operating.reading import reading_operations
from streamer.operating.resending import Resender
from streamer.operating.status import status_operation
from streamer.operation import Arguments, Operation, Operations
from uprotocol.pacing import Pace
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

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
        return {"cursors": await streamer.cursors(CURSORS_MAX)}

    async def skip(given: Arguments) -> dict[str, Any]:
        endpoint, to_ms, dry_run = given.text("endpoint"), given.number("to_ms"), given.flag("dry_run")
        attached = streamer.attached.get(endpoint)
        if attached is None:
            known = ", ".join(streamer.attached)
            raise UStatusError(UCode.NOT_FOUND, f"there is no endpoint {endpoint[:64]!r}; there are {known}")
        if to_ms > streamer.runtime.now_ms():
            raise invalid("to_ms: expected a time that has passed: what is still to come can't be skipped")
        skipped = await skipping.skip(attached.pumps, to_ms, dry_run=dry_run)
        return skipping.as_dict(endpoint, to_ms, skipped, dry_run=dry_run)

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
            "skip": Operation(skip, ("endpoint", "to_ms", "dry_run"), is_change=True),
            "vehicles": Operation(vehicles, ("count",)),
        }
    )
