"""A registered listener over Zenoh: the linked sessions know it, so the next message to it arrives."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest

from transports.conformance import Sink
from transports.ports import free_port
from transports.zenoh import ZenohConfig, ZenohTransport
from transports.zenoh import transport as zenoh_transport
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder
from uprotocol.transport import LocalUriProvider

CALLS: Final = 150
DEADLINE_S: Final = 20.0
CALLER: Final = uris.parse("//alpha/10AB/3/0")
CALLERS: Final = uris.parse("//alpha/FFFFFFFF/FF/0")
KNOWN_S_MAX: Final = 0.2


@pytest.fixture
def busy() -> Iterator[None]:
    """Other processes that take the processors: what one thread does is seen by another one later."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def end(authority: str, **settings: Any) -> ZenohTransport:
    return ZenohTransport(
        ZenohConfig.model_validate({"connect_timeout_ms": 20_000} | settings), LocalUriProvider(authority, 0x10AB, 3)
    )


async def linked(transport: ZenohTransport) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not transport.connected:  # noqa: ASYNC110 - the fixture of the session has no event for this
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("hub", "application"), [("router", "peer"), ("router", "client"), ("peer", "peer")])
@pytest.mark.usefixtures("busy")
async def test_a_request_arrives_that_is_sent_once_its_method_is_registered(hub: str, application: str) -> None:
    at = f"tcp/127.0.0.1:{free_port()}"
    async with end("alpha", mode=hub, listen=[at]) as caller, end("beta", mode=application, connect=[at]) as callee:
        await linked(caller)
        await linked(callee)
        for number in range(1, CALLS + 1):
            method, arrived = uris.uri("beta", 0x10AB, 3, number), Sink(DEADLINE_S)
            await callee.register_listener(CALLERS, arrived, method)
            await caller.send(UMessageBuilder.request(CALLER, method, 60_000).build())
            await arrived.expect(1)


async def test_a_peer_that_reads_nothing_delays_a_listener_by_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zenoh_transport, "KNOWN_S_MAX", KNOWN_S_MAX)
    at = f"tcp/127.0.0.1:{free_port()}"
    program = (
        "import time, zenoh; session = zenoh.open(zenoh.Config.from_json5("
        f"""'{{mode: "peer", connect: {{endpoints: ["{at}"]}}, scouting: {{multicast: {{enabled: false}}}}}}')); """
        "session.declare_queryable('@uprotocol/flush/' + str(session.info.zid()), lambda query: time.sleep(600)); "
        "print('open', flush=True); time.sleep(600)"
    )
    async with end("alpha", listen=[at]) as alpha:
        peer = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
        try:
            assert peer.stdout is not None
            await peer.stdout.readline()
            await linked(alpha)
            waited_s = 0.0
            async with asyncio.timeout(DEADLINE_S):
                for resource in range(0x8001, 0xFFFE):  # the declaration of its queryable may come after the link
                    began = asyncio.get_running_loop().time()
                    await alpha.register_listener(uris.parse(f"//beta/10AB/3/{resource:X}"), Sink(DEADLINE_S))
                    waited_s = asyncio.get_running_loop().time() - began
                    if waited_s > KNOWN_S_MAX / 2:
                        break
            assert KNOWN_S_MAX / 2 < waited_s < DEADLINE_S
        finally:
            peer.kill()
            await peer.wait()
