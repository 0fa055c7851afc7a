"""The state of the streamer and of each endpoint, since when, and the reason: ready, degraded or not ready.

networks, pumps, logs, services ... -> Condition -> look: a state for each --> /readyz, metrics
                                                      '-> new state or reason: a line in the log

degraded: it works, but a person should look. not ready: it does not work. docs/configuration.md lists all conditions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import structlog

READY: Final = "ready"
DEGRADED: Final = "degraded"
NOT_READY: Final = "not ready"
STATES: Final = (READY, DEGRADED, NOT_READY)  # best first
LOOK_S: Final = 1.0  # between looks; a change of a connection causes one at once
STARTING: Final = "starting"
OPENING: Final = "its network is being opened"
STREAMER: Final = ""  # names the streamer itself in place of an endpoint
_NUMBERS: Final = re.compile(r"\d+(\.\d+)?")

# one value for the metrics: name of a family in metrics.py, values of its labels, value
Sample = tuple[str, tuple[str, ...], float]

log = structlog.get_logger()


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


@dataclass(slots=True)
class EndpointState:
    name: str  # one of STATES
    since_ms: int  # Unix milliseconds
    reason: str = ""
    reason_since_ms: int = 0

    def as_dict(self) -> dict[str, str]:
        return {
            "state": self.name,
            "since": _moment(self.since_ms),
            "reason": self.reason,
            "reason_since": _moment(self.reason_since_ms),
        }


class States:
    """`names`: of the endpoints; `conditions()`: everything that is wrong now."""

    def __init__(
        self, names: Iterable[str], conditions: Callable[[], Sequence[Condition]], now_ms: Callable[[], int]
    ) -> None:
        self._conditions, self._now_ms = conditions, now_ms
        now = now_ms()
        self._states = {STREAMER: EndpointState(NOT_READY, now, STARTING, now)}
        for name in names:
            self.add_endpoint(name)

    def __repr__(self) -> str:
        return f"States({ {name: state.name for name, state in self._states.items()} })"

    def add_endpoint(self, name: str) -> None:
        now = self._now_ms()
        self._states[name] = EndpointState(NOT_READY, now, OPENING, now)

    def remove_endpoint(self, name: str) -> None:
        del self._states[name]

    def __getitem__(self, endpoint: str) -> EndpointState:
        """Returns the state at the last `look`; STREAMER is the streamer itself."""
        return self._states[endpoint]

    @property
    def worst(self) -> str:
        """Returns the worst state of all."""
        return max((state.name for state in self._states.values()), key=STATES.index)

    def look(self) -> Sequence[Condition]:
        """Updates the states, logs each change, and returns what is wrong now."""
        found = self._conditions()
        now = self._now_ms()
        for name, state in self._states.items():
            ours = [one for one in found if one.endpoint == name or (name == STREAMER and one.endpoint not in self)]
            self._enter(name, state, ours, now)
        return found

    def __contains__(self, endpoint: str) -> bool:
        return endpoint in self._states

    def _enter(self, name: str, state: EndpointState, conditions: Sequence[Condition], now_ms: int) -> None:
        fatal = [one.text for one in conditions if one.is_fatal]
        entered = NOT_READY if fatal else DEGRADED if conditions else READY
        reason = "; ".join([*fatal, *(one.text for one in conditions if not one.is_fatal)])
        was, before = state.name, state.reason
        state.name, state.reason = entered, reason
        if was != entered:
            state.since_ms = now_ms
        # a reason that differs only in numbers is the same
        if was == entered and _NUMBERS.sub("#", before) == _NUMBERS.sub("#", reason):
            return
        state.reason_since_ms = now_ms
        method = {READY: log.info, DEGRADED: log.warning, NOT_READY: log.error}[entered]
        if name == STREAMER:
            method("the state of the streamer has changed", state=entered, was=was, reason=reason)
        else:
            method("the state of an endpoint has changed", endpoint=name, state=entered, was=was, reason=reason)

    def samples(self) -> Iterator[Sample]:
        """Yields the states at the last `look`."""
        yield "ready", (), self.worst != NOT_READY
        yield from each("state", (), _flags(self.worst))
        for name, state in self._states.items():
            if name != STREAMER:
                yield from each("endpoint_state", (name,), _flags(state.name))

    def as_dict(self) -> dict[str, Any]:
        """Returns the states at the last `look`, for /readyz."""
        states = {name: state.as_dict() for name, state in self._states.items()}
        return {"status": self.worst, "streamer": states.pop(STREAMER), "endpoints": states}


def _flags(state: str) -> dict[str, float]:
    """Returns True for the label of `state`, False for those of the others."""
    return {one.replace(" ", "_"): one == state for one in STATES}


def of_one_that_cant_start(names: Iterable[str], why: str, since_ms: int) -> dict[str, Any]:
    """Returns the states for /readyz while the streamer can't be created."""
    state = EndpointState(NOT_READY, since_ms, why, since_ms).as_dict()
    return {"status": NOT_READY, "streamer": state, "endpoints": {name: dict(state) for name in names}}


def _moment(unix_ms: int) -> str:
    """Returns the time in RFC 3339, UTC."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
