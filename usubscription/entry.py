"""Where Subscribe and Unsubscribe come in: in batches, without a task for each, since a fleet that reconnects sends thousands a second.

arrived batch -> check, codec -> store.command -> one transaction -> answered -> responses -> one send_batch
                      '-> refused at once: commstatus and UStatus

The other methods are served by InMemoryRpcServer; to callers there is no difference.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog
from google.protobuf.message import Message

from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import RequestCheck
from uprotocol.message import PROTOBUF, error_response
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.database import Outcome
from usubscription.outbox import AnswersFirst, Tag
from usubscription.state import Subscribe, Unsubscribe
from usubscription.store import Store

RESPONSES_WAITING_MAX: Final = 20_000  # for the network to take them: as many as there may be requests before the store
RESPONSES_BATCH_MAX: Final = 128  # at once: beyond it what waits behind them would feel it
DRAIN_MS_MAX: Final = 5_000  # close() gives the network this long to take what is answered

_CALLERS: Final = uris.pattern(resource=uris.RESOURCE_REPLY)

Read = Callable[[UMessage], tuple[Subscribe | Unsubscribe, Any]]
"""What a request asks, and what its answer needs of it. Raises UStatusError."""

Write = Callable[[Any, Outcome], Message]

log = structlog.get_logger()


class Asked:
    """One request until it is answered."""

    __slots__ = ("context", "entry", "request", "tag", "waits")

    def __init__(self, entry: CommandEntry, request: UAttributes, context: Any) -> None:
        self.entry, self.request, self.context = entry, request, context
        self.tag: Tag = (request.id.msb, request.id.lsb)
        self.waits = True

    def answered(self, answer: Outcome | BaseException) -> None:
        if self.waits:
            self.waits = False
            self.entry.answer(self, answer)


class CommandEntry:
    """One method of one version."""

    def __init__(
        self,
        answers: AnswersFirst,
        local: LocalUriProvider,
        method: int,
        store: Store,
        read: Read,
        write: Write,
        check: RequestCheck | None,
    ) -> None:
        self._answers, self._store, self._read, self._write, self._check = answers, store, read, write, check
        self._sink = local.get_resource(method)
        self._outbox: deque[UMessage] = deque()
        self._sender: asyncio.Task[None] | None = None
        self.requests = 0
        self.dropped: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"CommandEntry({uris.format(self._sink)}, responses={len(self._outbox)})"

    async def open(self) -> None:
        await self._answers.register_listener(_CALLERS, self, self._sink)

    async def close(self) -> None:
        """Take no more requests."""
        try:
            await self._answers.unregister_listener(_CALLERS, self, self._sink)
        except UStatusError as error:  # closed already, and its listeners with it, or never opened
            if error.code not in (UCode.NOT_FOUND, UCode.UNAVAILABLE):
                raise

    async def drain(self) -> None:
        """Wait until the network has taken the responses."""
        if self._sender is not None:
            _, late = await asyncio.wait({self._sender}, timeout=DRAIN_MS_MAX / 1000)
            for task in late:
                task.cancel()

    def on_receive(self, message: UMessage) -> None:
        self.on_receive_batch([message])

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        now_ms = uuids.now_ms()
        for request in messages:
            self.requests += 1
            if attrs.is_expired(request.attributes, now_ms):
                self.dropped["expired"] += 1
                continue
            try:
                if self._check is not None:
                    self._check(request)
                event, context = self._read(request)
                self._store.command(event, Asked(self, request.attributes, context))
            except Exception as error:
                self._refuse(request.attributes, error)

    def answer(self, asked: Asked, answer: Outcome | BaseException) -> None:
        """dsn~service-error-model-success-response~1."""
        if isinstance(answer, BaseException):
            self._refuse(asked.request, answer)
            return
        request = asked.request
        response = UMessage(payload=self._write(asked.context, answer).SerializeToString())
        attributes = response.attributes
        attributes.id.CopyFrom(uuids.new())
        attributes.type = attrs.RESPONSE
        attributes.source.CopyFrom(request.sink)
        attributes.sink.CopyFrom(request.source)
        attributes.reqid.CopyFrom(request.id)
        attributes.priority, attributes.ttl, attributes.payload_format = request.priority, request.ttl, PROTOBUF
        self._post(response)

    def _refuse(self, request: UAttributes, error: BaseException) -> None:
        """dsn~service-error-model-error-response~1."""
        if isinstance(error, UStatusError):
            status = error.status
        else:
            log.error("a command failed", method=uris.format(self._sink), exc_info=error)
            status = UStatus(code=UCode.INTERNAL, message="the service failed to handle the request; its log says why")
        try:
            self._post(error_response(request, status))
        except UStatusError:  # so malformed that no valid response to it exists
            self.dropped["unanswerable"] += 1

    def _post(self, response: UMessage) -> None:
        if len(self._outbox) >= RESPONSES_WAITING_MAX:
            self.dropped["responses_full"] += 1
            return
        self._outbox.append(response)
        if self._sender is None:
            self._sender = asyncio.ensure_future(self._send())

    async def _send(self) -> None:
        try:
            while self._outbox:
                batch = [self._outbox.popleft() for _ in range(min(len(self._outbox), RESPONSES_BATCH_MAX))]
                try:
                    statuses = await self._answers.send_batch(batch)
                except UStatusError as error:
                    statuses = [error.status] * len(batch)
                failed = [status for status in statuses if status.code != UCode.OK]
                if failed:
                    self.dropped["response_not_sent"] += len(failed)
                    log.warning("responses were not sent, and their callers will time out", responses=len(failed), why=failed[0].message)
        finally:
            self._sender = None
