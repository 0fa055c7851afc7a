"""What every transport does alike, written once. Ours are made on it; a plugin may be, and need not.

send_batch: message -> valid?            -> not expired?      -> not too large?   -> the network
                       INVALID_ARGUMENT     DEADLINE_EXCEEDED    INVALID_ARGUMENT    UNAVAILABLE: stopped() says so
connection: set_connected(True | False) -> each callback of on_connection, once for each change
listeners:  register_listener(s) -> ListenerTable: new to the network? -> listen(_all)   what arrives: see arrivals.py
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field

from transports.certificates import CertificateFile
from transports.listeners import LISTENERS_MAX, LISTENERS_PER_FILTER_MAX, Filter, ListenerTable, TtlCounts
from uprotocol import attributes as attrs
from uprotocol import uuid as uuids
from uprotocol.cache import Cache
from uprotocol.status import OK as OK  # for who sends: what a message is answered
from uprotocol.status import UStatusError, code_name
from uprotocol.transport import ConnectionCallback, LocalUriProvider, UListener, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

# (type, source, sink) of which something is kept for messages that differ in more than id and payload: the others find
# their stamp known
ROUTES_CACHED_MAX: Final = 8_192

NOT_OPEN: Final = UStatus(code=UCode.UNAVAILABLE, message="the transport is not open: call open first")
NOT_TRIED: Final = (
    "an earlier message of the batch could not be sent, so this one was not tried: send it again after that one"
)

_RouteKey = tuple[int, bytes, bytes | None]

log = structlog.get_logger()
T = TypeVar("T")


class SendChecks:
    """Says what may not leave, and why."""

    def __init__(self, *, now_ms: Callable[[], int] = uuids.now_ms) -> None:
        self.now_ms = now_ms
        self._valid_routes: Cache[_RouteKey, bool] = Cache(ROUTES_CACHED_MAX)

    def refusal(self, message: UMessage, now_ms: int) -> UStatus | None:
        """None if it may leave; else INVALID_ARGUMENT, or DEADLINE_EXCEEDED for what has expired (A-14)."""
        attributes = message.attributes
        sink = attributes.sink if attributes.HasField("sink") else None
        source = attributes.source.SerializeToString()
        route = attributes.type, source, sink.SerializeToString() if sink is not None else None
        try:
            if route not in self._valid_routes:
                there = attributes.source if attributes.HasField("source") else None
                attrs.validate_route(attributes.type, there, sink)
                self._valid_routes[route] = True
            attrs.validate_rest(attributes)
            attrs.validate_payload(attributes, message.HasField("payload"))
        except UStatusError as error:
            return error.status
        if attributes.ttl and attrs.is_expired(attributes, now_ms):
            late_ms = now_ms - uuids.time_ms(attributes.id) - attributes.ttl
            return UStatus(
                code=UCode.DEADLINE_EXCEEDED,
                message=f"the message expired {late_ms} ms ago (ttl {attributes.ttl} ms): not sent",
            )
        return None


def too_large(size: int, bytes_max: int) -> UStatus:
    """The answer to a message of `size` bytes on the network, where its owner (`UTransport.wire_bytes_max`) allows
    fewer: it is that message's own fault, which no later try mends."""
    return UStatus(
        code=UCode.INVALID_ARGUMENT,
        message=f"a message has at most {bytes_max} bytes here, attributes and payload together, got {size}: send "
        "less, or raise message_bytes_max at both ends",
    )


def stopped(statuses: list[UStatus], count: int, why: UStatus) -> list[UStatus]:
    """`statuses` filled up to `count`: the first missing one is `why`, those behind it were not tried (code as
    `why`)."""
    assert why.code != UCode.OK, f"only a failure stops a batch, not {code_name(why.code)}"
    if len(statuses) < count:
        statuses.append(why)
    while len(statuses) < count:
        statuses.append(UStatus(code=why.code, message=NOT_TRIED))
    return statuses


def tell(callbacks: Iterable[Callable[..., None]], *what: Any) -> None:
    """Call all of them; what one raises is logged, and harms nobody."""
    for callback in callbacks:
        try:
            callback(*what)
        except Exception:
            log.exception("a callback of a transport's owner failed", callback=repr(callback), told=what)


async def on_own_thread(name: str, make: Callable[[], T], discard: Callable[[T], object]) -> T:
    """What `make` answers, which may block: on a thread that nobody need wait for, not even the end of the process.

    What it makes after its caller has been cancelled is discarded, also on a thread."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            result = make()
        except BaseException as error:
            if made.set_running_or_notify_cancel():
                made.set_exception(error)
            return
        if made.set_running_or_notify_cancel():
            made.set_result(result)
        else:
            discard(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return await asyncio.wrap_future(made)
    except asyncio.CancelledError:
        if not made.cancel() and made.exception() is None:  # it was made just then
            threading.Thread(target=discard, args=(made.result(),), name=name, daemon=True).start()
        raise


class TransportSettings(BaseModel):
    """What each transport can be told. An unknown key is a mistake, and `up-streamer check` says so."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listeners_max: int = Field(default=LISTENERS_MAX, ge=1)
    """listeners overall; beyond it RESOURCE_EXHAUSTED"""
    listeners_per_filter_max: int = Field(default=LISTENERS_PER_FILTER_MAX, ge=1)
    """listeners of one pair of filters"""

    @property
    def certificate_files(self) -> Sequence[CertificateFile]:
        """The files with certificates that are set: their expiry is a metric, and a note 14 days before."""
        return ()


class TransportBase(UTransport):
    """A transport that keeps its listeners, checks what it sends, and tells of its connection.

    `send_batch`, `open` and `close` are left to write, and `listen` and `unlisten` where the network has to know what
    we want. Lives on the event loop: from another thread only `authority`, `checks` and `dropped` may be used, the
    checks by one thread alone.
    """

    def __init__(self, config: TransportSettings, local: LocalUriProvider) -> None:
        self.local, self.authority = local, local.get_authority()
        self.listeners = ListenerTable(
            self.authority,
            listeners_max=config.listeners_max,
            listeners_per_filter_max=config.listeners_per_filter_max,
        )
        self.checks = SendChecks()
        self.is_open = False
        self.registering = asyncio.Lock()  # the network is asked for a filter, or no longer, never both at once
        self._connected, self._away_because = False, ""
        self._on_connection: list[ConnectionCallback] = []

    @property
    def dropped(self) -> Counter[str]:
        """Messages thrown away on arrival, by reason: malformed, too_large, invalid, expired, ..."""
        return self.listeners.dropped

    @property
    def mended(self) -> Counter[str]:
        """Messages taken without a field that was wrong, by the field: traceparent."""
        return self.listeners.mended

    def take_ttl_counts(self) -> TtlCounts:
        """Messages with a ttl that arrived since the last call: whoever calls takes them from all others."""
        return self.listeners.take_ttl_counts()

    @property
    def connected(self) -> bool:
        return self._connected

    def check_open(self) -> None:
        """Raises UNAVAILABLE before `open` and after `close`, which set `is_open`."""
        if not self.is_open:
            raise UStatusError.from_status(NOT_OPEN)

    @property
    def away_because(self) -> str:
        return self._away_because

    def set_connected(self, connected: bool, why: str = "") -> None:
        """So it is from now on; `why` the network is away, where that is known. Whoever wants to know is told, if it is
        a change of `connected`."""
        self._away_because = "" if connected else why
        if connected != self._connected:
            self._connected = connected
            tell(self._on_connection, connected)

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._on_connection.append(callback)

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        async with self.registering:
            self.check_open()
            filter = self.listeners.add(source_filter, sink_filter, listener)
            if filter is None:
                return  # the network delivers it already
            try:
                await self.listen(filter)
            except BaseException:  # cancelled, too: else it would count as registered when it is tried again
                self.listeners.remove(source_filter, sink_filter, listener)
                raise

    def register_before_open(self, filters: Sequence[tuple[UUri, UUri | None]], listener: UListener) -> list[UStatus]:
        statuses: list[UStatus] = []
        for source, sink in filters:
            try:
                filter = self.listeners.add(source, sink, listener)
                if filter is not None:
                    try:
                        self.listen_at_open(filter)
                    except UStatusError:
                        self.listeners.remove(source, sink, listener)
                        raise
            except UStatusError as error:
                statuses.append(error.status)
            else:
                statuses.append(OK)
        return statuses

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        async with self.registering:
            self.check_open()
            filter = self.listeners.remove(source_filter, sink_filter, listener)
            if filter is not None:
                await self.unlisten(filter)

    async def listen(self, filter: Filter) -> None:
        """Returns when the network delivers what matches from here on. What UStatusError it raises is the caller's
        answer, and nothing is registered then."""

    def listen_at_open(self, filter: Filter) -> None:
        """A filter that is new before `open`. Override it if `open` has the network deliver what matches
        `self.listeners.filters`. What UStatusError it raises is the caller's answer, and nothing is registered then."""
        raise UStatusError.from_status(NOT_OPEN)

    async def unlisten(self, filter: Filter) -> None:
        """The network need not deliver it any more."""
