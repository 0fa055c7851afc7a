"""The mapping, without a server."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from up_transport_nats import mapping

from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError
from uprotocol.v1.umessage_pb2 import UMessage

authorities = st.from_regex(r"[a-z0-9\-._~]{1,128}", fullmatch=True)
TOPIC = uris.uri("vehicle.1", 0x0003_8001, 1, 0x8000)


@given(authorities)
def test_an_authority_is_one_token_that_can_be_read_back(authority: str) -> None:
    token = mapping.escape(authority)
    assert not set(token) & set(".*> \t\r\n")
    assert mapping.unescape(token) == authority


@given(st.text(alphabet="%2E5.", max_size=12))
def test_escaping_is_exact_whatever_looks_escaped(text: str) -> None:
    assert mapping.unescape(mapping.escape(text)) == text


def test_the_subject_of_a_message() -> None:
    publish = UMessageBuilder.publish(TOPIC).build()
    assert mapping.route(publish, "here") == "vehicle%2E1.8001.3.1.8000.-.-.-.-.-"
    request = UMessageBuilder.request(uris.uri("", 1, 1, 0), uris.uri("cloud", 0xABCD, 2, 0x17), 1_000).build()
    assert mapping.route(request, "here") == "here.1.0.1.0.cloud.ABCD.0.2.17"


@given(authorities, authorities)
def test_an_address_is_the_subject_of_its_messages_and_short_enough_for_a_name(one: str, other: str) -> None:
    """1,024 characters, with the name of the network, which has 64."""
    source, sink = uris.uri(one, 0xFFFE_FFFE, 0xFE, 0x8000), uris.uri(other, 0xFFFE_FFFE, 0xFE, 0)
    notification = UMessageBuilder.notification(source, sink).build()
    publish = UMessageBuilder.publish(source).build()
    assert mapping.address_route(source, sink, "here") == mapping.route(notification, "here")
    assert mapping.address_route(source, None, "here") == mapping.route(publish, "here")
    assert len(mapping.address_route(source, sink, "here")) <= 1_024 - 65


def test_a_streamers_sink_stands_in_a_subject_as_it_is() -> None:
    assert mapping.address(uris.pattern("cloud"), "here") == "cloud.FFFF.FFFF.FF.FFFF"


@pytest.mark.parametrize(
    ("source", "sink", "subject"),
    [
        (TOPIC, None, "vehicle%2E1.8001.3.1.8000.-.-.-.-.-"),
        (uris.ANY, None, "*.*.*.*.*.-.-.-.-.-"),
        (uris.ANY, uris.pattern("cloud"), "*.*.*.*.*.cloud.*.*.*.*"),
        (uris.uri("a", 0xFFFF, 1, 0x8000), uris.uri("", 1, 1, 0), "a.*.0.1.8000.here.1.0.1.0"),
    ],
)
def test_the_subject_of_a_filter(source: uris.UUri, sink: uris.UUri | None, subject: str) -> None:
    assert mapping.filter_route(source, sink, "here") == subject


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=20))
def test_messages_behind_one_another_are_read_back(payloads: list[bytes]) -> None:
    messages = [UMessage(payload=payload) for payload in payloads]
    assert mapping.unpack(b"".join(map(mapping.pack, messages))) == messages


@given(st.binary(max_size=200))
def test_nothing_but_an_error_of_ours_comes_of_other_bytes(payload: bytes) -> None:
    with contextlib.suppress(UStatusError):
        mapping.unpack(payload)


def test_authorities_are_completed_and_messages_of_other_routes_left_out() -> None:
    given = UMessageBuilder.notification(uris.uri("", 1, 1, 0x8000), uris.uri("", 2, 1, 0)).build()
    other = UMessageBuilder.notification(uris.uri("mallory", 1, 1, 0x8000), uris.uri("", 2, 1, 0)).build()
    (one,) = mapping.complete([given, other], mapping.route(given, "vehicle.1"))
    assert one.attributes.source.authority_name == one.attributes.sink.authority_name == "vehicle.1"
