"""The first half of every send_batch: what may not leave, and why.

message -> valid?            -> not expired?      -> not too large?   -> the network
           INVALID_ARGUMENT     DEADLINE_EXCEEDED    INVALID_ARGUMENT    UNAVAILABLE: stopped() fills in the rest of the batch
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from uprotocol import attributes as attrs
from uprotocol import uuid as uuids
from uprotocol.status import OK, UStatusError, code_name
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

ROUTES_CACHED_MAX: Final = 32_768  # (type, source, sink) known to be valid; the cache starts anew when it is full

Route = tuple[int, bytes, bytes | None]

NOT_TRIED: Final = (
    "an earlier message of the batch could not be sent, so this one was not tried: send it again after that one"
)


class Outbox:
    """Checks what is about to be sent. Shared by all plugins."""

    def __init__(self, *, now_ms: Callable[[], int] = uuids.now_ms) -> None:
        self.now_ms = now_ms
        self._valid_routes: set[Route] = set()

    @staticmethod
    def route(message: UMessage) -> Route:
        """What of `message` decides where it goes: a hashable key for whatever a plugin caches by address."""
        attributes = message.attributes
        sink = attributes.sink.SerializeToString() if attributes.HasField("sink") else None
        return (attributes.type, attributes.source.SerializeToString(), sink)

    def refusal(self, message: UMessage, now_ms: int, route: Route | None = None) -> UStatus | None:
        """None if it may leave; else INVALID_ARGUMENT, or DEADLINE_EXCEEDED for what has expired (A-14). `route` if it
        is known already."""
        attributes = message.attributes
        route = route if route is not None else self.route(message)
        try:
            if route not in self._valid_routes:
                source = attributes.source if attributes.HasField("source") else None
                attrs.validate_route(attributes.type, source, attributes.sink if attributes.HasField("sink") else None)
                if len(self._valid_routes) >= ROUTES_CACHED_MAX:
                    self._valid_routes.clear()
                self._valid_routes.add(route)
            attrs.validate_rest(attributes)
            attrs.validate_payload(attributes, message.HasField("payload"))
        except UStatusError as error:
            return error.status
        if attributes.ttl and attrs.is_expired(attributes, now_ms):
            late_ms = now_ms - uuids.time_ms(attributes.id) - attributes.ttl
            return UStatus(
                code=UCode.DEADLINE_EXCEEDED,
                message=f"the message expired {late_ms} ms ago (ttl {attributes.ttl} ms): not sent",
            )
        return None


def too_large(size: int, bytes_max: int) -> UStatus:
    """The answer to a message of `size` bytes on the network, where its owner (`UTransport.wire_bytes_max`) allows
    fewer: it is that message's own fault, which no later try mends."""
    return UStatus(
        code=UCode.INVALID_ARGUMENT,
        message=f"a message has at most {bytes_max} bytes here, attributes and payload together, got {size}: send "
        "less, or raise "
        "message_bytes_max at both ends",
    )


def stopped(statuses: list[UStatus], count: int, why: UStatus) -> list[UStatus]:
    """`statuses` filled up to `count`: the first missing one is `why`, those behind it were not tried (code as
    `why`)."""
    assert why.code != UCode.OK, f"only a failure stops a batch, not {code_name(why.code)}"
    if len(statuses) < count:
        statuses.append(why)
    while len(statuses) < count:
        statuses.append(UStatus(code=why.code, message=NOT_TRIED))
    return statuses


__all__ = ["OK", "Outbox", "Route", "stopped", "too_large"]
