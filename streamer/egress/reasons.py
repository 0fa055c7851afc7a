"""Why messages to an address wait, from an answer of the network; and how operators and logs call it. Pure.

kind       limit                   label, condition                     ends by itself
refused    egress.refused_hours    refused                              if the code is one of a shortage
unheard    egress.unheard_hours    left: somebody has listened there    yes
                                   since the start; else unheard
"""

from __future__ import annotations

from typing import Final, Literal

from streamer.walk.sender import QueuedRecord
from uprotocol import attributes as attrs
from uprotocol.status import code_name, is_nobody_listening
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.ustatus_pb2 import UStatus

Kind = Literal["refused", "unheard"]
Label = Literal["refused", "unheard", "left"]
LABELS: Final[tuple[Label, ...]] = ("refused", "unheard", "left")
"""Kinds as operators see them."""
Fate = Literal["again", "dead", "nobody", Kind]
"""What becomes of a message that the network has not taken: it is sent again, becomes a dead letter, is counted since
nobody listens, or waits."""

ACCESS_CODES: Final = (UCode.PERMISSION_DENIED, UCode.UNAUTHENTICATED)
STATE_CODES: Final = (UCode.FAILED_PRECONDITION, UCode.NOT_FOUND, UCode.ABORTED, UCode.CANCELLED)
# refusals that concern more than one message, and that a person or time can end
HELD_CODES: Final = frozenset((*ACCESS_CODES, *STATE_CODES, UCode.RESOURCE_EXHAUSTED))
# refusals of a shortage, which often ends without a person
PASSING_CODES: Final = (UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED, UCode.RESOURCE_EXHAUSTED)


def fate_of_failure(item: QueuedRecord, status: UStatus, *, is_durable: bool) -> Fate:
    """Returns what becomes of a message that the network may take later."""
    if not is_nobody_listening(status):
        return "again"
    return "unheard" if is_durable and item[1].stamp.type == attrs.PUBLISH else "nobody"


def fate_of_refusal(status: UStatus, *, is_durable: bool) -> Fate:
    """Returns what becomes of a message that the network has refused. A ring can't wait."""
    if status.code in HELD_CODES and is_durable:
        return "refused"
    return "again" if status.code == UCode.RESOURCE_EXHAUSTED else "dead"


def text_of(status: UStatus) -> str:
    return status.message or code_name(status.code)
