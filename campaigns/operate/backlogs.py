"""Backlogs of vehicles that come back, over the files of examples/vehicle-cloud: is anything lost, and who is delayed?

    python -m campaigns.operate.backlogs --vehicles 1 --backlog 100000 --live 60000
    python -m campaigns.operate.backlogs --vehicles 20 --backlog 20000 --away 300

applications -- Zenoh -- vehicle gateways -- mosquitto -- cloud gateway -- Zenoh -- application
 numbered publishes        one each            restarted    restarted         counts what it hears

The gateways are real processes. While broker and cloud are away (with `--away 0`: while the endpoint `offboard` is
paused), each vehicle publishes its backlog. When they are back, each publishes `--live` more at once, and one more
vehicle publishes some messages each second: its delays are measured until everything has arrived.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from campaigns.chaos.judges import SUBSCRIBED, ZenohLink, subscribe, zenoh_caller
from campaigns.chaos.processes import ChaosError, Gateway
from campaigns.chaos.wire import PUBLISH, Message, Uri, new_id
from streamer.commands.demo.processes import Child, die_with_parent
from tools.broker import Broker
from transports.ports import free_port

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "vehicle-cloud"
ENTITY, RESOURCE, APP = 0x8001, 0x8001, 0x9001
LIVE_EVERY_S: Final = 0.1  # between two messages of the additional vehicle
SUBSCRIBED_S_MAX: Final = 120.0
LOOK_S: Final = 0.1  # between two looks at what was heard
QUIET_S_MAX: Final = 60.0  # nothing has arrived for so long: what is missing is lost
PAYLOAD: Final = struct.Struct(">HId")  # vehicle, number of the message, Unix time in seconds
PADDING: Final = b"x" * 200  # a small message of telemetry
EARLY_MAX: Final = 3  # after a restart of mosquitto 2.0.11, whose queue new messages may overtake: docs/mqtt5.md
COUNTED: Final = ("dropped_total", "retries_total", "held_")  # first parts of names of metrics
BUSY_LOOP: Final = "while True: pass"


@dataclass
class Heard:
    """What the cloud's application has heard: the numbers of each vehicle, and the delays of one of them."""

    live: int  # the additional vehicle
    numbers: dict[int, set[int]] = field(default_factory=dict)
    front: dict[int, int] = field(default_factory=dict)  # all numbers of the vehicle below it have been heard
    early: list[tuple[int, int, int]] = field(default_factory=list)  # (vehicle, number, the one that was due)
    delays_s: list[float] = field(default_factory=list)
    count: int = 0

    def take(self, payload: bytes) -> None:
        vehicle, number, sent_at = PAYLOAD.unpack_from(payload)
        numbers, front = self.numbers.setdefault(vehicle, set()), self.front.get(vehicle, 0)
        if number > front and number not in numbers:
            self.early.append((vehicle, number, front))
        numbers.add(number)
        while front in numbers:
            front += 1
        self.front[vehicle] = front
        self.count += 1
        if vehicle == self.live:
            self.delays_s.append(time.time() - sent_at)


class Hearer(ZenohLink):
    """A Zenoh client of the cloud that only reads payloads: parsing the rest would be slower than the gateway."""

    def __init__(self, port: int, heard: Heard) -> None:
        self._into = heard
        super().__init__(port, (f"up/*/{ENTITY:X}/0/1/*/**",))

    def _on_sample(self, sample: Any) -> None:
        self._into.take(sample.payload.to_bytes())


class Vehicle:
    """A gateway from vehicle.toml, and its application."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, f"vehicle{number + 1}"
        self.topic = Uri(self.name, ENTITY, 1, RESOURCE)
        self.sent = 0
        self.port, self.admin = free_port(), free_port()
        self.config = Path()
        self.link: ZenohLink | None = None

    def publish(self, count: int) -> None:
        assert self.link is not None
        for _ in range(count):
            payload = PAYLOAD.pack(self.number, self.sent, time.time()) + PADDING
            self.link.send(Message(new_id(), PUBLISH, self.topic, None, payload))
            self.sent += 1


class Stage:
    """The broker and all gateways."""

    def __init__(self, folder: Path, vehicles: int, stack: AsyncExitStack, *, paced: bool = True) -> None:
        """`paced`: False leaves the pace out of the vehicles' files."""
        self.folder, self._stack, self._paced = folder, stack, paced
        self.vehicles = [Vehicle(number) for number in range(vehicles + 1)]  # the last one only sends live
        self.cloud_port, self.cloud_admin = free_port(), free_port()
        self.broker = Broker(persistent=True, settings=broker_settings())
        self.cloud: Child | None = None
        self.heard = Heard(vehicles)

    async def start(self) -> None:
        await self.broker.start_async()
        self._stack.callback(self.broker.close)
        await self.start_cloud()
        for vehicle in self.vehicles:
            vehicle.config = self._write("vehicle", vehicle.name, vehicle.port, vehicle.admin)
            child = await self._run(vehicle.name, vehicle.config)
            self._stack.push_async_callback(child.stop)
            vehicle.link = ZenohLink(vehicle.port)
            self._stack.callback(vehicle.link.close)
        hearer = Hearer(self.cloud_port, self.heard)
        self._stack.callback(hearer.close)
        await asyncio.to_thread(self._subscribe)

    async def start_cloud(self) -> None:
        self.cloud = await self._run("cloud", self._write("cloud", "cloud", self.cloud_port, self.cloud_admin))
        self._stack.push_async_callback(self.cloud.stop)

    def _write(self, example: str, name: str, zenoh: int, admin: int) -> Path:
        """Writes the configuration of the example with other ports, folders and names."""
        text = (EXAMPLE / f"{example}.toml").read_text()
        text = text.replace('"vehicle1', f'"{name}') if example == "vehicle" else text
        text = re.sub(r'data_dir = "[^"]*"', f'data_dir = "{self.folder}/{name}-data"', text)
        text = re.sub(r"tcp/127.0.0.1:\d+", f"tcp/127.0.0.1:{zenoh}", text)
        text = re.sub(r'admin = "127.0.0.1:\d+"', f'admin = "127.0.0.1:{admin}"', text)
        text = text.replace("port = 1883", f"port = {self.broker.port}")
        if not self._paced:
            text = re.sub(r"(?m)^messages_per_s = .*\n", "", text)
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return path

    async def _run(self, name: str, config: Path) -> Child:
        child = await Child.start(name, "streamer.commands.cli", "run", "--config", str(config), "--json")
        await child.say("ready")
        return child

    def _subscribe(self) -> None:
        """Subscribes to the topic of each vehicle, and waits until each has agreed."""
        caller, link = zenoh_caller(self.cloud_port, Uri("backend", APP, 1, 0))
        deadline = time.monotonic() + SUBSCRIBED_S_MAX
        try:
            for vehicle in self.vehicles:
                while subscribe(caller, "backend", vehicle.topic) != SUBSCRIBED:
                    if time.monotonic() > deadline:
                        raise ChaosError(f"{vehicle.topic} is not subscribed to after {SUBSCRIBED_S_MAX:.0f} s")
                    time.sleep(0.1)
        finally:
            link.close()

    async def command(self, vehicle: Vehicle, *words: str) -> None:
        """Runs a command of up-streamer at a vehicle. Raises ChaosError if it fails."""
        argv = [sys.executable, "-m", "streamer.commands.cli", *words, "--config", str(vehicle.config)]
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said = (await process.communicate())[0].decode()
        if process.returncode:
            raise ChaosError(f"up-streamer {' '.join(words)}: {said}")

    async def until_heard(self, vehicles: list[Vehicle]) -> None:
        """Waits until the application has heard all messages of these vehicles, or nothing more arrives of them."""
        missing, since = -1, time.monotonic()
        while now_missing := sum(self.missing(vehicles).values()):
            if now_missing != missing:
                missing, since = now_missing, time.monotonic()
            elif time.monotonic() > since + QUIET_S_MAX:
                return
            await asyncio.sleep(LOOK_S)

    def missing(self, vehicles: list[Vehicle]) -> dict[str, int]:
        """Returns how many messages of each vehicle have not been heard, without those of which all were."""
        counts = {vehicle.name: vehicle.sent - len(self.heard.numbers.get(vehicle.number, ())) for vehicle in vehicles}
        return {name: count for name, count in counts.items() if count}

    def facts(self) -> dict[str, Any]:
        """Returns what each gateway says about itself: problems and notes, its counters of drops and refusals, and
        warnings of the cloud."""
        lines = [line for line in self.cloud.lines if "[warning" in line or "[error" in line] if self.cloud else []
        cloud = self._facts_of("cloud", self.cloud_admin) | {"log": lines}
        return {"cloud": cloud} | {
            vehicle.name: self._facts_of(vehicle.name, vehicle.admin) for vehicle in self.vehicles
        }

    def _facts_of(self, name: str, admin: int) -> dict[str, Any]:
        gateway = Gateway(name, self.folder, Path(), self.folder / f"{name}-data", admin, Counter(), {})
        ready = json.loads(gateway.get("/readyz") or "{}")
        counted = {name: count for name, count in gateway.metrics().items() if name.startswith(COUNTED) and count}
        return {"problems": ready.get("problems"), "notes": ready.get("notes"), "counted": counted}


def broker_settings() -> list[str]:
    """Returns the settings of the example's mosquitto.conf, without its port and its user."""
    lines = (EXAMPLE / "mosquitto.conf").read_text().splitlines()
    ours = ("listener", "allow_anonymous", "persistence ", "user")
    return [line for line in lines if line and not line.startswith(("#", *ours))]


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keeps `count` processors busy with other work."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP], preexec_fn=die_with_parent) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def live(vehicle: Vehicle) -> None:
    """Publishes a message of the additional vehicle now and then, until cancelled."""
    while True:
        vehicle.publish(1)
        await asyncio.sleep(LIVE_EVERY_S)


async def _to_all(vehicles: list[Vehicle], count: int) -> None:
    if count:
        await asyncio.gather(*(asyncio.to_thread(vehicle.publish, count) for vehicle in vehicles))


async def run(
    folder: Path,
    *,
    vehicles: int,
    backlog: int,
    live_flood: int = 0,
    away_s: float = 0.0,
    busy: int = 0,
    paced: bool = True,
) -> dict[str, Any]:
    """Returns the figures of one run."""
    async with AsyncExitStack() as stack:
        stage = Stage(folder, vehicles, stack, paced=paced)
        await stage.start()
        late, additional = stage.vehicles[:-1], stage.vehicles[-1]
        stack.enter_context(busy_loops(busy))
        if away_s:
            assert stage.cloud is not None
            await stage.cloud.stop()
            await asyncio.to_thread(stage.broker.stop)
            began = time.monotonic()
            await _to_all(late, backlog)
            await asyncio.sleep(max(0.0, began + away_s - time.monotonic()))
            await stage.broker.start_async()
            await stage.start_cloud()
        else:
            for vehicle in late:
                await stage.command(vehicle, "pause", "--endpoint", "offboard")
            await _to_all(late, backlog)
            for vehicle in late:
                await stage.command(vehicle, "resume", "--endpoint", "offboard")
        began = time.monotonic()
        sending = asyncio.create_task(live(additional))
        await _to_all(late, live_flood)
        await stage.until_heard(late)
        took_s = time.monotonic() - began
        sending.cancel()
        await stage.until_heard(stage.vehicles)
        lost, heard, delays = stage.missing(stage.vehicles), stage.heard, sorted(stage.heard.delays_s)
        different = sum(map(len, heard.numbers.values()))
        return {
            "sent": sum(vehicle.sent for vehicle in stage.vehicles),
            "heard": different,
            "lost": lost,
            "doubled": heard.count - different,
            "early": len(heard.early),
            "first_early": heard.early[:10],
            "seconds": round(took_s, 1),
            "live_messages": len(delays),
            "live_delay_s_p50": round(delays[len(delays) // 2], 3) if delays else None,
            "live_delay_s_max": round(delays[-1], 3) if delays else None,
            "gateways": await asyncio.to_thread(stage.facts),
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.operate.backlogs")
    parser.add_argument("--vehicles", type=int, default=20, help="with a backlog (default: %(default)s)")
    parser.add_argument("--backlog", type=int, default=20_000, help="messages of each (default: %(default)s)")
    parser.add_argument("--live", type=int, default=0, help="further messages of each, at once, when all is back")
    parser.add_argument("--away", type=float, default=0.0, help="seconds without broker and cloud; 0: paused instead")
    parser.add_argument("--busy", type=int, default=2, help="loops that keep processors busy (default: %(default)s)")
    parser.add_argument("--unpaced", action="store_true", help="leave the pace out of the vehicles' files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="up-streamer-backlogs-") as folder:
        figures = asyncio.run(
            run(
                Path(folder),
                vehicles=arguments.vehicles,
                backlog=arguments.backlog,
                live_flood=arguments.live,
                away_s=arguments.away,
                busy=arguments.busy,
                paced=not arguments.unpaced,
            )
        )
    print(json.dumps(figures))
    return 1 if figures["lost"] or figures["early"] > EARLY_MAX else 0


if __name__ == "__main__":
    sys.exit(main())
