"""Drives: recorded, from a CSV file of OBD-II parameters, or simulated, from a seed; replayed on a network.

CSV text --read-> Drive(signals, rows, problems) --samples(start_ms)--> SignalSample --message-> UMessage
seed --simulate->                                                                    --replay-> send_batch, retries

Paths come from COVESA's Vehicle Signal Specification, branch Vehicle.OBD, if it has one. A column that is missing in
the table below becomes Vehicle.OBD.<CamelCase of its name>. One row is one second.
"""

from __future__ import annotations

import asyncio
import csv
import functools
import itertools
import math
import random
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.attributes import PUBLISH
from uprotocol.core.ustreamer.v1 import ustreamer_pb2
from uprotocol.message import PROTOBUF
from uprotocol.pacing import Backoff
from uprotocol.status import UStatusError, invalid, settle
from uprotocol.transport import UTransport
from uprotocol.v1.uattributes_pb2 import UAttributes
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.uri_pb2 import UUri

MCU: Final = "mcu1"
VEHICLE: Final = "vehicle1"
PUBLISHER_UE_ID: Final = 0x8001  # of both publishers; uEntity types from 8000 are free for applications
PUBLISHER_VERSION: Final = 1

ROW_PERIOD_MS: Final = 1_000  # the recordings have no time column: one row a second
ROWS_MAX: Final = 1_000_000  # eleven days at one row a second; a longer file is probably no drive
COLUMNS_MAX: Final = 1_024  # each is a topic; a car has some hundred parameters
TEXT_LENGTH_MAX: Final = 1_000  # characters of a text value; a longer one means a broken file
PROBLEMS_KEPT_MAX: Final = 100  # kept; the others are only counted
DERIVED_RESOURCE_MIN: Final = 0x9000  # topics of columns that the table doesn't know; the table itself stays far below
DERIVED_RESOURCES: Final = 0x6000
SEND_BATCH_MAX: Final = 256  # messages per send_batch
RETRY_MIN_MS, RETRY_MAX_MS = 20, 2_000

SignalValue = float | str | bool


@dataclass(frozen=True)
class Signal:
    """A measured quantity and its topic, which is the same in every drive."""

    path: str
    publisher: str  # authority
    resource: int

    @functools.cached_property
    def topic(self) -> UUri:
        return uris.uri(self.publisher, PUBLISHER_UE_ID, PUBLISHER_VERSION, self.resource)


class SignalSample(NamedTuple):
    """One value of one signal. `time_ms` is Unix milliseconds."""

    signal: Signal
    time_ms: int
    value: SignalValue


class Problem(NamedTuple):
    """An unreadable part of the file; the rest is kept. `row` is the line number; the header has 1."""

    row: int
    reason: str

    def __str__(self) -> str:
        return f"row {self.row}: {self.reason}"


# One third is published by the engine's own controller (mcu1), the rest by the vehicle computer.
# (publisher, path, column names). The row number gives the topic's resource, so append new rows at the end.
_TABLE: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    (VEHICLE, "Vehicle.OBD.RunTime", ("ENGINE_RUN_TIME", "ENGINE_RUN_TINE")),  # the typing error is carOBD's
    (MCU, "Vehicle.OBD.EngineSpeed", ("ENGINE_RPM", "RPM")),
    (VEHICLE, "Vehicle.OBD.Speed", ("VEHICLE_SPEED",)),
    (MCU, "Vehicle.OBD.ThrottlePosition", ("THROTTLE",)),
    (MCU, "Vehicle.OBD.EngineLoad", ("ENGINE_LOAD",)),
    (MCU, "Vehicle.OBD.CoolantTemperature", ("COOLANT_TEMPERATURE", "ENGINE_COOLANT_TEMPERATURE")),
    (VEHICLE, "Vehicle.OBD.LongTermFuelTrim1", ("LONG_TERM_FUEL_TRIM_BANK_1",)),
    (VEHICLE, "Vehicle.OBD.ShortTermFuelTrim1", ("SHORT_TERM_FUEL_TRIM_BANK_1",)),
    (MCU, "Vehicle.OBD.MAP", ("INTAKE_MANIFOLD_PRESSURE", "MAP")),
    (VEHICLE, "Vehicle.OBD.FuelLevel", ("FUEL_TANK", "FUEL_LEVEL")),
    (VEHICLE, "Vehicle.OBD.ThrottlePositionB", ("ABSOLUTE_THROTTLE_B",)),
    (VEHICLE, "Vehicle.OBD.AcceleratorPositionD", ("PEDAL_D",)),
    (VEHICLE, "Vehicle.OBD.AcceleratorPositionE", ("PEDAL_E",)),
    (MCU, "Vehicle.OBD.ThrottleActuator", ("COMMANDED_THROTTLE_ACTUATOR",)),
    (MCU, "Vehicle.OBD.CommandedEquivalenceRatio", ("FUEL_AIR_COMMANDED_EQUIV_RATIO",)),
    (VEHICLE, "Vehicle.OBD.BarometricPressure", ("ABSOLUTE_BAROMETRIC_PRESSURE",)),
    (VEHICLE, "Vehicle.OBD.RelativeThrottlePosition", ("RELATIVE_THROTTLE_POSITION",)),
    (MCU, "Vehicle.OBD.IntakeTemp", ("INTAKE_AIR_TEMP", "INTAKE_AIR_TEMPERATURE")),
    (MCU, "Vehicle.OBD.TimingAdvance", ("TIMING_ADVANCE",)),
    (VEHICLE, "Vehicle.OBD.Catalyst.Bank1.Temperature1", ("CATALYST_TEMPERATURE_BANK1_SENSOR1",)),
    (VEHICLE, "Vehicle.OBD.Catalyst.Bank1.Temperature2", ("CATALYST_TEMPERATURE_BANK1_SENSOR2",)),
    (VEHICLE, "Vehicle.OBD.ControlModuleVoltage", ("CONTROL_MODULE_VOLTAGE",)),
    (VEHICLE, "Vehicle.OBD.CommandedEVAP", ("COMMANDED_EVAPORATIVE_PURGE",)),
    (VEHICLE, "Vehicle.OBD.RunTimeMIL", ("TIME_RUN_WITH_MIL_ON",)),
    (VEHICLE, "Vehicle.OBD.TimeSinceDTCCleared", ("TIME_SINCE_TROUBLE_CODES_CLEARED",)),
    (VEHICLE, "Vehicle.OBD.DistanceWithMIL", ("DISTANCE_TRAVELED_WITH_MIL_ON",)),
    (VEHICLE, "Vehicle.OBD.WarmupsSinceDTCClear", ("WARM_UPS_SINCE_CODES_CLEARED",)),
    (VEHICLE, "Vehicle.Powertrain.Transmission.CurrentGear", ()),  # 0 is neutral
    (VEHICLE, "Vehicle.Powertrain.CombustionEngine.IsRunning", ()),
    (VEHICLE, "Vehicle.IsMoving", ()),
    (VEHICLE, "Vehicle.LowVoltageSystemState", ()),  # ACC, START, ON
)

SIGNALS: Final[dict[str, Signal]] = {
    path: Signal(path, publisher, uris.RESOURCE_TOPIC_MIN + number)
    for number, (publisher, path, _) in enumerate(_TABLE)
}
_COLUMNS: Final[dict[str, str]] = {name: path for _, path, names in _TABLE for name in names}


@dataclass(frozen=True)
class Drive:
    """Signals, and a row of their values for each second; None: no value."""

    signals: tuple[Signal, ...]
    rows: Sequence[tuple[SignalValue | None, ...]] = field(repr=False)
    problems: tuple[Problem, ...] = ()  # the first PROBLEMS_KEPT_MAX
    problems_total: int = 0

    def report(self, at_most: int = PROBLEMS_KEPT_MAX) -> Iterator[str]:
        shown = self.problems[:at_most]
        yield from map(str, shown)
        if self.problems_total > len(shown):
            yield f"and {self.problems_total - len(shown)} more that can't be read"

    def samples(self, start_ms: int) -> Iterator[SignalSample]:
        """Yields all values, row by row; the first row is at `start_ms` (Unix milliseconds)."""
        for number, row in enumerate(self.rows):
            time_ms = start_ms + number * ROW_PERIOD_MS
            for signal, value in zip(self.signals, row, strict=True):
                if value is not None:
                    yield SignalSample(signal, time_ms, value)


def message(sample: SignalSample) -> UMessage:
    """Returns `sample` as a valid publish with an upstreamer.v1.Sample in plain protobuf."""
    signal, time_ms, value = sample
    payload = ustreamer_pb2.Sample(path=signal.path)
    payload.time.seconds, payload.time.nanos = time_ms // 1000, time_ms % 1000 * 1_000_000
    if isinstance(value, bool):
        payload.bool_value = value
    elif isinstance(value, str):
        payload.string_value = value
    else:
        payload.double_value = value
    attributes = UAttributes(id=uuids.new(), type=PUBLISH, source=signal.topic, payload_format=PROTOBUF)
    return UMessage(attributes=attributes, payload=payload.SerializeToString())


# Recorded drives


def read(text: str) -> Drive:
    """Returns the drive in a CSV file.

    Ignored: `()` or units behind a name, blanks around values, trailing commas, empty lines. Reported in `problems`:
    unreadable cells and rows without any value; all other values are kept. A column of the table, or one that has a
    number in any row, has only numbers; other columns have `true`/`false` or text. Raises
    UStatusError(INVALID_ARGUMENT) for text without header or rows.
    """
    lines = ((number, line) for number, line in enumerate(text.lstrip("\ufeff").splitlines(), 1) if line.strip())
    first = next(lines, None)
    if first is None:
        raise invalid("expected a CSV file with a header of column names, got an empty file")
    problems: list[Problem] = []
    header = _header(_cells(first[1]), first[0], problems)
    rows = list(itertools.islice(((number, _cells(line)) for number, line in lines), ROWS_MAX + 1))
    if not rows:
        raise invalid("expected a row for each second below the header, got none")
    if len(rows) > ROWS_MAX:
        raise invalid(f"a drive has at most {ROWS_MAX} rows, this file has more: split it")
    width = 1 + max(column for column, _ in header)
    for number, cells in rows:
        if len(cells) > width and any(cells[width:]):
            problems.append(Problem(number, f"has {len(cells)} cells, the header names {width}: the rest is left out"))
    columns = [_column(column, signal, rows, problems) for column, signal in header]
    kept = list(zip(*columns, strict=True))
    for (number, _), values in zip(rows, kept, strict=True):
        if values.count(None) == len(values):
            problems.append(Problem(number, "has no readable value: skipped"))
    problems.sort(key=lambda problem: problem.row)
    return Drive(tuple(signal for _, signal in header), kept, tuple(problems[:PROBLEMS_KEPT_MAX]), len(problems))


def _cells(line: str) -> list[str]:
    """Returns the cells of one line: a stray quote then affects only its own row."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True), [])]
    except csv.Error:
        return [cell.strip() for cell in line.split(",")]


def _header(names: list[str], number: int, problems: list[Problem]) -> list[tuple[int, Signal]]:
    """Returns (column, signal) for each named column."""
    if all(_number(name) is not None for name in names if name):
        raise invalid(f"expected a header of column names in the first row, got {', '.join(names[:3])}...")
    found: list[tuple[int, Signal]] = []
    taken: dict[str, int] = {}
    resources: set[int] = set()
    for column, name in enumerate(names[: COLUMNS_MAX + 1]):
        path = _path(name)
        if path is None:
            if name:
                what = f"column {column + 1} has the name {name!r}, of which no path can be made: left out"
                problems.append(Problem(number, what))
            continue
        taken[path] = taken.get(path, 0) + 1
        if taken[path] > 1:
            problems.append(Problem(number, f"column {column + 1} is the second {name!r}: kept as {path}{taken[path]}"))
            path = f"{path}{taken[path]}"
        signal = SIGNALS.get(path) or _derived(path, resources)
        resources.add(signal.resource)
        found.append((column, signal))
    if not found or len(names) > COLUMNS_MAX:
        raise invalid(f"expected a header of 1 to {COLUMNS_MAX} column names in the first row, got {len(names)} cells")
    return found


def _path(name: str) -> str | None:
    """Returns Vehicle.OBD.Speed for `VEHICLE_SPEED ()`; leaves Vehicle... paths unchanged."""
    bare = re.sub(r"[(\[{].*?[)\]}]", "", name).strip()
    if re.fullmatch(r"Vehicle(\.[A-Za-z][A-Za-z0-9]*)+", bare):
        return bare
    words = re.findall(r"[A-Za-z0-9]+", bare)
    known = _COLUMNS.get("_".join(words).upper())
    if known is not None or not words:
        return known
    camel = (word[0].upper() + (word[1:].lower() if word.isupper() else word[1:]) for word in words)
    return "Vehicle.OBD." + "".join(camel)


def _derived(path: str, taken: Iterable[int]) -> Signal:
    """Returns a signal for a column missing in the table. Its topic depends on its name."""
    digest = zlib.crc32(path.encode())
    resource = digest % DERIVED_RESOURCES
    while DERIVED_RESOURCE_MIN + resource in taken:
        resource = (resource + 1) % DERIVED_RESOURCES
    return Signal(path, MCU if digest // DERIVED_RESOURCES % 3 == 0 else VEHICLE, DERIVED_RESOURCE_MIN + resource)


def _column(
    column: int, signal: Signal, rows: list[tuple[int, list[str]]], problems: list[Problem]
) -> list[SignalValue | None]:
    cells = [cells[column] if column < len(cells) else "" for _, cells in rows]
    values: list[SignalValue | None] = [_number(cell) for cell in cells]
    numeric = signal.path in SIGNALS or any(value is not None for value in values)
    truths = {"true": True, "false": False}
    is_bool = not numeric and all(cell.lower() in truths for cell in cells if cell)
    for place, (value, cell) in enumerate(zip(values, cells, strict=True)):
        if value is not None:
            continue
        row = rows[place][0]
        if not cell:
            problems.append(Problem(row, f"{signal.path} is empty"))
        elif numeric:
            problems.append(Problem(row, f"{signal.path} is not a number: {cell[:40]!r}"))
        elif len(cell) > TEXT_LENGTH_MAX:
            problems.append(Problem(row, f"{signal.path} has {len(cell)} characters"))
        else:
            values[place] = truths[cell.lower()] if is_bool else cell
    return values


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in cell else None  # scan tools don't write inf or 1_0


# Simulated drives
# A small car with a petrol engine. SI units unless the name says otherwise.
_MASS_KG = 1_150.0
_DRAG = 0.5 * 1.2 * 0.68  # half the density of air times the drag area
_ROLLING_N = 0.011 * _MASS_KG * 9.81
_POWER_MAX_W = 70_000.0
_TORQUE_MAX_NM = 125.0
_IDLE_RPM, _UPSHIFT_RPM, _DOWNSHIFT_RPM, _LIMIT_RPM = 780.0, 2_600.0, 1_350.0, 6_000.0
_RPM_PER_MPS = (0.0, 450.0, 248.0, 171.0, 126.0, 101.0)  # by gear
_TANK_L = 45.0
_FUEL_J_PER_L = 32e6 * 0.27  # at the crank
_IDLE_FUEL_L_PER_S = 0.7 / 3600
_SECONDS_BEFORE_START = 3  # ignition on, engine off


def simulate(seed: int, seconds: int) -> Drive:
    """Returns a drive of `seconds` rows: a cold start, then city, country road, motorway and stops in random order.

    The same seed gives the same drive at any length.
    """
    assert seconds > 0, "a drive has at least one row"
    if seconds > ROWS_MAX:
        raise invalid(f"a drive has at most {ROWS_MAX} rows, asked for {seconds}")
    car = _Car(random.Random(seed))
    seen = [car.step(second) for second in range(seconds)]
    return Drive(tuple(SIGNALS[path] for path in seen[0]), [tuple(values.values()) for values in seen])


class _Car:
    """The simulated car; `step` advances it by one second."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.speed = 0.0  # m/s
        self.target = 0.0
        self.until = 12  # the second of the next target speed; before 12, the car stands
        self.gear = 0
        self.ambient = rng.uniform(5.0, 30.0)
        self.coolant = self.catalyst = self.ambient
        self.intake = self.ambient
        self.fuel = rng.uniform(0.4, 0.95) * _TANK_L

    def step(self, second: int) -> dict[str, SignalValue]:
        """Returns values by signal path; the paths and their order never change."""
        running = second > _SECONDS_BEFORE_START
        before = self.speed
        if running:
            self._drive(second)
        wheel_w = max(0.0, self._force(self.speed - before) * self.speed)
        rpm = self._shift() if running else 0.0
        power_available = min(_POWER_MAX_W, _TORQUE_MAX_NM * rpm * math.pi / 30) if running else 1.0
        load = min(1.0, 0.18 + 0.82 * wheel_w / power_available) if running else 0.0
        if running and self.speed < before - 0.5:
            load = 0.05  # overrun: no fuel
        self._heat_and_burn(running, wheel_w, load)
        pedal = 16.0 + 55.0 * max(0.0, load - 0.18) if self.speed > 0.3 and running else 16.0
        state = "ON" if running else "START" if second == _SECONDS_BEFORE_START else "ACC"
        noise = self.rng.gauss
        return {  # resolutions are those of OBD-II
            "Vehicle.OBD.RunTime": float(max(0, second - _SECONDS_BEFORE_START)),
            "Vehicle.OBD.EngineSpeed": round(max(0.0, rpm + noise(0, 12.0)) * 4) / 4 if running else 0.0,
            "Vehicle.OBD.Speed": float(round(self.speed * 3.6)),
            "Vehicle.OBD.ThrottlePosition": round((15.7 + 60.0 * max(0.0, load - 0.1)) / 100 * 255) / 2.55,
            "Vehicle.OBD.EngineLoad": round(load * 255) / 2.55,
            "Vehicle.OBD.CoolantTemperature": float(round(self.coolant)),
            "Vehicle.OBD.FuelLevel": round(self.fuel / _TANK_L * 255) / 2.55,
            "Vehicle.OBD.AcceleratorPositionD": round(pedal / 100 * 255) / 2.55,
            "Vehicle.OBD.IntakeTemp": float(round(self.intake)),
            "Vehicle.OBD.Catalyst.Bank1.Temperature1": round(self.catalyst, 1),
            "Vehicle.OBD.ControlModuleVoltage": round((14.1 if running else 12.4) + noise(0, 0.04), 3),
            "Vehicle.Powertrain.Transmission.CurrentGear": float(self.gear),
            "Vehicle.Powertrain.CombustionEngine.IsRunning": running,
            "Vehicle.IsMoving": self.speed > 0.3,
            "Vehicle.LowVoltageSystemState": state,
        }

    def _drive(self, second: int) -> None:
        """Approach the target speed, limited by a calm driver and the engine."""
        if second >= self.until:
            low, high, shortest, longest = self.rng.choice(
                [(0, 0, 8, 30), (25, 50, 20, 60), (25, 50, 20, 60), (70, 95, 40, 120), (105, 125, 60, 180)]
            )
            self.target = self.rng.uniform(low, high) / 3.6
            self.until = second + self.rng.randint(shortest, longest)
        power_limit = 0.7 * _POWER_MAX_W / max(self.speed, 5.0)
        fastest = min(2.2, (power_limit - self._force(0.0)) / _MASS_KG)
        wanted = self.target + self.rng.gauss(0, 0.1) * (self.target > 0) - self.speed
        self.speed = max(0.0, self.speed + min(max(wanted, -2.6), fastest))
        if self.target == 0 and self.speed < 0.5:
            self.speed = 0.0

    def _force(self, acceleration: float) -> float:
        """Returns the force at the wheels in N. `acceleration`: m/s in one second."""
        return _MASS_KG * acceleration + _DRAG * self.speed**2 + (_ROLLING_N if self.speed > 0 else 0.0)

    def _shift(self) -> float:
        """Select the gear by engine speed. Returns the new engine speed in rpm."""
        if self.speed < 0.3:
            self.gear = 0
            return _IDLE_RPM + 4.0 * max(0.0, 70.0 - self.coolant)  # a cold engine idles faster
        self.gear = max(self.gear, 1)
        while self.gear < 5 and self.speed * _RPM_PER_MPS[self.gear] > _UPSHIFT_RPM:
            self.gear += 1
        while self.gear > 1 and self.speed * _RPM_PER_MPS[self.gear] < _DOWNSHIFT_RPM:
            self.gear -= 1
        return min(max(self.speed * _RPM_PER_MPS[self.gear], _IDLE_RPM), _LIMIT_RPM)

    def _heat_and_burn(self, running: bool, wheel_w: float, load: float) -> None:
        """Update fuel and temperatures from engine load and airflow."""
        if running:
            self.fuel = max(0.5, self.fuel - _IDLE_FUEL_L_PER_S - wheel_w / _FUEL_J_PER_L)
        thermostat_c = 88.0 + 3.0 * load
        is_cold = running and self.coolant < thermostat_c
        self.coolant += 0.04 + 0.25 * load if is_cold else (thermostat_c - self.coolant) * 0.05 * running
        glow_c = 380.0 + 330.0 * load if running else self.ambient
        self.catalyst += (glow_c - self.catalyst) * 0.02
        bay_c = self.ambient + 22.0 * min(1.0, self.coolant / 90.0) - 0.4 * self.speed
        self.intake += (max(self.ambient, bay_c) - self.intake) * 0.01


# Replayed drives


def load(data: Path | None, seed: int, seconds: int) -> Drive:
    """Returns the recorded drive in `data`, or a simulated one. Raises INVALID_ARGUMENT for an unreadable file."""
    if data is None:
        return simulate(seed, seconds)
    try:
        text = data.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise invalid(f"can't read {data}: {error.strerror}") from None
    return read(text)


async def replay(
    transport: UTransport,
    samples: Iterable[SignalSample],
    *,
    rate: float | None = None,
    on_progress: Callable[[int], None] = lambda published: None,
) -> Counter[str]:
    """Publish every sample; `rate` is in samples per second. Returns the number of messages by topic.

    Raises the UStatusError of a message that the network refuses permanently.
    """
    counts: Counter[str] = Counter()
    started, iterator = time.monotonic(), iter(samples)
    while batch := list(itertools.islice(iterator, SEND_BATCH_MAX)):
        messages = [message(sample) for sample in batch]
        await send_all(transport, messages)
        counts.update(uris.format(one.attributes.source) for one in messages)
        on_progress(counts.total())
        if rate is not None:
            ahead_s = counts.total() / rate - (time.monotonic() - started)
            await asyncio.sleep(max(0.0, ahead_s))
    return counts


async def send_all(transport: UTransport, messages: list[UMessage]) -> None:
    """Send until the network accepts all. Raises the UStatusError of a permanent refusal."""
    backoff = Backoff(RETRY_MIN_MS, RETRY_MAX_MS)
    while messages:
        settled = settle(messages, await transport.send_batch(messages))
        for _, status in settled.refused:
            raise UStatusError.from_status(status)
        messages = [one for one, _ in settled.again]
        if messages:
            await backoff.wait()
