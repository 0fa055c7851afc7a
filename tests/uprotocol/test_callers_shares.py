"""Room that callers share: a part for each, in pieces and in bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from uprotocol.communication.shares import Full, Shares


def test_each_limit_is_named() -> None:
    room = Shares[str](8, 100, share=4)
    assert room.full("a", 1_000) is None, "where nothing is there one has room, whatever its size"
    room.add("a", 1, 20)
    assert room.full("a", 6) == Full(25, is_of_bytes=True, is_of_one=True)
    assert room.full("a", 5) is None
    assert room.full("a", 5, promised=1) == Full(25, is_of_bytes=True, is_of_one=True)
    assert room.full("b", 81) == Full(100, is_of_bytes=True, is_of_one=False)
    assert room.full("b", 80, promised_to_all=1) == Full(100, is_of_bytes=True, is_of_one=False)
    room.add("a", 1)
    assert room.full("a") == Full(2, is_of_bytes=False, is_of_one=True)
    room.add("b", 6)
    assert room.full("c") == Full(8, is_of_bytes=False, is_of_one=False)
    assert (room.most(), room.pieces_of("b"), room.pieces_of("c")) == ("b", 6, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40))))
def test_what_has_room_keeps_every_limit_and_what_is_gone_leaves_nothing(asked: list[tuple[str, int]]) -> None:
    room = Shares[str](6, 100, share=2)
    taken = []
    for who, size in asked:
        if room.full(who, size) is None:
            room.add(who, 1, size)
            taken.append((who, size))
        assert room.pieces <= 6
        assert room.bytes <= 100
        assert room.pieces_of(who) <= 3
    for who, size in taken:
        room.add(who, -1, -size)
    assert repr(room) == "Shares(0 pieces of 0 bytes, 0 callers)"
