"""A whole gateway and a REST history; a gate's bounds and reports."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
from aiohttp import web
from pydantic import BaseModel

from history.records.chunk import Chunk
from streamer.config import loads
from streamer.operating.metrics import expose
from streamer.parts import recovery as parts
from streamer.parts.recovery import RecoveryPart
from streamer.recovery import gates
from streamer.recovery_source import Fetched, RecoveryPlugin, RecoverySource, create
from tests.history.world import virtually
from tests.recovery.model import OTHER, TIMEOUT_S, TOPIC, ChainedSource, ModelSource, Recovered, number_of, publication
from tests.serving import serving
from tests.streamer.conftest import MakeWorld, World
from transports import plugin as plugins
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.status import UStatusError
from uprotocol.uri import format as text_of
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

NAME: Final = "//vehicle1/8001/1/8001"


class History:
    """A REST history of TOPIC."""

    def __init__(self) -> None:
        self.published: list[UMessage] = []
        self.status = 200
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        last = request.headers.get("Grip-Last", "").partition("last-id=")[2]
        ids = [uuids.format(one.attributes.id) for one in self.published]
        missed = self.published[ids.index(last) + 1 if last in ids else 0 :]
        lines = [{"id": uuids.format(one.attributes.id), "text": one.payload.decode()} for one in missed]
        return web.Response(text="".join(json.dumps(one) + "\n" for one in lines), status=self.status)


@pytest.fixture
async def history() -> AsyncIterator[History]:
    made, application = History(), web.Application()
    application.router.add_get("/drive", made.answer)
    async with serving(application) as url:
        made.url = f"{url}/drive"
        yield made


async def numbers_of(world: World, topic: UUri = TOPIC) -> list[int]:
    found: list[Chunk] = await world.assembly.logs.durable.read(0)
    messages = [one for chunk in found for one in chunk.messages]
    return [number_of(one) for one in messages if uris.key(one.attributes.source) == uris.key(topic)]  # type: ignore[arg-type]


async def until_numbers(world: World, expected: list[int]) -> None:
    async with asyncio.timeout(10):
        while await numbers_of(world) != expected:  # noqa: ASYNC110 - a log has no event for it
            await asyncio.sleep(0.02)


def recovery(history: History, more: str = "timeout_s = 1") -> str:
    return f'[[recovery]]\ntopics = ["//vehicle1/8001/1/FFFF"]\n{more}\n[recovery.settings]\nurl = "{history.url}"\n'


async def test_what_a_gateway_has_missed_while_it_was_down_comes_first(make_world: MakeWorld, history: History) -> None:
    world = await make_world(more=recovery(history))
    car = await world.node("vehicle", "vehicle1")
    sent = [publication(number) for number in range(1, 6)]
    for message in sent[:2]:
        history.published.append(message)
        await car.send(message)
    await until_numbers(world, [1, 2])
    await world.stop()
    history.published += sent[2:4]
    await world.start()
    history.published.append(sent[4])
    await car.send(sent[4])
    await until_numbers(world, [1, 2, 3, 4, 5])


async def test_what_was_missed_while_the_network_was_away_comes_first(make_world: MakeWorld, history: History) -> None:
    world = await make_world(more=recovery(history))
    car = await world.node("vehicle", "vehicle1")
    sent = [publication(number) for number in range(1, 5)]
    history.published.append(sent[0])
    await car.send(sent[0])
    await until_numbers(world, [1])
    transport: Any = world.assembly.endpoints["vehicle"].transport
    transport.disconnect()
    for message in sent[1:3]:
        history.published.append(message)
        await car.send(message)
    transport.reconnect()
    history.published.append(sent[3])
    await car.send(sent[3])
    await until_numbers(world, [1, 2, 3, 4])


async def test_a_source_is_not_asked_when_another_network_is_back(make_world: MakeWorld, history: History) -> None:
    world = await make_world(more=recovery(history))
    car = await world.node("vehicle", "vehicle1")
    await car.send(publication(1))
    await until_numbers(world, [1])
    (gate,) = world.parts.of(RecoveryPart)
    await world.until(lambda: not gate.is_asking)
    asked = gate.source.counts["asked"]
    other: Any = world.assembly.endpoints["cloud"].transport
    other.disconnect()
    other.reconnect()
    await asyncio.sleep(0.2)
    assert gate.source.counts["asked"] == asked
    own: Any = world.assembly.endpoints["vehicle"].transport
    own.disconnect()
    own.reconnect()
    await world.until(lambda: gate.source.counts["asked"] > asked)


async def test_what_was_missed_before_silence_comes_after_it(make_world: MakeWorld, history: History) -> None:
    world = await make_world(more=recovery(history, "timeout_s = 1\nidle_s = 0.1"))
    sent = publication(1)
    history.published.append(sent)
    car = await world.node("vehicle", "vehicle1")
    await car.send(sent)
    await until_numbers(world, [1])
    history.published.append(publication(2))
    await until_numbers(world, [1, 2])


async def test_a_source_that_is_away_is_a_condition_with_reason_and_since(
    make_world: MakeWorld, history: History
) -> None:
    history.status = 503
    world = await make_world(more=recovery(history))
    car = await world.node("vehicle", "vehicle1")
    await car.send(publication(1))
    await until_numbers(world, [1])
    (problem,) = [one for one in world.parts.problems() if "recovery" in one]
    assert "the recovery source http of //vehicle1/8001/1/FFFF does not answer" in problem
    assert " since 2" in problem
    assert "503" in problem
    assert world.assembly.gaps.total == 1
    exposed = expose(world.parts.samples).decode()
    assert 'up_streamer_recovery_total{source="http of //vehicle1/8001/1/FFFF",what="gaps"} 1.0' in exposed
    history.status = 200
    await world.until(lambda: not [one for one in world.parts.problems() if "recovery" in one])


async def test_one_source_serves_many_topics_of_a_pattern(make_world: MakeWorld, history: History) -> None:
    world = await make_world(more=recovery(history))
    car = await world.node("vehicle", "vehicle1")
    topics = [uris.parse(f"//vehicle1/8001/1/{0x8100 + number:X}") for number in range(50)]
    for topic in topics:
        await car.send(publication(1, topic))
    async with asyncio.timeout(10):
        for topic in topics:
            while await numbers_of(world, topic) != [1]:  # noqa: ASYNC110 - a log has no event for it
                await asyncio.sleep(0.02)
    assert len(list(world.parts.of(RecoveryPart))) == len(topics)


async def test_topics_beyond_the_limit_are_recorded_without_their_source(
    make_world: MakeWorld, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "GATES_MAX", 1)
    world = await make_world(more=recovery(history))
    car = await world.node("vehicle", "vehicle1")
    for topic in (TOPIC, OTHER):
        await car.send(publication(1, topic))
    await until_numbers(world, [1])
    assert await numbers_of(world, OTHER) == [1]
    assert any("more than 1 topics have a recovery source" in one for one in world.parts.problems())


# The configuration and plugins


def test_mistakes_have_their_line() -> None:
    head = '[[endpoint]]\nname = "a"\ntransport = "local"\nauthorities = ["vehicle1"]\n'
    section = f'[[recovery]]\ntopics = ["{NAME}"]\n'
    with pytest.raises(UStatusError, match=r"config:7: recovery: unknown recovery source 'none'; installed: .*http"):
        loads(head + section + 'source = "none"')
    with pytest.raises(UStatusError, match=r"config:7: recovery.0.settings.url: .*expected an address"):
        loads(head + section + 'settings = { url = "x" }')
    with pytest.raises(UStatusError, match=r"unknown key 'ur'.*did you mean 'url'"):
        loads(head + section + 'settings = { ur = "http://a/" }')


class NoSettings(BaseModel):
    pass


def _raises(_: NoSettings) -> RecoverySource:
    raise ValueError("no")


WRONG: Final = {
    "nothing": (None, "must name a streamer.recovery.source.RecoveryPlugin"),
    "model": (RecoveryPlugin("x", int, _raises), "config must be a pydantic model"),  # type: ignore[arg-type]
    "call": (RecoveryPlugin("x", NoSettings, 1), "create must be callable as create"),  # type: ignore[arg-type]
    "raises": (RecoveryPlugin("x", NoSettings, _raises), "can't be made from its settings: ValueError: no"),
    "other": (RecoveryPlugin("x", NoSettings, lambda _: 1), "must return a streamer.recovery.source.RecoverySource"),  # type: ignore[arg-type,return-value]
}


@pytest.mark.parametrize("name", [*WRONG, "missing"])
def test_a_wrong_plugin_is_said_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("x", "no_such_module:PLUGIN", "up_streamer.recovery")
    expected = "recovery source 'x' needs a module that is not installed"
    if name != "missing":
        found, expected = WRONG[name]
        monkeypatch.setattr(EntryPoint, "load", lambda _: found)
    monkeypatch.setattr(plugins, "names", lambda group: {"x": point})
    with pytest.raises(UStatusError) as error:
        create("x", {})
    assert error.value.code == UCode.FAILED_PRECONDITION
    assert expected in error.value.message
    assert "\n" not in error.value.message


async def test_the_source_in_the_documentation_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "edge.md").read_text()
    (code,) = [one for one in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "Drive" in one]
    module = ModuleType("drive_of_the_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(code, module.__dict__)
    for number in (1, 2, 10):
        (tmp_path / str(number)).write_bytes(publication(number).SerializeToString())
    plugin: RecoveryPlugin = module.PLUGIN
    source = plugin.create(plugin.config.model_validate({"folder": tmp_path}))
    fetched = await source.fetch(TOPIC, "1")
    assert [(source.position(one), source.predecessor(one)) for one in fetched.messages] == [("2", "1"), ("10", "9")]
    assert not fetched.more
    await source.close()


# Gates


def test_a_gap_lets_messages_wait_and_then_they_go_on_in_order(tmp_path: Path) -> None:
    async def run() -> None:
        world = Recovered(tmp_path)
        await world.start()
        await asyncio.sleep(1)
        world.publish()
        world.publish(lost=True)
        world.publish()
        await asyncio.sleep(0.001)
        assert world.acknowledged <= {1}
        await asyncio.sleep(0.5)
        assert await world.numbers() == [1, 2, 3]
        assert world.acknowledged == {1, 3}
        assert not [one for one in world.gaps if isinstance(one, str)]

    virtually(run())


def test_after_timeout_s_the_gap_is_reported_and_they_go_on(tmp_path: Path) -> None:
    async def run() -> None:
        world = Recovered(tmp_path)
        await world.start()
        await asyncio.sleep(1)
        world.publish()
        await asyncio.sleep(1)
        world.model.mode = "away"
        world.publish(lost=True)
        world.publish()
        await asyncio.sleep(TIMEOUT_S - 0.1)
        assert await world.numbers() == [1]
        await asyncio.sleep(0.2)
        assert await world.numbers() == [1, 3]
        assert world.reported() == {2}
        assert "is away" in world.life.source.trouble
        world.model.mode = ""
        await asyncio.sleep(30)
        assert not world.life.source.trouble
        world.check(await world.numbers())

    virtually(run())


@pytest.mark.parametrize("limit", ["WAITING_MESSAGES_MAX", "WAITING_BYTES_MAX"])
def test_too_many_that_wait_count_as_the_timeout(tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, limit, 3)

    async def run() -> None:
        world = Recovered(tmp_path, ModelSource)
        world.model.mode = "slow"
        await world.start()
        for _ in range(5):
            world.publish()
        await asyncio.sleep(0.1)
        assert await world.numbers() == [1, 2, 3, 4, 5]
        assert len(world.gaps) == 1

    virtually(run())


def test_a_source_that_lacks_the_oldest_leaves_a_gap_and_then_its_own(tmp_path: Path) -> None:
    async def run() -> None:
        world = Recovered(tmp_path)
        await world.start()
        await asyncio.sleep(1)
        world.publish()
        await asyncio.sleep(1)
        for _ in range(3):
            world.publish(lost=True)
        world.model.lacks = {2}
        world.publish()
        await asyncio.sleep(10)
        assert await world.numbers() == [1, 3, 4, 5]
        assert world.reported() == {2}

    virtually(run())


@pytest.mark.parametrize("mode", ["raises", "nothing", "huge", "position", "endless", "deaf"])
@pytest.mark.parametrize("make", [ChainedSource, ModelSource])
def test_a_wrong_source_is_bounded_counted_and_reported(tmp_path: Path, mode: str, make: type[ModelSource]) -> None:
    async def run() -> None:
        world = Recovered(tmp_path, make)
        world.model.mode = mode
        await world.start()
        world.publish(lost=True)
        world.publish()
        await asyncio.sleep(100)
        assert len(world.model.asked) < 100
        assert (await world.numbers())[-1] == 2
        assert world.life.source.counts["failed"]
        assert world.life.source.trouble

    virtually(run())


@pytest.mark.parametrize(
    ("mode", "count"), [("others", "invalid"), ("invalid", "invalid"), ("reversed", "out_of_order")]
)
def test_wrong_messages_are_counted_and_not_recorded(tmp_path: Path, mode: str, count: str) -> None:
    async def run() -> None:
        world = Recovered(tmp_path)
        await world.start()
        await asyncio.sleep(1)
        world.publish()
        await asyncio.sleep(1)
        world.model.mode = mode
        world.publish(lost=True)
        world.publish(lost=True)
        world.publish()
        await asyncio.sleep(1)
        assert await world.numbers() == [1, 2, 3, 4]
        assert world.life.source.counts[count]

    virtually(run())


def test_a_recovered_message_may_spell_its_topic_otherwise(tmp_path: Path) -> None:
    class Spelled(ModelSource):
        async def fetch(self, topic: UUri, after: str | None) -> Fetched:
            found = UMessage()
            found.CopyFrom(self.published[0])
            found.attributes.source.authority_name = "vehicle1.x1"
            return Fetched([found] if after is None else [])

    async def run() -> None:
        world = Recovered(tmp_path, Spelled)
        world.published.append(publication(1))
        await world.start()
        world.life.kill()
        world.inward = lambda name: name.removesuffix(".x1")
        await world.start()
        await asyncio.sleep(1)
        assert await world.numbers() == [1], world.life.source
        assert world.life.log is not None
        (chunk,) = await world.life.log.read(0)
        assert text_of(chunk.messages[0].attributes.source) == f"up:{NAME}"

    virtually(run())


def test_an_expired_message_is_passed_over(tmp_path: Path) -> None:
    async def run() -> None:
        world = Recovered(tmp_path)
        world.published.append(publication(1, id=world.ids(), ttl=1))
        world.published.append(publication(2, id=world.ids()))
        await asyncio.sleep(5)
        await world.start()
        await asyncio.sleep(1)
        assert await world.numbers() == [2]
        assert world.life.source.counts["expired"] == 1
        world.publish()
        await asyncio.sleep(0.1)
        assert await world.numbers() == [2, 3]

    virtually(run())


def test_what_waits_when_the_gateway_stops_is_not_acknowledged(tmp_path: Path) -> None:
    async def run() -> None:
        world = Recovered(tmp_path)
        world.model.mode = "slow"
        await world.start()
        world.publish()
        await asyncio.sleep(0.1)
        world.life.run(world.gate.stop)
        await asyncio.sleep(10)
        assert not world.acknowledged
        assert await world.numbers() == []

    virtually(run())
