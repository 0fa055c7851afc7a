"""The Zenoh transport: sends and receives publications, on the event loop.

send_batch -> one hop -> sender thread: ZenohSender                         congestion control BLOCK: a slow peer delays
Zenoh's thread: Receiver: bytes, and the filters that match their key -> Arrivals, of calls or of publishes
loop:           decode, UUri matching for those filters -> listeners
close -> listeners take what has arrived | peers confirm what was sent -> Zenoh's close

Zenoh acknowledges nothing: messages on their way are lost when a link breaks, so there is no Capability.ACK. It reads a
link with one task, which waits while a subscriber's callback blocks. So there are two Arrivals: requests and responses
pass publishes that listeners hold, up to receiver.HELD_MESSAGES_MAX of those.

Priorities: mapping.PRIORITIES. Zenoh's access_control (`settings`) decides who may publish and subscribe, with TLS or
user and password to identify peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import structlog
import zenoh
from zenoh.handlers import Callback

from transports.base import NOT_OPEN, REOPEN_MS, ROUTES_CACHED_MAX, TransportBase, on_loop, on_own_thread, stopped, tell
from transports.certificates import TlsFiles
from transports.listeners import Filter
from transports.zenoh import mapping, probe
from transports.zenoh.config import ZenohConfig, linked
from transports.zenoh.older import OlderLayout
from transports.zenoh.presence import HeardNews
from transports.zenoh.receiver import Receiver
from transports.zenoh.sender import FLUSH_KEY, NO_PEER, Unread, ZenohSender, answer_flush, translate
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.cache import Cache
from uprotocol.encoded import Carried
from uprotocol.pacing import Backoff
from uprotocol.status import OK, UStatusError
from uprotocol.tasks import end, wait_until, wait_within
from uprotocol.transport import Capability, LocalUriProvider, ProbeRequest, ProbeResult, UListener
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

# how long `close` waits for listeners to take what has arrived, and for peers to read what was sent
FLUSH_S_MAX: Final = 2.5
# how long it then waits for Zenoh to close the session, which can take 10 s where a peer reads nothing
LEAVE_S_MAX: Final = 1.5
# after Zenoh has cut off a peer, until that peer is known
CUT_S_MAX: Final = 4.0
RENEWAL_LOOK_S: Final = 10.0  # between two checks of the TLS files of a transport that listens
SENDER_LOOK_S: Final = 0.5  # between two checks of the sender
KNOWN_S_MAX: Final = 1.0  # that a new listener waits for linked peers which do not answer
KNOWN_PEERS_MAX: Final = 16  # peers that are asked: an application has a few, and a router may have thousands
REPORTED_AFTER_S: Final = 1.0  # without progress: the first batch after a link may wait for SETTLE_S_MAX
ANSWER_S_MAX: Final = 1.0  # for a peer to answer that it reads
ASK_LOST_PEER_S: Final = 5.0  # between two queries to a peer that counts as lost while Zenoh still has a link to it
UNREAD: Final = "the last messages may not have been read"

log = structlog.get_logger()


class Renewals:
    """Opens the session of a transport that listens with TLS again when its files have changed and can be loaded.

    Zenoh reads these files when a session opens. Messages that are sent meanwhile are answered UNAVAILABLE; listeners
    stay.
    """

    def __init__(
        self,
        files: TlsFiles,
        authority: str,
        opening: asyncio.Lock,
        close_session: Callable[[], Coroutine[Any, Any, None]],
        open_session: Callable[[], Awaitable[None]],
    ) -> None:
        self._files, self._authority, self._opening = files, authority, opening
        self._close_session, self._open_session = close_session, open_session
        self._task: asyncio.Task[None] | None = None
        self._reopening = ""  # why the session can't be opened yet

    @property
    def troubles(self) -> list[str]:
        return [trouble for trouble in (self._files.trouble, self._reopening) if trouble]

    async def load(self) -> ssl.SSLContext | None:
        """Returns None if the files can't be loaded and never could."""
        try:
            return await asyncio.to_thread(self._files.current)
        except UStatusError:
            return None

    def start(self, used: ssl.SSLContext | None) -> None:
        self._task = asyncio.create_task(self._follow(used))

    async def stop(self) -> None:
        await end(self._task)
        self._task = None

    async def _follow(self, used: ssl.SSLContext | None) -> None:
        while True:
            await asyncio.sleep(RENEWAL_LOOK_S)
            now = await self.load()
            if now is not None and now is not used:
                async with self._opening:
                    await self._reopen()
                used = now

    async def _reopen(self) -> None:
        log.info("the TLS files have changed: the Zenoh session is opened again", authority=self._authority)
        backoff = Backoff(*REOPEN_MS)
        closing = asyncio.create_task(self._close_session())  # messages that have arrived stay
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing  # nobody else would close the session
            raise
        while True:
            try:
                await self._open_session()
                break
            except UStatusError as error:  # Zenoh may still hold the port
                self._reopening = f"the TLS files have changed, and the session can't be opened with them: {error}"
                log.warning("the Zenoh session can't be opened again yet", authority=self._authority, why=str(error))
            await backoff.wait()
        self._reopening = ""


class StallWatch:
    """Finds the peer that blocks sending: it reads nothing, and Zenoh's put waits for it. Lives on the event loop.

    send_batch -> every SENDER_LOOK_S: has the sender progressed? -> no: ask each peer, on a thread
                                                                  '-> peers that do not answer: trouble, log
    Zenoh cuts that peer off (stall_ms_max) -> the sender progresses -> a peer that still does not answer is lost until
                                                                        it answers

    Zenoh does not report for whom a put waits. It reports the end of a link only after its pending write there, which
    may take for ever if the other process was stopped. A peer that reads answers a query of the highest priority, which
    has its own queue on each link.
    """

    def __init__(
        self,
        sender: ZenohSender,
        authority: str,
        stall_s: float,
        peers: Mapping[str, bool],
        sends: Collection[object],
        on_cut: Callable[[str], None],
        on_back: Callable[[str], None],
    ) -> None:
        """`stall_s`: how long Zenoh waits for a peer before it cuts it off. `peers`: the linked ones, by Zenoh id.
        `sends`: calls of `put` that have not returned. `on_cut(peer)`: the peer is cut off. `on_back(peer)`: it answers
        again."""
        self._sender, self._authority, self._stall_s, self._peers = sender, authority, stall_s, peers
        self._sends, self._on_cut, self._on_back = sends, on_cut, on_back
        self._timer: asyncio.TimerHandle | None = None
        self._position: tuple[int, int] | None = None  # of the sender, at the last check
        self._stalled_since = 0.0  # loop time of the first check that found it there
        self._unseen_s = SENDER_LOOK_S  # the longest time it may have been there before that check
        self._watched_at = 0.0  # loop time of the last check, or of the call of `watch`
        self._cut_at = 0.0  # loop time at which a put continued that had waited for stall_s
        self._asking: asyncio.Task[None] | None = None
        self._cutting: asyncio.Task[None] | None = None
        self._unread: dict[str, str] = {}  # address of each peer that did not answer in this stall
        self.trouble = ""

    def watch(self) -> None:
        """Call it when `sends` has a new one."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._watched_at = loop.time()
            self._timer = loop.call_later(SENDER_LOOK_S, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._position = None
        self._on_progress()
        if self._cutting is not None:
            self._cutting.cancel()

    def has_cut(self, since: float) -> bool:
        """True if a put that was under way after `since` (loop time) took so long that Zenoh has cut off a peer."""
        return self._may_have_cut or self._cut_at > since

    @property
    def _may_have_cut(self) -> bool:
        """True if the put of the last check may have waited for stall_s."""
        return self._stalled_s + self._unseen_s >= self._stall_s

    @property
    def _stalled_s(self) -> float:
        """Seconds since the put of the last check was first seen; it may have begun up to `_unseen_s` earlier."""
        return 0.0 if self._position is None else asyncio.get_running_loop().time() - self._stalled_since

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer, looked_at = None, self._watched_at
        position = self._sender.position
        if position is None or position != self._position:
            self._on_progress()
        if self._sends or position is not None:
            self.watch()
        if position is None:  # nothing is being sent, or the thread has not begun with it
            return
        if self._position is None:
            self._position, self._stalled_since = position, loop.time()
            self._unseen_s = max(SENDER_LOOK_S, self._stalled_since - looked_at)
        elif not self.trouble and self._stalled_s >= REPORTED_AFTER_S:
            self._report(list(self._peers))
            self._asking = loop.create_task(self._ask())

    def _on_progress(self) -> None:
        loop = asyncio.get_running_loop()
        if self._may_have_cut:
            self._cut_at = loop.time()
            if self._cutting is None or self._cutting.done():
                self._cutting = loop.create_task(self._cut(self._unread))
        self._unread = {}
        self._position, self._unseen_s = None, SENDER_LOOK_S
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        if self.trouble:
            log.info("sending goes on", authority=self._authority)
            self.trouble = ""

    async def _ask(self) -> None:
        unread, addresses = await self._silent(self._peers), self._sender.addresses()
        self._unread = {peer: addresses.get(peer, "no link") for peer in unread.late}
        silent = unread.late or unread.mute
        self._report([f"{peer} ({addresses.get(peer, 'no link')})" for peer in silent] or list(self._peers))
        log.warning("sending waits for a peer that reads nothing", authority=self._authority, trouble=self.trouble)

    async def _cut(self, unread: dict[str, str]) -> None:
        """Find the peer that Zenoh has cut off: one of `unread`, if there are any. For a peer that can't answer queries
        Zenoh's own report decides."""
        answer = await self._silent(unread or self._peers)
        # a peer without a link gets no query, so it is mute
        lost = [*answer.late, *(peer for peer in answer.mute if peer in unread)]
        what = "a peer that read nothing is cut off: what was sent to it last is lost"
        for peer in lost:
            log.warning(what, authority=self._authority, peer=peer, address=unread.get(peer, "no link"))
            self._on_cut(peer)
        while lost := [peer for peer in lost if peer not in self._peers and peer in self._sender.addresses()]:
            await asyncio.sleep(ASK_LOST_PEER_S)
            answer = await self._silent(lost)
            for peer in set(lost).difference(answer.late, answer.mute):
                self._on_back(peer)

    async def _silent(self, peers: Iterable[str]) -> Unread:
        asked = list(peers)
        return await on_own_thread(
            f"zenoh-ask-{self._authority}", lambda: self._sender.silent(asked, ANSWER_S_MAX), lambda _: None
        )

    def _report(self, names: list[str]) -> None:
        since = datetime.fromtimestamp(uuids.now_ms() / 1_000 - self._stalled_s, UTC).isoformat(timespec="seconds")
        who = f"the peer {names[0]}" if len(names) == 1 else f"one of the peers {', '.join(names)}"
        self.trouble = (
            f"since {since} sending waits for {who}, which reads nothing; after {self._stall_s * 1_000:.0f} ms "
            "(stall_ms_max) it is cut off"
        )


class ZenohTransport(TransportBase):
    """One Zenoh session. Connected while at least one peer or router is linked."""

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
        self._stall_s = 0.0  # how long Zenoh waits for a peer that reads nothing
        self._cut_until = 0.0  # until then the only linked peer may be one that was cut off; loop time
        self._peer_lost = asyncio.Event()
        self._sends: set[asyncio.Future[list[UStatus]]] = set()  # under way on the sender thread
        self._news = HeardNews(self._sends, lambda keys: tell(self._on_heard, keys))
        self._unprobed = 0  # in earlier sessions
        self._older = OlderLayout(self.authority)
        self._seeks_older = False  # the owner is a streamer, and its listeners are registered
        self._addresses: Cache[tuple[bytes, bytes | None], str] = Cache(ROUTES_CACHED_MAX)
        # a second `open` meanwhile would find the port in use, or make a session that nobody closes
        self._opening = asyncio.Lock()
        files = config.listening_files()
        self._renewals = (
            Renewals(files, self.authority, self._opening, self._close_session, self._open_session) if files else None
        )
        self._sessions = 0  # number of sessions so far
        self._peers: dict[str, bool] = {}  # linked peers, by Zenoh id; True: it answers every query

    def __repr__(self) -> str:
        state = f"{len(self._peers)} peers" if self.is_open else "closed"
        return f"ZenohTransport({self.authority}, {state}, {self._receiver}, {self._sender})"

    @property
    def dropped(self) -> Counter[str]:
        """Also `unwanted`: messages of a subscription that covers many filters, none of which matches;
        and `older_layout`: see older.py."""
        dropped = self.listeners.dropped
        if self._receiver.unwanted:
            dropped["unwanted"] = self._receiver.unwanted
        if self._older.messages:
            dropped["older_layout"] = self._older.messages
        return dropped

    @property
    def unprobed(self) -> int:
        """Publishes and requests that were sent without knowing whether anybody listens, at the limit of declared
        publishers. Counted only with `tells_absence`."""
        return self._unprobed + (self._sender.unprobed if self._sender is not None else 0)

    def address_of(self, source: UUri, sink: UUri | None) -> str:
        """The key. For addresses without a valid key, the address that other transports use."""
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

    async def open(self) -> None:
        """Raises UNAVAILABLE if nothing in `connect` answers, FAILED_PRECONDITION for a port in use, INVALID_ARGUMENT
        for settings."""
        async with self._opening:
            if self._sender is not None:
                return
            self._loop = asyncio.get_running_loop()
            self._receiver.open(self.wire_bytes_max)
            self._news.open(self._loop)
            used = await self._renewals.load() if self._renewals is not None else None  # before Zenoh reads the files
            await self._open_session()
            if self._renewals is not None:
                self._renewals.start(used)

    async def _open_session(self) -> None:
        try:  # on_own_thread closes the session if this is cancelled: it would keep the port
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
        if self._seeks_older:
            self._declare_older()

    def all_registered(self) -> None:
        """Listen also to older layouts of keys, which only a streamer does: others would pay for messages that they can
        do nothing about."""
        self._seeks_older = True
        self._declare_older()

    def _declare_older(self) -> None:
        loop, sender = self._loop, self._sender
        later = partial(on_loop, loop, loop.run_in_executor, None)
        if sender is not None:
            loop.run_in_executor(None, self._older.declare, sender.session, later)

    def _join(self) -> zenoh.Session:
        """Open a session, on a thread of its own.

        The callbacks run on Zenoh's threads (`indirect=False`). Otherwise Zenoh would start a daemon thread of Python,
        which aborts the process if it returns from Rust while the interpreter ends.
        """
        loop = self._loop
        number = self._sessions = self._sessions + 1

        def note(transport: zenoh.Transport, opened: bool) -> None:
            if number == self._sessions:  # a peer has the same id in the next session, and may be linked already
                self._on_peer(transport, opened)

        def on_event(event: zenoh.TransportEvent) -> None:
            on_loop(loop, note, event.transport, event.kind == zenoh.SampleKind.PUT)

        self._stall_s = self._config.stall_s
        # subscribe before peers link to our port: earlier messages are lost
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

    async def probe(self, asked: ProbeRequest) -> AsyncGenerator[ProbeResult, None]:
        async for one in probe.results(self._config, asked, self.wire_bytes_max):
            yield one

    async def close(self) -> None:
        """Stop listening, let listeners take what has arrived and peers read what was sent, and close the session.

        Takes FLUSH_S_MAX and LEAVE_S_MAX at most; what it could not wait for is logged.
        """
        if self._renewals is not None:
            await self._renewals.stop()
        await self._close_session(self._receiver.close)

    async def _close_session(self, end_arrivals: Callable[[], None] = lambda: None) -> None:
        self.is_open = False
        sender, self._sender = self._sender, None
        if sender is None:
            end_arrivals()
            return
        self._unprobed += sender.unprobed
        flush = self._loop.run_in_executor(sender.thread, self._flush, sender)  # after all queued messages
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S_MAX):
                await asyncio.gather(self._drain(), asyncio.shield(flush))
        end_arrivals()
        if self._stalls is not None:
            self._stalls.close()
        if not flush.done():
            log.warning(UNREAD, authority=self.authority, waited_s=FLUSH_S_MAX)
        await self._leave(sender)
        self._older.forget_session()
        for peer in list(self._peers):
            self._lost(peer)

    @property
    def troubles(self) -> list[str]:
        files = self._renewals.troubles if self._renewals is not None else []
        stall = self._stalls.trouble if self._stalls is not None else ""
        return [*files, stall] if stall else files

    @property
    def notes(self) -> list[str]:
        return self._older.notes

    async def _drain(self) -> None:
        async with self.registering:
            await asyncio.to_thread(self._receiver.undeclare)
        await self._receiver.drained()

    def _flush(self, sender: ZenohSender) -> None:
        """On the sender thread."""
        with contextlib.suppress(zenoh.ZError):  # the session is already closed
            unread = sender.flush(FLUSH_S_MAX)
            if unread.late:
                log.warning(UNREAD, authority=self.authority, waited_s=FLUSH_S_MAX, peers=unread.late)
            if unread.mute:
                log.info(
                    "peers with another implementation do not confirm what they have read",
                    authority=self.authority,
                    peers=unread.mute,
                )

    async def _leave(self, sender: ZenohSender) -> None:
        """Close the session on a thread of its own, which may take longer than LEAVE_S_MAX and than the process."""
        left = asyncio.Event()

        def close() -> None:
            _close(sender.session)
            on_loop(self._loop, left.set)

        sender.thread.shutdown()
        threading.Thread(target=close, name=f"zenoh-close-{self.authority}", daemon=True).start()
        if not await wait_within(left, LEAVE_S_MAX):
            log.warning("Zenoh is still closing the session", authority=self.authority, waited_s=LEAVE_S_MAX)
        for send in self._sends:  # Zenoh does not end a put that waits for a peer
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
                if self._sessions > 1:  # the new session does not know the answers "nobody" of the last one
                    self._news.add(None)

    def _lost(self, peer: str) -> None:
        self._peers.pop(peer, None)
        self._peer_lost.set()
        sought = f"; looking for {', '.join(self._config.connect)}" if self._config.connect else ""
        self.set_connected(bool(self._peers), f"no Zenoh session is linked to ours, the last was {peer}{sought}")

    def _answers_again(self, peer: str) -> None:
        """A peer that counted as lost answers, and still has a link."""
        for transport in self._sender.session.info.transports() if self._sender is not None else ():
            if str(transport.zid) == peer:
                self._on_peer(transport, True)

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
        if not self._peers:  # lost meanwhile: nobody may have got the messages
            return [NO_PEER if status is OK else status for status in statuses]
        return statuses

    async def _await_loss(self) -> None:
        """Wait until it is known whether the only peer was cut off: then nobody has got the last messages."""
        self._peer_lost.clear()
        await wait_until(self._peer_lost, self._cut_until)
        self._cut_until = 0.0

    def listen_at_open(self, filter: Filter) -> None:
        self._receiver.want([(mapping.filter_key(filter.source, filter.sink, self.authority), filter)])

    async def listen(self, filter: Filter) -> None:
        """The linked sessions know the subscription when this returns, unless one does not answer within KNOWN_S_MAX.
        Those behind a router learn about it a moment later; until then their messages do not come."""
        key = mapping.filter_key(filter.source, filter.sink, self.authority)
        if self._receiver.want([(key, filter)]):
            await self._declare([key], f"subscribing to {key}")

    async def register_listeners(
        self, filters: Iterable[tuple[UUri, UUri | None]], listener: UListener
    ) -> list[UStatus]:
        """One call of another thread for all of them."""
        statuses, pairs = list[UStatus](), list(filters)
        new: dict[int, tuple[str, Filter]] = {}  # key and filter, by index in `pairs`
        async with self.registering:
            self.check_open()
            for index, (source, sink) in enumerate(pairs):
                statuses.append(OK)
                filter = None
                try:
                    filter = self.listeners.add(source, sink, listener)
                    if filter is not None:
                        new[index] = mapping.filter_key(filter.source, filter.sink, self.authority), filter
                except UStatusError as error:
                    statuses[index] = error.status
                    if filter is not None:  # its address has no valid key
                        self.listeners.remove(source, sink, listener)
            try:
                if self._receiver.want(new.values()):
                    await self._declare([key for key, _ in new.values()], f"{len(new)} subscriptions")
            except BaseException as error:
                for index in new:
                    self.listeners.remove(*pairs[index], listener)
                if not isinstance(error, UStatusError):
                    raise
                for index in new:
                    statuses[index] = error.status
        return statuses

    async def unlisten(self, filter: Filter) -> None:
        if self._receiver.unwant([mapping.filter_key(filter.source, filter.sink, self.authority)]):
            await self._declare([], "ending a subscription")

    async def _declare(self, new: list[str], doing: str) -> None:
        """Bring the subscriptions in line with the filters; if that fails, remove the keys `new` again."""
        sender = self._sender
        assert sender is not None, "only an open transport listens"
        try:
            await asyncio.to_thread(self._receiver.declare, sender.session)
        except zenoh.ZError as error:
            self._receiver.unwant(new)
            raise translate(error, doing) from None
        if new:
            # a peer that answers has read the subscriptions, which have left before the question
            await asyncio.to_thread(sender.silent, list(self._peers)[:KNOWN_PEERS_MAX], KNOWN_S_MAX)


_CLOSED: Final = UStatus(
    code=UCode.UNAVAILABLE, message="the transport was closed while a peer took nothing: some may have been sent"
)


def _close(session: zenoh.Session) -> None:
    with contextlib.suppress(zenoh.ZError):
        session.close()  # type: ignore[no-untyped-call]
