"""What a held stream writes, against a model of publisher, backend and client: any order of items, losses, answers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.grip.headers import HeldChannel
from streamer.grip.items import Item, StreamFormat
from streamer.grip.succession import Succession

NAME = "fruit"


def item(id: str | None, prev_id: str | None, channel: str = NAME, size: int = 1) -> Item:
    return Item(channel, id, prev_id, False, StreamFormat(b"x" * size), None)


def ids(succession: Succession) -> list[str | None]:
    """Those of the items to be written now."""
    found = []
    while (one := succession.next()) is not None:
        found.append(one.id)
    return found


@dataclass
class World:
    """A backend's values by their ids, what was published of them, and the ids that a client has got, in order."""

    are_deltas: bool
    succession: Succession
    published: list[str] = field(default_factory=lambda: ["0"])
    got: list[str] = field(default_factory=lambda: ["0"])
    count: itertools.count[int] = field(default_factory=itertools.count)
    flying: tuple[int, str, list[str]] | None = None  # when it was sent, its last id, what the backend had

    def publish(self, id: str, is_lost: bool) -> None:
        self.published.append(id)
        if not is_lost:
            self.succession.hear(item(id, self.published[-2]), next(self.count))
        self.write()

    def write(self) -> None:
        if self.flying is None:
            self.got += [id for id in ids(self.succession) if id is not None]

    def send(self) -> None:
        """Asks because of a gap, or after silence: then what comes waits for the answer."""
        if self.flying is None:
            self.flying = next(self.count), self.succession.last_ids[NAME], list(self.published)

    def answer(self, is_of_now: bool) -> None:
        """The backend has read its value when the request came in, or has just read it."""
        if self.flying is None:
            return
        sent, last, known = self.flying
        known = list(self.published) if is_of_now else known
        if self.are_deltas:
            self.got += known[known.index(last) + 1 :]
        elif known[-1] != last:
            self.got.append(known[-1])
        self.succession.answered([HeldChannel(NAME, known[-1])], sent)
        self.flying = None
        self.write()


def is_part(some: list[str], all: list[str]) -> bool:
    """True if `some` are in `all`, in this order."""
    left = iter(all)
    return all_in(some, left)


def all_in(some: list[str], left: object) -> bool:
    return all(one in left for one in some)  # type: ignore[operator]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from("abc"), st.booleans()),
        st.tuples(st.just("send")),
        st.tuples(st.just("answer"), st.booleans()),
    ),
    max_size=40,
)


@given(steps, st.booleans(), st.sampled_from([2, 3, 1_000]))
def test_a_client_gets_the_newest_value_in_order_and_never_twice(
    steps: list[tuple[object, ...]], are_deltas: bool, items_max: int
) -> None:
    """Whole values with ids that repeat (hashes), and deltas with unique ids, of which no one is left out."""
    world = World(are_deltas, Succession([HeldChannel(NAME, "0")], items_max=items_max))
    for step in steps:
        match step:
            case ("publish", str(id), bool(is_lost)):
                if are_deltas:
                    world.publish(str(len(world.published)), is_lost)
                elif id != world.published[-1]:
                    world.publish(id, is_lost)
            case ("send",):
                world.send()
            case ("answer", bool(is_of_now)):
                world.answer(is_of_now)
        if world.succession.must_ask:
            world.send()
    for _ in range(3):  # the last item was lost, maybe: silence; an answer of then, and at most one more
        world.send()
        world.answer(True)
    assert not world.succession.must_ask
    assert world.got[-1] == world.published[-1]
    assert is_part(world.got, world.published)
    assert all(one != other for one, other in itertools.pairwise(world.got))
    if are_deltas:
        assert world.got == world.published


def test_an_item_that_follows_is_written_and_a_repeat_is_not() -> None:
    one = Succession([HeldChannel(NAME, "a")])
    for at, (id, prev_id) in enumerate([("a", "z"), ("b", "a"), ("b", "a"), ("c", "b")]):
        one.hear(item(id, prev_id), at)
    assert ids(one) == ["b", "c"]
    assert not one.must_ask
    assert one.last_ids == {NAME: "c"}


def test_items_without_ids_are_written_as_they_come() -> None:
    one = Succession([HeldChannel(NAME, "a"), HeldChannel("free", None)])
    one.hear(item(None, None), 0)
    one.hear(item("x", "unknown", "free"), 1)
    one.hear(item("x", "unknown", "free"), 2)
    one.hear(item("b", None), 3)
    assert ids(one) == [None, "x", "x", "b"]
    assert one.last_ids == {NAME: "b"}


def test_items_from_before_the_request_are_contained_in_its_answer() -> None:
    one = Succession([HeldChannel(NAME, "a")])
    one.hear(item("c", "b"), 0)
    assert ids(one) == []
    assert one.must_ask
    one.hear(item("d", "c"), 2)
    one.answered([HeldChannel(NAME, "c")], 1)
    assert ids(one) == ["d"]


def test_an_answer_to_the_earlier_request_of_another_stream_does_not_contain_them() -> None:
    one = Succession([HeldChannel(NAME, "a")])
    one.hear(item("c", "b"), 1)
    assert ids(one) == []
    one.answered([HeldChannel(NAME, "b")], 0)
    assert ids(one) == ["c"]


def test_it_goes_on_behind_the_item_of_the_new_id() -> None:
    one = Succession([HeldChannel(NAME, "a")])
    for at, id in enumerate("cdef", start=1):
        one.hear(item(id, chr(ord(id) - 1)), at)
    assert ids(one) == []
    one.answered([HeldChannel(NAME, "d")], 0)
    assert ids(one) == ["e", "f"]


def test_the_link_is_asked_again_if_none_fits() -> None:
    one = Succession([HeldChannel(NAME, "a")])
    one.hear(item("d", "c"), 1)
    assert ids(one) == []
    one.answered([HeldChannel(NAME, "b")], 0)
    assert ids(one) == []
    assert one.must_ask


def test_channels_are_added_and_left_out_by_an_answer() -> None:
    one = Succession([HeldChannel(NAME, "a"), HeldChannel("old", None)])
    one.hear(item("1", None, "old"), 0)
    one.hear(item("c", "b"), 1)
    assert ids(one) == ["1"]
    one.hear(item("2", None, "old"), 3)
    one.answered([HeldChannel(NAME, "c"), HeldChannel("new", "n")], 2)
    one.hear(item("o", "n", "new"), 4)
    assert ids(one) == ["o"]
    assert one.last_ids == {NAME: "c", "new": "o"}


@pytest.mark.parametrize("size", [1, 600])
def test_too_much_that_waits_is_recovered(size: int) -> None:
    one = Succession([HeldChannel(NAME, "0")], items_max=4, bytes_max=1_000)
    for number in range(1, 6):
        one.hear(item(str(number), str(number - 1), size=size), number)
    assert one.must_ask
    assert not one.is_broken
    one.answered([HeldChannel(NAME, "3")], 0)
    assert one.must_ask, "the request was sent before items were dropped: its answer misses them, maybe"
    one.answered([HeldChannel(NAME, "5")], 9)
    assert not one.must_ask


def test_too_much_that_no_link_can_return_breaks_the_stream() -> None:
    one = Succession([HeldChannel(NAME, None)], items_max=2)
    for number in range(3):
        one.hear(item(None, None), number)
    assert one.is_broken


def test_one_item_may_be_larger_than_all_that_may_wait() -> None:
    one = Succession([HeldChannel(NAME, None)], bytes_max=10)
    one.hear(item("a", None, size=100), 0)
    assert ids(one) == ["a"]
    assert not one.must_ask
