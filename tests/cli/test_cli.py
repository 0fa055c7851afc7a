"""The command line as a person meets it: help with an example, and for whatever is wrong one sentence that says what to
do."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from storage import logs
from streamer.commands import cli, client, terminal
from streamer.walk.ledger import UNITS_PER_S
from tests.certificates import TestAuthority
from uprotocol.pacing import Pace
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

COMMANDS = [
    "run",
    "check",
    "usubscription",
    "subscribe",
    "publish",
    "call",
    "replay",
    "history",
    "subscriptions",
    "dead-letters",
    "demo",
]
NAMED = {one.name or one.callback.__name__ for one in cli.app.registered_commands if one.callback}
NAMED |= {"dead-letters"}  # a group that is a command, too
TOPIC = "//vehicle1/8001/1/8001"
ON_LOCAL = ["-t", "local", "-a", "vehicle1"]

Invoke = Callable[..., Result]

ONE = """
[streamer]
data_dir = "{folder}/data"
[[endpoint]]
name = "v"
transport = "local"
authorities = ["vehicle1"]
"""


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Invoke]:
    """`invoke("publish", ...)` in an empty folder. A traceback fails the test, whatever else it looks at."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # loggers of this process outlive the captured stderr
    interval = sys.getswitchinterval()

    def run(*arguments: str) -> Result:
        result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(
            cli.app, list(arguments), prog_name="up-streamer"
        )
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        assert "Traceback" not in result.output
        return result

    yield run
    sys.setswitchinterval(interval)


def lines_of(result: Result) -> list[Any]:
    """Every line of stdout as JSON."""
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_command_is_there(invoke: Invoke) -> None:
    shown = invoke("--help")
    assert shown.exit_code == 0
    assert set(COMMANDS) <= NAMED
    assert all(name in shown.output for name in NAMED)


def test_the_version_says_whether_the_core_is_compiled(invoke: Invoke) -> None:
    shown = invoke("--version")
    assert shown.exit_code == 0
    assert re.fullmatch(r"up-streamer \d\S+, (compiled core \(\d+ modules\)|interpreted \(.+\))\n", shown.output)


@pytest.mark.parametrize("command", sorted(NAMED))
def test_help_has_an_example(invoke: Invoke, command: str) -> None:
    shown = invoke(command, "--help")
    assert shown.exit_code == 0
    assert re.search(rf"Example: up-streamer {command}\b", shown.output)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"check", "demo", "run", "usubscription"}))
def test_what_prints_data_prints_json_if_asked(invoke: Invoke, command: str) -> None:
    assert "--json" in invoke(command, "--help").output


WRONG: list[tuple[list[str], str]] = [
    (["nonsense"], "No such command"),
    (["run"], "--config"),
    (["run", "-c", "nowhere.toml"], "can't read nowhere.toml: No such file or directory"),
    (["check", "-c", "."], "can't read .: Is a directory"),
    (["subscribe", TOPIC], "--transport NAME --authority WHO"),
    (["subscribe"], "Missing argument"),
    (["subscribe", "nonsense", *ON_LOCAL], "expected up://authority/ue_id/version/resource"),
    (["subscribe", "http://vehicle1/8001/1/8001", *ON_LOCAL], "up:"),
    (["subscribe", "//vehicle1/8001/1/7", *ON_LOCAL, "--no-usubscription"], "can match no message"),
    (["subscribe", TOPIC, "-t", "local", "-a", "Vehicle1"], "lower-case"),
    (
        ["subscribe", TOPIC, "-t", "pigeon", "-a", "vehicle1"],
        "unknown transport 'pigeon'; installed: dds, local, mqtt5, zenoh",
    ),
    (["subscribe", TOPIC, *ON_LOCAL, "-s", "bogus"], "expected KEY=VALUE, got 'bogus'"),
    (["subscribe", TOPIC, *ON_LOCAL, "-s", "netwrok=x"], "netwrok: unknown key"),
    (["subscribe", TOPIC, *ON_LOCAL, "-s", "a=2", "-s", "a.b=3"], "'a' in 'a.b=3' has been given a value already"),
    (["subscribe", TOPIC, *ON_LOCAL, "-s", "a.b=2", "-s", "a=3"], "'a' in 'a=3' has been given keys already"),
    (["subscribe", TOPIC, *ON_LOCAL, "--entity", "xyz"], "--entity is a hexadecimal number"),
    (["subscribe", TOPIC, *ON_LOCAL, "--entity", "1234567890"], "32 bits"),
    (["subscribe", TOPIC, *ON_LOCAL, "--count", "0"], "--count"),
    (["subscribe", TOPIC, "-t", "zenoh", "-a", "vehicle1"], "listen, connect"),
    (["subscribe", TOPIC, "-t", "zenoh", "-a", "v", "-s", "connect=tcp/127.0.0.1:1"], "connect: "),
    (["subscribe", TOPIC, "-t", "mqtt5", "-a", "v", "-s", "port=70000"], "port: "),
    (["subscribe", TOPIC, "-c", "one.toml", "-e", "w"], "one.toml has no endpoint 'w'; there are v"),
    (["subscribe", TOPIC, "-c", "one.toml", "-e", "v", "-t", "zenoh"], "either --config FILE or --transport NAME"),
    (["publish", TOPIC, "-t", "local", "--priority", "CS9"], "--priority is CS0 to CS6, got 'CS9'"),
    (["publish", TOPIC, "-t", "local", "--ttl-ms", "-1"], "--ttl-ms"),
    (["publish", TOPIC, "-t", "local", "--ttl-ms", "99999999999"], "ttl"),
    (["publish", TOPIC, "-t", "local", "--count", "0"], "--count"),
    (["publish", TOPIC, "-t", "local", "--hex", "xyz"], "--hex is not hexadecimal"),
    (["publish", TOPIC, "-t", "local", "--json-payload", "{"], "--json-payload is not JSON"),
    (["publish", TOPIC, "-t", "local", "--text", "a", "--hex", "00"], "say the payload once"),
    (["publish", TOPIC, "-t", "local", "--file", "nowhere"], "can't read nowhere: No such file or directory"),
    (["publish", "//vehicle1/8001/1/7", "-t", "local"], "topic (8000 to FFFE)"),
    (["publish", "//*/8001/1/8001", "-t", "local"], "wildcards"),
    (["publish", "/8001/1/8001", "-t", "local"], "--authority WHO"),
    (["publish", TOPIC, "-t", "mqtt5", "-s", "port=1"], "no connection to the broker at 127.0.0.1:1"),
    (["call", "//vehicle1/4/1/8001", *ON_LOCAL], "method (1 to 7FFF)"),
    (["call", "//vehicle1/4/1/1", *ON_LOCAL, "--timeout-ms", "0"], "--timeout-ms"),
    (["call", "//vehicle1/4/1/1", *ON_LOCAL, "--timeout-ms", "99999999999"], "ttl"),
    (["call", "//vehicle1/4/1/1", *ON_LOCAL, "--timeout-ms", "50"], "no answer within 50 ms"),
    (["call", "//vehicle1/4/1/1", "-t", "local", "-a", "*"], "concrete authority"),
    (["replay", *ON_LOCAL, "--data", "nowhere.csv"], "can't read nowhere.csv: No such file or directory"),
    (["replay", *ON_LOCAL, "--data", "."], "can't read .: Is a directory"),
    (["replay", *ON_LOCAL, "--data", "empty.csv"], "got an empty file"),
    (["replay", *ON_LOCAL, "--data", "header.csv"], "got none"),
    (["replay", *ON_LOCAL, "--seconds", "0"], "--seconds"),
    (["replay", *ON_LOCAL, "--rate", "0"], "--rate"),
    (["replay", *ON_LOCAL, "--start-ms", "-5"], "--start-ms"),
    (["replay", "-t", "local", "-a", "nobody"], "mcu1 and vehicle1 do: be one of them, or add --all"),
    (["history"], "Missing argument"),
    (["history", "vehicle1"], "--transport NAME"),
    (["history", "VEHICLE", *ON_LOCAL], "lower-case"),
    (["history", "*", *ON_LOCAL], "wildcards"),
    (["history", "vehicle1", "nonsense", *ON_LOCAL], "expected up://"),
    (["history", "vehicle1", *ON_LOCAL, "--poll", "--limit", "0"], "--limit"),
    (["subscriptions"], "either --store FILE or --config FILE"),
    (["subscriptions", "--store", "nowhere.db"], "there is no store at nowhere.db"),
    (["subscriptions", "-c", "one.toml"], "pass the file that the service was started with"),
    (["subscriptions", "--store", "damaged/dead-letters.db"], "is damaged (file is not a database)"),
    (["dead-letters"], "either --data-dir DIR or --config FILE"),
    (["dead-letters", "--data-dir", ".", "-c", "one.toml"], "either --data-dir DIR or --config FILE"),
    (["dead-letters", "--data-dir", "nowhere"], "is this the data_dir of a streamer that has run?"),
    (["dead-letters", "-c", "one.toml"], "is this the data_dir of a streamer that has run?"),
    (["dead-letters", "--data-dir", "damaged"], "check it, or move it away"),
    (["dead-letters", "--data-dir", "damaged", "--limit", "0"], "--limit"),
    (["dead-letters", "purge", "--data-dir", "damaged"], "--all"),
    (["dead-letters", "purge", "--data-dir", "damaged", "--all"], "check it, or move it away"),
    (["dead-letters", "purge", "3", "--all", "--data-dir", "damaged"], "or all of them (--all"),
    (["dead-letters", "purge", "--before", "soon", "--data-dir", "damaged"], "as 30s, 10m, 2h, 7d; got 'soon'"),
    (["dead-letters", "resend", "--data-dir", "damaged"], "--all"),
    (["dead-letters", "resend", "--data-dir", "damaged", "--code", "LOST"], "expected one of ABORTED, "),
    (["dead-letters", "resend", "--data-dir", "damaged", "--all"], "no streamer with data_dir damaged runs: start it"),
    (["dead-letters", "show", "1", "--data-dir", "damaged"], "check it, or move it away"),
    (["usubscription", "-a", "v", "-t", "local"], "--store"),
    (["usubscription", "-a", "V", "-t", "local", "--store", "x.db"], "lower-case"),
    (["usubscription", "-a", "v", "-t", "pigeon", "--store", "x.db"], "unknown transport 'pigeon'"),
    (["usubscription", "-a", "v", "-t", "local", "--store", "nowhere/x.db"], "make it first"),
    (
        ["usubscription", "-a", "v", "-t", "mqtt5", "--store", "x.db", "-s", "port=1"],
        "no connection to the broker at 127.0.0.1:1",
    ),
    (["demo", "--seconds", "5"], "--seconds"),
    (["demo", "--rate", "0"], "--rate"),
    (["demo", "--without-mqtt", "--data", "nowhere.csv"], "can't read nowhere.csv"),
    (["demo", "--without-mqtt", "--data", "empty.csv"], "empty.csv: expected a CSV file"),
    (["demo", "--without-mqtt", "--data", "damaged"], "expected drives as CSV files in the folder"),
    (["demo", "--without-mqtt", "--out", "empty.csv"], "say another with --out"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments)[:70] for arguments, _ in WRONG])
def test_what_is_wrong_is_said(
    invoke: Invoke, arguments: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.toml").write_text(ONE.format(folder=tmp_path))
    (tmp_path / "empty.csv").touch()
    (tmp_path / "header.csv").write_text("SPEED (),RPM\n")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "dead-letters.db").write_bytes(b"no database at all" * 500)
    result = invoke(*arguments)
    assert result.exit_code in (1, 2, 78)
    assert message in result.stderr + capfd.readouterr().err
    assert not result.stdout


EPOCHS = (
    ONE.replace("{", "{{").replace("}", "}}") + '[[epochs]]\nname = "lap"\ntopics = ["//vehicle1/8001/1/FFFF"]\n{}\n'
)


BAD_CONFIGS: list[tuple[str, list[str]]] = [
    ("x = [", ["bad.toml:1: this is not valid TOML"]),
    ("", ["endpoint: Field required"]),
    (ONE + "colour = 1\n", ["bad.toml:8:", "unknown key 'colour'"]),
    (ONE.replace("[streamer]", "[streamer]\nadmni = 1"), ["bad.toml:3: streamer.admni: unknown key 'admni'"]),
    (ONE + "settings = { netwrok = 'x' }\n", ["bad.toml:8: endpoint.0.settings.netwrok: unknown key 'netwrok'"]),
    (ONE.replace('"local"', '"pigeon"'), ["bad.toml:6: endpoint 'v': unknown transport 'pigeon'"]),
    (
        ONE.replace("[streamer]", '[streamer]\nadmin = "127.0.0.1:99999"'),
        ["bad.toml:3: streamer.admin: expected HOST:PORT"],
    ),
    (ONE.replace("[streamer]", '[streamer]\nadmin = "9090"'), ["bad.toml:3: streamer.admin: expected HOST:PORT"]),
    *(
        (
            ONE.replace("[streamer]", f'[streamer]\nadmin = "{address}"'),
            ["bad.toml:3: streamer.admin", "other machines"],
        )
        for address in ("0.0.0.0:9464", "192.168.7.1:9464", "gateway:9464", "[::]:9464")
    ),
    (
        ONE.replace("[streamer]", '[admin]\ncert_file = "a"\nkey_file = "b"\n[streamer]\nadmin = "0.0.0.0:9464"'),
        ["bad.toml:6: streamer.admin '0.0.0.0:9464' can be reached from other machines"],
    ),
    (
        ONE.replace("[streamer]", '[streamer]\nadmin = "127.0.0.1:9464"') + '[admin]\nkey_file = "b"\n',
        ["bad.toml:9: cert_file and key_file go together"],
    ),
    (ONE + '[admin]\ntoken_file = "a"\n', ["bad.toml:8: [admin] says who may ask at streamer.admin, which is not set"]),
    (ONE + ONE.partition("data")[2].partition("\n")[2], ["two endpoints are named 'v'"]),
    (
        ONE + '[[endpoint]]\nname = "w"\ntransport = "local"\nauthorities = ["vehicle1"]\n',
        ["authority 'vehicle1' belongs to both endpoint 'v' and 'w'"],
    ),
    (ONE.replace('["vehicle1"]', "[]"), ["bad.toml:7:"]),
    (ONE.replace('["vehicle1"]', '["Vehicle1"]'), ["bad.toml:7:", "lower-case"]),
    (ONE + '[[rule]]\nfrom = "v"\nto = "moon"\n', ["unknown endpoint 'moon'; known: v"]),
    (ONE + '[[rule]]\nfrom = "v"\nto = "v"\n', ["in a circle"]),
    (ONE + '[history]\nrecord = ["nonsense"]\nretention_hours = 0\n', ["bad.toml:9:", "bad.toml:10:"]),
    (EPOCHS.format("width_ms = 9").replace('"lap"', '"a lap"'), ["bad.toml:9: epochs.0.name"]),
    (EPOCHS.format('by = "bucket"'), ["bad.toml:11:", "a bucket has a width_ms"]),
    (EPOCHS.format('by = "progress"\nwidth_ms = 5'), ["bad.toml:12: epochs 'lap': width_ms is of buckets"]),
    (EPOCHS.format("width_ms = 9000\ntimeout_ms = 9000"), ["bad.toml:12:", "longer than width and lateness"]),
    (EPOCHS.format("width_ms = 9000").replace("8001/1/FFFF", "8001/1/1"), ["bad.toml:10:", "can't be a topic"]),
    (EPOCHS.format("width_ms = 9").replace("//vehicle1/8", "/8"), ["bad.toml:10:", "names no authority"]),
    (
        EPOCHS.format("width_ms = 9").replace("//vehicle1/8", "//moon/8"),
        ["bad.toml:10:", "no endpoint has the authority"],
    ),
    (
        EPOCHS.format("width_ms = 9") + '[[epochs]]\nname = "lap"\ntopics = ["//vehicle1/9/1/FFFF"]\nby = "progress"\n',
        ["bad.toml:13: two groups of epochs are named 'lap'"],
    ),
    (
        EPOCHS.format("width_ms = 9") + '[[epochs]]\nname = "b"\ntopics = ["//*/8001/1/8009"]\nby = "progress"\n',
        ["bad.toml:14:", "has topics of 'lap' (//vehicle1/8001/1/FFFF), too: each is in one group"],
    ),
    (  # everything at once, in the order of the lines
        "[streamer]\nfoo = 1\n" + ONE.replace("[streamer]\n", "").replace("data_dir", "#") + "settings = { nope = 1 "
        "}\nbar = 2\n",
        ["bad.toml:2: streamer.foo", "endpoint.0.settings.nope", "endpoint.0.bar"],
    ),
]


@pytest.mark.parametrize(("text", "messages"), BAD_CONFIGS, ids=[messages[0][:60] for _, messages in BAD_CONFIGS])
@pytest.mark.parametrize("command", ["check", "run"])
def test_every_mistake_of_a_configuration_is_said_with_its_line(
    invoke: Invoke, command: str, text: str, messages: list[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.toml").write_text(text.replace("{folder}", str(tmp_path)))
    result = invoke(command, "-c", "bad.toml")
    assert result.exit_code == 78
    places = [result.stderr.find(message) for message in messages]
    assert -1 not in places, result.stderr
    assert places == sorted(places)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("address", "admin"),
    [
        ("127.0.0.1:0", ""),
        ("localhost:9464", ""),
        ("[::1]:9464", ""),
        ("::1:9464", ""),
        ("0.0.0.0:9464", "[admin]\nunprotected = true\n"),
        ("0.0.0.0:9464", '[admin]\ncert_file = "{folder}/x"\nkey_file = "{folder}/x"\ntoken_file = "{folder}/x"\n'),
    ],
)
def test_an_admin_port_for_this_machine_or_for_whom_it_knows_is_right(
    invoke: Invoke, tmp_path: Path, address: str, admin: str
) -> None:
    certificate, key = TestAuthority(tmp_path).issue("port")
    (tmp_path / "x").write_bytes(certificate.read_bytes() + key.read_bytes())
    (tmp_path / "x").chmod(0o600)
    text = ONE.replace("[streamer]", f'[streamer]\nadmin = "{address}"') + admin
    (tmp_path / "one.toml").write_text(text.replace("{folder}", str(tmp_path)))
    assert invoke("check", "-c", "one.toml").exit_code == 0


def test_a_configuration_that_is_no_text_is_said(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe\x00")
    assert "it is not UTF-8" in invoke("check", "-c", "bad.toml").stderr


@pytest.mark.parametrize("file", ["history.db", "dead-letters.db"])
def test_a_data_dir_that_cannot_be_used_is_said(invoke: Invoke, tmp_path: Path, file: str) -> None:
    (tmp_path / "one.toml").write_text(ONE.format(folder=tmp_path))
    (tmp_path / "data" / file).mkdir(parents=True)
    result = invoke("run", "-c", "one.toml")
    assert result.exit_code == 1
    assert f"data/{file} can't be opened" in result.stderr


def test_a_data_dir_that_cannot_be_made_is_said(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(ONE.format(folder=tmp_path))
    (tmp_path / "data").touch()
    result = invoke("run", "-c", "one.toml")
    assert result.exit_code == 1
    assert "can't be made" in result.stderr
    assert "choose a folder that can" in result.stderr


def test_an_admin_port_in_use_is_said(invoke: Invoke, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "one.toml").write_text(
            ONE.format(folder=tmp_path).replace("[streamer]", f'[streamer]\nadmin = "127.0.0.1:{port}"')
        )
        result = invoke("run", "-c", "one.toml")
    assert result.exit_code == 1
    assert f"the admin port 127.0.0.1:{port} can't be opened" in result.stderr
    assert "is another streamer running?" in result.stderr


def test_check_prints_what_it_understood(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(ONE.format(folder=tmp_path))
    assert "vehicle1" in invoke("check", "-c", "one.toml").stdout
    assert lines_of(invoke("check", "-c", "one.toml", "--json")) == [
        {
            "ok": True,
            "authority": "vehicle1",
            "data_dir": str(tmp_path / "data"),
            "record": [],
            "volatile": [],
            "admin": None,
            "endpoints": [
                {
                    "name": "v",
                    "transport": "local",
                    "authorities": ["vehicle1"],
                    "followed_by": None,
                    "usubscription": "embedded",
                    "home": True,
                },
            ],
            "rules": [],
            "follow": [],
            "epochs": [],
            "unclaimed": {},
            "notes": [],
            "paused": [],
        }
    ]


FOLLOWING = (
    ONE
    + """
[[endpoint]]
name = "up"
transport = "{transport}"
authorities = ["hub", "office"]
usubscription = "none"
followed_by = "//hub/4/1/0"
settings = {settings}
[[follow]]
endpoint = "up"
service = "//{of}/1/0"
"""
)
TOPICS = 'topics = ["//hub/8001/1/FFFF"]'
OFF = '{ host = "127.0.0.1", mode = "off-vehicle" }'


def following(folder: Path, *more: str, transport: str = "local", settings: str = "{}", of: str = "hub/4") -> str:
    (folder / "one.toml").write_text(
        "\n".join([FOLLOWING.format(folder=folder, transport=transport, settings=settings, of=of), *more])
    )
    return "one.toml"


def test_check_shows_who_follows_whom(invoke: Invoke, tmp_path: Path) -> None:
    file = following(tmp_path, 'mode = "poll"', TOPICS, '[history]\nrecord = ["//hub/9/1/8009"]')
    shown = [" ".join(re.findall(r"[^\s│]+", line)) for line in invoke("check", "-c", file).stdout.splitlines()]
    assert "up //hub/4/1/0 poll what is wanted here, //hub/8001/1/FFFF" in shown
    assert "up //hub/4/1/0 not to hub, office any more, once it has taken over" in shown
    (reported,) = lines_of(invoke("check", "-c", file, "--json"))
    assert [one["followed_by"] for one in reported["endpoints"]] == [None, "//hub/4/1/0"]
    (follow,) = reported["follow"]
    assert follow == {"endpoint": "up", "service": "//hub/4/1/0", "topics": ["//hub/8001/1/FFFF"], "mode": "poll"}
    assert reported["notes"] == []


def test_check_shows_groups_of_epochs(invoke: Invoke, tmp_path: Path) -> None:
    text = EPOCHS.format("width_ms = 1000\nlateness_ms = 200").replace("{folder}", str(tmp_path))
    (tmp_path / "one.toml").write_text(text)
    shown = [" ".join(re.findall(r"[^\s│]+", line)) for line in invoke("check", "-c", "one.toml").stdout.splitlines()]
    assert any(line.startswith("lap //vehicle1/8001/1/FFFF bucket 1000 ms") for line in shown), shown
    (reported,) = lines_of(invoke("check", "-c", "one.toml", "--json"))
    (group,) = reported["epochs"]
    assert (group["name"], group["by"], group["width_ms"], group["timeout_ms"]) == ("lap", "bucket", 1_000, 10_000)


@pytest.mark.parametrize("more", [["--poll"], ["//vehicle1/8001/1/8000"]])
def test_epochs_are_of_groups_and_not_of_topics(invoke: Invoke, more: list[str]) -> None:
    result = invoke("history", "vehicle1", *more, "--epochs", "-t", "zenoh", "-a", "vehicle1")
    assert result.exit_code != 0
    assert "say it without --poll, and without topics" in result.output


ONE_WAY = '[[rule]]\nfrom = "{}"\nto = "{}"'
UNASKED = "no uSubscription says what is wanted, and [history] record names nothing"


@pytest.mark.parametrize(
    ("more", "given", "notes"),
    [
        ([ONE_WAY.format("up", "v")], {}, ["//hub/4/1/0 has nothing to follow: no rule lets anything go there"]),
        ([ONE_WAY.format("up", "v"), '[[access]]\nendpoint = "up"\nallow = ["//*/8001/1/FFFF"]'], {}, []),
        ([ONE_WAY.format("v", "up")], {}, ["of //hub/4/1/0 nothing is taken: no rule lets anything from there go on"]),
        ([TOPICS, ONE_WAY.format("v", "up")], {}, []),
        ([ONE_WAY.format("v", "up"), '[history]\nrecord = ["//hub/8001/1/FFFF"]'], {}, []),
        ([], {"transport": "mqtt5", "settings": OFF, "of": "*/80010004"}, ["name each publisher"]),
        ([], {"of": "*/80010004"}, []),
    ],
)
def test_following_without_effect_is_reported(
    invoke: Invoke, tmp_path: Path, more: list[str], given: dict[str, str], notes: list[str]
) -> None:
    (reported,) = lines_of(invoke("check", "-c", following(tmp_path, *more, **given), "--json"))
    about = [note for note in reported["notes"] if "follow" in note or "nothing is taken" in note]
    assert len(about) == len(notes), about
    for note, words in zip(about, notes, strict=True):
        assert note.startswith("endpoint up: ")
        assert words in note


def test_a_retention_that_does_not_fit_the_disk_is_reported(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(ONE.format(folder=tmp_path) + "[history]\nretention_mib = 1_000_000_000_000\n")
    (reported,) = lines_of(invoke("check", "-c", "one.toml", "--json"))
    (note,) = reported["notes"]
    assert note.startswith("history.retention_mib: 1000000000000 MiB do not fit the disk of ")
    assert not (tmp_path / "reserve").exists(), "it only looks"


def test_following_without_topics_is_reported(invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / following(tmp_path)
    file.write_text(file.read_text().replace('"local"\n', '"local"\nusubscription = "none"\n', 1))
    (reported,) = lines_of(invoke("check", "-c", "one.toml", "--json"))
    assert [note.endswith(UNASKED) for note in reported["notes"]] == [True, True]


def test_a_follower_on_our_own_network_is_reported(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(
        ONE.format(folder=tmp_path).replace('["vehicle1"]', '["vehicle1", "hub"]\nfollowed_by = "//hub/4/1/0"')
    )
    (reported,) = lines_of(invoke("check", "-c", "one.toml", "--json"))
    assert any("who has subscribed on our own network gets no publish" in note for note in reported["notes"])


def test_publish_prints_what_it_sent(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "payload").write_bytes(b"\x00\xff")
    shown = [
        lines_of(invoke("publish", TOPIC, "-t", "local", "--json", "--count", "2", *payload))
        for payload in (
            ["--text", "hello"],
            ["--json-payload", '{"a": 1}'],
            ["--hex", "00ff"],
            ["--file", "payload"],
            [],
        )
    ]
    assert [one[0].get("payload") for one in shown] == ["hello", {"a": 1}, "00ff", "00ff", None]
    assert all(len({message["id"] for message in one}) == 2 for one in shown)
    (message,) = lines_of(invoke("publish", TOPIC, "-t", "local", "--json", "--ttl-ms", "500", "--priority", "cs5"))
    assert (message["source"], message["ttl_ms"], message["priority"]) == ("up://vehicle1/8001/1/8001", 500, "CS5")


def test_replay_tells_of_broken_rows_and_loses_none_that_can_be_read(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "broken.csv").write_text(
        'VEHICLE_SPEED (),ENGINE_RPM (),\n1,900,\nfast,1000,\n2,,\n,,\n"3,1100,\n4,1200\n'
    )
    result = invoke("replay", "-t", "local", "-a", "vehicle1", "--all", "--data", "broken.csv", "--json")
    assert result.exit_code == 0
    last = lines_of(result)[-1]
    assert last["done"] is True
    assert last["published"] == sum(last["topics"].values()) == 3 + 3
    assert "broken.csv: row 3: Vehicle.OBD.Speed is not a number: 'fast'" in result.stderr
    assert "broken.csv: row 5: has no readable value: skipped" in result.stderr
    assert last["problems"] >= 4


SECRET = "hun" + "ter2"


@pytest.mark.parametrize(
    "settings",
    [
        'password = ["SECRET"]',
        "password = 424242",
        'pasword = "SECRET"',
        'username = "u"\npassword = "SECRET"\nport = "none"',
        'websocket = { headers = { Authorization = ["SECRET"] } }',
        'websocket = { headers = { Authorization = "SECRET\\n" } }',
        "websocket = { headers = { Authorization = 424242 } }",
    ],
)
def test_check_shows_no_password(invoke: Invoke, tmp_path: Path, settings: str) -> None:
    text = ONE.replace('"local"', '"mqtt5"') + "[endpoint.settings]\n" + settings.replace("SECRET", SECRET)
    (tmp_path / "bad.toml").write_text(text)
    shown = invoke("check", "-c", "bad.toml")
    assert shown.exit_code == 78
    assert "bad.toml:" in shown.stderr
    assert SECRET not in shown.output + shown.stderr
    assert "424242" not in shown.output + shown.stderr


def test_the_end_of_a_streamer_is_logged_as_json_too(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        admin = f"127.0.0.1:{taken.getsockname()[1]}"
        text = ONE.format(folder=tmp_path).replace("[streamer]", f'[streamer]\nlog_format = "json"\nadmin = "{admin}"')
        (tmp_path / "one.toml").write_text(text)
        command = [sys.executable, "-m", "streamer.commands.cli", "run", "-c", str(tmp_path / "one.toml")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == terminal.EXIT_FAILED
    last = [json.loads(line) for line in done.stderr.splitlines()][-1]
    assert (last["event"], last["code"]) == ("the process ends", "UNAVAILABLE")
    assert admin in last["error"]


def test_the_log_of_a_streamer_is_json_where_that_is_asked_for(tmp_path: Path) -> None:
    """Also of a process that can't go on: no line is anything else, and no variable is shown."""
    text = ONE.format(folder=tmp_path).replace("[streamer]", '[streamer]\nlog_format = "json"\nadmin = "127.0.0.1:0"')
    (tmp_path / "one.toml").write_text(text)
    command = [sys.executable, "-m", "streamer.commands.cli", "run", "-c", str(tmp_path / "one.toml"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["ready"] is True
        process.send_signal(signal.SIGTERM)
        lines = [json.loads(line) for line in process.stderr.read().splitlines()]
        assert process.wait(60) == 0
    assert [(line["level"], line["event"], line["authority"]) for line in lines if line["event"] == "ready"] == [
        ("info", "ready", "vehicle1")
    ]
    assert all(re.fullmatch(r"[\d-]{10}T[\d:]{8}\.\d{3}Z", line["timestamp"]) for line in lines)


def test_what_strangers_write_moves_no_cursor_and_colours_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show("", ["name"], [["[red]vin1[/] \x1b]0;owned\x07\r"]])
    terminal.tell(False, {}, "payload \x1b[2J [bold]")
    with pytest.raises(typer.Exit), terminal.errors():
        raise UStatusError(UCode.INTERNAL, "a peer says \x1b[2J [bold]\r\x07\nsecond line")
    shown, said = capsys.readouterr()
    assert said == "error INTERNAL: a peer says \\x1b[2J [bold]\\r\\x07\nsecond line\n"
    assert "[red]vin1[/]" in shown
    assert "\\x1b[2J [bold]" in shown
    assert not set("\x1b\x07\r") & set(shown)


def test_a_backfill_is_slower_than_the_quota_of_a_gateway_and_says_so(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.RATE_PER_S < UNITS_PER_S
    spent: list[tuple[int, int]] = []

    async def spend(pace: Pace, units: int) -> None:
        spent.append((pace.per_s, units))

    monkeypatch.setattr(Pace, "spend", spend)
    sent = invoke("publish", TOPIC, "-t", "local", "--text", "x" * 2_048, "--count", "2000", "--json")
    assert len({one["id"] for one in lines_of(sent)}) == 2_000
    assert "sending at most 1333 messages a second, less than a gateway takes" in sent.stderr
    assert {per_s for per_s, _ in spent} == {client.RATE_PER_S}
    assert sum(units for _, units in spent) == 2_000 * 3
    assert max(units for _, units in spent) <= UNITS_PER_S // 2
    assert "sending" not in invoke("publish", TOPIC, "-t", "local", "--text", "x").stderr
    fast = invoke("publish", TOPIC, "-t", "local", "--text", "x", "--count", "10", "--rate", "9").stderr
    assert "sending at most 9 messages a second" in fast
    assert "sending" not in invoke("replay", "-t", "local", "-a", "vehicle1", "--seconds", "3").stderr
    replayed = invoke("replay", "-t", "local", "-a", "vehicle1", "--seconds", "3", "--rate", "20")
    assert "sending at most 20 samples a second" in replayed.stderr
