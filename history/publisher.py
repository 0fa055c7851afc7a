"""A publisher with a history of its own: followers miss nothing when a network loses messages or a process is killed.

publish -> valid? -> log -> committed: no follower can miss it, and `publish` returns
                      |---> HistoryService: Describe, Poll, Command <-> followers, at their own pace
                      '---> plain copies, in the order of the log -> listeners; it is no error if the network takes none
           announcement of the history -- at the start, whenever the network is back, and repeatedly -> followers

The log is also the queue of the plain copies: nothing else holds a message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, Self, Unpack

import structlog

from history.epochs.groups import Group
from history.log.log import RETENTION_MS, Log
from history.records.epoch import Time, wire_time
from history.service.keeper import Keeper
from history.service.service import REPLY_BYTES_MAX, HistoryService
from storage.runtime import REAL, Runtime
from uprotocol import uri as uris
from uprotocol.communication import MessageOptions, Publisher
from uprotocol.communication.pubsub import finished
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Announcement, ProgressRequest
from uprotocol.encoded import decoded
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError, invalid
from uprotocol.tasks import end, wait_within
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

PUBLISHER_RETENTION_BYTES: Final = 64 << 20  # of disk, or of memory: a part of a small device
# Plain copies wait for the network in the part of the log that is in memory: 8 MiB of messages, each of which is there
# as an object and as bytes. If more wait, the oldest are not sent: late copies are of no use, and followers have them
PUBLISHER_TAIL_BYTES_MAX: Final = 16 << 20
QUEUE_MESSAGES_MAX = 8_192  # the same limit in messages: one second of a fast publisher
BATCH_MESSAGES_MAX: Final = 512  # beyond it the cost per message no longer falls
DRAIN_S_MAX: Final = 2.0  # `close` waits so long for the network to take the plain copies
PUBLISHER_ANNOUNCE_S: Final = 10.0  # a new follower finds us within this time
ANNOUNCE_JITTER: Final = 0.25  # of it, so that publishers that were started together do not announce together
ANNOUNCEMENT_TTL_MS: Final = 30_000  # an older announcement is out of date
REPLY_ROOM_BYTES: Final = 256 << 10  # of an answer, in addition to the longest message

log = structlog.get_logger()


class HistoryPublisher(Publisher):
    """Publishes as the uEntity of `local`, and keeps what it has published.

        async with HistoryPublisher(transport, local, "door.db") as publisher:
            await publisher.publish(0x8001, UPayload.pack(state))

    The log is the file `path`, used by this publisher alone. None: a ring in memory; its followers have a gap when the
    process ends. It keeps `retention_bytes`, and records younger than `retention_ms`.

    It is served at `service`, an instance of core.ustreamer on this host (ids.of_publisher): one for each uEntity type,
    so two instances of a type on one host cannot both have a history. It has only what was published here. **Anybody on
    the network may read it**: no rule restricts it, just as none restricts the plain copies. It is announced about
    every `announce_s`, and whenever the network is back.

    The owner of the transport opens it before, and closes it after this publisher. A transport does not deliver to
    itself, so applications that share it can neither hear this publisher nor poll it.

    `groups` of its topics have epochs (history.epochs.groups.Group): readers have all of an epoch, or none. Buckets end
    by themselves; other epochs end with `progress`.

    `counts`, since the start: published; refused (calls of publish that raised); sent, unsent (plain copies that the
    network took, and did not take), dropped (plain copies that waited too long); announced.
    """

    def __init__(
        self,
        transport: UTransport,
        local: LocalUriProvider,
        path: Path | str | None,
        *,
        retention_ms: int = RETENTION_MS,
        retention_bytes: int = PUBLISHER_RETENTION_BYTES,
        announce_s: float = PUBLISHER_ANNOUNCE_S,
        groups: Sequence[Group] = (),
        runtime: Runtime = REAL,
    ) -> None:
        """Raises INVALID_ARGUMENT for a uEntity of type 0."""
        self.service = ids.of_publisher(local.get_source())
        self._transport, self._local, self._path = transport, local, path
        self._retention_ms, self._retention_bytes = retention_ms, retention_bytes
        self._announce_s, self._runtime = announce_s, runtime
        self._groups = list(groups)
        self._keeper: Keeper | None = None
        self._log: Log | None = None  # None: not open
        self._appending: set[asyncio.Future[int]] = set()
        self._opened = contextlib.AsyncExitStack()
        self._announcement_due = asyncio.Event()
        transport.on_connection(self._connection_changed)
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        state = "closed" if self._log is None else "open"
        return f"HistoryPublisher({uris.format(self.service)}, {state}, {dict(self.counts)})"

    async def __aenter__(self) -> Self:
        """Raises UStatusError as Log.open and the transport do; then nothing is open."""
        assert self._log is None, "a publisher is opened once at a time"
        async with contextlib.AsyncExitStack() as stack:
            kept = await stack.enter_async_context(await self._open_log())
            frontiers = ids.of_publisher(self._local.get_source(), ids.FRONTIERS)
            keeper = Keeper(frontiers, self._groups, [kept], self._runtime.now_ms, receives=False)
            await keeper.open()  # even without groups: it ends open epochs of earlier groups
            stack.callback(keeper.close)
            await self._serve(kept, keeper, stack)
            copies = _Copies(kept, self._transport, self.counts)
            stack.push_async_callback(copies.close)
            announcing = asyncio.create_task(self._announce(kept), name=f"announcements {kept.name}")
            stack.push_async_callback(end, announcing)
            stack.push_async_callback(self._settled)
            self._opened = stack.pop_all()
        self._log, self._keeper = kept, keeper
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop publishing. Appends that have begun are finished; plain copies are sent for DRAIN_S_MAX at most. May be
        called twice."""
        self._log = None
        await self._opened.aclose()

    async def publish(
        self, resource_id: int, payload: UPayload | None = None, **options: Unpack[MessageOptions]
    ) -> None:
        """Publish on own topic `resource_id` (8000 to FFFE). Returns when no follower can miss the message; its plain
        copy may not be sent yet.

        Raises UStatusError, and then nothing is sent: INVALID_ARGUMENT for an invalid message, or one that is longer
        than the transport carries; RESOURCE_EXHAUSTED or UNAVAILABLE as Log.append; FAILED_PRECONDITION outside of
        `async with`.
        """
        if self._log is None:
            raise UStatusError(UCode.FAILED_PRECONDITION, "the publisher is not open: use `async with`")
        try:
            message = finished(UMessageBuilder.publish(self._local.get_resource(resource_id)), payload, options)
            longest = self._transport.message_bytes_max
            if len(message.payload) > longest:  # it could be stored, but neither sent nor polled
                what = f"expected a payload of at most {longest} bytes on this network, got {len(message.payload)}"
                raise invalid(what)
            appending = self._log.append([self._log.stream_id(message.attributes.source)], [message])
            self._appending.add(appending)
            appending.add_done_callback(self._appending.discard)
            await appending
        except UStatusError:
            self.counts["refused"] += 1
            raise
        self.counts["published"] += 1

    async def progress(self, group: str, opens: Iterable[Time] = (), closes: Iterable[Time] = ()) -> None:
        """Open and close epochs of a group, as one step. An epoch that closes has all messages published before; they
        need not be counted. If several epochs are open, a payload names its epoch (history.epochs.groups.timed).

        Returns when the change is on disk. Raises UStatusError: NOT_FOUND for an epoch that is not open,
        FAILED_PRECONDITION for one that is over, or if the publisher is not open; INVALID_ARGUMENT and
        RESOURCE_EXHAUSTED as a gateway does.
        """
        if self._log is None or self._keeper is None:
            raise UStatusError(UCode.FAILED_PRECONDITION, "the publisher is not open: use `async with`")
        asked = ProgressRequest(group=group)
        for change, times in ((1, opens), (-1, closes)):
            for time in times:
                asked.changes.add(time=wire_time(time), change=change)
        await self._keeper.progress(self._local.get_source(), asked)

    def _connection_changed(self, connected: bool) -> None:
        if connected:  # followers that are new or back find us at once
            self._announcement_due.set()

    async def _settled(self) -> None:
        """Wait until every append so far has succeeded or failed."""
        if self._appending:
            await asyncio.wait(self._appending)

    async def _open_log(self) -> Log:
        return await Log.open(
            self._path,
            name=uris.format(self.service),
            retention_ms=self._retention_ms,
            retention_bytes=self._retention_bytes,
            tail_bytes=PUBLISHER_TAIL_BYTES_MAX,
            runtime=self._runtime,
        )

    async def _serve(self, kept: Log, keeper: Keeper, stack: contextlib.AsyncExitStack) -> None:
        service = HistoryService(
            self._transport,
            self._local,
            [kept],
            entity=self.service.ue_id,
            reply_bytes_max=max(REPLY_BYTES_MAX, self._transport.message_bytes_max + REPLY_ROOM_BYTES),
            drain_ms_max=round(DRAIN_S_MAX * 1_000),
            keeper=keeper,
        )
        stack.push_async_callback(service.stop)
        await service.start()

    async def _announce(self, kept: Log) -> None:
        """Announce the history until cancelled. Announcements are not in the log: they are of no use later."""
        own = self._local.get_source()
        topics = [uris.pattern(own.authority_name, own.ue_id, own.ue_version_major)]
        here = UPayload.pack(Announcement(incarnations=[kept.incarnation], topics=topics))
        topic = ids.of_publisher(own, ids.ANNOUNCEMENTS)
        while True:
            self._announcement_due.clear()
            message = UMessageBuilder.publish(topic).with_ttl(ANNOUNCEMENT_TTL_MS).build_from_upayload(here)
            (status,) = await _send_batch(self._transport, [message])
            self.counts["announced"] += not status.code
            pause_s = self._announce_s * self._runtime.rng.uniform(1 - ANNOUNCE_JITTER, 1 + ANNOUNCE_JITTER)
            await wait_within(self._announcement_due, pause_s)


class _Copies:
    """Sends a plain copy of each record that is appended from now on, in the order of the log."""

    def __init__(self, kept: Log, transport: UTransport, counts: Counter[str]) -> None:
        self._log, self._transport, self._counts = kept, transport, counts
        self._seq = kept.newest_seq  # copies up to here are sent, or dropped
        self._moved = asyncio.Event()
        self._is_away = False
        self._task = asyncio.create_task(self._run(), name=f"plain copies {kept.name}")

    async def close(self) -> None:
        """Wait until the network has taken what waits, DRAIN_S_MAX at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S_MAX):
                while self._seq < self._log.newest_seq:
                    self._moved.clear()
                    await self._moved.wait()
        await end(self._task)
        self._drop_up_to(self._log.newest_seq)

    async def _run(self) -> None:
        while True:
            await self._log.wait(self._seq)
            self._drop_up_to(max(self._log.in_memory_after, self._log.newest_seq - QUEUE_MESSAGES_MAX))
            last_seq, messages = self._next()
            if messages:
                await self._send(messages)
            self._seq = last_seq
            self._moved.set()

    def _next(self) -> tuple[int, list[UMessage]]:
        """Returns the next messages to send, and the seq of the last one."""
        chunks = self._log.tail(self._seq) or ()
        waiting = (record for chunk in chunks for record in zip(chunk.seqs, chunk.streams, chunk.messages, strict=True))
        batch = list(islice(waiting, BATCH_MESSAGES_MAX))
        frontiers = self._log.frontier_ids  # a frontier has no meaning outside of its log
        messages = [decoded(message) for _, stream, message in batch if stream not in frontiers]
        return batch[-1][0] if batch else self._log.newest_seq, messages

    async def _send(self, messages: list[UMessage]) -> None:
        failed = [status for status in await _send_batch(self._transport, messages) if status.code]
        self._counts["sent"] += len(messages) - len(failed)
        self._counts["unsent"] += len(failed)
        if failed and not self._is_away:
            what = "the network does not take what is published; followers of the history get it"
            log.warning(what, log=self._log.name, why=failed[0].message)
        self._is_away = bool(failed)

    def _drop_up_to(self, seq: int) -> None:
        if self._seq < seq:
            self._counts["dropped"] += seq - self._seq
            self._seq = seq


async def _send_batch(transport: UTransport, messages: list[UMessage]) -> list[UStatus]:
    """Returns a status for each message. An exception of the transport concerns this batch only."""
    try:
        return await transport.send_batch(messages)
    except UStatusError as error:
        status = error.status
    except Exception as error:
        log.exception("a transport failed to send")
        status = UStatus(code=UCode.INTERNAL, message=repr(error))
    return [status] * len(messages)
