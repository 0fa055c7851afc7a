"""A campaign's world as data, and the configurations that make it.

Plan -> TOML of the vehicle's gateway (and of the cloud's, if there are two)  flows: who sends what, from where to where
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from campaigns.chaos.wire import Uri

VEHICLE, CLOUD, ROAD = "vehicle1", "cloud", "road"  # two authorities, and what is between two gateways
TO_ROAD, TO_CLOUD = "vehicle to road", "road to cloud"  # the two halves of that, where a broker is in the middle
UP: Final = [Uri(VEHICLE, 0x8001, 1, 0x8001 + place) for place in range(4)]
DOWN: Final = [Uri(CLOUD, 0x8001, 1, 0x8001 + place) for place in range(2)]
LATE: Final = [Uri(VEHICLE, 0x8001, 1, 0xA001 + place) for place in range(200)]  # subscribed to while things are hurt
LATE_APP: Final = Uri(CLOUD, 0x9003, 1, 0)
CLOUD_APP, VEHICLE_APP = Uri(CLOUD, 0x9001, 1, 0), Uri(VEHICLE, 0x9001, 1, 0)
UP_NOTE, DOWN_NOTE = Uri(VEHICLE, 0x8001, 1, 0x9001), Uri(CLOUD, 0x8001, 1, 0x9001)  # sources of notifications
SESSION: Final = "session_expiry_s = 86400"
USER: Final = "gateway"  # of the gateways, where brokers have access rules; raw clients are anonymous
# as it is cut so often
ZENOH_RETRY: Final = {"connect/retry": {"period_init_ms": 50, "period_max_ms": 400, "period_increase_factor": 2}}
DDS: Final = 'interface = "lo", multicast = false, peers = ["127.0.0.1"], lease_ms = 1000, domain_id = 7'
EPOCHS: Final = "tick"
# the time that a kill takes from a gateway is longer than many of them
EPOCHS_END: Final = "width_ms = 400\nlateness_ms = 200\ntimeout_ms = 10000"
PUBLISHER: Final = Uri(VEHICLE, 0x8001, 1, 0)
ANNOUNCEMENTS: Final = Uri(VEHICLE, 0x8001_0004, 1, 0x8004)  # of its history


@dataclass(frozen=True)
class Plan:
    """A campaign: the world, and how often it meets which fault."""

    faults: dict[str, int]
    vehicle: Literal["mqtt5", "zenoh"] = "mqtt5"
    interest: Literal["static", "embedded", "remote"] = "static"
    two: bool = False  # a gateway in the cloud, too, and a link between them
    road: Literal["mqtt5", "zenoh", "dds"] = "mqtt5"  # that link: a broker, or from one to the other
    # who is followed: the vehicle's gateway by the cloud's; both by one another; or a publisher that has a history of
    # its own, in place of the vehicle's raw client, by the gateway. What is followed arrives exactly once.
    follows: Literal["", "up", "both", "publisher"] = ""
    record: bool = False
    reader: bool = False
    epochs: bool = False  # the vehicle's topics have them, and the reader reads them, where they are followed
    proxies: bool = False
    access: bool = False  # brokers have access rules, which `broker_refuse` changes
    disk_bytes: int = 0  # of a small disk for data_dir; 0: the usual one
    io: bool = False
    clock: bool = False
    rate: int = 150  # messages a second, all flows together
    share: float = 1.0  # of the time
    needs: tuple[Callable[[], str], ...] = ()  # each says why this machine can't, or nothing

    @property
    def brokers(self) -> list[str]:
        road = [ROAD] if self.two and self.road == "mqtt5" else []
        return [*([VEHICLE] if self.vehicle == "mqtt5" else []), *road, CLOUD]

    @property
    def proxied(self) -> list[str]:
        """Links with a proxy: of a network whose name it is, or of one gateway to the road."""
        if not self.follows:
            return self.brokers if self.proxies else []
        return [TO_ROAD, TO_CLOUD] if self.road == "mqtt5" and self.two else [ROAD]

    def is_followed(self, flow: str) -> bool:
        """What arrives exactly once."""
        senders = {"": (), "up": (VEHICLE,), "both": (VEHICLE, CLOUD), "publisher": (VEHICLE,)}[self.follows]
        return " > " not in flow and Uri.of(flow).authority in senders and Uri.of(flow).entity == UP[0].entity

    @property
    def service(self) -> str | None:
        """Whose uSubscription the cloud's clients talk to."""
        if self.interest == "static":
            return None
        return CLOUD if self.interest == "remote" or self.two else VEHICLE

    @property
    def off_vehicle(self) -> dict[str, bool]:
        """How the raw clients of each side talk to its broker."""
        return {VEHICLE: False, CLOUD: not self.two}

    @property
    def session(self) -> str:
        """Settings of each MQTT connection of a gateway."""
        return f'{SESSION}, username = "{USER}"' if self.access else SESSION

    def is_sent_to(self, side: str, source: Uri) -> bool:
        """A gateway sends what comes from `source` to the broker of `side`."""
        return side == ROAD or source.authority != side

    def topic_at(self, side: str, source: Uri, sink: Uri | None) -> str:
        """By which a gateway sends it to the broker of `side`."""
        if side == ROAD or self.off_vehicle[side]:
            return f"{source.authority}/{CLOUD if source.authority == VEHICLE else VEHICLE}"
        return source.segments if sink is None or sink.is_any else f"{source.segments}/{sink.segments}"

    @property
    def flows(self) -> list[Flow]:
        down_sink = None if self.two else Uri.any_of(VEHICLE)  # on an off-vehicle broker the sender says for whom it is
        found = [Flow(VEHICLE, topic, None) for topic in UP] + [Flow(CLOUD, topic, down_sink) for topic in DOWN]
        if self.vehicle == "mqtt5" and self.road == "mqtt5":  # other networks lose notifications while they are cut
            found += [Flow(VEHICLE, UP_NOTE, CLOUD_APP), Flow(CLOUD, DOWN_NOTE, VEHICLE_APP)]
        return found


class Flow(NamedTuple):
    """One stream of messages, whose order counts."""

    side: str  # who sends it
    source: Uri
    sink: Uri | None

    @property
    def name(self) -> str:
        return str(self.source) if self.sink is None or self.sink.is_any else f"{self.source} > {self.sink}"


@dataclass(frozen=True)
class Refusal:
    """What a broker does not let the gateways publish, since when (seconds of the ledger); no flows: nothing at all."""

    side: str
    since: float
    flows: frozenset[str] | None

    def has_kept(self, flow: str, sent_at: float) -> bool:
        """What was sent to us then as part of `flow` can't have reached that broker."""
        source = Uri.of(flow.partition(" > ")[0])
        is_refused = (self.side == ROAD or source.authority != self.side) if self.flows is None else flow in self.flows
        return is_refused and sent_at > self.since


def access_rules(refused: Iterable[str] | None) -> str:
    """An access file of mosquitto: the gateways may not publish to these topics, or (None) to any; others may do
    everything."""
    ours = ["topic read #"] if refused is None else ["topic readwrite #", *(f"topic deny {one}" for one in refused)]
    return "\n".join(["topic readwrite #", f"user {USER}", *ours, ""])


class Places(NamedTuple):
    """Where a gateway keeps its data and meets others."""

    data_dir: Path
    admin_port: int
    ports: dict[str, int]  # of the brokers, as it reaches them
    zenoh_port: int
    static_file: Path
    road_port: int = 0  # as this gateway reaches the road, or where it listens


def vehicle_config(plan: Plan, at: Places) -> str:
    """The gateway in the vehicle."""
    zenoh = f'transport = "zenoh"\nsettings = {{ mode = "router", listen = ["tcp/127.0.0.1:{at.zenoh_port}"] }}'
    settings = f'port = {at.ports.get(VEHICLE)}, client_id = "gateway-vehicle", {plan.session}'
    mqtt = f'transport = "mqtt5"\nsettings = {{ {settings} }}'
    home = "none" if plan.interest == "static" else "embedded"
    away = "remote" if plan.interest == "remote" else "none"
    network = mqtt if plan.vehicle == "mqtt5" else zenoh
    by = f'followed_by = "//{CLOUD}/4/1/0"\n' if plan.two and plan.follows else ""
    parts = [
        _head(at),
        f'[[endpoint]]\nname = "vehicle"\nauthorities = ["{VEHICLE}"]\n{network}\nusubscription = "{home}"',
        f'[[endpoint]]\nname = "cloud"\nauthorities = ["{CLOUD}"]\nusubscription = "{away}"\n{by}'
        + _road(plan, at, "cloud"),
    ]
    if plan.follows == "both":
        parts.append(f'[[follow]]\nendpoint = "cloud"\nservice = "//{CLOUD}/4/1/0"')
    if plan.epochs:
        parts.append(f'[[epochs]]\nname = "{EPOCHS}"\ntopics = ["//{VEHICLE}/8001/1/FFFF"]\n{EPOCHS_END}')
    if plan.record:
        parts.append(f'[history]\nrecord = ["//{VEHICLE}/FFFFFFFF/FF/FFFF"]')
    if plan.interest == "static":
        parts.append(f'[usubscription]\nstatic_file = "{at.static_file}"')
    return "\n".join(parts) + "\n"


def cloud_config(plan: Plan, at: Places) -> str:
    """The gateway in the cloud, for all vehicles, as in examples/vehicle-cloud."""
    settings = f'port = {at.ports[CLOUD]}, client_id = "gateway-cloud-home", {plan.session}'
    cloud = f'transport = "mqtt5"\nsettings = {{ {settings} }}'
    by = f'followed_by = "//{VEHICLE}/4/1/0"\n' if plan.follows == "both" else ""
    parts = [
        _head(at),
        f'[[endpoint]]\nname = "cloud"\nauthorities = ["{CLOUD}"]\n{cloud}\nusubscription = "embedded"',
        f'[[endpoint]]\nname = "fleet"\nauthorities = ["*"]\n{by}{_road(plan, at, "fleet")}',
    ]
    if plan.follows:
        # of the fleet, or of one that is named
        who = "*" if plan.follows == "up" else VEHICLE
        parts.append(f'[[follow]]\nendpoint = "fleet"\nservice = "//{who}/4/1/0"')
    return "\n".join(parts) + "\n"


def _head(at: Places) -> str:
    return (
        f'[streamer]\ndata_dir = "{at.data_dir}"\nadmin = "127.0.0.1:{at.admin_port}"\nlog_level = '
        '"warning"\n[egress]\nretry_max_ms = 500'
    )


def _road(plan: Plan, at: Places, name: str) -> str:
    """To the other gateway, or to the cloud's broker. The one at the `fleet` endpoint is the one that listens."""
    if plan.road == "dds":
        return f'transport = "dds"\nsettings = {{ {DDS} }}'
    if plan.road == "mqtt5":
        return _off_vehicle(plan, at, name)
    place = f'["tcp/127.0.0.1:{at.road_port}"]'
    if name == "fleet":
        return f'transport = "zenoh"\nsettings = {{ mode = "router", listen = {place} }}'
    retry = ", ".join(f"{key} = {value}" for key, value in ZENOH_RETRY["connect/retry"].items())
    settings = f'mode = "peer", connect = {place}, settings = {{ "connect/retry" = {{ {retry} }} }}'
    return f'transport = "zenoh"\nsettings = {{ {settings} }}'


def _off_vehicle(plan: Plan, at: Places, name: str = "cloud") -> str:
    port = at.ports[ROAD if plan.two else CLOUD]
    settings = f'port = {port}, mode = "off-vehicle", client_id = "gateway-{name}", {plan.session}'
    return f'transport = "mqtt5"\nsettings = {{ {settings} }}'
