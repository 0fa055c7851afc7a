"""The IPv4 addresses of this host that DDS uses. Cyclone looks for them only when it joins a domain.

addresses("eth0") -> its address        addresses(None) -> those among which Cyclone chooses

Uses the names and flags of interfaces of the Linux kernel. Other systems have no result, so changes go unnoticed there.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import Final

_SIOCGIFFLAGS: Final = 0x8913
_SIOCGIFADDR: Final = 0x8915
_UP: Final = 0x1
_LOOPBACK: Final = 0x8
_POINT_TO_POINT: Final = 0x10
_MULTICAST: Final = 0x1000
_NAME: Final = struct.Struct("16s240x")
_FLAGS: Final = struct.Struct("16sH")
_ADDRESS_AT: Final = slice(20, 24)  # behind the name, the family and the port


def addresses(interface: str | None) -> frozenset[str]:
    """The addresses of `interface`; without one, of all interfaces that Cyclone ranks highest: multicast, not loopback,
    not point to point. Empty if no address is found. Raises nothing."""
    try:
        names = [interface] if interface is not None else [name for _, name in socket.if_nameindex()]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = [one for name in names if (one := _address(probe, name, must_be_up=interface is None)) is not None]
    except OSError:
        return frozenset()
    best = max((rank for rank, _ in found), default=0)
    return frozenset(address for rank, address in found if rank == best)


def _address(probe: socket.socket, name: str, *, must_be_up: bool) -> tuple[int, str] | None:
    """(rank, address) of interface `name`; None if it has no address."""
    request = _NAME.pack(name.encode())
    try:
        _, flags = _FLAGS.unpack_from(fcntl.ioctl(probe, _SIOCGIFFLAGS, request))
        address = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[_ADDRESS_AT])
    except OSError:
        return None
    if must_be_up and not flags & _UP:
        return None
    if flags & _LOOPBACK:
        return 1, address
    return (3 if flags & _MULTICAST and not flags & _POINT_TO_POINT else 2), address
