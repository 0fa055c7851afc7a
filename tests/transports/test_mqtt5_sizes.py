"""Large packets over MQTT 5: read without repeated copies, refused if too large, and bounded while they wait."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.transports.mqtt5_answering import serving
from tools.broker import Broker
from transports.conformance import Sink
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, receiving, wire
from transports.mqtt5.connection import LARGE_BYTES, READ_BYTES, Connection, PacketReader
from transports.mqtt5.link import BROKER_ADDS_BYTES
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

DEADLINE_S = 20
MIB = 1 << 20
TOPIC = uris.parse("up://sender/10AB/3/80CD")
SIZES = [0, 1, 200, LARGE_BYTES - 9, LARGE_BYTES, LARGE_BYTES + 1, 300_000, 3, READ_BYTES, 2 * MIB, 5]


def message(payload: bytes) -> UMessage:
    return UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(payload, 6))


def packet(payload: bytes, packet_id: int = 1) -> bytes:
    body = b"\x00\x05topic" + struct.pack("!H", packet_id) + b"\x00" + payload
    return bytes((wire.PUBLISH_BITS | wire.QOS1,)) + wire.varint(len(body)) + body


def end(broker: Broker, authority: str, **settings: Any) -> Mqtt5Transport:
    return Mqtt5Transport(Mqtt5Config(port=broker.port, **settings), LocalUriProvider(authority, 0x10AB, 3))


class Wire:
    """Gives `data` in pieces of random sizes, and counts into which buffers they go."""

    def __init__(self, data: bytes, piece_max: int, seed: int = 0) -> None:
        self._data, self._piece_max, self._random = memoryview(data), piece_max, random.Random(seed)
        self.received = 0  # bytes into the buffer for small packets: each of those may be joined to others

    def read_with(self, reader: PacketReader) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        small = reader.buffer.obj
        while self._data and not reader.announced:
            buffer = reader.buffer
            count = min(len(self._data), len(buffer), self._random.randint(1, self._piece_max))
            buffer[:count], self._data = self._data[:count], self._data[count:]
            self.received += count if buffer.obj is small else 0
            found += reader.take(count)
        return found


@pytest.mark.parametrize("piece_max", [1_460, 70_000, MIB])
def test_packets_of_all_sizes_come_out_as_they_went_in(piece_max: int) -> None:
    bodies = [random.Random(size).randbytes(size) for size in SIZES]
    found = Wire(b"".join(map(packet, bodies)), piece_max).read_with(PacketReader(wire.PACKET_BYTES_MAX))
    assert [wire.read_publish(*one).payload for one in found] == bodies


def test_a_large_packet_is_not_copied_again_at_each_read() -> None:
    sock = Wire(packet(bytes(8 * MIB)), 1_460)
    assert len(sock.read_with(PacketReader(wire.PACKET_BYTES_MAX))) == 1
    assert sock.received < 2 * LARGE_BYTES, "the rest goes straight to its place"


@pytest.mark.parametrize("piece_max", [3, 1_460, MIB])
def test_what_is_announced_too_large_is_not_kept_and_what_was_before_counts(piece_max: int) -> None:
    reader = PacketReader(100_000)
    found = Wire(packet(b"before") + packet(bytes(99_000)) + packet(bytes(200_000)), piece_max).read_with(reader)
    assert [len(wire.read_publish(*one).payload) for one in found] == [6, 99_000]
    assert reader.announced > 200_000
    assert (reader._large, reader._unread) == (None, b"")


class Rude:
    """A broker that lets anybody in, and then sends one PUBLISH larger than the announced maximum."""

    def __init__(self, oversized: bytes) -> None:
        self.oversized, self.said, self.port = oversized, bytearray(), 0
        self.hung_up = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connect = await reader.read(1_000)
        writer.write(b"\x20\x03\x00\x00\x00" + self.oversized)
        while data := await reader.read(1_000):
            self.said += data
        self.hung_up.set()
        writer.close()


async def test_a_broker_that_exceeds_the_packet_size_is_disconnected_with_the_reason() -> None:
    rude = Rude(packet(bytes(4 * MIB))[:100])  # no more, or TCP would reset the connection before it hears why
    async with serving(rude):
        one = Mqtt5Transport(Mqtt5Config(port=rude.port), LocalUriProvider("sender", 0x10AB, 3))
        await one.open()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await rude.hung_up.wait()
        finally:
            await one.close()
    assert bytes(rude.said).endswith(b"\xe0\x01\x95")
    assert b"\x27" + struct.pack("!I", one.wire_bytes_max + BROKER_ADDS_BYTES) in rude.connect, (
        "CONNECT names a Maximum Packet Size"
    )
    (status,) = await one.send_batch([message(b"")])
    assert status.code == UCode.UNAVAILABLE


@pytest.mark.broker
async def test_the_brokers_own_limit_counts_if_it_is_smaller(make_broker: Any) -> None:
    broker = make_broker(settings=["max_packet_size 100000"])
    async with end(broker, "sender") as sender, end(broker, "hearer") as hearer:
        heard = Sink(DEADLINE_S)
        await hearer.register_listener(TOPIC, heard)
        statuses = await sender.send_batch([message(b"1"), message(bytes(100_000)), message(b"2")])
        assert [one.code for one in statuses] == [UCode.OK, UCode.INVALID_ARGUMENT, UCode.OK]
        await heard.expect(2)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110  # of the transport's own state nobody tells
            await asyncio.sleep(0.01)


class Held:
    """Takes nothing until it is let."""

    def __init__(self) -> None:
        self.gate, self.sizes = asyncio.Event(), list[int]()

    async def _taken(self) -> None:
        await self.gate.wait()

    def on_receive(self, message: UMessage) -> Awaitable[None]:
        self.sizes.append(len(message.payload))
        return self._taken()


@pytest.mark.broker
@pytest.mark.parametrize("pressed_s_max", [DEADLINE_S, 0.0], ids=["held back", "left to the broker"])
async def test_what_waits_is_bounded_in_bytes_and_nothing_is_lost(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, pressed_s_max: float
) -> None:
    """Receive Maximum lets in 2,048 messages: here some 128 MiB. Meanwhile what we send is still answered, once
    shedding has begun."""
    monkeypatch.setattr(receiving, "INBOX_BYTES_MAX", 2 * MIB)
    monkeypatch.setattr(receiving, "PRESSED_S_MAX", pressed_s_max)
    held = Held()
    async with end(broker, "sender") as sender, end(broker, "hearer") as hearer:
        await hearer.register_listener(TOPIC, held)
        sizes = [65_536 + number for number in range(200)]
        await sender.send_batch([message(bytes(size)) for size in sizes])
        async with asyncio.timeout(DEADLINE_S):
            await until(
                lambda: hearer._receiver._shedding if not pressed_s_max else hearer._receiver._paused_at_s is not None
            )
            if not pressed_s_max:
                assert (await hearer.send_batch([message(b"still here")]))[0].code == UCode.OK
        waiting = hearer._receiver.arrivals.octets
        assert 2 * MIB <= waiting <= 2 * MIB + READ_BYTES + 100_000
        held.gate.set()
        await until(lambda: sorted(set(held.sizes)) == sizes)
        assert list(dict.fromkeys(held.sizes)) == sizes, "in order, though some may come twice"
    assert not hearer._receiver.arrivals.octets


@pytest.mark.broker
async def test_what_waits_is_bounded_in_messages_though_the_broker_sends_on(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mosquitto with `max_inflight_messages 0` does not keep to Receive Maximum."""
    monkeypatch.setattr(receiving, "INBOX_MESSAGES_MAX", 500)
    held = Held()
    async with end(broker, "sender") as sender, end(broker, "hearer") as hearer:
        await hearer.register_listener(TOPIC, held)
        await sender.send_batch([message(b"%d" % number) for number in range(5_000)])
        await until(lambda: hearer._receiver._paused_at_s is not None)
        assert 500 <= hearer._receiver.arrivals.waiting <= 500 + READ_BYTES // 100
        held.gate.set()
        await until(lambda: len(held.sizes) >= 5_000)
    assert not hearer._receiver.arrivals.waiting


@pytest.mark.broker
async def test_what_is_in_flight_is_bounded_in_bytes(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transports.mqtt5.window.IN_FLIGHT_BYTES_MAX", MIB)
    most = 0
    async with end(broker, "sender") as sender:
        window, write = sender._window, Connection.write

        def measured(one: Connection, data: bytes, **more: bool) -> None:
            nonlocal most
            write(one, data, **more)
            most = max(most, window._large_bytes)

        monkeypatch.setattr(Connection, "write", measured)
        assert {one.code for one in await sender.send_batch([message(bytes(300_000)) for _ in range(40)])} == {UCode.OK}
        assert not window._large_bytes
    assert 0 < most <= 3 * MIB
