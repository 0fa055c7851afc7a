"""UUri: the vectors of the specification, invalid input, and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

spec = pytest.mark.spec

WRITTEN = [  # authority, ue_id, version, resource, text
    ("", 0x0000_0001, 0x01, 0xA1FB, "up:/1/1/A1FB"),
    ("192.168.1.1", 0x0000_0001, 0x01, 0xA1FB, "up://192.168.1.1/1/1/A1FB"),
    ("[2001::7]", 0x0000_0001, 0x01, 0xA1FB, "up://[2001::7]/1/1/A1FB"),
    ("my_vin", 0x1000_0001, 0x02, 0x001A, "up://my_vin/10000001/2/1A"),
    ("*", 0x0000_0101, 0xA0, 0xA1FB, "up://*/101/A0/A1FB"),
    ("mcu1", 0x0000_FFFF, 0x01, 0xA1FB, "up://mcu1/FFFF/1/A1FB"),
    ("vcu.my_vin", 0x01A4_0101, 0x01, 0x8000, "up://vcu.my_vin/1A40101/1/8000"),
    ("vcu.my_vin", 0xFFFF_0101, 0x01, 0xA1FB, "up://vcu.my_vin/FFFF0101/1/A1FB"),
    ("vcu.my_vin", 0xFFFF_FFFF, 0x01, 0xA1FB, "up://vcu.my_vin/FFFFFFFF/1/A1FB"),
    ("vcu.my_vin", 0x0000_0101, 0x00, 0xA1FB, "up://vcu.my_vin/101/0/A1FB"),
    ("vcu.my_vin", 0x0000_0101, 0xFF, 0xA1FB, "up://vcu.my_vin/101/FF/A1FB"),
    ("vcu.my_vin", 0x0000_0101, 0x01, 0x0000, "up://vcu.my_vin/101/1/0"),
    ("vcu.my_vin", 0x0000_0101, 0x01, 0xFFFF, "up://vcu.my_vin/101/1/FFFF"),
]

ENCODED = [  # authority, ue_id, version, resource, protobuf bytes that another implementation made
    ("", 0x0001_0001, 0x01, 0xA1FB, "0a0010818004180120fbc302"),
    ("", 0x0000_0001, 0x01, 0xA1FB, "1001180120fbc302"),
    ("my_vin", 0x1000_0001, 0x02, 0x001A, "0a066d795f76696e1081808080011802201a"),
    ("*", 0x0001_0101, 0xA0, 0xA1FB, "0a012a1081820418a00120fbc302"),
    ("mcu1", 0x0001_FFFF, 0x01, 0xA1FB, "0a046d63753110ffff07180120fbc302"),
    ("vcu.my_vin", 0x01A4_0101, 0x01, 0x8000, "0a0a7663752e6d795f76696e108182900d180120808002"),
    ("vcu.my_vin", 0xFFFF_0101, 0x01, 0xA1FB, "0a0a7663752e6d795f76696e108182fcff0f180120fbc302"),
    ("vcu.my_vin", 0xFFFF_FFFF, 0x01, 0xA1FB, "0a0a7663752e6d795f76696e10ffffffff0f180120fbc302"),
    ("vcu.my_vin", 0x0001_0101, 0x00, 0xA1FB, "0a0a7663752e6d795f76696e10818204180020fbc302"),
    ("vcu.my_vin", 0x0001_0101, 0xFF, 0xA1FB, "0a0a7663752e6d795f76696e1081820418ff0120fbc302"),
    ("vcu.my_vin", 0x0001_0101, 0x01, 0x0000, "0a0a7663752e6d795f76696e1081820418012000"),
    ("vcu.my_vin", 0x0000_0101, 0x01, 0x0000, "0a0a7663752e6d795f76696e1081021801"),
    ("vcu.my_vin", 0x0001_0101, 0x01, 0xFFFF, "0a0a7663752e6d795f76696e10818204180120ffff03"),
]

MUST_FAIL = {
    "not a URI": ["", "  ", "$$", "up:", "up:/", "/", "//", "up://", "///", "up", "1/1/A1FB", "up:1/1/A1FB"],
    "missing parts": [
        "//vcu.my_vin",
        "//vcu.my_vin//1/A1FB",
        "//vcu.my_vin/101//A1FB",
        "//vcu.my_vin/101/1/",
        "//vcu.my_vin/101/1",
    ],
    "too many segments": ["up://vcu.my_vin/101/1/A/unexpected", "/1/1/1/"],
    "scheme": ["xy://vcu.my_vin/101/1/A", "http://vcu/1/1/1", "up:up:/1/1/1"],
    "query or fragment": ["//vcu.my_vin/101/1/A?foo=bar", "//vcu.my_vin/101/1/A#foo", "/1/1/1?", "/1/1/1#"],
    "authority": [
        "//VCU",
        "//VCU.my-vin/101/1/A",
        "//\ud800/101/1/A",  # half of a surrogate pair, as JSON can write it
        "//MY_VIN/101/1/A",
        "//vcu.my-vin:1516/101/1/A",
        "//reg_based:1516/101/1/A",
        "//user:pwd@vcu.my-vin/101/1/A",
        "//user@vcu/101/1/A",
        "//[2001:db87aa::8]/101/1/A",
        "//[2001::7/101/1/A",
        "//2001::7/101/1/A",
        "//[]/101/1/A",
        *(
            f"//[{text}]/101/1/A"
            for text in ("v1", "v1.", "v.a", "vg.a", "1.a", "v1.a%20", "v1.a@b", "v1.ä", "v1.a[", "v1.a b")
        ),
        "//[v\u0661.a]/101/1/A",
        "//[v1.a/101/1/A",
        "//v1.a:b]/101/1/A",
        "//[v1.a/b]/101/1/A",
        "//[v1.a]:80/101/1/A",
        "//me@[v1.a]/101/1/A",
        "//[fe80::1%eth0]/101/1/A",
        "//a%20b/101/1/A",
        "//a b/101/1/A",
        "//ä/101/1/A",
        "//**/101/1/A",
        "//a*/101/1/A",
        "//a\n/101/1/A",
        f"//{'a' * 129}/101/1/A",
    ],
    "not hex": [
        "up://vcu.my-vin/1G1/1/A1FB",
        "up:/101/G/A1FB",
        "/101/1/G1FB",
        "/+1/1/1",
        "/-1/1/1",
        "/0x1/1/1",
        "/1_0/1/1",
        "/ 1/1/1",
        "/1/1/1 ",
        "/1/1/1\n",
        "/\u0661/1/1",
        "/\uff11/1/1",
        "/*/1/1",
    ],
    "too long": [
        "/123456789/1/A1FB",
        "//vcu.my-vin/101/123/A1FB",
        "up://vcu.my-vin/101/1/12345",
        "/000000001/1/1",
        "/1/001/1",
        "/1/1/00001",
    ],
}

MATCHES = [
    *(
        ("/1/1/A1FB", pattern)
        for pattern in (
            *(
                "/1/1/A1FB",
                "//*/1/1/A1FB",
                "/FFFF/1/A1FB",
                "//*/FFFF/1/A1FB",
                "/FFFFFFFF/1/A1FB",
                "//*/FFFFFFFF/1/A1FB",
            ),
            *("/1/FF/A1FB", "//*/1/FF/A1FB", "/1/1/FFFF", "//*/1/1/FFFF", "/FFFFFFFF/FF/FFFF", "//*/FFFFFFFF/FF/FFFF"),
        )
    ),
    *(
        ("/100AA/1/A1FB", pattern)
        for pattern in (
            *(
                "/100AA/1/A1FB",
                "//*/100AA/1/A1FB",
                "/1FFFF/1/A1FB",
                "//*/1FFFF/1/A1FB",
                "/FFFFFFFF/1/A1FB",
                "/100AA/FF/A1FB",
            ),
            *(
                "//*/100AA/FF/A1FB",
                "/100AA/1/FFFF",
                "//*/100AA/1/FFFF",
                "/FFFFFFFF/FF/FFFF",
                "//*/FFFFFFFF/FF/FFFF",
                "/FFFF00AA/1/A1FB",
            ),
        )
    ),
    *(
        ("/10001/1/A1FB", pattern)
        for pattern in (
            *("/10001/1/A1FB", "//*/10001/1/A1FB", "/FFFFFFFF/1/A1FB"),
            *("//*/FFFFFFFF/1/A1FB", "/FFFFFFFF/FF/FFFF", "//*/FFFFFFFF/FF/FFFF"),
        )
    ),
    ("//vcu.my_vin/1/1/A1FB", "//vcu.my_vin/1/1/A1FB"),
    ("//vcu.my_vin/1/1/A1FB", "//*/1/1/A1FB"),
    ("//other-vcu.my-vehicle/0/3/8000", "//*/FFFF0000/3/FFFF"),
    ("/20000/3/2", "//*/FFFF0000/3/FFFF"),
    ("//192.168.1.100/1A/2/2", "//192.168.1.100/FFFFFFFF/FF/FFFF"),
    ("/0/3/1", "/0/FF/1"),
    ("/0/2/1", "/0/FF/1"),
    ("/FFFFFFFF/FF/FFFF", "/FFFFFFFF/FF/FFFF"),
]

MATCHES_NOT = [
    ("/1/1/A1FB", "//mcu1/1/1/A1FB"),
    ("/10001/1/A1FB", "/FFFF/1/A1FB"),
    ("//vcu.my_vin/1/1/A1FB", "//mcu1/1/1/A1FB"),
    ("//vcu.my_vin/1/1/A1FB", "/1/1/A1FB"),
    ("//vcu/B1A5/1/A1FB", "//vc/FFFFFFFF/FF/FFFF"),
    *(
        ("/B1A5/1/A1FB", pattern)
        for pattern in (
            *("//*/25B1/FF/FFFF", "//*/FFFFFFFF/2/FFFF", "//*/FFFFFFFF/FF/ABCD", "/25B1/1/A1FB"),
            *("/2B1A5/1/A1FB", "/B1A5/4/A1FB", "/B1A5/1/90FB"),
        )
    ),
    ("/10B1A5/1/A1FB", "/40B1A5/1/A1FB"),
    ("//vcu.other.device/1/3/8000", "//*/FFFF0000/3/FFFF"),
    ("/20010/3/2", "//*/FFFF0000/3/FFFF"),
    ("//192.168.1.200/0/3/8000", "//192.168.1.100/FFFFFFFF/FF/FFFF"),
    ("/1/3/8", "//192.168.1.100/FFFFFFFF/FF/FFFF"),
    ("//vcu.other.device/0/3/1", "/0/FF/1"),
    ("/0/3/3", "/0/FF/1"),
    # the candidate's wildcards are values
    ("//*/1/1/8000", "//a/1/1/8000"),
    ("/FFFF/1/8000", "/1/1/8000"),
    ("/FFFF0001/1/8000", "/1/1/8000"),
    ("/1/FF/8000", "/1/1/8000"),
    ("/1/1/FFFF", "/1/1/8000"),
]

names = st.text("abcdefghijklmnopqrstuvwxyz0123456789-._~", min_size=1, max_size=uris.AUTHORITY_LENGTH_MAX)
ipv6 = st.ip_addresses(v=6).map(lambda address: f"[{address}]")
ipv4 = st.ip_addresses(v=4).map(str)
ip_future = st.from_regex(r"\[v[0-9a-f]{1,4}\.[a-z0-9\-._~!$&'()*+,;=:]{1,80}\]", fullmatch=True)
authorities = st.one_of(st.just(""), st.just("*"), names, ipv4, ipv6, ip_future)
valid_uris = st.builds(
    UUri,
    authority_name=authorities,
    ue_id=st.one_of(st.integers(0, 0xFFFF_FFFF), st.sampled_from([0, 0xFFFF, 0xFFFF_0000, 0xFFFF_FFFF])),
    ue_version_major=st.integers(0, 0xFF),
    resource_id=st.integers(0, 0xFFFF),
)


def made(authority: str, ue_id: int, version: int, resource: int) -> UUri:
    return UUri(authority_name=authority, ue_id=ue_id, ue_version_major=version, resource_id=resource)


def refuses(text: str) -> UStatusError:
    with pytest.raises(UStatusError) as caught:
        uris.parse(text)
    assert caught.value.code == UCode.INVALID_ARGUMENT
    assert caught.value.message
    return caught.value


@spec("req~uri-serialization~1")
@spec("dsn~uri-scheme~1")
@spec("dsn~uri-host-only~2")
@spec("dsn~uri-authority-mapping~1")
@spec("dsn~uri-path-mapping~2")
@pytest.mark.parametrize(("authority", "ue_id", "version", "resource", "text"), WRITTEN)
def test_writes_and_reads_the_vectors(authority: str, ue_id: int, version: int, resource: int, text: str) -> None:
    expected = made(authority, ue_id, version, resource)
    assert uris.format(expected) == text
    assert uris.parse(text) == expected
    assert uris.parse(text.removeprefix("up:")) == expected


@spec("req~uri-serialization~1")
@spec("dsn~uri-scheme~1")
@spec("dsn~uri-host-only~2")
@spec("dsn~uri-authority-mapping~1")
@spec("dsn~uri-path-mapping~2")
@pytest.mark.parametrize("text", [text for texts in MUST_FAIL.values() for text in texts])
def test_refuses_what_is_no_uri(text: str) -> None:
    refuses(text)


@spec("dsn~uri-path-mapping~2")
@pytest.mark.parametrize(
    "text",
    ["up:/1a/ff/a1fb", "up:/0000001A/FF/A1FB", "/1A/fF/a1Fb", "UP:/1A/FF/A1FB", "up:///1A/FF/A1FB", "///1A/FF/A1FB"],
)
def test_reads_the_other_ways_to_write_it(text: str) -> None:
    assert uris.format(uris.parse(text)) == "up:/1A/FF/A1FB"


@spec("dsn~uri-host-only~2")
def test_reads_an_ipv6_address_in_either_case() -> None:
    assert uris.parse("//[2001:DB8::A]/1/1/8000").authority_name == "[2001:db8::a]"


@spec("dsn~uri-host-only~2")
@spec("dsn~uri-authority-mapping~1")
@pytest.mark.parametrize("text", ["//[v1.fe80::a+en1]/1/1/8000", "up://[V1.FE80::A+en1]/1/1/8000"])
def test_reads_an_address_of_a_later_ip_version_in_either_case(text: str) -> None:
    """IPvFuture, the other half of an IP-literal in RFC 3986."""
    read = uris.parse(text)
    assert read.authority_name == "[v1.fe80::a+en1]"
    assert uris.format(read) == "up://[v1.fe80::a+en1]/1/1/8000"


@spec("dsn~uri-host-only~2")
@given(ip_future)
def test_any_later_ip_address_is_read_as_rfc_3986_compares_it(authority: str) -> None:
    assert uris.is_ip_future(authority)
    assert uris.parse(f"//{authority.upper()}/1/1/1").authority_name == authority
    assert not uris.has_wildcard(uris.uri(authority, 1, 1, 1)), "a * in it is a character like any other"
    assert not uris.matches(uris.uri(authority, 1, 1, 1), uris.uri("a", 1, 1, 1))


def test_the_reason_for_refusal_names_what_is_wrong() -> None:
    assert "three path segments" in refuses("//vcu.my_vin/101/1").message
    assert "query" in refuses("/1/1/1?a").message
    assert "ue_id '123456789'" in refuses("/123456789/1/1").message
    assert "129" in refuses(f"//{'a' * 129}/101/1/A").message


@spec("dsn~uri-authority-name-length~1")
def test_an_authority_has_128_characters_at_most() -> None:
    longest = "a" * 128
    assert uris.uri(longest, 1, 1, 1).authority_name == longest
    assert uris.parse(f"//{longest}/1/1/1").authority_name == longest
    for build in (
        lambda: uris.uri(longest + "a", 1, 1, 1),
        lambda: uris.pattern(longest + "a"),
        lambda: uris.validate(UUri(authority_name=longest + "a")),
        lambda: uris.parse(f"//{longest}a/1/1/1"),
    ):
        with pytest.raises(UStatusError, match="128"):
            build()


@spec("req~uri-data-model-proto~1")
@spec("dsn~uri-data-model-naming~1")
@pytest.mark.parametrize(("authority", "ue_id", "version", "resource", "hexadecimal"), ENCODED)
def test_reads_protobuf_bytes(authority: str, ue_id: int, version: int, resource: int, hexadecimal: str) -> None:
    expected = made(authority, ue_id, version, resource)
    assert UUri.FromString(bytes.fromhex(hexadecimal)) == expected
    assert UUri.FromString(expected.SerializeToString()) == expected


@spec("dsn~uri-data-model-naming~1")
@pytest.mark.parametrize(
    "fields", [(0x1_0000_0000, 1, 1), (-1, 1, 1), (1, 0x100, 1), (1, -1, 1), (1, 1, 0x1_0000), (1, 1, -1)]
)
def test_refuses_numbers_that_do_not_fit(fields: tuple[int, int, int]) -> None:
    with pytest.raises(UStatusError) as caught:
        uris.uri("a", *fields)
    assert caught.value.code == UCode.INVALID_ARGUMENT


@pytest.mark.parametrize("wide", [UUri(ue_version_major=0x100), UUri(resource_id=0x1_0000), UUri(authority_name="A")])
def test_protobuf_can_hold_what_is_invalid_and_validation_finds_it(wide: UUri) -> None:
    with pytest.raises(UStatusError):
        uris.validate(wide)


@spec("dsn~uri-pattern-matching~2")
@pytest.mark.parametrize(("candidate", "pattern"), MATCHES)
def test_matches(candidate: str, pattern: str) -> None:
    assert uris.matches(uris.parse(pattern), uris.parse(candidate))


@spec("dsn~uri-pattern-matching~2")
@pytest.mark.parametrize(("candidate", "pattern"), MATCHES_NOT)
def test_does_not_match(candidate: str, pattern: str) -> None:
    assert not uris.matches(uris.parse(pattern), uris.parse(candidate))


@given(valid_uris)
def test_what_is_written_is_read_back(uri: UUri) -> None:
    uris.validate(uri)
    assert uris.parse(uris.format(uri)) == uri


@given(valid_uris)
def test_matching_is_reflexive_and_any_matches_all(uri: UUri) -> None:
    assert uris.matches(uri, uri)
    assert uris.matches(uris.ANY, uri)


@given(valid_uris, valid_uris)
def test_matching_is_what_its_five_predicates_say(pattern: UUri, candidate: UUri) -> None:
    expected = (
        pattern.authority_name in ("*", candidate.authority_name)
        and pattern.ue_id & 0xFFFF in (0xFFFF, candidate.ue_id & 0xFFFF)
        and pattern.ue_id >> 16 in (0xFFFF, candidate.ue_id >> 16)
        and pattern.ue_version_major in (0xFF, candidate.ue_version_major)
        and pattern.resource_id in (0xFFFF, candidate.resource_id)
    )
    assert uris.matches(pattern, candidate) == expected


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        uri = uris.parse(text)
    except UStatusError as error:
        refused = error
    else:
        uris.validate(uri)
        assert uris.parse(uris.format(uri)) == uri
        return
    assert refused.code == UCode.INVALID_ARGUMENT


@spec("dsn~uri-entity-id~1")
@spec("dsn~uri-resource-id~1")
def test_the_parts_of_an_address() -> None:
    assert uris.matches(uris.pattern(ue_id=0xFFFF_0101), uris.uri("a", 0x01A4_0101, 1, 1)), "low 16 bits: the type"
    assert uris.matches(uris.pattern(ue_id=0x01A4_FFFF), uris.uri("a", 0x01A4_0101, 1, 1)), "high 16 bits: the instance"
    kinds = [
        (0, uris.is_reply),
        (1, uris.is_method),
        (0x7FFF, uris.is_method),
        (0x8000, uris.is_topic),
        (0xFFFE, uris.is_topic),
    ]
    for resource, holds in kinds:
        uri = uris.uri("a", 1, 1, resource)
        assert [is_it(uri) for is_it in (uris.is_reply, uris.is_method, uris.is_topic)].count(True) == 1
        assert holds(uri)
    assert not any(is_it(uris.pattern("a")) for is_it in (uris.is_reply, uris.is_method, uris.is_topic))


@pytest.mark.parametrize("text", ["//*/1/1/1", "/FFFF/1/1", "/1FFFF/1/1", "/FFFF0001/1/1", "/1/FF/1", "/1/1/FFFF"])
def test_any_wildcard_makes_a_pattern(text: str) -> None:
    assert uris.has_wildcard(uris.parse(text))
    assert not uris.has_wildcard(uris.parse("//a/10001/FE/FFFE"))


@spec("local~l1-normalise")
def test_an_empty_authority_is_completed_and_the_original_left_alone() -> None:
    local = uris.parse("/1/1/8000")
    assert uris.format(uris.with_authority(local, "me")) == "up://me/1/1/8000"
    assert local.authority_name == ""
    named = uris.parse("//you/1/1/8000")
    assert uris.with_authority(named, "me") is named


def test_the_key_is_the_identity() -> None:
    assert uris.key(uris.parse("//a/1/2/3")) == ("a", 1, 2, 3)


def test_the_longest_suffix_owns_an_authority() -> None:
    assert list(uris.owners("a.b.c")) == ["a.b.c", "*.b.c", "*.c", "*"]
    assert list(uris.owners("a")) == ["a", "*"]
    assert list(uris.owners("")) == [], "no name, no owner"
