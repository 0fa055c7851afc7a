"""Small JSON files: read as a whole, replaced atomically; foreign content is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from storage.disk import Disk
from storage.saved import SavedFile
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

PAIRS: TypeAdapter[list[tuple[str, int]]] = TypeAdapter(list[tuple[str, int]])


def saved(folder: Path, disk: Disk | None = None) -> SavedFile[list[tuple[str, int]]]:
    return SavedFile(folder / "pairs.json", PAIRS, 40, disk or Disk())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    assert saved(tmp_path).load() is None
    saved(tmp_path).save([("a", 1), ("b", 2)])
    assert saved(tmp_path).load() == [("a", 1), ("b", 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.json"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}', b'[["a"]]', b'[["a", "1"]]', b"\xff\xfe", b" " * 41])
def test_foreign_content_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pairs.json"
    path.write_bytes(content)
    file = saved(tmp_path)
    with pytest.raises(UStatusError, match=r"FAILED_PRECONDITION: .*pairs\.json can't be read: "):
        file.load()
    assert path.read_bytes() == content
    file.save([("a", 1)])
    assert saved(tmp_path).load() == [("a", 1)]
    (kept,) = tmp_path.glob("pairs.json.refused-*")
    assert kept.read_bytes() == content


def test_what_is_too_long_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path).save([("a", 1)])
    with pytest.raises(UStatusError, match="may have at most 40 bytes, got 51: nothing is saved") as raised:
        saved(tmp_path).save([("x" * 42, 1)])
    assert raised.value.code == UCode.RESOURCE_EXHAUSTED
    assert saved(tmp_path).load() == [("a", 1)]


def test_a_disk_that_fails_changes_nothing(tmp_path: Path) -> None:
    class FullDisk(Disk):
        def replace_text(self, path: Path, text: str) -> None:
            raise OSError(28, "No space left on device")

    saved(tmp_path).save([("a", 1)])
    with pytest.raises(UStatusError, match=r"UNAVAILABLE: .*can't be written: No space left on device"):
        saved(tmp_path, FullDisk()).save([("b", 2)])
    assert saved(tmp_path).load() == [("a", 1)]
