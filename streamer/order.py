"""The parts of a streamer in the order in which they start; app.py makes them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from streamer import parts
from streamer.lifecycle import Part
from streamer.operating import counters
from streamer.operating.losses import conditions_of_log
from streamer.operating.samples import Sample

if TYPE_CHECKING:
    from streamer.app import Streamer

DRAIN_MS_MAX: Final = 200  # for each service inside to answer what it has begun, and the network to take it


def parts_in_order(streamer: Streamer) -> list[Part]:
    return [*_storage(streamer), *_walk(streamer), *_services(streamer), *_reports(streamer)]


def _storage(streamer: Streamer) -> Iterator[Part]:
    letters, hours = streamer.dead_letters, streamer.config.history.acknowledge_after_hours
    for log in streamer.logs:
        yield Part(
            name=f"{log.name} log",
            stage="file",
            stop=log.close,
            conditions=partial(conditions_of_log, log, hours),
            samples=partial(counters.of_log, log),
        )
    yield Part(
        name="dead letters",
        stage="file",
        run=letters.run,
        stop=letters.close,
        conditions=letters.conditions,
        samples=partial(counters.of_dead_letters, letters),
    )
    yield Part(name="gaps", run=streamer.gaps.run, samples=partial(counters.of_gaps, streamer.gaps))
    yield Part(name="epochs", samples=partial(counters.of_epochs, streamer.keeper))
    yield Part(name="states", run=streamer.watch, samples=streamer.states.samples)


def _walk(streamer: Streamer) -> Iterator[Part]:
    """Its networks are opened last: whoever listens before has been loaded."""

    async def load() -> None:
        for section in streamer.config.rules:
            streamer.rules.add(parts.rule_of(section))
        for pump in streamer.pumps:
            pump.begin()  # before anything is listened to: what comes from now on is for them
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

    async def open_networks() -> None:
        await streamer.attached.start(streamer.start_task)

    ledger, paused, attached = streamer.ledger, streamer.paused, streamer.attached
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
        start=open_networks,
        stop=attached.close,
        conditions=attached.conditions,
        samples=attached.samples,
        notes=attached.notes,
    )
    yield Part(name="flows", stage="network", stop=close_flows)


def _services(streamer: Streamer) -> Iterator[Part]:
    """Stopped before the networks, the last first."""
    hosted, embedded, claims, handovers = streamer.hosted, streamer.embedded, streamer.claims, streamer.handovers

    async def drain() -> None:
        await hosted.unserved.drain(DRAIN_MS_MAX)

    async def settled() -> None:
        """Each service that is hosted has its methods by now: there is none that may come yet."""
        if embedded is None or embedded.is_started:
            hosted.unserved.is_settled = True

    async def started_late() -> None:
        await settled()
        await streamer.interest.refresh()

    def interest_samples() -> Iterator[Sample]:
        yield "interest_version", (), streamer.interest.version

    yield Part(name="calls that nobody serves", stop=drain)
    yield Part(name="control", start=streamer.control.start, stop=streamer.control.stop)
    yield Part(
        name="history",
        start=streamer.history.start,
        stop=streamer.history.stop,
        samples=partial(counters.of_history, streamer.history),
    )
    if embedded is not None:
        yield Part(
            name="usubscription",
            start=embedded.start,
            run=partial(embedded.run, started_late),
            stop=embedded.service.stop,
            conditions=embedded.conditions,
            samples=partial(counters.of_usubscription, embedded.service),
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
    yield Part(name="networks that listen", start=streamer.settle_down)


def _reports(streamer: Streamer) -> Iterator[Part]:
    certificates, admin = streamer.certificates, streamer.admin
    yield Part(
        name="certificates",
        start=certificates.look,
        run=certificates.run,
        notes=certificates.notes,
        samples=partial(counters.of_certificates, certificates),
    )
    if admin is not None:  # it is opened before anything starts, and closed first
        yield Part(name="admin", stop=admin.close)
