"""The subscriptions that cover the filters of a Zenoh session, and the filters that match a key: compared with all
filters, one by one."""

from __future__ import annotations

import random

import zenoh
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tiers import examples
from transports.listeners import Filter
from transports.zenoh import mapping
from transports.zenoh.receiver import COVERS_MAX, KEY_KNOWN_CHARS, WIDTHS, Covers, Wanted, widened
from uprotocol import uri as uris
from uprotocol.v1.uri_pb2 import UUri

LIMIT = 16
NO_SINK = mapping.NO_SINK


def topic_key(vehicle: int, entity: int, resource: int) -> str:
    return mapping.filter_key(uris.uri(f"v{vehicle}", 0x1000 + entity, 1, 0x8000 + resource), None, "me")


def test_as_many_as_the_limit_have_a_subscription_each() -> None:
    covers = Covers(1_024)
    keys = [topic_key(n // 100, n // 10 % 10, n % 10) for n in range(1_024)]
    assert all(covers.add([key]) for key in keys)
    assert set(covers.subscriptions) == set(keys)
    assert not any(covers.wide)


def test_covers_are_as_narrow_as_there_is_room_for() -> None:
    covers = Covers(LIMIT)
    covers.add(topic_key(0, 0, n) for n in range(LIMIT))
    assert not any(covers.wide)
    for vehicle in range(30):
        covers.add(topic_key(vehicle, entity, 100 + n) for entity in range(10) for n in range(5))
    wide = [key for key in covers.subscriptions if "*" in key]
    assert wide[:COVERS_MAX] == [f"up/v0/{0x1000 + n:X}/0/1/*/{NO_SINK}" for n in range(COVERS_MAX)], "of uEntities"
    assert wide[COVERS_MAX:-1] == [f"up/v{n}/*/*/*/*/{NO_SINK}" for n in range(COVERS_MAX)], "of authorities"
    assert wide[-1] == f"up/*/*/*/*/*/{NO_SINK}"
    assert len(covers.subscriptions) == LIMIT + len(wide)


def test_a_filter_below_a_cover_changes_no_subscription() -> None:
    covers = Covers(1_024)
    covers.add(topic_key(0, 0, n) for n in range(1_025))
    assert any(covers.wide)
    assert len(covers.subscriptions) == 1_025
    assert not any(covers.add([topic_key(0, 0, n)]) for n in range(1_025, 4_000))
    assert not covers.remove([topic_key(0, 0, n) for n in range(1_024, 3_999)])
    assert covers.remove([topic_key(0, 0, 3_999)])
    assert not any(covers.wide)


def test_what_has_a_sink_has_covers_of_its_own() -> None:
    covers = Covers(LIMIT)
    covers.add(topic_key(n, 0, 0) for n in range(100))
    before = set(covers.subscriptions)
    mine = uris.uri("me", 0x10AB, 1)
    covers.add(mapping.filter_key(uris.uri("v1", 0x10AB, 1, 0x8000 + n), mine, "me") for n in range(100))
    assert set(covers.subscriptions) - before == {"up/v1/10AB/0/1/*/me/10AB/0/1/*"}


def addresses() -> st.SearchStrategy[UUri]:
    """From few values, so that filters overlap."""
    return st.builds(
        uris.pattern,
        st.sampled_from(["a", "b", "c", "*"]),
        st.sampled_from([1, 2, 0x2_0001, 0xFFFF_0001, 0xFFFF_FFFF]),
        st.sampled_from([1, 2, 0xFF]),
        st.sampled_from([0x8000, 0x8001, 0x8002, 0xFFFF]),
    )


def filters() -> st.SearchStrategy[str]:
    return st.builds(lambda source, sink: mapping.filter_key(source, sink, "me"), addresses(), st.none() | addresses())


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.booleans(), filters()), max_size=100), st.integers(0, 2**32))
def test_whatever_comes_and_goes_all_filters_are_covered_by_few_subscriptions(
    steps: list[tuple[bool, str]], seed: int
) -> None:
    """Each by one that existed from the beginning: messages on their way through one that ends may be lost."""
    covers, there, first = Covers(4), set[str](), dict[str, set[str]]()
    chance = random.Random(seed)
    for adds, key in steps:
        before = set(covers.subscriptions)
        key = key if adds or not there else chance.choice(sorted(there))
        changed = covers.add([key]) if adds else covers.remove([key])
        there = there | {key} if adds else there - {key}
        assert changed == (set(covers.subscriptions) != before)
        assert len(covers.subscriptions) <= 4 + 2 * (COVERS_MAX * (len(WIDTHS) - 1) + 1)
        assert sum(covers.subscriptions.values()) == len(there)
        if adds:
            first.setdefault(key, {wide for wide in covers.subscriptions if zenoh.KeyExpr(wide).includes(key)})
        first = {key: wide & set(covers.subscriptions) for key, wide in first.items() if key in there}
        assert all(first.values())
    covers.remove(list(there))
    assert not covers.subscriptions
    assert not any(covers.wide)


@given(filters(), st.sampled_from(WIDTHS))
def test_a_wider_key_includes_the_narrower_one(key: str, width: int) -> None:
    assert zenoh.KeyExpr(widened(key, width)).includes(key)
    assert all(zenoh.KeyExpr(widened(key, wider)).includes(widened(key, width)) for wider in WIDTHS if wider > width)


concrete = st.builds(
    uris.uri,
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from([1, 2, 0x2_0001]),
    st.sampled_from([1, 2]),
    st.sampled_from([0x8000, 0x8001, 0x8002]),
)
keys_of_messages = st.builds(
    lambda source, sink: mapping.filter_key(source, sink, "me"), concrete, st.none() | concrete
)


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.booleans(), addresses(), st.none() | addresses()), max_size=20), st.data())
def test_a_key_is_wanted_for_the_filters_that_zenoh_would_match(
    steps: list[tuple[bool, UUri, UUri | None]], data: st.DataObject
) -> None:
    wanted, there = Wanted(), dict[str, Filter]()
    for adds, source, sink in steps:
        key = mapping.filter_key(source, sink, "me")
        if adds or key not in there:
            filter = Filter((uris.key(source), uris.key(sink) if sink is not None else None), source, sink)
            wanted.add(key, filter)
            there[key] = filter
        else:
            wanted.remove(key)
            del there[key]
        of_message = data.draw(keys_of_messages)
        expected = {id(filter) for key, filter in there.items() if zenoh.KeyExpr(key).intersects(of_message)}
        assert {id(filter) for filter in wanted.by(of_message)} == expected
        assert len(wanted) == len(there)
        found = wanted.by(of_message)
        is_exact = len(found) == 1 and wanted.exact.get(of_message) is found[0]
        assert is_exact == (len(expected) == 1 and of_message in there)


def test_a_foreign_key_costs_no_memory_however_long() -> None:
    wanted = Wanted()
    wanted.add(mapping.filter_key(uris.ANY, None, "me"), Filter((uris.key(uris.ANY), None), uris.ANY, None))
    assert len(wanted.by("up/" + "a" * KEY_KNOWN_CHARS + "/1/0/1/8000/{}/{}/{}/{}/{}")) == 1
    assert wanted.by("up/a/1") == ()
    assert set(wanted._known) == {"up/a/1"}
