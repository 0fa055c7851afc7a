"""MQTT 5 on a plain socket, QoS 1: publisher and subscriber, because a client library would limit the figures.

publisher : batches of packets in one write, a limited number of unacknowledged ones
subscriber: acknowledges all messages of a read at once
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable
from typing import Final

from campaigns.bench import wire
from campaigns.bench.networks import MATCH_TIMEOUT_S, Tally

WINDOW_MESSAGES_MAX: Final = 1_000  # unacknowledged; mosquitto needs some 20 ms for them, so this never is the limit
READ_BYTES: Final = 262_144


class MqttSocket:
    """An accepted connection with a clean session. Raises OSError if it is refused, ConnectionError if it is closed."""

    def __init__(self, port: int, client_id: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=MATCH_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self.socket.sendall(wire.connect_packet(client_id))
        self.window = min(wire.receive_maximum(self.expect(wire.CONNACK)), WINDOW_MESSAGES_MAX)
        self.socket.settimeout(None)

    def read(self) -> tuple[bytes, list[tuple[int, int, int]]]:
        """Returns new data and the positions of its whole packets. Raises ConnectionError when the broker closes."""
        data = self.socket.recv(READ_BYTES)
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

    def subscribe(self, topic_filter: str) -> None:
        self.socket.sendall(wire.subscribe_packet(topic_filter))
        self.expect(wire.SUBACK)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.sendall(b"\xe0\x00")
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class MqttPublisher:
    def __init__(self, port: int, topics: int = 1) -> None:
        self._mqtt = MqttSocket(port, "bench-publisher")
        self._packets, self._number = wire.PublishPackets(topics), 0
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

    def send(self, batches: Iterable[list[bytes]]) -> None:
        """Returns when the broker has acknowledged all. Messages that are due together are sent in one write."""
        packet, window = self._packets.packet, self._mqtt.window
        for batch in batches:
            packets = [packet(number, payload) for number, payload in enumerate(batch, self._number)]
            for at in range(0, len(packets), window):
                part = packets[at : at + window]
                self._number += len(part)
                self._wait(self._number - window)
                self._mqtt.socket.sendall(b"".join(part))
        self._wait(self._number)

    def _wait(self, acked: int) -> None:
        with self._progress:
            while self._acked < acked:
                if self._failed or not self._progress.wait(MATCH_TIMEOUT_S):
                    raise ConnectionError("the broker stopped acknowledging")

    def close(self) -> None:
        self._mqtt.close()


class MqttSubscriber:
    def __init__(self, port: int, tally: Tally) -> None:
        self._mqtt, self._tally = MqttSocket(port, "bench-subscriber"), tally
        self._mqtt.subscribe(wire.MQTT_EVERY_TOPIC)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        take = self._tally.take
        with contextlib.suppress(OSError):
            while True:
                data, packets = self._mqtt.read()
                acks = []
                for kind, start, end in packets:
                    if kind == wire.PUBLISH_PACKET:
                        packet_id, payload = wire.publish_places(data, start)
                        acks.append(wire.puback_packet(data[packet_id : packet_id + 2]))
                        take(data[payload:end])
                if acks:
                    self._mqtt.socket.sendall(b"".join(acks))  # one write for all messages of this read

    def close(self) -> None:
        self._mqtt.close()
