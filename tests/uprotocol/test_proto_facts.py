"""The wire: every number, type, presence and reserved number of the specification's messages, as one table.

entry = "[reserved N;] NUMBER TYPE[flag] NAME; ..."      ? explicit presence, * repeated, | in a oneof
        enums: NUMBER NAME [option]
"""

from __future__ import annotations

from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from uprotocol import uoptions_pb2 as options
from uprotocol.core.ustreamer.v1 import ustreamer_pb2
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3_pb2
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4_pb2
from uprotocol.v1 import file_pb2, uattributes_pb2, ucode_pb2, umessage_pb2, uri_pb2, ustatus_pb2, uuid_pb2

spec = pytest.mark.spec

V1: dict[str, str] = {
    "UUri": "1 string authority_name; 2 uint32 ue_id; 3 uint32 ue_version_major; 4 uint32 resource_id",
    "UUriBatch": "1 UUri* uris",
    "UUID": "1 fixed64 msb; 2 fixed64 lsb",
    "UAttributes": (
        "1 UUID id; 2 UMessageType type; 3 UUri source; 4 UUri sink; 5 UPriority priority; 6 uint32? ttl; "
        "7 uint32? permission_level; 8 UCode? commstatus; 9 UUID reqid; 10 string? token; 11 string? traceparent; "
        "12 UPayloadFormat payload_format"
    ),
    "UMessageType": (
        "0 UMESSAGE_TYPE_UNSPECIFIED; 1 UMESSAGE_TYPE_PUBLISH up-pub.v1; 2 UMESSAGE_TYPE_REQUEST up-req.v1; "
        "3 UMESSAGE_TYPE_RESPONSE up-res.v1; 4 UMESSAGE_TYPE_NOTIFICATION up-not.v1"
    ),
    "UPriority": (
        "0 UPRIORITY_UNSPECIFIED; 1 UPRIORITY_CS0 CS0; 2 UPRIORITY_CS1 CS1; 3 UPRIORITY_CS2 CS2; 4 UPRIORITY_CS3 CS3; "
        "5 UPRIORITY_CS4 CS4; 6 UPRIORITY_CS5 CS5; 7 UPRIORITY_CS6 CS6"
    ),
    "UPayloadFormat": (
        "0 UPAYLOAD_FORMAT_UNSPECIFIED; 1 UPAYLOAD_FORMAT_PROTOBUF_WRAPPED_IN_ANY application/x-protobuf; "
        "2 UPAYLOAD_FORMAT_PROTOBUF application/protobuf; 3 UPAYLOAD_FORMAT_JSON application/json; "
        "4 UPAYLOAD_FORMAT_SOMEIP application/x-someip; 5 UPAYLOAD_FORMAT_SOMEIP_TLV application/x-someip_tlv; "
        "6 UPAYLOAD_FORMAT_RAW application/octet-stream; 7 UPAYLOAD_FORMAT_TEXT text/plain; "
        "8 UPAYLOAD_FORMAT_SHM application/x-shm"
    ),
    "UCode": (
        "0 OK; 1 CANCELLED; 2 UNKNOWN; 3 INVALID_ARGUMENT; 4 DEADLINE_EXCEEDED; 5 NOT_FOUND; 6 ALREADY_EXISTS; "
        "7 PERMISSION_DENIED; 8 RESOURCE_EXHAUSTED; 9 FAILED_PRECONDITION; 10 ABORTED; 11 OUT_OF_RANGE; "
        "12 UNIMPLEMENTED; 13 INTERNAL; 14 UNAVAILABLE; 15 DATA_LOSS; 16 UNAUTHENTICATED"
    ),
    "UStatus": "1 UCode code; 2 string? message; 3 Any* details",
    "UMessage": "1 UAttributes attributes; 2 bytes? payload",
    "File": "1 string name; 2 uint64? size; 3 Checksum checksum",
    "FileBatch": "1 File* files",
    "Checksum": "1 ChecksumType type; 2 bytes value",
    "ChecksumType": "0 CHECKSUM_TYPE_UNSPECIFIED; 1 CHECKSUM_TYPE_MD5; 2 CHECKSUM_TYPE_SHA1",
}

UOPTIONS: dict[str, str] = {
    "UServiceTopic": "1 uint32 id; 2 string name; 3 string message; 4 string* resources; 5 uint32? permission_level",
}

V3: dict[str, str] = {
    "SubscribeAttributes": "1 Timestamp expire; 2 Any* details; 3 uint32? sample_period_ms",
    "SubscriberInfo": "1 UUri uri; 2 Any* details",
    "SubscriptionStatus": "reserved 2; 1 State state; 3 string message",
    "SubscriptionStatus.State": "0 UNSUBSCRIBED; 1 SUBSCRIBE_PENDING; 2 SUBSCRIBED; 3 UNSUBSCRIBE_PENDING",
    "EventDeliveryConfig": "1 string id; 2 string type; 3 map<string, Any> attributes",
    "SubscriptionRequest": "1 UUri topic; 2 SubscriberInfo subscriber; 3 SubscribeAttributes attributes",
    "SubscriptionResponse": "1 SubscriptionStatus status; 2 EventDeliveryConfig config; 3 UUri topic",
    "UnsubscribeRequest": "1 UUri topic; 2 SubscriberInfo subscriber",
    "UnsubscribeResponse": "",
    "FetchSubscribersRequest": "1 UUri topic; 2 uint32? offset",
    "FetchSubscribersResponse": "reserved 3; 1 SubscriberInfo* subscribers; 2 bool? has_more_records",
    "Subscription": (
        "1 UUri topic; 2 SubscriberInfo subscriber; 3 SubscriptionStatus status; 4 SubscribeAttributes attributes; "
        "5 EventDeliveryConfig config"
    ),
    "FetchSubscriptionsRequest": "1 UUri| topic; 2 SubscriberInfo| subscriber; 3 uint32? offset",
    "FetchSubscriptionsResponse": "1 Subscription* subscriptions; 2 bool? has_more_records",
    "NotificationsRequest": "1 UUri topic; 2 SubscriberInfo subscriber",
    "NotificationsResponse": "",
    "Update": "1 UUri topic; 2 SubscriberInfo subscriber; 3 SubscriptionStatus status; 4 SubscribeAttributes "
    "attributes",
    "Update.Resources": "0 subscriptions",
    "PassiveMode": "1 bool enable",
    "ResetRequest": "1 Reason? reason; 2 Timestamp? before",
    "ResetRequest.Reason": "1 Code code; 2 string? message",
    "ResetRequest.Reason.Code": "0 UNSPECIFIED; 1 FACTORY_RESET; 2 CORRUPTED_DATA",
    "ResetResponse": "",
}

V4: dict[str, str] = {
    "SubscriptionStatus": (
        "0 STATUS_UNSPECIFIED; 1 STATUS_UNSUBSCRIBED; 2 STATUS_SUBSCRIBE_PENDING; 3 STATUS_SUBSCRIBED; 4 "
        "STATUS_UNSUBSCRIBE_PENDING"
    ),
    "Subscription": "1 UUri topic; 2 UUri subscriber; 3 SubscriptionStatus status; 4 Timestamp? expiration; 5 uint32? "
    "sample_period",
    "SubscribeRequest": "1 UUri topic; 2 Timestamp? expiration; 3 uint32? sample_period",
    "SubscribeResponse": "1 UUri topic; 2 SubscriptionStatus status",
    "UnsubscribeRequest": "1 UUri topic",
    "UnsubscribeResponse": "",
    "FetchSubscriptionsRequest": "1 UUri? topic_filter; 2 UUri? subscriber_filter",
    "FetchSubscriptionsResponse": "1 Subscription* subscriptions",
    "NotificationsRequest": "",
    "NotificationsResponse": "",
    "ResetRequest": "",
    "ResetResponse": "",
}

OPTIONS: dict[str, tuple[int, str, str]] = {  # name -> number, type, what it extends
    "file_someip": (51000, "bool", "FileOptions"),
    "service_id": (51100, "uint32", "ServiceOptions"),
    "service_name": (51101, "string", "ServiceOptions"),
    "service_version_major": (51102, "uint32", "ServiceOptions"),
    "service_version_minor": (51103, "uint32", "ServiceOptions"),
    "service_permission_level": (51104, "uint32", "ServiceOptions"),
    "publish_topic": (51105, "UServiceTopic*", "ServiceOptions"),
    "notification_topic": (51106, "UServiceTopic*", "ServiceOptions"),
    "service_someip": (51107, "bool", "ServiceOptions"),
    "method_id": (51200, "uint32", "MethodOptions"),
    "method_permission_level": (51201, "uint32", "MethodOptions"),
    "message_someip": (51300, "bool", "MessageOptions"),
    "message_size": (51301, "uint32", "MessageOptions"),
    "field_size": (51400, "uint32", "FieldOptions"),
    "field_key_size": (51401, "uint32", "FieldOptions"),
    "field_count": (51402, "uint32", "FieldOptions"),
    "enum_size": (51500, "uint32", "EnumOptions"),
    "enum_someip": (51501, "bool", "EnumOptions"),
    "mime_type": (51600, "string", "EnumValueOptions"),
    "ce_name": (51601, "string", "EnumValueOptions"),
}

METHODS: dict[str, dict[str, tuple[int, str, str]]] = {  # service -> method -> id, request, response
    "uSubscription": {
        "Subscribe": (1, "SubscriptionRequest", "SubscriptionResponse"),
        "Unsubscribe": (2, "UnsubscribeRequest", "UnsubscribeResponse"),
        "FetchSubscriptions": (3, "FetchSubscriptionsRequest", "FetchSubscriptionsResponse"),
        "RegisterForNotifications": (6, "NotificationsRequest", "NotificationsResponse"),
        "UnregisterForNotifications": (7, "NotificationsRequest", "NotificationsResponse"),
        "FetchSubscribers": (8, "FetchSubscribersRequest", "FetchSubscribersResponse"),
        "Reset": (9, "ResetRequest", "ResetResponse"),
    }
}

_TYPES = {
    getattr(FieldDescriptor, f"TYPE_{name.upper()}"): name
    for name in ("bool", "bytes", "fixed64", "int32", "int64", "string", "uint32", "uint64")
}


def _type(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name
            return f"map<{_type(entry['key'])}, {_type(entry['value'])}>"
        return field.message_type.name
    return field.enum_type.name if field.enum_type is not None else _TYPES[field.type]


def _flag(field: FieldDescriptor) -> str:
    if field.is_repeated:
        return "" if field.message_type is not None and field.message_type.GetOptions().map_entry else "*"
    if field.containing_oneof is None:
        return ""
    return "?" if field.containing_oneof.name == f"_{field.name}" else "|"


def _describe(descriptor: Descriptor) -> str:
    proto = descriptor_pb2.DescriptorProto()
    descriptor.CopyToProto(proto)
    assert not proto.reserved_name
    numbers = [str(number) for span in proto.reserved_range for number in range(span.start, span.end)]
    fields = [
        f"{field.number} {_type(field)}{_flag(field)} {field.name}"
        for field in sorted(descriptor.fields, key=lambda f: f.number)
    ]
    return "; ".join([f"reserved {','.join(numbers)}"] * bool(numbers) + fields)


def _describe_enum(descriptor: EnumDescriptor) -> str:
    texts = []
    for value in descriptor.values:
        of_value = value.GetOptions().Extensions
        option = of_value[options.ce_name] or of_value[options.mime_type]
        texts.append((value.number, f"{value.number} {value.name}{f' {option}' if option else ''}"))
    return "; ".join(text for _, text in sorted(texts))


def _everything(*modules: ModuleType) -> dict[str, str]:
    """Every message and enum of `modules`; nested ones with the name of the outer message."""
    found = {}
    for module in modules:
        todo = list(module.DESCRIPTOR.message_types_by_name.values())
        enums = list(module.DESCRIPTOR.enum_types_by_name.values())
        while todo:
            one = todo.pop()
            found[one.full_name] = _describe(one)
            todo += [nested for nested in one.nested_types if not nested.GetOptions().map_entry]
            enums += one.enum_types
        found |= {enum.full_name: _describe_enum(enum) for enum in enums}
    return found


def _named(package: str, table: dict[str, str]) -> dict[str, str]:
    return {f"{package}.{name}": text for name, text in table.items()}


@spec("req~uri-data-model-proto~1")
@spec("req~uuid-proto~1")
@spec("req~umessage-data-model-proto~1")
@spec("req~uattributes-data-model-proto~1")
@spec("req~ustatus-data-model-proto~1")
def test_every_field_of_v1_has_its_number_and_type() -> None:
    modules = (file_pb2, uattributes_pb2, ucode_pb2, umessage_pb2, uri_pb2, ustatus_pb2, uuid_pb2)
    assert _everything(*modules) == _named("uprotocol.v1", V1)


@spec("dsn~usubscription-subscribe-protobuf~1", doc="v3")
@spec("dsn~usubscription-unsubscribe-protobuf~1", doc="v3")
@spec("dsn~usubscription-fetch-subscribers-protobuf~1", doc="v3")
@spec("dsn~usubscription-fetch-subscriptions-protobuf~1", doc="v3-seed")
@spec("dsn~usubscription-register-notifications-protobuf~1", doc="v3")
@spec("dsn~usubscription-unregister-notifications-protobuf~1", doc="v3")
@spec("dsn~usubscription-reset-protobuf~1", doc="v3-seed")
def test_usubscription_3_is_the_superset_that_old_and_new_peers_parse() -> None:
    assert _everything(v3_pb2) == _named("uprotocol.core.usubscription.v3", V3)


@spec("req~usubscription-subscribe-request-signature~1", doc="v4")
@spec("req~usubscription-subscribe-response-signature~1", doc="v4")
@spec("req~usubscription-unsubscribe-request-signature~1", doc="v4")
@spec("req~usubscription-unsubscribe-response-signature~1", doc="v4")
@spec("req~usubscription-fetch-subscriptions-request-signature~1", doc="v4")
@spec("req~usubscription-fetch-subscriptions-response-signature~1", doc="v4")
@spec("req~usubscription-register-notifications-request-signature~1", doc="v4")
@spec("req~usubscription-register-notifications-response-signature~1", doc="v4")
@spec("req~usubscription-unregister-notifications-request-signature~1", doc="v4")
@spec("req~usubscription-unregister-notifications-response-signature~1", doc="v4")
@spec("req~usubscription-reset-request-signature~1", doc="v4")
@spec("req~usubscription-reset-response-signature~1", doc="v4")
@spec("dsn~usubscription-subscription-expiration-datatype~1", doc="v4")
@spec("dsn~usubscription-sample-period-datatype~1", doc="v4")
def test_usubscription_4_has_its_own_numbers() -> None:
    assert _everything(v4_pb2) == _named("uprotocol.core.usubscription.v4", V4)


def test_every_option_has_its_number() -> None:
    found = {
        name: (field.number, f"{_type(field)}{'*' if field.is_repeated else ''}", field.containing_type.name)
        for name, field in options.DESCRIPTOR.extensions_by_name.items()
    }
    assert found == OPTIONS
    assert _everything(options) == _named("uprotocol", UOPTIONS)


def test_the_methods_of_usubscription_3_have_their_ids() -> None:
    service = v3_pb2.DESCRIPTOR.services_by_name["uSubscription"]
    found = {
        method.name: (
            method.GetOptions().Extensions[options.method_id],
            method.input_type.name,
            method.output_type.name,
        )
        for method in service.methods
    }
    assert found == METHODS["uSubscription"]


def _identity(module: ModuleType) -> tuple[str, int, int, int]:
    (service,) = module.DESCRIPTOR.services_by_name.values()
    of_service = service.GetOptions().Extensions
    return (
        of_service[options.service_name],
        of_service[options.service_id],
        of_service[options.service_version_major],
        of_service[options.service_version_minor],
    )


@spec("req~usubscription-service_name~1", doc="v4")
def test_the_core_services_have_their_identity() -> None:
    assert _identity(v3_pb2) == ("core.usubscription", 0, 3, 0)
    assert _identity(ustreamer_pb2) == ("core.ustreamer", 4, 1, 0)
    assert v4_pb2.DESCRIPTOR.package == "uprotocol.core.usubscription.v4", (
        "it declares no service: what bears the name is its package"
    )
    (topic,) = v3_pb2.DESCRIPTOR.services_by_name["uSubscription"].GetOptions().Extensions[options.notification_topic]
    assert (topic.id, topic.name, topic.message) == (0x8000, "SubscriptionChange", "Update")


def test_unknown_enum_numbers_survive() -> None:
    attributes = uattributes_pb2.UAttributes.FromString(bytes.fromhex("28636063"))  # priority 99, payload_format 99
    assert (attributes.priority, attributes.payload_format) == (99, 99)
    assert attributes.SerializeToString() == bytes.fromhex("28636063")
