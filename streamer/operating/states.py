"""The state of the streamer and of each endpoint, since when, and the reason: ready, degraded or not ready.

networks, pumps, logs, services ... -> Condition -> look: a state for each --> /readyz, metrics
losses, clocks that differ -------------'             '-> new state or reason: a line in the log

degraded: it works, but a person should look. not ready: it does not work. docs/configuration.md lists all conditions.
"""

from __future__ import annotations

import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import structlog

from history.epochs.groups import created_ms
from history.file import damage as damages
from history.file.damage import Damage
from history.log.log import Log
from history.service.gaps import Gaps
from streamer.reporting import OPENING, STARTING, STREAMER, Condition, Sample, each
from streamer.walk.endpoint import Endpoint
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Gap
from uprotocol.transport import TtlCounts
from uprotocol.uuid import moment
from uprotocol.v1.uri_pb2 import UUri

READY: Final = "ready"
DEGRADED: Final = "degraded"
NOT_READY: Final = "not ready"
StateName = Literal["ready", "degraded", "not ready"]
STATES: Final[tuple[StateName, ...]] = (READY, DEGRADED, NOT_READY)  # best first
LOOK_S: Final = 1.0  # between looks; a change of a connection causes one at once
LINES_SHOWN_MAX: Final = 300  # of problems, and of notes; enough for PAUSES_MAX paused patterns
LINE_CHARACTERS_MAX: Final = 1_000
WINDOW_S: Final = 60.0  # in which expired messages are counted
MESSAGES_MIN: Final = 20  # with a ttl within WINDOW_S; fewer prove nothing
AHEAD_MS_MIN: Final = 60_000  # a clock that is further ahead is reported
# ... unless it is ten years ahead: that is no clock, but an id that somebody made up
AHEAD_MS_MAX: Final = 10 * 365 * 86_400_000
RECORDS_LOOKED_MAX: Final = 256  # of each log and look, so that a flood costs the loop little
FAST_SENDERS_MAX: Final = 256  # authorities; a stranger may make them up
EXPIRED_SHARE: Final = 0.5  # a larger share is reported
_NUMBERS: Final = re.compile(r"\d+(\.\d+)?")


log = structlog.get_logger()


@dataclass(slots=True)
class EndpointState:
    name: StateName
    since_ms: int  # Unix milliseconds
    reason: str = ""
    reason_since_ms: int = 0

    def as_dict(self) -> dict[str, str]:
        return {
            "state": self.name,
            "since": moment(self.since_ms),
            "reason": self.reason,
            "reason_since": moment(self.reason_since_ms),
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

    def add_endpoint(self, name: str) -> None:
        now = self._now_ms()
        self._states[name] = EndpointState(NOT_READY, now, OPENING, now)

    def remove_endpoint(self, name: str) -> None:
        del self._states[name]

    def __getitem__(self, endpoint: str) -> EndpointState:
        """Returns the state at the last `look`; STREAMER is the streamer itself."""
        return self._states[endpoint]

    @property
    def worst(self) -> StateName:
        return max((state.name for state in self._states.values()), key=STATES.index)

    def look(self) -> Sequence[Condition]:
        """Updates the states, logs each change, and returns what is wrong now."""
        found = self._conditions()
        now = self._now_ms()
        for name, state in self._states.items():
            is_rest = name == STREAMER
            ours = [one for one in found if one.endpoint == name or (is_rest and one.endpoint not in self._states)]
            self._enter(name, state, ours, now)
        return found

    def _enter(self, name: str, state: EndpointState, conditions: Sequence[Condition], now_ms: int) -> None:
        fatal = [one.text for one in conditions if one.is_fatal]
        entered: StateName = NOT_READY if fatal else DEGRADED if conditions else READY
        reason = "; ".join([*fatal, *(one.text for one in conditions if not one.is_fatal)])
        was, before = state.name, state.reason
        state.name, state.reason = entered, reason
        if was != entered:
            state.since_ms = now_ms
        # a reason that differs only in numbers is the same
        if was == entered and _NUMBERS.sub("#", before) == _NUMBERS.sub("#", reason):
            return
        state.reason_since_ms = now_ms
        others = [one for one in conditions if one.text not in (STARTING, OPENING)]  # a start is no trouble
        method = log.error if any(one.is_fatal for one in others) else log.warning if others else log.info
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


def cut(lines: Sequence[str]) -> list[str]:
    """Returns the first lines, each cut to a length that a person reads."""
    report = [cut_line(line) for line in lines[:LINES_SHOWN_MAX]]
    return report if len(lines) <= LINES_SHOWN_MAX else [*report, f"and {len(lines) - LINES_SHOWN_MAX} more"]


def cut_line(line: str) -> str:
    return line if len(line) <= LINE_CHARACTERS_MAX else line[:LINE_CHARACTERS_MAX] + "..."


# Conditions: clocks that differ, losses


class Clocks:
    """Compares our clock with those of the senders on one endpoint: do most messages with a ttl expire on arrival? A
    fast clock and delayed messages look the same: `trouble` names both causes, and the age of the messages."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._seen: deque[tuple[float, TtlCounts]] = deque()  # of each `look` within WINDOW_S; one may cover more time

    def look(self, now_s: float) -> None:
        """Reads the counts of the transport. `now_s`: loop time."""
        counts = self._endpoint.transport.take_ttl_counts()
        if counts.arrived:
            self._seen.append((now_s, counts))
        while self._seen and self._seen[0][0] <= now_s - WINDOW_S:
            self._seen.popleft()

    @property
    def trouble(self) -> str:
        """Returns a sentence for the operator; empty if the clocks agree."""
        arrived = sum(counts.arrived for _, counts in self._seen)
        expired = sum(counts.expired for _, counts in self._seen)
        if arrived < MESSAGES_MIN or expired <= EXPIRED_SHARE * arrived:
            return ""
        age_s = statistics.median(age for _, counts in self._seen for age in counts.ages_ms) / 1000
        return (
            f"{expired} of the last {arrived} messages with a ttl had expired on arrival, and are dropped: they were "
            f"{age_s:.1f} s old, so our clock is about that far ahead of their senders', or they waited that long on "
            "the way"
        )


class FastSenders:
    """Finds senders whose clocks are ahead of ours, by the times in the ids of the newest records. An id from the past
    proves nothing: messages may wait on their way. One from now proves that the clock is right, whatever was before."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # by name of the log: the last seq that was looked at
        # by source authority: how far ahead, milliseconds, and loop time of its last such record
        self._ahead: dict[str, tuple[int, float]] = {}

    def look(self, kept: Log, now_ms: int, now_s: float) -> None:
        """Look at the records that came since the last call, RECORDS_LOOKED_MAX at most."""
        after = max(self._seen.get(kept.name, 0), kept.newest_seq - RECORDS_LOOKED_MAX)
        self._seen[kept.name] = kept.newest_seq
        for chunk in kept.tail(after) or ():
            for seq, message, stream in zip(chunk.seqs, chunk.messages, chunk.streams, strict=True):
                ahead_ms = created_ms(message) - now_ms
                if seq <= after or not kept.knows_stream(stream):
                    continue
                if AHEAD_MS_MIN < ahead_ms < AHEAD_MS_MAX:
                    authority = kept.stream(stream).source.authority_name
                    if authority in self._ahead or len(self._ahead) < FAST_SENDERS_MAX:
                        self._ahead[authority] = ahead_ms, now_s
                elif self._ahead and abs(ahead_ms) <= AHEAD_MS_MIN:
                    self._ahead.pop(kept.stream(stream).source.authority_name, None)
        for authority in [one for one, (_, at_s) in self._ahead.items() if at_s <= now_s - WINDOW_S]:
            del self._ahead[authority]

    def conditions(self, owner: Callable[[str], Endpoint | None]) -> Iterator[Condition]:
        """Yields one for each endpoint with such senders. `owner(authority)`: its endpoint."""
        for name, senders in self._by_endpoint(owner).items():
            ahead_ms, authority = max(senders)
            others = f" (and those of {len(senders) - 1} other authorities less)" if len(senders) > 1 else ""
            what = f"the clock of {authority!r} is {ahead_ms / 1000:.0f} s ahead of ours{others}, or ours is behind"
            yield Condition(f"{what}: its messages expire that much later", name)

    def samples(self, owner: Callable[[str], Endpoint | None]) -> Iterator[Sample]:
        for name, senders in self._by_endpoint(owner).items():
            yield "sender_clock_ahead_seconds", (name,), max(senders)[0] / 1_000

    def _by_endpoint(self, owner: Callable[[str], Endpoint | None]) -> dict[str, list[tuple[int, str]]]:
        """How far ahead, in milliseconds, and the authority, of the senders on each endpoint."""
        fast: dict[str, list[tuple[int, str]]] = {}
        for authority, (ahead_ms, _) in self._ahead.items():
            endpoint = owner(authority)
            fast.setdefault(STREAMER if endpoint is None else endpoint.name, []).append((ahead_ms, authority))
        return fast


class LossReports:
    """Publishes losses by `gaps`, or keeps them in the `durable` log until they are acknowledged."""

    def __init__(self, gaps: Gaps, durable: Log) -> None:
        self._gaps, self._durable = gaps, durable

    def records_lost(self, peer: Endpoint, source: Log, after: int, before: int, reason: Gap.Reason.ValueType) -> None:
        """Reports that some or all records between these seqs never reach an endpoint."""
        gap = Gap(reason=reason, incarnation=source.incarnation, after_seq=after, before_seq=before)
        self._gaps.add(gap, peer.name, f"endpoint {peer.name} will not get these records of the {source.name} log")

    def followed_gap(self, service: UUri, gap: Gap) -> None:
        what = f"of the history of {uris.format(service)}, which is followed"
        log.error("records that were followed are lost", service=uris.format(service), gap=str(gap).replace("\n", " "))
        self._gaps.add(gap, "", what)

    def channel_gap(self, channel: str, topic: UUri, what: str) -> None:
        log.error("items of a channel are lost", channel=channel, topic=uris.format(topic), what=what)
        self._gaps.add(Gap(reason=Gap.REASON_NETWORK), "", f"of {uris.format(topic)}, channel {channel!r}: {what}")

    def not_recovered(self, topic: UUri, source: Log, what: str) -> None:
        log.error("messages may be lost, and were not recovered", topic=uris.format(topic), what=what)
        gap = Gap(reason=Gap.REASON_NETWORK, incarnation=source.incarnation)
        self._gaps.add(gap, "", f"topic {uris.format(topic)}: {what}")

    def subscriptions_lost(self, changes: int) -> None:
        what = f"{changes} changes of subscriptions are lost: who subscribed or unsubscribed lately has to do so again"
        self._durable.losses.report(damages.SUBSCRIPTIONS, what)

    def network_lost(self, endpoint: Endpoint, what: str, messages: int | None) -> None:
        """Reports that a network lost messages before they arrived; which ones is unknown."""
        endpoint.dropped["lost_by_network"] += messages or 1
        log.error("a network has lost messages for us", endpoint=endpoint.name, what=what, messages_at_most=messages)
        self._durable.losses.report(damages.NETWORK, f"endpoint {endpoint.name}: {what}")  # see conditions_of_log


def conditions_of_log(kept: Log, hours: float) -> Iterator[Condition]:
    """Yields what is wrong with a log. `hours`: time until a network's loss counts as acknowledged; 0: never."""
    if not kept.healthy:
        yield Condition(f"the {kept.name} log refuses messages: {kept.trouble}", is_fatal=True)
    losses: dict[str, list[str]] = {}  # by endpoint
    damage: list[Damage] = []
    for found in kept.damage:
        if found.kind == damages.NETWORK:
            endpoint, _, what = found.detail.removeprefix("endpoint ").partition(": ")
            losses.setdefault(endpoint, []).append(what or found.detail)
        elif found.kind not in (damages.DROPPED, damages.EMPTIED):  # see drops.py, new_stores.py
            damage.append(found)
    if damage:
        detail = f" ({damage[-1].detail})" if damage[-1].detail else ""
        yield Condition(
            f"the {kept.name} log has {len(damage)} damages that nobody has acknowledged, at the last "
            f"{damage[-1].kind}{detail}; see 'up-streamer history verify', then 'up-streamer history acknowledge'"
        )
    ends = f"it ends {hours:g} h after it was found, or" if hours else "it ends"
    for endpoint, lost in losses.items():
        times = f" (and {len(lost) - 1} other losses)" if len(lost) > 1 else ""
        what = f"{lost[-1]}{times}; nobody has acknowledged that: {ends} with 'up-streamer history acknowledge'"
        yield Condition(what, endpoint)
