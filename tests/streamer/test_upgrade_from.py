"""A data_dir that a supported version has left is opened, with everything in it, and goes on."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from history.log.log import Log
from streamer.app import Streamer
from streamer.config import loads
from streamer.letters import dead_letter
from tests.conftest import FIXTURES
from uprotocol import uri as uris
from usubscription.store.database import Database
from usubscription_client.sources import SavedInterest

VERSIONS = ("before-0.2.0", "0.2.0")  # made by their own code: tests/fixtures/make_data.py
CONFIG = """
[streamer]
authority = "vehicle1"
data_dir = "{folder}"
[[endpoint]]
name = "vehicle"
transport = "local"
authorities = ["vehicle1"]
[[endpoint]]
name = "cloud"
transport = "local"
authorities = ["cloud"]
usubscription = "none"
[[endpoint]]
name = "mcu"
transport = "local"
authorities = ["mcu"]
usubscription = "none"
"""


class Left(NamedTuple):
    """A folder, what is in it, and how its process ended: stopped, or killed."""

    folder: Path
    content: Any
    end: str


@pytest.fixture(params=[(version, end) for version in VERSIONS for end in ("stopped", "killed")], ids="-".join)
def left(request: pytest.FixtureRequest, tmp_path: Path) -> Left:
    version, end = request.param
    source = FIXTURES / f"data-{version}"
    with tarfile.open(source / f"{end}.tar.gz") as archive:
        archive.extractall(tmp_path / "data", filter="data")
    return Left(tmp_path / "data", json.loads((source / "expected.json").read_text()), end)


async def test_the_log_has_all_records_and_cursors_and_takes_more(left: Left) -> None:
    expected, now_ms = left.content["history"], left.content["now_ms"]
    count = expected[left.end]["newest_seq"]
    async with await Log.open(left.folder / "history.db", name="old", now_ms=lambda: now_ms) as log:
        assert log.incarnation.hex() == expected["incarnation"]
        assert {name: log.cursors.seq(name) for name in log.cursors.seqs()} == expected[left.end]["cursors"]
        found: list[dict[str, Any]] = []
        while len(found) < count:
            for chunk in await log.read(len(found)):
                for seq, stream, data in zip(chunk.seqs, chunk.streams, chunk.data, strict=True):
                    known = log.stream(stream)
                    sink = None if known.sink is None else uris.format(known.sink)
                    row = {"seq": seq, "stream": stream, "source": uris.format(known.source), "sink": sink}
                    found.append(row | {"message": bytes(data).hex()})
        assert found == expected["records"][:count]
        assert not log.damage
        again = [chunk.messages[0] for chunk in await log.read(0)][:1]
        assert await log.append([1], again) == count + 1


def test_the_subscriptions_are_all_there(left: Left) -> None:
    database = Database(left.folder / "usubscription.db", "vehicle1")
    database.open()
    database.close()
    db = sqlite3.connect(left.folder / "usubscription.db")
    for table in ("subscription", "registration", "link"):
        (count,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
        assert count == len(left.content["usubscription"][table]), table
    db.close()


def test_the_dead_letters_and_the_remembered_interest_are_all_there(left: Left) -> None:
    store = dead_letter.LetterStore(left.folder / "dead-letters.db")
    found = [[one.number, one.time_ms, one.code, one.reason, one.endpoint] for one in store.read()]
    store.close()
    assert found == [row[:5] for row in left.content["dead_letters"]]
    assert len(SavedInterest(left.folder / "interest-cloud.json", list).load()) == len(left.content["interest"])


async def test_a_whole_streamer_goes_on_with_it(left: Left) -> None:
    streamer = await Streamer.create(loads(CONFIG.format(folder=left.folder)))
    running = asyncio.create_task(streamer.run())
    await asyncio.wait_for(streamer.assembly.ready.wait(), 20)
    newest = left.content["history"][left.end]["newest_seq"]
    try:
        assert streamer.assembly.logs.durable.newest_seq >= newest
        assert not streamer.assembly.logs.durable.damage
        assert streamer.assembly.usubscription is not None
        assert streamer.assembly.interest.topics()
    finally:
        streamer.stop()
        await asyncio.wait_for(running, 20)
