"""What leaves for the endpoints, as parts: positions and holds, pauses, claims on the logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

from streamer import building, renaming
from streamer.assembly import Attached
from streamer.config import Config, EndpointSection
from streamer.egress import skipping
from streamer.egress.address_holds import SHOWN_AFTER_S
from streamer.egress.claims import count, listed
from streamer.egress.reasons import Label
from streamer.operating import metrics
from streamer.operating.control import pause_operations
from streamer.operation import Arguments, Operation
from streamer.part import Part
from streamer.reporting import Condition, Reporter, Sample
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

CURSORS_LISTED_MAX: Final = 400  # present and former endpoints, in one answer


class PausePart(Part):
    name = "pauses"

    async def load(self) -> None:
        """Also adds the rules, and carries over what waits for endpoints that have another name now."""
        assembly, config = self.assembly, self.assembly.config
        for section in config.rules:
            assembly.rules.add(building.rule_of(section))
        for endpoint in config.endpoint:
            if endpoint.renamed_from is not None:
                await assembly.paused.rename(endpoint.renamed_from, endpoint.name)
                renaming.rename(endpoint.renamed_from, endpoint.name, assembly.logs, config.streamer.data_dir)

    def reporters(self) -> tuple[Reporter]:
        return (self.assembly.paused,)

    def operations(self) -> Mapping[str, Operation]:
        rules = self.assembly.rules
        return pause_operations(self.assembly.paused, lambda *way: rules.between(*way) is not None)


class PumpPart(Part):
    name = "pumps"

    async def load(self) -> None:
        for pump in self.assembly.pumps:
            pump.begin()  # before networks listen: records from now on are for the pumps

    def conditions(self) -> Iterator[Condition]:
        for pump in self.assembly.pumps:
            if pump.trouble:
                yield Condition(pump.trouble, pump.peer.name, is_fatal=True)
        yield from self._held("refused", "left")

    def notes(self) -> Iterator[str]:
        return (condition.problem for condition in self._held("unheard"))

    def _held(self, *labels: Label) -> Iterator[Condition]:
        """Yields holds with these labels. One that may end by itself is reported once it has lasted SHOWN_AFTER_S."""
        now_ms = self.assembly.runtime.now_ms()
        for pump in self.assembly.pumps:
            for held in pump.waits.addresses.states():
                shown_after_s = SHOWN_AFTER_S if held.oldest.may_end_by_itself else 0.0
                if held.label in labels and held.waited_s >= shown_after_s:
                    yield Condition(held.sentence(now_ms), pump.peer.name)

    def samples(self) -> Iterator[Sample]:
        for pump in self.assembly.pumps:
            yield from metrics.of_pump(pump, self.assembly.claims.absent_ms(pump))

    def operations(self) -> Mapping[str, Operation]:
        return {"skip": Operation(self._skip, ("endpoint", "to_ms", "dry_run"), is_change=True)}

    async def _skip(self, given: Arguments) -> dict[str, Any]:
        endpoint, to_ms, dry_run = given.text("endpoint"), given.number("to_ms"), given.flag("dry_run")
        attached = self.assembly.attached.get(endpoint)
        if attached is None:
            names = ", ".join(self.assembly.attached)
            raise UStatusError(UCode.NOT_FOUND, f"there is no endpoint {endpoint[:64]!r}; there are {names}")
        if to_ms > self.assembly.runtime.now_ms():
            raise invalid("to_ms: expected a time that has passed: what is still to come can't be skipped")
        skipped = await skipping.skip(attached.pumps, to_ms, dry_run=dry_run)
        return skipping.as_dict(endpoint, to_ms, skipped, dry_run=dry_run)

    def pumps_added(self, attached: Attached, section: EndpointSection) -> None:
        for pump in attached.pumps:
            pump.begin()  # before its network listens: records from now on are for this endpoint, too

    def change(self, old: Config, new: Config, checked: Any) -> None:
        for pump in self.assembly.pumps:
            pump.wake()  # other rules may end what is held, also for an endpoint that is away


class ClaimPart(Part):
    name = "claims"

    async def load(self) -> None:
        self.assembly.claims.load()

    async def run(self) -> None:
        await self.assembly.claims.watch()

    def reporters(self) -> tuple[Reporter]:
        return (self.assembly.claims,)

    def operations(self) -> Mapping[str, Operation]:
        return {"cursors": Operation(self._cursors)}

    async def _cursors(self, _: Arguments) -> dict[str, Any]:
        """Returns the backlog in the durable log of each endpoint, also of those not configured."""
        durable = self.assembly.logs.durable
        pumps = {pump.peer.name: pump for pump in self.assembly.pumps if pump.log is durable}
        cursors = [dataclasses.asdict(cursor) for cursor in listed(durable.cursors.all(), {})[:CURSORS_LISTED_MAX]]
        for cursor in cursors:
            cursor["records"] = await count(durable, cursor["endpoint"], pumps.get(cursor["endpoint"]))
        return {"cursors": cursors}

    def change(self, old: Config, new: Config, checked: Any) -> None:
        self.assembly.claims.limit_ms = new.history.absent_ms
        self.assembly.claims.find_unclaimed()  # endpoints may have come and gone
