"""What people and programs ask of a running streamer, by name: the control socket and the admin port offer the same.

{"do": NAME, ARGUMENT: value, ...} -> Operations.answer -> Operation.run(Arguments) -> a JSON object
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode

NUMBER_MAX: Final = (1 << 63) - 1  # fits SQLite
SHOWN_CHARACTERS_MAX: Final = 64  # of a wrong argument, in the error


class Arguments:
    """The arguments of one request, read with their types. Errors are INVALID_ARGUMENT and name the argument."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def text(self, name: str, default: str | None = None) -> str:
        """Returns a text; `default`, or an error without one, if it is not given."""
        found = self._given.get(name, default)
        if not isinstance(found, str):
            raise invalid(f"{name}: expected a text, got {_shown(found)}")
        return found

    def number(self, name: str, default: int | None = None) -> int:
        """Returns a whole number of at most NUMBER_MAX; `default`, or an error without one, if it is not given."""
        found = self._given.get(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or abs(found) > NUMBER_MAX:
            raise invalid(f"{name}: expected a whole number, got {_shown(found)}")
        return found

    def numbers(self, name: str, most: int) -> list[int]:
        """Returns a list of 1 to `most` whole numbers."""
        found = self._given.get(name)
        if not isinstance(found, list) or not 0 < len(found) <= most:
            raise invalid(f"{name}: expected a list of 1 to {most} whole numbers, got {_shown(found)}")
        return [Arguments({name: one}).number(name) for one in found]

    def flag(self, name: str) -> bool:
        """Returns a boolean; False if it is not given."""
        found = self._given.get(name, False)
        if not isinstance(found, bool):
            raise invalid(f"{name}: expected true or false, got {_shown(found)}")
        return found

    def __contains__(self, name: str) -> bool:
        """Returns True if the argument is given and not null."""
        return self._given.get(name) is not None


def _shown(found: object) -> str:
    return repr(found)[:SHOWN_CHARACTERS_MAX]


class Operation(NamedTuple):
    """`arguments`: the names of those that it takes. `is_change`: it changes something; otherwise it only reads."""

    run: Callable[[Arguments], Awaitable[dict[str, Any]]]
    arguments: tuple[str, ...] = ()
    is_change: bool = False


class Operations:
    def __init__(self, known: Mapping[str, Operation]) -> None:
        self._known = known

    async def answer(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Runs an operation. Raises NOT_FOUND, INVALID_ARGUMENT for its arguments, and the errors of the operation."""
        operation = self._known.get(name)
        if operation is None:
            known = ", ".join(sorted(self._known))
            raise UStatusError(UCode.NOT_FOUND, f"unknown operation {name[:64]!r}; known: {known}")
        if unknown := [one for one in given if one not in operation.arguments]:
            known = ", ".join(operation.arguments) or "none"
            raise invalid(f"unknown argument {unknown[0][:64]!r} of {name}; known: {known}")
        return await operation.run(Arguments(given))
