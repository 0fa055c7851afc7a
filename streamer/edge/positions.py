"""How far an HTTP client has read: the `id` of an event, and `next` of a poll. Pure.

ReaderState <-> text: "p" | base64url of: for each log, its incarnation, its seq, whether it is idle, the newest witness
text of a client -> StreamStart: where to begin, as a position or as the start of a PollRequest
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from history.reading.acceptor import ReaderState
from history.records.chunk import INCARNATION_BYTES, SEQ_MAX
from history.records.witness import DIGEST_BYTES
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uri_pb2 import UUri

POSITION_MARK: Final = "p"
LOGS_MAX: Final = 16  # a streamer has two; others have ended
TEXT_MAX: Final = 2_048

_IDLE, _HAS_DIGEST = 1, 2
_HEAD: Final = INCARNATION_BYTES + 9

MS_MIN: Final = 31_536_000_000  # the end of 1970: no message is so old, and seconds are less until the year 2969

EXPECTED: Final = (
    "expected earliest, latest, the id of an event, a time (2026-01-31T12:00:00Z, or Unix milliseconds), or the id of "
    "a message"
)


def position_text(state: ReaderState) -> str:
    """Returns the text from which `since` reads on behind `state`."""
    parts = []
    for incarnation, seq in list(state.positions.items())[:LOGS_MAX]:
        digest = state.known.get(incarnation, {}).get(seq, b"")
        has_digest = len(digest) == DIGEST_BYTES
        flags = _IDLE * (incarnation in state.idle) | _HAS_DIGEST * has_digest
        parts.append(incarnation + bytes([flags]) + seq.to_bytes(8, "big") + digest * has_digest)
    return POSITION_MARK + base64.urlsafe_b64encode(b"".join(parts)).rstrip(b"=").decode()


def position_of(text: str) -> ReaderState:
    """Returns the state of a text that `position_text` made. Raises INVALID_ARGUMENT."""
    if not text.startswith(POSITION_MARK) or len(text) > TEXT_MAX:
        raise invalid(f"{EXPECTED}, got {text[:80]!r}")
    try:
        data = base64.b64decode(text[1:] + "=" * (-(len(text) - 1) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise invalid(f"expected the id of an event as it came, got {text[:80]!r}") from None
    state, at = ReaderState(), 0
    while at < len(data):
        head = data[at : at + _HEAD]
        incarnation, flags, seq = (
            head[:INCARNATION_BYTES],
            head[INCARNATION_BYTES:][:1],
            int.from_bytes(head[-8:], "big"),
        )
        at += _HEAD
        has_digest = len(head) == _HEAD and bool(flags[0] & _HAS_DIGEST)
        digest = data[at : at + DIGEST_BYTES] if has_digest else b""
        at += len(digest)
        is_whole = len(head) == _HEAD and len(digest) == DIGEST_BYTES * has_digest and flags[0] <= _IDLE | _HAS_DIGEST
        if not is_whole or seq > SEQ_MAX or incarnation in state.positions or len(state.positions) >= LOGS_MAX:
            raise invalid(f"expected the id of an event as it came, got {text[:80]!r}")
        state.positions[incarnation] = seq
        if digest:
            state.known[incarnation] = {seq: digest}
        if flags[0] & _IDLE:
            state.idle.add(incarnation)
    return state


@dataclass(frozen=True)
class StreamStart:
    """Where a client begins: behind `state`, and in logs that it does not name at `start`."""

    state: ReaderState = field(default_factory=ReaderState)
    start: PollRequest = field(default_factory=PollRequest)

    @classmethod
    def of(cls, text: str) -> StreamStart:
        """Raises INVALID_ARGUMENT."""
        if text in ("", "latest"):
            return cls(start=PollRequest(latest=True))
        if text == "earliest":
            return cls(start=PollRequest(earliest=True))
        if text.startswith(POSITION_MARK):
            return cls(position_of(text), PollRequest(earliest=True))
        if re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text):
            try:
                return cls(start=PollRequest(after_message_id=uuids.to_bytes(uuids.parse(text))))
            except UStatusError as error:
                raise invalid(f"{EXPECTED}, got {text!r}: {error.message}") from None
        start = PollRequest()
        try:
            if re.fullmatch(r"[0-9]{1,15}", text):
                if 0 < int(text) < MS_MIN:
                    raise invalid(f"expected Unix milliseconds, got {text}, which is in 1970: are these seconds?")
                start.after_time.FromMilliseconds(int(text))
            else:
                # a zone's + means a space in a URL
                moment = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
                start.after_time.FromDatetime((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC))
        except (ValueError, OverflowError):
            raise invalid(f"{EXPECTED}, got {text[:80]!r}") from None
        return cls(start=start)


def poll_of(topics: Iterable[UUri], state: ReaderState, start: PollRequest) -> PollRequest:
    """Returns the request for what is behind `state`."""
    asked = PollRequest(topics=topics, positions=state.request())
    asked.MergeFrom(start)
    return asked
