"""The streamer under test: its configuration for one leg, and its process.

static interest: TOPIC is wanted by SUBSCRIBER      endpoints: in (device1) -> out (device2)      one rule
"""

from __future__ import annotations

import json
from pathlib import Path

from bench import networks, wire
from bench.networks import Address
from bench.processes import Child
from uprotocol import uri as uris

READY_WORD = "ready"  # in the line on stdout by which `up-streamer run` says that it forwards


def settings(address: Address) -> dict[str, object]:
    """A transport's settings in the configuration file: where its network is."""
    if address.network == "zenoh":
        return {"listen": [f"tcp/127.0.0.1:{address.number}"]}
    if address.network == "mqtt":
        return {"host": "127.0.0.1", "port": address.number}
    return {"domain_id": address.number, "cyclone_xml": networks.DDS_LOOPBACK}


def _endpoint(name: str, authority: str, address: Address) -> str:
    lines = [f"[[endpoint]]\nname = '{name}'", f"transport = '{address.network.replace('mqtt', 'mqtt5')}'"]
    lines += [f"authorities = ['{authority}']", "usubscription = 'none'", "[endpoint.settings]"]
    # JSON strings are TOML's
    return "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in settings(address).items())])


def write_config(directory: Path, source: Address, destination: Address, *, volatile: bool) -> Path:
    """The TOML file for a streamer that forwards TOPIC from `source` to `destination`."""
    interest = directory / "interest.json"
    interest.write_text(json.dumps({uris.format(wire.TOPIC): [uris.format(wire.SUBSCRIBER)]}))
    sections = [
        f"[streamer]\nauthority = '{wire.INGRESS_AUTHORITY}'\ndata_dir = "
        f"{json.dumps(str(directory / 'data'))}\nlog_level = 'warning'",
        _endpoint("in", wire.INGRESS_AUTHORITY, source),
        _endpoint("out", wire.EGRESS_AUTHORITY, destination),
        "[[rule]]\nfrom = 'in'\nto = 'out'",
        f"[usubscription]\nstatic_file = {json.dumps(str(interest))}",
    ]
    if volatile:
        sections.append(f"[history]\nvolatile = ['{uris.format(uris.ANY)}']")
    path = directory / "up-streamer.toml"
    path.write_text("\n\n".join(sections) + "\n")
    return path


def start(directory: Path, source: Address, destination: Address, *, volatile: bool, log_dir: Path) -> Child:
    """A streamer that is ready to forward. Raises BenchError with the end of its log."""
    config = write_config(directory, source, destination, volatile=volatile)
    child = Child.module("streamer", "streamer.commands.cli", "run", "--config", config, log_dir=log_dir)
    try:
        return child.wait_for(READY_WORD)
    except BaseException:
        child.close()
        raise
