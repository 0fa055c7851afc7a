"""Remote commands: two services whose networks are connected by a forwarder, and services whose peer misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from uprotocol import uri as uris
from uprotocol.attributes import NOTIFICATION, REQUEST, RESPONSE
from uprotocol.communication import InMemoryRpcServer
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.core.usubscription.wire import timestamp
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import FINAL, UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.uuid import now_ms
from uprotocol.v1.uattributes_pb2 import UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.remote import WINDOW_FIRST
from usubscription.state import Status

A_TOPIC = uris.parse("//a/20/1/8001")
B_TOPIC = uris.parse("//b/20/1/8001")
S3, S4 = v3.SubscriptionStatus, v4.SubscriptionStatus
spec = pytest.mark.spec
both = pytest.mark.parametrize("major", [3, 4])


def subscribe(major: int, topic: Any, **options: Any) -> Any:
    if major == 4:
        return v4.SubscribeRequest(topic=topic, **options)
    request = v3.SubscriptionRequest(topic=topic)
    if "sample_period" in options:
        request.attributes.sample_period_ms = options["sample_period"]
    return request


def unsubscribe(major: int, topic: Any) -> Any:
    return v4.UnsubscribeRequest(topic=topic) if major == 4 else v3.UnsubscribeRequest(topic=topic)


def status(major: int, payload: UPayload) -> Status:
    if major == 4:
        return Status(payload.unpack(v4.SubscribeResponse).status - 1)
    return Status(payload.unpack(v3.SubscriptionResponse).status.state)


def statuses(major: int, messages: list[UMessage]) -> list[Status]:
    if major == 4:
        return [Status(UPayload.of(one).unpack(v4.Subscription).status - 1) for one in messages]
    return [Status(UPayload.of(one).unpack(v3.Update).status.state) for one in messages]


def commands(messages: list[UMessage]) -> list[UMessage]:
    """Subscribe and Unsubscribe; new services also ask each other for their subscriptions."""
    return [one for one in messages if one.attributes.type == REQUEST and one.attributes.sink.resource_id in (1, 2)]


async def known(service: Any) -> list[tuple[str, str, str]]:
    return [(uris.format(_uri(row.topic)), row.subscriber[0], row.status.name) for row in await service.subscriptions()]


def _uri(key: Any) -> Any:
    return uris.uri(*key)


class Peer:
    """A remote service with the answers of the test: a status, an error, or none."""

    def __init__(self, transport: Any, authority: str) -> None:
        self._transport, self._authority = transport, authority
        self._servers = {
            major: InMemoryRpcServer(transport, LocalUriProvider(authority, 0, major), drain_ms_max=0)
            for major in (3, 4)
        }
        self.commands: list[tuple[str, UMessage]] = []
        self.running = self.running_max = 0
        self.answer: Callable[[str, UMessage], Any] = lambda command, request: Status.SUBSCRIBED
        self.has: list[Any] | None = (
            None  # our subscriptions in its answers; None: it does not answer FetchSubscriptions
        )
        self.asked = 0  # the number of FetchSubscriptions
        self.lists = asyncio.Event()  # cleared: its answer is delayed
        self.lists.set()
        self._news = asyncio.Event()

    async def open(self) -> Peer:
        for major, server in self._servers.items():
            await server.register_request_handler(1, self._handler(major, "subscribe"))
            await server.register_request_handler(2, self._handler(major, "unsubscribe"))
            await server.register_request_handler(3, self._list)
        return self

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()

    def _handler(self, major: int, command: str) -> Any:
        async def handle(request: UMessage) -> Any:
            self.commands.append((command, request))
            self._news.set()
            self.running += 1
            self.running_max = max(self.running, self.running_max)
            try:
                result = self.answer(command, request)
                if asyncio.iscoroutine(result):
                    result = await result
            finally:
                self.running -= 1
            if isinstance(result, UStatusError):
                raise result
            if command == "unsubscribe":
                return v4.UnsubscribeResponse() if major == 4 else v3.UnsubscribeResponse()
            if major == 4:
                return v4.SubscribeResponse(status=result + 1)
            return v3.SubscriptionResponse(status=v3.SubscriptionStatus(state=result))

        return handle

    async def _list(self, request: UMessage) -> Any:
        if self.has is None:
            raise UStatusError(UCode.UNIMPLEMENTED, "not here")
        self._news.set()
        own, has = request.attributes.source, list(self.has)
        self.asked += 1
        await self.lists.wait()  # the answer has its state at the time of the request
        if request.attributes.sink.ue_version_major == 4:
            return v4.FetchSubscriptionsResponse(
                subscriptions=[v4.Subscription(topic=topic, subscriber=own, status=3) for topic in has]
            )
        state = v3.SubscriptionStatus(state=S3.SUBSCRIBED)
        return v3.FetchSubscriptionsResponse(
            subscriptions=[
                v3.Subscription(topic=topic, subscriber=v3.SubscriberInfo(uri=own), status=state) for topic in has
            ]
        )

    async def until(self, *commands: str) -> None:
        async with asyncio.timeout(20):
            while [command for command, _ in self.commands[: len(commands)]] != list(commands):
                assert len(self.commands) <= len(commands), [command for command, _ in self.commands]
                self._news.clear()
                await self._news.wait()

    async def tell(self, major: int, topic: Any, status: Status) -> None:
        source, sink = uris.uri(self._authority, 0, major, 0x8000), uris.uri("a", 0, major, 0)
        made: Any = v4.Subscription(topic=topic, subscriber=sink, status=status + 1)
        if major == 3:
            made = v3.Update(
                topic=topic, subscriber=v3.SubscriberInfo(uri=sink), status=v3.SubscriptionStatus(state=status)
            )
        await self._transport.send(UMessageBuilder.notification(source, sink).pack(made))


@pytest.fixture
async def peer(world: Any) -> Any:
    """The service of authority b is a Peer that the test controls."""
    made = await Peer(await world.transport("b", 0, 4), "b").open()
    yield made
    await made.close()


async def wait_for(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(20):
        while not (result := await condition()):  # noqa: ASYNC110 - state of the store, which has no event
            await asyncio.sleep(0.01)
        return result


async def links(service: Any) -> dict[str, Any]:
    return {uris.format(_uri(topic)): link for topic, link in await service.store.read(lambda reader: reader.links())}


# -- two services
# -----------------------------------------------------------------------------------------------------------------


@both
@spec("req~usubscription-subscribe-remote~1", doc="v3")
@spec("req~usubscription-subscribe-remote~1", doc="v4")
@spec("dsn~usubscription-subscribe-remote-subscriber-change~1", doc="v3-seed")
@spec("dsn~usubscription-subscribe-remote-subscriber-change~1", doc="v3-today")
@spec("req~usubscription-subscribe-remote-response~1", doc="v3")
@spec("req~usubscription-subscribe-remote-response~1", doc="v4")
@spec("req~usubscription-subscribe-notifications~1", doc="v3")
@spec("req~usubscription-subscribe-notifications~1", doc="v4")
@spec("req~usubscription-unsubscribe-last-remote~1", doc="v3")
@spec("req~usubscription-unsubscribe-last-remote~1", doc="v4")
@spec("dsn~usubscription-unsubscribe-remote-subscriber-change~1", doc="v3")
async def test_subscribe_and_unsubscribe_between_two_services_both_ways(world: Any, major: int) -> None:
    services = {name: await world.service(name) for name in "ab"}
    for near, far, topic in (("a", "b", B_TOPIC), ("b", "a", A_TOPIC)):
        first, second = await world.raw(near, 0x10), await world.raw(near, 0x11)
        assert status(major, await first.call(major, 1, subscribe(major, topic))) is Status.SUBSCRIBE_PENDING
        assert statuses(major, await first.notified[major].count(2)) == [Status.SUBSCRIBE_PENDING, Status.SUBSCRIBED]
        (request,) = commands(world.forwarders[near, far].log)
        assert request.attributes.source == uris.uri(near, 0, major, 0)
        assert request.attributes.sink == uris.uri(far, 0, major, 1)
        assert request.attributes.ttl == 300_000
        assert request.attributes.priority >= UPriority.UPRIORITY_CS4
        if major == 3:
            assert UPayload.of(request).unpack(v3.SubscriptionRequest).subscriber.uri == uris.uri(near, 0, 3, 0)
        assert await known(services[far]) == [(uris.format(topic), near, "SUBSCRIBED")]

        # a follow-on subscriber: SUBSCRIBED at once, nothing is sent
        assert status(major, await second.call(major, 1, subscribe(major, topic))) is Status.SUBSCRIBED
        await first.call(major, 2, unsubscribe(major, topic))
        assert len(commands(world.forwarders[near, far].log)) == 1
        await second.call(major, 2, unsubscribe(major, topic))
        await wait_for(lambda far=far: _empty(services[far]))
        await wait_for(lambda near=near: _no_links(services[near]))
        _, left = commands(world.forwarders[near, far].log)
        assert (left.attributes.source, left.attributes.sink) == (
            uris.uri(near, 0, major, 0),
            uris.uri(far, 0, major, 2),
        )
        assert left.attributes.ttl == 300_000
        if major == 3:
            assert UPayload.of(left).unpack(v3.UnsubscribeRequest).subscriber.uri == uris.uri(near, 0, 3, 0)
        world.forwarders[near, far].log.clear()
        world.forwarders[far, near].log.clear()


async def _empty(service: Any) -> bool:
    return not await service.subscriptions()


async def _no_links(service: Any) -> bool:
    return not await links(service)


async def test_a_registrant_at_the_publisher_and_a_second_subscriber_are_notified_of_each_step(
    world: Any,
) -> None:
    for name in "ab":
        await world.service(name)
    first, second, watcher = await world.raw("a", 0x10), await world.raw("a", 0x11), await world.raw("b", 0x99)
    await watcher.call(3, 6, v3.NotificationsRequest(topic=B_TOPIC))
    await first.call(3, 1, subscribe(3, B_TOPIC))
    await first.notified[3].count(2)
    assert statuses(3, await watcher.notified[3].count(1)) == [Status.SUBSCRIBED]
    await second.call(3, 1, subscribe(3, B_TOPIC))
    assert statuses(3, await second.notified[3].count(1)) == [Status.SUBSCRIBED]
    for one in (first, second):
        await one.call(3, 2, unsubscribe(3, B_TOPIC))
    assert statuses(3, await first.notified[3].count(3))[-1] is Status.UNSUBSCRIBED
    assert statuses(3, await watcher.notified[3].count(2)) == [Status.SUBSCRIBED, Status.UNSUBSCRIBED]
    await watcher.call(3, 7, v3.NotificationsRequest(topic=B_TOPIC))
    await first.call(3, 1, subscribe(3, B_TOPIC))
    await first.notified[3].count(5)
    assert len(watcher.notified[3].heard) == 2


async def test_registrants_hear_of_the_pending_subscription_before_the_remote_request_leaves(world: Any) -> None:
    await world.service("b")
    service = await world.service("a")
    log: list[str] = []
    world.forwarders["a", "b"].lose = lambda message: (
        log.append("request" if message.attributes.type == REQUEST else "other") or False
    )
    service.on_change(lambda changes: log.extend(f"hook {change.status.name}" for change in changes))
    raw, watcher = await world.raw("a"), await world.raw("a", 0x99)
    await watcher.call(4, 4, v4.NotificationsRequest())
    heard = watcher.notified[4]
    keep = heard.on_receive
    heard.on_receive = lambda message: (log.append(f"told {statuses(4, [message])[0].name}"), keep(message))[1]
    await raw.call(4, 1, subscribe(4, B_TOPIC))
    await heard.count(2)
    order = [entry for entry in log if entry != "other"]
    assert order[:3] == ["hook SUBSCRIBE_PENDING", "told SUBSCRIBE_PENDING", "request"]


# -- a peer that does what the test says
# --------------------------------------------------------------------------------------------


@both
@spec("req~usubscription-subscribe-remote-response~1", doc="v3")
@spec("req~usubscription-subscribe-remote-response~1", doc="v4")
@pytest.mark.parametrize(
    "answer",
    [
        Status.UNSUBSCRIBED,
        Status.UNSUBSCRIBE_PENDING,
        UStatusError(UCode.PERMISSION_DENIED, "no"),
        UStatusError(UCode.NOT_FOUND, "no"),
    ],
    ids=repr,
)
async def test_a_refusal_unsubscribes_everybody(world: Any, peer: Peer, major: int, answer: Any) -> None:
    gate = asyncio.Event()

    async def later(command: str, request: UMessage) -> Any:
        await gate.wait()
        return answer

    peer.answer = later
    service = await world.service("a")
    members = [await world.raw("a", ue_id) for ue_id in (0x10, 0x11)]
    for one in members:
        assert status(major, await one.call(major, 1, subscribe(major, B_TOPIC))) is Status.SUBSCRIBE_PENDING
    gate.set()
    for one in members:
        assert statuses(major, await one.notified[major].count(2)) == [Status.SUBSCRIBE_PENDING, Status.UNSUBSCRIBED]
    assert await service.subscriptions() == []
    assert await links(service) == {}
    assert len(peer.commands) == 1


async def test_a_remote_that_forwards_itself_decides_with_its_notification(world: Any, peer: Peer) -> None:
    peer.answer = lambda command, request: Status.SUBSCRIBE_PENDING
    service = await world.service("a")
    raw = await world.raw("a")
    await raw.call(4, 1, subscribe(4, B_TOPIC))
    await peer.until("subscribe")
    await wait_for(lambda: _command_done(service))
    assert await known(service) == [(uris.format(B_TOPIC), "a", "SUBSCRIBE_PENDING")]
    await peer.tell(4, B_TOPIC, Status.SUBSCRIBED)
    assert statuses(4, await raw.notified[4].count(2)) == [Status.SUBSCRIBE_PENDING, Status.SUBSCRIBED]
    await peer.tell(4, B_TOPIC, Status.SUBSCRIBE_PENDING)
    await peer.tell(4, B_TOPIC, Status.UNSUBSCRIBED)
    assert statuses(4, await raw.notified[4].count(4))[2:] == [Status.SUBSCRIBE_PENDING, Status.UNSUBSCRIBED]
    assert await links(service) == {}


async def _command_done(service: Any) -> bool:
    return all(link.command is None for link in (await links(service)).values())


async def test_what_others_say_about_our_subscriptions_counts_only_from_their_own_service(
    world: Any, peer: Peer
) -> None:
    service = await world.service("a")
    raw = await world.raw("a")
    await raw.call(4, 1, subscribe(4, B_TOPIC))
    await raw.notified[4].count(2)
    elsewhere = Peer(await world.transport("c", 0, 4), "c")
    await elsewhere.tell(4, B_TOPIC, Status.UNSUBSCRIBED)
    garbage = UPayload(b"\xff" * 20, UPayload.pack(B_TOPIC).format)
    await raw.notify(uris.uri("a", 0x10, 1, 0x8000), uris.uri("a", 0, 4, 0), garbage)
    await peer.tell(4, A_TOPIC, Status.UNSUBSCRIBED)
    await raw.call(4, 1, subscribe(4, A_TOPIC))
    assert [entry[2] for entry in await known(service)] == ["SUBSCRIBED", "SUBSCRIBED"]


@spec("req~usubscription-remote-retry-indefinitely~1", doc="v3")
@spec("req~usubscription-remote-retry-indefinitely~1", doc="v4")
async def test_a_command_is_retried_until_answered_across_our_restart_and_the_remotes(world: Any, peer: Peer) -> None:
    answers = itertools.chain(
        [
            UStatusError(UCode.UNAVAILABLE, "away"),
            UStatusError(UCode.DEADLINE_EXCEEDED, "late"),
            UStatusError(UCode.UNAVAILABLE, "away"),
        ]
    )
    peer.answer = lambda command, request: next(answers, Status.SUBSCRIBED)
    await world.service("a")
    raw = await world.raw("a")
    await raw.call(4, 1, subscribe(4, B_TOPIC))
    await peer.until("subscribe")
    await world.stop("a")
    service = await world.service("a")
    await peer.until("subscribe", "subscribe")
    await peer.close()  # the remote restarts as well
    again = await Peer(await world.transport("b", 0, 4), "b").open()
    again.answer = peer.answer
    await again.until("subscribe", "subscribe")
    assert statuses(4, await raw.notified[4].until(lambda heard: statuses(4, heard)[-1] is Status.SUBSCRIBED))
    assert [entry[2] for entry in await known(service)] == ["SUBSCRIBED"]
    await again.close()


@spec("req~usubscription-remote-max-timeout~1", doc="v3")
@spec("req~usubscription-remote-max-timeout~1", doc="v4")
async def test_a_lost_request_is_said_again_while_the_first_still_counts(world: Any, peer: Peer) -> None:
    """A network that loses messages without a receiver must not cost five minutes, although that is the timeout of each
    request."""
    gates = [asyncio.Event(), asyncio.Event()]
    waiting = iter(gates)

    async def answer(command: str, request: UMessage) -> Any:
        gate = next(waiting, None)
        if gate is not None:
            await gate.wait()
        return Status.SUBSCRIBED

    peer.answer = answer
    service = await world.service("a", remote_repeat_ms=50)
    raw = await world.raw("a")
    await raw.call(3, 1, subscribe(3, B_TOPIC))
    await peer.until("subscribe", "subscribe", "subscribe")
    assert {request.attributes.ttl for _, request in peer.commands} == {300_000}
    assert statuses(3, await raw.notified[3].count(2))[-1] is Status.SUBSCRIBED
    for gate in gates:
        gate.set()
    assert await _command_done(service)


@spec("req~usubscription-unsubscribe-remote-unsubscribed~1", doc="v3")
@spec("req~usubscription-unsubscribe-remote-unsubscribed~1", doc="v4")
@pytest.mark.parametrize(
    "answer", [Status.UNSUBSCRIBED, UStatusError(UCode.INTERNAL, "no"), UStatusError(UCode.NOT_FOUND, "no")], ids=repr
)
@both
async def test_having_unsubscribed_the_topic_is_unsubscribed_whatever_the_remote_answers(
    world: Any, peer: Peer, major: int, answer: Any
) -> None:
    """A temporary error there is retried, so that no copy of it stays."""
    peer.answer = lambda command, request: Status.SUBSCRIBED if command == "subscribe" else answer
    service = await world.service("a")
    raw = await world.raw("a")
    await raw.call(major, 1, subscribe(major, B_TOPIC))
    await raw.notified[major].count(2)
    await raw.call(major, 2, unsubscribe(major, B_TOPIC))
    assert await service.subscriptions() == []
    await peer.until("subscribe", "unsubscribe")
    if isinstance(answer, UStatusError) and answer.code == UCode.INTERNAL:
        peer.answer = lambda command, request: Status.UNSUBSCRIBED
        await peer.until("subscribe", "unsubscribe", "unsubscribe")
    await wait_for(lambda: _no_links(service))
    assert (
        UPayload.of(peer.commands[1][1]).unpack(v3.UnsubscribeRequest if major == 3 else v4.UnsubscribeRequest).topic
        == B_TOPIC
    )


@spec("req~usubscription-remote-max-timeout~1", doc="v3")
@spec("req~usubscription-remote-max-timeout~1", doc="v4")
@both
async def test_an_answer_to_the_first_request_counts_however_often_it_was_said_again(
    world: Any, peer: Peer, major: int
) -> None:
    """It has its own five minutes, whatever requests are sent meanwhile."""
    late, never = asyncio.Event(), asyncio.Event()
    asked = itertools.count()

    async def answer(command: str, request: UMessage) -> Any:
        await (never if next(asked) else late).wait()
        return Status.SUBSCRIBED

    peer.answer = answer
    service = await world.service("a", remote_repeat_ms=10)
    raw = await world.raw("a")
    await raw.call(major, 1, subscribe(major, B_TOPIC))
    async with asyncio.timeout(20):
        while len(peer.commands) < 6:
            peer._news.clear()
            await peer._news.wait()
    assert {request.attributes.ttl for _, request in peer.commands} == {300_000}
    late.set()
    assert statuses(major, await raw.notified[major].count(2)) == [Status.SUBSCRIBE_PENDING, Status.SUBSCRIBED]
    await wait_for(lambda: _command_done(service))


@both
@spec("req~usubscription-subscribe-remote-pending~1", doc="v3")
@spec("req~usubscription-subscribe-remote-pending~1", doc="v4")
async def test_everybody_who_has_the_topic_is_pending_while_the_remote_is_asked(
    world: Any, peer: Peer, major: int
) -> None:
    """At the first Subscribe, and at a later one because the remote service has lost it."""
    gates = [asyncio.Event(), asyncio.Event()]
    waiting = iter(gates)

    async def answer(command: str, request: UMessage) -> Any:
        await next(waiting).wait()
        return Status.SUBSCRIBED

    peer.answer = answer
    service = await world.service("a", remote_repeat_ms=60_000)
    members = [await world.raw("a", ue_id) for ue_id in (0x10, 0x11)]
    first, second = members
    assert status(major, await first.call(major, 1, subscribe(major, B_TOPIC))) is Status.SUBSCRIBE_PENDING
    await peer.until("subscribe")
    assert status(major, await second.call(major, 1, subscribe(major, B_TOPIC))) is Status.SUBSCRIBE_PENDING
    for gate in gates:
        assert [entry[2] for entry in await known(service)] == ["SUBSCRIBE_PENDING"] * 2
        peer.has = [B_TOPIC]
        gate.set()
        for one in members:
            await one.notified[major].until(
                lambda heard: bool(heard) and statuses(major, heard)[-1] is Status.SUBSCRIBED
            )
        if gate is gates[0]:
            peer.has = []
            world.transports["a"].disconnect()
            world.transports["a"].reconnect()  # causes an audit
            await peer.until("subscribe", "subscribe")
    for one in members:
        assert statuses(major, one.notified[major].heard) == [Status.SUBSCRIBE_PENDING, Status.SUBSCRIBED] * 2


@both
@spec("req~usubscription-subscribe-unsubscribe-pending~1", doc="v3")
@spec("req~usubscription-subscribe-unsubscribe-pending~1", doc="v4")
async def test_subscribe_while_the_unsubscribe_is_under_way_asks_the_remote_again(
    world: Any, peer: Peer, major: int
) -> None:
    gate = asyncio.Event()

    async def answer(command: str, request: UMessage) -> Any:
        if command == "unsubscribe":
            await gate.wait()
        return Status.SUBSCRIBED

    peer.answer = answer
    service = await world.service("a", remote_repeat_ms=60_000)
    raw = await world.raw("a")
    await raw.call(major, 1, subscribe(major, B_TOPIC))
    await raw.notified[major].count(2)
    await raw.call(major, 2, unsubscribe(major, B_TOPIC))
    await peer.until("subscribe", "unsubscribe")
    (link,) = (await links(service)).values()
    assert link.state is Status.UNSUBSCRIBE_PENDING
    before = len(raw.notified[major].heard)
    assert status(major, await raw.call(major, 1, subscribe(major, B_TOPIC))) is Status.SUBSCRIBE_PENDING
    (link,) = (await links(service)).values()
    assert link.state is Status.SUBSCRIBE_PENDING
    gate.set()
    await peer.until("subscribe", "unsubscribe", "subscribe")
    assert peer.commands[2][1].attributes.source == uris.uri("a", 0, major, 0)
    heard = await raw.notified[major].until(
        lambda heard: len(heard) > before and statuses(major, heard)[-1] is Status.SUBSCRIBED
    )
    assert statuses(major, heard)[-2:] == [Status.SUBSCRIBE_PENDING, Status.SUBSCRIBED]


@both
@spec("req~usubscription-unsubscribe-subscribe-pending~1", doc="v3")
@spec("req~usubscription-unsubscribe-subscribe-pending~1", doc="v4")
@spec("req~usubscription-remote-unsubscribe-notifications~1", doc="v4")
async def test_crossing_commands_end_in_the_state_of_the_last_one_one_of_a_topic_in_flight(
    world: Any, peer: Peer, major: int
) -> None:
    gate = asyncio.Event()

    async def slowly(command: str, request: UMessage) -> Any:
        await gate.wait()
        return Status.SUBSCRIBED

    peer.answer = slowly
    service = await world.service("a", remote_repeat_ms=60_000)
    raw = await world.raw("a")
    assert status(major, await raw.call(major, 1, subscribe(major, B_TOPIC))) is Status.SUBSCRIBE_PENDING
    await peer.until("subscribe")
    await raw.call(major, 2, unsubscribe(major, B_TOPIC))  # while SUBSCRIBE_PENDING
    (link,) = (await links(service)).values()
    assert link.state is Status.UNSUBSCRIBE_PENDING
    assert await service.subscriptions() == []
    # while UNSUBSCRIBE_PENDING
    assert status(major, await raw.call(major, 1, subscribe(major, B_TOPIC))) is Status.SUBSCRIBE_PENDING
    await raw.call(major, 2, unsubscribe(major, B_TOPIC))
    gate.set()
    await peer.until("subscribe", "unsubscribe")  # the two in between were replaced before they were sent
    await wait_for(lambda: _no_links(service))
    assert peer.running_max == 1
    last = await raw.published[major].count(4)
    assert statuses(major, last)[-1] is Status.UNSUBSCRIBED
    await raw.call(major, 1, subscribe(major, A_TOPIC))
    await raw.published[major].count(5)  # and nothing about the remote topic in between
    assert len(raw.published[major].heard) == 5


async def test_commands_to_one_remote_leave_in_order_and_a_lost_one_holds_its_own_topic_only(
    world: Any, peer: Peer
) -> None:
    topics = [uris.uri("b", 0x20, 1, 0x8000 + number) for number in range(100)]

    async def one_is_lost(command: str, request: UMessage) -> Any:
        if UPayload.of(request).unpack(v4.SubscribeRequest).topic == topics[1]:
            await asyncio.Event().wait()
        return Status.SUBSCRIBED

    peer.answer = one_is_lost
    await world.service("c")
    service = await world.service("a", remote_repeat_ms=60_000)
    raw = await world.raw("a")
    for topic in topics:
        await raw.call(4, 1, subscribe(4, topic))
    await raw.call(4, 1, subscribe(4, uris.parse("//c/20/1/8001")))
    assert await wait_for(lambda: _status_of(service, "up://c/20/1/8001", "SUBSCRIBED"))
    await peer.until(*["subscribe"] * len(topics))
    assert [UPayload.of(request).unpack(v4.SubscribeRequest).topic for _, request in peer.commands] == topics
    await wait_for(lambda: _pending(service, [uris.format(topics[1])]))


async def test_a_command_does_not_overtake_one_that_still_waits_for_the_disk(
    world: Any, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = [uris.uri("b", 0x20, 1, 0x8000 + number) for number in range(3)]
    await world.service("c")
    service = await world.service("a")
    saved, waiting = asyncio.Event(), False

    async def slow_the_first_time(partner: Any) -> None:
        nonlocal waiting
        if partner == ("b", 4) and not waiting:
            waiting = True
            await saved.wait()

    monkeypatch.setattr(service.remote.partners, "remember", slow_the_first_time)
    raw = await world.raw("a")
    for topic in [*topics, uris.parse("//c/20/1/8001")]:
        await raw.call(4, 1, subscribe(4, topic))
    assert await wait_for(lambda: _status_of(service, "up://c/20/1/8001", "SUBSCRIBED"))
    assert waiting
    assert not peer.commands
    saved.set()
    await peer.until(*["subscribe"] * len(topics))
    assert [UPayload.of(request).unpack(v4.SubscribeRequest).topic for _, request in peer.commands] == topics


async def _pending(service: Any, topics: list[str]) -> bool:
    return [entry[0] for entry in await known(service) if entry[2] == "SUBSCRIBE_PENDING"] == topics


async def test_a_remote_that_does_not_answer_gets_few_commands_and_all_of_them_once_it_does(
    world: Any, peer: Peer
) -> None:
    gate = asyncio.Event()

    async def later(command: str, request: UMessage) -> Any:
        await gate.wait()
        return Status.SUBSCRIBED

    peer.answer = later
    service = await world.service("a", remote_repeat_ms=60_000)
    raw = await world.raw("a")
    for number in range(WINDOW_FIRST * 4):
        await raw.call(4, 1, subscribe(4, uris.uri("b", 0x20, 1, 0x8000 + number)))
    await peer.until(*["subscribe"] * WINDOW_FIRST)
    assert peer.running == WINDOW_FIRST
    gate.set()
    await wait_for(lambda: _pending(service, []))
    assert len(peer.commands) == WINDOW_FIRST * 4


@pytest.mark.parametrize("command", ["subscribe", "unsubscribe"])
@pytest.mark.parametrize(
    "code",
    [code for code in UCode.values() if code not in (UCode.OK, *FINAL)] + [99],
    ids=lambda code: UCode.Name(code) if code in UCode.values() else str(code),
)
async def test_a_passing_shortage_ends_nothing(world: Any, peer: Peer, code: Any, command: str) -> None:
    """After any error that is not a permanent refusal it is repeated, including codes of a later specification."""
    shortages = iter([UStatusError(code, "not now")])
    peer.answer = lambda asked, request: next(shortages, Status.SUBSCRIBED) if asked == command else Status.SUBSCRIBED
    service = await world.service("a")
    raw = await world.raw("a")
    await raw.call(4, 1, subscribe(4, B_TOPIC))
    assert statuses(4, await raw.notified[4].count(2)) == [Status.SUBSCRIBE_PENDING, Status.SUBSCRIBED]
    if command == "unsubscribe":
        await raw.call(4, 2, unsubscribe(4, B_TOPIC))
        await peer.until("subscribe", "unsubscribe", "unsubscribe")
        await wait_for(lambda: _no_links(service))
    else:
        await peer.until("subscribe", "subscribe")


@pytest.mark.parametrize(
    "payload", [None, b"", b"\xff" * 9, b"\x10\x63"], ids=["none", "empty", "garbage", "unknown status"]
)
@both
async def test_an_answer_that_cannot_be_read_ends_nothing(world: Any, major: int, payload: bytes | None) -> None:
    transport = await world.transport("b", 0, 4)
    answers = iter([UPayload(payload, UPayload.pack(B_TOPIC).format) if payload is not None else UPayload(b"", 0)])
    good: Any = (
        v4.SubscribeResponse(status=3) if major == 4 else v3.SubscriptionResponse(status=v3.SubscriptionStatus(state=2))
    )
    async with contextlib.AsyncExitStack() as stack:
        server = InMemoryRpcServer(transport, LocalUriProvider("b", 0, major), drain_ms_max=0)
        stack.push_async_callback(server.close)
        await server.register_request_handler(1, lambda request: next(answers, good))
        await world.service("a")
        raw = await world.raw("a")
        await raw.call(major, 1, subscribe(major, B_TOPIC))
        assert statuses(major, await raw.notified[major].count(2)) == [Status.SUBSCRIBE_PENDING, Status.SUBSCRIBED]


async def test_our_own_shortage_ends_nothing(world: Any, peer: Peer) -> None:
    """The first sends fail locally, as with a full express lane."""
    service = await world.service("a")
    transport = world.transports["a"]
    send, refusals = transport.send_batch, iter([UCode.RESOURCE_EXHAUSTED, UCode.INTERNAL])

    async def refuse_requests(messages: Any) -> Any:
        if any(one.attributes.type == REQUEST for one in messages) and (code := next(refusals, None)) is not None:
            return [UStatus(code=code, message="full")] * len(messages)
        return await send(messages)

    transport.send_batch = refuse_requests
    raw = await world.raw("a")
    await raw.call(4, 1, subscribe(4, B_TOPIC))
    assert statuses(4, await raw.notified[4].count(2)) == [Status.SUBSCRIBE_PENDING, Status.SUBSCRIBED]
    assert len(await service.subscriptions()) == 1


async def _status_of(service: Any, topic: str, status: str) -> bool:
    return any(entry[0] == topic and entry[2] == status for entry in await known(service))


async def test_the_smallest_sample_period_is_asked_for_and_asked_again_when_it_shrinks(world: Any, peer: Peer) -> None:
    await world.service("a")
    members = [await world.raw("a", ue_id) for ue_id in range(0x10, 0x14)]
    for one, period in zip(members, (500, 700, 300, None), strict=True):
        options = {} if period is None else {"sample_period": period}
        expected = Status.SUBSCRIBE_PENDING if one is members[0] else Status.SUBSCRIBED
        assert status(4, await one.call(4, 1, subscribe(4, B_TOPIC, **options))) is expected
        if one is members[0]:
            await one.notified[4].count(2)
        if one is members[2]:
            await peer.until("subscribe", "subscribe")  # or the last one may replace it
    await peer.until("subscribe", "subscribe", "subscribe")
    asked = [UPayload.of(request).unpack(v4.SubscribeRequest) for _, request in peer.commands]
    assert [one.sample_period if one.HasField("sample_period") else None for one in asked] == [500, 300, None]
    assert not any(one.HasField("expiration") for one in asked)


async def test_the_last_ones_expiry_unsubscribes_remotely(world: Any, peer: Peer) -> None:
    service = await world.service("a")
    raw = await world.raw("a")
    await raw.call(4, 1, v4.SubscribeRequest(topic=B_TOPIC, expiration=timestamp(now_ms() + 1_000)))
    await peer.until("subscribe")
    await peer.until("subscribe", "unsubscribe")
    assert statuses(4, await raw.notified[4].count(3))[-1] is Status.UNSUBSCRIBED
    assert await service.subscriptions() == []


async def test_the_remote_major_is_the_clients_unless_configured(world: Any, peer: Peer) -> None:
    await world.service("a", remote_majors={"b": 3})
    raw = await world.raw("a")
    await raw.call(4, 1, subscribe(4, B_TOPIC))
    await peer.until("subscribe")
    assert peer.commands[0][1].attributes.sink.ue_version_major == 3
    assert statuses(4, await raw.notified[4].count(2))[-1] is Status.SUBSCRIBED


async def test_a_remote_that_lost_its_store_is_noticed_and_subscribed_again(world: Any) -> None:
    await world.service("b")
    service = await world.service("a")
    raw = await world.raw("a")
    await raw.call(4, 1, subscribe(4, B_TOPIC))
    await raw.notified[4].count(2)
    await world.stop("b")
    for left in world.path.glob("b.db*"):
        left.unlink()
    there = await world.service("b")
    assert await there.subscriptions() == []
    world.transports["a"].disconnect()
    world.transports["a"].reconnect()  # causes an audit
    assert statuses(4, await raw.notified[4].count(4))[2:] == [Status.SUBSCRIBE_PENDING, Status.SUBSCRIBED]
    assert await known(there) == [(uris.format(B_TOPIC), "a", "SUBSCRIBED")]
    assert (await links(service))[uris.format(B_TOPIC)].state is Status.SUBSCRIBED


async def test_what_the_remote_has_too_much_is_unsubscribed(world: Any, peer: Peer) -> None:
    orphan = uris.parse("//b/20/1/8099")
    service = await world.service("a", audit_ms=100)
    peer.has = [B_TOPIC, orphan]
    raw = await world.raw("a")
    await raw.call(4, 1, subscribe(4, B_TOPIC))
    await peer.until("subscribe", "unsubscribe")
    assert UPayload.of(peer.commands[1][1]).unpack(v4.UnsubscribeRequest).topic == orphan
    peer.has.remove(orphan)
    await wait_for(lambda: _links_are(service, [uris.format(B_TOPIC)]))


async def _links_are(service: Any, topics: list[str]) -> bool:
    return sorted(await links(service)) == topics


async def test_a_late_notification_about_an_old_unsubscribe_does_not_end_the_new_subscription(
    world: Any, peer: Peer
) -> None:
    service = await world.service("a")
    raw = await world.raw("a")
    peer.has = [B_TOPIC]
    await raw.call(3, 1, subscribe(3, B_TOPIC))
    await raw.notified[3].count(2)
    await raw.call(3, 2, unsubscribe(3, B_TOPIC))
    await peer.until("subscribe", "unsubscribe")
    await raw.call(4, 1, subscribe(4, B_TOPIC))
    assert statuses(4, await raw.notified[4].count(2))[-1] is Status.SUBSCRIBED
    await peer.tell(4, B_TOPIC, Status.UNSUBSCRIBED)
    await wait_for(lambda: _audited(service))
    assert [entry[2] for entry in await known(service)] == ["SUBSCRIBED"]
    peer.has = []  # now it is true
    await peer.tell(4, B_TOPIC, Status.UNSUBSCRIBED)
    assert statuses(4, await raw.notified[4].count(3))[-1] is Status.UNSUBSCRIBED
    assert await service.subscriptions() == []


async def test_an_answer_that_is_older_than_the_last_notification_does_not_end_the_question(
    world: Any, peer: Peer
) -> None:
    service = await world.service("a")
    raw = await world.raw("a")
    peer.has = [B_TOPIC]
    await raw.call(4, 1, subscribe(4, B_TOPIC))
    assert statuses(4, await raw.notified[4].count(2))[-1] is Status.SUBSCRIBED
    await wait_for(lambda: _audited(service))
    peer.lists.clear()
    before = peer.asked
    await peer.tell(4, B_TOPIC, Status.UNSUBSCRIBED)
    await wait_for(lambda: _is(peer.asked > before))
    peer.has = []
    first = service.remote.auditor._suspects.get(uris.key(B_TOPIC))
    await peer.tell(4, B_TOPIC, Status.UNSUBSCRIBED)
    await wait_for(lambda: _is(service.remote.auditor._suspects.get(uris.key(B_TOPIC)) != first))
    peer.lists.set()
    assert statuses(4, await raw.notified[4].count(3))[-1] is Status.UNSUBSCRIBED


async def _is(condition: bool) -> bool:
    return condition


async def _audited(service: Any) -> bool:
    return not service.remote.auditor._suspects and not service.remote.auditor._wake.is_set()


async def test_responses_and_notifications_of_the_remote_leg_carry_valid_attributes(world: Any) -> None:
    for name in "ab":
        await world.service(name)
    raw = await world.raw("a")
    await raw.call(4, 1, subscribe(4, B_TOPIC))
    await raw.notified[4].count(2)
    back = [one for one in world.forwarders["b", "a"].log if one.attributes.type != REQUEST]  # of its own audit
    assert {one.attributes.type for one in back} <= {RESPONSE, NOTIFICATION}
    assert back[0].attributes.type == RESPONSE, "response first, then the notification (C-23)"
