"""The faults of a world. Each function causes a fault, waits a random time, and heals it before it returns.

A gateway may be left starting, so that the next fault meets it before it is ready. `world.gateway` is the one that is
affected.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Callable
from typing import Final

from campaigns.chaos import machine
from campaigns.chaos.ledger import Entry
from campaigns.chaos.plan import Refusal, access_rules
from campaigns.chaos.processes import Process
from campaigns.chaos.world import World

# with 7 days of retention none of these alone deletes a record by age
LEAPS_S: Final = (-30 * 86_400, -86_400, -3_600, -30, 30, 3_600, 86_400)
BACK_S_MAX: Final = 60.0  # for gateways to find a broker after its restart
BURST: Final = (5, 20)  # cuts in a row
# a wrong access rule lasts this long: otherwise messages in flight behind a refused one are accepted, and overtake it
WRONG_S_MIN: Final = 0.3
SOME: Final = 0.6  # of the wrong access rules concern some topics, the others all
WHILE_REFUSED: Final = (
    *("kill_gateway", "kill_gateway", "kill_gateway_early", "stop_gateway", "kill_all"),
    *("net_cut", "net_cut", "kill", "stop", "another rule", "right for a moment"),
)
PASS_S_MAX: Final = 3.0  # for a message to pass a healed link
ERRORS: Final = (errno.EIO, errno.ENOSPC, errno.EROFS)


def _sleep(world: World, low_s: float, high_s: float) -> None:
    time.sleep(world.rng.uniform(low_s, high_s))


def _maybe_ready(world: World, process: Process, chance: float = 0.6) -> None:
    if world.rng.random() < chance:
        process.wait_ready()


def _again(world: World, process: Process) -> None:
    """Down for a moment, then up, perhaps before it is ready."""
    _sleep(world, 0, 0.8)
    process.start()
    _maybe_ready(world, process)


def kill_gateway(world: World) -> None:
    world.gateway.kill()
    _again(world, world.gateway)


def kill_gateway_early(world: World) -> None:
    """Killed several times before it is ready."""
    gateway, rng = world.gateway, world.rng
    gateway.kill()
    for _ in range(rng.randint(1, 3)):
        gateway.start()
        time.sleep(rng.uniform(0.3, 1.3) * gateway.start_s)
        gateway.kill()
    _again(world, gateway)


def stop_gateway(world: World) -> None:
    world.gateway.stop()
    _again(world, world.gateway)


def pause_gateway(world: World) -> None:
    """Paused for a while; sometimes killed while paused."""
    world.gateway.pause()
    _sleep(world, 0.2, 3)
    if world.rng.random() < 0.3:
        world.gateway.kill()
        _again(world, world.gateway)
    else:
        world.gateway.resume()


def kill_service(world: World) -> None:
    assert world.service is not None
    world.service.kill()
    if world.rng.random() < 0.5:
        world.gateway.kill()
        world.gateway.start()
    _again(world, world.service)


def stop_service(world: World) -> None:
    assert world.service is not None
    world.service.stop()
    _again(world, world.service)


def kill_reader(world: World) -> None:
    assert world.reader is not None
    world.reader.kill()
    if world.rng.random() < 0.5:
        world.gateway.kill()
        _again(world, world.gateway)
    _sleep(world, 0, 0.5)
    world.reader.start()
    _maybe_ready(world, world.reader)


def kill_all(world: World) -> None:
    """All processes of ours at once, as in a power cut."""
    parts = (*world.gateways, world.service, world.reader, world.publisher)
    ours = [one for one in parts if one is not None]
    for process in ours:
        process.kill()
    _sleep(world, 0, 1)
    world.rng.shuffle(ours)
    for process in ours:
        process.start()
    _maybe_ready(world, world.gateway)


# Brokers


def _side(world: World) -> str:
    return world.rng.choice(sorted(world.brokers))


def _late_at(world: World, side: str) -> set[str]:
    """Flows of that side which were subscribed to after the world was built, and which the broker knows already: a
    gateway waits for one that is away only a moment before it answers a Subscribe, and a publisher may be connected to
    it again before the gateway is."""
    if world.plan.service is None or not world.await_gateways(BACK_S_MAX):
        return set()
    return {flow.name for flow in world.flows if flow.side == side} - {flow.name for flow in world.plan.flows}


def broker_stop(world: World) -> None:
    """A stop: it keeps acknowledged messages."""
    side = _side(world)
    _stop_broker(world, side)
    world.ledger.not_known_yet(_late_at(world, side))


def _stop_broker(world: World, side: str) -> None:
    broker = world.brokers[side]
    broker.stop()
    _sleep(world, 0, 3)
    if world.rng.random() < 0.3:
        world.gateway.kill()
        world.gateway.start()
    broker.start()
    broker.wait_ready()


def broker_pause(world: World) -> None:
    side = _side(world)
    broker = world.brokers[side]
    broker.pause()
    _sleep(world, 0.2, 4)
    hung = world.rng.random() < 0.3
    if hung:
        world.gateway.stop()  # so that it cannot disconnect cleanly
    broker.resume()
    if hung:
        _again(world, world.gateway)
    world.ledger.not_known_yet(_late_at(world, side))


def broker_kill(world: World) -> None:
    """A kill: it loses acknowledged messages that it has not sent, and subscriptions since its last save.

    A plain client loses these, too, so they do not count.
    """
    side = _side(world)
    _kill_broker(world, side)
    _resubscribes(world, side)
    _sleep(world, 0, 2)


def _kill_broker(world: World, side: str, refusal: Refusal | None = None) -> None:
    def never_had(entry: Entry) -> bool:
        return refusal is not None and refusal.has_kept(entry.flow, entry.sent_at)

    broker = world.brokers[side]
    broker.kill()
    for link in world.links_of(side):
        link.lost.wait(10)  # by then the gateway has read the packets in its connection
    sent_there = {flow.name for flow in world.flows if flow.side == side}
    world.ledger.exclude(lambda flow: flow in sent_there, acked_only=True)  # others are sent to it again
    world.ledger.exclude(lambda flow: flow not in sent_there, acked_only=False, but_for=never_had)
    _sleep(world, 0, 2)
    if world.rng.random() < 0.3:
        world.gateway.kill()
        world.gateway.start()
    broker.start()
    broker.wait_ready()


def _resubscribes(world: World, side: str) -> None:
    """After its kill a broker did not know for a while what the gateway wants."""
    late = _late_at(world, side)
    world.ledger.exclude(lambda flow: flow in late, acked_only=False)


def broker_refuse(world: World) -> None:
    """A wrong access rule: for a while the gateways may not publish to some topics, or to any. Meanwhile the
    gateways and the broker are killed and stopped, links are cut, and another wrong rule may come."""
    side, rng = _side(world), world.rng
    refusal, killed, stopped = _refuse(world, side), False, False
    _sleep(world, WRONG_S_MIN, 3)
    for what in rng.choices(WHILE_REFUSED, k=rng.randint(0, 3)):
        world.log(f"  {what}")
        if what == "kill":
            _kill_broker(world, side, refusal)
            killed = True
        elif what == "stop":
            _stop_broker(world, side)
            stopped = True
        elif what == "another rule":
            refusal = _refuse(world, side)
        elif what == "right for a moment":  # wrong again while held records are read back
            world.brokers[side].change_access(access_rules(()))
            _sleep(world, 0, 2.5)
            refusal = _refuse(world, side)
        else:
            world.gateway = rng.choice(world.gateways)
            FAULTS[what](world)
        _sleep(world, WRONG_S_MIN, 1.5)
    held = sum(int(gateway.held("records")) for gateway in world.gateways)
    world.held_max = max(held, world.held_max)
    world.log(f"  the right rule, {held} records are held")
    world.brokers[side].change_access(access_rules(()))
    if killed:
        _resubscribes(world, side)
    elif stopped:
        world.ledger.not_known_yet(_late_at(world, side))


def _refuse(world: World, side: str) -> Refusal:
    flows = [flow for flow in world.flows if world.plan.is_sent_to(side, flow.source)]
    some = world.rng.sample(flows, world.rng.randint(1, len(flows))) if world.rng.random() < SOME else None
    topics = None if some is None else sorted({world.plan.topic_at(side, flow.source, flow.sink) for flow in some})
    world.brokers[side].change_access(access_rules(topics))
    world.tally[f"refuse {'all' if topics is None else 'some'} at {side}"] += 1
    world.log(f"  {side} refuses {'everything' if topics is None else topics}")
    return Refusal(side, world.ledger.now(), None if some is None else frozenset(flow.name for flow in some))


# Networks


def _proxy(world: World, what: str) -> None:
    side = world.rng.choice(sorted(world.proxies))
    proxy = world.proxies[side]
    getattr(proxy, what)()
    world.tally[f"{what} {side}"] += 1
    _sleep(world, 0.1, 3)
    if world.rng.random() < 0.3:
        world.gateway.kill()
        world.gateway.start()
    proxy.mend()


def net_cut(world: World) -> None:
    _proxy(world, "cut")


def net_stall(world: World) -> None:
    _proxy(world, "stall")


def net_half_close(world: World) -> None:
    _proxy(world, "half_close")


def net_burst(world: World) -> None:
    """Cut as soon as a message has passed, several times in a row."""
    for _ in range(world.rng.randint(*BURST)):
        side = world.rng.choice(sorted(world.proxies))
        before, deadline = world.ledger.arrivals, time.monotonic() + PASS_S_MAX
        while world.ledger.arrivals == before and time.monotonic() < deadline:
            time.sleep(0.01)
        world.tally[f"cut {side}" if world.ledger.arrivals > before else f"cut {side} while nothing came"] += 1
        _sleep(world, 0, 0.1)
        world.proxies[side].cut()
        _sleep(world, 0.01, 0.15)
        world.proxies[side].mend()


# Publishers with a history of their own


def kill_publisher(world: World) -> None:
    assert world.publisher is not None
    world.publisher.kill()
    if world.rng.random() < 0.3:
        world.gateway.kill()
        world.gateway.start()
    _again(world, world.publisher)


def stop_publisher(world: World) -> None:
    assert world.publisher is not None
    world.publisher.stop()
    _again(world, world.publisher)


def pause_publisher(world: World) -> None:
    assert world.publisher is not None
    world.publisher.pause()
    _sleep(world, 0.2, 3)
    world.publisher.resume()


# Disk and clock


def disk_full(world: World) -> None:
    """The disk is full for a while; sometimes the gateway starts, or is killed, on it."""
    filler = world.data_dir / "filler"
    world.tally["disk full"] += 1
    try:
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue
        _sleep(world, 0.5, 3)
        if world.rng.random() < 0.4:
            world.gateway.kill()
            world.gateway.start()
            _sleep(world, 0.5, 1.5 * world.gateway.start_s)
    finally:
        filler.unlink(missing_ok=True)
    world.gateway.restart_if_ended()
    _maybe_ready(world, world.gateway)


def disk_reader(world: World) -> None:
    """A reader of the log's file keeps its write-ahead log from being emptied for a while."""
    with contextlib.suppress(sqlite3.Error):  # it is being created, or the disk has no space for a reader
        path = world.data_dir / "history.db"
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM chunk").fetchone()
            world.tally["disk reader"] += 1
            _sleep(world, 0.5, 4)


def disk_read_only(world: World) -> None:
    """It starts on a disk that cannot be written, and later can."""
    world.gateway.kill()
    if machine.remount(world.data_dir, read_only=True):
        world.tally["disk read-only"] += 1
        world.gateway.start()
        _sleep(world, 0.5, 2 * world.gateway.start_s)
        machine.remount(world.data_dir, read_only=False)
    world.gateway.restart_if_ended()
    _maybe_ready(world, world.gateway)


def io_error(world: World) -> None:
    """All writes from the n-th on fail, or only that one."""
    assert world.io is not None
    rng = world.rng
    world.io.arm(rng.choice(ERRORS), skip=rng.randint(0, 60), times=rng.choice((1, 3, -1)))
    world.tally["I/O error"] += 1
    _sleep(world, 0.5, 2.5)
    if rng.random() < 0.4:
        world.gateway.kill()
        world.gateway.start()
        _sleep(world, 0.5, 1.5 * world.gateway.start_s)
    world.io.disarm()
    world.gateway.restart_if_ended()
    _maybe_ready(world, world.gateway)


def io_die(world: World) -> None:
    """Killed in the middle of a write: half of it is on disk."""
    assert world.io is not None
    for _ in range(world.rng.randint(1, 3)):
        world.io.arm(machine.DIE, skip=world.rng.choice((0, 1, 2, 3, 5, 8, 13, 30, 80)), times=1)
        deadline = time.monotonic() + 2 + world.gateway.start_s
        while world.gateway.running and time.monotonic() < deadline:
            time.sleep(0.02)
        world.io.disarm()
        time.sleep(0.1)  # a process that has met it is dead by then
        world.gateway.restart_if_ended()
    _maybe_ready(world, world.gateway)


def clock_leap(world: World) -> None:
    assert world.clock is not None
    ahead = world.rng.choice(LEAPS_S)
    world.clock.set(ahead)
    world.tally["clock leap"] += 1
    _sleep(world, 0.3, 3)
    if world.rng.random() < 0.4:
        world.gateway.kill()
        _again(world, world.gateway)
    if world.rng.random() < 0.5:
        world.clock.set(0)


FAULTS: Final[dict[str, Callable[[World], None]]] = {
    one.__name__: one
    for one in (
        kill_gateway,
        kill_gateway_early,
        stop_gateway,
        pause_gateway,
        kill_service,
        stop_service,
        kill_reader,
        kill_all,
        broker_stop,
        broker_pause,
        broker_kill,
        broker_refuse,
        net_cut,
        net_stall,
        net_half_close,
        net_burst,
        kill_publisher,
        stop_publisher,
        pause_publisher,
        disk_full,
        disk_reader,
        disk_read_only,
        io_error,
        io_die,
        clock_leap,
    )
}


def heal(world: World) -> None:
    """End all faults that lasted when the time ran out."""
    for proxy in world.proxies.values():
        proxy.mend()
    if world.io is not None:
        world.io.disarm()
    if world.clock is not None:
        world.clock.set(0)
    if world.plan.disk_bytes and not os.access(world.data_dir, os.W_OK):
        machine.remount(world.data_dir, read_only=False)
