"""Offsets: batches follow each other without hole or overlap, within their limit, and losses are reported."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.records.visible import EVERYTHING_VISIBLE, Visible
from spark_ingest import offsets
from spark_ingest.offsets import Backfill, Coverage, Delivered, HistoryOffset, LogLoss, Offset, Range
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, LogPlan, Position, Witness
from uprotocol.status import UStatusError

EVERYTHING = EVERYTHING_VISIBLE.text
A, B, C = "aa" * 16, "bb" * 16, "cc" * 16


ENTRIES: list[object] = [
    -1,
    "1",
    True,
    2**63,
    [1],
    {},
    {"seq": 1, "known": [[1, "x"]]},
    {"seq": 1, "known": 7},
    {"seq": 1, "after": -1},
]
WRONG = [json.dumps({A: entry}) for entry in ENTRIES]


def cut(seq: int, records: int = 1, digest: bytes = b"") -> LogPlan.Cut:
    witnesses = [Witness(seq=seq, digest=digest)] if digest else []
    return LogPlan.Cut(position=Position(seq=seq, witnesses=witnesses), records=records)


def of(history: HistoryOffset) -> Offset:
    return Offset("q", 1, {"car": history})


def ranges(start: HistoryOffset, end: HistoryOffset) -> list[Range]:
    return list(offsets.ranges(of(start), of(end), ()))


sparse = st.lists(st.tuples(st.integers(1, 5_000), st.integers(1, 300)), max_size=12)


@given(st.integers(0, 1_000), sparse, st.integers(1, 400), st.integers(1, 9))
def test_partitions_meet_and_keep_their_limit(begin: int, steps: list[tuple[int, int]], limit: int, least: int) -> None:
    counted, seq = [], begin
    for distance, records in steps:
        seq += distance
        counted.append((seq, min(records, distance)))
    given = ranges(HistoryOffset({A: begin}), HistoryOffset({A: seq}))
    parts = offsets.divide(given, {("car", A, ()): counted}, limit, least)
    pieces = [piece for part in parts for piece in part]
    assert [piece.after for piece in pieces] == [begin, *(piece.until for piece in pieces)][: len(pieces)]
    assert not pieces or pieces[-1].until == seq
    total = sum(records for _, records in counted)
    most = max(1, min(limit, -(-total // least)))
    for part in parts:
        inside = [records for at, records in counted for piece in part if piece.after < at <= piece.until]
        assert sum(inside) <= most or len(inside) == 1
    uncounted = [piece for part in offsets.divide(given, {}, limit, least) for piece in part]
    assert sum(piece.until - piece.after for piece in uncounted) == seq - begin
    assert all(piece.until - piece.after <= limit for piece in uncounted)


def test_many_small_ranges_share_partitions() -> None:
    end = Offset("q", 1, {f"car{number}": HistoryOffset({A: 10}) for number in range(200)})
    given = list(offsets.ranges(Offset(), end, ()))
    parts = offsets.divide(given, {}, 20_000, 1)
    assert [len(part) for part in parts] == [64, 64, 64, 8]
    assert len(offsets.divide(given, {}, 20_000, 10)) == 10
    assert len(offsets.divide(given, {}, 1, 1)) == 2_000


def test_losses_name_their_cause() -> None:
    start = HistoryOffset({A: 5, C: 1})
    assert offsets.lost(start, [A, B]) == [LogLoss(C, 1, 0, Gap.REASON_INCARNATION)]
    assert offsets.lost(HistoryOffset({A: 5, C: 1}, unread=frozenset([C])), [A]) == []
    assert str(LogLoss(A, 5, 8, Gap.REASON_RETENTION)).startswith(f"records 6 to 7 of log {A} are lost: retention")
    assert "damaged" in str(LogLoss(A, 5, 8, Gap.REASON_CORRUPTION))
    assert "another log has replaced it" in str(LogLoss(A, 5, 0))
    assert "beyond the end of the log" in str(LogLoss(A, 200, 91, Gap.REASON_CORRUPTION, is_beyond=True))


def test_a_log_that_went_back_is_read_from_the_last_record_that_agrees() -> None:
    start = HistoryOffset({A: 200, B: 5}, {A: {90: b"a", 150: b"b", 200: b"c"}, B: {5: b"d"}})
    loss = LogLoss(A, 200, 91)
    assert loss.went_back
    assert "up to seq 90; records 91 to 200 may be lost" in str(loss)
    assert not LogLoss(A, 5, 7).went_back
    end = offsets.moved(start, {A: [cut(150), cut(200, digest=b"new")]}, {A: 90})
    assert end.known[A] == {90: b"a", 200: b"new"}
    assert stored(end) == end
    (range,) = ranges(start, end)
    assert (range.after, range.until, range.known) == (90, 200, ((90, b"a"), (200, b"new"))), (
        "the seqs are the same but the log went back"
    )
    assert ranges(end, end) == []
    further = offsets.moved(end, {A: [cut(210)], B: [cut(6)]}, {})
    assert [(one.incarnation, one.after, one.until) for one in ranges(end, further)] == [(A, 200, 210), (B, 5, 6)]
    short = offsets.moved(start, {}, {A: 90})
    assert (short.seqs, short.known[A], ranges(start, short)) == ({A: 90, B: 5}, {90: b"a"}, [])


def test_the_first_batch_begins_where_the_query_began_whatever_spark_says() -> None:
    begun, later = Offset("q", 1, {"car": HistoryOffset({A: 5})}), Offset("r", 9, {"car": HistoryOffset({A: 70})})
    end = Offset("q", 1, {"car": HistoryOffset({A: 60})}, begun.histories)
    assert Offset.of(json.loads(json.dumps(end.json()))) == end
    assert list(offsets.ranges(later, end, ())) == list(offsets.ranges(begun, end, ())) != []


def test_topics_that_change_make_a_backfill() -> None:
    one, two, all_ = (
        Coverage(("//car/1/1/8000",), EVERYTHING),
        Coverage(("//car/1/1/8000", "//car/1/1/8001"), EVERYTHING),
        Coverage((), EVERYTHING),
    )
    offset = HistoryOffset({A: 9}, coverage=one)
    assert offset.covering(one, added="earliest") is offset
    more = offset.covering(two, added="earliest")
    (backfill,) = more.backfills
    assert backfill == Backfill(("//car/1/1/8001",), {}, {A: 9}, (Delivered(one, {A: 9}),), two)
    assert (more.past, offset.covering(two, added="latest").backfills) == ((), ())
    less = more.covering(one, added="earliest")
    assert (less.backfills, less.past) == (more.backfills, (Delivered(two, {A: 9}),))
    assert less.covering(all_, added="earliest").past == ()
    assert stored(less) == less
    assert HistoryOffset({A: 9}).covering(one, added="earliest").backfills == ()
    with pytest.raises(UStatusError, match="epochs 'complete' cannot add topics"):
        HistoryOffset({A: 9}, coverage=one, gates={}).covering(two, added="earliest")
    for number in range(offsets.PAST_MAX):
        offset = offset.covering(Coverage((f"//car/1/1/9{number:03}",), EVERYTHING), added="latest")
    with pytest.raises(UStatusError, match="have changed more than 16 times"):
        offset.covering(Coverage(("//car/1/1/8002",), EVERYTHING), added="latest")


def seeing(*topics: str) -> str:
    """Rules that allow to read these topics."""
    return Visible.made([uris.key(uris.parse(topic)) for topic in topics], (), ()).text


def test_access_that_changes_makes_a_backfill_of_what_was_granted() -> None:
    topics = ("//*/1/1/FFFF", "//car/2/1/8000")
    few = Coverage(topics, seeing("//car/1/1/8000"))
    more = Coverage(topics, seeing("//car/1/1/8000", "//van/1/1/8001", "//van/1/1/0", "//car/2/1/FFFF"))
    offset = HistoryOffset({A: 9}, coverage=few).covering(more, added="earliest")
    assert [one.topics for one in offset.backfills] == [("up://van/1/1/8001", "//car/2/1/8000")]
    revoked = HistoryOffset({A: 9}, coverage=more).covering(few, added="earliest")
    assert (revoked.backfills, revoked.past) == ((), (Delivered(more, {A: 9}),)), "nothing is read"
    assert revoked.covering(more, added="earliest").past == ()
    every = HistoryOffset({A: 9}, coverage=more).covering(Coverage(topics, EVERYTHING), added="earliest")
    assert [one.topics for one in every.backfills] == [topics]
    hidden = HistoryOffset({A: 9}, coverage=Coverage(("//car/1/1/8000",), few.visible))
    assert hidden.covering(few, added="earliest").backfills[0].topics == ("//*/1/1/FFFF",), "8000 of 2 is not visible"
    grown = HistoryOffset({A: 9}, coverage=few)
    for number in range(50):
        hosts = [f"//car{one}/1/1/FFFF" for one in range(number)]
        grown = grown.covering(Coverage(topics, seeing("//car/1/1/8000", *hosts)), added="latest")
    assert grown.past == (), "all of it is still wanted"


def test_records_that_wait_hold_the_cursor() -> None:
    backfill = Backfill((), {A: 3}, {A: 9, B: 4}, ())
    assert offsets.needed(HistoryOffset({A: 12, B: 6}, backfills=(backfill,))) == {A: 3, B: 0}
    over = Backfill((), {A: 9, B: 4}, {A: 9, B: 4}, ())
    assert offsets.needed(HistoryOffset({A: 12, B: 6}, backfills=(over,))) == {A: 12, B: 6}


def stored(offset: HistoryOffset) -> HistoryOffset:
    """An offset as it comes back from a checkpoint."""
    return Offset.of(json.loads(json.dumps(of(offset).json()))).histories["car"]


def parsed(text: str) -> HistoryOffset:
    found = offsets.parse(text, "car")
    assert isinstance(found, Offset)
    return found.histories["car"]


def test_parse() -> None:
    assert offsets.parse("Earliest") == "earliest"
    assert parsed(json.dumps({B: 2, A: 0})) == HistoryOffset({B: 2})
    assert parsed(json.dumps({A: {"seq": 7, "known": [[7, "0a"]]}})) == HistoryOffset({A: 7}, {A: {7: b"\x0a"}})
    fleet = offsets.parse(json.dumps({"car1": {A: 3}, "car2": {B: 4}}))
    assert fleet == Offset(histories={"car1": HistoryOffset({A: 3}), "car2": HistoryOffset({B: 4})})
    with pytest.raises(UStatusError, match="by authority"):
        offsets.parse(json.dumps({A: 3}))
    with pytest.raises(UStatusError, match="newer up-streamer"):
        offsets.parse(json.dumps({"version": 3}))
    for wrong in (
        "newest",
        "[1]",
        '{"x": 1}',
        json.dumps({A: -1}),
        json.dumps({A: "1"}),
        json.dumps({A: True}),
        json.dumps({A: 2**63}),
        *WRONG,
    ):
        with pytest.raises(UStatusError):
            offsets.parse(wrong, "car")


# as version 0.1.0, and the last one before topics came in pages, have written them
CHECKPOINTS = [
    f'{{"{A}":25000}}',
    f'{{"{A}":{{"known":[[16384,"26b9d8cf6ec5c9a7"],[21000,"9d2b1cd40af9a4d1"]],"seq":21000}},"{B}":7}}',
    f'{{"{A}":{{"after":12,"known":[[12,"26b9d8cf6ec5c9a7"]],"seq":30}},"{B}":{{"seq":4,"unread":true}}}}',
]


@pytest.mark.parametrize("text", CHECKPOINTS, ids=["seqs alone", "with digests", "of a log that went back"])
def test_a_checkpoint_of_version_1_is_continued(text: str) -> None:
    offset = Offset.of(json.loads(text), "car").histories["car"]
    assert stored(offset) == offset
    (log, *_) = offset.seqs
    grown = offsets.moved(offset, {log: [cut(90_000)]}, {})
    assert [(one.incarnation, one.after, one.until) for one in ranges(offset, grown)] == [
        (log, offset.seqs[log], 90_000)
    ]
