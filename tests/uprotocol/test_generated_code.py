"""The generated code is exactly what `make proto` generates from the .proto sources."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _tool() -> ModuleType:
    found = importlib.util.spec_from_file_location("proto_tool", ROOT / "tools" / "proto.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_make_proto_would_change_nothing(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="the compiler is a development dependency: pip install -e '.[dev]'")
    made = _tool().generate(tmp_path)
    assert made
    for path in made:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), (
            f"{path} is not what `make proto` makes: run it"
        )
    committed = {
        path.relative_to(ROOT) for path in (ROOT / "uprotocol").rglob("*_pb2.py*") if path.suffix in (".py", ".pyi")
    }
    assert committed == set(made), "generated code without a .proto, or the other way round"
