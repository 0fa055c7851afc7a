"""The order of a channel's items: whatever the order of arrival, nothing is lost or doubled."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from streamer.grip.items import Item, StreamFormat
from streamer.grip.sequence import LastIds, Sequencer, Turn

WAIT_S = 5.0


def item(id: str | None, prev_id: str | None = None, *, no_seq: bool = False, content: bytes = b"") -> Item:
    return Item("fruit", id, prev_id, no_seq, StreamFormat(content), None)


def sequencer(last: str | None = None, **limits: int) -> Sequencer[int]:
    return Sequencer(LastIds(last), WAIT_S, **limits)


def shown(turns: list[Turn[int]]) -> list[tuple[str | None, str]]:
    return [(turn.item.id, turn.kind) for turn in turns]


def all_expired(made: Sequencer[int], now: float) -> list[Turn[int]]:
    return list(itertools.chain.from_iterable(iter(lambda: made.expire(now), [])))


def test_items_in_order_go_on_and_repeats_do_not() -> None:
    made = sequencer()
    assert shown(made.offer(item("1", "0"), 1, 0)) == [("1", "next")], "no last id is known"
    assert shown(made.offer(item("2", "1"), 2, 0)) == [("2", "next")]
    assert shown(made.offer(item("2", "1"), 3, 0)) == [("2", "repeat")]
    assert made.last == ("2", None)


def test_ids_come_again() -> None:
    made = sequencer()
    kinds = [made.offer(item(id, prev_id), 1, 0)[0].kind for id, prev_id in (("A", None), ("B", "A"), ("A", "B"))]
    assert kinds == ["next"] * 3


def test_an_item_waits_for_the_one_before_it() -> None:
    made = sequencer("1")
    assert made.offer(item("3", "2"), 3, 0) == []
    assert made.offer(item("4", "3"), 4, 1) == []
    assert (len(made), made.due, made.expire(4.9)) == (2, 5, [])
    assert made.overdue(4.9) is None
    assert shown(made.offer(item("2", "1"), 2, 4.9)) == [("2", "next"), ("3", "next"), ("4", "next")]
    assert (len(made), made.due) == (0, None)


def test_an_item_goes_on_behind_a_gap_when_it_has_waited_long_enough() -> None:
    made = sequencer("1")
    for id, prev_id in (("3", "2"), ("4", "3"), ("9", "8")):
        made.offer(item(id, prev_id), int(id), 0)
    assert made.overdue(5) == item("3", "2")
    assert shown(made.expire(5)) == [("3", "gap"), ("4", "next")]
    assert shown(made.expire(5)) == [("9", "gap")]
    assert made.expire(5) == []


def test_what_does_not_keep_the_order_goes_on() -> None:
    made = sequencer("1")
    assert shown(made.offer(item("7", "6", no_seq=True), 1, 0)) == [("7", "next")]
    assert shown(made.offer(item("7", "6", no_seq=True), 1, 0)) == [("7", "repeat")]
    assert made.last == ("1", "7"), "the order of the others does not change"
    assert shown(made.offer(item("5"), 1, 0)) == [("5", "next")]
    assert shown(made.offer(item(None, "5"), 1, 0)) == [(None, "next")]
    assert shown(made.offer(item("9", "8"), 1, 0)) == [("9", "next")], "the item before it had no id"


def test_the_same_request_once_more_waits_with_the_first_one() -> None:
    made = sequencer("1")
    made.offer(item("3", "2"), 1, 0)
    made.offer(item("3", "2"), 2, 1)
    made.offer(item("3", "2", content=b"other"), 3, 1)
    assert len(made) == 2
    (turn,) = made.expire(5)
    assert turn.tags == [1, 2]
    assert made.abandon() == [3]
    assert len(made) == 0


def test_beyond_the_limits_the_oldest_goes_on() -> None:
    made = sequencer("0", waiting_max=2)
    for id in (10, 20, 30):
        made.offer(item(str(id), str(id - 1)), id, id / 1_000)
    assert shown(all_expired(made, 0.03)) == [("10", "gap")]
    made = sequencer("0", waiting_bytes_max=10)
    for id in (10, 20, 30):
        made.offer(item(str(id), str(id - 1), content=b"large"), id, 0)
    assert shown(all_expired(made, 0)) == [("10", "gap"), ("20", "gap"), ("30", "gap")]


def test_what_was_recovered_is_followed_by_what_waits_for_it() -> None:
    made = sequencer("1")
    for id, prev_id in (("4", "3"), ("6", "5"), ("7", "6")):
        made.offer(item(id, prev_id), int(id), 0)
    assert shown(made.recover("5", 5)) == [("6", "next"), ("7", "next"), ("4", "recovered")]
    assert made.last == ("7", None)


def test_a_request_whose_last_item_went_on_is_a_repeat_as_a_whole() -> None:
    made = sequencer("3")
    chain = [item(str(id), str(id - 1)) for id in range(1, 6)]
    assert made.repeated(chain) == 3
    assert made.repeated(chain[:3]) == 3
    assert made.repeated(chain[3:]) == 0
    assert made.repeated([]) == 0
    assert made.repeated([chain[0], chain[2]]) == 0, "no chain"
    assert sequencer("A").repeated([item("B", "A"), item("A", "B")]) == 0, "these follow the last one"


@given(st.data(), st.integers(2, 12), st.integers(1, 4))
def test_any_order_of_arrival_with_repeats_and_losses(data: st.DataObject, count: int, kinds: int) -> None:
    """A model: the true order; each item arrives once or is lost, in any order, within the wait."""
    ids = ["start", *(f"{index % kinds}-{index // (2 * kinds)}" for index in range(count))]
    ids = [id for index, id in enumerate(ids) if index == 0 or id != ids[index - 1]]
    items = [
        item(id, prev_id, content=str(index).encode()) for index, (prev_id, id) in enumerate(itertools.pairwise(ids))
    ]
    arriving = data.draw(st.permutations(items))
    lost = data.draw(st.sets(st.sampled_from(items), max_size=len(items))) if data.draw(st.booleans()) else set()
    made, turns = sequencer("start"), list[Turn[int]]()
    arrived = [one for one in arriving if one not in lost]
    for tag, one in enumerate(arrived):
        turns += made.offer(one, tag, 0)
    turns += all_expired(made, WAIT_S)
    assert len(made) == 0
    done = [tag for turn in turns for tag in turn.tags]
    assert sorted(done) == list(range(len(arrived))), "each is answered once"
    went_on = [turn.item for turn in turns if turn.kind != "repeat"]
    assert len(set(went_on)) == len(went_on)
    if len({one.id for one in items}) == len(items):  # no id comes again: nothing is taken for a repeat
        assert len(went_on) == len(arrived)
        if not lost:
            assert went_on == items
            assert all(turn.kind == "next" for turn in turns)
    before = "start"
    for turn in turns:
        if turn.kind == "next":
            assert turn.item.prev_id == before
        if turn.kind != "repeat":
            before = turn.item.id or ""
