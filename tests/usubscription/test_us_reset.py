"""Who may Reset, and what it ends: what the sender shares with the service, and nothing of others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from uprotocol import uri as uris
from uprotocol.communication import CallOptions
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UPayload
from uprotocol.status import UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.state import Command, Key, Status, Subscribe
from usubscription.store.database import Commanded, Database, Register, Reset

TOPIC = uris.parse("//dev1/20/1/8001")
OTHER = uris.parse("//dev1/20/1/8002")
FAR = uris.parse("//dev2/20/1/8001")
THIRD = uris.parse("//dev3/20/1/8001")


async def subscribe(raw: Any, topic: Any, *, at: str | None = None) -> None:
    await raw.call(4, 1, v4.SubscribeRequest(topic=topic), authority=at)


async def reset(raw: Any, *, major: int = 4, at: str = "dev1") -> UCode.ValueType:
    sink = uris.uri(at, 0, major, 9 if major == 3 else 6)
    try:
        await raw.rpc.invoke_method(sink, None, CallOptions(timeout_ms=20_000))
    except UStatusError as error:
        return error.code
    return UCode.OK


async def pairs(service: Any) -> list[tuple[str, str]]:
    return [(row.topic[0], row.subscriber[0]) for row in await service.subscriptions()]


@pytest.mark.parametrize("major", [3, 4])
async def test_a_reset_ends_what_its_sender_shares_and_nothing_of_others(world: Any, major: int) -> None:
    service = await world.service()
    app = await world.raw()
    peer, third = await world.raw("dev2", 0, 4), await world.raw("dev3", 0, 4)
    await app.call(4, 4)
    await peer.call(4, 4, authority="dev1")
    for topic in (TOPIC, FAR, THIRD):
        await subscribe(app, topic)
    await subscribe(peer, TOPIC, at="dev1")
    await subscribe(third, TOPIC, at="dev1")
    assert len(await service.subscriptions()) == 5
    assert await reset(peer, major=major) == UCode.OK
    assert await pairs(service) == [("dev1", "dev1"), ("dev3", "dev1"), ("dev1", "dev3")]
    assert [topic[0] for topic, _ in await service.store.read(lambda reader: reader.links())] == ["dev3"]
    assert [client[0] for client, _, _ in await service.store.read(lambda reader: reader.registrations())] == ["dev1"]
    heard = [UPayload.of(one).unpack(v4.Subscription) for one in await app.notified[4].count(7)]
    assert [(one.topic, one.subscriber.authority_name) for one in heard[5:]] == [(FAR, "dev1"), (TOPIC, "dev2")]
    assert {one.status for one in heard[5:]} == {Status.UNSUBSCRIBED + 1}
    await world.stop()
    assert len(await (await world.service()).subscriptions()) == 3


async def test_it_ends_the_commands_to_the_sender_and_goes_on_with_those_to_others(world: Any) -> None:
    service = await world.service(remote_repeat_ms=20)
    app, peer = await world.raw(), await world.raw("dev2", 0, 4)
    await world.network("dev3")
    for topic in (FAR, THIRD):
        await subscribe(app, topic)
    assert await reset(peer) == UCode.OK
    assert [len(service.remote.commands.get(name, ())) for name in ("dev2", "dev3")] == [0, 1]
    links = await service.store.read(lambda reader: reader.links())
    assert [(topic[0], link.command) for topic, link in links] == [("dev3", Command.SUBSCRIBE)]


@pytest.mark.parametrize("major", [3, 4])
@pytest.mark.parametrize(
    "shared", ["nothing", "own authority", "an authority that we answer for", "off", "not entity 0"]
)
async def test_who_shares_nothing_resets_nothing_and_is_counted(world: Any, major: int, shared: str) -> None:
    options: dict[str, Any] = (
        {"reset": "off"} if shared == "off" else {"also": ["dev2"]} if shared.startswith("an auth") else {}
    )
    service = await world.service(**options)
    app = await world.raw()
    await subscribe(app, TOPIC)
    authority = "dev1" if shared == "own authority" else "dev2"
    peer = await world.raw(authority, 5 if shared == "not entity 0" else 0, 3)
    if shared != "nothing":
        await subscribe(peer, TOPIC, at="dev1")
    before = await pairs(service)
    assert await reset(peer, major=major) == UCode.PERMISSION_DENIED
    assert await pairs(service) == before
    assert service.refused["reset"] == 1


async def test_a_registration_alone_is_something_shared(world: Any) -> None:
    service = await world.service()
    peer = await world.raw("dev2", 0, 3)
    sink = uris.uri("dev1", 0, 3, 6)
    await peer.rpc.invoke_method(
        sink, UPayload.pack(v3.NotificationsRequest(topic=TOPIC)), CallOptions(timeout_ms=20_000)
    )
    await subscribe(await world.raw(), TOPIC)
    assert await reset(peer, major=3) == UCode.OK
    assert await service.store.read(lambda reader: reader.registrations()) == []
    assert len(await service.subscriptions()) == 1


async def test_the_dispatcher_in_this_process_keeps_the_interest_of_others(world: Any) -> None:
    from usubscription_client.sources import EmbeddedInterest

    service = await world.service()
    interest = EmbeddedInterest(service)
    await interest.start()
    app, peer, third = await world.raw(), await world.raw("dev2", 0, 4), await world.raw("dev3", 0, 4)
    await subscribe(app, TOPIC)
    await subscribe(peer, TOPIC, at="dev1")
    await subscribe(third, TOPIC, at="dev1")
    assert await reset(peer) == UCode.OK
    assert set(interest.wants(TOPIC)) == {"dev1", "dev3"}
    found = service.store.index.subscribers(("dev1", 0x20, 1, 0x8001), 0, 0, 10)
    assert found is not None
    assert {key[0] for key in found[0]} == {"dev1", "dev3"}


def test_what_came_before_a_reset_of_what_is_shared_changes_nothing_after_it(tmp_path: Path) -> None:
    own, theirs, ours = ("own", 1, 1, 0x8000), ("dev2", 0, 4, 0), ("own", 9, 1, 0)
    for restart in (False, True):
        db = Database(tmp_path / f"{restart}.db", "own")
        db.open()
        late, kept = (
            Commanded(Subscribe(own, theirs, 4), b"\x01" * 16),
            Commanded(Subscribe(own, ours, 4), b"\x02" * 16),
        )
        assert not any(isinstance(one, UStatusError) for one in db.apply([late, kept, Reset("dev2")], 0))
        if restart:
            db.close()
            db.open()
        again, kept_again = db.apply([late, kept], 0)
        assert isinstance(again, UStatusError)
        assert again.code == UCode.ABORTED
        assert not isinstance(kept_again, UStatusError)
        assert db.reader().count() == 1
        db.close()


def test_a_reset_that_is_rolled_back_has_ended_nothing(tmp_path: Path) -> None:
    db = Database(tmp_path / "s.db", "own")
    db.open()
    theirs: Key = ("dev2", 0, 4, 0)
    db.apply([Subscribe(("own", 1, 1, 0x8000), theirs, 4), Register(theirs, 4, None)], 0)
    with pytest.raises(AttributeError):
        db.apply([Reset("dev2"), Commanded(None, b"\x04" * 16)], 0)  # type: ignore[arg-type]
    assert db.reader().count() == 1
    assert len(db.reader().registrations()) == 1
    assert [type(one).__name__ for one in db.apply([Reset("dev2")], 0)] == ["Outcome"]
    assert db.reader().count() == 0
    db.close()


async def test_what_the_sender_still_has_of_ours_is_ended_there(world: Any) -> None:
    """A Reset ends everything shared, also where the other side does not know it."""
    other = await world.service("dev2")
    await world.service(audit_ms=600_000)
    app, peer = await world.raw(), await world.raw("dev2", 0, 9)
    await subscribe(app, FAR)
    await app.notified[4].count(2)
    assert await pairs(other) == [("dev2", "dev1")]
    assert await reset(peer) == UCode.OK
    async with asyncio.timeout(20):
        while await pairs(other):  # noqa: ASYNC110 - state of a store, which has no event
            await asyncio.sleep(0.01)
