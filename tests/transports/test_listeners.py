"""The listener table and the stamp: what the conformance suite can't see from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from transports.base import SendChecks, stopped
from transports.conformance.messages import notification, publish, reply, topic
from transports.conformance.sending import INVALID, every_combination, expired
from transports.conformance.sinks import Sink
from transports.listeners import Filter, ListenerTable
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.encoded import EncodedMessage, decoded, is_shared, suffix
from uprotocol.status import OK, UStatusError
from uprotocol.transport import EncodedListener
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus


class Waiting:
    """Each call answers an awaitable that the test completes."""

    def __init__(self) -> None:
        self.batches: list[list[UMessage]] = []
        self.taken: list[asyncio.Future[None]] = []

    def on_receive(self, message: UMessage) -> Awaitable[None]:
        return self.on_receive_batch([message])

    def on_receive_batch(self, messages: Sequence[UMessage]) -> Awaitable[None]:
        self.batches.append(list(messages))
        self.taken.append(asyncio.get_running_loop().create_future())
        return self.taken[-1]


def wired(filter: Filter, message: UMessage) -> tuple[Filter, bytes, bytes]:
    """As a network brings it."""
    return filter, message.payload, message.attributes.SerializeToString()


class Raw(EncodedListener):
    """A listener that takes messages as they came."""

    def __init__(self) -> None:
        self.messages: list[EncodedMessage] = []

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages]

    def on_receive_encoded(self, messages: Sequence[EncodedMessage]) -> None:
        self.messages += messages


def test_a_hundred_thousand_subscriptions_fit_beside_what_a_streamer_listens_to_by_itself() -> None:
    table, listener = ListenerTable("gateway"), Raw()
    for number in range(100_000):
        table.add(uris.uri("vehicle", 0x1000 + number // 1_000, 1, 0x8000 + number % 1_000), None, listener)
    for number in range(1_000):
        table.add(uris.pattern(f"other{number}"), uris.uri("gateway", 0x20, 1, 0), listener)
    assert len(table.filters) == 101_000


def test_a_listener_is_called_once_for_a_batch() -> None:
    table, heard = ListenerTable("beta"), Sink(1)
    assert table.add(topic(), reply(), heard) is not None
    assert table.add(uris.ANY, reply(), heard) is not None
    assert table.deliver([notification(b"1"), notification(b"2")]) is None
    assert heard.payloads == [b"1", b"2"], "two filters, one delivery"


async def test_delivery_is_complete_when_every_listener_has_taken_its_share() -> None:
    table, first, second = ListenerTable("beta"), Waiting(), Waiting()
    table.add(topic(), reply(), first)
    table.add(topic(), reply(), second)
    pending = table.deliver([notification(b"1")])
    assert pending is not None
    task = asyncio.ensure_future(pending)
    first.taken[0].set_result(None)
    await asyncio.sleep(0)
    assert not task.done()
    second.taken[0].set_result(None)
    await task


async def test_delivery_fails_if_one_listener_fails() -> None:
    table, first, second = ListenerTable("beta"), Waiting(), Waiting()
    table.add(topic(), reply(), first)
    table.add(topic(), reply(), second)
    pending = table.deliver([notification(b"1")])
    first.taken[0].set_result(None)
    second.taken[0].set_exception(RuntimeError("not stored"))
    with pytest.raises(RuntimeError):
        await pending  # type: ignore[misc]


def test_encoded_delivery_reaches_the_listeners_of_its_filter_only() -> None:
    table, narrow, wide = ListenerTable("beta"), Sink(1), Sink(1)
    first, second = table.add(topic(), reply(), narrow), table.add(uris.ANY, reply(), wide)
    assert first is not None
    assert second is not None
    for number in range(3):  # the first fills the cache
        table.deliver_encoded([wired(second, notification(b"%d" % number))])
    assert (narrow.payloads, wide.payloads) == ([], [b"0", b"1", b"2"])
    table.deliver_encoded([wired(first, publish())])
    assert narrow.payloads == [], "a filter of another shape than the message"


def test_encoded_delivery_without_filter_reaches_every_listener_once() -> None:
    table, one, two = ListenerTable("beta"), Sink(1), Sink(1)
    table.add(topic(), reply(), one)
    table.add(uris.ANY, reply(), one)
    table.add(uris.ANY, reply(), two)
    for number in range(2):  # the first fills the cache
        _, payload, encoded = wired(table.filters[0], notification(b"%d" % number))
        table.deliver_encoded([(None, payload, encoded), (None, payload, encoded)])
    assert one.payloads == two.payloads == [b"0", b"0", b"1", b"1"], "twice from the network is twice"


def test_registrations_made_later_count_for_known_stamps() -> None:
    table, early, late = ListenerTable("beta"), Sink(1), Sink(1)
    filter = table.add(topic(), reply(), early)
    assert filter is not None
    one, two, three = notification(b"1"), notification(b"2"), notification(b"3")
    table.deliver_encoded([wired(filter, one)])
    assert table.add(topic(), reply(), late) is None
    table.deliver_encoded([wired(filter, two)])
    table.remove(topic(), reply(), early)
    table.deliver_encoded([wired(filter, three)])
    assert (early.payloads, late.payloads) == ([b"1", b"2"], [b"2", b"3"])


@pytest.mark.parametrize(
    "what", [name for name in INVALID if name not in ("format without payload", "bad traceparent")]
)
def test_what_is_invalid_is_counted_however_it_comes(what: str) -> None:
    table, heard = ListenerTable("beta"), Sink(1)
    table.add(uris.ANY, uris.ANY, heard)
    for _ in range(2):
        table.deliver([INVALID[what]()])
        table.deliver_encoded([wired(table.filters[0], INVALID[what]())])
    assert heard.messages == []
    assert table.dropped == {"invalid": 4}


@pytest.mark.spec("dsn~up-attributes-traceparent~1")
def test_an_invalid_traceparent_is_removed_and_reported_once_for_each_source() -> None:
    table, heard = ListenerTable("beta"), Raw()
    filter = table.add(uris.ANY, uris.ANY, heard)
    assert filter is not None
    sent = []
    with capture_logs() as lines:
        # one in two as the network has it: what is remembered of a stream must not bring it back
        for number in range(6):
            for text in ("00-12-34-01", "x" * 500, ""):
                message = INVALID["bad traceparent"]()
                message.attributes.traceparent = text
                message.attributes.source.ue_id = 0x20 + number % 2
                table.deliver_encoded([wired(filter, message)])
                message.attributes.id.lsb += 1
                table.deliver([message])
                sent.append(message)
    assert len(heard.messages) == 36
    assert not any(decoded(message).attributes.traceparent for message in heard.messages)
    assert not any(b"12-34" in message.SerializeToString() for message in heard.messages)
    assert (table.dropped, table.mended) == ({}, {"traceparent": 24})
    assert [line["traceparent"] for line in lines] == ["00-12-34-01"] * 2, "once for each source"


def test_a_traceparent_that_is_none_saves_nothing_that_is_invalid_anyway() -> None:
    table, heard = ListenerTable("beta"), Sink(1)
    table.add(uris.ANY, uris.ANY, heard)
    message = INVALID["request of CS3"]()
    message.attributes.traceparent = "nonsense"
    table.deliver([message])
    assert heard.messages == []
    assert (table.dropped, table.mended) == ({"invalid": 1}, {})


def test_what_differs_within_a_stamp_is_looked_at_each_time() -> None:
    table, heard, clock = ListenerTable("beta", now_ms=lambda: now[0]), Sink(1), uuids.now_ms()
    now = [clock]
    filter = table.add(topic(), reply(), heard)
    assert filter is not None
    message = notification(b"fresh")
    message.attributes.ttl = 1_000
    table.deliver_encoded([wired(filter, message)])
    now[0] += 5_000
    table.deliver_encoded([wired(filter, message)])
    table.deliver_encoded([wired(filter, notification(b""))])
    assert heard.payloads == [b"fresh", b""]
    assert table.dropped == {"expired": 1}
    table.deliver_encoded([(filter, b"", b"no attributes")])
    assert table.dropped == {"expired": 1, "malformed": 1}


def test_an_id_of_no_date_is_looked_at_although_its_stamp_is_known() -> None:
    table, heard = ListenerTable("beta"), Sink(1)
    filter = table.add(topic(), reply(), heard)
    assert filter is not None
    message = notification(b"1")
    last_ms = 253_402_300_799_999  # of the year 9999
    for ms in (uuids.now_ms(), last_ms, last_ms + 1, (1 << 48) - 1):
        message.attributes.id.msb = ms << 16 | 0x7000
        table.deliver_encoded([wired(filter, message)])
    assert len(heard.payloads) == 2
    assert table.dropped == {"invalid": 2}


def test_a_message_with_two_ids_is_what_protobuf_says_and_never_the_pattern_of_others() -> None:
    table, raw = ListenerTable("beta"), Raw()
    table.add(topic(), reply(), raw)
    ids = []
    for _ in range(2):
        message = notification(b"1")
        second = message.attributes.id.SerializeToString()
        encoded = notification(b"1").attributes.SerializeToString() + b"\x0a" + bytes([len(second)]) + second
        table.deliver_encoded([(None, b"1", encoded)])
        ids.append(message.attributes.id)
    assert [decoded(one).attributes.id for one in raw.messages] == ids
    assert [one.id_bytes for one in raw.messages] == [uuids.to_bytes(id) for id in ids]
    assert all(len(one.encoded) < len(encoded) for one in raw.messages), "the second id is not carried on"


def test_a_listener_may_take_messages_as_they_came() -> None:
    table, raw, plain = ListenerTable("beta"), Raw(), Sink(1)
    filter = table.add(topic(), reply(), raw)
    assert filter is not None
    table.add(topic(), reply(), plain)
    sent = [notification(b"%d" % number) for number in range(3)]
    table.deliver_encoded([wired(filter, message) for message in sent])
    assert [type(message) for message in raw.messages] == [EncodedMessage] * 3
    assert [message.decoded() for message in raw.messages] == plain.messages == sent
    assert len({id(message.stamp) for message in raw.messages}) == 1


def test_the_same_message_by_two_filters_reaches_a_listener_once() -> None:
    table, heard = ListenerTable("beta"), Sink(1)
    narrow, wide = table.add(topic(), reply(), heard), table.add(uris.ANY, reply(), heard)
    assert narrow is not None
    assert wide is not None
    one, two = notification(b"1"), notification(b"2")
    table.deliver_encoded([wired(narrow, one), wired(wide, one), wired(narrow, two), wired(wide, two)])
    assert heard.payloads == [b"1", b"2"]
    table.deliver_encoded([wired(narrow, one), wired(narrow, one)])
    assert heard.payloads == [b"1", b"2", b"1", b"1"], "sent twice is heard twice"


@given(st.sampled_from(list(every_combination())), st.integers(0, (0xE6 << 40) - 1), st.integers(0, 2**62 - 1))
def test_a_stamp_is_the_same_for_every_id(message: UMessage, time_ms: int, random: int) -> None:
    one = message.attributes.SerializeToString()
    other = UAttributes.FromString(one)
    other.id.msb, other.id.lsb = time_ms << 16 | 0x7123, 1 << 63 | random
    assert suffix(one) == suffix(other.SerializeToString()) == one[20:]
    other.id.msb ^= 0x1000
    assert suffix(other.SerializeToString()) is None, "not version 7"


@given(st.binary(max_size=60))
def test_a_stamp_of_anything_is_bytes_or_none(data: bytes) -> None:
    assert suffix(data) in (None, data[20:])


def test_what_is_of_one_message_alone_is_not_shared() -> None:
    assert is_shared(notification().attributes)
    traced = notification()
    traced.attributes.traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert not is_shared(traced.attributes)


def test_what_is_large_by_fields_that_nobody_knows_is_taken_and_not_remembered() -> None:
    table, heard = ListenerTable("beta"), Raw()
    table.add(topic(), reply(), heard)
    for number in range(3):
        encoded = notification(b"1").attributes.SerializeToString() + b"\xfa\x3f\x80\x10" + bytes([number]) * 2_048
        table.deliver_encoded([(None, b"1", encoded)])
    assert len(heard.messages) == 3
    assert not table._stamped
    assert len({message.stamp.address for message in heard.messages}) == 1


def test_a_listener_that_always_raises_is_counted() -> None:
    class Failing:
        def on_receive(self, message: UMessage) -> None:
            raise RuntimeError("always")

    table = ListenerTable("beta")
    table.add(topic(), reply(), Failing())
    table.deliver([notification() for _ in range(5)])
    assert table.failures == 5


def test_the_send_checks_refuse_and_remember_only_what_is_valid() -> None:
    checks = SendChecks()
    for _ in range(2):
        assert checks.refusal(notification(), checks.now_ms()) is None
        for make in INVALID.values():
            status = checks.refusal(make(), checks.now_ms())
            assert status is not None
            assert status.code == UCode.INVALID_ARGUMENT
        late = checks.refusal(expired(), checks.now_ms())
        assert late is not None
        assert late.code == UCode.DEADLINE_EXCEEDED


def test_a_failure_of_the_network_stops_the_batch() -> None:
    away = UStatus(code=UCode.UNAVAILABLE, message="away")
    statuses = stopped([OK], 3, away)
    assert [status.code for status in statuses] == [UCode.OK, UCode.UNAVAILABLE, UCode.UNAVAILABLE]
    assert "not tried" in statuses[2].message


def test_what_two_hosts_send_without_naming_themselves_is_not_one_stream() -> None:
    table, heard = ListenerTable("beta"), Raw()
    listened = table.add(uris.pattern(resource=uris.WILDCARD_RESOURCE), None, heard)
    nameless = [publish(b"%d" % number, uris.uri("", 0x10AB, 3, 0x9A01)) for number in range(4)]
    hosts = ["alpha", "gamma", "alpha", "gamma"]
    assert listened is not None
    table.deliver_encoded(
        [wired(listened, message) for message in nameless],
        lambda place, attributes: attrs.complete(attributes, hosts[place]),
    )
    assert [message.attributes.source.authority_name for message in heard.messages] == hosts
    assert heard.payloads == [b"0", b"1", b"2", b"3"]


def test_what_is_no_listener_is_refused() -> None:
    """A plain function, say: each delivery would fail."""
    table = ListenerTable("beta")
    with pytest.raises(UStatusError, match="a method on_receive") as no:
        table.add(uris.parse("up://alpha/10AB/3/9001"), None, lambda _: None)  # type: ignore[arg-type]
    assert no.value.code == UCode.INVALID_ARGUMENT
