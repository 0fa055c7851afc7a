"""`up-streamer cursors`, and what `check` says of records that wait for nobody."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from history.log import Log
from storage.disk import REAL_DISK
from streamer.cli import app
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder

TOPIC = uris.parse("//vehicle1/8001/1/8001")
CONFIG = """
[streamer]
data_dir = "{folder}"
[[endpoint]]
name = "vehicle"
transport = "local"
authorities = ["vehicle1"]
[[endpoint]]
name = "cloud-eu"
transport = "local"
authorities = ["cloud"]
usubscription = "none"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a streamer that has ten records, of which an endpoint called cloud has had four."""

    async def fill() -> None:
        async with await Log.open(tmp_path / "history.db", name="durable") as log:
            stream = log.stream_id(TOPIC)
            await log.append([stream] * 10, [UMessageBuilder.publish(TOPIC).build() for _ in range(10)])
            log.set_cursor("egress:vehicle", 10, holds=True)
            log.set_cursor("egress:cloud", 4, holds=True, absent_ms=7_200_000)
            log.set_cursor(f"parked:cloud:{stream}", 2, holds=True)

    asyncio.run(fill())
    path = tmp_path / "vehicle.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def said(*arguments: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_what_waits_is_listed_and_check_tells_what_nobody_claims(config: Path) -> None:
    cloud, vehicle = said("cursors", "list", "--config", str(config))
    assert cloud == {"endpoint": "cloud", "seq": 4, "records": 6, "holds": True, "absent_hours": 2.0, "parked_topics": 1}
    assert (vehicle["endpoint"], vehicle["records"]) == ("vehicle", 0)
    assert said("check", "--config", str(config))[0]["unclaimed"] == {"cloud": 6}
    assert "6 records wait for endpoint 'cloud'" in CliRunner().invoke(app, ["check", "--config", str(config)]).stdout


def test_another_endpoint_adopts_what_waits(config: Path) -> None:
    (heir,) = said("cursors", "adopt", "cloud", "cloud-eu", "--config", str(config))
    assert (heir["endpoint"], heir["seq"], heir["records"], heir["parked_topics"]) == ("cloud-eu", 4, 6, 1)
    assert [row["endpoint"] for row in said("cursors", "list", "--config", str(config))] == ["cloud-eu", "vehicle"]
    assert said("check", "--config", str(config))[0]["unclaimed"] == {}


def test_what_waits_is_forgotten(config: Path) -> None:
    assert said("cursors", "forget", "cloud", "--data-dir", str(config.parent)) == [{"endpoint": "cloud", "records": 6}]
    assert [row["endpoint"] for row in said("cursors", "list", "--config", str(config))] == ["vehicle"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cursors", "forget", "nobody"], "there is no cursor of endpoint 'nobody'; there are cloud, vehicle"),
        (["cursors", "adopt", "nobody", "cloud"], "there is no cursor of endpoint 'nobody'"),
    ],
)
def test_what_is_not_there_is_said(config: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, [*arguments, "--config", str(config)])
    assert result.exit_code == 1
    assert words in result.stderr.replace("\n", " ")


def test_a_folder_without_a_log_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["cursors", "list", "--data-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "there is no log at" in result.stderr.replace("\n", " ")


def test_a_running_streamer_is_left_alone(config: Path) -> None:
    lock = REAL_DISK.lock(config.parent / "history.db.lock")
    assert len(said("cursors", "list", "--config", str(config))) == 2
    result = CliRunner().invoke(app, ["cursors", "forget", "cloud", "--config", str(config)])
    assert "is in use by process" in result.stderr.replace("\n", " ")
    lock.release()


def test_topics_are_paused_and_resumed_while_the_streamer_is_stopped(config: Path) -> None:
    topic, peer = "up://vehicle1/8001/1/8001", "cloud-eu"
    assert said("paused", "--config", str(config)) == []
    assert said("pause", "/8001/1/8001", peer, "--config", str(config)) == [{"topic": topic, "peer": peer}]
    assert said("paused", "--data-dir", str(config.parent)) == [{"topic": topic, "peer": peer}]
    (checked,) = said("check", "--config", str(config))
    assert checked["paused"] == [{"topic": topic, "peer": peer}]
    assert f"paused: {topic} to {peer}" in CliRunner().invoke(app, ["check", "--config", str(config)]).output
    wrong = CliRunner().invoke(app, ["resume", "//vehicle1/8001/1/8002", peer, "--config", str(config)])
    assert wrong.exit_code == 1
    assert "not paused" in wrong.output
    assert said("resume", "//vehicle1/8001/1/FFFF", peer, "--config", str(config)) == []
    assert "nothing is paused" in CliRunner().invoke(app, ["paused", "--config", str(config)]).output
