"""The vehicles of the demo: their drives, their gateways' configurations; what is counted, and the picture."""

from __future__ import annotations

import itertools
import tomllib
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from spark_ingest import parquet
from streamer import config as configs
from streamer.commands.demo import drive as drives
from streamer.commands.demo import picture, vehicle
from streamer.commands.demo.counts import DemoResult
from streamer.commands.demo.vehicle import Vehicle
from streamer.commands.options import Network
from uprotocol import uri as uris
from uprotocol.status import UStatusError

CSV = "VEHICLE_SPEED (),ENGINE_RPM (),\n" + "10,900,\n" * 40


def made(data: Path | None, seconds: int | None = None) -> list[Vehicle]:
    return vehicle.vehicles(data, 7, seconds, 100, itertools.count(20_000))


def test_each_file_of_a_folder_is_a_vehicle(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", "notes.txt"):
        (tmp_path / name).write_text(CSV)
    assert [one.title for one in made(tmp_path)] == ["vin1: a.csv", "vin2: b.csv"]
    assert [one.title for one in made(tmp_path / "b.csv")] == ["vin1: b.csv"]
    assert [one.title for one in made(None)] == [f"vin{n}: simulated, seed {6 + n}" for n in (1, 2, 3, 4)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UStatusError, match=r"expected drives as CSV files in the folder .*empty, found none"):
        made(tmp_path / "empty")


def test_vehicles_share_no_network_and_no_authority() -> None:
    several = made(None)
    assert len({one.dds["domain_id"] for one in several}) == len({str(one.zenoh) for one in several}) == 4
    assert len({signal.publisher for one in several for signal in one.drive().signals}) == 8


@pytest.mark.parametrize(("seconds", "rows"), [(None, 40), (12, 12), (100, 40)])
def test_a_drive_has_the_authorities_of_its_vehicle(tmp_path: Path, seconds: int | None, rows: int) -> None:
    (tmp_path / "drive.csv").write_text(CSV)
    (one,) = made(tmp_path, seconds)
    drive = one.drive()
    assert [uris.format(signal.topic) for signal in drive.signals] == [
        f"up://vin1/8001/1/{drives.SIGNALS['Vehicle.OBD.Speed'].resource:X}",
        f"up://mcu.vin1/8001/1/{drives.SIGNALS['Vehicle.OBD.EngineSpeed'].resource:X}",
    ]
    assert len(drive.rows) == rows


def test_a_gateway_has_a_valid_configuration(tmp_path: Path) -> None:
    file = tmp_path / "vin1.toml"
    file.write_text(made(None)[0].gateway(tmp_path / "data", Network("mqtt5", "cloud", {"port": 1883})))
    config = configs.load(file)
    assert config.streamer.authority == "vin1"
    assert [endpoint.authorities for endpoint in config.endpoint] == [["vin1"], ["mcu.vin1"], ["cloud"]]
    assert tomllib.loads(file.read_text())["endpoint"][2]["settings"] == {"port": 1883}


def test_what_is_missing_or_comes_twice_does_not_add_up() -> None:
    speed, rpm = "up://vin1/8001/1/8003", "up://mcu.vin1/8001/1/8002"
    (one, *_) = made(None)
    published = Counter({speed: 5, rpm: 3})

    def result(rows: dict[str, int], forwarded: dict[str, int], received: int) -> DemoResult:
        return DemoResult(
            vehicles=[one],
            published=published,
            wanted={speed},
            received=Counter({speed: received}),
            parquet=Counter({topic: min(count, published[topic]) for topic, count in rows.items()}),
            rows=Counter(rows),
            forwarded=Counter(forwarded),
        )

    right = result({speed: 5, rpm: 3}, {speed: 5}, 5)
    assert right.adds_up
    assert right.as_dict() | {"seconds": 0} == {
        "vehicles": 1,
        "published": 8,
        "subscribed": 5,
        "cloud_received": 5,
        "parquet_rows": 8,
        "gaps": 0,
        "duplicates": 0,
        "unsubscribed_forwarded": 0,
        "seconds": 0,
    }
    for wrong, key in (
        (result({speed: 5, rpm: 2}, {speed: 5}, 5), "gaps"),
        (result({speed: 5, rpm: 3}, {speed: 5}, 4), "gaps"),
        (result({speed: 5, rpm: 4}, {speed: 5}, 5), "duplicates"),
        (result({speed: 5, rpm: 3}, {speed: 6}, 5), "duplicates"),
        (result({speed: 5, rpm: 3}, {speed: 5, rpm: 1}, 5), "unsubscribed_forwarded"),
    ):
        assert not wrong.adds_up
        assert wrong.as_dict()[key] == 1
    with (console := Console(width=100)).capture() as shown:
        right.show(console)
    assert "vin1" in shown.get()
    assert "together" in shown.get()


def test_the_picture_has_a_panel_for_each_vehicle(tmp_path: Path) -> None:
    file = tmp_path / "authority=vin1" / "date=2023-11-14" / "part.parquet"
    file.parent.mkdir(parents=True)
    times = pa.array([1_700_000_000_000 + 1_000 * second for second in range(60)], pa.timestamp("ms", "UTC"))
    rows = {"path": [picture.SPEED] * 60, "ts": times.cast(pa.timestamp("us", "UTC")), "value_double": [50.0] * 60}
    pq.write_table(pa.table(rows), file)
    (tmp_path / parquet.METADATA).mkdir()
    (tmp_path / parquet.METADATA / "0").write_text(f'v1\n{{"path": "{file.as_uri()}", "action": "add"}}')
    png = tmp_path / "demo.png"
    for titles in ({"vin1": "vin1: one"}, {"vin1": "vin1", "vin2": "vin2: no speed", "vin3": "vin3"}):
        picture.draw(tmp_path, titles, png)
        assert png.read_bytes().startswith(b"\x89PNG")
