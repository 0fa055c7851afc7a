"""The bounded dict of what can be worked out again."""

from hypothesis import given
from hypothesis import strategies as st

from uprotocol.cache import Cache


@given(st.integers(1, 5), st.lists(st.integers(0, 9)))
def test_it_never_holds_more_and_always_the_newest(entries_max: int, keys: list[int]) -> None:
    cache: Cache[int, int] = Cache(entries_max)
    for place, key in enumerate(keys):
        cache[key] = place
        assert len(cache) <= entries_max
        assert cache[key] == place


def test_what_is_there_already_is_replaced_and_clears_nothing() -> None:
    cache: Cache[str, int] = Cache(2)
    cache["a"], cache["b"] = 1, 2
    cache["a"] = 3
    assert cache == {"a": 3, "b": 2}
