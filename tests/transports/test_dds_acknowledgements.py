"""When samples of a DDS writer count as acknowledged, and which batches a refusal concerns. Without DDS."""

import pytest

from transports.dds.acknowledgements import (
    NOTED_S,
    AckState,
    Departures,
    Matched,
    ReaderWatch,
    digest_of,
    judge,
)
from transports.dds.link import Remembered
from transports.dds.writers import Batch

RELIABLE, BEST_EFFORT = True, False


class Readers:
    """The matched readers of a fake writer: handle -> is reliable."""

    def __init__(self) -> None:
        self.now: dict[int, bool] = {}
        self.known: set[int] = set()  # whether these are reliable
        self.total = self.listed = self.asked = 0

    def join(self, handle: int, is_reliable: bool = RELIABLE) -> None:
        self.now[handle] = is_reliable
        self.total += 1

    def leave(self, handle: int) -> None:
        del self.now[handle]

    @property
    def matched(self) -> Matched:
        return Matched(self.total, len(self.now))

    def __call__(self, may_ask: bool) -> dict[int, bool | None]:
        self.listed += 1
        if may_ask:
            self.asked += len(self.now.keys() - self.known)
            self.known |= self.now.keys()
        return {handle: is_reliable if handle in self.known else None for handle, is_reliable in self.now.items()}


@pytest.fixture
def readers() -> Readers:
    readers = Readers()
    readers.join(1)
    return readers


def begun(readers: Readers) -> ReaderWatch:
    watch = ReaderWatch()
    watch.begin(readers.matched, readers)
    watch.begin(readers.matched, readers)  # now it is known which of them are reliable
    return watch


def test_the_only_reader_that_leaves_has_not_acknowledged(readers: Readers) -> None:
    watch = begun(readers)
    assert not watch.has_lost_reader(readers.matched, readers.now, readers)
    readers.leave(1)
    assert watch.has_lost_reader(readers.matched, readers.now, readers)
    assert watch.has_lost_reader(readers.matched, readers.now, readers)  # also at the next look


def test_a_reader_that_leaves_and_returns_between_two_looks_is_noticed(readers: Readers) -> None:
    watch = begun(readers)
    readers.leave(1)
    readers.join(1)
    assert watch.has_lost_reader(readers.matched, readers.now, readers)


def test_a_reader_that_left_before_the_write_does_not_count(readers: Readers) -> None:
    readers.join(2)
    readers.leave(1)
    watch = begun(readers)
    assert not watch.has_lost_reader(readers.matched, readers.now, readers)


def test_the_next_samples_are_not_charged_with_an_earlier_departure(readers: Readers) -> None:
    watch = begun(readers)
    readers.leave(1)
    assert watch.has_lost_reader(readers.matched, readers.now, readers)
    watch.begin(readers.matched, readers)
    assert not watch.has_lost_reader(readers.matched, readers.now, readers)


def test_best_effort_readers_do_not_count(readers: Readers) -> None:
    readers.join(2, BEST_EFFORT)
    watch = begun(readers)
    readers.leave(2)
    assert not watch.has_lost_reader(readers.matched, readers.now, readers)
    readers.leave(1)
    assert watch.has_lost_reader(readers.matched, readers.now, readers)


def test_a_reader_that_joined_after_the_first_sample_counts(readers: Readers) -> None:
    watch = begun(readers)
    readers.join(2)
    assert not watch.has_lost_reader(readers.matched, readers.now, readers)
    readers.leave(2)
    assert watch.has_lost_reader(readers.matched, readers.now, readers)


def test_a_reader_that_is_being_removed_has_not_acknowledged(readers: Readers) -> None:
    """DDS lists it no longer, counts all as acknowledged by it, and does not say yet that it has left."""
    watch = begun(readers)
    assert watch.has_lost_reader(readers.matched, (), readers)
    assert watch.has_lost_reader(readers.matched, (), readers)  # also at the next look
    assert not watch.has_lost_reader(readers.matched, {1}, readers)


def test_a_best_effort_reader_that_is_being_removed_does_not_count(readers: Readers) -> None:
    readers.join(2, BEST_EFFORT)
    watch = begun(readers)
    assert not watch.has_lost_reader(readers.matched, {1}, readers)
    readers.leave(2)
    assert not watch.has_lost_reader(readers.matched, {1}, readers)


def test_departures_are_noted_for_a_time() -> None:
    departures = Departures()
    assert departures.notes(0.0) == []
    departures.add("up/a", 1_000.0)
    departures.add("up/b", 2_000.0)
    (note,) = departures.notes(2_000.0 + NOTED_S - 1)
    assert "2 time(s)" in note
    assert "1970-01-01T00:33:20+00:00 on up/b" in note
    assert departures.notes(2_000.0 + NOTED_S) == []
    assert departures.count == 2


def test_readers_are_listed_only_after_a_change(readers: Readers) -> None:
    watch = begun(readers)
    for _ in range(10):
        watch.begin(readers.matched, readers)
        watch.has_lost_reader(readers.matched, readers.now, readers)
    assert (readers.listed, readers.asked) == (2, 1)


def test_dds_is_not_asked_for_the_readers_of_a_writer_that_writes_once(readers: Readers) -> None:
    readers.join(2, BEST_EFFORT)
    watch = ReaderWatch()
    watch.begin(readers.matched, readers)
    assert not watch.has_lost_reader(readers.matched, readers.now, readers)
    assert readers.asked == 0
    readers.leave(2)
    assert watch.has_lost_reader(readers.matched, readers.now, readers), "it may have been a reliable one"


def test_while_a_reader_does_not_acknowledge_the_others_become_known(readers: Readers) -> None:
    readers.join(2, BEST_EFFORT)
    watch = ReaderWatch()
    watch.begin(readers.matched, readers)
    watch.complete(readers)
    readers.leave(2)
    assert not watch.has_lost_reader(readers.matched, readers.now, readers)


@pytest.mark.parametrize(
    ("is_drained", "has_lost_reader", "waited_s", "verdict"),
    [
        (True, False, 0.0, AckState.ACKNOWLEDGED),
        (True, False, 9.0, AckState.ACKNOWLEDGED),
        (True, True, 0.0, AckState.LOST),  # drained because nobody is left
        (False, True, 9.0, AckState.LOST),
        (False, False, 1.9, AckState.PENDING),
        (False, False, 2.0, AckState.OVERDUE),
    ],
)
def test_the_verdict(*, is_drained: bool, has_lost_reader: bool, waited_s: float, verdict: AckState) -> None:
    judged = judge(is_drained=is_drained, has_lost_reader=has_lost_reader, waited_s=waited_s, timeout_s=2.0)
    assert judged is verdict


def test_the_oldest_late_samples_are_forgotten_and_those_of_other_writers_differ() -> None:
    late: Remembered[bytes, bool] = Remembered(2)
    late.update(dict.fromkeys([digest_of("p", b"%d" % n) for n in range(3)], True))
    assert list(late) == [digest_of("p", b"1"), digest_of("p", b"2")]
    assert digest_of("q", b"1") not in late  # another writer


def test_a_refusal_concerns_all_batches_that_were_sent_before_its_answer_arrived() -> None:
    refused = Batch(1, lambda _: None)
    in_flight = Batch(1, lambda _: None)
    assert not refused.was_known_to_sender_of(refused)
    assert not refused.was_known_to_sender_of(in_flight)
    refused.returned()
    assert not refused.was_known_to_sender_of(in_flight)
    assert refused.was_known_to_sender_of(Batch(1, lambda _: None))
