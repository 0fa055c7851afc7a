"""Sending changes: each destination has its own order and failures, a restart loses nothing, answers are sent first."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.tiers import seeds
from uprotocol import uri as uris
from uprotocol.attributes import NOTIFICATION, PUBLISH
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UPayload
from uprotocol.status import FINAL, UStatusError
from uprotocol.v1.ucode_pb2 import UCode
from uprotocol.v1.umessage_pb2 import UMessage
from uprotocol.v1.ustatus_pb2 import UStatus
from usubscription import notifier
from usubscription.notifier import ANSWER_WAIT_MS_MAX, ResponseTracker
from usubscription.state import Change, Key, Status
from usubscription.store.database import Database, Hold

WAIT_S = 20
APP: Key = ("dev1", 0x10, 1, 0)


def topic(number: int) -> Any:
    return uris.uri("dev1", 0x20, 1, 0x8000 + number)


def numbers(messages: list[UMessage]) -> list[int]:
    """The topics of the changes, in order."""
    return [UPayload.of(one).unpack(v4.Subscription).topic.resource_id - 0x8000 for one in messages]


class Sieve:
    """A transport with the answers of the test; None: pass the message to the real one."""

    def __init__(self, transport: Any) -> None:
        self._send = transport.send_batch
        self.verdict: Callable[[UMessage], int | None] = lambda message: None
        transport.send_batch = self.send_batch

    async def send_batch(self, messages: Any) -> list[UStatus]:
        """After a failure nothing to the same destination is sent, as in real transports."""
        statuses: list[UStatus] = []
        stopped: dict[str, UStatus] = {}
        for message in messages:
            destination = message.attributes.sink.authority_name
            if destination not in stopped:
                code = self.verdict(message)
                statuses.append(UStatus(code=code) if code is not None else (await self._send([message]))[0])
                if statuses[-1].code not in (UCode.OK, *FINAL):
                    stopped[destination] = statuses[-1]
            else:
                statuses.append(stopped[destination])
        return statuses


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - counters, which have no event
            await asyncio.sleep(0.01)


async def watched(world: Any, *authorities: str) -> tuple[Any, Any, dict[str, Any]]:
    """A service with a Sieve as transport, and a registered client at each authority."""
    service = await world.service()
    sieve = Sieve(world.transports["dev1"])
    watchers = {}
    for authority in authorities:
        watchers[authority] = await world.raw(authority, 0x99)
        if authority == "dev1":
            heard = watchers[authority].notified[4]
        else:  # a notification of dev1's service to a client elsewhere
            heard = type(watchers[authority].notified[4])()
            await watchers[authority].transport.register_listener(
                uris.uri("dev1", 0, 4, 0x8000), heard, watchers[authority].local.get_source()
            )
        await watchers[authority].call(4, 4, v4.NotificationsRequest(), authority="dev1")
        watchers[authority] = heard
    return service, sieve, watchers


@pytest.mark.parametrize("code", [UCode.UNAVAILABLE, UCode.RESOURCE_EXHAUSTED, UCode.INTERNAL], ids=UCode.Name)
@pytest.mark.parametrize("stuck", ["publishes at home", "dev1", "dev2"])
async def test_the_trouble_of_one_destination_is_its_own_and_it_gets_all_of_it_in_order_later(
    world: Any, stuck: str, code: int
) -> None:
    service, sieve, watchers = await watched(world, "dev1", "dev2", "dev3")
    raw = await world.raw()
    away = True

    def verdict(message: UMessage) -> int | None:
        if stuck == "publishes at home":
            return code if away and message.attributes.type == PUBLISH else None
        return (
            code
            if away and message.attributes.type == NOTIFICATION and message.attributes.sink.authority_name == stuck
            else None
        )

    sieve.verdict = verdict
    for number in range(40):
        await raw.call(4, 1, v4.SubscribeRequest(topic=topic(number)))
    for authority, heard in watchers.items():
        if authority != stuck:
            assert numbers(await heard.count(40)) == list(range(40))
    await until(lambda: service.notifier.sent >= 40 and not service.notifier._waiting and not service.notifier._behind)
    if stuck == "publishes at home":
        assert raw.published[4].heard == []
    else:
        assert watchers[stuck].heard == []
    away = False
    late = raw.published[4] if stuck == "publishes at home" else watchers[stuck]
    assert numbers(await late.count(40)) == list(range(40))
    await until(lambda: not service.notifier.troubles)
    assert await service.store.read(lambda reader: reader.destinations_held()) == []
    await raw.call(4, 1, v4.SubscribeRequest(topic=topic(40)))
    assert numbers(await late.count(41))[-1] == 40


async def test_remote_commands_do_not_wait_for_a_destination_that_is_away(world: Any) -> None:
    await world.service("dev2")
    _, sieve, _ = await watched(world, "dev1")
    sieve.verdict = lambda message: UCode.UNAVAILABLE if message.attributes.type == PUBLISH else None
    raw = await world.raw()
    await raw.call(4, 1, v4.SubscribeRequest(topic=uris.parse("//dev2/20/1/8001")))
    assert [UPayload.of(one).unpack(v4.Subscription).status for one in await raw.notified[4].count(2)] == [2, 3]


async def test_what_a_destination_has_not_had_outlives_a_restart_and_comes_first(world: Any) -> None:
    _, sieve, watchers = await watched(world, "dev2")
    sieve.verdict = lambda message: UCode.UNAVAILABLE if message.attributes.sink.authority_name == "dev2" else None
    raw = await world.raw()
    for number in range(20):
        await raw.call(4, 1, v4.SubscribeRequest(topic=topic(number)))
    await raw.notified[4].count(20)
    await world.stop()
    service = await world.service()
    await raw.call(4, 1, v4.SubscribeRequest(topic=topic(20)))
    heard = numbers(await watchers["dev2"].until(lambda messages: 20 in numbers(messages)))
    assert list(dict.fromkeys(heard)) == list(range(21)), "in order; twice, perhaps"
    assert heard == sorted(heard) or heard[-1] == 20
    await until(lambda: not service.notifier.troubles)


async def test_a_change_that_a_destination_refuses_for_ever_is_given_up_and_counted(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "TRIES_MAX", 3)
    monkeypatch.setattr(notifier, "NOTIFIER_RETRY_MAX_MS", 200)
    service, sieve, watchers = await watched(world, "dev2")
    sieve.verdict = lambda message: (
        UCode.INTERNAL if message.attributes.sink.authority_name == "dev2" and numbers([message]) == [1] else None
    )
    raw = await world.raw()
    for number in range(4):
        await raw.call(4, 1, v4.SubscribeRequest(topic=topic(number)))
    assert numbers(await watchers["dev2"].count(3)) == [0, 2, 3]
    assert service.dropped["INTERNAL"] == 1


async def test_a_no_for_good_is_counted_and_nothing_waits_for_it(world: Any) -> None:
    service, sieve, watchers = await watched(world, "dev1", "dev2")
    sieve.verdict = lambda message: (
        UCode.PERMISSION_DENIED if message.attributes.sink.authority_name == "dev2" else None
    )
    raw = await world.raw()
    await raw.call(4, 1, v4.SubscribeRequest(topic=topic(0)))
    await watchers["dev1"].count(1)
    await until(lambda: service.dropped["PERMISSION_DENIED"] == 1)
    assert not service.notifier.troubles


async def test_a_try_again_is_the_same_message(world: Any) -> None:
    """So a receiver that has it already recognises the id."""
    _, sieve, watchers = await watched(world, "dev2")
    tried: list[bytes] = []

    def verdict(message: UMessage) -> int | None:
        if message.attributes.sink.authority_name != "dev2":
            return None
        tried.append(message.attributes.id.SerializeToString())
        return UCode.UNAVAILABLE if len(tried) < 4 else None

    sieve.verdict = verdict
    raw = await world.raw()
    await raw.call(4, 1, v4.SubscribeRequest(topic=topic(0)))
    await watchers["dev2"].count(1)
    assert len(set(tried)) == 1
    assert len(tried) == 4


@pytest.mark.parametrize("seed", seeds(5, quick=1))
async def test_with_random_troubles_every_destination_gets_everything_in_order(
    world: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "NOTIFIER_RETRY_FIRST_MS", 5)
    monkeypatch.setattr(notifier, "NOTIFIER_RETRY_MAX_MS", 20)
    dice = random.Random(seed)
    service, sieve, watchers = await watched(world, "dev1", "dev2", "dev3")
    codes = [UCode.UNAVAILABLE, UCode.DEADLINE_EXCEEDED, UCode.ABORTED]
    sieve.verdict = lambda message: (
        dice.choice(codes) if message.attributes.type == NOTIFICATION and dice.random() < 0.3 else None
    )
    raw = await world.raw()
    for number in range(60):
        await raw.call(4, 1, v4.SubscribeRequest(topic=topic(number)))
    for heard in watchers.values():
        got = numbers(await heard.until(lambda messages: 59 in numbers(messages)))
        assert list(dict.fromkeys(got)) == list(range(60))
    await until(lambda: not service.notifier.troubles)


def test_what_is_held_is_bounded_and_the_destination_that_holds_most_loses_first(tmp_path: Any) -> None:
    db = Database(tmp_path / "s.db", "dev1", outbox_changes_max=640)
    db.open()
    change = Change(("dev1", 1, 1, 0x8000), APP, Status.SUBSCRIBED, 4)
    db.apply([Hold((("small", 1, change, ()),))], 0)
    for start in range(0, 2_000, 100):
        db.apply([Hold(tuple(("big", number, change, ()) for number in range(start, start + 100)))], 0)
    reader = db.reader()
    assert len(reader.held("small", 10)) == 1
    kept = [stored.number for stored in reader.held("big", 10_000)]
    assert kept == list(range(kept[0], 2_000))
    assert 600 < len(kept) < 640
    assert db.tables.dropped == 2_000 - len(kept)
    db.close()


# -- answers first
# ----------------------------------------------------------------------------------------------------------------------


def request(number: int) -> bytes:
    return (1 << 64 | number).to_bytes(16, "big")


def response(number: int) -> UMessage:
    message = UMessage()
    message.attributes.reqid.msb, message.attributes.reqid.lsb = 1, number
    return message


async def test_no_burst_is_so_large_that_answers_are_forgotten() -> None:
    """Each batch after 20,000 answers used to wait for a whole second."""
    answers = ResponseTracker()
    requests = [request(number) for number in range(60_000)]
    for one in requests:
        answers.expect(one)
    answers.sent([response(number) for number in range(60_000)])
    async with asyncio.timeout(ANSWER_WAIT_MS_MAX / 1000 / 2):
        await answers.left(set(requests[:16]))
        await answers.left(set(requests[-16:]))
    assert not len(answers)


async def test_a_change_waits_for_its_answer_and_not_for_one_that_never_comes() -> None:
    answers = ResponseTracker()
    answers.expect(request(1))
    waiting = asyncio.ensure_future(answers.left({request(1), request(99)}))  # the second one was never expected
    await asyncio.sleep(0)
    assert not waiting.done()
    answers.sent([response(1)])
    async with asyncio.timeout(ANSWER_WAIT_MS_MAX / 1000 / 2):
        await waiting
    loop = asyncio.get_running_loop()
    for number in range(100):
        answers.expect(request(1_000 + number))
    start = loop.time()
    for number in range(100):  # dropped responses: one wait for all of them
        await answers.left({request(1_000 + number)})
    assert ANSWER_WAIT_MS_MAX / 1000 * 0.9 < loop.time() - start < ANSWER_WAIT_MS_MAX / 1000 * 3


async def test_the_answer_leaves_before_the_notifications_of_the_change(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "NOTIFIER_GATHER_MS", 0)
    await world.service()
    sieve = Sieve(world.transports["dev1"])
    left: list[int] = []
    sieve.verdict = lambda message: left.append(message.attributes.type)  # type: ignore[func-returns-value]
    raw = await world.raw()
    for number in range(20):
        await raw.call(4, 1, v4.SubscribeRequest(topic=topic(number)))
        await raw.notified[4].count(number + 1)
    assert left.index(NOTIFICATION) > 0
    for at, kind in enumerate(left):
        if kind == NOTIFICATION:
            assert left[: at + 1].count(NOTIFICATION) <= left[:at].count(3), "a response for each before it"


async def test_those_that_wait_for_a_change_are_woken_once_and_after_its_notifications(world: Any) -> None:
    """Not all of them for each batch: in a burst there are thousands."""
    tells = (await world.service()).notifier
    base, woken = tells.sent, list[int]()

    async def wait(number: int) -> None:
        await tells.notified(number)
        woken.append(number - base)

    waiting = [asyncio.ensure_future(wait(base + number)) for number in (5, 1, 3, 3)]
    await asyncio.sleep(0)
    waiting[3].cancel()
    for upto, expected in ((2, [1]), (4, [1, 3]), (9, [1, 3, 5])):
        await tells.notified_up_to(base + upto)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert woken == expected
    assert tells.awaited == []
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_those_that_one_batch_wakes_go_on_some_at_a_time(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each continues with a call, which delays messages."""
    monkeypatch.setattr("usubscription.notifier.WOKEN_AT_ONCE", 4)
    tells = (await world.service()).notifier
    number, woken = tells.sent + 1, list[int]()

    async def wait() -> None:
        await tells.notified(number)
        woken.append(1)

    waiting = [asyncio.ensure_future(wait()) for _ in range(10)]
    await asyncio.sleep(0)
    telling = asyncio.ensure_future(tells.notified_up_to(number))
    turns = []
    while len(woken) < 10:
        before = len(woken)
        await asyncio.sleep(0)
        turns.append(len(woken) - before)
    assert max(turns) <= 4
    await asyncio.gather(telling, *waiting)


class Unreadable:
    """The store of a notifier, whose read fails once; changes meanwhile are passed to the notifier all the same."""

    def __init__(self, store: Any) -> None:
        self._store, self.tried, self.may_fail = store, asyncio.Event(), asyncio.Event()

    async def read(self, ask: Any) -> Any:
        if not self.may_fail.is_set():
            self.tried.set()
            await self.may_fail.wait()
            raise UStatusError(UCode.UNAVAILABLE, "the disk does not answer")
        return await self._store.read(ask)

    def submit(self, event: Any) -> Any:
        return self._store.submit(event)


class NoLull(asyncio.Event):
    """Requests wait until `end`."""

    def set(self) -> None:
        pass

    def end(self) -> None:
        super().set()


async def test_changes_behind_an_unreadable_one_are_not_notified_first(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "CHANGES_WAITING_MAX", 1)  # the others are read from the store
    service, _, watchers = await watched(world, "dev1")
    raw = await world.raw()
    store = service.notifier._store = Unreadable(service.store)
    lull = NoLull()
    monkeypatch.setattr(service.notifier._responses, "lull", lull)
    for number in range(4):
        await raw.call(4, 1, v4.SubscribeRequest(topic=topic(number)))
    lull.end()
    await asyncio.wait_for(store.tried.wait(), WAIT_S)
    await raw.call(4, 1, v4.SubscribeRequest(topic=topic(4)))
    store.may_fail.set()
    assert numbers(await watchers["dev1"].count(5)) == list(range(5))
