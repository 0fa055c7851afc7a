"""Publishers and subscribers of a benchmark on each network, with that network's own library, without up-streamer.

publisher: send(batches of payloads) -> network -> relay -> network -> Tally.take(payload) :subscriber

An address is a port of 127.0.0.1 (zenoh, mqtt) or a DDS domain. campaigns/bench/mqtt.py has the ends of MQTT.
"""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from campaigns.bench import wire

MATCH_TIMEOUT_S: Final = 20.0  # until publisher and subscriber have discovered each other
QUIET_S: Final = 0.3  # after the last message, to count duplicates
LOOK_S: Final = 0.1  # precision of the time of the last message if some are lost
DDS_TAKE_SAMPLES: Final = 256
DDS_WRITE_ATTEMPT_MS: Final = 50  # cyclonedds holds the GIL while a write blocks: wait shortly, and often
# publishers that a benchmark declares on Zenoh; with more, declaring would dominate the figures
ZENOH_PUBLISHERS_MAX: Final = 1_000


class Publisher(Protocol):
    def send(self, batches: Iterable[list[bytes]]) -> None: ...
    def close(self) -> None: ...


class Subscriber(Protocol):
    def close(self) -> None: ...


class Tally:
    """Counts one run at a time, and only notices messages of other runs (warm-up, late ones).

    Message n is on topic n modulo `topics`. `disordered` messages came after a later one of their topic, `scrambled`
    ones did not follow the message that was sent before them on any topic.
    """

    def __init__(self, topics: int = 1) -> None:
        self._topics = topics
        self.done, self._twice = threading.Event(), threading.Event()
        self.last_run = -1
        self.arm(-1, 0, latency=False)

    def arm(self, run: int, messages: int, *, latency: bool) -> None:
        self.received, self.doubled, self.disordered, self.scrambled = 0, 0, 0, 0
        self.first, self.last = 0.0, 0.0
        self.delays_ns = array("q") if latency else None
        self._seen, self._newest, self._expected = bytearray(messages), [-1] * self._topics, 0
        self.messages, self.run = messages, run
        self.done.clear()
        self._twice.clear()

    def take(self, payload: bytes) -> None:
        run, number, stamp = wire.unstamp(payload)
        if run != self.run:
            self.last_run = run
            return
        if self._seen[number]:
            self.doubled += 1
            self._twice.set()
            return
        self._seen[number] = 1
        if not self.received:
            self.first = time.perf_counter()
        if number != self._expected:
            self.scrambled += 1
        self._expected = number + 1
        topic = number % self._topics
        if number < self._newest[topic]:
            self.disordered += 1
        self._newest[topic] = number
        self.received += 1
        if self.delays_ns is not None:
            self.delays_ns.append(time.time_ns() - stamp)
        if self.received == self.messages:
            self.last = time.perf_counter()
            self.last_run = run
            self.done.set()

    def wait(self, stall_s: float, quiet_s: float = QUIET_S) -> None:
        """Waits until the run is complete and no duplicate came for `quiet_s`, or nothing came for `stall_s`."""
        before, changed = -1, time.perf_counter()
        while not self.done.wait(min(stall_s, LOOK_S)):
            now = time.perf_counter()
            if self.received != before:
                before, changed = self.received, now
            elif now - changed >= stall_s:
                self.last = changed  # if messages are lost, the last one arrived at about that time
                return
        self._twice.wait(quiet_s)

    def result(self) -> dict[str, Any]:
        delays = sorted(self.delays_ns or ())
        at = [delays[int(len(delays) * q)] / 1e6 for q in (0.5, 0.99)] if delays else [None, None]
        return {
            "received": self.received,
            "doubled": self.doubled,
            "disordered": self.disordered,
            "scrambled": self.scrambled,
            "seconds": max(self.last - self.first, 0.0),
            "p50_ms": at[0],
            "p99_ms": at[1],
        }


# --- Zenoh
# ----------------------------------------------------------------------------------------------------------------------


def zenoh_session(*, listen: int | None = None, connect: int | None = None) -> Any:
    import zenoh

    config = zenoh.Config()
    config.insert_json5("scouting/multicast/enabled", "false")
    config.insert_json5("transport/shared_memory/enabled", "false")  # as in the streamer
    for side, port in (("listen", listen), ("connect", connect)):
        config.insert_json5(f"{side}/endpoints", f'["tcp/127.0.0.1:{port}"]' if port else "[]")
    return zenoh.open(config)


def zenoh_publisher(session: Any, key: str = wire.ZENOH_KEY) -> Any:
    return session.declare_publisher(key, **_zenoh_delivery())


def _zenoh_delivery() -> dict[str, Any]:
    import zenoh

    return {"congestion_control": zenoh.CongestionControl.BLOCK, "priority": zenoh.Priority.DATA_LOW}


class ZenohPublisher:
    def __init__(self, port: int, topics: int = 1) -> None:
        self._session = zenoh_session(connect=port)
        self._attributes, self._number = wire.Attributes(topics), 0
        keys = map(wire.zenoh_key, range(topics))
        if topics <= ZENOH_PUBLISHERS_MAX:
            self._publishers = [zenoh_publisher(self._session, key) for key in keys]
            self._puts = [publisher.put for publisher in self._publishers]
        else:
            self._puts = [self._undeclared(key) for key in keys]

    def _undeclared(self, key: str) -> Callable[..., None]:
        put, how = self._session.put, _zenoh_delivery()
        return lambda payload, attachment: put(key, payload, attachment=attachment, **how)

    def send(self, batches: Iterable[list[bytes]]) -> None:
        puts, attachment, number = self._puts, self._attributes.attachment, self._number
        topics = len(puts)
        for payload in itertools.chain.from_iterable(batches):
            puts[number % topics](payload, attachment=attachment(number))
            number += 1
        self._number = number

    def close(self) -> None:
        self._session.close()


class ZenohSubscriber:
    def __init__(self, port: int, tally: Tally) -> None:
        self._session = zenoh_session(connect=port)
        take = tally.take
        self._subscriber = self._session.declare_subscriber("up/**", lambda sample: take(sample.payload.to_bytes()))

    def close(self) -> None:
        self._session.close()


# --- DDS
# ----------------------------------------------------------------------------------------------------------------------

DDS_LOOPBACK: Final = """<CycloneDDS><Domain>
<General><Interfaces><NetworkInterface name="lo"
multicast="false"/></Interfaces><AllowMulticast>false</AllowMulticast></General>
<Discovery><ParticipantIndex>auto</ParticipantIndex><MaxAutoParticipantIndex>32</MaxAutoParticipantIndex> <Peers><Peer
address="127.0.0.1"/></Peers></Discovery></Domain></CycloneDDS>"""


class DdsParticipant:
    """One participant with the project's topic and QoS (docs/dds-mapping.md), on loopback only."""

    def __init__(self, domain: int) -> None:
        from cyclonedds.domain import Domain, DomainParticipant
        from cyclonedds.qos import Policy, Qos
        from cyclonedds.topic import Topic

        from campaigns.bench.dds_type import UMessage

        self._domain = Domain(domain, DDS_LOOPBACK)
        self.participant = DomainParticipant(domain)
        self.topic = Topic(self.participant, "uprotocol/v1", UMessage)
        self.qos = Qos(
            Policy.Reliability.Reliable(max_blocking_time=DDS_WRITE_ATTEMPT_MS * 1_000_000),
            Policy.History.KeepAll,
            Policy.ResourceLimits(max_samples=4_096, max_instances=-1, max_samples_per_instance=-1),
        )

    def writer(self, partition: str) -> Any:
        from cyclonedds.pub import DataWriter, Publisher
        from cyclonedds.qos import Policy, Qos

        return DataWriter(Publisher(self.participant, Qos(Policy.Partition([partition]))), self.topic, self.qos)

    def reader(self, partition: str) -> Any:
        from cyclonedds.qos import Policy, Qos
        from cyclonedds.sub import DataReader, Subscriber

        return DataReader(Subscriber(self.participant, Qos(Policy.Partition([partition]))), self.topic, self.qos)


class DdsPublisher:
    def __init__(self, domain: int, topics: int = 1) -> None:
        assert topics == 1, "no leg publishes more"
        self._participant = DdsParticipant(domain)
        self._writer = self._participant.writer(wire.DDS_PARTITION)
        self._attributes, self._number = wire.Attributes(), 0

    def send(self, batches: Iterable[list[bytes]]) -> None:
        from campaigns.bench.dds_type import UMessage

        attributes, number = self._attributes.plain, self._number
        for payload in itertools.chain.from_iterable(batches):
            self._write(UMessage(attributes(number), payload))
            number += 1
        self._number = number

    def _write(self, sample: Any) -> None:
        from cyclonedds.core import DDSException

        started = time.perf_counter()
        while True:
            try:
                self._writer.write(sample)
                return
            except DDSException as error:
                if error.code != DDSException.DDS_RETCODE_TIMEOUT or time.perf_counter() - started > MATCH_TIMEOUT_S:
                    raise

    def close(self) -> None:
        del self._writer, self._participant


@dataclass(frozen=True)
class Address:
    """The address of a child process: a network and its port or domain, written `zenoh:7447` on a command line."""

    network: str
    number: int

    @classmethod
    def parse(cls, text: str) -> Address:
        network, _, number = text.partition(":")
        return cls(network, int(number))

    def __str__(self) -> str:
        return f"{self.network}:{self.number}"
