"""What tests of every area share: a real broker, data directories of older versions, the watch over skipped proofs,
and what runs with several workers need."""

from __future__ import annotations

import gc
import inspect
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import settings

from tests import tiers
from tests.side_by_side import PLUGIN_NAME as SUMMARY
from tests.side_by_side import Summary, Turns
from tools import spec_coverage
from tools.broker import Broker
from transports import ports
from transports.conformance.deadline import limited
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode

# compiled by the first compiler only: a JVM that lives for one test spends less time on the second than it saves
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")
os.environ.pop("COLUMNS", None)  # a console reads it once; the tests that need a width set it

settings.register_profile("full", deadline=None)  # a slow machine is no failure
settings.register_profile("fast", settings.get_profile("full"), max_examples=30)
settings.load_profile("full")  # unless --hypothesis-profile names the other one

PART_OF_TEST: Final = 0.8  # of a timeout; what is left is for its fixtures

MakeBroker = Callable[..., Broker]
OldData = Callable[[str], Path]
FIXTURES: Path = Path(__file__).parent / "fixtures"
OLD: Path = FIXTURES / "data-0.1.0"  # made by that version, with tests/fixtures/make_data.py


def pytest_configure(config: pytest.Config) -> None:
    # it is, where tools/spec_coverage.py runs the tests
    if not config.pluginmanager.has_plugin(spec_coverage.PLUGIN_NAME):
        config.pluginmanager.register(spec_coverage.proofs(), spec_coverage.PLUGIN_NAME)
    config.pluginmanager.register(Summary(), SUMMARY)
    if (run_id := os.environ.get("PYTEST_XDIST_TESTRUNUID")) and hasattr(config, "workerinput"):
        config.pluginmanager.register(Turns(run_id), "turns_of_workers")
        ports.use_part(tiers.worker, tiers.WORKERS_MAX)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)  # last: all workers wait for each


def pytest_collection_finish() -> None:
    gc.freeze()  # thousands of collected tests, which each full collection would look through


def pytest_itemcollected(item: pytest.Item) -> None:
    """Coverage is measured by the tests of `make test`: the others run the same code in more cases."""
    if item.get_closest_marker("full") is not None:
        item.add_marker("no_cover")  # of pytest-cov


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Ends an asynchronous test that hangs, and says what it was waiting for; pytest-timeout sees the idle loop only.
    The rest of the time is that of its fixtures."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        mark = item.get_closest_marker("timeout")
        timeout_s = float(mark.args[0] if mark is not None else item.config.getini("timeout"))
        item.obj = limited(item.obj, lambda *_, **__: timeout_s * PART_OF_TEST)
    return (yield)


def _start(**options: Any) -> Broker:
    """Where tests count (CI=true), a missing broker is a failure; elsewhere it skips what needs one."""
    try:
        return Broker(**options).start()
    except UStatusError as error:
        if error.code == UCode.FAILED_PRECONDITION and os.environ.get("CI", "").lower() not in ("true", "1"):
            pytest.skip(error.message)
        raise


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """One mosquitto for all tests: open to everybody, so use a topic of your own. Don't stop it."""
    started = _start()
    yield started
    started.close()


@pytest.fixture
def make_broker() -> Iterator[MakeBroker]:
    """Brokers of one test, with options: `make_broker(persistent=True)`."""
    started: list[Broker] = []

    def make(**options: Any) -> Broker:
        started.append(_start(**options))
        return started[-1]

    yield make
    for one in started:
        one.close()


@pytest.fixture
def own_broker(make_broker: MakeBroker) -> Broker:
    """A mosquitto of this test alone, to stop, kill and restart; it keeps sessions and messages over a stop."""
    return make_broker(persistent=True)


@pytest.fixture
def old_data(tmp_path: Path) -> OldData:
    """`old_data("stopped")`: a data_dir as version 0.1.0 left it; "killed": as kill -9 left it, half of it in
    write-ahead logs."""

    def unpack(name: str) -> Path:
        folder = tmp_path / name
        with tarfile.open(OLD / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        return folder

    return unpack


@pytest.fixture(scope="session")
def old_content() -> Any:
    """What is in them."""
    return json.loads((OLD / "expected.json").read_text())
