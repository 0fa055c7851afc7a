"""Drives: every readable value of a file is kept, unreadable ones are reported; a simulated drive is consistent."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.commands.demo import drive
from tests.tiers import seeds
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1 import ustreamer_pb2
from uprotocol.message import UPayload, validate
from uprotocol.status import UStatusError

HEADER = "ENGINE_RUN_TINE (),ENGINE_RPM (),VEHICLE_SPEED ()\r\n"
RECORDINGS = Path(os.environ.get("UP_STREAMER_RECORDINGS", Path(__file__).parents[3] / "shared/data/obd"))


def paths(made: drive.Drive) -> list[str]:
    return [signal.path for signal in made.signals]


def test_reads_a_recording_with_brackets_blanks_and_trailing_commas() -> None:
    made = drive.read("\ufeff" + HEADER + "0.000000, 850.5, 12.000000,\r\n1.000000, 900.0, 13.000000,\r\n\r\n")
    assert paths(made) == ["Vehicle.OBD.RunTime", "Vehicle.OBD.EngineSpeed", "Vehicle.OBD.Speed"]
    assert made.rows == [(0.0, 850.5, 12.0), (1.0, 900.0, 13.0)]
    assert made.problems == ()
    samples = list(made.samples(5_000))
    assert [(sample.signal.path, sample.time_ms, sample.value) for sample in samples[2:4]] == [
        ("Vehicle.OBD.Speed", 5_000, 12.0),
        ("Vehicle.OBD.RunTime", 6_000, 1.0),
    ]
    assert sum(len(row) - row.count(None) for row in made.rows) == len(samples) == 6


def test_keeps_the_readable_values_of_a_bad_row_and_tells_the_rest() -> None:
    made = drive.read(HEADER + '1,x,3,\n2,nan\n"broken,1,2\n1e999,,7,8,9\nfoo,bar,baz,\n4,5,6,\n')
    assert made.rows == [
        (1.0, None, 3.0),
        (2.0, None, None),
        (None, None, None),
        (None, None, 7.0),
        (None, None, None),
        (4.0, 5.0, 6.0),
    ]
    problems = [str(problem) for problem in made.problems]
    assert "row 2: Vehicle.OBD.EngineSpeed is not a number: 'x'" in problems
    assert "row 3: Vehicle.OBD.EngineSpeed is not a number: 'nan'" in problems
    assert "row 3: Vehicle.OBD.Speed is empty" in problems
    assert "row 5: has 5 cells, the header names 3: the rest is left out" in problems
    assert "row 6: has no readable value: skipped" in problems
    assert not any(text.startswith(("row 1:", "row 7:")) for text in problems)
    # a lost row is a lost second, not a shift of all others
    assert [sample.time_ms for sample in made.samples(0)][-1] == 5_000


def test_tells_a_bounded_number_of_problems_and_counts_all() -> None:
    made = drive.read(HEADER + "x,1,2\n" * 500)
    assert len(made.problems) == drive.PROBLEMS_KEPT_MAX
    assert made.problems_total == 500


def test_unknown_columns_get_a_path_and_a_topic_of_their_own() -> None:
    made = drive.read(
        "OIL_PRESSURE (kPa),Vehicle.Cabin.DoorCount,gear "
        "mode,LOCKED,OIL_PRESSURE,()\n3,4,sport,true,1,\n4,4,eco,False,1,\n"
    )
    assert paths(made) == [
        "Vehicle.OBD.OilPressure",
        "Vehicle.Cabin.DoorCount",
        "Vehicle.OBD.GearMode",
        "Vehicle.OBD.Locked",
        "Vehicle.OBD.OilPressure2",
    ]
    assert made.rows[1] == (4.0, 4.0, "eco", False, 1.0)
    assert len({signal.resource for signal in made.signals}) == 5
    alone = drive.read("gear mode\nsport\n")
    assert alone.signals[0] == made.signals[2]  # the columns around it don't matter


@pytest.mark.parametrize("text", ["", "\n\n", "1,2,3\n4,5,6\n", "VEHICLE_SPEED\n", "(),[],,\n1,2,3\n"])
def test_refuses_what_is_no_drive(text: str) -> None:
    with pytest.raises(UStatusError, match="expected"):
        drive.read(text)


@given(st.text(max_size=300), st.text(alphabet='0123456789.,"\n -e', max_size=300))
def test_any_text_is_read_or_refused(header: str, body: str) -> None:
    try:
        made = drive.read(header + "\n" + body)
    except UStatusError:
        return
    for sample in made.samples(0):
        validate(drive.message(sample))


def test_a_third_of_the_recorded_and_of_the_simulated_signals_is_the_engine_controllers() -> None:
    recorded = drive.read(",".join(name for _, _, names in drive._TABLE for name in names[:1]) + "\n" + "1," * 27)
    for made in (recorded, drive.simulate(1, 10)):
        assert 3 * sum(signal.publisher == drive.MCU for signal in made.signals) == len(made.signals)
        assert {signal.publisher for signal in made.signals} == {drive.MCU, drive.VEHICLE}
        assert all(uris.is_topic(signal.topic) for signal in made.signals)


def test_message_is_a_valid_publish_that_says_all() -> None:
    values: tuple[drive.SignalValue, ...] = (12.5, "ON", True, False)
    for value in values:
        sample = drive.SignalSample(drive.SIGNALS["Vehicle.OBD.Speed"], 1_700_000_000_123, value)
        made = drive.message(sample)
        validate(made)
        assert uris.format(made.attributes.source) == "up://vehicle1/8001/1/8002"
        payload = UPayload.of(made).unpack(ustreamer_pb2.Sample)
        assert payload.path == "Vehicle.OBD.Speed"
        assert payload.time.ToMilliseconds() == 1_700_000_000_123
        said = getattr(payload, payload.WhichOneof("value") or "")
        assert (type(said), said) == (type(value), value)


def test_simulated_drive_comes_from_its_seed() -> None:
    assert drive.simulate(5, 300).rows == drive.simulate(5, 300).rows
    assert drive.simulate(5, 300).rows != drive.simulate(6, 300).rows
    assert drive.simulate(5, 400).rows[:300] == drive.simulate(5, 300).rows


@pytest.mark.parametrize("seed", seeds(5, quick=1))
def test_simulated_drive_is_consistent(seed: int) -> None:
    made = drive.simulate(seed, 1_800)
    column = {path: [row[number] for row in made.rows] for number, path in enumerate(paths(made))}
    speeds, rpms, gears = (
        column[f"Vehicle.{name}"] for name in ("OBD.Speed", "OBD.EngineSpeed", "Powertrain.Transmission.CurrentGear")
    )
    running, fuel = column["Vehicle.Powertrain.CombustionEngine.IsRunning"], column["Vehicle.OBD.FuelLevel"]
    assert all(abs(b - a) < 12 for a, b in itertools.pairwise(speeds))  # km/h in one second
    assert 40 < max(speeds) < 140
    assert all((gear == 0) == (not moving) for gear, moving in zip(gears, column["Vehicle.IsMoving"], strict=True))
    assert all(rpm > 600 if on else rpm == 0 for rpm, on in zip(rpms, running, strict=True))
    assert max(rpms) < 6_200
    assert all(b <= a for a, b in itertools.pairwise(fuel))
    assert fuel[-1] < fuel[0]
    assert column["Vehicle.OBD.CoolantTemperature"][0] < 40 < 80 < column["Vehicle.OBD.CoolantTemperature"][-1] < 100
    assert list(dict.fromkeys(column["Vehicle.LowVoltageSystemState"])) == ["ACC", "START", "ON"]
    for speed, rpm, gear in zip(speeds, rpms, gears, strict=True):
        if gear >= 3:
            assert rpm / speed == pytest.approx(drive._RPM_PER_MPS[int(gear)] / 3.6, rel=0.08)


@pytest.mark.skipif(
    not RECORDINGS.is_dir(), reason="the recordings are not here; UP_STREAMER_RECORDINGS names their folder"
)
@pytest.mark.parametrize(("name", "rows"), [("idle9", 733), ("drive1", 2_709), ("live1", 3_853), ("long2", 7_516)])
def test_real_recordings_are_read_whole(name: str, rows: int) -> None:
    made = drive.read((RECORDINGS / f"{name}.csv").read_bytes().decode())
    assert (len(made.rows), len(list(made.samples(0))), made.problems) == (rows, 27 * rows, ())
    assert all(path.startswith("Vehicle.OBD.") and path in drive.SIGNALS for path in paths(made))
