"""Every operation with every kind of invalid input: the documented code, nothing stored, and the service continues."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiers import examples
from transports.local import LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import CallOptions, InMemoryRpcClient
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.core.usubscription.wire import CODECS
from uprotocol.message import PROTOBUF, UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.service import USubscriptionService

GOOD = uris.parse("//dev1/20/1/8001")
LONG = UUri(authority_name="a" * 129, ue_id=0x20, ue_version_major=1, resource_id=0x8001)
spec = pytest.mark.spec


def bad(text: str) -> UUri:
    return uris.parse(text)


def raw_uri(**fields: Any) -> UUri:
    made = UUri(authority_name="dev1", ue_id=0x20, ue_version_major=1, resource_id=0x8001)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


EVERYWHERE = {
    "authority wildcard": bad("//*/20/1/8001"),
    "type wildcard": bad("//dev1/FFFF/1/8001"),
    "any entity": bad("//dev1/FFFFFFFF/1/8001"),
    "resource wildcard": bad("//dev1/20/1/FFFF"),
    "a method": bad("//dev1/20/1/7FFF"),
    "resource 0": bad("//dev1/20/1/0"),
    "129 characters": LONG,
    "upper case": raw_uri(authority_name="DEV1"),
    "a port": raw_uri(authority_name="dev1:80"),
    "version of 9 bits": raw_uri(ue_version_major=0x101),
    "resource of 17 bits": raw_uri(resource_id=0x18001),
    "missing": None,
}
V3_TOPICS = {
    **EVERYWHERE,
    "instance wildcard": bad("//dev1/FFFF0020/1/8001"),
    "version wildcard": bad("//dev1/20/FF/8001"),
}
V4_TOPICS = {**EVERYWHERE, "empty authority": bad("/20/1/8001")}


def topic_requests() -> list[Any]:
    found = []
    three = {1: v3.SubscriptionRequest, 2: v3.UnsubscribeRequest, 3: v3.FetchSubscriptionsRequest}
    three |= {6: v3.NotificationsRequest, 7: v3.NotificationsRequest, 8: v3.FetchSubscribersRequest}
    for major, methods, topics in (
        (3, three, V3_TOPICS),
        (4, {1: v4.SubscribeRequest, 2: v4.UnsubscribeRequest}, V4_TOPICS),
    ):
        for method, type_ in methods.items():
            found += [
                pytest.param(major, method, type_(topic=topic), id=f"v{major}-{method}-{name}")
                for name, topic in topics.items()
            ]
    return found


async def code_of(call: Any) -> UCode.ValueType:
    try:
        await call
    except UStatusError as error:
        return error.code
    return UCode.OK


async def nothing_happened(world: Any, raw: Any) -> None:
    """Nothing is stored, nothing is sent, and the service works."""
    service = world.services["dev1"]
    assert await service.store.read(lambda reader: (reader.count(), reader.links(), reader.registrations())) == (
        0,
        [],
        [],
    )
    assert (await raw.call(4, 1, v4.SubscribeRequest(topic=GOOD))).unpack(v4.SubscribeResponse).status == 3
    assert len(await raw.published[4].count(1)) == 1


@pytest.fixture
async def raw(world: Any) -> Any:
    await world.service()
    return await world.raw()


@spec("dsn~usubscription-subscribe-invalid-topic~1", doc="v3")
@spec("dsn~usubscription-unsubscribe-invalid-topic~1", doc="v3")
@spec("dsn~usubscription-fetch-subscribers-invalid-topic~1", doc="v3")
@spec("dsn~usubscription-fetch-subscriptions-invalid-topic~1", doc="v3")
@spec("dsn~usubscription-register-notifications-invalid-topic~1", doc="v3")
@spec("dsn~usubscription-unregister-notifications-invalid-topic~1", doc="v3")
@spec("dsn~usubscription-uri-version-major~1", doc="v3")
@spec("dsn~usubscription-subscribe-valid-topic-uuris~1", doc="v4")
@spec("req~usubscription-subscribe-request-signature~1", doc="v4")
@spec("req~usubscription-unsubscribe-request-signature~1", doc="v4")
@spec("dsn~usubscription-unsubscribe-valid-topic-uuris~1", doc="v4")
@pytest.mark.parametrize(("major", "method", "request_"), topic_requests())
async def test_bad_topics(world: Any, raw: Any, major: int, method: int, request_: Any) -> None:
    assert await code_of(raw.call(major, method, UPayload.pack(request_))) == UCode.INVALID_ARGUMENT
    await nothing_happened(world, raw)


RESPONSES = {
    3: {
        1: v3.SubscriptionResponse,
        2: v3.UnsubscribeResponse,
        3: v3.FetchSubscriptionsResponse,
        6: v3.NotificationsResponse,
    }
    | {7: v3.NotificationsResponse, 8: v3.FetchSubscribersResponse, 9: v3.ResetResponse},
    4: {
        1: v4.SubscribeResponse,
        2: v4.UnsubscribeResponse,
        3: v4.FetchSubscriptionsResponse,
        4: v4.NotificationsResponse,
    }
    | {5: v4.NotificationsResponse, 6: v4.ResetResponse},
}


@spec("local~error-response-message")
@spec("dsn~service-error-model-error-response~1")
@pytest.mark.parametrize(
    ("major", "method"),
    [(major, method.resource) for major, codec in CODECS.items() for method in codec.methods.values()],
)
async def test_a_failure_is_reported_by_commstatus_and_ustatus_and_never_in_a_response_message(
    world: Any, raw: Any, major: int, method: int
) -> None:
    ear = type(raw.notified[3])()
    await raw.transport.register_listener(uris.uri("dev1", 0, major, method), ear, raw.local.get_source())
    refused = await code_of(raw.call(major, method, UPayload(b"\xff", PROTOBUF)))
    assert refused == UCode.INVALID_ARGUMENT
    (answer,) = await ear.count(1)
    assert answer.attributes.commstatus == refused
    status = UPayload.of(answer).unpack(UStatus)
    assert status.code == refused
    assert status.message
    held = {
        field.message_type.full_name
        for field in _fields(RESPONSES[major][method].DESCRIPTOR)
        if field.message_type is not None
    }
    assert "uprotocol.v1.UStatus" not in held
    assert not any(
        field.enum_type is not None and field.enum_type.name == "UCode"
        for field in _fields(RESPONSES[major][method].DESCRIPTOR)
    )


def _fields(message: Any) -> list[Any]:
    """The fields of a message and of its nested messages."""
    found, todo, seen = [], [message], set()
    while todo:
        one = todo.pop()
        if one.full_name not in seen:
            seen.add(one.full_name)
            found += one.fields
            todo += [field.message_type for field in one.fields if field.message_type is not None]
    return found


SUBSCRIBERS = {
    "authority wildcard": bad("//*/10/1/0"),
    "type wildcard": bad("//dev1/FFFF/1/0"),
    "instance wildcard": bad("//dev1/FFFF0010/1/0"),
    "resource wildcard": bad("//dev1/10/1/FFFF"),
    "version wildcard": bad("//dev1/10/FF/0"),
    "129 characters": LONG,
    "upper case": raw_uri(authority_name="DEV1", resource_id=0),
    "version of 9 bits": raw_uri(ue_version_major=0x101, resource_id=0),
    "empty": UUri(),
    "missing": None,
}


@spec("dsn~usubscription-fetch-subscriptions-invalid-subscriber~1", doc="v3")
@pytest.mark.parametrize("subscriber", SUBSCRIBERS.values(), ids=SUBSCRIBERS)
async def test_bad_subscribers_of_v3_fetch_subscriptions(world: Any, raw: Any, subscriber: UUri | None) -> None:
    request = v3.FetchSubscriptionsRequest(subscriber=v3.SubscriberInfo(uri=subscriber))
    assert await code_of(raw.call(3, 3, request)) == UCode.INVALID_ARGUMENT
    await nothing_happened(world, raw)


@spec("dsn~usubscription-fetch-subscriptions-invalid-topic-filter~1", doc="v4")
@spec("dsn~usubscription-fetch-subscriptions-invalid-subscriber-filter~1", doc="v4")
@pytest.mark.parametrize("field", ["topic_filter", "subscriber_filter"])
@pytest.mark.parametrize("name", ["129 characters", "upper case", "a port", "version of 9 bits", "resource of 17 bits"])
async def test_v4_filters_only_have_to_be_uris(world: Any, raw: Any, field: str, name: str) -> None:
    assert (
        await code_of(raw.call(4, 3, v4.FetchSubscriptionsRequest(**{field: EVERYWHERE[name]})))
        == UCode.INVALID_ARGUMENT
    )
    assert await code_of(raw.call(4, 3, v4.FetchSubscriptionsRequest(**{field: uris.ANY}))) == UCode.OK
    assert await code_of(raw.call(4, 3, v4.FetchSubscriptionsRequest(**{field: bad("/20/1/1")}))) == UCode.OK
    await nothing_happened(world, raw)


OPERATIONS = [
    (major, name, method.resource) for major, codec in CODECS.items() for name, method in codec.methods.items()
]
# whose message may be empty
OPTIONAL = {(4, "register"), (4, "unregister"), (4, "fetch_subscriptions"), (3, "reset"), (4, "reset")}
GARBAGE = random.Random(7).randbytes(64 * 1024)


@pytest.mark.parametrize(("major", "name", "method"), OPERATIONS, ids=lambda value: str(value))
async def test_bad_payloads(world: Any, raw: Any, major: int, name: str, method: int) -> None:
    empty_code = (
        (UCode.PERMISSION_DENIED if name == "reset" else UCode.OK)
        if (major, name) in OPTIONAL
        else UCode.INVALID_ARGUMENT
    )
    assert await code_of(raw.call(major, method)) == empty_code
    if name == "register" and major == 4:
        await raw.call(4, 5)
    whole = UPayload.pack(v3.SubscriptionRequest(topic=GOOD)).data
    invalid = [
        UPayload(whole[:-3], PROTOBUF),  # truncated
        UPayload(b"{}", UPayloadFormat.UPAYLOAD_FORMAT_JSON),
        UPayload(b"text", UPayloadFormat.UPAYLOAD_FORMAT_TEXT),
        UPayload(whole, UPayloadFormat.UPAYLOAD_FORMAT_SOMEIP),
        UPayload.pack_to_any(GOOD),  # another message
        UPayload(GARBAGE, PROTOBUF),
        UPayload(GARBAGE, UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF_WRAPPED_IN_ANY),
    ]
    for payload in invalid:
        assert await code_of(raw.call(major, method, payload)) == UCode.INVALID_ARGUMENT, payload.format
    await nothing_happened(world, raw)


@pytest.mark.parametrize("major", [3, 4])
async def test_expiries_that_no_timestamp_has(world: Any, raw: Any, major: int) -> None:
    for seconds, nanos, code in (
        (-62_135_596_800, 0, UCode.OK),  # year 1: past, so it is answered UNSUBSCRIBED
        (-62_135_596_801, 0, UCode.INVALID_ARGUMENT),
        (253_402_300_800, 0, UCode.INVALID_ARGUMENT),
        (2**63 - 1, 0, UCode.INVALID_ARGUMENT),
        (-(2**63), 0, UCode.INVALID_ARGUMENT),
        (1, -1, UCode.INVALID_ARGUMENT),
        (1, 1_000_000_000, UCode.INVALID_ARGUMENT),
    ):
        request: Any = v4.SubscribeRequest(topic=GOOD) if major == 4 else v3.SubscriptionRequest(topic=GOOD)
        time = request.expiration if major == 4 else request.attributes.expire
        time.seconds, time.nanos = seconds, nanos
        assert await code_of(raw.call(major, 1, request)) == code
    await nothing_happened(world, raw)


@pytest.mark.parametrize("major", [3, 4])
async def test_the_year_9999_is_stored_as_given(world: Any, raw: Any, major: int) -> None:
    request: Any = v4.SubscribeRequest(topic=GOOD) if major == 4 else v3.SubscriptionRequest(topic=GOOD)
    time = request.expiration if major == 4 else request.attributes.expire
    time.seconds, time.nanos = 253_402_300_799, 999_000_000
    assert await code_of(raw.call(major, 1, request)) == UCode.OK
    (row,) = await world.services["dev1"].subscriptions()
    assert row.expires_ms == 253_402_300_799_999


@pytest.mark.parametrize(("major", "method"), [(3, 4), (3, 5), (3, 10), (4, 7), (4, 8), (4, 9), (5, 1), (2, 1)])
async def test_methods_and_versions_that_are_not_served_are_answered_at_once(
    world: Any, raw: Any, major: int, method: int
) -> None:
    call = raw.rpc.invoke_method(
        uris.uri("dev1", 0, major, method), UPayload.pack(GOOD), CallOptions(timeout_ms=60_000)
    )
    assert await code_of(call) == UCode.UNIMPLEMENTED
    await nothing_happened(world, raw)


async def test_another_entity_is_not_served(world: Any, raw: Any) -> None:
    for ue_id in (1, 0x10000):
        call = raw.rpc.invoke_method(uris.uri("dev1", ue_id, 4, 1), UPayload.pack(GOOD), CallOptions(timeout_ms=100))
        assert await code_of(call) == UCode.DEADLINE_EXCEEDED
    await nothing_happened(world, raw)


@pytest.mark.parametrize(
    "source", [None, bad("//dev1/FFFF/1/0"), bad("//*/10/1/0"), bad("//dev1/10/1/8001"), LONG], ids=str
)
async def test_requests_from_nobody_are_dropped(world: Any, raw: Any, source: UUri | None) -> None:
    whole = UMessageBuilder.request(raw.local.get_source(), uris.uri("dev1", 0, 4, 1), 1000).pack(
        v4.SubscribeRequest(topic=GOOD)
    )
    message = UMessage()
    message.CopyFrom(whole)
    message.attributes.ClearField("source")
    if source is not None:
        message.attributes.source.CopyFrom(source)
    world.networks["dev1"].inject(message)
    await nothing_happened(world, raw)


@pytest.mark.parametrize("offset", [1, 50_000, 2**32 - 1])
async def test_offsets_past_the_end_are_empty_and_ok(world: Any, raw: Any, offset: int) -> None:
    request = v3.FetchSubscribersRequest(topic=GOOD, offset=offset)
    response = (await raw.call(3, 8, request)).unpack(v3.FetchSubscribersResponse)
    assert (len(response.subscribers), response.has_more_records) == (0, False)
    await nothing_happened(world, raw)


async def test_v3_fetch_subscriptions_without_argument(world: Any, raw: Any) -> None:
    assert await code_of(raw.call(3, 3, v3.FetchSubscriptionsRequest(offset=1))) == UCode.INVALID_ARGUMENT
    await nothing_happened(world, raw)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(OPERATIONS),
    st.binary(max_size=300)
    | st.builds(lambda cut: UPayload.pack(v3.SubscriptionRequest(topic=GOOD)).data[cut:], st.integers(0, 20)),
    st.sampled_from(
        [PROTOBUF, UPayloadFormat.UPAYLOAD_FORMAT_UNSPECIFIED, UPayloadFormat.UPAYLOAD_FORMAT_PROTOBUF_WRAPPED_IN_ANY]
    ),
)
def test_raw_bytes_never_do_more_than_an_error(operation: tuple[int, str, int], data: bytes, format: Any) -> None:
    """The fuzz target, bounded: for any bytes the codecs return an event, or raise a documented UStatusError."""
    major, name, method = operation
    codec = CODECS[major]
    message = UMessageBuilder.request(
        uris.uri("dev1", 0x10, 1, 0), uris.uri("dev1", 0, major, method), 1000
    ).build_from_upayload(UPayload(data, format))
    assert uuids.is_v7(message.attributes.id)
    read = {
        "subscribe": codec.read_subscribe,
        "unsubscribe": codec.read_unsubscribe,
        "fetch_subscriptions": codec.read_fetch,
        "register": codec.read_registration,
        "unregister": codec.read_registration,
        "fetch_subscribers": CODECS[3].read_fetch_subscribers,
    }
    try:
        if name == "reset":
            codec.check_reset(message)
        else:
            read[name](message, "dev1")
    except UStatusError as error:
        refused = error.code
    else:
        return
    assert refused in (UCode.INVALID_ARGUMENT, UCode.PERMISSION_DENIED)


@pytest.mark.slow
@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.binary(max_size=120)), min_size=50, max_size=100))
def test_raw_bytes_at_the_rpc_entry_leave_the_service_alive(tmp_path_factory: Any, requests: list[Any]) -> None:
    """The same with the whole service: each request gets an answer of a documented code, and the service continues."""

    async def feed() -> None:
        network = LocalNetwork()
        own, caller = LocalUriProvider("dev1", 0, 4), LocalUriProvider("dev1", 0x10, 1)
        async with LocalTransport.on(network, own) as below, LocalTransport.on(network, caller) as above:
            service = USubscriptionService(below, "dev1", tmp_path_factory.mktemp("fuzz") / "store.db")
            await service.start()
            async with InMemoryRpcClient(above, caller) as rpc:
                for (major, _, method), data in requests:
                    call = rpc.invoke_method(
                        uris.uri("dev1", 0, major, method), UPayload(data, PROTOBUF), CallOptions(timeout_ms=20_000)
                    )
                    assert await code_of(call) in (UCode.OK, UCode.INVALID_ARGUMENT, UCode.PERMISSION_DENIED)
                await rpc.invoke_method(uris.uri("dev1", 0, 4, 1), UPayload.pack(v4.SubscribeRequest(topic=GOOD)))
            await service.stop()

    asyncio.run(feed())
