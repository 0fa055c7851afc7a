"""Brokers of other makes, from the package registries: what is built once, and one that runs.

MAKES["hivemq"].prepare() -> out/brokers/hivemq-2024.3       -> .broker(folder) -> start, stop, kill, restart, close
   raises Missing: no tool, or the registry does not have it        the same methods as tools.broker.Broker
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from streamer.commands.demo import mosquitto
from tools.broker import Broker, Server
from transports.ports import free_port

HERE: Final = Path(__file__).parent / "builds"
CACHE: Final = Path(__file__).parents[2] / "out" / "brokers"
BUILD_S_MAX: Final = 1_500.0
START_S_MAX: Final = 60.0  # a JVM on a busy machine
STOP_S_MAX: Final = 30.0
PROBE_S: Final = 0.05
QUEUED_MAX: Final = 100_000  # messages that a broker is to keep for a client that is away, where that can be set
PACKET_BYTES_MAX: Final = 8 << 20

# how Maven, cargo and Go say that their registry has no such package, or no such version of it
_REGISTRY_LACKS: Final = re.compile(
    r"could not find artifact|no matching package|failed to select a version|unknown revision|404 not found",
    re.IGNORECASE,
)
# MQTT 5, Clean Start, keep alive of 30 s, client id "probe"
_CONNECT: Final = b"\x10\x12\x00\x04MQTT\x05\x02\x00\x1e\x00\x00\x05probe"


class Missing(Exception):
    """A broker that can't be had. `registry_lacks_it`: whatever is installed here, it would not come."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.registry_lacks_it = _REGISTRY_LACKS.search(reason) is not None


@dataclass(eq=False)
class RealBroker(Server):
    """One broker on a port of 127.0.0.1 with its store in `folder`."""

    folder: Path
    command: Callable[[Path, int], Sequence[str]]  # writes the configuration, answers the command line
    port: int = 0  # from the first start on, the same one
    _process: mosquitto.ServerProcess | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.alive()

    @property
    def log(self) -> str:
        """What it has written to stdout and stderr."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _starting(self) -> Iterator[float]:
        """Raises RuntimeError with its last words."""
        if self.running:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        process = mosquitto.ServerProcess(self.command(self.folder, self.port), self.folder / "log")
        self._process, deadline = process, time.monotonic() + START_S_MAX
        while process.alive() and time.monotonic() < deadline:
            if _lets_in(self.host, self.port):
                return
            yield PROBE_S
        self.kill()
        raise RuntimeError(f"the broker did not start within {START_S_MAX:.0f} s; it said: {self.log[-2000:]}")

    def close(self) -> None:
        """End it and remove its store. May be called twice."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end(number, STOP_S_MAX)


AnyBroker = RealBroker | Broker


def _lets_in(host: str, port: int) -> bool:
    """Whether it answers a CONNECT: some listen before they are ready."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1) as link:
        link.settimeout(5)
        link.sendall(_CONNECT)
        return link.recv(1) == b"\x20"
    return False


@dataclass(frozen=True)
class Make:
    """One make of broker. `configured` writes the configuration of a broker into a folder and answers its command
    line; `as_delivered` says that the broker's own limits are wanted, not those of docs/brokers.md."""

    name: str
    version: str
    build: Sequence[Sequence[str]] = ()  # commands, with {here} and {cache}
    configured: Callable[[Path, Path, int, bool], Sequence[str]] | None = None
    sources: Path | None = None
    endpoint: Mapping[str, Any] = field(default_factory=dict)  # settings of the transport that it needs

    def prepare(self) -> Path:
        """Build it, unless that was done before; of runs side by side one builds, and the others wait. Raises
        Missing."""
        cache = CACHE / f"{self.name}-{self.version}"
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            built, digest = cache / "built", self._digest()
            if not built.exists() or built.read_text() != digest:
                cache.mkdir(exist_ok=True)
                for command in self.build:
                    self._run([part.format(here=self.sources, cache=cache) for part in command], cache)
                built.write_text(digest)
        return cache

    def broker(self, folder: Path, *, as_delivered: bool = False) -> AnyBroker:
        """A persistent one, not started."""
        assert self.configured is not None
        cache, configured = self.prepare(), self.configured
        return RealBroker(folder, lambda folder, port: configured(cache, folder, port, as_delivered))

    def _digest(self) -> str:
        digest = hashlib.blake2b(json.dumps(self.build).encode())
        for path in sorted(self.sources.rglob("*")) if self.sources is not None else ():
            if path.is_file():
                digest.update(path.read_bytes())
        return digest.hexdigest()

    def _run(self, command: list[str], cache: Path) -> None:
        if shutil.which(command[0]) is None:
            raise Missing(f"{self.name} {self.version}: `{command[0]}` is not installed, which builds it")
        environment = os.environ | {"GOBIN": str(cache), "GOFLAGS": "-trimpath", "CARGO_TARGET_DIR": str(cache)}
        try:
            ran = subprocess.run(
                command,
                cwd=self.sources or cache,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=BUILD_S_MAX,
            )
        except subprocess.TimeoutExpired:
            raise Missing(f"{self.name} {self.version}: `{command[0]}` took more than {BUILD_S_MAX:.0f} s") from None
        if ran.returncode != 0:
            said = (ran.stdout + ran.stderr).strip()[-1500:]
            raise Missing(f"{self.name} {self.version}: `{' '.join(command)}` said: {said}")


class Mosquitto(Make):
    """The one of the system."""

    def prepare(self) -> Path:
        if mosquitto.find() is None:
            raise Missing("mosquitto: not installed (apt-get install mosquitto)")
        return CACHE

    def broker(self, folder: Path, *, as_delivered: bool = False) -> AnyBroker:
        limits = ["max_queued_messages 1000", "max_inflight_messages 20"] if as_delivered else []
        return Broker(persistent=True, settings=limits)


def _mosquitto_version() -> str:
    binary = mosquitto.find()
    if binary is None:
        return "none"
    said = subprocess.run([binary, "-h"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"version (\S+)", said)
    return found[1] if found is not None else "unknown"


def _hivemq(cache: Path, folder: Path, port: int, as_delivered: bool) -> Sequence[str]:
    limits = f"""
    <mqtt>
        <queued-messages><max-queue-size>{QUEUED_MAX}</max-queue-size></queued-messages>
        <receive-maximum><server-receive-maximum>1024</server-receive-maximum></receive-maximum>
    </mqtt>"""
    (folder / "config.xml").write_text(f"""<?xml version="1.0"?>
<hivemq>
    <listeners>
        <tcp-listener><port>{port}</port><bind-address>127.0.0.1</bind-address></tcp-listener>
    </listeners>{"" if as_delivered else limits}
    <persistence><mode>file</mode></persistence>
    <anonymous-usage-statistics><enabled>false</enabled></anonymous-usage-statistics>
</hivemq>
""")
    for name in ("data", "extensions"):
        (folder / name).mkdir(exist_ok=True)
    return _java(cache, folder)


def _artemis(cache: Path, folder: Path, port: int, as_delivered: bool) -> Sequence[str]:
    (folder / "broker.xml").write_text(f"""<?xml version="1.0"?>
<configuration xmlns="urn:activemq">
    <core xmlns="urn:activemq:core">
        <name>artemis</name>
        <persistence-enabled>true</persistence-enabled>
        <security-enabled>false</security-enabled>
        <journal-type>NIO</journal-type>
        <bindings-directory>{folder}/bindings</bindings-directory>
        <journal-directory>{folder}/journal</journal-directory>
        <large-messages-directory>{folder}/large</large-messages-directory>
        <paging-directory>{folder}/paging</paging-directory>
        <wildcard-addresses>
            <delimiter>/</delimiter>
            <any-words>#</any-words>
            <single-word>+</single-word>
        </wildcard-addresses>
        <acceptors>
            <acceptor name="mqtt">tcp://127.0.0.1:{port}?protocols=MQTT</acceptor>
        </acceptors>
    </core>
</configuration>
""")
    return _java(cache, folder)


def _java(cache: Path, folder: Path) -> Sequence[str]:
    opens = [
        f"--add-opens=java.base/{name}=ALL-UNNAMED"
        for name in ("java.lang", "java.nio", "sun.nio.ch", "jdk.internal.misc")
    ]
    opens += ["--add-opens=jdk.management/com.sun.management.internal=ALL-UNNAMED"]
    options = ["-Xmx768m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *opens]
    return ["java", *options, "-cp", f"{cache}/classes:{cache}/lib/*", "Main", str(folder)]


def _mochi(cache: Path, folder: Path, port: int, as_delivered: bool) -> Sequence[str]:
    settings = {
        "listeners": [{"type": "tcp", "id": "tcp", "address": f"127.0.0.1:{port}"}],
        "hooks": {"auth": {"allow_all": True}, "storage": {"badger": {"path": str(folder / "store")}}},
        "logging": {"level": "WARN"},
    }
    if not as_delivered:
        settings["options"] = {
            "capabilities": {
                "maximum_clients": 1_000_000,
                "maximum_message_expiry_interval": 0,  # else messages without a ttl are given this one
                "maximum_client_writes_pending": QUEUED_MAX,
                "maximum_session_expiry_interval": 0xFFFF_FFFF,
                "receive_maximum": 1024,
                "maximum_inflight": 65_535,
                "topic_alias_maximum": 65_535,
                "shared_sub_available": 1,
                "minimum_protocol_version": 3,
                "maximum_qos": 2,
                "retain_available": 1,
                "wildcard_sub_available": 1,
                "sub_id_available": 1,
                # else PUBACK has the user properties of its PUBLISH, which paho does not read
                "compatibilities": {"no_inherited_properties_on_ack": True},
            }
        }
    (folder / "config.yaml").write_text(json.dumps(settings, indent=1))  # it takes JSON, too
    return [str(cache / "docker"), "--config", str(folder / "config.yaml")]


def _rumqttd(cache: Path, folder: Path, port: int, as_delivered: bool) -> Sequence[str]:
    payload, inflight = (20_480, 100) if as_delivered else (PACKET_BYTES_MAX, 1_000)
    (folder / "rumqttd.toml").write_text(f"""
id = 0
[router]
id = 0
max_connections = 1000
max_outgoing_packet_count = 200
max_segment_size = 104857600
max_segment_count = 10
[v5.1]
name = "v5"
listen = "127.0.0.1:{port}"
next_connection_delay_ms = 1
[v5.1.connections]
connection_timeout_ms = 60000
max_payload_size = {payload}
max_inflight_count = {inflight}
dynamic_filters = true
""")
    return [str(cache / "debug" / "rumqttd-of-tests"), str(folder / "rumqttd.toml")]


def _rmqtt(cache: Path, folder: Path, port: int, as_delivered: bool) -> Sequence[str]:
    limits = [] if as_delivered else [str(QUEUED_MAX), str(PACKET_BYTES_MAX)]
    return [str(cache / "debug" / "rmqtt-of-tests"), str(port), *limits]


_MAVEN: Final = (
    ("java", "-version"),
    ("mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory={cache}/lib", "-DincludeScope=runtime"),
    ("javac", "-cp", "{cache}/lib/*", "-d", "{cache}/classes", "{here}/Main.java"),
)
_CARGO: Final = (("cargo", "build", "--locked", "--quiet"),)
_MOCHI: Final = "github.com/mochi-mqtt/server/v2/cmd/docker@v2.7.9"

MAKES: Final = {
    make.name: make
    for make in (
        Mosquitto("mosquitto", _mosquitto_version()),
        Make("hivemq", "2024.3", _MAVEN, _hivemq, HERE / "hivemq"),
        Make("artemis", "2.40.0", _MAVEN, _artemis, HERE / "artemis", {"in_flight_max": 1}),
        Make("mochi", "2.7.9", (("go", "install", _MOCHI),), _mochi, endpoint={"receive_maximum": 65_535}),
        Make("rumqttd", "0.20.0", _CARGO, _rumqttd, HERE / "rumqttd", {"sys_topics": False}),
        Make("rmqtt", "0.24.0", _CARGO, _rmqtt, HERE / "rmqtt"),
    )
}
