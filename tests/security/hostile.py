"""Shared parts of the attackers: addresses, amounts, and many requests at once.

Places (from the parent process) -> attacker -> begin() ... -> Reported
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from campaigns.chaos.judges import Caller, MqttLink, mqtt_caller
from campaigns.chaos.wire import REQUEST, Message, Uri, new_id
from tests.security.raw import RawMqtt

MARK: Final = b"SECRET-OF-A-PAYLOAD"  # no log line may contain it
ME: Final = Uri("cloud", 0xA001, 1, 0)  # the attacker's address on the cloud's broker
FOREVER_MS: Final = 7 * 24 * 3_600_000
PACED_BATCHES: Final = 20  # per second


@dataclass(frozen=True)
class Places:
    """The addresses of the networks, and the amount of work."""

    home: str
    cloud: int
    zenoh: int
    admin: int
    fleet: int = 0
    lost: int = 0
    http: int = 0
    publish: int = 0
    hostile: int = 0  # where a backend of the attacker may listen
    count: int = 1
    seconds: float = 5.0
    bytes: int = 0
    kind: str = ""
    data: str = ""  # its data_dir, for attackers on the same machine

    @property
    def history(self) -> Uri:
        return Uri(self.home, 4, 1, 2)


Reported = dict[str, Any]
Attacker = Callable[[Places], Reported]
ATTACKERS: Final[dict[str, Attacker]] = {}


def attacker(function: Attacker) -> Attacker:
    ATTACKERS[function.__name__] = function
    return function


def begin() -> None:
    print(json.dumps({"attacking": True}), flush=True)


def paced(at: Places, batches_a_second: int = PACED_BATCHES) -> Iterator[range]:
    """Yields the numbers 0 to `count` in batches, spread over `seconds`. A late batch is sent at once."""
    began, done, batches = time.monotonic(), 0, max(1, round(at.seconds * batches_a_second))
    for batch in range(batches):
        upto = at.count * (batch + 1) // batches
        yield range(done, upto)
        done = upto
        time.sleep(max(0.0, began + (batch + 1) / batches_a_second - time.monotonic()))


def payload(size: int) -> bytes:
    """Returns MARK and random bytes up to `size`."""
    return (MARK + random.randbytes(min(size, 1 << 16)) * (size // (1 << 16) + 1))[: max(size, len(MARK))]


def made_up(number: int) -> Uri:
    """Returns the topic of that number, which has no owner."""
    return Uri("cloud", 0xB000 + number // 0x4000, 1, 0x8000 + number % 0x4000)


def status_of(body: bytes) -> int:
    """Returns the commstatus of a response from the body of its PUBLISH: user property 8."""
    at = body.find(b"\x26\x00\x018\x00")
    return int(body[at + 6 : at + 6 + body[at + 5]]) if at >= 0 else 0


def ask(at: Places, requests: Iterator[tuple[Uri, bytes]], me: Uri = ME) -> Reported:
    """Sends requests as fast as the broker accepts them, and counts the answers by code until all have arrived or the
    time is over."""
    codes: Counter[str] = Counter()

    def heard(body: bytes) -> None:
        if b"up-res.v1" in body:
            codes[str(status_of(body))] += 1

    link = RawMqtt(at.cloud, f"attacker-{me.entity:X}", f"+/+/+/+/+/{me.segments}", heard=heard)
    begin()
    sent, until = 0, time.monotonic() + at.seconds
    for method, one in requests:
        link.say([Message(new_id(), REQUEST, me, method, one, ttl_ms=round(at.seconds * 1000), format=2)])
        sent += 1
    while codes.total() < sent and time.monotonic() < until:
        time.sleep(0.05)
    return {"sent": sent, "codes": dict(codes)}


def caller(at: Places, me: Uri) -> tuple[Caller, MqttLink]:
    made, link = mqtt_caller(at.cloud, f"attacker-{me.entity:X}", me, off_vehicle=False)
    if not link.subscribed.wait(20):
        raise RuntimeError("the attacker could not subscribe")
    return made, link


def code(answer: Message | None) -> int | None:
    return None if answer is None else answer.commstatus
