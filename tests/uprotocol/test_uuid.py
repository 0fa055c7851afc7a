"""UUIDv7: vectors, invalid input, and ids that always increase."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid as standard

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uprotocol import uuid as uuids
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uuid_pb2 import UUID

spec = pytest.mark.spec

SMALL = UUID(msb=0x0000_0000_0001_7000, lsb=0x8010_1010_1010_1A1A)
LARGE = UUID(msb=0xFFFF_FFFF_FFFF_7000, lsb=0x8010_FFAA_BB99_7700)

any_v7 = st.builds(
    lambda time, a, b: UUID(msb=time << 16 | 0x7000 | a, lsb=0b10 << 62 | b),
    st.integers(0, 2**48 - 1),
    st.integers(0, 2**12 - 1),
    st.integers(0, 2**62 - 1),
)


@spec("req~uuid-hex-and-dash~1")
def test_writes_and_reads_the_hyphenated_form() -> None:
    text = "00000000-0001-7000-8010-101010101a1a"
    assert uuids.format(SMALL) == text
    assert uuids.parse(text) == SMALL
    assert uuids.parse(text.upper()) == SMALL


@spec("req~uuid-proto~1")
@spec("req~uuid-type~1")
@pytest.mark.parametrize(
    ("id", "hexadecimal"),
    [(SMALL, "090070010000000000111a1a101010101080"), (LARGE, "090070ffffffffffff11007799bbaaff1080")],
)
def test_reads_protobuf_bytes(id: UUID, hexadecimal: str) -> None:
    assert UUID.FromString(bytes.fromhex(hexadecimal)) == id
    assert UUID.FromString(id.SerializeToString()) == id


@spec("req~uuid-hex-and-dash~1")
@spec("dsn~uuid-spec~1")
@pytest.mark.parametrize(
    "text",
    [
        *(f"00000000-0001-{version:x}000-8000-0000000000ab" for version in range(16) if version != 7),
        *(f"00000000-0001-7000-{variant}000-0000000000ab" for variant in "04c"),
        *("", "00000000", "0000000000017000801010101010101a1a", "{00000000-0001-7000-8010-101010101a1a}"),
        *(
            "00000000-0001-7000-8010-101010101a1",
            "00000000-0001-7000-8010-101010101a1a ",
            "00000000-0001-7000-8010-101010101a1g",
        ),
        *("0000000-00001-7000-8010-101010101a1a", "urn:uuid:00000000-0001-7000-8010-101010101a1a"),
    ],
)
def test_refuses_what_is_no_uuid_7(text: str) -> None:
    with pytest.raises(UStatusError) as caught:
        uuids.parse(text)
    assert caught.value.code == UCode.INVALID_ARGUMENT


@given(any_v7)
def test_every_form_is_read_back(id: UUID) -> None:
    assert uuids.is_v7(id)
    assert uuids.parse(uuids.format(id)) == id
    assert uuids.from_bytes(uuids.to_bytes(id)) == id
    assert standard.UUID(bytes=uuids.to_bytes(id)) == standard.UUID(uuids.format(id))


@given(st.one_of(st.binary(max_size=20), st.binary(min_size=16, max_size=16)))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        id = uuids.from_bytes(data)
    except UStatusError as error:
        refused = error
    else:
        assert uuids.to_bytes(id) == data
        return
    assert refused.code == UCode.INVALID_ARGUMENT


@spec("dsn~uuid-spec~1")
@spec("local~uuid-time")
@given(st.integers(0, 2**48 - 1), st.binary(min_size=8, max_size=8))
def test_a_new_id_holds_its_time(now: int, noise: bytes) -> None:
    id = uuids.UUIDGenerator(lambda: now, lambda _: noise)()
    assert uuids.is_v7(id)
    assert standard.UUID(uuids.format(id)).version == 7
    assert standard.UUID(uuids.format(id)).variant == standard.RFC_4122
    assert uuids.time_ms(id) == now


@spec("dsn~up-attributes-id~1")
@given(st.lists(st.integers(0, 2**47), min_size=1, max_size=50), st.integers(1, 200))
def test_ids_rise_whatever_the_clock_does(clock: list[int], per_reading: int) -> None:
    readings = [reading for reading in clock for _ in range(per_reading)]
    following = iter(readings)
    new = uuids.UUIDGenerator(lambda: next(following))
    made = [uuids.to_bytes(new()) for _ in readings]
    assert made == sorted(set(made))


@spec("dsn~up-attributes-id~1")
def test_more_ids_than_a_millisecond_counts_borrow_from_the_next() -> None:
    new = uuids.UUIDGenerator(lambda: 1_000)
    made = [new() for _ in range(5_000)]
    assert len({uuids.to_bytes(id) for id in made}) == 5_000
    assert all(uuids.is_v7(id) for id in made)
    assert {uuids.time_ms(id) for id in made} == {1_000, 1_001}


@spec("dsn~up-attributes-id~1")
def test_threads_get_ids_of_their_own() -> None:
    made: list[bytes] = []

    def make() -> None:
        made.extend([uuids.to_bytes(uuids.new()) for _ in range(2_000)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8_000


@pytest.mark.parametrize(
    "id", [UUID(), UUID(msb=SMALL.msb), UUID(lsb=SMALL.lsb), UUID(msb=SMALL.msb, lsb=0xC000 << 48)]
)
def test_protobuf_can_hold_what_is_no_uuid_7(id: UUID) -> None:
    assert not uuids.is_v7(id)


@spec("dsn~up-attributes-id~1")
def test_a_forked_child_makes_other_ids() -> None:
    script = (
        "import os, uprotocol.uuid as u; u.new(); child = os.fork()\n"
        "os.write(1, u.new().lsb.to_bytes(8, 'big'))\n"
        "if child: os.waitpid(child, 0)"
    )
    written = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60).stdout
    assert len(written) == 16
    assert written[:8] != written[8:]


def test_a_simulation_gives_the_clock_and_the_ids() -> None:
    numbers = iter((0, 2**63 - 1))
    generate = uuids.UUIDGenerator(lambda: 7_000, lambda count: next(numbers).to_bytes(count, "big"))
    with uuids.simulated(lambda: 7_000_999_999, generate):
        assert uuids.now_ms() == 7_000
        ids = [uuids.new(), uuids.new()]
    assert [uuids.time_ms(id) for id in ids] == [7_000, 7_000]
    assert [id.lsb for id in ids] == [0x8000_0000_0000_0000, 0xBFFF_FFFF_FFFF_FFFF]
    assert uuids.now_ms() > 1_700_000_000_000
    assert uuids.time_ms(uuids.new()) > 1_700_000_000_000
