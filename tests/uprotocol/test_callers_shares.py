"""Capacity that owners share: the limits of each and of all, and the queue that drops items of the largest owner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from uprotocol.communication.shares import STALE_MAX, FairQueue, Full, Shares

COUNT_MAX, BYTES_MAX = 8, 100


def test_each_limit_is_named() -> None:
    shares = Shares[str](8, 100, share=4)
    assert shares.full("a", 1_000) is None, "the first piece fits, whatever its size"
    shares.add("a", 1, 20)
    assert shares.full("a", 6) == Full(25, is_of_bytes=True, is_of_one=True)
    assert shares.full("a", 5) is None
    assert shares.full("a", 5, promised=1) == Full(25, is_of_bytes=True, is_of_one=True)
    assert shares.full("b", 81) == Full(100, is_of_bytes=True, is_of_one=False)
    assert shares.full("b", 80, promised_to_all=1) == Full(100, is_of_bytes=True, is_of_one=False)
    shares.add("a", 1)
    assert shares.full("a") == Full(2, is_of_bytes=False, is_of_one=True)
    shares.add("b", 6)
    assert shares.full("c") == Full(8, is_of_bytes=False, is_of_one=False)
    assert (shares.most(), shares.pieces_of("b"), shares.pieces_of("c")) == ("b", 6, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40))))
def test_every_limit_is_kept_and_removed_pieces_leave_nothing(asked: list[tuple[str, int]]) -> None:
    shares = Shares[str](6, 100, share=2)
    added = []
    for who, size in asked:
        if shares.full(who, size) is None:
            shares.add(who, 1, size)
            added.append((who, size))
        assert shares.pieces <= 6
        assert shares.bytes <= 100
        assert shares.pieces_of(who) <= 3
    for who, size in added:
        shares.add(who, -1, -size)
    assert repr(shares) == "Shares(0 pieces of 0 bytes, 0 owners)"


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 60)), max_size=200))
def test_items_of_the_largest_owner_are_dropped(arrived: list[tuple[str, int]]) -> None:
    queue: FairQueue[tuple[str, int, int]] = FairQueue(COUNT_MAX, BYTES_MAX)
    model: dict[str, list[tuple[str, int, int]]] = {}

    def weight(owner: str) -> float:
        return max(sum(size for _, _, size in model[owner]) / BYTES_MAX, len(model[owner]) / COUNT_MAX)

    for number, (owner, size) in enumerate(arrived):
        item = (owner, number, size)
        queue.add(owner, item, size)
        model.setdefault(owner, []).append(item)
        while queue.is_over:
            dropped = queue.drop()
            assert weight(dropped[0]) == max(weight(one) for one in model if model[one])
            assert model[dropped[0]].pop(0) == dropped
        kept = [one for those in model.values() for one in those]
        assert (queue.used.pieces, queue.used.bytes) == (len(kept), sum(size for _, _, size in kept))
        assert len(queue) <= COUNT_MAX
        assert queue.used.bytes <= BYTES_MAX
    taken = [queue.take()[0] for _ in range(len(queue))]
    for owner in "abcdef":
        assert [item for item in taken if item[0] == owner] == model.get(owner, [])
    assert [item[0] for item in taken[: len([one for one in model.values() if one])]] == list(
        dict.fromkeys(item[0] for item in taken)
    )


def test_memory_is_bounded_by_items_not_by_past_owners() -> None:
    queue: FairQueue[int] = FairQueue(100, 1 << 20)
    for number in range(20_000):
        queue.add(f"made up {number}", number, 10)
        while queue.is_over:
            queue.drop()
    assert len(queue._items) == 100
    assert len(queue._heaviest) <= 2 * 101 + STALE_MAX
