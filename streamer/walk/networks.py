"""Networks: opens every endpoint, keeps it open, and has its ingress listen to what is needed.

run, separately for each endpoint:
    announce what is needed -> open -- away? retried --> connected / lost -> callbacks of the owner
            ^---- close, CLOSE_S_MAX at most, if its transport does not return from sending (Sends)
    -> sync: its ingress listens to what rules, interest and services need  <-- one of these has changed
                       ^---- the network refuses: retried after a while

An endpoint whose network hangs, or is away at the start, is retried; the others are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from streamer.operating.states import OPENING, Condition
from streamer.walk.endpoint import Endpoint, Endpoints
from streamer.walk.ingress import Ingress
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError
from usubscription_client.interest import Interest

JUST_GONE_S: Final = 5.0  # a network that went away more recently may be back soon (a broker restarts), so ...
BACK_SOON_S: Final = 2.0  # ... a Subscribe is answered once it is back, or after this time; callers wait longer
OPEN_MS_MIN: Final = 500  # between attempts to open a network, so that a broker that refuses us is not flooded
CLOSE_S_MAX: Final = 10.0  # for closing a transport that hangs; ours take 4 s at most

log = structlog.get_logger()


class Networks:
    """The transports of all endpoints: which are open and connected, and what is wrong with them."""

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
        """`folder`: where transports keep state for the next process."""
        self._endpoints, self._ingresses, self._interest = endpoints, ingresses, interest
        self._folder, self._backoff, self._on_connected, self._on_loss = folder, backoff, on_connected, on_loss
        self._open: set[str] = set()  # endpoints whose transport has been opened
        # endpoints that have been connected: one that only listens may have no partner yet
        self._linked: set[str] = set()
        self._troubles: dict[str, str] = {}  # endpoint -> why it is not open or not listening
        # loop time at which an endpoint was first opened, or its network went away
        self._away_at: dict[str, float] = {}
        self._away_since: dict[str, float] = {}  # endpoints whose network is away -> since when (loop time)
        self._tried: dict[str, asyncio.Event] = {}  # set once it listens or has failed to
        self._changed: dict[str, asyncio.Event] = {}  # set when other filters are needed
        self._retry: set[str] = set()  # endpoints that are new or back, and may now accept what they refused
        self._back = asyncio.Event()  # set when a network is back or waiting has ended
        self._stopping = False
        self._services_listen = False  # all services inside have started
        for endpoint in endpoints:
            self.add_endpoint(endpoint)

    def add_endpoint(self, endpoint: Endpoint) -> None:
        """Add an endpoint, which `run` opens."""
        name = endpoint.name
        self._away_since[name] = asyncio.get_running_loop().time()
        self._tried[name], self._changed[name] = asyncio.Event(), asyncio.Event()

    def remove_endpoint(self, name: str) -> None:
        """Remove an endpoint, once its `run` was cancelled and its transport is closed."""
        for names in (self._open, self._linked, self._retry):
            names.discard(name)
        self._troubles.pop(name, None)
        for times in (self._away_at, self._away_since):
            times.pop(name, None)
        del self._tried[name], self._changed[name]
        self._back.set()

    async def run(self, endpoint: Endpoint) -> None:
        """Open the transport, listen to what is needed, and reopen it when it hangs, until cancelled."""
        endpoint.transport.on_connection(lambda connected: self._connection(endpoint, connected))
        endpoint.transport.on_loss(lambda what, messages: self._on_loss(endpoint, what, messages))
        endpoint.transport.remember_in(str(self._folder / f"endpoint-{endpoint.name}.json"))
        await self._open_with_retries(endpoint)
        self._listen_again()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(endpoint.name), name=f"listen {endpoint.name}")
            tasks.create_task(self._reopen_what_hangs(endpoint), name=f"reopen {endpoint.name}")

    async def tried(self) -> None:
        """Wait until each endpoint listens, or the first attempt to open it has failed."""
        await asyncio.gather(*(event.wait() for event in self._tried.values()))

    async def _open_with_retries(self, endpoint: Endpoint) -> None:
        """Open the transport, with retries while the network is away."""
        backoff = self._backoff()
        self._expect_soon(endpoint)
        while True:
            await self._ingresses[endpoint.name].filters.announce(self._interest)
            try:
                await endpoint.open()
                break
            except UStatusError as error:
                why = self._troubles[endpoint.name] = str(error)
            log.error("an endpoint can't be opened; trying again", endpoint=endpoint.name, error=why, attempt=backoff)
            self._has_tried(endpoint.name)
            await asyncio.sleep(max(backoff.next_ms(), OPEN_MS_MIN) / 1000)
        self._open.add(endpoint.name)
        self._troubles.pop(endpoint.name, None)

    async def _reopen_what_hangs(self, endpoint: Endpoint) -> None:
        while True:
            await endpoint.sends.hung.wait()
            await self.reopen(endpoint)

    async def reopen(self, endpoint: Endpoint) -> None:
        """Close the transport, open it again, and register all filters again, since it may have forgotten them. Nothing
        is sent meanwhile. If the close hangs as well, it is cancelled after CLOSE_S_MAX."""
        self._open.discard(endpoint.name)
        closing = asyncio.ensure_future(endpoint.close())
        try:
            closed, _ = await asyncio.wait({closing}, timeout=CLOSE_S_MAX)
        finally:
            closing.cancel()
        if not closed:
            log.error("a transport that hangs does not close either", endpoint=endpoint.name, waited_s=CLOSE_S_MAX)
        elif (error := closing.exception()) is not None:
            log.error("a transport that hung failed to close", endpoint=endpoint.name, error=str(error))
        self._ingresses[endpoint.name].filters.register_again()
        await self._open_with_retries(endpoint)
        log.warning("a transport that hung was opened again", endpoint=endpoint.name)
        endpoint.sends.resume()
        self._listen_again()
        self._on_connected(endpoint)

    def _expect_soon(self, endpoint: Endpoint) -> None:
        """Note that the network is away and may be back soon. Ignored if publishes carry the streamer's sink, since no
        topic then has a filter of its own that could be missing."""
        if not endpoint.needs_sink:
            self._away_at[endpoint.name] = asyncio.get_running_loop().time()

    def _has_tried(self, name: str) -> None:
        if not self._tried[name].is_set():
            self._tried[name].set()
            self._away_at.pop(name, None)
            self._back.set()

    def _listen_again(self) -> None:
        self._retry.update(self._changed)
        self.listen_soon()

    def _connection(self, endpoint: Endpoint, connected: bool) -> None:
        log.info("connected" if connected else "connection lost", endpoint=endpoint.name)
        if not connected:
            self._away_since[endpoint.name] = asyncio.get_running_loop().time()
            if not endpoint.transport.only_listens:  # a partner that connects to us gets all filters at once
                self._expect_soon(endpoint)
        else:
            if self._tried[endpoint.name].is_set():  # else it does not listen yet
                self._away_at.pop(endpoint.name, None)
            self._away_since.pop(endpoint.name, None)
            self._linked.add(endpoint.name)
            self._listen_again()
            self._back.set()
            self._on_connected(endpoint)

    def is_connected(self, endpoint: Endpoint) -> bool:
        connected = endpoint.name in self._open and endpoint.connected
        if connected:
            self._linked.add(endpoint.name)  # some transports report reconnections only
        return connected

    def away_s(self, endpoint: Endpoint) -> float:
        """Returns how long its network has been away while the streamer ran; 0: it is connected."""
        now = asyncio.get_running_loop().time()
        if not self.is_connected(endpoint):
            return now - self._away_since.setdefault(endpoint.name, now)
        self._away_since.pop(endpoint.name, None)
        return 0.0

    def conditions(self) -> Iterator[Condition]:
        """Yields conditions: an endpoint that is not open is not ready; one that refuses a filter is degraded."""
        for endpoint in self._endpoints:
            name = endpoint.name
            if trouble := self._troubles.get(name, ""):
                yield Condition(trouble, name, is_fatal=name not in self._open)
            elif name not in self._open and not endpoint.sends.hung.is_set():
                yield Condition(OPENING, name, is_fatal=True)
            if endpoint.sends.trouble:
                yield Condition(endpoint.sends.trouble, name, is_fatal=True)
            is_away = not self.is_connected(endpoint) and name in self._linked and not endpoint.sends.hung.is_set()
            if is_away and not endpoint.transport.only_listens:
                why = getattr(endpoint.transport, "away_because", "")
                yield Condition("its network is away" + (f": {why}" if why else ""), name, is_fatal=True)
            if endpoint.fault:
                yield Condition(endpoint.fault, name, is_fatal=True)
            for trouble in getattr(endpoint.transport, "troubles", ()):
                yield Condition(trouble, name)

    # Listening

    async def sync(self, *, retry: bool = True) -> None:
        """Have every ingress listen to what is needed now; `retry`: also to filters that its network refused.

        Raises the first UStatusError, after all ingresses were tried.
        """
        errors = await self._sync_some([one.name for one in self._endpoints if one.name in self._open], retry)
        for error in errors.values():
            raise error

    async def _sync_some(self, names: Iterable[str], retry: bool) -> dict[str, UStatusError]:
        """Returns the errors of those that refuse a filter. One that hangs does not delay the others."""
        asked = list(names)
        results = await asyncio.gather(*(self._sync_one(name, retry) for name in asked))
        return {name: error for name, error in zip(asked, results, strict=True) if error is not None}

    async def _sync_one(self, name: str, retry: bool) -> UStatusError | None:
        try:
            await self._ingresses[name].filters.sync(self._interest, retry=retry)
        except UStatusError as error:
            self._troubles[name] = f"listening failed: {error}"
            return error
        self._troubles.pop(name, None)
        if self._services_listen and self._interest.complete:
            self._endpoints[name].all_registered()
        return None

    async def listen(self, *, retry: bool = True) -> bool:
        """Register what can be registered now, and leave the rest to `run`. Returns False if something is left."""
        failed = await self._try_to_listen([one.name for one in self._endpoints if one.name in self._open], retry)
        for name in failed:
            self._changed[name].set()
        return not failed

    async def _try_to_listen(self, names: Iterable[str], retry: bool) -> list[str]:
        """Returns the names of those that refuse a filter."""
        errors = await self._sync_some(names, retry)
        for name, error in errors.items():
            log.warning("could not listen to everything; trying again", endpoint=name, error=str(error))
        return list(errors)

    def services_listen(self) -> None:
        """Note that all services inside have started. Once the interest is complete, all filters are registered."""
        self._services_listen = True
        self.listen_soon()

    def listen_soon(self) -> None:
        """Listen soon to what is needed, which has changed."""
        for changed in self._changed.values():
            changed.set()

    async def _follow(self, name: str) -> None:
        """Listen to what is needed whenever that changes, until cancelled. Refused filters are retried after a while,
        and at once when a network is back."""
        loop, backoff, changed = asyncio.get_running_loop(), self._backoff(), self._changed[name]
        retry_at: float | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(retry_at):
                    await changed.wait()
            changed.clear()
            retry = name in self._retry or (retry_at is not None and loop.time() >= retry_at)
            self._retry.discard(name)
            if not await self._try_to_listen([name], retry):
                backoff.reset()
                retry_at = None
            elif retry or retry_at is None:
                retry_at = loop.time() + backoff.next_ms() / 1000
            self._has_tried(name)

    async def listen_before_answer(self, _: Any) -> None:
        """Listen before the embedded service answers, so that nothing published after the answer is missed.

        Wait a little for a network that is being opened or has just gone away: messages that are published there
        before we are back are lost.
        """
        await self.listen(retry=False)
        loop = asyncio.get_running_loop()
        until = loop.time() + BACK_SOON_S
        while (
            (just_away := any(until - BACK_SOON_S - at < JUST_GONE_S for at in self._away_at.values()))
            and loop.time() < until
            and not self._stopping
        ):
            self._back.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._back.wait()
            await self.listen()
        if just_away:
            log.info("a subscription is answered though a network is away: it counts there from when that is back")

    def stop_waiting(self) -> None:
        """Stop waiting for networks."""
        self._stopping = True
        self._back.set()
