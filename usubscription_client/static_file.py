"""Subscriptions from a JSON file in the format of the Rust streamer, with the same interface as a service.

{"//authority-b/3039/1/8001": ["//authority-a/5678/1/1234"]}         topic -> its subscribers
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

from uprotocol import uri as uris
from uprotocol.core.usubscription.wire import Status, Subscription
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from usubscription_client.table import InterestSource

FILE_BYTES_MAX: Final = 256 << 20  # more than a million subscriptions


class StaticFile(InterestSource):
    """The interest in the file at `path`. It is read at the start and at every refresh."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(str(path), scope=uris.WILDCARD_AUTHORITY)
        self._path = Path(path)
        self.healthy = False

    async def load(self) -> None:
        """Read the file. Raises UStatusError: NOT_FOUND, or INVALID_ARGUMENT that names the invalid entry."""
        if not self.complete:
            await self._take_all(self._read)

    async def start(self) -> None:
        """Raises as `load`."""
        await self.load()

    async def refresh(self) -> None:
        """Read the file again. If it is invalid now, the known interest stays, and `healthy` is False."""
        try:
            await self._take_all(self._read)
        except UStatusError:
            self.healthy = False

    async def _read(self) -> list[Subscription]:
        subscriptions = await asyncio.to_thread(read, self._path)
        self.healthy = True
        return subscriptions


def read(path: Path) -> list[Subscription]:
    """Returns the subscriptions in the file at `path`. Blocks. Raises NOT_FOUND or INVALID_ARGUMENT."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise invalid(
                f"{path} has more than {FILE_BYTES_MAX} bytes: use a uSubscription service for that many subscriptions"
            )
        content = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise UStatusError(UCode.NOT_FOUND, f"the subscription file {path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"{path} is not the JSON of a subscription file: {error}") from None
    except UStatusError as error:
        raise invalid(f"{path}: {error.message}") from None
    if not isinstance(content, dict):
        expected = "an object that maps topic URIs to lists of subscriber URIs"
        raise invalid(f"{path}: expected {expected}, got {_kind(content)}")
    return [subscription for topic, subscribers in content.items() for subscription in _entry(path, topic, subscribers)]


def _entry(path: Path, topic: str, subscribers: Any) -> list[Subscription]:
    if not isinstance(subscribers, list):
        raise invalid(f"{path}: expected a list of subscriber URIs for topic {topic!r}, got {_kind(subscribers)}")
    try:
        topic_uri = uris.parse(topic)
        if not (uris.is_topic(topic_uri) or topic_uri.resource_id == uris.WILDCARD_RESOURCE):
            raise invalid(f"a topic has a resource of 8000 to FFFE, got {topic_uri.resource_id:X}")
        found = []
        for subscriber in subscribers:
            if not isinstance(subscriber, str):
                raise invalid(f"expected a subscriber URI as a string, got {_kind(subscriber)}")
            uri = uris.parse(subscriber)
            if not uri.authority_name or uris.has_wildcard(uri):
                raise invalid(f"a subscriber has an authority and no wildcards, got {subscriber!r}")
            found.append(Subscription(topic_uri, uri, Status.SUBSCRIBED))
    except UStatusError as error:
        raise invalid(f"{path}, topic {topic!r}: {error.message}") from None
    return found


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for topic, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise invalid(f"topic {topic!r} is listed twice")
    return dict(pairs)


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )
