"""Where Subscribe and Unsubscribe come in: in batches, without a task for each, since a fleet that reconnects sends
thousands a second.

arrived batch -> check, codec -> store.command -> one transaction -> answered -> responses -> one send_batch
                      '-> refused at once: commstatus and UStatus

One listener takes both methods of both versions, through one filter (gate.py), and one queue leads to the store: so
commands count in the order in which they arrive, and of those of one client about one topic the last one wins.

The other methods are served by InMemoryRpcServer; to callers there is no difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message

from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.communication import RequestCheck, Responses
from uprotocol.message import PROTOBUF
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription.database import Commanded, Outcome
from usubscription.outbox import AnswersFirst, Tag
from usubscription.quota import Caller, Quota, weight
from usubscription.state import Subscribe, Unsubscribe
from usubscription.store import WAITING_MAX, Store

RESPONSES_WAITING_MAX: Final = 20_000  # for the network to take them: as many as there may be requests before the store
RESPONSES_BATCH_MAX: Final = 128  # at once: beyond it what waits behind them would feel it
DRAIN_MS_MAX: Final = 5_000  # close() gives the network this long to take what is answered

_CALLERS: Final = uris.pattern(resource=uris.RESOURCE_REPLY)


class Method(NamedTuple):
    """One method of one version."""

    name: str
    sink: UUri
    read: Callable[[UMessage], tuple[Subscribe | Unsubscribe, Any]]
    """What a request asks, and what its answer needs of it. Raises UStatusError."""
    write: Callable[[Any, Outcome], Message]


class Asked:
    """One request until it is answered."""

    __slots__ = ("context", "entry", "method", "request", "tag", "waits", "weight", "who")

    def __init__(
        self, entry: CommandEntry, method: Method, request: UAttributes, context: Any, who: Caller, weight: int
    ) -> None:
        self.entry, self.method, self.request, self.context, self.who, self.weight = (
            entry,
            method,
            request,
            context,
            who,
            weight,
        )
        self.tag: Tag = (request.id.msb, request.id.lsb)
        self.waits = True

    @property
    def request_id(self) -> bytes:
        """16 bytes."""
        return self.tag[0].to_bytes(8, "big") + self.tag[1].to_bytes(8, "big")

    def answered(self, answer: Outcome | BaseException) -> None:
        if self.waits:
            self.waits = False
            self.entry.waiting.add(self.who, -self.weight)
            self.entry.answer(self, answer)


class CommandEntry:
    """Subscribe and Unsubscribe of all versions. `requests` counts by the methods' names."""

    def __init__(
        self,
        answers: AnswersFirst,
        store: Store,
        methods: Sequence[Method],
        check: RequestCheck | None,
        own: Collection[str] = (),
    ) -> None:
        """`own`: the authorities of the service, whose share of what may wait is larger."""
        self._answers, self._store, self._check = answers, store, check
        self.waiting = Quota("requests waiting", WAITING_MAX, own)
        self.refused: Counter[str] = Counter()
        self._methods = {(method.sink.ue_version_major, method.sink.resource_id): method for method in methods}
        self._responses = Responses(answers, waiting_max=RESPONSES_WAITING_MAX, batch_max=RESPONSES_BATCH_MAX)
        self.dropped = self._responses.dropped
        self.requests = Counter({method.name: 0 for method in methods})

    def __repr__(self) -> str:
        return f"CommandEntry({', '.join(self.requests)}, responses={len(self._responses)})"

    async def open(self) -> None:
        for method in self._methods.values():
            await self._answers.register_listener(_CALLERS, self, method.sink)

    async def close(self) -> None:
        """Take no more requests."""
        for method in self._methods.values():
            try:
                await self._answers.unregister_listener(_CALLERS, self, method.sink)
            except UStatusError as error:  # closed already, and its listeners with it, or never opened
                if error.code not in (UCode.NOT_FOUND, UCode.UNAVAILABLE):
                    raise

    async def drain(self, ms_max: int = DRAIN_MS_MAX) -> None:
        """Wait until the network has taken the responses, for a while."""
        await self._responses.drain(ms_max)

    def on_receive(self, message: UMessage) -> None:
        self.on_receive_batch([message])

    def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        now_ms = uuids.now_ms()
        for request in messages:
            sink = request.attributes.sink
            method = self._methods[sink.ue_version_major, sink.resource_id]
            self.requests[method.name] += 1
            if attrs.is_expired(request.attributes, now_ms):
                self.dropped["expired"] += 1
                continue
            try:
                if self._check is not None:
                    self._check(request)
                self._take(method, request)
            except Exception as error:
                self._responses.refuse(request.attributes, error)

    def _take(self, method: Method, request: UMessage) -> None:
        """Raises UStatusError; RESOURCE_EXHAUSTED for a caller that has its share of what may wait for the store."""
        source = request.attributes.source
        who, size = (source.authority_name, source.ue_id), weight(len(request.payload))
        if (why := self.waiting.room(who, size)) is not None:
            self.refused["waiting"] += 1
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"{why}: wait for the answers")
        event, context = method.read(request)
        asked = Asked(self, method, request.attributes, context, who, size)
        self._store.command(Commanded(event, asked.request_id), asked)
        self.waiting.add(who, size)

    def answer(self, asked: Asked, answer: Outcome | BaseException) -> None:
        """dsn~service-error-model-success-response~1."""
        if isinstance(answer, BaseException):
            self._responses.refuse(asked.request, answer)
            return
        request = asked.request
        response = UMessage(payload=asked.method.write(asked.context, answer).SerializeToString())
        attributes = response.attributes
        attributes.id.CopyFrom(uuids.new())
        attributes.type = attrs.RESPONSE
        attributes.source.CopyFrom(request.sink)
        attributes.sink.CopyFrom(request.source)
        attributes.reqid.CopyFrom(request.id)
        attributes.priority, attributes.ttl, attributes.payload_format = request.priority, request.ttl, PROTOBUF
        self._responses.post(response)
