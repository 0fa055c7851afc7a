"""GET /stream: nothing lost, nothing doubled, whatever the client, the feed and the log do."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
from aiohttp import web

from history.epochs.groups import Group
from history.log.log import Log
from history.service.keeper import Keeper
from history.service.matches import Sight, Sights
from streamer.config.edge import HttpSection
from streamer.edge import feeds
from streamer.edge.callers import Callers
from streamer.edge.server import EdgeServer
from streamer.edge.streams import HttpStreams
from streamer.http.places import Places
from tests.history.test_epochs_whole import FRONTIERS, START_MS, message
from tests.history.world import HistoryWorld, publishes
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import PollRequest, Sample
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

A, B = uris.uri("vehicle", 0x20, 1, 0x8001), uris.uri("vehicle", 0x20, 1, 0x8002)
CLIENT = uris.uri("phone", 0x8000, 1)
TEXT = UPayloadFormat.UPAYLOAD_FORMAT_TEXT
WAIT_S = 20


@dataclass
class Sse:
    """An event of a stream."""

    id: str = ""
    name: str = ""
    data: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def text(self) -> str:
        return str(self.json["text"])


class AnyCaller(Callers):
    """Everybody may read, until `withdrawn`."""

    withdrawn = False

    async def of(self, request: web.Request) -> UUri:
        return CLIENT

    def still_allowed(self, request: web.Request, caller: UUri) -> bool:
        return not self.withdrawn


class Reader:
    """The events of one response."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.last_id = ""
        self.raw = b""

    async def next(self) -> Sse | None:
        """Returns the next event with data; None at the end of the stream."""
        event = Sse()
        while True:
            line = await asyncio.wait_for(self.response.content.readline(), WAIT_S)
            if not line:
                return None
            self.raw += line
            name, _, value = line.decode().rstrip("\n").partition(": ")
            match name:
                case "id":
                    self.last_id = event.id = value
                case "event":
                    event.name = value
                case "data":
                    event.data += value
                case "" if event.data:
                    return event

    async def texts(self, count: int) -> list[str]:
        found = []
        for _ in range(count):
            event = await self.next()
            assert event is not None, f"the stream ended after {found}"
            found.append(event.text)
        return found

    async def until_id(self) -> None:
        """Wait for the id without data that says where the client is."""
        while not self.last_id:
            line = await asyncio.wait_for(self.response.content.readline(), WAIT_S)
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                self.last_id = value


class World(HistoryWorld):
    port = 0  # any free one

    async def start(self, path: Path | None = None, section: HttpSection | None = None, **log: Any) -> None:
        durable = await Log.open(path / "history.db" if path else None, name="durable", **log)
        await self.start_with(durable, await Log.open(None, name="volatile"), section=section)

    async def start_with(self, *logs: Log, section: HttpSection | None = None, **service: Any) -> None:
        await self.open(*logs, **service)
        section = (section or HttpSection()).model_copy(update={"listen": f"127.0.0.1:{self.port}"})
        self.places = Places(section.clients_max)
        self.callers = AnyCaller(section, "gateway", self.places.refused)
        self.streams = HttpStreams(self.service, self.callers, section, self.places)
        self.server = EdgeServer(section, self.streams.get, callers=self.callers, places=self.places)
        self.port = await self.server.open()
        self.session = aiohttp.ClientSession()

    async def publish(self, *texts: str, topic: UUri = A, log: int = 0, format: int = TEXT) -> None:
        for text in texts:
            await self.append_all(self.logs[log], publishes([topic], text.encode(), format))

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def cut(self) -> None:
        """Cut all connections."""
        listener = self.server._listener
        assert listener is not None
        listener.lines.abort()

    @asynccontextmanager
    async def reader(self, query: str = "topic=//vehicle/20/1/8001", **headers: str) -> AsyncIterator[Reader]:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.get(self.url(f"/stream?{query}"), headers=given) as response:
            yield Reader(response)

    async def get(self, query: str) -> tuple[int, Any]:
        async with self.session.get(self.url(f"/stream?{query}")) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text

    async def finish(self) -> None:
        self.streams.close()
        await self.session.close()
        await self.server.close()
        await self.close()


async def becomes(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - of another task, which sends no event
            await asyncio.sleep(0.01)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World()
    await world.start(tmp_path)
    yield world
    await world.finish()


async def test_history_and_live_in_one_request(world: World) -> None:
    await world.publish("1", "2")
    async with world.reader("topic=//vehicle/20/1/8001&since=earliest") as reader:
        assert reader.response.headers["Content-Type"] == "text/event-stream"
        assert await reader.texts(2) == ["1", "2"]
        await world.publish("3")
        event = await reader.next()
        assert event is not None
        assert event.json.keys() == {"topic", "id", "time", "seq", "text"}
        assert (event.json["topic"], event.json["text"], event.json["seq"]) == ("up://vehicle/20/1/8001", "3", 3)


async def test_without_since_it_begins_with_what_comes(world: World) -> None:
    await world.publish("old")
    async with world.reader() as reader:
        await reader.until_id()
        await world.publish("new")
        assert await reader.texts(1) == ["new"]


async def test_a_client_that_was_cut_before_its_first_event_goes_on_where_it_was(world: World) -> None:
    async with world.reader() as reader:
        await reader.until_id()
    await world.publish("1", "2")
    async with world.reader(Last_Event_ID=reader.last_id) as reader:
        assert await reader.texts(2) == ["1", "2"]


async def test_over_cuts_at_every_event_each_record_comes_once_and_in_order(world: World) -> None:
    """Both logs, two topics, a cut after each event, and records that come meanwhile."""
    query, found, last = "topic=//vehicle/20/1/8001&topic=//vehicle/20/1/8002&since=earliest", list[str](), ""
    number = 0
    for round in range(12):
        for _ in range(3):
            await world.publish(f"{number}", topic=B if number % 2 else A, log=number % 3 == 0)
            number += 1
        headers = {"Last_Event_ID": last} if last else {}
        async with world.reader(query, **headers) as reader:
            found += await reader.texts(1 + round % 3)
            last = reader.last_id
    async with world.reader(query, Last_Event_ID=last) as reader:
        found += await reader.texts(number - len(found))
        await world.publish("end")
        assert await reader.texts(1) == ["end"]
    assert sorted(found, key=int) == [str(one) for one in range(number)]
    for log in (0, 1):
        of_log = [one for one in found if (int(one) % 3 == 0) == bool(log)]
        assert of_log == sorted(of_log, key=int)


async def test_many_clients_share_one_reader(world: World) -> None:
    async with world.reader() as one, world.reader() as two, world.reader("topic=//vehicle/20/1/8002") as other:
        for reader in (one, two, other):
            await reader.until_id()
        await world.publish("1")
        await world.publish("2", topic=B)
        assert [await one.texts(1), await two.texts(1), await other.texts(1)] == [["1"], ["1"], ["2"]]
        assert world.streams.feeds == 2
        assert one.last_id == two.last_id
    await becomes(lambda: not world.places.count["stream"])
    assert world.streams.feeds == 0


async def test_a_slow_client_reads_on_from_the_history(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has not taken is not kept for it: not by the feed, and not in a queue."""
    monkeypatch.setattr(feeds, "KEPT_BYTES_MAX", 2_000)
    async with world.reader() as slow, world.reader() as fast:
        await slow.until_id()
        await fast.until_id()
        big = "x" * 20_000
        for number in range(400):  # 8 MB, more than all buffers of the connection
            await world.publish(f"{number} {big}")
        assert [text.split()[0] for text in await fast.texts(400)] == [str(one) for one in range(400)]
        assert [text.split()[0] for text in await slow.texts(400)] == [str(one) for one in range(400)]


async def test_a_client_that_takes_nothing_is_cut_off_and_resumes_without_loss(tmp_path: Path) -> None:
    world = World()
    await world.start(tmp_path, HttpSection(send_s=0.3))
    try:
        for number in range(600):
            await world.publish(f"{number} " + "x" * 20_000)
        found, last = list[str](), ""
        async with world.reader("topic=//vehicle/20/1/8001&since=earliest") as reader:
            await becomes(lambda: bool(world.places.refused["slow reader"]))
            try:
                while (event := await reader.next()) is not None:
                    found.append(event.text.split()[0])
                    last = event.id
            except aiohttp.ClientError:
                pass
        assert len(found) < 600
        async with world.reader(Last_Event_ID=last) as reader:
            found += [text.split()[0] for text in await reader.texts(600 - len(found))]
        assert found == [str(one) for one in range(600)]
    finally:
        await world.finish()


async def test_retention_passed_is_a_gap_and_then_the_oldest_record(tmp_path: Path) -> None:
    world = World()
    await world.start(None, retention_bytes=60_000)
    try:
        await world.publish("first")
        _, page = await world.get("topic=//vehicle/20/1/8001&since=earliest&mode=poll")
        for number in range(200):
            await world.publish(f"{number} " + "x" * 1_000)
        await becomes(lambda: world.logs[0].floor_seq >= 5)
        floor = world.logs[0].floor_seq
        async with world.reader(Last_Event_ID=page["next"]) as reader:
            gap = await reader.next()
            assert gap is not None
            assert (gap.name, gap.json["reason"], gap.json["after"]) == ("gap", "retention", 1)
            assert gap.json["before"] >= floor + 1
            event = await reader.next()
            assert event is not None
            assert event.json["seq"] == gap.json["before"]
        status, page = await world.get(f"topic=//vehicle/20/1/8001&since={page['next']}&mode=poll")
        assert (status, page["gaps"][0]["reason"]) == (410, "retention")
        status, page = await world.get(f"topic=//vehicle/20/1/8001&since={page['next']}&mode=poll&max=1")
        assert (status, page["events"][0]["seq"]) == (200, world.logs[0].floor_seq + 1)
    finally:
        await world.finish()


async def test_a_restart_is_a_gap_for_who_has_read_the_volatile_log_though_its_feed_has_not(tmp_path: Path) -> None:
    """The feed begins at the end: all that it knows of the volatile log is what it reads itself."""
    world = World()
    await world.start(tmp_path)
    try:
        await world.publish("durable")
        await world.publish("volatile", log=1)
        async with world.reader() as live, world.reader("topic=//vehicle/20/1/8001&since=earliest") as reader:
            await live.until_id()
            assert await reader.texts(2) == ["durable", "volatile"]
            ids = [reader.last_id]
            for text in ("more", "still more"):
                await world.publish(text)
                assert await reader.texts(1) == [text]
                ids.append(reader.last_id)
            never_read = live.last_id
        await world.publish("lost", log=1)
    finally:
        await world.finish()
    again = World()
    await again.start(tmp_path)
    try:
        for id in ids:
            async with again.reader(Last_Event_ID=id) as reader:
                event = await reader.next()
                assert event is not None
                assert (event.name, event.json["reason"]) == ("gap", "log_ended")
        async with again.reader(Last_Event_ID=never_read) as reader:
            assert await reader.texts(2) == ["more", "still more"]
    finally:
        await again.finish()


async def test_polls_and_streams_have_the_same_truth(world: World) -> None:
    await world.publish("1", "2", "3")
    status, page = await world.get("topic=//vehicle/20/1/8001&since=earliest&mode=poll&max=2")
    assert (status, [one["text"] for one in page["events"]], page["more"]) == (200, ["1", "2"], True)
    status, rest = await world.get(f"topic=//vehicle/20/1/8001&mode=poll&since={page['next']}")
    assert (status, [one["text"] for one in rest["events"]], rest["more"]) == (200, ["3"], False)
    async with world.reader(Last_Event_ID=page["next"]) as reader:
        assert await reader.texts(1) == ["3"]
    status, empty = await world.get(f"topic=//vehicle/20/1/8001&mode=poll&since={rest['next']}")
    assert (status, empty["events"]) == (200, [])
    waiting = asyncio.create_task(world.get(f"topic=//vehicle/20/1/8001&mode=poll&wait=20000&since={rest['next']}"))
    await asyncio.sleep(0)
    await world.publish("4")
    status, late = await waiting
    assert [one["text"] for one in late["events"]] == ["4"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", "expected topic="),
        ("topic=nonsense", "up://"),
        ("topic=//vehicle/20/1/0", "is not a topic"),
        ("topic=//v/20/1/8001&since=soon", "expected earliest, latest"),
        ("topic=//v/20/1/8001&since=pxyz", "expected the id of an event"),
        ("topic=//v/20/1/8001&since=eAAAA", "expected earliest, latest"),
        ("topic=//v/20/1/8001&since=eAAAA&epochs=atomic", "expected the id of an epoch"),
        ("topic=//v/20/1/8001&format=xml", "expected format to be one of json, umessage"),
        ("topic=//v/20/1/8001&max=5", "max is for mode=poll"),
        ("topic=//v/20/1/8001&mode=poll&max=0", "a number from 1 to 10000"),
        ("topic=//v/20/1/8001&mode=poll&mode=poll", "expected mode once"),
        ("topic=//v/20/1/8001&topics=x", "unknown parameter 'topics'"),
        ("topic=//v/20/1/8001&epochs=atomic&mode=poll", "epochs=atomic is for streams of JSON"),
    ],
)
async def test_a_wrong_request_says_what_was_expected(world: World, query: str, expected: str) -> None:
    status, text = await world.get(query)
    assert status == 400
    assert expected in text


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        ("1970-01-01T00:00:00Z", 2),
        ("1970-01-01", 2),
        ("2100-01-01T01:00:00+01:00", 0),  # in a URL, + is a space
        ("2100-01-01T01:00:00%2B01:00", 0),
        ("2100-01-01 00:00:00", 0),
        ("0", 2),
        ("4102444800000", 0),
        ("4102444800", "got 4102444800, which is in 1970: are these seconds?"),
        ("2100-13-01", "expected earliest, latest, the id of an event, a time"),
    ],
)
async def test_since_a_time(world: World, since: str, expected: int | str) -> None:
    await world.publish("1", "2")
    status, page = await world.get(f"topic=//vehicle/20/1/8001&mode=poll&since={since}")
    if isinstance(expected, str):
        assert status == 400
        assert expected in page
    else:
        assert (status, len(page["events"])) == (200, expected)


async def test_who_may_read_nothing_is_refused(world: World) -> None:
    class Nothing(Sights):
        def of(self, caller: UUri) -> Sight:
            raise UStatusError(UCode.PERMISSION_DENIED, "nothing may be read")

    world.service._sights = Nothing()
    assert (await world.get("topic=//vehicle/20/1/8001"))[0] == 403
    assert (await world.get("topic=//vehicle/20/1/8001&mode=poll"))[0] == 403


async def test_overload_is_200_and_a_time_to_come_back(tmp_path: Path) -> None:
    world = World()
    await world.start(tmp_path, HttpSection(clients_max=1))
    try:
        async with world.reader() as first:
            await first.until_id()
            async with world.reader() as second:
                assert second.response.status == 200
                assert (await second.response.content.read()).startswith(b"retry: 5000\n")
            status, _ = await world.get("topic=//vehicle/20/1/8001&mode=poll")
            assert status == 429
            await world.publish("1")
            assert await first.texts(1) == ["1"]
    finally:
        await world.finish()


async def test_a_withdrawn_token_ends_the_stream(world: World) -> None:
    async with world.reader() as reader:
        await reader.until_id()
        world.callers.withdrawn = True
        world.places.look()
        await world.publish("secret")
        with pytest.raises(aiohttp.ClientError):  # cut off: the next request is refused
            await reader.next()
        assert b"secret" not in reader.raw
    assert world.places.refused["token"] == 1


async def test_the_edge_ends_its_streams_when_it_stops(world: World) -> None:
    async with world.reader() as reader:
        await reader.until_id()
        world.streams.close()
        assert await reader.next() is None


@pytest.mark.parametrize(
    ("payload", "format", "expected"),
    [
        (Sample(path="Vehicle.Speed", double_value=12.5).SerializeToString(), "PROTOBUF", ("sample", 12.5)),
        (b"plain", "TEXT", ("text", "plain")),
        (b'{"a": [1, null]}', "JSON", ("json", {"a": [1, None]})),
        (b'{"a": NaN}', "JSON", ("payload", "eyJhIjogTmFOfQ==")),
        (b"1e999", "JSON", ("payload", "MWU5OTk=")),
        (b'"\\ud800"', "JSON", ("json", "\ud800")),
        (b"[" * 200_000 + b"]" * 200_000, "JSON", ("payload", None)),
        (b"\xff\x00", "TEXT", ("payload", "/wA=")),
        (b"\x01\x02", "SOMEIP", ("payload", "AQI=")),
    ],
)
async def test_payloads(world: World, payload: bytes, format: str, expected: tuple[str, Any]) -> None:
    number = UPayloadFormat.Value(f"UPAYLOAD_FORMAT_{format}")
    await world.append_all(world.logs[0], publishes([A], payload, number))
    _, page = await world.get("topic=//vehicle/20/1/8001&since=earliest&mode=poll")
    (event,), (key, value) = page["events"], expected
    found = event[key]["value"] if key == "sample" else event[key]
    assert found == value or value is None


async def test_a_umessage_comes_as_it_is(world: World) -> None:
    await world.publish("1")
    async with world.reader("topic=//vehicle/20/1/8001&since=earliest&format=umessage") as reader:
        event = await reader.next()
        assert event is not None
        message = UMessage.FromString(base64.b64decode(event.data))
        assert (message.payload, message.attributes.source) == (b"1", A)


async def test_an_idle_stream_has_comments(tmp_path: Path) -> None:
    world = World()
    await world.start(tmp_path, HttpSection(keep_alive_s=0.05))
    try:
        async with world.reader() as reader:
            await reader.until_id()
            while not (line := await asyncio.wait_for(reader.response.content.readline(), WAIT_S)).startswith(b":"):
                pass
            assert line == b": ping\n"
    finally:
        await world.finish()


async def test_the_id_of_an_idle_client_moves_with_the_log(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is deleted meanwhile, and is not for it, is no gap for it."""
    monkeypatch.setattr(feeds, "WAIT_MS", 50)
    async with world.reader() as reader:
        await reader.until_id()
        before = reader.last_id
        await world.publish("other", topic=B)
        reader.last_id = ""
        await reader.until_id()
        assert reader.last_id != before
    await world.publish("1")
    async with world.reader(Last_Event_ID=reader.last_id) as again:
        assert await again.texts(1) == ["1"]


async def test_epochs_come_whole_and_once_over_cuts(tmp_path: Path) -> None:
    """Two signals, a value of each in every second; the client is cut after each epoch."""
    topics = [uris.uri("car", 0x10, 1, 0x8001), uris.uri("car", 0x10, 1, 0x8002)]
    group = Group("second", [uris.uri("car", 0x10, 1, 0xFFFF)], 1_000, timeout_ms=60_000)
    log, now_ms, dice = await Log.open(tmp_path / "history.db", name="durable"), START_MS, random.Random(1)
    keeper = Keeper(FRONTIERS, [group], [log], lambda: now_ms)
    await keeper.open()
    world = World()
    await world.start_with(log, keeper=keeper)
    query, found, last = "topic=//car/10/1/FFFF&epochs=atomic&since=earliest", list[Any](), ""
    try:
        for second in range(8):
            now_ms = START_MS + second * 1_000
            for topic in topics:
                await world.append_all(log, [message(topic, now_ms + 10, dice)])
            headers = {"Last_Event_ID": last} if last else {}
            async with world.reader(query, **headers) as reader:
                await reader.until_id()
                if second:  # it ended the second before
                    event = await reader.next()
                    assert event is not None
                    found.append(event.json)
                last = reader.last_id
        assert [one["time"][0] for one in found] == [START_MS + second * 1_000 for second in range(7)]
        assert all(one["complete"] and len(one["records"]) == 2 for one in found)
        assert {one["group"] for one in found} == {"second"}
    finally:
        keeper.close()
        await world.finish()


async def test_one_client_leaves_turns_at_the_history_for_others(world: World) -> None:
    await world.publish(*map(str, range(50)))
    done = list[str]()

    async def read(who: UUri) -> None:
        await world.service.read(who, PollRequest(topics=[A], earliest=True))
        done.append(who.authority_name)

    await asyncio.gather(*(read(CLIENT) for _ in range(100)), read(uris.uri("other", 0x8000, 1)))
    assert done.index("other") < 50


async def test_one_client_leaves_places_for_others(world: World) -> None:
    world.places._each_max = 1
    async with world.reader() as first:
        await first.until_id()
        with structlog.testing.capture_logs() as logs:
            status, text = await world.get("topic=//vehicle/20/1/8001&mode=poll")
        assert status == 429
        assert text == "too many streams of up://phone/8000/1/0 (http.client_streams_max): come back later\n"
        assert logs[0]["event"] == "clients of the HTTP edge are told to come back later"
        assert logs[0]["why"] in text
        assert world.places.refused["overload"] == 1

        async def of(request: web.Request) -> UUri:
            return uris.uri("tablet", 0x8000, 1)

        world.callers.of = of  # type: ignore[method-assign]
        assert (await world.get("topic=//vehicle/20/1/8001&mode=poll"))[0] == 200
