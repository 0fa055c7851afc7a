"""Invalid numbers in the answer of a history: none is taken for a record, and the reader can poll again."""

from __future__ import annotations

import pytest

from history.reading.acceptor import Acceptor
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, PollResponse, Position, RecordBatch

LOG = b"i" * 16


@pytest.mark.parametrize(("seq", "prev_seq"), [(0, 0), (2**64 - 1, 0), (1, 2**64 - 1)])
@pytest.mark.parametrize("data", [b"\xff", b""])
def test_a_batch_with_a_seq_that_no_log_gives_is_none(seq: int, prev_seq: int, data: bytes) -> None:
    acceptor = Acceptor()
    batch = RecordBatch(incarnation=LOG, seq=[seq], prev_seq=[prev_seq], time_ms=[1], message=[data])
    accepted = acceptor.accept(
        PollResponse(begin=[Position(incarnation=LOG, seq=3)], batches=[batch], next=[Position(incarnation=LOG, seq=9)])
    )
    assert (accepted.records, accepted.gaps, accepted.state.positions) == ([], [], {LOG: 3})
    assert accepted.state.request()


@pytest.mark.parametrize("before_seq", [0, 2**64 - 1])
@pytest.mark.parametrize("reason", [Gap.REASON_CORRUPTION, Gap.REASON_RETENTION])
def test_a_gap_that_ends_nowhere_moves_nobody(before_seq: int, reason: Gap.Reason.ValueType) -> None:
    acceptor = Acceptor({LOG: 7})
    accepted = acceptor.accept(
        PollResponse(gaps=[Gap(reason=reason, incarnation=LOG, after_seq=2**64 - 1, before_seq=before_seq)])
    )
    assert accepted.state.positions == {LOG: 7}
    assert accepted.state.request()
    assert acceptor.dropped == {"unreadable": 1}
