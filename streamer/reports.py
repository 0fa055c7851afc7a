"""What a streamer reports of itself: conditions, states, notes, metrics, the traffic of authorities, cursors.

parts of the Assembly --conditions--> States --> /readyz, the log      --samples--> metrics      --notes--> /readyz
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import structlog

from history.epochs.keeper import Keeper
from storage.runtime import Runtime
from streamer import parts
from streamer.assembly import Assembly
from streamer.config import Config
from streamer.egress.claims import count, listed
from streamer.egress.holds import SHOWN_AFTER_S, Label
from streamer.operating import metrics
from streamer.operating.meters import Meters
from streamer.operating.states import States, conditions_of_log
from streamer.reporting import STARTING, STREAMER, Condition, Sample, each
from streamer.unmatched import UnmatchedPatterns, unknown_authorities
from streamer.walk.endpoint import Endpoints
from streamer.walk.ingress import IdWindow, Logs
from transports.certificates import Expiries

log = structlog.get_logger()


class ReportingAssembly(Assembly):
    """An assembly that reports."""

    def __init__(
        self, config: Config, endpoints: Endpoints, logs: Logs, window: IdWindow, keeper: Keeper, runtime: Runtime
    ) -> None:
        super().__init__(config, endpoints, logs, window, keeper, runtime)
        config = self.config
        used = (one for one in parts.certificates_of(config) if one[0] or config.streamer.admin is not None)
        self.certificates = Expiries(used, self.runtime.now_ms)
        self.states = States(self.attached, self.conditions, self.runtime.now_ms)
        self.unmatched = UnmatchedPatterns(self)
        self.meters = Meters(self.endpoints, self.pumps, self.logs, self.runtime.now_ms)

    def connection_changed(self, _connected: bool) -> None:
        """Updates the states after all parts know the change, unless the streamer stops."""
        if not self.stopping.is_set():
            asyncio.get_running_loop().call_soon(self.states.look)

    # Reports

    def conditions(self) -> list[Condition]:
        """Returns everything that is wrong; empty: ready."""
        hours = self.config.history.acknowledge_after_hours
        found = [condition for one in self.logs for condition in conditions_of_log(one, hours)]
        found += [*self.drops.conditions(), *self.new_stores.conditions()]
        found += [*self.dead_letters.conditions(), *self.paused.conditions(), *self.networks.conditions()]
        found += self._endpoint_conditions()
        if self.embedded is not None:
            found += self.embedded.conditions()
        found += self._interest_conditions()
        found += [*self.claims.conditions(), *self.handovers.conditions(), *self.follows.conditions()]
        found += self.edge.conditions()
        found += self.recoveries.conditions()
        if not self.ready.is_set():
            found.append(Condition(STARTING, is_fatal=True))
        return found

    def _endpoint_conditions(self) -> Iterator[Condition]:
        for pump in self.pumps:
            if pump.trouble:
                yield Condition(pump.trouble, pump.peer.name, is_fatal=True)
        for name, attached in self.attached.items():
            if attached.clocks.trouble:
                yield Condition(attached.clocks.trouble, name)
        yield from self.fast_senders.conditions(self.endpoints.owner)
        for group, (authority, ue_id), ahead_ms in self.keeper.clocks_ahead():
            what = f"the clock of {authority}/{ue_id:X} is {ahead_ms / 1_000:.1f} s ahead of ours, or ours is behind"
            owner = self.endpoints.owner(authority)
            yield Condition(f"{what}: its messages are in later epochs of {group!r}", owner.name if owner else STREAMER)
        yield from self._held("refused", "left")

    def _held(self, *labels: Label) -> Iterator[Condition]:
        """Yields holds with these labels. One that may end by itself is reported once it has lasted SHOWN_AFTER_S."""
        now_ms = self.runtime.now_ms()
        for pump in self.pumps:
            for held in pump.address_holds.states():
                shown_after_s = SHOWN_AFTER_S if held.oldest.may_end_by_itself else 0.0
                if held.label in labels and held.waited_s >= shown_after_s:
                    yield Condition(held.sentence(now_ms), pump.peer.name)

    def _endpoint_samples(self) -> Iterator[Sample]:
        for one in self.attached.values():
            endpoint = one.endpoint
            yield from metrics.of_endpoint(endpoint, is_connected=self.networks.is_connected(endpoint))
            yield from metrics.of_express(self.express.queues[endpoint.name])
            for pump in one.pumps:
                yield from metrics.of_pump(pump, self.claims.absent_ms(pump))

    def _interest_conditions(self) -> Iterator[Condition]:
        for authority in self.interest.unhealthy if self.ready.is_set() else ():
            owner, what = self.endpoints.owner(authority), f"uSubscription of {authority} does not answer"
            yield Condition(f"{what}: its last known subscriptions serve", owner.name if owner else STREAMER)

    def problems(self) -> list[str]:
        """Returns a sentence for each condition; empty: ready."""
        return [one.problem for one in self.conditions()]

    def samples(self) -> Iterator[Sample]:
        self.states.look()
        yield from metrics.of_process(self.runtime.disk.reserve)
        yield from self.meters.samples()
        for one in self.logs:
            yield from metrics.of_log(one)
        yield from metrics.of_dead_letters(self.dead_letters)
        yield "gaps", (), self.gaps.total
        yield from self.drops.samples()
        yield from metrics.of_epochs(self.keeper)
        yield from self.states.samples()
        yield from self.tracing.samples()
        yield from self.ledger.samples(self.topics_of)
        yield from self.paused.samples()
        yield from self._endpoint_samples()
        yield from metrics.of_history(self.history)
        if self.usubscription is not None:
            yield from each("usubscription_requests", (), self.usubscription.requests)
            yield from each("usubscription_refused", (), self.usubscription.refused)
        yield from self.new_stores.samples()
        yield "interest_version", (), self.interest.version
        yield from self.without_rule.samples()
        yield from self.fast_senders.samples(self.endpoints.owner)
        yield from self.claims.samples()
        yield from self.handovers.samples()
        yield from self.follows.samples()
        yield from self.edge.samples()
        yield from self.recoveries.samples()
        for endpoint, setting, expires_s in self.certificates:
            yield "certificate_expires_seconds", (endpoint, setting), expires_s

    def look(self) -> dict[str, Any]:
        """Returns the current states with reasons: of the endpoints, of the streamer itself, and the worst."""
        self.states.look()
        return self.states.as_dict()

    def notes(self) -> list[str]:
        """Returns facts for the operator that are no problems."""
        return [
            *self.endpoints.notes(),
            *parts.too_small_note(self.config, self.logs.durable.disk_limit_bytes),
            *parts.given_up_note(self.config, self.runtime.disk.reserve),
            *parts.notes_of(self.config, self.endpoints, self.rules),
            *unknown_authorities(self.config, self.endpoints),
            *self.without_rule.notes(),
            *self.follows.notes(),
            *self.unmatched.notes(),
            *self.ledger.notes(),
            *self.paused.notes(),
            *self.log_level.notes(),
            *self.dead_letters.notes(),
            *(one.problem for one in self._held("unheard")),
            *self.certificates.notes(),
            *self.edge.notes(),
            *self.tracing.notes(),
            *self.new_stores.notes(),
        ]

    def topics_of(self, authority: str) -> int:
        """Returns the number of its topics in the logs."""
        return sum(one.topics_of(authority) for one in self.logs)

    def vehicles(self, count: int) -> list[dict[str, Any]]:
        """Returns the traffic of the source authorities, highest rates first."""
        return [account.as_dict(self.topics_of(account.authority)) for account in self.ledger.by_rate(count)]

    def all_vehicles(self) -> Iterator[dict[str, Any]]:
        """Returns the traffic of all source authorities in the order of their first messages."""
        return (account.as_dict(self.topics_of(account.authority)) for account in list(self.ledger))

    def release(self, consumer: str) -> str:
        """Frees a consumer's name for the next uEntity that uses it; returns its owner. Raises NOT_FOUND."""
        owner = str(self.history.consumers.release(consumer))
        log.info("a consumer was released", consumer=consumer, owner=owner)
        return owner

    async def cursors(self, most: int) -> list[dict[str, Any]]:
        """Returns the backlog in the durable log of each endpoint, also of those not configured; of `most` endpoints.
        Raises UStatusError."""
        durable = self.logs.durable
        pumps = {pump.peer.name: pump for pump in self.pumps if pump.log is durable}
        found = [dataclasses.asdict(one) for one in listed(durable.cursors.all(), {})[:most]]
        for one in found:
            one["records"] = await count(durable, one["endpoint"], pumps.get(one["endpoint"]))
        return found
