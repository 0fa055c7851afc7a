"""Access to what belongs to others, and invalid data: reading, taking over, ending, forging, and random bytes."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass

from campaigns.chaos.judges import MqttLink, ZenohLink, zenoh_caller
from campaigns.chaos.wire import NOTIFICATION, PUBLISH, REQUEST, RESPONSE, Message, Uri, field, new_id, parse
from tests.security.hostile import MARK, ME, Places, Reported, attacker, begin, caller, code, made_up, paced
from tests.security.raw import RawMqtt, properties, publish, user


@dataclass(frozen=True, slots=True)
class Noisy(Message):
    """A message with a different attachment."""

    noise: bytes = b""

    def attachment(self) -> bytes:
        return self.noise


def shown(answer: Message | None) -> list[Message]:
    """Returns the records in the answer to a Poll."""
    if answer is None or answer.commstatus:
        return []
    batches = [parse(one) for one in parse(answer.payload).get(1, []) if isinstance(one, bytes)]
    return [Message.of_umessage(one) for batch in batches for one in batch.get(5, []) if isinstance(one, bytes)]


@attacker
def pull(at: Places) -> Reported:
    """Polls and describes records that a rule denies to this side; in both directions, 50 records each."""
    me = Uri("vehicle1", 0xA001, 1, 0)
    in_cloud, _ = caller(at, ME)
    in_vehicle, zenoh = zenoh_caller(at.zenoh, me)
    time.sleep(1)
    reported: Reported = {}
    begin()
    says = RawMqtt(at.cloud, "attacker-says")
    for side, made in (("vehicle1", in_cloud), ("cloud", in_vehicle)):
        denied, allowed = Uri(side, 0x8001, 1, 0x8002), Uri(side, 0x8001, 1, 0x8003)
        for _ in range(50):
            for topic in (denied, allowed):
                message = Message(new_id(), PUBLISH, topic, None, MARK)
                if side == "cloud":
                    says.say([message])
                else:
                    zenoh.send(message)
        both = field(3, 1) + field(10, 700_000)
        until, found = time.monotonic() + 20, list[Message]()
        while sum(one.source == allowed for one in found) < 50 and time.monotonic() < until:
            found = shown(made.call(at.history, field(1, denied._replace(resource=0xFFFF).encode()) + both, 10))
        every = shown(made.call(at.history, both, 10))
        exact = made.call(at.history, field(1, denied.encode()) + both, 10)
        described = made.call(at.history._replace(resource=1), b"", 10)
        reported[side] = {
            "allowed": sum(one.source == allowed for one in found),
            "shown": sum(one.source == denied for one in found + every + shown(exact)),
            "described": described is not None and denied.encode() in described.payload,
            "exact poll": code(exact),
            "exact describe": code(made.call(at.history._replace(resource=1), field(1, denied.encode()), 10)),
        }
    return reported


@attacker
def theft(at: Places) -> Reported:
    """Another entity polls as `spark-job`, acknowledges everything, and requests a lease of a millisecond."""
    owner, _ = caller(at, Uri("cloud", 0x9401, 1, 0))
    thief, _ = caller(at, Uri("cloud", 0x9402, 1, 0))
    begin()
    first = owner.call(at.history, field(3, 1) + field(8 + 2, 100) + field(7, "spark-job") + field(12, 60_000), 10)
    if first is None:
        return {"owner": None}
    places = [one for one in parse(first.payload).get(2, []) if isinstance(one, bytes)]
    acked = b"".join(field(8, one) for one in places)
    owner.call(
        at.history, b"".join(field(2, one) for one in places) + acked + field(7, "spark-job") + field(12, 60_000), 10
    )
    stolen = thief.call(at.history, field(4, 1) + acked + field(7, "spark-job") + field(12, 1), 10)
    time.sleep(0.2)
    again = owner.call(at.history, field(4, 1) + acked + field(7, "spark-job") + field(12, 60_000), 10)
    return {"owner": code(first), "thief": code(stolen), "owner again": code(again)}


@attacker
def reset(at: Places) -> Reported:
    """A client claims to be the uSubscription of the cloud and of the vehicle, and ends subscriptions of both.

    By default, subscriptions of the cloud's own clients may end: above the transport, nobody can tell its uSubscription
    from a client that claims to be it.
    """
    service, others = Uri(at.home, 0, 3, 0), Uri("vehicle1", 0xA001, 1, 0)
    callers = {"the cloud's": (ME, caller(at, ME)[0]), "the vehicle's": (others, zenoh_caller(at.zenoh, others)[0])}
    time.sleep(1)  # Zenoh needs this time to distribute the subscriptions
    for _, made in callers.values():
        for one in range(20):
            made.call(service._replace(resource=1), field(1, made_up(one)._replace(authority=at.home).encode()), 10)

    def count() -> dict[str, int]:
        found = {}
        for whose, (me, made) in callers.items():
            answer = made.call(service._replace(resource=3), field(2, field(1, me.encode())), 10)
            found[whose] = -1 if answer is None or answer.commstatus else len(parse(answer.payload).get(1, []))
        return found

    before = count()
    begin()
    codes = {}
    for version, method in ((3, 9), (4, 6)):
        for authority in ("cloud", at.home):
            liar, _ = caller(at, Uri(authority, 0, version, 0))
            codes[f"{authority} {version}"] = code(liar.call(Uri(at.home, 0, version, method), b"", 1.5))
    return {"before": before, "after": count(), "reset": codes}


@attacker
def suppress(at: Places) -> Reported:
    """Sends ids of another sender's future messages first: in its name from the wrong network, and in the attacker's
    own."""
    heard: Counter[bytes] = Counter()
    topic = Uri("vehicle1", 0x8001, 1, 0x8001)

    def hear(message: Message) -> None:
        if message.payload != MARK:  # what the broker itself forwards is the broker's to forbid
            heard.update([message.id])

    hears = MqttLink(at.cloud, "attacker-hears", filters=(topic.segments,), heard=hear)
    zenoh, link = ZenohLink(at.zenoh), RawMqtt(at.cloud, "attacker")
    hears.subscribed.wait(20)
    time.sleep(1)
    begin()
    ids = [new_id() for _ in range(at.count)]
    for source in (topic, Uri("cloud", 0xA001, 1, 0x8001)):
        link.say([Message(id, PUBLISH, source, None, MARK) for id in ids])
    link.settle(10)
    time.sleep(0.5)
    for id in ids:
        zenoh.send(Message(id, PUBLISH, topic, None, b"honest"))
    until = time.monotonic() + 20
    while sum(heard[id] > 0 for id in ids) < at.count and time.monotonic() < until:
        time.sleep(0.05)
    return {"sent": at.count, "heard": sum(heard[id] > 0 for id in ids)}


@attacker
def odd(at: Places) -> Reported:
    """Sends well-formed but senseless messages: wildcards in sinks, ids of the future and the past, the smallest and
    the largest ttl."""
    link = RawMqtt(at.cloud, "attacker")
    sinks = [
        Uri("vehicle1", 0xFFFF_FFFF, 0xFF, 0xFFFF),
        Uri("*", 4, 1, 2),
        Uri("vehicle1", 0, 0, 0),
        Uri(at.home, 4, 1, 0x7FFF),
    ]
    ids = [
        bytes.fromhex("ffffffffffff7fffbfffffffffffffff"),
        bytes.fromhex("00000000000070008000000000000000"),
        bytes(16),
    ]
    begin()
    for batch in paced(at):
        out = []
        for one in batch:
            id = new_id() if one % 2 else ids[one % 3]
            sink = sinks[one % len(sinks)]
            ttl = (1, 0xFFFF_FFFF, 0, 2**31)[one // 4 % 4]
            kind = (REQUEST, NOTIFICATION, RESPONSE, PUBLISH)[one // 16 % 4]
            reqid = ids[one % 3] if kind == RESPONSE else None
            out.append(Message(id, kind, made_up(one % 50) if kind == PUBLISH else ME, sink, MARK, ttl, reqid))
        link.say(out)
    link.settle(5)
    return {"sent": at.count, "refused": link.refused}


@attacker
def malformed(at: Places) -> Reported:
    """Sends `count` invalid messages: random properties on MQTT, random attachments on Zenoh."""
    rng = random.Random(1)
    topic = Uri("vehicle1" if at.kind == "zenoh" else "cloud", 0x8001, 1, 0x8001)
    good = Message(new_id(), PUBLISH, topic, None, MARK)
    if at.kind == "zenoh":
        zenoh = ZenohLink(at.zenoh)
        begin()
        for batch in paced(at):
            for _ in batch:
                attachment = bytearray(good.attachment())
                for _ in range(3):
                    attachment[rng.randrange(len(attachment))] = rng.randrange(256)
                noise = bytes(attachment) if rng.random() < 0.7 else rng.randbytes(rng.randrange(200))
                zenoh.send(Noisy(good.id, PUBLISH, topic, None, MARK, noise=noise))
        time.sleep(1)
        zenoh.close()
        return {"sent": at.count}
    link = RawMqtt(at.cloud, "attacker")
    begin()
    for batch in paced(at):
        out = []
        for one in batch:
            kind, value = str(rng.randrange(1, 12)), rng.randbytes(rng.randrange(40)).hex()
            found = (
                user("uP", "1") + user(kind, value)
                if one % 2
                else properties(good).replace(b"CS1", b"CS\x39") + user(kind, value)
            )
            out.append(publish(topic.segments, MARK, found, 0))
        link.send(b"".join(out))
    return {"sent": at.count}


@attacker
def properties_without_end(at: Places) -> Reported:
    """Sends messages with as many user properties as a packet can hold: `bytes` in each."""
    link = RawMqtt(at.cloud, "attacker")
    topic = Uri("cloud", 0x8500, 1, 0x8001)
    begin()
    for batch in paced(at):
        for _ in batch:
            good = properties(Message(new_id(), PUBLISH, topic, None, MARK))
            link.send(publish(topic.segments, MARK, good + user("x", "y") * (at.bytes // 7), 0))
    link.settle(1)
    return {"sent": at.count}
