"""UStatus and UStatusError."""

from __future__ import annotations

import pickle

import pytest
from google.protobuf.any_pb2 import Any

from uprotocol.status import OK, UStatusError, code_name, invalid, settle
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

spec = pytest.mark.spec


@spec("req~ustatus-data-model-impl~1")
def test_a_status_has_code_message_and_details() -> None:
    status = UStatus(code=UCode.NOT_FOUND, message="gone", details=[Any(type_url="a"), Any(type_url="b")])
    assert UStatus.FromString(status.SerializeToString()) == status
    assert not UStatus().HasField("message")
    assert UStatus().code == UCode.OK == OK.code
    assert sorted(UCode.values()) == list(range(17))


@spec("local~disp-backoff")
@pytest.mark.parametrize("code", [code for code in UCode.values() if code != UCode.OK])
def test_the_error_is_the_status(code: UCode.ValueType) -> None:
    error = UStatusError(code, "why")
    assert error.status == UStatus(code=code, message="why")
    assert UStatusError.from_status(error.status).status == error.status
    assert str(error) == f"{UCode.Name(code)}: why"
    assert str(UStatusError(code)) == UCode.Name(code)
    assert error.retryable == (code in (UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED))


def test_an_error_survives_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(invalid("why")))
    assert isinstance(error, UStatusError)
    assert (error.code, error.message) == (UCode.INVALID_ARGUMENT, "why")


def test_ok_is_not_an_error() -> None:
    with pytest.raises(AssertionError):
        UStatusError(UCode.OK)


def test_a_code_of_a_later_specification_has_a_name_too() -> None:
    assert code_name(3) == "INVALID_ARGUMENT"
    assert code_name(99) == "99"
    assert "99" in repr(UStatusError.from_status(UStatus.FromString(b"\x08\x63")))


def test_a_batch_is_sorted_by_what_it_was_answered() -> None:
    codes = [UCode.OK, UCode.UNAVAILABLE, UCode.INVALID_ARGUMENT, UCode.DEADLINE_EXCEEDED, UCode.OK]
    statuses = [UStatus(code=code) for code in codes]
    settled = settle("abcde", statuses)
    assert settled.sent == ["a", "e"]
    assert settled.again == [("b", statuses[1]), ("d", statuses[3])]
    assert settled.refused == [("c", statuses[2])]
    with pytest.raises(ValueError, match="shorter"):
        settle("ab", [OK])


def test_an_error_may_quote_anything() -> None:
    """JSON has half surrogate pairs, which no UTF-8 has."""
    assert UStatusError(UCode.INVALID_ARGUMENT, "unknown key \ud800, é").message == "unknown key \\ud800, é"
