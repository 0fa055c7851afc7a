"""The common parts of all transports. Ours are based on it; a plugin may be.

send_batch: message -> valid?            -> not expired?      -> not too large?   -> the network
                       INVALID_ARGUMENT     DEADLINE_EXCEEDED    INVALID_ARGUMENT    UNAVAILABLE: stopped() says so
connection: set_connected(True | False) -> each callback of on_connection, once for each change
listeners:  register_listener(s) -> ListenerTable: new to the network? -> listen(_all)   what arrives: see arrivals.py
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field

from transports.certificates import CertificateFile
from transports.listeners import LISTENERS_MAX, LISTENERS_PER_FILTER_MAX, Filter, ListenerTable
from uprotocol import attributes as attrs
from uprotocol import uuid as uuids
from uprotocol.status import OK as OK  # for transports: the status of a message that was sent
from uprotocol.status import UStatusError, code_name
from uprotocol.transport import (
    ConnectionCallback,
    HeardCallback,
    LocalUriProvider,
    LossCallback,
    ProbeResult,
    ProbeVerdict,
    TtlCounts,
    UListener,
    UTransport,
)
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

# cached (type, source, sink) for messages that differ in more than id and payload; the others have a cached stamp
ROUTES_CACHED_MAX: Final = 8_192
# how long messages of a resumed session wait until the listener that wants them is registered, unless the owner says
# that all are
UNCLAIMED_MS_MAX: Final = 30_000
REOPEN_MS: Final = (200, 10_000)  # the first and the longest pause between two attempts to open a network again

NOT_OPEN: Final = UStatus(code=UCode.UNAVAILABLE, message="the transport is not open: call open first")
NOT_TRIED: Final = (
    "an earlier message of the batch could not be sent, so this one was not tried: send it again after that one"
)

log = structlog.get_logger()
T = TypeVar("T")


class SendChecks:
    """Checks messages before they are sent, in any thread."""

    refusal = staticmethod(attrs.refusal)

    def __init__(self, *, now_ms: Callable[[], int] = uuids.now_ms) -> None:
        self.now_ms = now_ms


def too_large(size: int, bytes_max: int) -> UStatus:
    """The status of a message of `size` bytes on the network, more than its owner allows (`UTransport.wire_bytes_max`):
    INVALID_ARGUMENT, since a retry can't succeed."""
    return UStatus(
        code=UCode.INVALID_ARGUMENT,
        message=f"expected a message of at most {bytes_max} bytes, attributes and payload together, got {size}: send "
        "less, or raise message_bytes_max at both ends",
    )


def stopped(statuses: list[UStatus], count: int, why: UStatus) -> list[UStatus]:
    """Fill `statuses` up to `count`: the first missing one is `why`; those behind it say "not tried", with its code."""
    assert why.code != UCode.OK, f"only a failure stops a batch, not {code_name(why.code)}"
    if len(statuses) < count:
        statuses.append(why)
    while len(statuses) < count:
        statuses.append(UStatus(code=why.code, message=NOT_TRIED))
    return statuses


def tell(callbacks: Iterable[Callable[..., None]], *what: Any) -> None:
    """Call all `callbacks`. An exception of one is logged, and the others are called all the same."""
    for callback in callbacks:
        try:
            callback(*what)
        except Exception:
            log.exception("a callback of a transport's owner failed", callback=repr(callback), arguments=what)


async def on_own_thread(name: str, make: Callable[[], T], discard: Callable[[T], object]) -> T:
    """Call `make`, which may block, on a thread of its own, and return its result. The process does not wait for the
    thread at its end. A result that comes after the caller was cancelled is passed to `discard`, also on a thread."""
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
        if not made.cancel() and made.exception() is None:  # it completed just then
            threading.Thread(target=discard, args=(made.result(),), name=name, daemon=True).start()
        raise


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: Any) -> None:
    """Make the call on `loop`, from any thread; not if the loop has ended, perhaps without `close`."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)


async def port_result(address: str, is_running: bool) -> ProbeResult:
    """Whether we can listen at HOST:PORT. `is_running`: another process of ours does."""
    host, _, port = address.rpartition(":")
    if port == "0":
        return ProbeResult(ProbeVerdict.OK, f"{address} is any free port")
    try:
        server = await asyncio.start_server(lambda *_: None, host.strip("[]") or None, int(port))
        server.close()
    except (OSError, ValueError) as error:
        if is_running and getattr(error, "errno", 0) == errno.EADDRINUSE:
            return ProbeResult(ProbeVerdict.OK, f"{address} is in use, as it should be while the streamer runs")
        return ProbeResult(ProbeVerdict.FAIL, f"can't listen at {address}: {getattr(error, 'strerror', '') or error}")
    if is_running:
        return ProbeResult(ProbeVerdict.FAIL, f"nobody listens at {address}, though the streamer runs")
    return ProbeResult(ProbeVerdict.OK, f"{address} is free")


class TransportSettings(BaseModel):
    """Settings of every transport. An unknown key is an error, which `up-streamer check` reports."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listeners_max: int = Field(default=LISTENERS_MAX, ge=1)
    """listeners overall; beyond it RESOURCE_EXHAUSTED"""
    listeners_per_filter_max: int = Field(default=LISTENERS_PER_FILTER_MAX, ge=1)
    """listeners of one pair of filters"""

    @property
    def certificate_files(self) -> Sequence[CertificateFile]:
        """The configured certificate files: their expiry is a metric, and a note from 14 days before."""
        return ()


class TransportBase(UTransport):
    """A transport that keeps its listeners, checks what it sends, and reports its connection.

    A subclass adds `send_batch`, `open` and `close`, and `listen` and `unlisten` if the network must know the filters.
    Lives on the event loop: other threads may use only `authority`, `checks` and `dropped`.
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
        self.registering = asyncio.Lock()  # never `listen` and `unlisten` at once
        self._connected, self._away_because = False, ""
        self._on_connection: list[ConnectionCallback] = []
        self._on_heard: list[HeardCallback] = []
        self._on_loss: list[LossCallback] = []

    @property
    def dropped(self) -> Counter[str]:
        return self.listeners.dropped

    @property
    def mended(self) -> Counter[str]:
        return self.listeners.mended

    def take_ttl_counts(self) -> TtlCounts:
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
        """Set `connected`, and `why` the network is away if that is known. If `connected` changes, the callbacks of
        `on_connection` are called."""
        self._away_because = "" if connected else why
        if connected != self._connected:
            self._connected = connected
            tell(self._on_connection, connected)

    def on_connection(self, callback: ConnectionCallback) -> None:
        self._on_connection.append(callback)

    def on_heard(self, callback: HeardCallback) -> None:
        self._on_heard.append(callback)

    def on_loss(self, callback: LossCallback) -> None:
        self._on_loss.append(callback)

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        async with self.registering:
            self.check_open()
            filter = self.listeners.add(source_filter, sink_filter, listener)
            if filter is None:
                return  # the network delivers this filter already
            try:
                await self.listen(filter)
            except BaseException:  # also if cancelled: else a second try would find it registered
                self.listeners.remove(source_filter, sink_filter, listener)
                raise

    def register_before_open(self, filters: Sequence[tuple[UUri, UUri | None]], listener: UListener) -> list[UStatus]:
        statuses: list[UStatus] = []
        for source, sink in filters:
            status, filter = OK, None
            try:
                filter = self.listeners.add(source, sink, listener)
                if filter is not None:
                    self.listen_at_open(filter)
            except UStatusError as error:
                status = error.status
                if filter is not None:
                    self.listeners.remove(source, sink, listener)
            statuses.append(status)
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
        """Returns when the network delivers all matching messages from now on. A UStatusError that it raises goes to
        the caller, and nothing is registered."""

    def listen_at_open(self, filter: Filter) -> None:
        """A filter is new before `open`. Override it if `open` has the network deliver what matches
        `self.listeners.filters`. A UStatusError that it raises goes to the caller, and nothing is registered."""
        raise UStatusError.from_status(NOT_OPEN)

    async def unlisten(self, filter: Filter) -> None:
        """The network need not deliver this filter any more."""
