"""The counters of a streamer as Prometheus metrics, with those of its process, read only on request.

FAMILIES: all metrics        samples of each part: name, labels, value -> families -> text

The functions `of_...` return the samples of parts without a method for it: other packages, endpoints, pumps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from history.log.log import Log
from history.service.keeper import Keeper
from history.service.service import HistoryService
from streamer.durations import Durations
from streamer.egress.pump import Pump
from streamer.egress.reasons import LABELS
from streamer.reporting import Sample, each
from streamer.walk.endpoint import Endpoint
from streamer.walk.sender import ExpressQueue

# up_streamer_NAME (counters end with _total) -> kind, labels, help text
COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
Kinds = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
FAMILIES: Final[dict[str, tuple[type[Kinds], str, str]]] = {
    "build_info": (GAUGE, "version core python", "1: the version, whether its core is compiled, and its Python"),
    "received": (COUNTER, "endpoint", "Messages received from an endpoint's network"),
    "forwarded": (COUNTER, "endpoint", "Messages that an endpoint's network has accepted"),
    "last_received_seconds": (GAUGE, "endpoint", "Unix time in seconds of the last message from its network"),
    "last_forwarded_seconds": (GAUGE, "endpoint", "Unix time in seconds at which its network last accepted a message"),
    "dropped": (COUNTER, "endpoint reason", "Messages that were not forwarded, by reason"),
    "lost": (
        COUNTER,
        "endpoint reason",
        "Messages that were dropped although their network was told that they were taken; also in dropped",
    ),
    "mended": (COUNTER, "endpoint field", "Messages accepted without one of their fields, which was invalid"),
    "connected": (GAUGE, "endpoint", "1 while the endpoint's network is connected"),
    "express_waiting": (GAUGE, "endpoint", "Requests and responses that wait for an endpoint"),
    "transport_faults": (COUNTER, "endpoint", "Calls in which a transport raised an exception that it may not raise"),
    "transport_hangs": (COUNTER, "endpoint", "Times that a transport did not return from sending and was reopened"),
    "unprobed": (COUNTER, "endpoint", "Publishes that were sent without knowing whether anybody listens"),
    "left_unacknowledged": (COUNTER, "endpoint", "Times that a receiver left before it had acknowledged what was sent"),
    "troubles": (GAUGE, "endpoint", "Problems that a transport reports; see /readyz"),
    "answered_twice": (COUNTER, "endpoint", "Second responses to one request: two hosts use the same name"),
    "backlog": (GAUGE, "endpoint log", "Records that have not been delivered to a peer yet"),
    "lag_seconds": (GAUGE, "endpoint log", "Age of the oldest record that a peer has not had, without held ones"),
    "queued_bytes": (
        GAUGE,
        "endpoint queue",
        "Payload in memory that waits for a peer: express (requests and responses), durable and volatile (read ahead "
        "from the logs); dead letters: those not stored yet",
    ),
    "retries": (COUNTER, "endpoint log", "Batches that had to be sent again"),
    "gap_records": (COUNTER, "endpoint log", "Records lost to retention or damage before a peer received them"),
    "parked_topics": (
        GAUGE,
        "endpoint log",
        "Topics that are paused for a peer, or whose subscribers are not known yet",
    ),
    "held_addresses": (
        GAUGE,
        "endpoint log reason",
        "Network addresses whose messages wait: refused; unheard: nobody has listened yet; left: nobody listens now",
    ),
    "held_records": (GAUGE, "endpoint log reason", "Records that wait there, as far as is known since the start"),
    "held_ended": (COUNTER, "endpoint log", "Addresses whose messages have waited for the longest time allowed"),
    "stuck_streams": (GAUGE, "endpoint log", "Streams that can't be delivered although others can"),
    "absent_seconds": (
        GAUGE,
        "endpoint log",
        "How long a peer has been away while the streamer ran; 0: it is connected",
    ),
    "unclaimed_records": (GAUGE, "endpoint log", "Records that wait for an endpoint that is not configured"),
    "subscriptions_without_rule": (
        GAUGE,
        "from to",
        "Subscriptions that no rule lets have their topic: topics, each with the subscribing authorities",
    ),
    "sender_clock_ahead_seconds": (
        GAUGE,
        "endpoint",
        "How far the fastest clock of the senders on this network is ahead of ours, if that is more than a minute",
    ),
    "reloads": (COUNTER, "result", "Reloads of the configuration: applied, or failed, which changes nothing"),
    "spans": (COUNTER, "result", "Spans of traced messages: exported, or lost since the collector did not take them"),
    "reload_failed": (GAUGE, "", "1 if the last reload of the configuration has failed"),
    "paused": (GAUGE, "peer", "Patterns of topics that are paused for a peer"),
    "log_newest_seq": (GAUGE, "log", "Newest record of a log"),
    "log_oldest_seq": (GAUGE, "log", "Oldest record of a log"),
    "log_bytes": (GAUGE, "log", "Size of the records in a log"),
    "log_healthy": (GAUGE, "log", "0 while a log refuses messages"),
    "log_commit_seconds": (HISTOGRAM, "log", "Durations of a log's transactions"),
    "log_fsync_seconds": (HISTOGRAM, "log", "Durations of the COMMIT at their end, which is the fsync"),
    "log_topics": (GAUGE, "log", "Topics that a log knows"),
    "log_topics_forgotten": (COUNTER, "log", "Topics that a log forgot since it had no records of them left"),
    "log_dropped": (COUNTER, "log reason", "Messages and records that a log could not store or read, by reason"),
    "log_holes": (GAUGE, "log", "Ranges of committed records that are lost"),
    "log_damage": (GAUGE, "log kind", "Losses of a log that nobody has acknowledged, by kind"),
    "log_disk_bytes": (GAUGE, "log", "Size of all files of a log, including its write-ahead log"),
    "log_disk_limit_bytes": (GAUGE, "log", "Limit of that size: history.retention_mib, or what the disk has room for"),
    "disk_free_bytes": (GAUGE, "log", "Free space on the disk of a log"),
    "disk_reserve_missing_bytes": (GAUGE, "", "How much of the reserve for a full disk is used up; 0: it is whole"),
    "authority_received": (COUNTER, "endpoint authority", "Messages of a source authority"),
    "authority_received_bytes": (COUNTER, "endpoint authority", "Payload bytes of a source authority's messages"),
    "authority_dropped": (COUNTER, "endpoint authority", "Messages of a source authority that were dropped"),
    "authority_topics": (GAUGE, "endpoint authority", "Topics of a source authority that the logs know"),
    "certificate_expires_seconds": (
        GAUGE,
        "endpoint setting",
        "Unix time in seconds at which a configured certificate expires; endpoint is empty for the admin port, [http] "
        "for the HTTP edge",
    ),
    "authorities": (GAUGE, "", "Source authorities that are known"),
    "busy": (GAUGE, "", "Share of its time in which the streamer's thread works"),
    "usubscription_requests": (COUNTER, "method", "Requests to the embedded uSubscription"),
    "usubscription_refused": (COUNTER, "reason", "Requests that the embedded uSubscription refused, by reason"),
    "usubscription_renewed": (
        COUNTER,
        "",
        "Subscriptions that other uSubscription services had lost, and that were renewed there",
    ),
    "usubscription_missed": (
        GAUGE,
        "",
        "Subscriptions that other uSubscription services had from an earlier store of the embedded one",
    ),
    "dead_letters": (COUNTER, "code", "Messages that could not be delivered, by code"),
    "dead_letters_lost": (COUNTER, "", "Dead letters that were not stored"),
    "dead_letters_limited": (COUNTER, "", "Dead letters that were only counted: too many of one kind in a minute"),
    "dead_letters_damaged": (COUNTER, "", "Damaged files of dead letters that were moved aside"),
    "dead_letters_stored": (GAUGE, "", "Dead letters in the store"),
    "dead_letters_resent": (COUNTER, "", "Stored dead letters that have arrived when they were sent again"),
    "dead_letters_purged": (COUNTER, "", "Stored dead letters that an operator has removed"),
    "grip_answers": (COUNTER, "outcome", "Answers of backends behind the HTTP edge, by what was done with them"),
    "grip_cuts": (COUNTER, "reason", "Answers to clients that the proxy of the HTTP edge has cut off, by reason"),
    "grip_recoveries": (COUNTER, "outcome", "Requests to the links of held streams: answered, failed"),
    "history": (COUNTER, "what", "Requests to the history, and what they were answered"),
    "followers": (GAUGE, "", "Followers of this history that have a lease"),
    "followers_topics": (GAUGE, "", "Topics and patterns that all followers follow"),
    "pushes": (GAUGE, "", "Followers to whom frames are pushed"),
    "follower_backlog": (GAUGE, "endpoint log", "Records that a follower that has taken over has not confirmed"),
    "followed": (GAUGE, "endpoint state", "Histories that are followed at an endpoint, by state"),
    "followed_not_kept": (
        GAUGE,
        "endpoint",
        "Topics and patterns that are followed, and that the history does not keep",
    ),
    "followed_records": (COUNTER, "endpoint what", "Followed records and copies of them, by what was done with them"),
    "edge_connections": (GAUGE, "port", "Open connections of the HTTP edge: http (clients), publish (publishers)"),
    "edge_clients": (GAUGE, "kind", "Clients of the HTTP edge that hold a connection: streams and held requests"),
    "edge_feeds": (GAUGE, "", "Readers of the history that clients of the HTTP edge share"),
    "edge_refused": (COUNTER, "reason", "Requests and connections that the HTTP edge refused or cut off, by reason"),
    "edge_events": (COUNTER, "kind", "Events and items that the HTTP edge has written to clients, by kind of client"),
    "recovery": (COUNTER, "source what", "Questions to a recovery source, and what became of the messages it has sent"),
    "recovery_waiting": (GAUGE, "source", "Messages that wait for those before them, which a source is asked for"),
    "epochs": (COUNTER, "group what", "Records of groups that have epochs, and how the epochs ended"),
    "epochs_open": (GAUGE, "group", "Epochs that are open"),
    "epochs_clock_ahead_seconds": (
        GAUGE,
        "group",
        "How far the fastest clock of its publishers is ahead of ours; 0: less than a bucket, or than a second",
    ),
    "grip_items": (COUNTER, "what", "Items of GRIP channels, and what was done with them"),
    "consumers": (GAUGE, "", "Names of consumers that have an owner"),
    "gaps": (COUNTER, "", "Gaps that were reported"),
    "ready": (GAUGE, "", "1 while /readyz answers 200: ready or degraded"),
    "state": (GAUGE, "state", "1 for the worst of all states in /readyz: ready, degraded, not_ready"),
    "endpoint_state": (GAUGE, "endpoint state", "1 for the state of an endpoint: ready, degraded, not_ready"),
    "interest_version": (GAUGE, "", "Increases with every change of a subscription"),
}


class StreamerCollector(Collector):
    def __init__(self, samples: Callable[[], Iterable[Sample]]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        families = {
            name: kind(f"up_streamer_{name}", says, labels=labels.split())
            for name, (kind, labels, says) in FAMILIES.items()
        }
        for name, labels, value in self._samples():
            family = families[name]
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(value, Durations), "the samples of a histogram"
                family.add_metric(labels, value.buckets(), value.sum_s)
            else:
                assert not isinstance(value, Durations), "a counter and a gauge have one value"
                family.add_metric(labels, value)
        yield from families.values()


def expose(samples: Callable[[], Iterable[Sample]]) -> bytes:
    """Returns the samples in the text exposition format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StreamerCollector(samples))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


# The samples of parts

ASKED_OF_HISTORY: Final = ("polls", "describes", "records", "gaps", "refused", "denied", "withheld")
ASKED_BY_FOLLOWERS: Final = ("commands", "frames", "expired")


def of_endpoint(endpoint: Endpoint, queue: ExpressQueue, *, is_connected: bool) -> Iterator[Sample]:
    label = (endpoint.name,)
    yield "received", label, endpoint.received
    yield "forwarded", label, endpoint.forwarded
    yield from each("dropped", label, endpoint.all_dropped)
    yield from each("mended", label, endpoint.transport.mended)
    yield "connected", label, is_connected
    yield "transport_faults", label, endpoint.faults
    yield "transport_hangs", label, endpoint.sends.hangs
    yield "unprobed", label, endpoint.transport.unprobed
    yield "left_unacknowledged", label, endpoint.transport.left_unacknowledged
    yield "troubles", label, len(endpoint.troubles)
    yield "answered_twice", label, endpoint.twins.answers
    yield "express_waiting", label, len(queue)
    yield "queued_bytes", (endpoint.name, "express"), queue.bytes


def of_pump(pump: Pump, absent_ms: int) -> Iterator[Sample]:
    label = (pump.peer.name, pump.log.name)
    yield "backlog", label, pump.backlog
    yield "queued_bytes", label, pump.sender.queue.bytes  # the log stands for the queue
    yield "retries", label, pump.retries
    yield "gap_records", label, pump.losses.gaps
    yield "parked_topics", label, len(pump.waits.topics)
    if pump.log.durable:
        states = {state.label: state for state in pump.waits.addresses.states()}
        for reason in LABELS:
            held = states.get(reason)
            yield "held_addresses", (*label, reason), 0 if held is None else held.units
            yield "held_records", (*label, reason), 0 if held is None else held.records
        yield "held_ended", label, pump.waits.addresses.ended
    yield "stuck_streams", label, len(pump.aside)
    yield "absent_seconds", label, absent_ms / 1000


def of_log(log: Log) -> Iterator[Sample]:
    label = (log.name,)
    yield "log_newest_seq", label, log.newest_seq
    yield "log_oldest_seq", label, log.oldest_seq
    yield "log_bytes", label, log.extent.stored_bytes
    yield "log_healthy", label, log.healthy
    yield "log_topics", label, log.stream_count
    yield "log_topics_forgotten", label, log.stream_table.forgotten_count
    yield from each("log_dropped", label, log.dropped)
    yield "log_holes", label, len(log.holes)
    yield from each("log_damage", label, Counter(damage.kind for damage in log.damage))
    if log.durable:
        yield "log_disk_bytes", label, log.extent.disk_bytes
        yield "log_disk_limit_bytes", label, log.disk_limit_bytes
        yield "disk_free_bytes", label, log.extent.disk_free_bytes


def of_epochs(keeper: Keeper) -> Iterator[Sample]:
    ahead_ms = {group: ms for group, _, ms in keeper.clocks_ahead()}
    for kept in keeper:
        yield "epochs_clock_ahead_seconds", (kept.group.name,), ahead_ms.get(kept.group.name, 0) / 1_000
        yield from each("epochs", (kept.group.name,), kept.counts)
        yield "epochs_open", (kept.group.name,), len(kept.frontier.seen)


def of_history(history: HistoryService) -> Iterator[Sample]:
    followers = history.followers
    yield from each("history", (), {question: history.counts[question] for question in ASKED_OF_HISTORY})
    yield from each("history", (), {question: followers.counts[question] for question in ASKED_BY_FOLLOWERS})
    yield "followers", (), len(followers)
    yield "followers_topics", (), followers.topic_count
    yield "pushes", (), len(followers.pushes)
    yield "consumers", (), len(history.consumers)
