"""What only looks writes nothing: a card of a stopped gateway is examined on another machine, read-only or not."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from history.log.log import Log
from storage.disk import REAL_DISK
from streamer.app import serve
from streamer.commands import terminal
from streamer.config import load
from streamer.letters.dead_letter import LETTERS, Letter, LetterStore
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.store.database import Database

WAIT_S = 60
TOPIC = uris.parse("//vehicle1/1/1/8001")
CONFIG = """[streamer]
data_dir = "{folder}"

[[endpoint]]
name = "home"
transport = "local"
authorities = ["vehicle1"]

[[endpoint]]
name = "cloud"
transport = "local"
authorities = ["cloud"]
"""


async def filled(folder: Path, *, index: bool = False) -> None:
    """Write the files of a gateway that was cut off: their last commits are in write-ahead logs. With `index`, these
    have their indexes beside them, as after a kill."""
    live = folder.with_name("live")
    live.mkdir()
    message = EncodedMessage.of(UMessageBuilder.publish(TOPIC).build())
    async with await Log.open(live / "history.db", name="durable") as log:
        await log.append([log.stream_id(TOPIC, None)], [message])
        log.cursors.set("egress:cloud", 0)
        await log.append([log.stream_id(TOPIC, None)], [message])
        with (
            closing(LetterStore(live / "dead-letters.db")) as letters,
            closing(Database(live / "usubscription.db", "vehicle1")) as store,
        ):
            store.open()
            letters.write([Letter(1, UCode.PERMISSION_DENIED, "not allowed", "cloud", message).row()])
            shutil.copytree(live, folder, ignore=shutil.ignore_patterns("*.sock", *(() if index else ("*-shm",))))


@pytest.fixture
async def card(tmp_path: Path) -> Path:
    folder = tmp_path / "card"
    await filled(folder)
    return folder


COMMANDS = (
    ("status", "--config", "{config}"),
    ("cursors", "list", "--config", "{config}"),
    ("dead-letters", "list", "--config", "{config}"),
    ("dead-letters", "show", "1", "--config", "{config}"),
    ("subscriptions", "--config", "{config}"),
    ("history", "verify", "--config", "{config}"),
)
EXPECTED = {
    "check": "has no mistakes",
    "status": "cloud",
    "cursors": "cloud",
    "dead-letters": "not allowed",
    "history": "2 records",
}


def on_a_read_only_card(card: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command while `card` is mounted read-only; root may write in any other folder."""
    mounted = (
        f"mount --bind {card} {card} && mount -o remount,ro,bind {card} && touch {card}/x 2>/dev/null; test $? -ne 0"
    )
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "sh", "-c", mounted], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    script = f"{mounted} && {sys.executable} -m streamer.commands.cli {arguments}"
    return subprocess.run([unshare, "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(command[:2]))
def test_a_read_only_folder_is_looked_at(card: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    config = tmp_path / "vehicle.toml"
    config.write_text(CONFIG.format(folder=card))
    before = listing(card)
    done = on_a_read_only_card(card, " ".join(command).format(config=config))
    assert done.returncode == (1 if command[0] == "status" else 0), done.stdout + done.stderr
    assert EXPECTED.get(command[0], "0 subscriptions") in done.stdout
    assert listing(card) == before


def test_check_of_a_read_only_folder_says_everything_at_once(card: Path, tmp_path: Path) -> None:
    """That a start can't write there does not hide what else is wrong with the files, or what was subscribed."""
    config = tmp_path / "vehicle.toml"
    config.write_text(CONFIG.format(folder=card))
    with closing(REAL_DISK.connect(card / "dead-letters.db")) as db:
        db.execute(f"PRAGMA user_version = {LETTERS.version + 1}")
    wanted = ["//vehicle1/8001/1/8002", "//cloud/9001/1/0", None]
    (card / "interest-cloud.json").write_text(json.dumps([wanted]))
    rest = 'usubscription = "remote"\n[[rule]]\nfrom = "cloud"\nto = "home"\n'  # and nothing goes to the cloud
    config.write_text(config.read_text() + rest)
    done = on_a_read_only_card(card, f"check --config {config}")
    output = " ".join(done.stderr.split())
    assert done.returncode == terminal.EXIT_FAILED, output
    assert "can't be written to" in output
    assert "use a newer program" in output
    assert "subscribed, but not forwarded: no rule allows it: up://cloud/9001/1/0" in output


def listing(folder: Path) -> list[tuple[str, int, int, bytes]]:
    return sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.iterdir()
        if path.is_file()
    )


def look(*command: str, config: Path) -> str:
    """Run a command in a process of its own, since the connections of one process share an index. Returns its output;
    `status` ends with 1 for a gateway that does not run."""
    program = [sys.executable, "-m", "streamer.commands.cli", *(one.format(config=config) for one in command)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode in ((0, 1) if command[0] == "status" else (0,)), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("left", ["closed", "killed", "killed, index lost"])
def test_a_folder_that_can_be_written_stays_as_it_was(tmp_path: Path, left: str) -> None:
    folder, config = tmp_path / "data", tmp_path / "vehicle.toml"
    asyncio.run(filled(folder, index=left == "killed"))
    if left == "closed":
        for name in ("history.db", "dead-letters.db", "usubscription.db"):
            with closing(REAL_DISK.connect(folder / name)) as db:  # the last one that closes it removes its log
                db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        assert not [*folder.glob("*-wal"), *folder.glob("*-shm")]
    else:
        assert len([*folder.glob("*-wal")]) == 3
    config.write_text(CONFIG.format(folder=folder))
    before = listing(folder)
    for command in (("check", "--config", "{config}"), *COMMANDS):
        output = look(*command, config=config)
        assert EXPECTED.get(command[0], "0 subscriptions") in output, command
        assert listing(folder) == before, command


async def test_the_folder_of_a_gateway_that_runs_stays_as_it_was(tmp_path: Path) -> None:
    folder, config = tmp_path / "data", tmp_path / "vehicle.toml"
    config.write_text(CONFIG.format(folder=folder))
    ready, stopping = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(serve(load(config), lambda _: ready.set(), stopping))
    async with asyncio.timeout(WAIT_S):
        await ready.wait()

    def files() -> dict[str, int]:
        """Without those that the gateway itself saves from time to time."""
        return {path.name: path.stat().st_ino for path in folder.iterdir() if not path.name.startswith("interest-")}

    try:
        before = files()
        for command in (("check", "--config", "{config}"), *COMMANDS):
            if command[:2] != ("dead-letters", "show"):  # the store has no letter to show
                await asyncio.to_thread(look, *command, config=config)
                assert files() == before, command
    finally:
        stopping.set()
        await running
