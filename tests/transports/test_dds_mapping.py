"""The mapping of docs/dds-mapping.md: its examples and samples, and that all attributes survive."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transports.dds import mapping
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UAttributes, UPriority
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

LOCAL = "device1"


def u(text: str | None) -> UUri | None:
    return None if text is None else uris.parse(text)


@pytest.mark.parametrize(
    ("source", "sink", "partition"),
    [
        ("up:/10AB/3/80CD", None, "up/device1/10AB/0/3/80CD/{}/{}/{}/{}/{}"),
        ("up://device1/10AB/3/80CD", "up://device2/300EF/4/0", "up/device1/10AB/0/3/80CD/device2/EF/3/4/0"),
        ("up:/403AB/3/0", "up://device2/CD/4/B", "up/device1/3AB/4/3/0/device2/CD/0/4/B"),
        ("up:/10AB/3/80CD", "up://device2/FFFFFFFF/FF/FFFF", "up/device1/10AB/0/3/80CD/device2/{}/{}/{}/{}"),
        ("up://[2001:db8::7]/10AB/3/80CD", "up://[::1]/CD/4/0", "up/2001:db8::7/10AB/0/3/80CD/::1/CD/0/4/0"),
        (
            "up://[v1.fe80::a+en1]/10AB/3/80CD",
            "up://[v1.a*!b]/CD/4/0",
            "up/%5Bv1.fe80::a+en1%5D/10AB/0/3/80CD/%5Bv1.a%2A%21b%5D/CD/0/4/0",
        ),
    ],
)
def test_where_a_message_goes(source: str, sink: str | None, partition: str) -> None:
    address = u(source)
    assert address is not None
    assert mapping.writer_partition(address, u(sink), LOCAL) == partition
    assert mapping.is_partition_of(partition, UAttributes(source=address, sink=u(sink)))
    for other in (
        partition + "/more",
        "",
        partition.replace("10AB", "10AC"),
    ):
        assert (other == partition) == mapping.is_partition_of(other, UAttributes(source=address, sink=u(sink)))


def test_a_partition_of_another_sink_is_not_the_messages_and_what_is_missing_is_no_other() -> None:
    partition = "up/device1/10AB/0/3/80CD/device2/EF/3/4/0"
    source, sink = u("up:/10AB/3/80CD"), u("up://device2/300EF/4/0")
    assert mapping.is_partition_of(partition, UAttributes())
    assert mapping.is_partition_of(partition, UAttributes(sink=sink))
    assert mapping.is_partition_of(partition, UAttributes(source=source, sink=sink))
    assert not mapping.is_partition_of(partition, UAttributes(source=source, sink=u("up://device3/300EF/4/0")))


@pytest.mark.parametrize(
    ("source", "sink", "partition"),
    [
        ("up://device2/10AB/3/80CD", None, "up/device2/10AB/0/3/80CD/{}/{}/{}/{}/{}"),
        ("up://*/FFFFFFFF/FF/FFFF", "up:/300EF/4/0", "up/*/*/*/*/*/device1/EF/3/4/0"),
        ("up://*/FFFF05A1/2/0", "up://device1/300EF/4/B18", "up/*/5A1/*/2/0/device1/EF/3/4/B18"),
        ("up://*/FFFFFFFF/FF/FFFF", "up://device1/FFFFFFFF/FF/FFFF", "up/*/*/*/*/*/device1/*/*/*/*"),
        ("up://*/FFFFFFFF/FF/FFFF", None, "up/*/*/*/*/*/{}/{}/{}/{}/{}"),
        ("up://[::1]/10AB/3/80CD", None, "up/::1/10AB/0/3/80CD/{}/{}/{}/{}/{}"),
    ],
)
def test_what_a_pair_of_filters_asks_for(source: str, sink: str | None, partition: str) -> None:
    address = u(source)
    assert address is not None
    assert mapping.reader_partition(address, u(sink), LOCAL) == partition


authorities = st.one_of(
    st.from_regex(r"[a-z0-9\-._~]{1,20}", fullmatch=True),
    st.ip_addresses(v=6).map(lambda a: f"[{a}]"),
    st.ip_addresses(v=4).map(str),
    st.from_regex(r"\[v[0-9a-f]{1,2}\.[a-z0-9\-._~!$&'()*+,;=:]{1,20}\]", fullmatch=True),
)
numbers = st.integers(0, 0xFFFE)


def addresses(resource: st.SearchStrategy[int]) -> st.SearchStrategy[UUri]:
    entity = st.builds(lambda kind, instance: instance << 16 | kind, numbers, numbers)
    return st.builds(
        lambda a, e, v, r: UUri(authority_name=a, ue_id=e, ue_version_major=v, resource_id=r),
        authorities,
        entity,
        st.integers(0, 0xFE),
        resource,
    )


@given(addresses(numbers), addresses(numbers) | st.none())
def test_a_partition_is_a_plain_name_of_eleven_segments(source: UUri, sink: UUri | None) -> None:
    """So `*` never matches a slash, and no DDS takes the name for a pattern."""
    partition = mapping.writer_partition(source, sink, LOCAL)
    assert partition.count("/") == 10
    assert not set(partition) & set("*?[]\\!")
    assert all(partition.split("/"))


@given(addresses(numbers), addresses(numbers), addresses(numbers) | st.none(), addresses(numbers) | st.none())
def test_different_addresses_have_different_partitions(
    one: UUri, other: UUri, sink: UUri | None, other_sink: UUri | None
) -> None:
    same = (one, sink) == (other, other_sink)
    assert (mapping.writer_partition(one, sink, LOCAL) == mapping.writer_partition(other, other_sink, LOCAL)) == same


@pytest.mark.spec("dsn~up-attributes-priority~1")
def test_every_priority_has_a_rank_of_its_own() -> None:
    ranks = [mapping.TRANSPORT_PRIORITY[priority] for priority in sorted(UPriority.values()) if priority]
    assert ranks == [0, 8, 16, 24, 32, 40, 48]
    assert (
        mapping.TRANSPORT_PRIORITY[UPriority.UPRIORITY_UNSPECIFIED]
        == mapping.TRANSPORT_PRIORITY[UPriority.UPRIORITY_CS1]
    )


@pytest.mark.parametrize(
    ("ttl", "lifespan"), [(0, None), (1, 1_024), (1_024, 1_024), (1_025, 2_048), (5_000, 8_192), (2**32 - 1, None)]
)
def test_lifespans(ttl: int, lifespan: int | None) -> None:
    assert mapping.lifespan_ms(ttl) == lifespan


@given(st.integers(1, 2**32 - 1))
def test_a_lifespan_is_never_shorter_than_the_ttl(ttl: int) -> None:
    lifespan = mapping.lifespan_ms(ttl)
    assert lifespan is None or ttl <= lifespan <= max(mapping.LIFESPAN_MS_MIN, 2 * ttl)


payloads = st.none() | st.builds(UPayload, st.binary(max_size=70), st.integers(0, 7))


@given(
    addresses(st.integers(0x8000, 0xFFFE)),
    payloads,
    st.integers(0, 2**32 - 1),
    st.sampled_from(sorted(UPriority.values())),
)
def test_decode_is_the_inverse_of_encode(
    source: UUri, payload: UPayload | None, ttl: int, priority: UPriority.ValueType
) -> None:
    """An empty payload and an absent one stay different, too."""
    message = UMessageBuilder.publish(source).with_ttl(ttl).with_priority(priority).build_from_upayload(payload)
    assert mapping.decode(mapping.encode(message)) == message


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_either_byte_order_is_read(attributes: bytes, payload: bytes) -> None:
    big = (
        b"\x00\x00\x00\x00\x01\x01\x00\x00"
        + len(attributes).to_bytes(4, "big")
        + attributes
        + bytes(-len(attributes) % 4)
    )
    big += len(payload).to_bytes(4, "big") + payload + bytes(-len(payload) % 4)
    assert (
        mapping.unpack(big)
        == mapping.unpack(mapping.pack(attributes, payload, has_payload=True))
        == (attributes, payload)
    )


@given(st.binary(max_size=64))
def test_anything_at_all_is_decoded_or_refused(sample: bytes) -> None:
    """No octets raise another exception."""
    with contextlib.suppress(UStatusError):
        assert mapping.decode(sample).HasField("attributes")


@given(st.integers(0, 60))
def test_a_sample_cut_short_is_refused(length: int) -> None:
    whole = mapping.encode(
        UMessageBuilder.publish(uris.uri("a", 1, 1, 0x8000)).build_from_upayload(UPayload(b"data", 3))
    )
    with pytest.raises(UStatusError):
        mapping.decode(whole[: min(length, len(whole) - 1)])


def test_another_version_is_refused() -> None:
    sample = bytearray(mapping.encode(UMessage(attributes=UAttributes(ttl=1))))
    sample[4] = 2
    with pytest.raises(UStatusError, match="version 1, got 2"):
        mapping.decode(bytes(sample))


TIMES = st.integers(0, 1 << 62)


@given(TIMES, st.integers(0, 1 << 40), st.integers(1, mapping.NUMBERS // 2 - 1), st.integers(-(10**12), 10**12))
def test_a_time_stamp_tells_how_many_are_missing(now_ns: int, number: int, ahead: int, later_ns: int) -> None:
    """Also when the clock is set back meanwhile, and when the numbers start again."""
    last, following = (
        mapping.numbered_ns(now_ns, number),
        mapping.numbered_ns(max(now_ns + later_ns, 0), number + ahead),
    )
    assert mapping.missing(last, following) == ahead - 1
    assert 0 < last - now_ns < 2 * mapping.NUMBERS  # later, by 34 ms at most: no lifespan ends early


@given(TIMES, st.integers(1 << 20, 1 << 40), st.integers(0, 1 << 20), st.integers(0, 10**12))
def test_what_comes_again_is_recognised(now_ns: int, number: int, behind: int, earlier_ns: int) -> None:
    last, again = mapping.numbered_ns(now_ns, number), mapping.numbered_ns(max(now_ns - earlier_ns, 0), number - behind)
    assert mapping.missing(last, again) == -1


def test_very_many_missing_samples_are_no_repetition() -> None:
    """With half of all numbers and more missing, the time shows that samples are new: none may be dropped."""
    last = mapping.numbered_ns(10**18, 7)
    for ahead in (mapping.NUMBERS // 2, mapping.NUMBERS - 1, mapping.NUMBERS):
        assert mapping.missing(last, mapping.numbered_ns(10**18 + 10**11, 7 + ahead)) == ahead - 1


@pytest.mark.parametrize(
    ("theirs", "ours", "meet"),
    [
        (["up/a/1/0/3/8001/{}/{}/{}/{}/{}"], ["up/*/*/*/*/*/{}/{}/{}/{}/{}"], True),
        (["up/*"], ["up/a/1/0/3/8001/{}/{}/{}/{}/{}"], True),
        (["up/a"], ["up/a"], True),
        (["up/a", "up/b"], ["up/c", "up/b"], True),
        (["up/a"], ["up/b"], False),
        ([""], ["up/*"], False),
        (["up/a"], [], False),
    ],
)
def test_partitions_meet(theirs: list[str], ours: list[str], meet: bool) -> None:
    assert mapping.partitions_meet(theirs, ours) == meet


@pytest.mark.parametrize("authority", ["device1", "10.0.0.1", "[2001:db8::7]", "[v1.fe80::a+en1]", "[v1.a*b]"])
def test_an_authority_that_is_missing_is_read_from_the_partition(authority: str) -> None:
    source, sink = uris.uri("", 0x10AB, 3, 0x80CD), uris.uri("", 0x10AB, 3, 0)
    for here in (None, sink):
        attributes = UAttributes(source=source, sink=here)
        mapping.complete(attributes, mapping.writer_partition(source, here, authority))
        assert attributes.source.authority_name == authority
        assert here is None or attributes.sink.authority_name == authority
    attributes = UAttributes(source=source)
    mapping.complete(attributes, "somebody/else's")
    assert attributes.source.authority_name == "", "what can't be completed is for the receiver to count"
