"""Both versions on the wire: what a request says, and how answers and changes are written. Pure.

payload --V3.subscribe / V4.subscribe--> state.Subscribe ...          Status, Change, rows --V3 / V4--> response and change messages

Version 3 is read in all its published revisions (with and without subscriber, offset, before). The two differ in method
numbers, status numbers and topic rules; the service sees neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from uprotocol import uri as uris
from uprotocol.core.usubscription.paging_pb2 import PageAsked, PageGiven
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UPayload
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription.state import Change, Key, Status, Subscribe, Unsubscribe

M = TypeVar("M", bound=Message)
R = TypeVar("R")

ENTITY_TYPE: Final = 0x0000  # of core.usubscription
CHANGE_RESOURCE: Final = 0x8000
ENTRY_BYTES: Final = 5  # before each entry of a list: its tag and its size
SEQ_MAX: Final = (1 << 63) - 1  # of SQLite's integers
EXPIRY_MS_MIN: Final = -62_135_596_800_000  # 0001-01-01, the first Timestamp there is
EXPIRY_MS_MAX: Final = 253_402_300_799_999  # the end of 9999, the last one


class Row(NamedTuple):
    """One subscription, as it is listed."""

    topic: Key
    subscriber: Key
    status: Status
    expires_ms: int | None = None
    sample_period_ms: int | None = None
    details: bytes = b""


@dataclass(frozen=True, slots=True)
class Fetch:
    """What FetchSubscriptions asks for; the filters are patterns in version 4, and name one thing in version 3."""

    topic: Key | None = None
    subscriber: Key | None = None
    offset: int = 0
    after: int | None = None  # version 4, of who can take pages


@dataclass(frozen=True, slots=True)
class Page:
    """How much of a listing one answer may hold, and whether its caller asks for the rest."""

    entries_max: int
    bytes_max: int
    asked: bool = True


def to_uri(key: Key) -> UUri:
    return UUri(authority_name=key[0], ue_id=key[1], ue_version_major=key[2], resource_id=key[3])


class V3:
    """Version 3."""

    major: Final = 3
    methods: Final = {
        "subscribe": 1,
        "unsubscribe": 2,
        "fetch_subscriptions": 3,
        "register": 6,
        "unregister": 7,
        "fetch_subscribers": 8,
        "reset": 9,
    }

    def subscribe(self, request: UMessage, own: str) -> tuple[Subscribe, UUri]:
        """What is asked, and the topic as it was passed, for the response."""
        asked = _read(request, v3.SubscriptionRequest)
        topic = self._topic(asked, own)
        attributes = asked.attributes
        expires_ms = _read_time(attributes.expire) if attributes.HasField("expire") else None
        details = v3.SubscribeAttributes(details=attributes.details).SerializeToString() if attributes.details else b""
        subscriber = self._subscriber(request, asked, own)
        period = attributes.sample_period_ms or None
        return Subscribe(topic, subscriber, 3, expires_ms, period, details, not asked.topic.authority_name), asked.topic

    def unsubscribe(self, request: UMessage, own: str) -> Unsubscribe:
        asked = _read(request, v3.UnsubscribeRequest)
        return Unsubscribe(self._topic(asked, own), self._subscriber(request, asked, own), 3)

    def fetch(self, request: UMessage, own: str) -> Fetch:
        asked = _read(request, v3.FetchSubscriptionsRequest)
        match asked.WhichOneof("request"):
            case "topic":
                return Fetch(topic=self._topic(asked, own), offset=asked.offset)
            case "subscriber":
                if asked.subscriber.uri == UUri():  # it is missing or empty: neither names anybody
                    raise invalid("FetchSubscriptions names a subscriber, but the SubscriberInfo has no uri")
                return Fetch(subscriber=_named_entity(asked.subscriber.uri, own), offset=asked.offset)
        raise invalid("FetchSubscriptions of version 3 names a topic or a subscriber, got neither")

    def fetch_subscribers(self, request: UMessage, own: str) -> Fetch:
        asked = _read(request, v3.FetchSubscribersRequest)
        return Fetch(topic=self._topic(asked, own), offset=asked.offset)

    def registration(self, request: UMessage, own: str) -> tuple[Key, Key | None]:
        """Who, and for which topic (None: for all)."""
        asked = _read(request, v3.NotificationsRequest)
        topic = self._topic(asked, own)
        return self._subscriber(request, asked, own), topic

    def check_reset(self, request: UMessage) -> None:
        """req~usubscription-reset-only-usubscription~1: the whole entity id counts here."""
        _read(request, v3.ResetRequest)
        if request.attributes.source.ue_id != ENTITY_TYPE:
            raise _only_usubscription(request)

    def subscribed(self, topic: UUri, status: Status) -> v3.SubscriptionResponse:
        return v3.SubscriptionResponse(
            topic=topic, status=v3.SubscriptionStatus(state=v3.SubscriptionStatus.State.ValueType(status))
        )

    def unsubscribed(self) -> v3.UnsubscribeResponse:
        return v3.UnsubscribeResponse()

    def fetched(self, rows: Iterable[tuple[int, Row]], page: Page) -> v3.FetchSubscriptionsResponse:
        response = v3.FetchSubscriptionsResponse()
        response.has_more_records = _fill_page(response.subscriptions, rows, self._fill, page) is not None
        return response

    def subscribers(self, subscribers: Iterable[Key], more: bool, page: Page) -> v3.FetchSubscribersResponse:
        response = v3.FetchSubscribersResponse()
        rows = ((1, key) for key in subscribers)
        left_out = (
            _fill_page(response.subscribers, rows, lambda entry, key: _fill_uri(entry.uri, key), page) is not None
        )
        response.has_more_records = more or left_out
        return response

    def registered(self) -> v3.NotificationsResponse:
        return v3.NotificationsResponse()

    def reset(self) -> v3.ResetResponse:
        return v3.ResetResponse()

    def change(self, change: Change, *, bare: bool = False) -> v3.Update:
        """`bare`: with the topic as a subscriber has passed it that gave no authority."""
        made = v3.Update()
        self._fill(made, change)
        if bare:
            made.topic.authority_name = ""
        return made

    def read_change(self, payload: UPayload) -> Row:
        told = payload.unpack(v3.Update)
        if not told.HasField("status"):
            raise invalid("the notification has no status")  # and does not end a subscription
        attributes = told.attributes
        expires_ms = _read_time(attributes.expire) if attributes.HasField("expire") else None
        status = _known_status(told.status.state)
        return Row(
            uris.key(told.topic), uris.key(told.subscriber.uri), status, expires_ms, attributes.sample_period_ms or None
        )

    @staticmethod
    def _fill(made: v3.Update | v3.Subscription, row: Row | Change) -> None:
        if row.topic[3]:  # the end of a registration has no topic
            _fill_uri(made.topic, row.topic)
        _fill_uri(made.subscriber.uri, row.subscriber)
        made.status.state = v3.SubscriptionStatus.State.ValueType(row.status)
        if row.details:
            made.attributes.MergeFromString(row.details)
        if row.expires_ms is not None:
            _fill_time(made.attributes.expire, row.expires_ms)
        if row.sample_period_ms is not None:
            made.attributes.sample_period_ms = row.sample_period_ms

    @staticmethod
    def _topic(
        asked: v3.SubscriptionRequest
        | v3.UnsubscribeRequest
        | v3.FetchSubscriptionsRequest
        | v3.FetchSubscribersRequest
        | v3.NotificationsRequest,
        own: str,
    ) -> Key:
        """No wildcards, in type, instance or version either; an empty authority is the local one."""
        if not asked.HasField("topic"):
            raise invalid("the request names no topic")
        topic = asked.topic
        uris.validate(topic)
        if uris.has_wildcard(topic):
            raise invalid(f"the topic names one thing, but {uris.format(topic)} has wildcards")
        return _check_resource(topic, own)

    @staticmethod
    def _subscriber(
        request: UMessage, asked: v3.SubscriptionRequest | v3.UnsubscribeRequest | v3.NotificationsRequest, own: str
    ) -> Key:
        """The caller; or, where an older client names one of its own authority, that one. Nobody acts for other
        authorities (C-11)."""
        caller = caller_of(request, own)
        if not asked.HasField("subscriber") or not asked.subscriber.HasField("uri"):
            return caller
        named = _named_entity(asked.subscriber.uri, caller[0])
        return named if named[0] == caller[0] else caller


class V4:
    """Version 4."""

    major: Final = 4
    methods: Final = {
        "subscribe": 1,
        "unsubscribe": 2,
        "fetch_subscriptions": 3,
        "register": 4,
        "unregister": 5,
        "reset": 6,
    }

    def subscribe(self, request: UMessage, own: str) -> tuple[Subscribe, UUri]:
        """What is asked, and the topic as it was passed, for the response."""
        asked = _read(request, v4.SubscribeRequest)
        topic = self._topic(asked)
        expires_ms = _read_time(asked.expiration) if asked.HasField("expiration") else None
        return Subscribe(topic, caller_of(request, own), 4, expires_ms, asked.sample_period or None), asked.topic

    def unsubscribe(self, request: UMessage, own: str) -> Unsubscribe:
        return Unsubscribe(self._topic(_read(request, v4.UnsubscribeRequest)), caller_of(request, own), 4)

    def fetch(self, request: UMessage, own: str) -> Fetch:
        asked = _read(request, v4.FetchSubscriptionsRequest)
        topic = _filter(asked.topic_filter, own) if asked.HasField("topic_filter") else None
        subscriber = _filter(asked.subscriber_filter, own) if asked.HasField("subscriber_filter") else None
        page = PageAsked.FromString(asked.SerializeToString())  # beside what the specification has, see paging.proto
        return Fetch(topic, subscriber, after=min(page.after, SEQ_MAX) if page.HasField("after") else None)

    def registration(self, request: UMessage, own: str) -> tuple[Key, Key | None]:
        _read(request, v4.NotificationsRequest)
        return caller_of(request, own), None

    def check_reset(self, request: UMessage) -> None:
        """req~usubscription-reset-only-usubscription~1: the entity's type counts here, whatever its instance."""
        _read(request, v4.ResetRequest)
        if request.attributes.source.ue_id & 0xFFFF != ENTITY_TYPE:
            raise _only_usubscription(request)

    def subscribed(self, topic: UUri, status: Status) -> v4.SubscribeResponse:
        return v4.SubscribeResponse(topic=topic, status=v4.SubscriptionStatus.ValueType(status + 1))

    def unsubscribed(self) -> v4.UnsubscribeResponse:
        return v4.UnsubscribeResponse()

    def fetched(self, rows: Iterable[tuple[int, Row]], page: Page) -> v4.FetchSubscriptionsResponse:
        """Raises RESOURCE_EXHAUSTED for what needs a page, where the caller knows none."""
        response = v4.FetchSubscriptionsResponse()
        last = _fill_page(response.subscriptions, rows, self._fill, page)
        if last is not None and not page.asked:
            what = f"more subscriptions match than one answer can hold ({page.bytes_max} bytes): narrow the filters, or ask for pages"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, what)
        if last is not None:
            response.MergeFromString(PageGiven(next=last).SerializeToString())
        return response

    def registered(self) -> v4.NotificationsResponse:
        return v4.NotificationsResponse()

    def reset(self) -> v4.ResetResponse:
        return v4.ResetResponse()

    def change(self, change: Change) -> v4.Subscription:
        """Version 4 takes no topic without authority, so it never has to give one back."""
        made = v4.Subscription()
        self._fill(made, change)
        return made

    def read_change(self, payload: UPayload) -> Row:
        return read_subscription(payload.unpack(v4.Subscription))

    @staticmethod
    def _fill(made: v4.Subscription, row: Row | Change) -> None:
        if row.topic[3]:
            _fill_uri(made.topic, row.topic)
        _fill_uri(made.subscriber, row.subscriber)
        made.status = v4.SubscriptionStatus.ValueType(row.status + 1)
        if row.expires_ms is not None:
            _fill_time(made.expiration, row.expires_ms)
        if row.sample_period_ms is not None:
            made.sample_period = row.sample_period_ms

    @staticmethod
    def _topic(asked: v4.SubscribeRequest | v4.UnsubscribeRequest) -> Key:
        """The authority is named, type and resource are specific; instance and version may be wildcards."""
        if not asked.HasField("topic"):
            raise invalid("the request names no topic")
        topic = asked.topic
        uris.validate(topic)
        if topic.authority_name in ("", uris.WILDCARD_AUTHORITY):
            raise invalid(f"the topic names its authority, but {uris.format(topic)} does not")
        if topic.ue_id & 0xFFFF == uris.WILDCARD_ENTITY_TYPE:
            raise invalid(f"the topic names its entity type, but {uris.format(topic)} has a wildcard there")
        return _check_resource(topic, topic.authority_name)


V3_CODEC: Final = V3()
V4_CODEC: Final = V4()
CODECS: Final[dict[int, V3 | V4]] = {3: V3_CODEC, 4: V4_CODEC}


def read_subscription(told: v4.Subscription) -> Row:
    expires_ms = _read_time(told.expiration) if told.HasField("expiration") else None
    return Row(
        uris.key(told.topic),
        uris.key(told.subscriber),
        _known_status(told.status - 1),
        expires_ms,
        told.sample_period or None,
    )


def caller_of(request: UMessage, own: str) -> Key:
    """Who sent the request, as it is stored: with authority, and with resource 0."""
    if not request.attributes.HasField("source"):
        raise invalid("the request has no source, so nobody could be subscribed")
    return _named_entity(request.attributes.source, own)


def _named_entity(uri: UUri, own: str) -> Key:
    uris.validate(uri)
    if uris.has_wildcard(uri):
        raise invalid(f"a subscriber is one uEntity, but {uris.format(uri)} has wildcards")
    return (uri.authority_name or own, uri.ue_id, uri.ue_version_major, uris.RESOURCE_REPLY)


def _filter(pattern: UUri, own: str) -> Key:
    uris.validate(pattern)
    return uris.key(uris.with_authority(pattern, own))


def _fill_page(entries: Any, rows: Iterable[tuple[int, R]], fill: Callable[[Any, R], None], page: Page) -> int | None:
    """The number of the last entry, if there are more behind it; an answer has at least one."""
    size = last = 0
    for number, row in rows:
        entry = entries.add()
        fill(entry, row)
        size += entry.ByteSize() + ENTRY_BYTES
        if len(entries) > page.entries_max or (last and size > page.bytes_max):
            del entries[-1]
            return last
        last = number
    return None


def _check_resource(topic: UUri, own: str) -> Key:
    if not uris.is_topic(topic):
        raise invalid(f"a topic has a resource of 8000 to FFFE, got {uris.format(topic)}")
    return (topic.authority_name or own, topic.ue_id, topic.ue_version_major, topic.resource_id)


def _only_usubscription(request: UMessage) -> UStatusError:
    source = uris.format(request.attributes.source)
    return UStatusError(
        UCode.PERMISSION_DENIED, f"only another uSubscription service (entity 0) may reset this one, not {source}"
    )


def _read(request: UMessage, type: type[M]) -> M:
    if not request.HasField("payload") and type not in (
        v3.ResetRequest,
        v4.ResetRequest,
        v4.NotificationsRequest,
        v4.FetchSubscriptionsRequest,
    ):
        raise invalid(f"expected a {type.DESCRIPTOR.full_name} as payload, got no payload")
    return UPayload.of(request).unpack(type)


def _read_time(time: Timestamp) -> int:
    """Unix milliseconds. Raises INVALID_ARGUMENT for what no Timestamp may hold."""
    if not 0 <= time.nanos < 1_000_000_000:
        raise invalid(f"the expiry has {time.nanos} nanoseconds; a Timestamp has 0 to 999999999")
    milliseconds = time.seconds * 1000 + time.nanos // 1_000_000
    if not EXPIRY_MS_MIN <= milliseconds <= EXPIRY_MS_MAX:
        raise invalid(f"the expiry lies {time.seconds} s from 1970; a Timestamp is of the years 1 to 9999")
    return milliseconds


def _fill_time(time: Timestamp, milliseconds: int) -> None:
    time.seconds, rest = divmod(milliseconds, 1000)
    time.nanos = rest * 1_000_000


def timestamp(milliseconds: int) -> Timestamp:
    made = Timestamp()
    _fill_time(made, milliseconds)
    return made


def _fill_uri(uri: UUri, key: Key) -> None:
    uri.authority_name, uri.ue_id, uri.ue_version_major, uri.resource_id = key


def _known_status(number: int) -> Status:
    try:
        return Status(number)
    except ValueError:
        raise invalid(f"subscription status {number} is unknown") from None


__all__ = ["CODECS", "V3", "V4", "Fetch", "Row"]
