"""Readers of a gateway that is restored to an older state are told, and never mix its records with those before."""

from __future__ import annotations

import asyncio
from pathlib import Path

from streamer.operating.backup import back_up_stopped, restore
from tests.edge.test_streams import World as EdgeWorld
from tests.streamer.conftest import make_world as make_world
from tests.streamer.conftest import publish as publish
from tests.streamer.test_following import Pair
from tests.streamer.test_following import pair as pair


async def test_a_follower_reports_the_gap_and_takes_each_record_once(pair: Pair, tmp_path: Path) -> None:
    await pair.begin()
    await pair.handed_over()
    await pair.publish(30)
    await pair.expect_all()
    await pair.vehicle.streamer.operations.answer("backup", {"directory": str(tmp_path / "backup")})
    await pair.publish(10)  # which the restored gateway has not
    await pair.expect_all()
    gaps, before = pair.hub.assembly.gaps.total, pair.vehicle.assembly.logs.durable.incarnation
    await pair.vehicle.stop()
    restore(tmp_path / "backup", pair.vehicle.config.streamer.data_dir, replace=True)
    await pair.vehicle.start()
    assert pair.vehicle.assembly.logs.durable.incarnation != before
    await pair.handed_over()
    await pair.hub.until(lambda: pair.hub.assembly.gaps.total > gaps)
    await pair.publish(20)  # with the seqs of those that are lost
    await pair.expect_all()
    chunks = await pair.hub.assembly.logs.durable.read(0)
    payloads = [int(one.payload) for chunk in chunks for one in chunk.messages if one.payload.isdigit()]
    assert payloads == list(range(60))


async def test_a_browser_gets_a_gap_and_goes_on(tmp_path: Path) -> None:
    world = EdgeWorld()
    await world.start(tmp_path / "data")
    await world.publish("1", "2", "3")
    await world.finish()
    await asyncio.to_thread(back_up_stopped, tmp_path / "data", tmp_path / "backup", "")
    world = EdgeWorld()
    await world.start(tmp_path / "data")
    await world.publish("lost 4", "lost 5")
    async with world.reader("topic=//vehicle/20/1/8001&since=earliest") as reader:
        assert await reader.texts(5) == ["1", "2", "3", "lost 4", "lost 5"]
        await reader.until_id()
    await world.finish()
    await asyncio.to_thread(restore, tmp_path / "backup", tmp_path / "data", replace=True)
    world = EdgeWorld()
    await world.start(tmp_path / "data")
    try:
        await world.publish("4", "5", "6")
        async with world.reader(Last_Event_ID=reader.last_id) as again:
            gap = await again.next()
            assert gap is not None
            assert (gap.name, gap.json["reason"], gap.json["after"]) == ("gap", "log_ended", 5)
            assert await again.texts(3) == ["4", "5", "6"]
    finally:
        await world.finish()


async def test_a_restored_follower_reads_again_what_it_has_lost(pair: Pair, tmp_path: Path) -> None:
    await pair.begin()
    await pair.handed_over()
    await pair.publish(30)
    await pair.expect_all()
    await pair.hub.streamer.operations.answer("backup", {"directory": str(tmp_path / "backup")})
    await pair.publish(10)
    await pair.expect_all()
    await pair.vehicle.until(lambda: not any(records for *_, records in pair.vehicle.assembly.handovers.backlog()))
    await pair.hub.stop()
    restore(tmp_path / "backup", pair.hub.config.streamer.data_dir, replace=True)
    await pair.hub.start()
    await pair.handed_over()
    await pair.publish(20)
    await pair.hub.until(lambda: "59" in pair.heard.texts)
    chunks = await pair.hub.assembly.logs.durable.read(0)
    payloads = [int(one.payload) for chunk in chunks for one in chunk.messages if one.payload.isdigit()]
    assert payloads == list(range(60))
