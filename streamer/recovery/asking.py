"""A recovery source in use: whatever it does is bounded, counted, and reported.

fetch: at most so many at once, timeout_s each -> raised, not a Fetched, too large? -> UStatusError -> trouble
                                                 '-> its messages: of the topic? valid? -> gates.py
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import structlog

from streamer.config.edge import RecoverySection
from streamer.recovery.waiting import GateEntry
from streamer.recovery_source import Fetched, RecoverySource
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.encoded import EncodedMessage, Readdressed
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

ASKS_MAX: Final = 16  # at once, of one source, so that a network that returns does not flood it
CALLS_STUCK_MAX: Final = 64  # given up, and not ended; the source is not asked again until some have ended
PAGE_MESSAGES_MAX: Final = 1_000  # of one answer, some 20 ms of the loop, and ...
SOURCE_PAGE_BYTES_MAX: Final = 16 << 20  # ... their bytes; a source with more says that there is `more`
POSITION_CHARACTERS_MAX: Final = 1_024  # it is written with each batch

log = structlog.get_logger()


class AskedSource:
    """The source of one section. `counts`: asked, answered, failed, recovered, duplicate, expired, invalid,
    out_of_order, refused (by the log), gaps, faults (of its methods)."""

    def __init__(
        self, section: RecoverySection, source: RecoverySource, message_bytes_max: int, now_ms: Callable[[], int]
    ) -> None:
        self.section, self._source, self._message_bytes_max, self._now_ms = section, source, message_bytes_max, now_ms
        self.name = f"{section.source} of {', '.join(section.topics)}"
        self.counts: Counter[str] = Counter()
        self.has_predecessors = type(source).predecessor is not RecoverySource.predecessor
        self._turns = asyncio.Semaphore(ASKS_MAX)
        self._calls: set[asyncio.Task[Any]] = set()
        self._troubles: dict[str, str] = {}  # why it does not answer, by topic
        self._trouble_since_ms = 0

    def __repr__(self) -> str:
        return f"AskedSource({self.name}, {self.trouble or 'answers'}, {dict(self.counts)})"

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        try:
            await self._source.close()
        except Exception as error:  # foreign code may raise anything
            log.warning("a recovery source could not be closed", source=self.name, error=repr(error))

    # Asking

    async def fetch(self, topic: UUri, after: str | None, timeout_s: float) -> Fetched:
        """Returns an answer of bounded size. Raises UStatusError for whatever else happens."""
        self.counts["asked"] += 1
        try:
            async with asyncio.timeout(timeout_s), self._turns:
                if len(self._calls) >= CALLS_STUCK_MAX:
                    raise UStatusError(UCode.UNAVAILABLE, f"{CALLS_STUCK_MAX} earlier calls of its fetch do not end")
                call = asyncio.ensure_future(self._call(topic, after))
                self._calls.add(call)
                call.add_done_callback(self._ended)
                try:
                    await asyncio.wait({call})  # it ends when it is cancelled, whatever the source does
                finally:
                    call.cancel()
                return self._checked(call.result())
        except TimeoutError:
            raise UStatusError(UCode.DEADLINE_EXCEEDED, f"it has not answered within {timeout_s:.1f} s") from None

    async def _call(self, topic: UUri, after: str | None) -> Any:
        try:
            return await self._source.fetch(topic, after)
        except UStatusError:
            raise
        except Exception as error:  # foreign code may raise anything
            raise UStatusError(UCode.INTERNAL, f"its fetch has raised {error!r}") from error

    def _ended(self, call: asyncio.Task[Any]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # it was raised where somebody still waits for it

    def _checked(self, fetched: Any) -> Fetched:
        if not isinstance(fetched, Fetched) or not isinstance(fetched.messages, Sequence):
            raise _wrong(f"its fetch must return a Fetched with a list of messages, and returns {fetched!r:.100}")
        if fetched.next is not None and not _is_position(fetched.next):
            what = f"a text of at most {POSITION_CHARACTERS_MAX} characters"
            raise _wrong(f"`next` must be {what} or None, and is {fetched.next!r:.100}")
        if len(fetched.messages) > PAGE_MESSAGES_MAX:
            raise _too_much(f"its answer has {len(fetched.messages)} messages, more than {PAGE_MESSAGES_MAX}")
        if not all(isinstance(one, UMessage) for one in fetched.messages):
            raise _wrong("its answer has something else than UMessages")
        if sum(one.ByteSize() for one in fetched.messages) > SOURCE_PAGE_BYTES_MAX:
            raise _too_much(f"its answer has more than {SOURCE_PAGE_BYTES_MAX} bytes")
        return fetched

    # Its messages

    def entry(
        self, message: EncodedMessage, key: bytes, now: float, taken: asyncio.Future[int] | None = None
    ) -> GateEntry:
        decoded = message.decoded()
        position = self._position_by("position", decoded) or uuids.format(decoded.attributes.id)
        follows = self._position_by("predecessor", decoded) if self.has_predecessors else None
        return GateEntry(message, key, position, follows, taken, now)

    def entries(
        self, topic: UUri, messages: Sequence[UMessage], inward: Callable[[str], str], now: float
    ) -> list[GateEntry]:
        """Returns those messages of an answer that may be recorded. `inward(authority)`: the name inside."""
        found, address = [], topic.SerializeToString()
        for message in messages:
            source = message.attributes.source
            authority, *rest = uris.key(source)
            if (inward(authority), *rest) != uris.key(topic):
                self.counts["invalid"] += 1
            elif self._is_valid(message):
                kept = UMessage()
                kept.CopyFrom(message)  # the source may change its own
                encoded = EncodedMessage.of(kept)
                if source.SerializeToString() != address:
                    encoded = Readdressed(topic, None).of(encoded)
                found.append(self.entry(encoded, encoded.id_bytes + address, now))
        return found

    def _is_valid(self, message: UMessage) -> bool:
        """Returns whether a recovered message may be recorded, apart from its topic; counts it if not."""
        attributes = message.attributes
        try:
            attrs.validate(attributes, has_payload=message.HasField("payload"))
        except UStatusError:
            self.counts["invalid"] += 1
            return False
        is_valid = attributes.type == attrs.PUBLISH and not attributes.HasField("sink")
        is_valid = is_valid and len(message.payload) <= self._message_bytes_max
        self.counts["invalid"] += not is_valid
        return is_valid

    def _position_by(self, method: str, message: UMessage) -> str | None:
        """Returns the position that a method of the source says for `message`; None: none, or no valid one."""
        try:
            position = getattr(self._source, method)(message)
        except Exception as error:  # foreign code may raise anything
            self._fault(method, error)
            return None
        if _is_position(position):
            return str(position)
        if position is not None or method == "position":
            self._fault(method, position)
        return None

    def _fault(self, method: str, what: object) -> None:
        self.counts["faults"] += 1
        if self.counts["faults"] == 1:
            said = f"raised {what!r:.200}" if isinstance(what, Exception) else f"returned {what!r:.100}"
            log.error("a recovery source has a fault", source=self.name, method=method, error=said)

    # Whether it answers

    def answered(self, topic: UUri) -> None:
        self.counts["answered"] += 1
        if self._troubles.pop(uris.format(topic), None) is not None and not self._troubles:
            log.info("a recovery source answers again", source=self.name)

    def failed(self, topic: UUri, error: UStatusError) -> None:
        self.counts["failed"] += 1
        if not self._troubles:
            self._trouble_since_ms = self._now_ms()
            log.warning("a recovery source does not answer", source=self.name, topic=uris.format(topic), why=str(error))
        self._troubles[uris.format(topic)] = error.message

    def is_in_trouble(self, topic: UUri) -> bool:
        return uris.format(topic) in self._troubles

    @property
    def trouble(self) -> str:
        """Returns a sentence for the operator; empty if it answers."""
        if not self._troubles:
            return ""
        topic, why = next(iter(self._troubles.items()))
        since = datetime.fromtimestamp(self._trouble_since_ms / 1000, UTC).isoformat(timespec="seconds")
        more = f" (and for {len(self._troubles) - 1} other topics)" if len(self._troubles) > 1 else ""
        return f"the recovery source {self.name} does not answer for {topic}{more} since {since}: {why}"


def _is_position(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= POSITION_CHARACTERS_MAX and value.isprintable()


def _wrong(why: str) -> UStatusError:
    return UStatusError(UCode.FAILED_PRECONDITION, why)


def _too_much(why: str) -> UStatusError:
    return UStatusError(UCode.RESOURCE_EXHAUSTED, why)
