"""The status of a streamer: what it says in each state, its schema, its rates and lags, and the metrics beside it."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from history.file import store as stores
from history.log.log import Log
from storage import disk as disks
from streamer import app as apps
from streamer.config import Config
from streamer.data_dir import CONTROL_SOCKET, LOG_LOCK
from streamer.durations import Durations
from streamer.egress import hold_state
from streamer.operating import control, metrics
from streamer.operating.meters import RATE_WINDOW_S, STEP_S, Meter
from streamer.parts.readiness import Readiness
from streamer.parts.status import StreamerStatus
from streamer.reporting import build
from tests.streamer.conftest import Hearer, MakeWorld, World
from transports.local import LocalTransport
from transports.ports import free_port
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

Publish = Callable[..., UMessage]

SPEED = uris.parse("//vehicle1/1/1/8001")
TWO = {"vehicle": "", "cloud": "none"}
SUBSCRIBED = {uris.format(SPEED): ["//cloud/9001/1/0"]}


async def status_of(world: World) -> dict[str, Any]:
    """The answer of the operation, which fits its schema."""
    answer = await world.streamer.operations.answer("status", {})
    return fitting(answer)


def fitting(answer: dict[str, Any]) -> dict[str, Any]:
    assert StreamerStatus.model_validate(answer, strict=True).model_dump(mode="json") == answer
    return answer


def of(answer: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in answer["endpoints"] if one["name"] == name)
    return found


def samples(world: World) -> dict[tuple[str, tuple[str, ...]], float]:
    """By name and values of the labels, in the order of their names."""
    text = metrics.expose(world.parts.samples).decode()
    return {
        (one.name.removeprefix("up_streamer_"), tuple(value for _, value in sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


async def crossing(make_world: MakeWorld, publish: Publish, count: int, **options: Any) -> tuple[World, Any, Hearer]:
    """A streamer through which so many messages have gone, the uEntity that sent them, and who heard them."""
    world = await make_world(TWO, SUBSCRIBED, **options)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(count)])
    await heard.until(lambda: len(heard.messages) == count, f"{count} messages")
    await world.until(lambda: world.assembly.endpoints["cloud"].forwarded == count)
    return world, vehicle, heard


def cut_off(world: World) -> None:
    """Disconnects the streamer from the cloud."""
    transport = world.assembly.endpoints["cloud"].transport
    assert isinstance(transport, LocalTransport)
    world.networks["cloud"].cut(transport.authority)


def mend(world: World) -> None:
    for authority in list(world.networks["cloud"].cut_off):
        world.networks["cloud"].mend(authority)


# What it says


async def test_a_running_streamer_tells_what_it_is_and_what_went_from_where_to_where(
    make_world: MakeWorld, publish: Publish
) -> None:
    world, _, _ = await crossing(make_world, publish, 10)
    answer = await status_of(world)
    assert (answer["state"], answer["reason"], answer["problems"]) == ("ready", "", [])
    assert answer["authority"] == "vehicle1"
    assert (answer["version"], answer["core"]) == build()[:2]
    assert all(re.fullmatch(r"[\d-]{10}T[\d:]{8}\.\d{3}Z", answer[name]) for name in ("started", "now", "since"))
    assert answer["data_dir"] == str(world.config.streamer.data_dir.absolute())
    vehicle, cloud = of(answer, "vehicle"), of(answer, "cloud")
    assert (vehicle["transport"], vehicle["authorities"], vehicle["connected"]) == ("local", ["vehicle1"], True)
    assert (vehicle["received"], cloud["forwarded"], cloud["waiting"], cloud["lag_s"]) == (10, 10, 0, 0.0)
    assert vehicle["last_in"] is not None
    assert cloud["last_out"] is not None
    assert cloud["last_in"] is None
    assert vehicle["in_per_s"] > 0
    assert cloud["out_per_s"] > 0
    flows = {(one["from"], one["to"]): (one["forwarded"], one["allowed"]) for one in answer["flows"]}
    assert flows == {("vehicle", "cloud"): (10, True), ("cloud", "vehicle"): (0, True)}
    durable = answer["logs"][0]
    assert (durable["name"], durable["newest_seq"], durable["oldest"] is not None) == ("durable", 10, True)
    assert answer["disk"]["free_bytes"] > 0
    assert answer["config"] is None


async def test_requests_and_their_answers_are_flows_too(make_world: MakeWorld) -> None:
    world = await make_world(TWO)
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, uris.parse("//vehicle1/8001/1/0"), uris.parse("//cloud/8002/1/1"))
    await vehicle.send(
        UMessageBuilder.request(uris.parse("//vehicle1/8001/1/0"), uris.parse("//cloud/8002/1/1"), 5_000).build()
    )
    await heard.until(lambda: heard.messages, "the request")
    await world.until(lambda: world.assembly.endpoints["cloud"].forwarded)
    flows = {(one["from"], one["to"]): one["forwarded"] for one in (await status_of(world))["flows"]}
    assert flows["vehicle", "cloud"] == 1


async def test_a_peer_that_is_away_lags_by_the_age_of_the_first_record_it_lacks(
    make_world: MakeWorld, publish: Publish
) -> None:
    world, vehicle, heard = await crossing(make_world, publish, 5)
    cut_off(world)
    await world.until(lambda: world.parts.of(Readiness).states["cloud"].name == "not ready")
    before_ms = uuids.now_ms()
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(5, 12)])
    await world.until(lambda: world.assembly.logs.durable.newest_seq == 12)
    answer = await status_of(world)
    cloud = of(answer, "cloud")
    assert (answer["state"], answer["reason"]) == ("not ready", "endpoint cloud: its network is away")
    assert (cloud["state"], cloud["connected"], cloud["lag_records"], cloud["waiting"]) == ("not ready", False, 7, 7)
    now = samples(world)
    assert now["lag_seconds", ("cloud", "durable")] <= (uuids.now_ms() - before_ms) / 1000
    assert now["backlog", ("cloud", "durable")] == 7
    ahead_ms = uuids.now_ms() + 90_000
    world.parts.of(Readiness).meters._now_ms = lambda: ahead_ms
    assert of(await status_of(world), "cloud")["lag_s"] == pytest.approx(90, abs=5)
    assert samples(world)["lag_seconds", ("cloud", "durable")] == pytest.approx(90, abs=5)
    mend(world)
    await heard.until(lambda: len(heard.messages) == 12, "what has waited")
    await world.until(lambda: not world.assembly.attached["cloud"].pumps[0].backlog)
    assert of(await status_of(world), "cloud")["lag_s"] == 0


async def test_the_age_of_a_record_that_is_only_on_disk_is_read_there(make_world: MakeWorld, publish: Publish) -> None:
    world, vehicle, _ = await crossing(make_world, publish, 3)
    cut_off(world)
    await world.until(lambda: not world.assembly.networks.is_connected(world.assembly.endpoints["cloud"]))
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(3)])
    await world.until(lambda: world.assembly.logs.durable.newest_seq == 6)
    await world.restart()
    log, pump = world.assembly.logs.durable, world.assembly.attached["cloud"].pumps[0]
    await world.until(lambda: pump.backlog)
    assert log.tail(pump.cursor) is None
    await world.parts.of(Readiness).meters.look()
    ahead_ms = uuids.now_ms() + 3_600_000
    world.parts.of(Readiness).meters._now_ms = lambda: ahead_ms
    assert world.parts.of(Readiness).meters.lag_s(pump) == pytest.approx(3_600, abs=60)


async def test_held_addresses_are_there_with_their_reason_and_pauses_with_their_peer(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold_state, "RETRY_S_MIN", 0.05)
    world, vehicle, _ = await crossing(make_world, publish, 1)
    world.networks["cloud"].refuse(uris.format(SPEED))
    await vehicle.send_batch([publish(SPEED, str(number)) for number in range(4)])
    held = world.assembly.attached["cloud"].pumps[0].waits.addresses
    await world.until(lambda: sum(one.records for one in held.values()) == 4)
    await world.assembly.paused.pause(uris.parse("//vehicle1/1/1/8002"), "cloud")
    answer = await status_of(world)
    cloud = of(answer, "cloud")
    (one,) = cloud["held"]
    assert (one["reason"], one["records"], cloud["held_count"]) == ("refused", 4, 1)
    assert uris.format(SPEED) in one["address"]
    assert one["text"]
    assert (cloud["waiting"], cloud["lag_records"]) == (4, 0), "what is held does not lag"
    assert (cloud["paused"], of(answer, "vehicle")["paused"]) == (True, False)
    assert answer["paused"] == [{"topic": "up://vehicle1/1/1/8002", "peer": "cloud", "from": ""}]
    assert any("paused" in note for note in answer["notes"])


async def test_status_is_a_page_of_the_admin_port(make_world: MakeWorld) -> None:
    world = await make_world(TWO, start=False)
    section = world.config.streamer.model_copy(update={"admin": "127.0.0.1:0"})
    world.config = world.config.model_copy(update={"streamer": section})
    await world.start()
    assert world.streamer.admin is not None
    answer = await asyncio.to_thread(page, world.streamer.admin.port)
    assert [one["name"] for one in fitting(answer)["endpoints"]] == ["vehicle", "cloud"]


def page(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=20) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


async def test_a_streamer_that_starts_is_not_ready_because_it_starts(make_world: MakeWorld) -> None:
    world = await make_world(TWO, start=False)
    streamer = await apps.Streamer.create(world.config)
    answer = fitting(await streamer.operations.answer("status", {}))
    assert (answer["state"], answer["reason"]) == ("not ready", "starting")
    assert {one["state"] for one in answer["endpoints"]} == {"not ready"}
    for log in streamer.assembly.logs:
        await log.close()
    await streamer.assembly.dead_letters.close()


async def test_a_streamer_that_cant_start_says_why_at_the_socket_and_the_port(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(TWO, start=False)
    port = free_port()
    section = world.config.streamer.model_copy(update={"admin": f"127.0.0.1:{port}"})
    config = world.config.model_copy(update={"streamer": section})
    folder, file = config.streamer.data_dir, Path("vehicle.toml")
    folder.mkdir()

    async def create(_: Config) -> Any:
        raise UStatusError(UCode.RESOURCE_EXHAUSTED, "the disk is full")

    monkeypatch.setattr(apps.Streamer, "create", create)
    stopping = asyncio.Event()
    serving = asyncio.create_task(apps.serve(config, lambda _: None, stopping, file=file))
    await world.until((folder / CONTROL_SOCKET).exists)
    answer = await asyncio.to_thread(control.require, folder, "status")
    assert (fitting(answer)["state"], answer["reason"]) == ("not ready", "RESOURCE_EXHAUSTED: the disk is full")
    assert answer["config"] == str(file.absolute())
    assert [one["state"] for one in answer["endpoints"]] == ["not ready", "not ready"]
    by_port = fitting(await asyncio.to_thread(page, port))
    assert by_port["problems"] == ["RESOURCE_EXHAUSTED: the disk is full"]
    with pytest.raises(UStatusError, match="known: status"):
        await asyncio.to_thread(control.require, folder, "cursors")
    stopping.set()
    await asyncio.wait_for(serving, 20)
    assert not (folder / CONTROL_SOCKET).exists()


async def test_one_that_cant_start_leaves_the_socket_of_another_one_alone(tmp_path: Path) -> None:
    lock = disks.REAL_DISK.lock(tmp_path / LOG_LOCK)
    (tmp_path / CONTROL_SOCKET).write_text("of the other one")
    async with control.SpareSocket(tmp_path, control.Operations({})):
        assert (tmp_path / CONTROL_SOCKET).read_text() == "of the other one"
    assert (tmp_path / CONTROL_SOCKET).exists()
    lock.release()


# Rates


def test_a_rate_is_the_mean_of_the_last_seconds_and_a_time_is_that_of_the_last_rise() -> None:
    meter = Meter(100.0)
    assert meter.per_s(100.0) == 0
    for second in range(1, 21):
        meter.look(50 * second, 100.0 + second, second)
    assert meter.per_s(120.0) == pytest.approx(50)
    assert meter.rose_ms == 20
    for second in range(21, 26):
        meter.look(1_000, 100.0 + second, second)
    assert meter.per_s(125.0) == pytest.approx(25, abs=5)
    assert meter.rose_ms == 20
    for tenth in range(100):
        meter.look(1_000, 125.0 + tenth / 10, 30)
    assert meter.per_s(125.0 + RATE_WINDOW_S) == 0, "who looks more often changes nothing"
    assert len(meter._seen) <= RATE_WINDOW_S / STEP_S + 1


# Metrics


async def test_each_metric_of_times_queues_and_the_disk_moves(make_world: MakeWorld, publish: Publish) -> None:
    world, vehicle, _ = await crossing(make_world, publish, 1)
    before = samples(world)
    core, python, version = build()[1], build()[2], build()[0]
    assert before["build_info", (core, python, version)] == 1
    assert before["log_commit_seconds_count", ("durable",)] > 0
    assert before["log_fsync_seconds_sum", ("durable",)] > 0
    assert abs(before["last_received_seconds", ("vehicle",)] - uuids.now_ms() / 1000) < 60
    assert abs(before["last_forwarded_seconds", ("cloud",)] - uuids.now_ms() / 1000) < 60
    assert ("last_received_seconds", ("cloud",)) not in before
    assert before["process_resident_memory_bytes", ()] > 1 << 20
    assert before["process_open_fds", ()] > 0
    assert before["process_start_time_seconds", ()] > 0
    assert before["queued_bytes", ("", "dead letters")] == 0
    later_ms = uuids.now_ms() + 5_000
    world.parts.of(Readiness).meters._now_ms = lambda: later_ms
    cut_off(world)
    await world.until(lambda: not world.assembly.networks.is_connected(world.assembly.endpoints["cloud"]))
    await vehicle.send_batch([publish(SPEED, "x" * 100) for _ in range(8)])
    to_cloud = UMessageBuilder.request(uris.parse("//vehicle1/8001/1/0"), uris.parse("//cloud/8002/1/1"), 60_000)
    await vehicle.send(to_cloud.build())
    pump = world.assembly.attached["cloud"].pumps[0]
    await world.until(lambda: pump.sender.queue.messages == 8 and world.assembly.express.queues["cloud"].bytes)
    after = samples(world)
    assert after["queued_bytes", ("cloud", "durable")] == 800
    assert after["queued_bytes", ("cloud", "express")] > 0
    assert after["log_commit_seconds_count", ("durable",)] > before["log_commit_seconds_count", ("durable",)]
    assert after["log_fsync_seconds_count", ("durable",)] > before["log_fsync_seconds_count", ("durable",)]
    assert after["last_received_seconds", ("vehicle",)] == later_ms / 1000
    assert after["last_forwarded_seconds", ("cloud",)] == before["last_forwarded_seconds", ("cloud",)]
    assert after["process_cpu_seconds_total", ()] > 0


def test_durations_are_counted_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamer.durations.BOUNDS_S", (0.1, 1.0))
    found = Durations()
    for seconds in (0.05, 0.1, 0.5, 7.0):
        found.add(seconds)
    assert found.buckets() == [("0.1", 2.0), ("1", 3.0), ("+Inf", 4.0)]
    assert found.sum_s == pytest.approx(7.65)


async def test_a_commit_is_longer_than_the_fsync_within_it_and_few_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "DURATIONS_MAX", 2)
    async with await Log.open(tmp_path / "l.db", name="durable") as log:
        stream = log.stream_id(SPEED, None)
        for _ in range(3):
            await log.append([stream], [UMessageBuilder.publish(SPEED).build()])
        assert len(log.durations) == 2
        assert all(commit_s >= fsync_s > 0 for commit_s, fsync_s in log.durations)
