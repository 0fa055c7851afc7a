"""Sends over Zenoh, on one thread.

batch -> send plan of its stamp -> route -> session.put    the first messages of a topic: no declaration at the peers
         or checks                  |       publisher.put  from then on: half the cost
                                    |-- at the limit of publishers: an unused one is undeclared, or the topic stays
                                    |   with session.put
                                    '-- a publish or request, and the owner wants to know who listens: presence.py,
                                        and for a publish a publisher for the first message

flush  -> a query to each linked peer, of the lowest priority, behind all messages -> answered: it has read them
silent -> a query of the highest priority, beside all waiting messages             -> answered: it reads

Zenoh's close waits 2.5 s at most for messages on their way. If the other side is about to write, it does not wait at
all: TCP resets the connection and drops what the other side has not read. So `close` flushes first. A router answers
every query, a peer only queries for a declared queryable, so each of our transports declares its own FLUSH_KEY. Peers
that confirm nothing get LINGER_S instead.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar

import zenoh

from transports.base import OK, SendChecks, stopped, too_large
from transports.zenoh import mapping
from transports.zenoh.presence import NO_SERVICE, NO_SUBSCRIBER, Presence, Watch
from uprotocol import cache as caches
from uprotocol.cache import Cache
from uprotocol.encoded import Carried, EncodedMessage, decoded, is_shared, suffix
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uattributes_pb2 import UMessageType
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

PUBLISHERS_MAX = 4_096  # declared at once, some 2 KB each, here and at each peer
# of a topic: a declaration costs what some hundred puts save
PUTS_BEFORE_DECLARED: Final = 16
# a publisher that was used within this time stays: its messages must leave before it is undeclared
UNUSED_S = 60.0
SETTLE_POLL_S: Final = 0.005
# after the first link: subscriptions are declared milliseconds later, and earlier messages are lost
SETTLE_S_MAX = 1.0
# after the first subscription: the others come with it, and a topic without a listener must not delay others
SETTLE_MORE_S: Final = 0.1
FLUSH_KEY: Final = "@uprotocol/flush"  # "/" and the Zenoh id of the answering peer follow; wildcards do not match `@`
# between the last message and the end, for peers that confirm nothing (other implementations)
LINGER_S: Final = 1.0
# of an error in Zenoh's source
SOURCE_PLACE: Final = re.compile(r" at /\S+\.rs:\d+\.?")
# in Zenoh's error texts about a setting
OF_SETTINGS: Final = (
    "Invalid Key Expr", "Endpoints must be", "onfig", "Access control not enabled", "Missing root certificates",
)  # fmt: skip
NO_PEER: Final = UStatus(code=UCode.UNAVAILABLE, message="no Zenoh peer or router is linked: try again when one is")
_PRIORITIES: Final = {number: getattr(zenoh.Priority, name) for number, name in mapping.PRIORITIES.items()}

T = TypeVar("T")
_KeyPriority = tuple[str, int]  # key expression, UPriority


def words(error: Exception) -> str:
    """The text of Zenoh's error, without the position in its source."""
    return SOURCE_PLACE.sub("", str(error)).strip()


def translate(error: Exception, doing: str) -> UStatusError:
    """The UStatusError for an error of Zenoh. Zenoh has only one exception, so the text decides on the code."""
    text = words(error)
    if "already in use" in text:
        return UStatusError(
            UCode.FAILED_PRECONDITION, f"{doing}: the port is in use; free it, or listen on another one ({text})"
        )
    if any(word in text for word in OF_SETTINGS):
        return invalid(f"{doing}: {text}")
    return UStatusError(UCode.UNAVAILABLE, f"{doing}: {text}")


class _KeyRoute:
    """How to put on one key with one priority."""

    __slots__ = ("asks", "is_call", "key", "options", "publisher", "put", "puts_left", "watch")

    def __init__(self, session: zenoh.Session, key: _KeyPriority, *, asks: bool, is_call: bool) -> None:
        """`asks`: for publishes and requests, if the owner wants to know that nobody listens. `is_call`: for
        requests."""
        self.key = key
        self.asks, self.is_call = asks, is_call
        self.watch: Watch | None = None  # until there is one, each message needs a check
        self.options: dict[str, Any] = {  # reliable, blocking, without an encoding
            "congestion_control": zenoh.CongestionControl.BLOCK,
            "priority": _PRIORITIES.get(key[1], zenoh.Priority.DATA_LOW),
            "allowed_destination": zenoh.Locality.REMOTE,
        }
        self.put: Callable[..., Any] = partial(session.put, key[0], **self.options)
        self.publisher: zenoh.Publisher | None = None
        self.puts_left = PUTS_BEFORE_DECLARED  # 0: there is a publisher

    def declared(self, publisher: zenoh.Publisher) -> None:
        self.publisher, self.put, self.puts_left = publisher, publisher.put, 0


class _Declared(NamedTuple):
    publisher: zenoh.Publisher
    watch: Watch | None  # None until it is needed


class _SendPlan(NamedTuple):
    """The route of messages with one stamp, and what must be checked in each of them."""

    route: _KeyRoute
    ttl: int
    format: int


class Unread(NamedTuple):
    """Peers, by Zenoh id, that have not confirmed that they read the messages."""

    late: list[str]  # not in time
    mute: list[str]  # they can't


class SenderThread(Executor):
    """One daemon thread: a put that waits for a peer outlives the close of the session and must not delay the end of
    the process."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, fn: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*arguments, **named))
                except BaseException as error:
                    future.set_exception(error)

        self._work.put(work)
        return future

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after all submitted calls. Does not wait."""
        self._work.put(None)


class ZenohSender:
    """Sends over one session. All methods run on its `thread`, except `first_link` and those that say so. End it with
    `thread.shutdown`.

    `peers`: the linked ones, by Zenoh id; True: it answers every query. The transport changes it.
    """

    def __init__(
        self,
        session: zenoh.Session,
        authority: str,
        peers: Mapping[str, bool],
        wire_bytes_max: int,
        on_heard: Callable[[str | None], None] = lambda key: None,
    ) -> None:
        """`on_heard(key)` is called on Zenoh's thread: see Presence."""
        self.session, self._authority, self._peers, self._wire_bytes_max = session, authority, peers, wire_bytes_max
        self.thread = SenderThread(f"zenoh-send-{authority}")
        self._checks = SendChecks()
        self._plans: Cache[Any, _SendPlan] = Cache()  # by Stamp, or by the encoded attributes without the id
        self._routes: dict[_KeyPriority, _KeyRoute] = {}
        self._publishers: dict[_KeyPriority, _Declared] = {}
        self._presence = Presence(session, on_heard, self.thread.submit)
        self._tells_absence = False
        self.unprobed = 0
        """Publishes and requests that were put without knowing whether anybody listens, at the limit of publishers."""
        self._used: set[_KeyPriority] = set()  # publishers, in this period
        self._unused: list[_KeyPriority] = []  # publishers, in the whole period before this one
        self._period_began = 0.0  # time.monotonic()
        self._settled_at = 0.0  # the first peer has declared its subscriptions by then; time.monotonic()
        self._put_at = 0.0  # of the last batch, time.monotonic(); 0: all messages are confirmed
        self._batches = 0
        self._statuses: list[UStatus] | None = None  # of the current batch

    def __repr__(self) -> str:
        return f"ZenohSender(publishers={len(self._publishers)}, routes={len(self._routes)})"

    @property
    def publishers(self) -> int:
        return len(self._publishers) + self._presence.publishers

    def first_link(self) -> None:
        self._settled_at = time.monotonic() + SETTLE_S_MAX

    def put(self, messages: Sequence[Carried], tells_absence: bool = False) -> list[UStatus]:
        """Put `messages` in order. Returns a status for each; raises nothing. With `tells_absence` a publish or request
        that nobody listens to is answered `nobody_listens` and not put."""
        self._batches += 1
        if tells_absence != self._tells_absence:
            self._tells_absence = tells_absence
            self._routes.clear()
            self._plans.clear()
        try:
            return self._put(messages)
        finally:
            self._put_at = time.monotonic()
            self._statuses = None

    @property
    def position(self) -> tuple[int, int] | None:
        """(number of the batch that is being put, index of the message in it); None between batches. From any
        thread."""
        statuses = self._statuses
        return None if statuses is None else (self._batches, len(statuses))

    def _put(self, messages: Sequence[Carried]) -> list[UStatus]:
        """Messages with a known stamp need no validation: only payload and age may differ."""
        self._statuses = statuses = list[UStatus]()
        now_ms, plans, peers, version = self._checks.now_ms(), self._plans, self._peers, mapping.VERSION_BYTE
        bytes_max = self._wire_bytes_max
        settling = time.monotonic() < self._settled_at
        absent = set[str]()  # keys that this call has answered NO_SUBSCRIBER
        for message in messages:
            mark: Any
            if type(message) is EncodedMessage:
                encoded, mark = message.encoded, message.stamp
            else:
                encoded = message.attributes.SerializeToString()
                mark = suffix(encoded)
            plan = plans.get(mark)
            try:
                if plan is None or plan.ttl or (plan.format and not message.HasField("payload")):
                    refusal = self._checks.refusal(decoded(message), now_ms)
                    if refusal is not None:
                        statuses.append(refusal)
                        continue
                    plan = plan or self._plan(decoded(message), mark)
                if not peers:
                    return stopped(statuses, len(messages), NO_PEER)
                route, payload = plan.route, message.payload
                if len(payload) + len(encoded) > bytes_max:
                    statuses.append(too_large(len(payload) + len(encoded), bytes_max))
                    continue
                if route.asks:
                    is_unknown = absent or route.watch is None or not route.watch.heard
                    if is_unknown and (route.key[0] in absent or self._is_nobody(route)):
                        absent.add(route.key[0])
                        statuses.append(NO_SERVICE if route.is_call else NO_SUBSCRIBER)
                        continue
                elif settling:
                    settling = self._await_match(route)
                if route.puts_left:  # the last of PUTS_BEFORE_DECLARED puts declares a publisher
                    route.puts_left -= 1
                    if not route.puts_left and not self._declare(route):
                        route.puts_left = PUTS_BEFORE_DECLARED
                route.put(payload, attachment=version + encoded)
            except UStatusError as error:  # its address has no valid key; others are still sent
                statuses.append(error.status)
                continue
            except zenoh.ZError as error:
                return stopped(statuses, len(messages), translate(error, "sending").status)
            statuses.append(OK)
        return statuses

    def _plan(self, message: UMessage, mark: Any) -> _SendPlan:
        """The send plan of a valid message, cached by its stamp."""
        attributes = message.attributes
        key = mapping.message_key(message, self._authority), attributes.priority
        route = self._routes.get(key) or self._route(key, attributes.type)
        if route.publisher is not None:
            self._used.add(key)
        plan = _SendPlan(route, attributes.ttl, attributes.payload_format)
        if mark is not None and is_shared(attributes):
            self._plans[mark] = plan
        return plan

    def _route(self, key: _KeyPriority, type: UMessageType.ValueType) -> _KeyRoute:
        if len(self._routes) >= caches.streams_max:
            self._routes.clear()
            self._plans.clear()
        is_call = type == UMessageType.UMESSAGE_TYPE_REQUEST
        asks = self._tells_absence and (is_call or type == UMessageType.UMESSAGE_TYPE_PUBLISH)
        route = self._routes[key] = _KeyRoute(self.session, key, asks=asks, is_call=is_call)
        if key in self._publishers:
            route.declared(self._publishers[key].publisher)
        return route

    def _is_nobody(self, route: _KeyRoute) -> bool:
        """True if nobody listens to a publish or request on this route. May declare a publisher to find out."""
        if route.is_call:
            return self._is_without_service(route)
        key = route.key[0]
        silent, cover = self._presence.around(key)
        if silent:
            return True
        if cover is not None:
            route.watch = cover
            return False
        if route.publisher is None and not self._declare(route):
            self.unprobed += 1
            return False
        declared = self._publishers[route.key]
        if declared.watch is None:
            watch = self._presence.watch(declared.publisher, key)
            declared = self._publishers[route.key] = declared._replace(watch=watch)
        route.watch = declared.watch
        return declared.watch is not None and declared.watch.is_nobody()

    def _is_without_service(self, route: _KeyRoute) -> bool:
        if time.monotonic() < self._settled_at:
            self._await_match(route)
        if route.watch is None:
            if self.publishers < PUBLISHERS_MAX:
                route.watch = self._presence.method(route.key[0])
            if route.watch is None:
                self.unprobed += 1
                return False
        return route.watch.is_nobody()

    def _declare(self, route: _KeyRoute) -> bool:
        if not self._has_capacity():
            return False
        publisher = self.session.declare_publisher(
            route.key[0], reliability=zenoh.Reliability.RELIABLE, **route.options
        )
        self._publishers[route.key] = _Declared(publisher, None)
        self._used.add(route.key)
        route.declared(publisher)
        return True

    def _has_capacity(self) -> bool:
        """True if one more publisher can be declared. May undeclare one that was unused for a whole period."""
        if self.publishers < PUBLISHERS_MAX:
            return True
        now = time.monotonic()
        if now - self._period_began >= UNUSED_S:
            self._unused = [key for key in reversed(self._publishers) if key not in self._used]  # the oldest last
            self._used.clear()
            self._plans.clear()  # so that each used publisher is noted once
            self._period_began = now
        while self._unused:
            key = self._unused.pop()
            if key not in self._used:
                self._routes.pop(key, None)
                self._publishers.pop(key).publisher.undeclare()  # type: ignore[no-untyped-call]
                return True
        return False

    def _await_match(self, route: _KeyRoute) -> bool:
        """Just after the first link: wait until somebody listens. False if the time for that is over."""
        if route.publisher is None and not self._declare(route):
            return True
        publisher: Any = route.publisher  # its stub has a wrong type for matching_status
        while (now := time.monotonic()) < self._settled_at:
            if publisher.matching_status.matching:
                self._settled_at = min(self._settled_at, now + SETTLE_MORE_S)
                return True
            time.sleep(SETTLE_POLL_S)
        return False

    def flush(self, timeout_s: float) -> Unread:
        """Wait until the linked peers have read all messages. Returns those that did not confirm it."""
        if not self._put_at:
            return Unread([], [])
        deadline = time.monotonic() + timeout_s
        # BACKGROUND is the lowest priority: the query leaves after all messages
        unread = self._unread(dict(self._peers), timeout_s, zenoh.Priority.BACKGROUND, zenoh.CongestionControl.BLOCK)
        unread = unread._replace(mute=[peer for peer in unread.mute if peer in self._peers])
        until = min(deadline, self._put_at + LINGER_S)
        while time.monotonic() < until and any(peer in self._peers for peer in unread.mute):
            time.sleep(SETTLE_POLL_S)
        if not any(unread):
            self._put_at = 0.0
        return unread

    def silent(self, peers: Iterable[str], timeout_s: float) -> Unread:
        """Those of `peers` that do not answer now. From any thread."""
        asked = {peer: self._peers.get(peer, False) for peer in peers}
        try:
            return self._unread(asked, timeout_s, zenoh.Priority.REAL_TIME, zenoh.CongestionControl.DROP)
        except zenoh.ZError:  # the session is closed
            return Unread([], [])

    def addresses(self) -> dict[str, str]:
        """Zenoh id -> address of each peer with a link. From any thread."""
        with contextlib.suppress(zenoh.ZError):
            return {str(link.zid): str(link.dst) for link in self.session.info.links()}
        return {}

    def _unread(
        self, peers: Mapping[str, bool], timeout_s: float, priority: zenoh.Priority, congestion: zenoh.CongestionControl
    ) -> Unread:
        """Ask `peers` whether they have read the messages of that priority."""
        asked = [(peer, answers, self._ask(peer, timeout_s, priority, congestion)) for peer, answers in peers.items()]
        unread = Unread([], [])
        for peer, always_answers, replies in asked:
            answers = [reply.ok is not None for reply in replies]  # a timeout is an error reply
            if answers and not any(answers):
                unread.late.append(peer)
            elif not answers and not always_answers:
                unread.mute.append(peer)
        return unread

    def _ask(
        self, peer: str, timeout_s: float, priority: zenoh.Priority, congestion: zenoh.CongestionControl
    ) -> zenoh.Handler[zenoh.Reply]:
        return self.session.get(
            f"{FLUSH_KEY}/{peer}",
            target=zenoh.QueryTarget.ALL,
            timeout=timeout_s,
            congestion_control=congestion,
            priority=priority,
            allowed_destination=zenoh.Locality.REMOTE,
        )


def answer_flush(query: zenoh.Query) -> None:
    """On Zenoh's thread. All earlier messages of the link have been read, since a link is read in order."""
    with query:
        query.reply(query.key_expr, b"")
