"""The bare relays use the same libraries or sockets, and no code of up-streamer. `python -m campaigns.bench.bare
zenoh:7001 mqtt:7002`

zenoh, dds   callback or take -> put
mqtt         all packets of one read -> one write, at most 1,000 unacknowledged -> one write of acknowledgements

They copy the bytes of uProtocol messages: no check, no log, no subscription; what they hold is lost when they end.
MQTT uses no client library here: paho takes four to eight times as long as these sixty lines.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from campaigns.bench import networks, wire
from campaigns.bench.load import answer
from campaigns.bench.mqtt import MqttSocket

# messages from Zenoh that MQTT has not sent; beyond it, Zenoh's callback waits, and with it the publisher
WAITING_MESSAGES_MAX: Final = 2_000
PACKETS_IN_WRITE_MAX: Final = 256

_ATTRIBUTES = wire.Attributes().attachment(0)
_ID_MSB, _ID_LSB = slice(4, 12), slice(13, 21)  # where the message id is in the attachment


def zenoh_zenoh(source: int, destination: int) -> Any:
    incoming, outgoing = networks.zenoh_session(listen=source), networks.zenoh_session(listen=destination)
    put = networks.zenoh_publisher(outgoing).put
    subscriber = incoming.declare_subscriber(
        "up/**", lambda s: put(s.payload.to_bytes(), attachment=s.attachment.to_bytes())
    )
    return incoming, outgoing, subscriber


class _Mqtt(asyncio.Protocol):
    """A connection whose packets come in batches: `on_packets(data, packets)`."""

    def __init__(self, on_packets: Callable[[bytes, list[tuple[int, int, int]]], None]) -> None:
        self._rest, self._on_packets = b"", on_packets
        self.write: Callable[[bytes], None] = lambda data: None

    def connection_made(self, transport: Any) -> None:
        self.write = transport.write

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        packets, position = wire.split_packets(data)
        self._rest = data[position:]
        self._on_packets(data, packets)

    def connection_lost(self, error: Exception | None) -> None:
        sys.exit(f"the broker hung up: {error}")

    async def open(self, port: int, client_id: str, subscribe: bool) -> int:
        """Connects and returns the window that the broker grants."""
        opened = MqttSocket(port, client_id)
        if subscribe:
            opened.subscribe(wire.MQTT_EVERY_TOPIC)
        opened.socket.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=opened.socket)
        return opened.window


class _MqttOut:
    """Packets for a broker. They stay in `waiting` until `flush` finds free capacity in the window."""

    def __init__(self, on_left: Callable[[int], None]) -> None:
        self._on_left = on_left  # called with the number of packets that were sent
        self.waiting: collections.deque[tuple[bytes, bytes]] = collections.deque()  # topic; properties and payload
        self._in_flight, self._window, self._packet_id = 0, 0, 0
        self._mqtt = _Mqtt(self._acknowledged)

    async def open(self, port: int) -> None:
        self._window = await self._mqtt.open(port, "bare-out", subscribe=False)

    def _acknowledged(self, data: bytes, packets: list[tuple[int, int, int]]) -> None:
        self._in_flight -= sum(kind == wire.PUBACK for kind, _, _ in packets)
        self.flush()

    def flush(self) -> None:
        waiting = self.waiting
        while room := min(len(waiting), self._window - self._in_flight, PACKETS_IN_WRITE_MAX):
            out = []
            for _ in range(room):
                topic, rest = waiting.popleft()
                self._packet_id = self._packet_id % 65_535 + 1
                out.append(wire.publish_packet(rest, self._packet_id, topic))
            self._in_flight += room
            self._mqtt.write(b"".join(out))
            self._on_left(room)


async def zenoh_mqtt(source: int, destination: int) -> Any:
    loop, room, woken = asyncio.get_running_loop(), threading.Event(), False

    def flush() -> None:
        nonlocal woken
        woken = False
        out.flush()

    def on_left(_: int) -> None:
        if len(out.waiting) < WAITING_MESSAGES_MAX:
            room.set()

    def on_sample(sample: Any) -> None:
        nonlocal woken
        if len(out.waiting) >= WAITING_MESSAGES_MAX:
            room.clear()
            if len(out.waiting) >= WAITING_MESSAGES_MAX:  # the queue may have shrunk before `room` was cleared
                room.wait()
        out.waiting.append(packets.rest(sample.attachment.to_bytes(), sample.payload.to_bytes()))
        if not woken:  # one wake-up for all samples that arrive before the loop runs
            woken = True
            loop.call_soon_threadsafe(flush)

    out, packets = _MqttOut(on_left), FromAttributes()
    await out.open(destination)
    session = networks.zenoh_session(listen=source)
    return session, session.declare_subscriber("up/**", on_sample)


def _id_text(id: bytes) -> bytes:
    text = id.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}".encode()


class FromAttributes:
    """Makes MQTT properties from the attributes of Zenoh: only the id differs."""

    def __init__(self) -> None:
        packet = wire.PublishPackets().packet(0, b"")
        [(_, start, end)], _ = wire.split_packets(packet)
        packet_id, _ = wire.publish_places(packet, start)
        text = _id_text(wire.message_id(packet, start, end))
        self._topic = packet[start:packet_id]
        self._before, self._after = packet[packet_id + 2 : end].split(text)

    def rest(self, attributes: bytes, payload: bytes) -> tuple[bytes, bytes]:
        text = _id_text(attributes[_ID_MSB][::-1] + attributes[_ID_LSB][::-1])
        return self._topic, b"".join((self._before, text, self._after, payload))


async def mqtt_zenoh(source: int, destination: int) -> Any:
    outgoing = networks.zenoh_session(listen=destination)
    put = networks.zenoh_publisher(outgoing).put

    def on_packets(data: bytes, packets: list[tuple[int, int, int]]) -> None:
        acks = []
        for kind, start, end in packets:
            if kind == wire.PUBLISH_PACKET:
                packet_id, payload = wire.publish_places(data, start)
                id = wire.message_id(data, packet_id, payload)
                put(data[payload:end], attachment=_ATTRIBUTES[:4] + id[7::-1] + b"\x11" + id[:7:-1] + _ATTRIBUTES[21:])
                acks.append(wire.puback_packet(data[packet_id : packet_id + 2]))
        incoming.write(b"".join(acks))

    incoming = _Mqtt(on_packets)
    await incoming.open(source, "bare-in", subscribe=True)
    return outgoing, incoming


async def mqtt_mqtt(source: int, destination: int) -> Any:
    """Acknowledges only what it has forwarded, so that a slow destination slows the source."""
    acks: collections.deque[bytes] = collections.deque()

    def on_packets(data: bytes, packets: list[tuple[int, int, int]]) -> None:
        for kind, start, end in packets:
            if kind == wire.PUBLISH_PACKET:
                at = wire.publish_places(data, start)[0]
                out.waiting.append((data[start:at], data[at + 2 : end]))
                acks.append(wire.puback_packet(data[at : at + 2]))
        out.flush()

    incoming = _Mqtt(on_packets)
    out = _MqttOut(lambda left: incoming.write(b"".join(acks.popleft() for _ in range(left))))
    await out.open(destination)
    await incoming.open(source, "bare-in", subscribe=True)
    return incoming, out


def dds_zenoh(source: int, destination: int) -> Any:
    from cyclonedds.core import InstanceState, ReadCondition, SampleState, ViewState, WaitSet

    participant, outgoing = networks.DdsParticipant(source), networks.zenoh_session(listen=destination)
    reader, put = participant.reader(wire.DDS_PARTITION), networks.zenoh_publisher(outgoing).put
    waitset = WaitSet(participant.participant)
    waitset.attach(ReadCondition(reader, ViewState.Any | SampleState.Any | InstanceState.Any))

    def relay() -> None:
        while True:
            waitset.wait(100_000_000)
            for sample in reader.take(networks.DDS_TAKE_SAMPLES):
                if sample.sample_info.valid_data:
                    attributes, payload = sample.parts
                    put(payload, attachment=b"\x01" + attributes)

    threading.Thread(target=relay, daemon=True).start()
    return participant, outgoing, waitset


RELAYS: Final[dict[tuple[str, str], Callable[[int, int], Any]]] = {
    ("zenoh", "zenoh"): zenoh_zenoh,
    ("zenoh", "mqtt"): zenoh_mqtt,
    ("mqtt", "zenoh"): mqtt_zenoh,
    ("mqtt", "mqtt"): mqtt_mqtt,
    ("dds", "zenoh"): dds_zenoh,
}


async def serve(source: networks.Address, destination: networks.Address) -> None:
    """Relays until standard input ends."""
    made = RELAYS[source.network, destination.network](source.number, destination.number)
    _kept = await made if asyncio.iscoroutine(made) else made
    answer(ready=True)
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench ends this process
    sys.setswitchinterval(0.001)
    with contextlib.suppress(SystemExit):
        asyncio.run(serve(*map(networks.Address.parse, sys.argv[1:3])))


if __name__ == "__main__":
    main()
