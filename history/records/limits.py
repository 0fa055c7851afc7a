"""Limits of what readers ask, which both sides of a history keep to."""

from __future__ import annotations

from typing import Final

from uprotocol.status import invalid

PATTERNS_MAX: Final = 1_000  # of one request; a caller that wants more uses wildcards
WILDCARD_PATTERNS_MAX: Final = 64  # each is compared with every kind of stream
WINDOW_BYTES_MAX: Final = 8 << 20  # sent and not yet taken by one follower: 20 MB/s with a round trip of 200 ms
CONSUMER_LEASE_MS: Final = 60_000  # by default
HOLDER_LENGTH_MAX: Final = 64  # characters


def checked_holder(holder: str) -> str:
    """Returns `holder`, the name of who reads for a consumer. Raises INVALID_ARGUMENT."""
    if len(holder) > HOLDER_LENGTH_MAX or not holder.isprintable():
        what = f"expected a holder of at most {HOLDER_LENGTH_MAX} printable characters"
        raise invalid(f"{what}, got {holder[:50]!r}")
    return holder
