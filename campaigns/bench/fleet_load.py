"""`python -m campaigns.bench.fleet_load vehicles|backend PORT VEHICLES TOPICS_EACH`: the two ends of the fleet leg.

vehicles: one connection for all vehicles: publishes their topics and answers for their uSubscriptions
backend : a client that subscribes to all topics, with some hundreds of requests in flight, and counts the messages

One JSON command per line on stdin, one JSON answer per line on stdout; the process ends when stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any, Final

from campaigns.bench import fleet_wire as wire
from campaigns.bench.load import answer
from campaigns.bench.wire import CONNACK, PUBACK, PUBLISH_PACKET, SUBACK, connect_packet, puback_packet, split_packets
from campaigns.bench.wire import subscribe_packet as subscribe
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.core.usubscription.wire import CODECS, FETCH_SUBSCRIPTIONS, SUBSCRIBE, V4_CODEC, Status, service
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

PUBLISH_EVERY_S: Final = 0.002  # messages that are due are sent together
UNACKNOWLEDGED_MAX: Final = 20_000  # beyond it, wait for the broker; the delay of a message counts from when it was due
IN_FLIGHT: Final = 1_000  # Subscribes without an answer: fewer than one caller may have
V4_SUBSCRIBED: Final[Any] = Status.SUBSCRIBED + 1  # on the wire
ASK_AGAIN_S: Final = 1.0  # after a refused Subscribe
DISCONNECT: Final = b"\xe0\x00"


class Link(asyncio.Protocol):
    """One MQTT connection; calls `take` with the PUBLISH bodies of each read."""

    def __init__(self, take: Any) -> None:
        self._take, self._rest, self._packet_id = take, b"", 0
        self._acks: asyncio.Queue[int] = asyncio.Queue()
        self.unacknowledged = 0

    async def open(self, port: int, client_id: str, filters: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: self, "127.0.0.1", port)
        self._socket = transport
        for packet in (connect_packet(client_id), *map(subscribe, filters)):
            self._socket.write(packet)
            await self._acks.get()

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        packets, position = split_packets(data)
        self._rest = data[position:]
        bodies = []
        for kind, start, end in packets:
            if kind == PUBLISH_PACKET:
                bodies.append((data, start, end))
            elif kind == PUBACK:
                self.unacknowledged -= 1
            elif kind in (CONNACK, SUBACK):
                self._acks.put_nowait(kind)
        if bodies:
            acks = self._take(bodies)
            self._socket.write(b"".join(map(puback_packet, acks)))

    def connection_lost(self, error: Exception | None) -> None:
        sys.exit(f"the broker closed the connection: {error}")

    def packet(self, topic: str, made: bytes, payload: bytes) -> bytes:
        self._packet_id = self._packet_id % 65_535 + 1
        self.unacknowledged += 1
        return wire.publish_packet(topic, self._packet_id, made, payload)

    def send(self, packets: Sequence[bytes]) -> None:
        self._socket.write(b"".join(packets))


def _new_id() -> str:
    return uuids.format(uuids.new())


class Vehicles:
    """All vehicles: they publish the topics in turn, `rate` messages a second in total. A message must arrive if it is
    sent after its vehicle was asked for the topic."""

    def __init__(self, vehicles: int, topics_each: int) -> None:
        self._count, self._each = vehicles * topics_each, topics_each
        self._asked: dict[int, Any] = {}  # topics, and the version of the request
        self._link = Link(self._take)
        self._publishing: asyncio.Task[None] | None = None
        self.sent = self.owed = self.requests = 0

    async def open(self, port: int) -> None:
        await self._link.open(port, "bench-vehicles", [wire.FOR_VEHICLES])

    async def do(self, command: dict[str, Any]) -> None:
        if "rate" in command:
            self._publishing = asyncio.ensure_future(self._publish(command["rate"]))
            answer(publishing=True)
            return
        if self._publishing is not None:
            self._publishing.cancel()
        answer(sent=self.sent, owed=self.owed, requests=self.requests)

    async def _publish(self, rate: float) -> None:
        started, started_ns = time.perf_counter(), time.time_ns()
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            due = int((time.perf_counter() - started) * rate)
            packets = []
            while self.sent < due and self._link.unacknowledged < UNACKNOWLEDGED_MAX:
                topic, number = self.sent % self._count, self.sent // self._count
                packets.append(self._message(topic, number, started_ns + int(self.sent / rate * 1e9)))
                self.sent += 1
            if packets:
                self._link.send(packets)

    def _message(self, topic: int, number: int, due_ns: int) -> bytes:
        authority = wire.vehicle(topic // self._each)
        source = f"//{authority}/{wire.ENTITY:X}/{wire.VERSION:X}/{wire.FIRST_TOPIC + topic % self._each:X}"
        sink = f"//{wire.CLOUD}/FFFFFFFF/FF/FFFF"  # the address of a streamer
        is_owed = topic in self._asked
        self.owed += is_owed
        made = wire.properties("up-pub.v1", _new_id(), source, sink, "CS1")
        return self._link.packet(f"{authority}/{wire.CLOUD}", made, wire.stamped(topic, number, due_ns, is_owed))

    def _take(self, bodies: Sequence[tuple[bytes, int, int]]) -> list[bytes]:
        acks, out = [], []
        for body in bodies:
            message = wire.read_publish(*body)
            acks.append(message.packet_id)
            if message.users["2"] == "up-req.v1":
                out += self._answers(message)
        self._link.send(out)
        return acks

    def _answers(self, request: wire.Received) -> list[bytes]:
        """Returns the response, and the notification by the vehicle's own uSubscription for its new subscriber."""
        self.requests += 1
        sink = uris.parse(request.users["4"])
        codec, own = CODECS[sink.ue_version_major], sink.authority_name
        notification = None
        if sink.resource_id == codec.methods[SUBSCRIBE].resource:
            topic = codec.methods[SUBSCRIBE].request.FromString(request.payload).topic
            self._asked[wire.topic_number(topic, self._each)] = topic
            said = codec.subscribed(topic, Status.SUBSCRIBED)
            notification = v4.Subscription(topic=topic, subscriber=uris.parse(request.users["3"]), status=V4_SUBSCRIBED)
        elif sink.resource_id == codec.methods[FETCH_SUBSCRIPTIONS].resource:
            said = self._list(own, uris.parse(request.users["3"]))
        else:
            said = codec.methods[SUBSCRIBE].answer()
        reply = (request.users["4"], request.users["3"])
        topic_name, expiry_s = f"{own}/{wire.CLOUD}", request.expiry_s
        made = wire.properties(
            "up-res.v1",
            _new_id(),
            *reply,
            request.users["5"],
            expiry_s,
            uuids.to_bytes(uuids.parse(request.users["1"])),
        )
        out = [self._link.packet(topic_name, made, said.SerializeToString())]
        if notification is not None and codec is V4_CODEC:
            source = uris.format(service(own, codec.major))
            made = wire.properties("up-not.v1", _new_id(), source, request.users["3"], "CS2")
            out.append(self._link.packet(topic_name, made, notification.SerializeToString()))
        return out

    def _list(self, authority: str, subscriber: UUri) -> Any:
        first = int(authority[3:]) * self._each
        known = [self._asked[topic] for topic in range(first, first + self._each) if topic in self._asked]
        entries = [v4.Subscription(topic=topic, subscriber=subscriber, status=V4_SUBSCRIBED) for topic in known]
        return v4.FetchSubscriptionsResponse(subscriptions=entries)


class Backend:
    """The subscriber."""

    def __init__(self, vehicles: int, topics_each: int) -> None:
        self._count, self._each = vehicles * topics_each, topics_each
        self._link = Link(self._take)
        self._calls: dict[bytes, int] = {}  # id of a Subscribe -> its topic
        self._answered, self._standing = bytearray(self._count), bytearray(self._count)
        self._seen = [0] * self._count  # per topic, a bit for each message that must arrive
        self._last = array("q", [-1] * self._count)
        self._delays_ms = array("f")
        self._done: dict[str, float] = {}
        self._room = asyncio.Event()
        self._started = 0.0
        self.answers = self.stands = self.refused = self.received = self.duplicates = self.disordered = 0
        self._subscribing: asyncio.Task[None] | None = None

    async def open(self, port: int) -> None:
        await self._link.open(port, "bench-backend", [wire.FOR_BACKEND, wire.PUBLISHED])

    async def do(self, command: dict[str, Any]) -> None:
        if "subscribe" in command:
            self._subscribing = asyncio.ensure_future(self._subscribe())
        delays = sorted(self._delays_ms)
        if "delays" in command:
            self._delays_ms = array("f")
        answer(
            **self._done,
            pending=self.answers,
            subscribed=self.stands,
            refused=self.refused,
            received=self.received,
            duplicates=self.duplicates,
            disordered=self.disordered,
            delays=[round(delays[int(len(delays) * q)], 1) for q in (0.5, 0.99)] if delays else None,
        )

    async def _subscribe(self) -> None:
        self._started = time.perf_counter()
        for topic in range(self._count):
            while len(self._calls) >= IN_FLIGHT:
                self._room.clear()
                await self._room.wait()
            self._ask(topic)

    def _ask(self, topic: int) -> None:
        id, sink = uuids.new(), service(wire.CLOUD, 4, 1)
        self._calls[uuids.to_bytes(id)] = topic
        request = v4.SubscribeRequest(topic=wire.topic_uri(topic, self._each))
        addresses = uris.format(wire.BACKEND), uris.format(sink)
        made = wire.properties("up-req.v1", uuids.format(id), *addresses, "CS4", wire.CALL_TTL_MS // 1000)
        name = f"{wire.segments(wire.BACKEND)}/{wire.segments(sink)}"
        self._link.send([self._link.packet(name, made, request.SerializeToString())])

    def _take(self, bodies: Sequence[tuple[bytes, int, int]]) -> list[bytes]:
        acks, now_ns = [], time.time_ns()
        for data, start, end in bodies:
            cut = start + 2 + int.from_bytes(data[start : start + 2], "big")
            acks.append(data[cut : cut + 2])
            if data.count(b"/", start, cut) == 4:
                self._count_message(wire.payload_of(data, end), now_ns)
            else:
                self._on_notification(wire.read_publish(data, start, end))
        return acks

    def _count_message(self, payload: bytes, now_ns: int) -> None:
        topic, number, due_ns, is_owed = wire.unstamp(payload)
        if not is_owed:  # sent before its vehicle was asked for the topic: it may arrive, but need not
            return
        bit = 1 << number
        if self._seen[topic] & bit:
            self.duplicates += 1
            return
        self._seen[topic] |= bit
        self.received += 1
        self.disordered += number < self._last[topic]
        self._last[topic] = number
        self._delays_ms.append((now_ns - due_ns) / 1e6)

    def _on_notification(self, message: wire.Received) -> None:
        if message.users["2"] == "up-not.v1":
            change = v4.Subscription.FromString(message.payload)
            self._stands(wire.topic_number(change.topic, self._each), change.status)
            return
        topic = self._calls.pop(message.correlation, None)
        if topic is None:
            return
        self._room.set()
        if "8" in message.users:
            self.refused += 1
            if self.refused == 1:  # the others have the same reason
                why = UStatus.FromString(message.payload)
                print(f"a Subscribe was refused: {why.code} {why.message}", file=sys.stderr, flush=True)
            asyncio.get_running_loop().call_later(ASK_AGAIN_S, self._ask, topic)
            return
        if not self._answered[topic]:
            self._answered[topic] = 1
            self.answers += 1
            self._note("pending_s", self.answers)
        self._stands(topic, v4.SubscribeResponse.FromString(message.payload).status)

    def _stands(self, topic: int, status: int) -> None:
        stands = status == V4_SUBSCRIBED
        self.stands += stands - self._standing[topic]
        self._standing[topic] = stands
        self._note("subscribed_s", self.stands)

    def _note(self, what: str, count: int) -> None:
        if count == self._count:
            self._done.setdefault(what, round(time.perf_counter() - self._started, 2))


async def serve(role: str, port: int, vehicles: int, topics_each: int) -> None:
    end = Vehicles(vehicles, topics_each) if role == "vehicles" else Backend(vehicles, topics_each)
    await end.open(port)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    answer(ready=True)
    async for line in reader:
        await end.do(json.loads(line))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench ends this process
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(sys.argv[1], *map(int, sys.argv[2:5])))


if __name__ == "__main__":
    main()
