"""A publisher with a REST history, a network that loses messages, and gates in processes that are killed: on virtual
time, with a real log."""

from __future__ import annotations

import asyncio
import contextvars
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from campaigns.simulation.disk import DiskFaults, SimulatedDisk
from campaigns.simulation.loop import PROCESS, Process, SimulatedWorker, VirtualLoop
from history.log.log import Log
from storage.runtime import Runtime
from streamer.config.edge import RecoverySection
from streamer.recovery.asking import AskedSource
from streamer.recovery.gates import Cause, Gate, GateParts
from streamer.recovery.source import Fetched, RecoverySource
from streamer.walk.flow import Flow
from streamer.walk.ingress import IdWindow
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

TOPIC: Final = uris.parse("//vehicle1/8001/1/8001")
OTHER: Final = uris.parse("//vehicle1/8001/1/8002")
ADDRESS: Final = TOPIC.SerializeToString()
TIMEOUT_S: Final = 2.0
SETTLED_S: Final = 120.0  # of virtual time: every back-off is over
REDELIVER_S: Final = 0.05
EPOCH_MS: Final = 1_760_000_000_000


def number_of(message: UMessage | EncodedMessage) -> int:
    return int(message.payload)


class ModelSource(RecoverySource):
    """Has the `published` messages. `mode`: what is wrong with it; empty: nothing. It knows no predecessors."""

    def __init__(self, published: list[UMessage], rng: random.Random) -> None:
        self.published, self.rng = published, rng
        self.mode = ""
        self.page = 3
        self.asked: list[str | None] = []
        self.lacks: set[int] = set()  # numbers that it does not have any more
        self.closed = 0

    def after(self, after: str | None) -> list[UMessage]:
        ids = [uuids.format(one.attributes.id) for one in self.published]
        begin = ids.index(after) + 1 if after in ids else 0
        return [one for one in self.published[begin:] if number_of(one) not in self.lacks]

    async def fetch(self, topic: UUri, after: str | None) -> Fetched:
        self.asked.append(after)
        await asyncio.sleep(self.rng.random() * 0.05)
        found = self.after(after)
        match self.mode:
            case "away":
                raise UStatusError(UCode.UNAVAILABLE, "the model is away")
            case "raises":
                raise ValueError("the model is broken")
            case "slow":
                await asyncio.sleep(3_600)
            case "deaf":  # it does not end when it is cancelled
                while True:
                    try:
                        await asyncio.sleep(3_600)
                    except asyncio.CancelledError:
                        await asyncio.sleep(3_600)
            case "nothing":
                return None  # type: ignore[return-value]
            case "others":
                return Fetched([publication(1, OTHER), *found])
            case "invalid":
                return Fetched(
                    [UMessage(), UMessageBuilder.notification(TOPIC, uris.parse("//x/1/1/0")).build(), *found]
                )
            case "reversed":
                return Fetched(found[::-1])
            case "all":  # whatever was asked
                return Fetched(self.after(None))
            case "endless":
                return Fetched(found, more=True)
            case "huge":
                return Fetched(self.after(None) * 2_000)
            case "position":
                return Fetched(found, next="x" * 5_000)
        return Fetched(found[: self.page], more=len(found) > self.page)

    async def close(self) -> None:
        self.closed += 1


class ChainedSource(ModelSource):
    """It knows predecessors: the positions are numbers."""

    def after(self, after: str | None) -> list[UMessage]:
        begin = int(after) if after is not None else 0
        return [one for one in self.published if number_of(one) > begin and number_of(one) not in self.lacks]

    def position(self, message: UMessage) -> str:
        return str(number_of(message))

    def predecessor(self, message: UMessage) -> str | None:
        return str(number_of(message) - 1)


def publication(number: int, topic: UUri = TOPIC, **options: Any) -> UMessage:
    builder = UMessageBuilder.publish(topic)
    for name, value in options.items():
        getattr(builder, f"with_{name}")(value)
    return builder.build_from_upayload(UPayload(str(number).encode(), UPayloadFormat.UPAYLOAD_FORMAT_TEXT))


class Life(Process):
    """One life of the gateway's process."""

    gate: Gate
    source: AskedSource

    def __init__(self, world: Recovered) -> None:
        self.world = world
        self.disk = SimulatedDisk(random.Random(world.rng.getrandbits(32)), lambda _: None)
        super().__init__("gateway", self.disk.power_lost)
        self.log: Log | None = None
        self.is_ready = asyncio.Event()

    async def begin(self) -> None:
        world, loop = self.world, self.world.loop
        runtime = Runtime(disk=self.disk, worker=SimulatedWorker, monotonic=loop.time, now_ms=world.now_ms)  # type: ignore[arg-type]
        opened = await Log.open(world.folder / "history.db", name="durable", runtime=runtime)
        window = IdWindow()
        for stream, id in await opened.recent_ids(1_000):
            window.take(id + opened.stream(stream).source.SerializeToString())
        section = RecoverySection(topics=["//vehicle1/8001/1/8001"], source="model", timeout_s=TIMEOUT_S)
        self.source = AskedSource(section, world.model, 1_000_000, world.now_ms)
        parts = GateParts(
            opened,
            Flow(),
            window,
            world.inward,
            world.gap,
            world.answered,
            lambda: world.is_connected,
            world.now_ms,
            Backoff(50, 2_000),
        )
        self.gate = Gate(TOPIC, self.source, parts)
        self.gate.ask(Cause.START)
        self.log = opened
        self.is_ready.set()

    def run(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call it in this process."""
        context = contextvars.copy_context()
        context.run(PROCESS.set, self)
        context.run(call, *arguments)


class Recovered:
    """The world of one test; see above."""

    def __init__(self, folder: Path, make: Callable[..., ModelSource] = ChainedSource, seed: int = 0) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop, self.folder, self.rng = loop, folder, random.Random(seed)
        self.published: list[UMessage] = []
        self.model = make(self.published, self.rng)
        self.gaps: list[str | int] = []  # what was reported, and up to which number the source has answered
        self.acknowledged: set[int] = set()
        self.lives: list[Life] = []
        self.is_connected = True
        self.inward: Callable[[str], str] = lambda name: name
        self.ids = uuids.UUIDGenerator(self.now_ms, self.rng.randbytes)
        self._is_redelivering = False
        self._under_way: list[UMessage] = []  # not acknowledged, in order, as a broker keeps them

    def now_ms(self) -> int:
        return EPOCH_MS + int(self.loop.now * 1_000)

    @property
    def life(self) -> Life:
        return self.lives[-1]

    @property
    def gate(self) -> Gate:
        return self.life.gate

    def gap(self, topic: UUri, log: Log, what: str) -> None:
        assert uris.key(topic) == uris.key(TOPIC)
        self.gaps.append(what)

    def answered(self, _topic: UUri, position: str | None) -> None:
        self.gaps.append(self._numbers()[position or "the first one"])

    def _numbers(self) -> dict[str, int]:
        """By position."""
        numbers = {uuids.format(one.attributes.id): number_of(one) for one in self.published}
        return numbers | {str(number): number for number in numbers.values()} | {"the first one": 0}

    # Processes

    async def start(self) -> None:
        life = Life(self)
        self.lives.append(life)
        life.run(lambda: self.loop.create_task(life.begin()))
        while life.alive and not life.is_ready.is_set():  # noqa: ASYNC110 - a process that is killed sets none
            await asyncio.sleep(0.01)
        for message in list(self._under_way):
            self._bring(message)

    def kill(self) -> None:
        self.life.kill()

    def ask(self, cause: Cause) -> None:
        self.life.run(self.gate.ask, cause)

    def doubt(self) -> None:
        self.life.run(self.gate.doubt, Cause.NETWORK)

    async def restart(self) -> None:
        self.kill()
        await asyncio.sleep(0.01)
        await self.start()

    # Messages

    def publish(self, *, lost: bool = False, twice: bool = False, late: bool = False) -> UMessage:
        message = publication(len(self.published) + 1, id=self.ids())
        self.published.append(message)
        if not lost:
            self._under_way.append(message)
            if not late:
                self._bring(message)
            if twice:
                self._bring(message)
        return message

    def bring_late(self) -> None:
        """All that was not acknowledged comes: what was late behind what was published after it."""
        for message in list(self._under_way):
            self._bring(message)

    def _bring(self, message: UMessage) -> None:
        life = self.life
        if not (life.alive and life.is_ready.is_set() and self.is_connected):
            return
        life.run(self._take, life, message)

    def _take(self, life: Life, message: UMessage) -> None:
        encoded = EncodedMessage.of(message)
        taken = life.gate.take(encoded, encoded.id_bytes + ADDRESS)
        if taken is None:
            self._acknowledge(message)
        else:
            taken.add_done_callback(lambda done: self._answered(life, message, done))

    def _answered(self, life: Life, message: UMessage, taken: asyncio.Future[int]) -> None:
        if not life.alive:
            return
        if taken.exception() is None:
            self._acknowledge(message)
        elif not self._is_redelivering:
            self._is_redelivering = True
            self.loop.call_later(REDELIVER_S, self._redeliver, context=contextvars.Context())

    def _redeliver(self) -> None:
        self._is_redelivering = False
        self.bring_late()

    def _acknowledge(self, message: UMessage) -> None:
        self.acknowledged.add(number_of(message))
        if message in self._under_way:
            self._under_way.remove(message)

    # What came of it

    async def settle(self) -> list[int]:
        """Heal everything, and return the numbers in the log."""
        self.model.mode = ""
        self.is_connected = True
        self.life.disk.faults = DiskFaults()
        if not self.life.alive:
            await self.start()
        self.ask(Cause.NETWORK)
        await asyncio.sleep(SETTLED_S)
        return await self.numbers()

    async def numbers(self) -> list[int]:
        log, found, after = self.life.log, list[int](), 0
        assert log is not None
        while chunks := await log.read(after):
            after = chunks[-1].last_seq
            found += [number_of(message) for chunk in chunks for message in chunk.messages]
        return found

    def reported(self, *, is_late: bool = False) -> set[int]:
        """The numbers that reported gaps have; `is_late`: also those that came late, which a gap reports as well."""
        numbers, found = self._numbers(), set[int]()
        for at, gap in enumerate(self.gaps):
            if isinstance(gap, int):
                continue
            ends = re.match(
                r"messages may be lost \w+ (?:position )?(.*?)(?: and (\S+)|, until its source answers): ", gap
            )
            assert ends is not None, gap
            after = numbers[ends[1]]
            if ends[2] is None:
                before = next((one for one in self.gaps[at:] if isinstance(one, int)), len(self.published)) + 1
            else:
                before = numbers[ends[2]]
            found.update(range(after + 1, before))
            if before <= after and is_late:  # it came behind what it was published before
                found.update(range(before, after + 1))
        return found

    def check(self, numbers: Sequence[int]) -> None:
        assert len(numbers) == len(set(numbers)), f"doubled: {numbers}"
        reported, late = self.reported(), self.reported(is_late=True)  # what was given up may come later all the same
        in_time = [number for number in numbers if number not in late]
        assert in_time == sorted(in_time), f"out of order: {numbers}"
        missing = set(range(1, len(self.published) + 1)) - set(numbers)
        assert not missing & self.acknowledged, f"acknowledged, and lost: {missing & self.acknowledged}"
        missing -= set(range(1, numbers[0]))  # nothing was recorded yet: the record begins with what the source has
        assert missing <= reported, f"lost, and not reported: {missing - reported}: {self.gaps}"
        assert not self.loop.errors, self.loop.errors
