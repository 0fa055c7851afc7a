"""The log: nothing of a stranger's making in it but escaped, no variables, no secrets, one line of a kind and minute,
and none lost."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from storage import logs

HOSTILE = "x\n2026-01-01 00:00:00 [error    ] forged\r\x1b[2J\x9b31m\u202e\u2028y"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`written("json")` sets the log up and answers what was written; everything global is put back."""
    before = structlog.get_config()
    handlers, level = logging.root.handlers[:], logging.root.level
    for name in ("excepthook", "unraisablehook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(logs.atexit, "register", lambda call: None)

    def set_up(format: logs.Format = "text", level: str = "info") -> io.StringIO:
        file = io.StringIO()
        logs.configure(level, format, file)
        return file

    yield set_up
    logging.captureWarnings(False)
    structlog.configure(**before)
    logging.root.handlers[:], logging.root.level = handlers, level


def of_json(file: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_json_has_utc_with_milliseconds_level_event_and_the_fields(written: Any) -> None:
    file = written("json")
    logs.log.warning(
        "it happened", endpoint="cloud", count=3, share=0.5, names=["a", "b"], other={1: 2}, odd=float("nan"), none=None
    )
    (line,) = of_json(file)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("timestamp"))
    assert line == {
        "level": "warning",
        "event": "it happened",
        "endpoint": "cloud",
        "count": 3,
        "share": 0.5,
        "names": ["a", "b"],
        "other": "{1: 2}",
        "odd": "nan",
        "none": None,
    }


@pytest.mark.parametrize("format", ["text", "json"])
def test_names_of_a_strangers_making_forge_no_line_and_move_no_cursor(written: Any, format: logs.Format) -> None:
    file = written(format)
    logs.log.warning("dropped", source=HOSTILE, names=[HOSTILE], thing=Shown())
    logs.log.warning(HOSTILE)
    logging.getLogger("paho").error("lost %s", HOSTILE)
    lines = file.getvalue().split("\n")
    assert len(lines) == 4
    assert lines[-1] == ""
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("2026-01-01") for line in lines)


class Shown:
    def __repr__(self) -> str:
        return HOSTILE


PASSWORD, PAYLOAD = "".join(["hun", "ter2"]), b" ".join([b"the", b"payload"])


def fail(password: str, payload: bytes) -> None:
    shown = password + payload.decode()
    raise ValueError(f"what was foreseen by nobody\n2026-01-01 00:00:00 [error    ] forged\x1b[2J {len(shown)}")


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_traceback_says_where_and_shows_no_variables(written: Any, format: logs.Format) -> None:
    file = written(format)
    try:
        fail(PASSWORD, PAYLOAD)
    except ValueError as error:
        logs.log.exception("it failed")
        logs.log.error("it failed again", exc_info=error)
        logging.getLogger("asyncio").error("a task failed", exc_info=error)
    text = file.getvalue()
    assert text.count("Traceback (most recent call last)") == 3
    assert text.count("in fail") == 3
    assert PASSWORD not in text
    assert PAYLOAD.decode() not in text
    assert "\x1b" not in text
    assert not re.search(r"^2026-01-01", text, re.MULTILINE)


@pytest.mark.parametrize("is_journal", [True, False])
def test_the_journal_gets_the_level_of_each_line(
    written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_journal: bool
) -> None:
    with (tmp_path / "log").open("w+") as file:
        found = (tmp_path / "log").stat()
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino + (not is_journal)}")
        written()
        logs.configure("debug", "text", file)
        logs.log.debug("a")
        logs.log.info("b")
        logs.log.warning("c")
        try:
            raise ValueError("no")
        except ValueError:
            logs.log.exception("d")
        lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) > 6
    prefixes = ["<7>", "<6>", "<4>", *["<3>"] * (len(lines) - 3)]
    assert [line.startswith(prefix) for line, prefix in zip(lines, prefixes, strict=True)] == [is_journal] * len(lines)


def test_secrets_are_not_shown(written: Any) -> None:
    file = written("json")
    logs.log.warning("settings", password="hunter2", private_key="----", password_file="/etc/p")
    assert "hunter2" not in file.getvalue()
    assert "----" not in file.getvalue()
    assert "/etc/p" in file.getvalue()


def test_long_values_are_cut(written: Any) -> None:
    file = written("json")
    logs.log.warning("x" * 100_000, value="y" * 100_000, values=["z"] * 100_000)
    assert len(file.getvalue()) < 4 * logs.VALUE_CHARACTERS_MAX


# One line of a kind and minute


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """Repeats on a clock of its own, without threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.lines: list[Any] = []
        monkeypatch.setattr(logs.Repeats, "_wait", lambda *_: None)
        self.repeats = logs.Repeats(lambda _, event: self.lines.append(event), self.clock)

    def log(self, event: str, level: str = "warning", **fields: Any) -> None:
        with contextlib.suppress(structlog.DropEvent):
            self.lines.append(self.repeats(None, level, {"event": event, **fields}))

    @property
    def reported(self) -> int:
        """How often it happened, by what was written."""
        return sum(line.get("repeated", 1) for line in self.lines)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def test_the_first_of_a_kind_is_written_at_once_and_the_others_are_counted_after_a_minute(desk: Desk) -> None:
    for seq in range(100):
        desk.log("lost", endpoint="cloud", seq=seq)
    desk.log("lost", endpoint="vehicle", seq=0)
    desk.log("found", endpoint="cloud")
    assert [line["event"] for line in desk.lines] == ["lost", "lost", "found"]
    desk.clock.now += 59
    desk.repeats.flush()
    assert len(desk.lines) == 3
    desk.clock.now += 1
    desk.repeats.flush()
    assert desk.lines[3:] == [{"event": "lost", "endpoint": "cloud", "seq": 99, "repeated": 99}]
    desk.log("lost", endpoint="cloud", seq=100)
    assert len(desk.lines) == 4, "a line was written just now"
    desk.clock.now += 120
    desk.log("lost", endpoint="cloud", seq=101)
    assert desk.lines[-1]["repeated"] == 2
    desk.clock.now += 120
    desk.repeats.flush()
    assert desk.repeats._kinds == {}
    assert desk.reported == 104


def test_two_backends_and_two_ports_are_kinds_of_their_own(desk: Desk) -> None:
    for port in (8001, 8002):
        desk.log("listens", setting=f"of {port}", port=port)
        desk.log("no answer", backend=f"http://127.0.0.1:{port}", why=f"no connection to port {port}")
    assert len(desk.lines) == 4


def test_debug_is_for_who_wants_it_all(desk: Desk) -> None:
    for _ in range(10):
        desk.log("detail", "debug")
    assert len(desk.lines) == 10


def test_kinds_of_a_strangers_making_are_bounded_and_counted(desk: Desk) -> None:
    for number in range(5_000):
        desk.log("two hosts go by one name", authority=f"made-up-{number}")
    assert len(desk.lines) <= logs.KINDS_PER_TEXT_MAX + 1
    for number in range(5_000):
        desk.log(f"text {number}")
    assert len(desk.repeats._kinds) <= logs.LINE_KINDS_MAX + 1
    desk.log("honest")
    desk.repeats.close()
    assert desk.reported == 10_001
    desk.log("after the end")
    assert desk.lines[-1]["event"] == "after the end", "nothing is held that nobody would tell"


KINDS = {"a": "a", "connected": "connection", "connection lost": "connection"}  # by text
EVENTS = st.sampled_from(sorted(KINDS))
NAMES = st.sampled_from(["x", "y", None])


@given(st.lists(st.tuples(EVENTS, NAMES, NAMES, st.integers(0, 40)), max_size=100))
def test_nothing_is_lost(happened: list[tuple[str, str | None, str | None, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        desk = Desk(patch)
        patch.setattr(logs, "CHANGE_LINES_MAX", 2)
        for event, endpoint, why, passes in happened:
            desk.clock.now += passes
            if passes % 2:
                desk.repeats.flush()
            fields = {"endpoint": endpoint, "why": why}
            desk.log(event, _kind=KINDS[event], **{name: one for name, one in fields.items() if one is not None})
        desk.repeats.close()
        assert desk.reported == len(happened)


def test_another_reason_is_never_held_back(desk: Desk) -> None:
    for why in ("refused", "refused", "refused", "wrong password", "wrong password", "refused"):
        desk.log("no connection", endpoint="cloud", error=why)
    shown = [(line["error"], line.get("repeated")) for line in desk.lines]
    assert shown == [
        ("refused", None),
        ("refused", 2),
        ("wrong password", None),
        ("wrong password", 1),
        ("refused", None),
    ]
    desk.log("no connection", endpoint="cloud", error="timeout after 17 ms")
    desk.log("no connection", endpoint="cloud", error="timeout after 18 ms")
    assert desk.lines[-1]["error"] == "timeout after 17 ms", "a number makes no other reason"
    desk.log("it failed", exc_info=ValueError("first"))
    desk.log("it failed", exc_info=ValueError("second"))
    assert desk.lines[-1]["exc_info"].args == ("second",), "with its frames"


def test_the_end_of_a_condition_is_never_held_back_and_neither_is_its_return(desk: Desk) -> None:
    for _ in range(3):
        desk.log("connection lost", endpoint="cloud", _kind="connection")
        desk.log("connected", endpoint="cloud", _kind="connection")
        desk.clock.now += 1
    assert [line["event"] for line in desk.lines] == ["connection lost", "connected"] * 3
    assert not any("repeated" in line for line in desk.lines)
    desk.log("connected", endpoint="cloud", _kind="connection")
    assert len(desk.lines) == 6, "that was known"


def test_reasons_that_a_stranger_chooses_are_bounded_and_the_last_one_is_reported(desk: Desk) -> None:
    for number in range(1_000):
        desk.log("refused", authority="car", why="x" * (number % 200))
    assert len(desk.lines) == logs.CHANGE_LINES_MAX + 1
    desk.clock.now += logs.PERIOD_S
    desk.repeats.flush()
    assert desk.lines[-1]["why"] == "x" * 199
    assert desk.reported == 1_000
    desk.log("refused", authority="car", why="x" * 199)
    assert desk.reported == 1_000, "it was reported just now"


def test_each_condition_that_is_logged_has_an_end() -> None:
    """The calls of a package with one `_kind`: one with a level of trouble, and one that says that it is over."""
    levels: dict[tuple[str, str], set[str]] = {}
    root = Path(logs.__file__).parent.parent
    for folder in ("streamer", "history", "transports/mqtt5", "transports/dds"):
        for file in (root / folder).rglob("*.py"):
            for call in ast.walk(ast.parse(file.read_text())):
                for keyword in call.keywords if isinstance(call, ast.Call) else ():
                    if keyword.arg == "_kind":
                        levels.setdefault((folder, ast.literal_eval(keyword.value)), set()).add(call.func.attr)
    assert set(levels) == {
        ("streamer", "connection"),
        ("streamer", "reading"),
        ("streamer", "dead letters"),
        ("streamer", "pushing"),
        ("history", "writing"),
        ("transports/mqtt5", "broker"),
        ("transports/dds", "DDS receiver"),
    }
    del levels["streamer", "connection"]  # one call, of level info, with either text
    assert all("info" in used and used & {"warning", "error"} for used in levels.values()), levels


def test_what_is_held_is_written_though_no_other_line_comes() -> None:
    lines: list[Any] = []
    written = threading.Event()

    def emit(method: str, event: Any) -> None:
        lines.append((method, event))
        written.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "PERIOD_S", 0.05)
        repeats = logs.Repeats(emit)
        repeats(None, "error", {"event": "lost", "exc_info": ValueError("why")})
        with pytest.raises(structlog.DropEvent):
            repeats(None, "error", {"event": "lost", "exc_info": ValueError("why")})
        assert written.wait(60)
        repeats.close()
    assert lines == [("error", {"event": "lost", "error": "ValueError('why')", "repeated": 1})], (
        "it keeps no frames alive"
    )


PROGRAM = """
import asyncio, sys, threading, warnings, structlog
from storage import logs
logs.configure("info", sys.argv[1])
log = structlog.get_logger()
for number in range(1_000):
    log.error("lost", endpoint="cloud", seq=number)
warnings.warn("a library warns")
password = "hun" + "ter2"
def in_thread(secret):
    raise RuntimeError("in a thread")
thread = threading.Thread(target=in_thread, args=(password,), name="worker")
thread.start(); thread.join()
async def forgotten(secret):
    raise RuntimeError("in a task")
async def main():
    task = asyncio.ensure_future(forgotten(password))
    await asyncio.sleep(0)
    del task
    import gc; gc.collect()
asyncio.run(main())
def end(secret):
    raise RuntimeError("at the end")
end(password)
"""


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_process_tells_what_nobody_caught_and_what_is_held_when_it_ends(format: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, format], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    for words in ("in a thread", "in a task", "at the end", "a library warns", "999"):
        assert words in done.stderr, words
    assert done.stderr.count("lost") == 2
    assert PASSWORD not in done.stderr
    if format == "json":
        lines = [json.loads(line) for line in done.stderr.splitlines()]
        assert {line["level"] for line in lines} == {"error", "warning"}
        assert [line.get("repeated") for line in lines if line["event"] == "lost"] == [None, 999]
