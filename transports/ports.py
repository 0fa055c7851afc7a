"""TCP ports for servers that tests, the demo and benchmarks start on 127.0.0.1.

free_port() -> a port below the ephemeral ports of the system
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
from typing import Final

from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

PORTS: Final = range(20_000, 32_768)  # below the ephemeral ports of Linux (32768), Windows and macOS (49152)

_ports = itertools.cycle(random.sample(PORTS, len(PORTS)))  # random, so that processes rarely choose the same


def use_part(number: int, parts: int) -> None:
    """Let `free_port` return only ports of part `number` (from 0) of `parts` equal parts, so that concurrent processes
    never choose the same one."""
    global _ports
    part = PORTS[number::parts]
    _ports = itertools.cycle(random.sample(part, len(part)))


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now, and that the system does not choose by itself.

    A port that the system chooses (port 0) may become the local port of another connection before its user listens on
    it, or while its server is restarted. Raises UStatusError(RESOURCE_EXHAUSTED): all are taken.
    """
    for port in itertools.islice(_ports, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise UStatusError(UCode.RESOURCE_EXHAUSTED, f"no port of {PORTS.start} to {PORTS.stop - 1} is free on 127.0.0.1")
