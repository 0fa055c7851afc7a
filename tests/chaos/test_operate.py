"""The parts of the campaign of operations that judge, on made-up messages and samples; then one step of it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from campaigns.operate import soak
from campaigns.operate.book import Book, Request
from campaigns.operate.fleet import CLOUD, VINS, Fleet, access_file, flow_is_of, flow_name, flows_of
from campaigns.operate.sites import toml
from campaigns.operate.stage import Row, Stage, Step
from tests.tiers import full


class Talk:
    """Messages of one flow in a book."""

    def __init__(self) -> None:
        self.book, self._count = Book(), 0

    def sent(self, count: int = 1, *, acked: bool = True) -> list[bytes]:
        ids = [(self._count + place).to_bytes(16, "big") for place in range(count)]
        self._count += count
        for id in ids:
            self.book.sent(id, "flow", b"text")
            if acked:
                self.book.acked(id)
        return ids

    def arrives(self, ids: list[bytes], channel: str = "push") -> None:
        for id in ids:
            self.book.arrived(channel, id, "flow", b"text")


@pytest.fixture
def talk() -> Talk:
    return Talk()


def test_each_turn_judges_what_was_sent_since_the_last_one(talk: Talk) -> None:
    first = talk.sent(3)
    talk.arrives(first[:2])
    turn = talk.book.turn(talk.book.now())
    assert (turn.owed, turn.delivered, turn.lost, turn.doubled) == (3, 2, 1, 0)
    talk.sent(1, acked=False)  # not owed
    talk.arrives(talk.sent(2))
    turn = talk.book.turn(talk.book.now())
    assert (turn.owed, turn.delivered, turn.lost, turn.doubled) == (2, 2, 0, 0)


def test_what_is_still_under_way_belongs_to_the_next_turn(talk: Talk) -> None:
    until = talk.book.now()
    ids = talk.sent(2)
    assert not talk.book.waiting(until)
    assert talk.book.turn(until).owed == 0
    talk.arrives(ids)
    assert talk.book.turn(talk.book.now()).delivered == 2


def test_copies_and_a_wrong_order_count_in_the_turn_in_which_they_come(talk: Talk) -> None:
    ids = talk.sent(3)
    talk.arrives([ids[1], ids[0], ids[2]])
    turn = talk.book.turn(talk.book.now())
    assert (turn.reordered, turn.doubled) == (1, 0)
    talk.arrives(ids[:1])
    turn = talk.book.turn(talk.book.now())
    assert (turn.reordered, turn.doubled) == (0, 1)


def test_a_copy_of_a_forgotten_message_is_no_message_that_was_never_sent(talk: Talk) -> None:
    ids = talk.sent(1)
    talk.arrives(ids)
    for _ in range(2):
        talk.book.turn(talk.book.now())
    talk.arrives(ids, "poll")  # a history that is read again from its beginning
    talk.arrives(ids)
    turn = talk.book.turn(talk.book.now())
    assert (turn.doubled, turn.wrong) == (1, 0)


def test_what_is_excused_is_not_owed(talk: Talk) -> None:
    talk.sent(2)
    talk.book.excuse(0.0)
    turn = talk.book.turn(talk.book.now())
    assert (turn.lost, turn.excluded) == (0, 2)


def test_a_request_counts_in_the_turn_in_which_it_was_asked(talk: Talk) -> None:
    book = talk.book
    for code in (0, 4, None):
        book.asked("caller > method").over(code)
    book.asked("caller > method")  # under way
    until = book.now()
    later = book.asked("caller > method")
    assert book.asking(until) == 1
    turn = book.turn(until)
    assert (turn.answered, turn.failed, turn.unanswered) == (1, 1, 2)
    later.over(0)
    turn = book.turn(book.now())
    assert (turn.answered, turn.failed, turn.unanswered) == (1, 0, 0)


class Still:
    """A fleet to which nothing happens but requests."""

    def __init__(self, book: Book) -> None:
        self.book, self.pollers = book, dict[str, Any]()
        self.sites = {name: SimpleNamespace(ready=lambda: {"problems": []}) for name in (*VINS, CLOUD)}

    def run(self, work: Callable[[Stage], None], *, is_calm: bool, patience: float = 0.0) -> Row:
        """One step. Without patience it waits for nothing."""
        step = Step("step", work, lambda _: "", may_double=False, is_calm=is_calm)
        return step.run(cast(Fleet, self), patience)


def test_a_request_that_a_kill_has_lost_is_no_problem_of_the_step_after_it(talk: Talk) -> None:
    asked: list[Request] = []
    fleet = Still(talk.book)
    kill = fleet.run(lambda _: asked.append(talk.book.asked("caller > method")), is_calm=False)
    reload = fleet.run(lambda _: asked[0].over(None), is_calm=True)  # its caller gives up only now
    assert (kill.good, kill.turn.unanswered) == (True, 1)
    assert (reload.problems, reload.turn.unanswered) == ([], 0)


def test_a_step_waits_for_the_answers_to_its_requests() -> None:
    """Else a request that was lost in the last step, or just before its end, would be a problem of none."""

    class Slow(Book):
        code: int | None = None

        def asking(self, until: float) -> int:
            count = super().asking(until)
            request.over(self.code)  # after the first look
            return count

    for code, problems in ((0, 0), (None, 1)):
        book = Slow()
        book.code, request = code, book.asked("caller > method")
        row = Still(book).run(lambda _: None, is_calm=True, patience=1.0)
        assert (row.turn.answered, len(row.problems)) == (1 - problems, problems)


def test_copies_are_allowed_only_where_a_process_is_killed() -> None:
    for may_double in (True, False):
        row = Row("x", may_double=may_double)
        row.turn.doubled = 1
        assert row.good is may_double


def test_a_configuration_as_data_is_the_same_in_toml() -> None:
    config: dict[str, Any] = {
        "streamer": {"authority": "ecu1", "admin": "127.0.0.1:1"},
        "endpoint": [{"name": "a", "settings": {"tls": {"ca_file": "/x y"}, "port": 1}}, {"name": "b", "hold": False}],
    }
    assert tomllib.loads(toml(config)) == config


def test_each_flow_has_one_vehicle_and_one_name() -> None:
    flows = [flow for vin in VINS for flow in flows_of(vin)]
    assert len({flow_name(flow) for flow in flows}) == len(flows)
    for flow in flows:
        assert [vin for vin in VINS if flow_is_of(vin, flow_name(flow))] == [flow.vin]


def test_a_wrong_rule_comes_before_the_right_ones() -> None:
    """mosquitto takes the first that matches."""
    lines = access_file((("vin1", "ecu1.vin1/backend"),)).splitlines()
    user = lines.index("user vin1")
    assert lines[user + 1] == "topic deny ecu1.vin1/backend"
    assert "deny" not in access_file()


def samples(*values: float) -> dict[str, dict[str, soak.Series]]:
    """A gateway whose memory was so, and all else flat."""
    series = {key: soak.Series() for key in (*soak.LIMITS, "log_share")}
    for place, value in enumerate(values):
        for key, one in series.items():
            one.add(place * soak.SAMPLE_S, value if key == "rss_mib" else 1.0)
    return {"vin1": series}


def test_a_warm_up_and_single_peaks_are_no_growth() -> None:
    warm = [20.0 + place for place in range(100)]
    flat = [120.0 + (40 if place % 50 == 0 else place % 3) for place in range(300)]
    assert soak.judge(samples(*warm, *flat)) == []


def test_slow_growth_is_found() -> None:
    (found,) = soak.judge(samples(*(100 + place * 0.05 for place in range(400))))
    assert found.startswith("vin1: rss_mib grew by ")


@pytest.mark.broker
@full
def test_one_step_of_the_whole(tmp_path: Any) -> None:
    argv = [sys.executable, "-m", "campaigns.operate", "--only", "reload: rules", "--only", "kill -9"]
    done = subprocess.run(
        [*argv, "--patience", "4", "--rate", "60", "--json", str(tmp_path / "result.json")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "reload: rules" in done.stderr
