"""Continuous integration tries the pinned, the lowest and the newest versions, and keeps what the audit found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
WORKFLOW: Final[dict[Any, Any]] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())


def commands(job: str) -> str:
    return "\n".join(step.get("run", "") for step in WORKFLOW["jobs"][job]["steps"])


def test_each_way_to_choose_versions_is_tried() -> None:
    assert ".ci/run" in commands("test")
    assert "make lowest" in commands("lowest")
    assert re.search(r"make test LOCK=(\s|$)", commands("newest"))


def test_every_test_runs_compiled_and_as_python_source() -> None:
    assert "tools.ci_run" in (ROOT / ".ci/run").read_text()
    assert "make test-all COMPILED=0" in commands("test-all")


def test_the_newest_versions_are_tried_though_nobody_pushes() -> None:
    triggers = WORKFLOW[True]  # YAML 1.1 reads the key `on` so
    assert [len(one["cron"].split()) for one in triggers["schedule"]] == [5]


def test_the_audit_and_the_bill_of_materials_are_kept() -> None:
    assert "make audit" in commands("audit")
    (kept,) = (
        step["with"]["path"].split()
        for step in WORKFLOW["jobs"]["audit"]["steps"]
        if "upload-artifact" in step.get("uses", "")
    )
    assert set(kept) == {"dist/sbom.json", "dist/audit.json"}
    makefile = (ROOT / "Makefile").read_text()
    assert "--strict" in makefile[makefile.index("\naudit:") :], "an audit that could not look must not pass"


def test_what_the_workflow_makes_there_is_a_rule_for() -> None:
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = {target for job in WORKFLOW["jobs"] for target in re.findall(r"\bmake ([a-z-]+)", commands(job))}
    assert made
    assert made <= rules


def test_wheels_and_image_are_made_for_both_machines() -> None:
    assert WORKFLOW["jobs"]["wheel"]["strategy"]["matrix"]["machine"] == ["ubuntu-latest", "ubuntu-24.04-arm"]
    assert "--platform linux/amd64,linux/arm64 --file deploy/docker/Dockerfile" in commands("image")
    assert WORKFLOW["jobs"]["image"]["needs"] == "wheel"
    assert "--push" not in commands("image")


def test_no_registry_is_named() -> None:
    """Where packages come from is the business of the machine that installs them."""
    files = ["Makefile", "pyproject.toml", ".github/workflows/ci.yml", "deploy/docker/Dockerfile", "tools/lock.py"]
    for name in files:
        assert not re.search(r"index-url|pypi\.|pythonhosted", (ROOT / name).read_text()), name
