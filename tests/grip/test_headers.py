"""The Grip headers: what backends say, and Grip-Last."""

from __future__ import annotations

import base64
import contextlib

import pytest
from gripcontrol import Channel, create_grip_channel_header
from hypothesis import given
from hypothesis import strategies as st

from streamer.grip.headers import (
    CHANNELS_PER_HOLD_MAX,
    HeldChannel,
    Instruction,
    KeepAlive,
    NextLink,
    grip_last,
)
from streamer.grip.items import NO_TEXT
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

NOTHING = Instruction(None, (), None, None, None, None)
IDS = st.text(min_size=1, max_size=40).filter(lambda text: not NO_TEXT.search(text))
NAMES = IDS.filter(lambda text: text == text.strip() and not set(text) & set(',;"'))


def of(*lines: str) -> Instruction:
    return Instruction.of([(name, value) for name, _, value in (line.partition(":") for line in lines)])


def test_the_headers_of_the_document() -> None:
    assert of(
        "Content-Type: text/plain",
        "Grip-Hold: stream",
        "Grip-Channel: fruit; prev-id=3",
        "Grip-Link: </fruit/?after=3>; rel=next; timeout=120",
    ) == Instruction("stream", (HeldChannel("fruit", "3"),), NextLink("/fruit/?after=3", 120), None, None, None)


def test_what_is_not_there_and_what_is_not_known_is_nothing() -> None:
    assert of("Server: x", "Grip-Set-Meta: a=b", 'Grip-Unknown: ,;"') == NOTHING


def test_a_held_response() -> None:
    assert of("grip-hold: response", "GRIP-CHANNEL: a", "Grip-Timeout: 30", "Grip-Status: 202 Taken in") == Instruction(
        "response", (HeldChannel("a", None),), None, 30, None, 202, "Taken in"
    )


def test_several_channels_in_one_line_and_in_several() -> None:
    said = of(
        'Grip-Channel: a; prev-id=1; filter=skip-self, b;prev-id="x,\\"y;"',
        "Grip-Channel: c",
        "Grip-Channel: a;PREV-ID=2",
    )
    assert said.channels == (HeldChannel("a", "2"), HeldChannel("b", 'x,"y;'), HeldChannel("c", None))


@given(st.dictionaries(NAMES, st.none() | NAMES, min_size=1))
def test_what_gripcontrol_writes_is_read(channels: dict[str, str | None]) -> None:
    line = create_grip_channel_header([Channel(name, prev_id) for name, prev_id in channels.items()])
    if len(channels) <= CHANNELS_PER_HOLD_MAX:
        assert of(f"Grip-Channel:{line}").channels == tuple(map(HeldChannel, channels, channels.values()))


@given(st.dictionaries(NAMES, IDS, min_size=1, max_size=5))
def test_grip_last_has_one_value_for_each_channel(last_ids: dict[str, str]) -> None:
    """Read with the syntax of Grip-Channel, which is the same."""
    values = grip_last(last_ids)
    assert len(values) == len(last_ids)
    said = of(*(f"Grip-Channel:{value.replace('; last-id=', '; prev-id=', 1)}" for value in values))
    assert dict(said.channels) == last_ids


def test_grip_last_is_as_in_the_document() -> None:
    assert grip_last({"fruit": "4", "ü": "a b"}) == ["fruit; last-id=4", "ü; last-id=a b"]


@pytest.mark.parametrize(
    ("value", "link"),
    [
        ("</a?b=1,2;3>; rel=next", NextLink("/a?b=1,2;3", None)),
        ('<http://h/a>; timeout=0; rel="prev next"', NextLink("http://h/a", 0)),
        ("</gone>; rel=gone, </b>;rel=NEXT;x", NextLink("/b", None)),
        ("</gone>; rel=gone", None),
        ("</a>", None),
        ("nonsense", None),
        ("", None),
    ],
)
def test_links(value: str, link: NextLink | None) -> None:
    assert of(f"Grip-Link: {value}").link == link


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("a, b", KeepAlive(b"a, b", 55, True)),
        ("\\n; format=cstring; timeout=20; mode=interval", KeepAlive(b"\n", 20, False)),
        ("a\\x3b\\r\\\\; format=cstring", KeepAlive(b"a;\r\\", 55, True)),
        ("AP8=; format=base64; mode=idle", KeepAlive(b"\0\xff", 55, True)),
        ("\udcff; format=raw", KeepAlive(b"\xff", 55, True)),  # as aiohttp decodes an octet that is no UTF-8
    ],
)
def test_keep_alives(value: str, kept: KeepAlive) -> None:
    assert of(f"Grip-Keep-Alive: {value}").keep_alive == kept


@given(st.binary(min_size=1, max_size=100))
def test_each_octet_can_be_kept_alive_with(content: bytes) -> None:
    escaped = "".join(f"\\x{octet:02X}" for octet in content)
    for value in (f"{escaped};format=cstring", f"{base64.b64encode(content).decode()};format=base64"):
        assert of(f"Grip-Keep-Alive: {value}").keep_alive == KeepAlive(content, 55, True)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("Grip-Hold: forever", "Grip-Hold: expected stream or response, got 'forever'"),
        ("Grip-Hold:", "Grip-Hold: expected stream or response, got ''"),
        ("Grip-Channel: ;prev-id=1", "Grip-Channel: expected the name of a channel, got none"),
        ('Grip-Channel: a; prev-id="1', "Grip-Channel: expected a closing quote"),
        ("Grip-Channel: a\udcff", "Grip-Channel: expected UTF-8"),
        (f"Grip-Channel: a; prev-id={'x' * 1_025}", "1024 bytes at most"),
        (f"Grip-Channel: {','.join(map(str, range(65)))}", "Grip-Channel: expected 64 channels at most, got more"),
        ("Grip-Link: /a; rel=next", "Grip-Link: expected an address in angle brackets, got '/a'"),
        ("Grip-Link: <>; rel=next", "Grip-Link: expected an address in angle brackets, got '<>'"),
        ("Grip-Link: </a; rel=next", "Grip-Link: expected an address in angle brackets, got '</a'"),
        (f"Grip-Link: <{'x' * 4_097}>; rel=next", "Grip-Link: expected an address of 4096 bytes at most"),
        ("Grip-Link: </a>; rel=next; timeout=-1", "Grip-Link: expected a timeout in whole seconds"),
        ("Grip-Timeout: 1.5", "Grip-Timeout: expected a timeout in whole seconds, 31536000 at most, got '1.5'"),
        ("Grip-Timeout: 99999999999", "Grip-Timeout: expected a timeout in whole seconds"),
        ("Grip-Timeout: ٣", "Grip-Timeout: expected a timeout in whole seconds"),
        ("Grip-Keep-Alive:", "Grip-Keep-Alive: expected what to write, got nothing"),
        ("Grip-Keep-Alive: a; mode=never", "Grip-Keep-Alive: expected the mode idle or interval, got 'never'"),
        ("Grip-Keep-Alive: a; format=hex", "Grip-Keep-Alive: expected the format raw, cstring or base64, got 'hex'"),
        ("Grip-Keep-Alive: a\\; format=cstring", "Grip-Keep-Alive: expected the escapes"),
        ("Grip-Keep-Alive: \\x1; format=cstring", "Grip-Keep-Alive: expected the escapes"),
        ("Grip-Keep-Alive: a; format=base64", "Grip-Keep-Alive: expected base64, got 'a'"),
        (f"Grip-Keep-Alive: {'a' * 4_097}", "Grip-Keep-Alive: expected 4096 bytes at most, got 4097"),
        ("Grip-Status: 1000", "Grip-Status: expected a status from 200 to 599 and its reason, got '1000'"),
        ("Grip-Status: OK", "Grip-Status: expected a status"),
    ],
)
def test_a_wrong_header_is_refused_by_its_name(line: str, why: str) -> None:
    with pytest.raises(UStatusError) as error:
        of(line)
    assert error.value.code == UCode.INVALID_ARGUMENT
    assert why in error.value.message


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Grip-Hold", "Grip-Channel", "Grip-Link", "Grip-Keep-Alive", "Grip-Status"]), st.text()
        )
    )
)
def test_any_header_is_read_or_refused(headers: list[tuple[str, str]]) -> None:
    with contextlib.suppress(UStatusError):
        Instruction.of(headers)
        return
    with pytest.raises(UStatusError, match=r"^INVALID_ARGUMENT: Grip-"):
        Instruction.of(headers)
