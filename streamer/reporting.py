"""The words of reports: conditions for readiness, samples for metrics, and the build."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from typing import Final, NamedTuple

import uprotocol
from streamer.durations import Durations

STARTING: Final = "starting"
OPENING: Final = "its network is being opened"
STREAMER: Final = ""  # names the streamer itself in place of an endpoint

# one value for the metrics: name of a family in metrics.py, values of its labels, value
Sample = tuple[str, tuple[str, ...], float | Durations]


@functools.cache
def build() -> tuple[str, str, str]:
    """Returns the version of the program, `compiled` or `interpreted`, and the version of Python."""
    core = "compiled" if uprotocol.CORE.startswith("compiled") else "interpreted"
    return metadata.version("up-streamer"), core, platform.python_version()


def each(name: str, labels: tuple[str, ...], counts: Mapping[str, float]) -> Iterator[Sample]:
    """Returns a sample for each value of the family's last label."""
    return ((name, (*labels, key), count) for key, count in counts.items())


class Condition(NamedTuple):
    """Something that is wrong now."""

    text: str  # a plain sentence
    endpoint: str = STREAMER
    is_fatal: bool = False  # its endpoint, or the streamer, is not ready

    @property
    def problem(self) -> str:
        """Returns the text with the name of the endpoint."""
        return f"endpoint {self.endpoint}: {self.text}" if self.endpoint else self.text


class Reporter:
    """What has something to report; by default nothing."""

    def conditions(self) -> Iterable[Condition]:
        """Returns what is wrong now: for readiness, the log and the status."""
        return ()

    def notes(self) -> Iterable[str]:
        """Returns facts for the operator that are no problems."""
        return ()

    def samples(self) -> Iterable[Sample]:
        """Returns the values of its metrics (operating/metrics.py lists the families)."""
        return ()
