"""Epochs in a world: their publishers and readers, and the checks of what was read.

Laps ---Progress---> V keeps "laps"      a Publisher ---> V keeps "signals", by bucket       (the log is the truth)
                     |                   another one, whose clock may be ahead ---'
                     '--> EpochReader (comes, is killed, comes back, with a cursor or without) --> EpochsChecker

Where C follows V: C keeps "signals" of the hub, too, of a publisher that pauses and whose ids are old. A reader there
merges both. A bucket is complete if it has the records whose ids are in it, and its keepers ran all the time.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, Final

from campaigns.simulation.apps import RETRY_S, Publisher
from history.epochs.assembling import Assembled, Assembler
from history.epochs.frontier import is_ahead, precedes
from history.epochs.merging import MISSED_EACH_MAX, REST
from history.log.log import Log
from history.reading.client import Frames, HistoryClient
from history.reading.following import FollowMode
from history.reading.subscriber import GaplessSubscriber
from history.records.epoch import Epoch, Time
from history.records.record import Record
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.core.ustreamer.ids import is_frontiers
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Frontier, LogicalTime, PollRequest, ProgressRequest
from uprotocol.encoded import decoded
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.uuid_pb2 import UUID

SIGNALS: Final = ("//vin1/8005/1/8001", "//vin1/8005/1/8002")
FAST_SIGNALS: Final = "//vin1/8009/1/8001"  # of a publisher whose clock may be ahead
HUB_SIGNALS: Final = "//hub/8009/1/8001"  # of a publisher with pauses, whose ids are old
AHEAD_MS: Final = (0, 0, 800, 3_000, 4_500)  # less than `ahead_ms`, which is 5 s
OLD_SHARE: Final = 0.8  # of `timeout_ms`: ids of HUB_SIGNALS are up to so old
LOOKED_FOR_MAX: Final = 100  # buckets of an absence that are looked for
LAPS: Final = ("//vin1/8006/1/8001", "//vin1/8006/1/8002")
PROGRESS: Final = "//vin1/4/1/4"
KEEPERS: Final = {"vin1": "V", "hub": "C"}
SERVICES: Final = {"V": "//vin1/4/1/0", "C": "//hub/4/1/0"}  # of the gateways whose epochs are read,
OUTSIDE: Final = {"V": "vehicle", "C": "cloud"}  # and the network whose names they have
MODES: Final[tuple[FollowMode, ...]] = ("auto", "poll", "push")

Position = tuple[bytes, int]  # incarnation, seq


def sections(dice: random.Random) -> list[dict[str, Any]]:
    """The [[epochs]] of a gateway's configuration."""
    timeout_ms = dice.choice((1_500, 4_000, 10_000))
    bucket = {"width_ms": dice.choice((200, 500, 1_000)), "lateness_ms": dice.choice((0, 0, 100, 400))}
    return [
        {"name": "signals", "topics": [*SIGNALS, FAST_SIGNALS], "timeout_ms": timeout_ms, **bucket},
        {"name": "laps", "topics": list(LAPS), "by": "progress", "timeout_ms": timeout_ms},
    ]


def sections_of_hub(of_vehicle: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The [[epochs]] of the hub: a group of the same name and width."""
    return [of_vehicle[0] | {"topics": [HUB_SIGNALS]}]


class SkewedPublisher(Publisher):
    """Has a clock of its own, which differs by `skew_ms` from that of the world, and pauses of its own."""

    def __init__(self, world: Any, transport: LocalTransport, name: str, topic: str, skew_ms: int) -> None:
        super().__init__(world, transport, name, [uris.parse(topic)], [], 0.0)
        self._own_dice = random.Random(f"{world.seed} {name}")
        self.ids = uuids.UUIDGenerator(lambda: world.wall_ms() + skew_ms, self._own_dice.randbytes)

    async def run(self, messages: int, pause_s: float) -> None:
        for _ in range(messages):
            pause_s = self._own_dice.choice((0.05, 0.3, 3.0))
            await asyncio.sleep(self._own_dice.random() * pause_s)
            await self.publish(self._topics[0])

    def _new_id(self) -> UUID:
        return self.ids()


class Laps(Publisher):
    """Opens an epoch, publishes, and closes it with the last id and the count of each topic. Sometimes it does not
    close it, and sometimes it announces more messages than it sends."""

    def __init__(self, world: Any, transport: LocalTransport, dice: random.Random) -> None:
        super().__init__(world, transport, "laps", [uris.parse(one) for one in LAPS], [], 0.0)
        self._dice, self._lap = dice, 0
        self.said: dict[Time, int] = {}  # the number of messages of each, once its end is published

    async def run(self, messages: int, pause_s: float) -> None:
        left = messages
        while left > 0:
            count = min(left, 1 + self._dice.randrange(5))
            left -= count
            await self.lap(count, pause_s, fate=self._dice.choice(("closed", "closed", "closed", "left", "short")))

    async def lap(self, count: int, pause_s: float, fate: str = "closed") -> None:
        self._lap += 1
        time, sent = (self._lap,), dict[bytes, tuple[bytes, int]]()
        if not await self._say(time, 1, {}):
            return
        for _ in range(count):
            await asyncio.sleep(self._dice.random() * pause_s)
            topic = self._dice.choice(self._topics)
            message = await self.publish(topic)
            if message is not None:
                key, id = topic.SerializeToString(), uuids.to_bytes(message.attributes.id)
                sent[key] = (id, sent.get(key, (b"", 0))[1] + 1)
        if fate == "short":
            sent = {key: (id, number + 1) for key, (id, number) in sent.items()}
        if fate != "left":
            self.said[time] = sum(number for _, number in sent.values())
            await self._say(time, -1, sent)

    async def _say(self, time: Time, change: int, sent: dict[bytes, tuple[bytes, int]]) -> bool:
        asked = ProgressRequest(group="laps")
        said = asked.changes.add(time=LogicalTime(numbers=time), change=change)
        for topic, (id, count) in sent.items():
            said.last.add(topic=UUri.FromString(topic), id=id, count=count)
        async with InMemoryRpcClient(self._transport, self._transport.local) as rpc:
            for _ in range(3):
                try:
                    await rpc.invoke_method(uris.parse(PROGRESS), UPayload.pack(asked), CallOptions(timeout_ms=2_000))
                    return True
                except UStatusError as error:
                    self._world.note("progress", time, change, repr(error))
                    await asyncio.sleep(RETRY_S)
        return False


class EpochReader:
    """Reads epochs of the gateway `machine`, with restarts. `cursor` None: each life begins with new records.
    `topics` have their names inside the vehicle."""

    def __init__(
        self,
        world: Any,
        name: str,
        transport: LocalTransport,
        topics: Sequence[str],
        cursor: Path | None,
        seed: int,
        machine: str = "V",
    ) -> None:
        self._world, self.name, self._transport, self.cursor = world, name, transport, cursor
        self.topics, self.machine = [uris.parse(one) for one in topics], machine
        self._dice = random.Random(seed)
        self.lives: list[list[Assembled]] = []
        self.kept: list[int] = []  # by life: the number of records up to its cursor
        self.gaps = 0
        self.before_tear: set[Epoch] = set()  # epochs that it had when the end of a log was cut off
        self.since_s = 0.0  # when this life began

    async def run(self) -> None:
        """Is killed and restarted until the world heals; then it lives on."""
        await asyncio.sleep(self._dice.random() ** 2 * 6)
        while not self._world.given_up:
            life = asyncio.create_task(self._live())
            try:
                await asyncio.wait({life}, timeout=None if self._world.healed else 0.5 + self._dice.random() * 8)
            finally:
                life.cancel()
                await asyncio.gather(life, return_exceptions=True)
            await asyncio.sleep(self._dice.random() * 2)

    async def _live(self) -> None:
        try:
            await self._read()
        except UStatusError as error:
            self._world.note("epoch reader", self.name, repr(error))

    async def _read(self) -> None:
        dice, life = self._dice, list[Assembled]()
        self.lives.append(life)
        self.kept.append(0)
        self.since_s = self._world.loop.now
        topics = [self._world.named(OUTSIDE[self.machine], one) for one in self.topics]
        start = PollRequest(earliest=True) if self.cursor is not None else PollRequest(latest=True)
        async with InMemoryRpcClient(self._transport, self._transport.local) as rpc:
            frames = Frames(self._transport, self._transport.local)
            client = HistoryClient(rpc, uris.parse(SERVICES[self.machine]), timeout_ms=3_000, frames=frames)
            async with GaplessSubscriber(
                client,
                topics,
                start=start,
                assembler=Assembler(topics),
                cursor_path=self.cursor,
                mode=dice.choice(MODES),
                wait_ms_max=2_000,
                on_gap=self._gap,
                rng=dice,
                random_bytes=dice.randbytes,
            ) as reader:
                async for one in reader.epochs():
                    self._world.note("epoch", self.name, one.epoch, len(one.records), one.incomplete)
                    life.append(one)
                    if self.cursor is not None:
                        await reader.commit()
                        self.kept[-1] = len(life)

    def _gap(self, _: Any) -> None:
        self.gaps += 1


class EpochsChecker:
    """At the end, with the content of the log."""

    def __init__(self, world: Any) -> None:
        self._world, self.readers = world, list[EpochReader]()
        self.truth: dict[Epoch, dict[Position, UUri]] = defaultdict(dict)
        self._oldest: dict[bytes, int] = {}
        self.newest_healed: dict[bytes, int] = {}  # later records must reach every reader
        self.published: dict[Epoch, set[Position]] = defaultdict(set)  # buckets by the ids of their records
        self._sources: dict[Position, UUri] = {}  # of these records
        self._missed: list[range] = []  # spans of buckets that V has reported as missed
        self.width_ms = 0  # of the buckets
        self.logs_of: dict[str, set[bytes]] = {}  # of each gateway
        self.fast: Publisher | None = None
        self.is_reported_fast = False
        self.checked = self.whole = 0

    def _fail(self, kind: str, text: str) -> None:
        self._world.checker.fail(kind, text)

    def torn(self) -> None:
        """The end of a log was torn off, and the frontiers in it are lost. So the log may append more records to an
        epoch that had ended. A reader that had this epoch before does not see them if it starts again behind them."""
        for reader in self.readers:
            reader.before_tear.update(one.epoch for life in reader.lives for one in life if one.epoch is not None)

    async def learn(self, logs: Sequence[Log]) -> None:
        """Learn what the logs of all keepers have, from the records that were appended there first."""
        self.truth.clear()
        self.published.clear()
        self._missed.clear()
        for log in logs:
            after, frontiers_read = 0, list[tuple[int, UMessage]]()
            while chunks := await log.read(after):
                for chunk in chunks:
                    for place, message in enumerate(map(decoded, chunk.messages)):
                        seq = chunk.seqs[place]
                        self._oldest.setdefault(log.incarnation, seq)
                        epoch = chunk.epochs[place] if chunk.epochs else None
                        if chunk.origins and chunk.origins[place] is not None:
                            continue
                        if epoch is not None:
                            self.truth[epoch][log.incarnation, seq] = message.attributes.source
                            self._note_published(epoch, (log.incarnation, seq), message)
                        elif is_frontiers(message.attributes.source):
                            frontiers_read.append((seq, message))
                after = chunks[-1].last_seq
            if log.incarnation in self.logs_of["V"]:
                self._note_missed(frontiers_read)
            if not self._is_torn:
                self._look_at_frontiers(frontiers_read)

    def _note_published(self, epoch: Epoch, place: Position, message: UMessage) -> None:
        """A record that came before its time, by a clock that is too far ahead, is in no bucket of its own."""
        if epoch.group == "signals":
            self._sources[place] = message.attributes.source
            bucket = uuids.time_ms(message.attributes.id) // self.width_ms * self.width_ms
            self.published[Epoch("signals", (min(bucket, epoch.time[0]),))].add(place)

    def _note_missed(self, frontiers_read: Sequence[tuple[int, UMessage]]) -> None:
        groups = (group for _, message in frontiers_read for group in Frontier.FromString(message.payload).groups)
        for missed in (one for group in groups if group.group == "signals" for one in group.missed):
            (first,), (last,) = missed.first.numbers, missed.last.numbers
            self._missed.append(range(first, last + 1, missed.width_ms))

    def watch(self) -> None:
        """Called all the time: is a publisher whose clock is ahead reported?"""
        streamer = self._world.machines["V"].streamer
        if streamer is not None and self._world.machines["V"].ready:
            reported = any("vin1/8009" in problem for problem in streamer.parts.problems())
            self.is_reported_fast = self.is_reported_fast or reported

    @property
    def _is_torn(self) -> bool:
        is_torn: bool = self._world.machines["V"].torn or self._world.checker.allowed_gaps
        return is_torn

    def _is_disturbed(self, reader: EpochReader) -> bool:
        """The log of the readers went back."""
        return self._is_torn or bool(self._world.machines[reader.machine].torn)

    def _look_at_frontiers(self, frontiers_read: Sequence[tuple[int, UMessage]]) -> None:
        """Frontiers of one log advance, whatever happens to its keeper."""
        before: dict[str, Any] = {}
        for seq, message in frontiers_read:
            for group in Frontier.FromString(message.payload).groups:
                old, before[group.group] = before.get(group.group), group
                if old is None:
                    continue
                if group.number <= old.number or group.version < old.version:
                    what = f"{old.number} (version {old.version}) then {group.number} (version {group.version})"
                    self._fail("a frontier that goes back", f"{group.group}, seq {seq}: {what}")
                lower = [tuple(one.numbers) for one in old.lower]
                back = [one for one in group.lower if lower and not is_ahead(lower, tuple(one.numbers))]
                if back:
                    self._fail("a frontier that goes back", f"{group.group}, seq {seq}: {back} is not after {lower}")

    def owed(self, reader: EpochReader) -> set[Epoch]:
        """The epochs whose records all came while the reader lived. After the clock was set back, buckets end only by
        time-outs: later than a world waits, and a reader that begins meanwhile drops those that are not later than the
        open ones."""
        found = set[Epoch]()
        if reader.machine != "V" and not self._world.machines[reader.machine].config["follow"]:
            return found
        healed, was_set_back = self.newest_healed, self._world.checker.clock_was_set_back
        old = {epoch for epoch, records in self.truth.items() if any(seq <= healed.get(log, 0) for log, seq in records)}
        dropped = max((one.time for one in old if one.group == "signals" and was_set_back), default=())  # and before
        for epoch in self.truth.keys() - old:
            if self._of(reader, epoch) and (epoch.group != "signals" or epoch.time > dropped):
                found.add(epoch)
        return found - {one.epoch for one in reader.lives[-1] if one.epoch is not None} if reader.lives else found

    def _of(self, reader: EpochReader, epoch: Epoch, places: Set[Position] | None = None) -> set[Position]:
        """The records of the epoch, or of `places`, that are of the reader's topics."""
        records = self.truth.get(epoch, {})
        if places is not None:
            records = {place: self._sources[place] for place in places}
        return {place for place, source in records.items() if any(uris.matches(one, source) for one in reader.topics)}

    def finish(self) -> None:
        for reader in self.readers:
            kept, records = set[Epoch](), set[Position]()
            for life, count in zip(reader.lives, reader.kept, strict=True):
                self._look_at(reader, life)
                again = [one.epoch for one in life if one.records and one.epoch in kept and one.incomplete != REST]
                again += [one.epoch for one in life if one.epoch is not None and _places(one) & records]
                if again and not self._is_disturbed(reader):
                    self._fail("an epoch twice", f"{reader.name} has {again[0]} again, which is behind its cursor")
                kept.update(one.epoch for one in life[:count] if one.epoch is not None and one.records)
                records.update(*(_places(one) for one in life[:count] if one.epoch is not None))
            self._look_at_counts(reader)
            if not self._is_disturbed(reader):
                self._look_at_rests(reader)
                self._look_at_missed(reader)
            for epoch in sorted(self.owed(reader)):
                self._fail("an epoch that is lost", f"{reader.name} never had {epoch}, which began while it read")

    def _look_at_rests(self, reader: EpochReader) -> None:
        """What was handed over as whole has no rest."""
        whole = set[Epoch]()
        lives = reader.lives if reader.cursor is not None else reader.lives[-1:]
        for one in (one for life in lives for one in life if one.epoch is not None):
            if one.records and one.epoch in whole:
                self._fail("a part of an epoch", f"{reader.name}: {one.epoch} was complete: {one.incomplete}")
            if one.is_complete:
                whole.add(one.epoch)

    def _look_at_missed(self, reader: EpochReader) -> None:
        """A bucket in which its keeper did not run is not whole. Who reads all the time hears of each of them."""
        had: dict[Epoch, str] = {}
        for one in (one for life in reader.lives for one in life if one.epoch is not None):
            if not one.is_complete or not self._unknown(one) & self.logs_of["V"]:
                had[one.epoch] = had.get(one.epoch, "") or one.incomplete
        # a report that records came late may be of a bucket from before the reader, or before a clock that was set back
        begins = [epoch.time[0] for epoch, why in had.items() if epoch.group == "signals" and "too late" not in why]
        oldest = min(begins, default=math.inf) if self._reads_all(reader) else math.inf  # later ones are owed to it,
        newest = max(begins, default=0) if self._world.checker.clock_was_set_back else math.inf  # if they can be over
        for down_ms, up_ms, newest_ms in self._world.machines["V"].absences():
            was_over = newest_ms // self.width_ms * self.width_ms  # buckets before it: the clock was set back since
            first, last = (ms // self.width_ms * self.width_ms for ms in (down_ms, up_ms))
            for begin in range(first, last + 1, self.width_ms)[:LOOKED_FOR_MAX]:
                epoch = Epoch("signals", (begin,))
                if had.get(epoch, "incomplete") == "":
                    what = f"{reader.name}: {epoch}, and its gateway did not run from {down_ms} to {up_ms}"
                    self._fail("a missed bucket as whole", what)
                elif epoch not in had and oldest < begin < newest and begin >= was_over and not self._is_beyond(begin):
                    self._fail("a missed bucket is not reported", f"{reader.name}: {epoch} of {down_ms} to {up_ms}")

    def _is_beyond(self, begin: int) -> bool:
        """Returns whether no reader hears of this missed bucket: of a span it hears of MISSED_EACH_MAX, the first ones
        and the last one. A span is longer than the absence if the clock was set after the last report before it."""
        spans = [one for one in self._missed if begin in one]
        return bool(spans) and all(MISSED_EACH_MAX - 2 < one.index(begin) < len(one) - 1 for one in spans)

    def _reads_all(self, reader: EpochReader) -> bool:
        has_signals = uris.parse(SIGNALS[0]) in reader.topics
        return reader.cursor is not None and reader.machine == "V" and not reader.gaps and has_signals

    def _look_at(self, reader: EpochReader, life: Sequence[Assembled]) -> None:
        seen = list[Epoch]()
        came_late = {
            one.epoch for life in reader.lives for one in life if not one.records and "too late" in one.incomplete
        }
        for one in life:
            if one.epoch is None or not one.records:
                continue
            has = list(map(_place, one.records))
            if self._is_disturbed(reader):
                pass
            elif len(set(has)) < len(has) or (one.epoch in seen and one.incomplete != REST):
                self._fail("an epoch twice", f"{reader.name}: {one.epoch}")
            after = [last for last in seen if last.group == one.epoch.group and precedes(one.epoch.time, last.time)]
            if after and one.epoch not in seen and not self._is_disturbed(reader):
                self._fail("epochs out of order", f"{reader.name}: {one.epoch} after {after[0]}")
            seen.append(one.epoch)
            self.checked += 1
            if one.is_complete:
                self.whole += 1
                unknown = self._unknown(one)
                self._is_whole(reader, one.epoch, set(has), unknown)
                wrong = self._of(reader, one.epoch, self.published[one.epoch]) ^ set(has)
                wrong = {(log, seq) for log, seq in wrong if seq >= self._oldest.get(log, 1 << 64)}
                wrong = {(log, seq) for log, seq in wrong if log not in unknown}
                hears = reader.cursor is not None or life is reader.lives[-1]  # of what comes late
                is_late = one.epoch in came_late or self._is_torn
                if wrong and hears and one.epoch.group == "signals" and not is_late:
                    what = (
                        f"{reader.name}: {one.epoch} as complete, though by their ids {sorted(wrong)} are wrong there"
                    )
                    self._fail("a part of an epoch", what)

    def _look_at_counts(self, reader: EpochReader) -> None:
        """A complete epoch has as many records as its publisher announced."""
        if not {uris.key(uris.parse(one)) for one in LAPS} <= {uris.key(one) for one in reader.topics}:
            return
        for one in (one for life in reader.lives for one in life):
            said = self._world.laps.said.get(one.epoch.time, 0) if one.epoch and one.epoch.group == "laps" else 0
            if one.is_complete and len(one.records) < said:
                what = f"{reader.name}: {one.epoch} as complete with {len(one.records)} of {said} messages"
                self._fail("a part of an epoch", what)

    def _unknown(self, one: Assembled) -> set[bytes]:
        """The logs of gateways that a reader did not know when the epoch was over: they were followed only later."""
        known = {KEEPERS[authority.partition(".")[0]] for authority, _ in one.keepers}
        return {log for name, logs in self.logs_of.items() if name not in known for log in logs}

    def _is_whole(self, reader: EpochReader, epoch: Epoch, has: set[Position], unknown: set[bytes]) -> None:
        lacks = {(log, seq) for log, seq in self._of(reader, epoch) - has if log not in unknown}
        more = {(log, seq) for log, seq in has if seq >= self._oldest.get(log, 1 << 64)} - self._of(reader, epoch)
        if self._is_torn:  # records that were read no longer exist, and others may have their seqs
            more.clear()
            frontiers_read = {one.epoch for life in reader.lives for one in life if one.incomplete == REST}
            lacks = set() if epoch in frontiers_read | reader.before_tear else lacks
        if lacks or more:
            seqs = sorted(seq for _, seq in lacks), sorted(seq for _, seq in more)
            self._fail("a part of an epoch", f"{reader.name}: {epoch} as complete, without {seqs[0]}, with {seqs[1]}")


def _places(one: Assembled) -> set[Position]:
    return set(map(_place, one.records))


def _place(record: Record) -> Position:
    """The log and seq in which it was appended first."""
    if record.origin is None:
        return record.incarnation, record.seq
    return record.origin.incarnation, record.origin.seq
