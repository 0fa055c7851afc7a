"""The streamer under test: its configuration for one leg, and its process.

interest: a subscriber beyond each destination wants the topics
endpoints: in (device1) -> out (device2), out3 (device3), ...      one rule for each destination
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from campaigns.bench import networks, wire
from campaigns.bench.networks import Address
from campaigns.bench.processes import READY_TIMEOUT_S, Child
from uprotocol import uri as uris

READY_WORD = "ready"  # in the line that `up-streamer run` prints when it is ready
MEMORY_MIB: Final = 8_192  # limits.memory_mib if a leg has more topics than the default allows one authority
TOPICS_OF_DEFAULT_MAX: Final = 4_000


@dataclass(frozen=True)
class Scene:
    """The differences between the legs. `sections` are further configuration keys by section."""

    volatile: bool = False
    topics: int = 1
    # the interest: True names each topic, False uses one pattern for all of them
    exact: bool = True
    embedded: bool = False  # a uSubscription inside the streamer instead of a file
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    out_settings: Mapping[str, Any] = field(default_factory=dict)  # further settings of the destinations' transports
    start_timeout_s: float = READY_TIMEOUT_S


def authority(number: int) -> str:
    """Returns the authority of the destination `number`, from 0."""
    return wire.EGRESS_AUTHORITY if number == 0 else f"device{number + 2}"


def settings(address: Address) -> dict[str, object]:
    """Returns a transport's settings for its network."""
    if address.network == "zenoh":
        return {"listen": [f"tcp/127.0.0.1:{address.number}"]}
    if address.network == "mqtt":
        return {"host": "127.0.0.1", "port": address.number}
    return {"domain_id": address.number, "cyclone_xml": networks.DDS_LOOPBACK}


def keys(head: str, values: Mapping[str, Any]) -> str:
    """Returns a TOML table; JSON's texts, numbers and lists are valid TOML."""
    return "\n".join([head, *(f"{key} = {json.dumps(value)}" for key, value in values.items())])


def endpoint(
    name: str,
    authority: str,
    address: Address,
    usubscription: str,
    more: Mapping[str, Any],
    followed_by: str | None = None,
) -> str:
    """`more` are further settings of the transport; `followed_by` is the streamer that follows this endpoint."""
    transport = address.network.replace("mqtt", "mqtt5")
    by = {} if followed_by is None else {"followed_by": followed_by}
    values = {"name": name, "transport": transport, "authorities": [authority], "usubscription": usubscription, **by}
    return "\n".join([keys("[[endpoint]]", values), keys("[endpoint.settings]", {**settings(address), **more})])


def write_interest(path: Path, scene: Scene, destinations: int = 1) -> Path:
    """Writes the subscriptions in the JSON format of the Rust streamer."""
    topics = map(wire.topic, range(scene.topics)) if scene.exact else [wire.EVERY_TOPIC]
    subscribers = [
        uris.format(uris.uri(authority(number), wire.SUBSCRIBER.ue_id, 1, 0)) for number in range(destinations)
    ]
    path.write_text(json.dumps({uris.format(topic): subscribers for topic in topics}))
    return path


def write_config(directory: Path, source: Address, *destinations: Address, scene: Scene) -> Path:
    """Writes the TOML file of a streamer that forwards the topics from `source` to all `destinations`."""
    outs = ["out", *(f"out{number + 2}" for number in range(1, len(destinations)))]
    mode = "embedded" if scene.embedded else "none"
    tables: dict[str, dict[str, Any]] = {
        "streamer": {
            "authority": wire.INGRESS_AUTHORITY,
            "data_dir": str(directory / "data"),
            "log_level": "warning",
        },
        "history": {"volatile": [uris.format(uris.ANY)]} if scene.volatile else {},
        "limits": {"memory_mib": MEMORY_MIB} if scene.topics > TOPICS_OF_DEFAULT_MAX else {},
        "usubscription": {},
    }
    if not scene.embedded:
        path = write_interest(directory / "interest.json", scene, len(destinations))
        tables["usubscription"] = {"static_file": str(path)}
    for name, values in scene.sections.items():
        tables[name] = {**tables.get(name, {}), **values}
    texts = [keys(f"[{name}]", values) for name, values in tables.items() if values]
    texts.append(endpoint("in", wire.INGRESS_AUTHORITY, source, mode, {}))
    for number, (name, address) in enumerate(zip(outs, destinations, strict=True)):
        texts.append(endpoint(name, authority(number), address, "none", scene.out_settings))
        texts.append(f"[[rule]]\nfrom = 'in'\nto = '{name}'")
    config = directory / "up-streamer.toml"
    config.write_text("\n\n".join(texts) + "\n")
    return config


def start(directory: Path, source: Address, *destinations: Address, scene: Scene, log_dir: Path) -> Child:
    """Starts a streamer and waits until it is ready. Raises BenchError with the end of its log."""
    config = write_config(directory, source, *destinations, scene=scene)
    child = Child.module("streamer", "streamer.commands.cli", "run", "--config", config, log_dir=log_dir)
    try:
        return child.wait_for(READY_WORD, scene.start_timeout_s)
    except BaseException:
        child.close()
        raise
