"""The HTTP status that answers an error, unless a port has a reason for another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from uprotocol.v1.ucode_pb2 import UCode

RETRY_LATER: Final = {"Retry-After": "1"}  # the header of an answer to a client that should come back, in seconds
STATUSES: Final[Mapping[int, int]] = {
    UCode.INVALID_ARGUMENT: 400,
    UCode.UNAUTHENTICATED: 401,
    UCode.PERMISSION_DENIED: 403,
    UCode.NOT_FOUND: 404,
    UCode.RESOURCE_EXHAUSTED: 429,
    UCode.UNAVAILABLE: 503,
    UCode.DEADLINE_EXCEEDED: 504,
}
