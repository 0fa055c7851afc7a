"""Floods: topics, polls, requests, bytes, names, subscriptions, connections."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Final

from campaigns.chaos.judges import ZenohLink
from campaigns.chaos.wire import NOTIFICATION, PUBLISH, Message, Uri, field, new_id
from streamer.commands.demo.processes import die_with_parent
from tests.security.hostile import (
    FOREVER_MS,
    MARK,
    ME,
    Places,
    Reported,
    ask,
    attacker,
    begin,
    caller,
    made_up,
    paced,
    payload,
)
from tests.security.raw import RawMqtt, properties, publish

MIB: Final = 1 << 20


@attacker
def topics(at: Places) -> Reported:
    """Sends to `count` unknown topics: publishes on a recorded pattern, or notifications to sinks behind the
    gateway."""
    link = RawMqtt(at.cloud, "attacker")
    begin()
    for batch in paced(at):
        if at.kind == "notifications":
            found = [
                Message(new_id(), NOTIFICATION, made_up(one), Uri("vehicle1", 0xC000 + one % 1_000, 1, 0), MARK)
                for one in batch
            ]
        else:
            found = [Message(new_id(), PUBLISH, made_up(one), None, MARK) for one in batch]
        link.say(found)
    link.settle(20)
    return {"sent": at.count, "acked": link.acked, "refused": link.refused}


@attacker
def polls(at: Places) -> Reported:
    """One client polls `count` pages of the largest size, with records that it has published itself; or as many plans
    of these records, with the most cuts."""
    link, is_plan = RawMqtt(at.cloud, "attacker-fills"), at.kind == "plans"
    topics = [Uri("cloud", 0x8300, 1, 0x8001 + number) for number in range(2 if is_plan else 1)]
    many, size = (1_000, 10) if is_plan else (30, 60_000)
    link.say([Message(new_id(), PUBLISH, topic, None, payload(size)) for _ in range(many) for topic in topics])
    link.settle(1)
    request = field(1, topics[0].encode()) + field(3, 1) + (field(18, 1) if is_plan else b"")
    return ask(at, itertools.repeat((at.history, request), at.count))


@attacker
def requests(at: Places) -> Reported:
    """Sends `count` requests of `bytes`: denied ones, or to an authority whose network hangs."""
    method = Uri("vehicle1", 0x8400, 1, 1) if at.kind == "denied" else Uri("lost", 0x8001, 1, 1)
    return ask(at, ((method, payload(at.bytes)) for _ in range(at.count)))


@attacker
def huge(at: Places) -> Reported:
    """Publishes messages of `bytes` on a recorded topic, over MQTT or over Zenoh."""
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


@attacker
def leases(at: Places) -> Reported:
    """One client leases the names of `count` consumers for a week."""
    return ask(
        at, ((at.history, field(4, 1) + field(7, f"mine-{one}") + field(12, FOREVER_MS)) for one in range(at.count))
    )


@attacker
def subscriptions(at: Places) -> Reported:
    """One client subscribes to `count` topics."""
    service = Uri(at.home, 0, 3, 1)
    return ask(at, ((service, field(1, made_up(one)._replace(authority=at.home).encode())) for one in range(at.count)))


@attacker
def subscribed_topics(at: Places) -> Reported:
    """Publishes from Zenoh on `count` topics that match subscriptions with a wildcard: each instance of an entity is
    one more."""
    made, _ = caller(at, ME)
    kinds = [0x8300 + place for place in range(at.count // 0xFF00 + 1)]
    codes = []
    for kind in kinds:
        wanted = Uri("vehicle1", 0xFFFF_0000 | kind, 1, 0x8001)
        answer = made.call(Uri(at.home, 0, 4, 1), field(1, wanted.encode()), 10)
        codes.append(None if answer is None else answer.commstatus)
    zenoh = ZenohLink(at.zenoh)
    time.sleep(1)
    begin()
    for batch in paced(at):
        for one in batch:
            source = Uri("vehicle1", (one % 0xFF00) << 16 | kinds[one // 0xFF00], 1, 0x8001)
            zenoh.send(Message(new_id(), PUBLISH, source, None, MARK))
    time.sleep(1)
    zenoh.close()
    return {"sent": at.count, "subscribed": codes}


def loudest(at: Places) -> str | None:
    """Returns the authority with most messages in the gateway's own statistics."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{at.admin}/vehicles", timeout=20) as answer:
            found = [json.loads(line) for line in answer.read().splitlines()]
    except (OSError, ValueError):
        return None
    return max(found, key=lambda one: one["messages"])["authority"] if found else None


@attacker
def flood(at: Places) -> Reported:
    """One vehicle of many sends `count` messages within `seconds` on one topic, over the fleet's broker."""
    link = RawMqtt(at.fleet, "attacker")
    source, sink = (
        Uri("v0999", 0x8003, 1, 0x8001),
        Uri.any_of("cloud"),
    )  # not received by the honest clients, which would be slower than a gateway
    begin()
    for batch in paced(at):
        data = publish("v0999/cloud", MARK, properties(Message(new_id(), PUBLISH, source, sink, MARK)), 0)
        place = data.index(b"-", data.index(b"\x26\x00\x011\x00\x24")) + 16  # the last 12 digits of the id
        link.send(b"".join(b"%b%012x%b" % (data[:place], one, data[place + 12 :]) for one in batch))
    return {"sent": at.count, "named": loudest(at)}


@attacker
def admin(at: Places) -> Reported:
    """Opens `count` connections to the admin port that send half a request and then nothing."""
    begin()
    held, slowest, failed = [], 0.0, 0
    until = time.monotonic() + at.seconds
    for _ in range(at.count):
        with contextlib.suppress(OSError):
            held.append(one := socket.create_connection(("127.0.0.1", at.admin), 5))
            one.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{at.admin}/healthz", timeout=10) as answer:
                answer.read()
        except OSError:
            failed += 1
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.2)
    return {"held": len(held), "slowest_s": slowest, "failed": failed}


POSTS: Final = (
    ("/operations/pause", b'{"endpoint": "cloud"}', "application/json", ""),
    ("/operations/backup", b'{"directory": "/stolen"}', "application/json", "Bearer x"),
    ("/operations/reload", b"{}", "application/json", "Bearer " + "x" * 6_000),
    ("/operations/subscriptions", b'{"topic": "' + b"*/" * 30_000 + b'"}', "application/json", "Bearer "),
    ("/operations/messages", b"[" * 60_000, "application/json", "Basic eDp5"),
    ("/operations/paused", b"{}", "text/plain", ""),  # as a form of another site
    ("/operations/purge_letters", b"all=true", "application/x-www-form-urlencoded", ""),
    ("/operations/..%2fstatus", b"{}", "application/json", ""),
    ("/page/../operations/resume", b"{}", "application/json", ""),
    ("/page/main.js", b"{}", "application/json", ""),
    ("/operations/" + "x" * 4_000, b"{}", "application/json", ""),
)


@attacker
def operations(at: Places) -> Reported:
    """POSTs operations to the admin port without its token, in `count` requests; some of them end in their body."""
    begin()
    held, slowest, failed, codes = [], 0.0, 0, Counter[str]()
    for batch in paced(at):
        for one in batch:
            path, body, kind, token = POSTS[one % len(POSTS)]
            made = http.client.HTTPConnection("127.0.0.1", at.admin, timeout=5)
            headers = {"Content-Type": kind, "Origin": "http://evil.example"} | (
                {"Authorization": token} if token else {}
            )
            try:
                if one % 7 == 0:
                    made.connect()
                    half = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: 60000\r\n\r\n"
                    made.sock.sendall(half.encode() + body[:10])
                    held.append(made)
                    continue
                made.request("POST", path, body, headers)
                codes[str(made.getresponse().status)] += 1
            except (OSError, http.client.HTTPException):
                codes["cut"] += 1
            made.close()
        began = time.monotonic()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{at.admin}/healthz", timeout=10) as answer:
                answer.read()
        except OSError:
            failed += 1
        slowest = max(slowest, time.monotonic() - began)
    return {"held": len(held), "slowest_s": slowest, "failed": failed, "codes": dict(codes)}


@attacker
def control(at: Places) -> Reported:
    """Other programs of the gateway's user hold `count` connections to its control socket: silent ones, half a line, a
    line of a megabyte. Meanwhile it is asked what is paused."""
    os.chdir(at.data)  # the kernel limits the length of the path
    begin()
    held, slowest, failed, rounds = [], 0.0, 0, round(at.seconds * 5)
    for number in range(rounds):
        for one in range(at.count * number // rounds, at.count * (number + 1) // rounds):
            made = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(OSError):
                made.settimeout(1)
                made.connect("control.sock")
                made.sendall((b"", b'{"do": "paus', b"x" * MIB, b"[" * 60_000 + b"\n")[one % 4])
            held.append(made)
        began = time.monotonic()
        try:
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(10)
                line.connect("control.sock")
                line.sendall(b'{"do": "paused"}\n')
                failed += line.recv(100) != b'{"paused": []}\n'
        except OSError:
            failed += 1
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.2)
    return {"held": len(held), "slowest_s": slowest, "failed": failed}


@attacker
def churn(at: Places) -> Reported:
    """Opens connections that send something invalid or nothing, and closes them: at the gateway's Zenoh port, and whole
    clients at the broker."""
    begin()
    sessions = 0
    for batch in paced(at):
        for one in batch:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", at.zenoh), 5) as made:
                made.sendall(random.randbytes(one % 300))
            if one % 20 == 0:
                RawMqtt(at.cloud, f"attacker-{one}", f"+/+/+/+/+/cloud/{one:X}/0/1/0").close()
                sessions += 1
    return {"sent": at.count, "clients": sessions}


@attacker
def reads_nothing(at: Places) -> Reported:
    """Zenoh clients subscribe to everything and then stop reading, while another client sends `count` messages of
    `bytes`."""
    for _ in range(3):
        ZenohLink(at.zenoh, ("up/**",), lambda _: None)
    command = [
        sys.executable,
        "-m",
        "tests.security.attackers",
        "huge",
        json.dumps(dataclasses.asdict(at) | {"kind": "zenoh"}),
    ]
    subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=partial(die_with_parent, signal.SIGKILL))
    begin()
    os.kill(os.getpid(), signal.SIGSTOP)
    return {}


@attacker
def bogus(at: Places) -> Reported:
    """Sends `count` Unsubscribes and Fetches of unknown topics."""
    unsubscribe, fetch = Uri(at.home, 0, 3, 2), Uri(at.home, 0, 3, 3)

    def requests() -> Iterator[tuple[Uri, bytes]]:
        for one in range(at.count):
            topic = field(1, made_up(one)._replace(authority=at.home).encode())
            yield (unsubscribe, topic) if one % 2 else (fetch, topic)

    return ask(at, requests())
