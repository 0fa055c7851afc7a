"""All that a transport's author has to write: where the ends are, and how to misbehave on this network."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from unixbus import UnixBusConfig, UnixBusTransport

from transports.conformance import TransportConformance
from uprotocol.transport import Capability, LocalUriProvider, UTransport
from uprotocol.v1.umessage_pb2 import UMessage


class TestUnixBus(TransportConformance):
    capabilities = Capability.PUSH | Capability.WILDCARD_SOURCE | Capability.PUBLISH_WITHOUT_SINK
    payload_bytes_max = 1 << 17

    @pytest.fixture(autouse=True)
    def _directory(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as name:  # short: a socket's path has at most 107 characters
            self.directory = Path(name)
            yield

    async def make_end(self, authority: str, **limits: int) -> UTransport:
        return UnixBusTransport(
            UnixBusConfig(directory=self.directory, **limits), LocalUriProvider(authority, 0x10AB, 3)
        )

    def normalise(self, message: UMessage) -> UMessage:
        return message  # whole messages travel, so nothing is lost

    async def inject(self, message: UMessage) -> None:
        self.put(message.SerializeToString())

    async def inject_malformed(self, source, sink) -> int:
        self.put(b"\xff\xff\xff")
        self.put(b"")
        return 2

    def peer_process(self, authority: str) -> tuple[str, dict]:
        return "unixbus:PLUGIN", {"directory": str(self.directory)}

    def put(self, datagram: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            for path in self.directory.glob("*.sock"):
                one.sendto(datagram, str(path))
