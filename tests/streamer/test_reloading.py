"""A changed configuration that a running streamer takes over."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from campaigns.simulation.network import FaultyNetwork
from streamer.config import Config, loads
from streamer.config.changes import appliable, differences, restarts
from streamer.operating.control import ControlSocket, call
from streamer.parts.edge import EdgePart
from streamer.parts.reloading import Reloader
from tests.streamer.conftest import THREE, MakeWorld, World, publication
from tests.streamer.conftest import changed as changed
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

DOOR = "//vehicle1/9001/1/8001"
AT_CLOUD = {DOOR: ["//cloud/8001/1/0"]}


def section(name: str, **keys: Any) -> dict[str, Any]:
    made = {"name": name, "transport": "local", "authorities": [f"{name}1"], "usubscription": "none"}
    return made | {"settings": {"network": f"reloaded-{name}"}} | keys


def table(section: BaseModel, keys: dict[str, Any]) -> dict[str, Any]:
    """Returns what is given in a section, with other values of some keys."""
    return section.model_dump(exclude_unset=True) | keys


def with_endpoint(config: Config, changing: str, **keys: Any) -> Config:
    """Returns the configuration with other keys of one endpoint."""
    ones = [one.model_dump(exclude_unset=True) | (keys if one.name == changing else {}) for one in config.endpoint]
    return changed(config, endpoint=ones)


async def reload(world: World, config: Config, *, dry_run: bool = False) -> list[str]:
    return await world.reload(config, dry_run=dry_run)


@contextlib.asynccontextmanager
async def publishing(world: World, topic: str = DOOR) -> AsyncIterator[list[str]]:
    """Publishes "0", "1", ... all the time; yields what was accepted."""
    node = await world.node("vehicle", "vehicle1", 0x9001)
    accepted: list[str] = []

    async def run() -> None:
        for number in range(1_000_000):
            await node.send(publication(topic, str(number)))
            accepted.append(str(number))
            await asyncio.sleep(0)

    task = asyncio.create_task(run())
    try:
        await world.until(lambda: len(accepted) > 20)
        yield accepted
        count = len(accepted)
        await world.until(lambda: len(accepted) > count + 20)
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_file_that_says_the_same_changes_nothing(make_world: MakeWorld) -> None:
    world = await make_world()
    transports = [one.transport for one in world.assembly.endpoints]
    assert await reload(world, world.config) == []
    assert [one.transport for one in world.assembly.endpoints] == transports


async def test_each_difference_is_shown_and_takes_effect(make_world: MakeWorld) -> None:
    world = await make_world({"vehicle": "", "cloud": "none"}, AT_CLOUD)
    streamer, config = world.streamer, world.config
    world.networks["diag"] = FaultyNetwork.named("reloaded-diag")
    ways = [{"from": "vehicle", "to": "diag"}, {"from": "vehicle", "to": "cloud", "deny": ["//vehicle1/9001/1/8002"]}]
    new = changed(
        config,
        endpoint=[*config.endpoint, section("diag")],
        rule=ways,
        history=table(config.history, {"record": [DOOR], "retention_mib": 77, "retention_hours": 2}),
        egress=table(config.egress, {"retry_max_ms": 30}),
    )
    expected = [
        "+ endpoint diag",
        "- rule cloud -> vehicle",
        "+ rule vehicle -> diag",
        "~ rule vehicle -> cloud: deny +//vehicle1/9001/1/8002",
        f"~ history.record: +{DOOR}",
        "~ history.retention_hours: 168 -> 2",
        "~ history.retention_mib: 1024 -> 77",
        "~ egress.retry_max_ms: 20 -> 30",
    ]
    assert await reload(world, new, dry_run=True) == expected
    assert "diag" not in streamer.assembly.endpoints
    assert await reload(world, new) == expected
    assert await reload(world, new) == []
    await world.until(lambda: streamer.assembly.networks.is_connected(streamer.assembly.endpoints["diag"]))
    assert streamer.assembly.logs.durable.retention_bytes == 77 << 20
    assert {(one.ingress, one.egress) for one in streamer.assembly.rules} == {("vehicle", "diag"), ("vehicle", "cloud")}
    assert streamer.assembly.rules.between("vehicle", "cloud").deny  # type: ignore[union-attr]
    assert await reload(world, config) == [
        "- endpoint diag",
        "- rule vehicle -> diag",
        "~ rule vehicle -> cloud: deny -//vehicle1/9001/1/8002",
        "+ rule cloud -> vehicle",
        f"~ history.record: -{DOOR}",
        "~ history.retention_hours: 2 -> 168",
        "~ history.retention_mib: 77 -> 1024",
        "~ egress.retry_max_ms: 30 -> 20",
    ]
    assert "diag" not in streamer.assembly.endpoints
    assert not any("do not fit the disk" in note for note in streamer.parts.notes())


async def test_topics_that_are_recorded_from_now_on_are_listened_to(make_world: MakeWorld) -> None:
    world = await make_world({"vehicle": "", "cloud": "none"}, {})
    node = await world.node("vehicle", "vehicle1", 0x9001)
    history = table(world.config.history, {"record": [DOOR]})
    await reload(world, changed(world.config, history=history))
    log = world.assembly.logs.durable

    async def recorded() -> bool:
        await node.send(publication(DOOR, "x"))
        return log.newest_seq > 0

    async with asyncio.timeout(20):
        while not await recorded():  # noqa: ASYNC110 - publishes until it is listened to
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("cloud", {"settings": {"network": "{n}-cloud", "tells_absence": False}}),
        ("cloud", {"authorities": ["cloud", "cloud2"]}),
        ("cloud", {"suffix": "vin1"}),
        ("cloud", {"followed_by": "//cloud/4/1/0"}),
        ("vehicle", {"authorities": ["vehicle1", "ecu2"]}),
        ("vehicle", {"hold": False}),
    ],
)
async def test_an_endpoint_that_changes_under_load_loses_and_doubles_nothing(
    make_world: MakeWorld, name: str, keys: dict[str, Any]
) -> None:
    world = await make_world({"vehicle": "", "cloud": "none"}, AT_CLOUD)
    keys = {key: value for key, value in keys.items() if key != "settings"} or {"hold": False}
    cloud = await world.node("cloud", "cloud")
    heard = await world.hear(cloud, uris.uri("*", 0x9001, 1, 0x8001))
    before = world.assembly.endpoints[name].transport
    new = with_endpoint(world.config, name, **keys)
    async with publishing(world) as accepted:
        (shown,) = await reload(world, new)
        assert shown.startswith(f"~ endpoint {name}: {next(iter(keys))}")
        is_opened = "followed_by" not in keys
        assert (world.assembly.endpoints[name].transport is not before) == is_opened
        await world.until(lambda: world.assembly.networks.is_connected(world.assembly.endpoints[name]))
        assert len(await reload(world, world.config)) == 1
    await world.until(lambda: heard.texts[-1:] == accepted[-1:])
    lost_while_closed = name == "vehicle"  # the network of the publisher is the one that is closed
    assert len(set(heard.texts)) == len(heard.texts)
    assert heard.texts == sorted(heard.texts, key=int)
    assert lost_while_closed or heard.texts == accepted


async def test_an_authority_moves_to_another_endpoint_with_its_backlog_in_the_log(make_world: MakeWorld) -> None:
    world = await make_world(THREE, AT_CLOUD)
    streamer = world.streamer
    ones = [one.model_dump(exclude_unset=True) for one in world.config.endpoint]
    for one in ones:
        one["authorities"] = {"mcu": ["mcu1", "cloud"], "cloud": ["cloud9"]}.get(one["name"], one["authorities"])
    heard = await world.hear(await world.node("mcu", "cloud"), uris.parse(DOOR))
    async with publishing(world) as accepted:
        await reload(world, changed(world.config, endpoint=ones))
        moved_at = len(accepted)
        assert streamer.assembly.endpoints.owner("cloud") is streamer.assembly.endpoints["mcu"]
    await world.until(lambda: heard.texts[-1:] == accepted[-1:])
    assert heard.texts[-len(accepted[moved_at:]) :] == accepted[moved_at:]


@pytest.mark.parametrize("running", [True, False])
async def test_a_renamed_endpoint_gets_what_waits_in_order(make_world: MakeWorld, running: bool) -> None:
    world = await make_world({"vehicle": "", "cloud": "none"}, AT_CLOUD)
    node = await world.node("vehicle", "vehicle1", 0x9001)
    transport = world.assembly.endpoints["cloud"].transport
    assert isinstance(transport, LocalTransport)
    heard = await world.hear(await world.node("cloud", "cloud"), uris.parse(DOOR))
    await world.assembly.paused.pause(uris.parse("//vehicle1/9001/1/8002"), "cloud")
    transport.disconnect()
    for number in range(50):
        await node.send(publication(DOOR, str(number)))
    await world.taken("vehicle")
    assert not heard.texts
    new = with_endpoint(world.config, "cloud", name="backend", renamed_from="cloud")
    if running:
        assert await reload(world, new) == [
            "- endpoint cloud",
            "+ endpoint backend: renamed from cloud, whose backlog it gets",
            "- rule vehicle -> cloud",
            "- rule cloud -> vehicle",
            "+ rule vehicle -> backend",
            "+ rule backend -> vehicle",
        ]
    else:
        world.config = new
        await world.restart()
    await world.until(lambda: len(heard.texts) == 50)
    assert heard.texts == [str(number) for number in range(50)]
    assert [one.peer for one in world.assembly.paused] == ["backend"]
    assert not world.assembly.claims.unclaimed
    assert await reload(world, new) == []


async def test_requests_and_responses_that_wait_for_a_renamed_endpoint_leave_under_its_new_name(
    make_world: MakeWorld,
) -> None:
    world = await make_world({"vehicle": "", "cloud": "none"})
    in_vehicle, in_cloud = await world.node("vehicle", "vehicle1", 0x9001), await world.node("cloud", "cloud")
    callers = uris.parse("//vehicle1/9001/1/0"), uris.parse("//cloud/8001/1/0")
    methods = uris.parse("//cloud/8001/1/7"), uris.parse("//vehicle1/9001/1/7")
    to_cloud = await world.hear(in_cloud, callers[0], methods[0])
    to_vehicle = await world.hear(in_vehicle, callers[1], methods[1])
    answers_in_vehicle = await world.hear(in_vehicle, methods[0], callers[0])
    answers_in_cloud = await world.hear(in_cloud, methods[1], callers[1])
    await in_cloud.send(UMessageBuilder.request(callers[1], methods[1], 60_000).build())
    await world.until(lambda: to_vehicle.messages)
    transport = world.assembly.endpoints["cloud"].transport
    assert isinstance(transport, LocalTransport)
    transport.disconnect()
    await in_vehicle.send(UMessageBuilder.response_for_request(to_vehicle.messages[0].attributes).build())
    await in_vehicle.send(UMessageBuilder.request(callers[0], methods[0], 60_000).build())
    await world.until(lambda: len(world.assembly.express.queues["cloud"]) == 2)
    await reload(world, with_endpoint(world.config, "cloud", name="backend", renamed_from="cloud"))
    await world.until(lambda: to_cloud.messages)
    await in_cloud.send(UMessageBuilder.response_for_request(to_cloud.messages[0].attributes).build())
    await world.until(lambda: answers_in_vehicle.messages and answers_in_cloud.messages)
    answers = [*answers_in_vehicle.messages, *answers_in_cloud.messages]
    assert [one.attributes.commstatus for one in answers] == [UCode.OK, UCode.OK]


async def test_what_needs_a_restart_is_reported_and_the_rest_is_applied(make_world: MakeWorld) -> None:
    world = await make_world({"vehicle": "", "cloud": "none"}, AT_CLOUD)
    config = world.config
    new = changed(
        config,
        streamer=table(config.streamer, {"data_dir": Path("elsewhere")}),
        history=table(config.history, {"volatile": [DOOR], "retention_mib": 55}),
        limits=table(config.limits, {"memory_mib": 99}),
    )
    restarts = [
        "! streamer.data_dir needs a restart",
        "! history.volatile needs a restart",
        "! limits.memory_mib needs a restart",
    ]
    assert await reload(world, new) == [*restarts, "~ history.retention_mib: 1024 -> 55"]
    assert world.streamer.config.streamer.data_dir == config.streamer.data_dir
    notes = "\n".join(world.parts.notes())
    assert "history.volatile needs a restart" in notes
    assert await reload(world, new) == restarts
    assert await reload(world, changed(config, history=table(config.history, {"retention_mib": 55}))) == []
    assert "needs a restart" not in "\n".join(world.parts.notes())


async def test_another_authority_of_the_streamer_changes_nothing_without_a_restart(make_world: MakeWorld) -> None:
    world = await make_world({"vehicle": "", "cloud": "none"}, AT_CLOUD)
    new = with_endpoint(world.config, "vehicle", authorities=["vehicle9"])
    with pytest.raises(UStatusError, match=r"streamer.authority needs a restart, and nothing"):
        await reload(world, new)
    assert "streamer.authority needs a restart" in "\n".join(world.parts.notes())


async def test_a_mistake_changes_nothing_and_is_noted_until_the_next_reload(make_world: MakeWorld) -> None:
    world = await make_world({"vehicle": "", "cloud": "none"}, AT_CLOUD)
    streamer = world.streamer

    def read() -> Config:
        return loads("[streamer]\nauthority = 7\n", "vehicle.toml")

    streamer.parts.of(Reloader).read = read
    for dry_run in (True, False):
        with pytest.raises(UStatusError, match=r"vehicle.toml:2: streamer.authority"):
            await streamer.parts.of(Reloader).reload(dry_run=dry_run)
    assert [
        one for one in streamer.parts.notes() if one.startswith("the last reload changed nothing") and "toml:2" in one
    ]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        admin = {"data_dir": world.config.streamer.data_dir, "admin": f"127.0.0.1:{taken.getsockname()[1]}"}
        with pytest.raises(UStatusError, match=r"can't be opened: Address already in use"):
            await reload(world, changed(world.config, streamer=admin))
    with pytest.raises(UStatusError) as error:
        await reload(world, with_endpoint(world.config, "cloud", settings={"network": 7}))
    assert error.value.code == UCode.INVALID_ARGUMENT
    assert streamer.config == world.config
    assert ("reloads", ("failed",), 3) in list(streamer.parts.samples())
    await reload(world, world.config)
    assert not [one for one in streamer.parts.notes() if "reload" in one]


async def test_the_admin_port_is_opened_closed_and_opened_elsewhere(make_world: MakeWorld) -> None:
    world = await make_world({"vehicle": "", "cloud": "none"}, AT_CLOUD)
    streamer, config = world.streamer, world.config
    ported = changed(config, streamer={"data_dir": config.streamer.data_dir, "admin": "127.0.0.1:0"})
    assert await reload(world, ported) == ["~ streamer.admin: none -> 127.0.0.1:0"]
    await world.until(lambda: streamer.admin.port)
    reader, writer = await asyncio.open_connection("127.0.0.1", streamer.admin.port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    port = streamer.admin.port
    assert await reload(world, config) == ["~ streamer.admin: 127.0.0.1:0 -> none"]
    await world.until(lambda: not streamer.admin.port)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_the_http_edge_serves_after_a_reload(make_world: MakeWorld) -> None:
    world = await make_world({"vehicle": "", "cloud": "none"}, AT_CLOUD)
    edged = changed(world.config, http={"listen": "127.0.0.1:0"})
    assert await reload(world, edged) == ["~ http.listen: none -> 127.0.0.1:0"]
    assert world.parts.of(EdgePart).port
    assert await reload(world, world.config) == ["~ http.listen: 127.0.0.1:0 -> none"]
    assert not world.parts.of(EdgePart).port


async def test_the_command_line_reloads(make_world: MakeWorld, tmp_path: Path) -> None:
    world = await make_world({"vehicle": "", "cloud": "none"}, AT_CLOUD)
    async with ControlSocket(tmp_path, world.streamer.operations):
        with pytest.raises(UStatusError, match="was not started from a file"):
            await asyncio.to_thread(call, tmp_path, "reload")
        world.parts.of(Reloader).read = lambda: with_endpoint(world.config, "cloud", hold=False)
        for dry_run in (True, False):
            answer = await asyncio.to_thread(call, tmp_path, "reload", {"dry_run": dry_run})
            assert answer == {"changes": ["~ endpoint cloud: hold True -> False"], "applied": not dry_run}


BASE = """
[streamer]
authority = "vehicle1"
[[endpoint]]
name = "vehicle"
transport = "local"
authorities = ["vehicle1"]
[[endpoint]]
name = "cloud"
transport = "mqtt5"
authorities = ["cloud"]
settings = { host = "a", username = "u", password = "secret-one" }
"""


def test_secrets_are_not_shown() -> None:
    old, new = loads(BASE), loads(BASE.replace("secret-one", "secret-two"))
    (found,) = differences(old, new)
    assert str(found) == "~ endpoint cloud: settings.password has changed"


@given(st.data())
def test_what_is_appliable_differs_from_the_file_only_by_what_needs_a_restart(data: st.DataObject) -> None:
    old, new = (_drawn(data) for _ in range(2))
    try:
        taken = appliable(old, new)
    except UStatusError:
        assert old.home.name != new.home.name or restarts(old, new)
        return
    assert [one for one in differences(old, taken) if one.sign == "!"] == []
    assert {one.sign for one in differences(taken, new)} <= {"!"}
    assert differences(new, new) == []


def _drawn(data: st.DataObject) -> Config:
    name = data.draw(st.sampled_from(["vehicle", "home"]))
    authorities = data.draw(st.lists(st.sampled_from(["ecu1", "*.vin", "ecu2"]), unique=True))
    return Config.model_validate(
        {
            "streamer": {"authority": "vehicle1", "data_dir": data.draw(st.sampled_from(["a", "b"]))},
            "endpoint": [
                {"name": name, "transport": "local", "authorities": ["vehicle1", *authorities]},
                {"name": "cloud", "transport": "local", "authorities": [data.draw(st.sampled_from(["c1", "c2"]))]},
            ],
            "history": {
                "record": data.draw(st.lists(st.sampled_from([DOOR, "//vehicle1/9001/1/8002"]), unique=True)),
                "volatile": data.draw(st.lists(st.just("//vehicle1/9001/1/8003"), max_size=1)),
            },
            "access": [{"callers": [f"//{one}/8001/1/0"]} for one in data.draw(st.lists(st.sampled_from("abc")))],
            "limits": {"memory_mib": data.draw(st.sampled_from([64, 128]))},
        }
    )
