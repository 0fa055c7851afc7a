"""The TOML file: what it means, and that every mistake is reported with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamer.commands.cli import app
from streamer.config import load, loads
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

BY = 'followed_by = "//hub/4/1/0"'
FOLLOW = '[[follow]]\nendpoint = "{}"\nservice = "{}"\n'
TWO = """\
[streamer]
data_dir = "data"

[[endpoint]]
name = "vehicle"
transport = "local"
authorities = ["vehicle1"]

[[endpoint]]
name = "cloud"
transport = "local"
authorities = ["cloud", "backend"]
settings = { network = "other" }
"""

FLEET = '[[endpoint]]\nname = "fleet"\ntransport = "local"\nauthorities = ["*"]\n'
RULE = '[[rule]]\nfrom = "vehicle"\nto = "cloud"\n'


def problem(text: str) -> str:
    with pytest.raises(UStatusError) as caught:
        loads(text, "up.toml")
    assert caught.value.code == UCode.INVALID_ARGUMENT
    return caught.value.message


def test_defaults_make_a_gateway_of_two_endpoints() -> None:
    config = loads(TWO)
    assert config.authority == "vehicle1"
    assert config.home.name == "vehicle"
    assert [config.usubscription_of(endpoint) for endpoint in config.endpoint] == ["embedded", "remote"]
    assert {(rule.from_, rule.to) for rule in config.rules} == {("vehicle", "cloud"), ("cloud", "vehicle")}


def test_the_fleet_side_is_asked_nothing() -> None:
    config = loads(TWO.replace('["cloud", "backend"]', '["*"]'))
    assert config.usubscription_of(config.endpoint[1]) == "none"


def test_a_publisher_on_our_own_host_may_be_followed() -> None:
    (follow,) = loads(TWO + FOLLOW.format("vehicle", "//vehicle1/80010004/1/0")).follow
    assert follow.mode == "auto"


@pytest.mark.parametrize(
    ("authorities", "service", "topics"),
    [
        ('"cloud", "hub"', "//hub/4/1/0", ["//cloud/8001/1/FFFF"]),
        ('"*"', "//hub/4/1/0", ["//*/FFFF8001/1/8001", "//moon/8001/1/8001"]),
        ('"*"', "//*/4/1/0", []),
        ('"*"', "//*.depot/4/1/0", ["//bus.depot/8001/1/8001"]),
        ('"*.eu.depot"', "//*.depot/4/1/0", []),
        ('"*.depot"', "//*.eu.depot/4/1/0", []),
        ('"bus.depot"', "//*.depot/80010004/1/0", ["//bus.depot/8001/1/8001", "//*/FFFFFFFF/FF/FFFF"]),
        ('"hub"', "//*/80010004/1/0", ["//hub/10008001/1/8001"]),
    ],
)
def test_what_may_live_at_an_endpoint_may_be_followed_there(authorities: str, service: str, topics: list[str]) -> None:
    config = loads(TWO.replace('"cloud", "backend"', authorities) + FOLLOW.format("cloud", service) + f"{topics = }\n")
    assert config.follow[0].topics == topics


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (
            TWO.replace("[streamer]", "[streamer]\nauthorty = 'x'"),
            2,
            "unknown key 'authorty'; did you mean 'authority'?",
        ),
        (TWO + "[[rules]]\nfrom = 'a'\n", 14, "unknown key 'rules'; did you mean 'rule'?"),
        (
            TWO + "[[rule]]\nfrom = 'vehicle'\nto = 'cloud'\nalow = []\n",
            17,
            "unknown key 'alow'; did you mean 'allow'?",
        ),
        (TWO + "colour = 'red'\n", 14, "unknown key 'colour'"),
        (TWO + "[history]\nrecrod = []\n", 15, "unknown key 'recrod'; did you mean 'record'?"),
        (TWO + "[metrics]\nport = 1\n", 14, "unknown key 'metrics'"),
        (TWO.replace('network = "other"', 'netwrok = "other"'), 13, "unknown key 'netwrok'; did you mean 'network'?"),
        (
            TWO.replace(
                'transport = "local"\nauthorities = ["vehicle1"]',
                'transport = "carrier-pigeon"\nauthorities = ["vehicle1"]',
            ),
            6,
            "unknown transport",
        ),
        (TWO.replace('["cloud", "backend"]', '["Cloud"]'), 12, "lower-case"),
        (TWO.replace('["cloud", "backend"]', "[]"), 12, "at least 1"),
        (TWO + '[history]\nrecord = ["//vehicle1/1"]\n', 15, "three path segments"),
        (TWO + "[history]\nretention_mib = -1\n", 15, "greater than or equal to 1"),
        (TWO + f"[history]\nretention_mib = {10**30}\n", 15, "less than or equal to"),
        (TWO + "[history]\nretention_hours = inf\n", 15, "a finite number"),
        (TWO + "[history]\nretention_hours = nan\n", 15, "a finite number"),
        (TWO + "[history]\nretention_hours = 1e300\n", 15, "less than or equal to 876600"),
        (TWO + "[history]\nretention_hours = 0\n", 15, "greater than or equal to 0.001"),
        (TWO + "[history]\nretention_hours = 1e-300\n", 15, "greater than or equal to 0.001"),
        (TWO + "[history]\nabsent_hours = inf\n", 15, "a finite number"),
        (TWO + "[history]\nabsent_hours = 0\n", 15, "greater than 0"),
    ],
)
def test_a_mistake_is_reported_with_its_line(text: str, line: int, words: str) -> None:
    message = problem(text)
    assert message.startswith(f"up.toml:{line}: "), message
    assert words in message


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (TWO.replace('"backend"', '"vehicle1"'), 12, "'vehicle1' belongs to both endpoint 'vehicle' and 'cloud'"),
        (TWO.replace('"backend"', '"cloud"'), 12, "endpoint 'cloud' names an authority twice"),
        (TWO.replace('name = "cloud"', 'name = "vehicle"'), 10, "two endpoints are named 'vehicle'"),
        (
            TWO.replace('["vehicle1"]', '["vehicle1", "*"]').replace('["cloud", "backend"]', '["*"]'),
            12,
            "belongs to both",
        ),
        (TWO.replace("[streamer]", "[streamer]\nauthority = 'mars'"), 2, "'mars' is not an authority of any endpoint"),
        (TWO + FOLLOW.format("moon", "//hub/4/1/0"), 15, "unknown endpoint 'moon'"),
        (TWO + FOLLOW.format("cloud", "//cloud/4/1/0") * 2, 19, "is followed twice"),
        (TWO + FOLLOW.format("cloud", "//vehicle1/4/1/0"), 16, "is this streamer itself"),
        (TWO + FOLLOW.format("cloud", "//hub/8001/1/8001"), 16, "//hub/8001/1/8001"),
        (TWO.replace('name = "cloud"', f'name = "cloud"\n{BY}'.replace("hub", "vehicle1")), 11, "names this streamer"),
        (
            TWO.replace('name = "cloud"', f'name = "cloud"\n{BY}'),
            11,
            "'hub', which followed_by names, does not live there",
        ),
        (TWO.replace('"vehicle"', f'"vehicle"\n{BY}'.replace("hub", "cloud")), 6, "'cloud', which followed_by names"),
        (
            TWO.replace('name = "cloud"', f'name = "cloud"\n{BY}'.replace("//hub/4", "//cloud/80010004")),
            11,
            "one gateway",
        ),
        (TWO + FOLLOW.format("cloud", "//hub/4/1/0"), 16, "nobody else of that name lives at 'cloud'"),
        (TWO + FOLLOW.format("vehicle", "//cloud/4/1/0"), 16, "nobody else of that name lives at 'vehicle'"),
        (TWO + FOLLOW.format("vehicle", "//*/4/1/0"), 16, "nobody else of that name lives at 'vehicle'"),
        (TWO + FOLLOW.format("cloud", "//*.depot/4/1/0"), 16, "nobody else of that name lives at 'cloud'"),
        (TWO + FOLLOW.format("cloud", "//cloud/FFFF0004/1/0"), 16, "type by type"),
        (
            TWO + FOLLOW.format("cloud", "//cloud/4/1/0") + 'topics = ["//vehicle1/8001/1/8001"]\n',
            17,
            "never has //vehicle1",
        ),
        (TWO + FOLLOW.format("cloud", "//cloud/4/1/0") + 'topics = ["/8001/1/8001"]\n', 17, "never has /8001/1/8001"),
        (TWO + FOLLOW.format("cloud", "//cloud/4/1/0") + 'topics = ["//cloud/8001/1/1"]\n', 17, "never has //cloud"),
        (
            TWO + FOLLOW.format("cloud", "//cloud/80010004/1/0") + 'topics = ["//*/8002/1/8001"]\n',
            17,
            "never has //*/8002",
        ),
        (
            TWO + FOLLOW.format("cloud", "//cloud/80010004/1/0") + 'topics = ["//backend/8001/1/8001"]\n',
            17,
            "never has",
        ),
        (FLEET + FOLLOW.format("fleet", "//*/4/1/0"), 4, "at least one endpoint must name an authority"),
        (TWO + '[[rule]]\nfrom = "vehicle"\nto = "moon"\n', 16, "unknown endpoint 'moon'"),
        (TWO + RULE + '[[rule]]\nfrom = "moon"\nto = "cloud"\n', 18, "unknown endpoint 'moon'"),
        (TWO + RULE + '[[rule]]\nto = "vehicle"\nfrom = "vehicle"\n', 18, "in a circle"),
        (
            TWO.replace('name = "cloud"', 'name = "cloud"\nusubscription = "embedded"'),
            11,
            "only endpoint 'vehicle' can have it",
        ),
        (
            FLEET,
            4,
            "at least one endpoint must name an authority",
        ),
        (
            TWO.replace('name = "vehicle"', 'name = "vehicle"\nsuffix = "vin1"'),
            6,
            "a suffix is for the networks outside",
        ),
        (
            TWO.replace('"backend"', '"vehicle1.vin1"').replace('name = "cloud"', 'name = "cloud"\nsuffix = "vin1"'),
            11,
            "suffix 'vin1' of endpoint",
        ),
        (
            TWO.replace('name = "vehicle"', 'name = "vehicle"\nusubscription = "remote"')
            + '[usubscription]\nanswers_for = ["ecu1"]\n',
            16,
            "nobody would answer",
        ),
        ("endpoint = 3", 1, "endpoint"),
        ("[streamer]\n[[endpoint", 2, "not valid TOML"),
        ('[streamer]\n\ndata_dir = "', 3, "not valid TOML"),
        ("", 1, "endpoint"),
    ],
)
def test_an_inconsistency_is_reported_with_its_line(text: str, line: int, words: str) -> None:
    message = problem(text)
    assert message.startswith(f"up.toml:{line}: "), message
    assert words in message


def test_all_inconsistencies_are_reported_at_once() -> None:
    """Each mistake once, with the line of what has to be changed, whatever comes before it."""
    text = TWO.replace('"backend"', '"vehicle1"').replace("[streamer]", "[streamer]\nauthority = 'mars'") + RULE
    message = problem(text + '[[rule]]\nfrom = "moon"\nto = "mars"\n')
    assert [line.split(": ")[0].removeprefix("up.toml:") for line in message.splitlines()] == ["2", "13", "19", "20"]


def test_every_mistake_is_reported_at_once() -> None:
    message = problem(TWO.replace("[streamer]", "[streamer]\none = 1\ntwo = 2") + "three = 3\n")
    assert [line.split(": ")[0] for line in message.splitlines()] == ["up.toml:2", "up.toml:3", "up.toml:16"]


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UStatusError, match=r"can't read .*nowhere\.toml"):
        load(tmp_path / "nowhere.toml")


def test_check_prints_mistakes_and_fails(tmp_path: Path) -> None:
    path = tmp_path / "up.toml"
    path.write_text(TWO + "colour = 'red'\n")
    result = CliRunner().invoke(app, ["check", "--config", str(path)])
    assert result.exit_code == 78
    assert "unknown key 'colour'" in result.output
    assert "up.toml:14" in result.output
    path.write_text(TWO)
    result = CliRunner().invoke(app, ["check", "--config", str(path), "--json"])
    assert result.exit_code == 0
    assert '"authority": "vehicle1"' in result.output
