"""Takes over a changed configuration while the streamer runs.

file -> read -> check: names, files, certificates, transports, ports     what is wrong here changes nothing
             -> differences (config/changes.py): what the operator is told; what needs a restart stays as it is
             -> apply, which can't fail: stop what goes or changes -> one step: endpoints, rules, access, limits
                                         -> start what is new or changed -> HTTP edge, admin port
An endpoint that changes keeps its cursors and what waits in memory; its network is closed and opened again only if it
has to be. A network that is away, or a port that can't be opened, is a state as at the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Final

import structlog

from storage import logs
from streamer import parts, renaming
from streamer.assembly import Attached
from streamer.attaching import ChangeableAssembly, end
from streamer.config import AdminSection, Config, EndpointSection, FollowSection, StreamerSection, patterns
from streamer.config.changes import Difference, appliable, differences
from streamer.edge.edge import check_extra
from streamer.operating.tracing import check_tracing
from streamer.operation import Arguments, Operation
from streamer.recovery.asking import AskedSource
from streamer.reporting import Sample
from transports import certificates
from uprotocol.status import UStatusError
from uprotocol.transport import UTransport
from uprotocol.v1.ucode_pb2 import UCode
from usubscription_client import ServiceInterest, StaticFile

# keys of an endpoint for which its network is closed and opened again
NETWORK_KEYS: Final = ("transport", "authorities", "suffix", "hold", "settings")
# ... and those for which its pumps are created again
PUMP_KEYS: Final = (*NETWORK_KEYS, "followed_by", "messages_per_s")
EDGE_SECTIONS: Final = ("http", "grip", "channel", "proxy")
NOT_RELOADED: Final = "nothing is reloaded: this streamer"
OPEN_WAIT_S: Final = 3.0  # before the answer: for the HTTP edge; for open networks, uSubscriptions, and listening

log = structlog.get_logger()


@dataclass
class ReloadPlan:
    """A checked configuration and what it changes."""

    config: Config
    changes: list[Difference]
    transports: dict[str, UTransport]  # of endpoints that are new or whose network is opened again; not open
    recovery: list[AskedSource] | None  # None: unchanged
    static_file: StaticFile | None

    def has(self, *sections: str) -> bool:
        """Returns True if something in these sections is changed."""
        return any(one.section in sections for one in self.changes if one.sign != "!")

    def endpoints(self, sign: str) -> list[str]:
        """Returns the endpoints that are added (+), removed (-) or changed (~)."""
        return [one.name for one in self.changes if (one.section, one.sign) == ("endpoint", sign)]


class Reloader:
    """Reads the configuration of `streamer` again with `read`, and takes it over."""

    def __init__(
        self,
        streamer: ChangeableAssembly,
        read: Callable[[], Config] | None,
        on_admin: Callable[[str | None, AdminSection], Coroutine[Any, Any, None]],
    ) -> None:
        """`read()` blocks and raises UStatusError; None: the configuration has no file. `on_admin(address, guard)`
        serves the admin port there."""
        self._streamer, self.read, self._on_admin = streamer, read, on_admin
        self._restarts: list[str] = []  # what the file has, and only a restart takes over
        self._failure = ""  # of the last reload
        self._reloaded_ms = 0
        self._counts = {"applied": 0, "failed": 0}
        self._opening: dict[str, asyncio.Task[None]] = {}  # ports that were to be opened again, by what serves there

    def operations(self) -> dict[str, Operation]:
        async def reload(given: Arguments) -> dict[str, Any]:
            dry_run = given.flag("dry_run")
            plan = await self.reload(dry_run=dry_run)
            return {"changes": [str(one) for one in plan], "applied": not dry_run}

        return {"reload": Operation(reload, ("dry_run",), is_change=True)}

    async def reload(self, *, dry_run: bool = False) -> list[Difference]:
        """Takes over what the file says now, or only returns the differences. Raises UStatusError, and changes nothing:
        FAILED_PRECONDITION before the streamer is ready or without a file, and the errors of the check."""
        streamer = self._streamer
        if self.read is None:
            raise UStatusError(UCode.FAILED_PRECONDITION, f"{NOT_RELOADED} was not started from a file")
        self._require_running()
        async with streamer.turn:
            try:
                plan = await self._check(await asyncio.to_thread(self.read))
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
            await asyncio.shield(streamer.start_task(self._apply(plan), "reload"))
        self._counts["applied"] += 1
        self._failure, self._reloaded_ms = "", streamer.runtime.now_ms()
        self._restarts = [one.what for one in plan.changes if one.sign == "!"]
        log.info("the configuration was reloaded", changes=[str(one) for one in plan.changes])
        return plan.changes

    def _require_running(self) -> None:
        if not self._streamer.ready.is_set() or self._streamer.stopping.is_set():
            raise UStatusError(UCode.FAILED_PRECONDITION, f"{NOT_RELOADED} is not ready: try again")

    def notes(self) -> Iterator[str]:
        if self._failure:
            yield f"the last reload changed nothing: {self._failure}"
        for one in self._restarts:
            yield f"the configuration file has changed: {one}"

    def samples(self) -> Iterator[Sample]:
        for result, count in self._counts.items():
            yield "reloads", (result,), count
        yield "reload_failed", (), bool(self._failure)

    # Check

    async def _check(self, new: Config) -> ReloadPlan:
        """Makes what can fail. Raises UStatusError."""
        streamer, old = self._streamer, self._streamer.config
        found = differences(old, new)
        config = appliable(old, new)
        check_extra(config)
        check_tracing(config.tracing)
        before = {one.name: one for one in old.endpoint}
        transports = {
            one.name: parts.make_transport(config, one)
            for one in config.endpoint
            if one.name not in before or _differs(before[one.name], one, NETWORK_KEYS)
        }
        for transport in transports.values():
            transport.message_bytes_max, transport.refused = config.limits.message_bytes_max, {}
        recovery = streamer.recoveries.sources_of(config.recovery) if config.recovery != old.recovery else None
        static = None
        if config.usubscription.static_file is not None:
            static = StaticFile(config.usubscription.static_file)
            await static.load()
        used = {old.streamer.admin, old.http.listen, old.grip.publish}
        for address in {config.streamer.admin, config.http.listen, config.grip.publish} - used:
            if address is not None:
                _require_free(address)
        return ReloadPlan(config, found, transports, recovery, static)

    # Apply

    async def _apply(self, plan: ReloadPlan) -> None:
        streamer, old, config = self._streamer, self._streamer.config, plan.config
        before = {one.name: one for one in old.endpoint}
        all_pumps = plan.has("egress") or old.history.absent_ms != config.history.absent_ms
        sections = [one for one in config.endpoint if one.name in before]
        closed = {one.name: one for one in sections if one.name in plan.transports}
        paused = {one.name: one for one in sections if all_pumps or _differs(before[one.name], one, PUMP_KEYS)}
        removed = [streamer.attached[name] for name in plan.endpoints("-")]
        refollowed = self._refollowed(old, config)
        asked_before, asked = _asked(old), _asked(config)
        moved = {name for name in asked_before if asked.get(name) != asked_before[name]}
        stale = [one for one in streamer.interest.sources if isinstance(one, ServiceInterest) and one.name in moved]

        await asyncio.gather(
            *(streamer.stop_endpoint(one) for one in removed),
            *(streamer.pause_endpoint(streamer.attached[name], close=name in closed) for name in paused),
        )
        for name in [*refollowed, *plan.endpoints("-")]:
            await streamer.follows.remove_endpoint(streamer.endpoints[name])
        new = [one for one in config.endpoint if one.name not in before]
        renamed = [(one.renamed_from, one.name) for one in new if one.renamed_from]
        for was, name in renamed:
            await streamer.paused.rename(was, name)

        # no `await` in this step: no message meets a part of the change only
        streamer.config = config
        for was, name in renamed:
            streamer.express.rename(was, name)
        for one in removed:
            streamer.remove_stopped(one)
        for name, section in closed.items():
            endpoint = streamer.endpoints[name]
            endpoint.change(section.authorities, plan.transports[name], section.suffix)
            parts.adjust(endpoint, config, section)
        streamer.endpoints.changed()
        streamer.express.limit(config.express.messages_max)
        for was, name in renamed:
            renaming.rename(was, name, streamer.logs, config.streamer.data_dir)
        for name, section in paused.items():
            streamer.endpoints[name].sends.ms_max = config.egress.send_ms_max
            streamer.renew(streamer.attached[name], section, is_closed=name in closed)
        added = [self._added(plan, one) for one in new]
        for name in refollowed:
            follows = [parts.follow_of(one, streamer.endpoints) for one in config.follow if one.endpoint == name]
            streamer.follows.add_endpoint(streamer.endpoints[name], follows)
        sources = self._take_over(old.streamer, plan)
        streamer.claims.find_unclaimed()
        streamer.rules.replace(map(parts.rule_of, config.rules))

        await self._ask(asked, asked_before, stale)
        for name in paused:
            streamer.resume(streamer.attached[name], is_closed=name in closed)
        for made in added:
            streamer.start_endpoint(made)
        streamer.networks.listen_soon()
        for source in sources:
            await source.close()
        await self._static_file(old, plan)
        await self._ports(old, plan)
        with contextlib.suppress(TimeoutError):  # so that who reads the answer may count on it
            async with asyncio.timeout(OPEN_WAIT_S):
                await streamer.networks.tried()
                await streamer.interest.answered()
                await streamer.networks.listen(retry=False)
        streamer.states.look()

    def _added(self, plan: ReloadPlan, section: EndpointSection) -> Attached:
        streamer, config = self._streamer, plan.config
        endpoint = parts.endpoint_of(config, section, plan.transports[section.name])
        return streamer.add_stopped(endpoint, section, [one for one in config.follow if one.endpoint == section.name])

    def _refollowed(self, old: Config, new: Config) -> set[str]:
        """Returns the endpoints whose followed histories begin anew."""

        def there(config: Config) -> dict[str, tuple[list[str], list[FollowSection]]]:
            return {
                one.name: (one.authorities, [follow for follow in config.follow if follow.endpoint == one.name])
                for one in config.endpoint
                if one.name in names
            }

        names = {one.endpoint for one in (*old.follow, *new.follow)}
        before, after = there(old), there(new)
        return {name for name in before.keys() & after.keys() if before[name] != after[name]}

    def _take_over(self, before: StreamerSection, plan: ReloadPlan) -> list[AskedSource]:
        """Has the parts that all endpoints share do what the configuration says. Returns recovery sources to close."""
        streamer, config = self._streamer, plan.config
        if (before.log_level, before.log_format) != (config.streamer.log_level, config.streamer.log_format):
            logs.configure(config.streamer.log_level, config.streamer.log_format)
            streamer.log_level.keep()
        if plan.has("tracing"):
            with contextlib.suppress(UStatusError):  # a file has gone since the check: as before
                streamer.tracing.change(config.tracing)
        parts.retain(config, streamer.logs)
        with contextlib.suppress(UStatusError):  # then it keeps its size
            streamer.runtime.disk.reserve.bytes = parts.reserve_of(config).bytes
        streamer.logs.record = tuple(parts.recorded_of(config))
        streamer.networks.record(streamer.logs.record)
        streamer.access.change(parts.access_of(config))
        streamer.control.allow(patterns(config.dispatch.control))
        streamer.ledger.limit(config.limits.authority_messages_per_s)
        streamer.claims.limit_ms = streamer.handovers.absent_ms_max = config.history.absent_ms
        if streamer.usubscription is not None:
            streamer.usubscription.may_reset = config.usubscription.reset
        for source in streamer.interest.sources:
            if isinstance(source, ServiceInterest):
                source.refresh_ms = int(config.usubscription.refresh_s * 1000)
        for owner, files in (("", config.admin.certificate_files), (certificates.EDGE, config.http.certificate_files)):
            streamer.certificates.remove(owner)
            streamer.certificates.add(owner, files if owner or config.streamer.admin is not None else ())
        return [] if plan.recovery is None else streamer.recoveries.replace(plan.recovery)

    async def _ask(self, asked: dict[str, str], before: dict[str, str], stale: list[ServiceInterest]) -> None:
        """Asks the uSubscription services that are new or elsewhere now. What one that has moved said before serves
        until it answers."""
        streamer = self._streamer
        for one in stale:
            await streamer.stop_asking(one)
        known = {one.name: one for one in stale}
        for section in streamer.config.endpoint:
            fresh = [name for name, where in asked.items() if where == section.name and before.get(name) != where]
            if fresh:
                await streamer.ask_usubscriptions(section, fresh, known)
        for one in stale:
            await streamer.interest.remove_source(one)

    async def _static_file(self, old: Config, plan: ReloadPlan) -> None:
        streamer, before = self._streamer, old.usubscription.static_file
        known = [one for one in streamer.interest.sources if isinstance(one, StaticFile)]
        if before == plan.config.usubscription.static_file:
            for one in known:
                await one.refresh()
            return
        if plan.static_file is not None:
            await streamer.interest.add_source(plan.static_file)
        for one in known:
            await streamer.interest.remove_source(one)

    async def _ports(self, old: Config, plan: ReloadPlan) -> None:
        """Opens the HTTP edge and the admin port again if what they serve has changed. The admin port may be the one
        through which this was asked for, so nobody waits for it."""
        streamer, config = self._streamer, plan.config
        if plan.has(*EDGE_SECTIONS):
            opening = await self._open("HTTP edge", streamer.edge.change(config))
            await asyncio.wait({opening}, timeout=OPEN_WAIT_S)
        if plan.has("admin") or old.streamer.admin != config.streamer.admin:
            await self._open("admin port", self._on_admin(config.streamer.admin, config.admin))

    async def _open(self, what: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts to open a port again; what still tries to open it as it was configured before ends."""
        if (before := self._opening.get(what)) is not None:
            await end([before])
        self._opening[what] = opened = self._streamer.start_task(work, what)
        return opened


def _differs(one: EndpointSection, other: EndpointSection, keys: tuple[str, ...]) -> bool:
    return any(getattr(one, key) != getattr(other, key) for key in keys)


def _asked(config: Config) -> dict[str, str]:
    """Returns the endpoint at which each authority's uSubscription is asked."""
    return {name: section.name for section in config.endpoint for name in parts.remote_authorities_of(config, section)}


def _require_free(address: str) -> None:
    """Raises UNAVAILABLE if no port can be opened there."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _name, where in found:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(where)
    except OSError as error:
        raise UStatusError(UCode.UNAVAILABLE, f"{address} can't be opened: {error.strerror or error}") from None
