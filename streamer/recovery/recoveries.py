"""The recovery sources of the configuration, and the gates of their topics.

[[recovery]] -> plugin -> AskedSource --+-> Gate of each topic: named, in the log, or with a message
start, network back, silence -----------'-> asked
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final

import structlog

from history.log.log import Log
from storage.runtime import Runtime
from streamer import recovery_source as sources
from streamer.config.edge import RecoverySection
from streamer.recovery.appending import PREFIX
from streamer.recovery.asking import AskedSource
from streamer.recovery.gates import ASK_MS_MAX, ASK_MS_MIN, Cause, Gate, GateParts
from streamer.recovery_source import Fetched, RecoverySource
from streamer.reporting import Condition, Reporter, Sample, each
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.flow import Flow
from streamer.walk.ingress import IdWindow, Logs, Pass
from transports.plugin import NotMade
from uprotocol import uri as uris
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.uri_pb2 import UUri

GATES_MAX: Final = 4_096  # topics; some kilobytes each, and a row in the log
SILENCE_LOOK_S: Final = 1.0  # between looks for silent topics, at most

log = structlog.get_logger()


class UnmadeSource(RecoverySource):
    """Replaces a source whose constructor failed."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def fetch(self, topic: UUri, after: str | None) -> Fetched:
        raise UStatusError(UCode.UNAVAILABLE, self._why)


class Recoveries(Reporter):
    """All sources, and the gates by the key of their topic."""

    def __init__(
        self,
        sections: Iterable[RecoverySection],
        endpoints: Endpoints,
        logs: Logs,
        flows: Mapping[Log, Flow],
        window: IdWindow,
        message_bytes_max: int,
        runtime: Runtime,
        on_gap: Callable[[UUri, Log, str], None],
    ) -> None:
        """Raises UStatusError for a plugin or settings that can't be used."""
        self._endpoints, self._logs, self._flows, self._window = endpoints, logs, flows, window
        self._runtime, self.on_gap = runtime, on_gap
        self.on_answer: Callable[[UUri, str | None], None] = lambda _topic, _position: None
        self._bytes_max = message_bytes_max
        self._changed = asyncio.Event()
        self._take(self.sources_of(sections))
        self._gates: dict[uris.Key, Gate] = {}
        self._refused: set[uris.Key] = set()  # topics beyond GATES_MAX, as many at most
        self._heard: set[Endpoint] = set()  # their networks are connected and listened to
        self._is_running = False

    def __repr__(self) -> str:
        return f"Recoveries({self._sources}, {len(self._gates)} topics)"

    def __iter__(self) -> Iterator[Gate]:
        return iter(self._gates.values())

    def sources_of(self, sections: Iterable[RecoverySection]) -> list[AskedSource]:
        """Returns the sources of these sections, for `replace`. Raises UStatusError for a plugin or settings that can't
        be used."""
        return [AskedSource(section, _made(section), self._bytes_max, self._runtime.now_ms) for section in sections]

    def _take(self, sources: list[AskedSource]) -> None:
        self._sources = sources
        self._patterns = [(uris.parse(topic), source) for source in sources for topic in source.section.topics]

    def replace(self, sources: list[AskedSource]) -> list[AskedSource]:
        """Use other sources from now on; what waits for the old ones goes back to the networks, and each topic is
        asked for again. Returns the old ones, to be closed. `Rules.changed` has to be called in the same step."""
        old = self._sources
        for gate in self:
            gate.stop()
        self._gates.clear()
        self._refused.clear()
        self._take(sources)
        self.load()
        self._changed.set()
        return old

    # Gates

    def of_topic(self, topic: UUri) -> Pass | None:
        """Returns what takes the messages of this topic; None: it has no source."""
        gate = self._gates.get(uris.key(topic)) or self._find(topic)
        return None if gate is None else gate.take

    def _find(self, topic: UUri) -> Gate | None:
        source = next((one for pattern, one in self._patterns if uris.matches(pattern, topic)), None)
        if source is None:
            return None
        if len(self._gates) >= GATES_MAX:
            self._refuse(topic)
            return None
        target = self._logs.of(topic)
        parts = GateParts(
            target,
            self._flows[target],
            self._window,
            partial(self._inward, topic.authority_name),
            lambda *gap: self.on_gap(*gap),
            lambda *answer: self.on_answer(*answer),
            lambda: self._endpoints.owner(topic.authority_name) in self._heard,
            self._runtime.now_ms,
            Backoff(ASK_MS_MIN, ASK_MS_MAX, self._runtime.rng),
        )
        gate = self._gates[uris.key(topic)] = Gate(topic, source, parts)
        if self._is_running:
            gate.ask(Cause.START)
        else:
            gate.doubt(Cause.START)
        return gate

    def _refuse(self, topic: UUri) -> None:
        if not self._refused:
            log.error("no more topics can be recovered", limit=GATES_MAX, topic=uris.format(topic))
        if len(self._refused) < GATES_MAX:
            self._refused.add(uris.key(topic))

    def _inward(self, ours: str, authority: str) -> str:
        """Returns the name inside of the authority of a message that was recovered for an authority of `ours`."""
        endpoint = self._endpoints.owner(ours)
        if endpoint is None:
            return authority
        authority = authority or endpoint.only_authority
        return authority if endpoint.names is None else endpoint.names.inward(authority)

    # Life

    def load(self) -> None:
        """Make the gates of known topics, before any message comes."""
        for pattern, _ in self._patterns:
            if not uris.has_wildcard(pattern):
                self.of_topic(pattern)
        for one in self._logs:
            for key in one.followed.positions():
                if key.startswith(PREFIX):
                    self.of_topic(uris.parse(key.removeprefix(PREFIX)))

    async def start(self) -> None:
        """Ask for what was missed while this process did not run."""
        self._is_running = True
        for gate in self:
            gate.ask(Cause.START)

    async def run(self) -> None:
        """Ask about silent topics until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            waits = [one.section.idle_s for one in self._sources if one.section.idle_s is not None]
            if not waits:
                self._changed.clear()
                await self._changed.wait()
                continue
            await asyncio.sleep(min(SILENCE_LOOK_S, *waits))
            now = loop.time()
            for gate in self:
                idle_s = gate.source.section.idle_s
                if idle_s is not None and not gate.is_asking and now - gate.came_at >= idle_s:
                    gate.ask(Cause.IDLE)

    async def stop(self) -> None:
        """Give what waits back to the networks. May be called twice."""
        self._is_running = False
        for gate in self:
            gate.stop()
        for one in self._sources:
            await one.close()

    def connection_changed(self, endpoint: Endpoint, connected: bool) -> None:
        """Messages may be missed from now on if the network is away."""
        if not connected:
            self._heard.discard(endpoint)
            for gate in self._gates_at(endpoint):
                gate.doubt(Cause.NETWORK)

    def listens(self, endpoint: Endpoint) -> None:
        """Ask for what was missed while the network was away, or nobody listened there."""
        self._heard.add(endpoint)
        for gate in self._gates_at(endpoint) if self._is_running else ():
            gate.ask(Cause.NETWORK)

    def _gates_at(self, endpoint: Endpoint) -> Iterator[Gate]:
        owner = self._endpoints.owner
        return (gate for gate in self if owner(gate.topic.authority_name) is endpoint)

    # State

    def samples(self) -> Iterator[Sample]:
        for source in self._sources:
            waiting = sum(gate.waiting for gate in self if gate.source is source)
            yield from each("recovery", (source.name,), source.counts)
            yield "recovery_waiting", (source.name,), waiting

    def conditions(self) -> Iterator[Condition]:
        for source in self._sources:
            if source.trouble:
                yield Condition(source.trouble)
        if self._refused:
            yield Condition(f"more than {GATES_MAX} topics have a recovery source, which is the limit")


def _made(section: RecoverySection) -> RecoverySource:
    try:
        return sources.create(section.source, section.settings)
    except NotMade as error:  # affects only its topics
        log.error("a recovery source can't be made", topics=section.topics, why=error.message)
        return UnmadeSource(error.message)
