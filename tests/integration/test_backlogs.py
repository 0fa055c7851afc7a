"""The files of examples/vehicle-cloud as they are, and vehicles that come back with a backlog: nothing is lost, and the
messages of another vehicle are not delayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from campaigns.operate import backlogs
from tests.tiers import full

pytestmark = [full, pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(300)]


def require_all(figures: dict[str, object], early_max: int = 0) -> None:
    assert figures["lost"] == {}, json.dumps(figures)
    assert isinstance(figures["early"], int), figures
    assert figures["early"] <= early_max, json.dumps(figures)


def require_whole(figures: dict[str, object], early_max: int = 0) -> None:
    require_all(figures, early_max)
    assert isinstance(figures["live_delay_s_max"], float), figures
    assert isinstance(figures["seconds"], float), figures
    # a live message that waits behind a backlog waits for all of it
    assert figures["live_delay_s_max"] < max(5.0, figures["seconds"] / 2), figures


async def test_the_backlog_of_one_vehicle_arrives_whole_beside_other_work(tmp_path: Path) -> None:
    require_whole(await backlogs.run(tmp_path, vehicles=1, backlog=10_000, live_flood=5_000, busy=2))


async def test_a_backlog_without_a_pace_arrives_whole_too(tmp_path: Path) -> None:
    """A vehicle with an older file. Of so many a third was dropped as a flood while two other processes were busy."""
    require_all(await backlogs.run(tmp_path, vehicles=1, backlog=60_000, busy=2, paced=False))


async def test_the_backlogs_of_several_vehicles_arrive_whole_after_broker_and_cloud_were_away(tmp_path: Path) -> None:
    figures = await backlogs.run(tmp_path, vehicles=4, backlog=5_000, away_s=5.0, busy=2)
    require_whole(figures, early_max=backlogs.EARLY_MAX)
