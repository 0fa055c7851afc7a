"""Zenoh: publications both ways.

send_batch -> one hop -> sender thread: ZenohSender                                BLOCK: a slow peer is felt here
Zenoh's thread: Receiver: bytes, and which filters want their key -> Arrivals, of calls or of the rest
loop:           decode, UUri matching for those filters -> listeners
close -> listeners take what has arrived | peers confirm what was sent -> Zenoh's close

Zenoh acknowledges nothing: what is on its way when a link breaks is lost, so there is no Capability.ACK. It reads a
link with one task, which stands while a subscriber's callback waits: hence two queues of arrivals, so that requests and
responses pass publishes that are held, as far as receiver.HELD_MESSAGES_MAX goes.

How priorities map: mapping.PRIORITIES. Who may publish and subscribe what is the business of Zenoh's
access_control (`settings`), with TLS or user and password to tell who is who.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

import structlog
import zenoh
from zenoh.handlers import Callback

from transports.base import NOT_OPEN, OK, ROUTES_CACHED_MAX, TransportBase, on_own_thread, stopped, tell
from transports.certificates import TlsFiles
from transports.listeners import Filter
from transports.zenoh import mapping
from transports.zenoh.config import ZenohConfig, linked
from transports.zenoh.presence import HeardNews
from transports.zenoh.receiver import Receiver
from transports.zenoh.sender import FLUSH_KEY, NO_PEER, ZenohSender, answer_flush, translate
from transports.zenoh.stalls import StallWatch
from uprotocol import uri as uris
from uprotocol.cache import Cache
from uprotocol.encoded import Carried
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, HeardCallback, LocalUriProvider, UListener
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

# how long `close` waits for listeners to take what has arrived, and for peers to read what was sent
CLOSE_S_MAX: Final = 2.5
# how long it then waits for Zenoh to close the session, which can take 10 s where a peer reads nothing
LEAVE_S_MAX: Final = 1.5
# after Zenoh has cut off a peer, until it is found out who that was
CUT_S_MAX: Final = 4.0
RENEWAL_LOOK_S: Final = 10.0  # between two looks at the TLS files of who listens
REOPEN_MS_MIN: Final = 200  # between tries to open the session again after a renewal, and ...
REOPEN_MS_MAX: Final = 10_000
UNREAD: Final = "what was sent last may not have been read"

log = structlog.get_logger()
T = TypeVar("T")


class ZenohTransport(TransportBase):
    """One Zenoh session. Connected while at least one peer or router is linked: without one nobody would take what we
    send."""

    capabilities = (
        Capability.PUSH
        | Capability.WILDCARD_SOURCE
        | Capability.PUBLISH_WITHOUT_SINK
        | Capability.ENCODED
        | Capability.ABSENCE
    )

    def __init__(self, config: ZenohConfig, local: LocalUriProvider) -> None:
        super().__init__(config, local)
        self._config = config
        self.only_listens = bool(config.listen) and not (
            config.connect or config.multicast_scouting or config.config_file
        )
        self._receiver = Receiver(self.listeners, config.subscriptions_max)
        self._sender: ZenohSender | None = None  # of the session; None: closed
        self._stalls: StallWatch | None = None  # of the sender
        self._stall_s = 0.0  # so long Zenoh waits for a peer that reads nothing
        self._cut_until = 0.0  # loop time; until then the only peer may be one that was cut off
        self._peer_lost = asyncio.Event()
        self._sends: set[asyncio.Future[list[UStatus]]] = set()  # under way on its thread
        self._on_heard: list[HeardCallback] = []
        self._news = HeardNews(self._sends, lambda keys: tell(self._on_heard, keys))
        self._unprobed = 0  # of the sessions before this one
        self._addresses: Cache[tuple[bytes, bytes | None], str] = Cache(ROUTES_CACHED_MAX)
        # a second `open` meanwhile would find the port in use, or make a session that nobody closes
        self._opening = asyncio.Lock()
        # of who listens: Zenoh reads them when a session opens, and those of who connects at each link
        self._tls_files = config.listening_files()
        self._renewing: asyncio.Task[None] | None = None
        self._sessions = 0  # so far
        self._reopening = ""  # why the session is not open again yet, after a renewal
        self._peers: dict[str, bool] = {}  # Zenoh ids of who is linked; True: it answers each query

    def __repr__(self) -> str:
        state = f"{len(self._peers)} peers" if self.is_open else "closed"
        return f"ZenohTransport({self.authority}, {state}, {self._receiver}, {self._sender})"

    @property
    def dropped(self) -> Counter[str]:
        """And `unwanted`: what a subscription brought that covers many filters, and none of them wants."""
        dropped = self.listeners.dropped
        if self._receiver.unwanted:
            dropped["unwanted"] = self._receiver.unwanted
        return dropped

    @property
    def unprobed(self) -> int:
        """Publishes that were sent though it was not known whether anybody listens, since as many publishers are
        declared as may be. Counted with `tells_absence` alone."""
        return self._unprobed + (self._sender.unprobed if self._sender is not None else 0)

    def address_of(self, source: UUri, sink: UUri | None) -> str:
        """The key; for addresses that no key can hold, what other transports answer."""
        if sink is not None and uris.has_wildcard(sink):  # a publish for a streamer
            sink = None
        pair = source.SerializeToString(), sink.SerializeToString() if sink is not None else None
        address = self._addresses.get(pair)
        if address is None:
            try:
                address = mapping.filter_key(source, sink, self.authority)
            except UStatusError:
                address = super().address_of(source, sink)
            self._addresses[pair] = address
        return address

    def on_heard(self, callback: HeardCallback) -> None:
        self._on_heard.append(callback)

    async def open(self) -> None:
        """Raises UNAVAILABLE if nothing in `connect` answers, FAILED_PRECONDITION for a port in use, INVALID_ARGUMENT
        for settings."""
        async with self._opening:
            if self._sender is not None:
                return
            self._loop = asyncio.get_running_loop()
            self._receiver.open(self.wire_bytes_max)
            self._news.open(self._loop)
            if self._tls_files is None:
                await self._open_session()
                return
            used = await _context(self._tls_files)  # before Zenoh reads them
            await self._open_session()
            self._renewing = asyncio.create_task(self._follow_renewals(self._tls_files, used))

    async def _open_session(self) -> None:
        try:  # a session that nobody has would keep the port
            session = await on_own_thread(f"zenoh-open-{self.authority}", self._join, _close)
        except zenoh.ZError as error:
            raise translate(error, "opening the Zenoh session") from None
        self.is_open = True
        self._sender = ZenohSender(session, self.authority, self._peers, self.wire_bytes_max, self._news.add)
        self._stalls = StallWatch(
            self._sender, self.authority, self._stall_s, self._peers, self._sends, self._lost, self._answers_again
        )
        for transport in session.info.transports():
            self._on_peer(transport, True)

    def _join(self) -> zenoh.Session:
        """On a thread of its own.

        What is rare is called on Zenoh's threads (`indirect=False`): for the others Zenoh starts a thread of Python's,
        a daemon as this one is, and one that comes back from Rust while the interpreter ends aborts the process.
        """
        loop = self._loop
        number = self._sessions = self._sessions + 1

        def tell(transport: zenoh.Transport, opened: bool) -> None:
            if number == self._sessions:  # a peer has the same id in the next session, and may be there already
                self._on_peer(transport, opened)

        def on_event(event: zenoh.TransportEvent) -> None:
            opened = event.kind == zenoh.SampleKind.PUT
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, event.transport, opened)

        self._stall_s = self._config.stall_s
        # whoever links to a port of ours before we subscribe sends to nobody
        session = linked(self._config, self.wire_bytes_max, self._receiver.declare, self._receiver.undeclare)
        try:
            session.declare_queryable(f"{FLUSH_KEY}/{session.info.zid()}", Callback(answer_flush, indirect=False))
            events = Callback(on_event, indirect=False)
            self._events = session.info.declare_transport_events_listener(events, history=True)
        except zenoh.ZError:
            self._receiver.undeclare()
            _close(session)
            raise
        return session

    async def close(self) -> None:
        """Stop listening, let listeners take what has arrived and peers read what was sent, and leave.

        Takes CLOSE_S_MAX and LEAVE_S_MAX at most; what it could not wait for is logged.
        """
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
        await self._close_session(self._receiver.close)

    async def _close_session(self, end_arrivals: Callable[[], None] = lambda: None) -> None:
        self.is_open = False
        sender, self._sender = self._sender, None
        if sender is None:
            end_arrivals()
            return
        self._unprobed += sender.unprobed
        flush = self._loop.run_in_executor(sender.thread, self._flush, sender)  # behind what is queued
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                await asyncio.gather(self._drain(), asyncio.shield(flush))
        end_arrivals()
        if self._stalls is not None:
            self._stalls.close()
        if not flush.done():
            log.warning(UNREAD, authority=self.authority, waited_s=CLOSE_S_MAX)
        await self._leave(sender)
        for peer in list(self._peers):
            self._lost(peer)

    # Renewed certificates

    @property
    def troubles(self) -> list[str]:
        files = self._tls_files.trouble if self._tls_files is not None else ""
        stall = self._stalls.trouble if self._stalls is not None else ""
        return [trouble for trouble in (files, self._reopening, stall) if trouble]

    async def _follow_renewals(self, files: TlsFiles, used: ssl.SSLContext | None) -> None:
        """Open the session again when the files have changed and can be loaded, until cancelled. What is sent meanwhile
        is answered UNAVAILABLE, and listeners stay."""
        while True:
            await asyncio.sleep(RENEWAL_LOOK_S)
            now = await _context(files)
            if now is not None and now is not used:
                async with self._opening:
                    await self._reopen()
                used = now

    async def _reopen(self) -> None:
        log.info("the TLS files have changed: the Zenoh session is opened again", authority=self.authority)
        backoff = Backoff(REOPEN_MS_MIN, REOPEN_MS_MAX)
        closing = asyncio.ensure_future(self._close_session())  # what has arrived stays, for who takes it later
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing  # nobody else knows the session any more
            raise
        while True:
            try:
                await self._open_session()
                break
            except UStatusError as error:  # Zenoh may still hold the port
                self._reopening = f"the TLS files have changed, and the session can't be opened with them: {error}"
                log.warning("the Zenoh session can't be opened again yet", authority=self.authority, why=str(error))
            await backoff.wait()
        self._reopening = ""

    async def _drain(self) -> None:
        async with self.registering:
            await asyncio.to_thread(self._receiver.undeclare)
        await self._receiver.drained()

    def _flush(self, sender: ZenohSender) -> None:
        """On the sender thread."""
        with contextlib.suppress(zenoh.ZError):  # the session is closed by now
            unread = sender.flush(CLOSE_S_MAX)
            if unread.late:
                log.warning(UNREAD, authority=self.authority, waited_s=CLOSE_S_MAX, peers=unread.late)
            if unread.mute:
                log.info(
                    "peers of another make don't confirm what they have read",
                    authority=self.authority,
                    peers=unread.mute,
                )

    async def _leave(self, sender: ZenohSender) -> None:
        """Close the session on a thread that nobody needs to wait for: not we, and not the end of the process."""
        left = asyncio.Event()

        def close() -> None:
            _close(sender.session)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(left.set)

        sender.thread.shutdown()
        threading.Thread(target=close, name=f"zenoh-close-{self.authority}", daemon=True).start()
        try:
            async with asyncio.timeout(LEAVE_S_MAX):
                await left.wait()
        except TimeoutError:
            log.warning("Zenoh is still closing the session", authority=self.authority, waited_s=LEAVE_S_MAX)
        for send in self._sends:  # a put that waits for a peer: Zenoh does not end it with the session
            send.cancel()

    def _on_peer(self, transport: zenoh.Transport, linked: bool) -> None:
        peer = str(transport.zid)
        if not linked:
            self._lost(peer)
        elif self._sender is not None:
            self._peers[peer] = transport.whatami == zenoh.WhatAmI.ROUTER or self._config.mode == "client"
            if not self.connected:
                self._sender.first_link()
                self.set_connected(True)
                if self._sessions > 1:  # what was answered in the session before, this one does not know
                    self._news.add(None)

    def _lost(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._peer_lost.set()
        sought = f"; looking for {', '.join(self._config.connect)}" if self._config.connect else ""
        self.set_connected(bool(self._peers), f"no Zenoh session is linked to ours, the last was {peer}{sought}")

    def _answers_again(self, peer: str) -> None:
        """It was taken for lost, and its link stands."""
        for transport in self._sender.session.info.transports() if self._sender is not None else ():
            if str(transport.zid) == peer:
                self._on_peer(transport, True)

    async def _call(self, doing: str, call: Callable[[], T]) -> T:
        """A control call of Zenoh, off the loop."""
        try:
            return await asyncio.to_thread(call)
        except zenoh.ZError as error:
            raise translate(error, doing) from None

    async def send_batch(self, messages: Sequence[Carried]) -> list[UStatus]:
        if self._sender is None or self._stalls is None:
            return stopped([], len(messages), NOT_OPEN)
        if not messages:
            return []
        began = self._loop.time()
        send = self._loop.run_in_executor(self._sender.thread, self._sender.put, messages, self.tells_absence)
        self._sends.add(send)
        self._stalls.watch()
        send.add_done_callback(self._sends.discard)
        try:
            statuses = await send
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not send.cancelled() or (task is not None and task.cancelling()):
                raise
            return stopped([], len(messages), _CLOSED)  # by `close`
        if self._stalls.has_cut(began):
            self._cut_until = self._loop.time() + CUT_S_MAX
        if len(self._peers) == 1 and self._loop.time() < self._cut_until:
            await self._await_loss()
        if not self._peers:  # lost meanwhile: what was put may have gone nowhere
            return [NO_PEER if status is OK else status for status in statuses]
        return statuses

    async def _await_loss(self) -> None:
        """The only peer may have been cut off: then nobody has what was put since. It turns out a moment later."""
        self._peer_lost.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._cut_until):
                await self._peer_lost.wait()
        self._cut_until = 0.0

    def listen_at_open(self, filter: Filter) -> None:
        self._receiver.want([(self._key(filter), filter)])

    async def listen(self, filter: Filter) -> None:
        """Other sessions learn of it a moment later; until then their messages don't come."""
        key = self._key(filter)
        if self._receiver.want([(key, filter)]):
            await self._declare([key], f"subscribing to {key}")

    async def register_listeners(
        self, filters: Iterable[tuple[UUri, UUri | None]], listener: UListener
    ) -> list[UStatus]:
        statuses: list[UStatus] = []
        async with self.registering:
            self.check_open()
            new: dict[int, tuple[Filter, UUri, UUri | None]] = {}  # by their places
            for place, (source, sink) in enumerate(filters):
                statuses.append(OK)
                try:
                    filter = self.listeners.add(source, sink, listener)
                except UStatusError as error:
                    statuses[place] = error.status
                    continue
                if filter is not None:
                    new[place] = filter, source, sink
            try:
                answers = await self._listen_all([filter for filter, _, _ in new.values()]) if new else []
            except BaseException:
                for _, source, sink in new.values():
                    self.listeners.remove(source, sink, listener)
                raise
            for (place, (_, source, sink)), status in zip(new.items(), answers, strict=True):
                statuses[place] = status
                if status.code != UCode.OK:
                    self.listeners.remove(source, sink, listener)
        return statuses

    async def _listen_all(self, filters: Sequence[Filter]) -> list[UStatus]:
        """One hop for all of them."""
        statuses: list[UStatus] = []
        pairs: list[tuple[str, Filter]] = []
        for filter in filters:
            try:
                pairs.append((self._key(filter), filter))
            except UStatusError as error:
                statuses.append(error.status)
            else:
                statuses.append(OK)
        if self._receiver.want(pairs):
            try:
                await self._declare([key for key, _ in pairs], f"{len(pairs)} subscriptions")
            except UStatusError as error:
                return [error.status if status is OK else status for status in statuses]
        return statuses

    async def unlisten(self, filter: Filter) -> None:
        if self._receiver.unwant([self._key(filter)]):
            await self._declare([], "ending a subscription")

    def _key(self, filter: Filter) -> str:
        return mapping.filter_key(filter.source, filter.sink, self.authority)

    async def _declare(self, new: list[str], doing: str) -> None:
        """What `new` has joined; without it if that fails."""
        sender = self._sender
        assert sender is not None, "only an open transport listens"
        try:
            await self._call(doing, lambda: self._receiver.declare(sender.session))
        except UStatusError:
            self._receiver.unwant(new)
            raise


_CLOSED: Final = UStatus(
    code=UCode.UNAVAILABLE, message="the transport was closed while a peer took nothing: some may have been sent"
)


async def _context(files: TlsFiles) -> ssl.SSLContext | None:
    """None if they can't be loaded, and never could."""
    try:
        return await asyncio.to_thread(files.current)
    except UStatusError:
        return None


def _close(session: zenoh.Session) -> None:
    with contextlib.suppress(zenoh.ZError):
        session.close()  # type: ignore[no-untyped-call]
