"""Numbers against a set of Python's: both say the same, whatever is added and taken away."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from history.log.numbers import Numbers

# near each other, and far: in one page, at the edges of pages, in pages of their own
NUMBER = st.one_of(st.integers(0, 600), st.integers(0, (1 << 32) - 1))
NUMBERS = st.frozensets(NUMBER, max_size=40)


@given(NUMBERS, st.lists(st.tuples(st.booleans(), NUMBERS), max_size=8), NUMBERS)
def test_it_is_a_set(begin: frozenset[int], changes: list[tuple[bool, frozenset[int]]], asked: frozenset[int]) -> None:
    model, numbers = set(begin), Numbers(begin)
    for is_added, those in changes:
        if is_added:
            model |= those
            for one in those:
                numbers.add(one)
        else:
            model -= those
            numbers.difference_update(those)
    assert sorted(numbers) == sorted(model)
    assert len(numbers) == len(model)
    assert bool(numbers) == bool(model)
    assert [one in numbers for one in asked] == [one in model for one in asked]
    assert numbers & asked == model & asked
    # as a chunk asks
    assert (asked <= numbers) == (asked <= model)
    assert (frozenset(model) <= numbers) is True
    assert numbers.isdisjoint(asked) == model.isdisjoint(asked)


def test_three_million_of_them_take_less_than_a_byte_each() -> None:
    numbers = Numbers(range(1, 30_001))
    assert numbers.memory_bytes < 30_000
    numbers.difference_update(range(1, 30_001))
    assert numbers.memory_bytes == 0


def test_it_may_change_while_it_is_iterated() -> None:
    numbers = Numbers(range(1_000))
    seen = []
    for number in numbers:
        seen.append(number)
        numbers.difference_update([number + 500])
        numbers.add(2_000 + number)
    assert set(range(500)) <= set(seen)
    assert len(seen) == len(set(seen))
