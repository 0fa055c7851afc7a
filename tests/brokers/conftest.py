"""One broker of each make, the table of expected deviations, and the matrix at the end.

test[hivemq] -> pass | fail -> deviations.toml: is it expected?  -> matrix: broker x check, on the terminal
                                fails, and is not there -> red      and in out/brokers/matrix.md
                                passes, and is there    -> red
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.brokers.deviations import Deviation, read
from tests.brokers.makes import CACHE, MAKES, AnyBroker, Make, Missing
from tests.brokers.matrix import Matrix

MATRIX: Final = pytest.StashKey[Matrix]()
TABLE: Final = pytest.StashKey[dict[tuple[str, str], Deviation]]()
FACTS: Final = "facts"  # what a test found out for the matrix, as user property of its report

StartBroker = Callable[..., AnyBroker]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MATRIX], config.stash[TABLE] = Matrix(), read()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A row of the table that names no test is a mistake in it."""
    if config.getoption("keyword") or config.getoption("file_or_dir") != ["tests/brokers"]:
        return
    known = {key for item in items if (key := _key(item)) is not None}
    unknown = sorted(f"{make}: {check}" for make, check in config.stash[TABLE].keys() - known)
    if unknown:
        raise pytest.UsageError(f"deviations.toml names checks that there are not: {', '.join(unknown)}")


def _key(item: pytest.Item) -> tuple[str, str] | None:
    """(make, check) of a test; the check of a conformance test begins with its mode."""
    spec = getattr(item, "callspec", None)
    if spec is None or "make" not in spec.params:
        return None
    name: str = spec.params["make"]
    check = item.name.replace(f"[{name}]", "").replace(f"[{name}-", "[").replace(f"-{name}]", "]")
    mode = getattr(getattr(item, "cls", None), "mode", None)
    return name, check.removeprefix("test_") if mode is None else f"{mode}: {check.removeprefix('test_')}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report: pytest.TestReport = yield
    if (key := _key(item)) is None:
        return report
    deviation = item.config.stash[TABLE].get(key)
    if deviation is not None and report.when == "call":
        _judge(report, deviation)
    matrix = item.config.stash[MATRIX]
    if report.when == "call" or not report.passed:
        facts = dict(report.user_properties).get(FACTS, {})
        is_conformance = getattr(getattr(item, "cls", None), "mode", None) is not None
        matrix.note(key[0], key[1], report, facts=facts, deviation=deviation, is_conformance=is_conformance)
    return report


def _judge(report: pytest.TestReport, deviation: Deviation) -> None:
    """A failure that is expected becomes an xfail; a success where one is expected becomes a failure."""
    if report.failed and deviation.shows in report.longreprtext:
        report.outcome = "skipped"
        report.wasxfail = deviation.why
    elif report.failed:
        report.sections.append(("deviations.toml", f"expects another failure: {deviation.shows!r}"))
    elif report.passed and not deviation.may:
        report.outcome = "failed"
        report.longrepr = f"no longer deviates: take its row out of deviations.toml ({deviation.why})"


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
    try:
        found.prepare()
    except Missing as missing:
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
def facts(request: pytest.FixtureRequest) -> dict[str, str]:
    """What a test finds out for the matrix, row -> cell, whether it passes or not."""
    found: dict[str, str] = {}
    request.node.user_properties.append((FACTS, found))
    return found
