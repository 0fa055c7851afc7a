"""Room that several share: whoever has most gives way, its oldest first, and nobody else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.quotas import shares
from streamer.quotas.shares import PerMinute, Shares

COUNT_MAX, BYTES_MAX = 8, 100


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 60)), max_size=200))
def test_whoever_has_most_gives_way(arrived: list[tuple[str, int]]) -> None:
    room: Shares[tuple[str, int, int]] = Shares(COUNT_MAX, BYTES_MAX)
    model: dict[str, list[tuple[str, int, int]]] = {}

    def weight(owner: str) -> float:
        return max(sum(size for _, _, size in model[owner]) / BYTES_MAX, len(model[owner]) / COUNT_MAX)

    for number, (owner, size) in enumerate(arrived):
        item = (owner, number, size)
        room.add(owner, item, size)
        model.setdefault(owner, []).append(item)
        while room.is_over:
            gone = room.give_way()
            assert weight(gone[0]) == max(weight(one) for one in model if model[one])
            assert model[gone[0]].pop(0) == gone
        kept = [one for those in model.values() for one in those]
        assert (room.count, room.bytes) == (len(kept), sum(size for _, _, size in kept))
        assert room.count <= COUNT_MAX
        assert room.bytes <= BYTES_MAX
    taken = [room.take()[0] for _ in range(len(room))]
    for owner in "abcdef":
        assert [item for item in taken if item[0] == owner] == model.get(owner, [])
    assert [item[0] for item in taken[: len([one for one in model.values() if one])]] == list(
        dict.fromkeys(item[0] for item in taken)
    )


def test_many_owners_cost_no_more_memory_than_their_items() -> None:
    room: Shares[int] = Shares(100, 1 << 20)
    for number in range(20_000):
        room.add(f"made up {number}", number, 10)
        while room.is_over:
            room.give_way()
    assert len(room._owners) == 100
    assert len(room._heaviest) <= 2 * 101 + shares.STALE_MAX


def test_kinds_beyond_the_limit_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "ALL", 1 << 20)
    limit = PerMinute(1, 1_000, lambda: 0.0)
    told = [limit.happened(number, 1).told for number in range(shares.KINDS_MAX + 100)]
    assert told == [True] * (shares.KINDS_MAX + 1) + [False] * 99


def test_kinds_without_end_are_bounded_in_all_until_the_minute_is_over() -> None:
    now = 0.0
    limit = PerMinute(10, 1_000, lambda: now)
    granted = [limit.happened(number, 100) for number in range(1_000)]
    assert sum(one.told for one in granted) == 10 * shares.ALL
    assert sum(one.whole for one in granted) == 10 * shares.ALL
    now = 60.0
    granted = [limit.happened(number, 500) for number in range(1_000)]
    assert sum(one.whole for one in granted) == 2 * shares.ALL
    assert len(limit._kinds) <= shares.KINDS_MAX + 1
