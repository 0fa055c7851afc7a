"""Runs tests of the conformance suite without pytest, each on its own loop, for any mutant.

cases() -> "test_name[parameter]" -> verdict(transport, case, deadline_s): "" if it passes, else why not
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import warnings
from typing import Any, Final

import pytest
import structlog

from tests.transports.mutants.end import HubTransport
from tests.transports.mutants.harness import HubConformance
from tests.transports.mutants.hub import Hub
from tests.transports.mutants.mutant import TEST_OVER, Mutant
from transports.conformance.base import Ends

IN_TIME_S: Final = 10.0  # for a good plugin, on a slow machine
SOON_S: Final = 0.6  # for one that is expected to fail
ANY_TEST_S: Final = 3.0  # for one that may pass
CASE_DEADLINES: Final = 12  # of one case, which waits for several events in turn
LEAVING_S: Final = 5.0  # for calls that a mutant does not end

Case = tuple[str, dict[str, Any]]


def cases() -> dict[str, Case]:
    """Every test by its id: the name of its method, and its parameter."""
    found: dict[str, Case] = {}
    for name, method in inspect.getmembers(HubConformance, inspect.isfunction):
        if name.startswith("test_"):
            marks = [mark for mark in getattr(method, "pytestmark", []) if mark.name == "parametrize"]
            if not marks:
                found[name] = (name, {})
            for mark in marks:
                argument, values = mark.args
                for value in values:
                    found[f"{name}[{value}]"] = (name, {argument: value})
    return found


def verdict(transport: type[HubTransport], case: Case, deadline_s: float) -> str:
    """ "" if the test passes or is skipped; else the first line of why it failed."""
    with structlog.testing.capture_logs(), warnings.catch_warnings():
        # mutants leave tasks, futures and sockets to the garbage collector
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        TEST_OVER.clear()
        try:
            with asyncio.Runner() as runner:
                runner.get_loop().set_exception_handler(lambda *_: None)
                why = runner.run(_verdict(transport, case, deadline_s))
        finally:
            TEST_OVER.set()
            gc.collect()
            logging.disable(logging.NOTSET)
        return why


async def _verdict(transport: type[HubTransport], case: Case, deadline_s: float) -> str:
    name, arguments = case
    harness = HubConformance()
    harness.transport, harness.deadline_s, harness.hub = transport, deadline_s, Hub()
    await harness.hub.start()
    ends = Ends(harness)
    try:
        async with asyncio.timeout(deadline_s * CASE_DEADLINES):
            method = getattr(harness, name)
            wanted = inspect.signature(method).parameters
            if "ends" in wanted:
                arguments = {**arguments, "ends": ends}
            if "pair" in wanted:
                arguments = {**arguments, "pair": await ends.pair()}
            await method(**arguments)
            await ends.close()
    except pytest.skip.Exception:
        return ""
    except (Exception, pytest.fail.Exception) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        leaving = asyncio.ensure_future(_leave(ends, harness.hub))
        await asyncio.wait({leaving}, timeout=LEAVING_S)
    return ""


async def _leave(ends: Ends, hub: Hub) -> None:
    with contextlib.suppress(Exception):  # whatever a mutant raises
        async with asyncio.timeout(LEAVING_S / 2):
            await ends.close()
    await hub.stop()


def caught_by(mutant: Mutant) -> list[str]:
    """All tests that fail for a mutant, the expected one first. Tries one parameter of each test. Takes seconds."""
    tried = {mutant.caught_by: cases()[mutant.caught_by]} if mutant.caught_by else {}
    methods = {name for name, _ in tried.values()}
    for name, case in cases().items():
        if case[0] not in methods:
            methods.add(case[0])
            tried[name] = case
    return [name for name, case in tried.items() if verdict(mutant.transport, case, ANY_TEST_S)]
