"""Takes over a changed configuration while the streamer runs.

file -> read -> Part.check: names, files, certificates, transports, ports   what is wrong here changes nothing
             -> differences (config/changes.py): reported to the operator; what needs a restart is not changed
             -> networks that stay try what new rules need: one that refuses it ends the reload, and nothing has changed
             -> apply, which can't fail: stop what goes or changes -> one step: endpoints, Part.change, rules
                                         -> start what is new or changed -> Part.after_change
An endpoint that changes keeps its cursors and what waits in memory; its network is closed and opened again only if it
has to be. A network that is away, or a port that can't be opened, is a state as at the start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from streamer import building, renaming
from streamer.assembly import Assembly
from streamer.config import Config, EndpointSection
from streamer.config.changes import Difference, appliable, differences
from streamer.operation import Arguments, Operation
from streamer.part import Part, Parts
from streamer.parts.endpoints import EndpointPart
from streamer.parts.ports import OPEN_WAIT_S
from streamer.parts.readiness import Readiness
from streamer.reporting import Sample, each
from uprotocol.status import UStatusError
from uprotocol.transport import UTransport
from uprotocol.v1.ucode_pb2 import UCode

# keys of an endpoint for which its network is closed and opened again
NETWORK_KEYS: Final = ("transport", "authorities", "suffix", "hold", "settings")
# ... and those for which its pumps are created again
PUMP_KEYS: Final = (*NETWORK_KEYS, "followed_by", "messages_per_s")
NOT_RELOADED: Final = "nothing is reloaded: this streamer"

log = structlog.get_logger()


@dataclass
class ReloadPlan:
    """A checked configuration and what it changes."""

    config: Config
    changes: list[Difference]
    transports: dict[str, UTransport]  # of endpoints that are new or whose network is opened again; not open
    checked: dict[Part, Any]  # what each part has made


class Reloader(Part):
    """Reads the configuration again with `read`, and has all parts take it over.

    `read()` blocks and raises UStatusError; None: the configuration has no file.
    """

    name = "reload"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self.read: Callable[[], Config] | None = None
        self._endpoints = parts.of(EndpointPart)
        self._turn = asyncio.Lock()  # one change after the other
        self._restarts: list[str] = []  # what the file has, and only a restart takes over
        self._failure = ""  # of the last reload
        self._counts = {"applied": 0, "failed": 0}

    def operations(self) -> Mapping[str, Operation]:
        async def reload(given: Arguments) -> dict[str, Any]:
            dry_run = given.flag("dry_run")
            changes = await self.reload(dry_run=dry_run)
            return {"changes": [str(change) for change in changes], "applied": not dry_run}

        return {"reload": Operation(reload, ("dry_run",), is_change=True)}

    async def reload(self, *, dry_run: bool = False) -> list[Difference]:
        """Takes over what the file says now, or only returns the differences. Raises UStatusError, and changes nothing:
        FAILED_PRECONDITION before the streamer is ready or without a file, the errors of the check, and that of a
        network that refuses what a new rule needs."""
        if self.read is None:
            raise UStatusError(UCode.FAILED_PRECONDITION, f"{NOT_RELOADED} was not started from a file")
        self._require_running()
        async with self._turn:
            try:
                plan = await self._check(await asyncio.to_thread(self.read))
                if not dry_run:
                    self._require_running()
                    await self._try_rules(plan)
            except Exception as caught:
                error = caught
                if not isinstance(error, UStatusError):  # a plugin, or the file was replaced while it was read
                    error = UStatusError(UCode.INTERNAL, f"the check has failed: {caught!r}")
                if not dry_run:
                    self._counts["failed"] += 1
                    self._failure = "; ".join(error.message.splitlines())
                    log.error("the configuration was not reloaded; nothing has changed", error=error.message)
                raise error from caught
            if dry_run:
                return plan.changes
            self._require_running()
            # a failure of our own stops the streamer, whose next start reads the file; the caller's end stops nothing
            await asyncio.shield(self.assembly.tasks.start(self._apply(plan), "reload"))
        self._counts["applied"] += 1
        self._failure = ""
        self._restarts = [change.what for change in plan.changes if change.sign == "!"]
        log.info("the configuration was reloaded", changes=[str(change) for change in plan.changes])
        return plan.changes

    def _require_running(self) -> None:
        if not self.assembly.ready.is_set() or self.assembly.stopping.is_set():
            raise UStatusError(UCode.FAILED_PRECONDITION, f"{NOT_RELOADED} is not ready: try again")

    def notes(self) -> Iterator[str]:
        if self._failure:
            yield f"the last reload changed nothing: {self._failure}"
        for what in self._restarts:
            yield f"the configuration file has changed: {what}"

    def samples(self) -> Iterator[Sample]:
        yield from each("reloads", (), self._counts)
        yield "reload_failed", (), bool(self._failure)

    # Check

    async def _check(self, new: Config) -> ReloadPlan:
        """Makes what can fail. Raises UStatusError."""
        old = self.assembly.config
        changes, config = differences(old, new), appliable(old, new)
        for part in self.parts:
            part.require(config)
        before = {section.name: section for section in old.endpoint}
        transports = {
            section.name: building.make_transport(config, section)
            for section in config.endpoint
            if section.name not in before or _differs(before[section.name], section, NETWORK_KEYS)
        }
        checked = {part: await part.check(old, config) for part in self.parts}
        return ReloadPlan(config, changes, transports, checked)

    async def _try_rules(self, plan: ReloadPlan) -> None:
        """Adds the new rules between networks that stay, which then listen to more. Raises FAILED_PRECONDITION if one
        refuses it; then nothing has changed. A network that is away, or that refused something before, is not asked
        for its consent."""
        assembly, config = self.assembly, plan.config
        kept = {section.name for section in config.endpoint} - plan.transports.keys()
        ways = {(rule.ingress, rule.egress) for rule in assembly.rules}
        rules = [building.rule_of(section) for section in config.rules if {section.from_, section.to} <= kept]
        if not (added := [rule for rule in rules if (rule.ingress, rule.egress) not in ways]):
            return
        networks = [assembly.networks[name] for name in kept]
        tried = [network for network in networks if network.is_connected and not network.trouble]
        before = [*assembly.rules]
        assembly.rules.replace([*before, *added])
        try:
            with contextlib.suppress(TimeoutError):  # one that does not answer is tried again
                async with asyncio.timeout(OPEN_WAIT_S):
                    await assembly.networks.listen(retry=False)
            refused = [network.trouble for network in tried if network.trouble and network.is_connected]
            if refused:
                what = f"a network refuses what the new rules need: {refused[0]}"
                raise UStatusError(UCode.FAILED_PRECONDITION, what)
        except BaseException:  # refused, or the caller was cancelled
            assembly.rules.replace(before)
            assembly.networks.listen_soon(is_back=True)  # which also forgets what was refused
            raise

    # Apply

    async def _apply(self, plan: ReloadPlan) -> None:
        assembly, endpoints, old, config = self.assembly, self._endpoints, self.assembly.config, plan.config
        before = {section.name: section for section in old.endpoint}
        all_pumps = (
            any(change.section == "egress" and change.sign != "!" for change in plan.changes)
            or old.history.absent_ms != config.history.absent_ms
        )
        kept = [section for section in config.endpoint if section.name in before]
        new = [section for section in config.endpoint if section.name not in before]
        closed = {section.name: section for section in kept if section.name in plan.transports}
        paused = {
            section.name: section for section in kept if all_pumps or _differs(before[section.name], section, PUMP_KEYS)
        }
        removed = [assembly.attached[one.name] for one in plan.changes if (one.section, one.sign) == ("endpoint", "-")]
        renamed = [(section.renamed_from, section.name) for section in new if section.renamed_from]

        # 1. what goes or changes stops
        await asyncio.gather(
            *(endpoints.stop_endpoint(attached) for attached in removed),
            *(endpoints.pause_endpoint(assembly.attached[name], close=name in closed) for name in paused),
        )
        for part in self.parts:
            await part.before_change(old, config)
        for was, name in renamed:
            await assembly.paused.rename(was, name)

        # 2. no `await` in this step: no message meets a part of the change only
        assembly.config = config
        for was, name in renamed:
            assembly.express.rename(was, name)
        for attached in removed:
            endpoints.remove(attached)
        for name, section in closed.items():
            endpoint = assembly.endpoints[name]
            endpoint.change(section.authorities, plan.transports[name], section.suffix)
            building.adjust(endpoint, config, section)
        assembly.endpoints.changed()
        assembly.express.limit(config.express.messages_max)
        for was, name in renamed:
            renaming.rename(was, name, assembly.logs, config.streamer.data_dir)
        for name, section in paused.items():
            assembly.endpoints[name].sends.ms_max = config.egress.send_ms_max
            endpoints.renew(assembly.attached[name], section, is_closed=name in closed)
        added = [
            endpoints.add(building.endpoint_of(config, section, plan.transports[section.name]), section)
            for section in new
        ]
        for part, checked in plan.checked.items():
            part.change(old, config, checked)
        assembly.rules.replace(map(building.rule_of, config.rules))

        # 3. what is new or has changed starts
        # before networks open: what is not known to be wanted passes nowhere
        await endpoints.ask_changed_usubscriptions(old, config)
        for name in paused:
            endpoints.resume(assembly.attached[name], is_closed=name in closed)
        for attached in added:
            endpoints.start_endpoint(attached)
        assembly.networks.listen_soon()
        for part, checked in plan.checked.items():
            await part.after_change(old, config, checked)
        with contextlib.suppress(TimeoutError):  # so that who reads the answer may count on it
            async with asyncio.timeout(OPEN_WAIT_S):
                await assembly.networks.tried()
                await assembly.interest.answered()
                await assembly.networks.listen(retry=False)
        self.parts.of(Readiness).states.look()


def _differs(section: EndpointSection, other: EndpointSection, keys: tuple[str, ...]) -> bool:
    return any(getattr(section, key) != getattr(other, key) for key in keys)
