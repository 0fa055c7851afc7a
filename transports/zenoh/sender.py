"""What leaves over Zenoh: one thread's work.

batch -> send plan of its stamp -> route -> session.put    a topic's first messages: no declaration for peers to take in
         or checks                  |       publisher.put  from then on: half the cost
                                    '-- publishers are full: one that was unused for a whole period is undeclared, or
                                        the topic stays as it is
                                     publishes, where the owner is told of absence: presence.py, and a publisher for the
                                        first message

flush -> one query for each linked peer, of the lowest priority, behind all that was put -> answered: it has read all
silent -> the same of the highest priority, beside all that waits -> answered: it reads

Zenoh's close gives what is still on its way 2.5 s at most, and nothing at all where the other side is about to write
something: TCP then resets the connection, and forgets what the other side has not read. So who closes flushes first. A
router answers each query, a peer only for what somebody has declared; so each of our transports declares its own
FLUSH_KEY. What confirms nothing is given time instead.
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
from transports.zenoh.presence import NOBODY, UNASKED, Presence, Unasked, Watch
from uprotocol import cache as caches
from uprotocol.cache import Cache
from uprotocol.encoded import Carried, EncodedMessage, decoded, is_shared, suffix
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.uattributes_pb2 import UMessageType
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

PUBLISHERS_MAX = 4_096  # declared at once, some 2 KB each, here and at each peer
# of a topic: a declaration costs what some hundred puts save, and many topics never see it paid back
PUTS_BEFORE_DECLARED: Final = 16
# a publisher that was used within this time stays: what it put must have left before it is undeclared
UNUSED_S = 60.0
SETTLE_POLL_S: Final = 0.005
# after the first link: subscriptions are declared within milliseconds of it, and what is put before is lost
SETTLE_S_MAX = 1.0
# after the first subscription that we see: the others come with it, and what nobody wants must hold up nothing
SETTLE_MORE_S: Final = 0.1
FLUSH_KEY: Final = "@uprotocol/flush"  # "/" and the Zenoh id of who answers; `@` keeps it out of everybody's wildcards
# between the last message and the end, for peers that confirm nothing (other implementations, linked directly)
LINGER_S: Final = 1.0
# where in Zenoh's source an error arose: no help to who reads it
SOURCE_PLACE: Final = re.compile(r" at /\S+\.rs:\d+\.?")
# in what Zenoh says of a setting that it does not take
OF_SETTINGS: Final = (
    "Invalid Key Expr", "Endpoints must be", "onfig", "Access control not enabled", "Missing root certificates",
)  # fmt: skip
NO_PEER: Final = UStatus(code=UCode.UNAVAILABLE, message="no Zenoh peer or router is linked: try again when one is")
_PRIORITIES: Final = {number: getattr(zenoh.Priority, name) for number, name in mapping.PRIORITIES.items()}

T = TypeVar("T")
_Key = tuple[str, int]  # key expression, UPriority


def words(error: Exception) -> str:
    """What Zenoh says, without the places in its source."""
    return SOURCE_PLACE.sub("", str(error)).strip()


def translate(error: Exception, doing: str) -> UStatusError:
    """The one place where Zenoh's errors become ours. Zenoh has one exception only, so the words decide."""
    said = words(error)
    if "already in use" in said:
        return UStatusError(
            UCode.FAILED_PRECONDITION, f"{doing}: the port is in use; free it, or listen on another one ({said})"
        )
    if any(word in said for word in OF_SETTINGS):
        return invalid(f"{doing}: {said}")
    return UStatusError(UCode.UNAVAILABLE, f"{doing}: {said}")


class _Route:
    """How to put on one key with one priority."""

    __slots__ = ("key", "options", "publisher", "put", "puts_left", "watch")

    def __init__(self, session: zenoh.Session, key: _Key, *, asks: bool) -> None:
        """`asks`: a publish whose owner wants to know that nobody listens."""
        self.key = key
        self.watch: Watch | Unasked | None = UNASKED if asks else None  # None: it is put also where nobody listens
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
    watch: Watch | None  # None: nobody has asked yet


class _SendPlan(NamedTuple):
    """Where messages of one stamp go, and what has to be looked at in each of them."""

    route: _Route
    ttl: int
    format: int


class Unread(NamedTuple):
    """Peers, by Zenoh id, that have not said that they read what was put: in time, or at all, as they can't."""

    late: list[str]
    mute: list[str]


class SenderThread(Executor):
    """One daemon thread: a put that waits for a peer outlives the session's close, and must not hold up the end of the
    process."""

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
        """End when all is done that was submitted. Waits for nothing."""
        self._work.put(None)


class ZenohSender:
    """Of one session. All of it runs on its `thread`, but for `first_link` and what says so; `thread.shutdown`
    ends it.

    `peers` are those that are linked now, by Zenoh id, with True for one that answers every query: it belongs to the
    transport.
    """

    def __init__(
        self,
        session: zenoh.Session,
        authority: str,
        peers: Mapping[str, bool],
        wire_bytes_max: int,
        on_heard: Callable[[str | None], None] = lambda key: None,
    ) -> None:
        """`on_heard(key)` on Zenoh's thread: see Presence."""
        self.session, self._authority, self._peers, self._wire_bytes_max = session, authority, peers, wire_bytes_max
        self.thread = SenderThread(f"zenoh-send-{authority}")
        self._checks = SendChecks()
        self._plans: Cache[Any, _SendPlan] = Cache()  # by Stamp, or by the encoded attributes without the id
        self._routes: dict[_Key, _Route] = {}
        self._publishers: dict[_Key, _Declared] = {}
        self._presence = Presence(session, on_heard, self.thread.submit)
        self._tells_absence = False
        self.unprobed = 0
        """Publishes that were put though nobody could say whether anybody listens: publishers are full."""
        self._used: set[_Key] = set()  # publishers, in this period
        self._unused: list[_Key] = []  # publishers, in the whole period before this one
        self._period_began = 0.0  # time.monotonic()
        self._settled_at = 0.0  # by then who has just linked us has declared its subscriptions; time.monotonic()
        self._put_at = 0.0  # when something was put last, time.monotonic(); 0: nothing since everything was confirmed
        self._batches = 0
        self._statuses: list[UStatus] | None = None  # of the batch that is being put; None: none is

    def __repr__(self) -> str:
        return f"ZenohSender(publishers={len(self._publishers)}, routes={len(self._routes)})"

    @property
    def publishers(self) -> int:
        return len(self._publishers) + self._presence.publishers

    def first_link(self) -> None:
        self._settled_at = time.monotonic() + SETTLE_S_MAX

    def put(self, messages: Sequence[Carried], tells_absence: bool = False) -> list[UStatus]:
        """In order; one status for each. Raises nothing. `tells_absence`: answer `nobody_listens` for a publish to
        which nobody listens, and do not put it."""
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
        """Number of the batch that is being put, and of the message in it; None: nothing is. From any thread."""
        statuses = self._statuses
        return None if statuses is None else (self._batches, len(statuses))

    def _put(self, messages: Sequence[Carried]) -> list[UStatus]:
        """Messages of a stream that is known need no validation: what may differ is the payload and the age."""
        self._statuses = statuses = list[UStatus]()
        now_ms, plans, peers, version = self._checks.now_ms(), self._plans, self._peers, mapping.VERSION_BYTE
        bytes_max = self._wire_bytes_max
        settling = time.monotonic() < self._settled_at
        absent = set[str]()  # keys that this call has answered NOBODY
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
                watch = route.watch
                if watch is not None:
                    if (absent or not watch.heard) and (route.key[0] in absent or self._is_nobody(route)):
                        absent.add(route.key[0])
                        statuses.append(NOBODY)
                        continue
                elif settling:
                    settling = self._await_match(route)
                if route.puts_left:  # the last one of so many puts declares a publisher, if there is room
                    route.puts_left -= 1
                    if not route.puts_left and not self._declare(route):
                        route.puts_left = PUTS_BEFORE_DECLARED
                route.put(payload, attachment=version + encoded)
            except UStatusError as error:  # no key can hold its address; the others may go
                statuses.append(error.status)
                continue
            except zenoh.ZError as error:
                return stopped(statuses, len(messages), translate(error, "sending").status)
            statuses.append(OK)
        return statuses

    def _plan(self, message: UMessage, mark: Any) -> _SendPlan:
        """Where a message goes that is valid, remembered by its stamp."""
        attributes = message.attributes
        key = mapping.message_key(message, self._authority), attributes.priority
        route = self._routes.get(key) or self._route(key, attributes.type == UMessageType.UMESSAGE_TYPE_PUBLISH)
        if route.publisher is not None:
            self._used.add(key)
        plan = _SendPlan(route, attributes.ttl, attributes.payload_format)
        if mark is not None and is_shared(attributes):
            self._plans[mark] = plan
        return plan

    def _route(self, key: _Key, is_publish: bool) -> _Route:
        if len(self._routes) >= caches.streams_max:
            self._routes.clear()
            self._plans.clear()
        route = self._routes[key] = _Route(self.session, key, asks=is_publish and self._tells_absence)
        if key in self._publishers:
            route.declared(self._publishers[key].publisher)
        return route

    def _is_nobody(self, route: _Route) -> bool:
        """Of a publish that is not known to be heard: whether nobody listens. It may declare a publisher for that."""
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

    def _declare(self, route: _Route) -> bool:
        if not self._has_room():
            return False
        publisher = self.session.declare_publisher(
            route.key[0], reliability=zenoh.Reliability.RELIABLE, **route.options
        )
        self._publishers[route.key] = _Declared(publisher, None)
        self._used.add(route.key)
        route.declared(publisher)
        return True

    def _has_room(self) -> bool:
        """True if there is room for one more publisher, be it that of one whose messages have left long ago."""
        if self.publishers < PUBLISHERS_MAX:
            return True
        now = time.monotonic()
        if now - self._period_began >= UNUSED_S:
            self._unused = [key for key in reversed(self._publishers) if key not in self._used]  # the oldest last
            self._used.clear()
            self._plans.clear()  # so that each use shows once
            self._period_began = now
        while self._unused:
            key = self._unused.pop()
            if key not in self._used:
                self._routes.pop(key, None)
                self._publishers.pop(key).publisher.undeclare()  # type: ignore[no-untyped-call]
                return True
        return False

    def _await_match(self, route: _Route) -> bool:
        """Just after the first link: wait until somebody listens, or the time is over. True while it is not."""
        if route.publisher is None and not self._declare(route):
            return True
        publisher: Any = route.publisher  # whose stub says that matching_status is a bool
        while (now := time.monotonic()) < self._settled_at:
            if publisher.matching_status.matching:
                self._settled_at = min(self._settled_at, now + SETTLE_MORE_S)
                return True
            time.sleep(SETTLE_POLL_S)
        return False

    def flush(self, timeout_s: float) -> Unread:
        """Wait until the linked peers have read all that was put; answers those that did not say so."""
        if not self._put_at:
            return Unread([], [])
        deadline = time.monotonic() + timeout_s
        # none is lower than BACKGROUND: it leaves behind everything
        unread = self._unread(dict(self._peers), timeout_s, zenoh.Priority.BACKGROUND, zenoh.CongestionControl.BLOCK)
        unread = unread._replace(mute=[peer for peer in unread.mute if peer in self._peers])
        until = min(deadline, self._put_at + LINGER_S)
        while time.monotonic() < until and any(peer in self._peers for peer in unread.mute):
            time.sleep(SETTLE_POLL_S)
        if not any(unread):
            self._put_at = 0.0
        return unread

    def silent(self, peers: Iterable[str], timeout_s: float) -> Unread:
        """Which of these peers do not answer now. From any thread."""
        asked = {peer: self._peers.get(peer, False) for peer in peers}
        try:
            return self._unread(asked, timeout_s, zenoh.Priority.REAL_TIME, zenoh.CongestionControl.DROP)
        except zenoh.ZError:  # the session is closed
            return Unread([], [])

    def addresses(self) -> dict[str, str]:
        """Of all peers with a link. From any thread."""
        with contextlib.suppress(zenoh.ZError):
            return {str(link.zid): str(link.dst) for link in self.session.info.links()}
        return {}

    def _unread(
        self, peers: Mapping[str, bool], timeout_s: float, priority: zenoh.Priority, congestion: zenoh.CongestionControl
    ) -> Unread:
        """Ask `peers` whether they have read what was sent to them with that priority."""
        asked = [(peer, answers, self._ask(peer, timeout_s, priority, congestion)) for peer, answers in peers.items()]
        unread = Unread([], [])
        for peer, always_answers, replies in asked:
            answers = [reply.ok is not None for reply in replies]  # a timeout is an answer that is an error
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
    """On Zenoh's thread. What was put before the query has been read by now: one link is read in its order."""
    with query:
        query.reply(query.key_expr, b"")
