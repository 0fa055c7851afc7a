"""HistoryPublisher: when `publish` returns, the followers have the message; a plain copy is for all subscribers."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaigns.simulation.network import FaultyNetwork
from history import publisher as publisher_module
from history.epochs.assembling import Assembler
from history.epochs.groups import ENDED, Group
from history.file.store import Store
from history.publisher import HistoryPublisher
from history.reading.subscriber import GaplessSubscriber, HistoryClient
from history.records.epoch import Epoch
from tests.test_docs_snippets import DOCS, run
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Announcement, PollRequest, PollResponse
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uattributes_pb2 import UPriority
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

DOOR, SEAT = LocalUriProvider("vehicle", 0x10, 1), LocalUriProvider("vehicle", 0x20, 1)
APP = LocalUriProvider("cloud", 0x30, 1)
TOPIC = 0x8001


def text(number: int) -> UPayload:
    return UPayload(str(number).encode(), 4)


def topics_of(local: LocalUriProvider) -> UUri:
    return uris.pattern(local.get_authority(), local.get_source().ue_id)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - any state may be asked for
            await asyncio.sleep(0.001)


class Heard:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[UMessage] = asyncio.Queue()

    def on_receive(self, message: UMessage) -> None:
        self.messages.put_nowait(message)

    async def take(self, count: int) -> list[UMessage]:
        async with asyncio.timeout(20):
            return [await self.messages.get() for _ in range(count)]

    async def numbers(self, count: int) -> list[int]:
        return [int(message.payload) for message in await self.take(count)]


class Gated(LocalTransport):
    """Its network accepts nothing while `gate` is closed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_held = asyncio.Event()  # something waits at the gate
        self.calls = 0

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        self.calls += 1
        if not self.gate.is_set():
            self.is_held.set()
        await self.gate.wait()
        return await super().send_batch(messages)


class World:
    """The transport of a vehicle, and an app elsewhere that calls and listens."""

    def __init__(self, path: Path) -> None:
        self.path = path / "door.db"
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        self.network = FaultyNetwork()
        self.transport = await self._stack.enter_async_context(Gated.on(self.network, DOOR))
        self.app = await self._stack.enter_async_context(LocalTransport.on(self.network, APP))
        self.rpc = await self._stack.enter_async_context(InMemoryRpcClient(self.app, APP))
        self.heard = Heard()
        await self.app.register_listener(topics_of(DOOR), self.heard)

    def publisher(self, local: LocalUriProvider = DOOR, **options: Any) -> HistoryPublisher:
        options = {"path": self.path, "announce_s": 3_600.0, **options}
        return HistoryPublisher(self.transport, local, **options)

    def client(self, local: LocalUriProvider = DOOR, timeout_ms: int = 5_000) -> HistoryClient:
        return HistoryClient(self.rpc, ids.of_publisher(local.get_source()), timeout_ms=timeout_ms)

    async def polled(self, local: LocalUriProvider = DOOR) -> list[UMessage]:
        """Returns all records."""
        request, found = PollRequest(), list[UMessage]()
        while True:
            answer: PollResponse = await self.client(local).poll(request)
            found += [UMessage.FromString(message) for batch in answer.batches for message in batch.message]
            assert not answer.gaps
            if not answer.more:
                return found
            request = PollRequest(positions=answer.next)

    async def polled_numbers(self) -> list[int]:
        return [int(message.payload) for message in await self.polled()]

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.open()
    yield made
    await made.close()


# What `publish` promises


@pytest.mark.parametrize("is_on_disk", [True, False])
async def test_what_is_published_is_heard_and_kept(world: World, is_on_disk: bool) -> None:
    async with world.publisher(path=world.path if is_on_disk else None) as publisher:
        await publisher.publish(TOPIC, text(7), priority=UPriority.UPRIORITY_CS3, ttl_ms=60_000)
        (heard,) = await world.heard.take(1)
        assert heard.attributes.source == DOOR.get_resource(TOPIC)
        assert (heard.payload, heard.attributes.priority, heard.attributes.ttl) == (
            b"7",
            UPriority.UPRIORITY_CS3,
            60_000,
        )
        assert await world.polled() == [heard]
        (state,) = await world.client().logs()
        assert (state.durable, state.newest_seq, state.retention_bytes) == (is_on_disk, 1, 64 << 20)


async def test_a_network_that_is_away_is_no_error_and_followers_get_all(world: World) -> None:
    async with world.publisher() as publisher:
        world.network.cut("vehicle")
        for number in range(3):
            await publisher.publish(TOPIC, text(number))
        await until(lambda: publisher.counts["unsent"] == 3)
        world.network.mend("vehicle")
        await publisher.publish(TOPIC, text(3))
        assert await world.heard.numbers(1) == [3]
        assert await world.polled_numbers() == [0, 1, 2, 3]
    assert (publisher.counts["published"], publisher.counts["sent"], publisher.counts["dropped"]) == (4, 1, 0)


async def test_what_the_log_refuses_is_an_error_and_not_sent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    async with world.publisher() as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "commit", full)
            with pytest.raises(UStatusError) as error:
                await publisher.publish(TOPIC, text(0))
        assert error.value.code == UCode.RESOURCE_EXHAUSTED
        await publisher.publish(TOPIC, text(1))
        assert await world.heard.numbers(1) == [1]
        assert await world.polled_numbers() == [1]
    assert (publisher.counts["refused"], publisher.counts["published"], publisher.counts["sent"]) == (1, 1, 1)


async def test_a_publisher_opens_and_closes_epochs_of_its_own(world: World) -> None:
    """A reader that joins in the middle of an epoch does not get it; the plain copies have no epochs."""
    topics = [topics_of(DOOR)]
    async with world.publisher(groups=[Group("door", topics, None)]) as publisher:
        await publisher.progress("door", opens=[(1,)])
        await publisher.publish(TOPIC, text(10))
        late = Assembler(topics)
        async with GaplessSubscriber(
            world.client(), topics, start=PollRequest(latest=True), assembler=late
        ) as subscriber:
            seen = subscriber.epochs()
            first = asyncio.create_task(anext(seen))
            await until(lambda: subscriber.connected)
            await publisher.publish(TOPIC, text(11))
            await publisher.progress("door", opens=[(2,)], closes=[(1,)])
            for number in (20, 21):
                await publisher.publish(TOPIC, text(number))
            await publisher.progress("door", closes=[(2,)])
            epoch = await asyncio.wait_for(first, 30)
            assert (epoch.epoch, [int(one.message.payload) for one in epoch.records]) == (Epoch("door", (2,)), [20, 21])
            assert epoch.is_complete
        assert late.dropped["filtered"] == 1
        assert await world.heard.numbers(4) == [10, 11, 20, 21]
        with pytest.raises(UStatusError, match="is over"):
            await publisher.progress("door", opens=[(1,)])
    assert publisher.counts["sent"] == 4
    with pytest.raises(UStatusError, match="not open"):
        await publisher.progress("door", opens=[(3,)])


async def test_a_publisher_that_has_no_groups_any_more_ends_what_it_had_open(world: World) -> None:
    topics = [topics_of(DOOR)]
    async with world.publisher(groups=[Group("door", topics, None)]) as publisher:
        await publisher.progress("door", opens=[(1,)])
        await publisher.publish(TOPIC, text(10))
    async with (
        world.publisher() as publisher,
        GaplessSubscriber(world.client(), topics, assembler=Assembler(topics)) as subscriber,
    ):
        epoch = await asyncio.wait_for(anext(subscriber.epochs()), 30)
        assert (epoch.epoch, epoch.incomplete) == (Epoch("door", (1,)), ENDED)
        with pytest.raises(UStatusError, match="there are: none"):
            await publisher.progress("door", closes=[(1,)])


@pytest.mark.parametrize("time", [(1 << 63,), ("one",), (1.5,), None, 7, ()])
async def test_what_is_no_time_opens_nothing(world: World, time: Any) -> None:
    async with world.publisher(groups=[Group("door", [topics_of(DOOR)], None)]) as publisher:
        with pytest.raises(UStatusError) as error:
            await publisher.progress("door", opens=[(1,), time])
        assert error.value.code == UCode.INVALID_ARGUMENT
        with pytest.raises(UStatusError, match="was not opened"):
            await publisher.progress("door", closes=[(1,)])


@pytest.mark.parametrize("resource", [-1, 0, 1, 0x7FFF, 0xFFFF, 0x1_0000])
async def test_a_resource_that_is_no_topic(world: World, resource: int) -> None:
    async with world.publisher(path=None) as publisher:
        with pytest.raises(UStatusError) as error:
            await publisher.publish(resource, text(0))
        assert error.value.code == UCode.INVALID_ARGUMENT
        assert await world.polled() == []
    assert (publisher.counts["refused"], world.heard.messages.qsize()) == (1, 0)


async def test_a_payload_that_no_network_takes_is_not_kept_either(world: World) -> None:
    world.transport.message_bytes_max = 10_000
    async with world.publisher(path=None) as publisher:
        await publisher.publish(TOPIC, UPayload(bytes(10_000), 6))
        with pytest.raises(UStatusError) as error:
            await publisher.publish(TOPIC, UPayload(bytes(10_001), 6))
        assert error.value.code == UCode.INVALID_ARGUMENT
        assert [len(message.payload) for message in await world.polled()] == [10_000]


async def test_the_longest_message_is_heard_and_polled(world: World) -> None:
    async with world.publisher(path=None) as publisher:
        for _ in range(2):
            await publisher.publish(TOPIC, UPayload(bytes(world.transport.message_bytes_max), 6))
        assert len(await world.heard.take(2)) == len(await world.polled()) == 2


KILLED = """
import asyncio, sys
from history.publisher import HistoryPublisher
from transports.local import LocalNetwork, LocalTransport
from uprotocol.message import UPayload
from uprotocol.transport import LocalUriProvider

async def main():
    local = LocalUriProvider("vehicle", 0x10, 1)
    async with LocalTransport.on(LocalNetwork(), local) as transport:
        async with HistoryPublisher(transport, local, sys.argv[1]) as publisher:

            async def publish(first):
                for number in range(first, 1 << 30, 5):
                    await publisher.publish(0x8001 + first, UPayload(str(number).encode(), 4))
                    print(number, flush=True)

            await asyncio.gather(*(publish(first) for first in range(5)))

asyncio.run(main())
"""


async def test_a_kill_loses_nothing_that_publish_has_returned_for(world: World) -> None:
    async with world.publisher():
        (state,) = await world.client().logs()
    returned: Counter[int] = Counter()
    for count in (40, 150):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, str(world.path), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            numbers = [int(await process.stdout.readline()) for _ in range(count)]
            process.kill()
            rest = (await process.stdout.read()).split(b"\n")[:-1]  # what it had said before it died
            await process.wait()
        returned.update([*numbers, *map(int, rest)])
        async with world.publisher():
            assert not returned - Counter(await world.polled_numbers())
            (after,) = await world.client().logs()
            assert after.incarnation == state.incarnation


# Plain copies


@pytest.mark.parametrize("is_on_disk", [True, False])
async def test_plain_copies_leave_in_the_order_of_the_log(world: World, is_on_disk: bool) -> None:
    async with world.publisher(path=world.path if is_on_disk else None) as publisher:

        async def publish(first: int) -> None:
            for number in range(first, 1_000, 50):
                await publisher.publish(TOPIC + first % 3, text(number))

        await asyncio.gather(*map(publish, range(50)))
        heard = await world.heard.numbers(1_000)
        assert sorted(heard) == list(range(1_000))
        assert await world.polled_numbers() == heard


async def _held(world: World, publisher: HistoryPublisher, count: int, payload: bytes) -> None:
    """One message waits at the gate, and so many behind it."""
    world.transport.gate.clear()
    await publisher.publish(TOPIC, UPayload(b"%d" % 0 + payload, 4))
    await world.transport.is_held.wait()
    for number in range(1, count + 1):
        await publisher.publish(TOPIC, UPayload(b"%d" % number + payload, 4))
    world.transport.gate.set()


@pytest.mark.parametrize("is_on_disk", [True, False])
async def test_copies_that_wait_are_bounded_in_number(
    world: World, is_on_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "QUEUE_MESSAGES_MAX", 10)
    async with world.publisher(path=world.path if is_on_disk else None) as publisher:
        await _held(world, publisher, 30, b"")
        assert await world.heard.numbers(11) == [0, *range(21, 31)]
        assert await world.polled_numbers() == list(range(31))
    assert (publisher.counts["sent"], publisher.counts["dropped"]) == (11, 20)


async def test_copies_that_wait_are_bounded_in_bytes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "PUBLISHER_TAIL_BYTES_MAX", 100_000)
    async with world.publisher() as publisher:
        await _held(world, publisher, 20, b" " * 10_000)
        await until(lambda: publisher.counts["sent"] + publisher.counts["dropped"] == 21)
        sent = publisher.counts["sent"]
        assert 1 < sent < 10
        assert await world.heard.numbers(sent) == [0, *range(22 - sent, 21)]
        assert await world.polled_numbers() == list(range(21))


async def test_a_transport_that_fails_as_it_should_not_ends_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: object, messages: Sequence[UMessage]) -> list[UStatus]:
        raise RuntimeError("a bug")

    async with world.publisher(announce_s=0.001) as publisher:
        await until(lambda: publisher.counts["announced"])
        with monkeypatch.context() as patch:
            patch.setattr(Gated, "send_batch", broken)
            await publisher.publish(TOPIC, text(0))
            await until(lambda: publisher.counts["unsent"])
            announced = publisher.counts["announced"]
        await publisher.publish(TOPIC, text(1))
        assert await world.heard.numbers(1) == [1]
        await until(lambda: publisher.counts["announced"] > announced)
        assert await world.polled_numbers() == [0, 1]


async def test_it_is_announced_at_once_when_its_network_is_back(world: World) -> None:
    """Its followers may have missed the last announcement, or are new there."""
    announcements = Heard()
    await world.app.register_listener(ids.of_publisher(DOOR.get_source(), ids.ANNOUNCEMENTS), announcements)
    async with world.publisher(announce_s=3_600) as publisher:
        await announcements.take(1)
        for _ in range(3):
            world.transport.disconnect()
            await asyncio.sleep(0)
            assert announcements.messages.empty()
            world.transport.reconnect()
            await announcements.take(1)
        assert publisher.counts["announced"] == 4


# Opened and closed


async def test_close_lets_leave_what_is_on_its_way_and_may_be_called_twice(world: World) -> None:
    publisher = world.publisher()
    async with publisher:
        publishing = [asyncio.create_task(publisher.publish(TOPIC, text(number))) for number in range(50)]
        await asyncio.sleep(0)
        await publisher.close()
        await asyncio.gather(*publishing)
        assert await world.heard.numbers(50) == list(range(50))
        await publisher.close()
        with pytest.raises(UStatusError) as error:
            await publisher.publish(TOPIC)
        assert error.value.code == UCode.FAILED_PRECONDITION
    assert (publisher.counts["sent"], publisher.counts["dropped"]) == (50, 0)


async def test_close_does_not_wait_for_a_network_that_takes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "DRAIN_S_MAX", 0.01)
    async with world.publisher() as publisher:
        world.transport.gate.clear()
        await publisher.publish(TOPIC, text(0))
        await world.transport.is_held.wait()
        await publisher.publish(TOPIC, text(1))
        await asyncio.wait_for(publisher.close(), 10)
    world.transport.gate.set()
    assert (publisher.counts["sent"], publisher.counts["dropped"]) == (0, 2)


async def test_opened_again_it_goes_on_and_sends_nothing_twice(world: World) -> None:
    publisher = world.publisher()
    for number in range(3):
        async with publisher:
            await publisher.publish(TOPIC, text(number))
            assert await world.heard.numbers(1) == [number]
            assert await world.polled_numbers() == list(range(number + 1))


async def test_after_a_start_that_fails_nothing_is_open(world: World) -> None:
    closed = LocalTransport.on(world.network, DOOR)
    with pytest.raises(UStatusError) as error:
        async with HistoryPublisher(closed, DOOR, world.path):
            raise AssertionError("it is not open")
    assert error.value.code == UCode.UNAVAILABLE
    async with world.publisher() as publisher:  # else its file were in use
        with pytest.raises(UStatusError) as error:
            async with world.publisher():
                raise AssertionError("the file belongs to one alone")
        assert error.value.code == UCode.ALREADY_EXISTS
        await publisher.publish(TOPIC, text(0))
        assert await world.polled_numbers() == [0]


# Followed


async def test_it_says_that_it_is_there_and_goes_on_saying(world: World) -> None:
    found = Heard()
    await world.app.register_listener(uris.parse("//*/FFFF0004/1/8004"), found)
    async with world.publisher(announce_s=0.01) as publisher:
        heard = await found.take(3)
        (state,) = await world.client().logs()
        for message in heard:
            assert message.attributes.source == ids.of_publisher(DOOR.get_source(), ids.ANNOUNCEMENTS)
            assert UPayload.of(message).unpack(Announcement) == Announcement(
                incarnations=[state.incarnation], topics=[uris.parse("//vehicle/10/1/FFFF")]
            )
        assert await world.polled() == []
        world.network.cut("vehicle")
        announced, calls = publisher.counts["announced"], world.transport.calls
        await until(lambda: world.transport.calls > calls + 1)
        assert publisher.counts["announced"] == announced
        world.network.mend("vehicle")
        await until(lambda: publisher.counts["announced"] > announced)


async def test_a_gapless_subscriber_gets_all_of_it_once(world: World) -> None:
    async with world.publisher() as publisher:
        await publisher.publish(TOPIC, text(0))
        await publisher.publish(TOPIC + 1, text(-1))
        following = GaplessSubscriber(world.client(timeout_ms=200), [DOOR.get_resource(TOPIC)], wait_ms_max=300)
        async with following as subscriber, asyncio.timeout(20):
            assert (await anext(subscriber)).message.payload == b"0"
            world.network.cut("vehicle")
            await publisher.publish(TOPIC, text(1))
            world.network.mend("vehicle")
            await publisher.publish(TOPIC, text(2))
            taken = [(await anext(subscriber)).message.payload for _ in range(2)]
            assert (taken, subscriber.gaps) == ([b"1", b"2"], 0)


async def test_a_transport_of_its_own_is_needed_to_poll_a_publisher_of_the_same_process(world: World) -> None:
    """No transport delivers to itself what it sent (the conformance suite checks all), so a call does not reach a
    service on the transport that sends it."""
    service = ids.of_publisher(DOOR.get_source())
    async with world.publisher() as publisher, LocalTransport.on(world.network, SEAT) as beside:
        await publisher.publish(TOPIC, text(1))
        async with InMemoryRpcClient(world.transport, SEAT) as rpc:
            with pytest.raises(UStatusError) as caught:
                await HistoryClient(rpc, service, timeout_ms=50).logs()
            assert caught.value.code == UCode.DEADLINE_EXCEEDED
        async with InMemoryRpcClient(beside, SEAT) as rpc:
            (state,) = await HistoryClient(rpc, service, timeout_ms=20_000).logs()
            assert state.newest_seq == 1


async def test_two_of_one_host_have_each_a_history_of_its_own(world: World, tmp_path: Path) -> None:
    async with world.publisher() as door, world.publisher(SEAT, path=tmp_path / "seat.db") as seat:
        await asyncio.gather(door.publish(TOPIC, text(1)), seat.publish(TOPIC, text(2)))
        for local, payload in ((DOOR, b"1"), (SEAT, b"2")):
            (message,) = await world.polled(local)
            assert (message.attributes.source, message.payload) == (local.get_resource(TOPIC), payload)


async def test_the_program_of_the_docs_runs(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it has a file beside it
    section = (DOCS / "following.md").read_text(encoding="utf-8").partition("## A publisher that keeps its own")[2]
    snippet = section.partition("```python\n")[2].partition("```")[0]
    names = {"transport": world.transport, "local": DOOR, "state": Announcement()}
    await run(snippet, HistoryPublisher=HistoryPublisher, UPayload=UPayload, **names)
    await world.heard.take(1)


# Addresses

AUTHORITIES = st.text("abc.-", min_size=1, max_size=8)
TYPES = st.integers(1, 0xFFFE)
INSTANCES, VERSIONS = st.integers(0, 0xFFFE), st.integers(0, 0xFE)
PUBLISHERS = st.builds(
    lambda authority, kind, instance, version: uris.uri(authority, instance << 16 | kind, version),
    AUTHORITIES,
    TYPES,
    INSTANCES,
    VERSIONS,
)
TOPICS = st.builds(
    lambda publisher, resource: uris.uri(*uris.key(publisher)[:3], resource), PUBLISHERS, st.integers(0x8000, 0xFFFE)
)


@given(PUBLISHERS, TOPICS)
def test_a_publishers_service_covers_its_type_on_its_host_alone(publisher: UUri, topic: UUri) -> None:
    service = ids.of_publisher(publisher)
    is_own = (publisher.authority_name, publisher.ue_id & 0xFFFF) == (topic.authority_name, topic.ue_id & 0xFFFF)
    assert ids.covers(service, topic) is is_own
    own = uris.uri(publisher.authority_name, topic.ue_id & ~0xFFFF | publisher.ue_id & 0xFFFF, 7, topic.resource_id)
    assert ids.covers(service, own)
    assert (ids.of_publisher(topic) == service) is is_own


@given(PUBLISHERS, st.sampled_from([ids.DESCRIBE, ids.POLL, ids.COMMAND, ids.FRAMES, ids.ANNOUNCEMENTS]))
def test_a_publishers_service_is_an_instance_of_the_streamers_and_found_by_a_wildcard(
    publisher: UUri, resource: int
) -> None:
    made = ids.of_publisher(publisher, resource)
    assert (made.ue_id & 0xFFFF, made.ue_version_major, made.resource_id) == (ids.ENTITY, ids.VERSION, resource)
    assert made.ue_id >> 16 == publisher.ue_id & 0xFFFF
    assert made != ids.at(publisher.authority_name, resource)
    wildcard = ids.of_publisher(uris.ANY, resource)
    assert uris.format(wildcard) == f"up://*/FFFF0004/1/{resource:X}"
    assert uris.matches(wildcard, made)


@given(AUTHORITIES, TOPICS)
def test_a_streamer_covers_all_and_who_is_no_history_nothing(authority: str, topic: UUri) -> None:
    assert ids.covers(ids.at(authority), topic)
    assert not ids.covers(uris.uri(topic.authority_name, (topic.ue_id & 0xFFFF) << 16 | ids.ENTITY, 2), topic)
    assert not ids.covers(uris.uri(topic.authority_name, (topic.ue_id & 0xFFFF) << 16 | 5, 1), topic)


@given(AUTHORITIES, INSTANCES)
def test_usubscription_can_have_no_history_of_its_own(authority: str, instance: int) -> None:
    with pytest.raises(UStatusError) as error:
        ids.of_publisher(uris.uri(authority, instance << 16, 3))
    assert error.value.code == UCode.INVALID_ARGUMENT
