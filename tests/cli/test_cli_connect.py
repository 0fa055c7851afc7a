"""`up-streamer check --connect`: what it says of networks that can't be used, and what it needs of those that can."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner, Result

from streamer import building
from streamer import config as configs
from streamer.commands import cli, connect
from streamer.operating import control
from tests.certificates import DAY, TestAuthority
from tools.broker import Broker
from transports.ports import free_port
from uprotocol import uri as uris
from uprotocol.transport import ProbeResult, ProbeVerdict, UTransport
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

MakeBroker = Callable[..., Broker]
Check = Callable[..., Result]

HEAD = """[streamer]
authority = "vin1"
data_dir = "{folder}/data"
[[endpoint]]
name = "home"
transport = "local"
authorities = ["vin1"]
"""
OFFBOARD = """[[endpoint]]
name = "offboard"
transport = "mqtt5"
authorities = ["backend"]
usubscription = "none"
[endpoint.settings]
mode = "off-vehicle"
client_id = "vin1-gateway"
username = "vin1"
password = "{password}"
host = "{host}"
port = {port}
"""
USERS = {"vin1": "secret", "backend": "secret"}
ACL = "pattern write %u/+\npattern read +/%u\n"


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """`check(toml)` runs the command; the text is that of the endpoints beside `home`."""

    def run(text: str = "", *options: str) -> Result:
        path = tmp_path / "gateway.toml"
        path.write_text(HEAD.format(folder=tmp_path) + text)
        given = ["check", "-c", str(path), "--connect", *options]
        result = CliRunner(env={"COLUMNS": "60", "TERM": "dumb"}).invoke(cli.app, given)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return result

    return run


def offboard(port: int, host: str = "127.0.0.1", password: str = "secret", more: str = "") -> str:
    return OFFBOARD.format(port=port, host=host, password=password) + more


def line(result: Result, beginning: str) -> str:
    """The line that begins so, as it was printed."""
    found = [one for one in result.stdout.splitlines() if one.startswith(beginning)]
    assert found, result.output
    return found[0]


@pytest.mark.broker
def test_a_network_that_can_be_used(make_broker: MakeBroker, tmp_path: Path, check: Check) -> None:
    authority = TestAuthority(tmp_path)
    broker = make_broker(users=USERS, acl=ACL, certificates=(authority.ca, *authority.issue("localhost", 100 * DAY)))
    result = check(offboard(broker.port, more=f'tls = {{ ca_file = "{authority.ca}" }}\n'))
    assert result.exit_code == 0, result.output
    assert line(result, "ok home: ") == "ok home: within the process of the streamer"
    assert f"tls.ca_file {authority.ca} is valid until 20" in line(result, "ok offboard: tls.ca_file")
    assert "its certificate is valid until 20" in line(result, "ok offboard: TLSv1.3 with 127.0.0.1:")
    assert line(result, "ok offboard: login") == "ok offboard: login as vin1"
    assert line(result, "ok offboard: may read") == "ok offboard: may read +/vin1"
    assert line(result, "ok offboard: may write") == "ok offboard: may write vin1/backend"
    assert line(result, "? offboard: cannot be known: whether client_id vin1-gateway is in use")
    assert not (tmp_path / "data").exists()


@pytest.mark.broker
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("host", "FAIL offboard: no connection to the broker at no-such-host.invalid:"),
        ("port", "FAIL offboard: no connection to the broker at 127.0.0.1:"),
        ("ca", "FAIL offboard: the certificate of the broker at 127.0.0.1:"),
        ("expired", "FAIL offboard: the certificate of the broker at 127.0.0.1:"),
        ("no tls", "FAIL offboard: the broker at 127.0.0.1:"),
        ("no certificate", "FAIL offboard: TLS with the broker at 127.0.0.1:"),
        ("password", "FAIL offboard: login as vin1: Not authorized"),
        ("write", "FAIL offboard: may not write vin1/backend (Not authorized)"),
        ("read", "FAIL offboard: may not read +/vin1"),
    ],
)
def test_what_is_wrong_is_said(make_broker: MakeBroker, tmp_path: Path, check: Check, wrong: str, said: str) -> None:
    authority, other = TestAuthority(tmp_path), TestAuthority(tmp_path, "other")
    ends = -DAY if wrong == "expired" else timedelta(days=100)
    write = "user vin1\ntopic write vin1/vin1\ntopic read +/vin1\n"
    rules = {"write": write, "read": "pattern write %u/+\n"}.get(wrong, ACL)
    broker = make_broker(
        users=USERS,
        acl=rules,
        certificates=(authority.ca, *authority.issue("localhost", ends)),
        require_client_certificate=wrong == "no certificate",
    )
    tls = f'tls = {{ ca_file = "{(other if wrong == "ca" else authority).ca}" }}\n' if wrong != "no tls" else ""
    host = "no-such-host.invalid" if wrong == "host" else "127.0.0.1"
    port = free_port() if wrong == "port" else broker.port
    result = check(offboard(port, host, "false" if wrong == "password" else "secret", tls), "--timeout", "30")
    assert result.exit_code == 1, result.output
    assert line(result, said)
    if wrong == "expired":
        assert "expired" in line(result, said)


@pytest.mark.broker
def test_an_address_that_may_not_be_written(make_broker: MakeBroker, check: Check) -> None:
    """The gateway forwards for an authority that its login does not cover."""
    broker = make_broker(users=USERS, acl=ACL)
    ecu = '[[endpoint]]\nname = "bus"\ntransport = "local"\nauthorities = ["ecu3", "*.ecu4"]\nusubscription = "none"\n'
    result = check(offboard(broker.port) + ecu, "--json")
    assert result.exit_code == 1
    found = [json.loads(one) for one in result.stdout.splitlines()]
    assert {tuple(one) for one in found} == {("status", "where", "what")}
    said = {(one["status"], one["what"]) for one in found if one["where"] == "offboard"}
    assert ("FAIL", "may not write ecu3/backend (Not authorized)") in said
    assert ("FAIL", "may not write up-streamer-check.ecu4/backend (Not authorized)") in said
    assert ("ok", "may write vin1/backend") in said


@pytest.mark.broker
def test_a_suffix_is_part_of_the_names(make_broker: MakeBroker, check: Check) -> None:
    broker = make_broker()
    text = offboard(broker.port).replace('usubscription = "none"', 'usubscription = "none"\nsuffix = "fleet7"')
    result = check(text)
    assert line(result, "ok offboard: may write") == "ok offboard: may write vin1.fleet7/backend"
    assert line(result, "ok offboard: may read") == "ok offboard: may read +/vin1.fleet7"


def test_a_network_that_does_not_answer(check: Check) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        result = check(offboard(silent.getsockname()[1]), "--timeout", "0.5")
    assert result.exit_code == 1
    assert line(result, "FAIL offboard: no complete answer within 0.5 s (--timeout)")


def test_a_wrong_file_is_still_a_mistake(check: Check) -> None:
    assert check("nonsense = 1\n").exit_code == 78


def test_taking_over_needs_a_connection() -> None:
    result = CliRunner().invoke(cli.app, ["check", "-c", "gateway.toml", "--take-over"])
    assert result.exit_code == 1
    assert "give both" in result.stderr


# A streamer that runs, and this machine


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, object]:
    """The `status` of a running streamer's endpoint `offboard`; a test may change it."""
    (tmp_path / "data").mkdir()
    one: dict[str, object] = {"name": "offboard", "state": "ready", "reason": "", "connected": True, "received": 3}
    monkeypatch.setattr(control, "call", lambda folder, operation: {"endpoints": [one]})
    return one


@pytest.mark.broker
def test_the_running_streamer_is_asked(make_broker: MakeBroker, check: Check, running: dict[str, object]) -> None:
    broker = make_broker()
    result = check(offboard(broker.port), "--take-over")
    assert result.exit_code == 0, result.output
    assert line(result, "ok offboard: client_id vin1-gateway is held by the running streamer")
    assert line(result, "ok offboard: the broker delivers: the running streamer has received messages")
    running.update(state="degraded", reason="another client logs in with our client_id", connected=False, received=0)
    result = check(offboard(broker.port))
    assert result.exit_code == 1
    assert line(result, "FAIL offboard: the running streamer says degraded: another client logs in with our client_id")
    assert line(
        result, "? offboard: cannot be known: whether client_id vin1-gateway is in use: the running streamer is"
    )


def test_ports(tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = f'[http]\nlisten = "127.0.0.1:{port}"\n[grip]\npublish = "127.0.0.1:{free_port()}"\n'
        result = check(text)
        assert result.exit_code == 1
        assert line(result, f"FAIL http.listen: can't listen at 127.0.0.1:{port}: ")
        assert line(result, "ok grip.publish: 127.0.0.1:").endswith("is free")
        (tmp_path / "data").mkdir()
        monkeypatch.setattr(control, "call", lambda folder, operation: {"endpoints": []})
        result = check(text)
        assert line(result, f"ok http.listen: 127.0.0.1:{port} is in use, as it should be while the streamer runs")
        assert line(result, "FAIL grip.publish: nobody listens at 127.0.0.1:")


class _Backend(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(500 if self.path.startswith("/broken") else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def backend() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Backend) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_backends(check: Check, backend: str) -> None:
    result = check(
        '[http]\nlisten = "127.0.0.1:0"\n'
        f'[[proxy]]\nprefix = "/app"\nbackend = "{backend}"\n'
        f'[[proxy]]\nprefix = "/away"\nbackend = "http://127.0.0.1:{free_port()}"\n'
        f'[[recovery]]\ntopics = ["//vin1/8001/1/8001"]\nsettings = {{ url = "{backend}/broken" }}\n'
    )
    assert result.exit_code == 1
    assert line(result, "ok proxy /app: ").endswith("answers HTTP 404")
    assert line(result, "FAIL proxy /away: ")
    assert line(result, "FAIL recovery //vin1/8001/1/8001: ").endswith("/broken answers HTTP 500")


def test_the_clock_is_that_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        state, maxerror = 0, 20_000

        def adjtimex(self, pointer: object) -> int:
            pointer._obj.maxerror = self.maxerror  # type: ignore[attr-defined]
            return self.state

    monkeypatch.setattr(connect.ctypes, "CDLL", lambda *_, **__: Kernel())
    assert connect.clock() == ProbeResult(ProbeVerdict.OK, "synchronised, at most 0.02 s off, as the kernel says")
    monkeypatch.setattr(Kernel, "state", connect.ADJTIMEX_ERROR)
    assert connect.clock().verdict is ProbeVerdict.UNKNOWN


# Transports without a probe of their own


class Plain(UTransport):
    """Opens, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.calls = error, list[str]()

    async def open(self) -> None:
        self.calls.append("open")
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        self.calls.append("close")

    async def send_batch(self, messages: list[UMessage]) -> list[UStatus]:  # type: ignore[override]
        return []


@pytest.mark.parametrize("fault", [None, RuntimeError("broken")])
def test_a_transport_without_a_probe_is_opened_and_closed(
    check: Check, monkeypatch: pytest.MonkeyPatch, fault: Exception | None
) -> None:
    plain = Plain(fault)
    real = building.make_transport
    monkeypatch.setattr(building, "make_transport", lambda *given: plain if given[1].name == "plain" else real(*given))
    text = '[[endpoint]]\nname = "plain"\ntransport = "local"\nauthorities = ["x"]\nusubscription = "none"\n'
    result = check(text)
    assert plain.calls == ["open", "close"]
    if fault is None:
        assert line(result, "ok plain: opened, and connected")
    else:
        assert result.exit_code == 1
        assert "RuntimeError('broken')" in line(result, "FAIL plain: ")


def test_addresses_that_a_streamer_needs(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    more = '[history]\nrecord = ["//vin1/8001/1/8001"]\n'
    path.write_text(HEAD.format(folder=tmp_path) + offboard(1).replace('mode = "off-vehicle"\n', "") + more)
    config = configs.load(path)
    endpoints = building.endpoints_of(config)
    needs = connect.Needs(config, endpoints)

    def shown(name: str) -> list[str]:
        return [f"{uris.format(one)} {uris.format(two) if two else ''}" for one, two in needs.filters(endpoints[name])]

    assert "//vin1/8001/1/8001 " in [one.removeprefix("up:") for one in shown("home")]
    assert any(one.endswith("//vin1/FFFFFFFF/FF/FFFF") or "vin1" in one for one in shown("offboard"))
    assert [(uris.format(one), two) for one, two in needs.sends(endpoints["offboard"])] == [
        ("up://vin1/4/1/8001", None)
    ]
