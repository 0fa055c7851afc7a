"""A second connection, for the answers to calls that a listener makes while it takes a message.

a listener calls, and waits -> listen(topic of the answer) -> the request leaves on the main connection
broker -> the answer, on both connections -> listeners take the first copy        the other has no effect (Copies)

We acknowledge a message after its listener has taken it. Some brokers (HiveMQ) send nothing more on a connection until
everything that they sent there is acknowledged. Then the listener, the broker and we would wait for each other until
the call's time is over. Nothing else needs this connection, so it is made for the first such call.

Its session ends with it, so messages are acknowledged at once. Without this connection, calls go on all the same.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import structlog

from transports.mqtt5 import wire
from transports.mqtt5.config import Mqtt5Config
from transports.mqtt5.connection import Connection
from transports.mqtt5.link import Link
from transports.mqtt5.packets import Welcome
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider

TOPICS_MAX: Final = 256  # of answers, one for each method that listeners call; others use the main connection alone
RETRY_S: Final = 60.0  # after a failed attempt, calls don't wait for another one for so long

log = structlog.get_logger()


class Answers:
    """Lives on the event loop. `take` gets all messages and must ignore those that are no answers: off-vehicle other
    messages have the same topics."""

    def __init__(
        self, config: Mqtt5Config, local: LocalUriProvider, take: Callable[[list[wire.Publish]], None]
    ) -> None:
        client_id = f"{config.client_id[:180]}-answers-{secrets.token_hex(4)}" if config.client_id else None
        own = {"client_id": client_id, "session_expiry_s": 0, "clean_start": True}
        self._config, self._local, self._take = config.model_copy(update=own), local, take
        self._link: Link | None = None
        # of answers, which may come on both connections; True: the broker has a subscription to it on this one
        self.topics: dict[str, bool] = {}
        self._turn = asyncio.Lock()
        self._retry_at_s = 0.0
        self._why_not = ""

    @property
    def notes(self) -> list[str]:
        if not self._why_not:
            return []
        what = "calls that listeners make while they take a message have no connection of their own for the answer"
        return [
            f"{what} ({self._why_not}): a broker that waits for acknowledgements, as HiveMQ does, brings it too late"
        ]

    async def listen(self, topics: Iterable[str], wire_bytes_max: int) -> None:
        """Returns when the broker has a subscription to each of `topics`, or none is possible now. Raises nothing."""
        for topic in topics:
            if len(self.topics) < TOPICS_MAX:
                self.topics.setdefault(topic, False)
        loop = asyncio.get_running_loop()
        if self._has_all() or loop.time() < self._retry_at_s:
            return
        async with self._turn:
            if self._has_all():
                return
            try:
                async with asyncio.timeout(self._config.connect_timeout_ms / 1000):
                    await self._connect(wire_bytes_max)
                    await self._subscribe()
            except (UStatusError, TimeoutError) as error:
                self._why_not = str(error) or "the broker does not answer in time"
                self._retry_at_s = loop.time() + RETRY_S
                log.warning("no second connection for the answers to listeners' calls", error=self._why_not)

    def _has_all(self) -> bool:
        return all(self.topics.values())

    async def _connect(self, wire_bytes_max: int) -> None:
        if self._link is None:
            link = Link(self._config, self._local, self)
            await link.open(wire_bytes_max)  # from now on a lost connection is made again
            self._link = link

    async def _subscribe(self) -> None:
        assert self._link is not None
        for topic in [topic for topic, is_subscribed in self.topics.items() if not is_subscribed]:
            await self._link.subscribe(topic)
            self.topics[topic] = True
        self._why_not = ""

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()
            self._link = None

    # Callbacks of the link.

    def welcomed(self, welcome: Welcome) -> None: ...

    async def up(self, connection: Connection, welcome: Welcome) -> None:
        if self._link is not None:  # connected again
            await self._subscribe()

    def down(self, why: str) -> None:
        for topic in self.topics:
            self.topics[topic] = False

    def tick(self, now_s: float) -> None: ...

    def on_pubacks(self, pubacks: list[tuple[int, int]], whys: Mapping[int, str]) -> None: ...

    def on_publishes(self, publishes: list[wire.Publish]) -> None:
        self._take(publishes)
        if self._link is not None and self._link.connection is not None:
            packet_ids = [one.packet_id for one in publishes if one.packet_id]
            self._link.connection.write(wire.pubacks(packet_ids))
