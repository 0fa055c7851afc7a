"""What `run` refuses, or can't get over without a person, `check` finds: both look at the same damaged data_dir."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from typer.testing import CliRunner, Result

from history.file.rows import LOG
from history.log.log import Log
from storage.disk import REAL_DISK, FileKind
from streamer.app import Streamer
from streamer.commands import cli
from streamer.config import load
from streamer.data_dir import RESTORED
from streamer.letters.dead_letter import LETTERS
from streamer.operating.backup import PLAN
from streamer.operating.states import DEGRADED, NOT_READY
from streamer.operating.states import READY as IS_READY
from tests.cli.test_cli_read_only import CONFIG as WITHOUT_SUBSCRIPTIONS
from transports.local import LocalNetwork, LocalTransport
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider
from usubscription.store.database import Database
from usubscription.store.tables import STORE

WAIT_S = 60
TOPIC = uris.parse("//vehicle1/8001/1/8001")
REFUSED: Final = "refused"
CONFIG = WITHOUT_SUBSCRIPTIONS + 'usubscription = "remote"\n'
EPOCHS = """
[history]
record = ["//vehicle1/8001/1/8001"]

[[epochs]]
name = "minutes"
topics = ["//vehicle1/8001/1/8001"]
{kept}
"""
NAMES = {LOG.what: "history.db", LETTERS.what: "dead-letters.db", STORE.what: "usubscription.db"}


def newer(kind: FileKind) -> Callable[[Path], None]:
    return lambda folder: _sqlite(folder / NAMES[kind.what], kind.application_id, kind.version + 1)


def foreign(kind: FileKind) -> Callable[[Path], None]:
    return lambda folder: _sqlite(folder / NAMES[kind.what], 77, 1)


def _sqlite(path: Path, application: int, version: int) -> None:
    path.unlink(missing_ok=True)
    with closing(REAL_DISK.connect(path)) as db:
        db.execute("CREATE TABLE other (x)")
        db.execute(f"PRAGMA application_id = {application}")
        db.execute(f"PRAGMA user_version = {version}")


def a_folder(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return make


def garbage(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(b"this is nothing that we have written" * 100) and None


def of_another_authority(folder: Path) -> None:
    for path in folder.glob("usubscription.db*"):
        path.unlink()
    with closing(Database(folder / "usubscription.db", "vehicle2")) as store:
        store.open()


def of_a_development_version(folder: Path) -> None:
    with closing(REAL_DISK.connect(folder / "usubscription.db")) as db:
        db.execute("DROP TABLE handled")


def half_restored(folder: Path) -> None:
    (folder / RESTORED).mkdir()
    (folder / RESTORED / PLAN).write_text(json.dumps({"old": ["../other"], "new": [], "aside": None}))


def log_missing(folder: Path) -> None:
    async def record() -> None:
        async with await Log.open(folder / "history.db", name="durable") as log:
            await log.append([log.stream_id(TOPIC, None)], [EncodedMessage.of(UMessageBuilder.publish(TOPIC).build())])

    asyncio.run(record())
    (folder / "history.db").unlink()


class Case(NamedTuple):
    harm: Callable[[Path], object]
    outcome: str  # of a start
    says: str  # what `check` prints
    needs_person: bool = False  # of a gateway that works in part; what a start refuses always needs one


CASES = {
    "log, newer": Case(newer(LOG), REFUSED, "this program knows up to"),
    "log, foreign": Case(foreign(LOG), REFUSED, "not a log"),
    "log, a folder": Case(a_folder("history.db"), REFUSED, "it is a folder"),
    "log, garbage": Case(garbage("history.db"), DEGRADED, "history.db is damaged"),
    "log, missing": Case(log_missing, DEGRADED, "is missing"),
    "mark, garbage": Case(garbage("history.db.mark"), DEGRADED, "it is not a mark"),
    "mark, a folder": Case(a_folder("history.db.mark"), REFUSED, "history.db.mark is no file"),
    "lock, a folder": Case(a_folder("history.db.lock"), REFUSED, "can't be locked"),
    "subscriptions, newer": Case(newer(STORE), REFUSED, "this program knows up to"),
    "subscriptions, foreign": Case(foreign(STORE), REFUSED, "not a uSubscription store"),
    "subscriptions, a folder": Case(a_folder("usubscription.db"), NOT_READY, "it is a folder"),
    "subscriptions, garbage": Case(garbage("usubscription.db"), NOT_READY, "usubscription.db is damaged"),
    "subscriptions, another authority": Case(of_another_authority, REFUSED, "belongs to authority 'vehicle2'"),
    "subscriptions, development": Case(of_a_development_version, REFUSED, "a development version wrote it"),
    "dead letters, newer": Case(newer(LETTERS), DEGRADED, "this program knows up to", needs_person=True),
    "dead letters, foreign": Case(foreign(LETTERS), DEGRADED, "not a dead letter store", needs_person=True),
    "dead letters, a folder": Case(a_folder("dead-letters.db"), REFUSED, "it is a folder"),
    "dead letters, garbage": Case(garbage("dead-letters.db"), IS_READY, "dead-letters.db is damaged"),
    "pauses, garbage": Case(garbage("paused.json"), DEGRADED, "paused.json can't be read", needs_person=True),
    "interest, garbage": Case(garbage("interest-cloud.json"), IS_READY, "interest-cloud.json can't be read"),
    "own interest, garbage": Case(garbage("interest-vehicle1.json"), IS_READY, "interest-vehicle1.json can't be read"),
    "partners, garbage": Case(
        garbage("usubscription.db.partners"), IS_READY, "usubscription.db.partners can't be read"
    ),
    "restore, another folder": Case(half_restored, REFUSED, "its plan leads to another folder"),
    "reserve, a folder": Case(a_folder("reserve"), IS_READY, "reserve can't be written"),
    "nothing": Case(lambda folder: None, IS_READY, "has no mistakes"),
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "vehicle.toml"
    path.write_text(CONFIG.format(folder=tmp_path / "data"))
    return path


async def started(config: Path, *, publishing: bool = False) -> str:
    """Start a gateway, let it record a message if `publishing`, and stop it. Returns what became of it: REFUSED, or its
    state after the start."""
    try:
        streamer = await Streamer.create(load(config))
    except UStatusError:
        return REFUSED
    running, ready = asyncio.create_task(streamer.run()), asyncio.create_task(streamer.assembly.ready.wait())
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if running.done():
        assert isinstance(running.exception(), BaseExceptionGroup)
        return REFUSED
    if publishing:
        async with LocalTransport.on(LocalNetwork.named("default"), LocalUriProvider("vehicle1", 0x8001, 1)) as node:
            await node.send(UMessageBuilder.publish(TOPIC).build())
            async with asyncio.timeout(WAIT_S):
                await streamer.assembly.logs.durable.wait(0)
    # the uSubscription of the cloud, which is not there, is asked again and again
    conditions = [one for one in streamer.parts.conditions() if one.endpoint != "cloud"]
    streamer.stop()
    await running
    return NOT_READY if any(one.is_fatal for one in conditions) else DEGRADED if conditions else IS_READY


def checked(config: Path) -> Result:
    result = CliRunner().invoke(cli.app, ["check", "--config", str(config)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result


def words(result: Result) -> str:
    """The output without the line breaks of a narrow terminal."""
    return " ".join(result.output.split())


@pytest.mark.parametrize("name", CASES)
def test_check_finds_what_a_start_does_not_get_over(name: str, config: Path, tmp_path: Path) -> None:
    harm, outcome, says, needs_person = CASES[name]
    assert asyncio.run(started(config)) == IS_READY, "the files are made by a first start"
    harm(tmp_path / "data")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "data").iterdir())
    result = checked(config)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "data").iterdir()) == before
    assert asyncio.run(started(config)) == outcome
    assert says in words(result)
    assert (result.exit_code != 0) == (outcome in (REFUSED, NOT_READY) or needs_person), result.output


HOLDER = "import sys, time; from pathlib import Path; from storage.disk import REAL_DISK; "
HOLDER += "lock = REAL_DISK.lock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
    ("name", "outcome"), [("history.db", REFUSED), ("usubscription.db", REFUSED), ("dead-letters.db", DEGRADED)]
)
def test_check_finds_a_file_that_another_process_has(name: str, outcome: str, config: Path, tmp_path: Path) -> None:
    assert asyncio.run(started(config)) == IS_READY
    lock = tmp_path / "data" / f"{name}.lock"
    program = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "locked\n"
        result = checked(config)
        assert asyncio.run(started(config)) == outcome
        other.stdin.close()
    is_streamer = name == "history.db"  # only a streamer locks the log
    says = f"runs as process {other.pid}" if is_streamer else f"is in use by process {other.pid}"
    assert says in words(result)
    assert (result.exit_code == 0) == is_streamer, result.output


async def test_check_beside_a_gateway_that_runs_names_its_process(config: Path) -> None:
    streamer = await Streamer.create(load(config))
    running = asyncio.create_task(streamer.run())
    try:
        async with asyncio.timeout(WAIT_S):
            await streamer.assembly.ready.wait()
        result = await asyncio.to_thread(checked, config)
    finally:
        streamer.stop()
        await running
    assert result.exit_code == 0, result.output
    assert f"a streamer with this data_dir runs as process {os.getpid()}" in words(result)


def test_check_finds_epochs_that_were_kept_by_another_kind(config: Path) -> None:
    plain = config.read_text()
    config.write_text(plain + EPOCHS.format(kept='by = "bucket"\nwidth_ms = 1_000'))
    assert asyncio.run(started(config, publishing=True)) == IS_READY
    assert checked(config).exit_code == 0
    config.write_text(plain + EPOCHS.format(kept='by = "progress"'))
    result = checked(config)
    assert asyncio.run(started(config)) == REFUSED
    assert result.exit_code != 0
    assert "the epochs of 'minutes' were kept by bucket" in words(result)
