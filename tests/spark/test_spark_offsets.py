"""Offsets: batches follow each other without hole or overlap, within their limit, and losses are reported."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_ingest import offsets
from spark_ingest.offsets import LogLoss, Offset, Range
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import LogState
from uprotocol.status import UStatusError

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


def log(name: str, newest: int, oldest: int = 1, wanted: int | None = None, *, durable: bool = True) -> LogState:
    wanted = newest if wanted is None else wanted
    incarnation = bytes.fromhex(name)
    return LogState(
        incarnation=incarnation, oldest_seq=oldest, newest_seq=newest, newest_match_seq=wanted, durable=durable
    )


logs = st.lists(
    st.builds(
        lambda name, oldest, more, quiet: log(name * 16, oldest + more, oldest, max(0, oldest + more - quiet)),
        st.sampled_from(["aa", "bb", "cc"]),
        st.integers(1, 1000),
        st.integers(0, 100_000),
        st.integers(0, 50),
    ),
    unique_by=lambda state: state.incarnation,
    max_size=3,
)


@given(logs, st.integers(1, 60_000), st.sampled_from(["earliest", "latest"]))
def test_batches_meet_and_reach_the_end(logs: list[LogState], limit: int, where: str) -> None:
    start = offsets.starting(where, logs)
    assert Offset.of(json.loads(json.dumps(start.json()))) == start
    seen: dict[str, int] = dict(start.seqs)
    for _ in range(400_000 // limit + 6):
        end = offsets.between(start, offsets.advance(start.seqs, logs, limit), {}, {})
        if end == start:
            break
        ranges = offsets.split(start, end)
        assert 0 < sum(range.until - range.after for range in ranges) <= max(limit, len(logs))
        for part in ranges:
            assert part.after == seen.get(part.incarnation, 0)
            seen[part.incarnation] = part.until
        assert offsets.split(start, end) == ranges
        start = end
    for state in logs:
        expected = state.newest_seq if where == "latest" and state.newest_match_seq else state.newest_match_seq
        assert start.seqs.get(state.incarnation.hex(), 0) >= expected


@given(logs, st.integers(1, 60_000), st.integers(0, 2_000))
def test_a_batch_never_passes_its_target(logs: list[LogState], limit: int, behind: int) -> None:
    target = {state.incarnation.hex(): max(0, state.newest_seq - behind) for state in logs}
    end = offsets.advance({}, logs, limit, target)
    assert all(seq <= target[name] for name, seq in end.items())


def test_no_limit_reads_all_and_a_limit_is_shared() -> None:
    states = [log(A, 10), log(B, 1_000), log(C, 1_000)]
    assert offsets.advance({}, states, None) == {A: 10, B: 1_000, C: 1_000}
    assert offsets.advance({}, states, 100) == {A: 10, B: 45, C: 45}
    assert offsets.advance({A: 10}, states, 1) == {A: 10, B: 1, C: 1}  # one each at least: none starves


def test_a_log_with_new_records_of_other_topics_alone_keeps_its_seq() -> None:
    assert offsets.advance({A: 5}, [log(A, 500, wanted=5), log(B, 3, wanted=0)], None) == {A: 5}
    assert offsets.advance({A: 5}, [log(A, 500, wanted=6)], None) == {A: 500}


def test_losses() -> None:
    # Poll shows whether that is a loss
    assert offsets.lost(Offset({A: 5}), [log(A, 9, oldest=8), log(B, 3)]) == []
    assert offsets.lost(Offset({A: 5, C: 1}), [log(B, 4)]) == [LogLoss(A, 5, 0), LogLoss(C, 1, 0)]
    assert str(LogLoss(A, 5, 8)) == f"records 6 to 7 of log {A} are lost"
    assert "are lost" in str(LogLoss(A, 5, 0))
    assert offsets.starting("earliest", [log(A, 9, oldest=8), log(B, 0, oldest=0)]) == Offset({A: 7})
    # lost records do not count against the limit
    assert offsets.advance({A: 5, B: 1}, [log(A, 9, oldest=8)], 1) == {A: 8}


def test_a_range_is_cut_for_several_tasks() -> None:
    records = 3 * offsets.PARTITION_RECORDS_MIN
    parts = offsets.split(Offset({A: 7}), Offset({A: 7 + records, B: 3}))
    assert [part.until - part.after for part in parts] == [records // 3] * 3 + [3]
    assert parts[-1] == Range(B, 0, 3)
    assert len(offsets.split(Offset(), Offset({A: 10**9}))) == offsets.PARTITIONS_MAX
    assert offsets.split(Offset({A: 3}), Offset({A: 3})) == offsets.split(Offset({A: 3}), Offset()) == []


def test_only_logs_with_wanted_records_count() -> None:
    states = [log(A, 10), log(B, 9, 5, 0, durable=False), log(C, 9, 5, 7, durable=False)]
    assert offsets.starting("latest", states) == Offset({A: 10, C: 9}, unread=frozenset([C]))
    assert offsets.starting("earliest", states) == Offset({C: 4})
    assert offsets.lost(offsets.starting("latest", states), [log(A, 10)]) == []
    moved = offsets.between(offsets.starting("latest", states), {A: 10, C: 12}, {}, {})
    assert offsets.lost(moved, [log(A, 10)]) == [LogLoss(C, 12, 0)]


def test_a_log_that_went_back_is_read_from_the_last_record_that_agrees() -> None:
    start = Offset({A: 200, B: 5}, {A: {90: b"a", 150: b"b", 200: b"c"}, B: {5: b"d"}})
    loss = LogLoss(A, 200, 91)
    assert loss.went_back
    assert "up to seq 90; records 91 to 200 may be lost" in str(loss)
    assert not LogLoss(A, 5, 7).went_back
    begin = start.back_to({A: loss})
    assert (begin.seqs, begin.known[A]) == ({A: 90, B: 5}, {90: b"a"})
    end = offsets.between(start, {A: 200, B: 5}, {A: {90: b"a", 200: b"new"}, B: {5: b"d"}}, {A: 90})
    assert Offset.of(json.loads(json.dumps(end.json()))) == end
    assert offsets.split(start, end) == [Range(A, 90, 200, ((90, b"a"), (200, b"new")))], (
        "the seqs are the same but the log went back"
    )
    assert offsets.split(end, end) == []
    further = offsets.between(end, {A: 210, B: 6}, {A: {210: b"e"}}, {})
    assert [(one.incarnation, one.after, one.until) for one in offsets.split(end, further)] == [
        (A, 200, 210),
        (B, 5, 6),
    ]


def test_parse() -> None:
    assert offsets.parse("Earliest") == "earliest"
    assert offsets.parse(json.dumps({B: 2, A: 0})) == Offset({B: 2})
    assert offsets.parse(json.dumps({A: {"seq": 7, "known": [[7, "0a"]]}})) == Offset({A: 7}, {A: {7: b"\x0a"}})
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
            offsets.parse(wrong)


# as version 0.1.0, and the last one before topics came in pages, have written them
CHECKPOINTS = [
    f'{{"{A}":25000}}',
    f'{{"{A}":{{"known":[[16384,"26b9d8cf6ec5c9a7"],[21000,"9d2b1cd40af9a4d1"]],"seq":21000}},"{B}":7}}',
    f'{{"{A}":{{"after":12,"known":[[12,"26b9d8cf6ec5c9a7"]],"seq":30}},"{B}":{{"seq":4,"unread":true}}}}',
]


@pytest.mark.parametrize("text", CHECKPOINTS, ids=["seqs alone", "with digests", "of a log that went back"])
def test_a_checkpoint_is_read_and_written_unchanged(text: str) -> None:
    offset = Offset.of(json.loads(text))
    assert json.dumps(offset.json(), sort_keys=True, separators=(",", ":")) == text
    grown = [log(A, 90_000, 1, 80_000), log(B, 9, durable=False)]
    assert not offsets.lost(offset, grown)
    end = offsets.between(offset, offsets.advance(offset.seqs, grown, 100), {}, {})
    assert {log for log, seq in end.seqs.items() if seq > offset.seqs.get(log, 0)} == {A, B}
