"""A backup of a running or stopped streamer, and what is restored from it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from history.file.verify import verify
from history.log.log import Log
from storage.disk import Disk
from streamer.app import Streamer, serve
from streamer.commands import cli
from streamer.config import load
from streamer.letters.dead_letter import LetterStore
from streamer.operating import backup
from streamer.operating.backup import back_up_stopped, finish_restore, read_manifest, restore
from tests.streamer.conftest import MakeWorld, World, publication
from tests.streamer.conftest import make_world as make_world
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.inspect import StoreView
from usubscription.state import Subscribe
from usubscription.store.database import Database

TOPIC = uris.uri("vehicle1", 0x8001, 1, 0x8001)


async def filled(data_dir: Path, records: int = 20) -> bytes:
    """A data_dir as a stopped streamer leaves it. Returns the incarnation of its log."""
    data_dir.mkdir()
    async with await Log.open(data_dir / "history.db", name="durable") as log:
        await add(log, records)
        log.cursors.set("egress:cloud", 7, holds=True)
    database = Database(data_dir / "usubscription.db", "vehicle1")
    database.open()
    for number in range(5):
        database.apply([Subscribe((*uris.key(TOPIC)[:3], 0x8000 + number), ("cloud", 1, 1, 0), 3)], 1_790_000_000_000)
    database.close()
    letters = LetterStore(data_dir / "dead-letters.db")
    message = publication(TOPIC, "dead").SerializeToString()
    letters.write([(1_790_000_000_000, int(UCode.UNAVAILABLE), "no way", "cloud", message)])
    letters.close()
    (data_dir / "paused.json").write_text("[]")
    (data_dir / "interest-cloud.json").write_text("[]")
    (data_dir / "reserve").write_bytes(b"")
    return log.incarnation


async def add(log: Log, count: int) -> None:
    message = UMessageBuilder.publish(TOPIC).build_from_upayload(
        UPayload(b"x" * 100, UPayloadFormat.UPAYLOAD_FORMAT_TEXT)
    )
    for _ in range(count):
        await log.append([log.stream_id(TOPIC)], [message])


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def names(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir()}


async def refused(code: UCode.ValueType, what: str, do: Callable[[], Any]) -> None:
    with pytest.raises(UStatusError, match=what) as error:
        await asyncio.to_thread(do)
    assert error.value.code == code, error.value


# -- stopped


async def test_a_stopped_streamer_is_backed_up_and_restored(tmp_path: Path) -> None:
    incarnation = await filled(tmp_path / "data")
    made = back_up_stopped(tmp_path / "data", tmp_path / "backup", "vehicle1")
    assert (made["oldest_seq"], made["newest_seq"], made["incarnation"]) == (1, 20, incarnation.hex())
    assert mode(tmp_path / "backup") == 0o700
    assert {mode(one) for one in (tmp_path / "backup").iterdir()} == {0o600}
    assert names(tmp_path / "backup") == {
        *("manifest.json", "history.db", "history.db.mark", "usubscription.db", "dead-letters.db"),
        *("paused.json", "interest-cloud.json"),
    }
    assert verify(tmp_path / "backup" / "history.db").is_sound

    summary = restore(tmp_path / "backup", tmp_path / "new", "vehicle1")
    assert summary["moved_to"] is None
    assert names(tmp_path / "new") == (names(tmp_path / "backup") - {"manifest.json"}) | {"history.db.lock"}
    async with await Log.open(tmp_path / "new" / "history.db", name="durable") as log:
        assert log.incarnation.hex() == summary["incarnation"] != incarnation.hex()
        assert log.newest_seq == 20
        assert log.cursors.seq("egress:cloud") == 7
        assert [one.kind for one in log.damage] == ["missing"]
        assert "restored from a backup of 20" in log.damage[0].detail
    with StoreView(tmp_path / "new" / "usubscription.db") as view:
        assert len(list(view.subscriptions(None, None))) == 5
    letters = LetterStore(tmp_path / "new" / "dead-letters.db")
    assert [one.reason for one in letters.read()] == ["no way"]
    letters.close()


async def test_what_was_in_the_way_is_moved_aside_and_counted(tmp_path: Path) -> None:
    incarnation = await filled(tmp_path / "data")
    back_up_stopped(tmp_path / "data", tmp_path / "backup", "vehicle1")
    async with await Log.open(tmp_path / "data" / "history.db", name="durable") as log:
        await add(log, 4)
    (tmp_path / "data" / "notes.txt").write_text("of somebody else")
    before = names(tmp_path / "data")

    def again(*, replace: bool = False, same: bool = False) -> dict[str, Any]:
        return restore(tmp_path / "backup", tmp_path / "data", replace=replace, same_incarnation=same)

    await refused(UCode.FAILED_PRECONDITION, "has files already .* say --replace", again)
    await refused(UCode.FAILED_PRECONDITION, "4 records were appended after", lambda: again(replace=True, same=True))
    assert names(tmp_path / "data") == before
    aside = Path(again(replace=True)["moved_to"])
    assert aside.parent == tmp_path / "data"
    assert mode(aside) == 0o700
    assert names(aside) >= {"history.db", "history.db.mark", "usubscription.db", "paused.json"}
    assert names(tmp_path / "data") >= {"notes.txt", "reserve", "history.db", aside.name}
    async with await Log.open(aside / "history.db", name="before") as log:
        assert log.newest_seq == 24
    async with await Log.open(tmp_path / "data" / "history.db", name="durable") as log:
        assert [(one.after, one.before, one.incarnation) for one in log.damage] == [(20, 25, incarnation)]
        await add(log, 1)
        assert log.newest_seq == 21


async def test_a_move_to_other_hardware_keeps_the_incarnation(tmp_path: Path) -> None:
    incarnation = await filled(tmp_path / "data")
    back_up_stopped(tmp_path / "data", tmp_path / "backup", "")
    restore(tmp_path / "backup", tmp_path / "new", "vehicle1", same_incarnation=True)
    assert verify(tmp_path / "new" / "history.db").is_sound
    async with await Log.open(tmp_path / "new" / "history.db", name="durable") as log:
        assert (log.incarnation, log.damage) == (incarnation, [])


async def test_backups_and_restores_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    data, made = tmp_path / "data", tmp_path / "backup"
    await refused(UCode.INVALID_ARGUMENT, "no log at", lambda: back_up_stopped(tmp_path, made, ""))
    await filled(data)
    await refused(UCode.FAILED_PRECONDITION, "is not empty", lambda: back_up_stopped(data, data, ""))
    away = tmp_path / "not" / "there"
    await refused(UCode.FAILED_PRECONDITION, "make that folder first", lambda: back_up_stopped(data, away, ""))
    await refused(UCode.FAILED_PRECONDITION, "no complete backup", lambda: restore(data, tmp_path / "new"))
    back_up_stopped(data, made, "vehicle1")
    await refused(UCode.FAILED_PRECONDITION, "it is of vehicle1", lambda: restore(made, tmp_path / "new", "vehicle2"))
    async with await Log.open(data / "history.db", name="durable"):
        await refused(UCode.FAILED_PRECONDITION, "stop the streamer first", lambda: restore(made, data, replace=True))
        other = tmp_path / "other"
        await refused(UCode.FAILED_PRECONDITION, "stop the streamer", lambda: back_up_stopped(data, other, ""))
    assert not (tmp_path / "new").exists()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("hurt", "code", "what"),
    [
        (lambda made: _flip(made / "history.db"), UCode.DATA_LOSS, "checksum is wrong"),
        (lambda made: os.truncate(made / "usubscription.db", 100), UCode.DATA_LOSS, "expected .* bytes, got 100"),
        (lambda made: (made / "paused.json").unlink(), UCode.DATA_LOSS, "got None"),
        (lambda made: (made / "manifest.json").unlink(), UCode.FAILED_PRECONDITION, "no complete backup"),
        (lambda made: (made / "manifest.json").write_text("[1]"), UCode.FAILED_PRECONDITION, "no complete backup"),
        (lambda made: _edit(made, format=2), UCode.FAILED_PRECONDITION, "it has format 2"),
        (lambda made: _edit(made, files={}), UCode.FAILED_PRECONDITION, "it names other files"),
        (lambda made: _edit(made, files={"../x": {}}), UCode.FAILED_PRECONDITION, "can't be read"),
        (
            lambda made: _edit(made, files={"../x": {"bytes": 1, "sha256": ""}}),
            UCode.FAILED_PRECONDITION,
            "it names other files",
        ),
        (lambda made: _name(made, "x" * 300 + ".json"), UCode.FAILED_PRECONDITION, "it names other files"),
        (lambda made: _name(made, "\0.json"), UCode.FAILED_PRECONDITION, "it names other files"),
        (lambda made: _name(made, "\x1b[2J.json"), UCode.FAILED_PRECONDITION, "it names other files"),
        (lambda made: _edit(made, incarnation="zz"), UCode.FAILED_PRECONDITION, "can't be read"),
        (lambda made: _edit(made, newest_seq=10**30), UCode.FAILED_PRECONDITION, "can't be read"),
        (lambda made: _edit(made, time="\x1b]0;owned\x07"), UCode.FAILED_PRECONDITION, "can't be read"),
        (lambda made: _link(made / "history.db"), UCode.DATA_LOSS, "is not what was saved"),
    ],
)
async def test_a_backup_that_was_changed_is_not_restored(
    tmp_path: Path, hurt: Callable[[Path], object], code: UCode.ValueType, what: str
) -> None:
    await filled(tmp_path / "data")
    back_up_stopped(tmp_path / "data", tmp_path / "backup", "vehicle1")
    hurt(tmp_path / "backup")
    await refused(code, what, lambda: restore(tmp_path / "backup", tmp_path / "new"))
    assert not (tmp_path / "new").exists() or names(tmp_path / "new") == {"history.db.lock"}


def _link(file: Path) -> None:
    file.symlink_to(file.rename(file.with_name("elsewhere")))


def _name(made: Path, name: str) -> None:
    _edit(made, files=json.loads((made / "manifest.json").read_text())["files"] | {name: {"bytes": 1, "sha256": ""}})


def _edit(made: Path, **fields: Any) -> None:
    path = made / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
async def test_what_root_restores_belongs_to_the_owner_of_the_folder(tmp_path: Path) -> None:
    await filled(tmp_path / "data")
    back_up_stopped(tmp_path / "data", tmp_path / "backup", "")
    os.chown(tmp_path / "data", 4711, 4712)
    moved_to = restore(tmp_path / "backup", tmp_path / "data", replace=True)["moved_to"]
    made = [tmp_path / "data" / name for name in names(tmp_path / "backup") - {"manifest.json"}]
    owners = {(one.stat().st_uid, one.stat().st_gid) for one in [*made, tmp_path / "data" / "history.db.lock"]}
    assert owners == {(4711, 4712)}
    assert Path(moved_to).stat().st_uid == 4711


@pytest.mark.parametrize(
    "plan",
    [
        {"old": [], "new": ["../stolen"], "aside": None},
        {"old": ["history.db"], "new": [], "aside": "../replaced-1"},
        {"old": ["history.db"], "new": [], "aside": "replaced-link"},
        {"old": [["x"]], "new": [], "aside": None},
        {},
    ],
)
async def test_the_owner_of_a_folder_leads_root_to_no_other_one(tmp_path: Path, plan: dict[str, Any]) -> None:
    await filled(tmp_path / "data")
    back_up_stopped(tmp_path / "data", tmp_path / "backup", "")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data" / "replaced-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "restored").mkdir()
    (tmp_path / "data" / "restored" / "plan").write_text(json.dumps(plan))
    before = names(tmp_path), names(tmp_path / "data")
    await refused(
        UCode.FAILED_PRECONDITION, "can't be completed", lambda: restore(tmp_path / "backup", tmp_path / "data")
    )
    assert (names(tmp_path), names(tmp_path / "data")) == before
    assert not names(tmp_path / "elsewhere")


async def test_a_lock_is_no_link_to_another_file(tmp_path: Path) -> None:
    await filled(tmp_path / "data")
    (tmp_path / "other").write_text("content")
    (tmp_path / "data" / "history.db.lock").unlink()
    (tmp_path / "data" / "history.db.lock").symlink_to(tmp_path / "other")
    locked = partial(back_up_stopped, tmp_path / "data", tmp_path / "backup", "")
    await refused(UCode.FAILED_PRECONDITION, "can't be locked", locked)
    assert (tmp_path / "other").read_text() == "content"


async def test_a_backup_that_was_put_in_place_by_hand_can_be_backed_up_again(tmp_path: Path) -> None:
    incarnation = await filled(tmp_path / "data")
    back_up_stopped(tmp_path / "data", tmp_path / "backup", "")
    shutil.copytree(tmp_path / "backup", tmp_path / "by hand")
    assert back_up_stopped(tmp_path / "by hand", tmp_path / "again", "")["incarnation"] == incarnation.hex()
    assert "manifest.json" not in read_manifest(tmp_path / "again").files
    restore(tmp_path / "again", tmp_path / "new")


# -- interrupted


class _EndError(Exception):
    """The process ends here."""


def _dying(disk: Disk, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Make the process end at this rename or sync of many."""
    left = [calls]

    def step(do: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise _EndError
            return do(*given, **more)

        return counted

    monkeypatch.setattr(Path, "rename", step(Path.rename))
    monkeypatch.setattr(os, "rename", step(os.rename))
    monkeypatch.setattr(Disk, "sync", step(Disk.sync))
    monkeypatch.setattr(shutil, "rmtree", step(shutil.rmtree))


async def test_a_restore_that_ends_anywhere_is_there_completely_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(tmp_path / "data")
    back_up_stopped(tmp_path / "data", tmp_path / "backup", "vehicle1")
    outcomes = []
    for calls in range(100):
        data = tmp_path / f"data{calls}"
        await filled(data, 30)
        with monkeypatch.context() as patched:
            _dying(Disk(), patched, calls)
            try:
                restore(tmp_path / "backup", data, replace=True)
                is_complete = True
            except _EndError:
                is_complete = False
        if (data / "restored").exists():
            with pytest.MonkeyPatch.context() as patched:  # and once more, at the first steps of the next start
                _dying(Disk(), patched, calls % 7)
                with contextlib.suppress(_EndError):
                    finish_restore(data)
        finish_restore(data)
        async with await Log.open(data / "history.db", name="durable") as log:
            outcomes.append(log.newest_seq)
        restored = outcomes[-1] == 20
        (aside,) = data.glob("replaced-*") if restored else (data,)
        async with await Log.open(aside / "history.db", name="before") as log:
            assert log.newest_seq == 30
        assert (aside / "paused.json").exists()
        assert not {"restored", "restoring"} & names(data)
        assert restored or not is_complete
        if is_complete:
            break
    assert outcomes == sorted(outcomes, reverse=True), "from some step on it is done"
    assert {20, 30} == set(outcomes)


async def test_a_backup_that_is_killed_is_none(tmp_path: Path) -> None:
    await filled(tmp_path / "data", 2_000)
    script = """
import sys, time
from pathlib import Path
from storage import copies
from streamer.operating.backup import back_up_stopped
def rest(pace):
    print("step", flush=True)
    time.sleep(60)
copies.CopyPace.rest = rest
back_up_stopped(Path(sys.argv[1]), Path(sys.argv[2]), "")
"""
    command = [sys.executable, "-c", script, str(tmp_path / "data"), str(tmp_path / "backup")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220 - it starts at once
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"step\n"
        process.send_signal(signal.SIGKILL)
    await refused(
        UCode.FAILED_PRECONDITION, "no complete backup", lambda: restore(tmp_path / "backup", tmp_path / "new")
    )
    await refused(
        UCode.FAILED_PRECONDITION,
        "unfinished backup has no manifest.json",
        lambda: back_up_stopped(tmp_path / "data", tmp_path / "backup", ""),
    )
    back_up_stopped(tmp_path / "data", tmp_path / "again", "")


# -- disks that are full


class _FullDisk(Disk):
    """The disk of backups, which is full after so many bytes."""

    def __init__(self, folder: Path, bytes: int) -> None:
        self._folder, self._bytes = folder, bytes

    def free_bytes(self, path: Path) -> int:
        if path.parent != self._folder:
            return super().free_bytes(path)
        return max(0, self._bytes - sum(one.stat().st_size for one in self._folder.iterdir()))

    def sync(self, path: Path) -> None:
        if path.parent == self._folder and not self.free_bytes(path):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        super().sync(path)


class _SuddenlyFullDisk(Disk):
    """Another program takes the rest of the disk of the backup after so many steps."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps

    def sync(self, path: Path) -> None:
        self._steps -= path.parent == self._folder
        if self._steps < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().sync(path)


@pytest.mark.parametrize("bytes", [0, 1 << 20, (1 << 20) + 60_000, -1, -2, -3, -5])
async def test_a_full_disk_of_the_backup_leaves_no_files_there(tmp_path: Path, bytes: int) -> None:
    await filled(tmp_path / "data", 200)
    folder = tmp_path / "backup"
    disk = _FullDisk(folder, bytes) if bytes >= 0 else _SuddenlyFullDisk(folder, -bytes)
    with pytest.raises(UStatusError, match="choose another one") as error:
        backup.back_up(tmp_path / "data", folder, "", disk=disk)
    assert error.value.code == UCode.RESOURCE_EXHAUSTED
    assert not (tmp_path / "backup").exists()
    assert verify(tmp_path / "data" / "history.db").is_sound


async def test_on_the_log_s_own_disk_its_room_to_grow_stays_free(tmp_path: Path) -> None:
    await filled(tmp_path / "data")
    free = Disk().free_bytes(tmp_path / "data")
    with pytest.raises(UStatusError, match="left over for those who use that disk") as error:
        backup.back_up(tmp_path / "data", tmp_path / "backup", "", log_bytes_max=2 * free)
    assert error.value.code == UCode.RESOURCE_EXHAUSTED


# -- running


async def _running(make_world: MakeWorld) -> World:
    return await make_world(
        {"vehicle": "", "cloud": "none"},
        {uris.format(TOPIC): ["//cloud/8001/1/0"]},
    )


async def test_a_running_streamer_is_backed_up_and_brought_back(make_world: MakeWorld, tmp_path: Path) -> None:
    world = await _running(make_world)
    data_dir = world.config.streamer.data_dir
    publisher, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud")
    heard = await world.hear(cloud, TOPIC)
    for number in range(10):
        await publisher.send(publication(TOPIC, f"{number}"))
    await world.until(lambda: len(heard.texts) == 10)
    done = asyncio.create_task(world.streamer.operations.answer("backup", {"directory": str(tmp_path / "backup")}))
    sent = 10
    while not done.done():
        await publisher.send(publication(TOPIC, f"{sent}"))
        sent += 1
        await asyncio.sleep(0.002)
    made = await done
    assert made["authority"] == "vehicle1"
    assert 10 <= made["newest_seq"] <= sent
    assert verify(tmp_path / "backup" / "history.db").is_sound
    assert read_manifest(tmp_path / "backup").newest_seq == made["newest_seq"]
    await world.until(lambda: len(heard.texts) == sent)

    await world.stop()
    restore(tmp_path / "backup", data_dir, "vehicle1", replace=True)
    await world.start()
    assert any("restored from a backup" in one for one in world.parts.problems())
    await publisher.send(publication(TOPIC, "after"))
    await world.until(lambda: "after" in heard.texts)
    assert set(heard.texts) == {*map(str, range(sent)), "after"}


async def test_one_backup_at_a_time_and_only_to_an_absolute_path(make_world: MakeWorld, tmp_path: Path) -> None:
    world = await _running(make_world)
    ask = world.streamer.operations.answer
    for directory in ("backup", f"{tmp_path}/\0", f"{tmp_path}/\ud800"):
        with pytest.raises(UStatusError, match="absolute path"):
            await ask("backup", {"directory": directory})
    for name in ("restored", "restoring", "notes.json"):
        with pytest.raises(UStatusError, match="a name of our own files"):
            await ask("backup", {"directory": str(world.config.streamer.data_dir / name)})
    (tmp_path / "file").write_text("content")
    with pytest.raises(UStatusError, match="choose a new folder"):
        await ask("backup", {"directory": str(tmp_path / "file")})
    assert (tmp_path / "file").read_text() == "content"
    both = [ask("backup", {"directory": str(tmp_path / name)}) for name in ("one", "two")]
    first, second = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(first, dict)
    assert isinstance(second, UStatusError)
    assert second.code == UCode.ALREADY_EXISTS
    await ask("backup", {"directory": str(tmp_path / "two")})


async def test_a_start_completes_an_interrupted_restore(make_world: MakeWorld, tmp_path: Path) -> None:
    world = await _running(make_world)
    data_dir = world.config.streamer.data_dir
    publisher = await world.node("vehicle", "vehicle1")
    await publisher.send(publication(TOPIC, "first"))
    await world.taken("vehicle")
    await world.streamer.operations.answer("backup", {"directory": str(tmp_path / "backup")})
    await world.stop()
    with pytest.MonkeyPatch.context() as patched:
        finish, turn = backup._finish, iter([True, False])

        def interrupted(data_dir: Path, disk: Disk) -> str | None:
            if next(turn):
                return finish(data_dir, disk)
            raise _EndError

        patched.setattr(backup, "_finish", interrupted)
        with pytest.raises(_EndError):
            restore(tmp_path / "backup", data_dir, replace=True)
    assert (data_dir / "restored").is_dir()
    await world.start()
    assert not (data_dir / "restored").exists()
    assert any("restored from a backup" in one for one in world.parts.problems())


# -- the commands


def run(*arguments: str | Path) -> Result:
    found = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, [*map(str, arguments)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exc_info
    return found


async def test_the_commands_do_both(tmp_path: Path) -> None:
    config = tmp_path / "vehicle.toml"
    config.write_text(
        f'[streamer]\ndata_dir = "{tmp_path}/data"\n[history]\nrecord = ["//vehicle1/FFFFFFFF/FF/FFFF"]\n'
        '[[endpoint]]\nname = "v"\ntransport = "local"\nauthorities = ["vehicle1"]\n'
    )
    stopping = asyncio.Event()
    made: asyncio.Future[Streamer] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(load(config), made.set_result, stopping))
    streamer = await asyncio.wait_for(made, 20)
    await add(streamer.assembly.logs.durable, 5)
    done = await asyncio.to_thread(run, "backup", tmp_path / "one", "--config", config)
    assert done.exit_code == 0, done.output
    assert f"backed up records 1 to 5, 0.1 MiB to {tmp_path}/one" in done.output
    done = await asyncio.to_thread(run, "restore", tmp_path / "one", "--config", config)
    assert done.exit_code == 1
    assert "stop the streamer first" in done.output
    stopping.set()
    await asyncio.wait_for(serving, 20)

    done = run("backup", tmp_path / "two", "--config", config, "--json")
    assert json.loads(done.stdout)["newest_seq"] == 5
    done = run("restore", tmp_path / "two", "--config", config)
    assert "--replace" in done.output
    done = run("restore", tmp_path / "two", "--config", config, "--replace", "--same-incarnation")
    assert done.exit_code == 0, done.output
    assert "restored records 1 to 5" in done.output
    assert run("history", "verify", "--config", config).exit_code == 0
    assert run("history", "verify", "--data-dir", tmp_path / "one").exit_code == 0
    assert run("restore", tmp_path / "two", "--data-dir", tmp_path / "new", "--json").exit_code == 0
    assert "missing" in run("history", "acknowledge", "--data-dir", tmp_path / "new").output
    assert run("history", "verify", "--data-dir", tmp_path / "new").exit_code == 0


WRITING = """
import asyncio, sys
from pathlib import Path
from storage import copies, logs
from streamer.app import serve
from streamer.config import load
from tests.operating.test_backup import add

logs.configure()  # to standard error
copies.STEP_BYTES = 1 << 14  # many steps

async def main():
    made = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(load(Path(sys.argv[1])), made.set_result))
    durable = (await made).assembly.logs.durable
    await add(durable, 500)
    print("filled", flush=True)
    while True:
        await add(durable, 1)
asyncio.run(main())
"""


async def test_a_streamer_that_is_killed_while_it_is_backed_up_has_a_sound_log_and_no_backup(tmp_path: Path) -> None:
    config = tmp_path / "vehicle.toml"
    config.write_text(
        f'[streamer]\ndata_dir = "{tmp_path}/data"\n'
        '[[endpoint]]\nname = "v"\ntransport = "local"\nauthorities = ["vehicle1"]\n'
    )
    command = [sys.executable, "-c", WRITING, str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220 - it starts at once
        assert process.stdout is not None
        try:
            assert await asyncio.to_thread(process.stdout.readline) == b"filled\n"
            asking = asyncio.create_task(asyncio.to_thread(run, "backup", tmp_path / "backup", "--config", config))
            async with asyncio.timeout(20):
                while not (tmp_path / "backup" / "history.db").exists():  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.001)
        finally:
            process.kill()
    asked = await asking
    assert asked.exit_code == 1
    assert "does not answer" in asked.output
    assert not (tmp_path / "backup" / "manifest.json").exists()
    assert verify(tmp_path / "data" / "history.db").is_sound
    assert run("backup", tmp_path / "again", "--config", config).exit_code == 0
    assert verify(tmp_path / "again" / "history.db").is_sound
