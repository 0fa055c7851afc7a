"""Lists of callbacks: who adds one gets what removes it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Callback = TypeVar("Callback")
Remove = Callable[[], None]


def add(callbacks: list[Callback], callback: Callback) -> Remove:
    """Adds `callback` at the end. Returns a function that removes it; a second call of that does nothing."""
    callbacks.append(callback)

    def remove() -> None:
        if callback in callbacks:
            callbacks.remove(callback)

    return remove
