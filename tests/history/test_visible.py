"""What a caller may read, as a reader keeps it: the meaning of VisibleTopics, and one text for one meaning."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.records.visible import EVERYTHING_VISIBLE, Visible
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import TopicPattern, VisibleTopics
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

HOSTS = ["a", "b", "a.c", "b.c", "a.b.c"]
PATTERNS = ["*", "*.c", "*.b.c", *HOSTS]
NUMBERS = list(itertools.product([1, 0x1_0001], [1], [0x8000, 0x8001]))
TOPICS = [uris.uri(host, *numbers) for host in HOSTS for numbers in NUMBERS]

patterns = st.lists(
    st.builds(
        lambda host, ue_id, version, resource: TopicPattern(
            topic=UUri(authority_name=host, ue_id=ue_id, ue_version_major=version, resource_id=resource)
        ),
        st.sampled_from(PATTERNS),
        st.sampled_from([1, 0x1_0001, 0xFFFF_0001, 0x1_FFFF, 0xFFFF_FFFF]),
        st.sampled_from([1, 2, 0xFF]),
        st.sampled_from([0x8000, 0x8001, 0xFFFF]),
    ),
    max_size=2,
)
rules_ = st.builds(
    VisibleTopics,
    allow=patterns,
    deny=patterns,
    origins=st.lists(
        st.builds(
            VisibleTopics.Origin,
            authorities=st.lists(st.sampled_from(PATTERNS), max_size=3),
            allow=patterns,
            deny=patterns,
            hidden=st.booleans(),
        ),
        max_size=4,
    ),
)


def is_in(host: str, pattern: str) -> bool:
    return pattern in ("*", host) or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def is_one_of(topic: UUri, given: object) -> bool:
    return any(
        is_in(topic.authority_name, one.topic.authority_name)
        and uris.matches(uris.uri("*", *uris.key(one.topic)[1:]), topic)
        for one in given  # type: ignore[attr-defined]
    )


def expected(rules: VisibleTopics, topic: UUri) -> bool:
    """As the proto says it."""
    if is_one_of(topic, rules.deny):
        return False
    if rules.allow:
        return is_one_of(topic, rules.allow)
    for origin in rules.origins:
        if any(is_in(topic.authority_name, one) for one in origin.authorities):
            is_allowed = not origin.allow or is_one_of(topic, origin.allow)
            return is_allowed and not origin.hidden and not is_one_of(topic, origin.deny)
    return False


@given(rules_)
def test_it_means_what_the_proto_says(rules: VisibleTopics) -> None:
    visible = Visible.of(rules)
    seen = [visible.sees(topic) for topic in TOPICS]
    assert seen == [expected(rules, topic) for topic in TOPICS]
    assert seen == [expected(visible.message, topic) for topic in TOPICS], "and so does what it says itself"
    assert not (visible.is_nothing and any(seen))
    for host in HOSTS:
        some = visible.sees_some_of(host)
        assert some or not any(visible.sees(topic) for topic in TOPICS if topic.authority_name == host)
        assert not (some and visible.is_nothing)
    assert Visible.of(visible.message) == Visible.parse(visible.text) == visible
    assert Visible.of(visible.message).text == Visible.parse(visible.text).text == visible.text


@given(rules_, rules_)
def test_patterns_of_what_others_do_not_see(rules: VisibleTopics, others: VisibleTopics) -> None:
    mine, other = Visible.of(rules), Visible.of(others)
    beyond = VisibleTopics(
        allow=[
            TopicPattern(topic=UUri(authority_name=key[0], ue_id=key[1], ue_version_major=key[2], resource_id=key[3]))
            for key in mine.beyond(other)
        ]
    )
    for topic in TOPICS:
        if mine.sees(topic) and not other.sees(topic):
            assert is_one_of(topic, beyond.allow)
    assert not list(mine.beyond(mine)), "a part of itself"
    assert not list(mine.beyond(EVERYTHING_VISIBLE))


def test_what_is_added_is_named_as_narrowly_as_the_rules_say_it() -> None:
    def allowed(*topics: str) -> Visible:
        return Visible.made([uris.key(uris.parse(topic)) for topic in topics], (), ())

    few, more = allowed("//a/1/1/8000"), allowed("//a/1/1/8000", "//b/1/1/FFFF")
    assert list(more.beyond(few)) == [("b", 1, 1, 0xFFFF)]
    assert list(few.beyond(more)) == []
    assert list(EVERYTHING_VISIBLE.beyond(more)) == [uris.key(uris.ANY)]


@given(rules_, st.randoms())
def test_the_order_and_copies_of_what_does_not_depend_on_order_make_no_difference(
    rules: VisibleTopics, rng: object
) -> None:
    other = VisibleTopics()
    other.CopyFrom(rules)
    for listed in (other.allow, other.deny, *((origin.allow) for origin in other.origins)):
        shuffled = [*listed, *listed[:1]]
        rng.shuffle(shuffled)  # type: ignore[attr-defined]
        del listed[:]
        listed.extend(shuffled)
    for origin in reversed(rules.origins):
        other.origins.add().CopyFrom(origin)  # behind all others: it counts nothing
    assert Visible.of(other) == Visible.of(rules)
    assert Visible.of(other).text == Visible.of(rules).text


def test_everything_is_visible_inside_and_nothing_without_rules() -> None:
    assert EVERYTHING_VISIBLE.message == VisibleTopics(origins=[VisibleTopics.Origin(authorities=["*"])])
    assert EVERYTHING_VISIBLE.sees(TOPICS[0])
    assert not EVERYTHING_VISIBLE.is_nothing
    assert Visible.of(VisibleTopics()).is_nothing
    everything = TopicPattern(topic=uris.ANY)
    assert Visible.of(VisibleTopics(allow=[TopicPattern(topic=TOPICS[0])], deny=[everything])).is_nothing
    denied = VisibleTopics.Origin(authorities=["*"], deny=[everything])
    assert Visible.of(VisibleTopics(origins=[denied])).message == VisibleTopics()


def test_hosts_that_may_not_be_read_are_named_only_where_a_wider_pattern_would_show_them() -> None:
    hidden, shown = (
        VisibleTopics.Origin(authorities=["a", "a.c"], hidden=True),
        VisibleTopics.Origin(authorities=["*.c"]),
    )
    assert [list(one.authorities) for one in Visible.of(VisibleTopics(origins=[hidden, shown])).message.origins] == [
        ["a.c"],
        ["*.c"],
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"allow":["x"],"deny":[],"origins":[]}',
        '{"allow":[1],"deny":[],"origins":[]}',
        '{"allow":["up://a/1FFFFFFFF/1/8000"],"deny":[],"origins":[]}',
        '{"allow":[],"deny":[],"origins":[{}]}',
    ],
)
def test_a_text_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UStatusError, match="expected visible topics as JSON") as caught:
        Visible.parse(text)
    assert caught.value.code == UCode.INVALID_ARGUMENT
