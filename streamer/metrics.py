"""The counters of a streamer as Prometheus metrics, read when somebody asks and never before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from streamer.app import Streamer


class StreamerCollector(Collector):
    """Reads a Streamer."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer

    def collect(self) -> Iterator[Metric]:
        yield from self._endpoints()
        yield from self._pumps()
        yield from self._history()
        yield from self._disk()
        yield from self._authorities()
        yield from self._usubscription()
        yield from self._rest()

    def _endpoints(self) -> Iterator[Metric]:
        received = CounterMetricFamily("up_streamer_received", "Messages heard on an endpoint", labels=["endpoint"])
        forwarded = CounterMetricFamily(
            "up_streamer_forwarded", "Messages that an endpoint's network has taken", labels=["endpoint"]
        )
        dropped = CounterMetricFamily(
            "up_streamer_dropped", "Messages not sent on, by reason", labels=["endpoint", "reason"]
        )
        mended = CounterMetricFamily(
            "up_streamer_mended",
            "Messages taken without a field of theirs that was not valid",
            labels=["endpoint", "field"],
        )
        connected = GaugeMetricFamily(
            "up_streamer_connected", "1 while the endpoint's network is there", labels=["endpoint"]
        )
        express = GaugeMetricFamily(
            "up_streamer_express_waiting", "Requests and responses that wait for an endpoint", labels=["endpoint"]
        )
        troubles = GaugeMetricFamily(
            "up_streamer_troubles", "Things that a transport names as wrong; see /readyz", labels=["endpoint"]
        )
        faults = CounterMetricFamily(
            "up_streamer_transport_faults", "Calls in which a transport raised what it may not", labels=["endpoint"]
        )
        twins = CounterMetricFamily(
            "up_streamer_answered_twice", "Second answers to one request: two hosts go by one name", labels=["endpoint"]
        )
        for endpoint in self._streamer.endpoints:
            twins.add_metric([endpoint.name], endpoint.twins.answers)
            received.add_metric([endpoint.name], endpoint.received)
            forwarded.add_metric([endpoint.name], endpoint.forwarded)
            for reason, count in self._streamer.dropped(endpoint).items():
                dropped.add_metric([endpoint.name, reason], count)
            for name, count in getattr(endpoint.transport, "mended", {}).items():
                mended.add_metric([endpoint.name, name], count)
            connected.add_metric([endpoint.name], int(self._streamer.is_connected(endpoint)))
            express.add_metric([endpoint.name], len(self._streamer.express.queues[endpoint.name]))
            faults.add_metric([endpoint.name], endpoint.faults)
            troubles.add_metric([endpoint.name], len(endpoint.troubles))
        yield from (received, forwarded, dropped, mended, connected, express, faults, troubles, twins)

    def _pumps(self) -> Iterator[Metric]:
        labels = ["endpoint", "log"]
        backlog = GaugeMetricFamily("up_streamer_backlog", "Records that a peer has not been through", labels=labels)
        retries = CounterMetricFamily("up_streamer_retries", "Batches that had to be sent again", labels=labels)
        gaps = CounterMetricFamily(
            "up_streamer_gap_records", "Records lost to retention or damage before a peer got them", labels=labels
        )
        parked = GaugeMetricFamily(
            "up_streamer_parked_topics",
            "Topics that are paused toward a peer, or of which no uSubscription has said whether it wants them",
            labels=labels,
        )
        stuck = GaugeMetricFamily(
            "up_streamer_stuck_streams", "Streams that do not get through though others do", labels=labels
        )
        absent = GaugeMetricFamily(
            "up_streamer_absent_seconds", "For how long a peer has been away while the streamer ran", labels=labels
        )
        for pump in self._streamer.pumps:
            label = [pump.peer.name, "durable" if pump.log.durable else "volatile"]
            backlog.add_metric(label, pump.backlog)
            retries.add_metric(label, pump.retries)
            gaps.add_metric(label, pump.gaps)
            parked.add_metric(label, len(pump.parking))
            stuck.add_metric(label, pump.aside.streams if pump.aside is not None else 0)
            absent.add_metric(label, pump.absent_ms / 1000)
        yield from (backlog, retries, gaps, parked, stuck, absent)
        unclaimed = GaugeMetricFamily(
            "up_streamer_unclaimed_records", "Records that wait for an endpoint that is not configured", labels=labels
        )
        for waits in self._streamer.claims.unclaimed:
            unclaimed.add_metric([waits.endpoint, waits.log.name], waits.records)
        yield unclaimed
        paused = GaugeMetricFamily(
            "up_streamer_paused", "Patterns of topics that are not dispatched to a peer now", labels=["peer"]
        )
        for peer, count in Counter(one.peer for one in self._streamer.paused).items():
            paused.add_metric([peer], count)
        yield paused

    def _history(self) -> Iterator[Metric]:
        newest = GaugeMetricFamily("up_streamer_log_newest_seq", "Newest record of a log", labels=["log"])
        oldest = GaugeMetricFamily("up_streamer_log_oldest_seq", "Oldest record of a log", labels=["log"])
        size = GaugeMetricFamily("up_streamer_log_bytes", "Size of the records in a log", labels=["log"])
        healthy = GaugeMetricFamily("up_streamer_log_healthy", "0 while a log refuses messages", labels=["log"])
        topics = GaugeMetricFamily("up_streamer_log_topics", "Topics that a log knows", labels=["log"])
        forgotten = CounterMetricFamily(
            "up_streamer_log_topics_forgotten", "Topics that had no record any more", labels=["log"]
        )
        dropped = CounterMetricFamily(
            "up_streamer_log_dropped", "What a log could not keep or read, by reason", labels=["log", "reason"]
        )
        holes = GaugeMetricFamily(
            "up_streamer_log_holes", "Ranges of records that were committed once and are lost", labels=["log"]
        )
        damage = GaugeMetricFamily(
            "up_streamer_log_damage",
            "What a log has lost, and no person has acknowledged, by kind",
            labels=["log", "kind"],
        )
        for log in self._streamer.logs:
            label = ["durable" if log.durable else "volatile"]
            newest.add_metric(label, log.newest_seq)
            oldest.add_metric(label, log.oldest_seq)
            size.add_metric(label, log.stored_bytes)
            healthy.add_metric(label, int(log.healthy))
            topics.add_metric(label, log.stream_count)
            forgotten.add_metric(label, log.streams_forgotten)
            holes.add_metric(label, len(log.holes))
            for reason, count in log.dropped.items():
                dropped.add_metric([*label, reason], count)
            for kind, count in Counter(one.kind for one in log.damage).items():
                damage.add_metric([*label, kind], count)
        yield from (newest, oldest, size, healthy, topics, forgotten, dropped, holes, damage)

    def _disk(self) -> Iterator[Metric]:
        used = GaugeMetricFamily(
            "up_streamer_log_disk_bytes", "What all files of a log take, its write-ahead log included", labels=["log"]
        )
        limit = GaugeMetricFamily(
            "up_streamer_log_disk_limit_bytes", "What they may take (history.retention_mib)", labels=["log"]
        )
        free = GaugeMetricFamily(
            "up_streamer_disk_free_bytes", "What is left to us on the disk of a log", labels=["log"]
        )
        for log in self._streamer.logs:
            if log.durable:
                used.add_metric(["durable"], log.disk_bytes)
                limit.add_metric(["durable"], log.retention_bytes)
                free.add_metric(["durable"], log.disk_free_bytes)
        yield from (used, limit, free)

    def _authorities(self) -> Iterator[Metric]:
        """Of those that send most, and of all others together: a fleet has more of them than a time series database
        takes."""
        labels = ["endpoint", "authority"]
        received = CounterMetricFamily(
            "up_streamer_authority_received", "Messages of a source authority", labels=labels
        )
        size = CounterMetricFamily(
            "up_streamer_authority_received_bytes", "Payload of a source authority's messages", labels=labels
        )
        dropped = CounterMetricFamily(
            "up_streamer_authority_dropped", "Messages of a source authority that were dropped", labels=labels
        )
        topics = GaugeMetricFamily(
            "up_streamer_authority_topics", "Topics of a source authority that the logs know", labels=labels
        )
        ledger = self._streamer.ledger
        for account in (*ledger.top, ledger.others):
            label = [account.endpoint, account.authority]
            received.add_metric(label, account.messages)
            size.add_metric(label, account.bytes)
            dropped.add_metric(label, account.dropped)
            if account is not ledger.others:
                topics.add_metric(label, self._streamer.topics_of(account.authority))
        yield from (received, size, dropped, topics)
        yield GaugeMetricFamily("up_streamer_authorities", "Source authorities that are known", value=len(ledger))
        yield GaugeMetricFamily(
            "up_streamer_busy", "Share of its time in which the streamer's thread has work", value=ledger.busy
        )

    def _usubscription(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "up_streamer_usubscription_requests", "Requests to the embedded uSubscription", labels=["method"]
        )
        refused = CounterMetricFamily(
            "up_streamer_usubscription_refused", "Those that it refused, by reason", labels=["reason"]
        )
        service = self._streamer.usubscription
        if service is not None:
            for method, count in service.requests.items():
                requests.add_metric([method], count)
            for reason, count in service.refused.items():
                refused.add_metric([reason], count)
        yield from (requests, refused)

    def _rest(self) -> Iterator[Metric]:
        letters = CounterMetricFamily(
            "up_streamer_dead_letters", "Messages that could not be delivered, by code", labels=["code"]
        )
        for code, count in self._streamer.dead_letters.by_code.items():
            letters.add_metric([code], count)
        yield letters
        yield CounterMetricFamily(
            "up_streamer_dead_letters_lost", "Dead letters that were not stored", value=self._streamer.dead_letters.lost
        )
        yield CounterMetricFamily(
            "up_streamer_dead_letters_limited",
            "Dead letters that were counted only: too many of one kind in a minute",
            value=self._streamer.dead_letters.limited,
        )
        yield CounterMetricFamily(
            "up_streamer_dead_letters_damaged",
            "Stores of dead letters that were moved aside",
            value=self._streamer.dead_letters.damaged,
        )
        history = CounterMetricFamily(
            "up_streamer_history", "What callers asked of the history, and were given or refused", labels=["what"]
        )
        for what in ("polls", "describes", "records", "gaps", "refused", "denied", "withheld"):
            history.add_metric([what], self._streamer.history.counts[what])
        yield history
        yield GaugeMetricFamily(
            "up_streamer_consumers",
            "Names of consumers that have an owner",
            value=len(self._streamer.history.consumers),
        )
        yield CounterMetricFamily("up_streamer_gaps", "Gaps that were told", value=self._streamer.gaps.total)
        yield GaugeMetricFamily("up_streamer_ready", "1 if everything works", value=int(not self._streamer.problems()))
        yield GaugeMetricFamily(
            "up_streamer_interest_version",
            "Rises with every change of a subscription",
            value=self._streamer.interest.version,
        )


def expose(streamer: Streamer) -> bytes:
    """The text exposition format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StreamerCollector(streamer))
    return generate_latest(registry)
