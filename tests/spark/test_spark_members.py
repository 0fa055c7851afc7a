"""Gateways that a query finds by itself: they announce themselves to it (`followed_by`), or a hub names them."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from spark_ingest.client import HistorySession
from spark_ingest.offsets import LogLoss
from spark_ingest.options import Options
from spark_ingest.planner import Planner
from streamer.app import Streamer
from streamer.config import loads
from tests.conftest import MakeBroker
from tests.spark.test_spark_fleet import records_between
from tests.tiers import dds_domain, full
from tools.broker import Broker
from transports import plugin
from transports.local import LocalNetwork, LocalTransport
from transports.ports import free_port
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider

WAIT_S: Final = 40.0
READER: Final = "spark1"
_numbers = itertools.count()


@dataclass
class Depot:
    """A network with gateways and a query. `settings`: of a member of the network."""

    transport: str
    settings: dict[str, Any]
    folder: Path
    stack: AsyncExitStack
    number: int = field(default_factory=lambda: next(_numbers))
    gateways: dict[str, Streamer] = field(default_factory=dict)
    publishers: dict[str, LocalTransport] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    read: dict[str, Counter[int]] = field(default_factory=dict)

    async def start(self, authority: str, reader: str = READER) -> Streamer:
        """Start a gateway that announces itself to `reader`."""
        followed = f'followed_by = "//{reader}/4/1/0"' if authority != "hub" else ""
        behind = '"*.depot7"' if authority == "hub" else '"hub"'
        toml = f"""
[streamer]
authority = "{authority}"
data_dir = "{self.folder}/{authority}"
[history]
record = ["//{authority}/8001/1/8001"]
[[endpoint]]
name = "inside"
transport = "local"
authorities = ["{authority}"]
settings = {{ network = "{self.number}-{authority}" }}
[[endpoint]]
name = "uplink"
transport = "{self.transport}"
authorities = ["{READER}", {behind}]
usubscription = "none"
{followed}
[endpoint.settings]
{chr(10).join(f"{name} = {_toml(value)}" for name, value in self.settings.items())}
"""
        if authority == "hub":
            toml += '[[follow]]\nendpoint = "uplink"\nservice = "//*.depot7/4/1/0"\ntopics = ["//*/8001/1/8001"]\n'
        gateway = self.gateways[authority] = await Streamer.create(loads(toml))
        running = asyncio.create_task(gateway.run())

        async def stop() -> None:
            gateway.stop()
            await running

        self.stack.push_async_callback(stop)
        await asyncio.wait_for(gateway.assembly.ready.wait(), WAIT_S)
        network = LocalNetwork.named(f"{self.number}-{authority}")
        publisher = LocalTransport.on(network, LocalUriProvider(authority, 0x8001, 1))
        self.publishers[authority] = await self.stack.enter_async_context(publisher)
        return gateway

    async def publish(self, authority: str, count: int) -> None:
        topic = uris.uri(authority, 0x8001, 1, 0x8001)
        for _ in range(count):
            self.sent[authority] += 1
            message = UMessageBuilder.publish(topic).build()
            message.payload = b"%d" % self.sent[authority]
            await self.publishers[authority].send(message)

    async def query(self, **more: Any) -> Planner:
        options = {
            "transport": self.transport,
            "transport_config": self.settings,
            "local_authority": READER,
            "authorities": "*.depot7",
            "topics": "//*/8001/1/8001",
        }
        self.session = HistorySession(Options.model_validate(options | more))
        self.stack.push_async_callback(self.session.shut)
        planner = Planner(self.session, _raise)
        self.stack.push_async_callback(planner.fleet.close)
        self.offset = await planner.begin("query1")
        return planner

    async def until(self, planner: Planner, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                end = await planner.latest(self.offset, None, 0.1)
                try:
                    read = await records_between(self.session, self.offset, end)
                except UStatusError as error:  # the network is away again, or not back yet: Spark repeats the task
                    if not error.retryable:
                        raise
                    await asyncio.sleep(0.1)
                    continue
                for authority, numbers in read.items():
                    self.read.setdefault(authority, Counter()).update(numbers)
                self.offset = end
                await planner.commit(end)

    def has_all(self) -> bool:
        return all(len(self.read.get(one, ())) == count for one, count in self.sent.items())

    def assert_once(self) -> None:
        assert self.read == {one: Counter(range(1, count + 1)) for one, count in self.sent.items()}


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


def _raise(loss: LogLoss, authority: str) -> None:
    raise AssertionError(f"{authority}: {loss}")


@pytest.fixture(params=["zenoh", *(pytest.param(one, marks=full) for one in ("mqtt5", "off-vehicle", "dds"))])
async def depot(request: pytest.FixtureRequest, tmp_path: Path, make_broker: MakeBroker) -> AsyncIterator[Depot]:
    async with AsyncExitStack() as stack:
        transport = "mqtt5" if request.param == "off-vehicle" else request.param
        if transport == "zenoh":
            port = free_port()
            router = {"mode": "router", "listen": [f"tcp/127.0.0.1:{port}"]}
            await stack.enter_async_context(plugin.create("zenoh", router, LocalUriProvider("router", 0x8001, 1)))
            settings: dict[str, Any] = {"mode": "client", "connect": [f"tcp/127.0.0.1:{port}"]}
        elif transport == "dds":
            settings = {"domain_id": dds_domain(), "interface": "lo", "multicast": False, "peers": ["127.0.0.1"]}
        else:
            broker: Broker = make_broker()
            mode = "off-vehicle" if request.param == "off-vehicle" else "in-vehicle"
            settings = {"host": broker.host, "port": broker.port, "mode": mode}
        yield Depot(transport, settings, tmp_path, stack)


async def test_gateways_that_announce_themselves_are_read(depot: Depot) -> None:
    """Also one that starts later, without a loss; and naming the query in `followed_by` hands nothing over."""
    for name in ("car1.depot7", "car2.depot7"):
        await depot.start(name)
        await depot.publish(name, 5)
    planner = await depot.query()
    await depot.until(planner, lambda: depot.has_all())
    await depot.start("car3.depot7")
    for name in depot.gateways:
        await depot.publish(name, 5)
    await depot.until(planner, lambda: depot.has_all())
    depot.assert_once()
    assert not any("away" in lag for lag in planner.fleet.lag().values())
    for gateway in depot.gateways.values():
        assert not gateway.assembly.handovers.followed
        assert not any(pump.waits.plans.is_followed for pump in gateway.assembly.pumps)
        assert not [
            one for pump in gateway.assembly.pumps for one in pump.log.cursors.seqs() if one.startswith("followed:")
        ]


@full
@pytest.mark.parametrize("mode", ["in-vehicle", "off-vehicle"])
async def test_a_broker_that_restarts_costs_no_record(mode: str, tmp_path: Path, own_broker: Broker) -> None:
    async with AsyncExitStack() as stack:
        settings = {"host": own_broker.host, "port": own_broker.port, "mode": mode}
        depot = Depot("mqtt5", settings, tmp_path, stack)
        for name in ("car1.depot7", "car2.depot7"):
            await depot.start(name)
            await depot.publish(name, 5)
        planner = await depot.query(poll_timeout_ms=2_000)
        await depot.until(planner, lambda: depot.has_all())
        for _ in range(2):
            own_broker.kill()
            for name in depot.gateways:
                await depot.publish(name, 5)
            for _ in range(20):
                assert await planner.latest(depot.offset, None, 0.1) == depot.offset
            await own_broker.start_async()
            await depot.until(planner, lambda: depot.has_all())
        depot.assert_once()
        assert not any("away" in lag for lag in planner.fleet.lag().values())


async def test_a_hub_names_the_gateways_that_it_follows(depot: Depot) -> None:
    await depot.start("hub")
    for name in ("car1.depot7", "car2.depot7"):
        await depot.start(name, "hub")
        await depot.publish(name, 5)
    planner = await depot.query(hub="hub")
    await depot.until(planner, lambda: depot.has_all())
    depot.assert_once()
    assert set(planner.fleet.members) == {"car1.depot7", "car2.depot7"}
