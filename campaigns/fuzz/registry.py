"""The targets by name, and their shared functions.

@target -> TARGETS[name] -> run(data)          returns: passed          raises: a find
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

CORPUS: Final = Path(__file__).parent / "corpus"
# of an input: larger ones show nothing new in decoders, and small inputs run more often
INPUT_BYTES_MAX: Final = 4_096

Run = Callable[[bytes], None]


class Target(NamedTuple):
    name: str
    run: Run

    @property
    def corpus(self) -> Path:
        return CORPUS / self.name

    def inputs(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted(self.corpus.glob("*"))]


TARGETS: Final[dict[str, Target]] = {}


def target(run: Run) -> Run:
    """Registers `run` under its own name."""
    name = run.__name__
    assert name not in TARGETS, f"two targets are called {name}"
    TARGETS[name] = Target(name, run)
    return run


def load() -> dict[str, Target]:
    """Returns all targets."""
    for module in ("wires", "services", "files", "edge", "grip", "recovery"):
        importlib.import_module(f"campaigns.fuzz.{module}")
    return TARGETS


@contextlib.contextmanager
def refusing(*codes: UCode.ValueType) -> Iterator[None]:
    """Accepts errors with these codes in its block; any other error is a find."""
    try:
        yield
    except UStatusError as error:
        if error.code not in codes:
            raise AssertionError(f"refused with a code that is not documented: {error}") from error
        if not error.message:
            raise AssertionError("refused without a reason") from error


def is_refused(decode: Callable[[bytes], object], data: bytes) -> bool:
    """Returns True if `decode` raises INVALID_ARGUMENT."""
    try:
        decode(data)
    except UStatusError as error:
        return error.code == UCode.INVALID_ARGUMENT
    return False


def file_name(data: bytes) -> str:
    """Returns the name of an input in the corpus."""
    return hashlib.blake2b(data, digest_size=10).hexdigest()
