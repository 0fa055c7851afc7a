"""The binary of the Rust client, the stage, and the table of cells at the end.

@cell("zenoh -> mqtt-in, rust -> python", "publish") -> its outcome -> table, and a line: interop: N of M cells pass
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from tests.interop.stage import Direct, Stage
from tools.broker import Broker

HERE: Final = Path(__file__).parent
CELLS: Final = pytest.StashKey[list["Cell"]]()


@dataclass
class Cell:
    """One thing that one side does and the other must understand. `limit` says why it can't, and was shown to be so.

    A test that passes makes its cells pass; one of several steps says so of each as it gets there.
    """

    row: str
    column: str
    outcome: str = "fail"
    limit: str = ""

    def settle(self) -> None:
        self.outcome = "limit" if self.limit else "pass"


@pytest.fixture(scope="session")
def binary() -> Path:
    """The Rust client, built if it must be: minutes the first time, since Zenoh is large. Cargo builds only what has
    changed."""
    cargo = shutil.which("cargo")
    if cargo is None:
        outcome = pytest.fail if os.environ.get("CI", "").lower() in ("true", "1") else pytest.skip
        outcome("no cargo: install Rust (rustup.rs) to talk to Eclipse's Rust clients")
    built = subprocess.run(
        [cargo, "build", "--locked", "--quiet", "--bins", "--examples"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0:
        pytest.fail(f"the Rust client does not build:\n{built.stderr[-3000:]}", pytrace=False)
    return Path(os.environ.get("CARGO_TARGET_DIR", HERE / "target")) / "debug" / "interop-client"


@pytest.fixture(scope="session")
def other_brokers() -> Iterator[Callable[[], Broker]]:
    """Brokers with nobody else on them."""
    started: list[Broker] = []

    def make() -> Broker:
        started.append(Broker().start())
        return started[-1]

    yield make
    for one in started:
        one.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stage(
    binary: Path, other_brokers: Callable[[], Broker], broker: Broker, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        made = Stage(binary, tmp_path_factory.mktemp("interop"), stack)
        await made.start(broker, other_brokers())
        yield made


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def direct(
    binary: Path, other_brokers: Callable[[], Broker], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Direct]]:
    """Three networks without a gateway."""
    async with AsyncExitStack() as stack:
        halls = {
            name: Direct(binary, tmp_path_factory.mktemp("direct"), stack) for name in ("zenoh", "mqtt-in", "mqtt-off")
        }
        for name, hall in halls.items():
            await hall.start(name, other_brokers())
        yield halls


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], Cell]]:
    """`cell(row, column)` notes a cell; a test that fails, or does not get that far, leaves it failed."""
    cells = request.config.stash.setdefault(CELLS, [])
    mine: list[Cell] = []

    def note(row: str, column: str) -> Cell:
        mine.append(Cell(row, column))
        cells.append(mine[-1])
        return mine[-1]

    yield note
    report = request.node.stash.get(_CALL, None)
    for one in mine:
        if report is not None and report.passed:
            one.settle()


_CALL: Final = pytest.StashKey[pytest.TestReport]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.when == "call":
        item.stash[_CALL] = report
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    cells = config.stash.get(CELLS, [])
    if not cells:
        return
    terminalreporter.section("cells")
    columns = list(dict.fromkeys(cell.column for cell in cells))
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        rows.setdefault(cell.row, {})[cell.column] = cell.outcome
    width = max(map(len, rows))
    terminalreporter.write_line("  ".join([" " * width, *columns]))
    for row, outcomes in rows.items():
        shown = (outcomes.get(column, "").ljust(len(column)) for column in columns)
        terminalreporter.write_line("  ".join([row.ljust(width), *shown]).rstrip())
    for limit in dict.fromkeys(cell.limit for cell in cells if cell.outcome == "limit"):
        count = sum(cell.outcome == "limit" and cell.limit == limit for cell in cells)
        terminalreporter.write_line(f"limit ({count} cells): {limit}")
    passed, limits = (sum(cell.outcome == outcome for cell in cells) for outcome in ("pass", "limit"))
    rest = f"; {limits} are known limits" if limits else ""
    terminalreporter.write_line(f"interop: {passed} of {len(cells)} cells pass{rest}")
