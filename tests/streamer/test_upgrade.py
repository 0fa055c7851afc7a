"""A whole data_dir of a development version: what can be read is, and other files are refused and left unchanged."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamer.letters import dead_letter
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.store.database import Database
from usubscription_client.sources import SavedInterest

OldData = Callable[[str], Path]
NAMES = pytest.mark.parametrize("name", ["stopped", "killed"])


@NAMES
def test_dead_letters_of_a_development_version_are_refused_and_left_as_they_are(old_data: OldData, name: str) -> None:
    path = old_data(name) / "dead-letters.db"
    before = path.read_bytes()
    with pytest.raises(UStatusError, match="not a dead letter store") as error:
        dead_letter.LetterStore(path)
    assert error.value.code == UCode.FAILED_PRECONDITION
    assert path.read_bytes() == before


@NAMES
def test_the_remembered_interest(old_data: OldData, old_content: Any, name: str) -> None:
    known = SavedInterest(old_data(name) / "interest-cloud.json", list).load()
    found = [[uris.format(one.topic), uris.format(one.subscriber), one.sample_period_ms] for one in known]
    assert [
        [topic.removeprefix("up:"), subscriber.removeprefix("up:"), period] for topic, subscriber, period in found
    ] == old_content["interest"]


@NAMES
def test_a_newer_store_of_subscriptions_is_refused_and_left_as_it_is(old_data: OldData, name: str) -> None:
    folder = old_data(name)
    path = folder / "usubscription.db"
    before = newer(path)
    with pytest.raises(UStatusError, match="newer") as error:
        Database(path, "vehicle1").open()
    assert error.value.code == UCode.FAILED_PRECONDITION
    assert {suffix: Path(f"{path}{suffix}").read_bytes() for suffix in before} == before


def newer(path: Path) -> dict[str, bytes]:
    """Make it a file of a newer program, as that would leave it after a kill; the bytes of its files by suffix."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA user_version=99")
    files = {suffix: Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal")}
    db.close()
    for suffix, data in files.items():
        Path(f"{path}{suffix}").write_bytes(data)
    assert files["-wal"]
    return files
