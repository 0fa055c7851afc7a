"""Channels: items become publishes on the topics of their channels: committed, in order, once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from history.log.log import Log
from history.reading.client import HistoryClient
from history.reading.subscriber import GaplessSubscriber
from streamer.config.edge import ChannelSection
from streamer.grip import channels as made_of
from streamer.grip.channels import Channel, Channels, message_of
from streamer.grip.items import Item, ResponseFormat, StreamFormat
from streamer.parts.edge import EdgePart
from tests.tiers import seeds
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap, GapNotice
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

FRUIT, VOLATILE = uris.parse("//cloud/8001/1/8001"), uris.parse("//cloud/8001/1/8002")
NETWORKS = {"vehicle": "none", "cloud": "none"}
WAIT = "[grip]\npublish = '127.0.0.1:0'\nsequence_wait_s = {}\n"
CHANNELS = """[[channel]]
name = "fruit"
topic = "//cloud/8001/1/8001"
{}
[[channel]]
name = "brief"
topic = "//cloud/8001/1/8002"
[history]
volatile = ["//cloud/8001/1/8002"]
"""
FULL = UStatusError(UCode.RESOURCE_EXHAUSTED, "the disk is full")

MakeWorld = Any
World = Any


def grip(wait_s: float = 0.1, link: str = "") -> str:
    return WAIT.format(wait_s) + CHANNELS.format(f'link = "{link}"' if link else "")


def item(content: str, id: str | None = None, prev_id: str | None = None, channel: str = "fruit", **more: Any) -> Item:
    return Item(channel, id, prev_id, more.get("no_seq", False), StreamFormat(content.encode()), None)


def chain(*numbers: int, channel: str = "fruit") -> list[Item]:
    return [item(f"apple {number}", str(number), str(number - 1), channel) for number in numbers]


def channels_of(world: World) -> Channels:
    channels = world.parts.of(EdgePart).handlers.channels
    assert channels is not None
    return channels


async def recorded(world: World, topic: UUri = FRUIT) -> list[str]:
    log = world.assembly.logs.of(topic)
    messages = [UMessage.FromString(data) for chunk in await log.read(0) for data in chunk.data]
    return [message.payload.decode() for message in messages if message.attributes.source == topic]


def heard_by(world: World, name: str = "fruit") -> list[str]:
    heard: list[str] = []
    channels_of(world).listen(name, lambda item: heard.append(item.content.decode()))
    return heard


@contextlib.contextmanager
def refused(code: UCode.ValueType, what: str | None = None) -> Any:
    with pytest.raises(UStatusError, match=what) as error:
        yield
    assert error.value.code == code


async def test_items_are_committed_in_order_when_they_are_answered(make_world: MakeWorld) -> None:
    world = await make_world(NETWORKS, more=grip())
    channels, heard = channels_of(world), heard_by(world)
    assert channels.last_id("fruit") is None
    await channels.publish(chain(1, 2, 3))
    assert await recorded(world) == heard == ["apple 1", "apple 2", "apple 3"]
    assert channels.last_id("fruit") == "3"
    await channels.publish([])
    await channels.publish(chain(3))
    await channels.publish(chain(1, 2, 3))
    await channels.publish([item("no id")])
    assert await recorded(world) == heard == ["apple 1", "apple 2", "apple 3", "no id"]
    assert channels.last_id("fruit") is None
    counts = {labels[0]: value for _, labels, value in channels.samples()}
    assert counts == {"items": 4, "repeats": 4, "gaps": 0, "recovered": 0, "refused": 0, "overload": 0}


async def test_the_items_of_a_request_are_one_append(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world, sizes, append = await make_world(NETWORKS, more=grip()), list[int](), Log.append

    def counted(self: Log, streams: list[int], *more: Any) -> asyncio.Future[int]:
        sizes.append(len(streams))
        return append(self, streams, *more)

    monkeypatch.setattr(Log, "append", counted)
    await channels_of(world).publish(chain(*range(1, 1_001)))
    assert sizes == [1_000]
    await asyncio.gather(*(channels_of(world).publish(chain(number)) for number in range(1_001, 1_101)))
    assert len(sizes) <= 3, "what comes during an append goes with the next one"
    assert len(await recorded(world)) == 1_100


async def test_a_channel_that_is_not_configured_any_more_is_forgotten(make_world: MakeWorld) -> None:
    world = await make_world(NETWORKS, more=grip())
    await channels_of(world).publish(chain(1))
    world.config = world.config.model_copy(update={"channel": world.config.channel[1:]})
    await world.restart()
    await world.restart()
    assert [key for key in world.assembly.logs.durable.followed.positions() if key.startswith("@")] == []


async def test_a_blob_that_goes_back_to_what_it_was(make_world: MakeWorld) -> None:
    world = await make_world(NETWORKS, more=grip())
    for id, prev_id in (("A", "Z"), ("B", "A"), ("A", "B")):
        await channels_of(world).publish([item(id, id, prev_id)])
    assert await recorded(world) == ["A", "B", "A"]


async def test_the_same_request_after_a_restart_is_one_record(make_world: MakeWorld) -> None:
    world = await make_world(NETWORKS, more=grip())
    items = [*chain(1, 2), item("once", "x", no_seq=True), *chain(1, channel="brief")]
    await channels_of(world).publish(items)
    await world.restart()
    assert channels_of(world).last_id("fruit") == "2"
    heard = heard_by(world)
    await channels_of(world).publish(items)
    await channels_of(world).publish(chain(3))
    assert await recorded(world) == ["apple 1", "apple 2", "once", "apple 3"]
    assert heard == ["apple 3"]
    assert await recorded(world, VOLATILE) == ["apple 1"], "memory was lost with the first run, and its last id with it"


async def test_an_answer_that_fails_after_the_commit_is_one_record(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(NETWORKS, more=grip())
    outlet = channels_of(world)._channels["fruit"]._outlet
    store = outlet.store

    async def store_and_fail(*args: Any) -> None:
        await store(*args)
        raise asyncio.CancelledError  # as if the process had been killed

    monkeypatch.setattr(outlet, "store", store_and_fail)
    with refused(UCode.UNAVAILABLE):
        await channels_of(world).publish(chain(1, 2))
    await world.restart()
    await channels_of(world).publish(chain(1, 2))
    assert await recorded(world) == ["apple 1", "apple 2"]


async def test_items_out_of_order_wait_for_each_other(make_world: MakeWorld) -> None:
    world = await make_world(NETWORKS, more=grip(wait_s=30))
    channels, heard = channels_of(world), heard_by(world)
    await channels.publish(chain(1))
    answers = [asyncio.create_task(channels.publish(chain(number))) for number in (4, 3)]
    await asyncio.sleep(0.05)
    assert not any(answer.done() for answer in answers)
    await channels.publish(chain(2))
    await asyncio.gather(*answers)
    assert await recorded(world) == heard == [f"apple {number}" for number in (1, 2, 3, 4)]


async def test_an_item_goes_on_after_its_wait_and_the_gap_is_reported(make_world: MakeWorld) -> None:
    world = await make_world(NETWORKS, more=grip())
    vehicle = await world.node("vehicle", "vehicle1", 0x9001)
    notices = await world.hear(vehicle, ids.at("vehicle1", ids.GAPS))
    await channels_of(world).publish(chain(1))
    await channels_of(world).publish(chain(5))
    assert await recorded(world) == ["apple 1", "apple 5"]
    await notices.expect(1)
    (message,) = notices.messages
    notice = UPayload.of(message).unpack(GapNotice)
    assert notice.gap == Gap(reason=Gap.REASON_NETWORK)
    assert notice.detail == "of up://cloud/8001/1/8001, channel 'fruit': items before id '5', after '4'"
    counts = {labels[0]: value for _, labels, value in channels_of(world).samples()}
    assert counts["gaps"] == world.assembly.gaps.total == 1


async def test_a_volatile_topic(make_world: MakeWorld) -> None:
    world = await make_world(NETWORKS, more=grip())
    await channels_of(world).publish(chain(1, 2, channel="brief"))
    await channels_of(world).publish(chain(2, channel="brief"))
    assert await recorded(world, VOLATILE) == ["apple 1", "apple 2"]
    assert world.assembly.logs.durable.newest_seq == 0


async def test_an_unknown_channel_takes_nothing(make_world: MakeWorld) -> None:
    world = await make_world(NETWORKS, more=grip())
    for call in (channels_of(world).last_id, lambda name: channels_of(world).listen(name, print)):
        with refused(UCode.NOT_FOUND, "unknown channel 'veg'; known: fruit, brief"):
            call("veg")
    with refused(UCode.NOT_FOUND):
        await channels_of(world).publish([*chain(1), *chain(1, channel="veg")])
    assert await recorded(world) == []


async def test_a_full_disk_refuses_and_the_same_items_may_come_again(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(NETWORKS, more=grip())
    await channels_of(world).publish(chain(1))
    append = Log.append

    def full(self: Log, streams: list[int], messages: Sequence[Any], notes: Any = None) -> asyncio.Future[int]:
        self.healthy = False
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_exception(FULL)
        return future

    monkeypatch.setattr(Log, "append", full)
    with refused(UCode.UNAVAILABLE, "the log can't be written: the disk is full"):
        await channels_of(world).publish(chain(2, 3))
    assert channels_of(world).last_id("fruit") == "1"
    monkeypatch.setattr(Log, "append", append)
    world.assembly.logs.durable.healthy = True
    await channels_of(world).publish(chain(2, 3))
    assert await recorded(world) == ["apple 1", "apple 2", "apple 3"]


async def test_too_much_that_waits_is_refused(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_of, "PENDING_ITEMS_MAX", 2)
    world = await make_world(NETWORKS, more=grip(wait_s=30))
    channels = channels_of(world)
    await channels.publish(chain(1))
    waiting = asyncio.create_task(channels.publish(chain(3)))
    await asyncio.sleep(0)
    with refused(UCode.RESOURCE_EXHAUSTED, "1 items wait already"):
        await channels.publish(chain(5, 6))
    waiting.cancel()  # its client has gone: the item is taken all the same, and waits
    await asyncio.sleep(0)
    with refused(UCode.RESOURCE_EXHAUSTED):
        await channels.publish(chain(5, 6))
    await channels.publish(chain(2))
    await world.until(lambda: channels.last_id("fruit") == "3")
    await channels.publish(chain(4, 5))


async def test_what_waits_when_the_streamer_stops_is_refused(make_world: MakeWorld) -> None:
    world = await make_world(NETWORKS, more=grip(wait_s=30))
    channels = channels_of(world)
    await channels.publish(chain(1))
    waiting = asyncio.create_task(channels.publish(chain(3)))
    await asyncio.sleep(0.01)
    await world.stop()
    with refused(UCode.UNAVAILABLE):
        await waiting
    with refused(UCode.UNAVAILABLE):
        await channels.publish(chain(2))


async def test_a_fault_of_ours_is_answered_and_the_channel_goes_on(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(NETWORKS, more=grip())
    channels, message = channels_of(world), made_of.message_of
    monkeypatch.setattr(made_of, "message_of", lambda *_: 1 / 0)
    with refused(UCode.UNAVAILABLE):
        await channels.publish(chain(1))
    monkeypatch.setattr(made_of, "message_of", message)
    channels.listen("fruit", lambda _: 1 // 0)
    heard = heard_by(world)
    await channels.publish(chain(1))
    assert await recorded(world) == heard == ["apple 1"]


async def test_an_item_that_only_closes_is_heard_and_not_recorded(make_world: MakeWorld) -> None:
    world = await make_world(NETWORKS, more=grip())
    notices: list[Item] = []
    remove = channels_of(world).listen("fruit", notices.append)
    close = Item("fruit", "1", None, False, StreamFormat(closes=True), None)
    await channels_of(world).publish([close])
    assert (notices, await recorded(world), channels_of(world).last_id("fruit")) == ([close], [], "1")
    both = Item("fruit", "2", "1", False, StreamFormat(closes=True), ResponseFormat(body=b"last"))
    await channels_of(world).publish([both])
    assert (notices, await recorded(world)) == ([close, both], ["last"])
    remove()
    await channels_of(world).publish(chain(3))
    assert len(notices) == 2
    await world.restart()
    assert channels_of(world).last_id("fruit") == "3"


@pytest.mark.parametrize(
    ("content", "format"),
    [
        (b'{"a": 1}', UPayloadFormat.UPAYLOAD_FORMAT_JSON),
        (b"apple\n", UPayloadFormat.UPAYLOAD_FORMAT_TEXT),
        (b"NaN", UPayloadFormat.UPAYLOAD_FORMAT_TEXT),
        (b"[" * 100_000, UPayloadFormat.UPAYLOAD_FORMAT_TEXT),
        (b"9" * 10_000, UPayloadFormat.UPAYLOAD_FORMAT_TEXT),
        (b"", UPayloadFormat.UPAYLOAD_FORMAT_TEXT),
        (b"\xff\0", UPayloadFormat.UPAYLOAD_FORMAT_RAW),
    ],
)
def test_payload_formats(content: bytes, format: UPayloadFormat.ValueType) -> None:
    message = message_of(FRUIT, content)
    assert (message.payload, message.attributes.payload_format) == (content, format)


async def test_subscribers_of_the_topic_see_each_item_once(make_world: MakeWorld) -> None:
    """On the network of the topic, on another one that subscribes to it, and in the history."""
    rules = '[[rule]]\nfrom = "cloud"\nto = "vehicle"\n'
    world = await make_world(NETWORKS, {"//cloud/8001/1/8001": ["//vehicle1/9001/1/0"]}, more=rules + grip())
    cloud, vehicle = await world.node("cloud", "cloud", 0x9001), await world.node("vehicle", "vehicle1", 0x9001)
    there, elsewhere = await world.hear(cloud, FRUIT), await world.hear(vehicle, FRUIT)
    expected = [f"apple {number}" for number in range(1, 31)]
    async with AsyncExitStack() as stack:
        rpc = await stack.enter_async_context(InMemoryRpcClient(cloud, cloud.local))
        client = HistoryClient(rpc, uris.uri("vehicle1", 4, 1))
        subscriber = await stack.enter_async_context(GaplessSubscriber(client, [FRUIT]))
        records = aiter(subscriber)
        for number in range(1, 31, 3):
            await channels_of(world).publish(chain(number, number + 1, number + 2))
            await channels_of(world).publish(chain(number + 2))
        async with asyncio.timeout(20):
            assert [(await anext(records)).message.payload.decode() for _ in expected] == expected
    for hearer in (there, elsewhere):
        await hearer.expect(len(expected))
        assert hearer.texts == expected


class FailingOutlet:
    """Stores items or refuses them, at random."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.records, self.last = dice, list[int](), b""
        self.followed = self

    def log_of(self, _: UUri) -> FailingOutlet:
        return self

    def position(self, _: str) -> None:
        return None

    async def store(self, messages: list[Any], _: str, position: bytes) -> None:
        await asyncio.sleep(0)
        if self.dice.random() < 0.3:
            raise UStatusError(UCode.UNAVAILABLE, "try again")
        self.records += [int(message.payload) for message in messages]
        self.last = position

    async def send(self, _: Sequence[Any]) -> None:
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", seeds(30, quick=5))
async def test_publishers_that_try_again_at_any_time(seed: int) -> None:
    """One for each item, in any order, until it is taken."""
    dice = random.Random(seed)
    outlet = FailingOutlet(dice)
    channel = Channel(ChannelSection(name="fruit", topic="//cloud/8001/1/8001"), 60, outlet, None, print)  # type: ignore[arg-type]

    async def publish(number: int) -> None:
        offered = [Item("fruit", str(number), str(number - 1), False, StreamFormat(str(number).encode()), None)]
        while True:
            for _ in range(dice.randrange(5)):
                await asyncio.sleep(0)
            with contextlib.suppress(UStatusError):
                await asyncio.gather(*channel.offer(offered))
                return

    await publish(1)
    numbers = list(range(2, 60))
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for number in dice.sample(numbers, len(numbers)):
            group.create_task(publish(number))
    assert outlet.records == [1, *numbers]
    assert (outlet.last, channel.committed.ordered) == (b"59\n", "59")


# The link of a channel


class Backend:
    """Answers a link with what `state` has after the last id: the newest first."""

    def __init__(self) -> None:
        self.state: list[int] = []
        self.asked: list[str] = []
        self.answer: Callable[[], web.Response] | None = None
        self.sleeps_s = 0.0

    async def get(self, request: web.Request) -> web.Response:
        self.asked.append(request.headers["Grip-Last"])
        await asyncio.sleep(self.sleeps_s)
        if self.answer is not None:
            return self.answer()
        last = int(self.asked[-1].partition("last-id=")[2])
        later = [number for number in self.state if number > last]
        newest = max(self.state)
        return web.Response(
            text="".join(f"apple {number}\n" for number in later), headers={"Grip-Channel": f"fruit; prev-id={newest}"}
        )


@pytest.fixture
async def backend() -> AsyncIterator[tuple[Backend, str]]:
    made, application = Backend(), web.Application()
    application.router.add_get("/fruit", made.get)
    server = TestServer(application)
    await server.start_server()
    yield made, f"http://{server.host}:{server.port}/fruit"
    await server.close()


Linked = tuple[World, Backend, list[str]]
MakeLinked = Callable[[], Awaitable[Linked]]


@pytest.fixture
async def linked(make_world: MakeWorld, backend: tuple[Backend, str]) -> Linked:
    """After item 1."""
    world = await make_world(NETWORKS, more=grip(link=backend[1]))
    heard = heard_by(world)
    await channels_of(world).publish(chain(1))
    return world, backend[0], heard


async def test_a_gap_is_closed_by_the_link(linked: Linked) -> None:
    world, backend, heard = linked
    backend.state = [1, 2, 3, 4]
    await channels_of(world).publish(chain(5))
    assert await recorded(world) == ["apple 1", "apple 2\napple 3\napple 4\n", "apple 5"]
    assert heard == ["apple 1", "apple 5"]
    assert backend.asked == ["fruit; last-id=1"]
    assert channels_of(world).last_id("fruit") == "5"
    assert world.assembly.gaps.total == 0
    counts = {labels[0]: value for _, labels, value in channels_of(world).samples()}
    assert (counts["recovered"], counts["gaps"]) == (1, 0)
    await world.restart()
    assert channels_of(world).last_id("fruit") == "5"


@pytest.mark.parametrize("newest", [5, 7])
async def test_an_item_that_the_link_has_too_is_recorded_once(linked: Linked, newest: int) -> None:
    """Held streams hear it: they have not seen what was recovered, and so ask their own link."""
    world, backend, heard = linked
    backend.state = list(range(1, newest + 1))
    await channels_of(world).publish(chain(5))
    numbers = range(2, newest + 1)
    assert await recorded(world) == ["apple 1", "".join(f"apple {number}\n" for number in numbers)]
    assert heard == ["apple 1", "apple 5"]
    assert channels_of(world).last_id("fruit") == str(newest)
    await channels_of(world).publish(chain(newest + 1))
    assert (await recorded(world))[-1] == f"apple {newest + 1}"


async def test_an_answer_that_is_empty_and_goes_further_moves_the_last_id(linked: Linked) -> None:
    world, backend, _ = linked
    backend.answer = lambda: web.Response(headers={"Grip-Channel": "other; prev-id=1, fruit; prev-id=5"})
    await channels_of(world).publish(chain(5))
    assert await recorded(world) == ["apple 1"]
    await world.restart()
    assert channels_of(world).last_id("fruit") == "5"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda: web.Response(status=500), "has answered 500"),
        (lambda: web.Response(status=404), "has answered 404"),
        (lambda: web.Response(text="x"), "has no Grip-Channel: fruit; prev-id=ID"),
        (lambda: web.Response(headers={"Grip-Link": "</fruit>; rel=next"}), "more than 100 pages"),
        (lambda: web.Response(headers={"Grip-Channel": "fruit; prev-id=1"}), ""),
    ],
)
async def test_a_link_that_does_not_help_is_reported_and_asked_at_the_next_gap(
    linked: Linked, answer: Callable[[], web.Response], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_of, "REST_FACTOR", 0)
    world, backend, heard = linked
    backend.answer = answer
    await channels_of(world).publish(chain(5))
    assert await recorded(world) == heard == ["apple 1", "apple 5"]
    assert world.assembly.gaps.total == 1
    problems = [problem for problem in world.parts.problems() if "channel 'fruit'" in problem]
    assert len(problems) == bool(why)
    assert all(why in problem for problem in problems)
    backend.answer, backend.state = None, [1, 2, 3, 4, 5, 6, 7]
    await channels_of(world).publish(chain(8))
    assert (await recorded(world))[2:] == ["apple 6\napple 7\n", "apple 8"]
    assert not [problem for problem in world.parts.problems() if "channel" in problem]


async def test_a_link_that_never_answers(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    world, backend, _ = linked
    monkeypatch.setattr(made_of, "RECOVERY_S_MAX", 0.1)
    backend.sleeps_s = 30
    await channels_of(world).publish(chain(5))
    assert await recorded(world) == ["apple 1", "apple 5"]
    assert any("no answer within 0.1 s" in problem for problem in world.parts.problems())
    await channels_of(world).publish(chain(9))
    assert await recorded(world) == ["apple 1", "apple 5", "apple 9"]
    assert len(backend.asked) == 1, "a slow link is not asked again at once"
