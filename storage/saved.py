"""Small JSON files that keep state over a restart: read as a whole, replaced atomically.

save(value) -> NAME.new -> fsync -> rename -> NAME -> load() -> the value, or an error; then NAME is left unchanged,
                                                                and the next save renames it to NAME.refused-TIME
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from storage.disk import REAL_DISK, Disk
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

T = TypeVar("T")


class SavedFile(Generic[T]):
    """The file at `path`, with JSON of `shape`, at most `bytes_max` bytes. Its methods block."""

    def __init__(self, path: Path, shape: TypeAdapter[T], bytes_max: int, disk: Disk = REAL_DISK) -> None:
        self.path, self._shape, self._bytes_max, self._disk = path, shape, bytes_max, disk
        self._is_refused = False  # `load` could not read the content

    def load(self) -> T | None:
        """Returns the content; None if there is no file. Raises FAILED_PRECONDITION if it can't be read, is too large,
        or does not have the expected shape; the file is left unchanged."""
        try:
            with self.path.open("rb") as file:
                data = file.read(self._bytes_max + 1)
            if len(data) > self._bytes_max:
                raise ValueError(f"expected at most {self._bytes_max} bytes")
            return self._shape.validate_json(data, strict=True)
        except FileNotFoundError:
            return None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"[{step!r}]" for step in first["loc"])
            why = f"{where}: {first['msg']}" if where else first["msg"]
        except (OSError, ValueError) as error:
            why = str(error)
        self._is_refused = True
        raise UStatusError(UCode.FAILED_PRECONDITION, f"{self.path} can't be read: {why}")

    def save(self, value: T) -> None:
        """Replace the content. Raises as `write`."""
        self.write(json.dumps(value))

    def write(self, text: str) -> None:
        """Replace the content by `text`, which is JSON of the shape. Content that `load` refused is renamed, not
        deleted. Raises RESOURCE_EXHAUSTED if `text` is too long, UNAVAILABLE if the disk fails; then the file is
        unchanged."""
        size = len(text.encode())
        if size > self._bytes_max:
            why = f"{self.path} may have at most {self._bytes_max} bytes, got {size}: nothing is saved"
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, why)
        try:
            if self._is_refused:
                with contextlib.suppress(FileNotFoundError):
                    self.path.rename(f"{self.path}.refused-{time.time_ns()}")
                self._is_refused = False
            self._disk.replace_text(self.path, text)
        except OSError as error:
            raise UStatusError(UCode.UNAVAILABLE, f"{self.path} can't be written: {error.strerror}") from None
