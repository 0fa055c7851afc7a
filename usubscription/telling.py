"""Changes as messages, by destination; and destinations in trouble, which catch up from the store.

StoredChange -> parts: one per destination, with its messages -> send_batch -> taken | refused for good | not now
in trouble: held in the store -> the oldest, again and again with back-off -> Released -> caught up: in trouble no more
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

import structlog

from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.attributes import NOTIFICATION, PUBLISH
from uprotocol.core.usubscription.asking import CommandQueue
from uprotocol.core.usubscription.wire import CODECS, V3_CODEC, fill_uri, service
from uprotocol.message import PROTOBUF
from uprotocol.pacing import Backoff
from uprotocol.status import FINAL, OK, RETRYABLE, UStatusError, code_name
from uprotocol.transport import Capability, UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes, UMessageType, UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription.state import Change, Key
from usubscription.store.database import Released
from usubscription.store.reader import StoredChange
from usubscription.store.store import Store

RETRY_FIRST_MS: Final = 200  # before a destination is tried again; doubles up to ...
RETRY_MAX_MS: Final = 5_000  # ... as long as it takes nothing
RETRY_GAP_MS: Final = 5  # between the tries of two destinations, so that thousands that are away don't fill the loop
HELD_BATCH_MAX: Final = 16  # changes of a destination that are told at once while it catches up
# of a change that is refused with neither a "no" for good nor a "not now": eight minutes, then it is given up
TRIES_MAX: Final = 100
HOME: Final = ""  # the destination of the change topics: whoever listens on the own network
PRIORITY: Final = UPriority.UPRIORITY_CS2

log = structlog.get_logger()


class Part(NamedTuple):
    """One change, as one destination gets it."""

    destination: str
    number: int
    change: Change
    recipients: list[tuple[Key, int]]  # of HOME: none
    messages: list[UMessage]


class Teller:
    """Makes and sends. `sent` and `dropped` count messages."""

    def __init__(self, transport: UTransport, authority: str, also: Collection[str] = ()) -> None:
        """`also`: authorities, or families of them, whose clients know this service under their own one."""
        self._transport, self._also = transport, also
        self._attributes = {
            (type, major): UAttributes(
                type=type, source=service(authority, major), priority=PRIORITY, payload_format=PROTOBUF
            )
            for type in (NOTIFICATION, PUBLISH)
            for major in CODECS
        }
        self._publishes = Capability.PUBLISH_WITHOUT_SINK in transport.capabilities
        self.sent = 0
        self.dropped: Counter[str] = Counter()

    def parts(self, stored: StoredChange, held_for: str | None = None) -> list[Part]:
        """Notifications, then the Publish in either version (C-18, A-41); `held_for`: the one destination of a change
        that was held. The transport validates the messages, so nothing does here."""
        number, change, _ = stored
        payloads = {major: codec.change(change).SerializeToString() for major, codec in CODECS.items()}
        parts: dict[str, Part] = {}
        for client, major in stored.recipients:
            payload = payloads[major]
            if change.bare and (client, major) == (change.subscriber, V3_CODEC.major):  # looks for what it passed
                payload = V3_CODEC.change(change, bare=True).SerializeToString()
            message = self._message(NOTIFICATION, major, payload)
            if self._also and uris.is_one_of(client[0], self._also):
                message.attributes.source.authority_name = client[0]
            fill_uri(message.attributes.sink, client)
            part = parts.setdefault(client[0], Part(client[0], number, change, [], []))
            part.recipients.append((client, major))
            part.messages.append(message)
        if self._publishes if held_for is None else held_for == HOME:
            made = [self._message(PUBLISH, major, payload) for major, payload in payloads.items()]
            parts[HOME] = Part(HOME, number, change, [], made)
        return list(parts.values())

    def _message(self, type: UMessageType.ValueType, major: int, payload: bytes) -> UMessage:
        message = UMessage(attributes=self._attributes[type, major], payload=payload)
        message.attributes.id.CopyFrom(uuids.new())
        return message

    async def send(self, parts: Sequence[Part]) -> tuple[list[Part], UStatus]:
        """What was not taken, and may be later, and why the first of it was not.

        Of each destination it is everything from the first such part on, so that its order is kept.
        """
        messages = [message for part in parts for message in part.messages]
        try:
            statuses = iter(await self._transport.send_batch(messages))
        except UStatusError as error:
            statuses = iter([error.status] * len(messages))
        failed: list[Part] = []
        behind: set[str] = set()
        why = OK
        for part in parts:
            mine = list(islice(statuses, len(part.messages)))
            not_now = next((status for status in mine if status.code and status.code not in FINAL), None)
            if not_now is None and part.destination not in behind:
                self.count(mine)
                continue
            why = not_now if not_now is not None and not failed else why
            behind.add(part.destination)
            failed.append(part)
        return failed, why

    def count(self, statuses: Iterable[UStatus]) -> None:
        for status in statuses:
            if status.code == UCode.OK:
                self.sent += 1
            else:
                self.dropped[code_name(status.code)] += 1


@dataclass(slots=True)
class _Trouble:
    backoff: Backoff = field(default_factory=lambda: Backoff(RETRY_FIRST_MS, RETRY_MAX_MS))
    holding: int = 0  # of Hold that are not committed yet
    tries: int = 0  # of the oldest change
    # its messages and those of the next few: a try again is the same message
    made: dict[int, Part] = field(default_factory=dict)

    def keep(self, part: Part) -> None:
        if len(self.made) < HELD_BATCH_MAX:
            self.made[part.number] = part


class Troubles(CommandQueue[str, _Trouble]):
    """The destinations that don't take what they should, and how they catch up. `in` says whether one is such."""

    def __init__(self, teller: Teller, store: Store) -> None:
        super().__init__(self._catch_up, 1)
        self._teller, self._store = teller, store

    def __repr__(self) -> str:
        return f"Troubles({len(self)})"

    async def start(self) -> None:
        """Those that a restart found waiting go first. Raises UStatusError if the store can't be read."""
        for destination in await self._store.read(lambda reader: reader.destinations_held()):
            self.put(destination, _Trouble())

    def begin(self, destination: str) -> _Trouble:
        trouble = self.get(destination)
        if trouble is None:
            log.info("changes can't be told: they wait", destination=destination or "the own network")
            trouble = _Trouble()
            self.put(destination, trouble, RETRY_FIRST_MS)
        return trouble

    @contextlib.contextmanager
    def holding(self, parts: Sequence[Part]) -> Iterator[None]:
        """While these are on the way to the store, none of their destinations has caught up."""
        # it may have caught up since it was found in trouble
        troubles = {part.destination: self.begin(part.destination) for part in parts}
        for part in parts:
            troubles[part.destination].keep(part)
        for trouble in troubles.values():
            trouble.holding += 1
        try:
            yield
        finally:
            for trouble in troubles.values():
                trouble.holding -= 1

    def retry_now(self) -> None:
        """The network is there again: don't wait."""
        for trouble in self.all():
            trouble.backoff.reset()
        self.hurry()

    async def _catch_up(self, destination: str, trouble: _Trouble) -> int | None:
        """When to go on; None: it has caught up."""
        try:
            went_on = await self._retry(destination, trouble)
            if went_on is None:
                return None
            if went_on:
                trouble.backoff.reset()
                return 0
        except UStatusError as error:
            what = "what a destination has not had can't be read or noted"
            log.warning(what, destination=destination, why=error.message)
        except Exception:
            log.exception("telling a destination failed", destination=destination)
        await asyncio.sleep(RETRY_GAP_MS / 1000)
        return trouble.backoff.next_ms()

    async def _retry(self, destination: str, trouble: _Trouble) -> bool | None:
        """Tell the oldest. False: not yet; None: there is nothing left to tell."""
        found = await self._store.read(lambda reader: reader.held(destination, HELD_BATCH_MAX))
        if not found:
            return False if trouble.holding else None
        parts = [trouble.made.get(stored.number) or self._teller.parts(stored, destination)[0] for stored in found]
        for part in parts:
            trouble.keep(part)
        failed, why = await self._teller.send(parts)
        told = len(parts) - len(failed)
        if not told:
            trouble.tries += why.code not in RETRYABLE
            if trouble.tries < TRIES_MAX:
                return False
            log.warning("a change was refused too often, and is given up", destination=destination, why=why.message)
            self._teller.count([why])
            told = 1
        trouble.tries = 0
        for part in parts[:told]:
            trouble.made.pop(part.number, None)
        await self._store.submit(Released(destination, found[told - 1].number))
        return True
