"""uProtocol between the processes of one machine: a directory is the network, and each end has a Unix datagram socket
in it.

send_batch -> sender thread: one datagram to each other socket of the directory, waiting while one is full
reader thread: recv -> Inbox -> loop: parse -> ListenerTable -> listeners
                       too large: counted, not taken
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Final

from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field

from transports.base import (
    LISTENERS_MAX,
    LISTENERS_PER_FILTER_MAX,
    NOT_OPEN,
    OK,
    ListenersMax,
    ListenersPerFilterMax,
    TransportBase,
    stopped,
    too_large,
)
from transports.inbox import Inbox
from transports.plugin import TransportPlugin
from uprotocol.attributes import completed
from uprotocol.status import UStatusError
from uprotocol.transport import Capability, LocalUriProvider, UListener
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from uprotocol.v1.ustatus_pb2 import UStatus

DATAGRAM_BYTES_MAX: Final = 200_000  # what a Linux kernel allows without further settings
STALL_S_MAX: Final = 30.0  # how long one send waits for an end that reads nothing
WAKE_S: Final = 1.0  # how often the reader looks whether it shall end, if nothing arrives
_numbers: Final = itertools.count()  # for several ends of one authority in one process


class UnixBusConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    directory: Path = Field(description="who has a socket here is on the network; its permissions say who may")
    listeners_max: ListenersMax = LISTENERS_MAX
    listeners_per_filter_max: ListenersPerFilterMax = LISTENERS_PER_FILTER_MAX


class UnixBusTransport(TransportBase):
    """Local sockets are reliable and keep the order. Priorities are all alike. Nothing is acknowledged or kept. A bus of
    sockets has no connection to lose: it begins with `open` and ends with `close`."""

    capabilities = Capability.PUSH | Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK

    def __init__(self, config: UnixBusConfig, local: LocalUriProvider) -> None:
        super().__init__(config, local)
        self._directory = config.directory
        self._path = config.directory / f"{self.authority[:40]}.{os.getpid()}.{next(_numbers)}.sock"

    def __repr__(self) -> str:
        return f"UnixBusTransport({self.authority}, {'open' if self.connected else 'closed'}, {self._directory})"

    async def open(self) -> None:
        if self.connected:
            return
        self._receiving = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._receiving.bind(str(self._path))
        except OSError as error:  # foreign exceptions are translated here, at the edge
            self._receiving.close()
            self._sending.close()
            raise UStatusError(
                UCode.UNAVAILABLE, f"can't make a socket in {self._directory}: {error}; does it exist?"
            ) from None
        self._receiving.settimeout(WAKE_S)
        self._sending.settimeout(STALL_S_MAX)
        self._bytes_max = min(self.wire_bytes_max, DATAGRAM_BYTES_MAX)
        self._inbox = Inbox(self._deliver, item_bytes_max=self._bytes_max, dropped=self.dropped)
        self._sender = ThreadPoolExecutor(1)
        self.set_connected(True)
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    async def close(self) -> None:
        if not self.connected:
            return
        self.set_connected(False)
        with contextlib.suppress(OSError):
            self._sending.sendto(b"", str(self._path))  # wakes the reader, which then sees that it shall end
        self._path.unlink(missing_ok=True)
        self._inbox.close()
        await asyncio.to_thread(self._sender.shutdown)
        await asyncio.to_thread(self._reader.join)
        self._receiving.close()
        self._sending.close()

    async def send_batch(self, messages: Sequence[UMessage]) -> list[UStatus]:
        if not self.connected:
            return stopped([], len(messages), NOT_OPEN)
        return await asyncio.get_running_loop().run_in_executor(self._sender, self._send, messages)

    def _send(self, messages: Sequence[UMessage]) -> list[UStatus]:
        """On the sender thread: one hop for the whole batch."""
        statuses: list[UStatus] = []
        others = [path for path in self._directory.glob("*.sock") if path != self._path]
        now_ms = self.checks.now_ms()
        for message in messages:
            refusal = self.checks.refusal(message, now_ms)
            if refusal is not None:
                statuses.append(refusal)
                continue
            # no key beside the message could name our host
            datagram = completed(message, self.authority).SerializeToString()
            if len(datagram) > self._bytes_max:
                statuses.append(too_large(len(datagram), self._bytes_max))
                continue
            try:
                for path in others:
                    self._send_to(path, datagram)
            except OSError as error:
                return stopped(
                    statuses, len(messages), UStatus(code=UCode.UNAVAILABLE, message=f"sending failed: {error}")
                )
            statuses.append(OK)
        return statuses

    def _send_to(self, path: Path, datagram: bytes) -> None:
        try:
            self._sending.sendto(datagram, str(path))
        except ConnectionRefusedError:  # its process is gone without a farewell
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass

    async def register_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        self._check_open()
        self.listeners.add(source_filter, sink_filter, listener)  # every end hears everything: there is nobody to tell

    async def unregister_listener(
        self, source_filter: UUri, listener: UListener, sink_filter: UUri | None = None
    ) -> None:
        self._check_open()
        self.listeners.remove(source_filter, sink_filter, listener)

    def _check_open(self) -> None:
        if not self.connected:
            raise UStatusError.from_status(NOT_OPEN)

    def _read(self) -> None:
        """The reader thread: bytes into the inbox, which wakes the loop once for many and makes us wait while it is
        full."""
        while self.connected:
            with contextlib.suppress(TimeoutError):
                # one byte more than anybody may send: so it shows if it was cut
                datagram = self._receiving.recv(DATAGRAM_BYTES_MAX + 1)
                self._inbox.put(datagram, len(datagram))

    def _deliver(self, datagrams: list[bytes]) -> Awaitable[None] | None:
        messages = []
        for datagram in datagrams:
            try:
                messages.append(UMessage.FromString(datagram))
            except DecodeError:
                self.dropped["malformed"] += 1
        return self.listeners.deliver(messages)


PLUGIN: Final = TransportPlugin("unixbus", UnixBusConfig, UnixBusTransport, UnixBusTransport.capabilities)
