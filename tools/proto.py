"""Generates the protobuf code: uprotocol/proto/**/*.proto -> *_pb2.py and *_pb2.pyi beside their packages.

python tools/proto.py [OUT]        OUT is the repository by default; `make proto` calls it
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "uprotocol" / "proto"


def generate(out: Path) -> list[Path]:
    """Generate the code for every .proto into `out`; returns the relative paths. Raises CalledProcessError if
    protoc fails."""
    names = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.proto"))
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I",
        str(SOURCES),
        f"--python_out={out}",
        f"--mypy_out=quiet:{out}",
        *names,
    ]
    # protoc looks for protoc-gen-mypy on PATH, where the folder of an inactive virtual environment is missing
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run(command, check=True, env={**os.environ, "PATH": path})
    return [
        Path(name).with_suffix("").with_name(Path(name).stem + f"_pb2{end}")
        for name in names
        for end in (".py", ".pyi")
    ]


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    for path in generate(out):
        print(path)


if __name__ == "__main__":
    main()
