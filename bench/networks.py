"""The two ends of a benchmark on each network, with that network's own library and nothing of up-streamer.

publisher: send(payloads) -> network -> relay -> network -> Tally.take(payload) :subscriber

An address is a port of 127.0.0.1 (zenoh, mqtt), or a DDS domain.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from bench import wire

MATCH_TIMEOUT_S: Final = 20.0  # until publisher and subscriber have found each other
MQTT_WINDOW_MESSAGES_MAX: Final = 1_000  # unacknowledged; some 20 ms of mosquitto, so the window never is the limit
MQTT_BATCH_MESSAGES: Final = 64  # packets in one write
DDS_TAKE_SAMPLES: Final = 256
DDS_WRITE_ATTEMPT_MS: Final = 50  # cyclonedds holds the GIL while a write waits for room: wait shortly, and often


class Publisher(Protocol):
    def send(self, payloads: Iterable[bytes]) -> None: ...
    def close(self) -> None: ...


class Subscriber(Protocol):
    def close(self) -> None: ...


class Tally:
    """Counts one run at a time; what belongs to another run (warm-up, stragglers) is only noticed."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.last_run = -1
        self.arm(-1, 0, latency=False)

    def arm(self, run: int, messages: int, *, latency: bool) -> None:
        self.received, self.disordered, self.first, self.last = 0, 0, 0.0, 0.0
        self.delays_ns = array("q") if latency else None
        self.expected = 0
        self.messages, self.run = messages, run
        self.done.clear()

    def take(self, payload: bytes) -> None:
        run, number, stamp = wire.unstamp(payload)
        if run != self.run:
            self.last_run = run
            return
        if not self.received:
            self.first = time.perf_counter()
        if number != self.expected:
            self.disordered += 1
        self.expected = number + 1
        self.received += 1
        if self.delays_ns is not None:
            self.delays_ns.append(time.time_ns() - stamp)
        if self.received == self.messages:
            self.last = time.perf_counter()
            self.last_run = run
            self.done.set()

    def wait(self, stall_s: float) -> None:
        """Until all of the run is here, or nothing has come for `stall_s`."""
        before = -1
        while not self.done.wait(stall_s) and self.received != before:
            before = self.received
        if not self.done.is_set():
            self.last = time.perf_counter()

    def result(self) -> dict[str, Any]:
        delays = sorted(self.delays_ns or ())
        at = [delays[int(len(delays) * q)] / 1e6 for q in (0.5, 0.99)] if delays else [None, None]
        seconds = self.last - self.first
        return {
            "received": self.received,
            "disordered": self.disordered,
            "seconds": seconds,
            "p50_ms": at[0],
            "p99_ms": at[1],
        }


# --- Zenoh
# ----------------------------------------------------------------------------------------------------------------------


def zenoh_session(*, listen: int | None = None, connect: int | None = None) -> Any:
    import zenoh

    config = zenoh.Config()
    config.insert_json5("scouting/multicast/enabled", "false")
    config.insert_json5("transport/shared_memory/enabled", "false")  # as the streamer has it
    for side, port in (("listen", listen), ("connect", connect)):
        config.insert_json5(f"{side}/endpoints", f'["tcp/127.0.0.1:{port}"]' if port else "[]")
    return zenoh.open(config)


def zenoh_publisher(session: Any) -> Any:
    import zenoh

    return session.declare_publisher(
        wire.ZENOH_KEY, congestion_control=zenoh.CongestionControl.BLOCK, priority=zenoh.Priority.DATA_LOW
    )


class ZenohPublisher:
    def __init__(self, port: int) -> None:
        self._session = zenoh_session(connect=port)
        self._publisher = zenoh_publisher(self._session)
        self._attributes, self._number = wire.Attributes(), 0

    def send(self, payloads: Iterable[bytes]) -> None:
        put, attachment, number = self._publisher.put, self._attributes.attachment, self._number
        for payload in payloads:
            put(payload, attachment=attachment(number))
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


# --- MQTT 5, straight on the socket
# ------------------------------------------------------------------------------------------------


class _MqttSocket:
    def __init__(self, port: int, client_id: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=MATCH_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self.socket.sendall(wire.connect_packet(client_id))
        self.window = min(wire.receive_maximum(self.expect(wire.CONNACK)), MQTT_WINDOW_MESSAGES_MAX)
        self.socket.settimeout(None)

    def read(self) -> tuple[bytes, list[tuple[int, int, int]]]:
        """What arrived, and where its whole packets are. Raises ConnectionError when the broker hangs up."""
        data = self.socket.recv(262_144)
        if not data:
            raise ConnectionError("the broker closed the connection")
        data = self._rest + data
        packets, position = wire.split_packets(data)
        self._rest = data[position:]
        return data, packets

    def expect(self, kind: int) -> bytes:
        while True:
            data, packets = self.read()
            for got, start, end in packets:
                if got == kind:
                    return data[start:end]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(b"\xe0\x00")
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class MqttPublisher:
    def __init__(self, port: int) -> None:
        self._mqtt = _MqttSocket(port, "bench-publisher")
        self._packets, self._number = wire.PublishPackets(), 0
        self._acked, self._progress, self._failed = 0, threading.Condition(), False
        threading.Thread(target=self._read_acks, daemon=True).start()

    def _read_acks(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                acks = sum(kind == wire.PUBACK for kind, _, _ in self._mqtt.read()[1])
                with self._progress:
                    self._acked += acks
                    self._progress.notify()
        with self._progress:
            self._failed = True
            self._progress.notify()

    def send(self, payloads: Iterable[bytes]) -> None:
        """Returns when the broker has acknowledged all. A paced sender's packets leave one by one, others in
        batches."""
        packet, number, batch = self._packets.packet, self._number, []
        last_send = time.perf_counter()
        for payload in payloads:
            batch.append(packet(number, payload))
            number += 1
            now = time.perf_counter()
            if len(batch) >= MQTT_BATCH_MESSAGES or now - last_send > 0.0005:
                self._wait(number - self._mqtt.window)
                self._mqtt.socket.sendall(b"".join(batch))
                batch.clear()
                last_send = now
        self._mqtt.socket.sendall(b"".join(batch))
        self._number = number
        self._wait(number)

    def _wait(self, acked: int) -> None:
        with self._progress:
            while self._acked < acked:
                if self._failed or not self._progress.wait(MATCH_TIMEOUT_S):
                    raise ConnectionError("the broker stopped acknowledging")

    def close(self) -> None:
        self._mqtt.close()


class MqttSubscriber:
    def __init__(self, port: int, tally: Tally) -> None:
        self._mqtt, self._tally = _MqttSocket(port, "bench-subscriber"), tally
        self._mqtt.socket.sendall(wire.subscribe_packet(wire.MQTT_TOPIC))
        self._mqtt.expect(wire.SUBACK)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        take, topic_end = self._tally.take, 2 + len(wire.MQTT_TOPIC)
        with contextlib.suppress(OSError):
            while True:
                data, packets = self._mqtt.read()
                acks = []
                for kind, start, end in packets:
                    if kind == wire.PUBLISH_PACKET:
                        acks.append(wire.puback_packet(data[start + topic_end : start + topic_end + 2]))
                        take(data[end - wire.PAYLOAD_BYTES : end])
                if acks:
                    self._mqtt.socket.sendall(b"".join(acks))  # one write for all of this read

    def close(self) -> None:
        self._mqtt.close()


# --- DDS
# ----------------------------------------------------------------------------------------------------------------------

DDS_LOOPBACK: Final = """<CycloneDDS><Domain>
<General><Interfaces><NetworkInterface name="lo"
multicast="false"/></Interfaces><AllowMulticast>false</AllowMulticast></General>
<Discovery><ParticipantIndex>auto</ParticipantIndex><MaxAutoParticipantIndex>32</MaxAutoParticipantIndex> <Peers><Peer
address="127.0.0.1"/></Peers></Discovery></Domain></CycloneDDS>"""


class DdsParticipant:
    """One participant with the project's topic and QoS (docs/dds-mapping.md), loopback only."""

    def __init__(self, domain: int) -> None:
        from cyclonedds.domain import Domain, DomainParticipant
        from cyclonedds.qos import Policy, Qos
        from cyclonedds.topic import Topic

        from bench.dds_type import UMessage

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
    def __init__(self, domain: int) -> None:
        self._participant = DdsParticipant(domain)
        self._writer = self._participant.writer(wire.DDS_PARTITION)
        self._attributes, self._number = wire.Attributes(), 0

    def send(self, payloads: Iterable[bytes]) -> None:
        from bench.dds_type import UMessage

        attributes, number = self._attributes.plain, self._number
        for payload in payloads:
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


NETWORKS: Final[dict[str, tuple[Any, Any]]] = {
    "zenoh": (ZenohPublisher, ZenohSubscriber),
    "mqtt": (MqttPublisher, MqttSubscriber),
    "dds": (DdsPublisher, None),  # no leg ends there
}


@dataclass(frozen=True)
class Address:
    """Where a child process connects: a network and its port or domain, as `zenoh:7447` on a command line."""

    network: str
    number: int

    @classmethod
    def parse(cls, text: str) -> Address:
        network, _, number = text.partition(":")
        return cls(network, int(number))

    def __str__(self) -> str:
        return f"{self.network}:{self.number}"
