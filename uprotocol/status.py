"""UStatus as an exception, and the codes as one enum.

error of a library or the system -> UStatusError(code, message) -> UStatus on the wire   (error model, spec section 4)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from google.protobuf.any_pb2 import Any

from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

OK: Final = UStatus(code=UCode.OK)

RETRYABLE: Final = frozenset({UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED})
"""Codes after which the same message may be sent again. After any other code it is never sent again."""

FINAL: Final = frozenset({UCode.INVALID_ARGUMENT, UCode.PERMISSION_DENIED, UCode.NOT_FOUND, UCode.UNIMPLEMENTED})
"""Codes of a permanent refusal. A request that must succeed is repeated after any other code, including codes of a
later specification."""

_NOT_FOUND: Final = Any()
_NOT_FOUND.Pack(UStatus(code=UCode.NOT_FOUND))


def nobody_listens(message: str) -> UStatus:
    """The status of a message for which the network has no receiver (MQTT: No matching subscribers).

    UNAVAILABLE, since a receiver may come back, with a detail of code NOT_FOUND, since the network itself works. The
    caller of a request gets it at once; a publish can wait for a receiver (`is_nobody_listening`).
    """
    return UStatus(code=UCode.UNAVAILABLE, message=message, details=[_NOT_FOUND])


def is_nobody_listening(status: UStatus) -> bool:
    """True for a status of `nobody_listens`."""
    return status.code == UCode.UNAVAILABLE and _NOT_FOUND in status.details


T = TypeVar("T")


class Settled(NamedTuple, Generic[T]):
    """The result of a batch: its items, with their status if that is not OK."""

    sent: list[T]
    again: list[tuple[T, UStatus]]  # may be sent again
    refused: list[tuple[T, UStatus]]  # permanently


def settle(items: Sequence[T], statuses: Sequence[UStatus]) -> Settled[T]:
    """Sort `items` by their `statuses`."""
    if len(items) == len(statuses) == statuses.count(OK):
        return Settled(list(items), [], [])
    settled: Settled[T] = Settled([], [], [])
    for item, status in zip(items, statuses, strict=True):
        if status is OK or not status.code:
            settled.sent.append(item)
        else:
            (settled.again if status.code in RETRYABLE else settled.refused).append((item, status))
    return settled


class UStatusError(Exception):
    """An operation failed with a UStatus other than OK.

    `code` is the UCode, `message` says what was expected, what came, and what to do.
    """

    def __init__(self, code: UCode.ValueType, message: str = "", *, status: UStatus | None = None) -> None:
        assert code != UCode.OK, "OK is not an error"
        if not message.isascii():  # it may quote half a surrogate pair, which JSON has and a UStatus can't have
            message = message.encode(errors="backslashreplace").decode()
        super().__init__(code, message)  # both, so that it can be pickled
        self.status = status if status is not None else UStatus(code=code, message=message)

    @classmethod
    def from_status(cls, status: UStatus) -> UStatusError:
        return cls(status.code, status.message, status=status)

    @property
    def code(self) -> UCode.ValueType:
        return self.status.code

    @property
    def message(self) -> str:
        return self.status.message

    @property
    def retryable(self) -> bool:
        return self.code in RETRYABLE

    def __str__(self) -> str:
        return f"{code_name(self.code)}: {self.message}" if self.message else code_name(self.code)

    def __repr__(self) -> str:
        return f"UStatusError({self})"


def code_name(code: int) -> str:
    """Returns the name, such as `INVALID_ARGUMENT` for 3, or the number for a code of a later specification."""
    return UCode.Name(UCode.ValueType(code)) if code in UCode.values() else str(code)


def invalid(message: str) -> UStatusError:
    """Returns an INVALID_ARGUMENT error."""
    return UStatusError(UCode.INVALID_ARGUMENT, message)
