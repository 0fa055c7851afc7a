"""UUri: parse, format, validate, match (spec basics/uri.adoc).

text  --parse-->  UUri  --format-->  text          up://vcu.my_vin/1A40101/1/8000
                   |
          validate | matches(pattern, candidate)
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Container, Iterator
from typing import Final

from uprotocol.status import invalid
from uprotocol.v1.uri_pb2 import UUri

AUTHORITY_LENGTH_MAX: Final = 128  # characters, dsn~uri-authority-name-length~1
WILDCARD_AUTHORITY: Final = "*"
WILDCARD_ENTITY: Final = 0xFFFF_FFFF
WILDCARD_ENTITY_TYPE: Final = 0xFFFF
WILDCARD_ENTITY_INSTANCE: Final = 0xFFFF
WILDCARD_VERSION: Final = 0xFF
WILDCARD_RESOURCE: Final = 0xFFFF
RESOURCE_REPLY: Final = 0x0000
RESOURCE_METHOD_MIN: Final = 0x0001
RESOURCE_METHOD_MAX: Final = 0x7FFF
RESOURCE_TOPIC_MIN: Final = 0x8000
RESOURCE_TOPIC_MAX: Final = 0xFFFE

_NAME = re.compile(r"[a-z0-9\-._~]+")
_IP_FUTURE = re.compile(r"v[0-9a-f]+\.[a-z0-9\-._~!$&'()*+,;=:]+", re.IGNORECASE | re.ASCII)  # RFC 3986, section 3.2.2
_DIGITS = re.compile(r"[0-9A-Fa-f]+")
_SEGMENTS = (("ue_id", 8), ("ue_version_major", 2), ("resource_id", 4))  # with the maximal number of digits


def uri(authority: str = "", ue_id: int = 0, version: int = 1, resource: int = 0) -> UUri:
    """A validated UUri. Raises UStatusError(INVALID_ARGUMENT)."""
    if not 0 <= ue_id <= WILDCARD_ENTITY:
        raise invalid(f"ue_id is 32 bits wide, got {ue_id:#x}")
    validate_authority(authority)
    _validate_numbers(version, resource)
    return UUri(authority_name=authority, ue_id=ue_id, ue_version_major=version, resource_id=resource)


def pattern(
    authority: str = WILDCARD_AUTHORITY,
    ue_id: int = WILDCARD_ENTITY,
    version: int = WILDCARD_VERSION,
    resource: int = WILDCARD_RESOURCE,
) -> UUri:
    """A UUri; every part that is not given is a wildcard."""
    return uri(authority, ue_id, version, resource)


def parse(text: str) -> UUri:
    """Parse `up://authority/ue_id/version/resource`; `up:` and the authority may be missing.

    `up:///1/1/8000` has no authority. An IP-literal in brackets becomes lower-case, as RFC 3986 compares hosts. Raises
    UStatusError(INVALID_ARGUMENT) with the reason (req~uri-serialization~1).
    """
    rest = text[3:] if text[:3].lower() == "up:" else text
    if "?" in rest or "#" in rest:
        raise invalid(f"a uProtocol URI has neither query nor fragment, got {text!r}")
    authority = ""
    if rest.startswith("//"):
        authority, slash, path = rest[2:].partition("/")
        authority = authority.lower() if authority.startswith("[") else authority
        rest = slash + path
    if not rest.startswith("/"):
        raise invalid(f"expected up://authority/ue_id/version/resource or /ue_id/version/resource, got {text!r}")
    segments = rest[1:].split("/")
    if len(segments) != 3:
        raise invalid(f"expected three path segments (ue_id, version, resource), got {len(segments)} in {text!r}")
    numbers = []
    for segment, (name, digits_max) in zip(segments, _SEGMENTS, strict=True):
        # int(s, 16) alone would accept '+1', '0x1', '1_0'
        if len(segment) > digits_max or not _DIGITS.fullmatch(segment):
            raise invalid(f"{name} {segment!r} in {text!r} is not a hexadecimal number of at most {digits_max} digits")
        numbers.append(int(segment, 16))
    return uri(authority, *numbers)  # validates the authority first: protobuf refuses half of a surrogate pair


def format(uri: UUri) -> str:
    """Returns `up://authority/UE_ID/VERSION/RESOURCE`, in upper-case hex without leading zeros; `up:/...` without
    authority."""
    authority = f"//{uri.authority_name}" if uri.authority_name else ""
    return f"up:{authority}/{uri.ue_id:X}/{uri.ue_version_major:X}/{uri.resource_id:X}"


def validate(uri: UUri) -> None:
    """Check the width of every number and the grammar of the authority; wildcards are allowed. Raises
    INVALID_ARGUMENT."""
    validate_authority(uri.authority_name)
    if uri.ue_version_major > 0xFF or uri.resource_id > 0xFFFF:
        _validate_numbers(uri.ue_version_major, uri.resource_id)


def _validate_numbers(version: int, resource: int) -> None:
    if not 0 <= version <= 0xFF:
        raise invalid(f"ue_version_major is 8 bits wide, got {version:#x}")
    if not 0 <= resource <= 0xFFFF:
        raise invalid(f"resource_id is 16 bits wide, got {resource:#x}")


@functools.lru_cache(maxsize=4096)
def validate_authority(authority: str) -> None:
    """Valid are: empty, `*`, a name of lower-case letters, digits and `-._~`, an IPv4 address, an IP-literal in
    brackets (dsn~uri-host-only~2). Raises INVALID_ARGUMENT."""
    if authority in ("", WILDCARD_AUTHORITY):
        return
    if len(authority) > AUTHORITY_LENGTH_MAX:
        raise invalid(f"an authority has at most {AUTHORITY_LENGTH_MAX} characters, got {len(authority)}")
    if authority.startswith("[") and authority.endswith("]"):
        _validate_ip_literal(authority)
    elif not _NAME.fullmatch(authority):
        raise invalid(
            f"authority {authority!r} may have lower-case letters, digits, '-', '.', '_' and '~' only: no port, no user"
        )


def _validate_ip_literal(authority: str) -> None:
    """IP-literal of RFC 3986: an IPv6 address, or an address of a future version, such as `[v1.fe80::a+en1]`."""
    if is_ip_future(authority):
        return
    try:
        ipaddress.IPv6Address(authority[1:-1])
    except ValueError as error:
        raise invalid(
            f"authority {authority!r} is neither an IPv6 address ({error}) nor one of a future version, like [v1.x]"
        ) from None
    if "%" in authority:  # the library accepts zones, RFC 3986 does not
        raise invalid(f"authority {authority!r} has a zone, which is only meaningful on its own device: remove it")


def is_ip_future(authority: str) -> bool:
    """True for an IPvFuture of RFC 3986 in brackets. It may contain `* + $ ! ( )`, which are special characters in some
    networks."""
    return (
        authority[:1] == "["
        and authority[-1:] == "]"
        and _IP_FUTURE.fullmatch(authority, 1, len(authority) - 1) is not None
    )


def owners(authority: str) -> Iterator[str]:
    """The patterns that match `authority`, the most specific first: for a.b.c these are a.b.c, `*.b.c`, `*.c` and `*`.
    Nothing matches "", which names no host."""
    if not authority:
        return
    yield authority
    _, dot, rest = authority.partition(".")
    while dot:
        yield f"*.{rest}"
        _, dot, rest = rest.partition(".")
    yield WILDCARD_AUTHORITY


def family_of(authority: str) -> str:
    """The part of a name after its first dot; "" without a dot."""
    return authority.partition(".")[2]


def is_one_of(authority: str, patterns: Container[str]) -> bool:
    """True if one of `patterns` (names, families, `*`) matches `authority`."""
    if not authority or authority in patterns or WILDCARD_AUTHORITY in patterns:
        return bool(authority)
    _, dot, rest = authority.partition(".")
    while dot:
        if f"*.{rest}" in patterns:
            return True
        _, dot, rest = rest.partition(".")
    return False


def is_pattern(authority: str) -> bool:
    """True for `*` and for a family."""
    return authority.startswith(WILDCARD_AUTHORITY)


def is_family(authority: str) -> bool:
    """True for a pattern like `*.vin123`: all authorities with this ending. A UUri can't contain such a pattern."""
    return authority.startswith("*.")


def matches(pattern: UUri, candidate: UUri) -> bool:
    """dsn~uri-pattern-matching~2: only wildcards of `pattern` count; instance 0 is a value, not a wildcard."""
    resource = pattern.resource_id
    if resource != WILDCARD_RESOURCE and resource != candidate.resource_id:
        return False
    authority = pattern.authority_name
    if authority != WILDCARD_AUTHORITY and authority != candidate.authority_name:
        return False
    version = pattern.ue_version_major
    if version != WILDCARD_VERSION and version != candidate.ue_version_major:
        return False
    wanted, given = pattern.ue_id, candidate.ue_id
    type_matches = wanted & 0xFFFF in (WILDCARD_ENTITY_TYPE, given & 0xFFFF)
    return type_matches and wanted >> 16 in (WILDCARD_ENTITY_INSTANCE, given >> 16)


def meets(one: UUri, other: UUri) -> bool:
    """True if a UUri can exist that both patterns match."""
    parts = (
        (one.authority_name, other.authority_name, WILDCARD_AUTHORITY),
        (one.ue_id & 0xFFFF, other.ue_id & 0xFFFF, WILDCARD_ENTITY_TYPE),
        (one.ue_id >> 16, other.ue_id >> 16, WILDCARD_ENTITY_INSTANCE),
        (one.ue_version_major, other.ue_version_major, WILDCARD_VERSION),
        (one.resource_id, other.resource_id, WILDCARD_RESOURCE),
    )
    return all(this == that or wildcard in (this, that) for this, that, wildcard in parts)


def is_topic(uri: UUri) -> bool:
    return RESOURCE_TOPIC_MIN <= uri.resource_id <= RESOURCE_TOPIC_MAX


def is_method(uri: UUri) -> bool:
    return RESOURCE_METHOD_MIN <= uri.resource_id <= RESOURCE_METHOD_MAX


def is_reply(uri: UUri) -> bool:
    return uri.resource_id == RESOURCE_REPLY


def has_wildcard(uri: UUri) -> bool:
    """True if any part is a wildcard: then the UUri is a pattern."""
    return (
        uri.authority_name == WILDCARD_AUTHORITY
        or uri.ue_id & 0xFFFF == WILDCARD_ENTITY_TYPE
        or uri.ue_id >> 16 == WILDCARD_ENTITY_INSTANCE
        or uri.ue_version_major == WILDCARD_VERSION
        or uri.resource_id == WILDCARD_RESOURCE
    )


def with_authority(uri: UUri, authority: str) -> UUri:
    """Returns `uri` itself, or a copy with `authority` if it has none (A-15: an empty authority is the local one)."""
    if uri.authority_name:
        return uri
    completed = UUri()
    completed.CopyFrom(uri)
    completed.authority_name = authority
    return completed


def of_authority(pattern: UUri, authority: str) -> UUri:
    """Returns a copy of `pattern` with `authority`."""
    return uri(authority, pattern.ue_id, pattern.ue_version_major, pattern.resource_id)


Key = tuple[str, int, int, int]
"""A UUri as a hashable tuple: authority, ue_id, version, resource."""


def key(uri: UUri) -> Key:
    """Returns `uri` as a hashable tuple."""
    return (uri.authority_name, uri.ue_id, uri.ue_version_major, uri.resource_id)


Shape = tuple[bool, int, int, int]
"""The wildcards of a pattern: whether the authority is one, and bit masks of the wildcards in the three numbers of its
key (in a wildcard all bits are set)."""

EXACT: Final[Shape] = (False, 0, 0, 0)


def shape(key: Key) -> Shape:
    """Returns the wildcards of `key`; EXACT if it has none."""
    authority, ue_id, version, resource = key
    entity = WILDCARD_ENTITY_TYPE if ue_id & 0xFFFF == WILDCARD_ENTITY_TYPE else 0
    if ue_id >> 16 == WILDCARD_ENTITY_INSTANCE:
        entity |= WILDCARD_ENTITY_INSTANCE << 16
    return (
        authority == WILDCARD_AUTHORITY,
        entity,
        WILDCARD_VERSION if version == WILDCARD_VERSION else 0,
        WILDCARD_RESOURCE if resource == WILDCARD_RESOURCE else 0,
    )


def masked(key: Key, shape: Shape) -> Key:
    """The only pattern of this `shape` that matches `key`. So the matching patterns in a dict are found with one
    look-up for each shape."""
    authority, ue_id, version, resource = key
    any_authority, entity, any_version, any_resource = shape
    return (
        WILDCARD_AUTHORITY if any_authority else authority,
        ue_id | entity,
        version | any_version,
        resource | any_resource,
    )


ANY: Final = pattern()
"""`//*/FFFFFFFF/FF/FFFF`. Shared: do not change it."""
