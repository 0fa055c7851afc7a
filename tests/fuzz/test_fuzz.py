"""Every decoder, with the inputs of the corpus and with some minutes' worth of new ones; and that the targets can find
something."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import structlog

from campaigns.fuzz import __main__ as main
from campaigns.fuzz import engine, registry
from campaigns.fuzz.mutate import mutated
from history.records import chunk
from tests.tiers import full
from transports.dds import mapping as dds_mapping
from transports.mqtt5 import wire
from uprotocol import encoded
from uprotocol import uri as uris

SECONDS = float(os.environ.get("FUZZ_SECONDS", "40"))  # in all; a busy machine tries fewer inputs in it
QUICK_SECONDS = 5.0
ROOT = Path(__file__).resolve().parent.parent.parent
TRIES_MAX = 20_000  # until a fault that was put back is found; some hundred are enough


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, registry.Target]]:
    before = structlog.get_config()
    engine.quiet()
    yield registry.load()
    structlog.configure(**before)


@pytest.mark.timeout(600)
def test_every_input_of_the_corpus(targets: dict[str, registry.Target]) -> None:
    """In a process of its own, which ends with its loops and folders."""
    done = subprocess.run(
        [sys.executable, "-m", "campaigns.fuzz", "--replay"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = sum(len(target.inputs()) for target in targets.values())
    assert done.stdout == f"{count} inputs replayed\n"


def test_every_target_has_inputs_that_are_small_and_named_by_what_they_are(targets: dict[str, registry.Target]) -> None:
    assert {path.name for path in registry.CORPUS.iterdir()} == set(targets), "a folder for each target"
    for target in targets.values():
        paths = list(target.corpus.iterdir())
        assert paths, f"{target.name} has nothing to begin with"
        assert all(path.name == registry.file_name(path.read_bytes()) for path in paths)
        assert sum(path.stat().st_size for path in paths) < 64 << 10


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    ("seconds", "options"),
    [pytest.param(QUICK_SECONDS, ["--random"], id="quick"), pytest.param(SECONDS, [], marks=full, id="whole")],
)
def test_new_inputs(seconds: float, options: list[str], tmp_path: Path) -> None:
    """The quick one without feedback: atheris instruments each target for a second before its first input."""
    command = [sys.executable, "-m", "campaigns.fuzz", "--seconds", str(seconds), "--out", str(tmp_path), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    print(done.stdout)
    if done.returncode:
        logs = [
            path.read_text(errors="replace")[-3_000:]
            for path in tmp_path.glob("*.log")
            if path.with_suffix("").name in _found(done.stdout)
        ]
        pytest.fail("\n\n".join([done.stdout, done.stderr, *logs]))
    assert done.stdout.count("nothing found") == len(registry.load())


def _found(said: str) -> set[str]:
    return {line.split()[0] for line in said.splitlines() if "FOUND" in line}


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.timeout(600)
def test_without_atheris_it_says_so_and_changes_the_corpus_at_random(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(engine, "has_atheris", lambda: False)
    assert main.hunt_all(["mark"], 1.0, tmp_path) == 0
    said = capfd.readouterr().out
    assert "atheris is not installed" in said
    assert "executions, random" in said


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine_name", ["random", "atheris"])
def test_what_a_hunt_finds_is_kept(engine_name: str, tmp_path: Path) -> None:
    """In a process that is forked for it, as in a hunt."""
    if engine_name == "atheris" and not engine.has_atheris():
        pytest.skip("atheris is not installed")
    script = FINDS.format(engine=engine_name, out=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]
    report = engine.Report(**json.loads(line))
    assert report.failed, done.stderr
    assert [Path(find).read_bytes()[:1] for find in report.finds] == [b"\x80"]
    assert report.executions > 0


FINDS = """
from pathlib import Path
from campaigns.fuzz import engine, registry

def mark(data):
    assert data[:1] != bytes([128]), "a find"

registry.load()["mark"] = registry.Target("mark", mark)
engine.nursery("{engine}", ["mark"], 60.0, Path("{out}"), 1)
"""


# Faults put back


def _suffix_without_a_look_at_ids(data: bytes, attributes: Any) -> bytes | None:
    return encoded.suffix(data) if encoded.is_shared(attributes) else None


def _sequence_without_bounds(sample: bytes, at: int, length: struct.Struct) -> tuple[bytes, int]:
    (count,) = length.unpack_from(sample, at)
    return sample[at + 4 : at + 4 + count], at + 4 + count


def _decode_without_lengths(columns: chunk.Columns) -> chunk.Chunk:
    return chunk.Chunk(range(columns.first_seq, columns.first_seq + 1), columns.time_ms, [0], [0], [columns.data])


def _varint_for_ever(data: bytes, start: int, end: int) -> tuple[int, int]:
    while data[start] & 0x80:  # a length that goes on is never done
        pass
    return data[start], start + 1


FAULTS: dict[str, tuple[str, ModuleType, str, Callable[..., object]]] = {
    "two ids in one message": ("stored_message", encoded, "shared_suffix", _suffix_without_a_look_at_ids),
    "any octets are an authority": ("uri_text", uris, "validate_authority", lambda authority: None),
    "a sample that ends too early": ("dds_sample", dds_mapping, "_sequence", _sequence_without_bounds),
    "a chunk is what it is": ("log_chunk", chunk, "decode", _decode_without_lengths),
    "a loop without end": ("mqtt_packets", wire, "read_varint", _varint_for_ever),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.timeout(600)
def test_a_fault_that_is_put_back_is_found(
    fault: str, targets: dict[str, registry.Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, owner, attribute, faulty = FAULTS[fault]
    if not str(owner.__file__).endswith(".py"):
        pytest.skip(f"{owner.__name__} is compiled, so a fault can't be put into it: UP_STREAMER_COMPILED=0")
    monkeypatch.setattr(owner, attribute, faulty)
    monkeypatch.setattr(engine, "INPUT_CPU_S", 0.5)
    assert found(targets[name]) is not None, f"{TRIES_MAX} inputs, and {fault!r} was not seen"


def found(target: registry.Target) -> BaseException | None:
    """What the first input raises that fails, of those that random changes make of the corpus."""
    inputs, rng = target.inputs(), random.Random(1)
    for number in range(TRIES_MAX):
        data = inputs[number] if number < len(inputs) else mutated(rng, inputs, registry.INPUT_BYTES_MAX)
        try:
            with engine.deadline(engine.INPUT_CPU_S):
                target.run(data)
        except (Exception, engine.TooSlow) as error:
            return error
    return None
