"""The pure functions of forwarding against models: the owner of an authority, the rules, the receivers of a record,
known ids."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.walk import endpoint as endpoints_
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.ingress import IdWindow
from streamer.walk.paused import Paused
from streamer.walk.view import Rule, Rules, View
from transports.local import LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client.interest import Want

AUTHORITIES = ["a1", "a2", "b1", "c1", "elsewhere"]
TOPICS = [uris.uri(authority, 0x8001, 1, resource) for authority in AUTHORITIES for resource in (0x8001, 0x8002)]

authorities = st.sampled_from(AUTHORITIES)
topics = st.sampled_from(TOPICS)
patterns = st.one_of(topics, st.builds(uris.pattern, st.sampled_from([*AUTHORITIES, "*"])))


class Interest:
    """The interest, as the test sets it."""

    def __init__(self, wants: dict[Any, dict[str, Want]] | None = None) -> None:
        self._wants = wants or {}
        self.version = 0
        self.asked_about: dict[Any, list[str]] = {}  # topics -> whose services have not answered about them

    def wants(self, topic: UUri) -> Mapping[str, Want]:
        return self._wants.get(uris.key(topic), {})

    wants_by_name = wants

    def on_change(self, callback: Any) -> None:
        """No test changes it while the view is used."""

    def changed_since(self, version: int) -> None:
        """Of anything."""

    def undecided(self, topic: UUri) -> list[str]:
        return self.asked_about.get(uris.key(topic), [])

    def set(self, topic: UUri, wants: dict[str, Want]) -> None:
        self._wants[uris.key(topic)] = wants
        self.version += 1


LOGS: Any = (object(), object())  # what they hold does not matter here


def viewed(endpoints: Endpoints, rules: Rules, interest: Interest) -> View:
    return View(endpoints, rules, interest, LOGS, Paused(Path(), endpoints, ""))  # type: ignore[arg-type]


def network(*, wildcard: bool = False) -> Endpoints:
    transport = LocalTransport.on(LocalNetwork(), LocalUriProvider("vehicle1", 1, 1))
    third = ["c1", "*"] if wildcard else ["c1"]
    return Endpoints(
        [Endpoint("a", ["a1", "a2"], transport), Endpoint("b", ["b1"], transport), Endpoint("c", third, transport)]
    )


@given(
    st.dictionaries(authorities, st.sampled_from("abc")),
    st.sampled_from([None, *"abc"]),
    st.lists(authorities, max_size=20),
)
def test_an_authority_is_its_endpoints_or_the_wildcards(
    named: dict[str, str], wildcard: str | None, asked: list[str]
) -> None:
    mine = {name: [authority for authority, owner in named.items() if owner == name] for name in "abc"}
    if wildcard is not None:
        mine[wildcard].append("*")
    transport = LocalTransport.on(LocalNetwork(), LocalUriProvider("vehicle1", 1, 1))
    endpoints = Endpoints([Endpoint(name, those, transport) for name, those in mine.items()])
    for authority in asked * 2:  # twice: the second time from the cache
        owner = endpoints.owner(authority)
        assert (None if owner is None else owner.name) == named.get(authority, wildcard)


def test_made_up_authorities_do_not_grow_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_, "AUTHORITIES_CACHED_MAX", 10)
    endpoints = network(wildcard=True)
    for number in range(100):
        owner = endpoints.owner(f"v{number}")
        assert owner is not None
        assert owner.name == "c"
        assert len(endpoints._owners) <= 10
    assert endpoints.owner("a1") is endpoints["a"]


@given(st.lists(patterns, max_size=3), st.lists(patterns, max_size=3), topics)
def test_deny_is_stronger_than_allow_and_nothing_allowed_is_everything(
    allow: list[UUri], deny: list[UUri], address: UUri
) -> None:
    rule = Rule("a", "b", allow, deny)
    allowed = not allow or any(uris.matches(pattern, address) for pattern in allow)
    assert rule.allows(address) == (allowed and not any(uris.matches(pattern, address) for pattern in deny))


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.sampled_from("abc")), max_size=30))
def test_rules_are_a_table_whose_version_rises_with_each_change(steps: list[tuple[bool, str, str]]) -> None:
    rules, model = Rules(), set()
    for add, ingress, egress in steps:
        version, possible = rules.version, (ingress, egress) not in model
        if not add:
            rules.replace([rule for rule in rules if (rule.ingress, rule.egress) != (ingress, egress)])
            model.discard((ingress, egress))
        elif possible:
            rules.add(Rule(ingress, egress))
            model.add((ingress, egress))
        else:
            with pytest.raises(UStatusError) as caught:
                rules.add(Rule(ingress, egress))
            assert caught.value.code == UCode.ALREADY_EXISTS
        assert (rules.version != version) is (possible or not add)
        assert {(rule.ingress, rule.egress) for rule in rules} == model
        assert sorted(rules.egresses(ingress)) == sorted(to for since, to in model if since == ingress)
        assert (rules.between(ingress, egress) is not None) is ((ingress, egress) in model)


periods = st.sampled_from([None, 0, 100])
wanted = st.dictionaries(authorities, st.builds(Want, periods), max_size=5)
rule_tables = st.dictionaries(
    st.tuples(st.sampled_from("abc"), st.sampled_from("abc")).filter(lambda pair: pair[0] != pair[1]),
    st.lists(patterns, max_size=1),
)


@given(
    rule_tables,
    st.dictionaries(st.sampled_from(range(len(TOPICS))), wanted),
    st.booleans(),
    topics,
    st.none() | authorities,
)
def test_a_record_goes_to_whom_rules_and_interest_or_its_sink_say(
    denied: dict[tuple[str, str], list[UUri]],
    interest: dict[int, dict[str, Want]],
    wildcard: bool,
    source: UUri,
    sink: str | None,
) -> None:
    endpoints, rules = network(wildcard=wildcard), Rules()
    for (ingress, egress), deny in denied.items():
        rules.add(Rule(ingress, egress, (), deny))
    view = viewed(endpoints, rules, Interest({uris.key(TOPICS[n]): wants for n, wants in interest.items()}))
    decision = view.decide(source, None if sink is None else uris.uri(sink, 0x9001, 1, 0), LOGS[0])
    assert not decision.open

    def home(authority: str) -> str | None:
        named = {"a1": "a", "a2": "a", "b1": "b", "c1": "c"}
        return named.get(authority, "c" if wildcard else None)

    origin = home(source.authority_name)
    wants = interest.get(TOPICS.index(source), {}) if sink is None else {sink: Want()}
    expected: dict[str, set[tuple[str, int | None]]] = {}
    for authority, want in wants.items():
        peer = home(authority)
        if origin is None or peer is None or peer == origin or (origin, peer) not in denied:
            continue
        if not any(uris.matches(pattern, source) for pattern in denied[origin, peer]):
            expected.setdefault(peer, set()).add((authority, want.sample_period_ms or None))
    assert {
        leg.peer.name: {(target.authority, target.period_ms) for target in leg.targets} for leg in decision.legs
    } == expected
    if sink is None and origin is not None:
        assert view.leaves(endpoints[origin], source) is bool(expected)
    for other in endpoints:
        assert other.name == origin or not view.leaves(other, source)


@pytest.mark.parametrize(
    ("scope", "peers"),
    [
        ("a1", ["b", "c"]),  # the topic's own service knows the services of all who want it
        ("b1", ["b"]),  # a subscriber's own service knows its clients
        ("a2", []),  # neither the topic's nor a peer's
        ("unknown", []),
        ("*", ["b", "c"]),
    ],
)
def test_a_peer_is_open_while_a_service_that_may_name_it_has_not_answered(scope: str, peers: list[str]) -> None:
    interest, rules = Interest({uris.key(TOPICS[0]): {"b1": Want()}}), Rules()
    for egress in "bc":
        rules.add(Rule("a", egress))
    interest.asked_about = {uris.key(TOPICS[0]): [scope]}
    view = viewed(network(), rules, interest)
    decision = view.decide(TOPICS[0], None, LOGS[0])
    assert [peer.name for peer in decision.open] == peers
    assert [leg.peer.name for leg in decision.legs] == ["b"]  # who is known to want it need not wait
    assert not view.decide(TOPICS[0], uris.parse("//b1/1/1/0"), LOGS[0]).open  # the sink says it all
    assert not view.decide(TOPICS[1], None, LOGS[0])
    rules.replace([Rule("a", "c")])
    assert "b" not in [peer.name for peer in view.decide(TOPICS[0], None, LOGS[0]).open]


def test_a_subscription_counts_from_its_place_in_each_log() -> None:
    interest, rules = Interest({uris.key(TOPICS[0]): {"b1": Want(), "c1": Want(None, (9, 4))}}), Rules()
    rules.add(Rule("a", "b"))
    rules.add(Rule("a", "c"))
    view = viewed(network(), rules, interest)

    def since(log: Any) -> dict[str, int]:
        return {
            target.authority: target.since for leg in view.decide(TOPICS[0], None, log).legs for target in leg.targets
        }

    assert since(LOGS[0]) == {"b1": 0, "c1": 9}
    assert since(LOGS[1]) == {"b1": 0, "c1": 4}


@given(st.lists(st.integers(0, 40), max_size=200), st.integers(2, 20))
def test_an_id_is_known_for_half_the_window_at_least(taken: list[int], ids_max: int) -> None:
    window: IdWindow = IdWindow(ids_max)
    distinct: list[int] = []  # in the order in which they were last let in
    for number in taken:
        known = not window.take(number.to_bytes(2))
        if number in distinct[-(ids_max // 2) :]:
            assert known
        if known:
            assert number in distinct[-ids_max:]
        else:
            distinct = [one for one in distinct if one != number] + [number]


def test_a_forgotten_id_is_taken_again() -> None:
    window = IdWindow(4)
    assert all(window.take(letter.encode()) for letter in string.ascii_lowercase[:3])
    for letter in "abc":
        window.forget(letter.encode())
        assert window.take(letter.encode())


@given(st.integers(1, 1_000), st.integers(0, 10_000), st.integers(0, 40))
def test_a_pause_lies_between_its_limits_and_may_grow(min_ms: int, more_ms: int, attempts: int) -> None:
    backoff = Backoff(min_ms, min_ms + more_ms)
    for attempt in range(attempts):
        assert min_ms <= backoff.next_ms() <= max(min_ms, min(min_ms + more_ms, min_ms << attempt))
    backoff.reset()
    assert backoff.next_ms() == min_ms
