"""The demo: subscribed topics of four vehicles cross three networks, Spark stores all topics, and all is counted.

    mcu.vin1 (DDS), vin1 (Zenoh) --> gateway vin1 --+                +--> application: only what it subscribed to
    mcu.vin2,       vin2         --> gateway vin2 --+-- cloud (MQTT)-+
    vin3, vin4                       log on disk                     +--> Spark: one query over all four histories
                                                                               --> Parquet --> picture
A vehicle's computers are one process, each gateway is another one. The application runs and counts in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from streamer.commands.demo import drive as drives
from streamer.commands.demo import vehicle
from streamer.commands.demo.counts import DemoResult
from streamer.commands.demo.mosquitto import Broker
from streamer.commands.demo.processes import START_TIMEOUT_S, Child
from streamer.commands.demo.vehicle import Vehicle, toml
from streamer.commands.options import DemoOptions, Network
from streamer.data_dir import SUBSCRIPTIONS_FILE
from transports.ports import free_port
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.status import UStatusError, invalid
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri
from usubscription_client import Status
from usubscription_client.client import USubscriptionClient

CLI: Final = "streamer.commands.cli"
CLOUD: Final = "cloud"
CLOUD_APP: Final = 0x9001
WANTED: Final = (  # the cloud application subscribes to these; all others stay in the vehicle
    "Vehicle.OBD.Speed",
    "Vehicle.OBD.EngineSpeed",
    "Vehicle.OBD.CoolantTemperature",
    "Vehicle.OBD.FuelLevel",
    "Vehicle.OBD.ThrottlePosition",
    "Vehicle.Powertrain.Transmission.CurrentGear",
)
SETTLE_TIMEOUT_S: Final = 120.0  # until all messages have arrived
POLL_S: Final = 0.1  # between two looks whether something has happened
TRIGGER_MS: Final = 1_000  # between two micro-batches of Spark


class Demo:
    """One run of the demo, in a temporary folder."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self._options, self._console = options, console
        self._folder = Path(tempfile.mkdtemp(prefix="up-streamer-demo-"))
        self._stack = contextlib.AsyncExitStack()
        self._outcome = DemoResult()
        self._children: list[Child] = []
        at = [f"tcp/127.0.0.1:{free_port()}"]  # without MQTT; the uSubscription of the cloud is the router
        self._router = Network("zenoh", CLOUD, {"mode": "router", "listen": at})
        self._cloud = Network("zenoh", CLOUD, {"mode": "client", "connect": at}, CLOUD_APP)
        self._parquet = self._folder / "parquet"
        self._ids: dict[str, set[tuple[int, int]]] = {}
        self._last: dict[str, tuple[int, int]] = {}

    async def run(self) -> DemoResult:
        try:
            async with self._stack:
                if not self._options.without_mqtt:
                    await self._start_broker()
                self._stack.push_async_callback(self._stop_children)
                await self._perform()
        finally:
            if self._options.keep:
                self._console.print(f"data and configurations are in {self._folder}")
            else:
                shutil.rmtree(self._folder, ignore_errors=True)
        return self._outcome

    async def _perform(self) -> None:
        options, outcome = self._options, self._outcome
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise invalid(
                f"the folder for the plot, {options.out}, can't be made: {error.strerror}; say another with --out"
            ) from None
        domain = 1 + os.getpid() * vehicle.SIMULATED % 200
        outcome.vehicles = vehicle.vehicles(options.data, options.seed, options.seconds, domain, iter(free_port, None))
        made = {one: one.drive() for one in outcome.vehicles}
        for one, drive in made.items():
            outcome.problems += drive.problems_total
            for line in drive.report(10):
                self._console.print(f"{one.data}: {line}", markup=False, style="yellow")
        started = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self._console) as progress:
            stage = progress.add_task("starting networks and services", total=5)
            gateways = await self._start_services(progress, stage)
            ingest = await self._start_spark()
            signals = [signal for drive in made.values() for signal in drive.signals]
            topics = [signal.topic for signal in signals if signal.path in WANTED]
            outcome.wanted = {uris.format(topic) for topic in topics}
            client = await self._subscribe(topics)
            what = f"the cloud subscribed to {len(topics)} of {len(signals)} topics"
            progress.update(stage, completed=5, description=what)
            await self._replay(made, progress)
            await self._settle(ingest, progress)
            for one, port in gateways.items():
                self._count_drops(one, await asyncio.to_thread(_get, port, "/metrics"))
            await client.close()
            await ingest.stop()
        self._read_parquet()
        outcome.seconds = time.monotonic() - started
        from streamer.commands.demo.picture import draw

        outcome.plot = options.out / "demo.png"
        titles = {one.name: one.title for one in outcome.vehicles}
        await asyncio.to_thread(draw, self._parquet, titles, outcome.plot)

    async def _start_broker(self) -> None:
        try:
            broker = await self._stack.enter_async_context(Broker(self._folder))
        except UStatusError as error:
            why = f"{error.message}; --without-mqtt goes on without (make demo ARGS=--without-mqtt)"
            raise UStatusError(error.code, why) from None
        settings = {"host": broker.host, "port": broker.port, "mode": "in-vehicle"}
        self._router = self._cloud = Network("mqtt5", CLOUD, settings, CLOUD_APP)

    async def _child(self, name: str, module: str, *arguments: str) -> Child:
        child = await Child.start(name, module, *arguments)
        self._children.append(child)
        return child

    async def _stop_children(self) -> None:
        """Stop all at once: each ends cleanly without the others."""
        await asyncio.gather(*(child.stop() for child in self._children))

    async def _start_services(self, progress: Progress, stage: TaskID) -> dict[Vehicle, int]:
        """Start the uSubscription of the cloud and all gateways. Returns the admin port of each gateway when it is
        ready."""
        progress.update(stage, advance=1, description="starting gateways and uSubscription services")
        store = str(self._folder / SUBSCRIPTIONS_FILE)
        command = ("usubscription", "--json", "--store", store, *_as_options(self._router))
        service = await self._child("the uSubscription of the cloud", CLI, *command)
        gateways = {}
        for one in self._outcome.vehicles:
            config = self._folder / f"{one.name}.toml"
            config.write_text(one.gateway(self._folder / one.name, self._cloud))
            name = f"the gateway of {one.name}"
            gateways[one] = await self._child(name, CLI, "run", "--json", "--config", str(config))
        progress.update(stage, advance=1, description="waiting for gateways and services")
        await service.say("ready")
        ports = {one: (await gateway.say("ready"))["admin_port"] for one, gateway in gateways.items()}
        progress.update(stage, advance=1, description="subscribing")
        for port in ports.values():
            await _until_ready(port)
        return ports

    # The cloud application

    async def _subscribe(self, topics: Sequence[UUri]) -> USubscriptionClient:
        """Listen to all topics, to count unwanted messages; subscribe to `topics`; wait until all are SUBSCRIBED."""
        transport = await self._stack.enter_async_context(self._cloud.open())
        for one in self._outcome.vehicles:
            for authority in (one.name, one.controller):
                await transport.register_listener(uris.pattern(authority, drives.PUBLISHER_UE_ID), self)
        client = USubscriptionClient(transport, self._cloud.local)
        await client.open()
        self._stack.push_async_callback(client.close)
        pending = {uris.format(topic) for topic in topics}

        def note(topic: UUri, status: Status) -> None:
            if status == Status.SUBSCRIBED:
                pending.discard(uris.format(topic))

        client.on_change(lambda change: note(change.topic, change.status))
        for topic in topics:
            note(topic, await client.subscribe(topic))
        deadline = time.monotonic() + START_TIMEOUT_S
        while pending:
            if time.monotonic() > deadline:
                why = f"not SUBSCRIBED after {START_TIMEOUT_S:.0f} s: {', '.join(sorted(pending))}"
                raise UStatusError(UCode.DEADLINE_EXCEEDED, why)
            await asyncio.sleep(POLL_S)
        return client

    def on_receive(self, message: UMessage) -> None:
        topic, id = uris.format(message.attributes.source), (message.attributes.id.msb, message.attributes.id.lsb)
        self._outcome.forwarded[topic] += 1
        seen = self._ids.setdefault(topic, set())
        if topic not in self._outcome.wanted or id in seen:
            return
        if id < self._last.get(topic, (0, 0)):
            self._outcome.cloud_disorder += 1
        self._last[topic] = id
        seen.add(id)
        self._outcome.received[topic] += 1

    # Spark

    async def _start_spark(self) -> Child:
        config = self._folder / "ingest.toml"
        config.write_text(
            f"""
[source]
transport = "{self._cloud.transport}"
transport_config = {toml(self._cloud.settings)}
authorities = {json.dumps([one.name for one in self._outcome.vehicles])}
local_authority = "{CLOUD}"
topics = "//*/{drives.PUBLISHER_UE_ID:X}/{drives.PUBLISHER_VERSION}/FFFF"
starting_offsets = "earliest"

[sink]
path = "{self._parquet}"
checkpoint = "{self._folder / "checkpoint"}"

[trigger]
processing_time_ms = {TRIGGER_MS}
"""
        )
        self._parquet.mkdir(parents=True, exist_ok=True)
        return await self._child("the Spark job", "spark_ingest", "--config", str(config))

    def _read_parquet(self) -> None:
        """Count the rows that Spark has committed, and the distinct ids, by topic."""
        from spark_ingest.parquet import read

        table = read(self._parquet, ["topic", "message_id"])
        topics, ids = table.column("topic").to_pylist(), table.column("message_id").to_pylist()
        self._outcome.rows = Counter(topics)
        self._outcome.parquet = Counter(topic for topic, _ in set(zip(topics, ids, strict=True)))

    # The drives

    async def _replay(self, made: dict[Vehicle, drives.Drive], progress: Progress) -> None:
        """Run all publishers at once, each with its share of the rate, so that they end at the same time."""
        start_ms = uuids.now_ms()
        sizes = {one: sum(1 for _ in drive.samples(0)) for one, drive in made.items()}
        total = sum(sizes.values())
        replaying = progress.add_task("replaying the drives", total=total)

        async def publish(one: Vehicle, size: int) -> None:
            rate = self._options.rate * size / total
            task = {"vehicle": dataclasses.asdict(one), "start_ms": start_ms, "rate": rate}
            child = await self._child(f"the computers of {one.name}", vehicle.__name__, json.dumps(task))
            said: dict[str, Any] = {"published": 0}
            while not said.get("done"):
                before, said = said["published"], await child.say("published")
                progress.update(replaying, advance=said["published"] - before)
            self._outcome.published.update(said["topics"])

        await asyncio.gather(*(publish(one, size) for one, size in sizes.items() if size))

    async def _settle(self, ingest: Child, progress: Progress) -> None:
        """Wait for all messages, at most SETTLE_TIMEOUT_S. Raises ABORTED if the Spark job has ended."""
        outcome = self._outcome
        cloud = progress.add_task("received in the cloud", total=outcome.subscribed)
        parquet = progress.add_task("rows in Parquet", total=outcome.published.total())
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        rows = 0
        while time.monotonic() < deadline:
            rows = await asyncio.to_thread(self._count_rows)
            progress.update(cloud, completed=outcome.received.total())
            progress.update(parquet, completed=rows)
            if outcome.received.total() >= outcome.subscribed and rows >= outcome.published.total():
                return
            ingest.require_running()
            await asyncio.sleep(0.5)
        self._console.print("not everything has arrived in time", style="red")

    def _count_rows(self) -> int:
        from spark_ingest.parquet import read

        try:
            return int(read(self._parquet, ["seq"]).num_rows)
        except UStatusError:
            return 0

    def _count_drops(self, gateway: Vehicle, metrics: str) -> None:
        for labels, value in re.findall(r"^up_streamer_dropped_total\{(.*?)\} ([0-9.e+]+)$", metrics, re.MULTILINE):
            given = dict(re.findall(r'(\w+)="(.*?)"', labels))
            self._outcome.dropped[f"{gateway.name}, {given['endpoint']}: {given['reason']}"] = int(float(value))


def _get(port: int, path: str) -> str:
    """Returns the admin port's answer, with any status."""
    try:
        answer = urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return str(answer.read(), "utf-8")


async def _until_ready(port: int) -> None:
    """Wait until every uSubscription has answered the gateway. Raises DEADLINE_EXCEEDED with what is missing."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while missing := json.loads(await asyncio.to_thread(_get, port, "/readyz"))["problems"]:
        if time.monotonic() > deadline:
            why = f"the gateway is not ready after {START_TIMEOUT_S:.0f} s: {'; '.join(missing)}"
            raise UStatusError(UCode.DEADLINE_EXCEEDED, why)
        await asyncio.sleep(POLL_S)


def _as_options(network: Network) -> list[str]:
    settings = [word for key, value in network.settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    return ["--transport", network.transport, "--authority", network.authority, *settings]
