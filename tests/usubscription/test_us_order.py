"""Commands take effect in the order of arrival, for all methods and versions; a redelivered one undoes nothing."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from transports.listeners import ListenerTable
from uprotocol import uri as uris
from uprotocol.attributes import REQUEST, RESPONSE
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from usubscription.state import Key, Subscribe, Unsubscribe
from usubscription.store import tables
from usubscription.store.database import Commanded, Database, Outcome, Reset

TOPIC = uris.parse("//dev1/20/1/8001")
SUBSCRIBE, UNSUBSCRIBE = 1, 2
COMMANDS = list(itertools.product((3, 4), (SUBSCRIBE, UNSUBSCRIBE)))


def command(major: int, method: int, source: Any, authority: str = "dev1") -> UMessage:
    made: Any
    if major == 4:
        made = v4.SubscribeRequest(topic=TOPIC) if method == SUBSCRIBE else v4.UnsubscribeRequest(topic=TOPIC)
    else:
        made = v3.SubscriptionRequest(topic=TOPIC) if method == SUBSCRIBE else v3.UnsubscribeRequest(topic=TOPIC)
    return UMessageBuilder.request(source, uris.uri(authority, 0, major, method), 20_000).pack(made)


class Answers:
    """Returns the code of the response to each request."""

    def __init__(self) -> None:
        self.codes: dict[tuple[int, int], list[int]] = {}
        self._news = asyncio.Event()

    def on_receive(self, message: UMessage) -> None:
        if message.attributes.type == RESPONSE:
            reqid = message.attributes.reqid
            self.codes.setdefault((reqid.msb, reqid.lsb), []).append(message.attributes.commstatus)
            self._news.set()

    async def to(self, request: UMessage, number: int = 1) -> int:
        id = request.attributes.id
        async with asyncio.timeout(20):
            while len(self.codes.get((id.msb, id.lsb), [])) < number:
                self._news.clear()
                await self._news.wait()
        return self.codes[id.msb, id.lsb][number - 1]


@pytest.fixture
async def answers(world: Any) -> Answers:
    return Answers()


async def sender(world: Any, answers: Answers) -> tuple[Any, Any]:
    source = uris.uri("dev1", 0x10, 1, 0)
    transport = await world.transport("dev1", 0x10)
    await transport.register_listener(uris.ANY, answers, source)
    return transport, source


@pytest.mark.parametrize(
    "majors", list(itertools.product((3, 4), repeat=3)), ids=lambda majors: "".join(map(str, majors))
)
async def test_commands_count_in_the_order_of_arrival_whatever_their_method_and_version(
    world: Any, answers: Answers, majors: tuple[int, ...]
) -> None:
    service = await world.service()
    transport, source = await sender(world, answers)
    for methods in ((SUBSCRIBE, UNSUBSCRIBE, SUBSCRIBE), (UNSUBSCRIBE, SUBSCRIBE, UNSUBSCRIBE)):
        requests = [command(major, method, source) for major, method in zip(majors, methods, strict=True)]
        await transport.send_batch(requests)
        for request in requests:
            assert await answers.to(request) == UCode.OK
        assert len(await service.subscriptions()) == (methods[-1] == SUBSCRIBE)


@pytest.mark.parametrize("per_filter", [False, True])
def test_one_listener_of_several_filters_gets_what_arrived_in_order(per_filter: bool) -> None:
    """Also in a network that delivers once for each filter, and encoded messages."""
    table, got = ListenerTable("dev1"), list[UMessage]()

    class One:
        def on_receive_batch(self, messages: Any) -> None:
            got.extend(messages)

    one: Any = One()
    source = uris.uri("app", 0x10, 1, 0)
    filters = {at: table.add(uris.pattern(resource=0), uris.uri("dev1", 0, *at), one) for at in COMMANDS}
    sent = [(at, command(*at, source)) for at in COMMANDS * 5]
    if per_filter:
        table.deliver_encoded((filters[at], one.payload, one.attributes.SerializeToString()) for at, one in sent)
    else:
        table.deliver([message for _, message in sent])
    assert [message.attributes.id for message in got] == [message.attributes.id for _, message in sent]
    assert all(message.attributes.type == REQUEST for message in got)


async def test_a_request_that_comes_again_does_not_undo_a_later_one(world: Any, answers: Answers) -> None:
    """Also after a restart."""
    service = await world.service()
    transport, source = await sender(world, answers)
    first, second = command(4, SUBSCRIBE, source), command(3, UNSUBSCRIBE, source)
    await transport.send_batch([first, second])
    assert await answers.to(second) == UCode.OK
    await transport.send(first)
    assert await answers.to(first, 2) == UCode.ABORTED
    assert await service.subscriptions() == []
    await transport.send(second)  # the last command is answered again, since its answer may be lost
    assert await answers.to(second, 2) == UCode.OK
    await world.stop()
    service = await world.service()
    await transport.send(first)
    assert await answers.to(first, 3) == UCode.ABORTED
    assert await service.subscriptions() == []
    later = command(4, SUBSCRIBE, source)
    await transport.send(later)
    assert await answers.to(later) == UCode.OK
    assert len(await service.subscriptions()) == 1


T: Key = ("own", 1, 1, 0x8000)
APP: Key = ("own", 0x10, 1, 0)
OTHER: Key = ("own", 0x11, 1, 0)


def apply(db: Database, *events: Any) -> list[int]:
    """Returns the codes."""
    return [0 if isinstance(one, Outcome) else one.code for one in db.apply(events, 0)]


def test_ids_are_compared_for_equality_since_clocks_go_back(tmp_path: Path) -> None:
    db = Database(tmp_path / "s.db", "own")
    db.open()
    newer, older = b"\x09" * 16, b"\x01" * 16
    assert apply(db, Commanded(Unsubscribe(T, APP, 4), newer), Commanded(Subscribe(T, APP, 4), older)) == [0, 0]
    assert db.reader().count() == 1
    assert apply(db, Commanded(Subscribe(T, OTHER, 4), b"\x02" * 16), Commanded(Unsubscribe(T, APP, 4), newer)) == [
        0,
        UCode.ABORTED,
    ]
    assert db.reader().count() == 2
    db.close()


def test_what_came_before_a_reset_changes_nothing_after_it(tmp_path: Path) -> None:
    db = Database(tmp_path / "s.db", "own")
    db.open()
    once = Commanded(Subscribe(T, APP, 4), b"\x01" * 16)
    assert apply(db, once, Reset(), once) == [0, 0, UCode.ABORTED]
    assert db.reader().count() == 0
    db.close()


def test_a_command_that_was_not_stored_may_come_again(tmp_path: Path) -> None:
    db = Database(tmp_path / "s.db", "own", subscriptions_max=1)
    db.open()
    first, second = Commanded(Subscribe(T, APP, 4), b"\x01" * 16), Commanded(Subscribe(T, OTHER, 4), b"\x02" * 16)
    assert apply(db, first, second) == [0, UCode.RESOURCE_EXHAUSTED]
    with pytest.raises(AttributeError):
        db.apply([Commanded(Unsubscribe(T, APP, 4), b"\x03" * 16), Commanded(None, b"\x04" * 16)], 0)  # type: ignore[arg-type]
    assert apply(db, Commanded(Unsubscribe(T, APP, 4), b"\x03" * 16), second, first) == [0, 0, UCode.ABORTED]
    db.close()


def test_what_is_remembered_of_commands_is_bounded_on_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "HANDLED_MAX", 100)
    db = Database(tmp_path / "s.db", "own")
    db.open()
    for start in range(0, 3_000, 50):
        db.apply(
            [Commanded(Subscribe(T, APP, 4), number.to_bytes(16, "big")) for number in range(start, start + 50)], 0
        )
    assert db._handled is not None
    assert len(db._handled._hashes) == 100
    assert len(db._handled._last) == 1
    assert db._file.connect().execute("SELECT count(*) FROM handled").fetchone()[0] < 100 + 1_100
    db.close()


async def restored(client: Any) -> None:
    async with asyncio.timeout(20):
        while len(client.restoring):  # noqa: ASYNC110 - a counter, which has no event
            await asyncio.sleep(0.01)


async def test_the_clients_last_word_counts_over_a_reconnect_too(world: Any) -> None:
    """A restored command never replaces a later command of the caller."""
    service = await world.service()
    client = await world.client()
    transport = client.transport
    await client.subscribe(TOPIC, sample_period_ms=100)
    said = [asyncio.ensure_future(client.subscribe(TOPIC, sample_period_ms=period)) for period in (200, 300)]
    await asyncio.sleep(0)
    transport.disconnect()
    transport.reconnect()
    await asyncio.gather(*said)
    await client.fetch_subscribers(TOPIC)
    (row,) = await service.subscriptions()
    assert row.sample_period_ms == 300
    unsubscribing = asyncio.ensure_future(client.unsubscribe(TOPIC))
    await asyncio.sleep(0)
    transport.disconnect()
    transport.reconnect()
    try:
        await unsubscribing
    except UStatusError:  # the connection was lost meanwhile
        await client.unsubscribe(TOPIC)
    await restored(client)
    assert await service.subscriptions() == []


@pytest.mark.parametrize("version", [3, 4])
async def test_a_restore_that_meets_a_shortage_is_tried_again(world: Any, version: int) -> None:
    service = await world.service(reset="all")
    client = await world.client(version=version, call_ms=2_000)
    await client.subscribe(TOPIC)
    await client.register_for_notifications(TOPIC if version == 3 else None)
    raw = await world.raw(ue_id=0, version=9)
    await raw.call(4, 6)
    assert await service.subscriptions() == []
    writer, full = service.store.writer, [True]

    def refuse() -> Any:
        if full:
            raise UStatusError(UCode.RESOURCE_EXHAUSTED, "full")
        return writer()

    service.store.writer = refuse
    client.transport.disconnect()
    client.transport.reconnect()
    async with asyncio.timeout(20):
        while service.requests[f"subscribe_v{version}"] < 2:  # noqa: ASYNC110 - a counter, which has no event
            await asyncio.sleep(0.01)
    full.clear()
    await restored(client)
    assert len(await service.subscriptions()) == 1
    assert len(await service.store.read(lambda reader: reader.registrations())) == 1


def test_an_answer_that_says_nothing_is_no_refusal() -> None:
    from uprotocol.core.usubscription.wire import CODECS

    for version, payload in (
        (4, v4.SubscribeResponse()),
        (3, v3.SubscriptionResponse()),
        (4, v4.SubscribeResponse(status=9)),
    ):  # type: ignore[arg-type]
        with pytest.raises(UStatusError) as error:
            CODECS[version].read_status(UPayload.pack(payload))
        assert error.value.code == UCode.INTERNAL
