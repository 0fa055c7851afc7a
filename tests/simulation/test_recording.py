"""The record of what was heard in a world, and what differs between two of them."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from campaigns.simulation import compare
from campaigns.simulation.compare import Difference, difference, differences
from campaigns.simulation.one_pump import line_of
from campaigns.simulation.recording import Recording
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.uattributes_pb2 import UPayloadFormat

TOPIC, SINK = uris.parse("//vin1/8001/1/8001"), uris.parse("//hub/9001/1/0")
PLACE = "L //vin1/8001/1/8001"


def sent(recording: Recording, text: str, *, is_notification: bool = False) -> Any:
    builder = UMessageBuilder.notification(TOPIC, SINK) if is_notification else UMessageBuilder.publish(TOPIC)
    message = builder.build_from_upayload(UPayload(text.encode(), UPayloadFormat.UPAYLOAD_FORMAT_TEXT))
    made: Any = SimpleNamespace(id=uuids.to_bytes(message.attributes.id), message=message)
    recording.published(made)
    return made


def record(recording: Recording) -> dict[str, Any]:
    line = recording.line(7, "chain", "digest", 0)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_record_has_what_came_between_begin_and_end_in_order_and_everything_without_order() -> None:
    recording = Recording()
    first, second, third = (sent(recording, f"vin {number}") for number in (1, 2, 3))
    recording.heard("L", second, 1)
    recording.begin()
    recording.heard("L", third, 1)
    recording.heard("L", second, 2)
    recording.heard("M", third, 1)
    recording.end()
    recording.heard("L", first, 1)
    found = record(recording)
    assert {place: heard["messages"] for place, heard in found["heard"].items()} == {
        PLACE: ["vin 3", "vin 2*2"],
        "M //vin1/8001/1/8001": ["vin 3"],
    }
    assert found["whole"] == {PLACE: ["vin 1", "vin 2*2", "vin 3"], "M //vin1/8001/1/8001": ["vin 3"]}
    assert {name: found[name] for name in ("seed", "kind", "run", "violations")} == {
        "seed": 7,
        "kind": "chain",
        "run": "digest",
        "violations": 0,
    }


def test_a_notification_has_a_place_of_its_own() -> None:
    recording = Recording()
    recording.begin()
    recording.heard("L", sent(recording, "vin 1", is_notification=True), 1)
    assert list(record(recording)["heard"]) == ["L //vin1/8001/1/8001 //hub/9001/1/0"]


def test_names_do_not_depend_on_ids_and_those_of_the_last_round_not_on_what_was_sent_before() -> None:
    lines = []
    for before in (1, 5):
        recording = Recording()
        for number in range(before):
            sent(recording, f"vin {number}")
        recording.begin()
        recording.last_round([("L", uris.key(TOPIC))])
        for number in range(2):
            recording.heard("L", sent(recording, f"vin {before + number}"), 1)
        lines.append(record(recording))
    assert lines[0] == lines[1] | {"whole": lines[0]["whole"]}
    assert lines[0]["heard"][PLACE]["messages"] == ["vin +1", "vin +2"]
    assert lines[0]["wanted"] == [PLACE]


def test_equal_texts_have_names_of_their_own() -> None:
    recording = Recording()
    recording.begin()
    for _ in range(3):
        recording.heard("L", sent(recording, "flood 1"), 1)
    assert record(recording)["heard"][PLACE]["messages"] == ["flood 1", "flood 1:2", "flood 1:3"]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (["a", "b*2"], ["a", "b*2"], None),
        (["a", "b", "c"], ["a"], Difference(missing=("b", "c"))),
        (["a"], ["b", "a"], Difference(extra=("b",))),
        (["a", "b", "c"], ["a", "c", "b"], Difference(moved=("b", "c"))),
        (["a"], ["a", "a*2", "a*3"], Difference(more_repeats=("a", "a"))),
        (["a", "a*2"], ["a"], Difference(fewer_repeats=("a",))),
        (["a", "a*2", "b"], ["a", "b", "a*2"], Difference(repeats_elsewhere=True)),
        (["a*2"], ["a"], Difference(fewer_repeats=("a",))),
        (["a", "b", "c"], ["d", "c", "a"], Difference(missing=("b",), extra=("d",), moved=("a", "c"))),
    ],
)
def test_a_difference_names_what_is_missing_added_moved_or_repeated(
    before: list[str], after: list[str], expected: Difference | None
) -> None:
    assert difference(before, after) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (["a", "b*2"], ["b*2", "a"], None),
        (["a*2"], ["a*4"], Difference(more_repeats=("a", "a"))),
        (["a*3", "b"], ["a"], Difference(missing=("b",), fewer_repeats=("a", "a"))),
    ],
)
def test_multisets_have_no_order(before: list[str], after: list[str], expected: Difference | None) -> None:
    assert difference(before, after, ordered=False) == expected


def test_a_difference_says_how_many_and_which() -> None:
    found = difference(["a", "b", "c", "d", "e", "f"], ["f", "e", "f*2"])
    assert str(found) == "4 missing (a, b, c, ...); other order ('f' where 'e' was); 1 more repeats (f)"


def heard(place: str, *messages: str) -> dict[str, Any]:
    return {place: {"digest": "", "messages": list(messages)}}


def test_records_are_compared_by_place_and_without_the_whole_run_unless_that_is_asked_for() -> None:
    before = {"heard": heard("L a", "vin 1", "vin +1") | heard("L b", "vin 2"), "whole": {"L a": ["vin 0"]}}
    after = {"heard": heard("L a", "vin +1") | heard("L c", "vin +2"), "whole": {}}
    found = list(differences(before, after))
    assert found == [
        ("L a", Difference(missing=("vin 1",))),
        ("L b", Difference(missing=("vin 2",))),
        ("L c", Difference(extra=("vin +2",))),
    ]
    assert list(differences(before, after, whole=True)) == [*found, ("L a (whole run)", Difference(missing=("vin 0",)))]


def test_the_last_rounds_are_compared_where_both_worlds_want_their_messages() -> None:
    before = {"heard": heard("L a", "vin 1", "vin +1") | heard("L b", "vin +2"), "wanted": ["L a", "L b", "L c"]}
    after = {"heard": heard("L a", "vin +1") | heard("L c", "vin +3"), "wanted": ["L a", "L c"]}
    assert list(differences(before, after, last_round=True)) == [("L c", Difference(extra=("vin +3",)))]


def test_two_files_are_compared_with_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    same = {"seed": 1, "kind": "chain", "run": "x", "violations": 0, "heard": heard("L a", "vin 1")}
    other = same | {"seed": 2, "run": "y", "violations": 1, "heard": heard("L a", "vin 2")}
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl.gz"
    before.write_text("".join(json.dumps(one) + "\n" for one in (same, same | {"seed": 2}, same | {"seed": 3})))
    with gzip.open(after, "wt") as file:
        file.writelines(json.dumps(one) + "\n" for one in (other, same))
    monkeypatch.setattr(sys, "argv", ["compare", str(before), str(after)])
    assert compare.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "seed 2 (chain) L a: 1 missing (vin 1); 1 extra (vin 2)",
        "2 worlds in both files (1 only in the first, 0 only in the second), 1 of them the same step by step; "
        "2 places, of which 1 differ in 1 worlds: 1 missing, 1 extra",
        "worlds with a fault, which end early: 2",
    ]
    monkeypatch.setattr(sys, "argv", ["compare", str(before), str(before)])
    assert compare.main() == 0


def test_one_pump_alone_gives_the_same_line_again() -> None:
    first, second = ([line_of(seed) for seed in seeds] for seeds in ((1, 2), (1, 2)))
    assert first == second
    for line in first:
        found = json.loads(line)
        assert found["heard"], "the network has taken something"
        assert not found["violations"]
