"""The demo from end to end, and that nothing remains after it ends at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import full

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(300)]

KEYS = [
    "vehicles",
    "published",
    "subscribed",
    "cloud_received",
    "parquet_rows",
    "gaps",
    "duplicates",
    "unsubscribed_forwarded",
    "seconds",
]
END_S = 60


def processes_of(folder: Path) -> dict[int, str]:
    """Returns the processes with `folder` as their folder for temporary files: the demo and all its descendants."""
    mark = f"TMPDIR={folder}".encode()
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
                )
    return found


class Demo:
    """`up-streamer demo` in its own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temporary = folder, folder / "temporary"
        self.temporary.mkdir()

    async def start(self, *options: str) -> asyncio.subprocess.Process:
        with (self.folder / "stderr").open("wb") as errors:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "streamer.commands.cli", "demo", "--out", str(self.folder / "out"), *options),
                env={**os.environ, "TMPDIR": str(self.temporary), "TERM": "dumb"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        return self.process

    async def end(self) -> tuple[int, str, str]:
        """Returns exit code, stdout, stderr."""
        out, _ = await asyncio.wait_for(self.process.communicate(), 240)
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), (self.folder / "stderr").read_text(errors="replace")

    async def until_running(self, word: str) -> None:
        """Waits until a process of the demo has `word` in its command line."""
        async with asyncio.timeout(END_S):
            while not any(  # noqa: ASYNC110 - other processes send no event
                word in command for pid, command in processes_of(self.temporary).items() if pid != self.process.pid
            ):
                await asyncio.sleep(0.05)

    async def assert_nothing_left(self) -> None:
        async with asyncio.timeout(10):  # the kernel may still remove killed processes
            while left := processes_of(self.temporary):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert not left
        assert [path.name for path in self.temporary.iterdir() if path.name.startswith("up-streamer")] == []


@pytest.fixture
async def demo(tmp_path: Path) -> AsyncIterator[Demo]:
    made = Demo(tmp_path)
    yield made
    if made.process.returncode is None:
        made.process.kill()
        await made.process.wait()
    for pid in processes_of(made.temporary):  # left by a failed test
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def numbers_of(out: str) -> dict[str, Any]:
    counts: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert list(counts) == KEYS
    return counts


async def test_everything_adds_up(demo: Demo) -> None:
    await demo.start("--seconds", "20", "--rate", "500")
    code, out, errors = await demo.end()
    assert code == 0, out + errors
    counts = numbers_of(out)
    assert counts["vehicles"] == 4
    assert counts["published"] == counts["parquet_rows"] == 4 * 20 * 15
    assert counts["subscribed"] == counts["cloud_received"] == 4 * 20 * 6
    assert (counts["gaps"], counts["duplicates"], counts["unsubscribed_forwarded"]) == (0, 0, 0)
    assert counts["seconds"] > 0
    plot = (demo.folder / "out" / "demo.png").read_bytes()
    assert plot.startswith(b"\x89PNG\r\n")
    assert len(plot) > 20_000
    assert all(f"vin{number}" in out for number in (1, 2, 3, 4))
    assert "Traceback" not in errors
    await demo.assert_nothing_left()


@full
async def test_recorded_drives_without_mqtt_report_rows_that_cannot_be_read(demo: Demo) -> None:
    rows = ["VEHICLE_SPEED (),ENGINE_RPM (),COOLANT_TEMPERATURE (),", *(f"{n},{900 + n},{80 + n}," for n in range(30))]
    rows[5], rows[9], rows[12] = "fast,1000,80,", ",,,", '"7,8'
    drives = demo.folder / "drives"
    drives.mkdir()
    (drives / "broken.csv").write_text("\n".join(rows))
    (drives / "short.csv").write_text("VEHICLE_SPEED\n" + "5\n" * 12)
    await demo.start("--data", str(drives), "--without-mqtt")
    code, out, errors = await demo.end()
    assert code == 0, out + errors
    counts = numbers_of(out)
    assert counts["vehicles"] == 2
    assert counts["published"] == counts["parquet_rows"] == 27 * 3 + 2 + 12
    assert counts["cloud_received"] == counts["subscribed"] == counts["published"]
    assert "row 6: Vehicle.OBD.Speed is not a number: 'fast'" in errors
    assert "row 10: has no readable value: skipped" in errors
    await demo.assert_nothing_left()


@pytest.mark.parametrize(
    "moment",
    [*[pytest.param(moment, marks=full) for moment in ("mosquitto", "usubscription", "spark_ingest")], "demo.vehicle"],
)
async def test_control_c_leaves_nothing_behind(demo: Demo, moment: str) -> None:
    await demo.start("--seconds", "600", "--rate", "100")
    await demo.until_running(moment)
    demo.process.send_signal(signal.SIGINT)
    code, _, errors = await demo.end()
    assert code == 130
    assert "Traceback" not in errors
    await demo.assert_nothing_left()


async def test_control_c_before_anything_has_started(demo: Demo) -> None:
    await demo.start("--seconds", "600")
    async with asyncio.timeout(END_S):
        while not any(path.name.startswith("up-streamer-") for path in demo.temporary.iterdir()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    demo.process.send_signal(signal.SIGINT)
    code, _, errors = await demo.end()
    assert code in (130, -signal.SIGINT)
    assert "Traceback" not in errors
    await demo.assert_nothing_left()
