"""A drive by seconds: all signals of a second, or none. One subscriber reads from the start, one joins in the middle
of a second.

a drive, second by second -- Zenoh -- gateway: [[epochs]] second -- its history -- two GaplessSubscribers, by epochs

    python -m examples.epochs --seconds 12 --data drive.csv --pictures out

Exit code 1 unless every second that a subscriber has seen was whole, and each subscriber has seen all its seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from examples.epochs.pictures import Point, draw
from history.epochs.assembling import Assembler
from history.reading.subscriber import GaplessSubscriber, HistoryClient
from history.records.epoch import Time
from history.records.record import Record, decode
from storage import logs
from streamer.commands.demo import drive
from streamer.commands.demo.processes import Child
from transports.ports import free_port
from transports.zenoh import ZenohConfig, ZenohTransport
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Frontier, PollRequest
from uprotocol.status import UStatusError, invalid
from uprotocol.transport import LocalUriProvider, UTransport

HERE: Final = Path(__file__).parent
TOPICS: Final = [uris.pattern(authority, drive.PUBLISHER_UE_ID, 1) for authority in (drive.VEHICLE, drive.MCU)]
EVERYTHING: Final = [*TOPICS, *ids.frontiers_of(drive.VEHICLE)]
SEED: Final = 7
SECONDS_MIN: Final = 4
WAIT_S: Final = 60.0  # a timeout, not a measure of speed


@dataclass
class Seen:
    """The seconds of one subscriber. `whole`: the number of signals; `incomplete`: the reason why one is not whole."""

    assembler: Assembler = field(default_factory=lambda: Assembler(TOPICS))
    whole: dict[Time, int] = field(default_factory=dict)
    incomplete: dict[Time, str] = field(default_factory=dict)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self, client: HistoryClient, start: PollRequest, has_begun: asyncio.Event) -> None:
        def connected(is_connected: bool) -> None:
            if is_connected:
                has_begun.set()

        async with GaplessSubscriber(
            client, TOPICS, start=start, assembler=self.assembler, on_connected=connected
        ) as subscriber:
            async for one in subscriber.epochs():
                if one.epoch is not None and one.is_complete:
                    self.whole[one.epoch.time] = len(one.records)
                elif one.epoch is not None:
                    self.incomplete[one.epoch.time] = one.incomplete
                self.came.set()

    async def until(self, time: Time) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(WAIT_S):
            while time not in self.whole and time not in self.incomplete:
                self.came.clear()
                await self.came.wait()


class Stage:
    """A gateway in a process of its own, with the TOML file of this folder, its own port and its own folder."""

    def __init__(self, folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self._port, self._folder, self._stack = free_port(), folder, stack

    async def start(self) -> None:
        text = (HERE / "gateway.toml").read_text()
        text = text.replace('"gateway-data"', f'"{self._folder}/data"').replace("7447", str(self._port))
        path = self._folder / "gateway.toml"
        path.write_text(text)
        child = await Child.start("gateway", "streamer.commands.cli", "run", "--config", str(path), "--json")
        self._stack.push_async_callback(child.stop)
        await child.say("ready")

    async def node(self, authority: str, entity: int) -> ZenohTransport:
        """A uEntity on the gateway's network."""
        config = ZenohConfig(mode="client", connect=(f"tcp/127.0.0.1:{self._port}",))
        return await self._stack.enter_async_context(ZenohTransport(config, LocalUriProvider(authority, entity, 1)))

    async def client(self, entity: int) -> HistoryClient:
        """The uEntity of a reader."""
        local = LocalUriProvider(drive.VEHICLE, entity, 1)
        rpc = await self._stack.enter_async_context(InMemoryRpcClient(await self.node(drive.VEHICLE, entity), local))
        return HistoryClient(rpc, ids.at(drive.VEHICLE))


async def publish(samples: Sequence[drive.SignalSample], nodes: dict[str, UTransport], begin: int, end: int) -> int:
    """Publish signals of one second; the id of each has the time of measurement. Returns their number."""
    for place, sample in enumerate(samples[begin:end], begin):
        message = drive.message(sample)
        at_ms = sample.time_ms + place * drive.ROW_PERIOD_MS // len(samples)
        message.attributes.id.CopyFrom(uuids.UUIDGenerator(lambda at_ms=at_ms: at_ms)())  # type: ignore[misc]
        await nodes[sample.signal.publisher].send(message)
    return end - begin


async def everything(client: HistoryClient) -> list[Record]:
    """All records of these topics in the gateway's history, and the frontiers."""
    request, found = PollRequest(topics=EVERYTHING), list[Record]()
    while True:
        answer = await client.poll(request)
        found += [one for batch in answer.batches for one in decode(batch) or () if isinstance(one, Record)]
        if not answer.more:
            return found
        del request.positions[:]
        request.positions.extend(answer.next)


async def stored(client: HistoryClient, count: int) -> int:
    """Wait until the log has that many signals; returns its newest seq."""
    async with asyncio.timeout(WAIT_S):
        while True:
            records = await everything(client)
            if sum(one.epoch is not None for one in records) >= count:
                return max(one.seq for one in records)
            await asyncio.sleep(0.05)


def by_seconds(asked: argparse.Namespace, start_ms: int) -> dict[int, list[drive.SignalSample]]:
    """The drive, by the Unix millisecond at which each second begins. Raises UStatusError(INVALID_ARGUMENT) if no
    subscriber could join in the middle of a second."""
    seconds: dict[int, list[drive.SignalSample]] = defaultdict(list)
    for sample in drive.load(asked.data, SEED, asked.seconds).samples(start_ms):
        seconds[sample.time_ms].append(sample)
    found = {time: seconds[time] for time in sorted(seconds)[: asked.seconds]}
    counts = [len(samples) for samples in found.values()]
    if len(counts) < SECONDS_MIN or counts[len(counts) // 2] < 2:
        what = f"expected a drive of {SECONDS_MIN} seconds or more, with two signals or more in its middle"
        raise invalid(f"{what}, got {len(counts)} seconds of up to {max(counts, default=0)} signals: take another one")
    return found


async def run(asked: argparse.Namespace, folder: Path) -> int:
    start_ms = uuids.now_ms() // 1_000 * 1_000
    seconds = by_seconds(asked, start_ms)
    times = list(seconds)
    middle = times[len(times) // 2]
    first, second = Seen(), Seen()
    async with contextlib.AsyncExitStack() as stack:
        stage = Stage(folder, stack)
        await stage.start()
        nodes: dict[str, UTransport] = {
            authority: await stage.node(authority, drive.PUBLISHER_UE_ID) for authority in (drive.VEHICLE, drive.MCU)
        }
        looker = await stage.client(0x9000)

        async def join(seen: Seen, entity: int, start: PollRequest) -> None:
            has_begun = asyncio.Event()
            listening = asyncio.create_task(seen.listen(await stage.client(entity), start, has_begun))
            stack.callback(listening.cancel)
            await asyncio.wait_for(has_begun.wait(), WAIT_S)

        await join(first, 0x9001, PollRequest(earliest=True))
        joined_seq = sent = 0
        for time in times:  # one second after the other, but faster than on a road
            samples = seconds[time]
            half = len(samples) // 2 if time == middle else 0
            if half:
                sent += await publish(samples, nodes, 0, half)
                joined_seq = await stored(looker, sent)
                await join(second, 0x9002, PollRequest(latest=True))
            sent += await publish(samples, nodes, half, len(samples))
            await stored(looker, sent)
        for seen in (first, second):
            await seen.until((times[-2],))
        records = await everything(looker)
    has: dict[Time, int] = defaultdict(int)
    for record in records:
        if record.epoch is not None:
            has[record.epoch.time] += 1
    is_right = show(times, middle, has, first, second)
    if asked.pictures is not None:
        draw(asked.pictures, points(records, start_ms), joined_seq)
    return 0 if is_right else 1


def show(times: Sequence[int], middle: int, has: dict[Time, int], first: Seen, second: Seen) -> bool:
    """Print the table; returns True if all seconds are as expected."""
    table = Table("second", "signals in the log", "there from the start", "joined in the middle")
    is_right = True
    for number, time in enumerate(times):
        cells = []
        for seen, since in ((first, times[0]), (second, middle + 1)):
            had = seen.whole.get((time,))
            is_right = is_right and had in (None, has[time,]) and (time,) not in seen.incomplete
            if had is not None:
                cells.append(f"{had}, whole")
            elif time == times[-1]:
                cells.append("goes on")
            elif time < since:
                cells.append("none: it had begun" if time == middle else "none: it was over")
            else:
                cells.append("MISSING")
                is_right = False
        table.add_row(str(number), str(has[time,]), *cells)
    Console().print(table)
    dropped = second.assembler.dropped["filtered"]
    print(f"the subscriber that joined later has dropped {dropped} signals of second {times.index(middle)}", flush=True)
    return is_right and dropped > 0


def points(records: Sequence[Record], start_ms: int) -> list[Point]:
    """The frontiers at each record, in seconds of the drive."""
    found: list[Point] = []
    lower = upper = newest = 0.0
    for record in records:
        if record.epoch is not None:
            newest = max(newest, (uuids.time_ms(record.message.attributes.id) - start_ms) / 1_000)
        elif ids.is_frontiers(record.message.attributes.source):
            (group,) = Frontier.FromString(record.message.payload).groups
            lows, active = ([one.numbers[0] for one in times] for times in (group.lower, group.active))
            lower = (min(lows) - start_ms) / 1_000 if lows else lower
            upper = (max(active) - start_ms) / 1_000 if active else upper
        found.append(Point(record.seq, lower, upper, newest))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.epochs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=int, default=12, help="of the drive")
    parser.add_argument("--data", type=Path, help="a recorded drive (CSV, a row for each second), in place of our own")
    parser.add_argument("--pictures", type=Path, help="a folder for the pictures of this run")
    asked = parser.parse_args()
    if asked.seconds < SECONDS_MIN:
        parser.error(f"--seconds is at least {SECONDS_MIN}: one has to be joined in the middle")
    logs.configure("error")
    with tempfile.TemporaryDirectory(prefix="epochs-") as folder:
        try:
            if asked.pictures is not None:
                asked.pictures.mkdir(parents=True, exist_ok=True)
            return asyncio.run(run(asked, Path(folder)))
        except (OSError, UStatusError) as error:
            parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
