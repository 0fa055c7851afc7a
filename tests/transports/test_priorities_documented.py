"""Each transport's page says how priority classes travel, and agrees with the code
(req~utransport-send-qos-mapping~1)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from transports.dds import mapping as dds_mapping
from transports.zenoh import mapping as zenoh_mapping
from uprotocol.v1.uattributes_pb2 import UPriority

DOCS = Path(__file__).parents[2] / "docs"
CLASSES = [*range(UPriority.UPRIORITY_CS0, UPriority.UPRIORITY_CS6 + 1), UPriority.UPRIORITY_UNSPECIFIED]


@pytest.mark.spec("req~utransport-send-qos-mapping~1")
def test_the_table_of_dds_is_what_is_sent() -> None:
    (row,) = re.findall(r"^\| TRANSPORT_PRIORITY \|(.*)\|$", (DOCS / "dds-mapping.md").read_text(), re.MULTILINE)
    assert [int(cell) for cell in row.split("|")] == [dds_mapping.TRANSPORT_PRIORITY[priority] for priority in CLASSES]


@pytest.mark.spec("req~utransport-send-qos-mapping~1")
def test_mqtt_has_none_and_its_page_says_so() -> None:
    assert "has no counterpart in MQTT: all classes are treated alike" in " ".join(
        (DOCS / "mqtt5.md").read_text().split()
    )


@pytest.mark.spec("req~utransport-send-qos-mapping~1")
def test_the_table_of_zenoh_is_what_is_sent() -> None:
    page = (DOCS / "zenoh.md").read_text()
    (classes,) = re.findall(r"^\| uProtocol \|(.*)\|$", page, re.MULTILINE)
    (row,) = re.findall(r"^\| Zenoh \|(.*)\|$", page, re.MULTILINE)
    named = dict(
        zip((cell.strip() for cell in classes.split("|")), (cell.strip() for cell in row.split("|")), strict=True)
    )
    assert [named["CS1, none" if f"CS{number}" == "CS1" else f"CS{number}"] for number in range(7)] == [
        zenoh_mapping.PRIORITIES[priority] for priority in CLASSES[:-1]
    ]
    assert zenoh_mapping.PRIORITIES[UPriority.UPRIORITY_UNSPECIFIED] == named["CS1, none"]
