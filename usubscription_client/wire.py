"""What a uSubscription client says and hears, in version 3 and in version 4. Pure.

subscribe(4, topic, ...) -> (method 1, payload)          read_change(4, payload) -> Subscription
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final, NamedTuple

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from uprotocol import uri as uris
from uprotocol.core.usubscription.paging_pb2 import PageAsked, PageGiven
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UPayload
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

ENTITY: Final = 0x0000
CHANGE_RESOURCE: Final = 0x8000
VERSIONS: Final = (4, 3)  # in the order in which they are tried

SUBSCRIBE, UNSUBSCRIBE, FETCH_SUBSCRIPTIONS, REGISTER, UNREGISTER, FETCH_SUBSCRIBERS, RESET = range(7)
METHODS: Final[dict[int, dict[int, int]]] = {
    3: {
        SUBSCRIBE: 1,
        UNSUBSCRIBE: 2,
        FETCH_SUBSCRIPTIONS: 3,
        REGISTER: 6,
        UNREGISTER: 7,
        FETCH_SUBSCRIBERS: 8,
        RESET: 9,
    },
    4: {SUBSCRIBE: 1, UNSUBSCRIBE: 2, FETCH_SUBSCRIPTIONS: 3, REGISTER: 4, UNREGISTER: 5, RESET: 6},
}


class Status(enum.IntEnum):
    """The numbers of version 3; version 4's are these plus one."""

    UNSUBSCRIBED = 0
    SUBSCRIBE_PENDING = 1
    SUBSCRIBED = 2
    UNSUBSCRIBE_PENDING = 3

    @property
    def wanting(self) -> bool:
        """True while the subscriber wants the topic's messages: a pending one does, too."""
        return self in (Status.SUBSCRIBE_PENDING, Status.SUBSCRIBED)


class Subscription(NamedTuple):
    topic: UUri
    subscriber: UUri
    status: Status
    expires_ms: int | None = None  # Unix milliseconds; None: never
    sample_period_ms: int | None = None  # None: every message


def service(authority: str, version: int, resource: int) -> UUri:
    return uris.uri(authority, ENTITY, version, resource)


def subscribe(version: int, topic: UUri, expires_ms: int | None = None, sample_period_ms: int | None = None) -> Message:
    expires = _timestamp(expires_ms) if expires_ms is not None else None
    if version == 4:
        return v4.SubscribeRequest(topic=topic, expiration=expires, sample_period=sample_period_ms)
    request = v3.SubscriptionRequest(topic=topic)
    if expires is not None or sample_period_ms is not None:
        request.attributes.CopyFrom(v3.SubscribeAttributes(expire=expires, sample_period_ms=sample_period_ms))
    return request


def unsubscribe(version: int, topic: UUri) -> Message:
    return v4.UnsubscribeRequest(topic=topic) if version == 4 else v3.UnsubscribeRequest(topic=topic)


def fetch_subscriptions(version: int, topic: UUri | None, subscriber: UUri | None, place: int = 0) -> Message:
    """What comes behind `place`, as the page before has told it (0: from the beginning)."""
    offset = place
    if version == 4:
        request = v4.FetchSubscriptionsRequest(topic_filter=topic, subscriber_filter=subscriber)
        # beside what the specification has: paging.proto
        request.MergeFromString(PageAsked(after=place).SerializeToString())
        return request
    assert (topic is None) != (subscriber is None), "version 3 fetches by a topic or by a subscriber"
    if topic is not None:
        return v3.FetchSubscriptionsRequest(topic=topic, offset=offset or None)
    return v3.FetchSubscriptionsRequest(subscriber=v3.SubscriberInfo(uri=subscriber), offset=offset or None)


def fetch_subscribers(topic: UUri, offset: int = 0) -> v3.FetchSubscribersRequest:
    return v3.FetchSubscribersRequest(topic=topic, offset=offset or None)


def notifications(version: int, topic: UUri | None) -> Message:
    return v4.NotificationsRequest() if version == 4 else v3.NotificationsRequest(topic=topic)


def reset(version: int) -> Message:
    return v4.ResetRequest() if version == 4 else v3.ResetRequest()


def read_status(version: int, payload: UPayload) -> Status:
    """The status in a subscribe response. Raises INTERNAL for one that says nothing: that is no refusal, and may be
    asked again."""
    try:
        if version == 4:
            return Status(payload.unpack(v4.SubscribeResponse).status - 1)
        response = payload.unpack(v3.SubscriptionResponse)
        if response.HasField("status"):
            return Status(response.status.state)
        why = "it has no status"
    except (UStatusError, ValueError) as error:
        why = str(error)
    raise UStatusError(UCode.INTERNAL, f"the answer of the uSubscription service can't be read: {why}")


def read_subscriptions(version: int, payload: UPayload, place: int = 0) -> tuple[list[Subscription], int | None]:
    """The subscriptions behind `place`, and the place behind which there are more of them."""
    if version == 4:
        page = payload.unpack(v4.FetchSubscriptionsResponse)
        given = PageGiven.FromString(page.SerializeToString())
        if given.HasField("next") and given.next <= place:
            raise UStatusError(UCode.DATA_LOSS, "the pages of the uSubscription service don't come to an end")
        told = map(_from_v4, page.subscriptions)
        return list(filter(_means_something, told)), given.next if given.HasField("next") else None
    response = payload.unpack(v3.FetchSubscriptionsResponse)
    count = len(response.subscriptions)
    found = list(filter(_means_something, map(_from_v3, response.subscriptions)))
    return found, place + count if response.has_more_records and count else None


def read_subscribers(payload: UPayload) -> tuple[list[UUri], bool]:
    response = payload.unpack(v3.FetchSubscribersResponse)
    return [one.uri for one in response.subscribers if _is_valid(one.uri)], response.has_more_records


def read_change(version: int, payload: UPayload) -> Subscription:
    """What has changed; without topic (its resource is 0) everything has. Raises INVALID_ARGUMENT."""
    change = _from_v4(payload.unpack(v4.Subscription)) if version == 4 else _from_v3(payload.unpack(v3.Update))
    if change.topic.resource_id and not _means_something(change):
        raise invalid(
            f"the change is about {uris.format(change.topic)}, or for {uris.format(change.subscriber)}, "
            "which nobody can be"
        )
    return change


def _means_something(told: Subscription) -> bool:
    """False for what no topic and no subscriber can be. One such entry of a service must not cost all the others."""
    topic = told.topic
    may_match = uris.is_topic(topic) or topic.resource_id == uris.WILDCARD_RESOURCE
    return may_match and _is_valid(topic) and _is_valid(told.subscriber)


def _is_valid(address: UUri) -> bool:
    try:
        uris.validate(address)
    except UStatusError:
        return False
    return True


def _from_v4(told: v4.Subscription) -> Subscription:
    expires_ms = _milliseconds(told.expiration) if told.HasField("expiration") else None
    return Subscription(told.topic, told.subscriber, _status(told.status - 1), expires_ms, told.sample_period or None)


def _from_v3(told: v3.Subscription | v3.Update) -> Subscription:
    attributes = told.attributes
    expires_ms = _milliseconds(attributes.expire) if attributes.HasField("expire") else None
    return Subscription(
        told.topic, told.subscriber.uri, _status(told.status.state), expires_ms, attributes.sample_period_ms or None
    )


def _status(number: int) -> Status:
    # of a later specification: no reason to forward for it
    return Status(number) if 0 <= number <= 3 else Status.UNSUBSCRIBED


def _milliseconds(time: Timestamp) -> int:
    return time.seconds * 1000 + time.nanos // 1_000_000


def _timestamp(milliseconds: int) -> Timestamp:
    seconds, rest = divmod(milliseconds, 1000)
    return Timestamp(seconds=seconds, nanos=rest * 1_000_000)


def subscribers_of(subscriptions: Iterable[Subscription]) -> list[UUri]:
    return [one.subscriber for one in subscriptions]
