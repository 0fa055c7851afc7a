"""A Zenoh node that listens with TLS, and whose certificate is renewed while it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import TestAuthority
from transports.conformance import Sink
from transports.conformance.messages import publish, topic
from transports.ports import free_port
from transports.zenoh import ZenohConfig, ZenohTransport
from transports.zenoh import transport as transports
from transports.zenoh.transport import Renewals
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage

DEADLINE_S = 30.0


def end(authority: str, **settings: Any) -> ZenohTransport:
    retry = {"connect/retry": {"period_init_ms": 50, "period_max_ms": 200, "period_increase_factor": 2}}
    settings = {"connect_timeout_ms": 20_000, "settings": retry} | settings
    return ZenohTransport(ZenohConfig.model_validate(settings), LocalUriProvider(authority, 0x10AB, 3))


class Node:
    """The hub, and the two authorities that issue its certificates in turn. Clients trust one or both."""

    def __init__(self, folder: Path) -> None:
        self.first, self.second = TestAuthority(folder, "first"), TestAuthority(folder, "second")
        self.both = folder / "both.pem"
        self.both.write_bytes(self.first.ca.read_bytes() + self.second.ca.read_bytes())
        self.first.issue("hub")
        self.at = [f"tls/localhost:{free_port()}"]
        files = {"certificate": folder / "hub.pem", "private_key": folder / "hub.key"}
        self.hub = end("hub", mode="router", listen=self.at, tls={"root_ca": self.both, **files})
        self.connections: list[bool] = []
        self._changed = asyncio.Event()
        self.hub.on_connection(self._on_connection)

    def _on_connection(self, connected: bool) -> None:
        self.connections.append(connected)
        self._changed.set()

    async def until(self, connections: list[bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.connections != connections:
                self._changed.clear()
                await self._changed.wait()

    def client(self, name: str, ca: Path) -> ZenohTransport:
        return end(name, mode="client", connect=self.at, tls={"root_ca": ca})


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(transports, "RENEWAL_LOOK_S", 0.05)
    return Node(tmp_path)


async def test_a_renewed_certificate_is_shown_and_nothing_is_lost(node: Node) -> None:
    hears, heard_by_hub = Sink(DEADLINE_S), Sink(DEADLINE_S)
    async with node.hub as hub, node.client("vehicle", node.both) as vehicle:
        await hub.register_listener(topic("vehicle"), heard_by_hub)
        await vehicle.register_listener(topic("hub"), hears)
        await node.until([True])
        node.second.issue("hub")
        sent, refused = [], 0
        while node.connections != [True, False, True] or not refused:  # as egress does: again until it is taken
            message = publish(source=topic("hub"))
            async with asyncio.timeout(DEADLINE_S):
                while (await hub.send_batch([message]))[0].code != UCode.OK:
                    refused += 1
                    await asyncio.sleep(0.005)
            sent.append(message.attributes.id.SerializeToString())
        async with asyncio.timeout(DEADLINE_S):
            while set(sent) - {one.attributes.id.SerializeToString() for one in hears.messages}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with node.client("late", node.second.ca) as late:  # which trusts the new one alone
            await late.send_batch([publish(source=topic("late"))])
        await vehicle.send_batch([publish(source=topic("vehicle"))])
        await heard_by_hub.expect(1)
        assert hub.troubles == []


async def test_who_connects_reads_its_files_at_each_link(node: Node, tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(node.first.ca.read_bytes())
    async with node.hub, node.client("vehicle", trusted):
        await node.until([True])
        trusted.write_bytes(node.second.ca.read_bytes())
        node.second.issue("hub")
        await node.until([True, False, True])


async def test_a_pair_that_can_not_be_loaded_does_not_touch_the_session(node: Node, tmp_path: Path) -> None:
    async with node.hub as hub, node.client("vehicle", node.both):
        await node.until([True])
        (tmp_path / "hub.pem").write_bytes((tmp_path / "hub.pem").read_bytes()[:200])
        async with asyncio.timeout(DEADLINE_S):
            while not hub.troubles:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        assert "stays in use" in hub.troubles[0]
        assert node.connections == [True]


async def test_what_has_arrived_and_is_not_taken_yet_outlives_a_renewal(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For instance with a full disk: Zenoh acknowledges nothing, so no sender would send them again."""
    monkeypatch.setattr(transports, "FLUSH_S_MAX", 0.2)
    may_take, taken = asyncio.Event(), []

    class Holding:
        async def on_receive_batch(self, messages: list[UMessage]) -> None:
            await may_take.wait()
            taken.extend(messages)

    async with node.hub as hub, node.client("vehicle", node.both) as vehicle:
        await hub.register_listener(topic("vehicle"), Holding())
        await node.until([True])
        arrivals = hub._receiver._publishes
        async with asyncio.timeout(DEADLINE_S):
            while arrivals.undelivered < 100:  # others learn of a listener a moment later
                await vehicle.send_batch([publish(source=topic("vehicle")) for _ in range(2_000)])
                await asyncio.sleep(0.02)
        waits = arrivals.waiting
        node.second.issue("hub")
        await node.until([True, False, True])
        may_take.set()
        async with asyncio.timeout(DEADLINE_S):
            while len(taken) < waits:  # noqa: ASYNC110 - the listener is awaited by the transport
                await asyncio.sleep(0.01)


async def test_close_ends_a_reopening(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """No session is left that would hold the port."""
    reopening = asyncio.Event()
    real = Renewals._reopen

    async def reopen(self: Renewals) -> None:
        asyncio.get_running_loop().call_soon(reopening.set)
        await real(self)

    monkeypatch.setattr(Renewals, "_reopen", reopen)
    await node.hub.open()
    node.second.issue("hub")
    await asyncio.wait_for(reopening.wait(), DEADLINE_S)
    await node.hub.close()
    async with node.hub, node.client("vehicle", node.second.ca):
        await node.until([True])


@pytest.mark.parametrize(
    ("settings", "followed"),
    [
        ({"listen": ["tls/localhost:1"], "tls": {}}, True),
        ({"listen": ["tcp/localhost:1"], "tls": {}}, False),
        ({"connect": ["tls/localhost:1"], "tls": {}}, False),
        ({"listen": ["tls/localhost:1"]}, False),
    ],
)
def test_only_who_listens_is_opened_again(settings: dict[str, Any], followed: bool) -> None:
    """A connecting session reads its files at each link."""
    assert (ZenohConfig.model_validate(settings).listening_files() is not None) is followed
