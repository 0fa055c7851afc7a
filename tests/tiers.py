"""What `make test` leaves to `make test-rest`, and what workers that run side by side must not share.

full          the mark of what `make test` does not run
seeds()       many seeds for one test: a few in `make test`, others each time in `make simulate`
examples()    hypothesis: fewer in `make test`
drawn()       a part of many equal cases, another one with each commit
dds_domain()  a DDS domain of this worker's own
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import settings

ROOT: Final = Path(__file__).resolve().parent.parent
WORKERS_MAX: Final = 12  # more processes would run out of DDS domains below the ports that `transports.ports` uses
DOMAINS_EACH: Final = 4
FIRST_SEED: Final = int(os.environ.get("FIRST_SEED", "0"))  # `make simulate` draws it

full: Final = pytest.mark.full
worker: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def seeds(count: int, quick: int, step: int = 1) -> list[Any]:
    """`count` seeds, each `step` above the last one, for `parametrize`; `make test` takes the first `quick` of them.

    To run one again that `make simulate` found: FIRST_SEED=SEED pytest 'tests/file.py::test_name[SEED]'.
    """
    return [
        pytest.param(FIRST_SEED + step * place, marks=[pytest.mark.seeded, *([full] if place >= quick else [])])
        for place in range(count)
    ]


def examples(count: int) -> int:
    """`max_examples` of a test that needs another number than the profile has: a fifth of `count` in `make test`."""
    return count if settings.get_current_profile_name() != "fast" else max(count // 5, 10)


def drawn(cases: Iterable[str], one_of: int = 10) -> list[Any]:
    """All `cases`, for `parametrize`; `make test` takes one of `one_of` of them, chosen by the commit that is checked
    out, so that all workers choose the same ones and every commit others."""
    chosen = _digest(_commit()) % one_of
    return [pytest.param(case, marks=[] if _digest(case) % one_of == chosen else [full]) for case in cases]


def dds_domain(number: int = 0) -> int:
    """One of this worker's domains, `number` from 0 to 3. Two runs at the same time use the same ones, so give each
    network a tag of its own."""
    assert worker < WORKERS_MAX, f"at most {WORKERS_MAX} workers"
    assert number < DOMAINS_EACH
    return 1 + worker * DOMAINS_EACH + number


@functools.cache
def _commit() -> str:
    """Its id; "" where there is no git, or no checkout."""
    try:
        said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return said.stdout.strip()


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
