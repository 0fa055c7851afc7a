"""Where each record of a followed history goes: into one of our logs, or nowhere.

record -> ours? pushed before? valid? from there? does it speak for it? -> the ingress's verdict, ids -> log
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.message import DecodeError

from history.epochs.frontier import Epoch
from history.log.log import Log
from history.reading.acceptor import Record
from history.records.chunk import Origin
from streamer.following.covered import HeldThere
from streamer.walk.endpoint import Endpoint
from uprotocol import attributes as attrs
from uprotocol.core.ustreamer import ids
from uprotocol.encoded import EncodedMessage
from uprotocol.status import UStatusError
from uprotocol.v1.uri_pb2 import UUri

if TYPE_CHECKING:
    from streamer.following.follows import Follows


class Sorted(NamedTuple):
    """Where a record goes."""

    target: Log
    stream: int
    message: EncodedMessage
    key: bytes | None  # in the window of ids
    origin: Origin | None
    epoch: Epoch | None


class Sorting:
    """Of one history, at `endpoint`. Counts in `counts` what becomes of records."""

    def __init__(
        self, follows: Follows, endpoint: Endpoint, speaks_for: Callable[[UUri], bool], counts: Counter[str]
    ) -> None:
        self._follows, self._endpoint, self._speaks_for, self._counts = follows, endpoint, speaks_for, counts
        self._log = follows.logs.durable
        self.held_there: dict[bytes, HeldThere] = {}  # by incarnation, until its records are past it

    def sort(self, record: Record) -> Sorted | None:
        """Where it goes; None: it is not for us."""
        message, dispatch = record.message, self._follows.dispatch
        assert isinstance(message, EncodedMessage), "as it was read"
        origin = record.origin or Origin(record.incarnation, record.seq)
        if origin.incarnation in self._follows.own_incarnations:
            self._counts["loop"] += 1
            return None
        attributes = message.stamp.attributes
        if record.incarnation in self.held_there:
            held = self.held_there[record.incarnation]
            if record.seq > held.pushed_to:  # records come in order: all of it is here
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
        """Epochs and what tells of them, in one log: only there it is known what came first."""
        key = message.id_bytes + source.SerializeToString()
        if epoch is None and not self._follows.dispatch.window.take(key):
            self._counts["duplicate"] += 1
            return None
        return Sorted(self._log, self._log.stream_id(source, wanted=True), message, key, origin, epoch)

    def _is_valid(self, message: EncodedMessage) -> bool:
        """By its attributes, but for the id those of many."""
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
