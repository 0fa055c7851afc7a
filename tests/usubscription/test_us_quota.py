"""The limits of one caller and of one answer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from storage.runtime import WAITING_MAX
from streamer.building import MemoryLimits
from tests.tiers import full
from uprotocol import uri as uris
from uprotocol.communication.shares import UNIT_BYTES, Quota
from uprotocol.core.usubscription.asking import Services
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.status import UStatusError
from uprotocol.transport import MESSAGE_BYTES_MAX
from uprotocol.v1.ucode_pb2 import UCode
from usubscription.state import Change, Expire, Key, Status, Subscribe, Unsubscribe
from usubscription.store.database import DETAILS_BYTES_MAX, Database, Hold, Outcome, Probe, Register, Released, Reset
from usubscription_client import Subscription

WHOLE = 64  # a caller has 16 of them, another authority 8, the own one 48


def topic(number: int) -> Key:
    return ("dev1", 0x20, 1, 0x8000 + number)


def store(path: Path) -> Database:
    made = Database(path / "store.db", "dev1", subscriptions_max=WHOLE)
    made.open()
    return made


def subscribe(db: Database, who: Key, count: int, first: int = 0, **options: Any) -> int:
    """Returns the number of accepted ones."""
    done = db.apply([Subscribe(topic(first + number), who, 4, **options) for number in range(count)], 0)
    for one in done:
        assert isinstance(one, Outcome) or one.code == UCode.RESOURCE_EXHAUSTED, one
    return sum(isinstance(one, Outcome) for one in done)


def test_one_caller_has_a_share_and_the_others_have_room_beside_it(tmp_path: Path) -> None:
    db = store(tmp_path)
    assert subscribe(db, ("dev1", 0x10, 1, 0), 100) == 16
    assert subscribe(db, ("dev1", 0x10, 9, 0), 100) == 0, "another version is no other caller"
    assert [subscribe(db, ("dev1", 0x20 + number, 1, 0), 10) for number in range(4)] == [10, 10, 10, 2], (
        "the own ones leave a quarter"
    )
    assert subscribe(db, ("dev2", 0, 4, 0), 100) == 8
    assert subscribe(db, ("dev2", 0x77, 1, 0), 100) == 0, "an authority makes up its uEntities"
    assert subscribe(db, ("dev3", 0, 4, 0), 100) == 8
    assert subscribe(db, ("dev4", 0, 4, 0), 100) == 0, "all are taken"
    assert db.refused["subscriptions"] > 0
    db.close()


def test_what_is_there_may_be_renewed_and_stays_above_a_smaller_share(tmp_path: Path) -> None:
    who: Key = ("dev2", 0, 4, 0)
    db = store(tmp_path)
    assert subscribe(db, who, 8) == 8
    db.close()
    db = Database(tmp_path / "store.db", "dev1", subscriptions_max=16)
    db.open()
    assert db.reader().count() == 8
    assert subscribe(db, who, 8, sample_period_ms=5) == 8
    assert subscribe(db, who, 1, first=50) == 0
    db.apply([Unsubscribe(topic(number), who, 4) for number in range(7)], 0)
    assert subscribe(db, who, 2, first=50) == 1
    db.close()


def test_one_that_is_past_is_answered_as_ever_at_the_limit(tmp_path: Path) -> None:
    db = store(tmp_path)
    who: Key = ("dev2", 0, 4, 0)
    subscribe(db, who, 8)
    (outcome,) = db.apply([Subscribe(topic(99), who, 4, expires_ms=1)], 2)
    assert isinstance(outcome, Outcome)
    db.close()


def test_details_count_by_their_size(tmp_path: Path) -> None:
    db = store(tmp_path)
    who: Key = ("dev2", 0, 4, 0)
    assert subscribe(db, who, 1, details=b"x" * (DETAILS_BYTES_MAX + 1)) == 0
    assert db.refused["details"] == 1
    assert subscribe(db, who, 9, details=b"x" * UNIT_BYTES) == 4
    assert subscribe(db, who, 1, details=b"x" * 3 * UNIT_BYTES) == 0, "one that is there, and wants more"
    assert subscribe(db, who, 4) == 4, "and less"
    assert subscribe(db, who, 9, first=20) == 4
    db.close()


def counts(db: Database) -> list[tuple[object, ...]]:
    quotas = db.subscriptions, db._for_topics, db._for_all
    return [(dict(quota._clients.used), dict(quota._authorities.used), quota.used) for quota in quotas]


def test_the_counts_are_those_of_the_store_whatever_happens(tmp_path: Path) -> None:
    """A thousand random batches, some of which fail; then the counts are equal to those after a restart."""
    chance = random.Random(7)
    clients: list[Key] = [(authority, ue_id, 1, 0) for authority in ("dev1", "dev2", "dev3") for ue_id in (0, 0x10)]
    db = store(tmp_path)

    def event() -> Any:
        who, which = chance.choice(clients), topic(chance.randrange(12))
        return chance.choice(
            [
                *[Subscribe(which, who, 3, chance.choice([None, 5]), None, b"x" * chance.choice([0, 600, 4_000]))] * 5,
                *[Unsubscribe(which, who, 4)] * 3,
                Expire(which, who),
                Register(who, 4, chance.choice([None, which])),
                Reset(chance.choice(["dev2", "dev3"]) if chance.random() < 0.9 else None),
            ]
        )

    for _ in range(300):
        batch = [event() for _ in range(chance.randint(1, 8))]
        if chance.random() < 0.2:
            with pytest.raises((AttributeError, TypeError)):
                db.apply([*batch, Subscribe(None, None, 4)], 6)  # type: ignore[arg-type]
        else:
            db.apply(batch, chance.choice([0, 6]))
        counted = counts(db)
        db._load()
        assert counted == counts(db)
    db.close()


def test_registrations_have_shares_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("usubscription.store.database.REGISTRATIONS_MAX", WHOLE)
    db = store(tmp_path)
    done = db.apply([Register(("dev2", number, 1, 0), 3, topic(number)) for number in range(20)], 0)
    assert sum(isinstance(one, Outcome) for one in done) == 8
    assert isinstance(db.apply([Register(("dev3", 0, 1, 0), 3, topic(1))], 0)[0], Outcome)
    assert db.refused["registrations"] == 12
    db.close()


def test_a_family_of_our_own_is_one_of_ours() -> None:
    quota = Quota("things", WHOLE, {"dev1", "*.vin1"})
    quota.add(("ecu1.vin1", 1), 8)
    assert quota.refusal(("ecu1.vin1", 2), 8) is None
    assert quota.refusal(("ecu1.vin2", 2), 9) is not None


# -- pages
# ----------------------------------------------------------------------------------------------------------------------

ENTITY = 0x20
MANY = 30_000


async def filled(world: Any, count: int = MANY, **options: Any) -> Any:
    """A service in which one client has `count` subscriptions."""
    service = await world.service(**options)
    subscriber: Key = ("dev1", 0x10, 1, 0)
    topics: list[Key] = [("dev1", ENTITY + number // 30_000, 1, 0x8000 + number % 30_000) for number in range(count)]
    for start in range(0, count, 1_000):
        events = [Subscribe(key, subscriber, 4) for key in topics[start : start + 1_000]]
        service.store.database.apply(events, 0)  # on this thread: there are no requests yet
    return service


class Sizes:
    """Returns the largest payload that was sent to a client."""

    def __init__(self, transport: Any) -> None:
        self.largest = 0
        send = transport.send_batch

        async def send_batch(messages: Any) -> Any:
            self.largest = max([self.largest, *(len(one.payload) for one in messages)])
            return await send(messages)

        transport.send_batch = send_batch


@pytest.mark.parametrize("version", [pytest.param(3, marks=full), 4])
async def test_a_long_listing_comes_in_messages_that_every_transport_takes(world: Any, version: int) -> None:
    await filled(world)
    sizes = Sizes(world.transports["dev1"])
    client = await world.client(version=version)
    subscriber = uris.uri("dev1", 0x10, 1, 0)
    found: list[Subscription] = await client.fetch_subscriptions(subscriber=subscriber)
    assert len({uris.key(one.topic) for one in found}) == len(found) == MANY
    assert MESSAGE_BYTES_MAX // 2 < sizes.largest <= MESSAGE_BYTES_MAX * 3 // 4


async def test_v3_subscribers_come_in_such_messages_too(world: Any) -> None:
    service = await world.service()
    subscribers: list[Key] = [
        ("a-rather-long-name-of-a-vehicle-behind-a-gateway", number, 1, 0) for number in range(15_000)
    ]
    for start in range(0, len(subscribers), 1_000):
        service.store.database.apply(
            [Subscribe(("dev1", ENTITY, 1, 0x8001), one, 3) for one in subscribers[start : start + 1_000]], 0
        )
    sizes = Sizes(world.transports["dev1"])
    client = await world.client(version=3)
    service.store.index.load(service.store._reading["long"])
    found = await client.fetch_subscribers(uris.uri("dev1", ENTITY, 1, 0x8001))
    assert {uris.key(one) for one in found} == set(subscribers)
    assert len(found) == len(subscribers)
    assert sizes.largest <= MESSAGE_BYTES_MAX * 3 // 4


async def test_v4_without_pages_is_refused_what_does_not_fit(world: Any) -> None:
    """A client that knows only the specification."""
    await filled(world, 2_000, message_bytes_max=1 << 16)
    raw = await world.raw()
    with pytest.raises(UStatusError) as error:
        await raw.call(4, 3, v4.FetchSubscriptionsRequest())
    assert error.value.code == UCode.RESOURCE_EXHAUSTED
    assert "narrow the filters" in error.value.message
    one = v4.FetchSubscriptionsRequest(topic_filter=uris.uri("dev1", ENTITY, 1, 0x8001))
    assert len((await raw.call(4, 3, one)).unpack(v4.FetchSubscriptionsResponse).subscriptions) == 1


async def test_pages_go_on_where_they_were_while_others_come_and_go(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = await filled(world, 3_000, message_bytes_max=1 << 16)
    client = await world.client(version=4)
    call, calls = Services.call, 0

    async def between(*args: Any) -> UPayload:
        nonlocal calls
        calls += 1
        if calls == 2:
            service.store.database.apply([Unsubscribe(("dev1", ENTITY, 1, 0x8000), ("dev1", 0x10, 1, 0), 4)], 0)
        payload: UPayload = await call(*args)
        return payload

    monkeypatch.setattr(Services, "call", between)
    assert len(await client.fetch_subscriptions()) == 3_000, "the one that went was told on the first page"
    assert calls > 2


@pytest.mark.parametrize("version", [3, 4])
async def test_a_listing_without_end_is_given_up(world: Any, version: int) -> None:
    await filled(world, 2_000, message_bytes_max=1 << 16)
    client = await world.client(version=version, listed_max=1_500)
    with pytest.raises(UStatusError) as error:
        await client.fetch_subscriptions(subscriber=uris.uri("dev1", 0x10, 1, 0))
    assert error.value.code == UCode.RESOURCE_EXHAUSTED


# -- what waits
# -------------------------------------------------------------------------------------------------------------------


async def test_one_that_fills_the_queue_leaves_room_for_others(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, before the store has answered any of them."""
    monkeypatch.setattr("usubscription.service.WAITING_MAX", WHOLE)
    service = await world.service()
    entry = service.entry
    method = uris.uri("dev1", 0, 4, 1)

    def ask(authority: str, ue_id: int, count: int) -> None:
        source = uris.uri(authority, ue_id, 1, 0)
        for number in range(count):
            asked = v4.SubscribeRequest(topic=uris.uri("dev1", ENTITY, 1, 0x8000 + number))
            entry.on_receive(UMessageBuilder.request(source, method, 20_000).pack(asked))

    ask("dev2", 0x10, 100)
    assert entry.refused["waiting"] == 100 - 8 // 2
    ask("dev1", 0x10, 16)
    ask("dev3", 0, 8)
    assert entry.refused["waiting"] == 100 - 8 // 2
    ask("dev2", 0x11, 4)
    assert entry.refused["waiting"] == 100 - 8 // 2, "its neighbour on that host finds room"
    assert entry.waiting.used == 32
    await service.store.submit(Probe())  # after all of them
    assert entry.waiting.used == 0
    assert not entry.waiting._clients.used
    assert len(await service.subscriptions()) == 32


async def test_large_requests_take_the_room_of_many(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("usubscription.service.WAITING_MAX", WHOLE)
    service = await world.service()
    entry = service.entry
    method = uris.uri("dev1", 0, 3, 1)
    asked = v3.SubscriptionRequest(topic=uris.uri("dev1", ENTITY, 1, 0x8001))
    asked.attributes.details.add(value=b"x" * 3 * UNIT_BYTES)
    for _ in range(5):
        entry.on_receive(UMessageBuilder.request(uris.uri("dev1", 0x10, 1, 0), method, 20_000).pack(asked))
    assert entry.refused["waiting"] == 1


# -- of a gateway
# -----------------------------------------------------------------------------------------------------------------


def test_the_shares_are_those_of_the_page() -> None:
    """docs/security.md, "How much one caller may take"."""
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    whole = MemoryLimits().subscriptions_max
    quota = Quota("subscriptions", whole, {"cloud"})
    for number in (whole, quota.caller_max, quota.authority_max, WAITING_MAX, WAITING_MAX // 4, WAITING_MAX // 8):
        assert f"{number:,} " in page, number
    for fleet, callers, each in ((50_000, 10_000, 5), (500_000, 100_000, 5), (30_000, 1, 30_000)):
        (mib,) = {50_000: [512], 500_000: [4_096], 30_000: [1_024]}[fleet]
        fits = Quota("subscriptions", MemoryLimits(mib << 20).subscriptions_max, {"cloud"})
        authority = "cloud" if callers == 1 else "vehicle"
        assert fits.whole >= fleet
        assert fits.refusal((authority, 0), each) is None
        assert f"| {mib:,}" in page


def test_changes_that_wait_are_bounded_in_bytes(tmp_path: Path) -> None:
    """A change with long details counts as several."""
    db = Database(tmp_path / "store.db", "dev1", outbox_changes_max=64)
    db.open()

    def hold(destination: str, first: int, count: int, details: bytes) -> None:
        changes = [
            (destination, first + n, Change(topic(n), ("dev1", 1, 1, 0), Status.SUBSCRIBED, 3, details=details), ())
            for n in range(count)
        ]
        db.apply([Hold(tuple(changes)), Hold(tuple(changes))], 0)  # the second time they are stored already

    hold("away", 1, 20, b"x" * DETAILS_BYTES_MAX)
    (size,) = db._file.connect().execute("SELECT sum(length(change)) FROM held").fetchone()
    assert size <= 64 * 2 * UNIT_BYTES
    assert db.tables.dropped > 0
    hold("other", 100, 10, b"")
    assert len(db.reader().held("other", 100)) == 10, "who holds most loses"
    before = db.tables.held
    db.close()
    db.open()
    assert db.tables.held == before
    db.apply([Released("away", 99), Released("other", 200)], 0)
    assert db.tables.held == 0
    db.close()
