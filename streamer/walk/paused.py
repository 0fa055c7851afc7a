"""What an operator has paused: records are not dispatched to a peer, but wait in the log. A pause holds topics,
everything for the peer, or everything that one endpoint sends there (a rule).

pause, resume -> PAUSES_FILE -> in force: `version` rises -> view: a paused topic is open -> pumps hold it, also
                                                                                      what they have read ahead
streamer.operating.control checks who may do it. Requests and responses are never held.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from pydantic import TypeAdapter

from storage.disk import REAL_DISK, Disk
from storage.saved import SavedFile
from streamer.reporting import Condition, Reporter, Sample, each
from streamer.walk.endpoint import Endpoint, Endpoints
from uprotocol import callbacks
from uprotocol import uri as uris
from uprotocol.callbacks import Remove
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

PAUSES_MAX: Final = 256  # each is compared with each topic whenever something changes
PEER_LENGTH_MAX: Final = 128  # characters: as long as an authority may be
# topic, peer, and origin if there is one: versions before 0.2 read a file without origins, and refuse one with them
_PAUSES: Final = TypeAdapter(list[tuple[str, str] | tuple[str, str, str]])
_ALL: Final = uris.format(uris.ANY)
_BYTES_MAX: Final = 256 << 10  # several times PAUSES_MAX entries of some 300 bytes

log = structlog.get_logger()


class Pause(NamedTuple):
    """A pattern of topics, as text, and the peer that does not get them: an endpoint or an authority behind one.
    `origin`: only what is published on this endpoint's network; "": on any."""

    topic: str
    peer: str
    origin: str = ""

    def as_dict(self) -> dict[str, str]:
        return {"topic": self.topic, "peer": self.peer} | ({"from": self.origin} if self.origin else {})

    def __str__(self) -> str:
        what = "everything" if self.topic == _ALL else self.topic
        return f"{what} from {self.origin} to {self.peer}" if self.origin else f"{what} to {self.peer}"


PauseFile = SavedFile[list[tuple[str, str] | tuple[str, str, str]]]


def file_of(path: Path, disk: Disk = REAL_DISK) -> PauseFile:
    """Returns the file that keeps the pauses."""
    return SavedFile(path, _PAUSES, _BYTES_MAX, disk)


def save(file: PauseFile, pauses: Iterable[Pause]) -> None:
    """Replace the pauses in the file. Raises as SavedFile.save."""
    file.save([(one.topic, one.peer, one.origin) if one.origin else (one.topic, one.peer) for one in sorted(pauses)])


def read(file: PauseFile) -> list[Pause]:
    """Returns the pauses in the file; none if there is no file. Raises FAILED_PRECONDITION if it can't be read."""
    try:
        found = [Pause(uris.format(uris.parse(topic)), *rest) for topic, *rest in file.load() or ()]
    except UStatusError as error:
        why = f"nothing is paused: {error.message}; move {file.path} away, and pause again"
        raise UStatusError(UCode.FAILED_PRECONDITION, why) from None
    return found[:PAUSES_MAX]


def pattern_of(topic: UUri, own: str) -> UUri:
    """Returns `topic` with an authority. Raises INVALID_ARGUMENT if no topic can match it."""
    uris.validate(topic)
    topic = uris.with_authority(topic, own)
    if topic.resource_id != uris.WILDCARD_RESOURCE and not uris.is_topic(topic):
        raise invalid(
            f"topics are paused, with a resource of 8000 to FFFE, or FFFF for all of them; got {uris.format(topic)}"
        )
    return topic


def unknown_peer(peer: str, endpoints: Iterable[str]) -> UStatusError:
    """Returns NOT_FOUND for a peer that is no endpoint and no authority behind one."""
    why = f"a peer is an endpoint or an authority behind one, and {peer[:PEER_LENGTH_MAX]!r} is none"
    return UStatusError(UCode.NOT_FOUND, f"{why}; endpoints are {', '.join(endpoints)}")


def added(pauses: Iterable[Pause], topic: UUri, peer: str, origin: str = "") -> list[Pause]:
    """Returns `pauses` with one more. Raises RESOURCE_EXHAUSTED."""
    those = set(pauses) | {Pause(uris.format(topic), peer, origin)}
    if len(those) > PAUSES_MAX:
        why = f"{PAUSES_MAX} pauses are in force, which is the limit: pause a wider pattern"
        raise UStatusError(UCode.RESOURCE_EXHAUSTED, why)
    return sorted(those)


def removed(pauses: Iterable[Pause], topic: UUri, peer: str, origin: str = "") -> list[Pause]:
    """Returns `pauses` without those of `origin` toward `peer` whose topic `topic` equals or covers. If there are none,
    raises NOT_FOUND, with the names of the pauses that hold the topic."""
    before = sorted(pauses)
    ours = [one for one in before if (one.peer, one.origin) == (peer, origin)]
    ended = {one for one in ours if uris.matches(topic, uris.parse(one.topic))}
    if not ended:
        wider = [one.topic for one in ours if uris.matches(uris.parse(one.topic), topic)]
        why = f"it is held by the pause of {', '.join(wider)}: resume that" if wider else "see what is paused"
        what = Pause(uris.format(topic), peer[:PEER_LENGTH_MAX], origin[:PEER_LENGTH_MAX])
        raise UStatusError(UCode.NOT_FOUND, f"{what} is not paused by itself: {why}")
    return [one for one in before if one not in ended]


class Paused(Reporter):
    """The pauses in force. Lives on the loop. A change is saved before it is in force, so it survives a kill."""

    def __init__(self, path: Path, endpoints: Endpoints, own: str, disk: Disk = REAL_DISK) -> None:
        self._file, self._endpoints, self._own = file_of(path, disk), endpoints, own
        self._patterns: dict[Pause, UUri] = {}
        self._turn = asyncio.Lock()  # changes are made one after the other
        self._callbacks: list[Callable[[], None]] = []
        # set by the owner: raises UStatusError if nothing may be paused toward that endpoint
        self.check: Callable[[Endpoint], None] = lambda peer: None
        self.version = 0
        self.trouble = ""  # why the pauses could not be loaded

    def __len__(self) -> int:
        return len(self._patterns)

    def __iter__(self) -> Iterator[Pause]:
        return iter(self._patterns)

    def conditions(self) -> Iterator[Condition]:
        if self.trouble:
            yield Condition(self.trouble)

    def samples(self) -> Iterator[Sample]:
        return each("paused", (), Counter(one.peer for one in self))

    def notes(self) -> Iterator[str]:
        for one in sorted(self):
            effect = "what comes waits in the log"
            if self._endpoint_of(one.peer) is None:
                effect = "which is no known peer, so nothing waits"
            elif one.origin and one.origin not in (endpoint.name for endpoint in self._endpoints):
                effect = f"and {one.origin!r} is no known endpoint, so nothing waits"
            yield f"paused: {one}; {effect}"

    def load(self) -> None:
        """Load the pauses. If the file can't be read, none is in force, and `trouble` says so until the next change."""
        try:
            self._put_in_force(read(self._file))
        except UStatusError as error:
            self.trouble = error.message
            log.error("what was paused is not known any more, and is dispatched", why=self.trouble)

    def on_change(self, callback: Callable[[], None]) -> Remove:
        """Call `callback` after each change. Returns a function that removes the callback."""
        return callbacks.add(self._callbacks, callback)

    def toward(self, peer: Endpoint) -> list[Pause]:
        """Returns the pauses that may hold back messages to this endpoint."""
        return [pause for pause in self._patterns if self._endpoint_of(pause.peer) is peer]

    def _endpoint_of(self, peer: str) -> Endpoint | None:
        """Returns the endpoint that is named `peer`, or behind which the authority `peer` is."""
        named = (endpoint for endpoint in self._endpoints if endpoint.name == peer)
        return next(named, None) or self._endpoints.owner(peer)

    def holds(self, peer: Endpoint, authority: str, source: UUri) -> bool:
        """Returns whether messages from `source` to `authority` at `peer` are paused."""
        return any(
            pause.peer in (peer.name, authority) and uris.matches(topic, source) and self._is_from(pause, source)
            for pause, topic in self._patterns.items()
        )

    def _is_from(self, pause: Pause, source: UUri) -> bool:
        if not pause.origin:
            return True
        origin = self._endpoints.owner(source.authority_name)
        return origin is not None and origin.name == pause.origin

    def concerns(self, pause: Pause, peer: Endpoint, source: UUri) -> bool:
        """Returns whether `pause` may hold messages from `source` to an authority at `peer`."""
        topic = self._patterns.get(pause)
        if topic is None or not uris.matches(topic, source) or not self._is_from(pause, source):
            return False
        return pause.peer == peer.name or self._endpoints.owner(pause.peer) is peer

    async def pause(self, topic: UUri, peer: str, origin: str = "") -> None:
        """Pause topics that match `topic` toward `peer`; with `origin`, only of that endpoint's network. A repeated
        call changes nothing.

        Raises INVALID_ARGUMENT, NOT_FOUND (no such peer or endpoint), FAILED_PRECONDITION (it follows our history),
        RESOURCE_EXHAUSTED, UNAVAILABLE (the disk).
        """
        pattern = pattern_of(topic, self._own)
        endpoint = self._endpoint_of(peer) if 0 < len(peer) <= PEER_LENGTH_MAX else None
        if endpoint is None:
            raise unknown_peer(peer, (endpoint.name for endpoint in self._endpoints))
        if origin and origin not in (known := [endpoint.name for endpoint in self._endpoints]):
            raise unknown_peer(origin, known)
        async with self._turn:
            self.check(endpoint)
            await self._change(added(self, pattern, peer, origin))

    async def resume(self, topic: UUri, peer: str, origin: str = "") -> int:
        """End the pauses of `origin` that `topic` covers. Returns their number. Raises INVALID_ARGUMENT, NOT_FOUND,
        UNAVAILABLE."""
        pattern = pattern_of(topic, self._own)
        async with self._turn:
            before = len(self)
            await self._change(removed(self, pattern, peer, origin))
            return before - len(self)

    async def rename(self, old: str, new: str) -> None:
        """Have the pauses that name endpoint `old` name `new`, at once. If the disk refuses that, the next process has
        to do it again."""

        def renamed(name: str) -> str:
            return new if name == old else name

        async with self._turn:
            pauses = [Pause(one.topic, renamed(one.peer), renamed(one.origin)) for one in self]
            if set(pauses) == set(self._patterns):
                return  # a file that can't be read stays as it is
            try:
                await self._change(pauses)
            except UStatusError as error:
                log.warning("pauses under the new name of an endpoint could not be saved", new=new, error=error.message)
                self._put_in_force(pauses)

    async def _change(self, pauses: list[Pause]) -> None:
        if set(pauses) == set(self._patterns) and not self.trouble:
            return
        await asyncio.to_thread(save, self._file, pauses)
        self.trouble = ""
        self._put_in_force(pauses)
        log.info("paused", now=list(map(str, pauses)))

    def _put_in_force(self, pauses: Iterable[Pause]) -> None:
        self._patterns = {pause: uris.parse(pause.topic) for pause in pauses}
        self.version += 1
        for callback in self._callbacks:
            callback()
