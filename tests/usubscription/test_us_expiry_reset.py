"""Expiry and Reset over a transport; the test controls the clock."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import pytest

from uprotocol import uri as uris
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.core.usubscription.wire import EXPIRY_MS_MAX, EXPIRY_MS_MIN, timestamp
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription import service as service_module
from usubscription.state import Status, is_past

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


def statuses(major: int, messages: Any) -> list[Status]:
    if major == 3:
        return [Status(UPayload.of(one).unpack(v3.Update).status.state) for one in messages]
    return [Status(UPayload.of(one).unpack(v4.Subscription).status - 1) for one in messages]


@pytest.mark.parametrize("major", [3, 4])
@spec("req~usubscription-subscribe-expiration~1", doc="v3")
@spec("req~usubscription-subscribe-expiration~1", doc="v4")
@spec("req~usubscription-subscribe-notifications~1", doc="v3")
@spec("req~usubscription-subscribe-notifications~1", doc="v4")
async def test_a_subscription_ends_after_its_expiry_not_in_that_millisecond_and_its_client_is_notified(
    world: Any, clock: Clock, major: int
) -> None:
    service = await world.service(now_ms=clock)
    raw = await world.raw()
    assert await subscribe(raw, major, NOW + 1000) is Status.SUBSCRIBED
    clock.now = NOW + 1000
    assert len(await service.subscriptions()) == 1
    await asyncio.sleep(0.05)  # several checks of the clock
    assert len(raw.published[major].heard) == 1
    clock.now = NOW + 1001
    assert await service.subscriptions() == [], "at once, whether or not it was swept yet"
    assert statuses(major, await raw.notified[major].count(2)) == [Status.SUBSCRIBED, Status.UNSUBSCRIBED]
    assert statuses(major, await raw.published[major].count(2)) == [Status.SUBSCRIBED, Status.UNSUBSCRIBED]


@pytest.mark.parametrize("major", [3, 4])
@spec("req~usubscription-past-subscription-expiration~1", doc="v4")
async def test_a_new_subscription_that_is_past_is_not_stored_and_says_nothing(
    world: Any, clock: Clock, major: int
) -> None:
    service = await world.service(now_ms=clock)
    raw = await world.raw()
    for past in (NOW - 1, 0, EXPIRY_MS_MIN):
        assert await subscribe(raw, major, past) is Status.UNSUBSCRIBED
    assert await subscribe(raw, major, past, FAR) is Status.UNSUBSCRIBED
    assert await service.subscriptions() == []
    assert await service.store.read(lambda reader: reader.links()) == []
    assert await subscribe(raw, major, EXPIRY_MS_MAX, OTHER) is Status.SUBSCRIBED
    heard = await raw.published[major].count(1)
    assert statuses(major, heard) == [Status.SUBSCRIBED]


@spec("req~usubscription-subscribe-expiration-extension-past~1", doc="v4")
async def test_v4_a_new_expiry_in_the_past_unsubscribes(world: Any, clock: Clock) -> None:
    service = await world.service(now_ms=clock)
    raw = await world.raw()
    assert await subscribe(raw, 4, NOW + 1000) is Status.SUBSCRIBED
    assert await subscribe(raw, 4, NOW - 1) is Status.UNSUBSCRIBED
    assert await service.subscriptions() == []
    assert statuses(4, await raw.notified[4].count(2)) == [Status.SUBSCRIBED, Status.UNSUBSCRIBED]


def test_a_subscription_is_past_after_the_millisecond_of_its_expiry() -> None:
    assert [is_past(expiry, 0) for expiry in (None, 0, 1, -1)] == [False, False, False, True]


@pytest.mark.parametrize("major", [3, 4])
@spec("req~usubscription-subscribe-expiration-extension~1", doc="v3-seed")
@spec("req~usubscription-subscribe-expiration-extension~1", doc="v3-today")
@spec("req~usubscription-subscribe-expiration-extension~1", doc="v4")
async def test_a_repeated_subscribe_sets_the_expiry_later_or_earlier_or_none(
    world: Any, clock: Clock, major: int
) -> None:
    """A later expiry is accepted, as in the first text; an earlier one, too, as in the later texts."""
    service = await world.service(now_ms=clock)
    raw = await world.raw()
    for asked in (NOW + 10_000, NOW + 20_000, NOW + 5_000, NOW + 5_000, None, None, NOW + 7_000, NOW):
        assert await subscribe(raw, major, asked) is Status.SUBSCRIBED
        (row,) = await service.subscriptions()
        assert row.expires_ms == asked
    assert await subscribe(raw, major, NOW - 1) is Status.UNSUBSCRIBED
    assert await service.subscriptions() == []


async def test_the_last_word_on_an_expiry_counts_whatever_its_version(world: Any, clock: Clock) -> None:
    service = await world.service(now_ms=clock)
    raw = await world.raw()
    for major, asked in ((3, NOW + 20_000), (4, NOW + 5_000), (3, NOW + 4_000), (4, None), (3, NOW + 9_000)):
        assert await subscribe(raw, major, asked) is Status.SUBSCRIBED
        (row,) = await service.subscriptions()
        assert row.expires_ms == asked


async def test_what_expired_while_the_service_was_down_ends_at_start_in_the_order_of_expiry(
    world: Any, clock: Clock
) -> None:
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


# -- reset
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("major", [3, 4])
@spec("dsn~usubscription-reset-protobuf~1", doc="v3-seed")
@spec("dsn~usubscription-reset-protobuf~1", doc="v3-today")
@spec("req~usubscription-reset~1", doc="v3-seed")
@spec("req~usubscription-reset-method_id~1", doc="v4")
@spec("req~usubscription-reset-request-signature~1", doc="v4")
@spec("req~usubscription-reset-response-signature~1", doc="v4")
async def test_reset_flushes_everything_for_good_and_tells_everybody(world: Any, major: int) -> None:
    await world.service(reset="all")
    old, new, watcher, quiet = [await world.raw(ue_id=ue_id) for ue_id in (0x10, 0x11, 0x99, 0x98)]
    await subscribe(old, 3, None)
    await subscribe(new, 4, None, FAR)
    await watcher.call(4, 4)
    await watcher.call(3, 6, v3.NotificationsRequest(topic=TOPIC))
    await quiet.call(3, 6, v3.NotificationsRequest(topic=OTHER))
    peer = await world.raw(ue_id=0, version=9)
    request = (
        v4.ResetRequest() if major == 4 else v3.ResetRequest(reason=v3.ResetRequest.Reason(code=1), before=timestamp(0))
    )
    assert (await peer.call(major, 9 if major == 3 else 6, request)).data == b""
    assert statuses(3, await old.notified[3].count(2)) == [Status.SUBSCRIBED, Status.UNSUBSCRIBED]
    assert statuses(4, await new.notified[4].count(2)) == [Status.SUBSCRIBE_PENDING, Status.UNSUBSCRIBED]
    assert statuses(4, await watcher.notified[4].count(2)) == [Status.UNSUBSCRIBED] * 2
    assert statuses(3, await watcher.notified[3].count(1)) == [Status.UNSUBSCRIBED]
    (last,) = await quiet.notified[3].count(1)  # registered for a topic without subscribers: notified of the end
    assert UPayload.of(last).unpack(v3.Update).topic == OTHER
    for _ in range(2):
        service = world.services["dev1"]
        assert await service.subscriptions() == []
        assert await service.store.read(lambda reader: (reader.links(), reader.registrations())) == ([], [])
        await world.stop()
        await world.service(reset="all")
    await subscribe(old, 3, None)
    await old.notified[3].count(3)
    assert len(watcher.notified[4].heard) == 2, "its registration is removed"


@pytest.mark.parametrize("major", [3, 4])
@spec("req~usubscription-reset~1", doc="v3-today")
@spec("req~usubscription-reset~1", doc="v4")
async def test_reset_has_cleared_everything_before_it_tells_anybody(world: Any, major: int) -> None:
    """Deletes first subscriptions, then registrations, and then sends the messages. Checked through another connection
    at the time of the messages."""
    await world.service(reset="all")
    raw, watcher = await world.raw(), await world.raw(ue_id=0x99)
    for topic in (TOPIC, FAR):
        await subscribe(raw, major, None, topic)
    await watcher.call(*((3, 6, v3.NotificationsRequest(topic=TOPIC)) if major == 3 else (4, 4)))
    await raw.notified[major].count(2)
    store = sqlite3.connect(f"file:{world.path / 'dev1.db'}?mode=ro", uri=True)

    def rows() -> list[int]:
        """Subscriptions, links, registrations."""
        return [
            store.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("subscription", "link", "registration")
        ]

    assert rows() == [2, 1, 1]
    seen: list[list[int]] = []
    for ear in (raw.notified[major], raw.published[major], watcher.notified[major]):
        ear.on_receive = lambda message, keep=ear.on_receive: (seen.append(rows()), keep(message))[1]
    peer = await world.raw(ue_id=0, version=9)
    await peer.call(major, 9 if major == 3 else 6)
    assert statuses(major, (await raw.notified[major].count(4))[2:]) == [Status.UNSUBSCRIBED] * 2
    assert statuses(major, await watcher.notified[major].count(1))[-1] is Status.UNSUBSCRIBED
    assert len(seen) >= 3
    assert all(each == [0, 0, 0] for each in seen)
    store.close()


@pytest.mark.parametrize("ends", ["unsubscribe", "expiry"])
@spec("req~usubscription-unsubscribe-notifications~1", doc="v3")
async def test_v3_once_the_last_one_has_left_nothing_is_said_about_the_topic(
    world: Any, clock: Clock, ends: str
) -> None:
    """Neither at its expiry nor after another Unsubscribe. While one subscriber is left, all changes are notified."""
    await world.service(now_ms=clock)
    one, last, watcher = [await world.raw(ue_id=ue_id) for ue_id in (0x10, 0x11, 0x99)]
    await watcher.call(3, 6, v3.NotificationsRequest(topic=TOPIC))
    for raw in (one, last):
        await subscribe(raw, 3, NOW + 1000)
    await one.call(3, 2, v3.UnsubscribeRequest(topic=TOPIC))
    assert statuses(3, await watcher.notified[3].count(3))[-1] is Status.UNSUBSCRIBED
    await last.call(3, 2, v3.UnsubscribeRequest(topic=TOPIC))
    assert statuses(3, await watcher.notified[3].count(4))[-1] is Status.UNSUBSCRIBED
    if ends == "expiry":
        clock.now = NOW + 2000
        await asyncio.sleep(0.05)  # several checks of the clock
    else:
        await last.call(3, 2, v3.UnsubscribeRequest(topic=TOPIC))
    await subscribe(one, 3, None, OTHER)  # the next notification is about another topic
    assert len(await one.notified[3].count(3)) == 3
    assert [UPayload.of(each).unpack(v3.Update).topic for each in (await one.published[3].count(5))[4:]] == [OTHER]
    assert (len(watcher.notified[3].heard), len(last.notified[3].heard)) == (4, 2)


@pytest.mark.parametrize(
    ("major", "ue_id", "allowed"), [(3, 0, True), (3, 0x10000, False), (4, 0x10000, True), (3, 5, False), (4, 5, False)]
)
@spec("req~usubscription-reset-only-usubscription~1", doc="v3")
@spec("req~usubscription-reset-only-usubscription~1", doc="v4")
async def test_only_a_usubscription_service_may_reset(world: Any, major: int, ue_id: int, allowed: bool) -> None:
    service = await world.service(reset="all")
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
    service = await world.service(remote_repeat_ms=20, reset="all")
    raw, peer = await world.raw(), await world.raw(ue_id=0, version=9)
    await world.network("dev2")
    log = world.forwarders["dev1", "dev2"].log
    await subscribe(raw, 4, None, FAR)
    async with asyncio.timeout(20):
        while len(log) < 2:  # noqa: ASYNC110 - repeated, since nobody answers; a list has no event
            await asyncio.sleep(0.01)
    await peer.call(4, 6)
    await asyncio.sleep(0.1)
    commands = [one for one in log if one.attributes.sink.resource_id == 1]
    assert {one.attributes.sink.resource_id for one in log} <= {1, 3}, (
        "it asks what the other one has of ours, and commands nothing"
    )
    await asyncio.sleep(0.1)
    assert [one for one in log if one.attributes.sink.resource_id == 1] == commands
    assert await service.store.read(lambda reader: reader.links()) == []
