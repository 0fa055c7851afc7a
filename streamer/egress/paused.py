"""What is not dispatched for now: topics that somebody has paused toward a peer. Their records wait in the log.

pause, resume -> FILE -> it counts: `version` rises -> view: a topic that is held is open -> pumps hold it (holds.py)
                                                      and what they have read ahead of the peer goes back
streamer.control says who may; requests and responses are no topic, and are never held.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from pydantic import TypeAdapter

from storage.disk import REAL_DISK, Disk, read_json
from streamer.walk.endpoint import Endpoint, Endpoints
from uprotocol import uri as uris
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

FILE: Final = "paused.json"  # in a data_dir
PAUSES_MAX: Final = 256  # each is held against each topic whenever something changes
PEER_LENGTH_MAX: Final = 128  # characters: as long as an authority may be
_PAUSES: Final = TypeAdapter(list[tuple[str, str]])  # topic, peer

log = structlog.get_logger()


class Pause(NamedTuple):
    """A pattern of topics, as text, and the peer that does not get them: an endpoint, or an authority behind one."""

    topic: str
    peer: str


def read(path: Path) -> list[Pause]:
    """What is paused as the file has it; none if there is no file. Raises FAILED_PRECONDITION if it can't be read."""
    try:
        found = [Pause(uris.format(uris.parse(topic)), peer) for topic, peer in read_json(path, _PAUSES)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, UStatusError) as error:
        why = f"what is paused can't be read from {path} ({error}), so nothing is: move it away, and pause again"
        raise UStatusError(UCode.FAILED_PRECONDITION, why) from None
    return found[:PAUSES_MAX]


def write(path: Path, pauses: Iterable[Pause], disk: Disk = REAL_DISK) -> None:
    """Blocks. Raises UNAVAILABLE if the disk does not take it; then the file is as it was."""
    try:
        disk.replace_text(path, json.dumps(sorted(pauses), indent=0) + "\n")
    except OSError as error:
        why = f"nothing has changed, because {path} can't be written: {error.strerror}"
        raise UStatusError(UCode.UNAVAILABLE, why) from None


def pattern_of(topic: UUri, own: str) -> UUri:
    """With authority, and valid. Raises INVALID_ARGUMENT for what no topic can match."""
    uris.validate(topic)
    topic = uris.with_authority(topic, own)
    if topic.resource_id != uris.WILDCARD_RESOURCE and not uris.is_topic(topic):
        raise invalid(
            f"topics are paused, with a resource of 8000 to FFFE, or FFFF for all of them; got {uris.format(topic)}"
        )
    return topic


def added(pauses: Iterable[Pause], topic: UUri, peer: str) -> list[Pause]:
    """Raises RESOURCE_EXHAUSTED."""
    those = set(pauses) | {Pause(uris.format(topic), peer)}
    if len(those) > PAUSES_MAX:
        why = f"{PAUSES_MAX} pauses are in force, which is the limit: pause a wider pattern"
        raise UStatusError(UCode.RESOURCE_EXHAUSTED, why)
    return sorted(those)


def removed(pauses: Iterable[Pause], topic: UUri, peer: str) -> list[Pause]:
    """Without those toward `peer` that `topic` is, or covers. None: raises NOT_FOUND, naming what holds the topic."""
    before = sorted(pauses)
    after = [one for one in before if one.peer != peer or not uris.matches(topic, uris.parse(one.topic))]
    if len(after) == len(before):
        wider = [one.topic for one in before if one.peer == peer and uris.matches(uris.parse(one.topic), topic)]
        why = f"it is held by the pause of {', '.join(wider)}: resume that" if wider else "see what is paused"
        raise UStatusError(UCode.NOT_FOUND, f"{uris.format(topic)} toward {peer!r} is not paused by itself: {why}")
    return after


class Paused:
    """What is paused now. Lives on the loop; a change is on disk before it counts, so that it outlives a kill."""

    def __init__(self, path: Path, endpoints: Endpoints, own: str, disk: Disk = REAL_DISK) -> None:
        self._path, self._endpoints, self._own, self._disk = path, endpoints, own, disk
        self._patterns: dict[Pause, UUri] = {}
        self._turn = asyncio.Lock()  # one change after the other
        self._callbacks: list[Callable[[], None]] = []
        self._checks: list[Callable[[Endpoint], None]] = []
        self.version = 0
        self.trouble = ""  # why what was paused is not known any more

    def __repr__(self) -> str:
        return f"Paused({len(self._patterns)})"

    def __len__(self) -> int:
        return len(self._patterns)

    def __iter__(self) -> Iterator[Pause]:
        return iter(self._patterns)

    def load(self) -> None:
        """A file that can't be read pauses nothing, which is told until somebody pauses or resumes."""
        try:
            self._count(read(self._path))
        except UStatusError as error:
            self.trouble = error.message
            log.error("what was paused is not known any more, and is dispatched", why=self.trouble)

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def before_pause(self, check: Callable[[Endpoint], None]) -> None:
        """`check(peer)` raises UStatusError if nothing may be paused toward somebody there."""
        self._checks.append(check)

    def toward(self, peer: Endpoint) -> list[Pause]:
        """All that may hold something back from somebody there."""
        return [pause for pause in self._patterns if self._endpoint_of(pause.peer) is peer]

    def _endpoint_of(self, peer: str) -> Endpoint | None:
        """Of a peer that is an endpoint, or an authority behind one."""
        named = (endpoint for endpoint in self._endpoints if endpoint.name == peer)
        return next(named, None) or self._endpoints.owner(peer)

    def holds(self, peer: Endpoint, authority: str, source: UUri) -> bool:
        """True if what comes from `source` does not go to `authority` at `peer` now."""
        return any(
            pause.peer in (peer.name, authority) and uris.matches(topic, source)
            for pause, topic in self._patterns.items()
        )

    def concerns(self, pause: Pause, peer: Endpoint, source: UUri) -> bool:
        """True if `pause` may hold something from `source` that is for somebody at `peer`."""
        topic = self._patterns.get(pause)
        if topic is None or not uris.matches(topic, source):
            return False
        return pause.peer == peer.name or self._endpoints.owner(pause.peer) is peer

    def is_peer(self, name: str) -> bool:
        """True for an endpoint, and for an authority behind one."""
        return self._endpoint_of(name) is not None

    async def pause(self, topic: UUri, peer: str) -> None:
        """Hold what matches `topic` back from `peer`. Again: nothing changes.

        Raises INVALID_ARGUMENT, NOT_FOUND (no such peer), FAILED_PRECONDITION (it follows, and is pushed nothing),
        RESOURCE_EXHAUSTED, UNAVAILABLE (the disk).
        """
        pattern = pattern_of(topic, self._own)
        endpoint = self._endpoint_of(peer) if 0 < len(peer) <= PEER_LENGTH_MAX else None
        if endpoint is None:
            known = ", ".join(endpoint.name for endpoint in self._endpoints)
            raise UStatusError(
                UCode.NOT_FOUND,
                f"a peer is an endpoint or an authority behind one, and {peer[:PEER_LENGTH_MAX]!r} is none; endpoints "
                f"are {known}",
            )
        async with self._turn:
            for check in self._checks:
                check(endpoint)
            await self._change(added(self, pattern, peer))

    async def resume(self, topic: UUri, peer: str) -> int:
        """Let go what `topic` covers; how many pauses that ends. Raises INVALID_ARGUMENT, NOT_FOUND, UNAVAILABLE."""
        pattern = pattern_of(topic, self._own)
        async with self._turn:
            before = len(self)
            await self._change(removed(self, pattern, peer))
            return before - len(self)

    async def _change(self, pauses: list[Pause]) -> None:
        if set(pauses) == set(self._patterns) and not self.trouble:
            return
        await asyncio.to_thread(write, self._path, pauses, self._disk)
        self.trouble = ""
        self._count(pauses)
        log.info("paused", now=[f"{one.topic} to {one.peer}" for one in pauses])

    def _count(self, pauses: Iterable[Pause]) -> None:
        self._patterns = {pause: uris.parse(pause.topic) for pause in pauses}
        self.version += 1
        for callback in self._callbacks:
            callback()
