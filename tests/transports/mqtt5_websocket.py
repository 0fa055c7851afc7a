"""MQTT over WebSocket for a broker that has none (Debian's mosquitto): end -> WebSocketBridge -> broker.

bridge = WebSocketBridge(broker.host, broker.port); await bridge.start(); connect to bridge.port; await bridge.stop()
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Final

from aiohttp import WSMsgType, web

CHUNK_BYTES: Final = 1 << 16  # of one read from the broker


class WebSocketBridge:
    """One TCP connection for each WebSocket, with back-pressure both ways. `frame_bytes`: a frame to the end has so
    many at most, wherever a packet begins and ends; 0: as many as one read has brought."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._target, self._tls = (host, port), tls
        self._runner: web.AppRunner | None = None
        self.frame_bytes = 0
        self.port = 0
        self.requests: list[web.Request] = []  # that have come, in order
        self.names: list[str] = []  # of their certificates, where TLS asks for one

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/mqtt", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        self.requests.append(request)
        certificate = request.get_extra_info("peercert")
        if certificate:
            self.names.append(certificate["subject"][0][0][1])
        there = web.WebSocketResponse(protocols=("mqtt",), max_msg_size=0, compress=False)
        await there.prepare(request)
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(*self._target)
            tasks = [asyncio.create_task(one) for one in (self._up(there, writer), self._down(reader, there))]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                writer.transport.abort()
        if request.transport is not None:
            request.transport.close()
        return there

    async def _up(self, there: web.WebSocketResponse, writer: asyncio.StreamWriter) -> None:
        async for message in there:
            if message.type is not WSMsgType.BINARY:
                return
            writer.write(message.data)
            await writer.drain()

    async def _down(self, reader: asyncio.StreamReader, there: web.WebSocketResponse) -> None:
        while data := await reader.read(CHUNK_BYTES):
            step = self.frame_bytes or len(data)
            for at in range(0, len(data), step):
                await there.send_bytes(data[at : at + step])
