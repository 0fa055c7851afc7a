"""A Zenoh client that stops reading: it is named, and cut off before its healthy neighbours lose anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest
import structlog

from tests.transports.zenoh_readers import DEADLINE_S, Reader
from transports.conformance.messages import publish, topic
from transports.ports import free_port
from transports.zenoh import ZenohConfig, ZenohTransport
from transports.zenoh.sender import Unread
from transports.zenoh.transport import StallWatch
from uprotocol.status import OK
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.ucode_pb2 import UCode

LEASE: Final = "transport/link/tx/lease"
HUB: Final = {"stall_ms_max": 2_000, "settings": {LEASE: 4_000}}  # as the defaults are to each other, but faster
# a lease that ends while a put waits: the case that costs others. The queue has to be full before it ends
CLIENT: Final = {"stall_ms_max": 700, "settings": {LEASE: 1_500}}
CUT: Final = "a peer that read nothing is cut off: what was sent to it last is lost"

Network = Callable[..., Awaitable[tuple[ZenohTransport, list[Reader]]]]


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    """A router with `clients` clients, which expect `messages` messages."""
    async with AsyncExitStack() as stack:

        async def make(
            clients: int, messages: int, hub: dict[str, Any], client: dict[str, Any]
        ) -> tuple[ZenohTransport, list[Reader]]:
            at = [f"tcp/127.0.0.1:{free_port()}"]
            small = [f"{at[0]}#so_sndbuf=65536"]  # else the kernel holds as much as is sent here
            config = ZenohConfig.model_validate({"mode": "router", "listen": small} | hub)
            transport = await stack.enter_async_context(ZenohTransport(config, LocalUriProvider("hub", 0x10AB, 3)))
            readers = [await Reader.start(stack, at[0], topic("hub"), messages, client) for _ in range(clients)]
            for reader in readers:
                await reader.says("listening")
            async with asyncio.timeout(DEADLINE_S):
                while len(transport._peers) < clients:  # noqa: ASYNC110 - Zenoh's thread says so
                    await asyncio.sleep(0.01)
            return transport, readers

        yield make


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transports.zenoh.transport.SENDER_LOOK_S", 0.05)
    monkeypatch.setattr("transports.zenoh.transport.REPORTED_AFTER_S", 0.1)
    monkeypatch.setattr("transports.zenoh.transport.ANSWER_S_MAX", 0.3)


def batches(count: int) -> list[list[Any]]:
    """Messages of 4 KiB, numbered."""
    messages = [publish(b"%08d" % number + bytes(4_088), topic("hub")) for number in range(count)]
    return [messages[first : first + 512] for first in range(0, count, 512)]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - it is Zenoh's thread, or another process
            await asyncio.sleep(0.01)


async def _one_of_two_stops(network: Network, hub_settings: dict[str, Any], client_settings: dict[str, Any]) -> None:
    hub, (sick, well) = await network(2, 1_800, hub_settings, client_settings)
    await hub.send_batch([publish(b"%08d" % 0, topic("hub"))])  # the first batch after a link waits for listeners
    peers = set(hub._peers)
    sick.stop()
    with structlog.testing.capture_logs() as logs:

        async def send() -> None:
            for batch in batches(1_800):
                assert set(map(id, await hub.send_batch(batch))) == {id(OK)}

        sending = asyncio.ensure_future(send())
        await until(lambda: [one for one in hub.troubles if "sending waits for the peer" in one] or sending.done())
        assert not sending.done(), "what is sent does not fill what a link holds"
        (trouble,) = hub.troubles
        await sending
        await well.says("all")
        await until(lambda: not hub.troubles)
        await until(lambda: len(hub._peers) == 1)
        await until(lambda: [line for line in logs if line["event"] == CUT])
    (named,) = [peer for peer in peers if peer in trouble]
    assert named not in hub._peers
    events = {line["event"]: line for line in logs}
    assert "reads nothing" in events["sending waits for a peer that reads nothing"]["trouble"]
    assert events[CUT]["peer"] == named


@pytest.mark.usefixtures("looks_often")
async def test_a_client_that_stops_reading_costs_its_neighbour_nothing(network: Network) -> None:
    await _one_of_two_stops(network, HUB, CLIENT)


@pytest.mark.full
async def test_the_defaults_keep_a_neighbour_whole(network: Network) -> None:
    await _one_of_two_stops(network, {}, {})


@pytest.mark.full
@pytest.mark.usefixtures("looks_often")
async def test_two_clients_that_stop_reading_cost_the_third_nothing(network: Network) -> None:
    hub, (*sick, well) = await network(3, 1_800, HUB, CLIENT)
    await hub.send_batch([publish(b"%08d" % 0, topic("hub"))])
    for reader in sick:
        reader.stop()
    for batch in batches(1_800):
        await hub.send_batch(batch)
    await well.says("all")


@pytest.mark.usefixtures("looks_often")
async def test_what_the_only_peer_has_not_read_is_sent_again(network: Network) -> None:
    """Zenoh accepts messages while it closes a link, and drops them."""
    hub, (sick,) = await network(1, 1, HUB, {})
    await hub.send_batch([publish(b"%08d" % 0, topic("hub"))])
    sick.stop()
    for batch in batches(4_096):
        codes = {status.code for status in await hub.send_batch(batch)}
        if codes != {UCode.OK}:
            break
    assert codes == {UCode.UNAVAILABLE}
    assert not hub.connected
    sick.go_on()
    await until(lambda: hub.connected)
    assert {status.code for status in await hub.send_batch(batches(1)[0])} == {UCode.OK}


class _SlowThread:
    """A sender whose thread begins late and then stalls."""

    position: tuple[int, int] | None = None

    def silent(self, peers: Any, timeout_s: float) -> Unread:
        return Unread(list(peers), [])

    def addresses(self) -> dict[str, str]:
        return {"a": "tcp/127.0.0.1:1"}


@pytest.mark.usefixtures("looks_often")
async def test_a_batch_that_the_thread_begins_late_is_watched_too() -> None:
    sender = _SlowThread()
    sends, cut = {"the batch"}, asyncio.Event()
    watch = StallWatch(sender, "hub", 0.2, {"a": True}, sends, lambda peer: cut.set(), lambda peer: None)  # type: ignore[arg-type]
    watch.watch()
    began = asyncio.get_running_loop().time()
    await asyncio.sleep(0.12)  # two looks find nothing that is being put
    sender.position = 1, 0
    await until(lambda: watch.trouble)
    await until(lambda: watch.has_cut(began))
    sender.position = None
    sends.clear()
    await asyncio.wait_for(cut.wait(), DEADLINE_S)
    assert watch.has_cut(began)
    watch.close()


@pytest.mark.usefixtures("looks_often")
async def test_a_look_that_comes_late_hides_no_cut() -> None:
    """The loop was busy: at the first check the put has waited for longer than SENDER_LOOK_S."""
    sender = _SlowThread()
    watch = StallWatch(sender, "hub", 0.2, {"a": True}, {"the batch"}, lambda peer: None, lambda peer: None)  # type: ignore[arg-type]
    began = asyncio.get_running_loop().time()
    watch.watch()
    sender.position = 1, 0
    time.sleep(0.12)  # noqa: ASYNC251 - that is the point
    assert not watch.has_cut(began)
    await asyncio.sleep(0.09)
    assert watch.has_cut(began)
    watch.close()
