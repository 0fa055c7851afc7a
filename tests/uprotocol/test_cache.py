"""The bounded dict of values that can be computed again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uprotocol import cache
from uprotocol.cache import Cache, raise_streams_max


@given(st.integers(1, 5), st.lists(st.integers(0, 9)))
def test_it_never_holds_more_and_always_the_newest(entries_max: int, keys: list[int]) -> None:
    kept: Cache[int, int] = Cache(entries_max)
    for place, key in enumerate(keys):
        kept[key] = place
        assert len(kept) <= entries_max
        assert kept[key] == place


def test_what_is_there_already_is_replaced_and_clears_nothing() -> None:
    cache: Cache[str, int] = Cache(2)
    cache["a"], cache["b"] = 1, 2
    cache["a"] = 3
    assert cache == {"a": 3, "b": 2}


def test_there_is_room_for_the_streams_that_most_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Existing caches have the new limit, too."""
    monkeypatch.setattr(cache, "streams_max", 2)
    of_streams, small = Cache[int, int](), Cache[int, int](1)
    raise_streams_max(5)
    raise_streams_max(3)
    for number in range(5):
        of_streams[number] = small[number] = number
    assert (cache.streams_max, len(of_streams), len(small)) == (5, 5, 1)
    of_streams[5] = 5
    assert of_streams == {5: 5}
