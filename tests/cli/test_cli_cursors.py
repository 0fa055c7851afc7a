"""`up-streamer cursors`, and what `check` says of records that wait for nobody."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from history.log.log import Log
from history.service.consumers import Consumers, Owner
from storage.disk import REAL_DISK
from streamer.app import Streamer, serve
from streamer.commands import cursors
from streamer.commands.cli import app
from streamer.config import load
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder
from uprotocol.uuid import now_ms

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
            log.cursors.set("egress:vehicle", 10, holds=True)
            log.cursors.set("egress:cloud", 4, holds=True, absent_ms=7_200_000)
            log.cursors.set(f"parked:cloud:{stream}", 2, holds=True)

    asyncio.run(fill())
    path = tmp_path / "vehicle.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def said(*arguments: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_backlog_is_skipped_while_the_streamer_is_stopped(config: Path) -> None:
    skip = ("cursors", "skip", "cloud", "--config", str(config))
    (tried,) = said(*skip, "--to", "2000-01-01T00:00:00Z")
    assert (tried["records"], tried["after"], tried["to"]) == (0, 2, 0)
    (tried,) = said(*skip, "--to", "0s", "--dry-run")
    assert tried == {"endpoint": "cloud", "log": "durable", "after": 2, "to": 10, "records": 8, "topics": 1}
    assert said("cursors", "list", "--config", str(config))[0]["records"] == 8, "nothing is changed"
    assert said(*skip, "--to", "0s") == [tried]
    cloud = said("cursors", "list", "--config", str(config))[0]
    assert (cloud["seq"], cloud["records"], cloud["holds"], cloud["absent_hours"]) == (10, 0, True, 2.0)
    shown = CliRunner().invoke(app, [*skip, "--to", "0s"])
    assert shown.stdout == "durable log: 0 records of 0 topics are skipped, up to 10\n"
    wrong = CliRunner().invoke(app, [*skip, "--to", "yesterday"])
    assert (wrong.exit_code, "expected a time as" in wrong.stderr) == (2, True)


def test_what_waits_is_listed_and_check_tells_what_nobody_claims(config: Path) -> None:
    cloud, vehicle = said("cursors", "list", "--config", str(config))
    assert cloud == {
        "endpoint": "cloud",
        "seq": 4,
        "records": 8,
        "holds": True,
        "absent_hours": 2.0,
        "parked_topics": 1,
        "held_addresses": 0,
    }
    assert (vehicle["endpoint"], vehicle["records"]) == ("vehicle", 0)
    assert said("check", "--config", str(config))[0]["unclaimed"] == {"cloud": 8}
    assert "8 records wait for endpoint 'cloud'" in CliRunner().invoke(app, ["check", "--config", str(config)]).stdout


def test_another_endpoint_adopts_what_waits(config: Path) -> None:
    (heir,) = said("cursors", "adopt", "cloud", "cloud-eu", "--config", str(config))
    assert (heir["endpoint"], heir["seq"], heir["records"], heir["parked_topics"]) == ("cloud-eu", 4, 8, 1)
    assert [row["endpoint"] for row in said("cursors", "list", "--config", str(config))] == ["cloud-eu", "vehicle"]
    assert said("check", "--config", str(config))[0]["unclaimed"] == {}


def test_both_get_what_they_have_not_had_of_a_parked_topic(config: Path) -> None:
    """A topic that is parked for one endpoint has gone on for the other, up to that one's own cursor."""

    async def park() -> None:
        async with await Log.open(config.parent / "history.db", name="durable") as log:
            log.cursors.set("egress:cloud-eu", 9, holds=True)
            log.cursors.set("began:cloud-eu", 9)
            for stream, seq in ((7, 6), (8, 3)):
                log.cursors.set(f"parked:cloud-eu:{stream}", seq, holds=True)

    async def after() -> dict[str, int]:
        async with await Log.open(config.parent / "history.db", name="durable") as log:
            return log.cursors.seqs()

    asyncio.run(park())
    said("cursors", "adopt", "cloud", "cloud-eu", "--config", str(config))
    left = asyncio.run(after())
    (parked,) = (seq for name, seq in left.items() if name.startswith("parked:") and name[-1] not in "78")
    assert parked == 2
    assert {name: seq for name, seq in left.items() if not name.startswith("parked:") or name[-1] in "78"} == {
        "egress:vehicle": 10,
        "egress:cloud-eu": 4,
        "parked:cloud-eu:7": 4,
        "parked:cloud-eu:8": 3,
    }


def test_what_waits_is_forgotten(config: Path) -> None:
    assert said("cursors", "forget", "cloud", "--data-dir", str(config.parent)) == [{"endpoint": "cloud", "records": 8}]
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


def test_whose_a_consumers_name_is_and_how_it_is_released(config: Path) -> None:
    async def hold() -> None:
        async with await Log.open(config.parent / "history.db", name="durable") as log:
            Consumers([log], now_ms).hold("job", Owner("cloud", 0x20), log, 7, 3_600_000, "run-1")
            log.cursors.set("consumer:old", 9, lease_ms=1)

    asyncio.run(hold())
    job, old = said("cursors", "consumers", "--config", str(config))
    assert 3_000 < job.pop("lease_s") <= 3_600  # type: ignore[operator]
    assert job == {"consumer": "job", "owner": "//cloud/20", "holder": "run-1", "seq": 7, "records": 3}
    assert old == {"consumer": "old", "owner": "", "holder": "", "seq": 9, "records": 1, "lease_s": 0}
    shown = CliRunner().invoke(app, ["cursors", "consumers", "--config", str(config)]).output
    assert ", in use by 'run-1'" in " ".join(shown.split())
    assert said("cursors", "release", "job", "--config", str(config)) == [{"consumer": "job", "owner": "//cloud/20"}]
    assert {row["owner"] for row in said("cursors", "consumers", "--config", str(config))} == {""}
    result = CliRunner().invoke(app, ["cursors", "release", "job", "--config", str(config)])
    assert result.exit_code == 1
    assert "no uEntity owns a consumer named 'job'" in " ".join(result.output.split())


@asynccontextmanager
async def running(config: Path) -> AsyncIterator[Streamer]:
    stopping = asyncio.Event()
    made: asyncio.Future[Streamer] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(load(config), made.set_result, stopping))
    try:
        yield await asyncio.wait_for(made, 20)
    finally:
        stopping.set()
        await asyncio.wait_for(serving, 20)


async def test_a_name_is_released_while_the_streamer_runs(config: Path) -> None:
    async with running(config) as streamer:
        consumers = streamer.assembly.history.consumers
        consumers.hold("job", Owner("cloud", 0x20), streamer.assembly.logs.durable, 7, 3_600_000)
        arguments = ("cursors", "release", "job", "--config", str(config))
        assert await asyncio.to_thread(in_a_process, *arguments) == (0, {"consumer": "job", "owner": "//cloud/20"})
        consumers.require("job", Owner("cloud", 0x21))
        assert (await asyncio.to_thread(in_a_process, *arguments))[0] == 1


async def test_the_streamer_that_runs_lists_its_cursors(config: Path) -> None:
    """Its file is behind: a cursor that has only moved on is written some seconds later."""
    path = config.parent / "history.db"
    async with running(config) as streamer:
        streamer.assembly.logs.durable.cursors.set("egress:vehicle", 6, holds=True)
        asked = await asyncio.to_thread(cursors.asked, path)
        assert {one.endpoint: (one.seq, one.records) for one in asked}["vehicle"] == (6, 0), "nothing of it goes there"
        assert [one.endpoint for one in asked] == ["cloud", "cloud-eu", "vehicle"]
    assert [one.endpoint for one in cursors.asked(path)] == ["cloud", "cloud-eu", "vehicle"], "from the file"


def in_a_process(*arguments: str) -> tuple[int, dict[str, object] | None]:
    """The exit code and the line of JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "streamer.commands.cli", *arguments, "--json"],
        capture_output=True,
        check=False,
        timeout=60,
    )
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else None
