"""The configurations that docs/security.md gives, as they stand there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "security.md"


def blocks(heading: str) -> list[str]:
    """The TOML examples below `heading`, up to the next heading of any level."""
    after = PAGE.read_text(encoding="utf-8").split(f"\n{heading}\n")
    assert len(after) == 2, f"docs/security.md has no heading {heading!r}, or has it twice"
    section = re.split(r"^#{2,} ", after[1], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^```toml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def settings(*parts: str) -> dict[str, Any]:
    """Of the endpoint that these examples make together."""
    found: dict[str, Any] = tomllib.loads("\n".join(parts))["endpoint"]["settings"]
    return found
