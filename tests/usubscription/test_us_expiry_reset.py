"""Expiry and Reset, over the wire; the clock is the test's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from uprotocol import uri as uris
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription import service as service_module
from usubscription.codec import EXPIRY_MS_MAX, EXPIRY_MS_MIN, timestamp
from usubscription.state import Status, is_past, next_expiry

TOPIC = uris.parse("//dev1/20/1/8001")
OTHER = uris.parse("//dev1/20/1/8002")
FAR = uris.parse("//dev2/20/1/8001")
NOW = 1_900_000_000_000
spec = pytest.mark.spec


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(service_module, "EXPIRY_CHECK_MS", 10)
    return Clock()


async def subscribe(raw: Any, major: int, expires_ms: int | None, topic: Any = TOPIC) -> Status:
    if major == 4:
        request = v4.SubscribeRequest(topic=topic, expiration=timestamp(expires_ms) if expires_ms is not None else None)
        return Status((await raw.call(4, 1, request)).unpack(v4.SubscribeResponse).status - 1)
    old = v3.SubscriptionRequest(topic=topic)
    if expires_ms is not None:
        old.attributes.expire.CopyFrom(timestamp(expires_ms))
    return Status((await raw.call(3, 1, old)).unpack(v3.SubscriptionResponse).status.state)


def told(major: int, messages: Any) -> list[Status]:
    if major == 3:
        return [Status(UPayload.of(one).unpack(v3.Update).status.state) for one in messages]
    return [Status(UPayload.of(one).unpack(v4.Subscription).status - 1) for one in messages]


@pytest.mark.parametrize("major", [3, 4])
@spec("req~usubscription-subscribe-expiration~1", doc="v3")
@spec("req~usubscription-subscribe-expiration~1", doc="v4")
async def test_a_subscription_ends_after_its_expiry_not_in_that_millisecond_and_its_client_is_told(
    world: Any, clock: Clock, major: int
) -> None:
    service = await world.service(now_ms=clock)
    raw = await world.raw()
    assert await subscribe(raw, major, NOW + 1000) is Status.SUBSCRIBED
    clock.now = NOW + 1000
    assert len(await service.subscriptions()) == 1
    await asyncio.sleep(0.05)  # several looks at the clock
    assert len(raw.published[major].heard) == 1
    clock.now = NOW + 1001
    assert await service.subscriptions() == [], "at once, whether or not it was swept yet"
    assert told(major, await raw.notified[major].count(2)) == [Status.SUBSCRIBED, Status.UNSUBSCRIBED]
    assert told(major, await raw.published[major].count(2)) == [Status.SUBSCRIBED, Status.UNSUBSCRIBED]


@pytest.mark.parametrize("major", [3, 4])
@spec("req~usubscription-past-subscription-expiration~1", doc="v4")
async def test_a_new_subscription_that_is_past_is_not_stored_and_says_nothing(world: Any, clock: Clock, major: int) -> None:
    service = await world.service(now_ms=clock)
    raw = await world.raw()
    for past in (NOW - 1, 0, EXPIRY_MS_MIN):
        assert await subscribe(raw, major, past) is Status.UNSUBSCRIBED
    assert await subscribe(raw, major, past, FAR) is Status.UNSUBSCRIBED
    assert await service.subscriptions() == []
    assert await service.read(lambda reader: reader.links()) == []
    assert await subscribe(raw, major, EXPIRY_MS_MAX, OTHER) is Status.SUBSCRIBED
    heard = await raw.published[major].count(1)
    assert told(major, heard) == [Status.SUBSCRIBED]


@spec("req~usubscription-subscribe-expiration-extension-past~1", doc="v4")
async def test_v4_a_new_expiry_in_the_past_unsubscribes(world: Any, clock: Clock) -> None:
    service = await world.service(now_ms=clock)
    raw = await world.raw()
    assert await subscribe(raw, 4, NOW + 1000) is Status.SUBSCRIBED
    assert await subscribe(raw, 4, NOW - 1) is Status.UNSUBSCRIBED
    assert await service.subscriptions() == []
    assert told(4, await raw.notified[4].count(2)) == [Status.SUBSCRIBED, Status.UNSUBSCRIBED]


CASES = [  # current, asked -> in version 3, in version 4
    (None, None, None, None),
    (None, 10, None, 10),
    (10, 20, 20, 20),
    (20, 10, 20, 10),
    (10, None, None, None),
    (10, 10, 10, 10),
    (10, -5, 10, -5),
]


@pytest.mark.parametrize(("current", "asked", "three", "four"), CASES)
def test_the_expiry_after_a_repeated_subscribe(current: int | None, asked: int | None, three: int | None, four: int | None) -> None:
    assert next_expiry(current, asked, only_extends=True) == three
    assert next_expiry(current, asked, only_extends=False) == four
    assert [is_past(expiry, 0) for expiry in (None, 0, 1, -1)] == [False, False, False, True]


@spec("req~usubscription-subscribe-expiration-extension~1", doc="v3-seed")
@spec("req~usubscription-subscribe-expiration-extension~1", doc="v4")
async def test_v3_only_extends_and_v4_may_shorten(world: Any, clock: Clock) -> None:
    service = await world.service(now_ms=clock)
    raw = await world.raw()

    async def expiry_after(major: int, asked: int | None) -> int | None:
        assert await subscribe(raw, major, asked) is Status.SUBSCRIBED
        (row,) = await service.subscriptions()
        expires_ms: int | None = row.expires_ms
        return expires_ms

    assert await expiry_after(3, NOW + 10_000) == NOW + 10_000
    assert await expiry_after(3, NOW + 20_000) == NOW + 20_000
    assert await expiry_after(3, NOW + 5_000) == NOW + 20_000
    assert await expiry_after(4, NOW + 5_000) == NOW + 5_000
    assert await expiry_after(4, NOW + 7_000) == NOW + 7_000
    assert await expiry_after(3, None) is None
    assert await expiry_after(3, NOW + 5_000) is None


@spec("req~usubscription-subscribe-expiration-extension~1", doc="v3-today")
async def test_v3_may_shorten_where_todays_text_is_chosen(world: Any, clock: Clock) -> None:
    service = await world.service(now_ms=clock, v3_only_extends=False)
    raw = await world.raw()
    for asked in (NOW + 20_000, NOW + 5_000, NOW + 7_000, None, NOW + 1):
        assert await subscribe(raw, 3, asked) is Status.SUBSCRIBED
        (row,) = await service.subscriptions()
        assert row.expires_ms == asked
    assert await subscribe(raw, 3, NOW - 1) is Status.UNSUBSCRIBED
    assert await service.subscriptions() == []


async def test_what_expired_while_the_service_was_down_ends_at_start_in_the_order_of_expiry(world: Any, clock: Clock) -> None:
    await world.service(now_ms=clock)
    raw = await world.raw()
    for number in range(3):
        await subscribe(raw, 4, NOW + 3000 - number, uris.uri("dev1", 0x20, 1, 0x8000 + number))
    await raw.notified[4].count(3)
    await world.stop()
    clock.now = NOW + 10_000
    await world.service(now_ms=clock)
    heard = await raw.notified[4].count(6)
    ended = [UPayload.of(one).unpack(v4.Subscription) for one in heard[3:]]
    assert [(one.topic.resource_id, one.status) for one in ended] == [(0x8002, 1), (0x8001, 1), (0x8000, 1)]


async def test_a_clock_that_jumps_back_ends_nothing_early(world: Any, clock: Clock) -> None:
    service = await world.service(now_ms=clock)
    raw = await world.raw()
    await subscribe(raw, 4, NOW + 1000)
    clock.now = NOW - 10**9
    await asyncio.sleep(0.05)
    assert len(await service.subscriptions()) == 1
    clock.now = NOW + 1001
    await raw.notified[4].count(2)


# -- reset ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("major", [3, 4])
@spec("dsn~usubscription-reset-protobuf~1", doc="v3-seed")
@spec("dsn~usubscription-reset-protobuf~1", doc="v3-today")
@spec("req~usubscription-reset~1", doc="v3-seed")
@spec("req~usubscription-reset~1", doc="v3-today")
@spec("req~usubscription-reset~1", doc="v4")
@spec("req~usubscription-reset-method_id~1", doc="v4")
@spec("req~usubscription-reset-request-signature~1", doc="v4")
@spec("req~usubscription-reset-response-signature~1", doc="v4")
async def test_reset_flushes_everything_for_good_and_tells_everybody(world: Any, major: int) -> None:
    await world.service()
    old, new, watcher, quiet = [await world.raw(ue_id=ue_id) for ue_id in (0x10, 0x11, 0x99, 0x98)]
    await subscribe(old, 3, None)
    await subscribe(new, 4, None, FAR)
    await watcher.call(4, 4)
    await watcher.call(3, 6, v3.NotificationsRequest(topic=TOPIC))
    await quiet.call(3, 6, v3.NotificationsRequest(topic=OTHER))
    peer = await world.raw(ue_id=0, version=9)
    request = v4.ResetRequest() if major == 4 else v3.ResetRequest(reason=v3.ResetRequest.Reason(code=1), before=timestamp(0))
    assert (await peer.call(major, 9 if major == 3 else 6, request)).data == b""
    assert told(3, await old.notified[3].count(2)) == [Status.SUBSCRIBED, Status.UNSUBSCRIBED]
    assert told(4, await new.notified[4].count(2)) == [Status.SUBSCRIBE_PENDING, Status.UNSUBSCRIBED]
    assert told(4, await watcher.notified[4].count(2)) == [Status.UNSUBSCRIBED] * 2
    assert told(3, await watcher.notified[3].count(1)) == [Status.UNSUBSCRIBED]
    (last,) = await quiet.notified[3].count(1)  # registered for a topic that nobody had: told that it is over
    assert UPayload.of(last).unpack(v3.Update).topic == OTHER
    for _ in range(2):
        service = world.services["dev1"]
        assert await service.subscriptions() == []
        assert await service.read(lambda reader: (reader.links(), reader.registrations())) == ([], [])
        await world.stop()
        await world.service()
    await subscribe(old, 3, None)
    await old.notified[3].count(3)
    assert len(watcher.notified[4].heard) == 2, "its registration is gone"


@pytest.mark.parametrize(
    ("major", "ue_id", "allowed"), [(3, 0, True), (3, 0x10000, False), (4, 0x10000, True), (3, 5, False), (4, 5, False)]
)
@spec("req~usubscription-reset-only-usubscription~1", doc="v3")
@spec("req~usubscription-reset-only-usubscription~1", doc="v4")
async def test_only_a_usubscription_service_may_reset(world: Any, major: int, ue_id: int, allowed: bool) -> None:
    service = await world.service()
    await subscribe(await world.raw(), 3, None)
    caller = await world.raw(ue_id=ue_id, version=9)
    call = caller.call(major, 9 if major == 3 else 6)
    if allowed:
        await call
    else:
        with pytest.raises(UStatusError) as error:
            await call
        assert error.value.code == UCode.PERMISSION_DENIED
    assert len(await service.subscriptions()) == (0 if allowed else 1)


async def test_reset_cancels_remote_commands_and_tells_the_peers_nothing(world: Any) -> None:
    service = await world.service(remote_repeat_ms=20)
    raw, peer = await world.raw(), await world.raw(ue_id=0, version=9)
    await world.network("dev2")
    log = world.forwarders["dev1", "dev2"].log
    await subscribe(raw, 4, None, FAR)
    async with asyncio.timeout(20):
        while len(log) < 2:  # noqa: ASYNC110 - said again, since nobody answers; a list has no event
            await asyncio.sleep(0.01)
    await peer.call(4, 6)
    await asyncio.sleep(0.1)
    commands = [one for one in log if one.attributes.sink.resource_id == 1]
    assert {one.attributes.sink.resource_id for one in log} <= {1, 3}, "it asks what the other one has of ours, and commands nothing"
    await asyncio.sleep(0.1)
    assert [one for one in log if one.attributes.sink.resource_id == 1] == commands
    assert await service.read(lambda reader: reader.links()) == []
