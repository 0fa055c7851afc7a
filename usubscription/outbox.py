"""Tells changes: to the subscriber, to those who registered, and to everybody on the change topics; after the answer, in order.

outbox (committed) -> wait for the responses of their requests -> messages -> send_batch -> Sent(number) -> deleted with a later commit
                                                                     |
                                                                     '-> network away: again, later; refused: counted
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Final

import structlog

from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.attributes import NOTIFICATION, PUBLISH
from uprotocol.message import PROTOBUF
from uprotocol.status import RETRYABLE, UStatusError
from uprotocol.transport import Capability, UListener, UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.codec import CHANGE_RESOURCE, CODECS, ENTITY_TYPE
from usubscription.database import Sent
from usubscription.reader import StoredChange
from usubscription.store import Store

CHANGES_WAITING_MAX: Final = 10_000  # in memory; the others are read from the store when it is their turn
CHANGES_BATCH_MAX: Final = 16  # some 50 messages at once, 1 ms of the loop: what waits for it is answers
GATHER_MS: Final = 5  # while changes follow one another, so that they leave together: a message alone costs ten times as much
NOTE_MS: Final = 200  # between notes of what was told: each is a commit, and after a crash only what came since is told twice
ANSWER_WAIT_MS_MAX: Final = 1_000  # for the response to leave first; a response that the RPC server had to drop never does
ANSWERS_KEPT_MAX: Final = 20_000  # requests whose response has left, until their change asks for it
RETRY_FIRST_MS: Final = 200  # doubles up to ...
RETRY_MAX_MS: Final = 5_000  # ... as long as the network is away
PRIORITY: Final = UPriority.UPRIORITY_CS2

Tag = tuple[int, int]
"""A request's id."""

log = structlog.get_logger()


class AnswersFirst(UTransport):
    """The transport as the RPC servers see it: it notes which responses have left."""

    def __init__(self, inner: UTransport) -> None:
        self._inner = inner
        self.capabilities = inner.capabilities
        self._left: dict[Tag, None] = {}
        self._news = asyncio.Event()

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        try:
            return await self._inner.send_batch(messages)
        finally:  # failed or not: it won't leave later
            for message in messages:
                self._left[message.attributes.reqid.msb, message.attributes.reqid.lsb] = None
            while len(self._left) > ANSWERS_KEPT_MAX:
                del self._left[next(iter(self._left))]
            self._news.set()

    async def left(self, tags: set[Tag]) -> None:
        """Completes when the responses to all of `tags` have left, or after ANSWER_WAIT_MS_MAX."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_WAIT_MS_MAX / 1000):
                while not tags <= self._left.keys():
                    self._news.clear()
                    await self._news.wait()
        for tag in tags:
            self._left.pop(tag, None)

    async def register_listener(self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None) -> None:
        await self._inner.register_listener(source_filter, listener, sink_filter)

    async def unregister_listener(self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None) -> None:
        await self._inner.unregister_listener(source_filter, listener, sink_filter)


class Pump:
    """Sends what is in the outbox. `sent` is the number of the last change that was told; `dropped` counts messages by reason."""

    def __init__(self, transport: UTransport, authority: str, store: Store, answers: AnswersFirst) -> None:
        self._transport, self._store, self._answers = transport, store, answers
        topics = {major: uris.uri(authority, ENTITY_TYPE, major, CHANGE_RESOURCE) for major in CODECS}
        common: dict[str, Any] = {"priority": PRIORITY, "payload_format": PROTOBUF}
        self._notifications = {major: UAttributes(type=NOTIFICATION, source=topic, **common) for major, topic in topics.items()}
        self._publications = {major: UAttributes(type=PUBLISH, source=topic, **common) for major, topic in topics.items()}
        self._publishes = Capability.PUBLISH_WITHOUT_SINK in transport.capabilities
        self._waiting: deque[tuple[StoredChange, Tag | None]] = deque()
        self._behind = True  # there may be more in the store than is waiting here
        self._news = asyncio.Event()
        self._progress = asyncio.Event()
        self._connection = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._noting: asyncio.TimerHandle | None = None
        self._last = 0.0  # loop time at which something was told
        self.sent = 0
        self.messages_sent = 0
        self.dropped: Counter[str] = Counter()
        transport.on_connection(lambda connected: self._connection.set() if connected else None)

    def __repr__(self) -> str:
        return f"Pump(sent={self.sent}, waiting={len(self._waiting)}{'+' if self._behind else ''})"

    def start(self) -> None:
        self._news.set()
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """What was not told stays in the store."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._noting is not None:
            self._noting.cancel()
            self._note()

    def _note(self) -> None:
        self._noting = None
        with contextlib.suppress(UStatusError):  # then these are told again after a restart
            self._store.submit(Sent(self.sent))

    def add(self, changes: Sequence[StoredChange], tag: Tag | None) -> None:
        if not self._behind and len(self._waiting) + len(changes) <= CHANGES_WAITING_MAX:
            self._waiting.extend((change, tag) for change in changes)
        else:
            self._behind = True
        self._news.set()

    def look(self) -> None:
        """There is more in the store than was added."""
        self._behind = True
        self._news.set()

    async def told(self, number: int) -> None:
        """Completes when all changes up to `number` were told."""
        while self.sent < number:
            self._progress.clear()
            await self._progress.wait()

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._behind

    async def _run(self) -> None:
        while True:
            if not self._waiting and not self._behind:
                self._news.clear()
                await self._news.wait()
            try:
                if not self._waiting:
                    await self._catch_up()
                    continue
                if asyncio.get_running_loop().time() - self._last < GATHER_MS / 1000:
                    await asyncio.sleep(GATHER_MS / 1000)
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), CHANGES_BATCH_MAX))]
                await self._tell(batch)
            except UStatusError as error:
                log.warning("changes can't be read from the store", why=error.message)
                self._behind = True
                await asyncio.sleep(RETRY_FIRST_MS / 1000)
            except Exception:
                log.exception("telling changes failed")
                self._behind = True  # from the store again, from the last one that was told
                self._waiting.clear()
                await asyncio.sleep(RETRY_FIRST_MS / 1000)

    async def _catch_up(self) -> None:
        self._behind = False  # first: what is added from here on either waits behind these, or sets it again
        found = await self._store.read(lambda reader: reader.outbox(self.sent, CHANGES_WAITING_MAX))
        last = found[-1].number if found else 0
        added = [entry for entry in self._waiting if entry[0].number > last]
        self._waiting = deque((change, None) for change in found)
        self._waiting.extend(added)
        if len(found) == CHANGES_WAITING_MAX:
            self._waiting = deque((change, None) for change in found)
            self._behind = True

    async def _tell(self, batch: list[tuple[StoredChange, Tag | None]]) -> None:
        tags = {tag for _, tag in batch if tag is not None}
        if tags:
            await self._answers.left(tags)
        messages: list[UMessage] = []
        for stored, _ in batch:
            if stored.number > self.sent:
                messages.extend(self._messages(stored))
        await self._send(messages)
        self.sent = max(self.sent, batch[-1][0].number)
        self._progress.set()
        self._last = asyncio.get_running_loop().time()
        if self._noting is None:
            self._noting = asyncio.get_running_loop().call_later(NOTE_MS / 1000, self._note)

    def _messages(self, stored: StoredChange) -> list[UMessage]:
        """Notifications, then the Publish in either version (spec-facts C-18, A-41). The transport validates them, so nothing does here."""
        payloads = {major: codec.change(stored.change).SerializeToString() for major, codec in CODECS.items()}
        made = []
        for client, major in stored.recipients:
            message = _message(self._notifications[major], payloads[major])
            sink = message.attributes.sink
            sink.authority_name, sink.ue_id, sink.ue_version_major, sink.resource_id = client
            made.append(message)
        if self._publishes:
            made.extend(_message(self._publications[major], payload) for major, payload in payloads.items())
        return made

    async def _send(self, messages: Sequence[UMessage]) -> None:
        """Until the network has taken or refused each of them."""
        delay_ms = RETRY_FIRST_MS
        while messages:
            self._connection.clear()
            statuses = await self._try(messages)
            again = next((number for number, status in enumerate(statuses) if status.code in RETRYABLE), len(messages))
            for status in statuses[:again]:
                if status.code == UCode.OK:
                    self.messages_sent += 1
                else:
                    self.dropped[UCode.Name(status.code)] += 1
            if again:
                delay_ms = RETRY_FIRST_MS
            messages = messages[again:]
            if messages:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._connection.wait(), delay_ms / 1000)
                delay_ms = min(delay_ms * 2, RETRY_MAX_MS)

    async def _try(self, messages: Sequence[UMessage]) -> list[UStatus]:
        try:
            return await self._transport.send_batch(messages)
        except UStatusError as error:
            return [error.status] * len(messages)


def _message(attributes: UAttributes, payload: bytes) -> UMessage:
    message = UMessage(attributes=attributes, payload=payload)
    message.attributes.id.CopyFrom(uuids.new())
    return message
