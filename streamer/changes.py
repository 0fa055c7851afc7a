"""Changes of rules and endpoints while the streamer runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import structlog

from streamer import parts
from streamer.config import EndpointSection, FollowSection, RuleSection
from streamer.walk.rules import Rule
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

if TYPE_CHECKING:
    from streamer.app import Streamer

log = structlog.get_logger()


class Changes:
    """Made by the streamer, which offers these methods as its own."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer
        self._turn = asyncio.Lock()  # one change of the endpoints after the other

    async def add_rule(self, rule: Rule) -> None:
        """Let messages pass. Raises ALREADY_EXISTS, NOT_FOUND (no such endpoint) or what a network answers; then
        nothing has changed."""
        streamer = self._streamer
        for name in (rule.ingress, rule.egress):
            self._check_known(name)
        streamer.rules.add(rule)
        try:
            await streamer.networks.sync()
        except UStatusError:
            streamer.rules.remove(rule.ingress, rule.egress)
            await streamer.networks.listen()
            raise

    async def remove_rule(self, ingress: str, egress: str) -> None:
        """Stop passing messages. Raises NOT_FOUND."""
        self._streamer.rules.remove(ingress, egress)
        await self._streamer.networks.sync()

    async def add_endpoint(
        self, section: EndpointSection, rules: Iterable[RuleSection] = (), follow: Iterable[FollowSection] = ()
    ) -> None:
        """Add an endpoint, the rules that name it, and what is followed there. Its network is opened in the background;
        `states` has the result. Raises INVALID_ARGUMENT for what does not fit the configuration, FAILED_PRECONDITION
        before the streamer is ready; then nothing has changed."""
        streamer = self._streamer
        async with self._turn:
            if not streamer.ready.is_set() or streamer.stopping.is_set():
                raise UStatusError(UCode.FAILED_PRECONDITION, "endpoints are added while the streamer runs: try again")
            config, follow = streamer.config, list(follow)
            changed = config.with_endpoint(section, rules := list(rules), follow)
            streamer.config = changed
            try:
                await streamer.attached.attach(section, changed, follow, streamer.start_task)
            except BaseException:
                streamer.config = config
                raise
            for rule in rules:
                streamer.rules.add(parts.rule_of(rule))
            streamer.networks.listen_soon()
            log.info("an endpoint was added", endpoint=section.name)

    async def remove_endpoint(self, name: str) -> None:
        """Remove an endpoint with its rules. What waits in the logs for it stays, for an endpoint of the same name.
        Raises NOT_FOUND; FAILED_PRECONDITION for the endpoint of our own authority; INVALID_ARGUMENT if something
        else in the configuration needs it."""
        streamer = self._streamer
        async with self._turn:
            self._check_known(name)
            if streamer.endpoints[name] is streamer.home:
                what = f"endpoint {name!r} can't be removed: it has our own authority {streamer.config.authority!r}"
                raise UStatusError(UCode.FAILED_PRECONDITION, what)
            config = streamer.config.without_endpoint(name)
            await streamer.attached.detach(name)
            for rule in [one for one in streamer.rules if name in (one.ingress, one.egress)]:
                streamer.rules.remove(rule.ingress, rule.egress)
            streamer.config = config
            streamer.networks.listen_soon()
            streamer.states.look()
            log.info("an endpoint was removed", endpoint=name)

    def _check_known(self, name: str) -> None:
        endpoints = self._streamer.endpoints
        if name not in endpoints:
            known = ", ".join(endpoint.name for endpoint in endpoints)
            raise UStatusError(UCode.NOT_FOUND, f"unknown endpoint {name!r}; known: {known}")
