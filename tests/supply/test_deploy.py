"""What is in deploy/: nobody unknown gets in, nothing runs with more than it needs, and the script's certificates work
for real."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from streamer import building
from streamer import config as configs
from streamer.commands.terminal import EXIT_CONFIG
from tests.tiers import full
from tools.broker import Broker
from transports import plugin
from transports.mqtt5 import Mqtt5Config, Mqtt5Transport
from transports.ports import free_port
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder
from uprotocol.status import UStatusError
from uprotocol.transport import LocalUriProvider, UTransport
from uprotocol.v1.umessage_pb2 import UMessage

ROOT: Final = Path(__file__).resolve().parents[2]
DEPLOY: Final = ROOT / "deploy"
COMPOSE: Final[dict[str, Any]] = yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text())
CLOUD: Final = tomllib.loads((DEPLOY / "docker/cloud.toml").read_text())
MOSQUITTO: Final = [
    line.split(maxsplit=1) for line in (DEPLOY / "mosquitto/mosquitto.conf").read_text().splitlines() if line.strip()
]
EXAMPLES: Final = sorted(
    path for name in ("vehicle-cloud", "following") for path in (ROOT / "examples" / name).rglob("*.toml")
)
UNIT: Final = DEPLOY / "systemd/up-streamer.service"
EXPOSURE_MAX: Final = 2.0
DEADLINE_S: Final = 60

# Who can connect from elsewhere


def test_nobody_unknown_reaches_what_the_containers_publish() -> None:
    """Each published port, and what demands a certificate there."""
    published = {port for service in COMPOSE["services"].values() for port in service.get("ports", [])}
    assert published == {"8883:8883", "7447:7447"}
    broker = {words[0]: words[1] for words in MOSQUITTO if words[0] != "#"}
    assert [words[1] for words in MOSQUITTO if words[0] == "listener"] == ["8883"]
    assert (broker["require_certificate"], broker["use_identity_as_username"], broker["allow_anonymous"]) == (
        "true",
        "true",
        "false",
    )
    zenoh = next(one["settings"] for one in CLOUD["endpoint"] if one["transport"] == "zenoh")
    assert zenoh["listen"] == ["tls/0.0.0.0:7447"]
    assert zenoh["tls"]["mutual"] is True
    control = zenoh["settings"]["access_control"]
    assert (control["enabled"], control["default_permission"]) == (True, "deny")


def name_of(path: Path) -> str:
    return "/".join(path.parts[-2:])


@pytest.mark.parametrize("path", sorted([*DEPLOY.glob("docker/*.toml"), *EXAMPLES]), ids=name_of)
def test_an_admin_port_is_for_its_own_machine(path: Path) -> None:
    admin = tomllib.loads(path.read_text())["streamer"].get("admin", "127.0.0.1:0")
    assert admin.startswith("127.0.0.1:")


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_an_example_listens_to_its_own_machine_alone(path: Path) -> None:
    """It has no certificates: who tries it lets nobody in."""
    settings = [one.get("settings", {}) for one in tomllib.loads(path.read_text())["endpoint"]]
    listening = [address for one in settings for address in one.get("listen", [])]
    assert all(address.startswith("tcp/127.0.0.1:") for address in listening), listening
    # without an address to listen at, a Zenoh peer or router listens at every one of the machine
    modes = [(one["mode"], bool(one.get("listen"))) for one in settings if "mode" in one and "host" not in one]
    assert all(mode == "client" or listens for mode, listens in modes), modes


# Who follows whom


def test_the_gateways_that_follow_name_each_other_and_meet() -> None:
    """Each file is right by itself; what they say of each other is not looked at when one is read."""
    hub, vehicle = (configs.load(ROOT / f"examples/following/{name}.toml") for name in ("hub", "vehicle"))
    (follow,) = hub.follow
    (link,) = (one for one in hub.endpoint if one.name == follow.endpoint)
    (uplink,) = (one for one in vehicle.endpoint if one.followed_by)
    assert follow.service == f"//{vehicle.authority}/4/1/0"
    assert uplink.followed_by == f"//{hub.authority}/4/1/0"
    assert uplink.settings["connect"] == link.settings["listen"]
    for config in (hub, vehicle):
        followed_for_nothing = building.notes_of(
            config, building.endpoints_of(config), map(building.rule_of, config.rules)
        )
        assert list(followed_for_nothing) == []


def test_no_container_runs_as_root_or_with_rights_to_spare() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["read_only"] is True, name
        assert not service.get("privileged"), name
    assert COMPOSE["services"]["broker"]["user"] == "1883:1883"
    last_stage = dockerfile()[[word for word, _ in dockerfile()].index("USER") :]
    assert last_stage[0][1] == "10001"
    assert [word for word, _ in last_stage].count("USER") == 1
    assert ("USER", "10001") in dockerfile()
    assert "--uid 10001" in (DEPLOY / "docker/Dockerfile").read_text()


# What the image is made of


def dockerfile() -> list[tuple[str, str]]:
    text = (DEPLOY / "docker/Dockerfile").read_text().replace("\\\n", "")
    return [
        (line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line and not line.startswith("#")
    ]


def test_an_image_is_made_of_the_wheel_and_the_lock() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*", "everything stays out, but for ..."
    let_in = [line.removeprefix("!") for line in lines[1:]]
    copied = [
        path for word, rest in dockerfile() if word == "COPY" and "--from" not in rest for path in rest.split()[:-1]
    ]
    assert sorted(let_in) == sorted(copied) == ["deploy/requirements.lock", "dist/*.whl"]
    for path in ("uprotocol/uri.py", ".git/config", "deploy/docker/certs/ca.key"):
        assert not any(fnmatch(path, pattern) for pattern in let_in)
    installs = [rest for word, rest in dockerfile() if word == "RUN" and "pip install" in rest]
    assert installs
    for step in re.findall(r"pip install[^&]*", " ".join(installs)):
        assert "--require-hashes" in step or "--no-deps" in step


def test_an_image_is_made_on_any_machine() -> None:
    text = (DEPLOY / "docker/Dockerfile").read_text()
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert not re.search(r"amd64|arm64|x86_64|aarch64|--platform", code)


@full
def test_the_steps_of_the_image_make_a_gateway(tmp_path: Path) -> None:
    """Run by a shell in a folder, without a container engine; needs a package index."""
    source, target = tmp_path / "src", tmp_path / "opt"
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(source), str(ROOT)]
    subprocess.run(build, env=os.environ | {"UP_STREAMER_COMPILED": "0"}, check=True, capture_output=True, timeout=200)
    shutil.copy(ROOT / "deploy/requirements.lock", source)
    steps = dockerfile()
    for word, rest in steps[: [number for number, (word, _) in enumerate(steps) if word == "FROM"][1]]:
        if word == "RUN":
            step = rest.replace("/opt/up-streamer", str(target)).replace("/src", str(source))
            step = step.replace("python -m venv", f"{sys.executable} -m venv")
            subprocess.run(["sh", "-euc", step], check=True, capture_output=True, timeout=500)
    (entry,) = (json.loads(rest) for word, rest in steps if word == "ENTRYPOINT")
    command = [entry[0].replace("/opt/up-streamer", str(target)), "--version"]
    shown = subprocess.run(command, cwd=tmp_path, env={}, check=True, capture_output=True, text=True, timeout=100)
    assert shown.stdout.startswith("up-streamer ")


def test_the_health_check_asks_the_port_that_the_configuration_opens() -> None:
    (check,) = (rest for word, rest in dockerfile() if word == "HEALTHCHECK")
    assert f"http://{CLOUD['streamer']['admin']}/healthz" in check


# The certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        if os.environ.get("CI", "").lower() in ("true", "1"):
            pytest.fail("openssl is not installed")
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certs")
    make(folder, "vehicle1", "9001")
    return folder


def make(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    command = [str(DEPLOY / "docker/make-certs.sh"), "--out", str(folder), *names]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)


def test_the_containers_get_what_the_script_makes(certificates: Path) -> None:
    mounted = {
        volume.split(":")[0].removeprefix("./certs/")
        for service in COMPOSE["services"].values()
        for volume in service["volumes"]
        if volume.startswith("./certs")
    }
    assert mounted == {"ca.crt", "broker.crt", "broker.key", "backend.crt", "backend.key"}
    assert mounted <= {path.name for path in certificates.iterdir()}
    assert not [path.name for path in certificates.glob("*.key") if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)]


def test_a_second_run_adds_and_changes_nothing(certificates: Path) -> None:
    before = {path.name: path.read_bytes() for path in certificates.iterdir() if path.suffix in (".crt", ".key")}
    make(certificates, "vehicle1", "vehicle2")
    after = {path.name: path.read_bytes() for path in certificates.iterdir() if path.suffix in (".crt", ".key")}
    assert set(after) - set(before) <= {"vehicle2.crt", "vehicle2.key"}
    assert before.items() <= after.items()
    verify = ["openssl", "verify", "-CAfile", str(certificates / "ca.crt"), str(certificates / "vehicle2.crt")]
    assert subprocess.run(verify, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["broker", "ca", "backend", "a b", "../x", ""])
def test_a_client_is_nobody_else(tmp_path: Path, name: str) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        make(tmp_path / "certs", name)
    assert not (tmp_path / "certs").exists()


class Heard:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[UMessage] = asyncio.Queue()

    def on_receive(self, message: UMessage) -> None:
        self.messages.put_nowait(message)


async def crosses(sender: UTransport, receiver: UTransport, source: str = "//vehicle1/8001/1/8001") -> None:
    """A notification from `source` to `backend`, sent until it has come: a network may need a moment to know who
    listens."""
    heard = Heard()
    message = UMessageBuilder.notification(uris.parse(source), uris.parse("//backend/8001/1/0")).build()
    await receiver.register_listener(uris.ANY, heard, uris.pattern("backend"))
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await sender.send(message)
            try:
                assert (await asyncio.wait_for(heard.messages.get(), 1)).attributes.id == message.attributes.id
            except TimeoutError:
                continue
            return


@pytest.mark.broker
async def test_the_broker_takes_them_and_nobody_without(certificates: Path, make_broker: Callable[..., Broker]) -> None:
    broker = make_broker(
        certificates=(certificates / "ca.crt", certificates / "broker.crt", certificates / "broker.key"),
        require_client_certificate=True,
        settings=["use_identity_as_username true", "allow_anonymous false", f"acl_file {DEPLOY / 'mosquitto/acl'}"],
    )

    def end(name: str, **tls: str) -> Mqtt5Transport:
        tls = {key: str(certificates / file) for key, file in tls.items()}
        given = {
            "host": "localhost",
            "port": broker.port,
            "mode": "off-vehicle",
            "client_id": name,
            "tls": tls,
            "connect_timeout_ms": 20_000,
        }
        return Mqtt5Transport(Mqtt5Config.model_validate(given), LocalUriProvider(name, 1, 1))

    own = {
        name: {"ca_file": "ca.crt", "cert_file": f"{name}.crt", "key_file": f"{name}.key"}
        for name in ("vehicle1", "backend")
    }
    async with end("vehicle1", **own["vehicle1"]) as vehicle, end("backend", **own["backend"]) as backend:
        await crosses(vehicle, backend)
    with pytest.raises(UStatusError):
        async with end("vehicle1", ca_file="ca.crt"):
            pass


async def test_the_gateway_takes_an_application_on_zenoh_and_nobody_else(certificates: Path) -> None:
    """A vehicle of the fleet has a certificate of the same CA: with it nobody speaks for `backend`."""
    port = free_port()
    written = next(one["settings"] for one in CLOUD["endpoint"] if one["transport"] == "zenoh")
    here = {
        key: value.replace("/certs", str(certificates)) if isinstance(value, str) else value
        for key, value in written["tls"].items()
    }
    router = plugin.create(
        "zenoh", written | {"listen": [f"tls/127.0.0.1:{port}"], "tls": here}, LocalUriProvider("backend", 4, 1)
    )

    def client(name: str = "", connect_timeout_ms: int = 20_000) -> UTransport:
        files = {
            key: str(certificates / f"{name}.{end}") for key, end in (("certificate", "crt"), ("private_key", "key"))
        }
        settings = {
            "mode": "client",
            "connect": [f"tls/localhost:{port}"],
            "connect_timeout_ms": connect_timeout_ms,
            "tls": {"root_ca": str(certificates / "ca.crt"), **(files if name else {})},
        }
        return plugin.create("zenoh", settings, LocalUriProvider("backend", 1, 1))

    async with router:
        heard = Heard()
        await router.register_listener(uris.ANY, heard)
        async with client("9001") as application, client("vehicle1") as vehicle:
            for source in ("//backend/9001/1/8001", "//backend/0/3/8000", "//vehicle1/8001/1/8001"):
                await vehicle.send(UMessageBuilder.publish(uris.parse(source)).build())
            await application.send(UMessageBuilder.publish(uris.parse("//backend/0/3/8000")).build())
            await crosses(application, router, "//backend/9001/1/8001")
        assert heard.messages.empty()
        with pytest.raises(UStatusError):
            async with client(connect_timeout_ms=500):
                pass


# systemd


def unit(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_the_unit_is_not_exposed() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    command = ["systemd-analyze", "security", "--no-pager", "--offline=true", str(UNIT)]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    found = re.search(r"Overall exposure level for up-streamer\.service: ([\d.]+)", said.stdout)
    assert found, said.stderr
    assert float(found[1]) <= EXPOSURE_MAX
    assert "Unknown" not in said.stderr, said.stderr


def test_the_unit_gets_our_state_and_does_not_restart_with_a_wrong_file() -> None:
    assert unit("Type") == ["notify"]
    assert int(unit("WatchdogSec")[0]) > 0
    assert unit("RestartPreventExitStatus") == [str(EXIT_CONFIG)]
    assert not unit("ExecStartPre"), "its exit code would be another one"
    assert int(unit("RestartSec")[0]) > 1


def test_the_paths_of_the_unit_and_the_docs_agree() -> None:
    """What LoadCredential hands over has this path for a system service, as systemd.exec(5) says."""
    assert unit("StateDirectory") == ["up-streamer"]
    assert '"/var/lib/up-streamer"' in UNIT.read_text()
    docs = (DEPLOY / "README.md").read_text()
    assert re.search(r"LoadCredential=", UNIT.read_text())
    (text,) = re.findall(r"```toml\n(.*?)```", docs, re.DOTALL)
    settings = configs.loads(text, "deploy/README.md").endpoint[0].settings
    assert settings["tls"]["key_file"] == "/run/credentials/up-streamer.service/vehicle1.key"
    assert "/run/credentials/up-streamer.service/" in UNIT.read_text()
