"""The samples of parts that do not give their own: those of other packages, endpoints and pumps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from history.epochs.keeper import Keeper
from history.log.log import Log
from history.service.gaps import Gaps
from history.service.service import HistoryService
from streamer.egress.holds import LABELS
from streamer.egress.pump import Pump
from streamer.letters.dead_letter import DeadLetters
from streamer.operating.samples import Sample, each
from streamer.walk.endpoint import Endpoint
from transports.certificates import Expiries
from usubscription.service import USubscriptionService

ASKED_OF_HISTORY: Final = ("polls", "describes", "records", "gaps", "refused", "denied", "withheld")
ASKED_BY_FOLLOWERS: Final = ("commands", "frames", "expired")


def log_label(log: Log) -> str:
    return "durable" if log.durable else "volatile"


def of_endpoint(endpoint: Endpoint, *, is_connected: bool) -> Iterator[Sample]:
    label = (endpoint.name,)
    yield "received", label, endpoint.received
    yield "forwarded", label, endpoint.forwarded
    yield from each("dropped", label, dropped(endpoint))
    yield from each("mended", label, getattr(endpoint.transport, "mended", {}))
    yield "connected", label, is_connected
    yield "transport_faults", label, endpoint.faults
    yield "transport_hangs", label, endpoint.sends.hangs
    yield "unprobed", label, int(getattr(endpoint.transport, "unprobed", 0))
    yield "troubles", label, len(endpoint.troubles)
    yield "answered_twice", label, endpoint.twins.answers


def dropped(endpoint: Endpoint) -> Counter[str]:
    """Drops by reason, those of the transport included."""
    return endpoint.dropped + Counter(getattr(endpoint.transport, "dropped", {}))


def of_pump(pump: Pump, absent_ms: int) -> Iterator[Sample]:
    label = (pump.peer.name, log_label(pump.log))
    yield "backlog", label, pump.backlog
    yield "retries", label, pump.retries
    yield "gap_records", label, pump.gaps
    yield "parked_topics", label, len(pump.topic_holds)
    if pump.log.durable:
        states = {one.label: one for one in pump.address_holds.states()}
        for reason in LABELS:
            held = states.get(reason)
            yield "held_addresses", (*label, reason), 0 if held is None else held.units
            yield "held_records", (*label, reason), 0 if held is None else held.records
        yield "held_ended", label, pump.address_holds.ended
    yield "stuck_streams", label, len(pump.aside)
    yield "absent_seconds", label, absent_ms / 1000


def of_log(log: Log) -> Iterator[Sample]:
    label = (log_label(log),)
    yield "log_newest_seq", label, log.newest_seq
    yield "log_oldest_seq", label, log.oldest_seq
    yield "log_bytes", label, log.stored_bytes
    yield "log_healthy", label, log.healthy
    yield "log_topics", label, log.stream_count
    yield "log_topics_forgotten", label, log.streams_forgotten
    yield from each("log_dropped", label, log.dropped)
    yield "log_holes", label, len(log.holes)
    yield from each("log_damage", label, Counter(one.kind for one in log.damage))
    if log.durable:
        yield "log_disk_bytes", label, log.disk_bytes
        yield "log_disk_limit_bytes", label, log.disk_limit_bytes
        yield "disk_free_bytes", label, log.disk_free_bytes


def of_epochs(keeper: Keeper) -> Iterator[Sample]:
    for kept in keeper:
        yield from each("epochs", (kept.group.name,), kept.counts)
        yield "epochs_open", (kept.group.name,), len(kept.frontier.seen)


def of_certificates(certificates: Expiries) -> Iterator[Sample]:
    for endpoint, setting, expires_s in certificates:
        yield "certificate_expires_seconds", (endpoint, setting), expires_s


def of_usubscription(service: USubscriptionService) -> Iterator[Sample]:
    yield from each("usubscription_requests", (), service.requests)
    yield from each("usubscription_refused", (), service.refused)


def of_dead_letters(letters: DeadLetters) -> Iterator[Sample]:
    yield from each("dead_letters", (), letters.by_code)
    yield "dead_letters_lost", (), letters.lost
    yield "dead_letters_limited", (), letters.limited
    yield "dead_letters_damaged", (), letters.damaged


def of_history(history: HistoryService) -> Iterator[Sample]:
    followers = history.followers
    yield from each("history", (), {what: history.counts[what] for what in ASKED_OF_HISTORY})
    yield from each("history", (), {what: followers.counts[what] for what in ASKED_BY_FOLLOWERS})
    yield "followers", (), len(followers)
    yield "followers_topics", (), followers.topic_count
    yield "pushes", (), followers.push_count
    yield "consumers", (), len(history.consumers)


def of_gaps(gaps: Gaps) -> Iterator[Sample]:
    yield "gaps", (), gaps.total
