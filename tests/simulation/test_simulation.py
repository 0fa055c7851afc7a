"""Whole gateways in worlds from seeds: a fixed list here, others each time in the CI workflow, more with `make
simulate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import full

pytestmark = pytest.mark.timeout(660)

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 600


def simulation(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "campaigns.simulation", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("start", "count"), [(9_000, 6), pytest.param(9_006, 27, marks=full), pytest.param(9_033, 27, marks=full)]
)
def test_no_seed_of_the_fixed_list_finds_a_fault(start: int, count: int) -> None:
    done = simulation("--seeds", str(count), "--start", str(start), "--json", "--jobs", "2")
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    failed = [f"seed {one['seed']}: {one['violations'][0]}" for one in found["failed"]]
    assert not failed, "\n".join([*failed, "see python -m campaigns.simulation --seed SEED -v"])
    assert found["seeds"] == count


@pytest.mark.parametrize(("start", "count"), [(400, 2), pytest.param(402, 19, marks=full)])
def test_whoever_reads_epochs_has_all_of_one_or_none(start: int, count: int) -> None:
    """Of the gateway that keeps them, and of one that follows it."""
    kinds = "epochs,static,follow,keeper"
    done = simulation("--seeds", str(count), "--start", str(start), "--kinds", kinds, "--json", "--jobs", "2")
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    failed = [f"seed {one['seed']}: {one['violations'][0]}" for one in found["failed"]]
    assert not failed, "\n".join([*failed, f"see python -m campaigns.simulation --seed SEED --kinds {kinds} -v"])
    assert found["epochs"] > 10 * count, "that were seen whole"


@pytest.mark.parametrize(("start", "count"), [(13, 2), pytest.param(30, 17, marks=full)])
def test_a_gateway_under_load_drops_only_what_is_beyond_a_quota(start: int, count: int) -> None:
    done = simulation("--seeds", str(count), "--start", str(start), "--kinds", "load", "--json", "--jobs", "2")
    assert done.stdout, done.stderr
    failed = [f"seed {one['seed']}: {one['violations'][0]}" for one in json.loads(done.stdout)["failed"]]
    assert not failed, "\n".join([*failed, "see python -m campaigns.simulation --seed SEED --kinds load -v"])


@pytest.mark.parametrize(("seed", "gateway"), [(2, "C"), (3, "V")])
def test_a_gateway_that_comes_back_with_an_emptied_folder_has_its_partners_again_soon(seed: int, gateway: str) -> None:
    done = simulation("--seed", str(seed), "--kinds", "chain", "-v")
    assert done.returncode == 0, done.stdout[-2000:]
    assert f" emptied {gateway} " in done.stdout


@pytest.mark.parametrize(("seed", "gateway"), [(20_006, "V"), (20_011, "C")])
def test_a_follower_or_a_followed_gateway_that_comes_back_with_an_emptied_folder_says_so(
    seed: int, gateway: str
) -> None:
    """The follower has everything again that the other one still has."""
    done = simulation("--seed", str(seed), "--kinds", "follow", "-v")
    assert done.returncode == 0, done.stdout[-2000:]
    assert f" emptied {gateway}\n" in done.stdout


@pytest.mark.parametrize("start", [9_100, 900_102])
def test_the_same_seed_gives_the_same_run(start: int, tmp_path: Path) -> None:
    """In another process, whose memory lies elsewhere, and after another seed."""
    records = [tmp_path / name for name in ("first.jsonl", "second.jsonl")]
    options = ["--json", "--all", "--record"]
    done = simulation("--seeds", "4", "--start", str(start), "--jobs", "1", *options, str(records[0]))
    first = json.loads(done.stdout)
    done = simulation("--seeds", "3", "--start", str(start + 1), "--jobs", "2", *options, str(records[1]))
    second = json.loads(done.stdout)
    assert first["digests"][1:] == second["digests"]
    assert len(set(first["digests"])) == 4
    lines = [record.read_bytes().splitlines(keepends=True) for record in records]
    assert lines[0][1:] == lines[1]
    assert [json.loads(line)["run"] for line in lines[0]] == first["digests"]
    assert all(json.loads(line)["heard"] for line in lines[0])
