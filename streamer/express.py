"""The express lane: requests and responses, in memory, by priority, gone at their ttl. One queue and one pump per peer.

ingress -> put -> queue (bounded) -> pump -> peer
             |                         |
             +--------- fail ----------+--> a request's originator gets a response that says why, and it is a dead letter

A network that is away is tried again until the ttl ends. Where it says that nobody takes a request, the originator is told at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from streamer.dead_letter import DeadLetters
from streamer.endpoint import Endpoint, Endpoints
from streamer.hosted import HostedTransport
from streamer.retry import Backoff
from uprotocol import attributes as attrs
from uprotocol import uuid as uuids
from uprotocol.encoded import lane
from uprotocol.message import error_response
from uprotocol.status import RETRYABLE, code_name, is_nobody_listening
from uprotocol.v1.uattributes_pb2 import UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

BATCH_MAX: Final = 256  # messages sent at once; small, so that an urgent one need not wait long

Entry = tuple[UMessage, Endpoint | None]  # the message, and the endpoint that it came from (None: a service inside)


class Express:
    """All lanes, and the answers to requests that can't be dispatched (dispatcher section of the specification)."""

    def __init__(
        self,
        endpoints: Endpoints,
        hosted: HostedTransport,
        dead_letters: DeadLetters,
        *,
        messages_max: int,
        backoff: Callable[[], Backoff],
        now_ms: Callable[[], int] = uuids.now_ms,
    ) -> None:
        self._endpoints, self._hosted, self._dead_letters = endpoints, hosted, dead_letters
        self._messages_max, self._now_ms = messages_max, now_ms
        self.lanes = {endpoint.name: ExpressLane(endpoint, self, backoff(), now_ms) for endpoint in endpoints}
        self._inside: set[asyncio.Future[None]] = set()

    def put(self, peer: Endpoint, message: UMessage, origin: Endpoint | None) -> None:
        """Queue `message` for `peer`; a full queue answers RESOURCE_EXHAUSTED."""
        queue = self.lanes[peer.name]
        if len(queue) >= self._messages_max:
            peer.dropped["express_full"] += 1
            self.fail(
                message,
                UCode.RESOURCE_EXHAUSTED,
                f"{self._messages_max} messages wait for endpoint {peer.name!r}, which is the limit",
                peer,
            )
            return
        queue.put(message, origin)

    def fail(self, message: UMessage, code: UCode.ValueType, reason: str, endpoint: Endpoint) -> None:
        """`message` can't be dispatched: keep it as a dead letter, and answer its originator if it is a request.

        Not so a request of a hosted service: it is told, and asks again by itself. Were these dead letters, a network that is
        away for a day would push out those that nobody else knows of.
        """
        is_request = message.attributes.type == attrs.REQUEST
        if is_request and self._hosted.owns(message.attributes.source):
            taken = self._hosted.deliver([error_response(message.attributes, UStatus(code=code, message=reason))])
            if taken is not None:
                future = asyncio.ensure_future(taken)
                self._inside.add(future)
                future.add_done_callback(self._inside.discard)
            return
        self._dead_letters.add(message, code, reason, endpoint.name)
        if not is_request:
            return
        response = error_response(message.attributes, UStatus(code=code, message=reason))
        origin = self._endpoints.owner(response.attributes.sink.authority_name)
        if origin is not None and len(self.lanes[origin.name]) < self._messages_max:
            self.lanes[origin.name].put(response, None)


class ExpressLane:
    """The queue and the pump of one peer."""

    def __init__(self, peer: Endpoint, express: Express, backoff: Backoff, now_ms: Callable[[], int]) -> None:
        self.peer = peer
        self._express, self._backoff, self._now_ms = express, backoff, now_ms
        self._classes: list[deque[Entry]] = [deque() for _ in UPriority.values()]
        self._size = 0
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"ExpressLane({self.peer.name}, waiting={self._size})"

    def put(self, message: UMessage, origin: Endpoint | None) -> None:
        self._classes[lane(message.attributes)].append((message, origin))
        self._size += 1
        self._arrived.set()

    def _take(self) -> list[Entry]:
        """The next batch, highest class first; what has expired is failed instead."""
        batch: list[Entry] = []
        now = self._now_ms()
        for queue in reversed(self._classes):
            while queue and len(batch) < BATCH_MAX:
                entry = queue.popleft()
                self._size -= 1
                if attrs.is_expired(entry[0].attributes, now):
                    self._express.fail(
                        entry[0], UCode.DEADLINE_EXCEEDED, f"its ttl ran out before endpoint {self.peer.name!r} took it", self.peer
                    )
                else:
                    batch.append(entry)
        return batch

    def _put_back(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            self._classes[lane(entry[0].attributes)].appendleft(entry)
        self._size += len(entries)

    async def run(self) -> None:
        """Pump until cancelled."""
        while True:
            batch = self._take()
            if not batch:
                self._arrived.clear()
                if not self._size:
                    await self._arrived.wait()
                continue
            statuses = await self.peer.send_batch([message for message, _ in batch])
            again = []
            for entry, status in zip(batch, statuses, strict=True):
                if status.code == UCode.OK:
                    self.peer.forwarded += 1
                elif status.code in RETRYABLE and not is_nobody_listening(status):
                    again.append(entry)  # the ttl is looked at when it is its turn again
                else:
                    self._express.fail(
                        entry[0], status.code, f"endpoint {self.peer.name!r}: {status.message or code_name(status.code)}", self.peer
                    )
            if again:
                self._put_back(again)
                await self._backoff.wait(self._soonest_expiry_ms())
            else:
                self._backoff.reset()

    def _soonest_expiry_ms(self) -> int | None:
        """How long until something that waits expires: its originator is told then, not later."""
        now = self._now_ms()
        ends = [end - now for queue in self._classes for message, _ in queue if (end := attrs.expires_ms(message.attributes)) is not None]
        return max(min(ends) + 1, 0) if ends else None
