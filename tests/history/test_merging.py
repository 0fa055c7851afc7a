"""Frontiers of several logs merged into one: always the same as when computed from all reports."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from history.epochs import merging
from history.epochs.frontier import ACTIVE_MAX, Antichain, is_ahead, maximal, minimal
from history.epochs.merging import LOGS_MAX, LogFrontier, MergedFrontiers, times_of
from history.records.epoch import Time
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import GroupFrontier, LogicalTime

LOGS = [bytes([number]) * 16 for number in range(5)]
KEEPERS = {LOGS[0]: ("car", 4), LOGS[1]: ("car", 4), LOGS[2]: ("car", 4), LOGS[3]: ("trailer", 4), LOGS[4]: ("hub", 4)}
TIMES = [(one, other) for one in range(4) for other in range(4)]
TIMEOUT_S = 3.0

some_times = st.lists(st.sampled_from(TIMES), max_size=3)
some_logs = st.lists(st.sampled_from(LOGS), max_size=2)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("hear"), st.sampled_from(LOGS), some_times, some_times, some_logs, st.integers(0, 1)),
        st.tuples(st.sampled_from(["drop", "touch"]), st.sampled_from(LOGS)),
        st.tuples(st.just("silence")),
    ),
    max_size=40,
)


class Model:
    """All reports, evaluated again for each question."""

    def __init__(self) -> None:
        self.parts: dict[bytes, LogFrontier] = {}
        self.silent: set[bytes] = set()
        self.versions: dict[tuple[str, int], int] = {}

    def part(
        self, log: bytes, lower: Antichain, active: Sequence[Time], logs: Sequence[bytes], step: int
    ) -> LogFrontier:
        keeper = KEEPERS[log]
        self.versions[keeper] = self.versions.get(keeper, 0) + step
        return LogFrontier(keeper, self.versions[keeper], lower, frozenset(active), frozenset(logs), 1, 0.0)

    @property
    def waited_for(self) -> dict[bytes, LogFrontier]:
        return {log: part for log, part in self.parts.items() if log not in self.silent}

    @property
    def lower(self) -> Antichain:
        return minimal(time for part in self.waited_for.values() for time in part.lower)

    @property
    def unheard(self) -> set[bytes]:
        return set[bytes]().union(*(part.logs for part in self.parts.values())) - self.parts.keys()


@given(steps)
def test_it_is_what_all_of_them_say(todo: list[tuple]) -> None:  # type: ignore[type-arg]
    merged, model = MergedFrontiers(), Model()
    for now, (what, *more) in enumerate(todo):
        if what == "hear":
            log, lower, active, logs, step = more
            part = model.part(log, minimal(lower), active, logs, step)
            part.heard_at = float(now)
            model.parts[log] = part
            model.silent.discard(log)
            merged.update(log, part)
        elif what == "silence":
            merged.silence(now, TIMEOUT_S)
            model.silent |= {log for log, part in model.waited_for.items() if part.heard_at <= now - TIMEOUT_S}
        elif more[0] in model.parts:
            (log,) = more
            if what == "drop":
                del model.parts[log]
                model.silent.discard(log)
                merged.drop(log, float(now))
            else:
                model.silent.discard(log)
                merged.touch(log, model.parts[log], float(now))
        assert merged.parts == model.parts
        assert merged.lower == model.lower
        assert merged.upper == maximal(time for part in model.parts.values() for time in part.active)
        assert merged.unheard == model.unheard
        assert merged.is_whole or merged.unheard
        heard = [part.heard_at for part in model.waited_for.values()]
        if not merged.unheard:
            assert merged.silent_at(TIMEOUT_S) == (min(heard) + TIMEOUT_S if heard else None)
        for time in TIMES:
            if any(is_ahead(part.lower, time) for part in model.waited_for.values()):
                assert not merged.is_over(time)
            elif len(model.waited_for) == len({KEEPERS[log] for log in model.waited_for}):
                assert merged.is_over(time), "of each keeper one log says everything"


def part(version: int, lower: Sequence[Time], active: Sequence[Time] = (), heard_at: float = 0.0) -> LogFrontier:
    return LogFrontier(("car", 4), version, minimal(lower), frozenset(active), frozenset(LOGS[:2]), version, heard_at)


def test_what_a_log_has_not_heard_of_is_not_over() -> None:
    merged = MergedFrontiers()
    merged.update(LOGS[0], part(1, [(1,)], [(1,)]))
    assert not merged.is_whole
    merged.update(LOGS[1], part(1, [(1,)], [(1,)]))
    assert merged.is_whole
    merged.update(LOGS[0], part(2, [(1,), (2,)], [(1,), (2,)]))
    merged.update(LOGS[0], part(3, [(3,)], [(3,)]))
    assert not merged.is_over((2,)), "the other log may have records of it"
    merged.update(LOGS[1], part(2, [(2,)], [(2,)]))
    assert merged.is_over((1,))
    assert not merged.is_over((2,))
    merged.update(LOGS[1], part(3, [(3,)], [(3,)]))
    assert merged.is_over((2,))
    assert not merged.is_over((3,))


def test_of_one_keeper_only_a_log_that_falls_behind_can_be_silent() -> None:
    """A lap of minutes has records in only one of its logs."""
    merged = MergedFrontiers()
    for log in LOGS[:2]:
        merged.update(log, part(1, [(1,)], [(1,)]))
    for now in range(1, 100):
        merged.touch(LOGS[0], merged.parts[LOGS[0]], float(now))
        merged.silence(now, TIMEOUT_S)
    assert merged.lower == {(1,)}
    merged.update(LOGS[0], part(2, [(2,)], [(2,)], heard_at=100.0))
    for now in (101.0, 102.9):
        merged.touch(LOGS[0], merged.parts[LOGS[0]], now)
        merged.silence(now, TIMEOUT_S)
    assert not merged.is_over((1,))
    assert merged.silent_at(TIMEOUT_S) == 103.0
    merged.silence(103.0, TIMEOUT_S)
    assert (merged.is_over((1,)), merged.missing((1,))) == (True, "car")
    merged.touch(LOGS[1], merged.parts[LOGS[1]], 104.0)
    assert not merged.is_over((1,))


def test_a_log_of_which_nothing_comes_is_waited_for_as_long_as_one_that_is_silent() -> None:
    merged = MergedFrontiers()
    merged.update(LOGS[0], part(1, [(1,)], [(1,)], heard_at=1.0))
    for now in (2.0, 3.9):
        merged.update(LOGS[0], part(2, [(2,)], [(2,)], heard_at=now))
        merged.silence(now, TIMEOUT_S)
        assert not merged.is_whole
    assert merged.silent_at(TIMEOUT_S) == 4.0
    merged.silence(4.0, TIMEOUT_S)
    assert (merged.is_whole, merged.is_over((1,)), merged.missing((1,))) == (True, True, "one of its logs")
    merged.update(LOGS[1], part(2, [(2,)], [(2,)], heard_at=5.0))
    assert (merged.is_whole, merged.missing((1,))) == (True, "")


def test_a_thousand_vehicles_cost_each_no_more_than_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0

    def counted(times):  # type: ignore[no-untyped-def]
        nonlocal looked_at
        found = list(times)
        looked_at += len(found)
        return minimal(found)

    monkeypatch.setattr(merging, "minimal", counted)
    merged, vehicles = MergedFrontiers(), 1_000
    for second in range(1, 7):
        if second == 2:  # all of them are there
            looked_at = 0
        for place in range(vehicles):
            log = place.to_bytes(16, "big")
            own = frozenset({log})
            for lower in ([(second - 1,), (second,)], [(second,)]):
                times = frozenset[Time](lower)
                merged.update(
                    log, LogFrontier((f"v{place}", 4), second, minimal(times), times, own, second, float(second))
                )
                assert merged.is_over((second - 2,))
        assert merged.is_over((second - 1,))
    assert looked_at < vehicles, "for 10,000 frontiers"


def test_what_no_keeper_says() -> None:
    def group(lower: int = 1, active: int = 1, logs: int = 1, name: str = "lap", numbers: int = 1) -> GroupFrontier:
        made = GroupFrontier(group=name, logs=[bytes([place]) * 16 for place in range(logs)])
        made.lower.extend(LogicalTime(numbers=[place] * numbers) for place in range(lower))
        made.active.extend(LogicalTime(numbers=[place] * numbers) for place in range(active))
        return made

    assert times_of(group()) == ([(0,)], [(0,)])
    assert times_of(group(0, 0, 0)) == ([], [])
    assert times_of(group(ACTIVE_MAX, ACTIVE_MAX, LOGS_MAX, "x" * 64, 8)) is not None
    for wrong in (
        group(ACTIVE_MAX + 1),
        group(active=ACTIVE_MAX + 1),
        group(logs=LOGS_MAX + 1),
        group(name=""),
        group(name="ä" * 33),
        group(numbers=0),
        group(numbers=9),
    ):
        assert times_of(wrong) is None
    odd = group()
    odd.active.add(numbers=[1, 2])
    assert times_of(odd) is None


def hear(merged: MergedFrontiers, log: bytes, part: LogFrontier) -> None:
    merged.update(log, part)
    for replaced in merged.replaced_by(log):
        merged.drop(replaced, part.heard_at)


def test_a_keeper_that_invents_logs_is_waited_for_no_longer_than_others() -> None:
    merged, logs = MergedFrontiers(), [place.to_bytes(16, "big") for place in range(1_000)]
    for place, log in enumerate(logs):
        named = frozenset([log, *logs[place + 1 : place + 3]])  # so that none is replaced by the next one
        hear(
            merged, log, LogFrontier(("car", 4), 1_000 - place, frozenset({(0,)}), frozenset({(place,)}), named, 1, 0.0)
        )
    assert len(merged.parts) <= LOGS_MAX
    hear(merged, LOGS[4], LogFrontier(("car", 4), 9_999, frozenset(), frozenset(), frozenset({b"none" * 4}), 1, 1.0))
    merged.silence(4.0, TIMEOUT_S)
    assert merged.is_whole


def test_logs_that_are_not_there_any_more_are_known_by_what_the_others_say() -> None:
    """[durable, volatile] -> a restart: [durable, another volatile] -> another disk: [another durable]"""
    durable, memory, other_memory, other_disk, _ = LOGS
    merged = MergedFrontiers()

    def say(log: bytes, version: int, *logs: bytes) -> set[bytes]:
        hear(
            merged,
            log,
            LogFrontier(("car", 4), version, minimal([(version,)]), frozenset(), frozenset(logs), version, 0.0),
        )
        return set(merged.parts)

    assert say(durable, 1, durable) == {durable}
    assert say(memory, 900, durable, memory) == {durable, memory}, "who is read further is not replaced by who is not"
    assert say(durable, 2, durable) == {durable, memory}
    assert say(memory, 901, durable, memory) == {durable, memory}
    assert say(durable, 901, durable, memory) == {durable, memory}
    assert say(durable, 902, durable, other_memory) == {durable}
    assert say(other_memory, 902, durable, other_memory) == {durable, other_memory}
    assert say(other_disk, 1, other_disk) == {other_disk}, "its versions start again"
    assert merged.lower == {(1,)}


@given(st.floats(0, 1e9), st.floats(0.001, 1e6))
def test_who_is_due_is_silent_then(heard_at: float, timeout_s: float) -> None:
    """Otherwise a reader that waits until then polls again and again."""
    merged = MergedFrontiers()
    merged.update(LOGS[0], part(1, [(1,)], heard_at=heard_at))
    due = merged.silent_at(timeout_s)
    assert due is not None
    merged.silence(due, timeout_s)
    assert merged.is_whole
    assert merged.silent_at(timeout_s) is None
