"""The end of a campaign: wait for owed messages, collect reports, and judge.

all run, all ready -> hush -> PUBACKs -> Poll at the end -> drain -> reader, dead letters, metrics -> ledger.judge
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from campaigns.chaos.judges import MqttSender, PublisherSender
from campaigns.chaos.ledger import Verdict
from campaigns.chaos.plan import CLOUD, UP, VEHICLE
from campaigns.chaos.processes import Gateway
from campaigns.chaos.world import World
from history.file.reader import walk
from history.records.chunk import decode
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.ids import is_frontiers
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Frontier

READY_S: Final = 90.0  # after the last fault, for each recovery
QUIET_S: Final = 8.0  # without an arrival, backlog or problem; later nothing more arrives
STUCK_S: Final = 45.0  # without an arrival despite a backlog or a problem: it is stuck
RETRY_S: Final = 75.0  # the same, while records are held because a broker refused them: they are tried once a minute
REFUSED_MIN: Final = 3  # wrong rules, of which at least one must have held something
EPOCHS_MIN: Final = 20  # seen whole
LETTERS_MAX: Final = 10_000  # all that a gateway keeps


def finish(world: World) -> Verdict:
    """Wait for recovery after the last fault is healed."""
    for process in world.processes:
        process.restart_if_ended()
    for process in world.processes:
        process.wait_ready()
    world.await_links(READY_S)
    _await(world, "everything ready", lambda: not _problems(world), lambda: str(_problems(world)))
    if world.plan.follows:  # senders continue until it has, so that there is something to judge
        hub = world.gateways[-1]
        _await(world, f"anything that {hub.name} has followed", lambda: any(_followed(hub).values()), lambda: "nothing")
    world.hush()
    _await(world, "a PUBACK for each message", lambda: not _unacked(world), lambda: f"{_unacked(world)} are missing")
    _await_history(world)
    _drain(world)
    _await_history(world)
    for gateway in world.gateways:
        gateway.metrics()
        world.ledger.gap_records += int(gateway.gap_records)
        _read_letters(world, str(gateway.data_dir))
    if world.plan.epochs:
        _check_epochs(world)
    else:
        _check_reader(world)
    if world.plan.follows:
        _check_followed(world)
    _note(world)
    verdict = world.verdict
    world.ledger.judge(verdict)
    if world.plan.access:
        _check_refused(world)
    verdict.faults |= world.tally
    verdict.kills = sum(count for name, count in world.tally.items() if name.startswith("kill"))
    return verdict


def _await(world: World, what: str, condition: Callable[[], bool], why: Callable[[], str]) -> None:
    """A time-out is reported as a problem."""
    deadline = time.monotonic() + READY_S
    while not condition():
        world.note_ends()
        if time.monotonic() > deadline:
            world.verdict.problems.append(f"{READY_S:.0f} s after the last fault there was not {what}: {why()}")
            return
        time.sleep(0.1)


def _problems(world: World) -> list[str]:
    return [problem for gateway in world.gateways for problem in gateway.problems()]


def _unacked(world: World) -> int:
    senders = world.senders.values()
    mqtt = sum(one.link.unacked for one in senders if isinstance(one, MqttSender))
    return mqtt + sum(one.unacked for one in senders if isinstance(one, PublisherSender))


def _await_history(world: World) -> None:
    """Wait until Poll has shown all present records."""
    now = time.monotonic()
    for poller in world.pollers:
        _await(
            world,
            "an end of the history for Poll",
            lambda poller=poller: poller.caught_up_at >= now,  # type: ignore[misc]
            lambda poller=poller: f"{poller.failed} polls failed",  # type: ignore[misc]
        )


def _drain(world: World) -> None:
    """Wait until all owed messages have arrived, or no more arrive."""
    arrivals, since = -1, time.monotonic()
    while world.ledger.missing():
        if world.ledger.arrivals != arrivals:
            arrivals, since = world.ledger.arrivals, time.monotonic()
        quiet = time.monotonic() - since
        if quiet > QUIET_S:
            is_held = any(one.held() for one in world.gateways)
            waits = is_held or _problems(world) or any(one.backlog() for one in world.gateways)
            if not waits or quiet > (RETRY_S if is_held else STUCK_S):
                return
        time.sleep(0.2)


def _check_reader(world: World) -> None:
    """Check that each record that Poll has shown is in the reader's file."""
    if world.reader is None:
        return
    path = world.folder / "reader.out"
    size, since = -1, time.monotonic()
    while True:
        lines = path.read_text(errors="replace").splitlines()
        have = {line for line in lines if len(line) == 32 and not line.startswith("gap")}
        missing = {id.hex() for id in world.ledger.shown_ids({str(topic) for topic in UP})} - have
        if len(lines) != size:
            size, since = len(lines), time.monotonic()
        if not missing or time.monotonic() - since > 2 * QUIET_S:
            break
        time.sleep(0.2)
    if missing:
        gaps = sum(line.startswith("gap") for line in lines)
        world.verdict.lost += len(missing)
        world.verdict.examples.append(
            f"lost: the reader never had {len(missing)} records that Poll shows ({gaps} gaps reported)"
        )
    world.tally["records read by the reader"] = len(have)


def _check_epochs(world: World) -> None:
    """The vehicle's log has the content of each epoch: the reader must have all of it, or a report of a loss."""
    verdict = world.verdict
    truth, ended = _epochs_of(world.gateways[0].data_dir / "history.db")
    size, since = -1, time.monotonic()
    while True:
        seen = world.epochs_read()
        times = {one["time"] for one in seen}
        owed = {one for one in ended if times and one > min(times)} - times
        if len(seen) != size:
            size, since = len(seen), time.monotonic()
        if (times and not owed) or time.monotonic() - since > 2 * QUIET_S:
            break
        time.sleep(0.2)
    wrong = [one["time"] for one in seen if not one["incomplete"] and set(one["ids"]) != truth.get(one["time"])]
    doubled = sum(len(one["ids"]) - len(set(one["ids"])) for one in seen)
    if owed:
        verdict.lost += len(owed)
        verdict.examples.append(f"lost: epochs that the reader never had: {sorted(owed)[:5]}")
    if wrong or doubled:
        verdict.problems.append(
            f"{len(wrong)} epochs are reported as whole and are not: {wrong[:5]}; {doubled} doubled"
        )
    whole = {one["time"] for one in seen if not one["incomplete"]}
    if len(whole) < EPOCHS_MIN:
        verdict.problems.append(f"only {len(whole)} of {len(truth)} epochs were seen whole: nothing was judged")
    whys = Counter(one["incomplete"] for one in seen if one["incomplete"])
    again = len(seen) - len({json.dumps(one) for one in seen})
    verdict.notes.append(f"epochs: {len(truth)}, {len(whole)} seen whole, {again} seen again; not whole: {dict(whys)}")
    world.tally["epochs seen whole"] = len(whole)


def _epochs_of(path: Path) -> tuple[dict[int, set[str]], set[int]]:
    """Ids of the reader's records in the log, by epoch; and the epochs that have ended."""
    topics = {str(topic) for topic in UP}
    truth: dict[int, set[str]] = {}
    ended: set[int] = set()
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        for _, columns, why in walk(db):
            assert columns is not None, why
            chunk = decode(columns)
            for message, epoch in zip(chunk.messages, chunk.epochs or [None] * len(chunk), strict=True):
                attributes = message.attributes
                if epoch is not None and uris.format(attributes.source) in topics:
                    truth.setdefault(epoch.time[0], set()).add(uuids.to_bytes(attributes.id).hex())
                elif is_frontiers(attributes.source):
                    groups = Frontier.FromString(message.payload).groups
                    ended |= {one.time.numbers[0] for group in groups for one in group.ended}
    return truth, ended & truth.keys()


def _check_refused(world: World) -> None:
    """Refused messages were held, and none became a dead letter or a gap: the rules were wrong only for seconds."""
    verdict = world.verdict
    refused = sum(count for name, count in world.tally.items() if name.startswith("refuse "))
    if refused >= REFUSED_MIN and not world.held_max:
        verdict.problems.append(f"{refused} wrong access rules, and nothing was held: nothing was judged")
    if verdict.reported:
        verdict.problems.append(
            f"{verdict.reported} messages became dead letters or gaps, though refused messages are held"
        )
    verdict.notes.append(f"at most {world.held_max} records were held as a broker refused them")
    if held := sum(int(gateway.held()) for gateway in world.gateways):
        verdict.problems.append(f"{held} addresses are held, though nothing is refused any more")


def _is_of(authority: str, flow: str) -> bool:
    return flow.startswith(f"up://{authority}/")


def _check_followed(world: World) -> None:
    """Followed messages are in the follower's log exactly once and in order, and arrive behind it once, except for
    copies caused by a kill between a delivery and its cursor. No loss may be reported, since nothing was lost."""
    verdict, ledger, is_followed = world.verdict, world.ledger, world.plan.is_followed
    hub = world.gateways[-1]
    for side, gateway in ((VEHICLE, hub), (CLOUD, world.gateways[0])):
        ledger.judge_copies(lambda flow, side=side: is_followed(flow) and _is_of(side, flow), gateway.deaths)  # type: ignore[misc]
    lost = {entry.id for entry in ledger.missing()}  # counted as lost anyway
    unlogged = [entry for entry in ledger.unlogged(is_followed) if _is_of(VEHICLE, entry.flow)]
    missing = [entry for entry in unlogged if entry.id not in lost]
    if missing:
        verdict.lost += len(missing)
        verdict.examples += [f"lost: not in the log of who follows: {entry}" for entry in missing[:3]]
    if ledger.gap_records or any(poller.gaps for poller in world.pollers):
        verdict.problems.append("a gap was reported, though nothing is ever lost where a history is followed")
    verdict.notes.append(f"since its last start {hub.name} has followed: {_followed(hub)}")


def _followed(gateway: Gateway) -> dict[str, int]:
    """Records since its start, by result."""
    return {
        name.partition('what="')[2][:-2]: int(value)
        for name, value in gateway.metrics().items()
        if "followed_records" in name
    }


def _read_letters(world: World, data_dir: str) -> None:
    """Dead letters are reported losses; read by the command line, as a person would."""
    command = [
        sys.executable,
        "-m",
        "streamer.commands.cli",
        "dead-letters",
        "--data-dir",
        data_dir,
        "--json",
        "--limit",
        str(LETTERS_MAX),
    ]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        world.verdict.notes.append(f"dead-letters failed: {answer.stderr.strip()[-300:]}")
    letters = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]
    world.ledger.tell(bytes.fromhex(letter["id"].replace("-", "")) for letter in letters)
    if letters:
        reasons = Counter(f"{letter['code']}: {letter['reason']}"[:120] for letter in letters)
        world.verdict.notes.append(f"{len(letters)} dead letters, most often {reasons.most_common(2)}")


def _note(world: World) -> None:
    """Notes for a person, though nothing is lost."""
    notes = world.verdict.notes
    for poller in world.pollers:
        if poller.gaps:
            notes.append(f"Poll reported {len(poller.gaps)} gaps: {poller.gaps[:5]}")
    notes += [
        f"/readyz of {gateway.name} reported: {one}" for gateway in world.gateways for one in sorted(gateway.reported)
    ]
    for process in world.processes:
        notes += process.notes
        if tracebacks := process.log.read_text(errors="replace").count("Traceback (most recent call last)"):
            notes.append(f"{process.name} printed {tracebacks} tracebacks")
        if process.exits:
            notes.append(f"{process.name} ended by itself {process.exits} times and was started again")
    unheard = sum(one.link.unheard for one in world.senders.values() if isinstance(one, MqttSender))
    if unheard:
        notes.append(f"{unheard} messages were acknowledged by a broker that had no subscriber for them")
