"""A vehicle of the demo: two computers publish the samples of its drive, a gateway keeps them and joins the cloud.

mcu.vin1 (DDS) --+
                 +--> gateway vin1 --> cloud          python -m streamer.demo.vehicle JSON: both computers;
vin1 (Zenoh) ----+    log on disk                     JSON lines: {"published": N} ..., at the end with "topics"
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streamer.commands.demo import drive as drives
from streamer.commands.options import Network
from uprotocol.status import UStatusError, invalid

SIMULATED: Final = 4  # vehicles, if no drives are given
SIMULATED_S: Final = 600  # length of a simulated drive
VEHICLE_PROGRESS_S: Final = 0.25  # between two lines of progress


@dataclass(frozen=True, eq=False)
class Vehicle:
    """`dds` and `zenoh`: settings of its networks, for its computers."""

    name: str  # authority of the gateway and of the vehicle computer
    data: str | None  # file of the recorded drive
    seed: int  # of the simulated one
    seconds: int | None  # of the drive, at most
    dds: dict[str, Any]
    zenoh: dict[str, Any]

    @property
    def title(self) -> str:
        return f"{self.name}: {Path(self.data).name if self.data else f'simulated, seed {self.seed}'}"

    @property
    def controller(self) -> str:
        """Authority of the engine's controller."""
        return f"mcu.{self.name}"

    @property
    def networks(self) -> tuple[Network, Network]:
        return Network("dds", self.controller, self.dds), Network("zenoh", self.name, self.zenoh)

    def drive(self) -> drives.Drive:
        """Its drive, with the authorities of this vehicle. Raises INVALID_ARGUMENT for an unreadable file."""
        try:
            made = drives.load(Path(self.data) if self.data else None, self.seed, self.seconds or SIMULATED_S)
        except UStatusError as error:
            raise UStatusError(error.code, f"the drive of {self.title}: {error.message}") from None
        names = {drives.MCU: self.controller, drives.VEHICLE: self.name}
        signals = (dataclasses.replace(signal, publisher=names[signal.publisher]) for signal in made.signals)
        return dataclasses.replace(made, signals=tuple(signals), rows=made.rows[: self.seconds])

    def gateway(self, data_dir: Path, cloud: Network) -> str:
        """The configuration of its gateway; `cloud` is the cloud's network as the gateway joins it."""
        recorded = [f"//{one}/{drives.PUBLISHER_UE_ID:X}/FF/FFFF" for one in (self.controller, self.name)]
        return f"""
[streamer]
authority = "{self.name}"
data_dir = "{data_dir}"
admin = "127.0.0.1:0"
log_level = "warning"

[[endpoint]]
name = "vehicle"
transport = "zenoh"
authorities = ["{self.name}"]
settings = {toml({"mode": "peer", "listen": self.zenoh["connect"]})}

[[endpoint]]
name = "controller"
transport = "dds"
authorities = ["{self.controller}"]
usubscription = "none"
settings = {toml(self.dds)}

[[endpoint]]
name = "cloud"
transport = "{cloud.transport}"
authorities = ["{cloud.authority}"]
settings = {toml(cloud.settings)}

[usubscription]
answers_for = ["{self.controller}"]

[history]
record = {json.dumps(recorded)}
"""

    async def publish(self, start_ms: int, rate: float) -> None:
        """Publish the whole drive, `rate` samples per second. Both computers at once, each with its share of the rate,
        so that their times stay aligned."""
        drive, counts, shown = self.drive(), Counter[str](), 0.0
        shares = Counter(sample.signal.publisher for sample in drive.samples(start_ms))

        async def replay(network: Network) -> Counter[str]:
            def progress(published: int) -> None:
                nonlocal shown
                counts[network.authority] = published
                if time.monotonic() - shown > VEHICLE_PROGRESS_S:
                    shown = time.monotonic()
                    print(json.dumps({"published": counts.total()}), flush=True)

            samples = (one for one in drive.samples(start_ms) if one.signal.publisher == network.authority)
            share = rate * shares[network.authority] / shares.total()
            async with network.open() as transport:
                return await drives.replay(transport, samples, rate=share, on_progress=progress)

        topics = await asyncio.gather(*(replay(one) for one in self.networks if shares[one.authority]))
        total = sum(topics, Counter[str]())
        print(json.dumps({"done": True, "published": total.total(), "topics": total}), flush=True)


def vehicles(
    data: Path | None, seed: int, seconds: int | None, dds_domain: int, zenoh_ports: Iterator[int]
) -> list[Vehicle]:
    """One for each CSV file of the folder `data`, one for the file `data`, or SIMULATED ones with seeds from `seed` on.
    Raises INVALID_ARGUMENT for a folder without CSV files."""
    files: list[str | None] = [str(data)] if data is not None else [None] * SIMULATED
    if data is not None and data.is_dir():
        files = [str(file) for file in sorted(data.glob("*.csv"))]
        if not files:
            raise invalid(f"expected drives as CSV files in the folder {data}, found none")
    loopback = {"interface": "lo", "multicast": False, "peers": ["127.0.0.1"]}
    return [
        Vehicle(
            f"vin{number + 1}",
            file,
            seed + number,
            seconds,
            {"domain_id": dds_domain + number, **loopback},
            {"mode": "peer", "connect": [f"tcp/127.0.0.1:{port}"]},
        )
        for number, (file, port) in enumerate(zip(files, zenoh_ports, strict=False))
    ]


def toml(settings: dict[str, Any]) -> str:
    """Returns an inline table. JSON strings, numbers, booleans and arrays are TOML, too."""
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items()) + " }"


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    asyncio.run(Vehicle(**given["vehicle"]).publish(given["start_ms"], given["rate"]))
