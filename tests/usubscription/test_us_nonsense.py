"""Invalid entries in answers of a service: addresses out of range, methods instead of topics. The others are used."""

from __future__ import annotations

import pytest

from uprotocol import uri as uris
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.core.usubscription.wire import CODECS, V3_CODEC
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

TOPIC, SUBSCRIBER = uris.parse("//vin/10/1/8000"), uris.parse("//cloud/20/1/0")
NO_TOPICS = [
    UUri(authority_name="VIN", ue_id=1, ue_version_major=1, resource_id=0x8000),
    UUri(authority_name="vin", ue_id=1, ue_version_major=300, resource_id=0x8000),
    UUri(authority_name="vin", ue_id=1, ue_version_major=1, resource_id=0x18000),
    UUri(authority_name="vin", ue_id=1, ue_version_major=1, resource_id=7),
]
NO_SUBSCRIBER = UUri(authority_name="a" * 129, ue_id=1, ue_version_major=1)
PAIRS = [*((topic, SUBSCRIBER) for topic in NO_TOPICS), (TOPIC, NO_SUBSCRIBER)]


def change_of(version: int, topic: UUri, subscriber: UUri) -> v3.Subscription | v4.Subscription:
    if version == 4:
        return v4.Subscription(topic=topic, subscriber=subscriber, status=v4.SubscriptionStatus.ValueType(3))
    return v3.Subscription(
        topic=topic,
        subscriber=v3.SubscriberInfo(uri=subscriber),
        status=v3.SubscriptionStatus(state=v3.SubscriptionStatus.State.ValueType(2)),
    )


@pytest.mark.parametrize("version", [3, 4])
def test_one_entry_that_means_nothing_costs_the_others_nothing(version: int) -> None:
    made = [change_of(version, *pair) for pair in [*PAIRS, (TOPIC, SUBSCRIBER)]]
    type = v4.FetchSubscriptionsResponse if version == 4 else v3.FetchSubscriptionsResponse
    found, _ = CODECS[version].read_subscriptions(UPayload.pack(type(subscriptions=made)))  # type: ignore[arg-type]
    assert [(one.topic, one.subscriber) for one in found] == [(TOPIC, SUBSCRIBER)]


def test_subscribers_that_nobody_can_be_are_left_out() -> None:
    response = v3.FetchSubscribersResponse(
        subscribers=[v3.SubscriberInfo(uri=one) for one in (NO_SUBSCRIBER, SUBSCRIBER)]
    )
    assert V3_CODEC.read_subscribers(UPayload.pack(response)) == ([SUBSCRIBER], False)


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_change_that_means_nothing_is_refused(version: int, pair: tuple[UUri, UUri]) -> None:
    change = change_of(version, *pair)
    payload = UPayload.pack(
        change if version == 4 else v3.Update(topic=change.topic, subscriber=change.subscriber, status=change.status)
    )  # type: ignore[arg-type]
    with pytest.raises(UStatusError) as caught:
        CODECS[version].read_change(payload)
    assert caught.value.code == UCode.INVALID_ARGUMENT


@pytest.mark.parametrize("version", [3, 4])
def test_a_change_without_topic_is_about_everything(version: int) -> None:
    nothing = v4.Subscription() if version == 4 else v3.Update()
    assert CODECS[version].read_change(UPayload.pack(nothing)).topic == UUri()
