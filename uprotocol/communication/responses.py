"""Responses on their way to the network: as many at once as have gathered, and a bounded number.

post(response)          -> waiting -> one send_batch after the other -> the network
refuse(request, error) -'             '-> not taken: counted, and the caller's own timer tells it
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Final

import structlog

from uprotocol import uri as uris
from uprotocol.message import error_response
from uprotocol.status import UStatusError
from uprotocol.transport import UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

RESPONSES_WAITING_MAX: Final = 4_096  # for the network to take them: the refusals of a burst must find room too
RESPONSES_BATCH_MAX: Final = 512  # beyond it the cost per message no longer falls

log = structlog.get_logger()


class Responses:
    """The outbox of whoever serves methods. `dropped` counts what did not leave, by reason; its owner may count more there."""

    def __init__(self, transport: UTransport, *, waiting_max: int = RESPONSES_WAITING_MAX, batch_max: int = RESPONSES_BATCH_MAX) -> None:
        self._transport, self._waiting_max, self._batch_max = transport, waiting_max, batch_max
        self._waiting: deque[UMessage] = deque()
        self._sender: asyncio.Task[None] | None = None
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def post(self, response: UMessage) -> None:
        if len(self._waiting) >= self._waiting_max:
            self.dropped["responses_full"] += 1
            return
        self._waiting.append(response)
        if self._sender is None:
            self._sender = asyncio.ensure_future(self._send())

    def refuse(self, request: UAttributes, error: BaseException) -> None:
        """Answer with the code of a UStatusError; anything else is a fault of ours: INTERNAL (dsn~service-error-model-error-response~1)."""
        if isinstance(error, UStatusError):
            status = error.status
        else:
            log.error("a request handler failed", method=uris.format(request.sink), exc_info=error)
            status = UStatus(code=UCode.INTERNAL, message="the service failed to handle the request; its log says why")
        try:
            response = error_response(request, status)
        except UStatusError:  # so malformed that no valid response to it exists
            self.dropped["unanswerable"] += 1
        else:
            self.post(response)

    async def drain(self, ms_max: int) -> None:
        """Wait until the network has taken them, at most `ms_max`; the rest is dropped and counted."""
        if self._sender is not None:
            _, late = await asyncio.wait({self._sender}, timeout=ms_max / 1000)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self.dropped["response_not_sent"] += len(self._waiting)
        self._waiting.clear()

    async def _send(self) -> None:
        """Until nothing waits."""
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._batch_max))]
                try:
                    statuses = await self._transport.send_batch(batch)
                except UStatusError as error:
                    statuses = [error.status] * len(batch)
                except asyncio.CancelledError:
                    self.dropped["response_not_sent"] += len(batch)
                    raise
                except Exception as error:  # a fault of the transport must not end the answers
                    statuses = [UStatus(code=UCode.INTERNAL, message=repr(error))] * len(batch)
                failed = [status for status in statuses if status.code]
                if failed:
                    self.dropped["response_not_sent"] += len(failed)
                    log.warning("responses were not sent, and their callers will time out", responses=len(failed), why=failed[0].message)
        finally:
            self._sender = None
