"""What `up-streamer check --connect` finds out in a Zenoh network, with client sessions of its own.

for each endpoint of connect: open -> which router or peer is there? its version? its clock?
for each endpoint of listen:  is its port free?

The sessions subscribe to one key outside of uProtocol's, so they have no effect on who listens. Whether access_control
denies something can't be known: Zenoh reports that to nobody.
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

import zenoh
from zenoh.handlers import Callback

from transports.base import on_own_thread, port_result
from transports.zenoh.config import ZenohConfig, linked
from transports.zenoh.sender import translate
from uprotocol.status import UStatusError
from uprotocol.transport import ProbeRequest, ProbeResult, ProbeVerdict

ANSWER_S: Final = 1.0  # for the admin space, the time stamp, and scouting
CLOCK_OFF_S: Final = 1.0  # more than this is a wrong clock


async def results(config: ZenohConfig, asked: ProbeRequest, wire_bytes_max: int) -> AsyncGenerator[ProbeResult, None]:
    try:
        connect, listen = endpoints_of(config, "connect"), endpoints_of(config, "listen")
    except UStatusError as error:
        yield ProbeResult(ProbeVerdict.FAIL, error.message)
        return
    for endpoint in listen:
        yield await _port(endpoint, asked.is_running)
    for endpoint in connect:
        look = functools.partial(_linked_to, config, endpoint, wire_bytes_max)
        for one in await on_own_thread("zenoh-probe", look, lambda _: None):
            yield one
    if config.multicast_scouting:
        yield await on_own_thread("zenoh-probe", lambda: _scouted(config), lambda _: None)
    if connect:
        yield ProbeResult(ProbeVerdict.UNKNOWN, "whether access_control denies something: Zenoh reports it to nobody")


def endpoints_of(config: ZenohConfig, way: str) -> list[str]:
    """Those to "connect" to, or to "listen" at, with those of config_file. Raises UStatusError."""
    found: Any = json.loads(config.to_zenoh().get_json(f"{way}/endpoints"))
    return list(found.get(config.mode, ()) if isinstance(found, dict) else found or ())


async def _port(endpoint: str, is_running: bool) -> ProbeResult:
    protocol, _, address = endpoint.partition("/")
    if protocol not in ("tcp", "tls", "ws"):
        return ProbeResult(ProbeVerdict.UNKNOWN, f"whether {endpoint} is free")
    return await port_result(address.partition("#")[0].partition("?")[0], is_running)


def _linked_to(config: ZenohConfig, endpoint: str, wire_bytes_max: int) -> list[ProbeResult]:
    """Blocks."""
    settings = {**config.settings, "mode": "client", "listen/endpoints": [], "connect/endpoints": [endpoint]}
    only = {"mode": "client", "listen": (), "connect": (endpoint,), "multicast_scouting": False, "settings": settings}
    alone = config.model_copy(update=only)
    try:
        with contextlib.ExitStack() as stack:
            session, other = (_opened(stack, alone, wire_bytes_max) for _ in range(2))
            found = [f"{one.whatami} {one.zid}" for one in session.info.transports()]
            ids = [str(one.zid) for one in session.info.transports()]
            version = _version(session, ids[0]) if ids else ""
            yielded = [ProbeResult(ProbeVerdict.OK, f"{endpoint}: linked to {', '.join(found)}{version}")]
            return [*yielded, _clock(session, other)]
    except zenoh.ZError as error:
        return [ProbeResult(ProbeVerdict.FAIL, translate(error, f"linking to {endpoint}").message)]
    except UStatusError as error:
        return [ProbeResult(ProbeVerdict.FAIL, error.message)]


def _opened(stack: contextlib.ExitStack, config: ZenohConfig, wire_bytes_max: int) -> zenoh.Session:
    session = linked(config, wire_bytes_max)
    stack.callback(session.close)
    return session


def _version(session: zenoh.Session, zid: str) -> str:
    """From the admin space, which a router may have; "" otherwise."""
    for reply in session.get(f"@/{zid}/router", timeout=ANSWER_S):
        with contextlib.suppress(ValueError, AttributeError):
            return f", version {json.loads(reply.ok.payload.to_string())['version']}"  # type: ignore[union-attr]
    return ""


def _clock(sender: zenoh.Session, receiver: zenoh.Session) -> ProbeResult:
    """A router stamps messages with its time."""
    key, stamps, came = f"up-streamer-check/{secrets.token_hex(8)}", list[float](), threading.Event()

    def on_sample(sample: zenoh.Sample) -> None:
        if sample.timestamp is not None:
            stamps.append(sample.timestamp.get_time().timestamp())
        came.set()

    receiver.declare_subscriber(key, Callback(on_sample, indirect=False))
    until = time.monotonic() + ANSWER_S
    while not came.is_set() and time.monotonic() < until:  # the subscription takes a moment to be known
        before_s = time.time()
        sender.put(key, b"")
        came.wait(ANSWER_S / 10)
    if not stamps:
        return ProbeResult(ProbeVerdict.UNKNOWN, "whether the clocks agree: nobody there stamps messages with its time")
    off_s = before_s - stamps[0]
    what = f"our clock is {abs(off_s):.1f} s {'behind' if off_s < 0 else 'ahead of'} that of the router"
    return ProbeResult(ProbeVerdict.FAIL if abs(off_s) > CLOCK_OFF_S else ProbeVerdict.OK, what)


def _scouted(config: ZenohConfig) -> ProbeResult:
    """Blocks."""
    scout = zenoh.scout(what="router|peer", config=config.to_zenoh())
    time.sleep(ANSWER_S)
    hellos = []
    while (hello := scout.try_recv()) is not None:
        hellos.append(f"{hello.whatami} {hello.zid}")
    scout.stop()  # type: ignore[no-untyped-call]
    if not hellos:
        return ProbeResult(ProbeVerdict.UNKNOWN, "whether somebody is there: nobody answers to scouting now")
    return ProbeResult(ProbeVerdict.OK, f"scouting finds {', '.join(dict.fromkeys(hellos))}")
