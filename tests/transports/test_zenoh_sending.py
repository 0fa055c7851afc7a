"""Sending over Zenoh, and messages held on arrival: publishers, the end of a session, requests beside held
publishes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Literal

import pytest
import pytest_asyncio
import structlog
import zenoh

from transports.arrivals import MESSAGES_MAX
from transports.conformance import Sink
from transports.conformance.messages import method, notification, publish, reply, request, topic
from transports.ports import free_port
from transports.zenoh import ZenohConfig, ZenohTransport
from transports.zenoh.sender import FLUSH_KEY, LINGER_S, PUTS_BEFORE_DECLARED, ZenohSender, answer_flush
from uprotocol import uri as uris
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage


@pytest_asyncio.fixture
async def two() -> AsyncIterator[tuple[ZenohTransport, ZenohTransport]]:
    port = free_port()
    alpha = ZenohTransport(ZenohConfig(listen=(f"tcp/127.0.0.1:{port}",)), LocalUriProvider("alpha", 0x10AB, 3))
    beta = ZenohTransport(ZenohConfig(connect=(f"tcp/127.0.0.1:{port}",)), LocalUriProvider("beta", 0x10AB, 3))
    async with alpha, beta:
        yield alpha, beta


def sender_of(transport: ZenohTransport) -> ZenohSender:
    assert transport._sender is not None
    return transport._sender


async def test_a_topic_has_a_publisher_from_its_sixteenth_message_on(
    two: tuple[ZenohTransport, ZenohTransport],
) -> None:
    alpha, beta = two
    heard = Sink(10)
    await alpha.register_listener(uris.ANY, heard, reply("alpha"))
    await until_heard(beta, heard)
    sender_of(beta)._settled_at = 0.0
    publishers = sender_of(beta).publishers
    sources = [topic("beta", 0x8000 + number) for number in range(100)]
    for round in range(PUTS_BEFORE_DECLARED + 2):
        await beta.send_batch(
            [notification(b"%d" % (round * 100 + n), source, reply("alpha")) for n, source in enumerate(sources)]
        )
        assert sender_of(beta).publishers == publishers + (100 if round >= PUTS_BEFORE_DECLARED - 1 else 0)
    await heard.expect_payload(b"%d" % ((PUTS_BEFORE_DECLARED + 2) * 100 - 1))
    assert [int(payload) for payload in heard.payloads if payload.isdigit()] == list(
        range((PUTS_BEFORE_DECLARED + 2) * 100)
    )


async def until_heard(sender: ZenohTransport, heard: Sink) -> None:
    """Wait until alpha's wildcard is known at beta."""
    while not heard.messages:
        await sender.send(notification(b"probe", topic("beta"), reply("alpha")))
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("unused_s", [0.0, 600.0])
async def test_publishers_are_bounded_and_only_one_that_is_long_unused_makes_room(
    two: tuple[ZenohTransport, ZenohTransport], monkeypatch: pytest.MonkeyPatch, unused_s: float
) -> None:
    monkeypatch.setattr("transports.zenoh.sender.PUBLISHERS_MAX", 3)
    monkeypatch.setattr("transports.zenoh.sender.UNUSED_S", unused_s)
    alpha, beta = two
    heard = Sink(10)
    await alpha.register_listener(uris.ANY, heard, reply("alpha"))
    await until_heard(beta, heard)
    sources = [topic("beta", 0x8000 + number) for number in range(10)]
    first: set[str] = set()
    for source in sources:  # one after the other: the earlier ones are not used again
        await beta.send_batch([notification(b"%d" % number, source, reply("alpha")) for number in range(100)])
        first = first or {key for key, _ in sender_of(beta)._publishers}
    await beta.send(notification(b"end", sources[0], reply("alpha")))
    await heard.expect_payload(b"end")
    assert sender_of(beta).publishers == 3
    assert (first <= {key for key, _ in sender_of(beta)._publishers}) is (unused_s > 0)
    for source in sources:
        numbers = [int(m.payload) for m in heard.messages if m.attributes.source == source and m.payload.isdigit()]
        assert numbers == list(range(100))


class Raw:
    """Another implementation: reads nothing until its gate opens. `answers`: it has a queryable like our
    transports."""

    def __init__(self, mode: Literal["peer", "router"], *, answers: bool) -> None:
        self.gate, self.payloads = threading.Event(), list[bytes]()
        self.where = f"tcp/127.0.0.1:{free_port()}"
        self.session = zenoh.open(ZenohConfig(mode=mode, listen=(self.where,)).to_zenoh())
        self.subscriber = self.session.declare_subscriber("up/**", self._take)
        if answers:
            self.session.declare_queryable(f"{FLUSH_KEY}/{self.session.info.zid()}", answer_flush)

    def _take(self, sample: zenoh.Sample) -> None:
        self.gate.wait()
        self.payloads.append(sample.payload.to_bytes())

    async def until(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.payloads) < count:  # noqa: ASYNC110 - appended on a foreign thread
                await asyncio.sleep(0.01)

    def close(self) -> None:
        self.gate.set()
        self.session.close()


BACKLOG = [notification(b"%d" % number, topic("beta"), reply("alpha")) for number in range(5_000)]


@pytest.mark.parametrize(("mode", "answers"), [("router", False), ("peer", True)])
async def test_close_waits_until_the_other_side_has_read_what_was_sent(
    monkeypatch: pytest.MonkeyPatch, mode: Literal["peer", "router"], answers: bool
) -> None:
    """More than Zenoh's close waits for: the gate is shut for longer than a keep-alive takes (2.5 s)."""
    monkeypatch.setattr("transports.zenoh.transport.FLUSH_S_MAX", 60.0)
    raw = await asyncio.to_thread(Raw, mode, answers=answers)
    beta = ZenohTransport(ZenohConfig(connect=(raw.where,)), LocalUriProvider("beta", 0x10AB, 3))
    try:
        await beta.open()
        assert not any(status.code for status in await beta.send_batch(BACKLOG))
        closing = asyncio.ensure_future(beta.close())
        await asyncio.wait({closing}, timeout=3.5)
        assert not closing.done()
        assert not raw.payloads
        raw.gate.set()
        await asyncio.wait_for(closing, 30)
        await raw.until(len(BACKLOG))
        assert raw.payloads == [message.payload for message in BACKLOG]
    finally:
        await asyncio.to_thread(raw.close)


async def test_a_peer_that_confirms_nothing_is_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = await asyncio.to_thread(Raw, "peer", answers=False)
    raw.gate.set()
    beta = ZenohTransport(ZenohConfig(connect=(raw.where,)), LocalUriProvider("beta", 0x10AB, 3))
    try:
        await beta.open()
        await beta.send_batch(BACKLOG)
        sender, began = sender_of(beta), time.monotonic()
        assert await asyncio.to_thread(sender.flush, 10.0) == ([], [str(raw.session.info.zid())])
        assert time.monotonic() - began >= LINGER_S * 0.5
        await beta.close()
        await raw.until(len(BACKLOG))
    finally:
        await asyncio.to_thread(raw.close)


NOT_READING = """
import sys, threading
import zenoh
from transports.zenoh import ZenohConfig
session = zenoh.open(ZenohConfig(listen=(sys.argv[1],)).to_zenoh())
subscriber = session.declare_subscriber("up/**", lambda sample: threading.Event().wait())
print("ready", flush=True)
sys.stdin.read()
"""


async def test_close_does_not_wait_for_ever_for_a_peer_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer is a process of its own: a put that waits for it would block other sessions of its process."""
    monkeypatch.setattr("transports.zenoh.transport.FLUSH_S_MAX", 0.2)
    monkeypatch.setattr("transports.zenoh.transport.LEAVE_S_MAX", 0.2)
    where = f"tcp/127.0.0.1:{free_port()}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    not_reading = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NOT_READING, where, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert not_reading.stdout is not None
    try:
        assert await asyncio.wait_for(not_reading.stdout.readline(), 30) == b"ready\n"
        config = ZenohConfig(connect=(where,), stall_ms_max=3_000)  # when Zenoh lets go of the put that waits
        beta = ZenohTransport(config, LocalUriProvider("beta", 0x10AB, 3))
        await beta.open()
        large = [notification(bytes(1 << 16), topic("beta"), reply("alpha")) for _ in range(1_000)]
        sending = asyncio.ensure_future(beta.send_batch(large))  # more than any buffer takes
        await asyncio.wait({sending}, timeout=0.5)
        assert not sending.done()
        with structlog.testing.capture_logs() as logs:
            await asyncio.wait_for(beta.close(), 5)
        assert "the last messages may not have been read" in [line["event"] for line in logs]
        statuses = await asyncio.wait_for(sending, 5)
        assert {status.code for status in statuses} == {UCode.UNAVAILABLE}
        assert len(statuses) == len(large)
    finally:
        not_reading.kill()
        await not_reading.wait()
        await asyncio.to_thread(_left_alone)


def _left_alone() -> None:
    """Wait until the threads of that end have ended."""
    for thread in threading.enumerate():
        if thread.name in ("zenoh-close-beta", "zenoh-send-beta"):
            thread.join(30)


class Holding(Sink):
    """Takes publishes when its gate opens, like a log on a full disk."""

    def __init__(self) -> None:
        super().__init__(20)
        self.gate = asyncio.Event()

    def on_receive_batch(self, messages: Sequence[UMessage]) -> Awaitable[None]:
        for message in messages:
            self.on_receive(message)
        return self._take()

    async def _take(self) -> None:
        await self.gate.wait()


async def test_requests_pass_while_publishes_are_held(two: tuple[ZenohTransport, ZenohTransport]) -> None:
    alpha, beta = two
    held, requests = Holding(), Sink(20)
    await alpha.register_listener(topic("beta"), held)
    await alpha.register_listener(reply("beta"), requests, method("alpha"))
    held.gate.set()
    while not (held.messages and requests.messages):
        await beta.send_batch([publish(b"probe", topic("beta")), request(b"probe", reply("beta"), method("alpha"))])
        await asyncio.sleep(0.01)
    held.gate.clear()
    held.messages.clear()
    count = MESSAGES_MAX + 2_000  # more than waits at once
    sending = asyncio.ensure_future(
        beta.send_batch([publish(b"%d" % number, topic("beta")) for number in range(count)])
    )
    await sending
    await beta.send(request(b"urgent", reply("beta"), method("alpha")))
    await requests.expect_payload(b"urgent")
    held.gate.set()
    await held.expect_payload(b"%d" % (count - 1))
    assert [int(payload) for payload in held.payloads if payload.isdigit()] == list(range(count))
