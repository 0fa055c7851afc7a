"""The operations that read: who has subscribed to what, and the last messages of a topic."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from history.log.log import Log
from streamer.operating import reading
from streamer.operating.control import ControlSocket, call
from streamer.operating.reading import reading_operations
from streamer.operation import Operations
from uprotocol import uri as uris
from uprotocol.core.ustreamer.v1.ustreamer_pb2 import Sample
from uprotocol.core.usubscription.wire import Status, Subscription
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.uattributes_pb2 import UPayloadFormat
from uprotocol.v1.umessage_pb2 import UMessage
from usubscription_client.interest import Interest, InterestSource

MakeWorld = Any
Publish = Callable[..., UMessage]
SPEED, DOOR = "up://vehicle1/8001/1/8001", "up://vehicle1/8001/1/8002"
APP, PHONE = "up://cloud/9001/1/0", "up://mcu1/9001/1/0"


def interest_of(*names: str) -> Interest:
    return Interest([InterestSource(name) for name in names])


def put(source: InterestSource, topic: str, subscriber: str, period_ms: int | None = None) -> None:
    source.put(Subscription(uris.parse(topic), uris.parse(subscriber), Status.SUBSCRIBED, None, period_ms))


async def everything(operations: Operations, **given: Any) -> list[tuple[str, str]]:
    """All pages."""
    rows: list[tuple[str, str]] = []
    while True:
        answer = await operations.answer("subscriptions", given)
        assert len(answer["subscriptions"]) <= given.get("limit", reading.ROWS)
        rows += [(row["topic"], row["subscriber"]) for row in answer["subscriptions"]]
        if answer["next"] is None:
            return rows
        given["after"] = answer["next"]


# Subscriptions


async def test_a_running_gateway_says_who_has_subscribed_to_what(make_world: MakeWorld) -> None:
    world = await make_world(subscriptions={SPEED[3:]: [APP[3:], PHONE[3:]], DOOR[3:]: [APP[3:]]})
    async with ControlSocket(world.config.streamer.data_dir, world.streamer.operations):
        answer = await asyncio.to_thread(call, world.config.streamer.data_dir, "subscriptions", {"topic": "8002"})
    assert [(row["topic"], row["subscriber"]) for row in answer["subscriptions"]] == [(DOOR, APP)]
    assert answer["total"] >= 3
    assert all(set(one) == {"name", "healthy", "subscriptions"} for one in answer["services"])
    assert sorted(set(await everything(world.streamer.operations))) == [(SPEED, APP), (SPEED, PHONE), (DOOR, APP)]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
async def test_pages_have_each_subscription_once(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "EXAMINED_AT_ONCE", 2)
    interest = interest_of("one", "empty", "two")
    expected = []
    for number, source in enumerate(interest.sources):
        for topic in range(0 if source.name == "empty" else 5):
            for subscriber in range(1 + topic):
                expected.append((f"up://v{number}/8001/1/{0x8000 + topic:X}", f"up://cloud/{subscriber + 1:X}/1/0"))
                put(source, *expected[-1])
    operations = Operations(reading_operations(interest, ()))
    assert await everything(operations, limit=limit) == expected
    wanted = [row for row in expected if row[1] == "up://cloud/2/1/0"]
    assert await everything(operations, limit=limit, subscriber="//*/2/1/0") == wanted
    wanted = [row for row in expected if row[0].endswith("8003")]
    assert await everything(operations, limit=limit, topic="/8001/1/8003") == wanted
    assert await everything(operations, limit=limit, topic="V2/8001/1/8003") == wanted[4:]


async def test_an_answer_examines_a_bounded_number_and_says_where_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "EXAMINED_AT_ONCE", 10)
    monkeypatch.setattr(reading, "EXAMINED_MAX", 50)
    interest = interest_of("one")
    for number in range(200):
        put(interest.sources[0], SPEED, f"up://cloud/{number + 1:X}/1/0", 100)
    operations = Operations(reading_operations(interest, ()))
    answer = await operations.answer("subscriptions", {"subscriber": "cloud/C8/"})
    assert (answer["subscriptions"], answer["next"], answer["total"]) == ([], "0.0.50", 200)
    assert await everything(operations, subscriber="cloud/C8/") == [(SPEED, "up://cloud/C8/1/0")]


async def test_what_changes_between_pages_ends_no_answer() -> None:
    interest = interest_of("one", "two")
    for number in range(20):
        put(interest.sources[0], f"up://v/8001/1/{0x8000 + number:X}", APP)
    operations = Operations(reading_operations(interest, ()))
    answer = await operations.answer("subscriptions", {"limit": 15})
    interest.sources[0].replace([])
    assert (await operations.answer("subscriptions", {"after": answer["next"]}))["subscriptions"] == []
    await interest.remove_source(interest.sources[0])
    assert (await operations.answer("subscriptions", {"after": "1.0.0"}))["next"] is None


@pytest.mark.parametrize("after", ["", "1", "1.2", "a.b.c", "1.2.3.4", "-1.0.0", "1.0.9999999999", "٣.0.0", "1..0.0"])
async def test_a_place_that_nobody_gave_out_is_refused(after: str) -> None:
    operations = Operations(reading_operations(interest_of(), ()))
    with pytest.raises(UStatusError, match="after: expected"):
        await operations.answer("subscriptions", {"after": after})


# Messages


def message(topic: str, payload: bytes, format: UPayloadFormat.ValueType) -> UMessage:
    return UMessageBuilder.publish(uris.parse(topic)).build_from_upayload(UPayload(payload, format))


async def append(log: Log, *messages: UMessage, sink: str | None = None) -> None:
    to = None if sink is None else uris.parse(sink)
    await log.append([log.stream_id(one.attributes.source, to) for one in messages], messages)


async def test_the_last_messages_come_newest_first_from_memory_and_disk(tmp_path: Any) -> None:
    text = UPayloadFormat.UPAYLOAD_FORMAT_TEXT
    async with (
        await Log.open(tmp_path / "history.db", name="durable", tail_bytes=20_000) as durable,
        await Log.open(None, name="volatile") as volatile,
    ):
        for number in range(60):
            sink = None if number % 3 else f"//cloud{number % 2}/FFFFFFFF/FF/FFFF"
            await append(durable, message(SPEED, str(number).encode() + b" " * 400, text), sink=sink)
            await append(durable, message(DOOR, b"other", text))
        assert durable.in_memory_after > 40, "some are on the disk only"
        operations = Operations(reading_operations(interest_of(), (durable, volatile)))
        for limit in (1, 7, 60, 100):
            answer = await operations.answer("messages", {"topic": SPEED, "limit": limit})
            found = [int(row["payload"]) for row in answer["messages"]]
            assert found == list(range(60))[-limit:][::-1]
        assert answer["topic"] == SPEED
        seqs = [row["seq"] for row in answer["messages"]]
        assert seqs == sorted(seqs, reverse=True)
        assert {row["log"] for row in answer["messages"]} == {durable.name}
        assert all(row["stored_ms"] > 1_700_000_000_000 and row["type"] == "publish" for row in answer["messages"])
        await append(volatile, message(SPEED, b"60", text))
        answer = await operations.answer("messages", {"topic": SPEED, "limit": 100})
        assert len(answer["messages"]) == 61
        assert (await operations.answer("messages", {"topic": "//nobody/8001/1/8001"}))["messages"] == []


async def test_retention_ends_the_list(tmp_path: Any) -> None:
    async with await Log.open(None, name="volatile", retention_bytes=60_000) as log:
        for number in range(200):
            await append(log, message(SPEED, f"{number} {'x' * 500}".encode(), UPayloadFormat.UPAYLOAD_FORMAT_TEXT))
        operations = Operations(reading_operations(interest_of(), (log,)))
        answer = await operations.answer("messages", {"topic": SPEED, "limit": 100})
        seqs = [row["seq"] for row in answer["messages"]]
        assert log.floor_seq > 0
        assert seqs == list(range(200, log.floor_seq, -1))


@pytest.mark.parametrize(
    ("payload", "format", "kind", "shown"),
    [
        (b"hello", "TEXT", "text", "hello"),
        (b"\xff\xfehello", "TEXT", "text", "\ufffd\ufffdhello"),
        (b"x" * 5_000, "TEXT", "text", "x" * 4_096),
        (b'{"a": NaN, "b": 18446744073709551615}', "JSON", "json", '{"a": NaN, "b": 18446744073709551615}'),
        (b"[" * 4_000, "JSON", "json", "[" * 4_000),
        (b"\x00\x01", "RAW", "hex", "0001"),
        (b"\xaa" * 5_000, "RAW", "hex", "aa" * 4_096),
        (Sample(path="Vehicle.Speed", double_value=1.5).SerializeToString(), "PROTOBUF", "decoded", "Vehicle.Speed"),
        (b"\xff\xff", "PROTOBUF", "hex", "ffff"),
    ],
)
async def test_payloads_are_shown_as_what_they_are_and_cut(payload: bytes, format: str, kind: str, shown: str) -> None:
    async with await Log.open(None, name="volatile") as log:
        await append(log, message(SPEED, payload, UPayloadFormat.Value(f"UPAYLOAD_FORMAT_{format}")))
        answer = await Operations(reading_operations(interest_of(), (log,))).answer("messages", {"topic": SPEED})
    (row,) = json.loads(json.dumps(answer, allow_nan=False))["messages"]
    assert (row["payload_as"], row["payload_bytes"], row["payload_format"]) == (kind, len(payload), format)
    assert (row["payload"]["path"] if kind == "decoded" else row["payload"]) == shown


async def test_a_message_without_payload_has_none() -> None:
    async with await Log.open(None, name="volatile") as log:
        await append(log, UMessageBuilder.publish(uris.parse(SPEED)).build())
        answer = await Operations(reading_operations(interest_of(), (log,))).answer("messages", {"topic": SPEED})
    assert "payload" not in answer["messages"][0]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "topic: expected a text"),
        ({"topic": "nonsense"}, "nonsense"),
        ({"topic": "/8001/1/8001"}, "with its authority"),
        ({"topic": "//vehicle1/8001/1/FFFF"}, "no wildcard"),
        ({"topic": "//*/8001/1/8001"}, "no wildcard"),
        ({"topic": SPEED, "limit": 0}, "limit: expected 1 to 100, got 0"),
        ({"topic": SPEED, "limit": 101}, "limit: expected 1 to 100, got 101"),
    ],
)
async def test_what_is_no_topic_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UStatusError, match=why):
        await Operations(reading_operations(interest_of(), ())).answer("messages", given)


async def test_a_damaged_record_ends_the_list_and_nothing_else() -> None:
    async def read(*_: Any, **__: Any) -> list[Any]:
        return []

    stream = SimpleNamespace(newest_seq=7, id=1)
    log = SimpleNamespace(name="durable", read=read, publishes_from=lambda _: [stream])
    operations = Operations(reading_operations(interest_of(), (log,)))  # type: ignore[arg-type]
    assert (await operations.answer("messages", {"topic": SPEED}))["messages"] == []


async def test_a_running_gateway_shows_what_its_log_has(make_world: MakeWorld, publish: Publish) -> None:
    world = await make_world(subscriptions={SPEED[3:]: [APP[3:]]})
    vehicle = await world.node("vehicle", "vehicle1")
    for number in range(5):
        await vehicle.send(publish(SPEED, f"message {number}"))
    await world.until(lambda: world.assembly.logs.durable.newest_seq >= 5)
    answer = await world.streamer.operations.answer("messages", {"topic": SPEED, "limit": 3})
    assert [row["payload"] for row in answer["messages"]] == ["message 4", "message 3", "message 2"]
