"""Payloads of services that the command line knows: requests from JSON, responses and messages to JSON."""

from __future__ import annotations

import json

import pytest

from streamer.commands import client
from streamer.operating import known
from uprotocol import uri as uris
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1 import ustreamer_pb2 as us
from uprotocol.core.usubscription import wire
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError

TOPIC = uris.parse("//vehicle1/8001/1/8001")
AS_OBJECT = {"authority_name": "vehicle1", "ue_id": 0x8001, "ue_version_major": 1, "resource_id": 0x8001}


@pytest.mark.parametrize(
    ("method", "request_type", "answer_type"),
    [
        (wire.service("v", 3, 1), v3.SubscriptionRequest, v3.SubscriptionResponse),
        (wire.service("v", 3, 8), v3.FetchSubscribersRequest, v3.FetchSubscribersResponse),
        (wire.service("v", 4, 3), v4.FetchSubscriptionsRequest, v4.FetchSubscriptionsResponse),
        (ids.at("v", ids.DESCRIBE), us.DescribeRequest, us.DescribeResponse),
        (ids.at("v", ids.PAUSE), us.PauseRequest, us.PauseResponse),
        (ids.of_publisher(TOPIC, ids.POLL), us.PollRequest, us.PollResponse),
    ],
)
def test_methods(method: uris.UUri, request_type: type, answer_type: type) -> None:
    found = known.method(method)
    assert found is not None
    assert (found.request, found.answer) == (request_type, answer_type)


@pytest.mark.parametrize("text", ["//v/8001/1/1", "//v/4/2/1", "//v/4/1/63", "//v/0/5/1"])
def test_others_are_unknown(text: str) -> None:
    assert known.method(uris.parse(text)) is None


@pytest.mark.parametrize("topic", ["//vehicle1/8001/1/8001", AS_OBJECT])
def test_a_uri_in_a_request_is_a_text_or_an_object(topic: object) -> None:
    payload = known.encode(json.dumps({"topic": topic, "peer": "cloud"}), us.PauseRequest)
    assert payload.unpack(us.PauseRequest) == us.PauseRequest(topic=TOPIC, peer="cloud")
    payload = known.encode(json.dumps({"topics": [topic, topic]}), us.PollRequest)
    assert list(payload.unpack(us.PollRequest).topics) == [TOPIC, TOPIC]


@pytest.mark.parametrize("text", ["[]", "1", '{"topik": 1}', '{"topic": 1}', '{"topic": "x"}', '{"peer": 1}'])
def test_what_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(UStatusError, match=r"topic|up://"):
        known.encode(text, us.PauseRequest)


def test_messages_of_known_topics_are_printed_as_json() -> None:
    change = v4.Subscription(topic=TOPIC, status=v4.SubscriptionStatus.STATUS_SUBSCRIBED)
    message = UMessageBuilder.publish(wire.service("vehicle1", 4)).build_from_upayload(UPayload.pack(change))
    assert client.as_dict(message)["payload"] == {"topic": AS_OBJECT, "status": "STATUS_SUBSCRIBED"}
    gap = us.GapNotice(gap=us.Gap(after_seq=3))
    message = UMessageBuilder.publish(ids.at("vehicle1", ids.GAPS)).build_from_upayload(UPayload.pack(gap))
    assert client.as_dict(message)["payload"] == {"gap": {"after_seq": "3"}}


def test_what_is_not_of_the_expected_type_is_shown_as_anything_else() -> None:
    assert client.payload_value(UPayload(b"\xff\xff", UPayload.pack(us.Gap()).format), us.Gap) == "ffff"
