"""Copies of our subscriptions in other services are found and ended: after a Reset, the loss of the store, or a
notification."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from storage.disk import Disk
from uprotocol import uri as uris
from uprotocol.core.usubscription.v3 import usubscription_pb2 as v3
from uprotocol.core.usubscription.v4 import usubscription_pb2 as v4
from uprotocol.message import UMessageBuilder
from usubscription import audit
from usubscription.audit import Partners

WAIT_S = 20
TOPICS = {name: uris.uri(name, 0x20, 1, 0x8001) for name in "bc"}


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await condition():  # noqa: ASYNC110 - state of a store, which has no event
            await asyncio.sleep(0.01)


async def subscribed(raw: Any, major: int, topic: Any) -> None:
    request: Any = v4.SubscribeRequest(topic=topic) if major == 4 else v3.SubscriptionRequest(topic=topic)
    heard = len(raw.notified[major].heard)
    await raw.call(major, 1, request)
    await raw.notified[major].count(heard + 2)


async def three(world: Any, **options: Any) -> tuple[Any, Any]:
    """Services a, b and c; a has a subscription at b (version 3) and one at c (version 4)."""
    for name in "bc":
        await world.service(name)
    await world.service("a", **options)
    raw = await world.raw("a")
    await subscribed(raw, 3, TOPICS["b"])
    await subscribed(raw, 4, TOPICS["c"])
    for name in "bc":
        assert len(await world.services[name].subscriptions()) == 1
    return world.services["a"], raw


async def no_copies(world: Any) -> bool:
    return not any([await world.services[name].subscriptions() for name in "bc"])


async def no_partners(world: Any) -> bool:
    return not world.services["a"].remote.partners.known


async def test_a_reset_ends_our_copies_at_every_other_service(world: Any) -> None:
    await three(world, audit_ms=60_000, reset="all")
    other = await world.raw("a", ue_id=0, version=9)
    await other.call(4, 6)
    await until(lambda: no_copies(world))

    async def forgotten() -> bool:
        world.services["a"].remote.auditor.now()
        return await no_partners(world)

    await until(forgotten)


@pytest.mark.parametrize("audited_at", ["start", "reconnect"])
async def test_a_reset_that_the_others_missed_is_made_good_later(world: Any, audited_at: str) -> None:
    await three(world, audit_call_ms=100, audit_ms=600_000, reset="all")
    for name in "bc":
        world.forwarders["a", name].lose = lambda message: True
    other = await world.raw("a", ue_id=0, version=9)
    await other.call(4, 6)
    await asyncio.sleep(0.3)
    if audited_at == "start":
        await world.stop("a")
    for name in "bc":
        assert len(await world.services[name].subscriptions()) == 1
        world.forwarders["a", name].lose = lambda message: False
    if audited_at == "start":
        await world.service("a")
    else:
        world.transports["a"].disconnect()
        world.transports["a"].reconnect()
    await until(lambda: no_copies(world))


async def test_after_the_store_was_lost_the_others_are_asked_too(world: Any) -> None:
    await three(world)
    await world.stop("a")
    for left in world.path.glob("a.db*"):
        if not left.name.endswith(".partners"):
            left.unlink()
    await world.service("a")
    await until(lambda: no_copies(world))


async def test_with_everything_lost_a_word_from_the_other_service_is_enough(world: Any) -> None:
    await three(world)
    await world.stop("a")
    for left in world.path.glob("a.db*"):
        left.unlink()
    await world.service("a")
    for name, major in (("b", 3), ("c", 4)):
        sink = uris.uri("a", 0, major, 0)
        change: Any = v4.Subscription(topic=TOPICS[name], subscriber=sink, status=3)
        if major == 3:
            change = v3.Update(topic=TOPICS[name], subscriber=v3.SubscriberInfo(uri=sink))
            change.status.state = v3.SubscriptionStatus.SUBSCRIBED
        await world.transports[name].send(
            UMessageBuilder.notification(uris.uri(name, 0, major, 0x8000), sink).pack(change)
        )
    await until(lambda: no_copies(world))


async def test_a_subscription_that_stands_is_not_touched_by_any_of_it(world: Any) -> None:
    service, raw = await three(world)
    await subscribed(raw, 4, uris.uri("b", 0x20, 1, 0x8002))
    for _ in range(3):
        service.remote.auditor.now()
        await asyncio.sleep(0.1)
    assert {row.status.name for row in await service.subscriptions()} == {"SUBSCRIBED"}
    assert len(await world.services["b"].subscriptions()) == 2
    assert sorted(service.remote.partners.known) == [("b", 3), ("b", 4), ("c", 4)]


@pytest.mark.parametrize("known_before", [False, True])
async def test_a_partner_that_gets_a_command_during_an_audit_is_not_forgotten(world: Any, known_before: bool) -> None:
    """The link of the command may be stored after the audit has read the links."""
    for name in "ab":
        await world.service(name)
    remote = world.services["a"].remote
    if known_before:
        await remote.partners.remember(("b", 4))
    fetch = remote.auditor._fetch

    async def interrupted(*arguments: Any) -> Any:
        answer = await fetch(*arguments)
        await remote.partners.remember(("b", 4))
        return answer

    remote.auditor._fetch = interrupted
    assert await remote.auditor._audit("b", 4)
    assert ("b", 4) in remote.partners.known
    remote.auditor._fetch = fetch

    async def forgotten() -> bool:
        remote.auditor.now()
        return await no_partners(world)

    await until(forgotten)


async def test_many_partners_are_asked_in_rounds_and_all_of_them_in_the_end(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "PARTNERS_A_ROUND_MAX", 3)
    (world.path / "a.db.partners").write_text(
        str([["b", 4], *([f"gone{number}", 4] for number in range(20)), ["c", 4]]).replace("'", '"')
    )
    for name in "bc":
        await world.service(name)
    await world.service("a", audit_call_ms=50)

    async def asked() -> bool:
        left = {authority for authority, _ in world.services["a"].remote.partners.known}
        # partners that do not answer are kept; the others have no subscription of ours
        return left == {f"gone{number}" for number in range(20)}

    await until(asked)


# -- the file
# ----------------------------------------------------------------------------------------------------------------------


async def test_what_is_remembered_is_on_disk_when_remember_returns(tmp_path: Path) -> None:
    known = Partners(tmp_path / "p")
    await asyncio.gather(*(known.remember((f"v{number}", 4)) for number in range(500)))
    again = Partners(tmp_path / "p")
    await again.load()
    assert again.known.keys() == known.known.keys()
    known.forget(("v7", 4), known.remembered)
    await known.close()
    await again.load()
    assert ("v7", 4) not in again.known


async def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "PARTNERS_MAX", 10)
    known = Partners(tmp_path / "p")
    for number in range(25):
        await known.remember((f"v{number}", 4))
    assert [authority for authority, _ in known.known] == [f"v{number}" for number in range(15, 25)]


@pytest.mark.parametrize("content", ["", "[", "[1]", '[["a"]]', '[["a", 1e999]]', '{"a": 1}', "\x00\xff"])
async def test_a_file_that_cannot_be_read_does_no_harm(tmp_path: Path, content: str) -> None:
    (tmp_path / "p").write_text(content)
    known = Partners(tmp_path / "p")
    await known.load()
    assert known.known == {}
    await known.remember(("b", 4))
    again = Partners(tmp_path / "p")
    await again.load()
    assert list(again.known) == [("b", 4)]


async def test_a_disk_that_refuses_the_file_holds_no_command(tmp_path: Path) -> None:
    known = Partners(tmp_path / "none" / "p")
    async with asyncio.timeout(WAIT_S):
        await known.remember(("b", 4))
    assert ("b", 4) in known.known


async def test_what_comes_soon_after_a_save_shares_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subscriptions to a fleet add one partner after the other."""
    monkeypatch.setattr(audit, "PARTNERS_SAVE_MS", 500)
    saves: list[str] = []

    class Counting(Disk):
        def replace_text(self, path: Path, text: str) -> None:
            saves.append(text)
            super().replace_text(path, text)

    known = Partners(tmp_path / "p", Counting())
    await known.remember(("first", 4))
    later = []
    for number in range(20):
        later.append(asyncio.ensure_future(known.remember((f"v{number}", 4))))
        await asyncio.to_thread(lambda: None)
    await asyncio.gather(*later)
    assert len(saves) == 2
    assert "v19" in saves[1]


async def test_nobody_overtakes_the_first_command_while_its_service_is_being_noted(tmp_path: Path) -> None:
    """The second command to a service waits for the disk like the first one, and is sent after it."""
    written, order = threading.Event(), []

    class Slow(Disk):
        def replace_text(self, path: Path, text: str) -> None:
            written.wait(WAIT_S)
            super().replace_text(path, text)

    known = Partners(tmp_path / "p", Slow())

    async def remember(name: str) -> None:
        await known.remember(("b", 4))
        order.append(name)

    commands = [asyncio.ensure_future(remember(name)) for name in ("first", "second", "third")]
    for _ in range(20):
        await asyncio.sleep(0)
    assert order == []
    written.set()
    await asyncio.wait_for(asyncio.gather(*commands), WAIT_S)
    assert order == ["first", "second", "third"]
    assert (tmp_path / "p").read_text() == '[["b", 4]]'
    await known.close()
