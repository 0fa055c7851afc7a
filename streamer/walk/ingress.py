"""Ingress: checks the messages that an endpoint receives, and decides where they go. One per endpoint.

arrived batch -> known address? -> own authority? -> taken before? -+-> log (one append, acknowledged when committed)
                 decided once      else "spoofed"    "duplicate"    +-> express queue     requests and responses
                 per (type, source, sink)                           +-> hosted service    messages for ourselves
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from history.log.log import Log, TopicsFullError
from streamer.walk.endpoint import Endpoint
from streamer.walk.flow import Appender, Flow, Offer
from streamer.walk.hosted import HostedTransport
from streamer.walk.ledger import MESSAGE_UNIT_BYTES, UNLIMITED, Account, AuthorityLedger, AuthorityQuota
from streamer.walk.names import may_carry_addresses
from streamer.walk.sender import Express
from streamer.walk.view import Version, View, match
from transports.listeners import all_of
from uprotocol import attributes as attrs
from uprotocol import cache as caches
from uprotocol import uri as uris
from uprotocol.core.ustreamer.ids import ANNOUNCEMENTS, ENTITY, FRAMES, VERSION, is_about_epochs, of_publisher
from uprotocol.core.usubscription.wire import to_uri
from uprotocol.encoded import EncodedMessage, Readdressed
from uprotocol.tasks import wait_until
from uprotocol.transport import MESSAGE_BYTES_MAX, Capability, EncodedListener
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

LOG_FULL_S: Final = 60.0  # between two log lines about topics beyond the limit; counters count all
# ids remembered to drop duplicates: seconds of the fastest network, minutes of a vehicle
WINDOW_IDS_MAX: Final = 131_072
MISSING_MAX: Final = 16_384  # refused messages whose redelivery is awaited
# reasons for which a transport drops messages that it has acknowledged, or that can't come again
LOST_UNREAD: Final = ("too_large", "overflow")
PUBLISHERS: Final = of_publisher(uris.ANY, ANNOUNCEMENTS)  # announcements of publishers with their own history

log = structlog.get_logger()


OnPlainCopy = Callable[[EncodedMessage], bool]
"""Called with each message of a topic. True: it is a copy of a record that is followed, and is dropped."""

OnLost = Callable[[str, str, str, int], None]
"""Called with endpoint, authority (empty: unknown), reason and number of messages that were dropped although their
network was told that they were taken, or can't send them again."""

Pass = Callable[[EncodedMessage, bytes], "asyncio.Future[int] | None"]
"""Takes a message of a topic that has a recovery source, with its key in the window of ids. The future is settled when
the message is committed; None: it was before."""


@dataclass(slots=True)
class AddressVerdict:
    """The destination of messages of one address (type, source, sink): a log, a peer at once, a hosted service, or
    none."""

    log: Log | None = None
    stream: int = 0
    peer: Endpoint | None = None
    is_hosted: bool = False
    # why they are dropped, or only recorded; empty: traffic within one network, not counted
    reason: str = ""
    source: bytes = b""  # encoded, with the name inside
    is_answer: bool = False  # a response
    # gives a message its addresses inside; None: it has them already
    inside: Callable[[EncodedMessage], EncodedMessage] | None = None
    account: Account = field(init=False)  # the source authority's
    quota: AuthorityQuota = field(init=False)  # the one of the account that counts for them
    bytes_max: int = UNLIMITED  # of a payload
    is_beyond_limit: bool = False  # there are too many topics for one more
    on_plain_copy: OnPlainCopy | None = None
    gate: Pass | None = None  # appends them in place of the ingress

    @property
    def is_wanted(self) -> bool:
        return self.log is not None or self.peer is not None or self.is_hosted


def is_fleeting(source: UUri) -> bool:
    """True for frames and announcements of a history. They are not kept: lost ones are polled or sent again."""
    service = (source.ue_id & 0xFFFF, source.ue_version_major)
    return service == (ENTITY, VERSION) and source.resource_id in (FRAMES, ANNOUNCEMENTS)


class IdWindow:
    """Recently taken ids, in two generations, so that forgetting is cheap. A key is an id and its source, both as on
    the wire, so that a message of another source with the same id does not block the real one.
    """

    def __init__(self, ids_max: int = WINDOW_IDS_MAX) -> None:
        self._generation_max = ids_max // 2
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def take(self, key: bytes) -> bool:
        """Take `key`. Returns False if it was taken before."""
        if key in self._young or key in self._old:
            return False
        self._young.add(key)
        if len(self._young) >= self._generation_max:
            self._old, self._young = self._young, set()
        return True

    def forget(self, key: bytes) -> None:
        self._young.discard(key)
        self._old.discard(key)


class Logs:
    """The durable and the volatile log, and the log of each topic."""

    def __init__(self, durable: Log, volatile: Log, volatile_patterns: Sequence[UUri], record: Sequence[UUri]) -> None:
        self.durable, self.volatile = durable, volatile
        self._in_memory, self.record = tuple(volatile_patterns), tuple(record)
        self.matched: set[uris.Key] = set()  # patterns of `record` that have matched a topic

    def __iter__(self) -> Iterator[Log]:
        return iter((self.durable, self.volatile))

    def of(self, source: UUri) -> Log:
        return self.volatile if any(uris.matches(pattern, source) for pattern in self._in_memory) else self.durable

    def is_recorded(self, source: UUri) -> bool:
        return match(self.record, source, self.matched)

    def names(self, source: UUri) -> bool:
        """True if `record` names exactly this topic, for any authority, and not just a wider pattern."""
        key = uris.key(source)[1:]
        return any(uris.key(pattern)[1:] == key and uris.matches(pattern, source) for pattern in self.record)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The parts that all ingresses share."""

    view: View
    logs: Logs
    flows: Mapping[Log, Flow]
    express: Express
    hosted: HostedTransport
    window: IdWindow
    ledger: AuthorityLedger
    # of a topic at an endpoint: whether a followed history records it even if nobody wants it, and what takes its plain
    # messages
    followed: Callable[[Endpoint, UUri], tuple[bool, OnPlainCopy | None]]
    recovered: Callable[[UUri], Pass | None]  # of a topic that has a recovery source
    lost: OnLost
    message_bytes_max: int = MESSAGE_BYTES_MAX


class Ingress(EncodedListener):
    """The listener of one endpoint. `trusted` is the entry for services inside the streamer; no rules apply to them."""

    def __init__(self, endpoint: Endpoint, dispatch: Dispatch, *, trusted: bool = False) -> None:
        # mutable: the verdicts and their version; what is refused, lost, in flight, missing, and when that was logged
        self.endpoint, self._dispatch, self._trusted = endpoint, dispatch, trusted
        # names on its network; services inside use the names of the gateway itself
        self._names = None if trusted else endpoint.names
        self._verdicts: dict[bytes, AddressVerdict] = {}
        # addresses with a verdict, by the source of a publish with its name inside; mostly one, but a host may omit its
        # own authority
        self._published: dict[bytes, tuple[bytes, ...]] = {}
        self._verdicts_version: Version | None = None
        self._log_full_at, self._full_reason = 0.0, ""  # loop time and reason of the last log line about a full log
        # authorities above their quota, by their name on the network: their messages are dropped unread until the next
        # turn of the ledger
        self._refused: dict[str, Account] = {}
        # what the transport had dropped at the last turn, by reason
        self._lost_by, self._lost_there = endpoint.transport, dict[str, int]()
        self._in_flight: set[asyncio.Future[int]] = set()  # appends that may still fail
        # keys of messages that a log has refused and the network will redeliver; the event: all have come
        self._missing: set[bytes] = set()
        self._missing_came = asyncio.Event()
        redelivers = self._redelivers = not trusted and Capability.ACK in endpoint.transport.capabilities
        self._appenders = {
            target: Appender(target, self._not_taken, holds=not (trusted or redelivers), redelivers=redelivers)
            for target in dispatch.flows
        }
        self._registrations = [
            dispatch.ledger.on_evicted(self.forget_verdicts),
            dispatch.ledger.on_turn(self.gather_refused),
            dispatch.ledger.on_turn(self.gather_lost),
            *(target.on_forgotten(functools.partial(self.forget_streams, target)) for target in dispatch.logs),
        ]

    # Messages that arrive

    def on_receive_encoded(self, messages: Sequence[EncodedMessage]) -> Awaitable[None] | None:
        """Take messages; the transport has dropped invalid and expired ones. The awaitable completes when all messages
        taken are committed."""
        endpoint, dispatch, verdicts, take = self.endpoint, self._dispatch, self._verdicts, self._dispatch.window.take
        missing, spans = self._missing, endpoint.spans
        endpoint.received += len(messages)
        if dispatch.view.version != self._verdicts_version:
            self._forget_changed()
        appends: dict[Log, tuple[list[int], list[EncodedMessage]]] = {}
        inside: list[UMessage] = []  # for hosted services, which commit and answer by batch
        pending: list[Awaitable[Any]] = []
        duplicates = 0
        for message in messages:
            # 1. Its verdict, and what it costs its sender
            verdict = verdicts.get(message.stamp.address)
            if verdict is None:
                verdict = self._new_verdict(message)
            account, quota, size = verdict.account, verdict.quota, len(message.payload)
            account.messages += 1
            account.bytes += size
            quota.left -= 1 + size // MESSAGE_UNIT_BYTES
            # 2. Too large, beyond a quota, a copy of a followed record, for nobody: it ends here
            if size > verdict.bytes_max or (quota.left < 0 and dispatch.ledger.is_over(account, quota)):
                self._refuse(verdict, message, size)
                continue
            if verdict.inside is not None:
                message = verdict.inside(message)
            if verdict.on_plain_copy is not None and verdict.on_plain_copy(message):
                continue
            target, peer = verdict.log, verdict.peer
            if target is None and peer is None and not verdict.is_hosted:
                self._drop(verdict, message)
                continue
            # 3. One that waits for what was lost before it, or that came already
            key = message.id_bytes + verdict.source
            if verdict.gate is not None:
                if (taken := verdict.gate(message, key)) is not None:
                    pending.append(taken)
                continue
            if not take(key):
                duplicates += 1
                continue
            if missing:
                self._found(key)
            if verdict.is_answer:
                endpoint.twins.answered(message.attributes)
            # 4. Into a log, to one peer, or to a hosted service
            if target is not None:
                append = appends.get(target)
                if append is None:
                    append = appends[target] = ([], [])
                append[0].append(verdict.stream)
                append[1].append(message)
            elif peer is not None:
                if spans is not None:
                    spans.received(endpoint.name, message)
                dispatch.express.queues[peer.name].put(message)
            else:
                inside.append(message.decoded())
        if inside and (delivered := dispatch.hosted.deliver(inside)) is not None:
            pending.append(delivered)
        for target, (streams, batch) in appends.items():
            offer: Offer = functools.partial(self._appenders[target].offer, streams, batch)
            if spans is not None:
                offer = spans.appended(endpoint.name, target.name, batch, offer)
            future = dispatch.flows[target].append(len(batch), offer)
            pending.append(future)
            if not future.done():
                self._in_flight.add(future)
                future.add_done_callback(self._in_flight.discard)
        if duplicates:
            endpoint.dropped["duplicate"] += duplicates
            # the first copy may be in any of these appends, and is not safe yet
            pending.extend(self._in_flight.difference(pending))
        if not pending:
            return None
        return pending[0] if len(pending) == 1 else all_of(pending)

    async def settled(self) -> None:
        """Wait until every append so far has succeeded or failed."""
        await asyncio.gather(*self._in_flight, return_exceptions=True)

    async def caught_up(self, seconds: float) -> None:
        """Wait until every message that a log refused was redelivered and appended, `seconds` at most."""
        time = asyncio.get_running_loop().time
        end = time() + seconds
        while True:
            await self.settled()
            if not self._missing or time() >= end:
                break
            self._missing_came.clear()
            await wait_until(self._missing_came, end)
        self._missing.clear()  # the others have expired

    def _found(self, key: bytes) -> None:
        self._missing.discard(key)
        if not self._missing:
            self._missing_came.set()

    def _not_taken(self, batch: Sequence[EncodedMessage]) -> None:
        """Note that a log has refused the batch. It is not acknowledged, so the network redelivers it if it can."""
        self.endpoint.dropped["refused"] += len(batch)
        is_lost = not self._redelivers and not self._trusted
        for message in batch:
            if is_lost:
                verdict = self._verdicts.get(message.stamp.address)
                self.lose(verdict.account.authority if verdict is not None else "", "refused")
            source = to_uri(uris.key(message.stamp.attributes.source)).SerializeToString()  # as in the verdict
            key = message.id_bytes + source
            self._dispatch.window.forget(key)
            if self._redelivers and len(self._missing) < MISSING_MAX:
                self._missing.add(key)

    def close(self) -> None:
        """Called when the network is closed. Leave ledger and logs, and stop retrying refused batches."""
        for appender in self._appenders.values():
            appender.close()
        for remove in self._registrations:
            remove()

    def lose(self, authority: str, reason: str, messages: int = 1) -> None:
        """Report messages that somebody wants, that were dropped, and that their sender takes for delivered."""
        self._dispatch.lost(self.endpoint.name, authority, reason, messages)

    def _drop(self, verdict: AddressVerdict, message: EncodedMessage) -> None:
        if not verdict.reason:
            return
        self.endpoint.dropped[verdict.reason] += 1
        self._dispatch.ledger.drop(verdict.account)
        if verdict.is_beyond_limit:
            self.lose(verdict.account.authority, verdict.reason)
        if verdict.reason == "denied":
            what = f"no rule lets endpoint {self.endpoint.name!r} send this on"
            self._dispatch.express.fail(message, UCode.PERMISSION_DENIED, what, self.endpoint, is_withheld=True)

    def _recorded_only(
        self,
        verdict: AddressVerdict,
        inside: Callable[[EncodedMessage], EncodedMessage] | None,
        message: EncodedMessage,
    ) -> EncodedMessage:
        """Count a message that is recorded and goes no further. Only messages that are counted pay for it."""
        self.endpoint.dropped[verdict.reason] += 1
        return message if inside is None else inside(message)

    def _refuse(self, verdict: AddressVerdict, message: EncodedMessage, size: int) -> None:
        """Refuse a message that is too large or above its quota. Above the quota, only requests are answered."""
        attributes = message.stamp.attributes
        # the caller of a request gets an answer
        if verdict.is_wanted and attributes.type != attrs.REQUEST:
            self.lose(verdict.account.authority, "too_large" if size > verdict.bytes_max else "over_quota")
        if size > verdict.bytes_max:
            self.endpoint.dropped["too_large"] += 1
            self._dispatch.ledger.drop(verdict.account)
            limit = f"{verdict.bytes_max} bytes here (limits.message_bytes_max)"
            what = f"a payload has at most {limit}, and this one has {size}"
            self._dispatch.express.fail(message, UCode.INVALID_ARGUMENT, what, self.endpoint)
            return
        self.endpoint.dropped["over_quota"] += 1
        refused, authority = self.endpoint.transport.refused, attributes.source.authority_name
        if refused is not None and authority not in self._refused:
            self._refused[authority] = verdict.account
            refused[authority] = 0
        if attributes.type == attrs.REQUEST:
            what = f"authority {verdict.account.authority} sends more than its quota: send slower"
            self._dispatch.express.fail(message, UCode.RESOURCE_EXHAUSTED, what, self.endpoint)

    def gather_lost(self) -> None:
        """Report what the transport has dropped since the last turn for want of space."""
        transport = self.endpoint.transport
        dropped = transport.dropped
        before = self._lost_there if transport is self._lost_by else {}
        self._lost_by, self._lost_there = transport, {reason: dropped.get(reason, 0) for reason in LOST_UNREAD}
        for reason, count in self._lost_there.items():
            if count > before.get(reason, 0):
                self.lose("", reason, count - before.get(reason, 0))

    def gather_refused(self) -> None:
        """Count messages that the transport has refused, and accept authorities that are below their quota again."""
        refused = self.endpoint.transport.refused
        if refused is None:
            return
        for authority, account in list(self._refused.items()):
            count, refused[authority] = refused[authority], 0
            self.endpoint.received += count
            self.endpoint.dropped["over_quota"] += count
            if count:
                self.lose(account.authority, "over_quota", count)
            if self._dispatch.ledger.refused(account, count):
                del refused[authority], self._refused[authority]

    # Decisions

    def verdict_of(self, message: EncodedMessage) -> AddressVerdict:
        """Returns the verdict on `message`, as if it had been published here."""
        if self._dispatch.view.version != self._verdicts_version:
            self._forget_changed()
        return self._verdicts.get(message.stamp.address) or self._new_verdict(message)

    def forget_verdicts(self) -> None:
        """Decide again after a change that `View.version` does not cover."""
        self._verdicts.clear()
        self._published.clear()

    def _forget_changed(self) -> None:
        """Decide again about the topics that have changed."""
        view, before = self._dispatch.view, self._verdicts_version
        topics = view.changed_since(before) if before is not None else None
        self._verdicts_version = view.version
        if topics is None:
            self.forget_verdicts()
            return
        for topic in topics:
            for address in self._published.pop(to_uri(topic).SerializeToString(), ()):
                del self._verdicts[address]

    def forget_streams(self, target: Log, streams: frozenset[int]) -> None:
        """Decide again about streams that `target` has forgotten, and about topics that were beyond the limit."""
        for address, verdict in list(self._verdicts.items()):
            if (verdict.stream in streams and verdict.log is target) or verdict.is_beyond_limit:
                for published in (*self._published.pop(verdict.source, ()), address):
                    self._verdicts.pop(published, None)

    def _new_verdict(self, message: EncodedMessage) -> AddressVerdict:
        attributes = message.stamp.attributes  # the message itself stays encoded in the tail of the log
        source = self._inward(attributes.source)
        sink = self._inward(attributes.sink) if attributes.HasField("sink") else None
        try:
            verdict = self._verdict_on(attributes, source, sink)
        except TopicsFullError as error:  # other messages of the batch are not affected
            now = asyncio.get_running_loop().time()
            # in a flood of topics, a line for each would cost more than everything else
            if now >= self._log_full_at or error.reason != self._full_reason:
                self._log_full_at, self._full_reason = now + LOG_FULL_S, error.reason
                log.warning("dropped: no capacity for one more topic", endpoint=self.endpoint.name, error=str(error))
            verdict = AddressVerdict(reason=error.reason, is_beyond_limit=True)
        verdict.is_answer = attributes.type == attrs.RESPONSE and not self._trusted
        verdict.source = source.SerializeToString()
        verdict.account = self._dispatch.ledger.account(
            source.authority_name, "" if self._trusted else self.endpoint.name
        )
        is_kept = verdict.log is not None and verdict.log.durable
        verdict.quota = verdict.account.kept if is_kept else verdict.account.passing
        # a page of history is a response, and may be larger by its envelope
        if not self._trusted and not verdict.is_answer:
            verdict.bytes_max = self._dispatch.message_bytes_max
        readdressed = None
        if uris.key(source) != uris.key(attributes.source) or (
            sink is not None and uris.key(sink) != uris.key(attributes.sink)
        ):
            readdressed = Readdressed(source, sink)
            verdict.inside = readdressed.of
        if self._names is not None and may_carry_addresses(attributes):
            verdict.inside = functools.partial(self._names.arrived, readdressed)
        if verdict.log is not None and verdict.reason:
            verdict.inside = functools.partial(self._recorded_only, verdict, verdict.inside)
        address = message.stamp.address
        if len(self._verdicts) >= caches.streams_max:
            self.forget_verdicts()
        self._verdicts[address] = verdict
        if sink is None:
            self._published[verdict.source] = (*self._published.get(verdict.source, ()), address)
        return verdict

    def _inward(self, address: UUri) -> UUri:
        """Returns the address inside: with authority, in the names of this gateway, without unknown fields."""
        key = uris.key(address)
        authority = key[0] or self.endpoint.only_authority
        if self._names is not None:
            authority = self._names.inward(authority)
        return to_uri((authority, *key[1:]))

    def _verdict_on(self, attributes: UAttributes, source: UUri, sink: UUri | None) -> AddressVerdict:
        if not source.authority_name or (sink is not None and not sink.authority_name):
            return AddressVerdict(reason="no_authority")
        names = self._names
        if names is not None and sink is not None and names.is_inside(attributes.sink.authority_name):
            return AddressVerdict(reason="inside_name")  # every vehicle has an authority of that name
        if not self._trusted and self._dispatch.view.endpoints.owner(source.authority_name) is not self.endpoint:
            what = "dropped: the source's authority is not of this network"
            log.warning(what, endpoint=self.endpoint.name, source=uris.format(source))
            return AddressVerdict(reason="spoofed")
        return self._verdict_published(source) if sink is None else self._verdict_sent(attributes.type, source, sink)

    def _verdict_sent(self, type: int, source: UUri, sink: UUri) -> AddressVerdict:
        if self._dispatch.hosted.owns(sink):
            return AddressVerdict(is_hosted=True)
        view = self._dispatch.view
        peer = view.endpoints.owner(sink.authority_name)
        if peer is None or peer is self.endpoint:
            return AddressVerdict()  # traffic within one network
        address = sink if type == attrs.REQUEST else source
        if not self._trusted and not view.rules.allow(self.endpoint, peer, address):
            return AddressVerdict(reason="denied")
        if type in (attrs.REQUEST, attrs.RESPONSE) or is_fleeting(source):
            return AddressVerdict(peer=peer)
        target = self._dispatch.logs.of(source)
        return AddressVerdict(target, target.stream_id(source, sink))

    def _verdict_published(self, source: UUri) -> AddressVerdict:
        if is_about_epochs(source) and not self._trusted:
            return AddressVerdict(reason="spoofed")  # it counts only as a record of a history
        dispatch, target = self._dispatch, self._dispatch.logs.of(source)
        is_recorded, decision = dispatch.logs.is_recorded(source), dispatch.view.decide(source, None, target)
        is_followed, on_plain_copy = (False, None) if self._trusted else dispatch.followed(self.endpoint, source)
        verdict = AddressVerdict()  # nobody wants it
        if decision or is_recorded or is_followed:
            is_named = dispatch.view.names(source) or dispatch.logs.names(source)
            verdict = AddressVerdict(target, target.stream_id(source, None, wanted=is_named))
            verdict.gate = None if self._trusted else dispatch.recovered(source)
        if not decision and dispatch.view.is_wanted_elsewhere(source):
            verdict.reason = "no_rule"
        verdict.on_plain_copy = on_plain_copy
        return verdict
