"""The HTTP edge, as a part: made of what [http], [grip], [[channel]] and [[proxy]] name; nothing else is imported."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from streamer import building
from streamer.assembly import Assembly
from streamer.config import Config
from streamer.edge.edge import Handlers, check_extra, is_wanted
from streamer.http.places import Places
from streamer.part import Part, Parts
from streamer.parts.ports import OPEN_WAIT_S, PortOpening, require_free
from streamer.reporting import Reporter

if TYPE_CHECKING:
    from streamer.edge.callers import Callers
    from streamer.edge.server import EdgeServer, PublishServer

log = structlog.get_logger()


class EdgePart(Part):
    """The servers at `http.listen` and `grip.publish`, each if it is configured."""

    name = "HTTP edge"

    def __init__(self, assembly: Assembly, parts: Parts) -> None:
        super().__init__(assembly, parts)
        self._opening = PortOpening(assembly.tasks, self.name, _not_opened, is_fatal=True)
        self._changed = asyncio.Event()
        self._configure(assembly.config)

    def _configure(self, config: Config) -> None:
        self._config = config
        self.places = Places(config.http.clients_max, config.http.each_client_max)
        self.port = self.publish_port = 0  # known once it is open
        self.handlers = Handlers()
        self._callers: Callers | None = None
        self._server: EdgeServer | None = None
        self._publishing: PublishServer | None = None

    @classmethod
    def require(cls, config: Config) -> None:
        check_extra(config)

    async def start(self) -> None:
        """Raises UStatusError: UNAVAILABLE if a port can't be opened, FAILED_PRECONDITION for a file that can't be
        used."""
        if not is_wanted(self._config):
            return
        from streamer.edge.callers import Callers  # imports aiohttp (0.1 s, 11 MiB)
        from streamer.edge.server import EdgeServer, PublishServer

        http, grip = self._config.http, self._config.grip
        if http.listen is not None:
            self._callers = Callers(http, self._config.authority, self.places.refused)
        self.handlers = handlers = self._handlers(self._callers, self.places)
        for open_ in handlers.opening:
            await open_()
        if self._callers is not None:
            assert handlers.stream is not None, "made where http.listen is configured"
            self._server = EdgeServer(
                http, handlers.stream, handlers.proxied, callers=self._callers, places=self.places
            )
            self.port = await self._server.open()
        if grip.publish is not None:
            assert handlers.publish is not None, "made where grip.publish is configured"
            self._publishing = PublishServer(grip, handlers.publish, self.places)
            self.publish_port = await self._publishing.open()

    def _handlers(self, callers: Callers | None, places: Places) -> Handlers:
        """Connects what answers requests. `callers`: None without http.listen."""
        from streamer.edge.handlers import handlers_of  # imports aiohttp
        from streamer.grip.channels import Outlet

        assembly = self.assembly
        outlet = Outlet(assembly.dispatch, assembly.entry, assembly.home, assembly.follows.append)
        on_gap, now_ms = assembly.losses.channel_gap, assembly.runtime.now_ms
        return handlers_of(self._config, assembly.history, outlet, on_gap, callers, places, now_ms)

    async def run(self) -> None:
        """Reads the tokens again when their file changes, and ends clients whose token is no longer in it."""
        while True:
            self._changed.clear()
            looking = None if self._callers is None else asyncio.create_task(self._callers.run(self.places.look))
            try:
                await self._changed.wait()
            finally:
                if looking is not None:
                    looking.cancel()

    async def stop(self) -> None:
        for close in self.handlers.closing:
            close()
        await asyncio.gather(*(one.close() for one in (self._server, self._publishing) if one is not None))
        for closed in self.handlers.closed:
            await closed()

    def reporters(self) -> Iterable[Reporter]:
        yield self._opening
        if is_wanted(self._config):
            yield from (one for one in (self._callers, self._server, self._publishing) if one is not None)
            yield from (self.places, *self.handlers.reporters)

    async def check(self, old: Config, new: Config) -> None:
        require_free({new.http.listen, new.grip.publish} - building.addresses_of(old))

    async def after_change(self, old: Config, new: Config, checked: Any) -> None:
        """Opens the ports again if what they serve has changed."""
        if _sections(old) != _sections(new):
            opening = await self._opening.begin(partial(self._reopen, new))
            await asyncio.wait({opening}, timeout=OPEN_WAIT_S)

    async def _reopen(self, config: Config) -> None:
        """Ends all clients, which come back, and serves what `config` names."""
        await self.stop()
        self._configure(config)
        await self.start()
        self._changed.set()


def _sections(config: Config) -> tuple[Any, ...]:
    return config.http, config.grip, config.channel, config.proxy


def _not_opened(error: str, attempt: int) -> str:
    log.error("the HTTP edge can't be opened; trying again", error=error, attempt=attempt)
    return f"the HTTP edge can't be opened: {error}"
