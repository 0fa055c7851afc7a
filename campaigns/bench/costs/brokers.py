"""MQTT to MQTT where the broker limits the rate: far away, with a small window, or with one message at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from campaigns.bench.costs.common import Figures, Setting, points
from campaigns.bench.lanes import Kind, Leg, lane, round_trip
from campaigns.bench.measure import calibrate
from campaigns.bench.processes import BenchError
from campaigns.bench.subject import Scene

KINDS: Final[tuple[Kind, ...]] = ("bare", "streamer", "bridge")
FAR_MS: Final = 50.0  # each way
OFFERED_PER_S: Final = 20_000
SHORT_S: Final = 4.0
# settings.in_flight_max of the far endpoint: 20,000/s times the 100 ms of an acknowledgement are 2,000
IN_FLIGHT_MAX: Final = 4_096
STOCK_IN_FLIGHT: Final = ("max_inflight_messages 20",)  # mosquitto's default; here it drops nothing from its queue
ROUND_TRIPS: Final = 500
ROUND_TIMEOUT_S: Final = 120.0


def far(setting: Setting) -> Figures:
    """Measures what arrives if 20,000/s are offered and the destination's broker is 50 ms away each way."""
    scene = Scene(out_settings={"in_flight_max": IN_FLIGHT_MAX})

    def at(kind: Kind, directory: Path) -> Figures:
        with lane(kind, Leg("mqtt", "mqtt", scene, far_ms=FAR_MS), directory) as one:
            result = one.run(int(OFFERED_PER_S * setting.seconds_or(SHORT_S)), OFFERED_PER_S)
            return {
                "per_s": round(result["per_s"]),
                "offered_per_s": OFFERED_PER_S,
                "p50_ms": round(result["p50_ms"], 1),
            }

    return points(KINDS, setting, at)


def stock(setting: Setting) -> Figures:
    """Measures full speed with brokers that allow 20 messages in flight, the default of mosquitto."""

    def at(kind: Kind, directory: Path) -> Figures:
        with lane(kind, Leg("mqtt", "mqtt", broker_settings=STOCK_IN_FLIGHT), directory) as one:
            return {"per_s": round(one.throughput(calibrate(one, setting.seconds_or(SHORT_S))))}

    return points(KINDS, setting, at)


def one_at_a_time(setting: Setting) -> Figures:
    """Measures a publisher that sends each message after the previous one has arrived."""

    def at(kind: Kind, directory: Path) -> Figures:
        with round_trip(kind, Leg("mqtt", "mqtt"), directory) as ends:
            for run, messages in ((1, ROUND_TRIPS // 10), (ROUND_TRIPS, ROUND_TRIPS)):
                ends.tell(run=run, messages=messages)
                result = ends.answer(ROUND_TIMEOUT_S)
            if result["lost"] or result["doubled"]:
                raise BenchError(f"of {ROUND_TRIPS} sent {result['lost']} lost, {result['doubled']} twice")
            return {"per_s": round(ROUND_TRIPS / result["seconds"])}

    return points(KINDS, setting, at)
