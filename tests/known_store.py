"""A subscription store that other uSubscription services know already, so that its gateway asks them nothing at its
start."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from storage.disk import REAL_DISK
from usubscription.store.database import Database, StoreKnown

NAME = "usubscription.db"


def make_known_store(folder: Path, authority: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with closing(Database(folder / NAME, authority, disk=REAL_DISK)) as store:
        store.open()
        store.apply([StoreKnown()], 0)
