"""Which topics of followed histories are wanted, and to which of our logs each of their records goes, if to any.

record -> ours? pushed before? valid? lives there? does it speak for it? -> the ingress's verdict, ids -> log
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from history.epochs.frontier import Epoch
from history.file.writer import FollowedFrom as Notes
from history.log.log import Log
from history.reading.acceptor import Record
from history.reading.client import Frames, HistoryClient
from history.records.chunk import Origin
from history.service.followers import window_bytes_of_each
from storage.runtime import Runtime
from streamer.following.covered import HeldThere
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

WINDOWS_BYTES_MAX: Final = 64 << 20  # of all answers under way to us; each history gets a share


def family_of(authority: str) -> str:
    """Returns the part of a name after its first dot; "" without a dot."""
    return authority.partition(".")[2]


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
    ) -> None:
        self._endpoints, self.local, self.on_gap, self.backoff = endpoints, local, on_gap, backoff
        self.rng, self.random_bytes = runtime.rng, runtime.random_bytes
        self._rpc = InMemoryRpcClient(hosted, local)
        self._frames = Frames(hosted, local)
        self._stamps = Stamps()
        self.valid = Cache[bytes, bool]()  # for attributes: what follows the id, and whether they are valid
        self.histories = 0  # number of histories that are followed
        self._wants_all = False  # the interest is unknown yet: somebody may want any topic
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
        names = {authority, family_of(authority)} - {""} | {uris.WILDCARD_AUTHORITY}
        return chain.from_iterable(self._topics[name].values() for name in names if name in self._topics)

    def always_wanted(self) -> Iterator[UUri]:
        """Returns the recorded topics; all topics while the interest is not known yet."""
        yield from [uris.ANY] if self._wants_all else self.logs.record

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

    def read(self, data: bytes) -> EncodedMessage:
        return self._stamps.read(data)


def _begin_turn(turn: asyncio.Future[int]) -> None:
    if not turn.done():
        turn.set_result(0)


class Sorted(NamedTuple):
    """A record of ours, and the log that it goes to."""

    target: Log
    stream: int
    message: EncodedMessage
    key: bytes | None  # in the window of ids
    origin: Origin | None
    epoch: Epoch | None


class Sorting:
    """Sorts the records of one history at `endpoint`, and counts the results in `counts`."""

    def __init__(
        self, follows: Intake, endpoint: Endpoint, speaks_for: Callable[[UUri], bool], counts: Counter[str]
    ) -> None:
        self._follows, self._endpoint, self._speaks_for, self._counts = follows, endpoint, speaks_for, counts
        self._log = follows.logs.durable
        self.held_there: dict[bytes, HeldThere] = {}  # by incarnation, until its records are past it

    def sort(self, record: Record) -> Sorted | None:
        """Returns where the record goes; None if it is not for us."""
        message, dispatch = record.message, self._follows.dispatch
        assert isinstance(message, EncodedMessage), "as it was read"
        origin = record.origin or Origin(record.incarnation, record.seq)
        if origin.incarnation in self._follows.own_incarnations:
            self._counts["loop"] += 1
            return None
        attributes = message.stamp.attributes
        if record.incarnation in self.held_there:
            held = self.held_there[record.incarnation]
            if record.seq > held.pushed_to:  # records come in order, so all held ones have come
                del self.held_there[record.incarnation]
            elif not held.is_missing(attributes.source, record.seq):
                self._counts["pushed_before"] += 1
                return None
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
            return None
        key = message.id_bytes + verdict.source
        if not dispatch.window.take(key):
            self._counts["duplicate"] += 1
            return None
        if record.epoch is not None and not verdict.log.durable:
            return self._kept_in_order(message.stamp.attributes.source, message, origin, record.epoch)
        return Sorted(verdict.log, verdict.stream, message, key, origin, record.epoch)

    def _kept_in_order(
        self, source: UUri, message: EncodedMessage, origin: Origin, epoch: Epoch | None
    ) -> Sorted | None:
        """Sort records of epochs and records about epochs into one log, which keeps their order."""
        key = message.id_bytes + source.SerializeToString()
        if epoch is None and not self._follows.dispatch.window.take(key):
            self._counts["duplicate"] += 1
            return None
        return Sorted(self._log, self._log.stream_id(source, wanted=True), message, key, origin, epoch)

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
