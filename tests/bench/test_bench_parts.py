"""What surrounds the figures: lanes, delay, points, targets and pictures. No test looks at how long something took."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from campaigns.bench import __main__ as main
from campaigns.bench import curves, pictures, targets, wire
from campaigns.bench.costs import COSTS, elsewhere, slow
from campaigns.bench.costs.common import Figures, Setting, has_failed, points
from campaigns.bench.costs.subscribing import fill
from campaigns.bench.far import BYTES_MAX, Delay, Far
from campaigns.bench.lanes import Lane, Leg, lane
from campaigns.bench.measure import LEGS, Result, kinds
from campaigns.bench.measure import Figures as LaneFigures
from campaigns.bench.processes import BenchError, Child
from usubscription.store.database import Database

# -- the broker that is far away


def test_bytes_arrive_a_while_later_in_order() -> None:
    delay = Delay(0.05)
    delay.put(1.0, b"a")
    delay.put(1.0, b"b")
    delay.put(1.02, b"c")
    assert (delay.next, delay.size) == (1.05, 3)
    assert delay.take(1.049) == []
    assert delay.take(1.05) == [b"a", b"b"]
    assert (delay.next, delay.size) == (1.07, 1)
    assert delay.take(9.0) == [b"c"]
    assert (delay.next, delay.size) == (None, 0)


async def test_a_far_port_passes_everything_on_both_ways_and_ends_with_either_side() -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data.upper())
        writer.close()

    server = await asyncio.start_server(shout, "127.0.0.1", 0)
    far = Far(server.sockets[0].getsockname()[1], 0.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", await far.open())
    sent = b"abcdefgh" * (1 << 17)
    writer.write(sent)
    assert await reader.readexactly(len(sent)) == sent.upper()
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    far.close()
    server.close()


async def test_a_far_port_refuses_where_there_is_nobody() -> None:
    far = Far(1, 0.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", await far.open())
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
    far.close()


def test_what_is_under_way_is_bounded() -> None:
    assert BYTES_MAX >= 0.1 * 20_000 * 1_000  # 20,000/s of 1,000 bytes at 100 ms are not held up


# -- lanes


def test_lanes_run_where_their_networks_allow() -> None:
    rust = Path("rust")
    assert {name: kinds(leg, rust)[2:] for name, leg in LEGS.items()} == {
        "zenoh_zenoh_durable": ["rust"],
        "zenoh_zenoh_at_once": ["rust"],
        "zenoh_zenoh_volatile": ["rust"],
        "zenoh_mqtt": ["rust"],
        "mqtt_zenoh": ["rust"],
        "mqtt_mqtt": ["bridge", "rust"],
        "dds_zenoh": [],
    }
    assert kinds(LEGS["mqtt_mqtt"], None) == ["bare", "streamer", "bridge"]


class End:
    """A child that answers as it was shown to."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self._answers = list(answers)

    def tell(self, **command: Any) -> None:
        pass

    def answer(self, timeout_s: float) -> dict[str, Any]:
        return self._answers.pop(0)


def made(loses: bool, **seen: int) -> Lane:
    result = {"received": 10, "doubled": 0, "disordered": 0, "seconds": 2.0, **seen}
    subscriber, publisher = End({"armed": True}, result), End({"seconds": 1.0})
    return Lane("lane", None, publisher, [subscriber], loses=loses)  # type: ignore[arg-type, list-item]


def test_a_whole_run_has_its_rate() -> None:
    result = made(False).run(10)
    assert (result["lost"], result["per_s"], result["publish_s"]) == (0, 4.5, 1.0)


@pytest.mark.parametrize("seen", [{"received": 9}, {"doubled": 1}, {"disordered": 1}])
def test_a_lane_that_loses_doubles_or_disorders_fails(seen: dict[str, int]) -> None:
    with pytest.raises(BenchError, match="of 10 sent"):
        made(False, **seen).run(10)


def test_losses_of_the_rust_streamer_are_reported() -> None:
    assert made(True, received=4).run(10)["lost"] == 6
    figures = LaneFigures(per_s=[1.0], p50_ms=[1.0], p99_ms=[1.0], messages=10, lost=6, paced_messages=10)
    assert figures.json()["lost_share"] == 0.6
    assert main._beside("rust", figures.json()) == "rust 1/s, 60% lost"


@pytest.mark.slow
def test_a_program_that_takes_the_rust_streamers_place_is_a_lane(tmp_path: Path) -> None:
    """It gets the two addresses and the interest, says ready, and ends with its standard input."""
    pytest.importorskip("zenoh")
    binary = tmp_path / "stand-in"
    binary.write_text(
        '#!/bin/sh\ntest "$(basename $3)" = interest.json && '
        f'exec \'{sys.executable}\' -m campaigns.bench.bare "$1" "$2"\n'
    )
    binary.chmod(0o755)
    with lane("rust", Leg("zenoh", "zenoh"), tmp_path / "lane", binary) as one:
        assert one.run(50)["received"] == 50
    interest = json.loads((tmp_path / "lane" / "interest.json").read_text())
    assert interest == {"up://device1/10AB/3/8000": ["up://device2/20EF/1/0"]}


def test_a_child_that_is_stopped_still_ends(tmp_path: Path) -> None:
    child = Child("sleeper", [sys.executable, "-c", "print('ready', flush=True); input()"], tmp_path / "log")
    child.wait_for("ready")
    with slow.slowed(child):
        assert len(os.sched_getaffinity(child.pid)) == 1
    child.signal(signal.SIGSTOP)
    child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


# -- results, points, targets


def test_ratios_and_delays_are_those_of_the_rounds() -> None:
    ours = LaneFigures([50.0, 90.0, 40.0], [1.0, 2.0, 3.0], [9.0, 9.0, 9.0], 2.0, 1_000_000, 0, 0.4, 1_000)
    bare = LaneFigures([100.0, 100.0, 50.0], [0.5, 2.5, 1.0], [1.0, 2.0, 3.0], 1.0, 1_000_000, 0, 0.1, 1_000)
    shown = Result({"streamer": ours, "bare": bare}).json()
    assert (shown["ratio"], shown["ratio_least"], shown["ratio_most"]) == (0.8, 0.5, 0.9)
    assert (shown["added_p50_ms"], shown["added_p99_ms"]) == (0.5, 7.0)
    assert (shown["lanes"]["streamer"]["cpu_s_per_million"], shown["cpu_at_1000_over_bare"]) == (2.0, 4.0)


def test_a_point_that_fails_is_reported_and_the_others_run(tmp_path: Path) -> None:
    said: list[str] = []

    def work(x: int, directory: Path) -> Figures:
        assert directory == tmp_path / str(x)
        if x == 2:
            raise BenchError("of 9 sent 1 lost")
        return {"ms": x}

    found = points([1, 2, 3_000], Setting(tmp_path, said.append), work)
    assert found == {"1": {"ms": 1}, "2": {"failed": "of 9 sent 1 lost"}, "3000": {"ms": 3_000}}
    assert said == ["1: ms 1", "error: 2: of 9 sent 1 lost", "3,000: ms 3,000"]
    assert has_failed({"leg": found})


def test_what_is_lost_or_twice_anywhere_fails_the_bench() -> None:
    assert not has_failed({"fleet": {"100": {"lost": 0, "duplicates": 0, "s": 1}}, "x": {"skipped": "why"}})
    for name in ("lost", "duplicates", "doubled", "disordered"):
        assert has_failed({"fleet": {"100": {name: 1}}})


@pytest.mark.parametrize("compiled", [True, False])
def test_each_target_takes_its_figure_from_a_leg_or_a_cost(compiled: bool) -> None:
    """An empty run has none of them, and says so; each is reached by figures of a name that there is."""
    shown = targets.rows({"legs": {}, "costs": {}}, compiled)
    assert {row["reached"] for row in shown} == {None}
    assert len({row["what"] for row in shown}) == len(shown)

    class Asked:
        def __init__(self, *path: str) -> None:
            self._path = path

        def __getitem__(self, name: str) -> Asked:
            if self._path:
                asked.add((*self._path, name))
                raise KeyError(name)
            return Asked(name)

    asked: set[tuple[str, ...]] = set()
    for target in targets.targets(compiled):
        assert target.reached(Asked()) is None  # type: ignore[arg-type]
    legs = {("legs", name) for name in LEGS}
    assert legs <= asked <= legs | {("costs", name) for name in COSTS}


def test_the_page_has_the_targets() -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    table = page.partition("## Targets")[2].partition("\n## ")[0]
    shown = [
        tuple(cell.strip() for cell in line.split("|")[1:3]) for line in table.splitlines() if line.startswith("|")
    ]
    rows = [*targets.rows({}, compiled=False), *targets.rows({}, compiled=True)]
    assert sorted(shown[2:]) == sorted({(row["what"], row["to_reach"]) for row in rows})


def test_a_target_holds_on_its_own_side() -> None:
    most = targets.Target("x", targets.at("x"), 2, "ms")
    least = targets.Target("y", targets.at("y"), 0.75, "", at_least=True)
    assert (most.to_reach, least.to_reach) == ("at most 2 ms", "at least 0.75")
    assert [most.holds(value) for value in (2, 2.1)] == [True, False]
    assert [least.holds(value) for value in (0.75, 0.7)] == [True, False]
    assert targets.over(targets.at("a"), targets.at("b"))({"a": 1, "b": 4}) == 0.25
    assert targets.Target("z", targets.over(targets.at("a"), targets.at("b")), 1, "").reached({"a": 1, "b": 0}) is None


def test_the_tables_are_drawn_with_and_without_figures() -> None:
    rows = targets.rows({"costs": {"first_sight": {"20000": {"ms": 3.4}}}}, compiled=False)
    assert [row for row in rows if row["reached"]] == [
        {
            "what": "first sight of a topic with 20,000 filters",
            "to_reach": "at most 0.05 ms",
            "reached": "3.40 ms",
            "holds": False,
        }
    ]
    assert main._target_table(rows).row_count == len(rows)


def test_a_missing_measurement_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "campaigns.bench.fleet", None)
    with pytest.raises(BenchError, match=r"campaigns\.bench\.fleet is not there"):
        elsewhere.fleet(Setting(tmp_path, print))


def test_a_filled_store_is_one_that_the_service_reads(tmp_path: Path) -> None:
    path = tmp_path / "data" / "usubscription.db"
    fill(path, 3)
    database = Database(path, wire.INGRESS_AUTHORITY)
    database.open()
    try:
        with sqlite3.connect(path) as db:
            assert db.execute("SELECT count(*) FROM subscription").fetchone() == (3,)
    finally:
        database.close()


# -- pictures


@pytest.mark.parametrize("curve", curves.CURVES)
def test_every_curve_has_a_picture(curve: str) -> None:
    assert pictures.PICTURES[curve]


def test_a_picture_is_small_has_its_axes_named_and_leaves_out_what_failed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = {
        "bare": {"10": {"p50_ms": 0.2, "p99_ms": 1.0}, "100": {"p50_ms": 0.3, "p99_ms": 2.0}},
        "durable": {"10": {"p50_ms": 0.4, "p99_ms": 3.0}, "100": {"skipped": "not carried"}},
    }
    (path,) = pictures.draw("load", figures, tmp_path)
    text = path.read_text()
    assert path.stat().st_size < 60_000
    ElementTree.fromstring(text)
    for word in ("messages/s offered", "ms from when it was due", "bare, p50", "durable, p99"):
        assert word in text
    again = text
    pictures.draw("load", figures, tmp_path)
    assert path.read_text() == again  # the same figures are the same file
    assert pictures.line(figures["durable"], "p50_ms") == [(10.0, 0.4)]
    assert pictures.draw("peers", {"1": {"failed": "x"}}, tmp_path) == []


def test_curves_keep_those_that_are_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(setting: Setting) -> Figures:
        raise BenchError("no")

    monkeypatch.setattr(curves, "CURVES", {"peers": lambda setting: {"1": {"cpu": 1}}, "load": fails})
    (tmp_path / curves.RESULTS).write_text(json.dumps({"load": {"old": 1}}))
    found = curves.curves(["peers", "load"], Setting(tmp_path, lambda text: None), tmp_path)
    assert found == {"peers": {"1": {"cpu": 1}}, "load": {"failed": "no"}}
    assert json.loads((tmp_path / curves.RESULTS).read_text()) == {"load": {"old": 1}, "peers": {"1": {"cpu": 1}}}


# -- the command line


def test_an_unknown_leg_and_a_program_that_is_none_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for argument in ("--legs=disk,nothing", "--legs=,", "--curves=nothing", f"--peer-rust={tmp_path}"):
        monkeypatch.setattr(sys, "argv", ["bench", argument])
        with pytest.raises(SystemExit):
            main.main()
    shown = capsys.readouterr().err
    assert "unknown: nothing; there are zenoh_zenoh_durable" in shown
    assert "is no program" in shown


def test_a_leg_that_fails_is_reported_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    def work(name: str) -> str:
        if name == "lost":
            raise BenchError("of 9 sent 1 lost")
        if name == "mistake":
            raise KeyError("p50_ms")
        return "figures"

    assert main._each(["lost", "mistake", "good"], work) == ({"good": "figures"}, False)
    shown = capsys.readouterr().err
    assert "error: lost: of 9 sent 1 lost" in shown
    assert "KeyError: 'p50_ms'" in shown
