"""The demo: subscribed topics of a drive cross three networks, Spark stores all topics, and everything is counted.

    mcu1 (DDS) ------+                                 +--> cloud application (MQTT 5): only what it subscribed to
                     +--> gateway: one up-streamer ----+
    vehicle1 (Zenoh) +        log on disk              +--> Spark (Zenoh, pull from the history) --> Parquet --> plot

Each box is a process, except the cloud application, which runs and counts in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from streamer.commands.options import DemoOptions, Network
from streamer.demo import drive as drives
from streamer.demo.mosquitto import Broker
from streamer.demo.processes import START_TIMEOUT_S, Child
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


@dataclass
class DemoResult:
    """All counts of one run."""

    published: Counter[str] = field(default_factory=Counter)  # by topic
    wanted: set[str] = field(default_factory=set)  # topics
    received: Counter[str] = field(default_factory=Counter)  # by topic, distinct ids
    cloud_disorder: int = 0
    parquet: Counter[str] = field(default_factory=Counter)  # by topic, distinct ids
    rows: Counter[str] = field(default_factory=Counter)  # by topic, with duplicates
    forwarded: Counter[str] = field(default_factory=Counter)  # by topic, all on the cloud's network
    dropped: dict[str, int] = field(default_factory=dict)
    problems: int = 0
    seconds: float = 0.0
    plot: Path | None = None

    @property
    def subscribed(self) -> int:
        return sum(count for topic, count in self.published.items() if topic in self.wanted)

    def gaps_of(self, topic: str) -> int:
        """Returns how many messages are missing in Parquet and, if subscribed, in the cloud."""
        published = self.published[topic]
        in_cloud = max(0, published - self.received[topic]) if topic in self.wanted else 0
        return max(0, published - self.parquet[topic]) + in_cloud

    def duplicates_of(self, topic: str) -> int:
        """Returns how many messages came again, in Parquet or the cloud."""
        in_cloud = self.forwarded[topic] - self.received[topic] if topic in self.wanted else 0
        return self.rows[topic] - self.parquet[topic] + in_cloud

    @property
    def unsubscribed(self) -> int:
        """Messages that reached the cloud's network without a subscription to their topic."""
        return sum(count for topic, count in self.forwarded.items() if topic not in self.wanted)

    def as_dict(self) -> dict[str, int | float]:
        return {
            "published": self.published.total(),
            "subscribed": self.subscribed,
            "cloud_received": self.received.total(),
            "parquet_rows": self.rows.total(),
            "gaps": sum(map(self.gaps_of, self.published)),
            "duplicates": sum(map(self.duplicates_of, self.published | self.rows | self.forwarded)),
            "unsubscribed_forwarded": self.unsubscribed,
            "seconds": round(self.seconds, 1),
        }

    @property
    def adds_up(self) -> bool:
        counts = self.as_dict()
        return (
            counts["published"] > 0
            and counts["cloud_received"] == counts["subscribed"]
            and counts["parquet_rows"] == counts["published"]
            and not (counts["gaps"] or counts["duplicates"] or self.unsubscribed or self.cloud_disorder)
        )


# The run


class Demo:
    """One run of the demo, in a temporary folder."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self._options, self._console = options, console
        self._folder = Path(tempfile.mkdtemp(prefix="up-streamer-demo-"))
        self._stack = contextlib.AsyncExitStack()
        self._outcome = DemoResult()
        self._children: list[Child] = []
        dds = {"domain_id": 1 + os.getpid() % 200, "interface": "lo", "multicast": False, "peers": ["127.0.0.1"]}
        zenoh, cloud = [f"tcp/127.0.0.1:{free_port()}"], [f"tcp/127.0.0.1:{free_port()}"]
        self._on_dds = Network("dds", drives.MCU, dds)
        self._on_zenoh = Network("zenoh", drives.VEHICLE, {"mode": "peer", "connect": zenoh})
        self._cloud = Network("zenoh", CLOUD, {"mode": "client", "connect": cloud}, CLOUD_APP)  # the gateway is router
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
        try:
            self._options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise invalid(
                f"the folder for the plot, {self._options.out}, can't be made: {error.strerror}; say another with --out"
            ) from None
        drive = drives.load(self._options.data, self._options.seed, self._options.seconds)
        self._outcome.problems = drive.problems_total
        for line in drive.report(10):
            self._console.print(f"{self._options.data}: {line}", markup=False, style="yellow")
        started = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self._console) as progress:
            stage = progress.add_task("starting networks and services", total=6)
            gateway = await self._start_services(progress, stage)
            signals = {signal.path: signal for signal in drive.signals}
            topics = [signals[path].topic for path in WANTED if path in signals]
            self._outcome.wanted = {uris.format(topic) for topic in topics}
            client = await self._subscribe(topics)
            progress.update(
                stage, advance=1, description=f"the cloud subscribed to {len(topics)} of {len(signals)} topics"
            )
            ingest = await self._start_spark()
            progress.update(stage, completed=6)
            await self._replay(drive, progress)
            await self._settle(ingest, progress)
            self._read_gateway(await asyncio.to_thread(_get, gateway["admin_port"], "/metrics"))
            await client.close()
            await ingest.stop()
        self._read_parquet()
        self._outcome.seconds = time.monotonic() - started
        from spark_ingest.plot import plot

        self._outcome.plot = self._options.out / "demo.png"
        await asyncio.to_thread(plot, self._parquet, self._outcome.plot)

    async def _start_broker(self) -> None:
        try:
            broker = await self._stack.enter_async_context(Broker(self._folder))
        except UStatusError as error:
            why = f"{error.message}; --without-mqtt goes on without (make demo ARGS=--without-mqtt)"
            raise UStatusError(error.code, why) from None
        settings = {"host": broker.host, "port": broker.port, "mode": "in-vehicle"}
        self._cloud = Network("mqtt5", CLOUD, settings, CLOUD_APP)

    async def _child(self, name: str, module: str, command: str, *more: str) -> Child:
        child = await Child.start(name, module, *command.split(), *more)
        self._children.append(child)
        return child

    async def _stop_children(self) -> None:
        """Stop all at once: each ends cleanly without the others."""
        await asyncio.gather(*(child.stop() for child in self._children))

    async def _start_services(self, progress: Progress, stage: TaskID) -> dict[str, Any]:
        """Start the gateway, to which others connect; then a uSubscription for each authority that it doesn't serve."""
        config = self._folder / "gateway.toml"
        config.write_text(self._gateway_config())
        progress.update(stage, advance=1, description="starting the gateway")
        gateway = await self._child("the gateway", CLI, "run --json --config", str(config))
        services = []
        for network in (self._on_dds, self._cloud):
            store = str(self._folder / f"usubscription-{network.authority}.db")
            name, command = f"the uSubscription of {network.authority}", "usubscription --json --store"
            services.append(await self._child(name, CLI, command, store, *_as_options(network)))
        progress.update(stage, advance=1, description="starting uSubscription services")
        for child in services:
            await child.say("ready")
        ready = await gateway.say("ready")
        progress.update(stage, advance=1, description="subscribing")
        await _until_ready(ready["admin_port"])
        return ready

    def _gateway_config(self) -> str:
        listen = {"mode": "peer", "listen": self._on_zenoh.settings["connect"]}
        cloud = self._cloud.settings
        if self._options.without_mqtt:
            cloud = {"mode": "router", "listen": cloud["connect"]}
        return f"""
[streamer]
authority = "{drives.VEHICLE}"
data_dir = "{self._folder / "gateway"}"
admin = "127.0.0.1:0"
log_level = "warning"

[[endpoint]]
name = "vehicle"
transport = "zenoh"
authorities = ["{drives.VEHICLE}"]
settings = {_toml(listen)}

[[endpoint]]
name = "mcu"
transport = "dds"
authorities = ["{drives.MCU}"]
settings = {_toml(self._on_dds.settings)}

[[endpoint]]
name = "cloud"
transport = "{self._cloud.transport}"
authorities = ["{CLOUD}"]
settings = {_toml(cloud)}

[history]
record = ["//{drives.VEHICLE}/{drives.PUBLISHER_UE_ID:X}/FF/FFFF", "//{drives.MCU}/{drives.PUBLISHER_UE_ID:X}/FF/FFFF"]
"""

    # The cloud application

    async def _subscribe(self, topics: Sequence[UUri]) -> USubscriptionClient:
        """Listen to all topics, to count unwanted messages; subscribe to `topics`; wait until all are SUBSCRIBED."""
        transport = await self._stack.enter_async_context(self._cloud.open())
        for authority in (drives.VEHICLE, drives.MCU):
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
        topics = ",".join(
            f"//{authority}/{drives.PUBLISHER_UE_ID:X}/{drives.PUBLISHER_VERSION}/FFFF"
            for authority in (drives.VEHICLE, drives.MCU)
        )
        config.write_text(
            f"""
[source]
transport = "zenoh"
transport_config = {_toml(self._on_zenoh.settings)}
authority = "{drives.VEHICLE}"
local_authority = "{drives.VEHICLE}"
topics = "{topics}"
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

    # The drive

    async def _replay(self, drive: drives.Drive, progress: Progress) -> None:
        """Run both publishers at once, each with its share of the rate, so that their times stay aligned."""
        start_ms = uuids.now_ms()
        options = self._options
        simulated = ["--seed", str(options.seed), "--seconds", str(options.seconds)]
        source = ["--data", str(options.data)] if options.data else simulated
        shares = Counter(sample.signal.publisher for sample in drive.samples(start_ms))
        replaying = progress.add_task("replaying the drive", total=shares.total())
        children = []
        for network in (self._on_dds, self._on_zenoh):
            share = shares[network.authority]
            if not share:
                continue
            command = f"replay --json --start-ms {start_ms} --rate {options.rate * share / shares.total():.3f}"
            name = f"the publisher of {network.authority}"
            children.append(await self._child(name, CLI, command, *source, *_as_options(network)))

        async def follow(child: Child) -> None:
            said: dict[str, Any] = {"published": 0}
            while not said.get("done"):
                before, said = said["published"], await child.say("published")
                progress.update(replaying, advance=said["published"] - before)
            self._outcome.published.update(said["topics"])

        await asyncio.gather(*map(follow, children))

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

    def _read_gateway(self, metrics: str) -> None:
        for labels, value in re.findall(r"^up_streamer_dropped_total\{(.*?)\} ([0-9.e+]+)$", metrics, re.MULTILINE):
            given = dict(re.findall(r'(\w+)="(.*?)"', labels))
            self._outcome.dropped[f"{given['endpoint']}: {given['reason']}"] = int(float(value))


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
    """Returns a command's options for `network`."""
    settings = [word for key, value in network.settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    return ["--transport", network.transport, "--authority", network.authority, *settings]


def _toml(settings: dict[str, Any]) -> str:
    """Returns an inline table. JSON strings, numbers, booleans and arrays are TOML, too."""
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items()) + " }"


def show(outcome: DemoResult, console: Console) -> None:
    table = Table(title="what crossed the gateway to the cloud", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("network", "published", "forwarded", "received", "Parquet", "gaps", "duplicates"):
        table.add_column(column, justify="left" if column == "network" else "right", no_wrap=True)
    networks = {"DDS: mcu1": drives.MCU, "Zenoh: vehicle1": drives.VEHICLE, "together": ""}
    for name, authority in networks.items():
        topics = [topic for topic in outcome.published if topic.startswith(f"up://{authority}")]
        counts = (outcome.published, outcome.forwarded, outcome.received, outcome.rows)
        sums = [sum(count[topic] for topic in topics) for count in counts]
        sums += [sum(map(outcome.gaps_of, topics)), sum(map(outcome.duplicates_of, topics))]
        table.add_row(name, *(f"{number:,}" for number in sums), end_section=name.startswith("Zenoh"))
    console.print(table)
    console.print(
        f"subscribed to {len(outcome.wanted)} of {len(outcome.published)} topics; forwarded though not subscribed "
        f"{outcome.unsubscribed}, out of order {outcome.cloud_disorder}, unreadable cells {outcome.problems}"
    )
    if outcome.dropped:
        drops = ", ".join(f"{where} {count}" for where, count in sorted(outcome.dropped.items()))
        console.print(f"dropped at the gateway: {drops}")
    if outcome.plot is not None:
        console.print(f"plot: {outcome.plot}")
