"""docs/brokers.md says what the brokers of these tests are set up with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

import pytest

from tests.brokers.makes import MAKES

PAGE: Final = Path(__file__).parents[2] / "docs" / "brokers.md"
HEADINGS: Final = {"hivemq": "HiveMQ CE", "artemis": "ActiveMQ Artemis", "mochi": "mochi", "rumqttd": "rumqttd"}
FILES: Final = {"hivemq": "config.xml", "artemis": "broker.xml", "mochi": "config.yaml", "rumqttd": "rumqttd.toml"}


def recipes(name: str) -> list[str]:
    """The code blocks of its section: the broker's configuration, then the endpoint's settings, if it needs some."""
    section = PAGE.read_text().split(f"\n### {HEADINGS[name]}\n")[1].split("\n#")[0]
    return re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)


def words(text: str) -> list[str]:
    """Each line without what differs between YAML and JSON."""
    return [found for line in text.splitlines() if (found := re.sub(r"[\s\",]", "", line).removesuffix("{"))]


@pytest.mark.parametrize("name", HEADINGS)
def test_the_page_has_what_is_tried(name: str, tmp_path: Path) -> None:
    make = MAKES[name]
    assert make.configured is not None
    make.configured(tmp_path, tmp_path, 1883, False)
    broker, *endpoint = recipes(name)
    assert set(words(broker)) <= set(words((tmp_path / FILES[name]).read_text()))
    settings = tomllib.loads(endpoint[0])["endpoint"]["settings"] if endpoint else {}
    assert settings == make.endpoint
