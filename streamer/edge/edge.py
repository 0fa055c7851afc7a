"""The HTTP edge as a part of the streamer: it is made of what the configuration names, and nothing else is imported."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from streamer.config import Config
from streamer.edge.places import Places
from streamer.reporting import Condition, Reporter, Sample
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

if TYPE_CHECKING:
    from streamer.edge.callers import Callers
    from streamer.edge.server import EdgeServer, Handler, PublishServer
    from streamer.grip.channels import Channels

EXTRA: Final = {"aiohttp_sse": "aiohttp-sse", "jwt": "pyjwt"}  # modules of the extra `http`, and their packages
OPEN_MS_MIN: Final = 500  # shortest and ...
OPEN_MS_MAX: Final = 30_000  # ... longest pause between attempts to open it after a change

log = structlog.get_logger()


class Handlers(NamedTuple):
    """What answers requests; the rest of the edge does not know what they mean."""

    channels: Channels | None = None
    stream: Handler | None = None  # GET /stream; wherever http.listen is configured
    proxied: Handler | None = None  # everything else at http.listen; None: 404
    publish: Handler | None = None  # POST /publish/; wherever grip.publish is configured
    samples: Sequence[Callable[[], Iterable[Sample]]] = ()
    conditions: Sequence[Callable[[], Iterable[Condition]]] = ()
    opening: Sequence[Callable[[], Awaitable[object]]] = ()  # called before the ports are open; may raise UStatusError
    closing: Sequence[Callable[[], None]] = ()  # called before the ports close
    closed: Sequence[Callable[[], Awaitable[None]]] = ()  # called when no request is left


def is_wanted(config: Config) -> bool:
    return config.http.listen is not None or config.grip.publish is not None


def check_extra(config: Config) -> None:
    """Raises FAILED_PRECONDITION if the edge is configured and a package that it needs is missing."""
    missing = [package for module, package in EXTRA.items() if importlib.util.find_spec(module) is None]
    if missing and is_wanted(config):
        why = f"the HTTP edge needs {' and '.join(missing)}: try pip install {' '.join(missing)} (the extra 'http')"
        raise UStatusError(UCode.FAILED_PRECONDITION, why)


class HttpEdge(Reporter):
    """The servers at `http.listen` and `grip.publish`, each if it is configured. `make` returns the handlers: it is
    called when the edge opens; `callers` is None without `http.listen`."""

    def __init__(self, config: Config, make: Callable[[Callers | None, Places], Handlers]) -> None:
        self._make = make
        self._trouble = ""  # why it could not be opened after a change
        self._changed = asyncio.Event()
        self._configure(config)

    def _configure(self, config: Config) -> None:
        self._config = config
        self.places = Places(config.http.clients_max, config.http.each_client_max)
        self.port = self.publish_port = 0  # known once it is open
        self.handlers = Handlers()
        self._callers: Callers | None = None
        self._server: EdgeServer | None = None
        self._publishing: PublishServer | None = None

    async def open(self) -> None:
        """Raises UStatusError: UNAVAILABLE if a port can't be opened, FAILED_PRECONDITION for a file that can't be
        used."""
        if not is_wanted(self._config):
            return
        from streamer.edge.callers import Callers  # imports aiohttp (0.1 s, 11 MiB)
        from streamer.edge.server import EdgeServer, PublishServer

        http, grip = self._config.http, self._config.grip
        if http.listen is not None:
            self._callers = Callers(http, self._config.authority, self.places.refused)
        self.handlers = handlers = self._make(self._callers, self.places)
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

    async def run(self) -> None:
        """Reads the tokens again when their file changes, and ends clients whose token is gone, until cancelled."""
        while True:
            self._changed.clear()
            looking = None if self._callers is None else asyncio.create_task(self._callers.run(self.places.look))
            try:
                await self._changed.wait()
            finally:
                if looking is not None:
                    looking.cancel()

    async def change(self, config: Config) -> None:
        """End all clients, which come back, and serve what `config` names. While a port or a file can't be used, it is
        tried again, and `conditions` has the reason."""
        backoff = Backoff(OPEN_MS_MIN, OPEN_MS_MAX)
        while True:
            await self.close()
            self._configure(config)
            try:
                await self.open()
            except UStatusError as error:
                self._trouble = f"the HTTP edge can't be opened: {error.message}"
                log.error("the HTTP edge can't be opened; trying again", error=error.message, attempt=backoff.attempt)
                await backoff.wait()
            else:
                self._trouble = ""
                self._changed.set()
                return

    async def close(self) -> None:
        """May be called twice."""
        for close in self.handlers.closing:
            close()
        await asyncio.gather(*(one.close() for one in (self._server, self._publishing) if one is not None))
        for closed in self.handlers.closed:
            await closed()

    def conditions(self) -> Iterator[Condition]:
        if self._trouble:
            yield Condition(self._trouble, is_fatal=True)
        if self._callers is not None:
            yield from self._callers.conditions()
        if self._server is not None:
            yield from self._server.conditions()
        for conditions in self.handlers.conditions:
            yield from conditions()

    def notes(self) -> Iterator[str]:
        if self._server is not None and self._server.note:
            yield self._server.note

    def samples(self) -> Iterator[Sample]:
        if not is_wanted(self._config):
            return
        for server in (self._server, self._publishing):
            if server is not None:
                yield from server.samples()
        yield from self.places.samples()
        for samples in self.handlers.samples:
            yield from samples()
