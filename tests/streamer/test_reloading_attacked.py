"""Reloads at bad moments, of bad files, and many of them; and how each key of the configuration takes effect."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamer.app import Streamer
from streamer.commands.check import usable
from streamer.config import Config, model
from streamer.config.changes import NAMES
from streamer.parts import reloading
from streamer.parts.control import ControlPart
from streamer.parts.edge import EdgePart
from streamer.parts.reloading import Reloader
from tests.streamer.conftest import MakeWorld, endpoints, publication
from tests.streamer.test_attaching import OBJECTS_MAX, settled_counts
from tests.streamer.test_reloading import AT_CLOUD, DOOR, changed, publishing, reload, section, table, with_endpoint
from tests.tiers import full
from transports.local import LocalTransport
from uprotocol import uri as uris
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription_client import ServiceInterest, Status, Subscription

TWO = {"vehicle": "", "cloud": "none"}
LOOKS = 40  # until everything is as it was; some 20 s


# Bad moments


async def test_what_is_paused_stays_paused_under_a_new_name(make_world: MakeWorld) -> None:
    world = await make_world(TWO, AT_CLOUD)
    node = await world.node("vehicle", "vehicle1", 0x9001)
    heard = await world.hear(await world.node("cloud", "cloud"), uris.parse(DOOR))
    await world.assembly.paused.pause(uris.parse(DOOR), "cloud")
    for number in range(20):
        await node.send(publication(DOOR, str(number)))
    await world.until(lambda: world.assembly.logs.durable.newest_seq == 20)
    await reload(world, with_endpoint(world.config, "cloud", name="backend", renamed_from="cloud"))
    await node.send(publication(DOOR, "20"))
    await world.until(lambda: world.assembly.logs.durable.newest_seq == 21)
    assert not heard.texts
    await world.assembly.paused.resume(uris.parse(DOOR), "backend")
    await world.until(lambda: len(heard.texts) == 21)
    assert heard.texts == [str(number) for number in range(21)]


async def test_a_full_disk_loses_no_pause_of_a_renamed_endpoint(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(TWO, AT_CLOUD)
    await world.assembly.paused.pause(uris.parse(DOOR), "cloud")

    def full(_: object) -> None:
        raise UStatusError(UCode.RESOURCE_EXHAUSTED, "the disk is full")

    monkeypatch.setattr(world.assembly.paused._file, "save", full)
    new = with_endpoint(world.config, "cloud", name="backend", renamed_from="cloud")
    await reload(world, new)
    assert [one.peer for one in world.assembly.paused] == ["backend"]
    world.config = new
    await world.restart()
    assert [one.peer for one in world.assembly.paused] == ["backend"]


async def test_pauses_that_could_not_be_read_stay_on_disk(make_world: MakeWorld) -> None:
    """An endpoint that was renamed must not replace the file."""
    world = await make_world(TWO, AT_CLOUD)
    await world.stop()
    file = world.config.streamer.data_dir / "paused.json"
    file.write_text("not a list of pauses")
    world.config = with_endpoint(world.config, "cloud", name="backend", renamed_from="cloud")
    await world.start()
    assert file.read_text() == "not a list of pauses"
    assert world.assembly.paused.trouble


async def test_reloads_at_once_are_taken_over_one_after_the_other(make_world: MakeWorld) -> None:
    world = await make_world(TWO, AT_CLOUD)
    heard = await world.hear(await world.node("cloud", "cloud"), uris.parse(DOOR))
    files = [with_endpoint(world.config, "cloud", hold=hold) for hold in (False, True) * 5]
    waiting = iter(files)
    world.parts.of(Reloader).read = lambda: next(waiting)
    async with publishing(world) as accepted:
        found = await asyncio.gather(*(world.parts.of(Reloader).reload() for _ in files))
        assert [len(one) for one in found] == [1] * 10
        await world.until(lambda: world.assembly.networks.is_connected(world.assembly.endpoints["cloud"]))
    await world.until(lambda: heard.texts[-1:] == accepted[-1:])
    assert heard.texts == accepted
    assert world.streamer.config == files[-1]


@pytest.mark.parametrize("steps", [0, 1, 3, 10, 30])
async def test_a_stop_during_a_reload_ends_and_loses_nothing(make_world: MakeWorld, steps: int) -> None:
    world = await make_world(TWO, AT_CLOUD)
    heard = await world.hear(await world.node("cloud", "cloud"), uris.parse(DOOR))
    node = await world.node("vehicle", "vehicle1", 0x9001)
    transport = world.assembly.endpoints["cloud"].transport
    assert isinstance(transport, LocalTransport)
    transport.disconnect()
    for number in range(20):
        await node.send(publication(DOOR, str(number)))
    await world.until(lambda: world.assembly.logs.durable.newest_seq == 20)
    world.config = with_endpoint(world.config, "cloud", name="backend", renamed_from="cloud")
    reloading = asyncio.create_task(reload(world, world.config))
    for _ in range(steps):
        await asyncio.sleep(0)
    await world.stop()
    await asyncio.wait({reloading}, timeout=10)
    with contextlib.suppress(UStatusError, asyncio.CancelledError):
        reloading.result()
    await world.start()
    await world.until(lambda: len(heard.texts) == 20)
    assert heard.texts == [str(number) for number in range(20)]


async def test_who_asked_may_leave(make_world: MakeWorld) -> None:
    """The reload goes on."""
    world = await make_world(TWO, AT_CLOUD)
    new = with_endpoint(world.config, "cloud", hold=False)
    asked = asyncio.create_task(reload(world, new))
    await world.until(lambda: world.streamer.config == new)
    asked.cancel()
    await asyncio.wait({asked})
    await world.until(lambda: world.assembly.networks.is_connected(world.assembly.endpoints["cloud"]))
    assert await reload(world, new) == []


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_a_network_that_does_not_answer_keeps_no_rule_from_being_added(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, is_given_up: bool
) -> None:
    """If the caller is cancelled before that, nothing has changed."""
    monkeypatch.setattr(reloading, "OPEN_WAIT_S", 20.0 if is_given_up else 0.1)
    world = await make_world(TWO, AT_CLOUD, '[[rule]]\nfrom = "cloud"\nto = "vehicle"\n')
    asked = asyncio.Event()

    async def hang(*_: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(world.assembly.home.transport, "register_listeners", hang)
    adding = asyncio.create_task(world.change_rule("vehicle", "cloud", {}))
    await asked.wait()
    assert world.streamer.config.rule[1:] == [], "it is not in force yet"
    if is_given_up:
        adding.cancel()
    await asyncio.wait({adding})
    assert (world.assembly.rules.between("vehicle", "cloud") is None) == is_given_up
    assert len(world.streamer.config.rule) == 2 - is_given_up


async def test_a_port_that_was_taken_meanwhile_is_given_up_by_the_next_reload(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What still tries to open the port as it was configured before must not disturb the one that is open now."""
    monkeypatch.setattr("streamer.parts.edge.require_free", lambda _: None)
    monkeypatch.setattr("streamer.parts.admin.require_free", lambda _: None)
    monkeypatch.setattr("streamer.parts.edge.OPEN_WAIT_S", 0.2)
    monkeypatch.setattr(reloading, "OPEN_WAIT_S", 0.2)
    world = await make_world(TWO, AT_CLOUD)
    streamer = world.streamer
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as also:
        admin, listen = (f"127.0.0.1:{one.getsockname()[1]}" for one in (taken, also))
        with_ports = changed(
            world.config, streamer=table(world.config.streamer, {"admin": admin}), http={"listen": listen}
        )
        await reload(world, with_ports)
        await world.until(lambda: len([one for one in streamer.parts.problems() if "can't be opened" in one]) == 2)
    free = changed(
        world.config, streamer=table(world.config.streamer, {"admin": "127.0.0.1:0"}), http={"listen": "127.0.0.1:0"}
    )
    await reload(world, free)
    await world.until(lambda: streamer.admin.port and streamer.parts.of(EdgePart).port)
    assert not [one for one in streamer.parts.problems() if "can't be opened" in one]
    trying = [one.get_name() for one in asyncio.all_tasks() if one.get_name() in ("HTTP edge", "admin port")]
    assert trying.count("admin port") == 0
    assert trying.count("HTTP edge") <= 1  # the part itself


# Bad files


def _missing(file: Path) -> None:
    file.unlink()


def _a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _huge(file: Path) -> None:
    file.write_text("#" * (model.CHARACTERS_MAX + 1))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (_missing, "can't read .*: No such file"),
    "a folder": (_a_folder, "can't read .*: Is a directory"),
    "huge": (_huge, "has more than 16000000 characters"),
    "not text": (lambda file: file.write_bytes(b"\xff\xfe\x00"), "is not UTF-8"),
    "empty": (lambda file: file.write_text(""), "endpoint"),
    "cut off": (lambda file: file.write_text(file.read_text()[:-30]), "toml:"),
    "no TOML": (lambda file: file.write_text("endpoint = ["), "toml:"),
    "deep": (lambda file: file.write_text("a = " + "[" * 100_000), "nested too deeply"),
    "unknown key": (lambda file: file.write_text(file.read_text() + "\n[egress]\nretries = 1\n"), "retries"),
    "no such certificate": (
        lambda file: file.write_text(file.read_text() + '\n[http]\nlisten = "127.0.0.1:0"\ncert_file = "/no/such"\n'),
        "key_file|/no/such",
    ),
    "plugin that is not there": (
        lambda file: file.write_text(file.read_text().replace('"local"', '"nonesuch"', 1)),
        "nonesuch",
    ),
}


@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_file_changes_nothing(make_world: MakeWorld, tmp_path: Path, kind: str) -> None:
    world = await make_world(TWO, AT_CLOUD)
    spoil, why = BAD[kind]
    file = tmp_path / "vehicle.toml"
    file.write_text(endpoints(TWO).format(n="x"))
    spoil(file)
    streamer, config = world.streamer, world.streamer.config
    transports = [one.transport for one in streamer.assembly.endpoints]
    streamer.parts.of(Reloader).read = lambda: usable(file)
    with pytest.raises(UStatusError, match=why):
        await streamer.parts.of(Reloader).reload()
    assert streamer.config is config
    assert [one.transport for one in streamer.assembly.endpoints] == transports
    assert [one for one in streamer.parts.notes() if one.startswith("the last reload changed nothing")]


async def test_a_constructor_or_a_read_that_fails_changes_nothing(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(TWO, AT_CLOUD)
    streamer, config = world.streamer, world.streamer.config

    def broken(*_: object, **__: object) -> None:
        raise ValueError("boom")

    monkeypatch.setattr(LocalTransport, "__init__", broken)
    with pytest.raises(UStatusError, match="boom"):
        await reload(world, with_endpoint(world.config, "cloud", hold=False))
    streamer.parts.of(Reloader).read = broken  # type: ignore[assignment]
    with pytest.raises(UStatusError, match="the check has failed: ValueError") as error:
        await streamer.parts.of(Reloader).reload()
    assert error.value.code == UCode.INTERNAL
    assert streamer.config is config
    assert ("reloads", ("failed",), 2) in list(streamer.parts.samples())


# Leaks


@pytest.mark.parametrize("rounds", [12, pytest.param(60, marks=full)])  # a second each
async def test_reloads_there_and_back_leave_nothing_behind(make_world: MakeWorld, rounds: int) -> None:
    world = await make_world({"vehicle": "", "cloud": "remote"}, AT_CLOUD)
    world.networks["dock"] = world.networks["cloud"]  # of `counts`
    config = world.config
    ones = [one.model_dump(exclude_unset=True) for one in config.endpoint]
    ones[1]["authorities"] = ["cloud", "cloud2"]
    ones[1]["followed_by"] = "//cloud/4/1/0"
    new = changed(
        config,
        endpoint=[*ones, section("diag", usubscription="remote")],
        follow=[{"endpoint": "cloud", "service": "//cloud/4/1/0"}],
        streamer=table(config.streamer, {"admin": "127.0.0.1:0"}),
        http={"listen": "127.0.0.1:0"},
        egress=table(config.egress, {"retry_max_ms": 30}),
    )
    before: dict[str, int] = {}
    for number in range(rounds):
        await reload(world, new)
        await reload(world, config)
        await world.until(lambda: world.assembly.networks.is_connected(world.assembly.endpoints["cloud"]))
        if number in (rounds // 6, rounds - 1):
            await world.until(lambda: not world.parts.of(EdgePart).port and not world.streamer.admin.port)
            await world.until(lambda: not [one for one in asyncio.all_tasks() if one.get_name() == "admin port"])
            for _ in range(LOOKS):  # the tasks that ask a silent uSubscription come and go
                gc.collect()
                found = await settled_counts(world) | {"files": len(os.listdir("/proc/self/fd"))}
                before = before or found
                found["tasks"] = max(found["tasks"], before["tasks"])  # there may have been some more of them then
                if found | {"objects": 0} == before | {"objects": 0}:
                    break
    objects = found.pop("objects") - before.pop("objects")
    assert found == before
    assert objects <= OBJECTS_MAX


# How each key takes effect


def _remote(streamer: Streamer) -> ServiceInterest:
    (one,) = (one for one in streamer.assembly.interest.sources if isinstance(one, ServiceInterest))
    return one


def _of_pumps(streamer: Streamer, value: Callable[[Any], Any]) -> set[Any]:
    return {value(pump) for pump in streamer.assembly.pumps}


RESTART = "a restart"
Effect = tuple[Any, Callable[[Streamer], Any]]
# a value, and whether it is in force
SECTIONS: dict[str, dict[str, Effect | str]] = {
    "streamer": {
        "authority": RESTART,
        "data_dir": RESTART,
        "admin": ("127.0.0.1:0", lambda one: one.admin.port),
        "log_level": ("error", lambda one: one.config.streamer.log_level == "error"),  # see the test
        "log_format": ("json", lambda one: one.config.streamer.log_format == "json"),
    },
    "admin": {
        "cert_file": ("", lambda one: True),
        "key_file": ("", lambda one: True),
        "token_file": ("", lambda one: True),
        "unprotected": ("", lambda one: True),
    },
    "history": {
        "record": (
            [DOOR],
            lambda one: one.assembly.logs.record == tuple(map(uris.parse, [DOOR])) == one.assembly.networks._record,
        ),
        "volatile": RESTART,
        "retention_hours": (
            2,
            lambda one: one.assembly.logs.durable.retention_ms == one.assembly.logs.volatile.retention_ms == 7_200_000,
        ),
        "retention_mib": (77, lambda one: one.assembly.logs.durable.retention_bytes == 77 << 20),
        "reserve_mib": (3, lambda one: one.assembly.runtime.disk.reserve.bytes == 3 << 20),
        "volatile_mib": (9, lambda one: one.assembly.logs.volatile.retention_bytes == 9 << 20),
        "gather_ms": (1, lambda one: one.config.history.gather_ms == 1),  # Log.limit has a test of its own
        "absent_hours": (
            1,
            lambda one: (
                {
                    one.assembly.claims.limit_ms,
                    one.assembly.handovers.absent_ms_max,
                    *(pump.waits.owned._limit_ms for pump in one.assembly.pumps),
                }
                == {3_600_000}
            ),
        ),
        "acknowledge_after_hours": (1, lambda one: one.config.history.acknowledge_after_ms == 3_600_000),
    },
    "usubscription": {
        "static_file": (None, lambda one: not one.assembly.interest.wants(uris.parse(DOOR))),
        "answers_for": RESTART,
        "reset": ("off", lambda one: getattr(one.assembly.usubscription, "may_reset", "") == "off"),
        "refresh_s": (7, lambda one: _remote(one).refresh_ms == 7_000),
    },
    "egress": {
        "retry_min_ms": (7, lambda one: {_backoff._min_ms for _backoff in _backoffs(one)} == {7}),
        "retry_max_ms": (77, lambda one: {_backoff._max_ms for _backoff in _backoffs(one)} == {77}),
        "send_ms_max": (77, lambda one: {endpoint.sends.ms_max for endpoint in one.assembly.endpoints} == {77}),
        "refused_hours": (
            1,
            lambda one: {pump.waits.addresses._limits["refused"] for pump in one.assembly.pumps} == {3_600},
        ),
        "unheard_hours": (
            1,
            lambda one: {pump.waits.addresses._limits["unheard"] for pump in one.assembly.pumps} == {3_600},
        ),
        "messages_per_s": (
            50,
            lambda one: _of_pumps(one, lambda pump: getattr(pump.sender.pace, "per_s", 0)) == {50},
        ),
    },
    "express": {"messages_max": (7, lambda one: one.assembly.express.messages_max == 7)},
    "limits": {
        "memory_mib": RESTART,
        "message_bytes_max": RESTART,
        "authority_messages_per_s": (7, lambda one: one.assembly.ledger.units_per_s == 7),
    },
    "tracing": {
        "otlp": ("http://127.0.0.1:9", lambda one: one.config.tracing.otlp == "http://127.0.0.1:9"),  # test_tracing.py
        **dict.fromkeys(("share", "service_name", "headers_file", "ca_file"), ("", None)),  # they need `otlp`
    },
    "dispatch": {"control": ([DOOR], lambda one: one.parts.of(ControlPart)._allowed == [uris.parse(DOOR)])},
}
# the HTTP edge is made again of its sections; these need files, or another section
EDGE = ("http", "grip", "channel", "proxy")
# keys of sections that may stand several times; the tests here and in test_reloading.py change them
LISTS = {
    "endpoint": {
        "name": RESTART,  # at home; else renamed_from
        "transport": "",
        "authorities": "",
        "renamed_from": "",
        "suffix": "",
        "usubscription": RESTART,  # at home
        "followed_by": "",
        "hold": "",
        "messages_per_s": "",
        "settings": "",
    },
    "rule": dict.fromkeys(("from_", "to", "allow", "deny")),
    "access": dict.fromkeys(("endpoint", "callers", "allow", "deny")),
    "follow": dict.fromkeys(("endpoint", "service", "topics", "mode")),
    "epochs": dict.fromkeys(("name", "topics", "by", "width_ms", "lateness_ms", "ahead_ms", "timeout_ms"), RESTART),
    "recovery": dict.fromkeys(("topics", "source", "timeout_s", "idle_s", "settings")),
}
KEYS = [(section, key) for section, keys in SECTIONS.items() for key in keys]


def _backoffs(streamer: Streamer) -> list[Any]:
    """Those of pumps and express queues."""
    return [
        streamer.assembly._backoff(),
        *(pump._backoff for pump in streamer.assembly.pumps),
        *(pump.aside._backoff for pump in streamer.assembly.pumps),
        *(queue._backoff for queue in streamer.assembly.express.queues.values()),
    ]


def test_each_key_is_in_the_table() -> None:
    for name, field in Config.model_fields.items():
        kind: Any = field.annotation
        if name in EDGE:
            continue
        if name in NAMES:
            (kind,) = kind.__args__
            assert list(kind.model_fields) == list(LISTS[name])
        else:
            assert list(kind.model_fields) == list(SECTIONS[name])


@pytest.mark.parametrize(("name", "key"), KEYS)
async def test_a_key_takes_effect_or_needs_a_restart(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, key: str
) -> None:
    world = await make_world({"vehicle": "", "cloud": "remote"}, AT_CLOUD)
    configured: list[tuple[str, str]] = []
    monkeypatch.setattr("streamer.parts.log_level.logs.configure", lambda *levels: configured.append(levels))
    effect, config = SECTIONS[name][key], world.config
    if key == "authority":
        return  # test_reloading.py
    if isinstance(effect, str):
        value: Any = {"memory_mib": 99, "message_bytes_max": 1 << 17, "volatile": [DOOR], "answers_for": ["x1"]}.get(
            key
        )
        value = value or (tmp_path / "elsewhere" if key == "data_dir" else None)
        shown = await reload(world, changed(config, **{name: table(getattr(config, name), {key: value})}))
        assert shown == [f"! {name}.{key} needs a restart"]
        return
    value, is_in_force = effect
    if value == "":
        return  # needs another key of its section: test_admin.py, test_tracing.py
    assert not is_in_force(world.streamer)
    (line,) = await reload(world, changed(config, **{name: table(getattr(config, name), {key: value})}))
    assert line.startswith(f"~ {name}.{key}: ")
    await world.until(lambda: is_in_force(world.streamer))
    assert bool(configured) == key.startswith("log_")


async def test_losses_are_acknowledged_after_the_time_that_is_configured_now(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world(TWO, AT_CLOUD)
    asked: list[int] = []
    losses = world.assembly.logs.durable.losses
    monkeypatch.setattr(type(losses), "acknowledge_passing", lambda _, after_ms: [asked.append(after_ms)] * 0)
    history = table(world.config.history, {"acknowledge_after_hours": 2})
    await reload(world, changed(world.config, history=history))
    await world.until(lambda: 7_200_000 in asked)


# Where subscriptions come from


async def test_a_static_file_is_read_again_or_replaced(make_world: MakeWorld, tmp_path: Path) -> None:
    world = await make_world(TWO, {})
    interest, topic = world.assembly.interest, uris.parse(DOOR)
    known = world.config.usubscription.static_file
    assert known is not None
    known.write_text(json.dumps(AT_CLOUD))
    assert await reload(world, world.config) == []
    assert interest.wants(topic)
    known.write_text("not JSON")
    with pytest.raises(UStatusError):
        await reload(world, world.config)
    assert interest.wants(topic)
    other = tmp_path / "other.json"
    other.write_text("{}")
    elsewhere = changed(world.config, usubscription={"static_file": other})
    await reload(world, elsewhere)
    assert not interest.wants(topic)
    assert len(interest.sources) == 2
    with pytest.raises(UStatusError):
        await reload(world, world.config)
    known.write_text(json.dumps(AT_CLOUD))
    await reload(world, world.config)
    assert interest.wants(topic)


async def test_a_usubscription_that_moves_is_asked_at_one_endpoint(make_world: MakeWorld) -> None:
    """What it has said serves until it answers there, and over a restart."""
    world = await make_world({"vehicle": "", "mcu": "remote", "cloud": "remote"}, {})
    interest, config = world.assembly.interest, world.config
    (said,) = (one for one in interest.sources if one.name == "cloud")
    subscriber = Subscription(uris.parse(DOOR), uris.parse("//cloud/8001/1/0"), Status.SUBSCRIBED)
    said.changed(said.replace([subscriber]))
    ones = [one.model_dump(exclude_unset=True) for one in config.endpoint]
    ones[1]["authorities"], ones[2]["authorities"] = ["mcu1", "cloud"], ["cloud9"]
    moved = changed(config, endpoint=ones)
    await reload(world, moved)
    (now,) = (one for one in interest.sources if one.name == "cloud")
    assert now is not said
    assert interest.wants(uris.parse(DOOR))
    asking = {name: list(one.asking) for name, one in world.assembly.attached.items() if one.asking}
    assert asking == {"mcu": ["cloud"], "cloud": ["cloud9"]}
    await reload(world, with_endpoint(moved, "mcu", authorities=["mcu1"]))
    assert not interest.wants(uris.parse(DOOR))
    assert not [one for one in interest.sources if one.name == "cloud"]
