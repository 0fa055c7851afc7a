"""Names of hosts: which names a client may use to reach an HTTP port."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from aiohttp import web


def name_of_host(host: str) -> str:
    """Returns the name in HOST or HOST:PORT, without brackets; a bracket that is not closed is a part of it."""
    is_address = host.startswith("[") and "]" in host
    name = host.partition("]")[0].removeprefix("[") if is_address else host.partition(":")[0]
    return name.lower().removesuffix(".")


def is_known_host(host: str, names: Iterable[str], *, any_address: bool = False) -> bool:
    """Returns True for loopback (or for each address), and for `names`: of hosts, perhaps with a port."""
    name = name_of_host(host)
    try:
        if ip_address(name).is_loopback or any_address:
            return True
    except ValueError:
        if name == "localhost":
            return True
    return any(one.lower() == host.lower() or one.lower().strip("[]") == name for one in names)


def host_of(request: web.Request) -> str:
    """Raises 400 if there is not exactly one."""
    hosts = request.headers.getall("Host", [])
    if len(hosts) != 1 or not hosts[0]:
        raise web.HTTPBadRequest(text=f"expected one Host header, got {len(hosts)}\n")
    return hosts[0]
