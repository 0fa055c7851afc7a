"""Which topics of followed histories are wanted, and to which of our logs each of their records goes, if to any.

record -> ours? valid? lives there? does it speak for it? -> the ingress's verdict, ids -> log

plain message of a topic that a followed history has -> Doorbell: ask the history now
    -> made after we had a position: a copy, dropped
    '-- no answer for SILENT_S, or refused: it is not trusted, and plain messages are stored
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final, Literal

import structlog
from google.protobuf.message import DecodeError

from history.file.writer import FollowedFrom as Notes
from history.log.log import Log
from history.reading.client import Frames, HistoryClient
from history.records.chunk import Origin
from history.records.epoch import Epoch
from history.records.record import Record
from history.service.followers import window_bytes_of_each
from storage.runtime import Runtime
from streamer.following.pushed import Sorted
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.hosted import HostedTransport
from streamer.walk.ingress import Dispatch, Ingress
from uprotocol import attributes as attrs
from uprotocol import uri as uris
from uprotocol.cache import Cache
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.encoded import EncodedMessage, Stamps
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uri_pb2 import UUri

# if doorbells have no answer for so long, plain messages are stored until the history answers
SILENT_S: Final = 60.0
ASK_AGAIN_S: Final = 0.25  # after a doorbell without an answer the history is asked again
WINDOWS_BYTES_MAX: Final = 64 << 20  # of all answers under way to us; each history gets a share

log = structlog.get_logger()


class Intake:
    """Shared by all followed histories: the topics that are wanted, how to reach them, and where their records go."""

    def __init__(
        self,
        endpoints: Endpoints,
        hosted: HostedTransport,
        local: LocalUriProvider,
        runtime: Runtime,
        on_gap: Callable[[UUri, Gap], None],
        backoff: Callable[[], Backoff],
        on_emptied: Callable[[UUri, str, int], None],
    ) -> None:
        self._endpoints, self.local, self.on_gap, self.backoff = endpoints, local, on_gap, backoff
        self.on_emptied = on_emptied
        self.rng, self.random_bytes, self.now_ms = runtime.rng, runtime.random_bytes, runtime.now_ms
        self._rpc = InMemoryRpcClient(hosted, local)
        self._frames = Frames(hosted, local)
        self.read = Stamps().read
        self.valid = Cache[bytes, bool]()  # for attributes: what follows the id, and whether they are valid
        self.histories = 0  # number of histories that are followed
        self.matched: set[uris.Key] = set()  # patterns of [[follow]] topics that have matched a topic
        self.wants_all = False  # the interest is unknown yet: somebody may want any topic
        # subscribed topics, by authority and by the family of the authority
        self._topics: dict[str, dict[uris.Key, UUri]] = {}

    def attach(self, dispatch: Dispatch, ingresses: Mapping[str, Ingress]) -> None:
        """Set where followed records go; called before `start`."""
        self.dispatch, self._ingresses = dispatch, ingresses
        self.logs = dispatch.logs
        self.own_incarnations = frozenset(one.incarnation for one in dispatch.logs)

    def wanted_of(self, service: UUri, endpoint: Endpoint, *, is_named: bool) -> Iterator[UUri]:
        """Topics and patterns that this history may have, and that somebody elsewhere wants. `is_named`: our
        configuration names it, so it may have all topics of the network of `endpoint`."""
        names = self._topics if is_named else (service.authority_name,)
        topics = chain.from_iterable(map(self._of_names, names))
        return (topic for topic in topics if self.is_wanted(endpoint, topic))

    def _of_names(self, authority: str) -> Iterable[UUri]:
        """Returns the topics of an authority and its family."""
        names = {authority, uris.family_of(authority)} - {""} | {uris.WILDCARD_AUTHORITY}
        return chain.from_iterable(self._topics[name].values() for name in names if name in self._topics)

    def topics_near(self, authority: str) -> Iterable[UUri]:
        """Returns the subscribed topics that may meet a pattern of this authority, and few others."""
        if uris.is_pattern(authority):
            return chain.from_iterable(one.values() for one in self._topics.values())
        return self._of_names(authority)

    def always_wanted(self) -> Iterator[UUri]:
        """Returns the recorded topics; all topics while the interest is not known yet."""
        yield from [uris.ANY] if self.wants_all else self.logs.record

    def lives_there(self, endpoint: Endpoint, topic: UUri) -> bool:
        return self._endpoints.owner(topic.authority_name) is endpoint

    def is_wanted(self, endpoint: Endpoint, topic: UUri) -> bool:
        return self.dispatch.view.leaves(endpoint, topic)

    def ingress(self, endpoint: Endpoint) -> Ingress:
        return self._ingresses[endpoint.name]

    async def append(self, target: Log, streams: list[int], messages: list[EncodedMessage], notes: Notes) -> None:
        """Append to a log as soon as its flow lets us. Raises UStatusError."""
        await self.dispatch.flows[target].append(len(messages), _begin_turn)
        await target.append(streams, messages, notes)

    # -- for conversations

    @property
    def window_bytes(self) -> int:
        """Returns the share of one history. With a round trip of 200 ms, 8 MiB allow some 40 MB/s."""
        return window_bytes_of_each(self.histories, WINDOWS_BYTES_MAX)

    def client(self, service: UUri) -> HistoryClient:
        return HistoryClient(self._rpc, service, frames=self._frames)


def _begin_turn(turn: asyncio.Future[int]) -> None:
    if not turn.done():
        turn.set_result(0)


class Sorting:
    """Sorts the records of one history at `endpoint`, and counts the results in `counts`."""

    def __init__(
        self, follows: Intake, endpoint: Endpoint, speaks_for: Callable[[UUri], bool], counts: Counter[str]
    ) -> None:
        self._follows, self._endpoint, self._speaks_for, self._counts = follows, endpoint, speaks_for, counts
        self._log = follows.logs.durable

    def sort(self, record: Record) -> Sorted | Literal["here"] | None:
        """Returns where the record goes; "here" if it is here already, None if it is not for us."""
        message, dispatch = record.message, self._follows.dispatch
        assert isinstance(message, EncodedMessage), "as it was read"
        origin = record.origin or Origin(record.incarnation, record.seq)
        if origin.incarnation in self._follows.own_incarnations:
            self._counts["loop"] += 1
            return None
        attributes = message.stamp.attributes
        if attributes.type != attrs.PUBLISH or not self._is_valid(message):
            self._counts["unreadable"] += 1
            return None
        if not self._follows.lives_there(self._endpoint, attributes.source):
            self._counts["unwanted"] += 1
            return None
        if not self._speaks_for(attributes.source):
            self._counts["spoofed"] += 1
            self._endpoint.dropped["spoofed"] += 1
            return None
        if ids.is_about_epochs(attributes.source):
            return self._kept_in_order(attributes.source, message, origin, None)
        verdict = self._follows.ingress(self._endpoint).verdict_of(message)
        verdict.account.messages += 1
        verdict.account.bytes += len(message.payload)
        if verdict.inside is not None:
            message = verdict.inside(message)
        if verdict.log is None:
            self._counts["unwanted"] += 1
            if verdict.reason:
                self._endpoint.dropped[verdict.reason] += 1
            if verdict.is_beyond_limit:
                self._follows.ingress(self._endpoint).lose(verdict.account.authority, verdict.reason)
            return None
        key = message.id_bytes + verdict.source
        if not dispatch.window.take(key):
            return "here"
        if record.epoch is not None and not verdict.log.durable:
            return self._kept_in_order(message.stamp.attributes.source, message, origin, record.epoch)
        return Sorted(verdict.log, verdict.stream, message, key, origin, record.epoch)

    def _kept_in_order(
        self, source: UUri, message: EncodedMessage, origin: Origin, epoch: Epoch | None
    ) -> Sorted | Literal["here"]:
        """Sort records of epochs and records about epochs into one log, which keeps their order."""
        key = message.id_bytes + source.SerializeToString()
        if epoch is None and not self._follows.dispatch.window.take(key):
            return "here"
        return Sorted(self._log, self._log.stream_id(source, wanted=True), message, key, origin, epoch)

    def forget(self, sorted: Iterable[Sorted]) -> None:
        """They are not in a log, and may come again."""
        for one in sorted:
            if one.key is not None:
                self._follows.dispatch.window.forget(one.key)

    def _is_valid(self, message: EncodedMessage) -> bool:
        """Returns whether its attributes are valid. Many messages have the same attributes apart from the id."""
        known = self._follows.valid
        if message.stamp.is_shared and message.stamp.suffix in known:
            return True
        try:
            attrs.validate(message.attributes)
        except (UStatusError, DecodeError):
            return False
        if message.stamp.is_shared:
            known[message.stamp.suffix] = True
        return True


class Doorbell:
    """The doorbell of one history. It is used on the event loop only."""

    def __init__(self, history: str, ask: Callable[[], None], backoff: Backoff, counts: Counter[str]) -> None:
        """`ask()` asks the history now, if there is a conversation; `backoff` is the wait between two conversations."""
        self._history, self._ask, self._backoff, self._counts = history, ask, backoff, counts
        self.copies_since: bytes | None = None  # plain messages with later ids are copies; None: unknown yet
        self.denied: set[uris.Key] = set()  # topics that we may not read there: their plain messages are stored
        self.has_kept_copies = False  # plain messages were kept since this was last reset
        self._unanswered_since: float | None = None  # loop time of the first doorbell since the last answer
        self._is_trusted = True

    def __repr__(self) -> str:
        return f"Doorbell({self._history}, is_trusted={self._is_trusted})"

    def on_doorbell(self, message: EncodedMessage) -> bool:
        """Ask the history for the record of this plain message. Returns True for a copy, which is dropped."""
        self._counts["doorbells"] += 1
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._unanswered_since is None:
            self._unanswered_since = now
            self._backoff.wake()
            loop.call_later(ASK_AGAIN_S, self._ask_again_if_silent, now)
        elif now - self._unanswered_since > SILENT_S:
            self.stop_trusting_history()
        if self._is_trusted and self._is_copy(message):
            return True
        self.has_kept_copies = True
        return False

    def _is_copy(self, message: EncodedMessage) -> bool:
        if self.copies_since is None or message.id_bytes <= self.copies_since:
            return False
        return not self.denied or uris.key(message.stamp.attributes.source) not in self.denied

    def stop_trusting_history(self) -> None:
        """Store plain messages until the history answers."""
        if self._is_trusted:
            self._is_trusted = False
            what = "a history that is followed does not answer: until it does, plain copies count again"
            log.warning(what, service=self._history)

    def _ask_again_if_silent(self, since: float) -> None:
        """Ask again if no answer came, since the current call may never return."""
        if self._unanswered_since == since:
            self._ask()

    def answered(self) -> None:
        self._unanswered_since, self._is_trusted = None, True
        self._backoff.reset()
