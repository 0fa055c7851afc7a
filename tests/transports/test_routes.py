"""Which filters match which addresses: as the specification's rule says, and cheap with any number of filters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transports import listeners
from transports.listeners import Filter, ListenerTable, Routes
from uprotocol import attributes as attrs
from uprotocol import cache
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError
from uprotocol.transport import EncodedListener
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

LOCAL = "here"

authorities = st.sampled_from(["", LOCAL, "there", "elsewhere"])
entities = st.sampled_from([0x8001, 0x10_8001, 0x8002])
versions = st.sampled_from([1, 2])


def addresses(resources: st.SearchStrategy[int]) -> st.SearchStrategy[UUri]:
    return st.builds(uris.uri, authorities, entities, versions, resources)


def patterns(resources: st.SearchStrategy[int]) -> st.SearchStrategy[UUri]:
    wild_entities = st.sampled_from([0xFFFF_8001, 0x10_FFFF, 0xFFFF_FFFF])
    return st.builds(
        uris.uri, authorities | st.just("*"), entities | wild_entities, versions | st.just(0xFF), resources
    )


topics = st.sampled_from([0x8001, 0x8002])
replies, wild = st.just(0), st.just(0xFFFF)
filters = st.one_of(
    st.tuples(patterns(topics | wild), st.none()),
    st.tuples(patterns(topics), patterns(replies)),
    st.tuples(patterns(wild), patterns(wild | replies)),
)
sent = st.one_of(
    st.builds(UMessageBuilder.publish, addresses(topics)),
    st.builds(UMessageBuilder.notification, addresses(topics), addresses(replies)),
).map(lambda builder: builder.build())
steps = st.one_of(
    st.tuples(st.just("add"), filters), st.tuples(st.just("remove"), filters), st.tuples(st.just(""), sent)
)


class Hears(EncodedListener):
    def __init__(self) -> None:
        self.heard: list[EncodedMessage] = []

    def on_receive_encoded(self, messages: Any) -> None:
        self.heard += messages


@pytest.mark.spec("dsn~uri-pattern-matching~2")
@given(st.lists(steps, max_size=40), st.sampled_from([1, 3, 1_000]))
def test_whatever_was_seen_before_a_message_reaches_the_filters_that_match(steps: list[Any], routes_max: int) -> None:
    """Filters come and go between messages whose routes are known, or were known and had to make room."""
    table = ListenerTable(LOCAL)
    known: dict[Any, tuple[Filter, Hears]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "streams_max", routes_max)
        patch.setattr(listeners, "RENEWED_MAX", routes_max)
        for what, subject in steps:
            match what:
                case "add":
                    filter = Filter.of(*subject, LOCAL)
                    if filter.key not in known:
                        known[filter.key] = (filter, Hears())
                        assert table.add(*subject, known[filter.key][1]) is not None
                case "remove":
                    filter = Filter.of(*subject, LOCAL)
                    if (pair := known.pop(filter.key, None)) is not None:
                        assert table.remove(*subject, pair[1]) is not None
                case _:
                    _heard_by_those_that_match(table, known, subject)


def _heard_by_those_that_match(table: ListenerTable, known: dict[Any, Any], message: UMessage) -> None:
    attributes = message.attributes
    source = uris.with_authority(attributes.source, LOCAL)
    sink = uris.with_authority(attributes.sink, LOCAL) if attributes.HasField("sink") else None
    matching = [hears for filter, hears in known.values() if filter.matches(source, sink)]
    assert table.wants(message) == bool(matching)
    for deliver in (
        lambda: table.deliver([message]),
        lambda: table.deliver_encoded([(None, message.payload, attributes.SerializeToString())]),
    ):
        for _, hears in known.values():
            hears.heard.clear()
        deliver()
        assert [len(hears.heard) for _, hears in known.values()] == [
            int(hears in matching) for _, hears in known.values()
        ]


def routed(made: Routes, source: UUri) -> Any:
    route = made.of(UMessageBuilder.publish(source).build().attributes)
    assert route is not None
    return route


def topic(number: int, authority: str = "there") -> UUri:
    return uris.uri(authority, 0x8001 + (number >> 12), 1, 0x8000 + number % 4096)


class Nobody:
    def on_receive(self, message: UMessage) -> None: ...


def test_the_first_sight_of_a_topic_looks_at_no_other_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    made, nobody = Routes(LOCAL, lambda: None), Nobody()
    for number in range(5_000):
        made.put(Filter.of(topic(number), None), [nobody])
    looked: list[Any] = []
    monkeypatch.setattr(uris, "matches", lambda *each: looked.append(each))
    masks: list[Any] = []
    masked = uris.masked
    monkeypatch.setattr(uris, "masked", lambda *each: masks.append(each) or masked(*each))
    assert [listeners for _, listeners in routed(made, topic(77)).found] == [[nobody]]
    assert not looked
    assert len(masks) == 1, "there is one shape"


def test_one_filter_more_leaves_the_routes_of_others_alone() -> None:
    rebuilds: list[int] = []
    made, nobody = Routes(LOCAL, lambda: rebuilds.append(1)), Nobody()
    known = {number: routed(made, topic(number)) for number in range(2_000)}
    looks = made.looks
    made.put(Filter.of(topic(7), None), [nobody])
    assert made.looks == looks + 1
    assert known[7].found
    made.put(Filter.of(topic(7), None), [])
    assert made.looks == looks + 2
    assert not known[7].found
    made.put(Filter.of(topic(9_999), None), [nobody])
    made.put(Filter.of(uris.uri("elsewhere", 0xFFFF_8001, 1, 0x8001), None), [nobody])
    assert made.looks == looks + 2, "no route that is known is of these"
    assert all(routed(made, topic(number)) is route for number, route in known.items())
    assert not rebuilds


def test_a_filter_that_matches_very_many_routes_rebuilds_all_when_they_are_read() -> None:
    rebuilds: list[int] = []
    made = Routes(LOCAL, lambda: rebuilds.append(1))
    for number in range(listeners.RENEWED_MAX + 1):
        routed(made, topic(number))
    looks = made.looks
    made.put(Filter.of(uris.pattern("there"), None), [Nobody()])
    assert (made.looks, rebuilds) == (looks, [1])
    assert routed(made, topic(3)).found


def test_routes_that_have_the_same_filters_share_what_is_known_of_them() -> None:
    made = Routes(LOCAL, lambda: None)
    made.put(Filter.of(uris.pattern("there"), None), [Nobody()])
    assert len({id(routed(made, topic(number)).by_filter) for number in range(100)}) == 1


def test_addresses_with_very_much_that_nobody_knows_are_none() -> None:
    """Else each of them would be kept for a while in a dozen places."""
    made = Routes(LOCAL, lambda: None)
    message = UMessageBuilder.publish(topic(1)).build()
    long = message.attributes.source.SerializeToString() + b"\xfa\x01\x80\x10" + bytes(2_048)
    attributes = UAttributes.FromString(message.attributes.SerializeToString())
    attributes.source.ParseFromString(long)
    assert made.of(attributes) is None
    assert made.of(message.attributes) is not None
    with pytest.raises(UStatusError):
        attrs.validate_route(attributes.type, None, None)
