"""One gateway with its networks in its own process, as the target of attacks.

home:   vehicle1 -- Zenoh --+-- gateway --+-- broker (in-vehicle) -- cloud   and `lost`, a broker that can hang
fleet:  v0000 ... v0999 ----+-- broker (off-vehicle) -- gateway -- broker (in-vehicle) -- cloud
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from campaigns.chaos.processes import Broker, Gateway
from campaigns.chaos.web import ItemBackend
from campaigns.chaos.wire import Uri
from transports.ports import free_port

CLOUD, VEHICLE = "cloud", "vehicle1"
FLEET: Final = [f"v{number:04d}" for number in range(999)]  # the honest vehicles; v0999 is the attacker
RESOURCE: Final = 0x8001  # of honest topics
DENIED: Final = 0x8002  # of topics that rules deny to the cloud
LATE: Final = 0xA000  # first resource of topics that are subscribed to during the trial
ENTITY, APP = 0x8001, 0x9001  # the publisher, and the receiver
RETENTION_MIB: Final = 64  # so that the bound of the disk is reached soon

HEAD: Final = """[streamer]
data_dir = "{data}"
admin = "127.0.0.1:{admin}"
[egress]
retry_max_ms = 500
[history]
retention_mib = {retention}
record = {record}
[usubscription]
static_file = "{static}"
{usubscription}
"""
HOME: Final = """
[[endpoint]]
name = "vehicle"
transport = "zenoh"
authorities = ["vehicle1"]
settings = {{ mode = "router", listen = ["tcp/127.0.0.1:{zenoh}"], stall_ms_max = {stall_ms} }}
[[endpoint]]
name = "cloud"
transport = "mqtt5"
authorities = ["cloud"]
usubscription = "none"
settings = {{ port = {cloud}, client_id = "gateway-cloud" }}
[[endpoint]]
name = "lost"
transport = "mqtt5"
authorities = ["lost"]
usubscription = "none"
settings = {{ port = {lost}, client_id = "gateway-lost" }}
"""
RULES: Final = """
[[rule]]
from = "vehicle"
to = "cloud"
deny = ["//vehicle1/FFFFFFFF/FF/8002", "//vehicle1/8400/FF/FFFF"]
[[rule]]
from = "cloud"
to = "vehicle"
deny = ["//cloud/FFFFFFFF/FF/8002", "//vehicle1/8400/FF/FFFF"]
"""
FLEET_SIDE: Final = """
[[endpoint]]
name = "cloud"
transport = "mqtt5"
authorities = ["cloud"]
settings = {{ port = {cloud}, client_id = "gateway-cloud" }}
[[endpoint]]
name = "fleet"
transport = "mqtt5"
authorities = ["*"]
settings = {{ port = {fleet}, mode = "off-vehicle", client_id = "gateway-fleet" }}
"""


TOKEN, HOSTILE_TOKEN = "honest-token", "token-of-the-attacker"
KEY: Final = b"key of the publishers, 32 bytes."
CHANNEL: Final = "honest"
ITEMS: Final = "//cloud/8001/1/9001"  # topic of the honest channel
TOKEN_FILES: Final = (("tokens_file", "tokens"), ("publish_key_file", "key"))
EDGE: Final = """
[http]
listen = "127.0.0.1:{http}"
client = "//cloud/9101/1/0"
send_s = 5
{tokens}
[grip]
publish = "127.0.0.1:{publish}"
sequence_wait_s = 0.2
{key}
[[channel]]
name = "honest"
topic = "//cloud/8001/1/9001"
[[channel]]
name = "other"
topic = "//cloud/8001/1/9002"
[[proxy]]
prefix = "/held/"
backend = "http://127.0.0.1:{backend}"
[[proxy]]
prefix = "/hostile/"
backend = "http://127.0.0.1:{hostile}"
timeout_s = 5
"""


@dataclass(frozen=True)
class Scene:
    """The networks around the gateway, and the gateway's settings."""

    fleet: bool = False
    rules: bool = False
    records: bool = True  # records all messages of both sides
    usubscription: str = ""  # further lines of that section
    stall_ms: int = 5_000  # `stall_ms_max` of the vehicle's Zenoh
    edge: Literal["", "tokens", "open"] = ""  # an HTTP edge, with tokens and keys, or for everybody on this machine

    @property
    def home(self) -> str:
        """Returns the authority whose services run inside the gateway."""
        return CLOUD if self.fleet else VEHICLE

    @property
    def vehicles(self) -> list[str]:
        return FLEET if self.fleet else [VEHICLE]

    def subscriptions(self) -> dict[str, list[str]]:
        """Returns the subscribers of each topic at the start."""
        up = {str(Uri(one, ENTITY, 1, RESOURCE)): [str(Uri(CLOUD, APP, 1, 0))] for one in self.vehicles}
        return up | {str(Uri(CLOUD, ENTITY, 1, RESOURCE)): [str(Uri(self.vehicles[0], APP, 1, 0))]}

    def toml(self, **places: object) -> str:
        text = HEAD + (FLEET_SIDE if self.fleet else HOME) + (RULES if self.rules else "") + (EDGE if self.edge else "")
        record = json.dumps(["//cloud/FFFFFFFF/FF/FFFF", "//vehicle1/FFFFFFFF/FF/FFFF"] if self.records else [])
        return text.format(
            record=record, retention=RETENTION_MIB, usubscription=self.usubscription, stall_ms=self.stall_ms, **places
        )


@dataclass
class Stage:
    """A running scene; `close` ends all of it."""

    scene: Scene
    folder: Path
    tally: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.zenoh_port, self.admin_port = free_port(), free_port()
        self.brokers = {
            name: Broker(name, self.folder, self.tally) for name in (CLOUD, "fleet" if self.scene.fleet else "lost")
        }
        self.http_port, self.publish_port, self.hostile_port = free_port(), free_port(), free_port()
        self.backend = ItemBackend(free_port())
        self.data_dir, static = self.folder / "data", self.folder / "subscriptions.json"
        static.write_text(json.dumps(self.scene.subscriptions()))
        self.config = self.folder / "gateway.toml"
        ports = {name: broker.port for name, broker in self.brokers.items()}
        self.config.write_text(
            self.scene.toml(
                data=self.data_dir, admin=self.admin_port, static=static, zenoh=self.zenoh_port, **ports, **self._edge()
            )
        )
        self.gateway = Gateway("gateway", self.folder, self.config, self.data_dir, self.admin_port, self.tally, {})

    def _edge(self) -> dict[str, object]:
        tokens, key = "", ""
        if self.scene.edge == "tokens":
            (self.folder / "tokens").write_text(f"//cloud/9101/1/0 {TOKEN}\n//cloud/A001/1/0 {HOSTILE_TOKEN}\n")
            (self.folder / "key").write_bytes(KEY)
            tokens, key = (f'{what} = "{self.folder}/{file}"' for what, file in TOKEN_FILES)
        ports = {"http": self.http_port, "publish": self.publish_port, "hostile": self.hostile_port}
        return {"backend": self.backend.port, "tokens": tokens, "key": key, **ports}

    def start(self) -> None:
        """Starts everything. Raises ChaosError if a part does not start."""
        for process in (*self.brokers.values(), self.gateway):
            process.start()
            process.wait_ready()
        if self.scene.edge:
            self.backend.start()

    def places(self) -> dict[str, object]:
        """Returns what an attacker must know, which anybody on these networks could find out."""
        ports = {name: broker.port for name, broker in self.brokers.items()}
        return {"home": self.scene.home, "zenoh": self.zenoh_port, "admin": self.admin_port, **ports} | {
            "http": self.http_port,
            "publish": self.publish_port,
            "hostile": self.hostile_port,
            "data": str(self.data_dir),
        }

    def hang(self, name: str, *, hung: bool) -> None:
        """Makes a broker stop answering while its connections stay open, or continue."""
        if self.brokers[name].running:
            self.brokers[name].signal(signal.SIGSTOP if hung else signal.SIGCONT)

    def close(self) -> None:
        for process in (self.gateway, *self.brokers.values()):
            process.close()
        self.backend.stop()
