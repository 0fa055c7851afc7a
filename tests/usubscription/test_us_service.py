"""The service as its clients see it, version 3 and version 4, on the in-process transport."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from uprotocol import uri as uris
from uprotocol.attributes import NOTIFICATION, PUBLISH
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.core.usubscription.wire import timestamp
from uprotocol.message import PROTOBUF, UPayload
from uprotocol.status import UStatusError
from uprotocol.uuid import now_ms
from uprotocol.v1.uattributes_pb2 import UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

TOPIC = uris.parse("//dev1/20/1/8001")
OTHER = uris.parse("//dev1/20/1/8002")
S3, S4 = v3.SubscriptionStatus, v4.SubscriptionStatus
spec = pytest.mark.spec


def topic(number: int) -> UUri:
    return uris.uri("dev1", 0x20, 1, 0x8000 + number)


async def subscribe3(raw: Any, at: UUri = TOPIC, **attributes: Any) -> int:
    request = v3.SubscriptionRequest(topic=at)
    if attributes:
        request.attributes.CopyFrom(v3.SubscribeAttributes(**attributes))
    response = (await raw.call(3, 1, request)).unpack(v3.SubscriptionResponse)
    assert response.topic == at, "the topic is echoed as it was passed"
    return response.status.state


async def subscribe4(raw: Any, at: UUri = TOPIC, **options: Any) -> int:
    response = (await raw.call(4, 1, v4.SubscribeRequest(topic=at, **options))).unpack(v4.SubscribeResponse)
    assert response.topic == at
    return response.status


async def unsubscribe3(raw: Any, at: UUri = TOPIC) -> None:
    assert (await raw.call(3, 2, v3.UnsubscribeRequest(topic=at))).data == b""


async def unsubscribe4(raw: Any, at: UUri = TOPIC) -> None:
    assert (await raw.call(4, 2, v4.UnsubscribeRequest(topic=at))).data == b""


async def subscribers(raw: Any, at: UUri = TOPIC, **options: Any) -> tuple[list[UUri], bool]:
    response = (await raw.call(3, 8, v3.FetchSubscribersRequest(topic=at, **options))).unpack(
        v3.FetchSubscribersResponse
    )
    return [one.uri for one in response.subscribers], response.has_more_records


async def listed3(raw: Any, **request: Any) -> v3.FetchSubscriptionsResponse:
    return (await raw.call(3, 3, v3.FetchSubscriptionsRequest(**request))).unpack(v3.FetchSubscriptionsResponse)


async def listed4(raw: Any, **filters: Any) -> list[v4.Subscription]:
    response = (await raw.call(4, 3, v4.FetchSubscriptionsRequest(**filters))).unpack(v4.FetchSubscriptionsResponse)
    return list(response.subscriptions)


# -- version 3
# --------------------------------------------------------------------------------------------------------------------


@spec("dsn~usubscription-subscribe-protobuf~1", doc="v3")
@spec("req~usubscription-subscribe~1", doc="v3-today")
@spec("req~usubscription-subscribe-notifications~1", doc="v3")
@spec("dsn~usubscription-change-notification-type~1", doc="v3")
@spec("dsn~usubscription-change-notification-topic~1", doc="v3-seed")
@spec("dsn~usubscription-change-notification-topic~1", doc="v3-today")
@spec("dsn~usubscription-change-notification-update~1", doc="v3-today")
async def test_v3_subscribe_answers_first_then_notifies_the_subscriber_and_publishes(world: Any) -> None:
    await world.service()
    raw = await world.raw()
    assert await subscribe3(raw) == S3.SUBSCRIBED
    (notification,) = await raw.notified[3].count(1)
    (published,) = await raw.published[3].count(1)
    assert notification.attributes.type == NOTIFICATION
    assert notification.attributes.source == uris.uri("dev1", 0, 3, 0x8000)
    assert notification.attributes.sink == raw.local.get_source()
    assert notification.attributes.priority == UPriority.UPRIORITY_CS2
    assert notification.attributes.payload_format == PROTOBUF
    assert published.attributes.type == PUBLISH
    assert await subscribers(raw) == ([raw.local.get_source()], False)
    update = UPayload.of(notification).unpack(v3.Update)
    assert UPayload.of(published).unpack(v3.Update) == update
    assert (update.topic, update.subscriber.uri, update.status.state) == (TOPIC, raw.local.get_source(), S3.SUBSCRIBED)


@spec("dsn~usubscription-unsubscribe-protobuf~1", doc="v3")
@spec("req~usubscription-unsubscribe~1", doc="v3")
async def test_v3_unsubscribe_ends_tracking_with_one_last_update_and_then_silence(world: Any) -> None:
    await world.service()
    raw = await world.raw()
    await subscribe3(raw)
    await unsubscribe3(raw)
    assert await subscribers(raw) == ([], False)
    notified = await raw.notified[3].count(2)
    assert [UPayload.of(one).unpack(v3.Update).status.state for one in notified] == [S3.SUBSCRIBED, S3.UNSUBSCRIBED]
    await subscribe3(raw, OTHER)
    await raw.notified[3].count(3)
    assert len(raw.published[3].heard) == 3


@spec("req~usubscription-unsubscribe-multiple~1", doc="v3")
async def test_v3_unsubscribe_of_nothing_is_ok_and_says_nothing(world: Any) -> None:
    await world.service()
    raw = await world.raw()
    await unsubscribe3(raw)
    await subscribe3(raw)
    heard = await raw.published[3].count(1)
    assert UPayload.of(heard[0]).unpack(v3.Update).status.state == S3.SUBSCRIBED


@spec("req~usubscription-subscribe-multiple~1", doc="v3")
async def test_v3_subscribe_again_answers_the_status_and_changes_nothing(world: Any) -> None:
    await world.service()
    raw = await world.raw()
    assert [await subscribe3(raw) for _ in range(3)] == [S3.SUBSCRIBED] * 3
    assert await subscribers(raw) == ([raw.local.get_source()], False)
    await subscribe3(raw, OTHER)
    assert len(await raw.notified[3].until(lambda heard: UPayload.of(heard[-1]).unpack(v3.Update).topic == OTHER)) == 2


async def test_v3_another_major_version_is_another_topic(world: Any) -> None:
    await world.service()
    raw = await world.raw()
    await subscribe3(raw, TOPIC)
    newer = uris.uri(TOPIC.authority_name, TOPIC.ue_id, TOPIC.ue_version_major + 1, TOPIC.resource_id)
    assert await subscribers(raw, newer) == ([], False)
    await subscribe3(raw, newer)
    await unsubscribe3(raw, TOPIC)
    assert await subscribers(raw, newer) == ([raw.local.get_source()], False)


async def test_v3_an_empty_authority_is_the_local_one(world: Any) -> None:
    await world.service()
    raw = await world.raw()
    assert await subscribe3(raw, uris.parse("/20/1/8001")) == S3.SUBSCRIBED
    assert await subscribers(raw, TOPIC) == ([raw.local.get_source()], False)
    assert await subscribers(raw, uris.parse("/20/1/8001")) == ([raw.local.get_source()], False)


BARE = uris.parse("/20/1/8001")  # TOPIC without authority, for clients on its host


def topics_of(messages: list[UMessage]) -> list[UUri]:
    return [UPayload.of(message).unpack(v3.Update).topic for message in messages]


async def test_a_subscriber_that_gave_no_authority_gets_none_back_over_restarts_and_everybody_else_the_whole_topic(
    world: Any,
) -> None:
    """Clients find the handler of an Update by the topic that they passed."""
    await world.service()
    raw, other, watcher = await world.raw(), await world.raw(ue_id=0x11), await world.raw(ue_id=0x99)
    await watcher.call(3, 6, v3.NotificationsRequest(topic=TOPIC))
    await watcher.call(4, 4, v4.NotificationsRequest())
    response = (await raw.call(3, 1, v3.SubscriptionRequest(topic=BARE))).unpack(v3.SubscriptionResponse)
    assert response.topic == BARE
    await subscribe3(other)
    assert topics_of(await raw.notified[3].count(1)) == [BARE]
    assert topics_of(await other.notified[3].count(1)) == [TOPIC]
    assert topics_of(await watcher.notified[3].count(2)) == [TOPIC, TOPIC]
    assert [UPayload.of(one).unpack(v4.Subscription).topic for one in await watcher.notified[4].count(2)] == [
        TOPIC,
        TOPIC,
    ]
    assert topics_of(await raw.published[3].count(2)) == [TOPIC, TOPIC]
    assert [one.topic for one in (await listed3(raw, topic=BARE)).subscriptions] == [TOPIC, TOPIC]
    assert [one.topic for one in await listed4(raw)] == [TOPIC, TOPIC]
    await world.stop()
    await world.service()
    await unsubscribe3(raw)
    assert topics_of(await raw.notified[3].count(2)) == [BARE, BARE]
    assert topics_of(await watcher.notified[3].count(3))[-1] == TOPIC


async def test_the_last_subscribe_says_how_a_subscriber_writes_its_topic(world: Any) -> None:
    await world.service()
    raw = await world.raw()
    await subscribe3(raw, BARE)
    await subscribe3(raw, TOPIC)
    await unsubscribe3(raw, BARE)
    assert topics_of(await raw.notified[3].count(2)) == [BARE, TOPIC]
    await subscribe3(raw, TOPIC)
    await subscribe3(raw, BARE)
    await raw.notified[3].count(3)
    await world.stop()
    await world.service()
    await unsubscribe3(raw, TOPIC)
    assert topics_of(await raw.notified[3].count(4))[2:] == [TOPIC, BARE]


async def test_a_subscriber_that_changes_to_version_4_gets_the_whole_topic(world: Any) -> None:
    """In version 4 the topic must have an authority."""
    await world.service()
    raw = await world.raw()
    await subscribe3(raw, BARE)
    await subscribe4(raw, TOPIC)
    await unsubscribe3(raw, BARE)
    (notification,) = await raw.notified[4].count(1)
    assert UPayload.of(notification).unpack(v4.Subscription).topic == TOPIC
    assert topics_of(raw.notified[3].heard) == [BARE]


async def test_a_reset_names_the_topic_as_it_was_passed(world: Any) -> None:
    await world.service(reset="all")
    raw, peer = await world.raw(), await world.raw(ue_id=0, version=3)
    await subscribe3(raw, BARE)
    await peer.call(3, 9, v3.ResetRequest())
    assert topics_of(await raw.notified[3].count(2)) == [BARE, BARE]


@spec("dsn~usubscription-fetch-subscribers-protobuf~1", doc="v3")
@spec("req~usubscription-fetch-subscribers~1", doc="v3")
@spec("req~usubscription-fetch-subscribers-stable-sorting~1", doc="v3-seed")
@spec("req~usubscription-fetch-subscribers-has-more-records~1", doc="v3-seed")
@spec("req~usubscription-fetch-subscribers-offset~1", doc="v3-seed")
@pytest.mark.parametrize("in_memory", [0, 256])
async def test_v3_fetch_subscribers_pages_in_the_order_in_which_they_came(
    world: Any, monkeypatch: Any, in_memory: int
) -> None:
    monkeypatch.setattr("usubscription.store.store.SUBSCRIBERS_MAX", in_memory)
    await world.service(page_entries_max=2)
    members = [await world.raw(ue_id=number) for number in (0x30, 0x10, 0x20, 0x15, 0x11)]
    for one in members:
        await subscribe3(one)
    order = [one.local.get_source() for one in members]
    asking = members[0]
    assert await subscribers(asking) == (order[:2], True)
    assert await subscribers(asking, offset=2) == (order[2:4], True)
    assert await subscribers(asking, offset=4) == (order[4:], False)
    assert await subscribers(asking, offset=5) == ([], False)
    assert await subscribers(asking, offset=4_000_000_000) == ([], False)
    await subscribe3(members[0])  # repeated: its position stays
    await world.stop()
    await world.service(page_entries_max=2)
    assert await subscribers(asking) == (order[:2], True)
    response = (await asking.call(3, 8, v3.FetchSubscribersRequest(topic=TOPIC, offset=3))).unpack(
        v3.FetchSubscribersResponse
    )
    assert response.HasField("has_more_records"), "said explicitly either way"


@spec("dsn~usubscription-fetch-subscriptions-protobuf~1", doc="v3-seed")
@spec("req~usubscription-fetch-subscriptions-by-subscriber~1", doc="v3")
@spec("req~usubscription-fetch-subscriptions-stable-sorting~1", doc="v3-seed")
@spec("req~usubscription-fetch-subscriptions-has-more-records~1", doc="v3-seed")
@spec("req~usubscription-fetch-subscriptions-offset~1", doc="v3-seed")
async def test_v3_fetch_subscriptions_of_a_subscriber_pages_in_order(world: Any) -> None:
    await world.service(page_entries_max=2)
    raw, other = await world.raw(), await world.raw(ue_id=0x11)
    order = [topic(number) for number in (7, 3, 9)]
    for one in order:
        await subscribe3(raw, one)
        await subscribe3(other, one)
    asked = v3.SubscriberInfo(uri=raw.local.get_source())
    first = await listed3(raw, subscriber=asked)
    assert [one.topic for one in first.subscriptions] == order[:2]
    assert first.has_more_records
    rest = await listed3(raw, subscriber=asked, offset=2)
    assert [one.topic for one in rest.subscriptions] == order[2:]
    assert not rest.has_more_records
    assert rest.HasField("has_more_records")
    assert {one.subscriber.uri.ue_id for one in first.subscriptions} == {0x10}
    assert (await listed3(raw, subscriber=asked)) == first


@spec("dsn~usubscription-fetch-subscriptions-protobuf~1", doc="v3-today")
@spec("req~usubscription-fetch-subscriptions-by-topic~1", doc="v3")
async def test_v3_fetch_subscriptions_of_a_topic_gives_all_of_each(world: Any) -> None:
    await world.service()
    raw, other = await world.raw(), await world.raw(ue_id=0x11)
    expire = timestamp(now_ms() + 3_600_000)
    await subscribe3(raw, sample_period_ms=250, expire=expire)
    await subscribe3(other)
    await subscribe3(other, OTHER)
    first, second = (await listed3(raw, topic=TOPIC)).subscriptions
    assert (first.topic, first.subscriber.uri, first.status.state) == (TOPIC, raw.local.get_source(), S3.SUBSCRIBED)
    assert (first.attributes.sample_period_ms, first.attributes.expire) == (250, expire)
    assert second.subscriber.uri == other.local.get_source()


@spec("dsn~usubscription-fetch-subscriptions-protobuf~1", doc="v3-today")
async def test_a_peer_of_todays_version_3_gets_the_whole_list_at_once(world: Any) -> None:
    """Its messages have no offset and no has_more_records: it sends no offset, and ignores the unknown field 2."""
    await world.service()
    raw = await world.raw()
    for number in range(120):
        await subscribe3(raw, topic(number))
    request = v3.FetchSubscriptionsRequest(subscriber=v3.SubscriberInfo(uri=raw.local.get_source()))
    assert not request.HasField("offset")
    response = (await raw.call(3, 3, request)).unpack(v3.FetchSubscriptionsResponse)
    assert len(response.subscriptions) == 120
    assert not response.has_more_records


@spec("dsn~usubscription-register-notifications-protobuf~1", doc="v3")
@spec("req~usubscription-register-notifications~1", doc="v3")
@spec("dsn~usubscription-unregister-notifications-protobuf~1", doc="v3")
@spec("req~usubscription-unregister-notifications~1", doc="v3")
async def test_v3_registered_clients_hear_of_their_topics_until_they_unregister(world: Any) -> None:
    await world.service()
    raw, watcher = await world.raw(), await world.raw(ue_id=0x99)
    await watcher.call(3, 6, v3.NotificationsRequest(topic=TOPIC))
    await subscribe3(raw, OTHER)
    await subscribe3(raw)
    (notification,) = await watcher.notified[3].count(1)
    assert UPayload.of(notification).unpack(v3.Update).topic == TOPIC
    await watcher.call(3, 7, v3.NotificationsRequest(topic=TOPIC))
    await watcher.call(3, 7, v3.NotificationsRequest(topic=TOPIC))  # repeated: OK
    await unsubscribe3(raw)
    await raw.notified[3].count(3)
    assert len(watcher.notified[3].heard) == 1


async def test_a_subscriber_that_is_also_registered_is_notified_once(world: Any) -> None:
    await world.service()
    raw = await world.raw()
    await raw.call(3, 6, v3.NotificationsRequest(topic=TOPIC))
    await subscribe3(raw)
    await unsubscribe3(raw)
    await raw.published[3].count(2)
    assert len(raw.notified[3].heard) == 2


async def test_the_subscriber_field_of_the_old_wire_names_entities_of_the_own_authority_only(world: Any) -> None:
    await world.service()
    raw = await world.raw()
    friend, stranger = uris.parse("//dev1/77/1/0"), uris.parse("//dev2/77/1/0")
    for named in (friend, stranger):
        request = v3.SubscriptionRequest(topic=TOPIC, subscriber=v3.SubscriberInfo(uri=named))
        assert (await raw.call(3, 1, request)).unpack(v3.SubscriptionResponse).status.state == S3.SUBSCRIBED
    assert await subscribers(raw) == ([friend, raw.local.get_source()], False)
    await raw.call(3, 2, v3.UnsubscribeRequest(topic=TOPIC, subscriber=v3.SubscriberInfo(uri=friend)))
    assert await subscribers(raw) == ([raw.local.get_source()], False)


async def test_details_of_a_v3_subscription_are_passed_through(world: Any) -> None:
    await world.service()
    raw = await world.raw()
    detail = UPayload.pack_to_any(TOPIC)
    attributes = v3.SubscribeAttributes()
    attributes.details.add().ParseFromString(detail.data)
    await raw.call(3, 1, v3.SubscriptionRequest(topic=TOPIC, attributes=attributes))
    (notification,) = await raw.notified[3].count(1)
    assert UPayload.of(notification).unpack(v3.Update).attributes.details == attributes.details
    (listed,) = (await listed3(raw, topic=TOPIC)).subscriptions
    assert listed.attributes.details == attributes.details


# -- version 4
# --------------------------------------------------------------------------------------------------------------------


@spec("req~usubscription-uentity_id~1", doc="v4")
@spec("req~usubscription-subscribe-method_id~1", doc="v4")
@spec("req~usubscription-subscribe-request-signature~1", doc="v4")
@spec("req~usubscription-subscribe-response-signature~1", doc="v4")
@spec("req~usubscription-subscribe~1", doc="v4")
@spec("req~usubscription-change-message-type~1", doc="v4")
@spec("req~usubscription-change-notification-resource~1", doc="v4")
@spec("req~usubscription-change-notification~1", doc="v4")
@spec("req~usubscription-change-topic~1", doc="v4")
@spec("dsn~usubscription-subscription-expiration-datatype~1", doc="v4")
@spec("dsn~usubscription-sample-period-datatype~1", doc="v4")
async def test_v4_subscribe_answers_notifies_and_publishes_with_all_attributes(world: Any) -> None:
    await world.service()
    raw = await world.raw()
    expiration = timestamp(now_ms() + 3_600_123)
    assert await subscribe4(raw, expiration=expiration, sample_period=4_000_000_000) == S4.STATUS_SUBSCRIBED
    (notification,) = await raw.notified[4].count(1)
    (published,) = await raw.published[4].count(1)
    assert (notification.attributes.type, published.attributes.type) == (NOTIFICATION, PUBLISH)
    assert notification.attributes.source == published.attributes.source == uris.uri("dev1", 0, 4, 0x8000)
    wanted = v4.Subscription(
        topic=TOPIC,
        subscriber=raw.local.get_source(),
        status=S4.STATUS_SUBSCRIBED,
        expiration=expiration,
        sample_period=4_000_000_000,
    )
    assert UPayload.of(notification).unpack(v4.Subscription) == wanted == UPayload.of(published).unpack(v4.Subscription)
    assert await listed4(raw) == [wanted]


@spec("req~usubscription-unsubscribe-method_id~1", doc="v4")
@spec("req~usubscription-unsubscribe-request-signature~1", doc="v4")
@spec("req~usubscription-unsubscribe-response-signature~1", doc="v4")
@spec("req~usubscription-unsubscribe~1", doc="v4")
@spec("req~usubscription-unsubscribe-notifications~1", doc="v4")
async def test_v4_the_client_that_unsubscribes_is_not_notified_but_everybody_else_is(world: Any) -> None:
    await world.service()
    raw, watcher = await world.raw(), await world.raw(ue_id=0x99)
    await watcher.call(4, 4, v4.NotificationsRequest())
    await subscribe4(raw)
    await unsubscribe4(raw)
    await unsubscribe4(raw)  # always succeeds
    heard = await watcher.notified[4].count(2)
    assert [UPayload.of(one).unpack(v4.Subscription).status for one in heard] == [
        S4.STATUS_SUBSCRIBED,
        S4.STATUS_UNSUBSCRIBED,
    ]
    published = await raw.published[4].count(2)
    assert UPayload.of(published[1]).unpack(v4.Subscription).status == S4.STATUS_UNSUBSCRIBED
    assert len(raw.notified[4].heard) == 1
    assert await listed4(raw) == []


@spec("req~usubscription-subscribe-multiple~1", doc="v4")
@spec("req~usubscription-subscribe-notifications~1", doc="v4")
@spec("req~usubscription-change-notification~1", doc="v4")
async def test_v4_repeated_subscribe_tells_changes_of_expiration_and_period_only(world: Any) -> None:
    await world.service()
    raw = await world.raw()
    later, soon = timestamp(now_ms() + 7_200_000), timestamp(now_ms() + 3_600_000)
    for options in (
        {},
        {},
        {"expiration": later},
        {"expiration": soon},
        {"expiration": soon},
        {"expiration": soon, "sample_period": 5},
    ):
        assert await subscribe4(raw, **options) == S4.STATUS_SUBSCRIBED
    heard = await raw.notified[4].count(4)
    notified = [UPayload.of(one).unpack(v4.Subscription) for one in heard]
    assert [one.HasField("expiration") for one in notified] == [False, True, True, True]
    assert [notified[1].expiration, notified[2].expiration, notified[3].sample_period] == [later, soon, 5]


@spec("req~usubscription-fetch-subscriptions-method_id~1", doc="v4")
@spec("req~usubscription-fetch-subscriptions-request-signature~1", doc="v4")
@spec("req~usubscription-fetch-subscriptions-response-signature~1", doc="v4")
@spec("req~usubscription-fetch-subscriptions~1", doc="v4")
@spec("req~usubscription-fetch-subscriptions-topic-filter~1", doc="v4")
async def test_v4_fetch_subscriptions_with_every_kind_of_filter(world: Any) -> None:
    await world.service()
    one, two = await world.raw(ue_id=0x10), await world.raw(ue_id=0x2_0010)
    assert await listed4(one) == []
    topics = {
        name: uris.parse(name)
        for name in (
            "//dev1/A1B/1/9A10",
            "//dev1/A1B/1/9A11",
            "//dev1/1_0A1B/1/9A10".replace("_", ""),
            "//dev1/B2C/2/9A10",
        )
    }
    for at in topics.values():
        await subscribe4(one, at)
    await subscribe4(two, topics["//dev1/A1B/1/9A10"])

    async def found(topic_filter: str | None = None, subscriber_filter: str | None = None) -> list[tuple[str, int]]:
        filters = {"topic_filter": topic_filter, "subscriber_filter": subscriber_filter}
        asked = {name: uris.parse(text) for name, text in filters.items() if text is not None}
        return [(uris.format(entry.topic)[5:], entry.subscriber.ue_id) for entry in await listed4(one, **asked)]

    every = [
        ("dev1/A1B/1/9A10", 0x10),
        ("dev1/A1B/1/9A11", 0x10),
        ("dev1/10A1B/1/9A10", 0x10),
        ("dev1/B2C/2/9A10", 0x10),
        ("dev1/A1B/1/9A10", 0x20010),
    ]
    assert await found() == every
    assert await found("//*/FFFFFFFF/FF/FFFF", "//*/FFFFFFFF/FF/FFFF") == every
    assert await found("//dev1/A1B/FF/FFFF") == [every[0], every[1], every[4]]
    assert await found("//dev1/FFFF0A1B/FF/FFFF") == [every[0], every[1], every[2], every[4]]
    assert await found("//dev1/1FFFF/FF/FFFF") == [every[2]]
    assert await found("//*/FFFFFFFF/2/FFFF") == [every[3]]
    assert await found("//dev2/FFFFFFFF/FF/FFFF") == []
    assert await found(None, "//dev1/20010/1/0") == [every[4]]
    assert await found("//dev1/A1B/1/9A10", "//dev1/10/1/0") == [every[0]]
    assert await found("/A1B/1/9A11") == [every[1]]  # an empty authority is the local one


@spec("req~usubscription-register-notifications-method_id~1", doc="v4")
@spec("req~usubscription-register-notifications-request-signature~1", doc="v4")
@spec("req~usubscription-register-notifications-response-signature~1", doc="v4")
@spec("req~usubscription-register-notifications~1", doc="v4")
@spec("req~usubscription-unregister-notifications-method_id~1", doc="v4")
@spec("req~usubscription-unregister-notifications-request-signature~1", doc="v4")
@spec("req~usubscription-unregister-notifications-response-signature~1", doc="v4")
@spec("req~usubscription-unregister-notifications~1", doc="v4")
async def test_v4_registered_clients_hear_of_everything_across_a_restart_until_they_unregister(world: Any) -> None:
    await world.service()
    raw, watcher = await world.raw(), await world.raw(ue_id=0x99)
    assert (await watcher.call(4, 4, v4.NotificationsRequest())).data == b""
    await subscribe4(raw)
    await watcher.notified[4].count(1)
    await world.stop()
    await world.service()  # registrations are persistent
    await subscribe3(raw, OTHER)
    heard = await watcher.notified[4].count(2)
    assert UPayload.of(heard[1]).unpack(v4.Subscription).topic == OTHER, "a version 3 subscription is a subscription"
    assert (await watcher.call(4, 5)).data == b""  # no payload is an empty message
    await unsubscribe4(raw)
    await raw.published[4].count(3)
    assert len(watcher.notified[4].heard) == 2


async def test_both_versions_see_the_same_subscriptions(world: Any) -> None:
    await world.service()
    old, new = await world.raw(ue_id=0x10), await world.raw(ue_id=0x11)
    await subscribe3(old)
    await subscribe4(new)
    assert await subscribers(new) == ([old.local.get_source(), new.local.get_source()], False)
    assert [one.subscriber.ue_id for one in await listed4(old)] == [0x10, 0x11]
    await unsubscribe4(old)  # subscribed in 3, unsubscribed in 4
    assert await subscribers(new) == ([new.local.get_source()], False)
    assert len(await old.published[3].count(3)) == len(await old.published[4].count(3)) == 3, (
        "both change topics publish every change"
    )


async def test_v4_topics_may_leave_the_instance_and_the_version_open(world: Any) -> None:
    await world.service()
    raw = await world.raw()
    wide = uris.parse("//dev1/FFFF0020/FF/8001")
    assert await subscribe4(raw, wide) == S4.STATUS_SUBSCRIBED
    assert [one.topic for one in await listed4(raw)] == [wide]


# -- persistence
# ------------------------------------------------------------------------------------------------------------------


@spec("req~usubscription-subscribe~1", doc="v3-seed")
@spec("req~usubscription-subscribe-persistency~1", doc="v3-today")
@spec("req~usubscription-subscribe-persistency~1", doc="v4")
@spec("req~usubscription-subscribe-no-expiration~1", doc="v3")
@spec("req~usubscription-subscribe-no-expiration~1", doc="v4")
async def test_subscriptions_survive_restarts_with_everything_they_have(world: Any) -> None:
    await world.service()
    raw, other = await world.raw(), await world.raw(ue_id=0x11)
    await subscribe3(raw, sample_period_ms=7, expire=timestamp(now_ms() + 3_600_000))
    await subscribe4(other)
    before = await listed4(raw)
    for _ in range(2):
        await world.stop()
        await world.service(now_ms=lambda: now_ms() + 1_000_000)
    assert await listed4(raw) == before
    assert await subscribers(raw) == ([raw.local.get_source(), other.local.get_source()], False)
    await world.stop()
    await world.service(
        now_ms=lambda: now_ms() + 10**12
    )  # thirty years later the subscription without expiry still exists
    assert await subscribers(raw) == ([other.local.get_source()], False)


async def test_the_hook_runs_before_the_answer_and_may_await(world: Any) -> None:
    service = await world.service()
    seen: list[str] = []
    release = asyncio.Event()

    async def hook(changes: Any) -> None:
        seen.extend(f"hook {change.status.name}" for change in changes)
        await release.wait()

    service.on_change(hook)
    raw = await world.raw()
    asked = asyncio.ensure_future(subscribe4(raw))
    await asyncio.wait({asked}, timeout=0.2)
    assert not asked.done()
    assert seen == ["hook SUBSCRIBED"]
    assert raw.published[4].heard == []
    release.set()
    await asked
    await raw.published[4].count(1)


async def test_a_hook_that_fails_costs_nobody_an_answer(world: Any) -> None:
    service = await world.service()

    def hook(changes: Any) -> None:
        raise RuntimeError("a fault of the test's")

    service.on_change(hook)
    assert await subscribe4(await world.raw()) == S4.STATUS_SUBSCRIBED


async def test_a_permission_check_may_refuse(world: Any) -> None:
    def check(request: Any) -> None:
        if request.attributes.token != "let me in":
            raise UStatusError(UCode.PERMISSION_DENIED, "no token")

    await world.service(check=check)
    raw = await world.raw()
    with pytest.raises(UStatusError, match="no token") as error:
        await subscribe4(raw)
    assert error.value.code == UCode.PERMISSION_DENIED


async def test_stopping_is_idempotent_and_a_stopped_service_says_so(world: Any) -> None:
    service = await world.service()
    await world.stop()
    await service.stop()
    with pytest.raises(UStatusError) as error:
        await service.subscriptions()
    assert error.value.code == UCode.UNAVAILABLE
