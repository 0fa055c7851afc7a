"""Writes lock files with hashes, for every supported Python and platform: `make lock`.

pyproject.toml -> requirements.lock (to develop: every extra) -> deploy/requirements.lock (a gateway: a subset)
                                                              -> requirements-build.lock (`make wheel`: a subset)
               -> requirements-docs.lock (`make docs`: its own group, since no other target needs it)

pip cannot install an editable package with hashes, so that is a second step, without dependencies: see the Makefile.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PYTHON: Final = "3.11"  # the oldest supported one; newer ones have lines of their own if they need other versions
ALL: Final = "requirements.lock"
GATEWAY: Final = "deploy/requirements.lock"
GATEWAY_EXTRAS: Final = ("zenoh", "mqtt5", "dds", "http", "otel")
BUILD: Final = "requirements-build.lock"
BUILD_EXTRAS: Final = ("build",)
DOCS: Final = "requirements-docs.lock"
SOURCE: Final = "pyproject.toml"
# a line `coverage==1` does not keep pip 23 from taking a newer `coverage[toml]`, which it then refuses: it has no hash
WITH_EXTRAS: Final = "--no-strip-extras"
OPTIONS: Final = ("--universal", "--python-version", PYTHON, "--generate-hashes", "--no-annotate", WITH_EXTRAS)


def compile(output: str, *options: str) -> None:
    command = [
        str(Path(sys.executable).parent / "uv"),
        "pip",
        "compile",
        "--quiet",
        "--upgrade",
        *OPTIONS,
        *options,
    ]
    subprocess.run([*command, "--custom-compile-command", "make lock", "--output-file", output], cwd=ROOT, check=True)


def main() -> None:
    compile(ALL, SOURCE, "--all-extras")
    for output, extras in ((GATEWAY, GATEWAY_EXTRAS), (BUILD, BUILD_EXTRAS)):
        compile(output, SOURCE, *(f"--extra={extra}" for extra in extras), "--constraint", ALL)
    compile(DOCS, "--group=docs")


if __name__ == "__main__":
    main()
