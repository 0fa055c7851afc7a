"""Stored dead letters: sent again to the endpoint where they failed, and purged."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from storage import logs
from streamer.commands import cli, letters, terminal
from streamer.letters import dead_letter
from streamer.letters.dead_letter import LetterStore, Stored
from streamer.operating import metrics, resending
from streamer.operating.control import ControlSocket
from tests.streamer.conftest import THREE, World
from transports.base import NOT_TRIED
from uprotocol import uri as uris
from uprotocol import uuid as uuids
from uprotocol.core.ustreamer import ids
from uprotocol.message import UMessageBuilder
from uprotocol.status import OK, UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus

SPEED = uris.parse("//vehicle1/8001/1/8001")
DOOR = uris.parse("//vehicle1/8001/1/8002")
CLOUD_APP = uris.parse("//cloud/9001/1/0")
SUBSCRIBED = {"//vehicle1/8001/1/8001": ["//cloud/9001/1/0", "//mcu1/9001/1/0"]}
DENIED = UCode.PERMISSION_DENIED

MakeWorld = Any
Publish = Callable[..., UMessage]


async def fail(
    world: World,
    messages: Sequence[UMessage],
    code: Any = DENIED,
    endpoint: str = "cloud",
    reason: str = "the broker refuses it",
) -> None:
    """Store these messages as letters."""
    before = len(stored(world))
    for message in messages:
        world.assembly.dead_letters.add(message, code, reason, endpoint)
    await world.until(lambda: world.assembly.dead_letters.stock.letters == before + len(messages))


def stored(world: World) -> list[Stored]:
    with closing(dead_letter.open_read_only(world.config.streamer.data_dir / "dead-letters.db")) as store:
        return store.read()


async def do(world: World, name: str, **arguments: Any) -> dict[str, Any]:
    return await world.streamer.operations.answer(name, arguments)


async def resend(world: World, **arguments: Any) -> Any:
    """Returns the results by number, and the reasons."""
    answer = await do(world, "resend_letters", **(arguments or {"all": True}))
    assert json.loads(json.dumps(answer)) == answer
    return {one["number"]: one["result"] for one in answer["letters"]}, [one["reason"] for one in answer["letters"]]


async def test_a_letter_is_sent_again_as_it_was_to_its_endpoint_alone(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    cloud, mcu = await world.node("cloud", "cloud"), await world.node("mcu", "mcu1")
    heard, elsewhere = await world.hear(cloud, SPEED), await world.hear(mcu, SPEED)
    sent = [publish(SPEED, str(number)) for number in range(5)]
    await fail(world, sent)
    assert "5 dead letters are stored" in " ".join(world.parts.notes())
    results, _ = await resend(world, dry_run=True, all=True)
    assert set(results.values()) == {"ready"}
    results, _ = await resend(world)
    assert results == dict.fromkeys(range(1, 6), "resent")
    assert await heard.expect(5) == sent
    assert (stored(world), elsewhere.messages) == ([], [])
    assert world.assembly.logs.durable.newest_seq == 0, "the log has it already"
    lines = metrics.expose(world.parts.samples).decode()
    assert "up_streamer_dead_letters_resent_total 5.0" in lines
    assert "up_streamer_dead_letters_stored 0.0" in lines
    assert "dead letters are stored" not in " ".join(world.parts.notes())


async def test_a_message_that_a_broker_refused_arrives_once_its_rules_are_mended(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world(subscriptions=SUBSCRIBED, more='[history]\nvolatile = ["//vehicle1/8001/1/FFFF"]\n')
    vehicle, cloud, mcu = [
        await world.node(*one) for one in (("vehicle", "vehicle1"), ("cloud", "cloud"), ("mcu", "mcu1"))
    ]
    heard, elsewhere = await world.hear(cloud, SPEED), await world.hear(mcu, SPEED)
    announced = await world.hear(vehicle, ids.at("vehicle1", ids.DEAD_LETTERS))
    world.networks["cloud"].refuse(uris.format(SPEED))
    await vehicle.send(publish(SPEED, "lost"))
    await vehicle.send(publish(SPEED, "lost, too"))
    await world.until(lambda: len(stored(world)) == 2)
    await announced.expect(2)
    before = stored(world)

    results, reasons = await resend(world, endpoint="cloud", code="PERMISSION_DENIED")
    assert results == {1: "refused", 2: "refused"}
    assert "Not authorized" in reasons[0]
    after = stored(world)
    assert [one.number for one in after] == [1, 2], "a letter that fails again stays the same letter"
    assert all(new.time_ms >= old.time_ms for old, new in zip(before, after, strict=True))
    assert world.assembly.dead_letters.total == 2

    world.networks["cloud"].allow()
    assert (await resend(world, numbers=[2, 7]))[0] == {2: "resent", 7: "unknown"}
    assert (await resend(world))[0] == {1: "resent"}
    await heard.expect(2)
    assert sorted(heard.texts) == ["lost", "lost, too"]
    assert elsewhere.texts == ["lost", "lost, too"], "the others had it, and get it once"
    assert len(announced.messages) == 2


async def test_while_the_peer_is_away_letters_stay(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions=SUBSCRIBED)
    cloud = await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    await fail(world, [publish(SPEED, str(number)) for number in range(3)])
    transport = world.assembly.endpoints["cloud"].transport
    transport.disconnect()
    results, reasons = await resend(world)
    assert results == dict.fromkeys((1, 2, 3), "waiting")
    assert set(reasons) == {"endpoint 'cloud' is not connected"}
    transport.reconnect()
    assert set((await resend(world))[0].values()) == {"resent"}
    await heard.expect(3)


async def test_what_can_not_be_sent_stays_with_its_reason(make_world: MakeWorld, publish: Publish) -> None:
    rules = "".join(
        f'[[rule]]\nfrom = "vehicle"\nto = "{to}"\ndeny = ["{uris.format(DOOR)}"]\n' for to in ("cloud", "mcu")
    )
    world = await make_world(more=rules)
    old = publish(SPEED, "old", ttl=10)
    old.attributes.id.msb = (uuids.now_ms() - 1_000) << 16 | 0x7000
    for one in (old, publish(DOOR, "denied"), publish("//elsewhere/8001/1/8001", "nobody's"), publish(SPEED, "1")):
        await fail(world, [one])
    await fail(world, [publish(SPEED, "of an endpoint that was removed")], endpoint="offboard")
    cut = UMessage(attributes=publish(SPEED, "").attributes)
    await fail(world, [cut], reason=f"away ({dead_letter.CUT}")
    ours = UMessageBuilder.request(CLOUD_APP, uris.parse("//vehicle1/4/1/1"), 60_000).build()
    await fail(world, [UMessageBuilder.notification(SPEED, uris.parse("//mcu1/9001/1/0")).build()])
    await fail(world, [ours])
    await world.assembly.paused.pause(SPEED, "cloud")
    results, reasons = await resend(world)
    assert list(results.values()) == ["expired", "denied", "denied", "waiting", "refused", "cut", "refused", "refused"]
    expected = (
        "ttl of 10 ms",
        "no rule lets up://vehicle1/8001/1/8002 go from endpoint 'vehicle' to 'cloud'",
        "elsewhere",
        "paused",
        "no endpoint 'offboard': say where",
        "without its payload",
        "is not at endpoint 'cloud'",
        "a service of this",
    )
    assert [one in reason for one, reason in zip(expected, reasons, strict=True)] == [True] * 8, reasons
    assert len(stored(world)) == 8


async def test_letters_of_a_removed_endpoint_go_to_another_one_on_demand(
    make_world: MakeWorld, publish: Publish
) -> None:
    world = await make_world()
    cloud = await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    await fail(world, [publish(SPEED, "moved")], endpoint="offboard")
    await fail(world, [publish(SPEED, "mine")], endpoint="mcu")
    results, reasons = await resend(world, to="cloud", all=True)
    assert results == {1: "resent", 2: "refused"}
    assert "endpoint 'mcu' is configured" in reasons[1]
    assert [one.payload for one in await heard.expect(1)] == [b"moved"]
    with pytest.raises(UStatusError, match="unknown endpoint 'sky'; known: vehicle, mcu, cloud"):
        await resend(world, to="sky", all=True)
    assert (await resend(world, to="vehicle", all=True))[0] == {2: "refused"}


async def test_letters_of_a_renamed_endpoint_go_to_its_new_name(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(
        '[[endpoint]]\nname = "vehicle"\ntransport = "local"\nauthorities = ["vehicle1"]\n'
        'settings = {{ network = "{n}-vehicle" }}\n'
        '[[endpoint]]\nname = "backend"\nrenamed_from = "offboard"\ntransport = "local"\nauthorities = ["cloud"]\n'
        'usubscription = "none"\nsettings = {{ network = "{n}-backend" }}\n'
    )
    heard = await world.hear(await world.node("backend", "cloud"), SPEED)
    await fail(world, [publish(SPEED, "x")], endpoint="offboard")
    assert (await resend(world, all=True, to="vehicle"))[0] == {1: "refused"}
    assert (await resend(world))[0] == {1: "resent"}
    await heard.expect(1)


async def test_a_request_that_no_rule_allowed_goes_once_one_does(make_world: MakeWorld) -> None:
    rule = '[[rule]]\nfrom = "cloud"\nto = "vehicle"\ndeny = ["//vehicle1/8001/1/7"]\n'
    world = await make_world(more=rule + '[[rule]]\nfrom = "vehicle"\nto = "cloud"\n')
    vehicle, cloud = await world.node("vehicle", "vehicle1"), await world.node("cloud", "cloud", 0x9001)
    method = uris.parse("//vehicle1/8001/1/7")
    heard = await world.hear(vehicle, CLOUD_APP, method)
    await cloud.send(request := UMessageBuilder.request(CLOUD_APP, method, 60_000).build())
    await world.until(lambda: len(stored(world)) == 1)
    assert (await resend(world))[0] == {1: "denied"}
    await world.change_rule("cloud", "vehicle", {})
    assert (await resend(world))[0] == {1: "resent"}
    assert await heard.expect(1) == [request]


async def test_a_publish_that_was_too_large_goes_to_all_who_want_it_once_the_limit_is_higher(
    make_world: MakeWorld, publish: Publish
) -> None:
    small = await make_world(subscriptions=SUBSCRIBED, more="[limits]\nmessage_bytes_max = 65536\n")
    vehicle = await small.node("vehicle", "vehicle1")
    large = publish(SPEED, "x" * 70_000)
    await vehicle.send(large)
    await small.until(lambda: len(stored(small)) == 1)
    results, reasons = await resend(small)
    assert (results, "limits.message_bytes_max" in reasons[0]) == ({1: "refused"}, True)
    await small.stop()
    small.config = small.config.model_copy(
        update={"limits": small.config.limits.model_copy(update={"message_bytes_max": 1 << 20})}
    )
    await small.start()
    cloud, mcu = await small.node("cloud", "cloud"), await small.node("mcu", "mcu1")
    there = [await small.hear(cloud, SPEED), await small.hear(mcu, SPEED)]
    assert (await resend(small))[0] == {1: "resent"}
    for hearer in there:
        assert await hearer.expect(1) == [large]
    assert stored(small) == []


async def test_a_call_is_bounded_and_says_where_to_go_on(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resending, "BATCH_LETTERS", 4)
    world = await make_world(egress="messages_per_s = 8\n")
    cloud = await world.node("cloud", "cloud")
    heard, batches = await world.hear(cloud, SPEED), []
    transport = world.assembly.endpoints["cloud"].transport
    send_batch = transport.send_batch

    async def counted(messages: Any) -> Any:
        batches.append(len(messages))
        return await send_batch(messages)

    monkeypatch.setattr(transport, "send_batch", counted)
    await fail(world, [publish(SPEED, str(number)) for number in range(10)])
    numbers = [*range(1, 7), 98, 99]
    first = await do(world, "resend_letters", numbers=numbers, limit=2)
    rest = await do(world, "resend_letters", numbers=numbers, after=first["next"], dry_run=True)
    assert (first["counts"], rest["counts"]) == ({"resent": 2}, {"ready": 4, "unknown": 2})
    first = await do(world, "resend_letters", all=True, limit=4)
    assert (first["counts"], first["next"], first["until"]) == ({"resent": 4}, 6, 10)
    assert max(batches) == 2, "a quarter of a second of its pace"
    await fail(world, [publish(SPEED, "later")])
    rest = await do(world, "resend_letters", all=True, after=first["next"], until=first["until"])
    assert (rest["counts"], rest["next"]) == ({"resent": 4}, None)
    await heard.expect(10)
    assert [one.message.payload for one in stored(world)] == [b"later"]


async def test_one_that_fails_does_not_keep_the_others(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world()
    cloud = await world.node("cloud", "cloud")
    heard = await world.hear(cloud, SPEED)
    transport = world.assembly.endpoints["cloud"].transport
    send_batch = transport.send_batch

    async def stops_at_bad_ones(messages: Any) -> Any:
        good = [one for one in messages if one.payload != b"bad"]
        bad = next((index for index, one in enumerate(messages) if one.payload == b"bad"), len(messages))
        await send_batch(good[:bad])
        failed = [
            UStatus(code=UCode.UNAVAILABLE, message="not now"),
            *[UStatus(code=UCode.UNAVAILABLE, message=NOT_TRIED)] * 99,
        ]
        return ([OK] * bad + failed)[: len(messages)]

    monkeypatch.setattr(transport, "send_batch", stops_at_bad_ones)
    await fail(world, [publish(SPEED, text) for text in ("0", "bad", "1", "2", "bad", "3")])
    results, _ = await resend(world)
    assert [number for number, result in results.items() if result == "waiting"] == [2, 5]
    await heard.expect(4)
    assert heard.texts == ["0", "1", "2", "3"]
    await fail(world, [publish(SPEED, "bad") for _ in range(30)])
    results, reasons = await resend(world)
    assert set(results.values()) == {"waiting"}
    assert set(reasons) == {"not now", "endpoint 'cloud' takes nothing now"}


async def test_two_calls_at_once_send_nothing_twice(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world()
    heard = await world.hear(await world.node("cloud", "cloud"), SPEED)
    await fail(world, [publish(SPEED, str(number)) for number in range(20)])
    answers: list[Any] = await asyncio.gather(resend(world), resend(world), return_exceptions=True)
    (results, _), second = answers
    assert len(results) == 20
    assert isinstance(second, UStatusError)
    assert "already" in second.message
    await heard.expect(20)
    assert len(heard.messages) == 20


async def test_a_kill_between_the_network_and_the_store_loses_nothing(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the disk has at the moment of a kill is what a copy of the folder has."""
    monkeypatch.setattr(resending, "BATCH_LETTERS", 5)
    world = await make_world()
    heard = await world.hear(await world.node("cloud", "cloud"), SPEED)
    await fail(world, sent := [publish(SPEED, str(number)) for number in range(20)])
    settle, settled = LetterStore.settle, 0

    def killed(self: LetterStore, *arguments: Any) -> int:
        nonlocal settled
        settled += 1
        if settled == 2:  # 10 letters have arrived, and the store knows of 5
            shutil.copytree(world.config.streamer.data_dir, tmp_path / "killed")
        return settle(self, *arguments)

    monkeypatch.setattr(LetterStore, "settle", killed)
    await resend(world)
    await heard.expect(20)
    await world.stop()
    before = list(heard.messages[:10])  # the rest is of another life

    section = world.config.streamer.model_copy(update={"data_dir": tmp_path / "killed"})
    world.config = world.config.model_copy(update={"streamer": section})
    heard.messages.clear()
    await world.start()
    assert len(stored(world)) == 15
    assert set((await resend(world))[0].values()) == {"resent"}
    await heard.expect(15)
    both = [uuids.format(one.attributes.id) for one in (*before, *heard.messages)]
    assert len(both) == 25, "twice: only those that were in flight"
    assert list(dict.fromkeys(both)) == [uuids.format(one.attributes.id) for one in sent]
    assert stored(world) == []


async def test_a_store_that_can_not_be_changed_keeps_its_letters(
    make_world: MakeWorld, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world()
    await world.hear(await world.node("cloud", "cloud"), SPEED)
    await fail(world, [publish(SPEED, "x")])
    with monkeypatch.context() as patch:

        def broken(*_: Any) -> int:
            raise sqlite3.OperationalError("disk I/O error")

        patch.setattr(LetterStore, "settle", broken)
        with pytest.raises(UStatusError, match="disk I/O error"):
            await resend(world)
    assert len(stored(world)) == 1
    assert (await resend(world))[0] == {1: "resent"}


async def test_a_question_that_fails_fails_alone(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world({"vehicle": ""})
    letters = world.assembly.dead_letters

    def wrong(_: LetterStore) -> None:
        raise ValueError("not foreseen")

    asked = [asyncio.ensure_future(letters.ask(one)) for one in (wrong, lambda store: store.stock().letters)]
    letters.add(publish(SPEED, "x"), DENIED, "the broker refuses it", "cloud")
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(one) for one in answers] == [ValueError, int]
    await world.until(lambda: len(stored(world)) == 1)


# -- list and purge


async def test_letters_are_listed_by_pages_and_purged_by_what_they_are(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(THREE)
    await fail(world, [publish(SPEED, str(number)) for number in range(4)])
    await fail(world, [publish(SPEED, "x")], UCode.DEADLINE_EXCEEDED, "mcu")
    page = await do(world, "dead_letters", limit=2)
    assert ([one["number"] for one in page["dead_letters"]], page["next"], page["stored"]) == ([5, 4], 4, 5)
    page = await do(world, "dead_letters", limit=3, before=page["next"])
    assert ([one["number"] for one in page["dead_letters"]], page["next"]) == ([3, 2, 1], None)
    (one,) = (await do(world, "dead_letters", endpoint="mcu"))["dead_letters"]
    assert (one["code"], one["source"]) == ("DEADLINE_EXCEEDED", "up://vehicle1/8001/1/8001")
    assert await do(world, "purge_letters", all=True, dry_run=True) == {"purged": 0, "would_purge": 5}
    assert await do(world, "purge_letters", code="deadline_exceeded") == {"purged": 1}
    assert await do(world, "purge_letters", numbers=[2, 99]) == {"purged": 1}
    assert await do(world, "purge_letters", before_ms=1) == {"purged": 0}
    assert [one.number for one in stored(world)] == [1, 3, 4]
    assert "up_streamer_dead_letters_purged_total 2.0" in metrics.expose(world.parts.samples).decode()
    await fail(world, [publish(SPEED, "next")])
    assert [one.number for one in stored(world)] == [1, 3, 4, 6], "no number is used twice"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({}, "--all"),
        ({"all": True, "code": "ABORTED"}, "--all"),
        ({"code": "LOST"}, "code: expected one of ABORTED, "),
        ({"numbers": []}, "numbers: expected a list of 1 to 1000 whole numbers"),
        ({"numbers": ["1"]}, "numbers: expected a whole number, got '1'"),
        ({"numbers": list(range(1_001))}, "numbers: expected a list of 1 to 1000"),
        ({"endpoint": 3}, "endpoint: expected a text"),
        ({"endpoint": "\ud800"}, "endpoint: expected the name of an endpoint"),
        ({"since_ms": "yesterday"}, "since_ms: expected a whole number"),
    ],
)
@pytest.mark.parametrize("name", ["resend_letters", "purge_letters"])
async def test_arguments_that_say_nothing_clear_change_nothing(
    make_world: MakeWorld, publish: Publish, name: str, arguments: dict[str, Any], what: str
) -> None:
    world = await make_world({"vehicle": ""})
    await fail(world, [publish(SPEED, "x")])
    with pytest.raises(UStatusError, match=what) as error:
        await do(world, name, **arguments)
    assert error.value.code == UCode.INVALID_ARGUMENT
    assert len(stored(world)) == 1


def test_a_full_store_counts_right_after_letters_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: Publish
) -> None:
    monkeypatch.setattr(dead_letter, "STORED_MAX", 5)
    with closing(LetterStore(tmp_path / "letters.db")) as store:
        rows = [(number, 14, "away", "cloud", publish(SPEED, str(number)).SerializeToString()) for number in range(9)]
        store.write(rows[:5])
        assert store.settle([1, 3], [(2, 7, "no")], 99) == 2
        assert store.stock() == (3, 5, 99)
        store.write(rows[5:])
        assert [one.number for one in store.read()] == [5, 6, 7, 8, 9]
        assert store.stock().letters == 5


# -- the log of the process


async def test_the_log_has_a_line_for_each_kind_of_dead_letter(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world({"vehicle": ""})
    with capture_logs() as lines:
        await fail(world, [publish(SPEED, str(number)) for number in range(50)])
        await fail(world, [publish(DOOR, "x")], UCode.DEADLINE_EXCEEDED)
    lines = [line for line in lines if line["event"] == "a message became a dead letter"]
    assert [(one["code"], one["endpoint"], one["type"], one["source"]) for one in lines] == [
        ("PERMISSION_DENIED", "cloud", "publish", "up://vehicle1/8001/1/8001"),
        ("DEADLINE_EXCEEDED", "cloud", "publish", "up://vehicle1/8001/1/8002"),
    ]
    assert {one["log_level"] for one in lines} == {"warning"}


# -- the command line


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`await command(world, "resend", ...)` -> exit code, lines."""
    monkeypatch.setattr(logs, "configure", lambda *_: None)

    async def run(world: World, *arguments: str) -> tuple[int, list[str]]:
        at = "--data-dir", str(world.config.streamer.data_dir)
        runner = CliRunner(env={"COLUMNS": "250", "TERM": "dumb"})
        with capture_logs():  # tests log to standard output
            result = await asyncio.to_thread(runner.invoke, cli.app, ["dead-letters", *arguments, *at])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return result.exit_code, result.output.splitlines()

    return run


async def test_the_commands_work_while_it_runs_and_while_it_is_stopped(
    make_world: MakeWorld, publish: Publish, command: Any
) -> None:
    world = await make_world()
    heard = await world.hear(await world.node("cloud", "cloud"), SPEED)
    await fail(world, [publish(SPEED, str(number)) for number in range(6)])
    await fail(world, [publish(SPEED, "x")], endpoint="offboard")
    async with ControlSocket(world.config.streamer.data_dir, world.streamer.operations):
        assert (await command(world, "resend", "1", "2", "--dry-run"))[1] == ["2 ready"]
        assert await command(world, "resend", "1", "--since", "1h") == (0, ["1 resent"])
        code, lines = await command(world, "resend", "--all")
        assert (code, lines[-1]) == (1, "5 resent, 1 refused")
        assert lines[0].startswith("refused: 1 letters: there is no endpoint 'offboard'")
        code, lines = await command(world, "resend", "--all", "--to", "cloud", "--json")
        assert [json.loads(line) for line in lines] == [
            {"number": 7, "result": "resent", "reason": ""},
            {"counts": {"resent": 1}},
        ]
        await heard.expect(7)
        await fail(world, [publish(SPEED, str(number)) for number in range(6)])
        assert await command(world, "purge", "8") == (0, ["1 letters removed"])
        assert await command(world, "purge", "--before", "1h") == (0, ["0 letters removed"])
        assert json.loads((await command(world, "--json"))[1][-1])["number"] == 13
        _, lines = await command(world, "show", "9")
        assert {"code: PERMISSION_DENIED", "payload: 1", "type: publish"} <= set(lines)
        assert (await command(world, "show", "8"))[0] == 1
        for wrong in (["resend"], ["purge", "--code", "NOPE"], ["purge", "9", "--all"]):
            assert (await command(world, *wrong))[0] == terminal.EXIT_USAGE, wrong
    code, lines = await command(world, "purge", "--all")
    assert (code, "in use by process" in lines[-1]) == (1, True), "it runs, and has no socket"
    await world.stop()
    assert (await command(world, "purge", "--all", "--dry-run"))[1] == ["5 letters would be removed"]
    assert (await command(world, "purge", "9", "10"))[1] == ["2 letters removed"]
    assert [one.number for one in stored(world)] == [11, 12, 13]
    code, lines = await command(world, "resend", "--all")
    assert (code, "start it, then ask again" in lines[-1]) == (1, True)


def test_times_are_moments_or_durations() -> None:
    assert letters.moment_ms("--since", None) is None
    assert letters.moment_ms("--since", "2026-11-27T12:00:00Z") == 1_795_780_800_000
    assert letters.moment_ms("--since", "2026-11-27T12:00:00") == 1_795_780_800_000
    now = uuids.now_ms()
    assert 0 <= (letters.moment_ms("--since", "2h") or 0) - (now - 7_200_000) < 10_000
    for wrong in ("2 h", "-2h", "soon", "", "2w"):
        with pytest.raises(UStatusError, match="expected a time as"):
            letters.moment_ms("--since", wrong)
