"""A service whose store was lost: the other services notice it at once, renew their halves, and say what is lost."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.usubscription.conftest import Ear
from uprotocol import uri as uris
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.core.usubscription.wire import CODECS, PageLimits, StoreSaid
from uprotocol.message import UPayload
from usubscription import audit
from usubscription.audit import Missed, Partners
from usubscription.service import USubscriptionService
from usubscription.store.database import StoreKnown

WAIT_S = 20
NEVER_MS = 3_600_000  # no round of audits falls within a test
A_TOPIC, B_TOPIC = uris.uri("a", 0x20, 1, 0x8001), uris.uri("b", 0x20, 1, 0x8001)
both = pytest.mark.parametrize("major", [3, 4])


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await condition():  # noqa: ASYNC110 - state of a store, which has no event
            await asyncio.sleep(0.01)


async def subscribe(world: Any, authority: str, major: int, topic: Any) -> Any:
    """Subscribe at the service of `authority`, and wait until the service of the topic has confirmed."""
    raw = await world.raw(authority, ue_id=0x100 + len(world.forwarders) + len(world._closing))
    request: Any = v4.SubscribeRequest(topic=topic) if major == 4 else v3.SubscriptionRequest(topic=topic)
    await raw.call(major, 1, request)
    await raw.notified[major].count(2)
    return raw


async def start(world: Any, authority: str, *neighbours: str) -> USubscriptionService:
    service: USubscriptionService = await world.service(authority, audit_ms=NEVER_MS, neighbours=neighbours)
    return service


def forget(folder: Path, *, keep: str = "none") -> None:
    for path in folder.glob("a.db*"):
        if not path.name.endswith(keep):
            path.unlink()


async def names(service: USubscriptionService) -> set[tuple[str, str]]:
    """Authorities of topic and subscriber of each confirmed subscription."""
    return {
        (row.topic[0], row.subscriber[0]) for row in await service.subscriptions() if row.status.name == "SUBSCRIBED"
    }


@both
async def test_the_halves_of_others_come_back_at_once(world: Any, major: int) -> None:
    """a is emptied. b had a subscription there, which nothing but an audit would miss; a had one at b."""
    b = await start(world, "b")
    await start(world, "a", "b")
    await subscribe(world, "b", major, A_TOPIC)
    await subscribe(world, "a", major, B_TOPIC)
    await until(lambda: asyncio.sleep(0, "a" in b.remote.partners.stores))
    await world.stop("a")
    forget(world.path)
    a = await start(world, "a", "b")

    async def renewed() -> bool:
        return await names(a) == {("a", "b")} and await names(b) == {("a", "b")}

    await until(renewed)
    assert b.remote.auditor.renewed["a"].subscriptions == b.remote.auditor.renewals == 1
    assert a.remote.auditor.missed["b", major] == Missed(ours=1, theirs=1)


async def test_what_two_audits_find_at_once_counts_once(world: Any) -> None:
    """A round and an audit at once may run side by side."""
    a, b = await start(world, "a"), await start(world, "b")
    await subscribe(world, "b", 4, A_TOPIC)
    await world.stop("a")
    forget(world.path)
    a = await start(world, "a")
    assert await asyncio.gather(*(b.remote.auditor._audit("a", 4) for _ in range(3))) == [True] * 3
    assert b.remote.auditor.renewals == 1

    async def renewed() -> bool:
        return await names(a) == {("a", "b")}

    await until(renewed)


@both
async def test_a_message_from_a_partner_is_enough(world: Any, major: int) -> None:
    """a names no neighbour, as a gateway to a fleet does."""
    a, b = await start(world, "a"), await start(world, "b")
    await subscribe(world, "b", major, A_TOPIC)
    await world.stop("a")
    forget(world.path)
    a = await start(world, "a")
    assert await names(a) == set()
    a.remote.arrived_from("b")

    async def renewed() -> bool:
        return await names(a) == {("a", "b")}

    await until(renewed)
    assert b.remote.auditor.renewals == 1


async def test_without_its_database_alone_it_asks_who_subscribed_here(world: Any) -> None:
    """The names of the partners are beside the database, also those that only subscribed here."""
    a, b = await start(world, "a"), await start(world, "b")
    await subscribe(world, "b", 4, A_TOPIC)
    await until(lambda: asyncio.sleep(0, (world.path / "a.db.partners").exists()))
    await world.stop("a")
    forget(world.path, keep=".partners")
    a = await start(world, "a")

    async def renewed() -> bool:
        return await names(a) == {("a", "b")}

    await until(renewed)
    assert b.remote.auditor.renewals == 1


async def test_a_store_that_was_restored_from_a_copy_gets_what_it_lacks(world: Any) -> None:
    a, b = await start(world, "a"), await start(world, "b")
    await subscribe(world, "b", 4, uris.uri("a", 0x20, 1, 0x8002))
    await world.stop("a")
    shutil.copy(world.path / "a.db", world.path / "copy")
    await start(world, "a")
    await subscribe(world, "b", 4, A_TOPIC)
    await world.stop("a")
    forget(world.path)
    shutil.copy(world.path / "copy", world.path / "a.db")
    a = await start(world, "a")
    assert a.store.database.is_copy

    async def renewed() -> bool:
        return len(await a.subscriptions()) == 2

    await until(renewed)
    assert b.remote.auditor.renewals == 1


async def test_a_first_start_and_a_restart_miss_nothing(world: Any) -> None:
    a, b = await start(world, "a", "b"), await start(world, "b", "a")
    await subscribe(world, "b", 4, A_TOPIC)
    await subscribe(world, "a", 4, B_TOPIC)
    for name, other in ("ab", "ba"):
        await world.stop(name)
        await start(world, name, other)
    a, b = world.services["a"], world.services["b"]
    for service in (a, b):
        service.remote.auditor.now()

    async def named() -> bool:
        stores = a.remote.partners.stores.get("b"), b.remote.partners.stores.get("a")
        return all(stores)

    await until(named)
    for service in (a, b):
        assert not service.remote.auditor.missed
        assert not service.remote.auditor.renewals
    assert await names(a) == {("a", "b"), ("b", "a")}


async def test_two_services_that_learn_of_each_other_soon_fall_silent(world: Any) -> None:
    """An audit that causes an audit must not go on for ever."""
    await start(world, "a", "b")
    await start(world, "b", "a")
    await subscribe(world, "a", 4, B_TOPIC)
    quiet, last = 0, -1
    async with asyncio.timeout(WAIT_S):
        while quiet < 30:
            count = sum(len(forwarder.log) for forwarder in world.forwarders.values())
            quiet, last = (quiet + 1, last) if count == last else (0, count)
            await asyncio.sleep(0.02)
    assert last < 60


async def test_a_partner_that_does_not_answer_is_notified_later(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "AT_ONCE_FIRST_MS", 50)
    await start(world, "a", "b")
    b = await start(world, "b")
    await subscribe(world, "b", 4, A_TOPIC)
    await world.stop("a")
    forget(world.path)
    lost: list[Any] = []
    world.forwarders["a", "b"].lose = lambda message: len(lost) < 3 and not lost.append(message)
    a = await world.service("a", audit_ms=NEVER_MS, audit_call_ms=100, neighbours=["b"])

    async def renewed() -> bool:
        return await names(a) == {("a", "b")}

    await until(renewed)
    assert len(lost) == 3
    assert b.remote.auditor.renewals == 1


async def test_devices_without_a_service_are_asked_few_times_and_keep_no_partner_waiting(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of devices, more than are asked together, send something to a gateway with a new store."""
    monkeypatch.setattr(audit, "AT_ONCE_FIRST_MS", 10)
    a, b = await start(world, "a"), await start(world, "b")
    await subscribe(world, "b", 4, A_TOPIC)
    await world.stop("a")
    forget(world.path)
    devices = [f"device{number}" for number in range(3 * audit.STRANGERS_AT_ONCE)]
    silent, asked = await world.transport("a", 0xFFF1), Ear()
    for device in devices:  # they take the question, and never answer
        await silent.register_listener(uris.ANY, asked, uris.pattern(device))
    a = await start(world, "a")
    for device in devices:
        a.remote.arrived_from(device)
    a.remote.subscribed("b", 4)  # a partner

    async def renewed() -> bool:
        return await names(a) == {("a", "b")}

    await until(renewed)
    assert b.remote.auditor.renewals == 1
    strangers = a.remote.auditor._strangers
    assert len(strangers) == len(devices), "the partner has waited for them"
    monkeypatch.setattr(audit, "AT_ONCE_CALL_MS", 300)
    await until(lambda: asyncio.sleep(0, not len(strangers)))
    counts = Counter(message.attributes.sink.authority_name for message in asked.heard)
    assert set(counts) == set(devices)
    assert max(counts.values()) == audit.STRANGER_TRIES_MAX  # a question that waits too long is not sent
    a.remote.arrived_from(devices[0])
    assert not len(strangers), "asked once for each new store"


async def test_a_command_that_was_lost_with_the_store_is_repeated_at_once(world: Any) -> None:
    """b's Subscribe is on its way when a is emptied: nobody answers it any more."""
    world.patch.setattr("usubscription.remote.REPEAT_FIRST_MS", NEVER_MS)
    await start(world, "a")
    await start(world, "b")
    world.forwarders["a", "b"].lose = lambda message: True
    raw = await world.raw("b")
    await raw.call(4, 1, v4.SubscribeRequest(topic=A_TOPIC))
    await until(lambda: _has_subscriptions(world.services["a"]))
    await world.stop("a")
    forget(world.path)
    world.forwarders["a", "b"].lose = lambda message: False
    a = await start(world, "a", "b")

    async def renewed() -> bool:
        return await names(a) == await names(world.services["b"]) == {("a", "b")}

    await until(renewed)


async def _has_subscriptions(service: USubscriptionService) -> bool:
    return bool(await service.subscriptions())


async def test_after_a_while_the_store_is_no_longer_new(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a = await start(world, "a")
    assert a.store.database.new_since_ms is not None
    await world.stop("a")
    monkeypatch.setattr(audit, "NOTIFY_MS", 100)
    a = await start(world, "a")
    assert a.remote.auditor.is_new  # it was not told to everybody before the restart

    async def notified() -> bool:
        return not a.remote.auditor.is_new

    await until(notified)
    await world.stop("a")
    a = await start(world, "a")
    assert not a.remote.auditor.is_new


async def test_a_store_that_cannot_be_written_is_tried_again_after_a_pause(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[object] = []
    monkeypatch.setattr(audit, "NOTIFY_MS", 1)
    monkeypatch.setattr(audit.Auditor, "submit", lambda _, event: submitted.append(event))
    a = await start(world, "a")
    await until(lambda: asyncio.sleep(0, submitted))
    for _ in range(1_000):
        await asyncio.sleep(0)
    assert a.remote.auditor.is_new
    assert submitted == [StoreKnown()]


@both
async def test_a_foreign_client_gets_nothing_about_stores(world: Any, major: int) -> None:
    """Who does not name a store gets an answer without our fields; a client can't pose as a service."""
    await start(world, "a")
    raw = await world.raw("a")
    codec = CODECS[major]
    own = raw.local.get_source()
    for store in (b"", b"s" * 16):
        request = codec.fetch_subscriptions(None, own, store=store)
        assert (
            codec.read_store(await raw.call(major, codec.methods["fetch_subscriptions"].resource, request))
            == StoreSaid()
        )
    assert not world.services["a"].remote.partners.stores


@both
def test_the_fields_of_stores_travel_beside_those_of_the_specification(major: int) -> None:
    codec, own = CODECS[major], uris.uri("a", 0, major, 0)
    said = StoreSaid(b"1" * 16, b"2" * 16, 7)
    answer = UPayload.pack(codec.fetched([], PageLimits(10, 1000), said))
    assert codec.read_store(answer) == said
    assert codec.read_subscriptions(answer) == ([], None)
    plain = codec.fetch_subscriptions(None, own)
    named = codec.fetch_subscriptions(None, own, store=b"1" * 16)
    named.DiscardUnknownFields()
    plain.DiscardUnknownFields()
    assert named == plain


async def test_the_store_of_a_partner_is_known_after_a_restart(tmp_path: Path) -> None:
    known = Partners(tmp_path / "p")
    await known.remember(("b", 4))
    assert known.learn("b", b"1" * 16)
    assert not known.learn("b", b"1" * 16)
    assert known.learn("stranger", b"3" * 16)
    await known.close()
    again = Partners(tmp_path / "p")
    await again.load()
    assert list(again.known) == [("b", 4)]
    assert again.learn("b", b"2" * 16)
    assert again.stores["b"].former == b"1" * 16
    assert "stranger" not in again.stores
