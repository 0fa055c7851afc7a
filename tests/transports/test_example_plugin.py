"""The example of a plugin from another repository passes the conformance suite there, with nothing but this package on
its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.tiers import full

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "transport-plugin"


@full
def test_the_example_plugin_passes_the_conformance_suite(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(EXAMPLE), str(ROOT))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(EXAMPLE),
        "-c",
        str(EXAMPLE / "pyproject.toml"),
        str(EXAMPLE / "tests"),
    ]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-2_000:]
    assert "passed" in done.stdout
