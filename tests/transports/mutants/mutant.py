"""The registry of faults. A fault is a good plugin with a few wrong lines, a sentence, and the test that catches it.

HubTransport <- a subclass for each fault, registered by @fault(sentence, test) under its own name, in words
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from tests.transports.mutants.end import HubTransport


@dataclass(frozen=True)
class Mutant:
    name: str
    says: str
    transport: type[HubTransport]
    caught_by: str  # the test that must fail; "" if the suite can't see this fault


TEST_OVER: Final = threading.Event()  # ends the threads of mutants
MUTANTS: Final[dict[str, Mutant]] = {}
T = TypeVar("T", bound=type[HubTransport])


def fault(says: str, caught_by: str) -> Callable[[T], T]:
    def register(transport: T) -> T:
        name = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in transport.__name__).strip()
        MUTANTS[name] = Mutant(name, says, transport, caught_by)
        return transport

    return register
