"""Lists, filters and watches the content of a store, whether its service runs or not. Reads only; its calls block.

store.db --StoreReader--> subscriptions(filters) -> entries to print
                          watch() -> added, changed and removed subscriptions
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.usubscription.wire import to_uri
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri
from usubscription.state import Command, Key, RemoteLink, Row
from usubscription.store.reader import StoreReader

WATCH_MS: Final = 200  # between two checks for changes: one cheap PRAGMA

ViewEntry = dict[str, Any]
"""One line for the operator, with plain values for JSON."""


class StoreView(AbstractContextManager["StoreView"]):
    """The store at `path`. Raises UStatusError: NOT_FOUND, FAILED_PRECONDITION (not ours, newer), DATA_LOSS."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            why = f"there is no store at {self.path}: pass the file that the service was started with"
            raise UStatusError(UCode.NOT_FOUND, why)
        self._reader = StoreReader(self.path, from_outside=True)

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def subscriptions(self, topic: UUri | None = None, subscriber: UUri | None = None) -> list[ViewEntry]:
        """Subscriptions that match both patterns (None: any), in their order."""
        links = dict(self._reader.links())
        return [_entry(row, links.get(row.topic)) for row in self._rows(topic, subscriber)]

    def links(self) -> list[ViewEntry]:
        """The links to other services: one entry for each remote topic."""
        return [
            {
                "topic": _text(topic),
                "state": link.state.name,
                "command": link.command.name if link.command is not None else None,
                "attempt": link.attempt,
                "version": link.major,
                "sample_period_ms": link.sample_period_ms,
            }
            for topic, link in self._reader.links()
        ]

    def registrations(self) -> list[ViewEntry]:
        """The clients registered for changes; topic None: of everything."""
        return [
            {"client": _text(client), "version": major, "topic": _text(topic) if topic else None}
            for client, major, topic in self._reader.registrations()
        ]

    def summary(self) -> ViewEntry:
        links = self._reader.links()
        return {
            "authority": self._reader.authority(),
            "subscriptions": self._reader.count(),
            "remote_topics": len(links),
            "remote_commands_pending": sum(link.command is not None for _, link in links),
            "registrations": len(self._reader.registrations()),
            "changes_not_told": self._reader.outbox_count(),
        }

    def watch(
        self,
        topic: UUri | None = None,
        subscriber: UUri | None = None,
        *,
        stop: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[ViewEntry]:
        """Yields all subscriptions, then each change until `stop()`: entries with "event" known, added, changed or
        removed."""
        known = {(row.topic, row.subscriber): row for row in self._rows(topic, subscriber)}
        for row in known.values():
            yield {"event": "known", **_entry(row)}
        version = self._reader.data_version()
        while not stop():
            sleep(WATCH_MS / 1000)
            before, version = version, self._reader.data_version()
            if version == before:
                continue
            fresh = {(row.topic, row.subscriber): row for row in self._rows(topic, subscriber)}
            for key, row in known.items():
                if key not in fresh:
                    yield {"event": "removed", **_entry(row), "status": "UNSUBSCRIBED"}
            for key, row in fresh.items():
                if known.get(key) != row:
                    yield {"event": "changed" if key in known else "added", **_entry(row)}
            known = fresh

    def _rows(self, topic: UUri | None, subscriber: UUri | None) -> list[Row]:
        own = self._reader.authority()
        filters = [
            uris.key(uris.with_authority(pattern, own)) if pattern is not None else None
            for pattern in (topic, subscriber)
        ]
        return [row for _, row in self._reader.each(filters[0], filters[1], uuids.now_ms())]


def _text(key: Key) -> str:
    return uris.format(to_uri(key))


def _entry(row: Row, link: RemoteLink | None = None) -> ViewEntry:
    entry = {
        "topic": _text(row.topic),
        "subscriber": _text(row.subscriber),
        "status": row.status.name,
        "expires": uuids.moment(row.expires_ms) if row.expires_ms is not None else None,
        "sample_period_ms": row.sample_period_ms,
    }
    if link is not None and link.command is Command.SUBSCRIBE:
        entry["waiting_for"] = f"{row.topic[0]} (attempt {link.attempt + 1})"
    return entry
