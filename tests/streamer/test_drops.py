"""Messages that were dropped after their network was told that they were taken: in the log, in /readyz, in the status
and as a metric, until a person acknowledges it."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from history.file import damage as damages
from history.file.damage import DAMAGE_MAX, Damage, Ledger
from history.log.log import Log
from history.log.streams import TopicsFullError
from streamer.operating import drops, metrics
from streamer.operating.drops import ENTRIES_MAX, PENDING_MAX, REPORT_S, DroppedEntry, Drops, parse
from streamer.operating.states import DEGRADED, READY
from streamer.parts.status import StatusPart
from tests.streamer.conftest import World
from uprotocol import uri as uris
from uprotocol.encoded import EncodedMessage
from uprotocol.message import UMessageBuilder

MakeWorld = Any
EVENT = "messages that were taken have been dropped"
NOW_MS = 1_700_000_000_000


class Clock:
    def __init__(self) -> None:
        self.s = 0.0

    def ms(self) -> int:
        return NOW_MS + int(self.s * 1000)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@asynccontextmanager
async def opened(folder: Path, clock: Clock) -> AsyncIterator[tuple[Log, Drops]]:
    log = await Log.open(folder / "history.db", name="durable")
    try:
        yield log, Drops(log, clock.ms, lambda: clock.s)
    finally:
        await log.close()


def reported(lines: list[Any]) -> Iterator[tuple[str, int, int]]:
    return ((one["endpoint"], one["messages"], one["authorities"]) for one in lines if one["event"] == EVENT)


def texts(log: Log) -> list[str]:
    return [one.detail for one in log.damage if one.kind == damages.DROPPED]


async def test_the_first_drop_is_reported_at_once_and_more_of_them_each_ten_seconds(
    tmp_path: Path, clock: Clock
) -> None:
    async with opened(tmp_path, clock) as (log, kept):
        with structlog.testing.capture_logs() as lines:
            for _ in range(100):  # 25 s
                kept.add("fleet", "vin1", "over_quota", 2)
                kept.turn()
                clock.s += 0.25
            kept.add("other", "vin2", "too_large")
            kept.turn()
            assert list(reported(lines)) == [
                ("fleet", 2, 1),
                ("fleet", 80, 1),
                ("fleet", 80, 1),
                ("other", 1, 1),
            ], "another endpoint does not wait"
            await kept.close()
        assert list(reported(lines))[-1] == ("fleet", 38, 1)
        (fleet, other) = texts(log)
        begin, end = "from 2023-11-14T22:13:20.000Z", "to 2023-11-14T22:13:45.000Z"
        assert fleet == f"endpoint fleet: authority vin1: 200 messages dropped {begin} {end}: over_quota 200"
        assert "vin2" in other
        assert kept.counts == {("fleet", "over_quota"): 200, ("other", "too_large"): 1}


async def test_an_entry_grows_over_restarts_and_a_new_one_begins_after_it_was_acknowledged(
    tmp_path: Path, clock: Clock
) -> None:
    async with opened(tmp_path, clock) as (log, kept):
        kept.add("fleet", "vin1", "over_quota", 5)
        kept.turn()
        await log.saved()
    async with opened(tmp_path, clock) as (log, kept):
        assert kept.lost("fleet") == 5
        (condition,) = kept.conditions()
        assert condition.endpoint == "fleet"
        assert not condition.is_fatal
        assert "5 messages" in condition.text
        assert "authority vin1: 5" not in condition.text
        kept.add("fleet", "vin1", "topics_full", 2)
        kept.turn()
        assert len(log.damage) == 1
        assert parse(log.damage[0].detail, 0)[1].reasons == {"over_quota": 5, "topics_full": 2}
        log.losses.acknowledge()
        assert (kept.lost("fleet"), list(kept.conditions())) == (0, [])
        clock.s += REPORT_S
        kept.add("fleet", "vin1", "over_quota", 3)
        kept.turn()
        assert kept.lost("fleet") == 3
        await log.saved()
    async with opened(tmp_path, clock) as (log, kept):
        assert kept.lost("fleet") == 3


async def test_false_names_fill_neither_memory_nor_log_nor_disk(tmp_path: Path, clock: Clock) -> None:
    async with opened(tmp_path, clock) as (log, kept):
        with structlog.testing.capture_logs() as lines:
            for number in range(5 * PENDING_MAX):
                kept.add("fleet", f"name{number}", "over_quota")
            kept.turn()
            clock.s += REPORT_S
            for number in range(5 * PENDING_MAX, 10 * PENDING_MAX):
                kept.add("fleet", f"name{number}", "over_quota")
            kept.turn()
        assert [messages for _, messages, _ in reported(lines)] == [5 * PENDING_MAX, 5 * PENDING_MAX]
        assert len(log.damage) == ENTRIES_MAX + 1
        assert "other authorities" in texts(log)[-1]
        assert kept.lost("fleet") == 10 * PENDING_MAX, "nothing is lost from the sum"
        assert all(len(str(line)) < 1_000 for line in lines)


@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True),
    st.text(max_size=40),
    st.integers(0, 4 * 10**12),
    st.integers(0, 4 * 10**12),
    st.dictionaries(st.sampled_from(["over_quota", "too_large", "topics_full"]), st.integers(1, 10**9), min_size=1),
)
def test_what_is_kept_is_read_again(
    endpoint: str, authority: str, from_ms: int, to_ms: int, reasons: dict[str, int]
) -> None:
    entry = DroppedEntry(from_ms, to_ms, Counter(reasons))
    assert parse(entry.text((endpoint, authority)), 0) == ((endpoint, authority), entry)


def test_a_text_that_cannot_be_read_is_reported_all_the_same() -> None:
    assert parse("of a later version", 7) == (("", ""), DroppedEntry(7, 7))


def test_a_full_store_takes_acknowledged_rows_of_other_parts_for_new_losses() -> None:
    book = Ledger()
    for number in range(DAMAGE_MAX):
        book.add(
            Damage(1, damages.RECORDS if number % 2 else damages.SUBSCRIPTIONS, number, number + 2, detail=f"{number}")
        )
    lost = Damage(2, damages.DROPPED, detail="first")
    assert book.put(lost)[0] == DAMAGE_MAX + 1
    book.acknowledge(lambda one: one.kind == damages.SUBSCRIPTIONS)
    before = len(book.rows)
    for _ in range(10):
        number, row = book.put(lost)
        assert row == (number, *lost, 0)
        assert book.is_open(number)
    assert len(book.rows) == before
    assert sum(one.kind == damages.RECORDS for one in book.open) == DAMAGE_MAX // 2


# In a whole streamer

FLEET = (
    '[[endpoint]]\nname = "home"\ntransport = "local"\nauthorities = ["cloud"]\nsettings = {{ network = "{n}-home" }}\n'
    '[[endpoint]]\nname = "fleet"\ntransport = "local"\nauthorities = ["*"]\nsettings = {{ network = "{n}-fleet" }}\n'
)
RECORD = '[history]\nrecord = ["//*/8001/1/FFFF"]\n'


async def fleet_world(make_world: MakeWorld, more: str = "") -> World:
    world: World = await make_world(FLEET, more=RECORD + more, start=False)
    section = world.config.streamer.model_copy(update={"admin": "127.0.0.1:0"})
    world.config = world.config.model_copy(update={"streamer": section})
    await world.start()
    world.assembly.ledger.pressure.is_on = lambda _: True  # type: ignore[method-assign]
    return world


async def readyz(world: World) -> dict[str, Any]:
    def ask() -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{world.streamer.admin.port}/readyz", timeout=20) as answer:
            return dict(json.loads(answer.read()))

    return await asyncio.to_thread(ask)


async def test_what_a_quota_drops_is_shown_until_it_is_acknowledged(
    make_world: MakeWorld, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drops, "REPORT_S", 0.05)
    world = await fleet_world(make_world, more="[limits]\nauthority_messages_per_s = 10\n")
    node = await world.node("fleet", "vin1")
    assert (await readyz(world))["status"] == READY
    with structlog.testing.capture_logs() as lines:
        # more than the durable log takes of one authority at once
        await node.send_batch([publish("//vin1/8001/1/8001", f"{n}") for n in range(1_500)])
        await world.taken("fleet")
        dropped = world.assembly.endpoints["fleet"].dropped["over_quota"]
        assert dropped
        await world.until(lambda: sum(messages for _, messages, _ in reported(lines)) == dropped)
    assert {(endpoint, authorities) for endpoint, _, authorities in reported(lines)} == {("fleet", 1)}
    assert world.assembly.drops.lost("fleet") == dropped
    answer = await readyz(world)
    assert (answer["status"], answer["endpoints"]["fleet"]["state"]) == (DEGRADED, DEGRADED)
    assert f"{dropped} messages that were taken have been dropped" in answer["endpoints"]["fleet"]["reason"]
    assert "vin1" in answer["endpoints"]["fleet"]["reason"]
    assert answer["endpoints"]["home"]["state"] == READY
    lost = {one.name: one.lost for one in world.parts.of(StatusPart).status().endpoints}
    assert lost == {"home": 0, "fleet": dropped}
    text = metrics.expose(world.parts.samples).decode()
    assert f'up_streamer_lost_total{{endpoint="fleet",reason="over_quota"}} {dropped}.0' in text
    assert 'up_streamer_log_damage{kind="dropped",log="durable"} 1.0' in text
    await world.assembly.logs.durable.saved()
    await world.restart()
    assert (await readyz(world))["status"] == DEGRADED
    seen = damages.acknowledge(world.config.streamer.data_dir / "history.db")
    assert [one.kind for one in seen] == [damages.DROPPED]
    await world.until(lambda: not world.parts.problems())
    assert (await readyz(world))["status"] == READY
    assert world.assembly.drops.lost("fleet") == 0


async def test_what_was_dropped_just_before_the_stop_is_kept(make_world: MakeWorld, publish: Any) -> None:
    world = await fleet_world(make_world, more="[limits]\nauthority_messages_per_s = 10\n")
    for count in (100, 50):
        ingress = world.assembly.ingresses["fleet"]
        ingress.on_receive_batch([publish("//vin1/8001/1/8001", "x") for _ in range(count)])
    dropped = world.assembly.endpoints["fleet"].dropped["over_quota"]
    await world.restart()
    assert world.assembly.drops.lost("fleet") == dropped


async def test_what_is_too_large_or_beyond_the_topics_is_lost(
    make_world: MakeWorld, publish: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await fleet_world(make_world, more="[limits]\nmessage_bytes_max = 65536\n")
    ingress, durable = world.assembly.ingresses["fleet"], world.assembly.logs.durable
    ingress.on_receive_batch([publish("//vin1/8001/1/8001", "x" * 70_000)])

    def full(*_: Any, **__: Any) -> int:
        raise TopicsFullError("authority_topics_full", "too many topics")

    monkeypatch.setattr(durable, "stream_id", full)
    ingress.on_receive_batch([publish("//vin1/8001/1/8002", "x") for _ in range(3)])
    counts = world.assembly.drops.counts
    assert counts == {("fleet", "too_large"): 1, ("fleet", "authority_topics_full"): 3}


async def test_what_nobody_wants_or_may_send_and_requests_are_not_lost(make_world: MakeWorld, publish: Any) -> None:
    world = await fleet_world(make_world, more="[limits]\nauthority_messages_per_s = 1\nmessage_bytes_max = 65536\n")
    ingress = world.assembly.ingresses["fleet"]
    unwanted = [publish("//vin1/8002/1/8001", "x" * size) for size in (1, 70_000) for _ in range(50)]
    spoofed = [publish("//cloud/8001/1/8001", "x")] * 3
    method, caller = uris.parse("//cloud/9001/1/1"), uris.parse("//vin1/8001/1/0")
    requests = [UMessageBuilder.request(caller, method, 60_000).build() for _ in range(50)]
    ingress.on_receive_batch([*unwanted, *spoofed, *requests])
    dropped = world.assembly.endpoints["fleet"].dropped
    assert dropped["over_quota"] > 50
    assert (dropped["too_large"], dropped["spoofed"]) == (50, 2), "the third is beyond the quota of a false name"
    assert not world.assembly.drops.counts


async def test_what_a_log_refuses_is_lost_if_its_network_can_not_send_it_again(
    make_world: MakeWorld, publish: Any
) -> None:
    world = await fleet_world(make_world)
    ingress = world.assembly.ingresses["fleet"]
    batch = [publish("//vin1/8001/1/8001", f"{n}") for n in range(2)]
    encoded = [EncodedMessage.of(one) for one in batch]
    for one in encoded:
        ingress.verdict_of(one)
    ingress._redelivers = True
    ingress._not_taken(encoded)
    assert not world.assembly.drops.counts
    ingress._redelivers = False
    ingress._not_taken(encoded)
    assert world.assembly.drops.counts == {("fleet", "refused"): 2}


async def test_what_a_transport_drops_unread_is_lost(make_world: MakeWorld, publish: Any) -> None:
    world = await fleet_world(make_world)
    ingress, transport = (
        world.assembly.ingresses["fleet"],
        world.assembly.endpoints["fleet"].transport,
    )
    transport.dropped["too_large"] += 4  # type: ignore[attr-defined]
    transport.dropped["malformed"] += 9  # type: ignore[attr-defined]
    await world.until(lambda: world.assembly.drops.counts)
    ingress.gather_lost()
    assert world.assembly.drops.counts == {("fleet", "too_large"): 4}
    await world.until(lambda: world.assembly.drops.lost("fleet"))
    assert "other authorities" in texts(world.assembly.logs.durable)[0]
