"""The configurations of docs/security.md, read from the page and from the files that it names."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "security.md"


def blocks(heading: str) -> list[str]:
    """Returns the TOML examples below `heading`, up to the next heading of any level."""
    after = PAGE.read_text(encoding="utf-8").split(f"\n{heading}\n")
    assert len(after) == 2, f"docs/security.md has no heading {heading!r}, or has it twice"
    section = re.split(r"^#{2,} ", after[1], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^```toml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def deployed(name: str) -> str:
    """Returns a file of deploy/zenoh, which the page has to name."""
    assert f"{name}.toml" in PAGE.read_text(encoding="utf-8"), f"docs/security.md does not name {name}.toml"
    return (ROOT / "deploy" / "zenoh" / f"{name}.toml").read_text(encoding="utf-8")


def settings(*parts: str) -> dict[str, Any]:
    """Returns the settings of the endpoint that these examples define together."""
    found: dict[str, Any] = tomllib.loads("\n".join(parts))["endpoint"]["settings"]
    return found
