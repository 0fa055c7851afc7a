"""One broker of each make, the table of expected deviations, and the matrix at the end.

test[hivemq] -> pass | fail -> deviations.toml: is it expected?  -> matrix: broker x check, on the terminal
                                fails, and is not there -> red      and in out/brokers/matrix.md
                                passes, and is there    -> red
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.brokers.deviations import Deviation, judge, read
from tests.brokers.makes import CACHE, MAKES, AnyBroker, Make, Missing
from tests.brokers.matrix import Matrix

MATRIX: Final = pytest.StashKey[Matrix]()
TABLE: Final = pytest.StashKey[dict[tuple[str, str], Deviation]]()
MISSING: Final = pytest.StashKey[dict[str, Missing]]()
FACTS: Final = "facts"  # what a test found out for the matrix, as user property of its report

StartBroker = Callable[..., AnyBroker]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MATRIX], config.stash[TABLE] = Matrix(), read()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A row of the table that names no test is a mistake in it."""
    if config.getoption("keyword") or config.getoption("file_or_dir") != ["tests/brokers"]:
        return
    known = {(make, check) for item in items if _is_of_make(item) for make, checks in [_key(item)] for check in checks}
    unknown = sorted(f"{make}: {check}" for make, check in config.stash[TABLE].keys() - known)
    if unknown:
        raise pytest.UsageError(f"deviations.toml names checks that there are not: {', '.join(unknown)}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the chosen tests need, before any of them: it takes longer than a test may."""
    if session.config.getoption("collectonly"):
        return
    missing = session.config.stash[MISSING] = {}
    for name in dict.fromkeys(_key(item)[0] for item in session.items if _is_of_make(item)):
        print(f"{name} {MAKES[name].version}: building it, unless that was done before", flush=True)
        try:
            MAKES[name].prepare()
        except Missing as error:
            missing[name] = error


def _is_of_make(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and "make" in item.fixturenames


def _key(item: pytest.Item) -> tuple[str, list[str]]:
    """The make of a test, and the names of its check in the table: a conformance test without its mode, and with it."""
    make: str = getattr(item, "callspec").params["make"]  # noqa: B009 - only functions have one
    check = re.sub(rf"\b{make}-?|\[{make}\]", "", item.name.removeprefix("test_"))
    mode = _mode(item)
    return make, [check] if mode is None else [check, f"{mode}: {check}"]


def _deviation(item: pytest.Item) -> Deviation | None:
    """What the table says of it."""
    make, checks = _key(item)
    table = item.config.stash[TABLE]
    return next((table[make, check] for check in checks if (make, check) in table), None)


def _mode(item: pytest.Item) -> str | None:
    """Of a conformance test."""
    return getattr(getattr(item, "cls", None), "mode", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report: pytest.TestReport = yield
    if not _is_of_make(item):
        return report
    make, checks = _key(item)
    deviation = _deviation(item)
    if deviation is not None and report.when == "call":
        judge(report, deviation)
    if report.when == "call" or not report.passed:
        facts: Any = dict(report.user_properties).get(FACTS, {})
        item.config.stash[MATRIX].note(make, checks[0], report, facts=facts, deviation=deviation, mode=_mode(item))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    matrix = config.stash[MATRIX]
    if not matrix.rows:
        return
    terminalreporter.section("brokers")
    text = matrix.markdown()
    for line in text.splitlines():
        terminalreporter.write_line(line)
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / "matrix.md").write_text(text)


@pytest.fixture(scope="session", params=list(MAKES))
def make(request: pytest.FixtureRequest) -> Make:
    """Each make in turn. One that can't be had is skipped; where tests count (CI=true) it fails, unless the registry
    does not have it."""
    found = MAKES[request.param]
    if (missing := request.config.stash[MISSING].get(found.name)) is not None:
        is_strict = os.environ.get("CI", "").lower() in ("true", "1") and not missing.registry_lacks_it
        (pytest.fail if is_strict else pytest.skip)(str(missing))
    request.config.stash[MATRIX].versions[found.name] = found.version
    return found


@pytest.fixture(scope="session")
def broker(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyBroker]:
    """One for all tests of a make: use topics of your own, and don't stop it."""
    started = make.broker(tmp_path_factory.mktemp(make.name) / "broker").start()
    yield started
    started.close()


@pytest.fixture
def start_broker(make: Make, tmp_path: Path) -> Iterator[StartBroker]:
    """Brokers of one test: `start_broker(as_delivered=True)` has the limits that it comes with."""
    started: list[AnyBroker] = []

    def start(*, as_delivered: bool = False) -> AnyBroker:
        started.append(make.broker(tmp_path / f"broker{len(started)}", as_delivered=as_delivered).start())
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def make_broker(make: Make, start_broker: StartBroker) -> Callable[..., AnyBroker]:
    """What the conformance tests ask for; users have been set up for mosquitto alone."""

    def started(**options: Any) -> AnyBroker:
        if "users" in options:
            pytest.skip("a stranger is refused by mosquitto in tests/transports")
        return start_broker()

    return started


@pytest.fixture
def deviation(request: pytest.FixtureRequest) -> Deviation | None:
    """What the table says of this test."""
    return _deviation(request.node)


@pytest.fixture
def facts(request: pytest.FixtureRequest) -> dict[str, str]:
    """What a test finds out for the matrix, row -> cell, whether it passes or not."""
    found: dict[str, str] = {}
    request.node.user_properties.append((FACTS, found))
    return found
