"""Whatever happens to a pump: each record that has not left is behind a position that a restart begins at."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.log.log import Log
from streamer.egress import address_holds, hold_state, reading_back
from streamer.egress.pump import Pump
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.flow import Flow
from streamer.walk.paused import Paused
from streamer.walk.view import Rule, Rules, View
from transports.base import stopped
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.pacing import Backoff
from uprotocol.status import OK, nobody_listens
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.uattributes_pb2 import UPayloadFormat, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription_client.interest import Want

TOPICS = [uris.parse(f"//vehicle1/8001/1/{resource:X}") for resource in range(0x8001, 0x8005)]
PRIORITIES = [UPriority.UPRIORITY_CS1, UPriority.UPRIORITY_CS5]
TEXT = UPayloadFormat.UPAYLOAD_FORMAT_TEXT
ANSWERS = {
    "refused": UStatus(code=UCode.PERMISSION_DENIED, message="no"),
    "silent": nobody_listens("nobody listens"),
    "stuck": UStatus(code=UCode.UNAVAILABLE, message="this stream fails, and others do not"),
}


class Network(UTransport):
    """By chance it is away, or a single message fails; answers messages of some topics as `answers` says."""

    connected = True
    capabilities = Capability.PUBLISH_WITHOUT_SINK

    def __init__(self, draw: random.Random, away: float, *, is_far: bool) -> None:
        self._draw, self.away, self.in_flight_messages = draw, away, 100 if is_far else 0
        self._topics_per_address = draw.choice((1, 2))
        self.answers: dict[str, UStatus] = {}
        self.taken = set[bytes]()
        self.check: Callable[[], None] = lambda: None

    def address_of(self, source: UUri, sink: UUri | None) -> str:
        return str(source.resource_id // self._topics_per_address)

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        statuses: list[UStatus] = []
        for message in messages:
            if self._draw.random() < self.away:
                break
            answer = self.answers.get(self.address_of(message.attributes.source, None), OK)
            statuses.append(ANSWERS["stuck"] if self._draw.random() < self.away else answer)
            if not statuses[-1].code:
                self.taken.add(message.payload)
        if len(statuses) < len(messages):
            stopped(statuses, len(messages), UStatus(code=UCode.UNAVAILABLE, message="away"))
        self.check()
        for _ in range(self._draw.randrange(5)):
            await asyncio.sleep(0)
        self.check()
        return statuses


class Interest:
    """The cloud wants everything; of `unknown` topics this is known later."""

    def __init__(self) -> None:
        self.version = 0
        self.unknown = set[str]()
        self._callbacks: list[Callable[[Any], None]] = []

    def on_change(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def know(self, topic: UUri) -> None:
        self.unknown.discard(uris.format(topic))
        self.changed()

    def changed(self) -> None:
        self.version += 1
        for callback in self._callbacks:
            callback(None)

    def changed_since(self, version: int) -> None:
        return None

    def undecided(self, topic: UUri) -> Sequence[str]:
        return ("cloud",) if uris.format(topic) in self.unknown else ()

    def wants(self, topic: UUri) -> dict[str, Want]:
        return {} if uris.format(topic) in self.unknown else {"cloud": Want()}


def pumps(folder: Path, log: Log, network: Any, interest: Interest, letters: Any) -> tuple[Callable[[], Pump], Paused]:
    """Returns what makes a pump from `log` to `network`, and its pauses."""
    peer = Endpoint("net", ["cloud"], network)
    vehicle = Endpoint("vehicle", ["vehicle1"], Network(random.Random(0), 0, is_far=False))  # type: ignore[arg-type]
    endpoints, rules = Endpoints([vehicle, peer]), Rules()
    rules.add(Rule("vehicle", "net"))
    unsynced: Any = SimpleNamespace(replace_text=lambda path, text: path.write_text(text))
    paused = Paused(folder / "paused.json", endpoints, "vehicle1", unsynced)
    view = View(endpoints, rules, interest, [log], paused)  # type: ignore[arg-type]

    def begun() -> Pump:
        pump = Pump(peer, log, view, letters, Backoff(1, 1), Flow(), paused)
        pump.begin()
        return pump

    return begun, paused


@pytest.mark.spec("local~disp-no-discard")
@given(
    seed=st.integers(0, 1 << 30),
    away=st.sampled_from([0.0, 0.02, 0.2]),
    is_far=st.booleans(),
    hands_over=st.booleans(),
)
def test_a_record_that_has_not_left_is_behind_a_position_that_is_kept(
    tmp_path_factory: pytest.TempPathFactory, seed: int, away: float, is_far: bool, hands_over: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hold_state, "RETRY_S_MIN", 0.002)
        patch.setattr(hold_state, "RETRY_S_MAX", 0.01)
        patch.setattr(address_holds, "YOUNG_S", 0.02)
        patch.setattr(reading_back, "GATHER_S", 0.002)
        patch.setattr(reading_back, "TRY_EVERY_S", 0.001)
        draw = random.Random(seed)
        network = Network(draw, away, is_far=is_far)
        asyncio.run(_Run(tmp_path_factory.mktemp("positions"), draw, network).run(hands_over))


class _Run:
    def __init__(self, folder: Path, draw: random.Random, network: Network) -> None:
        self._folder, self._draw, self._network = folder, draw, network
        self._sent: list[tuple[int, UMessage]] = []  # with the stream's id; the first has seq 1
        self._letters = set[bytes]()
        self._followed: int | None = None  # the seq after which a follower reads the publishes
        self.faults: list[str] = []

    async def run(self, hands_over: bool) -> None:
        draw, network, self._log = self._draw, self._network, await Log.open(None, name="durable")
        self._log.durable = True
        self._interest = Interest()
        letters: Any = SimpleNamespace(add=lambda message, *_: self._letters.add(message.payload))
        self._interest.unknown = {uris.format(topic) for topic in draw.sample(TOPICS, draw.randrange(3))}
        network.check = self._check
        made, self._paused = pumps(self._folder, self._log, network, self._interest, letters)

        def started() -> tuple[Pump, asyncio.Task[None]]:
            pump = made()
            return pump, asyncio.create_task(pump.run())

        pump, running = started()
        for _ in range(draw.randrange(5, 40)):
            match draw.randrange(9):
                case 0 if self._followed is None:
                    await self._paused.pause(draw.choice(TOPICS), "net")
                case 1 if len(self._paused):
                    pause = draw.choice(sorted(self._paused))
                    await self._paused.resume(uris.parse(pause.topic), pause.peer)
                case 2 | 3:
                    address = network.address_of(draw.choice(TOPICS), None)
                    network.answers[address] = draw.choice([OK, *ANSWERS.values()])
                    pump.waits.addresses.try_all()
                    pump.wake()
                case 4:
                    await asyncio.sleep(draw.random() * 0.02)
                case 5:
                    self._interest.know(draw.choice(TOPICS))
                    pump.interest_changed(None)
                case 6 if self._followed is None and draw.random() < 0.3:
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
                    pump.close()
                    self._check()
                    if draw.random() < 0.3:  # what was known is not on disk
                        self._interest.unknown = {uris.format(topic) for topic in draw.sample(TOPICS, 2)}
                        self._interest.changed()
                    pump, running = started()
                case 7 if hands_over and not len(self._paused):
                    await self._hand_over(pump)
                case _:
                    await self._append()
            self._check()
        await self._heal(pump)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await self._log.close()
        assert not self.faults

    async def _append(self) -> None:
        draw = self._draw
        batch = [
            UMessageBuilder.publish(draw.choice(TOPICS))
            .with_priority(draw.choice(PRIORITIES))
            .build_from_upayload(UPayload(b"%d" % (len(self._sent) + number), TEXT))
            for number in range(draw.randrange(1, 12))
        ]
        streams = [self._log.stream_id(message.attributes.source, None) for message in batch]
        self._sent += zip(streams, batch, strict=True)
        await self._log.append(streams, list(map(EncodedMessage.of, batch)))

    async def _hand_over(self, pump: Pump) -> None:
        if self._followed is None:

            def stop() -> int:
                self._followed = pump.waits.hand_over()
                return self._followed

            await pump.between_batches(stop)
        else:
            seq = self._followed

            def resume() -> int:
                read = pump.waits.take_back(seq, 0)
                self._followed = None
                return read

            await pump.between_batches(resume)

    async def _heal(self, pump: Pump) -> None:
        self._network.away = 0.0
        self._network.answers.clear()
        for topic in TOPICS:
            self._interest.know(topic)
        pump.interest_changed(None)
        for pause in list(self._paused):
            await self._paused.resume(uris.parse(pause.topic), pause.peer)
        if self._followed is not None:
            await self._hand_over(pump)
        pump.waits.addresses.try_all()
        pump.wake()
        done = self._network.taken | self._letters
        async with asyncio.timeout(20):
            while any(message.payload not in done for _, message in self._sent):
                assert not self.faults
                await asyncio.sleep(0.002)
                done = self._network.taken | self._letters

    def _check(self) -> None:
        rows = {name: cursor.seq for name, cursor in self._log.cursors.all().items()}
        done = self._network.taken | self._letters
        for seq, (stream, message) in enumerate(self._sent, 1):
            if message.payload in done:
                continue
            address = self._network.address_of(message.attributes.source, None)
            kept = [rows.get(f"held:net:{kind}={address}") for kind in "ru"]
            kept.append(rows.get(f"parked:net:{stream}"))
            if self._followed is None:
                kept.append(rows["egress:net"])
            else:
                kept += [self._followed, rows.get(f"owed:net:{stream}")]
            if not any(row is not None and row < seq for row in kept):
                self.faults.append(f"nothing keeps record {seq} of stream {stream}: {rows}, followed {self._followed}")


class OneAddress(UTransport):
    """A network where all topics have one address. `answer` is called with the messages of each batch."""

    connected = True
    capabilities = Capability.PUBLISH_WITHOUT_SINK
    in_flight_messages = 100

    def __init__(self, answer: Callable[[Sequence[UMessage]], list[UStatus]]) -> None:
        self.answer = answer
        self.sent, self.taken = list[bytes](), list[bytes]()

    def address_of(self, source: UUri, sink: UUri | None) -> str:
        return "vehicle1/cloud"

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        statuses = self.answer(messages)
        self.sent += [message.payload for message in messages]
        self.taken += [message.payload for message, status in zip(messages, statuses, strict=True) if not status.code]
        return statuses


class OnePump:
    """A pump to such a network, from a log that is empty at first."""

    def __init__(self, folder: Path, network: OneAddress) -> None:
        self._folder, self._network = folder, network

    async def __aenter__(self) -> Self:
        self.log = await Log.open(None, name="durable")
        self.log.durable = True
        begun, _ = pumps(self._folder, self.log, self._network, Interest(), SimpleNamespace())
        self.pump = begun()
        self._running = asyncio.create_task(self.pump.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.log.close()

    async def append(self, *topics: UUri) -> None:
        """The payload of each message is its seq."""
        log = self.log
        batch = [
            UMessageBuilder.publish(topic).build_from_upayload(UPayload(b"%d" % (log.newest_seq + number), TEXT))
            for number, topic in enumerate(topics, 1)
        ]
        await log.append([log.stream_id(topic, None) for topic in topics], list(map(EncodedMessage.of, batch)))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                assert not self._running.done()
                await asyncio.sleep(0.002)

    async def has_read(self, seq: int) -> None:
        """Wait until the pump has read up to `seq`, and everything was answered."""
        pump = self.pump
        await self.until(lambda: pump.read == seq and not pump.sender.queue and not pump.sender.flights)

    def try_again(self) -> None:
        self.pump.waits.addresses.try_all()
        self.pump.wake()


@pytest.mark.spec("local~disp-no-discard")
async def test_what_failed_beside_a_refused_message_is_not_overtaken_by_its_own_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker goes down while it refuses an address, and is back with the right access rule."""
    monkeypatch.setattr(hold_state, "RETRY_S_MIN", 60.0)

    def answer(messages: Sequence[UMessage]) -> list[UStatus]:
        """Of the first batch, the first message is refused; then the broker goes down."""
        if network.sent:
            return [OK] * len(messages)
        return stopped([ANSWERS["refused"]], len(messages), UStatus(code=UCode.UNAVAILABLE, message="away"))

    network = OneAddress(answer)
    async with OnePump(tmp_path, network) as one:
        await one.append(TOPICS[0], TOPICS[1])
        await one.until(lambda: bool(one.pump.waits.addresses))
        await one.append(TOPICS[1])
        await one.has_read(3)
        one.try_again()
        await one.until(lambda: len(network.taken) >= 3)
    assert network.taken == [b"1", b"2", b"3"]


@pytest.mark.spec("local~disp-no-discard")
async def test_what_goes_to_a_refused_address_waits_also_where_nothing_of_its_stream_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a broker whose access rule is mended between two messages of that stream takes only the second one."""
    monkeypatch.setattr(hold_state, "RETRY_S_MIN", 60.0)
    answers = [OK]
    network = OneAddress(lambda messages: answers * len(messages))
    async with OnePump(tmp_path, network) as one:
        await one.append(*TOPICS)  # all of them have been sent before
        await one.has_read(4)
        answers[0] = ANSWERS["refused"]
        await one.append(TOPICS[0], TOPICS[1])
        await one.until(lambda: bool(one.pump.waits.addresses))
        await one.append(TOPICS[2], TOPICS[2])
        await one.has_read(8)
        assert network.sent == [b"%d" % seq for seq in range(1, 7)], "7 and 8 wait without having been sent"
        answers[0] = OK
        one.try_again()
        await one.until(lambda: len(network.taken) >= 8)
    assert network.taken == [b"%d" % seq for seq in range(1, 9)]
