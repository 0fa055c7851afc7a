"""The messages of core.usubscription: versions 3 and 4, both directions. Pure.

client                                                               service
subscribe(topic, ...) --> SubscribeRequest, SubscriptionRequest  --> read_subscribe(request) -> Subscribe
read_status(payload) <--- SubscribeResponse, ...                <--- subscribed(topic, status)
read_change(payload) <--- Subscription, Update                  <--- change(entry)

All published revisions of version 3 can be read (with and without subscriber, offset, before). The codecs hide that the
versions differ in method numbers, status numbers and topic rules.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from uprotocol import uri as uris
from uprotocol.core.usubscription.paging_pb2 import PageAsked, PageGiven
from uprotocol.core.usubscription.stores_pb2 import StoreAsked, StoreGiven
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UPayload
from uprotocol.status import UStatusError, invalid
from uprotocol.uri import Key
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

R = TypeVar("R")

ENTITY_TYPE: Final = 0x0000  # of core.usubscription
CHANGE_RESOURCE: Final = 0x8000
ENTRY_BYTES: Final = 5  # tag and size of each entry of a list
STORE_BYTES: Final = 16  # of the id of a store
SEQ_MAX: Final = (1 << 63) - 1  # the largest integer of SQLite
EXPIRY_MS_MIN: Final = -62_135_596_800_000  # 0001-01-01, the first Timestamp
EXPIRY_MS_MAX: Final = 253_402_300_799_999  # the end of 9999, the last Timestamp

SUBSCRIBE: Final = "subscribe"
UNSUBSCRIBE: Final = "unsubscribe"
FETCH_SUBSCRIPTIONS: Final = "fetch_subscriptions"
FETCH_SUBSCRIBERS: Final = "fetch_subscribers"  # version 3 only
REGISTER: Final = "register"
UNREGISTER: Final = "unregister"
RESET: Final = "reset"


class Status(enum.IntEnum):
    """The numbers of version 3; those of version 4 are larger by one."""

    UNSUBSCRIBED = 0
    SUBSCRIBE_PENDING = 1
    SUBSCRIBED = 2
    UNSUBSCRIBE_PENDING = 3


WANTING: Final = (Status.SUBSCRIBE_PENDING, Status.SUBSCRIBED)
"""In these the subscriber wants the messages of the topic."""
_STATUSES: Final = tuple(Status)


# -- contents of requests ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subscribe:
    topic: Key
    subscriber: Key
    major: int
    expires_ms: int | None = None  # Unix milliseconds; None: never
    sample_period_ms: int | None = None
    details: bytes = b""  # SubscribeAttributes.details of version 3, passed through
    bare: bool = False  # the topic in the request had no authority


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    topic: Key
    subscriber: Key
    major: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """The filters of FetchSubscriptions: patterns in version 4, single topics or subscribers in version 3."""

    topic: Key | None = None
    subscriber: Key | None = None
    offset: int = 0
    after: int | None = None  # version 4; None: the caller can't read pages
    store: bytes = b""  # id of the caller's store; empty: the caller has not named one


@dataclass(frozen=True, slots=True)
class PageLimits:
    """The limits of one answer with a list."""

    entries_max: int
    bytes_max: int
    asked: bool = True  # the caller will request the rest


class StoreSaid(NamedTuple):
    """What a service says about stores beside a list (stores.proto). Empty: it does not say."""

    store: bytes = b""  # its own
    former: bytes = b""  # another store of the asking service, which it knew before
    links: int = 0  # with `former`: its subscriptions at the asking service


# -- contents of answers and changes -----------------------------------------------------------------------------------


class Row(NamedTuple):
    """One subscription in the list of a service."""

    topic: Key
    subscriber: Key
    status: Status
    expires_ms: int | None = None
    sample_period_ms: int | None = None
    details: bytes = b""


class Change(NamedTuple):
    """A change of a subscription, for its subscriber and for registered clients."""

    topic: Key
    subscriber: Key
    status: Status
    major: int
    expires_ms: int | None = None
    sample_period_ms: int | None = None
    details: bytes = b""
    bare: bool = False  # the subscriber (nobody else) gets the topic without authority, as in its request
    notify_subscriber: bool = True
    status_changed: bool = True  # version 3 notifies only of changes of the status


Entry = Row | Change


class Subscription(NamedTuple):
    """One subscription, as a client reads it."""

    topic: UUri
    subscriber: UUri
    status: Status
    expires_ms: int | None = None  # Unix milliseconds; None: never
    sample_period_ms: int | None = None  # None: every message


class Method(NamedTuple):
    """One method of one version: its resource, and the types of request and response."""

    resource: int
    request: type[Any]
    answer: type[Any]


class Codec:
    """What both versions have in common. Reading raises UStatusError(INVALID_ARGUMENT) if no other code is named."""

    major: ClassVar[int]
    methods: ClassVar[dict[str, Method]]
    changes: ClassVar[type[Any]]
    _service_mask: ClassVar[int]  # the bits of a caller's entity id that are 0 for a uSubscription service
    _nests: ClassVar[bool]  # version 3 has nested messages for the subscriber, the status and the options
    _expiry: ClassVar[str]  # names of fields
    _period: ClassVar[str]

    # fields that the versions have in different places

    def _status(self, message: Any) -> int | None:
        if self._nests:
            return message.status.state if message.HasField("status") else None
        return int(message.status) - 1

    def _put_options(self, message: Any, expires_ms: int | None, sample_period_ms: int | None) -> None:
        options = message.attributes if self._nests else message
        if expires_ms is not None:
            getattr(options, self._expiry).CopyFrom(timestamp(expires_ms))
        if sample_period_ms is not None:
            setattr(options, self._period, sample_period_ms)

    def _read_options(self, message: Any, read: Callable[[Timestamp], int]) -> tuple[int | None, int | None]:
        options = message.attributes if self._nests else message
        expires_ms = read(getattr(options, self._expiry)) if options.HasField(self._expiry) else None
        return expires_ms, getattr(options, self._period) or None

    # requests: a client writes, the service reads; `own` is the authority of an address that has none

    def subscribe(
        self,
        topic: UUri,
        expires_ms: int | None = None,
        sample_period_ms: int | None = None,
        subscriber: UUri | None = None,
    ) -> Message:
        """`subscriber`: for services of an older revision of version 3, which read this field (C-11)."""
        request: Message = self.methods[SUBSCRIBE].request(topic=topic, **self._naming(subscriber))
        self._put_options(request, expires_ms, sample_period_ms)
        return request

    def unsubscribe(self, topic: UUri, subscriber: UUri | None = None) -> Message:
        return self.methods[UNSUBSCRIBE].request(topic=topic, **self._naming(subscriber))  # type: ignore[no-any-return]

    def registration(self, topic: UUri | None) -> Message:
        """For `topic`; in version 4 for everything."""
        return v3.NotificationsRequest(topic=topic) if self._nests else v4.NotificationsRequest()

    def reset(self) -> Message:
        return self.methods[RESET].request()  # type: ignore[no-any-return]

    def read_subscribe(self, request: UMessage, own: str) -> tuple[Subscribe, UUri]:
        """Returns the request, and the topic exactly as it was passed, for the response."""
        asked = self._read(request, SUBSCRIBE)
        topic, subscriber = self._topic(asked, own), self._subscriber(request, asked, own)
        expires_ms, period = self._read_options(asked, _read_time)
        details = b""
        if self._nests and asked.attributes.details:
            details = v3.SubscribeAttributes(details=asked.attributes.details).SerializeToString()
        bare = not asked.topic.authority_name
        return Subscribe(topic, subscriber, self.major, expires_ms, period, details, bare), asked.topic

    def read_unsubscribe(self, request: UMessage, own: str) -> Unsubscribe:
        asked = self._read(request, UNSUBSCRIBE)
        return Unsubscribe(self._topic(asked, own), self._subscriber(request, asked, own), self.major)

    def read_registration(self, request: UMessage, own: str) -> tuple[Key, Key | None]:
        """Returns the client, and the topic; None in version 4, which registers for all."""
        asked = self._read(request, REGISTER)
        topic = self._topic(asked, own) if self.major == 3 else None
        return self._subscriber(request, asked, own), topic

    def check_reset(self, request: UMessage) -> None:
        """req~usubscription-reset-only-usubscription~1. Raises PERMISSION_DENIED."""
        self._read(request, RESET)
        if request.attributes.source.ue_id & self._service_mask != ENTITY_TYPE:
            source = uris.format(request.attributes.source)
            why = f"only another uSubscription service (entity 0) may reset this one, not {source}"
            raise UStatusError(UCode.PERMISSION_DENIED, why)

    def _read(self, request: UMessage, method: str) -> Any:
        type = self.methods[method].request
        if not request.HasField("payload") and type not in _MAY_BE_EMPTY:
            raise invalid(f"expected a {type.DESCRIPTOR.full_name} as payload, got no payload")
        return UPayload(request.payload, request.attributes.payload_format).unpack(type)

    def _naming(self, subscriber: UUri | None) -> dict[str, Any]:
        return {"subscriber": v3.SubscriberInfo(uri=subscriber)} if self._nests and subscriber is not None else {}

    def _topic(self, asked: Any, own: str) -> Key:
        """Version 3 allows no wildcards, and an empty authority is the local one. In version 4 authority, entity type
        and resource must be given; instance and version may be wildcards."""
        if not asked.HasField("topic"):
            raise invalid("expected a topic in the request, got none")
        topic: UUri = asked.topic
        uris.validate(topic)
        if self.major == 3:
            if uris.has_wildcard(topic):
                raise invalid(f"expected a topic without wildcards, got {uris.format(topic)}")
        elif topic.authority_name in ("", uris.WILDCARD_AUTHORITY):
            raise invalid(f"expected a topic with a concrete authority, got {uris.format(topic)}")
        elif topic.ue_id & 0xFFFF == uris.WILDCARD_ENTITY_TYPE:
            raise invalid(f"expected a topic with a concrete entity type, got {uris.format(topic)}")
        if not uris.is_topic(topic):
            raise invalid(f"a topic has a resource of 8000 to FFFE, got {uris.format(topic)}")
        return (topic.authority_name or own, topic.ue_id, topic.ue_version_major, topic.resource_id)

    def _subscriber(self, request: UMessage, asked: Any, own: str) -> Key:
        """The caller, with resource 0; or the subscriber that an older client of version 3 names, if it has the
        authority of the caller: nobody may subscribe for other authorities (C-11). The transport has checked that the
        source has no wildcards."""
        source = request.attributes.source
        authority = source.authority_name or own
        if self._nests and asked.HasField("subscriber") and asked.subscriber.HasField("uri"):
            named = _named_entity(asked.subscriber.uri, authority)
            if named[0] == authority:
                return named
        return (authority, source.ue_id, source.ue_version_major, uris.RESOURCE_REPLY)

    # answers and changes: the service writes, a client reads

    def subscribed(self, topic: UUri, status: Status) -> Message:
        found = v3.SubscriptionStatus(state=status) if self._nests else status + 1  # type: ignore[arg-type]
        return self.methods[SUBSCRIBE].answer(topic=topic, status=found)  # type: ignore[no-any-return]

    def done(self, method: str) -> Message:
        """The empty answer of `method`."""
        return self.methods[method].answer()  # type: ignore[no-any-return]

    def fetched(self, rows: Iterable[tuple[int, Entry]], page: PageLimits, said: StoreSaid | None = None) -> Message:
        """The answer with `rows` and their numbers, as many as fit into `page`. Version 4 raises RESOURCE_EXHAUSTED if
        not all fit and the caller can't read pages. `said`: for a caller that has named its store."""
        response = self.methods[FETCH_SUBSCRIPTIONS].answer()
        last = _fill_page(response.subscriptions, rows, self._fill, page)
        if self._nests:
            response.has_more_records = last is not None
        elif last is not None:
            if not page.asked:
                why = f"more subscriptions match than fit into one answer ({page.bytes_max} bytes)"
                raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"{why}: narrow the filters, or request pages")
            response.MergeFromString(PageGiven(next=last).SerializeToString())
        if said is not None:
            given = StoreGiven(store=said.store)
            if said.former:
                given.former, given.links = said.former, said.links
            response.MergeFromString(given.SerializeToString())
        return response  # type: ignore[no-any-return]

    def change(self, change: Entry, *, bare: bool = False) -> Message:
        """`bare`: without the authority of the topic."""
        made = self.changes()
        self._fill(made, change)
        if bare:
            made.topic.authority_name = ""
        return made  # type: ignore[no-any-return]

    def _fill(self, made: Any, entry: Entry) -> None:
        if entry.topic[3]:  # the end of a registration has no topic
            fill_uri(made.topic, entry.topic)
        if self._nests:
            fill_uri(made.subscriber.uri, entry.subscriber)
            made.status.state = entry.status
            if entry.details:  # version 4 has no field for them
                made.attributes.MergeFromString(entry.details)
        else:
            fill_uri(made.subscriber, entry.subscriber)
            made.status = entry.status + 1
        self._put_options(made, entry.expires_ms, entry.sample_period_ms)

    def read_status(self, payload: UPayload) -> Status:
        """The status in a subscribe response. Raises INTERNAL if it can't be read: that is not a refusal, and the
        request may be repeated."""
        try:
            status = self._status(payload.unpack(self.methods[SUBSCRIBE].answer))
            if status is not None:
                return Status(status)
            why = "it has no status"  # falls through to the error
        except (UStatusError, ValueError) as error:
            why = str(error)
        raise UStatusError(UCode.INTERNAL, f"the answer of the uSubscription service can't be read: {why}")

    def read_subscriptions(
        self, payload: UPayload, after: int = 0, *, strict: bool = False
    ) -> tuple[list[Subscription], int | None]:
        """Read the page that was requested with `after`. Returns its subscriptions, and the `after` of the next page
        (None: this is the last one).

        Invalid entries are left out; with `strict` they raise DATA_LOSS.
        """
        try:
            entries, following = self._page(payload.unpack(self.methods[FETCH_SUBSCRIPTIONS].answer), after)
            found = [self._subscription(entry, strict) for entry in entries]
        except UStatusError as error:
            if not strict:
                raise
            why = f"the list of the uSubscription service can't be read: {error.message}"
            raise UStatusError(UCode.DATA_LOSS, why) from None
        return found if strict else list(filter(_is_possible, found)), following

    def read_store(self, payload: UPayload) -> StoreSaid:
        """What the answer of FetchSubscriptions says about stores."""
        given = StoreGiven.FromString(payload.unpack(self.methods[FETCH_SUBSCRIPTIONS].answer).SerializeToString())
        return StoreSaid(_store(given.store), _store(given.former), given.links)

    def _page(self, page: Any, after: int) -> tuple[Sequence[Any], int | None]:
        if self._nests:
            count = len(page.subscriptions)
            return page.subscriptions, after + count if page.has_more_records and count else None
        given = PageGiven.FromString(page.SerializeToString())
        if not given.HasField("next"):
            return page.subscriptions, None
        if given.next <= after:
            why = f"the uSubscription service answers page {after} with next page {given.next}: the pages never end"
            raise UStatusError(UCode.DATA_LOSS, why)
        return page.subscriptions, given.next

    def read_change(self, payload: UPayload, *, strict: bool = False) -> Subscription:
        """The changed subscription. If it has no topic (the resource is 0), everything has changed.

        A status that is missing or of a later specification counts as UNSUBSCRIBED; with `strict` it is an error.
        """
        message = payload.unpack(self.changes)
        if strict and self._status(message) is None:
            raise invalid("the notification has no status")
        change = self._subscription(message, strict)
        if not strict and change.topic.resource_id and not _is_possible(change):
            topic, subscriber = uris.format(change.topic), uris.format(change.subscriber)
            raise invalid(f"expected a change for a valid topic and subscriber, got {topic} and {subscriber}")
        return change

    def _subscription(self, entry: Any, strict: bool) -> Subscription:
        status = self._status(entry) or 0
        if not 0 <= status < len(_STATUSES):  # of a later specification
            if strict:
                raise invalid(f"subscription status {status} is unknown")
            status = 0
        options = self._read_options(entry, _read_time if strict else _milliseconds)
        subscriber = entry.subscriber.uri if self._nests else entry.subscriber
        return Subscription(entry.topic, subscriber, _STATUSES[status], *options)


class V3(Codec):
    major = 3
    methods: ClassVar = {
        SUBSCRIBE: Method(1, v3.SubscriptionRequest, v3.SubscriptionResponse),
        UNSUBSCRIBE: Method(2, v3.UnsubscribeRequest, v3.UnsubscribeResponse),
        FETCH_SUBSCRIPTIONS: Method(3, v3.FetchSubscriptionsRequest, v3.FetchSubscriptionsResponse),
        REGISTER: Method(6, v3.NotificationsRequest, v3.NotificationsResponse),
        UNREGISTER: Method(7, v3.NotificationsRequest, v3.NotificationsResponse),
        FETCH_SUBSCRIBERS: Method(8, v3.FetchSubscribersRequest, v3.FetchSubscribersResponse),
        RESET: Method(9, v3.ResetRequest, v3.ResetResponse),
    }
    changes = v3.Update
    _service_mask = 0xFFFF_FFFF
    _nests, _expiry, _period = True, "expire", "sample_period_ms"

    # requests

    def fetch_subscriptions(
        self, topic: UUri | None, subscriber: UUri | None, after: int = 0, store: bytes = b""
    ) -> Message:
        """`after`: from the previous page (0: the first page). `store`: of the calling service."""
        assert (topic is None) != (subscriber is None), "version 3 fetches by a topic or by a subscriber"
        request = v3.FetchSubscriptionsRequest(topic=topic, offset=after or None, **self._naming(subscriber))
        return _with_store(request, store)

    def fetch_subscribers(self, topic: UUri, offset: int = 0) -> Message:
        return v3.FetchSubscribersRequest(topic=topic, offset=offset or None)

    def read_fetch(self, request: UMessage, own: str) -> Fetch:
        asked = self._read(request, FETCH_SUBSCRIPTIONS)
        match asked.WhichOneof("request"):
            case "topic":
                return Fetch(topic=self._topic(asked, own), offset=asked.offset, store=_store_of(asked))
            case "subscriber":
                if asked.subscriber.uri == UUri():  # missing or empty
                    raise invalid("FetchSubscriptions names a subscriber, but the SubscriberInfo has no uri")
                subscriber = _named_entity(asked.subscriber.uri, own)
                return Fetch(subscriber=subscriber, offset=asked.offset, store=_store_of(asked))
        raise invalid("FetchSubscriptions of version 3 names a topic or a subscriber, got neither")

    def read_fetch_subscribers(self, request: UMessage, own: str) -> tuple[Key, int]:
        """Returns the topic and the offset."""
        asked = self._read(request, FETCH_SUBSCRIBERS)
        return self._topic(asked, own), asked.offset

    def subscribers(self, subscribers: Iterable[Key], more: bool, page: PageLimits) -> Message:
        response = v3.FetchSubscribersResponse()
        rows = ((1, key) for key in subscribers)
        left_out = _fill_page(response.subscribers, rows, lambda entry, key: fill_uri(entry.uri, key), page)
        response.has_more_records = more or left_out is not None
        return response

    def read_subscribers(self, payload: UPayload) -> tuple[list[UUri], bool]:
        """Returns the subscribers, and whether there are more."""
        response = payload.unpack(v3.FetchSubscribersResponse)
        found = [one.uri for one in response.subscribers if _is_valid(one.uri)]
        return found, response.has_more_records and bool(found)


class V4(Codec):
    major = 4
    methods: ClassVar = {
        SUBSCRIBE: Method(1, v4.SubscribeRequest, v4.SubscribeResponse),
        UNSUBSCRIBE: Method(2, v4.UnsubscribeRequest, v4.UnsubscribeResponse),
        FETCH_SUBSCRIPTIONS: Method(3, v4.FetchSubscriptionsRequest, v4.FetchSubscriptionsResponse),
        REGISTER: Method(4, v4.NotificationsRequest, v4.NotificationsResponse),
        UNREGISTER: Method(5, v4.NotificationsRequest, v4.NotificationsResponse),
        RESET: Method(6, v4.ResetRequest, v4.ResetResponse),
    }
    changes = v4.Subscription
    _service_mask = 0xFFFF  # the entity type; the instance does not matter
    _nests, _expiry, _period = False, "expiration", "sample_period"

    # requests

    def fetch_subscriptions(
        self, topic: UUri | None, subscriber: UUri | None, after: int = 0, store: bytes = b""
    ) -> Message:
        """`after`: from the previous page (0: the first page). `store`: of the calling service."""
        request = v4.FetchSubscriptionsRequest(topic_filter=topic, subscriber_filter=subscriber)
        # an extension of the specification: paging.proto
        request.MergeFromString(PageAsked(after=after).SerializeToString())
        return _with_store(request, store)

    def read_fetch(self, request: UMessage, own: str) -> Fetch:
        asked = self._read(request, FETCH_SUBSCRIPTIONS)
        topic = _filter(asked.topic_filter, own) if asked.HasField("topic_filter") else None
        subscriber = _filter(asked.subscriber_filter, own) if asked.HasField("subscriber_filter") else None
        page = PageAsked.FromString(asked.SerializeToString())  # an extension of the specification: paging.proto
        after = min(page.after, SEQ_MAX) if page.HasField("after") else None
        return Fetch(topic, subscriber, after=after, store=_store_of(asked))


V3_CODEC: Final = V3()
V4_CODEC: Final = V4()
CODECS: Final[dict[int, V3 | V4]] = {3: V3_CODEC, 4: V4_CODEC}


# -- parts -------------------------------------------------------------------------------------------------------------


def service(authority: str, major: int, resource: int = CHANGE_RESOURCE) -> UUri:
    """A resource of the service of `authority`; the default is the change topic."""
    return uris.uri(authority, ENTITY_TYPE, major, resource)


def to_uri(key: Key) -> UUri:
    return UUri(authority_name=key[0], ue_id=key[1], ue_version_major=key[2], resource_id=key[3])


def fill_uri(uri: UUri, key: Key) -> None:
    uri.authority_name, uri.ue_id, uri.ue_version_major, uri.resource_id = key


def _named_entity(uri: UUri, own: str) -> Key:
    uris.validate(uri)
    if uris.has_wildcard(uri):
        raise invalid(f"expected a subscriber without wildcards, got {uris.format(uri)}")
    return (uri.authority_name or own, uri.ue_id, uri.ue_version_major, uris.RESOURCE_REPLY)


def _with_store(request: Message, store: bytes) -> Message:
    if store:
        request.MergeFromString(StoreAsked(store=store).SerializeToString())
    return request


def _store_of(request: Message) -> bytes:
    return _store(StoreAsked.FromString(request.SerializeToString()).store)


def _store(id: bytes) -> bytes:
    """Returns `id`; empty if it can't be one."""
    return id if len(id) == STORE_BYTES else b""


def _filter(pattern: UUri, own: str) -> Key:
    uris.validate(pattern)
    return uris.key(uris.with_authority(pattern, own))


_MAY_BE_EMPTY: Final = (v3.ResetRequest, v4.ResetRequest, v4.NotificationsRequest, v4.FetchSubscriptionsRequest)


def _fill_page(
    entries: Any, rows: Iterable[tuple[int, R]], fill: Callable[[Any, R], None], page: PageLimits
) -> int | None:
    """Fill `entries` with at least one of the numbered `rows`. Returns the number of the last one if more follow."""
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


def _is_possible(subscription: Subscription) -> bool:
    """False if the topic or the subscriber is invalid."""
    topic = subscription.topic
    may_match = uris.is_topic(topic) or topic.resource_id == uris.WILDCARD_RESOURCE
    return may_match and _is_valid(topic) and _is_valid(subscription.subscriber)


def _is_valid(address: UUri) -> bool:
    try:
        uris.validate(address)
    except UStatusError:
        return False
    return True


def timestamp(milliseconds: int) -> Timestamp:
    seconds, rest = divmod(milliseconds, 1000)
    return Timestamp(seconds=seconds, nanos=rest * 1_000_000)


def _milliseconds(time: Timestamp) -> int:
    return time.seconds * 1000 + time.nanos // 1_000_000


def _read_time(time: Timestamp) -> int:
    """Unix milliseconds. Raises INVALID_ARGUMENT for a time that a Timestamp must not have."""
    if not 0 <= time.nanos < 1_000_000_000:
        raise invalid(f"the expiry has {time.nanos} nanoseconds; a Timestamp has 0 to 999999999")
    milliseconds = _milliseconds(time)
    if not EXPIRY_MS_MIN <= milliseconds <= EXPIRY_MS_MAX:
        raise invalid(f"the expiry is {time.seconds} s from 1970; a Timestamp is in the years 1 to 9999")
    return milliseconds
