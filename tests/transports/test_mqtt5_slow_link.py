"""A link on which one message takes longer than the keep-alive deadline of the broker: it counts as slow, not as
stalled."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from tools.broker import Broker
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport, connection, link, window
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.umessage_pb2 import UMessage

pytestmark = pytest.mark.broker

SILENT_MS_MAX: Final = 1_500  # instead of 20 s
UNDER_WAY_S: Final = 2 * SILENT_MS_MAX / 1000
CHUNK_BYTES: Final = 4_096
PAUSE_S: Final = 0.05
KERNEL_BYTES: Final = 1 << 14  # so that the kernels on the way keep little of the message


@asynccontextmanager
async def slow_link(broker_port: int) -> AsyncIterator[int]:
    """A proxy's port. It passes a chunk in PAUSE_S for UNDER_WAY_S, and then all."""
    tasks: set[asyncio.Task[Any]] = set()
    loop = asyncio.get_running_loop()
    fast_at = loop.time() + UNDER_WAY_S

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                writer.write(data)
                await writer.drain()
                if len(data) == CHUNK_BYTES and loop.time() < fast_at:
                    await asyncio.sleep(PAUSE_S)
        except OSError:
            pass
        finally:
            writer.transport.abort()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_broker, to_broker = await asyncio.open_connection("127.0.0.1", broker_port)
        tasks.update({asyncio.create_task(copy(reader, to_broker)), asyncio.create_task(copy(from_broker, writer))})

    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
    listening.bind(("127.0.0.1", 0))
    async with await asyncio.start_server(serve, sock=listening, limit=CHUNK_BYTES) as server:
        yield server.sockets[0].getsockname()[1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the sockets close


async def test_a_message_that_is_under_way_for_long_is_not_given_up(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "PUBACK_MS_MAX", SILENT_MS_MAX)
    monkeypatch.setattr(connection, "ANSWER_MS_MAX", SILENT_MS_MAX)
    monkeypatch.setattr(link, "TICK_MS", 50)
    large = UMessageBuilder.publish(uris.parse("up://sender/10AB/3/80CD")).build_from_upayload(
        UPayload(b"x" * 1_000_000, 6)
    )
    async with slow_link(broker.port) as port:
        config = Mqtt5Config(port=port, keep_alive_s=1)  # a silence of 2 s would be the end, too
        async with Mqtt5Transport(config, LocalUriProvider("sender", 0x10AB, 3)) as transport:
            sending = asyncio.create_task(transport.send_batch([large]))
            await asyncio.sleep(0)
            # a question that waits behind the message: the answer is late, too
            await transport.register_listener(uris.parse("up://other/10AB/3/80CD"), Silent())
            (status,) = await sending
    assert status.code == 0, status.message


class Silent:
    def on_receive(self, message: UMessage) -> None: ...
