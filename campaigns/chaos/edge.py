"""The HTTP edge between its clients, a publisher of items and a backend, while all of them are hurt.

ItemPublishers --> gateway (killed, stopped, paused) --> EventReaders, PageReader: each record once, in the log's order
                     ^    '- proxies, which cut --> HeldReaders: each line once, in order, what was never published, too
ItemBackend <--------'  (restarted)

What a publisher was answered for is one record. A channel with a link has what was never published, too, unless its
backend was away; then the gap is counted.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from campaigns.chaos.ledger import EXAMPLES_MAX, Verdict
from campaigns.chaos.processes import ChaosError, Gateway
from campaigns.chaos.proxy import Proxy
from campaigns.chaos.web import EventReader, HeldReader, ItemBackend, ItemPublisher, PageReader, Party, Seen
from transports.ports import free_port

NAME: Final = "http-edge"
PAUSE_S_MAX: Final = 0.6  # between two faults
DRAIN_S_MAX: Final = 60.0
PUBLISH_PAUSE_S: Final = 0.015
LOSES: Final = 0.03  # of the items; each makes the next one wait
KEY: Final = b"key of the publishers, 32 bytes."
PLAIN, LINKED = "plain", "linked"  # channels: without a link, and with one
TOPICS: Final = {PLAIN: "//cloud/8001/1/8001", LINKED: "//cloud/8001/1/8002"}
ALL: Final = "//cloud/8001/1/FFFF"
CONFIG: Final = """[streamer]
data_dir = "{data}"
admin = "127.0.0.1:{admin}"
log_level = "warning"
[http]
listen = "127.0.0.1:{http}"
client = "//cloud/9001/1/0"
send_s = 5
keep_alive_s = 2
[grip]
publish = "127.0.0.1:{publish}"
publish_key_file = "{key}"
sequence_wait_s = 0.05
[[channel]]
name = "plain"
topic = "//cloud/8001/1/8001"
[[channel]]
name = "linked"
topic = "//cloud/8001/1/8002"
link = "http://127.0.0.1:{backend}/link/linked"
[[proxy]]
prefix = "/held/"
backend = "http://127.0.0.1:{backend}"
timeout_s = 5
[[endpoint]]
name = "cloud"
transport = "local"
authorities = ["cloud"]
usubscription = "none"
"""


class EdgeWorld:
    """The gateway with an HTTP edge, and who meets it."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.rng, self.tally, self.verdict = rng, Counter[str](), Verdict()
        self._folder = folder
        http, publish, admin = free_port(), free_port(), free_port()
        self.backend = ItemBackend(free_port())
        key, config = folder / "publishers.key", folder / "gateway.toml"
        key.write_bytes(KEY)
        places = {"data": folder / "data", "admin": admin, "http": http, "publish": publish, "key": key}
        config.write_text(CONFIG.format(backend=self.backend.port, **places))
        self.gateway = Gateway("gateway", folder, config, folder / "data", admin, self.tally, {})
        self.proxies = [Proxy(http) for _ in range(2)]
        cut, mended = self.proxies
        self.publishers = [self._publisher(publish, channel) for channel in TOPICS]
        self.events: list[EventReader] = [
            EventReader("events of all", cut.port, [ALL]),
            EventReader("events of one", mended.port, [TOPICS[PLAIN]]),
            EventReader("events without cuts", http, [ALL]),
        ]
        self.pages = PageReader("pages", cut.port, [ALL])
        self.held = [
            HeldReader(f"held {name} {place}", port, name)
            for name in TOPICS
            for place, port in enumerate((cut.port, mended.port, http))
        ]
        self._truth = PageReader("truth", http, [ALL], max=10_000)  # asked when all is over

    def _publisher(self, port: int, channel: str) -> ItemPublisher:
        rng = random.Random(self.rng.random())
        return ItemPublisher(port, self.backend, channel, pause_s=PUBLISH_PAUSE_S, loses=LOSES, key=KEY, rng=rng)

    @property
    def parties(self) -> list[Party]:
        return [*self.publishers, *self.events, self.pages, *self.held]

    def start(self) -> None:
        self.backend.start()
        self.gateway.start()
        self.gateway.wait_ready()
        for party in self.parties:
            party.begin()

    def heal(self) -> None:
        for proxy in self.proxies:
            proxy.mend()
        self.backend.start()
        self.gateway.restart_if_ended()
        self.gateway.resume()
        self.gateway.wait_ready()

    def close(self) -> None:
        for party in self.parties:
            party.ended.set()
        self.gateway.close()
        for proxy in self.proxies:
            proxy.close()
        self.backend.stop()

    # Judging

    def drain(self) -> list[Seen]:
        """Ends the publishers, waits until all readers have everything, and returns the records."""
        for publisher in self.publishers:
            publisher.end()
        self._truth.begin()
        self._await("the pages end", lambda: self._truth.is_at_end)
        records = list(self._truth.seen)
        self._truth.end()
        for reader in (*self.events, self.pages):
            self._await_events(reader, len(of_topics(records, reader.topics)))
        for one in self.held:
            self._await_line(one, self.backend.newest[one.channel])
        if problems := self.gateway.problems():
            self.verdict.problems.append(f"not ready at the end: {problems}")
        return records

    def _await_events(self, reader: EventReader | PageReader, count: int) -> None:
        self._await(f"{reader.name} has {count} events", lambda: len(reader.seen) >= count)

    def _await_line(self, reader: HeldReader, number: int) -> None:
        self._await(f"{reader.name} has line {number}", lambda: reader.last >= number)

    def _await(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DRAIN_S_MAX
        while not holds() and not any(one.failures for one in self.parties):
            if time.monotonic() > deadline:
                self.verdict.problems.append(f"not within {DRAIN_S_MAX:.0f} s: {what}")
                return
            time.sleep(0.02)

    def judge(self, records: list[Seen]) -> Verdict:
        verdict, judge = self.verdict, EdgeJudge(self.verdict)
        for one in (*self.parties, self._truth):
            verdict.problems += one.failures
        for reader in (*self.events, self.pages, self._truth):
            verdict.problems += [f"{reader.name}: a gap was reported: {gap}" for gap in reader.gaps[:1]]
        for publisher in self.publishers:
            judge.channel(publisher, records)
        for reader in (*self.events, self.pages):
            judge.events(reader, records)
        for one in self.held:
            judge.held(one, self.backend.newest[one.channel])
        verdict.kills = sum(count for what, count in self.tally.items() if what.startswith("kill"))
        verdict.faults = dict(self.tally)
        verdict.notes += self.gateway.notes
        if self.gateway.exits:
            verdict.problems.append(f"the gateway ended by itself {self.gateway.exits} times")
        connects = ", ".join(f"{one.name} {one.connects}" for one in (*self.events, self.pages, *self.held))
        verdict.notes.append(f"answers begun: {connects}; requests to the backend: {self.backend.asked}")
        return verdict


class EdgeJudge:
    """Counts in `verdict`."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    def channel(self, publisher: ItemPublisher, records: list[Seen]) -> None:
        """The records of a channel against what its publisher was answered for."""
        name, verdict = publisher.channel, self.verdict
        lines = [int(line) for one in of_topics(records, [TOPICS[name]]) for line in _text(one).split()]
        verdict.acked += len(publisher.answered)
        counts = Counter(lines)
        if lost := [one for one in publisher.answered if one not in counts]:
            self._count("lost", len(lost), f"{name}: answered, and no record: {lost[:5]}")
        if doubled := [one for one, count in counts.items() if count > 1]:
            self._count("doubled", len(doubled), f"{name}: recorded twice: {doubled[:5]}")
        if late := [pair for pair in itertools.pairwise(lines) if pair[0] > pair[1]]:
            self._count("reordered", len(late), f"{name}: recorded in this order: {late[:5]}")
        recovered = [one for one in publisher.lost if one in counts]
        if name == PLAIN and recovered:
            self._count("wrong", len(recovered), f"{name}: never published, and recorded: {recovered[:5]}")
        elif name == LINKED:
            verdict.reported += len(recovered)
            verdict.notes.append(f"of {len(publisher.lost)} lost items, the link had {len(recovered)} in time")
        if strange := counts.keys() - {*publisher.answered, *publisher.lost}:
            self._count("wrong", len(strange), f"{name}: never made: {sorted(strange)[:5]}")

    def events(self, reader: EventReader | PageReader, records: list[Seen]) -> None:
        """What a reader has got against the records: the same, in the same order."""
        name, wanted = reader.name, {one["seq"]: one for one in of_topics(records, reader.topics)}
        numbers = [one["seq"] for one in reader.seen]
        self.verdict.delivered += len(numbers)
        if lost := wanted.keys() - set(numbers):
            self._count("lost", len(lost), f"{name}: records without an event: {sorted(lost)[:5]}")
        if twice := len(numbers) - len(set(numbers)):
            self._count("doubled", twice, f"{name}: {twice} events came twice")
        if numbers != sorted(numbers):
            self._count("reordered", 1, f"{name}: its events are not in the order of the log")
        if wrong := [one for one in reader.seen if wanted.get(one["seq"]) != one]:
            self._count("wrong", len(wrong), f"{name}: not as it was recorded: {wrong[0]}")

    def held(self, reader: HeldReader, newest: int) -> None:
        self.verdict.delivered += reader.got
        if reader.last != newest:
            self._count("lost", newest - reader.last, f"{reader.name} has lines up to {reader.last} of {newest}")

    def _count(self, what: str, count: int, example: str) -> None:
        setattr(self.verdict, what, getattr(self.verdict, what) + count)
        if len(self.verdict.examples) < EXAMPLES_MAX:
            self.verdict.examples.append(f"{what}: {example}")


def of_topics(records: Iterable[Seen], topics: list[str]) -> list[Seen]:
    return [one for one in records if topics == [ALL] or one["topic"].removeprefix("up:") in topics]


def _text(record: Seen) -> str:
    """An item is a number, which is JSON; several of a link are a text."""
    return str(record["json"]) if "json" in record else str(record["text"])


# Faults


def _sleep(world: EdgeWorld, low_s: float, high_s: float) -> None:
    time.sleep(world.rng.uniform(low_s, high_s))


def kill(world: EdgeWorld) -> None:
    world.gateway.kill()
    _sleep(world, 0, 0.3)
    world.gateway.start()
    if world.rng.random() < 0.6:
        world.gateway.wait_ready()


def kill_early(world: EdgeWorld) -> None:
    world.gateway.kill()
    world.gateway.start()
    time.sleep(world.rng.uniform(0.5, 1.3) * world.gateway.start_s)
    kill(world)


def stop(world: EdgeWorld) -> None:
    world.gateway.stop()
    world.gateway.start()
    world.gateway.wait_ready()


def pause(world: EdgeWorld) -> None:
    world.gateway.pause()
    _sleep(world, 0.2, 2)
    world.gateway.resume()


def cut(world: EdgeWorld) -> None:
    """Cuts clients' connections several times in a row."""
    for _ in range(world.rng.randint(1, 10)):
        proxy = world.rng.choice(world.proxies)
        proxy.cut()
        _sleep(world, 0, 0.1)
        proxy.mend()
        world.tally["cut clients"] += 1
        _sleep(world, 0, 0.2)


def stall(world: EdgeWorld) -> None:
    """Clients take nothing, and come back before or after they are cut off."""
    proxy = world.rng.choice(world.proxies)
    proxy.stall()
    world.tally["stall clients"] += 1
    _sleep(world, 0.2, 3)
    if world.rng.random() < 0.5:
        proxy.cut()
    proxy.mend()


def restart_backend(world: EdgeWorld) -> None:
    world.backend.stop()
    world.tally["stop backend"] += 1
    _sleep(world, 0, 1.5)
    if world.rng.random() < 0.3:
        world.gateway.kill()
        world.gateway.start()
    world.backend.start()


FAULTS: Final[dict[Callable[[EdgeWorld], None], int]] = {
    cut: 6, kill: 4, kill_early: 1, stop: 1, pause: 1, stall: 2, restart_backend: 3
}  # fmt: skip


def campaign(seed: int, seconds: float, folder: Path) -> Verdict:
    """Does not raise for failures of the world: they are in the verdict."""
    world = EdgeWorld(folder, random.Random(f"{seed}/{NAME}"))
    began = time.monotonic()
    try:
        world.start()
        world.verdict.phases["build"] = round(time.monotonic() - began, 1)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not any(one.failures for one in world.parties):
            _sleep(world, 0, PAUSE_S_MAX)
            world.rng.choices(list(FAULTS), list(FAULTS.values()))[0](world)
            world.gateway.restart_if_ended()
        world.heal()
        verdict = world.judge(world.drain())
    except ChaosError as error:
        world.verdict.problems.append(str(error))
        verdict = world.verdict
    finally:
        world.close()
    verdict.phases["all"] = round(time.monotonic() - began, 1)
    return verdict
