"""Imports run downhill only: who may import whom, as one table.

uprotocol <- storage (files, threads, clock, chance)
          <- transports, history, usubscription, usubscription_client <- streamer
          <- spark_ingest (the plugin loader and the history's client side, nothing else)
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools.house import PRODUCT

ROOT = Path(__file__).resolve().parent.parent
SHARED = {  # by all plugins
    "transports.plugin",
    "transports.listeners",
    "transports.arrivals",
    "transports.base",
    "transports.certificates",
}

READING = {"history.records", "history.epochs", "history.reading.client"}  # no log, and no file of one

# module or package -> what it may import beside itself; the longest name that fits counts
ALLOWED: dict[str, set[str]] = {
    "uprotocol": set(),
    "transports": {"uprotocol"},
    "storage": {"uprotocol"},
    "history": {"uprotocol", "storage"},
    "usubscription": {"uprotocol", "storage"},
    "usubscription.__main__": {"uprotocol", "storage", "transports.plugin"},  # a process of its own needs a network
    "usubscription_client": {"uprotocol", "storage"},
    # and never names a plugin
    "streamer": {"uprotocol", "storage", "history", "usubscription", "usubscription_client", "spark_ingest", *SHARED},
    "streamer.commands.demo.demo": {
        "uprotocol",
        "usubscription_client",
        "spark_ingest",
        "transports.ports",
        *SHARED,
    },
    "streamer.commands.demo.mosquitto": {"uprotocol", "transports.ports"},
    "spark_ingest": {"uprotocol", "transports.plugin", *READING, "storage.logs"},
    "pyspark_uprotocol": {"spark_ingest"},
}

UPROTOCOL_LAYERS = (
    ("compiled", "status", "cache", "callbacks", "tasks"),
    ("uri", "uuid", "pacing"),
    ("attributes",),
    ("message", "permissions", "encoded"),
    ("transport",),
    ("communication",),
)
HISTORY_LAYERS = (
    # Records, their epochs and witnesses, as they are stored and sent: both sides of a history know these.
    ("records",),
    # The file of one log: it is written, read, checked and saved, and records that are too old are deleted.
    # Epochs: computed from the records alone, without I/O, where they are appended and again where they are read.
    ("file", "epochs"),
    # The log: appends and reads for the event loop, in a file or in memory, with cursors and streams.
    ("log",),
    # The service answers from the logs of this process what readers ask, and keeps the epochs of what is appended.
    # Readers ask a service, elsewhere or in this process, by messages alone: they know neither it nor a log.
    ("service", "reading"),
    # A publisher with a log and a service of its own.
    ("publisher",),
)
STREAMER_LAYERS = (
    # The words of all rooms: a histogram, names of files, operations, spans, what a recovery source is; then reports.
    ("durations", "data_dir", "operation", "spans", "recovery_source"),
    ("reporting",),
    # What all HTTP ports share: limits of connections, names of hosts. Dead letters: what could not be delivered.
    ("http", "letters"),
    # The way of a message: from a network into a log, and from the view of who wants it to a network.
    ("walk",),
    # What waits for one endpoint and leaves for it: positions, holds, the pump.
    ("egress",),
    # Other histories into our log, and ours handed over to who follows it.
    ("following",),
    # The TOML file, and what waits for an endpoint that it gives another name.
    ("config", "renaming"),
    # What reports and controls; GRIP for backends that are not ours.
    ("operating", "grip"),
    # Streams for HTTP clients; sources of what a topic's stream has lost.
    ("edge", "recovery"),
    # What is made of the configuration alone, and all that a message passes, connected.
    ("building",),
    ("assembly",),
    # One part: what it loads, runs, reports, and how it takes over a change. Then the parts, and who runs them.
    ("part",),
    ("parts",),
    ("app",),
    # The command line.
    ("commands",),
)
COMMUNICATION_LAYERS = (("api",), ("pubsub", "rpc_client", "rpc_server"))

NOT_IN_UPROTOCOL = {
    *(
        "concurrent",
        "ctypes",
        "http",
        "io",
        "multiprocessing",
        "pathlib",
        "selectors",
        "shutil",
        "signal",
        "socket",
        "socketserver",
    ),
    *("sqlite3", "ssl", "subprocess", "tempfile", "threading", "urllib"),
}


def modules() -> list[tuple[str, Path]]:
    """Every hand-written module: name, file."""
    found = []
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.stem.endswith("_pb2"):
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                found.append((name, path))
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[str]:
    """Every name that is imported anywhere in `path`, also within functions: `from a import b` is a.b."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


ALL = modules()


@pytest.mark.parametrize(("module", "path"), ALL, ids=[name for name, _ in ALL])
def test_imports_run_downhill(module: str, path: Path) -> None:
    rule = max((prefix for prefix in ALLOWED if is_in(module, prefix)), key=len)
    own = module.split(".")[0]
    wrong = [
        name
        for name in imports(path)
        if name.split(".")[0] in PRODUCT
        and not is_in(name, own)
        and not any(is_in(name, allowed) for allowed in ALLOWED[rule])
    ]
    assert not wrong, (
        f"{module} may import {', '.join(sorted(ALLOWED[rule])) or 'nothing of ours'}, but imports {', '.join(wrong)}"
    )


def test_plugins_do_not_know_one_another() -> None:
    plugins = {point.split(":")[0] for point in _entry_points().values()}
    assert plugins
    for module, path in ALL:
        part_of = next((plugin for plugin in plugins if module.startswith(plugin)), None)
        if part_of is None and not is_in(module, "transports"):
            continue
        others = plugins - {part_of}
        wrong = [name for name in imports(path) if any(name.startswith(other) for other in others)]
        assert not wrong or is_in(module, "transports.conformance"), (
            f"{module} imports another plugin: {', '.join(wrong)}"
        )


def _entry_points() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points: dict[str, str] = project["entry-points"]["up_streamer.transports"]
    return points


@pytest.mark.parametrize(
    "start", ["transports", "transports.plugin", "streamer", "streamer.app", "streamer.commands.cli", "spark_ingest"]
)
def test_plugins_are_imported_only_when_named(start: str) -> None:
    """A fresh interpreter, since this one has imported everything."""
    code = f"import sys, {start}; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    networks = {"paho", "zenoh", "cyclonedds", "pyspark", *(point.split(":")[0] for point in _entry_points().values())}
    assert not loaded & networks, f"import {start} imports {', '.join(sorted(loaded & networks))}"


def _check_layers(package: str, layers: tuple[tuple[str, ...], ...]) -> None:
    level = {f"{package}.{name}": height for height, names in enumerate(layers) for name in names}
    for module, path in ALL:
        layer = next((name for name in level if is_in(module, name)), None)
        if layer is None:
            continue
        below = {
            name
            for name in imports(path)
            for higher in level
            if is_in(name, higher) and higher != layer and level[higher] >= level[layer]
        }
        assert not below, f"{module} imports {', '.join(below)}, which is not below it"


def test_uprotocol_is_built_in_layers() -> None:
    _check_layers("uprotocol", UPROTOCOL_LAYERS)
    _check_layers("uprotocol.communication", COMMUNICATION_LAYERS)
    known = {name for names in UPROTOCOL_LAYERS for name in names} | {"core", "v1", "cache", "pacing"}
    assert {module.split(".")[1] for module, _ in ALL if module.startswith("uprotocol.")} <= known


def test_history_is_built_in_layers() -> None:
    _check_layers("history", HISTORY_LAYERS)
    known = [name for names in HISTORY_LAYERS for name in names]
    assert sorted(known) == sorted({module.split(".")[1] for module, _ in ALL if module.startswith("history.")})


def test_the_streamer_is_built_in_layers() -> None:
    _check_layers("streamer", STREAMER_LAYERS)
    known = [name for names in STREAMER_LAYERS for name in names]
    assert sorted(known) == sorted({module.split(".")[1] for module, _ in ALL if module.startswith("streamer.")})


def test_uprotocol_has_no_sockets_files_or_threads() -> None:
    for module, path in ALL:
        if not is_in(module, "uprotocol"):
            continue
        found = {name.split(".")[0] for name in imports(path)} & NOT_IN_UPROTOCOL
        calls = {
            node.func.id
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        # that one looks at the sources, before there is anything else: are they what was compiled?
        assert "open" not in calls or module == "uprotocol.compiled", f"{module} opens a file"
        if module == "uprotocol.uuid":  # one lock, so that ids are unique among threads
            attributes = {
                node.attr
                for node in ast.walk(tree(path))
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "threading"
            }
            assert attributes == {"Lock"}
            found.discard("threading")
        assert not found, f"{module} imports {', '.join(found)}"


def test_the_table_names_what_exists() -> None:
    names = {module for module, _ in ALL}
    assert {rule for rule in ALLOWED if rule.split(".")[0] in PRODUCT and rule not in names} <= {
        "usubscription.__main__"
    }
    assert {"transports.plugin", "transports.listeners", "transports.arrivals"} <= names
