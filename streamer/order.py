"""Lists the parts of a streamer in the order in which they start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Final

import structlog

from streamer import parts
from streamer.assembly import DRAIN_MS_MAX, Assembly
from streamer.attaching import RunningEndpoints
from streamer.lifecycle import Part
from streamer.operating import metrics
from streamer.operating.losses import conditions_of_log
from streamer.operating.states import LOOK_S, Sample

# longest delay of `ready`: for networks to open, then for uSubscriptions to answer over the connected ones
OPEN_WAIT_S: Final = 5.0
INTEREST_WAIT_S: Final = 5.0

log = structlog.get_logger()


def parts_in_order(streamer: Assembly, running: RunningEndpoints) -> list[Part]:
    return [*_storage(streamer), *_walk(streamer, running), *_services(streamer), *_reports(streamer)]


def _storage(streamer: Assembly) -> Iterator[Part]:
    async def watch() -> None:
        """Checks states, clocks, the log's file and old losses until cancelled."""
        durable = streamer.logs.durable
        loop, after_ms = asyncio.get_running_loop(), streamer.config.history.acknowledge_after_ms
        while True:
            for clock in streamer.clocks.values():
                clock.look(loop.time())
            for loss in durable.losses.acknowledge_passing(after_ms) if after_ms else ():
                what = "a loss counts as acknowledged: it was reported for history.acknowledge_after_hours"
                log.info(what, detail=loss.detail)
            await durable.check_file()
            streamer.states.look()
            await asyncio.sleep(LOOK_S)

    letters, hours = streamer.dead_letters, streamer.config.history.acknowledge_after_hours
    for one in streamer.logs:
        yield Part(
            name=f"{one.name} log",
            stage="file",
            stop=one.close,
            conditions=partial(conditions_of_log, one, hours),
            samples=partial(metrics.of_log, one),
        )
    yield Part(
        name="dead letters",
        stage="file",
        run=letters.run,
        stop=letters.close,
        conditions=letters.conditions,
        samples=partial(metrics.of_dead_letters, letters),
    )
    yield Part(name="gaps", run=streamer.gaps.run, samples=partial(metrics.of_gaps, streamer.gaps))
    yield Part(name="epochs", samples=partial(metrics.of_epochs, streamer.keeper))
    yield Part(name="states", run=watch, samples=streamer.states.samples)


def _walk(streamer: Assembly, running: RunningEndpoints) -> Iterator[Part]:
    """Yields the parts of the walk. Networks open last, after all receivers are loaded."""

    async def load() -> None:
        for section in streamer.config.rules:
            streamer.rules.add(parts.rule_of(section))
        for pump in streamer.pumps:
            pump.begin()  # before networks listen: records from now on are for the pumps
        streamer.handovers.load()
        streamer.follows.load()
        streamer.claims.load()

    async def load_interest() -> None:
        await streamer.interest.load()
        streamer.interest.on_change(streamer.interest_changed)

    async def close_flows() -> None:
        streamer.entry.close()
        for flow in streamer.flows:
            flow.close()
        streamer.keeper.close()

    ledger, paused = streamer.ledger, streamer.paused
    yield Part(name="positions", start=load)
    if streamer.embedded is not None:
        yield Part(name="file of uSubscription", start=streamer.embedded.open)
    yield Part(name="stored interest", start=load_interest)
    yield Part(name="configuration", notes=streamer.configuration_notes)
    yield Part(name="ledger", run=ledger.run, samples=partial(ledger.samples, streamer.topics_of), notes=ledger.notes)
    yield Part(name="pauses", conditions=paused.conditions, samples=paused.samples, notes=paused.notes)
    yield Part(name="connections", conditions=streamer.networks.conditions)
    yield Part(
        name="endpoints",
        stage="network",
        start=running.start,
        stop=running.close,
        conditions=running.conditions,
        samples=running.samples,
        notes=running.notes,
    )
    yield Part(name="flows", stage="network", stop=close_flows)


def _services(streamer: Assembly) -> Iterator[Part]:
    """Yields the services; they stop before the networks, last first."""
    hosted, embedded, claims, handovers = streamer.hosted, streamer.embedded, streamer.claims, streamer.handovers

    async def drain() -> None:
        await hosted.unserved.drain(DRAIN_MS_MAX)

    async def settled() -> None:
        """Marks that all hosted services have registered their methods."""
        if embedded is None or embedded.is_started:
            hosted.unserved.is_settled = True

    async def started_late() -> None:
        await settled()
        await streamer.interest.refresh()

    async def settle_down() -> None:
        """Waits until the networks listen for all subscribed topics, for OPEN_WAIT_S and INTEREST_WAIT_S at most.
        Everything else works meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_WAIT_S):
                await streamer.networks.tried()
        try:
            async with asyncio.timeout(INTEREST_WAIT_S):
                await streamer.interest.answered()
                await streamer.networks.listen()
        except TimeoutError:
            what = "not every uSubscription has answered yet; it is asked again while the rest works"
            log.warning(what, usubscriptions=streamer.interest.unhealthy, problems=streamer.problems())
        streamer.networks.services_listen()

    def interest_samples() -> Iterator[Sample]:
        yield "interest_version", (), streamer.interest.version

    yield Part(name="calls that nobody serves", stop=drain)
    yield Part(name="control", start=streamer.control.start, stop=streamer.control.stop)
    yield Part(
        name="history",
        start=streamer.history.start,
        stop=streamer.history.stop,
        samples=partial(metrics.of_history, streamer.history),
    )
    if embedded is not None:
        yield Part(
            name="usubscription",
            start=embedded.start,
            run=partial(embedded.run, started_late),
            stop=embedded.service.stop,
            conditions=embedded.conditions,
            samples=partial(metrics.of_usubscription, embedded.service),
        )
    yield Part(name="all methods", start=settled)
    yield Part(
        name="learn the interest",
        run=streamer.interest.start,
        stop=streamer.interest.stop,
        conditions=streamer.interest_conditions,
        samples=interest_samples,
    )
    yield Part(name="claims", run=claims.watch, conditions=claims.conditions, samples=claims.samples)
    yield Part(name="hand-overs", run=handovers.run, conditions=handovers.conditions, samples=handovers.samples)
    follows = streamer.follows
    yield Part(
        name="follows",
        start=follows.start,
        stop=follows.stop,
        conditions=follows.conditions,
        samples=follows.samples,
    )
    yield Part(name="networks that listen", start=settle_down)


def _reports(streamer: Assembly) -> Iterator[Part]:
    certificates, admin = streamer.certificates, streamer.admin
    yield Part(
        name="certificates",
        start=certificates.look,
        run=certificates.run,
        notes=certificates.notes,
        samples=partial(metrics.of_certificates, certificates),
    )
    if admin is not None:  # `run` opens it before all parts; it is closed first
        yield Part(name="admin", stop=admin.close)
