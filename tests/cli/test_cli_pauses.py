"""up-streamer pause, resume, paused with a streamer that is stopped: what is named, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamer.commands import cli

CONFIG = """
[streamer]
data_dir = "{folder}"
[[endpoint]]
name = "vehicle"
transport = "local"
authorities = ["vehicle1"]
[[endpoint]]
name = "cloud"
transport = "local"
authorities = ["*"]
[[rule]]
from = "vehicle"
to = "cloud"
"""
TOPIC = "//vehicle1/8001/1/8001"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "one.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def said(config: Path, *arguments: str, code: int = 0) -> list[str]:
    done = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, [*arguments, "-c", str(config)])
    assert done.exit_code == code, done.output
    return (done.stderr if code else done.stdout).splitlines()


def test_topics_endpoints_and_rules_are_paused_and_resumed(config: Path) -> None:
    topic = f"paused: up:{TOPIC} to fleet9"
    assert said(config, "pause", TOPIC, "fleet9") == [topic]  # an authority behind an endpoint
    assert said(config, "pause", "--endpoint", "vehicle") == ["paused: everything to vehicle", topic]
    rule = "paused: everything from vehicle to cloud"
    assert said(config, "pause", "--rule", "vehicle:cloud") == [rule, "paused: everything to vehicle", topic]
    listed = [json.loads(line) for line in said(config, "paused", "--json")]
    assert listed[0] == {"topic": "up://*/FFFFFFFF/FF/FFFF", "peer": "cloud", "from": "vehicle"}
    assert listed[2] == {"topic": f"up:{TOPIC}", "peer": "fleet9"}
    assert rule in said(config, "check")
    resumed = ["resumed: everything to vehicle", rule, topic]
    assert said(config, "resume", "--endpoint", "vehicle") == resumed
    assert said(config, "resume", "--rule", "vehicle:cloud") == ["resumed: everything from vehicle to cloud", topic]
    why = "everything from vehicle to cloud is not paused by itself: see what is paused"
    assert said(config, "resume", "--rule", "vehicle:cloud", code=1) == [f"error NOT_FOUND: {why}"]
    assert said(config, "resume", TOPIC, "fleet9") == [f"resumed: up:{TOPIC} to fleet9", "nothing is paused"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [TOPIC],
        [TOPIC, "cloud", "--endpoint", "cloud"],
        ["--rule", "vehicle"],
        ["--rule", "a:b:c"],
        ["--rule", ":b"],
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["pause", "resume"])
def test_one_thing_is_named(config: Path, command: str, arguments: list[str]) -> None:
    (line,) = said(config, command, *arguments, code=2)
    assert line.endswith("say what: TOPIC PEER, or --endpoint NAME, or --rule FROM:TO")


@pytest.mark.parametrize("way", ["cloud:vehicle", "vehicle:nowhere", "nowhere:cloud"])
def test_what_is_not_in_the_file_is_not_paused(config: Path, way: str) -> None:
    (line,) = said(config, "pause", "--rule", way, code=1)
    assert line.startswith("error NOT_FOUND: ")
