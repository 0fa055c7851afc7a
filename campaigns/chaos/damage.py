"""Damaged files: a stopped gateway's data_dir with one torn file or one flipped bit, then started. Unreported damage
is a failure.

base: half delivered, half waiting -> copy -> tear or flip a bit -> start -> delivered, shown by Poll, reported

In one process and over `transports.local`, for speed: hundreds of starts in a minute. The undamaged base shows the
expected content.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from campaigns.chaos.ledger import Verdict
from campaigns.simulation.network import FaultyNetwork
from history.reading.subscriber import HistoryClient
from streamer.app import Streamer
from streamer.config import Config, loads
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollRequest, Position
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.client import USubscriptionClient

TOPICS: Final = [uris.uri("vehicle1", 0x8001, 1, 0x8001 + place) for place in range(3)]
AFTER: Final = b"after the damage"
ROUNDS: Final = 40  # of one message per topic, before the cloud disconnects, and again after that
SHOWN_MAX: Final = 20  # of each kind of failure; the counts continue
CASE_S_MAX: Final = 15.0  # for a start and all its records; longer is a hang
SETTLE_S_MAX: Final = 3.0  # for the pumps, after it is ready
QUIET_S: Final = 0.15  # without activity of the pumps; later nothing more arrives
# of a problem in /readyz
TELLING: Final = re.compile(r"damage|corrupt|lost|gap|hole|missing|moved aside|answers nobody", re.IGNORECASE)
AIMED: Final = (
    b"egress:cloud",
    b"egress:vehicle",
    b"newest_seq",
    b"indexed_seq",
    b"floor_seq",
    b"stored_bytes",
    b"incarnation",
    b"vehicle1",
    b"cloud",
)
AIMED_SHARE: Final = 0.6  # of the flips
AIMED_BYTES: Final = 48  # around such a word
LOG_FILE: Final = "history.db"  # it may refuse to start: a file of a newer or foreign program stays unchanged
UNREAD: Final = (".lock", "-shm")  # rebuilt from the others, so their content does not matter

CONFIG: Final = """
[streamer]
data_dir = "{data_dir}"
[egress]
retry_min_ms = 1
retry_max_ms = 20
[[endpoint]]
name = "vehicle"
transport = "local"
authorities = ["vehicle1"]
settings = {{ network = "{vehicle}" }}
[[endpoint]]
name = "cloud"
transport = "local"
authorities = ["cloud"]
usubscription = "none"
settings = {{ network = "{cloud}" }}
"""


Content = tuple[bytes, bytes, bytes]  # id, source, payload


@dataclass
class Base:
    """The state before the damage."""

    folder: Path
    incarnation: bytes
    records: dict[int, Content]  # by seq
    waiting: set[int]  # seqs that the cloud has not received
    only: str = ""  # only files whose name begins with this are damaged

    @property
    def first(self) -> int:
        """The records that the reader had before the damage."""
        return min(self.records)


@dataclass
class Seen:
    """The result of a start with damaged files."""

    delivered: list[Content] = field(default_factory=list)
    polled: dict[int, Content] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    letters: set[bytes] = field(default_factory=set)
    peer_gaps: int = 0
    same_log: bool = True
    refused: str = ""  # the reason why it did not start


def _content(message: UMessage) -> Content:
    return uuids.to_bytes(message.attributes.id), message.attributes.source.SerializeToString(), message.payload


def _publication(topic: UUri, text: str) -> UMessage:
    return UMessageBuilder.publish(topic).build_from_upayload(
        UPayload(text.encode(), UPayloadFormat.UPAYLOAD_FORMAT_TEXT)
    )


class Hearer:
    def __init__(self) -> None:
        self.heard: list[Content] = []

    def on_receive(self, message: UMessage) -> None:
        self.heard.append(_content(message))


@dataclass
class Stage:
    """A streamer between two networks in this process, and the clients on them."""

    streamer: Streamer
    vehicle: LocalTransport
    cloud: LocalTransport
    hearer: Hearer

    @property
    def busy(self) -> bool:
        return any(pump.backlog for pump in self.streamer.assembly.pumps)


_numbers = itertools.count()


def _config(data_dir: Path) -> tuple[Config, dict[str, FaultyNetwork]]:
    number = next(_numbers)
    names = {side: f"damage{number}-{side}" for side in ("vehicle", "cloud")}
    config = loads(CONFIG.format(data_dir=data_dir, **names))
    return config, {side: FaultyNetwork.named(name) for side, name in names.items()}


@asynccontextmanager
async def _running(data_dir: Path) -> AsyncIterator[Stage]:
    """Raises UStatusError if it refuses to start, TimeoutError if it is not ready in time, or another error."""
    config, networks = _config(data_dir)
    async with AsyncExitStack() as stack:
        vehicle = LocalTransport.on(networks["vehicle"], LocalUriProvider("vehicle1", 0x8001, 1))
        cloud = LocalTransport.on(networks["cloud"], LocalUriProvider("cloud", 0x9001, 1))
        for node in (vehicle, cloud):
            await stack.enter_async_context(node)
        hearer = Hearer()
        await cloud.register_listener(uris.pattern("vehicle1", 0x8001), hearer)
        streamer = await Streamer.create(config)
        running = asyncio.create_task(streamer.run())
        try:
            ready = asyncio.create_task(streamer.assembly.ready.wait())
            await asyncio.wait({ready, running}, return_when=asyncio.FIRST_COMPLETED, timeout=CASE_S_MAX)
            if not ready.done():
                ready.cancel()
                if running.done():
                    await running
                raise TimeoutError(f"not ready after {CASE_S_MAX:.0f} s: {streamer.parts.problems()}")
            yield Stage(streamer, vehicle, cloud, hearer)
        finally:
            streamer.stop()
            with contextlib.suppress(asyncio.CancelledError, ExceptionGroup):
                await asyncio.wait_for(asyncio.shield(running), CASE_S_MAX)


async def _settled(stage: Stage, has_come: Callable[[], bool]) -> None:
    """Wait until the expected messages have arrived and no more follow; lost ones run into the limit."""
    deadline, quiet = time.monotonic() + SETTLE_S_MAX, time.monotonic()
    heard = -1
    while time.monotonic() < deadline and (not has_come() or time.monotonic() - quiet < QUIET_S):
        if stage.busy or len(stage.hearer.heard) != heard:
            heard, quiet = len(stage.hearer.heard), time.monotonic()
        await asyncio.sleep(0.01)


async def _read_history(stage: Stage, incarnation: bytes, had: int, seen: Seen) -> None:
    """Read as a reader of the log `incarnation` up to `had`; without an incarnation, as a new
    reader."""
    local = LocalUriProvider("vehicle1", 0x9201, 1)
    node = LocalTransport.on(stage.vehicle.network, local)
    async with node, InMemoryRpcClient(node, local) as rpc:
        client = HistoryClient(rpc, uris.uri("vehicle1", 4, 1), timeout_ms=3_000)
        request = PollRequest(topics=[uris.pattern("vehicle1", 0x8001)])
        if incarnation:
            request.positions.append(Position(incarnation=incarnation, seq=had))
        while True:
            reply = await client.poll(request)
            seen.gaps.extend(reply.gaps)
            for batch in reply.batches:
                if not incarnation or batch.incarnation == incarnation:
                    seen.polled |= {
                        seq: _content(UMessage.FromString(data))
                        for seq, data in zip(batch.seq, batch.message, strict=True)
                    }
            if not reply.more:
                return
            del request.positions[:]
            request.positions.extend(reply.next)


async def make_base(folder: Path) -> tuple[Base, Base]:
    """Two data directories with the same content: of a gateway that was killed, and of one that was stopped."""
    live, killed, stopped = folder / "live", folder / "killed", folder / "stopped"
    async with _running(live) as stage:
        async with USubscriptionClient(
            stage.cloud, LocalUriProvider("cloud", 0x9001, 1), authority="vehicle1"
        ) as client:
            for topic in TOPICS:
                await client.subscribe(topic)
        for number in range(ROUNDS):
            await stage.vehicle.send_batch([_publication(topic, f"{number} " + "." * 40) for topic in TOPICS])
        await _settled(stage, lambda: len(stage.hearer.heard) == ROUNDS * len(TOPICS))
        assert len(stage.hearer.heard) == ROUNDS * len(TOPICS), "everything passes before anything is damaged"
        stage.cloud.network.break_()
        for number in range(ROUNDS, 2 * ROUNDS):
            await stage.vehicle.send_batch([_publication(topic, f"{number} " + "." * 40) for topic in TOPICS])
        await asyncio.sleep(1)  # the cursors are on disk
        seen = Seen()
        await _read_history(stage, b"", 0, seen)
        had = set(stage.hearer.heard)
        waiting = {seq for seq, content in seen.polled.items() if content not in had}
        assert len(waiting) == ROUNDS * len(TOPICS), "half of it waits"
        shutil.copytree(live, killed)
        incarnation = stage.streamer.assembly.logs.durable.incarnation
        stage.cloud.network.heal()
        stage.cloud.network.break_()
    shutil.copytree(live, stopped)
    return Base(killed, incarnation, seen.polled, waiting), Base(stopped, incarnation, seen.polled, waiting)


async def observe(base: Base, data_dir: Path) -> Seen:
    """Start on `data_dir`, publish one more message on each topic, and collect the results. Raises any error except
    UStatusError."""
    seen = Seen()
    try:
        async with _running(data_dir) as stage:
            await stage.vehicle.send_batch([_publication(topic, AFTER.decode()) for topic in TOPICS])
            await _settled(stage, lambda: sum(content[2] == AFTER for content in stage.hearer.heard) >= len(TOPICS))
            seen.delivered = list(stage.hearer.heard)
            with contextlib.suppress(UStatusError):  # then it has no results, and is judged by that
                await _read_history(stage, base.incarnation, base.first, seen)
            streamer = stage.streamer
            seen.problems = [problem for problem in streamer.parts.problems() if TELLING.search(problem)]
            seen.peer_gaps = sum(pump.losses.gaps for pump in streamer.assembly.pumps if pump.peer.name == "cloud")
            seen.same_log = streamer.assembly.logs.durable.incarnation == base.incarnation
    except UStatusError as error:
        seen.refused = str(error)
    except ExceptionGroup as group:
        ours, others = group.split(UStatusError)
        if others is not None or ours is None:
            raise
        seen.refused = str(ours.exceptions[0])
    return seen


def judge(base: Base, seen: Seen) -> list[str]:
    """Unreported or wrong results; empty: everything arrived or was reported."""
    if seen.refused:
        return []
    faults: list[str] = []
    truth = {content[0]: content for content in base.records.values()}
    new = [content for content in seen.delivered if content[2] == AFTER]
    for where, contents in (("delivered", seen.delivered), ("shown by Poll", list(seen.polled.values()))):
        wrong = [content for content in contents if content[2] != AFTER and truth.get(content[0]) != content]
        if wrong:
            faults.append(
                f"{len(wrong)} records {where} are not what was published, the first has id {wrong[0][0].hex()}"
            )
    reused = [seq for seq, content in seen.polled.items() if seq in base.records and content[0] != base.records[seq][0]]
    if reused and seen.same_log:
        faults.append(f"{len(reused)} seqs name other records than before, the first {min(reused)}")
    is_reported = _reported_by_poll(seen)
    silent = [seq for seq in base.records if seq != base.first and seq not in seen.polled and not is_reported(seq)]
    if silent:
        faults.append(f"{len(silent)} records can't be read and no gap says so, the first {min(silent)}")
    had = {content[0] for content in seen.delivered}
    missing = [
        seq
        for seq in sorted(base.waiting)
        if base.records[seq][0] not in had and base.records[seq][0] not in seen.letters
    ]
    if len(missing) > seen.peer_gaps and not seen.problems:
        faults.append(
            f"{len(missing)} records were never delivered, {seen.peer_gaps} reported: the first {missing[0]}, "
            f"the last {missing[-1]}"
        )
    if len(new) < len(TOPICS) and not seen.problems:
        faults.append(f"{len(TOPICS) - len(new)} topics of {len(TOPICS)} are not forwarded any more")
    return faults


def _reported_by_poll(seen: Seen) -> Callable[[int], bool]:
    whole = any(gap.reason == Gap.REASON_INCARNATION for gap in seen.gaps)
    ranges = [(gap.after_seq, gap.before_seq) for gap in seen.gaps if gap.reason != Gap.REASON_INCARNATION]
    return lambda seq: whole or any(after < seq and (seq < before or not before) for after, before in ranges)


# The damages


@dataclass(frozen=True)
class Damage:
    base: int  # which base
    file: str
    what: str
    apply: Callable[[Path], None]


def _torn(base: int, file: str, size: int) -> Damage:
    def apply(path: Path) -> None:
        with path.open("r+b") as opened:
            opened.truncate(size)

    return Damage(base, file, f"torn at {size}", apply)


def _flipped(base: int, file: str, at: int, bit: int) -> Damage:
    def apply(path: Path) -> None:
        with path.open("r+b") as opened:
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ 1 << bit]))

    return Damage(base, file, f"bit {bit} of byte {at} turned", apply)


def _files(bases: list[Base]) -> list[tuple[int, str, Path]]:
    """(base, name, path) of every file whose content matters."""
    return [
        (number, path.relative_to(base.folder).as_posix(), path)
        for number, base in enumerate(bases)
        for path in sorted(base.folder.rglob("*"))
        if path.is_file() and path.stat().st_size and path.name.startswith(base.only) and not path.name.endswith(UNREAD)
    ]


def tears(bases: list[Base], rng: random.Random) -> Iterator[Damage]:
    """Small files are cut at every byte, large ones at some sixty offsets and then at random ones; endless, in random
    order."""
    files = _files(bases)
    first: list[Damage] = []
    for number, name, path in files:
        size = path.stat().st_size
        first += [_torn(number, name, max(0, at - rng.choice((0, 1)))) for at in range(0, size, max(1, size // 60))]
    rng.shuffle(first)
    yield from first
    while True:
        number, name, path = rng.choice(files)
        yield _torn(number, name, rng.randrange(path.stat().st_size))


def flips(bases: list[Base], rng: random.Random) -> Iterator[Damage]:
    """Bits anywhere in any file, and alternately near important words: cursors, counters, addresses. Without end."""
    files = _files(bases)
    aims = {
        path: [match.start() for word in AIMED for match in re.finditer(re.escape(word), path.read_bytes())]
        for _, _, path in files
    }
    while True:
        number, name, path = rng.choice(files)
        at = rng.randrange(path.stat().st_size)
        if (near := aims[path]) and rng.random() < AIMED_SHARE:
            at = min(max(0, rng.choice(near) + rng.randint(-16, AIMED_BYTES)), path.stat().st_size - 1)
        yield _flipped(number, name, at, rng.randrange(8))


KINDS: Final = {"torn": tears, "flips": flips}


async def _case(base: Base, damage: Damage, folder: Path, verdict: Verdict) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base.folder, folder)
    damage.apply(folder / damage.file)
    where = f"{base.folder.name} {damage.file}, {damage.what}"
    try:
        seen = await asyncio.wait_for(observe(base, folder), 3 * CASE_S_MAX)
    except Exception as error:
        verdict.problems.append(f"{where}: the start broke with {error!r}"[:300])
        return
    faults = judge(base, seen)
    if seen.refused:
        verdict.faults["refused to start"] = verdict.faults.get("refused to start", 0) + 1
        # one damaged part must not stop the others
        destination = verdict.notes if damage.file.startswith(LOG_FILE) else verdict.problems
        destination.append(f"{where}: refused to start: {seen.refused[:160]}")
    elif seen.gaps or seen.problems or seen.peer_gaps or not seen.same_log:
        verdict.reported += 1
    if faults:
        verdict.unreported += 1
        verdict.examples.append(f"unreported: {where}: {'; '.join(faults)}")


async def campaign(kind: str, seed: int, seconds: float, folder: Path, only: str = "") -> Verdict:
    """Try as many damages as `seconds` allow, on files whose name begins with `only`."""
    structlog.configure(processors=[_silence], cache_logger_on_first_use=False)
    rng, verdict = random.Random(f"{seed}/{kind}"), Verdict()
    bases = list(await make_base(folder))
    for base in bases:
        base.only = only
    for base in bases:  # without damage nothing may be reported
        shutil.copytree(base.folder, folder / "whole", dirs_exist_ok=True)
        faults = judge(base, await observe(base, folder / "whole"))
        shutil.rmtree(folder / "whole")
        if faults:
            verdict.problems.append(f"{base.folder.name}, not damaged: {faults}")
    deadline = time.monotonic() + seconds
    cases: dict[str, int] = {}
    for damage in KINDS[kind](bases, rng):
        if time.monotonic() > deadline:
            break
        await _case(bases[damage.base], damage, folder / "case", verdict)
        cases[damage.file] = cases.get(damage.file, 0) + 1
    verdict.faults |= {f"{kind}: {name}": count for name, count in cases.items()}
    for shown in (verdict.examples, verdict.problems, verdict.notes):
        if len(shown) > SHOWN_MAX:
            shown[SHOWN_MAX:] = [f"... and {len(shown) - SHOWN_MAX} more"]
    return verdict


def _silence(*_: object) -> str:
    raise structlog.DropEvent


__all__ = ["KINDS", "campaign"]
