"""Which of the stored dead letters an operator means.

{"numbers": [...], "code": ..., "endpoint": ..., "since_ms": ..., "before_ms": ...} -> LetterFilter -> SQL
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamer.operation import Arguments
from uprotocol.status import code_name, invalid
from uprotocol.v1.ucode_pb2 import UCode

NUMBERS_MAX: Final = 1_000  # of one operation


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Letters that fit everything that is given. Times are Unix milliseconds of the last failure."""

    numbers: tuple[int, ...] = ()
    code: int | None = None
    endpoint: str | None = None
    since_ms: int | None = None
    before_ms: int | None = None  # exclusive
    after: int = 0  # only greater numbers
    until: int | None = None  # only numbers up to this one

    @classmethod
    def of(cls, given: Arguments, *, is_change: bool = True) -> LetterFilter:
        """Reads the arguments of an operation. Raises INVALID_ARGUMENT; for a change also if nothing is given, since
        all letters have to be meant expressly (`all`)."""
        texts, times = ("code", "endpoint"), ("since_ms", "before_ms")
        if is_change and given.flag("all") == any(name in given for name in ("numbers", *texts, *times)):
            raise invalid(
                "say which dead letters: their numbers, code, endpoint or time, or all of them (--all; all = true)"
            )
        since_ms, before_ms = (given.number(name) if name in given else None for name in times)
        return cls(
            tuple(given.numbers("numbers", NUMBERS_MAX)) if "numbers" in given else (),
            code_of(given.text("code")) if "code" in given else None,
            _written(given.text("endpoint")) if "endpoint" in given else None,
            since_ms,
            before_ms,
            given.number("after", 0),
            given.number("until") if "until" in given else None,
        )

    def sql(self) -> tuple[str, list[Any]]:
        """Returns the condition and its parameters."""
        terms: list[tuple[str, Sequence[Any]]] = [("number > ?", [self.after])]
        if self.numbers:
            terms.append((f"number in ({', '.join('?' * len(self.numbers))})", self.numbers))
        for column, value in (
            ("code =", self.code),
            ("endpoint =", self.endpoint),
            ("time_ms >=", self.since_ms),
            ("time_ms <", self.before_ms),
            ("number <=", self.until),
        ):
            if value is not None:
                terms.append((f"{column} ?", [value]))
        return " and ".join(term for term, _ in terms), [value for _, values in terms for value in values]


def _written(endpoint: str) -> str:
    """Raises INVALID_ARGUMENT for half a surrogate pair, which JSON may have and the store does not take."""
    if not endpoint.isprintable():
        raise invalid(f"endpoint: expected the name of an endpoint, got {endpoint[:64]!r}")
    return endpoint


def code_of(name: str) -> int:
    """Returns the UCode with this name. Raises INVALID_ARGUMENT."""
    known = {code_name(one) for one in UCode.values() if one}
    if name.upper() not in known:
        raise invalid(f"code: expected one of {', '.join(sorted(known))}; got {name[:64]!r}")
    return UCode.Value(name.upper())
