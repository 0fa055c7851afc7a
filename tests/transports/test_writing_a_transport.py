"""The page for authors of transports: its code works, and what it says of our code and of the template is so.

docs/writing-a-transport.md -> ```python blocks that begin with `# FILE` -> FILE
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import re
import sys
import tomllib
from collections import defaultdict
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamer import config as configs
from transports import arrivals, base, conformance, listeners, plugin
from transports.listeners import ListenerTable
from uprotocol import attributes, status, transport
from uprotocol import uri as uris
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.transport import UTransport
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.umessage_pb2 import UMessage

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing-a-transport.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(python|toml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
TEMPLATE = ROOT / "examples" / "transport-template"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page makes."""
    files: dict[str, str] = defaultdict(str)
    for language, text in BLOCKS:
        if language == "python":
            name, _, code = text.partition("\n")
            assert re.fullmatch(r"# \w+\.py", name), (
                f"a block of Python says in its first line which file it is part of, not {name!r}"
            )
            files[name.removeprefix("# ")] += code + "\n\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in files:
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    return tmp_path


def toml(key: str) -> str:
    """The block of TOML that has `key` at its top."""
    (text,) = [text for language, text in BLOCKS if language == "toml" and key in tomllib.loads(text)]
    return text


def test_the_code_that_the_page_names_is_in_the_template() -> None:
    there = {
        node.name
        for node in ast.walk(ast.parse((TEMPLATE / "up_transport_hubnet.py").read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    named = [
        name.rpartition(".")[2]
        for line in re.findall(r"^Template: (.*)$", PAGE, re.MULTILINE)
        for name in re.findall(r"`([\w.]+)`", line)
    ]
    assert len(named) > 12
    assert set(named) <= there


def test_its_entry_point_and_its_endpoint_are_accepted(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_points = tomllib.loads(toml("project"))["project"]["entry-points"]
    assert written_points == tomllib.loads((TEMPLATE / "pyproject.toml").read_text())["project"]["entry-points"]
    ((name, value),) = written_points[plugin.GROUP].items()
    monkeypatch.syspath_prepend(str(TEMPLATE))
    monkeypatch.setattr(plugin, "names", lambda *_: {name: EntryPoint(name, value, plugin.GROUP)})
    loaded = configs.loads(f'[streamer]\ndata_dir = "{written}"\n' + toml("endpoint"))
    (endpoint,) = loaded.endpoint
    made = plugin.create(endpoint.transport, endpoint.settings, transport.LocalUriProvider("vehicle1", 1, 1))
    assert made.capabilities == plugin.load(name).capabilities


def test_every_name_of_ours_that_the_page_gives_exists() -> None:
    """`module.name` of our packages, wherever it stands."""
    for dotted in set(re.findall(r"\b((?:transports|uprotocol)(?:\.\w+)+)", PAGE)):
        where, _, name = dotted.rpartition(".")
        try:
            importlib.import_module(dotted)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(where), name), dotted
    for name in ("refusal",):
        assert hasattr(base.SendChecks, name)
    for name in ("dropped", "mended", "connected", "on_connection", "set_connected"):
        assert hasattr(base.TransportBase, name)
        assert name in PAGE
    for name in ("open", "put", "put_on_loop", "put_now", "drained", "finish", "close"):
        assert hasattr(arrivals.Arrivals, name)
        assert name in PAGE
    for name in ("add", "remove", "filters", "deliver", "deliver_encoded"):
        assert hasattr(listeners.ListenerTable, name)
        assert name in PAGE
    for name in ("lacks_authority", "complete", "completed"):
        assert hasattr(attributes, name)
    for name in ("UStatusError", "invalid", "nobody_listens"):
        assert hasattr(status, name)


def rows(heading: str) -> set[str]:
    """What the first column of the table below `heading` names in code."""
    table = PAGE.partition(heading)[2].partition("\n\n")[0]
    return {
        name
        for line in table.splitlines()
        if line.startswith("|")
        for name in re.findall(r"`(\w+)", line.split("|")[1])
    }


def test_the_tables_of_hooks_and_attributes_are_those_of_the_suite() -> None:
    harness = conformance.TransportHarness
    ours = {
        "pair",
        "ends",
        "needs",
        "needs_hook",
        "lacks_hook",
        "send_until_taken",
        "gated",
        "refusal_of",
        "away",
        "usable",
        "listen",
        "reach",
        "send_all",
        "send_in_parts",
        "traffic",
        "flood",
        "eventually",
        "settle",
    }
    there = {
        name for name in vars(harness) | harness.__annotations__ if not name.startswith("_") and name != "pytestmark"
    } - ours
    hooks = {name for name in there if callable(getattr(harness, name, None))}
    documented_hooks, documented_attributes = rows("| hook | async | for |"), rows("| attribute | default | meaning |")
    assert documented_hooks - {"limits"} >= hooks
    assert documented_attributes >= there - hooks


def test_the_table_of_methods_is_that_of_the_class() -> None:
    documented = rows("| method | async? | what it does | what it raises or answers |") - {"create"}
    there = {name for name in vars(UTransport) if not name.startswith("_")} - {
        "capabilities",
        "only_listens",
    }
    assert documented == there
    for line in PAGE.partition("| method | async? |")[2].partition("\n\n")[0].splitlines()[2:]:
        name, is_async = re.findall(r"`(\w+)", line)[0], line.split("|")[2].strip()
        if is_async in ("yes", "no") and name != "create":
            assert asyncio.iscoroutinefunction(getattr(UTransport, name)) == (is_async == "yes"), name
            for parameter in re.findall(r"(\w+)=None|(\w+)(?=[,)])", line.partition("`")[2].partition("`")[0]):
                assert max(parameter) in getattr(UTransport, name).__code__.co_varnames


def test_the_capabilities_are_all_there() -> None:
    names = {name for name in transport.Capability.__members__ if name != "NONE"}
    assert rows("| capability | with it | without it |") == names


async def test_the_other_forms_acknowledge_last_and_complete_addresses(written: Path) -> None:
    other_forms: Any = importlib.import_module("other_forms")
    answers: list[tuple[str, str]] = []
    library: Any = SimpleNamespace(
        acknowledge=lambda reply: answers.append(("ack", reply)),
        refuse=lambda reply: answers.append(("nak", reply)),
        on_message=None,
    )
    table, taking, heard = ListenerTable("here"), asyncio.get_running_loop().create_future(), asyncio.Event()
    messages: list[UMessage] = []

    class Listener:
        def on_receive(self, message: UMessage) -> asyncio.Future[None]:
            messages.append(message)
            heard.set()
            return taking

    filter = table.add(uris.ANY, None, Listener())
    box = other_forms.acknowledging(library, table)
    sent = UMessageBuilder.publish(uris.uri("", 1, 1, 0x8001)).build_from_upayload(
        UPayload(b"x", UPayloadFormat.UPAYLOAD_FORMAT_RAW)
    )
    item = SimpleNamespace(
        filter=filter,
        attributes=sent.attributes.SerializeToString(),
        payload=sent.payload,
        sender="vehicle7",
        reply="r1",
    )
    await asyncio.to_thread(library.on_message, item)
    await asyncio.wait_for(heard.wait(), 10)
    assert answers == []
    taking.set_result(None)
    await asyncio.wait_for(box.drained(), 10)
    assert answers == [("ack", "r1")]
    assert messages[0].attributes.source.authority_name == "vehicle7"
