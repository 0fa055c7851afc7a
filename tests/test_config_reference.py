"""The tables of settings: they are what the models say, and no setting escapes them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
from pydantic import BaseModel, Field, create_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    found = importlib.util.spec_from_file_location("config_reference_tool", ROOT / "tools" / "config_reference.py")
    assert found is not None
    assert found.loader is not None
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_tables_are_up_to_date(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--check"]) == 0, capsys.readouterr().err


def test_every_transport_and_section_has_a_table(tool: ModuleType) -> None:
    wanted = set(tool.wanted())
    assert {
        "transports.zenoh.config:ZenohConfig",
        "transports.mqtt5.config:Mqtt5Config",
        "transports.dds.config:DdsConfig",
    } < wanted
    assert {
        "transports.local:LocalConfig",
        "streamer.config.sections:EndpointSection",
        "streamer.config.sections:ExpressSection",
    } < wanted


class Inner(BaseModel):
    file: Path | None = Field(default=None, description="of it")


class Example(BaseModel):
    name: str = Field(description="its | name")
    from_: int = Field(default=20_000, alias="from", ge=1, le=65_535, description="where from")
    share: float = Field(default=0.5, gt=0, description="how much")
    kinds: list[Literal["a", "b"]] = Field(default=[], description="which")
    inner: Inner | None = Field(default=None, description="more")
    on: bool = Field(default=False, description="whether")


def test_a_line_says_what_may_be_written_and_what_holds_without_it(tool: ModuleType) -> None:
    assert tool.table(Example).splitlines() == [
        "| `name` | text | required | its \\| name |",
        "| `from` | whole number, 1 to 65_535 | 20_000 | where from |",
        "| `share` | number, more than 0 | 0.5 | how much |",
        "| `kinds` | list of `a`, `b` | empty | which |",
        "| `inner` | table | unset | more |",
        "| `inner.file` | path | unset | of it |",
        "| `on` | true or false | `false` | whether |",
    ]


def test_a_field_without_description_is_named(tool: ModuleType) -> None:
    bare = create_model("Bare", known=(int, Field(description="known")), forgotten=(int, 3))
    with pytest.raises(tool.Undocumented, match=r"Bare: the field 'forgotten' needs a description"):
        tool.table(bare)


def test_a_model_without_a_table_is_named(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text()
        (tmp_path / page.name).write_text(
            text.replace("<!-- settings: streamer.config.sections:ExpressSection -->", "<!-- nothing -->")
        )
    monkeypatch.setattr(tool, "DOCS", tmp_path)
    assert tool.main(["--check"]) == 1
    assert "no page has a table of streamer.config.sections:ExpressSection" in capsys.readouterr().err


def test_a_marker_of_nothing_is_named(tool: ModuleType) -> None:
    with pytest.raises(tool.Undocumented, match=r"streamer.config.sections:Nothing, but it cannot be imported"):
        tool.filled("<!-- settings: streamer.config.sections:Nothing -->\n<!-- end -->")


def test_a_stale_table_is_reported_and_renewed(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        (tmp_path / page.name).write_text(page.read_text())
    right = (tmp_path / "configuration.md").read_text()
    (tmp_path / "configuration.md").write_text(
        right.replace("| 1024 | of the durable log", "| 1023 | of the durable log")
    )
    assert (tmp_path / "configuration.md").read_text() != right
    monkeypatch.setattr(tool, "DOCS", tmp_path)
    assert tool.main(["--check"]) == 1
    assert "configuration.md is stale: run `make config-reference`" in capsys.readouterr().err
    assert tool.main([]) == 0
    assert (tmp_path / "configuration.md").read_text() == right
