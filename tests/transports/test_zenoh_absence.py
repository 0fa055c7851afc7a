"""Publishes over Zenoh to which nobody listens: they are not put, and the owner is notified when somebody does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest
import zenoh

from transports.conformance import Sink
from transports.conformance.messages import method, notification, publish, reply, request, response, topic
from transports.ports import free_port
from transports.zenoh import ZenohConfig, ZenohTransport
from transports.zenoh.presence import REGION_AUTHORITIES_MAX, Region, Watch
from transports.zenoh.sender import PUTS_BEFORE_DECLARED, ZenohSender
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.status import is_nobody_listening
from uprotocol.transport import Capability, LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage

DEADLINE_S: Final = 20.0
SETUPS: Final = ("peers", "we are the router", "router", "two routers", "peer at a router")


def end(authority: str, **settings: Any) -> ZenohTransport:
    return ZenohTransport(
        ZenohConfig.model_validate({"connect_timeout_ms": 20_000} | settings), LocalUriProvider(authority, 0x10AB, 3)
    )


class Heard:
    """The calls of `on_heard`."""

    def __init__(self, transport: ZenohTransport) -> None:
        self.calls: list[Sequence[str] | None] = []
        self._news = asyncio.Event()
        transport.on_heard(self._on_heard)

    def _on_heard(self, addresses: Sequence[str] | None) -> None:
        self.calls.append(addresses)
        self._news.set()

    async def next(self) -> None:
        """Waits for one call more than at the last `next`."""
        await asyncio.wait_for(self._news.wait(), DEADLINE_S)
        self._news.clear()

    async def until_sent(self, sender: ZenohTransport, messages: Sequence[UMessage]) -> None:
        """Send as a streamer does: a publish without listener is sent again only after a call of `on_heard`."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                statuses = await sender.send_batch(messages)
                messages = [m for m, status in zip(messages, statuses, strict=True) if is_nobody_listening(status)]
                assert all(not status.code or is_nobody_listening(status) for status in statuses), statuses
                if not messages:
                    return
                await self.next()


async def nobody(sender: ZenohTransport, message: UMessage) -> None:
    """Send until the answer is that nobody listens: the end of a subscription is known a moment later."""
    async with asyncio.timeout(DEADLINE_S):
        while not is_nobody_listening((await sender.send_batch([message]))[0]):  # noqa: ASYNC110 - Zenoh has no event
            await asyncio.sleep(0.01)


def sender_of(transport: ZenohTransport) -> ZenohSender:
    assert transport._sender is not None
    return transport._sender


async def setup(stack: AsyncExitStack, name: str) -> tuple[ZenohTransport, ZenohTransport]:
    """The publishing and the listening transport; all others end with `stack`."""
    at = [f"tcp/127.0.0.1:{free_port()}" for _ in range(2)]
    if name == "peers":
        alpha, beta = end("alpha", listen=at[:1]), end("beta", connect=at[:1])
    elif name == "we are the router":
        alpha, beta = end("alpha", mode="router", listen=at[:1]), end("beta", mode="client", connect=at[:1])
    else:
        await stack.enter_async_context(end("hub", mode="router", listen=at[:1]))
        far = at[0]
        if name == "two routers":
            await stack.enter_async_context(end("hub2", mode="router", listen=at[1:], connect=at[:1]))
            far = at[1]
        mode = "peer" if name == "peer at a router" else "client"
        alpha, beta = end("alpha", mode=mode, connect=at[:1]), end("beta", mode="client", connect=[far])
    await stack.enter_async_context(alpha)
    await stack.enter_async_context(beta)
    async with asyncio.timeout(DEADLINE_S):
        while not alpha.connected:  # noqa: ASYNC110 - a node that listens learns of the link a moment later
            await asyncio.sleep(0.005)
    alpha.tells_absence = True
    return alpha, beta


@pytest.fixture(params=SETUPS)
async def network(request: pytest.FixtureRequest) -> AsyncIterator[tuple[ZenohTransport, ZenohTransport]]:
    async with AsyncExitStack() as stack:
        yield await setup(stack, request.param)


@pytest.fixture
async def peers() -> AsyncIterator[tuple[ZenohTransport, ZenohTransport]]:
    async with AsyncExitStack() as stack:
        yield await setup(stack, "peers")


TOPIC: Final = topic("alpha")
KEY: Final = "up/alpha/10AB/3/4/9A01/{}/{}/{}/{}/{}"  # of TOPIC
CALLERS: Final = uris.parse("//*/FFFFFFFF/FF/0")  # all callers of a method


def test_an_address_is_the_key_that_a_message_leaves_on() -> None:
    transport = end("alpha", listen=["tcp/127.0.0.1:0"])
    assert Capability.ABSENCE in transport.capabilities
    source = uris.parse("up://device1/10AB/3/80CD")
    for _ in range(2):
        assert transport.address_of(source, None) == "up/device1/10AB/0/3/80CD/{}/{}/{}/{}/{}"
        assert transport.address_of(source, uris.parse("up://cloud/FFFFFFFF/FF/FFFF")) == (
            "up/device1/10AB/0/3/80CD/{}/{}/{}/{}/{}"
        ), "a publish with a streamer's sink"
        assert transport.address_of(source, reply("beta")) == "up/device1/10AB/0/3/80CD/beta/10AB/3/4/0"
    assert transport.address_of(uris.parse("up:///10AB/3/80CD"), None).startswith("up/alpha/")


async def test_a_publish_without_listener_is_reported_and_sent_again_when_there_is_one(
    network: tuple[ZenohTransport, ZenohTransport],
) -> None:
    alpha, beta = network
    heard, sink = Heard(alpha), Sink(DEADLINE_S)
    messages = [publish(b"%d" % number, TOPIC) for number in range(100)]
    statuses = await alpha.send_batch(messages)
    assert all(is_nobody_listening(status) for status in statuses)
    sending = asyncio.ensure_future(heard.until_sent(alpha, messages))
    await beta.register_listener(TOPIC, sink)
    await sending
    await sink.expect_payload(b"99")
    assert sink.payloads == [message.payload for message in messages], "each once, in order"


async def test_a_subscriber_that_goes_away_and_comes_back(network: tuple[ZenohTransport, ZenohTransport]) -> None:
    alpha, beta = network
    heard, first, second = Heard(alpha), Sink(DEADLINE_S), Sink(DEADLINE_S)
    sending = asyncio.ensure_future(heard.until_sent(alpha, [publish(b"first", TOPIC)]))
    await beta.register_listener(TOPIC, first)
    await sending
    await first.expect_payload(b"first")
    await beta.unregister_listener(TOPIC, first)
    await nobody(alpha, publish(b"lost or not", TOPIC))
    sending = asyncio.ensure_future(heard.until_sent(alpha, [publish(b"second", TOPIC)]))
    await beta.register_listener(TOPIC, second)
    await sending
    await second.expect_payload(b"second")
    assert second.payloads == [b"second"]


async def test_a_link_that_ends_and_one_that_comes(network: tuple[ZenohTransport, ZenohTransport]) -> None:
    alpha, beta = network
    heard, sink = Heard(alpha), Sink(DEADLINE_S)
    sending = asyncio.ensure_future(heard.until_sent(alpha, [publish(b"first", TOPIC)]))
    await beta.register_listener(TOPIC, sink)
    await sending
    await sink.expect_payload(b"first")
    where = await asyncio.to_thread(lambda: [str(link.dst) for link in sender_of(beta).session.info.links()])
    await beta.close()
    if alpha.connected:  # a peer that is alone has nobody to send to, and says that
        await nobody(alpha, publish(b"lost or not", TOPIC))
    async with end("gamma", mode="client", connect=where) as gamma:
        other = Sink(DEADLINE_S)
        await gamma.register_listener(TOPIC, other)
        async with asyncio.timeout(DEADLINE_S):
            while (await alpha.send_batch([publish(b"second", TOPIC)]))[0].code:  # noqa: ASYNC110 - also UNAVAILABLE
                await asyncio.sleep(0.01)
        await other.expect_payload(b"second")


async def test_a_listener_that_is_there_before_the_first_publish(
    network: tuple[ZenohTransport, ZenohTransport],
) -> None:
    alpha, beta = network
    heard, sink = Heard(alpha), Sink(DEADLINE_S)
    await beta.register_listener(uris.ANY, sink)
    messages = [publish(b"%d" % number, topic("alpha", 0x8000 + number)) for number in range(50)]
    await heard.until_sent(alpha, messages)
    await sink.expect(50)
    assert len(heard.calls) <= 2, "one answer of the network serves for all topics"


async def test_our_own_listeners_do_not_count(network: tuple[ZenohTransport, ZenohTransport]) -> None:
    alpha, _ = network
    sink = Sink(DEADLINE_S)
    await alpha.register_listener(uris.ANY, sink)
    for _ in range(3):
        assert is_nobody_listening((await alpha.send_batch([publish(b"", TOPIC)]))[0])
    assert not sink.messages


async def test_a_request_without_service_is_answered_and_one_with_a_service_is_sent(
    network: tuple[ZenohTransport, ZenohTransport],
) -> None:
    alpha, beta = network
    sink = Sink(DEADLINE_S)
    for _ in range(2):
        await nobody(alpha, request(b"lost", reply("alpha"), method("beta")))
        await beta.register_listener(CALLERS, sink, method("beta"))
        async with asyncio.timeout(DEADLINE_S):
            while (await alpha.send_batch([request(b"call", reply("alpha"), method("beta"))]))[0].code:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await sink.expect_payload(b"call")
        assert b"lost" not in sink.payloads
        await beta.unregister_listener(CALLERS, sink, method("beta"))


async def test_callers_of_a_method_share_what_is_declared_for_it(
    peers: tuple[ZenohTransport, ZenohTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transports.zenoh.presence.METHODS_MAX", 2)
    alpha, _ = peers
    sender_of(alpha)._settled_at = 0.0
    calls = [request(b"", reply(f"caller{number}"), method("beta")) for number in range(100)]
    assert all(is_nobody_listening(status) for status in await alpha.send_batch(calls))
    assert sender_of(alpha).publishers == 1
    others = [request(b"", reply("alpha"), method(f"service{number}")) for number in range(3)]
    statuses = await alpha.send_batch(others)
    assert [is_nobody_listening(status) for status in statuses] == [True, False, False]
    assert alpha.unprobed == 2, "beyond the limit requests are sent and counted"


async def test_only_publishes_and_requests_are_held_back(peers: tuple[ZenohTransport, ZenohTransport]) -> None:
    alpha, _ = peers
    sent = [notification(b"", TOPIC, reply("beta")), response(b"", method("alpha"), reply("beta"))]
    for messages in (sent, [EncodedMessage.of(message) for message in sent]):
        assert [status.code for status in await alpha.send_batch(messages)] == [0, 0]
    assert is_nobody_listening((await alpha.send_batch([EncodedMessage.of(publish(b"", TOPIC))]))[0])


async def test_one_who_listens_to_another_topic(peers: tuple[ZenohTransport, ZenohTransport]) -> None:
    """Each key by itself, and the order of each is kept."""
    alpha, beta = peers
    heard, sink, other = Heard(alpha), Sink(DEADLINE_S), topic("alpha", 0x8001)
    sending = asyncio.ensure_future(heard.until_sent(alpha, [publish(b"first", other)]))
    await beta.register_listener(other, sink)
    await sending
    statuses = await alpha.send_batch([publish(b"", TOPIC), publish(b"second", other), publish(b"", TOPIC)])
    assert [is_nobody_listening(status) for status in statuses] == [True, False, True]
    await sink.expect_payload(b"second")
    sending = asyncio.ensure_future(heard.until_sent(alpha, [publish(b"third", TOPIC)]))
    await beta.register_listener(TOPIC, sink)
    await sending
    await sink.expect_payload(b"third")
    while [KEY] not in heard.calls:  # its own publisher has heard
        await heard.next()


async def test_what_follows_in_the_same_call_is_answered_the_same(
    peers: tuple[ZenohTransport, ZenohTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody begins to listen while a call is under way."""
    alpha, beta = peers
    heard, sink = Heard(alpha), Sink(DEADLINE_S)
    await beta.register_listener(topic("alpha", 0x8001), sink)
    await heard.until_sent(alpha, [publish(b"", topic("alpha", 0x8001))])
    await nobody(alpha, publish(b"", TOPIC))
    is_nobody = Watch.is_nobody

    def begins(watch: Watch) -> bool:
        answer = is_nobody(watch)
        watch.heard = True
        return answer

    monkeypatch.setattr(Watch, "is_nobody", begins)
    monkeypatch.setattr(Region, "is_silent", lambda region: False)
    statuses = await alpha.send_batch([publish(b"%d" % number, TOPIC) for number in range(10)])
    assert all(is_nobody_listening(status) for status in statuses)
    assert not (await alpha.send_batch([publish(b"", TOPIC)]))[0].code


async def test_without_being_asked_for_it_is_as_before(peers: tuple[ZenohTransport, ZenohTransport]) -> None:
    alpha, beta = peers
    alpha.tells_absence = False
    sender_of(alpha)._settled_at = 0.0
    for number in range(PUTS_BEFORE_DECLARED):
        assert sender_of(alpha).publishers == 0
        assert not (await alpha.send_batch([publish(b"%d" % number, TOPIC)]))[0].code
    assert sender_of(alpha).publishers == 1
    alpha.tells_absence = True  # the publisher that is there is asked, too
    heard, sink = Heard(alpha), Sink(DEADLINE_S)
    await beta.register_listener(topic("alpha", 0x8001), Sink(DEADLINE_S))
    await heard.until_sent(alpha, [publish(b"", topic("alpha", 0x8001))])
    await nobody(alpha, publish(b"", TOPIC))
    alpha.tells_absence = False
    assert not (await alpha.send_batch([publish(b"", TOPIC)]))[0].code
    alpha.tells_absence = True
    sending = asyncio.ensure_future(heard.until_sent(alpha, [publish(b"again", TOPIC)]))
    await beta.register_listener(TOPIC, sink)
    await sending
    await sink.expect_payload(b"again")


async def test_a_session_that_is_opened_again_knows_nothing_of_the_one_before(
    peers: tuple[ZenohTransport, ZenohTransport],
) -> None:
    alpha, beta = peers
    heard, sink = Heard(alpha), Sink(DEADLINE_S)
    assert is_nobody_listening((await alpha.send_batch([publish(b"", TOPIC)]))[0])
    await alpha.close()
    await alpha.open()
    await heard.next()
    assert heard.calls == [None]
    sending = asyncio.ensure_future(heard.until_sent(alpha, [publish(b"again", TOPIC)]))
    await beta.register_listener(TOPIC, sink)
    await sending
    await sink.expect_payload(b"again")


async def test_beyond_the_limit_records_are_sent_and_counted(
    peers: tuple[ZenohTransport, ZenohTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transports.zenoh.sender.PUBLISHERS_MAX", 7)
    alpha, beta = peers
    heard, sink = Heard(alpha), Sink(DEADLINE_S)
    await beta.register_listener(topic("alpha", 0x8100), sink)
    await heard.until_sent(alpha, [publish(b"there", topic("alpha", 0x8100))])
    sources = [topic("alpha", 0x8000 + number) for number in range(10)]
    statuses = await alpha.send_batch([publish(b"", source) for source in sources])
    assert [is_nobody_listening(status) for status in statuses] == [True] * 2 + [False] * 8
    assert sender_of(alpha).publishers == 7, "4 of them for all topics of the authority and of the uEntity"
    assert alpha.unprobed == 8
    await alpha.close()
    assert alpha.unprobed == 8, "after the session, too"


async def test_no_publisher_for_each_topic_where_nobody_listens_at_all(
    network: tuple[ZenohTransport, ZenohTransport],
) -> None:
    alpha, _ = network
    for start in range(0, 20_000, 1_000):
        batch = [publish(b"", topic("alpha", 0x8000 + start + number)) for number in range(1_000)]
        assert all(is_nobody_listening(status) for status in await alpha.send_batch(batch))
    assert sender_of(alpha).publishers == 1
    assert alpha.unprobed == 0


@pytest.mark.parametrize(
    ("pattern", "publishers"),
    [("//*/FFFFFFFF/FF/FFFF", 2), ("//alpha/FFFFFFFF/FF/FFFF", 2), ("//alpha/310AB/4/FFFF", 4)],
)
async def test_no_publisher_for_each_topic_where_somebody_listens_to_all(
    network: tuple[ZenohTransport, ZenohTransport], pattern: str, publishers: int
) -> None:
    alpha, beta = network
    heard, sink = Heard(alpha), Sink(DEADLINE_S)
    await beta.register_listener(uris.parse(pattern), sink)
    messages = [publish(b"%d" % number, topic("alpha", 0x8000 + number)) for number in range(1_000)]
    await heard.until_sent(alpha, messages)
    await sink.expect(len(messages))
    assert sender_of(alpha).publishers <= publishers + 1, "behind a router the first answers may come one by one"
    await beta.unregister_listener(uris.parse(pattern), sink)
    for message in messages[::100]:
        await nobody(alpha, message)


async def test_many_source_authorities_share_what_is_declared(peers: tuple[ZenohTransport, ZenohTransport]) -> None:
    alpha, beta = peers
    sources = [topic(f"vehicle{number}") for number in range(REGION_AUTHORITIES_MAX + 20)]
    assert all(is_nobody_listening(s) for s in await alpha.send_batch([publish(b"", source) for source in sources]))
    assert sender_of(alpha).publishers == REGION_AUTHORITIES_MAX + 1
    heard, sink = Heard(alpha), Sink(DEADLINE_S)
    sending = asyncio.ensure_future(heard.until_sent(alpha, [publish(b"last", sources[-1])]))
    await beta.register_listener(sources[-1], sink)
    await sending
    await sink.expect_payload(b"last")


async def test_an_area_that_falls_silent_again_answers_for_all_topics(
    peers: tuple[ZenohTransport, ZenohTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transports.zenoh.presence.CHECK_REGION_S", 0.0)
    alpha, beta = peers
    heard, sink = Heard(alpha), Sink(DEADLINE_S)
    await beta.register_listener(TOPIC, sink)
    await heard.until_sent(alpha, [publish(b"", TOPIC)])
    await beta.unregister_listener(TOPIC, sink)
    await nobody(alpha, publish(b"", TOPIC))
    number = 0x8001
    async with asyncio.timeout(DEADLINE_S):  # the area is asked again, for no more than a part of the time
        while (before := sender_of(alpha).publishers) and number < 0x9000:
            assert is_nobody_listening((await alpha.send_batch([publish(b"", topic("alpha", number))]))[0])
            if sender_of(alpha).publishers == before:
                return
            number += 1
            await asyncio.sleep(0.01)
    raise AssertionError("each topic had a publisher of its own")


async def test_a_peer_that_puts_off_the_end_of_a_subscription(peers: tuple[ZenohTransport, ZenohTransport]) -> None:
    """Zenoh's issue 2247, as docs/zenoh.md has it: a peer reports the end of its client's subscription only when no
    other peer has one for the same key. Until then somebody seems to listen."""
    alpha, beta = peers
    at = [f"tcp/127.0.0.1:{free_port()}"]
    config = zenoh.Config.from_json5(
        json.dumps({"mode": "peer", "scouting": {"multicast": {"enabled": False}}, "listen": {"endpoints": at}})
    )
    config.insert_json5("connect/endpoints", json.dumps([str(link.dst) for link in _links(beta)]))
    third = await asyncio.to_thread(zenoh.open, config)
    try:
        heard, sink, last = Heard(alpha), Sink(DEADLINE_S), Sink(DEADLINE_S)
        async with end("gamma", mode="client", connect=at) as gamma:
            await gamma.register_listener(TOPIC, sink)
            await heard.until_sent(alpha, [publish(b"", TOPIC)])
            await beta.register_listener(TOPIC, last)
            await gamma.unregister_listener(TOPIC, sink)
            async with asyncio.timeout(DEADLINE_S):
                while not last.messages:  # until its subscription is known, what is sent is lost: Zenoh has no event
                    await alpha.send_batch([publish(b"to the other", TOPIC)])
                    await asyncio.sleep(0.01)
            await beta.unregister_listener(TOPIC, last)
            await nobody(alpha, publish(b"lost or not", TOPIC))
    finally:
        await asyncio.to_thread(third.close)


def _links(transport: ZenohTransport) -> list[zenoh.Link]:
    return sender_of(transport).session.info.links()
