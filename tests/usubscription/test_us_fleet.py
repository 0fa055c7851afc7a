"""A cloud that subscribes to many vehicles at once; counts commits and batches, which determine the cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from storage.runtime import WORK_BATCH_MAX
from uprotocol import uri as uris
from uprotocol.attributes import NOTIFICATION, REQUEST, RESPONSE
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UMessageBuilder, UPayload
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription import remote
from usubscription.state import Status
from usubscription.store.reader import StoreReader

VEHICLES, EACH = 40, 10
TOPICS = [uris.uri(f"vin{vehicle}", 0x20, 1, 0x8000 + n) for vehicle in range(VEHICLES) for n in range(EACH)]
SUBSCRIBED, PENDING = Status.SUBSCRIBED + 1, Status.SUBSCRIBE_PENDING + 1  # as version 4 has them


class Fleet:
    """The services of all vehicles, on the cloud's network: they answer, and notify of their answers."""

    def __init__(self, transport: Any, answers: Callable[[str], list[int]]) -> None:
        """`answers(vehicle)`: the status in the response, then those in notifications; empty: no answer."""
        self._transport, self._answers = transport, answers
        self.batches: list[int] = []
        self.asked: list[str] = []

    async def on_receive_batch(self, messages: Sequence[UMessage]) -> None:
        out = []
        requests = [
            message
            for message in messages
            if message.attributes.type == REQUEST and message.attributes.sink.authority_name != "cloud"
        ]
        for request in requests:
            attributes = request.attributes
            if attributes.sink.resource_id != 1:
                out.append(UMessageBuilder.response_for_request(attributes).pack(v4.FetchSubscriptionsResponse()))
                continue
            topic, who = UPayload.of(request).unpack(v4.SubscribeRequest).topic, attributes.source
            self.asked.append(topic.authority_name)
            for place, status in enumerate(self._answers(topic.authority_name)):
                if place:
                    notification = UMessageBuilder.notification(uris.uri(topic.authority_name, 0, 4, 0x8000), who)
                    out.append(notification.pack(v4.Subscription(topic=topic, subscriber=who, status=status)))
                else:
                    response = UMessageBuilder.response_for_request(attributes)
                    out.append(response.pack(v4.SubscribeResponse(topic=topic, status=status)))
        await self._transport.send_batch(out)

    def on_receive(self, message: UMessage) -> Any:
        return self.on_receive_batch([message])


async def begin(world: Any, answers: Callable[[str], list[int]]) -> tuple[Any, Any, Fleet]:
    """The service, a client, and the fleet."""
    end = await world.transport("cloud", 0x77)
    fleet = Fleet(end, answers)
    await end.register_listener(uris.ANY, fleet, uris.pattern(uris.WILDCARD_AUTHORITY, 0, 4))
    service = await world.service("cloud")
    return service, await world.raw("cloud"), fleet


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - any state may be asked for
            await asyncio.sleep(0.01)


async def standing(service: Any, topics: Sequence[Any]) -> None:
    wanted = {uris.key(topic) for topic in topics}
    async with asyncio.timeout(20):
        while True:
            stand = {row.topic for row in await service.subscriptions() if row.status is Status.SUBSCRIBED}
            if stand >= wanted:
                assert stand == wanted
                return
            await asyncio.sleep(0.02)


def subscribe_all(raw: Any, topics: Sequence[Any]) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(raw.call(4, 1, v4.SubscribeRequest(topic=topic))) for topic in topics]


def sizes_of(transport: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[UMessage]]:
    """Returns the batches that are sent through it."""
    batches: list[list[UMessage]] = []
    whole = transport.send_batch

    async def send_batch(messages: Sequence[UMessage]) -> list[UStatus]:
        batches.append(list(messages))
        statuses: list[UStatus] = await whole(messages)
        return statuses

    monkeypatch.setattr(transport, "send_batch", send_batch)
    return batches


async def test_four_hundred_subscriptions_to_forty_vehicles_are_some_batches(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "REPEAT_FIRST_MS", 60_000)  # no repetition on a slow machine
    service, raw, fleet = await begin(world, lambda vehicle: [SUBSCRIBED, SUBSCRIBED])
    batches = sizes_of(world.transports["cloud"], monkeypatch)
    database, commits, events = service.store.database, [], []
    apply = database.apply

    def counted(some: Sequence[Any], now_ms: int) -> Any:
        commits.append(len(some))
        events.extend(some)
        return apply(some, now_ms)

    monkeypatch.setattr(database, "apply", counted)
    await asyncio.gather(*subscribe_all(raw, TOPICS))
    await standing(service, TOPICS)
    await raw.notified[4].count(2 * len(TOPICS))  # pending, subscribed
    kinds = [type(event).__name__ for event in events]
    assert (kinds.count("Commanded"), kinds.count("Answered"), kinds.count("Notified")) == (400, 400, 0)
    assert len(commits) <= 100  # for 800 commands and answers, and the changes
    notifications = [batch for batch in batches if batch[0].attributes.type == NOTIFICATION]
    asked = [batch for batch in batches if batch[0].attributes.type == REQUEST]
    assert sum(map(len, notifications)) >= 3 * 2 * len(TOPICS)  # two publishes beside each
    assert len(notifications) <= 100
    assert len(asked) <= 100
    assert len(fleet.asked) == len(TOPICS)


async def test_in_a_burst_answers_leave_before_notifications(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While more requests wait than one transaction takes: a change costs as much as an answer."""
    service, raw, _ = await begin(world, lambda vehicle: [SUBSCRIBED])
    batches = sizes_of(world.transports["cloud"], monkeypatch)
    may_commit, apply = threading.Event(), service.store.database.apply

    def later(*arguments: Any) -> Any:
        assert may_commit.wait(20)
        return apply(*arguments)

    monkeypatch.setattr(service.store.database, "apply", later)
    calls = subscribe_all(raw, TOPICS)
    lull = service.notifier._responses.lull
    assert lull.is_set()
    await until(lambda: service.entry.waiting.used == len(TOPICS))
    assert not lull.is_set()
    may_commit.set()
    await asyncio.gather(*calls)
    assert lull.is_set()
    await raw.notified[4].count(1)
    types = [message.attributes.type for batch in batches for message in batch]
    before = types[: types.index(NOTIFICATION)]
    assert before.count(RESPONSE) >= len(TOPICS) - WORK_BATCH_MAX


async def test_a_burst_lasts_until_nobody_waits_for_an_answer(world: Any) -> None:
    """A store that keeps up has fewer waiting requests than one transaction takes, while more arrive."""
    service, _, _ = await begin(world, lambda vehicle: [SUBSCRIBED])
    lull, who = service.notifier._responses.lull, ("cloud", 0x10)
    service.entry.is_waiting(who, WORK_BATCH_MAX)
    assert lull.is_set()
    service.entry.is_waiting(who, 1)
    service.entry.is_waiting(who, -WORK_BATCH_MAX)
    assert not lull.is_set()
    service.entry.is_waiting(who, -1)
    assert lull.is_set()


async def test_a_silent_vehicle_holds_up_no_other(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do several of them, with all fresh calls."""
    monkeypatch.setattr(remote, "FRESH_MAX", 16)
    monkeypatch.setattr(remote, "FRESH_MS", 50)
    world.patch.setattr("usubscription.remote.REPEAT_FIRST_MS", 60_000)
    silent = {"vin0", "vin1", "vin2"}
    service, raw, fleet = await begin(world, lambda vehicle: [] if vehicle in silent else [SUBSCRIBED])
    await asyncio.gather(*subscribe_all(raw, TOPICS))
    others = [topic for topic in TOPICS if topic.authority_name not in silent]
    await standing(service, others)
    assert set(fleet.asked) == {topic.authority_name for topic in TOPICS}


@pytest.mark.parametrize("statuses", [[SUBSCRIBED], [PENDING, SUBSCRIBED]], ids=["subscribed", "pending first"])
async def test_a_notification_right_behind_a_pending_answer_counts(world: Any, statuses: list[int]) -> None:
    """The notification arrives before the answer is stored."""
    service, raw, _ = await begin(world, lambda vehicle: [PENDING, *statuses])
    await asyncio.gather(*subscribe_all(raw, TOPICS[:5]))
    await standing(service, TOPICS[:5])


async def test_a_fleet_that_is_away_gets_no_more_than_its_network_may_hold(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further calls would be refused and delayed."""
    world.patch.setattr("usubscription.remote.REPEAT_FIRST_MS", 600_000)
    monkeypatch.setattr(remote, "FRESH_MAX", 16)
    monkeypatch.setattr(remote, "FRESH_SILENT_MS", 600_000)
    answered = asyncio.Event()
    service, raw, fleet = await begin(world, lambda vehicle: [SUBSCRIBED] if answered.is_set() else [])
    await asyncio.gather(*subscribe_all(raw, TOPICS))
    await until(lambda: f"locked, waiters:{len(TOPICS) - 16}]" in repr(service.remote.fresh_calls))
    await until(lambda: len(fleet.asked) >= 16)
    assert len(fleet.asked) == 16


async def test_an_audit_reads_the_links_of_whom_it_asks(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not read all links for each vehicle."""
    service, raw, _ = await begin(world, lambda vehicle: [SUBSCRIBED])
    await asyncio.gather(*subscribe_all(raw, TOPICS))
    await standing(service, TOPICS)
    rows: list[int] = []
    links = StoreReader.links

    def counted(self: StoreReader, authority: str | None = None) -> Any:
        found = links(self, authority)
        rows.append(len(found))
        return found

    monkeypatch.setattr(StoreReader, "links", counted)
    service.remote.auditor.now()
    await until(lambda: len(rows) >= 2 * VEHICLES)
    assert set(rows) == {EACH}
