"""States with reasons: of each endpoint and of the streamer, in /readyz, as metrics and in the log."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog

from streamer import app as apps
from streamer.config import loads
from streamer.operating import metrics, states
from streamer.operating.states import DEGRADED, NOT_READY, READY, Clocks, States
from streamer.parts.readiness import Readiness
from streamer.reporting import Condition
from streamer.walk.endpoint import Endpoint
from tools.broker import Broker
from transports.local import LocalNetwork, LocalTransport
from transports.ports import free_port
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.message import UMessageBuilder
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uuid_pb2 import UUID

MakeWorld = Any
WAIT_S = 20
HOUR_MS = 3_600_000
TOPIC = uris.parse("up://vehicle1/8001/1/8001")
CHANGED = "the state of an endpoint has changed"


def readyz(port: int) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def changes(lines: Sequence[Any]) -> list[tuple[str, str, str]]:
    """(endpoint, old state, new state) of those that were logged."""
    return [(line["endpoint"], line["was"], line["state"]) for line in lines if line["event"] == CHANGED]


# States


@pytest.fixture
def wrong() -> list[Condition]:
    return []


@pytest.fixture
def kept(wrong: list[Condition]) -> tuple[States, list[int]]:
    now = [1_700_000_000_000]
    return States(["cloud", "vehicle"], lambda: wrong, lambda: now[0]), now


def test_a_state_has_the_time_when_it_was_entered_and_the_worst_conditions_reason(
    kept: tuple[States, list[int]], wrong: list[Condition]
) -> None:
    all_of_them, now = kept
    all_of_them.look()
    assert all_of_them.as_dict() == {
        "status": READY,
        "streamer": {"state": READY, "since": (at := "2023-11-14T22:13:20.000Z"), "reason": "", "reason_since": at},
        "endpoints": {
            name: {"state": READY, "since": at, "reason": "", "reason_since": at} for name in ("cloud", "vehicle")
        },
    }
    now[0] += 1_000
    wrong += [Condition("one filter is refused", "cloud"), Condition("refused", "cloud", is_fatal=True)]
    all_of_them.look()
    cloud = all_of_them.as_dict()["endpoints"]["cloud"]
    assert (cloud["state"], cloud["since"]) == (NOT_READY, "2023-11-14T22:13:21.000Z")
    assert cloud["reason"] == "refused; one filter is refused"
    assert (all_of_them.worst, all_of_them["vehicle"].name) == (NOT_READY, READY)
    now[0] += 1_000
    del wrong[1]
    all_of_them.look()
    assert (all_of_them.worst, all_of_them["cloud"].name) == (DEGRADED, DEGRADED)
    assert all_of_them["cloud"].since_ms == now[0]
    wrong[:] = [Condition("the log refuses messages", is_fatal=True)]
    all_of_them.look()
    assert (all_of_them["cloud"].name, all_of_them[states.STREAMER].name) == (READY, NOT_READY)


def test_another_reason_is_logged_at_once_and_one_that_counts_on_is_not(
    kept: tuple[States, list[int]], wrong: list[Condition]
) -> None:
    all_of_them, now = kept
    with structlog.testing.capture_logs() as lines:
        all_of_them.look()
        for text in ("refused", "refused", "wrong password", "12 records wait", "13 records wait"):
            now[0] += 1_000
            wrong[:] = [Condition(text, "cloud", is_fatal=True)]
            all_of_them.look()
    found = [line for line in lines if line.get("endpoint") == "cloud"]
    assert [line["reason"] for line in found] == ["", "refused", "wrong password", "12 records wait"]
    assert [line["log_level"] for line in found] == ["info", "error", "error", "error"]
    assert all_of_them["cloud"].reason == "13 records wait"
    state = all_of_them["cloud"]
    assert (state.since_ms, state.reason_since_ms) == (now[0] - 4_000, now[0] - 1_000)


# A streamer


async def with_admin(make_world: MakeWorld, *arguments: Any, **options: Any) -> Any:
    world = await make_world(*arguments, start=False, **options)
    section = world.config.streamer.model_copy(update={"admin": "127.0.0.1:0"})
    world.config = world.config.model_copy(update={"streamer": section})
    await world.start()
    return world


async def test_readyz_names_the_endpoint_whose_network_is_away_and_since_when(make_world: MakeWorld) -> None:
    world = await with_admin(make_world, {"vehicle": "", "cloud": "none"})
    port = world.streamer.admin.port
    status, answer = await asyncio.to_thread(readyz, port)
    assert (status, answer["status"], answer["problems"]) == (200, READY, [])
    assert {one["state"] for one in (answer["streamer"], *answer["endpoints"].values())} == {READY}
    before = uuids.now_ms()
    transport = world.assembly.endpoints["cloud"].transport
    with structlog.testing.capture_logs() as lines:
        transport.disconnect()
        await world.until(lambda: world.parts.of(Readiness).states["cloud"].name == NOT_READY)
        assert changes(lines) == [("cloud", READY, NOT_READY)]
        status, answer = await asyncio.to_thread(readyz, port)
        assert (status, answer["status"]) == (503, NOT_READY)
        assert answer["problems"] == ["endpoint cloud: its network is away"]
        cloud = answer["endpoints"]["cloud"]
        assert cloud["reason"] == "its network is away"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", cloud["since"])
        assert before <= world.parts.of(Readiness).states["cloud"].since_ms <= uuids.now_ms()
        assert answer["endpoints"]["vehicle"]["state"] == answer["streamer"]["state"] == READY
        text = metrics.expose(world.parts.samples).decode()
        assert 'up_streamer_endpoint_state{endpoint="cloud",state="not_ready"} 1.0' in text
        assert 'up_streamer_endpoint_state{endpoint="cloud",state="ready"} 0.0' in text
        assert 'up_streamer_endpoint_state{endpoint="vehicle",state="ready"} 1.0' in text
        assert "up_streamer_ready 0.0" in text
        transport.reconnect()
        await world.until(lambda: world.parts.of(Readiness).states["cloud"].name == READY)
        assert changes(lines)[1:] == [("cloud", NOT_READY, READY)]
    status, answer = await asyncio.to_thread(readyz, port)
    assert (status, answer["status"]) == (200, READY)


async def test_a_trouble_of_one_filter_is_degraded_and_a_fault_of_a_plugin_is_not_ready(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await with_admin(make_world, {"vehicle": "", "cloud": "none"})
    port = world.streamer.admin.port
    monkeypatch.setattr(LocalTransport, "troubles", ["the broker refuses one filter"])
    status, answer = await asyncio.to_thread(readyz, port)
    assert (status, answer["status"]) == (200, DEGRADED)
    assert answer["endpoints"]["cloud"]["reason"] == "the broker refuses one filter"
    assert "endpoint cloud: the broker refuses one filter" in answer["problems"]
    text = metrics.expose(world.parts.samples).decode()
    assert "up_streamer_ready 1.0" in text
    assert 'up_streamer_state{state="degraded"} 1.0' in text
    world.assembly.endpoints["cloud"].fault = "its transport has a fault: it raised"
    status, answer = await asyncio.to_thread(readyz, port)
    assert (status, answer["endpoints"]["cloud"]["state"]) == (503, NOT_READY)
    assert answer["endpoints"]["vehicle"]["state"] == DEGRADED


def on_broker(name: str, **settings: Any) -> str:
    shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    return (
        f'[[endpoint]]\nname = "{name}"\ntransport = "mqtt5"\nauthorities = ["{name}"]\nusubscription = "none"\n'
        f"settings = {{ {shown} }}\n"
    )


@pytest.mark.broker
async def test_why_a_broker_is_away_is_the_reason(tmp_path: Path, make_broker: Callable[..., Broker]) -> None:
    """No listener, a wrong password, a broker that disconnects: three different reasons."""
    broker, nobody = make_broker(users={"gateway": "right"}), free_port()
    config = loads(
        f'[streamer]\nauthority = "home"\ndata_dir = "{tmp_path}"\n'
        + on_broker("home", port=broker.port, username="gateway", password="right")
        + on_broker("closed", port=nobody)
        + on_broker("strict", port=broker.port, username="gateway", password="wrong")
    )
    streamer = await apps.Streamer.create(config)
    running = asyncio.create_task(streamer.run())

    async def until(name: str, text: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while text not in streamer.parts.of(Readiness).states[name].reason:  # noqa: ASYNC110 - any state may be asked for
                await asyncio.sleep(0.01)
        assert streamer.parts.of(Readiness).states[name].name == NOT_READY

    await until("closed", "no connection to the broker")
    assert str(nobody) in streamer.parts.of(Readiness).states["closed"].reason
    await until("strict", "refuses the login")
    async with asyncio.timeout(WAIT_S):
        while streamer.parts.of(Readiness).states["home"].name != READY:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    broker.stop()
    await until("home", "its network is away: the connection to the broker")
    streamer.stop()
    await asyncio.wait_for(running, WAIT_S)


# A loss in a network


async def test_a_lost_session_is_degraded_over_restarts_and_ends_by_itself(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamer.parts.readiness.LOOK_S", 0.01)
    monkeypatch.setattr("streamer.parts.storage.CHECK_S", 0.01)
    monkeypatch.setattr("streamer.parts.senders.LOOK_S", 0.01)
    world = await with_admin(
        make_world, {"vehicle": "", "cloud": "none"}, more="[history]\nacknowledge_after_hours = 2\n"
    )
    lost = "the broker has not resumed the session"
    world.assembly.losses.network_lost(world.assembly.endpoints["cloud"], lost, None)
    await world.assembly.logs.durable.saved()
    await world.restart()
    status, answer = await asyncio.to_thread(readyz, world.streamer.admin.port)
    assert (status, answer["status"], answer["endpoints"]["cloud"]["state"]) == (200, DEGRADED, DEGRADED)
    assert answer["endpoints"]["cloud"]["reason"].startswith(lost)
    assert "2 h" in answer["endpoints"]["cloud"]["reason"]
    assert answer["endpoints"]["vehicle"]["state"] == answer["streamer"]["state"] == READY
    now_ms = uuids.now_ms()
    log = world.assembly.logs.durable
    monkeypatch.setattr(log.losses, "_now_ms", lambda: now_ms + 2 * HOUR_MS)
    await world.until(lambda: world.parts.of(Readiness).states["cloud"].name == READY)
    assert log.damage == []
    await log.saved()
    await world.restart()
    assert world.parts.problems() == []


async def test_a_lost_session_waits_for_a_person_if_it_is_set_so(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamer.parts.readiness.LOOK_S", 0.01)
    monkeypatch.setattr("streamer.parts.storage.CHECK_S", 0.01)
    monkeypatch.setattr("streamer.parts.senders.LOOK_S", 0.01)
    world = await make_world({"vehicle": "", "cloud": "none"}, more="[history]\nacknowledge_after_hours = 0\n")
    world.assembly.losses.network_lost(world.assembly.endpoints["cloud"], "the session is lost", None)
    log, now_ms = world.assembly.logs.durable, uuids.now_ms()
    monkeypatch.setattr(log.losses, "_now_ms", lambda: now_ms + 100_000 * HOUR_MS)
    looks = itertools.count()
    monkeypatch.setattr(world.parts.of(Readiness).states, "look", lambda: next(looks))
    await world.until(lambda: next(looks) > 5)
    (problem,) = world.parts.problems()
    assert "nobody has acknowledged" in problem
    log.losses.acknowledge()
    assert world.parts.problems() == []


# Clocks that are apart


def made_at(ms: int) -> UUID:
    fresh = uuids.new()
    return UUID(msb=(ms << 16) | (fresh.msb & 0xFFFF), lsb=fresh.lsb)


def with_ttl(age_ms: int, ttl_ms: int = 5_000) -> UMessage:
    """A publish that was made `age_ms` ago by our clock."""
    builder = UMessageBuilder.publish(TOPIC).with_ttl(ttl_ms)
    return builder.with_id(made_at(uuids.now_ms() - age_ms)).build()


@pytest.fixture
def end() -> tuple[LocalTransport, Clocks]:
    transport = LocalTransport.on(LocalNetwork.named("clocks"), LocalUriProvider("vehicle1", 0x8001, 1))
    return transport, Clocks(Endpoint("vehicle", ["vehicle1"], transport))


def test_more_than_half_expired_on_arrival_is_reported_with_the_difference_and_ends(
    end: tuple[LocalTransport, Clocks],
) -> None:
    transport, clock = end
    table = transport.listeners
    table.deliver([with_ttl(95_000) for _ in range(states.MESSAGES_MIN - 1)])
    clock.look(100.0)
    assert clock.trouble == "", "too few to say anything"
    table.deliver([with_ttl(95_000)])
    clock.look(101.0)
    assert clock.trouble.startswith(f"{states.MESSAGES_MIN} of the last {states.MESSAGES_MIN} messages")
    assert "95." in clock.trouble
    table.deliver([with_ttl(0) for _ in range(states.MESSAGES_MIN)])
    clock.look(102.0)
    assert clock.trouble == "", "half of them came in time"
    table.deliver([with_ttl(95_000)])
    clock.look(103.0)
    assert clock.trouble
    clock.look(103.0 + states.WINDOW_S)
    assert clock.trouble == "", "nothing has come for so long"
    table.deliver([UMessageBuilder.publish(TOPIC).build() for _ in range(100)])
    table.deliver([with_ttl(95_000) for _ in range(100)])
    clock.look(200.0)
    assert clock.trouble.startswith("100 of the last 100 "), "what has no ttl says nothing"


def test_messages_that_come_encoded_count_alike(end: tuple[LocalTransport, Clocks]) -> None:
    transport, clock = end
    encoded = [with_ttl(age_ms).attributes.SerializeToString() for age_ms in (0, 95_000, 0, 95_000, 95_000)]
    transport.listeners.deliver_encoded([(None, b"", one) for one in encoded * 4])
    clock.look(1.0)
    assert clock.trouble.startswith("12 of the last 20 messages")


async def test_calls_through_a_gateway_whose_clock_is_fast_are_reported(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamer.parts.readiness.LOOK_S", 0.01)
    monkeypatch.setattr("streamer.parts.storage.CHECK_S", 0.01)
    monkeypatch.setattr("streamer.parts.senders.LOOK_S", 0.01)
    world = await with_admin(make_world, {"vehicle": "", "cloud": "none"})
    caller = await world.node("vehicle", "vehicle1")
    to = uris.parse("up://cloud/8002/1/1")
    reply_to = uris.parse("up://vehicle1/8001/1/0")
    for endpoint in world.assembly.endpoints:
        monkeypatch.setattr(endpoint.transport.listeners, "_now_ms", lambda: uuids.now_ms() + 90_000)
    for _ in range(states.MESSAGES_MIN):
        await caller.send(UMessageBuilder.request(reply_to, to, 5_000).build())
    await world.until(lambda: world.parts.of(Readiness).states["vehicle"].name == DEGRADED)
    status, answer = await asyncio.to_thread(readyz, world.streamer.admin.port)
    assert (status, answer["status"]) == (200, DEGRADED)
    assert "90." in answer["endpoints"]["vehicle"]["reason"]
    assert answer["endpoints"]["cloud"]["state"] == READY
    assert world.assembly.endpoints["vehicle"].all_dropped["expired"] == states.MESSAGES_MIN


async def test_a_start_and_a_stop_log_no_state_that_a_person_should_look_at(make_world: MakeWorld) -> None:
    with structlog.testing.capture_logs() as lines:
        world = await make_world({"vehicle": "", "cloud": "none"})
        await world.stop()
    assert sorted(changes(lines)) == [("cloud", NOT_READY, READY), ("vehicle", NOT_READY, READY)]
    of_the_streamer = [line["state"] for line in lines if line["event"] == "the state of the streamer has changed"]
    assert of_the_streamer == [READY]


async def test_a_sender_whose_clock_is_a_day_ahead_is_reported_until_it_is_right(make_world: MakeWorld) -> None:
    world = await make_world(more='[history]\nrecord = ["//vehicle1/FFFF/FF/FFFF"]\n')
    vehicle = await world.node("vehicle", "vehicle1")
    await vehicle.send(with_ttl(-30_000))
    log, senders, owner = (
        world.assembly.logs.durable,
        states.FastSenders(),
        world.assembly.endpoints.owner,
    )
    await world.until(lambda: log.newest_seq == 1)
    senders.look(log, uuids.now_ms(), 100.0)
    assert list(senders.conditions(owner)) == []
    await vehicle.send(with_ttl(-86_400_000))
    await world.until(lambda: log.newest_seq == 2)
    senders.look(log, uuids.now_ms(), 101.0)
    (condition,) = senders.conditions(owner)
    assert condition.endpoint == "vehicle"
    assert re.search(r"the clock of 'vehicle1' is 86(399|400) s ahead of ours", condition.text)
    ((name, labels, ahead_s),) = senders.samples(owner)
    assert (name, labels) == ("sender_clock_ahead_seconds", ("vehicle",))
    assert ahead_s == pytest.approx(86_400, abs=60)
    senders.look(log, uuids.now_ms(), 101.0 + states.WINDOW_S)
    assert list(senders.conditions(owner)) == [], "no such record has come for so long"
    await vehicle.send(with_ttl(-86_400_000))
    await vehicle.send(with_ttl(-30_000))
    await world.until(lambda: log.newest_seq == 4)
    senders.look(log, uuids.now_ms(), 102.0)
    assert list(senders.conditions(owner)) == [], "the newest id is right: the other one was noise"
