"""Networks: every endpoint is opened, kept open, and listens to what is needed now.

keep_open: open -- away? again and again --> connected / lost -> callbacks of the owner
follow:    something has changed -> sync: each ingress listens to what rules, interest and services need
                       ^---- a network refuses: again, while the others go on

An endpoint whose network is away at the start is tried again and again; the others don't notice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from streamer.endpoint import Endpoint, Endpoints
from streamer.ingress import Ingress
from streamer.states import OPENING, Condition
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from usubscription_client.interest import Interest

JUST_GONE_S: Final = 5.0  # a network that went away within that may be back any moment: a broker restarts, say, so ...
BACK_SOON_S: Final = 2.0  # ... who subscribes is answered only when it is, or after so long; callers are more patient

log = structlog.get_logger()


class Networks:
    """The transports of all endpoints: which are open, which are there, and what is wrong with them."""

    def __init__(
        self,
        endpoints: Endpoints,
        ingresses: Mapping[str, Ingress],
        interest: Interest,
        folder: Path,
        backoff: Callable[[], Backoff],
        on_connected: Callable[[Endpoint], None],
        on_loss: Callable[[Endpoint, str, int | None], None],
    ) -> None:
        """`folder`: where transports remember what the next process must know."""
        self._endpoints, self._ingresses, self._interest = endpoints, ingresses, interest
        self._folder, self._backoff, self._on_connected, self._on_loss = folder, backoff, on_connected, on_loss
        self._open: set[str] = set()  # endpoints whose transport has been opened
        # endpoints that have had a connection: who only listens may be alone for a while
        self._linked: set[str] = set()
        self._troubles: dict[str, str] = {}  # endpoint -> why it is not open, or not listening
        self._gone_at: dict[str, float] = {}  # endpoints whose network went away, and when (loop time)
        self._changed = asyncio.Event()  # what is to be listened to
        self._retry = False  # what a network has refused may be taken now: one is new, or back
        self._back = asyncio.Event()  # a network is back, or nobody waits for one any more
        self._stopping = False

    def __repr__(self) -> str:
        return f"Networks(open={sorted(self._open)}, troubles={self._troubles})"

    async def keep_open(self, endpoint: Endpoint, tried: asyncio.Event) -> None:
        """Open the transport; try again while its network is away. `tried` is set after the first attempt."""
        backoff = self._backoff()
        endpoint.transport.on_connection(lambda connected: self._connection(endpoint, connected))
        endpoint.transport.on_loss(lambda what, messages: self._on_loss(endpoint, what, messages))
        endpoint.transport.remember_in(str(self._folder / f"endpoint-{endpoint.name}.json"))
        while True:
            try:
                await endpoint.open()
                break
            except UStatusError as error:
                why = self._troubles[endpoint.name] = str(error)
            log.error("an endpoint can't be opened; trying again", endpoint=endpoint.name, error=why, attempt=backoff)
            tried.set()
            await backoff.wait()
        self._open.add(endpoint.name)
        self._troubles.pop(endpoint.name, None)
        tried.set()
        self._listen_anew()

    def _listen_anew(self) -> None:
        self._retry = True
        self._changed.set()

    def _connection(self, endpoint: Endpoint, connected: bool) -> None:
        log.info("connected" if connected else "connection lost", endpoint=endpoint.name)
        if not connected:
            if not endpoint.needs_sink:  # there, no topic has a filter that could be missing
                self._gone_at[endpoint.name] = asyncio.get_running_loop().time()
        else:
            self._gone_at.pop(endpoint.name, None)
            self._linked.add(endpoint.name)
            self._listen_anew()
            self._back.set()
            self._on_connected(endpoint)

    def is_connected(self, endpoint: Endpoint) -> bool:
        connected = endpoint.name in self._open and endpoint.connected
        if connected:
            self._linked.add(endpoint.name)  # also of a transport that tells of reconnections only
        return connected

    def conditions(self) -> Iterator[Condition]:
        """An endpoint that is not open is not ready; what a network refuses of much else is less."""
        for endpoint in self._endpoints:
            name = endpoint.name
            if trouble := self._troubles.get(name, ""):
                yield Condition(trouble, name, is_fatal=name not in self._open)
            elif name not in self._open:
                yield Condition(OPENING, name, is_fatal=True)
            is_away = not self.is_connected(endpoint) and name in self._linked
            if is_away and not endpoint.transport.only_listens:
                why = getattr(endpoint.transport, "away_because", "")
                yield Condition("its network is away" + (f": {why}" if why else ""), name, is_fatal=True)
            if endpoint.fault:
                yield Condition(endpoint.fault, name, is_fatal=True)
            for trouble in getattr(endpoint.transport, "troubles", ()):
                yield Condition(trouble, name)

    # What is listened to

    async def sync(self, *, retry: bool = True) -> None:
        """Make every ingress listen to what is needed now; `retry`: also to what its network has refused before.

        Raises the first UStatusError, after all were tried.
        """
        names = [endpoint.name for endpoint in self._endpoints if endpoint.name in self._open]
        # one that hangs holds up no other
        results = await asyncio.gather(*(self._sync_one(name, retry) for name in names))
        errors = [error for error in results if error is not None]
        if errors:
            raise errors[0]

    async def _sync_one(self, name: str, retry: bool) -> UStatusError | None:
        try:
            await self._ingresses[name].filters.sync(self._interest, retry=retry)
        except UStatusError as error:
            self._troubles[name] = f"listening failed: {error}"
            return error
        self._troubles.pop(name, None)
        return None

    async def listen(self, *, retry: bool = True) -> bool:
        """Listen to what can be listened to now, and leave the rest to `follow`: one network that refuses stops
        nothing. False if something is left."""
        listens = await self._try_to_listen(retry)
        if not listens:
            self._changed.set()
        return listens

    async def _try_to_listen(self, retry: bool) -> bool:
        try:
            await self.sync(retry=retry)
        except UStatusError as error:
            log.warning("could not listen to everything; trying again", error=str(error))
            return False
        return True

    def listen_soon(self) -> None:
        """Something else has to be listened to."""
        self._changed.set()

    async def follow(self) -> None:
        """Listen to what is needed, whenever that changes, until cancelled. What a network refuses is tried again after
        a while, and at once when one is back."""
        loop, backoff = asyncio.get_running_loop(), self._backoff()
        retry_at: float | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(retry_at):
                    await self._changed.wait()
            self._changed.clear()
            retry = self._retry or (retry_at is not None and loop.time() >= retry_at)
            self._retry = False
            if await self._try_to_listen(retry):
                backoff.reset()
                retry_at = None
            elif retry or retry_at is None:
                retry_at = loop.time() + backoff.next_ms() / 1000

    async def listen_before_answer(self, _: Any) -> None:
        """The embedded service is about to answer: listen first, so that nothing published after the answer is missed.

        A network that has just gone is waited for a little: what is published there before we are back reaches nobody.
        """
        await self.listen(retry=False)
        loop = asyncio.get_running_loop()
        until = loop.time() + BACK_SOON_S
        while (
            (just_gone := any(until - BACK_SOON_S - at < JUST_GONE_S for at in self._gone_at.values()))
            and loop.time() < until
            and not self._stopping
        ):
            self._back.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._back.wait()
            await self.listen()
        if just_gone:
            log.info("a subscription is answered though a network is away: it counts there from when that is back")

    def stop_waiting(self) -> None:
        """Nobody waits any more for a network to be back."""
        self._stopping = True
        self._back.set()
