"""The recovery sources of the configuration, and the gates of their topics, as a part.

[[recovery]] -> plugin -> AskedSource --+-> Gate of each topic: named, in the log, or with a message
start, network back, silence -----------'-> asked
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import structlog

from streamer import recovery_source as sources
from streamer.assembly import Assembly
from streamer.config import Config
from streamer.config.edge import RecoverySection
from streamer.part import Part, Parts
from streamer.recovery.appending import PREFIX
from streamer.recovery.asking import AskedSource
from streamer.recovery.gates import ASK_MS_MAX, ASK_MS_MIN, Cause, Gate, GateParts
from streamer.recovery_source import Fetched, RecoverySource
from streamer.reporting import Condition, Sample, each
from streamer.walk.endpoint import Endpoint
from streamer.walk.ingress import Pass
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


class RecoveryPart(Part):
    """All sources, and the gates by the key of their topic: they take its messages in place of the flow."""

    name = "recovery"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        """Raises UStatusError for a plugin or settings that can't be used."""
        super().__init__(assembly, parts)
        self.on_gap = assembly.losses.not_recovered
        self.on_answer: Callable[[UUri, str | None], None] = lambda _topic, _position: None
        self._changed = asyncio.Event()
        self._take(self._sources_of(assembly.config.recovery))
        self._replaced: list[AskedSource] = []  # by a change; to be closed
        self._gates: dict[uris.Key, Gate] = {}
        self._refused: set[uris.Key] = set()  # topics beyond GATES_MAX, as many at most
        self._heard: set[Endpoint] = set()  # their networks are connected and listened to
        self._is_running = False
        assembly.recovered = self._of_topic
        assembly.on_connection.append(self._connection_changed)
        assembly.on_listens.append(self._listens)

    def __repr__(self) -> str:
        return f"RecoveryPart({self._sources}, {len(self._gates)} topics)"

    def __iter__(self) -> Iterator[Gate]:
        return iter(self._gates.values())

    def _sources_of(self, sections: Iterable[RecoverySection]) -> list[AskedSource]:
        bytes_max, now_ms = self.assembly.config.limits.message_bytes_max, self.assembly.runtime.now_ms
        return [AskedSource(section, _made(section), bytes_max, now_ms) for section in sections]

    def _take(self, sources: list[AskedSource]) -> None:
        self._sources = sources
        self._patterns = [(uris.parse(topic), source) for source in sources for topic in source.section.topics]

    async def check(self, old: Config, new: Config) -> list[AskedSource] | None:
        return self._sources_of(new.recovery) if new.recovery != old.recovery else None

    def change(self, old: Config, new: Config, checked: list[AskedSource] | None) -> None:
        """What waits for the old sources goes back to the networks, and each topic is asked for again."""
        self._replaced = []
        if checked is not None:
            self._replaced = self._sources
            for gate in self:
                gate.stop()
            self._gates.clear()
            self._refused.clear()
            self._take(checked)
            self._make_gates()
            self._changed.set()

    async def after_change(self, old: Config, new: Config, checked: Any) -> None:
        for source in self._replaced:
            await source.close()

    # Gates

    def _of_topic(self, topic: UUri) -> Pass | None:
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
        assembly = self.assembly
        target = assembly.logs.of(topic)
        parts = GateParts(
            target,
            assembly.dispatch.flows[target],
            assembly.window,
            partial(self._inward, topic.authority_name),
            lambda *gap: self.on_gap(*gap),
            lambda *answer: self.on_answer(*answer),
            lambda: assembly.endpoints.owner(topic.authority_name) in self._heard,
            assembly.runtime.now_ms,
            Backoff(ASK_MS_MIN, ASK_MS_MAX, assembly.runtime.rng),
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
        endpoint = self.assembly.endpoints.owner(ours)
        if endpoint is None:
            return authority
        authority = authority or endpoint.only_authority
        return authority if endpoint.names is None else endpoint.names.inward(authority)

    # Life

    async def load(self) -> None:
        self._make_gates()

    def _make_gates(self) -> None:
        """Makes the gates of known topics, before any message comes."""
        for pattern, _ in self._patterns:
            if not uris.has_wildcard(pattern):
                self._of_topic(pattern)
        for one in self.assembly.logs:
            for key in one.followed.positions():
                if key.startswith(PREFIX):
                    self._of_topic(uris.parse(key.removeprefix(PREFIX)))

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

    def _connection_changed(self, endpoint: Endpoint, connected: bool) -> None:
        """Messages may be missed from now on if the network is away."""
        if not connected:
            self._heard.discard(endpoint)
            for gate in self._gates_at(endpoint):
                gate.doubt(Cause.NETWORK)

    def _listens(self, endpoint: Endpoint) -> None:
        """Ask for what was missed while the network was away, or nobody listened there."""
        self._heard.add(endpoint)
        for gate in self._gates_at(endpoint) if self._is_running else ():
            gate.ask(Cause.NETWORK)

    def _gates_at(self, endpoint: Endpoint) -> Iterator[Gate]:
        owner = self.assembly.endpoints.owner
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
