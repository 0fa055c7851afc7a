"""The channels: their items become publishes on their topics, in the order of their ids.

publish -> Channel: turn by turn -> Sequencer -> one append, with the last id -> publisher's answer, held streams,
             |                         '-> a gap: its link, if it has one,       the topic's own network
             '-- next turn               is asked for what is missing
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Final

import structlog

from history.file.writer import FollowedFrom
from history.log.log import Log
from streamer.config.edge import ChannelSection
from streamer.grip.items import Item
from streamer.grip.sequence import LastIds, Sequencer, Turn
from streamer.reporting import Condition, Reporter, Sample, each
from streamer.walk.endpoint import Endpoint
from streamer.walk.ingress import Dispatch, Ingress
from uprotocol import callbacks
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.callbacks import Remove
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError, is_nobody_listening
from uprotocol.tasks import end, wait_until
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

if TYPE_CHECKING:
    from streamer.grip.link import Links

KEY: Final = "@channel:"  # and the name of a channel: its last ids in the log
PENDING_SIZE_MAX: Final = 32 << 20  # of items that are not answered yet; with more, publishers come back later
PENDING_ITEMS_MAX = 20_000
RECOVERY_S_MAX = 15.0  # for all pages of a link
REST_FACTOR = 4  # a link that has failed is not asked for so many times as long as it took: items wait meanwhile
KNOWN_SHOWN_MAX: Final = 10  # names of channels in an error

ITEM_COUNTERS: Final = ("items", "repeats", "gaps", "recovered", "refused", "overload")
AppendTo = Callable[[Log, list[int], list[EncodedMessage], FollowedFrom], Awaitable[None]]
OnItem = Callable[[Item], None]
OnMissing = Callable[[str, UUri, str], None]  # name of the channel, its topic, what is missing
Tag = asyncio.Future[None]

log = structlog.get_logger()


class Outlet:
    """Where the messages of channels go: into the log of their topic, and to the network of its authority."""

    def __init__(self, dispatch: Dispatch, entry: Ingress, home: Endpoint, append: AppendTo) -> None:
        self._dispatch, self._entry, self._home, self._append = dispatch, entry, home, append

    def log_of(self, topic: UUri) -> Log:
        return self._dispatch.logs.of(topic)

    def forget_others(self, keys: Set[str]) -> None:
        """Forgets the last ids of channels that are not configured any more."""
        for one in self._dispatch.logs:
            for key in one.followed.positions().keys() - keys:
                if key.startswith(KEY):
                    one.followed.keep(key, None)

    async def store(self, messages: list[EncodedMessage], key: str, position: bytes) -> None:
        """Returns when the messages and the position are committed. Raises UNAVAILABLE while the log can't be written
        (disk full), RESOURCE_EXHAUSTED for a topic beyond the limit and while too much waits for the log."""
        verdict = self._entry.verdict_of(messages[0])
        if verdict.log is None:
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"no capacity for one more topic: {verdict.reason}")
        verdict.account.messages += len(messages)
        verdict.account.bytes += sum(len(message.payload) for message in messages)
        window, keys = self._dispatch.window, [message.id_bytes + verdict.source for message in messages]
        for one in keys:
            window.take(one)  # its network may send it back to us
        try:
            notes = FollowedFrom([None] * len(messages), key, position)
            await self._append(verdict.log, [verdict.stream] * len(messages), messages, notes)
        except UStatusError as error:
            for one in keys:
                window.forget(one)
            if not verdict.log.healthy:
                raise UStatusError(UCode.UNAVAILABLE, f"the log can't be written: {error.message}") from None
            raise

    async def send(self, messages: Sequence[EncodedMessage]) -> None:
        """Sends stored messages to the network of their topic, as hosted services do: what it does not take now, its
        subscribers get from the history."""
        topic = messages[0].stamp.attributes.source
        network = self._dispatch.view.endpoints.owner(topic.authority_name) or self._home
        statuses = await network.sends.begin(messages)
        refused = [status for status in statuses if status.code and not is_nobody_listening(status)]
        if refused:
            log.debug("a network has not taken items of a channel", endpoint=network.name, why=refused[0].message)


class Channel:
    """One channel. Its turns come one after the other: what arrives meanwhile is appended with the next one.

    Its state: `committed`, the position on disk; the items that come next (`_sequencer`, `_arrived`), and the turn that
    runs; its listeners, its counts, and the trouble of its link.
    """

    def __init__(
        self, section: ChannelSection, wait_s: float, outlet: Outlet, links: Links | None, on_gap: OnMissing
    ) -> None:
        self.name, self.topic, self.link = section.name, uris.parse(section.topic), section.link
        self._outlet, self._links, self._on_gap = outlet, links, on_gap
        self.key = KEY + self.name
        self._followed = outlet.log_of(self.topic).followed
        self.committed = _read(self._followed.position(self.key))
        self._sequencer = Sequencer[Tag](self.committed, wait_s)
        self._arrived: list[list[tuple[Item, Tag]]] = []  # by the request they came with
        self._came = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self.listeners: list[OnItem] = []
        self.counts: Counter[str] = Counter()
        self.trouble = ""  # of its link
        self._asks_after = 0.0  # loop time

    def __repr__(self) -> str:
        return f"Channel({self.name}, {self._sequencer}, {dict(self.counts)})"

    def offer(self, items: Sequence[Item]) -> list[Tag]:
        """Takes items that came together; each future resolves when its item is committed."""
        loop = asyncio.get_running_loop()
        tags: list[Tag] = [loop.create_future() for _ in items]
        self._arrived.append(list(zip(items, tags, strict=True)))
        self._came.set()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(), name=f"channel {self.name}")
        return tags

    async def close(self) -> None:
        await end(self._running)

    async def _run(self) -> None:
        """Runs until nothing waits. What waits when it is cancelled is refused."""
        try:
            await self._take_turns()
        except Exception:
            log.exception("a channel has failed; its publishers have to publish again", channel=self.name)
        finally:
            left = [tag for together in self._arrived for _, tag in together]
            self._arrived = []
            _answer([*left, *self._sequencer.abandon()], _stopped())

    async def _take_turns(self) -> None:
        loop = asyncio.get_running_loop()
        while self._arrived or len(self._sequencer):
            self._came.clear()
            if turns := self._take(loop.time()):
                await self._store([], turns)
            elif self._sequencer.overdue(loop.time()) is not None:
                await self._pass_gap()
            else:
                due = self._sequencer.due
                await wait_until(self._came, due)

    def _take(self, now: float) -> list[Turn[Tag]]:
        """Returns what goes on of the items that have arrived."""
        arrived, self._arrived = self._arrived, []
        turns: list[Turn[Tag]] = []
        for together in arrived:
            repeated = self._sequencer.repeated([item for item, _ in together])
            turns += [Turn(item, [tag], "repeat") for item, tag in together[:repeated]]
            for item, tag in together[repeated:]:
                turns += self._sequencer.offer(item, tag, now)
        return turns

    async def _pass_gap(self) -> None:
        """Asks the link for what is missing before the first item whose wait is over; without it the item goes on."""
        loop, recovered = asyncio.get_running_loop(), None
        if self.link is not None and (begin := loop.time()) >= self._asks_after:
            recovered = await self._recovered()
            self._asks_after = loop.time() + REST_FACTOR * (loop.time() - begin) if self.trouble else 0.0
        if recovered is None:
            await self._store([], self._sequencer.expire(loop.time()))
            return
        last_id, pages = recovered
        self.counts["recovered"] += 1
        await self._store(pages, self._sequencer.recover(last_id, loop.time()))

    async def _recovered(self) -> tuple[str, list[bytes]] | None:
        """Returns what the link has after the last id, and the id up to which that goes; None if it has nothing new, or
        does not answer."""
        assert self.link is not None
        assert self._links is not None
        last, last_id, pages = self.committed.ordered or "", "", list[bytes]()
        try:
            async with asyncio.timeout(RECOVERY_S_MAX):
                async for page in self._links.pages(self.link, {self.name: last}):
                    pages += [page.body] if page.body else []
                    here = (one.prev_id for one in page.instruction.channels if one.name == self.name)
                    last_id = next(here, None) or last_id
        except (TimeoutError, UStatusError) as error:
            why = error.message if isinstance(error, UStatusError) else f"no answer within {RECOVERY_S_MAX:g} s"
            self.trouble = f"missing items can't be had: {why}"
            return None
        if not last_id:
            self.trouble = f"the answer of its link {self.link} has no Grip-Channel: {self.name}; prev-id=ID"
            return None
        self.trouble = ""
        return None if last_id == last else (last_id, pages)

    async def _store(self, pages: Sequence[bytes], turns: Sequence[Turn[Tag]]) -> None:
        """Commits the pages of a link, then the items; answers their publishers, and hands them to all who listen."""
        new = [turn.item for turn in turns if turn.kind in ("next", "gap")]
        contents = [*pages, *(item.content for item in new if item.has_content)]
        last = self._sequencer.last
        try:
            messages = [message_of(self.topic, content) for content in contents]
            if messages:
                await self._outlet.store(messages, self.key, _written(last))
            elif last != self.committed:
                self._followed.keep(self.key, _written(last))
        except BaseException as error:
            is_known = isinstance(error, UStatusError)
            self._sequencer.last = self.committed
            self.counts["refused"] += len(new)
            for turn in turns:
                _answer(turn.tags, error if is_known else _stopped())
            if not is_known:
                raise
            return
        self.committed = last
        for turn in turns:
            self._done(turn)
        if messages:  # the next turn begins after the network has taken these: publishers feel its speed
            await self._outlet.send(messages)

    def _done(self, turn: Turn[Tag]) -> None:
        """Listeners hear `recovered` items, too: a held stream has not seen what was recovered here."""
        self.counts["repeats" if turn.kind == "repeat" else "items"] += 1
        if turn.kind == "gap":
            self.counts["gaps"] += 1
            self._on_gap(self.name, self.topic, f"items before id {turn.item.id!r}, after {turn.item.prev_id!r}")
        _answer(turn.tags)
        for on_item in list(self.listeners) if turn.kind != "repeat" else ():
            try:
                on_item(turn.item)
            except Exception:
                log.exception("a held stream could not take an item", channel=self.name)


class Channels(Reporter):
    """All channels of the configuration. `close` before the log is closed."""

    def __init__(
        self, sections: Iterable[ChannelSection], wait_s: float, outlet: Outlet, links: Links | None, on_gap: OnMissing
    ) -> None:
        """`links`: for channels with a link; closed with the channels."""
        self._links = links
        self._channels = {one.name: Channel(one, wait_s, outlet, links, on_gap) for one in sections}
        outlet.forget_others({one.key for one in self._channels.values()})
        self._pending_items = self._pending_bytes = 0
        self._is_closed = False
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"Channels({len(self._channels)}, pending={self._pending_items})"

    def last_id(self, name: str) -> str | None:
        """Returns the id of the last item that is committed; None: it had none, or there was no item yet. Raises
        NOT_FOUND."""
        return self._channel(name).committed.ordered

    def listen(self, name: str, on_item: OnItem) -> Remove:
        """`on_item(item)` on the loop for each item of the channel, in order, after its commit. Returns a function that
        removes it. Raises NOT_FOUND."""
        return callbacks.add(self._channel(name).listeners, on_item)

    async def publish(self, items: Sequence[Item]) -> None:
        """Returns when all items are committed, or were before. Items that wait for others return with them.

        Raises NOT_FOUND for an unknown channel (then no item is taken), RESOURCE_EXHAUSTED if too much waits already,
        UNAVAILABLE while the log can't be written (disk full). After an error the same items may be published again.
        """
        by_channel: dict[str, list[Item]] = {}
        for item in items:
            by_channel.setdefault(item.channel, []).append(item)
        offered = [(self._channel(name), share) for name, share in by_channel.items()]
        if not items:
            return
        if self._is_closed:
            raise _stopped()
        size = sum(item.size for item in items)
        many = self._pending_items + len(items) > PENDING_ITEMS_MAX or self._pending_bytes + size > PENDING_SIZE_MAX
        if many and self._pending_items:
            self.counts["overload"] += len(items)
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"{self._pending_items} items wait already: publish slower")
        self._pending_items += len(items)
        self._pending_bytes += size
        tags = [tag for channel, share in offered for tag in channel.offer(share)]
        answered = asyncio.gather(*tags, return_exceptions=True)
        answered.add_done_callback(lambda _: self._release(len(items), size))
        answers = await asyncio.shield(answered)  # the items are taken even if nobody waits for the answer
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    def _release(self, items: int, size: int) -> None:
        self._pending_items -= items
        self._pending_bytes -= size

    async def close(self) -> None:
        """Items that wait are refused; their publishers may publish them again after a restart."""
        self._is_closed = True
        for channel in self._channels.values():
            await channel.close()
        if self._links is not None:
            await self._links.close()

    def conditions(self) -> Iterator[Condition]:
        for channel in self._channels.values():
            if channel.trouble:
                yield Condition(f"channel {channel.name!r}: {channel.trouble}")

    def samples(self) -> Iterator[Sample]:
        total = sum((channel.counts for channel in self._channels.values()), Counter(self.counts))
        yield from each("grip_items", (), {what: total[what] for what in ITEM_COUNTERS})

    def _channel(self, name: str) -> Channel:
        channel = self._channels.get(name)
        if channel is None:
            known = ", ".join([*self._channels][:KNOWN_SHOWN_MAX]) + ", ..." * (len(self._channels) > KNOWN_SHOWN_MAX)
            raise UStatusError(UCode.NOT_FOUND, f"unknown channel {name!r}; known: {known}")
        return channel


def message_of(topic: UUri, content: bytes) -> EncodedMessage:
    """Returns a publish with a new id: JSON, text, or raw bytes."""
    payload = UPayload(content, _format_of(content))
    return EncodedMessage.of(UMessageBuilder.publish(topic).with_id(uuids.new()).build_from_upayload(payload))


def _format_of(content: bytes) -> UPayloadFormat.ValueType:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return UPayloadFormat.UPAYLOAD_FORMAT_RAW
    try:
        json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return UPayloadFormat.UPAYLOAD_FORMAT_TEXT
    return UPayloadFormat.UPAYLOAD_FORMAT_JSON


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _stopped() -> UStatusError:
    return UStatusError(UCode.UNAVAILABLE, "the streamer stops, or has a fault: publish again in a moment")


def _answer(tags: Iterable[Tag], error: BaseException | None = None) -> None:
    for tag in tags:
        if not tag.done():
            tag.set_result(None) if error is None else tag.set_exception(error)


# The last ids in the log: one line each; an id has no line ends. An empty line: none is known


def _written(last: LastIds) -> bytes:
    return f"{last.ordered or ''}\n{last.unordered or ''}".encode()


def _read(position: bytes | None) -> LastIds:
    ordered, _, unordered = (position or b"").decode().partition("\n")
    return LastIds(ordered or None, unordered or None)
