"""Following: a gateway that follows another one over links of different lengths, and the cost of a poll.

publisher -- Zenoh -- vehicle gateway == Zenoh or MQTT through campaigns.bench.far, or DDS == hub -- Zenoh -- subscriber
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from campaigns.bench import subject, wire
from campaigns.bench.costs.common import Figures, Setting, metrics, points
from campaigns.bench.lanes import RUN_TIMEOUT_S, Lane, new_address
from campaigns.bench.measure import calibrate
from campaigns.bench.networks import Address
from campaigns.bench.processes import BenchError, Child
from campaigns.bench.subject import Scene
from history.log.log import Log
from history.reading.client import HistoryClient
from history.service.service import HistoryService
from transports.local import LocalNetwork, LocalTransport
from transports.ports import free_port
from uprotocol import uri as uris
from uprotocol.communication import InMemoryRpcClient
from uprotocol.core.ustreamer import ids
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import CommandRequest, PollRequest
from uprotocol.transport import LocalUriProvider
from uprotocol.v1.uri_pb2 import UUri

WAYS: Final = ("pushed", "follow_push", "follow_poll")  # first way: the vehicle's gateway pushes, and nobody follows
ROUND_TRIPS_MS: Final = {
    "zenoh": (0, 200),
    "mqtt": (0, 200),
    "dds": (0,),
}  # by link; campaigns.bench.far delays only TCP
# further settings of the link: a broker's acknowledgement takes as long as the way there and back
MORE: Final[dict[str, dict[str, object]]] = {"mqtt": {"in_flight_max": 4_096}}
SHORT_S: Final = 3.0
PACE_PER_S: Final = 200  # rate at which delays are measured
TAKEN_OVER_S: Final = 30.0
LOOK_S: Final = 0.1
TOPICS: Final = (1, 10, 100, 1_000, 10_000)
CHANGES_MAX: Final = 1_000  # in one Command
NAMED_MAX: Final = 1_000  # topics that one poll may name


def road(setting: Setting) -> Figures:
    """Returns messages per second at full speed, and delays at a modest rate, by link, way and round trip."""

    def of(link: str, way: str) -> Figures:
        def at(round_trip_ms: int, directory: Path) -> Figures:
            with _road(link, way, round_trip_ms, directory) as one:
                seconds = setting.seconds_or(SHORT_S)
                paced = one.run(int(PACE_PER_S * seconds), PACE_PER_S)
                return {
                    "per_s": round(one.throughput(calibrate(one, seconds))),
                    "p50_ms": round(paced["p50_ms"], 1),
                    "p99_ms": round(paced["p99_ms"], 1),
                }

        setting.say(f"{link}, {way}")
        return points(ROUND_TRIPS_MS[link], replace(setting, directory=setting.directory / link / way), at)

    return {link: {way: of(link, way) for way in WAYS} for link in ROUND_TRIPS_MS}


@contextmanager
def _road(network: str, way: str, round_trip_ms: int, directory: Path) -> Iterator[Lane]:
    directory.mkdir(parents=True)
    source, out = (Address("zenoh", free_port()) for _ in range(2))
    with ExitStack() as stack:
        link = far = new_address(network, stack)
        if network != "dds":
            child = Child.module("far", "campaigns.bench.far", link.number, round_trip_ms / 2, log_dir=directory)
            far = Address(network, stack.enter_context(child).answer(RUN_TIMEOUT_S)["port"])
        admin = free_port()
        hub = _start(stack, directory, "hub", _hub(way, link, out, admin))
        _start(stack, directory, "vehicle", _vehicle(way, source, far))
        if way != "pushed":
            _wait_for(admin)
        subscriber, publisher = (
            stack.enter_context(
                Child.module(role, "campaigns.bench.load", role, address, 1, log_dir=directory)
            ).wait_for("ready")
            for role, address in (("subscriber", out), ("publisher", source))
        )
        made = Lane(way, hub, publisher, [subscriber], loses=False)
        made.join()
        yield made


def _start(stack: ExitStack, directory: Path, name: str, sections: list[str]) -> Child:
    folder = directory / name
    folder.mkdir()
    interest = subject.write_interest(folder / "interest.json", Scene())
    head = {"authority": _authority(name), "data_dir": str(folder / "data"), "log_level": "warning"}
    admin = [line for line in sections if line.startswith("admin")]
    texts = [
        "\n".join([subject.keys("[streamer]", head), *admin]),
        subject.keys("[usubscription]", {"static_file": str(interest)}),
        *(text for text in sections if text not in admin),
    ]
    config = folder / "up-streamer.toml"
    config.write_text("\n\n".join(texts) + "\n")
    child = Child.module(name, "streamer.commands.cli", "run", "--config", config, log_dir=directory)
    return stack.enter_context(child).wait_for(subject.READY_WORD)


def _authority(name: str) -> str:
    return wire.INGRESS_AUTHORITY if name == "vehicle" else wire.EGRESS_AUTHORITY


def _vehicle(way: str, source: Address, far: Address) -> list[str]:
    more: Mapping[str, object] = MORE.get(far.network, {})
    if far.network == "zenoh":
        more = {"mode": "client", "listen": [], "connect": [f"tcp/127.0.0.1:{far.number}"]}
    by = None if way == "pushed" else _service(wire.EGRESS_AUTHORITY)
    return [
        subject.endpoint("in", wire.INGRESS_AUTHORITY, source, "none", {}),
        subject.endpoint("link", wire.EGRESS_AUTHORITY, far, "none", more, by),
    ]


def _hub(way: str, link: Address, out: Address, admin: int) -> list[str]:
    follow = {"endpoint": "link", "service": _service(wire.INGRESS_AUTHORITY), "mode": way.removeprefix("follow_")}
    return [
        f'admin = "127.0.0.1:{admin}"',
        subject.endpoint("out", wire.EGRESS_AUTHORITY, out, "none", {}),
        subject.endpoint("link", wire.INGRESS_AUTHORITY, link, "none", MORE.get(link.network, {})),
        *([] if way == "pushed" else [subject.keys("[[follow]]", follow)]),
    ]


def _service(authority: str) -> str:
    """Returns the gateway's address as a configuration names it."""
    return uris.format(ids.at(authority)).removeprefix("up:")


def _wait_for(admin: int) -> None:
    """Waits until the hub has taken over. Raises BenchError."""
    deadline = time.monotonic() + TAKEN_OVER_S
    while time.monotonic() < deadline:
        if metrics(admin).get('up_streamer_followed{endpoint="link",state="handed_over"}') == 1:
            return
        time.sleep(LOOK_S)
    raise BenchError(f"the hub has not taken over within {TAKEN_OVER_S:.0f} s")


# -- bytes


def polls(setting: Setting) -> Figures:
    """Returns the bytes of a poll without news and its answer, by followed topics; and if the poll names them."""

    def at(topics: int, directory: Path) -> Figures:
        del directory
        return asyncio.run(_bytes_of_polls(topics))

    return points(TOPICS, setting, at)


async def _bytes_of_polls(topics: int) -> Figures:
    service, caller = LocalUriProvider("gateway", 4, 1), LocalUriProvider("cloud", 0x20, 1)
    network = LocalNetwork()
    async with AsyncExitStack() as stack:
        there = await stack.enter_async_context(LocalTransport.on(network, service))
        here = await stack.enter_async_context(LocalTransport.on(network, caller))
        log = await Log.open(None, name="bench")
        stack.push_async_callback(log.close)
        served = HistoryService(there, service, [log])
        await served.start()
        stack.push_async_callback(served.stop)
        rpc = await stack.enter_async_context(InMemoryRpcClient(here, caller))
        client = HistoryClient(rpc, service.get_source())
        named = [wire.topic(number) for number in range(topics)]
        commands = await _follow(client, named)
        return {
            "bytes": await _poll(client, PollRequest(follower=FOLLOWER)),
            "command_bytes": commands,
            "named_bytes": await _poll(client, PollRequest(topics=named[:NAMED_MAX])),
        }


FOLLOWER: Final = bytes(16)


async def _follow(client: HistoryClient, topics: list[UUri]) -> int:
    """Follows `topics` and returns the bytes that this took."""
    bytes = 0
    for number, first in enumerate(range(0, len(topics), CHANGES_MAX), 1):
        asked = CommandRequest(follower=FOLLOWER, number=number)
        for topic in topics[first : first + CHANGES_MAX]:
            asked.changes.add().follow.topic.CopyFrom(topic)
        bytes += asked.ByteSize() + (await client.command(asked)).ByteSize()
    return bytes


async def _poll(client: HistoryClient, asked: PollRequest) -> int:
    asked.positions.extend((await client.poll(asked)).next)
    return asked.ByteSize() + (await client.poll(asked)).ByteSize()
