"""Faults that were found and mended, each as a small patch that puts it back in: the proof that the simulation would find it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Break:
    what: str
    patches: Callable[[], list[tuple[Any, str, Any]]]  # of what, which attribute, by what; imported only when it is asked for

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        patches = self.patches()
        before = [(target, name, getattr(target, name)) for target, name, _ in patches]
        for target, name, value in patches:
            setattr(target, name, value)
        try:
            yield
        finally:
            for target, name, value in before:
                setattr(target, name, value)


BREAKS: Final[dict[str, Break]] = {}
