"""The attackers, each a process of its own: `python -m tests.security.attackers NAME '{"places": ..., "options": ...}'`.

Says {"attacking": true} when it is connected and begins, and what came of it in its last line. An attacker that wants to stop itself, so
that it reads nothing any more, does so; whoever started it ends it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from chaos.judges import Caller, MqttLink, ZenohLink, mqtt_caller
from chaos.wire import NOTIFICATION, PUBLISH, REQUEST, Message, Uri, field, new_id
from tests.security.raw import RawMqtt

MARK: Final = b"SECRET-OF-A-PAYLOAD"  # no log line may show it
ME: Final = Uri("cloud", 0xA001, 1, 0)  # who the attacker says it is, on the cloud's broker
FOREVER_MS: Final = 7 * 24 * 3_600_000
PACED_BATCHES: Final = 20  # a second


@dataclass(frozen=True)
class Places:
    """Where the networks are, and how much is to be done."""

    home: str
    cloud: int
    zenoh: int
    admin: int
    fleet: int = 0
    lost: int = 0
    count: int = 1
    seconds: float = 5.0
    bytes: int = 0
    kind: str = ""

    @property
    def history(self) -> Uri:
        return Uri(self.home, 4, 1, 2)


Told = dict[str, Any]
Attacker = Callable[[Places], Told]
ATTACKERS: Final[dict[str, Attacker]] = {}


def attacker(function: Attacker) -> Attacker:
    ATTACKERS[function.__name__] = function
    return function


def begin() -> None:
    print(json.dumps({"attacking": True}), flush=True)


def paced(at: Places, batches_a_second: int = PACED_BATCHES) -> Iterator[range]:
    """The numbers 0 to `count`, in batches, spread over `seconds`; one that lags behind does not wait."""
    began, done, batches = time.monotonic(), 0, max(1, round(at.seconds * batches_a_second))
    for batch in range(batches):
        upto = at.count * (batch + 1) // batches
        yield range(done, upto)
        done = upto
        time.sleep(max(0.0, began + (batch + 1) / batches_a_second - time.monotonic()))


def payload(size: int) -> bytes:
    """MARK, and noise up to `size`."""
    return (MARK + random.randbytes(min(size, 1 << 16)) * (size // (1 << 16) + 1))[: max(size, len(MARK))]


def made_up(number: int) -> Uri:
    """The topic of that number, of nobody."""
    return Uri("cloud", 0xB000 + number // 0x4000, 1, 0x8000 + number % 0x4000)


@attacker
def topics(at: Places) -> Told:
    """`count` topics that nobody has ever heard of: publishes on a recorded pattern, or notifications to sinks behind the gateway."""
    link = RawMqtt(at.cloud, "attacker")
    begin()
    for batch in paced(at):
        if at.kind == "notifications":
            found = [Message(new_id(), NOTIFICATION, made_up(one), Uri("vehicle1", 0xC000 + one % 1_000, 1, 0), MARK) for one in batch]
        else:
            found = [Message(new_id(), PUBLISH, made_up(one), None, MARK) for one in batch]
        link.say(found)
    link.settle(20)
    return {"sent": at.count, "acked": link.acked, "refused": link.refused}


def status_of(body: bytes) -> int:
    """The commstatus of a response, from the body of its PUBLISH: user property 8."""
    at = body.find(b"\x26\x00\x018\x00")
    return int(body[at + 6 : at + 6 + body[at + 5]]) if at >= 0 else 0


def ask(at: Places, method: Uri, requests: Iterator[bytes] | list[bytes], *, seconds: float = 60.0, me: Uri = ME) -> Told:
    """Send these to a method as fast as the broker takes them, and count the answers by code until all are there, or time is over."""
    codes: Counter[str] = Counter()
    link = RawMqtt(at.cloud, f"attacker-{me.entity:X}", f"+/+/+/+/+/{me.segments}", heard=lambda body: codes.update([str(status_of(body))]))
    begin()
    sent, until = 0, time.monotonic() + seconds
    for one in requests:
        link.say([Message(new_id(), REQUEST, me, method, one, ttl_ms=round(seconds * 1000), format=2)])
        sent += 1
    while codes.total() < sent and time.monotonic() < until:
        time.sleep(0.05)
    return {"sent": sent, "codes": dict(codes)}


@attacker
def polls(at: Places) -> Told:
    """One client asks for `count` pages as large as there are, of records that it has itself put there."""
    link = RawMqtt(at.cloud, "attacker-fills")
    link.say([Message(new_id(), PUBLISH, Uri("cloud", 0x8300, 1, 0x8001), None, payload(60_000)) for _ in range(30)])
    link.settle(1)
    request = field(1, Uri("cloud", 0x8300, 1, 0x8001).encode()) + field(3, 1)
    return ask(at, at.history, [request] * at.count, seconds=at.seconds)


@attacker
def requests(at: Places) -> Told:
    """`count` requests of `bytes`: denied ones, or to an authority whose network hangs."""
    method = Uri("vehicle1", 0x8400, 1, 1) if at.kind == "denied" else Uri("lost", 0x8001, 1, 1)
    return ask(at, method, (payload(at.bytes) for _ in range(at.count)), seconds=at.seconds)


@attacker
def huge(at: Places) -> Told:
    """Publishes of `bytes` on a recorded topic, over MQTT or over Zenoh."""
    if at.kind == "zenoh":
        zenoh = ZenohLink(at.zenoh)
        begin()
        for batch in paced(at):
            for _ in batch:
                zenoh.send(Message(new_id(), PUBLISH, Uri("vehicle1", 0x8500, 1, 0x8001), None, payload(at.bytes)))
        time.sleep(1)
        zenoh.close()
        return {"sent": at.count}
    link = RawMqtt(at.cloud, "attacker")
    begin()
    for batch in paced(at):
        for _ in batch:
            link.say([Message(new_id(), PUBLISH, Uri("cloud", 0x8500, 1, 0x8001), None, payload(at.bytes))])
    link.settle(10)
    return {"sent": at.count, "acked": link.acked, "refused": link.refused, "hung up": link.closed.is_set()}


def caller(at: Places, me: Uri) -> tuple[Caller, MqttLink]:
    made, link = mqtt_caller(at.cloud, f"attacker-{me.entity:X}", me, off_vehicle=False)
    if not link.subscribed.wait(20):
        raise RuntimeError("the attacker could not subscribe")
    return made, link


@attacker
def leases(at: Places) -> Told:
    """One client takes `count` consumers' names for a week."""
    requests = (field(4, 1) + field(7, f"mine-{one}") + field(12, FOREVER_MS) for one in range(at.count))
    return ask(at, at.history, requests, seconds=at.seconds)


@attacker
def subscriptions(at: Places) -> Told:
    """One client subscribes to `count` topics."""
    wanted = (field(1, Uri(at.home, 0xB000 + one // 0x4000, 1, 0x8000 + one % 0x4000).encode()) for one in range(at.count))
    return ask(at, Uri(at.home, 0, 3, 1), wanted, seconds=at.seconds)


def main() -> None:
    name, text = sys.argv[1:]
    try:
        told = ATTACKERS[name](Places(**json.loads(text)))
    except (OSError, RuntimeError) as error:  # thrown out, perhaps: that is for whoever judges to weigh
        told = {"ended": repr(error)}
    print(json.dumps(told), flush=True)
    os._exit(0)  # threads of the libraries may still wait for somebody


if __name__ == "__main__":
    main()
