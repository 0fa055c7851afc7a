"""The size and the shape of the product: ceilings that it may not pass. `make house` shows what they are about."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tools import house

TREE = Path(__file__).parents[1]

LINES: Final = {  # what the product's lines are for -> how many these may be; together the ceiling
    "release 0.2.0, less what untying its rooms was to save": 68_000,
    "what is wanted and vanishes is reported": 4_340,
    # 33 more files (parts, what waits, words of all rooms), each with its imports, its docstring, and what is its state
    "each part of the streamer, and each reason to wait, is an object of its own": 1_960,
}
WALKS_MAX: Final = {  # walk -> functions, files
    "publish": (100, 30),
    "subscribe": (304, 59),
    "poll": (126, 28),  # by time, 117 to 122 and sometimes more
    "followed": (170, 45),
    "epoch": (150, 26),
    "micro-batch": (200, 30),
}
LONG_OBJECTS: Final = {  # file:class -> why it is more than house.OBJECT_LINES_MAX lines with those it inherits from
    "transports/conformance/__init__.py:TransportConformance": "the suite: a plugin's tests inherit all of it",
    "transports/zenoh/transport.py:ZenohTransport": "a third of it is UTransport, which says what each method does",
    "transports/dds/transport.py:DdsTransport": "the same",
    "transports/mqtt5/transport.py:Mqtt5Transport": "the same",
    "transports/local.py:LocalTransport": "the same",
    "streamer/walk/hosted.py:HostedTransport": "the same",
    "transports/dds/writers.py:Writers": "one thread's writers: queues, acknowledgements and absence share their state",
    "streamer/following/followed.py:Followed": "one conversation: its methods share one position and one backlog",
    "streamer/following/follows.py:Follows": "all conversations: their choice and their common intake",
}
PARTS_OF_BACKLOG: Final = {"backlog", "reading_back", "refusals", "address_holds", "topic_holds"}
HOLDERS: Final = {"topics", "addresses", "owed", "owned", "topic_holds", "address_holds"}  # as attributes are called
# what changes them; plans hold an undecided topic and count what waits where they look at each record
CHANGES: Final = {"hold", "forget", "pass_to", "wait", "drop", "move", "taken", "confirmed", "save", "waited"} | {
    "begin_return", "not_tried", "try_all", "try_heard", "try_now", "uncover", "wait_behind", "add", "clear_all", "load"
}  # fmt: skip
POSITIONS: Final = {"read", "is_followed", "pushed_to", "progress", "after", "tried", "has_row", "served", "began"} | {
    "wanted", "targets", "topics", "position", "until", "are_streams_found", "trying", "fresh", "heard"
}  # fmt: skip
NAMES_TWICE: Final[dict[str, str]] = {}  # name -> why it stands in two files
_SERVER = "the default of an RPC server, and those of servers that have another one"
CONSTANTS_TWICE: Final = {  # name -> why it stands in several files with different values
    **dict.fromkeys(("REQUESTS_RUNNING_MAX", "RESPONSES_BATCH_MAX", "RESPONSES_WAITING_MAX"), _SERVER),
    **dict.fromkeys(("K", "M", "T"), "variables of types"),
    **dict.fromkeys(("APPLICATION_ID", "SCHEMA"), "of each store: SQLite's word, and ours for its tables"),
    "PLUGIN": "the name that plugins are found by",
}
CIRCLES: Final[dict[str, str]] = {}  # first module of a circle -> why
ROOM_CIRCLES: Final = {  # rooms that import each other in a circle -> why
    "streamer.commands <-> streamer.commands.demo": "the demo is a command, and takes the options of commands",
}


def test_the_product_does_not_grow_unnoticed() -> None:
    what = "make house: delete something, or say in LINES what the lines are for"
    assert house.line_count(TREE) <= sum(LINES.values()), what


def test_no_name_of_a_class_stands_in_two_files() -> None:
    assert set(house.names_twice(TREE)) == set(NAMES_TWICE)


def test_a_name_of_a_constant_means_one_thing() -> None:
    assert house.constants_twice(TREE).keys() <= CONSTANTS_TWICE.keys(), "say of what it is, or keep it in one place"


def test_no_object_is_too_long_to_be_read() -> None:
    assert set(house.long_objects(TREE)) == set(LONG_OBJECTS)


def test_no_modules_import_each_other() -> None:
    assert {modules[0] for modules in house.module_circles(TREE)} == set(CIRCLES)


def test_no_rooms_import_each_other() -> None:
    assert {" <-> ".join(rooms) for rooms in house.room_circles(TREE)} == set(ROOM_CIRCLES)
    assert {" <-> ".join(pair) for pair in house.room_pairs(TREE)} == set(ROOM_CIRCLES)


@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_walks_do_not_grow_unnoticed() -> None:
    """In a process of its own: compiled code can't be traced, and the tracer sees threads alone that start after it."""
    code = "import asyncio, json, tools.walks as w; from pathlib import Path; "
    code += "found = asyncio.run(w.walks(Path.cwd())); "
    code += "print(json.dumps({walk: (len(calls), len(w.files(calls))) for walk, calls in found.items()}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=TREE,
        env={**os.environ, "PYTHONPATH": str(TREE), "UP_STREAMER_COMPILED": "0"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(WALKS_MAX) - {"micro-batch"} <= set(found)
    longer = {
        walk: (counted, WALKS_MAX[walk])
        for walk, counted in found.items()
        if counted[0] > WALKS_MAX[walk][0] or counted[1] > WALKS_MAX[walk][1]
    }
    assert not longer, f"functions and files, and what they may be: {longer}"


def rooms() -> list[Path]:
    """Packages of the product with modules of their own."""
    return sorted(
        {path.parent for path in house.sources(TREE) if path.name != "__init__.py"} - {TREE / "pyspark_uprotocol"}
    )


@pytest.mark.parametrize("room", rooms(), ids=lambda room: str(room.relative_to(TREE)))
def test_each_room_lists_its_files(room: Path) -> None:
    listed = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    files = [
        path.name for path in room.glob("*.py") if path.stem not in ("__init__", "__main__") and "_pb2" not in path.stem
    ]
    assert not [name for name in files if name not in listed and name.removesuffix(".py") not in listed.split()]


def _changes_what_waits(path: Path, node: ast.Attribute) -> bool:
    whose = ast.unparse(node.value)
    if isinstance(node.ctx, ast.Load):
        return node.attr in CHANGES and whose.rpartition(".")[2].lstrip("_") in HOLDERS
    return node.attr in POSITIONS and whose != "self" and (path.parent.name == "egress" or ".waits" in whose)


def test_only_the_owner_changes_what_waits_toward_a_peer() -> None:
    """The rule of streamer/egress: Backlog and its parts change positions and holds, and all others call Backlog."""
    files = [path for path in house.sources(TREE) if "streamer" in path.parts and path.stem not in PARTS_OF_BACKLOG]
    nodes = [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text()))]
    attributes = [(path, node) for path, node in nodes if isinstance(node, ast.Attribute)]
    changed = [f"{path.name}:{node.lineno} {node.attr}" for path, node in attributes if _changes_what_waits(path, node)]
    assert not changed


def test_no_two_places_of_the_product_share_ten_lines() -> None:
    assert house.shared_runs(TREE) == []


def test_ten_lines_that_stand_twice_are_found(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "streamer").mkdir(exist_ok=True)
        lines = [f"import {name}", *(f"    value_{number} = {number}" for number in range(house.SHARED_LINES)), "# end"]
        (tmp_path / "streamer" / f"{name}.py").write_text("\n\n".join(lines))
    (found,) = house.shared_runs(tmp_path)
    assert found == "streamer/one.py:3 ~ streamer/two.py:3"


def test_lines_of_code_are_those_that_do_something() -> None:
    text = '"""A docstring\nof two lines."""\n\nx = 1  # why\n\n\ndef f(\n    a: int,\n) -> str:\n'
    text += '    """Says."""\n    # a comment\n    return """one\ntwo"""\n'
    assert house.code_lines(text) == 1 + 3 + 2


def _write(tree: Path, **files: str) -> None:
    for name, text in files.items():
        path = tree / "streamer" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_names_that_stand_twice_are_found(tmp_path: Path) -> None:
    _write(tmp_path, one="class A:\n    class Inner: ...\nKey = tuple[int, str]\n", two="Key = bytes | None\nA = 3\n")
    assert house.names_twice(tmp_path) == {"Key": ["streamer/one.py", "streamer/two.py"]}


def test_constants_with_different_values_are_found(tmp_path: Path) -> None:
    _write(tmp_path, one="A = 1\nB: Final = 2\nC: int\n_D = 1\n", two="A: Final = 1\nB = 3\nC = 4\n_D = 2\n")
    assert house.constants_twice(tmp_path) == {"B": ["streamer/one.py", "streamer/two.py"]}


def test_an_object_is_counted_with_what_it_inherits(tmp_path: Path) -> None:
    half = "    x = 1\n" * (house.OBJECT_LINES_MAX // 2)
    _write(tmp_path, one=f"class A:\n{half}", two=f"class B(A):\n{half}class C(A[int]):\n    x = 1\n")
    assert house.long_objects(tmp_path) == {"streamer/two.py:B": house.OBJECT_LINES_MAX + 2}


def test_circles_of_imports_are_found(tmp_path: Path) -> None:
    _write(
        tmp_path,
        one="from streamer import two\n",
        two="def f():\n    from streamer.three import x\n",
        three="import streamer.one\nfrom streamer import __init__\n",
        four="from streamer import one\n",
    )
    assert house.module_circles(tmp_path) == [["streamer.one", "streamer.three", "streamer.two"]]


def test_circles_of_rooms_are_found(tmp_path: Path) -> None:
    """Their modules import no module in a circle."""
    _write(
        tmp_path,
        **{
            "__init__": "from streamer.walk import a\n",
            "app": "from streamer.walk.a import x\n",
            "walk/a": "from streamer.edge import b\n",
            "walk/c": "",
            "edge/b": "def f():\n    from streamer.walk import c\n",
            "edge/__init__": "",
            "walk/__init__": "",
        },
    )
    assert house.module_circles(tmp_path) == []
    assert house.room_circles(tmp_path) == [["streamer.edge", "streamer.walk"]]
    assert house.room_pairs(tmp_path) == [("streamer.edge", "streamer.walk")]


def test_imports_in_every_kind_of_block_are_seen(tmp_path: Path) -> None:
    """An import is a statement, and so is everything around it."""
    blocks = [
        *("class A:\n def f():\n  {}", "async def f():\n async with b:\n  {}", "while a:\n  b\nelse:\n  {}"),
        *("try:\n  b\nexcept C:\n  {}\nelse:\n  {}\nfinally:\n  {}", "if a:\n  b\nelif c:\n  {}\nelse:\n  {}"),
        "match a:\n case 1:\n  {}",
    ]
    parts = "\n".join(blocks).split("{}")
    names = [f"m{number}" for number in range(len(parts) - 1)]
    text = "".join(f"{part}from streamer import {name}" for part, name in zip(parts, names, strict=False)) + parts[-1]
    _write(tmp_path, one=text, **dict.fromkeys(names, ""))
    graph = house.import_graph(
        {house.module_name(path.relative_to(tmp_path)): path for path in house.sources(tmp_path)}
    )
    assert graph.pop("streamer.one") == {f"streamer.{name}" for name in names}
    assert set().union(*graph.values()) == set()
