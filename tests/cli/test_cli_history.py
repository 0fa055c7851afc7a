"""`history verify` and `history acknowledge`: what a log has lost is found, shown, and seen by a person."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from history.log.log import Log
from streamer.commands import cli, history
from streamer.commands.options import Network
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import LogState, TopicState
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.uri_pb2 import UUri

TOPIC = uris.parse("//vehicle1/8001/1/8001")
CONFIG = (
    '[streamer]\ndata_dir = "{folder}"\n[[endpoint]]\nname = "v"\ntransport = "local"\nauthorities = ["vehicle1"]\n'
)


def run(*arguments: str | Path) -> Result:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(
        cli.app, ["history", *map(str, arguments)], prog_name="up-streamer"
    )
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def as_json(*arguments: str | Path) -> list[Any]:
    return [json.loads(line) for line in run(*arguments, "--json").stdout.splitlines()]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """With a log of 20 records in 10 chunks."""

    async def make() -> None:
        async with await Log.open(tmp_path / "history.db", name="made") as log:
            id = log.stream_id(TOPIC)
            for _ in range(10):
                await log.append([id] * 2, [UMessageBuilder.publish(TOPIC).build_from_upayload(UPayload(b"x", 5))] * 2)
            log.cursors.set("egress:cloud", 3, holds=True)

    asyncio.run(make())
    return tmp_path


def damage(data_dir: Path) -> None:
    db = sqlite3.connect(data_dir / "history.db")
    db.execute("UPDATE chunk SET data = zeroblob(length(data)) WHERE first_seq = 5")
    db.execute("UPDATE cursor SET seq = seq + 8")
    db.commit()
    db.close()


def test_a_log_that_is_whole_is_sound(data_dir: Path) -> None:
    (found,) = as_json("verify", "--data-dir", data_dir)
    assert (found["sound"], found["records"], found["oldest_seq"], found["newest_seq"], found["found"]) == (
        True,
        20,
        1,
        20,
        [],
    )
    shown = run("verify", "--data-dir", data_dir)
    assert shown.exit_code == 0
    assert "20 records" in shown.stdout
    assert "sound" in shown.stdout


def test_what_is_damaged_is_listed_and_the_exit_code_says_so(data_dir: Path) -> None:
    damage(data_dir)
    shown = run("verify", "--data-dir", data_dir)
    assert shown.exit_code == 1
    assert "records: the records between 4 and 7" in shown.stdout
    assert "cursor: name 'egress:cloud': the checksum is wrong" in shown.stdout
    (found,) = as_json("verify", "--data-dir", data_dir)
    assert (found["sound"], found["records"], found["found_total"]) == (False, 18, 2)
    assert {row["kind"] for row in found["found"]} == {"records", "cursor"}


def test_printed_records_are_acknowledged_once(data_dir: Path) -> None:
    damage(data_dir)

    async def tell() -> None:
        async with await Log.open(data_dir / "history.db", name="reported") as log:
            await log.read(0)
            await log.read(4)
            assert len(log.damage) == 2

    asyncio.run(tell())
    (found,) = as_json("verify", "--data-dir", data_dir)
    assert (found["found"], {row["kind"] for row in found["not_acknowledged"]}) == ([], {"records", "cursor"})
    (data_dir / "up.toml").write_text(CONFIG.format(folder=data_dir))
    seen = as_json("acknowledge", "--config", data_dir / "up.toml")
    assert {(row["kind"], row["after_seq"], row["before_seq"], row["records_at_most"]) for row in seen} == {
        ("records", 4, 7, 2),
        ("cursor", 0, 0, 0),
    }
    assert as_json("acknowledge", "--data-dir", data_dir) == []
    assert "0 acknowledged" in run("acknowledge", "--data-dir", data_dir).stdout
    assert run("verify", "--data-dir", data_dir).exit_code == 0


@pytest.mark.parametrize("command", ["verify", "acknowledge"])
def test_what_can_not_be_looked_into_is_said(tmp_path: Path, command: str) -> None:
    assert "there is no log" in run(command, "--data-dir", tmp_path).stderr
    assert "say either --data-dir DIR or --config FILE" in run(command).stderr
    (tmp_path / "history.db").write_bytes(b"no database at all" * 500)
    shown = run(command, "--data-dir", tmp_path)
    assert shown.exit_code == 1
    assert "file is not a database" in shown.stdout + shown.stderr
    db = sqlite3.connect(tmp_path / "other.db")
    db.execute("CREATE TABLE songs (name TEXT)")
    db.commit()
    db.close()
    (tmp_path / "other.db").replace(tmp_path / "history.db")
    assert "not a log" in run(command, "--data-dir", tmp_path).stderr


# -- the overview


async def _topics(count: int) -> AsyncIterator[TopicState]:
    for place in range(count):
        yield TopicState(topic=uris.uri("vehicle1", 0x8001, 1, 0x8000 + place), newest_seq=place + 1)


async def test_json_is_one_object_however_many_topics_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    logs = [LogState(incarnation=bytes(16), newest_seq=7, newest_match_seq=5)]
    for count in (0, 1, 2_500):
        await history._print_json(logs, _topics(count))
        reported = json.loads(capsys.readouterr().out)
        assert [log["newest_match_seq"] for log in reported["logs"]] == [5]
        assert [topic["newest_seq"] for topic in reported["topics"]] == list(range(1, count + 1))


async def test_tables_have_an_end_however_many_topics_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "TABLE_ROWS_MAX", 3)
    monkeypatch.setenv("COLUMNS", "200")
    for count, titles in (
        (0, []),
        (3, ["topics"]),
        (7, ["topics, up to number 3", "topics, up to number 6", "topics, up to number 7"]),
    ):
        await history._print_tables([], _topics(count))
        out = capsys.readouterr().out
        assert [line.strip() for line in out.splitlines() if line.strip().startswith("topics")] == titles
        assert out.count("up://vehicle1/8001/1/") == count


TWO = (
    CONFIG
    + '[[endpoint]]\nname = "far"\ntransport = "mqtt5"\nauthorities = ["hub", "*.depot", "bus.depot"]\n'
    + 'settings = { host = "127.0.0.1" }\n'
)


@pytest.mark.parametrize(
    ("text", "service", "transport"),
    [
        (CONFIG, "vehicle1", "local"),
        (CONFIG, "elsewhere", "local"),  # the only one
        (TWO, "vehicle1", "local"),  # the streamer itself
        (TWO, "hub", "mqtt5"),  # asked by the streamer, whom the hub knows
        (TWO, "tram.depot", "mqtt5"),
    ],
)
def test_the_file_of_a_streamer_is_enough_to_ask_a_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, service: str, transport: str
) -> None:
    """docs/epochs.md: `history vehicle1 --epochs --config gateway.toml`, from any folder."""
    (tmp_path / "gateway.toml").write_text(text.replace("{folder}", "data"))
    asked: list[str] = []

    async def frontiers(network: Network, streamer: UUri) -> list[dict[str, Any]]:
        asked.extend([network.transport, network.authority, streamer.authority_name])
        return []

    monkeypatch.setattr(history, "_frontiers", frontiers)
    shown = run(service, "--epochs", "--config", tmp_path / "gateway.toml")
    assert shown.exit_code == 0, shown.output
    assert asked == [transport, "vehicle1", service]
    assert "none of its topics has had a record" in shown.stdout


def test_a_history_without_a_network_says_how_to_name_one(tmp_path: Path) -> None:
    assert "--config FILE of a streamer there" in run("vehicle1", "--epochs").output
    (tmp_path / "gateway.toml").write_text(TWO.replace("{folder}", "data"))
    shown = run("other", "--epochs", "--config", tmp_path / "gateway.toml")
    assert shown.exit_code == 2
    assert "say which one with --endpoint NAME: v, far" in " ".join(shown.output.split())
