"""The epoch of a record: a group of topics, and a logical time."""

from __future__ import annotations

from typing import Final, NamedTuple

from uprotocol.core.ustreamer.v1.ustreamer_pb2 import LogicalTime
from uprotocol.status import invalid

# A logical time: (second,), or (trip, lap, sector). It is less than or equal to another one if each of its numbers is,
# so for some pairs neither is. All times of one stream have the same length.
Time = tuple[int, ...]

NUMBER_MIN: Final = -(1 << 63)  # of a time: the range on the wire and in a file
NUMBER_MAX: Final = (1 << 63) - 1
LENGTH_MAX: Final = 8  # numbers of a time
GROUP_MAX: Final = 64  # bytes of its name


class Epoch(NamedTuple):
    """The epoch of a record: a time of a group of topics."""

    group: str
    time: Time


def time_of(time: LogicalTime) -> Time:
    return tuple(time.numbers)


def wire_time(time: Time) -> LogicalTime:
    """Raises INVALID_ARGUMENT if `time` is not a tuple of 64-bit integers."""
    try:
        return LogicalTime(numbers=time)
    except (TypeError, ValueError):
        raise invalid(f"expected a time as a tuple of integers of 64 bits, got {time!r}") from None
