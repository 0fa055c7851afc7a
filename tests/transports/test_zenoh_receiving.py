"""Receiving over Zenoh with few and many filters: each message once and in order while subscriptions change, no thread
for a filter, few declarations."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zenoh

from tests.transports import zenoh_attachments
from transports.conformance import Sink
from transports.conformance.messages import PROBE, notification, publish, streamed, topic
from transports.ports import free_port
from transports.zenoh import ZenohConfig, ZenohTransport, mapping
from transports.zenoh.threads import KEPT, keep_state
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

DEADLINE_S = 30
LIMIT = 16
AHEAD_MAX = 1_000  # messages that a sender without an end is ahead of its listener
ALPHA_TOPIC = uris.uri("alpha", 0x10AB, 3, 0x9A01)
# of many uEntities and authorities, so that there is one for all in the end: it takes in what alpha sends
WIDE = [uris.uri(f"v{number // 4}", number % 4 + 1, 1, 0x8000) for number in range(100)]
MANY = [topic("alpha", 0x9100 + number) for number in range(3 * LIMIT)]


@asynccontextmanager
async def ends(middle: str | None = None, **of_beta: Any) -> AsyncIterator[tuple[ZenohTransport, ZenohTransport]]:
    """alpha sends, beta receives; with a router or a peer in the middle, or linked."""
    where = (f"tcp/127.0.0.1:{free_port()}",)
    if middle is None:
        configs = [ZenohConfig(listen=where), ZenohConfig(connect=where, **of_beta)]
    else:
        configs = [ZenohConfig(mode="client", connect=where, **settings) for settings in ({}, of_beta)]
    alpha, beta = (
        ZenohTransport(config, LocalUriProvider(name, 0x10AB, 3))
        for name, config in zip(("alpha", "beta"), configs, strict=True)
    )
    between = None
    if middle is not None:
        between = await asyncio.to_thread(zenoh.open, ZenohConfig(mode=middle, listen=where).to_zenoh())
    try:
        async with alpha, beta:
            yield alpha, beta
    finally:
        if between is not None:
            await asyncio.to_thread(between.close)


async def until_heard(alpha: ZenohTransport, sink: Sink, source: UUri) -> None:
    while not sink.probes:
        await alpha.send(publish(PROBE, source))
        await asyncio.sleep(0.01)


def pairs(topics: Iterable[UUri]) -> list[tuple[UUri, UUri | None]]:
    return [(one, None) for one in topics]


def declared(transport: ZenohTransport) -> int:
    return len(transport._receiver._declared)


@pytest.mark.parametrize("middle", [None, "router", "peer"])
async def test_each_message_comes_once_and_in_order_while_wider_subscriptions_come_and_go(middle: str | None) -> None:
    """Messages of a filter with its own subscription, and of a covered one."""
    stays, below = topic("alpha", 0x9001), topic("alpha", 0x9002)
    async with ends(middle, subscriptions_max=LIMIT) as (alpha, beta):
        heard, covered, many = Sink(DEADLINE_S), Sink(DEADLINE_S), Sink(DEADLINE_S)
        await beta.register_listener(stays, heard)
        fill = [topic("other", 0x9000 + number) for number in range(LIMIT - 1)]  # then nothing has its own
        assert not any(status.code for status in await beta.register_listeners(pairs([*fill, below]), covered))
        assert any(beta._receiver.covers.wide)
        await until_heard(alpha, heard, stays)
        await until_heard(alpha, covered, below)
        sent, done = 0, asyncio.Event()

        def is_near() -> bool:
            """Otherwise the test would measure the capacity of a queue."""
            return sent - len(heard.messages) <= AHEAD_MAX

        async def send() -> None:
            nonlocal sent
            while not done.is_set():
                await heard.until(is_near, "what was sent long before")
                batch = [publish(b"%d" % (sent + number), one) for number in range(10) for one in (stays, below)]
                assert not any(status.code for status in await alpha.send_batch(batch))
                sent += 10

        sending = asyncio.create_task(send())
        for _ in range(5):
            before = declared(beta)
            assert not any(status.code for status in await beta.register_listeners(pairs(WIDE), many))
            assert declared(beta) > before
            await covered.expect_payload(b"%d" % (sent + 50))
            for one in WIDE:
                await beta.unregister_listener(one, many)
            assert declared(beta) == before
            await covered.expect_payload(b"%d" % (sent + 50))
        done.set()
        await sending
        await alpha.send_batch([publish(b"end", one) for one in (stays, below)])
        for sink in (heard, covered):
            await sink.expect_payload(b"end")
            assert [int(payload) for payload in sink.payloads if payload.isdigit()] == list(range(sent))
        assert not many.messages


async def test_many_filters_cost_no_threads_and_few_subscriptions() -> None:
    """Messages for no filter are counted, and each filter gets its own."""
    async with ends() as (alpha, beta):
        before, tasks = set(threading.enumerate()), len(os.listdir("/proc/self/task"))
        heard = Sink(DEADLINE_S)
        many = [uris.uri("alpha", 0x10AB, 3, 0x8000 + number) for number in range(5_000)]
        for start in range(0, len(many), 1_000):
            statuses = await beta.register_listeners(pairs(many[start : start + 1_000]), heard)
            assert not any(status.code for status in statuses)
        assert declared(beta) == 65, "of so many each, and one that covers the rest"
        await until_heard(alpha, heard, many[-1])
        unwanted = uris.uri("alpha", 0x10AB, 3, 0xFF00)
        await alpha.send_batch([publish(b"%d" % number, one) for number, one in enumerate([unwanted, *many[:10]])])
        await heard.expect_payload(b"10")
        assert [payload for payload in heard.payloads if payload.isdigit()] == [b"%d" % n for n in range(1, 11)]
        assert beta.dropped["unwanted"] == 1
        new = [thread.name for thread in set(threading.enumerate()) - before]
        assert all(name.startswith("asyncio_") for name in new), "the loop's own, which do what blocks"
        assert len(os.listdir("/proc/self/task")) - tasks <= len(new) + 4, "no thread of Zenoh's for each"


async def test_filters_below_a_cover_are_not_declared_to_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ends(subscriptions_max=LIMIT) as (_, beta):
        calls: list[list[str]] = []
        declare = beta._declare

        async def counted(new: list[str], doing: str) -> None:
            calls.append(new)
            await declare(new, doing)

        monkeypatch.setattr(beta, "_declare", counted)
        heard = Sink(DEADLINE_S)
        assert len(await beta.register_listeners(pairs(MANY), heard)) == len(MANY)
        assert len(calls) == 1, "one hop for all"
        for number in range(100):
            await beta.register_listener(topic("alpha", 0xA000 + number), heard)
        assert len(calls) == 1
        for number in range(100):
            await beta.unregister_listener(topic("alpha", 0xA000 + number), heard)
        assert len(calls) == 1


async def test_the_order_holds_across_topics_that_have_a_subscription_each() -> None:
    async with ends() as (alpha, beta):
        heard = Sink(DEADLINE_S)
        topics = [topic("alpha", 0x9200 + number) for number in range(50)]
        await beta.register_listeners(pairs(topics), heard)
        assert declared(beta) == len(topics)
        await until_heard(alpha, heard, topics[-1])
        await alpha.send_batch([publish(b"%d" % number, topics[number * 7 % 50]) for number in range(5_000)])
        await heard.expect_payload(b"4999")
        assert [int(payload) for payload in heard.payloads if payload.isdigit()] == list(range(5_000))


async def test_overlapping_filters_bring_a_message_once_and_what_is_sent_twice_twice() -> None:
    async with ends() as (alpha, beta):
        narrow, wide, both = Sink(DEADLINE_S), Sink(DEADLINE_S), Sink(DEADLINE_S)
        source, all_of_alpha = topic("alpha"), uris.pattern("alpha")
        for pattern, listener in [(source, narrow), (all_of_alpha, wide), (source, both), (all_of_alpha, both)]:
            await beta.register_listener(pattern, listener)
        assert declared(beta) == 2
        await until_heard(alpha, both, source)
        message = publish(b"again", source)
        await alpha.send_batch([publish(b"first", source), message, message, publish(b"end", source)])
        for sink in (narrow, wide, both):
            await sink.expect_payload(b"end")
            assert [one for one in sink.payloads if one != PROBE] == [b"first", b"again", b"again", b"end"]


NOBODY = "{}/{}/{}/{}/{}"
NAMED = [
    ("up/alpha/10AB/0/3/9A01/" + NOBODY, publish(b"1", uris.uri("alpha", 0x10AB, 3, 0x9A01)), True),
    ("up/alpha/10AB/0/3/9A01/" + NOBODY, publish(b"2", uris.uri("", 0x10AB, 3, 0x9A01)), True),
    ("up/alpha/10AB/0/3/9A01/" + NOBODY, publish(b"3", uris.uri("alpha", 0, 3, 0x9A01)), False),
    ("up/alpha/10AB/0/3/9A01/" + NOBODY, publish(b"4", uris.uri("beta", 0x10AB, 3, 0x9A01)), False),
    ("up/alpha/10AB/0/3/9A01/" + NOBODY, publish(b"5", uris.parse("//[v1.a*]/10AB/3/9A01")), False),
    ("up/alpha/0/0/3/9A01/" + NOBODY, publish(b"6", uris.uri("alpha", 0, 3, 0x9A01)), True),
    ("up/alpha/10AB/0/3/9A01/beta/1/0/1/0", notification(b"7", ALPHA_TOPIC, uris.uri("beta", 1, 1)), True),
    ("up/alpha/10AB/0/3/9A01/beta/1/0/1/0", notification(b"8", ALPHA_TOPIC, uris.uri("beta", 2, 1)), False),
    ("up/alpha/10AB/0/3/9A01/beta/1/0/1/0", notification(b"9", ALPHA_TOPIC, uris.uri("gamma", 1, 1)), False),
]


@pytest.mark.spec("req~utransport-send-prevent-address-spoofing~1")
async def test_what_says_another_address_than_its_key_is_dropped_as_spoofed() -> None:
    """Zenoh's access control checks keys alone. Each message is sent twice: the second finds a cached stamp."""
    async with ends() as (alpha, beta):
        heard = Sink(DEADLINE_S)
        await beta.register_listener(uris.ANY, heard)
        await beta.register_listener(uris.ANY, heard, uris.ANY)
        await until_heard(alpha, heard, topic("alpha"))
        assert alpha._sender is not None
        session = alpha._sender.session
        for key, message, _ in NAMED * 2:
            attachment = zenoh_attachments.encode(message)
            await asyncio.to_thread(session.put, key, message.payload, attachment=attachment)
        await alpha.send(publish(b"end", topic("alpha")))
        await heard.expect_payload(b"end")
        expected = [message.payload for _, message, is_named in NAMED if is_named]
        assert [payload for payload in heard.payloads if payload.isdigit()] == expected * 2
        assert beta.dropped == {"spoofed": 2 * (len(NAMED) - len(expected))}


SPOOFED = [
    publish(b"1", uris.uri("beta", 0x10AB, 3, 0x9A01)),
    publish(b"2", uris.uri("alpha", 0, 3, 0x9A01)),
    publish(b"3", uris.uri("", 0x10AB, 3, 0x9A02)),
    notification(b"4", ALPHA_TOPIC, uris.uri("beta", 1, 1)),
]


@pytest.mark.spec("req~utransport-send-prevent-address-spoofing~1")
async def test_a_listener_of_one_topic_takes_nothing_that_says_another_address_than_its_key() -> None:
    """Even with a listener of the claimed address. A publish with a streamer's sink is not spoofed."""
    async with ends() as (alpha, beta):
        heard = Sink(DEADLINE_S)
        for source, sink in ((ALPHA_TOPIC, None), *((one.attributes.source, None) for one in SPOOFED[:2])):
            await beta.register_listener(source, heard, sink)
        await until_heard(alpha, heard, ALPHA_TOPIC)
        assert alpha._sender is not None
        key = mapping.message_key(publish(b"", ALPHA_TOPIC), "alpha")
        for message in [*SPOOFED * 2, streamed(b"5", ALPHA_TOPIC)]:
            attachment = zenoh_attachments.encode(message)
            await asyncio.to_thread(alpha._sender.session.put, key, message.payload, attachment=attachment)
        await alpha.send(publish(b"end", ALPHA_TOPIC))
        await heard.expect_payload(b"end")
        assert [payload for payload in heard.payloads if payload.isdigit()] == []
        assert beta.dropped == {"spoofed": 2 * len(SPOOFED)}


async def test_registering_many_answers_each_of_them() -> None:
    async with ends() as (_, beta):
        heard = Sink(DEADLINE_S)
        bad = [uris.parse("//[v1.a*]/10AB/4/9A01"), uris.uri("alpha", 1, 1, 1)]  # no key holds it; no topic
        statuses = await beta.register_listeners(pairs([MANY[0], bad[0], MANY[1], bad[1], MANY[0]]), heard)
        assert [status.code for status in statuses] == [
            UCode.OK, UCode.INVALID_ARGUMENT, UCode.OK, UCode.INVALID_ARGUMENT, UCode.OK,
        ]  # fmt: skip
        assert declared(beta) == 2
        for one in MANY[:2]:
            await beta.unregister_listener(one, heard)
        with pytest.raises(UStatusError) as unknown:
            await beta.unregister_listener(bad[0], heard)
        assert unknown.value.code == UCode.NOT_FOUND
        assert declared(beta) == 0


async def test_what_is_listened_to_outlives_a_session() -> None:
    async with ends() as (alpha, beta):
        heard = Sink(DEADLINE_S)
        await beta.register_listener(topic("alpha"), heard)
        await beta.close()
        assert declared(beta) == 0
        await beta.open()
        await until_heard(alpha, heard, topic("alpha"))
        await beta.unregister_listener(topic("alpha"), heard)


async def test_zenoh_s_threads_keep_their_state_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a state for each message would cost more than all the rest, and lose thread-local objects."""
    made: list[int] = []

    def counted() -> None:
        made.append(threading.get_ident())
        keep_state()

    monkeypatch.setattr("transports.zenoh.receiver.keep_state", counted)
    KEPT.clear()  # those of Zenoh's that other tests have met ask once more
    async with ends() as (alpha, beta):
        heard = Sink(DEADLINE_S)
        await beta.register_listener(topic("alpha"), heard)
        await until_heard(alpha, heard, topic("alpha"))
        await alpha.send_batch([publish(b"%d" % number, topic("alpha")) for number in range(1_000)])
        await heard.expect_payload(b"999")
        assert 1 <= len(made) <= 10, "a thread of Zenoh's comes and goes with its links, and not with its messages"
